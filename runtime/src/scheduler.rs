//! The scheduler: who holds a seat, who waits, and what the next step does. No thread, no device, no clock: values in, values out.
//!
//! Driven by the engine loop, phase by phase (`submit`, `collect`, `retire`, `publish`, `admit`, `fill`, `settle`), and by the simulator.
//! **Invariant:** each live choice is in exactly one place, the queue or a seat; a step that was filled names only seats and pages that
//! are held or cooling; what leaves the tables cools for the newest step enqueued. It never waits for a listener.

mod admit;
mod budget;
mod choice;
mod ending;
mod fill;
mod settle;
mod shares;
mod snapshot;
mod sweep;

pub use snapshot::{HolderView, SlotView, Snapshot};
pub use sweep::Swept;

use crate::load::{Load, SlotState};
use crate::pages::PagePool;
use crate::policy::Policy;
use crate::slots::SlotTable;
use crate::trace::{Epoch, Observer, TraceContext};
use budget::PrefillBudget;
use choice::{Live, Seated};
use settle::Flight;
use shares::Shares;
use slotgraph_graphs::step::{Generation, SlotId, StepLimits};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// What the scheduler needs to know, resolved.
#[derive(Clone)]
pub struct SchedulerOptions {
    pub limits: StepLimits,
    /// Generated tokens that admission reserves pages for.
    pub reserve_tokens: usize,
    /// Keep the gap between a stream's tokens under this by fewer prefill rows a step.
    pub itl_target: Option<Duration>,
    pub policy: Policy,
    pub trace: TraceContext,
    /// Steps are graph replays.
    pub replays: bool,
}

pub struct Scheduler {
    options: SchedulerOptions,
    slots: SlotTable,
    pages: PagePool,
    /// By slot.
    seats: Vec<Option<Seated>>,
    /// Held slots, oldest choice first.
    order: Vec<SlotId>,
    /// Oldest first.
    queue: VecDeque<Live>,
    shares: Shares,
    /// Holders that left without the device knowing.
    retired: VecDeque<(SlotId, Generation)>,
    flights: VecDeque<Flight>,
    spare_flights: Vec<Flight>,
    /// Newest step enqueued, and settled; 0 before the first.
    enqueued: u64,
    settled: u64,
    last_settled_at: Option<Instant>,
    budget: PrefillBudget,
    /// A seated choice waits for a page: nobody is admitted.
    starved: bool,
    drain_deadline: Option<Instant>,
    next_key: u64,
    next_group: u64,
    load: Arc<Load>,
    observer: Arc<dyn Observer>,
    epoch: Epoch,
    /// The prompt hashed last: choices of a group end together.
    prompt_hash: Option<(Arc<[u32]>, String)>,
}

impl Scheduler {
    pub fn new(options: SchedulerOptions, load: Arc<Load>, observer: Arc<dyn Observer>, epoch: Epoch) -> Self {
        let limits = &options.limits;
        assert!(limits.rows_max() >= limits.slots_max, "every seat needs a decode row in the largest bucket");
        assert!(limits.buckets.len() <= 64, "a choice keeps the buckets it rode in as bits of a word");
        load.pages_total.store(limits.pages as u64 - 1, Relaxed);
        let flights = limits.launch_ahead + 1;
        Scheduler {
            slots: SlotTable::new(limits.slots_max, options.policy),
            pages: PagePool::new(limits.pages, options.policy),
            seats: (0..limits.slots_max).map(|_| None).collect(),
            order: Vec::with_capacity(limits.slots_max),
            queue: VecDeque::new(),
            shares: Shares::default(),
            retired: VecDeque::with_capacity(limits.slots_max),
            flights: VecDeque::with_capacity(flights),
            spare_flights: (0..flights).map(|_| Flight::with_capacity(limits.slots_max)).collect(),
            enqueued: 0,
            settled: 0,
            last_settled_at: None,
            budget: PrefillBudget::new(limits.prefill_chunk, options.itl_target),
            starved: false,
            drain_deadline: None,
            next_key: 0,
            next_group: 0,
            load,
            observer,
            epoch,
            prompt_hash: None,
            options,
        }
    }

    /// Nothing is live and every step has settled.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.order.is_empty() && self.flights.is_empty()
    }
    /// Nothing is live.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.order.is_empty()
    }
    /// Everything that is still live then ends with cause `drain`.
    pub fn drain_at(&mut self, deadline: Instant) {
        self.drain_deadline = Some(self.drain_deadline.map_or(deadline, |earlier| earlier.min(deadline)));
    }

    /// Publishes the gauges.
    pub fn publish(&mut self, now: Instant) {
        let load = &self.load;
        load.running.store(self.order.len() as u64, Relaxed);
        load.waiting.store(self.queue.len() as u64, Relaxed);
        load.pages_used.store(self.pages.used() as u64, Relaxed);
        let mut counts = [0; 4];
        counts[SlotState::Free as usize] = self.slots.free() as u64;
        counts[SlotState::Cooling as usize] = self.slots.cooling() as u64;
        for &slot in &self.order {
            counts[self.seated(slot).state() as usize] += 1;
        }
        load.publish_slots(counts);
        load.publish_head_wait(self.queue.front().map_or(Duration::ZERO, |head| now - head.group.received));
        load.beat();
    }

    pub fn slots(&self) -> &SlotTable {
        &self.slots
    }
    pub fn pages(&self) -> &PagePool {
        &self.pages
    }
    /// Newest step enqueued, newest step settled.
    pub fn steps(&self) -> (u64, u64) {
        (self.enqueued, self.settled)
    }
    /// Loses a page for good: a planted fault.
    pub fn leak_page(&mut self) {
        // With none free there is nothing to lose.
        let _ = self.pages.take();
    }

    fn seated(&self, slot: SlotId) -> &Seated {
        self.seats[slot.0 as usize].as_ref().expect("`order` lists held slots")
    }
    fn seated_mut(&mut self, slot: SlotId) -> &mut Seated {
        self.seats[slot.0 as usize].as_mut().expect("`order` lists held slots")
    }
    /// Frees what cooled for steps that have settled.
    fn thaw(&mut self) {
        self.slots.thaw(self.settled);
        self.pages.thaw(self.settled);
    }

    /// Takes a choice out of its seat; seat and pages cool. `told`: the device ended it itself.
    fn unseat(&mut self, slot: SlotId, told: bool) -> Live {
        self.unseat_and_cool(slot, told, self.enqueued)
    }
    fn unseat_and_cool(&mut self, slot: SlotId, told: bool, pages_until: u64) -> Live {
        let until = self.enqueued;
        let seated = self.seats[slot.0 as usize].take().expect("only a held slot is left");
        self.order.retain(|&held| held != slot);
        for &page in &seated.pages {
            self.pages.release(page, pages_until);
        }
        self.slots.leave(slot, until);
        if seated.announced && !told {
            self.retired.push_back((slot, seated.generation));
        }
        if let Some(share) = seated.live.share {
            self.shares.leave_seat(share, seated.live.key);
        }
        seated.live
    }
}
