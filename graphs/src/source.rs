//! Where a rank's weights come from: files, bytes in the binary, or a seeded generator.
//!
//! Implemented in `runtime::weights`; read by devices while they prepare, from several threads.
//! **Invariant:** a source that exists was validated whole (every tensor present, right shape and dtype); reads can fail
//! only for I/O.

use slotgraph_kernels::spec::{WeightForm, WeightSpec};
use std::ops::Range;

/// Why a weight could not be read.
#[derive(Debug, thiserror::Error)]
#[error("weight {weight}: {reason}")]
pub struct SourceError {
    pub weight: String,
    pub reason: String,
}

/// Weights by spec.
pub trait Source: Send + Sync {
    /// Rows `rows` of group `group` of `spec` as bf16 bits, row-major (`group_extents` says of what shape a group is), into
    /// `out`, whose length is exactly `rows` × columns; elements that no part covers become zero. Never called for computed
    /// forms.
    fn read_rows(
        &self,
        spec: &WeightSpec,
        group: usize,
        rows: Range<usize>,
        out: &mut [u16],
    ) -> Result<(), SourceError>;
    /// All rows of a group.
    fn read(&self, spec: &WeightSpec, group: usize, out: &mut [u16]) -> Result<(), SourceError> {
        self.read_rows(spec, group, 0..group_extents(&spec.form).0, out)
    }
    /// Set when matrices and tables are `kernels::dummy::element` of their tensors: a device may then make them itself,
    /// with the same bits as `read`. Vectors are always read.
    fn dummy(&self) -> Option<DummySpec> {
        None
    }
}

/// A seeded generator in place of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DummySpec {
    pub seed: u64,
}

/// Rows and columns of one group: `[n, k]` of a GEMM, `[n, 1]` of a vector, a table's own. Computed forms have none.
pub fn group_extents(form: &WeightForm) -> (usize, usize) {
    match form {
        WeightForm::Gemm { n, k, .. } => (*n, *k),
        WeightForm::Vector { n } => (*n, 1),
        WeightForm::Table { rows, cols } => (*rows, *cols),
        WeightForm::Rope(_) => (0, 0),
    }
}
