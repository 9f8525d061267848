//! Shape checks: what an op asks of the specs behind its ids, and the error that says which buffer disagrees.
//!
//! Used by every op's `check`, which `Plan::verify` calls before any device sees the plan. **Invariant:** a plan whose ops
//! all pass needs no further shape check at run time. A buffer's outermost extent counts its lines (rows, slots, pages) and
//! the product of the rest is the width of one line; how a plan factors that width is free.

use crate::contract::{GemmKind, PAGE_TOKENS, experts_of_rank};
use crate::ops::{Paged, RowBuffers, SlotBuffers};
use crate::spec::{BufferId, Cols, DType, Specs, WeightForm, WeightId};

/// Why an op does not fit the buffers or weights it names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op}: {buffer} must be {expected}, got {got}")]
pub struct ShapeError {
    pub op: &'static str,
    /// Name of the buffer or weight in the plan, or the op's field.
    pub buffer: String,
    pub expected: String,
    pub got: String,
}

/// One op's view of the specs.
pub(crate) struct Check<'a> {
    pub op: &'static str,
    pub specs: &'a dyn Specs,
}

type Checked = Result<(), ShapeError>;

impl Check<'_> {
    pub fn error(&self, buffer: impl Into<String>, expected: impl Into<String>, got: impl Into<String>) -> ShapeError {
        ShapeError { op: self.op, buffer: buffer.into(), expected: expected.into(), got: got.into() }
    }

    /// A condition on the op's own numbers.
    pub fn holds(&self, field: &str, condition: bool, expected: &str, got: impl std::fmt::Display) -> Checked {
        if condition { Ok(()) } else { Err(self.error(field, expected, got.to_string())) }
    }

    /// `lines × width` elements of `dtype`.
    pub fn lines(&self, id: BufferId, dtype: DType, lines: usize, width: usize) -> Checked {
        let spec = self.specs.buffer(id);
        let fits = spec.dtype == dtype
            && spec.shape.first() == Some(&lines)
            && spec.shape[1..].iter().product::<usize>() == width;
        if fits {
            Ok(())
        } else {
            let got = format!("{:?} {:?}", spec.dtype, spec.shape);
            Err(self.error(&spec.name, format!("{dtype:?} [{lines}, {width}]"), got))
        }
    }

    /// One line of `width` for each row of the step.
    pub fn rows(&self, id: BufferId, dtype: DType, width: usize) -> Checked {
        self.lines(id, dtype, self.specs.rows(), width)
    }

    /// One line of `width` for each logit row of the step.
    pub fn logit_rows(&self, id: BufferId, dtype: DType, width: usize) -> Checked {
        self.lines(id, dtype, self.specs.logit_rows(), width)
    }

    /// Any number of lines of any width, of `dtype`; gives both.
    pub fn any(&self, id: BufferId, dtype: DType, axes: usize) -> Result<(usize, usize), ShapeError> {
        let spec = self.specs.buffer(id);
        if spec.dtype != dtype || spec.shape.len() < axes || spec.elements() == 0 {
            let got = format!("{:?} {:?}", spec.dtype, spec.shape);
            return Err(self.error(&spec.name, format!("{dtype:?} of at least {axes} extents, none of them 0"), got));
        }
        Ok((spec.shape[0], spec.shape[1..].iter().product()))
    }

    /// Columns of a `[R, …]` f32 buffer.
    pub fn cols(&self, cols: Cols, width: usize) -> Checked {
        let (_, line) = self.any(cols.buffer, DType::F32, 2)?;
        self.rows(cols.buffer, DType::F32, line)?;
        if cols.width == width && cols.offset + cols.width <= line {
            return Ok(());
        }
        let got = format!("columns {}..{} of {line}", cols.offset, cols.offset + cols.width);
        Err(self.error(&self.specs.buffer(cols.buffer).name, format!("{width} columns inside a line"), got))
    }

    /// The cache of one layer, its block table, and the per-row inputs that find a page.
    pub fn paged(&self, paged: Paged, width: usize, slot: BufferId, position: BufferId) -> Checked {
        let (pages, _) = self.any(paged.kv, DType::Bf16, 2)?;
        self.lines(paged.kv, DType::Bf16, pages, PAGE_TOKENS * width)?;
        self.any(paged.block_table, DType::U32, 2)?;
        self.rows(slot, DType::U32, 1)?;
        self.rows(position, DType::U32, 1)
    }

    pub fn row_buffers(&self, rows: &RowBuffers) -> Checked {
        for id in [rows.slot, rows.token, rows.position, rows.live] {
            self.rows(id, DType::U32, 1)?;
        }
        for id in [rows.logit_row, rows.logit_kind, rows.logit_target] {
            self.logit_rows(id, DType::U32, 1)?;
        }
        self.step(rows.step)
    }

    /// The step-wide words.
    pub fn step(&self, id: BufferId) -> Checked {
        self.lines(id, DType::U32, crate::ops::step::WORDS, 1)
    }

    /// The slot tables; gives the vocabulary's size.
    pub fn slot_buffers(&self, slots: &SlotBuffers) -> Result<usize, ShapeError> {
        let (seats, _) = self.any(slots.generation, DType::U32, 1)?;
        for id in [slots.token, slots.position, slots.generation, slots.ended, slots.generated] {
            self.lines(id, DType::U32, seats, 1)?;
        }
        let (_, pages) = self.any(slots.pages, DType::U32, 2)?;
        self.lines(slots.pages, DType::U32, seats, pages)?;
        self.lines(slots.params, DType::U32, seats, crate::entry::SLOT_WORDS)?;
        self.lines(slots.bias, DType::U32, seats, crate::contract::LOGIT_BIAS_MAX * crate::entry::BIAS_WORDS)?;
        let (_, vocab) = self.any(slots.counts, DType::U32, 2)?;
        self.lines(slots.counts, DType::U32, seats, vocab)?;
        Ok(vocab)
    }

    /// A GEMM weight of one of `kinds`; gives (groups, n, k).
    pub fn gemm(&self, id: WeightId, kinds: &[GemmKind]) -> Result<(usize, usize, usize), ShapeError> {
        let spec = self.specs.weight(id);
        match spec.form {
            WeightForm::Gemm { kind, groups, n, k } if kinds.contains(&kind) && groups * n * k > 0 => {
                Ok((groups, n, k))
            }
            _ => Err(self.error(&spec.name, format!("a gemm of {kinds:?}"), format!("{:?}", spec.form))),
        }
    }

    /// A GEMM weight with these groups and this extent.
    pub fn gemm_is(&self, id: WeightId, kinds: &[GemmKind], groups: usize, n: usize, k: usize) -> Checked {
        let got = self.gemm(id, kinds)?;
        if got == (groups, n, k) {
            return Ok(());
        }
        let name = &self.specs.weight(id).name;
        Err(self.error(name, format!("{groups} × [{n}, {k}]"), format!("{} × [{}, {}]", got.0, got.1, got.2)))
    }

    pub fn vector(&self, id: WeightId, n: usize) -> Checked {
        let spec = self.specs.weight(id);
        if spec.form == (WeightForm::Vector { n }) {
            return Ok(());
        }
        Err(self.error(&spec.name, format!("a vector of {n}"), format!("{:?}", spec.form)))
    }

    pub fn rope(&self, id: WeightId, pairs: usize) -> Checked {
        let spec = self.specs.weight(id);
        match &spec.form {
            WeightForm::Rope(table) if table.inv_freq_bits.len() == pairs && table.positions > 0 => Ok(()),
            WeightForm::Rope(table) => {
                let got = format!("{} pairs over {} positions", table.inv_freq_bits.len(), table.positions);
                Err(self.error(&spec.name, format!("a rope table of {pairs} pairs"), got))
            }
            form => Err(self.error(&spec.name, format!("a rope table of {pairs} pairs"), format!("{form:?}"))),
        }
    }

    /// The experts that a rank owns are whole virtual shards of all of them.
    pub fn owned(&self, experts: usize, first: usize, local: usize) -> Checked {
        let whole = [1, 2, 4, 8].into_iter().any(|ranks| {
            (experts >= crate::contract::EXPERT_SHARDS || ranks == 1)
                && (0..ranks).any(|rank| experts_of_rank(rank, ranks, experts) == (first..first + local))
        });
        self.holds(
            "local_experts",
            whole,
            "those of one rank of 1, 2, 4 or 8",
            format!("{first}..{} of {experts}", first + local),
        )
    }

    /// No two of these buffers are the same one.
    pub fn distinct(&self, ids: &[BufferId]) -> Checked {
        for (at, id) in ids.iter().enumerate() {
            if ids[..at].contains(id) {
                return Err(self.error(
                    &self.specs.buffer(*id).name,
                    "named once",
                    "an output that is also another operand",
                ));
            }
        }
        Ok(())
    }
}
