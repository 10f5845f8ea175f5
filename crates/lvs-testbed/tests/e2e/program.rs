//! `lvs-testbed` without network namespaces: its lists and its error messages.

use std::process::{Command, Output};

fn testbed(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lvs-testbed"));
    command
        .args(arguments)
        .output()
        .expect("lvs-testbed did not start")
}

#[test]
fn cluster_list_option_prints_scenarios() {
    let output = testbed(&["cluster", "--list"]);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    for scenario in ["calm", "kill", "returns", "planned", "partition", "etcd"] {
        let mut lines = text.lines();
        assert!(
            lines.any(|line| line.split_whitespace().next() == Some(scenario)),
            "the scenario {scenario} is not listed: {text}"
        );
    }
}

#[test]
fn unknown_cluster_scenario_is_refused() {
    let output = testbed(&["cluster", "nonsense"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty(), "{output:?}");
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(
        message.contains("no scenario is called nonsense") && message.contains("--list"),
        "no `no scenario is called nonsense` or no `--list` in {message}"
    );
}
