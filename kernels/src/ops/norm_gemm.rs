//! norm_gemm: out[r, :] = W · rms_norm(x[r, cols]) (+ bias): residual norm into the attention projections, q_a norm into q_b.
//!
//! rms_norm: y = x · (1 / sqrt(mean(x²) + eps)) · weight, fp32, one rounding to bf16 (Zhang & Sennrich 2019).

use super::Operation;
use super::rows::norm_rows;
use crate::contract::GemmKind;
use crate::cpu::{CpuMemory, OpError};
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, Cols, DType, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct NormGemm {
    /// Out `[R, n]` f32.
    pub out: BufferId,
    /// In f32 columns, width k.
    pub x: Cols,
    /// Vector `[k]`.
    pub norm: WeightId,
    /// Gemm `[n, k]`, one group.
    pub weight: WeightId,
    /// Vector `[n]`.
    pub bias: Option<WeightId>,
    pub eps: f32,
}

impl Operation for NormGemm {
    fn name(&self) -> &'static str {
        "norm_gemm"
    }
    fn reads(&self) -> Vec<BufferId> {
        vec![self.x.buffer]
    }
    fn writes(&self) -> Vec<BufferId> {
        vec![self.out]
    }
    fn weights(&self) -> Vec<WeightId> {
        [Some(self.norm), Some(self.weight), self.bias].into_iter().flatten().collect()
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        let (_, n, k) = check.gemm(self.weight, &[GemmKind::AttnIn, GemmKind::QueryB])?;
        check.gemm_is(self.weight, &[GemmKind::AttnIn, GemmKind::QueryB], 1, n, k)?;
        check.rows(self.out, DType::F32, n)?;
        check.cols(self.x, k)?;
        check.vector(self.norm, k)?;
        if let Some(bias) = self.bias {
            check.vector(bias, n)?;
        }
        check.distinct(&[self.out, self.x.buffer])
    }

    fn run(&self, memory: &mut CpuMemory) -> Result<(), OpError> {
        let weights = memory.weights.clone();
        let weight = weights[self.weight.0 as usize].gemm();
        let norm = weights[self.norm.0 as usize].vector();
        let bias = self.bias.map(|bias| weights[bias.0 as usize].vector());
        let mut scratch = std::mem::take(&mut memory.scratch);
        let mut out = memory.take_f32(self.out);
        let rows = memory.rows_computed();
        let inputs = scratch.inputs(rows * weight.k);
        norm_rows(memory, self.x, norm, self.eps, 0..rows, inputs);
        let batch = scratch.batch.uniform(1, rows, |_, row| row * weight.k);
        let products = batch.multiply(weight, &scratch.inputs, &mut scratch.products);
        for (row, out) in out.chunks_exact_mut(weight.n).take(rows).enumerate() {
            match bias {
                None => products.of(0, row).update(out, |_, y, _| y),
                Some(bias) => products.of(0, row).update(out, |j, y, _| y + bias[j]),
            }
        }
        memory.put_f32(self.out, out);
        memory.scratch = scratch;
        Ok(())
    }
}
