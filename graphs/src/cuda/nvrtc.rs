//! NVRTC: a translation unit of CUDA C++ becomes a CUBIN for one named architecture. Needs no GPU and no driver.
//!
//! Called by `CudaDevice::prepare` (through `modules`) and by the kernel compile checks. **Invariants:** the same unit, options
//! and compiler give the same CUBIN, from the disk cache or fresh; a compile error carries the compiler's log; nothing is
//! compiled with fast math (`contract::NVRTC_NUMERIC_FLAGS`).
//!
//! The functions are looked up in the library that `libs` chose: a table of ours, because cudarc's loader panics when a name
//! does not open. Real `sm_` targets give a CUBIN: PTX of a newer compiler would be refused by an older driver.

use super::cache::{Cache, CacheKey};
use super::dl::Library;
use super::libs::{Found, LibraryError, NVRTC};
use slotgraph_kernels::contract::NVRTC_NUMERIC_FLAGS;
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Stack of a compiling thread: NVRTC recurses deeper than a thread's usual 2 MiB allow for large kernels.
const COMPILER_STACK: usize = 32 << 20;

type Program = *mut std::ffi::c_void;

/// NVRTC's functions, with the C types of nvrtc.h (`nvrtcResult` is an int, 0 is success).
struct Functions {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
}

/// The compiler, ready.
pub struct Nvrtc {
    functions: Functions,
    /// Major and minor.
    pub version: (u32, u32),
    /// The file it was loaded from, and its size: NVRTC has no patch number, so the size stands in for it.
    pub path: PathBuf,
    pub file_bytes: u64,
}

/// One translation unit to compile.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Unit {
    /// Shown in messages and in the line table, such as `norm_gemm.cu`.
    pub name: String,
    pub text: String,
}

/// What compiling gave.
#[derive(Clone, Debug)]
pub struct Cubin {
    pub image: Vec<u8>,
    /// The compiler's log: warnings, and one block per function from ptxas.
    pub log: String,
    pub cached: bool,
    pub ms: f64,
}

/// Resources of one function, as ptxas reports them.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct FunctionUse {
    pub function: String,
    pub registers: u32,
    pub stack_bytes: u32,
    pub spill_store_bytes: u32,
    pub spill_load_bytes: u32,
    pub shared_bytes: u32,
}

/// Why a unit did not compile.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    #[error("{unit} does not compile for {arch}: {reason}\n{log}")]
    Source { unit: String, arch: String, reason: String, log: String },
    #[error("NVRTC call {call} failed for {unit}: {reason}")]
    Call { call: &'static str, unit: String, reason: String },
}

impl Nvrtc {
    /// Takes the functions out of a library that was found.
    pub fn new(found: &Found) -> Result<Nvrtc, LibraryError> {
        let library = &found.library;
        let missing = |function: &str| LibraryError::Symbol {
            path: found.path.clone(),
            function: function.to_owned(),
            title: NVRTC.title,
        };
        // SAFETY: each type is that of the function of the same name in nvrtc.h, unchanged from CUDA 11.1 to 13.
        let functions = unsafe {
            Functions {
                version: symbol(library, c"nvrtcVersion").ok_or_else(|| missing("nvrtcVersion"))?,
                error_string: symbol(library, c"nvrtcGetErrorString").ok_or_else(|| missing("nvrtcGetErrorString"))?,
                create: symbol(library, c"nvrtcCreateProgram").ok_or_else(|| missing("nvrtcCreateProgram"))?,
                destroy: symbol(library, c"nvrtcDestroyProgram").ok_or_else(|| missing("nvrtcDestroyProgram"))?,
                compile: symbol(library, c"nvrtcCompileProgram").ok_or_else(|| missing("nvrtcCompileProgram"))?,
                log_size: symbol(library, c"nvrtcGetProgramLogSize")
                    .ok_or_else(|| missing("nvrtcGetProgramLogSize"))?,
                log: symbol(library, c"nvrtcGetProgramLog").ok_or_else(|| missing("nvrtcGetProgramLog"))?,
                cubin_size: symbol(library, c"nvrtcGetCUBINSize").ok_or_else(|| missing("nvrtcGetCUBINSize"))?,
                cubin: symbol(library, c"nvrtcGetCUBIN").ok_or_else(|| missing("nvrtcGetCUBIN"))?,
            }
        };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are to live ints.
        let code = unsafe { (functions.version)(&raw mut major, &raw mut minor) };
        if code != 0 || major <= 0 {
            return Err(missing("nvrtcVersion (it failed)"));
        }
        let file_bytes = std::fs::metadata(&found.path).map_or(0, |metadata| metadata.len());
        let version = (major.unsigned_abs(), minor.unsigned_abs());
        Ok(Nvrtc { functions, version, path: found.path.clone(), file_bytes })
    }

