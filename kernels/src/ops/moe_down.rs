//! moe_down: routed down, shared down, and the sums of contract §3.
//!
//! y_e = W_down[e] · act; p_v = Σ over the row's experts of shard v in ascending id, p = p + w_e·y_e from +0.0; the balanced tree over this
//! rank's shards gives the rank's partial. At one rank: x = (tree + shared) + x in that order.

use super::Operation;
use super::rows::local_expert;
use crate::contract::{EXPERT_SHARDS, GemmKind, shard_of};
use crate::cpu::{CpuMemory, OpError, PANEL};
use crate::math::gemm::Products;
use crate::math::{by_row, vectorised};
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, DType, WeightId};
use std::ops::Range;

/// Where the sums go.
#[derive(Clone, Debug, PartialEq)]
pub enum MoeSum {
    /// One rank: add to the residual `[R, hidden]` f32.
    Residual { x: BufferId },
    /// Several ranks: the tree over this rank's shards and the shared experts' output, both `[R, hidden]` f32.
    Partial { partial: BufferId, shared: BufferId },
}

#[derive(Clone, Debug, PartialEq)]
pub struct MoeDown {
    pub sum: MoeSum,
    /// In `[R, top_k, inner]` bf16.
    pub act: BufferId,
    pub expert_id: BufferId,
    pub expert_weight: BufferId,
    /// Gemm, `local_experts` groups of `[hidden, inner]`.
    pub weight: WeightId,
    /// In `[R, shared_inner]` bf16 and Gemm `[hidden, shared_inner]`. Without shared experts their output is +0.0.
    pub shared: Option<(BufferId, WeightId)>,
    pub experts: usize,
    pub first_expert: usize,
    pub local_experts: usize,
    pub top_k: usize,
}

impl Operation for MoeDown {
    fn name(&self) -> &'static str {
        "moe_down"
    }
    fn reads(&self) -> Vec<BufferId> {
        let sums = match self.sum {
            MoeSum::Residual { x } => Some(x),
            MoeSum::Partial { .. } => None,
        };
        let shared = self.shared.map(|(act, _)| act);
        [self.act, self.expert_id, self.expert_weight].into_iter().chain(sums).chain(shared).collect()
    }
    fn writes(&self) -> Vec<BufferId> {
        match self.sum {
            MoeSum::Residual { x } => vec![x],
            MoeSum::Partial { partial, shared } => vec![partial, shared],
        }
    }
    fn weights(&self) -> Vec<WeightId> {
        [Some(self.weight), self.shared.map(|(_, weight)| weight)].into_iter().flatten().collect()
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        let (_, hidden, inner) = check.gemm(self.weight, &[GemmKind::ExpertDown])?;
        check.gemm_is(self.weight, &[GemmKind::ExpertDown], self.local_experts, hidden, inner)?;
        check.owned(self.experts, self.first_expert, self.local_experts)?;
        check.rows(self.act, DType::Bf16, self.top_k * inner)?;
        check.rows(self.expert_id, DType::U32, self.top_k)?;
        check.rows(self.expert_weight, DType::F32, self.top_k)?;
        if let Some((act, weight)) = self.shared {
            let (_, _, shared_inner) = check.gemm(weight, &[GemmKind::SharedDown])?;
            check.gemm_is(weight, &[GemmKind::SharedDown], 1, hidden, shared_inner)?;
            check.rows(act, DType::Bf16, shared_inner)?;
        }
        match self.sum {
            MoeSum::Residual { x } => {
                check.holds("local_experts", self.local_experts == self.experts, "all experts", self.local_experts)?;
                check.rows(x, DType::F32, hidden)
            }
            MoeSum::Partial { partial, shared } => {
                check.rows(partial, DType::F32, hidden)?;
                check.rows(shared, DType::F32, hidden)?;
                check.distinct(&[partial, shared])
            }
        }
    }

    fn run(&self, memory: &mut CpuMemory) -> Result<(), OpError> {
        let weights = memory.weights.clone();
        let weight = weights[self.weight.0 as usize].gemm();
        let (hidden, inner, top_k) = (weight.n, weight.k, self.top_k);
        let rows = memory.rows_computed();
        let mut scratch = std::mem::take(&mut memory.scratch);
        let (out_id, shared_id) = match self.sum {
            MoeSum::Residual { x } => (x, None),
            MoeSum::Partial { partial, shared } => (partial, Some(shared)),
        };
        let mut out = memory.take_f32(out_id);
        let mut shared_out = shared_id.map(|id| (id, memory.take_f32(id)));

        let (ids, expert_weights) = (memory.u32(self.expert_id), memory.f32(self.expert_weight));
        let local = |line: usize| local_expert(ids[line], self.first_expert, self.local_experts);
        let batch = scratch.batch.grouped(self.local_experts, rows * top_k, local, |line| line * inner);
        let routed = batch.multiply(weight, memory.f32(self.act), &mut scratch.products);
        let shared = self.shared.map(|(act, weight)| {
            let weight = weights[weight.0 as usize].gemm();
            let batch = scratch.more_batch.uniform(1, rows, |_, row| row * weight.k);
            batch.multiply(weight, memory.f32(act), &mut scratch.more_products)
        });

        let parts = Parts { op: self, shards: self.shards(), ids, expert_weights, routed, shared };
        by_row(&mut out[..rows * hidden], hidden, hidden * top_k * 2, &|row, out| {
            vectorised(
                #[inline(always)]
                || match self.sum {
                    MoeSum::Residual { .. } => parts.add_to_residual(row, out),
                    MoeSum::Partial { .. } => parts.partial(row, out),
                },
            );
        });
        if let Some((_, out)) = &mut shared_out {
            for (row, out) in out.chunks_exact_mut(hidden).take(rows).enumerate() {
                for (panel, out) in out.chunks_mut(PANEL).enumerate() {
                    out.copy_from_slice(&parts.shared(row, panel)[..out.len()]);
                }
            }
        }

        memory.put_f32(out_id, out);
        if let Some((id, out)) = shared_out {
            memory.put_f32(id, out);
        }
        memory.scratch = scratch;
        Ok(())
    }
}

