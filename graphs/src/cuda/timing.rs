//! Where a step's time goes: by events around each op of an eager step, and by stamps between the nodes inside a graph.
//!
//! Used by attribution; never by serving. **Invariant:** a timed step computes what any step computes; a stamped graph has the
//! program's calls with a stamp after each op's, and no programmatic edges, which would let nodes overlap.

use super::device::CudaDevice;
use super::error::{CudaError, During};
use super::gpu::fault;
use super::graph::Graph;
use super::launch::{Addresses, Call};
use super::memory::PinnedMemory;
use super::prepare::settle;
use super::sabotage::copy_on_device;
use crate::device::Device;
use crate::step::{StepInput, StepOutput};
use cudarc::driver::CudaEvent;
use cudarc::driver::sys::CUevent_flags;
use slotgraph_kernels::launch::{Arg, stamp};
use slotgraph_kernels::{BufferId, Role};

/// Name of the buffer that stamps are written to.
const STAMPS: &str = "probe.stamps";

/// Time of one op of a step.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct OpTime {
    pub index: usize,
    pub op: &'static str,
    pub layer: Option<usize>,
    pub us: f64,
}

/// Times of the ops inside a graph.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct NodeTimes {
    /// From one stamp to the next with nothing between: part of every op's time below.
    pub stamp_us: f64,
    pub ops: Vec<OpTime>,
}

/// Bytes a second.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct CopyRates {
    /// Inside the device, read plus written.
    pub within_bytes_s: f64,
    /// From pinned memory to the device.
    pub upload_bytes_s: f64,
}

/// A graph with stamps, for the bucket that was timed last.
pub(super) struct Stamped {
    bucket: usize,
    graph: Graph,
}

struct StampAddress(u64);

impl Addresses for StampAddress {
    fn address(&self, arg: Arg) -> Option<u64> {
        (arg == Arg::Stamps).then_some(self.0)
    }
}

impl CudaDevice {
    /// Runs one step op by op with an event around each, and waits once at the end.
    pub fn time_ops(&mut self, input: &StepInput) -> Result<(StepOutput, Vec<OpTime>), CudaError> {
        let index = self.admit_alone(input)?;
        let times = self.timed_launches(index).map_err(|error| self.lose_with(error))?;
        Ok((self.settle_alone(index, input.step)?, times))
    }

