//! Scenarios of many clients that reset at once, and of one that does not read.

use super::{Bench, Report};
use crate::cli::ProbeError;
use crate::client::{Close, Leave, Outcome};
use crate::load::LoadRequest;
use crate::scrape::Baseline;
use crate::stats::{Summary, median};
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
pub async fn reset_storm(bench: &Bench<'_>) -> Result<Report, ProbeError> {
    const NAME: &str = "reset_storm";
    let mut report = Report::new(NAME);
    let clients = bench.args.storm;
    let before = ttfts(bench, "storm-before", 20).await;
    let requests: Vec<LoadRequest> =
        (0..clients).map(|number| bench.request(NAME, number, 8, 1000, Leave::Never)).collect();
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
    let all = bench.wait_for(Duration::from_secs(20), |s| live(s) >= clients as f64).await;
    report.expect(all.is_some(), format!("{clients} clients were never live at once"));
    let reset = Instant::now();
    storm.shutdown().await;
    let sent = reset.elapsed();
    let limit = Duration::from_secs(5);
    let quiet = Baseline::wait_quiet(&bench.target.server, bench.target.pid(), &bench.quiet, limit).await;
    let collapse = quiet.map(|_| (reset.elapsed().as_secs_f64()) * 1e3);
    report.detail("resets_sent_ms", sent.as_secs_f64() * 1e3);
    match collapse {
        Ok(collapse) => {
            report.detail("collapse_ms", collapse);
            let limit = bench.args.collapse_ms;
            report.expect(collapse <= limit, format!("quiet {collapse:.0} ms after the reset, at most {limit} wanted"));
        }
        Err(last) => report.expect(false, format!("not quiet {limit:?} after the reset: {last:?}")),
    }
    let after = ttfts(bench, "storm-after", 20).await;
    let (was, is) = (median(&before), median(&after));
    report.detail("ttft_ms_p50_before", was);
    report.detail("ttft_ms_p50_after", is);
    let allowed = was + (0.2 * was).max(3.0);
    report.expect(before.len() == 20 && after.len() == 20, "a request around the storm had no token");
    report.expect(is <= allowed, format!("median TTFT {is:.2} ms after the storm, {was:.2} before"));
    let traced: Vec<String> = requests.into_iter().map(|request| request.id).collect();
    bench.finish(report, &[], &traced).await
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
    let (with, without) = (gaps(&beside), gaps(&alone));
    report.detail("itl_ms_p50_with", with.p50);
    report.detail("itl_ms_p50_without", without.p50);
    report.expect(
        with.p50 <= 1.2 * without.p50 + 1.0,
        format!("ITL {:.2} ms beside it, {:.2} without", with.p50, without.p50),
    );
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
    let mut report = bench.finish(report, &seen, &traced).await?;
    let traces = bench.target.traces().await?;
    let reason = traces.get(&stalled.id).and_then(|t| t[0].get("terminal_reason")).and_then(Value::as_str);
    let agrees =
        if complete { reason.is_some_and(|r| r.starts_with("completed")) } else { reason == Some("cancelled") };
    report.expect(agrees, format!("the stream was complete: {complete}, its trace says {reason:?}"));
    let done = seen.iter().filter(|c| c.outcome == Outcome::Completed).count();
    report.expect(done == 2 * NEIGHBOURS + 1, format!("{done} neighbours completed"));
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
