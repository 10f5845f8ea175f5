//! The groups of the remote process of a Unix socket (`SO_PEERGROUPS`, unix(7)). A separate module,
//! because `lvsd` uses it without the other modules.
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd};

/// Whether the remote process of `socket` is in the supplementary group `gid`.
pub fn peer_in_group(socket: &impl AsFd, gid: u32) -> io::Result<bool> {
    let mut groups = vec![0 as libc::gid_t; 64];
    loop {
        let room = u32::try_from(groups.len() * size_of::<libc::gid_t>())
            .map_err(|_| io::Error::other("the remote process is in too many groups"))?;
        let mut len: libc::socklen_t = room;
        // SAFETY: `groups` has room for `len` bytes, and any bytes are group ids.
        let rc = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        if rc == 0 {
            groups.truncate(len as usize / size_of::<libc::gid_t>());
            return Ok(groups.contains(&gid));
        }
        let error = io::Error::last_os_error();
        // ERANGE: the kernel has stored the required length in `len`.
        if error.raw_os_error() != Some(libc::ERANGE) || len <= room {
            return Err(error);
        }
        groups.resize(len as usize / size_of::<libc::gid_t>(), 0);
    }
}
