//! GEMM over packed panels.

/// Some input rows of one weight group.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    pub group: usize,
    /// First of its rows, and how many.
    pub first: usize,
    pub count: usize,
}
