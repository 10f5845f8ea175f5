//! Ends a test as "not run", because this host does not permit an operation that the test needs.

/// Ends the calling test as not run, because the host does not permit an operation that it needs.
///
/// The runner of `make test` lists it as not run. `cargo test` has no such result, and reports a
/// failure.
///
/// # Panics
///
/// If `LVS_NOT_RUN` does not contain the exit status by which a runner recognises such a test.
#[allow(clippy::print_stdout, reason = "the runner reads this line")]
pub fn not_run(reason: &str) -> ! {
    let status = std::env::var("LVS_NOT_RUN")
        .ok()
        .and_then(|status| status.parse().ok());
    let Some(status) = status else {
        panic!("not run: {reason}");
    };
    println!("not run: {reason}");
    std::process::exit(status)
}
