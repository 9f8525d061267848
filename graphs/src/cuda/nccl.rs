//! NCCL through a table of our own: found like the other libraries, checked for its version, every error with NCCL's own words and with what in
//! the environment may have caused it.
//!
//! Used by the transport `nccl` and by its smoke test. Types and numbers are those of nccl.h; functions that every version since
//! `FLOOR` has. **Invariant:** a communicator is made, used and given back by one rank; nothing here waits for a GPU but `destroy`.

use super::dl::Library;
use super::error::CudaError;
use super::libs::{LibraryError, NCCL, Search};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

type Code = c_int;
type Comm = *mut c_void;

const SUCCESS: Code = 0;
const FLOAT32: c_int = 7;
const IN_PROGRESS: Code = 7;
/// Bytes of an ncclUniqueId.
const ID_BYTES: usize = 128;
/// Shared memory that NCCL takes for each pair of ranks whose GPUs do not reach each other, about.
const SHM_BYTES: u64 = 33 << 20;

/// `ncclUniqueId`, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([c_char; ID_BYTES]);

macro_rules! table {
    ($($field:ident: $name:literal = fn($($arg:ty),*) -> $result:ty;)*) => {
        struct Functions { $($field: unsafe extern "C" fn($($arg),*) -> $result,)* }

        impl Functions {
            fn of(library: &Library, path: &Path) -> Result<Functions, LibraryError> {
                Ok(Functions { $($field: {
                    let address = library.address($name).ok_or_else(|| LibraryError::Symbol {
                        path: path.to_owned(),
                        function: $name.to_string_lossy().into_owned(),
                        title: NCCL.title,
                    })?;
                    // SAFETY: the symbol is the function of this name in nccl.h, whose C signature is the one given in the table.
                    unsafe { std::mem::transmute::<*const c_void, unsafe extern "C" fn($($arg),*) -> $result>(address) }
                },)* })
            }
        }
    };
}

table! {
    version: c"ncclGetVersion" = fn(*mut c_int) -> Code;
    error_string: c"ncclGetErrorString" = fn(Code) -> *const c_char;
    last_error: c"ncclGetLastError" = fn(Comm) -> *const c_char;
    unique_id: c"ncclGetUniqueId" = fn(*mut UniqueId) -> Code;
    init_rank: c"ncclCommInitRank" = fn(*mut Comm, c_int, UniqueId, c_int) -> Code;
    async_error: c"ncclCommGetAsyncError" = fn(Comm, *mut Code) -> Code;
    finalize: c"ncclCommFinalize" = fn(Comm) -> Code;
    destroy: c"ncclCommDestroy" = fn(Comm) -> Code;
    abort: c"ncclCommAbort" = fn(Comm) -> Code;
    all_gather: c"ncclAllGather" = fn(*const c_void, *mut c_void, usize, c_int, Comm, *mut c_void) -> Code;
}

/// The library, open and new enough.
pub struct Nccl {
    functions: Functions,
    /// 10,000 · major + 100 · minor + patch.
    pub version: u32,
    pub path: PathBuf,
    /// Which rule found it.
    pub why: String,
}

/// Oldest version for each compute capability (× 10): the first that carries kernels for it, and everything called here.
pub fn floor(capability: u32) -> u32 {
    match capability {
        100.. => 22_500,
        90.. => 21_600,
        _ => 21_400,
    }
}

/// 22809 as "2.28.9".
pub fn version_text(version: u32) -> String {
    format!("{}.{}.{}", version / 10_000, version % 10_000 / 100, version % 100)
}

/// Settles what NCCL reads from the environment. Called once, before any rank has a thread.
///
/// Multicast (NVLS) stays off unless it was asked for: its sums depend on the allocation history, and on shared machines it may be missing.
/// Graphs and eager calls of a rank are in order on one stream, so NCCL need not serialise them by event nodes inside every graph.
pub fn prepare_environment(nvls: bool) {
    for (name, value) in [("NCCL_NVLS_ENABLE", if nvls { "1" } else { "0" }), ("NCCL_GRAPH_MIXING_SUPPORT", "0")] {
        if std::env::var_os(name).is_none() {
            // SAFETY: ranks have no threads yet and no library of NVIDIA's was asked to do anything, so nobody reads the environment through C;
            // Rust's own readers share a lock with this call.
            unsafe { std::env::set_var(name, value) };
        }
    }
}

