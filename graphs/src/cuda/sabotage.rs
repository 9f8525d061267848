//! Faults that only the device itself can commit, armed on purpose: probes must notice them.
//!
//! Armed through `Device::arm` before the first step. **Invariant:** an unarmed device does nothing here.

use super::arena::StepAddresses;
use super::device::CudaDevice;
use super::error::{CallError, CudaError, During, check};
use super::gpu::Gpu;
use super::graph::Graph;
use super::program::Program;
use crate::fault::{Fault, FaultKind};
use cudarc::driver::sys;

/// Name of the buffer that a baked position adds.
const POSITION_COPY: &str = "fault.position";

#[derive(Default)]
pub(super) struct Sabotage {
    /// From this step on, pad rows write page 1.
    pad_write_from: Option<u64>,
    baked: Option<Baked>,
}

/// From step `from` on every kernel but `fetch` reads positions from a copy made in that step, as if they were captured. The
/// copy is registered: the audit is not what must catch this.
struct Baked {
    from: u64,
    copy: u64,
    graphs: Vec<Graph>,
    programs: Vec<Program>,
}

impl Sabotage {
    /// Programs and graphs to run step `step` with, if not the device's own.
    pub fn stand_in(&self, step: u64) -> Option<(&[Program], &[Graph])> {
        let baked = self.baked.as_ref().filter(|baked| step > baked.from)?;
        Some((&baked.programs, &baked.graphs))
    }
}

impl CudaDevice {
    pub(super) fn arm_fault(&mut self, fault: Fault) -> Result<bool, CudaError> {
        match fault.kind {
            FaultKind::PadWrite => self.sabotage.pad_write_from = Some(fault.at),
            FaultKind::BakedPosition => self.sabotage.baked = Some(self.bake_positions(fault.at)?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn bake_positions(&mut self, from: u64) -> Result<Baked, CudaError> {
        self.gpu.bind().during(|| "arming a fault".into())?;
        let position = self.rings.position;
        let bytes = self.arena.specs[position.0 as usize].bytes();
        let copy = self.arena.allocate_extra(POSITION_COPY, bytes, &mut self.ledger)?;
        self.gpu.wait().during(|| "arming a fault".into())?;
        let diverted = Some((position, copy));
        let addresses =
            StepAddresses { arena: &self.arena, weights: &self.weights, exchange: self.exchange.as_ref(), diverted };
        let resolve = |planned| Program::resolve(planned, &self.modules, &addresses, &self.facts);
        let programs = self.planned.iter().map(resolve).collect::<Result<Vec<_>, _>>()?;
        let mut graphs = Vec::new();
        if self.options.graph {
            for program in &programs {
                let mut graph = Graph::capture(&self.gpu, program, &self.ledger, self.exchange.as_mut(), || Ok(()))?;
                graph.instantiate()?;
                graphs.push(graph);
            }
        }
        Ok(Baked { from, copy, graphs, programs })
    }

    /// Before step `step` is launched.
    pub(super) fn sabotage_before(&self, step: u64) -> Result<(), CallError> {
        if self.sabotage.pad_write_from.is_none_or(|from| step < from) {
            return Ok(());
        }
        let pages = &self.arena.specs[self.rings.pages.0 as usize];
        let (seats, per_seat) = (pages.shape[0], pages.shape[1]);
        let address = self.arena.address(self.rings.pages).expect("only the page pool is allocated late");
        let first_of_pad = address + ((seats - 1) * per_seat * size_of::<u32>()) as u64;
        // SAFETY: the last seat's block table begins inside the buffer, 4-byte aligned.
        unsafe { self.gpu.fill(first_of_pad, 1, 1) }
    }

    /// After step `step` is launched.
    pub(super) fn sabotage_after(&self, step: u64) -> Result<(), CallError> {
        let Some(baked) = self.sabotage.baked.as_ref().filter(|baked| baked.from == step) else { return Ok(()) };
        let source = self.arena.address(self.rings.position).expect("only the page pool is allocated late");
        let bytes = self.arena.specs[self.rings.position.0 as usize].bytes();
        copy_on_device(&self.gpu, baked.copy, source, bytes)
    }
}

/// Both ranges are live allocations of at least `bytes` bytes: a buffer and the copy made as large as it.
pub(super) fn copy_on_device(gpu: &Gpu, target: u64, source: u64, bytes: usize) -> Result<(), CallError> {
    // SAFETY: as said above; the stream is live.
    check("cuMemcpyDtoDAsync_v2", unsafe { sys::cuMemcpyDtoDAsync_v2(target, source, bytes, gpu.raw_stream()) })
}
