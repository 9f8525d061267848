//! Collects the buffers, weights and ops of a plan in declaration order, under the names that plans print.
//!
//! Used by the families in this folder. **Invariant:** what is declared, and in which order, depends on the model and the
//! limits alone; the bucket changes extents only.

use crate::plan::{PlacedOp, Plan, RankShape};
use crate::spec::ModelSpec;
use crate::step::StepLimits;
use slotgraph_kernels::contract::{GemmKind, LOGIT_BIAS_MAX, PAGE_TOKENS, TOP_LOGPROBS_MAX};
use slotgraph_kernels::entry::SLOT_WORDS;
use slotgraph_kernels::ops::{Op, RowBuffers, Sample, SlotBuffers};
use slotgraph_kernels::spec::RopeTable;
use slotgraph_kernels::{BufferId, BufferSpec, DType, Role, TensorPart, WeightForm, WeightId, WeightSpec};
use std::ops::Range;

pub(super) struct Builder<'a> {
    pub spec: &'a ModelSpec,
    pub limits: &'a StepLimits,
    pub rank: RankShape,
    /// R and L.
    pub rows: usize,
    pub logit_rows: usize,
    layer: Option<usize>,
    buffers: Vec<BufferSpec>,
    weights: Vec<WeightSpec>,
    ops: Vec<PlacedOp>,
}

pub(super) struct Rings {
    pub input: BufferId,
    pub output: BufferId,
    pub counter: BufferId,
}

impl<'a> Builder<'a> {
    pub fn new(spec: &'a ModelSpec, limits: &'a StepLimits, rank: RankShape, bucket: usize) -> Self {
        Builder {
            spec,
            limits,
            rank,
            rows: bucket,
            logit_rows: limits.logit_rows(bucket),
            layer: None,
            buffers: Vec::new(),
            weights: Vec::new(),
            ops: Vec::new(),
        }
    }

    /// Ops pushed from here belong to layer `layer`.
    pub fn enter_layer(&mut self, layer: usize) {
        self.layer = Some(layer);
    }

    pub fn leave_layers(&mut self) {
        self.layer = None;
    }

    pub fn push(&mut self, op: Op) {
        self.ops.push(PlacedOp { layer: self.layer, op });
    }

    pub fn finish(self) -> Plan {
        Plan {
            model: self.spec.family.name().to_owned(),
            rank: self.rank,
            rows: self.rows,
            logit_rows: self.logit_rows,
            buffers: self.buffers,
            weights: self.weights,
            ops: self.ops,
        }
    }

    pub fn buffer(&mut self, name: &str, dtype: DType, shape: Vec<usize>, role: Role) -> BufferId {
        let id = BufferId(u32::try_from(self.buffers.len()).expect("a plan has few buffers"));
        self.buffers.push(BufferSpec { name: name.to_owned(), dtype, shape, role });
        id
    }

    /// An activation of `[R, shape…]`.
    pub fn per_row(&mut self, name: &str, dtype: DType, shape: &[usize]) -> BufferId {
        self.buffer(name, dtype, [&[self.rows], shape].concat(), Role::Activation)
    }

    /// An activation of `[L, shape…]`.
    pub fn per_logit_row(&mut self, name: &str, dtype: DType, shape: &[usize]) -> BufferId {
        self.buffer(name, dtype, [&[self.logit_rows], shape].concat(), Role::Activation)
    }

    fn per_slot(&mut self, name: &str, shape: &[usize]) -> BufferId {
        let seats_and_pad = self.limits.slots_max + 1;
        self.buffer(name, DType::U32, [&[seats_and_pad], shape].concat(), Role::SlotState)
    }

    pub fn row_buffers(&mut self) -> RowBuffers {
        RowBuffers {
            slot: self.per_row("row.slot", DType::U32, &[]),
            token: self.per_row("row.token", DType::U32, &[]),
            position: self.per_row("row.position", DType::U32, &[]),
            live: self.per_row("row.live", DType::U32, &[]),
            logit_row: self.per_logit_row("logit_row.row", DType::U32, &[]),
            logit_kind: self.per_logit_row("logit_row.kind", DType::U32, &[]),
            logit_target: self.per_logit_row("logit_row.target", DType::U32, &[]),
            step: self.buffer("step", DType::U32, vec![16], Role::Activation),
        }
    }

    pub fn slot_buffers(&mut self, vocab: usize) -> SlotBuffers {
        let pages_per_slot = self.limits.pages_per_slot;
        SlotBuffers {
            token: self.per_slot("slot.token", &[]),
            position: self.per_slot("slot.position", &[]),
            generation: self.per_slot("slot.generation", &[]),
            ended: self.per_slot("slot.ended", &[]),
            generated: self.per_slot("slot.generated", &[]),
            pages: self.per_slot("slot.pages", &[pages_per_slot]),
            params: self.per_slot("slot.params", &[SLOT_WORDS]),
            bias: self.per_slot("slot.bias", &[LOGIT_BIAS_MAX, 2]),
            counts: self.per_slot("slot.counts", &[vocab]),
        }
    }

