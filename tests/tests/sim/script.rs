//! The script: which token follows a context, and so what every answer must be, whatever the schedule.

use slotgraph_graphs::null::{Draw, Drawn, Script, context_hash};
use slotgraph_graphs::spec::SamplingSpec;
use slotgraph_runtime::request::FinishReason;

/// Ids end here; EOS is 1.
pub const VOCAB: u64 = 64;
pub const EOS: u32 = 1;

/// A seeded generator (xorshift64*, Vigna 2014).
#[derive(Clone)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Rng(mix(seed ^ 0x51_0763_4a9b).max(1))
    }
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }
    /// True once in `n`.
    pub fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }
}

fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (x >> 17)
}

/// What the model says after a context: EOS once in 64, NaN once in about 2,000.
fn drawn(context: u64, seed: u64, choice: u32) -> Drawn {
    let mixed = mix(context ^ mix(seed).rotate_left(7) ^ u64::from(choice) << 40);
    if mixed >> 53 == 7 { Drawn::Nan } else { Drawn::Token((mixed % VOCAB) as u32) }
}

/// The script of the null device.
pub fn script() -> Script {
    Box::new(|draw: Draw| drawn(draw.context, draw.seed, draw.choice))
}

/// How a choice ends that nobody disturbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    Finished(FinishReason),
    Nan,
}

/// The answer to a prompt: a loop over one sequence that knows nothing of slots, pages, steps or neighbours.
pub fn answer(prompt: &[u32], sampling: &SamplingSpec, sample: u32, context_max: usize) -> (Vec<u32>, Ending) {
    let mut tokens = prompt.to_vec();
    let mut answer = Vec::new();
    loop {
        if answer.len() as u32 >= sampling.max_tokens || tokens.len() >= context_max {
            return (answer, Ending::Finished(FinishReason::Length));
        }
        let Drawn::Token(mut token) = drawn(context_hash(&tokens), sampling.seed, sample) else {
            return (answer, Ending::Nan);
        };
        let stops = |token: u32| token == EOS || sampling.stop_ids.contains(&token);
        while (answer.len() as u32) < sampling.min_tokens && stops(token) {
            token += 1;
        }
        tokens.push(token);
        answer.push(token);
        if (token == EOS && !sampling.ignore_eos) || sampling.stop_ids.contains(&token) {
            return (answer, Ending::Finished(FinishReason::Stop));
        }
    }
}
