//! How a rank's GPU exchanges with the others: one of three transports behind one type.
//!
//! Made in the phase `connect` of `prepare`, used by programs, asked for failures while steps run, closed before memory is given back.
//! **Invariants:** a transport moves bytes; the sum is the next op's, the same tree on every rank (peer to peer it is evaluated on the way, by the same
//! code); memory is taken once; whoever
//! waits for another rank, on the GPU or here, waits for a bounded time and says for whom.

mod host;
mod nccl;
mod peer;

use super::error::{CudaError, During};
use super::gpu::Gpu;
use super::ledger::Ledger;
use super::options::{CudaOptions, ExchangeReport, LibraryReport, Transport};
use crate::meeting::Meeting;
use host::HostLink;
use nccl::NcclLink;
use peer::PeerLink;
use slotgraph_kernels::BufferId;
use slotgraph_kernels::ops::Exchange;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the ranks of a device that closes in order wait for each other before they give their memory back.
const PART_LIMIT: Duration = Duration::from_secs(2);
/// How long a rank that failed waits for its GPU to come to rest.
const REST_LIMIT: Duration = Duration::from_secs(5);

/// Sizes of an exchange.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExchangeShape {
    pub rank: usize,
    pub ranks: usize,
    pub rows_max: usize,
    /// Floats of one row.
    pub hidden: usize,
}

enum Wire {
    Host(HostLink),
    Peer(PeerLink),
    Nccl(NcclLink),
}

pub(super) struct Exchanger {
    wire: Wire,
    shape: ExchangeShape,
    /// Device addresses of the buffers that exchanges name, once they have some.
    addresses: HashMap<BufferId, u64>,
    meeting: Arc<Meeting>,
    /// Longest wait for another rank in a step.
    limit: Duration,
    closed: bool,
    /// Exchanges that were run one by one, rather than by a kernel of ours or a replay.
    pub count: u64,
    gpu: Arc<Gpu>,
}

impl Exchanger {
    /// Meets the other ranks; None for a single one.
    pub fn connect(
        gpu: &Arc<Gpu>,
        options: &CudaOptions,
        shape: ExchangeShape,
        ledger: &mut Ledger,
        libraries: &mut Vec<LibraryReport>,
    ) -> Result<Option<Exchanger>, CudaError> {
        let limit = options.exchange_limit;
        let Some(meeting) = options.transport.meeting().cloned() else { return Ok(None) };
        let wire = match &options.transport {
            Transport::Single => unreachable!("a single rank has no meeting"),
            Transport::HostStaged(_, all) => Wire::Host(HostLink::new(gpu, all.clone(), shape)?),
            Transport::P2p(meeting) => Wire::Peer(PeerLink::connect(gpu, meeting, shape, limit, ledger)?),
            Transport::Nccl(meeting) => {
                let (link, library) = NcclLink::connect(gpu, meeting, shape, &options.lib_dirs)?;
                libraries.push(library);
                Wire::Nccl(link)
            }
        };
        let (addresses, gpu) = (HashMap::new(), gpu.clone());
        Ok(Some(Exchanger { wire, shape, addresses, meeting, limit, closed: false, count: 0, gpu }))
    }

    /// Learns where the buffers of the plans' exchanges lie.
    pub fn place(&mut self, addresses: HashMap<BufferId, u64>) {
        self.addresses = addresses;
    }

    pub fn report(&self) -> ExchangeReport {
        match &self.wire {
            Wire::Host(link) => ExchangeReport { scratch_bytes: link.bytes(), ..ExchangeReport::of("host-staged") },
            Wire::Peer(link) => link.report(),
            Wire::Nccl(link) => link.report(),
        }
    }

    /// Scratch of rank `rank` as this GPU sees it, if exchanges are kernels of ours.
    pub fn scratch_of(&self, rank: usize) -> Option<u64> {
        match &self.wire {
            Wire::Peer(link) => link.scratch_of(rank),
            Wire::Host(_) | Wire::Nccl(_) => None,
        }
    }

    pub fn status_address(&self) -> Option<u64> {
        match &self.wire {
            Wire::Peer(link) => Some(link.status_address()),
            Wire::Host(_) | Wire::Nccl(_) => None,
        }
    }

    /// Whether an exchange may stand on programmatic edges. Where ranks share a GPU it may not: a successor's blocks, started early, would
    /// keep the other rank's from their places.
    pub fn takes_edges(&self) -> bool {
        matches!(&self.wire, Wire::Peer(link) if !link.shares_a_gpu())
    }

