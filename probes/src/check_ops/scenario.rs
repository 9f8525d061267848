//! The steps that ops are checked on: prompts prefilled in chunks beside decode rows at uneven positions, every part of the sampler, rows
//! that must become pad rows on the device, pad rows past them.
//!
//! Long contexts are started at without being filled (the cache holds noise), so that a bucket of one row sees a thousand keys too.

use crate::driver::features;
use crate::load::scatter;
use slotgraph_graphs::spec::SamplingSpec;
use slotgraph_graphs::step::{
    Generation, NewSlot, PageId, PageUpdate, RowFeed, RowInput, RowWant, SlotId, StepInput, StepLimits, StepOutput,
};
use slotgraph_kernels::contract::PAGE_TOKENS;
use slotgraph_kernels::entry::feature;
use std::sync::Arc;

/// Seats of the scenario.
pub const SLOTS: usize = 12;
/// Where each seat's first row stands: around pages (64) and groups of keys (256), and far from both.
const STARTS: [usize; SLOTS] = [0, 5, 63, 64, 0, 200, 255, 256, 551, 1023, 1500, 2040];
/// Seats that are fed prompts; the others decode from where they start.
const PREFILL: [usize; 3] = [0, 4, 3];
/// Positions that a seat may advance by after its start or its prompt.
const ROOM: usize = 32;

pub struct Scenario {
    limits: StepLimits,
    vocab: u32,
    /// Ascending by length.
    prompts: Vec<Vec<u32>>,
    seats: Vec<Seat>,
    step: u64,
    generation: u32,
    /// Prompts taken so far.
    taken: usize,
}

#[derive(Clone)]
struct Seat {
    generation: Generation,
    sampling: Arc<SamplingSpec>,
    prompt: Vec<u32>,
    start: usize,
    /// Rows of the prompt fed so far; a seat that only decodes has one.
    fed: usize,
    introduced: bool,
    ended: bool,
    draws: usize,
}

impl Seat {
    fn prefilling(&self) -> bool {
        self.fed < self.prompt.len()
    }
}

/// Steps of a bucket.
pub fn steps_of(bucket: usize) -> usize {
    match bucket {
        0..=2 => 8,
        3..=15 => 6,
        _ => 4,
    }
}

impl Scenario {
    /// `prompts` may be empty: then they are made up.
    pub fn new(limits: &StepLimits, vocab: usize, mut prompts: Vec<Vec<u32>>) -> Scenario {
        assert!(limits.slots_max >= SLOTS, "the scenario has {SLOTS} seats");
        if prompts.is_empty() {
            let word = |at: u64| (scatter(at) % vocab as u64) as u32;
            prompts = [4, 13, 37, 124, 322, 551, 1200, 1800]
                .iter()
                .map(|&len| (0..len).map(|at| word(len << 20 | at)).collect())
                .collect();
        }
        let longest = limits.max_model_len.saturating_sub(STARTS[PREFILL[2]] + ROOM).max(1);
        prompts.iter_mut().for_each(|prompt| prompt.truncate(longest));
        prompts.sort_by_key(Vec::len);
        let mut scenario = Scenario {
            limits: limits.clone(),
            vocab: vocab as u32,
            prompts,
            seats: Vec::new(),
            step: 0,
            generation: 0,
            taken: 0,
        };
        scenario.seats = (0..SLOTS).map(|slot| scenario.seat(slot, 1)).collect();
        scenario
    }

    /// A new holder for `slot`; wide buckets get long prompts.
    fn seat(&mut self, slot: usize, bucket: usize) -> Seat {
        self.generation += 1;
        let count = self.prompts.len();
        let at = if bucket >= 64 { count - 1 - self.taken % count } else { self.taken % count };
        let mut prompt = self.prompts[at].clone();
        if PREFILL.contains(&slot) {
            self.taken += 1;
        } else {
            prompt.truncate(1);
        }
        let start = STARTS[slot].min(self.limits.max_model_len.saturating_sub(ROOM + prompt.len()));
        Seat {
            generation: Generation(self.generation),
            sampling: Arc::new(sampling(slot, self.vocab)),
            prompt,
            start,
            fed: 0,
            introduced: false,
            ended: false,
            draws: 0,
        }
    }

