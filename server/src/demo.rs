//! The bundled model: a small DeepSeek-V2 trained on Shakespeare's plays, in the binary.
//!
//! Served when no model is named; so a fresh build answers without a download or a GPU.

use slotgraph_runtime::checkpoint::{Checkpoint, CheckpointError};

/// The bundled model's name.
pub const NAME: &str = "shakespeare-dsv2";

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!("../../tests/models/shakespeare-dsv2/", $name)))),*]
    };
}

/// Its files, as a checkpoint folder would hold them.
pub const FILES: &[(&str, &[u8])] = files![
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
];

/// Opens the bundled model.
pub fn checkpoint() -> Result<Checkpoint, CheckpointError> {
    Checkpoint::embedded(NAME, FILES)
}
