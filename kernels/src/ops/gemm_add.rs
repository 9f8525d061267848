//! gemm_add: x[r, :] += W · input[r, :] (+ bias): o_proj and dense down, added to the residual in fp32.

use super::Operation;
use crate::contract::GemmKind;
use crate::cpu::{CpuMemory, OpError};
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, DType, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct GemmAdd {
    /// In/out `[R, n]` f32: x = x + (W·input (+ bias)).
    pub x: BufferId,
    /// In `[R, k]` bf16.
    pub input: BufferId,
    pub weight: WeightId,
    pub bias: Option<WeightId>,
}

impl Operation for GemmAdd {
    fn name(&self) -> &'static str {
        "gemm_add"
    }
    fn reads(&self) -> Vec<BufferId> {
        vec![self.x, self.input]
    }
    fn writes(&self) -> Vec<BufferId> {
        vec![self.x]
    }
    fn weights(&self) -> Vec<WeightId> {
        [Some(self.weight), self.bias].into_iter().flatten().collect()
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        let (_, n, k) = check.gemm(self.weight, &[GemmKind::AttnOut, GemmKind::Down])?;
        check.gemm_is(self.weight, &[GemmKind::AttnOut, GemmKind::Down], 1, n, k)?;
        check.rows(self.x, DType::F32, n)?;
        check.rows(self.input, DType::Bf16, k)?;
        if let Some(bias) = self.bias {
            check.vector(bias, n)?;
        }
        check.distinct(&[self.x, self.input])
    }

    fn run(&self, memory: &mut CpuMemory) -> Result<(), OpError> {
        let weights = memory.weights.clone();
        let weight = weights[self.weight.0 as usize].gemm();
        let bias = self.bias.map(|bias| weights[bias.0 as usize].vector());
        let mut scratch = std::mem::take(&mut memory.scratch);
        let mut x = memory.take_f32(self.x);
        let rows = memory.rows_computed();
        let batch = scratch.batch.uniform(1, rows, |_, row| row * weight.k);
        let products = batch.multiply(weight, memory.f32(self.input), &mut scratch.products);
        for (row, x) in x.chunks_exact_mut(weight.n).take(rows).enumerate() {
            match bias {
                None => products.of(0, row).update(x, |_, y, x| x + y),
                Some(bias) => products.of(0, row).update(x, |j, y, x| x + (y + bias[j])),
            }
        }
        memory.put_f32(self.x, x);
        memory.scratch = scratch;
        Ok(())
    }
}
