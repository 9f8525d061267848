//! The driver's functions for devices, memory, the stream and modules.
//!
//! Every function follows its namesake in cuda.h: pointers are the caller's and live for the call. Handles are made-up
//! non-NULL values, or boxes that their destroy function takes back.

use crate::state::{
    CAPTURE_UNSUPPORTED, Code, INVALID_VALUE, Kind, NOT_FOUND, OUT_OF_MEMORY, PEER_ACCESS_ALREADY_ENABLED, SUCCESS,
    config, log, state,
};
use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

type Handle = *mut c_void;

/// Contexts are this times the device's number from 1, streams are numbered from there; neither is ever dereferenced.
const CONTEXT: usize = 0x1000;
const STREAM: usize = 0x10_0000;
static STREAMS: AtomicUsize = AtomicUsize::new(STREAM);

thread_local! { static CURRENT: Cell<usize> = const { Cell::new(0) }; }

/// Writes a result through a pointer that the caller of the C function gave.
///
/// # Safety
/// `target` is NULL or valid for writes.
unsafe fn give<T>(target: *mut T, value: T) -> Code {
    if target.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: not NULL, and valid by the caller's word.
    unsafe { target.write(value) };
    SUCCESS
}

macro_rules! driver {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => { $(
        /// # Safety
        /// As cuda.h says of the function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> Code {
            if state().fails(stringify!($name)) {
                return OUT_OF_MEMORY;
            }
            $body
        }
    )* };
}

