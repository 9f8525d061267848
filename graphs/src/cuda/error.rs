//! What can go wrong with a CUDA device, each with the call, the phase and the op that it happened in.
//!
//! `prepare` returns these (a failed start names the flag that helps); after it they become `DeviceError`s, which stop the
//! engine.

use super::libs::LibraryError;
use super::nvrtc::CompileError;
use crate::device::DeviceError;
use crate::meeting::MeetingError;
use crate::plan::PlanError;
use crate::source::SourceError;
use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;
use slotgraph_kernels::launch::LaunchError;
use std::path::PathBuf;

/// Oldest CUDA version that the driver may speak, as 1000 · major + 10 · minor: the first whose every function that is
/// called here exists under the name that cudarc calls it by.
pub const DRIVER_MIN: i32 = 12_080;
/// The driver release that brought `DRIVER_MIN`.
pub const DRIVER_MIN_RELEASE: &str = "570";

/// Why a CUDA device could not be prepared or used.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    #[error(transparent)]
    Library(#[from] LibraryError),
    #[error(transparent)]
    Compile(#[from] CompileError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("bucket {bucket}: {source}")]
    Launch { bucket: usize, source: LaunchError },
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error(
        "the NVIDIA driver is too old: it speaks CUDA {}, slotgraph needs {} (driver {DRIVER_MIN_RELEASE} or newer); \
         update the driver, or run on the CPU with --device cpu",
        version(*.have), version(DRIVER_MIN)
    )]
    OldDriver { have: i32 },
    #[error(
        "NVRTC {major}.{minor} at {path} makes code that this driver (CUDA {}) does not load; update the driver, or name the \
         folder of an older NVRTC with --lib-dir",
        version(*.driver)
    )]
    NewCompiler { major: u32, minor: u32, path: PathBuf, driver: i32 },
    #[error(
        "there is no CUDA device {ordinal}; the driver sees {count} (--devices names others, --device cpu needs none)"
    )]
    NoDevice { ordinal: usize, count: usize },
    #[error("{name} has compute capability {major}.{minor}; slotgraph's kernels need 8.0 or newer")]
    OldGpu { name: String, major: i32, minor: i32 },
    #[error("{doing}: {fault}")]
    Call { doing: String, fault: CallError },
    #[error("{what} needs {needed} bytes and {free} are free on the GPU; {remedy}")]
    Memory { what: String, needed: u64, free: u64, remedy: &'static str },
    #[error("the graph of bucket {bucket}: {reason}")]
    Graph { bucket: usize, reason: String },
    #[error("{0}")]
    Unsupported(String),
    #[error(
        "NCCL {} at {path} is too old for this GPU: slotgraph needs {} or newer; name the folder of a newer one with --lib-dir, or use \
         another --transport", super::nccl::version_text(*.have), super::nccl::version_text(*.needed)
    )]
    OldNccl { have: u32, needed: u32, path: PathBuf },
    /// An exchange between ranks failed, or a rank was lost.
    #[error("{0}")]
    Exchange(String),
    #[error(transparent)]
    Meeting(#[from] MeetingError),
    #[error("there is no buffer named {0}")]
    NoBuffer(String),
    #[error("{what} reaches past the {bytes} bytes of {name}")]
    OutOfBounds { name: String, what: String, bytes: usize },
    #[error(transparent)]
    Step(#[from] DeviceError),
}

impl CudaError {
    /// Whether another flag, library or machine would help (exit 2), rather than the device having failed.
    pub fn is_configuration(&self) -> bool {
        match self {
            CudaError::Library(_)
            | CudaError::Plan(_)
            | CudaError::Launch { .. }
            | CudaError::OldDriver { .. }
            | CudaError::NewCompiler { .. }
            | CudaError::NoDevice { .. }
            | CudaError::OldGpu { .. }
            | CudaError::OldNccl { .. }
            | CudaError::Memory { .. }
            | CudaError::Unsupported(_)
            | CudaError::NoBuffer(_)
            | CudaError::OutOfBounds { .. } => true,
            CudaError::Compile(_)
            | CudaError::Source(_)
            | CudaError::Call { .. }
            | CudaError::Graph { .. }
            | CudaError::Exchange(_)
            | CudaError::Meeting(_)
            | CudaError::Step(_) => false,
        }
    }
}

impl CudaError {
    /// Whether all that happened here is that another rank left: its own failure is the one to report.
    pub fn is_of_another_rank(&self) -> bool {
        use slotgraph_kernels::ops::ExchangeError;
        matches!(
            self,
            CudaError::Meeting(MeetingError::Gone { .. })
                | CudaError::Step(DeviceError::Exchange(ExchangeError::PeerGone { .. }))
        )
    }
}

/// A driver call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed with {code}{}", if .text.is_empty() { String::new() } else { format!(" ({})", .text) })]
pub struct CallError {
    pub call: &'static str,
    /// Such as `CUDA_ERROR_OUT_OF_MEMORY`.
    pub code: String,
    /// The driver's own sentence.
    pub text: String,
}

impl CallError {
    pub(super) fn new(call: &'static str, error: DriverError) -> CallError {
        let text = error.error_string().map(|text| text.to_string_lossy().into_owned()).unwrap_or_default();
        CallError { call, code: format!("{:?}", error.0), text }
    }

    pub(super) fn during(self, doing: impl Into<String>) -> CudaError {
        CudaError::Call { doing: doing.into(), fault: self }
    }
}

/// A driver result as ours.
pub(super) fn check(call: &'static str, code: CUresult) -> Result<(), CallError> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(CallError::new(call, DriverError(code))),
    }
}

