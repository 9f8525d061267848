//! Drives a device directly, without scheduler or server: seats requests, feeds their prompts, decodes them in lockstep.
//!
//! Used by bench-decode, replay and the graph probes. **Invariant:** each seated request owns its pages from the start; a step is enqueued
//! only while the ring has room, in step order.

use slotgraph_graphs::device::{Device, DeviceError};
use slotgraph_graphs::spec::SamplingSpec;
use slotgraph_graphs::step::{
    Generation, NewSlot, PageId, PageUpdate, Record, RowFeed, RowInput, RowWant, SlotId, StepInput, StepLimits,
    StepOutput,
};
use slotgraph_kernels::contract::PAGE_TOKENS;
use slotgraph_kernels::entry::feature;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A request to be seated.
#[derive(Clone, Debug)]
pub struct Seated {
    pub prompt: Vec<u32>,
    pub sampling: Arc<SamplingSpec>,
    pub choice: u32,
}

/// What one settled step took.
#[derive(Clone, Copy, Debug)]
pub struct StepTime {
    /// From the settle before (or the first enqueue) to this settle.
    pub wall: Duration,
    /// On the device, by its own clock.
    pub device: Duration,
    /// Inside the call that enqueued it.
    pub enqueue: Duration,
}

pub struct Driver<D: Device> {
    pub device: D,
    limits: StepLimits,
    input: StepInput,
    output: StepOutput,
    step: u64,
    generation: u32,
    seats: Vec<Seat>,
    next_page: u32,
    /// Time lost before each step is enqueued: a fault that a measurement must see.
    pub planted_delay: Duration,
    /// Enqueueing a step after this one is an error: stops a script in the middle.
    pub stop_after: Option<u64>,
    /// No step runs in a smaller bucket than this.
    pub bucket_floor: usize,
    /// Holders that left and that no step has retired yet.
    leaving: Vec<(SlotId, Generation)>,
}

struct Seat {
    request: Seated,
    generation: Generation,
    /// Rides in decode steps.
    active: bool,
    /// Pages of this seat: consecutive from here.
    first_page: u32,
    pages: u32,
    /// Of these, in the holder's block table.
    given: u32,
    /// Of the holder's next row.
    position: u32,
}

impl<D: Device> Driver<D> {
    /// Drives a device that has run no step yet.
    pub fn new(device: D, limits: StepLimits) -> Driver<D> {
        Driver {
            device,
            limits,
            input: StepInput::default(),
            output: StepOutput::default(),
            step: 0,
            generation: 0,
            seats: Vec::new(),
            next_page: 1,
            planted_delay: Duration::ZERO,
            stop_after: None,
            bucket_floor: 0,
            leaving: Vec::new(),
        }
    }

    pub fn limits(&self) -> &StepLimits {
        &self.limits
    }

    /// Seats requests whose prompts and answers fit `context` tokens each. Replaces whoever was seated.
    pub fn seat(&mut self, requests: Vec<Seated>, context: usize) {
        assert!(
            requests.len() <= self.limits.slots_max,
            "{} requests for {} seats",
            requests.len(),
            self.limits.slots_max
        );
        let pages = context.div_ceil(PAGE_TOKENS);
        assert!(pages <= self.limits.pages_per_slot, "a context of {context} tokens fits a block table");
        assert!(pages * requests.len() < self.limits.pages, "the pool holds {} contexts", requests.len());
        self.seats.clear();
        self.next_page = 1;
        for request in requests {
            self.generation += 1;
            let first_page = self.next_page;
            self.next_page += pages as u32;
            let generation = Generation(self.generation);
            self.seats.push(Seat {
                request,
                generation,
                active: true,
                first_page,
                pages: pages as u32,
                given: 0,
                position: 0,
            });
        }
    }

