//! The packet path: frames in, frames out. No I/O, no clock; tests, fuzzing and benches call what the engine calls.
//!
//! ```text
//!  frame ── link intake ── IP header ──── (fragments) ── decide ─┬─ Forward ── rewrite ── route ── neighbour ── out
//!              │                                                 ├─ Reply ──── rewrite ── route ── neighbour ── out
//!              └─ ARP, NDP, not for us                                └─ Accept ─── host has it │ give it back │ answer
//! ```
//!
//! Each frame has exactly one [`Fate`], and [`Counters`] account for all of them.

mod checks;
mod counters;
mod failure;
mod forward;
mod host;
mod ip_id;
mod leave;
mod output;
mod oversize;
mod reset;
mod settings;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use lvs_core::{Hook, IcmpError, Instant, PacketMeta, Protocol, Verdict};

use crate::packet::drop::FrameDrop;
use crate::packet::fragment::{History, Reassembler};
use crate::packet::frame::Frame;
use crate::packet::held::Held;
use crate::packet::icmp_limit::{Bucket, RateLimit};
use crate::packet::intercept::Intercept;
use crate::packet::net::{Net, PortId, PortInfo};
use crate::packet::parse::{self, Icmp, Packet};
use crate::packet::rewrite::mac;
use crate::packet::rewrite::tunnel;
use crate::packet::segment;
use crate::packet::tunnel_path::TunnelPaths;
use crate::packet::wire::icmp::ErrorKind;
use crate::packet::wire::ip_options::Wanted;
use crate::packet::wire::vlan;
use crate::packet::wire::{
    ETHERNET_LEN, ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Mac, be16, decrement_ttl, ip_dst,
    ipv4, ipv6, is_ipv6,
};

pub use self::counters::{Counters, Fate};
use self::ip_id::IpIds;
pub use self::output::{Output, Request};
pub use self::oversize::Oversize;
pub use self::settings::{ClampMss, Echo, Settings};

/// Who decides what becomes of packets: the director.
pub trait Decide {
    /// Decides on a datagram.
    fn packet(&mut self, meta: &PacketMeta<'_>, now: Instant) -> Verdict;

    /// Decides on an ICMP error about a packet.
    fn icmp_error(&mut self, error: &IcmpError, now: Instant) -> Verdict;
}

/// What the packet path looks at beside the packets.
#[derive(Debug)]
pub struct Env<'a, N> {
    /// The network around.
    pub net: &'a N,
    /// What the host's own stack does not see.
    pub intercept: &'a Intercept,
    /// Tunnels copy "don't fragment" to the outer header and complain about what does not fit (`pmtu_disc`).
    pub pmtu_disc: bool,
}

/// Fields that all steps of one packet share.
struct Cx<'a, N> {
    env: &'a Env<'a, N>,
    now: Instant,
    out: &'a mut Output,
}

/// A packet on its way through the steps.
#[derive(Clone, Copy)]
struct Job<'a> {
    packet: Packet,
    hook: Hook,
    /// It came from the host itself, through its TUN device.
    from_host: bool,
    /// It is addressed to the host.
    to_host: bool,
    /// Destination of the packet inside, if it is an ICMP error to be related.
    inner: Option<(Protocol, SocketAddr)>,
    /// How it had been cut, if it came in fragments.
    history: Option<&'a History>,
    /// What its IPv4 options ask a router to write.
    options: Wanted,
}

/// The packet path of one worker.
#[derive(Debug)]
pub struct Pipeline {
    /// What became of the frames so far.
    pub counters: Counters,
    /// Fragments that wait for the rest.
    pub reassembler: Reassembler,
    /// Packets that wait for their neighbours.
    pub held: Held,
    /// Limits on ICMP errors.
    pub rate_limit: RateLimit,
    /// Requests that were too long for the way to their server.
    pub oversize: Oversize,
    /// How long after midnight, UTC, the clock of the packets' [`Instant`]s was at 0: for time stamps in IPv4 options.
    pub midnight: Duration,
    settings: Settings,
    echo: Bucket,
    ip_ids: IpIds,
    tunnels: TunnelPaths,
    /// The ICMP error that the packet at hand was answered with.
    own_error: Option<IcmpError>,
}

