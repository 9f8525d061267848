//! Start-up of a CUDA device in phases, so that ranks can meet at a barrier between any two.
//!
//! `Opened → Compiled → Connected → Loaded → Allocated → Resolved → Warm → Captured → CudaDevice`; each phase takes what the one before it
//! gave. Ranks that are connected meet by themselves before each phase in which their kernels wait for each other.
//! **Invariants:** everything that allocates, compiles, captures or waits happens here; every configured bucket is captured
//! or the start fails; afterwards the device is as before its first step.

use super::arena::{Arena, StepAddresses, page_bytes};
use super::device::CudaDevice;
use super::error::{CudaError, During, check_compiler};
use super::exchange::{ExchangeShape, Exchanger};
use super::gpu::Gpu;
use super::graph::Graph;
use super::ledger::Ledger;
use super::libs::Libraries;
use super::modules::Modules;
use super::nvrtc::Nvrtc;
use super::nvtx;
use super::options::{CudaOptions, FREE_MIN, LibraryReport, PrepareReport, Transport};
use super::program::{Planned, Program, Work};
use super::ring::Rings;
use super::weights::{self, Weights};
use crate::fault::FaultKind;
use crate::model;
use slotgraph_kernels::BufferId;
use slotgraph_kernels::launch::{self, GpuFacts};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// What every phase carries on.
pub(super) struct Base {
    pub options: CudaOptions,
    pub gpu: Arc<Gpu>,
    nvrtc: Nvrtc,
    pub facts: GpuFacts,
    pub planned: Vec<Planned>,
    /// Before everything it waits beside: dropped first, it frees the others of this rank.
    pub exchange: Option<Exchanger>,
    pub ledger: Ledger,
    pub report: PrepareReport,
}

impl Base {
    fn phase<T>(
        &mut self,
        name: &'static str,
        work: impl FnOnce(&mut Base) -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        let _range = nvtx::range(format_args!("prepare/{name}"));
        let start = Instant::now();
        self.gpu.bind().during(|| format!("preparing: {name}"))?;
        let done = work(self)?;
        self.report.phases_ms.push((name, start.elapsed().as_secs_f64() * 1e3));
        Ok(done)
    }

    /// Architecture, compiler and options: the device's part of the contract hash.
    pub fn contract_identity(&self) -> String {
        self.nvrtc.identity(&self.facts.arch)
    }

    /// Plans and launches of every bucket for a pool of `pages` pages.
    fn plan(&mut self, pages: usize) -> Result<(), CudaError> {
        let options = &mut self.options;
        options.limits.pages = pages;
        let build = |bucket: &usize| {
            let plan = model::build(&options.spec, &options.limits, options.rank, *bucket)?;
            Planned::new(plan, &self.facts, matches!(options.transport, Transport::P2p(_)))
        };
        self.planned = options.limits.buckets.iter().map(build).collect::<Result<_, _>>()?;
        Ok(())
    }
}

/// Libraries and context are there, plans are made.
pub struct Opened(Base);

/// All kernels are compiled and on the GPU.
pub struct Compiled {
    base: Base,
    modules: Modules,
}

/// This rank has met the others.
pub struct Connected {
    base: Base,
    modules: Modules,
}

/// The weights are on the GPU, packed.
pub struct Loaded {
    base: Base,
    modules: Modules,
    weights: Weights,
}

/// Every buffer but the page pool has its address.
pub struct Allocated {
    base: Base,
    modules: Modules,
    weights: Weights,
    arena: Arena,
}

/// Every launch has its addresses.
pub struct Resolved {
    pub(super) base: Base,
    pub(super) modules: Modules,
    pub(super) weights: Weights,
    pub(super) arena: Arena,
    pub(super) programs: Vec<Program>,
    pub(super) rings: Rings,
}

/// Every bucket ran once, op by op.
pub struct Warm(Resolved);

