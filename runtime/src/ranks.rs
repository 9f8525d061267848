//! Ranks: one thread per device, and all of them together as one `Device`.
//!
//! Driven by the engine loop. Each rank thread makes, uses and drops its device; the engine sends every rank the same step and takes the
//! output of rank 0. **Invariant:** every rank enqueues the same sequence of steps; outputs whose checksums differ between ranks stop the
//! engine; a rank that fails says which it is and what it was doing, and the first failure is the one reported.

mod startup;
#[cfg(test)]
mod tests;

pub use startup::{Factory, PrepareError, Prepared, RankStart, Startup};

use crate::engine::StartError;
use slotgraph_graphs::device::{Device, DeviceError, DeviceFacts};
use slotgraph_graphs::step::{StepInput, StepOutput};
use startup::Rendezvous;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A step on its way to a rank and, filled in, back.
#[derive(Default)]
struct Order {
    input: StepInput,
    output: StepOutput,
}

enum Reply {
    Ready(Box<RankStart>),
    Settled { rank: usize, order: Order },
    Failed(StartError),
}

/// N rank threads as one device.
pub struct Ranks {
    inboxes: Vec<SyncSender<Order>>,
    replies: Receiver<Reply>,
    threads: Vec<JoinHandle<()>>,
    /// Orders that no rank has, kept for their capacity.
    spare: Vec<Order>,
    /// Rank 0's outputs that were not handed out, oldest first.
    settled: VecDeque<Order>,
    /// Per rank: step and checksum of outputs that were not compared yet.
    sums: Vec<VecDeque<(u64, u32)>>,
    /// Newest step that all ranks agreed on.
    agreed: u64,
    enqueued: u64,
    /// Enqueued and not handed out.
    in_flight: usize,
    launch_ahead: u64,
    timeout: Duration,
    facts: DeviceFacts,
}

impl Ranks {
    /// Starts a thread for each factory; returns once every rank is ready. `init` bounds the start, `timeout` a step.
    pub fn start(
        factories: Vec<Factory>,
        init: Duration,
        timeout: Duration,
    ) -> Result<(Ranks, Vec<RankStart>), StartError> {
        let ranks = factories.len();
        let rendezvous = Rendezvous::new(ranks, Instant::now() + init);
        let (reply, replies) = channel();
        let mut inboxes = Vec::new();
        let mut threads = Vec::new();
        for (rank, factory) in factories.into_iter().enumerate() {
            // As many orders as the ring has entries, and one on its way.
            let (inbox, orders) = sync_channel(4);
            let startup = Startup::new(rank, rendezvous.clone());
            let reply = reply.clone();
            let body = move || rank_thread(factory, startup, orders, reply);
            let thread = std::thread::Builder::new().name(format!("rank-{rank}")).spawn(body);
            inboxes.push(inbox);
            threads.push(thread.map_err(|error| StartError::failed(rank, "spawn", error.to_string()))?);
        }
        let starts = await_ready(&replies, &rendezvous, ranks, init)?;
        let facts = starts[0].record.device.clone();
        let ranks = Ranks {
            inboxes,
            replies,
            threads,
            spare: Vec::new(),
            settled: VecDeque::new(),
            sums: (0..ranks).map(|_| VecDeque::new()).collect(),
            agreed: 0,
            enqueued: 0,
            in_flight: 0,
            launch_ahead: starts[0].limits.launch_ahead as u64,
            timeout,
            facts,
        };
        Ok((ranks, starts))
    }

    fn take(&mut self, reply: Reply) -> Result<(), DeviceError> {
        match reply {
            Reply::Ready(_) => unreachable!("every rank was ready before the first step"),
            Reply::Failed(failure) => return Err(DeviceError::Lost(failure.to_string())),
            Reply::Settled { rank, order } => {
                self.sums[rank].push_back((order.output.step, order.output.checksum));
                if rank == 0 { self.settled.push_back(order) } else { self.spare.push(order) }
            }
        }
        while self.sums.iter().all(|sums| !sums.is_empty()) {
            let fronts = self.sums.iter_mut().map(|sums| sums.pop_front().expect("not empty"));
            let fronts: Vec<(u64, u32)> = fronts.collect();
            if let Some(rank) = fronts.iter().position(|front| *front != fronts[0]) {
                let ((step, sum), (_, first)) = (fronts[rank], fronts[0]);
                return Err(DeviceError::Lost(format!(
                    "rank {rank} disagrees with rank 0 on step {step}: output checksum {sum:#010x}, not {first:#010x}"
                )));
            }
            self.agreed = fronts[0].0;
        }
        Ok(())
    }

    /// Hands out rank 0's oldest output; a debug build first waits until every rank agrees.
    fn hand_out(&mut self, output: &mut StepOutput) -> bool {
        let agreed = self.agreed;
        let due = |order: &Order| !cfg!(debug_assertions) || order.output.step <= agreed;
        if !self.settled.front().is_some_and(due) {
            return false;
        }
        let mut order = self.settled.pop_front().expect("it has a front");
        std::mem::swap(output, &mut order.output);
        self.spare.push(order);
        self.in_flight -= 1;
        true
    }

