//! libFuzzer entry of the target `chat_template`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| slotgraph_tests::fuzz::chat_template(bytes));
