//! The CUDA device at work: an entry into the ring, one launch, and a look at the output ring.
//!
//! Driven by the engine loop or a rank thread through the `Device` trait. **Invariants:** a step allocates nothing, captures
//! nothing and waits for nothing (`counters` proves it; the host-staged exchange alone waits, by its nature); steps settle
//! in order; after an error the device refuses everything.

use super::arena::Arena;
use super::error::{CudaError, During};
use super::exchange::Exchanger;
use super::gpu::{Counters, Gpu};
use super::graph::Graph;
use super::ledger::{Audit, Ledger};
use super::modules::Modules;
use super::nvtx;
use super::options::{CudaOptions, PrepareReport};
use super::prepare::{Base, Opened, Resolved};
use super::program::{Planned, Program};
use super::ring::Rings;
use super::sabotage::Sabotage;
use super::timing::Stamped;
use super::weights::Weights;
use crate::device::{BucketFacts, Device, DeviceError, DeviceFacts};
use crate::fault::Fault;
use crate::step::{RowFeed, StepInput, StepLimits, StepOutput};
use slotgraph_kernels::contract;
use slotgraph_kernels::launch::GpuFacts;
use std::sync::Arc;
use std::time::Instant;

/// Polls without news between two looks at the stream's health.
const POLLS_PER_CHECK: u32 = 4096;

/// A GPU with every plan prepared.
pub struct CudaDevice {
    // Fields drop in this order: graphs, then the programs, then the communicator, which waits for its graphs to go, then functions and the
    // memory that all of them name, then the context.
    pub(super) graphs: Vec<Graph>,
    pub(super) stamped: Option<Stamped>,
    pub(super) sabotage: Sabotage,
    pub(super) programs: Vec<Program>,
    pub(super) exchange: Option<Exchanger>,
    pub(super) modules: Modules,
    pub(super) arena: Arena,
    pub(super) weights: Weights,
    pub(super) planned: Vec<Planned>,
    pub(super) facts: GpuFacts,
    pub(super) ledger: Ledger,
    pub(super) rings: Rings,
    pub(super) options: CudaOptions,
    report: PrepareReport,
    contract_hash: String,
    /// Number of the newest step enqueued, and of the newest settled.
    pub(super) enqueued: u64,
    pub(super) settled: u64,
    /// Steps run, by bucket.
    runs: Vec<u64>,
    polls: u32,
    /// Since when the oldest step in flight is known to run.
    running_since: Option<Instant>,
    lost: Option<String>,
    pub(super) gpu: Arc<Gpu>,
}

impl CudaDevice {
    /// All phases in a row; where there are other ranks, beside theirs.
    pub fn prepare(options: CudaOptions) -> Result<CudaDevice, CudaError> {
        let _range = nvtx::range("prepare");
        let allocated = Opened::open(options)?.compile()?.connect()?.load_weights()?.allocate()?;
        let pages = allocated.pages()?;
        allocated.allocate_kv(pages)?.warm()?.capture()?.replay()
    }

    pub(super) fn new(resolved: Resolved, graphs: Vec<Graph>) -> CudaDevice {
        let contract_hash = contract_hash(&resolved.base);
        let Resolved { base, modules, weights, arena, programs, rings } = resolved;
        let Base { options, gpu, facts, planned, exchange, ledger, report, .. } = base;
        CudaDevice {
            runs: vec![0; programs.len()],
            graphs,
            programs,
            exchange,
            stamped: None,
            sabotage: Sabotage::default(),
            modules,
            arena,
            weights,
            planned,
            facts,
            ledger,
            rings,
            options,
            report,
            contract_hash,
            enqueued: 0,
            settled: 0,
            polls: 0,
            running_since: None,
            lost: None,
            gpu,
        }
    }

    /// The limits in force: those of the options, with the pages that the pool really has.
    pub fn limits(&self) -> &StepLimits {
        &self.options.limits
    }

    /// What preparing took and gave.
    pub fn report(&self) -> &PrepareReport {
        &self.report
    }

