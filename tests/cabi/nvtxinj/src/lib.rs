//! An NVTX injection library: counts the ranges that a process opens and closes, and writes the counts when it exits.
//!
//! Loaded by NVTX itself from NVTX_INJECTION64_PATH; the report goes to NVTXINJ_OUT, else to stderr:
//! `push N pop N other N unbalanced N`, then a line `N NAME` for each range name. `other` counts every other kind of call
//! (marks, start and end, domains): slotgraph makes none. `unbalanced` counts pops without a push on their thread.
//!
//! NVTX calls `InitializeInjectionNvtx2` once for every copy of itself in the process and hands over a function that gives
//! export tables; the functions put into a table's slots are then what the program's calls reach.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// NVTX_ETID_CALLBACKS: the table that gives the modules' tables.
const CALLBACKS: u32 = 1;
/// NVTX_CB_MODULE_CORE: marks and ranges of the default domain.
const CORE: c_int = 1;
/// NVTX_CB_MODULE_CORE2: the same for other domains.
const CORE2: c_int = 5;
/// NVTX_CBID_CORE_RangePushA and RangePop.
const PUSH_A: usize = 9;
const POP: usize = 11;

/// `NvtxExportTableCallbacks` of nvtxTypes.h.
#[repr(C)]
struct Callbacks {
    struct_size: usize,
    module_table: unsafe extern "C" fn(module: c_int, table: *mut *mut *mut *const c_void, size: *mut u32) -> c_int,
}

static PUSHES: AtomicU64 = AtomicU64::new(0);
static POPS: AtomicU64 = AtomicU64::new(0);
static OTHERS: AtomicU64 = AtomicU64::new(0);
static UNBALANCED: AtomicU64 = AtomicU64::new(0);
static NAMES: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());

thread_local! { static DEPTH: Cell<c_int> = const { Cell::new(0) }; }

unsafe extern "C" fn push(name: *const c_char) -> c_int {
    let name = if name.is_null() {
        "(null)".to_owned()
    } else {
        // SAFETY: nvtxRangePushA is given a NUL-terminated string that lives for the call.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    };
    PUSHES.fetch_add(1, Ordering::Relaxed);
    *NAMES.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default() += 1;
    DEPTH.with(|depth| depth.replace(depth.get() + 1))
}

extern "C" fn pop() -> c_int {
    POPS.fetch_add(1, Ordering::Relaxed);
    DEPTH.with(|depth| {
        if depth.get() == 0 {
            UNBALANCED.fetch_add(1, Ordering::Relaxed);
            return -1;
        }
        depth.set(depth.get() - 1);
        depth.get()
    })
}

/// Stands in for every function of whatever signature: its arguments are not looked at, and 0 is a valid return of each.
extern "C" fn other() -> u64 {
    OTHERS.fetch_add(1, Ordering::Relaxed);
    0
}

extern "C" fn report() {
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let (pushes, pops, others, unbalanced) = (read(&PUSHES), read(&POPS), read(&OTHERS), read(&UNBALANCED));
    let mut text = format!("push {pushes} pop {pops} other {others} unbalanced {unbalanced}\n");
    for (name, count) in NAMES.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        let _ = writeln!(text, "{count} {name}");
    }
    match std::env::var_os("NVTXINJ_OUT") {
        Some(path) => drop(std::fs::write(path, text)),
        None => eprint!("{text}"),
    }
}

/// Called by NVTX when it loads this library.
///
/// # Safety
/// `export_table` is NVTX's function of that name, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn InitializeInjectionNvtx2(
    export_table: Option<unsafe extern "C" fn(u32) -> *const c_void>,
) -> c_int {
    let Some(export_table) = export_table else { return 0 };
    // SAFETY: NVTX gives a table for the id CALLBACKS, or NULL.
    let callbacks = unsafe { export_table(CALLBACKS) }.cast::<Callbacks>();
    if callbacks.is_null() {
        return 0;
    }
    // SAFETY: not NULL, static inside NVTX, and at least as large as its first field says.
    let callbacks = unsafe { &*callbacks };
    if callbacks.struct_size < size_of::<Callbacks>() {
        return 0;
    }
    // SAFETY: `report` takes nothing and stays loaded: NVTX never unloads an injection.
    unsafe { libc::atexit(report) };
    let filled = [CORE, CORE2].map(|module| fill(callbacks, module));
    c_int::from(filled == [true, true])
}

/// Puts our functions into every slot of a module's table.
fn fill(callbacks: &Callbacks, module: c_int) -> bool {
    let (mut table, mut size) = (std::ptr::null_mut(), 0u32);
    // SAFETY: both pointers are live; NVTX fills them with a table of `size` pointers to slots.
    if unsafe { (callbacks.module_table)(module, &raw mut table, &raw mut size) } == 0 || table.is_null() {
        return false;
    }
    // Slot 0 is unused; from 12 on the slots only name things.
    for index in 1..(size as usize).min(POP + 1) {
        let function: *const c_void = match (module, index) {
            (CORE, PUSH_A) => push as *const c_void,
            (CORE, POP) => pop as *const c_void,
            _ => other as *const c_void,
        };
        // SAFETY: `index` is below the table's size; each entry is NULL or points to a slot that NVTX lets us set.
        unsafe {
            let slot = *table.add(index);
            if !slot.is_null() {
                *slot = function;
            }
        }
    }
    true
}
