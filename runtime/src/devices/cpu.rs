//! Ranks on CPU devices: weights read once, a meeting place in memory, a pool of threads for each.

use super::{armed, stall_if_told};
use crate::checkpoint::Checkpoint;
use crate::config::{Config, PrecisionMode};
use crate::engine::{STEP_TIMEOUT, StartError};
use crate::ranks::{Factory, PrepareError, Prepared, Startup};
use crate::startup::Phase;
use crate::weights::progress::with_progress;
use slotgraph_graphs::cpu::{CpuDevice, CpuOptions, Loaded, SharedWeights};
use slotgraph_graphs::exchange::MemoryExchange;
use slotgraph_graphs::fault::Fault;
use slotgraph_graphs::plan::RankShape;
use slotgraph_graphs::source::Source;
use slotgraph_graphs::spec::ModelSpec;
use slotgraph_graphs::step::StepLimits;
use slotgraph_kernels::Precision;
use slotgraph_kernels::ops::AllGather;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What the CPU devices of all ranks are made from.
struct CpuRanks {
    spec: ModelSpec,
    limits: StepLimits,
    source: Arc<dyn Source>,
    weights: SharedWeights,
    precision: Precision,
    peers: Option<Arc<MemoryExchange>>,
    threads: usize,
    ranks: usize,
    faults: Vec<Fault>,
}

pub(super) fn factories(
    config: &Config,
    checkpoint: &Checkpoint,
    faults: &[Fault],
) -> Result<Vec<Factory>, StartError> {
    let Some(pages) = config.fixed_pages() else {
        return Err(StartError::Config("--kv-memory: the CPU device needs bytes, not a fraction".into()));
    };
    let ranks = config.ep;
    let common = Arc::new(CpuRanks {
        spec: checkpoint.spec.clone(),
        limits: config.limits(pages),
        source: with_progress(checkpoint.source(), checkpoint.weights.bytes),
        weights: SharedWeights::default(),
        precision: match config.precision {
            PrecisionMode::Oracle => Precision::Oracle,
            PrecisionMode::Contract => Precision::Contract,
        },
        peers: (ranks > 1).then(|| MemoryExchange::new(ranks, STEP_TIMEOUT)),
        // Each rank has a pool of its own: one that waits for its peers must not hold up their work.
        threads: (config.threads / ranks).max(1),
        ranks,
        faults: faults.to_vec(),
    });
    let factory = |rank: usize| -> Factory {
        let common = common.clone();
        Box::new(move |startup| common.prepare(rank, startup))
    };
    Ok((0..ranks).map(factory).collect())
}

impl CpuRanks {
    fn prepare(&self, rank: usize, startup: &Startup) -> Result<Prepared, PrepareError> {
        stall_if_told(rank, &self.faults, startup)?;
        startup.enter(Phase::Read)?;
        let read = AtomicU64::new(0);
        let progress = |loaded: Loaded| {
            read.fetch_max(loaded.bytes, Relaxed);
        };
        let options = CpuOptions {
            rank: RankShape { rank, ranks: self.ranks },
            precision: self.precision,
            weights: Some(&self.weights),
            peers: self.peers.clone().map(|peers| peers as Arc<dyn AllGather>),
            threads: Some(self.threads),
            progress: Some(&progress),
            ..CpuOptions::new(&self.spec, &self.limits, &*self.source)
        };
        let device = CpuDevice::prepare(options).map_err(|error| PrepareError::Failed(error.to_string()))?;
        let device = armed(device, rank, &self.faults)?;
        Ok(Prepared::new(device, self.limits.clone(), read.into_inner()))
    }
}
