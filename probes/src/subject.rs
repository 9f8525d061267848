//! The model and configuration that a direct probe works on: a checkpoint, a resolved configuration, devices made from them.
//!
//! The flags are the server's own and are resolved by the same code, so that a probe measures what the server would run.

use crate::cli::ProbeError;
use crate::evidence::{Draft, short_path};
use serde_json::{Value, json};
use slotgraph_graphs::cpu::{CpuDevice, CpuOptions};
use slotgraph_graphs::device::Device;
use slotgraph_graphs::step::StepLimits;
use slotgraph_kernels::Precision;
use slotgraph_runtime::checkpoint::{Checkpoint, Folder, LoadFormat};
use slotgraph_runtime::config::{Config, Machine, PrecisionMode, Settings};
use std::path::PathBuf;

/// Which model, on which device, in which shape: flags of `slotgraph serve`.
#[derive(Clone, Debug, clap::Args)]
pub struct SubjectArgs {
    /// Checkpoint folder.
    #[arg(value_name = "MODEL")]
    pub model: Option<PathBuf>,
    #[arg(long, value_name = "auto|cpu|cuda")]
    pub device: Option<String>,
    #[arg(long, num_args = 0..=1, default_missing_value = "on", require_equals = true, value_name = "on|off")]
    pub cuda_graph: Option<String>,
    #[arg(long)]
    pub buckets: Option<String>,
    #[arg(long)]
    pub max_slots: Option<usize>,
    #[arg(long)]
    pub max_model_len: Option<usize>,
    #[arg(long)]
    pub kv_memory: Option<String>,
    #[arg(long)]
    pub kv_pages: Option<usize>,
    #[arg(long)]
    pub ep: Option<usize>,
    #[arg(long)]
    pub devices: Option<String>,
    #[arg(long)]
    pub allow_shared_device: bool,
    #[arg(long, value_name = "host-staged|nccl|p2p")]
    pub transport: Option<String>,
    #[arg(long, value_name = "auto|dummy")]
    pub load_format: Option<String>,
    #[arg(long)]
    pub seed: Option<u64>,
    #[arg(long)]
    pub prefill_chunk: Option<usize>,
    #[arg(long)]
    pub launch_ahead: Option<usize>,
    #[arg(long, value_name = "on|off")]
    pub pdl: Option<String>,
    #[arg(long, value_name = "on|off")]
    pub fusion: Option<String>,
    /// CPU device: `oracle` (fp32) or `contract` (rounded as on a GPU).
    #[arg(long, value_name = "oracle|contract")]
    pub precision: Option<String>,
    #[arg(long)]
    pub threads: Option<usize>,
    #[arg(long)]
    pub lib_dir: Option<PathBuf>,
}

/// An opened model and its resolved configuration.
pub struct Subject {
    pub checkpoint: Checkpoint,
    pub config: Config,
}

/// A device that is ready to run steps.
pub struct PreparedDevice {
    pub device: Box<dyn Device>,
    pub limits: StepLimits,
    /// The start-up record.
    pub startup: Value,
}

impl SubjectArgs {
    pub fn settings(&self) -> Settings {
        Settings {
            device: self.device.clone(),
            cuda_graph: self.cuda_graph.clone(),
            buckets: self.buckets.clone(),
            max_slots: self.max_slots,
            max_model_len: self.max_model_len,
            kv_memory: self.kv_memory.clone(),
            kv_pages: self.kv_pages,
            ep: self.ep,
            devices: self.devices.clone(),
            allow_shared_device: self.allow_shared_device,
            transport: self.transport.clone(),
            load_format: self.load_format.clone(),
            seed: self.seed,
            prefill_chunk: self.prefill_chunk,
            launch_ahead: self.launch_ahead,
            pdl: self.pdl.clone(),
            fusion: self.fusion.clone(),
            precision: self.precision.clone(),
            threads: self.threads,
            lib_dir: self.lib_dir.clone(),
            ..Settings::default()
        }
    }
}

impl Subject {
    pub fn open(args: &SubjectArgs) -> Result<Subject, ProbeError> {
        Subject::with(args, args.settings())
    }

    /// As `open`, with settings that a probe changed.
    pub fn with(args: &SubjectArgs, settings: Settings) -> Result<Subject, ProbeError> {
        let usage = |e: &dyn std::fmt::Display| ProbeError::Usage(e.to_string());
        let checkpoint = match (&args.model, args.load_format.as_deref()) {
            (Some(folder), Some("dummy")) => {
                let format = LoadFormat::Dummy { seed: args.seed.unwrap_or(0) };
                Checkpoint::load(Folder::Disk(folder.clone()), format)
            }
            (Some(folder), None | Some("auto")) => Checkpoint::open(folder),
            (_, Some(format)) if format != "auto" => {
                return Err(ProbeError::Usage(format!(
                    "--load-format {format}: dummy needs a MODEL, other words are unknown"
                )));
            }
            (None, _) => return Err(ProbeError::Usage("name a MODEL folder".into())),
            (Some(_), Some(_)) => unreachable!("every other format was refused"),
        }
        .map_err(|e| usage(&e))?;
        let config =
            Config::resolve(&settings, &checkpoint.spec, &checkpoint.name, machine()).map_err(|e| usage(&e))?;
        Ok(Subject { checkpoint, config })
    }

    /// The configured device with every plan prepared, or why this machine has none.
    pub fn device(&self) -> Result<PreparedDevice, ProbeError> {
        let limits = self.limits();
        let source = self.checkpoint.source();
        let mut options = CpuOptions::new(&self.checkpoint.spec, &limits, &*source);
        options.precision = match self.config.precision {
            PrecisionMode::Oracle => Precision::Oracle,
            PrecisionMode::Contract => Precision::Contract,
        };
        options.threads = Some(self.config.threads);
        let device = CpuDevice::prepare(options).map_err(|e| ProbeError::Failed(e.to_string()))?;
        Ok(PreparedDevice { device: Box::new(device), limits, startup: Value::Null })
    }

    /// The limits of the configured pool (CPU, bytes or pages).
    pub fn limits(&self) -> StepLimits {
        let pages = self.config.fixed_pages().unwrap_or(1 + self.config.max_slots * self.config.pages_per_slot());
        self.config.limits(pages)
    }

    /// Writes model and configuration into a draft.
    pub fn describe(&self, mut draft: Draft) -> Draft {
        let mut config = serde_json::to_value(&self.config).expect("a configuration is plain data");
        if let Some(folder) = config.get("lib_dir").and_then(|v| v.as_str()).map(short_path) {
            config["lib_dir"] = folder.into();
        }
        draft.config = json!({
            "model": {"name": self.checkpoint.name, "sha256": self.checkpoint.model_sha256(), "load": self.checkpoint.format},
            "config": config,
        });
        draft.seed = self.config.seed;
        draft
    }
}

/// What this machine offers.
pub fn machine() -> Machine {
    Machine {
        gpus: crate::machine::Machine::read().gpus.len(),
        processors: std::thread::available_parallelism().map_or(1, |processors| processors.get()),
    }
}
