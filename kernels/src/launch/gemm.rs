//! Geometry of the dense GEMM ops: how rows of weights and tokens are grouped at each R. No choice here changes a bit.
//!
//! Weights with eight slices give each slice a warp; weights with one give each row tile a warp. Small steps normalise their
//! rows in every block (one launch); larger ones make the norm apart.

use super::staging::Staging;
use super::{Arg, GpuFacts, Kernel, Launch, LaunchError, Successor, define};
use crate::contract::{self, GemmKind, K_TILE, ROW_TILE};
use crate::ops::{GemmAdd, Head, NormGateUp, NormGemm};
use crate::spec::{BufferId, Cols, WeightForm, WeightId};
use crate::{Specs, pack};

/// Threads of a GEMM block: eight warps.
pub(super) const BLOCK: u32 = 256;
/// Most rows whose norm every block repeats.
pub(super) const FUSED_ROWS_MAX: usize = 16;
/// Most rows whose activations a block of the one-slice form keeps in shared memory.
const RESIDENT_ROWS_MAX: usize = 32;
/// Shared memory that a resident block may take: what is left still runs the successor's prologue on small steps.
const RESIDENT_BYTES_MAX: usize = 200 * 1024;

/// A GEMM weight's form, checked for what every kernel needs.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code)]
pub(super) struct Shape {
    pub kind: GemmKind,
    pub groups: usize,
    pub n: usize,
    pub k: usize,
    pub slices: usize,
}

impl Shape {
    pub fn of(op: &'static str, specs: &dyn Specs, weight: WeightId) -> Result<Shape, LaunchError> {
        let WeightForm::Gemm { kind, groups, n, k } = specs.weight(weight).form else {
            return Err(LaunchError::NoKernel { op });
        };
        let shape = |what, got, need: &str| Err(LaunchError::Shape { op, what, got, need: need.into() });
        if !k.is_multiple_of(K_TILE) {
            return shape("the inner width of a weight", k, "a multiple of 16");
        }
        if pack::is_gate_up(kind) && !n.is_multiple_of(ROW_TILE) {
            return shape("gate and up rows together", n, "a multiple of 16");
        }
        Ok(Shape { kind, groups, n, k, slices: contract::slices(kind, n, k) })
    }
    pub fn row_tiles(&self) -> usize {
        self.n.div_ceil(ROW_TILE)
    }
    pub fn k_tiles(&self) -> usize {
        self.k / K_TILE
    }
    /// Elements between token rows in shared memory: 32 mod 64, so that 16-byte loads meet no bank conflict.
    pub fn shared_stride(&self) -> usize {
        self.k.next_multiple_of(64) + 32
    }
    pub fn require_slices(&self, op: &'static str, allowed: &[usize]) -> Result<(), LaunchError> {
        if allowed.contains(&self.slices) {
            return Ok(());
        }
        Err(LaunchError::Shape { op, what: "the number of K slices", got: self.slices, need: format!("{allowed:?}") })
    }
    pub fn defines(&self) -> Vec<(&'static str, String)> {
        vec![define("WEIGHT_N", self.n), define("WEIGHT_K", self.k), define("SLICES", self.slices)]
    }
}

/// Multiprocessors of the GPU that tilings were tuned on, an H200; on others they are as right, and less well chosen.
const TUNED_SMS: usize = 132;
/// Rounds of blocks of two row tiles from which on four a block are better: tokens pass through the L2 half as often, and no second round begins.
const ROUNDS_OF_TWO_ROW_TILES: f64 = 1.3;

