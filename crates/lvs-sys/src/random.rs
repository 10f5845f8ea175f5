//! Secret random numbers.

use std::io;

use rustix::rand::{GetRandomFlags, getrandom};

/// Returns `N` random bytes from the kernel; `N` is at most 256.
///
/// # Errors
/// The kernel provides no random bytes.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    const { assert!(N <= 256, "the kernel gives that many at once") };
    let mut bytes = [0; N];
    match getrandom(&mut bytes, GetRandomFlags::empty())? {
        all if all == N => Ok(bytes),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
