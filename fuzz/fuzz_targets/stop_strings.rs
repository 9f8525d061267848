//! libFuzzer entry of the target `stop_strings`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| slotgraph_tests::fuzz::stop_strings(bytes));
