//! gqa_prep: per head (qk-norm,) RoPE, rounding, and the append of k and v for grouped-query attention.
//!
//! Rotation is of half pairs (i, i + d/2). With qk-norm the norm output is rounded, and the rotated value again.
//! Cache row = k (kv_heads·d) then v (kv_heads·d). The row's page is `block_table[slot][position / PAGE_TOKENS]`; pad rows write page 0.

use super::rows::{CacheRows, placed};
use super::{Operation, Paged};
use crate::cpu::{CpuMemory, OpError};
use crate::math::norm::rms_norm;
use crate::math::rope::rotate_halves;
use crate::math::round_all;
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

    fn run(&self, memory: &mut CpuMemory) -> Result<(), OpError> {
        let Self { heads, kv_heads, head_dim, .. } = *self;
        let weights = memory.weights.clone();
        let rope = weights[self.rope.0 as usize].rope();
        let vector = |id: WeightId| weights[id.0 as usize].vector();
        let (q_norm, k_norm) = self.qk_norm.map(|(q, k)| (vector(q), vector(k))).unzip();
        let mut q = memory.take_f32(self.q);
        let mut kv = memory.take_f32(self.paged.kv);
        let (rows, precision) = (memory.rows_computed(), memory.precision);
        let placed_all = (|| {
            let cache = CacheRows::of(memory, self.paged, self.slot, self.position);
            let qkv = memory.f32(self.qkv).chunks_exact((heads + 2 * kv_heads) * head_dim);
            for ((row, qkv), q) in qkv.take(rows).enumerate().zip(q.chunks_exact_mut(heads * head_dim)) {
                let (cos_sin, line) = placed(self.name(), &cache, row, rope)?;
                let width = 2 * kv_heads * head_dim;
                let (k, v) = kv[line * width..][..width].split_at_mut(kv_heads * head_dim);
                let (q_in, kv_in) = qkv.split_at(heads * head_dim);
                let (k_in, v_in) = kv_in.split_at(kv_heads * head_dim);
                for (norm, input, out) in [(q_norm, q_in, q), (k_norm, k_in, k)] {
                    for (input, out) in input.chunks_exact(head_dim).zip(out.chunks_exact_mut(head_dim)) {
                        match norm {
                            Some(norm) => rms_norm(precision, input, norm, self.eps, out),
                            None => out.copy_from_slice(input),
                        }
                        rotate_halves(out, cos_sin);
                        round_all(precision, out);
                    }
                }
                v.copy_from_slice(v_in);
                round_all(precision, v);
            }
            Ok(())
        })();
        memory.put_f32(self.q, q);
        memory.put_f32(self.paged.kv, kv);
        placed_all
    }
}
