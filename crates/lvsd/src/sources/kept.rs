//! Stores the answers of sources in the state directory.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::{Gathered, Shared};
use crate::admin;
use crate::replace::replace_for_good;

/// Maximum size in bytes of the file of stored answers.
const FILE_MAX: u64 = 64 << 20;
/// Minimum interval between two writes of the file of stored answers.
const PAUSE: Duration = Duration::from_millis(500);

/// Path of the stored answers of the daemon with the configuration `config`.
pub(super) fn path(directory: &Path, config: &Path) -> PathBuf {
    let admin = admin::path(directory, config);
    let name = admin.to_string_lossy();
    PathBuf::from(format!(
        "{}.sources.json",
        name.trim_end_matches(".admin.json")
    ))
}

/// Reads the stored answers. Returns none if the file does not exist, is longer than [`FILE_MAX`],
/// or cannot be read or parsed; all but the first of these cases are logged.
pub(super) fn read(path: &Path) -> Gathered {
    let text = std::fs::metadata(path).and_then(|file| match file.len() {
        0..=FILE_MAX => std::fs::read(path),
        _ => Err(io::Error::other("it is longer than 64 MiB")),
    });
    let text = match text {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Gathered::default(),
        Err(error) => {
            tracing::error!(
                "cannot read {}: {error}; the servers from DNS, etcd and Kubernetes are unknown until these sources answer again",
                path.display()
            );
            return Gathered::default();
        }
    };
    serde_json::from_slice(&text).unwrap_or_else(|error| {
        tracing::error!(
            "{} is invalid ({error}); the servers from DNS, etcd and Kubernetes are unknown until these sources answer again",
            path.display()
        );
        Gathered::default()
    })
}

pub(super) fn write(path: &Path, gathered: &Gathered) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        // A failure is reported when the file is written.
        let _ = std::fs::create_dir_all(directory);
    }
    let text = serde_json::to_vec(gathered).map_err(io::Error::other)?;
    replace_for_good(path, &text, 0o600)
}

/// Stores answers whenever they change, until the task is aborted. Does nothing without a path.
pub(super) async fn keep(path: Option<PathBuf>, shared: Arc<Shared>) {
    let Some(path) = path else { return };
    let mut complained = false;
    loop {
        shared.keep.notified().await;
        let gathered = shared.lock().gathered.clone();
        let at = path.clone();
        // A busy disk may take seconds, while leases must be renewed.
        let written = tokio::task::spawn_blocking(move || write(&at, &gathered)).await;
        match written.unwrap_or_else(|error| Err(io::Error::other(error))) {
            Ok(()) => complained = false,
            Err(error) if !complained => {
                complained = true;
                tracing::error!(
                    "cannot store the answers of DNS, etcd and Kubernetes in {}: {error}; an lvsd that starts while these sources are unreachable would not know their servers; use another directory with --state",
                    path.display()
                );
            }
            Err(_) => {}
        }
        tokio::time::sleep(PAUSE).await;
    }
}
