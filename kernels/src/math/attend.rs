//! Attention of one query row over the paged cache (contract §4), for multi-head latent and grouped-query attention alike.
//!
//! Keys come in groups of ATTENTION_GROUP from position 0. A group starts fresh and walks its tiles of ATTENTION_TILE keys with
//! the online softmax; groups combine by a left fold; O is divided by the normaliser at the end. Within that frame: a score is
//! (Σ k·q along the width, ascending, from +0.0) · scale; a tile's p are summed by ascending key from +0.0, then
//! l = l·corr + that sum; o = o·corr, then o += p·v by ascending key. Scores run with heads in vector lanes, outputs with value
//! columns in lanes, so neither order depends on the machine.

use super::exp::exp;
use super::{bf16, join, vectorised};
use crate::contract::{ATTENTION_GROUP, ATTENTION_TILE, PAGE_TOKENS};
use crate::spec::Precision;
use std::cell::Cell;
use std::ops::Range;

const _: () = assert!(ATTENTION_TILE == PAGE_TOKENS, "a tile is one page here");
const GROUP_TILES: usize = ATTENTION_GROUP / ATTENTION_TILE;
/// Most query heads handled together: the vector lanes of a score.
pub const HEADS_MAX: usize = 16;
/// Keys whose scores advance side by side.
const KEYS: usize = 8;

/// The cache of one layer, as the row's slot sees it.
#[derive(Clone, Copy)]
pub struct Cache<'a> {
    /// `[pages][PAGE_TOKENS][width]`.
    pub kv: &'a [f32],
    /// Page of each tile.
    pub pages: &'a [u32],
    pub width: usize,
    /// Keys to attend to.
    pub len: usize,
}

/// Which columns of a cache row some query heads read.
#[derive(Clone, Debug)]
pub struct Columns {
    pub keys: Range<usize>,
    pub values: Range<usize>,
}

/// At most HEADS_MAX query heads that share their keys and values.
pub struct Heads<'a> {
    pub precision: Precision,
    pub scale: f32,
    pub columns: Columns,
    pub cache: Cache<'a>,
    pub count: usize,
}

/// Running state of a softmax over keys, per head: maximum, normaliser, unnormalised output.
struct State<'a> {
    m: &'a mut [f32; HEADS_MAX],
    l: &'a mut [f32; HEADS_MAX],
    /// `[count][values]`.
    o: &'a mut [f32],
}

