//! The devices of a configuration: one factory a rank, run on the thread that will use the device.

mod cpu;
pub mod cuda;

use crate::checkpoint::Checkpoint;
use crate::config::{Config, DeviceKind};
use crate::engine::StartError;
use crate::ranks::{Factory, PrepareError, Startup};
use slotgraph_graphs::device::Device;
use slotgraph_graphs::fault::{Fault, FaultDevice, FaultKind};

/// A factory for each rank.
pub(crate) fn factories(
    config: &Config,
    checkpoint: &Checkpoint,
    faults: &[Fault],
) -> Result<Vec<Factory>, StartError> {
    match config.device {
        DeviceKind::Cpu => cpu::factories(config, checkpoint, faults),
        DeviceKind::Cuda => cuda::factories(config, checkpoint, faults),
    }
}

/// The device with its faults, if any are armed.
fn armed<D: Device + 'static>(device: D, rank: usize, faults: &[Fault]) -> Result<Box<dyn Device>, PrepareError> {
    if faults.is_empty() {
        return Ok(Box::new(device));
    }
    let armed = FaultDevice::arm(device, rank, faults);
    Ok(Box::new(armed.map_err(|error| PrepareError::Config(format!("--fault: {error}")))?))
}

fn stall_if_told(rank: usize, faults: &[Fault], startup: &Startup) -> Result<(), PrepareError> {
    let stalls = |fault: &Fault| fault.kind == FaultKind::StartStall && fault.at == rank as u64;
    if faults.iter().any(stalls) { Err(startup.stall()) } else { Ok(()) }
}
