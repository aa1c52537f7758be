#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hint_agent::fuzz::agent_topology(data));