/// Every bucket's graph is on the GPU (without graphs: nothing was to be done).
pub struct Captured {
    // The graphs hold the memory of what is below them, and a communicator that waits for them.
    graphs: Vec<Graph>,
    resolved: Resolved,
}

impl Opened {
    /// Finds the libraries, opens the device, and plans every bucket (for the fewest pages: the pool's size comes later).
    pub fn open(options: CudaOptions) -> Result<Opened, CudaError> {
        const PAGES_MIN: usize = 2;
        let _range = nvtx::range("prepare/open");
        let start = Instant::now();
        let libraries = Libraries::load(&options.lib_dirs)?;
        let nvrtc = Nvrtc::new(&libraries.nvrtc)?;
        let gpu = Gpu::open(options.ordinal)?;
        check_compiler(nvrtc.version, &nvrtc.path, gpu.driver_version)?;
        let (free, total) = gpu.memory().during(|| "reading the free memory".into())?;

        let mut report = PrepareReport { gpu: Some(gpu.identity.clone()), ..PrepareReport::default() };
        report.memory.free_at_start = free;
        report.memory.total = total;
        let (major, minor) = nvrtc.version;
        for (name, version, found) in [
            ("libcuda", gpu.identity.driver.clone(), &libraries.driver),
            ("libnvrtc", format!("{major}.{minor}"), &libraries.nvrtc),
        ] {
            report.libraries.push(LibraryReport { name, version, path: found.path.clone(), why: found.why.clone() });
        }
        let facts = GpuFacts {
            sm_count: (gpu.identity.sm_count / options.ranks_on_device.max(1)).max(1),
            arch: gpu.identity.arch.clone(),
            shared_max: gpu.identity.shared_max,
            pdl: options.pdl && gpu.capability.0 >= 9,
        };
        let mut base =
            Base { options, gpu, nvrtc, facts, planned: Vec::new(), exchange: None, ledger: Ledger::default(), report };
        base.plan(PAGES_MIN)?;
        if base.options.graph && !base.options.transport.captures() {
            let reason = "the host-staged exchange cannot be captured: use --cuda-graph off, or another --transport";
            return Err(CudaError::Unsupported(reason.into()));
        }
        let ranks = base.options.rank.ranks;
        if (ranks > 1) == matches!(base.options.transport, Transport::Single) {
            return Err(CudaError::Unsupported(format!("{ranks} ranks and their transport do not go together")));
        }
        base.report.phases_ms.push(("context", start.elapsed().as_secs_f64() * 1e3));
        Ok(Opened(base))
    }

    /// Compiles every kernel of every plan (or takes it from the cache) and loads it.
    pub fn compile(self) -> Result<Compiled, CudaError> {
        let Opened(mut base) = self;
        let mut modules = Modules::default();
        base.phase("nvrtc", |base| {
            let packing = weights::launches(&base.planned[0].plan.weights, &*base.options.source);
            let stamp = launch::stamp(0);
            let launches = base.planned.iter().flat_map(Planned::launches).chain(&packing).chain([&stamp]);
            modules.load(launches, &base.nvrtc, &base.options.cache, &base.gpu)
        })?;
        base.report.modules = modules.report.clone();
        Ok(Compiled { base, modules })
    }
}

impl Compiled {
    /// Meets the other ranks: takes the exchange's scratch and opens the ways, or joins the communicator.
    pub fn connect(self) -> Result<Connected, CudaError> {
        let Compiled { mut base, modules } = self;
        base.phase("communicators", |base| {
            let Base { options, gpu, ledger, report, exchange, .. } = base;
            let shape = ExchangeShape {
                rank: options.rank.rank,
                ranks: options.rank.ranks,
                rows_max: options.limits.rows_max(),
                hidden: options.spec.hidden,
            };
            *exchange = Exchanger::connect(gpu, options, shape, ledger, &mut report.libraries)?;
            report.exchange = exchange.as_ref().map(Exchanger::report);
            Ok(())
        })?;
        Ok(Connected { base, modules })
    }
}

