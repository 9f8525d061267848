//! exchange: gathered[n, r, :] = rank n's partial[r, :], on every rank. Moves bytes, never adds.

use crate::spec::BufferId;

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
}
