//! norm_gate_up: out[r, j] = silu(gate_j) · up_j with [gate | up] = W · rms_norm(x[r, :]), rounded. silu(g) = g / (1 + exp(−g)).

use super::Operation;
use super::rows::{gate_rows, norm_rows};
use crate::contract::GemmKind;
use crate::cpu::{CpuMemory, OpError};
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, Cols, DType, WeightId};

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

    fn run(&self, memory: &mut CpuMemory) -> Result<(), OpError> {
        let weights = memory.weights.clone();
        let weight = weights[self.weight.0 as usize].gemm();
        let norm = weights[self.norm.0 as usize].vector();
        let mut scratch = std::mem::take(&mut memory.scratch);
        let mut out = memory.take_f32(self.out);
        let (rows, precision) = (memory.rows_computed(), memory.precision);
        let x = Cols { buffer: self.x, offset: 0, width: weight.k };
        norm_rows(memory, x, norm, self.eps, 0..rows, scratch.inputs(rows * weight.k));
        let batch = scratch.batch.uniform(1, rows, |_, row| row * weight.k);
        let products = batch.multiply(weight, &scratch.inputs, &mut scratch.products);
        gate_rows(precision, weight.n / 2, &mut out, rows, |row| Some(products.of(0, row)));
        memory.put_f32(self.out, out);
        memory.scratch = scratch;
        Ok(())
    }
}
