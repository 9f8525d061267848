//! How ranks start: in phases, together, within a time limit, each failure named.
//!
//! **Invariant:** no rank enters a phase before every rank has finished the one before it; once one has failed, every rank that waits or
//! arrives fails too, and the first failure is the one reported.

use crate::engine::{StartError, panic_text};
use crate::startup::{LibraryRecord, Phase, Phases, RankRecord};
use slotgraph_graphs::cuda::ExchangeReport;
use slotgraph_graphs::device::Device;
use slotgraph_graphs::step::StepLimits;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Makes a rank's device on the thread that will use and drop it.
pub type Factory = Box<dyn FnOnce(&Startup) -> Result<Prepared, PrepareError> + Send>;

/// A device that is ready to run steps, and what the start-up record says of it.
pub struct Prepared {
    pub device: Box<dyn Device>,
    /// Its final limits: the pool's pages are known only once the weights are loaded. The same on every rank.
    pub limits: StepLimits,
    pub bytes_read: u64,
    /// Ordinal, UUID and PCI address of a GPU.
    pub ordinal: Option<usize>,
    pub uuid: Option<String>,
    pub pci: Option<String>,
    /// Libraries that were loaded at run time.
    pub libraries: Vec<LibraryRecord>,
    /// How a GPU reaches those of the other ranks.
    pub exchange: Option<ExchangeReport>,
}

impl Prepared {
    /// A device that is no GPU.
    pub fn new(device: Box<dyn Device>, limits: StepLimits, bytes_read: u64) -> Self {
        Prepared {
            device,
            limits,
            bytes_read,
            ordinal: None,
            uuid: None,
            pci: None,
            libraries: Vec::new(),
            exchange: None,
        }
    }
}

/// Why a device could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrepareError {
    /// A flag would help: exit 2.
    #[error("{0}")]
    Config(String),
    #[error("{0}")]
    Failed(String),
    /// Another rank left, whose own failure is the one to report.
    #[error("{0}")]
    Followed(String),
}

/// What a rank's start amounted to.
#[derive(Clone, Debug, PartialEq)]
pub struct RankStart {
    pub limits: StepLimits,
    pub record: RankRecord,
    pub libraries: Vec<LibraryRecord>,
}

/// A rank's view of the common start.
pub struct Startup {
    pub rank: usize,
    rendezvous: Arc<Rendezvous>,
    clock: RefCell<(Phase, Instant, Phases)>,
}

impl Startup {
    pub(crate) fn new(rank: usize, rendezvous: Arc<Rendezvous>) -> Self {
        let clock = RefCell::new((Phase::Config, Instant::now(), Phases::default()));
        Startup { rank, rendezvous, clock }
    }
    /// The start of the only rank.
    pub(crate) fn alone(limit: Duration) -> Self {
        Startup::new(0, Rendezvous::new(1, Instant::now() + limit))
    }

    /// This rank has finished what came before and enters `phase` together with all others.
    pub fn enter(&self, phase: Phase) -> Result<(), PrepareError> {
        self.mark(phase);
        self.rendezvous.meet(self.rank, phase)?;
        // Waiting for others is nobody's phase.
        self.clock.borrow_mut().1 = Instant::now();
        Ok(())
    }
    /// Moves time from the phase that this rank is in to one that it went through inside it.
    pub fn add(&self, phase: Phase, spent: Duration) {
        let mut clock = self.clock.borrow_mut();
        clock.1 += spent;
        clock.2.add(phase, spent);
    }
    /// Never arrives: a planted fault.
    pub(crate) fn stall(&self) -> PrepareError {
        std::thread::sleep(self.rendezvous.time_left() + Duration::from_secs(60));
        PrepareError::Failed("the fault start-stall was armed".into())
    }

