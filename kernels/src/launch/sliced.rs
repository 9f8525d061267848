//! Geometry of the GEMMs with eight slices: projections into and out of attention, down of dense layers, gate and up of narrow models and of shared
//! experts. No choice here changes a bit. A block has all slices of its row tiles, one a warp.

use super::gemm::{BLOCK, NormApart, Shape, Tiling, define_bits, flag, stride};
use super::{Arg, GpuFacts, Kernel, Launch, LaunchError, Successor, define, staging};
use crate::Specs;
use crate::ops::{GemmAdd, NormGemm};
use crate::spec::{BufferId, WeightId};

/// Most rows whose norm every block repeats. (Sixteen repeated read half as much again as the weights: Qwen3-4B 3.37 ms a step, 2.89 with eight.)
pub(super) const FUSED_ROWS_MAX: usize = 8;
/// Multiprocessors of the GPU that tilings were tuned on, an H200; on others they are as right, and less well chosen.
const TUNED_SMS: usize = 132;
/// Rounds of blocks of two row tiles from which on four a block are better: tokens pass through the L2 half as often, and no second round begins.
const ROUNDS_OF_TWO_ROW_TILES: f64 = 1.3;

impl Tiling {
    /// For eight slices: one row tile a block while weights are all the traffic, more as activations are, and as many blocks as would need a
    /// second round.
    pub fn sliced(rows: usize, row_tiles: usize) -> Tiling {
        let tokens = rows.div_ceil(8);
        let rounds = |token_tiles, blocks_per_sm: usize| {
            (row_tiles / 2 * tokens.div_ceil(token_tiles)) as f64 / (blocks_per_sm * TUNED_SMS) as f64
        };
        let (wanted_rows, token_tiles) = match tokens {
            1 => (1, 1),
            2 => (1, 2),
            3..=4 => (2, 4),
            5..=8 if rounds(4, 2) < ROUNDS_OF_TWO_ROW_TILES => (2, 4),
            9..=16 if rounds(8, 1) < ROUNDS_OF_TWO_ROW_TILES => (2, 8),
            _ => (4, 8),
        };
        let row_tiles = (1..=wanted_rows).rev().find(|rows| row_tiles.is_multiple_of(*rows)).unwrap_or(1);
        Tiling { row_tiles, token_tiles, blocks_per_sm: if row_tiles * token_tiles > 8 { 1 } else { 2 } }
    }
    pub fn slice_bytes(&self) -> usize {
        slice_bytes(self.token_tiles)
    }
}

/// Bytes in which eight slices of a block's token tiles meet (`gemm.cuh`, `Sliced::SHARED_FLOATS`).
pub(super) fn slice_bytes(token_tiles: usize) -> usize {
    8 * token_tiles * 8 * 20 * 4
}

/// Shared bytes for the pairs of k tiles that a warp's ring of `limit` row pairs leaves out (`gemm.cuh`, `Sliced::HELD_BYTES`, which the kernels
/// compare with this).
pub(super) fn held_bytes(k_tiles: usize, row_tiles: usize, limit: usize) -> usize {
    let whole = k_tiles.is_multiple_of(16);
    let pairs = if whole { k_tiles / 16 } else { k_tiles.div_ceil(16) + 1 };
    let deepest = limit / row_tiles;
    let dividing = (2..=deepest).rev().find(|depth| pairs.is_multiple_of(*depth)).unwrap_or(1);
    let guarded = !whole || dividing * row_tiles < 3;
    let depth = if guarded { pairs.min(deepest) } else { dividing };
    (pairs - depth) * row_tiles * 1024
}

/// Most rows at which a block may hold all its weights before the wait.
const HELD_ROWS_MAX: usize = 8;

/// How a block of eight slices holds all its weights before the wait: pairs of k tiles in a warp's registers, the others in shared memory, and blocks of a
/// multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hold {
    ring: usize,
    blocks_per_sm: usize,
}

impl Hold {
    const SHORT: Hold = Hold { ring: 4, blocks_per_sm: 3 };
    const LONG: Hold = Hold { ring: 8, blocks_per_sm: 2 };

