//! feed: the last node of a step. Advances the slot table, decides ends, writes the step's record and publishes it.
//!
//! For each live SAMPLE logit row: generated += 1, token and position advance, counts when the slot has penalties; ended by NaN, EOS
//! (unless ignore_eos), stop id, max_tokens, context, in that order of precedence. Then the record into
//! `output_ring[step_counter % entries]` (the index of the step's input entry), its header, and last the step number (system-scope release on CUDA); step_counter += 1.

use super::fetch::steps;
use super::{Operation, RowBuffers, Sample, SlotBuffers, step};
use crate::contract::TOP_LOGPROBS_MAX;
use crate::cpu::{CpuMemory, OpError};
use crate::entry::{OUTPUT_HEADER_WORDS, RECORD_WORDS, SLOT_WORDS, feature, logit_row, mix, output, record, slot};
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, DType, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct Feed {
    pub rows: RowBuffers,
    pub slots: SlotBuffers,
    /// The sample op whose outputs are published.
    pub sample: Sample,
    /// `[entries, output_words]` u32, pinned on CUDA.
    pub output_ring: BufferId,
    /// `[4]` u32: 0–1 steps fetched and fed so far (low, high).
    pub step_counter: BufferId,
    /// Entries of the output ring.
    pub entries: usize,
}

impl Operation for Feed {
    fn name(&self) -> &'static str {
        "feed"
    }
    fn reads(&self) -> Vec<BufferId> {
        let (rows, slots, sample) = (&self.rows, &self.slots, &self.sample);
        vec![
            rows.slot,
            rows.position,
            rows.live,
            rows.logit_row,
            rows.logit_kind,
            rows.step,
            slots.token,
            slots.position,
            slots.generation,
            slots.ended,
            slots.generated,
            slots.params,
            slots.counts,
            sample.token,
            sample.logprob,
            sample.rank,
            sample.nan,
            sample.top_ids,
            sample.top_logprobs,
            self.step_counter,
        ]
    }
    fn writes(&self) -> Vec<BufferId> {
        let slots = &self.slots;
        vec![
            slots.token,
            slots.position,
            slots.ended,
            slots.generated,
            slots.counts,
            self.output_ring,
            self.step_counter,
        ]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![]
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        check.row_buffers(&self.rows)?;
        check.slot_buffers(&self.slots)?;
        self.sample.check_outputs(check)?;
        check.holds("entries", self.entries > 0, "at least 1", self.entries)?;
        let words = OUTPUT_HEADER_WORDS + check.specs.logit_rows() * RECORD_WORDS;
        let (_, line) = check.any(self.output_ring, DType::U32, 2)?;
        check.lines(self.output_ring, DType::U32, self.entries, line)?;
        check.holds("output_words", line >= words, "room for a record of each logit row", line)?;
        check.lines(self.step_counter, DType::U32, 4, 1)
    }

    fn run(&self, memory: &mut CpuMemory) -> Result<(), OpError> {
        let done = steps(memory.u32(self.step_counter));
        let mut ring = memory.take_u32(self.output_ring);
        let words = memory.stride(self.output_ring);
        let at = (done % self.entries as u64) as usize * words;
        self.publish(memory, &mut ring[at..at + words]);
        memory.put_u32(self.output_ring, ring);
        let done = done + 1;
        memory.u32_mut(self.step_counter)[..2].copy_from_slice(&[done as u32, (done >> 32) as u32]);
        Ok(())
    }
}

impl Feed {
    /// Writes the step's records and, last, its number.
    fn publish(&self, memory: &mut CpuMemory, output: &mut [u32]) {
        let (header, records) = output.split_at_mut(OUTPUT_HEADER_WORDS);
        let count = memory.u32(self.rows.step)[step::LOGIT_ROWS];
        let records = &mut records[..count as usize * RECORD_WORDS];
        records.fill(0);
        for (at, record) in records.chunks_exact_mut(RECORD_WORDS).enumerate() {
            if memory.u32(self.rows.logit_kind)[at] != 0 {
                self.settle(memory, at, record);
            }
        }
        let checksum = (0..).zip(&*records).fold(0, |sum, (at, &word)| sum ^ mix(at, word));

        let end_ns = memory.clock.elapsed().as_nanos() as u64;
        let words = memory.u32(self.rows.step);
        header.fill(0);
        header[output::RECORDS] = count;
        header[output::START_NS..][..2].copy_from_slice(&words[step::START_NS..][..2]);
        header[output::END_NS..][..2].copy_from_slice(&[end_ns as u32, (end_ns >> 32) as u32]);
        header[output::ROUTES_LOCAL] = words[step::ROUTES_LOCAL];
        header[output::ROUTES_REMOTE] = words[step::ROUTES_REMOTE];
        header[output::PAD_ROWS] = words[step::PAD_ROWS];
        header[output::CHECKSUM] = checksum;
        header[output::STEP_LO] = words[step::STEP_LO];
        header[output::STEP_HI] = words[step::STEP_HI];
    }

