//! Broken checkpoint folders: each mutation of a good one is refused before any weight is read, with what a person needs to mend it.

use serde_json::{Value, json};
use slotgraph_runtime::checkpoint::Checkpoint;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const FIRST: &str = "model-00001-of-00002.safetensors";
const SECOND: &str = "model-00002-of-00002.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// A copy of a bundled model that a test may break.
struct Copy(TempDir);

impl Copy {
    fn of(model: &str) -> Copy {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/models").join(model);
        let copy = Copy(tempfile::tempdir().unwrap());
        for entry in fs::read_dir(source).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, copy.path(path.file_name().unwrap().to_str().unwrap())).unwrap();
        }
        copy
    }
    fn demo() -> Copy {
        Copy::of("shakespeare-dsv2")
    }
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
    fn size(&self, name: &str) -> u64 {
        fs::metadata(self.path(name)).unwrap().len()
    }
    fn truncate(&self, name: &str, size: u64) {
        OpenOptions::new().write(true).open(self.path(name)).unwrap().set_len(size).unwrap();
    }
    fn overwrite(&self, name: &str, at: u64, bytes: &[u8]) {
        let mut file = OpenOptions::new().write(true).open(self.path(name)).unwrap();
        file.seek(SeekFrom::Start(at)).unwrap();
        file.write_all(bytes).unwrap();
    }
    fn header(&self, name: &str) -> Value {
        let mut file = File::open(self.path(name)).unwrap();
        let mut length = [0; 8];
        file.read_exact(&mut length).unwrap();
        let mut json = vec![0; u64::from_le_bytes(length) as usize];
        file.read_exact(&mut json).unwrap();
        serde_json::from_slice(&json).unwrap()
    }
    /// Gives a file another header over the same data.
    fn reheader(&self, name: &str, header: &[u8]) {
        let old = fs::read(self.path(name)).unwrap();
        let start = 8 + u64::from_le_bytes(old[..8].try_into().unwrap()) as usize;
        let mut new = (header.len() as u64).to_le_bytes().to_vec();
        new.extend_from_slice(header);
        new.extend_from_slice(&old[start..]);
        fs::write(self.path(name), new).unwrap();
    }
    fn edit_header(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        let mut header = self.header(name);
        edit(&mut header);
        self.reheader(name, header.to_string().as_bytes());
    }
    fn edit_json(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        let mut value: Value = serde_json::from_slice(&fs::read(self.path(name)).unwrap()).unwrap();
        edit(&mut value);
        fs::write(self.path(name), value.to_string()).unwrap();
    }
    /// The refusal; it must be one line and hold every one of `words`.
    fn refused(&self, words: &[&str]) -> String {
        refused(self.0.path(), words)
    }
}

fn refused(path: &Path, words: &[&str]) -> String {
    let message = match Checkpoint::open(path) {
        Ok(_) => panic!("{} was accepted", path.display()),
        Err(error) => error.to_string(),
    };
    assert!(!message.contains('\n'), "more than one line: {message}");
    for word in words {
        assert!(message.contains(word), "{word:?} is not in: {message}");
    }
    message
}

#[test]
fn an_unbroken_copy_opens() {
    assert!(Checkpoint::open(Copy::demo().0.path()).is_ok());
}

#[test]
fn a_missing_shard_is_named_with_the_index_that_lists_it() {
    let copy = Copy::demo();
    fs::remove_file(copy.path(SECOND)).unwrap();
    let message = copy.refused(&[SECOND, INDEX]);
    assert!(!message.contains(FIRST), "{message}");
}

#[test]
fn truncated_files_are_named_with_expected_and_actual_bytes() {
    let copy = Copy::demo();
    let size = copy.size(FIRST);
    copy.truncate(FIRST, size - 1);
    copy.refused(&[FIRST, "truncated", &size.to_string(), &(size - 1).to_string()]);
    copy.truncate(FIRST, 4);
    copy.refused(&[FIRST, "truncated", "expected at least 8 bytes", "found 4"]);
    copy.truncate(FIRST, 0);
    copy.refused(&[FIRST, "truncated", "expected at least 8 bytes", "found 0"]);
}

