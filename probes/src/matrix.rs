//! matrix: any engines behind one HTTP client contract, side by side. An engine that does not start is a row, not an error.
//!
//! **Invariant:** every engine gets the same prompts, in the same order, with the same fields; engines run one after the other, alone.

mod engine;

use crate::claim::{Claim, Label};
use crate::cli::{Outcome, ProbeError};
use crate::client::{Leave, Outcome as Seen, Server};
use crate::evidence::{Canary, Draft};
use crate::load::{self, Arrivals, LoadRequest, LoadSummary, completion_body, prompt_ids, scatter};
use crate::regression::STABLE_SPREAD;
use crate::stats::Summary;
use engine::{EngineSpec, Running};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// One client contract against any engines: completions of token ids, greedy, EOS not honoured.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// `NAME=http://HOST:PORT` of a running engine, or `NAME=COMMAND` to start one; {port} in it becomes a free port. Several.
    #[arg(long = "engine", required = true, value_name = "NAME=URL|CMD")]
    engines: Vec<EngineSpec>,
    #[arg(long, default_value_t = 64)]
    input_len: usize,
    #[arg(long, default_value_t = 64)]
    output_len: usize,
    #[arg(long, default_value_t = 32)]
    num_prompts: usize,
    #[arg(long, value_delimiter = ',', default_value = "1,4,8")]
    concurrency: Vec<usize>,
    #[arg(long, default_value_t = 4)]
    num_warmups: usize,
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Seconds that an engine may take to answer its first request.
    #[arg(long, default_value_t = 900)]
    ready_timeout: u64,
    /// Absolute deadline of a request, in seconds.
    #[arg(long, default_value_t = 120.0)]
    timeout: f64,
}

/// One engine at one concurrency.
#[derive(Clone, Debug, Serialize)]
struct Row {
    engine: String,
    concurrency: usize,
    rows: &'static str,
    tok_s: Summary,
    ttft_ms_p50: f64,
    tpot_ms_p50: f64,
    itl_ms_p99: f64,
    /// `stable`, `noisy` or `insufficient_repeats`.
    noise: &'static str,
    passed: bool,
    repeats: Vec<LoadSummary>,
}

#[derive(Clone, Debug, Serialize)]
struct FailedSetup {
    engine: String,
    reason: String,
}

/// What an engine answers to the first prompts, alone.
#[derive(Clone, Debug, Serialize)]
struct Correctness {
    engine: String,
    /// Whether two runs gave the same texts.
    repeatable: bool,
    /// Whether the same prompts among eight streams gave the same texts.
    same_in_company: bool,
    texts: Vec<String>,
}

pub async fn run(args: &Args) -> Result<Outcome, ProbeError> {
    let mut draft = Draft::new(
        "matrix",
        "how do these engines compare under one client contract?",
        Claim::of(Label::PeerComparison),
    );
    draft.seed = args.seed;
    draft.config = json!({
        "engines": args.engines.iter().map(EngineSpec::name).collect::<Vec<_>>(), "input_len": args.input_len,
        "output_len": args.output_len, "num_prompts": args.num_prompts, "concurrency": args.concurrency,
        "num_warmups": args.num_warmups, "repeats": args.repeats, "temperature": 0, "ignore_eos": true,
    });
    let mut correctness = Vec::new();
    let mut pressure = Vec::new();
    let mut diagnostic = Vec::new();
    let mut failed = Vec::new();
    let mut trace_pass = BTreeMap::new();
    for spec in &args.engines {
        let running = match Running::open(spec, Duration::from_secs(args.ready_timeout)).await {
            Ok(running) => running,
            Err(reason) => {
                failed.push(FailedSetup { engine: spec.name().into(), reason });
                continue;
            }
        };
        let bench = Bench { args, name: spec.name(), server: &running.server, model: &running.model };
        bench.warm().await;
        correctness.push(bench.correctness().await);
        for &concurrency in &args.concurrency {
            pressure.push(bench.measure(concurrency, "distinct").await);
            diagnostic.push(bench.measure(concurrency, "same").await);
        }
        trace_pass.insert(spec.name().to_string(), bench.trace_pass().await);
    }
    draft.check(
        "an_engine_started",
        !correctness.is_empty(),
        format!("{} of {}", correctness.len(), args.engines.len()),
    );
    for row in &pressure {
        let name = format!("{}_c{}", row.engine, row.concurrency);
        draft.check(&format!("completed_{name}"), row.passed, format!("{} repeats, {}", row.repeats.len(), row.noise));
        let tok_s: Vec<f64> = row.repeats.iter().map(|r| r.tok_s).collect();
        draft.repeated(&format!("tok_s_{name}"), &tok_s, "tok/s", args.num_prompts as u64, None);
        let tpot: Vec<f64> = row.repeats.iter().map(|r| r.tpot_ms.p50).collect();
        draft.repeated(&format!("tpot_ms_{name}_p50"), &tpot, "ms", args.num_prompts as u64, None);
    }
    for row in &correctness {
        draft.check(
            &format!("repeatable_{}", row.engine),
            row.repeatable,
            format!("in company: {}", row.same_in_company),
        );
    }
    draft.canary(missing_engine_canary().await);
    draft.detail("correctness", &correctness);
    draft.detail("agreement", agreement(&correctness));
    draft.detail("http_concurrency_pressure", &pressure);
    draft.detail("direct_diagnostic_batch", &diagnostic);
    draft.detail("trace_pass", &trace_pass);
    draft.detail("failed_setup_rows", &failed);
    Ok(Outcome::Evidence(Box::new(draft.finish())))
}

