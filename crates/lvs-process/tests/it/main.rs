//! The integration tests of the crate, in one executable.

mod confine;
mod confine_daemon;

/// Runs a test that drops privileges in a separate process, and checks that it passes there.
/// Returns false in that process, which must then execute the test.
fn ran_alone(test: &str) -> bool {
    const ALONE: &str = "LVS_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return false;
    }
    let status = std::process::Command::new(
        std::env::current_exe().expect("the path of this program is known"),
    )
    .args(["--exact", test, "--nocapture"])
    .env(ALONE, "1")
    .status()
    .expect("this program starts again");
    assert!(status.success(), "{test}: {status}");
    true
}
