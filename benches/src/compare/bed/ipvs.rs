//! Contenders that are configured with `ipvsadm` commands: the dataplane by this project's
//! `lvsadm`, and the kernel's IPVS by Debian's `ipvsadm`.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result};
use lvs_testbed::netns::run_with_input;
use lvs_testbed::programs;

use super::{Bed, TIMEOUTS, has_program};
use crate::compare::contender::{Contender, Method};

/// This file exists in each network namespace when the kernel has IPVS.
const TABLE: &str = "/proc/net/ip_vs";

/// Why a contender cannot run on this machine; `None` if it can. For the kernel's IPVS, makes the
/// kernel load the module.
pub(crate) fn lacks(who: Contender) -> Option<String> {
    let program = who.program().filter(|program| !has_program(program));
    if let Some(program) = program {
        return Some(format!(
            "{program} is not installed (`tools/setup bench` installs it)"
        ));
    }
    match who {
        Contender::Ipvs(_) => ipvs().err(),
        _ => None,
    }
}

/// Version of the kernel's IPVS, or the reason why it is missing.
pub(crate) fn ipvs() -> Result<String, String> {
    static FOUND: OnceLock<Result<String, String>> = OnceLock::new();
    let version = || {
        let table = fs::read_to_string(TABLE).ok()?;
        let first = table.lines().next()?;
        Some(first.split(" (").next().unwrap_or(first).to_owned())
    };
    let load = || {
        let loaded = Command::new("modprobe").arg("ip_vs").output();
        version().ok_or_else(|| {
            let why = loaded.map_or_else(
                |error| format!("the program cannot be started: {error}"),
                |output| String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            );
            format!("the kernel has no ip_vs (modprobe ip_vs: {why})")
        })
    };
    let found = FOUND.get_or_init(|| version().map_or_else(load, Ok));
    found.clone()
}

impl Bed {
    /// The path of the program that accepts `ipvsadm` commands for this contender.
    pub(crate) fn ipvsadm(&self) -> Result<PathBuf> {
        match self.who {
            Contender::Ipvs(_) => Ok("ipvsadm".into()),
            _ => programs::find("lvsadm"),
        }
    }

    /// Adds the services and servers of `rules`, which `ipvsadm -R` accepts.
    pub(crate) fn restore(&self, rules: &str) -> Result<()> {
        restore(self.director.command(self.ipvsadm()?), rules)
    }

    pub(super) fn start_ipvs(&self, method: Method) -> Result<()> {
        self.restore(&self.rules(method)?)?;
        self.director.run(self.ipvsadm()?, &TIMEOUTS).map(drop)
    }
}

fn restore(mut ipvsadm: Command, rules: &str) -> Result<()> {
    run_with_input(ipvsadm.arg("-R"), rules)
        .context("ipvsadm refuses the rules")
        .map(drop)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// The fake ipvsadm records its input, and refuses lines with a certain word.
    #[test]
    fn rules_are_passed_to_ipvsadm_unchanged_and_refusal_is_reported() {
        let directory = tempfile::tempdir().expect("the temporary directory can be created");
        let (program, notes) = (directory.path().join("ipvsadm"), directory.path().join("n"));
        let script = format!(
            "#!/bin/sh\necho \"$@\" >{0}\ncat >>{0}\n! grep 'Memory allocation' {0} >&2\n",
            notes.display()
        );
        fs::write(&program, script).expect("the file can be written");
        let all = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&program, all).expect("the permissions can be set");
        let rules = "-A -t 10.73.0.1:80 -s rr\n-a -t 10.73.0.1:80 -r 10.72.0.11:80 -g -w 1\n";
        restore(Command::new(&program), rules).expect("ipvsadm accepts the rules");
        let noted = fs::read_to_string(&notes).expect("the file can be read");
        assert_eq!(noted, format!("-R\n{rules}"));
        let refused = restore(Command::new(&program), "Memory allocation problem");
        let refused = format!(
            "{:#}",
            refused.expect_err("a failure of ipvsadm was not reported")
        );
        assert!(
            refused.contains("rules") && refused.contains("Memory allocation problem"),
            "{refused}"
        );
    }

    #[test]
    fn ipvs_contender_is_available_only_with_ipvsadm_and_kernel_table() {
        assert_eq!(lacks(Contender::Direct), None);
        let kernels = lacks(Contender::Ipvs(Method::Nat));
        assert_eq!(
            kernels.is_none(),
            has_program("ipvsadm") && fs::exists(TABLE).unwrap_or(false),
            "{kernels:?}"
        );
        if let (true, Some(why)) = (has_program("ipvsadm"), kernels) {
            assert!(why.contains("modprobe ip_vs: "), "{why}");
        }
    }
}
