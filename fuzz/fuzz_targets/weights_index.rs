//! libFuzzer entry of the target `weights_index`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| slotgraph_tests::fuzz::weights_index(bytes));
