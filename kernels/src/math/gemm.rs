//! GEMM over packed panels (contract §2): K in 16-wide tiles, S slices, each slice one accumulator chain with K ascending,
//! multiply and add rounded apart; slices combine by the balanced tree.
//!
//! Used by every op with a weight. A panel's 16 outputs advance along K side by side in vector lanes, and up to four rows
//! share each weight load; each output still sees its own K order.

use super::exp::silu;
use super::{PARALLEL_WORK, join, rounded};
use crate::contract::{K_TILE, slice_tiles};
use crate::cpu::{PANEL, PackedGemm};
use crate::spec::Precision;
use pulp::{Arch, Simd, WithSimd};
use std::ops::Range;

/// Some input rows that one group of the weight multiplies.
#[derive(Clone, Copy, Debug)]
struct Job {
    group: usize,
    /// Its rows are `first .. first + count` of all jobs' rows; jobs follow each other without gaps.
    first: usize,
    count: usize,
}

/// The rows of a GEMM, by job. Reused.
#[derive(Default)]
pub struct Batch {
    /// Where each row's K inputs start.
    starts: Vec<usize>,
    jobs: Vec<Job>,
    /// For each line of a grouped GEMM's output its job and row within; a job of `ABSENT` has no products.
    places: Vec<(u32, u32)>,
    counts: Vec<usize>,
}

/// The job of a line that belongs to another rank, or to nobody.
const ABSENT: u32 = u32::MAX;
/// Most rows of one job, so that many rows of a narrow weight still divide.
const JOB_ROWS: usize = 64;

impl Batch {
    /// Each of `groups` groups multiplies `rows` rows; `start(group, row)` says where their inputs lie. Job
    /// `group · jobs a group + row / JOB_ROWS` holds a row, which `Products::of` knows.
    pub fn uniform(&mut self, groups: usize, rows: usize, start: impl Fn(usize, usize) -> usize) -> &mut Self {
        self.starts.clear();
        self.jobs.clear();
        for group in 0..groups {
            self.push_jobs(group, rows);
            self.starts.extend((0..rows).map(|row| start(group, row)));
        }
        self
    }

    /// Line `line` is multiplied by the group `group(line)`, if any, with the inputs at `start(line)`. Lines of a group keep
    /// their order.
    pub fn grouped(
        &mut self,
        groups: usize,
        lines: usize,
        group: impl Fn(usize) -> Option<usize>,
        start: impl Fn(usize) -> usize,
    ) -> &mut Self {
        self.counts.clear();
        self.counts.resize(groups, 0);
        for group in (0..lines).filter_map(&group) {
            self.counts[group] += 1;
        }
        self.starts.clear();
        self.jobs.clear();
        for group in 0..groups {
            let count = self.counts[group];
            // From here on, the next job row of the group.
            self.counts[group] = self.starts.len();
            self.push_jobs(group, count);
            self.starts.resize(self.starts.len() + count, 0);
        }
        self.places.clear();
        self.places.resize(lines, (ABSENT, 0));
        for line in 0..lines {
            if let Some(group) = group(line) {
                self.starts[self.counts[group]] = start(line);
                self.places[line].1 = self.counts[group] as u32;
                self.counts[group] += 1;
                self.places[line].0 = 0;
            }
        }
        // A line's row among all becomes its job and the row within.
        for place in self.places.iter_mut().filter(|place| place.0 != ABSENT) {
            let at = place.1 as usize;
            let job = self.jobs.partition_point(|job| job.first + job.count <= at);
            *place = (job as u32, (at - self.jobs[job].first) as u32);
        }
        self
    }

    fn push_jobs(&mut self, group: usize, rows: usize) {
        let first = self.starts.len();
        for at in (0..rows).step_by(JOB_ROWS) {
            self.jobs.push(Job { group, first: first + at, count: JOB_ROWS.min(rows - at) });
        }
    }

    /// Multiplies; the products lie in `products`, which grows as needed.
    pub fn multiply<'a>(&'a self, weight: &'a PackedGemm, x: &'a [f32], products: &'a mut Vec<f32>) -> Products<'a> {
        let len = self.starts.len() * weight.panels * PANEL;
        if products.len() < len {
            products.resize(len, 0.0);
        }
        let gemm = Gemm { weight, x, starts: &self.starts };
        gemm.split(&self.jobs, 0..weight.panels, &mut products[..len]);
        Products { values: &products[..len], batch: self, weight }
    }
}

/// Products `y = W x` of many rows with one weight.
#[derive(Clone, Copy)]
struct Gemm<'a> {
    weight: &'a PackedGemm,
    x: &'a [f32],
    starts: &'a [usize],
}

