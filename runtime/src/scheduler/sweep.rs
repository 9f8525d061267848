//! The sweep: choices whose abort word is set leave, wherever they are, between two steps.
//!
//! `collect` reads each abort word once; `retire` goes by what was collected. A word set in between waits for the next sweep: reading it again
//! would let a choice vanish from a table without being ended. A step already enqueued is never revoked: its rows' records are late.

use super::Scheduler;
use super::ending::End;
use crate::load::LifeState;
use crate::request::AbortCause;
use std::time::Instant;

/// A choice that will be retired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swept {
    key: u64,
    group: u64,
    cause: AbortCause,
}

impl Scheduler {
    /// Collects the choices that are to end: aborted, past their deadline, past the drain deadline, or siblings of such. `swept` is reused.
    pub fn collect(&mut self, swept: &mut Vec<Swept>, now: Instant) {
        swept.clear();
        let drained = self.drain_deadline.is_some_and(|deadline| deadline <= now);
        let (active, pending) = (self.order.len() as u32, self.queue.len() as u32);
        let seated = self.seats.iter_mut().flatten().map(|seated| &mut seated.live);
        for live in seated.chain(self.queue.iter_mut()) {
            live.note_company(active, pending);
            let abort = live.choice.sink.abort();
            if live.group.deadline.is_some_and(|deadline| deadline <= now) {
                abort.set(AbortCause::Expired);
            }
            if drained {
                abort.set(AbortCause::Drain);
            }
            if let Some(cause) = abort.cause() {
                swept.push(Swept { key: live.key, group: live.group.number, cause });
            }
        }
        self.collect_siblings(swept);
        swept.sort_unstable_by_key(|swept| swept.key);
    }

    /// One abort ends all choices of its group, but for a stop string, which completes one.
    fn collect_siblings(&self, swept: &mut Vec<Swept>) {
        let mut groups: Vec<(u64, AbortCause)> = swept
            .iter()
            .filter(|swept| swept.cause != AbortCause::StopString)
            .map(|swept| (swept.group, swept.cause))
            .collect();
        if groups.is_empty() {
            return;
        }
        groups.sort_unstable_by_key(|&(group, cause)| (group, cause as u8));
        groups.dedup_by_key(|&mut (group, _)| group);
        swept.sort_unstable_by_key(|swept| swept.key);
        let collected = swept.len();
        let seated = self.seats.iter().flatten().map(|seated| &seated.live);
        for live in seated.chain(&self.queue) {
            let Ok(at) = groups.binary_search_by_key(&live.group.number, |&(group, _)| group) else { continue };
            if swept[..collected].binary_search_by_key(&live.key, |swept| swept.key).is_err() {
                let (group, cause) = groups[at];
                live.choice.sink.abort().set(cause);
                swept.push(Swept { key: live.key, group, cause });
            }
        }
    }

    /// Ends what was collected.
    pub fn retire(&mut self, swept: &[Swept], now: Instant) {
        if !self.options.policy.sweep_once {
            // The rule is off: what is aborted by now leaves the queue, whether it was collected or not.
            let collected = |key| swept.binary_search_by_key(&key, |swept| swept.key).is_ok();
            self.queue.retain(|live| live.choice.sink.abort().cause().is_none() || collected(live.key));
        }
        if swept.is_empty() {
            return;
        }
        let cause_of = |key: u64| swept.binary_search_by_key(&key, |swept| swept.key).ok().map(|at| swept[at].cause);
        let mut at = 0;
        while at < self.order.len() {
            let slot = self.order[at];
            let seated = self.seated(slot);
            let Some(cause) = cause_of(seated.live.key) else {
                at += 1;
                continue;
            };
            self.load.count_swept(seated.state(), cause);
            let live = self.unseat(slot, false);
            self.end(live, End::Aborted(cause), now);
        }
        for _ in 0..self.queue.len() {
            let live = self.queue.pop_front().expect("as many as there were");
            let Some(cause) = cause_of(live.key) else {
                self.queue.push_back(live);
                continue;
            };
            self.load.count_swept(LifeState::Queued, cause);
            if let Some(share) = live.share {
                self.shares.leave_queue(share, &mut self.pages, self.enqueued);
            }
            self.end(live, End::Aborted(cause), now);
        }
        self.thaw();
    }
}
