//! Requests in flight: found by id to be cancelled, counted by outcome when they end.
//!
//! `routes` begins a `Live` once the engine took the request; whoever finishes the answer says how it ended, and a `Live` that is dropped
//! unsaid was left by its client. **Invariant:** every `Live` counts exactly one outcome, unless someone else does.

use crate::answer::Finished;
use crate::error::ApiError;
use crate::metrics::{Metrics, Outcome};
use crate::wire::Wire;
use slotgraph_runtime::request::{AbortCause, RequestId};
use slotgraph_runtime::sink::Abort;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

/// Ids of ended requests that are remembered, to tell a late cancel from a wrong one.
const ENDED_MAX: usize = 1000;

#[derive(Default)]
pub struct Registry {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    next: u64,
    /// A client may use one id several times at once.
    live: HashMap<RequestId, Vec<(u64, Vec<Abort>)>>,
    ended: HashSet<RequestId>,
    ended_order: VecDeque<RequestId>,
}

/// What a cancel found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancelled {
    Now,
    AlreadyEnded,
    Unknown,
}

/// A request that the engine took.
pub struct Live {
    registry: Arc<Registry>,
    metrics: Arc<Metrics>,
    wire: Arc<Wire>,
    id: RequestId,
    serial: u64,
    outcome: Option<Outcome>,
    counts: bool,
}

impl Registry {
    pub fn begin(self: &Arc<Self>, id: RequestId, aborts: Vec<Abort>, metrics: Arc<Metrics>, wire: Arc<Wire>) -> Live {
        let mut table = self.lock();
        let serial = table.next;
        table.next += 1;
        table.live.entry(id.clone()).or_default().push((serial, aborts));
        drop(table);
        Live { registry: self.clone(), metrics, wire, id, serial, outcome: None, counts: true }
    }

    /// Ends every live request of this id.
    pub fn cancel(&self, id: &str) -> Cancelled {
        let table = self.lock();
        match table.live.get(id) {
            Some(requests) => {
                let aborts = requests.iter().flat_map(|(_, aborts)| aborts);
                let ended = aborts.map(|abort| abort.set(AbortCause::Cancelled)).filter(|first| *first).count();
                if ended > 0 { Cancelled::Now } else { Cancelled::AlreadyEnded }
            }
            None if table.ended.contains(id) => Cancelled::AlreadyEnded,
            None => Cancelled::Unknown,
        }
    }

    /// Requests in flight.
    pub fn count(&self) -> usize {
        self.lock().live.values().map(Vec::len).sum()
    }

    fn end(&self, id: &RequestId, serial: u64) {
        let mut table = self.lock();
        if let Some(requests) = table.live.get_mut(id) {
            requests.retain(|(other, _)| *other != serial);
            if requests.is_empty() {
                table.live.remove(id);
            }
        }
        if table.ended.insert(id.clone()) {
            table.ended_order.push_back(id.clone());
        }
        if table.ended_order.len() > ENDED_MAX
            && let Some(oldest) = table.ended_order.pop_front()
        {
            table.ended.remove(&oldest);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Live {
    pub fn finished(mut self, finished: Finished) {
        self.outcome = Some(match finished {
            Finished::Stop => Outcome::Stop,
            Finished::Length => Outcome::Length,
        });
    }
    pub fn failed(mut self, error: &ApiError) {
        self.outcome = Some(Outcome::of(error));
    }
    /// Ends without an outcome: whoever answers the request counts it.
    pub fn counted_elsewhere(mut self) {
        self.counts = false;
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        let outcome = self.outcome.unwrap_or(match self.wire.cause() {
            AbortCause::Disconnected => Outcome::Disconnected,
            _ => Outcome::Cancelled,
        });
        if self.counts {
            self.metrics.count(outcome);
        }
        self.registry.end(&self.id, self.serial);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cancels_find_live_ended_and_unknown_requests() {
        let registry = Arc::new(Registry::default());
        let metrics = Arc::new(Metrics::new("m", &[1]));
        let abort = Abort::default();
        let live = registry.begin("a".into(), vec![abort.clone()], metrics.clone(), Arc::default());
        assert_eq!(registry.cancel("b"), Cancelled::Unknown);
        assert_eq!(registry.cancel("a"), Cancelled::Now);
        assert_eq!(registry.cancel("a"), Cancelled::AlreadyEnded);
        assert_eq!((abort.cause(), registry.count()), (Some(AbortCause::Cancelled), 1));
        live.finished(Finished::Stop);
        assert_eq!((registry.cancel("a"), registry.count()), (Cancelled::AlreadyEnded, 0));
        assert_eq!(metrics.counted(Outcome::Stop), 1);
    }

    #[test]
    fn ended_ids_are_forgotten_in_order() {
        let registry = Arc::new(Registry::default());
        let metrics = Arc::new(Metrics::new("m", &[1]));
        for number in 0..ENDED_MAX + 5 {
            drop(registry.begin(number.to_string().into(), vec![], metrics.clone(), Arc::default()));
        }
        assert_eq!(registry.cancel("0"), Cancelled::Unknown);
        assert_eq!(registry.cancel("1004"), Cancelled::AlreadyEnded);
        assert_eq!(metrics.counted(Outcome::Disconnected), ENDED_MAX as u64 + 5);
    }
}
