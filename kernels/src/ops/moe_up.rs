//! moe_up: act[r, i, :] = silu(gate)·up of the row's i-th expert, rounded, for the experts that this rank owns.

use super::Operation;
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

    fn run(&self, _memory: &mut CpuMemory) -> Result<(), OpError> {
        Err(OpError::NotBuilt(self.name()))
    }
}
