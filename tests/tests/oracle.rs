//! The engine against Transformers in fp32: every case of every model, token for token and logprob for logprob.
//!
//! A position where the oracle's two best logits are closer than 2e-4 ends the comparison of tokens (fp32 programs may
//! choose either). A row whose router all but ties may be routed differently by another fp32 program: it is excepted and printed.

use slotgraph_graphs::spec::{Mlp, ModelSpec};
use slotgraph_kernels::ops::{MoeGate, TopkMethod};
use slotgraph_kernels::{Op, Precision, Specs};
use slotgraph_runtime::checkpoint::Checkpoint;
use slotgraph_tests::oracle::{self, Case};
use slotgraph_tests::rig::{Ask, Rig, Said};
use slotgraph_tests::stepwise::{Stepwise, View};
use slotgraph_tests::{MODELS, model};
use std::collections::BTreeMap;

/// Below this gap of the two best logits either may be chosen.
const TIE: f64 = 2e-4;
/// Most that a logit or a log-probability may differ.
const LIMIT: f64 = 1e-3;
/// Below this gap between the last chosen expert and the first one left out, the row is excepted.
const ROUTER_TIE: f64 = 1e-6;

#[test]
fn shakespeare_dsv2_says_what_the_oracle_says() {
    compare(0);
}

#[test]
fn shakespeare_qwen3_says_what_the_oracle_says() {
    compare(1);
}

#[test]
fn tiny_llama3_says_what_the_oracle_says() {
    compare(2);
}

#[test]
fn tiny_dsv2_grouped_says_what_the_oracle_says() {
    compare(3);
}

#[test]
fn tiny_qwen3_untied_says_what_the_oracle_says() {
    compare(4);
}

fn compare(number: usize) {
    let (folder, file) = MODELS[number];
    let checkpoint = Checkpoint::open(&model(folder)).unwrap();
    let cases = oracle::cases(file);
    let asks: Vec<Ask> = cases.iter().map(|case| Ask::greedy(&case.prompt_ids, case.tokens.len())).collect();
    let said = Rig::start(&checkpoint, |_| {}).together(&asks);
    let mut stepwise = None;
    let mut worst: f64 = 0.0;
    for (case, said) in cases.iter().zip(&said) {
        let compared = compare_tokens(case, said);
        let beyond = differences(case, said, compared, &mut worst);
        if !beyond.is_empty() {
            let stepwise = stepwise.get_or_insert_with(|| Stepwise::new(&checkpoint, Precision::Oracle));
            let gaps = router_gaps(stepwise, &checkpoint, case);
            for (at, what) in beyond {
                let row = case.prompt_ids.len() - 1 + at;
                let gap = gaps.get(row).copied().unwrap_or(f64::INFINITY);
                assert!(gap < ROUTER_TIE, "{}, position {at}: {what}; router gap {gap:e}", case.name);
                println!("{folder} {}: row {row} excepted, router gap {gap:e}: {what}", case.name);
            }
        }
    }
    println!("{folder}: largest difference of a logprob outside excepted rows {worst:.2e}");
}

/// Tokens equal up to a near-tie of the oracle; returns how many positions are comparable.
fn compare_tokens(case: &Case, said: &Said) -> usize {
    let ids = said.ids();
    assert_eq!(ids.len(), case.tokens.len(), "{}: tokens generated", case.name);
    for (at, (&want, &got)) in case.tokens.iter().zip(&ids).enumerate() {
        if want != got {
            let margin = case.margin[at];
            assert!(margin < TIE, "{}: token {at} is {got}, the oracle has {want} by a margin of {margin}", case.name);
            println!(
                "{}: token {at} differs inside the oracle's near-tie ({margin:e}); later ones are not compared",
                case.name
            );
            return at;
        }
    }
    case.tokens.len()
}

/// Positions whose logprobs differ by more than the limit.
fn differences(case: &Case, said: &Said, compared: usize, worst: &mut f64) -> Vec<(usize, String)> {
    let mut beyond = Vec::new();
    for at in 0..compared {
        let token = &said.tokens[at];
        let mut pairs = vec![(token.id, case.logprobs[at], f64::from(token.logprob))];
        if let Some(top) = case.top.get(at) {
            let ours: BTreeMap<u32, f32> = token.top.iter().copied().collect();
            assert_eq!(ours.len(), 5, "{}: five alternatives at {at}", case.name);
            // The fifth may change places with a sixth that is as good.
            pairs.extend(top.iter().filter_map(|(id, want)| ours.get(id).map(|got| (*id, *want, f64::from(*got)))));
            let least = token.top.last().expect("five alternatives").1;
            for (id, want) in top.iter().filter(|(id, _)| !ours.contains_key(id)) {
                if *want > f64::from(least) + LIMIT {
                    beyond.push((at, format!("alternative {id} ({want}) is missing from {:?}", token.top)));
                }
            }
        }
        for (id, want, got) in pairs {
            let difference = (want - got).abs();
            if difference > LIMIT {
                beyond.push((at, format!("logprob of {id} is {got}, the oracle has {want}")));
            } else {
                *worst = worst.max(difference);
            }
        }
    }
    beyond
}

