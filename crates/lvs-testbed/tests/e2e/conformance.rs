//! Replays recordings of the kernel's IPVS as frames. The minimum numbers of passed cases must
//! never be reduced.

use std::path::{Path, PathBuf};

use lvs_dataplane::fast_path::FastPathError;
use lvs_sys::is_root_of_all;
use lvs_sys::testing::not_run;
use lvs_testbed::conformance::{ConformanceReport, Through, conformance};

fn recordings(directory: &str) -> Vec<PathBuf> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    let mut files: Vec<PathBuf> = std::fs::read_dir(golden.join(directory))
        .expect("the directory of recordings cannot be read")
        .map(|entry| entry.expect("the directory entry cannot be read").path())
        .collect();
    files.sort();
    files
}

/// Replays the recordings of one kind: no case may fail, and at least `passed` must pass.
fn check(kind: &str, passed: usize) {
    check_kinds(kind, &[(kind, passed)]);
}

fn check_kinds(directory: &str, wanted: &[(&str, usize)]) {
    let files = recordings(directory);
    let report = conformance(&files, None, 3, Through::Userspace);
    let report = report.expect("a recording cannot be read");
    let ConformanceReport {
        kinds, mismatches, ..
    } = &report;
    for (kind, counts) in kinds {
        println!("{kind}: {counts}");
    }
    let shown = mismatches[..mismatches.len().min(20)].join("\n");
    assert!(mismatches.is_empty(), "{shown}");
    for &(kind, passed) in wanted {
        let counts = kinds
            .get(kind)
            .unwrap_or_else(|| panic!("no cases of {kind} were replayed"));
        assert!(
            counts.passed >= passed,
            "only {} cases of {kind} passed",
            counts.passed
        );
    }
}

#[test]
fn schedulers_choose_servers_of_kernel_recordings() {
    check("schedulers", 1232);
}

#[test]
fn persistent_connections_equal_kernel_recordings() {
    check("persistence", 357);
}

#[test]
fn connection_states_equal_kernel_recordings() {
    check("tcpstates", 1475);
}

#[test]
fn counters_and_rates_equal_kernel_recordings() {
    check("stats", 74);
}

#[test]
fn forwarded_packets_equal_kernel_recordings() {
    check("packets", 272);
}

#[test]
fn proc_files_equal_kernel_recordings() {
    check("proc", 3);
}

#[test]
fn ftp_connections_equal_kernel_recordings() {
    check("ftp", 470);
}

#[test]
fn sync_messages_equal_kernel_recordings() {
    check("sync", 1910);
}

/// Random operations and frames, recorded from Linux 6.12, for cases that the other recordings
/// lack.
#[test]
fn random_operations_equal_kernel_recordings() {
    let wanted = [
        ("schedulers", 160),
        ("persistence", 180),
        ("tcpstates", 300),
        ("packets", 104),
        ("stats", 46),
        ("sync", 169),
    ];
    check_kinds("differential", &wanted);
}

/// Replays the recordings with the BPF programs of the kernel fast path. The results must equal the
/// recordings and, frame by frame, the results without the programs. The programs must forward at
/// least `forwarded` frames.
fn check_fast_path(files: &[PathBuf], forwarded: u64) {
    let report = match conformance(files, None, 3, Through::FastPath) {
        Ok(report) => report,
        // For root of the initial user namespace, missing BPF is a failure of the test.
        Err(error) => {
            let cause = error.downcast_ref();
            let excused = matches!(cause, Some(FastPathError::Permission(_))) && !is_root_of_all();
            assert!(excused, "{error:?}");
            not_run(&format!("needs BPF: {error}"));
        }
    };
    for (kind, counts) in &report.kinds {
        println!("{kind}: {counts}");
    }
    let shown = report.mismatches[..report.mismatches.len().min(20)].join("\n");
    assert!(report.mismatches.is_empty(), "{shown}");
    let all: u64 = report
        .kinds
        .values()
        .map(|counts| counts.forwarded.all)
        .sum();
    assert!(all >= forwarded, "only {all} frames were forwarded");
}

