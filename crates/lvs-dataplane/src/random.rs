//! Secret random numbers.

use std::fs::File;
use std::io::{self, Read};

/// Random bytes, from /dev/urandom.
///
/// # Errors
/// If the device does not exist or cannot be opened.
pub(crate) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes))?;
    Ok(bytes)
}
