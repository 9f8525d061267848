//! The op set: one op is one graph node. An op is data that names buffers and weights by id.
//!
//! Plan builders construct ops, `Plan::verify` asks them what they touch, the CPU device runs `Op::run`, the CUDA
//! device launches the kernel of the same name. **Invariant:** an op never holds an address, and what it computes for a
//! row depends on that row's own inputs alone.

mod embed;
mod exchange;
mod feed;
mod fetch;
mod gemm_add;
mod gqa_attend;
mod gqa_prep;
mod head;
mod mla_attend;
mod mla_prep;
mod mla_uv;
mod moe_combine;
mod moe_down;
mod moe_gate;
mod moe_up;
mod norm_gate_up;
mod norm_gemm;
mod sample;

pub use embed::Embed;
pub use exchange::{AllGather, Exchange, ExchangeError};
pub use feed::Feed;
pub use fetch::Fetch;
pub use gemm_add::GemmAdd;
pub use gqa_attend::GqaAttend;
pub use gqa_prep::GqaPrep;
pub use head::Head;
pub use mla_attend::MlaAttend;
pub use mla_prep::MlaPrep;
pub use mla_uv::MlaUv;
pub use moe_combine::MoeCombine;
pub use moe_down::{MoeDown, MoeSum};
pub use moe_gate::{MoeGate, Routing, SharedGate, TopkMethod};
pub use moe_up::MoeUp;
pub use norm_gate_up::NormGateUp;
pub use norm_gemm::NormGemm;
pub use sample::Sample;

use crate::spec::BufferId;

/// Per-row inputs that `fetch` fills and most ops read. All u32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowBuffers {
    /// `[R]` slot of the row (pad rows: the pad slot).
    pub slot: BufferId,
    /// `[R]` token id (pad rows: 0).
    pub token: BufferId,
    /// `[R]` position (pad rows: 0).
    pub position: BufferId,
    /// `[R]` 1 for a live row, 0 for a pad row.
    pub live: BufferId,
    /// `[L]` row of each logit row; pad logit rows name row 0.
    pub logit_row: BufferId,
    /// `[L]` 0 = pad, else `entry::logit_row::{SAMPLE, SCORE}`.
    pub logit_kind: BufferId,
    /// `[L]` token to score.
    pub logit_target: BufferId,
    /// `[16]` step-wide words: 0 features, 1 rows used, 2 logit rows used, 3–4 step number, 5 routes local,
    /// 6 routes remote, 7 pad rows, 8–9 start time in ns.
    pub step: BufferId,
}

/// Per-slot state. S = seats + 1: the last one is the pad slot. All u32 unless stated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotBuffers {
    /// `[S]` next token to feed.
    pub token: BufferId,
    /// `[S]` its position.
    pub position: BufferId,
    /// `[S]` generation of the seat's holder.
    pub generation: BufferId,
    /// `[S]` 1 when the holder has ended (or the seat is empty).
    pub ended: BufferId,
    /// `[S]` tokens generated so far.
    pub generated: BufferId,
    /// `[S, pages_per_slot]` block table; entries not owned hold 0.
    pub pages: BufferId,
    /// `[S, SLOT_WORDS]` parameters, laid out as `entry::slot`.
    pub params: BufferId,
    /// `[S, LOGIT_BIAS_MAX, 2]` token, f32 bits.
    pub bias: BufferId,
    /// `[S, vocab]` bit 31: occurs in the prompt; bits 0–30: times generated. Kept only for slots with penalties.
    pub counts: BufferId,
}

/// The paged cache of one layer and how rows find their pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paged {
    /// `[pages, PAGE_TOKENS, width]` bf16.
    pub kv: BufferId,
    /// `[S, pages_per_slot]` u32.
    pub block_table: BufferId,
}

/// Every op.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    Fetch(Fetch),
    Embed(Embed),
    NormGemm(NormGemm),
    MlaPrep(MlaPrep),
    MlaAttend(MlaAttend),
    MlaUv(MlaUv),
    GqaPrep(GqaPrep),
    GqaAttend(GqaAttend),
    GemmAdd(GemmAdd),
    NormGateUp(NormGateUp),
    MoeGate(MoeGate),
    MoeUp(MoeUp),
    MoeDown(MoeDown),
    Exchange(Exchange),
    MoeCombine(MoeCombine),
    Head(Head),
    Sample(Sample),
    Feed(Feed),
}
