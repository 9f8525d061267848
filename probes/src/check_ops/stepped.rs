//! A device that runs a step op by op with somebody watching: a GPU, or the CPU's own ops in its place.
//!
//! Both show their memory as a GPU keeps it, in bytes. The CPU's is there so that the check itself can be tested without a GPU.

use slotgraph_graphs::cuda::{CudaDevice, CudaError, Observer, OpAt, Turn};
use slotgraph_graphs::plan::{PlacedOp, Plan};
use slotgraph_graphs::step::{StepInput, StepLimits, StepOutput, decode, encode};
use slotgraph_kernels::cpu::{CpuBuffer, CpuMemory};
use slotgraph_kernels::{BufferId, BufferSpec, DType, Op, Specs};
use std::cell::RefCell;

/// An op of the step that is being run.
#[derive(Clone, Copy)]
pub struct At<'a> {
    pub index: usize,
    pub placed: &'a PlacedOp,
    pub plan: &'a Plan,
}

/// Memory between two ops, in a GPU's layout.
pub trait Memory {
    /// The buffer as `plan` shapes it.
    fn read(&self, plan: &Plan, id: BufferId) -> Result<Vec<u8>, String>;
    /// Overwrites the buffer as `plan` shapes it.
    fn write(&self, plan: &Plan, id: BufferId, bytes: &[u8]) -> Result<(), String>;
}

/// Looks on. An error ends the step.
pub trait Watch {
    /// Whether the device is to run the op; if not, `after` writes what it would have written.
    fn before(&mut self, at: At, memory: &dyn Memory) -> Result<bool, String>;
    fn after(&mut self, at: At, memory: &dyn Memory) -> Result<(), String>;
}

/// A device that can be watched.
pub trait Stepped {
    fn limits(&self) -> &StepLimits;
    /// The plan of the largest bucket.
    fn largest(&self) -> &Plan;
    fn step(&mut self, input: &StepInput, watch: &mut dyn Watch) -> Result<StepOutput, String>;
    /// Overwrites a whole buffer between steps.
    fn fill(&mut self, spec: &BufferSpec, bytes: &[u8]) -> Result<(), String>;
}

impl Stepped for CudaDevice {
    fn limits(&self) -> &StepLimits {
        CudaDevice::limits(self)
    }
    fn largest(&self) -> &Plan {
        self.plan(CudaDevice::limits(self).rows_max()).expect("the largest bucket was prepared")
    }
    fn step(&mut self, input: &StepInput, watch: &mut dyn Watch) -> Result<StepOutput, String> {
        self.run_observed(input, &mut Watched(watch)).map_err(|error| error.to_string())
    }
    fn fill(&mut self, spec: &BufferSpec, bytes: &[u8]) -> Result<(), String> {
        self.write_buffer(&spec.name, 0, bytes).map_err(|error| error.to_string())
    }
}

impl Memory for CudaDevice {
    fn read(&self, plan: &Plan, id: BufferId) -> Result<Vec<u8>, String> {
        self.read_shaped(plan, id).map_err(|error| error.to_string())
    }
    fn write(&self, plan: &Plan, id: BufferId, bytes: &[u8]) -> Result<(), String> {
        self.write_buffer(&plan.buffer(id).name, 0, bytes).map_err(|error| error.to_string())
    }
}

struct Watched<'a>(&'a mut dyn Watch);

impl Observer for Watched<'_> {
    fn before(&mut self, at: OpAt<'_>, device: &CudaDevice) -> Result<Turn, CudaError> {
        let launch = self.0.before(of(at), device).map_err(CudaError::Unsupported)?;
        Ok(if launch { Turn::Launch } else { Turn::Skip })
    }
    fn after(&mut self, at: OpAt<'_>, device: &CudaDevice) -> Result<(), CudaError> {
        self.0.after(of(at), device).map_err(CudaError::Unsupported)
    }
}

