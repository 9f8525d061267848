//! One GPU: its context, the one stream that carries all its work, its facts, and a count of everything that must not happen
//! after `prepare`.
//!
//! Made on the thread that drives the device. **Invariants:** cudarc's event tracking is off before anything is allocated
//! (its events would break captures), so order is ours: there is one stream and all work is on it; every call that
//! allocates, captures or waits goes through here and is counted.

use super::error::{CallError, CudaError, During, check, check_driver};
use super::libs::load_driver;
use cudarc::driver::sys::{self, CUdevice_attribute};
use cudarc::driver::{CudaContext, CudaStream, DriverError};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A GPU described for people, evidence and the kernels' geometry.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct GpuIdentity {
    pub ordinal: usize,
    pub name: String,
    pub uuid: String,
    pub pci: String,
    /// NVRTC target, such as `sm_90a`.
    pub arch: String,
    pub sm_count: usize,
    /// Most bytes of shared memory that one block may opt in to.
    pub shared_max: usize,
    pub memory_bytes: u64,
    /// CUDA version that the driver speaks, such as `13.0`.
    pub driver: String,
}

/// What was done so far; none of these may grow after `prepare` but `launches` and `replays` (and, with a host-staged
/// exchange, `waits` and `copies`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counters {
    pub allocations: u64,
    pub module_loads: u64,
    pub captures: u64,
    /// Waits for the stream or the device.
    pub waits: u64,
    /// Copies between host and device (rings need none).
    pub copies: u64,
    /// Kernels launched by themselves.
    pub launches: u64,
    /// Graphs launched.
    pub replays: u64,
}

#[derive(Default)]
pub(super) struct CounterCells {
    pub allocations: AtomicU64,
    pub module_loads: AtomicU64,
    pub captures: AtomicU64,
    pub waits: AtomicU64,
    pub copies: AtomicU64,
    pub launches: AtomicU64,
    pub replays: AtomicU64,
}

/// Adds one to a counter.
pub(super) fn count(cell: &AtomicU64) {
    cell.fetch_add(1, Ordering::Relaxed);
}

pub(super) struct Gpu {
    // Fields drop in this order: the stream before the context that it belongs to.
    pub stream: Arc<CudaStream>,
    pub context: Arc<CudaContext>,
    pub identity: GpuIdentity,
    /// Compute capability.
    pub capability: (i32, i32),
    /// What cuDriverGetVersion says.
    pub driver_version: i32,
    pub counters: CounterCells,
}

/// CUDA devices that the driver sees; an error if there is no driver that slotgraph can use.
pub fn device_count(lib_dirs: &[PathBuf]) -> Result<usize, CudaError> {
    load_driver(lib_dirs)?;
    driver_version()?;
    devices()
}

/// What cuDriverGetVersion says, if it is new enough. The driver library must have been loaded.
fn driver_version() -> Result<i32, CudaError> {
    let mut version: c_int = 0;
    // SAFETY: the driver library is loaded, and `version` is a live int.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })
        .during(|| "asking the driver for its version".into())?;
    check_driver(version)?;
    Ok(version)
}

fn devices() -> Result<usize, CudaError> {
    match CudaContext::device_count() {
        // A driver without a device to drive says so when it is initialised.
        Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => Ok(0),
        count => {
            let count = count.map_err(fault("cuInit")).during(|| "counting CUDA devices".into())?;
            Ok(usize::try_from(count).unwrap_or(0))
        }
    }
}

impl Gpu {
    /// Opens device `ordinal`. The driver library must have been loaded (`Libraries::load`): cudarc panics otherwise.
    pub fn open(ordinal: usize) -> Result<Arc<Gpu>, CudaError> {
        let opening = || format!("opening CUDA device {ordinal}");
        let driver_version = driver_version()?;
        let count = devices()?;
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        let context = CudaContext::new(ordinal).map_err(fault("cuDevicePrimaryCtxRetain")).during(opening)?;
        // SAFETY: nothing was allocated yet, and from here on all work of this context is on one stream, so nothing needs
        // the ordering that the events would give.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(fault("cuStreamCreate")).during(opening)?;

        let attribute =
            |which: CUdevice_attribute| context.attribute(which).map_err(fault("cuDeviceGetAttribute")).during(opening);
        let capability = context.compute_capability().map_err(fault("cuDeviceGetAttribute")).during(opening)?;
        let name = context.name().map_err(fault("cuDeviceGetName")).during(opening)?;
        let (major, minor) = capability;
        let arch = arch(capability).ok_or_else(|| CudaError::OldGpu { name: name.clone(), major, minor })?;
        let positive = |value: i32| usize::try_from(value).unwrap_or(0);
        let identity = GpuIdentity {
            ordinal,
            name,
            uuid: uuid_text(
                context.uuid().map_err(fault("cuDeviceGetUuid_v2")).during(opening)?.bytes.map(|b| b as u8),
            ),
            pci: pci(&context).during(opening)?,
            arch,
            sm_count: positive(attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?),
            shared_max: positive(attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?),
            memory_bytes: context.total_mem().map_err(fault("cuDeviceTotalMem_v2")).during(opening)? as u64,
            driver: super::error::version(driver_version),
        };
        Ok(Arc::new(Gpu { stream, context, identity, capability, driver_version, counters: CounterCells::default() }))
    }

