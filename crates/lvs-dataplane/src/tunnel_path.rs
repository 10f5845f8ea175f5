//! What routers on the way to tunnelled servers complain about (`ipvs`' handling of ICMP errors about its own tunnel
//! packets): the path MTU is learned, and the client is told in terms of the packet that it sent.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::time::Duration;

use lvs_core::{Instant, Protocol, Tunnel};

use crate::rewrite::tunnel::{self, GRE, GRE_CHECKSUM, GRE_IPV4, IPIP};
use crate::wire::icmp::ErrorKind;
use crate::wire::{be16, ipv4};

/// How long a learned MTU holds (`net.ipv4.route.mtu_expires`).
const MTU_EXPIRES: Duration = Duration::from_secs(600);
/// No smaller MTU is believed (`net.ipv4.route.min_pmtu`).
const MTU_MIN: usize = 552;
/// Servers that are remembered at most.
const SERVERS_MAX: usize = 4096;
/// Kinds of tunnels to one server at most.
const KINDS_MAX: usize = 16;

/// Servers that packets were tunnelled to, and what was learned of the way.
#[derive(Debug, Default)]
pub struct TunnelPaths(HashMap<Ipv4Addr, Path>);

#[derive(Debug, Default)]
struct Path {
    /// The tunnels in use.
    kinds: Vec<Tunnel>,
    learned: Option<Learned>,
}

#[derive(Debug)]
struct Learned {
    mtu: usize,
    until: Instant,
    /// A packet has been sent since: only then the kernel's cached route is the new one.
    used: bool,
}

/// What to tell the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Complaint<'a> {
    /// The error.
    pub kind: ErrorKind,
    /// The request that was tunnelled.
    pub original: &'a [u8],
}

impl TunnelPaths {
    /// The MTU of the way to `server`, which the route says is `mtu`. Remembers the server and the tunnel.
    pub fn mtu(&mut self, server: Ipv4Addr, kind: Tunnel, mtu: usize, now: Instant) -> usize {
        if !self.0.contains_key(&server) && self.0.len() >= SERVERS_MAX {
            return mtu;
        }
        let path = self.0.entry(server).or_default();
        if !path.kinds.contains(&kind) && path.kinds.len() < KINDS_MAX {
            path.kinds.push(kind);
        }
        match &mut path.learned {
            Some(learned) if now < learned.until => {
                learned.used = true;
                mtu.min(learned.mtu)
            }
            learned => {
                *learned = None;
                mtu
            }
        }
    }

    /// Reads `message`, an ICMP error with a right checksum that is addressed to the director. `mtu` gives the MTU of the
    /// route to a server. `None` if it is not about a tunnel packet of ours, or if the client need not be told.
    pub fn complaint<'a>(
        &mut self,
        message: &'a [u8],
        mtu: impl FnOnce(Ipv4Addr) -> Option<usize>,
        now: Instant,
    ) -> Option<Complaint<'a>> {
        let (kind, code) = (*message.first()?, *message.get(1)?);
        let outer = message.get(8..)?;
        let header = ipv4::header_len(outer);
        if outer.len() < header || header < ipv4::HEADER_LEN {
            return None;
        }
        let server = ipv4::dst(outer);
        let path = self.0.get_mut(&server)?;
        let learned = &mut path.learned;
        let (between, is_used) = tunnel_header(Protocol(outer[9]), &outer[header..])?;
        if !path.kinds.iter().any(|&kind| is_used(kind)) {
            return None;
        }
        let overhead = header + between;
        let original = outer.get(overhead..)?;
        let inner = ipv4::header_len(original);
        if inner < ipv4::HEADER_LEN || original.len() < inner || original[0] >> 4 != 4 {
            return None;
        }
        let mut rest = [message[4], message[5], message[6], message[7]];
        if (kind, code) == (3, 4) {
            let route = mtu(server)?;
            let reported = usize::from(be16(message, 6));
            let known = learned.as_ref().is_some_and(|learned| learned.used);
            let new = reported.max(MTU_MIN);
            if new < route {
                *learned = Some(Learned {
                    mtu: new,
                    until: now + MTU_EXPIRES,
                    used: known,
                });
            }
            if be16(original, 6) & ipv4::DF == 0 {
                return None;
            }
            // The kernel's first complaint still speaks of the old route.
            let base = if known { new.min(route) } else { route };
            let told = if base > 68 + overhead {
                base - overhead
            } else {
                base
            };
            let [a, b] = u16::try_from(told).unwrap_or(u16::MAX).to_be_bytes();
            rest = [0, 0, a, b];
        }
        Some(Complaint {
            kind: ErrorKind::Relayed { kind, code, rest },
            original,
        })
    }
}

/// Reads what is between an outer IP header and an IPv4 packet inside; its length, and which tunnels it can be from.
fn tunnel_header(protocol: Protocol, bytes: &[u8]) -> Option<(usize, impl Fn(Tunnel) -> bool)> {
    const UDP_LEN: usize = 8;
    let (len, port) = match protocol {
        IPIP => (0, 0),
        Protocol::UDP => {
            // Version 0, data; options, whose length is in words; an IPv4 packet.
            let [first, inner] = [*bytes.get(UDP_LEN)?, *bytes.get(UDP_LEN + 1)?];
            if first & 0xe0 != 0 || inner != IPIP.0 {
                return None;
            }
            let options = usize::from(first & 0x1f) * 4;
            (UDP_LEN + 4 + options, be16(bytes, 2))
        }
        GRE => {
            let flags = be16(bytes, 0);
            if bytes.len() < 4 || flags & !GRE_CHECKSUM != 0 || be16(bytes, 2) != GRE_IPV4 {
                return None;
            }
            (if flags == 0 { 4 } else { 8 }, 0)
        }
        _ => return None,
    };
    let is_used = move |kind: Tunnel| {
        tunnel::protocol(kind) == protocol
            && !matches!(kind, Tunnel::Gue { port: other, .. } if other != port)
    };
    Some((len, is_used))
}
