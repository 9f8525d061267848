//! DeepSeek-V2 (arXiv 2405.04434): multi-head latent attention (§2.1) and DeepSeekMoE (§2.1.3, §2.2).
//!
//! Eight nodes in a MoE layer: `norm_gemm` (q | kv_a; with low-rank queries q_a | kv_a and a second one for q_b),
//! `mla_prep`, `mla_attend`, `mla_uv`, `gemm_add` (o_proj), `moe_gate`, `moe_up`, `moe_down`; over several ranks the sums
//! meet in `exchange` and `moe_combine`. Keys and values are never expanded: W_UK is folded into the query and W_UV into
//! the output, for every row.

use super::builder::{Builder, Part};
use super::{Ends, gate_up_parts, gated_mlp, partial_extents};
use crate::plan::RankShape;
use crate::spec::{Mla, Mlp, Moe};
use slotgraph_kernels::contract::{GemmKind, experts_of_rank};
use slotgraph_kernels::ops::{
    Exchange, GemmAdd, MlaAttend, MlaPrep, MlaUv, MoeCombine, MoeDown, MoeGate, MoeSum, MoeUp, NormGemm, Op,
    PARTIAL_NORMS, SharedGate,
};
use slotgraph_kernels::{BufferId, Cols, DType, Role, WeightId};
use std::ops::Range;

pub(super) fn layers(net: &mut Builder, mla: &Mla, ends: &Ends) {
    let Mlp::Moe(moe) = &net.spec.mlp else { unreachable!("pairings were checked by `build`") };
    let attn = AttentionBuffers::declare(net, mla);
    let dense_layers = (0..net.spec.layers).filter(|&layer| !net.spec.is_moe(layer)).count();
    let dense_act = (dense_layers > 0).then(|| net.per_row("dense.act", DType::Bf16, &[moe.dense_inner]));
    let experts = (dense_layers < net.spec.layers).then(|| MoeBuffers::declare(net, moe));
    for layer in 0..net.spec.layers {
        net.enter_layer(layer);
        attention(net, mla, ends, &attn, layer);
        match (&experts, dense_act) {
            (Some(experts), _) if net.spec.is_moe(layer) => mixture(net, moe, ends, experts, layer),
            (_, Some(act)) => gated_mlp(net, ends, layer, act, moe.dense_inner),
            _ => unreachable!("a layer of each kind declared its buffers"),
        }
    }
}

// ---- Multi-head latent attention ----

struct AttentionBuffers {
    /// q | kv_a, or q_a | kv_a with low-rank queries.
    attn_in: BufferId,
    /// q of low-rank queries.
    q_b: Option<BufferId>,
    q_lat: BufferId,
    q_rope: BufferId,
    partials: BufferId,
    o_lat: BufferId,
    attn: BufferId,
}

impl AttentionBuffers {
    fn declare(net: &mut Builder, mla: &Mla) -> AttentionBuffers {
        let (heads, lora) = (mla.heads, mla.kv_lora);
        let q_width = heads * (mla.nope_dim + mla.rope_dim);
        let kv_width = lora + mla.rope_dim;
        let [scratch_rows, groups] = partial_extents(net, heads * (lora + PARTIAL_NORMS));
        AttentionBuffers {
            attn_in: net.per_row("attn.in", DType::F32, &[mla.q_lora.unwrap_or(q_width) + kv_width]),
            q_b: mla.q_lora.map(|_| net.per_row("attn.q_b", DType::F32, &[q_width])),
            q_lat: net.per_row("attn.q_lat", DType::Bf16, &[heads, lora]),
            q_rope: net.per_row("attn.q_rope", DType::Bf16, &[heads, mla.rope_dim]),
            partials: net.buffer(
                "attn.partials",
                DType::F32,
                vec![scratch_rows, groups, heads, lora + PARTIAL_NORMS],
                Role::Scratch,
            ),
            o_lat: net.per_row("attn.o_lat", DType::Bf16, &[heads, lora]),
            attn: net.per_row("attn.out", DType::Bf16, &[heads * mla.v_dim]),
        }
    }
}

