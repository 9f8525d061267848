//! What goes wrong on a mock driver, planted or by itself, and what is said of it.

use super::*;

#[test]
fn faults_of_the_start_fail_it() {
    with_mock("failure_tests::faults_of_the_start_fail_it", 1, "", || {
        let planted = |fault: &str| prepare_error(CudaOptions { fault: Some(fault.parse().unwrap()), ..options() });
        let unregistered = planted("unregistered-pointer@4");
        assert!(
            unregistered.contains("bucket 4") && unregistered.contains("no registered allocation"),
            "{unregistered}"
        );
        let failed = planted("capture-fail@16");
        assert!(failed.contains("bucket 16") && failed.contains("capture"), "{failed}");
        // The capture was ended all the same, and a later start works.
        CudaDevice::prepare(options()).unwrap();
    });
}

#[test]
fn faults_of_the_device_are_armed() {
    with_mock("failure_tests::faults_of_the_device_are_armed", 1, "", || {
        for graph in [true, false] {
            let mut device = CudaDevice::prepare(CudaOptions { graph, ..options() }).unwrap();
            assert!(!device.arm("token@1".parse().unwrap()), "the edge commits that one");
            assert!(device.arm("pad-write@3".parse().unwrap()) && device.arm("baked-position@2".parse().unwrap()));
            let limits = samples::limits();
            let pad_table = |device: &CudaDevice| {
                device.read_buffer("slot.pages", 4 * limits.slots_max * limits.pages_per_slot, 4).unwrap()[0]
            };
            let positions = |device: &CudaDevice| device.read_buffer("fault.position", 0, 4).unwrap()[0];
            let mut seen = Vec::new();
            let mut output = StepOutput::default();
            for number in 1..=4 {
                device.write_buffer("row.position", 0, &[10 * number as u8]).unwrap();
                device.enqueue(&step(number, 2)).unwrap();
                assert!(device.wait(&mut output).unwrap());
                seen.push((pad_table(&device), positions(&device)));
            }
            assert_eq!(seen, [(0, 0), (0, 20), (1, 20), (1, 20)], "from its step on, and kept");
        }
    });
}

#[test]
fn a_source_that_fails_or_panics_ends_the_start() {
    with_mock("failure_tests::a_source_that_fails_or_panics_ends_the_start", 1, "", || {
        let fails = Rows { fails: Some("final_norm"), ..Rows::default() };
        let error = prepare_error(CudaOptions { source: Arc::new(fails), ..options() });
        assert_eq!(error, "weight final_norm: the disk is on fire");
        let panics = Rows { panics: Some("head"), ..Rows::default() };
        let error = prepare_error(CudaOptions { source: Arc::new(panics), ..options() });
        assert_eq!(error, "weight head: reading it panicked");
    });
}

#[test]
fn a_full_device_says_what_did_not_fit() {
    with_mock("failure_tests::a_full_device_says_what_did_not_fit", 1, "memory 100000\n", || {
        let error = prepare_error(options());
        assert!(error.starts_with("the weights needs") || error.contains("the weights"), "{error}");
        assert!(error.contains("free on the GPU"), "{error}");
    });
}

#[test]
fn a_failed_allocation_names_its_buffer() {
    with_mock("failure_tests::a_failed_allocation_names_its_buffer", 1, "fail cuMemHostAlloc 1\n", || {
        let error =
            prepare_error(CudaOptions { source: Arc::new(Rows { dummy: true, ..Rows::default() }), ..options() });
        assert!(
            error.contains("pinned") && error.contains("cuMemHostAlloc failed with CUDA_ERROR_OUT_OF_MEMORY"),
            "{error}"
        );
    });
}

#[test]
fn an_old_driver_and_a_missing_device_are_refused() {
    with_mock("failure_tests::an_old_driver_and_a_missing_device_are_refused", 1, "driver 12020\n", || {
        let error = prepare_error(options());
        assert!(error.contains("speaks CUDA 12.2") && error.contains("570"), "{error}");
    });
}

#[test]
fn a_device_that_is_not_there_is_refused() {
    with_mock("failure_tests::a_device_that_is_not_there_is_refused", 1, "devices 2\n", || {
        assert_eq!(device_count(&options().lib_dirs).unwrap(), 2);
        let error = prepare_error(CudaOptions { ordinal: 2, ..options() });
        assert!(error.starts_with("there is no CUDA device 2; the driver sees 2"), "{error}");
    });
}

#[test]
fn a_failed_replay_loses_the_device() {
    // Five buckets are replayed once in `prepare`.
    with_mock("failure_tests::a_failed_replay_loses_the_device", 1, "fail cuGraphLaunch 7\n", || {
        let mut device = CudaDevice::prepare(options()).unwrap();
        let mut output = StepOutput::default();
        device.enqueue(&step(1, 1)).unwrap();
        assert!(device.wait(&mut output).unwrap());
        let error = device.enqueue(&step(2, 1)).unwrap_err().to_string();
        assert!(error.contains("replaying the graph of bucket 1: cuGraphLaunch failed"), "{error}");
        for after in [device.enqueue(&step(2, 1)).unwrap_err(), device.poll(&mut output).unwrap_err()] {
            assert!(after.to_string().contains("cuGraphLaunch"), "{after}");
        }
    });
}

#[test]
fn a_step_that_publishes_nothing_fails_the_warm_up() {
    with_mock("failure_tests::a_step_that_publishes_nothing_fails_the_warm_up", 1, "silent\n", || {
        let error = prepare_error(options());
        assert!(error.contains("did not publish step 1"), "{error}");
    });
}
