//! Scenarios of many clients that reset at once, and of one that does not read.

use super::{Bench, Report};
use crate::cli::ProbeError;
use crate::client::{Close, Leave, Outcome};
use crate::load::LoadRequest;
use crate::scrape::Baseline;
use crate::stats::{Summary, median};
use serde::Serialize;
use serde_json::Value;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;

/// Time to first token of one request after another, in milliseconds.
async fn ttfts(bench: &Bench<'_>, name: &str, count: usize) -> Vec<f64> {
    let mut seen = Vec::new();
    for number in 0..count {
        let request = bench.request(name, number, 16, 4, Leave::Never);
        let answer = bench.all_at_once(&[request]).await.remove(0);
        seen.extend(answer.ttft().map(|ttft| ttft.as_secs_f64() * 1e3));
    }
    seen
}

/// A thousand streaming clients reset at once: the server is quiet within the limit and as fast as before.
///
/// What took too long is tried again with a new storm: a busy machine can slow one, a backlog or a leak slows every one.
pub async fn reset_storm(bench: &Bench<'_>) -> Result<Report, ProbeError> {
    const NAME: &str = "reset_storm";
    let mut report = Report::new(NAME);
    let (mut traced, mut rounds) = (Vec::new(), Vec::new());
    for round in 0..usize::from(bench.args.attempts) {
        let storm = storm(bench, round, &mut traced).await?;
        report.expect(storm.all_live, format!("{} clients were never live at once", bench.args.storm));
        let late = storm.late(bench.args.collapse_ms);
        rounds.push(storm);
        match late {
            None => break,
            Some(late) if round + 1 == usize::from(bench.args.attempts) => report.expect(false, late),
            Some(_) => {}
        }
    }
    report.detail("rounds", serde_json::to_value(&rounds).expect("rounds are plain data"));
    bench.finish(report, &[], &traced).await
}

/// One storm and the requests around it.
#[derive(Clone, Debug, Serialize)]
struct Storm {
    all_live: bool,
    /// From the first reset until all were sent: the clients' own work.
    resets_sent_ms: f64,
    /// From the last reset to a server that was seen quiet; None if it never was.
    collapse_ms: Option<f64>,
    /// Medians of 20 requests, one after the other.
    ttft_ms_p50_before: f64,
    ttft_ms_p50_after: f64,
    /// Answers that those medians are of.
    answered: usize,
}

impl Storm {
    /// What took too long, if anything did.
    fn late(&self, limit_ms: f64) -> Option<String> {
        let (was, is) = (self.ttft_ms_p50_before, self.ttft_ms_p50_after);
        match self.collapse_ms {
            None => Some("never quiet after the reset".into()),
            Some(took) if took > limit_ms => {
                Some(format!("quiet {took:.0} ms after the reset, at most {limit_ms} wanted"))
            }
            _ if self.answered != 40 => Some(format!("{} of 40 requests around the storm answered", self.answered)),
            _ if is > was + (0.2 * was).max(3.0) => {
                Some(format!("median TTFT {is:.2} ms after the storm, {was:.2} before"))
            }
            _ => None,
        }
    }
}

async fn storm(bench: &Bench<'_>, round: usize, traced: &mut Vec<String>) -> Result<Storm, ProbeError> {
    let clients = bench.args.storm;
    let before = ttfts(bench, &format!("storm-before{round}"), 20).await;
    let tokens = bench.target.max_model_len - 16;
    let name = format!("reset_storm{round}");
    let requests: Vec<LoadRequest> =
        (0..clients).map(|number| bench.request(&name, number, 8, tokens, Leave::Never)).collect();
    let mut storm = tokio::task::JoinSet::new();
    let deadline = bench.deadline();
    for request in requests.clone() {
        let server = bench.target.server.clone();
        storm.spawn(async move {
            if let Ok(mut connection) = server.connect(Close::Reset, deadline).await {
                connection.completion(&request.body, &request.id, Leave::Never, deadline).await;
            }
        });
    }
    let live =
        |s: &crate::scrape::Scrape| s.sum("vllm:num_requests_running", &[]) + s.sum("vllm:num_requests_waiting", &[]);
    let all_live = bench.wait_for(bench.timeout(), |s| live(s) >= clients as f64).await.is_some();
    let reset = Instant::now();
    storm.shutdown().await;
    let sent = reset.elapsed();
    let limit = Duration::from_secs(5);
    let quiet = Baseline::wait_quiet(&bench.target.server, bench.target.pid(), &bench.quiet, limit).await;
    let collapse = reset.elapsed() - sent;
    let after = ttfts(bench, &format!("storm-after{round}"), 20).await;
    traced.extend(requests.into_iter().map(|request| request.id));
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    Ok(Storm {
        all_live,
        resets_sent_ms: ms(sent),
        collapse_ms: quiet.ok().map(|_| ms(collapse)),
        ttft_ms_p50_before: median(&before),
        ttft_ms_p50_after: median(&after),
        answered: before.len() + after.len(),
    })
}

