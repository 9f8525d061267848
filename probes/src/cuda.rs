//! A CUDA device for probes that look inside one, or the reason why this machine has none.

use crate::cli::{Outcome, ProbeError, gpu_is_required};
use crate::evidence::Draft;
use crate::subject::Subject;
use slotgraph_graphs::cuda::{self, CudaDevice, CudaError, CudaOptions, KvMemory as Pool, SmokeReport};
use slotgraph_graphs::fault::Fault;
use slotgraph_graphs::plan::RankShape;
use slotgraph_runtime::config::{Config, DeviceKind, KvMemory, Transport};
use slotgraph_runtime::devices;

/// Why there is no device to probe.
#[derive(Debug, thiserror::Error)]
pub enum NoDevice {
    /// This machine has no usable GPU: a skip, unless SLOTGRAPH_REQUIRE_GPU is 1.
    #[error("{0}")]
    Absent(String),
    /// It has one, and preparing failed.
    #[error("{0}")]
    Failed(String),
}

impl NoDevice {
    /// Ends a probe that needs a GPU: skipped where none is expected, failed where one is.
    pub fn end(self, mut draft: Draft) -> Result<Outcome, ProbeError> {
        match self {
            NoDevice::Absent(reason) if !gpu_is_required() => Ok(Outcome::Evidence(Box::new(draft.skip(&reason)))),
            NoDevice::Absent(reason) | NoDevice::Failed(reason) => {
                draft.check("a_device_was_prepared", false, reason);
                Ok(Outcome::Evidence(Box::new(draft.finish())))
            }
        }
    }
}

/// Prepares the only rank on the configured GPU: captured (`graph`) or launched op by op.
pub fn prepare(subject: &Subject, graph: bool, fault: Option<Fault>) -> Result<CudaDevice, NoDevice> {
    CudaDevice::prepare(options(subject, 0, cuda::Transport::Single, graph, fault)).map_err(why)
}

/// Prepares every rank of the configuration, each on a thread of its own, and runs `body` there; what it gives, by rank. The ranks exchange
/// over `transport`. A single rank stays on this thread.
pub fn on_ranks<T: Send>(
    subject: &Subject,
    transport: Transport,
    graph: bool,
    body: impl Fn(usize, CudaDevice) -> T + Sync,
) -> Result<Vec<T>, NoDevice> {
    if subject.config.ep == 1 {
        return Ok(vec![body(0, prepare(subject, graph, None)?)]);
    }
    with_options(subject, transport, graph, |rank, options| Ok(body(rank, CudaDevice::prepare(options)?)))
}

/// NCCL's all-gather alone, on every rank.
pub fn smoke(subject: &Subject) -> Result<Vec<SmokeReport>, NoDevice> {
    with_options(subject, Transport::Nccl, true, |_, options| cuda::smoke(&options))
}

/// Runs `body` for every rank, each on a thread of its own; what it gives, by rank, or why the first rank failed.
fn with_options<T: Send>(
    subject: &Subject,
    transport: Transport,
    graph: bool,
    body: impl Fn(usize, CudaOptions) -> Result<T, CudaError> + Sync,
) -> Result<Vec<T>, NoDevice> {
    let ranks = subject.config.ep;
    let common = devices::cuda::transport(&Config { transport, ..subject.config.clone() });
    let meeting = common.meeting().cloned().expect("several ranks meet");
    let rank = |rank: usize| {
        let outcome = body(rank, options(subject, rank, common.clone(), graph, None));
        outcome.inspect_err(|error| meeting.leave(rank, &error.to_string()))
    };
    let rank = &rank;
    let outcomes = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks).map(|at| scope.spawn(move || rank(at))).collect();
        threads.into_iter().map(|thread| thread.join()).collect::<Vec<_>>()
    });
    let mut given = Vec::with_capacity(ranks);
    let mut failed: Option<NoDevice> = None;
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Ok(Ok(value)) => given.push(value),
            // The first that failed by itself explains the others.
            Ok(Err(error)) if !error.is_of_another_rank() || failed.is_none() => {
                failed = Some(match why(error) {
                    NoDevice::Failed(reason) => NoDevice::Failed(format!("rank {rank}: {reason}")),
                    absent => absent,
                });
            }
            Ok(Err(_)) => {}
            Err(_) => failed = Some(NoDevice::Failed(format!("rank {rank} panicked"))),
        }
    }
    failed.map_or(Ok(given), Err)
}

fn options(
    subject: &Subject,
    rank: usize,
    transport: cuda::Transport,
    graph: bool,
    fault: Option<Fault>,
) -> CudaOptions {
    let config = &subject.config;
    let mut options = CudaOptions::new(subject.checkpoint.spec.clone(), config.limits(1), subject.checkpoint.source());
    options.ordinal = config.devices.get(rank).copied().unwrap_or(0);
    options.graph = graph;
    options.pdl = config.pdl;
    options.lib_dirs = config.lib_dir.iter().cloned().collect();
    options.fault = fault;
    let ranks_on_device = config.devices.iter().filter(|&&other| other == options.ordinal).count().max(1);
    options.kv = match config.kv {
        KvMemory::Pages(pages) => Pool::Pages(pages),
        KvMemory::Bytes(bytes) => Pool::Bytes(bytes),
        KvMemory::Fraction(of_free) => Pool::Fraction { of_free, ranks_on_device },
    };
    if !matches!(transport, cuda::Transport::Single) {
        options.rank = RankShape { rank, ranks: config.ep };
    }
    options.transport = transport;
    options
}

fn why(error: CudaError) -> NoDevice {
    match error {
        CudaError::NoDevice { count: 0, .. } => NoDevice::Absent(error.to_string()),
        CudaError::Library(_) if crate::machine::Machine::read().gpus.is_empty() => NoDevice::Absent(error.to_string()),
        other => NoDevice::Failed(other.to_string()),
    }
}

/// Whether the configuration is for a GPU; a probe of graphs has nothing to ask of another device.
pub fn is_cuda(subject: &Subject) -> bool {
    subject.config.device == DeviceKind::Cuda
}
