//! fetch: the first node of a step. Copies the ring entry of this step to the slot tables and the row buffers.
//!
//! Entry = `input_ring[(step_counter % entries)]`, words as in `crate::entry`. In order: retirements (`ended` = 1 where the
//! generation matches), new slots (params, generation, ended = 0, generated, bias pairs; counts row zeroed when the slot
//! has penalties), page updates, rows. A row is live when its slot is not the pad slot, the generations match and the slot has
//! not ended; otherwise it becomes a pad row on the device: pad slot, token 0, position 0, live 0. A live row without
//! FROM_SLOT marks its token in `counts` when the slot has penalties. Logit rows of pad rows become pad.
//! Block tables of a slot are cleared to 0 when the seat gets a new holder, before page updates.

use super::{Operation, RowBuffers, SlotBuffers};
use crate::cpu::{CpuMemory, OpError};
use crate::entry::{HEADER_WORDS, ROW_WORDS};
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, DType, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct Fetch {
    pub rows: RowBuffers,
    pub slots: SlotBuffers,
    /// `[entries, entry_words]` u32, pinned on CUDA.
    pub input_ring: BufferId,
    /// `[4]` u32: 0–1 steps fetched so far (low, high); `feed` advances it.
    pub step_counter: BufferId,
    /// Entries of the input ring.
    pub entries: usize,
}

impl Operation for Fetch {
    fn name(&self) -> &'static str {
        "fetch"
    }
    fn reads(&self) -> Vec<BufferId> {
        let slots = &self.slots;
        vec![
            self.input_ring,
            self.step_counter,
            slots.token,
            slots.position,
            slots.generation,
            slots.ended,
            slots.generated,
            slots.pages,
            slots.params,
            slots.bias,
            slots.counts,
        ]
    }
    fn writes(&self) -> Vec<BufferId> {
        let (rows, slots) = (&self.rows, &self.slots);
        vec![
            rows.slot,
            rows.token,
            rows.position,
            rows.live,
            rows.logit_row,
            rows.logit_kind,
            rows.logit_target,
            rows.step,
            slots.generation,
            slots.ended,
            slots.generated,
            slots.pages,
            slots.params,
            slots.bias,
            slots.counts,
        ]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![]
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        check.row_buffers(&self.rows)?;
        check.slot_buffers(&self.slots)?;
        check.holds("entries", self.entries > 0, "at least 1", self.entries)?;
        let (_, line) = check.any(self.input_ring, DType::U32, 2)?;
        check.lines(self.input_ring, DType::U32, self.entries, line)?;
        let words = HEADER_WORDS + check.specs.rows() * ROW_WORDS;
        check.holds("entry_words", line >= words, "room for the header and each row", line)?;
        check.lines(self.step_counter, DType::U32, 4, 1)
    }

    fn run(&self, _memory: &mut CpuMemory) -> Result<(), OpError> {
        Err(OpError::NotBuilt(self.name()))
    }
}