fn of(at: OpAt<'_>) -> At<'_> {
    At { index: at.index, placed: at.placed, plan: at.plan }
}

/// What may go wrong on purpose after an op of `CpuSteps`.
pub type Damage = Box<dyn FnMut(&PlacedOp, &mut CpuMemory)>;

/// The CPU references in a GPU's place; pad rows are computed too.
pub struct CpuSteps {
    limits: StepLimits,
    eos_ids: Vec<u32>,
    plans: Vec<Plan>,
    memory: CpuMemory,
    pub damage: Option<Damage>,
}

impl CpuSteps {
    pub fn new(limits: StepLimits, eos_ids: Vec<u32>, plans: Vec<Plan>, mut memory: CpuMemory) -> CpuSteps {
        memory.compute_padding = true;
        CpuSteps { limits, eos_ids, plans, memory, damage: None }
    }

    fn entry(&self, step: u64, words: usize) -> std::ops::Range<usize> {
        let start = ((step - 1) % self.limits.ring_entries() as u64) as usize * words;
        start..start + words
    }
}

impl Stepped for CpuSteps {
    fn limits(&self) -> &StepLimits {
        &self.limits
    }
    fn largest(&self) -> &Plan {
        self.plans.last().expect("a configuration has at least one bucket")
    }

    fn step(&mut self, input: &StepInput, watch: &mut dyn Watch) -> Result<StepOutput, String> {
        let plan = self.plans.iter().find(|plan| plan.rows == input.bucket).ok_or("no such bucket")?.clone();
        let (Some(Op::Fetch(fetch)), Some(Op::Feed(feed))) =
            (plan.ops.first().map(|placed| &placed.op), plan.ops.last().map(|placed| &placed.op))
        else {
            unreachable!("verify asks for fetch first and feed last");
        };
        let layout = self.limits.entry_layout();
        let entry = self.entry(input.step, layout.entry_words());
        let words = &mut self.memory.u32_mut(fetch.input_ring)[entry];
        encode(input, &self.limits, &self.eos_ids, words).map_err(|error| error.to_string())?;
        (self.memory.plan_rows, self.memory.plan_logit_rows) = (plan.rows, plan.logit_rows);
        for (index, placed) in plan.ops.iter().enumerate() {
            let at = At { index, placed, plan: &plan };
            let view = RefCell::new(&mut self.memory);
            if watch.before(at, &view)? {
                placed.op.run(&mut self.memory).map_err(|error| error.to_string())?;
            }
            if let Some(damage) = &mut self.damage {
                damage(placed, &mut self.memory);
            }
            let view = RefCell::new(&mut self.memory);
            watch.after(at, &view)?;
        }
        let record = self.entry(input.step, layout.output_words());
        let mut output = StepOutput::default();
        decode(&self.memory.u32(feed.output_ring)[record], &mut output).map_err(|error| error.to_string())?;
        Ok(output)
    }

    fn fill(&mut self, spec: &BufferSpec, bytes: &[u8]) -> Result<(), String> {
        let at = self.largest().buffers.iter().position(|known| known.name == spec.name).ok_or("no such buffer")?;
        from_bytes(spec.dtype, bytes, &mut self.memory.buffers[at]);
        Ok(())
    }
}

impl Memory for RefCell<&mut CpuMemory> {
    fn read(&self, plan: &Plan, id: BufferId) -> Result<Vec<u8>, String> {
        let spec = plan.buffer(id);
        // The CPU keeps no scratch.
        let mut bytes = to_bytes(spec.dtype, &self.borrow().buffers[id.0 as usize], spec.elements());
        bytes.resize(spec.bytes(), 0);
        Ok(bytes)
    }
    fn write(&self, plan: &Plan, id: BufferId, bytes: &[u8]) -> Result<(), String> {
        from_bytes(plan.buffer(id).dtype, bytes, &mut self.borrow_mut().buffers[id.0 as usize]);
        Ok(())
    }
}

/// The first `elements` elements as a GPU stores them.
pub fn to_bytes(dtype: DType, buffer: &CpuBuffer, elements: usize) -> Vec<u8> {
    match (dtype, buffer) {
        (DType::Bf16, CpuBuffer::F32(values)) => {
            values.iter().take(elements).flat_map(|value| half::bf16::from_f32(*value).to_le_bytes()).collect()
        }
        (_, CpuBuffer::F32(values)) => values.iter().take(elements).flat_map(|value| value.to_le_bytes()).collect(),
        (_, CpuBuffer::U32(values)) => values.iter().take(elements).flat_map(|value| value.to_le_bytes()).collect(),
    }
}

/// Overwrites the first elements of `buffer`, which grows if it must.
pub fn from_bytes(dtype: DType, bytes: &[u8], buffer: &mut CpuBuffer) {
    let word = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let count = bytes.len() / dtype.bytes();
    match buffer {
        CpuBuffer::F32(values) => {
            values.resize(values.len().max(count), 0.0);
            match dtype {
                DType::Bf16 => values.iter_mut().zip(bytes.chunks_exact(2)).for_each(|(value, bytes)| {
                    *value = f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16);
                }),
                _ => values
                    .iter_mut()
                    .zip(bytes.chunks_exact(4))
                    .for_each(|(value, bytes)| *value = f32::from_bits(word(bytes))),
            }
        }
        CpuBuffer::U32(values) => {
            values.resize(values.len().max(count), 0);
            values.iter_mut().zip(bytes.chunks_exact(4)).for_each(|(value, bytes)| *value = word(bytes));
        }
    }
}
