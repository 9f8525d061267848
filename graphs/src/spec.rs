//! What a model is, typed: parsed once from a checkpoint folder, consumed by the plan builders and the server.
//!
//! **Invariant:** a `ModelSpec` that exists is implementable; unsupported keys were refused by name when it was parsed.

use slotgraph_kernels::ops::{Routing, TopkMethod};
use slotgraph_kernels::spec::RopeTable;

/// A model's architecture.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    pub family: Family,
    pub hidden: usize,
    pub layers: usize,
    /// Rows of the embedding table and of lm_head.
    pub vocab: usize,
    /// `max_position_embeddings`.
    pub positions: usize,
    pub norm_eps: f32,
    /// lm_head is the embedding table.
    pub tied_head: bool,
    pub rope: RopeTable,
    pub attention: Attention,
    pub mlp: Mlp,
    /// Ids that end a sequence: generation_config.json's when it names any, else config.json's; in file order without repeats.
    pub eos_ids: Vec<u32>,
    pub bos_id: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    DeepseekV2,
    Qwen3,
    Llama,
}

impl Family {
    /// `model_type` in config.json.
    pub fn name(self) -> &'static str {
        match self {
            Family::DeepseekV2 => "deepseek_v2",
            Family::Qwen3 => "qwen3",
            Family::Llama => "llama",
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Attention {
    Mla(Mla),
    Gqa(Gqa),
}

/// Multi-head latent attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Mla {
    pub heads: usize,
    /// Low-rank queries, or None for a full q projection.
    pub q_lora: Option<usize>,
    pub kv_lora: usize,
    pub nope_dim: usize,
    pub rope_dim: usize,
    pub v_dim: usize,
    /// Softmax scale, YaRN's mscale² included.
    pub scale: f32,
    /// Biases on q_a, kv_a and o_proj.
    pub bias: bool,
}

/// Grouped-query attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Gqa {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub qk_norm: bool,
    /// Biases on q, k, v; and on o_proj.
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub scale: f32,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Mlp {
    Dense { inner: usize },
    Moe(Moe),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Moe {
    pub routing: Routing,
    /// Inner width of one routed expert.
    pub expert_inner: usize,
    /// Inner width of the shared experts together; 0 when there are none.
    pub shared_inner: usize,
    /// Inner width of the dense layers.
    pub dense_inner: usize,
    /// Layers before this one are dense.
    pub first_moe_layer: usize,
    /// From there, layers whose index is a multiple of this are MoE (`moe_layer_freq`).
    pub layer_freq: usize,
}

impl ModelSpec {
    /// Whether layer `layer` is a MoE layer.
    pub fn is_moe(&self, layer: usize) -> bool {
        match &self.mlp {
            Mlp::Dense { .. } => false,
            Mlp::Moe(moe) => layer >= moe.first_moe_layer && layer.is_multiple_of(moe.layer_freq),
        }
    }
    /// Elements of one token's cache row in one layer.
    pub fn kv_width(&self) -> usize {
        match &self.attention {
            Attention::Mla(mla) => mla.kv_lora + mla.rope_dim,
            Attention::Gqa(gqa) => 2 * gqa.kv_heads * gqa.head_dim,
        }
    }
    /// Routed experts of a MoE layer, or None for a dense model.
    pub fn experts(&self) -> Option<usize> {
        match &self.mlp {
            Mlp::Dense { .. } => None,
            Mlp::Moe(moe) => Some(moe.routing.experts),
        }
    }
    /// Whether routing is limited to groups; used in messages and `/version`.
    pub fn is_group_limited(&self) -> bool {
        matches!(
            &self.mlp,
            Mlp::Moe(Moe { routing: Routing { method: TopkMethod::GroupLimitedGreedy { .. }, .. }, .. })
        )
    }
}

/// Every resolved sampling field of one choice: what the device reads. Built by the server's request check.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct SamplingSpec {
    pub temperature: f32,
    /// 1.0 is off.
    pub top_p: f32,
    /// 0.0 is off.
    pub min_p: f32,
    /// 0 is off.
    pub top_k: u32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// 1.0 is off.
    pub repetition_penalty: f32,
    pub seed: u64,
    /// (token, bias) pairs, at most LOGIT_BIAS_MAX.
    pub logit_bias: Vec<(u32, f32)>,
    /// At most STOP_IDS_MAX.
    pub stop_ids: Vec<u32>,
    pub ignore_eos: bool,
    pub min_tokens: u32,
    /// Generated tokens at which the choice ends by length.
    pub max_tokens: u32,
    /// None: no logprobs; Some(k): the chosen token's and k alternatives (0…20).
    pub logprobs: Option<u32>,
}

impl SamplingSpec {
    /// Greedy, no extras, up to `max_tokens`.
    pub fn greedy(max_tokens: u32) -> Self {
        SamplingSpec {
            temperature: 0.0,
            top_p: 1.0,
            min_p: 0.0,
            top_k: 0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
            logit_bias: Vec::new(),
            stop_ids: Vec::new(),
            ignore_eos: false,
            min_tokens: 0,
            max_tokens,
            logprobs: None,
        }
    }
    pub fn is_greedy(&self) -> bool {
        self.temperature < slotgraph_kernels::contract::GREEDY_TEMPERATURE
    }
    pub fn has_penalties(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 || self.repetition_penalty != 1.0
    }
    pub fn has_truncation(&self) -> bool {
        self.top_p < 1.0 || self.min_p > 0.0 || self.top_k > 0
    }
}
