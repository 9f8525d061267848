//! gqa_attend: out[r, h, :] = Σ softmax(scale · q[r, h]·k[h / (heads/kv_heads)]) · v over keys 0…position of the row's slot.
//!
//! The order of sums and the rounding points are those of `mla_attend`.

use super::Paged;
use crate::spec::BufferId;

#[derive(Clone, Debug, PartialEq)]
pub struct GqaAttend {
    /// Out `[R, heads·d]` bf16.
    pub out: BufferId,
    pub q: BufferId,
    pub paged: Paged,
    pub slot: BufferId,
    pub position: BufferId,
    /// Scratch f32 `[scratch_rows, groups, heads, d + 2]`.
    pub partials: BufferId,
    /// Scratch u32 `[R, heads]`: arrivals, always 0 between ops.
    pub arrivals: BufferId,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub scale: f32,
}
