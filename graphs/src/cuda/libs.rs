//! Finds the CUDA libraries on this machine and opens them: the driver (libcuda.so.1) and the run-time compiler (NVRTC).
//!
//! Called once by `CudaDevice` while it prepares, by `doctor` and by the kernel compile checks. **Invariants:** a library is
//! opened by the path that is reported, or the error says every place that was looked in and the flag that helps; the
//! driver's functions that cudarc calls come from that same file; nothing here changes the environment.
//!
//! NVRTC is opened by absolute path and used through a table of our own (`nvrtc`), because cudarc's loader asks ld.so by
//! bare names, takes whatever opens first, and panics when nothing does. The driver is used through cudarc: loading it here
//! first makes its name known to ld.so, and `verify_driver` checks that the functions did come from it (a toolkit's `stubs`
//! folder on LD_LIBRARY_PATH would be taken instead, and every call would fail).

use super::dl::Library;
use std::ffi::{CStr, OsString};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

/// One library: what it is called and how it is recognised.
#[derive(Debug)]
pub struct LibrarySpec {
    /// For messages.
    pub title: &'static str,
    /// File names accepted, best first.
    pub files: &'static [&'static str],
    /// A function that the library must have.
    pub symbol: &'static CStr,
    /// Files of the same folder to open first, by prefix.
    pub before: &'static [&'static str],
    /// What a user who has none can do, besides `--lib-dir`.
    pub remedy: &'static str,
}

/// The driver's user-space library, installed with the kernel module.
pub const DRIVER: LibrarySpec = LibrarySpec {
    title: "the NVIDIA driver",
    files: &["libcuda.so.1"],
    symbol: c"cuInit",
    before: &[],
    remedy: "install the NVIDIA driver, start the container with GPU access, or run on the CPU with --device cpu",
};

/// The run-time compiler. It opens its builtins by bare name and has no RUNPATH, so those of its folder are opened first.
pub const NVRTC: LibrarySpec = LibrarySpec {
    title: "NVRTC, the CUDA run-time compiler",
    files: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    symbol: c"nvrtcVersion",
    before: &["libnvrtc-builtins.so."],
    remedy: "install a CUDA toolkit or the Python wheel nvidia-cuda-nvrtc",
};

/// NCCL; needed only by `--transport nccl`.
pub const NCCL: LibrarySpec = LibrarySpec {
    title: "NCCL",
    files: &["libnccl.so.2", "libnccl.so"],
    symbol: c"ncclGetVersion",
    before: &[],
    remedy: "install NCCL or the Python wheel nvidia-nccl-cu13, or use another --transport",
};

/// Folders where a driver's libcuda.so.1 lies when ld.so does not know it (containers, NixOS, WSL).
const DRIVER_FOLDERS: [&str; 6] = [
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/run/opengl-driver/lib",
    "/usr/lib/wsl/lib",
];

/// Why a library cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    #[error(
        "{file} ({title}) was not found; looked {looked}. To use it: {remedy}; or give its folder with --lib-dir",
        file = .spec.files[0], title = .spec.title, remedy = .spec.remedy
    )]
    NotFound { spec: &'static LibrarySpec, looked: String },
    #[error(
        "the driver's functions come from {got}, not from {want}: a toolkit's stub library stands in front of the driver; \
         take its folder out of LD_LIBRARY_PATH"
    )]
    Stub { want: PathBuf, got: PathBuf },
    #[error("{path} has no function {function}: it is not {title} that slotgraph can use")]
    Symbol { path: PathBuf, function: String, title: &'static str },
}

/// A library that was found and opened.
#[derive(Clone, Debug)]
pub struct Found {
    pub library: Library,
    pub path: PathBuf,
    /// Which rule found it, such as `--lib-dir`.
    pub why: String,
}

/// A folder to look in, with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Folder {
    path: PathBuf,
    why: String,
}

/// Where to look, in order.
pub struct Search {
    /// From `--lib-dir` (or its variable): may hold any library, the driver too.
    given: Vec<Folder>,
    /// Toolkits, in order.
    toolkits: Vec<Folder>,
    /// Python interpreters whose wheels count; asked only when something is still missing.
    pythons: Vec<PathBuf>,
    /// What their wheels gave, once asked.
    wheels: Option<Vec<Folder>>,
}

impl Search {
    /// The search order of this process: `--lib-dir`, SLOTGRAPH_LIB_DIR, LD_LIBRARY_PATH, CUDA_HOME, CUDA_PATH,
    /// /usr/local/cuda, the wheels of every python3, ld.so.
    pub fn new(lib_dirs: &[PathBuf]) -> Search {
        Search::with_environment(lib_dirs, |name| std::env::var_os(name))
    }

