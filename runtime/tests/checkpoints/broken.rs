//! Broken checkpoint folders: each mutation of a good one is refused before any weight is read, with what a person needs to mend it.

use crate::copy::{Copy, FIRST, INDEX, SECOND, refused};
use serde_json::json;
use slotgraph_runtime::checkpoint::Checkpoint;
use std::fs;

#[test]
fn an_unbroken_copy_opens() {
    assert!(Checkpoint::open(Copy::demo().folder()).is_ok());
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
    let pointer =
        format!("version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 5540576\n", "4d7a".repeat(16));
    let copy = Copy::demo();
    fs::write(copy.path(FIRST), &pointer).unwrap();
    copy.refused(&[FIRST, "Git LFS pointer", "git lfs pull"]);
    let copy = Copy::demo();
    fs::write(copy.path("config.json"), &pointer).unwrap();
    copy.refused(&["config.json", "Git LFS pointer"]);
    let copy = Copy::demo();
    fs::write(copy.path("tokenizer.json"), &pointer).unwrap();
    let error = Checkpoint::open(copy.folder()).unwrap().file("tokenizer.json").unwrap_err().to_string();
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
    refused(&empty.path().join("nowhere"), &["nowhere", "no such folder"]);
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
    assert!(Checkpoint::dummy(copy.folder(), 1).is_ok());
}
