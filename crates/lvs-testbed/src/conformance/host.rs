//! Simulates the network stack of the recordings' director: local delivery, forwarding, ICMP
//! errors.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};

use lvs_core::{Instant, Protocol};
use lvs_packet::drop::FrameDrop;
use lvs_packet::fragment::{Cutter, History, Reassembler};
use lvs_packet::frame::Frame;
use lvs_packet::net::Net;
use lvs_packet::parse::{self, Packet};
use lvs_packet::testing::Table;
use lvs_packet::wire::checksum::Sum;
use lvs_packet::wire::icmp::{self, ErrorKind};
use lvs_packet::wire::ip_options::Refused;
use lvs_packet::wire::{be16, decrement_ttl, ip_options, ipv4, ipv6, is_ipv6, put16, tcp, udp};

#[derive(Debug, Default)]
pub(super) struct Done {
    /// Packets that the simulated host sends.
    pub(super) sent: Vec<Vec<u8>>,
    /// Forwarded packets of other hosts.
    pub(super) forwarded: Vec<Vec<u8>>,
}

impl Done {
    fn sending(packet: Option<Vec<u8>>) -> Self {
        Self {
            sent: packet.into_iter().collect(),
            forwarded: Vec::new(),
        }
    }
}

/// A simulation of the host's network stack, without sockets.
#[derive(Debug, Default)]
pub(super) struct Host {
    reassembler: Reassembler,
    /// Whether the host supports SCTP. Its SCTP answers are not recorded.
    pub(super) sctp: bool,
    /// The path MTU to each server for which a router has reported a path MTU below [`ERROR_MAX`].
    short_ways: HashMap<Ipv4Addr, usize>,
}

/// Maximum length of a host's ICMP error in bytes (RFC 1812 section 4.3.2.3).
const ERROR_MAX: usize = 576;

/// Destination and path MTU of an ICMPv4 error that reports a path MTU; like Linux, at least 552.
/// `None` for other packets.
fn reported(ip: &[u8], packet: &Packet) -> Option<(Ipv4Addr, usize)> {
    const LEAST: usize = 552;
    let message = ip.get(packet.l4..packet.len)?;
    let (head, quoted) = message.split_at_checked(8)?;
    let too_long = packet.protocol == Protocol::ICMP && head[..2] == [3, 4];
    // Linux accepts an error only if it quotes at least 8 bytes after the IP header.
    (too_long && quoted.len() >= ipv4::HEADER_LEN + 8)
        .then(|| (ipv4::dst(quoted), usize::from(be16(head, 6)).max(LEAST)))
}

/// Truncates an ICMPv4 error of the host to the MTU. Other packets are returned unchanged.
fn shortened(mut ip: Vec<u8>, mtu: usize) -> Vec<u8> {
    let is_error = ip.len() > mtu && ip[0] == 0x45 && Protocol(ip[9]) == Protocol::ICMP;
    if let (true, Ok(len)) = (is_error, u16::try_from(mtu)) {
        ip.truncate(mtu);
        ipv4::set_total_len(&mut ip, len);
        put16(&mut ip, 22, 0);
        let sum = Sum::ZERO.bytes(&ip[20..]).finish();
        put16(&mut ip, 22, sum);
        ipv4::finish_header(&mut ip);
    }
    ip
}

/// Fills in IPv4 options as a router does: writes the address `route` into a record route option,
/// and the address `stamp` with a time into a timestamp option.
fn fill_options(ip: &mut [u8], net: &Table, route: IpAddr, stamp: IpAddr) {
    const TIME: u32 = 1;
    if let (false, IpAddr::V4(route), IpAddr::V4(stamp)) = (is_ipv6(ip), route, stamp)
        && let Ok(wanted) = ip_options::read(ip, |addr| net.is_local(addr.into()))
    {
        wanted.fill(ip, route, stamp, TIME);
    }
}

impl Host {
    /// Returns the host's reaction to a packet; `None` if the host drops or stores it.
    pub(super) fn receive(&mut self, ip: &[u8], net: &Table, now: Instant) -> Option<Done> {
        let mut done = self.take(ip, net, now)?;
        for sent in &mut done.sent {
            if let Some(&mtu) = self
                .short_ways
                .get(&ipv4::dst(sent))
                .filter(|_| !is_ipv6(sent))
            {
                *sent = shortened(std::mem::take(sent), mtu);
            }
        }
        Some(done)
    }

