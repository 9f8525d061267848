//! What an op may name: buffers and weights, by id, with their types and shapes.
//!
//! Used by ops (shape checks), plans, and devices (allocation). **Invariant:** a spec is plain data; it holds no
//! address and no contents.

use crate::contract::GemmKind;
use std::ops::Range;

/// Index into `Plan::buffers`. The same buffer has the same id in every plan of one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u32);

/// Index into `Plan::weights`. The same weight has the same id in every plan of one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightId(pub u32);

/// How a buffer's elements are stored on a GPU. The CPU device keeps `Bf16` buffers as f32 that are representable in
/// bf16 (`Precision::Contract`) or unrounded (`Precision::Oracle`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    F32,
    Bf16,
    U32,
}

impl DType {
    /// Bytes of one element on a GPU.
    pub fn bytes(self) -> usize {
        match self {
            DType::F32 | DType::U32 => 4,
            DType::Bf16 => 2,
        }
    }
}

/// Whether values are rounded to bf16 at the contract's rounding points.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// No rounding: fp32 throughout, the CPU device's default. Equals the fp32 oracle token for token.
    Oracle,
    /// bf16 (nearest even) exactly at the contract's points. CUDA always.
    Contract,
}

/// How long a buffer's contents live, which decides where it is allocated and what `verify` may assume of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Written before it is read within every step.
    Activation,
    /// Kernel-private working space; contents mean nothing between ops.
    Scratch,
    /// Per-slot state that outlives a step.
    SlotState,
    /// The page pool.
    Kv,
    /// Pinned, host-written ring (step entries).
    InputRing,
    /// Pinned, host-read ring (step records).
    OutputRing,
    /// Exchange scratch that peers may read or write.
    Exchange,
}

/// One buffer of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferSpec {
    pub name: String,
    pub dtype: DType,
    /// Row-major extents, outermost first. Extents that depend on the step shape are this plan's.
    pub shape: Vec<usize>,
    pub role: Role,
}

impl BufferSpec {
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.bytes()
    }
}

/// Some columns of a row-major 2-D buffer: `width` elements from column `offset` of every row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cols {
    pub buffer: BufferId,
    pub offset: usize,
    pub width: usize,
}

/// A rectangle of one checkpoint tensor and where it lands in a weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPart {
    /// Name in the checkpoint.
    pub tensor: String,
    /// Shape the whole tensor must have in the file.
    pub tensor_shape: Vec<usize>,
    /// Rows of the tensor (seen as `[shape[0], product of the rest]`) that are taken.
    pub rows: Range<usize>,
    /// Take the transpose of those rows.
    pub transpose: bool,
    /// Group (head, expert) of the weight this part belongs to.
    pub group: usize,
    /// First row of the group where the part lands, after transposition.
    pub dst_row: usize,
}

/// The form in which a device keeps a weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WeightForm {
    /// `groups` matrices `[n, k]` (output features × input features), bf16, applied as `y = W x`.
    /// For gate | up kinds the first n/2 rows are gate, the rest up; a device may interleave them.
    Gemm { kind: GemmKind, groups: usize, n: usize, k: usize },
    /// A vector of n bf16 values kept as f32 (norm weights, biases).
    Vector { n: usize },
    /// `[rows, cols]` bf16 looked up by row (embedding).
    Table { rows: usize, cols: usize },
    /// cos and sin of rotary position embedding, `[positions, pairs, 2]` f32, computed from the spec.
    Rope(RopeTable),
}

/// One weight of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightSpec {
    pub name: String,
    pub form: WeightForm,
    /// Checkpoint tensors that fill it; empty for computed forms.
    pub parts: Vec<TensorPart>,
}

/// Rotary embedding, resolved to per-pair inverse frequencies (f32 bits, so that specs compare and hash exactly).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RopeTable {
    pub positions: usize,
    pub inv_freq_bits: Vec<u32>,
    /// Factor on cos and sin (YaRN's mscale ratio; 1.0 otherwise), f32 bits.
    pub scale_bits: u32,
}

/// What an op's shape check sees: the specs behind the ids.
pub trait Specs {
    fn buffer(&self, id: BufferId) -> &BufferSpec;
    fn weight(&self, id: WeightId) -> &WeightSpec;
    /// Rows R of the step shape.
    fn rows(&self) -> usize;
    /// Logit rows L of the step shape.
    fn logit_rows(&self) -> usize;
}
