//! Processes ICMP errors about tunnel packets that the director has sent to servers, and stores the
//! path MTUs that they report. If the outer header is IPv4, the client whose packet was in the
//! tunnel also receives an error about this packet, as with IPVS.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lvs_core::Instant;
use lvs_core::tunnel::Tunnel;
use lvs_sys::lock;

use crate::rewrite::tunnel;
use crate::wire::icmp::{self, ErrorKind};
use crate::wire::{ETHERTYPE_IPV4, be16, be32, ipv4, ipv6, udp};

/// Time for which a reported path MTU is used (`net.ipv4.route.mtu_expires`,
/// `net.ipv6.route.mtu_expires`).
const MTU_EXPIRES: Duration = Duration::from_secs(600);
/// A reported MTU below this number of bytes counts as this number (`net.ipv4.route.min_pmtu`).
const MTU_MIN: usize = 552;
const GRE_CHECKSUM: u16 = 0x8000;
/// Maximum number of servers whose path MTU is stored.
const SERVERS_MAX: usize = 4096;

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

/// The path MTU to a server, in one word, so that workers read and write it without a lock: the MTU
/// in the lowest 16 bits, then a bit that is set when a packet is sent, then the time of its expiry
/// in milliseconds. 0 means that no path MTU was reported.
#[derive(Debug, Default)]
struct Path(AtomicU64);

#[derive(Clone, Copy, Debug)]
struct Learned {
    mtu: u16,
    /// Whether a packet was sent since the MTU was reported. Only then would the kernel's cached
    /// route have this MTU.
    used: bool,
    until_ms: u64,
}

impl Path {
    const USED: u64 = 1 << 16;

    #[inline]
    fn learned(&self) -> Option<Learned> {
        match self.0.load(Ordering::Relaxed) {
            0 => None,
            word => Some(Learned {
                mtu: (word & 0xffff) as u16,
                used: word & Self::USED != 0,
                until_ms: word >> 17,
            }),
        }
    }

    /// The path MTU at `now`; `route` is the MTU of the route.
    #[inline]
    fn mtu(&self, route: usize, now: Instant) -> usize {
        match self.learned() {
            None => route,
            Some(learned) if millis(now) < learned.until_ms => {
                if !learned.used {
                    self.0.fetch_or(Self::USED, Ordering::Relaxed);
                }
                route.min(learned.mtu.into())
            }
            Some(_) => {
                self.0.store(0, Ordering::Relaxed);
                route
            }
        }
    }

    /// Whether a packet was sent to the server since the path MTU was reported.
    fn is_used(&self) -> bool {
        self.learned().is_some_and(|learned| learned.used)
    }

    fn learn(&self, new: usize, route: usize, used: bool, now: Instant) {
        // The path MTU does not become larger before it has expired. One that equals the MTU of the
        // route is stored, although it changes nothing.
        let grows = self
            .learned()
            .is_some_and(|old| millis(now) < old.until_ms && usize::from(old.mtu) < new);
        if let Ok(mtu) = u16::try_from(new)
            && new <= route
            && !grows
        {
            let until_ms = millis(now + MTU_EXPIRES).max(1);
            let used = if used { Self::USED } else { 0 };
            let word = until_ms << 17 | used | u64::from(mtu);
            self.0.store(word, Ordering::Relaxed);
        }
    }
}

fn millis(now: Instant) -> u64 {
    now.as_nanos() / 1_000_000
}

/// The path MTUs of servers to which the dataplane sends tunnel packets; all workers of a director
/// share them.
#[derive(Debug, Default)]
pub struct TunnelPaths {
    paths: Mutex<HashMap<(IpAddr, Kind), Arc<Path>>>,
    /// Number of updates of path MTUs.
    lessons: AtomicU64,
}

/// One worker's references to the paths: after the first packet to a server, the worker needs no
/// lock. Changes by other workers are visible at once. The value is `None` if too many servers were
/// stored already.
#[derive(Debug, Default)]
pub struct KnownPaths(HashMap<(IpAddr, Kind), Option<Arc<Path>>>);

impl KnownPaths {
    /// The path MTU to `server`; `mtu` is the MTU of the route. Also stores the reference to the
    /// server's path.
    pub fn mtu(
        &mut self,
        all: &TunnelPaths,
        server: IpAddr,
        tunnel: Tunnel,
        mtu: usize,
        now: Instant,
    ) -> usize {
        let key = (server, tunnel.into());
        if let Some(path) = self.0.get(&key) {
            return path.as_ref().map_or(mtu, |path| path.mtu(mtu, now));
        }
        if self.0.len() >= SERVERS_MAX {
            return mtu;
        }
        let path = all.path(key);
        let mtu = path.as_ref().map_or(mtu, |path| path.mtu(mtu, now));
        self.0.insert(key, path);
        mtu
    }
}

