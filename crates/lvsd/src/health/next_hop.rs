//! The next hop towards a server, as the kernel's routes and neighbour entries name it.
//!
//! While a neighbour does not answer, the kernel reports an error only to the sockets that are open
//! at the end of each series of its requests, every three seconds. The checks in between get no
//! answer at all. The neighbour entry shows the same cause for all of them.

use std::net::{IpAddr, SocketAddr};

use rustix::fd::OwnedFd;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
};

use super::{Code, ProbeError, Reason};

const NLM_F_REQUEST: u16 = 1;
/// Length of `nlmsghdr` in bytes.
const MESSAGE: usize = 16;
/// Length of `rtmsg` and of `ndmsg` in bytes.
const HEADER: usize = 12;
const RTM_GETROUTE: u16 = 26;
const RTM_GETNEIGH: u16 = 30;
/// `RTA_DST` and `NDA_DST`.
const DESTINATION: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
/// A next hop of another family than the destination: the family in two bytes, and the address.
const RTA_VIA: u16 = 18;
/// `NUD_INCOMPLETE` and `NUD_FAILED`: the kernel asks for the link-layer address, or has given up.
const UNRESOLVED: u16 = 0x01 | 0x20;

/// The next hop towards a server: a router, or the server itself.
#[derive(Debug, PartialEq, Eq)]
struct NextHop {
    address: IpAddr,
    /// Whether the kernel has a neighbour entry without a link-layer address.
    is_silent: bool,
}

/// Replaces the reason of a check that got no answer, or that the kernel could not send, if the
/// next hop towards the server does not answer ARP or neighbour discovery.
pub(super) async fn named(error: ProbeError, server: SocketAddr) -> ProbeError {
    let ProbeError::Server(Reason { code, .. }) = &error else {
        return error;
    };
    if !matches!(code, Code::Silent | Code::Unreachable | Code::NextHop) {
        return error;
    }
    // The kernel may answer late, for example while many routes change.
    let hop = tokio::task::spawn_blocking(move || NextHop::of(server.ip())).await;
    match hop {
        Ok(Some(hop)) if hop.is_silent => ProbeError::Server(hop.reason(server)),
        _ => error,
    }
}

impl NextHop {
    /// The next hop towards `server`; `None` if it cannot be determined, for example without a
    /// route.
    fn of(server: IpAddr) -> Option<Self> {
        let flags = SocketFlags::CLOEXEC;
        let kernel = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None).ok()?;
        let mut header = [0; HEADER];
        header[1] = if server.is_ipv4() { 32 } else { 128 };
        let route = ask(&kernel, RTM_GETROUTE, header, server)?;
        let (mut interface, mut address) = (None, server);
        for (kind, value) in attributes(route.get(HEADER..)?) {
            match kind {
                RTA_OIF => interface = value.first_chunk::<4>(),
                RTA_GATEWAY => address = ip(value)?,
                RTA_VIA => address = ip(value.get(2..)?)?,
                _ => {}
            }
        }
        let mut header = [0; HEADER];
        header[4..8].copy_from_slice(interface?);
        let neighbour = ask(&kernel, RTM_GETNEIGH, header, address);
        let state = neighbour.and_then(|entry| Some(*entry.get(8..)?.first_chunk()?));
        Some(Self {
            address,
            is_silent: state.is_some_and(|state| u16::from_ne_bytes(state) & UNRESOLVED != 0),
        })
    }

    /// The reason why checks of `server` fail if this next hop does not answer.
    fn reason(&self, server: SocketAddr) -> Reason {
        let (hop, ip) = (self.address, server.ip());
        let (text, which) = match hop == ip {
            true => (format!("{server} does not answer"), "the server"),
            false => (
                format!("{server}: its next hop {hop} does not answer"),
                "the router",
            ),
        };
        let fix = format!(
            "is {which} {hop} up and connected (ip neigh show {hop}), and is the route right (ip route get {ip})?"
        );
        Reason::from(format!("{text} ARP or neighbour discovery"))
            .of(Code::NextHop)
            .with_fix(fix)
    }
}

