//! The CPU's memory: the buffers and weights that `Op::run` works on.
//!
//! Built by the CPU device (and by parity checks, which fill the buffers with a GPU's inputs). **Invariant:** what an op
//! writes for a live row depends on neither `rows` nor `compute_padding`. Buffers whose dtype is bf16 are kept as f32:
//! representable in bf16 under `Precision::Contract`, unrounded under `Precision::Oracle`.

mod weight;

pub use weight::{CpuWeight, PANEL, PackedGemm, RopeValues};

use crate::math::gemm::Batch;
use crate::math::sample::Outcome;
use crate::ops::{AllGather, ExchangeError};
use crate::spec::{BufferId, BufferSpec, DType, Precision, WeightId};
use std::sync::Arc;
use std::time::Instant;

/// The contents of one buffer.
#[derive(Clone, Debug, PartialEq)]
pub enum CpuBuffer {
    F32(Vec<f32>),
    U32(Vec<u32>),
}

impl CpuBuffer {
    /// All zeros, as large as `spec` says.
    pub fn zeroed(spec: &BufferSpec) -> Self {
        match spec.dtype {
            DType::F32 | DType::Bf16 => CpuBuffer::F32(vec![0.0; spec.elements()]),
            DType::U32 => CpuBuffer::U32(vec![0; spec.elements()]),
        }
    }
}

/// Everything that ops read and write on a CPU.
pub struct CpuMemory {
    pub precision: Precision,
    /// By `BufferId`. Sized for the largest plan; a smaller plan uses the first lines of each.
    pub buffers: Vec<CpuBuffer>,
    /// Elements of one line of each buffer: the product of all extents but the outermost.
    strides: Vec<usize>,
    /// By `WeightId`; ranks of one process share those that are equal.
    pub weights: Arc<[Arc<CpuWeight>]>,
    /// R of the plan that runs. The device sets it before each step.
    pub plan_rows: usize,
    /// L of the plan that runs. The device sets it before each step.
    pub plan_logit_rows: usize,
    /// Rows this step uses; `fetch` sets it from the entry.
    pub rows: usize,
    /// Logit rows this step uses; `fetch` sets it from the entry.
    pub logit_rows: usize,
    /// Compute all R (and L) rows, as a GPU does, instead of those in use.
    pub compute_padding: bool,
    /// What `exchange` meets the other ranks over.
    pub exchange: Option<Arc<dyn AllGather>>,
    /// Zero of the times that `fetch` and `feed` record.
    pub clock: Instant,
    /// Working space of the op that runs; it grows to the largest need and stays.
    pub(crate) scratch: Scratch,
}

/// Working space, kept between ops so that steps do not allocate.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Inputs of a GEMM's rows: normalised, gathered or rounded.
    pub inputs: Vec<f32>,
    pub batch: Batch,
    pub more_batch: Batch,
    /// GEMM products by panel, and those of a second GEMM beside it.
    pub products: Vec<f32>,
    pub more_products: Vec<f32>,
    /// Router scores.
    pub scores: Vec<f32>,
    pub outcomes: Vec<Outcome>,
}

impl Scratch {
    /// Room for `len` inputs.
    pub fn inputs(&mut self, len: usize) -> &mut [f32] {
        if self.inputs.len() < len {
            self.inputs.resize(len, 0.0);
        }
        &mut self.inputs[..len]
    }
}

impl CpuMemory {
    /// Zeroed buffers for `specs` (those of the largest plan) over `weights`.
    pub fn new(precision: Precision, specs: &[BufferSpec], weights: Arc<[Arc<CpuWeight>]>) -> Self {
        CpuMemory {
            precision,
            buffers: specs.iter().map(CpuBuffer::zeroed).collect(),
            strides: specs.iter().map(|spec| spec.shape.iter().skip(1).product()).collect(),
            weights,
            plan_rows: 0,
            plan_logit_rows: 0,
            rows: 0,
            logit_rows: 0,
            compute_padding: false,
            exchange: None,
            clock: Instant::now(),
            scratch: Scratch::default(),
        }
    }

    /// Contents of an f32 or bf16 buffer.
    pub fn f32(&self, id: BufferId) -> &[f32] {
        match &self.buffers[id.0 as usize] {
            CpuBuffer::F32(values) => values,
            CpuBuffer::U32(_) => panic!("buffer {} holds u32; the op's shape check asks for floats", id.0),
        }
    }

    /// Contents of a u32 buffer.
    pub fn u32(&self, id: BufferId) -> &[u32] {
        match &self.buffers[id.0 as usize] {
            CpuBuffer::U32(values) => values,
            CpuBuffer::F32(_) => panic!("buffer {} holds floats; the op's shape check asks for u32", id.0),
        }
    }

    pub fn f32_mut(&mut self, id: BufferId) -> &mut [f32] {
        match &mut self.buffers[id.0 as usize] {
            CpuBuffer::F32(values) => values,
            CpuBuffer::U32(_) => panic!("buffer {} holds u32; the op's shape check asks for floats", id.0),
        }
    }

    pub fn u32_mut(&mut self, id: BufferId) -> &mut [u32] {
        match &mut self.buffers[id.0 as usize] {
            CpuBuffer::U32(values) => values,
            CpuBuffer::F32(_) => panic!("buffer {} holds floats; the op's shape check asks for u32", id.0),
        }
    }

    /// Elements of one line of a buffer.
    pub fn stride(&self, id: BufferId) -> usize {
        self.strides[id.0 as usize]
    }

    pub fn weight(&self, id: WeightId) -> &CpuWeight {
        &self.weights[id.0 as usize]
    }

    /// Rows that ops compute: those in use, or all.
    pub fn rows_computed(&self) -> usize {
        if self.compute_padding { self.plan_rows } else { self.rows }
    }

    /// Logit rows that ops compute: those in use, or all.
    pub fn logit_rows_computed(&self) -> usize {
        if self.compute_padding { self.plan_logit_rows } else { self.logit_rows }
    }

    /// Moves a float buffer out, so that the op may write it while it reads others; `put_f32` brings it back.
    pub(crate) fn take_f32(&mut self, id: BufferId) -> Vec<f32> {
        match &mut self.buffers[id.0 as usize] {
            CpuBuffer::F32(values) => std::mem::take(values),
            CpuBuffer::U32(_) => panic!("buffer {} holds u32; the op's shape check asks for floats", id.0),
        }
    }

    pub(crate) fn put_f32(&mut self, id: BufferId, values: Vec<f32>) {
        self.buffers[id.0 as usize] = CpuBuffer::F32(values);
    }

    /// As `take_f32`, for a u32 buffer.
    pub(crate) fn take_u32(&mut self, id: BufferId) -> Vec<u32> {
        match &mut self.buffers[id.0 as usize] {
            CpuBuffer::U32(values) => std::mem::take(values),
            CpuBuffer::F32(_) => panic!("buffer {} holds floats; the op's shape check asks for u32", id.0),
        }
    }

    pub(crate) fn put_u32(&mut self, id: BufferId, values: Vec<u32>) {
        self.buffers[id.0 as usize] = CpuBuffer::U32(values);
    }
}

/// Why an op did not run. A broken shape is not among them: `check` came first.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpError {
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    #[error("exchange: this memory has no peers")]
    NoPeers,
    #[error("fetch: the entry of step {step} has {field} {got}, which cannot be")]
    Entry { step: u64, field: &'static str, got: u64 },
    #[error("{op}: row {row} has position {position}, past the last of {limit}")]
    Position { op: &'static str, row: usize, position: usize, limit: usize },
}