/// The ICMP error that a client receives about its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Complaint<'a> {
    /// The kind of the error.
    pub kind: ErrorKind,
    /// The client's request that was in the tunnel packet.
    pub original: &'a [u8],
}

impl TunnelPaths {
    /// The entry of a server; it is created if necessary. `None` if there are too many servers.
    fn path(&self, key: (IpAddr, Kind)) -> Option<Arc<Path>> {
        let mut paths = lock(&self.paths);
        if paths.len() >= SERVERS_MAX && !paths.contains_key(&key) {
            return None;
        }
        Some(paths.entry(key).or_default().clone())
    }

    /// The entry of a server, if there is one.
    fn known(&self, key: (IpAddr, Kind)) -> Option<Arc<Path>> {
        let paths = lock(&self.paths);
        paths.get(&key).cloned()
    }

    /// The path MTU to `server`, for the kernel fast path; `route` is the MTU of the route.
    pub fn known_mtu(&self, server: IpAddr, tunnel: Tunnel, route: usize, now: Instant) -> usize {
        self.known((server, tunnel.into()))
            .map_or(route, |path| path.mtu(route, now))
    }

    /// Number of updates of path MTUs. While it stays the same, no path MTU has become smaller.
    pub fn lessons(&self) -> u64 {
        self.lessons.load(Ordering::Acquire)
    }

    fn learn(&self, path: &Path, new: usize, route: usize, used: bool, now: Instant) {
        path.learn(new, route, used, now);
        self.lessons.fetch_add(1, Ordering::Release);
    }

    /// Processes `message`, an ICMP error with a correct checksum that is addressed to the
    /// director, and stores the path MTU that it reports, if any. `mtu` returns the MTU of the
    /// route to a server. Returns the error for the client; `None` if the message does not concern
    /// a tunnel packet of the director, or if the client needs no error.
    pub fn complaint<'a>(
        &self,
        message: &'a [u8],
        mtu: impl Fn(IpAddr) -> Option<usize>,
        now: Instant,
    ) -> Option<Complaint<'a>> {
        let (kind, code) = (
            *message.get(icmp::field::TYPE)?,
            *message.get(icmp::field::CODE)?,
        );
        let outer = message.get(icmp::HEADER_LEN..)?;
        let header = ipv4::header_len(outer);
        if outer.len() < header || header < ipv4::HEADER_LEN {
            return None;
        }
        let server = IpAddr::V4(ipv4::dst(outer));
        let too_long = (kind, code) == (3, 4);
        let (protocol, payload) = (outer[ipv4::field::PROTOCOL], &outer[header..]);
        if let Some(tunnel) = host_tunnel(protocol, payload).filter(|_| too_long) {
            // For these tunnels, the kernel's host uses the path MTU of an error about any inner
            // packet.
            if let (Some(path), Some(route)) = (self.known((server, tunnel)), mtu(server)) {
                self.learn(&path, reported(message), route, path.is_used(), now);
            }
        }
        let (tunnel, between) = read_tunnel(protocol, payload)?;
        let path = self.known((server, tunnel))?;
        let original = &outer[header + between..];
        let inner = ipv4::header_len(original);
        if inner < ipv4::HEADER_LEN
            || original.len() < inner
            || original[ipv4::field::VERSION] >> 4 != 4
        {
            return None;
        }
        let mut rest = be32(message, icmp::field::REST).to_be_bytes();
        if too_long {
            let route = mtu(server)?;
            let known = path.is_used();
            self.learn(&path, reported(message), route, known, now);
            if be16(original, ipv4::field::FLAGS) & ipv4::DF == 0 {
                return None;
            }
            // The kernel's first error still reports the MTU of the old route.
            let base = if known { path.mtu(route, now) } else { route };
            let overhead = ipv4::HEADER_LEN + between;
            let stated = if base > 68 + overhead {
                base - overhead
            } else {
                base
            };
            let [a, b] = u16::try_from(stated).unwrap_or(u16::MAX).to_be_bytes();
            rest = [0, 0, a, b];
        }
        Some(Complaint {
            kind: ErrorKind::Relayed { kind, code, rest },
            original,
        })
    }

    /// Processes `message`, an ICMPv6 error with a correct checksum that is addressed to the
    /// director. A "packet too big" updates the path MTU of a server, so that the next client whose
    /// packet does not fit receives an error.
    ///
    /// An MTU below 1280 is ignored (RFC 8201 section 4), and so is an MTU that would leave less
    /// than 1280 bytes to the inner packet. A router or a forged message can therefore not make a
    /// tunnel unusable.
    pub fn too_big(&self, message: &[u8], mtu: impl FnOnce(IpAddr) -> Option<usize>, now: Instant) {
        const PACKET_TOO_BIG: u8 = 2;
        let Some(outer) = message.get(icmp::HEADER_LEN..).filter(|outer| {
            message[icmp::field::TYPE] == PACKET_TOO_BIG && outer.len() >= ipv6::HEADER_LEN
        }) else {
            return;
        };
        let server = IpAddr::V6(ipv6::dst(outer));
        let Some(chain) = ipv6::walk(outer) else {
            return;
        };
        let inner = outer.get(chain.l4..).unwrap_or_default();
        let (kind, between) = match chain.protocol {
            tunnel::IPV4 | tunnel::IPV6 => (Kind::Ipip, 0),
            tunnel::GRE if be16(inner, tunnel::gre::FLAGS) & GRE_CHECKSUM != 0 => (Kind::Gre, 8),
            tunnel::GRE => (Kind::Gre, 4),
            tunnel::UDP => {
                let options = usize::from(inner.get(8).map_or(0, |first| first & 0x1f)) * 4;
                (
                    Kind::Gue(be16(inner, udp::field::DESTINATION)),
                    12 + options,
                )
            }
            _ => return,
        };
        let reported = usize::try_from(be32(message, icmp::field::REST)).unwrap_or(usize::MAX);
        if reported < ipv6::MTU_MIN + ipv6::HEADER_LEN + between {
            return;
        }
        if let (Some(path), Some(route)) = (self.known((server, kind)), mtu(server)) {
            self.learn(&path, reported, route, true, now);
        }
    }
}

