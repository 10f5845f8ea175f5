//! First steps for a received frame: the link layer, the IP header, and fragments.

use std::net::IpAddr;

use lvs_core::Hook;

use super::datagram::{Arrival, Job};
use super::{Cx, Decide, Fate, Pipeline};
use crate::drop::FrameDrop;
use crate::frame::{Frame, PartialChecksum};
use crate::net::{Net, PortId, PortInfo, is_martian};
use crate::parse::{self, Fragment};
use crate::segment;
use crate::settings::ReversePath;
use crate::wire::vlan::{self, Priority};
use crate::wire::{
    ETHERNET_LEN, ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Mac, be16, ethernet, ip_dst, ipv4,
    ipv6, is_ipv6,
};

impl Pipeline {
    /// Processes a received frame, beginning with its Ethernet header, if it has one. Frames that
    /// are not for this host are left to the host.
    pub(super) fn intake<N: Net, D: Decide>(
        &mut self,
        port: PortId,
        info: &PortInfo,
        frame: &mut Frame,
        decide: &mut D,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        if !info.ethernet {
            let net = cx.env.net;
            let from_host = [net.host_port(), net.local_port()].contains(&Some(port));
            // The host sends packets to multicast groups on each device: router solicitations,
            // listener reports, packets of routing daemons.
            let to_all = match ip_dst(frame.bytes()) {
                IpAddr::V4(dst) => dst.is_multicast() || dst.is_broadcast(),
                IpAddr::V6(dst) => dst.is_multicast(),
            };
            if to_all {
                return Fate::Left;
            }
            return self.ip(None, from_host, frame, decide, cx);
        }
        match vlan::take_priority_tag(frame) {
            Priority::None | Priority::Taken => {}
            Priority::Vlan => {
                self.counters.tagged += 1;
                return Fate::Left;
            }
            Priority::Nested => return Fate::Dropped(FrameDrop::NestedTags),
        }
        let bytes = frame.bytes();
        let Some((&[d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5], _)) = bytes
            .split_first_chunk()
            .filter(|_| bytes.len() >= ETHERNET_LEN)
        else {
            return Fate::Dropped(FrameDrop::Truncated);
        };
        let (dst, src) = ([d0, d1, d2, d3, d4, d5], [s0, s1, s2, s3, s4, s5]);
        let ethertype = be16(bytes, ethernet::ETHERTYPE);
        let for_us = dst == info.mac.0;
        match ethertype {
            ETHERTYPE_IPV4 | ETHERTYPE_IPV6 if for_us => {
                if ethertype == ETHERTYPE_IPV6
                    && let Some(fate) = self.neighbour_discovery(port, info, frame, cx)
                {
                    return fate;
                }
                let version = if ethertype == ETHERTYPE_IPV4 { 4 } else { 6 };
                if frame
                    .bytes()
                    .get(ETHERNET_LEN)
                    .is_some_and(|b| b >> 4 != version)
                {
                    return Fate::Dropped(FrameDrop::IpVersion);
                }
                if !frame.pull_front(ETHERNET_LEN) {
                    return Fate::Dropped(FrameDrop::Truncated);
                }
                let arrival = Arrival {
                    port,
                    sender: Mac(src),
                };
                self.ip(Some(arrival), false, frame, decide, cx)
            }
            ETHERTYPE_ARP if for_us || Mac(dst).is_multicast() => self.arp(port, info, frame, cx),
            ETHERTYPE_IPV6 if Mac(dst).is_multicast() => self
                .neighbour_discovery(port, info, frame, cx)
                .unwrap_or(Fate::Left),
            // Frames for other hosts, and protocols that are not balanced: the host keeps its copy.
            _ => Fate::Left,
        }
    }

    fn ip<N: Net, D: Decide>(
        &mut self,
        arrival: Option<Arrival>,
        from_host: bool,
        frame: &mut Frame,
        decide: &mut D,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let net = cx.env.net;
        let aggregate = frame.offload.segments.is_some();
        let packet = match parse::ip(frame.bytes(), aggregate) {
            Ok(packet) => packet,
            Err(reason) => return unreadable(frame, from_host, reason, cx),
        };
        // Ethernet pads to 60 bytes.
        frame.truncate(packet.len);
        if aggregate {
            finish_length(frame.bytes_mut());
        }
        let to_host = net.is_local(packet.dst);
        let virtual_dst = net.is_vip(packet.dst) || net.is_own_vip(packet.dst);
        let hook = match (from_host, to_host || virtual_dst) {
            (true, _) => Hook::Output,
            (false, true) => Hook::Local,
            (false, false) => Hook::Transit,
        };
        let job = Job {
            arrival,
            ..Job::new(packet, hook, from_host, to_host)
        };
        // The metadata of a frame on a virtual link come from its sender, which is not trusted.
        let mut checked = segment::check_offload(frame, &packet);
        if frame.offload.checksum.is_some_and(PartialChecksum::is_crc) {
            checked = checked.and_then(|()| segment::finish_checksum(frame));
        }
        if let Err(reason) = checked {
            return self.drop_or_leave(reason, &job, cx);
        }
        if !from_host && is_martian(packet.src, packet.dst, virtual_dst, net) {
            return if virtual_dst {
                Fate::Dropped(FrameDrop::Martian)
            } else {
                self.drop_or_leave(FrameDrop::Martian, &job, cx)
            };
        }
        if virtual_dst && !self.is_routed_back(&job, net) {
            return self.drop_or_leave(FrameDrop::ReversePath, &job, cx);
        }
        match packet.fragment {
            None => self.datagram(frame, job, decide, cx),
            // The host handles fragments that do not concern services.
            Some(part) if from_host || virtual_dst || self.intercepted(&job, cx) => {
                self.fragment(frame, job, part, decide, cx)
            }
            Some(_) => Fate::Left,
        }
    }

