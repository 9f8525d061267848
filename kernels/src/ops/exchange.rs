//! exchange: gathered[n, r, :] = rank n's partial[r, :], on every rank. Moves bytes, never adds.

use super::Operation;
use crate::cpu::{CpuMemory, OpError};
use crate::shape::{Check, ShapeError};
use crate::spec::{BufferId, DType, WeightId};

#[derive(Clone, Debug, PartialEq)]
pub struct Exchange {
    /// Out `[ranks, R, hidden]` f32.
    pub gathered: BufferId,
    /// In `[R, hidden]` f32.
    pub partial: BufferId,
    pub rank: usize,
    pub ranks: usize,
}

/// Rows that one launch of the peer-to-peer exchange moves; longer shapes go in pieces.
pub const PIECE_ROWS: usize = 256;
/// Most rows that travel as lines, each float with its epoch: a fence and a flag cost more than twice the bytes, up to about 128 rows on two H200s
/// (`ledger-edges.md`).
pub const LINE_ROWS: usize = 64;
/// Blocks of such a launch, always: a block meets its namesakes on the other ranks.
pub const BLOCKS: usize = 32;
/// Places for ranks in the scratch header and among the kernel's arguments.
pub const PEERS_MAX: usize = 8;

/// Where things lie in a rank's exchange scratch, in bytes. Peers write flags and staging; the rest is its owner's.
///
/// `flags u32 [BLOCKS, PEERS_MAX]` (the newest epoch that a peer's block has pushed) · `epochs u32 [BLOCKS]` (the last of each own block)
/// · `failed u32` · at `DATA_AT` staging `f32 [2, ranks, PIECE_ROWS, hidden]` · at `lines_at` lines `(f32, u32 epoch) [2, ranks, LINE_ROWS, hidden]`,
/// eight bytes each that are stored as one. All zero before the first launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scratch {
    pub ranks: usize,
    pub hidden: usize,
}

impl Scratch {
    pub const EPOCHS_AT: usize = BLOCKS * PEERS_MAX * 4;
    pub const FAILED_AT: usize = 2048;
    pub const DATA_AT: usize = 4096;

    /// One rank's place in one half of the staging area.
    pub fn piece_bytes(&self) -> usize {
        PIECE_ROWS * self.hidden * size_of::<f32>()
    }
    /// Where lines begin: behind the staging.
    pub fn lines_at(&self) -> usize {
        Scratch::DATA_AT + 2 * self.ranks * self.piece_bytes()
    }
    /// One rank's place in one half of the lines.
    pub fn lines_bytes(&self) -> usize {
        LINE_ROWS * self.hidden * size_of::<u64>()
    }
    pub fn bytes(&self) -> usize {
        self.lines_at() + 2 * self.ranks * self.lines_bytes()
    }
}

/// Words of the status page: pinned host memory, by which a spinning launch and its host speak. CODE is written last.
pub mod status {
    /// 0, TIMEOUT or STOPPED.
    pub const CODE: usize = 0;
    /// The rank that waited, the one it waited for, the epoch it wanted and the one that it saw.
    pub const RANK: usize = 1;
    pub const PEER: usize = 2;
    pub const WANTED: usize = 3;
    pub const SEEN: usize = 4;
    /// Rows of the step.
    pub const ROWS: usize = 5;
    /// Set by the host: do not wait any longer.
    pub const STOP: usize = 8;
    /// Set by the host: how long a spin may last.
    pub const LIMIT_MS: usize = 9;
    pub const WORDS: usize = 16;
    pub const TIMEOUT: u32 = 1;
    pub const STOPPED: u32 = 2;
}

/// Why an exchange did not complete.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExchangeError {
    #[error("rank {waiting} waited for rank {missing} at exchange {sequence} for longer than {timeout_ms} ms")]
    Timeout { waiting: usize, missing: usize, sequence: u64, timeout_ms: u64 },
    #[error("rank {rank} left the exchange: {reason}")]
    PeerGone { rank: usize, reason: String },
}

/// What the CPU device's ranks meet over; implemented in `graphs` with threads.
pub trait AllGather: Send + Sync {
    /// Places rank `rank`'s `send` into every rank's `gathered[rank · send.len() …]`; returns when `gathered` is whole.
    fn all_gather(&self, rank: usize, send: &[f32], gathered: &mut [f32]) -> Result<(), ExchangeError>;
    /// Rank `rank` takes no further part: whoever waits for it now or later hears why.
    fn leave(&self, rank: usize, reason: &str);
}

impl Operation for Exchange {
    fn name(&self) -> &'static str {
        "exchange"
    }
    fn reads(&self) -> Vec<BufferId> {
        vec![self.partial]
    }
    fn writes(&self) -> Vec<BufferId> {
        vec![self.gathered]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![]
    }
    fn check(&self, check: &Check) -> Result<(), ShapeError> {
        check.holds("ranks", matches!(self.ranks, 1 | 2 | 4 | 8), "1, 2, 4 or 8", self.ranks)?;
        check.holds("rank", self.rank < self.ranks, "below ranks", self.rank)?;
        let (_, hidden) = check.any(self.partial, DType::F32, 2)?;
        check.rows(self.partial, DType::F32, hidden)?;
        check.lines(self.gathered, DType::F32, self.ranks, check.specs.rows() * hidden)?;
        check.distinct(&[self.gathered, self.partial])
    }

    fn run(&self, memory: &mut CpuMemory) -> Result<(), OpError> {
        let gather = memory.exchange.clone().ok_or(OpError::NoPeers)?;
        let len = memory.plan_rows * memory.stride(self.partial);
        let mut gathered = memory.take_f32(self.gathered);
        let partial = &memory.f32(self.partial)[..len];
        let done = gather.all_gather(self.rank, partial, &mut gathered[..self.ranks * len]);
        memory.put_f32(self.gathered, gathered);
        Ok(done?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_the_scratch_follow_one_another() {
        let scratch = Scratch { ranks: 4, hidden: 2048 };
        assert_eq!(scratch.piece_bytes(), 256 * 2048 * 4);
        assert_eq!(scratch.lines_at(), 4096 + 2 * 4 * 256 * 2048 * 4);
        assert_eq!(scratch.bytes(), scratch.lines_at() + 2 * 4 * LINE_ROWS * 2048 * 8);
        // Lines are stored sixteen bytes at a time, and a step of them is one piece.
        assert!(scratch.lines_at().is_multiple_of(16) && scratch.lines_bytes().is_multiple_of(16));
        const { assert!(LINE_ROWS <= PIECE_ROWS) };
    }
}
