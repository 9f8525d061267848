//! libFuzzer entry of the target `tokenize_body`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| slotgraph_tests::fuzz::tokenize_body(bytes));
