//! Ranks on GPUs: each phase of a device's start is one that ranks enter together, and all take the smallest pool that any can have.

use super::{armed, stall_if_told};
use crate::checkpoint::Checkpoint;
use crate::config::{Config, KvMemory, Transport};
use crate::engine::StartError;
use crate::ranks::{Factory, PrepareError, Prepared, Startup};
use crate::startup::{LibraryRecord, Phase};
use crate::weights::progress::with_progress;
use slotgraph_graphs::cuda::{self, CudaError, CudaOptions, Opened, PrepareReport};
use slotgraph_graphs::exchange::MemoryExchange;
use slotgraph_graphs::fault::{Fault, FaultPlace};
use slotgraph_graphs::meeting::Meeting;
use slotgraph_graphs::plan::RankShape;
use std::sync::Arc;
use std::time::Duration;

pub(super) fn factories(
    config: &Config,
    checkpoint: &Checkpoint,
    faults: &[Fault],
) -> Result<Vec<Factory>, StartError> {
    let ranks = config.ep;
    let transport = transport(config);
    // Replaced once the pool's size is known.
    let pages = config.fixed_pages().unwrap_or(2);
    let source = with_progress(checkpoint.source(), checkpoint.weights.bytes);
    let factory = |rank: usize| -> Factory {
        let ordinal = config.devices[rank];
        let sharing = config.devices.iter().filter(|&&other| other == ordinal).count();
        let options = CudaOptions {
            rank: RankShape { rank, ranks },
            ordinal,
            ranks_on_device: sharing,
            kv: kv(config, sharing),
            graph: config.cuda_graph,
            pdl: config.pdl,
            transport: transport.clone(),
            lib_dirs: config.lib_dir.iter().cloned().collect(),
            fault: faults.iter().copied().find(|fault| fault.kind.place() == FaultPlace::Start),
            ..CudaOptions::new(checkpoint.spec.clone(), config.limits(pages), source.clone())
        };
        let faults = faults.to_vec();
        Box::new(move |startup| {
            let mut departure = Departure { rank, meeting: options.transport.meeting().cloned() };
            let prepared = prepare(options, &faults, startup)?;
            departure.meeting = None;
            Ok(prepared)
        })
    };
    Ok((0..ranks).map(factory).collect())
}

/// Where the ranks of a configuration meet, and how they exchange. One for all of them.
pub fn transport(config: &Config) -> cuda::Transport {
    let meeting = Meeting::new(config.ep, config.init_timeout);
    match config.transport {
        Transport::Single => cuda::Transport::Single,
        Transport::HostStaged => cuda::Transport::HostStaged(meeting, MemoryExchange::new(config.ep, HOST_LIMIT)),
        Transport::P2p => cuda::Transport::P2p(meeting),
        Transport::Nccl => {
            cuda::nccl::prepare_environment(config.nccl_nvls);
            cuda::Transport::Nccl(meeting)
        }
    }
}

/// Longest wait of a host-staged exchange: ranks are never further apart than one warm-up step.
const HOST_LIMIT: Duration = Duration::from_secs(10);

/// Tells the others of a rank whose start fails or panics.
struct Departure {
    rank: usize,
    meeting: Option<Arc<Meeting>>,
}

impl Drop for Departure {
    fn drop(&mut self) {
        if let Some(meeting) = &self.meeting {
            meeting.leave(self.rank, "its start failed");
        }
    }
}

fn kv(config: &Config, ranks_on_device: usize) -> cuda::KvMemory {
    match config.kv {
        KvMemory::Pages(pages) => cuda::KvMemory::Pages(pages),
        KvMemory::Bytes(bytes) => cuda::KvMemory::Bytes(bytes),
        KvMemory::Fraction(of_free) => cuda::KvMemory::Fraction { of_free, ranks_on_device },
    }
}

fn prepare(options: CudaOptions, faults: &[Fault], startup: &Startup) -> Result<Prepared, PrepareError> {
    let (rank, ordinal, limits) = (options.rank.rank, options.ordinal, options.limits.clone());
    stall_if_told(rank, faults, startup)?;
    startup.enter(Phase::Modules)?;
    let opened = Opened::open(options).map_err(explain)?;
    startup.enter(Phase::Nvrtc)?;
    let compiled = opened.compile().map_err(explain)?;
    startup.enter(Phase::Communicators)?;
    let connected = compiled.connect().map_err(explain)?;
    startup.enter(Phase::Read)?;
    let allocated = connected.load_weights().and_then(cuda::Loaded::allocate).map_err(explain)?;
    let pages = allocated.pages().map_err(explain)?;
    if pages <= limits.pages_per_slot {
        let (needed, context) = (limits.pages_per_slot + 1, limits.max_model_len);
        return Err(PrepareError::Config(format!(
            "--kv-memory: the pool has {pages} pages, one request of --max-model-len {context} needs {needed}; \
             enlarge the pool or lower --max-model-len"
        )));
    }
    let resolved = allocated.allocate_kv(pages).map_err(explain)?;
    startup.enter(Phase::Warm)?;
    let warm = resolved.warm().map_err(explain)?;
    startup.enter(Phase::Capture)?;
    let captured = warm.capture().map_err(explain)?;
    startup.enter(Phase::Upload)?;
    let device = captured.replay().map_err(explain)?;

    let report = device.report().clone();
    split_phases(&report, startup);
    let limits = device.limits().clone();
    let identity = report.gpu.as_ref();
    Ok(Prepared {
        limits,
        bytes_read: report.weights.read_bytes,
        ordinal: Some(ordinal),
        uuid: identity.map(|gpu| gpu.uuid.clone()),
        pci: identity.map(|gpu| gpu.pci.clone()),
        libraries: report.libraries.iter().map(library).collect(),
        exchange: report.exchange.clone(),
        device: armed(device, rank, faults)?,
    })
}

/// The device's own clock knows what part of capturing was uploading.
fn split_phases(report: &PrepareReport, startup: &Startup) {
    for (name, ms) in &report.phases_ms {
        if *name == Phase::Upload.name() {
            startup.add(Phase::Upload, Duration::from_secs_f64(ms / 1e3));
        }
    }
}

fn library(report: &cuda::LibraryReport) -> LibraryRecord {
    let name = report.name.trim_start_matches("lib").to_owned();
    LibraryRecord { name, path: report.path.display().to_string(), version: report.version.clone() }
}

fn explain(error: CudaError) -> PrepareError {
    let text = error.to_string();
    if error.is_of_another_rank() {
        return PrepareError::Followed(text);
    }
    if error.is_configuration() { PrepareError::Config(text) } else { PrepareError::Failed(text) }
}
