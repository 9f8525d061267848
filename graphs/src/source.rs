//! Where a rank's weights come from: files, bytes in the binary, or a seeded generator.
//!
//! Implemented in `runtime::weights`; read by devices while they prepare, from several threads.
//! **Invariant:** a source that exists was validated whole (every tensor present, right shape and dtype); reads can fail
//! only for I/O.

use slotgraph_kernels::spec::WeightSpec;

/// Why a weight could not be read.
#[derive(Debug, thiserror::Error)]
#[error("weight {weight}: {reason}")]
pub struct SourceError {
    pub weight: String,
    pub reason: String,
}

/// Weights by spec.
pub trait Source: Send + Sync {
    /// Group `group` of `spec` as bf16 bits, row-major `[n, k]` (vectors and tables: as declared), into `out`.
    /// `out.len()` is exactly the group's element count; elements that no part covers become zero. Never called for
    /// computed forms.
    fn read(&self, spec: &WeightSpec, group: usize, out: &mut [u16]) -> Result<(), SourceError>;
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
