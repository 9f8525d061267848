//! NVTX ranges: what a profiler's timeline calls the phases of start-up and of each step.
//!
//! Used by the CUDA device and, for the engine's own phases, by `runtime`. Push and pop on one thread only, default domain.
//! **Invariant:** unless NVTX_INJECTION64_PATH or `--nvtx` is given, a range costs one relaxed load and formats nothing.

use std::fmt::Display;
use std::marker::PhantomData;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

static ON: AtomicBool = AtomicBool::new(false);

/// Turns ranges on for the rest of the process (`--nvtx`).
pub fn enable() {
    ON.store(true, Ordering::Relaxed);
}

/// Whether ranges are on: by `enable`, or because a tool is there to receive them.
pub fn is_on() -> bool {
    static TOOL: OnceLock<()> = OnceLock::new();
    TOOL.get_or_init(|| {
        if std::env::var_os("NVTX_INJECTION64_PATH").is_some() {
            enable();
        }
    });
    ON.load(Ordering::Relaxed)
}

/// An open range; closed when dropped, on the thread that opened it.
#[must_use = "the range ends when this is dropped"]
pub struct Range {
    pushed: bool,
    /// Ranges nest per thread: not Send.
    thread: PhantomData<*const ()>,
}

/// Opens the range `slotgraph:<name>`.
pub fn range(name: impl Display) -> Range {
    let pushed = is_on();
    if pushed {
        nvtx::range_push!("slotgraph:{name}");
    }
    Range { pushed, thread: PhantomData }
}

impl Drop for Range {
    fn drop(&mut self) {
        if self.pushed {
            nvtx::range_pop!();
        }
    }
}
