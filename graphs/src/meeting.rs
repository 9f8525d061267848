//! Where the ranks of one process meet when their devices are GPUs: barriers, addresses and identifiers on the way to readiness, and word
//! of a rank that leaves.
//!
//! Made once for all ranks; each rank's device holds it. Nothing else of the ranks assumes one process: a transport between hosts would
//! bring the same words by other means. **Invariants:** meeting n of every rank is meeting n of every other, in the same place; whoever waits for a
//! rank that has left hears which it was and why; every wait ends.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// What a rank brings to a meeting.
pub type Words = Vec<u64>;

/// The meeting place of one set of ranks.
pub struct Meeting {
    ranks: usize,
    /// Longest wait of a meeting.
    timeout: Duration,
    state: Mutex<State>,
    moved: Condvar,
    /// Whether `State::gone` is set, for those who look at every poll.
    is_gone: AtomicBool,
    /// By rank: the newest step that it has enqueued.
    steps: Box<[AtomicU64]>,
}

struct State {
    /// Meetings that each rank has come to.
    came: Vec<u64>,
    /// What each brought, for even and odd meetings: a rank comes to n + 2 only after all came to n + 1, and so left n.
    brought: [Vec<(&'static str, Words)>; 2],
    gone: Option<(usize, String)>,
    /// Ranks that are about to give their memory back.
    parting: Vec<bool>,
}

/// Why a meeting did not take place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MeetingError {
    #[error("rank {waiting} waited at {place} for rank {missing} for longer than {timeout_ms} ms")]
    Timeout { waiting: usize, missing: usize, place: &'static str, timeout_ms: u64 },
    #[error("rank {rank} left: {reason}")]
    Gone { rank: usize, reason: String },
    #[error("rank {rank} came to {place} where rank {other} came to {theirs}")]
    Elsewhere { rank: usize, place: &'static str, other: usize, theirs: &'static str },
}

impl Meeting {
    /// A place for `ranks` ranks that wait for each other at most `timeout`.
    pub fn new(ranks: usize, timeout: Duration) -> Arc<Meeting> {
        let nothing = || vec![("", Words::new()); ranks];
        let state =
            State { came: vec![0; ranks], brought: [nothing(), nothing()], gone: None, parting: vec![false; ranks] };
        let steps = (0..ranks).map(|_| AtomicU64::new(0)).collect();
        let (state, moved, is_gone) = (Mutex::new(state), Condvar::new(), AtomicBool::new(false));
        Arc::new(Meeting { ranks, timeout, state, moved, is_gone, steps })
    }

    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// A rank that panicked here left no broken state: every change is a whole assignment.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, left: Duration) -> MutexGuard<'a, State> {
        match self.moved.wait_timeout(state, left) {
            Ok((state, _)) => state,
            Err(poisoned) => poisoned.into_inner().0,
        }
    }

    /// Rank `rank` is at `place` and brings `words`; returns what everyone brought, by rank, once all are here.
    pub fn meet(&self, rank: usize, place: &'static str, words: Words) -> Result<Vec<Words>, MeetingError> {
        let mut state = self.state();
        let number = state.came[rank] + 1;
        let parity = (number % 2) as usize;
        state.came[rank] = number;
        state.brought[parity][rank] = (place, words);
        self.moved.notify_all();
        let deadline = Instant::now() + self.timeout;
        while let Some(missing) = state.came.iter().position(|&came| came < number) {
            if let Some((rank, reason)) = &state.gone {
                return Err(MeetingError::Gone { rank: *rank, reason: reason.clone() });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let timeout_ms = self.timeout.as_millis() as u64;
                return Err(MeetingError::Timeout { waiting: rank, missing, place, timeout_ms });
            }
            state = self.wait(state, left);
        }
        let brought = &state.brought[parity];
        if let Some(other) = brought.iter().position(|(theirs, _)| *theirs != place) {
            return Err(MeetingError::Elsewhere { rank, place, other, theirs: brought[other].0 });
        }
        Ok(brought.iter().map(|(_, words)| words.clone()).collect())
    }

    /// Rank `rank` takes no further part; only the first to leave is remembered.
    pub fn leave(&self, rank: usize, reason: &str) {
        let mut state = self.state();
        if state.gone.is_none() {
            state.gone = Some((rank, reason.to_owned()));
        }
        self.is_gone.store(true, Ordering::Release);
        self.moved.notify_all();
    }

    /// That no rank has left. Cheap: looked at while a step runs.
    pub fn check(&self) -> Result<(), MeetingError> {
        if !self.is_gone.load(Ordering::Acquire) {
            return Ok(());
        }
        match &self.state().gone {
            Some((rank, reason)) => Err(MeetingError::Gone { rank: *rank, reason: reason.clone() }),
            None => Ok(()),
        }
    }

    /// Rank `rank` runs no more steps and is about to give its memory back: waits, at most `limit`, until that is true of all, so that
    /// nobody's memory goes while another's kernel may write it.
    pub fn part(&self, rank: usize, limit: Duration) {
        let mut state = self.state();
        state.parting[rank] = true;
        self.moved.notify_all();
        let deadline = Instant::now() + limit;
        while !state.parting.iter().all(|&parting| parting) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.wait(state, left);
        }
    }

