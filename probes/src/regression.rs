//! Two pieces of evidence side by side, and which changes may be called better or worse.
//!
//! Used by `manifest --compare` and `bench-decode --compare`. **Invariant:** a direction is claimed only for a number that was
//! measured under the same contract, build tools, machine and configuration in both, and that moved by more than its noise.

use crate::evidence::{Evidence, Metric};
use serde::Serialize;

/// Below this relative spread a repeated measurement is called stable.
pub const STABLE_SPREAD: f64 = 0.10;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Regression {
    /// Why no row may claim a direction; empty when rows may.
    pub no_directional_claim: Vec<String>,
    pub rows: Vec<Row>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub metric: String,
    pub unit: String,
    pub baseline: f64,
    pub current: f64,
    /// (current − baseline) ÷ baseline.
    pub change: f64,
    pub direction: Direction,
    pub reason: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    Better,
    Worse,
    WithinNoise,
    NoDirectionalClaim,
}

impl Regression {
    pub fn of(baseline: &Evidence, current: &Evidence) -> Regression {
        let no_directional_claim = differences(baseline, current);
        let rows = current
            .metrics
            .iter()
            .filter_map(|now| baseline.metric(&now.name).map(|then| row(then, now, no_directional_claim.is_empty())))
            .collect();
        Regression { no_directional_claim, rows }
    }

    pub fn worse(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| row.direction == Direction::Worse)
    }
}

/// What stands between two pieces of evidence and a comparison of them.
fn differences(baseline: &Evidence, current: &Evidence) -> Vec<String> {
    let names = |evidence: &Evidence| evidence.metrics.iter().map(|m| m.name.clone()).collect::<Vec<_>>().join(" ");
    let gpus =
        |evidence: &Evidence| evidence.machine.gpus.iter().map(|g| g.model.clone()).collect::<Vec<_>>().join(" + ");
    let pairs = [
        ("schema", baseline.schema.to_string(), current.schema.to_string()),
        ("probe", baseline.probe.clone(), current.probe.clone()),
        ("contract hash", baseline.contract_hash.clone(), current.contract_hash.clone()),
        ("configuration", baseline.config.to_string(), current.config.to_string()),
        ("compiler", baseline.machine.rustc.clone(), current.machine.rustc.clone()),
        ("processor", baseline.machine.cpu.clone(), current.machine.cpu.clone()),
        ("cores", baseline.machine.cores.to_string(), current.machine.cores.to_string()),
        ("GPUs", gpus(baseline), gpus(current)),
        ("GPU driver", baseline.machine.gpu_driver.clone(), current.machine.gpu_driver.clone()),
        ("set of metrics", names(baseline), names(current)),
    ];
    let mut reasons: Vec<String> = pairs
        .into_iter()
        .filter(|(_, then, now)| then != now)
        .map(|(what, then, now)| format!("{what} differs: {} against {}", brief(&then), brief(&now)))
        .collect();
    for (which, evidence) in [("baseline", baseline), ("current", current)] {
        if evidence.dirty {
            reasons.push(format!("{which} was built from a changed tree"));
        }
    }
    reasons
}

fn row(then: &Metric, now: &Metric, comparable: bool) -> Row {
    let change = (now.value - then.value) / then.value.abs().max(f64::MIN_POSITIVE);
    let (direction, reason) = match (then.spread, now.spread) {
        _ if !comparable => (Direction::NoDirectionalClaim, "the reports are not comparable".to_string()),
        (None, _) | (_, None) => (Direction::NoDirectionalClaim, "measured once: its noise is unknown".into()),
        (Some(a), Some(b)) if a.max(b) > STABLE_SPREAD => {
            (Direction::NoDirectionalClaim, format!("noisy: repeats spread over {:.1} %", 100.0 * a.max(b)))
        }
        (Some(a), Some(b)) if change.abs() <= a.max(b) => {
            (Direction::WithinNoise, format!("{:+.1} % is within the repeats' spread", 100.0 * change))
        }
        _ if (change > 0.0) == higher_is_better(&now.unit) => (Direction::Better, format!("{:+.1} %", 100.0 * change)),
        _ => (Direction::Worse, format!("{:+.1} %", 100.0 * change)),
    };
    Row {
        metric: now.name.clone(),
        unit: now.unit.clone(),
        baseline: then.value,
        current: now.value,
        change,
        direction,
        reason,
    }
}

/// Rates grow when things improve; times, bytes and counts shrink.
fn higher_is_better(unit: &str) -> bool {
    unit.ends_with("/s")
}

fn brief(text: &str) -> String {
    if text.chars().count() <= 48 { text.to_string() } else { text.chars().take(45).chain("...".chars()).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claim::{Claim, Label};
    use crate::evidence::Draft;

    fn evidence(contract: &str, tok_s: &[f64]) -> Evidence {
        let mut draft = Draft::new("bench-decode", "how fast?", Claim::of(Label::DistinctRowDecode));
        draft.contract_hash = contract.into();
        draft.check("ran", true, "");
        draft.repeated("tok_s", tok_s, "tok/s", 3, None);
        Evidence { dirty: false, ..draft.finish() }
    }

    #[test]
    fn a_direction_needs_the_same_contract_and_a_change_beyond_the_noise() {
        let base = evidence("a", &[100.0, 101.0, 102.0]);
        let direction = |now: &Evidence| Regression::of(&base, now).rows[0].direction;
        assert_eq!(direction(&evidence("a", &[200.0, 201.0, 202.0])), Direction::Better);
        assert_eq!(direction(&evidence("a", &[50.0, 50.1, 50.2])), Direction::Worse);
        assert_eq!(direction(&evidence("a", &[101.0, 102.0, 102.5])), Direction::WithinNoise);
        assert_eq!(direction(&evidence("b", &[200.0, 201.0, 202.0])), Direction::NoDirectionalClaim);
        assert_eq!(direction(&evidence("a", &[100.0, 200.0, 300.0])), Direction::NoDirectionalClaim, "noisy");
        assert_eq!(direction(&evidence("a", &[200.0])), Direction::NoDirectionalClaim, "measured once");
    }

    #[test]
    fn another_machine_or_compiler_forbids_every_direction() {
        let base = evidence("a", &[100.0, 101.0]);
        let mut other = evidence("a", &[300.0, 301.0]);
        other.machine.rustc = "rustc 1.0".into();
        other.machine.cpu = "another".into();
        let regression = Regression::of(&base, &other);
        assert_eq!(regression.no_directional_claim.len(), 2);
        assert_eq!(regression.worse().count(), 0);
    }
}
