//! What the dense GEMM ops share: a weight's shape, tiles of a block, the norm as a launch of its own. No choice here changes a bit.
//!
//! Weights with eight slices give each slice a warp (`sliced.rs`); weights with one give each row tile a warp (`whole.rs`, `staging.rs`). Small steps
//! normalise their rows in every block (one launch); larger ones make the norm apart.

use super::sliced::FUSED_ROWS_MAX;
use super::whole::NormedWhole;
use super::{Arg, GpuFacts, Kernel, Launch, LaunchError, Successor, define};
use crate::contract::{self, GemmKind, K_TILE, ROW_TILE};
use crate::ops::NormGateUp;
use crate::spec::{BufferId, Cols, WeightForm, WeightId};
use crate::{Specs, pack};

/// Threads of a GEMM block: eight warps.
pub(super) const BLOCK: u32 = 256;

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

/// Row tiles and token tiles of one block or warp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tiling {
    pub row_tiles: usize,
    pub token_tiles: usize,
    pub blocks_per_sm: usize,
}

impl Tiling {
    pub fn defines(&self) -> [(&'static str, String); 3] {
        [
            define("ROW_TILES", self.row_tiles),
            define("TOKEN_TILES", self.token_tiles),
            define("BLOCKS_PER_SM", self.blocks_per_sm),
        ]
    }
    pub fn token_groups(&self, rows: usize) -> u32 {
        rows.div_ceil(self.token_tiles * 8) as u32
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
            // The GEMM behind it asks for its weights meanwhile.
            Successor::AtOnce.define(),
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