impl Pipeline {
    /// An idle packet path.
    pub fn new(settings: Settings) -> Self {
        Self {
            counters: Counters::default(),
            reassembler: Reassembler::default(),
            held: Held::default(),
            rate_limit: RateLimit::new(settings.limits),
            midnight: Duration::ZERO,
            settings,
            echo: Bucket::new(settings.echo_per_second, settings.echo_per_second),
            oversize: Oversize::default(),
            ip_ids: IpIds::new(),
            tunnels: TunnelPaths::default(),
            own_error: None,
        }
    }

    /// Processes a batch of frames that came in on `port`. Afterwards, the caller applies the requests in `out`, sends its
    /// frames and recycles it. What is left in `frames` has no meaning but may receive again.
    pub fn process<N: Net, D: Decide>(
        &mut self,
        port: PortId,
        frames: &mut [Frame],
        env: &Env<'_, N>,
        decide: &mut D,
        now: Instant,
        out: &mut Output,
    ) {
        let info = env.net.port(port);
        let mut cx = Cx { env, now, out };
        for frame in frames {
            self.counters.received += 1;
            let fate = match info {
                Some(info) => self.intake(port, &info, frame, decide, &mut cx),
                None => Fate::Dropped(FrameDrop::NoPort),
            };
            self.counters.count(fate);
            // What the host says itself passes LOCAL_OUT: of a connection that is not translated, the error counts as a
            // packet to the client.
            if let Some(error) = self.own_error.take() {
                let _ = decide.icmp_error(&error, now);
            }
        }
    }

    /// Sends what waited for a neighbour.
    pub fn neighbour_resolved<N: Net>(
        &mut self,
        port: PortId,
        addr: IpAddr,
        mac: Mac,
        env: &Env<'_, N>,
        out: &mut Output,
    ) {
        let Some(info) = env.net.port(port) else {
            self.held.give_up(port, addr);
            return;
        };
        for mut frame in self.held.take(port, addr) {
            if mac::ethernet(&mut frame, mac, info.mac).is_ok() {
                self.counters.released += 1;
                self.counters.emitted += 1;
                out.queue(port).push(frame);
            } else {
                self.held.dropped += 1;
            }
        }
    }

    /// Gives up what has waited for too long. To be called about once a second.
    pub fn expire(&mut self, now: Instant) {
        self.held.expire(now);
        self.reassembler.expire(now);
    }

