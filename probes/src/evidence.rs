//! Evidence: the one JSON form in which every probe answers its question.
//!
//! A probe opens a `Draft`, records checks, metrics and its canary as it runs, and closes it into an `Evidence`. **Invariant:**
//! the verdict is computed from what was recorded and can be set by nobody; nothing checked, a check that failed, a metric
//! beyond its limit or a planted fault that went unseen is a fail; a skip carries its reason and is never a pass.

use crate::claim::Claim;
use crate::machine::Machine;
use crate::stats::Summary;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::Path;
use std::process::ExitCode;

/// Version of the evidence form.
pub const SCHEMA: u32 = 1;
/// The commit this binary was built from.
pub const COMMIT: &str = env!("SLOTGRAPH_COMMIT");

/// Whether the tree differed from `COMMIT` when this binary was built.
pub fn is_dirty() -> bool {
    env!("SLOTGRAPH_DIRTY") != "false"
}

/// What a probe concluded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Pass,
    Fail,
    Skip,
}

impl Verdict {
    /// 0 pass, 1 fail, 3 skipped; 2 belongs to usage and configuration errors.
    pub fn exit_code(self) -> ExitCode {
        ExitCode::from(match self {
            Verdict::Pass => 0,
            Verdict::Fail => 1,
            Verdict::Skip => 3,
        })
    }
}

/// One statement that was tested.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Check {
    pub name: String,
    pub pass: bool,
    /// What was seen: numbers on success, the first failure otherwise.
    pub detail: String,
}

/// The bound that a metric must keep.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    AtMost(f64),
    AtLeast(f64),
}

impl Limit {
    /// A value that is no number keeps no limit.
    pub fn holds(self, value: f64) -> bool {
        match self {
            Limit::AtMost(limit) => value <= limit,
            Limit::AtLeast(limit) => value >= limit,
        }
    }
}

/// One number, with how many samples stand behind it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metric {
    pub name: String,
    pub value: f64,
    pub unit: String,
    pub samples: u64,
    pub limit: Option<Limit>,
    /// Largest minus smallest over repeats, divided by the median; None when it was measured once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread: Option<f64>,
}

/// The planted fault of a probe and whether the probe saw it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Canary {
    pub fault: String,
    pub caught: bool,
    /// Why no fault could be planted; `caught` is then false and does not count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
}

impl Canary {
    pub fn planted(fault: &str, caught: bool) -> Self {
        Canary { fault: fault.into(), caught, skipped: None }
    }
    pub fn skipped(fault: &str, reason: &str) -> Self {
        Canary { fault: fault.into(), caught: false, skipped: Some(reason.into()) }
    }
}

/// A finished answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evidence {
    pub schema: u32,
    pub probe: String,
    pub question: String,
    pub verdict: Verdict,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skip_reason: Option<String>,
    pub commit: String,
    pub dirty: bool,
    pub machine: Machine,
    pub config: Value,
    pub contract_hash: String,
    pub seed: u64,
    pub command: Vec<String>,
    pub checks: Vec<Check>,
    pub canary: Option<Canary>,
    pub metrics: Vec<Metric>,
    pub claim: Claim,
    /// The start-up record of the engine that was probed, where there is one.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub startup: Value,
    /// The probe's own tables.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub details: Map<String, Value>,
}

/// Evidence in the making.
#[derive(Clone)]
pub struct Draft {
    pub probe: &'static str,
    pub question: String,
    pub claim: Claim,
    pub config: Value,
    pub contract_hash: String,
    pub seed: u64,
    pub startup: Value,
    pub details: Map<String, Value>,
    checks: Vec<Check>,
    metrics: Vec<Metric>,
    canary: Option<Canary>,
}

impl Draft {
    pub fn new(probe: &'static str, question: &str, claim: Claim) -> Self {
        Draft {
            probe,
            question: question.into(),
            claim,
            config: Value::Null,
            contract_hash: String::new(),
            seed: 0,
            startup: Value::Null,
            details: Map::new(),
            checks: Vec::new(),
            metrics: Vec::new(),
            canary: None,
        }
    }

    /// Records a tested statement; returns whether it held.
    pub fn check(&mut self, name: &str, pass: bool, detail: impl Into<String>) -> bool {
        self.checks.push(Check { name: name.into(), pass, detail: detail.into() });
        pass
    }

    /// Records a number; a limit makes it part of the verdict.
    pub fn metric(&mut self, name: &str, value: f64, unit: &str, samples: u64, limit: Option<Limit>) {
        self.metrics.push(Metric { name: name.into(), value, unit: unit.into(), samples, limit, spread: None });
    }

