//! The program's command line.

use std::fs::OpenOptions;
use std::process::{Command, Output, Stdio};

fn lvsd(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lvsd"));
    command.args(arguments).env_remove("LVS_SOCKET");
    command
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn commands_that_print_text_exit_with_code_1_if_output_disk_is_full() {
    let directory = tempfile::tempdir().expect("a temporary directory can be created");
    let keepalived = directory.path().join("keepalived.conf");
    std::fs::write(&keepalived, "virtual_server 192.0.2.1 80 {\n delay 5\n}\n")
        .expect("the file can be written");
    let keepalived = keepalived.display().to_string();
    for arguments in [
        &["man"][..],
        &["man", "--config-file"],
        &["schema"],
        &["completions", "bash"],
        &["--version"],
        &["--help"],
        &["convert", &keepalived],
    ] {
        let full = OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .expect("/dev/full can be opened");
        let output = lvsd(arguments)
            .stdout(full)
            .stderr(Stdio::piped())
            .output()
            .expect("lvsd can be started");
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        let message = errors(&output);
        assert!(
            message.contains("write error"),
            "{arguments:?}: no `write error` in {message}"
        );
    }
}

#[test]
fn file_argument_without_option_suggests_config_option() {
    let directory = tempfile::tempdir().expect("a temporary directory can be created");
    let path = directory.path().join("lvsd.toml");
    std::fs::write(&path, "").expect("the file can be written");
    let path = path.display().to_string();
    let output = lvsd(&[&path]).output().expect("lvsd can be started");
    assert_eq!(output.status.code(), Some(2));
    let message = errors(&output);
    assert!(message.contains(&format!("--config {path}")), "{message}");
}

#[test]
fn converted_text_and_messages_have_no_control_characters() {
    let directory = tempfile::tempdir().expect("a temporary directory can be created");
    let path = directory.path().join("keepalived.conf");
    let text = "include keepalived.conf\n\
         global_defs {\n router_id a\x1b[31m\x07b\x7f\n}\n\
         vrrp_instance x\x01y {\n interface e\x0bth0\n}\n\
         virtual_server 192.0.2.1 80 {\n strange\x1b[2J thing\n\
         real_server 10.0.0.1 80 {\n }\n}\n";
    std::fs::write(&path, text).expect("the file can be written");
    let path = path.display().to_string();
    let output = lvsd(&["convert", &path])
        .output()
        .expect("lvsd can be started");
    assert_eq!(output.status.code(), Some(4));
    let message = errors(&output);
    for text in [
        &message,
        &String::from_utf8_lossy(&output.stdout).into_owned(),
    ] {
        let strange = text.chars().find(|c| c.is_control() && *c != '\n');
        assert_eq!(strange, None, "{text:?}");
    }
    assert_eq!(message.matches("includes itself").count(), 1, "{message}");
    let result = directory.path().join("lvsd.toml");
    std::fs::write(&result, &output.stdout).expect("the file can be written");
    let result = result.display().to_string();
    let output = lvsd(&["check", &result])
        .output()
        .expect("lvsd can be started");
    assert!(output.status.success(), "{}", errors(&output));
}

#[test]
fn check_config_option_is_refused_with_a_hint_to_lvsd_check() {
    for arguments in [&["--check-config"][..], &["--check-config", "lvsd.toml"]] {
        let output = lvsd(arguments).output().expect("lvsd can be started");
        assert_eq!(output.status.code(), Some(2));
        let message = errors(&output);
        assert!(
            message.contains("`lvsd check [FILE]`"),
            "{arguments:?}: no \"`lvsd check [FILE]`\" in {message}"
        );
    }
}

#[test]
fn lvsadm_command_given_to_lvsd_is_refused_with_name_of_lvsadm() {
    let output = lvsd(&["doctor"]).output().expect("lvsd can be started");
    assert_eq!(output.status.code(), Some(2));
    let message = errors(&output);
    assert!(
        message.contains("`lvsadm doctor`"),
        "no \"`lvsadm doctor`\" in {message}"
    );
}

/// Checks the file as written, and with those of its commented keys that are compatible.
#[test]
fn init_writes_a_file_that_is_valid_without_a_warning() {
    let directory = tempfile::tempdir().expect("a temporary directory can be created");
    let path = directory.path().join("lvsd.toml");
    let named = path.display().to_string();
    let output = lvsd(&["init", &named])
        .output()
        .expect("lvsd can be started");
    assert!(output.status.success(), "{}", errors(&output));
    let text = std::fs::read_to_string(&path).expect("the file is readable");
    let printed = lvsd(&["init"])
        .output()
        .expect("lvsd can be started")
        .stdout;
    assert_eq!(text.as_bytes(), printed);
    let uncommented: Vec<&str> = text
        .lines()
        .map(|line| match line.strip_prefix("# ") {
            Some(key) if key.starts_with('[') || key.contains(" = ") && !key.contains(". ") => key,
            _ => line,
        })
        .collect();
    let uncommented = uncommented.join("\n");
    assert!(
        uncommented.contains("\n[sync.peers]\naddresses"),
        "no ` / [sync.peers] / addresses` in {uncommented}"
    );
    for text in [&text, &uncommented] {
        let read = lvsd::config::Config::from_toml("lvsd.toml", text);
        let (_, report) = read.unwrap_or_else(|report| panic!("{report}"));
        assert_eq!(report.to_string(), "", "{text}");
    }
}

#[test]
fn init_never_overwrites_a_file() {
    let directory = tempfile::tempdir().expect("a temporary directory can be created");
    let path = directory.path().join("lvsd.toml");
    std::fs::write(&path, "mine").expect("the file can be written");
    let named = path.display().to_string();
    let output = lvsd(&["init", &named])
        .output()
        .expect("lvsd can be started");
    assert_eq!(output.status.code(), Some(1));
    assert!(errors(&output).contains("is unchanged"));
    assert_eq!(std::fs::read(&path).expect("the file is readable"), b"mine");
}
