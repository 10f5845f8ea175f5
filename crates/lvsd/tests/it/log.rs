//! With full outputs, lvsd still exits with the correct code.

use std::fs::{File, OpenOptions};
use std::process::{Command, ExitStatus};

fn full() -> File {
    OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .expect("/dev/full can be opened")
}

fn check(text: &str) -> ExitStatus {
    let directory = tempfile::tempdir().expect("a temporary directory can be created");
    let path = directory.path().join("lvsd.toml");
    std::fs::write(&path, text).expect("the file can be written");
    Command::new(env!("CARGO_BIN_EXE_lvsd"))
        .arg("check")
        .arg(&path)
        .stdout(full())
        .stderr(full())
        .status()
        .expect("lvsd can be started")
}

#[test]
fn full_output_disk_does_not_change_exit_code_of_check_and_failed_start() {
    assert_eq!(check("").code(), Some(0));
    assert_eq!(check("nonsense = 1\n").code(), Some(3));
    let missing = Command::new(env!("CARGO_BIN_EXE_lvsd"))
        .args(["--config", "/nonexistent/lvsd.toml"])
        .stderr(full())
        .status()
        .expect("lvsd can be started");
    assert_eq!(missing.code(), Some(3));
}