    /// What was done since the context was opened. After `prepare` only launches and replays may grow.
    pub fn counters(&self) -> Counters {
        self.gpu.counters()
    }

    /// Bytes that are free on the GPU now, whoever holds the rest.
    pub fn free_memory(&self) -> Result<u64, CudaError> {
        let doing = || "reading the free memory".to_owned();
        self.gpu.bind().during(doing)?;
        Ok(self.gpu.memory().during(doing)?.0)
    }

    /// Exchanges that went through the host, or into a library, one by one.
    pub fn round_trips(&self) -> u64 {
        self.exchange.as_ref().map_or(0, |exchange| exchange.count)
    }

    pub fn ledger_hash(&self) -> String {
        self.ledger.hash()
    }

    /// Walks the graph of `bucket` again and audits it; the digest must be that of the capture.
    pub fn recheck(&self, bucket: usize) -> Result<Audit, CudaError> {
        self.gpu.bind().during(|| "rechecking a graph".into())?;
        let index = self.index_of(bucket)?;
        let graph =
            self.graphs.get(index).ok_or_else(|| CudaError::Unsupported("an eager device has no graphs".into()))?;
        graph.recheck(&self.ledger)
    }

    pub(super) fn index_of(&self, bucket: usize) -> Result<usize, DeviceError> {
        let found = self.programs.iter().position(|program| program.bucket == bucket);
        found.ok_or_else(|| DeviceError::NoBucket { bucket, buckets: self.options.limits.buckets.clone() })
    }

    /// Takes a step into its entry, or says why not.
    pub(super) fn admit(&mut self, input: &StepInput) -> Result<usize, DeviceError> {
        if let Some(reason) = &self.lost {
            return Err(DeviceError::Lost(reason.clone()));
        }
        let expected = self.enqueued + 1;
        if input.step != expected {
            return Err(DeviceError::OutOfOrder { expected, got: input.step });
        }
        let (in_flight, max) = (self.in_flight(), self.options.limits.launch_ahead + 1);
        if in_flight >= max {
            return Err(DeviceError::RingFull { step: input.step, in_flight, max });
        }
        let index = self.index_of(input.bucket)?;
        self.rings.write(&mut self.arena, input, &self.options.limits, &self.options.spec.eos_ids)?;
        Ok(index)
    }

    /// Notes that the step admitted last is on the stream.
    pub(super) fn enqueued(&mut self, index: usize) {
        self.enqueued += 1;
        if let Some(exchange) = &self.exchange {
            exchange.enqueued(self.enqueued);
        }
        self.runs[index] += 1;
    }

    /// From now on everything is refused with this reason.
    pub(super) fn lose(&mut self, error: impl Into<DeviceError>) -> DeviceError {
        let error = error.into();
        self.lost.get_or_insert_with(|| error.to_string());
        error
    }

    /// Puts step `step` on the stream: one replay, or every launch.
    fn launch(&mut self, index: usize, step: u64) -> Result<(), CudaError> {
        let sabotaged = || format!("committing a fault in step {step}");
        self.sabotage_before(step).during(sabotaged)?;
        let (programs, graphs) = self.sabotage.stand_in(step).unwrap_or((&self.programs, &self.graphs));
        let program = &programs[index];
        if let Some(graph) = graphs.get(index) {
            let _range = nvtx::range(format_args!("replay/b{}", program.bucket));
            // SAFETY: arena and weights are this device's and outlive its graphs (field order; Drop waits first).
            unsafe { graph.launch() }.during(|| format!("replaying the graph of bucket {}", program.bucket))?;
        } else {
            for op in 0..program.ops() {
                let _range = nvtx::is_on().then(|| nvtx::range(program.plan.ops[op].op.name()));
                program.launch_op(&self.gpu, op, self.exchange.as_mut())?;
            }
        }
        self.sabotage_after(step).during(sabotaged)
    }

