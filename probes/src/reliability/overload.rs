//! Scenarios of more work than there are seats: the queue's bound, and clients that leave before they are served.

use super::{Bench, Report};
use crate::cli::ProbeError;
use crate::client::{Close, Leave, Outcome};
use crate::load::{Arrivals, LoadRequest, run};
use serde_json::Value;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// Streams that hold every seat until the scenario is over.
struct Holders {
    ids: Vec<String>,
    task: JoinHandle<Vec<crate::client::Completion>>,
}

impl Holders {
    /// Fills every seat; returns once all are taken and every prompt of theirs is behind them.
    async fn seat(bench: &Bench<'_>, name: &str) -> Result<Holders, ProbeError> {
        const PROMPT: usize = 8;
        let tokens = bench.target.max_model_len - 32;
        let requests: Vec<LoadRequest> = (0..bench.slots)
            .map(|number| bench.request(&format!("{name}-holder"), number, PROMPT, tokens, Leave::Never))
            .collect();
        let prefilled = bench.scrape().await?.sum("vllm:prompt_tokens_total", &[]) + (PROMPT * bench.slots) as f64;
        let ids = requests.iter().map(|request| request.id.clone()).collect();
        let (server, timeout, slots) = (bench.target.server.clone(), bench.timeout(), bench.slots);
        let task =
            tokio::spawn(async move { run(&server, &requests, Arrivals::Closed(slots), timeout).await.completions });
        let full = |scrape: &crate::scrape::Scrape| {
            scrape.sum("vllm:num_requests_running", &[]) == slots as f64
                && scrape.sum("vllm:prompt_tokens_total", &[]) >= prefilled
        };
        match bench.wait_for(Duration::from_secs(10), full).await {
            Some(_) => Ok(Holders { ids, task }),
            None => Err(ProbeError::Failed(format!("{name}: {slots} streams did not fill {slots} seats"))),
        }
    }

    /// Cancels them all through the endpoint.
    async fn release(self, bench: &Bench<'_>) -> Vec<String> {
        for id in &self.ids {
            let path = format!("/v1/requests/{id}/cancel");
            // One that ended by itself meanwhile answers 404 or 409.
            let _ = bench.target.server.post(&path, &Value::Null, bench.deadline()).await;
        }
        let _ = self.task.await;
        self.ids
    }
}

/// With every seat and every place in the queue taken, the next requests get 429 at once; all that were accepted complete.
pub async fn active_cap(bench: &Bench<'_>) -> Result<Report, ProbeError> {
    const NAME: &str = "overload_active_cap";
    const EXTRA: usize = 50;
    let mut report = Report::new(NAME);
    let queue = bench.args.max_queue;
    let holders = Holders::seat(bench, NAME).await?;
    let queued: Vec<LoadRequest> = (0..queue).map(|number| bench.request(NAME, number, 4, 2, Leave::Never)).collect();
    let (server, timeout) = (bench.target.server.clone(), bench.timeout());
    let waiting = {
        let queued = queued.clone();
        tokio::spawn(async move { run(&server, &queued, Arrivals::Closed(queued.len()), timeout).await.completions })
    };
    let full =
        bench.wait_for(Duration::from_secs(20), |s| s.sum("vllm:num_requests_waiting", &[]) == queue as f64).await;
    report.expect(full.is_some(), format!("the queue never held {queue}"));

    let mut slowest = Duration::ZERO;
    let mut refused = 0;
    for number in 0..EXTRA {
        let mut body = bench.request(NAME, queue + number, 4, 2, Leave::Never).body;
        body["stream"] = (number % 2 == 0).into();
        if number % 2 == 1 {
            body.as_object_mut().expect("a body is an object").remove("stream_options");
        }
        let Ok(mut connection) = bench.target.server.connect(Close::Orderly, bench.deadline()).await else {
            report.expect(false, "no connection while the queue is full");
            continue;
        };
        let sent = Instant::now();
        match connection.post("/v1/completions", &body, bench.deadline()).await {
            Ok(answer) => {
                slowest = slowest.max(sent.elapsed());
                let retry = answer.headers.get("retry-after").and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
                let proper =
                    answer.status == 429 && answer.is_error_envelope() && retry.is_some_and(|after| after >= 1);
                report.expect(proper, format!("over the limit: {} {}", answer.status, answer.text()));
                refused += usize::from(proper);
            }
            Err(error) => report.expect(false, format!("over the limit: {error}")),
        }
    }
    report.expect(refused == EXTRA, format!("{refused} of {EXTRA} were refused"));
    report.expect(slowest <= Duration::from_millis(100), format!("the slowest 429 took {slowest:?}"));
    report.detail("slowest_429_ms", slowest.as_secs_f64() * 1e3);
    let health = Instant::now();
    let healthy = bench.target.server.get("/health", bench.deadline()).await.is_ok_and(|answer| answer.status == 200);
    report.expect(healthy && health.elapsed() < Duration::from_millis(100), "/health suffers from the load");

    let mut traced = holders.release(bench).await;
    let seen = waiting.await.expect("a client task does not panic");
    let completed = seen.iter().filter(|c| c.outcome == Outcome::Completed).count();
    report.expect(completed == queue, format!("{completed} of {queue} accepted requests completed"));
    traced.extend(queued.into_iter().map(|request| request.id));
    let mut report = bench.finish(report, &seen, &traced).await?;
    report.counts.rejected += refused;
    let pending = report.trace_maxima.get("pending_queue_size_max").copied().unwrap_or(0);
    report.expect(pending >= 1, "no trace saw a queue");
    report.passed = report.failures.is_empty();
    Ok(report)
}

