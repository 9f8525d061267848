//! moe_gate: norm, router and shared experts' first half. h = rms_norm(x) rounded; scores = softmax(W_router · h) in fp32; top-k;
//! shared_act = silu(gate)·up of the shared experts, rounded.
//!
//! Ties go to the lowest expert id. Group-limited greedy (DeepSeek-V2, §2.1.3): groups ranked by their best score, experts outside the best
//! `topk_group` groups get score 0. Chosen experts are written in ascending id with weight = score (· scaling, / Σ if norm_topk_prob).
//! Pad rows write expert id u32::MAX and weight 0. Adds the live rows' route counts to `step` words 5 and 6.

use super::Operation;
use super::rows::{gate_rows, norm_rows};
use super::step;
use crate::contract::GemmKind;
use crate::cpu::{CpuMemory, OpError};
use crate::math::route;
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, Cols, DType, WeightId};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopkMethod {
    Greedy,
    GroupLimitedGreedy { groups: usize, topk_groups: usize },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    pub experts: usize,
    pub top_k: usize,
    pub method: TopkMethod,
    /// Divide the chosen weights by their sum (+ 1e-20) when top_k > 1; then `scaling` is not applied (as in the reference code).
    pub norm_topk_prob: bool,
    pub scaling: f32,
}

#[derive(Clone, Debug, PartialEq)]
pub struct SharedGate {
    /// Out `[R, shared_inner]` bf16.
    pub act: BufferId,
    /// Gemm `[2·shared_inner, hidden]`.
    pub weight: WeightId,
}

#[derive(Clone, Debug, PartialEq)]
pub struct MoeGate {
    /// Out `[R, hidden]` bf16: the norm output, read again by `moe_up`.
    pub h: BufferId,
    /// Out `[R, top_k]` u32, ascending per row.
    pub expert_id: BufferId,
    /// Out `[R, top_k]` f32.
    pub expert_weight: BufferId,
    pub shared: Option<SharedGate>,
    pub x: BufferId,
    pub norm: WeightId,
    /// Gemm `[experts, hidden]`.
    pub router: WeightId,
    pub live: BufferId,
    /// In/out: route counters.
    pub step: BufferId,
    pub routing: Routing,
    /// Experts that this rank owns (for the counters).
    pub first_expert: usize,
    pub local_experts: usize,
    pub eps: f32,
}

impl Operation for MoeGate {
    fn name(&self) -> &'static str {
        "moe_gate"
    }
    fn reads(&self) -> Vec<BufferId> {
        vec![self.x, self.live, self.step]
    }
    fn writes(&self) -> Vec<BufferId> {
        let shared = self.shared.as_ref().map(|shared| shared.act);
        [self.h, self.expert_id, self.expert_weight, self.step].into_iter().chain(shared).collect()
    }
    fn weights(&self) -> Vec<WeightId> {
        let shared = self.shared.as_ref().map(|shared| shared.weight);
        [self.norm, self.router].into_iter().chain(shared).collect()
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        let routing = &self.routing;
        let (_, _, hidden) = check.gemm(self.router, &[GemmKind::Router])?;
        check.gemm_is(self.router, &[GemmKind::Router], 1, routing.experts, hidden)?;
        check.owned(routing.experts, self.first_expert, self.local_experts)?;
        let chosen = (1..=routing.experts).contains(&routing.top_k);
        check.holds("top_k", chosen, "between 1 and the number of experts", routing.top_k)?;
        if let TopkMethod::GroupLimitedGreedy { groups, topk_groups } = routing.method {
            check.holds(
                "groups",
                groups > 0 && routing.experts.is_multiple_of(groups),
                "a divisor of the experts",
                groups,
            )?;
            check.holds("topk_groups", (1..=groups).contains(&topk_groups), "between 1 and groups", topk_groups)?;
        }
        check.rows(self.h, DType::Bf16, hidden)?;
        check.rows(self.expert_id, DType::U32, routing.top_k)?;
        check.rows(self.expert_weight, DType::F32, routing.top_k)?;
        if let Some(shared) = &self.shared {
            let (_, n, _) = check.gemm(shared.weight, &[GemmKind::SharedGateUp])?;
            check.holds("shared gate | up rows", n.is_multiple_of(2), "even", n)?;
            check.gemm_is(shared.weight, &[GemmKind::SharedGateUp], 1, n, hidden)?;
            check.rows(shared.act, DType::Bf16, n / 2)?;
        }
        check.rows(self.x, DType::F32, hidden)?;
        check.vector(self.norm, hidden)?;
        check.rows(self.live, DType::U32, 1)?;
        check.step(self.step)?;
        check.distinct(&[self.h, self.x])
    }

    fn run(&self, memory: &mut CpuMemory) -> Result<(), OpError> {
        let weights = memory.weights.clone();
        let router = weights[self.router.0 as usize].gemm();
        let norm = weights[self.norm.0 as usize].vector();
        let (experts, top_k, hidden) = (self.routing.experts, self.routing.top_k, router.k);
        let (rows, precision) = (memory.rows_computed(), memory.precision);
        let mut scratch = std::mem::take(&mut memory.scratch);

        let mut h = memory.take_f32(self.h);
        norm_rows(memory, Cols { buffer: self.x, offset: 0, width: hidden }, norm, self.eps, 0..rows, &mut h);
        let batch = scratch.batch.uniform(1, rows, |_, row| row * hidden);
        let products = batch.multiply(router, &h, &mut scratch.products);

        let mut ids = memory.take_u32(self.expert_id);
        let mut expert_weights = memory.take_f32(self.expert_weight);
        scratch.scores.resize(experts, 0.0);
        let [mut local, mut remote] = [0, 0];
        for row in 0..rows {
            let ids = &mut ids[row * top_k..][..top_k];
            let expert_weights = &mut expert_weights[row * top_k..][..top_k];
            if memory.u32(self.live)[row] == 0 {
                ids.fill(u32::MAX);
                expert_weights.fill(0.0);
                continue;
            }
            products.of(0, row).update(&mut scratch.scores, |_, y, _| y);
            route::softmax(&mut scratch.scores);
            route::choose(&self.routing, &mut scratch.scores, ids, expert_weights);
            let owned = self.first_expert..self.first_expert + self.local_experts;
            let here = ids.iter().filter(|&&id| owned.contains(&(id as usize))).count() as u32;
            local += here;
            remote += top_k as u32 - here;
        }
        memory.put_u32(self.expert_id, ids);
        memory.put_f32(self.expert_weight, expert_weights);
        let step = memory.u32_mut(self.step);
        step[step::ROUTES_LOCAL] += local;
        step[step::ROUTES_REMOTE] += remote;

        if let Some(shared) = &self.shared {
            let weight = weights[shared.weight.0 as usize].gemm();
            let mut act = memory.take_f32(shared.act);
            let products = scratch.batch.multiply(weight, &h, &mut scratch.more_products);
            gate_rows(precision, weight.n / 2, &mut act, rows, |row| Some(products.of(0, row)));
            memory.put_f32(shared.act, act);
        }
        memory.put_f32(self.h, h);
        memory.scratch = scratch;
        Ok(())
    }
}
