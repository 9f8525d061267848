//! The op set: one op is one graph node. An op is data that names buffers and weights by id.
//!
//! Plan builders construct ops, `Plan::verify` asks them what they touch, the CPU device runs `Op::run`, the CUDA
//! device launches the kernel of the same name. **Invariant:** an op never holds an address, and what it computes for a
//! row depends on that row's own inputs alone.

mod embed;
pub mod exchange;
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
mod rows;
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

use crate::cpu::{CpuMemory, OpError};
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, Specs, WeightId};

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
    /// `[16]` step-wide words, as in `step`.
    pub step: BufferId,
}

/// Words of `RowBuffers::step`.
pub mod step {
    pub const WORDS: usize = 16;
    /// `entry::feature` mask.
    pub const FEATURES: usize = 0;
    /// Rows and logit rows used.
    pub const ROWS: usize = 1;
    pub const LOGIT_ROWS: usize = 2;
    /// Step number, low and high word.
    pub const STEP_LO: usize = 3;
    pub const STEP_HI: usize = 4;
    /// Routed (token, expert) pairs of live rows: on this rank's experts, on others'.
    pub const ROUTES_LOCAL: usize = 5;
    pub const ROUTES_REMOTE: usize = 6;
    /// Rows of the plan that are pad rows.
    pub const PAD_ROWS: usize = 7;
    /// Start time in ns, low and high word.
    pub const START_NS: usize = 8;
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

/// Most blocks that may fold columns of one head, each with copies of its own of every m and l (`fold.cuh`).
pub const PARTIAL_COPIES: usize = 8;
/// Floats of an attention partial beside its values: the copies of m and l.
pub const PARTIAL_NORMS: usize = 2 * PARTIAL_COPIES;

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

/// What each op answers; `Op` passes its questions on.
trait Operation {
    fn name(&self) -> &'static str;
    fn reads(&self) -> Vec<BufferId>;
    fn writes(&self) -> Vec<BufferId>;
    fn weights(&self) -> Vec<WeightId>;
    fn check(&self, check: &Check) -> Result<(), ShapeError>;
    fn run(&self, memory: &mut CpuMemory) -> Result<(), OpError>;
}

impl Op {
    fn operation(&self) -> &dyn Operation {
        match self {
            Op::Fetch(op) => op,
            Op::Embed(op) => op,
            Op::NormGemm(op) => op,
            Op::MlaPrep(op) => op,
            Op::MlaAttend(op) => op,
            Op::MlaUv(op) => op,
            Op::GqaPrep(op) => op,
            Op::GqaAttend(op) => op,
            Op::GemmAdd(op) => op,
            Op::NormGateUp(op) => op,
            Op::MoeGate(op) => op,
            Op::MoeUp(op) => op,
            Op::MoeDown(op) => op,
            Op::Exchange(op) => op,
            Op::MoeCombine(op) => op,
            Op::Head(op) => op,
            Op::Sample(op) => op,
            Op::Feed(op) => op,
        }
    }

    /// Name of the op, which is also its kernel's.
    pub fn name(&self) -> &'static str {
        self.operation().name()
    }

    /// Buffers whose contents matter to the op. One that is updated in place, wholly or in part, is in `writes` too.
    pub fn reads(&self) -> Vec<BufferId> {
        self.operation().reads()
    }

    /// Buffers that the op writes, scratch included.
    pub fn writes(&self) -> Vec<BufferId> {
        self.operation().writes()
    }

    /// Weights that the op reads.
    pub fn weights(&self) -> Vec<WeightId> {
        self.operation().weights()
    }

    /// Whether the op fits the buffers and weights it names.
    pub fn check(&self, specs: &dyn Specs) -> Result<(), ShapeError> {
        let operation = self.operation();
        operation.check(&Check { op: operation.name(), specs })
    }

    /// The CPU reference: what the op computes.
    pub fn run(&self, memory: &mut CpuMemory) -> Result<(), OpError> {
        self.operation().run(memory)
    }
}
