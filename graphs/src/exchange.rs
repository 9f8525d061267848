//! Where the ranks of one process meet when their devices are CPUs: an all-gather over shared memory.
//!
//! Made once for all ranks; each rank's device calls it from its own OS thread, never from inside the rayon pool, because
//! it blocks. **Invariant:** exchange n of every rank meets exchange n of every other; bytes are moved and never added; a
//! rank that leaves is named to whoever waits for it.

use slotgraph_kernels::ops::{AllGather, ExchangeError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// An all-gather between the threads of one process.
pub struct MemoryExchange {
    ranks: usize,
    timeout: Duration,
    state: Mutex<State>,
    moved: Condvar,
}

struct State {
    /// Exchanges that each rank has entered.
    entered: Vec<u64>,
    /// What each rank brought, for even and odd exchanges: a rank enters n + 2 only after all entered n + 1, and so took
    /// from n what they needed.
    brought: [Vec<Vec<f32>>; 2],
    gone: Option<(usize, String)>,
}

impl MemoryExchange {
    /// A meeting place of `ranks` ranks that wait for each other at most `timeout`.
    pub fn new(ranks: usize, timeout: Duration) -> Arc<MemoryExchange> {
        let none = || vec![Vec::new(); ranks];
        let state = State { entered: vec![0; ranks], brought: [none(), none()], gone: None };
        Arc::new(MemoryExchange { ranks, timeout, state: Mutex::new(state), moved: Condvar::new() })
    }

    /// Exchanges that `rank` has entered.
    pub fn entered(&self, rank: usize) -> u64 {
        self.state().entered[rank]
    }

    /// A rank that panicked inside an exchange left no broken state: every change is a whole assignment.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl State {
    /// A rank that has not entered exchange `sequence`.
    fn missing(&self, sequence: u64) -> Option<usize> {
        self.entered.iter().position(|&entered| entered < sequence)
    }
}

impl AllGather for MemoryExchange {
    fn all_gather(&self, rank: usize, send: &[f32], gathered: &mut [f32]) -> Result<(), ExchangeError> {
        assert_eq!(gathered.len(), self.ranks * send.len(), "every rank brings as much as this one");
        let mut state = self.state();
        let sequence = state.entered[rank] + 1;
        let parity = (sequence % 2) as usize;
        state.entered[rank] = sequence;
        let mine = &mut state.brought[parity][rank];
        mine.clear();
        mine.extend_from_slice(send);
        self.moved.notify_all();

        let deadline = Instant::now() + self.timeout;
        while let Some(missing) = state.missing(sequence) {
            if let Some((rank, reason)) = &state.gone {
                return Err(ExchangeError::PeerGone { rank: *rank, reason: reason.clone() });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let timeout_ms = self.timeout.as_millis() as u64;
                return Err(ExchangeError::Timeout { waiting: rank, missing, sequence, timeout_ms });
            }
            state = match self.moved.wait_timeout(state, left) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        for (place, brought) in gathered.chunks_exact_mut(send.len().max(1)).zip(&state.brought[parity]) {
            assert_eq!(brought.len(), place.len(), "ranks run the same plan and bring the same rows");
            place.copy_from_slice(brought);
        }
        Ok(())
    }

    fn leave(&self, rank: usize, reason: &str) {
        let mut state = self.state();
        if state.gone.is_none() {
            state.gone = Some((rank, reason.to_owned()));
        }
        self.moved.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn every_rank_gets_what_every_rank_brought() {
        for ranks in [1, 2, 4, 8] {
            let exchange = MemoryExchange::new(ranks, LONG);
            thread::scope(|scope| {
                for rank in 0..ranks {
                    let exchange = &exchange;
                    scope.spawn(move || {
                        for round in 0..200_u32 {
                            let rows = 1 + (round % 3) as usize;
                            let value = |rank: usize| round as f32 * 8.0 + rank as f32;
                            let mut gathered = vec![f32::NAN; ranks * rows];
                            exchange.all_gather(rank, &vec![value(rank); rows], &mut gathered).unwrap();
                            let expected: Vec<f32> = (0..ranks).flat_map(|rank| vec![value(rank); rows]).collect();
                            assert_eq!(gathered, expected, "round {round}");
                        }
                    });
                }
            });
            assert_eq!(exchange.entered(ranks - 1), 200);
        }
    }

    #[test]
    fn a_rank_that_does_not_come_is_named() {
        let exchange = MemoryExchange::new(2, Duration::from_millis(20));
        let mut gathered = [0.0; 2];
        let error = exchange.all_gather(0, &[1.0], &mut gathered).unwrap_err();
        assert_eq!(error, ExchangeError::Timeout { waiting: 0, missing: 1, sequence: 1, timeout_ms: 20 });
    }

    #[test]
    fn a_rank_that_leaves_is_heard_at_once() {
        let exchange = MemoryExchange::new(3, LONG);
        let start = Instant::now();
        let errors = thread::scope(|scope| {
            let waiting: Vec<_> = (0..2)
                .map(|rank| {
                    let exchange = &exchange;
                    scope.spawn(move || exchange.all_gather(rank, &[1.0], &mut [0.0; 3]).unwrap_err())
                })
                .collect();
            while exchange.entered(0) + exchange.entered(1) < 2 {
                thread::yield_now();
            }
            exchange.leave(2, "its device was lost");
            waiting.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        let gone = ExchangeError::PeerGone { rank: 2, reason: "its device was lost".into() };
        assert_eq!(errors, [gone.clone(), gone]);
        assert!(start.elapsed() < LONG);
    }

    #[test]
    fn an_exchange_that_is_whole_succeeds_though_a_rank_left_after_it() {
        let exchange = MemoryExchange::new(2, LONG);
        thread::scope(|scope| {
            let exchange = &exchange;
            scope.spawn(move || {
                exchange.all_gather(1, &[2.0], &mut [0.0; 2]).unwrap();
                exchange.leave(1, "done");
            });
            let mut gathered = [0.0; 2];
            exchange.all_gather(0, &[1.0], &mut gathered).unwrap();
            assert_eq!(gathered, [1.0, 2.0]);
            assert!(matches!(
                exchange.all_gather(0, &[1.0], &mut gathered),
                Err(ExchangeError::PeerGone { rank: 1, .. })
            ));
        });
    }
}
