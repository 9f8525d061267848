//! What of an op's outputs is compared, and how far a float may be off.
//!
//! Integers and copies are compared exactly. Sums are compared against a limit of their own op: the order of sums is the contract's, but
//! tensor cores round inside a tile in their own way, so a device's sum is off by some 2⁻²⁴ of the largest term and, once rounded to bf16,
//! rarely by one step. **Invariant:** only what the op defines is compared: rows in use, entries of experts that are here, cache lines of
//! live rows; and of the cache everything else too, which the op must leave alone.

use slotgraph_graphs::plan::Plan;
use slotgraph_kernels::contract::{LOGIT_BIAS_MAX, PAGE_TOKENS, TOP_LOGPROBS_MAX};
use slotgraph_kernels::cpu::CpuMemory;
use slotgraph_kernels::entry::{
    BIAS_WORDS, OUTPUT_HEADER_WORDS, RECORD_WORDS, SLOT_WORDS, feature, logit_row, output, slot,
};
use slotgraph_kernels::ops::{Feed, Fetch, Op, Paged, RowBuffers, Sample, SlotBuffers, step};
use slotgraph_kernels::{BufferId, DType, Role, Specs};
use std::ops::Range;

/// How two values may differ.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    Exact,
    /// |got − want| ≤ rel·|want| + of_line·max|want of the line| + abs, and at most `share` of the elements differ at all, counted over
    /// all layers, steps and buckets: a probability that rounds the other way moves all of its head's elements.
    Near {
        rel: f64,
        of_line: f64,
        abs: f64,
        share: f64,
    },
}

/// Some lines of one buffer; each knows which row of the step it belongs to.
pub struct Part {
    pub buffer: BufferId,
    pub rule: Rule,
    pub lines: Vec<(usize, Range<usize>)>,
}

/// One bf16 step, relative to the value.
const BF16_STEP: f64 = 1.0 / 128.0;

/// The limit of a float output. Worst of five models on an H200: sums 9e-7 of their line, logprobs 7e-6 of themselves, bf16 values one
/// step, in 0.02 % of the elements after a GEMM and in 0.05 % after attention. Wider models add more terms.
fn near(op: &Op, dtype: DType) -> Rule {
    let (of_line, share) = match op {
        // Copies: the table's own bits.
        Op::Embed(_) => return Rule::Exact,
        // p is rounded to bf16 before it is summed, so a step of p moves the sum a little.
        Op::MlaAttend(_) | Op::GqaAttend(_) => (2e-3, 0.005),
        _ => (1e-5, 0.003),
    };
    match dtype {
        DType::Bf16 => Rule::Near { rel: BF16_STEP, of_line, abs: 1e-30, share },
        _ => Rule::Near { rel: 1e-6, of_line, abs: 1e-30, share: 1.0 },
    }
}

/// The parts of `op` to compare. `memory` holds the op's inputs and what the CPU made of them.
pub fn parts(op: &Op, plan: &Plan, memory: &CpuMemory) -> Vec<Part> {
    let Some(Op::Fetch(fetch)) = plan.ops.first().map(|placed| &placed.op) else {
        unreachable!("verify asks for fetch first");
    };
    let view = View { op, plan, memory, rows: &fetch.rows, slots: &fetch.slots };
    let mut parts = match op {
        Op::Fetch(op) => view.fetch(op),
        Op::Feed(op) => view.feed(op),
        Op::Sample(op) => view.sample(op),
        Op::Head(op) => vec![view.lines(op.logits, view.live_logit_rows())],
        Op::MlaPrep(op) => view.prep(&[op.q_lat, op.q_rope], op.paged),
        Op::GqaPrep(op) => view.prep(&[op.q], op.paged),
        Op::MoeGate(op) => {
            let mut parts: Vec<Part> = [Some(op.h), op.shared.as_ref().map(|shared| shared.act)]
                .into_iter()
                .flatten()
                .map(|id| view.lines(id, view.live_rows()))
                .collect();
            parts.push(view.exact_lines(op.expert_id, view.live_rows()));
            parts.push(view.lines(op.expert_weight, view.live_rows()));
            parts.push(view.step_words());
            parts
        }
        Op::MoeUp(op) => {
            let inner = memory.stride(op.act) / op.top_k;
            let here = op.first_expert..op.first_expert + op.local_experts;
            let lines = view.live_rows().into_iter().flat_map(|row| (0..op.top_k).map(move |i| (row, i)));
            let lines =
                lines.filter(|(row, i)| here.contains(&(memory.u32(op.expert_id)[row * op.top_k + i] as usize)));
            let lines = lines.map(|(row, i)| (row, span(row * op.top_k + i, inner)));
            vec![Part { buffer: op.act, rule: near(view.op, DType::Bf16), lines: lines.collect() }]
        }
        Op::Exchange(_) => Vec::new(),
        _ => {
            let written = op.writes().into_iter().filter(|&id| plan.buffer(id).role == Role::Activation);
            written.map(|id| view.lines(id, view.live_rows())).collect()
        }
    };
    // Scratch that must be as it was.
    let reads = op.reads();
    for id in op.writes() {
        if plan.buffer(id).role == Role::Scratch && reads.contains(&id) {
            parts.push(view.whole(id));
        }
    }
    parts
}