#[test]
fn both_broken_shards_are_named_at_once() {
    let copy = Copy::demo();
    copy.truncate(FIRST, 4);
    copy.truncate(SECOND, 100);
    copy.refused(&[FIRST, SECOND]);
}

#[test]
fn bytes_after_the_last_tensor_are_refused() {
    let copy = Copy::demo();
    let size = copy.size(SECOND);
    copy.truncate(SECOND, size + 10);
    copy.refused(&[SECOND, "10 bytes after its last tensor", &size.to_string()]);
}

#[test]
fn absurd_header_lengths_are_refused_without_allocating_them() {
    let copy = Copy::demo();
    let size = copy.size(FIRST);
    copy.overwrite(FIRST, 0, &[0xff; 8]);
    copy.refused(&[FIRST, &u64::MAX.to_string(), &size.to_string()]);
    copy.overwrite(FIRST, 0, &(size - 7).to_le_bytes());
    copy.refused(&[FIRST, &(size + 1).to_string(), &size.to_string()]);
    // A sparse file of 200 MB whose header would be all of it: the format's own limit applies.
    copy.truncate(FIRST, 200_000_008);
    copy.overwrite(FIRST, 0, &200_000_000u64.to_le_bytes());
    copy.refused(&[FIRST, "200000000", "at most 100000000"]);
}

#[test]
fn headers_that_are_not_json_objects_of_tensors_are_refused() {
    let copy = Copy::demo();
    let good = fs::read(copy.path(FIRST)).unwrap();
    for (header, words) in [
        (&b"not json at all"[..], "not valid JSON"),
        (b"[1,2]", "not valid JSON"),
        (b"{\"a\":{\"dtype\":\"BF16\"}}", "tensor a"),
        (b"{\"a\":{\"dtype\":\"ZZ9\",\"shape\":[0],\"data_offsets\":[0,0]}}", "ZZ9"),
        (b"{\"a\":{\"dtype\":\"BF16\",\"shape\":[-1],\"data_offsets\":[0,0]}}", "tensor a"),
        (b"{\"a\":1,\"a\":2}", "declared twice"),
        (&[0xff, 0xfe, b'{', b'}'], "not valid JSON"),
    ] {
        copy.reheader(FIRST, header);
        copy.refused(&[FIRST, words]);
        fs::write(copy.path(FIRST), &good).unwrap();
    }
}

const NORM: &str = "model.layers.0.input_layernorm.weight";

#[test]
fn wrong_offsets_are_refused_by_file_and_tensor() {
    let copy = Copy::demo();
    let good = fs::read(copy.path(FIRST)).unwrap();
    let offsets = copy.header(FIRST)[NORM]["data_offsets"].clone();
    let (begin, end) = (offsets[0].as_u64().unwrap(), offsets[1].as_u64().unwrap());
    let far = 1u64 << 40;
    for (offsets, words) in [
        (json!([begin - 64, end - 64]), "overlaps"),
        (json!([begin + 64, end + 64]), "belong to no tensor"),
        (json!([far, far + 512]), "out of range"),
        (json!([begin, end + 2]), "do not fit"),
        (json!([end, begin]), "do not fit"),
        (json!([u64::MAX - 511, u64::MAX]), "data_offsets"),
        (json!([0]), "header entry is bad"),
    ] {
        copy.edit_header(FIRST, |header| header[NORM]["data_offsets"] = offsets);
        copy.refused(&[FIRST, "tensor", words]);
        fs::write(copy.path(FIRST), &good).unwrap();
    }
    copy.edit_header(FIRST, |header| header[NORM]["shape"] = json!([1u64 << 40, 1u64 << 40, 1u64 << 40]));
    copy.refused(&[FIRST, NORM, "do not fit"]);
}

