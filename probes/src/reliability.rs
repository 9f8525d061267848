//! http-reliability: nothing a client does hurts another client, and the server is as it was after each of it.
//!
//! Scenarios run one after the other against one server. **Invariant:** each is followed by the same questions: is the server quiet,
//! do all requests have their trace, does the canary answer the same bytes, is the process alive and its log clean.

mod overload;
mod scenarios;
mod storm;

use crate::bench_http::describe_server;
use crate::claim::{Claim, Label};
use crate::cli::{Outcome, ProbeError};
use crate::client::{Completion, Leave};
use crate::evidence::{Canary, Draft};
use crate::harness::{Target, TargetArgs};
use crate::load::{self, Arrivals, LoadRequest, completion_body, output_hash, prompt_ids};
use crate::scrape::Baseline;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Cancels, floods, resets, slow readers and restarts, each followed by a clean server.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    target: TargetArgs,
    /// Only these scenarios [default: all].
    #[arg(long, value_delimiter = ',')]
    scenario: Vec<String>,
    /// Requests that the server lets wait; a server that the probe starts is told so.
    #[arg(long, default_value_t = 1024)]
    max_queue: usize,
    /// Clients of the reset storm.
    #[arg(long, default_value_t = 1000)]
    storm: usize,
    /// Most milliseconds from the last of their resets to a quiet server.
    #[arg(long, default_value_t = 250.0)]
    collapse_ms: f64,
    /// How often a scenario that was too slow may be tried: what is slow each time is the server's fault, not the machine's.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..))]
    attempts: u8,
    /// Absolute deadline of a request, in seconds.
    #[arg(long, default_value_t = 60.0)]
    timeout: f64,
}

/// Every scenario, in order.
const SCENARIOS: [&str; 10] = [
    "cancel_disconnect",
    "invalid_requests",
    "overload_active_cap",
    "mixed_short_long_with_failures",
    "cancel_while_queued",
    "cancel_mid_prefill",
    "reset_storm",
    "slow_reader",
    "malformed_flood",
    "engine_restart",
];

/// How long a server may take to be quiet after a scenario.
const QUIET: Duration = Duration::from_secs(2);

/// What a scenario came to.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    name: String,
    passed: bool,
    failures: Vec<String>,
    counts: Counts,
    /// Texts of requests that asked the same thing: one hash each if nothing drifted.
    output_hashes: BTreeMap<String, Vec<String>>,
    traced: usize,
    expected_traces: usize,
    missing_traces: Vec<String>,
    terminal_reasons: BTreeMap<String, usize>,
    trace_maxima: BTreeMap<String, u64>,
    quiet_after_ms: Option<f64>,
    clean_follow_up: bool,
    /// The scenario's own numbers.
    details: Map<String, Value>,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Counts {
    completed: usize,
    failed: usize,
    rejected: usize,
    cancelled: usize,
    disconnected: usize,
    timeout: usize,
}

impl Report {
    fn new(name: &str) -> Report {
        Report { name: name.into(), ..Report::default() }
    }

    /// Records a failure unless `held`.
    fn expect(&mut self, held: bool, otherwise: impl Into<String>) {
        if !held {
            self.failures.push(otherwise.into());
        }
    }

    fn detail(&mut self, name: &str, value: impl Into<Value>) {
        self.details.insert(name.into(), value.into());
    }
}

/// The server under test and what it was like before anything happened to it.
pub struct Bench<'a> {
    target: Target,
    args: &'a Args,
    quiet: Baseline,
    /// Seats of the server.
    slots: usize,
    /// The canary's text, alone on a fresh server.
    canary: String,
}