    /// The outcome of live logit row `at`: its record, and its slot's next state.
    fn settle(&self, memory: &mut CpuMemory, at: usize, record: &mut [u32]) {
        let row = memory.u32(self.rows.logit_row)[at] as usize;
        let slot = memory.u32(self.rows.slot)[row] as usize;
        let position = memory.u32(self.rows.position)[row];
        let token = memory.u32(self.sample.token)[at];
        let nan = memory.u32(self.sample.nan)[at] != 0;
        let scored = memory.u32(self.rows.logit_kind)[at] == logit_row::SCORE;

        let mut reason = if nan { record::REASON_NAN } else { 0 };
        if !scored {
            memory.u32_mut(self.slots.generated)[slot] += 1;
            memory.u32_mut(self.slots.token)[slot] = token;
            memory.u32_mut(self.slots.position)[slot] = position + 1;
            let params: [u32; SLOT_WORDS] =
                *memory.u32(self.slots.params)[slot * SLOT_WORDS..].first_chunk().expect("a line of parameters");
            if !nan && params[slot::FLAGS] & slot::PENALTIES != 0 {
                let vocab = memory.stride(self.slots.counts);
                memory.u32_mut(self.slots.counts)[slot * vocab + token as usize] += 1;
            }
            if !nan {
                reason = end_reason(&params, token, memory.u32(self.slots.generated)[slot], position);
            }
        }
        if reason != 0 {
            memory.u32_mut(self.slots.ended)[slot] = 1;
        }

        record[record::SLOT] = slot as u32;
        record[record::GENERATION] = memory.u32(self.slots.generation)[slot];
        record[record::TOKEN] = token;
        record[record::FLAGS] = record::LIVE
            | if scored { record::SCORED } else { 0 }
            | if reason != 0 { record::ENDED | reason << record::REASON_SHIFT } else { 0 };
        record[record::LOGPROB] = memory.f32(self.sample.logprob)[at].to_bits();
        record[record::POSITION] = position;
        record[record::TOKEN_RANK] = memory.u32(self.sample.rank)[at];
        let features = memory.u32(self.rows.step)[step::FEATURES];
        let wanted = memory.u32(self.slots.params)[slot * SLOT_WORDS + slot::TOP_LOGPROBS] as usize;
        if !nan && features & feature::TOP_LOGPROBS != 0 {
            let count = wanted.min(TOP_LOGPROBS_MAX).min(memory.stride(self.slots.counts));
            record[record::TOP_COUNT] = count as u32;
            let ids = &memory.u32(self.sample.top_ids)[at * TOP_LOGPROBS_MAX..][..count];
            record[record::TOP_IDS..][..count].copy_from_slice(ids);
            let logprobs = &memory.f32(self.sample.top_logprobs)[at * TOP_LOGPROBS_MAX..][..count];
            for (word, logprob) in record[record::TOP_LOGPROBS..].iter_mut().zip(logprobs) {
                *word = logprob.to_bits();
            }
        }
    }
}

/// Whether and why a slot ends with the token that made its `generated`-th; 0 when it goes on.
fn end_reason(params: &[u32; SLOT_WORDS], token: u32, generated: u32, position: u32) -> u32 {
    let among = |count: usize, ids: usize| params[ids..][..params[count] as usize].contains(&token);
    // The row's token stood at `position`; the new one is at the next, so the context holds position + 2 tokens.
    let context = position + 2;
    if params[slot::FLAGS] & slot::IGNORE_EOS == 0 && among(slot::EOS_COUNT, slot::EOS_IDS) {
        record::REASON_EOS
    } else if among(slot::STOP_COUNT, slot::STOP_IDS) {
        record::REASON_STOP_ID
    } else if generated >= params[slot::MAX_TOKENS] {
        record::REASON_MAX_TOKENS
    } else if context >= params[slot::CONTEXT] {
        record::REASON_CONTEXT
    } else {
        0
    }
}