/// An engine that cannot start must become a row.
async fn missing_engine_canary() -> Canary {
    let spec: EngineSpec = "absent=exec ./no-such-engine --port {port}".parse().expect("it has a name and a command");
    let caught = Running::open(&spec, Duration::from_secs(10)).await.is_err();
    Canary::planted("an engine that does not start", caught)
}

/// For each pair of engines: how many prompts they answered with the same text.
fn agreement(rows: &[Correctness]) -> Value {
    let mut pairs = Vec::new();
    for (at, a) in rows.iter().enumerate() {
        for b in &rows[at + 1..] {
            let same = a.texts.iter().zip(&b.texts).filter(|(a, b)| a == b).count();
            pairs.push(json!({"engines": [a.engine, b.engine], "same_texts": same, "prompts": a.texts.len()}));
        }
    }
    Value::Array(pairs)
}

struct Bench<'a> {
    args: &'a Args,
    name: &'a str,
    server: &'a Server,
    model: &'a str,
}

impl Bench<'_> {
    fn request(&self, prompt: u64, output_len: usize) -> LoadRequest {
        let seed = scatter(self.args.seed ^ prompt);
        let body = completion_body(self.model, &prompt_ids(seed, self.args.input_len), output_len);
        LoadRequest { id: String::new(), body, leave: Leave::Never }
    }

    async fn load(&self, requests: &[LoadRequest], concurrency: usize) -> load::LoadResult {
        let timeout = Duration::from_secs_f64(self.args.timeout);
        load::run(self.server, requests, Arrivals::Closed(concurrency), timeout).await
    }

    async fn warm(&self) {
        let requests: Vec<LoadRequest> =
            (0..self.args.num_warmups as u64).map(|n| self.request(1 << 40 | n, self.args.output_len)).collect();
        self.load(&requests, self.args.num_warmups.max(1)).await;
    }

    async fn correctness(&self) -> Correctness {
        let prompts: Vec<LoadRequest> =
            (0..self.args.num_prompts.min(8) as u64).map(|n| self.request(n, self.args.output_len)).collect();
        let texts = |result: load::LoadResult| result.completions.into_iter().map(|c| c.text).collect::<Vec<String>>();
        let alone = texts(self.load(&prompts, 1).await);
        let again = texts(self.load(&prompts, 1).await);
        let company = texts(self.load(&prompts, 8).await);
        Correctness {
            engine: self.name.into(),
            repeatable: alone == again && alone.iter().all(|text| !text.is_empty()),
            same_in_company: alone == company,
            texts: alone,
        }
    }

    async fn measure(&self, concurrency: usize, rows: &'static str) -> Row {
        let mut repeats = Vec::new();
        let mut passed = true;
        for repeat in 0..self.args.repeats as u64 {
            let requests: Vec<LoadRequest> = (0..self.args.num_prompts as u64)
                .map(|n| self.request(if rows == "same" { 0 } else { (repeat + 1) << 20 | n }, self.args.output_len))
                .collect();
            let result = self.load(&requests, concurrency).await;
            let whole = |c: &crate::client::Completion| {
                c.outcome == Seen::Completed && c.completion_tokens == self.args.output_len as u64
            };
            passed &= result.completions.iter().all(whole);
            repeats.push(result.summary());
        }
        let tok_s = Summary::of(&repeats.iter().map(|r| r.tok_s).collect::<Vec<_>>());
        let middle = |of: fn(&LoadSummary) -> f64| Summary::of(&repeats.iter().map(of).collect::<Vec<_>>()).p50;
        Row {
            engine: self.name.into(),
            concurrency,
            rows,
            tok_s,
            ttft_ms_p50: middle(|r| r.ttft_ms.p50),
            tpot_ms_p50: middle(|r| r.tpot_ms.p50),
            itl_ms_p99: middle(|r| r.itl_ms.p99),
            noise: match repeats.len() {
                0 | 1 => "insufficient_repeats",
                _ if (tok_s.max - tok_s.min) / tok_s.p50.max(f64::MIN_POSITIVE) > STABLE_SPREAD => "noisy",
                _ => "stable",
            },
            passed,
            repeats,
        }
    }

    /// Share of requests that the engine can show a trace of; null for engines without traces.
    async fn trace_pass(&self) -> Value {
        let deadline = Instant::now() + Duration::from_secs(30);
        let ids: Vec<String> = (0..8).map(|n| format!("matrix-{}-{n}", std::process::id())).collect();
        let requests: Vec<LoadRequest> =
            ids.iter().enumerate().map(|(n, id)| LoadRequest { id: id.clone(), ..self.request(n as u64, 4) }).collect();
        self.load(&requests, 4).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        let Ok(answer) = self.server.get("/debug/traces", deadline).await else { return Value::Null };
        let (true, Ok(Value::Array(traces))) = (answer.status == 200, answer.json()) else { return Value::Null };
        let traced = ids.iter().filter(|id| traces.iter().any(|trace| trace["request_id"] == ***id)).count();
        json!({"requests": ids.len(), "traced": traced})
    }
}