impl Connected {
    /// Reads, copies and packs the weights.
    pub fn load_weights(self) -> Result<Loaded, CudaError> {
        let Connected { mut base, modules } = self;
        let weights = base.phase("weights", |base| {
            let (source, progress) = (base.options.source.clone(), base.options.progress.clone());
            let specs = &base.planned[0].plan.weights;
            let (weights, report) =
                weights::upload(&base.gpu, &modules, specs, &*source, &mut base.ledger, progress.as_ref())?;
            base.report.memory.weights = report.device_bytes;
            base.report.weights = report;
            Ok(weights)
        })?;
        Ok(Loaded { base, modules, weights })
    }
}

impl Loaded {
    /// Allocates every buffer but the page pool.
    pub fn allocate(self) -> Result<Allocated, CudaError> {
        let Loaded { mut base, modules, weights } = self;
        let arena = base.phase("arena", |base| {
            let plans: Vec<_> = base.planned.iter().map(|planned| planned.plan.clone()).collect();
            let launches = base.planned.iter().flat_map(Planned::launches);
            Arena::allocate(&base.gpu, &plans, launches, &mut base.ledger)
        })?;
        Ok(Allocated { base, modules, weights, arena })
    }
}

impl Allocated {
    /// Pages that every rank's memory allows: ranks compare, and all take the smallest.
    pub fn pages(&self) -> Result<usize, CudaError> {
        let base = &self.base;
        if let Some(exchange) = &base.exchange {
            // Ranks that share a GPU have all taken theirs before its free memory is read.
            exchange.barrier("the barrier before the pools")?;
        }
        let (free, _) = base.gpu.memory().during(|| "reading the free memory".into())?;
        let page = page_bytes(&base.planned[0].plan, base.options.limits.pages);
        let useful = base.options.limits.slots_max * base.options.limits.pages_per_slot + 1;
        let mut pages = base.options.kv.pages(page, free, useful);
        if let Some(exchange) = &base.exchange {
            pages = exchange.least("the comparison of pools", pages)?;
        }
        // Page 0 belongs to pad rows, and a pool must hold at least one page more.
        if pages < 2 {
            let needed = 2 * page as u64;
            let remedy = "raise --kv-memory, or lower --max-slots or --max-model-len";
            return Err(CudaError::Memory { what: "the smallest KV pool".into(), needed, free, remedy });
        }
        Ok(pages)
    }

    /// Plans again with `pages` pages, allocates the pool, and fills in every address.
    pub fn allocate_kv(self, pages: usize) -> Result<Resolved, CudaError> {
        let Allocated { mut base, mut modules, weights, mut arena } = self;
        base.phase("kv", |base| {
            base.plan(pages)?;
            // Nothing new to compile, unless a kernel is compiled for the number of pages.
            let launches = base.planned.iter().flat_map(Planned::launches);
            modules.load(launches, &base.nvrtc, &base.options.cache, &base.gpu)?;
            let plans: Vec<_> = base.planned.iter().map(|planned| planned.plan.clone()).collect();
            let (free, _) = base.gpu.memory().during(|| "reading the free memory".into())?;
            let needed = (page_bytes(&plans[0], pages) * pages) as u64;
            if needed > free {
                let remedy = "lower --kv-memory or --kv-pages";
                return Err(CudaError::Memory { what: format!("a pool of {pages} pages"), needed, free, remedy });
            }
            base.report.modules = modules.report.clone();
            arena.allocate_kv(&plans, &mut base.ledger)?;
            base.report.memory.arena = arena.bytes();
            base.report.memory.pages = pages;
            Ok(())
        })?;
        let rings = Rings::new(&base.planned[0].plan, &base.options.limits)?;
        let named = exchanged(&base, &arena);
        if let Some(exchange) = &mut base.exchange {
            exchange.place(named);
        }
        let exchange = base.exchange.as_ref();
        let addresses = StepAddresses { arena: &arena, weights: &weights, exchange, diverted: None };
        let resolve = |planned| Program::resolve(planned, &modules, &addresses, &base.facts);
        let programs = base.planned.iter().map(resolve).collect::<Result<Vec<_>, _>>()?;
        Ok(Resolved { base, modules, weights, arena, programs, rings })
    }
}

