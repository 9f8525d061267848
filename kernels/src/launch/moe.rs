//! Geometry of the mixture-of-experts ops. No choice here changes a bit.
//!
//! `moe_gate`: the router is one block beside the shared experts' row tiles. `moe_up`: the GPU's blocks walk (active expert, row tile) items.
//! `moe_down`: a block owns 16 outputs of a chunk of rows and all their experts, so that sums need no atomics.

use super::gemm::{BLOCK, FUSED_ROWS_MAX, NormApart, Shape, Tiling, define_bits, flag};
use super::{Arg, GpuFacts, Kernel, Launch, LaunchError, define};
use crate::Specs;
use crate::contract::{EXPERT_SHARDS, shard_of};
use crate::ops::{MoeDown, MoeGate, MoeSum, MoeUp, TopkMethod};
use crate::spec::Cols;

/// Rows whose lines one block of `moe_down` sums: y of each line stays in shared memory.
const DOWN_CHUNK_MAX: usize = 256;

impl MoeGate {
    pub(super) fn launches(&self, specs: &dyn Specs, gpu: &GpuFacts) -> Result<Vec<Launch>, LaunchError> {
        let op = "moe_gate";
        let router = Shape::of(op, specs, self.router)?;
        router.require_slices(op, &[8])?;
        let (rows, routing) = (specs.rows(), &self.routing);
        if routing.top_k > 32 || routing.experts > 512 {
            let need = "at most 32 of 512".into();
            return Err(LaunchError::Shape { op, what: "the number of chosen experts", got: routing.top_k, need });
        }
        let shared = match &self.shared {
            Some(shared) => Some(Shape::of(op, specs, shared.weight)?),
            None => None,
        };
        if let Some(shared) = &shared {
            shared.require_slices(op, &[8])?;
        }
        let tiling = Tiling::sliced(rows, shared.map_or(1, |shared| shared.row_tiles()));
        let fused = rows <= FUSED_ROWS_MAX;
        let tokens = tiling.token_tiles * 8;
        let normed = if fused { tokens * router.shared_stride() * 2 } else { 0 };
        let shared_bytes = tiling.slice_bytes() + tokens * router.row_tiles() * 16 * 4 + normed;
        gpu.require_shared(op, shared_bytes)?;
        let (groups, topk_groups) = match routing.method {
            TopkMethod::Greedy => (1, 1),
            TopkMethod::GroupLimitedGreedy { groups, topk_groups } => (groups, topk_groups),
        };
        let mut defines = vec![
            define("WEIGHT_K", router.k),
            define("SLICES", router.slices),
            define("EXPERTS", routing.experts),
            define("SHARED_N", shared.map_or(0, |shared| shared.n)),
            define("TOP_K", routing.top_k),
            define("ROUTE_GROUPS", groups),
            define("ROUTE_TOPK_GROUPS", topk_groups),
            flag("NORM_TOPK", routing.norm_topk_prob && routing.top_k > 1),
            define_bits("SCALING_BITS", routing.scaling),
            define("FIRST_EXPERT", self.first_expert),
            define("LOCAL_EXPERTS", self.local_experts),
            flag("FUSED", fused),
            define_bits("EPS_BITS", self.eps),
        ];
        defines.extend(tiling.defines());
        let shared_blocks = shared.map_or(0, |shared| shared.row_tiles() / tiling.row_tiles);
        let shared_act = self.shared.as_ref().map_or(self.h, |shared| shared.act);
        let gate = Launch {
            kernel: Kernel { source: "moe_gate.cu", function: op, defines },
            grid: [1 + shared_blocks as u32, rows.div_ceil(tokens) as u32, 1],
            block: BLOCK,
            shared_bytes: shared_bytes as u32,
            args: vec![
                Arg::Buffer(self.h),
                Arg::Buffer(self.expert_id),
                Arg::Buffer(self.expert_weight),
                Arg::Buffer(shared_act),
                Arg::Buffer(if fused { self.x } else { self.h }),
                Arg::Weight(self.norm),
                Arg::Weight(self.router),
                Arg::Weight(self.shared.as_ref().map_or(self.router, |shared| shared.weight)),
                Arg::Buffer(self.live),
                Arg::Buffer(self.step),
                Arg::U32(rows as u32),
            ],
            ..Launch::plain()
        };
        if fused {
            return Ok(vec![gate]);
        }
        let x = Cols { buffer: self.x, offset: 0, width: router.k };
        let (h, x_stride, norm, eps) = (Arg::Buffer(self.h), router.k, self.norm, self.eps);
        Ok(vec![NormApart { h, x, x_stride, norm, eps, rows, row_of: None }.launch(), gate])
    }
}

/// Bytes of `Routes<experts, lines, 8>` (`routes.cuh`).
fn routes_bytes(experts: usize, lines: usize) -> usize {
    (experts * (4 + 4 + 8 * 4 + 2) + lines * 2 + 4 + 16).next_multiple_of(16)
}

