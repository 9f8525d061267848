//! The CUDA device: the same plans on an NVIDIA GPU, launched op by op or captured once per bucket and replayed.
//!
//! All unsafe code of the project is in this folder. Libraries are found and opened at run time, so the same binary starts on
//! a machine without a GPU. **Invariants:** every allocation, compilation and capture happens in `prepare`; a buffer's
//! address never changes; all device work is on one stream; nothing that changes from step to step is a launch argument.
#![allow(unsafe_code)]

mod cache;
mod dl;
pub mod libs;
pub mod nvrtc;
pub mod nvtx;

pub use cache::Cache;
