//! The gates as a person runs them: the binary, its exit code and its evidence, each in a quick form against the bundled model.
//!
//! **Invariant:** one gate at a time, so that none of them measures another.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};

static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

const BINARY: &str = env!("CARGO_BIN_EXE_slotgraph-probe");

fn probe(arguments: &[&str]) -> Output {
    Command::new(BINARY).args(arguments).output().expect("the probe's binary starts")
}

/// Runs a probe that must leave with `code`; its evidence.
fn evidence(code: i32, arguments: &[&str]) -> Value {
    let output = probe(arguments);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
    serde_json::from_slice(&output.stdout).expect("evidence is JSON")
}

/// Whether the check of that name held.
fn held(evidence: &Value, name: &str) -> bool {
    let checks = evidence["checks"].as_array().expect("evidence has checks");
    let check =
        checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no check {name}: {checks:?}"));
    check["pass"].as_bool().expect("a check passed or not")
}

fn metric(evidence: &Value, name: &str) -> f64 {
    let metrics = evidence["metrics"].as_array().expect("evidence has metrics");
    let metric = metrics.iter().find(|metric| metric["name"] == name);
    metric.and_then(|metric| metric["value"].as_f64()).unwrap_or_else(|| panic!("no metric {name}: {metrics:?}"))
}

#[test]
fn a_soak_passes_and_one_of_a_leaking_server_does_not() {
    let _alone = alone();
    let quick = ["soak", "--duration", "6", "--bucket", "2", "--settle", "0", "--leak-every", "2"];
    let passed = evidence(0, &[&quick[..], &["--canary", "6"]].concat());
    assert_eq!(passed["canary"]["caught"], true);
    assert!(metric(&passed, "requests") > 16.0);

    let leaking = evidence(1, &[&quick[..], &["--canary", "0", "--", "--fault", "page-leak@2"]].concat());
    assert!(!held(&leaking, "quiet_after_each_bucket"));
    assert!(held(&leaking, "zero_failures") && held(&leaking, "trace_coverage"));
}

#[test]
fn replay_verifies_a_soak_and_refuses_a_changed_token_seed_and_logprob_bit() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let kept = folder.path().to_str().unwrap();
    evidence(0, &["soak", "--duration", "6", "--bucket", "3", "--settle", "0", "--canary", "0", "--keep", kept]);
    let (traces, prompts) = (folder.path().join("traces.jsonl"), folder.path().join("prompts.jsonl"));
    let replay = |code: i32, more: &[&str]| {
        let files = ["replay", traces.to_str().unwrap(), "--prompt-file", prompts.to_str().unwrap()];
        evidence(code, &[&files[..], more].concat())
    };
    let wide = replay(0, &["--limit", "24", "--regenerate", "3", "--max-slots", "64", "--bucket", "128"]);
    assert!(held(&wide, "in_another_bucket"));
    assert_eq!(wide["canary"]["caught"], true);
    assert!(metric(&wide, "answers_greedy") > 0.0 && metric(&wide, "answers_sampled") > 0.0);
    assert!(metric(&wide, "answers_verified") > 0.0 && metric(&wide, "answers_regenerated") >= 3.0);
    replay(0, &["--limit", "12", "--regenerate", "2", "--ep", "2"]);

    // Each change is made in the files themselves, in one answer that a single pass can verify.
    let (trace, prompt) = sampled_with_logprobs(&traces, &prompts);
    let write = |trace: &Value, prompt: &Value| {
        std::fs::write(&traces, format!("{trace}\n")).unwrap();
        std::fs::write(&prompts, format!("{prompt}\n")).unwrap();
    };
    write(&trace, &prompt);
    assert!(held(&replay(0, &[]), "every_answer_is_its_own"));

    let mut token = prompt.clone();
    token["token_ids"][1] = (prompt["token_ids"][1].as_u64().unwrap() ^ 1).into();
    let mut seed = trace.clone();
    seed["seed"] = (trace["seed"].as_u64().unwrap() ^ 1).into();
    let mut logprob = prompt.clone();
    let bits = (prompt["logprobs"][1].as_f64().unwrap() as f32).to_bits() ^ 1;
    logprob["logprobs"][1] = f64::from(f32::from_bits(bits)).into();
    for (trace, prompt) in [(&trace, &token), (&seed, &prompt), (&trace, &logprob)] {
        write(trace, prompt);
        assert!(!held(&replay(1, &[]), "every_answer_is_its_own"));
    }
}

