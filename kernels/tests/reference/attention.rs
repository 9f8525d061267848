//! mla_prep, mla_attend, mla_uv, gqa_prep, gqa_attend.

use crate::cases::{Case, Expected};
use crate::rig::exactly::{apply, dot, norm, softmax, widened};
use crate::rig::{Net, Random};
use slotgraph_kernels::contract::{GemmKind, PAGE_TOKENS};
use slotgraph_kernels::cpu::CpuMemory;
use slotgraph_kernels::ops::{GqaAttend, GqaPrep, MlaAttend, MlaPrep, MlaUv, Op, Paged};
use slotgraph_kernels::{BufferId, Cols, DType, WeightId};

const EPS: f32 = 1e-5;
const PAGES_PER_SLOT: usize = 11;
/// Slots of the rows (3 is the pad slot) and their positions: inside a tile, at its edges, across groups, alone.
const SLOTS: [u32; 6] = [0, 1, 2, 1, 3, 0];
const POSITIONS: [u32; 6] = [0, 63, 700, 64, 0, 255];

pub fn cases() -> Vec<Case> {
    let mut cases = vec![mla_prep(), mla_uv(), gqa_prep(true), gqa_prep(false)];
    // Head counts that fill the lanes, leave some empty, or divide by none of their widths.
    cases.extend([3, 8, 16, 17, 20].map(mla_attend));
    cases.extend([(6, 2), (3, 3), (16, 1)].map(|(heads, kv_heads)| gqa_attend(heads, kv_heads)));
    cases
}

struct Cache {
    paged: Paged,
    slot: BufferId,
    position: BufferId,
}

impl Cache {
    /// Pages are dealt to slots out of order; the pad slot's table is all page 0.
    fn new(net: &mut Net, width: usize) -> Self {
        let pages = 3 * PAGES_PER_SLOT + 1;
        let kv = net.buffer("kv", DType::Bf16, &[pages, PAGE_TOKENS, width]);
        let block_table = net.buffer("block_table", DType::U32, &[4, PAGES_PER_SLOT]);
        let slot = net.per_row("slot", DType::U32, 1);
        let position = net.per_row("position", DType::U32, 1);
        Cache { paged: Paged { kv, block_table }, slot, position }
    }

    fn fill(&self, case: Case) -> Case {
        let page = |at: u32| 1 + at * 7 % (3 * PAGES_PER_SLOT as u32);
        let mut table: Vec<u32> = (0..3 * PAGES_PER_SLOT as u32).map(page).collect();
        table.resize(4 * PAGES_PER_SLOT, 0);
        let case = case.words(self.paged.block_table, table);
        case.words(self.slot, SLOTS.to_vec()).words(self.position, POSITIONS.to_vec())
    }
}

/// First element of the cache row of `slot` at `position`.
fn at(memory: &CpuMemory, paged: Paged, width: usize, slot: u32, position: usize) -> usize {
    let page = memory.u32(paged.block_table)[slot as usize * PAGES_PER_SLOT + position / PAGE_TOKENS];
    (page as usize * PAGE_TOKENS + position % PAGE_TOKENS) * width
}

fn rotate_pairs(x: &[f64], turn: &[[f64; 2]]) -> Vec<f64> {
    x.chunks(2).zip(turn).flat_map(|(x, [cos, sin])| [x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin]).collect()
}

fn rotate_halves(x: &[f64], turn: &[[f64; 2]]) -> Vec<f64> {
    let (low, high) = x.split_at(x.len() / 2);
    let low_out = low.iter().zip(high).zip(turn).map(|((a, b), [cos, sin])| a * cos - b * sin);
    let high_out = low.iter().zip(high).zip(turn).map(|((a, b), [cos, sin])| b * cos + a * sin);
    low_out.chain(high_out).collect()
}

