//! The byte layout of a step's input entry and output record: 32-bit words, field by field.
//!
//! Written by `graphs::step` (encode) and the `feed` op (records); read by the `fetch` op and `graphs::step` (decode).
//! The same words go over a pinned ring on CUDA and through a plain vector on the CPU. The offsets reach CUDA sources
//! as `-D` names. **Invariant:** everything that changes from step to step is in an entry; a captured kernel takes none
//! of it as a scalar.

/// Words of the entry header.
pub const HEADER_WORDS: usize = 32;
/// Header fields.
pub mod header {
    /// Step number, low and high word. The first step is 1.
    pub const STEP_LO: usize = 0;
    pub const STEP_HI: usize = 1;
    /// Rows used (the rest up to the plan's R are pad rows).
    pub const ROWS: usize = 2;
    /// Logit rows used (the rest up to the plan's L are pad).
    pub const LOGIT_ROWS: usize = 3;
    /// Step-wide `feature` mask: the union over the rows that this step samples or scores.
    pub const FEATURES: usize = 4;
    /// Count and word offset (from the entry's start) of each variable section.
    pub const NEW_SLOTS: usize = 5;
    pub const NEW_SLOTS_AT: usize = 6;
    pub const RETIRED: usize = 7;
    pub const RETIRED_AT: usize = 8;
    pub const PAGES: usize = 9;
    pub const PAGES_AT: usize = 10;
    pub const BIAS: usize = 11;
    pub const BIAS_AT: usize = 12;
    /// Word offsets of the two fixed-stride sections.
    pub const ROWS_AT: usize = 13;
    pub const LOGIT_ROWS_AT: usize = 14;
    /// Words of the whole entry that are used (what must be copied).
    pub const USED_WORDS: usize = 15;
}

/// What some row of the step asks of the sampler; optional parts leave at once when their bit is off.
pub mod feature {
    /// Some row draws Gumbel noise.
    pub const RANDOM: u32 = 1;
    pub const PENALTIES: u32 = 1 << 1;
    pub const BIAS: u32 = 1 << 2;
    /// Some row uses min_p, top_k or top_p.
    pub const TRUNCATION: u32 = 1 << 3;
    /// Some row is below its min_tokens.
    pub const MIN_TOKENS: u32 = 1 << 4;
    /// Some row wants the chosen token's logprob.
    pub const LOGPROBS: u32 = 1 << 5;
    /// Some row wants alternatives.
    pub const TOP_LOGPROBS: u32 = 1 << 6;
    /// Some row is scored against a given token.
    pub const SCORE: u32 = 1 << 7;
}

/// Words of one row: a line of the batch.
pub const ROW_WORDS: usize = 5;
/// Row fields.
pub mod row {
    pub const SLOT: usize = 0;
    /// Must equal the slot's generation, or the row is a pad row.
    pub const GENERATION: usize = 1;
    pub const FLAGS: usize = 2;
    /// Token and position, unless FROM_SLOT.
    pub const TOKEN: usize = 3;
    pub const POSITION: usize = 4;
    /// Flag: token and position come from the slot table (a decode row).
    pub const FROM_SLOT: u32 = 1;
    /// Flag: the token was generated earlier by this request (recompute after preemption); counts for penalties as
    /// generated rather than as prompt.
    pub const GENERATED: u32 = 2;
}

/// Words of one logit row: a row whose logits are needed.
pub const LOGIT_ROW_WORDS: usize = 3;
/// Logit-row fields.
pub mod logit_row {
    /// Index into the step's rows.
    pub const ROW: usize = 0;
    /// SAMPLE or SCORE.
    pub const KIND: usize = 1;
    /// The token to score (SCORE only).
    pub const TARGET: usize = 2;
    /// Draw the next token and advance the slot.
    pub const SAMPLE: u32 = 1;
    /// Report the logprob of TARGET and the alternatives; the slot does not advance.
    pub const SCORE: u32 = 2;
}

/// Words of one retirement: slot, generation.
pub const RETIRED_WORDS: usize = 2;
/// Words of one page update: slot, index in the slot's block table, page.
pub const PAGE_WORDS: usize = 3;
/// Words of one logit_bias pair: token, f32 bits.
pub const BIAS_WORDS: usize = 2;

/// Words of one new slot's record, which is also the row of the `slot_params` table.
pub const SLOT_WORDS: usize = 56;
/// New-slot fields. "bits" means the f32's bit pattern.
pub mod slot {
    use crate::contract::{EOS_IDS_MAX, STOP_IDS_MAX};
    pub const SLOT: usize = 0;
    pub const GENERATION: usize = 1;
    pub const FLAGS: usize = 2;
    pub const TEMPERATURE: usize = 3; // bits
    pub const TOP_P: usize = 4; // bits; 1.0 is off
    pub const MIN_P: usize = 5; // bits; 0.0 is off
    pub const TOP_K: usize = 6; // 0 is off
    pub const PRESENCE: usize = 7; // bits
    pub const FREQUENCY: usize = 8; // bits
    pub const REPETITION: usize = 9; // bits; 1.0 is off
    pub const SEED_LO: usize = 10;
    pub const SEED_HI: usize = 11;
    /// Sample index among its prompt's choices: part of the noise counter.
    pub const CHOICE: usize = 12;
    pub const MIN_TOKENS: usize = 13;
    /// Generated tokens after which the request ends by length.
    pub const MAX_TOKENS: usize = 14;
    /// Tokens of context (prompt + generated) after which it ends by length.
    pub const CONTEXT: usize = 15;
    /// Alternatives to report, 0…20.
    pub const TOP_LOGPROBS: usize = 16;
    /// This slot's logit_bias pairs inside the entry's bias section.
    pub const BIAS_START: usize = 17;
    pub const BIAS_COUNT: usize = 18;
    /// Tokens generated before this seat was taken (re-entry after preemption).
    pub const GENERATED: usize = 19;
    pub const EOS_COUNT: usize = 20;
    pub const EOS_IDS: usize = 21;
    pub const STOP_COUNT: usize = EOS_IDS + EOS_IDS_MAX;
    pub const STOP_IDS: usize = STOP_COUNT + 1;
    pub const END: usize = STOP_IDS + STOP_IDS_MAX;
    const _: () = assert!(END <= super::SLOT_WORDS, "the slot record must hold all its fields");