/// A sampled answer without penalties whose logprobs are known.
fn sampled_with_logprobs(traces: &Path, prompts: &Path) -> (Value, Value) {
    let lines = |path: &Path| -> Vec<Value> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let prompts = lines(prompts);
    let prompt_of = |trace: &Value| {
        let own = |prompt: &&Value| prompt["request_id"] == trace["request_id"] && prompt["logprobs"].is_array();
        prompts.iter().find(own).cloned()
    };
    let fits = |trace: &Value| {
        let sampling = &trace["sampling"];
        sampling["temperature"].as_f64().unwrap() > 0.5
            && sampling["presence_penalty"] == 0.0
            && trace["completion_tokens"].as_u64().unwrap() > 8
    };
    let found =
        lines(traces).into_iter().filter(fits).find_map(|trace| prompt_of(&trace).map(|prompt| (trace, prompt)));
    found.expect("one in eight answers is sampled and has logprobs")
}

#[test]
fn the_shipped_budget_is_judged_and_half_of_it_is_not_kept() {
    let _alone = alone();
    let budget = concat!(env!("CARGO_MANIFEST_DIR"), "/slo/demo-cpu.json");
    // Four times the budget: whether the budget itself is kept is for the command on a quiet machine, not for a test among others.
    let kept = evidence(0, &["slo", "--budget", budget, "--repeats", "1", "--scale", "4"]);
    assert_eq!(kept["canary"]["caught"], true);
    let tight = evidence(1, &["slo", "--budget", budget, "--repeats", "1", "--scale", "0.25"]);
    assert!(held(&tight, "every_request_completed_short"), "it fails for its times alone");
}

#[test]
fn a_matrix_has_a_row_for_an_engine_that_does_not_start() {
    let _alone = alone();
    let serve = format!("slotgraph=exec {BINARY} serve --port {{port}}");
    let small =
        ["--num-prompts", "4", "--input-len", "16", "--output-len", "8", "--repeats", "2", "--concurrency", "1,4"];
    let matrix = evidence(0, &[&["matrix", "--engine", &serve, "--engine", "absent=exit 7"], &small[..]].concat());
    let details = &matrix["details"];
    assert_eq!(details["failed_setup_rows"][0]["engine"], "absent");
    assert_eq!(details["http_concurrency_pressure"].as_array().unwrap().len(), 2);
    assert_eq!(details["direct_diagnostic_batch"].as_array().unwrap().len(), 2);
    assert_eq!(details["correctness"][0]["repeatable"], true);
    assert_eq!(details["trace_pass"]["slotgraph"]["traced"], 8);
    let none = evidence(1, &["matrix", "--engine", "absent=exit 7"]);
    assert!(!held(&none, "an_engine_started"));
}

#[test]
fn bench_http_measures_closed_and_open_loops() {
    let _alone = alone();
    let small = ["bench-http", "--num-requests", "12", "--prompt-tokens", "16", "--max-tokens", "12", "--repeats", "2"];
    let closed = evidence(0, &[&small[..], &["--concurrency", "4"]].concat());
    assert_eq!(metric(&closed, "token_exact"), 12.0);
    assert_eq!(closed["canary"]["caught"], true);
    let open = evidence(0, &[&small[..], &["--rate", "20", "--rows", "same"]].concat());
    assert!(held(&open, "same_prompt_same_answer"));
    assert!(metric(&open, "qps") < 40.0, "arrivals set the pace");
    let floor = evidence(1, &[&small[..], &["--min-tok-s", "1e12"]].concat());
    assert_eq!(floor["verdict"], "fail");
}

#[test]
fn a_manifest_names_its_commit_and_every_changed_file() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    std::fs::write(at("a.bin"), [1, 2, 3, 4]).unwrap();
    std::fs::write(at("b.bin"), [5, 6]).unwrap();
    let manifest = at("manifest.json");
    let made = evidence(0, &["manifest", &at("a.bin"), &at("b.bin"), "--manifest", &manifest]);
    let commit = made["commit"].as_str().unwrap().to_string();
    let verify = |code: i32, commit: &str| evidence(code, &["manifest", "--verify", &manifest, "--commit", commit]);
    verify(0, &commit);
    assert!(!held(&verify(1, &"0".repeat(40)), "unchanged"));
    std::fs::write(at("a.bin"), [1, 2, 3, 5]).unwrap();
    assert!(!held(&verify(1, &commit), "unchanged"));
    std::fs::write(at("a.bin"), [1, 2, 3, 4]).unwrap();
    verify(0, &commit);
    std::fs::remove_file(at("b.bin")).unwrap();
    assert!(!held(&verify(1, &commit), "unchanged"));
}
