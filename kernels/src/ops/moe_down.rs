//! moe_down: routed down, shared down, and the sums of contract §3.
//!
//! y_e = W_down[e] · act; p_v = Σ over the row's experts of shard v in ascending id, p = p + w_e·y_e from +0.0; the balanced tree over this
//! rank's shards gives the rank's partial. At one rank: x = (tree + shared) + x in that order.

use crate::spec::{BufferId, WeightId};

/// Where the sums go.
#[derive(Clone, Debug, PartialEq)]
pub enum MoeSum {
    /// One rank: add to the residual `[R, hidden]` f32.
    Residual { x: BufferId },
    /// Several ranks: the tree over this rank's shards and the shared experts' output, both `[R, hidden]` f32.
    Partial { partial: BufferId, shared: BufferId },
}

#[derive(Clone, Debug, PartialEq)]
pub struct MoeDown {
    pub sum: MoeSum,
    /// In `[R, top_k, inner]` bf16.
    pub act: BufferId,
    pub expert_id: BufferId,
    pub expert_weight: BufferId,
    /// Gemm, `local_experts` groups of `[hidden, inner]`.
    pub weight: WeightId,
    /// In `[R, shared_inner]` bf16 and Gemm `[hidden, shared_inner]`. Without shared experts their output is +0.0.
    pub shared: Option<(BufferId, WeightId)>,
    pub experts: usize,
    pub first_expert: usize,
    pub local_experts: usize,
    pub top_k: usize,
}
