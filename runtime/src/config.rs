//! Configuration: what flags and variables said (`Settings`), resolved once against the model and the machine
//! (`Config`).
//!
//! The server's command line fills a `Settings`; `Config::resolve` is the only place where defaults are chosen and combinations are refused.
//! **Invariant:** a `Config` that exists can run; nothing changes it afterwards.

mod memory;
mod parse;
mod resolve;
mod settings;

pub use memory::{MemorySplit, memory_split};
pub use settings::Settings;

use crate::checkpoint::{Checkpoint, LoadFormat};
use serde::Serializer;
use slotgraph_kernels::contract::PAGE_TOKENS;

use slotgraph_graphs::plan::PlanError;
use slotgraph_graphs::spec::ModelSpec;
use slotgraph_graphs::step::StepLimits;
use std::collections::BTreeMap;
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

impl Transport {
    pub fn name(self) -> &'static str {
        match self {
            Transport::Single => "single",
            Transport::HostStaged => "host-staged",
            Transport::Nccl => "nccl",
            Transport::P2p => "p2p",
        }
    }
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

impl PrecisionMode {
    pub fn name(self) -> &'static str {
        match self {
            PrecisionMode::Oracle => "oracle",
            PrecisionMode::Contract => "contract",
        }
    }
}

/// Everything that was chosen at start.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
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
    /// None: no deadline. Durations print as seconds.
    #[serde(serialize_with = "optional_seconds")]
    pub request_timeout: Option<Duration>,
    #[serde(serialize_with = "seconds")]
    pub write_timeout: Duration,
    #[serde(serialize_with = "seconds")]
    pub stall_timeout: Duration,
    #[serde(serialize_with = "seconds")]
    pub init_timeout: Duration,
    /// 0: end everything at once.
    #[serde(serialize_with = "seconds")]
    pub drain_timeout: Duration,
    pub nvtx: bool,
    /// Folder searched first for CUDA, NVRTC and NCCL.
    pub lib_dir: Option<std::path::PathBuf>,
    /// `NAME[@step|@rank]`: armed faults.
    pub faults: Vec<String>,
    /// Things worth one log line at start (a clamped length, an ignored key).
    pub warnings: Vec<String>,
}

