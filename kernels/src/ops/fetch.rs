//! fetch: the first node of a step. Copies the ring entry of this step to the slot tables and the row buffers.
//!
//! Entry = `input_ring[(step_counter % entries)]`, words as in `crate::entry`. In order: retirements (`ended` = 1 where the
//! generation matches), new slots (params, generation, ended = 0, generated, bias pairs; counts row zeroed when the slot
//! has penalties), page updates, rows. A row is live when its slot is not the pad slot, the generations match and the slot has
//! not ended; otherwise it becomes a pad row on the device: pad slot, token 0, position 0, live 0. A live row without
//! FROM_SLOT marks its token in `counts` when the slot has penalties. Logit rows of pad rows become pad.
//! Block tables of a slot are cleared to 0 when the seat gets a new holder, before page updates.

use super::{RowBuffers, SlotBuffers};
use crate::spec::BufferId;

#[derive(Clone, Debug, PartialEq)]
pub struct Fetch {
    pub rows: RowBuffers,
    pub slots: SlotBuffers,
    /// `[entries, entry_words]` u32, pinned on CUDA.
    pub input_ring: BufferId,
    /// `[4]` u32: 0–1 steps fetched so far (low, high); `feed` advances it.
    pub step_counter: BufferId,
}
