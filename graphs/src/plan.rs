//! A plan: the ops of one step shape over named buffers, as data.
//!
//! Built by `model::build`, checked by `Plan::verify`, read by every device. **Invariant:** the same model has the same
//! buffers and weights, in the same order and so with the same ids, in every plan; only extents that follow the step shape
//! differ. Nothing in a plan is a scalar that changes from step to step.

use slotgraph_kernels::{BufferId, BufferSpec, Op, Specs, WeightId, WeightSpec};
use std::collections::HashSet;

/// Which part of the model a rank runs. `ranks` is 1, 2, 4 or 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankShape {
    pub rank: usize,
    pub ranks: usize,
}

impl RankShape {
    /// The only rank of one.
    pub const SINGLE: RankShape = RankShape { rank: 0, ranks: 1 };
}

/// An op and the layer it belongs to (None: the ends of the model).
#[derive(Clone, Debug, PartialEq)]
pub struct PlacedOp {
    pub layer: Option<usize>,
    pub op: Op,
}

/// The ops of one step shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// `model_type` of the model.
    pub model: String,
    pub rank: RankShape,
    /// R.
    pub rows: usize,
    /// L.
    pub logit_rows: usize,
    pub buffers: Vec<BufferSpec>,
    pub weights: Vec<WeightSpec>,
    pub ops: Vec<PlacedOp>,
}

impl Specs for Plan {
    fn buffer(&self, id: BufferId) -> &BufferSpec {
        &self.buffers[id.0 as usize]
    }
    fn weight(&self, id: WeightId) -> &WeightSpec {
        &self.weights[id.0 as usize]
    }
    fn rows(&self) -> usize {
        self.rows
    }
    fn logit_rows(&self) -> usize {
        self.logit_rows
    }
}

/// Why a plan cannot be built or must not be run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error("no plan of model {model}: {reason}")]
    Unbuildable { model: &'static str, reason: String },
    #[error("two {what}s are named {name}")]
    DuplicateName { what: &'static str, name: String },
}

impl Plan {
    /// Refuses a plan that a device must not run.
    pub fn verify(&self) -> Result<(), PlanError> {
        unique("buffer", self.buffers.iter().map(|buffer| &buffer.name))?;
        unique("weight", self.weights.iter().map(|weight| &weight.name))
    }
}

fn unique<'a>(what: &'static str, names: impl Iterator<Item = &'a String>) -> Result<(), PlanError> {
    let mut seen = HashSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(PlanError::DuplicateName { what, name: name.clone() });
        }
    }
    Ok(())
}