    /// Feeds every prompt, packed into steps of at most `rows_a_step` rows, and draws each request's first token. Returns those;
    /// `each` sees every settled step.
    pub fn prefill(&mut self, rows_a_step: usize, mut each: impl FnMut(&StepOutput)) -> Result<Vec<u32>, DeviceError> {
        let lines: Vec<(usize, usize)> = (0..self.seats.len())
            .flat_map(|seat| (0..self.seats[seat].request.prompt.len()).map(move |at| (seat, at)))
            .collect();
        let mut firsts = vec![0; self.seats.len()];
        for rows in lines.chunks(rows_a_step.min(self.limits.rows_max())) {
            self.begin(rows.len());
            for &(seat, at) in rows {
                if at == 0 {
                    self.introduce(seat);
                }
                let prompt = &self.seats[seat].request.prompt;
                let want = if at + 1 == prompt.len() { RowWant::Sample } else { RowWant::Nothing };
                let feed = RowFeed::Given { token: prompt[at], position: at as u32, generated: false };
                self.row(seat, feed, want);
            }
            self.enqueue()?;
            self.settle()?;
            for record in &self.output.records {
                firsts[record.slot.0 as usize] = record.token;
            }
            each(&self.output);
        }
        Ok(firsts)
    }

    /// Starts every request at `position` with its prompt's last token and no prompt behind it: times a long context without filling it.
    pub fn start_at(&mut self, position: usize) -> Result<(), DeviceError> {
        // One seat a step: a step has room for the pages of one long context.
        for seat in 0..self.seats.len() {
            self.begin(1);
            self.introduce(seat);
            let token = *self.seats[seat].request.prompt.last().expect("a prompt has a token");
            self.row(seat, RowFeed::Given { token, position: position as u32, generated: false }, RowWant::Sample);
            self.enqueue()?;
            self.settle()?;
        }
        Ok(())
    }

    /// Decodes all seats together for `steps` steps, with as many steps enqueued as the ring allows. `each` sees every settled step.
    pub fn decode(&mut self, steps: usize, mut each: impl FnMut(&StepOutput)) -> Result<Vec<StepTime>, DeviceError> {
        let ahead = self.limits.launch_ahead + 1;
        let mut times = Vec::with_capacity(steps);
        let mut enqueue_times = std::collections::VecDeque::new();
        let mut last = Instant::now();
        let mut enqueued = 0;
        while times.len() < steps {
            while enqueued < steps && self.device.in_flight() < ahead {
                let riders: Vec<usize> = (0..self.seats.len()).filter(|&seat| self.seats[seat].active).collect();
                self.begin(riders.len());
                for seat in riders {
                    self.row(seat, RowFeed::FromSlot, RowWant::Sample);
                }
                enqueue_times.push_back(self.enqueue()?);
                enqueued += 1;
            }
            self.settle()?;
            let now = Instant::now();
            let enqueue = enqueue_times.pop_front().expect("each settled step was enqueued");
            times.push(StepTime { wall: now - last, device: Duration::from_nanos(self.output.device_ns), enqueue });
            last = now;
            each(&self.output);
        }
        Ok(times)
    }

    /// Builds the next decode step of all seats and hands it to `run`, which must run it to its end on the device.
    pub fn by_hand<R>(&mut self, run: impl FnOnce(&mut D, &StepInput) -> R) -> R {
        let riders: Vec<usize> = (0..self.seats.len()).filter(|&seat| self.seats[seat].active).collect();
        self.begin(riders.len());
        for seat in riders {
            self.row(seat, RowFeed::FromSlot, RowWant::Sample);
        }
        run(&mut self.device, &self.input)
    }

    /// The seat's holder leaves: from the next step on it is retired and rides no more.
    pub fn leave(&mut self, seat: usize) {
        self.seats[seat].active = false;
        self.leaving.push((SlotId(seat as u32), self.seats[seat].generation));
    }

