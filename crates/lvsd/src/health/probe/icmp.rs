//! ICMP errors about connections of probes: a socket reports several ICMP errors, and a TCP reset,
//! as the same error.

use std::io::IoSliceMut;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};

use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrIn, recvmsg, setsockopt, sockopt};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IcmpError {
    /// The host that sent the error, if the kernel reports it.
    pub(super) sender: Option<IpAddr>,
    is_ipv6: bool,
    kind: u8,
    code: u8,
}

/// The ICMP type "destination unreachable".
const UNREACHABLE: u8 = 3;
/// The ICMPv6 type "destination unreachable".
const UNREACHABLE6: u8 = 1;

impl IcmpError {
    /// If `kept` is true, makes the kernel queue the ICMP errors of a socket that connects to
    /// `target`; otherwise, makes it stop queueing them. With the queue, even a soft error ends an
    /// established connection.
    pub(super) fn keep(socket: &impl AsFd, target: IpAddr, kept: bool) {
        // Without ICMP errors, the reason is less exact.
        let _ = match target {
            IpAddr::V4(_) => setsockopt(socket, sockopt::Ipv4RecvErr, &kept),
            IpAddr::V6(_) => setsockopt(socket, sockopt::Ipv6RecvErr, &kept),
        };
    }

    /// Reads the oldest queued ICMP error of a socket; `None` if there is none.
    pub(super) fn of(socket: &impl AsFd) -> Option<Self> {
        let mut bytes = [0; 64];
        let mut pieces = [IoSliceMut::new(&mut bytes)];
        let mut space = nix::cmsg_space!([u8; 64]);
        let descriptor = socket.as_fd().as_raw_fd();
        let flags = MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT;
        let message =
            recvmsg::<SockaddrIn>(descriptor, &mut pieces, Some(&mut space), flags).ok()?;
        message.cmsgs().ok()?.find_map(|message| match message {
            ControlMessageOwned::Ipv4RecvErr(error, sender) => Some(Self {
                sender: sender
                    .map(|sender| u32::from_be(sender.sin_addr.s_addr).into())
                    .map(IpAddr::V4),
                is_ipv6: false,
                kind: error.ee_type,
                code: error.ee_code,
            }),
            ControlMessageOwned::Ipv6RecvErr(error, sender) => Some(Self {
                sender: sender.map(|sender| IpAddr::V6(sender.sin6_addr.s6_addr.into())),
                is_ipv6: true,
                kind: error.ee_type,
                code: error.ee_code,
            }),
            _ => None,
        })
    }

    /// Returns the name of the error, such as `ICMP host unreachable`.
    pub(super) fn name(self) -> String {
        let name = match (self.is_ipv6, self.kind, self.code) {
            (false, UNREACHABLE, 0) => "network unreachable",
            (false, UNREACHABLE, 1) | (true, UNREACHABLE6, 3) => "host unreachable",
            (false, UNREACHABLE, 2) => "protocol unreachable",
            (false, UNREACHABLE, 3) | (true, UNREACHABLE6, 4) => "port unreachable",
            (false, UNREACHABLE, 9 | 10 | 13) | (true, UNREACHABLE6, 1) => {
                "administratively prohibited"
            }
            (true, UNREACHABLE6, 0) => "no route",
            (true, UNREACHABLE6, 5) => "source address failed policy",
            (true, UNREACHABLE6, 6) => "reject route",
            (_, kind, code) => return format!("ICMP type {kind} code {code}"),
        };
        format!("ICMP {name}")
    }

    /// Whether the error is "host unreachable": a router or this host got no answer to ARP or
    /// neighbour discovery.
    pub(super) const fn is_host_unreachable(self) -> bool {
        matches!(
            (self.is_ipv6, self.kind, self.code),
            (false, UNREACHABLE, 1) | (true, UNREACHABLE6, 3)
        )
    }

    /// Whether only a rule of a filter causes this error: a host without a listener answers TCP
    /// with a reset.
    pub(super) fn is_of_filter(self) -> bool {
        match (self.is_ipv6, self.kind) {
            (false, UNREACHABLE) => matches!(self.code, 3 | 9 | 10 | 13),
            (true, UNREACHABLE6) => matches!(self.code, 1 | 4 | 5),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn icmp_error_is_named_and_attributed_to_filter_by_type_and_code() {
        let error = |is_ipv6, kind, code| IcmpError {
            sender: None,
            is_ipv6,
            kind,
            code,
        };
        for (is_ipv6, kind, code, name, of_filter) in [
            (false, 3, 13, "ICMP administratively prohibited", true),
            (false, 3, 3, "ICMP port unreachable", true),
            (false, 3, 1, "ICMP host unreachable", false),
            (false, 3, 2, "ICMP protocol unreachable", false),
            (true, 1, 1, "ICMP administratively prohibited", true),
            (true, 1, 3, "ICMP host unreachable", false),
            (true, 3, 0, "ICMP type 3 code 0", false),
            (false, 11, 0, "ICMP type 11 code 0", false),
        ] {
            let error = error(is_ipv6, kind, code);
            assert_eq!(
                (error.name().as_str(), error.is_of_filter()),
                (name, of_filter)
            );
        }
    }

    #[test]
    fn socket_without_icmp_error_reports_none() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("the socket can be opened");
        IcmpError::keep(&socket, IpAddr::from([127, 0, 0, 1]), true);
        assert_eq!(IcmpError::of(&socket), None);
    }

    #[test]
    fn icmp_error_of_a_closed_port_is_port_unreachable_with_sender() {
        let here = IpAddr::from([127, 0, 0, 1]);
        let closed = std::net::UdpSocket::bind((here, 0)).expect("the socket can be opened");
        let target = closed.local_addr().expect("the socket has an address");
        drop(closed);
        let socket = std::net::UdpSocket::bind((here, 0)).expect("the socket can be opened");
        IcmpError::keep(&socket, here, true);
        socket.connect(target).expect("the socket can be connected");
        socket.send(b"x").expect("the datagram can be sent");
        let limit = std::time::Duration::from_secs(20);
        socket
            .set_read_timeout(Some(limit))
            .expect("the time limit can be set");
        socket.recv(&mut [0]).expect_err("the closed port answers");
        let error = IcmpError::of(&socket).expect("the socket has an ICMP error");
        assert_eq!(
            (error.name().as_str(), error.sender),
            ("ICMP port unreachable", Some(here))
        );
    }
}
