//! head: logits[l, :] = W_head · rms_norm(x[logit_row[l], :]), fp32, only for rows that need logits.

use super::Operation;
use crate::contract::GemmKind;
use crate::cpu::{CpuMemory, OpError};
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, DType, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct Head {
    /// Out `[L, vocab]` f32.
    pub logits: BufferId,
    pub x: BufferId,
    pub logit_row: BufferId,
    pub norm: WeightId,
    /// Gemm `[vocab, hidden]`.
    pub weight: WeightId,
    pub eps: f32,
}

impl Operation for Head {
    fn name(&self) -> &'static str {
        "head"
    }
    fn reads(&self) -> Vec<BufferId> {
        vec![self.x, self.logit_row]
    }
    fn writes(&self) -> Vec<BufferId> {
        vec![self.logits]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![self.norm, self.weight]
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        let (_, vocab, hidden) = check.gemm(self.weight, &[GemmKind::Head])?;
        check.gemm_is(self.weight, &[GemmKind::Head], 1, vocab, hidden)?;
        check.logit_rows(self.logits, DType::F32, vocab)?;
        check.rows(self.x, DType::F32, hidden)?;
        check.logit_rows(self.logit_row, DType::U32, 1)?;
        check.vector(self.norm, hidden)?;
        check.distinct(&[self.logits, self.x])
    }

    fn run(&self, _memory: &mut CpuMemory) -> Result<(), OpError> {
        Err(OpError::NotBuilt(self.name()))
    }
}
