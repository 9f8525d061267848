//! Settle: what a step did reaches the choices that rode in it.
//!
//! **Invariant:** a record reaches only the holder that its generation means; a choice's tokens are delivered in order, none twice, none
//! missing; nothing here waits.

use super::Scheduler;
use super::choice::Seated;
use super::ending::End;
use crate::request::{Event, FinishReason, Token};
use crate::trace::Latency;
use slotgraph_graphs::device::DeviceError;
use slotgraph_graphs::step::{EndReason, Generation, Record, SlotId, StepOutput};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// A step that was enqueued.
#[derive(Debug)]
pub(crate) struct Flight {
    pub step: u64,
    pub bucket: usize,
    pub rows: u32,
    pub decode_rows: u32,
    pub prefill_rows: u32,
    pub enqueued_at: Instant,
    pub riders: Vec<Rider>,
}

/// A choice in a step: its prefill rows are `from..to`; a decode row has `from == to`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rider {
    pub slot: SlotId,
    pub generation: Generation,
    pub from: u32,
    pub to: u32,
}

impl Flight {
    pub fn with_capacity(slots_max: usize) -> Self {
        Flight {
            step: 0,
            bucket: 0,
            rows: 0,
            decode_rows: 0,
            prefill_rows: 0,
            enqueued_at: Instant::now(),
            riders: Vec::with_capacity(slots_max),
        }
    }
    pub fn clear(&mut self) {
        self.riders.clear();
        (self.rows, self.decode_rows, self.prefill_rows) = (0, 0, 0);
    }
}

impl Scheduler {
    /// Takes in the output of the oldest step in flight.
    pub fn settle(&mut self, output: &mut StepOutput, now: Instant) -> Result<(), DeviceError> {
        let due = self.flights.front().map_or(self.settled + 1, |flight| flight.step);
        if self.flights.is_empty() || output.step != due {
            return Err(DeviceError::OutOfOrder { expected: due, got: output.step });
        }
        let flight = self.flights.pop_front().expect("it is not empty");
        self.settled = flight.step;
        self.count_step(&flight, output, now);
        for rider in &flight.riders {
            self.count_rider(&flight, *rider, now);
        }
        for record in &mut output.records {
            self.deliver(record, now)?;
        }
        for rider in &flight.riders {
            self.deliver_scores(*rider, now);
        }
        self.spare_flights.push(flight);
        self.thaw();
        Ok(())
    }

    fn count_step(&mut self, flight: &Flight, output: &StepOutput, now: Instant) {
        let load = &self.load;
        let at = self.options.limits.buckets.iter().position(|&bucket| bucket == flight.bucket);
        let bucket = &load.buckets[at.expect("a step runs in a configured bucket")];
        bucket.steps.fetch_add(1, Relaxed);
        if self.options.replays {
            bucket.replays.fetch_add(1, Relaxed);
        } else {
            load.eager_steps.fetch_add(1, Relaxed);
        }
        load.padded_rows.fetch_add(flight.bucket as u64 - u64::from(flight.rows), Relaxed);
        load.routes_local.fetch_add(output.routes_local, Relaxed);
        load.routes_remote.fetch_add(output.routes_remote, Relaxed);
        let before = self.last_settled_at.replace(now).unwrap_or(flight.enqueued_at);
        let took = now.saturating_duration_since(before.max(flight.enqueued_at));
        self.observer.step(flight.bucket, took);
        if flight.decode_rows > 0 {
            self.budget.observe(flight.prefill_rows as usize, took);
        }
    }

    /// Statistics of a choice that rode along, and its prompt tokens.
    fn count_rider(&mut self, flight: &Flight, rider: Rider, now: Instant) {
        let (active, pending) = (self.order.len() as u32, self.queue.len() as u32);
        let at = self.options.limits.buckets.iter().position(|&bucket| bucket == flight.bucket);
        let bit = 1 << at.expect("a step runs in a configured bucket");
        let Some(seated) = holder(&mut self.seats, rider.slot, rider.generation, true) else { return };
        let given = seated.given;
        let live = &mut seated.live;
        live.note_company(active, pending);
        live.stats.buckets |= bit;
        live.stats.padded_rows += flight.bucket as u64 - u64::from(flight.rows);
        if rider.from == rider.to {
            live.stats.decode_rows_max = live.stats.decode_rows_max.max(flight.decode_rows);
            live.stats.batch_steps += u32::from(flight.decode_rows > 1);
            live.stats.singleton_steps += u32::from(flight.decode_rows == 1);
            return;
        }
        live.stats.chunks += 1;
        if rider.to == given {
            live.stats.prefill_done.get_or_insert(now);
        }
        let counted = rider.to.min(live.prompt_len());
        let fresh = counted.saturating_sub(live.counted);
        live.counted = live.counted.max(counted);
        self.load.prompt_tokens.fetch_add(u64::from(fresh), Relaxed);
    }

