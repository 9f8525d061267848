//! Geometry of the mixture-of-experts ops. No choice here changes a bit.
//!
//! `moe_gate`: a cluster of blocks routes eight rows; the shared experts' first half is a launch of its own behind it, under which `moe_up` starts.
//! `moe_up`: the GPU's blocks walk (active expert, row tile) items. `moe_down`: at few rows a block owns 16 outputs and all their experts; at
//! more the GPU's blocks walk items and leave each expert's output in the workspace for a second launch to sum. Neither needs atomics.

use super::gemm::{BLOCK, Shape, define_bits, flag};
use super::sliced::{self, GateUpOfNormed};
use super::{Arg, BESIDE_ATTENTION_ROWS, GpuFacts, Kernel, Launch, LaunchError, define};
use crate::Specs;
use crate::contract::{EXPERT_SHARDS, K_TILE, ROW_TILE, shard_of};
use crate::ops::{MoeDown, MoeGate, MoeSum, MoeUp, TopkMethod};

/// Rows of a `moe_gate` cluster.
const GATE_ROWS: usize = 8;
/// Shared memory that a `moe_gate` block of one row asks for, so that the shared experts' blocks behind it, whose weights it would wait behind, start on
/// other multiprocessors (H200, DeepSeek-V2-Lite: 2.11 ms a step at 32,000 tokens without, 2.08 so).
const GATE_ALONE_BYTES: usize = 190 * 1024;
/// Most rows at which a block of `moe_down` owns its outputs and keeps every expert's part in shared memory.
const DOWN_OWNED_ROWS_MAX: usize = 16;
/// Token tiles of the shared experts that one warp of `moe_down_lines` takes: fewer rows, shorter items.
const SHARED_TILES: [(usize, usize); 2] = [(32, 2), (usize::MAX, 4)];

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
        let cluster = gate_cluster(rows, router.row_tiles(), gpu);
        // Two warps a slice where a block has several tiles, or one warp and all of its weights in registers.
        let parts = if router.row_tiles() > cluster { 2 } else { 1 };
        let tiles = router.row_tiles().div_ceil(cluster * parts);
        let row_tiles = if tiles.is_multiple_of(2) && router.row_tiles().is_multiple_of(2) { 2 } else { 1 };
        let ring = if parts == 1 { 8 } else { 4 * row_tiles };
        let logits = GATE_ROWS * router.row_tiles() * 16 * 4;
        let rest = parts * sliced::slice_bytes(1) + logits + GATE_ROWS * router.shared_stride() * 2;
        let bulk_bytes = router.k_tiles() * ROW_TILE * K_TILE * 2;
        let bulk = rows <= BESIDE_ATTENTION_ROWS
            && cluster >= router.row_tiles().max(2)
            && rest + bulk_bytes <= GATE_ALONE_BYTES.min(gpu.shared_max);
        let held_bytes = match 8 * parts * sliced::held_bytes(router.k_tiles(), row_tiles, ring) {
            _ if bulk => bulk_bytes,
            bytes if rest + bytes <= gpu.shared_max => bytes,
            _ => 0,
        };
        let held = held_bytes > 0 && !bulk;
        let shared_bytes = if bulk { GATE_ALONE_BYTES.min(gpu.shared_max) } else { rest + held_bytes };
        gpu.require_shared(op, shared_bytes)?;
        let (groups, topk_groups) = match routing.method {
            TopkMethod::Greedy => (1, 1),
            TopkMethod::GroupLimitedGreedy { groups, topk_groups } => (groups, topk_groups),
        };
        let defines = vec![
            define("WEIGHT_K", router.k),
            define("SLICES", router.slices),
            define("EXPERTS", routing.experts),
            define("TOP_K", routing.top_k),
            define("ROUTE_GROUPS", groups),
            define("ROUTE_TOPK_GROUPS", topk_groups),
            flag("NORM_TOPK", routing.norm_topk_prob && routing.top_k > 1),
            define_bits("SCALING_BITS", routing.scaling),
            define("FIRST_EXPERT", self.first_expert),
            define("LOCAL_EXPERTS", self.local_experts),
            define_bits("EPS_BITS", self.eps),
            define("CLUSTER", cluster),
            define("PARTS", parts),
            define("ROW_TILES", row_tiles),
            define("RING", ring),
            flag("BULK", bulk),
            flag("HELD", held),
            define("HELD_SHARED", held_bytes),
        ];
        let mut launches = vec![Launch {
            kernel: Kernel { source: "moe_gate.cu", function: op, defines },
            grid: [(cluster * rows.div_ceil(GATE_ROWS)) as u32, 1, 1],
            block: BLOCK * parts as u32,
            cluster: cluster as u32,
            shared_bytes: shared_bytes as u32,
            args: vec![
                Arg::Buffer(self.h),
                Arg::Buffer(self.expert_id),
                Arg::Buffer(self.expert_weight),
                Arg::Buffer(self.x),
                Arg::Weight(self.norm),
                Arg::Weight(self.router),
                Arg::Buffer(self.live),
                Arg::Buffer(self.step),
                Arg::U32(rows as u32),
            ],
            ..Launch::plain()
        }];
        if let Some(shared) = &self.shared {
            let shape = Shape::of(op, specs, shared.weight)?;
            shape.require_slices(op, &[8])?;
            // It must not be eager: `moe_up` reads the choice early, and this launch is what it leans on.
            let (out, h, weight, norm) = (shared.act, self.h, shared.weight, self.norm);
            launches.push(GateUpOfNormed { op, shape, rows, out, h, weight, norm }.launch(gpu)?);
        }
        Ok(launches)
    }
}

