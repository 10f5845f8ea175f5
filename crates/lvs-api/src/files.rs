//! Opening files whose path or content is not trusted.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;

/// Opens a file to read it. The call does not wait for a pipe's writer, and a terminal does not
/// become this process's controlling terminal.
///
/// # Errors
/// Errors of open(2).
pub fn open_without_waiting(path: &Path) -> io::Result<File> {
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(flags).open(path)
}
