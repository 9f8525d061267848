//! config.json and generation_config.json: every key that is not implemented is refused by file, key and value, and the rest is read right.

use serde_json::{Value, json};
use slotgraph_graphs::spec::{Attention, Mlp, ModelSpec};
use slotgraph_kernels::ops::TopkMethod;
use slotgraph_runtime::checkpoint::{Checkpoint, GenerationDefaults};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// The config of a bundled model or shape, changed.
fn config(of: &str, change: impl FnOnce(&mut Value)) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests").join(of).join("config.json");
    let mut config = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut config);
    config
}

fn folder(config: &Value, generation: Option<&Value>) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    if let Some(generation) = generation {
        fs::write(folder.path().join("generation_config.json"), generation.to_string()).unwrap();
    }
    folder
}

fn open(config: &Value, generation: Option<&Value>) -> Result<Checkpoint, String> {
    Checkpoint::dummy(folder(config, generation).path(), 0).map_err(|error| error.to_string())
}

fn spec(of: &str, change: impl FnOnce(&mut Value)) -> ModelSpec {
    open(&config(of, change), None).unwrap_or_else(|e| panic!("{e}")).spec
}

fn remove(config: &mut Value, key: &str) {
    config.as_object_mut().unwrap().remove(key);
}

const DEMO: &str = "models/shakespeare-dsv2";
const GROUPED: &str = "models/tiny-dsv2-grouped";
const QWEN: &str = "models/shakespeare-qwen3";
const LLAMA: &str = "models/tiny-llama3";
const LITE: &str = "shapes/deepseek-v2-lite";

#[test]
fn what_is_not_implemented_is_refused_by_key_and_value() {
    for (model, key, value, said) in [
        (DEMO, "model_type", json!("deepseek_v3"), "deepseek_v3"),
        (DEMO, "model_type", json!(["deepseek_v2"]), "expected a string"),
        (DEMO, "architectures", json!(["DeepseekV3ForCausalLM"]), "DeepseekV3ForCausalLM"),
        (DEMO, "hidden_act", json!("gelu"), "gelu"),
        (DEMO, "scoring_func", json!("sigmoid"), "sigmoid"),
        (DEMO, "topk_method", json!("noaux_tc"), "noaux_tc"),
        (DEMO, "topk_method", json!("zzz"), "zzz"),
        (DEMO, "quantization_config", json!({"quant_method": "fp8"}), "fp8"),
        (DEMO, "num_key_value_heads", json!(4), "4"),
        (DEMO, "head_dim", json!(64), "64"),
        (DEMO, "num_nextn_predict_layers", json!(1), "1"),
        (DEMO, "mlp_bias", json!(true), "true"),
        (DEMO, "partial_rotary_factor", json!(0.5), "0.5"),
        (DEMO, "index_topk", json!(2048), "2048"),
        (DEMO, "n_routed_experts", json!(4), "at least 8"),
        (DEMO, "n_routed_experts", Value::Null, "null"),
        (DEMO, "num_experts_per_tok", json!(17), "only 16"),
        (DEMO, "moe_layer_freq", json!(0), "is 0"),
        (DEMO, "num_hidden_layers", json!(100_000), "expected 1 to 4096"),
        (DEMO, "vocab_size", json!(0), "is 0"),
        (DEMO, "hidden_size", json!("256"), "\"256\""),
        (DEMO, "hidden_size", json!(-256), "-256"),
        (DEMO, "hidden_size", json!(256.5), "256.5"),
        (DEMO, "hidden_size", json!(u64::MAX), "expected an integer"),
        (DEMO, "rms_norm_eps", json!(0), "more than 0"),
        (DEMO, "norm_topk_prob", json!(1), "true or false"),
        (DEMO, "rope_theta", json!(1), "more than 1"),
        (DEMO, "rope_scaling", json!("yarn"), "expected an object"),
        (DEMO, "bos_token_id", json!(2048), "vocab_size is 2048"),
        (GROUPED, "n_group", json!(3), "must divide"),
        (GROUPED, "n_group", Value::Null, "must divide"),
        (GROUPED, "topk_group", json!(5), "1 to n_group 4"),
        (QWEN, "use_sliding_window", json!(true), "true"),
        (
            QWEN,
            "layer_types",
            json!(["full_attention", "sliding_attention", "full_attention", "full_attention"]),
            "sliding_attention",
        ),
        (QWEN, "layer_types", json!(["full_attention"]), "1 entries for 4 layers"),
        (QWEN, "num_key_value_heads", json!(3), "does not divide"),
        (QWEN, "num_key_value_heads", Value::Null, "missing"),
        (QWEN, "head_dim", json!(63), "even"),
        (QWEN, "head_dim", json!(1u32 << 31), "65536"),
        (QWEN, "intermediate_size", Value::Null, "missing"),
        (LLAMA, "sliding_window", json!(4096), "4096"),
        (LLAMA, "embedding_multiplier", json!(12.0), "12.0"),
    ] {
        let error = open(&config(model, |c| c[key] = value.clone()), None).err();
        let error = error.unwrap_or_else(|| panic!("{model}: {key} = {value} was accepted"));
        assert!(error.contains("config.json"), "{key} = {value}: {error}");
        assert!(error.contains(key) && error.contains(said), "{key} = {value}: {error}");
    }
}

