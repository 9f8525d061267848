//! Seeded random numbers for tests.

use super::philox::philox;

/// A stream of random numbers.
pub struct Random {
    seed: u32,
    at: u32,
}

impl Random {
    pub fn new(seed: u32) -> Self {
        Random { seed, at: 0 }
    }

    pub fn word(&mut self) -> u32 {
        self.at += 1;
        philox([self.at, 0, 0, 0], [self.seed, 1])[0]
    }

    /// Roughly normal, mean 0, standard deviation `scale`.
    pub fn float(&mut self, scale: f32) -> f32 {
        let sum: u32 = (0..4).map(|_| self.word() >> 16).sum();
        (sum as f32 / 65536.0 - 2.0) * 1.732 * scale
    }

    pub fn floats(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.float(scale)).collect()
    }
}
