//! A load: requests sent in closed or open loop, and what their clients saw, summed up.
//!
//! Used by bench-http, slo, soak and matrix, which therefore measure alike. **Invariant:** every request has an absolute deadline and
//! an outcome; a time between tokens is only reported where each event carried exactly one token.

use crate::client::{Close, Completion, Leave, Outcome, Server};
use crate::manifest::hex;
use crate::stats::Summary;
use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// One request of a load.
#[derive(Clone, Debug)]
pub struct LoadRequest {
    pub id: String,
    pub body: Value,
    pub leave: Leave,
}

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// This many clients, each sending its next request when its last one ended.
    Closed(usize),
    /// Independent arrivals at this mean rate a second, from this seed.
    Open { rate: f64, seed: u64 },
}

/// Sends every request; returns what each client saw, in the order of the requests.
pub async fn run(server: &Server, requests: &[LoadRequest], arrivals: Arrivals, timeout: Duration) -> LoadResult {
    let started = Instant::now();
    let shared = Arc::new(requests.to_vec());
    let mut seen: Vec<(usize, Completion)> = Vec::with_capacity(requests.len());
    let mut tasks = tokio::task::JoinSet::new();
    match arrivals {
        Arrivals::Closed(clients) => {
            let next = Arc::new(AtomicUsize::new(0));
            for _ in 0..clients.max(1).min(requests.len().max(1)) {
                let (server, shared, next) = (server.clone(), shared.clone(), next.clone());
                tasks.spawn(async move {
                    let mut mine = Vec::new();
                    let mut connection = None;
                    loop {
                        let at = next.fetch_add(1, Ordering::Relaxed);
                        let Some(request) = shared.get(at) else { return mine };
                        mine.push((at, send(&server, &mut connection, request, timeout).await));
                    }
                });
            }
        }
        Arrivals::Open { rate, seed } => {
            let mut at = started;
            for number in 0..requests.len() {
                let (server, shared) = (server.clone(), shared.clone());
                tasks.spawn(async move {
                    tokio::time::sleep_until(at.into()).await;
                    vec![(number, send(&server, &mut None, &shared[number], timeout).await)]
                });
                at += Duration::from_secs_f64(exponential(seed, number as u64) / rate);
            }
        }
    }
    while let Some(done) = tasks.join_next().await {
        seen.extend(done.expect("a client task does not panic"));
    }
    seen.sort_by_key(|(at, _)| *at);
    LoadResult { wall: started.elapsed(), completions: seen.into_iter().map(|(_, completion)| completion).collect() }
}

/// One request on the client's kept connection, or on a new one.
async fn send(
    server: &Server,
    kept: &mut Option<crate::client::Connection>,
    request: &LoadRequest,
    timeout: Duration,
) -> Completion {
    let deadline = Instant::now() + timeout;
    let close = if request.leave == Leave::Never { Close::Orderly } else { Close::Reset };
    let mut connection = match kept.take().filter(|_| close == Close::Orderly) {
        Some(connection) => connection,
        None => match server.connect(close, deadline).await {
            Ok(connection) => connection,
            Err(error) => return Completion::unsent(error.to_string()),
        },
    };
    let completion = connection.completion(&request.body, &request.id, request.leave, deadline).await;
    if close == Close::Orderly && matches!(completion.outcome, Outcome::Completed | Outcome::Refused) {
        *kept = Some(connection);
    }
    completion
}

/// A draw from the exponential distribution of mean 1.
fn exponential(seed: u64, number: u64) -> f64 {
    let uniform = (scatter(seed ^ scatter(number)) >> 11) as f64 / (1u64 << 53) as f64;
    -(1.0 - uniform).ln()
}