    /// Notes that rank `rank` has enqueued `step`.
    pub fn enqueued(&self, rank: usize, step: u64) {
        self.steps[rank].store(step, Ordering::Release);
    }

    /// The rank furthest behind `step`, if one is, and the newest step that it has enqueued.
    pub fn behind(&self, step: u64) -> Option<(usize, u64)> {
        let steps = self.steps.iter().map(|newest| newest.load(Ordering::Acquire)).enumerate();
        steps.min_by_key(|(_, newest)| *newest).filter(|(_, newest)| *newest < step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn everyone_gets_what_everyone_brought_each_time() {
        for ranks in [1, 2, 8] {
            let meeting = Meeting::new(ranks, LONG);
            thread::scope(|scope| {
                for rank in 0..ranks {
                    let meeting = &meeting;
                    scope.spawn(move || {
                        for round in 0..200 {
                            let brought = meeting.meet(rank, "here", vec![round, rank as u64]).unwrap();
                            let want: Vec<Words> = (0..ranks as u64).map(|rank| vec![round, rank]).collect();
                            assert_eq!(brought, want);
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn a_rank_that_does_not_come_or_comes_elsewhere_is_named() {
        let meeting = Meeting::new(2, Duration::from_millis(20));
        let error = meeting.meet(0, "the barrier before the replays", Words::new()).unwrap_err().to_string();
        assert_eq!(error, "rank 0 waited at the barrier before the replays for rank 1 for longer than 20 ms");
        let meeting = Meeting::new(2, LONG);
        thread::scope(|scope| {
            scope.spawn(|| meeting.meet(1, "there", Words::new()).unwrap_err());
            let error = meeting.meet(0, "here", Words::new()).unwrap_err();
            assert_eq!(error, MeetingError::Elsewhere { rank: 0, place: "here", other: 1, theirs: "there" });
        });
    }

    #[test]
    fn a_rank_that_leaves_is_heard_at_once_and_the_first_one_only() {
        let meeting = Meeting::new(3, LONG);
        assert!(meeting.check().is_ok());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| meeting.meet(0, "here", Words::new()).unwrap_err());
            meeting.leave(2, "its device was lost");
            meeting.leave(1, "rank 2 had left");
            let gone = MeetingError::Gone { rank: 2, reason: "its device was lost".into() };
            assert_eq!(waiting.join().unwrap(), gone);
            assert_eq!(meeting.check(), Err(gone));
        });
    }

    #[test]
    fn parting_waits_for_all_and_not_for_ever() {
        let meeting = Meeting::new(2, LONG);
        let began = Instant::now();
        meeting.part(0, Duration::from_millis(30));
        assert!(began.elapsed() >= Duration::from_millis(30));
        meeting.part(1, LONG);
        assert!(began.elapsed() < LONG);
    }

    #[test]
    fn the_rank_that_is_behind_is_found() {
        let meeting = Meeting::new(3, LONG);
        for (rank, step) in [(0, 9), (1, 7), (2, 8)] {
            meeting.enqueued(rank, step);
        }
        assert_eq!(meeting.behind(9), Some((1, 7)));
        assert_eq!(meeting.behind(7), None);
    }
}
