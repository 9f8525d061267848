//! Dummy weights: what a tensor without a file contains, as a pure function of seed, tensor name and element index.
//!
//! Used by the host's dummy source and, with the same bits, by `cuda/dummy.cu` (31 GB are made faster on the device than
//! they could be copied to it). **Invariant:** an element depends on nothing but the seed, its tensor's name and its own
//! flat index, so every device, rank and expert-parallel degree sees the same model.
//!
//! Element i of a matrix: twelve 16-bit uniforms are the four quarters of h(3i), h(3i + 1) and h(3i + 2), where
//! h(c) = splitmix64's finaliser (Steele, Lea and Flood 2014) of key + (c + 1) · GOLDEN. Their sum less its mean, as f32
//! (exact), times `SCALE` (one rounding), rounded to bf16: close to a normal distribution of deviation 0.02. Vectors are
//! not made here: norm weights are 1, and a source fills the few others.

use half::bf16;
use sha2::{Digest, Sha256};

/// Weyl increment of splitmix64.
pub const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
/// First multiplier of the finaliser.
pub const MIX_A: u64 = 0xbf58_476d_1ce4_e5b9;
/// Second multiplier of the finaliser.
pub const MIX_B: u64 = 0x94d0_49bb_1331_11eb;
/// Mean of the sum of twelve 16-bit uniforms: 12 · 65535 / 2.
pub const MEAN: i32 = 393_210;
/// 0.02 over the sum's deviation (65,536 but for one part in 10⁹).
pub const SCALE: f32 = 0.02 / 65_536.0;

/// The key of a tensor: the first eight bytes of SHA-256 over the seed and the tensor's name, little endian.
pub fn tensor_key(seed: u64, tensor: &str) -> u64 {
    let mut sha = Sha256::new();
    sha.update(b"slotgraph dummy weights");
    sha.update(seed.to_le_bytes());
    sha.update(tensor.as_bytes());
    let digest: [u8; 32] = sha.finalize().into();
    u64::from_le_bytes(digest[..8].try_into().expect("a digest has eight bytes"))
}

/// bf16 bits of element `index` (row-major, over the whole tensor) of a matrix with key `key`.
pub fn element(key: u64, index: u64) -> u16 {
    let mut sum = 0i32;
    for part in 0..3 {
        let word = hash(key, 3 * index + part);
        sum +=
            (word & 0xffff) as i32 + (word >> 16 & 0xffff) as i32 + (word >> 32 & 0xffff) as i32 + (word >> 48) as i32;
    }
    bf16::from_f32((sum - MEAN) as f32 * SCALE).to_bits()
}

fn hash(key: u64, counter: u64) -> u64 {
    let z = key.wrapping_add(counter.wrapping_add(1).wrapping_mul(GOLDEN));
    let z = (z ^ z >> 30).wrapping_mul(MIX_A);
    let z = (z ^ z >> 27).wrapping_mul(MIX_B);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_finaliser_is_splitmix64() {
        // The first three outputs of the published generator seeded with 1234567.
        let published = [6457827717110365317, 3203168211198807973, 9817491932198370423];
        assert_eq!([0, 1, 2].map(|counter| hash(1_234_567, counter)), published);
    }

    #[test]
    fn elements_have_the_stated_mean_and_deviation_and_differ_by_tensor_and_seed() {
        let key = tensor_key(0, "model.layers.0.mlp.gate.weight");
        let values: Vec<f64> = (0..200_000).map(|i| f64::from(bf16::from_bits(element(key, i)).to_f32())).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let deviation = (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64).sqrt();
        assert!(mean.abs() < 2e-4, "mean {mean}");
        assert!((deviation - 0.02).abs() < 1e-4, "deviation {deviation}");
        let row = |key: u64| (0..64).map(|i| element(key, i)).collect::<Vec<_>>();
        assert_ne!(row(key), row(tensor_key(1, "model.layers.0.mlp.gate.weight")));
        assert_ne!(row(key), row(tensor_key(0, "model.layers.1.mlp.gate.weight")));
    }
}
