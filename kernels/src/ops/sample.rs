//! sample: logprobs of the raw distribution and the next token of each logit row, by contract §7.
//!
//! logit_bias → penalties (presence, frequency over generated; repetition over prompt + generated) → min_tokens ban of every EOS and stop
//! id → temperature (below GREEDY_TEMPERATURE: greedy) → min_p → top_k → top_p → argmax(l + Gumbel); ties to the lowest id.
//! Noise: Philox4x32-10 (Salmon et al. 2011), key = seed, counter = (choice, position of the row, id / 4, 0), word id % 4;
//! u = ((word >> 9) + 0.5) · 2⁻²³ (exact in f32 and never 1: with 24 bits the sum would round), noise = −ln(−ln u).
//! Penalties in vLLM's order: repetition (a positive logit is divided by it, another multiplied), then frequency · count, then presence.
//! A slot is below its min_tokens while `generated` < MIN_TOKENS. Truncation reads the temperature-scaled distribution; top_p is over what
//! min_p and top_k left, renormalised, in descending order; a token stays while the mass before it is below top_p, so the top one always does.
//! Logprob and rank are reported for SCORE rows and for slots with the LOGPROBS flag, alternatives for those with TOP_LOGPROBS > 0 as well;
//! otherwise they are 0, whatever the row's neighbours ask for. rank = 1 + the ids with a larger raw logit, or an equal one and a lower id.
//! A row with a NaN logit gets `nan` = 1, token 0 (SCORE rows: the target) and no logprobs.

use super::{Operation, RowBuffers, SlotBuffers};
use crate::contract::TOP_LOGPROBS_MAX;
use crate::cpu::{CpuMemory, OpError};
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, DType, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Out `[L]` u32: sampled token (SCORE rows: the target).
    pub token: BufferId,
    /// Out `[L]` f32.
    pub logprob: BufferId,
    /// Out `[L]` u32: 1-based rank of the token.
    pub rank: BufferId,
    /// Out `[L]` u32.
    pub nan: BufferId,
    /// Out `[L, TOP_LOGPROBS_MAX]` u32 and f32, best first.
    pub top_ids: BufferId,
    pub top_logprobs: BufferId,
    /// In/out `[L, vocab]` f32; working space, whose contents mean nothing afterwards.
    pub logits: BufferId,
    /// Scratch f32 `[L, scratch]` for a GPU's two stages.
    pub scratch: BufferId,
    pub rows: RowBuffers,
    pub slots: SlotBuffers,
}

impl Sample {
    /// The outputs' shapes; `feed` asks too.
    pub(super) fn check_outputs(&self, check: &Check) -> Result<(), ShapeError> {
        for (id, dtype) in
            [(self.token, DType::U32), (self.logprob, DType::F32), (self.rank, DType::U32), (self.nan, DType::U32)]
        {
            check.logit_rows(id, dtype, 1)?;
        }
        check.logit_rows(self.top_ids, DType::U32, TOP_LOGPROBS_MAX)?;
        check.logit_rows(self.top_logprobs, DType::F32, TOP_LOGPROBS_MAX)
    }
}

impl Operation for Sample {
    fn name(&self) -> &'static str {
        "sample"
    }
    fn reads(&self) -> Vec<BufferId> {
        let (rows, slots) = (&self.rows, &self.slots);
        vec![
            self.logits,
            rows.slot,
            rows.position,
            rows.logit_row,
            rows.logit_kind,
            rows.logit_target,
            rows.step,
            slots.generated,
            slots.params,
            slots.bias,
            slots.counts,
        ]
    }
    fn writes(&self) -> Vec<BufferId> {
        vec![self.token, self.logprob, self.rank, self.nan, self.top_ids, self.top_logprobs, self.logits, self.scratch]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![]
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        check.row_buffers(&self.rows)?;
        let vocab = check.slot_buffers(&self.slots)?;
        self.check_outputs(check)?;
        check.logit_rows(self.logits, DType::F32, vocab)?;
        check.any(self.scratch, DType::F32, 1)?;
        check.distinct(&[self.logits, self.scratch])
    }

    fn run(&self, _memory: &mut CpuMemory) -> Result<(), OpError> {
        Err(OpError::NotBuilt(self.name()))
    }
}
