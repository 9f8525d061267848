//! libFuzzer entry of the target `completion_body`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| slotgraph_tests::fuzz::completion_body(bytes));
