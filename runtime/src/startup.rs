//! The start-up record: how long each phase took on each rank, what was loaded, onto what. One JSON line whose `tag` is
//! `slotgraph_startup`.
//!
//! The server and each rank thread time themselves with `Phases`; the record is made once, when the server is ready, printed, and kept for
//! evidence files. **Invariant:** every rank's `phases_ms` has all phases, 0 where one did not occur.

use crate::checkpoint::{Checkpoint, LoadFormat, WeightFacts};
use crate::config::{Config, MemorySplit, memory_split};
use serde::{Serialize, Serializer};
use slotgraph_graphs::cuda::ExchangeReport;
use slotgraph_graphs::device::DeviceFacts;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The record's `tag`.
pub const TAG: &str = "slotgraph_startup";

/// The phases of a start, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Flags and config.json.
    Config,
    Tokenizer,
    /// Weight files opened, their headers validated.
    Headers,
    /// Weights read, or generated.
    Read,
    /// Copies to the device.
    H2d,
    /// Weights packed into the device's layout.
    Pack,
    /// Kernels compiled (or found in the cache).
    Nvrtc,
    /// Modules loaded.
    Modules,
    Communicators,
    /// Every plan and every exchange size run once.
    Warm,
    Capture,
    Upload,
    /// From the process's first instant to readiness.
    Ready,
}

/// Every phase and its name, in order.
pub const PHASES: [(Phase, &str); 13] = [
    (Phase::Config, "config"),
    (Phase::Tokenizer, "tokenizer"),
    (Phase::Headers, "headers"),
    (Phase::Read, "read"),
    (Phase::H2d, "h2d"),
    (Phase::Pack, "pack"),
    (Phase::Nvrtc, "nvrtc"),
    (Phase::Modules, "modules"),
    (Phase::Communicators, "communicators"),
    (Phase::Warm, "warm"),
    (Phase::Capture, "capture"),
    (Phase::Upload, "upload"),
    (Phase::Ready, "ready"),
];

impl Phase {
    pub fn name(self) -> &'static str {
        PHASES[self as usize].1
    }
    /// The phase called `name`: devices, which know nothing of this module, report theirs by name.
    pub fn named(name: &str) -> Option<Phase> {
        PHASES.iter().find(|(_, known)| *known == name).map(|(phase, _)| *phase)
    }
}

/// Time spent in each phase by one rank, or by the process before ranks exist. Prints as milliseconds by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Phases {
    spent: [Duration; PHASES.len()],
}

impl Phases {
    /// Adds time to a phase.
    pub fn add(&mut self, phase: Phase, spent: Duration) {
        self.spent[phase as usize] += spent;
    }
    /// Runs `work` on the phase's clock.
    pub fn time<T>(&mut self, phase: Phase, work: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let result = work();
        self.add(phase, started.elapsed());
        result
    }
    pub fn of(&self, phase: Phase) -> Duration {
        self.spent[phase as usize]
    }
    /// Adds what another clock measured (the process's phases to a rank's).
    pub fn merge(&mut self, other: &Phases) {
        for (phase, _) in PHASES {
            self.add(phase, other.of(phase));
        }
    }
}

impl Serialize for Phases {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // Microseconds are kept: many phases of the demo are shorter than a millisecond.
        let ms = |spent: Duration| spent.as_micros() as f64 / 1000.0;
        serializer.collect_map(PHASES.map(|(phase, name)| (name, ms(self.of(phase)))))
    }
}

/// One rank's part of the record.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RankRecord {
    pub rank: usize,
    pub phases_ms: Phases,
    /// Bytes that this rank's device took from the source; 0 where it made its weights itself.
    pub bytes_read: u64,
    /// `bytes_read` over the time of reading, in 10⁹ bytes a second.
    pub gb_per_s: f64,
    /// CUDA ordinal; None on the CPU.
    pub ordinal: Option<usize>,
    pub uuid: Option<String>,
    pub pci: Option<String>,
    /// The transport, and the way to each other rank; None on the CPU and for a single rank.
    pub exchange: Option<ExchangeReport>,
    pub device: DeviceFacts,
}

impl RankRecord {
    /// A rank's record; the rate follows from the bytes and the phases.
    pub fn new(rank: usize, phases: Phases, bytes_read: u64, device: DeviceFacts) -> RankRecord {
        let seconds = phases.of(Phase::Read).as_secs_f64();
        let gb_per_s = if seconds > 0.0 { bytes_read as f64 / seconds / 1e9 } else { 0.0 };
        RankRecord {
            rank,
            phases_ms: phases,
            bytes_read,
            gb_per_s,
            ordinal: None,
            uuid: None,
            pci: None,
            exchange: None,
            device,
        }
    }
}

