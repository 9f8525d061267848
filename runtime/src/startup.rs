//! The start-up record: how long each phase took on each rank, what was loaded, onto what. One JSON line, tag `slotgraph_startup`.
//!
//! Filled by the server and by each rank thread through `Phases`; printed once when the server is ready, and kept for evidence files.

use std::time::{Duration, Instant};

/// The phases of a start, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Config,
    Tokenizer,
    Headers,
    Read,
    H2d,
    Pack,
    Nvrtc,
    Modules,
    Communicators,
    Warm,
    Capture,
    Upload,
    Ready,
}

/// Every phase, in order.
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

/// Time spent in each phase by one rank (or by the process before ranks exist).
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
}
