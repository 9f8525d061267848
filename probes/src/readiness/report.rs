//! The readiness report, schema 3: every field of schema 2 with its meaning, and what each bucket came to.

use crate::evidence::Draft;
use crate::script::Divergence;
use crate::stats::Summary;
use serde::Serialize;
use serde_json::{Value, json};
use slotgraph_graphs::cuda::ledger::Audit;
use slotgraph_graphs::cuda::{Counters, GraphReport};

/// Where readiness was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureStage {
    NotStarted,
    ReferenceFailed,
    CaptureFailed,
    ReplayFailed,
    VerificationFailed,
    None,
}

/// Where a replay first differs from eager.
#[derive(Clone, Debug, Default, Serialize)]
pub struct FirstDivergence {
    pub step: u64,
    pub row: Option<usize>,
    pub what: String,
    /// Known once the step was run again on both devices.
    pub layer: Option<usize>,
    pub op: Option<String>,
    pub buffer: Option<String>,
    pub element: Option<usize>,
}

impl From<Divergence> for FirstDivergence {
    fn from(divergence: Divergence) -> Self {
        FirstDivergence { step: divergence.step, row: divergence.row, what: divergence.what, ..Default::default() }
    }
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct RankReport {
    pub rank: usize,
    pub nodes: usize,
    pub kernels: usize,
    pub memcpys: usize,
    /// Collectives of the plan that NCCL carries out, its kernels, and what other nodes came with them.
    pub collectives: usize,
    pub library_kernels: usize,
    pub library_nodes: usize,
    pub graph_bytes: u64,
    pub pointers_checked: usize,
    pub pointers_unregistered: usize,
    pub pointers_foreign: usize,
    pub programmatic_edges: usize,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct BucketReport {
    pub bucket: usize,
    pub ranks: Vec<RankReport>,
    pub captured: bool,
    pub instantiated: bool,
    pub replayed: bool,
    pub capture_us: f64,
    pub instantiate_us: f64,
    pub upload_us: f64,
    /// On the device, decode steps.
    pub replay_us: Summary,
    /// On the host, one launch.
    pub launch_us: Summary,
    pub replay_count: usize,
    pub steps_verified: usize,
    pub first_divergence: Option<FirstDivergence>,
    pub unchanged_since_capture: bool,
    pub poison_changes_nothing: bool,
    pub ledger_hash_before: String,
    pub ledger_hash_after: String,
}

impl BucketReport {
    pub fn take_rank(&mut self, made: &GraphReport, again: &Audit) {
        self.ranks = vec![RankReport {
            rank: 0,
            nodes: again.nodes,
            kernels: again.kernels,
            memcpys: again.memcpys,
            collectives: made.collectives,
            library_kernels: again.library_kernels,
            library_nodes: again.library_nodes,
            graph_bytes: made.graph_bytes,
            pointers_checked: again.pointers_checked,
            pointers_unregistered: again.pointers_unregistered,
            pointers_foreign: again.pointers_foreign,
            programmatic_edges: made.programmatic_edges,
        }];
    }

    /// Adds what rank `rank` captured for the same bucket; all must hold what rank 0's holds.
    pub fn take_other_rank(&mut self, rank: usize, other: &BucketReport) {
        self.ranks.extend(other.ranks.iter().map(|report| RankReport { rank, ..report.clone() }));
        self.captured &= other.captured;
        self.instantiated &= other.instantiated;
        self.replayed &= other.replayed;
        self.unchanged_since_capture &= other.unchanged_since_capture;
        if other.ledger_hash_before != other.ledger_hash_after {
            self.ledger_hash_after = other.ledger_hash_after.clone();
        }
    }

    fn verified(&self) -> bool {
        self.first_divergence.is_none() && self.steps_verified > 0 && self.steps_verified == self.replay_count
    }

    fn is_ready(&self) -> bool {
        self.captured
            && self.instantiated
            && self.replayed
            && self.verified()
            && self.unchanged_since_capture
            && self.poison_changes_nothing
            && self.ledger_hash_before == self.ledger_hash_after
            && !self.ranks.is_empty()
            && self.ranks.iter().all(|rank| rank.pointers_checked > 0 && rank.pointers_unregistered == 0)
    }
}

/// The whole report.
pub struct Readiness {
    backend: &'static str,
    pub buckets: Vec<BucketReport>,
    pub counters_before: Counters,
    pub counters_after: Counters,
    /// Whether the collective alone was right, if it was tried.
    pub smoke: Option<bool>,
    stage: FailureStage,
    failure_summary: String,
}

impl Readiness {
    pub fn new(backend: &'static str, buckets: &[usize]) -> Readiness {
        Readiness {
            backend,
            buckets: buckets.iter().map(|&bucket| BucketReport { bucket, ..Default::default() }).collect(),
            counters_before: Counters::default(),
            counters_after: Counters::default(),
            smoke: None,
            stage: FailureStage::NotStarted,
            failure_summary: "nothing was run".into(),
        }
    }

    pub fn fail(&mut self, stage: FailureStage, reason: &str) {
        self.stage = stage;
        self.failure_summary = reason.into();
    }

    /// Decides the stage from what the buckets say, once all were run.
    pub fn close(&mut self) {
        let grown = Readiness::grown(self.counters_before, self.counters_after);
        let lost = self.buckets.iter().find(|bucket| !bucket.is_ready());
        match (lost, grown) {
            (None, None) => self.fail(FailureStage::None, ""),
            (Some(bucket), _) => {
                let reason = match &bucket.first_divergence {
                    Some(divergence) => {
                        format!("bucket {}: step {}: {}", bucket.bucket, divergence.step, divergence.what)
                    }
                    None => format!("bucket {} is not ready: {}", bucket.bucket, json!(bucket)),
                };
                self.fail(FailureStage::VerificationFailed, &reason);
            }
            (None, Some(grown)) => self.fail(FailureStage::VerificationFailed, &grown),
        }
    }

    /// A counter that must not grow after `prepare` and did.
    pub fn grown(a: Counters, b: Counters) -> Option<String> {
        let still = [
            ("allocations", a.allocations, b.allocations),
            ("module loads", a.module_loads, b.module_loads),
            ("captures", a.captures, b.captures),
            ("device-wide waits", a.waits, b.waits),
            ("copies", a.copies, b.copies),
            ("single launches", a.launches, b.launches),
        ];
        let grown = still.into_iter().find(|(_, before, after)| before != after);
        grown.map(|(what, before, after)| format!("{what} grew from {before} to {after} while steps ran"))
    }

    pub fn diverged(&self) -> bool {
        self.buckets.iter().any(|bucket| bucket.first_divergence.is_some())
    }

    fn is_ready(&self) -> bool {
        self.stage == FailureStage::None && !self.buckets.is_empty() && self.buckets.iter().all(BucketReport::is_ready)
    }

    /// Checks, metrics and the report itself.
    pub fn record(&self, draft: &mut Draft) {
        draft.check("full_decode_capture_ready", self.is_ready(), self.failure_summary.clone());
        for bucket in &self.buckets {
            let samples = bucket.replay_us.n as u64;
            draft.check(
                &format!("bucket_{}", bucket.bucket),
                bucket.is_ready(),
                format!("{} of {} steps equal to eager", bucket.steps_verified, bucket.replay_count),
            );
            draft.metric(&format!("replay_us_b{}_p50", bucket.bucket), bucket.replay_us.p50, "us", samples, None);
            draft.metric(&format!("capture_us_b{}", bucket.bucket), bucket.capture_us, "us", 1, None);
        }
        draft.detail("cuda_graph_readiness", self.json());
    }

    fn json(&self) -> Value {
        let all = |of: fn(&BucketReport) -> bool| !self.buckets.is_empty() && self.buckets.iter().all(of);
        let ready = self.is_ready();
        let (captured, instantiated, replayed) = (all(|b| b.captured), all(|b| b.instantiated), all(|b| b.replayed));
        let verified = all(BucketReport::verified);
        let replay_count: usize = self.buckets.iter().map(|b| b.replay_count).sum();
        let verified_count: usize = self.buckets.iter().map(|b| b.steps_verified).sum();
        let blockers = match self.stage {
            FailureStage::None => json!([]),
            stage => json!([{
                "id": "decode_graph_probe_verification", "source": stage, "reason": self.failure_summary,
            }]),
        };
        let coverage = match (captured, instantiated, replayed, verified) {
            (true, true, true, true) if ready => "captured_replayed_verified",
            (true, true, true, true) => "verified_but_incomplete",
            (true, true, true, false) => "replayed_but_not_verified",
            (true, true, false, _) => "instantiated_but_not_replayed",
            (true, false, ..) => "captured_but_not_instantiated",
            _ => "failed",
        };
        json!({
            "schema": 3,
            "backend": self.backend,
            "batch_size": self.buckets.iter().map(|b| b.bucket).max(),
            "full_decode_capture_ready": ready,
            "status": if ready { "full_decode_capture_ready" } else { "blocked_full_decode_path" },
            "blockers": blockers,
            "coverage_status": coverage,
            "metrics": {
                "host_dispatch_calls": 0, "host_combine_calls": 0, "host_dispatch_elements": 0, "host_combine_elements": 0,
                "nccl_dense_exchange_calls": 0, "nccl_combine_calls": 0, "nccl_dense_exchange_elements": 0,
                "nccl_combine_elements": 0, "nccl_dispatch_local_routes": 0, "nccl_dispatch_remote_routes": 0,
                "nccl_combine_routes": 0,
            },
            "counters": {"before": self.counters_before, "after": self.counters_after},
            "nccl_graph_smoke_requested": self.smoke.is_some(),
            "nccl_graph_smoke": match self.smoke {
                None => "not_applicable",
                Some(true) => "passed",
                Some(false) => "failed",
            },
            "full_decode_graph_probe": {
                "requested": true, "captured": captured, "instantiated": instantiated, "replayed": replayed,
                "verified": verified, "replay_count": replay_count, "verified_replay_count": verified_count,
                "failure_stage": self.stage, "failure_summary": if ready { "" } else { &self.failure_summary },
                "summary": format!("{verified_count} of {replay_count} steps over {} buckets equal to eager", self.buckets.len()),
                "blockers": blockers, "capture_mode": "thread_local",
            },
            "claim_boundary": "graphs of the listed buckets replay as eager runs, for this model, machine and contract; not throughput",
            "buckets": self.buckets,
        })
    }
}
