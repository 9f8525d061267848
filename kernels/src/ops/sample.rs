//! sample: logprobs of the raw distribution and the next token of each logit row, by contract §7.
//!
//! logit_bias → penalties (presence, frequency over generated; repetition over prompt + generated) → min_tokens ban of every EOS and stop
//! id → temperature (below GREEDY_TEMPERATURE: greedy) → min_p → top_k → top_p → argmax(l + Gumbel); ties to the lowest id.
//! Noise: Philox4x32-10 (Salmon et al. 2011), key = seed, counter = (choice, position of the row, id / 4, 0), word id % 4;
//! u = ((word >> 9) + 0.5) · 2⁻²³ (exact in f32 and never 1: with 24 bits the sum would round), noise = −ln(−ln u).
//! Penalties in vLLM's order: repetition (a positive logit is divided by it, another multiplied), then frequency · count, then presence.
//! A slot is below its min_tokens while `generated` < MIN_TOKENS. Truncation reads the temperature-scaled distribution; top_p is over what
//! min_p and top_k left, renormalised, in descending order; a token stays while the mass before it is below top_p, so the top one always does.
//! Logprob and rank are reported for SCORE rows and for slots with the LOGPROBS flag, alternatives for those with TOP_LOGPROBS > 0 as well;
//! otherwise they are 0, whatever the row's neighbours ask for. rank = 1 + the ids with a larger raw logit, or an equal one and a lower id.
//! A row with a NaN logit gets `nan` = 1, token 0 (SCORE rows: the target) and no logprobs.

use super::{Operation, RowBuffers, SlotBuffers, step};
use crate::contract::{GREEDY_TEMPERATURE, LOGIT_BIAS_MAX, TOP_LOGPROBS_MAX};
use crate::cpu::{CpuMemory, OpError};
use crate::entry::{BIAS_WORDS, SLOT_WORDS, feature, logit_row, slot};
use crate::math::sample::{LogSoftmax, Outcome, Penalties, Random, Sampling, Work};
use crate::math::{by_row, sample as math};
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, DType, WeightId};
use std::cell::RefCell;

#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Out `[L]` u32: sampled token (SCORE rows: the target).
    pub token: BufferId,
    /// Out `[L]` f32.
    pub logprob: BufferId,
    /// Out `[L]` u32: 1-based rank of the token.
    pub rank: BufferId,
    /// Out `[L]` u32.
    pub nan: BufferId,
    /// Out `[L, TOP_LOGPROBS_MAX]` u32 and f32, best first.
    pub top_ids: BufferId,
    pub top_logprobs: BufferId,
    /// In/out `[L, vocab]` f32; working space, whose contents mean nothing afterwards.
    pub logits: BufferId,
    /// Scratch f32 `[L, scratch]` for a GPU's two stages.
    pub scratch: BufferId,
    pub rows: RowBuffers,
    pub slots: SlotBuffers,
}

impl Sample {
    /// The outputs' shapes; `feed` asks too.
    pub(super) fn check_outputs(&self, check: &Check) -> Result<(), ShapeError> {
        for (id, dtype) in
            [(self.token, DType::U32), (self.logprob, DType::F32), (self.rank, DType::U32), (self.nan, DType::U32)]
        {
            check.logit_rows(id, dtype, 1)?;
        }
        check.logit_rows(self.top_ids, DType::U32, TOP_LOGPROBS_MAX)?;
        check.logit_rows(self.top_logprobs, DType::F32, TOP_LOGPROBS_MAX)
    }
}

impl Operation for Sample {
    fn name(&self) -> &'static str {
        "sample"
    }
    fn reads(&self) -> Vec<BufferId> {
        let (rows, slots) = (&self.rows, &self.slots);
        vec![
            self.logits,
            rows.slot,
            rows.position,
            rows.logit_row,
            rows.logit_kind,
            rows.logit_target,
            rows.step,
            slots.generated,
            slots.params,
            slots.bias,
            slots.counts,
        ]
    }
    fn writes(&self) -> Vec<BufferId> {
        vec![self.token, self.logprob, self.rank, self.nan, self.top_ids, self.top_logprobs, self.logits, self.scratch]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![]
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        check.row_buffers(&self.rows)?;
        let vocab = check.slot_buffers(&self.slots)?;
        self.check_outputs(check)?;
        check.logit_rows(self.logits, DType::F32, vocab)?;
        check.any(self.scratch, DType::F32, 1)?;
        check.distinct(&[self.logits, self.scratch])
    }

    fn run(&self, memory: &mut CpuMemory) -> Result<(), OpError> {
        let rows = memory.logit_rows_computed();
        let mut outcomes = std::mem::take(&mut memory.scratch.outcomes);
        outcomes.resize(memory.plan_logit_rows.max(outcomes.len()), Outcome::default());
        let vocab = memory.stride(self.logits);
        by_row(&mut outcomes[..rows], 1, vocab * LOGIT_COST, &|at, outcome| {
            outcome[0] = self.sample(memory, at);
        });
        for (at, outcome) in outcomes[..rows].iter().enumerate() {
            memory.u32_mut(self.token)[at] = outcome.token;
            memory.f32_mut(self.logprob)[at] = outcome.logprob;
            memory.u32_mut(self.rank)[at] = outcome.rank;
            memory.u32_mut(self.nan)[at] = u32::from(outcome.nan);
            let line = at * TOP_LOGPROBS_MAX..(at + 1) * TOP_LOGPROBS_MAX;
            memory.u32_mut(self.top_ids)[line.clone()].copy_from_slice(&outcome.top_ids);
            memory.f32_mut(self.top_logprobs)[line].copy_from_slice(&outcome.top_logprobs);
        }
        memory.scratch.outcomes = outcomes;
        Ok(())
    }
}

