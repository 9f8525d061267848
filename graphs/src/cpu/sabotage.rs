//! Faults inside the CPU device: what a graph that captured a position, or a broken pad contract, would do.
//!
//! Committed after `fetch` has filled the rows of a step, so that every op after it sees them.

use crate::fault::{Fault, FaultKind};
use slotgraph_kernels::cpu::CpuMemory;
use slotgraph_kernels::ops::Op;

#[derive(Default)]
pub(super) struct Sabotage {
    /// From this step on, positions stay as they are then.
    baked_from: Option<u64>,
    baked: Option<Vec<u32>>,
    /// From this step on, pad rows write page 1.
    pad_write_from: Option<u64>,
}

impl Sabotage {
    pub fn arm(&mut self, fault: Fault) -> bool {
        match fault.kind {
            FaultKind::BakedPosition => self.baked_from = Some(fault.at),
            FaultKind::PadWrite => self.pad_write_from = Some(fault.at),
            _ => return false,
        }
        true
    }

    pub fn commit(&mut self, step: u64, fetch: &Op, memory: &mut CpuMemory) {
        let Op::Fetch(fetch) = fetch else { unreachable!("verify asks for fetch first") };
        if self.baked_from.is_some_and(|from| step >= from) {
            let positions = memory.u32_mut(fetch.rows.position);
            match &self.baked {
                Some(baked) => positions.copy_from_slice(baked),
                None => self.baked = Some(positions.to_vec()),
            }
        }
        if self.pad_write_from.is_some_and(|from| step >= from) {
            let seats = memory.u32(fetch.slots.generation).len();
            let pad_row = (seats - 1) * memory.stride(fetch.slots.pages);
            memory.u32_mut(fetch.slots.pages)[pad_row] = 1;
        }
    }
}