fn attention(net: &mut Builder, mla: &Mla, ends: &Ends, buffers: &AttentionBuffers, layer: usize) {
    let Mla { heads, kv_lora: lora, nope_dim, rope_dim, v_dim, scale, .. } = *mla;
    let (hidden, eps) = (net.spec.hidden, net.spec.norm_eps);
    let q_width = heads * (nope_dim + rope_dim);
    let kv_width = lora + rope_dim;
    let tensor = |name: &str| format!("model.layers.{layer}.self_attn.{name}");
    let named = |name: &str| format!("layer.{layer}.{name}");
    let paged = ends.paged(net, layer, kv_width);
    let (slot, position) = (ends.rows.slot, ends.rows.position);

    // q | c_kv | k_R = W · h, with q_a in q's place when queries are low-rank (equations 9 and 12).
    let norm = net.layer_norm(layer, "input_layernorm");
    let in_width = mla.q_lora.unwrap_or(q_width);
    let q_tensor = if mla.q_lora.is_some() { "q_a_proj" } else { "q_proj" };
    let attn_in = net.gemm(
        &named("attn_in"),
        GemmKind::AttnIn,
        [in_width + kv_width, hidden],
        [
            Part::matrix(&tensor(&format!("{q_tensor}.weight")), [in_width, hidden]),
            Part::matrix(&tensor("kv_a_proj_with_mqa.weight"), [kv_width, hidden]).at(in_width),
        ],
    );
    let in_bias = attn_in_bias(net, mla, layer, in_width, kv_width);
    net.push(Op::NormGemm(NormGemm {
        out: buffers.attn_in,
        x: Cols { buffer: ends.x, offset: 0, width: hidden },
        norm,
        weight: attn_in,
        bias: in_bias,
        eps,
    }));
    let kv_a = Cols { buffer: buffers.attn_in, offset: in_width, width: kv_width };

    // q = W_q_b · norm(q_a) (equation 13).
    let q = match (mla.q_lora, buffers.q_b) {
        (Some(q_lora), Some(q_b)) => {
            let norm = net.vector(&named("q_a_norm"), q_lora, [Part::vector(&tensor("q_a_layernorm.weight"), q_lora)]);
            let weight = net.gemm(
                &named("q_b"),
                GemmKind::QueryB,
                [q_width, q_lora],
                [Part::matrix(&tensor("q_b_proj.weight"), [q_width, q_lora])],
            );
            let x = Cols { buffer: buffers.attn_in, offset: 0, width: q_lora };
            net.push(Op::NormGemm(NormGemm { out: q_b, x, norm, weight, bias: None, eps }));
            Cols { buffer: q_b, offset: 0, width: q_width }
        }
        _ => Cols { buffer: buffers.attn_in, offset: 0, width: q_width },
    };

    // Absorbed form: W_UK into the query, W_UV into the output (§2.1.2).
    let kv_norm = net.vector(&named("kv_norm"), lora, [Part::vector(&tensor("kv_a_layernorm.weight"), lora)]);
    let kv_b = tensor("kv_b_proj.weight");
    let kv_b_rows = |head: usize, range: Range<usize>| {
        let start = head * (nope_dim + v_dim);
        Part::matrix(&kv_b, [heads * (nope_dim + v_dim), lora]).rows(start + range.start..start + range.end).group(head)
    };
    let w_uk = net.gemm_groups(
        &named("w_uk"),
        GemmKind::KeyUp,
        heads,
        [lora, nope_dim],
        (0..heads).map(|head| kv_b_rows(head, 0..nope_dim).transposed()),
    );
    net.push(Op::MlaPrep(MlaPrep {
        q_lat: buffers.q_lat,
        q_rope: buffers.q_rope,
        paged,
        q,
        kv_a,
        kv_norm,
        w_uk,
        rope: ends.rope,
        slot,
        position,
        heads,
        nope_dim,
        rope_dim,
        lora,
        eps,
    }));
    net.push(Op::MlaAttend(MlaAttend {
        o_lat: buffers.o_lat,
        q_lat: buffers.q_lat,
        q_rope: buffers.q_rope,
        paged,
        slot,
        position,
        partials: buffers.partials,
        heads,
        rope_dim,
        lora,
        scale,
    }));
    let w_uv = net.gemm_groups(
        &named("w_uv"),
        GemmKind::ValueUp,
        heads,
        [v_dim, lora],
        (0..heads).map(|head| kv_b_rows(head, nope_dim..nope_dim + v_dim)),
    );
    net.push(Op::MlaUv(MlaUv { out: buffers.attn, o_lat: buffers.o_lat, w_uv }));

    let o_proj = net.gemm(
        &named("o_proj"),
        GemmKind::AttnOut,
        [hidden, heads * v_dim],
        [Part::matrix(&tensor("o_proj.weight"), [hidden, heads * v_dim])],
    );
    let o_bias = mla.bias.then(|| net.vector(&named("o_bias"), hidden, [Part::vector(&tensor("o_proj.bias"), hidden)]));
    net.push(Op::GemmAdd(GemmAdd { x: ends.x, input: buffers.attn, weight: o_proj, bias: o_bias }));
}

