//! A step as values: what the engine asks for and what it hears back, and their encoding as ring words.
//!
//! Built by the scheduler's `fill`, consumed by devices; decoded records go to the scheduler's `settle`.
//! **Invariant:** a step names every slot with the generation it means, so a late record can never reach a new holder.

mod codec;
#[cfg(test)]
mod tests;

pub use codec::{check, decode, encode};

use crate::spec::SamplingSpec;
use slotgraph_kernels::entry::EntryLayout;
use std::sync::Arc;

/// A seat in the slot table, 0…slots_max−1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);

/// Counts the holders of a seat; a record of an earlier holder is dropped by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Generation(pub u32);

/// A page of the pool. Page 0 belongs to pad rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId(pub u32);

/// One line of the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowInput {
    pub slot: SlotId,
    pub generation: Generation,
    pub feed: RowFeed,
    pub want: RowWant,
}

/// Where a row's token comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowFeed {
    /// A decode row: token and position from the slot table.
    FromSlot,
    /// A prefill (or forced) row.
    Given { token: u32, position: u32, generated: bool },
}

/// What a row's logits are wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowWant {
    Nothing,
    /// Draw the next token and advance the slot.
    Sample,
    /// Logprob of this token (prompt logprobs).
    Score(u32),
}

/// A seat's new holder.
#[derive(Clone, Debug, PartialEq)]
pub struct NewSlot {
    pub slot: SlotId,
    pub generation: Generation,
    pub sampling: Arc<SamplingSpec>,
    /// Sample index among its prompt's choices.
    pub choice: u32,
    /// Tokens generated before (re-entry after preemption).
    pub generated: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageUpdate {
    pub slot: SlotId,
    /// Index in the slot's block table.
    pub index: u32,
    pub page: PageId,
}

/// One step, as the engine asks for it. Reused: `clear` keeps the capacity.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepInput {
    /// 1 for the first step; consecutive.
    pub step: u64,
    /// R of the plan to run: one of the configured buckets, ≥ rows.len().
    pub bucket: usize,
    /// Decode rows first, then prefill rows; prefill rows of a slot are consecutive and ascending.
    pub rows: Vec<RowInput>,
    pub new_slots: Vec<NewSlot>,
    pub retired: Vec<(SlotId, Generation)>,
    pub pages: Vec<PageUpdate>,
    /// Union of `entry::feature` bits over the rows that sample or score.
    pub features: u32,
}

impl StepInput {
    pub fn clear(&mut self) {
        self.step = 0;
        self.bucket = 0;
        self.rows.clear();
        self.new_slots.clear();
        self.retired.clear();
        self.pages.clear();
        self.features = 0;
    }
    /// Rows whose logits are wanted.
    pub fn logit_rows(&self) -> usize {
        self.rows.iter().filter(|row| row.want != RowWant::Nothing).count()
    }
}

/// Why a slot ended on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    Eos,
    StopId,
    MaxTokens,
    Context,
    Nan,
}

/// The outcome of one logit row.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    pub slot: SlotId,
    pub generation: Generation,
    /// Position of the row whose logits these are.
    pub position: u32,
    pub token: u32,
    pub scored: bool,
    pub logprob: f32,
    /// 1-based rank of the token in the raw distribution.
    pub rank: u32,
    /// Best first.
    pub top: Vec<(u32, f32)>,
    pub ended: Option<EndReason>,
}

/// What one settled step did. Reused.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    pub step: u64,
    /// In logit-row order; rows that were pad rows on the device are absent.
    pub records: Vec<Record>,
    /// Device time of the step in nanoseconds.
    pub device_ns: u64,
    pub routes_local: u64,
    pub routes_remote: u64,
    pub pad_rows: u32,
    /// Equal on every rank.
    pub checksum: u32,
}

/// Sizes and limits chosen at start; every table and ring follows from them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Seats.
    pub slots_max: usize,
    /// Pages in the pool, page 0 included.
    pub pages: usize,
    /// Block-table entries a slot.
    pub pages_per_slot: usize,
    /// Ascending; each gets a plan.
    pub buckets: Vec<usize>,
    /// Steps enqueued beyond the last settled one, 0…2.
    pub launch_ahead: usize,
    /// Tokens of context one request may use.
    pub max_model_len: usize,
    /// Most prefill rows a step.
    pub prefill_chunk: usize,
}

impl StepLimits {
    pub fn rows_max(&self) -> usize {
        *self.buckets.last().expect("a configuration has at least one bucket")
    }
    /// Logit rows L of bucket R: every row in small buckets, 128 (or every seat) in large ones.
    pub fn logit_rows(&self, bucket: usize) -> usize {
        bucket.min(self.slots_max.max(128))
    }
    /// Entries of the input and output rings.
    pub fn ring_entries(&self) -> usize {
        self.launch_ahead + 2
    }
    pub fn entry_layout(&self) -> EntryLayout {
        EntryLayout {
            rows_max: self.rows_max(),
            logit_rows_max: self.logit_rows(self.rows_max()),
            new_slots_max: self.slots_max,
            retired_max: 2 * self.slots_max,
            pages_max: self.rows_max() + 2 * self.slots_max + self.pages_per_slot,
            bias_max: 4 * slotgraph_kernels::contract::LOGIT_BIAS_MAX,
        }
    }
}
