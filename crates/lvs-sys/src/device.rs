//! Settings of a network device by ioctl.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::check;

/// Sets an interface's MTU.
///
/// # Errors
/// If there is no such interface, without `CAP_NET_ADMIN`, or if the device does not support it.
pub fn set_mtu(name: &str, mtu: u16) -> io::Result<()> {
    let mut request = request(name)?;
    request.ifr_ifru.ifru_mtu = i32::from(mtu);
    let socket = socket()?;
    // SAFETY: SIOCSIFMTU reads an ifreq with a NUL-terminated name and `ifru_mtu` set.
    check(unsafe {
        libc::ioctl(
            socket.as_raw_fd(),
            libc::SIOCSIFMTU as _,
            &raw const request,
        )
    })?;
    Ok(())
}

/// Returns the first IPv4 address of an interface; `None` if it has none.
///
/// # Errors
/// If no interface has this name.
pub fn primary_address(name: &str) -> io::Result<Option<Ipv4Addr>> {
    let mut request = request(name)?;
    let socket = socket()?;
    // SAFETY: SIOCGIFADDR reads the name and writes `ifru_addr`.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFADDR as _, &raw mut request) };
    match check(done) {
        Ok(_) => {}
        Err(error) if error.raw_os_error() == Some(libc::EADDRNOTAVAIL) => return Ok(None),
        Err(error) => return Err(error),
    }
    // SAFETY: the kernel has just written this member of the union.
    let address = unsafe { request.ifr_ifru.ifru_addr };
    if i32::from(address.sa_family) != libc::AF_INET {
        return Ok(None);
    }
    // A sockaddr_in: two bytes of port, then the address.
    let [_, _, a, b, c, d, ..] = address.sa_data.map(|byte| byte.to_ne_bytes()[0]);
    Ok(Some(Ipv4Addr::new(a, b, c, d)))
}

/// Sets an interface up.
///
/// # Errors
/// If the interface does not exist, or without `CAP_NET_ADMIN`.
pub fn set_up(name: &str) -> io::Result<()> {
    let mut request = request(name)?;
    let socket = socket()?;
    // SAFETY: SIOCGIFFLAGS reads the name and writes `ifru_flags`.
    check(unsafe {
        libc::ioctl(
            socket.as_raw_fd(),
            libc::SIOCGIFFLAGS as _,
            &raw mut request,
        )
    })?;
    // SAFETY: the kernel has just written this member of the union.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    let up = libc::c_short::try_from(libc::IFF_UP).expect("IFF_UP is 1");
    request.ifr_ifru.ifru_flags = flags | up;
    // SAFETY: SIOCSIFFLAGS reads an ifreq with a NUL-terminated name and `ifru_flags` set.
    check(unsafe {
        libc::ioctl(
            socket.as_raw_fd(),
            libc::SIOCSIFFLAGS as _,
            &raw const request,
        )
    })?;
    Ok(())
}

pub(super) fn request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: ifreq consists of integers, arrays of integers, and pointers that may be null, so
    // all-zero bytes are a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let bytes = name.as_bytes();
    if bytes.is_empty() || bytes.len() >= request.ifr_name.len() || bytes.contains(&0) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{name:?} cannot be the name of an interface (1 to 15 bytes)"),
        ));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(bytes) {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    Ok(request)
}

fn socket() -> io::Result<OwnedFd> {
    // SAFETY: takes numbers only.
    let fd =
        check(unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: the descriptor is new, open and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
