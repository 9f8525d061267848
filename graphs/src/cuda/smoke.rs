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
    /// Nodes of the graph, collectives that it was made from, and the library's kernels among the nodes.
    pub nodes: usize,
    pub collectives: usize,
    pub library_kernels: usize,
    pub exact: bool,
    /// The first word that was not as sent.
    pub wrong: Option<WrongWord>,
}

impl SmokeShape {
    /// What is wrong, if something is.
    pub fn fault(&self) -> Option<String> {
        let bytes = self.bytes_per_rank;
        if let Some(WrongWord { mode, rank, at, got, wanted }) = self.wrong {
            return Some(format!(
                "{bytes} bytes, {mode}: word {at} of rank {rank} is {got:#010x}, sent was {wanted:#010x}"
            ));
        }
        let (nodes, kernels, collectives) = (self.nodes, self.library_kernels, self.collectives);
        (kernels < collectives).then(|| {
            format!("{bytes} bytes: the graph has {nodes} nodes with {kernels} kernels of NCCL for {collectives} collectives")
        })
    }
}

/// A word that arrived as another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct WrongWord {
    /// "eager" or "graph".
    pub mode: &'static str,
    /// The rank that sent it, and its index in what that rank sent.
    pub rank: usize,
    pub at: usize,
    pub got: u32,
    pub wanted: u32,
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
        let mut wrong = self.arrived("eager", rows)?;
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
        wrong = wrong.or(self.arrived("graph", rows)?);
        let began = Instant::now();
        replay()?;
        self.exchange.wait(|| "a replay of collectives".into())?;
        let graph_us = began.elapsed().as_secs_f64() * 1e6 / COLLECTIVES as f64;
        let nodes = &graph.walk.nodes;
        let library_kernels = nodes.iter().filter(|node| super::graph::is_foreign(&node.function)).count();
        let (nodes, collectives, exact) = (nodes.len(), COLLECTIVES, wrong.is_none());
        Ok(SmokeShape {
            bytes_per_rank: 4 * words,
            eager_us,
            graph_us,
            nodes,
            collectives,
            library_kernels,
            exact,
            wrong,
        })
    }

    /// The first word of any rank that is not there; then all are wiped.
    fn arrived(&mut self, mode: &'static str, rows: usize) -> Result<Option<WrongWord>, CudaError> {
        let words = rows * HIDDEN;
        let mut out = vec![0u32; words * self.ranks];
        // SAFETY: `gathered` holds the largest shape of every rank; the vector outlives the wait.
        unsafe { self.gpu.copy_out(out.as_mut_ptr().cast(), self.gathered.address, 4 * out.len()) }
            .and_then(|()| self.gpu.wait())
            .during(|| "reading the gathered words".into())?;
        let wrong = first_wrong(mode, rows, &out);
        // Nobody writes again before everybody has looked.
        self.exchange.barrier("the barrier after a look at gathered words")?;
        // SAFETY: the range is the allocation, whole words.
        unsafe { self.gpu.fill(self.gathered.address, u32::MAX, out.len()) }
            .and_then(|()| self.gpu.wait())
            .during(|| "wiping the gathered words".into())?;
        self.exchange.barrier("the barrier after a wipe of gathered words")?;
        Ok(wrong)
    }
}

/// The first of the gathered words that is not what its rank sent.
fn first_wrong(mode: &'static str, rows: usize, gathered: &[u32]) -> Option<WrongWord> {
    let words = rows * HIDDEN;
    gathered.iter().enumerate().find_map(|(place, &got)| {
        let (rank, at) = (place / words, place % words);
        let wanted = word(rank, rows, at);
        (got != wanted).then_some(WrongWord { mode, rank, at, got, wanted })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_wrong_word_is_named() {
        let mut gathered: Vec<u32> = (0..2).flat_map(|rank| (0..HIDDEN).map(move |at| word(rank, 1, at))).collect();
        assert_eq!(first_wrong("eager", 1, &gathered), None);
        gathered[HIDDEN + 7] = 5;
        let wrong = first_wrong("graph", 1, &gathered);
        assert_eq!(wrong.map(|wrong| (wrong.mode, wrong.rank, wrong.at, wrong.got)), Some(("graph", 1, 7, 5)));
        let shape = |wrong: Option<WrongWord>, library_kernels| SmokeShape {
            bytes_per_rank: 8192,
            eager_us: 1.0,
            graph_us: 1.0,
            nodes: 50,
            collectives: 50,
            library_kernels,
            exact: wrong.is_none(),
            wrong,
        };
        let said = shape(wrong, 50).fault().unwrap();
        assert!(said.starts_with("8192 bytes, graph: word 7 of rank 1 is 0x00000005, sent was 0x"), "{said}");
        assert_eq!(shape(None, 50).fault(), None);
        assert!(shape(None, 0).fault().unwrap().contains("0 kernels of NCCL for 50 collectives"));
    }
}
