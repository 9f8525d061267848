//! A model's weights on the host: validated whole, then read by spec.
//!
//! `shards` finds and checks the files, `parts` assembles a weight from tensors, `files` and `dummy` say what a tensor contains. Devices see
//! only `graphs::source::Source`. **Invariant:** nothing is read into a weight that was not validated first.

pub mod blob;
pub mod dummy;
pub mod files;
pub mod header;
mod parts;
pub mod progress;
pub mod shards;

use slotgraph_kernels::WeightSpec;
use std::collections::BTreeMap;

/// The checkpoint tensors that a model needs, with the shapes they must have.
pub type Required = BTreeMap<String, Vec<usize>>;

/// What a plan's weights need.
pub fn required(weights: &[WeightSpec]) -> Required {
    let mut required = Required::new();
    for part in weights.iter().flat_map(|weight| &weight.parts) {
        let shape = required.entry(part.tensor.clone()).or_insert_with(|| part.tensor_shape.clone());
        assert_eq!(*shape, part.tensor_shape, "a plan gives tensor {} two shapes", part.tensor);
    }
    required
}

/// Elements of the tensors of `required`; `u64::MAX` stands for that many and more.
pub fn elements(required: &Required) -> u64 {
    let of = |shape: &Vec<usize>| shape.iter().fold(1u64, |product, n| product.saturating_mul(*n as u64));
    required.values().map(of).fold(0, u64::saturating_add)
}