    /// Flags.
    pub const IGNORE_EOS: u32 = 1;
    pub const GREEDY: u32 = 1 << 1;
    pub const PENALTIES: u32 = 1 << 2;
    pub const BIAS: u32 = 1 << 3;
    pub const TRUNCATION: u32 = 1 << 4;
    pub const LOGPROBS: u32 = 1 << 5;
}

/// Words of the output record's header.
pub const OUTPUT_HEADER_WORDS: usize = 32;
/// Output header fields.
pub mod output {
    /// Step number: written last, with system-scope release; the host polls it.
    pub const STEP_LO: usize = 0;
    pub const STEP_HI: usize = 1;
    /// Logit-row records that follow.
    pub const RECORDS: usize = 2;
    /// Nanoseconds of the device's global timer, low and high words.
    pub const START_NS: usize = 4;
    pub const END_NS: usize = 6;
    /// Routed (token, expert) pairs of live rows in this step, summed over layers: on this rank's experts, on others'.
    pub const ROUTES_LOCAL: usize = 8;
    pub const ROUTES_REMOTE: usize = 9;
    /// Rows that were pad rows on the device.
    pub const PAD_ROWS: usize = 10;
    /// Order-independent checksum of the records, equal on every rank: the xor over their words of `super::mix`.
    pub const CHECKSUM: usize = 11;
}

/// One record word's share of the checksum; `at` counts words from the first record. (The finaliser of MurmurHash3.)
pub const fn mix(at: u32, word: u32) -> u32 {
    let mut h = word ^ at.wrapping_mul(0x9e37_79b9);
    h = (h ^ (h >> 16)).wrapping_mul(0x85eb_ca6b);
    h = (h ^ (h >> 13)).wrapping_mul(0xc2b2_ae35);
    h ^ (h >> 16)
}

/// Words of one record: the outcome of one logit row. Words that a record does not use, and all words of a pad logit row's, are 0.
pub const RECORD_WORDS: usize = 48;
/// Record fields.
pub mod record {
    use crate::contract::TOP_LOGPROBS_MAX;
    pub const SLOT: usize = 0;
    pub const GENERATION: usize = 1;
    /// The sampled token, or the scored one.
    pub const TOKEN: usize = 2;
    pub const FLAGS: usize = 3;
    /// Logprob (raw distribution) of TOKEN, f32 bits.
    pub const LOGPROB: usize = 4;
    /// Position of the row whose logits these are.
    pub const POSITION: usize = 5;
    /// Alternatives that follow.
    pub const TOP_COUNT: usize = 6;
    /// 1-based rank of TOKEN in the raw distribution (1 = the argmax).
    pub const TOKEN_RANK: usize = 7;
    pub const TOP_IDS: usize = 8;
    pub const TOP_LOGPROBS: usize = TOP_IDS + TOP_LOGPROBS_MAX;
    const _: () = assert!(TOP_LOGPROBS + TOP_LOGPROBS_MAX <= super::RECORD_WORDS);

    /// Flag: the row was live on the device; without it the record says nothing.
    pub const LIVE: u32 = 1;
    /// Flag: SCORE record.
    pub const SCORED: u32 = 2;
    /// Flag: the slot ended with this token; the reason is in bits 8…15.
    pub const ENDED: u32 = 4;
    pub const REASON_SHIFT: u32 = 8;
    pub const REASON_EOS: u32 = 1;
    pub const REASON_STOP_ID: u32 = 2;
    pub const REASON_MAX_TOKENS: u32 = 3;
    pub const REASON_CONTEXT: u32 = 4;
    /// A logit was NaN: the token means nothing and the request fails.
    pub const REASON_NAN: u32 = 5;
}

/// Capacities chosen at start; they fix the size of an entry and of an output record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryLayout {
    /// Largest R over all plans.
    pub rows_max: usize,
    /// Largest L over all plans.
    pub logit_rows_max: usize,
    pub new_slots_max: usize,
    pub retired_max: usize,
    pub pages_max: usize,
    /// logit_bias pairs a step may bring in.
    pub bias_max: usize,
}

impl EntryLayout {
    /// Word offsets of the sections: rows, logit rows, new slots, retired, pages, bias, end.
    pub fn sections(&self) -> [usize; 7] {
        let mut at = HEADER_WORDS;
        let mut next = |count: usize, words: usize| {
            let start = at;
            at += (count * words).next_multiple_of(4);
            start
        };
        let rows = next(self.rows_max, ROW_WORDS);
        let logits = next(self.logit_rows_max, LOGIT_ROW_WORDS);
        let new = next(self.new_slots_max, SLOT_WORDS);
        let retired = next(self.retired_max, RETIRED_WORDS);
        let pages = next(self.pages_max, PAGE_WORDS);
        let bias = next(self.bias_max, BIAS_WORDS);
        [rows, logits, new, retired, pages, bias, at]
    }
    /// Words of one input entry.
    pub fn entry_words(&self) -> usize {
        self.sections()[6]
    }
    /// Words of one output record.
    pub fn output_words(&self) -> usize {
        OUTPUT_HEADER_WORDS + self.logit_rows_max * RECORD_WORDS
    }
}
