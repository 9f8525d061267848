//! The layout in which a GPU keeps weights, the host packer that defines it, and the launches that fill it on the device.
//!
//! Called by the CUDA device's upload and by tests. **Invariant:** one packed layout serves `mma.sync` at small R and `wgmma`
//! (weights as the register operand A) at large R; there is no second copy.
//!
//! A GEMM group `[n, k]` is `[n/16 row tiles][k/16 k tiles][32 lanes][8]` bf16: a lane's 16 bytes are its whole A operand of
//! `mma.m16n8k16`. Inside each pair of k tiles the k order is permuted so that lane quad t owns k = 32p + 8t … 8t+7 (tile 2p
//! takes the first four, tile 2p+1 the last four): activations of a pair are then one 16-byte load a lane. A last tile
//! without a partner gives quad t k = 4t … 4t+3. Rows are padded to 16 with zeros. Gate | up kinds interleave: rows 0–7 of
//! tile j are gate rows 8j …, rows 8–15 the up rows of the same outputs.

use crate::contract::{GemmKind, K_TILE, ROW_TILE};
use crate::launch::{Arg, Kernel, Launch};
use crate::spec::{TensorPart, WeightForm};
use std::ops::Range;

/// Elements of one packed tile.
const TILE: usize = ROW_TILE * K_TILE;

/// Whether the kind holds gate rows, then up rows, which the packed form interleaves.
pub fn is_gate_up(kind: GemmKind) -> bool {
    matches!(kind, GemmKind::GateUp | GemmKind::SharedGateUp | GemmKind::ExpertGateUp)
}

/// Groups of a form: what is uploaded at a time.
pub fn groups(form: &WeightForm) -> usize {
    match form {
        WeightForm::Gemm { groups, .. } => *groups,
        WeightForm::Vector { .. } | WeightForm::Table { .. } | WeightForm::Rope(_) => 1,
    }
}

/// Device bytes of one group. A weight's groups follow each other without gaps.
pub fn group_bytes(form: &WeightForm) -> usize {
    match form {
        WeightForm::Gemm { n, k, .. } => n.div_ceil(ROW_TILE) * k.div_ceil(K_TILE) * TILE * 2,
        WeightForm::Vector { n } => n * 4,
        WeightForm::Table { rows, cols } => rows * cols * 2,
        WeightForm::Rope(table) => table.positions * table.inv_freq_bits.len() * 2 * 4,
    }
}

/// Device bytes of a whole weight.
pub fn bytes(form: &WeightForm) -> usize {
    groups(form) * group_bytes(form)
}

/// Where element `at` of lane `lane` of tile (`row_tile`, `k_tile`) comes from: row and column of the group.
/// Either may lie past the group's end: then it is zero.
fn origin(
    kind: GemmKind,
    n: usize,
    k: usize,
    row_tile: usize,
    k_tile: usize,
    lane: usize,
    at: usize,
) -> (usize, usize) {
    let (row8, quad) = (lane / 4, lane % 4);
    let (low, upper_row, upper_k) = (at & 1, (at >> 1) & 1, (at >> 2) & 1);
    let row = if !is_gate_up(kind) {
        row_tile * ROW_TILE + upper_row * 8 + row8
    } else if row_tile * 8 + row8 < n / 2 {
        upper_row * (n / 2) + row_tile * 8 + row8
    } else {
        n
    };
    let tiles = k.div_ceil(K_TILE);
    let alone = tiles % 2 == 1 && k_tile + 1 == tiles;
    let first = if alone { k_tile * K_TILE + 4 * quad } else { k_tile / 2 * 2 * K_TILE + 8 * quad + 4 * (k_tile % 2) };
    (row, first + 2 * upper_k + low)
}

/// Packs one group, row-major `[n, k]` bf16 bits, into the device's GEMM layout. The device kernel gives the same bytes.
pub fn pack_group(kind: GemmKind, n: usize, k: usize, source: &[u16]) -> Vec<u16> {
    assert_eq!(source.len(), n * k, "a group of [{n}, {k}] has {} elements", n * k);
    let (row_tiles, k_tiles) = (n.div_ceil(ROW_TILE), k.div_ceil(K_TILE));
    let mut packed = vec![0; row_tiles * k_tiles * TILE];
    for (index, tile) in packed.chunks_exact_mut(TILE).enumerate() {
        for (at, value) in tile.iter_mut().enumerate() {
            let (row, column) = origin(kind, n, k, index / k_tiles, index % k_tiles, at / 8, at % 8);
            if row < n && column < k {
                *value = source[row * k + column];
            }
        }
    }
    packed
}

/// The launch that turns rows `rows` of one group (`Arg::Staging`, row-major bf16 as `Source::read_rows` gives them) into
/// their place in the group's device form (`Arg::Packed`: where the group starts). None for computed forms (`rope_table`
/// makes those). The rows of a group may come in any order; a range that ends at the last row also writes the padding.
pub fn launch(form: &WeightForm, rows: Range<usize>) -> Option<Launch> {
    let (function, n, k, gate_up) = match form {
        WeightForm::Gemm { kind, n, k, .. } => ("pack_gemm", *n, *k, is_gate_up(*kind)),
        WeightForm::Vector { n } => ("pack_vector", *n, 1, false),
        WeightForm::Table { rows, cols } => ("pack_table", *rows, *cols, false),
        WeightForm::Rope(_) => return None,
    };
    let defines =
        vec![("WEIGHT_N", n.to_string()), ("WEIGHT_K", k.to_string()), ("GATE_UP", u32::from(gate_up).to_string())];
    let args = vec![Arg::Packed, Arg::Staging, Arg::U32(rows.start as u32), Arg::U32(rows.len() as u32)];
    Some(plain("pack.cu", function, defines, (rows.len() * k).div_ceil(4), args))
}

