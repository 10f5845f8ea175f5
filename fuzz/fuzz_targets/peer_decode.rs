#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| lvs_testbed::fuzz::fuzz_peer_decode_does_not_panic(bytes));
