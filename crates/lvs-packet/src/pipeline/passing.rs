//! The userspace fast path, for whole IPv4 packets that do not change the state of their
//! established connection. The slow path, which processes all other packets, would send the same
//! frames.

use std::net::IpAddr;

use lvs_core::fast_path::{Ahead, Passed, Plain};
use lvs_core::{Forwarding, Hook, Protocol};

use super::datagram::{Arrival, Job};
use super::{Cx, Decide, Fate, Pipeline};
use crate::frame::Frame;
use crate::net::{Net, PortId, PortInfo, Way, is_martian};
use crate::parse;
use crate::rewrite::nat::{self, End};
use crate::segment::finish_checksum;
use crate::settings::ReversePath;
use crate::syn_limiter::KNOWN_AFTER;
use crate::wire::{ETHERNET_LEN, ETHERTYPE_IPV4, Mac, be16, ethernet, ethernet_header, ipv4};

impl Pipeline {
    /// Processes a frame by the userspace fast path. `None` means that nothing has changed, and
    /// that the slow path must process the frame.
    #[inline]
    pub(super) fn in_passing<N: Net, D: Decide>(
        &mut self,
        port: PortId,
        info: &PortInfo,
        frame: &mut Frame,
        ahead: &Ahead,
        decide: &mut D,
        cx: &mut Cx<'_, N>,
    ) -> Option<Fate> {
        let mut packet = plain(frame, info)?;
        let net = cx.env.net;
        let (src, dst) = (IpAddr::V4(*packet.src.ip()), IpAddr::V4(*packet.dst.ip()));
        let to = net.about(dst);
        let virtual_dst = to.vip || to.own;
        if is_martian(src, dst, virtual_dst, net)
            || virtual_dst && self.common.settings.reverse_path != ReversePath::Off
        {
            return None;
        }
        packet.transit = !to.local && !virtual_dst;
        // A packet in transit is either a reply, or does not concern the director.
        if packet.transit && !to.way.is_some_and(|way| takes(&way, frame, &packet, net)) {
            return None;
        }
        let passed = decide.pass(&packet, ahead, cx.now)?;
        if passed.reply {
            return Some(self.send_on(frame, &packet, &passed, &to.way?, cx));
        }
        if packet.protocol == Protocol::TCP && passed.packets == KNOWN_AFTER {
            self.syn_limiter.meets(src, cx.now);
        }
        if passed.method != Forwarding::Tunnel {
            let server = net.about(IpAddr::V4(*passed.target.ip()));
            if let Some(way) = server.way
                && !server.local
                && !server.own
                && takes(&way, frame, &packet, net)
            {
                return Some(self.send_on(frame, &packet, &passed, &way, cx));
            }
        }
        let server = Some(passed.server);
        Some(self.send_of(server, cx, |pipeline, cx| {
            pipeline.send_request(port, frame, to.local, &passed, cx)
        }))
    }

    /// Sends a packet with a new link header, a decremented TTL and, with NAT, a new source or
    /// destination.
    #[inline]
    fn send_on<N: Net>(
        &mut self,
        frame: &mut Frame,
        packet: &Plain,
        passed: &Passed,
        way: &Way,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        frame.truncate(ETHERNET_LEN + packet.len as usize);
        // A partial checksum begins after both headers; usually it is that of the transport header.
        let unfinished = frame.offload.checksum.is_some_and(|partial| {
            let l4 = usize::from(partial.start) == ETHERNET_LEN + ipv4::HEADER_LEN;
            l4 && nat::header(packet.protocol)
                .is_some_and(|(_, field)| usize::from(partial.offset) == field)
        });
        // Otherwise the partial checksum belongs to an inner packet, as in VXLAN: the checksum of
        // the outer packet must cover its final value.
        if passed.method == Forwarding::Nat
            && !unfinished
            && let Err(reason) = finish_checksum(frame)
        {
            self.drops.count(Some(passed.server), reason.name());
            return Fate::Dropped(reason);
        }
        let (link, ip) = frame.bytes_mut().split_at_mut(ETHERNET_LEN);
        ethernet_header(link, way.to, way.from, ETHERTYPE_IPV4);
        ipv4::decrement_ttl(ip);
        if passed.method == Forwarding::Nat {
            let (end, to) = if passed.reply {
                (End::Source, passed.virt)
            } else {
                (End::Destination, passed.target)
            };
            if let Err(reason) = nat::translate_plain(ip, packet.protocol, end, to, unfinished) {
                self.drops.count(Some(passed.server), reason.name());
                return Fate::Dropped(reason);
            }
        }
        self.counters.emitted += 1;
        cx.out.push(way.port, frame.take());
        Fate::Sent
    }

    /// Sends a request of a client, as the slow path does.
    #[cold]
    fn send_request<N: Net>(
        &mut self,
        port: PortId,
        frame: &mut Frame,
        to_host: bool,
        passed: &Passed,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let mut sender = Mac::default();
        sender.0.copy_from_slice(&frame.bytes()[ethernet::SOURCE]);
        let _whole = frame.pull_front(ETHERNET_LEN);
        let packet = match parse::ipv4(frame.bytes(), false) {
            Ok(packet) => packet,
            Err(reason) => return Fate::Dropped(reason),
        };
        frame.truncate(packet.len);
        let job = Job {
            arrival: Some(Arrival { port, sender }),
            ..Job::new(packet, Hook::Local, false, to_host)
        };
        self.forward(frame, &job, &passed.forward(), false, cx)
    }
}

/// The packet in a frame; `None` if the userspace fast path cannot process the frame, for example
/// because it is a super-packet or has another destination than this port.
#[inline]
fn plain(frame: &Frame, info: &PortInfo) -> Option<Plain> {
    let (link, ip) = frame.bytes().split_at_checked(ETHERNET_LEN)?;
    if !info.ethernet
        || link[ethernet::DESTINATION] != info.mac.0
        || be16(link, ethernet::ETHERTYPE) != ETHERTYPE_IPV4
        || frame.offload.segments.is_some()
    {
        return None;
    }
    let packet = parse::plain(ip)?;
    // The metadata of a frame on a virtual link come from its sender, which is not trusted.
    let finishable = frame.offload.checksum.is_none_or(|partial| {
        let start = usize::from(partial.start);
        !partial.is_crc()
            && start >= ETHERNET_LEN + ipv4::HEADER_LEN
            && start + usize::from(partial.offset) + 2 <= ETHERNET_LEN + packet.len as usize
    });
    finishable.then_some(packet)
}

/// Whether the packet fits the path without fragmentation, and its checksum needs no computation in
/// software.
#[inline]
fn takes<N: Net>(way: &Way, frame: &Frame, packet: &Plain, net: &N) -> bool {
    packet.len <= way.mtu
        && (frame.offload.checksum.is_none() || net.port(way.port).is_some_and(|port| port.offload))
}
