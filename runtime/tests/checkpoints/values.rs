//! What weights contain, once their files are whole: finite numbers, rounded once, from the tensors that the config means.

use crate::copy::{Copy, FIRST, SECOND, vector};
use serde_json::{Value, json};
use slotgraph_runtime::checkpoint::Checkpoint;
use std::fs;

#[test]
fn weights_that_are_not_finite_are_refused_by_tensor_and_element() {
    for (bits, shown) in [(0x7fc0u16, "NaN"), (0xff80, "-inf"), (0x7f80, "inf")] {
        let copy = Copy::demo();
        let name = "model.norm.weight";
        let (file, header) = [FIRST, SECOND]
            .map(|file| (file, copy.header(file)))
            .into_iter()
            .find(|(_, header)| header.get(name).is_some())
            .unwrap();
        let length = u64::from_le_bytes(fs::read(copy.path(file)).unwrap()[..8].try_into().unwrap());
        let at = 8 + length + header[name]["data_offsets"][0].as_u64().unwrap();
        copy.overwrite(file, at + 2 * 5, &bits.to_le_bytes());
        let checkpoint = Checkpoint::open(copy.folder()).unwrap();
        let spec = vector(name, 256);
        let error = checkpoint.source().read(&spec, 0, &mut [0; 256]).unwrap_err().to_string();
        for word in [file, name, shown, "element 5"] {
            assert!(error.contains(word), "{word} is not in: {error}");
        }
    }
}

#[test]
fn a_file_that_shrinks_after_it_was_checked_is_an_error_and_not_a_signal() {
    let copy = Copy::demo();
    let checkpoint = Checkpoint::open(copy.folder()).unwrap();
    copy.truncate(SECOND, 100_000);
    let spec = vector("model.norm.weight", 256);
    let error = checkpoint.source().read(&spec, 0, &mut [0; 256]).unwrap_err().to_string();
    assert!(error.contains(SECOND), "{error}");
}

#[test]
fn wider_floats_are_rounded_once_and_said_so() {
    let copy = Copy::of("tiny-llama3");
    let file = "model.safetensors";
    let header = copy.header(file);
    let name = "model.norm.weight";
    let old = fs::read(copy.path(file)).unwrap();
    let start = 8 + u64::from_le_bytes(old[..8].try_into().unwrap()) as usize;
    // The file again, with one tensor as F32 and one as F16.
    let values: Vec<f32> = (0..128).map(|i| 1.0 + i as f32 * 0.001_003_7).collect();
    let other = "model.layers.0.input_layernorm.weight";
    let mut tensors: Vec<(&String, &Value)> =
        header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__").collect();
    tensors.sort_by_key(|(_, entry)| entry["data_offsets"][0].as_u64());
    let (mut new_header, mut data) = (serde_json::Map::new(), Vec::new());
    for (tensor, entry) in tensors {
        let from = entry["data_offsets"][0].as_u64().unwrap() as usize + start;
        let to = entry["data_offsets"][1].as_u64().unwrap() as usize + start;
        let begin = data.len();
        let mut entry = entry.clone();
        if tensor == name {
            entry["dtype"] = json!("F32");
            data.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        } else if tensor == other {
            entry["dtype"] = json!("F16");
            data.extend(values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()));
        } else {
            data.extend_from_slice(&old[from..to]);
        }
        entry["data_offsets"] = json!([begin, data.len()]);
        new_header.insert(tensor.clone(), entry);
    }
    let new_header = Value::Object(new_header).to_string();
    let mut bytes = (new_header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(new_header.as_bytes());
    bytes.extend_from_slice(&data);
    fs::write(copy.path(file), bytes).unwrap();

    let checkpoint = Checkpoint::open(copy.folder()).unwrap();
    assert_eq!(checkpoint.warnings.len(), 2, "{:?}", checkpoint.warnings);
    let read = |tensor: &str| {
        let spec = vector(tensor, 128);
        let mut out = vec![0; 128];
        checkpoint.source().read(&spec, 0, &mut out).unwrap();
        out
    };
    let rounded = |v: &f32| half::bf16::from_f32(*v).to_bits();
    assert_eq!(read(name), values.iter().map(rounded).collect::<Vec<_>>());
    let through_half = |v: &f32| rounded(&half::f16::from_f32(*v).to_f32());
    assert_eq!(read(other), values.iter().map(through_half).collect::<Vec<_>>());
}

#[test]
fn heads_are_tied_only_as_the_config_says() {
    // Tied with a head in the file: the same model, and one line that says so.
    let copy = Copy::of("tiny-qwen3-untied");
    copy.edit_json("config.json", |config| config["tie_word_embeddings"] = json!(true));
    let tied = Checkpoint::open(copy.folder()).unwrap();
    assert_eq!(tied.warnings.len(), 1, "{:?}", tied.warnings);
    assert!(tied.warnings[0].contains("lm_head.weight"));
    // Untied without a head: no fallback to the embedding.
    let copy = Copy::of("shakespeare-qwen3");
    copy.edit_json("config.json", |config| config["tie_word_embeddings"] = json!(false));
    copy.refused(&["lm_head.weight", "missing"]);
    // Absent means untied in these families.
    copy.edit_json("config.json", |config| {
        config.as_object_mut().unwrap().remove("tie_word_embeddings");
    });
    copy.refused(&["lm_head.weight", "missing"]);
    // A head size that the weights do not have.
    let copy = Copy::of("shakespeare-qwen3");
    copy.edit_json("config.json", |config| config["head_dim"] = json!(32));
    copy.refused(&["q_proj.weight", "[512, 256]", "[256, 256]"]);
}

#[test]
fn unknown_tensors_are_warned_of_once_and_known_ones_ignored() {
    let copy = Copy::demo();
    let size = copy.size(FIRST);
    let data = size - 8 - u64::from_le_bytes(fs::read(copy.path(FIRST)).unwrap()[..8].try_into().unwrap());
    copy.edit_header(FIRST, |header| {
        for (i, name) in ["model.layers.0.self_attn.rotary_emb.inv_freq", "extra.one", "extra.two"].iter().enumerate() {
            let at = data + 32 * i as u64;
            header[name] = json!({"dtype": "F32", "shape": [8], "data_offsets": [at, at + 32]});
        }
    });
    let longer = copy.size(FIRST) + 96;
    copy.truncate(FIRST, longer);
    let warnings = Checkpoint::open(copy.folder()).unwrap().warnings;
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("2 tensors") && warnings[0].contains("extra.one, extra.two"), "{warnings:?}");
}

#[test]
fn the_models_identity_follows_config_and_weights() {
    let copy = Copy::demo();
    let sha = || Checkpoint::open(copy.folder()).unwrap().model_sha256().to_string();
    let first = sha();
    assert_eq!((first.len(), &first), (64, &sha()));
    copy.overwrite(SECOND, copy.size(SECOND) - 1, &[0x3c]);
    let second = sha();
    assert_ne!(first, second);
    copy.edit_json("config.json", |config| config["rms_norm_eps"] = json!(2e-6));
    assert_ne!(second, sha());
}
