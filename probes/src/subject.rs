//! The model and configuration that a direct probe works on: a checkpoint, a resolved configuration, devices made from them.
//!
//! The flags are the server's own and are resolved by the same code, so that a probe measures what the server would run.

use crate::cli::ProbeError;
use crate::cuda::{self, NoDevice};
use crate::driver::Driver;
use crate::evidence::{Draft, short_path};
use serde_json::{Value, json};
use slotgraph_graphs::cuda::{CopyRates, CudaDevice};
use slotgraph_graphs::device::Device;
use slotgraph_graphs::step::StepLimits;
use slotgraph_runtime::checkpoint::Checkpoint;
use slotgraph_runtime::config::{Config, DeviceKind, Settings};
use slotgraph_runtime::engine;
use slotgraph_runtime::startup::Phases;
use slotgraph_server::cli::Engine;
use slotgraph_server::load::{self, LoadError};
use std::path::PathBuf;

/// Which model, and the server's flags that say how it runs.
#[derive(Clone, Debug, clap::Args)]
pub struct SubjectArgs {
    /// Checkpoint folder [default: the bundled demo model]
    #[arg(value_name = "MODEL")]
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub engine: Engine,
}

/// An opened model and its resolved configuration.
pub struct Subject {
    pub checkpoint: Checkpoint,
    pub config: Config,
}

/// A device that has run no step yet.
pub struct Prepared {
    pub device: Box<dyn Device>,
    pub limits: StepLimits,
    /// What preparing it took.
    pub startup: Value,
    /// What copies of a GPU reach.
    pub copies: Option<CopyRates>,
}

/// A GPU that was asked for and is not there is no mistake of the command's.
fn refused(error: LoadError) -> ProbeError {
    match &error {
        LoadError::Cuda(_) => ProbeError::Absent(error.to_string()),
        LoadError::Config(config) if config.flag == "--device" && config.value == "cuda" => {
            ProbeError::Absent(error.to_string())
        }
        _ => ProbeError::Usage(error.to_string()),
    }
}

/// Drives whatever device was configured.
pub type AnyDriver = Driver<Box<dyn Device>>;

impl Prepared {
    pub fn into_driver(self) -> AnyDriver {
        Driver::new(self.device, self.limits)
    }
}

impl Subject {
    pub fn open(args: &SubjectArgs) -> Result<Subject, ProbeError> {
        Subject::with(args, &args.engine.settings())
    }

    /// As `open`, with settings that a probe changed.
    pub fn with(args: &SubjectArgs, settings: &Settings) -> Result<Subject, ProbeError> {
        let (checkpoint, config) =
            load::open(args.model.as_ref(), settings, &mut Phases::default()).map_err(refused)?;
        Ok(Subject { checkpoint, config })
    }

    /// The configured device (of one or several ranks) with every plan prepared, or why this machine has none.
    pub fn device(&self) -> Result<Prepared, NoDevice> {
        self.device_after(|_| ())
    }

    /// As `device`; where it is one GPU of a single rank, `look` sees that before anything else does.
    pub fn device_after(&self, look: impl FnOnce(&CudaDevice)) -> Result<Prepared, NoDevice> {
        if self.config.device == DeviceKind::Cuda && self.config.ep == 1 {
            let mut device = cuda::prepare(self, self.config.cuda_graph, None)?;
            look(&device);
            let copies = device.copy_rates().ok();
            let limits = device.limits().clone();
            let startup = serde_json::to_value(device.report()).expect("a report is plain data");
            return Ok(Prepared { device: Box::new(device), limits, startup, copies });
        }
        let (device, ranks) =
            engine::device(&self.config, &self.checkpoint).map_err(|e| NoDevice::Failed(e.to_string()))?;
        let records: Vec<Value> =
            ranks.iter().map(|rank| serde_json::to_value(&rank.record).expect("a record is plain data")).collect();
        let limits = ranks[0].limits.clone();
        Ok(Prepared { device, limits, startup: json!({ "ranks": records }), copies: None })
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
