//! `lvsadm`, also as `ipvsadm`, `ipvsadm-save` and `ipvsadm-restore`.
#![forbid(unsafe_code)]

use std::env;
use std::io::{self, StderrLock, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::process::ExitCode;

use lvs_api::Address;
use lvs_api::names::Names;
use lvsadm::{Streams, run, start};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

fn main() -> ExitCode {
    let argv: Vec<Vec<u8>> = env::args_os().map(OsStringExt::into_vec).collect();
    let status = run(
        &argv,
        Address::from_env(),
        &mut start::connect,
        &Names::system,
        &mut Streams {
            input: &mut io::stdin().lock(),
            output: &mut io::stdout().lock(),
            errors: &mut Errors::new(),
        },
    );
    ExitCode::from(status)
}

/// Longest time in milliseconds that the reader of standard error may leave its pipe full.
const PATIENCE: u16 = 1000;

/// Standard error, best effort: output that no process reads is lost, and changes neither the
/// command's effect nor its exit status.
struct Errors {
    stream: StderrLock<'static>,
    /// Whether output was lost.
    lost: bool,
}

impl Errors {
    /// Minimum number of bytes for which a pipe has room when it is reported as writable
    /// (`pipe(7)`).
    const PIECE: usize = 4096;

    fn new() -> Self {
        Self {
            stream: io::stderr().lock(),
            lost: false,
        }
    }

    /// Whether the pipe has room, or gets room in time.
    fn room(&self) -> bool {
        let mut place = [PollFd::new(self.stream.as_fd(), PollFlags::POLLOUT)];
        loop {
            match poll(&mut place, PollTimeout::from(PATIENCE)) {
                Ok(n) => return n > 0,
                Err(Errno::EINTR) => {}
                Err(_) => return false,
            }
        }
    }
}

impl Write for Errors {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = &bytes[..bytes.len().min(Self::PIECE)];
        self.lost = self.lost || !self.room();
        if !self.lost && self.stream.write_all(piece).is_err() {
            self.lost = true;
        }
        Ok(if self.lost { bytes.len() } else { piece.len() })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
