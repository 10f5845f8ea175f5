//! The paths of the programs under test.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Finds a program of this project: in `LVS_BIN_DIR` if it is set, otherwise in the target
/// directory of the running executable (so `cargo test` uses the debug build).
///
/// # Errors
///
/// The program is missing; the message contains the command that builds it.
pub fn find(name: &str) -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("LVS_BIN_DIR") {
        let path = Path::new(&dir).join(name);
        if !path.is_file() {
            bail!(
                "{} does not exist, though LVS_BIN_DIR points there",
                path.display()
            );
        }
        return Ok(path);
    }
    let executable =
        std::env::current_exe().context("cannot find the directory of this program")?;
    // target/debug/lvs-testbed, target/debug/deps/nat-0123, target/debug/examples/x
    let found = executable
        .ancestors()
        .skip(1)
        .take(2)
        .map(|dir| dir.join(name))
        .find(|path| path.is_file());
    let Some(path) = found else {
        let release = executable
            .components()
            .any(|part| part.as_os_str() == "release");
        bail!(
            "the program {name} is not next to {}; build it with: cargo build{} --workspace --bins (or set LVS_BIN_DIR to its directory)",
            executable.display(),
            if release { " --release" } else { "" }
        );
    };
    Ok(path)
}

/// Returns the path of `lvs-testbed`, whose subcommands run on the hosts.
///
/// # Errors
///
/// The program is not built.
pub fn own() -> Result<PathBuf> {
    find("lvs-testbed")
}

/// Returns [`own`] with arguments. With `real_time`, the command has a real-time priority on the
/// first processor, so that the programs under test can use the others.
///
/// # Errors
///
/// The program is not built.
pub fn own_with(arguments: Vec<String>, real_time: bool) -> Result<(PathBuf, Vec<String>)> {
    let own = own()?;
    if !real_time {
        return Ok((own, arguments));
    }
    let chrt = "--cpu-list 0 chrt --fifo 1".split(' ');
    let mut all: Vec<String> = chrt.map(str::to_owned).collect();
    all.push(own.display().to_string());
    all.extend(arguments);
    Ok(("taskset".into(), all))
}