#[test]
fn fast_path_packets_and_counters_equal_kernel_recordings() {
    check_fast_path(&recordings("packets"), 200);
    check_fast_path(&recordings("stats"), 500);
    check_fast_path(&recordings("proc"), 0);
}

#[test]
#[ignore = "long"]
fn fast_path_connection_states_equal_kernel_recordings() {
    check_fast_path(&recordings("tcpstates"), 70);
}

#[test]
#[ignore = "long"]
fn fast_path_persistence_and_ftp_helper_equal_kernel_recordings() {
    check_fast_path(&recordings("persistence"), 4);
    check_fast_path(&recordings("ftp"), 10);
}

/// Cases with long bursts of packets that open connections are omitted: they take minutes, and the
/// BPF programs forward none of these packets. The counters of the programs are read after each
/// packet, so that the master of the synchronisation sends the same messages as the kernel.
#[test]
#[ignore = "long"]
fn fast_path_schedulers_and_sync_equal_kernel_recordings() {
    let files = [recordings("schedulers"), recordings("sync")];
    let short = ["fuzz", "ovf", "encode", "sequences"];
    let is_short = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        short.iter().any(|short| name.starts_with(short))
    };
    let files: Vec<PathBuf> = files.concat().into_iter().filter(is_short).collect();
    check_fast_path(&files, 3000);
}

#[test]
#[ignore = "long"]
fn fast_path_random_operations_equal_kernel_recordings() {
    check_fast_path(&recordings("differential"), 300);
}

/// The program exits with status 1 if a case differs or contains an unknown step.
#[test]
fn conformance_program_reports_difference_and_unknown_step() {
    let case = serde_json::json!({
        "name": "made-up", "proto": "tcp", "scheduler": "rr", "flags": [],
        "service": {"addr": "10.0.0.80", "port": 80},
        "destinations": [{"addr": "10.1.0.11", "port": 8080, "weight": 1, "forward": "masq"}],
        "steps": [
            {"op": "connect", "client": "192.0.2.7:4000", "to": "SYN_RECV", "expect": "10.1.0.11:8080"},
            {"op": "connect", "client": "192.0.2.7:4001", "to": "SYN_RECV", "expect": "10.1.0.12:8080"},
        ],
    });
    let directory = tempfile::tempdir().expect("no temporary directory was created");
    let path = directory.path().join("case.jsonl");
    std::fs::write(&path, case.to_string()).expect("the file cannot be written");
    let run = |path: &Path| {
        let program = env!("CARGO_BIN_EXE_lvs-testbed");
        let output = std::process::Command::new(program)
            .arg("conformance")
            .arg(path)
            .output()
            .expect("the program did not start");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.code(), text)
    };
    let (code, text) = run(&path);
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("made-up step 1 (connect) server"),
        "no `made-up step 1 (connect) server` in {text}"
    );
    assert!(
        text.contains("expected Some(\"10.1.0.12:8080\")"),
        "no `expected Some(\"10.1.0.12:8080\")` in {text}"
    );
    assert!(
        text.ends_with("\n0 passed, 1 failed\n"),
        "the output does not end with ` / 0 passed, 1 failed`: {text}"
    );

    let right = case.to_string().replace("10.1.0.12:8080", "10.1.0.11:8080");
    std::fs::write(&path, right).expect("the file cannot be written");
    let (code, text) = run(&path);
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.ends_with("\n1 passed, 0 failed\n"),
        "the output does not end with ` / 1 passed, 0 failed`: {text}"
    );

    // An unknown step is a failure unless it is allowed.
    let unbuilt = serde_json::json!({
        "name": "made-up", "config": {"services": []}, "steps": [{"op": "made-up"}],
    });
    std::fs::write(&path, unbuilt.to_string()).expect("the file cannot be written");
    let (code, text) = run(&path);
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("1 skipped (step \"made-up\")"),
        "no `1 skipped (step \"made-up\")` in {text}"
    );
}
