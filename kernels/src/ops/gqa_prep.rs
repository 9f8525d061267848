//! gqa_prep: per head (qk-norm,) RoPE, rounding, and the append of k and v for grouped-query attention.
//!
//! Rotation is of half pairs (i, i + d/2). With qk-norm the norm output is rounded, and the rotated value again.
//! Cache row = k (kv_heads·d) then v (kv_heads·d). The row's page is `block_table[slot][position / PAGE_TOKENS]`; pad rows write page 0.

use super::Paged;
use crate::spec::{BufferId, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct GqaPrep {
    /// Out `[R, heads, d]` bf16.
    pub q: BufferId,
    /// In/out: width 2·kv_heads·d.
    pub paged: Paged,
    /// In f32 `[R, (heads + 2·kv_heads)·d]`: q, k, v.
    pub qkv: BufferId,
    /// Vectors `[d]` for q and k.
    pub qk_norm: Option<(WeightId, WeightId)>,
    pub rope: WeightId,
    pub slot: BufferId,
    pub position: BufferId,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub eps: f32,
}
