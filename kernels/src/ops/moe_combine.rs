//! moe_combine: x[r, :] = (tree over ranks of gathered[n, r, :] + shared[r, :]) + x[r, :]: the rest of the shard tree, on every rank.

use crate::spec::BufferId;

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