/// Blocks of a `moe_gate` cluster: they share the router's row tiles, as long as all clusters find room at once.
fn gate_cluster(rows: usize, row_tiles: usize, gpu: &GpuFacts) -> usize {
    let fits = |blocks: &usize| *blocks <= row_tiles && blocks * rows.div_ceil(GATE_ROWS) <= gpu.sm_count;
    if gpu.capability() >= 90 { [4, 2].into_iter().find(fits).unwrap_or(1) } else { 1 }
}

/// Bytes of `Routes<experts, lines, 8>` (`routes.cuh`); at most 32 lines are held in registers.
fn routes_bytes(experts: usize, lines: usize) -> usize {
    if lines <= 32 {
        return 0;
    }
    (experts * (4 + 4 + 8 * 4 + 2) + lines * 2 + 4 + 16).next_multiple_of(16)
}

/// Rows of a step that choose nearly every expert and are few enough for two blocks an SM.
const MOST_CHOSEN: std::ops::RangeInclusive<usize> = 33..=128;

/// How a warp meets an expert's tokens: token tiles of a pass, pairs of k tiles in flight at most, blocks of an SM.
///
/// Few rows are all latency, so a deep ring; from 16 rows on more tokens a pass, so that a weight is read once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Walk {
    token_tiles: usize,
    depth: usize,
    blocks_per_sm: usize,
}