/// Multiply-adds that one logit of a sampled row costs about as much as.
const LOGIT_COST: usize = 32;

thread_local! {
    /// Working space, kept so that steps do not allocate.
    static WORK: RefCell<Work> = RefCell::new(Work::default());
}

impl Sample {
    fn sample(&self, memory: &CpuMemory, at: usize) -> Outcome {
        let kind = memory.u32(self.rows.logit_kind)[at];
        if kind == 0 {
            return Outcome::default();
        }
        let vocab = memory.stride(self.logits);
        let logits = &memory.f32(self.logits)[at * vocab..][..vocab];
        let target = memory.u32(self.rows.logit_target)[at];
        let row = memory.u32(self.rows.logit_row)[at] as usize;
        let slot = memory.u32(self.rows.slot)[row] as usize;
        let params: &[u32; SLOT_WORDS] =
            memory.u32(self.slots.params)[slot * SLOT_WORDS..].first_chunk().expect("a line of parameters");
        let features = memory.u32(self.rows.step)[step::FEATURES];
        let scored = kind == logit_row::SCORE;
        if math::has_nan(logits) {
            return Outcome { nan: true, token: if scored { target } else { 0 }, ..Outcome::default() };
        }
        let token = if scored {
            target
        } else {
            let sampling = self.sampling(memory, row, slot, params, features);
            WORK.with_borrow_mut(|work| math::draw(logits, &sampling, work))
        };

        let mut outcome = Outcome { token, ..Outcome::default() };
        let wanted = if scored {
            features & feature::SCORE != 0
        } else {
            features & feature::LOGPROBS != 0 && params[slot::FLAGS] & slot::LOGPROBS != 0
        };
        if wanted {
            let distribution = LogSoftmax::of(logits);
            outcome.logprob = distribution.logprob(logits[token as usize]);
            outcome.rank = math::rank(logits, token as usize);
            if features & feature::TOP_LOGPROBS != 0 {
                let count = (params[slot::TOP_LOGPROBS] as usize).min(TOP_LOGPROBS_MAX);
                let count = math::top(logits, &mut outcome.top_ids[..count]);
                for (logprob, &id) in outcome.top_logprobs[..count].iter_mut().zip(&outcome.top_ids) {
                    *logprob = distribution.logprob(logits[id as usize]);
                }
            }
        }
        outcome
    }

    /// How the slot samples, with each part off that it does not use or that the step's mask leaves out.
    fn sampling<'a>(
        &self,
        memory: &'a CpuMemory,
        row: usize,
        slot: usize,
        params: &'a [u32; SLOT_WORDS],
        features: u32,
    ) -> Sampling<'a> {
        let flags = params[slot::FLAGS];
        let float = |field: usize| f32::from_bits(params[field]);
        let on = |bit: u32, flag: u32| features & bit != 0 && flags & flag != 0;
        let vocab = memory.stride(self.slots.counts);

        let bias = if on(feature::BIAS, slot::BIAS) { params[slot::BIAS_COUNT] as usize } else { 0 };
        let pairs = memory.u32(self.slots.bias)[slot * LOGIT_BIAS_MAX * BIAS_WORDS..].as_chunks().0;
        let penalties = on(feature::PENALTIES, slot::PENALTIES).then(|| Penalties {
            presence: float(slot::PRESENCE),
            frequency: float(slot::FREQUENCY),
            repetition: float(slot::REPETITION),
            counts: &memory.u32(self.slots.counts)[slot * vocab..][..vocab],
        });
        let early = memory.u32(self.slots.generated)[slot] < params[slot::MIN_TOKENS];
        let banned: [&[u32]; 2] = if features & feature::MIN_TOKENS != 0 && early {
            let ids = |count: usize, ids: usize| &params[ids..][..params[count] as usize];
            [ids(slot::EOS_COUNT, slot::EOS_IDS), ids(slot::STOP_COUNT, slot::STOP_IDS)]
        } else {
            [&[], &[]]
        };
        let temperature = float(slot::TEMPERATURE);
        let truncated = on(feature::TRUNCATION, slot::TRUNCATION);
        let random = (features & feature::RANDOM != 0 && temperature >= GREEDY_TEMPERATURE).then(|| Random {
            temperature,
            min_p: if truncated { float(slot::MIN_P) } else { 0.0 },
            top_k: if truncated { params[slot::TOP_K] as usize } else { 0 },
            top_p: if truncated { float(slot::TOP_P) } else { 1.0 },
            seed: [params[slot::SEED_LO], params[slot::SEED_HI]],
            choice: params[slot::CHOICE],
            position: memory.u32(self.rows.position)[row],
        });
        Sampling { bias: &pairs[..bias], penalties, banned, random }
    }
}
