//! mla_uv: out[r, h·v…] = W_UV[h] · o_lat[r, h, :], rounded.

use super::Operation;
use crate::contract::GemmKind;
use crate::cpu::{CpuMemory, OpError};
use crate::math::rounded;
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, DType, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct MlaUv {
    /// Out `[R, heads·v]` bf16.
    pub out: BufferId,
    /// In `[R, heads, lora]` bf16.
    pub o_lat: BufferId,
    /// Gemm, `heads` groups of `[v, lora]`.
    pub w_uv: WeightId,
}

impl Operation for MlaUv {
    fn name(&self) -> &'static str {
        "mla_uv"
    }
    fn reads(&self) -> Vec<BufferId> {
        vec![self.o_lat]
    }
    fn writes(&self) -> Vec<BufferId> {
        vec![self.out]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![self.w_uv]
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        let (heads, v, lora) = check.gemm(self.w_uv, &[GemmKind::ValueUp])?;
        check.rows(self.out, DType::Bf16, heads * v)?;
        check.rows(self.o_lat, DType::Bf16, heads * lora)?;
        check.distinct(&[self.out, self.o_lat])
    }

    fn run(&self, memory: &mut CpuMemory) -> Result<(), OpError> {
        let weights = memory.weights.clone();
        let w_uv = weights[self.w_uv.0 as usize].gemm();
        let (heads, v, lora) = (w_uv.groups, w_uv.n, w_uv.k);
        let mut scratch = std::mem::take(&mut memory.scratch);
        let mut out = memory.take_f32(self.out);
        let (rows, precision) = (memory.rows_computed(), memory.precision);
        let batch = scratch.batch.uniform(heads, rows, |head, row| (row * heads + head) * lora);
        let products = batch.multiply(w_uv, memory.f32(self.o_lat), &mut scratch.products);
        for (line, out) in out.chunks_exact_mut(v).take(rows * heads).enumerate() {
            products.of(line % heads, line / heads).update(out, |_, y, _| rounded(precision, y));
        }
        memory.put_f32(self.out, out);
        memory.scratch = scratch;
        Ok(())
    }
}