    /// A new holder takes the seat and its pages; its prompt is fed beside the others' decode rows, at most `rows_a_step` rows a step.
    pub fn join(
        &mut self,
        seat: usize,
        request: Seated,
        rows_a_step: usize,
        mut each: impl FnMut(&StepOutput),
    ) -> Result<(), DeviceError> {
        self.generation += 1;
        let prompt = request.prompt.clone();
        self.seats[seat].request = request;
        self.seats[seat].generation = Generation(self.generation);
        let lines: Vec<(usize, u32)> = prompt.iter().copied().enumerate().collect();
        let riders: Vec<usize> = (0..self.seats.len()).filter(|&other| self.seats[other].active).collect();
        let room = self.limits.rows_max().saturating_sub(riders.len()).max(1);
        for rows in lines.chunks(rows_a_step.min(room)) {
            self.begin(riders.len() + rows.len());
            for &other in &riders {
                self.row(other, RowFeed::FromSlot, RowWant::Sample);
            }
            for &(position, token) in rows {
                if position == 0 {
                    self.introduce(seat);
                }
                let want = if position + 1 == prompt.len() { RowWant::Sample } else { RowWant::Nothing };
                self.row(seat, RowFeed::Given { token, position: position as u32, generated: false }, want);
            }
            self.enqueue()?;
            self.settle()?;
            each(&self.output);
        }
        self.seats[seat].active = true;
        Ok(())
    }

    /// The first page of a seat.
    pub fn first_page(&self, seat: usize) -> usize {
        self.seats[seat].first_page as usize
    }

    /// Scores `answer` after seat 0's prompt, teacher-forced: one record a token, in order.
    pub fn score(&mut self, answer: &[u32]) -> Result<Vec<Record>, DeviceError> {
        let prompt = self.seats[0].request.prompt.clone();
        let text = [prompt.as_slice(), answer].concat();
        let first = prompt.len() - 1;
        let rows_a_step = self.limits.rows_max().min(self.limits.logit_rows(self.limits.rows_max()));
        let mut records = Vec::with_capacity(answer.len());
        let positions: Vec<usize> = (0..text.len() - 1).collect();
        for rows in positions.chunks(rows_a_step) {
            self.begin(rows.len());
            self.input.features |= feature::SCORE | feature::LOGPROBS;
            if rows[0] == 0 {
                self.introduce(0);
            }
            for &position in rows {
                let want = if position >= first { RowWant::Score(text[position + 1]) } else { RowWant::Nothing };
                let feed = RowFeed::Given { token: text[position], position: position as u32, generated: false };
                self.row(0, feed, want);
            }
            self.enqueue()?;
            self.settle()?;
            records.append(&mut self.output.records);
        }
        Ok(records)
    }

    /// Feeds prompt and answer of seat 0 in one pass and draws at every position of the answer what the request would draw there. The
    /// records are in order: the draw, its logprob, its alternatives. Not for requests with penalties, whose draws depend on counts.
    pub fn redraw(&mut self, answer: &[u32]) -> Result<Vec<Record>, DeviceError> {
        let (prompt, sampling) = (self.seats[0].request.prompt.clone(), self.seats[0].request.sampling.clone());
        assert!(!sampling.has_penalties(), "penalties make a draw depend on the draws before it");
        let first = prompt.len() - 1;
        let text = [prompt.as_slice(), answer].concat();
        // The row at the last token of the answer would draw a token that was never asked for.
        let rows = text.len() - 1;
        let mut records = Vec::with_capacity(answer.len());
        let mut at = 0;
        while at < rows {
            let drawn = at.saturating_sub(first);
            // All rows of a step see one count of generated tokens, so a step does not straddle min_tokens.
            let straddles = first + sampling.min_tokens as usize;
            let mut end = rows.min(at + self.limits.rows_max().min(self.limits.logit_rows(self.limits.rows_max())));
            if at < straddles {
                end = end.min(straddles);
            }
            // A new holder in every step: what the draws before did to the seat (its end above all) is forgotten.
            self.generation += 1;
            self.seats[0].generation = Generation(self.generation);
            self.begin(end - at);
            self.introduce(0);
            self.input.new_slots[0].generated = drawn as u32;
            for (offset, &token) in text[at..end].iter().enumerate() {
                let position = at + offset;
                let want = if position >= first { RowWant::Sample } else { RowWant::Nothing };
                self.row(0, RowFeed::Given { token, position: position as u32, generated: position > first }, want);
            }
            at = end;
            self.enqueue()?;
            self.settle()?;
            records.append(&mut self.output.records);
        }
        Ok(records)
    }

