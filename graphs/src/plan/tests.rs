//! Random valid plans verify; random damage is refused.

use super::{Plan, PlanError, RankShape};
use crate::model::build;
use crate::samples;
use crate::spec::{Attention, Mla, Mlp, ModelSpec};
use crate::step::StepLimits;
use proptest::prelude::*;
use proptest::sample::Index;
use slotgraph_kernels::ops::Op;
use slotgraph_kernels::{BufferId, DType, Role, Specs, WeightForm};

/// A sample model with its widths and layer kinds drawn anew.
fn model() -> impl Strategy<Value = ModelSpec> {
    let heads = prop::sample::select(vec![1usize, 2, 4, 6]);
    (0..4usize, 1..4usize, heads, 1..5usize, any::<bool>(), 0..3usize, 1..3usize).prop_map(
        |(which, layers, heads, width, tied, first_moe_layer, layer_freq)| {
            let mut spec = samples::all().swap_remove(which).1;
            spec.layers = layers;
            spec.hidden = 32 * width;
            spec.tied_head = tied;
            match &mut spec.attention {
                Attention::Mla(mla) => *mla = Mla { heads, kv_lora: 16 * width, ..mla.clone() },
                Attention::Gqa(gqa) => (gqa.heads, gqa.kv_heads) = (2 * heads, heads),
            }
            if let Mlp::Moe(moe) = &mut spec.mlp {
                moe.first_moe_layer = first_moe_layer;
                moe.layer_freq = layer_freq;
            }
            spec
        },
    )
}

fn limits() -> impl Strategy<Value = StepLimits> {
    (1..6usize, 2..9usize, 0..3usize).prop_map(|(slots_max, pages, launch_ahead)| StepLimits {
        slots_max,
        pages,
        launch_ahead,
        ..samples::limits()
    })
}

fn plan() -> impl Strategy<Value = Plan> {
    (model(), limits(), any::<Index>(), any::<Index>(), any::<Index>()).prop_map(
        |(spec, limits, ranks, rank, bucket)| {
            let ranks = if spec.experts().is_some() { [1, 2, 4, 8][ranks.index(4)] } else { 1 };
            let rank = RankShape { rank: rank.index(ranks), ranks };
            build(&spec, &limits, rank, *bucket.get(&limits.buckets)).expect("random models are buildable")
        },
    )
}

/// Whether `later` uses what `earlier` made for it alone.
fn feeds(plan: &Plan, earlier: &Op, later: &Op) -> bool {
    earlier.writes().into_iter().any(|id| {
        let lasting = matches!(plan.buffer(id).role, Role::SlotState | Role::Scratch);
        !lasting && !earlier.reads().contains(&id) && later.reads().contains(&id)
    })
}

