//! The ends of a step: rings, slot tables, row buffers and the sampler around a handful of seats.

use crate::rig::Net;
use slotgraph_kernels::contract::{LOGIT_BIAS_MAX, TOP_LOGPROBS_MAX};
use slotgraph_kernels::cpu::CpuMemory;
use slotgraph_kernels::entry::{EntryLayout, HEADER_WORDS, SLOT_WORDS, header, logit_row, row, slot as field};
use slotgraph_kernels::ops::{Feed, Fetch, Op, RowBuffers, Sample, SlotBuffers, step};
use slotgraph_kernels::{BufferId, DType, OpError, Precision};

/// Seats, the pad slot apart.
pub const SEATS: usize = 3;
pub const PAD_SLOT: u32 = SEATS as u32;
pub const PAGES_PER_SLOT: usize = 4;
pub const ROWS: usize = 6;
pub const LOGIT_ROWS: usize = 4;
pub const ENTRIES: usize = 2;
pub const LAYOUT: EntryLayout = EntryLayout {
    rows_max: ROWS,
    logit_rows_max: LOGIT_ROWS,
    new_slots_max: SEATS,
    retired_max: 2 * SEATS,
    pages_max: 12,
    bias_max: 64,
};

pub struct Station {
    pub net: Net,
    pub rows: RowBuffers,
    pub slots: SlotBuffers,
    pub sample: Sample,
    pub fetch: Fetch,
    pub feed: Feed,
    pub memory: CpuMemory,
}

impl Station {
    pub fn new(vocab: usize) -> Self {
        let mut net = Net::new(ROWS);
        net.logit_rows = LOGIT_ROWS;
        let rows = {
            let mut rows = |name: &str, count: usize| net.buffer(name, DType::U32, &[count]);
            RowBuffers {
                slot: rows("row.slot", ROWS),
                token: rows("row.token", ROWS),
                position: rows("row.position", ROWS),
                live: rows("row.live", ROWS),
                logit_row: rows("logit_row.row", LOGIT_ROWS),
                logit_kind: rows("logit_row.kind", LOGIT_ROWS),
                logit_target: rows("logit_row.target", LOGIT_ROWS),
                step: rows("step", step::WORDS),
            }
        };
        let slots = {
            let mut slots = |name: &str, width: &[usize]| net.buffer(name, DType::U32, &[&[SEATS + 1], width].concat());
            SlotBuffers {
                token: slots("slot.token", &[]),
                position: slots("slot.position", &[]),
                generation: slots("slot.generation", &[]),
                ended: slots("slot.ended", &[]),
                generated: slots("slot.generated", &[]),
                pages: slots("slot.pages", &[PAGES_PER_SLOT]),
                params: slots("slot.params", &[SLOT_WORDS]),
                bias: slots("slot.bias", &[LOGIT_BIAS_MAX, 2]),
                counts: slots("slot.counts", &[vocab]),
            }
        };
        let sample = {
            let mut out = |name: &str, dtype, width| net.buffer(name, dtype, &[LOGIT_ROWS, width]);
            Sample {
                token: out("sample.token", DType::U32, 1),
                logprob: out("sample.logprob", DType::F32, 1),
                rank: out("sample.rank", DType::U32, 1),
                nan: out("sample.nan", DType::U32, 1),
                top_ids: out("sample.top_ids", DType::U32, TOP_LOGPROBS_MAX),
                top_logprobs: out("sample.top_logprobs", DType::F32, TOP_LOGPROBS_MAX),
                logits: out("logits", DType::F32, vocab),
                scratch: out("sample.scratch", DType::F32, 1),
                rows,
                slots,
            }
        };
        let input_ring = net.buffer("ring.input", DType::U32, &[ENTRIES, LAYOUT.entry_words()]);
        let output_ring = net.buffer("ring.output", DType::U32, &[ENTRIES, LAYOUT.output_words()]);
        let step_counter = net.buffer("ring.counter", DType::U32, &[4]);
        let fetch = Fetch { rows, slots, input_ring, step_counter, entries: ENTRIES };
        let feed = Feed { rows, slots, sample: sample.clone(), output_ring, step_counter, entries: ENTRIES };
        for op in [Op::Fetch(fetch.clone()), Op::Sample(sample.clone()), Op::Feed(feed.clone())] {
            op.check(&net).unwrap();
        }
        let mut memory = net.memory(Precision::Oracle);
        memory.u32_mut(slots.ended).fill(1);
        Station { net, rows, slots, sample, fetch, feed, memory }
    }

    pub fn steps_done(&self) -> u64 {
        let counter = self.memory.u32(self.fetch.step_counter);
        u64::from(counter[0]) | u64::from(counter[1]) << 32
    }

