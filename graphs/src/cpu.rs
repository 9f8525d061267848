//! The CPU reference device: it interprets the plans that a GPU captures, op by op, over the same rings.
//!
//! Made by the engine (one device) or by a rank thread; read by tests and probes through `buffer` and `watch`.
//! **Invariant:** a step runs while it is enqueued and its record waits in the output ring until it is polled, so what the
//! host sees, and when it may see it, is what a GPU would show. A device that failed once answers every later call with the
//! same failure.

mod sabotage;
mod weights;

use crate::device::{BucketFacts, Device, DeviceError, DeviceFacts};
use crate::fault::{Fault, FaultKind};
use crate::model::build;
use crate::plan::{PlacedOp, Plan, PlanError, RankShape};
use crate::source::{Source, SourceError};
use crate::spec::ModelSpec;
use crate::step::{StepInput, StepLimits, StepOutput, decode, encode};
use rayon::{ThreadPool, ThreadPoolBuilder};
use slotgraph_kernels::cpu::{CpuBuffer, CpuMemory};
use slotgraph_kernels::entry::output;
use slotgraph_kernels::ops::{AllGather, Op};
use slotgraph_kernels::{BufferId, BufferSpec, OpError, Precision, Role, contract};
use std::sync::Arc;

use sabotage::Sabotage;

pub use weights::{Loaded, SharedWeights};

/// What a CPU device is made from. `new` fills in what rarely changes.
pub struct CpuOptions<'a> {
    pub spec: &'a ModelSpec,
    pub limits: &'a StepLimits,
    pub rank: RankShape,
    pub precision: Precision,
    pub source: &'a dyn Source,
    /// Weights that devices of this process share; a device of its own has a pool of its own.
    pub weights: Option<&'a SharedWeights>,
    /// What the ranks meet over; needed by several ranks.
    pub peers: Option<Arc<dyn AllGather>>,
    /// Compute the rows past those in use too, as a GPU does.
    pub compute_padding: bool,
    /// Threads of a pool of its own, or None for the process-wide one.
    pub threads: Option<usize>,
    /// Hears how far the weights are, from several threads.
    pub progress: Option<&'a (dyn Fn(Loaded) + Sync)>,
}

impl<'a> CpuOptions<'a> {
    /// One rank in fp32, computing the rows in use.
    pub fn new(spec: &'a ModelSpec, limits: &'a StepLimits, source: &'a dyn Source) -> Self {
        CpuOptions {
            spec,
            limits,
            rank: RankShape::SINGLE,
            precision: Precision::Oracle,
            source,
            weights: None,
            peers: None,
            compute_padding: false,
            threads: None,
            progress: None,
        }
    }
}

/// Why a CPU device could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error("weight {weight} was left unread by another rank")]
    LeftUnread { weight: String },
    #[error("{ranks} ranks need something to meet over")]
    NoPeers { ranks: usize },
    #[error("no pool of {threads} threads: {reason}")]
    Threads { threads: usize, reason: String },
}

/// Called after each op of a step with the memory it left behind.
pub type Watch = Box<dyn FnMut(&PlacedOp, &CpuMemory) + Send>;

/// A device with every plan prepared.
pub struct CpuDevice {
    limits: StepLimits,
    eos_ids: Vec<u32>,
    rank: RankShape,
    /// In the order of `limits.buckets`.
    plans: Vec<Plan>,
    memory: CpuMemory,
    input_ring: BufferId,
    output_ring: BufferId,
    pool: Option<ThreadPool>,
    watch: Option<Watch>,
    enqueued: u64,
    settled: u64,
    replays: Vec<u64>,
    lost: Option<String>,
    sabotage: Sabotage,
}