#[test]
fn rope_variants_that_are_not_implemented_are_refused() {
    for (rope, said) in [
        (json!({"rope_type": "dynamic", "factor": 2.0}), "dynamic"),
        (json!({"type": "longrope"}), "longrope"),
        (json!({"rope_type": "yarn", "type": "linear", "factor": 2.0}), "rope_type is"),
        (json!({"rope_type": "yarn", "original_max_position_embeddings": 512}), "rope_scaling.factor"),
        (json!({"rope_type": "yarn", "factor": 4.0}), "rope_scaling.original_max_position_embeddings"),
        (json!({"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 512}), "at least 1"),
        (
            json!({"rope_type": "yarn", "factor": "4", "original_max_position_embeddings": 512}),
            "expected a finite number",
        ),
        (json!({"rope_type": "linear", "factor": 2.0, "mscale": 1.0}), "rope_scaling.mscale"),
        (
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}),
            "high_freq_factor",
        ),
    ] {
        let error = open(&config(LLAMA, |c| c["rope_scaling"] = rope.clone()), None).err();
        let error = error.unwrap_or_else(|| panic!("{rope} was accepted"));
        assert!(error.contains("config.json") && error.contains(said), "{rope}: {error}");
    }
    // Both spellings at once are fine while they agree.
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512});
    let both = |theta: f64, factor: f64| {
        config(LLAMA, |c| {
            c["rope_scaling"] = yarn.clone();
            c["rope_parameters"] = yarn.clone();
            c["rope_parameters"]["rope_theta"] = json!(theta);
            c["rope_parameters"]["factor"] = json!(factor);
        })
    };
    assert!(open(&both(500000.0, 4.0), None).is_ok());
    assert!(open(&both(10000.0, 4.0), None).err().unwrap().contains("rope_theta"));
    assert!(open(&both(500000.0, 8.0), None).err().unwrap().contains("disagree"));
}

#[test]
fn nulls_and_harmless_keys_change_nothing() {
    let plain = spec(QWEN, |_| ());
    let noisy = spec(QWEN, |c| {
        for key in ["rope_scaling", "quantization_config", "pad_token_id", "sliding_window", "anything_at_all"] {
            c[key] = Value::Null;
        }
        c["attention_dropout"] = json!(0.1);
        c["torch_dtype"] = json!("float32");
        c["_name_or_path"] = json!("somewhere/else");
        c["unsloth_version"] = json!("2026.1");
        c["transformers_version"] = json!("4.51.0");
        c["id2label"] = json!({"0": "LABEL_0"});
        c["a_new_switch"] = json!(false);
        c["sliding_window"] = json!(4096);
        c["use_sliding_window"] = json!(false);
    });
    assert_eq!(plain, noisy);
}

