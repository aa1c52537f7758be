#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lab::fuzz::scenario(data));