impl Nccl {
    /// Finds and opens the library, and checks its version for GPUs of `capability` (× 10). Ranks share the result.
    pub fn load(lib_dirs: &[PathBuf], capability: u32) -> Result<Arc<Nccl>, CudaError> {
        static LOADED: Mutex<Vec<(Vec<PathBuf>, Arc<Nccl>)>> = Mutex::new(Vec::new());
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let known = loaded.iter().find(|(folders, _)| folders == lib_dirs).map(|(_, nccl)| nccl.clone());
        let nccl = match known {
            Some(nccl) => nccl,
            None => {
                let found = Search::new(lib_dirs).toolkit(&NCCL)?;
                let functions = Functions::of(&found.library, &found.path)?;
                let mut version: c_int = 0;
                // SAFETY: `version` is a live int.
                let code = unsafe { (functions.version)(&raw mut version) };
                let version = u32::try_from(version).unwrap_or(0);
                let nccl = Arc::new(Nccl { functions, version, path: found.path, why: found.why });
                nccl.check("ncclGetVersion", code)?;
                loaded.push((lib_dirs.to_vec(), nccl.clone()));
                nccl
            }
        };
        let needed = floor(capability);
        if nccl.version < needed {
            let (have, path) = (nccl.version, nccl.path.clone());
            return Err(CudaError::OldNccl { have, needed, path });
        }
        Ok(nccl)
    }

    /// An identifier that the ranks of one communicator share, as words that travel.
    pub(super) fn unique_id(&self) -> Result<Vec<u64>, CudaError> {
        let mut id = UniqueId([0; ID_BYTES]);
        // SAFETY: `id` is live and as large as nccl.h has it.
        self.check("ncclGetUniqueId", unsafe { (self.functions.unique_id)(&raw mut id) })?;
        let bytes = id.0.map(|byte| byte as u8);
        Ok(bytes.chunks_exact(8).map(|eight| u64::from_le_bytes(eight.try_into().expect("eight bytes"))).collect())
    }

    /// Rank `rank` of `ranks` joins; returns when all have. The rank's context is current on this thread.
    pub(super) fn join(self: &Arc<Nccl>, id: &[u64], rank: usize, ranks: usize) -> Result<Communicator, CudaError> {
        let mut unique = UniqueId([0; ID_BYTES]);
        for (byte, given) in unique.0.iter_mut().zip(id.iter().flat_map(|word| word.to_le_bytes())) {
            *byte = given as c_char;
        }
        let mut comm: Comm = std::ptr::null_mut();
        // SAFETY: `comm` is a live pointer; the identifier came from `unique_id` of rank 0; the context is current by the caller's word.
        let code = unsafe { (self.functions.init_rank)(&raw mut comm, ranks as c_int, unique, rank as c_int) };
        self.check("ncclCommInitRank", code)?;
        Ok(Communicator { comm, aborted: false, nccl: self.clone() })
    }

    fn check(&self, call: &'static str, code: Code) -> Result<(), CudaError> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: any code may be asked; a NULL communicator asks for the last error of this thread. Both answers are NUL-terminated strings
        // that stay, or NULL.
        let (general, last) =
            unsafe { ((self.functions.error_string)(code), (self.functions.last_error)(std::ptr::null_mut())) };
        let text = |pointer: *const c_char| {
            // SAFETY: NUL-terminated when it is not NULL, as said above.
            if pointer.is_null() {
                String::new()
            } else {
                unsafe { CStr::from_ptr(pointer) }.to_string_lossy().trim().to_owned()
            }
        };
        let (general, last) = (text(general), text(last));
        let mut reason = format!("{call} failed with code {code} ({general})");
        if !last.is_empty() {
            write!(reason, ": {last}").expect("a String takes what is written to it");
        }
        let version = version_text(self.version);
        write!(reason, "; NCCL {version} at {}", self.path.display()).expect("a String takes what is written to it");
        reason.push_str(&circumstances(std::env::vars(), shared_memory()));
        Err(CudaError::Exchange(reason))
    }
}

/// What around the process may explain a failure: NCCL's variables, and a small /dev/shm.
fn circumstances(variables: impl Iterator<Item = (String, String)>, shm: Option<(u64, u64)>) -> String {
    const OURS: [&str; 2] = ["NCCL_NVLS_ENABLE", "NCCL_GRAPH_MIXING_SUPPORT"];
    let mut set: Vec<String> = variables
        .filter(|(name, _)| name.starts_with("NCCL_") && !OURS.contains(&name.as_str()))
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    set.sort();
    let mut text = String::new();
    if !set.is_empty() {
        text += &format!("; set in the environment: {}", set.join(" "));
    }
    if let Some((size, free)) = shm.filter(|(_, free)| *free < SHM_BYTES) {
        text += &format!(
            "; /dev/shm holds {size} bytes and has {free} free, and NCCL needs about {SHM_BYTES} there for each pair of GPUs that do not reach \
             each other: enlarge it (docker: --shm-size)"
        );
    }
    text
}

