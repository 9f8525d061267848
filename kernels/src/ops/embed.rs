//! embed: x[r, :] = table[token[r], :] as f32.

use crate::spec::{BufferId, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct Embed {
    /// Out `[R, hidden]` f32: the residual stream.
    pub x: BufferId,
    /// `[R]` u32.
    pub token: BufferId,
    /// Table `[vocab, hidden]`.
    pub table: WeightId,
}