    /// Records the median of a repeated measurement with its spread.
    pub fn repeated(&mut self, name: &str, values: &[f64], unit: &str, samples: u64, limit: Option<Limit>) {
        let summary = Summary::of(values);
        let spread = (values.len() > 1).then(|| (summary.max - summary.min) / summary.p50.abs().max(f64::MIN_POSITIVE));
        self.metrics.push(Metric { name: name.into(), value: summary.p50, unit: unit.into(), samples, limit, spread });
    }

    pub fn canary(&mut self, canary: Canary) {
        self.canary = Some(canary);
    }

    pub fn detail(&mut self, name: &str, value: impl Serialize) {
        let value = serde_json::to_value(value).expect("a probe's tables are plain data");
        self.details.insert(name.into(), value);
    }

    /// The verdict as it stands, without a skip.
    fn verdict(&self) -> Verdict {
        let checked = !self.checks.is_empty() && self.checks.iter().all(|check| check.pass);
        let within = self.metrics.iter().all(|metric| metric.limit.is_none_or(|limit| limit.holds(metric.value)));
        let caught = self.canary.as_ref().is_none_or(|canary| canary.caught || canary.skipped.is_some());
        if checked && within && caught { Verdict::Pass } else { Verdict::Fail }
    }

    /// The evidence that closing now would give.
    pub fn preview(&self) -> Evidence {
        self.clone().finish()
    }

    /// Closes the draft with the verdict that its contents have.
    pub fn finish(self) -> Evidence {
        let verdict = self.verdict();
        self.close(verdict, None)
    }

    /// Closes the draft as skipped, or as failed when a check had already failed.
    pub fn skip(self, reason: &str) -> Evidence {
        let failed = self.checks.iter().any(|check| !check.pass);
        self.close(if failed { Verdict::Fail } else { Verdict::Skip }, Some(reason.into()))
    }

    fn close(self, verdict: Verdict, skip_reason: Option<String>) -> Evidence {
        Evidence {
            schema: SCHEMA,
            probe: self.probe.into(),
            question: self.question,
            verdict,
            skip_reason,
            commit: COMMIT.into(),
            dirty: is_dirty(),
            machine: Machine::read(),
            config: self.config,
            contract_hash: self.contract_hash,
            seed: self.seed,
            command: command_line(),
            checks: self.checks,
            canary: self.canary,
            metrics: self.metrics,
            claim: self.claim,
            startup: self.startup,
            details: self.details,
        }
    }
}

/// Why a report could not be written or read.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {reason}")]
pub struct EvidenceError {
    pub path: String,
    pub reason: String,
}

impl Evidence {
    /// Writes pretty JSON, whole or not at all: to a neighbour first, then renamed.
    pub fn write(&self, path: &Path) -> Result<(), EvidenceError> {
        write_json(path, self)
    }

    pub fn read(path: &Path) -> Result<Evidence, EvidenceError> {
        let error = |reason: String| EvidenceError { path: path.display().to_string(), reason };
        let text = std::fs::read(path).map_err(|e| error(e.to_string()))?;
        let evidence: Evidence = serde_json::from_slice(&text).map_err(|e| error(e.to_string()))?;
        if evidence.schema != SCHEMA {
            return Err(error(format!("evidence schema {} is not {SCHEMA}", evidence.schema)));
        }
        Ok(evidence)
    }

    pub fn metric(&self, name: &str) -> Option<&Metric> {
        self.metrics.iter().find(|metric| metric.name == name)
    }

    /// The lines a person reads: verdict first, then what failed, then the numbers.
    pub fn summary(&self) -> String {
        let mut text = format!("{} {:?}: {}\n", self.probe, self.verdict, self.question);
        if let Some(reason) = &self.skip_reason {
            text += &format!("  skipped: {reason}\n");
        }
        for check in &self.checks {
            text += &format!("  {} {}: {}\n", if check.pass { "ok  " } else { "FAIL" }, check.name, check.detail);
        }
        for metric in &self.metrics {
            let mark = match metric.limit {
                None => String::new(),
                Some(limit) => {
                    let (sign, bound) = match limit {
                        Limit::AtMost(bound) => ("≤", bound),
                        Limit::AtLeast(bound) => ("≥", bound),
                    };
                    format!("  ({sign} {bound}{})", if limit.holds(metric.value) { "" } else { ", BEYOND" })
                }
            };
            text += &format!("  {} = {:.4} {} (n {}){mark}\n", metric.name, metric.value, metric.unit, metric.samples);
        }
        match &self.canary {
            Some(Canary { fault, skipped: Some(reason), .. }) => {
                text += &format!("  canary {fault}: skipped, {reason}\n")
            }
            Some(Canary { fault, caught, .. }) => {
                text += &format!("  canary {fault}: {}\n", if *caught { "caught" } else { "NOT CAUGHT" });
            }
            None => {}
        }
        text
    }
}

