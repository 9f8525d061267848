//! Whether a GPU's tensor cores sum as the numeric contract needs: asked by `doctor` of a machine, before any model.
//!
//! **Invariant:** a step never depends on what is found here; it says why a step could not keep its promises.

use super::cache::Cache;
use super::error::{CudaError, During, check_compiler};
use super::gpu::Gpu;
use super::launch::{Addresses, Call};
use super::libs::Libraries;
use super::memory::DeviceMemory;
use super::modules::Modules;
use super::nvrtc::Nvrtc;
use slotgraph_kernels::launch::{Arg, chain};
use std::path::PathBuf;

/// What the sums of one GPU's tensor cores did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Chains {
    /// Sums that were compared, each in seven other columns too.
    pub sums: u32,
    /// Those that changed with their column or neighbours.
    pub moved: u32,
    /// Those where wgmma gives other bits than the mma.sync chain; None on a GPU that has no wgmma.
    pub wgmma_differs: Option<u32>,
    /// Sums that are zero or not finite: with them the others would say little.
    pub degenerate: u32,
}

struct Found(u64);

impl Addresses for Found {
    fn address(&self, arg: Arg) -> Option<u64> {
        (arg == Arg::Counters).then_some(self.0)
    }
}

impl Chains {
    /// Asks GPU `ordinal`. `split` cuts the reference chain in two, which must be seen.
    pub fn of(ordinal: usize, lib_dirs: &[PathBuf], split: bool) -> Result<Chains, CudaError> {
        const WORDS: usize = 4;
        let libraries = Libraries::load(lib_dirs)?;
        let nvrtc = Nvrtc::new(&libraries.nvrtc)?;
        let gpu = Gpu::open(ordinal)?;
        check_compiler(nvrtc.version, &nvrtc.path, gpu.driver_version)?;
        let doing = || "comparing sums of tensor cores".to_owned();
        gpu.bind().during(doing)?;
        let wgmma = gpu.identity.arch == "sm_90a";
        let launch = chain(wgmma, split);
        let mut modules = Modules::default();
        modules.load([&launch].into_iter(), &nvrtc, &Cache::of_user(), &gpu)?;
        let memory = DeviceMemory::allocate(&gpu, WORDS * size_of::<u32>()).during(doing)?;
        let call = Call::resolve(&launch, &modules, &Found(memory.address), false).map_err(CudaError::Unsupported)?;
        let mut found = [0u32; WORDS];
        // SAFETY: the allocation holds four words; it, the module and `found` live past the wait.
        unsafe {
            gpu.fill(memory.address, 0, WORDS).during(doing)?;
            call.launch(&gpu).during(doing)?;
            gpu.copy_out(found.as_mut_ptr().cast(), memory.address, size_of_val(&found)).during(doing)?;
        }
        gpu.wait().during(doing)?;
        let [sums, moved, differs, degenerate] = found;
        Ok(Chains { sums, moved, wgmma_differs: wgmma.then_some(differs), degenerate })
    }
}
