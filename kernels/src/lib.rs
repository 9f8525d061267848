//! What one op computes: its parameters, shape check, launch geometry, CPU reference, and CUDA source.
//!
//! Nothing here knows of plans, devices, requests or files. Arrows point this way only: `server → runtime → graphs → kernels`.
#![forbid(unsafe_code)]

pub mod contract;
pub mod cpu;
pub mod dummy;
pub mod entry;
pub mod launch;
mod math;
pub mod ops;
pub mod pack;
mod shape;
pub mod spec;

pub use cpu::OpError;
pub use ops::Op;
pub use shape::ShapeError;
pub use spec::{
    BufferId, BufferSpec, Cols, DType, Precision, Role, Specs, TensorPart, WeightForm, WeightId, WeightSpec,
};

/// CUDA sources by file name, in a fixed order: `common.cuh` first, which the host puts in front of each.
pub fn cuda_sources() -> &'static [(&'static str, &'static str)] {
    macro_rules! sources {
        ($($file:literal),* $(,)?) => { &[$(($file, include_str!(concat!("../cuda/", $file)))),*] };
    }
    sources![
        "common.cuh",
        "norm.cuh",
        "gemm.cuh",
        "fold.cuh",
        "keys.cuh",
        "attend.cuh",
        "team.cuh",
        "routes.cuh",
        "combine.cuh",
        "wgmma.cuh",
        "pack.cu",
        "dummy.cu",
        "fetch.cu",
        "embed.cu",
        "norm.cu",
        "norm_gemm.cu",
        "gemm_add.cu",
        "norm_gate_up.cu",
        "mla_prep.cu",
        "mla_uv.cu",
        "gqa_prep.cu",
        "exchange.cu",
        "moe_combine.cu",
        "head.cu",
        "moe_gate.cu",
        "moe_up.cu",
        "moe_down.cu",
        "mla_attend.cu",
        "sample.cu",
        "gqa_attend.cu",
        "feed.cu",
        "stamp.cu",
        "chain.cu",
        "forms.cu",
    ]
}
