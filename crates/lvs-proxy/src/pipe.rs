//! Copies bytes from one socket to another.
//!
//! Small amounts are copied through a buffer of the thread; large amounts are spliced through a
//! pipe without a copy. A connection keeps a pipe, or memory for bytes that were not sent yet, only
//! while its receiver accepts no more data; an idle connection keeps neither.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::pipe::{PipeFlags, SpliceFlags, pipe_with, splice};
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::balancer::{Entry, Way};

/// Maximum number of bytes that are copied at a time. In each direction of a connection with a slow
/// receiver, the process stores at most this number of bytes, or the content of a pipe.
const COPY: usize = 16 << 10;
/// Size of a pipe in bytes: 16 pages, unless the kernel grants less.
const PIPE: usize = 64 << 10;
/// Maximum number of pipes in the whole process, including empty ones that threads keep. If more
/// would be needed, bytes are copied.
pub(super) const PIPES_MAX: usize = 1024;
/// Number of free pipes that a thread keeps for later use.
const PIPES_KEPT: usize = 64;
/// Number of chunks that are forwarded in one direction of a connection before other connections
/// have their turn.
const TURN: usize = 16;

static PIPES: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; COPY]);
    static KEPT: RefCell<Vec<Pipe>> = const { RefCell::new(Vec::new()) };
}

/// A pipe; it is empty while no connection uses it.
struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
}

impl Pipe {
    /// An unused pipe, or a new one; `None` if there are too many pipes, or no descriptors.
    fn take() -> Option<Self> {
        if let Some(kept) = KEPT.with_borrow_mut(Vec::pop) {
            return Some(kept);
        }
        if PIPES.fetch_add(1, Ordering::Relaxed) < PIPES_MAX
            && let Ok((read, write)) = pipe_with(PipeFlags::NONBLOCK | PipeFlags::CLOEXEC)
        {
            return Some(Self { read, write });
        }
        PIPES.fetch_sub(1, Ordering::Relaxed);
        None
    }

    /// Keeps an empty pipe for later use, or closes it if this thread already keeps enough pipes.
    fn keep(self) {
        KEPT.with_borrow_mut(|kept| {
            if kept.len() < PIPES_KEPT {
                kept.push(self);
            }
        });
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        PIPES.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Result of an attempt to forward one chunk.
enum Chunk {
    Nothing,
    End,
    /// The number of bytes that were forwarded.
    Moved(usize),
}

/// Forwards all data of `from` to `to`, and then the end of the stream.
pub(super) async fn pump(
    from: &TcpStream,
    to: &TcpStream,
    way: Way,
    entry: &Entry,
) -> io::Result<()> {
    let mut bulk = false;
    loop {
        from.readable().await?;
        for turn in 1.. {
            let chunk = match if bulk { Pipe::take() } else { None } {
                Some(pipe) => spliced(from, to, pipe).await?,
                None => copied(from, to).await?,
            };
            match chunk {
                Chunk::Nothing => break,
                Chunk::End => {
                    // The receiver may be closed, which the other direction detects.
                    let _ = rustix::net::shutdown(to, rustix::net::Shutdown::Write);
                    return Ok(());
                }
                Chunk::Moved(bytes) => {
                    entry.moved(way, bytes);
                    bulk = bytes >= COPY;
                    if !bulk {
                        drained(from);
                        break;
                    }
                }
            }
            if turn >= TURN {
                tokio::task::yield_now().await;
                break;
            }
        }
    }
}

/// Marks `from` as empty after a read that returned less than its buffer, so that the event loop
/// waits: the next read would find no data. An end of the stream that has arrived stays readable.
fn drained(from: &TcpStream) {
    let _ = from.try_io(Interest::READABLE, || {
        Err::<(), _>(io::ErrorKind::WouldBlock.into())
    });
}

async fn copied(from: &TcpStream, to: &TcpStream) -> io::Result<Chunk> {
    let (bytes, rest) = match BUFFER.with_borrow_mut(|buffer| -> io::Result<_> {
        let bytes = from.try_read(buffer)?;
        let mut sent = 0;
        while sent < bytes {
            match to.try_write(&buffer[sent..bytes]) {
                Ok(more) => sent += more,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Ok((bytes, buffer[sent..bytes].to_vec()))
    }) {
        Ok(done) => done,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Chunk::Nothing),
        Err(error) => return Err(error),
    };
    if bytes == 0 {
        return Ok(Chunk::End);
    }
    let mut rest = rest.as_slice();
    while !rest.is_empty() {
        to.writable().await?;
        match to.try_write(rest) {
            Ok(sent) => rest = &rest[sent..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Chunk::Moved(bytes))
}

async fn spliced(from: &TcpStream, to: &TcpStream, pipe: Pipe) -> io::Result<Chunk> {
    let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
    let read = from.try_io(Interest::READABLE, || {
        Ok(splice(from, None, &pipe.write, None, PIPE, flags)?)
    });
    let bytes = match read {
        Ok(0) => {
            pipe.keep();
            return Ok(Chunk::End);
        }
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            pipe.keep();
            return Ok(Chunk::Nothing);
        }
        Err(error) => return Err(error),
    };
    let mut left = bytes;
    while left > 0 {
        let sent = to.try_io(Interest::WRITABLE, || {
            Ok(splice(&pipe.read, None, to, None, left, flags)?)
        });
        match sent {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(sent) => left -= sent,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => to.writable().await?,
            Err(error) => return Err(error),
        }
    }
    pipe.keep();
    Ok(Chunk::Moved(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relay_pipes_are_limited_in_number_and_kept_for_reuse() {
        // Simulates other threads that use all pipes but one.
        PIPES.fetch_add(PIPES_MAX - 1, Ordering::Relaxed);
        let before = PIPES.load(Ordering::Relaxed);
        let taken: Vec<Pipe> = std::iter::from_fn(Pipe::take).collect();
        assert!(taken.len() <= 1);
        assert!(Pipe::take().is_none());
        assert!(before + taken.len() >= PIPES_MAX);
        drop(taken);
        PIPES.fetch_sub(PIPES_MAX - 1, Ordering::Relaxed);
        let one = Pipe::take().expect("fewer pipes than the maximum exist");
        one.keep();
        assert!(KEPT.with_borrow(|kept| kept.len() == 1));
        KEPT.with_borrow_mut(Vec::clear);
    }
}
