//! Geometry of the one-slice GEMMs of a norm: gate and up of wide models, and the head. No choice here changes a bit. A warp owns row tiles and the
//! whole of K; a block's tokens stay in shared memory or are staged there.

use super::gemm::{NormApart, Shape, Tiling, define_bits, flag};
use super::staging::Staging;
use super::{Arg, GpuFacts, Kernel, Launch, LaunchError, Successor, define};
use crate::Specs;
use crate::ops::Head;
use crate::spec::{BufferId, Cols, WeightId};

/// Most rows whose activations a block of the one-slice form keeps in shared memory.
const RESIDENT_ROWS_MAX: usize = 32;
/// Shared memory that a resident block may take: what is left still runs the successor's prologue on small steps.
const RESIDENT_BYTES_MAX: usize = 200 * 1024;

/// How a weight with one slice meets its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WholeForm {
    /// Tokens of a group stay in shared memory, a warp walks row tiles.
    Resident { tiling: Tiling, warps: usize, bytes: usize },
    /// Tokens are staged; the norm is apart.
    Staged(Staging),
}

impl WholeForm {
    pub fn choose(shape: &Shape, rows: usize, gpu: &GpuFacts) -> WholeForm {
        let resident = |token_tiles: usize| {
            let bytes = 128 + token_tiles * 8 * shape.shared_stride() * 2;
            let tiling = Tiling { row_tiles: 1, token_tiles, blocks_per_sm: 1 };
            WholeForm::Resident { tiling, warps: walking_warps(shape.row_tiles(), gpu.sm_count), bytes }
        };
        let token_tiles = rows.div_ceil(8).next_power_of_two().min(RESIDENT_ROWS_MAX / 8);
        let stageable = shape.k_tiles().is_multiple_of(4);
        let form = resident(token_tiles);
        let fits = matches!(form, WholeForm::Resident { bytes, .. } if bytes <= RESIDENT_BYTES_MAX.min(gpu.shared_max));
        match stageable {
            _ if fits && (rows <= RESIDENT_ROWS_MAX || !stageable) => form,
            true => WholeForm::Staged(Staging::deep(shape, rows, gpu)),
            false => resident(1),
        }
    }
}

/// Warps of the only block of a multiprocessor that walk `row_tiles` row tiles: as many as leave the last round fullest (a head of 6,400 row tiles has 3.03
/// rounds of sixteen warps, and in the fourth a few of them wait for memory alone), the more the better.
fn walking_warps(row_tiles: usize, sm_count: usize) -> usize {
    let idle = |warps: &usize| row_tiles.next_multiple_of(warps * sm_count) - row_tiles;
    if row_tiles <= 8 * sm_count { 8 } else { (8..=12).rev().min_by_key(idle).unwrap_or(8) }
}

/// What the one-slice GEMMs of a norm share.
pub(super) struct NormedWhole {
    pub op: &'static str,
    pub source: &'static str,
    pub shape: Shape,
    pub rows: usize,
    pub x: BufferId,
    pub norm: WeightId,
    pub eps: f32,
    pub row_of: Option<BufferId>,
    pub successor: Successor,
}

impl NormedWhole {
    /// `args` makes the arguments from that of the activations.
    pub fn launches(&self, gpu: &GpuFacts, args: impl Fn(Arg) -> Vec<Arg>) -> Result<Vec<Launch>, LaunchError> {
        let NormedWhole { op, source, shape, rows, x, norm, eps, row_of, successor } = *self;
        let one_wave = Staging::one_wave(&shape, rows, gpu).filter(|_| row_of.is_none());
        let form = one_wave.map_or_else(|| WholeForm::choose(&shape, rows, gpu), WholeForm::Staged);
        let mut defines = shape.defines();
        let (tiling, warps, blocks, bytes, staged) = match form {
            WholeForm::Resident { tiling, warps, bytes } => {
                defines.extend(tiling.defines());
                defines.push(define("WARPS", warps));
                let blocks = shape.row_tiles().div_ceil(warps).min(gpu.sm_count);
                (tiling, warps, blocks, bytes, false)
            }
            WholeForm::Staged(staging) => {
                defines.extend(staging.defines());
                (staging.tiling, staging.warps, staging.blocks, staging.bytes(), true)
            }
        };
        gpu.require_shared(op, bytes)?;
        defines.extend([flag("STAGED", staged), flag("FUSED", !staged), flag("HELD", false)]);
        defines.push(successor.define());
        defines.extend([define("HELD_SHARED", 0), define_bits("EPS_BITS", eps)]);
        let h = Arg::Workspace;
        let gemm = Launch {
            kernel: Kernel { source, function: op, defines },
            grid: [blocks as u32, tiling.token_groups(rows), 1],
            block: 32 * warps as u32,
            shared_bytes: bytes as u32,
            workspace_bytes: if staged { rows * shape.k * 2 } else { 0 },
            args: args(if staged { h } else { Arg::Buffer(x) }),
            ..Launch::plain()
        };
        if !staged {
            return Ok(vec![gemm]);
        }
        let x = Cols { buffer: x, offset: 0, width: shape.k };
        Ok(vec![NormApart { h, x, x_stride: shape.k, norm, eps, rows, row_of }.launch(), gemm])
    }
}

impl Head {
    pub(super) fn launches(&self, specs: &dyn Specs, gpu: &GpuFacts) -> Result<Vec<Launch>, LaunchError> {
        let op = "head";
        let shape = Shape::of(op, specs, self.weight)?;
        shape.require_slices(op, &[1])?;
        let rows = specs.logit_rows();
        let (x, norm, eps, row_of) = (self.x, self.norm, self.eps, Some(self.logit_row));
        let successor = Successor::AfterWait;
        NormedWhole { op, source: "head.cu", shape, rows, x, norm, eps, row_of, successor }.launches(gpu, |x| {
            vec![
                Arg::Buffer(self.logits),
                x,
                Arg::Weight(self.weight),
                Arg::Weight(self.norm),
                Arg::Buffer(self.logit_row),
                Arg::U32(rows as u32),
            ]
        })
    }
}

#[cfg(test)]
mod tests {
    use super::walking_warps;

    #[test]
    fn warps_leave_the_last_round_full() {
        // Heads of 102,400 and 151,936 rows; gate and up of 19,456 and 21,888; a weight that is one round of eight warps.
        let found = [6400, 9496, 1216, 1368, 128].map(|row_tiles| walking_warps(row_tiles, 132));
        assert_eq!(found, [10, 12, 10, 11, 8]);
    }
}
