//! Geometry of the small GEMMs on both sides of latent attention: W_UK with the append before it, W_UV after it.

use super::gemm::{Shape, define_bits, stride};
use super::{Arg, Kernel, Launch, LaunchError, Successor, define};
use crate::Specs;
use crate::contract::ROW_TILE;
use crate::ops::{MlaPrep, MlaUv};

/// Query heads whose rope part one warp rotates (`mla_prep.cu`, HEADS_A_PART).
const HEADS_A_PART: usize = 4;

/// Most warps, of a tile of 8 tokens each, that share a block's row tile of W_UV through L1.
const UV_WARPS_MAX: usize = 8;

/// Token tiles that a warp runs beside each other.
fn token_tiles(rows: usize) -> usize {
    rows.div_ceil(8).clamp(1, 4).next_power_of_two()
}

fn require_multiple(op: &'static str, what: &'static str, got: usize, of: usize) -> Result<(), LaunchError> {
    if got.is_multiple_of(of) {
        return Ok(());
    }
    Err(LaunchError::Shape { op, what, got, need: format!("a multiple of {of}") })
}

/// Warps of a block: at most `most`, all of one head.
fn warps(tiles_a_head: usize, most: usize) -> usize {
    (1..=most).rev().find(|warps| tiles_a_head.is_multiple_of(*warps)).expect("one divides every count")
}

impl MlaPrep {
    pub(super) fn launches(&self, specs: &dyn Specs) -> Result<Vec<Launch>, LaunchError> {
        let op = "mla_prep";
        Shape::of(op, specs, self.w_uk)?.require_slices(op, &[1])?;
        require_multiple(op, "the latent width", self.lora, ROW_TILE)?;
        require_multiple(op, "the rope width", self.rope_dim, 8)?;
        let (rows, token_tiles) = (specs.rows(), token_tiles(specs.rows()));
        let (q_stride, kv_stride) = (stride(specs, self.q.buffer), stride(specs, self.kv_a.buffer));
        for (what, got) in [
            ("the row stride of q", q_stride),
            ("the first column of q", self.q.offset),
            ("the row stride of kv_a", kv_stride),
            ("the first column of kv_a", self.kv_a.offset),
        ] {
            require_multiple(op, what, got, 4)?;
        }
        let tiles_a_head = self.lora / ROW_TILE;
        let warps = warps(tiles_a_head, 4);
        let defines = vec![
            define("HEADS", self.heads),
            define("NOPE_DIM", self.nope_dim),
            define("ROPE_DIM", self.rope_dim),
            define("LORA", self.lora),
            define("Q_STRIDE", q_stride),
            define("Q_OFFSET", self.q.offset),
            define("KV_STRIDE", kv_stride),
            define("KV_OFFSET", self.kv_a.offset),
            define("PAGES_PER_SLOT", stride(specs, self.paged.block_table)),
            define("WARPS", warps),
            define("TOKEN_TILES", token_tiles),
            define_bits("EPS_BITS", self.eps),
            Successor::beside_attention(rows).define(),
        ];
        let gemm_blocks = self.heads * tiles_a_head / warps;
        let units = rows * (2 + self.heads.div_ceil(HEADS_A_PART));
        let token_groups = rows.div_ceil(8 * token_tiles);
        let grid_x = gemm_blocks + units.div_ceil(warps * token_groups);
        let kernel = Kernel { source: "mla_prep.cu", function: op, defines };
        let args = vec![
            Arg::Buffer(self.q_lat),
            Arg::Buffer(self.q_rope),
            Arg::Buffer(self.paged.kv),
            Arg::Buffer(self.q.buffer),
            Arg::Buffer(self.kv_a.buffer),
            Arg::Weight(self.w_uk),
            Arg::Weight(self.kv_norm),
            Arg::Weight(self.rope),
            Arg::Buffer(self.slot),
            Arg::Buffer(self.position),
            Arg::Buffer(self.paged.block_table),
            Arg::U32(rows as u32),
        ];
        let grid = [grid_x as u32, token_groups as u32, 1];
        Ok(vec![Launch { kernel, grid, block: 32 * warps as u32, args, ..Launch::plain() }])
    }
}

impl MlaUv {
    pub(super) fn launches(&self, specs: &dyn Specs) -> Result<Vec<Launch>, LaunchError> {
        let op = "mla_uv";
        let shape = Shape::of(op, specs, self.w_uv)?;
        shape.require_slices(op, &[1])?;
        require_multiple(op, "a head's value width", shape.n, ROW_TILE)?;
        let rows = specs.rows();
        let warps = rows.div_ceil(8).min(UV_WARPS_MAX);
        let defines = vec![
            define("HEADS", shape.groups),
            define("V_DIM", shape.n),
            define("LORA", shape.k),
            define("WARPS", warps),
            Successor::beside_attention(rows).define(),
        ];
        let kernel = Kernel { source: "mla_uv.cu", function: op, defines };
        let blocks = shape.groups * shape.row_tiles();
        let args = vec![Arg::Buffer(self.out), Arg::Buffer(self.o_lat), Arg::Weight(self.w_uv), Arg::U32(rows as u32)];
        let grid = [blocks as u32, rows.div_ceil(8 * warps) as u32, 1];
        Ok(vec![Launch { kernel, grid, block: 32 * warps as u32, args, ..Launch::plain() }])
    }
}
