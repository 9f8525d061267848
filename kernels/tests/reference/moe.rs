//! moe_gate, moe_up, moe_down, exchange, moe_combine.

use crate::cases::{Case, Expected};
use crate::rig::exactly::{apply, gated, norm, softmax, widened};
use crate::rig::{Net, Random};
use slotgraph_kernels::contract::{GemmKind, experts_of_rank};
use slotgraph_kernels::cpu::CpuMemory;
use slotgraph_kernels::ops::{
    AllGather, Exchange, ExchangeError, MoeCombine, MoeDown, MoeGate, MoeSum, MoeUp, Op, Routing, SharedGate,
    TopkMethod,
};
use slotgraph_kernels::{DType, OpError, Precision};
use std::sync::Arc;

const EPS: f32 = 1e-5;
const EXPERTS: usize = 12;
const TOP_K: usize = 3;
const HIDDEN: usize = 37;
const INNER: usize = 19;
const SHARED: usize = 23;
const NOBODY: u32 = u32::MAX;
/// Experts of five rows: several in one shard, one a pad row, others spread.
const IDS: [u32; 15] = [0, 1, 2, 3, 7, 11, NOBODY, NOBODY, NOBODY, 4, 5, 6, 0, 5, 11];

pub fn cases() -> Vec<Case> {
    let grouped = TopkMethod::GroupLimitedGreedy { groups: 4, topk_groups: 2 };
    vec![
        moe_gate("greedy", TopkMethod::Greedy, false),
        moe_gate("normalised", TopkMethod::Greedy, true),
        moe_gate("grouped", grouped, false),
        moe_up(1),
        moe_up(4),
        moe_down_residual(true),
        moe_down_residual(false),
        moe_down_partial(),
        moe_combine(),
    ]
}

fn moe_gate(name: &str, method: TopkMethod, norm_topk_prob: bool) -> Case {
    let (mut net, mut random) = (Net::new(5), Random(21));
    let x = net.per_row("x", DType::F32, HIDDEN);
    let h = net.per_row("h", DType::Bf16, HIDDEN);
    let expert_id = net.per_row("expert_id", DType::U32, TOP_K);
    let expert_weight = net.per_row("expert_weight", DType::F32, TOP_K);
    let act = net.per_row("shared_act", DType::Bf16, SHARED);
    let live = net.per_row("live", DType::U32, 1);
    let step = net.buffer("step", DType::U32, &[16]);
    let norm_weight = net.vector(&mut random, HIDDEN);
    let router = net.gemm(&mut random, GemmKind::Router, 1, EXPERTS, HIDDEN);
    let shared = net.gemm(&mut random, GemmKind::SharedGateUp, 1, 2 * SHARED, HIDDEN);
    let routing = Routing { experts: EXPERTS, top_k: TOP_K, method, norm_topk_prob, scaling: 2.5 };
    let op = Op::MoeGate(MoeGate {
        h,
        expert_id,
        expert_weight,
        shared: Some(SharedGate { act, weight: shared }),
        x,
        norm: norm_weight,
        router,
        live,
        step,
        routing,
        first_expert: 0,
        local_experts: EXPERTS,
        eps: EPS,
    });
    let expect = move |net: &Net, before: &CpuMemory, after: &CpuMemory| {
        let normed = |x: &[f32]| norm(&widened(x), &net.values(norm_weight), EPS.into());
        let h_lines = before.f32(x).chunks(HIDDEN).flat_map(normed).collect();
        // From here on, of the h that the op wrote: a choice of experts is not continuous.
        let (mut weights, mut acts) = (Vec::new(), Vec::new());
        for (row, h) in after.f32(h).chunks(HIDDEN).enumerate() {
            acts.extend(gated(&apply(&net.matrix(shared, 0), &widened(h))));
            if before.u32(live)[row] == 0 {
                weights.extend([0.0; TOP_K]);
                continue;
            }
            let mut scores = softmax(&apply(&net.matrix(router, 0), &widened(h)));
            let mut allowed: Vec<usize> = (0..EXPERTS).collect();
            if method != TopkMethod::Greedy {
                let best = |group: usize| scores[group * 3..][..3].iter().copied().fold(0.0, f64::max);
                let mut groups: Vec<usize> = (0..4).collect();
                groups.sort_by(|&a, &b| best(b).total_cmp(&best(a)));
                allowed.retain(|expert| groups[..2].contains(&(expert / 3)));
            }
            allowed.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
            let mut chosen = allowed[..TOP_K].to_vec();
            chosen.sort_unstable();
            let ids: Vec<usize> = after.u32(expert_id)[row * TOP_K..][..TOP_K].iter().map(|&id| id as usize).collect();
            assert_eq!(ids, chosen, "row {row}");
            let sum: f64 = if norm_topk_prob { chosen.iter().map(|&e| scores[e]).sum() } else { 1.0 / 2.5 };
            scores.iter_mut().for_each(|score| *score /= sum);
            weights.extend(chosen.iter().map(|&expert| scores[expert]));
        }
        [(h, h_lines), (expert_weight, weights), (act, acts)].map(|(id, values)| Expected::whole(id, values)).into()
    };
    Case::new(format!("moe_gate {name}"), net, op, vec![h, expert_weight, act], Box::new(expect))
        .words(live, vec![1, 1, 0, 1, 1])
}

