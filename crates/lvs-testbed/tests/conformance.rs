//! The recordings of the real kernel, replayed as frames. The numbers only ever grow.

use std::path::{Path, PathBuf};

use lvs_testbed::conformance::{ConformanceReport, conformance};

/// The recordings in a directory below `crates`.
fn recordings(directory: &str) -> Vec<PathBuf> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files: Vec<PathBuf> = std::fs::read_dir(crates.join(directory))
        .expect("recordings are part of the source")
        .map(|entry| entry.expect("a directory").path())
        .collect();
    files.sort();
    files
}

/// Replays `directory`: no case may fail, at least `passed` of `kind` must pass.
fn check(directory: &str, kind: &str, passed: usize) {
    let report = conformance(&recordings(directory), None, 3).expect("recordings can be read");
    let ConformanceReport {
        kinds, mismatches, ..
    } = &report;
    for (kind, tally) in kinds {
        println!("{kind}: {tally}");
    }
    let shown = mismatches[..mismatches.len().min(20)].join("\n");
    assert!(mismatches.is_empty(), "{shown}");
    let tally = kinds.get(kind).expect("cases of this kind");
    assert!(
        tally.passed >= passed,
        "only {} cases of {kind} passed",
        tally.passed
    );
}

#[test]
fn schedulers() {
    check("lvs-core/tests/golden/schedulers", "schedulers", 1031);
}

#[test]
fn persistence() {
    check("lvs-core/tests/golden/persistence", "persistence", 313);
}

#[test]
fn connection_states() {
    check("lvs-core/tests/golden/tcpstates", "tcpstates", 1325);
}

#[test]
fn counters_and_rates() {
    check("lvs-core/tests/golden/stats", "stats", 51);
}

#[test]
fn packets() {
    check("lvs-testbed/golden/packets", "packets", 90);
}

#[test]
fn proc_files() {
    check("lvs-core/tests/golden/proc", "proc", 3);
}

#[test]
fn synchronisation() {
    check("lvs-core/tests/golden/sync", "sync", 1790);
}