impl CpuDevice {
    /// Builds every bucket's plan, reads the weights, and allocates all memory.
    pub fn prepare(options: CpuOptions) -> Result<CpuDevice, PrepareError> {
        let CpuOptions { spec, limits, rank, precision, source, peers, .. } = options;
        let plans = limits.buckets.iter().map(|&bucket| build(spec, limits, rank, bucket));
        let plans = plans.collect::<Result<Vec<Plan>, PlanError>>()?;
        let largest = plans.last().expect("a configuration has at least one bucket");
        if rank.ranks > 1 && peers.is_none() {
            return Err(PrepareError::NoPeers { ranks: rank.ranks });
        }
        let pool = options.threads.map(own_pool).transpose()?;
        let own_weights = SharedWeights::default();
        let shared = options.weights.unwrap_or(&own_weights);
        let load = || shared.load(&largest.weights, source, options.progress);
        match &pool {
            Some(pool) => pool.install(load),
            None => load(),
        }?;
        let weights = shared.gather(&largest.weights)?;

        // The CPU references work in their own scratch; a plan's is a GPU's.
        let mut buffers = largest.buffers.clone();
        buffers.iter_mut().filter(|spec| spec.role == Role::Scratch).for_each(|spec| spec.shape[0] = 0);
        let mut memory = CpuMemory::new(precision, &buffers, weights);
        memory.compute_padding = options.compute_padding;
        memory.exchange = peers;
        let (Some(Op::Fetch(fetch)), Some(Op::Feed(feed))) =
            (largest.ops.first().map(|placed| &placed.op), largest.ops.last().map(|placed| &placed.op))
        else {
            unreachable!("verify asks for fetch first and feed last");
        };
        let (input_ring, output_ring) = (fetch.input_ring, feed.output_ring);
        Ok(CpuDevice {
            limits: limits.clone(),
            eos_ids: spec.eos_ids.clone(),
            rank,
            replays: vec![0; plans.len()],
            plans,
            memory,
            input_ring,
            output_ring,
            pool,
            watch: None,
            enqueued: 0,
            settled: 0,
            lost: None,
            sabotage: Sabotage::default(),
        })
    }

    /// The plan of `bucket`.
    pub fn plan(&self, bucket: usize) -> Option<&Plan> {
        self.plans.iter().find(|plan| plan.rows == bucket)
    }

    /// Contents of the buffer named `name`. Those of a step are there once it was enqueued.
    pub fn buffer(&self, name: &str) -> Option<&CpuBuffer> {
        Some(&self.memory.buffers[self.buffer_index(name)?])
    }

    /// The same, to write.
    pub fn buffer_mut(&mut self, name: &str) -> Option<&mut CpuBuffer> {
        let index = self.buffer_index(name)?;
        Some(&mut self.memory.buffers[index])
    }

    /// From now on, shows `watch` the memory after each op.
    pub fn watch(&mut self, watch: Watch) {
        self.watch = Some(watch);
    }

    fn buffer_index(&self, name: &str) -> Option<usize> {
        self.plans.first()?.buffers.iter().position(|spec| spec.name == name)
    }

    fn alive(&self) -> Result<(), DeviceError> {
        match &self.lost {
            Some(reason) => Err(DeviceError::Lost(reason.clone())),
            None => Ok(()),
        }
    }

    /// Runs the plan at `at`. Ops between exchanges run in the device's pool, exchanges on the calling thread: they block.
    fn run(&mut self, at: usize, step: u64) -> Result<(), DeviceError> {
        let CpuDevice { plans, memory, pool, watch, sabotage, .. } = self;
        let plan = &plans[at];
        memory.plan_rows = plan.rows;
        memory.plan_logit_rows = plan.logit_rows;
        let exchanges = |placed: &PlacedOp| matches!(placed.op, Op::Exchange(_));
        let (fetch, rest) = plan.ops.split_at(1);
        run_ops(fetch, memory, |placed, memory| watch.iter_mut().for_each(|watch| watch(placed, memory)))?;
        sabotage.commit(step, plan, memory);
        for stretch in rest.chunk_by(|before, after| !exchanges(before) && !exchanges(after)) {
            match (pool.as_ref(), watch.as_mut()) {
                (Some(pool), None) if !exchanges(&stretch[0]) => {
                    pool.install(|| run_ops(stretch, memory, |_, _| {}))?;
                }
                (_, None) => run_ops(stretch, memory, |_, _| {})?,
                (_, Some(watch)) => run_ops(stretch, memory, watch)?,
            }
        }
        Ok(())
    }

    fn entry(&self, step: u64) -> usize {
        ((step - 1) % self.limits.ring_entries() as u64) as usize
    }

    fn fail(&mut self, error: DeviceError) -> DeviceError {
        let reason = error.to_string();
        if let Some(peers) = &self.memory.exchange {
            peers.leave(self.rank.rank, &reason);
        }
        self.lost = Some(reason);
        error
    }
}

fn own_pool(threads: usize) -> Result<ThreadPool, PrepareError> {
    ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|index| format!("slotgraph-cpu-{index}"))
        .build()
        .map_err(|error| PrepareError::Threads { threads, reason: error.to_string() })
}

