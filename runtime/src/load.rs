//! Load: what the engine tells the rest of the process about itself, as plain atomics.
//!
//! Written by the engine thread (gauges once a turn after the sweep and again before it parks, counters where they happen) and by the
//! edge (`live`, `draining`); read by `/metrics`, `/health` and the probes, at any time, without a lock. **Invariant:** with nothing
//! live and nothing in flight, `running`, `waiting` and `live` are 0 and `pages_used` is what it was at start.

use crate::request::AbortCause;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// What a seat is doing. The order is that of `SLOT_STATES`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SlotState {
    Free,
    Prefilling,
    Active,
    /// Left by its holder; an enqueued step may still name it.
    Cooling,
}

pub const SLOT_STATES: [SlotState; 4] = [SlotState::Free, SlotState::Prefilling, SlotState::Active, SlotState::Cooling];

impl SlotState {
    pub fn name(self) -> &'static str {
        match self {
            SlotState::Free => "free",
            SlotState::Prefilling => "prefilling",
            SlotState::Active => "active",
            SlotState::Cooling => "cooling",
        }
    }
}

/// Where a choice was in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LifeState {
    Queued,
    Prefilling,
    Active,
}

pub const LIFE_STATES: [LifeState; 3] = [LifeState::Queued, LifeState::Prefilling, LifeState::Active];

impl LifeState {
    pub fn name(self) -> &'static str {
        match self {
            LifeState::Queued => "queued",
            LifeState::Prefilling => "prefilling",
            LifeState::Active => "active",
        }
    }
}

pub const ABORT_CAUSES: [AbortCause; 6] = [
    AbortCause::Disconnected,
    AbortCause::Cancelled,
    AbortCause::Expired,
    AbortCause::SlowReader,
    AbortCause::Drain,
    AbortCause::StopString,
];

/// Steps of one bucket.
#[derive(Debug)]
pub struct BucketLoad {
    pub bucket: usize,
    /// Steps settled, by whatever means.
    pub steps: AtomicU64,
    /// Of these, graph replays.
    pub replays: AtomicU64,
}

/// The engine's gauges and counters.
#[derive(Debug)]
pub struct Load {
    started: Instant,
    /// Choices that hold a slot.
    pub running: AtomicU64,
    /// Choices in the queue.
    pub waiting: AtomicU64,
    /// Choices accepted at the edge and not ended: what admission is limited by.
    pub live: AtomicUsize,
    slots: [AtomicU64; 4],
    /// Pages held or cooling; page 0 is in neither count.
    pub pages_used: AtomicU64,
    pub pages_total: AtomicU64,
    head_wait_us: AtomicU64,
    pub buckets: Vec<BucketLoad>,
    /// Steps enqueued.
    pub steps: AtomicU64,
    /// Steps settled that were not graph replays.
    pub eager_steps: AtomicU64,
    pub padded_rows: AtomicU64,
    pub preemptions: AtomicU64,
    /// Prompt tokens whose rows settled for a holder that was still there; shared and recomputed ones are not counted again.
    pub prompt_tokens: AtomicU64,
    /// Tokens handed to a sink.
    pub generation_tokens: AtomicU64,
    /// Records that named a holder that had left.
    pub late_records: AtomicU64,
    pub nan_rows: AtomicU64,
    pub routes_local: AtomicU64,
    pub routes_remote: AtomicU64,
    swept: [[AtomicU64; 6]; 3],
    heartbeat_ms: AtomicU64,
    ready: AtomicBool,
    draining: AtomicBool,
    dead: OnceLock<String>,
}

impl Load {
    pub fn new(buckets: &[usize]) -> Self {
        let bucket = |&bucket: &usize| BucketLoad { bucket, steps: AtomicU64::new(0), replays: AtomicU64::new(0) };
        Load {
            started: Instant::now(),
            running: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            live: AtomicUsize::new(0),
            slots: Default::default(),
            pages_used: AtomicU64::new(0),
            pages_total: AtomicU64::new(0),
            head_wait_us: AtomicU64::new(0),
            buckets: buckets.iter().map(bucket).collect(),
            steps: AtomicU64::new(0),
            eager_steps: AtomicU64::new(0),
            padded_rows: AtomicU64::new(0),
            preemptions: AtomicU64::new(0),
            prompt_tokens: AtomicU64::new(0),
            generation_tokens: AtomicU64::new(0),
            late_records: AtomicU64::new(0),
            nan_rows: AtomicU64::new(0),
            routes_local: AtomicU64::new(0),
            routes_remote: AtomicU64::new(0),
            swept: Default::default(),
            heartbeat_ms: AtomicU64::new(0),
            ready: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            dead: OnceLock::new(),
        }
    }