/// Says what was being done when a driver call failed.
pub(super) trait During<T> {
    fn during(self, doing: impl FnOnce() -> String) -> Result<T, CudaError>;
}

impl<T> During<T> for Result<T, CallError> {
    fn during(self, doing: impl FnOnce() -> String) -> Result<T, CudaError> {
        self.map_err(|error| error.during(doing()))
    }
}

impl From<CudaError> for DeviceError {
    fn from(error: CudaError) -> DeviceError {
        match error {
            CudaError::Step(error) => error,
            other => DeviceError::Lost(other.to_string()),
        }
    }
}

/// Refuses a driver older than `DRIVER_MIN`, given what cuDriverGetVersion says.
pub(super) fn check_driver(have: i32) -> Result<(), CudaError> {
    if have >= DRIVER_MIN { Ok(()) } else { Err(CudaError::OldDriver { have }) }
}

/// Refuses a compiler of a newer major version than the driver: its CUBINs would not load. Inside a major version they do.
pub(super) fn check_compiler(nvrtc: (u32, u32), path: &std::path::Path, driver: i32) -> Result<(), CudaError> {
    let (major, minor) = nvrtc;
    if i64::from(major) <= i64::from(driver / 1000) {
        return Ok(());
    }
    Err(CudaError::NewCompiler { major, minor, path: path.to_owned(), driver })
}

/// 13020 as "13.2".
pub(super) fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn an_old_driver_is_refused_with_both_versions_and_the_way_out() {
        assert!(check_driver(13_000).is_ok());
        assert!(check_driver(DRIVER_MIN).is_ok());
        let text = check_driver(12_020).unwrap_err().to_string();
        assert_eq!(
            text,
            "the NVIDIA driver is too old: it speaks CUDA 12.2, slotgraph needs 12.8 (driver 570 or newer); update the \
             driver, or run on the CPU with --device cpu"
        );
    }

    #[test]
    fn a_compiler_of_a_newer_major_version_is_refused() {
        let path = Path::new("/opt/libnvrtc.so.13");
        assert!(check_compiler((13, 3), path, 13_000).is_ok());
        assert!(check_compiler((12, 9), path, 13_000).is_ok());
        let text = check_compiler((13, 0), path, 12_080).unwrap_err().to_string();
        assert!(text.contains("NVRTC 13.0 at /opt/libnvrtc.so.13") && text.contains("CUDA 12.8"), "{text}");
        assert!(text.contains("--lib-dir"), "{text}");
    }

    #[test]
    fn a_failed_call_says_what_was_being_done() {
        let fault =
            CallError { call: "cuMemAlloc_v2", code: "CUDA_ERROR_OUT_OF_MEMORY".into(), text: "out of memory".into() };
        assert_eq!(
            fault.during("allocating layer.3.kv (5 bytes)").to_string(),
            "allocating layer.3.kv (5 bytes): cuMemAlloc_v2 failed with CUDA_ERROR_OUT_OF_MEMORY (out of memory)"
        );
    }
}
