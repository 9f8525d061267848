//! How an op runs on a GPU: which kernel, its compile-time constants, grid, shared memory and arguments. All of it data.
//!
//! Read by the CUDA device, which compiles, launches and captures; written per op in this folder's files. **Invariant:** a
//! launch holds no address and nothing that changes from step to step: it follows from the op, the step shape and the GPU
//! alone. Who computes a value may differ between two launches of an op; the bits may not.

mod attend;
mod constants;
mod exchange;
pub mod forms;
mod gemm;
mod mla;
mod moe;
mod sample;
mod sliced;
mod staging;
mod step;
mod whole;

use crate::spec::{BufferId, WeightId};
use crate::{Op, Specs};

/// What the geometry of a launch may depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuFacts {
    /// Streaming multiprocessors that this rank's launches may fill: blocks that wait for each other count on them.
    pub sm_count: usize,
    /// NVRTC target, such as `sm_90a`.
    pub arch: String,
    /// Most bytes of shared memory one block may opt in to.
    pub shared_max: usize,
    /// Launch with programmatic edges where the kernels allow it.
    pub pdl: bool,
}

impl GpuFacts {
    /// An H200 (and H100 SXM), the machine the kernels are tuned on.
    pub fn h200() -> Self {
        GpuFacts { sm_count: 132, arch: "sm_90a".into(), shared_max: 227 * 1024, pdl: true }
    }
    /// Compute capability × 10, from the target's name; 0 when it has no digits.
    pub fn capability(&self) -> u32 {
        self.arch.trim_start_matches("sm_").trim_end_matches(['a', 'f']).parse().unwrap_or(0)
    }
}

/// A compiled function, by what it is compiled from.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Kernel {
    /// File under `kernels/cuda/`, such as `norm_gemm.cu`.
    pub source: &'static str,
    /// `extern "C"` name.
    pub function: &'static str,
    /// Static shapes and constants, in a fixed order.
    pub defines: Vec<(&'static str, String)>,
}

impl Kernel {
    /// The whole translation unit: the contract's constants, `common.cuh` and the other headers, the defines, the source.
    /// Two kernels with equal units share one module. Needs no `-D` and no include path. The defines come after the
    /// headers, so that no name of a header can meet one.
    pub fn unit(&self) -> String {
        let mut text = constants::defines();
        let mut source = String::new();
        for (name, content) in crate::cuda_sources() {
            let lines = format!("#line 1 \"{name}\"\n{content}\n");
            if name.ends_with(".cuh") {
                text.push_str(&lines);
            } else if *name == self.source {
                source = lines;
            }
        }
        for (name, value) in &self.defines {
            text.push_str(&format!("#define {name} {value}\n"));
        }
        text.push_str(&source);
        text
    }
}

/// One kernel parameter, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arg {
    /// Address of a plan buffer.
    Buffer(BufferId),
    /// Address of a weight in its packed form (`crate::pack`).
    Weight(WeightId),
    /// A 32-bit constant of the step shape, such as R.
    U32(u32),
    /// A 64-bit constant.
    U64(u64),
    /// Address of the workspace: at least `Launch::workspace_bytes`, shared by all launches of a stream, 256-byte aligned.
    /// Contents mean nothing between ops.
    Workspace,
    /// Address of the counters: at least `Launch::counters` u32, zero before the first step; every op leaves them zero.
    Counters,
    /// Address of a rank's exchange scratch as this device sees it.
    Peer(u8),
    /// Address of this rank's exchange status page.
    Status,
    /// Stamp launches: u64 nanoseconds, one a stamp.
    Stamps,
    /// Pack and dummy launches: the row-major bf16 staging area.
    Staging,
    /// Pack launches: where the packed group starts.
    Packed,
}

/// One kernel launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    pub kernel: Kernel,
    pub grid: [u32; 3],
    /// Threads of a block (one dimension).
    pub block: u32,
    /// Blocks of a cluster along x; 1 is no cluster.
    pub cluster: u32,
    /// Dynamic shared memory; above 48 KiB the function must opt in.
    pub shared_bytes: u32,
    pub workspace_bytes: usize,
    pub counters: usize,
    pub args: Vec<Arg>,
    /// The kernel waits for its predecessor by itself, so the launch may carry a programmatic edge (sm_90 and later).
    pub pdl: bool,
    /// The launch behind it may carry one. Where it may not, that starts when this one has ended.
    pub edge_out: bool,
    /// The multiprocessor gives shared memory all that it can and its L1 cache the rest, where the driver would choose for this kernel alone. One that
    /// changes what it gives must be empty first, so launches that want different shares do not overlap.
    pub shared_first: bool,
}