/// A full q projection has no bias even where kv_a has one: its part of the vector stays zero.
fn attn_in_bias(net: &mut Builder, mla: &Mla, layer: usize, in_width: usize, kv_width: usize) -> Option<WeightId> {
    if !mla.bias {
        return None;
    }
    let tensor = |name: &str| format!("model.layers.{layer}.self_attn.{name}.bias");
    let mut parts = vec![Part::vector(&tensor("kv_a_proj_with_mqa"), kv_width).at(in_width)];
    if mla.q_lora.is_some() {
        parts.insert(0, Part::vector(&tensor("q_a_proj"), in_width));
    }
    Some(net.vector(&format!("layer.{layer}.attn_in_bias"), in_width + kv_width, parts))
}

// ---- Mixture of experts ----

struct MoeBuffers {
    h: BufferId,
    expert_id: BufferId,
    expert_weight: BufferId,
    act: BufferId,
    shared_act: Option<BufferId>,
    exchange: Option<ExchangeBuffers>,
}

#[derive(Clone, Copy)]
struct ExchangeBuffers {
    partial: BufferId,
    shared: BufferId,
    gathered: BufferId,
}

impl MoeBuffers {
    fn declare(net: &mut Builder, moe: &Moe) -> MoeBuffers {
        let (rows, hidden, ranks) = (net.rows, net.spec.hidden, net.rank.ranks);
        let top_k = moe.routing.top_k;
        MoeBuffers {
            h: net.per_row("moe.h", DType::Bf16, &[hidden]),
            expert_id: net.per_row("moe.expert_id", DType::U32, &[top_k]),
            expert_weight: net.per_row("moe.expert_weight", DType::F32, &[top_k]),
            act: net.per_row("moe.act", DType::Bf16, &[top_k, moe.expert_inner]),
            shared_act: (moe.shared_inner > 0).then(|| net.per_row("moe.shared_act", DType::Bf16, &[moe.shared_inner])),
            exchange: (ranks > 1).then(|| ExchangeBuffers {
                partial: net.buffer("moe.partial", DType::F32, vec![rows, hidden], Role::Exchange),
                shared: net.per_row("moe.shared", DType::F32, &[hidden]),
                gathered: net.buffer("moe.gathered", DType::F32, vec![ranks, rows, hidden], Role::Exchange),
            }),
        }
    }
}

