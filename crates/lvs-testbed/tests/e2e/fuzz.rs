//! Runs the functions of the fuzz targets with random bytes: in the first seconds, this finds as
//! many faults as a fuzzer.

use std::path::Path;

use lvs_testbed::fuzz::{TARGETS, Target};
use lvs_testbed::hostile::Entropy;
use lvs_testbed::suite::size;

/// Number of inputs for each target, in `make test`.
const QUICK_INPUTS: u64 = 400;
/// Number of inputs for each target, in `make test-rest`.
const FULL_INPUTS: u64 = 4000;

fn target(name: &str) -> Target {
    *TARGETS
        .iter()
        .find(|target| target.0 == name)
        .expect("no fuzz target has this name")
}

/// Runs the fuzz target `name` on random bytes, and on the inputs in `fuzz/seeds`, unchanged and
/// damaged.
fn run(name: &str) {
    let (_, target) = target(name);
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/seeds")
        .join(name);
    let mut kept: Vec<_> = std::fs::read_dir(&seeds)
        .unwrap_or_else(|error| panic!("{}: {error}", seeds.display()))
        .map(|entry| entry.expect("the directory entry cannot be read").path())
        .collect();
    kept.sort();
    let kept: Vec<Vec<u8>> = kept
        .iter()
        .map(|path| std::fs::read(path).expect("a seed cannot be read"))
        .collect();
    assert!(!kept.is_empty());
    kept.iter().for_each(|bytes| target(bytes));
    let mut entropy = Entropy::seeded(name.len() as u64);
    for _ in 0..size(QUICK_INPUTS, FULL_INPUTS) {
        let bytes = if entropy.one_in(2) {
            let len = entropy.below(2000);
            entropy.bytes(len)
        } else {
            let mut bytes = kept[entropy.below(kept.len())].clone();
            for _ in 0..=entropy.below(8) {
                let at = entropy.below(bytes.len());
                match entropy.below(4) {
                    0 => bytes.truncate(at),
                    1 => bytes.insert(at, entropy.u8()),
                    _ => {
                        if let Some(byte) = bytes.get_mut(at) {
                            *byte = entropy.u8();
                        }
                    }
                }
            }
            bytes
        };
        target(&bytes);
    }
}

#[test]
fn fuzz_target_pipeline_finds_no_wrong_fate_checksum_or_memory_leak() {
    run("pipeline");
}

#[test]
fn fuzz_target_operations_finds_no_difference_from_naive_model() {
    run("operations");
}

#[test]
fn fuzz_target_rules_does_not_panic() {
    run("rules");
}

#[test]
fn fuzz_target_sync_decode_does_not_panic() {
    run("sync_decode");
}

#[test]
fn fuzz_target_peer_decode_does_not_panic() {
    run("peer_decode");
}

#[test]
fn fuzz_target_replies_does_not_panic() {
    run("replies");
}

#[test]
fn each_fuzz_target_has_a_program_below_fuzz() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz");
    let manifest =
        std::fs::read_to_string(fuzz.join("Cargo.toml")).expect("fuzz/Cargo.toml cannot be read");
    for (name, _) in TARGETS {
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
        let program = std::fs::read_to_string(fuzz.join(format!("fuzz_targets/{name}.rs")))
            .unwrap_or_else(|error| panic!("fuzz/fuzz_targets/{name}.rs: {error}"));
        let call = format!("lvs_testbed::fuzz::{name}(bytes)");
        assert!(program.contains(&call), "{name} does not call {call}");
    }
}