#[test]
fn older_keys_of_a_dense_model_mean_the_same() {
    let newer = spec(QWEN, |_| ());
    let older = spec(QWEN, |c| {
        remove(c, "rope_parameters");
        remove(c, "dtype");
        remove(c, "layer_types");
        c["torch_dtype"] = json!("bfloat16");
        c["rope_theta"] = json!(1000000);
        c["rope_scaling"] = Value::Null;
    });
    assert_eq!(newer, older);
    assert_ne!(newer, spec(QWEN, |c| c["rope_parameters"]["rope_theta"] = json!(10000.0)));
}

#[test]
fn head_size_has_each_familys_own_default() {
    let head_dim = |spec: ModelSpec| match spec.attention {
        Attention::Gqa(gqa) => gqa.head_dim,
        Attention::Mla(_) => panic!(),
    };
    assert_eq!(head_dim(spec("shapes/qwen3-4b", |c| remove(c, "head_dim"))), 128);
    assert_eq!(head_dim(spec(LLAMA, |c| remove(c, "head_dim"))), 16);
    let Attention::Gqa(gqa) = spec(LLAMA, |c| remove(c, "num_key_value_heads")).attention else { panic!() };
    assert_eq!(gqa.kv_heads, gqa.heads);
}

#[test]
fn router_variants_reach_the_spec() {
    let moe = |change: fn(&mut Value)| match spec(LITE, change).mlp {
        Mlp::Moe(moe) => moe,
        Mlp::Dense { .. } => panic!(),
    };
    let lite = moe(|_| ());
    assert_eq!((lite.routing.experts, lite.routing.top_k, lite.shared_inner), (64, 6, 2816));
    assert!(!lite.routing.norm_topk_prob);
    assert!(moe(|c| c["norm_topk_prob"] = json!(true)).routing.norm_topk_prob);
    assert_eq!(moe(|c| c["routed_scaling_factor"] = json!(16.0)).routing.scaling, 16.0);
    let grouped = moe(|c| {
        c["topk_method"] = json!("group_limited_greedy");
        c["n_group"] = json!(8);
        c["topk_group"] = json!(3);
    });
    assert_eq!(grouped.routing.method, TopkMethod::GroupLimitedGreedy { groups: 8, topk_groups: 3 });
    assert_eq!(moe(|c| c["first_k_dense_replace"] = json!(2)).first_moe_layer, 2);
    assert_eq!(moe(|c| c["moe_layer_freq"] = json!(2)).layer_freq, 2);
    assert_eq!(moe(|c| c["n_shared_experts"] = Value::Null).shared_inner, 0);
    let every_other = spec(LITE, |c| c["moe_layer_freq"] = json!(2));
    assert_eq!((0..5).map(|l| every_other.is_moe(l)).collect::<Vec<_>>(), [false, false, true, false, true]);
}

#[test]
fn queries_are_low_rank_only_when_the_config_says_so() {
    let q_lora = |value: Value| match spec(LITE, |c| c["q_lora_rank"] = value).attention {
        Attention::Mla(mla) => mla.q_lora,
        Attention::Gqa(_) => panic!(),
    };
    assert_eq!((q_lora(Value::Null), q_lora(json!(1536))), (None, Some(1536)));
    let error = open(&config(LITE, |c| remove(c, "q_lora_rank")), None).err().unwrap();
    assert!(error.contains("q_lora_rank"), "{error}");
}

#[test]
fn yarn_keys_are_really_read() {
    let lite = spec(LITE, |_| ());
    let scale = |spec: &ModelSpec| match &spec.attention {
        Attention::Mla(mla) => mla.scale,
        Attention::Gqa(gqa) => gqa.scale,
    };
    let all_one = spec(LITE, |c| c["rope_scaling"]["mscale_all_dim"] = json!(1.0));
    assert_ne!(scale(&lite), scale(&all_one));
    assert_ne!(lite.rope.scale_bits, all_one.rope.scale_bits);
    let plain = spec(LITE, |c| remove(c, "rope_scaling"));
    assert_ne!(lite.rope.inv_freq_bits, plain.rope.inv_freq_bits);
    assert_eq!(scale(&plain), (1.0 / 192.0_f64.sqrt()) as f32);
}

