//! A tree like `/proc/net/ip_vs*`, for node_exporter and scripts that read those files.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
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
    fs::create_dir_all(&net).map_err(fail)?;
    let seen = &look.found.seen;
    let (mut services, mut totals) = (String::new(), String::new());
    // A string takes everything.
    let _ = lvs_core::proc::listed(&mut services, &seen.services, seen.table_size);
    let _ = lvs_core::proc::totals(&mut totals, &seen.info.total);
    for (name, text) in FILES.iter().zip([services, totals]) {
        let new = net.join(format!(".{name}.new"));
        let mut options = fs::OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o644);
        options.custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
        options
            .open(&new)
            .and_then(|mut file| file.write_all(text.as_bytes()))
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