    /// Takes one reply, which settles `step` on some rank or says why not.
    fn hear(&mut self, step: u64, deadline: Instant) -> Result<(), DeviceError> {
        match self.replies.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(reply) => self.take(reply),
            Err(RecvTimeoutError::Disconnected) => Err(DeviceError::Lost("every rank has left".into())),
            Err(RecvTimeoutError::Timeout) => {
                let owes = |sums: &VecDeque<(u64, u32)>| sums.front().is_none_or(|&(first, _)| first > step);
                let missing: Vec<usize> = (0..self.sums.len()).filter(|&rank| owes(&self.sums[rank])).collect();
                let limit = self.timeout;
                Err(DeviceError::Lost(format!("ranks {missing:?} did not finish step {step} in {limit:?}")))
            }
        }
    }
}

impl Device for Ranks {
    /// Waits for the slowest rank's ring to have room, which rank 0's alone does not show.
    fn enqueue(&mut self, input: &StepInput) -> Result<(), DeviceError> {
        let deadline = Instant::now() + self.timeout;
        while self.enqueued - self.agreed > self.launch_ahead {
            self.hear(self.agreed + 1, deadline)?;
        }
        for inbox in &self.inboxes {
            let mut order = self.spare.pop().unwrap_or_default();
            order.input.clone_from(input);
            if inbox.send(order).is_err() {
                // The rank said why before it left.
                while let Ok(reply) = self.replies.try_recv() {
                    self.take(reply)?;
                }
                return Err(DeviceError::Lost(format!("a rank left before step {}", input.step)));
            }
        }
        self.enqueued = input.step;
        self.in_flight += 1;
        Ok(())
    }

    fn poll(&mut self, output: &mut StepOutput) -> Result<bool, DeviceError> {
        while let Ok(reply) = self.replies.try_recv() {
            self.take(reply)?;
        }
        Ok(self.hand_out(output))
    }

    fn wait(&mut self, output: &mut StepOutput) -> Result<bool, DeviceError> {
        if self.in_flight == 0 {
            return Ok(false);
        }
        let deadline = Instant::now() + self.timeout;
        let oldest = self.enqueued + 1 - self.in_flight as u64;
        while !self.poll(output)? {
            self.hear(oldest, deadline)?;
        }
        Ok(true)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
    fn facts(&self) -> DeviceFacts {
        self.facts.clone()
    }
}

/// How long a rank may take to drop its device before it is left behind.
const LEAVE: Duration = Duration::from_secs(5);

impl Drop for Ranks {
    fn drop(&mut self) {
        self.inboxes.clear();
        let deadline = Instant::now() + LEAVE;
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                // A rank's panic was caught at its edge and reported.
                let _ = thread.join();
            }
        }
    }
}

fn await_ready(
    replies: &Receiver<Reply>,
    rendezvous: &Arc<Rendezvous>,
    ranks: usize,
    init: Duration,
) -> Result<Vec<RankStart>, StartError> {
    let mut ready: Vec<RankStart> = Vec::new();
    while ready.len() < ranks {
        match replies.recv_timeout(rendezvous.time_left()) {
            Ok(Reply::Ready(start)) => ready.push(*start),
            Ok(Reply::Failed(failure)) => return Err(failure),
            Ok(Reply::Settled { .. }) => unreachable!("no step was sent"),
            Err(_) => return Err(StartError::Timeout { limit: init, waiting: rendezvous.describe() }),
        }
    }
    ready.sort_by_key(|start| start.record.rank);
    let limits = &ready[0].limits;
    if let Some(start) = ready.iter().find(|start| start.limits != *limits) {
        let reason = format!("prepared other limits than rank 0: {:?}, not {limits:?}", start.limits);
        return Err(StartError::failed(start.record.rank, "ready", reason));
    }
    Ok(ready)
}

fn rank_thread(factory: Factory, startup: Startup, orders: Receiver<Order>, reply: Sender<Reply>) {
    let rank = startup.rank;
    let (mut device, start) = match startup.prepare(factory) {
        Ok(prepared) => prepared,
        Err(failure) => {
            let _ = reply.send(Reply::Failed(failure));
            return;
        }
    };
    if reply.send(Reply::Ready(Box::new(start))).is_err() {
        return;
    }
    let served = catch_unwind(AssertUnwindSafe(|| serve(rank, &mut *device, &orders, &reply)));
    let reason = match served {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error.to_string(),
        Err(panic) => crate::engine::panic_text(&*panic),
    };
    // Said before the device is dropped, so that this failure comes before those of the peers that miss it.
    let _ = reply.send(Reply::Failed(StartError::failed(rank, "step", reason)));
}

/// Runs steps until the engine is gone.
fn serve(
    rank: usize,
    device: &mut dyn Device,
    inbox: &Receiver<Order>,
    reply: &Sender<Reply>,
) -> Result<(), DeviceError> {
    let mut orders: VecDeque<Order> = VecDeque::new();
    let mut polls = 0u32;
    loop {
        let next =
            if orders.is_empty() { inbox.recv().map_err(|_| TryRecvError::Disconnected) } else { inbox.try_recv() };
        match next {
            Ok(order) => {
                device.enqueue(&order.input)?;
                orders.push_back(order);
                continue;
            }
            Err(TryRecvError::Disconnected) => return Ok(()),
            Err(TryRecvError::Empty) => {}
        }
        let oldest = orders.front_mut().expect("with none in flight the inbox blocks");
        if device.poll(&mut oldest.output)? {
            polls = 0;
            let order = orders.pop_front().expect("it has a front");
            if reply.send(Reply::Settled { rank, order }).is_err() {
                return Ok(());
            }
        } else {
            polls += 1;
            if polls.is_multiple_of(256) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}