fn run_ops(
    ops: &[PlacedOp],
    memory: &mut CpuMemory,
    mut after: impl FnMut(&PlacedOp, &CpuMemory),
) -> Result<(), DeviceError> {
    for placed in ops {
        placed.op.run(memory).map_err(|error| match error {
            OpError::Exchange(error) => DeviceError::Exchange(error),
            other => DeviceError::Op { op: placed.op.name(), layer: placed.layer, reason: other.to_string() },
        })?;
        after(placed, memory);
    }
    Ok(())
}

impl Device for CpuDevice {
    fn enqueue(&mut self, input: &StepInput) -> Result<(), DeviceError> {
        self.alive()?;
        let (in_flight, max) = (self.in_flight(), self.limits.launch_ahead + 1);
        if in_flight >= max {
            return Err(DeviceError::RingFull { step: input.step, in_flight, max });
        }
        if input.step != self.enqueued + 1 {
            return Err(DeviceError::OutOfOrder { expected: self.enqueued + 1, got: input.step });
        }
        let Some(at) = self.limits.buckets.iter().position(|&bucket| bucket == input.bucket) else {
            return Err(DeviceError::NoBucket { bucket: input.bucket, buckets: self.limits.buckets.clone() });
        };
        let words = self.limits.entry_layout().entry_words();
        let start = self.entry(input.step) * words;
        let ring = self.memory.u32_mut(self.input_ring);
        encode(input, &self.limits, &self.eos_ids, &mut ring[start..start + words])?;
        self.run(at, input.step).map_err(|error| self.fail(error))?;
        self.replays[at] += 1;
        self.enqueued = input.step;
        Ok(())
    }

    fn poll(&mut self, output: &mut StepOutput) -> Result<bool, DeviceError> {
        self.alive()?;
        if self.in_flight() == 0 {
            return Ok(false);
        }
        let due = self.settled + 1;
        let words = self.limits.entry_layout().output_words();
        let start = self.entry(due) * words;
        let record = &self.memory.u32(self.output_ring)[start..start + words];
        let published = u64::from(record[output::STEP_LO]) | u64::from(record[output::STEP_HI]) << 32;
        let settled = if published == due {
            decode(record, output)
        } else {
            Err(DeviceError::Lost(format!("step {due} left step {published} in its place of the ring")))
        };
        settled.map_err(|error| self.fail(error))?;
        self.settled = due;
        Ok(true)
    }

    fn in_flight(&self) -> usize {
        (self.enqueued - self.settled) as usize
    }

    fn arm(&mut self, fault: Fault) -> bool {
        // Pad rows that are not computed write nothing.
        self.memory.compute_padding |= fault.kind == FaultKind::PadWrite;
        self.sabotage.arm(fault)
    }

    fn facts(&self) -> DeviceFacts {
        let held = |of: &dyn Fn(Role) -> bool| -> u64 {
            let specs = self.plans.iter().rev().take(1).flat_map(|plan| &plan.buffers);
            specs.filter(|spec| of(spec.role)).map(host_bytes).sum()
        };
        let buckets = self.plans.iter().zip(&self.replays);
        DeviceFacts {
            kind: "cpu".into(),
            name: processor_name(),
            mode: "interpreted".into(),
            precision: precision_name(self.memory.precision).into(),
            contract_hash: contract_hash(self.memory.precision),
            ledger_hash: String::new(),
            graph_bytes: 0,
            arena_bytes: held(&|role| !matches!(role, Role::Kv | Role::Scratch)),
            kv_bytes: held(&|role| role == Role::Kv),
            weight_bytes: self.memory.weights.iter().map(|weight| weight.bytes() as u64).sum(),
            buckets: buckets
                .map(|(plan, &replays)| BucketFacts { bucket: plan.rows, nodes: plan.ops.len(), replays })
                .collect(),
        }
    }
}

impl Drop for CpuDevice {
    /// Peers that wait for this rank hear of it instead of timing out.
    fn drop(&mut self) {
        if let Some(peers) = &self.memory.exchange {
            let reason = if std::thread::panicking() { "its thread panicked" } else { "its device was dropped" };
            peers.leave(self.rank.rank, reason);
        }
    }
}

/// Bytes on this device, which keeps every element in four.
fn host_bytes(spec: &BufferSpec) -> u64 {
    4 * spec.elements() as u64
}

/// `oracle` or `contract`.
pub fn precision_name(precision: Precision) -> &'static str {
    match precision {
        Precision::Oracle => "oracle",
        Precision::Contract => "contract",
    }
}

/// The contract's hash on a CPU device, in hex.
pub fn contract_hash(precision: Precision) -> String {
    let hash = contract::hash(&format!("cpu {}", precision_name(precision)));
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// As the system calls it, else the architecture.
fn processor_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    named.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}