    /// Makes the context current on this thread; every entry from outside does this first.
    pub fn bind(&self) -> Result<(), CallError> {
        self.context.bind_to_thread().map_err(fault("cuCtxSetCurrent"))
    }

    /// Free and total bytes of the device, as the driver sees them now.
    pub fn memory(&self) -> Result<(u64, u64), CallError> {
        let (free, total) = self.context.mem_get_info().map_err(fault("cuMemGetInfo_v2"))?;
        Ok((free as u64, total as u64))
    }

    pub fn raw_stream(&self) -> sys::CUstream {
        self.stream.cu_stream()
    }

    /// Waits until the stream is empty.
    pub fn wait(&self) -> Result<(), CallError> {
        count(&self.counters.waits);
        self.stream.synchronize().map_err(fault("cuStreamSynchronize"))
    }

    /// Whether the stream is empty; an error if something on it failed. Does not wait.
    pub fn is_idle(&self) -> Result<bool, CallError> {
        // SAFETY: the stream is live as long as `self`.
        match unsafe { sys::cuStreamQuery(self.raw_stream()) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("cuStreamQuery", code).map(|()| true),
        }
    }

    pub fn counters(&self) -> Counters {
        let read = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        let cells = &self.counters;
        Counters {
            allocations: read(&cells.allocations),
            module_loads: read(&cells.module_loads),
            captures: read(&cells.captures),
            waits: read(&cells.waits),
            copies: read(&cells.copies),
            launches: read(&cells.launches),
            replays: read(&cells.replays),
        }
    }

    /// Copies to the device in stream order, without waiting.
    ///
    /// # Safety
    /// `target … target + bytes` lies in a live allocation of this device; `source` is readable for `bytes` and stays
    /// unchanged until the copy has run.
    pub unsafe fn copy_in(&self, target: u64, source: *const c_void, bytes: usize) -> Result<(), CallError> {
        count(&self.counters.copies);
        // SAFETY: the caller vouches for both ranges; the stream is live.
        check("cuMemcpyHtoDAsync_v2", unsafe { sys::cuMemcpyHtoDAsync_v2(target, source, bytes, self.raw_stream()) })
    }

    /// Copies to the host in stream order, without waiting.
    ///
    /// # Safety
    /// `source … source + bytes` lies in a live allocation of this device; `target` is writable for `bytes` and nothing
    /// else touches it until the copy has run.
    pub unsafe fn copy_out(&self, target: *mut c_void, source: u64, bytes: usize) -> Result<(), CallError> {
        count(&self.counters.copies);
        // SAFETY: the caller vouches for both ranges; the stream is live.
        check("cuMemcpyDtoHAsync_v2", unsafe { sys::cuMemcpyDtoHAsync_v2(target, source, bytes, self.raw_stream()) })
    }

    /// Fills words on the device in stream order.
    ///
    /// # Safety
    /// `target … target + 4 · words` lies in a live allocation of this device, 4-byte aligned.
    pub unsafe fn fill(&self, target: u64, value: u32, words: usize) -> Result<(), CallError> {
        // SAFETY: the caller vouches for the range; the stream is live.
        check("cuMemsetD32Async", unsafe { sys::cuMemsetD32Async(target, value, words, self.raw_stream()) })
    }
}

/// For `map_err`: names the call of a cudarc error.
pub(super) fn fault(call: &'static str) -> impl Fn(DriverError) -> CallError {
    move |error| CallError::new(call, error)
}

/// NVRTC target of a compute capability; None below 8.0. The `a` forms give wgmma and tcgen05 and run on that chip only.
fn arch((major, minor): (i32, i32)) -> Option<String> {
    let feature = if matches!(major, 9..=11) { "a" } else { "" };
    (major >= 8).then(|| format!("sm_{major}{minor}{feature}"))
}

/// As nvidia-smi prints it.
fn uuid_text(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

fn pci(context: &CudaContext) -> Result<String, CallError> {
    let mut text = [0 as c_char; 32];
    // SAFETY: `text` has the 32 bytes that are declared; the device is one the driver gave.
    check("cuDeviceGetPCIBusId", unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), 32, context.cu_device()) })?;
    // SAFETY: on success the driver wrote a NUL-terminated string into `text`, whose last byte was NUL before.
    Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_follow_the_capability() {
        let cases =
            [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((12, 0), "sm_120")];
        for (capability, want) in cases {
            assert_eq!(arch(capability).as_deref(), Some(want));
        }
        assert_eq!(arch((7, 5)), None);
    }

    #[test]
    fn a_uuid_reads_as_in_nvidia_smi() {
        let bytes: [u8; 16] = std::array::from_fn(|i| i as u8 * 17);
        assert_eq!(uuid_text(bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
