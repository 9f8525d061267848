//! Submit and admit: groups enter the queue whole, choices leave it one by one, strictly first come, first served.

use super::Scheduler;
use super::choice::{GroupFacts, Live, Seated, Stats};
use super::ending::End;
use super::shares::{ShareId, State};
use crate::pages::pages_for;
use crate::request::{Choice, Event, FinishReason, Group};
use crate::trace::Latency;
use slotgraph_kernels::contract::PAGE_TOKENS;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

/// What becomes of the head of the queue.
enum Head {
    /// There is nothing to compute for it.
    Complete,
    /// Seat it, sharing this many prompt pages of its share.
    Seat { shared: usize },
    /// It waits for a seat, for pages, or for the sibling that fills its prompt pages; everyone behind it waits too.
    Wait,
}

impl Scheduler {
    /// Queues a group whole, or refuses its choices one by one when they could never run.
    pub fn submit(&mut self, group: Group, now: Instant) {
        let facts = Rc::new(GroupFacts {
            number: self.next_group,
            id: group.id,
            received: group.received,
            deadline: group.deadline,
        });
        self.next_group += 1;
        // Choices of one prompt are neighbours; those of a run that may share open one share.
        let mut choices = group.choices.into_iter().peekable();
        let mut run: Vec<Choice> = Vec::new();
        while let Some(choice) = choices.next() {
            run.push(choice);
            let prompt = &run[0].prompt;
            if choices.peek().is_some_and(|next| Arc::ptr_eq(&next.prompt, prompt)) {
                continue;
            }
            let pages = (prompt.len().max(1) - 1) / PAGE_TOKENS;
            let members = run.iter().filter(|choice| may_share(choice)).count();
            let share = (pages > 0 && members > 1).then(|| self.shares.open(pages, members));
            for choice in run.drain(..) {
                let share = share.filter(|_| may_share(&choice));
                self.enqueue_choice(&facts, choice, share, now);
            }
        }
    }

    fn enqueue_choice(&mut self, group: &Rc<GroupFacts>, choice: Choice, share: Option<ShareId>, now: Instant) {
        let context = (self.options.limits.max_model_len as u32).saturating_sub(choice.prompt.len() as u32);
        let live = Live {
            key: self.next_key,
            group: group.clone(),
            limit: choice.sampling.max_tokens.min(context),
            share,
            generated: Vec::new(),
            scored: 0,
            counted: 0,
            deaf: false,
            stats: Stats::default(),
            choice,
        };
        self.next_key += 1;
        match self.refusal(&live) {
            None => self.queue.push_back(live),
            Some(reason) => {
                if let Some(share) = live.share {
                    self.shares.leave_queue(share, &mut self.pages, self.enqueued);
                }
                self.end(live, End::Rejected(reason), now);
            }
        }
    }

    /// Why a choice could never run. The edge refuses these first; this is the second lock.
    fn refusal(&self, live: &Live) -> Option<String> {
        let limits = &self.options.limits;
        let prompt = live.choice.prompt.len();
        let max_tokens = live.choice.sampling.max_tokens;
        if prompt == 0 {
            return Some("the prompt has no token".to_owned());
        }
        if prompt > limits.max_model_len || (max_tokens > 0 && live.limit == 0) {
            let context = limits.max_model_len;
            return Some(format!("{prompt} prompt tokens leave no room in a context of {context} tokens"));
        }
        let pages = pages_for(live.positions_max());
        if pages > self.pages.total().min(limits.pages_per_slot) {
            let tokens = self.pages.total().min(limits.pages_per_slot) * PAGE_TOKENS;
            let wanted = live.positions_max();
            return Some(format!("the request needs {wanted} tokens of KV cache; one request can have {tokens}"));
        }
        None
    }

    /// Seats choices from the head of the queue while there are seats and pages.
    pub fn admit(&mut self, now: Instant) {
        self.thaw();
        while !self.starved && !self.queue.is_empty() {
            match self.head() {
                Head::Wait => break,
                Head::Complete => {
                    let live = self.dequeue(now);
                    self.end(live, End::Completed(FinishReason::Length), now);
                }
                Head::Seat { shared } => {
                    let live = self.dequeue(now);
                    self.seat(live, shared);
                }
            }
        }
    }

    fn head(&mut self) -> Head {
        if !self.options.policy.first_come && self.queue.len() > 1 {
            // The rule is off: the shortest prompt overtakes.
            let shortest = (0..self.queue.len()).min_by_key(|&at| self.queue[at].choice.prompt.len());
            self.queue.swap(0, shortest.expect("the queue is not empty"));
        }
        let live = &self.queue[0];
        if !live.needs_device() {
            return Head::Complete;
        }
        if self.slots.free() == 0 {
            return Head::Wait;
        }
        let shared = match live.share.map(|id| self.shares.share(id)) {
            // A sibling is about to hold the pages. Queued again after preemption, a choice may itself have filled them.
            Some(share) if matches!(share.state, State::Filling(_)) => return Head::Wait,
            Some(share) if matches!(share.state, State::Ready(_)) => share.pages,
            _ => 0,
        };
        let wanted = live.pages_reserved(self.options.reserve_tokens) - shared;
        if self.pages.free() < wanted && self.shares.held > 0 {
            let keep = live.share;
            self.shares.let_all_go(keep, &mut self.pages, self.enqueued);
            self.thaw();
        }
        if self.pages.free() < wanted { Head::Wait } else { Head::Seat { shared } }
    }

    /// Takes the head off the queue; it hears that it is scheduled the first time.
    fn dequeue(&mut self, now: Instant) -> Live {
        let mut live = self.queue.pop_front().expect("the caller looked at the head");
        if live.stats.scheduled.is_none() {
            live.stats.scheduled = Some(now);
            self.observer.latency(Latency::Queue, now.saturating_duration_since(live.group.received));
            live.deaf = !live.choice.sink.send(Event::Scheduled);
        }
        live
    }

    fn seat(&mut self, mut live: Live, shared: usize) {
        let (slot, generation) = self.slots.take().expect("the head was seated because a seat is free");
        let reserved = live.pages_reserved(self.options.reserve_tokens);
        let mut pages = Vec::with_capacity(pages_for(live.positions_max()));
        if let Some(id) = live.share {
            if let (State::Ready(held), true) = (&self.shares.share(id).state, shared > 0) {
                pages.extend_from_slice(held);
                pages.iter().for_each(|&page| self.pages.share(page));
            }
            self.shares.leave_queue(id, &mut self.pages, self.enqueued);
            self.shares.fill(id, live.key);
        }
        pages
            .extend((shared..reserved).map(|_| self.pages.take().expect("the head was seated because pages are free")));
        live.stats.slot = Some(slot);
        live.stats.shared_tokens = (shared * PAGE_TOKENS) as u32;
        live.stats.pages_max = live.stats.pages_max.max(pages.len() as u32);
        live.counted = live.counted.max((shared * PAGE_TOKENS) as u32);
        let at = self.order.partition_point(|&held| self.seated(held).live.key < live.key);
        self.order.insert(at, slot);
        self.seats[slot.0 as usize] = Some(Seated::new(live, slot, generation, pages, shared));
    }
}

/// Whether a choice may use its siblings' prompt pages: its prompt must leave no mark outside the KV cache (repetition penalties count its
/// tokens, scoring wants its rows) and there must be a row to draw from.
fn may_share(choice: &Choice) -> bool {
    choice.sampling.max_tokens > 0 && choice.score_prompt.is_none() && choice.sampling.repetition_penalty == 1.0
}
