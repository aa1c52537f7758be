#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hint_agent::fuzz::restore_record(data));
