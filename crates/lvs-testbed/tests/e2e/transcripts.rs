//! Plays recorded sessions of ipvsadm with the real programs.

use std::path::Path;

use lvs_testbed::suite::is_full;
use lvs_testbed::transcripts::{Program, transcripts};

#[test]
fn lvsadm_reproduces_recorded_ipvsadm_sessions() {
    play_all(Program::Lvsadm);
}

/// Debian's ipvsadm configures the dataplane over netlink.
#[test]
#[ignore = "long"]
fn ipvsadm_under_lvs_run_reproduces_recorded_sessions() {
    play_all(Program::Ipvsadm);
}

fn play_all(program: Program) {
    let recordings = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/ipvsadm");
    let files = [
        "rules.jsonl.gz",
        "more.jsonl.gz",
        "random.jsonl.gz",
        "sessions.jsonl.gz",
    ]
    .map(|name| recordings.join(name));
    // `make test` plays each fourth session of the first two files.
    let (files, every, commands) = if is_full() {
        (&files[..], 1, 13_000)
    } else {
        (&files[..2], 4, 700)
    };
    let report =
        transcripts(files, None, every, program).expect("the recordings and the programs exist");
    println!("{} passed, {} failed", report.passed, report.failed);
    assert!(
        report.failed == 0,
        "{} of {} commands differ:\n{}",
        report.failed,
        report.failed + report.passed,
        report.differences[..report.differences.len().min(10)].join("\n")
    );
    assert!(
        report.passed > commands,
        "fewer commands passed than these recordings contain; passed: {}",
        report.passed
    );
}
