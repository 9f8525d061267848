//! An NCCL (libnccl.so.2) without GPUs, beside the mock driver of this folder: ranks are threads, device memory is host memory.
//!
//! For tests of the order of calls and of what is said when one fails. A collective is launched as a kernel of the mock driver, on its stream or
//! into its capture, as NCCL does; it meets the other ranks and really gathers. What the mock knows comes from `mocknccl.conf` beside the
//! library, a line each: `version 22809`; `fail CALL CODE`; `pieces N`: an all-gather is N kernels, the last of which gathers; `kernel NAME`:
//! what they are called; `programmatic 1`: they stand on programmatic edges. Where there is a file `calls.log`, calls are added to it with their
//! thread's name.
//!
//! Types and numbers are those of nccl.h, 2.28.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

type Code = c_int;
const SUCCESS: Code = 0;
const INVALID_ARGUMENT: Code = 4;
const REMOTE_ERROR: Code = 6;
const FLOAT32: c_int = 7;
/// Longest wait for another rank.
const PATIENCE: Duration = Duration::from_secs(10);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([c_char; 128]);

/// Where the ranks of one communicator meet.
#[derive(Default)]
struct Room {
    state: Mutex<Meeting>,
    moved: Condvar,
}

#[derive(Default)]
struct Meeting {
    /// Collectives (and the joining, which is the first) that each rank has come to.
    came: Vec<u64>,
    /// What each brings to the collective that is on, and to the one before.
    brought: [Vec<Vec<u8>>; 2],
    aborted: bool,
}

/// `ncclComm`.
pub struct Comm {
    room: Arc<Room>,
    rank: usize,
    ranks: usize,
    kernel: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Room {
    /// Brings `bytes`; what every rank brought, or None when one does not come or has aborted.
    fn meet(&self, rank: usize, ranks: usize, bytes: Vec<u8>) -> Option<Vec<Vec<u8>>> {
        let mut state = lock(&self.state);
        state.came.resize(ranks, 0);
        state.brought.iter_mut().for_each(|brought| brought.resize(ranks, Vec::new()));
        let number = state.came[rank] + 1;
        let parity = (number % 2) as usize;
        state.came[rank] = number;
        state.brought[parity][rank] = bytes;
        self.moved.notify_all();
        let deadline = Instant::now() + PATIENCE;
        while state.came.iter().any(|&came| came < number) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || state.aborted {
                return None;
            }
            state = self.moved.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(state.brought[parity].clone())
    }
}

fn rooms() -> MutexGuard<'static, HashMap<Vec<u8>, Arc<Room>>> {
    static ROOMS: OnceLock<Mutex<HashMap<Vec<u8>, Arc<Room>>>> = OnceLock::new();
    lock(ROOMS.get_or_init(Mutex::default))
}

/// The folder that this library was loaded from.
fn folder() -> PathBuf {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: an address inside this library, and a live structure.
    if unsafe { libc::dladdr(folder as *const c_void, &raw mut info) } == 0 {
        return PathBuf::new();
    }
    // SAFETY: the loader's NUL-terminated name of this library.
    let library = PathBuf::from(unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned());
    library.parent().map(PathBuf::from).unwrap_or_default()
}

/// The value of a line of the configuration.
fn configured(key: &str) -> Option<String> {
    let text = std::fs::read_to_string(folder().join("mocknccl.conf")).unwrap_or_default();
    text.lines().find_map(|line| Some(line.strip_prefix(key)?.strip_prefix(' ')?.to_owned()))
}

/// Notes the call; the code with which it is to fail, if it is.
fn called(call: &str) -> Code {
    if let Ok(mut file) = std::fs::OpenOptions::new().append(true).open(folder().join("calls.log")) {
        let mut name = [0u8; 16];
        // SAFETY: the calling thread, and room for the longest name.
        unsafe { libc::pthread_getname_np(libc::pthread_self(), name.as_mut_ptr().cast(), name.len()) };
        let name = CStr::from_bytes_until_nul(&name).map(CStr::to_string_lossy).unwrap_or_default();
        // One write a line: threads share the file.
        file.write_all(format!("{name} {call}\n").as_bytes()).expect("the test's folder can be written");
    }
    configured(&format!("fail {call}")).and_then(|code| code.parse().ok()).unwrap_or(SUCCESS)
}

/// # Safety
/// As nccl.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> Code {
    // SAFETY: by the caller's word.
    unsafe { version.write(configured("version").and_then(|text| text.parse().ok()).unwrap_or(22_809)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(_code: Code) -> *const c_char {
    c"as the mock was told".as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_comm: *const Comm) -> *const c_char {
    c"the mock's last words".as_ptr()
}

/// # Safety
/// As nccl.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> Code {
    let code = called("ncclGetUniqueId");
    let mut bytes = [0; 128];
    bytes[..8].copy_from_slice(&(rooms().len() as u64 + 1).to_le_bytes().map(|byte| byte as c_char));
    bytes[127] = 77;
    // SAFETY: by the caller's word.
    unsafe { id.write(UniqueId(bytes)) };
    code
}

/// # Safety
/// As nccl.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(comm: *mut *mut Comm, ranks: c_int, id: UniqueId, rank: c_int) -> Code {
    let code = called("ncclCommInitRank");
    if code != SUCCESS || id.0[127] != 77 {
        return if code == SUCCESS { INVALID_ARGUMENT } else { code };
    }
    let room = rooms().entry(id.0.map(|byte| byte as u8).to_vec()).or_default().clone();
    let (rank, ranks) = (rank as usize, ranks as usize);
    if room.meet(rank, ranks, Vec::new()).is_none() {
        return REMOTE_ERROR;
    }
    let Some(kernel) = driver::kernel() else { return INVALID_ARGUMENT };
    // SAFETY: by the caller's word.
    unsafe { comm.write(Box::into_raw(Box::new(Comm { room, rank, ranks, kernel }))) };
    SUCCESS
}