    /// With a third block on each multiprocessor all row tiles are in flight in one round, where with two a second round is half empty (Qwen3-4B's q, k
    /// and v at one row: 2.47 ms a step before, 2.35 so).
    fn for_one_round(shape: &Shape, gpu: &GpuFacts) -> Option<Hold> {
        let tiles = shape.row_tiles();
        (tiles > 2 * gpu.sm_count && tiles <= Hold::SHORT.blocks_per_sm * gpu.sm_count).then_some(Hold::SHORT)
    }
    /// What of `shape` does not stay in registers, if it fits into shared memory beside `own_bytes` of the block. Sets the blocks of a multiprocessor.
    fn settle(self, shape: &Shape, tiling: &mut Tiling, rows: usize, own_bytes: usize, gpu: &GpuFacts) -> Option<Held> {
        let bytes = 8 * held_bytes(shape.k_tiles(), 1, self.ring);
        let fits = self.blocks_per_sm * (bytes + own_bytes) <= gpu.shared_max;
        if rows > HELD_ROWS_MAX || tiling.row_tiles > 1 || bytes == 0 || !fits {
            return None;
        }
        tiling.blocks_per_sm = self.blocks_per_sm;
        Some(Held { ring: self.ring, bytes })
    }
}

/// Weights of a block that wait in shared memory; none by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Held {
    ring: usize,
    bytes: usize,
}

