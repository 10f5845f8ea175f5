//! Reads and writes with an absolute deadline: a peer that sends or reads one byte from time to
//! time is disconnected like a silent one.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};

/// Remaining time until the deadline; an error if the deadline has passed.
fn left(until: Instant) -> io::Result<Option<Duration>> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(Some(left))
}

/// Reads once, and fails if no byte arrives before the deadline.
pub fn read_until<S>(mut stream: &S, bytes: &mut [u8], until: Instant) -> io::Result<usize>
where
    S: AsFd,
    for<'a> &'a S: Read,
{
    set_socket_timeout(stream, Timeout::Recv, left(until)?)?;
    stream.read(bytes)
}

/// Writes all bytes, and fails if the peer does not accept them within `patience`.
pub fn write_within<S>(mut stream: &S, mut bytes: &[u8], patience: Duration) -> io::Result<()>
where
    S: AsFd,
    for<'a> &'a S: Write,
{
    let until = Instant::now() + patience;
    while !bytes.is_empty() {
        set_socket_timeout(stream, Timeout::Send, left(until)?)?;
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