/// # Safety
/// As nccl.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(_comm: *const Comm, state: *mut Code) -> Code {
    // SAFETY: by the caller's word.
    unsafe { state.write(configured("async").and_then(|text| text.parse().ok()).unwrap_or(SUCCESS)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommFinalize(_comm: *const Comm) -> Code {
    called("ncclCommFinalize")
}

/// # Safety
/// As nccl.h says: a communicator that is given back once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(comm: *mut Comm) -> Code {
    let code = called("ncclCommDestroy");
    // SAFETY: made by ncclCommInitRank, given back once.
    drop(unsafe { Box::from_raw(comm) });
    code
}

/// # Safety
/// As nccl.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(comm: *mut Comm) -> Code {
    let code = called("ncclCommAbort");
    // SAFETY: by the caller's word. Graphs may still hold it, so it is left to the end of the process.
    let room = unsafe { &(*comm).room };
    lock(&room.state).aborted = true;
    room.moved.notify_all();
    code
}

/// # Safety
/// As nccl.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGather(
    send: *const c_void,
    gathered: *mut c_void,
    count: usize,
    kind: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> Code {
    let code = called("ncclAllGather");
    if code != SUCCESS || kind != FLOAT32 {
        return if code == SUCCESS { INVALID_ARGUMENT } else { code };
    }
    // SAFETY: by the caller's word.
    let kernel = unsafe { (*comm).kernel };
    let pieces = configured("pieces").and_then(|text| text.parse().ok()).unwrap_or(1);
    for piece in 1..=pieces {
        let entry: extern "C" fn(u64, u64, u64, u64, u64) = if piece == pieces { gather } else { prepare };
        let parameters = [entry as usize as u64, comm as u64, send as u64, gathered as u64, 4 * count as u64, 0];
        let code = driver::launch(kernel, stream, parameters);
        if code != SUCCESS {
            return code;
        }
    }
    SUCCESS
}

/// A piece before the last.
extern "C" fn prepare(_: u64, _: u64, _: u64, _: u64, _: u64) {}

/// What the launched kernel does, when the mock driver comes to it.
extern "C" fn gather(comm: u64, send: u64, gathered: u64, bytes: u64, _: u64) {
    // SAFETY: the communicator outlives its collectives, and the test's device memory is host memory of at least these sizes.
    unsafe {
        let comm = &*(comm as *const Comm);
        let mine = std::slice::from_raw_parts(send as *const u8, bytes as usize).to_vec();
        let Some(all) = comm.room.meet(comm.rank, comm.ranks, mine) else { return };
        for (rank, part) in all.iter().enumerate() {
            std::ptr::copy_nonoverlapping(part.as_ptr(), (gathered as *mut u8).add(rank * part.len()), part.len());
        }
    }
}

/// The mock driver, found as NCCL finds the real one: by its SONAME, already loaded.
mod driver {
    use super::*;

    #[repr(C)]
    struct LaunchConfig {
        grid: [c_uint; 3],
        block: [c_uint; 3],
        shared_bytes: c_uint,
        stream: *mut c_void,
        attributes: *const c_void,
        attribute_count: c_uint,
    }

    fn symbol(name: &CStr) -> Option<*mut c_void> {
        // SAFETY: NUL-terminated names; the handle stays open.
        let found = unsafe { libc::dlsym(libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW), name.as_ptr()) };
        (!found.is_null()).then_some(found)
    }

    /// The kernel of an all-gather, as the driver names NCCL's: mangled.
    pub fn kernel() -> Option<usize> {
        let usual = "_Z31ncclDevKernel_AllGather_RING_LL24ncclDevKernelArgsStorageILm4096EE";
        let name = CString::new(configured("kernel").unwrap_or_else(|| usual.into())).expect("no NUL");
        let mut function = 0usize;
        // SAFETY: the mock's function of this name has this type, and takes any module.
        let code = unsafe {
            let find: extern "C" fn(*mut usize, usize, *const c_char) -> Code =
                std::mem::transmute(symbol(c"cuModuleGetFunction")?);
            find(&raw mut function, 0, name.as_ptr())
        };
        (code == SUCCESS).then_some(function)
    }

    /// Puts the kernel on `stream`, or into its capture.
    pub fn launch(function: usize, stream: *mut c_void, parameters: [u64; 6]) -> Code {
        let Some(launch) = symbol(c"cuLaunchKernelEx") else { return INVALID_ARGUMENT };
        // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, set.
        let mut attribute = [0u32; 18];
        (attribute[0], attribute[2]) = (6, 1);
        let config = LaunchConfig {
            grid: [1; 3],
            block: [96, 1, 1],
            shared_bytes: 0,
            stream,
            attributes: attribute.as_ptr().cast(),
            attribute_count: c_uint::from(configured("programmatic").is_some()),
        };
        let pointers = parameters.each_ref().map(|parameter| std::ptr::from_ref(parameter).cast::<u8>());
        // SAFETY: the mock's function of this name has this type; the function has six parameters of eight bytes, and the mock copies them.
        unsafe {
            let launch: extern "C" fn(*const LaunchConfig, usize, *const *const u8, *mut c_void) -> Code =
                std::mem::transmute(launch);
            launch(&raw const config, function, pointers.as_ptr(), std::ptr::null_mut())
        }
    }
}