/// Requests the route to an address, or the entry of a neighbour, and returns the payload of the
/// answer; `None` without a valid answer. `header`: the header of the request, whose first byte
/// (the family) is set here.
fn ask(kernel: &OwnedFd, kind: u16, mut header: [u8; HEADER], address: IpAddr) -> Option<Vec<u8>> {
    let (family, address) = match address {
        IpAddr::V4(v4) => (AddressFamily::INET, v4.octets().to_vec()),
        IpAddr::V6(v6) => (AddressFamily::INET6, v6.octets().to_vec()),
    };
    header[0] = u8::try_from(family.as_raw()).ok()?;
    let attribute = 4 + address.len();
    let len = u32::try_from(MESSAGE + HEADER + attribute).ok()?;
    let mut request = len.to_ne_bytes().to_vec();
    request.extend(kind.to_ne_bytes());
    request.extend(NLM_F_REQUEST.to_ne_bytes());
    request.extend([0; 8]);
    request.extend(header);
    request.extend(u16::try_from(attribute).ok()?.to_ne_bytes());
    request.extend(DESTINATION.to_ne_bytes());
    request.extend(address);
    send(kernel, &request, SendFlags::empty()).ok()?;
    // The answer is in the socket's buffer when `send` returns.
    let mut answer = vec![0; 4096];
    let (_, len) = recv(kernel, &mut answer[..], RecvFlags::DONTWAIT).ok()?;
    answer.truncate(len);
    // RTM_NEWROUTE answers RTM_GETROUTE, and RTM_NEWNEIGH answers RTM_GETNEIGH.
    let is_answer = answer.get(4..6)? == (kind - 2).to_ne_bytes();
    is_answer.then(|| answer.split_off(MESSAGE))
}

/// The attributes of a netlink message: types and values.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let number = |at: usize| Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?));
        let (len, kind) = (usize::from(number(0)?), number(2)?);
        let value = bytes.get(4..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

fn ip(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => Some(IpAddr::from(*bytes.first_chunk::<4>()?)),
        16 => Some(IpAddr::from(*bytes.first_chunk::<16>()?)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_hop_of_loopback_is_the_address_itself_and_not_silent() {
        for address in ["127.0.0.1", "::1"] {
            let address: IpAddr = address.parse().unwrap();
            // A host may have no IPv6.
            if let Some(hop) = NextHop::of(address) {
                assert_eq!((hop.address, hop.is_silent), (address, false));
            } else {
                assert!(address.is_ipv6(), "no route to {address}");
            }
        }
    }

    #[tokio::test]
    async fn failed_check_whose_next_hop_answers_keeps_its_reason() {
        let server = ([127, 0, 0, 1], 80).into();
        for code in [Code::Silent, Code::Unreachable, Code::Refused] {
            let error = ProbeError::Server(Reason::from("no answer").of(code));
            assert_eq!(named(error.clone(), server).await, error);
        }
        let error = ProbeError::Local("too many open files".to_owned());
        assert_eq!(named(error.clone(), server).await, error);
    }

    #[test]
    fn reason_of_silent_next_hop_names_the_server_or_its_router() {
        let server = SocketAddr::from(([10, 0, 0, 1], 80));
        for (hop, text, fix) in [
            (
                [10, 0, 0, 1],
                "10.0.0.1:80 does not answer ARP or neighbour discovery",
                "is the server 10.0.0.1 up and connected (ip neigh show 10.0.0.1)",
            ),
            (
                [192, 0, 2, 1],
                "10.0.0.1:80: its next hop 192.0.2.1 does not answer ARP or neighbour discovery",
                "is the router 192.0.2.1 up and connected (ip neigh show 192.0.2.1)",
            ),
        ] {
            let hop = NextHop {
                address: hop.into(),
                is_silent: true,
            };
            let reason = hop.reason(server);
            assert_eq!((reason.code, &*reason.text), (Code::NextHop, text));
            assert!(reason.fix.starts_with(fix), "{reason}");
        }
    }

    #[test]
    fn attributes_of_truncated_message_end_without_a_value() {
        let mut bytes = vec![8, 0, 4, 0, 1, 2, 3, 4, 6, 0, 5, 0, 9, 9, 0, 0];
        let read = |bytes: &[u8]| attributes(bytes).map(|(kind, _)| kind).collect::<Vec<_>>();
        if cfg!(target_endian = "little") {
            assert_eq!(read(&bytes), [4, 5]);
            bytes.truncate(13);
            assert_eq!(read(&bytes), [4]);
        }
        assert_eq!(read(&[0; 4]), [0; 0]);
    }
}
