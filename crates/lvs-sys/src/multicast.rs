//! UDP sockets that send to a multicast group, or receive from it, on one interface.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};
use std::os::fd::AsRawFd;

use rustix::net::sockopt::{self, Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};

use super::packet::only_from_others;
use super::{Plain, check, get_option, set_option};

/// Number of values of `SO_MEMINFO` (`SK_MEMINFO_VARS` of linux/sock_diag.h), and index of the
/// value that counts dropped datagrams.
const MEMINFO_VARS: usize = 9;
const MEMINFO_DROPS: usize = 8;

// SAFETY: an array of integers.
unsafe impl Plain for [u32; MEMINFO_VARS] {}

/// A non-blocking UDP socket on one interface, of the address family of `group`.
fn socket(interface: &str, group: IpAddr) -> io::Result<UdpSocket> {
    let family = match group {
        IpAddr::V4(_) => AddressFamily::INET,
        IpAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = socket_with(family, SocketType::DGRAM, flags, None)?;
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
    let none = Ipv4Addr::UNSPECIFIED;
    match group {
        IpAddr::V4(_) => {
            sockopt::set_ip_multicast_if_with_ifindex(&socket, &none, &none, index)?;
            sockopt::set_ip_multicast_loop(&socket, false)?;
            sockopt::set_ip_multicast_ttl(&socket, ttl.into())?;
            sockopt::set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::DONT)?;
            if let Some(source) = source {
                bind(&socket, &SocketAddrV4::new(source, 0))?;
            }
        }
        IpAddr::V6(_) => {
            sockopt::set_ipv6_multicast_if(&socket, index)?;
            sockopt::set_ipv6_multicast_loop(&socket, false)?;
            sockopt::set_ipv6_multicast_hops(&socket, ttl.into())?;
            sockopt::set_ipv6_mtu_discover(&socket, Ipv6PathMtuDiscovery::DONT)?;
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
    sockopt::set_socket_reuseaddr(&socket, true)?;
    match group {
        SocketAddr::V4(group) => {
            let none: libc::c_int = 0;
            set_option(fd, libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, &none)?;
            bind(&socket, &group)?;
            let (group, any) = (group.ip(), Ipv4Addr::UNSPECIFIED);
            sockopt::set_ip_add_membership_with_ifindex(&socket, group, &any, index)?;
        }
        SocketAddr::V6(group) => {
            sockopt::set_ipv6_v6only(&socket, true)?;
            bind(
                &socket,
                &SocketAddrV6::new(*group.ip(), group.port(), 0, index),
            )?;
            sockopt::set_ipv6_add_membership(&socket, group.ip(), index)?;
        }
    }
    Ok(socket)
}

/// Number of datagrams that the kernel dropped because the socket's receive buffer was full, since
/// the socket was created.
///
/// # Errors
/// On kernels before 4.13.
pub fn datagrams_lost(socket: &UdpSocket) -> io::Result<u32> {
    let all = [0_u32; MEMINFO_VARS];
    let all = get_option(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_MEMINFO, all)?;
    Ok(all[MEMINFO_DROPS])
}
