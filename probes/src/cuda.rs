//! A CUDA device for probes that look inside one, or the reason why this machine has none.

use crate::cli::{Outcome, ProbeError, gpu_is_required};
use crate::evidence::Draft;
use crate::subject::Subject;
use slotgraph_graphs::cuda::{CudaDevice, CudaError, CudaOptions, KvMemory as Pool};
use slotgraph_graphs::fault::Fault;
use slotgraph_runtime::config::{DeviceKind, KvMemory};

/// Why there is no device to probe.
#[derive(Debug, thiserror::Error)]
pub enum NoDevice {
    /// This machine has no usable GPU: a skip, unless SLOTGRAPH_REQUIRE_GPU is 1.
    #[error("{0}")]
    Absent(String),
    /// It has one, and preparing failed.
    #[error("{0}")]
    Failed(String),
}

impl NoDevice {
    /// Ends a probe that needs a GPU: skipped where none is expected, failed where one is.
    pub fn end(self, mut draft: Draft) -> Result<Outcome, ProbeError> {
        match self {
            NoDevice::Absent(reason) if !gpu_is_required() => Ok(Outcome::Evidence(Box::new(draft.skip(&reason)))),
            NoDevice::Absent(reason) | NoDevice::Failed(reason) => {
                draft.check("a_device_was_prepared", false, reason);
                Ok(Outcome::Evidence(Box::new(draft.finish())))
            }
        }
    }
}

/// Prepares rank 0 of one on the configured GPU: captured (`graph`) or launched op by op.
pub fn prepare(subject: &Subject, graph: bool, fault: Option<Fault>) -> Result<CudaDevice, NoDevice> {
    let config = &subject.config;
    let mut options = CudaOptions::new(subject.checkpoint.spec.clone(), config.limits(1), subject.checkpoint.source());
    options.ordinal = config.devices.first().copied().unwrap_or(0);
    options.graph = graph;
    options.pdl = config.pdl;
    options.lib_dirs = config.lib_dir.iter().cloned().collect();
    options.fault = fault;
    options.kv = match config.kv {
        KvMemory::Pages(pages) => Pool::Pages(pages),
        KvMemory::Bytes(bytes) => Pool::Bytes(bytes),
        KvMemory::Fraction(of_free) => Pool::Fraction { of_free, ranks_on_device: 1 },
    };
    CudaDevice::prepare(options).map_err(|error| match error {
        CudaError::NoDevice { count: 0, .. } => NoDevice::Absent(error.to_string()),
        CudaError::Library(_) if crate::machine::Machine::read().gpus.is_empty() => NoDevice::Absent(error.to_string()),
        other => NoDevice::Failed(other.to_string()),
    })
}

/// Whether the configuration is for a GPU; a probe of graphs has nothing to ask of another device.
pub fn is_cuda(subject: &Subject) -> bool {
    subject.config.device == DeviceKind::Cuda
}