/// Row tiles and token tiles of one block or warp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tiling {
    pub row_tiles: usize,
    pub token_tiles: usize,
    pub blocks_per_sm: usize,
}

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
    pub fn defines(&self) -> [(&'static str, String); 3] {
        [
            define("ROW_TILES", self.row_tiles),
            define("TOKEN_TILES", self.token_tiles),
            define("BLOCKS_PER_SM", self.blocks_per_sm),
        ]
    }
    fn token_groups(&self, rows: usize) -> u32 {
        rows.div_ceil(self.token_tiles * 8) as u32
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

/// Rows of a one-slice gate_up that norms by itself whenever that is possible; with more a norm comes between o_proj and the GEMM.
const FUSED_GATE_UP_ROWS: usize = 8;
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
    /// Shared memory for what is held, beside `own_bytes` of the block; None if it does not fit.
    fn bytes(&self, shape: &Shape, tiling: &Tiling, rows: usize, own_bytes: usize, gpu: &GpuFacts) -> Option<usize> {
        let bytes = 8 * held_bytes(shape.k_tiles(), 1, self.ring);
        let fits = self.blocks_per_sm * (bytes + own_bytes) <= gpu.shared_max;
        (rows <= HELD_ROWS_MAX && tiling.row_tiles == 1 && bytes > 0 && fits).then_some(bytes)
    }
    fn defines(of: Option<(Hold, usize)>) -> [(&'static str, String); 2] {
        let (ring, bytes) = of.map_or((0, 0), |(hold, bytes)| (hold.ring, bytes));
        [define("HELD", ring), define("HELD_SHARED", bytes)]
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

/// The norm as a launch of its own, into the workspace or a buffer.
pub(super) struct NormApart {
    pub h: Arg,
    pub x: Cols,
    pub x_stride: usize,
    pub norm: WeightId,
    pub eps: f32,
    pub rows: usize,
    pub row_of: Option<BufferId>,
}

impl NormApart {
    pub fn launch(&self) -> Launch {
        let defines = vec![
            define("NORM_K", self.x.width),
            define("X_STRIDE", self.x_stride),
            define("X_OFFSET", self.x.offset),
            define_bits("EPS_BITS", self.eps),
        ];
        let mut args = vec![self.h, Arg::Buffer(self.x.buffer), Arg::Weight(self.norm), Arg::U32(self.rows as u32)];
        args.extend(self.row_of.map(Arg::Buffer));
        let function = if self.row_of.is_some() { "norm_logit_rows" } else { "norm_rows" };
        Launch {
            kernel: Kernel { source: "norm.cu", function, defines },
            grid: [self.rows as u32, 1, 1],
            block: BLOCK,
            workspace_bytes: if self.h == Arg::Workspace { self.rows * self.x.width * 2 } else { 0 },
            args,
            ..Launch::plain()
        }
    }
}

pub(super) fn define_bits(name: &'static str, value: f32) -> (&'static str, String) {
    (name, format!("0x{:08x}u", value.to_bits()))
}

/// Elements between rows of a 2-D buffer.
pub(super) fn stride(specs: &dyn Specs, buffer: BufferId) -> usize {
    specs.buffer(buffer).shape.iter().skip(1).product()
}

pub(super) fn flag(name: &'static str, value: bool) -> (&'static str, String) {
    define(name, usize::from(value))
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
        let held = Hold::for_one_round(&shape, gpu)
            .and_then(|hold| Some((hold, hold.bytes(&shape, &tiling, rows, own_bytes, gpu)?)));
        let shared_bytes = held.map_or(0, |(_, bytes)| bytes) + own_bytes;
        gpu.require_shared(op, shared_bytes)?;
        tiling.blocks_per_sm = held.map_or(tiling.blocks_per_sm, |(hold, _)| hold.blocks_per_sm);
        let mut defines = shape.defines();
        defines.extend(tiling.defines());
        defines.extend(Hold::defines(held));
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
        let held = hold.and_then(|hold| Some((hold, hold.bytes(&shape, &tiling, rows, own_bytes, gpu)?)));
        let shared_bytes = held.map_or(0, |(_, bytes)| bytes) + own_bytes;
        gpu.require_shared(op, shared_bytes)?;
        tiling.blocks_per_sm = held.map_or(tiling.blocks_per_sm, |(hold, _)| hold.blocks_per_sm);
        let successor = if held.is_some() { Successor::AfterLoads } else { Successor::AtOnce };
        let mut defines = shape.defines();
        defines.extend(tiling.defines());
        defines.extend(Hold::defines(held));
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
            edge_out: !before_gate_up || rows > FUSED_GATE_UP_ROWS || held.is_some(),
            ..Launch::plain()
        }])
    }
}

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
struct NormedWhole {
    op: &'static str,
    source: &'static str,
    shape: Shape,
    rows: usize,
    x: BufferId,
    norm: WeightId,
    eps: f32,
    row_of: Option<BufferId>,
    successor: Successor,
}

impl NormedWhole {
    /// `args` makes the arguments from that of the activations.
    fn launches(&self, gpu: &GpuFacts, args: impl Fn(Arg) -> Vec<Arg>) -> Result<Vec<Launch>, LaunchError> {
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

impl NormGateUp {
    pub(super) fn launches(&self, specs: &dyn Specs, gpu: &GpuFacts) -> Result<Vec<Launch>, LaunchError> {
        let op = "norm_gate_up";
        let shape = Shape::of(op, specs, self.weight)?;
        shape.require_slices(op, &[1, 8])?;
        let rows = specs.rows();
        let args = |x: Arg| {
            vec![Arg::Buffer(self.out), x, Arg::Weight(self.weight), Arg::Weight(self.norm), Arg::U32(rows as u32)]
        };
        if shape.slices == 1 {
            let (x, norm, eps) = (self.x, self.norm, self.eps);
            let (row_of, successor) = (None, Successor::AtOnce);
            return NormedWhole { op, source: "norm_gate_up.cu", shape, rows, x, norm, eps, row_of, successor }
                .launches(gpu, args);
        }
        let tiling = Tiling::sliced(rows, shape.row_tiles());
        let fused = rows <= FUSED_ROWS_MAX;
        let row_bytes = if fused { tiling.token_tiles * 8 * shape.shared_stride() * 2 } else { 0 };
        let shared_bytes = tiling.slice_bytes() + row_bytes;
        gpu.require_shared(op, shared_bytes)?;
        let mut defines = shape.defines();
        defines.extend(tiling.defines());
        defines.push(define("WARPS", BLOCK as usize / 32));
        defines.extend([flag("STAGED", false), flag("FUSED", fused), flag("HELD", false)]);
        defines.push(Successor::AtOnce.define());
        defines.extend([define("HELD_SHARED", 0), define_bits("EPS_BITS", self.eps)]);
        let h = Arg::Workspace;
        let gemm = Launch {
            kernel: Kernel { source: "norm_gate_up.cu", function: op, defines },
            grid: [(shape.row_tiles() / tiling.row_tiles) as u32, tiling.token_groups(rows), 1],
            block: BLOCK,
            shared_bytes: shared_bytes as u32,
            workspace_bytes: if fused { 0 } else { rows * shape.k * 2 },
            args: args(if fused { Arg::Buffer(self.x) } else { h }),
            ..Launch::plain()
        };
        if fused {
            return Ok(vec![gemm]);
        }
        let x = Cols { buffer: self.x, offset: 0, width: shape.k };
        let norm = NormApart { h, x, x_stride: shape.k, norm: self.norm, eps: self.eps, rows, row_of: None };
        Ok(vec![norm.launch(), gemm])
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
