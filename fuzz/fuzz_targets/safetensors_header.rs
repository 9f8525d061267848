//! libFuzzer entry of the target `safetensors_header`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| slotgraph_tests::fuzz::safetensors_header(bytes));
