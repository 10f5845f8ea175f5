//! The identity of a network namespace. A separate module, because `lvsd` uses it without the other
//! modules.
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixDatagram;

use super::get_option;

/// `SO_NETNS_COOKIE` (asm-generic/socket.h), which libc does not have.
const SO_NETNS_COOKIE: libc::c_int = 71;

/// The cookie of this thread's network namespace (`SO_NETNS_COOKIE`, Linux 5.14). The kernel does
/// not reuse a cookie until the host restarts; an inode number, in contrast, may be used again
/// after its namespace was removed. `None` if the cookie cannot be read, as on earlier kernels.
pub fn cookie() -> Option<u64> {
    let socket = UnixDatagram::unbound().ok()?;
    let cookie = cookie_of_socket(&socket).ok();
    cookie.filter(|&cookie| cookie != 0)
}

/// The cookie of a socket's network namespace. The kernel does not reuse a cookie until the host
/// restarts.
///
/// # Errors
/// The descriptor is not a socket, or the kernel has no cookies (before Linux 5.14).
pub fn cookie_of_socket(socket: &impl AsFd) -> io::Result<u64> {
    let fd = socket.as_fd().as_raw_fd();
    get_option(fd, libc::SOL_SOCKET, SO_NETNS_COOKIE, 0)
}

#[cfg(test)]
mod tests {
    #[test]
    fn namespace_cookie_is_constant_and_unique() {
        let Some(own) = super::cookie() else {
            // A kernel before 5.14.
            return;
        };
        assert_eq!(super::cookie(), Some(own));
        let other = std::thread::spawn(|| {
            crate::unshare_network().ok()?;
            super::cookie()
        });
        // Without permission to create namespaces, the test cannot compare with another one.
        if let Some(other) = other.join().expect("the thread does not panic") {
            assert_ne!(other, own);
        }
    }
}