    fn with_environment(lib_dirs: &[PathBuf], variable: impl Fn(&str) -> Option<OsString>) -> Search {
        let folder = |path: PathBuf, why: &str| Folder { path, why: why.to_owned() };
        let paths = |name: &str| -> Vec<PathBuf> {
            let value = variable(name).unwrap_or_default();
            std::env::split_paths(&value).filter(|path| !path.as_os_str().is_empty()).collect()
        };
        let mut given: Vec<Folder> = lib_dirs.iter().map(|path| folder(path.clone(), "--lib-dir")).collect();
        given.extend(paths("SLOTGRAPH_LIB_DIR").into_iter().map(|path| folder(path, "SLOTGRAPH_LIB_DIR")));

        let mut toolkits: Vec<Folder> =
            paths("LD_LIBRARY_PATH").into_iter().map(|path| folder(path, "LD_LIBRARY_PATH")).collect();
        let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(|name| Some((variable(name)?, name)));
        for (root, why) in homes.chain([(OsString::from("/usr/local/cuda"), "the usual place")]) {
            for part in ["lib64", "targets/x86_64-linux/lib"] {
                toolkits.push(folder(Path::new(&root).join(part), why));
            }
        }

        let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(&variable);
        let mut pythons: Vec<PathBuf> = environments.map(|root| Path::new(&root).join("bin/python3")).collect();
        pythons.extend(paths("PATH").into_iter().map(|path| path.join("python3")));
        Search { given, toolkits, pythons, wheels: None }
    }

    /// Finds and opens the driver: `--lib-dir`, then ld.so, then the folders of containers; never a toolkit's.
    pub fn driver(&mut self) -> Result<Found, LibraryError> {
        let mut attempts = Attempts::new(&DRIVER);
        for folder in &self.given {
            if let Some(found) = attempts.folder(folder) {
                return Ok(found);
            }
        }
        if let Some(found) = attempts.by_name() {
            return Ok(found);
        }
        for path in DRIVER_FOLDERS {
            if let Some(found) = attempts.folder(&Folder { path: path.into(), why: "the usual place".into() }) {
                return Ok(found);
            }
        }
        Err(attempts.not_found())
    }

    /// Finds and opens a toolkit library.
    pub fn toolkit(&mut self, spec: &'static LibrarySpec) -> Result<Found, LibraryError> {
        let mut attempts = Attempts::new(spec);
        for folder in self.given.iter().chain(&self.toolkits) {
            if let Some(found) = attempts.folder(folder) {
                return Ok(found);
            }
        }
        let wheels = self.wheels.get_or_insert_with(|| wheel_folders(&self.pythons));
        if let Some(found) = attempts.wheels(wheels) {
            return Ok(found);
        }
        if let Some(found) = attempts.by_name() {
            return Ok(found);
        }
        Err(attempts.not_found())
    }
}

/// The tries at one library, kept for the message.
struct Attempts {
    spec: &'static LibrarySpec,
    looked: String,
}

impl Attempts {
    fn new(spec: &'static LibrarySpec) -> Attempts {
        Attempts { spec, looked: String::new() }
    }

    fn note(&mut self, text: std::fmt::Arguments<'_>) {
        let separator = if self.looked.is_empty() { "" } else { ", " };
        write!(self.looked, "{separator}{text}").expect("a String takes what is written to it");
    }

    /// The library in `folder`, if it is there and opens.
    fn folder(&mut self, folder: &Folder) -> Option<Found> {
        let Some(path) = self.spec.files.iter().map(|name| folder.path.join(name)).find(|path| path.is_file()) else {
            self.note(format_args!("in {} ({})", folder.path.display(), folder.why));
            return None;
        };
        self.file(path, folder)
    }

    /// The library in some wheel. Toolkit versions lie side by side there, so the better name wins over the folder.
    fn wheels(&mut self, folders: &[Folder]) -> Option<Found> {
        let candidates = self.spec.files.iter().flat_map(|name| folders.iter().map(move |folder| (name, folder)));
        for (name, folder) in candidates {
            let path = folder.path.join(name);
            if path.is_file()
                && let Some(found) = self.file(path, folder)
            {
                return Some(found);
            }
        }
        self.note(format_args!("in {} wheel folders of python3", folders.len()));
        None
    }

    fn file(&mut self, path: PathBuf, folder: &Folder) -> Option<Found> {
        let path = std::fs::canonicalize(&path).unwrap_or(path);
        match self.open(&path) {
            Ok(library) => Some(Found { library, path, why: folder.why.clone() }),
            Err(reason) => {
                self.note(format_args!("at {} ({}: {reason})", path.display(), folder.why));
                None
            }
        }
    }

    /// The library that ld.so finds by itself.
    fn by_name(&mut self) -> Option<Found> {
        for name in self.spec.files {
            match Library::open(Path::new(name)) {
                Ok(library) => {
                    if let Some(path) = library.file_of(self.spec.symbol) {
                        let path = std::fs::canonicalize(&path).unwrap_or(path);
                        return Some(Found { library, path, why: "ld.so".into() });
                    }
                    self.note(format_args!("by name {name} (it lacks {})", self.spec.symbol.to_string_lossy()));
                }
                Err(reason) => self.note(format_args!("by name (ld.so: {reason})")),
            }
        }
        None
    }