    /// Seats in this state at the last publication.
    pub fn slots(&self, state: SlotState) -> u64 {
        self.slots[state as usize].load(Relaxed)
    }
    /// Choices that the sweep has retired, by where they were and why.
    pub fn swept(&self, state: LifeState, cause: AbortCause) -> u64 {
        self.swept[state as usize][cause as usize - 1].load(Relaxed)
    }
    /// How long the head of the queue had waited at the last publication; 0 with an empty queue.
    pub fn head_wait(&self) -> Duration {
        Duration::from_micros(self.head_wait_us.load(Relaxed))
    }
    /// Since the engine thread's last turn.
    pub fn since_heartbeat(&self) -> Duration {
        self.started.elapsed().saturating_sub(Duration::from_millis(self.heartbeat_ms.load(Relaxed)))
    }
    /// Whether the engine thread has made no turn for longer than `limit`. It makes one at least every half second, even when idle.
    pub fn stalled(&self, limit: Duration) -> bool {
        self.is_ready() && self.since_heartbeat() > limit
    }
    /// Every plan is prepared and the loop runs.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Relaxed)
    }
    pub fn is_draining(&self) -> bool {
        self.draining.load(Relaxed)
    }
    /// Why the engine died, if it did.
    pub fn dead(&self) -> Option<&str> {
        self.dead.get().map(String::as_str)
    }
    /// Ready, alive and accepting.
    pub fn is_healthy(&self) -> bool {
        self.is_ready() && self.dead().is_none()
    }

    pub(crate) fn publish_slots(&self, counts: [u64; 4]) {
        for (slot, count) in self.slots.iter().zip(counts) {
            slot.store(count, Relaxed);
        }
    }
    pub(crate) fn publish_head_wait(&self, wait: Duration) {
        self.head_wait_us.store(wait.as_micros() as u64, Relaxed);
    }
    pub(crate) fn beat(&self) {
        self.heartbeat_ms.store(self.started.elapsed().as_millis() as u64, Relaxed);
    }
    pub(crate) fn count_swept(&self, state: LifeState, cause: AbortCause) {
        self.swept[state as usize][cause as usize - 1].fetch_add(1, Relaxed);
    }
    pub(crate) fn set_ready(&self) {
        self.beat();
        self.ready.store(true, Relaxed);
    }
    pub(crate) fn set_draining(&self) {
        self.draining.store(true, Relaxed);
    }
    /// Marks the engine dead; the first reason stays.
    pub(crate) fn set_dead(&self, reason: &str) {
        self.dead.get_or_init(|| reason.to_owned());
    }
    /// Takes `choices` of at most `limit` places, all or none.
    pub(crate) fn take_places(&self, choices: usize, limit: usize) -> bool {
        let take = |live: usize| live.checked_add(choices).filter(|&live| live <= limit);
        self.live.fetch_update(Relaxed, Relaxed, take).is_ok()
    }
    pub(crate) fn give_places(&self, choices: usize) {
        self.live.fetch_sub(choices, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_taken_whole_or_not_at_all() {
        let load = Load::new(&[1]);
        assert!(load.take_places(3, 4));
        assert!(!load.take_places(2, 4));
        assert_eq!(load.live.load(Relaxed), 3);
        assert!(load.take_places(1, 4));
        assert!(!load.take_places(usize::MAX, 4));
        load.give_places(4);
        assert_eq!(load.live.load(Relaxed), 0);
    }

    #[test]
    fn every_cause_and_state_has_its_own_counter() {
        let load = Load::new(&[1]);
        for (i, state) in LIFE_STATES.into_iter().enumerate() {
            for (j, cause) in ABORT_CAUSES.into_iter().enumerate() {
                for _ in 0..=(i * 6 + j) {
                    load.count_swept(state, cause);
                }
            }
        }
        for (i, state) in LIFE_STATES.into_iter().enumerate() {
            for (j, cause) in ABORT_CAUSES.into_iter().enumerate() {
                assert_eq!(load.swept(state, cause), (i * 6 + j + 1) as u64);
            }
        }
    }

    #[test]
    fn the_first_reason_of_death_stays() {
        let load = Load::new(&[1]);
        load.set_ready();
        assert!(load.is_healthy());
        load.set_dead("rank 1 failed");
        load.set_dead("later");
        assert_eq!(load.dead(), Some("rank 1 failed"));
        assert!(!load.is_healthy());
    }
}
