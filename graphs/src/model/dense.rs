//! The pre-norm decoder with grouped-query attention: Qwen3 (arXiv 2505.09388) and Llama (arXiv 2407.21783).
//!
//! Five nodes a layer: norm → q | k | v · (qk-norm,) RoPE, append · attention · o_proj + residual is split as
//! `norm_gemm, gqa_prep, gqa_attend, gemm_add`, then `norm_gate_up, gemm_add`. Qwen3 differs by its norms of q and k;
//! either may carry biases.

use super::builder::{Builder, Part};
use super::{Ends, gated_mlp, partial_extents};
use crate::spec::{Gqa, Mlp};
use slotgraph_kernels::contract::GemmKind;
use slotgraph_kernels::ops::{GemmAdd, GqaAttend, GqaPrep, NormGemm, Op, PARTIAL_NORMS};
use slotgraph_kernels::{BufferId, Cols, DType, Role, WeightId};

struct Activations {
    qkv: BufferId,
    q: BufferId,
    partials: BufferId,
    attn: BufferId,
    act: BufferId,
}

pub(super) fn layers(net: &mut Builder, gqa: &Gqa, ends: &Ends) {
    let Mlp::Dense { inner } = net.spec.mlp else { unreachable!("pairings were checked by `build`") };
    let acts = Activations::declare(net, gqa, inner);
    for layer in 0..net.spec.layers {
        net.enter_layer(layer);
        attention(net, gqa, ends, &acts, layer);
        gated_mlp(net, ends, layer, acts.act, inner);
    }
}

impl Activations {
    fn declare(net: &mut Builder, gqa: &Gqa, inner: usize) -> Activations {
        let Gqa { heads, kv_heads, head_dim, .. } = *gqa;
        let [scratch_rows, groups] = partial_extents(net, heads * (head_dim + PARTIAL_NORMS));
        Activations {
            qkv: net.per_row("qkv", DType::F32, &[(heads + 2 * kv_heads) * head_dim]),
            q: net.per_row("q", DType::Bf16, &[heads, head_dim]),
            partials: net.buffer(
                "attn.partials",
                DType::F32,
                vec![scratch_rows, groups, heads, head_dim + PARTIAL_NORMS],
                Role::Scratch,
            ),
            attn: net.per_row("attn", DType::Bf16, &[heads * head_dim]),
            act: net.per_row("act", DType::Bf16, &[inner]),
        }
    }
}

/// `x += W_o · attend(rope(norm(W_q · h)), rope(norm(W_k · h)), W_v · h)` with `h = norm(x)`.
fn attention(net: &mut Builder, gqa: &Gqa, ends: &Ends, acts: &Activations, layer: usize) {
    let Gqa { heads, kv_heads, head_dim, scale, .. } = *gqa;
    let (hidden, eps) = (net.spec.hidden, net.spec.norm_eps);
    let weights = Weights::declare(net, gqa, layer);
    let paged = ends.paged(net, layer, 2 * kv_heads * head_dim);
    let (slot, position) = (ends.rows.slot, ends.rows.position);

    net.push(Op::NormGemm(NormGemm {
        out: acts.qkv,
        x: Cols { buffer: ends.x, offset: 0, width: hidden },
        norm: weights.norm,
        weight: weights.qkv,
        bias: weights.qkv_bias,
        eps,
    }));
    net.push(Op::GqaPrep(GqaPrep {
        q: acts.q,
        paged,
        qkv: acts.qkv,
        qk_norm: weights.qk_norm,
        rope: ends.rope,
        slot,
        position,
        heads,
        kv_heads,
        head_dim,
        eps,
    }));
    net.push(Op::GqaAttend(GqaAttend {
        out: acts.attn,
        q: acts.q,
        paged,
        slot,
        position,
        partials: acts.partials,
        heads,
        kv_heads,
        head_dim,
        scale,
    }));
    net.push(Op::GemmAdd(GemmAdd { x: ends.x, input: acts.attn, weight: weights.o, bias: weights.o_bias }));
}

struct Weights {
    norm: WeightId,
    qkv: WeightId,
    qkv_bias: Option<WeightId>,
    qk_norm: Option<(WeightId, WeightId)>,
    o: WeightId,
    o_bias: Option<WeightId>,
}

impl Weights {
    fn declare(net: &mut Builder, gqa: &Gqa, layer: usize) -> Weights {
        let hidden = net.spec.hidden;
        let (q, kv) = (gqa.heads * gqa.head_dim, gqa.kv_heads * gqa.head_dim);
        let tensor = |name: &str| format!("model.layers.{layer}.self_attn.{name}");
        let named = |name: &str| format!("layer.{layer}.{name}");
        Weights {
            norm: net.layer_norm(layer, "input_layernorm"),
            qkv: net.gemm(
                &named("qkv"),
                GemmKind::AttnIn,
                [q + 2 * kv, hidden],
                [
                    Part::matrix(&tensor("q_proj.weight"), [q, hidden]),
                    Part::matrix(&tensor("k_proj.weight"), [kv, hidden]).at(q),
                    Part::matrix(&tensor("v_proj.weight"), [kv, hidden]).at(q + kv),
                ],
            ),
            qkv_bias: gqa.qkv_bias.then(|| {
                net.vector(
                    &named("qkv_bias"),
                    q + 2 * kv,
                    [
                        Part::vector(&tensor("q_proj.bias"), q),
                        Part::vector(&tensor("k_proj.bias"), kv).at(q),
                        Part::vector(&tensor("v_proj.bias"), kv).at(q + kv),
                    ],
                )
            }),
            qk_norm: gqa.qk_norm.then(|| {
                let mut norm = |which: &str| {
                    let part = Part::vector(&tensor(&format!("{which}.weight")), gqa.head_dim);
                    net.vector(&named(which), gqa.head_dim, [part])
                };
                (norm("q_norm"), norm("k_norm"))
            }),
            o: net.gemm(
                &named("o_proj"),
                GemmKind::AttnOut,
                [hidden, q],
                [Part::matrix(&tensor("o_proj.weight"), [hidden, q])],
            ),
            o_bias: gqa
                .o_bias
                .then(|| net.vector(&named("o_bias"), hidden, [Part::vector(&tensor("o_proj.bias"), hidden)])),
        }
    }
}
