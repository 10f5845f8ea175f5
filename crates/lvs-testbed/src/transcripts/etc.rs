//! Replaces the files in `/etc` that define names of hosts and services by those of the recording
//! host.

use std::fs;
use std::path::Path;

use anyhow::Context;
use nix::mount::{MsFlags, mount};

/// The names in /etc/services that the recordings use (netbase 6.4).
const SERVICES: &str = "\
tcpmux 1/tcp
ftp 21/tcp
fsp 21/udp fspd
ssh 22/tcp
smtp 25/tcp mail
domain 53/tcp
domain 53/udp
http 80/tcp www
tftp 69/udp
snmp 161/tcp
snmp 161/udp
https 443/tcp
https 443/udp
mysql 3306/tcp
sip 5060/tcp
sip 5060/udp
http-alt 8080/tcp webcache
";

/// Limits later mounts to this process's mount namespace.
///
/// # Errors
/// The process may not mount.
pub(crate) fn private_mounts() -> anyhow::Result<()> {
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(
        None::<&str>,
        Path::new("/"),
        None::<&str>,
        private,
        None::<&str>,
    )
    .context("cannot make the mounts private")
}

/// Bind-mounts `source` over `target`.
pub(super) fn bind(source: &Path, target: &Path) -> anyhow::Result<()> {
    mount(
        Some(source),
        target,
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )
    .with_context(|| format!("cannot mount {} on {}", source.display(), target.display()))
}

/// Replaces `/etc` by a directory in `dir` with the text `hosts` as its `hosts` file, with
/// [`SERVICES`] except those in `unknown`, and with the files of the dynamic linker.
///
/// # Errors
/// The process may not mount, or the files cannot be written.
pub(crate) fn replace(dir: &Path, hosts: &str, unknown: &[String]) -> anyhow::Result<()> {
    let known = |line: &&str| {
        !unknown
            .iter()
            .any(|name| line.split(' ').next() == Some(name))
    };
    let services: String = SERVICES
        .lines()
        .filter(known)
        .map(|line| format!("{line}\n"))
        .collect();
    let etc = dir.join("etc");
    fs::create_dir(&etc)?;
    open_to_all(&etc, 0o755)?;
    for (name, text) in [
        ("hosts", hosts),
        ("services", services.as_str()),
        ("nsswitch.conf", "hosts: files\nservices: files\n"),
    ] {
        fs::write(etc.join(name), text)?;
        open_to_all(&etc.join(name), 0o644)?;
    }
    // Copy the files of the dynamic linker, which programs may need to find their libraries.
    for name in ["ld.so.cache", "ld.so.conf"] {
        if Path::new("/etc").join(name).exists() {
            fs::copy(Path::new("/etc").join(name), etc.join(name))?;
        }
    }
    bind(&etc, Path::new("/etc"))
}

pub(super) fn open_to_all(path: &Path, mode: u32) -> anyhow::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    Ok(())
}