/// Size and free bytes of /dev/shm.
fn shared_memory() -> Option<(u64, u64)> {
    let mut facts = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: a NUL-terminated path and room for the answer.
    let code = unsafe { libc::statvfs(c"/dev/shm".as_ptr(), facts.as_mut_ptr()) };
    if code != 0 {
        return None;
    }
    // SAFETY: the call succeeded, and every bit pattern is a valid value of the structure.
    let facts = unsafe { facts.assume_init() };
    Some((facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize))
}

/// This rank's place in the communicator.
pub(super) struct Communicator {
    comm: Comm,
    aborted: bool,
    nccl: Arc<Nccl>,
}

// SAFETY: the handle belongs to this value alone; NCCL lets any thread that has the device current use it, one at a time, and `&mut self` or
// ownership gives that. `async_error` may be asked from `&self`: NCCL answers it under its own lock.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Puts on `stream` (or into its capture): `gathered[r · count …]` = rank r's `send`, `count` floats each.
    ///
    /// # Safety
    /// Both ranges are live on this rank's device until the collective, and every replay of its capture, has run.
    pub unsafe fn all_gather(
        &mut self,
        send: u64,
        gathered: u64,
        count: usize,
        stream: *mut c_void,
    ) -> Result<(), CudaError> {
        // SAFETY: the ranges are the caller's word; communicator and stream are live.
        let code = unsafe {
            (self.nccl.functions.all_gather)(
                send as *const c_void,
                gathered as *mut c_void,
                count,
                FLOAT32,
                self.comm,
                stream,
            )
        };
        self.nccl.check("ncclAllGather", code)
    }

    /// What went wrong behind the calls, if something did.
    pub fn check(&self) -> Result<(), CudaError> {
        let mut state: Code = SUCCESS;
        // SAFETY: the communicator is live, `state` is a live int.
        let asked = unsafe { (self.nccl.functions.async_error)(self.comm, &raw mut state) };
        self.nccl.check("ncclCommGetAsyncError", asked)?;
        if state == IN_PROGRESS { Ok(()) } else { self.nccl.check("an NCCL operation", state) }
    }

    /// Makes kernels that wait for other ranks leave. NCCL gives the communicator back only when no graph holds it any more, so this is done
    /// beside the caller, who goes on to drop its graphs.
    pub fn begin_abort(&mut self) {
        struct Handle(Comm);
        // SAFETY: the handle is used by the new thread alone from here on: `aborted` keeps everybody else away.
        unsafe impl Send for Handle {}
        impl Handle {
            fn comm(&self) -> Comm {
                self.0
            }
        }
        if std::mem::replace(&mut self.aborted, true) {
            return;
        }
        let (handle, nccl) = (Handle(self.comm), self.nccl.clone());
        let abort = move || {
            // SAFETY: the communicator is live, and this is the last call that is given it. What it says no longer matters.
            let _ = unsafe { (nccl.functions.abort)(handle.comm()) };
        };
        // Without a thread the process ends with the communicator alive, which its end aborts as well.
        let _ = std::thread::Builder::new().name("nccl-abort".into()).spawn(abort);
    }
}

impl Drop for Communicator {
    /// In order: every rank does this, with its stream empty and its graphs gone.
    fn drop(&mut self) {
        if !self.aborted {
            // SAFETY: the communicator is live and used no more. A failure leaves nothing to do.
            unsafe {
                let _ = (self.nccl.functions.finalize)(self.comm);
                let _ = (self.nccl.functions.destroy)(self.comm);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_and_their_floors_read_well() {
        assert_eq!(version_text(22_809), "2.28.9");
        assert!(floor(80) < floor(90) && floor(90) < floor(100) && floor(120) == floor(100));
        let old = CudaError::OldNccl { have: 21_305, needed: floor(90), path: "/opt/libnccl.so.2".into() };
        let text = old.to_string();
        assert!(text.contains("NCCL 2.13.5 at /opt/libnccl.so.2") && text.contains("2.16.0"), "{text}");
        assert!(text.contains("--lib-dir") && old.is_configuration());
    }

    #[test]
    fn circumstances_name_variables_and_a_small_shm() {
        let variables = || {
            [("PATH", "/bin"), ("NCCL_SOCKET_IFNAME", "none"), ("NCCL_NVLS_ENABLE", "0")]
                .map(|(a, b)| (a.into(), b.into()))
        };
        let text = circumstances(variables().into_iter(), Some((1 << 20, 4096)));
        assert!(text.contains("NCCL_SOCKET_IFNAME=none") && !text.contains("PATH") && !text.contains("NVLS"), "{text}");
        assert!(
            text.contains("/dev/shm holds 1048576 bytes and has 4096 free") && text.contains("--shm-size"),
            "{text}"
        );
        assert_eq!(circumstances(std::iter::empty(), Some((1 << 30, 1 << 30))), "");
    }
}
