#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| lvs_testbed::fuzz::fuzz_pipeline_keeps_its_properties(bytes));