fn mla_prep() -> Case {
    let (mut net, mut random) = (Net::new(6), Random(11));
    let (heads, nope_dim, rope_dim, lora) = (3, 10, 6, 20);
    let (q_width, kv_width) = (heads * (nope_dim + rope_dim), lora + rope_dim);
    let cache = Cache::new(&mut net, kv_width);
    let attn_in = net.per_row("attn_in", DType::F32, q_width + kv_width);
    let q_lat = net.per_row("q_lat", DType::Bf16, heads * lora);
    let q_rope = net.per_row("q_rope", DType::Bf16, heads * rope_dim);
    let kv_norm = net.vector(&mut random, lora);
    let w_uk = net.gemm(&mut random, GemmKind::KeyUp, heads, lora, nope_dim);
    let rope = net.rope(PAGES_PER_SLOT * PAGE_TOKENS, rope_dim / 2, 1.25);
    let paged = cache.paged;
    let op = Op::MlaPrep(MlaPrep {
        q_lat,
        q_rope,
        paged,
        q: Cols { buffer: attn_in, offset: 0, width: q_width },
        kv_a: Cols { buffer: attn_in, offset: q_width, width: kv_width },
        kv_norm,
        w_uk,
        rope,
        slot: cache.slot,
        position: cache.position,
        heads,
        nope_dim,
        rope_dim,
        lora,
        eps: EPS,
    });
    let expect = move |net: &Net, before: &CpuMemory, _: &CpuMemory| {
        let (mut lat, mut roped, mut kv, mut ranges) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (row, line) in before.f32(attn_in).chunks(q_width + kv_width).enumerate() {
            let (line, turn) = (widened(line), net.turn(rope, POSITIONS[row] as usize));
            for (head, q) in line[..q_width].chunks(nope_dim + rope_dim).enumerate() {
                lat.extend(apply(&net.matrix(w_uk, head), &q[..nope_dim]));
                roped.extend(rotate_pairs(&q[nope_dim..], &turn));
            }
            kv.extend(norm(&line[q_width..q_width + lora], &net.values(kv_norm), EPS.into()));
            kv.extend(rotate_pairs(&line[q_width + lora..], &turn));
            let start = at(before, paged, kv_width, SLOTS[row], POSITIONS[row] as usize);
            ranges.push(start..start + kv_width);
        }
        vec![
            Expected::whole(q_lat, lat),
            Expected::whole(q_rope, roped),
            Expected { buffer: paged.kv, ranges, values: kv },
        ]
    };
    cache.fill(Case::new("mla_prep", net, op, vec![q_lat, q_rope, paged.kv], Box::new(expect)))
}

/// Attention of every row: query(row, head), and the columns of its keys and values.
fn attend(
    before: &CpuMemory,
    paged: Paged,
    width: usize,
    heads: usize,
    scale: f32,
    query: impl Fn(usize, usize) -> Vec<f64>,
    columns: impl Fn(usize) -> [std::ops::Range<usize>; 2],
) -> Vec<f64> {
    let mut out = Vec::new();
    for (row, (&slot, &position)) in SLOTS.iter().zip(&POSITIONS).enumerate() {
        let line = |key: usize| widened(&before.f32(paged.kv)[at(before, paged, width, slot, key)..][..width]);
        let cache: Vec<Vec<f64>> = (0..=position as usize).map(line).collect();
        for head in 0..heads {
            let [keys, values] = columns(head);
            let q = query(row, head);
            let scores: Vec<f64> = cache.iter().map(|line| dot(&line[keys.clone()], &q) * f64::from(scale)).collect();
            let p = softmax(&scores);
            out.extend(values.map(|column| cache.iter().zip(&p).map(|(line, p)| line[column] * p).sum::<f64>()));
        }
    }
    out
}

fn scratch(net: &mut Net) -> BufferId {
    net.buffer("partials", DType::F32, &[1, 1])
}

fn mla_attend(heads: usize) -> Case {
    let mut net = Net::new(6);
    let (lora, rope_dim, scale) = (21, 6, 0.31);
    let cache = Cache::new(&mut net, lora + rope_dim);
    let o_lat = net.per_row("o_lat", DType::Bf16, heads * lora);
    let q_lat = net.per_row("q_lat", DType::Bf16, heads * lora);
    let q_rope = net.per_row("q_rope", DType::Bf16, heads * rope_dim);
    let partials = scratch(&mut net);
    let (paged, slot, position) = (cache.paged, cache.slot, cache.position);
    let op = MlaAttend { o_lat, q_lat, q_rope, paged, slot, position, partials, heads, rope_dim, lora, scale };
    let expect = move |_: &Net, before: &CpuMemory, _: &CpuMemory| {
        let query = |row: usize, head: usize| {
            let at = row * heads + head;
            let [lat, rope] =
                [(q_lat, lora), (q_rope, rope_dim)].map(|(id, n)| widened(&before.f32(id)[at * n..][..n]));
            [lat, rope].concat()
        };
        let columns = |_| [0..lora + rope_dim, 0..lora];
        vec![Expected::whole(o_lat, attend(before, paged, lora + rope_dim, heads, scale, query, columns))]
    };
    cache.fill(Case::new(format!("mla_attend of {heads}"), net, Op::MlaAttend(op), vec![o_lat], Box::new(expect)))
}

