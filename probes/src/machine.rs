//! The machine that a probe ran on, as far as plain files tell; no name, address or path of it.

use serde::{Deserialize, Serialize};
use std::fs::read_to_string;
use std::time::Instant;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    pub cpu: String,
    /// Logical processors that this process may use.
    pub cores: usize,
    pub memory_bytes: u64,
    pub kernel: String,
    pub rustc: String,
    /// Version of the NVIDIA driver; empty without one.
    pub gpu_driver: String,
    pub gpus: Vec<Gpu>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Gpu {
    pub model: String,
    pub uuid: String,
    pub pci: String,
}

impl Machine {
    pub fn read() -> Machine {
        let cpuinfo = read_to_string("/proc/cpuinfo").unwrap_or_default();
        let meminfo = read_to_string("/proc/meminfo").unwrap_or_default();
        let driver = read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
        Machine {
            cpu: field(&cpuinfo, "model name").unwrap_or_default(),
            cores: std::thread::available_parallelism().map_or(1, |cores| cores.get()),
            memory_bytes: field(&meminfo, "MemTotal").and_then(|text| kib(&text)).unwrap_or_default(),
            kernel: read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().into(),
            rustc: env!("SLOTGRAPH_RUSTC").into(),
            gpu_driver: driver_version(&driver),
            gpus: gpus(),
        }
    }

    /// The folder of `evidence/` that holds this machine's reports: `cpu`, or the first GPU's short name.
    pub fn evidence_folder(&self) -> String {
        match self.gpus.first() {
            None => "cpu".into(),
            Some(gpu) => gpu.model.split_whitespace().next_back().unwrap_or("gpu").to_lowercase(),
        }
    }
}

/// Milliseconds that a fixed piece of work takes now on every processor at once, the slowest of them: the mean of ten tries.
///
/// A busy or slow machine takes longer; limits of times that are set for one machine are carried to another by it.
pub fn yardstick_ms() -> f64 {
    const ROUNDS: u64 = 1 << 20;
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get()).min(16);
    let work = |start: u64| (0..ROUNDS).fold(start, |word, _| crate::load::scatter(word));
    let tries: Vec<f64> = (0..10)
        .map(|_| {
            let began = Instant::now();
            std::thread::scope(|scope| {
                (0..cores as u64).for_each(|core| drop(scope.spawn(move || std::hint::black_box(work(core)))));
            });
            began.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    crate::stats::Summary::of(&tries).mean
}

/// The value of the first line `name : value`.
pub(crate) fn field(text: &str, name: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_string())
    })
}

/// `123 kB` in bytes.
pub(crate) fn kib(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// The word after `Kernel Module`, which is a version: `580.159.04`.
fn driver_version(text: &str) -> String {
    let line = text.lines().find(|line| line.contains("NVRM")).unwrap_or_default();
    let is_version = |word: &&str| word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('.');
    line.split_whitespace().find(is_version).unwrap_or_default().into()
}

fn gpus() -> Vec<Gpu> {
    let Ok(folders) = std::fs::read_dir("/proc/driver/nvidia/gpus") else { return Vec::new() };
    let mut gpus: Vec<Gpu> = folders
        .flatten()
        .map(|folder| {
            let text = read_to_string(folder.path().join("information")).unwrap_or_default();
            Gpu {
                model: field(&text, "Model").unwrap_or_default(),
                uuid: field(&text, "GPU UUID").unwrap_or_default(),
                pci: folder.file_name().to_string_lossy().into_owned(),
            }
        })
        .collect();
    gpus.sort_by(|a, b| a.pci.cmp(&b.pci));
    gpus
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_and_versions_are_found_in_the_kernel_s_text() {
        assert_eq!(field("MemTotal:  24576 kB\n", "MemTotal").and_then(|t| kib(&t)), Some(24576 * 1024));
        let text =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 12\n";
        assert_eq!(driver_version(text), "580.159.04");
        assert!(Machine::read().cores >= 1);
    }

    #[test]
    fn the_yardstick_is_a_time() {
        assert!((0.1..10_000.0).contains(&yardstick_ms()));
    }
}
