//! The clock that the engine reads, so that a test can hold it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Monotonic time.
pub trait Clock {
    fn now(&self) -> Instant;
}

/// The machine's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }
}

/// A clock that moves only when it is told to. Clones share their time.
#[derive(Clone, Debug)]
pub struct ManualClock {
    start: Instant,
    elapsed_ns: Arc<AtomicU64>,
}

impl Default for ManualClock {
    fn default() -> Self {
        ManualClock { start: Instant::now(), elapsed_ns: Arc::default() }
    }
}

impl ManualClock {
    pub fn advance(&self, by: Duration) {
        self.elapsed_ns.fetch_add(by.as_nanos() as u64, Relaxed);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        self.start + Duration::from_nanos(self.elapsed_ns.load(Relaxed))
    }
}