    fn take(&mut self, ip: &[u8], net: &Table, now: Instant) -> Option<Done> {
        let packet = parse::ip(ip, false).ok()?;
        // A host drops received packets with one of its own addresses as the source
        // (`fib_validate_source`).
        if !packet.is_ipv6() && net.is_forged(packet.src) {
            return None;
        }
        let local = net.is_local(packet.dst);
        if let Some((server, mtu)) = reported(ip, &packet).filter(|_| local)
            && mtu < ERROR_MAX
        {
            self.short_ways.insert(server, mtu);
        }
        if let Some(refused) = refused_options(ip, &packet, net) {
            return Some(refused);
        }
        let mut ip = ip[..packet.len].to_vec();
        if local {
            // The kernel keeps the header checksum of a packet that it delivers to itself.
            let sum = be16(&ip, ipv4::field::CHECKSUM);
            fill_options(&mut ip, net, packet.dst, packet.dst);
            if !packet.is_ipv6() {
                put16(&mut ip, ipv4::field::CHECKSUM, sum);
            }
        }
        let ip = &ip[..];
        let Some(part) = packet.fragment else {
            return Some(if local {
                self.deliver(ip, &packet)
            } else {
                forward(ip, &packet, None, net)
            });
        };
        // A router handles each fragment of IPv4 separately.
        if !local && !packet.is_ipv6() && packet.ttl <= 1 {
            return Some(forward(ip, &packet, None, net));
        }
        // With IPVS in the kernel, packets in transit are reassembled as well, and fragmented again
        // at the same boundaries.
        let whole = match self.reassembler.push(ip, &packet, part, local, now) {
            Ok(whole) => whole?,
            // The fragment is not reassembled; only a router forwards it.
            Err(FrameDrop::TinyFragment) if !local => return Some(forward(ip, &packet, None, net)),
            Err(_) => return None,
        };
        let ip = whole.frame.bytes();
        let packet = parse::ip(ip, false).ok()?;
        Some(if local {
            self.deliver(ip, &packet)
        } else {
            forward(ip, &packet, Some(&whole.history), net)
        })
    }

    /// Delivers a packet to the host. If an IPv6 extension header is unknown to its kernel, answers
    /// with an ICMPv6 error.
    fn deliver(&self, ip: &[u8], packet: &Packet) -> Done {
        let unknown = packet.is_ipv6()
            && ipv6::walk(ip).is_some_and(|chain| chain.named_at != ipv6::unknown_at(ip));
        if unknown {
            let error = error(ErrorKind::ProtocolUnreachable, ip, packet, packet.dst);
            return Done::sending(error);
        }
        if self.sctp && packet.protocol == Protocol::SCTP {
            return Done::default();
        }
        deliver(ip, packet)
    }
}

/// The reaction to a packet with invalid IPv4 options or a source route; `None` for other packets.
fn refused_options(ip: &[u8], packet: &Packet, net: &Table) -> Option<Done> {
    if packet.is_ipv6() {
        return None;
    }
    match ip_options::read(ip, |addr| net.is_local(addr.into())) {
        Ok(_) => None,
        Err(Refused::SourceRoute) => Some(Done::default()),
        Err(Refused::Malformed(at)) => {
            let source = if net.is_local(packet.dst) {
                Some(packet.dst)
            } else {
                net.route(packet.src).and_then(|hop| hop.source)
            };
            let kind = ErrorKind::ParameterProblem(at);
            let error = source.and_then(|source| error(kind, ip, packet, source));
            Some(Done::sending(error))
        }
    }
}

fn sum_ok(ip: &[u8], packet: &Packet) -> bool {
    tcp::checksum_ok(&ip[..packet.len], packet.l4, packet.protocol.0)
}

fn error(kind: ErrorKind, ip: &[u8], packet: &Packet, src: IpAddr) -> Option<Vec<u8>> {
    if !lvs_packet::icmp_limit::may_be_answered(packet, ip) {
        return None;
    }
    let mut frame = Frame::new();
    icmp::error(&mut frame, kind, ip, src, 0).then(|| frame.bytes().to_vec())
}

