//! mla_uv: out[r, h·v…] = W_UV[h] · o_lat[r, h, :], rounded.

use super::Operation;
use crate::contract::GemmKind;
use crate::cpu::{CpuMemory, OpError};
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, DType, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct MlaUv {
    /// Out `[R, heads·v]` bf16.
    pub out: BufferId,
    /// In `[R, heads, lora]` bf16.
    pub o_lat: BufferId,
    /// Gemm, `heads` groups of `[v, lora]`.
    pub w_uv: WeightId,
}

impl Operation for MlaUv {
    fn name(&self) -> &'static str {
        "mla_uv"
    }
    fn reads(&self) -> Vec<BufferId> {
        vec![self.o_lat]
    }
    fn writes(&self) -> Vec<BufferId> {
        vec![self.out]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![self.w_uv]
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        let (heads, v, lora) = check.gemm(self.w_uv, &[GemmKind::ValueUp])?;
        check.rows(self.out, DType::Bf16, heads * v)?;
        check.rows(self.o_lat, DType::Bf16, heads * lora)?;
        check.distinct(&[self.out, self.o_lat])
    }

    fn run(&self, _memory: &mut CpuMemory) -> Result<(), OpError> {
        Err(OpError::NotBuilt(self.name()))
    }
}