    pub fn rings(&mut self) -> Rings {
        let (layout, entries) = (self.limits.entry_layout(), self.limits.ring_entries());
        Rings {
            input: self.buffer("ring.input", DType::U32, vec![entries, layout.entry_words()], Role::InputRing),
            output: self.buffer("ring.output", DType::U32, vec![entries, layout.output_words()], Role::OutputRing),
            counter: self.buffer("ring.counter", DType::U32, vec![4], Role::SlotState),
        }
    }

    pub fn sample(&mut self, rows: RowBuffers, slots: SlotBuffers, logits: BufferId, scratch: usize) -> Sample {
        Sample {
            token: self.per_logit_row("sample.token", DType::U32, &[]),
            logprob: self.per_logit_row("sample.logprob", DType::F32, &[]),
            rank: self.per_logit_row("sample.rank", DType::U32, &[]),
            nan: self.per_logit_row("sample.nan", DType::U32, &[]),
            top_ids: self.per_logit_row("sample.top_ids", DType::U32, &[TOP_LOGPROBS_MAX]),
            top_logprobs: self.per_logit_row("sample.top_logprobs", DType::F32, &[TOP_LOGPROBS_MAX]),
            logits,
            scratch: self.buffer("sample.scratch", DType::F32, vec![self.logit_rows, scratch], Role::Scratch),
            rows,
            slots,
        }
    }

    pub fn kv(&mut self, layer: usize, width: usize) -> BufferId {
        let shape = vec![self.limits.pages, PAGE_TOKENS, width];
        self.buffer(&format!("layer.{layer}.kv"), DType::Bf16, shape, Role::Kv)
    }

    pub fn weight(&mut self, name: &str, form: WeightForm, parts: Vec<TensorPart>) -> WeightId {
        let id = WeightId(u32::try_from(self.weights.len()).expect("a plan has few weights"));
        self.weights.push(WeightSpec { name: name.to_owned(), form, parts });
        id
    }

    pub fn vector(&mut self, name: &str, n: usize, parts: impl IntoIterator<Item = Part>) -> WeightId {
        let parts = parts.into_iter().map(|part| part.0).collect();
        self.weight(name, WeightForm::Vector { n }, parts)
    }

    pub fn table(&mut self, name: &str, rows: usize, cols: usize, tensor: &str) -> WeightId {
        self.weight(name, WeightForm::Table { rows, cols }, vec![Part::matrix(tensor, [rows, cols]).0])
    }

    /// One matrix `[n, k]`.
    pub fn gemm<const N: usize>(
        &mut self,
        name: &str,
        kind: GemmKind,
        [n, k]: [usize; 2],
        parts: [Part; N],
    ) -> WeightId {
        self.gemm_groups(name, kind, 1, [n, k], parts)
    }

    /// `groups` matrices `[n, k]`: one a head, one an expert.
    pub fn gemm_groups(
        &mut self,
        name: &str,
        kind: GemmKind,
        groups: usize,
        [n, k]: [usize; 2],
        parts: impl IntoIterator<Item = Part>,
    ) -> WeightId {
        let parts = parts.into_iter().map(|part| part.0).collect();
        self.weight(name, WeightForm::Gemm { kind, groups, n, k }, parts)
    }

    /// One of a layer's two norms of the residual stream.
    pub fn layer_norm(&mut self, layer: usize, which: &str) -> WeightId {
        let hidden = self.spec.hidden;
        let tensor = format!("model.layers.{layer}.{which}.weight");
        self.vector(&format!("layer.{layer}.{which}"), hidden, [Part::vector(&tensor, hidden)])
    }

    /// The spec's rotary table, cut to the positions that can occur.
    pub fn rope_table(&self) -> RopeTable {
        RopeTable { positions: self.limits.max_model_len, ..self.spec.rope.clone() }
    }
}

/// A checkpoint tensor, or some of its rows, on its way into a weight.
pub(super) struct Part(TensorPart);

impl Part {
    pub fn vector(tensor: &str, n: usize) -> Part {
        Part::of(tensor, vec![n])
    }

    pub fn matrix(tensor: &str, [n, k]: [usize; 2]) -> Part {
        Part::of(tensor, vec![n, k])
    }

    fn of(tensor: &str, tensor_shape: Vec<usize>) -> Part {
        let rows = 0..tensor_shape[0];
        Part(TensorPart { tensor: tensor.to_owned(), tensor_shape, rows, transpose: false, group: 0, dst_row: 0 })
    }

    /// Only these rows of the tensor.
    pub fn rows(mut self, rows: Range<usize>) -> Part {
        self.0.rows = rows;
        self
    }

    pub fn transposed(mut self) -> Part {
        self.0.transpose = true;
        self
    }

    pub fn group(mut self, group: usize) -> Part {
        self.0.group = group;
        self
    }

    /// Lands from row `row` of the weight on.
    pub fn at(mut self, row: usize) -> Part {
        self.0.dst_row = row;
        self
    }
}
