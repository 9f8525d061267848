//! What the mock remembers: its configuration, live allocations, the open capture, and how often each call was made.

use std::alloc::Layout;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{CStr, c_int, c_void};
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

pub type Code = c_int;
pub const SUCCESS: Code = 0;
pub const INVALID_VALUE: Code = 1;
pub const OUT_OF_MEMORY: Code = 2;
pub const NOT_FOUND: Code = 500;
pub const PEER_ACCESS_ALREADY_ENABLED: Code = 704;
pub const CAPTURE_UNSUPPORTED: Code = 900;
pub const CAPTURE_INVALIDATED: Code = 901;

/// Alignment that cuMemAlloc promises.
const ALIGNMENT: usize = 256;

#[derive(Clone, Debug)]
pub struct Publish {
    pub counter: usize,
    pub ring: usize,
    pub entries: u64,
    pub words: usize,
}

#[derive(Clone, Debug)]
pub struct Config {
    pub driver: c_int,
    pub devices: c_int,
    pub memory: usize,
    pub functions: HashMap<String, Vec<usize>>,
    pub publish: HashMap<String, Publish>,
    /// Floats of a row, by the name of the kernel that exchanges over peer memory.
    pub exchange: HashMap<String, usize>,
    /// Sums that differ and that a cut changes, by the name of the kernel that compares forms.
    pub compare: HashMap<String, [u32; 2]>,
    /// Kernels whose first parameter is a C function to be called with the others.
    pub call: HashSet<String>,
    /// Whether devices reach each other's memory.
    pub peers: bool,
    pub fail: HashMap<String, u64>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Host = 1,
    Device = 2,
}

#[derive(Default)]
pub struct State {
    allocations: BTreeMap<usize, (usize, Kind)>,
    /// Device bytes in use; graphs count too.
    pub used: usize,
    /// By stream.
    pub captures: HashMap<usize, Capture>,
    /// Pairs of contexts of which the first may use the second's memory.
    pub ways: HashSet<(usize, usize)>,
    calls: HashMap<&'static str, u64>,
}

/// A capture that is open.
#[derive(Default)]
pub struct Capture {
    pub nodes: Vec<crate::graph::Node>,
    pub broken: bool,
}

pub fn config() -> &'static Config {
    static CONFIG: OnceLock<Config> = OnceLock::new();
    CONFIG.get_or_init(|| parse(&std::fs::read_to_string(config_path()).unwrap_or_default()))
}

/// Adds "thread call" to `calls.log` beside the library, where a test has put such a file.
pub fn log(call: &str) {
    let path = config_path().with_file_name("calls.log");
    let Ok(mut file) = std::fs::OpenOptions::new().append(true).open(path) else { return };
    let mut name = [0u8; 16];
    // SAFETY: the calling thread, and room for the longest name.
    unsafe { libc::pthread_getname_np(libc::pthread_self(), name.as_mut_ptr().cast(), name.len()) };
    let name = CStr::from_bytes_until_nul(&name).map(CStr::to_string_lossy).unwrap_or_default();
    // One write a line: threads share the file.
    file.write_all(format!("{name} {call}\n").as_bytes()).expect("the test's folder can be written");
}

pub fn state() -> MutexGuard<'static, State> {
    static STATE: OnceLock<Mutex<State>> = OnceLock::new();
    STATE.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// Counts a call; true if the configuration wants this one to fail.
    pub fn fails(&mut self, call: &'static str) -> bool {
        let made = self.calls.entry(call).or_default();
        *made += 1;
        config().fail.get(call) == Some(made)
    }

    pub fn allocate(&mut self, bytes: usize, kind: Kind) -> Result<usize, Code> {
        if kind == Kind::Device {
            if bytes > config().memory - self.used {
                return Err(OUT_OF_MEMORY);
            }
            self.used += bytes;
        }
        // SAFETY: the layout has a size: the callers round up from at least one byte.
        let address = unsafe { std::alloc::alloc_zeroed(layout(bytes)) } as usize;
        self.allocations.insert(address, (bytes, kind));
        Ok(address)
    }

    pub fn free(&mut self, address: usize) -> Code {
        let Some((bytes, kind)) = self.allocations.remove(&address) else { return INVALID_VALUE };
        if kind == Kind::Device {
            self.used -= bytes;
        }
        // SAFETY: the address came from `allocate` with this size and was not freed before: it was in the table.
        unsafe { std::alloc::dealloc(address as *mut u8, layout(bytes)) };
        SUCCESS
    }

    /// What kind of memory `bytes` bytes from `address` are, if they lie in one allocation.
    pub fn kind_of(&self, address: usize, bytes: usize) -> Option<Kind> {
        let (base, (size, kind)) = self.allocations.range(..=address).next_back()?;
        (address - base + bytes <= *size).then_some(*kind)
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes.max(1), ALIGNMENT).expect("a test's allocation is small")
}

/// `mockcuda.conf` in the folder that this library was loaded from.
fn config_path() -> PathBuf {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: an address inside this library, and a live structure.
    let found = unsafe { libc::dladdr(config_path as *const c_void, &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return PathBuf::new();
    }
    // SAFETY: the loader's NUL-terminated name of this library.
    let library = PathBuf::from(unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned());
    library.with_file_name("mockcuda.conf")
}

fn parse(text: &str) -> Config {
    let mut config = Config {
        driver: 13_000,
        devices: 1,
        memory: 1 << 30,
        functions: HashMap::new(),
        publish: HashMap::new(),
        exchange: HashMap::new(),
        compare: HashMap::new(),
        call: HashSet::new(),
        peers: true,
        fail: HashMap::new(),
    };
    for line in text.lines().filter(|line| !line.is_empty()) {
        let mut words = line.split_whitespace();
        let (what, rest): (&str, Vec<&str>) = (words.next().unwrap_or_default(), words.collect());
        let number = |index: usize| rest[index].parse::<usize>().expect("the test writes numbers");
        match what {
            "driver" => config.driver = number(0) as c_int,
            "devices" => config.devices = number(0) as c_int,
            "memory" => config.memory = number(0),
            "function" => {
                let sizes = (1..rest.len()).map(number).collect();
                config.functions.insert(rest[0].to_owned(), sizes);
            }
            "publish" => {
                let publish =
                    Publish { counter: number(1), ring: number(2), entries: number(3) as u64, words: number(4) };
                config.publish.insert(rest[0].to_owned(), publish);
            }
            "exchange" => {
                config.exchange.insert(rest[0].to_owned(), number(1));
            }
            "compare" => {
                config.compare.insert(rest[0].to_owned(), [1, 2].map(|index| number(index) as u32));
            }
            "call" => {
                config.call.insert(rest[0].to_owned());
            }
            "peers" => config.peers = number(0) != 0,
            "fail" => {
                config.fail.insert(rest[0].to_owned(), number(1) as u64);
            }
            "silent" => config.publish.clear(),
            other => panic!("mockcuda.conf: {other}"),
        }
    }
    config
}