/// A library that was loaded at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LibraryRecord {
    /// `cuda`, `nvrtc`, `nccl`
    pub name: String,
    pub path: String,
    pub version: String,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelRecord {
    pub name: String,
    pub model_type: String,
    pub sha256: String,
    pub load: LoadFormat,
    #[serde(flatten)]
    pub weights: WeightFacts,
}

/// The whole record.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StartupRecord {
    pub tag: &'static str,
    pub version: &'static str,
    pub model: ModelRecord,
    pub ranks: Vec<RankRecord>,
    pub ep: usize,
    pub transport: crate::config::Transport,
    pub libraries: Vec<LibraryRecord>,
    /// Rank 0's, with the pool as it was allocated.
    pub memory: MemorySplit,
    pub max_slots: usize,
    pub max_model_len: usize,
    pub buckets: Vec<usize>,
    /// Rollback switches, the transport and armed faults.
    pub switches: BTreeMap<String, String>,
    pub warnings: Vec<String>,
}

impl StartupRecord {
    /// The record of a server that is ready. `process` (what the server timed
    /// itself) and the checkpoint's opening are merged into every rank's phases; `pages` is what the pool got.
    pub fn new(
        config: &Config,
        checkpoint: &Checkpoint,
        pages: usize,
        process: &Phases,
        mut ranks: Vec<RankRecord>,
        libraries: Vec<LibraryRecord>,
    ) -> Result<StartupRecord, slotgraph_graphs::plan::PlanError> {
        for rank in &mut ranks {
            rank.phases_ms.merge(process);
            rank.phases_ms.merge(&checkpoint.opening);
        }
        Ok(StartupRecord {
            tag: TAG,
            version: env!("CARGO_PKG_VERSION"),
            model: ModelRecord {
                name: checkpoint.name.clone(),
                model_type: checkpoint.spec.family.name().to_string(),
                sha256: checkpoint.model_sha256().to_string(),
                load: checkpoint.format,
                weights: checkpoint.weights,
            },
            ranks,
            ep: config.ep,
            transport: config.transport,
            libraries,
            memory: memory_split(config, &checkpoint.spec, Some(pages))?,
            max_slots: config.max_slots,
            max_model_len: config.max_model_len,
            buckets: config.buckets.clone(),
            switches: config.switches(),
            warnings: checkpoint.warnings.iter().chain(&config.warnings).cloned().collect(),
        })
    }
    /// One line of JSON, without the line feed.
    pub fn line(&self) -> String {
        serde_json::to_string(self).expect("numbers, strings and lists are JSON")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Machine, Settings};
    use std::path::Path;

    #[test]
    fn phases_stand_in_their_own_places_and_add_up() {
        for (index, (phase, name)) in PHASES.iter().enumerate() {
            assert_eq!((*phase as usize, Phase::named(name), phase.name()), (index, Some(*phase), *name));
        }
        assert_eq!(Phase::named("h2"), None);
        let mut phases = Phases::default();
        phases.add(Phase::Pack, Duration::from_micros(1500));
        let answer = phases.time(Phase::Pack, || 42);
        assert_eq!(answer, 42);
        assert!(phases.of(Phase::Pack) >= Duration::from_micros(1500));
        assert_eq!(phases.of(Phase::Read), Duration::ZERO);
    }

    #[test]
    fn the_record_is_one_line_with_every_phase_of_every_rank() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/models/shakespeare-dsv2");
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let settings = Settings { ep: Some(2), device: Some("cpu".into()), ..Settings::default() };
        let machine = Machine { gpus: 0, processors: 2 };
        let config = Config::resolve(&settings, &checkpoint.spec, &checkpoint.name, machine).unwrap();
        let mut process = Phases::default();
        process.add(Phase::Config, Duration::from_millis(3));
        let mut own = Phases::default();
        own.add(Phase::Read, Duration::from_millis(500));
        let ranks =
            (0..2).map(|rank| RankRecord::new(rank, own.clone(), 1_000_000_000, DeviceFacts::default())).collect();
        let record = StartupRecord::new(&config, &checkpoint, 99, &process, ranks, Vec::new()).unwrap();
        let line = record.line();
        assert!(!line.contains('\n'));
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(value["tag"], TAG);
        for rank in value["ranks"].as_array().unwrap() {
            assert_eq!(rank["phases_ms"].as_object().unwrap().len(), PHASES.len());
            assert_eq!(rank["gb_per_s"], 2.0);
            assert!(rank["phases_ms"]["config"].as_f64() > Some(3.0));
            assert!(rank["phases_ms"]["headers"].as_f64() > Some(0.0));
            assert_eq!(rank["phases_ms"]["nvrtc"], 0.0);
        }
        assert_eq!(value["transport"], "host-staged");
        assert_eq!(value["switches"]["transport"], "host-staged");
        assert_eq!((&value["model"]["shards"], &value["memory"]["kv_pages"]), (&2.into(), &99.into()));
        assert_eq!(value["model"]["sha256"].as_str().unwrap().len(), 64);
    }
}