impl Config {
    /// Chooses every default and refuses every combination that cannot run. `name` is the checkpoint's (the default
    /// served name).
    pub fn resolve(
        settings: &Settings,
        model: &ModelSpec,
        name: &str,
        machine: Machine,
    ) -> Result<Config, ConfigError> {
        resolve::resolve(settings, model, name, machine)
    }
    /// Bytes of one rank's pool when they follow from the configuration alone; None for a fraction of free memory.
    pub fn fixed_pool(&self) -> Option<u64> {
        match self.kv {
            KvMemory::Bytes(bytes) => Some(bytes),
            KvMemory::Pages(pages) => Some(pages as u64 * self.page_bytes),
            KvMemory::Fraction(_) => None,
        }
    }
    /// Bytes of one rank's pool, given what is free on its device once the weights are loaded and how many ranks share
    /// that device. Under a fraction 512 MiB stay for graphs and libraries.
    pub fn pool(&self, free: u64, ranks_on_device: usize) -> u64 {
        const KEPT: u64 = 512 << 20;
        match self.kv {
            KvMemory::Fraction(part) => ((free as f64 * part) as u64 / ranks_on_device as u64).saturating_sub(KEPT),
            KvMemory::Bytes(bytes) => bytes,
            KvMemory::Pages(pages) => pages as u64 * self.page_bytes,
        }
    }
    /// Pages (page 0 included) of a pool of `pool` bytes: no more than every seat can use, unless `--kv-pages` says so.
    /// Refused when one request of `max_model_len` would not fit.
    pub fn pages(&self, pool: u64) -> Result<usize, ConfigError> {
        let useful = self.max_slots * self.pages_per_slot() + 1;
        let pages = match self.kv {
            KvMemory::Pages(pages) => pages,
            KvMemory::Bytes(_) | KvMemory::Fraction(_) => {
                usize::try_from(pool / self.page_bytes).unwrap_or(usize::MAX).min(useful)
            }
        };
        if pages > self.pages_per_slot() {
            return Ok(pages);
        }
        let (flag, value) = match self.kv {
            KvMemory::Pages(pages) => ("--kv-pages", pages.to_string()),
            KvMemory::Bytes(bytes) => ("--kv-memory", bytes.to_string()),
            KvMemory::Fraction(part) => ("--kv-memory", part.to_string()),
        };
        let (needed, held) = (self.pages_per_slot() + 1, pages.saturating_sub(1) * PAGE_TOKENS);
        let reason = format!(
            "the KV pool holds {held} tokens ({pages} pages with page 0), one request of --max-model-len {} needs {needed} pages \
             ({} bytes); enlarge the pool or lower --max-model-len",
            self.max_model_len,
            needed as u64 * self.page_bytes
        );
        Err(ConfigError { flag: flag.into(), value, reason })
    }
    /// Pages when they follow from the configuration alone; None for a fraction of free memory.
    pub fn fixed_pages(&self) -> Option<usize> {
        self.fixed_pool().map(|pool| self.pages(pool).expect("a resolved configuration's pool was checked"))
    }
    /// Block-table entries of a slot.
    pub fn pages_per_slot(&self) -> usize {
        self.max_model_len.div_ceil(PAGE_TOKENS)
    }
    /// The limits of a pool of `pages` (page 0 included).
    pub fn limits(&self, pages: usize) -> StepLimits {
        StepLimits {
            slots_max: self.max_slots,
            pages,
            pages_per_slot: self.pages_per_slot(),
            buckets: self.buckets.clone(),
            launch_ahead: self.launch_ahead,
            max_model_len: self.max_model_len,
            prefill_chunk: self.prefill_chunk,
        }
    }
    /// `--print-config`: everything that was chosen, the model, and the memory split, as JSON with a fixed order of keys.
    pub fn print(&self, checkpoint: &Checkpoint) -> Result<String, PlanError> {
        let printed = serde_json::json!({
            "config": self,
            "model": {
                "name": checkpoint.name,
                "model_type": checkpoint.spec.family.name(),
                "load": checkpoint.format,
                "weights": checkpoint.weights,
                "sha256": checkpoint.model_sha256(),
            },
            "memory": memory_split(self, &checkpoint.spec, self.fixed_pages())?,
        });
        Ok(serde_json::to_string_pretty(&printed).expect("numbers, strings and lists are JSON"))
    }
    /// The rollback switches, the transport and armed faults, as traces, evidence and the start-up record show them.
    pub fn switches(&self) -> BTreeMap<String, String> {
        let on = |on: bool| if on { "on" } else { "off" }.to_string();
        let mut switches = BTreeMap::from([
            ("cuda_graph".to_string(), on(self.cuda_graph)),
            ("launch_ahead".to_string(), self.launch_ahead.to_string()),
            ("pdl".to_string(), on(self.pdl)),
            ("prefix_cache".to_string(), on(self.prefix_cache)),
            ("fusion".to_string(), on(self.fusion)),
            ("transport".to_string(), self.transport.name().to_string()),
            ("precision".to_string(), self.precision.name().to_string()),
        ]);
        if !self.faults.is_empty() {
            switches.insert("fault".to_string(), self.faults.join(","));
        }
        switches
    }
}

impl Settings {
    /// Where weights come from: `--load-format`, with `--seed` for dummy ones. Needed before the checkpoint is opened.
    pub fn load_format(&self) -> Result<LoadFormat, ConfigError> {
        let dummy = LoadFormat::Dummy { seed: self.seed.unwrap_or(0) };
        let words = [("auto", LoadFormat::Safetensors), ("safetensors", LoadFormat::Safetensors), ("dummy", dummy)];
        parse::word("--load-format", self.load_format.as_deref().unwrap_or("auto"), &words)
    }
}

fn seconds<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_secs_f64())
}

fn optional_seconds<S: Serializer>(duration: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    match duration {
        Some(duration) => seconds(duration, serializer),
        None => serializer.serialize_none(),
    }
}