    /// Prefills seat 0 and decodes until it ends or has `most` tokens: the tokens as a fresh run gives them.
    pub fn regenerate(&mut self, most: usize) -> Result<Vec<Record>, DeviceError> {
        self.prefill(usize::MAX, |_| {})?;
        let mut records: Vec<Record> = self.output.records.clone();
        while records.len() < most && records.last().is_some_and(|record| record.ended.is_none()) {
            self.decode(1, |output| records.extend(output.records.iter().cloned()))?;
        }
        Ok(records)
    }

    fn begin(&mut self, rows: usize) {
        self.step += 1;
        self.input.clear();
        self.input.step = self.step;
        self.input.retired.append(&mut self.leaving);
        let least = rows.max(self.bucket_floor);
        let fits = self.limits.buckets.iter().copied().find(|&bucket| bucket >= least);
        self.input.bucket = fits.expect("callers ask for no more rows than the largest bucket has");
    }

    fn introduce(&mut self, seat: usize) {
        let Seat { request, generation, given, .. } = &mut self.seats[seat];
        *given = 0;
        self.input.new_slots.push(NewSlot {
            slot: SlotId(seat as u32),
            generation: *generation,
            sampling: request.sampling.clone(),
            choice: request.choice,
            generated: 0,
        });
    }

    /// Adds a row, and the pages that its holder needs up to the row's position.
    fn row(&mut self, seat: usize, feed: RowFeed, want: RowWant) {
        let slot = SlotId(seat as u32);
        let Seat { request, generation, first_page, pages, given, position, .. } = &mut self.seats[seat];
        if let RowFeed::Given { position: at, .. } = feed {
            *position = at;
        }
        // A row past its seat's pages belongs to a request that the device has ended.
        while *given < *pages && *given * PAGE_TOKENS as u32 <= *position {
            self.input.pages.push(PageUpdate { slot, index: *given, page: PageId(*first_page + *given) });
            *given += 1;
        }
        *position += 1;
        if want != RowWant::Nothing {
            self.input.features |= features(&request.sampling);
        }
        self.input.rows.push(RowInput { slot, generation: *generation, feed, want });
    }

    /// Enqueues the step being built; returns the time that took.
    fn enqueue(&mut self) -> Result<Duration, DeviceError> {
        if self.stop_after.is_some_and(|last| self.step > last) {
            return Err(DeviceError::Lost(format!("stopped before step {}", self.step)));
        }
        let started = Instant::now();
        while started.elapsed() < self.planted_delay {
            std::hint::spin_loop();
        }
        self.device.enqueue(&self.input)?;
        Ok(started.elapsed())
    }

    fn settle(&mut self) -> Result<(), DeviceError> {
        match self.device.wait(&mut self.output)? {
            true => Ok(()),
            false => Err(DeviceError::Lost("a step that was enqueued never settled".into())),
        }
    }
}

/// What a request asks of the sampler, as the step-wide mask has it.
pub fn features(sampling: &SamplingSpec) -> u32 {
    let optional = [
        (!sampling.is_greedy(), feature::RANDOM),
        (sampling.has_penalties(), feature::PENALTIES),
        (!sampling.logit_bias.is_empty(), feature::BIAS),
        (sampling.has_truncation(), feature::TRUNCATION),
        (sampling.min_tokens > 0, feature::MIN_TOKENS),
        (sampling.logprobs.is_some(), feature::LOGPROBS),
        (sampling.logprobs.is_some_and(|top| top > 0), feature::TOP_LOGPROBS),
    ];
    optional.into_iter().filter(|(wanted, _)| *wanted).fold(0, |mask, (_, bit)| mask | bit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_those_of_the_request() {
        assert_eq!(features(&SamplingSpec::greedy(1)), 0);
        let sampled = SamplingSpec { temperature: 1.0, top_k: 5, logprobs: Some(0), ..SamplingSpec::greedy(1) };
        assert_eq!(features(&sampled), feature::RANDOM | feature::TRUNCATION | feature::LOGPROBS);
    }
}
