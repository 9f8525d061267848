//! A plan: the ops of one step shape over named buffers, as data.
//!
//! Built by `model::build`, checked by `Plan::verify`, read by every device. **Invariant:** the same model has the same
//! buffers and weights, in the same order and so with the same ids, in every plan; only extents that follow the step shape
//! differ. Nothing in a plan is a scalar that changes from step to step.

#[cfg(test)]
mod tests;
mod text;
mod verify;

use slotgraph_kernels::ShapeError;
use slotgraph_kernels::{BufferId, BufferSpec, Op, Role, Specs, WeightId, WeightSpec};
use std::fmt;

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

/// The ops of one step shape. `Display` prints it for people and golden files.
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

impl Plan {
    /// Every op, in order, with the op behind it.
    pub fn ops_with_next(&self) -> impl Iterator<Item = (&PlacedOp, Option<&Op>)> {
        let next = self.ops.iter().skip(1).map(|placed| Some(&placed.op)).chain([None]);
        self.ops.iter().zip(next)
    }

    /// Refuses a plan that a device must not run: the rules are in `plan/verify.rs`.
    pub fn verify(&self) -> Result<(), PlanError> {
        verify::verify(self)
    }
}

/// Where in a plan something is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    pub op: &'static str,
    pub layer: Option<usize>,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layer {
            Some(layer) => write!(f, "{} of layer {layer}", self.op),
            None => f.write_str(self.op),
        }
    }
}

/// Why a plan cannot be built or must not be run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error("no plan of model {model}: {reason}")]
    Unbuildable { model: &'static str, reason: String },
    #[error("two {what}s are named {name}")]
    DuplicateName { what: &'static str, name: String },
    #[error("{site} names {what} {id}, and the plan has {count}")]
    UnknownId { site: Site, what: &'static str, id: u32, count: usize },
    #[error("{}: {source}", Site { op: source.op, layer: *layer })]
    Shape { layer: Option<usize>, source: ShapeError },
    #[error("the plan's ends: {0}")]
    Ends(String),
    #[error("{site} reads {buffer}, which nothing before it in this step and layer wrote")]
    ReadBeforeWrite { site: Site, buffer: String },
    #[error("what {site} writes to {buffer} is never read")]
    LostWrite { site: Site, buffer: String },
    #[error("{site} writes {buffer} and names it once more")]
    Alias { site: Site, buffer: String },
    #[error("{site} may not touch {buffer}, whose role is {role:?}")]
    Role { site: Site, buffer: String, role: Role },
    #[error("{site} leaves pad rows without their place: {reason}")]
    PadContract { site: Site, reason: String },
    #[error("{what} {name} is used by {uses} ops, not by {expected}")]
    Uses { what: &'static str, name: String, uses: usize, expected: &'static str },
    #[error("weight {weight}: {reason}")]
    Parts { weight: String, reason: String },
}
