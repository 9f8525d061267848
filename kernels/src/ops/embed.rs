//! embed: x[r, :] = table[token[r], :] as f32.

use super::Operation;
use crate::cpu::{CpuMemory, OpError};
use crate::math::bf16;
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, DType, WeightForm, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct Embed {
    /// Out `[R, hidden]` f32: the residual stream.
    pub x: BufferId,
    /// `[R]` u32.
    pub token: BufferId,
    /// Table `[vocab, hidden]`.
    pub table: WeightId,
}

impl Operation for Embed {
    fn name(&self) -> &'static str {
        "embed"
    }
    fn reads(&self) -> Vec<BufferId> {
        vec![self.token]
    }
    fn writes(&self) -> Vec<BufferId> {
        vec![self.x]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![self.table]
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        let spec = check.specs.weight(self.table);
        let WeightForm::Table { cols, .. } = spec.form else {
            return Err(check.error(&spec.name, "a table", format!("{:?}", spec.form)));
        };
        check.rows(self.x, DType::F32, cols)?;
        check.rows(self.token, DType::U32, 1)
    }

    fn run(&self, memory: &mut CpuMemory) -> Result<(), OpError> {
        let weights = memory.weights.clone();
        let (cols, table) = weights[self.table.0 as usize].table();
        let mut x = memory.take_f32(self.x);
        let tokens = memory.u32(self.token)[..memory.rows_computed()].iter();
        for (x, &token) in x.chunks_exact_mut(cols).zip(tokens) {
            for (x, &bits) in x.iter_mut().zip(&table[token as usize * cols..][..cols]) {
                *x = bf16::to_f32(bits);
            }
        }
        memory.put_f32(self.x, x);
        Ok(())
    }
}
