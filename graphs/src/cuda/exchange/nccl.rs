//! The NCCL transport: one fp32 all-gather an exchange, eager or inside a capture, straight from the plan's buffer into the plan's buffer.
//!
//! NCCL moves shapes of any length in pieces of its own, so no scratch of ours is between.

use super::ExchangeShape;
use crate::cuda::error::CudaError;
use crate::cuda::gpu::Gpu;
use crate::cuda::nccl::{Communicator, Nccl, version_text};
use crate::cuda::options::{ExchangeReport, LibraryReport, PeerReport};
use crate::meeting::Meeting;
use std::path::PathBuf;
use std::sync::Arc;

pub(super) struct NcclLink {
    communicator: Communicator,
    /// Ordinal of each rank's device.
    ordinals: Vec<usize>,
    rank: usize,
    gpu: Arc<Gpu>,
}

impl NcclLink {
    /// Opens the library, hears rank 0's identifier and joins.
    pub fn connect(
        gpu: &Arc<Gpu>,
        meeting: &Meeting,
        shape: ExchangeShape,
        lib_dirs: &[PathBuf],
    ) -> Result<(NcclLink, LibraryReport), CudaError> {
        let (major, minor) = gpu.capability;
        let capability = u32::try_from(10 * major + minor).unwrap_or(0);
        let nccl = Nccl::load(lib_dirs, capability)?;
        let mut card = vec![gpu.identity.ordinal as u64];
        if shape.rank == 0 {
            card.extend(nccl.unique_id()?);
        }
        let cards = meeting.meet(shape.rank, "the exchange of NCCL's identifier", card)?;
        let ordinals: Vec<usize> = cards.iter().map(|card| card[0] as usize).collect();
        if let Some(rank) = (1..ordinals.len()).find(|&rank| ordinals[..rank].contains(&ordinals[rank])) {
            return Err(CudaError::Unsupported(format!(
                "--transport nccl: NCCL needs a GPU for each rank, and rank {rank} shares GPU {}; use p2p or host-staged",
                ordinals[rank]
            )));
        }
        let communicator = nccl.join(&cards[0][1..], shape.rank, shape.ranks)?;
        let library = LibraryReport {
            name: "libnccl",
            version: version_text(nccl.version),
            path: nccl.path.clone(),
            why: nccl.why.clone(),
        };
        Ok((NcclLink { communicator, ordinals, rank: shape.rank, gpu: gpu.clone() }, library))
    }

    pub fn run(&mut self, partial: u64, gathered: u64, words: usize) -> Result<(), CudaError> {
        // SAFETY: the addresses are the plan's buffers, which hold `words` floats (times ranks) and outlive the graphs and this link.
        unsafe { self.communicator.all_gather(partial, gathered, words, self.gpu.raw_stream().cast()) }
    }

    pub fn check(&self) -> Result<(), CudaError> {
        self.communicator.check()
    }

    pub fn begin_abort(&mut self) {
        self.communicator.begin_abort();
    }

    pub fn report(&self) -> ExchangeReport {
        let others = self.ordinals.iter().enumerate().filter(|(rank, _)| *rank != self.rank);
        // What NCCL chose between two GPUs it tells only to its own log (NCCL_DEBUG=INFO).
        let peers = others.map(|(rank, ordinal)| PeerReport { rank, ordinal: *ordinal, way: "nccl" }).collect();
        ExchangeReport { peers, ..ExchangeReport::of("nccl") }
    }
}
