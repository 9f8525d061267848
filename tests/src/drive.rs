//! Drives a device by hand: a scheduler of a page, without an engine, whose every choice a test can make.
//!
//! Requests take seats in order, hold all their pages from the start, prefill in chunks beside the decode rows of others,
//! and leave when they end.

use slotgraph_graphs::bucket;
use slotgraph_graphs::device::Device;
use slotgraph_graphs::spec::SamplingSpec;
use slotgraph_graphs::step::{
    Generation, NewSlot, PageId, PageUpdate, Record, RowFeed, RowInput, RowWant, SlotId, StepInput, StepLimits,
    StepOutput,
};
use slotgraph_kernels::contract::PAGE_TOKENS;
use slotgraph_kernels::entry::feature;
use std::sync::Arc;

/// One request.
#[derive(Clone, Debug)]
pub struct Ask {
    pub prompt: Vec<u32>,
    /// Tokens that it generated before it lost its seat; prefilled after the prompt.
    pub generated: Vec<u32>,
    /// Report the logprob of every prefilled token but the first.
    pub score: bool,
    pub sampling: SamplingSpec,
    /// The turn of the loop from which it may be seated.
    pub after: usize,
}

impl Ask {
    /// Greedy with logprobs and five alternatives, EOS not honoured.
    pub fn greedy(prompt: &[u32], tokens: usize) -> Ask {
        let sampling = SamplingSpec { ignore_eos: true, logprobs: Some(5), ..SamplingSpec::greedy(tokens as u32) };
        Ask { prompt: prompt.to_vec(), generated: Vec::new(), score: false, sampling, after: 0 }
    }

    /// Token `at` of what is prefilled.
    fn token(&self, at: usize) -> Option<u32> {
        self.prompt.iter().chain(&self.generated).nth(at).copied()
    }

    fn prefilled(&self) -> usize {
        self.prompt.len() + self.generated.len()
    }

    /// Tokens still to draw.
    fn draws(&self) -> u32 {
        self.sampling.max_tokens - self.generated.len() as u32
    }
}

/// How the loop packs steps.
#[derive(Clone, Copy, Debug)]
pub struct Packing {
    /// Most prefill rows a step.
    pub chunk: usize,
    /// No step runs in a smaller bucket.
    pub bucket_min: usize,
}

/// Small limits that fit the models in `tests/models`.
pub fn limits(slots_max: usize, launch_ahead: usize) -> StepLimits {
    let pages_per_slot = 16;
    StepLimits {
        slots_max,
        pages: slots_max * pages_per_slot + 1,
        pages_per_slot,
        buckets: vec![1, 2, 4, 8, 16, 32, 64],
        launch_ahead,
        max_model_len: pages_per_slot * PAGE_TOKENS,
        prefill_chunk: 32,
    }
}

struct Seat {
    ask: usize,
    generation: Generation,
    /// Prefill rows enqueued.
    fed: usize,
    /// Rows enqueued that draw a token.
    draws: u32,
    ended: bool,
}

/// The loop and what it has counted; one for the life of a device.
pub struct Drive {
    pub limits: StepLimits,
    step: u64,
    generation: u32,
}

impl Drive {
    pub fn new(limits: &StepLimits) -> Drive {
        Drive { limits: limits.clone(), step: 0, generation: 0 }
    }

    /// Steps enqueued so far.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// The step that seats `ask` and prefills its first rows.
    pub fn first_step(&mut self, packing: Packing, ask: &Ask) -> StepInput {
        let mut turn = Turn { drive: self, packing, seats: Vec::new(), cooling: Vec::new(), waiting: 0, turn: 0 };
        turn.seats.resize_with(turn.drive.limits.slots_max, || None);
        let mut input = StepInput::default();
        turn.next(std::slice::from_ref(ask), &mut input);
        input
    }

    /// Runs `asks` to their ends; the records of each in order.
    pub fn run(&mut self, device: &mut dyn Device, packing: Packing, asks: &[Ask]) -> Vec<Vec<Record>> {
        let launch_ahead = self.limits.launch_ahead;
        let mut turn = Turn { drive: self, packing, seats: Vec::new(), cooling: Vec::new(), waiting: 0, turn: 0 };
        turn.seats.resize_with(turn.drive.limits.slots_max, || None);
        let mut records: Vec<Vec<Record>> = vec![Vec::new(); asks.len()];
        let mut input = StepInput::default();
        let mut output = StepOutput::default();
        while turn.waiting < asks.len() || turn.seats.iter().any(Option::is_some) {
            turn.next(asks, &mut input);
            if !input.rows.is_empty() {
                device.enqueue(&input).unwrap_or_else(|error| panic!("step {}: {error}", input.step));
            }
            let allowed = if input.rows.is_empty() { 0 } else { launch_ahead };
            while device.in_flight() > allowed {
                assert!(device.wait(&mut output).unwrap_or_else(|error| panic!("{error}")));
                turn.settle(&output, &mut records);
            }
            if device.in_flight() == 0 && input.rows.is_empty() {
                turn.cool(turn.drive.step);
            }
        }
        records
    }
}

struct Turn<'a> {
    drive: &'a mut Drive,
    packing: Packing,
    seats: Vec<Option<Seat>>,
    /// Seats of ended requests, free once this step has settled.
    cooling: Vec<(usize, u64)>,
    /// The next request to seat.
    waiting: usize,
    turn: usize,
}

