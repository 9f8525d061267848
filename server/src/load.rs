//! From a folder (or nothing) to a service: checkpoint, configuration, tokenizer, template, engine.
//!
//! Used by `serve` and `generate`. **Invariant:** what cannot be served is refused here, with the file, key or flag, before anything waits for
//! it.

use crate::app::Service;
use crate::request::Limits;
use crate::template::Template;
use crate::tokenizer::Tokenizer;
use slotgraph_runtime::checkpoint::{Checkpoint, CheckpointError, Folder, LoadFormat};
use slotgraph_runtime::config::{Config, ConfigError, Machine, Settings};
use slotgraph_runtime::engine::{self, EngineHandle, StartError};
use slotgraph_runtime::startup::{Phase, Phases, StartupRecord};
use slotgraph_runtime::trace::Observer;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Why there is nothing to serve.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Tokenizer(#[from] crate::tokenizer::TokenizerError),
    #[error(transparent)]
    Template(#[from] crate::template::TemplateError),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error("--device cuda: {0}")]
    Cuda(String),
    #[error("{0}")]
    Plan(String),
}

impl LoadError {
    /// 2 where a flag or a file must change, 1 where a device failed.
    pub fn exit_code(&self) -> u8 {
        match self {
            LoadError::Start(StartError::Rank { .. } | StartError::Timeout { .. }) => 1,
            _ => 2,
        }
    }
}

/// What the machine offers. CUDA is not looked for when it is not wanted; that it is wanted and not to be had is an error with its reason.
fn machine(settings: &Settings) -> Result<Machine, LoadError> {
    let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
    let lib_dirs: Vec<PathBuf> = settings.lib_dir.iter().cloned().collect();
    let gpus = match settings.device.as_deref() {
        Some("cpu") => 0,
        device => match slotgraph_graphs::cuda::device_count(&lib_dirs) {
            Ok(count) => count,
            Err(error) if device == Some("cuda") => return Err(LoadError::Cuda(error.to_string())),
            Err(error) => {
                tracing::debug!(%error, "no CUDA device");
                0
            }
        },
    };
    Ok(Machine { gpus, processors })
}

/// Opens the checkpoint and resolves the configuration against it.
pub fn open(
    model: Option<&PathBuf>,
    settings: &Settings,
    phases: &mut Phases,
) -> Result<(Checkpoint, Config), LoadError> {
    let format = settings.load_format()?;
    let checkpoint = phases.time(Phase::Headers, || match model {
        Some(path) => Checkpoint::load(Folder::Disk(path.clone()), format),
        None => Checkpoint::load(Folder::Embedded { name: crate::demo::NAME, files: crate::demo::FILES }, format),
    })?;
    let machine = machine(settings)?;
    let config =
        phases.time(Phase::Config, || Config::resolve(settings, &checkpoint.spec, &checkpoint.name, machine))?;
    Ok((checkpoint, config))
}

/// The text side of a checkpoint.
pub struct Texts {
    pub tokenizer: Arc<Tokenizer>,
    pub template: Option<Template>,
}

/// Reads the tokenizer and the chat template. Dummy weights do without: a stand-in then spells ids as bytes.
pub fn texts(checkpoint: &Checkpoint) -> Result<Texts, LoadError> {
    let tokenizer = match (checkpoint.file("tokenizer.json")?, checkpoint.format) {
        (Some(json), _) => Tokenizer::parse(&json)?,
        (None, LoadFormat::Dummy { .. }) => {
            tracing::warn!("no tokenizer.json: text is spelled in bytes, one a token");
            Tokenizer::bytes_only(checkpoint.spec.vocab)
        }
        (None, LoadFormat::Safetensors) => {
            let reason = "missing; a checkpoint folder needs it".to_owned();
            return Err(crate::tokenizer::TokenizerError { file: "tokenizer.json", reason }.into());
        }
    };
    let jinja = checkpoint.file("chat_template.jinja")?;
    let config = checkpoint.file("tokenizer_config.json")?;
    let template = Template::load(jinja.as_deref(), config.as_deref())?;
    if template.is_none() {
        tracing::warn!("no chat template: /v1/chat/completions answers 400");
    }
    Ok(Texts { tokenizer: Arc::new(tokenizer), template })
}

/// Starts the engine and puts the service together.
pub fn start(
    config: &Config,
    checkpoint: &Checkpoint,
    texts: Texts,
    observer: Arc<dyn Observer>,
    phases: &Phases,
    began: Instant,
) -> Result<Service, LoadError> {
    let engine = engine::start(config, checkpoint, observer)?;
    let contract_hash = engine.ranks().first().map(|rank| rank.record.device.contract_hash.clone()).unwrap_or_default();
    let startup = startup(config, checkpoint, &engine, phases, began)?;
    Ok(Service {
        limits: limits(config, checkpoint, &engine),
        tokenizer: texts.tokenizer,
        template: texts.template,
        fingerprint: fingerprint(&contract_hash, checkpoint.format),
        contract_hash,
        model_sha256: checkpoint.model_sha256().to_owned(),
        startup,
        engine,
    })
}

pub fn limits(config: &Config, checkpoint: &Checkpoint, engine: &EngineHandle) -> Limits {
    Limits {
        served: config.served_names.clone(),
        vocab: checkpoint.spec.vocab as u32,
        context: config.max_model_len as u32,
        choices_max: engine.limit(),
        defaults: checkpoint.generation.clone(),
    }
}

fn fingerprint(contract_hash: &str, format: LoadFormat) -> String {
    let head = contract_hash.get(..16).unwrap_or(contract_hash);
    match format {
        LoadFormat::Safetensors => format!("fp_{head}"),
        LoadFormat::Dummy { .. } => format!("fp_{head}-dummy"),
    }
}

fn startup(
    config: &Config,
    checkpoint: &Checkpoint,
    engine: &EngineHandle,
    phases: &Phases,
    began: Instant,
) -> Result<String, LoadError> {
    let mut phases = phases.clone();
    phases.add(Phase::Ready, began.elapsed());
    let ranks = engine.ranks().iter().map(|rank| rank.record.clone()).collect();
    let libraries = engine.ranks().first().map(|rank| rank.libraries.clone()).unwrap_or_default();
    let record = StartupRecord::new(config, checkpoint, engine.pages(), &phases, ranks, libraries)
        .map_err(|error| LoadError::Plan(error.to_string()))?;
    Ok(record.line())
}
