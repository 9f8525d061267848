//! A checkpoint folder, opened and understood: the typed model, its weights' source, its text files, its identity.
//!
//! Opened once at start by the server and the probes; consumed by the engine (spec, source) and the server (tokenizer files, generation
//! defaults). **Invariant:** a `Checkpoint` that exists can be served: its configuration is implemented, its weights are whole.

mod eos;
mod fields;
mod folder;
mod generation;
mod model;
mod rope;
pub mod write;

pub use fields::parse_object;
pub use folder::Folder;
pub use generation::GenerationDefaults;

use crate::startup::{Phase, Phases};
use crate::weights::dummy::DummySource;
use crate::weights::files::FileSource;
use crate::weights::shards::Shards;
use crate::weights::{self, Required};
use fields::Fields;
use sha2::{Digest, Sha256};
use slotgraph_graphs::model::build;
use slotgraph_graphs::plan::{PlanError, RankShape};
use slotgraph_graphs::source::Source;
use slotgraph_graphs::spec::ModelSpec;
use slotgraph_graphs::step::StepLimits;
use slotgraph_kernels::WeightSpec;
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

const CONFIG: &str = "config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
const TOKENIZER: &str = "tokenizer.json";

/// Why a checkpoint cannot be served. Every message is one line and names the file, and the key or tensor where there is one.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file is missing, unreadable, or not what its name says.
    #[error("{file}: {reason}")]
    File { file: String, reason: String },
    /// A key of a JSON file has a value that cannot be served.
    #[error("{file}: {key}: {reason}")]
    Key { file: String, key: String, reason: String },
    /// Weights that are missing or malformed; every problem that was found.
    #[error("{0}")]
    Weights(String),
    /// The parsed model has no plan.
    #[error("{file}: {reason}")]
    Plan { file: String, reason: Box<PlanError> },
}

impl CheckpointError {
    pub(crate) fn file(file: impl Into<String>, reason: impl Into<String>) -> CheckpointError {
        CheckpointError::File { file: file.into(), reason: reason.into() }
    }
}

/// Where a checkpoint's weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase", tag = "format")]
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
    /// Their bytes, as stored (dummy: as bf16).
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
    /// Worth one log line each at start.
    pub warnings: Vec<String>,
    /// Time that opening took: `Config` for the JSON files, `Headers` for the weight files.
    pub opening: Phases,
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
        Self::load(Folder::Disk(PathBuf::from(path)), LoadFormat::Dummy { seed })
    }
    /// Opens `folder` with weights from `format`: what the three above do. Headers are validated, weights are not read yet.
    pub fn load(folder: Folder, format: LoadFormat) -> Result<Checkpoint, CheckpointError> {
        let mut opening = Phases::default();
        let parsed = opening.time(Phase::Config, || Parsed::read(&folder))?;
        let headers_started = Instant::now();
        let mut warnings = Vec::new();
        if parsed.spec.eos_ids.is_empty() {
            let ends = "only stop ids and max_tokens end an answer";
            warnings.push(format!("neither {CONFIG} nor {GENERATION_CONFIG} names an eos_token_id; {ends}"));
        }
        let mut sha = Sha256::new();
        sha.update(&parsed.config);
        let required = required(&parsed.spec)
            .map_err(|reason| CheckpointError::Plan { file: folder.label(CONFIG), reason: reason.into() })?;
        let parameters = weights::elements(&required);
        let (source, weights): (Arc<dyn Source>, WeightFacts) = match format {
            LoadFormat::Dummy { seed } => {
                sha.update(b"dummy");
                sha.update(seed.to_le_bytes());
                (
                    Arc::new(DummySource { seed }),
                    WeightFacts { parameters, bytes: parameters.saturating_mul(2), shards: 0 },
                )
            }
            LoadFormat::Safetensors => {
                if !folder.has(TOKENIZER) {
                    return Err(CheckpointError::file(folder.label(TOKENIZER), "is missing"));
                }
                let shards = Shards::open(&folder)?;
                warnings.extend(shards.check(&required, parsed.spec.tied_head)?);
                shards.hash(&mut sha)?;
                let bytes = required.keys().map(|name| shards.tensors[name].1.bytes).sum();
                let facts = WeightFacts { parameters, bytes, shards: shards.files.len() };
                (Arc::new(FileSource::new(shards)), facts)
            }
        };
        opening.add(Phase::Headers, headers_started.elapsed());
        Ok(Checkpoint {
            name: folder.name(),
            spec: parsed.spec,
            generation: parsed.generation,
            format,
            weights,
            warnings,
            opening,
            folder,
            source,
            sha256: hex(&sha.finalize()),
        })
    }
    /// Where a rank's weights are read from.
    pub fn source(&self) -> Arc<dyn Source> {
        self.source.clone()
    }
    /// A file of the folder by name (tokenizer.json, tokenizer_config.json, chat_template.jinja …), or None if it has none.
    pub fn file(&self, name: &str) -> Result<Option<Cow<'static, [u8]>>, CheckpointError> {
        self.folder.read(name)
    }
    /// How messages name a file of the folder.
    pub fn file_label(&self, name: &str) -> String {
        self.folder.label(name)
    }
    /// Lower-case hex SHA-256 that names this model: config.json, then every weight file's name, size and header, then
    /// the weights (whole up to 64 MiB in all; of more, each tensor's first 4 KiB, so that 30 GB cost milliseconds).
    /// Dummy weights: config.json and the seed.
    pub fn model_sha256(&self) -> &str {
        &self.sha256
    }
}

