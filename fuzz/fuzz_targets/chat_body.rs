//! libFuzzer entry of the target `chat_body`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| slotgraph_tests::fuzz::chat_body(bytes));
