//! What routers on the way to tunnelled servers complain about (`ipvs`' handling of ICMP errors about its own tunnel
//! packets): the path MTU is learned, and the client is told in terms of the packet that it sent.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::time::Duration;

use lvs_core::Instant;

use crate::rewrite::ipip;
use crate::wire::icmp::ErrorKind;
use crate::wire::{be16, ipv4};

/// How long a learned MTU holds (`net.ipv4.route.mtu_expires`).
const MTU_EXPIRES: Duration = Duration::from_secs(600);
/// No smaller MTU is believed (`net.ipv4.route.min_pmtu`).
const MTU_MIN: usize = 552;
/// Servers that are remembered at most.
const SERVERS_MAX: usize = 4096;
/// The protocol number of IPv4 in IP.
const IPIP: u8 = 4;

/// Servers that packets were tunnelled to, and what was learned of the way.
#[derive(Debug, Default)]
pub struct TunnelPaths(HashMap<Ipv4Addr, Option<Learned>>);

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
    pub fn mtu(&mut self, server: Ipv4Addr, mtu: usize, now: Instant) -> usize {
        match self.0.get_mut(&server) {
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
                    self.0.insert(server, None);
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
        mtu: impl FnOnce(Ipv4Addr) -> Option<usize>,
        now: Instant,
    ) -> Option<Complaint<'a>> {
        let (kind, code) = (*message.first()?, *message.get(1)?);
        let outer = message.get(8..)?;
        let header = ipv4::header_len(outer);
        if outer.len() < header || header < ipv4::HEADER_LEN || outer[9] != IPIP {
            return None;
        }
        let server = ipv4::dst(outer);
        let learned = self.0.get_mut(&server)?;
        let original = &outer[header..];
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
            let told = if base > 68 + ipip::OVERHEAD {
                base - ipip::OVERHEAD
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
