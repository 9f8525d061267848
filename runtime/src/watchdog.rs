//! A watchdog: aborts the process when something that must end does not.

use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

/// Aborts the process unless it is dropped in time.
#[derive(Debug)]
pub struct Watchdog {
    /// Its end is the sign that all is well.
    _alive: SyncSender<()>,
}

impl Watchdog {
    /// `what` must be over within `limit`.
    pub fn arm(limit: Duration, what: &'static str) -> Watchdog {
        let (alive, watched) = sync_channel::<()>(0);
        let watch = move || {
            if watched.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                eprintln!("slotgraph: {what} took longer than {limit:?}; aborting");
                std::process::abort();
            }
        };
        // Without a thread to watch, go on unwatched: whoever arms a watchdog is in trouble already.
        let _ = std::thread::Builder::new().name("watchdog".into()).spawn(watch);
        Watchdog { _alive: alive }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watchdog_that_is_dropped_in_time_does_nothing() {
        drop(Watchdog::arm(Duration::from_millis(20), "nothing"));
        std::thread::sleep(Duration::from_millis(60));
    }
}
