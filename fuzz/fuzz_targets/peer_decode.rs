#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| lvs_testbed::fuzz::peer_decode(bytes));
