//! fetch: the first node of a step. Copies the ring entry of this step to the slot tables and the row buffers.
//!
//! Entry = `input_ring[(step_counter % entries)]`, words as in `crate::entry`. In order: retirements (`ended` = 1 where the
//! generation matches), new slots (params, generation, ended = 0, generated, bias pairs; counts row zeroed when the slot
//! has penalties), page updates, rows. A row is live when its slot is not the pad slot, the generations match and the slot has
//! not ended; otherwise it becomes a pad row on the device: pad slot, token 0, position 0, live 0. A live row without
//! FROM_SLOT marks its token in `counts` when the slot has penalties. Logit rows of pad rows become pad.
//! Block tables of a slot are cleared to 0 when the seat gets a new holder, before page updates.

use super::{Operation, RowBuffers, SlotBuffers, step};
use crate::contract::{EOS_IDS_MAX, LOGIT_BIAS_MAX, STOP_IDS_MAX};
use crate::cpu::{CpuMemory, OpError};
use crate::entry::{BIAS_WORDS, HEADER_WORDS, LOGIT_ROW_WORDS, ROW_WORDS, SLOT_WORDS, header, row, slot};
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

    fn run(&self, memory: &mut CpuMemory) -> Result<(), OpError> {
        let ring = memory.take_u32(self.input_ring);
        let words = memory.stride(self.input_ring);
        let done = steps(memory.u32(self.step_counter));
        let at = (done % self.entries as u64) as usize * words;
        let entry = Entry { step: done + 1, words: &ring[at..at + words] };
        let fetched = self.fetch(memory, &entry);
        memory.put_u32(self.input_ring, ring);
        fetched
    }
}

/// One entry of the input ring, read with every count and index checked.
struct Entry<'a> {
    /// The step that is due.
    step: u64,
    words: &'a [u32],
}

impl<'a> Entry<'a> {
    fn refuse(&self, field: &'static str, got: u32) -> OpError {
        OpError::Entry { step: self.step, field, got: u64::from(got) }
    }

    /// A word that must lie below `limit`.
    fn below(&self, field: &'static str, word: u32, limit: usize) -> Result<usize, OpError> {
        if (word as usize) < limit { Ok(word as usize) } else { Err(self.refuse(field, word)) }
    }

    /// `count` items of N words from offset `at`, both given by their header fields.
    fn section<const N: usize>(&self, field: &'static str, count: usize, at: usize) -> Result<&'a [[u32; N]], OpError> {
        let count = self.words[count];
        let start = self.words[at] as usize;
        let words = self.words.get(start..).and_then(|words| words.get(..count as usize * N));
        words.map(|words| words.as_chunks().0).ok_or_else(|| self.refuse(field, count))
    }
}

/// A step counter's two words as one number.
pub(super) fn steps(counter: &[u32]) -> u64 {
    u64::from(counter[0]) | u64::from(counter[1]) << 32
}

impl Fetch {
    fn fetch(&self, memory: &mut CpuMemory, entry: &Entry) -> Result<(), OpError> {
        let due = [entry.words[header::STEP_LO], entry.words[header::STEP_HI]];
        if steps(&due) != entry.step {
            return Err(OpError::Entry { step: entry.step, field: "step", got: steps(&due) });
        }
        self.retire(memory, entry)?;
        self.seat(memory, entry)?;
        let (slots, pages_per_slot) = (memory.u32(self.slots.generation).len(), memory.stride(self.slots.pages));
        for &[slot, index, page] in entry.section("page updates", header::PAGES, header::PAGES_AT)? {
            let slot = entry.below("slot of a page update", slot, slots)?;
            let index = entry.below("index of a page update", index, pages_per_slot)?;
            memory.u32_mut(self.slots.pages)[slot * pages_per_slot + index] = page;
        }
        let pad_rows = self.fill_rows(memory, entry)?;
        self.fill_logit_rows(memory, entry)?;

        let start_ns = memory.clock.elapsed().as_nanos() as u64;
        let words = memory.u32_mut(self.rows.step);
        words.fill(0);
        words[step::FEATURES] = entry.words[header::FEATURES];
        words[step::ROWS] = entry.words[header::ROWS];
        words[step::LOGIT_ROWS] = entry.words[header::LOGIT_ROWS];
        words[step::STEP_LO..][..2].copy_from_slice(&due);
        words[step::PAD_ROWS] = pad_rows;
        words[step::START_NS..][..2].copy_from_slice(&[start_ns as u32, (start_ns >> 32) as u32]);
        Ok(())
    }

    fn retire(&self, memory: &mut CpuMemory, entry: &Entry) -> Result<(), OpError> {
        let slots = memory.u32(self.slots.generation).len();
        for &[slot, generation] in entry.section("retired slots", header::RETIRED, header::RETIRED_AT)? {
            let slot = entry.below("retired slot", slot, slots)?;
            if memory.u32(self.slots.generation)[slot] == generation {
                memory.u32_mut(self.slots.ended)[slot] = 1;
            }
        }
        Ok(())
    }