#[test]
fn a_git_lfs_pointer_is_called_one() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 5540576\n";
    let copy = Copy::demo();
    fs::write(copy.path(FIRST), pointer).unwrap();
    copy.refused(&[FIRST, "Git LFS pointer", "git lfs pull"]);
    let copy = Copy::demo();
    fs::write(copy.path("config.json"), pointer).unwrap();
    copy.refused(&["config.json", "Git LFS pointer"]);
    let copy = Copy::demo();
    fs::write(copy.path("tokenizer.json"), pointer).unwrap();
    let error = Checkpoint::open(copy.0.path()).unwrap().file("tokenizer.json").unwrap_err().to_string();
    assert!(error.contains("tokenizer.json") && error.contains("Git LFS pointer"), "{error}");
}

#[test]
fn an_index_that_places_tensors_wrongly_is_refused_with_all_of_them() {
    let copy = Copy::demo();
    copy.edit_json(INDEX, |index| {
        index["weight_map"]["model.invented.weight"] = json!(FIRST);
        index["weight_map"]["lm_head.weight"] = json!(SECOND);
    });
    copy.refused(&[INDEX, "model.invented.weight", FIRST, "lm_head.weight", SECOND, "does not hold"]);
    for bad in [json!("../outside.safetensors"), json!(7), json!("")] {
        copy.edit_json(INDEX, |index| index["weight_map"] = json!({"lm_head.weight": bad}));
        copy.refused(&[INDEX, "lm_head.weight", "not a file name"]);
    }
    copy.edit_json(INDEX, |index| index["weight_map"] = json!({}));
    copy.refused(&[INDEX, "weight_map", "empty"]);
    fs::write(copy.path(INDEX), "{").unwrap();
    copy.refused(&[INDEX, "not valid JSON"]);
}

#[test]
fn all_missing_tensors_are_in_one_message() {
    let copy = Copy::demo();
    let gone = ["lm_head.weight", "model.embed_tokens.weight", NORM];
    for name in gone {
        copy.edit_header(FIRST, |header| {
            let entry = header.as_object_mut().unwrap().remove(name).unwrap();
            header[format!("renamed.{name}")] = entry;
        });
        copy.edit_json(INDEX, |index| {
            index["weight_map"].as_object_mut().unwrap().remove(name);
        });
    }
    copy.refused(&["missing tensors", gone[0], gone[1], gone[2]]);
}

#[test]
fn wrong_shapes_and_dtypes_are_refused_with_found_and_expected() {
    let copy = Copy::demo();
    copy.edit_header(FIRST, |header| header["lm_head.weight"]["shape"] = json!([256, 2048]));
    copy.refused(&[FIRST, "lm_head.weight", "[256, 2048]", "[2048, 256]"]);
    // The same bytes under other types: 256 BF16 are 64 F64 or 512 I8.
    for (dtype, n) in [("F64", 64), ("I8", 512)] {
        let copy = Copy::demo();
        copy.edit_header(FIRST, |header| {
            header[NORM]["dtype"] = json!(dtype);
            header[NORM]["shape"] = json!([n]);
        });
        copy.refused(&[FIRST, NORM, dtype, "expected BF16"]);
    }
}

#[test]
fn every_wrong_tensor_is_in_one_message() {
    let copy = Copy::demo();
    copy.edit_header(FIRST, |header| {
        header["lm_head.weight"]["shape"] = json!([256, 2048]);
        header[NORM]["shape"] = json!([2, 128]);
    });
    copy.refused(&["lm_head.weight", NORM]);
}

