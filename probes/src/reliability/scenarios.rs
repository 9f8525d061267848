//! Scenarios of a few clients: leaving at different times, asking for nonsense, and a server that is stopped and started.

use super::{Bench, Report};
use crate::cli::ProbeError;
use crate::client::{Close, Completion, Leave, Outcome};
use crate::load::LoadRequest;
use bytes::Bytes;
use serde_json::{Value, json};
use std::time::Duration;

fn ids(requests: &[LoadRequest]) -> Vec<String> {
    requests.iter().map(|request| request.id.clone()).collect()
}

/// One leaves after its first token, one before it, one is cancelled by the endpoint, one stays.
pub async fn cancel_disconnect(bench: &Bench<'_>) -> Result<Report, ProbeError> {
    const NAME: &str = "cancel_disconnect";
    let mut report = Report::new(NAME);
    let long_prompt = bench.target.max_model_len - 600;
    let requests = [
        bench.request(NAME, 0, 8, 400, Leave::AfterTokens(1)),
        bench.request(NAME, 1, long_prompt, 400, Leave::After(Duration::from_millis(2))),
        bench.request(NAME, 2, 8, 24, Leave::Never),
        bench.request(NAME, 3, 8, bench.target.max_model_len - 16, Leave::Never),
    ];
    let cancel = async {
        let path = format!("/v1/requests/{}/cancel", requests[3].id);
        let running = bench.wait_for(Duration::from_secs(2), |s| s.sum("vllm:num_requests_running", &[]) >= 1.0).await;
        let mut status = 0;
        // The request may not have been read yet: it is unknown (404) until it was.
        for _ in 0..200 {
            let answer = bench.target.server.post(&path, &json!({}), bench.deadline()).await;
            status = answer.map_or(0, |answer| answer.status.as_u16());
            if status != 404 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        (running, status)
    };
    let (mut seen, (_, status)) = tokio::join!(bench.all_at_once(&requests), cancel);
    report.expect(status == 202, format!("the cancel endpoint answered {status}"));
    let cancelled = seen.pop().expect("four requests were sent");
    report.expect(
        cancelled.outcome != Outcome::Timeout && cancelled.latency() < Duration::from_secs(5),
        format!("the cancelled stream ended with {:?} after {:?}", cancelled.outcome, cancelled.latency()),
    );
    report.expect(seen[2].outcome == Outcome::Completed, format!("the neighbour: {:?}", seen[2].error));
    let report = bench.finish(report, &seen, &ids(&requests)).await?;
    Ok(with_least(report, &[("completed", 1), ("cancelled", 2), ("disconnected", 1)]))
}

/// Fails a report whose counts are below what the scenario is about.
fn with_least(mut report: Report, least: &[(&str, usize)]) -> Report {
    for &(kind, least) in least {
        let count = match kind {
            "completed" => report.counts.completed,
            "cancelled" => report.counts.cancelled,
            "disconnected" => report.counts.disconnected,
            _ => report.counts.rejected,
        };
        report.expect(count >= least, format!("{count} {kind}, at least {least} wanted"));
    }
    report.passed = report.failures.is_empty();
    report
}

/// Bodies that must be refused, with status and the field that they must name.
fn refused(bench: &Bench<'_>) -> Vec<(Value, u16, &'static str)> {
    let with = |change: &[(&str, Value)]| {
        let mut body = json!({"model": bench.target.model, "prompt": "hi", "max_tokens": 4});
        for (key, value) in change {
            body[*key] = value.clone();
        }
        body
    };
    let over = bench.target.max_model_len + 1;
    vec![
        (with(&[("temperature", json!(9))]), 400, "temperature"),
        (with(&[("logprobs", json!(6))]), 400, "logprobs"),
        (with(&[("prompt", json!([]))]), 400, "prompt"),
        (with(&[("prompt", json!([-1]))]), 400, "prompt"),
        (with(&[("prompt", json!(vec![20; over]))]), 400, "prompt"),
        (with(&[("prompt", json!(vec![20; over])), ("stream", json!(true))]), 400, "prompt"),
        (with(&[("max_tokens", json!(-1))]), 400, "max_tokens"),
        (with(&[("n", json!(0))]), 400, "n"),
        (with(&[("top_p", json!(1.5))]), 400, "top_p"),
        (with(&[("stop", json!(["a", "b", "c", "d", "e"]))]), 400, "stop"),
        (with(&[("logit_bias", json!({"x": 1}))]), 400, "logit_bias"),
        (with(&[("model", json!("no-such-model"))]), 404, "model"),
    ]
}

/// Every refusal is well formed and leaves its neighbour's bytes alone.
pub async fn invalid_requests(bench: &Bench<'_>) -> Result<Report, ProbeError> {
    const NAME: &str = "invalid_requests";
    let mut report = Report::new(NAME);
    let prompts_before = bench.scrape().await?.sum("vllm:prompt_tokens_total", &[]);
    let mut neighbours = Vec::new();
    let mut rejected = 0;
    for (number, (body, status, field)) in refused(bench).into_iter().enumerate() {
        let bad = bench.target.server.post("/v1/completions", &body, bench.deadline());
        let name = format!("{NAME}-{number}");
        let (neighbour, answer) = tokio::join!(bench.canary(&name), bad);
        match answer {
            Ok(answer) => {
                let param = answer.json().map(|body| body["error"]["param"].clone()).unwrap_or_default();
                let named = param.as_str().is_some_and(|param| param.starts_with(field));
                let proper = answer.status == status && answer.is_error_envelope() && named;
                report.expect(proper, format!("{field}: {} {}", answer.status, answer.text()));
                rejected += usize::from(proper);
            }
            Err(error) => report.expect(false, format!("{field}: {error}")),
        }
        neighbours.push(neighbour);
    }
    let asked: Vec<&Completion> = neighbours.iter().collect();
    bench.expect_one_answer(&mut report, "neighbour", &asked);
    let prefilled = bench.scrape().await?.sum("vllm:prompt_tokens_total", &[]) - prompts_before;
    let owed: u64 = neighbours.iter().map(|c| c.prompt_tokens).sum();
    report.expect(
        prefilled == owed as f64,
        format!("{prefilled} prompt tokens were prefilled, {owed} belong to neighbours"),
    );
    let traced: Vec<String> = neighbours.iter().map(|c| c.request_id.clone()).collect();
    let mut report = bench.finish(report, &neighbours, &traced).await?;
    report.counts.rejected += rejected;
    Ok(with_least(report, &[("completed", 1), ("rejected", 1)]))
}

/// Short and long answers, a cancel and a refusal at once.
pub async fn mixed(bench: &Bench<'_>) -> Result<Report, ProbeError> {
    const NAME: &str = "mixed_short_long_with_failures";
    let mut report = Report::new(NAME);
    let mut requests: Vec<LoadRequest> = (0..6)
        .map(|number| match number {
            0 | 1 => bench.request(NAME, number, 16, 16, Leave::Never),
            2 | 3 => bench.request(NAME, number, bench.target.max_model_len / 2, 64, Leave::Never),
            4 => bench.request(NAME, number, 16, 400, Leave::AfterTokens(3)),
            _ => bench.request(NAME, number, 16, 16, Leave::Never),
        })
        .collect();
    requests[1].body = requests[0].body.clone();
    requests[5].body["temperature"] = json!(-1);
    let seen = bench.all_at_once(&requests).await;
    bench.expect_one_answer(&mut report, "short", &[&seen[0], &seen[1]]);
    let report = bench.finish(report, &seen, &ids(&requests[..5])).await?;
    let mut report = with_least(report, &[("completed", 4), ("cancelled", 1), ("rejected", 1)]);
    let active = report.trace_maxima.get("active_set_size_max").copied().unwrap_or(0);
    report.expect(active >= 2, format!("at most {active} were active at once"));
    report.passed = report.failures.is_empty();
    Ok(report)
}

/// Bodies that are not even requests, many of them, on few connections.
pub async fn malformed_flood(bench: &Bench<'_>) -> Result<Report, ProbeError> {
    const NAME: &str = "malformed_flood";
    let mut report = Report::new(NAME);
    let deep = format!("{}{}", "[".repeat(20_000), "]".repeat(20_000));
    let model = &bench.target.model;
    let bodies: Vec<Bytes> = vec![
        Bytes::from_static(b""),
        Bytes::from_static(b"null"),
        Bytes::from_static(b"{\"model\":"),
        Bytes::from_static(b"{\"model\":\"\xff\",\"prompt\":\"x\"}"),
        Bytes::from(format!("{{\"model\":\"{model}\",\"prompt\":\"x\"}} trailing")),
        Bytes::from(format!("{{\"model\":\"{model}\",\"prompt\":\"\\ud83d\"}}")),
        Bytes::from(format!("{{\"model\":\"{model}\",\"prompt\":{deep}}}")),
        Bytes::from(format!("{{\"model\":\"{model}\",\"prompt\":\"x\",\"temperature\":NaN}}")),
    ];
    let mut refused = 0;
    for round in 0..32 {
        let connected = bench.target.server.connect(Close::Orderly, bench.deadline()).await;
        let Ok(mut connection) = connected else {
            report.expect(false, format!("round {round}: no connection"));
            break;
        };
        for (number, body) in bodies.iter().enumerate() {
            match connection.post_bytes("/v1/completions", body.clone(), &[], bench.deadline()).await {
                Ok(answer) => {
                    let proper = answer.status == 400 && answer.is_error_envelope();
                    report.expect(proper, format!("body {number}: {} {}", answer.status, answer.text()));
                    refused += usize::from(proper);
                }
                Err(error) => report.expect(false, format!("body {number} of round {round}: {error}")),
            }
        }
    }
    report.counts.rejected = refused;
    report.detail("refused", refused);
    let lines = bench.target.log().lines().count();
    report.detail("log_lines", lines);
    bench.finish(report, &[], &[]).await
}

/// SIGTERM under load lets streams end, the process leaves with 0, and a new one answers the same bytes.
pub async fn engine_restart(bench: &mut Bench<'_>) -> Result<Report, ProbeError> {
    const NAME: &str = "engine_restart";
    let mut report = Report::new(NAME);
    let requests: Vec<LoadRequest> = (0..4).map(|number| bench.request(NAME, number, 16, 200, Leave::Never)).collect();
    let server = bench.target.server.clone();
    let timeout = bench.timeout();
    let streams = {
        let requests = requests.clone();
        tokio::spawn(async move {
            crate::load::run(&server, &requests, crate::load::Arrivals::Closed(4), timeout).await.completions
        })
    };
    let all = bench.wait_for(Duration::from_secs(5), |s| s.sum("vllm:num_requests_running", &[]) >= 4.0).await;
    report.expect(all.is_some(), "the streams did not start");
    let code = bench.target.terminate(Duration::from_secs(40)).await;
    report.expect(code == Some(0), format!("after SIGTERM the server left with {code:?}"));
    let seen = streams.await.expect("a client task does not panic");
    let cut = seen.iter().filter(|c| c.outcome != Outcome::Completed).count();
    report.expect(
        cut == 0,
        format!("{cut} streams were cut by the drain: {:?}", seen.iter().find_map(|c| c.error.clone())),
    );
    report.detail("drained", seen.len() - cut);

    let canary = bench.canary.clone();
    let fresh = Bench::open(bench.args, &[]).await?;
    report.expect(fresh.canary == canary, "the new process answers the canary differently");
    *bench = fresh;
    bench.finish(report, &[], &[]).await
}
