//! Rotary position embedding (Su et al. 2021) in its two pairings.

/// Rotates pairs (2i, 2i + 1) of `x` by `cos_sin[i]`.
#[inline(always)]
pub fn rotate_interleaved(x: &mut [f32], cos_sin: &[f32]) {
    for (pair, cos_sin) in x.chunks_exact_mut(2).zip(cos_sin.chunks_exact(2)) {
        let [a, b] = [pair[0], pair[1]];
        let [cos, sin] = [cos_sin[0], cos_sin[1]];
        pair[0] = a * cos - b * sin;
        pair[1] = b * cos + a * sin;
    }
}

/// Rotates pairs (i, i + d/2) of `x` by `cos_sin[i]`.
#[inline(always)]
pub fn rotate_halves(x: &mut [f32], cos_sin: &[f32]) {
    let (low, high) = x.split_at_mut(x.len() / 2);
    for ((a, b), cos_sin) in low.iter_mut().zip(high).zip(cos_sin.chunks_exact(2)) {
        let [cos, sin] = [cos_sin[0], cos_sin[1]];
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_turn_in_both_pairings() {
        let quarter_then_none = [0.0, 1.0, 1.0, 0.0];
        let mut x = [1.0, 2.0, 3.0, 4.0];
        rotate_interleaved(&mut x, &quarter_then_none);
        assert_eq!(x, [-2.0, 1.0, 3.0, 4.0]);
        let mut x = [1.0, 2.0, 3.0, 4.0];
        rotate_halves(&mut x, &quarter_then_none);
        assert_eq!(x, [-3.0, 2.0, 1.0, 4.0]);
    }
}
