//! ICMP errors for datagram sockets (`IP_RECVERR`, ip(7)). A separate module, because the health
//! checks of `lvsd` use it without the other modules.
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};

use super::set_option;

/// Makes `socket`, which is or will be connected to `target`, return every ICMP error as the error
/// of its next call. Without this setting, the kernel returns only some errors, which do not
/// include "host unreachable".
///
/// # Errors
/// The socket is of another family.
pub fn receive(socket: &impl AsFd, target: IpAddr) -> io::Result<()> {
    let (level, option) = match target {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_RECVERR),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
    };
    set_option(socket.as_fd().as_raw_fd(), level, option, &1_i32)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn icmp_errors_are_enabled_only_for_the_family_of_the_socket() {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("the socket can be opened");
        let target = IpAddr::from([127, 0, 0, 1]);
        receive(&socket, target).expect("ICMP errors over IPv4 can be enabled");
        assert!(receive(&socket, "::1".parse().expect("the address is valid")).is_err());
    }
}