#[test]
fn routes_are_counted_for_live_rows_by_owner_and_pad_rows_name_no_expert() {
    let case = moe_gate("greedy", TopkMethod::Greedy, false);
    let Op::MoeGate(mut gate) = case.op.clone() else { unreachable!() };
    let owned = experts_of_rank(1, 4, EXPERTS);
    (gate.first_expert, gate.local_experts) = (owned.start, owned.len());
    let mut memory = case.memory(Precision::Oracle);
    memory.u32_mut(gate.step)[5..7].copy_from_slice(&[100, 1000]);
    Op::MoeGate(gate.clone()).run(&mut memory).unwrap();
    let ids = memory.u32(gate.expert_id);
    let local = ids.iter().filter(|&&id| owned.contains(&(id as usize))).count() as u32;
    assert!(local > 0);
    assert_eq!(memory.u32(gate.step)[5..7], [100 + local, 1000 + 4 * TOP_K as u32 - local]);
    assert_eq!(ids[2 * TOP_K..3 * TOP_K], [NOBODY; TOP_K]);
    assert_eq!(memory.f32(gate.expert_weight)[2 * TOP_K..3 * TOP_K], [0.0; TOP_K]);
}

fn moe_up(ranks: usize) -> Case {
    let (mut net, mut random) = (Net::new(5), Random(22));
    let owned = experts_of_rank(ranks / 2, ranks, EXPERTS);
    let (first_expert, local_experts) = (owned.start, owned.len());
    let act = net.per_row("act", DType::Bf16, TOP_K * INNER);
    let h = net.per_row("h", DType::Bf16, HIDDEN);
    let expert_id = net.per_row("expert_id", DType::U32, TOP_K);
    let weight = net.gemm(&mut random, GemmKind::ExpertGateUp, local_experts, 2 * INNER, HIDDEN);
    let op =
        Op::MoeUp(MoeUp { act, h, expert_id, weight, first_expert, local_experts, top_k: TOP_K, early_choice: true });
    let expect = move |net: &Net, before: &CpuMemory, after: &CpuMemory| {
        let (mut values, mut ranges) = (Vec::new(), Vec::new());
        for (line, &id) in before.u32(expert_id).iter().enumerate() {
            let range = line * INNER..(line + 1) * INNER;
            if owned.contains(&(id as usize)) {
                let h = widened(&before.f32(h)[line / TOP_K * HIDDEN..][..HIDDEN]);
                values.extend(gated(&apply(&net.matrix(weight, id as usize - first_expert), &h)));
                ranges.push(range);
            } else {
                assert_eq!(before.f32(act)[range.clone()], after.f32(act)[range], "another rank's line was written");
            }
        }
        vec![Expected { buffer: act, ranges, values }]
    };
    Case::new(format!("moe_up of {ranks}"), net, op, vec![act], Box::new(expect)).words(expert_id, IDS.to_vec())
}

/// Σ w_e · y_e over the row's experts that `owned` has.
fn routed(net: &Net, before: &CpuMemory, down: &MoeDown, row: usize, owned: std::ops::Range<usize>) -> Vec<f64> {
    let mut sum = vec![0.0; HIDDEN];
    for line in row * TOP_K..(row + 1) * TOP_K {
        let id = before.u32(down.expert_id)[line] as usize;
        if owned.contains(&id) {
            let act = widened(&before.f32(down.act)[line * INNER..][..INNER]);
            let w = f64::from(before.f32(down.expert_weight)[line]);
            let y = apply(&net.matrix(down.weight, id - owned.start), &act);
            sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += w * y);
        }
    }
    sum
}

