//! bench-http: what clients of a server see under a load, closed loop or open.

use crate::claim::{Claim, Label};
use crate::cli::{Outcome, ProbeError};
use crate::client::Leave;
use crate::evidence::{Canary, Draft, Limit};
use crate::harness::{Target, TargetArgs};
use crate::load::{self, Arrivals, LoadRequest, LoadSummary, completion_body, prompt_ids};
use crate::stats::Summary;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

/// TTFT, TPOT, ITL, E2E and throughput of streamed completions over HTTP.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    load: LoadArgs,
    /// Clients of the closed loop.
    #[arg(long, default_value_t = 16)]
    concurrency: usize,
    /// Mean arrivals a second instead (open loop).
    #[arg(long, conflicts_with = "concurrency")]
    rate: Option<f64>,
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// Least output tokens a second.
    #[arg(long)]
    min_tok_s: Option<f64>,
}

/// The shape of a load's requests.
#[derive(Clone, Debug, clap::Args)]
pub struct LoadArgs {
    #[arg(long, default_value_t = 64)]
    pub num_requests: usize,
    #[arg(long, default_value_t = 4)]
    pub warmup: usize,
    #[arg(long, default_value_t = 64)]
    pub prompt_tokens: usize,
    #[arg(long, default_value_t = 64)]
    pub max_tokens: usize,
    /// `distinct` prompts, or the `same` one everywhere (a diagnostic: identical rows flatter a MoE model).
    #[arg(long, default_value = "distinct", value_parser = ["distinct", "same"])]
    pub rows: String,
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Absolute deadline of each request, in seconds.
    #[arg(long, default_value_t = 120.0)]
    pub timeout: f64,
}

impl LoadArgs {
    pub fn is_distinct(&self) -> bool {
        self.rows == "distinct"
    }

    /// The requests of one repeat; ids and prompts are the repeat's own, so that no cache answers for another.
    pub fn requests(&self, target: &Target, name: &str, repeat: usize, count: usize) -> Vec<LoadRequest> {
        (0..count)
            .map(|number| {
                let prompt = if self.is_distinct() { (repeat * 100_000 + number) as u64 } else { 0 };
                LoadRequest {
                    id: target.id(&format!("{name}{repeat}"), number),
                    body: completion_body(
                        &target.model,
                        &prompt_ids(self.seed << 32 | prompt, self.prompt_tokens),
                        self.max_tokens,
                    ),
                    leave: Leave::Never,
                }
            })
            .collect()
    }

    pub fn config(&self) -> Value {
        json!({
            "num_requests": self.num_requests, "prompt_tokens": self.prompt_tokens, "max_tokens": self.max_tokens,
            "rows": self.rows, "timeout_s": self.timeout, "warmup": self.warmup,
        })
    }

    pub fn timeout(&self) -> Duration {
        Duration::from_secs_f64(self.timeout)
    }
}

pub async fn run(args: &Args) -> Result<Outcome, ProbeError> {
    let target = args.target.open(&[]).await?;
    let arrivals = match args.rate {
        Some(rate) => Arrivals::Open { rate, seed: args.load.seed },
        None => Arrivals::Closed(args.concurrency),
    };
    let label = if args.load.is_distinct() { Label::MixedRequestServing } else { Label::SamePromptDiagnostic };
    let mut draft = Draft::new("bench-http", "what do clients of this server see under this load?", Claim::of(label));
    draft.config = json!({
        "target": args.target.config(), "model": target.model, "load": args.load.config(),
        "concurrency": args.rate.is_none().then_some(args.concurrency), "rate": args.rate, "repeats": args.repeats,
    });
    draft.seed = args.load.seed;
    describe_server(&mut draft, &target).await;

    let warm = args.load.requests(&target, "warm", 0, args.load.warmup);
    load::run(&target.server, &warm, Arrivals::Closed(args.load.warmup.max(1)), args.load.timeout()).await;
    let mut summaries = Vec::new();
    for repeat in 0..args.repeats {
        let requests = args.load.requests(&target, "r", repeat + 1, args.load.num_requests);
        summaries.push(load::run(&target.server, &requests, arrivals, args.load.timeout()).await.summary());
    }
    record(&mut draft, "", &summaries, args.load.num_requests);
    if !args.load.is_distinct() {
        let answers: BTreeSet<&String> = summaries.iter().flat_map(|s| s.output_hashes.keys()).collect();
        draft.check("same_prompt_same_answer", answers.len() == 1, format!("{} different answers", answers.len()));
    }
    if let Some(floor) = args.min_tok_s {
        let tok_s: Vec<f64> = summaries.iter().map(|s| s.tok_s).collect();
        draft.repeated("tok_s_gated", &tok_s, "tok/s", args.repeats as u64, Some(Limit::AtLeast(floor)));
    }
    draft.canary(no_answer_canary(&target, &args.load).await);
    draft.detail("repeats", &summaries);
    draft.detail("metric_definitions", definitions());
    Ok(Outcome::Evidence(Box::new(draft.finish())))
}