    /// Runs the factory; whatever goes wrong is named with rank and phase.
    pub(crate) fn prepare(self, factory: Factory) -> Result<(Box<dyn Device>, RankStart), StartError> {
        let made = catch_unwind(AssertUnwindSafe(|| factory(&self)));
        let made = made.unwrap_or_else(|panic| Err(PrepareError::Failed(panic_text(&*panic))));
        let phase = self.clock.borrow().0;
        let made = made.and_then(|prepared| self.enter(Phase::Ready).map(|()| prepared));
        match made {
            Ok(Prepared { device, limits, bytes_read, ordinal, uuid, pci, libraries, exchange }) => {
                let record = RankRecord::new(self.rank, self.clock.into_inner().2, bytes_read, device.facts());
                let record = RankRecord { ordinal, uuid, pci, exchange, ..record };
                Ok((device, RankStart { limits, record, libraries }))
            }
            Err(error) => {
                let error = match error {
                    PrepareError::Config(reason) => StartError::Config(reason),
                    PrepareError::Failed(reason) => StartError::failed(self.rank, phase.name(), reason),
                    PrepareError::Followed(reason) => {
                        self.rendezvous.await_failure();
                        StartError::failed(self.rank, phase.name(), reason)
                    }
                };
                Err(self.rendezvous.fail(error))
            }
        }
    }

    fn mark(&self, next: Phase) {
        let mut clock = self.clock.borrow_mut();
        let (phase, since, phases) = &mut *clock;
        phases.add(*phase, since.elapsed());
        (*phase, *since) = (next, Instant::now());
    }
}

/// Where ranks wait for each other.
pub(crate) struct Rendezvous {
    deadline: Instant,
    state: Mutex<Meeting>,
    changed: Condvar,
}

struct Meeting {
    /// Phase each rank has arrived at, or none yet.
    at: Vec<Option<Phase>>,
    arrived: usize,
    round: u64,
    failed: Option<StartError>,
}

impl Rendezvous {
    pub fn new(ranks: usize, deadline: Instant) -> Arc<Self> {
        let state = Meeting { at: vec![None; ranks], arrived: 0, round: 0, failed: None };
        Arc::new(Rendezvous { deadline, state: Mutex::new(state), changed: Condvar::new() })
    }
    pub fn time_left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }
    /// Where each rank is.
    pub fn describe(&self) -> String {
        let state = self.state();
        let place = |at: &Option<Phase>| at.map_or("its first phase", Phase::name);
        let places = state.at.iter().enumerate().map(|(rank, at)| format!("rank {rank} is in {}", place(at)));
        places.collect::<Vec<_>>().join(", ")
    }

    fn state(&self) -> MutexGuard<'_, Meeting> {
        self.state.lock().expect("nothing panics while it holds the meeting")
    }

    /// Waits until every rank is here.
    fn meet(&self, rank: usize, phase: Phase) -> Result<(), PrepareError> {
        let mut state = self.state();
        state.at[rank] = Some(phase);
        state.arrived += 1;
        let round = state.round;
        if state.arrived == state.at.len() {
            (state.arrived, state.round) = (0, round + 1);
            self.changed.notify_all();
        }
        while state.round == round && state.failed.is_none() {
            let left = self.time_left();
            if left.is_zero() {
                drop(state);
                return Err(PrepareError::Failed(format!("waited too long: {}", self.describe())));
            }
            state = self.changed.wait_timeout(state, left).expect("nothing panics while it holds the meeting").0;
        }
        match &state.failed {
            Some(first) => Err(PrepareError::Failed(format!("gave up: {first}"))),
            None => Ok(()),
        }
    }

    /// Waits until a rank has said why it failed; not for long, since it is about to.
    fn await_failure(&self) {
        let deadline = Instant::now() + Duration::from_secs(5);
        let mut state = self.state();
        while state.failed.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.changed.wait_timeout(state, left).expect("nothing panics while it holds the meeting").0;
        }
    }

    /// Wakes everybody who waits; the failure that came first.
    fn fail(&self, error: StartError) -> StartError {
        let mut state = self.state();
        let first = state.failed.get_or_insert(error).clone();
        self.changed.notify_all();
        first
    }
}
