//! The engine: one thread that owns slots, pages, queues and, with one device, the device.

mod handle;

pub use handle::{EngineFailure, EngineHandle, NotAccepting, SubmitError};

use crate::checkpoint::Checkpoint;
use crate::config::Config;
use crate::trace::{Observer, TraceContext};
use slotgraph_graphs::step::StepLimits;
use std::sync::Arc;
use std::time::Duration;

/// What the engine needs to know, resolved.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    pub limits: StepLimits,
    /// Choices that may wait beyond those that hold a slot.
    pub max_queue: usize,
    /// Generated tokens that admission reserves pages for.
    pub reserve_tokens: usize,
    /// Keep the gap between a stream's tokens under this by fewer prefill rows a step.
    pub itl_target: Option<Duration>,
    /// Most time that start-up may take.
    pub init_timeout: Duration,
    /// Named faults (`--fault`).
    pub faults: Vec<String>,
    pub trace: TraceContext,
}

/// Why the engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Exit 2.
    #[error("{0}")]
    Config(String),
    /// A rank failed in a phase of its start-up.
    #[error("rank {rank} failed in phase {phase}: {reason}")]
    Rank { rank: usize, phase: String, reason: String },
    #[error("start-up took longer than {limit:?}: {waiting}")]
    Timeout { limit: Duration, waiting: String },
}

/// Makes the devices, the ranks and the engine thread; returns once every plan is prepared, or why that failed.
pub fn start(
    config: &Config,
    checkpoint: &Checkpoint,
    observer: Arc<dyn Observer>,
) -> Result<EngineHandle, StartError> {
    let _ = (checkpoint, observer);
    Err(StartError::Config(format!("--device {:?}: the engine cannot start yet", config.device)))
}
