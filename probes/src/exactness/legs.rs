//! Legs: the same cases under one changed factor each, and how an answer of one leg compares with the base leg's.

use super::cases::Case;
use crate::driver::{Driver, Seated};
use crate::load::{prompt_ids, scatter};
use crate::manifest::hex;
use serde::Serialize;
use sha2::{Digest, Sha256};
use slotgraph_graphs::device::{Device, DeviceError};
use slotgraph_graphs::spec::SamplingSpec;
use slotgraph_graphs::step::{EndReason, StepOutput};
use slotgraph_runtime::trace::sha256_of_ids;
use slotgraph_server::tokenizer::Tokenizer;
use std::sync::Arc;

/// What a leg changes besides its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Factor {
    /// Least bucket of every step.
    pub bucket: usize,
    /// Seats taken by neighbours before the case's rows.
    pub neighbours: usize,
    /// Most prefill rows a step.
    pub chunk: usize,
    /// Requests for one token, with prompts of 1 token to `JOINER_TOKENS`, that take the first neighbour's seat one after the other while
    /// the case decodes.
    pub joiners: usize,
}

/// Longest prompt of a joiner, and its rows a step.
const JOINER_TOKENS: usize = 2000;
const JOINER_ROWS: usize = 160;

impl Factor {
    /// The smallest bucket that fits, nobody else, prompts in steps as large as there are.
    pub const PLAIN: Factor = Factor { bucket: 0, neighbours: 0, chunk: usize::MAX, joiners: 0 };
}

/// What a row answered.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RowAnswer {
    pub ids: Vec<u32>,
    pub text: String,
    pub token_sha256: String,
    pub text_sha256: String,
    pub finish_reason: &'static str,
    #[serde(skip)]
    pub logprob_bits: Vec<u32>,
}

/// What a leg answered to a case.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CaseAnswer {
    pub rows: Vec<RowAnswer>,
    /// Routed (token, expert) pairs of live rows over the whole case.
    pub routes_local: u64,
    pub routes_remote: u64,
}

/// The first place where a row of one leg parts from the same row of another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FirstDifferent {
    pub row_index: usize,
    pub index: usize,
    pub reason: &'static str,
}

/// None when two legs answered alike, bit for bit.
pub fn first_different(base: &CaseAnswer, other: &CaseAnswer) -> Option<FirstDifferent> {
    if base.rows.len() != other.rows.len() {
        return Some(FirstDifferent { row_index: 0, index: 0, reason: "row_count_mismatch" });
    }
    base.rows.iter().zip(&other.rows).enumerate().find_map(|(row_index, (a, b))| {
        let at = |index: usize, reason: &'static str| Some(FirstDifferent { row_index, index, reason });
        if let Some(index) = a.ids.iter().zip(&b.ids).position(|(a, b)| a != b) {
            return at(index, "token_mismatch");
        }
        if a.ids.len() != b.ids.len() {
            return at(a.ids.len().min(b.ids.len()), "length_mismatch");
        }
        if let Some(index) = a.logprob_bits.iter().zip(&b.logprob_bits).position(|(a, b)| a != b) {
            return at(index, "logprob_mismatch");
        }
        if a.logprob_bits.len() != b.logprob_bits.len() {
            return at(a.logprob_bits.len().min(b.logprob_bits.len()), "length_mismatch");
        }
        if a.text != b.text { at(0, "text_mismatch") } else { None }
    })
}

/// What the rows said so far, by seat.
struct Heard {
    rows: Vec<(Vec<u32>, Vec<u32>, Option<EndReason>)>,
    /// Local and remote.
    routes: (u64, u64),
}

impl Heard {
    fn take(&mut self, output: &StepOutput) {
        self.routes.0 += output.routes_local;
        self.routes.1 += output.routes_remote;
        for record in &output.records {
            let (ids, logprobs, ended) = &mut self.rows[record.slot.0 as usize];
            ids.push(record.token);
            logprobs.push(record.logprob.to_bits());
            *ended = ended.or(record.ended);
        }
    }

    /// Whether every seat from `first` on is done.
    fn all_ended(&self, first: usize) -> bool {
        self.rows[first..].iter().all(|(.., ended)| ended.is_some())
    }
}

