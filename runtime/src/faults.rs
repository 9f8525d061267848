//! Faults that can be planted in the engine, by name, so that a probe can show that it would notice one.
//!
//! Armed only by `--fault`, shown in the start-up record, traces and evidence. Faults of the device are planted by a wrapper around the device
//! (`graphs`); these are the few that only the engine can have.

use crate::policy::Policy;
use std::time::Duration;

/// How long a planted stall lasts.
pub const STALL: Duration = Duration::from_secs(30);

/// The engine's own faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineFault {
    /// The engine thread panics when it is about to enqueue this step.
    Panic { step: u64 },
    /// It reports an error instead of enqueueing this step.
    Error { step: u64 },
    /// It sleeps for `STALL` before it enqueues this step.
    Stall { step: u64 },
    /// A page of the pool is lost every so often.
    PageLeak { every: Duration },
    /// Pages and seats are free as soon as they are left.
    NoCooling,
}

/// The names that `parse` knows.
pub const NAMES: [&str; 5] = ["engine-panic", "engine-error", "engine-stall", "page-leak", "no-cooling"];

impl EngineFault {
    /// `NAME[@N]`: N is the step (default 8), for `page-leak` the seconds between two losses (default 60). None: not a fault of the
    /// engine; an error says what is wrong with N.
    pub fn parse(text: &str) -> Option<Result<EngineFault, String>> {
        let (name, at) = match text.split_once('@') {
            Some((name, at)) => (name, Some(at)),
            None => (text, None),
        };
        if !NAMES.contains(&name) {
            return None;
        }
        let number = |default: u64| match at.map(str::parse) {
            None => Ok(default),
            Some(Ok(0)) | Some(Err(_)) => Err(format!("--fault {text}: what follows @ must be a number from 1 on")),
            Some(Ok(number)) => Ok(number),
        };
        Some(match name {
            "engine-panic" => number(8).map(|step| EngineFault::Panic { step }),
            "engine-error" => number(8).map(|step| EngineFault::Error { step }),
            "engine-stall" => number(8).map(|step| EngineFault::Stall { step }),
            "page-leak" => number(60).map(|seconds| EngineFault::PageLeak { every: Duration::from_secs(seconds) }),
            _ if at.is_some() => Err(format!("--fault {text}: {name} takes no number")),
            _ => Ok(EngineFault::NoCooling),
        })
    }

    /// The rules that stay in force.
    pub fn policy(self) -> Policy {
        match self {
            EngineFault::NoCooling => {
                Policy { cool_pages: false, cool_seats: false, cool_preempted: false, ..Policy::default() }
            }
            _ => Policy::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_named_and_numbered() {
        assert_eq!(EngineFault::parse("engine-panic@3"), Some(Ok(EngineFault::Panic { step: 3 })));
        assert_eq!(EngineFault::parse("engine-stall"), Some(Ok(EngineFault::Stall { step: 8 })));
        let leak = EngineFault::PageLeak { every: Duration::from_secs(5) };
        assert_eq!(EngineFault::parse("page-leak@5"), Some(Ok(leak)));
        assert_eq!(EngineFault::parse("no-cooling"), Some(Ok(EngineFault::NoCooling)));
        for bad in ["engine-panic@", "engine-panic@x", "engine-error@0", "no-cooling@1"] {
            assert!(EngineFault::parse(bad).unwrap().unwrap_err().contains(bad));
        }
        assert_eq!(EngineFault::parse("nan-row@2"), None);
    }

    #[test]
    fn every_name_parses() {
        for name in NAMES {
            assert!(matches!(EngineFault::parse(name), Some(Ok(_))), "{name}");
        }
    }
}