/// The contract hash and start-up record of the server, where it tells them.
pub async fn describe_server(draft: &mut Draft, target: &Target) {
    draft.startup = target.startup().await;
    if let Some(hash) = draft.startup.pointer("/ranks/0/device/contract_hash").and_then(Value::as_str) {
        draft.contract_hash = hash.into();
    }
}

/// Checks and metrics of repeats of one load; `suffix` tells loads of one report apart.
pub fn record(draft: &mut Draft, suffix: &str, summaries: &[LoadSummary], expected: usize) {
    use crate::client::Outcome::Completed;
    let done: Vec<usize> = summaries.iter().map(|s| s.outcomes.get(&Completed).copied().unwrap_or(0)).collect();
    let error = summaries.iter().find_map(|s| s.first_error.clone()).unwrap_or_default();
    draft.check(
        &format!("every_request_completed{suffix}"),
        done.iter().all(|&done| done == expected),
        format!("{done:?} of {expected} {error}"),
    );
    let samples = |of: fn(&LoadSummary) -> &Summary| summaries.iter().map(|s| of(s).n as u64).sum::<u64>();
    let mut metric = |name: &str, unit: &str, value: fn(&LoadSummary) -> f64, n: u64| {
        draft.repeated(&format!("{name}{suffix}"), &summaries.iter().map(value).collect::<Vec<_>>(), unit, n, None);
    };
    metric("tok_s", "tok/s", |s| s.tok_s, expected as u64);
    metric("token_exact", "requests", |s| s.token_exact as f64, expected as u64);
    metric("qps", "requests/s", |s| s.qps, expected as u64);
    metric("ttft_ms_p50", "ms", |s| s.ttft_ms.p50, samples(|s| &s.ttft_ms));
    metric("ttft_ms_p99", "ms", |s| s.ttft_ms.p99, samples(|s| &s.ttft_ms));
    metric("tpot_ms_p50", "ms", |s| s.tpot_ms.p50, samples(|s| &s.tpot_ms));
    metric("itl_ms_p50", "ms", |s| s.itl_ms.p50, samples(|s| &s.itl_ms));
    metric("itl_ms_p99", "ms", |s| s.itl_ms.p99, samples(|s| &s.itl_ms));
    metric("e2e_ms_p50", "ms", |s| s.e2e_ms.p50, samples(|s| &s.e2e_ms));
    metric("e2e_ms_p99", "ms", |s| s.e2e_ms.p99, samples(|s| &s.e2e_ms));
}

/// A load with one request that no server can complete in time must be seen as incomplete.
async fn no_answer_canary(target: &Target, load: &LoadArgs) -> Canary {
    let mut requests = load.requests(target, "canary", 0, 2);
    requests[1].body["max_tokens"] = json!(target.max_model_len - load.prompt_tokens);
    let result = load::run(&target.server, &requests[1..], Arrivals::Closed(1), Duration::from_millis(1)).await;
    Canary::planted("a deadline of one millisecond", result.count(crate::client::Outcome::Timeout) == 1)
}

fn definitions() -> Value {
    json!({
        "ttft_ms": "request handed to the socket until the first event that carries a token",
        "tpot_ms": "first to last token, divided by tokens less one; only requests whose events are exactly their tokens",
        "itl_ms": "between successive tokens; only requests whose events are exactly their tokens",
        "e2e_ms": "request handed to the socket until the last event",
        "tok_s": "usage.completion_tokens of all requests divided by the wall time of the load",
    })
}
