//! `lvs-bench compare`, end to end: checks that it measures, not the results.

use std::process::Command;

use serde_json::Value;

fn compare(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lvs-bench"));
    command.arg("compare").args(arguments);
    command
}

#[test]
fn compare_list_option_prints_rows() {
    let output = compare(&["--list"]).output().expect("compare starts");
    let list = String::from_utf8(output.stdout).expect("the text is UTF-8");
    assert!(output.status.success());
    for row in [
        "nat-1k",
        "replies-1m",
        "tun-1k",
        "bulk",
        "latency-half-p99",
        "bytes-10m",
    ] {
        assert!(
            list.lines().any(|line| line.starts_with(row)),
            "{row}:\n{list}"
        );
    }
}

#[test]
fn compare_refuses_unknown_row() {
    let output = compare(&["no-such-row"]).output().expect("compare starts");
    let error = String::from_utf8(output.stderr).expect("the text is UTF-8");
    assert!(!output.status.success());
    assert!(error.contains("there is no row no-such-row"), "{error}");
}

#[test]
fn compare_measures_row_in_memory() {
    measured(&["new-rr"]);
}

/// Needs the programs in the directory of the test, where `make e2e` builds them.
#[test]
fn compare_measures_flood_rows_with_processor_time() {
    let report = measured(&["routing-1k", "tun-1k"]);
    let jobs = report["jobs"].as_array().expect("`jobs` is a list");
    for job in jobs {
        assert!(job["value"]["median"].as_f64() > Some(0.0), "{job}");
        assert!(job["cpu_ns"].is_object(), "{job}");
    }
}

/// Measures rows for the shortest time, also on a busy machine.
fn measured(rows: &[&str]) -> Value {
    let mut command = compare(rows);
    command.args([
        "--quick", "--json", "--busy", "--rounds", "1", "--window", "20",
    ]);
    let output = command.output().expect("compare starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("the JSON is valid");
    assert_eq!(report["schema"], 1);
    let lines = report["rows"].as_array().expect("`rows` is a list");
    assert_eq!(lines.len(), rows.len(), "{report}");
    for line in lines {
        assert!(line["error"].is_null(), "{line}");
        assert!(line["ratio"]["median"].as_f64() > Some(0.0), "{line}");
    }
    report
}
