//! config.json → `ModelSpec`, for deepseek_v2, qwen3 and llama, in the older and the newer spelling.
//!
//! **Invariant:** nothing is guessed. A key that changes the computation is implemented, or refused by name; sizes have no defaults; where
//! Transformers has a default for a switch, it is that one (`tie_word_embeddings` absent is false in all three families).

use super::CheckpointError;
use super::eos;
use super::fields::{Fields, shown};
use super::rope::{MscaleRule, Rope};
use serde_json::json;
use slotgraph_graphs::spec::{Attention, Family, Gqa, Mla, Mlp, ModelSpec, Moe};
use slotgraph_kernels::contract::EXPERT_SHARDS;
use slotgraph_kernels::ops::{Routing, TopkMethod};

/// Keys that say nothing about the forward pass of these families: training, bookkeeping, and generation options of older files.
const HARMLESS: &[&str] = &[
    "add_cross_attention",
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "auto_map",
    "aux_loss_alpha",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "ep_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "keys_to_ignore_at_inference",
    "label2id",
    "length_penalty",
    "max_length",
    "max_window_layers",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "pruned_heads",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "sep_token_id",
    "seq_aux",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_bfloat16",
    "use_cache",
];

/// Most layers, and most experts of a layer: far above any real model, so that a typing error cannot ask for the moon.
const COUNT_MAX: usize = 4096;
/// Most rotated dimensions of a head: a table of their frequencies is computed before anything else is known to fit.
const ROTARY_MAX: usize = 1 << 16;

fn is_harmless(key: &str) -> bool {
    key.starts_with('_') || key.starts_with("unsloth_") || HARMLESS.contains(&key)
}

/// Parses `config`, the object of config.json, with the EOS ids that generation_config.json overrides.
pub fn parse(config: &Fields, generation: Option<&Fields>) -> Result<ModelSpec, CheckpointError> {
    let family = match config.text("model_type")? {
        Some("deepseek_v2") => Family::DeepseekV2,
        Some("qwen3") => Family::Qwen3,
        Some("llama") => Family::Llama,
        Some(other) => {
            let reason = format!("{other:?} is not implemented (deepseek_v2, qwen3 and llama are)");
            return Err(config.error("model_type", reason));
        }
        None => return Err(config.error("model_type", "is missing")),
    };
    refuse_what_no_family_has(config, family)?;
    let vocab = config.size("vocab_size")?;
    let positions = config.size("max_position_embeddings")?;
    let rope = Rope::parse(config)?;
    let (attention, mlp, rope_dim, rule) = match family {
        Family::DeepseekV2 => deepseek(config, &rope)?,
        Family::Qwen3 | Family::Llama => dense(config, family)?,
    };
    let spec = ModelSpec {
        family,
        hidden: config.size("hidden_size")?,
        layers: config.size_up_to("num_hidden_layers", COUNT_MAX)?,
        vocab,
        positions,
        norm_eps: config.positive("rms_norm_eps", 1e-6)? as f32,
        tied_head: config.flag("tie_word_embeddings")?.unwrap_or(false),
        rope: rope.table(rope_dim, positions, rule),
        attention,
        mlp,
        eos_ids: eos::eos_ids(config, generation, vocab)?,
        bos_id: eos::token_id(config, "bos_token_id", vocab)?,
    };
    config.finish(is_harmless)?;
    Ok(spec)
}

fn refuse_what_no_family_has(config: &Fields, family: Family) -> Result<(), CheckpointError> {
    let class = match family {
        Family::DeepseekV2 => "DeepseekV2ForCausalLM",
        Family::Qwen3 => "Qwen3ForCausalLM",
        Family::Llama => "LlamaForCausalLM",
    };
    config.only("architectures", &[json!([class]), json!([])])?;
    config.only("hidden_act", &[json!("silu"), json!("swish")])?;
    config.only("quantization_config", &[])?;
    config.only("compression_config", &[])?;
    config.only("mlp_bias", &[json!(false)])?;
    config.only("use_sliding_window", &[json!(false)])?;
    if let Some(types) = config.list("layer_types")? {
        if let Some(other) = types.iter().find(|t| **t != json!("full_attention")) {
            return Err(
                config.error("layer_types", format!("{} is not implemented (only full_attention is)", shown(other)))
            );
        }
        let layers = config.size("num_hidden_layers")?;
        if types.len() != layers {
            return Err(config.error("layer_types", format!("has {} entries for {layers} layers", types.len())));
        }
    } else if config.flag("use_sliding_window")?.is_none() {
        // Without a switch that turns the window off, a window means what it says.
        config.only("sliding_window", &[])?;
    }
    // Read by nobody else: the window is off.
    config.value("sliding_window");
    Ok(())
}

type Parts = (Attention, Mlp, usize, MscaleRule);

fn dense(config: &Fields, family: Family) -> Result<Parts, CheckpointError> {
    let heads = config.size("num_attention_heads")?;
    let kv_heads = match (config.integer("num_key_value_heads")?, family) {
        (Some(0), _) => return Err(config.error("num_key_value_heads", "is 0, expected at least 1")),
        (Some(kv_heads), _) => kv_heads,
        (None, Family::Llama) => heads,
        (None, _) => return Err(config.error("num_key_value_heads", "is missing")),
    };
    if !heads.is_multiple_of(kv_heads) {
        let reason = format!("is {kv_heads}, which does not divide num_attention_heads {heads}");
        return Err(config.error("num_key_value_heads", reason));
    }
    let head_dim = match (config.integer("head_dim")?, family) {
        (Some(dim), _) => dim,
        (None, Family::Qwen3) => 128,
        (None, _) => {
            let hidden = config.size("hidden_size")?;
            if !hidden.is_multiple_of(heads) {
                let reason = format!("is missing, and hidden_size {hidden} is not a multiple of {heads} heads");
                return Err(config.error("head_dim", reason));
            }
            hidden / heads
        }
    };
    even(config, "head_dim", head_dim)?;
    let bias = config.flag("attention_bias")?.unwrap_or(false);
    let attention = Gqa {
        heads,
        kv_heads,
        head_dim,
        qk_norm: family == Family::Qwen3,
        qkv_bias: bias,
        o_bias: bias,
        scale: (1.0 / (head_dim as f64).sqrt()) as f32,
    };
    let mlp = Mlp::Dense { inner: config.size("intermediate_size")? };
    Ok((Attention::Gqa(attention), mlp, head_dim, MscaleRule::Common))
}

