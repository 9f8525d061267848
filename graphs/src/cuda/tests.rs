//! The device on a machine that may have no GPU: it must say so, and where it looked.

use super::*;
use crate::samples;
use crate::source::{Source, SourceError};
use slotgraph_kernels::WeightSpec;
use std::ops::Range;
use std::sync::Arc;

struct Nothing;

impl Source for Nothing {
    fn read_rows(&self, spec: &WeightSpec, _: usize, _: Range<usize>, _: &mut [u16]) -> Result<(), SourceError> {
        Err(SourceError { weight: spec.name.clone(), reason: "this source has nothing".into() })
    }
}

fn options() -> CudaOptions {
    CudaOptions::new(samples::deepseek(), samples::limits(), Arc::new(Nothing))
}

#[test]
fn without_a_driver_the_start_fails_and_says_where_it_looked() {
    if libs::Search::new(&[]).driver().is_ok() {
        eprintln!("skipped: this machine has a driver");
        return;
    }
    let folder = tempfile::TempDir::new().unwrap();
    let options = CudaOptions { lib_dirs: vec![folder.path().into()], ..options() };
    assert!(device_count(&options.lib_dirs).unwrap_err().is_configuration());
    let Err(error) = CudaDevice::prepare(options) else { panic!("there is no GPU here") };
    assert!(error.is_configuration());
    let text = error.to_string();
    assert!(text.starts_with("libcuda.so.1 (the NVIDIA driver) was not found"), "{text}");
    for part in [&folder.path().display().to_string(), "ld.so", "/usr/local/nvidia/lib64", "--device cpu", "--lib-dir"]
    {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}

#[test]
fn a_device_can_move_to_its_rank_thread() {
    fn movable<T: Send>() {}
    movable::<CudaDevice>();
    movable::<CudaOptions>();
    movable::<CudaError>();
}
