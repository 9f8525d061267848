//! Geometry of the ops at a step's ends and of those that only move or add rows.

use super::gemm::{define_bits, stride};
use super::{Arg, GpuFacts, Kernel, Launch, LaunchError, Successor, define};
use crate::Specs;
use crate::ops::{Embed, Feed, Fetch, GqaPrep, MoeCombine};
use crate::spec::BufferId;

/// Extents of a 2-D buffer.
fn extents(specs: &dyn Specs, buffer: BufferId) -> (usize, usize) {
    (specs.buffer(buffer).shape[0], stride(specs, buffer))
}

fn buffers<const N: usize>(ids: [BufferId; N]) -> Vec<Arg> {
    ids.into_iter().map(Arg::Buffer).collect()
}

/// A multiple that vector accesses need.
fn require_multiple(op: &'static str, what: &'static str, got: usize, of: usize) -> Result<(), LaunchError> {
    if got.is_multiple_of(of) {
        return Ok(());
    }
    Err(LaunchError::Shape { op, what, got, need: format!("a multiple of {of}") })
}

impl Fetch {
    pub(super) fn launches(&self, specs: &dyn Specs) -> Result<Vec<Launch>, LaunchError> {
        let (rows, slots) = (&self.rows, &self.slots);
        let (entries, entry_words) = extents(specs, self.input_ring);
        let (seats, pages_per_slot) = extents(specs, slots.pages);
        let defines = vec![
            define("ENTRIES", entries),
            define("ENTRY_WORDS", entry_words),
            define("SLOTS", seats),
            define("PAGES_PER_SLOT", pages_per_slot),
            define("VOCAB", stride(specs, slots.counts)),
        ];
        let mut args = buffers([
            rows.slot,
            rows.token,
            rows.position,
            rows.live,
            rows.logit_row,
            rows.logit_kind,
            rows.logit_target,
            rows.step,
            slots.token,
            slots.position,
            slots.generation,
            slots.ended,
            slots.generated,
            slots.pages,
            slots.params,
            slots.bias,
            slots.counts,
            self.input_ring,
            self.step_counter,
        ]);
        args.extend([Arg::U32(specs.rows() as u32), Arg::U32(specs.logit_rows() as u32)]);
        let kernel = Kernel { source: "fetch.cu", function: "fetch", defines };
        Ok(vec![Launch { kernel, block: 512, args, ..Launch::plain() }])
    }
}

impl Feed {
    pub(super) fn launches(&self, specs: &dyn Specs) -> Result<Vec<Launch>, LaunchError> {
        let (rows, slots, sample) = (&self.rows, &self.slots, &self.sample);
        let (entries, output_words) = extents(specs, self.output_ring);
        let defines = vec![
            define("ENTRIES", entries),
            define("OUTPUT_WORDS", output_words),
            define("VOCAB", stride(specs, slots.counts)),
        ];
        let mut args = buffers([
            self.output_ring,
            slots.token,
            slots.position,
            slots.ended,
            slots.generated,
            slots.counts,
            self.step_counter,
            slots.generation,
            slots.params,
            rows.slot,
            rows.position,
            rows.logit_row,
            rows.logit_kind,
            rows.step,
            sample.token,
            sample.rank,
            sample.nan,
            sample.logprob,
            sample.top_ids,
            sample.top_logprobs,
        ]);
        args.push(Arg::U32(specs.logit_rows() as u32));
        let kernel = Kernel { source: "feed.cu", function: "feed", defines };
        Ok(vec![Launch { kernel, block: 512, args, ..Launch::plain() }])
    }
}

impl Embed {
    pub(super) fn launches(&self, specs: &dyn Specs) -> Result<Vec<Launch>, LaunchError> {
        let hidden = stride(specs, self.x);
        require_multiple("embed", "the hidden width", hidden, 8)?;
        let kernel = Kernel { source: "embed.cu", function: "embed", defines: vec![define("HIDDEN", hidden)] };
        let args =
            vec![Arg::Buffer(self.x), Arg::Buffer(self.token), Arg::Weight(self.table), Arg::U32(specs.rows() as u32)];
        Ok(vec![Launch { kernel, grid: [specs.rows() as u32, 1, 1], block: 256, args, ..Launch::plain() }])
    }
}

impl MoeCombine {
    pub(super) fn launches(&self, specs: &dyn Specs, gpu: &GpuFacts) -> Result<Vec<Launch>, LaunchError> {
        let (rows, hidden) = (specs.rows(), stride(specs, self.x));
        require_multiple("moe_combine", "the hidden width", hidden, 4)?;
        let defines = vec![define("HIDDEN", hidden), define("RANKS", self.ranks)];
        let blocks = (rows * hidden).div_ceil(256 * 4).min(4 * gpu.sm_count);
        let mut args = buffers([self.x, self.gathered, self.shared]);
        args.push(Arg::U32(rows as u32));
        let kernel = Kernel { source: "moe_combine.cu", function: "moe_combine", defines };
        Ok(vec![Launch { kernel, grid: [blocks as u32, 1, 1], block: 256, args, ..Launch::plain() }])
    }
}

impl GqaPrep {
    pub(super) fn launches(&self, specs: &dyn Specs) -> Result<Vec<Launch>, LaunchError> {
        require_multiple("gqa_prep", "head_dim", self.head_dim, 8)?;
        let defines = vec![
            define("HEADS", self.heads),
            define("KV_HEADS", self.kv_heads),
            define("HEAD_DIM", self.head_dim),
            define("PAGES_PER_SLOT", stride(specs, self.paged.block_table)),
            define("QK_NORM", usize::from(self.qk_norm.is_some())),
            define_bits("EPS_BITS", self.eps),
            Successor::AtOnce.define(),
        ];
        let units = specs.rows() * (self.heads + 2 * self.kv_heads);
        let (q_norm, k_norm) = self.qk_norm.unwrap_or((self.rope, self.rope));
        let mut args = buffers([self.q, self.paged.kv, self.qkv]);
        args.extend([q_norm, k_norm, self.rope].map(Arg::Weight));
        args.extend(buffers([self.slot, self.position, self.paged.block_table]));
        args.push(Arg::U32(specs.rows() as u32));
        let kernel = Kernel { source: "gqa_prep.cu", function: "gqa_prep", defines };
        Ok(vec![Launch { kernel, grid: [units.div_ceil(8) as u32, 1, 1], block: 256, args, ..Launch::plain() }])
    }
}
