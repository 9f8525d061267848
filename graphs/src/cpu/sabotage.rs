//! Faults inside the CPU device: what a graph that captured a position, a broken pad contract, or a spoiled cache would do.
//!
//! Committed after `fetch` has filled the rows of a step, so that every op after it sees them.

use crate::fault::{Fault, FaultKind};
use crate::plan::Plan;
use slotgraph_kernels::BufferId;
use slotgraph_kernels::Role;
use slotgraph_kernels::cpu::CpuMemory;
use slotgraph_kernels::ops::{Fetch, Op};

#[derive(Default)]
pub(super) struct Sabotage {
    /// From this step on, positions stay as they are then.
    baked_from: Option<u64>,
    baked: Option<Vec<u32>>,
    /// From this step on, pad rows write page 1.
    pad_write_from: Option<u64>,
    /// From this step on, until it is committed.
    nan_cache_from: Option<u64>,
}

impl Sabotage {
    pub fn arm(&mut self, fault: Fault) -> bool {
        match fault.kind {
            FaultKind::BakedPosition => self.baked_from = Some(fault.at),
            FaultKind::PadWrite => self.pad_write_from = Some(fault.at),
            FaultKind::NanCache => self.nan_cache_from = Some(fault.at),
            _ => return false,
        }
        true
    }

    pub fn commit(&mut self, step: u64, plan: &Plan, memory: &mut CpuMemory) {
        let Op::Fetch(fetch) = &plan.ops[0].op else { unreachable!("verify asks for fetch first") };
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
        if self.nan_cache_from.is_some_and(|from| step >= from) && self.spoil_cache(plan, fetch, memory) {
            self.nan_cache_from = None;
        }
    }

    /// Fills the first page of the first slot that decodes with NaN, in every layer; whether there was one.
    fn spoil_cache(&self, plan: &Plan, fetch: &Fetch, memory: &mut CpuMemory) -> bool {
        let pad_slot = memory.u32(fetch.slots.generation).len() - 1;
        let slots = memory.u32(fetch.rows.slot)[..memory.rows].iter().map(|slot| *slot as usize);
        let decodes = |slot: &usize| *slot != pad_slot && memory.u32(fetch.slots.generated)[*slot] > 0;
        let Some(slot) = slots.into_iter().find(decodes) else { return false };
        let page = memory.u32(fetch.slots.pages)[slot * memory.stride(fetch.slots.pages)] as usize;
        for (at, spec) in plan.buffers.iter().enumerate().filter(|(_, spec)| spec.role == Role::Kv) {
            let floats = spec.shape[1..].iter().product::<usize>();
            memory.f32_mut(BufferId(at as u32))[page * floats..][..floats].fill(f32::NAN);
        }
        true
    }
}