fn mla_uv() -> Case {
    let (mut net, mut random) = (Net::new(5), Random(12));
    let (heads, v, lora) = (3, 13, 20);
    let out = net.per_row("out", DType::Bf16, heads * v);
    let o_lat = net.per_row("o_lat", DType::Bf16, heads * lora);
    let w_uv = net.gemm(&mut random, GemmKind::ValueUp, heads, v, lora);
    let expect = move |net: &Net, before: &CpuMemory, _: &CpuMemory| {
        let lines = before.f32(o_lat).chunks(lora).enumerate();
        let values = lines.flat_map(|(at, o)| apply(&net.matrix(w_uv, at % heads), &widened(o)));
        vec![Expected::whole(out, values.collect())]
    };
    Case::new("mla_uv", net, Op::MlaUv(MlaUv { out, o_lat, w_uv }), vec![out], Box::new(expect))
}

fn gqa_prep(with_norm: bool) -> Case {
    let (mut net, mut random) = (Net::new(6), Random(13));
    let (heads, kv_heads, head_dim) = (6, 2, 12);
    let width = 2 * kv_heads * head_dim;
    let cache = Cache::new(&mut net, width);
    let qkv = net.per_row("qkv", DType::F32, (heads + 2 * kv_heads) * head_dim);
    let q = net.per_row("q", DType::Bf16, heads * head_dim);
    let qk_norm = with_norm.then(|| (net.vector(&mut random, head_dim), net.vector(&mut random, head_dim)));
    let rope = net.rope(PAGES_PER_SLOT * PAGE_TOKENS, head_dim / 2, 1.0);
    let (paged, slot, position) = (cache.paged, cache.slot, cache.position);
    let op = GqaPrep { q, paged, qkv, qk_norm, rope, slot, position, heads, kv_heads, head_dim, eps: EPS };
    let expect = move |net: &Net, before: &CpuMemory, _: &CpuMemory| {
        let (mut queries, mut kv, mut ranges) = (Vec::new(), Vec::new(), Vec::new());
        for (row, line) in before.f32(qkv).chunks((heads + 2 * kv_heads) * head_dim).enumerate() {
            let turn = net.turn(rope, POSITIONS[row] as usize);
            let normed = |x: &[f64], weight: Option<WeightId>| match weight {
                Some(weight) => norm(x, &net.values(weight), EPS.into()),
                None => x.to_vec(),
            };
            for (head, x) in widened(line).chunks(head_dim).enumerate() {
                if head < heads {
                    queries.extend(rotate_halves(&normed(x, qk_norm.map(|(q, _)| q)), &turn));
                } else if head < heads + kv_heads {
                    kv.extend(rotate_halves(&normed(x, qk_norm.map(|(_, k)| k)), &turn));
                } else {
                    kv.extend(x);
                }
            }
            let start = at(before, paged, width, SLOTS[row], POSITIONS[row] as usize);
            ranges.push(start..start + width);
        }
        vec![Expected::whole(q, queries), Expected { buffer: paged.kv, ranges, values: kv }]
    };
    let name = format!("gqa_prep, qk-norm {with_norm}");
    cache.fill(Case::new(name, net, Op::GqaPrep(op), vec![q, paged.kv], Box::new(expect)))
}

fn gqa_attend(heads: usize, kv_heads: usize) -> Case {
    let mut net = Net::new(6);
    let (head_dim, scale) = (26, 0.27);
    let width = 2 * kv_heads * head_dim;
    let cache = Cache::new(&mut net, width);
    let out = net.per_row("out", DType::Bf16, heads * head_dim);
    let q = net.per_row("q", DType::Bf16, heads * head_dim);
    let partials = scratch(&mut net);
    let (paged, slot, position) = (cache.paged, cache.slot, cache.position);
    let op = GqaAttend { out, q, paged, slot, position, partials, heads, kv_heads, head_dim, scale };
    let expect = move |_: &Net, before: &CpuMemory, _: &CpuMemory| {
        let query = |row: usize, head: usize| widened(&before.f32(q)[(row * heads + head) * head_dim..][..head_dim]);
        let columns = |head: usize| {
            let kv_head = head / (heads / kv_heads);
            [kv_head, kv_heads + kv_head].map(|part| part * head_dim..(part + 1) * head_dim)
        };
        vec![Expected::whole(out, attend(before, paged, width, heads, scale, query, columns))]
    };
    cache.fill(Case::new(format!("gqa_attend {heads}/{kv_heads}"), net, Op::GqaAttend(op), vec![out], Box::new(expect)))
}
