//! gemm_add: x[r, :] += W · input[r, :] (+ bias): o_proj and dense down, added to the residual in fp32.

use crate::spec::{BufferId, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct GemmAdd {
    /// In/out `[R, n]` f32: x = x + (W·input (+ bias)).
    pub x: BufferId,
    /// In `[R, k]` bf16.
    pub input: BufferId,
    pub weight: WeightId,
    pub bias: Option<WeightId>,
}
