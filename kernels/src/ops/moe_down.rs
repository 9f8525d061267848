//! moe_down: routed down, shared down, and the sums of contract §3.
//!
//! y_e = W_down[e] · act; p_v = Σ over the row's experts of shard v in ascending id, p = p + w_e·y_e from +0.0; the balanced tree over this
//! rank's shards gives the rank's partial. At one rank: x = (tree + shared) + x in that order.

use super::Operation;
use crate::contract::GemmKind;
use crate::cpu::{CpuMemory, OpError};
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, DType, WeightId};

/// Where the sums go.
#[derive(Clone, Debug, PartialEq)]
pub enum MoeSum {
    /// One rank: add to the residual `[R, hidden]` f32.
    Residual { x: BufferId },
    /// Several ranks: the tree over this rank's shards and the shared experts' output, both `[R, hidden]` f32.
    Partial { partial: BufferId, shared: BufferId },
}

#[derive(Clone, Debug, PartialEq)]
pub struct MoeDown {
    pub sum: MoeSum,
    /// In `[R, top_k, inner]` bf16.
    pub act: BufferId,
    pub expert_id: BufferId,
    pub expert_weight: BufferId,
    /// Gemm, `local_experts` groups of `[hidden, inner]`.
    pub weight: WeightId,
    /// In `[R, shared_inner]` bf16 and Gemm `[hidden, shared_inner]`. Without shared experts their output is +0.0.
    pub shared: Option<(BufferId, WeightId)>,
    pub experts: usize,
    pub first_expert: usize,
    pub local_experts: usize,
    pub top_k: usize,
}

impl Operation for MoeDown {
    fn name(&self) -> &'static str {
        "moe_down"
    }
    fn reads(&self) -> Vec<BufferId> {
        let sums = match self.sum {
            MoeSum::Residual { x } => Some(x),
            MoeSum::Partial { .. } => None,
        };
        let shared = self.shared.map(|(act, _)| act);
        [self.act, self.expert_id, self.expert_weight].into_iter().chain(sums).chain(shared).collect()
    }
    fn writes(&self) -> Vec<BufferId> {
        match self.sum {
            MoeSum::Residual { x } => vec![x],
            MoeSum::Partial { partial, shared } => vec![partial, shared],
        }
    }
    fn weights(&self) -> Vec<WeightId> {
        [Some(self.weight), self.shared.map(|(_, weight)| weight)].into_iter().flatten().collect()
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        let (_, hidden, inner) = check.gemm(self.weight, &[GemmKind::ExpertDown])?;
        check.gemm_is(self.weight, &[GemmKind::ExpertDown], self.local_experts, hidden, inner)?;
        check.owned(self.experts, self.first_expert, self.local_experts)?;
        check.rows(self.act, DType::Bf16, self.top_k * inner)?;
        check.rows(self.expert_id, DType::U32, self.top_k)?;
        check.rows(self.expert_weight, DType::F32, self.top_k)?;
        if let Some((act, weight)) = self.shared {
            let (_, _, shared_inner) = check.gemm(weight, &[GemmKind::SharedDown])?;
            check.gemm_is(weight, &[GemmKind::SharedDown], 1, hidden, shared_inner)?;
            check.rows(act, DType::Bf16, shared_inner)?;
        }
        match self.sum {
            MoeSum::Residual { x } => {
                check.holds("local_experts", self.local_experts == self.experts, "all experts", self.local_experts)?;
                check.rows(x, DType::F32, hidden)
            }
            MoeSum::Partial { partial, shared } => {
                check.rows(partial, DType::F32, hidden)?;
                check.rows(shared, DType::F32, hidden)?;
                check.distinct(&[partial, shared])
            }
        }
    }

    fn run(&self, _memory: &mut CpuMemory) -> Result<(), OpError> {
        Err(OpError::NotBuilt(self.name()))
    }
}
