//! Finds the op behind a divergence: the same script up to that step on both devices, then every buffer compared.

use super::report::Readiness;
use crate::cuda;
use crate::driver::Driver;
use crate::script;
use crate::subject::Subject;
use slotgraph_graphs::cuda::CudaDevice;
use slotgraph_graphs::plan::Plan;
use slotgraph_kernels::{BufferId, Role, Specs};

/// Most bytes of one buffer that are compared.
const BYTES_MAX: usize = 64 << 20;

/// Names layer, op, buffer and element of the first bucket's divergence, where it can be found again.
pub fn first_op(subject: &Subject, readiness: &mut Readiness, steps: usize) {
    let buckets: Vec<usize> = readiness.buckets.iter().map(|b| b.bucket).collect();
    let Some(report) = readiness.buckets.iter_mut().find(|b| b.first_divergence.is_some()) else { return };
    let Some(divergence) = &mut report.first_divergence else { return };
    let state = |graph: bool| state_after(subject, graph, &buckets, report.bucket, steps, divergence.step);
    let (Some((plan, eager)), Some((_, graph))) = (state(false), state(true)) else { return };
    // Of all buffers that differ, the one whose last writer comes first in the plan.
    let mut found: Option<(usize, BufferId, usize)> = None;
    for (id, (a, b)) in eager.iter().zip(&graph).enumerate() {
        let Some(byte) = a.iter().zip(b).position(|(a, b)| a != b) else { continue };
        let id = BufferId(id as u32);
        let Some(writer) = plan.ops.iter().rposition(|placed| placed.op.writes().contains(&id)) else { continue };
        if found.is_none_or(|(first, ..)| writer < first) {
            found = Some((writer, id, byte / plan.buffer(id).dtype.bytes()));
        }
    }
    if let Some((writer, id, element)) = found {
        let placed = &plan.ops[writer];
        divergence.layer = placed.layer;
        divergence.op = Some(placed.op.name().into());
        divergence.buffer = Some(plan.buffer(id).name.clone());
        divergence.element = Some(element);
    }
}

/// Runs the buckets' scripts until `step` has settled, and reads every buffer.
fn state_after(
    subject: &Subject,
    graph: bool,
    buckets: &[usize],
    bucket: usize,
    steps: usize,
    step: u64,
) -> Option<(Plan, Vec<Vec<u8>>)> {
    let device = cuda::prepare(subject, graph, None).ok()?;
    let mut limits = device.limits().clone();
    limits.launch_ahead = 0;
    let mut driver = Driver::new(device, limits);
    driver.stop_after = Some(step);
    for &each in buckets {
        // The script stops with an error at the step after the one that is looked at.
        if script::run(&mut driver, each, steps).is_err() {
            break;
        }
    }
    let device: &CudaDevice = &driver.device;
    let plan = device.plan(bucket).ok()?.clone();
    let read = |(id, spec): (usize, &slotgraph_kernels::BufferSpec)| {
        let skip = matches!(spec.role, Role::InputRing | Role::OutputRing | Role::Scratch);
        let bytes = if skip { 0 } else { plan.buffer(BufferId(id as u32)).bytes().min(BYTES_MAX) };
        device.read_buffer(&spec.name, 0, bytes).unwrap_or_default()
    };
    let contents = device.buffers().iter().enumerate().map(read).collect();
    Some((plan, contents))
}
