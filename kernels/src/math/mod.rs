//! The pure functions that CPU references share. Each keeps the contract's order of sums and knows nothing of ops or buffers.
//!
//! **Invariant:** a vector lane is always a different output (or a lane that the contract itself names), so the width of the
//! machine's vectors, the number of threads and the shape of a block change no bit. Nothing here fuses a multiply with an add.

pub(crate) mod attend;
pub(crate) mod bf16;
pub(crate) mod exp;
pub(crate) mod gemm;
pub(crate) mod norm;
pub(crate) mod philox;
pub(crate) mod rope;
pub(crate) mod route;
pub(crate) mod sample;
#[cfg(test)]
pub(crate) mod tests;

use crate::spec::Precision;

/// Multiply-adds below which a second thread does not pay.
pub(crate) const PARALLEL_WORK: usize = 1 << 19;

/// Runs `work` compiled for the widest vectors that this processor has. What it calls must be `#[inline(always)]`.
#[inline(always)]
pub(crate) fn vectorised<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}

/// Runs both halves, on two threads when together they cost more than a hand-over (`work` counts multiply-adds).
pub(crate) fn join(work: usize, left: impl FnOnce() + Send, right: impl FnOnce() + Send) {
    if work < PARALLEL_WORK {
        left();
        right();
    } else {
        rayon::join(left, right);
    }
}

/// Runs `work(row, line)` for each row's line of `width` elements of `out`; `cost` is one row's, in multiply-adds.
pub(crate) fn by_row<T: Send>(out: &mut [T], width: usize, cost: usize, work: &(impl Fn(usize, &mut [T]) + Sync)) {
    fn split<T: Send>(
        out: &mut [T],
        width: usize,
        cost: usize,
        first: usize,
        work: &(impl Fn(usize, &mut [T]) + Sync),
    ) {
        let rows = out.len() / width;
        if rows * cost < PARALLEL_WORK || rows < 2 {
            for (row, line) in out.chunks_exact_mut(width).enumerate() {
                work(first + row, line);
            }
            return;
        }
        let half = rows / 2;
        let (left, right) = out.split_at_mut(half * width);
        rayon::join(|| split(left, width, cost, first, work), || split(right, width, cost, first + half, work));
    }
    split(out, width, cost, 0, work);
}

/// A value at one of the contract's rounding points.
#[inline(always)]
pub(crate) fn rounded(precision: Precision, x: f32) -> f32 {
    match precision {
        Precision::Oracle => x,
        Precision::Contract => bf16::round(x),
    }
}

/// Rounds values at one of the contract's rounding points.
pub(crate) fn round_all(precision: Precision, values: &mut [f32]) {
    if precision == Precision::Contract {
        values.iter_mut().for_each(|x| *x = bf16::round(*x));
    }
}
