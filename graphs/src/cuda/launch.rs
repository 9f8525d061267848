//! A launch with its addresses filled in: made once in `prepare`, then issued eagerly or into a capture, always the same.
//!
//! **Invariants:** a call owns its arguments and they never change; it holds the function's module alive; argument count and
//! sizes were checked against what the compiled function declares.

use super::error::{CallError, check};
use super::gpu::{Gpu, count};
use super::modules::Modules;
use cudarc::driver::{CudaFunction, sys};
use slotgraph_kernels::launch::{Arg, Launch};
use std::ffi::c_void;

/// Most parameters of a kernel.
const ARGS_MAX: usize = 64;

/// Where arguments lead.
pub(super) trait Addresses {
    /// The address that `arg` names; None for one that has no place in this kind of launch.
    fn address(&self, arg: Arg) -> Option<u64>;
}

/// One resolved launch.
pub(super) struct Call {
    function: CudaFunction,
    pub name: &'static str,
    pub grid: [u32; 3],
    pub block: u32,
    cluster: u32,
    shared_bytes: u32,
    programmatic: bool,
    /// Each argument in the low bytes of a word (little-endian, like the GPU).
    values: Box<[u64]>,
    /// Bytes of each argument.
    sizes: Box<[usize]>,
}

impl Call {
    /// Fills in the addresses. `programmatic`: the launch may start before the one before it has ended.
    pub fn resolve(
        launch: &Launch,
        modules: &Modules,
        addresses: &impl Addresses,
        programmatic: bool,
    ) -> Result<Call, String> {
        let (function, declared) = modules.function(&launch.kernel);
        let name = launch.kernel.function;
        let mut values = Vec::with_capacity(launch.args.len());
        let mut sizes = Vec::with_capacity(launch.args.len());
        for arg in &launch.args {
            let (value, size) = match *arg {
                Arg::U32(value) => (u64::from(value), 4),
                Arg::U64(value) => (value, 8),
                other => {
                    let address = addresses.address(other);
                    (address.ok_or_else(|| format!("{name} asks for {other:?}, which this launch has not"))?, 8)
                }
            };
            values.push(value);
            sizes.push(size);
        }
        check_parameters(name, &sizes, declared)?;
        Ok(Call {
            function: function.clone(),
            name,
            grid: launch.grid,
            block: launch.block,
            cluster: launch.cluster,
            shared_bytes: launch.shared_bytes,
            programmatic: programmatic && launch.pdl,
            values: values.into(),
            sizes: sizes.into(),
        })
    }

    /// The bytes of each argument, as a captured node must hold them.
    pub fn parameters(&self) -> impl Iterator<Item = Vec<u8>> + '_ {
        self.values.iter().zip(&self.sizes).map(|(value, size)| value.to_le_bytes()[..*size].to_vec())
    }

    /// Issues the launch on the device's stream (into the capture, if one is open).
    ///
    /// # Safety
    /// The memory that the arguments name is live until the launch (and every replay of its capture) has run, and is as
    /// large as the kernel's header says for these arguments.
    pub unsafe fn launch(&self, gpu: &Gpu) -> Result<(), CallError> {
        // SAFETY: passed on.
        unsafe { self.issue(gpu, self.programmatic) }
    }

    /// `launch` without a programmatic edge: it waits for everything before it.
    ///
    /// # Safety
    /// As for `launch`.
    pub unsafe fn launch_alone(&self, gpu: &Gpu) -> Result<(), CallError> {
        // SAFETY: passed on.
        unsafe { self.issue(gpu, false) }
    }

    /// # Safety
    /// As for `launch`.
    unsafe fn issue(&self, gpu: &Gpu, programmatic: bool) -> Result<(), CallError> {
        count(&gpu.counters.launches);
        let mut attributes = [sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_IGNORE,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { pad: [0; 64] },
        }; 2];
        let mut used = 0;
        if programmatic {
            attributes[used].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[used].value.programmaticStreamSerializationAllowed = 1;
            used += 1;
        }
        if self.cluster > 1 {
            attributes[used].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attributes[used].value.clusterDim =
                sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: self.cluster, y: 1, z: 1 };
            used += 1;
        }
        let config = sys::CUlaunchConfig {
            gridDimX: self.grid[0],
            gridDimY: self.grid[1],
            gridDimZ: self.grid[2],
            blockDimX: self.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared_bytes,
            hStream: gpu.raw_stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: used as u32,
        };
        let mut pointers = [std::ptr::null_mut::<c_void>(); ARGS_MAX];
        for (pointer, value) in pointers.iter_mut().zip(&self.values) {
            *pointer = std::ptr::from_ref(value).cast_mut().cast();
        }
        // SAFETY: function and stream are live; `config`, its attributes, the pointers and the values they lead to outlive
        // the call, which copies them and writes none; count and sizes match the function's declaration (`resolve`); the
        // caller vouches for the memory that the arguments name.
        check("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.function.cu_function(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }
}

/// That a launch passes what the compiled function declares.
fn check_parameters(name: &str, given: &[usize], declared: &[usize]) -> Result<(), String> {
    if given.len() > ARGS_MAX {
        return Err(format!("{name} is given {} arguments, at most {ARGS_MAX}", given.len()));
    }
    if given != declared {
        return Err(format!("{name} declares parameters of {declared:?} bytes and is given {given:?}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_must_match_the_declaration() {
        assert!(check_parameters("k", &[8, 4, 8], &[8, 4, 8]).is_ok());
        let error = check_parameters("k", &[8, 4], &[8, 8]).unwrap_err();
        assert_eq!(error, "k declares parameters of [8, 8] bytes and is given [8, 4]");
        assert!(check_parameters("k", &[8], &[8, 8]).is_err());
        assert!(check_parameters("k", &[8; 65], &[8; 65]).is_err());
    }
}
