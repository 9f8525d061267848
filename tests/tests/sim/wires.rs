//! Ranks beside the null device: each runs the exchanges of the same steps at a pace of its own, over wires that lose nothing and order nothing.
//!
//! A model of `kernels/cuda/exchange.cu`: launches of a rank follow one another; a launch pushes its part into one of two halves at every peer,
//! raises its flag there, waits for all flags, reads. Micro steps of all ranks come in a seeded order. **Checked:** a rank reads of each peer the
//! part of the very exchange that it is in; nobody writes a half again before its owner has read it; nobody waits for ever.

use super::script::Rng;
use slotgraph_graphs::step::StepInput;
use std::collections::VecDeque;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

/// Layers with an exchange.
const LAYERS: usize = 2;
/// Rows that one launch moves; longer steps go in pieces, each an epoch.
const PIECE_ROWS: usize = 8;

/// A rule of the exchange that is turned off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wiring {
    #[default]
    Sound,
    /// One half instead of two.
    OneHalf,
    /// Reads without waiting for flags.
    NoWait,
    /// The last rank now and then takes the next step first.
    Swapped,
    /// The last rank now and then leaves out a layer.
    Skipped,
}

/// Which exchange of which step: what its part is labelled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Exchange {
    step: u64,
    layer: usize,
    piece: usize,
    /// Hash of the step's rows and bucket.
    rows: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Writes to the peer of this number, then raises the flag there.
    Push(usize),
    Wait,
    Read,
}

struct Rank {
    queue: VecDeque<Exchange>,
    /// Exchanges that it has ended.
    epoch: u64,
    phase: Phase,
    /// What peers have left here: by peer, the newest epoch announced and both halves with their epochs; and the epoch that was read last.
    flags: Vec<u64>,
    halves: Vec<[Option<(u64, Exchange)>; 2]>,
    read: Vec<u64>,
}

pub struct Wires {
    ranks: Vec<Rank>,
    wiring: Wiring,
    rng: Rng,
    /// Exchanges of a step that the last rank has not been told of yet.
    held: Option<Vec<Exchange>>,
    /// Exchanges of all steps so far: (step, how many with it).
    upto: VecDeque<(u64, u64)>,
    told: u64,
    /// Times a rank pushed an exchange that a peer had not reached.
    pub leads: u64,
    pub wrong: Option<String>,
}

impl Wires {
    pub fn new(ranks: usize, wiring: Wiring, seed: u64) -> Self {
        let rank = || Rank {
            queue: VecDeque::new(),
            epoch: 0,
            phase: Phase::Push(0),
            flags: vec![0; ranks],
            halves: vec![[None; 2]; ranks],
            read: vec![0; ranks],
        };
        let rng = Rng::new(seed ^ 0x77_19e5);
        let ranks = (0..ranks).map(|_| rank()).collect();
        Wires { ranks, wiring, rng, held: None, upto: VecDeque::new(), told: 0, leads: 0, wrong: None }
    }

    /// Every rank is told of the step, as `Ranks` does.
    pub fn enqueue(&mut self, input: &StepInput) {
        let mut hasher = DefaultHasher::new();
        input.bucket.hash(&mut hasher);
        for row in &input.rows {
            (row.slot.0, row.generation.0).hash(&mut hasher);
        }
        let (step, rows) = (input.step, hasher.finish());
        let pieces = input.bucket.div_ceil(PIECE_ROWS);
        let of_layer = |layer| (0..pieces).map(move |piece| Exchange { step, layer, piece, rows });
        let all: Vec<Exchange> = (0..LAYERS).flat_map(of_layer).collect();
        self.told += all.len() as u64;
        self.upto.push_back((step, self.told));
        let last = self.ranks.len() - 1;
        for rank in &mut self.ranks[..last] {
            rank.queue.extend(&all);
        }
        let odd = step % 16 == 5;
        match self.wiring {
            Wiring::Swapped if odd => self.held = Some(all),
            Wiring::Skipped if odd => self.ranks[last].queue.extend(&all[..all.len() - pieces]),
            _ => self.ranks[last].queue.extend(&all),
        }
        if !odd && let Some(held) = self.held.take() {
            self.ranks[last].queue.extend(held);
        }
    }

    /// Whether all ranks have ended `step`, after some micro steps; with `all`, after as many as it takes.
    pub fn settled(&mut self, step: u64, all: bool) -> bool {
        let Some(&(_, upto)) = self.upto.iter().find(|(of, _)| *of == step) else { return true };
        let mut left = if all { u64::MAX } else { self.rng.below(8 * self.ranks.len() as u64) };
        while self.ranks.iter().any(|rank| rank.epoch < upto) {
            if left == 0 || self.wrong.is_some() {
                return false;
            }
            left -= 1;
            let first = self.rng.below(self.ranks.len() as u64) as usize;
            let moved = (0..self.ranks.len()).any(|i| self.advance((first + i) % self.ranks.len()));
            if !moved {
                // A held step may still come; without one nobody ever moves again.
                if self.held.is_none() {
                    self.wrong = Some(format!("all ranks wait in step {step}: {}", self.whereabouts()));
                }
                return false;
            }
        }
        self.upto.retain(|(of, _)| *of > step);
        true
    }

    fn whereabouts(&self) -> String {
        let of = |(number, rank): (usize, &Rank)| match rank.queue.front() {
            Some(at) => format!("rank {number} in step {} layer {}", at.step, at.layer),
            None => format!("rank {number} has no step"),
        };
        self.ranks.iter().enumerate().map(of).collect::<Vec<_>>().join(", ")
    }

    /// One micro step of a rank; false if it cannot move.
    fn advance(&mut self, number: usize) -> bool {
        let Some(&at) = self.ranks[number].queue.front() else { return false };
        let epoch = self.ranks[number].epoch + 1;
        let half = if self.wiring == Wiring::OneHalf { 0 } else { (epoch % 2) as usize };
        match self.ranks[number].phase {
            Phase::Push(peer) => {
                if self.ranks[peer].epoch + 1 < epoch {
                    self.leads += 1;
                }
                let owner = &mut self.ranks[peer];
                if owner.halves[number][half].is_some_and(|(of, _)| of > owner.read[number]) {
                    self.wrong = Some(format!("rank {number} wrote {at:?} over what rank {peer} had not read"));
                }
                owner.halves[number][half] = Some((epoch, at));
                owner.flags[number] = epoch;
                let next = peer + 1;
                let end = next == self.ranks.len();
                self.ranks[number].phase = if end { Phase::Wait } else { Phase::Push(next) };
            }
            Phase::Wait => {
                let waits = self.wiring != Wiring::NoWait;
                if waits && self.ranks[number].flags.iter().any(|&flag| flag < epoch) {
                    return false;
                }
                self.ranks[number].phase = Phase::Read;
            }
            Phase::Read => {
                let rank = &mut self.ranks[number];
                for (peer, halves) in rank.halves.iter().enumerate() {
                    let found = halves[half].map(|(_, found)| found);
                    if found != Some(at) {
                        self.wrong = Some(format!("rank {number} in {at:?} read {found:?} of rank {peer}"));
                    }
                }
                rank.read.fill(epoch);
                rank.epoch = epoch;
                rank.queue.pop_front();
                rank.phase = Phase::Push(0);
            }
        }
        true
    }
}
