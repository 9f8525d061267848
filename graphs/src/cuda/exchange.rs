//! The host-staged exchange: device to pinned host memory, all ranks meet there, back to the device. One real round trip.
//!
//! Used between the ops of an eager step when ranks are several; it is the oracle of the faster transports and cannot be
//! captured. **Invariant:** it moves bytes and adds nothing; the sum is the next op's, the same on every rank.

use super::error::{CudaError, During};
use super::gpu::Gpu;
use super::memory::PinnedMemory;
use crate::device::DeviceError;
use slotgraph_kernels::BufferId;
use slotgraph_kernels::ops::{AllGather, Exchange};
use std::collections::HashMap;
use std::sync::Arc;

pub(super) struct HostExchange {
    transport: Arc<dyn AllGather>,
    rank: usize,
    ranks: usize,
    /// Floats of one row.
    hidden: usize,
    /// Pinned: this rank's partial, and everybody's.
    send: PinnedMemory,
    gathered: PinnedMemory,
    /// Device addresses of the buffers that exchanges name.
    addresses: HashMap<BufferId, u64>,
    gpu: Arc<Gpu>,
    /// Round trips made.
    pub count: u64,
}

/// Sizes of an exchange.
#[derive(Clone, Copy)]
pub(super) struct ExchangeShape {
    pub rank: usize,
    pub ranks: usize,
    pub rows_max: usize,
    pub hidden: usize,
}

impl HostExchange {
    pub fn new(
        gpu: &Arc<Gpu>,
        transport: Arc<dyn AllGather>,
        shape: ExchangeShape,
        addresses: HashMap<BufferId, u64>,
    ) -> Result<HostExchange, CudaError> {
        let words = shape.rows_max * shape.hidden;
        let pinned = |words: usize| {
            PinnedMemory::allocate(gpu, words).during(|| format!("allocating {words} pinned words for the exchange"))
        };
        Ok(HostExchange {
            transport,
            rank: shape.rank,
            ranks: shape.ranks,
            hidden: shape.hidden,
            send: pinned(words)?,
            gathered: pinned(words * shape.ranks)?,
            addresses,
            gpu: gpu.clone(),
            count: 0,
        })
    }

    /// Runs one exchange of `rows` rows; waits for the stream and for the other ranks.
    pub fn run(&mut self, exchange: &Exchange, rows: usize) -> Result<(), CudaError> {
        let _range = super::nvtx::range("exchange/host-staged");
        let words = rows * self.hidden;
        let bytes = words * size_of::<f32>();
        assert!(
            words <= self.send.count && words * self.ranks <= self.gathered.count,
            "scratch holds the largest bucket"
        );
        let (partial, gathered) = (self.addresses[&exchange.partial], self.addresses[&exchange.gathered]);
        // SAFETY: the plan's buffers hold `rows` rows (times ranks), the pinned ones hold the words asserted above; nothing
        // touches the pinned memory until the wait has returned.
        unsafe { self.gpu.copy_out(self.send.host(), partial, bytes) }
            .and_then(|()| self.gpu.wait())
            .during(|| "reading this rank's partial".into())?;
        let target = self.gathered.slice_mut(0, words * self.ranks);
        self.transport
            .all_gather(self.rank, bytemuck::cast_slice(self.send.slice(0, words)), bytemuck::cast_slice_mut(target))
            .map_err(DeviceError::from)?;
        // SAFETY: as above; the pinned memory is written again only by the next exchange, whose first copy is waited for and
        // runs after this one on the same stream.
        unsafe { self.gpu.copy_in(gathered, self.gathered.host(), bytes * self.ranks) }
            .during(|| "writing the gathered partials".into())?;
        self.count += 1;
        Ok(())
    }
}
