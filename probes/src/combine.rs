//! combine: reports of the same question from several backends, put side by side; refused where they are not comparable.

use crate::claim::{Claim, Label};
use crate::cli::{Outcome, ProbeError};
use crate::evidence::{Canary, Draft, Evidence, Verdict};
use crate::machine::Machine;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Put reports of several backends (transports, devices) side by side; refuse other commits, models or runtimes.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Two or more reports of one probe.
    #[arg(required = true, num_args = 2.., value_name = "REPORT")]
    reports: Vec<PathBuf>,
}

/// Why reports may or may not stand together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CoverageGate {
    pub passed: bool,
    pub retained_children: usize,
    pub same_probe: bool,
    pub commit_consistent: bool,
    pub clean_builds: bool,
    pub model_consistent: bool,
    pub contract_consistent: bool,
    pub hardware_consistent: bool,
    pub runtime_consistent: bool,
    pub duplicates: Vec<String>,
    pub failed_children: Vec<String>,
}

pub fn run(args: &Args) -> Result<Outcome, ProbeError> {
    let reports: Vec<Evidence> = args
        .reports
        .iter()
        .map(|path| Evidence::read(path).map_err(|e| ProbeError::Usage(e.to_string())))
        .collect::<Result<_, _>>()?;
    let gate = gate(&reports);
    let mut draft = Draft::new(
        "combine",
        "do these reports answer one question about one build, model and machine?",
        Claim::of(Label::Transport),
    );
    draft.contract_hash = reports[0].contract_hash.clone();
    for (name, pass) in [
        ("same_probe", gate.same_probe),
        ("commit_consistent", gate.commit_consistent),
        ("clean_builds", gate.clean_builds),
        ("model_consistent", gate.model_consistent),
        ("contract_consistent", gate.contract_consistent),
        ("hardware_consistent", gate.hardware_consistent),
        ("runtime_consistent", gate.runtime_consistent),
        ("no_duplicates", gate.duplicates.is_empty()),
        ("every_child_passed", gate.failed_children.is_empty()),
    ] {
        draft.check(name, pass, if pass { "" } else { "see coverage_gate" });
    }
    // The canary: the same reports, one of them from another commit.
    let mut planted = reports.clone();
    planted[0].commit = "0".repeat(40);
    draft.canary(Canary::planted("a report of another commit", !self::gate(&planted).commit_consistent));
    draft.detail("coverage_gate", &gate);
    draft.detail("side_by_side", side_by_side(&reports));
    Ok(Outcome::Evidence(Box::new(draft.finish())))
}

pub fn gate(reports: &[Evidence]) -> CoverageGate {
    let same = |of: fn(&Evidence) -> String| reports.iter().all(|report| of(report) == of(&reports[0]));
    let mut duplicates: Vec<String> = Vec::new();
    for (at, report) in reports.iter().enumerate() {
        if reports[..at].iter().any(|earlier| backend(earlier) == backend(report)) {
            duplicates.push(backend(report));
        }
    }
    let failed_children =
        reports.iter().filter(|r| r.verdict != Verdict::Pass).map(|r| format!("{} {}", r.probe, backend(r))).collect();
    let mut gate = CoverageGate {
        passed: false,
        retained_children: reports.len(),
        same_probe: same(|r| r.probe.clone()),
        commit_consistent: same(|r| r.commit.clone()) && reports[0].commit != "unknown",
        clean_builds: reports.iter().all(|r| !r.dirty),
        model_consistent: same(model),
        contract_consistent: same(|r| r.contract_hash.clone()),
        hardware_consistent: same(|r| hardware(&r.machine)),
        runtime_consistent: same(|r| format!("{} {}", r.machine.rustc, r.machine.gpu_driver)),
        duplicates,
        failed_children,
    };
    gate.passed = gate.same_probe
        && gate.commit_consistent
        && gate.clean_builds
        && gate.model_consistent
        && gate.contract_consistent
        && gate.hardware_consistent
        && gate.runtime_consistent
        && gate.duplicates.is_empty()
        && gate.failed_children.is_empty();
    gate
}

/// What tells the children apart: device, mode and transport of the start-up record, and how the server was started.
fn backend(report: &Evidence) -> String {
    let word = |path: &str| report.startup.pointer(path).and_then(Value::as_str).unwrap_or_default().to_string();
    let serve = report.config.pointer("/target/serve").map(Value::to_string).unwrap_or_default();
    let (kind, mode) = (word("/ranks/0/device/kind"), word("/ranks/0/device/mode"));
    format!("{kind} {mode} {} {serve}", word("/transport")).trim().to_string()
}

fn model(report: &Evidence) -> String {
    let startup = report.startup.pointer("/model/sha256").and_then(Value::as_str).unwrap_or_default();
    format!("{} {startup}", report.config.get("model").map(Value::to_string).unwrap_or_default())
}

fn hardware(machine: &Machine) -> String {
    let gpus: Vec<&str> = machine.gpus.iter().map(|gpu| gpu.model.as_str()).collect();
    format!("{} × {} {gpus:?}", machine.cores, machine.cpu)
}

/// Each metric's value by child.
fn side_by_side(reports: &[Evidence]) -> BTreeMap<String, BTreeMap<String, f64>> {
    let mut table: BTreeMap<String, BTreeMap<String, f64>> = BTreeMap::new();
    for report in reports {
        for metric in &report.metrics {
            table.entry(metric.name.clone()).or_default().insert(backend(report), metric.value);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn report(transport: &str) -> Evidence {
        let mut draft = Draft::new("slo", "?", Claim::of(Label::Slo));
        draft.check("one", true, "");
        draft.config = json!({"model": "m", "target": {"serve": ["--transport", transport]}});
        Evidence { dirty: false, commit: "a".repeat(40), ..draft.finish() }
    }

    #[test]
    fn reports_of_one_build_stand_together() {
        assert!(gate(&[report("nccl"), report("p2p")]).passed);
    }

    #[test]
    fn another_commit_model_runtime_or_a_double_is_refused() {
        let with = |change: fn(&mut Evidence)| {
            let mut other = report("p2p");
            change(&mut other);
            gate(&[report("nccl"), other])
        };
        assert!(!with(|r| r.commit = "b".repeat(40)).passed);
        assert!(!with(|r| r.config["model"] = json!("n")).passed);
        assert!(!with(|r| r.machine.rustc = "rustc 0".into()).passed);
        assert!(!with(|r| r.verdict = Verdict::Fail).passed);
        assert!(!with(|r| r.dirty = true).passed);
        assert!(!gate(&[report("nccl"), report("nccl")]).passed);
    }
}
