//! Faults that are planted in the engine itself, by name, so that a probe can show that it would notice one.
//!
//! Armed only by `--fault`, shown in the start-up record, traces and evidence. `graphs::fault` has those of devices and start-up; these are the
//! few that only the loop and its tables can have.

use crate::policy::Policy;
use slotgraph_graphs::fault::Fault;
use std::time::{Duration, Instant};

/// How long a planted stall of the loop lasts.
const STALL: Duration = Duration::from_secs(30);

/// Name and what N counts.
const NAMES: [(&str, &str); 4] =
    [("engine-panic", "step"), ("engine-stall", "step"), ("page-leak", "seconds"), ("no-cooling", "")];

/// The engine's faults, and what of them has happened; none is armed in a server that was not told `--fault`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineFaults {
    /// The thread panics before it enqueues this step.
    panic_at: Option<u64>,
    /// It sleeps before it enqueues this step.
    stall_at: Option<u64>,
    /// A page of the pool is lost every so often.
    leak_every: Option<Duration>,
    leaked: Option<Instant>,
    /// Pages and seats are free as soon as they are left.
    no_cooling: bool,
}

impl EngineFaults {
    /// Sorts armed faults: the engine's, and those of devices and start-up. An error names the text that is no fault.
    pub fn parse(texts: &[String]) -> Result<(EngineFaults, Vec<Fault>), String> {
        let (mut armed, mut others) = (EngineFaults::default(), Vec::new());
        for text in texts {
            if !armed.arm(text)? {
                let unknown =
                    |error| format!("{error}, {}", NAMES.map(|(name, counts)| format!("{name}@{counts}")).join(", "));
                others.push(text.parse::<Fault>().map_err(unknown)?);
            }
        }
        Ok((armed, others))
    }

    /// Arms `NAME[@N]`: N is a step (default 1) or seconds (default 60); false when it is no fault of the engine.
    fn arm(&mut self, text: &str) -> Result<bool, String> {
        let (name, at) = text.split_once('@').map_or((text, None), |(name, at)| (name, Some(at)));
        if !NAMES.iter().any(|(known, _)| *known == name) {
            return Ok(false);
        }
        let number = |default: u64| {
            let number = at.map_or(Ok(default), str::parse);
            number.ok().filter(|&number| number > 0).ok_or(format!("`{text}`: what follows @ is a number from 1 on"))
        };
        match name {
            "engine-panic" => self.panic_at = Some(number(1)?),
            "engine-stall" => self.stall_at = Some(number(1)?),
            "page-leak" => self.leak_every = Some(Duration::from_secs(number(60)?)),
            _ if at.is_some() => return Err(format!("`{text}`: {name} takes no number")),
            _ => self.no_cooling = true,
        }
        Ok(true)
    }

    /// The rules that stay in force.
    pub fn policy(&self) -> Policy {
        let cool = !self.no_cooling;
        Policy { cool_pages: cool, cool_seats: cool, cool_preempted: cool, ..Policy::default() }
    }

    /// Strikes before a step is enqueued.
    pub(crate) fn before_step(&mut self, step: u64) {
        if self.stall_at.is_some_and(|at| at <= step) {
            self.stall_at = None;
            std::thread::sleep(STALL);
        }
        if self.panic_at.is_some_and(|at| at <= step) {
            panic!("the fault engine-panic was armed for step {step}");
        }
    }

    /// Whether a page is to be lost now.
    pub(crate) fn leaks(&mut self, now: Instant) -> bool {
        let Some(every) = self.leak_every else { return false };
        let since = *self.leaked.get_or_insert(now);
        let due = now.saturating_duration_since(since) >= every;
        if due {
            self.leaked = Some(now);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slotgraph_graphs::fault::FaultKind;

    fn parse(faults: &[&str]) -> Result<(EngineFaults, Vec<Fault>), String> {
        EngineFaults::parse(&faults.iter().map(ToString::to_string).collect::<Vec<_>>())
    }
    fn armed(faults: &[&str]) -> EngineFaults {
        parse(faults).unwrap().0
    }

    #[test]
    fn faults_are_sorted_by_who_commits_them() {
        let (engine, others) = parse(&["token@3", "engine-panic@7", "page-leak", "rank-stall@1"]).unwrap();
        assert_eq!((engine.panic_at, engine.leak_every), (Some(7), Some(Duration::from_secs(60))));
        assert_eq!(others.iter().map(|fault| fault.kind).collect::<Vec<_>>(), [FaultKind::Token, FaultKind::RankStall]);
        for bad in ["engine-panic@", "engine-stall@x", "page-leak@0", "no-cooling@1", "engine-panics"] {
            let error = parse(&[bad]).unwrap_err();
            assert!(error.contains(bad), "{error}");
        }
        let error = parse(&["bogus"]).unwrap_err();
        assert!(error.contains("engine-panic@step") && error.contains("token@step"), "{error}");
        for (name, _) in NAMES {
            assert_ne!(armed(&[name]), EngineFaults::default());
        }
    }

    #[test]
    fn unarmed_every_rule_holds_and_nothing_strikes() {
        for mut faults in [armed(&[]), armed(&["token@3", "rank-stall@1"])] {
            assert_eq!(faults.policy(), Policy::default());
            assert!(!faults.leaks(Instant::now()));
            (1..100).for_each(|step| faults.before_step(step));
        }
    }

    #[test]
    fn a_leak_loses_a_page_each_period() {
        let (mut faults, start) = (armed(&["page-leak@5"]), Instant::now());
        let lost = (0..60).filter(|&second| faults.leaks(start + Duration::from_secs(second))).count();
        assert_eq!(lost, 11);
    }

    #[test]
    fn cooling_can_be_turned_off() {
        let policy = armed(&["no-cooling"]).policy();
        assert!(!policy.cool_pages && !policy.cool_seats && policy.bump_generation);
    }
}
