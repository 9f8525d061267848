//! One plan, run op by op on the CPU references with somebody watching: a second reader of the plan, independent of the CPU device.
//!
//! Used where a test must see what lies between two ops. One seat, one request, prefill rows only.

use slotgraph_graphs::model;
use slotgraph_graphs::plan::{PlacedOp, Plan, RankShape};
use slotgraph_graphs::spec::SamplingSpec;
use slotgraph_graphs::step::{
    Generation, NewSlot, PageId, PageUpdate, Record, RowFeed, RowInput, RowWant, SlotId, StepInput, StepLimits,
    StepOutput, decode, encode,
};
use slotgraph_kernels::contract::PAGE_TOKENS;
use slotgraph_kernels::cpu::{CpuMemory, CpuWeight};
use slotgraph_kernels::entry::feature;
use slotgraph_kernels::{Op, Precision};
use slotgraph_runtime::checkpoint::Checkpoint;
use std::ops::Range;
use std::sync::Arc;

/// Rows of the plan.
const ROWS: usize = 64;

/// What a watcher sees after an op has run.
pub struct View<'a> {
    pub plan: &'a Plan,
    pub placed: &'a PlacedOp,
    pub memory: &'a CpuMemory,
    /// Positions of the step's rows; row 0 has the first.
    pub positions: Range<usize>,
}

pub struct Stepwise {
    plan: Plan,
    memory: CpuMemory,
    limits: StepLimits,
    eos_ids: Vec<u32>,
    step: u64,
    holder: u32,
}

impl Stepwise {
    pub fn new(checkpoint: &Checkpoint, precision: Precision) -> Stepwise {
        let spec = &checkpoint.spec;
        let pages_per_slot = spec.positions.div_ceil(PAGE_TOKENS);
        let limits = StepLimits {
            slots_max: 1,
            pages: pages_per_slot + 1,
            pages_per_slot,
            buckets: vec![ROWS],
            launch_ahead: 0,
            max_model_len: spec.positions,
            prefill_chunk: ROWS,
        };
        let plan = model::build(spec, &limits, RankShape::SINGLE, ROWS).unwrap_or_else(|e| panic!("{e}"));
        let source = checkpoint.source();
        let weight = |spec| CpuWeight::from_bf16(spec, |group, out: &mut [u16]| source.read(spec, group, out));
        let weights: Result<Vec<Arc<CpuWeight>>, _> =
            plan.weights.iter().map(|spec| weight(spec).map(Arc::new)).collect();
        let weights: Arc<[Arc<CpuWeight>]> = weights.unwrap_or_else(|e| panic!("{e}")).into();
        let mut memory = CpuMemory::new(precision, &plan.buffers, weights);
        memory.plan_rows = ROWS;
        memory.plan_logit_rows = limits.logit_rows(ROWS);
        Stepwise { plan, memory, limits, eos_ids: spec.eos_ids.clone(), step: 0, holder: 0 }
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Feeds `text` whole; each token from position `from` on is scored against the token before it. `watch` sees every op.
    pub fn score(&mut self, text: &[u32], from: usize, watch: &mut dyn FnMut(&View)) -> Vec<Record> {
        self.holder += 1;
        let generation = Generation(self.holder);
        let mut records = Vec::new();
        for start in (0..text.len()).step_by(ROWS) {
            let positions = start..text.len().min(start + ROWS);
            self.step += 1;
            let mut input = StepInput { step: self.step, bucket: ROWS, ..StepInput::default() };
            if start == 0 {
                let sampling = Arc::new(SamplingSpec { logprobs: Some(5), ..SamplingSpec::greedy(1) });
                input.new_slots.push(NewSlot { slot: SlotId(0), generation, sampling, choice: 0, generated: 0 });
                input.pages = (0..text.len().div_ceil(PAGE_TOKENS) as u32)
                    .map(|index| PageUpdate { slot: SlotId(0), index, page: PageId(index + 1) })
                    .collect();
            }
            for position in positions.clone() {
                let want = match text.get(position + 1) {
                    Some(&next) if position + 1 >= from => RowWant::Score(next),
                    _ => RowWant::Nothing,
                };
                let feed = RowFeed::Given { token: text[position], position: position as u32, generated: false };
                input.rows.push(RowInput { slot: SlotId(0), generation, feed, want });
            }
            input.features = feature::SCORE | feature::LOGPROBS | feature::TOP_LOGPROBS;
            records.extend(self.run(&input, positions, watch).records);
        }
        records
    }

    fn run(&mut self, input: &StepInput, positions: Range<usize>, watch: &mut dyn FnMut(&View)) -> StepOutput {
        let layout = self.limits.entry_layout();
        let Some(Op::Fetch(fetch)) = self.plan.ops.first().map(|placed| &placed.op) else {
            panic!("a plan starts with fetch")
        };
        let Some(Op::Feed(feed)) = self.plan.ops.last().map(|placed| &placed.op) else {
            panic!("a plan ends with feed")
        };
        let turn = (input.step as usize - 1) % self.limits.ring_entries();
        let entry = turn * layout.entry_words();
        let words = &mut self.memory.u32_mut(fetch.input_ring)[entry..entry + layout.entry_words()];
        encode(input, &self.limits, &self.eos_ids, words).unwrap_or_else(|e| panic!("{e}"));
        for placed in &self.plan.ops {
            placed.op.run(&mut self.memory).unwrap_or_else(|e| panic!("{}: {e}", placed.op.name()));
            watch(&View { plan: &self.plan, placed, memory: &self.memory, positions: positions.clone() });
        }
        let record = turn * layout.output_words();
        let words = &self.memory.u32(feed.output_ring)[record..record + layout.output_words()];
        let mut output = StepOutput::default();
        decode(words, &mut output).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(output.step, input.step);
        output
    }
}
