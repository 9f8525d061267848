//! Memory that keeps its address: device allocations and pinned, device-mapped host memory.
//!
//! Used by `arena`, `weights` and `exchange`. **Invariants:** an allocation is plain (`cuMemAlloc`, not a pool: pool memory has
//! no fixed life and peers cannot map it), made outside any capture, freed only when its owner drops; owners drop after the
//! graphs that name their addresses.

use super::error::{CallError, check};
use super::gpu::{Gpu, count};
use cudarc::driver::sys;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Smallest allocation; all are whole 16-byte units, so that a vector load of the last element stays inside.
const BYTES_MIN: usize = 256;

/// Device memory.
pub(super) struct DeviceMemory {
    pub address: u64,
    pub bytes: usize,
    gpu: Arc<Gpu>,
}

impl DeviceMemory {
    pub fn allocate(gpu: &Arc<Gpu>, bytes: usize) -> Result<DeviceMemory, CallError> {
        let bytes = bytes.max(BYTES_MIN).next_multiple_of(16);
        let mut address = 0;
        count(&gpu.counters.allocations);
        gpu.bind()?;
        // SAFETY: `address` is a live u64, and the device's context is current on this thread.
        check("cuMemAlloc_v2", unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) })?;
        Ok(DeviceMemory { address, bytes, gpu: gpu.clone() })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // A failure here means that the context is gone, and the memory with it; there is nobody left to tell.
        if self.gpu.bind().is_ok() {
            // SAFETY: the address came from cuMemAlloc_v2 and is freed once. Graphs and launches that name it were
            // dropped or waited for by the owner (`CudaDevice` drops graphs before memory).
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

/// Pinned host memory as 32-bit words, mapped into the device's address space. Not write-combined: the host reads it too.
pub(super) struct PinnedMemory {
    words: NonNull<u32>,
    pub count: usize,
    /// Where the device sees it.
    pub address: u64,
    gpu: Arc<Gpu>,
}

// SAFETY: the memory is owned by this value alone; the driver's handle for it may be freed from any thread that has the
// context current, which Drop sees to. The device's accesses are ordered by the ring protocol, not by the thread.
unsafe impl Send for PinnedMemory {}

impl PinnedMemory {
    /// Zeroed.
    pub fn allocate(gpu: &Arc<Gpu>, count: usize) -> Result<PinnedMemory, CallError> {
        let count = count.max(BYTES_MIN / size_of::<u32>());
        let bytes = count * size_of::<u32>();
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        let mut host: *mut c_void = std::ptr::null_mut();
        super::gpu::count(&gpu.counters.allocations);
        gpu.bind()?;
        // SAFETY: `host` is a live pointer, and the device's context is current on this thread.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut host, bytes, flags) })?;
        let words = NonNull::new(host.cast::<u32>()).expect("a successful allocation is not NULL");
        let mut memory = PinnedMemory { words, count, address: 0, gpu: gpu.clone() };
        // SAFETY: `host` came from cuMemHostAlloc with DEVICEMAP; `address` is a live u64.
        check("cuMemHostGetDevicePointer_v2", unsafe {
            sys::cuMemHostGetDevicePointer_v2(&raw mut memory.address, host, 0)
        })?;
        memory.slice_mut(0, count).fill(0);
        Ok(memory)
    }

    pub fn bytes(&self) -> usize {
        self.count * size_of::<u32>()
    }

    /// Words `at … at + count` for the host to write.
    ///
    /// The caller keeps the ring protocol: the device reads an entry only in steps enqueued after it was written, and the
    /// entry is written again only when those steps have settled.
    pub fn slice_mut(&mut self, at: usize, count: usize) -> &mut [u32] {
        assert!(at <= self.count && count <= self.count - at, "words {at} + {count} of {}", self.count);
        // SAFETY: in bounds by the assertion, aligned and initialised (zeroed when allocated, and every bit pattern is a u32);
        // `&mut self` excludes other host references, and the ring protocol excludes the device.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_ptr().add(at), count) }
    }

    /// Words `at … at + count` that the device has finished writing, as `load` of the entry's step number has shown.
    pub fn slice(&self, at: usize, count: usize) -> &[u32] {
        assert!(at <= self.count && count <= self.count - at, "words {at} + {count} of {}", self.count);
        // SAFETY: in bounds by the assertion, aligned and initialised; the device writes an output entry only in steps
        // that are enqueued after the entry's last step settled, so not while this reference lives.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().add(at), count) }
    }

    /// One word that the device may be writing, with acquire order: what it wrote before a release is visible after.
    pub fn load(&self, at: usize) -> u32 {
        assert!(at < self.count, "word {at} of {}", self.count);
        // SAFETY: in bounds and aligned; concurrent access goes through atomics only (the device stores with system-scope
        // release), and no reference made by `slice_mut` is alive beside `&self`.
        unsafe { AtomicU32::from_ptr(self.words.as_ptr().add(at)) }.load(Ordering::Acquire)
    }

    /// Stores one word that the device may be reading.
    pub fn store(&self, at: usize, value: u32, order: Ordering) {
        assert!(at < self.count, "word {at} of {}", self.count);
        // SAFETY: as for `load`.
        unsafe { AtomicU32::from_ptr(self.words.as_ptr().add(at)) }.store(value, order);
    }

    pub fn host(&self) -> *mut c_void {
        self.words.as_ptr().cast()
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: the pointer came from cuMemHostAlloc and is freed once; launches that name it were waited for by the
            // owner.
            let _ = unsafe { sys::cuMemFreeHost(self.words.as_ptr().cast()) };
        }
    }
}
