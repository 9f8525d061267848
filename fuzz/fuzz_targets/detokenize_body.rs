//! libFuzzer entry of the target `detokenize_body`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| slotgraph_tests::fuzz::detokenize_body(bytes));
