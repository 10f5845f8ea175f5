//! The last valid configuration, next to the dataplane's socket. If the file is invalid when lvsd
//! restarts after a crash, lvsd continues with this configuration.
//!
//! It is used only while the same dataplane runs, or has crashed. After a reboot, or after the
//! dataplane was stopped, an invalid file is refused.

use std::path::{Path, PathBuf};

use lvs_api::{Address, Client};

use crate::config::{Config, Report};
use crate::replace::replace;

/// The path of the stored configuration for the dataplane at `address`; `None` for an address
/// without a path.
pub fn path(address: &Address) -> Option<PathBuf> {
    address.state_file(".lvsd.toml")
}

/// Stores the text of a valid file.
pub fn keep(path: &Path, text: &str) {
    if let Err(error) = replace(path, text.as_bytes(), 0o600) {
        tracing::debug!(
            "cannot store the configuration in {}: {error}; if the file is invalid at a restart, lvsd cannot use this configuration instead",
            path.display()
        );
    }
}

/// The configuration that was stored for the dataplane that runs at `address`.
pub fn recall(address: &Address) -> Option<(Config, Report)> {
    Client::connect(address).ok()?;
    kept(address)
}

/// The configuration that was stored for a dataplane at `address` that runs or has crashed, and was
/// not stopped.
pub fn kept(address: &Address) -> Option<(Config, Report)> {
    Config::load(&path(address)?).ok()
}

/// Removes the stored configuration, because the dataplane at `address` is stopped.
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
    fn last_good_file_is_valid_only_with_its_dataplane() {
        let directory = tempfile::tempdir().unwrap();
        let address = Address::new(directory.path().join("dataplane.sock"));
        let kept = path(&address).unwrap();
        for text in ["[lvsd]\nmanage_all_services = true\n", "[lvsd]\n"] {
            keep(&kept, text);
            assert_eq!(std::fs::read_to_string(&kept).unwrap(), text);
        }
        assert!(recall(&address).is_none(), "no dataplane runs");
        assert!(super::kept(&address).is_some(), "a dataplane that crashed");
        forget(&address);
        assert!(
            super::kept(&address).is_none(),
            "a dataplane that was stopped"
        );
        assert_eq!(path(&Address::new("@name")), None);
    }
}
