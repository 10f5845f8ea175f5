//! Memory of another process, and datagrams with the kernel's metadata.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// The memory of a thread.
#[derive(Clone, Copy, Debug)]
pub struct Memory(pub u32);

impl Memory {
    fn pid(self) -> io::Result<libc::pid_t> {
        // 0 would be this process.
        match libc::pid_t::try_from(self.0) {
            Ok(pid) if pid > 0 => Ok(pid),
            _ => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        }
    }

    /// Fills `bytes` from address `at`.
    ///
    /// # Errors
    /// `EFAULT` if not all of it can be read; `EPERM` without CAP_SYS_PTRACE.
    pub fn read(self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let local = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        let remote = remote(at, bytes.len())?;
        // SAFETY: `local` describes `bytes`, which is borrowed for writing; `remote` is an address of
        // another process, which the kernel checks.
        let done = unsafe {
            libc::process_vm_readv(self.pid()?, &raw const local, 1, &raw const remote, 1, 0)
        };
        whole(done, bytes.len())
    }

    /// Writes `bytes` to address `at`.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn write(self, at: u64, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let local = libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        };
        let remote = remote(at, bytes.len())?;
        // SAFETY: `local` describes `bytes`, which the kernel only reads; `remote` is an address of
        // another process, which the kernel checks.
        let done = unsafe {
            libc::process_vm_writev(self.pid()?, &raw const local, 1, &raw const remote, 1, 0)
        };
        whole(done, bytes.len())
    }
}

fn remote(at: u64, length: usize) -> io::Result<libc::iovec> {
    let at = usize::try_from(at).map_err(|_| io::Error::from_raw_os_error(libc::EFAULT))?;
    Ok(libc::iovec {
        iov_base: std::ptr::without_provenance_mut(at),
        iov_len: length,
    })
}

fn whole(done: libc::ssize_t, length: usize) -> io::Result<()> {
    match super::super::check_len(done)? {
        moved if moved == length => Ok(()),
        _ => Err(io::Error::from_raw_os_error(libc::EFAULT)),
    }
}

/// A datagram of a netlink socket, as `recvmsg` reports it.
#[derive(Debug)]
pub struct Received {
    /// Result of the call: the length, that of the whole datagram with `MSG_TRUNC`.
    pub length: usize,
    /// The address of the sender (`struct sockaddr_nl`), as far as the kernel wrote it.
    pub sender: Vec<u8>,
    /// Bytes of ancillary data at the beginning of `control`.
    pub control: usize,
    /// `MSG_*` of the datagram.
    pub flags: i32,
}

/// Receives a datagram without waiting. Descriptors in ancillary data are not possible with netlink.
///
/// # Errors
/// Errors of `recvmsg`; `WouldBlock` if there is none.
pub fn receive(
    socket: &impl AsFd,
    bytes: &mut [u8],
    control: &mut [u8],
    flags: i32,
) -> io::Result<Received> {
    let mut sender = vec![0; size_of::<libc::sockaddr_nl>()];
    let mut vector = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    // SAFETY: all-zero bytes are a valid `msghdr`: integers, and pointers that may be null.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_name = sender.as_mut_ptr().cast();
    message.msg_namelen = super::super::socklen::<libc::sockaddr_nl>();
    message.msg_iov = &raw mut vector;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = control.len() as _;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: every pointer of `message` is to memory of the length beside it, borrowed for writing
    // until after the call.
    let done = unsafe { libc::recvmsg(fd, &raw mut message, flags | libc::MSG_DONTWAIT) };
    let length = super::super::check_len(done)?;
    sender.truncate(usize::try_from(message.msg_namelen).unwrap_or(0));
    Ok(Received {
        length,
        sender,
        control: (message.msg_controllen as usize).min(control.len()),
        flags: message.msg_flags,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_memory_is_read_and_written() {
        let text = *b"netlink";
        let memory = Memory(std::process::id());
        let mut copy = [0; 7];
        let at = text.as_ptr().addr() as u64;
        // A sandbox may forbid the call.
        match memory.read(at, &mut copy) {
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => return,
            done => done.expect("readable"),
        }
        assert_eq!(copy, text);
        let mut target = [0; 7];
        memory
            .write(target.as_mut_ptr().addr() as u64, &text)
            .expect("writable");
        assert_eq!(std::hint::black_box(target), text);
    }

    #[test]
    fn address_without_memory_is_an_error() {
        let memory = Memory(std::process::id());
        assert!(memory.read(8, &mut [0; 4]).is_err());
        assert!(memory.write(u64::MAX - 2, &[0; 4]).is_err());
        assert!(Memory(0).read(8, &mut [0; 4]).is_err());
        assert!(memory.read(8, &mut []).is_ok());
    }
}
