//! The trace record: one line of facts for each ended choice, and the observer that takes it.
//!
//! Made on the engine thread when a choice ends, handed to the observer, which must never block. **Invariant:** no text and no token id of a
//! prompt or an answer is in a record, only their hashes and counts; durations come from the monotonic clock, and the wall-clock
//! stamps are one wall-clock reading at start plus monotonic durations.

use crate::request::{AbortCause, RequestId, Terminal};
use serde::Serialize;
use sha2::{Digest, Sha256};
use slotgraph_graphs::spec::SamplingSpec;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Takes what the engine has to say about a request's life. Called on the engine thread; must never block.
pub trait Observer: Send + Sync {
    /// A choice ended. Called before its listener hears the terminal event.
    fn ended(&self, record: TraceRecord);
    /// Something took this long.
    fn latency(&self, latency: Latency, took: Duration);
    /// A step of this bucket settled, this long after it was enqueued or after the step before it settled, whichever was later.
    fn step(&self, bucket: usize, took: Duration);
}

/// Observes nothing.
#[derive(Debug, Default)]
pub struct NoObserver;

impl Observer for NoObserver {
    fn ended(&self, _record: TraceRecord) {}
    fn latency(&self, _latency: Latency, _took: Duration) {}
    fn step(&self, _bucket: usize, _took: Duration) {}
}

/// What a latency measures, for each choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Latency {
    /// Accepted at the edge → took a slot (the first time).
    Queue,
    /// Accepted at the edge → first token handed to the sink.
    FirstToken,
    /// Between two tokens of a choice.
    InterToken,
}

/// Facts that are the same in every record of an engine.
#[derive(Clone, Debug, Default)]
pub struct TraceContext {
    pub model_sha256: String,
    pub contract_hash: String,
    /// Rollback switches, the transport, and armed faults, as the start-up record shows them.
    pub switches: BTreeMap<String, String>,
}

/// One reading of the wall clock, from which wall-clock stamps follow by monotonic durations.
#[derive(Clone, Copy, Debug)]
pub struct Epoch {
    pub at: Instant,
    pub unix: Duration,
}

impl Epoch {
    /// Now, which the engine's clock calls `at`.
    pub fn new(at: Instant) -> Self {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Epoch { at, unix }
    }
    pub fn unix_s(&self, at: Instant) -> f64 {
        let later = at.saturating_duration_since(self.at).as_secs_f64();
        self.unix.as_secs_f64() + later - self.at.saturating_duration_since(at).as_secs_f64()
    }
}

/// One ended choice. Field names of the engine that this one succeeds are kept.
#[derive(Clone, Debug, Serialize)]
pub struct TraceRecord {
    pub request_id: RequestId,
    pub choice_index: u32,
    /// Sample index among its prompt's choices: part of the noise counter.
    pub sample: u32,
    pub queued_at_unix_s: f64,
    pub scheduled_at_unix_s: Option<f64>,
    pub prefill_done_unix_s: Option<f64>,
    /// The first token was handed to the sink.
    pub first_token_emit_unix_s: Option<f64>,
    pub terminal_unix_s: f64,
    pub queue_wait_ms: f64,
    pub scheduled_to_first_token_ms: Option<f64>,
    pub scheduled_to_terminal_ms: Option<f64>,
    pub prefill_ms: Option<f64>,
    /// First token → second token.
    pub first_decode_ms: Option<f64>,
    /// First token → last token.
    pub decode_total_ms: f64,
    pub decode_mean_ms: Option<f64>,
    /// Tokens after the first one.
    pub decode_step_count: u32,
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    /// Prompt tokens taken from a sibling's pages.
    pub shared_tokens: u32,
    /// `length`, `stop` or `error`; null when the choice was aborted or refused.
    pub finish_reason: Option<&'static str>,
    pub terminal_reason: &'static str,
    pub cause: Option<&'static str>,
    /// Alias of the max.
    pub active_set_size: u32,
    pub active_set_size_max: u32,
    pub pending_queue_size_max: u32,
    pub active_set_size_at_terminal: u32,
    pub pending_queue_size_at_terminal: u32,
    /// Both zero.
    pub healthy_baseline_after_terminal: bool,
    pub decode_batch_size_max: u32,
    pub batch_decode_steps: u32,
    pub singleton_decode_steps: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The last slot it held.
    pub slot: Option<u32>,
    /// The most pages it held at once.
    pub pages: u32,
    pub buckets_used: Vec<usize>,
    /// Pad rows of the steps it rode in.
    pub padded_rows: u64,
    pub prefill_chunks: u32,
    pub preemptions: u32,
    pub sampling: Arc<SamplingSpec>,
    pub seed: u64,
    /// Sample index among its prompt's choices: part of the noise counter.
    pub sample_index: u32,
    pub score_prompt: Option<u32>,
    /// Of the prompt's ids as u32 little-endian, hex.
    pub prompt_sha256: String,
    /// Of the answer's ids as u32 little-endian, hex.
    pub token_sha256: String,
    pub model_sha256: String,
    pub contract_hash: String,
    pub switches: BTreeMap<String, String>,
    #[serde(skip)]
    pub terminal: Terminal,
    #[serde(skip)]
    pub abort: Option<AbortCause>,
}

/// SHA-256 of ids as u32 little-endian, in hex.
pub fn sha256_of_ids(ids: &[u32]) -> String {
    let mut sha = Sha256::new();
    for id in ids {
        sha.update(id.to_le_bytes());
    }
    sha.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
