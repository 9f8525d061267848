//! Ranks on GPUs: each phase of a device's start is one that ranks enter together, and all take the smallest pool that any can have.

use super::{armed, stall_if_told};
use crate::checkpoint::Checkpoint;
use crate::config::{Config, KvMemory, Transport};
use crate::engine::{STEP_TIMEOUT, StartError};
use crate::ranks::{Factory, PrepareError, Prepared, Startup};
use crate::startup::{LibraryRecord, Phase};
use crate::weights::progress::with_progress;
use slotgraph_graphs::cuda::{self, CudaError, CudaOptions, Opened, PrepareReport};
use slotgraph_graphs::exchange::MemoryExchange;
use slotgraph_graphs::fault::{Fault, FaultPlace};
use slotgraph_graphs::plan::RankShape;
use slotgraph_kernels::ops::AllGather;
use std::sync::Arc;
use std::time::Duration;

pub(super) fn factories(
    config: &Config,
    checkpoint: &Checkpoint,
    faults: &[Fault],
) -> Result<Vec<Factory>, StartError> {
    let ranks = config.ep;
    let exchange: Option<Arc<dyn AllGather>> = match config.transport {
        Transport::Single => None,
        Transport::HostStaged => Some(MemoryExchange::new(ranks, STEP_TIMEOUT)),
        Transport::Nccl | Transport::P2p => {
            return Err(StartError::Config(format!("--transport {}: not built yet", config.transport.name())));
        }
    };
    // Replaced once the pool's size is known.
    let pages = config.fixed_pages().unwrap_or(2);
    let source = with_progress(checkpoint.source(), checkpoint.weights.bytes);
    let factory = |rank: usize| -> Factory {
        let ordinal = config.devices[rank];
        let sharing = config.devices.iter().filter(|&&other| other == ordinal).count();
        let options = CudaOptions {
            rank: RankShape { rank, ranks },
            ordinal,
            kv: kv(config, sharing),
            graph: config.cuda_graph,
            pdl: config.pdl,
            exchange: exchange.clone(),
            lib_dirs: config.lib_dir.iter().cloned().collect(),
            fault: faults.iter().copied().find(|fault| fault.kind.place() == FaultPlace::Start),
            ..CudaOptions::new(checkpoint.spec.clone(), config.limits(pages), source.clone())
        };
        let faults = faults.to_vec();
        Box::new(move |startup| prepare(options, &faults, startup))
    };
    Ok((0..ranks).map(factory).collect())
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
    startup.enter(Phase::Read)?;
    let allocated = compiled.load_weights().and_then(cuda::Loaded::allocate).map_err(explain)?;
    startup.enter(Phase::Communicators)?;
    let pages = startup.least(allocated.pages().map_err(explain)?)?;
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
    let device = warm.capture().map_err(explain)?;

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
    if error.is_configuration() { PrepareError::Config(text) } else { PrepareError::Failed(text) }
}