    fn timed_launches(&mut self, index: usize) -> Result<Vec<OpTime>, CudaError> {
        let doing = || "timing ops by events".to_owned();
        let stream = self.gpu.stream.clone();
        let mark =
            || stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).map_err(fault("cuEventRecord")).during(doing);
        let mut marks = vec![mark()?];
        let program = &self.programs[index];
        for op in 0..program.ops() {
            program.launch_op(&self.gpu, op, self.exchange.as_mut())?;
            marks.push(mark()?);
        }
        settle(&self.gpu, self.exchange.as_ref(), doing)?;
        let mut us = Vec::with_capacity(program.ops());
        for pair in marks.windows(2) {
            us.push(
                f64::from(pair[0].elapsed_ms(&pair[1]).map_err(fault("cuEventElapsedTime_v2")).during(doing)?) * 1e3,
            );
        }
        Ok(self.by_op(index, &us))
    }

    /// Runs one step as a graph with a stamp after each op. The first call for a bucket captures that graph.
    pub fn time_nodes(&mut self, input: &StepInput) -> Result<(StepOutput, NodeTimes), CudaError> {
        let index = self.admit_alone(input)?;
        let times = self.stamped_replay(index).map_err(|error| self.lose_with(error))?;
        Ok((self.settle_alone(index, input.step)?, times))
    }

    fn stamped_replay(&mut self, index: usize) -> Result<NodeTimes, CudaError> {
        let bucket = self.programs[index].bucket;
        if self.stamped.as_ref().is_none_or(|stamped| stamped.bucket != bucket) {
            self.stamped = Some(self.capture_stamped(index)?);
        }
        let stamped = self.stamped.as_ref().expect("just captured");
        // SAFETY: arena and weights are this device's and outlive its graphs (field order; Drop waits first).
        unsafe { stamped.graph.launch() }.during(|| format!("replaying the stamped graph of bucket {bucket}"))?;
        // A copy to plain memory would wait inside the driver, and keep a rank on the same GPU from launching what this one waits for.
        settle(&self.gpu, self.exchange.as_ref(), || format!("replaying the stamped graph of bucket {bucket}"))?;
        let count = self.programs[index].ops() + 2;
        let bytes = self.read_buffer(STAMPS, 0, count * size_of::<u64>())?;
        let ns: Vec<u64> =
            bytes.chunks_exact(8).map(|eight| u64::from_le_bytes(eight.try_into().expect("eight bytes"))).collect();
        let us: Vec<f64> = ns.windows(2).map(|pair| pair[1].saturating_sub(pair[0]) as f64 / 1e3).collect();
        Ok(NodeTimes { stamp_us: us[0], ops: self.by_op(index, &us[1..]) })
    }

    /// Two stamps, then each op's calls and a stamp.
    fn capture_stamped(&mut self, index: usize) -> Result<Stamped, CudaError> {
        let address = match self.arena.extra(STAMPS) {
            Some(memory) => memory.address,
            None => {
                // Every bucket's plan has the same ops.
                let bytes = (self.programs[index].ops() + 2) * size_of::<u64>();
                self.arena.allocate_extra(STAMPS, bytes, &mut self.ledger)?
            }
        };
        self.gpu.wait().during(|| "making room for stamps".into())?;
        let (gpu, program, mut exchange) = (self.gpu.clone(), &self.programs[index], self.exchange.as_mut());
        let stamps: Vec<Call> = (0..program.ops() as u32 + 2)
            .map(|at| Call::resolve(&stamp(at), &self.modules, &StampAddress(address), false))
            .collect::<Result<_, _>>()
            .map_err(CudaError::Unsupported)?;
        // SAFETY: the stamps' buffer has a word for each and lives as long as the arena.
        let stamp = |at: usize| unsafe { stamps[at].launch(&gpu) }.during(|| format!("stamp {at}"));
        let mut graph = Graph::record(&gpu, program.bucket, || {
            stamp(0)?;
            stamp(1)?;
            for op in 0..program.ops() {
                program.launch_op_alone(&gpu, op, exchange.as_deref_mut())?;
                stamp(op + 2)?;
            }
            Ok(())
        })?;
        graph.instantiate()?;
        // The others have room for theirs too before this one's kernels wait for them.
        if let Some(exchange) = &self.exchange {
            exchange.barrier("the barrier before a stamped replay")?;
        }
        Ok(Stamped { bucket: program.bucket, graph })
    }

    /// What copies reach, at best of eight each: the ceilings that a step and a load are measured against. Copies parts of the
    /// first layer's pages over others, so only a device that holds nothing yet may be asked.
    pub fn copy_rates(&mut self) -> Result<CopyRates, CudaError> {
        const TIMES: usize = 8;
        const UPLOAD_BYTES: usize = 256 << 20;
        if self.in_flight() > 0 {
            return Err(CudaError::Unsupported("copies can be timed only while no step is in flight".into()));
        }
        let doing = || "timing copies".to_owned();
        let pool = self.arena.specs.iter().position(|spec| spec.role == Role::Kv);
        let id = BufferId(pool.ok_or_else(|| CudaError::NoBuffer("of pages".into()))? as u32);
        let address = self.arena.address(id).expect("a prepared device has its page pool");
        let half = self.arena.specs[id.0 as usize].bytes() / 2;
        self.gpu.bind().during(doing)?;
        let best = |bytes: usize, seconds: Vec<f64>| bytes as f64 / seconds.into_iter().fold(f64::INFINITY, f64::min);
        let within =
            self.timed(TIMES, |_| copy_on_device(&self.gpu, address + half as u64, address, half).during(doing))?;
        let upload_bytes = UPLOAD_BYTES.min(half);
        let pinned = PinnedMemory::allocate(&self.gpu, upload_bytes / size_of::<u32>()).during(doing)?;
        // SAFETY: the pool holds `upload_bytes`, the pinned block too, and `timed` waits for the copies before it is dropped.
        let copy = |_| unsafe { self.gpu.copy_in(address, pinned.host(), upload_bytes) }.during(doing);
        let upload = self.timed(TIMES, copy)?;
        Ok(CopyRates { within_bytes_s: best(2 * half, within), upload_bytes_s: best(upload_bytes, upload) })
    }

    /// Seconds that each of `times` pieces of enqueued work took on the device. Waits for all.
    fn timed(
        &self,
        times: usize,
        mut enqueue: impl FnMut(usize) -> Result<(), CudaError>,
    ) -> Result<Vec<f64>, CudaError> {
        let doing = || "timing by events".to_owned();
        let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
        let mark = || self.gpu.stream.record_event(flags).map_err(fault("cuEventRecord")).during(doing);
        let mut marks = vec![mark()?];
        for at in 0..times {
            enqueue(at)?;
            marks.push(mark()?);
        }
        self.gpu.wait().during(doing)?;
        let seconds = |pair: &[CudaEvent]| -> Result<f64, CudaError> {
            let ms = pair[0].elapsed_ms(&pair[1]).map_err(fault("cuEventElapsedTime_v2")).during(doing)?;
            Ok(f64::from(ms) / 1e3)
        };
        marks.windows(2).map(seconds).collect()
    }

    fn by_op(&self, index: usize, us: &[f64]) -> Vec<OpTime> {
        let placed = self.programs[index].plan.ops.iter().zip(us).enumerate();
        placed.map(|(at, (op, us))| OpTime { index: at, op: op.op.name(), layer: op.layer, us: *us }).collect()
    }
}
