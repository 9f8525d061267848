//! The arena: the buffers of all plans, each allocated once at the size of its largest plan, plus what kernels share.
//!
//! Used by the programs that launch and by the probes that read. **Invariants:** a buffer has one address for the life of the
//! device, the same in every bucket; every allocation is in the ledger; nothing is allocated after `allocate_kv`.

use super::error::{CudaError, During};
use super::exchange::Exchanger;
use super::gpu::Gpu;
use super::launch::Addresses;
use super::ledger::Ledger;
use super::memory::{DeviceMemory, PinnedMemory};
use super::weights::Weights;
use crate::plan::Plan;
use slotgraph_kernels::launch::{Arg, Launch};
use slotgraph_kernels::{BufferId, BufferSpec, Role};
use std::sync::Arc;

/// Where one buffer lives.
pub(super) enum Place {
    Device(DeviceMemory),
    Pinned(PinnedMemory),
    /// The page pool, until its size is known.
    Later,
}

pub(super) struct Arena {
    /// The largest spec of each buffer, by id.
    pub specs: Vec<BufferSpec>,
    pub places: Vec<Place>,
    workspace: DeviceMemory,
    counters: DeviceMemory,
    /// Buffers that no plan knows: a probe's stamps, a planted fault's copy.
    extras: Vec<(String, DeviceMemory)>,
    gpu: Arc<Gpu>,
}

/// Bytes by what they are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct ArenaBytes {
    /// Activations, scratch, slot state, workspace.
    pub arena: u64,
    pub kv: u64,
    /// Pinned host memory of the rings.
    pub rings: u64,
}

impl Arena {
    /// Allocates everything but the page pool. `plans` are all plans of the model; `launches` all of their launches.
    pub fn allocate<'a>(
        gpu: &Arc<Gpu>,
        plans: &[Plan],
        launches: impl Iterator<Item = &'a Launch>,
        ledger: &mut Ledger,
    ) -> Result<Arena, CudaError> {
        let specs = largest_specs(plans);
        let (mut workspace_bytes, mut counters) = (0, 0);
        for launch in launches {
            workspace_bytes = workspace_bytes.max(launch.workspace_bytes);
            counters = counters.max(launch.counters);
        }
        let mut places = Vec::with_capacity(specs.len());
        for spec in &specs {
            places.push(match spec.role {
                Role::Kv => Place::Later,
                Role::InputRing | Role::OutputRing => Place::Pinned(pinned(gpu, spec, ledger)?),
                _ => Place::Device(device(gpu, &spec.name, spec.bytes(), ledger)?),
            });
        }
        let workspace = device(gpu, "workspace", workspace_bytes, ledger)?;
        let counters = device(gpu, "counters", counters * size_of::<u32>(), ledger)?;
        Ok(Arena { specs, places, workspace, counters, extras: Vec::new(), gpu: gpu.clone() })
    }

    /// Allocates the page pool, now that the plans know its size.
    pub fn allocate_kv(&mut self, plans: &[Plan], ledger: &mut Ledger) -> Result<(), CudaError> {
        self.specs = largest_specs(plans);
        for (spec, place) in self.specs.iter().zip(&mut self.places) {
            if matches!(place, Place::Later) {
                *place = Place::Device(device(&self.gpu, &spec.name, spec.bytes(), ledger)?);
            }
        }
        Ok(())
    }

    /// Allocates a zeroed buffer that no plan knows, and gives its address.
    pub fn allocate_extra(&mut self, name: &str, bytes: usize, ledger: &mut Ledger) -> Result<u64, CudaError> {
        let memory = device(&self.gpu, name, bytes, ledger)?;
        zero(&self.gpu, &memory, name)?;
        let address = memory.address;
        self.extras.push((name.to_owned(), memory));
        Ok(address)
    }

    /// Zeroes everything, as before the first step. Waits.
    pub fn reset(&mut self) -> Result<(), CudaError> {
        let gpu = self.gpu.clone();
        for (spec, place) in self.specs.iter().zip(&mut self.places) {
            match place {
                Place::Device(memory) => zero(&gpu, memory, &spec.name)?,
                Place::Pinned(memory) => {
                    let count = memory.count;
                    memory.slice_mut(0, count).fill(0);
                }
                Place::Later => {}
            }
        }
        zero(&gpu, &self.workspace, "workspace")?;
        zero(&gpu, &self.counters, "counters")?;
        gpu.wait().during(|| "zeroing the arena".into())
    }

    /// The buffer named `name`.
    pub fn find(&self, name: &str) -> Option<BufferId> {
        let index = self.specs.iter().position(|spec| spec.name == name)?;
        Some(BufferId(u32::try_from(index).expect("a plan has few buffers")))
    }

    /// The buffer named `name` that no plan knows.
    pub fn extra(&self, name: &str) -> Option<&DeviceMemory> {
        Some(&self.extras.iter().find(|(extra, _)| extra == name)?.1)
    }

    pub fn place(&self, id: BufferId) -> &Place {
        &self.places[id.0 as usize]
    }

    pub fn pinned(&self, id: BufferId) -> &PinnedMemory {
        match &self.places[id.0 as usize] {
            Place::Pinned(memory) => memory,
            _ => panic!("{} is not a ring", self.specs[id.0 as usize].name),
        }
    }

    pub fn pinned_mut(&mut self, id: BufferId) -> &mut PinnedMemory {
        match &mut self.places[id.0 as usize] {
            Place::Pinned(memory) => memory,
            _ => panic!("{} is not a ring", self.specs[id.0 as usize].name),
        }
    }

    pub fn address(&self, id: BufferId) -> Option<u64> {
        match self.place(id) {
            Place::Device(memory) => Some(memory.address),
            Place::Pinned(memory) => Some(memory.address),
            Place::Later => None,
        }
    }

    pub fn bytes(&self) -> ArenaBytes {
        let mut bytes = ArenaBytes { arena: (self.workspace.bytes + self.counters.bytes) as u64, kv: 0, rings: 0 };
        for (spec, place) in self.specs.iter().zip(&self.places) {
            match place {
                Place::Device(memory) if spec.role == Role::Kv => bytes.kv += memory.bytes as u64,
                Place::Device(memory) => bytes.arena += memory.bytes as u64,
                Place::Pinned(memory) => bytes.rings += memory.bytes() as u64,
                Place::Later => {}
            }
        }
        bytes
    }
}

