//! Every recorded session of ipvsadm, played with the real programs.

use std::path::Path;

use lvs_testbed::transcripts::transcripts;

#[test]
fn every_recorded_session_of_ipvsadm() {
    let recordings = Path::new(env!("CARGO_MANIFEST_DIR")).join("../lvs-core/tests/golden/ipvsadm");
    let files = [
        "sessions.jsonl.gz",
        "random.jsonl.gz",
        "more.jsonl.gz",
        "rules.jsonl.gz",
    ]
    .map(|name| recordings.join(name));
    let report = transcripts(&files, None).expect("the recordings and the programs are there");
    println!("{} passed, {} failed", report.passed, report.failed);
    assert!(
        report.failed == 0,
        "{} of {} commands differ:\n{}",
        report.failed,
        report.failed + report.passed,
        report.differences[..report.differences.len().min(10)].join("\n")
    );
    assert!(
        report.passed > 13_000,
        "the recordings hold more than {} commands",
        report.passed
    );
}