    /// That the stream has not failed, and has not run dry without the record.
    fn check_health(&mut self, step: u64) -> Result<(), DeviceError> {
        let idle = self.gpu.is_idle().during(|| format!("running step {step}")).map_err(|error| self.lose(error))?;
        if idle && !self.rings.is_published(&self.arena, step) {
            return Err(self.lose(DeviceError::Lost(format!("step {step} ran and published no record"))));
        }
        let elapsed = self.running_since.get_or_insert_with(Instant::now).elapsed();
        match self.exchange.as_ref().map(|exchange| exchange.check_step(step, elapsed)) {
            Some(Err(error)) => Err(self.lose(error)),
            _ => Ok(()),
        }
    }
}

/// The range of a step that carries prefill rows.
fn prefill_range(input: &StepInput) -> Option<nvtx::Range> {
    if !nvtx::is_on() {
        return None;
    }
    let rows = input.rows.iter().filter(|row| matches!(row.feed, RowFeed::Given { .. })).count();
    (rows > 0).then(|| nvtx::range(format_args!("prefill/{rows}")))
}

fn contract_hash(base: &Base) -> String {
    super::ledger::hex(&contract::hash(&base.contract_identity()))
}

impl Device for CudaDevice {
    fn enqueue(&mut self, input: &StepInput) -> Result<(), DeviceError> {
        let index = self.admit(input)?;
        self.gpu.bind().during(|| "enqueueing a step".into()).map_err(|error| self.lose(error))?;
        let _range = prefill_range(input);
        self.launch(index, input.step).map_err(|error| self.lose(error))?;
        self.enqueued(index);
        Ok(())
    }

    fn poll(&mut self, output: &mut StepOutput) -> Result<bool, DeviceError> {
        if let Some(reason) = &self.lost {
            return Err(DeviceError::Lost(reason.clone()));
        }
        if self.in_flight() == 0 {
            return Ok(false);
        }
        let step = self.settled + 1;
        if !self.rings.is_published(&self.arena, step) {
            self.polls += 1;
            if self.polls.is_multiple_of(POLLS_PER_CHECK) {
                self.check_health(step)?;
            }
            return Ok(false);
        }
        self.polls = 0;
        self.running_since = None;
        if let Some(Err(error)) = self.exchange.as_ref().map(Exchanger::failure) {
            return Err(self.lose(error));
        }
        self.rings.read(&self.arena, step, output).map_err(|error| self.lose(error))?;
        self.settled = step;
        Ok(true)
    }

    fn in_flight(&self) -> usize {
        (self.enqueued - self.settled) as usize
    }

    fn arm(&mut self, fault: Fault) -> bool {
        self.arm_fault(fault).unwrap_or(false)
    }

    fn facts(&self) -> DeviceFacts {
        let memory = &self.report.memory;
        let nodes = |index: usize| match self.graphs.get(index) {
            Some(graph) => graph.report.audit.nodes,
            None => self.programs[index].calls().count(),
        };
        let bucket = |(index, program): (usize, &Program)| BucketFacts {
            bucket: program.bucket,
            nodes: nodes(index),
            replays: self.runs[index],
        };
        DeviceFacts {
            kind: "cuda".into(),
            name: self.gpu.identity.name.clone(),
            mode: if self.options.graph { "graph" } else { "eager" }.into(),
            precision: "contract".into(),
            contract_hash: self.contract_hash.clone(),
            ledger_hash: self.ledger.hash(),
            graph_bytes: memory.graphs,
            arena_bytes: memory.arena.arena,
            kv_bytes: memory.arena.kv,
            weight_bytes: memory.weights,
            buckets: self.programs.iter().enumerate().map(bucket).collect(),
        }
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Nothing may be freed that a step still uses; if the wait fails, the context is broken and its work is over.
        let _ = self.gpu.bind();
        if let Some(exchange) = &mut self.exchange {
            let unfinished = self.enqueued > self.settled || std::thread::panicking();
            let reason =
                self.lost.as_deref().or(unfinished.then_some("its device was dropped in the middle of a step"));
            exchange.close(reason);
            if self.lost.is_some() {
                return;
            }
        }
        let _ = self.gpu.wait();
    }
}
