//! Receives datagrams of netlink sockets with their metadata.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// A datagram of a netlink socket, as `recvmsg` reports it.
#[derive(Debug)]
pub struct Received {
    /// Length in bytes of the received part; with `MSG_TRUNC`, of the whole datagram.
    pub length: usize,
    /// Address of the sender (`struct sockaddr_nl`), as the kernel wrote it.
    pub sender: Vec<u8>,
    /// Number of bytes of ancillary data at the beginning of `control`.
    pub control: usize,
    /// Flags of the datagram (`MSG_*`).
    pub flags: i32,
}

/// Receives a datagram without waiting. The ancillary data cannot contain descriptors, because
/// netlink does not send any.
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
