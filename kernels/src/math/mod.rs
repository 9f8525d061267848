//! The pure functions that CPU references share. Each keeps the contract's order of sums; none knows of ops or buffers.

pub(crate) mod bf16;
pub(crate) mod gemm;
