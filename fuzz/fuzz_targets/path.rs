//! libFuzzer entry of the target `path`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| slotgraph_tests::fuzz::path(bytes));