proptest! {
    #[test]
    fn random_plans_verify_and_print(plan in plan()) {
        prop_assert_eq!(plan.verify(), Ok(()));
        prop_assert!(plan.to_string().contains("feed "));
    }

    #[test]
    fn buckets_share_buffers_and_weights(spec in model(), limits in limits()) {
        let plans = limits.buckets.iter().map(|&bucket| build(&spec, &limits, RankShape::SINGLE, bucket).unwrap());
        let plans: Vec<Plan> = plans.collect();
        for pair in plans.windows(2) {
            prop_assert_eq!(&pair[0].weights, &pair[1].weights);
            prop_assert_eq!(pair[0].buffers.len(), pair[1].buffers.len());
            for (small, large) in pair[0].buffers.iter().zip(&pair[1].buffers) {
                prop_assert_eq!((&small.name, small.dtype, small.role), (&large.name, large.dtype, large.role));
                prop_assert!(small.elements() <= large.elements());
            }
            prop_assert_eq!(&pair[0].ops, &pair[1].ops);
        }
    }

    #[test]
    fn a_missing_op_is_refused(mut plan in plan(), at in any::<Index>()) {
        plan.ops.remove(at.index(plan.ops.len()));
        prop_assert!(plan.verify().is_err());
    }

    #[test]
    fn an_op_before_its_inputs_is_refused(mut plan in plan(), at in any::<Index>()) {
        let pairs = (0..plan.ops.len() - 1).filter(|&at| feeds(&plan, &plan.ops[at].op, &plan.ops[at + 1].op));
        let at = *at.get(&pairs.collect::<Vec<_>>());
        let (earlier, later) = (plan.ops[at].layer, plan.ops[at + 1].layer);
        plan.ops.swap(at, at + 1);
        (plan.ops[at].layer, plan.ops[at + 1].layer) = (earlier, later);
        prop_assert!(plan.verify().is_err());
    }

    #[test]
    fn a_repeated_op_is_refused(mut plan in plan(), at in any::<Index>()) {
        // moe_combine alone names nothing whose second use would show.
        let shows = (0..plan.ops.len()).filter(|&at| !matches!(plan.ops[at].op, Op::MoeCombine(_)));
        let at = *at.get(&shows.collect::<Vec<_>>());
        plan.ops.insert(at, plan.ops[at].clone());
        prop_assert!(plan.verify().is_err());
    }

    #[test]
    fn a_repeated_name_is_refused(mut plan in plan(), from in any::<Index>(), to in any::<Index>(), weights in any::<bool>()) {
        if weights {
            let (from, to) = (from.index(plan.weights.len()), to.index(plan.weights.len()));
            prop_assume!(from != to);
            plan.weights[to].name = plan.weights[from].name.clone();
        } else {
            let (from, to) = (from.index(plan.buffers.len()), to.index(plan.buffers.len()));
            prop_assume!(from != to);
            plan.buffers[to].name = plan.buffers[from].name.clone();
        }
        let refused_for_its_name = matches!(plan.verify(), Err(PlanError::DuplicateName { .. }));
        prop_assert!(refused_for_its_name);
    }

    #[test]
    fn a_wrong_extent_is_refused(mut plan in plan(), which in any::<Index>(), axis in any::<Index>(), grow in any::<bool>()) {
        let activations = plan.buffers.iter_mut().filter(|spec| matches!(spec.role, Role::Activation | Role::Exchange));
        let mut activations: Vec<_> = activations.collect();
        let which = which.index(activations.len());
        let shape = &mut activations[which].shape;
        let axis = axis.index(shape.len());
        shape[axis] = if grow { shape[axis] + 1 } else { shape[axis] - 1 };
        prop_assert!(plan.verify().is_err());
    }

    #[test]
    fn a_wrong_dtype_is_refused(mut plan in plan(), which in any::<Index>(), turn in 1..3usize) {
        let which = which.index(plan.buffers.len());
        let dtypes = [DType::F32, DType::Bf16, DType::U32];
        let now = dtypes.iter().position(|&dtype| dtype == plan.buffers[which].dtype).unwrap();
        plan.buffers[which].dtype = dtypes[(now + turn) % 3];
        prop_assert!(plan.verify().is_err());
    }

    #[test]
    fn a_wrong_role_is_refused(mut plan in plan(), which in any::<Index>(), turn in 1..7usize) {
        use Role::*;
        let which = which.index(plan.buffers.len());
        let roles = [Activation, Scratch, SlotState, Kv, InputRing, OutputRing, Exchange];
        let now = roles.iter().position(|&role| role == plan.buffers[which].role).unwrap();
        plan.buffers[which].role = roles[(now + turn) % 7];
        prop_assert!(plan.verify().is_err(), "{:?}", plan.buffers[which]);
    }

    #[test]
    fn a_wrong_weight_form_is_refused(mut plan in plan(), which in any::<Index>(), field in 0..3usize) {
        let which = which.index(plan.weights.len());
        match &mut plan.weights[which].form {
            WeightForm::Gemm { groups, n, k, .. } => *[groups, n, k][field] += 1,
            WeightForm::Vector { n } => *n += 1,
            WeightForm::Table { rows, cols } => *[rows, cols][field % 2] += 1,
            WeightForm::Rope(table) => table.inv_freq_bits.push(0),
        }
        prop_assert!(plan.verify().is_err());
    }

    #[test]
    fn wrong_parts_are_refused(mut plan in plan(), which in any::<Index>(), at in any::<Index>(), how in 0..5usize) {
        let filled = plan.weights.iter_mut().filter(|spec| !matches!(spec.form, WeightForm::Rope(_) | WeightForm::Vector { .. }));
        let mut filled: Vec<_> = filled.collect();
        let which = which.index(filled.len());
        let parts = &mut filled[which].parts;
        let at = at.index(parts.len());
        match how {
            0 => drop(parts.remove(at)),
            1 => parts[at].dst_row += 1,
            2 => parts[at].rows.end += parts[at].tensor_shape[0],
            3 => parts[at].group += 1000,
            _ => parts.push(parts[at].clone()),
        }
        let refused_for_its_parts = matches!(plan.verify(), Err(PlanError::Parts { .. }));
        prop_assert!(refused_for_its_parts);
    }

    #[test]
    fn an_unknown_buffer_is_refused(mut plan in plan()) {
        plan.buffers.pop();
        let refused_for_its_id = matches!(plan.verify(), Err(PlanError::UnknownId { what: "buffer", .. }));
        prop_assert!(refused_for_its_id);
    }
}

