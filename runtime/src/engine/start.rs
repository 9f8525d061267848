//! Start: devices, ranks and the engine thread, or why not.

use super::edge::run_to_the_end;
use super::handle::EngineHandle;
use super::{Engine, panic_text};
use crate::checkpoint::Checkpoint;
use crate::clock::{Clock, SystemClock};
use crate::config::Config;
use crate::devices;
use crate::faults::EngineFaults;
use crate::load::Load;
use crate::ranks::{Factory, RankStart, Ranks, Startup};
use crate::scheduler::{Scheduler, SchedulerOptions};
use crate::trace::{Epoch, Observer, TraceContext};
use slotgraph_graphs::cuda::nvtx;
use slotgraph_graphs::device::Device;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

/// Most time that a step may take before a rank counts as lost. A step of a large model on the CPU takes seconds.
pub(crate) const STEP_TIMEOUT: Duration = Duration::from_secs(120);

/// What the engine needs to know besides what its devices say.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    pub slots_max: usize,
    /// Choices that may wait beyond those that hold a slot.
    pub max_queue: usize,
    /// Generated tokens that admission reserves pages for.
    pub reserve_tokens: usize,
    /// Keep the gap between a stream's tokens under this by fewer prefill rows a step.
    pub itl_target: Option<Duration>,
    /// Most time that start-up may take.
    pub init_timeout: Duration,
    /// Most time that a step may take before a rank counts as lost.
    pub step_timeout: Duration,
    /// Armed by `--fault` alone.
    pub faults: EngineFaults,
    /// The contract hash is filled in from the devices.
    pub trace: TraceContext,
}

/// Why the engine did not start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// Exit 2.
    #[error("{0}")]
    Config(String),
    /// A rank failed in a phase of its start-up (or, reported by `Ranks`, in a step).
    #[error("rank {rank} failed in phase {phase}: {reason}")]
    Rank { rank: usize, phase: String, reason: String },
    #[error("start-up took longer than {limit:?}: {waiting}")]
    Timeout { limit: Duration, waiting: String },
}

impl StartError {
    pub(crate) fn failed(rank: usize, phase: &str, reason: String) -> Self {
        StartError::Rank { rank, phase: phase.to_owned(), reason }
    }
}

/// Makes the devices, the ranks and the engine thread; returns once every plan is prepared, or why that failed.
pub fn start(
    config: &Config,
    checkpoint: &Checkpoint,
    observer: Arc<dyn Observer>,
) -> Result<EngineHandle, StartError> {
    let (faults, others) =
        EngineFaults::parse(&config.faults).map_err(|error| StartError::Config(format!("--fault: {error}")))?;
    if config.nvtx {
        nvtx::enable();
    }
    let factories = devices::factories(config, checkpoint, &others)?;
    let options = EngineOptions {
        slots_max: config.max_slots,
        max_queue: config.max_queue,
        reserve_tokens: config.reserve_tokens,
        itl_target: config.itl_target_ms.map(|ms| Duration::from_secs_f64(ms / 1e3)),
        init_timeout: config.init_timeout,
        step_timeout: STEP_TIMEOUT,
        faults,
        trace: TraceContext {
            model_sha256: checkpoint.model_sha256().to_owned(),
            contract_hash: String::new(),
            switches: config.switches(),
        },
    };
    start_with(options, factories, observer)
}

/// The devices of a configuration as one, without an engine or faults: what a probe drives by hand.
pub fn device(config: &Config, checkpoint: &Checkpoint) -> Result<(Box<dyn Device>, Vec<RankStart>), StartError> {
    prepare(devices::factories(config, checkpoint, &[])?, config.init_timeout, STEP_TIMEOUT)
}

