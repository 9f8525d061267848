//! moe_combine: x[r, :] = (tree over ranks of gathered[n, r, :] + shared[r, :]) + x[r, :]: the rest of the shard tree, on every rank.

use super::Operation;
use crate::cpu::{CpuMemory, OpError};
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, DType, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct MoeCombine {
    /// In/out `[R, hidden]` f32.
    pub x: BufferId,
    /// In `[ranks, R, hidden]` f32.
    pub gathered: BufferId,
    /// In `[R, hidden]` f32.
    pub shared: BufferId,
    pub ranks: usize,
}

impl Operation for MoeCombine {
    fn name(&self) -> &'static str {
        "moe_combine"
    }
    fn reads(&self) -> Vec<BufferId> {
        vec![self.x, self.gathered, self.shared]
    }
    fn writes(&self) -> Vec<BufferId> {
        vec![self.x]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![]
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        check.holds("ranks", matches!(self.ranks, 1 | 2 | 4 | 8), "1, 2, 4 or 8", self.ranks)?;
        let (_, hidden) = check.any(self.x, DType::F32, 2)?;
        check.rows(self.x, DType::F32, hidden)?;
        check.rows(self.shared, DType::F32, hidden)?;
        check.lines(self.gathered, DType::F32, self.ranks, check.specs.rows() * hidden)?;
        check.distinct(&[self.x, self.gathered, self.shared])
    }

    fn run(&self, _memory: &mut CpuMemory) -> Result<(), OpError> {
        Err(OpError::NotBuilt(self.name()))
    }
}
