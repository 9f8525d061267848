//! Kernels as loaded functions: every unit that the launches name is compiled once (all in parallel) and loaded.
//!
//! Used by `prepare`. **Invariant:** after `load` returned, each function asked for is resident on the GPU (no lazy loading later:
//! a first load waits for the whole device), with the shared memory that its launches need.

use super::cache::Cache;
use super::error::{CallError, CudaError, During, check};
use super::gpu::{Gpu, count, fault};
use super::nvrtc::{FunctionUse, Nvrtc, Unit, function_uses};
use cudarc::driver::sys::{self, CUfunction_attribute};
use cudarc::driver::{CudaFunction, CudaModule};
use cudarc::nvrtc::Ptx;
use slotgraph_kernels::launch::{Kernel, Launch};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

/// What compiling and loading took.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct ModulesReport {
    pub units: usize,
    /// Of these, from the disk cache.
    pub cached: usize,
    pub compile_ms: f64,
    pub load_ms: f64,
    /// Functions that spill registers or use a stack.
    pub spilling: Vec<FunctionUse>,
    /// Warnings of the compiler.
    pub warnings: Vec<String>,
}

#[derive(Default)]
pub(super) struct Modules {
    /// By translation unit.
    modules: HashMap<Unit, Arc<CudaModule>>,
    functions: HashMap<Kernel, Function>,
    pub report: ModulesReport,
}

struct Function {
    handle: CudaFunction,
    /// Size of each declared parameter.
    parameters: Vec<usize>,
    /// Dynamic shared memory opted in to.
    shared_bytes: u32,
    /// Shared memory has precedence over the L1 cache.
    shared_first: bool,
}

impl Modules {
    /// Compiles and loads what `launches` need and is not there yet.
    pub fn load<'a>(
        &mut self,
        launches: impl Iterator<Item = &'a Launch>,
        nvrtc: &Nvrtc,
        cache: &Cache,
        gpu: &Arc<Gpu>,
    ) -> Result<(), CudaError> {
        let launches: Vec<&Launch> = launches.collect();
        let missing: BTreeSet<&Kernel> = launches
            .iter()
            .map(|launch| &launch.kernel)
            .filter(|kernel| !self.functions.contains_key(kernel))
            .collect();
        let with_units: Vec<(&Kernel, Unit)> = missing
            .into_iter()
            .map(|kernel| (kernel, Unit { name: kernel.source.into(), text: kernel.unit() }))
            .collect();
        let units: BTreeSet<&Unit> =
            with_units.iter().map(|(_, unit)| unit).filter(|unit| !self.modules.contains_key(unit)).collect();
        self.compile(&units.into_iter().cloned().collect::<Vec<_>>(), nvrtc, cache, gpu)?;

        let start = Instant::now();
        for (kernel, unit) in with_units {
            let function = load_function(&self.modules[&unit], kernel)
                .during(|| format!("loading {} of {}", kernel.function, kernel.source))?;
            self.functions.insert(kernel.clone(), function);
        }
        for launch in launches {
            self.allow_shared(launch)?;
            self.prefer_shared(launch)?;
        }
        self.report.load_ms += start.elapsed().as_secs_f64() * 1e3;
        Ok(())
    }

    /// The function of a launch, and the sizes of its parameters. `load` saw the launch before.
    pub fn function(&self, kernel: &Kernel) -> (&CudaFunction, &[usize]) {
        let function = self.functions.get(kernel).expect("every launch's kernel was loaded by `load`");
        (&function.handle, &function.parameters)
    }

    fn compile(&mut self, units: &[Unit], nvrtc: &Nvrtc, cache: &Cache, gpu: &Arc<Gpu>) -> Result<(), CudaError> {
        let start = Instant::now();
        let threads = std::thread::available_parallelism().map_or(1, |count| count.get());
        let cubins = nvrtc.compile_all(units, &gpu.identity.arch, cache, threads)?;
        self.report.compile_ms += start.elapsed().as_secs_f64() * 1e3;
        self.report.units += units.len();

        let start = Instant::now();
        for (unit, cubin) in units.iter().zip(cubins) {
            self.report.cached += usize::from(cubin.cached);
            let spills = |function: &FunctionUse| function.stack_bytes > 0 || function.spill_store_bytes > 0;
            self.report.spilling.extend(function_uses(&cubin.log).into_iter().filter(spills));
            self.report.warnings.extend(cubin.log.lines().filter(|line| line.contains("warning")).map(str::to_owned));
            count(&gpu.counters.module_loads);
            let module = gpu
                .context
                .load_module(Ptx::from_binary(cubin.image))
                .map_err(fault("cuModuleLoadData"))
                .during(|| format!("loading {} for {}", unit.name, gpu.identity.arch))?;
            self.modules.insert(unit.clone(), module);
        }
        self.report.load_ms += start.elapsed().as_secs_f64() * 1e3;
        Ok(())
    }

    /// Lets the function of `launch` use the dynamic shared memory that it asks for. Asking is needed when static and dynamic
    /// together exceed 48 KiB, and harmless below.
    fn allow_shared(&mut self, launch: &Launch) -> Result<(), CudaError> {
        let function = self.functions.get_mut(&launch.kernel).expect("loaded just before");
        if launch.shared_bytes <= function.shared_bytes {
            return Ok(());
        }
        let bytes = i32::try_from(launch.shared_bytes).expect("a block has less than 2 GiB of shared memory");
        function
            .handle
            .set_attribute(CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes)
            .map_err(fault("cuFuncSetAttribute"))
            .during(|| format!("giving {} {bytes} bytes of shared memory", launch.kernel.function))?;
        function.shared_bytes = launch.shared_bytes;
        Ok(())
    }

    /// Sets how the function of `launch` divides a multiprocessor's memory, if the launch says how.
    fn prefer_shared(&mut self, launch: &Launch) -> Result<(), CudaError> {
        let function = self.functions.get_mut(&launch.kernel).expect("loaded just before");
        if !launch.shared_first || function.shared_first {
            return Ok(());
        }
        let most = sys::CUshared_carveout_enum::CU_SHAREDMEM_CARVEOUT_MAX_SHARED as i32;
        function
            .handle
            .set_attribute(CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, most)
            .map_err(fault("cuFuncSetAttribute"))
            .during(|| format!("giving shared memory precedence for {}", launch.kernel.function))?;
        function.shared_first = true;
        Ok(())
    }
}

fn load_function(module: &Arc<CudaModule>, kernel: &Kernel) -> Result<Function, CallError> {
    let handle = module.load_function(kernel.function).map_err(fault("cuModuleGetFunction"))?;
    // SAFETY: the function is live: its module is, and `handle` holds it.
    check("cuFuncLoad", unsafe { sys::cuFuncLoad(handle.cu_function()) })?;
    let mut parameters = Vec::new();
    loop {
        let (mut offset, mut size) = (0usize, 0usize);
        // SAFETY: the function is live; an index past the last parameter is answered with INVALID_VALUE.
        let code =
            unsafe { sys::cuFuncGetParamInfo(handle.cu_function(), parameters.len(), &raw mut offset, &raw mut size) };
        if code == sys::CUresult::CUDA_ERROR_INVALID_VALUE {
            return Ok(Function { handle, parameters, shared_bytes: 0, shared_first: false });
        }
        check("cuFuncGetParamInfo", code)?;
        parameters.push(size);
    }
}