/// Delivers a packet to a host without listeners, and returns the host's answer, if any.
fn deliver(ip: &[u8], packet: &Packet) -> Done {
    const RST: u8 = 4;
    let l4 = &ip[packet.l4..packet.len];
    let answer = match packet.protocol {
        Protocol::TCP => {
            if l4.len() < 20 || l4[13] & RST != 0 || !sum_ok(ip, packet) {
                None
            } else {
                let mut frame = Frame::new();
                tcp::reset(&mut frame, ip, packet.l4).then(|| {
                    // In the recordings, the host's resets have a type of service of 0.
                    frame.bytes().to_vec()
                })
            }
        }
        Protocol::UDP => {
            // Bytes behind the datagram are not quoted.
            let whole = udp::end(ip, packet.l4).map(|end| &ip[..end]);
            whole
                .filter(|ip| udp::is_intact(ip, packet.l4))
                .and_then(|ip| error(ErrorKind::PortUnreachable, ip, packet, packet.dst))
        }
        _ if packet.is_icmp() => icmp::is_echo_request(ip, packet.l4).then(|| {
            let mut frame = Frame::from_bytes(ip);
            icmp::echo_reply(&mut frame, packet.l4, 0);
            frame.bytes().to_vec()
        }),
        // A host discards a packet that is too short for a header.
        Protocol::SCTP if l4.len() < 12 => None,
        _ => error(ErrorKind::ProtocolUnreachable, ip, packet, packet.dst),
    };
    Done::sending(answer)
}

/// Forwards a packet like a router. `history` describes its fragments on arrival.
fn forward(ip: &[u8], packet: &Packet, history: Option<&History>, net: &Table) -> Done {
    let mut done = Done::default();
    let complain = |kind| {
        let source = if net.is_local(packet.src) {
            packet.src
        } else {
            net.route(packet.src)?.source?
        };
        error(kind, ip, packet, source)
    };
    let Some(hop) = net.route(packet.dst) else {
        return done;
    };
    let mtu = hop.mtu as usize;
    if packet.ttl <= 1 {
        done.sent.extend(complain(ErrorKind::TtlExceeded));
        return done;
    }
    let longest = match history {
        Some(history) if packet.is_ipv6() => history.longest,
        _ => packet.len,
    };
    if packet.df && longest > mtu {
        let mtu = u16::try_from(mtu).unwrap_or(u16::MAX);
        done.sent
            .extend(complain(ErrorKind::FragmentationNeeded(mtu)));
        return done;
    }
    let mut frame = Frame::from_bytes(ip);
    decrement_ttl(frame.bytes_mut());
    if packet.is_ipv6() {
        forward6(&frame, history, mtu, &mut done);
        return done;
    }
    // A router records the address that it sends from (`ip_forward_options`).
    if let Some(route) = hop.source {
        let near = net.route(packet.src).and_then(|hop| hop.source);
        fill_options(frame.bytes_mut(), net, route, near.unwrap_or(route));
    }
    if packet.len <= mtu && history.is_none() {
        done.forwarded.push(frame.bytes().to_vec());
        return done;
    }
    let flags = be16(frame.bytes(), 6);
    put16(frame.bytes_mut(), 6, flags & !ipv4::MF);
    // An MTU below the minimum, which an ICMP error may have reported, causes the loss of the
    // packet.
    let sizes = history.map(|history| &history.sizes[..]);
    if let Ok(cutter) = Cutter::v4(frame.bytes(), mtu, sizes, packet.df) {
        let pieces = cutter.frames().map(|piece| piece.bytes().to_vec());
        done.forwarded.extend(pieces);
    }
    done
}

fn forward6(frame: &Frame, history: Option<&History>, mtu: usize, done: &mut Done) {
    let whole = history.map_or(mtu, |history| mtu.min(history.longest));
    if frame.len() <= whole {
        return done.forwarded.push(frame.bytes().to_vec());
    }
    let (headers, _) = ipv6::unfragmentable(frame.bytes());
    let sizes = history.map(|history| history.behind(headers, 0));
    let limit = whole.max(ipv6::MTU_MIN);
    if let Ok(cutter) = Cutter::v6(frame.bytes(), limit, sizes.as_deref(), 0) {
        let pieces = cutter.frames().map(|piece| piece.bytes().to_vec());
        done.forwarded.extend(pieces);
    }
}