/// Why an op cannot run on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    #[error("{op}: {what} is {got}; the CUDA kernels need {need}")]
    Shape { op: &'static str, what: &'static str, got: usize, need: String },
    #[error("{op}: a block needs {need} bytes of shared memory, this GPU has {have}")]
    Shared { op: &'static str, need: usize, have: usize },
    #[error("{op} has no kernel")]
    NoKernel { op: &'static str },
}

impl Launch {
    /// The fields that most launches leave alone.
    fn plain() -> Launch {
        Launch {
            kernel: Kernel { source: "", function: "", defines: Vec::new() },
            grid: [1, 1, 1],
            block: 32,
            cluster: 1,
            shared_bytes: 0,
            workspace_bytes: 0,
            counters: 0,
            args: Vec::new(),
            pdl: true,
            edge_out: true,
            shared_first: false,
        }
    }
}

/// The launch that writes the device's time to stamp `index`; used between the nodes of a graph that is being timed.
pub fn stamp(index: u32) -> Launch {
    Launch {
        kernel: Kernel { source: "stamp.cu", function: "stamp", defines: Vec::new() },
        args: vec![Arg::Stamps, Arg::U32(index)],
        pdl: false,
        ..Launch::plain()
    }
}

/// The launch that compares the tensor cores' sums (`chain.cu`): over `Arg::Counters`, four u32. `split` plants a chain cut in two.
pub fn chain(wgmma: bool, split: bool) -> Launch {
    let defines = vec![define("WGMMA", usize::from(wgmma)), define("SPLIT", usize::from(split))];
    Launch {
        kernel: Kernel { source: "chain.cu", function: "chain", defines },
        grid: [32, 1, 1],
        block: 128,
        args: vec![Arg::Counters],
        pdl: false,
        ..Launch::plain()
    }
}

impl GpuFacts {
    fn require_shared(&self, op: &'static str, need: usize) -> Result<(), LaunchError> {
        if need <= self.shared_max { Ok(()) } else { Err(LaunchError::Shared { op, need, have: self.shared_max }) }
    }
}

fn define(name: &'static str, value: usize) -> (&'static str, String) {
    (name, value.to_string())
}

/// Most rows whose latent attention leaves so much of the GPU free that what surrounds it may start at once (H200, DeepSeek-V2-Lite: 1.76 → 1.68 ms
/// a step at one row, 5.0 → 5.7 ms at eight, where attention fills the GPU and blocks crowd on the multiprocessors that are done first).
const BESIDE_ATTENTION_ROWS: usize = 1;

/// Whether all launches of a step are to be `shared_first`: those of few rows beside latent attention, which takes nearly all shared memory, while little
/// is left to read twice through the L1 (H200, DeepSeek-V2-Lite at one row: 1.66 → 1.60 ms a step; at eight rows 5.00 → 5.14).
pub fn shared_first<'a>(rows: usize, mut ops: impl Iterator<Item = &'a Op>) -> bool {
    rows <= BESIDE_ATTENTION_ROWS && ops.any(|op| matches!(op, Op::MlaAttend(_)))
}

impl Launch {
    /// Makes the launch `shared_first`, with a function of its own: the attribute is a function's, and what launches it in other steps keeps the driver's
    /// choice.
    pub fn put_shared_first(&mut self) {
        self.shared_first = true;
        self.kernel.defines.push(define("SHARED_FIRST", 1));
    }
}

/// When a kernel lets its successor start (`wait_and_let_start` in `common.cuh`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Successor {
    AtExit,
    AfterWait,
    AtOnce,
    AfterLoads,
}

impl Successor {
    /// Of the launches around latent attention.
    fn beside_attention(rows: usize) -> Successor {
        if rows <= BESIDE_ATTENTION_ROWS { Successor::AtOnce } else { Successor::AfterWait }
    }

    fn define(self) -> (&'static str, String) {
        let value = match self {
            Successor::AtExit => "AT_EXIT",
            Successor::AfterWait => "AFTER_WAIT",
            Successor::AtOnce => "AT_ONCE",
            Successor::AfterLoads => "AFTER_LOADS",
        };
        ("SUCCESSOR", value.into())
    }
}

impl Op {
    /// The op's launches in order: one graph node, or a short chain of them at large R. An exchange has none: the transport sees to it.
    /// `next` is the op behind it, which some let start earlier than others.
    pub fn launches(&self, next: Option<&Op>, specs: &dyn Specs, gpu: &GpuFacts) -> Result<Vec<Launch>, LaunchError> {
        match self {
            Op::NormGemm(op) => op.launches(specs, gpu),
            Op::GemmAdd(op) => op.launches(matches!(next, Some(Op::NormGateUp(_))), specs, gpu),
            Op::NormGateUp(op) => op.launches(specs, gpu),
            Op::Head(op) => op.launches(specs, gpu),
            Op::Sample(op) => Ok(vec![op.launch(specs, gpu)?]),
            Op::MoeGate(op) => op.launches(specs, gpu),
            Op::MoeUp(op) => Ok(vec![op.launch(specs, gpu)?]),
            Op::MoeDown(op) => op.launches(specs, gpu),
            Op::MlaAttend(op) => Ok(vec![op.launch(specs, gpu)?]),
            Op::GqaAttend(op) => Ok(vec![op.launch(specs, gpu)?]),
            Op::Fetch(op) => op.launches(specs),
            Op::MlaPrep(op) => op.launches(specs),
            Op::MlaUv(op) => op.launches(specs),
            Op::Feed(op) => op.launches(specs),
            Op::Embed(op) => op.launches(specs),
            Op::MoeCombine(op) => op.launches(specs, gpu),
            Op::GqaPrep(op) => op.launches(specs),
            Op::Exchange(_) => Ok(Vec::new()),
        }
    }

    /// The launches of a rank whose exchanges are our own kernel over peer memory: it combines on the way, so the combine that follows it, `next`, has
    /// none.
    pub fn launches_over_peers(
        &self,
        next: Option<&Op>,
        specs: &dyn Specs,
        gpu: &GpuFacts,
    ) -> Result<Vec<Launch>, LaunchError> {
        match (self, next) {
            (Op::Exchange(exchange), Some(Op::MoeCombine(combine))) => exchange.launches(combine, specs),
            (Op::Exchange(_), _) => Err(LaunchError::NoKernel { op: "exchange" }),
            (Op::MoeCombine(_), _) => Ok(Vec::new()),
            _ => self.launches(next, specs, gpu),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_that_prefers_shared_memory_has_a_function_of_its_own() {
        let usual = stamp(0);
        let mut own = stamp(0);
        own.put_shared_first();
        assert!(own.shared_first && !usual.shared_first);
        assert_ne!(own.kernel.unit(), usual.kernel.unit());
    }
}
