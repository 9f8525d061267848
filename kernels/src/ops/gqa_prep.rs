//! gqa_prep: per head (qk-norm,) RoPE, rounding, and the append of k and v for grouped-query attention.
//!
//! Rotation is of half pairs (i, i + d/2). With qk-norm the norm output is rounded, and the rotated value again.
//! Cache row = k (kv_heads·d) then v (kv_heads·d). The row's page is `block_table[slot][position / PAGE_TOKENS]`; pad rows write page 0.

use super::{Operation, Paged};
use crate::cpu::{CpuMemory, OpError};
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, DType, WeightId};

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

impl Operation for GqaPrep {
    fn name(&self) -> &'static str {
        "gqa_prep"
    }
    fn reads(&self) -> Vec<BufferId> {
        vec![self.paged.kv, self.paged.block_table, self.qkv, self.slot, self.position]
    }
    fn writes(&self) -> Vec<BufferId> {
        vec![self.q, self.paged.kv]
    }
    fn weights(&self) -> Vec<WeightId> {
        let norms = self.qk_norm.iter().flat_map(|&(q, k)| [q, k]);
        norms.chain([self.rope]).collect()
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        check.rows(self.q, DType::Bf16, self.heads * self.head_dim)?;
        check.rows(self.qkv, DType::F32, (self.heads + 2 * self.kv_heads) * self.head_dim)?;
        check.paged(self.paged, 2 * self.kv_heads * self.head_dim, self.slot, self.position)?;
        if let Some((q, k)) = self.qk_norm {
            check.vector(q, self.head_dim)?;
            check.vector(k, self.head_dim)?;
        }
        check.holds("head_dim", self.head_dim.is_multiple_of(2), "even", self.head_dim)?;
        check.rope(self.rope, self.head_dim / 2)?;
        check.distinct(&[self.q, self.paged.kv, self.qkv])
    }

    fn run(&self, _memory: &mut CpuMemory) -> Result<(), OpError> {
        Err(OpError::NotBuilt(self.name()))
    }
}
