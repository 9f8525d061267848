//! What several CPU references do row by row around their GEMMs and around the cache.

use super::Paged;
use crate::contract::PAGE_TOKENS;
use crate::cpu::{CpuMemory, OpError, RopeValues};
use crate::math::attend::{Cache, Columns, HEADS_MAX, Heads};
use crate::math::gemm::RowProducts;
use crate::math::{by_row, norm};
use crate::spec::{BufferId, Cols, Precision};

/// Multiply-adds that one SiLU costs as much as.
const SILU_COST: usize = 64;

/// The norm of `cols` of each of `rows`, one after the other into `out`.
pub(super) fn norm_rows(
    memory: &CpuMemory,
    cols: Cols,
    weight: &[f32],
    eps: f32,
    rows: impl IntoIterator<Item = usize>,
    out: &mut [f32],
) {
    let (x, stride) = (memory.f32(cols.buffer), memory.stride(cols.buffer));
    for (row, out) in rows.into_iter().zip(out.chunks_exact_mut(cols.width)) {
        let x = &x[row * stride + cols.offset..][..cols.width];
        norm::rms_norm(memory.precision, x, weight, eps, out);
    }
}

/// The first `lines` lines of `out`, `inner` wide, from gate | up products; a line without products is left alone.
pub(super) fn gate_rows<'a>(
    precision: Precision,
    inner: usize,
    out: &mut [f32],
    lines: usize,
    products: impl Fn(usize) -> Option<RowProducts<'a>> + Sync,
) {
    by_row(&mut out[..lines * inner], inner, inner * SILU_COST, &|line, out| {
        if let Some(products) = products(line) {
            crate::math::vectorised(
                #[inline(always)]
                || products.gated(precision, out),
            );
        }
    });
}

/// The group of a routed expert among those of this rank; `id` may name no expert (a pad row's) or another rank's.
pub(super) fn local_expert(id: u32, first: usize, count: usize) -> Option<usize> {
    (id as usize).checked_sub(first).filter(|&local| local < count)
}

/// How the rows of a step find their cache rows.
pub(super) struct CacheRows<'a> {
    slots: &'a [u32],
    positions: &'a [u32],
    block_table: &'a [u32],
    pages_per_slot: usize,
}

impl<'a> CacheRows<'a> {
    pub fn of(memory: &'a CpuMemory, paged: Paged, slot: BufferId, position: BufferId) -> Self {
        CacheRows {
            slots: memory.u32(slot),
            positions: memory.u32(position),
            block_table: memory.u32(paged.block_table),
            pages_per_slot: memory.stride(paged.block_table),
        }
    }

    /// The row's position, if a table of `limit` positions has it and its slot has a page for it.
    pub fn position(&self, op: &'static str, row: usize, limit: usize) -> Result<usize, OpError> {
        let position = self.positions[row] as usize;
        let limit = limit.min(self.pages_per_slot * PAGE_TOKENS);
        if position < limit { Ok(position) } else { Err(OpError::Position { op, row, position, limit }) }
    }

    /// Index of the cache row where the row's token is kept.
    pub fn line(&self, row: usize) -> usize {
        let position = self.positions[row] as usize;
        self.pages(row)[position / PAGE_TOKENS] as usize * PAGE_TOKENS + position % PAGE_TOKENS
    }

    /// The block table of the row's slot.
    pub fn pages(&self, row: usize) -> &'a [u32] {
        &self.block_table[self.slots[row] as usize * self.pages_per_slot..][..self.pages_per_slot]
    }
}

/// The rotary table's values at a row's position, and the row's line in the cache.
pub(super) fn placed<'a>(
    op: &'static str,
    rows: &CacheRows,
    row: usize,
    rope: &'a RopeValues,
) -> Result<(&'a [f32], usize), OpError> {
    let position = rows.position(op, row, rope.positions())?;
    Ok((rope.at(position), rows.line(row)))
}

/// Attention over all rows: query heads `heads`, `sharing` of which share the columns that `columns(first head)` names.
pub(super) struct Attention<'a> {
    pub op: &'static str,
    pub precision: Precision,
    pub scale: f32,
    pub heads: usize,
    pub sharing: usize,
    pub kv: &'a [f32],
    pub width: usize,
    pub rows: CacheRows<'a>,
}

impl Attention<'_> {
    /// `query(row, head)` gives a query as slices in column order; `out` is `[rows][heads][values]`.
    pub fn run<'q>(
        &self,
        columns: impl Fn(usize) -> Columns + Sync,
        query: impl Fn(usize, usize) -> [&'q [f32]; 2] + Sync,
        rows: usize,
        out: &mut [f32],
    ) -> Result<(), OpError> {
        let mut keys = 0;
        for row in 0..rows {
            keys += self.rows.position(self.op, row, usize::MAX)? + 1;
        }
        // As many heads at a time as fit the lanes and divide those that share their keys.
        let together = (1..=HEADS_MAX).rev().find(|n| self.sharing.is_multiple_of(*n)).expect("1 divides all");
        let blocks = self.heads / together;
        let columns_of_first = columns(0);
        let cost =
            keys.div_ceil(rows.max(1)) * together * (columns_of_first.keys.len() + columns_of_first.values.len());
        by_row(out, together * columns_of_first.values.len(), cost, &|line, out| {
            let (row, first) = (line / blocks, line % blocks * together);
            let cache = Cache {
                kv: self.kv,
                pages: self.rows.pages(row),
                width: self.width,
                len: self.rows.positions[row] as usize + 1,
            };
            let (precision, scale) = (self.precision, self.scale);
            let heads = Heads { precision, scale, columns: columns(first), cache, count: together };
            heads.attend(|head| query(row, first + head), out);
        });
        Ok(())
    }
}
