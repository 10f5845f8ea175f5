//! A tree like `/proc/net/ip_vs*`, for node_exporter and scripts that read those files.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::OFlags;

use super::Api;
use crate::door::Look;

/// How often it is written.
pub const EVERY: Duration = Duration::from_secs(2);

/// The files, below `net`.
const FILES: [&str; 2] = ["ip_vs", "ip_vs_stats"];

/// Writes the files anew, or takes them away while there is no engine that they could tell of.
///
/// # Errors
/// They cannot be written, in words.
pub(super) async fn refresh(api: &Arc<Api>, path: &Path) -> Result<(), String> {
    let Ok(look) = api.look().await else {
        return Ok(());
    };
    let path = path.to_owned();
    // Whoever waits here lets others be served.
    let written = tokio::task::spawn_blocking(move || {
        if !look.status.engine.connected {
            remove(&path);
            return Ok(());
        }
        write(&path, &look)
    });
    written.await.unwrap_or(Ok(()))
}

/// Puts each file in the place of the old one as a whole.
fn write(path: &Path, look: &Look) -> Result<(), String> {
    let net = path.join("net");
    let fail = |error: io::Error| {
        format!(
            "cannot write the files of `procfs` in [api] to {}: {error}; name a directory that lvsd may write to",
            net.display()
        )
    };
    // Others are to read it, whatever the service manager's mask is.
    for made in [path, &net] {
        // What is there keeps its mode.
        if !made.exists() {
            fs::create_dir_all(made).map_err(fail)?;
            fs::set_permissions(made, fs::Permissions::from_mode(0o755)).map_err(fail)?;
        }
    }
    let seen = &look.found.seen;
    let (mut services, mut totals) = (String::new(), String::new());
    // A string takes everything.
    let _ = lvs_core::proc::listed(&mut services, &seen.services, seen.table_size);
    let _ = lvs_core::proc::totals(&mut totals, &seen.info.total);
    for (name, text) in FILES.iter().zip([services, totals]) {
        let new = net.join(format!(".{name}.new"));
        let mut options = fs::OpenOptions::new();
        // What another has put there is not opened: it may be a pipe.
        let _ = fs::remove_file(&new);
        options.write(true).create_new(true).mode(0o644);
        options.custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
        options
            .open(&new)
            .and_then(|mut file| {
                file.set_permissions(fs::Permissions::from_mode(0o644))?;
                file.write_all(text.as_bytes())
            })
            .and_then(|()| fs::rename(&new, net.join(name)))
            .map_err(fail)?;
    }
    Ok(())
}

/// Takes the files away, and nothing else.
pub(super) fn remove(path: &Path) {
    for name in FILES {
        let _ = fs::remove_file(path.join("net").join(name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::overview::tests::look;

    #[test]
    fn everybody_can_read_the_files_and_they_go_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("proc");
        write(&path, &look("web")).expect("written");
        let mode = |name: &str| {
            let meta = fs::metadata(path.join(name)).expect("it is there");
            meta.permissions().mode() & 0o777
        };
        assert_eq!(
            (mode(""), mode("net"), mode("net/ip_vs")),
            (0o755, 0o755, 0o644)
        );
        let text = fs::read_to_string(path.join("net/ip_vs")).expect("text");
        assert!(text.contains("TCP  C000020A:0050 wlc"), "{text}");
        fs::write(path.join("net/mine"), "").expect("written");
        remove(&path);
        assert!(!path.join("net/ip_vs").exists() && path.join("net/mine").exists());
    }
}
