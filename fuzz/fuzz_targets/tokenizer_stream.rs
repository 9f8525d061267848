//! libFuzzer entry of the target `tokenizer_stream`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| slotgraph_tests::fuzz::tokenizer_stream(bytes));
