//! sample: logprobs of the raw distribution and the next token of each logit row, by contract §7.
//!
//! logit_bias → penalties (presence, frequency over generated; repetition over prompt + generated) → min_tokens ban of every EOS and stop
//! id → temperature (below GREEDY_TEMPERATURE: greedy) → min_p → top_k → top_p → argmax(l + Gumbel); ties to the lowest id.
//! Noise: Philox4x32-10 (Salmon et al. 2011), key = seed, counter = (choice, position of the row, id / 4, 0), word id % 4;
//! u = ((word >> 8) + 0.5) · 2⁻²⁴, noise = −ln(−ln u).
//! A row with a NaN logit gets `nan` = 1 and token 0.

use super::{RowBuffers, SlotBuffers};
use crate::spec::BufferId;

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
    /// In/out `[L, vocab]` f32: adjusted in place.
    pub logits: BufferId,
    /// Scratch f32 `[L, scratch]` for a GPU's two stages.
    pub scratch: BufferId,
    pub rows: RowBuffers,
    pub slots: SlotBuffers,
}
