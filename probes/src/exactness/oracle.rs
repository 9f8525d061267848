//! The oracle leg: greedy tokens up to a near-tie, and log-probabilities teacher-forced.

use super::cases::{Case, Oracle};
use super::legs::CaseAnswer;
use crate::driver::Seated;
use crate::evidence::{Draft, Limit};
use crate::subject::AnyDriver;
use serde::Serialize;
use slotgraph_graphs::device::DeviceError;
use std::sync::Arc;

/// Longest prompt whose positions are gated; longer ones are reported.
const GATED_PROMPT: usize = 512;

/// What a precision may differ by.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// A token may differ only where the oracle's margin is at most this.
    margin: f64,
    /// Mean |Δlogprob| of the gated positions.
    mean: f64,
}

impl Limits {
    /// fp32 against fp32, or the contract's rounding against fp32.
    pub fn of(contract: bool, mean: Option<f64>, margin: Option<f64>) -> Limits {
        let defaults = if contract { (0.5, 0.025) } else { (2e-4, 1e-4) };
        Limits { margin: margin.unwrap_or(defaults.0), mean: mean.unwrap_or(defaults.1) }
    }
}

#[derive(Clone, Debug, Serialize)]
pub struct OracleCase {
    id: String,
    prompt_tokens: usize,
    /// First token that differs, with the oracle's margin there.
    first_divergence: Option<(usize, f64)>,
    /// Teacher-forced.
    mean_abs_dlogprob: f64,
    max_abs_dlogprob: f64,
    /// Positions whose argmax is not the oracle's, with the largest margin among them.
    argmax_flips: usize,
    largest_margin_flipped: f64,
}

#[derive(Clone, Debug, Serialize)]
pub struct Judgement {
    mean_abs_dlogprob: f64,
    positions: usize,
    argmax_flips: usize,
    largest_margin_flipped: f64,
    tokens_outside_margin: Vec<String>,
    cases: Vec<OracleCase>,
    #[serde(skip)]
    limits: Option<Limits>,
}

/// Compares the base leg's answers with the oracle's and scores the oracle's own texts.
pub fn judge(
    driver: &mut AnyDriver,
    cases: &[Case],
    answers: &[CaseAnswer],
    limits: Limits,
) -> Result<Judgement, DeviceError> {
    let mut judged = Vec::new();
    let mut outside = Vec::new();
    let mut gated = Vec::new();
    for (case, answer) in cases.iter().zip(answers) {
        let Some(oracle) = &case.oracle else { continue };
        let first_divergence = first_divergence(oracle, &answer.rows[0].ids);
        let is_gated = case.prompts[0].len() <= GATED_PROMPT;
        if let Some((at, margin)) = first_divergence.filter(|(_, margin)| is_gated && *margin > limits.margin) {
            outside.push(format!("{}: token {at} over a margin of {margin}", case.id));
        }
        let sampling = Arc::new(case.sampling.clone());
        let prompt = case.prompts[0].clone();
        let prompt_tokens = prompt.len();
        driver.seat(vec![Seated { prompt, sampling, choice: 0 }], prompt_tokens + oracle.tokens.len());
        let records = driver.score(&oracle.tokens)?;
        let moved: Vec<f64> =
            records.iter().zip(&oracle.logprobs).map(|(r, want)| (f64::from(r.logprob) - want).abs()).collect();
        let flipped: Vec<f64> =
            records.iter().zip(&oracle.margin).filter(|(r, _)| r.rank != 1).map(|(_, margin)| *margin).collect();
        let largest = flipped.iter().copied().fold(0.0, f64::max);
        if is_gated {
            gated.extend(moved.iter().copied().zip(records.iter().zip(&oracle.margin).map(|(r, m)| (r.rank != 1, *m))));
        }
        judged.push(OracleCase {
            id: case.id.clone(),
            prompt_tokens,
            first_divergence,
            mean_abs_dlogprob: mean(&moved),
            max_abs_dlogprob: moved.iter().copied().fold(0.0, f64::max),
            argmax_flips: flipped.len(),
            largest_margin_flipped: largest,
        });
    }
    let flips: Vec<f64> = gated.iter().filter(|(_, (flip, _))| *flip).map(|(_, (_, margin))| *margin).collect();
    Ok(Judgement {
        mean_abs_dlogprob: mean(&gated.iter().map(|(moved, _)| *moved).collect::<Vec<_>>()),
        positions: gated.len(),
        argmax_flips: flips.len(),
        largest_margin_flipped: flips.iter().copied().fold(0.0, f64::max),
        tokens_outside_margin: outside,
        cases: judged,
        limits: Some(limits),
    })
}

fn first_divergence(oracle: &Oracle, ids: &[u32]) -> Option<(usize, f64)> {
    let at = oracle.tokens.iter().zip(ids).position(|(want, got)| want != got)?;
    Some((at, oracle.margin[at]))
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

impl Judgement {
    pub fn holds(&self) -> bool {
        let limits = self.limits.expect("a judgement is made with limits");
        self.positions > 0
            && self.tokens_outside_margin.is_empty()
            && self.mean_abs_dlogprob <= limits.mean
            && self.largest_margin_flipped <= limits.margin
    }

    pub fn record(&self, draft: &mut Draft) {
        let limits = self.limits.expect("a judgement is made with limits");
        let first = self.tokens_outside_margin.first().cloned();
        draft.check(
            "oracle_tokens",
            self.tokens_outside_margin.is_empty() && self.positions > 0,
            first.unwrap_or_else(|| {
                let gated = self.cases.iter().filter(|case| case.prompt_tokens <= GATED_PROMPT).count();
                format!("{gated} of {} cases, up to a margin of {}", self.cases.len(), limits.margin)
            }),
        );
        let positions = self.positions as u64;
        draft.metric(
            "oracle_mean_abs_dlogprob",
            self.mean_abs_dlogprob,
            "nats",
            positions,
            Some(Limit::AtMost(limits.mean)),
        );
        let flipped = self.largest_margin_flipped;
        draft.metric("oracle_largest_margin_flipped", flipped, "logits", positions, Some(Limit::AtMost(limits.margin)));
        // Reported: over a long prompt the contract's rounding adds up (the CPU in the same precision flips at the same places).
        let long = || self.cases.iter().filter(|case| case.prompt_tokens > GATED_PROMPT);
        if long().count() > 0 {
            let flipped = long().map(|case| case.largest_margin_flipped).fold(0.0, f64::max);
            let cases = long().count() as u64;
            draft.metric("oracle_long_prompts_largest_margin_flipped", flipped, "logits", cases, None);
        }
    }
}
