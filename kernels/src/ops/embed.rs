//! embed: x[r, :] = table[token[r], :] as f32.

use super::Operation;
use crate::cpu::{CpuMemory, OpError};
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

    fn run(&self, _memory: &mut CpuMemory) -> Result<(), OpError> {
        Err(OpError::NotBuilt(self.name()))
    }
}
