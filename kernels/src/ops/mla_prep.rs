//! mla_prep: everything between the projections and attention of multi-head latent attention, in absorbed form
//! (DeepSeek-V2, arXiv 2405.04434, §2.1.2): q_nope rounded, q_lat[h] = q_nope[h] · W_UK[h] rounded; q_rope rotated and rounded;
//! latent = rms_norm(kv_a[..lora]) rounded and appended; k_rope rotated, rounded and appended.
//!
//! Rotation is of interleaved pairs (2i, 2i+1). The row's page is `block_table[slot][position / PAGE_TOKENS]`; pad rows write page 0.
//! Cache row = latent (lora) then k_rope (rope).

use super::{Operation, Paged};
use crate::contract::GemmKind;
use crate::cpu::{CpuMemory, OpError};
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, Cols, DType, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct MlaPrep {
    /// Out `[R, heads, lora]` bf16.
    pub q_lat: BufferId,
    /// Out `[R, heads, rope]` bf16.
    pub q_rope: BufferId,
    /// In/out: width lora + rope.
    pub paged: Paged,
    /// In f32, width heads·(nope + rope), per head nope then rope.
    pub q: Cols,
    /// In f32, width lora + rope.
    pub kv_a: Cols,
    /// Vector `[lora]`.
    pub kv_norm: WeightId,
    /// Gemm, `heads` groups of `[lora, nope]`.
    pub w_uk: WeightId,
    pub rope: WeightId,
    pub slot: BufferId,
    pub position: BufferId,
    pub heads: usize,
    pub nope_dim: usize,
    pub rope_dim: usize,
    pub lora: usize,
    pub eps: f32,
}

impl Operation for MlaPrep {
    fn name(&self) -> &'static str {
        "mla_prep"
    }
    fn reads(&self) -> Vec<BufferId> {
        vec![self.paged.kv, self.paged.block_table, self.q.buffer, self.kv_a.buffer, self.slot, self.position]
    }
    fn writes(&self) -> Vec<BufferId> {
        vec![self.q_lat, self.q_rope, self.paged.kv]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![self.kv_norm, self.w_uk, self.rope]
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        check.rows(self.q_lat, DType::Bf16, self.heads * self.lora)?;
        check.rows(self.q_rope, DType::Bf16, self.heads * self.rope_dim)?;
        check.paged(self.paged, self.lora + self.rope_dim, self.slot, self.position)?;
        check.cols(self.q, self.heads * (self.nope_dim + self.rope_dim))?;
        check.cols(self.kv_a, self.lora + self.rope_dim)?;
        check.vector(self.kv_norm, self.lora)?;
        check.gemm_is(self.w_uk, &[GemmKind::KeyUp], self.heads, self.lora, self.nope_dim)?;
        check.holds("rope_dim", self.rope_dim.is_multiple_of(2), "even", self.rope_dim)?;
        check.rope(self.rope, self.rope_dim / 2)?;
        for input in [self.q.buffer, self.kv_a.buffer] {
            check.distinct(&[self.q_lat, self.q_rope, self.paged.kv, input])?;
        }
        Ok(())
    }

    fn run(&self, _memory: &mut CpuMemory) -> Result<(), OpError> {
        Err(OpError::NotBuilt(self.name()))
    }
}