fn moe_down(net: &mut Net, sum: MoeSum, owned: std::ops::Range<usize>, with_shared: bool) -> MoeDown {
    let mut random = Random(23);
    MoeDown {
        sum,
        act: net.per_row("act", DType::Bf16, TOP_K * INNER),
        expert_id: net.per_row("expert_id", DType::U32, TOP_K),
        expert_weight: net.per_row("expert_weight", DType::F32, TOP_K),
        weight: net.gemm(&mut random, GemmKind::ExpertDown, owned.len(), HIDDEN, INNER),
        shared: with_shared.then(|| {
            let act = net.per_row("shared_act", DType::Bf16, SHARED);
            (act, net.gemm(&mut random, GemmKind::SharedDown, 1, HIDDEN, SHARED))
        }),
        experts: EXPERTS,
        first_expert: owned.start,
        local_experts: owned.len(),
        top_k: TOP_K,
    }
}

fn shared_output(net: &Net, before: &CpuMemory, down: &MoeDown, row: usize) -> Vec<f64> {
    match down.shared {
        Some((act, weight)) => apply(&net.matrix(weight, 0), &widened(&before.f32(act)[row * SHARED..][..SHARED])),
        None => vec![0.0; HIDDEN],
    }
}

fn moe_down_residual(with_shared: bool) -> Case {
    let mut net = Net::new(5);
    let x = net.per_row("x", DType::F32, HIDDEN);
    let down = moe_down(&mut net, MoeSum::Residual { x }, 0..EXPERTS, with_shared);
    let (op, expert_id) = (Op::MoeDown(down.clone()), down.expert_id);
    let expect = move |net: &Net, before: &CpuMemory, _: &CpuMemory| {
        let line = |row: usize| {
            let [routed, shared] =
                [routed(net, before, &down, row, 0..EXPERTS), shared_output(net, before, &down, row)];
            let x = &before.f32(x)[row * HIDDEN..][..HIDDEN];
            x.iter().zip(routed).zip(shared).map(|((&x, r), s)| f64::from(x) + r + s).collect::<Vec<_>>()
        };
        vec![Expected::whole(x, (0..5).flat_map(line).collect())]
    };
    Case::new(format!("moe_down, shared {with_shared}"), net, op, vec![x], Box::new(expect))
        .words(expert_id, IDS.to_vec())
}

fn moe_down_partial() -> Case {
    let mut net = Net::new(5);
    let owned = experts_of_rank(1, 2, EXPERTS);
    let partial = net.per_row("partial", DType::F32, HIDDEN);
    let shared = net.per_row("shared", DType::F32, HIDDEN);
    let down = moe_down(&mut net, MoeSum::Partial { partial, shared }, owned.clone(), true);
    let (op, expert_id) = (Op::MoeDown(down.clone()), down.expert_id);
    let expect = move |net: &Net, before: &CpuMemory, _: &CpuMemory| {
        let routed_lines = (0..5).flat_map(|row| routed(net, before, &down, row, owned.clone())).collect();
        let shared_lines = (0..5).flat_map(|row| shared_output(net, before, &down, row)).collect();
        vec![Expected::whole(partial, routed_lines), Expected::whole(shared, shared_lines)]
    };
    Case::new("moe_down partial", net, op, vec![partial, shared], Box::new(expect)).words(expert_id, IDS.to_vec())
}

fn moe_combine() -> Case {
    let mut net = Net::new(5);
    let x = net.per_row("x", DType::F32, HIDDEN);
    let gathered = net.buffer("gathered", DType::F32, &[4, 5, HIDDEN]);
    let shared = net.per_row("shared", DType::F32, HIDDEN);
    let expect = move |_: &Net, before: &CpuMemory, _: &CpuMemory| {
        let [x_in, gathered, shared] = [x, gathered, shared].map(|id| widened(before.f32(id)));
        let sum = |at: usize| (0..4).map(|rank| gathered[rank * 5 * HIDDEN + at]).sum::<f64>() + shared[at] + x_in[at];
        vec![Expected::whole(x, (0..5 * HIDDEN).map(sum).collect())]
    };
    let op = Op::MoeCombine(MoeCombine { x, gathered, shared, ranks: 4 });
    Case::new("moe_combine", net, op, vec![x], Box::new(expect))
}

/// Peers that are all this rank, plus their number.
struct Echo;