impl Walk {
    fn up(rows: usize) -> Walk {
        let (token_tiles, depth, blocks_per_sm) = match rows {
            1 => (1, 16, 1),
            2..=8 => (1, 8, 2),
            9..=32 => (2, 4, 2),
            33..=128 => (4, 4, 2),
            _ => (8, 4, 1),
        };
        Walk { token_tiles, depth, blocks_per_sm }
    }
    fn down(rows: usize) -> Walk {
        let (token_tiles, depth, blocks_per_sm) = match rows {
            ..=8 => (1, 11, 1),
            9..=DOWN_OWNED_ROWS_MAX => (2, 11, 1),
            17..=32 => (2, 4, 2),
            33..=128 => (4, 4, 2),
            _ => (8, 4, 1),
        };
        Walk { token_tiles, depth, blocks_per_sm }
    }
    /// Warps of a block: at rows that choose nearly every expert as many as leave the last round over `items` fullest (at 64 rows a real model has 4.12
    /// rounds of sixteen warps an SM, and a fifth in which few warps wait for memory alone).
    fn warps(&self, rows: usize, items: usize, gpu: &GpuFacts) -> usize {
        let idle = |warps: &usize| items.next_multiple_of(warps * self.blocks_per_sm * gpu.sm_count) - items;
        if MOST_CHOSEN.contains(&rows) { (6..=8).rev().min_by_key(idle).unwrap_or(8) } else { 8 }
    }
    fn defines(&self) -> [(&'static str, String); 3] {
        [
            define("TOKEN_TILES", self.token_tiles),
            define("DEPTH_MAX", self.depth),
            define("BLOCKS_PER_SM", self.blocks_per_sm),
        ]
    }
}

impl MoeUp {
    pub(super) fn launch(&self, specs: &dyn Specs, gpu: &GpuFacts) -> Result<Launch, LaunchError> {
        let op = "moe_up";
        let shape = Shape::of(op, specs, self.weight)?;
        shape.require_slices(op, &[1])?;
        require_pairs(op, shape.k, 32)?;
        let (rows, walk) = (specs.rows(), Walk::up(specs.rows()));
        let lines = rows * self.top_k;
        let shared_bytes = routes_bytes(self.local_experts, lines);
        gpu.require_shared(op, shared_bytes)?;
        let mut defines = shape.defines();
        defines.extend([
            define("EXPERTS", self.local_experts),
            define("FIRST_EXPERT", self.first_expert),
            define("TOP_K", self.top_k),
            define("LINES_MAX", lines),
            flag("EARLY", self.early_choice),
        ]);
        defines.extend(walk.defines());
        let items = lines.min(self.local_experts) * shape.row_tiles();
        Ok(Launch {
            kernel: Kernel { source: "moe_up.cu", function: op, defines },
            grid: [items.div_ceil(8).min(gpu.sm_count * walk.blocks_per_sm) as u32, 1, 1],
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
    pub(super) fn launches(&self, specs: &dyn Specs, gpu: &GpuFacts) -> Result<Vec<Launch>, LaunchError> {
        let op = "moe_down";
        let shape = Shape::of(op, specs, self.weight)?;
        shape.require_slices(op, &[1])?;
        require_pairs(op, shape.k, 32)?;
        require_pairs(op, shape.n, 4)?;
        let shared = match self.shared {
            Some((_, weight)) => Some(Shape::of(op, specs, weight)?),
            None => None,
        };
        if let Some(shared) = &shared {
            shared.require_slices(op, &[2])?;
            require_pairs(op, shared.k, 64)?;
        }
        let (rows, walk) = (specs.rows(), Walk::down(specs.rows()));
        let lines = rows * self.top_k;
        let shared_tiles = SHARED_TILES.iter().find(|(most, _)| rows <= *most).map_or(4, |(_, tiles)| *tiles);
        let shared_items = if shared.is_some() { 2 * rows.div_ceil(shared_tiles * 8) } else { 0 };
        let items = (shared_items + lines.min(self.local_experts)) * shape.row_tiles();
        let warps = walk.warps(rows, items, gpu);
        let apart = rows > DOWN_OWNED_ROWS_MAX;
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
            define("WARPS", warps),
            define("SHARED_K", shared.map_or(0, |shared| shared.k)),
            define("SHARED_TILES", shared_tiles),
            define("EXPERTS", self.local_experts),
            define("EXPERTS_ALL", self.experts),
            define("FIRST_EXPERT", self.first_expert),
            define("SHARDS", shards),
            define("FIRST_SHARD", first_shard),
            define("TOP_K", self.top_k),
            define("LINES_MAX", lines),
            define("ROWS_MAX", rows),
            // Activations asked for ahead must divide the ring: eleven pairs, or eight registers' worth of four.
            define("X_AHEAD", if walk.depth == 11 && walk.token_tiles == 1 { 44 } else { 32 }),
            flag("RESIDUAL", residual),
            flag("APART", apart),
        ]);
        defines.extend(walk.defines());
        let rows_arg = Arg::U32(rows as u32);
        let (act, ids, weights) = (Arg::Buffer(self.act), Arg::Buffer(self.expert_id), Arg::Buffer(self.expert_weight));
        let shared_act = Arg::Buffer(self.shared.map_or(self.act, |(act, _)| act));
        let shared_weight = Arg::Weight(self.shared.map_or(self.weight, |(_, weight)| weight));
        let (out, shared_out, weight) = (Arg::Buffer(out), Arg::Buffer(shared_out), Arg::Weight(self.weight));
        let kernel = |function| Kernel { source: "moe_down.cu", function, defines: defines.clone() };
        if !apart {
            let y_bytes = rows * (self.top_k + 2) * 16 * 4;
            let shared_bytes = y_bytes + routes_bytes(self.local_experts, lines);
            gpu.require_shared(op, shared_bytes)?;
            return Ok(vec![Launch {
                kernel: kernel(op),
                grid: [shape.row_tiles() as u32, 1, 1],
                block: BLOCK,
                shared_bytes: shared_bytes as u32,
                args: vec![out, shared_out, act, ids, weights, weight, shared_act, shared_weight, rows_arg],
                ..Launch::plain()
            }]);
        }
        let shared_bytes = routes_bytes(self.local_experts, lines);
        gpu.require_shared(op, shared_bytes)?;
        let workspace_bytes = rows * (self.top_k + 2) * shape.n * 4;
        Ok(vec![
            Launch {
                kernel: kernel("moe_down_lines"),
                grid: [items.div_ceil(warps).min(gpu.sm_count * walk.blocks_per_sm) as u32, 1, 1],
                block: 32 * warps as u32,
                shared_bytes: shared_bytes as u32,
                workspace_bytes,
                args: vec![Arg::Workspace, act, ids, weight, shared_act, shared_weight, rows_arg],
                ..Launch::plain()
            },
            Launch {
                kernel: kernel("moe_down_sum"),
                grid: [(rows * shape.n).div_ceil(4 * BLOCK as usize) as u32, 1, 1],
                block: BLOCK,
                workspace_bytes,
                args: vec![out, shared_out, Arg::Workspace, ids, weights, rows_arg],
                ..Launch::plain()
            },
        ])
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_routers_tiles_are_shared_while_all_clusters_find_room() {
        let hopper = GpuFacts::h200();
        let found = [(1, 4), (128, 4), (512, 4), (2048, 4), (1, 3), (1, 1)]
            .map(|(rows, tiles)| gate_cluster(rows, tiles, &hopper));
        assert_eq!(found, [4, 4, 2, 1, 2, 1]);
        assert_eq!(gate_cluster(1, 4, &GpuFacts { arch: "sm_89".into(), ..hopper }), 1, "clusters came with sm_90");
    }

    #[test]
    fn warps_of_many_rows_leave_the_last_round_full() {
        let warps = |rows, items| Walk::down(rows).warps(rows, items, &GpuFacts::h200());
        // 64 experts (32 of two ranks) and the shared experts' slices, of 128 row tiles.
        assert_eq!([warps(64, 8704), warps(128, 9216), warps(64, 4608), warps(128, 5120)], [7, 7, 6, 7]);
        // Few rows choose fewer experts than there are, and no number of warps is known to fit.
        assert_eq!(warps(32, 8704), 8);
    }
}
