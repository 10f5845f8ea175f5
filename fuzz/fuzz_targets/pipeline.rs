#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| lvs_testbed::fuzz::fuzz_pipeline_fates_checksums_and_memory_are_correct(bytes));
