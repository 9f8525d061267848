//! mla_prep: everything between the projections and attention of multi-head latent attention, in absorbed form
//! (DeepSeek-V2, arXiv 2405.04434, §2.1.2): q_nope rounded, q_lat[h] = q_nope[h] · W_UK[h] rounded; q_rope rotated and rounded;
//! latent = rms_norm(kv_a[..lora]) rounded and appended; k_rope rotated, rounded and appended.
//!
//! Rotation is of interleaved pairs (2i, 2i+1). The row's page is `block_table[slot][position / PAGE_TOKENS]`; pad rows write page 0.
//! Cache row = latent (lora) then k_rope (rope).

use super::rows::{CacheRows, placed};
use super::{Operation, Paged};
use crate::contract::GemmKind;
use crate::cpu::{CpuMemory, OpError};
use crate::math::norm::rms_norm;
use crate::math::rope::rotate_interleaved;
use crate::math::{round_all, rounded};
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

    fn run(&self, memory: &mut CpuMemory) -> Result<(), OpError> {
        let Self { heads, nope_dim, rope_dim, lora, .. } = *self;
        let weights = memory.weights.clone();
        let w_uk = weights[self.w_uk.0 as usize].gemm();
        let kv_norm = weights[self.kv_norm.0 as usize].vector();
        let rope = weights[self.rope.0 as usize].rope();
        let mut scratch = std::mem::take(&mut memory.scratch);
        let mut q_lat = memory.take_f32(self.q_lat);
        let mut q_rope = memory.take_f32(self.q_rope);
        let mut kv = memory.take_f32(self.paged.kv);
        let (rows, precision) = (memory.rows_computed(), memory.precision);
        let placed_all = (|| {
            let cache = CacheRows::of(memory, self.paged, self.slot, self.position);
            let (q, q_stride) = (memory.f32(self.q.buffer), memory.stride(self.q.buffer));
            let (kv_a, kv_stride) = (memory.f32(self.kv_a.buffer), memory.stride(self.kv_a.buffer));
            let q_nope = scratch.inputs(rows * heads * nope_dim);
            for row in 0..rows {
                let (cos_sin, line) = placed(self.name(), &cache, row, rope)?;
                let q = q[row * q_stride + self.q.offset..][..self.q.width].chunks_exact(nope_dim + rope_dim);
                let nopes = q_nope[row * heads * nope_dim..].chunks_exact_mut(nope_dim);
                let ropes = q_rope[row * heads * rope_dim..].chunks_exact_mut(rope_dim);
                for ((q, nope), roped) in q.zip(nopes).zip(ropes) {
                    nope.copy_from_slice(&q[..nope_dim]);
                    round_all(precision, nope);
                    roped.copy_from_slice(&q[nope_dim..]);
                    rotate_interleaved(roped, cos_sin);
                    round_all(precision, roped);
                }
                let kv_a = &kv_a[row * kv_stride + self.kv_a.offset..][..lora + rope_dim];
                let (latent, k_rope) = kv[line * (lora + rope_dim)..][..lora + rope_dim].split_at_mut(lora);
                rms_norm(precision, &kv_a[..lora], kv_norm, self.eps, latent);
                k_rope.copy_from_slice(&kv_a[lora..]);
                rotate_interleaved(k_rope, cos_sin);
                round_all(precision, k_rope);
            }
            Ok(())
        })();
        let batch = scratch.batch.uniform(heads, rows, |head, row| (row * heads + head) * nope_dim);
        let products = batch.multiply(w_uk, &scratch.inputs, &mut scratch.products);
        for (line, q_lat) in q_lat.chunks_exact_mut(lora).take(rows * heads).enumerate() {
            products.of(line % heads, line / heads).update(q_lat, |_, y, _| rounded(precision, y));
        }
        memory.put_f32(self.q_lat, q_lat);
        memory.put_f32(self.q_rope, q_rope);
        memory.put_f32(self.paged.kv, kv);
        memory.scratch = scratch;
        placed_all
    }
}
