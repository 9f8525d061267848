//! The collective alone: does an all-gather between these GPUs give the right bytes, eager and inside a graph, with nothing of a model?
//!
//! Asked by graph-readiness before, or instead of, the whole. **Invariant:** every word of every rank's result is compared with what was sent.

use super::error::{CudaError, During};
use super::exchange::{ExchangeShape, Exchanger};
use super::gpu::Gpu;
use super::graph::Graph;
use super::ledger::Ledger;
use super::libs::Libraries;
use super::memory::DeviceMemory;
use super::options::{CudaOptions, LibraryReport, Transport};
use slotgraph_kernels::BufferId;
use slotgraph_kernels::ops::Exchange;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// Collectives of one graph.
const COLLECTIVES: usize = 50;
/// Floats of a row.
const HIDDEN: usize = 2048;

/// What one shape took and gave.
#[derive(Clone, Debug, serde::Serialize)]
pub struct SmokeShape {
    pub bytes_per_rank: usize,
    /// Of one collective, on the host's clock, over a row of them.
    pub eager_us: f64,
    pub graph_us: f64,
    /// Nodes of the graph, and kernels of the library among them.
    pub nodes: usize,
    pub collectives: usize,
    pub exact: bool,
}

#[derive(Clone, Debug, serde::Serialize)]
pub struct SmokeReport {
    pub rank: usize,
    pub libraries: Vec<LibraryReport>,
    pub shapes: Vec<SmokeShape>,
}

/// Runs one rank's part on this thread; every rank of the transport does so. For NCCL, whose collective needs no kernel of ours.
pub fn smoke(options: &CudaOptions) -> Result<SmokeReport, CudaError> {
    if !matches!(options.transport, Transport::Nccl(_)) {
        return Err(CudaError::Unsupported("only NCCL has a collective of its own to try".into()));
    }
    Libraries::load(&options.lib_dirs)?;
    let gpu = Gpu::open(options.ordinal)?;
    let (rank, ranks) = (options.rank.rank, options.rank.ranks);
    let shape = ExchangeShape { rank, ranks, rows_max: 256, hidden: HIDDEN };
    let mut libraries = Vec::new();
    let mut exchange = Exchanger::connect(&gpu, options, shape, &mut Ledger::default(), &mut libraries)?
        .ok_or_else(|| CudaError::Unsupported("one rank has nobody to try a collective with".into()))?;
    let words = shape.rows_max * HIDDEN;
    let allocate =
        |words: usize| DeviceMemory::allocate(&gpu, 4 * words).during(|| "allocating for the collective".into());
    let (send, gathered) = (allocate(words)?, allocate(words * ranks)?);
    exchange.place(HashMap::from([(BufferId(0), send.address), (BufferId(1), gathered.address)]));
    exchange.barrier("the barrier before the collectives")?;
    let mut rig = Rig { gpu, exchange, send, gathered, rank, ranks };
    let shapes = [1, 8, 64, 256].map(|rows| rig.shape(rows)).into_iter().collect::<Result<_, _>>();
    let failed = shapes.as_ref().err().map(ToString::to_string);
    rig.exchange.close(failed.as_deref());
    Ok(SmokeReport { rank, libraries, shapes: shapes? })
}

struct Rig {
    exchange: Exchanger,
    send: DeviceMemory,
    gathered: DeviceMemory,
    rank: usize,
    ranks: usize,
    gpu: Arc<Gpu>,
}

/// A word that tells rank, shape and place.
fn word(rank: usize, rows: usize, at: usize) -> u32 {
    (at as u32).wrapping_mul(0x9e37_79b9) ^ (rank as u32 + 1).wrapping_mul(0x85eb_ca6b) ^ rows as u32
}

impl Rig {
    fn shape(&mut self, rows: usize) -> Result<SmokeShape, CudaError> {
        let (gpu, words) = (self.gpu.clone(), rows * HIDDEN);
        let op = Exchange { gathered: BufferId(1), partial: BufferId(0), rank: self.rank, ranks: self.ranks };
        let sent: Vec<u32> = (0..words).map(|at| word(self.rank, rows, at)).collect();
        // SAFETY: `send` holds the largest shape; the vector outlives the wait.
        unsafe { gpu.copy_in(self.send.address, sent.as_ptr().cast(), 4 * words) }
            .and_then(|()| gpu.wait())
            .during(|| "sending the collective's words".into())?;

        self.exchange.run(&op, rows)?;
        self.exchange.wait(|| "the first collective".into())?;
        let mut exact = self.arrived(rows)?;
        let began = Instant::now();
        for _ in 0..COLLECTIVES {
            self.exchange.run(&op, rows)?;
        }
        self.exchange.wait(|| "collectives in a row".into())?;
        let eager_us = began.elapsed().as_secs_f64() * 1e6 / COLLECTIVES as f64;

        self.exchange.barrier("the barrier before a capture of collectives")?;
        let exchange = &mut self.exchange;
        let mut graph = Graph::record(&gpu, rows, || (0..COLLECTIVES).try_for_each(|_| exchange.run(&op, rows)))?;
        graph.take_walk()?;
        graph.instantiate()?;
        self.exchange.barrier("the barrier before a replay of collectives")?;
        // SAFETY: both buffers outlive the graph, which is dropped before this returns.
        let replay = || unsafe { graph.launch() }.during(|| "replaying collectives".into());
        replay()?;
        self.exchange.wait(|| "a replay of collectives".into())?;
        exact &= self.arrived(rows)?;
        let began = Instant::now();
        replay()?;
        self.exchange.wait(|| "a replay of collectives".into())?;
        let graph_us = began.elapsed().as_secs_f64() * 1e6 / COLLECTIVES as f64;
        let nodes = &graph.walk.nodes;
        let collectives = nodes.iter().filter(|node| super::graph::is_foreign(&node.function)).count();
        Ok(SmokeShape { bytes_per_rank: 4 * words, eager_us, graph_us, nodes: nodes.len(), collectives, exact })
    }

    /// Whether every rank's words are there; then they are wiped.
    fn arrived(&mut self, rows: usize) -> Result<bool, CudaError> {
        let words = rows * HIDDEN;
        let mut out = vec![0u32; words * self.ranks];
        // SAFETY: `gathered` holds the largest shape of every rank; the vector outlives the wait.
        unsafe { self.gpu.copy_out(out.as_mut_ptr().cast(), self.gathered.address, 4 * out.len()) }
            .and_then(|()| self.gpu.wait())
            .during(|| "reading the gathered words".into())?;
        let right =
            |(rank, part): (usize, &[u32])| part.iter().enumerate().all(|(at, got)| *got == word(rank, rows, at));
        let exact = out.chunks_exact(words).enumerate().all(right);
        // Nobody writes again before everybody has looked.
        self.exchange.barrier("the barrier after a look at gathered words")?;
        // SAFETY: the range is the allocation, whole words.
        unsafe { self.gpu.fill(self.gathered.address, u32::MAX, out.len()) }
            .and_then(|()| self.gpu.wait())
            .during(|| "wiping the gathered words".into())?;
        self.exchange.barrier("the barrier after a wipe of gathered words")?;
        Ok(exact)
    }
}