    /// Hands one record to its holder.
    fn deliver(&mut self, record: &mut Record, now: Instant) -> Result<(), DeviceError> {
        let check = self.options.policy.check_generation;
        let holder = holder(&mut self.seats, record.slot, record.generation, check);
        let Some(seated) = holder.filter(|seated| !seated.live.deaf) else {
            self.load.late_records.fetch_add(1, Relaxed);
            return Ok(());
        };
        let due = if record.scored { seated.live.scored } else { seated.draw_position() };
        if record.position < due {
            self.load.late_records.fetch_add(1, Relaxed);
            return Ok(());
        }
        if record.position > due {
            let (slot, got) = (record.slot.0, record.position);
            return Err(DeviceError::Lost(format!("slot {slot} reports position {got} where {due} is due")));
        }
        if record.ended == Some(EndReason::Nan) || (record.scored && record.logprob.is_nan()) {
            self.load.nan_rows.fetch_add(1, Relaxed);
            let live = self.unseat(record.slot, !record.scored);
            self.end(live, End::Failed("the model computed a value that is not a number".to_owned()), now);
            return Ok(());
        }
        let sampling = &seated.live.choice.sampling;
        let kept = if record.scored { seated.live.choice.score_prompt } else { sampling.logprobs };
        let mut top = std::mem::take(&mut record.top);
        top.truncate(kept.unwrap_or(0) as usize);
        let token = Token { id: record.token, logprob: record.logprob, rank: record.rank, top };
        if record.scored {
            seated.live.scored += 1;
            seated.scores.push(token);
        } else {
            seated.send_scores();
            self.deliver_token(record.slot, token, record.ended, now);
        }
        Ok(())
    }

    fn deliver_token(&mut self, slot: SlotId, token: Token, ended: Option<EndReason>, now: Instant) {
        let live = &mut self.seats[slot.0 as usize].as_mut().expect("its holder was just found").live;
        let id = token.id;
        if live.deaf || !live.choice.sink.send(Event::Token(token)) {
            live.deaf = true;
            return;
        }
        live.generated.push(id);
        let (latency, since) = match live.stats.last_token.replace(now) {
            None => (Latency::FirstToken, live.group.received),
            Some(last) => (Latency::InterToken, last),
        };
        match live.generated.len() {
            1 => live.stats.first_token = Some(now),
            2 => live.stats.second_token = Some(now),
            _ => {}
        }
        self.observer.latency(latency, now.saturating_duration_since(since));
        self.load.generation_tokens.fetch_add(1, Relaxed);
        let reason = match ended {
            None => return,
            Some(EndReason::Eos | EndReason::StopId) => FinishReason::Stop,
            Some(EndReason::MaxTokens | EndReason::Context) => FinishReason::Length,
            Some(EndReason::Nan) => unreachable!("a NaN row has no token"),
        };
        let live = self.unseat(slot, true);
        self.end(live, End::Completed(reason), now);
    }

    /// Sends the scores that a step brought a choice, and ends it when they were all it wanted.
    fn deliver_scores(&mut self, rider: Rider, now: Instant) {
        let holder = holder(&mut self.seats, rider.slot, rider.generation, true);
        let Some(seated) = holder.filter(|seated| !seated.scores.is_empty()) else { return };
        seated.send_scores();
        if !seated.live.deaf && !seated.live.needs_device() {
            let live = self.unseat(rider.slot, false);
            self.end(live, End::Completed(FinishReason::Length), now);
        }
    }
}

/// The holder that this generation means, if it is still there.
fn holder(seats: &mut [Option<Seated>], slot: SlotId, generation: Generation, check: bool) -> Option<&mut Seated> {
    seats.get_mut(slot.0 as usize)?.as_mut().filter(|seated| !check || seated.generation == generation)
}
