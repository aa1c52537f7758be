#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hint_broker::fuzz::broker_config(data));
