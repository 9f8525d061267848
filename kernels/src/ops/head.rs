//! head: logits[l, :] = W_head · rms_norm(x[logit_row[l], :]), fp32, only for rows that need logits.

use crate::spec::{BufferId, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct Head {
    /// Out `[L, vocab]` f32.
    pub logits: BufferId,
    pub x: BufferId,
    pub logit_row: BufferId,
    pub norm: WeightId,
    /// Gemm `[vocab, hidden]`.
    pub weight: WeightId,
    pub eps: f32,
}