/// The checkpoint tensors that `spec` needs, with their shapes: the union over the plan's weights, of every expert.
pub fn required(spec: &ModelSpec) -> Result<Required, PlanError> {
    Ok(weights::required(&weight_specs(spec)?))
}

/// The weights of a plan of one row on one rank. They do not depend on the step's shape.
fn weight_specs(spec: &ModelSpec) -> Result<Vec<WeightSpec>, PlanError> {
    let limits = StepLimits {
        slots_max: 1,
        pages: 2,
        pages_per_slot: 1,
        buckets: vec![1],
        launch_ahead: 0,
        max_model_len: 1,
        prefill_chunk: 1,
    };
    Ok(build(spec, &limits, RankShape::SINGLE, 1)?.weights)
}

/// What config.json and generation_config.json say; each comes with how messages name it.
pub fn parse(
    label: &str,
    config: &[u8],
    generation: Option<(&str, &[u8])>,
) -> Result<(ModelSpec, GenerationDefaults), CheckpointError> {
    let object = parse_object(label, config)?;
    let generation = generation.map(|(label, bytes)| Ok((label, parse_object(label, bytes)?))).transpose()?;
    let generation = generation.as_ref().map(|(label, object)| Fields::new(label, object));
    let spec = model::parse(&Fields::new(label, &object), generation.as_ref())?;
    Ok((spec, generation.as_ref().map(GenerationDefaults::parse).transpose()?.unwrap_or_default()))
}

/// The JSON files, understood.
struct Parsed {
    config: Cow<'static, [u8]>,
    spec: ModelSpec,
    generation: GenerationDefaults,
}

impl Parsed {
    fn read(folder: &Folder) -> Result<Parsed, CheckpointError> {
        folder.check()?;
        let (config_label, generation_label) = (folder.label(CONFIG), folder.label(GENERATION_CONFIG));
        let Some(config) = folder.read(CONFIG)? else {
            return Err(CheckpointError::file(config_label, "is missing; a model folder has one"));
        };
        let generation = folder.read(GENERATION_CONFIG)?;
        let (spec, generation) = parse(&config_label, &config, generation.as_deref().map(|b| (&*generation_label, b)))?;
        Ok(Parsed { config, spec, generation })
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
