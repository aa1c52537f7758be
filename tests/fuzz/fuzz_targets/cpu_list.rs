#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hint_proto::fuzz::cpu_list(data));
