//! The end of a choice: its place is given back, its trace line written, and its listener told, in this order.
//!
//! **Invariant:** every way out of the queue or a seat leads here, once.

use super::Scheduler;
use super::choice::{Live, Stats};
use crate::request::{AbortCause, Event, Finish, FinishReason, Terminal};
use crate::trace::{TraceRecord, sha256_of_ids};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How a choice ends.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum End {
    Completed(FinishReason),
    Aborted(AbortCause),
    Failed(String),
    Rejected(String),
}

impl End {
    fn terminal(&self) -> Terminal {
        match self {
            End::Completed(FinishReason::Stop) => Terminal::CompletedStop,
            End::Completed(FinishReason::Length) => Terminal::CompletedLength,
            End::Completed(FinishReason::Aborted(cause)) | End::Aborted(cause) => cause.terminal(),
            End::Failed(_) => Terminal::Error,
            End::Rejected(_) => Terminal::Rejected,
        }
    }
}

impl Scheduler {
    /// Ends a choice that is in no table any more.
    pub(super) fn end(&mut self, live: Live, end: End, now: Instant) {
        if let Some(share) = live.share {
            self.shares.ended(share);
        }
        self.load.give_places(1);
        let (end, kept) = live.settle_stop_string(end);
        let record = self.trace(&live, &end, kept, now);
        let finish = |reason| Finish {
            reason,
            prompt_tokens: record.prompt_tokens,
            completion_tokens: record.completion_tokens,
            cached_tokens: 0,
        };
        let event = match end {
            End::Completed(reason) => Event::Finished(finish(reason)),
            End::Aborted(cause) => Event::Finished(finish(FinishReason::Aborted(cause))),
            End::Failed(reason) => Event::Error(reason),
            End::Rejected(reason) => Event::Rejected(reason),
        };
        self.observer.ended(record);
        live.choice.sink.finish(event);
    }

    /// Ends everything: the engine has failed.
    pub fn fail(&mut self, reason: &str, now: Instant) {
        while let Some(&slot) = self.order.first() {
            let live = self.unseat(slot, false);
            self.end(live, End::Failed(reason.to_owned()), now);
        }
        while let Some(live) = self.queue.pop_front() {
            if let Some(share) = live.share {
                self.shares.leave_queue(share, &mut self.pages, self.enqueued);
            }
            self.end(live, End::Failed(reason.to_owned()), now);
        }
    }

    fn trace(&mut self, live: &Live, end: &End, kept: usize, now: Instant) -> TraceRecord {
        let (active, pending) = (self.order.len() as u32, self.queue.len() as u32);
        let terminal = end.terminal();
        let cause = if let End::Aborted(cause) = end { Some(*cause) } else { None };
        let answer = &live.generated[..kept];
        let stats @ Stats { scheduled, prefill_done, first_token, second_token, last_token, .. } = live.stats.clone();
        let queued = live.group.received;
        let between = |from: Option<Instant>, to: Option<Instant>| Some(ms(to?.saturating_duration_since(from?)));
        let unix = |at: Instant| self.epoch.unix_s(at);
        let decode_steps = (answer.len() as u32).saturating_sub(1);
        let decode_total = between(first_token, last_token).unwrap_or(0.0);
        let context = &self.options.trace;
        let buckets = self.options.limits.buckets.iter().enumerate();
        TraceRecord {
            request_id: live.group.id.clone(),
            choice_index: live.choice.index,
            sample: live.choice.sample,
            queued_at_unix_s: unix(queued),
            scheduled_at_unix_s: scheduled.map(unix),
            prefill_done_unix_s: prefill_done.map(unix),
            first_token_emit_unix_s: first_token.map(unix),
            terminal_unix_s: unix(now),
            queue_wait_ms: ms(scheduled.unwrap_or(now).saturating_duration_since(queued)),
            scheduled_to_first_token_ms: between(scheduled, first_token),
            scheduled_to_terminal_ms: between(scheduled, Some(now)),
            prefill_ms: between(scheduled, prefill_done),
            first_decode_ms: between(first_token, second_token),
            decode_total_ms: decode_total,
            decode_mean_ms: (decode_steps > 0).then(|| decode_total / f64::from(decode_steps)),
            decode_step_count: decode_steps,
            prompt_tokens: live.prompt_len(),
            completion_tokens: answer.len() as u32,
            shared_tokens: stats.shared_tokens,
            finish_reason: match terminal {
                Terminal::CompletedStop => Some("stop"),
                Terminal::CompletedLength => Some("length"),
                Terminal::Error => Some("error"),
                _ => None,
            },
            terminal_reason: terminal.name(),
            cause: cause.map(AbortCause::name),
            active_set_size: stats.active_max,
            active_set_size_max: stats.active_max,
            pending_queue_size_max: stats.pending_max,
            active_set_size_at_terminal: active,
            pending_queue_size_at_terminal: pending,
            healthy_baseline_after_terminal: active == 0 && pending == 0,
            decode_batch_size_max: stats.decode_rows_max,
            batch_decode_steps: stats.batch_steps,
            singleton_decode_steps: stats.singleton_steps,
            error: match end {
                End::Failed(reason) | End::Rejected(reason) => Some(reason.clone()),
                _ => None,
            },
            slot: stats.slot.map(|slot| slot.0),
            pages: stats.pages_max,
            buckets_used: buckets.filter(|(at, _)| stats.buckets >> at & 1 == 1).map(|(_, &bucket)| bucket).collect(),
            padded_rows: stats.padded_rows,
            prefill_chunks: stats.chunks,
            preemptions: stats.preemptions,
            seed: live.choice.sampling.seed,
            sampling: live.choice.sampling.clone(),
            sample_index: live.choice.sample,
            score_prompt: live.choice.score_prompt,
            token_sha256: sha256_of_ids(answer),
            model_sha256: context.model_sha256.clone(),
            contract_hash: context.contract_hash.clone(),
            switches: context.switches.clone(),
            prompt_sha256: self.prompt_sha256(&live.choice.prompt),
            terminal,
            abort: cause,
        }
    }

    fn prompt_sha256(&mut self, prompt: &Arc<[u32]>) -> String {
        if let Some((known, hash)) = &self.prompt_hash
            && Arc::ptr_eq(known, prompt)
        {
            return hash.clone();
        }
        let hash = sha256_of_ids(prompt);
        self.prompt_hash = Some((prompt.clone(), hash.clone()));
        hash
    }
}

impl Live {
    /// How it ends and with how many tokens, seen once: a stop string completes it with the token that completed the string, even if the device
    /// ended it a few tokens later.
    fn settle_stop_string(&self, end: End) -> (End, usize) {
        let delivered = self.generated.len();
        match (self.choice.sink.abort().kept(), end) {
            (Some(kept), End::Completed(_) | End::Aborted(AbortCause::StopString)) => {
                (End::Aborted(AbortCause::StopString), delivered.min(kept as usize))
            }
            (_, end) => (end, delivered),
        }
    }
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
