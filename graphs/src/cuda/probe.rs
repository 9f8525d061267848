//! What the probes may do to a prepared device: read and write any buffer, step op by op, and name every node.
//!
//! Used by `--check-ops`, graph-dump and the poison tests; never by serving. Everything here waits for the stream.
//! **Invariant:** a step run here is the same calls as an eager step, with nothing between them but waits and reads.

use super::arena::Place;
use super::device::CudaDevice;
use super::error::{CallError, CudaError, During};
use super::memory::DeviceMemory;
use super::nodes::NodeKind;
use super::prepare::settle;
use crate::device::{Device, DeviceError};
use crate::plan::{PlacedOp, Plan};
use crate::step::{StepInput, StepOutput};
use slotgraph_kernels::{BufferId, BufferSpec, Specs};

/// An op of the step that is being run.
#[derive(Clone, Copy)]
pub struct OpAt<'a> {
    pub index: usize,
    pub placed: &'a PlacedOp,
    pub plan: &'a Plan,
}

/// What an observer wants of the op that comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    Launch,
    /// The observer writes what the op would have written.
    Skip,
}

/// Looks on while a step is run op by op.
pub trait Observer {
    /// The op's inputs are as the ops before left them.
    fn before(&mut self, at: OpAt<'_>, device: &CudaDevice) -> Result<Turn, CudaError>;
    /// The op has run, or was skipped; an error stops the step and loses the device.
    fn after(&mut self, at: OpAt<'_>, device: &CudaDevice) -> Result<(), CudaError>;
}

/// A node of a captured graph: which op launched it and which buffers it was given.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct NodeInfo {
    pub index: usize,
    pub kind: NodeKind,
    pub function: String,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    /// Index in the plan, op name and layer; None for nodes that are not our kernels.
    pub op: Option<(usize, &'static str, Option<usize>)>,
    /// A kernel of a library, or what came with one. Which op asked for it, its neighbours say.
    pub library: bool,
    /// (parameter, region of the ledger, offset into it).
    pub pointers: Vec<(usize, String, u64)>,
    /// Nodes that this one follows, and whether the edge is programmatic.
    pub after: Vec<(usize, bool)>,
}

impl CudaDevice {
    /// The buffers of all plans, at their largest.
    pub fn buffers(&self) -> &[BufferSpec] {
        &self.arena.specs
    }

    /// The plan of a bucket, as it is run.
    pub fn plan(&self, bucket: usize) -> Result<&Plan, DeviceError> {
        Ok(&self.programs[self.index_of(bucket)?].plan)
    }

    /// Bytes `offset … offset + bytes` of the buffer named `name`. Waits for everything enqueued.
    pub fn read_buffer(&self, name: &str, offset: usize, bytes: usize) -> Result<Vec<u8>, CudaError> {
        if let Some(memory) = self.arena.extra(name) {
            in_bounds(name, memory.bytes, offset, bytes, "reading")?;
            return self.read_device(memory, offset, bytes).during(|| format!("reading {bytes} bytes of {name}"));
        }
        let id = self.arena.find(name).ok_or_else(|| CudaError::NoBuffer(name.into()))?;
        self.read(id, offset, bytes)
    }

    /// The buffer as `plan` shapes it.
    pub fn read_shaped(&self, plan: &Plan, id: BufferId) -> Result<Vec<u8>, CudaError> {
        self.read(id, 0, plan.buffer(id).bytes())
    }

    fn read(&self, id: BufferId, offset: usize, bytes: usize) -> Result<Vec<u8>, CudaError> {
        let spec = &self.arena.specs[id.0 as usize];
        in_bounds(&spec.name, spec.bytes(), offset, bytes, "reading")?;
        let doing = || format!("reading {bytes} bytes of {}", spec.name);
        match self.arena.place(id) {
            Place::Device(memory) => self.read_device(memory, offset, bytes).during(doing),
            Place::Pinned(memory) => {
                self.gpu.bind().and_then(|()| self.gpu.wait()).during(doing)?;
                let words: &[u8] = bytemuck::cast_slice(memory.slice(0, memory.count));
                Ok(words[offset..offset + bytes].to_vec())
            }
            Place::Later => unreachable!("a prepared device has its page pool"),
        }
    }

    /// A range that was found to be in bounds.
    fn read_device(&self, memory: &DeviceMemory, offset: usize, bytes: usize) -> Result<Vec<u8>, CallError> {
        assert!(offset + bytes <= memory.bytes, "the caller checked the bounds");
        let mut out = vec![0u8; bytes];
        self.gpu.bind()?;
        // SAFETY: the range is in bounds by the assertion; `out` holds `bytes` and is not touched before the wait.
        unsafe { self.gpu.copy_out(out.as_mut_ptr().cast(), memory.address + offset as u64, bytes) }?;
        self.gpu.wait()?;
        Ok(out)
    }

    /// Overwrites part of a device buffer, after everything enqueued so far.
    pub fn write_buffer(&self, name: &str, offset: usize, bytes: &[u8]) -> Result<(), CudaError> {
        let id = self.arena.find(name).ok_or_else(|| CudaError::NoBuffer(name.into()))?;
        let spec = &self.arena.specs[id.0 as usize];
        in_bounds(name, spec.bytes(), offset, bytes.len(), "writing")?;
        let Place::Device(memory) = self.arena.place(id) else {
            return Err(CudaError::Unsupported(format!("{name} is a ring: steps are written by enqueueing them")));
        };
        // SAFETY: the range is in bounds (`in_bounds`); `bytes` outlives the wait.
        self.gpu
            .bind()
            .and_then(|()| unsafe {
                self.gpu.copy_in(memory.address + offset as u64, bytes.as_ptr().cast(), bytes.len())
            })
            .and_then(|()| self.gpu.wait())
            .during(|| format!("writing {} bytes of {name}", bytes.len()))
    }

    /// Runs one step op by op, waiting after each, whatever the device's mode. Nothing else may be in flight.
    pub fn run_observed(&mut self, input: &StepInput, observer: &mut dyn Observer) -> Result<StepOutput, CudaError> {
        let index = self.admit_alone(input)?;
        for op in 0..self.programs[index].ops() {
            let outcome = self.observe_op(index, op, observer);
            outcome.map_err(|error| self.lose_with(error))?;
        }
        self.settle_alone(index, input.step)
    }

    fn observe_op(&mut self, index: usize, op: usize, observer: &mut dyn Observer) -> Result<(), CudaError> {
        let program = &self.programs[index];
        let at = OpAt { index: op, placed: &program.plan.ops[op], plan: &program.plan };
        if observer.before(at, self)? == Turn::Launch {
            program.launch_op(&self.gpu, op, self.exchange.as_mut())?;
            settle(&self.gpu, self.exchange.as_ref(), || format!("running {}", program.describe(op)))?;
        }
        let program = &self.programs[index];
        observer.after(OpAt { index: op, placed: &program.plan.ops[op], plan: &program.plan }, self)
    }

    /// Every node of the graph of `bucket`, in launch order.
    pub fn nodes(&self, bucket: usize) -> Result<Vec<NodeInfo>, CudaError> {
        let index = self.index_of(bucket)?;
        let graph =
            self.graphs.get(index).ok_or_else(|| CudaError::Unsupported("an eager device has no graphs".into()))?;
        let program = &self.programs[index];
        let mut calls = program.calls_by_op();
        let mut infos = Vec::with_capacity(graph.walk.nodes.len());
        for (position, node) in graph.walk.nodes.iter().enumerate() {
            // `Graph::capture` checked that our kernel nodes are the program's calls in order.
            let own = node.kind == NodeKind::Kernel && !super::graph::is_foreign(&node.function);
            let op = if own { calls.next() } else { None };
            let placed = |(op, _): (usize, &super::launch::Call)| {
                let placed = &program.plan.ops[op];
                (op, placed.op.name(), placed.layer)
            };
            let mut pointers = Vec::new();
            for (parameter, bytes) in node.parameters.iter().enumerate() {
                for eight in bytes.chunks_exact(8) {
                    let address = u64::from_le_bytes(eight.try_into().expect("chunks_exact gives eight bytes"));
                    if let Some((region, offset)) = self.ledger.lookup(address) {
                        pointers.push((parameter, region.name.clone(), offset));
                    }
                }
            }
            let into_here = graph.walk.edges.iter().filter(|(_, to, _)| *to == position);
            infos.push(NodeInfo {
                index: position,
                kind: node.kind,
                function: node.function.clone(),
                grid: node.grid,
                block: node.block,
                shared_bytes: node.shared_bytes,
                op: op.map(placed),
                library: !own,
                pointers,
                after: into_here.map(|(from, _, programmatic)| (*from, *programmatic)).collect(),
            });
        }
        Ok(infos)
    }

    pub(super) fn admit_alone(&mut self, input: &StepInput) -> Result<usize, CudaError> {
        if self.in_flight() > 0 {
            return Err(CudaError::Unsupported("a step can be watched only while no other is in flight".into()));
        }
        let index = self.admit(input)?;
        self.gpu.bind().during(|| "running a step op by op".into())?;
        Ok(index)
    }

    pub(super) fn settle_alone(&mut self, index: usize, step: u64) -> Result<StepOutput, CudaError> {
        self.enqueued(index);
        let mut output = StepOutput::default();
        match self.poll(&mut output)? {
            true => Ok(output),
            false => {
                let error = DeviceError::Lost(format!("step {step} ran op by op and published no record"));
                Err(self.lose(error).into())
            }
        }
    }

    pub(super) fn lose_with(&mut self, error: CudaError) -> CudaError {
        let text = error.to_string();
        self.lose(DeviceError::Lost(text));
        error
    }
}

/// That `bytes` bytes from `offset` lie in the `held` bytes of buffer `name`.
fn in_bounds(name: &str, held: usize, offset: usize, bytes: usize, verb: &str) -> Result<(), CudaError> {
    if offset.checked_add(bytes).is_some_and(|end| end <= held) {
        return Ok(());
    }
    Err(CudaError::OutOfBounds {
        name: name.to_owned(),
        what: format!("{verb} {bytes} bytes from {offset}"),
        bytes: held,
    })
}
