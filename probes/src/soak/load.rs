//! The soak's requests: drawn from a seed, short and long, greedy and sampled, some of them left early.

use super::Args;
use crate::client::{Close, Completion, Leave, Outcome};
use crate::harness::Target;
use crate::load::{completion_body, prompt_ids, scatter};
use crate::replay::PromptLine;
use serde_json::{Value, json};
use slotgraph_runtime::trace::sha256_of_ids;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// What decides the requests.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    seed: u64,
    cancels: f64,
    timeout: Duration,
}

impl From<&Args> for Mix {
    fn from(args: &Args) -> Mix {
        Mix { seed: args.seed, cancels: args.cancels, timeout: Duration::from_secs_f64(args.timeout) }
    }
}

/// One request of the soak and how it went.
pub struct Done {
    pub id: String,
    pub prompt: Vec<u32>,
    /// Whether its client was to leave before the end.
    pub leaver: bool,
    pub completion: Completion,
}

/// A bucket's requests.
pub struct Sent(pub Vec<Done>);

impl Sent {
    pub fn ids(&self) -> Vec<String> {
        self.0.iter().map(|done| done.id.clone()).collect()
    }
    pub fn errors(&self) -> impl Iterator<Item = String> {
        let failed =
            |done: &&Done| matches!(done.completion.outcome, Outcome::Failed | Outcome::Timeout | Outcome::Refused);
        self.0.iter().filter(failed).filter_map(|done| done.completion.error.clone())
    }
    /// Completed answers with their tokens, as replay reads them.
    pub fn answers(&self) -> impl Iterator<Item = PromptLine> {
        let complete = |done: &&Done| {
            done.completion.outcome == Outcome::Completed
                && done.completion.token_ids.len() as u64 == done.completion.completion_tokens
        };
        self.0.iter().filter(complete).map(|done| PromptLine {
            prompt_sha256: Some(sha256_of_ids(&done.prompt)),
            prompt_ids: Some(done.prompt.clone()),
            request_id: Some(done.id.clone()),
            choice_index: 0,
            token_ids: Some(done.completion.token_ids.clone()),
            logprobs: (!done.completion.logprobs.is_empty()).then(|| done.completion.logprobs.clone()),
        })
    }
}

/// Keeps `streams` requests going until `until`; returns all of them, ended.
pub async fn work(mix: Mix, target: &Target, bucket: usize, streams: usize, until: Instant) -> Sent {
    let next = Arc::new(AtomicUsize::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..streams {
        let (server, next) = (target.server.clone(), next.clone());
        let (model, context) = (target.model.clone(), target.max_model_len);
        let name = target.id(&format!("soak{bucket}"), 0);
        tasks.spawn(async move {
            let mut done = Vec::new();
            let mut kept = None;
            while Instant::now() < until {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let id = format!("{}{number}", name.trim_end_matches('0'));
                let (prompt, body, leave) = draw(mix, &model, context, bucket, number);
                let deadline = Instant::now() + mix.timeout;
                let close = if leave == Leave::Never { Close::Orderly } else { Close::Reset };
                let connection = match kept.take().filter(|_| close == Close::Orderly) {
                    Some(connection) => Ok(connection),
                    None => server.connect(close, deadline).await,
                };
                let completion = match connection {
                    Ok(mut connection) => {
                        let completion = connection.completion(&body, &id, leave, deadline).await;
                        kept =
                            (completion.outcome == Outcome::Completed && close == Close::Orderly).then_some(connection);
                        completion
                    }
                    Err(error) => Completion::unsent(error.to_string()),
                };
                done.push(Done { id, prompt, leaver: leave != Leave::Never, completion });
            }
            done
        });
    }
    let mut all = Vec::new();
    while let Some(done) = tasks.join_next().await {
        all.extend(done.expect("a client task does not panic"));
    }
    Sent(all)
}

/// The request of this number: the same for the same seed.
fn draw(mix: Mix, model: &str, context: usize, bucket: usize, number: usize) -> (Vec<u32>, Value, Leave) {
    let word = |salt: u64| scatter(mix.seed ^ scatter((bucket as u64) << 32 | number as u64) ^ salt << 56);
    let unit = |salt: u64| (word(salt) >> 11) as f64 / (1u64 << 53) as f64;
    // Mostly short prompts, one in sixteen long.
    let longest = if word(1).is_multiple_of(16) { context / 2 } else { 96 };
    let prompt = prompt_ids(word(2), 1 + (unit(3) * longest as f64) as usize);
    let tokens = 8 + (unit(4) * 120.0) as usize;
    let mut body = completion_body(model, &prompt, tokens);
    body["return_token_ids"] = json!(true);
    body["ignore_eos"] = json!(word(5).is_multiple_of(2));
    if word(6).is_multiple_of(2) {
        body["temperature"] = json!(0.3 + (unit(7) * 10.0).round() / 10.0);
        body["seed"] = json!(word(8) >> 1);
        match word(9) % 4 {
            0 => body["top_p"] = json!(0.9),
            1 => body["top_k"] = json!(40),
            2 => body["presence_penalty"] = json!(0.5),
            _ => {}
        }
    }
    if word(10).is_multiple_of(4) {
        body["logprobs"] = json!(1);
    }
    let leave = if unit(11) < mix.cancels {
        match word(12) % 3 {
            0 => Leave::After(Duration::from_micros(word(13) % 4000)),
            _ => Leave::AfterTokens(1 + (unit(14) * tokens as f64 * 0.5) as usize),
        }
    } else {
        Leave::Never
    };
    (prompt, body, leave)
}

/// The text of one fixed greedy request.
pub async fn canary(target: &Target) -> Option<String> {
    let deadline = Instant::now() + Duration::from_secs(60);
    let body = json!({
        "model": target.model, "prompt": "The capital of France is", "max_tokens": 32, "temperature": 0, "seed": 1,
    });
    let answer = target.server.post("/v1/completions", &body, deadline).await.ok()?.json().ok()?;
    answer["choices"][0]["text"].as_str().map(String::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_leave_as_asked_over_many_draws() {
        let mix = Mix { seed: 1, cancels: 0.2, timeout: Duration::from_secs(1) };
        let leaves = |number: &usize| draw(mix, "m", 64, number / 500, number % 500).2 != Leave::Never;
        let left = (0..4000).filter(leaves).count() as f64;
        let luck = 3.0 * (4000.0 * 0.2 * 0.8_f64).sqrt();
        assert!((left - 800.0).abs() <= luck, "{left} of 4000");
    }
}