impl Held {
    fn defines(&self) -> [(&'static str, String); 2] {
        [define("HELD", self.ring), define("HELD_SHARED", self.bytes)]
    }
}

/// Gate and up of rows that are normed already (`moe_gate`'s shared experts): the second launch of an op.
pub(super) struct GateUpOfNormed {
    pub op: &'static str,
    pub shape: Shape,
    pub rows: usize,
    pub out: BufferId,
    pub h: BufferId,
    pub weight: WeightId,
    /// Passed on, not read.
    pub norm: WeightId,
}

impl GateUpOfNormed {
    pub fn launch(&self, gpu: &GpuFacts) -> Result<Launch, LaunchError> {
        let GateUpOfNormed { op, shape, rows, out, h, weight, norm } = *self;
        let mut tiling = Tiling::sliced(rows, shape.row_tiles());
        let held_bytes = 8 * held_bytes(shape.k_tiles(), tiling.row_tiles, Hold::SHORT.ring);
        let held =
            rows <= HELD_ROWS_MAX && Hold::SHORT.blocks_per_sm * (held_bytes + tiling.slice_bytes()) <= gpu.shared_max;
        let held_bytes = if held { held_bytes } else { 0 };
        if held {
            tiling.blocks_per_sm = Hold::SHORT.blocks_per_sm;
        }
        let shared_bytes = held_bytes + tiling.slice_bytes();
        gpu.require_shared(op, shared_bytes)?;
        let mut defines = shape.defines();
        defines.extend(tiling.defines());
        defines.push(define("WARPS", BLOCK as usize / 32));
        defines.extend([flag("STAGED", false), flag("FUSED", false), flag("HELD", held)]);
        defines.push(Successor::AfterWait.define());
        defines.extend([define("HELD_SHARED", held_bytes), define_bits("EPS_BITS", 0.0)]);
        Ok(Launch {
            kernel: Kernel { source: "norm_gate_up.cu", function: "norm_gate_up", defines },
            grid: [(shape.row_tiles() / tiling.row_tiles) as u32, tiling.token_groups(rows), 1],
            block: BLOCK,
            shared_bytes: shared_bytes as u32,
            args: vec![Arg::Buffer(out), Arg::Buffer(h), Arg::Weight(weight), Arg::Weight(norm), Arg::U32(rows as u32)],
            ..Launch::plain()
        })
    }
}

impl NormGemm {
    pub(super) fn launches(&self, specs: &dyn Specs, gpu: &GpuFacts) -> Result<Vec<Launch>, LaunchError> {
        let op = "norm_gemm";
        let shape = Shape::of(op, specs, self.weight)?;
        shape.require_slices(op, &[8])?;
        let (rows, x_stride) = (specs.rows(), stride(specs, self.x.buffer));
        let mut tiling = Tiling::sliced(rows, shape.row_tiles());
        let fused = rows <= FUSED_ROWS_MAX;
        let row_bytes = if fused { rows * shape.shared_stride() * 2 } else { 0 };
        let own_bytes = tiling.slice_bytes() + row_bytes;
        let hold = Hold::for_one_round(&shape, gpu);
        let held = hold.and_then(|hold| hold.settle(&shape, &mut tiling, rows, own_bytes, gpu)).unwrap_or_default();
        let shared_bytes = held.bytes + own_bytes;
        gpu.require_shared(op, shared_bytes)?;
        let mut defines = shape.defines();
        defines.extend(tiling.defines());
        defines.extend(held.defines());
        defines.extend([flag("FUSED", fused), flag("HAS_BIAS", self.bias.is_some())]);
        let (x_stride_define, x_offset) = if fused { (x_stride, self.x.offset) } else { (shape.k, 0) };
        defines.extend([define("X_STRIDE", x_stride_define), define("X_OFFSET", x_offset)]);
        defines.push(define_bits("EPS_BITS", self.eps));
        let h = Arg::Workspace;
        let gemm = Launch {
            kernel: Kernel { source: "norm_gemm.cu", function: "norm_gemm", defines },
            grid: [(shape.row_tiles() / tiling.row_tiles) as u32, tiling.token_groups(rows), 1],
            block: BLOCK,
            shared_bytes: shared_bytes as u32,
            workspace_bytes: if fused { 0 } else { rows * shape.k * 2 },
            args: vec![
                Arg::Buffer(self.out),
                if fused { Arg::Buffer(self.x.buffer) } else { h },
                Arg::Weight(self.weight),
                Arg::Weight(self.norm),
                Arg::Weight(self.bias.unwrap_or(self.norm)),
                Arg::U32(rows as u32),
            ],
            ..Launch::plain()
        };
        if fused {
            return Ok(vec![gemm]);
        }
        let norm = NormApart { h, x: self.x, x_stride, norm: self.norm, eps: self.eps, rows, row_of: None };
        Ok(vec![norm.launch(), gemm])
    }
}

impl GemmAdd {
    /// `before_gate_up`: a dense gate_up comes next. Its first weights, asked for while this launch still asks for its own, would delay this one, so it gets
    /// no early edge (Qwen3-4B at one row: 2.49 ms a step, 2.62 with one), or one where everything here was asked for before the wait (2.34).
    pub(super) fn launches(
        &self,
        before_gate_up: bool,
        specs: &dyn Specs,
        gpu: &GpuFacts,
    ) -> Result<Vec<Launch>, LaunchError> {
        let op = "gemm_add";
        let shape = Shape::of(op, specs, self.weight)?;
        shape.require_slices(op, &[8])?;
        let rows = specs.rows();
        let mut tiling = Tiling::sliced(rows, shape.row_tiles());
        let own_bytes = tiling.slice_bytes();
        let hold = Some(Hold::LONG).filter(|_| before_gate_up && rows == 1);
        let held = hold.and_then(|hold| hold.settle(&shape, &mut tiling, rows, own_bytes, gpu));
        let shared_bytes = held.unwrap_or_default().bytes + own_bytes;
        gpu.require_shared(op, shared_bytes)?;
        let successor = if held.is_some() { Successor::AfterLoads } else { Successor::AtOnce };
        let mut defines = shape.defines();
        defines.extend(tiling.defines());
        defines.extend(held.unwrap_or_default().defines());
        defines.extend([flag("HAS_BIAS", self.bias.is_some()), successor.define()]);
        Ok(vec![Launch {
            kernel: Kernel { source: "gemm_add.cu", function: "gemm_add", defines },
            grid: [(shape.row_tiles() / tiling.row_tiles) as u32, tiling.token_groups(rows), 1],
            block: BLOCK,
            shared_bytes: shared_bytes as u32,
            args: vec![
                Arg::Buffer(self.x),
                Arg::Buffer(self.input),
                Arg::Weight(self.weight),
                Arg::Weight(self.bias.unwrap_or(self.weight)),
                Arg::U32(rows as u32),
            ],
            edge_out: !before_gate_up || rows >= *staging::ROWS.start() || held.is_some(),
            ..Launch::plain()
        }])
    }
}
