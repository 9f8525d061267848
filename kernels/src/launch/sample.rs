//! Geometry of sampling: blocks of 1,024 threads share a logit row while there are few. No choice here changes a bit.

use super::gemm::define_bits;
use super::{Arg, GpuFacts, Kernel, Launch, LaunchError, define};
use crate::Specs;
use crate::contract::{GREEDY_TEMPERATURE, LOGSUMEXP_LANES};
use crate::ops::Sample;

/// Histograms of `select` in `sample.cu`: one of 256 64-bit bins a warp.
const SELECT_BYTES: usize = LOGSUMEXP_LANES / 32 * 256 * 8;

/// Words that a block leaves in the row's scratch (`sample.cu`, FOUND_WORDS), and the groups of four ids that make a block worth its launch.
const FOUND_WORDS: usize = 8;
const QUADS_MIN: usize = 512;

impl Sample {
    pub(super) fn launch(&self, specs: &dyn Specs, gpu: &GpuFacts) -> Result<Launch, LaunchError> {
        let op = "sample";
        gpu.require_shared(op, SELECT_BYTES + 8 * 1024)?;
        let (rows, slots) = (&self.rows, &self.slots);
        let buffers = [
            self.token,
            self.logprob,
            self.rank,
            self.nan,
            self.top_ids,
            self.top_logprobs,
            self.logits,
            rows.slot,
            rows.position,
            rows.logit_row,
            rows.logit_kind,
            rows.logit_target,
            rows.step,
            slots.generated,
            slots.params,
            slots.bias,
            slots.counts,
        ];
        let mut args: Vec<Arg> = buffers.map(Arg::Buffer).into();
        let logit_rows = specs.logit_rows();
        args.extend([Arg::Buffer(self.scratch), Arg::Counters, Arg::U32(logit_rows as u32)]);
        let [vocab, scratch] = [self.logits, self.scratch].map(|buffer| specs.buffer(buffer).shape[1]);
        let fitting = (gpu.sm_count / logit_rows).min(scratch / FOUND_WORDS);
        let splits = vocab.div_ceil(4).div_ceil(QUADS_MIN).min(fitting).max(1);
        let defines = vec![
            define("VOCAB", vocab),
            define("SPLITS", splits),
            define("SCRATCH", scratch),
            define_bits("GREEDY_TEMPERATURE_BITS", GREEDY_TEMPERATURE),
        ];
        Ok(Launch {
            kernel: Kernel { source: "sample.cu", function: op, defines },
            grid: [splits as u32, logit_rows as u32, 1],
            block: LOGSUMEXP_LANES as u32,
            shared_bytes: SELECT_BYTES as u32,
            counters: logit_rows,
            args,
            ..Launch::plain()
        })
    }
}
