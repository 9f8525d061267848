//! norm_gate_up: out[r, j] = silu(gate_j) · up_j with [gate | up] = W · rms_norm(x[r, :]), rounded. silu(g) = g / (1 + exp(−g)).

use crate::spec::{BufferId, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct NormGateUp {
    /// Out `[R, inner]` bf16.
    pub out: BufferId,
    /// In `[R, hidden]` f32.
    pub x: BufferId,
    pub norm: WeightId,
    /// Gemm `[2·inner, hidden]`: gate rows, then up rows.
    pub weight: WeightId,
    pub eps: f32,
}