    /// Link layer: which frames count, and where the IP packet begins.
    fn intake<N: Net, D: Decide>(
        &mut self,
        port: PortId,
        info: &PortInfo,
        frame: &mut Frame,
        decide: &mut D,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        if !info.ethernet {
            let from_host = cx.env.net.host_port() == Some(port);
            // The host talks to every device: router solicitations, multicast listener reports.
            if is_ipv6(frame.bytes()) && ipv6::dst(frame.bytes()).is_multicast() {
                return Fate::Dropped(FrameDrop::HostStray);
            }
            return self.ip(from_host, frame, decide, cx);
        }
        if !vlan::take_priority_tag(frame) {
            self.counters.tagged += 1;
            return Fate::Left;
        }
        let bytes = frame.bytes();
        let Some((dst, ethertype)) = bytes.get(..ETHERNET_LEN).map(|header| {
            (
                [
                    header[0], header[1], header[2], header[3], header[4], header[5],
                ],
                be16(header, 12),
            )
        }) else {
            return Fate::Dropped(FrameDrop::Truncated);
        };
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
                self.ip(false, frame, decide, cx)
            }
            ETHERTYPE_ARP if for_us || Mac(dst).is_multicast() => self.arp(port, info, frame, cx),
            ETHERTYPE_IPV6 if Mac(dst).is_multicast() => self
                .neighbour_discovery(port, info, frame, cx)
                .unwrap_or(Fate::Left),
            // Other hosts' frames, and protocols that are not balanced: the host has its copy.
            _ => Fate::Left,
        }
    }

    /// The IP packet in `frame`, link header gone.
    fn ip<N: Net, D: Decide>(
        &mut self,
        from_host: bool,
        frame: &mut Frame,
        decide: &mut D,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let net = cx.env.net;
        let aggregate = frame.offload.segments.is_some();
        let packet = match parse::ip(frame.bytes(), aggregate) {
            Ok(packet) => packet,
            Err(reason) => {
                // The host drops its own copy, unless it was intercepted: count it where it concerns the director.
                let dst = ip_dst(frame.bytes());
                let taken = from_host || cx.env.intercept.everything;
                let ours = taken || net.is_vip(dst) || net.is_own_vip(dst);
                return if ours {
                    Fate::Dropped(reason)
                } else {
                    Fate::Left
                };
            }
        };
        // Ethernet pads to 60 bytes.
        frame.truncate(packet.len);
        if aggregate {
            finish_length(frame.bytes_mut());
        }
        let dst = packet.dst;
        let to_host = net.is_local(dst);
        let virtual_dst = net.is_vip(dst) || net.is_own_vip(dst);
        let hook = match (from_host, to_host || virtual_dst) {
            (true, _) => Hook::Output,
            (false, true) => Hook::Local,
            (false, false) => Hook::Transit,
        };
        let job = Job {
            packet,
            hook,
            from_host,
            to_host,
            inner: None,
            history: None,
            options: Wanted::default(),
        };
        // What a virtual link says of a frame is a peer's word.
        if let Err(reason) = segment::check_offload(frame, &packet) {
            return if self.intercepted(&job, cx) {
                Fate::Dropped(reason)
            } else {
                Fate::Left
            };
        }
        if !from_host && checks::is_martian(&packet, virtual_dst, net) {
            return if virtual_dst || self.intercepted(&job, cx) {
                Fate::Dropped(FrameDrop::Martian)
            } else {
                Fate::Left
            };
        }
        let Some(part) = packet.fragment else {
            return self.datagram(frame, job, decide, cx);
        };
        // Fragments that concern nobody here stay with the host.
        let ours = from_host || virtual_dst || self.intercepted(&job, cx);
        if !ours {
            return Fate::Left;
        }
        // A router looks at each fragment by itself before it puts them together, but of IPv6, where that comes first.
        if hook == Hook::Transit
            && !packet.is_ipv6()
            && let Some(fate) = self.transit_checks(frame, &job, cx)
        {
            return fate;
        }
        // A "fragment" that is the whole datagram may be unfinished (RFC 6946); no device finishes what is put together.
        if let Err(reason) = segment::finish_checksum(frame) {
            return Fate::Dropped(reason);
        }
        match self
            .reassembler
            .push(frame.bytes(), &packet, part, hook == Hook::Local, cx.now)
        {
            Ok(None) => Fate::Fragment,
            Ok(Some(mut whole)) => {
                self.counters.reassembled += 1;
                let fate = match parse::ip(whole.frame.bytes(), false) {
                    Ok(packet) if packet.fragment.is_some() => {
                        Fate::Dropped(FrameDrop::BadFragment)
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
            Err(reason) => Fate::Dropped(reason),
        }
    }

    /// Whether the packet was intercepted: the host does not have it.
    fn intercepted<N: Net>(&self, job: &Job<'_>, cx: &Cx<'_, N>) -> bool {
        // What came in fragments was intercepted (or not) as fragments.
        let mut packet = job.packet;
        if job.history.is_some() && packet.fragment.is_none() {
            packet.fragment = Some(parse::Fragment {
                id: 0,
                offset: 0,
                more: true,
                named_at: 0,
            });
        }
        job.from_host || cx.env.intercept.covers(&packet, job.inner, job.to_host)
    }

    /// A whole datagram.
    fn datagram<N: Net, D: Decide>(
        &mut self,
        frame: &mut Frame,
        mut job: Job<'_>,
        decide: &mut D,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let packet = &job.packet;
        let icmp = packet
            .is_icmp()
            .then(|| packet.icmp(frame.bytes(), job.hook, 0));
        if let Some(Icmp::Error(error)) = icmp {
            job.inner = Some((error.inner.protocol, error.inner.dst));
            if job.to_host && error.checksum_ok && tunnel::is_outer(error.inner.protocol) {
                // The host keeps its copy.
                let message = frame.bytes().get(packet.l4..).unwrap_or_default();
                self.tunnel_complaint(message, packet.is_ipv6(), decide, cx);
            }
        }
        if packet.l4 > ipv4::HEADER_LEN
            && !packet.is_ipv6()
            && let Some(fate) = self.read_options(frame, &mut job, cx)
        {
            return fate;
        }
        // Forwarding comes before netfilter's hook: what cannot be forwarded never gets to the director (`ip_forward`).
        if job.hook == Hook::Transit
            && let Some(fate) = self.transit_checks(frame, &job, cx)
        {
            return fate;
        }
        let verdict = match &icmp {
            Some(Icmp::Error(error)) => decide.icmp_error(error, cx.now),
            Some(Icmp::Short) => {
                return if self.intercepted(&job, cx) {
                    Fate::Dropped(FrameDrop::IcmpShort)
                } else {
                    Fate::Left
                };
            }
            Some(Icmp::Host) => return self.accept(frame, &job, cx),
            None => {
                let mut meta = job.packet.meta(frame.bytes(), job.hook, 0);
                meta.segment.trusted = frame.offload.is_checked();
                decide.packet(&meta, cx.now)
            }
        };
        let ports = matches!(&icmp, Some(Icmp::Error(error)) if error.inner_ports);
        match verdict {
            Verdict::Forward(forward) => self.forward(frame, &job, &forward, ports, cx),
            Verdict::Reply(reply) => self.reply(frame, &job, &reply, ports, cx),
            Verdict::Accept(_) => self.accept(frame, &job, cx),
            Verdict::Unreachable(_) => {
                // A packet that passes through has lost a hop already where netfilter meets it.
                if job.hook == Hook::Transit {
                    decrement_ttl(frame.bytes_mut());
                }
                self.icmp_error(ErrorKind::PortUnreachable, frame, &job, cx);
                Fate::Dropped(FrameDrop::Rejected)
            }
            Verdict::Reset(_) => {
                self.answer_with_reset(frame, &job.packet, cx);
                Fate::Dropped(FrameDrop::Rejected)
            }
            Verdict::Drop(_) => Fate::Dropped(FrameDrop::Verdict),
        }
    }

    /// What a router checks before netfilter's FORWARD hook, where the host does not do it.
    fn transit_checks<N: Net>(
        &mut self,
        frame: &Frame,
        job: &Job<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Option<Fate> {
        if job.packet.ttl > 1 {
            return None;
        }
        if !self.intercepted(job, cx) {
            return Some(Fate::Left);
        }
        self.icmp_error(ErrorKind::TtlExceeded, frame, job, cx);
        Some(Fate::Dropped(FrameDrop::TtlExceeded))
    }
}

/// Stores the length of an aggregate whose sender has left it out.
fn finish_length(ip: &mut [u8]) {
    if is_ipv6(ip) {
        if be16(ip, 4) == 0 {
            ipv6::finish_len(ip);
        }
    } else if be16(ip, 2) == 0 {
        let len = u16::try_from(ip.len()).unwrap_or(0);
        ipv4::set_total_len(ip, len);
    }
}