/// The MTU that "fragmentation needed" reports, at least [`MTU_MIN`].
fn reported(message: &[u8]) -> usize {
    usize::from(be16(message, icmp::field::MTU)).max(MTU_MIN)
}

/// The tunnel whose path MTU the host itself would record, according to the 8 bytes after the outer
/// IPv4 header that every error quotes (`gre_err`, `__udp4_lib_err`).
fn host_tunnel(protocol: u8, payload: &[u8]) -> Option<Kind> {
    if payload.len() < 8 {
        return None;
    }
    match protocol {
        tunnel::GRE => Some(Kind::Gre),
        tunnel::UDP => Some(Kind::Gue(be16(payload, 2))),
        _ => None,
    }
}

/// The encapsulation after an outer IPv4 header of `protocol`, and the number of bytes in front of
/// the inner IPv4 packet. `None` if this is no complete encapsulation of an IPv4 packet as IPVS
/// sends it (`ipvs_gre_decap`, `ipvs_udp_decap`).
fn read_tunnel(protocol: u8, payload: &[u8]) -> Option<(Kind, usize)> {
    match protocol {
        tunnel::IPV4 => Some((Kind::Ipip, 0)),
        tunnel::GRE => {
            let flags = be16(payload, tunnel::gre::FLAGS);
            let known = payload.len() >= 4 && flags & !GRE_CHECKSUM == 0;
            let len = if flags & GRE_CHECKSUM != 0 { 8 } else { 4 };
            (known
                && be16(payload, tunnel::gre::PROTOCOL) == ETHERTYPE_IPV4
                && payload.len() >= len)
                .then_some((Kind::Gre, len))
        }
        tunnel::UDP => {
            // Version 0 and no control message, then the length of the options in words.
            let first = *payload.get(8)?;
            let len = 12 + usize::from(first & 0x1f) * 4;
            let data = first & 0xe0 == 0 && payload.len() >= len && payload[9] == tunnel::IPV4;
            data.then(|| (Kind::Gue(be16(payload, udp::field::DESTINATION)), len))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Above the limit of servers, the MTU of the route applies. Path MTUs that were reported for
    /// other servers remain.
    #[test]
    fn tunnel_path_mtus_are_stored_for_limited_number_of_servers() {
        let server = |n: u32| IpAddr::from((0x0a00_0000 + n).to_be_bytes());
        let now = Instant::from_secs(1);
        let (all, mut known) = (TunnelPaths::default(), KnownPaths::default());
        assert_eq!(known.mtu(&all, server(0), Tunnel::Ipip, 1500, now), 1500);
        let path = all
            .known((server(0), Kind::Ipip))
            .expect("the path MTU is stored");
        path.learn(1400, 1500, false, now);
        for n in 0..3 * u32::try_from(SERVERS_MAX).expect("the number is small") {
            let mtu = known.mtu(&all, server(n), Tunnel::Ipip, 1500, now);
            assert_eq!(mtu, if n == 0 { 1400 } else { 1500 });
        }
        assert_eq!(known.0.len(), SERVERS_MAX);
        assert!(all.known((server(5000), Kind::Ipip)).is_none());
    }
}
