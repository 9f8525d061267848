//! From a row of logits to a token and its logprobs (contract §7).
//!
//! Used by the `sample` op, row by row. Every tie goes to the lowest id.

use super::exp::exp;
use super::philox::{gumbel, gumbel_max, philox};
use super::vectorised;
use crate::contract::{self, LOGSUMEXP_LANES, TOP_LOGPROBS_MAX};
use std::cmp::Ordering;

/// How one row is sampled. A part that is off has its neutral value.
#[derive(Clone, Copy, Debug)]
pub struct Sampling<'a> {
    /// (token, bias bits) pairs.
    pub bias: &'a [[u32; 2]],
    pub penalties: Option<Penalties<'a>>,
    /// Ids that may not be drawn yet.
    pub banned: [&'a [u32]; 2],
    /// None: greedy.
    pub random: Option<Random>,
}

#[derive(Clone, Copy, Debug)]
pub struct Penalties<'a> {
    pub presence: f32,
    pub frequency: f32,
    pub repetition: f32,
    /// By id: bit 31 = occurs in the prompt, bits 0–30 = times generated.
    pub counts: &'a [u32],
}

#[derive(Clone, Copy, Debug)]
pub struct Random {
    pub temperature: f32,
    /// 0 is off.
    pub min_p: f32,
    /// 0 is off.
    pub top_k: usize,
    /// 1 is off.
    pub top_p: f32,
    pub seed: [u32; 2],
    pub choice: u32,
    pub position: u32,
}

/// What a row came to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    pub token: u32,
    pub nan: bool,
    pub logprob: f32,
    /// 1-based; 0 when logprobs are not wanted.
    pub rank: u32,
    pub top_ids: [u32; TOP_LOGPROBS_MAX],
    pub top_logprobs: [f32; TOP_LOGPROBS_MAX],
}

/// Working space of one row. Reused.
#[derive(Default)]
pub struct Work {
    logits: Vec<f32>,
    survivors: Vec<u32>,
}

/// Whether any logit is NaN.
pub fn has_nan(logits: &[f32]) -> bool {
    vectorised(
        #[inline(always)]
        || logits.iter().fold(false, |nan, logit| nan | logit.is_nan()),
    )
}

/// The lowest id with the highest logit.
pub fn argmax(logits: &[f32]) -> usize {
    let max = max(logits);
    logits.iter().position(|&logit| logit == max).unwrap_or(0)
}

fn max(logits: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    vectorised(
        #[inline(always)]
        || {
            let (chunks, rest) = logits.as_chunks::<64>();
            let mut lanes = [f32::NEG_INFINITY; 64];
            for chunk in chunks {
                for lane in 0..64 {
                    lanes[lane] = larger(lanes[lane], chunk[lane]);
                }
            }
            lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |max, &logit| larger(max, logit))
        },
    )
}

/// Draws the next token of a row without NaN.
pub fn draw(logits: &[f32], sampling: &Sampling, work: &mut Work) -> u32 {
    let Sampling { bias, penalties, banned, random } = *sampling;
    let untouched = bias.is_empty() && penalties.is_none() && banned.iter().all(|ids| ids.is_empty());
    if untouched && random.is_none() {
        return argmax(logits) as u32;
    }
    let Work { logits: l, survivors } = work;
    l.clear();
    l.extend_from_slice(logits);
    for &[id, bias] in bias {
        if let Some(l) = l.get_mut(id as usize) {
            *l += f32::from_bits(bias);
        }
    }
    if let Some(penalties) = penalties {
        penalize(l, &penalties);
    }
    for &id in banned.into_iter().flatten() {
        if let Some(l) = l.get_mut(id as usize) {
            *l = f32::NEG_INFINITY;
        }
    }
    let Some(random) = random else { return argmax(l) as u32 };
    l.iter_mut().for_each(|l| *l /= random.temperature);
    let best = argmax(l);
    truncate(l, l[best], &random, survivors);
    perturbed_argmax(l, best, &random, survivors)
}

/// Repetition, then frequency, then presence.
fn penalize(l: &mut [f32], penalties: &Penalties) {
    for (l, &count) in l.iter_mut().zip(penalties.counts).filter(|&(_, &count)| count != 0) {
        *l = if *l > 0.0 { *l / penalties.repetition } else { *l * penalties.repetition };
        let generated = count & 0x7fff_ffff;
        if generated > 0 {
            *l -= penalties.frequency * generated as f32;
            *l -= penalties.presence;
        }
    }
}

/// Leaves in `survivors` the ids that min_p, top_k and top_p keep, in no order; empty when none of them is on.
fn truncate(l: &[f32], max: f32, random: &Random, survivors: &mut Vec<u32>) {
    survivors.clear();
    let Random { min_p, top_k, top_p, .. } = *random;
    if min_p <= 0.0 && top_k == 0 && top_p >= 1.0 {
        return;
    }
    let least = if min_p > 0.0 { max + libm::logf(min_p) } else { f32::NEG_INFINITY };
    // The top one survives whatever a rounding or an infinity makes of the bound.
    survivors.extend((0..l.len() as u32).filter(|&id| l[id as usize] >= least || l[id as usize] == max));
    let descending = |a: &u32, b: &u32| -> Ordering { l[*b as usize].total_cmp(&l[*a as usize]).then(a.cmp(b)) };
    if top_k > 0 && top_k < survivors.len() {
        survivors.select_nth_unstable_by(top_k - 1, descending);
        survivors.truncate(top_k);
    }
    if top_p < 1.0 {
        let total = total_mass(l, max, survivors);
        let kept = nucleus(l, max, top_p * total, survivors, descending);
        survivors.truncate(kept);
    }
}

