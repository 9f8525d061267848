//! Geometry of sampling: a block of 1,024 threads takes a logit row.

use super::gemm::define_bits;
use super::{Arg, GpuFacts, Kernel, Launch, LaunchError, define};
use crate::Specs;
use crate::contract::{GREEDY_TEMPERATURE, LOGSUMEXP_LANES};
use crate::ops::Sample;

/// Histograms of `select` in `sample.cu`: one of 256 64-bit bins a warp.
const SELECT_BYTES: usize = LOGSUMEXP_LANES / 32 * 256 * 8;

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
        args.push(Arg::U32(specs.logit_rows() as u32));
        let vocab = specs.buffer(self.logits).shape[1];
        let defines = vec![define("VOCAB", vocab), define_bits("GREEDY_TEMPERATURE_BITS", GREEDY_TEMPERATURE)];
        Ok(Launch {
            kernel: Kernel { source: "sample.cu", function: op, defines },
            grid: [specs.logit_rows() as u32, 1, 1],
            block: LOGSUMEXP_LANES as u32,
            shared_bytes: SELECT_BYTES as u32,
            args,
            ..Launch::plain()
        })
    }
}
