//! `lvsadm`, also as `ipvsadm`, `ipvsadm-save` and `ipvsadm-restore`.
#![forbid(unsafe_code)]

use std::env;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::process::ExitCode;

use lvs_dataplane::control::Address;
use lvs_dataplane::names::Names;
use lvsadm::{Streams, run, start};

fn main() -> ExitCode {
    let argv: Vec<Vec<u8>> = env::args_os().map(OsStringExt::into_vec).collect();
    let status = run(
        &argv,
        Address::from_env(),
        &mut start::connect,
        &Names::system,
        &mut Streams {
            input: &mut io::stdin().lock(),
            output: &mut io::stdout().lock(),
            errors: &mut io::stderr().lock(),
        },
    );
    ExitCode::from(status)
}