    /// Gives seats to their new holders.
    fn seat(&self, memory: &mut CpuMemory, entry: &Entry) -> Result<(), OpError> {
        let pad_slot = memory.u32(self.slots.generation).len() - 1;
        let (pages_per_slot, vocab) = (memory.stride(self.slots.pages), memory.stride(self.slots.counts));
        let bias: &[[u32; BIAS_WORDS]] = entry.section("bias pairs", header::BIAS, header::BIAS_AT)?;
        let new: &[[u32; SLOT_WORDS]] = entry.section("new slots", header::NEW_SLOTS, header::NEW_SLOTS_AT)?;
        for params in new {
            let slot = entry.below("new slot", params[slot::SLOT], pad_slot)?;
            entry.below("EOS count", params[slot::EOS_COUNT], EOS_IDS_MAX + 1)?;
            entry.below("stop id count", params[slot::STOP_COUNT], STOP_IDS_MAX + 1)?;
            memory.u32_mut(self.slots.params)[slot * SLOT_WORDS..][..SLOT_WORDS].copy_from_slice(params);
            memory.u32_mut(self.slots.generation)[slot] = params[slot::GENERATION];
            memory.u32_mut(self.slots.ended)[slot] = 0;
            memory.u32_mut(self.slots.generated)[slot] = params[slot::GENERATED];
            memory.u32_mut(self.slots.pages)[slot * pages_per_slot..][..pages_per_slot].fill(0);
            if params[slot::FLAGS] & slot::PENALTIES != 0 {
                memory.u32_mut(self.slots.counts)[slot * vocab..][..vocab].fill(0);
            }
            let count = entry.below("bias count", params[slot::BIAS_COUNT], LOGIT_BIAS_MAX + 1)?;
            let pairs = bias.get(params[slot::BIAS_START] as usize..).and_then(|bias| bias.get(..count));
            let pairs = pairs.ok_or_else(|| entry.refuse("bias start", params[slot::BIAS_START]))?;
            memory.u32_mut(self.slots.bias)[slot * LOGIT_BIAS_MAX * BIAS_WORDS..][..count * BIAS_WORDS]
                .copy_from_slice(pairs.as_flattened());
        }
        Ok(())
    }

    /// Fills the row buffers up to R; gives the number of pad rows.
    fn fill_rows(&self, memory: &mut CpuMemory, entry: &Entry) -> Result<u32, OpError> {
        let pad_slot = memory.u32(self.slots.generation).len() - 1;
        let vocab = memory.stride(self.slots.counts);
        let rows: &[[u32; ROW_WORDS]] = entry.section("rows", header::ROWS, header::ROWS_AT)?;
        memory.rows = entry.below("rows", entry.words[header::ROWS], memory.plan_rows + 1)?;
        let mut pad_rows = 0;
        for at in 0..memory.plan_rows {
            let live = rows.get(at).filter(|row| {
                let slot = row[row::SLOT] as usize;
                slot < pad_slot
                    && memory.u32(self.slots.generation)[slot] == row[row::GENERATION]
                    && memory.u32(self.slots.ended)[slot] == 0
            });
            let (slot, token, position) = match live {
                None => {
                    pad_rows += 1;
                    (pad_slot, 0, 0)
                }
                Some(row) if row[row::FLAGS] & row::FROM_SLOT != 0 => {
                    let slot = row[row::SLOT] as usize;
                    (slot, memory.u32(self.slots.token)[slot], memory.u32(self.slots.position)[slot])
                }
                Some(row) => {
                    let (slot, token) = (row[row::SLOT] as usize, row[row::TOKEN]);
                    entry.below("token", token, vocab)?;
                    self.count(memory, slot, token, row[row::FLAGS] & row::GENERATED != 0);
                    (slot, token, row[row::POSITION])
                }
            };
            memory.u32_mut(self.rows.slot)[at] = slot as u32;
            memory.u32_mut(self.rows.token)[at] = token;
            memory.u32_mut(self.rows.position)[at] = position;
            memory.u32_mut(self.rows.live)[at] = u32::from(live.is_some());
        }
        Ok(pad_rows)
    }

    /// Notes a given token for the penalties of its slot.
    fn count(&self, memory: &mut CpuMemory, slot: usize, token: u32, generated: bool) {
        if memory.u32(self.slots.params)[slot * SLOT_WORDS + slot::FLAGS] & slot::PENALTIES == 0 {
            return;
        }
        let vocab = memory.stride(self.slots.counts);
        let count = &mut memory.u32_mut(self.slots.counts)[slot * vocab + token as usize];
        if generated { *count += 1 } else { *count |= 1 << 31 }
    }

    /// Fills the logit-row buffers up to L.
    fn fill_logit_rows(&self, memory: &mut CpuMemory, entry: &Entry) -> Result<(), OpError> {
        let vocab = memory.stride(self.slots.counts);
        let rows: &[[u32; LOGIT_ROW_WORDS]] = entry.section("logit rows", header::LOGIT_ROWS, header::LOGIT_ROWS_AT)?;
        let limit = memory.plan_logit_rows + 1;
        memory.logit_rows = entry.below("logit rows", entry.words[header::LOGIT_ROWS], limit)?;
        for at in 0..memory.plan_logit_rows {
            let [mut row, mut kind, mut target] = rows.get(at).copied().unwrap_or_default();
            entry.below("row of a logit row", row, memory.plan_rows)?;
            if memory.u32(self.rows.live)[row as usize] == 0 {
                [row, kind, target] = [0; 3];
            }
            entry.below("target of a logit row", target, vocab)?;
            memory.u32_mut(self.rows.logit_row)[at] = row;
            memory.u32_mut(self.rows.logit_kind)[at] = kind;
            memory.u32_mut(self.rows.logit_target)[at] = target;
        }
        Ok(())
    }
}