#[test]
fn first_logits_are_the_oracle_s() {
    for (folder, file) in MODELS {
        compare_first_logits(&Checkpoint::open(&model(folder)).unwrap(), &oracle::cases(file));
    }
}

/// The logits from which the first new token is drawn, where the oracle has them.
fn compare_first_logits(checkpoint: &Checkpoint, cases: &[Case]) {
    let mut stepwise = Stepwise::new(checkpoint, Precision::Oracle);
    let mut compared = 0;
    for case in cases {
        let Some(want) = &case.first_logits else { continue };
        let text = [case.prompt_ids.as_slice(), &case.tokens[..1]].concat();
        let mut got = Vec::new();
        stepwise.score(&text, case.prompt_ids.len(), &mut |view: &View| {
            if let Op::Head(head) = &view.placed.op
                && view.positions.contains(&(case.prompt_ids.len() - 1))
            {
                got = view.memory.f32(head.logits)[..want.len()].to_vec();
            }
        });
        assert_eq!(got.len(), want.len(), "{}: logits", case.name);
        for (id, (want, got)) in want.iter().zip(&got).enumerate() {
            let difference = (want - f64::from(*got)).abs();
            assert!(difference <= LIMIT, "{}: first logit of {id} is {got}, the oracle has {want}", case.name);
        }
        compared += 1;
    }
    assert!(compared >= 2, "the oracle has first logits of some cases");
}

/// For each row of prompt and answer, the smallest gap in any layer between the last chosen expert and the best one left out.
fn router_gaps(stepwise: &mut Stepwise, checkpoint: &Checkpoint, case: &Case) -> Vec<f64> {
    let text = [case.prompt_ids.as_slice(), &case.tokens].concat();
    let mut gaps = vec![f64::INFINITY; text.len()];
    let mut routers: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
    let source = checkpoint.source();
    stepwise.score(&text, 1, &mut |view: &View| {
        let Op::MoeGate(gate) = &view.placed.op else { return };
        let router = routers.entry(gate.router.0).or_insert_with(|| {
            let spec = view.plan.weight(gate.router);
            let mut bits = vec![0; gate.routing.experts * checkpoint.spec.hidden];
            source.read(spec, 0, &mut bits).unwrap();
            bits.into_iter().map(|bits| f64::from(f32::from_bits(u32::from(bits) << 16))).collect()
        });
        let hidden = checkpoint.spec.hidden;
        let h = view.memory.f32(gate.h);
        for (row, position) in view.positions.clone().enumerate() {
            let gap = router_gap(gate, router, &h[row * hidden..(row + 1) * hidden]);
            gaps[position] = gaps[position].min(gap);
        }
    });
    gaps
}

fn router_gap(gate: &MoeGate, router: &[f64], h: &[f32]) -> f64 {
    let logits: Vec<f64> =
        router.chunks(h.len()).map(|row| row.iter().zip(h).map(|(w, x)| w * f64::from(*x)).sum()).collect();
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|logit| (logit - most).exp()).sum();
    let scores: Vec<f64> = logits.iter().map(|logit| (logit - most).exp() / sum).collect();
    let descending = |mut values: Vec<f64>| {
        values.sort_by(|a, b| b.total_cmp(a));
        values
    };
    let (allowed, group_gap) = match gate.routing.method {
        TopkMethod::Greedy => (scores, f64::INFINITY),
        TopkMethod::GroupLimitedGreedy { groups, topk_groups } => {
            let size = scores.len() / groups;
            let best: Vec<f64> =
                scores.chunks(size).map(|group| group.iter().copied().fold(f64::NEG_INFINITY, f64::max)).collect();
            let ranked = descending(best.clone());
            let last = ranked[topk_groups - 1];
            let gap = ranked.get(topk_groups).map_or(f64::INFINITY, |next| last - next);
            let kept = scores.chunks(size).zip(best).filter(|(_, best)| *best >= last);
            (kept.flat_map(|(group, _)| group.to_vec()).collect(), gap)
        }
    };
    let ranked = descending(allowed);
    let chosen = gate.routing.top_k;
    group_gap.min(ranked.get(chosen).map_or(f64::INFINITY, |next| ranked[chosen - 1] - next))
}

#[test]
fn the_models_cover_both_routers_and_a_dense_family() {
    let spec = |folder: &str| -> ModelSpec { Checkpoint::open(&model(folder)).unwrap().spec };
    assert!(matches!(spec("shakespeare-dsv2").mlp, Mlp::Moe(_)));
    assert!(spec("tiny-dsv2-grouped").is_group_limited());
    assert!(matches!(spec("tiny-llama3").mlp, Mlp::Dense { .. }));
}
