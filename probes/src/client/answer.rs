//! Answers as values: whole responses, and completions read token event by token event.

use super::{ClientError, Connection};
use bytes::Bytes;
use hyper::{HeaderMap, StatusCode};
use serde_json::Value;
use std::time::{Duration, Instant};

/// A response read to its end.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn json(&self) -> Result<Value, ClientError> {
        serde_json::from_slice(&self.body).map_err(|e| ClientError::Stream(format!("the body is not JSON: {e}")))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Whether the body is the error envelope: exactly message, type, param, code, with a code that is no number.
    pub fn is_error_envelope(&self) -> bool {
        let Ok(body) = self.json() else { return false };
        let Some(error) = body.get("error").and_then(Value::as_object) else { return false };
        let string_or_null = |key: &str| error.get(key).is_some_and(|v| v.is_string() || v.is_null());
        error.len() == 4
            && error.get("message").and_then(Value::as_str).is_some_and(|message| !message.is_empty())
            && error.get("type").is_some_and(Value::is_string)
            && string_or_null("param")
            && string_or_null("code")
    }
}

/// How a request ended, as its client saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Completed,
    /// A non-2xx answer with the error envelope.
    Refused,
    /// The client left on purpose.
    Left,
    Timeout,
    Failed,
}

/// One streamed completion as its client saw it.
#[derive(Clone, Debug)]
pub struct Completion {
    pub outcome: Outcome,
    pub status: u16,
    /// `x-request-id` of the answer.
    pub request_id: String,
    pub error: Option<String>,
    pub text: String,
    /// Generated ids, when the server was asked for them.
    pub token_ids: Vec<u32>,
    /// Logprobs of the generated tokens, when the server was asked for them.
    pub logprobs: Vec<f64>,
    pub finish_reason: Option<String>,
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub sent: Instant,
    /// Arrival of each event that carried text or tokens.
    pub arrivals: Vec<Instant>,
    /// Arrival of the end of the stream, or of the last thing seen.
    pub ended: Instant,
}

impl Completion {
    fn begun(sent: Instant) -> Completion {
        Completion {
            outcome: Outcome::Failed,
            status: 0,
            request_id: String::new(),
            error: None,
            text: String::new(),
            token_ids: Vec::new(),
            logprobs: Vec::new(),
            finish_reason: None,
            prompt_tokens: 0,
            completion_tokens: 0,
            sent,
            arrivals: Vec::new(),
            ended: sent,
        }
    }

    /// A request that could not be sent at all.
    pub fn unsent(error: String) -> Completion {
        Completion { error: Some(error), ..Completion::begun(Instant::now()) }
    }

    pub fn ttft(&self) -> Option<Duration> {
        self.arrivals.first().map(|first| *first - self.sent)
    }

    pub fn latency(&self) -> Duration {
        self.ended - self.sent
    }

    /// Whether each event carried exactly one token, so that gaps between events are gaps between tokens.
    pub fn is_token_exact(&self) -> bool {
        self.arrivals.len() as u64 == self.completion_tokens
    }

    /// Gaps between successive tokens, where events are tokens.
    pub fn gaps(&self) -> Vec<Duration> {
        if !self.is_token_exact() {
            return Vec::new();
        }
        self.arrivals.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    /// Time per output token after the first, where there are two or more.
    pub fn tpot(&self) -> Option<Duration> {
        let (first, last) = (self.arrivals.first()?, self.arrivals.last()?);
        (self.completion_tokens > 1).then(|| (*last - *first) / (self.completion_tokens - 1) as u32)
    }
}

/// When a client leaves its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    Never,
    /// As soon as the status line is here.
    AfterHeaders,
    /// After this many token events.
    AfterTokens(usize),
    /// This long after the status line, whatever came until then: a streamed request that was accepted, so that it must have its trace.
    After(Duration),
}