fn deepseek(config: &Fields, rope: &Rope) -> Result<Parts, CheckpointError> {
    let heads = config.size("num_attention_heads")?;
    let (nope_dim, rope_dim) = (config.size("qk_nope_head_dim")?, config.size("qk_rope_head_dim")?);
    even(config, "qk_rope_head_dim", rope_dim)?;
    // Latent attention has no key-value heads; these keys repeat what the others say.
    config.only("num_key_value_heads", &[json!(heads)])?;
    config.only("head_dim", &[json!(rope_dim)])?;
    config.only("qk_head_dim", &[json!(nope_dim + rope_dim)])?;
    config.only("num_nextn_predict_layers", &[json!(0)])?;
    if !config.has("q_lora_rank") {
        return Err(config.error("q_lora_rank", "is missing (null means a full query projection)"));
    }
    let mla = Mla {
        heads,
        q_lora: config.value("q_lora_rank").map(|_| config.size("q_lora_rank")).transpose()?,
        kv_lora: config.size("kv_lora_rank")?,
        nope_dim,
        rope_dim,
        v_dim: config.size("v_head_dim")?,
        scale: (rope.softmax_factor() / ((nope_dim + rope_dim) as f64).sqrt()) as f32,
        bias: config.flag("attention_bias")?.unwrap_or(false),
    };
    let dense_inner = config.size("intermediate_size")?;
    let mlp = Mlp::Moe(moe(config, dense_inner)?);
    Ok((Attention::Mla(mla), mlp, rope_dim, MscaleRule::Deepseek))
}

fn moe(config: &Fields, dense_inner: usize) -> Result<Moe, CheckpointError> {
    config.only("scoring_func", &[json!("softmax")])?;
    let method = config.text("topk_method")?.unwrap_or("greedy");
    let first_moe_layer = config.integer("first_k_dense_replace")?.unwrap_or(0);
    let (groups, topk_groups) = (config.integer("n_group")?, config.integer("topk_group")?);
    let norm_topk_prob = config.flag("norm_topk_prob")?.unwrap_or(false);
    let scaling = config.number("routed_scaling_factor")?.unwrap_or(1.0) as f32;
    let layer_freq = config.value("moe_layer_freq").map_or(Ok(1), |_| config.size("moe_layer_freq"))?;
    let top_k = config.integer("num_experts_per_tok")?;
    let expert_inner = config.integer("moe_intermediate_size")?;
    let shared = config.integer("n_shared_experts")?.unwrap_or(0);
    if !config.has("n_routed_experts") {
        return Err(config.error("n_routed_experts", "is missing"));
    }
    if config.value("n_routed_experts").is_none() {
        return Err(config.error("n_routed_experts", "null (a model without experts) is not implemented"));
    }
    let experts = config.size_up_to("n_routed_experts", COUNT_MAX)?;
    if experts < EXPERT_SHARDS {
        return Err(config.error("n_routed_experts", format!("is {experts}; at least {EXPERT_SHARDS} are needed")));
    }
    if !config.has("n_shared_experts") {
        return Err(config.error("n_shared_experts", "is missing (null means none)"));
    }
    let top_k = top_k.filter(|k| *k > 0).ok_or_else(|| config.error("num_experts_per_tok", "is missing or 0"))?;
    let expert_inner =
        expert_inner.filter(|n| *n > 0).ok_or_else(|| config.error("moe_intermediate_size", "is missing or 0"))?;
    let (method, eligible) = match method {
        "greedy" => (TopkMethod::Greedy, experts),
        "group_limited_greedy" => {
            let groups = groups.filter(|g| *g > 0 && experts.is_multiple_of(*g)).ok_or_else(|| {
                config.error("n_group", format!("must divide n_routed_experts {experts} for group_limited_greedy"))
            })?;
            let topk_groups = topk_groups.filter(|k| (1..=groups).contains(k)).ok_or_else(|| {
                config.error("topk_group", format!("must be from 1 to n_group {groups} for group_limited_greedy"))
            })?;
            (TopkMethod::GroupLimitedGreedy { groups, topk_groups }, topk_groups * experts / groups)
        }
        other => {
            let reason = format!("{other:?} is not implemented (greedy and group_limited_greedy are)");
            return Err(config.error("topk_method", reason));
        }
    };
    if top_k > eligible {
        return Err(
            config.error("num_experts_per_tok", format!("is {top_k}, but only {eligible} experts can be chosen"))
        );
    }
    Ok(Moe {
        routing: Routing { experts, top_k, method, norm_topk_prob, scaling },
        expert_inner,
        shared_inner: shared * expert_inner,
        dense_inner,
        first_moe_layer,
        layer_freq,
    })
}

fn even(config: &Fields, key: &str, dim: usize) -> Result<(), CheckpointError> {
    if dim == 0 || !dim.is_multiple_of(2) || dim > ROTARY_MAX {
        return Err(config.error(key, format!("is {dim}; rotary embedding needs an even number up to {ROTARY_MAX}")));
    }
    Ok(())
}
