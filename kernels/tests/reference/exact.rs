//! The contract written out as scalar loops: GEMM slices and trees, attention tiles and groups. Bits must agree.

use crate::rig::{Net, Random, bf16};
use slotgraph_kernels::contract::{
    ATTENTION_GROUP, ATTENTION_TILE, GemmKind, K_TILE, PAGE_TOKENS, slice_tiles, slices, tree,
};
use slotgraph_kernels::ops::{GemmAdd, MlaAttend, Op, Paged};
use slotgraph_kernels::{DType, Precision};

/// y = w · x by slices: K ascending inside a slice, multiply and add apart, then the balanced tree.
fn contract_dot(slices: usize, w: &[f32], x: &[f32]) -> f32 {
    let tiles = x.len().div_ceil(K_TILE);
    let parts: Vec<f32> = (0..slices)
        .map(|slice| {
            let span = slice_tiles(slice, slices, tiles);
            let mut sum = 0.0;
            for k in span.start * K_TILE..(span.end * K_TILE).min(x.len()) {
                let product = w[k] * x[k];
                sum += product;
            }
            sum
        })
        .collect();
    tree(&parts)
}

#[test]
fn a_gemm_has_the_bits_of_its_slices() {
    // 8, 8 and 1 slices; K inside one tile, odd, and over many; 1 … 9 rows, so that every block shape is used.
    let shapes = [(GemmKind::AttnOut, 70, 13), (GemmKind::AttnOut, 33, 341), (GemmKind::Down, 40, 130)];
    for (kind, n, k) in shapes {
        for rows in 1..=9 {
            let (mut net, mut random) = (Net::new(rows), Random(k as u64));
            let x = net.per_row("x", DType::F32, n);
            let input = net.per_row("input", DType::Bf16, k);
            let weight = net.gemm(&mut random, kind, 1, n, k);
            let mut memory = net.memory(Precision::Oracle);
            let inputs = random.floats(rows * k, 1.0);
            memory.f32_mut(input).copy_from_slice(&inputs);
            Op::GemmAdd(GemmAdd { x, input, weight, bias: None }).run(&mut memory).unwrap();
            for (row, inputs) in inputs.chunks(k).enumerate() {
                for (feature, w) in net.matrix(weight, 0).iter().enumerate() {
                    let w: Vec<f32> = w.iter().map(|&w| w as f32).collect();
                    let expected = 0.0 + contract_dot(slices(kind, n, k), &w, inputs);
                    assert_eq!(memory.f32(x)[row * n + feature].to_bits(), expected.to_bits(), "{kind:?} {rows} rows");
                }
            }
        }
    }
}

struct Softmax {
    m: f32,
    l: f32,
    o: Vec<f32>,
}

/// One head over `keys`: `[key][width]`, values being the first `values` columns.
fn contract_attention(precision: Precision, q: &[f32], keys: &[Vec<f32>], values: usize, scale: f32) -> Vec<f32> {
    let round = |x: f32| if precision == Precision::Contract { bf16(x) } else { x };
    let mut total: Option<Softmax> = None;
    for group in keys.chunks(ATTENTION_GROUP) {
        let mut state = Softmax { m: f32::NEG_INFINITY, l: 0.0, o: vec![0.0; values] };
        for tile in group.chunks(ATTENTION_TILE) {
            let scores: Vec<f32> =
                tile.iter().map(|key| q.iter().zip(key).fold(0.0_f32, |sum, (q, k)| sum + k * q) * scale).collect();
            let m = scores.iter().copied().fold(state.m, f32::max);
            let corr = libm::expf(state.m - m);
            let p: Vec<f32> = scores.iter().map(|s| libm::expf(s - m)).collect();
            state.m = m;
            state.l = state.l * corr + p.iter().fold(0.0, |sum, p| sum + p);
            for (column, o) in state.o.iter_mut().enumerate() {
                *o = tile.iter().zip(&p).fold(*o * corr, |o, (key, &p)| o + round(p) * key[column]);
            }
        }
        total = Some(match total {
            None => state,
            Some(total) => {
                let m = total.m.max(state.m);
                let (a, b) = (libm::expf(total.m - m), libm::expf(state.m - m));
                let o = total.o.iter().zip(&state.o).map(|(x, y)| x * a + y * b).collect();
                Softmax { m, l: total.l * a + state.l * b, o }
            }
        });
    }
    let total = total.expect("a row attends at least to itself");
    total.o.iter().map(|o| round(o / total.l)).collect()
}

#[test]
fn attention_has_the_bits_of_its_tiles_and_groups() {
    let (lora, rope_dim, scale) = (18, 6, 0.4);
    let (width, pages) = (lora + rope_dim, 20);
    for heads in [1, 2, 5, 8, 12] {
        for precision in [Precision::Oracle, Precision::Contract] {
            let positions = [0, 62, 63, 64, 255, 256, 300, 511, 512, 1000];
            let mut net = Net::new(positions.len());
            let kv = net.buffer("kv", DType::Bf16, &[pages, PAGE_TOKENS, width]);
            let block_table = net.buffer("block_table", DType::U32, &[2, pages]);
            let [slot, position] = ["slot", "position"].map(|name| net.per_row(name, DType::U32, 1));
            let o_lat = net.per_row("o_lat", DType::Bf16, heads * lora);
            let q_lat = net.per_row("q_lat", DType::Bf16, heads * lora);
            let q_rope = net.per_row("q_rope", DType::Bf16, heads * rope_dim);
            let partials = net.buffer("partials", DType::F32, &[1, 1]);
            let mut memory = net.memory(precision);
            let mut random = Random(heads as u64);
            for id in [kv, q_lat, q_rope] {
                memory.f32_mut(id).iter_mut().for_each(|x| *x = bf16(random.float(1.5)));
            }
            memory.u32_mut(position).copy_from_slice(&positions);
            // Pages in descending order, so that a page is not where its index says.
            (0..pages as u32).for_each(|at| memory.u32_mut(block_table)[at as usize] = pages as u32 - 1 - at);
            let paged = Paged { kv, block_table };
            let op = MlaAttend { o_lat, q_lat, q_rope, paged, slot, position, partials, heads, rope_dim, lora, scale };
            Op::MlaAttend(op).run(&mut memory).unwrap();

            let line = |key: usize| {
                let page = pages - 1 - key / PAGE_TOKENS;
                memory.f32(kv)[(page * PAGE_TOKENS + key % PAGE_TOKENS) * width..][..width].to_vec()
            };
            for (row, &position) in positions.iter().enumerate() {
                let keys: Vec<Vec<f32>> = (0..=position as usize).map(line).collect();
                for head in 0..heads {
                    let at = row * heads + head;
                    let q = [&memory.f32(q_lat)[at * lora..][..lora], &memory.f32(q_rope)[at * rope_dim..][..rope_dim]];
                    let expected = contract_attention(precision, &q.concat(), &keys, lora, scale);
                    let got = &memory.f32(o_lat)[at * lora..][..lora];
                    let same = got.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{precision:?}, {heads} heads, position {position}: {got:?}, not {expected:?}");
                }
            }
        }
    }
}