/// Runs one case under one factor.
pub fn run<D: Device>(
    driver: &mut Driver<D>,
    tokenizer: &Tokenizer,
    eos_ids: &[u32],
    vocab: usize,
    case: &Case,
    factor: Factor,
) -> Result<CaseAnswer, DeviceError> {
    let stranger = |number: usize, tokens: usize, answer: u32| Seated {
        prompt: prompt_ids(scatter(number as u64 + 77), tokens).into_iter().map(|id| id % vocab as u32).collect(),
        sampling: Arc::new(SamplingSpec { ignore_eos: true, ..SamplingSpec::greedy(answer) }),
        choice: 0,
    };
    let neighbour = |number: usize| stranger(number, 5 + number % 20, u32::MAX);
    let mut seated: Vec<Seated> = (0..factor.neighbours).map(neighbour).collect();
    let sampling = Arc::new(case.sampling.clone());
    // Rows of one prompt are its choices: each has noise of its own.
    seated.extend(case.prompts.iter().enumerate().map(|(row, prompt)| Seated {
        prompt: prompt.clone(),
        sampling: sampling.clone(),
        choice: row as u32,
    }));
    let longest = seated.iter().map(|s| s.prompt.len()).max().unwrap_or(1);
    let mut heard = Heard { rows: vec![Default::default(); seated.len()], routes: (0, 0) };
    driver.bucket_floor = factor.bucket;
    let most = driver.limits().max_model_len;
    // A joiner's prompt and its one token.
    let joiner_tokens = JOINER_TOKENS.min(most - 1);
    let room = if factor.joiners > 0 { joiner_tokens + 1 } else { 0 };
    driver.seat(seated, (longest + case.output_len + 1).max(room).min(most));
    driver.prefill(factor.chunk, |output| heard.take(output))?;
    for number in 0..factor.joiners {
        if heard.all_ended(factor.neighbours) {
            break;
        }
        driver.leave(0);
        let tokens = 1 + joiner_tokens.saturating_sub(1) * number / factor.joiners.max(2).saturating_sub(1);
        driver.join(0, stranger(1000 + number, tokens, 1), JOINER_ROWS, |output| heard.take(output))?;
    }
    if !heard.all_ended(factor.neighbours) {
        driver.decode(case.output_len - 1, |output| heard.take(output))?;
    }
    driver.bucket_floor = 0;
    let Heard { mut rows, routes } = heard;
    let answer = |(ids, logprob_bits, ended): (Vec<u32>, Vec<u32>, Option<EndReason>)| {
        let stop = matches!(ended, Some(EndReason::Eos | EndReason::StopId));
        let shown =
            if stop && ids.last().is_some_and(|id| eos_ids.contains(id)) { &ids[..ids.len() - 1] } else { &ids[..] };
        let text = tokenizer.decode(shown, true);
        RowAnswer {
            token_sha256: sha256_of_ids(&ids),
            text_sha256: hex(&Sha256::digest(&text)),
            finish_reason: if stop { "stop" } else { "length" },
            text,
            ids,
            logprob_bits,
        }
    };
    let rows: Vec<RowAnswer> = rows.split_off(factor.neighbours).into_iter().map(answer).collect();
    Ok(CaseAnswer { rows, routes_local: routes.0, routes_remote: routes.1 })
}

/// Feeds each row's prompt and answer in one pass; the tokens are the answer's own, the logprobs those of the scored rows.
pub fn score<D: Device>(driver: &mut Driver<D>, case: &Case, answer: &CaseAnswer) -> Result<CaseAnswer, DeviceError> {
    let mut scored = answer.clone();
    for (prompt, row) in case.prompts.iter().zip(&mut scored.rows) {
        let sampling = Arc::new(case.sampling.clone());
        driver.seat(vec![Seated { prompt: prompt.clone(), sampling, choice: 0 }], prompt.len() + row.ids.len());
        let records = driver.score(&row.ids)?;
        row.logprob_bits = records.iter().map(|record| record.logprob.to_bits()).collect();
    }
    Ok(scored)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(ids: &[u32], bits: &[u32]) -> CaseAnswer {
        let row = RowAnswer {
            ids: ids.to_vec(),
            text: String::new(),
            token_sha256: String::new(),
            text_sha256: String::new(),
            finish_reason: "length",
            logprob_bits: bits.to_vec(),
        };
        CaseAnswer { rows: vec![row], routes_local: 0, routes_remote: 0 }
    }

    #[test]
    fn the_first_difference_is_named() {
        let base = answer(&[1, 2, 3], &[7, 8, 9]);
        let reason = |other: CaseAnswer| first_different(&base, &other).map(|d| (d.index, d.reason));
        assert_eq!(reason(base.clone()), None);
        assert_eq!(reason(answer(&[1, 5, 3], &[7, 8, 9])), Some((1, "token_mismatch")));
        assert_eq!(reason(answer(&[1, 2], &[7, 8])), Some((2, "length_mismatch")));
        assert_eq!(reason(answer(&[1, 2, 3], &[7, 8, 1])), Some((2, "logprob_mismatch")));
    }
}