thread_local! {
    /// Working space, kept so that steps do not allocate. It is taken out while in use: a thread that waits for its groups may
    /// be given another row.
    static WORK: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

impl Heads<'_> {
    /// Multiply-adds of the whole row.
    pub fn work(&self) -> usize {
        self.cache.len * self.count * (self.columns.keys.len() + self.columns.values.len())
    }

    /// Attends for `count` heads whose queries `query(head)` gives as slices in column order; writes `[count][values]`.
    pub fn attend<'q>(&self, query: impl Fn(usize) -> [&'q [f32]; 2], out: &mut [f32]) {
        let mut work = WORK.take();
        match self.count {
            ..=4 => self.attend_lanes::<4>(query, &mut work, out),
            5..=8 => self.attend_lanes::<8>(query, &mut work, out),
            _ => self.attend_lanes::<HEADS_MAX>(query, &mut work, out),
        }
        WORK.set(work);
    }

    /// `L` ≥ count lanes.
    fn attend_lanes<'q, const L: usize>(
        &self,
        query: impl Fn(usize) -> [&'q [f32]; 2],
        work: &mut Vec<f32>,
        out: &mut [f32],
    ) {
        let values = self.count * self.columns.values.len();
        let groups = self.cache.len.div_ceil(ATTENTION_GROUP);
        let partial = values + 2 * HEADS_MAX;
        let queries = self.columns.keys.len() * L;
        // Groups of a long context on several threads need a partial each; otherwise two take turns.
        let threads = if self.work() / 2 < super::PARALLEL_WORK { 1 } else { rayon::current_num_threads() };
        let partials = if threads > 1 { groups } else { 2.min(groups) };
        let need = queries + partials * partial;
        if work.len() < need {
            work.resize(need, 0.0);
        }
        let (q, partials) = work[..need].split_at_mut(queries);
        for head in 0..L {
            let mut lane = q[head..].iter_mut().step_by(L);
            if head < self.count {
                for value in query(head).into_iter().flatten() {
                    *lane.next().expect("a query is as wide as its keys") = *value;
                }
            } else {
                lane.for_each(|lane| *lane = 0.0);
            }
        }
        let q = q.as_chunks().0;
        if threads > 1 {
            self.groups::<L>(q, 0..groups, partials);
            let (total, rest) = partials.split_at_mut(partial);
            for group in rest.chunks_exact_mut(partial) {
                self.fold(&mut state(total), &state(group));
            }
        } else {
            let (total, group) = partials.split_at_mut(partial);
            self.group::<L>(q, 0, &mut state(total));
            for at in 1..groups {
                self.group::<L>(q, at, &mut state(group));
                self.fold(&mut state(total), &state(group));
            }
        }
        self.finish(&state(&mut partials[..partial]), out);
    }

    /// Some groups, each into a partial of its own.
    fn groups<const L: usize>(&self, q: &[[f32; L]], groups: Range<usize>, partials: &mut [f32]) {
        if groups.len() == 1 {
            return self.group(q, groups.start, &mut state(partials));
        }
        let half = groups.len() / 2;
        let middle = groups.start + half;
        let (left, right) = partials.split_at_mut(partials.len() / groups.len() * half);
        let work = self.work() / self.cache.len.div_ceil(ATTENTION_GROUP) * groups.len();
        join(work, || self.groups(q, groups.start..middle, left), || self.groups(q, middle..groups.end, right));
    }

    /// One group of keys, starting fresh.
    fn group<const L: usize>(&self, q: &[[f32; L]], group: usize, state: &mut State) {
        state.m.fill(f32::NEG_INFINITY);
        state.l.fill(0.0);
        state.o.fill(0.0);
        vectorised(
            #[inline(always)]
            || {
                for tile in group * GROUP_TILES..(group + 1) * GROUP_TILES {
                    let first = tile * ATTENTION_TILE;
                    if first < self.cache.len {
                        self.tile(q, tile, ATTENTION_TILE.min(self.cache.len - first), state);
                    }
                }
            },
        );
    }

    /// One tile of `len` keys, added to the group's state.
    #[inline(always)]
    fn tile<const L: usize>(&self, q: &[[f32; L]], tile: usize, len: usize, state: &mut State) {
        let page = self.cache.pages[tile] as usize * PAGE_TOKENS * self.cache.width;
        let page = &self.cache.kv[page..page + PAGE_TOKENS * self.cache.width];
        let mut p = [[0.0; L]; ATTENTION_TILE];
        self.scores(q, page, len, &mut p);
        let p = &mut p[..len];

        let (m, l) = (&mut state.m[..L], &mut state.l[..L]);
        let mut max: [f32; L] = std::array::from_fn(|head| m[head]);
        for scores in p.iter() {
            for head in 0..L {
                max[head] = if scores[head] > max[head] { scores[head] } else { max[head] };
            }
        }
        let corr: [f32; L] = std::array::from_fn(|head| exp(m[head] - max[head]));
        for scores in p.iter_mut() {
            for head in 0..L {
                scores[head] -= max[head];
            }
        }
        p.as_flattened_mut().iter_mut().for_each(|p| *p = exp(*p));
        let mut sum = [0.0; L];
        for p in p.iter() {
            for head in 0..L {
                sum[head] += p[head];
            }
        }
        for head in 0..L {
            m[head] = max[head];
            l[head] = l[head] * corr[head] + sum[head];
        }
        if self.precision == Precision::Contract {
            p.as_flattened_mut().iter_mut().for_each(|p| *p = bf16::round(*p));
        }

        let mut head = 0;
        while head + 4 <= self.count {
            self.outputs::<4, L>(page, p, &corr, head, state.o);
            head += 4;
        }
        if head + 2 <= self.count {
            self.outputs::<2, L>(page, p, &corr, head, state.o);
            head += 2;
        }
        if head < self.count {
            self.outputs::<1, L>(page, p, &corr, head, state.o);
        }
    }

    /// scale · (k · q) for the page's first `len` keys (and up to KEYS − 1 more, which nobody reads).
    #[inline(always)]
    fn scores<const L: usize>(&self, q: &[[f32; L]], page: &[f32], len: usize, out: &mut [[f32; L]; ATTENTION_TILE]) {
        let width = self.columns.keys.len();
        let q = &q[..width];
        for (block, out) in out.as_chunks_mut::<KEYS>().0.iter_mut().enumerate().take(len.div_ceil(KEYS)) {
            let keys: [&[f32]; KEYS] = std::array::from_fn(|key| {
                &page[(block * KEYS + key) * self.cache.width + self.columns.keys.start..][..width]
            });
            let mut sum = [[0.0; L]; KEYS];
            for column in 0..width {
                for key in 0..KEYS {
                    let k = keys[key][column];
                    for head in 0..L {
                        sum[key][head] += k * q[column][head];
                    }
                }
            }
            for key in 0..KEYS {
                out[key] = sum[key].map(|sum| sum * self.scale);
            }
        }
    }

    /// o = o · corr, then o += p · v, for H heads from `head`.
    #[inline(always)]
    fn outputs<const H: usize, const L: usize>(
        &self,
        page: &[f32],
        p: &[[f32; L]],
        corr: &[f32; L],
        head: usize,
        o: &mut [f32],
    ) {
        let width = self.columns.values.len();
        let mut column = 0;
        while column + 16 <= width {
            self.output_block::<H, L, 16>(page, p, corr, head, column, o);
            column += 16;
        }
        while column + 8 <= width {
            self.output_block::<H, L, 8>(page, p, corr, head, column, o);
            column += 8;
        }
        for column in column..width {
            self.output_block::<H, L, 1>(page, p, corr, head, column, o);
        }
    }

    /// D value columns from `column`.
    #[inline(always)]
    fn output_block<const H: usize, const L: usize, const D: usize>(
        &self,
        page: &[f32],
        p: &[[f32; L]],
        corr: &[f32; L],
        head: usize,
        column: usize,
        o: &mut [f32],
    ) {
        let width = self.columns.values.len();
        let mut sum = [[0.0; D]; H];
        for h in 0..H {
            sum[h].copy_from_slice(&o[(head + h) * width + column..][..D]);
            sum[h] = sum[h].map(|o| o * corr[head + h]);
        }
        let sum = accumulate(sum, p, head, &page[self.columns.values.start + column..], self.cache.width);
        for h in 0..H {
            o[(head + h) * width + column..][..D].copy_from_slice(&sum[h]);
        }
    }

    /// The left fold: `group` follows `total`.
    fn fold(&self, total: &mut State, group: &State) {
        let width = self.columns.values.len();
        for head in 0..self.count {
            let max = if group.m[head] > total.m[head] { group.m[head] } else { total.m[head] };
            let (a, b) = (exp(total.m[head] - max), exp(group.m[head] - max));
            total.m[head] = max;
            total.l[head] = total.l[head] * a + group.l[head] * b;
            let values = head * width..(head + 1) * width;
            for (o, group) in total.o[values.clone()].iter_mut().zip(&group.o[values]) {
                *o = *o * a + *group * b;
            }
        }
    }

    /// O / l, rounded under the contract.
    fn finish(&self, state: &State, out: &mut [f32]) {
        let width = self.columns.values.len();
        for (head, out) in out.chunks_exact_mut(width).enumerate().take(self.count) {
            let l = state.l[head];
            for (out, o) in out.iter_mut().zip(&state.o[head * width..]) {
                *out = super::rounded(self.precision, o / l);
            }
        }
    }
}

/// Adds p · v key by key: D columns of H heads.
#[inline(always)]
fn accumulate<const H: usize, const L: usize, const D: usize>(
    mut sum: [[f32; D]; H],
    p: &[[f32; L]],
    head: usize,
    values: &[f32],
    stride: usize,
) -> [[f32; D]; H] {
    for key in 0..p.len() {
        let v: [f32; D] = values[key * stride..][..D].try_into().expect("a block lies inside a cache row");
        let p: [f32; H] = p[key][head..head + H].try_into().expect("the heads are among the lanes");
        for h in 0..H {
            for d in 0..D {
                sum[h][d] += p[h] * v[d];
            }
        }
    }
    sum
}

/// A partial seen as its parts.
fn state(partial: &mut [f32]) -> State<'_> {
    let (m, rest) = partial.split_first_chunk_mut().expect("a partial starts with its maxima");
    let (l, o) = rest.split_first_chunk_mut().expect("a partial's normalisers follow its maxima");
    State { m, l, o }
}