/// The launch that fills one part of a dummy matrix in the staging area of its group (`[n, k]`, row-major) with
/// `crate::dummy::element` of its tensor. `columns` = the product of the tensor's extents but the first.
pub fn dummy_launch(part: &TensorPart, key: u64, k: usize) -> Launch {
    let columns: usize = part.tensor_shape[1..].iter().product();
    let count = part.rows.len() * columns;
    let args = vec![
        Arg::Staging,
        Arg::U64(key),
        Arg::U64(part.rows.start as u64),
        Arg::U64(part.rows.len() as u64),
        Arg::U64(columns as u64),
        Arg::U64(k as u64),
        Arg::U64(part.dst_row as u64),
        Arg::U32(u32::from(part.transpose)),
    ];
    plain("dummy.cu", "dummy_part", Vec::new(), count, args)
}

/// cos and sin of a rotary table, `[positions, pairs, 2]` f32: computed on the host, so that every device rotates alike.
pub fn rope_table(table: &crate::spec::RopeTable) -> Vec<f32> {
    let scale = f32::from_bits(table.scale_bits);
    let mut values = Vec::with_capacity(table.positions * table.inv_freq_bits.len() * 2);
    for position in 0..table.positions {
        for bits in &table.inv_freq_bits {
            let angle = position as f32 * f32::from_bits(*bits);
            values.push(libm::cosf(angle) * scale);
            values.push(libm::sinf(angle) * scale);
        }
    }
    values
}

/// A grid-stride launch outside any graph.
fn plain(
    source: &'static str,
    function: &'static str,
    defines: Vec<(&'static str, String)>,
    items: usize,
    args: Vec<Arg>,
) -> Launch {
    const BLOCK: usize = 256;
    const GRID_MAX: usize = 4096;
    Launch {
        kernel: Kernel { source, function, defines },
        grid: [items.div_ceil(BLOCK).clamp(1, GRID_MAX) as u32, 1, 1],
        block: BLOCK as u32,
        cluster: 1,
        shared_bytes: 0,
        workspace_bytes: 0,
        counters: 0,
        args,
        pdl: false,
        edge_out: true,
        shared_first: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every element of the group lands in exactly one place, and the rest is zero.
    #[test]
    fn packing_is_a_permutation_padded_with_zeros() {
        let shapes = [(16, 16), (16, 48), (32, 64), (20, 32), (40, 80), (64, 128)];
        for (kind, (n, k)) in
            shapes.into_iter().flat_map(|shape| [(GemmKind::AttnOut, shape), (GemmKind::GateUp, shape)])
        {
            if is_gate_up(kind) && n % 16 != 0 {
                continue;
            }
            let source: Vec<u16> = (0..n * k).map(|i| i as u16 + 1).collect();
            let packed = pack_group(kind, n, k, &source);
            assert_eq!(packed.len() * 2, group_bytes(&WeightForm::Gemm { kind, groups: 1, n, k }));
            let mut seen: Vec<u16> = packed.into_iter().filter(|value| *value != 0).collect();
            seen.sort_unstable();
            assert_eq!(seen, source, "{kind:?} [{n}, {k}]");
        }
    }

    /// One lane's bytes against the operand layout of mma.m16n8k16 written out by hand.
    #[test]
    fn a_lane_holds_its_operand_in_permuted_k_order() {
        let (n, k) = (32, 64);
        let source: Vec<u16> = (0..n * k).map(|i| i as u16).collect();
        let packed = pack_group(GemmKind::AttnOut, n, k, &source);
        let at =
            |row_tile: usize, k_tile: usize, lane: usize| &packed[((row_tile * 4 + k_tile) * 32 + lane) * 8..][..8];
        let element = |row: usize, column: usize| (row * k + column) as u16;
        // Row tile 1, k tile 3 (second of pair 1), lane 6: row 1 and 9, quad 2 owns k = 32 + 16 …, its second half.
        let want = [
            element(17, 52),
            element(17, 53),
            element(25, 52),
            element(25, 53),
            element(17, 54),
            element(17, 55),
            element(25, 54),
            element(25, 55),
        ];
        assert_eq!(at(1, 3, 6), want);
    }

    #[test]
    fn gate_and_up_of_an_output_share_a_tile() {
        let (n, k) = (32, 16);
        let source: Vec<u16> = (0..n * k).map(|i| i as u16).collect();
        let packed = pack_group(GemmKind::ExpertGateUp, n, k, &source);
        // Tile 1, lane 0: gate row 8 and up row 16 + 8, the lone last tile's k = 0 … 3.
        let tile = &packed[TILE..TILE + 8];
        let row = |row: usize| row * k;
        let want = [row(8), row(8) + 1, row(24), row(24) + 1, row(8) + 2, row(8) + 3, row(24) + 2, row(24) + 3];
        assert_eq!(tile, want.map(|v| v as u16));
    }
}
