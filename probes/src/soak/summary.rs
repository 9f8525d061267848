//! A time bucket summed up, and how the numbers moved from the first quarter of a soak to the last.

use super::load::Sent;
use crate::client::Outcome;
use crate::scrape::Baseline;
use crate::stats::{Summary, median};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

#[derive(Clone, Debug, Serialize)]
pub struct Bucket {
    pub number: usize,
    pub concurrency: usize,
    /// Seconds after the soak's first bucket began.
    pub ends_s: f64,
    pub requests: usize,
    pub completed: usize,
    /// Clients that were to leave, and those that did: an answer may end first.
    pub leavers: usize,
    pub left: usize,
    pub failed: usize,
    pub timeouts: usize,
    pub missing_traces: usize,
    pub qps: f64,
    pub tok_s: f64,
    pub ttft_ms: Summary,
    pub tpot_ms: Summary,
    pub itl_ms: Summary,
    pub baseline: Baseline,
    /// GPU memory of the server, where it can be told.
    pub device_mib: Option<u64>,
    /// Whether the drained server held exactly what it held before the soak.
    pub quiet: bool,
    pub clean_follow_up: bool,
}

/// What was seen once a bucket's requests had ended.
pub struct After {
    /// Since the first bucket began.
    pub ends: Duration,
    pub baseline: Baseline,
    pub device_mib: Option<u64>,
    pub quiet: bool,
    pub missing_traces: usize,
    pub clean_follow_up: bool,
}

impl Bucket {
    pub fn of(number: usize, concurrency: usize, took: Duration, sent: &Sent, after: After) -> Bucket {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let count = |outcome: Outcome| sent.0.iter().filter(|done| done.completion.outcome == outcome).count();
        let done = || sent.0.iter().map(|done| &done.completion).filter(|c| c.outcome == Outcome::Completed);
        let tokens: u64 = sent.0.iter().map(|done| done.completion.token_ids.len() as u64).sum();
        Bucket {
            number,
            concurrency,
            ends_s: after.ends.as_secs_f64(),
            requests: sent.0.len(),
            completed: count(Outcome::Completed),
            leavers: sent.0.iter().filter(|done| done.leaver).count(),
            left: count(Outcome::Left),
            failed: count(Outcome::Failed) + count(Outcome::Refused),
            timeouts: count(Outcome::Timeout),
            missing_traces: after.missing_traces,
            qps: done().count() as f64 / took.as_secs_f64(),
            tok_s: tokens as f64 / took.as_secs_f64(),
            ttft_ms: Summary::of(&done().filter_map(|c| c.ttft()).map(ms).collect::<Vec<_>>()),
            tpot_ms: Summary::of(&done().filter_map(|c| c.tpot()).map(ms).collect::<Vec<_>>()),
            itl_ms: Summary::of(&done().flat_map(|c| c.gaps()).map(ms).collect::<Vec<_>>()),
            baseline: after.baseline,
            device_mib: after.device_mib,
            quiet: after.quiet,
            clean_follow_up: after.clean_follow_up,
        }
    }

    pub fn line(&self) -> String {
        format!(
            "{} requests, {} completed, {} left, {} failed, {:.0} tok/s, ttft p50 {:.1} ms, {} MiB, {} fds{}",
            self.requests,
            self.completed,
            self.left,
            self.failed + self.timeouts,
            self.tok_s,
            self.ttft_ms.p50,
            self.baseline.rss_bytes >> 20,
            self.baseline.fds,
            if self.quiet { "" } else { ", NOT QUIET" }
        )
    }
}

/// A number at both ends of a soak.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Drift {
    /// Median of the first quarter of the buckets.
    pub first: f64,
    /// Median of the last quarter.
    pub last: f64,
    pub change: f64,
}

/// First against last quartile median of each number; empty with fewer than four buckets.
pub fn drift(buckets: &[&Bucket]) -> BTreeMap<&'static str, Drift> {
    if buckets.len() < 4 {
        return BTreeMap::new();
    }
    let quarter = buckets.len() / 4;
    let of = |value: fn(&Bucket) -> f64| {
        let values: Vec<f64> = buckets.iter().map(|bucket| value(bucket)).collect();
        let (first, last) = (median(&values[..quarter]), median(&values[values.len() - quarter..]));
        Drift { first, last, change: (last - first) / first.abs().max(f64::MIN_POSITIVE) }
    };
    BTreeMap::from([
        ("rss_bytes", of(|b| b.baseline.rss_bytes as f64)),
        ("fds", of(|b| b.baseline.fds as f64)),
        ("device_mib", of(|b| b.device_mib.unwrap_or_default() as f64)),
        ("qps", of(|b| b.qps)),
        ("tok_s", of(|b| b.tok_s)),
        ("ttft_ms_p95", of(|b| b.ttft_ms.p95)),
        ("tpot_ms_p95", of(|b| b.tpot_ms.p95)),
        ("itl_ms_p95", of(|b| b.itl_ms.p95)),
    ])
}