/// splitmix64's step: a fixed scatter of numbers.
pub fn scatter(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// `count` ids of an ordinary prompt, the same for the same seed: past the special ids that tokenizers put first or last.
pub fn prompt_ids(seed: u64, count: usize) -> Vec<u32> {
    (0..count as u64).map(|at| 10 + (scatter(seed.wrapping_mul(0x1_0000_0001) ^ at) % 990) as u32).collect()
}

/// A streamed completion of token ids, EOS not honoured, with usage: the body that every benchmark here sends.
pub fn completion_body(model: &str, prompt: &[u32], max_tokens: usize) -> Value {
    json!({
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true,
        "stream": true, "stream_options": {"include_usage": true},
    })
}

/// What the clients of a load saw.
pub struct LoadResult {
    pub wall: Duration,
    pub completions: Vec<Completion>,
}

/// A load summed up. Times in milliseconds.
#[derive(Clone, Debug, Serialize)]
pub struct LoadSummary {
    pub wall_s: f64,
    pub outcomes: BTreeMap<Outcome, usize>,
    pub qps: f64,
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub tok_s: f64,
    pub ttft_ms: Summary,
    pub tpot_ms: Summary,
    pub itl_ms: Summary,
    pub e2e_ms: Summary,
    /// Completed requests whose events were exactly their tokens: the others have no inter-token times.
    pub token_exact: usize,
    /// How many answers had each text, by a short hash.
    pub output_hashes: BTreeMap<String, usize>,
    /// Over all texts in request order.
    pub combined_output_hash: String,
    /// The first error that a client saw.
    pub first_error: Option<String>,
}

impl LoadResult {
    pub fn summary(&self) -> LoadSummary {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let done = || self.completions.iter().filter(|c| c.outcome == Outcome::Completed);
        let wall_s = self.wall.as_secs_f64();
        let mut outcomes = BTreeMap::new();
        let mut output_hashes = BTreeMap::new();
        let mut combined = Sha256::new();
        for completion in &self.completions {
            *outcomes.entry(completion.outcome).or_default() += 1;
            if completion.outcome == Outcome::Completed {
                *output_hashes.entry(output_hash(completion)).or_default() += 1;
            }
            combined.update(output_hash(completion));
        }
        let completion_tokens = self.completions.iter().map(|c| c.completion_tokens).sum::<u64>();
        LoadSummary {
            wall_s,
            outcomes,
            qps: done().count() as f64 / wall_s,
            prompt_tokens: self.completions.iter().map(|c| c.prompt_tokens).sum(),
            completion_tokens,
            tok_s: completion_tokens as f64 / wall_s,
            ttft_ms: Summary::of(&done().filter_map(|c| c.ttft()).map(ms).collect::<Vec<_>>()),
            tpot_ms: Summary::of(
                &done().filter(|c| c.is_token_exact()).filter_map(|c| c.tpot()).map(ms).collect::<Vec<_>>(),
            ),
            itl_ms: Summary::of(&done().flat_map(|c| c.gaps()).map(ms).collect::<Vec<_>>()),
            e2e_ms: Summary::of(&done().map(|c| ms(c.latency())).collect::<Vec<_>>()),
            token_exact: done().filter(|c| c.is_token_exact()).count(),
            output_hashes,
            combined_output_hash: hex(&combined.finalize()),
            first_error: self.completions.iter().find_map(|c| c.error.clone()),
        }
    }

    pub fn count(&self, outcome: Outcome) -> usize {
        self.completions.iter().filter(|c| c.outcome == outcome).count()
    }
}

/// 16 hex digits over the text and ids of an answer.
pub fn output_hash(completion: &Completion) -> String {
    let mut sha = Sha256::new();
    sha.update(&completion.text);
    for id in &completion.token_ids {
        sha.update(id.to_le_bytes());
    }
    hex(&sha.finalize()[..8])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_repeat_by_seed_and_differ_between_seeds() {
        assert_eq!(prompt_ids(1, 64), prompt_ids(1, 64));
        assert_ne!(prompt_ids(1, 64), prompt_ids(2, 64));
        assert!(prompt_ids(3, 1000).iter().all(|id| (10..1000).contains(id)));
    }

    #[test]
    fn open_loop_arrivals_have_the_asked_mean() {
        let mean = (0..20_000).map(|number| exponential(5, number)).sum::<f64>() / 20_000.0;
        assert!((mean - 1.0).abs() < 0.03, "{mean}");
    }
}
