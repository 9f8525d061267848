//! Small models, limits and steps for this crate's tests: one of each thing that the families can vary.

use crate::spec::{Attention, Family, Gqa, Mla, Mlp, ModelSpec, Moe, SamplingSpec};
use crate::step::{Generation, NewSlot, PageId, PageUpdate, RowFeed, RowInput, RowWant, SlotId, StepInput, StepLimits};
use slotgraph_kernels::ops::{Routing, TopkMethod};
use slotgraph_kernels::spec::RopeTable;
use std::sync::Arc;

pub(crate) fn limits() -> StepLimits {
    StepLimits {
        slots_max: 4,
        pages: 9,
        pages_per_slot: 2,
        buckets: vec![1, 2, 4, 8, 16],
        launch_ahead: 1,
        max_model_len: 128,
        prefill_chunk: 12,
    }
}

fn rope(pairs: usize) -> RopeTable {
    let inv_freq = |pair: usize| 10_000_f32.powf(-(pair as f32) / pairs as f32);
    RopeTable {
        positions: 256,
        inv_freq_bits: (0..pairs).map(|pair| inv_freq(pair).to_bits()).collect(),
        scale_bits: 1.0_f32.to_bits(),
    }
}

fn model(family: Family, attention: Attention, mlp: Mlp, rope: RopeTable) -> ModelSpec {
    ModelSpec {
        family,
        hidden: 64,
        layers: 3,
        vocab: 96,
        positions: 256,
        norm_eps: 1e-6,
        tied_head: false,
        rope,
        attention,
        mlp,
        eos_ids: vec![1],
        bos_id: Some(0),
    }
}

pub(crate) fn deepseek() -> ModelSpec {
    let mla =
        Mla { heads: 4, q_lora: None, kv_lora: 32, nope_dim: 16, rope_dim: 8, v_dim: 16, scale: 0.2, bias: false };
    let routing = Routing { experts: 12, top_k: 3, method: TopkMethod::Greedy, norm_topk_prob: false, scaling: 1.0 };
    let moe = Moe { routing, expert_inner: 32, shared_inner: 48, dense_inner: 80, first_moe_layer: 1, layer_freq: 1 };
    model(Family::DeepseekV2, Attention::Mla(mla), Mlp::Moe(moe), rope(4))
}

/// `deepseek` in widths that the CUDA kernels have.
pub(crate) fn deepseek_on_cuda() -> ModelSpec {
    let mut spec = deepseek();
    let Attention::Mla(mla) = &mut spec.attention else { unreachable!("deepseek has MLA") };
    mla.rope_dim = 16;
    let Mlp::Moe(moe) = &mut spec.mlp else { unreachable!("deepseek has experts") };
    (moe.expert_inner, moe.shared_inner, moe.dense_inner) = (64, 64, 128);
    spec.rope = rope(8);
    spec
}

/// Low-rank queries, biases, groups, no shared experts, every second layer sparse from the first on.
pub(crate) fn deepseek_varied() -> ModelSpec {
    let mut spec = deepseek();
    if let Attention::Mla(mla) = &mut spec.attention {
        mla.q_lora = Some(24);
        mla.bias = true;
    }
    if let Mlp::Moe(moe) = &mut spec.mlp {
        moe.routing = Routing {
            experts: 16,
            top_k: 2,
            method: TopkMethod::GroupLimitedGreedy { groups: 4, topk_groups: 2 },
            norm_topk_prob: true,
            scaling: 4.0,
        };
        moe.shared_inner = 0;
        moe.first_moe_layer = 0;
        moe.layer_freq = 2;
    }
    spec
}

pub(crate) fn qwen3() -> ModelSpec {
    let gqa = Gqa { heads: 4, kv_heads: 2, head_dim: 16, qk_norm: true, qkv_bias: false, o_bias: false, scale: 0.25 };
    let spec = model(Family::Qwen3, Attention::Gqa(gqa), Mlp::Dense { inner: 80 }, rope(8));
    ModelSpec { tied_head: true, ..spec }
}

pub(crate) fn llama_with_biases() -> ModelSpec {
    let gqa = Gqa { heads: 6, kv_heads: 3, head_dim: 24, qk_norm: false, qkv_bias: true, o_bias: true, scale: 0.204 };
    model(Family::Llama, Attention::Gqa(gqa), Mlp::Dense { inner: 80 }, rope(12))
}

pub(crate) fn all() -> Vec<(&'static str, ModelSpec)> {
    vec![
        ("deepseek", deepseek()),
        ("deepseek-varied", deepseek_varied()),
        ("qwen3", qwen3()),
        ("llama-biases", llama_with_biases()),
    ]
}

/// A row of slot 0's first holder.
pub(crate) fn row(feed: RowFeed, want: RowWant) -> RowInput {
    RowInput { slot: SlotId(0), generation: Generation(1), feed, want }
}

pub(crate) fn given(token: u32, position: u32) -> RowFeed {
    RowFeed::Given { token, position, generated: false }
}

/// Step 1: seats slot 0 with page 1 and prefills two tokens in a bucket of 4.
pub(crate) fn prefill(max_tokens: u32) -> StepInput {
    StepInput {
        step: 1,
        bucket: 4,
        rows: vec![row(given(5, 0), RowWant::Nothing), row(given(6, 1), RowWant::Sample)],
        new_slots: vec![NewSlot {
            slot: SlotId(0),
            generation: Generation(1),
            sampling: Arc::new(SamplingSpec::greedy(max_tokens)),
            choice: 0,
            generated: 0,
        }],
        pages: vec![PageUpdate { slot: SlotId(0), index: 0, page: PageId(1) }],
        ..StepInput::default()
    }
}

/// One decode row of slot 0.
pub(crate) fn decode(step: u64) -> StepInput {
    StepInput { step, bucket: 1, rows: vec![row(RowFeed::FromSlot, RowWant::Sample)], ..StepInput::default() }
}
