//! Builds the plan of one step shape from a model's spec: the families, and the ends that all of them share.
//!
//! Called by devices while they prepare (once per bucket) and by `slotgraph-probe plan`. **Invariant:** every bucket's
//! plan of one model declares the same buffers and weights in the same order; a plan that is returned was verified.

mod builder;
mod deepseek_v2;
mod dense;

use crate::plan::{Plan, PlanError, RankShape};
use crate::spec::{Attention, Mlp, ModelSpec};
use crate::step::StepLimits;
use builder::{Builder, Part};
use slotgraph_kernels::contract::{ATTENTION_GROUP, EXPERT_SHARDS, GemmKind, PAGE_TOKENS};
use slotgraph_kernels::ops::{
    Embed, Feed, Fetch, GemmAdd, Head, NormGateUp, Op, Paged, RowBuffers, Sample, SlotBuffers,
};
use slotgraph_kernels::{BufferId, DType, WeightForm, WeightId};

/// Rows whose attention may be split over key groups on a GPU; wider steps fill it with whole rows.
const SPLIT_ROWS_MAX: usize = 64;
/// Most bytes of group partials; a long context then splits fewer rows.
const PARTIAL_BYTES_MAX: usize = 256 << 20;
/// Scratch floats of one logit row: the strided lanes of the normaliser and the candidates of 64 vocabulary chunks.
const SAMPLE_SCRATCH: usize = 4096;

/// The verified plan of `spec` for steps of `bucket` rows on rank `rank`.
pub fn build(spec: &ModelSpec, limits: &StepLimits, rank: RankShape, bucket: usize) -> Result<Plan, PlanError> {
    refuse_unbuildable(spec, limits, rank, bucket)?;
    let mut net = Builder::new(spec, limits, rank, bucket);
    let ends = Ends::declare(&mut net);
    net.push(Op::Fetch(ends.fetch.clone()));
    net.push(Op::Embed(ends.embed.clone()));
    match &spec.attention {
        Attention::Mla(mla) => deepseek_v2::layers(&mut net, mla, &ends),
        Attention::Gqa(gqa) => dense::layers(&mut net, gqa, &ends),
    }
    net.leave_layers();
    net.push(Op::Head(ends.head));
    net.push(Op::Sample(ends.sample));
    net.push(Op::Feed(ends.feed));
    let plan = net.finish();
    plan.verify()?;
    Ok(plan)
}

fn refuse_unbuildable(spec: &ModelSpec, limits: &StepLimits, rank: RankShape, bucket: usize) -> Result<(), PlanError> {
    let refuse = |reason: String| Err(PlanError::Unbuildable { model: spec.family.name(), reason });
    if !limits.buckets.contains(&bucket) || bucket == 0 {
        return refuse(format!("bucket {bucket} is not one of the configured buckets {:?}", limits.buckets));
    }
    if !matches!(rank.ranks, 1 | 2 | 4 | 8) || rank.rank >= rank.ranks {
        return refuse(format!("rank {} of {} is not a rank of 1, 2, 4 or 8", rank.rank, rank.ranks));
    }
    match spec.experts() {
        None if rank.ranks > 1 => {
            return refuse(format!("it has no routed experts to spread over {} ranks", rank.ranks));
        }
        Some(experts) if experts < EXPERT_SHARDS => {
            return refuse(format!("it has {experts} routed experts; at least {EXPERT_SHARDS} are needed"));
        }
        _ => {}
    }
    if limits.max_model_len == 0 || limits.max_model_len > spec.rope.positions {
        let table = spec.rope.positions;
        return refuse(format!("max_model_len {} is outside 1 … {table} positions", limits.max_model_len));
    }
    if limits.pages_per_slot * PAGE_TOKENS < limits.max_model_len {
        let held = limits.pages_per_slot * PAGE_TOKENS;
        return refuse(format!(
            "a slot's {held} tokens of pages hold less than max_model_len {}",
            limits.max_model_len
        ));
    }
    if let (Attention::Mla(_), Mlp::Dense { .. }) | (Attention::Gqa(_), Mlp::Moe(_)) = (&spec.attention, &spec.mlp) {
        return refuse("this pairing of attention and MLP has no plan".into());
    }
    Ok(())
}

/// What every family has: the first and last ops, and the buffers they share with the layers.
struct Ends {
    rows: RowBuffers,
    slots: SlotBuffers,
    /// The residual stream.
    x: BufferId,
    rope: WeightId,
    fetch: Fetch,
    embed: Embed,
    head: Head,
    sample: Sample,
    feed: Feed,
}

