//! The peer-to-peer transport: our own kernel writes into the other ranks' memory (kernels/cuda/exchange.cu).
//!
//! Holds this rank's scratch and status page and knows the others' scratch. **Invariants:** the scratch is zeroed once, before any
//! address is told, and never again: its epochs only grow; all ranks launch the same exchanges in the same order.

use super::ExchangeShape;
use crate::cuda::error::{CudaError, During, check};
use crate::cuda::gpu::Gpu;
use crate::cuda::ledger::Ledger;
use crate::cuda::memory::{DeviceMemory, PinnedMemory};
use crate::cuda::options::{ExchangeReport, PeerReport};
use crate::meeting::Meeting;
use cudarc::driver::sys;
use slotgraph_kernels::ops::exchange::{Scratch, status};
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

pub(super) struct PeerLink {
    rank: usize,
    /// Every rank's scratch as this GPU sees it.
    scratch: Vec<u64>,
    /// Ordinal of each rank's device.
    ordinals: Vec<usize>,
    own: DeviceMemory,
    status: PinnedMemory,
}

impl PeerLink {
    /// Takes memory, tells the others where it is, and opens the way to theirs.
    pub fn connect(
        gpu: &Arc<Gpu>,
        meeting: &Meeting,
        shape: ExchangeShape,
        limit: Duration,
        ledger: &mut Ledger,
    ) -> Result<PeerLink, CudaError> {
        let layout = Scratch { ranks: shape.ranks, hidden: shape.hidden };
        let bytes = layout.bytes();
        let own = DeviceMemory::allocate(gpu, bytes).during(|| format!("allocating {bytes} bytes for the exchange"))?;
        ledger.register("exchange.scratch", own.address, own.bytes as u64);
        let mut status =
            PinnedMemory::allocate(gpu, status::WORDS).during(|| "allocating the exchange's status".into())?;
        ledger.register("exchange.status", status.address, status.bytes() as u64);
        status.slice_mut(0, status::WORDS)[status::LIMIT_MS] = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
        // SAFETY: the range is the allocation itself, whole words, aligned by the driver.
        unsafe { gpu.fill(own.address, 0, own.bytes / size_of::<u32>()) }
            .and_then(|()| gpu.wait())
            .during(|| "zeroing the exchange's scratch".into())?;

        let context = gpu.context.cu_ctx() as u64;
        let card = vec![context, gpu.identity.ordinal as u64, own.address];
        let cards = meeting.meet(shape.rank, "the exchange of addresses", card)?;
        let mut scratch = Vec::with_capacity(shape.ranks);
        let mut ordinals = Vec::with_capacity(shape.ranks);
        for (rank, card) in cards.iter().enumerate() {
            let (context, ordinal, address) = (card[0], card[1] as usize, card[2]);
            if ordinal != gpu.identity.ordinal && !ordinals.contains(&ordinal) {
                open_way(gpu, ordinal, context)?;
            }
            if rank != shape.rank {
                ledger.register(format!("exchange.scratch of rank {rank}"), address, own.bytes as u64);
            }
            scratch.push(address);
            ordinals.push(ordinal);
        }
        Ok(PeerLink { rank: shape.rank, scratch, ordinals, own, status })
    }

    pub fn scratch_of(&self, rank: usize) -> Option<u64> {
        self.scratch.get(rank).copied()
    }
    pub fn status_address(&self) -> u64 {
        self.status.address
    }

    /// Whether any two ranks do, this one or not: all ranks decide alike.
    pub fn shares_a_gpu(&self) -> bool {
        (1..self.ordinals.len()).any(|rank| self.ordinals[..rank].contains(&self.ordinals[rank]))
    }

    /// What the kernel wrote when it gave up waiting.
    pub fn failure(&self) -> Result<(), CudaError> {
        let word = |at: usize| self.status.load(at);
        let why = match word(status::CODE) {
            0 => return Ok(()),
            status::STOPPED => "was told to stop waiting".to_owned(),
            _ => format!("waited longer than {} ms", word(status::LIMIT_MS)),
        };
        let (rank, peer, rows) = (word(status::RANK), word(status::PEER), word(status::ROWS));
        let (wanted, seen) = (word(status::WANTED), word(status::SEEN));
        Err(CudaError::Exchange(format!(
            "rank {rank} {why} for rank {peer} in an exchange of {rows} rows: epoch {wanted} wanted, {seen} seen"
        )))
    }

    /// Tells a kernel that waits to wait no longer.
    pub fn stop(&self) {
        self.status.store(status::STOP, 1, Ordering::Release);
    }

    pub fn report(&self) -> ExchangeReport {
        let peer = |(rank, ordinal): (usize, &usize)| {
            let same = *ordinal == self.ordinals[self.rank];
            PeerReport { rank, ordinal: *ordinal, way: if same { "same-gpu" } else { "peer-access" } }
        };
        ExchangeReport {
            scratch_bytes: self.own.bytes as u64,
            shared_device: self.shares_a_gpu(),
            peers: self.ordinals.iter().enumerate().filter(|(rank, _)| *rank != self.rank).map(peer).collect(),
            ..ExchangeReport::of("p2p")
        }
    }
}

/// Lets this GPU read and write the memory of GPU `ordinal`.
fn open_way(gpu: &Gpu, ordinal: usize, context: u64) -> Result<(), CudaError> {
    let own = gpu.identity.ordinal;
    let doing = || format!("opening the way from GPU {own} to GPU {ordinal}");
    let mut peer = 0;
    let mut can: c_int = 0;
    // SAFETY: `peer` and `can` are live ints; the ordinal is one that a rank has opened.
    check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut peer, ordinal as c_int) }).during(doing)?;
    // SAFETY: as above; both devices exist.
    let asked = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, gpu.context.cu_device(), peer) };
    check("cuDeviceCanAccessPeer", asked).during(doing)?;
    if can == 0 {
        return Err(CudaError::Unsupported(format!(
            "--transport p2p: GPU {own} cannot reach the memory of GPU {ordinal} (no NVLink and no peer access over PCIe); use nccl or host-staged"
        )));
    }
    gpu.bind().during(doing)?;
    // SAFETY: the handle is the primary context that the other rank retains for as long as it takes part, and it told us of it.
    match unsafe { sys::cuCtxEnablePeerAccess(context as sys::CUcontext, 0) } {
        // NCCL, or an earlier device of this process, may have done so.
        sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
        code => check("cuCtxEnablePeerAccess", code).during(doing),
    }
}
