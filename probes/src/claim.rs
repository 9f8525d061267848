//! What a kind of evidence may be said to show, and what must not be read into it: one table for every probe.

use serde::{Deserialize, Serialize};

/// A kind of evidence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Label {
    PlanText,
    DirectSingleRow,
    SamePromptDiagnostic,
    DistinctRowDecode,
    MixedRequestServing,
    HttpTrace,
    Reliability,
    Slo,
    Soak,
    GraphReadiness,
    Transport,
    PeerComparison,
    Exactness,
    Attribution,
    MachineState,
}

/// The label of a piece of evidence and the conclusions that it does not carry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    pub label: String,
    pub do_not_infer: String,
}

impl Claim {
    pub fn of(label: Label) -> Self {
        let (label, do_not_infer) = match label {
            Label::PlanText => ("plan text", "that a device runs it, or at what speed"),
            Label::DirectSingleRow => ("direct single-row decode", "batched, mixed or HTTP throughput"),
            Label::SamePromptDiagnostic => {
                ("same-prompt diagnostic", "serving throughput: identical rows route alike and flatter a MoE model")
            }
            Label::DistinctRowDecode => {
                ("distinct-row decode", "HTTP throughput, prefill cost or latency under arrivals")
            }
            Label::MixedRequestServing => ("mixed-request serving", "other mixes, prompt lengths or machines"),
            Label::HttpTrace => ("HTTP trace", "that requests outside the trace were answered alike"),
            Label::Reliability => {
                ("reliability under the listed scenarios", "throughput, or scenarios that are not listed")
            }
            Label::Slo => ("SLO of the listed profiles", "other profiles, budgets, models or machines"),
            Label::Soak => ("soak over the stated duration", "longer runs, other loads, or peak throughput"),
            Label::GraphReadiness => {
                ("graph readiness for covered shapes", "throughput, or shapes and models not covered")
            }
            Label::Transport => ("transport comparison", "other degrees, machines or links"),
            Label::PeerComparison => {
                ("peer comparison under one client contract", "any direction where contract, version or noise differ")
            }
            Label::Exactness => {
                ("exactness of the listed cases and legs", "other prompts, architectures or precisions")
            }
            Label::Attribution => ("attribution of one step's time", "end-to-end speed: instrumented steps are slower"),
            Label::MachineState => ("state of this machine", "that a model runs on it"),
        };
        Claim { label: label.into(), do_not_infer: do_not_infer.into() }
    }
}
