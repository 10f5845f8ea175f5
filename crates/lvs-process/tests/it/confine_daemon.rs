//! Tests that `lvsd` drops its privileges, and that the programs of its checks keep the privileges
//! that they need.

use std::process::Command;

use lvs_process::confine::daemon;

fn sh(script: &str) -> String {
    let done = Command::new("/bin/sh").args(["-c", script]).output();
    let done = done.expect("the shell runs");
    String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned()
}

#[test]
fn sandboxed_check_program_can_write_files_but_not_call_swapoff() {
    if crate::ran_alone(
        "confine_daemon::sandboxed_check_program_can_write_files_but_not_call_swapoff",
    ) {
        return;
    }
    let before = sh("grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status");
    let done = daemon();
    let place = tempfile::tempdir().expect("the temporary directory can be created");
    let written = sh(&format!(
        "echo x > {0}/y && cat {0}/y",
        place.path().display()
    ));
    assert_eq!(written, "x\n", "a child process could not write its file");
    if done.by.is_empty() {
        assert!(done.not_by[0].contains("no_new_privs"), "{done}");
        return;
    }
    // `NoNewPrivs` is unchanged, so that `sudo` and `ping` can still gain rights.
    let after = sh("grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status");
    assert_eq!(after, before.replace("Seccomp:\t0", "Seccomp:\t2"));
    let off = sh("LC_ALL=C PATH=$PATH:/usr/sbin:/sbin swapoff /nonexistent");
    let refused = ["not permitted", "superuser", "not found"];
    assert!(refused.iter().any(|words| off.contains(words)), "{off}");
}
