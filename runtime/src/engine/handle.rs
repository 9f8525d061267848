//! The handle: how the rest of the process talks to the engine thread.
//!
//! Cloned freely. **Invariant:** the edge admits by one count of live choices, a group whole or not at all, so the command channel,
//! sized for as many groups, never fills and `submit` never waits.

use crate::load::Load;
use crate::ranks::RankStart;
use crate::request::{Command, Group};
use crate::scheduler::Snapshot;
use slotgraph_graphs::device::DeviceFacts;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

/// Why a group was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// 429: try again later.
    #[error("the server is full: {live} of at most {limit} choices are queued or running")]
    Full { live: usize, limit: usize },
    /// 400: it can never be taken.
    #[error("the request has {choices} choices; at most {limit} can be queued or running at once")]
    TooLarge { choices: usize, limit: usize },
    /// 503.
    #[error(transparent)]
    NotAccepting(#[from] NotAccepting),
}

/// Why nothing is taken at all.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAccepting {
    #[error("the server is shutting down")]
    Draining,
    #[error("the engine has failed: {0}")]
    Dead(String),
}

/// The engine failed after start; every open stream was told.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct EngineFailure(pub String);

/// A handle on a running engine.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    pub(crate) shared: Arc<Shared>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub commands: SyncSender<Command>,
    pub load: Arc<Load>,
    /// slots_max + max_queue.
    pub limit: usize,
    pub ranks: Vec<RankStart>,
    pub thread: Mutex<Option<JoinHandle<()>>>,
}

impl EngineHandle {
    /// A handle, and the end of its command channel that an `Engine` takes. At most `limit` choices are live at once.
    pub fn connect(load: Arc<Load>, limit: usize, ranks: Vec<RankStart>) -> (EngineHandle, Receiver<Command>) {
        // A group has at least one choice, so there are never more groups than places; and a few words besides.
        let (commands, inbox) = sync_channel(limit + 16);
        let shared = Arc::new(Shared { commands, load, limit, ranks, thread: Mutex::new(None) });
        (EngineHandle { shared }, inbox)
    }

    /// Hands a group to the engine, whole or not at all; never waits.
    pub fn submit(&self, group: Group) -> Result<(), SubmitError> {
        let Shared { commands, load, limit, .. } = &*self.shared;
        let choices = group.choices.len();
        assert!(choices > 0, "a group has at least one choice");
        self.accepting()?;
        if choices > *limit {
            return Err(SubmitError::TooLarge { choices, limit: *limit });
        }
        if !load.take_places(choices, *limit) {
            return Err(SubmitError::Full { live: load.live.load(Relaxed), limit: *limit });
        }
        commands.try_send(Command::Submit(group)).map_err(|_| {
            load.give_places(choices);
            NotAccepting::Dead(load.dead().unwrap_or("its thread is gone").to_owned()).into()
        })
    }

    /// Whether new groups are taken.
    pub fn accepting(&self) -> Result<(), NotAccepting> {
        let load = &self.shared.load;
        if let Some(reason) = load.dead() {
            return Err(NotAccepting::Dead(reason.to_owned()));
        }
        if load.is_draining() { Err(NotAccepting::Draining) } else { Ok(()) }
    }

    /// Takes no more groups; what is queued or running ends at `deadline` with cause `drain`.
    pub fn drain(&self, deadline: Instant) {
        self.shared.load.set_draining();
        // A failed send means that the engine is gone, and with it everything that could be drained.
        let _ = self.shared.commands.send(Command::Drain { deadline });
    }

    /// Takes no more groups; the engine thread leaves once nothing is live.
    pub fn shutdown(&self) {
        self.shared.load.set_draining();
        let _ = self.shared.commands.send(Command::Shutdown);
    }

    /// Waits until the engine thread has left; an error says why it died. Later calls return at once.
    pub fn join(&self) -> Result<(), EngineFailure> {
        let thread = self.shared.thread.lock().expect("joining does not panic").take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
        self.shared.load.dead().map_or(Ok(()), |reason| Err(EngineFailure(reason.to_owned())))
    }

    /// Gauges and counters.
    pub fn load(&self) -> &Arc<Load> {
        &self.shared.load
    }
    /// Most choices that may be queued or running at once.
    pub fn limit(&self) -> usize {
        self.shared.limit
    }
    /// How each rank started.
    pub fn ranks(&self) -> &[RankStart] {
        &self.shared.ranks
    }
    /// The devices, by rank, as they were when they were ready.
    pub fn facts(&self) -> Vec<DeviceFacts> {
        self.shared.ranks.iter().map(|rank| rank.record.device.clone()).collect()
    }
    /// Pages of the pool, page 0 included.
    pub fn pages(&self) -> usize {
        self.shared.ranks.first().map_or(0, |rank| rank.limits.pages)
    }

    /// The slot table as it is between two turns; None if the engine is gone.
    pub async fn inspect(&self) -> Option<Snapshot> {
        let (reply, answer) = tokio::sync::oneshot::channel();
        self.shared.commands.try_send(Command::Inspect(reply)).ok()?;
        answer.await.ok()
    }
}
