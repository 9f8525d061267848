//! Fill: what the next step does. Decode rows first, then prefill rows of the oldest choices that have some.
//!
//! **Invariant:** a row is put into a step only if its choice owns the page that the row writes and the entry has room for everything the
//! device must learn with it.

use super::budget::{bucket_for, prefill_rows};
use super::choice::Seated;
use super::settle::Rider;
use super::{Flight, Scheduler};
use crate::pages::pages_for;
use slotgraph_graphs::spec::SamplingSpec;
use slotgraph_graphs::step::{NewSlot, PageUpdate, RowWant, SlotId, StepInput};
use slotgraph_kernels::contract::PAGE_TOKENS;
use slotgraph_kernels::entry::{EntryLayout, feature};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// Prompt rows scored in one step, over all choices.
const SCORE_ROWS_MAX: usize = 64;

/// What is left of the step that is being filled.
struct Room {
    rows: usize,
    logit_rows: usize,
    score_rows: usize,
    bias: usize,
    layout: EntryLayout,
}

impl Scheduler {
    /// Fills `input` with the next step; false if there is nothing to do. What it returns must be enqueued.
    pub fn fill(&mut self, input: &mut StepInput, now: Instant) -> bool {
        input.clear();
        self.own_pages();
        let mut flight = self.spare_flights.pop().expect("the engine fills while the ring has room");
        flight.clear();
        let layout = self.options.limits.entry_layout();
        for at in 0..self.order.len() {
            decode(self.seats[self.order[at].0 as usize].as_mut().expect("held"), input, &mut flight);
        }
        flight.decode_rows = input.rows.len() as u32;
        self.prefill(input, &mut flight, layout);
        if input.rows.is_empty() {
            self.spare_flights.push(flight);
            return false;
        }
        let told = self.retired.len().min(layout.retired_max);
        input.retired.extend(self.retired.drain(..told));
        self.enqueued += 1;
        input.step = self.enqueued;
        input.bucket = bucket_for(&self.options.limits.buckets, input.rows.len());
        flight.step = input.step;
        flight.bucket = input.bucket;
        flight.rows = input.rows.len() as u32;
        flight.enqueued_at = now;
        self.flights.push_back(flight);
        self.load.steps.fetch_add(1, Relaxed);
        true
    }

    /// Every decoding choice gets the pages of its next positions, oldest first; when none is left, the youngest choice gives up its seat.
    fn own_pages(&mut self) {
        self.starved = false;
        let early = self.options.limits.launch_ahead as u32 + 1;
        let mut at = 0;
        while at < self.order.len() {
            let slot = self.order[at];
            at += 1;
            let seated = self.seated(slot);
            let Some(position) = seated.decode_position() else { continue };
            let wanted = pages_for((position + 1 + early) as usize).min(pages_for(seated.live.positions_max()));
            let needed = position as usize / PAGE_TOKENS + 1;
            while self.seated(slot).pages.len() < wanted && self.grow(slot) {}
            while self.seated(slot).pages.len() < needed && !self.grow(slot) {
                if self.pages.cooling() > 0 {
                    // Pages are on their way: this choice sits this step out, and nobody else gets them.
                    self.starved = true;
                    break;
                }
                if !self.make_room(slot) {
                    break;
                }
            }
        }
    }

    /// One more page for a seated choice, if there is one.
    fn grow(&mut self, slot: SlotId) -> bool {
        let Some(page) = self.pages.take() else { return false };
        let seated = self.seated_mut(slot);
        seated.pages.push(page);
        seated.live.stats.pages_max = seated.live.stats.pages_max.max(seated.pages.len() as u32);
        true
    }

    /// Releases what siblings-to-be could use, or else the youngest choice's pages; false if that was the choice which asked.
    fn make_room(&mut self, asking: SlotId) -> bool {
        if self.shares.held > 0 {
            self.shares.let_all_go(None, &mut self.pages, self.enqueued);
            self.thaw();
            return true;
        }
        let youngest = *self.order.last().expect("the choice which asked is seated");
        self.preempt(youngest);
        self.thaw();
        youngest != asking
    }

    /// Back to the queue, at its age; it will prefill prompt and answer so far.
    fn preempt(&mut self, slot: SlotId) {
        let until = if self.options.policy.cool_preempted { self.enqueued } else { 0 };
        let mut live = self.unseat_and_cool(slot, false, until);
        live.stats.preemptions += 1;
        self.load.preemptions.fetch_add(1, Relaxed);
        if let Some(share) = live.share {
            self.shares.enter_queue(share);
        }
        let at = self.queue.partition_point(|queued| queued.key < live.key);
        self.queue.insert(at, live);
    }

