//! The last valid configuration, stored next to the dataplane's socket. lvsd uses it if the file is
//! invalid when lvsd restarts.
//!
//! This requires that the same dataplane runs, or has crashed. After a reboot or an orderly stop of
//! the dataplane, lvsd refuses an invalid file.

use std::path::{Path, PathBuf};

use lvs_api::{Address, Client};

use crate::config::{Config, Report};
use crate::replace::replace;

/// Path of the stored configuration for a dataplane; `None` if its address has no path.
pub fn path(address: &Address) -> Option<PathBuf> {
    address.state_file(".lvsd.toml")
}

/// Stores the text of a valid file at `path`. An error is only logged.
pub fn keep(path: &Path, text: &str) {
    if let Err(error) = replace(path, text.as_bytes(), 0o600) {
        tracing::debug!(
            "cannot store the configuration in {}: {error}; if the file is invalid at a restart, lvsd cannot use this configuration instead",
            path.display()
        );
    }
}

/// The configuration stored for the dataplane that runs at `address`; `None` if no dataplane runs
/// there, or no valid configuration is stored.
pub fn recall(address: &Address) -> Option<(Config, Report)> {
    Client::connect(address).ok()?;
    kept(address)
}

/// The configuration stored for a dataplane that runs or has crashed at `address`; `None` if no
/// valid one is stored.
pub fn kept(address: &Address) -> Option<(Config, Report)> {
    Config::load(&path(address)?).ok()
}

/// Removes the configuration stored for the dataplane at `address`, which is being stopped.
pub fn forget(address: &Address) {
    if let Some(path) = path(address) {
        remove(&path);
    }
}

/// Removes the stored configuration at `path`.
pub fn remove(path: &Path) {
    // The file may not exist.
    let _ = std::fs::remove_file(path);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_good_configuration_survives_crash_is_unused_without_dataplane_and_removed_at_stop() {
        let directory = tempfile::tempdir().unwrap();
        let address = Address::new(directory.path().join("dataplane.sock"));
        let kept = path(&address).unwrap();
        for text in ["[lvsd]\nmanage_all_services = true\n", "[lvsd]\n"] {
            keep(&kept, text);
            assert_eq!(std::fs::read_to_string(&kept).unwrap(), text);
        }
        assert!(
            recall(&address).is_none(),
            "the configuration is used although no dataplane runs"
        );
        assert!(
            super::kept(&address).is_some(),
            "the configuration is not used after a crash"
        );
        forget(&address);
        assert!(
            super::kept(&address).is_none(),
            "the configuration is used after an orderly stop"
        );
        assert_eq!(path(&Address::new("@name")), None);
    }
}