    /// Whether the source of a packet from an interface passes the reverse-path check.
    fn is_routed_back<N: Net>(&self, job: &Job<'_>, net: &N) -> bool {
        let Some(arrival) = job.arrival else {
            return true;
        };
        let back = || net.route(job.packet.src);
        match self.common.settings.reverse_path {
            ReversePath::Off => true,
            ReversePath::Loose => back().is_some(),
            ReversePath::Strict => back().is_some_and(|hop| hop.port == arrival.port),
        }
    }

    /// Drops an invalid packet if it was intercepted. Otherwise the host has received it, and drops
    /// it itself.
    pub(super) fn drop_or_leave<N: Net>(
        &self,
        reason: FrameDrop,
        job: &Job<'_>,
        cx: &Cx<'_, N>,
    ) -> Fate {
        if self.intercepted(job, cx) {
            Fate::Dropped(reason)
        } else {
            Fate::Left
        }
    }

    /// Stores a fragment. When the datagram is complete, processes it, or queues it for the worker
    /// that has its connection.
    fn fragment<N: Net, D: Decide>(
        &mut self,
        frame: &mut Frame,
        mut job: Job<'_>,
        part: Fragment,
        decide: &mut D,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        // A router checks each IPv4 fragment before reassembly. IPv6 is reassembled first.
        if job.hook == Hook::Transit
            && !job.packet.is_ipv6()
            && let Some(fate) = self.transit_checks(frame, &mut job, cx)
        {
            return fate;
        }
        // A single fragment that is the whole datagram (RFC 6946) may have a partial checksum,
        // which no device can complete after reassembly.
        if let Err(reason) = segment::finish_checksum(frame) {
            return Fate::Dropped(reason);
        }
        let to_host = job.hook == Hook::Local;
        let pushed =
            self.common
                .reassembler
                .push(frame.bytes(), &job.packet, part, to_host, cx.now);
        let mut whole = match pushed {
            Ok(Some(whole)) => whole,
            Ok(None) => return Fate::Fragment,
            Err(FrameDrop::TinyFragment) => {
                job.packet = job.packet.alone(frame.bytes());
                return self.tiny_fragment(frame, job, decide, cx);
            }
            Err(reason) => return Fate::Dropped(reason),
        };
        self.counters.reassembled += 1;
        let fate = match parse::ip(whole.frame.bytes(), false) {
            Ok(packet) if packet.fragment.is_some() => Fate::Dropped(FrameDrop::BadFragment),
            Ok(packet) if self.hand_over(&mut whole.frame, &packet, &whole.history, &job, cx) => {
                Fate::HandedOver
            }
            Ok(packet) => {
                let job = Job {
                    packet,
                    history: Some(&whole.history),
                    ..job
                };
                self.datagram(&mut whole.frame, job, decide, cx)
            }
            Err(reason) => Fate::Dropped(reason),
        };
        self.counters.count(fate);
        cx.out.keep(whole.frame);
        Fate::Fragment
    }
}

impl Pipeline {
    /// Handles a first fragment of IPv6 that ends within its headers. It is not reassembled
    /// (`nf_ct_frag6_gather`). It can belong to an existing connection, but it opens no connection
    /// and is not translated.
    fn tiny_fragment<N: Net, D: Decide>(
        &mut self,
        frame: &mut Frame,
        job: Job<'_>,
        decide: &mut D,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        match self.datagram(frame, job, decide, cx) {
            Fate::Dropped(FrameDrop::ShortHeader | FrameDrop::IcmpShort) => {
                Fate::Dropped(FrameDrop::TinyFragment)
            }
            fate => fate,
        }
    }
}

/// The fate of a packet with invalid headers.
fn unreadable<N: Net>(frame: &Frame, from_host: bool, reason: FrameDrop, cx: &Cx<'_, N>) -> Fate {
    // The host drops its own copy, unless the packet was intercepted: count the drop only if the
    // packet concerns the director.
    let (net, dst) = (cx.env.net, ip_dst(frame.bytes()));
    if from_host || cx.env.intercept.everything || net.is_vip(dst) || net.is_own_vip(dst) {
        Fate::Dropped(reason)
    } else {
        Fate::Left
    }
}

/// Writes the length of a super-packet into its IP header, if the length field is 0.
fn finish_length(ip: &mut [u8]) {
    if is_ipv6(ip) {
        if be16(ip, ipv6::field::PAYLOAD_LEN) == 0 {
            ipv6::finish_len(ip);
        }
    } else if be16(ip, ipv4::field::TOTAL_LEN) == 0 {
        let len = u16::try_from(ip.len()).unwrap_or(0);
        ipv4::set_total_len(ip, len);
    }
}
