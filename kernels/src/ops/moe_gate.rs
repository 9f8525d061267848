//! moe_gate: norm, router and shared experts' first half. h = rms_norm(x) rounded; scores = softmax(W_router · h) in fp32; top-k;
//! shared_act = silu(gate)·up of the shared experts, rounded.
//!
//! Ties go to the lowest expert id. Group-limited greedy (DeepSeek-V2, §2.1.3): groups ranked by their best score, experts outside the best
//! `topk_group` groups get score 0. Chosen experts are written in ascending id with weight = score (· scaling, / Σ if norm_topk_prob).
//! Pad rows write expert id u32::MAX and weight 0. Adds the live rows' route counts to `step` words 5 and 6.

use crate::spec::{BufferId, WeightId};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopkMethod {
    Greedy,
    GroupLimitedGreedy { groups: usize, topk_groups: usize },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    pub experts: usize,
    pub top_k: usize,
    pub method: TopkMethod,
    /// Divide the chosen weights by their sum (+ 1e-20) when top_k > 1; then `scaling` is not applied (as in the reference code).
    pub norm_topk_prob: bool,
    pub scaling: f32,
}

#[derive(Clone, Debug, PartialEq)]
pub struct SharedGate {
    /// Out `[R, shared_inner]` bf16.
    pub act: BufferId,
    /// Gemm `[2·shared_inner, hidden]`.
    pub weight: WeightId,
}

#[derive(Clone, Debug, PartialEq)]
pub struct MoeGate {
    /// Out `[R, hidden]` bf16: the norm output, read again by `moe_up`.
    pub h: BufferId,
    /// Out `[R, top_k]` u32, ascending per row.
    pub expert_id: BufferId,
    /// Out `[R, top_k]` f32.
    pub expert_weight: BufferId,
    pub shared: Option<SharedGate>,
    pub x: BufferId,
    pub norm: WeightId,
    /// Gemm `[experts, hidden]`.
    pub router: WeightId,
    pub live: BufferId,
    /// In/out: route counters.
    pub step: BufferId,
    pub routing: Routing,
    /// Experts that this rank owns (for the counters).
    pub first_expert: usize,
    pub local_experts: usize,
    pub eps: f32,
}
