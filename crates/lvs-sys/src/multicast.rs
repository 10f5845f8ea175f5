//! UDP sockets for a multicast group on one interface.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::packet::only_from_others;
use super::{Plain, check, get_option, set_option, socklen};

/// Number of the values of `SO_MEMINFO` (`SK_MEMINFO_VARS` of linux/sock_diag.h), and the index of
/// the counter of lost messages.
const MEMINFO_VARS: usize = 9;
const MEMINFO_DROPS: usize = 8;

// SAFETY: an array of integers.
unsafe impl Plain for [u32; MEMINFO_VARS] {}

/// A non-blocking UDP socket on one interface, of the address family of `group`.
fn socket(interface: &str, group: IpAddr) -> io::Result<UdpSocket> {
    let family = match group {
        IpAddr::V4(_) => libc::AF_INET,
        IpAddr::V6(_) => libc::AF_INET6,
    };
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: takes numbers only.
    let fd = check(unsafe { libc::socket(family, kind, 0) })?;
    // SAFETY: the descriptor is new, open and has no other owner.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let name = interface.as_bytes();
    let len = libc::socklen_t::try_from(name.len())
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: pointer and length describe the name, which the kernel only reads.
    check(unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_BINDTODEVICE,
            name.as_ptr().cast(),
            len,
        )
    })?;
    Ok(UdpSocket::from(fd))
}

fn mreqn(group: Ipv4Addr, index: u32) -> io::Result<libc::ip_mreqn> {
    Ok(libc::ip_mreqn {
        imr_multiaddr: libc::in_addr {
            s_addr: u32::from_ne_bytes(group.octets()),
        },
        imr_address: libc::in_addr { s_addr: 0 },
        imr_ifindex: number(index)?,
    })
}

fn number(index: u32) -> io::Result<libc::c_int> {
    libc::c_int::try_from(index).map_err(|_| io::Error::from(io::ErrorKind::NotFound))
}

/// Creates a socket that sends to multicast groups on an interface, with this time to live, and
/// does not receive its own messages. Messages that exceed the MTU are fragmented. Messages to an
/// IPv4 group have the source address `source`.
///
/// # Errors
/// If the interface does not exist, or this process may not bind to it.
pub fn multicast_sender(
    interface: &str,
    index: u32,
    group: IpAddr,
    ttl: u8,
    source: Option<Ipv4Addr>,
) -> io::Result<UdpSocket> {
    let socket = socket(interface, group)?;
    let fd = socket.as_raw_fd();
    let set = |level, option, value: libc::c_int| set_option(fd, level, option, &value);
    match group {
        IpAddr::V4(_) => {
            let interface = mreqn(Ipv4Addr::UNSPECIFIED, index)?;
            set_option(fd, libc::IPPROTO_IP, libc::IP_MULTICAST_IF, &interface)?;
            set(libc::IPPROTO_IP, libc::IP_MULTICAST_LOOP, 0)?;
            set(libc::IPPROTO_IP, libc::IP_MULTICAST_TTL, ttl.into())?;
            let dont = libc::IP_PMTUDISC_DONT;
            set(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, dont)?;
            if let Some(source) = source {
                bind(fd, &sockaddr_in(source, 0))?;
            }
        }
        IpAddr::V6(_) => {
            let interface = number(index)?;
            set(libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_IF, interface)?;
            set(libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_LOOP, 0)?;
            set(libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_HOPS, ttl.into())?;
            let dont = libc::IPV6_PMTUDISC_DONT;
            set(libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, dont)?;
        }
    }
    Ok(socket)
}

/// Creates a socket that receives the messages of other hosts to `group` on an interface. It
/// ignores messages that processes of this host send to the group.
///
/// # Errors
/// If the interface does not exist, this process may not bind to it, or another process uses the
/// port exclusively.
pub fn multicast_receiver(interface: &str, index: u32, group: SocketAddr) -> io::Result<UdpSocket> {
    let socket = socket(interface, group.ip())?;
    let fd = socket.as_raw_fd();
    only_from_others(fd)?;
    let one: libc::c_int = 1;
    set_option(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, &one)?;
    match group {
        SocketAddr::V4(group) => {
            let none: libc::c_int = 0;
            set_option(fd, libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, &none)?;
            bind(fd, &sockaddr_in(*group.ip(), group.port()))?;
            let member = mreqn(*group.ip(), index)?;
            set_option(fd, libc::IPPROTO_IP, libc::IP_ADD_MEMBERSHIP, &member)?;
        }
        SocketAddr::V6(group) => {
            set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, &one)?;
            let address = libc::sockaddr_in6 {
                sin6_family: libc::sa_family_t::try_from(libc::AF_INET6).expect("AF_INET6 is 10"),
                sin6_port: group.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: in6_addr(*group.ip()),
                sin6_scope_id: index,
            };
            bind(fd, &address)?;
            let member = libc::ipv6_mreq {
                ipv6mr_multiaddr: in6_addr(*group.ip()),
                ipv6mr_interface: index,
            };
            set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_ADD_MEMBERSHIP, &member)?;
        }
    }
    Ok(socket)
}

fn sockaddr_in(addr: Ipv4Addr, port: u16) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::sa_family_t::try_from(libc::AF_INET).expect("AF_INET is 2"),
        sin_port: port.to_be(),
        sin_addr: libc::in_addr {
            s_addr: u32::from_ne_bytes(addr.octets()),
        },
        sin_zero: [0; 8],
    }
}

const fn in6_addr(addr: Ipv6Addr) -> libc::in6_addr {
    libc::in6_addr {
        s6_addr: addr.octets(),
    }
}

fn bind<T>(fd: libc::c_int, address: &T) -> io::Result<()> {
    // SAFETY: pointer and length describe a socket address, which the kernel only reads.
    check(unsafe { libc::bind(fd, std::ptr::from_ref(address).cast(), socklen::<T>()) })?;
    Ok(())
}

/// Number of datagrams that were dropped because a socket's receive buffer was full, since the
/// socket was created.
///
/// # Errors
/// On kernels before 4.13.
pub fn datagrams_lost(socket: &UdpSocket) -> io::Result<u32> {
    let all = [0_u32; MEMINFO_VARS];
    let all = get_option(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_MEMINFO, all)?;
    Ok(all[MEMINFO_DROPS])
}