    /// Writes `entry` where the next step looks for it.
    pub fn put(&mut self, entry: &Entry) {
        let step = self.steps_done() + 1;
        let words = LAYOUT.entry_words();
        let at = ((step - 1) % ENTRIES as u64) as usize * words;
        entry.write(step, &mut self.memory.u32_mut(self.fetch.input_ring)[at..at + words]);
    }

    pub fn fetch(&mut self, entry: &Entry) -> Result<(), OpError> {
        self.put(entry);
        Op::Fetch(self.fetch.clone()).run(&mut self.memory)
    }

    pub fn sample(&mut self) {
        Op::Sample(self.sample.clone()).run(&mut self.memory).unwrap();
    }

    /// Feeds and gives the step's output words.
    pub fn feed(&mut self) -> Vec<u32> {
        let words = LAYOUT.output_words();
        let at = (self.steps_done() % ENTRIES as u64) as usize * words;
        Op::Feed(self.feed.clone()).run(&mut self.memory).unwrap();
        self.memory.u32(self.feed.output_ring)[at..at + words].to_vec()
    }

    pub fn logits(&mut self, at: usize) -> &mut [f32] {
        let vocab = self.memory.stride(self.sample.logits);
        &mut self.memory.f32_mut(self.sample.logits)[at * vocab..][..vocab]
    }

    pub fn word(&self, id: BufferId, at: usize) -> u32 {
        self.memory.u32(id)[at]
    }

    pub fn count(&self, slot: usize, token: usize) -> u32 {
        self.word(self.slots.counts, slot * self.memory.stride(self.slots.counts) + token)
    }
}

/// One step's entry as values.
#[derive(Clone, Default)]
pub struct Entry {
    pub features: u32,
    pub rows: Vec<[u32; 5]>,
    pub logit_rows: Vec<[u32; 3]>,
    pub new: Vec<[u32; SLOT_WORDS]>,
    pub retired: Vec<[u32; 2]>,
    pub pages: Vec<[u32; 3]>,
    pub bias: Vec<[u32; 2]>,
}

impl Entry {
    fn write(&self, step: u64, words: &mut [u32]) {
        words.fill(0xdead_beef);
        words[..HEADER_WORDS].fill(0);
        words[header::STEP_LO] = step as u32;
        words[header::STEP_HI] = (step >> 32) as u32;
        words[header::FEATURES] = self.features;
        let [rows, logit_rows, new, retired, pages, bias, end] = LAYOUT.sections();
        let sections = [
            (header::ROWS, header::ROWS_AT, rows, self.rows.len(), self.rows.as_flattened()),
            (
                header::LOGIT_ROWS,
                header::LOGIT_ROWS_AT,
                logit_rows,
                self.logit_rows.len(),
                self.logit_rows.as_flattened(),
            ),
            (header::NEW_SLOTS, header::NEW_SLOTS_AT, new, self.new.len(), self.new.as_flattened()),
            (header::RETIRED, header::RETIRED_AT, retired, self.retired.len(), self.retired.as_flattened()),
            (header::PAGES, header::PAGES_AT, pages, self.pages.len(), self.pages.as_flattened()),
            (header::BIAS, header::BIAS_AT, bias, self.bias.len(), self.bias.as_flattened()),
        ];
        for (count_at, start_at, start, count, contents) in sections {
            words[count_at] = count as u32;
            words[start_at] = start as u32;
            words[start..start + contents.len()].copy_from_slice(contents);
        }
        words[header::USED_WORDS] = end as u32;
    }
}

/// A given row.
pub fn given(slot: u32, generation: u32, token: u32, position: u32, flags: u32) -> [u32; 5] {
    let mut words = [0; 5];
    words[row::SLOT] = slot;
    words[row::GENERATION] = generation;
    words[row::FLAGS] = flags;
    words[row::TOKEN] = token;
    words[row::POSITION] = position;
    words
}

/// A decode row; its token and position words mean nothing.
pub fn decode(slot: u32, generation: u32) -> [u32; 5] {
    given(slot, generation, 0xffff_ffff, 0xffff_ffff, row::FROM_SLOT)
}

pub fn sampled(row: u32) -> [u32; 3] {
    [row, logit_row::SAMPLE, 0]
}

pub fn scored(row: u32, target: u32) -> [u32; 3] {
    [row, logit_row::SCORE, target]
}

/// A greedy slot with room for 100 tokens.
pub fn greedy(slot: u32, generation: u32) -> [u32; SLOT_WORDS] {
    let mut words = [0; SLOT_WORDS];
    words[field::SLOT] = slot;
    words[field::GENERATION] = generation;
    words[field::FLAGS] = field::GREEDY;
    words[field::TOP_P] = 1.0_f32.to_bits();
    words[field::REPETITION] = 1.0_f32.to_bits();
    words[field::MAX_TOKENS] = 100;
    words[field::CONTEXT] = 200;
    words
}
