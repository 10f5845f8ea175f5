//! The integration tests that need no privileges, in one executable.

mod log;
mod watchdog;

/// The program as root of a user namespace, in a network namespace that has only `lo`.
fn dataplane() -> std::process::Command {
    let mut command = std::process::Command::new("unshare");
    command
        .args(["--user", "--map-root-user", "--net", "--"])
        .arg(env!("CARGO_BIN_EXE_lvs-dataplane"));
    command
}