/// `x += Σ_shared FFN(h) + Σ_top-k g_e · FFN_e(h)` with `h = norm(x)` (equation 20).
fn mixture(net: &mut Builder, moe: &Moe, ends: &Ends, buffers: &MoeBuffers, layer: usize) {
    let (hidden, eps) = (net.spec.hidden, net.spec.norm_eps);
    let routing = moe.routing;
    let (experts, top_k) = (routing.experts, routing.top_k);
    let owned = experts_of_rank(net.rank.rank, net.rank.ranks, experts);
    let (first_expert, local_experts) = (owned.start, owned.len());
    let mlp = format!("model.layers.{layer}.mlp");
    let named = |name: &str| format!("layer.{layer}.{name}");

    let norm = net.layer_norm(layer, "post_attention_layernorm");
    let router = net.gemm(
        &named("router"),
        GemmKind::Router,
        [experts, hidden],
        [Part::matrix(&format!("{mlp}.gate.weight"), [experts, hidden])],
    );
    let shared = buffers.shared_act.map(|act| {
        let shared = format!("{mlp}.shared_experts");
        let gate_up = gate_up_parts(&shared, moe.shared_inner, hidden);
        let down = Part::matrix(&format!("{shared}.down_proj.weight"), [hidden, moe.shared_inner]);
        Shared {
            act,
            gate_up: net.gemm(
                &named("shared_gate_up"),
                GemmKind::SharedGateUp,
                [2 * moe.shared_inner, hidden],
                gate_up,
            ),
            down: net.gemm(&named("shared_down"), GemmKind::SharedDown, [hidden, moe.shared_inner], [down]),
        }
    });
    let expert = |id: usize| format!("{mlp}.experts.{id}");
    let gate_up = net.gemm_groups(
        &named("expert_gate_up"),
        GemmKind::ExpertGateUp,
        local_experts,
        [2 * moe.expert_inner, hidden],
        owned.clone().flat_map(|id| {
            gate_up_parts(&expert(id), moe.expert_inner, hidden).map(|part| part.group(id - first_expert))
        }),
    );
    let down = net.gemm_groups(
        &named("expert_down"),
        GemmKind::ExpertDown,
        local_experts,
        [hidden, moe.expert_inner],
        owned.map(|id| {
            Part::matrix(&format!("{}.down_proj.weight", expert(id)), [hidden, moe.expert_inner])
                .group(id - first_expert)
        }),
    );

    net.push(Op::MoeGate(MoeGate {
        h: buffers.h,
        expert_id: buffers.expert_id,
        expert_weight: buffers.expert_weight,
        shared: shared.as_ref().map(|shared| SharedGate { act: shared.act, weight: shared.gate_up }),
        x: ends.x,
        norm,
        router,
        live: ends.rows.live,
        step: ends.rows.step,
        routing,
        first_expert,
        local_experts,
        eps,
    }));
    net.push(Op::MoeUp(MoeUp {
        act: buffers.act,
        h: buffers.h,
        expert_id: buffers.expert_id,
        weight: gate_up,
        first_expert,
        local_experts,
        top_k,
        early_choice: shared.is_some(),
    }));
    let sum = match buffers.exchange {
        None => MoeSum::Residual { x: ends.x },
        Some(ExchangeBuffers { partial, shared, .. }) => MoeSum::Partial { partial, shared },
    };
    net.push(Op::MoeDown(MoeDown {
        sum,
        act: buffers.act,
        expert_id: buffers.expert_id,
        expert_weight: buffers.expert_weight,
        weight: down,
        shared: shared.map(|shared| (shared.act, shared.down)),
        experts,
        first_expert,
        local_experts,
        top_k,
    }));
    if let Some(ExchangeBuffers { partial, shared, gathered }) = buffers.exchange {
        let RankShape { rank, ranks } = net.rank;
        net.push(Op::Exchange(Exchange { gathered, partial, rank, ranks }));
        net.push(Op::MoeCombine(MoeCombine { x: ends.x, gathered, shared, ranks }));
    }
}

struct Shared {
    act: BufferId,
    gate_up: WeightId,
    down: WeightId,
}
