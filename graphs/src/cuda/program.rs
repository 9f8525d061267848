//! A plan as resolved calls: what one step of a bucket does on the GPU, eagerly or inside a capture.
//!
//! Made by `prepare`, run by `CudaDevice`, stepped op by op by the probes. **Invariant:** a program is the plan's ops in order,
//! nothing added and nothing left out; eager and capture issue the very same calls.

use super::arena::StepAddresses;
use super::error::{CudaError, During};
use super::exchange::Exchanger;
use super::gpu::Gpu;
use super::launch::Call;
use super::modules::Modules;
use crate::plan::{PlacedOp, Plan};
use slotgraph_kernels::Op;
use slotgraph_kernels::launch::{GpuFacts, Launch, shared_first};

/// A plan's ops with their launches, addresses still open.
pub(super) struct Planned {
    pub plan: Plan,
    /// By op.
    pub work: Vec<Work<Launch>>,
}

/// What an op is on the GPU.
pub(super) enum Work<T> {
    Launches(Vec<T>),
    /// Moves bytes between ranks by other means than a kernel of ours.
    Exchange(slotgraph_kernels::ops::Exchange),
}

impl Planned {
    /// `over_peers`: an exchange is our own kernel over peer memory, which combines on the way.
    pub fn new(plan: Plan, facts: &GpuFacts, over_peers: bool) -> Result<Planned, CudaError> {
        let bucket = plan.rows;
        let work = |(placed, next): (&PlacedOp, Option<&Op>)| match &placed.op {
            op if over_peers => op.launches_over_peers(next, &plan, facts).map(Work::Launches),
            Op::Exchange(exchange) => Ok(Work::Exchange(exchange.clone())),
            op => op.launches(next, &plan, facts).map(Work::Launches),
        };
        let work = plan.ops_with_next().map(work).collect::<Result<Vec<_>, _>>();
        let mut work = work.map_err(|source| CudaError::Launch { bucket, source })?;
        if shared_first(bucket, plan.ops.iter().map(|placed| &placed.op)) {
            for work in &mut work {
                if let Work::Launches(launches) = work {
                    launches.iter_mut().for_each(Launch::put_shared_first);
                }
            }
        }
        Ok(Planned { plan, work })
    }

    pub fn launches(&self) -> impl Iterator<Item = &Launch> {
        self.work.iter().flat_map(|work| match work {
            Work::Launches(launches) => launches.as_slice(),
            Work::Exchange(_) => &[],
        })
    }
}

/// One thing that a program puts on the stream.
pub(super) enum Issue<'a> {
    Call(&'a Call),
    /// A collective of a library, which makes of it what nodes it will.
    Collective,
}

/// A plan ready to run.
pub(super) struct Program {
    pub bucket: usize,
    pub plan: Plan,
    /// By op.
    work: Vec<Work<Call>>,
}

impl Program {
    /// Fills in the addresses (a diverted buffer keeps its own for `fetch`, which writes it). No programmatic edge leads into the first launch
    /// of a step, out of a launch that wants none, nor into or out of an exchange but one of ours between GPUs of their own.
    pub fn resolve(
        planned: &Planned,
        modules: &Modules,
        addresses: &StepAddresses<'_>,
        facts: &GpuFacts,
    ) -> Result<Program, CudaError> {
        let bucket = planned.plan.rows;
        let edges_of_exchange = addresses.exchange.is_some_and(Exchanger::takes_edges);
        let mut after_kernel = false;
        let mut resolved = Vec::with_capacity(planned.work.len());
        for (placed, work) in planned.plan.ops.iter().zip(&planned.work) {
            let undiverted = StepAddresses { diverted: None, ..*addresses };
            let addresses = if matches!(placed.op, Op::Fetch(_)) { &undiverted } else { addresses };
            resolved.push(match work {
                Work::Exchange(exchange) => {
                    after_kernel = false;
                    Work::Exchange(exchange.clone())
                }
                Work::Launches(launches) => {
                    let alone = matches!(placed.op, Op::Exchange(_)) && !edges_of_exchange;
                    let mut calls = Vec::with_capacity(launches.len());
                    for launch in launches {
                        let programmatic = facts.pdl && after_kernel && !alone;
                        let call = Call::resolve(launch, modules, addresses, programmatic)
                            .map_err(|reason| CudaError::Graph { bucket, reason })?;
                        calls.push(call);
                        after_kernel = launch.edge_out && !alone;
                    }
                    Work::Launches(calls)
                }
            });
        }
        Ok(Program { bucket, plan: planned.plan.clone(), work: resolved })
    }

    pub fn ops(&self) -> usize {
        self.work.len()
    }

    /// Every call in order.
    pub fn calls(&self) -> impl Iterator<Item = &Call> {
        self.calls_by_op().map(|(_, call)| call)
    }

    /// Every call in order, with the index of its op.
    pub fn calls_by_op(&self) -> impl Iterator<Item = (usize, &Call)> {
        self.issues().filter_map(|(op, issue)| match issue {
            Issue::Call(call) => Some((op, call)),
            Issue::Collective => None,
        })
    }

    /// Everything in order, with the index of its op.
    pub fn issues(&self) -> impl Iterator<Item = (usize, Issue<'_>)> {
        self.work.iter().enumerate().flat_map(|(op, work)| {
            let (calls, collective) = match work {
                Work::Launches(calls) => (calls.as_slice(), None),
                Work::Exchange(_) => (&[][..], Some(Issue::Collective)),
            };
            calls.iter().map(Issue::Call).chain(collective).map(move |issue| (op, issue))
        })
    }

    /// Issues all calls, as into a capture.
    pub fn launch(&self, gpu: &Gpu, mut exchange: Option<&mut Exchanger>) -> Result<(), CudaError> {
        for op in 0..self.ops() {
            self.launch_op(gpu, op, exchange.as_deref_mut())?;
        }
        Ok(())
    }

    /// Issues the calls of one op.
    pub fn launch_op(&self, gpu: &Gpu, op: usize, exchange: Option<&mut Exchanger>) -> Result<(), CudaError> {
        match (&self.work[op], exchange) {
            (Work::Launches(calls), _) => {
                for call in calls {
                    // SAFETY: the addresses are the arena's and the weights', which outlive programs and graphs
                    // (`CudaDevice` drops in that order) and hold the largest extents of every plan; the kernel's header
                    // and the op's shape check agree on what it touches.
                    unsafe { call.launch(gpu) }.during(|| self.describe(op))?;
                }
                Ok(())
            }
            (Work::Exchange(wanted), Some(exchange)) => exchange.run(wanted, self.bucket),
            (Work::Exchange(_), None) => Err(CudaError::Unsupported(format!(
                "{} needs a transport, and this device has none",
                self.describe(op)
            ))),
        }
    }

    /// Issues the calls of one op, each of which waits for everything before it.
    pub fn launch_op_alone(&self, gpu: &Gpu, op: usize, exchange: Option<&mut Exchanger>) -> Result<(), CudaError> {
        let Work::Launches(calls) = &self.work[op] else { return self.launch_op(gpu, op, exchange) };
        for call in calls {
            // SAFETY: as in `launch_op`.
            unsafe { call.launch_alone(gpu) }.during(|| self.describe(op))?;
        }
        Ok(())
    }

    /// "op 12 (moe_up of layer 3, bucket 8)".
    pub fn describe(&self, op: usize) -> String {
        let placed = &self.plan.ops[op];
        let layer = placed.layer.map(|layer| format!(" of layer {layer}")).unwrap_or_default();
        format!("op {op} ({}{layer}, bucket {})", placed.op.name(), self.bucket)
    }
}