#[test]
fn missing_files_are_named() {
    let empty = tempfile::tempdir().unwrap();
    refused(empty.path(), &["config.json", "missing"]);
    refused(&empty.path().join("nowhere"), &["nowhere"]);
    let copy = Copy::demo();
    refused(&copy.path("config.json"), &["config.json", "is a file"]);
    fs::remove_file(copy.path("tokenizer.json")).unwrap();
    copy.refused(&["tokenizer.json", "missing"]);
    let copy = Copy::demo();
    fs::remove_file(copy.path("config.json")).unwrap();
    copy.refused(&["config.json", "missing"]);
    let copy = Copy::demo();
    fs::remove_file(copy.path(INDEX)).unwrap();
    fs::write(copy.path("pytorch_model.bin"), "x").unwrap();
    copy.refused(&["model.safetensors", INDEX, "pytorch_model.bin"]);
}

#[test]
fn dummy_weights_need_nothing_but_the_config() {
    let copy = Copy::demo();
    for name in [FIRST, SECOND, INDEX, "tokenizer.json", "generation_config.json"] {
        fs::remove_file(copy.path(name)).unwrap();
    }
    assert!(Checkpoint::dummy(copy.0.path(), 1).is_ok());
}

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
        let checkpoint = Checkpoint::open(copy.0.path()).unwrap();
        let spec = slotgraph_kernels::WeightSpec {
            name: "final_norm".into(),
            form: slotgraph_kernels::WeightForm::Vector { n: 256 },
            parts: vec![slotgraph_kernels::TensorPart {
                tensor: name.into(),
                tensor_shape: vec![256],
                rows: 0..256,
                transpose: false,
                group: 0,
                dst_row: 0,
            }],
        };
        let error = checkpoint.source().read(&spec, 0, &mut [0; 256]).unwrap_err().to_string();
        for word in [file, name, shown, "element 5"] {
            assert!(error.contains(word), "{word} is not in: {error}");
        }
    }
}

#[test]
fn a_file_that_shrinks_after_it_was_checked_is_an_error_and_not_a_signal() {
    let copy = Copy::demo();
    let checkpoint = Checkpoint::open(copy.0.path()).unwrap();
    copy.truncate(FIRST, 100_000);
    let spec = slotgraph_kernels::WeightSpec {
        name: "embed".into(),
        form: slotgraph_kernels::WeightForm::Table { rows: 2048, cols: 256 },
        parts: vec![slotgraph_kernels::TensorPart {
            tensor: "model.embed_tokens.weight".into(),
            tensor_shape: vec![2048, 256],
            rows: 0..2048,
            transpose: false,
            group: 0,
            dst_row: 0,
        }],
    };
    let error = checkpoint.source().read(&spec, 0, &mut vec![0; 2048 * 256]).unwrap_err().to_string();
    assert!(error.contains(FIRST), "{error}");
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

    let checkpoint = Checkpoint::open(copy.0.path()).unwrap();
    assert_eq!(checkpoint.warnings.len(), 2, "{:?}", checkpoint.warnings);
    let read = |tensor: &str| {
        let spec = slotgraph_kernels::WeightSpec {
            name: "norm".into(),
            form: slotgraph_kernels::WeightForm::Vector { n: 128 },
            parts: vec![slotgraph_kernels::TensorPart {
                tensor: tensor.into(),
                tensor_shape: vec![128],
                rows: 0..128,
                transpose: false,
                group: 0,
                dst_row: 0,
            }],
        };
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
    let tied = Checkpoint::open(copy.0.path()).unwrap();
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
    let warnings = Checkpoint::open(copy.0.path()).unwrap().warnings;
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("2 tensors") && warnings[0].contains("extra.one, extra.two"), "{warnings:?}");
}

#[test]
fn the_models_identity_follows_config_and_weights() {
    let copy = Copy::demo();
    let sha = || Checkpoint::open(copy.0.path()).unwrap().model_sha256().to_string();
    let first = sha();
    assert_eq!((first.len(), &first), (64, &sha()));
    copy.overwrite(SECOND, copy.size(SECOND) - 1, &[0x3c]);
    let second = sha();
    assert_ne!(first, second);
    copy.edit_json("config.json", |config| config["rms_norm_eps"] = json!(2e-6));
    assert_ne!(second, sha());
}