/// Outputs of one panel for one row.
type Lanes = [f32; PANEL];

impl Gemm<'_> {
    /// Halves the work until a piece is small, across jobs first, then across the panels of one job.
    fn split(&self, jobs: &[Job], panels: Range<usize>, out: &mut [f32]) {
        let work = out.len() * self.weight.k;
        if jobs.len() > 1 {
            let (left, right) = jobs.split_at(jobs.len() / 2);
            let at = (right[0].first - left[0].first) * panels.len() * PANEL;
            let (out_left, out_right) = out.split_at_mut(at);
            join(work, || self.split(left, panels.clone(), out_left), || self.split(right, panels.clone(), out_right));
        } else if let [job] = jobs {
            if work < PARALLEL_WORK || panels.len() < 2 {
                let starts = &self.starts[job.first..][..job.count];
                return Arch::new().dispatch(Block { gemm: self, group: job.group, starts, panels, out });
            }
            let middle = panels.start + panels.len() / 2;
            let (out_left, out_right) = out.split_at_mut((middle - panels.start) * job.count * PANEL);
            let (left, right) = (panels.start..middle, middle..panels.end);
            join(work, || self.split(jobs, left, out_left), || self.split(jobs, right, out_right));
        }
    }
}

/// Some panels of one job on one thread.
struct Block<'a> {
    gemm: &'a Gemm<'a>,
    group: usize,
    starts: &'a [usize],
    panels: Range<usize>,
    /// `[panel][row][PANEL]`.
    out: &'a mut [f32],
}

impl WithSimd for Block<'_> {
    type Output = ();

    /// Eight accumulators at a time, whatever the number of rows: as many as hide the latency of an addition.
    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let rows = self.starts.len();
        let mut row = 0;
        while row < rows {
            row += match rows - row {
                1 => self.row_block::<S, 1, 8, 4>(simd, row),
                2 => self.row_block::<S, 2, 4, 2>(simd, row),
                3 => self.row_block::<S, 3, 2, 2>(simd, row),
                _ => self.row_block::<S, 4, 2, 2>(simd, row),
            };
        }
    }
}

impl Block<'_> {
    /// R rows times all panels, V vectors of outputs at a time, then W, then one; gives R.
    #[inline(always)]
    fn row_block<S: Simd, const R: usize, const V: usize, const W: usize>(&mut self, simd: S, row: usize) -> usize {
        let vectors = self.panels.len() * PANEL / S::F32_LANES;
        let mut at = 0;
        while at + V <= vectors {
            self.tile::<S, R, V>(simd, row, at);
            at += V;
        }
        while W < V && at + W <= vectors {
            self.tile::<S, R, W>(simd, row, at);
            at += W;
        }
        while at < vectors {
            self.tile::<S, R, 1>(simd, row, at);
            at += 1;
        }
        R
    }

    /// R rows from `row` times V vectors of outputs from vector `at` of the block.
    #[inline(always)]
    fn tile<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, row: usize, at: usize) {
        let weight = self.gemm.weight;
        let parts = PANEL / S::F32_LANES;
        let mut rows: [&[f32]; R] = [&[]; R];
        for (r, x) in rows.iter_mut().enumerate() {
            *x = &self.gemm.x[self.starts[row + r]..][..weight.k];
        }
        let mut weights: [&[S::u32s]; V] = [&[]; V];
        for (v, w) in weights.iter_mut().enumerate() {
            let panel = weight.panel(self.group, self.panels.start + (at + v) / parts);
            *w = &S::as_simd_u32s(panel).0[(at + v) % parts..];
        }

        let tiles = weight.k.div_ceil(K_TILE);
        // The balanced tree by binary carry: after slice i, as many partial sums merge as i + 1 has trailing zero bits.
        let mut stack = [[[simd.splat_f32s(0.0); V]; R]; 4];
        let mut depth = 0;
        for slice in 0..weight.slices {
            let span = slice_tiles(slice, weight.slices, tiles);
            let span = span.start * K_TILE..(span.end * K_TILE).min(weight.k);
            let mut sum = chain(simd, &rows, &weights, span);
            for _ in 0..(slice + 1).trailing_zeros() {
                depth -= 1;
                for r in 0..R {
                    for v in 0..V {
                        sum[r][v] = simd.add_f32s(stack[depth][r][v], sum[r][v]);
                    }
                }
            }
            stack[depth] = sum;
            depth += 1;
        }

        let count = self.starts.len();
        let out = S::as_mut_simd_f32s(self.out).0;
        for (r, sums) in stack[0].iter().enumerate() {
            for (v, sum) in sums.iter().enumerate() {
                let (panel, part) = ((at + v) / parts, (at + v) % parts);
                out[(panel * count + row + r) * parts + part] = *sum;
            }
        }
    }
}

