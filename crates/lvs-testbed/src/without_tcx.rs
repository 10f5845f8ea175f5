//! Simulates a kernel without tcx (before Linux 6.6) for one program and its children: listing the
//! tcx programs of an interface fails.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result};
use nix::libc;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

/// `BPF_PROG_QUERY` (linux/bpf.h). For tcx, a kernel without tcx returns `EINVAL`.
const PROG_QUERY: u64 = 16;

/// Options of `lvs-testbed without-tcx`.
#[derive(Clone, Debug, clap::Args)]
pub struct WithoutTcxOptions {
    /// The program to run
    program: String,
    /// Arguments of the program
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Runs `lvs-testbed without-tcx`: replaces this process by the program.
///
/// # Errors
/// The kernel does not support seccomp filters, or the program cannot be started.
pub fn run(options: &WithoutTcxOptions) -> Result<Infallible> {
    let query = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, PROG_QUERY)?;
    let filter = SeccompFilter::new(
        BTreeMap::from([(libc::SYS_bpf, vec![SeccompRule::new(vec![query])?])]),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EINVAL.cast_unsigned()),
        std::env::consts::ARCH.try_into()?,
    )?;
    seccompiler::apply_filter(&BpfProgram::try_from(filter)?)?;
    let error = Command::new(&options.program)
        .args(&options.arguments)
        .exec();
    Err(error).with_context(|| format!("cannot start {}", options.program))
}
