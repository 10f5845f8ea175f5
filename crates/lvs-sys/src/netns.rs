//! The identity of a network namespace. A separate module, because `lvsd` uses it too.
use std::mem::size_of;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;

/// `SO_NETNS_COOKIE` (asm-generic/socket.h), which libc does not have.
const SO_NETNS_COOKIE: libc::c_int = 71;

/// The cookie of this thread's network namespace (`SO_NETNS_COOKIE`, Linux 5.14). The kernel never
/// uses a cookie again, whereas the inode of a removed namespace soon belongs to another namespace.
/// `None` if the kernel has no cookies.
pub fn cookie() -> Option<u64> {
    let socket = UnixDatagram::unbound().ok()?;
    let mut cookie = 0_u64;
    let mut len = libc::socklen_t::try_from(size_of::<u64>()).ok()?;
    // SAFETY: pointer and length describe `cookie`, and any bytes are a value of it.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut len,
        )
    };
    (done == 0 && cookie != 0).then_some(cookie)
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
        if let Some(other) = other.join().expect("no panic") {
            assert_ne!(other, own);
        }
    }
}