/// A client that never reads is bounded and cut; its neighbours keep their pace.
pub async fn slow_reader(bench: &Bench<'_>) -> Result<Report, ProbeError> {
    const NAME: &str = "slow_reader";
    const NEIGHBOURS: usize = 7;
    let mut report = Report::new(NAME);
    let neighbours = |round: usize| -> Vec<LoadRequest> {
        (0..NEIGHBOURS).map(|n| bench.request(&format!("{NAME}-{round}"), n, 16, 512, Leave::Never)).collect()
    };
    let gaps = |seen: &[crate::client::Completion]| -> Summary {
        let gaps: Vec<f64> = seen.iter().flat_map(|c| c.gaps()).map(|gap| gap.as_secs_f64() * 1e3).collect();
        Summary::of(&gaps)
    };
    // Eight streams either way, so that both runs have the same batch; only in one of them somebody does not read.
    let reader = bench.request(NAME, 0, 16, 512, Leave::Never);
    let mut plain = neighbours(0);
    plain.push(reader.clone());
    let alone = bench.all_at_once(&plain).await;
    let rss_before = bench.target.baseline().await?.rss_bytes;

    let stalled = bench.request(NAME, 1, 16, bench.target.max_model_len - 32, Leave::Never);
    let mut socket = open_stalled(bench, &stalled).await?;
    let beside = bench.all_at_once(&neighbours(1)).await;
    let rss_after = bench.target.baseline().await?.rss_bytes;
    let (with, without) = (gaps(&beside).p50, gaps(&alone).p50);
    let keeps_pace = |without: f64| with <= 1.2 * without + 1.0;
    report.detail("itl_ms_p50_with", with);
    report.detail("itl_ms_p50_without", without);
    let grown = rss_after.saturating_sub(rss_before);
    report.detail("rss_growth_bytes", grown);
    report.expect(grown < 8 << 20, format!("{grown} bytes more for one stalled client"));

    // It now reads: the whole stream in order, or a connection that was closed; never a stream with a hole.
    let mut text = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(40), socket.read_to_end(&mut text)).await;
    let text = String::from_utf8_lossy(&text);
    let complete = text.contains("data: [DONE]");
    report.detail("stalled_stream", if complete { "complete" } else { "closed" });
    report.expect(read.is_ok(), "the stalled stream neither ended nor was closed");
    let mut traced: Vec<String> = plain.iter().map(|request| request.id.clone()).collect();
    traced.extend(neighbours(1).into_iter().map(|request| request.id));
    traced.push(stalled.id.clone());
    let mut seen = alone;
    seen.extend(beside);
    if !keeps_pace(without) {
        // Slow beside it, or slow by now? The same streams without it tell a bad neighbour from a busy machine.
        let mut plain = neighbours(2);
        plain.push(bench.request(NAME, 2, 16, 512, Leave::Never));
        let again = bench.all_at_once(&plain).await;
        let without_again = gaps(&again).p50;
        report.detail("itl_ms_p50_without_again", without_again);
        report.expect(
            keeps_pace(without_again),
            format!("ITL {with:.2} ms beside it, {without:.2} before and {without_again:.2} after without"),
        );
        traced.extend(plain.into_iter().map(|request| request.id));
        seen.extend(again);
    }
    let asked = seen.len();
    let mut report = bench.finish(report, &seen, &traced).await?;
    let traces = bench.target.traces().await?;
    let reason = traces.get(&stalled.id).and_then(|t| t[0].get("terminal_reason")).and_then(Value::as_str);
    let agrees =
        if complete { reason.is_some_and(|r| r.starts_with("completed")) } else { reason == Some("cancelled") };
    report.expect(agrees, format!("the stream was complete: {complete}, its trace says {reason:?}"));
    let done = seen.iter().filter(|c| c.outcome == Outcome::Completed).count();
    report.expect(done == asked, format!("{done} of {asked} neighbours completed"));
    report.passed = report.failures.is_empty();
    Ok(report)
}

/// A request on a socket with a small receive buffer that nobody reads.
async fn open_stalled(bench: &Bench<'_>, request: &LoadRequest) -> Result<tokio::net::TcpStream, ProbeError> {
    let error = |e: std::io::Error| ProbeError::Failed(e.to_string());
    let url = bench.target.server.url();
    let address =
        url.trim_start_matches("http://").parse().map_err(|e| ProbeError::Usage(format!("--url {url}: {e}")))?;
    let socket = TcpSocket::new_v4().map_err(error)?;
    socket.set_recv_buffer_size(4096).map_err(error)?;
    let mut stream = socket.connect(address).await.map_err(error)?;
    let body = request.body.to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: slow\r\ncontent-type: application/json\r\nconnection: close\r\n\
         x-request-id: {}\r\n{}content-length: {}\r\n\r\n",
        request.id,
        bench.args.target.api_key.as_ref().map(|key| format!("authorization: Bearer {key}\r\n")).unwrap_or_default(),
        body.len()
    );
    stream.write_all(head.as_bytes()).await.map_err(error)?;
    stream.write_all(body.as_bytes()).await.map_err(error)?;
    Ok(stream)
}
