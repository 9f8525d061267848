//! head: logits[l, :] = W_head · rms_norm(x[logit_row[l], :]), fp32, only for rows that need logits.

use super::Operation;
use super::rows::norm_rows;
use crate::contract::GemmKind;
use crate::cpu::{CpuMemory, OpError};
use crate::math::by_row;
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, Cols, DType, WeightId};

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

    fn run(&self, memory: &mut CpuMemory) -> Result<(), OpError> {
        let weights = memory.weights.clone();
        let weight = weights[self.weight.0 as usize].gemm();
        let norm = weights[self.norm.0 as usize].vector();
        let mut scratch = std::mem::take(&mut memory.scratch);
        let mut logits = memory.take_f32(self.logits);
        let rows = memory.logit_rows_computed();
        let x = Cols { buffer: self.x, offset: 0, width: weight.k };
        let named = memory.u32(self.logit_row)[..rows].iter().map(|&row| row as usize);
        norm_rows(memory, x, norm, self.eps, named, scratch.inputs(rows * weight.k));
        let batch = scratch.batch.uniform(1, rows, |_, row| row * weight.k);
        let products = batch.multiply(weight, &scratch.inputs, &mut scratch.products);
        by_row(&mut logits[..rows * weight.n], weight.n, weight.n, &|row, logits| {
            products.of(0, row).update(logits, |_, y, _| y);
        });
        memory.put_f32(self.logits, logits);
        memory.scratch = scratch;
        Ok(())
    }
}
