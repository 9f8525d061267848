//! The CUDA device: the same plans on an NVIDIA GPU, launched op by op or captured once per bucket and replayed.
//!
//! All unsafe code of the project is in this folder. Libraries are found and opened at run time, so the same binary starts on
//! a machine without a GPU. **Invariants:** every allocation, compilation and capture happens in `prepare`; a buffer's
//! address never changes; all device work is on one stream; nothing that changes from step to step is a launch argument.
#![allow(unsafe_code)]

mod arena;
mod cache;
mod chain;
pub mod cubin;
mod device;
mod dl;
mod error;
mod exchange;
mod forms;
mod gpu;
mod graph;
mod launch;
pub mod ledger;
pub mod libs;
mod memory;
mod modules;
pub mod nccl;
pub mod nodes;
pub mod nvrtc;
pub mod nvtx;
mod options;
mod pieces;
mod prepare;
mod probe;
mod program;
mod ring;
mod sabotage;
mod smoke;
mod timing;
mod weights;

pub use arena::ArenaBytes;
pub use cache::Cache;
pub use chain::Chains;
pub use device::CudaDevice;
pub use error::{CallError, CudaError, DRIVER_MIN, DRIVER_MIN_RELEASE};
pub use forms::{Forms, KindForms};
pub use gpu::{Counters, GpuIdentity, device_count};
pub use graph::GraphReport;
pub use modules::ModulesReport;
pub use options::{
    CudaOptions, ExchangeReport, FREE_MIN, KV_MARGIN, KvMemory, LibraryReport, MemoryReport, PeerReport, PrepareReport,
    Transport,
};
pub use prepare::{Allocated, Captured, Compiled, Connected, Loaded, Opened, Resolved, Warm};
pub use probe::{NodeInfo, Observer, OpAt, Turn};
pub use smoke::{SmokeReport, SmokeShape, WrongWord, smoke};
pub use timing::{CopyRates, NodeTimes, OpTime};
pub use weights::{Progress, WeightsReport};

#[cfg(test)]
mod mock_tests;
#[cfg(test)]
mod ranks_tests;
#[cfg(test)]
mod tests;
