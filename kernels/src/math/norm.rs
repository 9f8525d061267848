//! RMSNorm (Zhang & Sennrich 2019), with its sum of squares in the contract's lanes.

use super::{bf16, vectorised};
use crate::contract::NORM_LANES;
use crate::spec::Precision;

/// out = x · (1 / sqrt(mean(x²) + eps)) · weight, rounded to bf16 under `Precision::Contract`.
pub fn rms_norm(precision: Precision, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    vectorised(
        #[inline(always)]
        || {
            let scale = 1.0 / (square_sum(x) / x.len() as f32 + eps).sqrt();
            let weight = &weight[..x.len()];
            let out = &mut out[..x.len()];
            match precision {
                Precision::Oracle => {
                    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                        *out = x * scale * weight;
                    }
                }
                Precision::Contract => {
                    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                        *out = bf16::round(x * scale * weight);
                    }
                }
            }
        },
    );
}

/// Σ x² : lane j adds columns j, j + NORM_LANES, … from +0.0; the lanes combine by the balanced tree.
#[inline(always)]
fn square_sum(x: &[f32]) -> f32 {
    let mut lanes = [0.0; NORM_LANES];
    for columns in x.chunks(NORM_LANES) {
        for (lane, x) in lanes.iter_mut().zip(columns) {
            *lane += x * x;
        }
    }
    // Lanes past the width hold +0.0 and change no sum, so a narrow tree is the same tree.
    let mut width = x.len().min(NORM_LANES).next_power_of_two();
    while width > 1 {
        width /= 2;
        for pair in 0..width {
            lanes[pair] = lanes[2 * pair] + lanes[2 * pair + 1];
        }
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract;
    use crate::math::tests::Random;

    #[test]
    fn a_norm_worked_by_hand() {
        // mean(9, 16) = 12.5; 3 / sqrt(12.5) = 0.848528, 4 / sqrt(12.5) = 1.131371; the second is doubled.
        let mut out = [0.0; 2];
        rms_norm(Precision::Oracle, &[3.0, 4.0], &[1.0, 2.0], 0.0, &mut out);
        assert!((out[0] - 0.848_528).abs() < 1e-6 && (out[1] - 2.262_742).abs() < 1e-6, "{out:?}");
        rms_norm(Precision::Contract, &[3.0, 4.0], &[1.0, 2.0], 0.0, &mut out);
        assert_eq!(out, [0.847_656_25, 2.265_625]);
    }

    #[test]
    fn the_sum_follows_the_lanes_and_the_tree() {
        let mut random = Random::new(3);
        for width in [1, 5, 16, 64, 100, 256, 257, 1000] {
            let x = random.floats(width, 3.0);
            let mut lanes = [0.0_f32; NORM_LANES];
            for (column, x) in x.iter().enumerate() {
                lanes[column % NORM_LANES] += x * x;
            }
            assert_eq!(square_sum(&x).to_bits(), contract::tree(&lanes).to_bits(), "width {width}");
            let exact: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
            assert!((f64::from(square_sum(&x)) - exact).abs() <= 1e-6 * exact);
        }
    }
}
