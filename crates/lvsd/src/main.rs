//! `lvsd`, the program.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    lvsd::cli::main(lvsd::cli::Arguments::parse())
}
