//! mla_attend: o_lat[r, h, :] = Σ softmax(scale · (q_lat·latent + q_rope·k_rope)) · latent over keys 0…position of the row's slot.
//!
//! Contract §4: groups of ATTENTION_GROUP keys from position 0; inside a group online softmax over ATTENTION_TILE keys starting fresh,
//! p rounded against the group's running maximum, the normaliser summing the unrounded p; groups by a left fold; O divided by the
//! normaliser, then rounded. Pad rows attend to key 0 of page 0.

use super::rows::{Attention, CacheRows};
use super::{Operation, Paged};
use crate::cpu::{CpuMemory, OpError};
use crate::math::attend::Columns;
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, DType, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct MlaAttend {
    /// Out `[R, heads, lora]` bf16.
    pub o_lat: BufferId,
    pub q_lat: BufferId,
    pub q_rope: BufferId,
    pub paged: Paged,
    pub slot: BufferId,
    pub position: BufferId,
    /// Scratch f32 `[scratch_rows, groups, heads, lora + PARTIAL_NORMS]` for group partials (a GPU's small batches only), always 0 between ops.
    pub partials: BufferId,
    pub heads: usize,
    pub rope_dim: usize,
    pub lora: usize,
    /// Softmax scale, YaRN's mscale² included.
    pub scale: f32,
}

impl Operation for MlaAttend {
    fn name(&self) -> &'static str {
        "mla_attend"
    }
    fn reads(&self) -> Vec<BufferId> {
        vec![self.q_lat, self.q_rope, self.paged.kv, self.paged.block_table, self.slot, self.position, self.partials]
    }
    fn writes(&self) -> Vec<BufferId> {
        vec![self.o_lat, self.partials]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![]
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        check.rows(self.o_lat, DType::Bf16, self.heads * self.lora)?;
        check.rows(self.q_lat, DType::Bf16, self.heads * self.lora)?;
        check.rows(self.q_rope, DType::Bf16, self.heads * self.rope_dim)?;
        check.paged(self.paged, self.lora + self.rope_dim, self.slot, self.position)?;
        check.any(self.partials, DType::F32, 1)?;
        check.distinct(&[self.o_lat, self.q_lat, self.q_rope, self.paged.kv, self.partials])
    }

    fn run(&self, memory: &mut CpuMemory) -> Result<(), OpError> {
        let Self { heads, rope_dim, lora, .. } = *self;
        let mut o_lat = memory.take_f32(self.o_lat);
        let rows = memory.rows_computed();
        let attention = Attention {
            op: self.name(),
            precision: memory.precision,
            scale: self.scale,
            heads,
            sharing: heads,
            kv: memory.f32(self.paged.kv),
            width: lora + rope_dim,
            rows: CacheRows::of(memory, self.paged, self.slot, self.position),
        };
        let (q_lat, q_rope) = (memory.f32(self.q_lat), memory.f32(self.q_rope));
        let query = |row: usize, head: usize| {
            let at = row * heads + head;
            [&q_lat[at * lora..][..lora], &q_rope[at * rope_dim..][..rope_dim]]
        };
        let columns = |_| Columns { keys: 0..lora + rope_dim, values: 0..lora };
        let done = attention.run(columns, query, rows, &mut o_lat[..rows * heads * lora]);
        memory.put_f32(self.o_lat, o_lat);
        done
    }
}
