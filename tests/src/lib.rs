//! What the tests across crates share: the models and their oracle, and a rig that drives the real engine.
//!
//! Used by the files in `tests/`; nothing depends on it.
#![forbid(unsafe_code)]

pub mod cpu;
pub mod drive;
pub mod fuzz;
pub mod http;
pub mod oracle;
pub mod rig;
pub mod server;
pub mod stepwise;
pub mod weights;

use std::path::{Path, PathBuf};

/// The two trained models, by folder name, with the file that holds their oracle.
pub const TRAINED: [(&str, &str); 2] = [("shakespeare-dsv2", "dsv2"), ("shakespeare-qwen3", "qwen3")];

/// Every model, by folder name, with the file that holds its oracle.
pub const MODELS: [(&str, &str); 5] = [
    ("shakespeare-dsv2", "dsv2"),
    ("shakespeare-qwen3", "qwen3"),
    ("tiny-llama3", "tiny-llama3"),
    ("tiny-dsv2-grouped", "tiny-dsv2-grouped"),
    ("tiny-qwen3-untied", "tiny-qwen3-untied"),
];

/// The workspace's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests crate lies in the workspace").to_path_buf()
}

/// Folder of a model for tests.
pub fn model(name: &str) -> PathBuf {
    root().join("tests/models").join(name)
}

/// Folder of a real model's shape: its `config.json` alone.
pub fn shape(name: &str) -> PathBuf {
    root().join("tests/shapes").join(name)
}