/// Queued clients that leave go at once, while all seats are busy, and are never prefilled.
pub async fn cancel_while_queued(bench: &Bench<'_>) -> Result<Report, ProbeError> {
    const NAME: &str = "cancel_while_queued";
    const LEAVERS: usize = 20;
    let mut report = Report::new(NAME);
    let holders = Holders::seat(bench, NAME).await?;
    let before = bench.scrape().await?.sum("vllm:prompt_tokens_total", &[]);
    let requests: Vec<LoadRequest> =
        (0..LEAVERS).map(|number| bench.request(NAME, number, 200, 16, Leave::Never)).collect();
    let (server, timeout) = (bench.target.server.clone(), bench.timeout());
    let mut clients = tokio::task::JoinSet::new();
    for request in requests.clone() {
        let server = server.clone();
        clients.spawn(async move {
            let deadline = Instant::now() + timeout;
            if let Ok(mut connection) = server.connect(Close::Reset, deadline).await {
                connection.completion(&request.body, &request.id, Leave::Never, deadline).await;
            }
        });
    }
    let queued =
        bench.wait_for(Duration::from_secs(5), |s| s.sum("vllm:num_requests_waiting", &[]) == LEAVERS as f64).await;
    report.expect(queued.is_some(), format!("{LEAVERS} requests did not queue"));
    clients.shutdown().await;
    let slots = bench.slots as f64;
    let gone = bench
        .wait_for(Duration::from_secs(1), |s| {
            s.sum("vllm:num_requests_waiting", &[]) == 0.0 && s.sum("vllm:num_requests_running", &[]) == slots
        })
        .await;
    report.expect(gone.is_some(), "they did not leave the queue within a second while every seat was busy");
    report.detail("collapse_ms", gone.map_or(-1.0, |took| took.as_secs_f64() * 1e3));
    let mut traced: Vec<String> = holders.release(bench).await;
    let prefilled = bench.scrape().await?.sum("vllm:prompt_tokens_total", &[]) - before;
    report.expect(prefilled == 0.0, format!("{prefilled} prompt tokens of clients that had left were prefilled"));
    traced.extend(requests.into_iter().map(|request| request.id));
    let mut report = bench.finish(report, &[], &traced).await?;
    let disconnected = report.counts.disconnected;
    report.expect(disconnected == LEAVERS, format!("{disconnected} of {LEAVERS} traces say disconnected"));
    report.passed = report.failures.is_empty();
    Ok(report)
}

/// A client that leaves while its long prompt is prefilled stops the prefill.
pub async fn cancel_mid_prefill(bench: &Bench<'_>) -> Result<Report, ProbeError> {
    const NAME: &str = "cancel_mid_prefill";
    const ROUNDS: usize = 5;
    let mut report = Report::new(NAME);
    let prompt = bench.target.max_model_len - 64;
    // How long the whole prompt takes here and now; they leave after a quarter of that.
    let whole = bench.all_at_once(&[bench.request("whole-prompt", 0, prompt, 1, Leave::Never)]).await.remove(0);
    let stay = whole.ttft().unwrap_or_default() / 4;
    report.detail("whole_prompt_ms", whole.ttft().unwrap_or_default().as_secs_f64() * 1e3);
    let mut traced = Vec::new();
    let before = bench.scrape().await?.sum("vllm:prompt_tokens_total", &[]);
    for round in 0..ROUNDS {
        let request = bench.request(NAME, round, prompt, 8, Leave::After(stay));
        traced.push(request.id.clone());
        bench.all_at_once(&[request]).await;
        let quiet = bench.wait_for(Duration::from_secs(2), |s| s.sum("vllm:num_requests_running", &[]) == 0.0).await;
        report.expect(quiet.is_some(), format!("round {round}: still running after two seconds"));
    }
    let prefilled = bench.scrape().await?.sum("vllm:prompt_tokens_total", &[]) - before;
    let whole = (ROUNDS * prompt) as f64;
    report.expect(prefilled < whole, format!("all {whole} prompt tokens were prefilled for clients that had left"));
    report.detail("prefilled_share", prefilled / whole);
    let mut report = bench.finish(report, &[], &traced).await?;
    // On a busy machine a client may come to leave only after its first token.
    let (disconnected, cancelled) = (report.counts.disconnected, report.counts.cancelled);
    report.expect(
        disconnected >= ROUNDS / 2 && disconnected + cancelled == ROUNDS,
        format!("of {ROUNDS} traces {disconnected} say disconnected, {cancelled} cancelled"),
    );
    report.passed = report.failures.is_empty();
    Ok(report)
}
