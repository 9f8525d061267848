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