/// Pretty JSON with a final newline, whole or not at all.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<(), EvidenceError> {
    let error = |reason: String| EvidenceError { path: path.display().to_string(), reason };
    let mut text = serde_json::to_vec_pretty(value).map_err(|e| error(e.to_string()))?;
    text.push(b'\n');
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(|e| error(e.to_string()))?;
    }
    let partial = path.with_extension("json.part");
    std::fs::write(&partial, text).map_err(|e| error(e.to_string()))?;
    std::fs::rename(&partial, path).map_err(|e| error(e.to_string()))
}

/// The command as it was given, the binary by its name and absolute paths by their last part.
fn command_line() -> Vec<String> {
    std::env::args().map(|word| short_path(&word)).collect()
}

/// An absolute path says where a file lay on one machine; its last part says which file it was.
pub fn short_path(word: &str) -> String {
    let shorten = |path: &str| match path.strip_prefix('/') {
        Some(rest) => rest.trim_end_matches('/').rsplit('/').next().unwrap_or_default().to_string(),
        None => path.to_string(),
    };
    match word.split_once('=') {
        Some((flag, value)) if flag.starts_with("--") => format!("{flag}={}", shorten(value)),
        _ => shorten(word),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claim::Label;

    fn draft() -> Draft {
        Draft::new("test", "does the verdict follow the data?", Claim::of(Label::DistinctRowDecode))
    }

    #[test]
    fn the_verdict_follows_what_was_recorded() {
        assert_eq!(draft().finish().verdict, Verdict::Fail, "nothing checked is not a pass");

        let mut good = draft();
        good.check("one", true, "");
        good.metric("step_ms_p50", 3.0, "ms", 10, Some(Limit::AtMost(3.0)));
        good.canary(Canary::planted("fault", true));
        assert_eq!(good.finish().verdict, Verdict::Pass);

        let mut failed = draft();
        failed.check("one", true, "");
        failed.check("two", false, "7 is not 8");
        assert_eq!(failed.finish().verdict, Verdict::Fail);

        let mut slow = draft();
        slow.check("one", true, "");
        slow.metric("tok_s", f64::NAN, "tok/s", 0, Some(Limit::AtLeast(1.0)));
        assert_eq!(slow.finish().verdict, Verdict::Fail, "a value that is no number keeps no limit");

        let mut blind = draft();
        blind.check("one", true, "");
        blind.canary(Canary::planted("fault", false));
        assert_eq!(blind.finish().verdict, Verdict::Fail);

        let mut remote = draft();
        remote.check("one", true, "");
        remote.canary(Canary::skipped("fault", "only a URL was given"));
        assert_eq!(remote.finish().verdict, Verdict::Pass);
    }

    #[test]
    fn a_skip_is_not_a_pass_and_hides_no_failure() {
        let skipped = draft().skip("no GPU");
        assert_eq!(skipped.verdict, Verdict::Skip);
        assert_eq!(skipped.skip_reason.as_deref(), Some("no GPU"));
        let mut failed = draft();
        failed.check("one", false, "");
        assert_eq!(failed.skip("no GPU").verdict, Verdict::Fail);
    }

    #[test]
    fn evidence_reads_back_as_it_was_written() {
        let folder = std::env::temp_dir().join(format!("slotgraph-evidence-{}", std::process::id()));
        let path = folder.join("a.json");
        let mut draft = draft();
        draft.check("one", true, "detail");
        draft.metric("tok_s", 12.5, "tok/s", 3, Some(Limit::AtLeast(1.0)));
        draft.detail("rows", [1, 2, 3]);
        let evidence = draft.finish();
        evidence.write(&path).unwrap();
        assert_eq!(Evidence::read(&path).unwrap(), evidence);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn absolute_paths_are_kept_out_of_evidence() {
        assert_eq!(short_path("/a/b/slotgraph-probe"), "slotgraph-probe");
        assert_eq!(short_path("--out=/a/b.json"), "--out=b.json");
        assert_eq!(short_path("tests/models/x"), "tests/models/x");
        assert_eq!(short_path("http://127.0.0.1:8000"), "http://127.0.0.1:8000");
    }
}
