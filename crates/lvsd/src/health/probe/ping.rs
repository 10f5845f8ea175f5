//! `type = "ping"`: an echo request is answered.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::UdpSocket;

use super::{Advice, Asked, ProbeError, ProbeKind, icmp_errors};
use crate::text::Keys;

const PAYLOAD: &[u8; 16] = b"lvsd health ping";

/// A check that sends an ICMP echo request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ping;

impl ProbeKind for Ping {
    const NAME: &'static str = "ping";
    const KEYS: &'static [&'static str] = &[];

    fn parse(_: &mut Keys<'_>) -> Option<Self> {
        Some(Self)
    }

    fn target(&self, server: SocketAddr) -> String {
        format!("ping {}", server.ip())
    }

    async fn run(&self, asked: &Asked<'_>) -> Result<Advice, ProbeError> {
        let server = asked.server.ip();
        let failed = |error: io::Error| ProbeError::of_socket(&error, self.target(asked.server));
        let (socket, raw) = open(server).map_err(|error| {
            ProbeError::Local(format!(
                "{error}: a ping needs CAP_NET_RAW, or lvsd's group in the sysctl net.ipv4.ping_group_range"
            ))
        })?;
        socket.set_nonblocking(true).map_err(failed)?;
        let to = SocketAddr::new(server, 0);
        socket.connect(&to.into()).map_err(failed)?;
        // The calls here do not depend on the type of the socket.
        let socket = UdpSocket::from_std(socket.into()).map_err(failed)?;
        icmp_errors::receive(&socket, server).map_err(failed)?;
        let request = request(server, fresh());
        socket.send(&request).await.map_err(failed)?;
        let mut bytes = [0; 256];
        loop {
            let n = socket.recv(&mut bytes).await.map_err(failed)?;
            // A raw socket also receives answers to other programs.
            if answers(&bytes[..n], &request, raw && server.is_ipv4(), raw) {
                return Ok(Advice::NONE);
            }
        }
    }
}

/// Opens a socket for echo requests. Returns the socket, and whether it is a raw socket.
fn open(server: IpAddr) -> io::Result<(Socket, bool)> {
    let (domain, protocol) = match server {
        IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4),
        IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6),
    };
    // The kernel passes each of these sockets only the answers to its own requests. They need no
    // capability, but a group that the sysctl `ping_group_range` permits.
    if let Ok(socket) = Socket::new(domain, Type::DGRAM, Some(protocol)) {
        return Ok((socket, false));
    }
    Socket::new(domain, Type::RAW, Some(protocol)).map(|socket| (socket, true))
}

/// Returns an identifier that no other ping of this process uses now.
fn fresh() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Returns the bytes of an ICMP echo request.
pub(super) fn request(server: IpAddr, id: u16) -> Vec<u8> {
    let kind = if server.is_ipv4() { 8 } else { 128 };
    let [high, low] = id.to_be_bytes();
    let mut bytes = vec![kind, 0, 0, 0, high, low, 0, 1];
    bytes.extend(PAYLOAD);
    if server.is_ipv4() {
        // The kernel computes the checksum of ICMPv6.
        let sum = bytes
            .chunks(2)
            .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
            .sum::<u32>();
        let folded = (sum & 0xffff) + (sum >> 16);
        let sum = !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap_or(0);
        bytes[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    bytes
}

/// Whether a packet is the answer to `request`. `header`: the packet begins with an IP header, as
/// from a raw IPv4 socket. `own_id`: the answer has the identifier of `request`, which the kernel
/// replaces unless the socket is raw.
pub(super) fn answers(bytes: &[u8], request: &[u8], header: bool, own_id: bool) -> bool {
    let message = match (header, bytes.first()) {
        (true, Some(first)) => bytes.get(usize::from(first & 15) * 4..),
        _ => Some(bytes),
    };
    let (Some(message), Some(kind)) = (message, request.first()) else {
        return false;
    };
    let answer = if *kind == 8 { 0 } else { 129 };
    let same = |range: std::ops::Range<usize>| {
        message.get(range.clone()).is_some() && message.get(range.clone()) == request.get(range)
    };
    message.len() >= request.len()
        && message.first() == Some(&answer)
        && message.get(1) == Some(&0)
        && (!own_id || same(4..6))
        && same(6..request.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ping_request_has_valid_checksum_and_only_its_own_answer_matches() {
        let v4 = request([127, 0, 0, 1].into(), 0x1234);
        let sum: u32 = v4
            .chunks(2)
            .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
            .sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
        let mut answer = v4.clone();
        answer[0] = 0;
        assert!(answers(&answer, &v4, false, true));
        assert!(
            !answers(&v4, &v4, false, true),
            "the request was accepted as its own answer"
        );
        let mut other = answer.clone();
        other[5] ^= 1;
        assert!(!answers(&other, &v4, false, true));
        assert!(answers(&other, &v4, false, false));
        let mut raw = vec![0x45; 20];
        raw.extend(&answer);
        assert!(answers(&raw, &v4, true, true));
        for n in 0..raw.len() {
            assert!(!answers(&raw[..n], &v4, true, true), "{n} bytes");
        }
        let v6 = request("::1".parse().unwrap(), 1);
        assert_eq!((v6[0], v6[2], v6[3]), (128, 0, 0));
    }

    #[tokio::test]
    async fn ping_of_this_host_succeeds_if_permitted() {
        for server in ["127.0.0.1:1", "[::1]:1"] {
            let server: SocketAddr = server.parse().unwrap();
            let open = open(server.ip());
            let result = Ping.run(&Asked::at(server)).await;
            match (open, &result) {
                (Ok(_), Ok(_)) | (Err(_), Err(ProbeError::Local(_))) => {}
                // A host without IPv6.
                (Ok(_), Err(ProbeError::Local(_))) if server.is_ipv6() => {}
                (Ok(_), Err(ProbeError::Server(_))) if server.is_ipv6() => {}
                (open, result) => panic!("{server}: {open:?}, {result:?}"),
            }
        }
    }
}