impl MoeDown {
    /// This rank's virtual shards.
    fn shards(&self) -> Range<usize> {
        if self.local_experts == self.experts {
            return 0..EXPERT_SHARDS;
        }
        let last = self.first_expert + self.local_experts - 1;
        shard_of(self.first_expert, self.experts)..shard_of(last, self.experts) + 1
    }
}

/// What is summed for each row, a panel of outputs at a time.
struct Parts<'a> {
    op: &'a MoeDown,
    shards: Range<usize>,
    ids: &'a [u32],
    expert_weights: &'a [f32],
    routed: Products<'a>,
    shared: Option<Products<'a>>,
}

impl Parts<'_> {
    /// The tree over this rank's shards.
    #[inline(always)]
    fn routed(&self, row: usize, panel: usize) -> [f32; PANEL] {
        let mut sums = [[0.0; PANEL]; EXPERT_SHARDS];
        for line in row * self.op.top_k..(row + 1) * self.op.top_k {
            if let Some(products) = self.routed.of_line(line) {
                let (y, w) = (products.panel(panel), self.expert_weights[line]);
                let shard = shard_of(self.ids[line] as usize, self.op.experts) - self.shards.start;
                for lane in 0..PANEL {
                    sums[shard][lane] += w * y[lane];
                }
            }
        }
        shard_tree(sums, self.shards.len())
    }

    #[inline(always)]
    fn shared(&self, row: usize, panel: usize) -> [f32; PANEL] {
        self.shared.map_or([0.0; PANEL], |shared| *shared.of(0, row).panel(panel))
    }

    #[inline(always)]
    fn add_to_residual(&self, row: usize, x: &mut [f32]) {
        for (panel, x) in x.chunks_mut(PANEL).enumerate() {
            let (routed, shared) = (self.routed(row, panel), self.shared(row, panel));
            for (lane, x) in x.iter_mut().enumerate() {
                *x += routed[lane] + shared[lane];
            }
        }
    }

    #[inline(always)]
    fn partial(&self, row: usize, partial: &mut [f32]) {
        for (panel, partial) in partial.chunks_mut(PANEL).enumerate() {
            partial.copy_from_slice(&self.routed(row, panel)[..partial.len()]);
        }
    }
}

/// The balanced tree over the first `shards` (a power of two) sums, output by output.
#[inline(always)]
fn shard_tree(mut sums: [[f32; PANEL]; EXPERT_SHARDS], mut shards: usize) -> [f32; PANEL] {
    while shards > 1 {
        shards /= 2;
        for pair in 0..shards {
            let (left, right) = (sums[2 * pair], sums[2 * pair + 1]);
            for (sum, (left, right)) in sums[pair].iter_mut().zip(left.iter().zip(right)) {
                *sum = left + right;
            }
        }
    }
    sums[0]
}
