//! norm_gate_up: out[r, j] = silu(gate_j) · up_j with [gate | up] = W · rms_norm(x[r, :]), rounded. silu(g) = g / (1 + exp(−g)).

use super::Operation;
use crate::contract::GemmKind;
use crate::cpu::{CpuMemory, OpError};
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, DType, WeightId};

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

impl Operation for NormGateUp {
    fn name(&self) -> &'static str {
        "norm_gate_up"
    }
    fn reads(&self) -> Vec<BufferId> {
        vec![self.x]
    }
    fn writes(&self) -> Vec<BufferId> {
        vec![self.out]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![self.norm, self.weight]
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        let (_, n, hidden) = check.gemm(self.weight, &[GemmKind::GateUp])?;
        check.holds("gate | up rows", n.is_multiple_of(2), "even", n)?;
        check.gemm_is(self.weight, &[GemmKind::GateUp], 1, n, hidden)?;
        check.rows(self.out, DType::Bf16, n / 2)?;
        check.rows(self.x, DType::F32, hidden)?;
        check.vector(self.norm, hidden)?;
        check.distinct(&[self.out, self.x])
    }

    fn run(&self, _memory: &mut CpuMemory) -> Result<(), OpError> {
        Err(OpError::NotBuilt(self.name()))
    }
}