impl Connection {
    /// Streams one completion to its end, to the deadline, or to where its client leaves.
    /// The connection can be used again only if the outcome is `Completed` or `Refused`.
    pub async fn completion(&mut self, body: &Value, id: &str, leave: Leave, deadline: Instant) -> Completion {
        let mut seen = Completion::begun(Instant::now());
        let headers: &[(&str, &str)] = if id.is_empty() { &[] } else { &[("x-request-id", id)] };
        if let Err(error) = self.follow(body, headers, leave, deadline, &mut seen).await {
            seen.outcome = if matches!(error, ClientError::Deadline) { Outcome::Timeout } else { Outcome::Failed };
            seen.error = Some(error.to_string());
            seen.ended = Instant::now();
        }
        seen
    }

    async fn follow(
        &mut self,
        body: &Value,
        headers: &[(&str, &str)],
        leave: Leave,
        deadline: Instant,
        seen: &mut Completion,
    ) -> Result<(), ClientError> {
        let mut stream = self.stream("/v1/completions", body, headers, deadline).await?;
        seen.sent = stream.sent;
        seen.status = stream.status.as_u16();
        seen.request_id =
            stream.headers.get("x-request-id").and_then(|v| v.to_str().ok()).unwrap_or_default().to_string();
        if stream.status != StatusCode::OK {
            let answer = stream.rest(deadline).await?;
            seen.ended = Instant::now();
            seen.outcome = if answer.is_error_envelope() { Outcome::Refused } else { Outcome::Failed };
            seen.error = Some(answer.text());
            return Ok(());
        }
        if leave == Leave::AfterHeaders {
            seen.outcome = Outcome::Left;
            seen.ended = Instant::now();
            return Ok(());
        }
        let until = match leave {
            Leave::After(delay) => deadline.min(Instant::now() + delay),
            _ => deadline,
        };
        let mut done = false;
        loop {
            let event = match stream.next(until).await {
                Err(ClientError::Deadline) if until < deadline => {
                    seen.ended = Instant::now();
                    seen.outcome = Outcome::Left;
                    return Ok(());
                }
                event => event?,
            };
            let Some(event) = event else { break };
            seen.ended = event.at;
            if done {
                return Err(ClientError::Stream("an event after [DONE]".into()));
            }
            if event.data == "[DONE]" {
                done = true;
                continue;
            }
            let chunk: Value = serde_json::from_str(&event.data).map_err(|e| ClientError::Stream(e.to_string()))?;
            if let Some(error) = chunk.get("error") {
                return Err(ClientError::Stream(format!("error event {error}")));
            }
            seen.take_chunk(&chunk, event.at)?;
            if matches!(leave, Leave::AfterTokens(count) if seen.arrivals.len() >= count) {
                seen.outcome = Outcome::Left;
                return Ok(());
            }
        }
        if !done {
            return Err(ClientError::Stream("it ended without [DONE]".into()));
        }
        if seen.finish_reason.is_none() {
            return Err(ClientError::Stream("no choice finished".into()));
        }
        seen.outcome = Outcome::Completed;
        Ok(())
    }
}

impl Completion {
    fn take_chunk(&mut self, chunk: &Value, at: Instant) -> Result<(), ClientError> {
        if let Some(usage) = chunk.get("usage").filter(|usage| !usage.is_null()) {
            self.prompt_tokens = usage["prompt_tokens"].as_u64().unwrap_or_default();
            self.completion_tokens = usage["completion_tokens"].as_u64().unwrap_or_default();
        }
        let Some(choice) = chunk["choices"].get(0) else { return Ok(()) };
        let text = choice["text"].as_str().ok_or_else(|| ClientError::Stream("a choice without text".into()))?;
        self.text.push_str(text);
        let ids = choice.get("token_ids").and_then(Value::as_array);
        let before = self.token_ids.len();
        self.token_ids.extend(ids.into_iter().flatten().filter_map(Value::as_u64).map(|id| id as u32));
        let logprobs = choice.pointer("/logprobs/token_logprobs").and_then(Value::as_array);
        self.logprobs.extend(logprobs.into_iter().flatten().filter_map(Value::as_f64));
        // An event without ids counts by its text; with ids, by them (a token may decode to no text yet).
        if self.token_ids.len() > before || (ids.is_none() && !text.is_empty()) {
            self.arrivals.push(at);
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            if self.finish_reason.is_some() {
                return Err(ClientError::Stream("the choice finished twice".into()));
            }
            self.finish_reason = Some(reason.into());
        }
        Ok(())
    }
}