/// Σ exp(l − max) over the survivors, in the lanes and the tree of the log-softmax.
fn total_mass(l: &[f32], max: f32, survivors: &mut [u32]) -> f32 {
    let mut lanes = [0.0; LOGSUMEXP_LANES];
    survivors.sort_unstable();
    for &id in &*survivors {
        lanes[id as usize % LOGSUMEXP_LANES] += exp(l[id as usize] - max);
    }
    contract::tree(&lanes)
}

/// Sorts a prefix of the survivors so long that it holds the nucleus, and gives the nucleus's length: ids before which the
/// mass, summed in descending order, is below `limit`.
fn nucleus(
    l: &[f32],
    max: f32,
    limit: f32,
    survivors: &mut [u32],
    descending: impl Fn(&u32, &u32) -> Ordering + Copy,
) -> usize {
    let (mut sorted, mut mass) = (0, 0.0);
    while sorted < survivors.len() {
        let rest = &mut survivors[sorted..];
        let next = rest.len().min(256.max(sorted));
        if next < rest.len() {
            rest.select_nth_unstable_by(next - 1, descending);
        }
        rest[..next].sort_unstable_by(descending);
        for (at, &id) in rest[..next].iter().enumerate() {
            if mass >= limit && sorted + at > 0 {
                return sorted + at;
            }
            mass += exp(l[id as usize] - max);
        }
        sorted += next;
    }
    survivors.len()
}

/// argmax(l + Gumbel) over the survivors (over all ids when there are none); `best` is the argmax of l.
fn perturbed_argmax(l: &[f32], best: usize, random: &Random, survivors: &[u32]) -> u32 {
    let counter = |id: u32| [random.choice, random.position, id / 4, 0];
    let perturbed = |id: u32, words: [u32; 4]| l[id as usize] + gumbel(words[id as usize % 4]);
    let best = best as u32;
    let mut highest = (perturbed(best, philox(counter(best), random.seed)), best);
    let reach = gumbel_max();
    // No noise lifts an id so far below the highest; rounding is monotone, so the test is exact.
    let hopeless = |id: u32, highest: f32| l[id as usize] + reach < highest || l[id as usize] == f32::NEG_INFINITY;
    let mut bar = highest.0;
    let mut consider = |id: u32, words: [u32; 4]| {
        let value = perturbed(id, words);
        if value > highest.0 || (value == highest.0 && id < highest.1) {
            highest = (value, id);
        }
        highest.0
    };
    if survivors.is_empty() {
        for block in (0..l.len() as u32).step_by(4) {
            let mut words = None;
            for id in block..(block + 4).min(l.len() as u32) {
                if !hopeless(id, bar) {
                    bar = consider(id, *words.get_or_insert_with(|| philox(counter(id), random.seed)));
                }
            }
        }
    } else {
        for &id in survivors {
            if !hopeless(id, bar) {
                bar = consider(id, philox(counter(id), random.seed));
            }
        }
    }
    highest.1
}

/// The raw distribution of a row: logprob = (l − max) − ln Σ exp(l − max).
#[derive(Clone, Copy, Debug)]
pub struct LogSoftmax {
    max: f32,
    ln_sum: f32,
}

impl LogSoftmax {
    /// Lane j sums ids j, j + LOGSUMEXP_LANES, … from +0.0; the lanes combine by the balanced tree.
    pub fn of(logits: &[f32]) -> Self {
        let max = max(logits);
        let mut lanes = [0.0; LOGSUMEXP_LANES];
        vectorised(
            #[inline(always)]
            || {
                for ids in logits.chunks(LOGSUMEXP_LANES) {
                    for (lane, logit) in lanes.iter_mut().zip(ids) {
                        *lane += exp(logit - max);
                    }
                }
            },
        );
        LogSoftmax { max, ln_sum: libm::logf(contract::tree(&lanes)) }
    }

    pub fn logprob(&self, logit: f32) -> f32 {
        (logit - self.max) - self.ln_sum
    }
}

/// 1 + the ids with a larger logit, or an equal one and a lower id.
pub fn rank(logits: &[f32], id: usize) -> u32 {
    let logit = logits[id];
    let larger = logits.iter().filter(|&&other| other > logit).count();
    let earlier = logits[..id].iter().filter(|&&other| other == logit).count();
    1 + (larger + earlier) as u32
}

/// The ids of the `ids.len()` highest logits, best first (fewer when the vocabulary is smaller); gives how many.
pub fn top(logits: &[f32], ids: &mut [u32]) -> usize {
    let count = ids.len().min(logits.len());
    let mut filled = 0;
    let mut least = f32::NEG_INFINITY;
    for (id, &logit) in logits.iter().enumerate() {
        if filled == count && logit <= least {
            continue;
        }
        // Ids come in ascending order, so an equal logit goes behind those already there.
        let at = ids[..filled].iter().position(|&other| logits[other as usize] < logit).unwrap_or(filled);
        filled = count.min(filled + 1);
        if at < filled {
            ids[at..filled].rotate_right(1);
            ids[at] = id as u32;
        }
        if filled > 0 {
            least = logits[ids[filled - 1] as usize];
        }
    }
    count
}
