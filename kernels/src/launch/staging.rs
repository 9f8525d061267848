//! Geometry of the one-slice GEMM form whose blocks stage their tokens in shared memory (`gemm.cuh`, `Staged`). No choice here changes a bit.
//!
//! Called by `gemm.rs`. From 9 to 128 rows every row tile is in flight in one wave of blocks, so that tokens pass through a multiprocessor once
//! and no warp begins a second round while others idle.

use super::gemm::{Shape, Tiling};
use super::{GpuFacts, define};

/// Rows of a step that meets its weights in one wave, with a norm of its own before them.
pub(super) const ROWS: std::ops::RangeInclusive<usize> = 9..=128;
/// Most warps of a block: more would leave too few registers for a ring of weights.
const WARPS_MAX: usize = 16;
/// Most pairs of k tiles in a stage, which is also how many a warp has in flight.
const PAIRS_MAX: usize = 10;
/// The same past 64 rows, where sums take the registers.
const PAIRS_MAX_OF_MANY: usize = 4;
/// The same of two row tiles a warp.
const PAIRS_MAX_DEEP: usize = 8;
/// Most rounds over a GPU's warps at which one wave is better: with 1.2 or 1.3, as real gate_up weights have, the second is nearly empty.
const ROUNDS_MAX: usize = 2;
/// Most stages: one in use, one arriving, one asked for.
const STAGES_MAX: usize = 3;
/// Registers of a thread for addresses, counters and the epilogue.
const OTHER_REGISTERS: usize = 46;
/// Shared memory that the stages of the only block of a multiprocessor may take.
const STAGE_BYTES_MAX: usize = 160 * 1024;

/// How a block stages its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Staging {
    pub tiling: Tiling,
    pub warps: usize,
    /// Blocks of a launch; row tiles are dealt to them in turn.
    pub blocks: usize,
    /// Pairs of k tiles in a stage, and of weights in a warp's registers.
    stage_pairs: usize,
    /// Stages in shared memory: all of a chain's, or a ring of two or more.
    stages: usize,
}

impl Staging {
    /// For steps whose weights are not all the traffic: many tokens a block, two row tiles a warp, as much in flight as registers hold.
    pub fn deep(shape: &Shape, rows: usize, gpu: &GpuFacts) -> Staging {
        let row_tiles = if shape.row_tiles().is_multiple_of(2) { 2 } else { 1 };
        let tiling = Tiling { row_tiles, token_tiles: rows.div_ceil(8).clamp(4, 16), blocks_per_sm: 1 };
        let (warps, pairs) = (8, shape.k_tiles() / 2);
        let ring = ring(&tiling, warps).clamp(2, PAIRS_MAX_DEEP);
        let stage_bytes = STAGE_BYTES_MAX.min(gpu.shared_max);
        let deepest = ring.min(stage_bytes / (STAGES_MAX * pair_bytes(&tiling))).clamp(1, pairs);
        let stage_pairs = depth(pairs, deepest);
        let blocks = shape.row_tiles().div_ceil(warps * row_tiles);
        Staging { tiling, warps, blocks, stage_pairs, stages: STAGES_MAX }
    }
    /// A row tile a warp, all of them at once, the same number on every multiprocessor; None at other rows, or with so many row tiles that
    /// warps which walk them lose little in their last round.
    pub fn one_wave(shape: &Shape, rows: usize, gpu: &GpuFacts) -> Option<Staging> {
        let walk = shape.row_tiles() > ROUNDS_MAX * 8 * gpu.sm_count;
        if walk || !ROWS.contains(&rows) || !shape.k_tiles().is_multiple_of(4) {
            return None;
        }
        let (token_tiles, pairs) = (rows.div_ceil(8), shape.k_tiles() / 2);
        let tiling = Tiling { row_tiles: 1, token_tiles, blocks_per_sm: 1 };
        let warps = shape.row_tiles().div_ceil(gpu.sm_count).min(WARPS_MAX);
        let stage_bytes = STAGE_BYTES_MAX.min(gpu.shared_max);
        let most = if token_tiles > 8 { PAIRS_MAX_OF_MANY } else { PAIRS_MAX };
        let deepest = ring(&tiling, warps).clamp(2, most).min(stage_bytes / (2 * pair_bytes(&tiling))).clamp(1, pairs);
        let stage_pairs = depth(pairs, deepest);
        let room = (stage_bytes / (stage_pairs * pair_bytes(&tiling))).clamp(2, STAGES_MAX);
        let blocks = shape.row_tiles().div_ceil(warps).max(gpu.sm_count.min(shape.row_tiles()));
        Some(Staging { tiling, warps, blocks, stage_pairs, stages: room.min(pairs.div_ceil(stage_pairs)) })
    }
    pub fn defines(&self) -> Vec<(&'static str, String)> {
        let mut defines = self.tiling.defines().to_vec();
        defines.push(define("WARPS", self.warps));
        defines.extend([define("STAGE_PAIRS", self.stage_pairs), define("STAGES", self.stages)]);
        defines
    }
    /// `Staged::SHARED_BYTES`.
    pub fn bytes(&self) -> usize {
        self.stages * self.stage_pairs * self.tiling.token_tiles * 8 * 64
    }
}

/// Shared bytes of one pair of k tiles of a block's tokens.
fn pair_bytes(tiling: &Tiling) -> usize {
    tiling.token_tiles * 8 * 64
}

/// Pairs of k tiles, of all its row tiles, that fit into a warp's registers beside its sums.
fn ring(tiling: &Tiling, warps: usize) -> usize {
    // A quarter of the multiprocessor has 16,384 registers for its share of the warps; a pair of weights takes 8 of a thread's.
    let registers = (512 / warps.div_ceil(4)).min(255);
    let sums_and_tokens = tiling.row_tiles * tiling.token_tiles * 4 + tiling.token_tiles.min(4) * 4;
    registers.saturating_sub(sums_and_tokens + OTHER_REGISTERS) / (8 * tiling.row_tiles)
}

/// Pairs of a stage, at most `deepest`: a chain of whole stages needs no tests, and is preferred down to two thirds of that.
fn depth(pairs: usize, deepest: usize) -> usize {
    let dividing = (1..=deepest).rev().find(|depth| pairs.is_multiple_of(*depth)).unwrap_or(1);
    if 3 * dividing >= 2 * deepest { dividing } else { deepest }
}