/// The addresses of a step's launches.
pub(super) struct StepAddresses<'a> {
    pub arena: &'a Arena,
    pub weights: &'a Weights,
    /// None for a single rank.
    pub exchange: Option<&'a Exchanger>,
    /// A planted fault: this buffer is given another's address.
    pub diverted: Option<(BufferId, u64)>,
}

impl Addresses for StepAddresses<'_> {
    fn address(&self, arg: Arg) -> Option<u64> {
        match arg {
            Arg::Buffer(id) => match self.diverted {
                Some((from, to)) if from == id => Some(to),
                _ => self.arena.address(id),
            },
            Arg::Weight(id) => Some(self.weights.address(id)),
            Arg::Workspace => Some(self.arena.workspace.address),
            Arg::Counters => Some(self.arena.counters.address),
            Arg::Peer(rank) => self.exchange?.scratch_of(usize::from(rank)),
            Arg::Status => self.exchange?.status_address(),
            // Of other launches.
            Arg::Staging | Arg::Packed | Arg::Stamps | Arg::U32(_) | Arg::U64(_) => None,
        }
    }
}

/// Bytes of the page pool per page, from a plan of `pages` pages.
pub(super) fn page_bytes(plan: &Plan, pages: usize) -> usize {
    plan.buffers.iter().filter(|spec| spec.role == Role::Kv).map(|spec| spec.bytes() / pages).sum()
}

/// For each buffer the spec of the plan where it is largest. All plans list the same buffers in the same order.
fn largest_specs(plans: &[Plan]) -> Vec<BufferSpec> {
    let mut specs = plans.first().expect("a model has at least one plan").buffers.clone();
    for plan in plans {
        for (largest, spec) in specs.iter_mut().zip(&plan.buffers) {
            assert_eq!(largest.name, spec.name, "plans of one model list the same buffers in the same order");
            if spec.bytes() > largest.bytes() {
                *largest = spec.clone();
            }
        }
    }
    specs
}

fn device(gpu: &Arc<Gpu>, name: &str, bytes: usize, ledger: &mut Ledger) -> Result<DeviceMemory, CudaError> {
    let memory = DeviceMemory::allocate(gpu, bytes).during(|| format!("allocating {bytes} bytes for {name}"))?;
    ledger.register(name, memory.address, memory.bytes as u64);
    Ok(memory)
}

fn pinned(gpu: &Arc<Gpu>, spec: &BufferSpec, ledger: &mut Ledger) -> Result<PinnedMemory, CudaError> {
    let words = spec.bytes() / size_of::<u32>();
    let memory =
        PinnedMemory::allocate(gpu, words).during(|| format!("allocating {words} pinned words for {}", spec.name))?;
    ledger.register(spec.name.as_str(), memory.address, memory.bytes() as u64);
    Ok(memory)
}

fn zero(gpu: &Gpu, memory: &DeviceMemory, name: &str) -> Result<(), CudaError> {
    let words = memory.bytes / size_of::<u32>();
    // SAFETY: the range is the allocation itself, whose size is a multiple of 16 and whose address cuMemAlloc aligned.
    unsafe { gpu.fill(memory.address, 0, words) }.during(|| format!("zeroing {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::RankShape;
    use slotgraph_kernels::DType;

    fn plan(rows: usize, pages: usize) -> Plan {
        let buffer = |name: &str, dtype, shape: &[usize], role| BufferSpec {
            name: name.into(),
            dtype,
            shape: shape.into(),
            role,
        };
        Plan {
            model: "test".into(),
            rank: RankShape::SINGLE,
            rows,
            logit_rows: rows,
            buffers: vec![
                buffer("x", DType::F32, &[rows, 8], Role::Activation),
                buffer("split", DType::F32, &[64 / rows, 8], Role::Scratch),
                buffer("kv.0", DType::Bf16, &[pages, 64, 8], Role::Kv),
                buffer("kv.1", DType::Bf16, &[pages, 64, 4], Role::Kv),
            ],
            weights: Vec::new(),
            ops: Vec::new(),
        }
    }

    #[test]
    fn each_buffer_takes_its_largest_plan() {
        let specs = largest_specs(&[plan(1, 2), plan(8, 2), plan(4, 2)]);
        assert_eq!(specs[0].shape, [8, 8]);
        assert_eq!(specs[1].shape, [64, 8], "not every buffer grows with the bucket");
    }

    #[test]
    fn a_page_costs_its_share_of_every_layer() {
        assert_eq!(page_bytes(&plan(1, 10), 10), 64 * (8 + 4) * 2);
    }
}
