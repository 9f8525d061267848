//! norm_gemm: out[r, :] = W · rms_norm(x[r, cols]) (+ bias): residual norm into the attention projections, q_a norm into q_b.
//!
//! rms_norm: y = x · (1 / sqrt(mean(x²) + eps)) · weight, fp32, one rounding to bf16 (Zhang & Sennrich 2019).

use super::Operation;
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

    fn run(&self, _memory: &mut CpuMemory) -> Result<(), OpError> {
        Err(OpError::NotBuilt(self.name()))
    }
}