    /// Step `k` of `bucket`.
    pub fn next(&mut self, bucket: usize, k: usize) -> StepInput {
        self.step += 1;
        let mut input = StepInput { step: self.step, bucket, ..StepInput::default() };
        let rows = match k % 4 {
            0 => bucket.saturating_sub(1).max(1),
            2 => (3 * bucket / 4).max(1),
            _ => bucket,
        };
        self.reseat(bucket, k, &mut input);
        // The odd ones out: a holder that left long ago, and one that leaves in this very step.
        if k == 2 && rows >= 4 {
            let stale = Generation(self.seats[5].generation.0.wrapping_add(1000));
            input.rows.push(decode_row(5, stale));
            let leaver = 7;
            input.retired.push((SlotId(leaver), self.seats[leaver as usize].generation));
            if self.seats[leaver as usize].introduced {
                input.rows.push(decode_row(leaver, self.seats[leaver as usize].generation));
            }
            self.seats[leaver as usize].ended = true;
        }
        let quota = if bucket <= 2 { if k.is_multiple_of(2) { rows } else { 0 } } else { rows.div_ceil(2) };
        for turn in 0..SLOTS {
            let slot = (self.step as usize * 5 + turn) % SLOTS;
            if input.rows.len() < quota {
                self.decode(slot, &mut input);
            }
        }
        for slot in PREFILL {
            self.prefill(slot, rows, &mut input);
        }
        input
    }

    /// What the device said: who ended.
    pub fn settle(&mut self, output: &StepOutput) {
        for record in &output.records {
            let seat = &mut self.seats[record.slot.0 as usize];
            seat.ended |= seat.generation == record.generation && record.ended.is_some();
        }
    }

    /// Gives away the seats whose holders are done. One that ended is named for one more step first, as launch-ahead does.
    fn reseat(&mut self, bucket: usize, k: usize, input: &mut StepInput) {
        for slot in 0..SLOTS {
            let seat = &self.seats[slot];
            let position = seat.start + seat.fed + seat.draws;
            let done = seat.ended && k.is_multiple_of(2)
                || k == 0 && seat.introduced && !seat.prefilling()
                || PREFILL.contains(&slot) && !seat.prefilling() && seat.draws >= 2
                || position + 2 >= self.limits.max_model_len;
            if done {
                input.retired.push((SlotId(slot as u32), seat.generation));
                self.seats[slot] = self.seat(slot, bucket);
            }
        }
    }

    fn decode(&mut self, slot: usize, input: &mut StepInput) {
        let fresh = !self.seats[slot].introduced;
        let wide = input.logit_rows() >= self.limits.logit_rows(input.bucket);
        if wide || self.seats[slot].prefilling() && (PREFILL.contains(&slot) || !fresh) {
            return;
        }
        if fresh && !self.introduce(slot, input) {
            return;
        }
        let seat = &mut self.seats[slot];
        let feed = if fresh {
            seat.fed = 1;
            RowFeed::Given { token: seat.prompt[0], position: seat.start as u32, generated: false }
        } else {
            RowFeed::FromSlot
        };
        seat.draws += 1;
        input.features |= features(&seat.sampling);
        let (slot, generation) = (SlotId(slot as u32), seat.generation);
        input.rows.push(RowInput { slot, generation, feed, want: RowWant::Sample });
    }

