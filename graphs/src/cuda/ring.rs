//! The rings through which steps go in and records come out: pinned host memory that the GPU reads and writes by itself.
//!
//! Used by `CudaDevice` for each step and by `prepare` for the steps of pad rows. **Invariants:** an input entry is written only
//! while no step that reads it is in flight (the device has more entries than steps in flight, by one); a record is read
//! only after its step number was seen with acquire order.

use super::arena::Arena;
use super::error::{CudaError, During};
use super::gpu::Gpu;
use super::options::CudaOptions;
use crate::device::DeviceError;
use crate::plan::Plan;
use crate::step::{StepInput, StepLimits, StepOutput, decode, encode};
use slotgraph_kernels::entry::output;
use slotgraph_kernels::{BufferId, Op};

pub(super) struct Rings {
    input: BufferId,
    output: BufferId,
    /// `[S]`, 1 for an empty seat.
    ended: BufferId,
    /// `[R]`, each row's position.
    pub position: BufferId,
    /// `[S, pages_per_slot]`, the block tables.
    pub pages: BufferId,
    entries: usize,
    entry_words: usize,
    output_words: usize,
}

impl Rings {
    pub fn new(plan: &Plan, limits: &StepLimits) -> Result<Rings, CudaError> {
        let (Some(Op::Fetch(fetch)), Some(Op::Feed(feed))) =
            (plan.ops.first().map(|placed| &placed.op), plan.ops.last().map(|placed| &placed.op))
        else {
            return Err(CudaError::Unsupported("a plan begins with fetch and ends with feed".into()));
        };
        let layout = limits.entry_layout();
        Ok(Rings {
            input: fetch.input_ring,
            output: feed.output_ring,
            ended: fetch.slots.ended,
            position: fetch.rows.position,
            pages: fetch.slots.pages,
            entries: limits.ring_entries(),
            entry_words: layout.entry_words(),
            output_words: layout.output_words(),
        })
    }

    /// Step numbers begin at 1; the device's counter, which picks the entry, at 0.
    fn entry(&self, step: u64) -> usize {
        ((step - 1) % self.entries as u64) as usize
    }

    /// Writes a step's entry. The step that used it before has settled.
    pub fn write(
        &self,
        arena: &mut Arena,
        input: &StepInput,
        limits: &StepLimits,
        eos_ids: &[u32],
    ) -> Result<(), DeviceError> {
        let at = self.entry(input.step) * self.entry_words;
        let words = arena.pinned_mut(self.input).slice_mut(at, self.entry_words);
        encode(input, limits, eos_ids, words).map(|_| ())
    }

    /// Writes a step of pad rows alone.
    pub fn write_empty(
        &self,
        arena: &mut Arena,
        step: u64,
        bucket: usize,
        options: &CudaOptions,
    ) -> Result<(), DeviceError> {
        let input = StepInput { step, bucket, ..StepInput::default() };
        self.write(arena, &input, &options.limits, &options.spec.eos_ids)
    }

    /// Whether `step` has published its record.
    pub fn is_published(&self, arena: &Arena, step: u64) -> bool {
        let ring = arena.pinned(self.output);
        let at = self.entry(step) * self.output_words;
        // The low word is stored last, with release order. A stale entry differs in it: it holds an earlier step.
        ring.load(at + output::STEP_LO) == step as u32 && ring.load(at + output::STEP_HI) == (step >> 32) as u32
    }

    /// Reads the record of a step that `is_published`.
    pub fn read(&self, arena: &Arena, step: u64, record: &mut StepOutput) -> Result<(), DeviceError> {
        let at = self.entry(step) * self.output_words;
        decode(arena.pinned(self.output).slice(at, self.output_words), record)
    }

    /// Marks every seat empty: zeroed memory would be a live seat of generation 0.
    pub fn empty_seats(&self, arena: &Arena, gpu: &Gpu) -> Result<(), CudaError> {
        let seats = arena.specs[self.ended.0 as usize].elements();
        let address = arena.address(self.ended).expect("only the page pool is allocated late");
        // SAFETY: the buffer holds `seats` words, and allocations are aligned.
        unsafe { gpu.fill(address, 1, seats) }.and_then(|()| gpu.wait()).during(|| "emptying the seats".into())
    }
}
