//! Replaces files atomically, so that a reader finds either the old or the new content.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Replaces a file by `contents`, with these permissions.
///
/// # Errors
/// The file cannot be written; its old content remains.
pub(crate) fn replace(path: &Path, contents: &[u8], mode: u32) -> io::Result<()> {
    let (new, _) = write(path, contents, mode)?;
    std::fs::rename(&new, path)
}

/// Replaces a file like [`replace`], but the new file survives a power failure.
///
/// # Errors
/// As [`replace`]; or the file is replaced, but may not survive a power failure.
pub(crate) fn replace_for_good(path: &Path, contents: &[u8], mode: u32) -> io::Result<()> {
    let (new, file) = write(path, contents, mode)?;
    file.sync_all()?;
    std::fs::rename(&new, path)?;
    // The directory contains the new name, and must also be synced.
    let directory = path.parent().filter(|path| !path.as_os_str().is_empty());
    File::open(directory.unwrap_or_else(|| Path::new(".")))?.sync_all()
}

/// Writes the new content to a temporary file in the same directory.
fn write(path: &Path, contents: &[u8], mode: u32) -> io::Result<(PathBuf, File)> {
    let mut name = OsString::from(path);
    name.push(".new");
    let new = PathBuf::from(name);
    // Removes another user's symbolic link, or the file of a process that exited during a write.
    let _ = std::fs::remove_file(&new);
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(mode);
    let mut file = options.open(&new)?;
    file.write_all(contents)?;
    Ok((new, file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_replaced_without_following_symlink_at_temporary_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("track");
        for text in ["-254\n", "0\n"] {
            replace(&path, text.as_bytes(), 0o644).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        let elsewhere = directory.path().join("elsewhere");
        std::os::unix::fs::symlink(&elsewhere, path.with_extension("new")).unwrap();
        replace_for_good(&path, b"1\n", 0o644).unwrap();
        assert!(!elsewhere.exists());
    }
}
