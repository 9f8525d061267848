//! gqa_attend: out[r, h, :] = Σ softmax(scale · q[r, h]·k[h / (heads/kv_heads)]) · v over keys 0…position of the row's slot.
//!
//! The order of sums and the rounding points are those of `mla_attend`.

use super::rows::{Attention, CacheRows};
use super::{Operation, Paged};
use crate::cpu::{CpuMemory, OpError};
use crate::math::attend::Columns;
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, DType, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct GqaAttend {
    /// Out `[R, heads·d]` bf16.
    pub out: BufferId,
    pub q: BufferId,
    pub paged: Paged,
    pub slot: BufferId,
    pub position: BufferId,
    /// Scratch f32 `[scratch_rows, groups, heads, d + PARTIAL_NORMS]` for group partials (a GPU's small batches only), always 0 between ops.
    pub partials: BufferId,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub scale: f32,
}

impl Operation for GqaAttend {
    fn name(&self) -> &'static str {
        "gqa_attend"
    }
    fn reads(&self) -> Vec<BufferId> {
        vec![self.q, self.paged.kv, self.paged.block_table, self.slot, self.position, self.partials]
    }
    fn writes(&self) -> Vec<BufferId> {
        vec![self.out, self.partials]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![]
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        let shared = self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads);
        check.holds("heads", shared, "a multiple of kv_heads", self.heads)?;
        check.rows(self.out, DType::Bf16, self.heads * self.head_dim)?;
        check.rows(self.q, DType::Bf16, self.heads * self.head_dim)?;
        check.paged(self.paged, 2 * self.kv_heads * self.head_dim, self.slot, self.position)?;
        check.any(self.partials, DType::F32, 1)?;
        check.distinct(&[self.out, self.q, self.paged.kv, self.partials])
    }

    fn run(&self, memory: &mut CpuMemory) -> Result<(), OpError> {
        let Self { heads, kv_heads, head_dim, .. } = *self;
        let mut out = memory.take_f32(self.out);
        let rows = memory.rows_computed();
        let sharing = heads / kv_heads;
        let attention = Attention {
            op: self.name(),
            precision: memory.precision,
            scale: self.scale,
            heads,
            sharing,
            kv: memory.f32(self.paged.kv),
            width: 2 * kv_heads * head_dim,
            rows: CacheRows::of(memory, self.paged, self.slot, self.position),
        };
        let q = memory.f32(self.q);
        let query = |row: usize, head: usize| [&q[(row * heads + head) * head_dim..][..head_dim], &[]];
        let columns = |head: usize| {
            let (k, v) = (head / sharing * head_dim, (kv_heads + head / sharing) * head_dim);
            Columns { keys: k..k + head_dim, values: v..v + head_dim }
        };
        let done = attention.run(columns, query, rows, &mut out[..rows * heads * head_dim]);
        memory.put_f32(self.out, out);
        done
    }
}
