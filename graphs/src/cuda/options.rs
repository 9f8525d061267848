//! What a CUDA device is made from, and what it says of its making.

use super::arena::ArenaBytes;
use super::cache::Cache;
use super::gpu::GpuIdentity;
use super::graph::GraphReport;
use super::modules::ModulesReport;
use super::weights::{Progress, WeightsReport};
use crate::fault::Fault;
use crate::meeting::Meeting;
use crate::plan::RankShape;
use crate::source::Source;
use crate::spec::ModelSpec;
use crate::step::StepLimits;
use slotgraph_kernels::ops::AllGather;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Everything that `CudaDevice::prepare` needs.
#[derive(Clone)]
pub struct CudaOptions {
    pub spec: ModelSpec,
    /// `pages` is replaced by what `kv` gives; `CudaDevice::limits` says how many that were.
    pub limits: StepLimits,
    pub rank: RankShape,
    /// CUDA device ordinal (`--devices`).
    pub ordinal: usize,
    /// Ranks that run on that device at once (`--allow-shared-device`): each fills its part of the multiprocessors.
    pub ranks_on_device: usize,
    pub source: Arc<dyn Source>,
    pub kv: KvMemory,
    /// Capture every bucket and replay; false launches op by op.
    pub graph: bool,
    /// Programmatic edges between kernels, where the GPU and the kernels have them.
    pub pdl: bool,
    /// How several ranks exchange.
    pub transport: Transport,
    /// Longest time that a rank waits for another in a step.
    pub exchange_limit: Duration,
    /// Folders of `--lib-dir`.
    pub lib_dirs: Vec<PathBuf>,
    /// Compiled kernels.
    pub cache: Cache,
    /// Told how far the weights are.
    pub progress: Option<Progress>,
    /// A fault to plant while preparing (`capture-fail`, `unregistered-pointer`); others are armed later.
    pub fault: Option<Fault>,
}

impl CudaOptions {
    /// One rank on device 0: graphs, programmatic edges, 0.9 of the free memory, the user's kernel cache.
    pub fn new(spec: ModelSpec, limits: StepLimits, source: Arc<dyn Source>) -> CudaOptions {
        CudaOptions {
            spec,
            limits,
            rank: RankShape::SINGLE,
            ordinal: 0,
            ranks_on_device: 1,
            source,
            kv: KvMemory::Fraction { of_free: 0.9, ranks_on_device: 1 },
            graph: true,
            pdl: true,
            transport: Transport::Single,
            exchange_limit: EXCHANGE_LIMIT,
            lib_dirs: Vec::new(),
            cache: Cache::of_user(),
            progress: None,
            fault: None,
        }
    }
}

/// Longest time that a rank waits for another in a step, unless told otherwise: ranks run the same work, so seconds apart is lost.
const EXCHANGE_LIMIT: Duration = Duration::from_secs(10);

/// How ranks exchange. The value is the ranks' common one: where they meet.
#[derive(Clone)]
pub enum Transport {
    /// One rank: nothing to exchange.
    Single,
    /// Through the host; eager only.
    HostStaged(Arc<Meeting>, Arc<dyn AllGather>),
    /// Our kernel, over peer memory.
    P2p(Arc<Meeting>),
    /// NCCL's all-gather.
    Nccl(Arc<Meeting>),
}

impl Transport {
    /// Where the ranks meet, if there are several.
    pub fn meeting(&self) -> Option<&Arc<Meeting>> {
        match self {
            Transport::Single => None,
            Transport::HostStaged(meeting, _) | Transport::P2p(meeting) | Transport::Nccl(meeting) => Some(meeting),
        }
    }

    /// Whether a step with its exchanges can be captured.
    pub fn captures(&self) -> bool {
        !matches!(self, Transport::HostStaged(..))
    }
}

/// How large the page pool becomes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KvMemory {
    /// Pages, page 0 included.
    Pages(usize),
    Bytes(u64),
    /// A share of what is free once weights and arena are there, less `KV_MARGIN`, divided among the ranks on the device.
    Fraction {
        of_free: f64,
        ranks_on_device: usize,
    },
}

/// Bytes that a fraction of the free memory leaves alone, for graphs and libraries.
pub const KV_MARGIN: u64 = 512 << 20;
/// Bytes that must be free once everything was captured.
pub const FREE_MIN: u64 = 128 << 20;

impl KvMemory {
    /// Pages of `page_bytes` each, given the free bytes. At most `useful`: more could never be held by the seats.
    pub(super) fn pages(self, page_bytes: usize, free: u64, useful: usize) -> usize {
        let budget = match self {
            KvMemory::Pages(pages) => return pages,
            KvMemory::Bytes(bytes) => bytes,
            KvMemory::Fraction { of_free, ranks_on_device } => {
                let share = free as f64 * of_free / ranks_on_device.max(1) as f64;
                (share as u64).saturating_sub(KV_MARGIN)
            }
        };
        usize::try_from(budget / (page_bytes as u64).max(1)).unwrap_or(usize::MAX).min(useful)
    }
}

/// What preparing a device took and gave; part of the start-up record.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct PrepareReport {
    pub gpu: Option<GpuIdentity>,
    pub libraries: Vec<LibraryReport>,
    /// (phase, milliseconds) in order.
    pub phases_ms: Vec<(&'static str, f64)>,
    pub modules: ModulesReport,
    pub weights: WeightsReport,
    pub memory: MemoryReport,
    /// None for a single rank.
    pub exchange: Option<ExchangeReport>,
    pub graphs: Vec<GraphReport>,
}

/// How this rank reaches the others.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct ExchangeReport {
    pub transport: &'static str,
    /// Memory that the transport took: of the GPU, or pinned where it goes through the host.
    pub scratch_bytes: u64,
    /// Some GPU has more than one rank.
    pub shared_device: bool,
    pub peers: Vec<PeerReport>,
}

impl ExchangeReport {
    pub(super) fn of(transport: &'static str) -> ExchangeReport {
        ExchangeReport { transport, ..ExchangeReport::default() }
    }
}

/// Another rank, and the way to it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct PeerReport {
    pub rank: usize,
    pub ordinal: usize,
    /// `same-gpu`, `peer-access` or `nccl`.
    pub way: &'static str,
}

/// A library that is in use.
#[derive(Clone, Debug, serde::Serialize)]
pub struct LibraryReport {
    pub name: &'static str,
    pub version: String,
    pub path: PathBuf,
    /// Which rule found it.
    pub why: String,
}

/// The memory split, in bytes.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct MemoryReport {
    pub total: u64,
    /// Free when the context was there.
    pub free_at_start: u64,
    pub weights: u64,
    #[serde(flatten)]
    pub arena: ArenaBytes,
    pub pages: usize,
    pub graphs: u64,
    /// Free when ready.
    pub free: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_follows_its_option() {
        let (page, free) = (1 << 20, 10 << 30);
        assert_eq!(KvMemory::Pages(7).pages(page, free, 1000), 7);
        assert_eq!(KvMemory::Bytes(64 << 20).pages(page, free, 1000), 64);
        assert_eq!(KvMemory::Bytes(1 << 40).pages(page, free, 1000), 1000, "no more than the seats can hold");
        let fraction =
            |of_free, ranks_on_device| KvMemory::Fraction { of_free, ranks_on_device }.pages(page, free, usize::MAX);
        assert_eq!(fraction(0.5, 1), 5 * 1024 - 512);
        assert_eq!(fraction(0.5, 2), 5 * 512 - 512);
        assert_eq!(fraction(0.01, 1), 0);
    }
}
