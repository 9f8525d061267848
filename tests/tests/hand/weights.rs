//! Weights and config files: what is broken is named before anything waits for it, and every key that changes the computation is read.

use crate::{BINARY, serve_folder};
use serde_json::{Value, json};
use slotgraph_tests::server::{Server, copy_of, edit, refused};
use slotgraph_tests::weights::Weights;
use std::io::Write;
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;

const FIRST: &str = "model-00001-of-00002.safetensors";
const SECOND: &str = "model-00002-of-00002.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Two weight files and an index.
fn sharded() -> TempDir {
    copy_of(&slotgraph_tests::model("shakespeare-dsv2"))
}

/// One weight file; the head is not tied.
fn single() -> TempDir {
    copy_of(&slotgraph_tests::model("tiny-qwen3-untied"))
}

/// The folder is refused: exit 2 in time, and the last line holds all of `named`.
fn refuses(folder: &Path, named: &[&str], patience: Duration) {
    let path = folder.to_str().unwrap();
    let (code, log, took) = refused(BINARY, &["--port", "0", "--device", "cpu", "--model", path], &[]);
    assert_eq!(code, 2, "{log}");
    let last = log.lines().last().unwrap_or_default();
    for name in named {
        assert!(last.contains(name), "{name} is not in: {log}");
    }
    assert!(!log.contains("panicked") && !log.contains("backtrace"), "{log}");
    assert!(took <= patience, "{took:?}");
}

const SOON: Duration = Duration::from_secs(2);
const TEN: Duration = Duration::from_secs(10);

#[test]
fn hand_f1_broken_files() {
    let folder = sharded();
    std::fs::remove_file(folder.path().join(SECOND)).unwrap();
    refuses(folder.path(), &[SECOND, INDEX], TEN);

    let whole = std::fs::metadata(slotgraph_tests::model("shakespeare-dsv2").join(FIRST)).unwrap().len();
    for length in [whole - 1, 4, 0] {
        let folder = sharded();
        let file = std::fs::OpenOptions::new().write(true).open(folder.path().join(FIRST)).unwrap();
        file.set_len(length).unwrap();
        refuses(folder.path(), &[FIRST, "expected", &format!("found {length}")], TEN);
    }

    let starts: [&[u8]; 3] = [&[0xff; 8], &(whole * 2).to_le_bytes(), &[2, 0, 0, 0, 0, 0, 0, 0, b'x', b'y']];
    for start in starts {
        let folder = sharded();
        let path = folder.path().join(FIRST);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[..start.len()].copy_from_slice(start);
        std::fs::write(&path, bytes).unwrap();
        refuses(folder.path(), &[FIRST], TEN);
    }

    let folder = sharded();
    let mut pointer = std::fs::File::create(folder.path().join(FIRST)).unwrap();
    write!(pointer, "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize {whole}\n").unwrap();
    refuses(folder.path(), &[FIRST, "LFS"], TEN);
}

#[test]
fn hand_f1_broken_headers() {
    let norm = "model.norm.weight";
    let cases: [(Value, &[&str]); 6] = [
        // Overlapping its neighbour, out of range, not shape × dtype, another shape, two other types.
        (json!({"data_offsets": [0, 256]}), &["overlaps"]),
        (json!({"data_offsets": [1_000_000_000, 1_000_000_256]}), &[norm, "out of range"]),
        (json!({"shape": [127]}), &[norm, "do not fit"]),
        (json!({"shape": [64, 2]}), &[norm, "[64, 2]", "[128]"]),
        (json!({"dtype": "I16"}), &[norm, "I16"]),
        (json!({"dtype": "F64", "shape": [32]}), &[norm, "F64"]),
    ];
    for (change, named) in cases {
        let folder = single();
        let mut weights = Weights::single(folder.path());
        for (key, value) in change.as_object().unwrap() {
            weights.header[norm][key] = value.clone();
        }
        weights.write();
        refuses(folder.path(), &[&["model.safetensors"], named].concat(), TEN);
    }
}

#[test]
fn hand_f1_missing_tensors_and_files() {
    let folder = sharded();
    edit(folder.path(), INDEX, |index| index["weight_map"]["model.extra.weight"] = json!(SECOND));
    refuses(folder.path(), &["model.extra.weight", SECOND, INDEX], TEN);

    let folder = single();
    let mut weights = Weights::single(folder.path());
    let gone = ["model.layers.0.mlp.up_proj.weight", "model.layers.2.self_attn.k_proj.weight"];
    gone.iter().for_each(|name| weights.remove(name));
    weights.write();
    refuses(folder.path(), &gone, TEN);

    let empty = tempfile::tempdir().unwrap();
    refuses(empty.path(), &["config.json"], SOON);
    for file in ["config.json", "tokenizer.json"] {
        let folder = sharded();
        std::fs::remove_file(folder.path().join(file)).unwrap();
        refuses(folder.path(), &[file], SOON);
    }
}