impl<'a> Bench<'a> {
    async fn open(args: &'a Args, more: &[&str]) -> Result<Bench<'a>, ProbeError> {
        let max_queue = args.max_queue.to_string();
        let target = args.target.open(&[&["--max-queue", &max_queue], more].concat()).await?;
        let mut bench = Bench { target, args, quiet: Baseline::default(), slots: 0, canary: String::new() };
        bench.slots = bench.scrape().await?.sum("slotgraph_slots", &[]) as usize;
        if bench.slots == 0 {
            return Err(ProbeError::Failed("the server does not say how many slots it has".into()));
        }
        let first = bench.canary("warm").await;
        bench.canary = first.text.clone();
        if first.outcome != crate::client::Outcome::Completed {
            return Err(ProbeError::Failed(format!("the canary failed on a fresh server: {:?}", first.error)));
        }
        // The second canary settles what the first allocated; the baseline is read after it.
        bench.canary("warm-again").await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        bench.quiet = bench.target.baseline().await?;
        Ok(bench)
    }

    fn timeout(&self) -> Duration {
        Duration::from_secs_f64(self.args.timeout)
    }
    fn deadline(&self) -> Instant {
        Instant::now() + self.timeout()
    }

    async fn scrape(&self) -> Result<crate::scrape::Scrape, ProbeError> {
        let scrape = crate::scrape::Scrape::of(&self.target.server, self.deadline()).await;
        scrape.map_err(|e| ProbeError::Failed(format!("/metrics: {e}")))
    }

    /// A streamed request for `tokens` tokens after a prompt of `prompt` ids that no other seed has.
    fn request(&self, name: &str, number: usize, prompt: usize, tokens: usize, leave: Leave) -> LoadRequest {
        let seed = load::scatter(number as u64) ^ name.len() as u64;
        let body = completion_body(&self.target.model, &prompt_ids(seed, prompt), tokens);
        LoadRequest { id: self.target.id(name, number), body, leave }
    }

    /// The same greedy request every time.
    async fn canary(&self, name: &str) -> Completion {
        let mut request = self.request(&format!("canary-{name}"), 0, 1, 32, Leave::Never);
        request.body["prompt"] = json!("The capital of France is");
        self.all_at_once(&[request]).await.remove(0)
    }

    async fn all_at_once(&self, requests: &[LoadRequest]) -> Vec<Completion> {
        let clients = Arrivals::Closed(requests.len());
        load::run(&self.target.server, requests, clients, self.timeout()).await.completions
    }

    /// Polls a condition on the metrics; how long it took to hold.
    async fn wait_for(&self, limit: Duration, holds: impl Fn(&crate::scrape::Scrape) -> bool) -> Option<Duration> {
        let started = Instant::now();
        while started.elapsed() < limit {
            if self.scrape().await.is_ok_and(|scrape| holds(&scrape)) {
                return Some(started.elapsed());
            }
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
        None
    }

    /// What every scenario is asked afterwards. `traced` are ids that reached the engine.
    async fn finish(&self, mut report: Report, seen: &[Completion], traced: &[String]) -> Result<Report, ProbeError> {
        report.missing_traces = self.target.missing_traces(traced, Duration::from_secs(3)).await?;
        report.expected_traces = traced.len();
        report.traced = traced.len() - report.missing_traces.len();
        let missing = report.missing_traces.len();
        report.expect(missing == 0, format!("{missing} of {} requests have no trace", traced.len()));
        self.count(&mut report, seen, traced).await?;

        match Baseline::wait_quiet(&self.target.server, self.target.pid(), &self.quiet, QUIET).await {
            Ok(took) => report.quiet_after_ms = Some(took.as_secs_f64() * 1e3),
            Err(last) => report.expect(false, format!("not quiet after {QUIET:?}: {last:?}, before {:?}", self.quiet)),
        }
        let follow_up = self.canary(&report.name).await;
        report.clean_follow_up = follow_up.text == self.canary && follow_up.finish_reason.is_some();
        report.expect(
            report.clean_follow_up,
            format!("the canary changed: {:?}, before {:?} ({:?})", follow_up.text, self.canary, follow_up.error),
        );
        let health = self.target.server.get("/health", self.deadline()).await;
        report.expect(health.is_ok_and(|answer| answer.status == 200), "/health is not 200");
        report.expect(self.target.is_alive(), "the server process has left");
        let log = self.target.log();
        let complaints = complaints(&log);
        report.expect(complaints.is_empty(), format!("the log complains: {complaints:?}"));
        report.passed = report.failures.is_empty();
        Ok(report)
    }

    async fn count(&self, report: &mut Report, seen: &[Completion], traced: &[String]) -> Result<(), ProbeError> {
        use crate::client::Outcome::{Failed, Refused, Timeout};
        report.counts.rejected = seen.iter().filter(|c| c.outcome == Refused).count();
        report.counts.timeout = seen.iter().filter(|c| c.outcome == Timeout).count();
        report.counts.failed = seen.iter().filter(|c| c.outcome == Failed).count();
        let (failed, timeout) = (report.counts.failed, report.counts.timeout);
        let error = seen.iter().filter(|c| c.outcome == Failed).find_map(|c| c.error.clone()).unwrap_or_default();
        report.expect(failed == 0, format!("{failed} requests failed: {error}"));
        report.expect(timeout == 0, format!("{timeout} requests ran into their deadline"));
        let traces = self.target.traces().await?;
        for record in traced.iter().filter_map(|id| traces.get(id)).flatten() {
            let reason = record.get("terminal_reason").and_then(Value::as_str).unwrap_or("missing").to_string();
            match reason.as_str() {
                "completed_stop" | "completed_length" => report.counts.completed += 1,
                "cancelled" => report.counts.cancelled += 1,
                "disconnected" => report.counts.disconnected += 1,
                "rejected" => report.counts.rejected += 1,
                other => {
                    report.counts.failed += 1;
                    report.failures.push(format!("a trace ends with {other}"));
                }
            }
            *report.terminal_reasons.entry(reason).or_default() += 1;
            for key in ["active_set_size_max", "pending_queue_size_max", "decode_batch_size_max"] {
                let most = report.trace_maxima.entry(key.into()).or_default();
                *most = (*most).max(record.get(key).and_then(Value::as_u64).unwrap_or(0));
            }
        }
        Ok(())
    }

    /// Requests that asked the same thing must have answered the same bytes.
    fn expect_one_answer(&self, report: &mut Report, kind: &str, answers: &[&Completion]) {
        let mut hashes: Vec<String> = answers.iter().map(|c| output_hash(c)).collect();
        hashes.sort();
        hashes.dedup();
        report.expect(hashes.len() == 1, format!("{kind}: {} different answers to one question", hashes.len()));
        report.output_hashes.insert(kind.into(), hashes);
    }
}

/// Lines of a log that speak of a fault of the server.
fn complaints(log: &str) -> Vec<&str> {
    let bad =
        |line: &&str| line.contains("panicked at") || line.contains("ERROR") || line.contains("\"level\":\"ERROR\"");
    log.lines().filter(bad).take(3).collect()
}

pub async fn run(args: &Args) -> Result<Outcome, ProbeError> {
    if let Some(unknown) = args.scenario.iter().find(|name| !SCENARIOS.contains(&name.as_str())) {
        return Err(ProbeError::Usage(format!("--scenario {unknown}: known are {SCENARIOS:?}")));
    }
    let mut draft = Draft::new(
        "http-reliability",
        "is the server as it was after everything that clients can do to it?",
        Claim::of(Label::Reliability),
    );
    let mut bench = Bench::open(args, &[]).await?;
    describe_server(&mut draft, &bench.target).await;
    draft.config = json!({
        "target": args.target.config(), "model": bench.target.model, "storm": args.storm,
        "collapse_ms": args.collapse_ms, "slots": bench.slots,
    });
    let before = Held::by(&bench.target).await?;
    let (mut reports, mut after) = (Vec::new(), None);
    for name in SCENARIOS.iter().filter(|name| args.scenario.is_empty() || args.scenario.iter().any(|s| s == *name)) {
        let report = match *name {
            "engine_restart" if !args.target.starts_its_own() => continue,
            "engine_restart" => {
                // The last of the process that `before` is of.
                after = Some(Held::by(&bench.target).await?);
                scenarios::engine_restart(&mut bench).await?
            }
            name => play(&bench, name).await?,
        };
        let summary = report.failures.first().cloned().unwrap_or_else(|| format!("{:?}", report.counts));
        draft.check(name, report.passed, summary);
        reports.push(report);
    }
    let after = match after {
        Some(after) => after,
        None => Held::by(&bench.target).await?,
    };
    if bench.target.pid().is_some() {
        let (before, after) = (before.baseline.fds, after.baseline.fds);
        draft.check("descriptors_flat", after <= before + 2, format!("{before} before, {after} after"));
    }
    if let (Some(before), Some(after)) = (before.device_mib, after.device_mib) {
        draft.check("device_memory_flat", after <= before, format!("{before} MiB before, {after} after"));
    }
    draft.detail("scenarios", &reports);
    draft.detail("baseline", json!({"before": before, "after": after}));
    drop(bench);
    draft.canary(leak_canary(args).await?);
    Ok(Outcome::Evidence(Box::new(draft.finish())))
}

/// What a server that does nothing holds.
#[derive(Clone, Copy, Debug, Serialize)]
struct Held {
    baseline: Baseline,
    device_mib: Option<u64>,
}

impl Held {
    async fn by(target: &Target) -> Result<Held, ProbeError> {
        let device_mib = target.pid().and_then(crate::scrape::device_mib);
        Ok(Held { baseline: target.baseline().await?, device_mib })
    }
}

async fn play(bench: &Bench<'_>, name: &str) -> Result<Report, ProbeError> {
    match name {
        "cancel_disconnect" => scenarios::cancel_disconnect(bench).await,
        "invalid_requests" => scenarios::invalid_requests(bench).await,
        "mixed_short_long_with_failures" => scenarios::mixed(bench).await,
        "malformed_flood" => scenarios::malformed_flood(bench).await,
        "overload_active_cap" => overload::active_cap(bench).await,
        "cancel_while_queued" => overload::cancel_while_queued(bench).await,
        "cancel_mid_prefill" => overload::cancel_mid_prefill(bench).await,
        "reset_storm" => storm::reset_storm(bench).await,
        "slow_reader" => storm::slow_reader(bench).await,
        other => unreachable!("scenario {other} is in the table"),
    }
}

/// A server that loses a page every second must fail the first scenario's baseline.
async fn leak_canary(args: &Args) -> Result<Canary, ProbeError> {
    const FAULT: &str = "page-leak@1";
    if !args.target.starts_its_own() {
        return Ok(Canary::skipped(FAULT, "only the server's address was given"));
    }
    let bench = Bench::open(args, &["--fault", FAULT]).await?;
    let until = Instant::now() + Duration::from_secs(8);
    while Instant::now() < until {
        let report = scenarios::cancel_disconnect(&bench).await?;
        if report.failures.iter().any(|failure| failure.starts_with("not quiet")) {
            return Ok(Canary::planted(FAULT, true));
        }
    }
    Ok(Canary::planted(FAULT, false))
}
