//! `lvs-run`: runs an unmodified IPVS program on a dataplane.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(lvsadm::launch::main(std::env::args_os().skip(1)))
}
