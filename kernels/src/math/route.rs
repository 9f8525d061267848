//! Routing: softmax scores, the choice of experts, and their weights (DeepSeek-V2, §2.1.2–2.1.3).

use super::exp::exp;
use crate::ops::{Routing, TopkMethod};

/// Turns router logits into softmax scores in place: fp32, the sum in ascending id from +0.0.
#[inline(always)]
pub fn softmax(logits: &mut [f32]) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, |max, logit| if logit > max { logit } else { max });
    for logit in logits.iter_mut() {
        *logit = exp(*logit - max);
    }
    let sum = logits.iter().fold(0.0, |sum, e| sum + e);
    for logit in logits.iter_mut() {
        *logit /= sum;
    }
}

/// Chooses `ids.len()` experts by `scores` (which it may overwrite) and writes them in ascending id with their weights.
pub fn choose(routing: &Routing, scores: &mut [f32], ids: &mut [u32], weights: &mut [f32]) {
    if let TopkMethod::GroupLimitedGreedy { groups, topk_groups } = routing.method {
        zero_outside_best_groups(scores, groups, topk_groups);
    }
    for at in 0..ids.len() {
        let taken = &ids[..at];
        ids[at] = best(scores, |id| !taken.contains(&(id as u32))) as u32;
    }
    ids.sort_unstable();
    for (weight, id) in weights.iter_mut().zip(&*ids) {
        *weight = scores[*id as usize];
    }
    if routing.norm_topk_prob && routing.top_k > 1 {
        let sum = weights.iter().fold(0.0, |sum, weight| sum + weight) + 1e-20;
        weights.iter_mut().for_each(|weight| *weight /= sum);
    } else {
        weights.iter_mut().for_each(|weight| *weight *= routing.scaling);
    }
}

/// Groups are ranked by their best score, ties to the lower group.
fn zero_outside_best_groups(scores: &mut [f32], groups: usize, topk_groups: usize) {
    let width = scores.len() / groups;
    let group_best = |group: usize| scores[group * width..][..width].iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let beats = |a: usize, b: usize| group_best(a) > group_best(b) || (group_best(a) == group_best(b) && a < b);
    let kept: u64 = (0..groups)
        .filter(|&group| (0..groups).filter(|&other| beats(other, group)).count() < topk_groups)
        .fold(0, |kept, group| kept | 1 << group);
    for (group, scores) in scores.chunks_exact_mut(width).enumerate() {
        if kept >> group & 1 == 0 {
            scores.fill(0.0);
        }
    }
}

/// The lowest of the ids with the highest score among those allowed. A NaN is never highest.
fn best(scores: &[f32], allowed: impl Fn(usize) -> bool) -> usize {
    let mut best = None;
    for (id, &score) in scores.iter().enumerate().filter(|&(id, _)| allowed(id)) {
        if best.is_none_or(|(_, highest)| score > highest || (f32::is_nan(highest) && !score.is_nan())) {
            best = Some((id, score));
        }
    }
    best.expect("top_k is at most the number of experts").0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn greedy(experts: usize, top_k: usize, norm_topk_prob: bool) -> Routing {
        Routing { experts, top_k, method: TopkMethod::Greedy, norm_topk_prob, scaling: 1.0 }
    }

    fn routed(routing: &Routing, logits: &[f32]) -> (Vec<u32>, Vec<f32>) {
        let mut scores = logits.to_vec();
        softmax(&mut scores);
        let (mut ids, mut weights) = (vec![0; routing.top_k], vec![0.0; routing.top_k]);
        choose(routing, &mut scores, &mut ids, &mut weights);
        (ids, weights)
    }

    fn near(got: &[f32], expected: &[f32]) {
        assert_eq!(got.len(), expected.len());
        assert!(got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{got:?}, not {expected:?}");
    }

    #[test]
    fn two_of_four_by_hand() {
        let (ids, weights) = routed(&greedy(4, 2, false), &[2.0, 1.0, 0.0, -1.0]);
        assert_eq!(ids, [0, 1]);
        near(&weights, &[0.643_914, 0.236_883]);
        near(&routed(&greedy(4, 2, true), &[2.0, 1.0, 0.0, -1.0]).1, &[0.731_059, 0.268_941]);
    }

    #[test]
    fn scaling_applies_only_where_weights_are_not_normalised() {
        let logits = [2.0, 1.0, 0.0, -1.0];
        let scaled = |norm, top_k| routed(&Routing { scaling: 16.0, ..greedy(4, top_k, norm) }, &logits).1;
        near(&scaled(false, 2), &[10.302_628, 3.790_125]);
        near(&scaled(true, 2), &[0.731_059, 0.268_941]);
        near(&scaled(true, 1), &[10.302_628]);
    }

    #[test]
    fn chosen_experts_are_ascending_and_ties_go_to_the_lowest_id() {
        assert_eq!(routed(&greedy(6, 3, false), &[0.0, 1.0, 1.0, 3.0, 1.0, 1.0]).0, [1, 2, 3]);
        assert_eq!(routed(&greedy(5, 5, false), &[1.0; 5]).0, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn only_the_best_groups_are_searched() {
        // Groups {0,1,2} {3,4,5} {6,7,8}: the second best score overall lies in the first group, whose best is only third.
        let method = TopkMethod::GroupLimitedGreedy { groups: 3, topk_groups: 2 };
        let routing = Routing { method, ..greedy(9, 3, false) };
        assert_eq!(routed(&routing, &[1.0, 1.0, 0.0, 3.0, 0.0, 0.0, 2.0, -1.0, -2.0]).0, [3, 4, 6]);
        // Equal groups: the lower ones are kept. Beyond the kept experts, zeros tie to the lowest id.
        let routing = Routing { top_k: 7, ..routing };
        assert_eq!(routed(&routing, &[0.0; 9]).0, [0, 1, 2, 3, 4, 5, 6]);
    }
}