#[test]
fn hand_e5_weights_that_are_not_numbers() {
    let folder = single();
    let mut weights = Weights::single(folder.path());
    let start = weights.range("model.norm.weight").start;
    // A bf16 NaN.
    weights.data[start..start + 2].copy_from_slice(&0x7fc0u16.to_le_bytes());
    weights.write();
    let path = folder.path().to_str().unwrap();
    let mut server = slotgraph_tests::server::launch(BINARY, &["--port", "0", "--device", "cpu", "--model", path], &[]);
    assert_eq!(server.exit(TEN).code().map(|code| code != 0), Some(true));
    assert!(server.log().contains("model.norm.weight"), "{}", server.log());
}

/// Log-probabilities and ids of a greedy answer.
fn answer(server: &Server) -> Value {
    let fields = json!({
        "prompt": "Enter HAMLET, reading. To be, or not to be", "max_tokens": 12, "temperature": 0, "ignore_eos": true,
        "logprobs": 5, "return_token_ids": true,
    });
    let reply = server.complete(fields);
    assert_eq!(reply.status(), 200, "{}", reply.text());
    let choice = reply.json()["choices"][0].clone();
    json!([choice["token_ids"], choice["logprobs"]["token_logprobs"]])
}

fn answer_of(folder: &Path) -> Value {
    let mut server = serve_folder(folder, &[]);
    let answer = answer(&server);
    server.calm();
    answer
}

#[test]
fn hand_f2_tied_and_untied_heads() {
    let tie = |folder: &Path, tied: bool| edit(folder, "config.json", |c| c["tie_word_embeddings"] = json!(tied));
    let plain = answer_of(single().path());

    // The head in the file is used: with the embedding turned round in its place, the answer changes.
    let folder = single();
    let mut weights = Weights::single(folder.path());
    let (head, embedding) = (weights.range("lm_head.weight"), weights.range("model.embed_tokens.weight"));
    let mut turned = weights.data[embedding].to_vec();
    turned.iter_mut().skip(1).step_by(2).for_each(|high| *high ^= 0x80);
    weights.data[head].copy_from_slice(&turned);
    weights.write();
    let turned = answer_of(folder.path());
    assert_ne!(turned, plain);

    // Tied: the embedding is the head, with or without an lm_head in the file, which one line says is ignored.
    let folder = single();
    tie(folder.path(), true);
    let mut server = serve_folder(folder.path(), &[]);
    let tied = answer(&server);
    assert_eq!(
        server.log().lines().filter(|line| line.contains("WARN") && line.contains("lm_head.weight is ignored")).count(),
        1
    );
    server.calm();
    drop(server);
    let mut weights = Weights::single(folder.path());
    weights.remove("lm_head.weight");
    weights.write();
    assert_eq!(answer_of(folder.path()), tied);
    assert!(tied != plain && tied != turned);

    // Untied, and no head: nothing steps in for it. Absent means untied, as in Transformers.
    tie(folder.path(), false);
    refuses(folder.path(), &["lm_head.weight"], TEN);
    edit(folder.path(), "config.json", |c| drop(c.as_object_mut().unwrap().remove("tie_word_embeddings")));
    refuses(folder.path(), &["lm_head.weight"], TEN);
}

#[test]
fn hand_f2_head_dim() {
    let folder = single();
    edit(folder.path(), "config.json", |config| config["head_dim"] = json!(64));
    refuses(folder.path(), &["q_proj", "[288, 128]", "[384, 128]"], TEN);
    // Without it, Qwen3's default of 128: hidden_size / num_attention_heads is no number of this model at all.
    edit(folder.path(), "config.json", |config| drop(config.as_object_mut().unwrap().remove("head_dim")));
    refuses(folder.path(), &["q_proj", "[288, 128]", "[768, 128]"], TEN);
}

#[test]
fn hand_f3_yarn_is_read() {
    let plain = answer_of(sharded().path());
    let folder = sharded();
    edit(folder.path(), "config.json", |config| config["rope_scaling"]["mscale_all_dim"] = json!(1.0));
    assert_ne!(answer_of(folder.path()), plain);
    edit(folder.path(), "config.json", |config| drop(config.as_object_mut().unwrap().remove("rope_scaling")));
    assert_ne!(answer_of(folder.path()), plain);
}

#[test]
fn hand_f4_router_variants() {
    let plain = answer_of(sharded().path());
    for (key, value) in [("norm_topk_prob", json!(true)), ("routed_scaling_factor", json!(16.0))] {
        let folder = sharded();
        edit(folder.path(), "config.json", |config| config[key] = value);
        assert_ne!(answer_of(folder.path()), plain, "{key}");
    }
    for (key, value, named) in [
        ("topk_method", json!("noaux_tc"), &["topk_method", "noaux_tc"][..]),
        ("topk_method", json!("zzz"), &["topk_method", "zzz"]),
        ("scoring_func", json!("sigmoid"), &["scoring_func", "sigmoid"]),
        // Implemented, so the weights of that shape are asked for.
        ("moe_layer_freq", json!(2), &["model.layers.1.mlp.gate_proj.weight", "model.layers.3.mlp.gate_proj.weight"]),
        ("q_lora_rank", json!(1536), &["q_a_proj"]),
        ("first_k_dense_replace", json!(2), &["model.layers.1.mlp.gate_proj.weight"]),
    ] {
        let folder = sharded();
        edit(folder.path(), "config.json", |config| config[key] = value);
        refuses(folder.path(), named, TEN);
    }
}