    /// Runs one exchange of `rows` rows. Host-staged it waits for the stream and for the other ranks.
    pub fn run(&mut self, exchange: &Exchange, rows: usize) -> Result<(), CudaError> {
        let (partial, gathered) = (self.addresses[&exchange.partial], self.addresses[&exchange.gathered]);
        let words = rows * self.shape.hidden;
        assert!(rows <= self.shape.rows_max, "buffers and scratch hold the largest bucket");
        match &mut self.wire {
            Wire::Host(link) => link.run(partial, gathered, words)?,
            Wire::Nccl(link) => link.run(partial, gathered, words)?,
            Wire::Peer(_) => unreachable!("the peer-to-peer exchange is a launch like any other"),
        }
        self.count += 1;
        Ok(())
    }

    /// Waits until every rank is at `place`. Nothing that may wait for a whole device (an allocation, a first load, an instantiation) may
    /// happen while a kernel there waits for this rank, so phases that run exchanges begin with this.
    pub fn barrier(&self, place: &'static str) -> Result<(), CudaError> {
        self.meeting.meet(self.shape.rank, place, Vec::new())?;
        Ok(())
    }

    /// The smallest of what every rank offers.
    pub fn least(&self, place: &'static str, offer: usize) -> Result<usize, CudaError> {
        let offers = self.meeting.meet(self.shape.rank, place, vec![offer as u64])?;
        Ok(offers.iter().map(|words| words[0] as usize).min().unwrap_or(offer))
    }

    /// Notes for the other ranks that `step` was enqueued here.
    pub fn enqueued(&self, step: u64) {
        self.meeting.enqueued(self.shape.rank, step);
    }

    /// What a kernel of ours has said, if it gave up waiting. Cheap: asked after every step.
    pub fn failure(&self) -> Result<(), CudaError> {
        match &self.wire {
            Wire::Peer(link) => link.failure(),
            Wire::Host(_) | Wire::Nccl(_) => Ok(()),
        }
    }

    /// That no rank has left, and no transport failed; asked now and then while a step runs.
    pub fn check(&self) -> Result<(), CudaError> {
        self.failure()?;
        if let Wire::Nccl(link) = &self.wire {
            link.check()?;
        }
        Ok(self.meeting.check()?)
    }

    /// `check`, for a step that has run for `elapsed`.
    pub fn check_step(&self, step: u64, elapsed: Duration) -> Result<(), CudaError> {
        self.check()?;
        // A kernel of ours says by itself for whom it waited, and knows better.
        let grace = if matches!(self.wire, Wire::Peer(_)) { self.limit } else { Duration::ZERO };
        if elapsed <= self.limit + grace {
            return Ok(());
        }
        let whom = match self.meeting.behind(step) {
            Some((rank, newest)) => format!("rank {rank} has enqueued no step after {newest}"),
            None => "every rank has enqueued it".into(),
        };
        let (rank, limit) = (self.shape.rank, self.limit);
        Err(CudaError::Exchange(format!("rank {rank} did not finish step {step} in {limit:?}: {whom}")))
    }

    /// Waits until the stream is empty; unlike the driver's own wait it ends when another rank is lost.
    pub fn wait(&self, doing: impl Fn() -> String) -> Result<(), CudaError> {
        let began = Instant::now();
        let mut looks = 0u32;
        while !self.gpu.is_idle().during(&doing)? {
            looks += 1;
            if looks.is_multiple_of(64) {
                self.check()?;
                if began.elapsed() > 2 * self.limit {
                    let (rank, limit) = (self.shape.rank, 2 * self.limit);
                    return Err(CudaError::Exchange(format!("rank {rank} waited longer than {limit:?}: {}", doing())));
                }
            }
            std::thread::yield_now();
        }
        self.failure()
    }

    /// This rank runs nothing more. With a reason it failed: the others hear of it, and whatever still waits on this GPU is told to stop.
    /// The graphs are still there; `finish` comes after they are gone.
    pub fn close(&mut self, failed: Option<&str>) {
        if std::mem::replace(&mut self.closed, true) {
            return;
        }
        if let Some(reason) = failed {
            self.leave(reason);
            match &mut self.wire {
                Wire::Host(_) => {}
                Wire::Peer(link) => link.stop(),
                Wire::Nccl(link) => link.begin_abort(),
            }
            let began = Instant::now();
            while self.gpu.is_idle() == Ok(false) && began.elapsed() < REST_LIMIT {
                std::thread::sleep(Duration::from_millis(1));
            }
        } else {
            // A failure shows in the next call; nobody is left to tell of this one.
            let _ = self.gpu.wait();
        }
        self.meeting.part(self.shape.rank, PART_LIMIT);
        // For a rank that still runs, which an orderly end has none of.
        self.leave("its device was dropped");
    }

    fn leave(&self, reason: &str) {
        self.meeting.leave(self.shape.rank, reason);
        if let Wire::Host(link) = &self.wire {
            link.leave(reason);
        }
    }
}

impl Drop for Exchanger {
    /// After `close` this only takes the parts down; without it (a start that failed) the others hear that this rank is gone.
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            self.close(Some("its start failed"));
        }
    }
}
