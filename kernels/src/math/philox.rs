//! Philox4x32-10 (Salmon et al. 2011), the stateless generator of sampling noise.

/// Four random words for a counter and a key.
#[inline(always)]
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let left = u64::from(counter[0]) * 0xd251_1f53;
        let right = u64::from(counter[2]) * 0xcd9e_8d57;
        counter = [
            (right >> 32) as u32 ^ counter[1] ^ key[0],
            right as u32,
            (left >> 32) as u32 ^ counter[3] ^ key[1],
            left as u32,
        ];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    counter
}

/// Gumbel noise of a random word: −ln(−ln u), u = ((word >> 9) + ½) · 2⁻²³, which is exact and strictly inside (0, 1).
pub fn gumbel(word: u32) -> f32 {
    let u = ((word >> 9) as f32 + 0.5) * (1.0 / (1 << 23) as f32);
    -libm::logf(-libm::logf(u))
}

/// The largest noise there is: that of the largest u.
pub fn gumbel_max() -> f32 {
    gumbel(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the Random123 library.
    #[test]
    fn philox_known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(philox(pi, [0xa409_3822, 0x299f_31d0]), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn noise_is_finite_at_both_ends_and_has_gumbel_moments() {
        assert!(gumbel(0).is_finite() && gumbel_max().is_finite());
        assert!((gumbel_max() - 16.635_532).abs() < 1e-4, "{}", gumbel_max());
        let words = (0..25_000).flat_map(|at| philox([at, 0, 0, 0], [7, 11]));
        let noise: Vec<f64> = words.map(|word| f64::from(gumbel(word))).collect();
        let mean = noise.iter().sum::<f64>() / noise.len() as f64;
        let variance = noise.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / noise.len() as f64;
        assert!((mean - 0.577_216).abs() < 0.02, "mean {mean}");
        assert!((variance - std::f64::consts::PI.powi(2) / 6.0).abs() < 0.05, "variance {variance}");
    }
}