/// `start` over devices that the factories make, one a rank.
pub fn start_with(
    options: EngineOptions,
    factories: Vec<Factory>,
    observer: Arc<dyn Observer>,
) -> Result<EngineHandle, StartError> {
    assert!(!factories.is_empty(), "an engine has at least one rank");
    let (started, wait) = sync_channel(1);
    let init = options.init_timeout;
    let body = move || engine_thread(options, factories, observer, &started);
    let thread = std::thread::Builder::new().name("engine".into()).spawn(body);
    let thread = thread.map_err(|error| StartError::failed(0, "spawn", error.to_string()))?;
    // The ranks' own limit names the culprit; this one is for a thread that cannot even say so.
    match wait.recv_timeout(init + Duration::from_secs(1)) {
        Ok(Ok(handle)) => {
            handle.shared.thread.lock().expect("nobody else has the handle").replace(thread);
            Ok(handle)
        }
        Ok(Err(error)) => Err(error),
        Err(RecvTimeoutError::Timeout) => {
            Err(StartError::Timeout { limit: init, waiting: "rank 0 is still preparing".into() })
        }
        Err(RecvTimeoutError::Disconnected) => {
            Err(StartError::failed(0, "start", "the engine thread left without a word".into()))
        }
    }
}

fn engine_thread(
    options: EngineOptions,
    factories: Vec<Factory>,
    observer: Arc<dyn Observer>,
    started: &SyncSender<Result<EngineHandle, StartError>>,
) {
    let made = catch_unwind(AssertUnwindSafe(|| prepare(factories, options.init_timeout, options.step_timeout)));
    let made = made.unwrap_or_else(|panic| Err(StartError::failed(0, "start", panic_text(&*panic))));
    let (device, ranks) = match made.and_then(|made| check(&options, made)) {
        Ok(made) => made,
        Err(error) => {
            let _ = started.send(Err(error));
            return;
        }
    };
    let (limits, facts) = (ranks[0].limits.clone(), ranks[0].record.device.clone());
    let load = Arc::new(Load::new(&limits.buckets));
    let launch_ahead = limits.launch_ahead;
    let faults = options.faults;
    let options_of_scheduler = SchedulerOptions {
        reserve_tokens: options.reserve_tokens,
        itl_target: options.itl_target,
        policy: faults.policy(),
        trace: TraceContext { contract_hash: facts.contract_hash, ..options.trace },
        replays: facts.mode == "graph",
        limits,
    };
    let clock = SystemClock;
    let (handle, inbox) = EngineHandle::connect(load.clone(), options.slots_max + options.max_queue, ranks);
    let scheduler = Scheduler::new(options_of_scheduler, load.clone(), observer, Epoch::new(clock.now()));
    let mut engine = Engine::new(scheduler, device, clock, inbox, load.clone(), faults, launch_ahead);
    // Before anybody can ask: a server that is ready has its slots, not yet none.
    engine.publish();
    load.set_ready();
    // Whoever asked gave up waiting: leave.
    if started.send(Ok(handle)).is_ok() {
        run_to_the_end(engine);
    }
}

type Made = (Box<dyn Device>, Vec<RankStart>);

fn prepare(mut factories: Vec<Factory>, init: Duration, step: Duration) -> Result<Made, StartError> {
    if factories.len() == 1 {
        let factory = factories.pop().expect("there is one");
        let (device, start) = Startup::alone(init).prepare(factory)?;
        return Ok((device, vec![start]));
    }
    let (ranks, starts) = Ranks::start(factories, init, step)?;
    Ok((Box::new(ranks), starts))
}

/// Limits that the scheduler could not work with are the configuration's fault.
fn check(options: &EngineOptions, made: Made) -> Result<Made, StartError> {
    let limits = &made.1[0].limits;
    if limits.rows_max() < limits.slots_max {
        let (rows, slots) = (limits.rows_max(), limits.slots_max);
        return Err(StartError::Config(format!("--buckets: the largest is {rows}, but --max-slots is {slots}")));
    }
    if limits.buckets.len() > 64 {
        return Err(StartError::Config(format!("--buckets: {} buckets, at most 64", limits.buckets.len())));
    }
    if limits.slots_max != options.slots_max {
        let reason = format!("prepared {} slots instead of {}", limits.slots_max, options.slots_max);
        return Err(StartError::failed(0, "ready", reason));
    }
    if limits.pages < 2 {
        return Err(StartError::Config("--kv-memory: the pool has no page besides the pad rows'".into()));
    }
    Ok(made)
}