    /// Compiler and options as one line; part of the contract hash.
    pub fn identity(&self, arch: &str) -> String {
        let (major, minor) = self.version;
        format!("nvrtc {major}.{minor} {} {}", self.file_bytes, options(arch).join(" "))
    }

    /// Compiles one unit for `arch` (such as `sm_90a`), or takes it from the cache.
    pub fn compile(&self, unit: &Unit, arch: &str, cache: &Cache) -> Result<Cubin, CompileError> {
        let start = Instant::now();
        let identity = self.identity(arch);
        let key = CacheKey::of(&[identity.as_bytes(), unit.name.as_bytes(), unit.text.as_bytes()]);
        if let Some((image, log)) = cache.read(&key) {
            return Ok(Cubin { image, log, cached: true, ms: start.elapsed().as_secs_f64() * 1e3 });
        }
        let (image, log) = self.compile_fresh(unit, arch)?;
        cache.write(&key, &image, &log);
        Ok(Cubin { image, log, cached: false, ms: start.elapsed().as_secs_f64() * 1e3 })
    }

    /// Compiles all units on `threads` threads; results in the order of `units`, the first error otherwise.
    pub fn compile_all(
        &self,
        units: &[Unit],
        arch: &str,
        cache: &Cache,
        threads: usize,
    ) -> Result<Vec<Cubin>, CompileError> {
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(unit) = units.get(index) else { return done };
                done.push((index, self.compile(unit, arch, cache)));
            }
        };
        let mut results: Vec<(usize, Result<Cubin, CompileError>)> = std::thread::scope(|scope| {
            let spawn = || {
                std::thread::Builder::new()
                    .name("nvrtc".into())
                    .stack_size(COMPILER_STACK)
                    .spawn_scoped(scope, work)
                    .expect("the process may start a few threads")
            };
            let workers: Vec<_> = (0..threads.clamp(1, units.len().max(1))).map(|_| spawn()).collect();
            let join = |worker: std::thread::ScopedJoinHandle<'_, Vec<_>>| match worker.join() {
                Ok(done) => done,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            workers.into_iter().flat_map(join).collect()
        });
        results.sort_by_key(|(index, _)| *index);
        results.into_iter().map(|(_, result)| result).collect()
    }

    fn compile_fresh(&self, unit: &Unit, arch: &str) -> Result<(Vec<u8>, String), CompileError> {
        let text = CString::new(unit.text.as_str())
            .map_err(|_| self.call("nvrtcCreateProgram", unit, "the source holds a NUL"))?;
        let name = CString::new(unit.name.as_str())
            .map_err(|_| self.call("nvrtcCreateProgram", unit, "the name holds a NUL"))?;
        let program = OwnedProgram::create(&self.functions, &text, &name)
            .map_err(|code| self.failed("nvrtcCreateProgram", unit, code))?;

        let options: Vec<CString> = options(arch)
            .into_iter()
            .map(|option| CString::new(option).expect("the options are ours and the architecture's name has no NUL"))
            .collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let count = c_int::try_from(pointers.len()).expect("there are few options");
        // SAFETY: the program is live; `pointers` holds `count` NUL-terminated strings that outlive the call.
        let code = unsafe { (self.functions.compile)(program.handle, count, pointers.as_ptr()) };
        let log = program.bytes(self.functions.log_size, self.functions.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
        if code != 0 {
            let reason = self.text(code);
            return Err(CompileError::Source { unit: unit.name.clone(), arch: arch.to_owned(), reason, log });
        }
        let image = program
            .bytes(self.functions.cubin_size, self.functions.cubin)
            .map_err(|code| self.failed("nvrtcGetCUBIN", unit, code))?;
        if image.is_empty() {
            return Err(self.call(
                "nvrtcGetCUBIN",
                unit,
                "the CUBIN is empty: the target must be a real architecture, sm_NN",
            ));
        }
        Ok((image, log))
    }

    fn failed(&self, call: &'static str, unit: &Unit, code: c_int) -> CompileError {
        self.call(call, unit, &self.text(code))
    }

    fn call(&self, call: &'static str, unit: &Unit, reason: &str) -> CompileError {
        CompileError::Call { call, unit: unit.name.clone(), reason: reason.to_owned() }
    }

    fn text(&self, code: c_int) -> String {
        // SAFETY: nvrtcGetErrorString accepts any code and returns a static NUL-terminated string.
        let text = unsafe { (self.functions.error_string)(code) };
        if text.is_null() {
            return format!("code {code}");
        }
        // SAFETY: not NULL, and static.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// The options of every compilation. `ptxas -v` puts registers and spills into the log and changes no code.
fn options(arch: &str) -> Vec<String> {
    let mut options = vec![format!("--gpu-architecture={arch}"), "--std=c++17".into(), "-default-device".into()];
    options.extend(NVRTC_NUMERIC_FLAGS.iter().map(|flag| (*flag).to_owned()));
    options.extend(["-lineinfo".into(), "--ptxas-options=-v".into()]);
    options
}

/// An NVRTC program, destroyed when dropped.
struct OwnedProgram<'a> {
    handle: Program,
    functions: &'a Functions,
}

impl<'a> OwnedProgram<'a> {
    fn create(functions: &'a Functions, text: &CStr, name: &CStr) -> Result<Self, c_int> {
        let mut handle: Program = std::ptr::null_mut();
        // SAFETY: `handle` is live; both strings are NUL-terminated and NVRTC copies them; there are no headers.
        let code = unsafe {
            (functions.create)(&raw mut handle, text.as_ptr(), name.as_ptr(), 0, std::ptr::null(), std::ptr::null())
        };
        if code == 0 { Ok(OwnedProgram { handle, functions }) } else { Err(code) }
    }

    /// What a pair of size and content functions gives.
    fn bytes(
        &self,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        content: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, c_int> {
        let mut count = 0usize;
        // SAFETY: the program is live and `count` is a live usize.
        let code = unsafe { size(self.handle, &raw mut count) };
        if code != 0 {
            return Err(code);
        }
        let mut bytes = vec![0u8; count];
        // SAFETY: the program is live and `bytes` has the length that the size function asked for.
        let code = unsafe { content(self.handle, bytes.as_mut_ptr().cast()) };
        if code == 0 { Ok(bytes) } else { Err(code) }
    }
}

impl Drop for OwnedProgram<'_> {
    fn drop(&mut self) {
        // SAFETY: `create` gave the handle and nothing else destroys it. A failure would leak a little host memory.
        let _ = unsafe { (self.functions.destroy)(&raw mut self.handle) };
    }
}

/// Symbol `name` as a function of type F.
///
/// # Safety
/// F must be the `extern "C" fn` type of that function.
unsafe fn symbol<F: Copy>(library: &Library, name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*const ()>()) };
    let address = library.address(name)?;
    // SAFETY: F is a function pointer of pointer size by the assertion, of the right type by the caller; not NULL.
    Some(unsafe { std::mem::transmute_copy(&address) })
}

/// Registers, stack, spills and static shared memory of each function in a compiler log.
pub fn function_uses(log: &str) -> Vec<FunctionUse> {
    let mut uses: Vec<FunctionUse> = Vec::new();
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let function = rest.split('\'').next().unwrap_or_default().to_owned();
            uses.push(FunctionUse { function, ..FunctionUse::default() });
            continue;
        }
        let Some(last) = uses.last_mut() else { continue };
        for part in line.split(',') {
            let words: Vec<&str> = part.split_whitespace().collect();
            let value = words.iter().find_map(|word| word.parse::<u32>().ok());
            let field = if part.contains("stack frame") {
                &mut last.stack_bytes
            } else if part.contains("spill stores") {
                &mut last.spill_store_bytes
            } else if part.contains("spill loads") {
                &mut last.spill_load_bytes
            } else if part.contains("registers") {
                &mut last.registers
            } else if part.contains("bytes smem") {
                &mut last.shared_bytes
            } else {
                continue;
            };
            *field = value.unwrap_or(*field);
        }
    }
    uses
}

#[cfg(test)]
#[path = "nvrtc_tests.rs"]
mod tests;