    fn prefill(&mut self, slot: usize, rows: usize, input: &mut StepInput) {
        if input.rows.len() >= rows || !self.seats[slot].prefilling() || self.seats[slot].ended {
            return;
        }
        if !self.seats[slot].introduced && !self.introduce(slot, input) {
            return;
        }
        let logit_rows = self.limits.logit_rows(input.bucket);
        let mut wanted = input.logit_rows();
        let seat = &mut self.seats[slot];
        while input.rows.len() < rows && seat.prefilling() {
            let last = seat.fed + 1 == seat.prompt.len();
            if last && wanted >= logit_rows {
                return;
            }
            let want = match seat.prompt.get(seat.fed + 1) {
                None => RowWant::Sample,
                Some(&next) if seat.fed % 3 == 1 && wanted + 2 < logit_rows => RowWant::Score(next),
                Some(_) => RowWant::Nothing,
            };
            input.features |= match want {
                RowWant::Nothing => 0,
                RowWant::Sample => features(&seat.sampling),
                RowWant::Score(_) => feature::SCORE | feature::LOGPROBS | feature::TOP_LOGPROBS,
            };
            wanted += usize::from(want != RowWant::Nothing);
            seat.draws += usize::from(last);
            let position = (seat.start + seat.fed) as u32;
            input.rows.push(RowInput {
                slot: SlotId(slot as u32),
                generation: seat.generation,
                feed: RowFeed::Given { token: seat.prompt[seat.fed], position, generated: false },
                want,
            });
            seat.fed += 1;
        }
    }

    /// Seats the holder in this step, if the entry has room for its pages. Page tables are uneven: seats share none, and descend.
    fn introduce(&mut self, slot: usize, input: &mut StepInput) -> bool {
        let layout = self.limits.entry_layout();
        let seat = &mut self.seats[slot];
        let pages = (seat.start + seat.prompt.len() + ROOM).div_ceil(PAGE_TOKENS).min(self.limits.pages_per_slot);
        if input.pages.len() + pages > layout.pages_max {
            return false;
        }
        seat.introduced = true;
        let first = 1 + slot * self.limits.pages_per_slot;
        input.pages.extend((0..pages).map(|index| PageUpdate {
            slot: SlotId(slot as u32),
            index: index as u32,
            page: PageId((first + pages - 1 - index) as u32),
        }));
        input.new_slots.push(NewSlot {
            slot: SlotId(slot as u32),
            generation: seat.generation,
            sampling: seat.sampling.clone(),
            choice: slot as u32 % 3,
            generated: 0,
        });
        true
    }
}

fn decode_row(slot: u32, generation: Generation) -> RowInput {
    RowInput { slot: SlotId(slot), generation, feed: RowFeed::FromSlot, want: RowWant::Sample }
}

/// Every part of the sampler, by seat.
fn sampling(slot: usize, vocab: u32) -> SamplingSpec {
    let seed = 0x5eed_0000_0000 + slot as u64;
    let plain = SamplingSpec { seed, ignore_eos: true, ..SamplingSpec::greedy(1000) };
    match slot {
        0 => SamplingSpec { logprobs: Some(5), ..plain },
        1 => plain,
        2 => SamplingSpec { temperature: 1.0, top_k: 40, top_p: 0.9, logprobs: Some(20), ..plain },
        3 => SamplingSpec {
            temperature: 0.7,
            presence_penalty: 0.5,
            frequency_penalty: 0.3,
            repetition_penalty: 1.2,
            logprobs: Some(0),
            ..plain
        },
        4 => SamplingSpec {
            temperature: 0.9,
            min_p: 0.05,
            logit_bias: vec![(3, 2.5), (vocab - 1, 4.0), (17, -100.0)],
            stop_ids: vec![5, 6],
            min_tokens: 3,
            ignore_eos: false,
            logprobs: Some(1),
            ..plain
        },
        5 => SamplingSpec { temperature: 1.0, ..plain },
        6 => SamplingSpec { max_tokens: 2, logprobs: Some(2), ..plain },
        7 => SamplingSpec { repetition_penalty: 1.3, logprobs: Some(3), ..plain },
        8 => SamplingSpec { temperature: 1.3, top_p: 0.5, ..plain },
        9 => SamplingSpec { temperature: 0.2, top_k: 1, logprobs: Some(20), ..plain },
        10 => SamplingSpec { temperature: 2.0, top_k: 1000, min_p: 0.001, top_p: 0.99, logprobs: Some(0), ..plain },
        // A tie: next to such a bias every logit vanishes, and the lower id must win.
        _ => SamplingSpec { logit_bias: vec![(7, 1e9), (4, 1e9)], logprobs: Some(20), ..plain },
    }
}
