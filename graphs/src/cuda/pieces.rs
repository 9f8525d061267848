//! Weights in pieces: cut into runs of rows, read by several threads into pinned buffers.
//!
//! Used by `weights`, which uploads the pieces in order. **Invariant:** readers take a free buffer first and then the next piece,
//! under one lock, so that the earliest piece outstanding always has a buffer: an uploader that goes in order cannot starve.

use super::error::{CallError, CudaError, During};
use super::gpu::{Gpu, count, fault};
use super::memory::{DeviceMemory, PinnedMemory};
use crate::source::{Source, SourceError, group_extents};
use cudarc::driver::CudaEvent;
use slotgraph_kernels::{WeightForm, WeightSpec, pack};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Instant;

/// Bytes of one piece: large enough for full copy speed, small enough that readers overlap and that pinning all buffers (about 0.7 ms
/// a MiB) does not outlast the reading.
pub(super) const PIECE_BYTES: usize = 2 << 20;

/// Some rows of a group: what one reader reads at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub weight: usize,
    pub group: usize,
    pub rows: Range<usize>,
    /// Elements of the group before this piece.
    pub before: usize,
    pub elements: usize,
    /// The group is whole once this piece is there.
    pub last: bool,
}

/// Every group of the forms wanted, cut into pieces of whole rows, in order.
pub(super) fn pieces(specs: &[WeightSpec], wanted: impl Fn(&WeightForm) -> bool) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (weight, spec) in specs.iter().enumerate().filter(|(_, spec)| wanted(&spec.form)) {
        let (rows, columns) = group_extents(&spec.form);
        if rows == 0 {
            continue;
        }
        let step = (PIECE_BYTES / 2 / columns).max(1);
        for group in 0..pack::groups(&spec.form) {
            for start in (0..rows).step_by(step) {
                let end = (start + step).min(rows);
                let (before, elements) = (start * columns, (end - start) * columns);
                pieces.push(Piece { weight, group, rows: start..end, before, elements, last: end == rows });
            }
        }
    }
    pieces
}

/// Free buffers and the next piece, taken together.
pub(super) struct Queue {
    pub buffers: mpsc::Receiver<Buffer>,
    pub next: usize,
}

/// A buffer with one piece in it, or the reason why not.
pub(super) struct Filled {
    pub piece: usize,
    pub buffer: Buffer,
    pub outcome: Result<(), SourceError>,
}

pub(super) fn read_pieces(
    source: &dyn Source,
    specs: &[WeightSpec],
    pieces: &[Piece],
    queue: &Mutex<Queue>,
    filled: &mpsc::Sender<Filled>,
    read_ns: &AtomicU64,
) {
    loop {
        let (index, mut buffer) = {
            let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
            if queue.next == pieces.len() {
                return;
            }
            let Ok(buffer) = queue.buffers.recv() else { return };
            queue.next += 1;
            (queue.next - 1, buffer)
        };
        let piece = &pieces[index];
        let start = Instant::now();
        let spec = &specs[piece.weight];
        let out = buffer.elements_mut(piece.elements);
        // A panic must not lose the buffer: the uploader would wait for this piece for ever.
        let read = || source.read_rows(spec, piece.group, piece.rows.clone(), out);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(read))
            .unwrap_or_else(|_| Err(SourceError { weight: spec.name.clone(), reason: "reading it panicked".into() }));
        read_ns.fetch_add(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        if filled.send(Filled { piece: index, buffer, outcome }).is_err() {
            return;
        }
    }
}

/// A pinned buffer and the event that says when its copy has run.
pub(super) struct Buffer {
    memory: PinnedMemory,
    copied: CudaEvent,
}

impl Buffer {
    pub fn allocate(gpu: &Arc<Gpu>, elements: usize) -> Result<Buffer, CudaError> {
        let doing = || format!("allocating {} pinned bytes to read weights", elements * 2);
        let memory = PinnedMemory::allocate(gpu, elements.div_ceil(2)).during(doing)?;
        let copied = gpu.context.new_event(None).map_err(fault("cuEventCreate")).during(doing)?;
        Ok(Buffer { memory, copied })
    }

    pub fn elements_mut(&mut self, count: usize) -> &mut [u16] {
        &mut bytemuck::cast_slice_mut(self.memory.slice_mut(0, count.div_ceil(2)))[..count]
    }

    pub fn copy_to(&self, gpu: &Gpu, staging: &DeviceMemory, piece: &Piece) -> Result<(), CallError> {
        let (offset, bytes) = (piece.before * 2, piece.elements * 2);
        assert!(offset + bytes <= staging.bytes && bytes <= self.memory.bytes(), "a piece fits both of its ends");
        // SAFETY: both ranges are in bounds by the assertion; the buffer is not handed out again before `wait` returned, and
        // it is not freed before the stream was waited for (`upload`, `upload_in_order`).
        unsafe { gpu.copy_in(staging.address + offset as u64, self.memory.host(), bytes) }?;
        self.copied.record(&gpu.stream).map_err(fault("cuEventRecord"))
    }

    /// Waits until the copy has run.
    pub fn wait(&self, gpu: &Gpu) -> Result<(), CallError> {
        count(&gpu.counters.waits);
        self.copied.synchronize().map_err(fault("cuEventSynchronize"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slotgraph_kernels::contract::GemmKind;

    fn spec(form: WeightForm) -> WeightSpec {
        WeightSpec { name: "w".into(), form, parts: Vec::new() }
    }

    #[test]
    fn pieces_cover_every_row_once_in_order_and_close_each_group() {
        let wide = PIECE_BYTES / 2 / 3; // three rows a piece
        let specs = [
            spec(WeightForm::Gemm { kind: GemmKind::AttnOut, groups: 2, n: 7, k: wide }),
            spec(WeightForm::Vector { n: 5 }),
            spec(WeightForm::Table { rows: 4, cols: 2 * PIECE_BYTES }),
        ];
        let cut = pieces(&specs, |_| true);
        let rows: Vec<(usize, usize, Range<usize>, bool)> =
            cut.iter().map(|piece| (piece.weight, piece.group, piece.rows.clone(), piece.last)).collect();
        let want = [
            (0, 0, 0..3, false),
            (0, 0, 3..6, false),
            (0, 0, 6..7, true),
            (0, 1, 0..3, false),
            (0, 1, 3..6, false),
            (0, 1, 6..7, true),
            (1, 0, 0..5, true),
            (2, 0, 0..1, false),
            (2, 0, 1..2, false),
            (2, 0, 2..3, false),
            (2, 0, 3..4, true),
        ];
        assert_eq!(rows, want);
        assert_eq!((cut[2].before, cut[2].elements), (6 * wide, wide));
        assert!(
            pieces(&specs, |form| matches!(form, WeightForm::Gemm { .. } | WeightForm::Table { .. }))
                .iter()
                .all(|piece| piece.weight != 1)
        );
    }
}
