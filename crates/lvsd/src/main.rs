//! `lvsd`, the program.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match lvsd::cli::Arguments::try_parse() {
        Ok(arguments) => lvsd::cli::main(arguments),
        Err(error) => lvsd::cli::refused(&error),
    }
}
