//! libFuzzer entry of the target `config_json`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| slotgraph_tests::fuzz::config_json(bytes));