impl Ends {
    fn declare(net: &mut Builder) -> Ends {
        let spec = net.spec;
        let (hidden, vocab) = (spec.hidden, spec.vocab);
        let rows = net.row_buffers();
        let slots = net.slot_buffers(vocab);
        let rings = net.rings();
        let entries = net.limits.ring_entries();
        let x = net.per_row("x", DType::F32, &[hidden]);
        let logits = net.per_logit_row("logits", DType::F32, &[vocab]);
        let sample = net.sample(rows, slots, logits, SAMPLE_SCRATCH);

        let embedding = "model.embed_tokens.weight";
        let head_tensor = if spec.tied_head { embedding } else { "lm_head.weight" };
        let table = net.table("embed", vocab, hidden, embedding);
        let rope = net.weight("rope", WeightForm::Rope(net.rope_table()), Vec::new());
        let norm = net.vector("final_norm", hidden, [Part::vector("model.norm.weight", hidden)]);
        let weight = net.gemm("head", GemmKind::Head, [vocab, hidden], [Part::matrix(head_tensor, [vocab, hidden])]);

        Ends {
            rows,
            slots,
            x,
            rope,
            fetch: Fetch { rows, slots, input_ring: rings.input, step_counter: rings.counter, entries },
            embed: Embed { x, token: rows.token, table },
            head: Head { logits, x, logit_row: rows.logit_row, norm, weight, eps: spec.norm_eps },
            feed: Feed {
                rows,
                slots,
                sample: sample.clone(),
                output_ring: rings.output,
                step_counter: rings.counter,
                entries,
            },
            sample,
        }
    }

    /// The cache of layer `layer`: `width` values a token.
    fn paged(&self, net: &mut Builder, layer: usize, width: usize) -> Paged {
        Paged { kv: net.kv(layer, width), block_table: self.slots.pages }
    }
}

/// The gated MLP of a dense layer: `x += W_down · (silu(W_gate · norm(x)) · (W_up · norm(x)))`.
fn gated_mlp(net: &mut Builder, ends: &Ends, layer: usize, act: BufferId, inner: usize) {
    let (hidden, eps) = (net.spec.hidden, net.spec.norm_eps);
    let norm = net.layer_norm(layer, "post_attention_layernorm");
    let mlp = format!("model.layers.{layer}.mlp");
    let gate_up = net.gemm(
        &format!("layer.{layer}.gate_up"),
        GemmKind::GateUp,
        [2 * inner, hidden],
        gate_up_parts(&mlp, inner, hidden),
    );
    let down = net.gemm(
        &format!("layer.{layer}.down"),
        GemmKind::Down,
        [hidden, inner],
        [Part::matrix(&format!("{mlp}.down_proj.weight"), [hidden, inner])],
    );
    net.push(Op::NormGateUp(NormGateUp { out: act, x: ends.x, norm, weight: gate_up, eps }));
    net.push(Op::GemmAdd(GemmAdd { x: ends.x, input: act, weight: down, bias: None }));
}

/// Rows and key groups of the scratch for attention partials, `width` floats each.
fn partial_extents(net: &Builder, width: usize) -> [usize; 2] {
    let groups = net.limits.max_model_len.div_ceil(ATTENTION_GROUP);
    let affordable = PARTIAL_BYTES_MAX / (groups * width * size_of::<f32>());
    [net.rows.min(SPLIT_ROWS_MAX).min(affordable).max(1), groups]
}

/// A gated MLP's first matrix: gate rows, then up rows.
fn gate_up_parts(prefix: &str, inner: usize, hidden: usize) -> [Part; 2] {
    [
        Part::matrix(&format!("{prefix}.gate_proj.weight"), [inner, hidden]),
        Part::matrix(&format!("{prefix}.up_proj.weight"), [inner, hidden]).at(inner),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    #[test]
    fn every_sample_model_builds_for_every_bucket_and_rank() {
        for (name, spec) in samples::all() {
            let ranks: &[usize] = if spec.experts().is_some() { &[1, 2, 4, 8] } else { &[1] };
            for &ranks in ranks {
                for rank in 0..ranks {
                    for bucket in samples::limits().buckets {
                        let plan = build(&spec, &samples::limits(), RankShape { rank, ranks }, bucket);
                        if let Err(error) = plan {
                            panic!("{name}, rank {rank} of {ranks}, bucket {bucket}: {error}");
                        }
                    }
                }
            }
        }
    }
}
