//! moe_up: act[r, i, :] = silu(gate)·up of the row's i-th expert, rounded, for the experts that this rank owns.

use crate::spec::{BufferId, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct MoeUp {
    /// Out `[R, top_k, inner]` bf16; entries of other ranks' experts are not written.
    pub act: BufferId,
    pub h: BufferId,
    pub expert_id: BufferId,
    /// Gemm, `local_experts` groups of `[2·inner, hidden]`: gate rows, then up rows.
    pub weight: WeightId,
    pub first_expert: usize,
    pub local_experts: usize,
    pub top_k: usize,
}
