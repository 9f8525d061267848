//! moe_combine: x[r, :] = (tree over ranks of gathered[n, r, :] + shared[r, :]) + x[r, :]: the rest of the shard tree, on every rank.

use super::Operation;
use crate::contract::{EXPERT_SHARDS, tree};
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

    fn run(&self, memory: &mut CpuMemory) -> Result<(), OpError> {
        let hidden = memory.stride(self.x);
        let mut x = memory.take_f32(self.x);
        let (gathered, shared) = (memory.f32(self.gathered), memory.f32(self.shared));
        let of_rank = memory.plan_rows * hidden;
        for (at, x) in x[..memory.rows_computed() * hidden].iter_mut().enumerate() {
            let mut partials = [0.0; EXPERT_SHARDS];
            for (rank, partial) in partials[..self.ranks].iter_mut().enumerate() {
                *partial = gathered[rank * of_rank + at];
            }
            *x += tree(&partials[..self.ranks]) + shared[at];
        }
        memory.put_f32(self.x, x);
        Ok(())
    }
}
