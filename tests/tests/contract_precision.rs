//! The contract's rounding: how far it moves log-probabilities from fp32, and that it rounds exactly where it says.

use slotgraph_kernels::spec::Role;
use slotgraph_kernels::{DType, Precision, Specs};
use slotgraph_runtime::checkpoint::Checkpoint;
use slotgraph_tests::oracle;
use slotgraph_tests::rig::{Ask, Rig};
use slotgraph_tests::stepwise::{Stepwise, View};
use slotgraph_tests::{MODELS, model};
use std::collections::BTreeMap;

/// No argmax may flip where the fp32 oracle prefers its token by more than this.
const FLIP_MARGIN: f64 = 0.5;

#[test]
fn dsv2_stays_near_fp32_teacher_forced() {
    stays_near("shakespeare-dsv2", "dsv2", 0.025);
}

#[test]
fn qwen3_stays_near_fp32_teacher_forced() {
    stays_near("shakespeare-qwen3", "qwen3", 0.020);
}

/// Scores the oracle's own answers in contract precision.
fn stays_near(folder: &str, file: &str, mean_limit: f64) {
    let checkpoint = Checkpoint::open(&model(folder)).unwrap();
    let cases: Vec<_> = oracle::cases(file).into_iter().filter(|case| case.prompt_ids.len() <= 512).collect();
    assert_eq!(cases.len(), 14, "prompts of at most 512 tokens");
    let rig = Rig::start(&checkpoint, |settings| settings.precision = Some("contract".into()));
    let asks: Vec<Ask> =
        cases.iter().map(|case| Ask::score(&[case.prompt_ids.as_slice(), &case.tokens].concat())).collect();
    let mut moved = Vec::new();
    for (case, said) in cases.iter().zip(rig.together(&asks)) {
        for (at, scored) in said.prompt[case.prompt_ids.len() - 1..].iter().enumerate() {
            assert_eq!(scored.id, case.tokens[at], "{}: scored token {at}", case.name);
            let margin = case.margin[at];
            assert!(
                scored.rank == 1 || margin <= FLIP_MARGIN,
                "{}: token {at} flips over an fp32 margin of {margin}",
                case.name
            );
            moved.push((f64::from(scored.logprob) - case.logprobs[at]).abs());
        }
    }
    let mean = moved.iter().sum::<f64>() / moved.len() as f64;
    let max = moved.iter().copied().fold(0.0, f64::max);
    println!(
        "{folder}: mean |Δlogprob| {mean:.4}, max {max:.4} over {} positions (limit of the mean {mean_limit})",
        moved.len()
    );
    assert!(mean > 0.0, "contract precision rounds");
    assert!(mean <= mean_limit, "{folder}: mean |Δlogprob| {mean} is above {mean_limit}");
}

fn is_bf16(value: f32) -> bool {
    value.to_bits() & 0xffff == 0
}

/// Every element of a bf16 point is representable in bf16; some element of every fp32 buffer is not.
#[test]
fn values_are_rounded_exactly_at_the_contract_s_points() {
    for (folder, file) in MODELS {
        let checkpoint = Checkpoint::open(&model(folder)).unwrap();
        let case = oracle::cases(file).into_iter().max_by_key(|case| case.prompt_ids.len().min(330)).unwrap();
        let text = &case.prompt_ids[..case.prompt_ids.len().min(330)];
        let mut stepwise = Stepwise::new(&checkpoint, Precision::Contract);
        // Per fp32 buffer: whether an element was seen that bf16 cannot hold.
        let mut unrounded: BTreeMap<String, bool> = BTreeMap::new();
        let mut rounded = 0;
        stepwise.score(text, 1, &mut |view: &View| {
            for id in view.placed.op.writes() {
                let spec = view.plan.buffer(id);
                match (spec.dtype, spec.role) {
                    (DType::U32, _) | (_, Role::Scratch) => {}
                    (DType::Bf16, _) => {
                        let bad = view.memory.f32(id).iter().position(|value| !is_bf16(*value));
                        let (op, layer) = (view.placed.op.name(), view.placed.layer);
                        assert_eq!(
                            bad, None,
                            "{folder}: {op} of layer {layer:?} leaves an unrounded element in {}",
                            spec.name
                        );
                        rounded += 1;
                    }
                    (DType::F32, _) => {
                        let seen = view.memory.f32(id).iter().any(|value| !is_bf16(*value));
                        *unrounded.entry(spec.name.clone()).or_default() |= seen;
                    }
                }
            }
        });
        assert!(rounded > 0);
        let flat: Vec<&String> = unrounded.iter().filter(|(_, seen)| !**seen).map(|(name, _)| name).collect();
        assert!(
            !unrounded.is_empty() && flat.is_empty(),
            "{folder}: fp32 buffers that hold only bf16 values: {flat:?}"
        );
    }
}