/// Addresses of the buffers that exchanges of a library, or through the host, name.
fn exchanged(base: &Base, arena: &Arena) -> HashMap<BufferId, u64> {
    let exchanges = base.planned.iter().flat_map(|planned| &planned.work).filter_map(|work| match work {
        Work::Exchange(exchange) => Some(exchange),
        Work::Launches(_) => None,
    });
    let named = exchanges.flat_map(|exchange| [exchange.partial, exchange.gathered]);
    named.map(|id| (id, arena.address(id).expect("only the page pool is allocated late"))).collect()
}

impl Resolved {
    /// Runs every bucket once with pad rows alone, op by op: all first-use work of the driver happens here, outside any
    /// capture, and a kernel that faults does so with its name.
    pub fn warm(mut self) -> Result<Warm, CudaError> {
        let gpu = self.base.gpu.clone();
        gpu.bind().during(|| "warming up".into())?;
        self.barrier("the barrier before the warm-up")?;
        let start = Instant::now();
        let _range = nvtx::range("prepare/warm");
        self.clear()?;
        for index in 0..self.programs.len() {
            let step = index as u64 + 1;
            let bucket = self.programs[index].bucket;
            self.rings.write_empty(&mut self.arena, step, bucket, &self.base.options)?;
            for op in 0..self.programs[index].ops() {
                let program = &self.programs[index];
                program.launch_op(&gpu, op, self.base.exchange.as_mut())?;
                settle(&gpu, self.base.exchange.as_ref(), || format!("running {}", program.describe(op)))?;
            }
            self.expect_published(step, bucket, "the warm-up step")?;
        }
        self.clear()?;
        self.base.report.phases_ms.push(("warm", start.elapsed().as_secs_f64() * 1e3));
        Ok(Warm(self))
    }

    /// Ready without a first run: for a probe that launches op by op and must itself see the first launch that fails.
    pub fn cold(mut self) -> Result<Warm, CudaError> {
        self.base.gpu.bind().during(|| "clearing the arena".into())?;
        self.clear()?;
        Ok(Warm(self))
    }

    /// Waits for the other ranks, if there are some.
    fn barrier(&self, place: &'static str) -> Result<(), CudaError> {
        self.base.exchange.as_ref().map_or(Ok(()), |exchange| exchange.barrier(place))
    }

    /// As before the first step: everything zero, every seat empty.
    fn clear(&mut self) -> Result<(), CudaError> {
        self.arena.reset()?;
        self.rings.empty_seats(&self.arena, &self.base.gpu)
    }

    fn expect_published(&self, step: u64, bucket: usize, what: &str) -> Result<(), CudaError> {
        if self.rings.is_published(&self.arena, step) {
            return Ok(());
        }
        let reason = format!("{what} ran and did not publish step {step}");
        Err(CudaError::Graph { bucket, reason })
    }
}

/// Waits until the stream is empty, or a rank is lost.
pub(super) fn settle(gpu: &Gpu, exchange: Option<&Exchanger>, doing: impl Fn() -> String) -> Result<(), CudaError> {
    match exchange {
        Some(exchange) => exchange.wait(doing),
        None => gpu.wait().during(doing),
    }
}

