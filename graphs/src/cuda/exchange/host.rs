//! The host-staged transport: device to pinned host memory, all ranks meet there, back to the device. One real round trip an exchange.
//!
//! Used between the ops of an eager step; it is the oracle of the faster transports and cannot be captured.

use super::ExchangeShape;
use crate::cuda::error::{CudaError, During};
use crate::cuda::gpu::Gpu;
use crate::cuda::memory::PinnedMemory;
use crate::device::DeviceError;
use slotgraph_kernels::ops::AllGather;
use std::sync::Arc;

pub(super) struct HostLink {
    all: Arc<dyn AllGather>,
    shape: ExchangeShape,
    /// Pinned: this rank's partial, and everybody's.
    send: PinnedMemory,
    gathered: PinnedMemory,
    gpu: Arc<Gpu>,
}

impl HostLink {
    pub fn new(gpu: &Arc<Gpu>, all: Arc<dyn AllGather>, shape: ExchangeShape) -> Result<HostLink, CudaError> {
        let words = shape.rows_max * shape.hidden;
        let pinned = |words: usize| {
            PinnedMemory::allocate(gpu, words).during(|| format!("allocating {words} pinned words for the exchange"))
        };
        Ok(HostLink { all, shape, send: pinned(words)?, gathered: pinned(words * shape.ranks)?, gpu: gpu.clone() })
    }

    /// Of pinned host memory.
    pub fn bytes(&self) -> u64 {
        (self.send.bytes() + self.gathered.bytes()) as u64
    }

    /// Moves `words` floats of every rank; waits for the stream and for the other ranks.
    pub fn run(&mut self, partial: u64, gathered: u64, words: usize) -> Result<(), CudaError> {
        let _range = crate::cuda::nvtx::range("exchange/host-staged");
        let (bytes, all_words) = (words * size_of::<f32>(), words * self.shape.ranks);
        // SAFETY: the plan's buffers hold `words` floats (times ranks), and so do the pinned ones, which hold the largest bucket's; nothing
        // touches the pinned memory until the wait has returned.
        unsafe { self.gpu.copy_out(self.send.host(), partial, bytes) }
            .and_then(|()| self.gpu.wait())
            .during(|| "reading this rank's partial".into())?;
        let target = self.gathered.slice_mut(0, all_words);
        self.all
            .all_gather(
                self.shape.rank,
                bytemuck::cast_slice(self.send.slice(0, words)),
                bytemuck::cast_slice_mut(target),
            )
            .map_err(DeviceError::from)?;
        // SAFETY: as above; the pinned memory is written again only by the next exchange, whose first copy is waited for and
        // runs after this one on the same stream.
        unsafe { self.gpu.copy_in(gathered, self.gathered.host(), bytes * self.shape.ranks) }
            .during(|| "writing the gathered partials".into())
    }

    /// Whoever waits for this rank hears why it does not come.
    pub fn leave(&self, reason: &str) {
        self.all.leave(self.shape.rank, reason);
    }
}
