//! The device: runs plans step by step. Few verbs, in ring order.
//!
//! Implemented by `cpu`, `null` and `cuda`; driven by the engine loop or by a rank thread. **Invariant:** steps settle in
//! the order they were enqueued; after construction nothing allocates on the device; a device never invents a step.

use crate::fault::Fault;
use crate::step::{StepInput, StepOutput};

/// What went wrong on a device. Any of these stops the engine.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    #[error("step {step} was enqueued while {in_flight} of at most {max} steps were in flight")]
    RingFull { step: u64, in_flight: usize, max: usize },
    #[error("step {got} was enqueued where step {expected} was due")]
    OutOfOrder { expected: u64, got: u64 },
    #[error("no plan was prepared for bucket {bucket} (have {buckets:?})")]
    NoBucket { bucket: usize, buckets: Vec<usize> },
    #[error("the step does not fit its entry: {0}")]
    EntryOverflow(String),
    #[error("op {op} of layer {layer:?} failed: {reason}")]
    Op { op: &'static str, layer: Option<usize>, reason: String },
    #[error(transparent)]
    Exchange(#[from] slotgraph_kernels::ops::ExchangeError),
    #[error("{0}")]
    Lost(String),
}

/// A device with every plan prepared.
pub trait Device {
    /// Enqueues a step; returns without waiting for it. At most `launch_ahead + 1` steps may be unsettled.
    fn enqueue(&mut self, input: &StepInput) -> Result<(), DeviceError>;
    /// Settles the oldest enqueued step into `output` if it is done; false if it still runs or none is enqueued.
    fn poll(&mut self, output: &mut StepOutput) -> Result<bool, DeviceError>;
    /// Settles the oldest enqueued step, waiting for it; false if none is enqueued.
    fn wait(&mut self, output: &mut StepOutput) -> Result<bool, DeviceError> {
        if self.in_flight() == 0 {
            return Ok(false);
        }
        loop {
            if self.poll(output)? {
                return Ok(true);
            }
            std::hint::spin_loop();
        }
    }
    /// Enqueued and not settled.
    fn in_flight(&self) -> usize;
    /// What `/debug/graphs`, the start-up record and evidence say of the device.
    fn facts(&self) -> DeviceFacts;
    /// Arms a fault that only the device itself can commit; false when it cannot.
    fn arm(&mut self, fault: Fault) -> bool {
        let _ = fault;
        false
    }
}

impl<D: Device + ?Sized> Device for Box<D> {
    fn enqueue(&mut self, input: &StepInput) -> Result<(), DeviceError> {
        (**self).enqueue(input)
    }
    fn poll(&mut self, output: &mut StepOutput) -> Result<bool, DeviceError> {
        (**self).poll(output)
    }
    fn wait(&mut self, output: &mut StepOutput) -> Result<bool, DeviceError> {
        (**self).wait(output)
    }
    fn in_flight(&self) -> usize {
        (**self).in_flight()
    }
    fn facts(&self) -> DeviceFacts {
        (**self).facts()
    }
    fn arm(&mut self, fault: Fault) -> bool {
        (**self).arm(fault)
    }
}

/// A device described for people and evidence.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct DeviceFacts {
    /// `cpu`, `null` or `cuda`.
    pub kind: String,
    /// Processor or GPU name.
    pub name: String,
    /// `eager`, `graph` or `interpreted`.
    pub mode: String,
    pub precision: String,
    pub contract_hash: String,
    /// Hash of the pointer ledger (CUDA), else empty.
    pub ledger_hash: String,
    pub graph_bytes: u64,
    pub arena_bytes: u64,
    pub kv_bytes: u64,
    pub weight_bytes: u64,
    /// Per bucket: nodes of its plan.
    pub buckets: Vec<BucketFacts>,
}

#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct BucketFacts {
    pub bucket: usize,
    pub nodes: usize,
    pub replays: u64,
}