fn span(line: usize, width: usize) -> Range<usize> {
    line * width..(line + 1) * width
}

struct View<'a> {
    op: &'a Op,
    plan: &'a Plan,
    memory: &'a CpuMemory,
    rows: &'a RowBuffers,
    slots: &'a SlotBuffers,
}

impl View<'_> {
    fn live_rows(&self) -> Vec<usize> {
        let live = self.memory.u32(self.rows.live);
        (0..self.memory.rows.min(self.plan.rows)).filter(|&row| live[row] == 1).collect()
    }

    fn live_logit_rows(&self) -> Vec<usize> {
        let kind = self.memory.u32(self.rows.logit_kind);
        (0..self.memory.logit_rows.min(self.plan.logit_rows)).filter(|&at| kind[at] != 0).collect()
    }

    fn lines(&self, buffer: BufferId, of: Vec<usize>) -> Part {
        let dtype = self.plan.buffer(buffer).dtype;
        let rule = if dtype == DType::U32 { Rule::Exact } else { near(self.op, dtype) };
        let width = self.memory.stride(buffer);
        Part { buffer, rule, lines: of.into_iter().map(|row| (row, span(row, width))).collect() }
    }

    fn exact_lines(&self, buffer: BufferId, of: Vec<usize>) -> Part {
        Part { rule: Rule::Exact, ..self.lines(buffer, of) }
    }

    fn exact(&self, buffer: BufferId, range: Range<usize>) -> Part {
        Part { buffer, rule: Rule::Exact, lines: vec![(0, range)] }
    }

    fn whole(&self, buffer: BufferId) -> Part {
        self.exact(buffer, 0..self.plan.buffer(buffer).elements())
    }

    /// All step-wide words but the start time.
    fn step_words(&self) -> Part {
        let lines = vec![(0, 0..step::START_NS), (0, step::START_NS + 2..step::WORDS)];
        Part { buffer: self.rows.step, rule: Rule::Exact, lines }
    }

    /// Counts of the seats that keep them.
    fn counts(&self) -> Part {
        let seats = 0..self.plan.buffer(self.slots.generation).elements();
        let params = self.memory.u32(self.slots.params);
        let keeps = |seat: &usize| params[seat * SLOT_WORDS + slot::FLAGS] & slot::PENALTIES != 0;
        self.exact_lines(self.slots.counts, seats.filter(keeps).collect())
    }

    fn fetch(&self, op: &Fetch) -> Vec<Part> {
        let (rows, slots) = (&op.rows, &op.slots);
        let mut parts: Vec<Part> = [rows.slot, rows.token, rows.position, rows.live]
            .into_iter()
            .chain([rows.logit_row, rows.logit_kind, rows.logit_target])
            .chain([slots.generation, slots.ended, slots.generated, slots.pages, slots.params])
            .map(|id| self.whole(id))
            .collect();
        let params = self.memory.u32(slots.params);
        let bias = (0..self.plan.buffer(slots.generation).elements()).map(|seat| {
            let start = seat * LOGIT_BIAS_MAX * BIAS_WORDS;
            (seat, start..start + params[seat * SLOT_WORDS + slot::BIAS_COUNT] as usize * BIAS_WORDS)
        });
        parts.push(Part { buffer: slots.bias, rule: Rule::Exact, lines: bias.collect() });
        parts.extend([self.step_words(), self.counts()]);
        parts
    }

    fn feed(&self, op: &Feed) -> Vec<Part> {
        let slots = &op.slots;
        let mut parts: Vec<Part> =
            [slots.token, slots.position, slots.ended, slots.generated].map(|id| self.whole(id)).into();
        parts.push(self.counts());
        parts.push(self.exact(op.step_counter, 0..2));
        // The counter has advanced already.
        let words = self.memory.stride(op.output_ring);
        let counter = self.memory.u32(op.step_counter)[0] as usize;
        let start = (counter + op.entries - 1) % op.entries * words;
        let count = self.memory.u32(op.rows.step)[step::LOGIT_ROWS] as usize;
        let records = start + OUTPUT_HEADER_WORDS;
        let mut lines =
            vec![(0, start..start + output::START_NS), (0, start + output::ROUTES_LOCAL..start + output::CHECKSUM + 1)];
        lines.extend((0..count).map(|at| (at, records + at * RECORD_WORDS..records + (at + 1) * RECORD_WORDS)));
        parts.push(Part { buffer: op.output_ring, rule: Rule::Exact, lines });
        parts
    }

    fn sample(&self, op: &Sample) -> Vec<Part> {
        let live = self.live_logit_rows();
        let mut parts: Vec<Part> = [op.token, op.rank, op.nan].map(|id| self.exact_lines(id, live.clone())).into();
        // A log of a sum of exponentials: absolute, in nats.
        let nats = Rule::Near { rel: 1e-5, of_line: 0.0, abs: 5e-6, share: 1.0 };
        parts.push(Part { rule: nats, ..self.lines(op.logprob, live.clone()) });
        let top: Vec<(usize, Range<usize>)> = live
            .into_iter()
            .map(|at| (at, at * TOP_LOGPROBS_MAX..at * TOP_LOGPROBS_MAX + self.alternatives(op, at)))
            .collect();
        parts.push(Part { buffer: op.top_ids, rule: Rule::Exact, lines: top.clone() });
        parts.push(Part { buffer: op.top_logprobs, rule: nats, lines: top });
        parts
    }

    /// Alternatives that logit row `at` reports.
    fn alternatives(&self, op: &Sample, at: usize) -> usize {
        let memory = self.memory;
        let features = memory.u32(op.rows.step)[step::FEATURES];
        let row = memory.u32(op.rows.logit_row)[at] as usize;
        let seat = memory.u32(op.rows.slot)[row] as usize;
        let params = &memory.u32(op.slots.params)[seat * SLOT_WORDS..][..SLOT_WORDS];
        let wanted = if memory.u32(op.rows.logit_kind)[at] == logit_row::SCORE {
            features & feature::SCORE != 0
        } else {
            features & feature::LOGPROBS != 0 && params[slot::FLAGS] & slot::LOGPROBS != 0
        };
        let some = wanted && features & feature::TOP_LOGPROBS != 0 && memory.u32(op.nan)[at] == 0;
        if some { (params[slot::TOP_LOGPROBS] as usize).min(TOP_LOGPROBS_MAX).min(memory.stride(op.logits)) } else { 0 }
    }

    /// Queries by row; of the cache the lines of live rows, and everything else outside page 0 untouched.
    fn prep(&self, queries: &[BufferId], paged: Paged) -> Vec<Part> {
        let memory = self.memory;
        let mut parts: Vec<Part> = queries.iter().map(|&id| self.lines(id, self.live_rows())).collect();
        let width = memory.stride(paged.kv) / PAGE_TOKENS;
        let per_slot = memory.stride(paged.block_table);
        let mut written: Vec<(usize, usize)> = Vec::new();
        for row in self.live_rows() {
            let position = memory.u32(self.rows.position)[row] as usize;
            let seat = memory.u32(self.rows.slot)[row] as usize;
            let Some(&page) = memory.u32(paged.block_table).get(seat * per_slot + position / PAGE_TOKENS) else {
                continue;
            };
            written.push((page as usize * PAGE_TOKENS + position % PAGE_TOKENS, row));
        }
        written.sort_unstable();
        let total = self.plan.buffer(paged.kv).elements() / width;
        let mut others = Vec::new();
        let mut next = PAGE_TOKENS;
        for &(line, _) in written.iter().filter(|(line, _)| *line >= PAGE_TOKENS) {
            others.push((0, next * width..line.max(next) * width));
            next = line + 1;
        }
        others.push((0, next * width..total * width));
        let lines = written.iter().map(|&(line, row)| (row, span(line, width))).collect();
        parts.push(Part { buffer: paged.kv, rule: near(self.op, DType::Bf16), lines });
        parts.push(Part { buffer: paged.kv, rule: Rule::Exact, lines: others });
        parts
    }
}