const EOS_BASE: u32 = 151643;
const EOS_TURN: u32 = 151645;

fn eos(in_config: Value, generation: Option<Value>) -> Result<Checkpoint, String> {
    let config = config("shapes/qwen3-4b", |c| c["eos_token_id"] = in_config);
    open(&config, generation.map(|eos| json!({ "eos_token_id": eos })).as_ref())
}

#[test]
fn eos_is_one_id_or_a_list_and_generation_config_wins() {
    let ids = |config, generation| eos(config, generation).unwrap().spec.eos_ids;
    let both = json!([EOS_TURN, EOS_BASE]);
    assert_eq!(ids(json!(EOS_TURN), Some(both.clone())), [EOS_TURN, EOS_BASE]);
    assert_eq!(ids(json!(EOS_TURN), None), [EOS_TURN]);
    assert_eq!(ids(both.clone(), None), [EOS_TURN, EOS_BASE]);
    assert_eq!(ids(json!(EOS_TURN), Some(Value::Null)), [EOS_TURN]);
    assert_eq!(ids(both, Some(json!(EOS_BASE))), [EOS_BASE]);
    assert_eq!(ids(json!([EOS_TURN, EOS_TURN]), None), [EOS_TURN]);
    let config = config("shapes/qwen3-4b", |c| c["eos_token_id"] = json!(EOS_TURN));
    assert_eq!(open(&config, Some(&json!({"temperature": 0.6}))).unwrap().spec.eos_ids, [EOS_TURN]);
}

#[test]
fn an_eos_that_could_never_match_is_refused_by_file_and_key() {
    for bad in [json!("151645"), json!([]), json!(99_999_999), json!([EOS_TURN, "x"]), json!(-1), json!(1.5), json!({})]
    {
        let error = eos(bad.clone(), None).err().unwrap_or_else(|| panic!("{bad} was accepted"));
        assert!(error.contains("config.json: eos_token_id"), "{bad}: {error}");
        let error = eos(json!(EOS_TURN), Some(bad.clone())).err().unwrap_or_else(|| panic!("{bad} was accepted"));
        assert!(error.contains("generation_config.json: eos_token_id"), "{bad}: {error}");
    }
    let many: Vec<u32> = (0..9).collect();
    assert!(eos(json!(many), None).err().unwrap().contains("at most 8"));
    let none = eos(Value::Null, None).unwrap();
    assert!(none.spec.eos_ids.is_empty());
    assert!(none.warnings[0].contains("eos_token_id"), "{:?}", none.warnings);
}

#[test]
fn generation_defaults_are_typed() {
    let qwen = config("shapes/qwen3-4b", |_| ());
    let file =
        json!({"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0"});
    let expected = GenerationDefaults {
        do_sample: Some(true),
        temperature: Some(0.6),
        top_k: Some(20),
        top_p: Some(0.95),
        ..GenerationDefaults::default()
    };
    assert_eq!(open(&qwen, Some(&file)).unwrap().generation, expected);
    assert_eq!(open(&qwen, None).unwrap().generation, GenerationDefaults::default());
    for (key, value) in [
        ("temperature", json!(-0.1)),
        ("temperature", json!("hot")),
        ("top_p", json!(0.0)),
        ("top_p", json!(1.5)),
        ("top_k", json!(-1)),
        ("min_p", json!(2)),
        ("repetition_penalty", json!(0)),
        ("do_sample", json!("yes")),
    ] {
        let error =
            open(&qwen, Some(&json!({ key: value }))).err().unwrap_or_else(|| panic!("{key} {value} was accepted"));
        assert!(error.contains("generation_config.json") && error.contains(key), "{error}");
    }
}

#[test]
fn files_that_are_not_json_objects_are_refused() {
    for text in ["", "{", "[]", "null", "{\"model_type\": \"llama\",}", "\u{feff}{}"] {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), text).unwrap();
        let error = Checkpoint::dummy(folder.path(), 0).err().unwrap().to_string();
        assert!(error.contains("config.json"), "{text:?}: {error}");
    }
}