impl Turn<'_> {
    /// Retires, seats and fills; a step without rows is not to be enqueued.
    fn next(&mut self, asks: &[Ask], input: &mut StepInput) {
        input.clear();
        let limits = &self.drive.limits;
        for slot in 0..limits.slots_max {
            match &self.seats[slot] {
                Some(seat) if seat.ended && !self.cooling.iter().any(|&(cold, _)| cold == slot) => {
                    input.retired.push((SlotId(slot as u32), seat.generation));
                    self.cooling.push((slot, self.drive.step));
                }
                None if self.waiting < asks.len() && asks[self.waiting].after <= self.turn => {
                    self.drive.generation += 1;
                    let generation = Generation(self.drive.generation);
                    self.seats[slot] = Some(seat(&asks[self.waiting], self.waiting, slot, generation, limits, input));
                    self.waiting += 1;
                }
                _ => {}
            }
        }
        fill(input, &mut self.seats, asks, self.packing.chunk);
        self.turn += 1;
        if !input.rows.is_empty() {
            self.drive.step += 1;
            input.step = self.drive.step;
            let rows = input.rows.len().max(self.packing.bucket_min);
            input.bucket = bucket::smallest(&limits.buckets, rows).expect("the chunk fits the largest bucket");
        }
    }

    fn settle(&mut self, output: &StepOutput, records: &mut [Vec<Record>]) {
        for record in &output.records {
            let seat = self.seats[record.slot.0 as usize].as_mut().expect("a seat is held until it is cold");
            assert_eq!(seat.generation, record.generation);
            seat.ended |= record.ended.is_some();
            records[seat.ask].push(record.clone());
        }
        self.cool(output.step);
    }

    /// Frees the seats that no step after `settled` names.
    fn cool(&mut self, settled: u64) {
        self.cooling.retain(|&(slot, last)| {
            if last <= settled {
                self.seats[slot] = None;
            }
            last > settled
        });
    }
}

fn seat(
    ask: &Ask,
    index: usize,
    slot: usize,
    generation: Generation,
    limits: &StepLimits,
    input: &mut StepInput,
) -> Seat {
    let id = SlotId(slot as u32);
    let tokens = ask.prompt.len() + ask.sampling.max_tokens as usize;
    let pages = tokens.div_ceil(PAGE_TOKENS).min(limits.pages_per_slot);
    for index in 0..pages {
        let page = PageId((1 + slot * limits.pages_per_slot + index) as u32);
        input.pages.push(PageUpdate { slot: id, index: index as u32, page });
    }
    let sampling = Arc::new(ask.sampling.clone());
    input.new_slots.push(NewSlot { slot: id, generation, sampling, choice: 0, generated: ask.generated.len() as u32 });
    Seat { ask: index, generation, fed: 0, draws: 0, ended: false }
}

/// Decode rows first, then prefill rows up to the chunk.
fn fill(input: &mut StepInput, seats: &mut [Option<Seat>], asks: &[Ask], chunk: usize) {
    let live = |seat: &&mut (usize, &mut Seat)| !seat.1.ended;
    let mut seated: Vec<(usize, &mut Seat)> =
        seats.iter_mut().enumerate().filter_map(|(slot, seat)| seat.as_mut().map(|seat| (slot, seat))).collect();
    for (slot, seat) in seated.iter_mut().filter(live) {
        let ask = &asks[seat.ask];
        if seat.fed == ask.prefilled() && seat.draws < ask.draws() {
            seat.draws += 1;
            input.features |= features(&ask.sampling);
            input.rows.push(RowInput {
                slot: SlotId(*slot as u32),
                generation: seat.generation,
                feed: RowFeed::FromSlot,
                want: RowWant::Sample,
            });
        }
    }
    let decoding = input.rows.len();
    for (slot, seat) in seated.iter_mut().filter(live) {
        let ask = &asks[seat.ask];
        while input.rows.len() - decoding < chunk
            && let Some(token) = ask.token(seat.fed)
        {
            let want = match ask.token(seat.fed + 1) {
                None => RowWant::Sample,
                Some(next) if ask.score => RowWant::Score(next),
                Some(_) => RowWant::Nothing,
            };
            if want == RowWant::Sample {
                seat.draws += 1;
            }
            if want != RowWant::Nothing {
                let scores = if ask.score { feature::SCORE } else { 0 };
                input.features |= features(&ask.sampling) | scores;
            }
            let generated = seat.fed >= ask.prompt.len();
            input.rows.push(RowInput {
                slot: SlotId(*slot as u32),
                generation: seat.generation,
                feed: RowFeed::Given { token, position: seat.fed as u32, generated },
                want,
            });
            seat.fed += 1;
        }
    }
}

fn features(sampling: &SamplingSpec) -> u32 {
    [
        (!sampling.is_greedy(), feature::RANDOM),
        (sampling.has_truncation(), feature::TRUNCATION),
        (sampling.has_penalties(), feature::PENALTIES),
        (!sampling.logit_bias.is_empty(), feature::BIAS),
        (sampling.min_tokens > 0, feature::MIN_TOKENS),
        (sampling.logprobs.is_some(), feature::LOGPROBS),
        (sampling.logprobs.is_some_and(|top| top > 0), feature::TOP_LOGPROBS),
    ]
    .into_iter()
    .filter_map(|(on, bit)| on.then_some(bit))
    .sum()
}