/// The plan of the first sample model, its `op`s changed by `damage`.
fn damaged(damage: impl Fn(&mut Op)) -> PlanError {
    let mut plan = build(&samples::deepseek(), &samples::limits(), RankShape::SINGLE, 4).unwrap();
    plan.ops.iter_mut().for_each(|placed| damage(&mut placed.op));
    plan.verify().unwrap_err()
}

#[test]
fn attention_over_other_rows_or_tables_breaks_the_pad_contract() {
    let other_slot = damaged(|op| {
        if let Op::MlaAttend(op) = op {
            op.slot = op.position;
        }
    });
    assert!(matches!(&other_slot, PlanError::PadContract { site, .. } if site.op == "mla_attend"), "{other_slot}");
    let other_table = damaged(|op| {
        if let Op::MlaPrep(op) = op {
            op.paged.block_table = BufferId(op.paged.block_table.0 + 1);
        }
    });
    assert!(matches!(&other_table, PlanError::PadContract { site, .. } if site.op == "mla_prep"), "{other_table}");
}

#[test]
fn a_pool_without_page_0_to_spare_breaks_the_pad_contract() {
    let mut plan = build(&samples::qwen3(), &samples::limits(), RankShape::SINGLE, 4).unwrap();
    plan.buffers.iter_mut().filter(|spec| spec.role == Role::Kv).for_each(|spec| spec.shape[0] = 1);
    assert!(matches!(plan.verify(), Err(PlanError::PadContract { .. })));
}

#[test]
fn one_cache_for_two_layers_is_an_alias() {
    let mut first = None;
    let mut plan = build(&samples::qwen3(), &samples::limits(), RankShape::SINGLE, 4).unwrap();
    for placed in &mut plan.ops {
        match &mut placed.op {
            Op::GqaPrep(op) => op.paged = *first.get_or_insert(op.paged),
            Op::GqaAttend(op) => op.paged = first.unwrap(),
            _ => {}
        }
    }
    let error = plan.verify().unwrap_err();
    assert!(matches!(&error, PlanError::Alias { buffer, .. } if buffer == "layer.0.kv"), "{error}");
}

#[test]
fn an_output_over_an_input_is_an_alias() {
    let error = damaged(|op| {
        if let Op::MoeUp(op) = op {
            op.expert_id = op.act;
        }
    });
    assert!(matches!(error, PlanError::Shape { .. } | PlanError::Alias { .. }), "{error}");
    let error = damaged(|op| {
        if let Op::NormGemm(op) = op {
            op.out = op.x.buffer;
        }
    });
    assert!(matches!(error, PlanError::Shape { .. } | PlanError::Alias { .. }), "{error}");
}

#[test]
fn what_cannot_be_built_is_refused_by_name() {
    let refused = |spec: &ModelSpec, limits: &StepLimits, rank, bucket| {
        build(spec, limits, rank, bucket).unwrap_err().to_string()
    };
    let limits = samples::limits();
    let single = RankShape::SINGLE;
    assert!(refused(&samples::qwen3(), &limits, single, 3).contains("bucket 3"));
    assert!(refused(&samples::qwen3(), &limits, RankShape { rank: 0, ranks: 2 }, 4).contains("no routed experts"));
    assert!(refused(&samples::deepseek(), &limits, RankShape { rank: 3, ranks: 3 }, 4).contains("1, 2, 4 or 8"));
    let long = StepLimits { max_model_len: 257, pages_per_slot: 5, ..limits.clone() };
    assert!(refused(&samples::qwen3(), &long, single, 4).contains("max_model_len 257"));
    let cramped = StepLimits { pages_per_slot: 1, ..limits };
    assert!(refused(&samples::qwen3(), &cramped, single, 4).contains("64 tokens"));
    let mut few = samples::deepseek();
    if let Mlp::Moe(moe) = &mut few.mlp {
        moe.routing.experts = 4;
    }
    assert!(refused(&few, &samples::limits(), single, 4).contains("4 routed experts"));
}

#[test]
fn what_another_layer_left_behind_is_not_an_input() {
    let mut plan = build(&samples::deepseek_varied(), &samples::limits(), RankShape::SINGLE, 4).unwrap();
    let second = plan.ops.iter().position(|placed| placed.layer == Some(1)).unwrap();
    plan.ops.swap(second, second + 1);
    let error = plan.verify().unwrap_err();
    assert!(matches!(&error, PlanError::ReadBeforeWrite { buffer, .. } if buffer == "attn.in"), "{error}");
}
