//! Configuration: what flags and variables said (`Settings`), resolved once against the model and the machine (`Config`).
//!
//! The server's command line fills a `Settings`; `Config::resolve` is the only place where defaults are chosen and combinations are refused.
//! **Invariant:** a `Config` that exists can run; nothing changes it afterwards.

mod settings;

pub use settings::Settings;

use slotgraph_graphs::spec::ModelSpec;
use slotgraph_graphs::step::StepLimits;
use std::time::Duration;

/// A flag whose value cannot be used; the process exits with 2.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{flag} {value}: {reason}")]
pub struct ConfigError {
    /// `--ep`
    pub flag: String,
    pub value: String,
    /// What is wrong, and which flag or value would help.
    pub reason: String,
}

/// What the machine offers, found before the configuration is resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Visible CUDA devices; 0 when the driver cannot be loaded.
    pub gpus: usize,
    /// Processors that threads may use.
    pub processors: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    Cpu,
    Cuda,
}

/// How ranks exchange expert partials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// One rank: nothing to exchange.
    Single,
    HostStaged,
    Nccl,
    P2p,
}

/// How large the KV pool is.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KvMemory {
    /// Bytes of one rank's pool, page 0 included.
    Bytes(u64),
    /// Of the memory that is free once the weights are loaded (CUDA).
    Fraction(f64),
    /// Pages, page 0 included.
    Pages(usize),
}

/// `--precision` (diagnostic, CPU).
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PrecisionMode {
    Oracle,
    Contract,
}

/// Everything that was chosen at start.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub served_names: Vec<String>,
    pub device: DeviceKind,
    /// Ordinals, one a rank.
    pub devices: Vec<usize>,
    pub ep: usize,
    pub transport: Transport,
    pub allow_shared_device: bool,
    pub nccl_nvls: bool,
    /// Replay captured graphs; false is padded-eager. Always false on the CPU.
    pub cuda_graph: bool,
    pub pdl: bool,
    pub fusion: bool,
    pub prefix_cache: bool,
    pub precision: PrecisionMode,
    /// Worker threads of the CPU device.
    pub threads: usize,
    pub max_slots: usize,
    pub max_model_len: usize,
    /// Ascending; decode and prefill.
    pub buckets: Vec<usize>,
    pub prefill_chunk: usize,
    pub itl_target_ms: Option<f64>,
    pub launch_ahead: usize,
    pub reserve_tokens: usize,
    pub kv: KvMemory,
    /// Bytes of one page over all layers, as this device stores it.
    pub page_bytes: u64,
    pub seed: u64,
    pub max_queue: usize,
    pub max_connections: usize,
    pub body_limit: usize,
    /// None: no deadline.
    pub request_timeout: Option<Duration>,
    pub write_timeout: Duration,
    pub stall_timeout: Duration,
    pub init_timeout: Duration,
    pub drain_timeout: Duration,
    pub nvtx: bool,
    /// Folder searched first for CUDA, NVRTC and NCCL.
    pub lib_dir: Option<std::path::PathBuf>,
    /// `NAME[@step|@rank]`, armed faults.
    pub fault: Option<String>,
    /// Things worth one log line at start (a clamped length, an ignored key).
    pub warnings: Vec<String>,
}

impl Config {
    /// Chooses every default and refuses every combination that cannot run. `name` is the checkpoint's (the default served name).
    pub fn resolve(
        settings: &Settings,
        model: &ModelSpec,
        name: &str,
        machine: Machine,
    ) -> Result<Config, ConfigError> {
        let _ = (model, name, machine);
        let value = settings.device.clone().unwrap_or_default();
        Err(ConfigError { flag: "--device".into(), value, reason: "configurations cannot be resolved yet".into() })
    }
    /// Pages when they follow from the configuration alone (CPU, bytes, `--kv-pages`); None for a fraction of free memory.
    pub fn fixed_pages(&self) -> Option<usize> {
        match self.kv {
            KvMemory::Pages(pages) => Some(pages),
            KvMemory::Bytes(bytes) => Some((bytes / self.page_bytes) as usize),
            KvMemory::Fraction(_) => None,
        }
    }
    /// The limits of a pool of `pages` (page 0 included).
    pub fn limits(&self, pages: usize) -> StepLimits {
        StepLimits {
            slots_max: self.max_slots,
            pages,
            pages_per_slot: self.max_model_len.div_ceil(slotgraph_kernels::contract::PAGE_TOKENS),
            buckets: self.buckets.clone(),
            launch_ahead: self.launch_ahead,
            max_model_len: self.max_model_len,
            prefill_chunk: self.prefill_chunk,
        }
    }
}
