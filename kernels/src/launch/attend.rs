//! Geometry of attention: a block takes one row, the heads that share their keys, and a run of key groups. No choice here changes a bit.
//!
//! Few rows split their groups over blocks until the GPU is full; many rows take a block each and fold as they go.

use super::gemm::define_bits;
use super::{Arg, GpuFacts, Kernel, Launch, LaunchError, define};
use crate::Specs;
use crate::contract::{ATTENTION_GROUP, PAGE_TOKENS};
use crate::ops::{GqaAttend, MlaAttend, Paged};
use crate::spec::BufferId;

/// Query heads that one block can take: the rows of an mma.
const HEADS_MAX: usize = 16;

/// What `attend.cuh` is compiled for.
struct Shape {
    op: &'static str,
    /// Heads of one block, and of all.
    heads: usize,
    head_blocks: usize,
    key_width: usize,
    value_width: usize,
    value_at: usize,
    shared_width: usize,
    cache_width: usize,
    warps: usize,
    stages_max: usize,
    blocks_per_sm: usize,
    scale: f32,
}

/// The buffers of an attention op.
struct Buffers {
    queries: Vec<BufferId>,
    out: BufferId,
    paged: Paged,
    slot: BufferId,
    position: BufferId,
    partials: BufferId,
    arrivals: BufferId,
}

impl Shape {
    /// Bytes of shared memory with `stages` tiles in flight (`attend.cuh`, SHARED_BYTES).
    fn shared_bytes(&self, stages: usize) -> usize {
        let kv = stages * PAGE_TOKENS * (self.shared_width + 8) * 2 + 64;
        let q = (HEADS_MAX * (self.key_width + 8) * 2).next_multiple_of(16);
        kv + q + HEADS_MAX * (68 * 4 + 72 * 2 + 3 * 4)
    }

    fn launch(
        &self,
        specs: &dyn Specs,
        gpu: &GpuFacts,
        buffers: Buffers,
        own: Vec<(&'static str, String)>,
    ) -> Result<Launch, LaunchError> {
        let op = self.op;
        let shape = |what, got, need: &str| Err(LaunchError::Shape { op, what, got, need: need.into() });
        if !self.key_width.is_multiple_of(16) {
            return shape("the width of a key", self.key_width, "a multiple of 16");
        }
        if !self.value_width.is_multiple_of(16) {
            return shape("the width of a value", self.value_width, "a multiple of 16");
        }
        let room = gpu.shared_max / self.blocks_per_sm;
        let stages = (1..=self.stages_max).rev().find(|stages| self.shared_bytes(*stages) <= room).unwrap_or(1);
        let shared_bytes = self.shared_bytes(stages);
        gpu.require_shared(op, shared_bytes)?;
        let rows = specs.rows();
        let [scratch_rows, groups, ..] = specs.buffer(buffers.partials).shape[..] else {
            return shape("the rank of the partials", specs.buffer(buffers.partials).shape.len(), "4");
        };
        let splits = if rows <= scratch_rows {
            (gpu.sm_count * self.blocks_per_sm / (rows * self.head_blocks)).clamp(1, groups)
        } else {
            1
        };
        let mut defines = vec![
            define("HEADS", self.heads),
            define("KEY_WIDTH", self.key_width),
            define("VALUE_WIDTH", self.value_width),
            define("VALUE_AT", self.value_at),
            define("SHARED_WIDTH", self.shared_width),
            define("CACHE_WIDTH", self.cache_width),
            define("WARPS", self.warps),
            define("STAGES", stages),
            define("GROUPS", groups),
            define("PAGES_PER_SLOT", specs.buffer(buffers.paged.block_table).shape[1]),
            define_bits("SCALE_BITS", self.scale),
        ];
        defines.extend(own);
        let mut args = vec![Arg::Buffer(buffers.out)];
        args.extend(buffers.queries.into_iter().map(Arg::Buffer));
        args.extend(
            [
                buffers.paged.kv,
                buffers.paged.block_table,
                buffers.slot,
                buffers.position,
                buffers.partials,
                buffers.arrivals,
            ]
            .map(Arg::Buffer),
        );
        args.push(Arg::U32(rows as u32));
        let source = if op == "mla_attend" { "mla_attend.cu" } else { "gqa_attend.cu" };
        Ok(Launch {
            kernel: Kernel { source, function: op, defines },
            grid: [rows as u32, self.head_blocks as u32, splits as u32],
            block: (self.warps * 32) as u32,
            shared_bytes: shared_bytes as u32,
            args,
            ..Launch::plain()
        })
    }
}

impl MlaAttend {
    pub(super) fn launch(&self, specs: &dyn Specs, gpu: &GpuFacts) -> Result<Launch, LaunchError> {
        let op = "mla_attend";
        let heads = self.heads.min(HEADS_MAX);
        if !self.heads.is_multiple_of(heads) {
            let need = format!("at most {HEADS_MAX}, or a multiple of it");
            return Err(LaunchError::Shape { op, what: "the number of heads", got: self.heads, need });
        }
        let width = self.lora + self.rope_dim;
        let shape = Shape {
            op,
            heads,
            head_blocks: self.heads / heads,
            key_width: width,
            value_width: self.lora,
            value_at: 0,
            shared_width: width,
            cache_width: width,
            warps: 8,
            stages_max: 2,
            blocks_per_sm: 1,
            scale: self.scale,
        };
        let buffers = Buffers {
            queries: vec![self.q_lat, self.q_rope],
            out: self.o_lat,
            paged: self.paged,
            slot: self.slot,
            position: self.position,
            partials: self.partials,
            arrivals: self.arrivals,
        };
        shape.launch(specs, gpu, buffers, vec![define("HEADS_ALL", self.heads)])
    }
}

impl GqaAttend {
    pub(super) fn launch(&self, specs: &dyn Specs, gpu: &GpuFacts) -> Result<Launch, LaunchError> {
        let op = "gqa_attend";
        let heads = self.heads / self.kv_heads;
        if heads > HEADS_MAX {
            let need = format!("at most {HEADS_MAX}");
            return Err(LaunchError::Shape { op, what: "query heads of a kv head", got: heads, need });
        }
        let shape = Shape {
            op,
            heads,
            head_blocks: self.kv_heads,
            key_width: self.head_dim,
            value_width: self.head_dim,
            value_at: self.head_dim,
            shared_width: 2 * self.head_dim,
            cache_width: 2 * self.kv_heads * self.head_dim,
            warps: 4,
            stages_max: 3,
            blocks_per_sm: 2,
            scale: self.scale,
        };
        let buffers = Buffers {
            queries: vec![self.q],
            out: self.out,
            paged: self.paged,
            slot: self.slot,
            position: self.position,
            partials: self.partials,
            arrivals: self.arrivals,
        };
        shape.launch(specs, gpu, buffers, vec![define("KV_HEADS", self.kv_heads)])
    }
}

const _: () = assert!(ATTENTION_GROUP.is_multiple_of(PAGE_TOKENS), "a group is whole pages");