/// One slice: each output's chain from +0.0 along `span` of K.
#[inline(always)]
fn chain<S: Simd, const R: usize, const V: usize>(
    simd: S,
    rows: &[&[f32]; R],
    weights: &[&[S::u32s]; V],
    span: Range<usize>,
) -> [[S::f32s; V]; R] {
    let parts = PANEL / S::F32_LANES;
    let mut sum = [[simd.splat_f32s(0.0); V]; R];
    let mut w = [simd.splat_f32s(0.0); V];
    let (shift, odd) = (simd.splat_u32s(16), simd.splat_u32s(0xffff_0000));
    for k in (span.start..span.end).step_by(2) {
        for v in 0..V {
            w[v] = simd.transmute_f32s_u32s(simd.wrapping_dyn_shl_u32s(weights[v][k / 2 * parts], shift));
        }
        step(simd, &mut sum, rows, k, &w);
        if k + 1 < span.end {
            for v in 0..V {
                w[v] = simd.transmute_f32s_u32s(simd.and_u32s(weights[v][k / 2 * parts], odd));
            }
            step(simd, &mut sum, rows, k + 1, &w);
        }
    }
    sum
}

/// One k: every sum takes its product, rounded before it is added.
#[inline(always)]
fn step<S: Simd, const R: usize, const V: usize>(
    simd: S,
    sum: &mut [[S::f32s; V]; R],
    rows: &[&[f32]; R],
    k: usize,
    w: &[S::f32s; V],
) {
    for r in 0..R {
        let x = simd.splat_f32s(rows[r][k]);
        for v in 0..V {
            sum[r][v] = simd.add_f32s(sum[r][v], simd.mul_f32s(x, w[v]));
        }
    }
}

/// What a GEMM left: for each job `[panel][row][PANEL]`.
#[derive(Clone, Copy)]
pub struct Products<'a> {
    values: &'a [f32],
    batch: &'a Batch,
    weight: &'a PackedGemm,
}

impl<'a> Products<'a> {
    /// The products of row `row` of group `group`, of a uniform batch.
    #[inline(always)]
    pub fn of(&self, group: usize, row: usize) -> RowProducts<'a> {
        let jobs_per_group = self.batch.jobs.len() / self.weight.groups;
        self.at(group * jobs_per_group + row / JOB_ROWS, row % JOB_ROWS)
    }

    /// The products of a line of a grouped batch, if it has any.
    #[inline(always)]
    pub fn of_line(&self, line: usize) -> Option<RowProducts<'a>> {
        let (job, row) = self.batch.places[line];
        (job != ABSENT).then(|| self.at(job as usize, row as usize))
    }

    /// The products of row `row` of job `job`.
    #[inline(always)]
    fn at(&self, job: usize, row: usize) -> RowProducts<'a> {
        let job = self.batch.jobs[job];
        RowProducts {
            values: &self.values[(job.first * self.weight.panels + row) * PANEL..],
            stride: job.count * PANEL,
            panels: self.weight.panels,
        }
    }
}

/// One row's products, a panel at a time.
#[derive(Clone, Copy)]
pub struct RowProducts<'a> {
    values: &'a [f32],
    stride: usize,
    panels: usize,
}

impl<'a> RowProducts<'a> {
    #[inline(always)]
    pub fn panel(&self, panel: usize) -> &'a Lanes {
        self.values[panel * self.stride..][..PANEL].try_into().expect("a panel has PANEL outputs")
    }

    /// out[j] = f(y_j, out[j]) over the outputs in order.
    #[inline(always)]
    pub fn update(&self, out: &mut [f32], f: impl Fn(usize, f32, f32) -> f32) {
        for (panel, out) in out.chunks_mut(PANEL).enumerate() {
            let y = self.panel(panel);
            for (lane, out) in out.iter_mut().enumerate() {
                *out = f(panel * PANEL + lane, y[lane], *out);
            }
        }
    }

    /// out[j] = silu(gate_j) · up_j, rounded under the contract.
    #[inline(always)]
    pub fn gated(&self, precision: Precision, out: &mut [f32]) {
        for (panel, out) in out.chunks_mut(PANEL).enumerate() {
            let (gate, up) = (self.panel(panel), self.panel(panel + self.panels / 2));
            let mut act = *gate;
            for lane in 0..PANEL {
                act[lane] = rounded(precision, silu(gate[lane]) * up[lane]);
            }
            out.copy_from_slice(&act[..out.len()]);
        }
    }
}