driver! {
    fn cuInit(_flags: c_uint) { SUCCESS }
    // SAFETY (here and below): the pointers are the caller's, as the C function has it.
    fn cuDriverGetVersion(version: *mut c_int) { unsafe { give(version, config().driver) } }
    fn cuDeviceGetCount(count: *mut c_int) { unsafe { give(count, config().devices) } }
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) { unsafe { give(device, ordinal) } }
    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) {
        unsafe { give(context, CONTEXT * (device as usize + 1)) }
    }
    fn cuDevicePrimaryCtxRelease_v2(_device: c_int) { SUCCESS }
    fn cuCtxGetCurrent(context: *mut usize) { unsafe { give(context, CURRENT.get()) } }
    fn cuCtxSetCurrent(context: usize) { CURRENT.set(context); SUCCESS }
    fn cuDeviceGetName(name: *mut c_char, length: c_int, _device: c_int) { unsafe { text(name, length, c"Mock GPU") } }
    fn cuDeviceGetPCIBusId(name: *mut c_char, length: c_int, _device: c_int) {
        unsafe { text(name, length, c"0000:01:00.0") }
    }
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], _device: c_int) { unsafe { give(uuid, [7; 16]) } }
    fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) { unsafe { give(bytes, config().memory) } }
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) {
        let known = match attribute {
            16 => 132,     // multiprocessors
            75 => 9,       // compute capability
            76 => 0,
            97 => 232_448, // shared memory a block may opt in to
            _ => 1,
        };
        unsafe { give(value, known) }
    }

    fn cuDeviceCanAccessPeer(can: *mut c_int, _device: c_int, _peer: c_int) {
        unsafe { give(can, c_int::from(config().peers)) }
    }
    fn cuCtxEnablePeerAccess(peer: usize, _flags: c_uint) {
        log("cuCtxEnablePeerAccess");
        match (CURRENT.get(), state().ways.insert((CURRENT.get(), peer))) {
            (own, _) if own == peer => INVALID_VALUE,
            (_, true) => SUCCESS,
            (_, false) => PEER_ACCESS_ALREADY_ENABLED,
        }
    }

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let used = state().used;
        unsafe { give(free, config().memory - used); give(total, config().memory) }
    }
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) {
        let allocated = state().allocate(bytes, Kind::Device);
        match allocated {
            Ok(base) => unsafe { give(address, base as u64) },
            Err(code) => code,
        }
    }
    fn cuMemFree_v2(address: u64) {
        log("cuMemFree_v2");
        state().free(address as usize)
    }
    fn cuMemHostAlloc(host: *mut usize, bytes: usize, _flags: c_uint) {
        let allocated = state().allocate(bytes, Kind::Host);
        match allocated {
            Ok(base) => unsafe { give(host, base) },
            Err(code) => code,
        }
    }
    fn cuMemFreeHost(host: usize) { state().free(host) }
    fn cuMemHostGetDevicePointer_v2(address: *mut u64, host: usize, _flags: c_uint) {
        unsafe { give(address, host as u64) }
    }
    fn cuPointerGetAttribute(value: *mut c_uint, attribute: c_int, address: u64) {
        const MEMORY_TYPE: c_int = 2;
        let kind = state().kind_of(address as usize, 1);
        match kind {
            Some(kind) if attribute == MEMORY_TYPE => unsafe { give(value, kind as c_uint) },
            _ => INVALID_VALUE,
        }
    }
    fn cuMemcpyHtoDAsync_v2(target: u64, source: *const u8, bytes: usize, _stream: Handle) {
        unsafe { copy(target as *mut u8, source, bytes, target) }
    }
    fn cuMemcpyDtoHAsync_v2(target: *mut u8, source: u64, bytes: usize, _stream: Handle) {
        unsafe { copy(target, source as *const u8, bytes, source) }
    }
    fn cuMemcpyDtoDAsync_v2(target: u64, source: u64, bytes: usize, _stream: Handle) {
        if state().kind_of(source as usize, bytes).is_none() {
            return INVALID_VALUE;
        }
        unsafe { copy(target as *mut u8, source as *const u8, bytes, target) }
    }
    fn cuMemsetD32Async(target: u64, value: c_uint, words: usize, _stream: Handle) {
        if state().kind_of(target as usize, 4 * words).is_none() {
            return INVALID_VALUE;
        }
        // The range lies in one live allocation, as just checked, and is aligned.
        unsafe { std::slice::from_raw_parts_mut(target as *mut u32, words) }.fill(value);
        SUCCESS
    }

    fn cuStreamCreate(stream: *mut usize, _flags: c_uint) {
        unsafe { give(stream, STREAMS.fetch_add(0x10, Ordering::Relaxed)) }
    }
    fn cuStreamDestroy_v2(_stream: Handle) { SUCCESS }
    fn cuStreamSynchronize(stream: Handle) { wait(stream) }
    fn cuStreamQuery(stream: Handle) { wait(stream) }
    fn cuEventCreate(event: *mut *mut Instant, _flags: c_uint) {
        unsafe { give(event, Box::into_raw(Box::new(Instant::now()))) }
    }
    fn cuEventRecord(event: *mut Instant, _stream: Handle) { unsafe { give(event, Instant::now()) } }
    fn cuEventSynchronize(_event: *mut Instant) { SUCCESS }
    fn cuEventElapsedTime_v2(ms: *mut f32, start: *const Instant, end: *const Instant) {
        unsafe { give(ms, (*end).duration_since(*start).as_secs_f32() * 1e3) }
    }
    fn cuEventDestroy_v2(event: *mut Instant) { drop(unsafe { Box::from_raw(event) }); SUCCESS }

    fn cuModuleLoadData(module: *mut usize, image: *const u8) {
        // An image is at least the magic of an ELF file.
        if unsafe { std::slice::from_raw_parts(image, 4) } != b"\x7fELF" {
            return INVALID_VALUE;
        }
        unsafe { give(module, 0x30) }
    }
    fn cuModuleUnload(_module: Handle) { SUCCESS }
    fn cuModuleGetFunction(function: *mut *const Function, _module: Handle, name: *const c_char) {
        let name = unsafe { CStr::from_ptr(name) };
        match config().functions.get(&*name.to_string_lossy()) {
            // Functions live as long as the process: a handful in a test.
            Some(sizes) => {
                let known = Function { name: name.to_owned(), sizes: sizes.clone() };
                unsafe { give(function, Box::leak(Box::new(known))) }
            }
            None => NOT_FOUND,
        }
    }
    fn cuFuncLoad(_function: *const Function) { SUCCESS }
    fn cuFuncSetAttribute(_function: *const Function, _attribute: c_int, _value: c_int) { SUCCESS }
    fn cuFuncGetName(name: *mut *const c_char, function: *const Function) {
        unsafe { give(name, (*function).name.as_ptr()) }
    }
    fn cuFuncGetParamInfo(function: *const Function, index: usize, offset: *mut usize, size: *mut usize) {
        let sizes = unsafe { &(*function).sizes };
        let Some(known) = sizes.get(index) else { return INVALID_VALUE };
        unsafe { give(offset, sizes[..index].iter().sum()); give(size, *known) }
    }
    fn cuGetErrorName(_code: Code, name: *mut *const c_char) { unsafe { give(name, c"MOCK_ERROR".as_ptr()) } }
    fn cuGetErrorString(_code: Code, text: *mut *const c_char) {
        unsafe { give(text, c"as the mock was told".as_ptr()) }
    }
}

/// A kernel that the configuration declares.
pub struct Function {
    pub name: CString,
    pub sizes: Vec<usize>,
}

/// Waiting for a stream spoils its open capture.
fn wait(stream: Handle) -> Code {
    match state().captures.get_mut(&(stream as usize)) {
        Some(capture) => {
            capture.broken = true;
            CAPTURE_UNSUPPORTED
        }
        None => SUCCESS,
    }
}

/// # Safety
/// `target` is valid for `length` bytes.
unsafe fn text(target: *mut c_char, length: c_int, value: &CStr) -> Code {
    let bytes = value.to_bytes_with_nul();
    if bytes.len() > length as usize {
        return INVALID_VALUE;
    }
    // SAFETY: it fits, as just checked.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.cast(), bytes.len()) };
    SUCCESS
}

/// # Safety
/// Host pointers are valid for `bytes`; `device` is the device's end, which is checked.
unsafe fn copy(target: *mut u8, source: *const u8, bytes: usize, device: u64) -> Code {
    if state().kind_of(device as usize, bytes).is_none() {
        return INVALID_VALUE;
    }
    // SAFETY: both ends are valid for `bytes`: the device's end as just checked, the host's by the caller's word.
    unsafe { std::ptr::copy(source, target, bytes) };
    SUCCESS
}
