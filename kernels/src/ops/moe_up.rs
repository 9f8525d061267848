//! moe_up: act[r, i, :] = silu(gate)·up of the row's i-th expert, rounded, for the experts that this rank owns.

use super::Operation;
use super::rows::{gate_rows, local_expert};
use crate::contract::GemmKind;
use crate::cpu::{CpuMemory, OpError};
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, DType, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct MoeUp {
    /// Out `[R, top_k, inner]` bf16; entries of other ranks' experts are not written.
    pub act: BufferId,
    pub h: BufferId,
    pub expert_id: BufferId,
    /// Gemm, `local_experts` groups of `[2·inner, hidden]`: gate rows, then up rows.
    pub weight: WeightId,
    pub first_expert: usize,
    pub local_experts: usize,
    pub top_k: usize,
    /// The op that chose runs another launch after the choice (the shared experts' first half), so the choice may be read early.
    pub early_choice: bool,
}

impl Operation for MoeUp {
    fn name(&self) -> &'static str {
        "moe_up"
    }
    fn reads(&self) -> Vec<BufferId> {
        vec![self.h, self.expert_id]
    }
    fn writes(&self) -> Vec<BufferId> {
        vec![self.act]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![self.weight]
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        let (_, n, hidden) = check.gemm(self.weight, &[GemmKind::ExpertGateUp])?;
        check.holds("gate | up rows", n.is_multiple_of(2), "even", n)?;
        check.gemm_is(self.weight, &[GemmKind::ExpertGateUp], self.local_experts, n, hidden)?;
        check.rows(self.act, DType::Bf16, self.top_k * (n / 2))?;
        check.rows(self.h, DType::Bf16, hidden)?;
        check.rows(self.expert_id, DType::U32, self.top_k)?;
        check.distinct(&[self.act, self.h])
    }

    fn run(&self, memory: &mut CpuMemory) -> Result<(), OpError> {
        let weights = memory.weights.clone();
        let weight = weights[self.weight.0 as usize].gemm();
        let (hidden, inner) = (weight.k, weight.n / 2);
        let mut scratch = std::mem::take(&mut memory.scratch);
        let mut act = memory.take_f32(self.act);
        let precision = memory.precision;
        let lines = memory.rows_computed() * self.top_k;
        let ids = memory.u32(self.expert_id);
        let batch = scratch.batch.grouped(
            self.local_experts,
            lines,
            |line| local_expert(ids[line], self.first_expert, self.local_experts),
            |line| line / self.top_k * hidden,
        );
        let products = batch.multiply(weight, memory.f32(self.h), &mut scratch.products);
        gate_rows(precision, inner, &mut act, lines, |line| products.of_line(line));
        memory.put_f32(self.act, act);
        memory.scratch = scratch;
        Ok(())
    }
}
