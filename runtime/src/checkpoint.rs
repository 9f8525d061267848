//! A checkpoint folder, opened and understood: the typed model, its weights' source, its text files, its identity.
//!
//! Opened once at start by the server and the probes; consumed by the engine (spec, source) and the server (tokenizer files, generation
//! defaults). **Invariant:** a `Checkpoint` that exists can be served: its configuration is implemented, its weights are whole.

mod generation;

pub use generation::GenerationDefaults;

use slotgraph_graphs::source::Source;
use slotgraph_graphs::spec::ModelSpec;
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why a checkpoint cannot be served. Every message names the file, and the key or tensor where there is one.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file is missing or unreadable.
    #[error("{file}: {reason}")]
    File { file: String, reason: String },
    /// A key of a JSON file has a value that cannot be served.
    #[error("{file}: {key}: {reason}")]
    Key { file: String, key: String, reason: String },
    /// Weights that are missing or malformed; one problem a line when there are several.
    #[error("{0}")]
    Weights(String),
}

/// Where a checkpoint's files are.
#[derive(Clone, Debug)]
pub enum Folder {
    Disk(PathBuf),
    /// Bytes in the binary: (file name, contents).
    Embedded {
        name: &'static str,
        files: &'static [(&'static str, &'static [u8])],
    },
}

/// Where a checkpoint's weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadFormat {
    /// The folder's safetensors.
    Safetensors,
    /// The seeded generator; only `config.json` is needed.
    Dummy { seed: u64 },
}

/// What the weights amount to, as the files hold them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct WeightFacts {
    /// Elements of the tensors that the model uses (a tied head counts once).
    pub parameters: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Weight files; 0 for dummy weights.
    pub shards: usize,
}

/// An opened checkpoint.
pub struct Checkpoint {
    /// Folder name; the default served model name.
    pub name: String,
    pub spec: ModelSpec,
    /// From generation_config.json.
    pub generation: GenerationDefaults,
    pub format: LoadFormat,
    pub weights: WeightFacts,
    folder: Folder,
    source: Arc<dyn Source>,
    sha256: String,
}

impl Checkpoint {
    /// Opens a Hugging Face checkpoint folder.
    pub fn open(path: &Path) -> Result<Checkpoint, CheckpointError> {
        Self::load(Folder::Disk(path.to_path_buf()), LoadFormat::Safetensors)
    }
    /// Opens a checkpoint whose files are bytes in the binary.
    pub fn embedded(
        name: &'static str,
        files: &'static [(&'static str, &'static [u8])],
    ) -> Result<Checkpoint, CheckpointError> {
        Self::load(Folder::Embedded { name, files }, LoadFormat::Safetensors)
    }
    /// Opens a folder that needs only `config.json`; weights come from the seeded generator.
    pub fn dummy(path: &Path, seed: u64) -> Result<Checkpoint, CheckpointError> {
        Self::load(Folder::Disk(path.to_path_buf()), LoadFormat::Dummy { seed })
    }
    /// Opens `folder` with weights from `format`: what the three above do.
    pub fn load(folder: Folder, format: LoadFormat) -> Result<Checkpoint, CheckpointError> {
        let _ = (&folder, format);
        Err(CheckpointError::Weights("checkpoints cannot be opened yet".into()))
    }
    /// Where a rank's weights are read from.
    pub fn source(&self) -> Arc<dyn Source> {
        self.source.clone()
    }
    /// A file of the folder by name (tokenizer.json, tokenizer_config.json, chat_template.jinja …), or None if it has none.
    pub fn file(&self, name: &str) -> Result<Option<Cow<'static, [u8]>>, CheckpointError> {
        let _ = (&self.folder, name);
        Ok(None)
    }
    /// Lower-case hex SHA-256 that names this model.
    pub fn model_sha256(&self) -> &str {
        &self.sha256
    }
}
