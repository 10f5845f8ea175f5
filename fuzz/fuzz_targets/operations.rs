#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| lvs_testbed::fuzz::fuzz_operations_agree_with_the_model(bytes));
