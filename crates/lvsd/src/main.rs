//! `lvsd`, the program.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use lvs_sys::signals::ignore_signals;

fn main() -> ExitCode {
    // Ignore signals first: a terminal may be closed at any time.
    let ignored = ignore_signals();
    match lvsd::cli::Arguments::try_parse() {
        Ok(arguments) => lvsd::cli::main(arguments, ignored),
        Err(error) => {
            ignored.restore();
            lvsd::cli::refused(&error)
        }
    }
}
