//! feed: the last node of a step. Advances the slot table, decides ends, writes the step's record and publishes it.
//!
//! For each live SAMPLE logit row: generated += 1, token and position advance, counts when the slot has penalties; ended by NaN, EOS
//! (unless ignore_eos), stop id, max_tokens, context, in that order of precedence. Then the record into
//! `output_ring[step_counter % entries]` (the index of the step's input entry), its header, and last the step number (system-scope release on CUDA); step_counter += 1.

use super::{Operation, RowBuffers, Sample, SlotBuffers};
use crate::cpu::{CpuMemory, OpError};
use crate::entry::{OUTPUT_HEADER_WORDS, RECORD_WORDS};
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, DType, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct Feed {
    pub rows: RowBuffers,
    pub slots: SlotBuffers,
    /// The sample op whose outputs are published.
    pub sample: Sample,
    /// `[entries, output_words]` u32, pinned on CUDA.
    pub output_ring: BufferId,
    /// `[4]` u32: 0–1 steps fetched and fed so far (low, high).
    pub step_counter: BufferId,
    /// Entries of the output ring.
    pub entries: usize,
}

impl Operation for Feed {
    fn name(&self) -> &'static str {
        "feed"
    }
    fn reads(&self) -> Vec<BufferId> {
        let (rows, slots, sample) = (&self.rows, &self.slots, &self.sample);
        vec![
            rows.slot,
            rows.position,
            rows.live,
            rows.logit_row,
            rows.logit_kind,
            rows.step,
            slots.token,
            slots.position,
            slots.generation,
            slots.ended,
            slots.generated,
            slots.params,
            slots.counts,
            sample.token,
            sample.logprob,
            sample.rank,
            sample.nan,
            sample.top_ids,
            sample.top_logprobs,
            self.step_counter,
        ]
    }
    fn writes(&self) -> Vec<BufferId> {
        let slots = &self.slots;
        vec![
            slots.token,
            slots.position,
            slots.ended,
            slots.generated,
            slots.counts,
            self.output_ring,
            self.step_counter,
        ]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![]
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        check.row_buffers(&self.rows)?;
        check.slot_buffers(&self.slots)?;
        self.sample.check_outputs(check)?;
        check.holds("entries", self.entries > 0, "at least 1", self.entries)?;
        let words = OUTPUT_HEADER_WORDS + check.specs.logit_rows() * RECORD_WORDS;
        let (_, line) = check.any(self.output_ring, DType::U32, 2)?;
        check.lines(self.output_ring, DType::U32, self.entries, line)?;
        check.holds("output_words", line >= words, "room for a record of each logit row", line)?;
        check.lines(self.step_counter, DType::U32, 4, 1)
    }

    fn run(&self, _memory: &mut CpuMemory) -> Result<(), OpError> {
        Err(OpError::NotBuilt(self.name()))
    }
}