impl MoeUp {
    pub(super) fn launch(&self, specs: &dyn Specs, gpu: &GpuFacts) -> Result<Launch, LaunchError> {
        let op = "moe_up";
        let shape = Shape::of(op, specs, self.weight)?;
        shape.require_slices(op, &[1])?;
        require_pairs(op, shape.k, 32)?;
        let rows = specs.rows();
        let token_tiles = match rows {
            ..=16 => 1,
            17..=64 => 2,
            65..=128 => 4,
            _ => 8,
        };
        let blocks_per_sm = if token_tiles <= 2 { 2 } else { 1 };
        let shared_bytes = routes_bytes(self.local_experts, rows * self.top_k);
        gpu.require_shared(op, shared_bytes)?;
        let mut defines = shape.defines();
        defines.extend([
            define("EXPERTS", self.local_experts),
            define("FIRST_EXPERT", self.first_expert),
            define("TOP_K", self.top_k),
            define("LINES_MAX", rows * self.top_k),
            define("TOKEN_TILES", token_tiles),
            define("BLOCKS_PER_SM", blocks_per_sm),
        ]);
        let items = (rows * self.top_k).min(self.local_experts) * shape.row_tiles();
        Ok(Launch {
            kernel: Kernel { source: "moe_up.cu", function: op, defines },
            grid: [items.div_ceil(8).min(gpu.sm_count * blocks_per_sm) as u32, 1, 1],
            block: BLOCK,
            shared_bytes: shared_bytes as u32,
            args: vec![
                Arg::Buffer(self.act),
                Arg::Buffer(self.h),
                Arg::Buffer(self.expert_id),
                Arg::Weight(self.weight),
                Arg::U32(rows as u32),
            ],
            ..Launch::plain()
        })
    }
}

impl MoeDown {
    pub(super) fn launch(&self, specs: &dyn Specs, gpu: &GpuFacts) -> Result<Launch, LaunchError> {
        let op = "moe_down";
        let shape = Shape::of(op, specs, self.weight)?;
        shape.require_slices(op, &[1])?;
        require_pairs(op, shape.k, 32)?;
        let shared = match self.shared {
            Some((_, weight)) => Some(Shape::of(op, specs, weight)?),
            None => None,
        };
        if let Some(shared) = &shared {
            shared.require_slices(op, &[2])?;
            require_pairs(op, shared.k, 64)?;
        }
        let rows = specs.rows();
        let bytes =
            |chunk: usize| chunk * (self.top_k + 2) * 16 * 4 + routes_bytes(self.local_experts, chunk * self.top_k);
        let mut chunk = rows.min(DOWN_CHUNK_MAX);
        while chunk > 8 && bytes(chunk) > gpu.shared_max {
            chunk = chunk.div_ceil(2);
        }
        gpu.require_shared(op, bytes(chunk))?;
        let token_tiles = match chunk {
            ..=16 => 1,
            17..=64 => 2,
            _ => 4,
        };
        let first_shard = shard_of(self.first_expert, self.experts);
        let shards = if self.local_experts == self.experts {
            EXPERT_SHARDS
        } else {
            shard_of(self.first_expert + self.local_experts - 1, self.experts) + 1 - first_shard
        };
        let (out, shared_out, residual) = match self.sum {
            MoeSum::Residual { x } => (x, x, true),
            MoeSum::Partial { partial, shared } => (partial, shared, false),
        };
        let mut defines = shape.defines();
        defines.extend([
            define("SHARED_K", shared.map_or(0, |shared| shared.k)),
            define("EXPERTS", self.local_experts),
            define("EXPERTS_ALL", self.experts),
            define("FIRST_EXPERT", self.first_expert),
            define("SHARDS", shards),
            define("FIRST_SHARD", first_shard),
            define("TOP_K", self.top_k),
            define("CHUNK", chunk),
            define("TOKEN_TILES", token_tiles),
            flag("RESIDUAL", residual),
        ]);
        Ok(Launch {
            kernel: Kernel { source: "moe_down.cu", function: op, defines },
            grid: [shape.row_tiles() as u32, rows.div_ceil(chunk) as u32, 1],
            block: BLOCK,
            shared_bytes: bytes(chunk) as u32,
            args: vec![
                Arg::Buffer(out),
                Arg::Buffer(shared_out),
                Arg::Buffer(self.act),
                Arg::Buffer(self.expert_id),
                Arg::Buffer(self.expert_weight),
                Arg::Weight(self.weight),
                Arg::Buffer(self.shared.map_or(self.act, |(act, _)| act)),
                Arg::Weight(self.shared.map_or(self.weight, |(_, weight)| weight)),
                Arg::U32(rows as u32),
            ],
            ..Launch::plain()
        })
    }
}

fn require_pairs(op: &'static str, k: usize, multiple: usize) -> Result<(), LaunchError> {
    if k.is_multiple_of(multiple) {
        return Ok(());
    }
    Err(LaunchError::Shape {
        op,
        what: "the inner width of an expert",
        got: k,
        need: format!("a multiple of {multiple}"),
    })
}