    fn open(&self, path: &Path) -> Result<Library, String> {
        for companion in companions(path, self.spec.before) {
            Library::open(&companion)?;
        }
        let library = Library::open(path)?;
        match library.address(self.spec.symbol) {
            Some(_) => Ok(library),
            None => Err(format!("it lacks {}", self.spec.symbol.to_string_lossy())),
        }
    }

    fn not_found(self) -> LibraryError {
        LibraryError::NotFound { spec: self.spec, looked: self.looked }
    }
}

/// Files beside `path` whose names start with one of `prefixes`. The wheels also carry an `.alt.` pair, which is another
/// build under the same SONAME: not ours.
fn companions(path: &Path, prefixes: &[&str]) -> Vec<PathBuf> {
    let Some(entries) = path.parent().and_then(|folder| std::fs::read_dir(folder).ok()) else { return Vec::new() };
    let wanted = |name: &str| prefixes.iter().any(|prefix| name.starts_with(prefix)) && !name.contains(".alt.");
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok())
        .filter(|entry| wanted(&entry.file_name().to_string_lossy()))
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found
}

/// Library folders of the wheels that the interpreters see: every entry of `sys.path` (so that PYTHONPATH and
/// `pip --target` count), its `nvidia/*/lib` and `torch/lib`.
fn wheel_folders(pythons: &[PathBuf]) -> Vec<Folder> {
    let mut folders: Vec<Folder> = Vec::new();
    let mut asked: Vec<PathBuf> = Vec::new();
    for python in pythons {
        let Ok(real) = std::fs::canonicalize(python) else { continue };
        // A virtual environment's python3 is a link to the system's and still has its own sys.path: compare the links.
        let identity = if is_environment(python) { python.clone() } else { real };
        if asked.contains(&identity) {
            continue;
        }
        asked.push(identity);
        for line in sys_path(python) {
            let base = Path::new(&line);
            let mut found: Vec<PathBuf> = std::fs::read_dir(base.join("nvidia"))
                .map(|entries| entries.filter_map(|entry| Some(entry.ok()?.path().join("lib"))).collect())
                .unwrap_or_default();
            found.sort();
            found.push(base.join("torch/lib"));
            for path in found.into_iter().filter(|path| path.is_dir()) {
                if folders.iter().all(|folder| folder.path != path) {
                    folders.push(Folder { path, why: format!("the wheels of {}", python.display()) });
                }
            }
        }
    }
    folders
}

fn is_environment(python: &Path) -> bool {
    python.parent().and_then(Path::parent).is_some_and(|root| root.join("pyvenv.cfg").is_file())
}

fn sys_path(python: &Path) -> Vec<String> {
    let program = "import sys\nfor p in sys.path:\n  print(p)";
    let output = Command::new(python).args(["-c", program]).stdin(Stdio::null()).stderr(Stdio::null()).output();
    match output {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
        }
        _ => Vec::new(),
    }
}

/// The libraries a CUDA device needs, open.
#[derive(Clone, Debug)]
pub struct Libraries {
    pub driver: Found,
    pub nvrtc: Found,
}

impl Libraries {
    /// Finds, opens and checks them. Ranks share the result: a second call with the same folders is free.
    pub fn load(lib_dirs: &[PathBuf]) -> Result<Arc<Libraries>, LibraryError> {
        static LOADED: Mutex<Vec<(Vec<PathBuf>, Arc<Libraries>)>> = Mutex::new(Vec::new());
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, libraries)) = loaded.iter().find(|(folders, _)| folders == lib_dirs) {
            return Ok(libraries.clone());
        }
        let driver = load_driver(lib_dirs)?;
        let nvrtc = Search::new(lib_dirs).toolkit(&NVRTC)?;
        let libraries = Arc::new(Libraries { driver, nvrtc });
        loaded.push((lib_dirs.to_vec(), libraries.clone()));
        Ok(libraries)
    }
}

/// Finds, opens and checks the driver alone: enough to count devices.
pub fn load_driver(lib_dirs: &[PathBuf]) -> Result<Found, LibraryError> {
    let driver = Search::new(lib_dirs).driver()?;
    verify_driver(&driver)?;
    Ok(driver)
}

/// That cudarc's functions are those of the driver that was opened.
fn verify_driver(driver: &Found) -> Result<(), LibraryError> {
    // SAFETY: `culib` opens the library by name and panics if no name opens; "libcuda.so.1" is among its names and is loaded
    // already, so ld.so answers with it at the latest.
    let cudarc = unsafe { cudarc::driver::sys::culib() };
    // SAFETY: the symbol is only looked at as an address, never called through this type.
    let symbol = unsafe { cudarc.get::<unsafe extern "C" fn()>(b"cuInit\0") };
    let got = symbol
        .ok()
        .and_then(|function| super::dl::file_of_address(*function as *const std::ffi::c_void))
        .map(|path| std::fs::canonicalize(&path).unwrap_or(path))
        .unwrap_or_default();
    if got == driver.path { Ok(()) } else { Err(LibraryError::Stub { want: driver.path.clone(), got }) }
}

#[cfg(test)]
#[path = "libs_tests.rs"]
mod tests;