impl AllGather for Echo {
    fn all_gather(&self, rank: usize, send: &[f32], gathered: &mut [f32]) -> Result<(), ExchangeError> {
        if rank == 3 {
            return Err(ExchangeError::PeerGone { rank: 2, reason: "it was told to".into() });
        }
        for (peer, gathered) in gathered.chunks_mut(send.len()).enumerate() {
            gathered.iter_mut().zip(send).for_each(|(out, x)| *out = x + peer as f32);
        }
        Ok(())
    }
    fn leave(&self, _: usize, _: &str) {}
}

#[test]
fn an_exchange_moves_every_row_of_the_plan_and_passes_failures_on() {
    let mut net = Net::new(3);
    let gathered = net.buffer("gathered", DType::F32, &[4, 3, 2]);
    let partial = net.per_row("partial", DType::F32, 2);
    let exchange = |rank: usize| Op::Exchange(Exchange { gathered, partial, rank, ranks: 4 });
    exchange(1).check(&net).unwrap();
    let mut memory = net.memory(Precision::Oracle);
    memory.f32_mut(partial).copy_from_slice(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    assert_eq!(exchange(1).run(&mut memory), Err(OpError::NoPeers));
    memory.exchange = Some(Arc::new(Echo));
    memory.rows = 1;
    exchange(1).run(&mut memory).unwrap();
    let expected: Vec<f32> = (0..4).flat_map(|peer| (1..=6).map(move |x| (x + peer) as f32)).collect();
    assert_eq!(memory.f32(gathered), expected);
    let gone = ExchangeError::PeerGone { rank: 2, reason: "it was told to".into() };
    assert_eq!(exchange(3).run(&mut memory), Err(OpError::Exchange(gone)));
    assert_eq!(memory.f32(gathered), expected, "a failed exchange leaves the buffer in its place");
}

/// Every number of ranks gives the bits of one.
#[test]
fn expert_parallel_ranks_evaluate_the_tree_of_one_rank() {
    let case = moe_down_residual(true);
    let Op::MoeDown(down) = case.op.clone() else { unreachable!() };
    let MoeSum::Residual { x } = down.sum else { unreachable!() };
    let whole = case.run(case.memory(Precision::Contract));
    for ranks in [2, 4, 8] {
        let mut gathered_values = Vec::new();
        let mut shared_values = Vec::new();
        for rank in 0..ranks {
            // The rank's net: the same inputs, its own experts of the same weight.
            let owned = experts_of_rank(rank, ranks, EXPERTS);
            let mut net = Net::new(5);
            let partial = net.per_row("partial", DType::F32, HIDDEN);
            let mut op = moe_down(&mut net, MoeSum::Partial { partial, shared: partial }, owned.clone(), true);
            let shared = net.per_row("shared", DType::F32, HIDDEN);
            op.sum = MoeSum::Partial { partial, shared };
            op.weight = net.gemm_like(&case.net, down.weight, owned);
            op.shared = op.shared.map(|(act, _)| (act, net.gemm_like(&case.net, down.shared.unwrap().1, 0..1)));
            let op_run = Op::MoeDown(op.clone());
            op_run.check(&net).unwrap();
            let mut memory = net.memory(Precision::Contract);
            let before = case.memory(Precision::Contract);
            memory.u32_mut(op.expert_id).copy_from_slice(before.u32(down.expert_id));
            for (to, from) in [
                (op.act, down.act),
                (op.expert_weight, down.expert_weight),
                (op.shared.unwrap().0, down.shared.unwrap().0),
            ] {
                memory.f32_mut(to).copy_from_slice(before.f32(from));
            }
            op_run.run(&mut memory).unwrap();
            gathered_values.extend_from_slice(memory.f32(partial));
            shared_values = memory.f32(shared).to_vec();
        }
        let mut net = Net::new(5);
        let x_out = net.per_row("x", DType::F32, HIDDEN);
        let gathered = net.buffer("gathered", DType::F32, &[ranks, 5, HIDDEN]);
        let shared = net.per_row("shared", DType::F32, HIDDEN);
        let mut memory = net.memory(Precision::Contract);
        memory.f32_mut(x_out).copy_from_slice(case.memory(Precision::Contract).f32(x));
        memory.f32_mut(gathered).copy_from_slice(&gathered_values);
        memory.f32_mut(shared).copy_from_slice(&shared_values);
        Op::MoeCombine(MoeCombine { x: x_out, gathered, shared, ranks }).run(&mut memory).unwrap();
        assert_eq!(memory.f32(x_out), whole.f32(x), "{ranks} ranks");
    }
}