impl Warm {
    /// Captures, audits, instantiates and uploads every bucket. Without graphs it is done as it is.
    pub fn capture(self) -> Result<Captured, CudaError> {
        let Warm(mut resolved) = self;
        let gpu = resolved.base.gpu.clone();
        gpu.bind().during(|| "capturing".into())?;
        let mut graphs = Vec::new();
        if resolved.base.options.graph {
            // No rank's kernels may wait for one that allocates while it instantiates.
            resolved.barrier("the barrier before the captures")?;
            let start = Instant::now();
            graphs = capture_all(&mut resolved)?;
            resolved.base.report.phases_ms.push(("capture", start.elapsed().as_secs_f64() * 1e3));
            let start = Instant::now();
            for graph in &mut graphs {
                graph.instantiate()?;
            }
            resolved.base.report.phases_ms.push(("upload", start.elapsed().as_secs_f64() * 1e3));
        }
        Ok(Captured { graphs, resolved })
    }
}

impl Captured {
    /// Replays each graph once with pad rows, together with the other ranks, and is ready.
    pub fn replay(self) -> Result<CudaDevice, CudaError> {
        let Captured { graphs, mut resolved } = self;
        let gpu = resolved.base.gpu.clone();
        gpu.bind().during(|| "replaying".into())?;
        if !graphs.is_empty() {
            resolved.barrier("the barrier before the first replays")?;
            let start = Instant::now();
            replay_each(&mut resolved, &graphs)?;
            resolved.base.report.phases_ms.push(("replay", start.elapsed().as_secs_f64() * 1e3));
        }
        let memory = &mut resolved.base.report.memory;
        memory.graphs = graphs.iter().map(|graph| graph.report.graph_bytes).sum();
        (memory.free, _) = gpu.memory().during(|| "reading the free memory".into())?;
        if memory.free < FREE_MIN {
            let remedy = "lower --kv-memory, --max-slots or --max-model-len";
            let what = "what the driver needs beside a ready device".into();
            return Err(CudaError::Memory { what, needed: FREE_MIN, free: memory.free, remedy });
        }
        resolved.base.report.graphs = graphs.iter().map(|graph| graph.report.clone()).collect();
        resolved.barrier("the barrier before readiness")?;
        Ok(CudaDevice::new(resolved, graphs))
    }
}

fn capture_all(resolved: &mut Resolved) -> Result<Vec<Graph>, CudaError> {
    let gpu = resolved.base.gpu.clone();
    let planted = |kind: FaultKind, bucket: usize| {
        resolved.base.options.fault.is_some_and(|fault| fault.kind == kind && fault.at == bucket as u64)
    };
    let mut graphs = Vec::with_capacity(resolved.programs.len());
    for program in &resolved.programs {
        let bucket = program.bucket;
        let _range = nvtx::range(format_args!("capture/b{bucket}"));
        // Waiting for a stream that is being captured is forbidden and spoils the capture.
        let inside = || if planted(FaultKind::CaptureFail, bucket) { gpu.wait() } else { Ok(()) };
        let ledger = match planted(FaultKind::UnregisteredPointer, bucket) {
            true => &resolved.base.ledger.without("x"),
            false => &resolved.base.ledger,
        };
        graphs.push(Graph::capture(&gpu, program, ledger, resolved.base.exchange.as_mut(), inside)?);
    }
    Ok(graphs)
}

/// Replays every graph once with pad rows, so that the first request meets a warm one; then clears the traces of it.
fn replay_each(resolved: &mut Resolved, graphs: &[Graph]) -> Result<(), CudaError> {
    let gpu = resolved.base.gpu.clone();
    for (index, graph) in graphs.iter().enumerate() {
        let (step, bucket) = (index as u64 + 1, resolved.programs[index].bucket);
        resolved.rings.write_empty(&mut resolved.arena, step, bucket, &resolved.base.options)?;
        let doing = || format!("replaying the graph of bucket {bucket} for the first time");
        // SAFETY: the arena and the weights are live in `resolved` past the wait.
        unsafe { graph.launch() }.during(doing)?;
        settle(&gpu, resolved.base.exchange.as_ref(), doing)?;
        resolved.expect_published(step, bucket, "its first replay")?;
    }
    resolved.clear()
}
