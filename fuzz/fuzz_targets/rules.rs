#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| lvs_testbed::fuzz::fuzz_rules_do_not_panic(bytes));
