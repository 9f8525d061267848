//! exp of many values, with the bits of `libm::expf` (FreeBSD's e_expf: reduction by k·ln 2 and a rational polynomial).
//!
//! Used by softmax and SiLU, where it is most of the time. It is the same sequence of operations without branches, so that it
//! runs in vector lanes; a test compares it with `libm` over the whole range.

use std::f32::consts::LOG2_E;

const LN2_HI: f32 = 6.931_457_5e-1;
const LN2_LO: f32 = 1.428_606_8e-6;
const P1: f32 = 1.666_662_5e-1;
const P2: f32 = -2.766_733_3e-3;
const ROUNDER: f32 = 12_582_912.0;
/// Largest magnitudes of each range, as bits.
const HALF_LN2: u32 = 0x3eb1_7218;
const THREE_HALF_LN2: u32 = 0x3f85_1592;
const TINY: u32 = 0x3900_0000;
/// From here on exp overflows; from `UNDERFLOW` on, with a sign, it is 0.
const OVERFLOW: u32 = 0x42b1_7218;
const UNDERFLOW: u32 = 0x42cf_f1b5;

/// e^x.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let negative = x.to_bits() >> 31 == 1;
    let magnitude = x.to_bits() & 0x7fff_ffff;

    // x = k·ln 2 + r. The clamp only spares the steps below values whose result is chosen at the end.
    let half = if negative { -0.5 } else { 0.5 };
    let far = (LOG2_E * x.clamp(-150.0, 150.0) + half).trunc();
    let near = if negative { -1.0 } else { 1.0 };
    let kf = if magnitude > THREE_HALF_LN2 { far } else { near };
    let kf = if magnitude > HALF_LN2 { kf } else { 0.0 };
    // A whole number added to 1.5 · 2²³ stands in the low bits (a cast would not vectorise: it saturates).
    let k = (kf + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits()) as i32;
    let hi = x - kf * LN2_HI;
    let lo = kf * LN2_LO;
    let r = hi - lo;

    let rr = r * r;
    let c = r - rr * (P1 + rr * P2);
    let y = 1.0 + (r * c / (2.0 - c) - lo + hi);
    // Two factors, so that a subnormal result is rounded once.
    let first = k >> 1;
    let scaled = y * power_of_two(first) * power_of_two(k.wrapping_sub(first));

    let scaled = if magnitude > TINY { scaled } else { 1.0 + x };
    let scaled = if magnitude >= UNDERFLOW && negative { 0.0 } else { scaled };
    let scaled = if magnitude >= OVERFLOW && !negative { f32::INFINITY } else { scaled };
    if x.is_nan() { x } else { scaled }
}

#[inline(always)]
fn power_of_two(k: i32) -> f32 {
    f32::from_bits((k.wrapping_add(127) << 23) as u32)
}

/// x / (1 + exp(−x)).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every `stride`-th f32, through the vectorised form.
    fn compare(stride: usize) {
        let all: Vec<f32> = (0..=u32::MAX).step_by(stride).map(f32::from_bits).collect();
        let mut ours = all.clone();
        crate::math::vectorised(
            #[inline(always)]
            || ours.iter_mut().for_each(|x| *x = exp(*x)),
        );
        for (x, ours) in all.into_iter().zip(ours) {
            let libm = libm::expf(x);
            assert!(
                ours.to_bits() == libm.to_bits() || ours.is_nan() && libm.is_nan(),
                "exp({x:e}): {ours:e}, {libm:e}"
            );
        }
    }

    #[test]
    fn exp_has_the_bits_of_libm() {
        compare(499);
    }
}
