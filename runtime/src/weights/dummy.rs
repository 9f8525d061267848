//! Weights without files (`--load-format dummy`): the seeded generator of `kernels::dummy`, norms 1.
//!
//! An element depends on (seed, tensor name, its index in that tensor) alone, so files that `checkpoint::write` makes
//! from the same seed hold the same model, and so does every device, rank and expert-parallel degree.

use super::parts::{self, Tensors};
use slotgraph_graphs::source::{DummySpec, Source, SourceError};
use slotgraph_kernels::{TensorPart, WeightSpec, dummy};
use std::ops::Range;

/// bf16 bits of 1.0.
const ONE: u16 = 0x3f80;

/// A source that needs no file.
#[derive(Clone, Copy, Debug)]
pub struct DummySource {
    pub seed: u64,
}

/// Elements `first`… of tensor `name` of `dims` dimensions. Vectors named `…norm.weight` are 1; all else is the
/// generator.
pub fn fill(seed: u64, name: &str, dims: usize, first: u64, out: &mut [u16]) {
    if dims == 1 && name.ends_with("norm.weight") {
        return out.fill(ONE);
    }
    let key = dummy::tensor_key(seed, name);
    for (index, value) in (first..).zip(out) {
        *value = dummy::element(key, index);
    }
}

impl Tensors for DummySource {
    fn fill(&self, part: &TensorPart, first: u64, out: &mut [u16]) -> Result<(), String> {
        fill(self.seed, &part.tensor, part.tensor_shape.len(), first, out);
        Ok(())
    }
}

impl Source for DummySource {
    fn read_rows(
        &self,
        spec: &WeightSpec,
        group: usize,
        rows: Range<usize>,
        out: &mut [u16],
    ) -> Result<(), SourceError> {
        parts::read_rows(self, spec, group, rows, out)
    }
    fn dummy(&self) -> Option<DummySpec> {
        Some(DummySpec { seed: self.seed })
    }
}
