//! feed: the last node of a step. Advances the slot table, decides ends, writes the step's record and publishes it.
//!
//! For each live SAMPLE logit row: generated += 1, token and position advance, counts when the slot has penalties; ended by NaN, EOS
//! (unless ignore_eos), stop id, max_tokens, context, in that order of precedence. Then the record into
//! `output_ring[step % entries]`, its header, and last the step number (system-scope release on CUDA); step_counter += 1.

use super::{RowBuffers, Sample, SlotBuffers};
use crate::spec::BufferId;

#[derive(Clone, Debug, PartialEq)]
pub struct Feed {
    pub rows: RowBuffers,
    pub slots: SlotBuffers,
    /// The sample op whose outputs are published.
    pub sample: Sample,
    /// `[entries, output_words]` u32, pinned on CUDA.
    pub output_ring: BufferId,
    /// `[4]` u32.
    pub step_counter: BufferId,
}
