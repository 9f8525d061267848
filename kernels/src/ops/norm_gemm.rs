//! norm_gemm: out[r, :] = W · rms_norm(x[r, cols]) (+ bias): residual norm into the attention projections, q_a norm into q_b.
//!
//! rms_norm: y = x · (1 / sqrt(mean(x²) + eps)) · weight, fp32, one rounding to bf16 (Zhang & Sennrich 2019).

use crate::spec::{BufferId, Cols, WeightId};

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
