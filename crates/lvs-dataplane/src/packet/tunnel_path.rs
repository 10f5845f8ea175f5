//! What routers on the way to tunnelled servers complain about (`ipvs`' handling of ICMP errors about its own tunnel
//! packets): the path MTU is learned, and the client is told in terms of the packet that it sent.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use lvs_core::{Instant, Tunnel};

use crate::packet::rewrite::tunnel;
use crate::packet::wire::icmp::ErrorKind;
use crate::packet::wire::{ETHERTYPE_IPV4, be16, be32, ipv4, ipv6};

/// How long a learned MTU holds (`net.ipv4.route.mtu_expires`, `net.ipv6.route.mtu_expires`).
const MTU_EXPIRES: Duration = Duration::from_secs(600);
/// No smaller MTU is believed (`net.ipv4.route.min_pmtu`).
const MTU_MIN: usize = 552;
/// Servers that are remembered at most.
const SERVERS_MAX: usize = 4096;

/// What a server takes its tunnel packets by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Ipip,
    Gre,
    Gue(u16),
}

impl From<Tunnel> for Kind {
    fn from(tunnel: Tunnel) -> Self {
        match tunnel {
            Tunnel::Ipip => Self::Ipip,
            Tunnel::Gre { .. } => Self::Gre,
            Tunnel::Gue { port, .. } => Self::Gue(port),
        }
    }
}

/// Servers that packets were tunnelled to, and what was learned of the way.
#[derive(Debug, Default)]
pub struct TunnelPaths(HashMap<(IpAddr, Kind), Option<Learned>>);

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
    /// The MTU of the way to `server`, which the route says is `mtu`. Remembers the server.
    pub fn mtu(&mut self, server: IpAddr, tunnel: Tunnel, mtu: usize, now: Instant) -> usize {
        let key = (server, tunnel.into());
        match self.0.get_mut(&key) {
            Some(path) => match path {
                Some(learned) if now < learned.until => {
                    learned.used = true;
                    mtu.min(learned.mtu)
                }
                _ => {
                    *path = None;
                    mtu
                }
            },
            None => {
                if self.0.len() < SERVERS_MAX {
                    self.0.insert(key, None);
                }
                mtu
            }
        }
    }

    /// Reads `message`, an ICMP error with a right checksum that is addressed to the director. `mtu` gives the MTU of the
    /// route to a server. `None` if it is not about a tunnel packet of ours, or if the client need not be told.
    pub fn complaint<'a>(
        &mut self,
        message: &'a [u8],
        mtu: impl FnOnce(IpAddr) -> Option<usize>,
        now: Instant,
    ) -> Option<Complaint<'a>> {
        let (kind, code) = (*message.first()?, *message.get(1)?);
        let outer = message.get(8..)?;
        let header = ipv4::header_len(outer);
        if outer.len() < header || header < ipv4::HEADER_LEN {
            return None;
        }
        let server = IpAddr::V4(ipv4::dst(outer));
        let (tunnel, between) = read_tunnel(outer[9], &outer[header..])?;
        let learned = self.0.get_mut(&(server, tunnel))?;
        let original = &outer[header + between..];
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
            learn(learned, new, route, known, now);
            if be16(original, 6) & ipv4::DF == 0 {
                return None;
            }
            // The kernel's first complaint still speaks of the old route.
            let base = if known { new.min(route) } else { route };
            let overhead = ipv4::HEADER_LEN + between;
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

    /// Reads `message`, an ICMPv6 error with a right checksum that is addressed to the director: what is too big for the way
    /// to a server is learned. The next packet that does not fit is answered.
    pub fn too_big(
        &mut self,
        message: &[u8],
        mtu: impl FnOnce(IpAddr) -> Option<usize>,
        now: Instant,
    ) {
        const PACKET_TOO_BIG: u8 = 2;
        let Some(outer) = message
            .get(8..)
            .filter(|outer| message[0] == PACKET_TOO_BIG && outer.len() >= ipv6::HEADER_LEN)
        else {
            return;
        };
        let server = IpAddr::V6(ipv6::dst(outer));
        let Some(chain) = ipv6::walk(outer) else {
            return;
        };
        let inner = outer.get(chain.l4..).unwrap_or_default();
        let kind = match chain.protocol {
            tunnel::IPV4 | tunnel::IPV6 => Kind::Ipip,
            tunnel::GRE => Kind::Gre,
            tunnel::UDP => Kind::Gue(be16(inner, 2)),
            _ => return,
        };
        if let (Some(learned), Some(route)) = (self.0.get_mut(&(server, kind)), mtu(server)) {
            let reported = usize::try_from(be32(message, 4)).unwrap_or(usize::MAX);
            learn(learned, reported.max(ipv6::MTU_MIN), route, true, now);
        }
    }
}

fn learn(learned: &mut Option<Learned>, new: usize, route: usize, used: bool, now: Instant) {
    if new < route {
        *learned = Some(Learned {
            mtu: new,
            until: now + MTU_EXPIRES,
            used,
        });
    }
}

/// What tunnel the packet behind an outer IPv4 header of `protocol` came by, and the length of what comes before the inner
/// packet of IPv4. `None` for all that IPVS does not send (`ipvs_gre_decap`, `ipvs_udp_decap`).
fn read_tunnel(protocol: u8, payload: &[u8]) -> Option<(Kind, usize)> {
    const GRE_CHECKSUM: u16 = 0x8000;
    match protocol {
        tunnel::IPV4 => Some((Kind::Ipip, 0)),
        tunnel::GRE => {
            let flags = be16(payload, 0);
            let known = payload.len() >= 4 && flags & !GRE_CHECKSUM == 0;
            let len = if flags & GRE_CHECKSUM != 0 { 8 } else { 4 };
            (known && be16(payload, 2) == ETHERTYPE_IPV4 && payload.len() >= len)
                .then_some((Kind::Gre, len))
        }
        tunnel::UDP => {
            // Version 0 and no control message, then the length of the options in words.
            let first = *payload.get(8)?;
            let len = 12 + usize::from(first & 0x1f) * 4;
            let data = first & 0xe0 == 0 && payload.len() >= len && payload[9] == tunnel::IPV4;
            data.then(|| (Kind::Gue(be16(payload, 2)), len))
        }
        _ => None,
    }
}
