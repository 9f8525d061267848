//! mla_uv: out[r, h·v…] = W_UV[h] · o_lat[r, h, :], rounded.

use crate::spec::{BufferId, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct MlaUv {
    /// Out `[R, heads·v]` bf16.
    pub out: BufferId,
    /// In `[R, heads, lora]` bf16.
    pub o_lat: BufferId,
    /// Gemm, `heads` groups of `[v, lora]`.
    pub w_uv: WeightId,
}