    fn prefill(&mut self, input: &mut StepInput, flight: &mut Flight, layout: EntryLayout) {
        let limits = &self.options.limits;
        let decode_rows = input.rows.len();
        let budget = self.budget.rows(decode_rows);
        let waiting = self.order.iter().map(|&slot| self.seated(slot)).map(|seated| seated.given - seated.next);
        let available: usize = waiting.map(|rows| rows as usize).sum();
        if available == 0 {
            return;
        }
        let rows = prefill_rows(&limits.buckets, decode_rows, available, budget);
        let bucket = bucket_for(&limits.buckets, decode_rows + rows);
        let mut room = Room {
            rows,
            logit_rows: limits.logit_rows(bucket).saturating_sub(input.logit_rows()),
            score_rows: SCORE_ROWS_MAX,
            bias: layout.bias_max,
            layout,
        };
        for at in 0..self.order.len() {
            if room.rows == 0 {
                break;
            }
            let slot = self.order[at];
            let seated = self.seats[slot.0 as usize].as_mut().expect("held");
            prefill(seated, input, flight, &mut room);
            if let Some(share) = seated.live.share {
                self.shares.filled(share, seated.live.key, seated.next as usize, &seated.pages, &mut self.pages);
            }
        }
        flight.prefill_rows = (input.rows.len() - decode_rows) as u32;
    }
}

/// The decode row of a choice that is due and owns its page.
fn decode(seated: &mut Seated, input: &mut StepInput, flight: &mut Flight) {
    let Some(position) = seated.decode_position() else { return };
    if position as usize / PAGE_TOKENS >= seated.pages.len() {
        return;
    }
    send_pages(seated, position + 1, input);
    input.features |= draw_features(&seated.live.choice.sampling, seated.before + seated.draws);
    input.rows.push(seated.decode_row());
    seated.draws += 1;
    flight.riders.push(Rider { slot: seated.slot, generation: seated.generation, from: position, to: position });
}

/// As many rows of a choice's known tokens as fit.
fn prefill(seated: &mut Seated, input: &mut StepInput, flight: &mut Flight, room: &mut Room) {
    let sampling = seated.live.choice.sampling.clone();
    if seated.next == seated.given || (!seated.announced && sampling.logit_bias.len() > room.bias) {
        return;
    }
    let from = seated.next;
    let pages = room.layout.pages_max - input.pages.len();
    let pages_end = (seated.pages_sent + pages) * PAGE_TOKENS;
    let end = seated.given.min(from.saturating_add(room.rows as u32)).min(pages_end as u32);
    while seated.next < end {
        let row = seated.given_row(seated.next);
        match row.want {
            RowWant::Nothing => {}
            RowWant::Sample if room.logit_rows > 0 => {
                room.logit_rows -= 1;
                input.features |= draw_features(&sampling, seated.before);
                seated.draws = 1;
            }
            RowWant::Score(_) if room.logit_rows > 0 && room.score_rows > 0 => {
                room.logit_rows -= 1;
                room.score_rows -= 1;
                input.features |= feature::SCORE | logprob_features(&sampling) | feature::LOGPROBS;
            }
            RowWant::Sample | RowWant::Score(_) => break,
        }
        input.rows.push(row);
        room.rows -= 1;
        seated.next += 1;
    }
    if seated.next == from {
        return;
    }
    assert!(pages_for(seated.next as usize) <= seated.pages.len(), "admission reserves the pages of every known token");
    if !seated.announced {
        seated.announced = true;
        room.bias -= sampling.logit_bias.len();
        input.new_slots.push(NewSlot {
            slot: seated.slot,
            generation: seated.generation,
            sampling,
            choice: seated.live.choice.sample,
            generated: seated.before,
        });
    }
    send_pages(seated, seated.next, input);
    flight.riders.push(Rider { slot: seated.slot, generation: seated.generation, from, to: seated.next });
}

/// Tells the device of the block-table entries that rows before `end` need.
fn send_pages(seated: &mut Seated, end: u32, input: &mut StepInput) {
    for index in seated.pages_sent..seated.pages_sent + seated.pages_unsent(end) {
        input.pages.push(PageUpdate { slot: seated.slot, index: index as u32, page: seated.pages[index] });
        seated.pages_sent = index + 1;
    }
}

/// Feature bits of a row that draws a choice's token number `generated`.
fn draw_features(sampling: &SamplingSpec, generated: u32) -> u32 {
    let mut features = logprob_features(sampling);
    let mut add = |wanted: bool, bit: u32| features |= if wanted { bit } else { 0 };
    add(!sampling.is_greedy(), feature::RANDOM);
    add(sampling.has_penalties(), feature::PENALTIES);
    add(!sampling.logit_bias.is_empty(), feature::BIAS);
    add(sampling.has_truncation() && !sampling.is_greedy(), feature::TRUNCATION);
    add(generated < sampling.min_tokens, feature::MIN_TOKENS);
    features
}

fn logprob_features(sampling: &SamplingSpec) -> u32 {
    match sampling.logprobs {
        None => 0,
        Some(0) => feature::LOGPROBS,
        Some(_) => feature::LOGPROBS | feature::TOP_LOGPROBS,
    }
}
