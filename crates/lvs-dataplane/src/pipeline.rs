//! The packet path: frames in, frames out. No I/O, no clock; tests, fuzzing and benches call what the engine calls.
//!
//! ```text
//!  frame ── link intake ── IP header ──── (fragments) ── decide ─┬─ Forward ── rewrite ── route ── neighbour ── out
//!              │                                                 ├─ Reply ──── rewrite ── route ── neighbour ── out
//!              └─ ARP, NDP, not for us                                └─ Accept ─── host has it │ give it back │ answer
//! ```
//!
//! Each frame has exactly one [`Fate`], and [`Counters`] account for all of them.

use std::hash::{BuildHasher, RandomState};
use std::mem;
use std::net::{IpAddr, SocketAddr};

use lvs_core::{
    Forward, Forwarding, Hook, IcmpError, Instant, PacketMeta, Protocol, Reply, TcpFlags, Tunnel,
    Verdict,
};

use crate::arp;
use crate::drop::FrameDrop;
use crate::fragment::{self, History, Reassembler};
use crate::frame::{Frame, MAX_FRAME, Offload};
use crate::icmp::{Limits, RateLimit, may_be_answered};
use crate::ndp;
use crate::neighbour::Waiting;
use crate::net::{Net, NextHop, PortId, PortInfo};
use crate::parse::{self, Icmp, Packet};
use crate::rewrite::mac;
use crate::rewrite::nat::{self, End};
use crate::rewrite::tunnel::{self, Outer};
use crate::segment::{Cut, finish_checksum};
use crate::shield_spec::{LocalClient, ShieldSpec};
use crate::tunnel_path::TunnelPaths;
use crate::wire::icmp::{self as wire_icmp, ErrorKind};
use crate::wire::{
    ETHERNET_LEN, ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Mac, be16, decrement_ttl, ip_dst,
    ip_src, ipv4, ipv6, is_ipv6, tcp,
};

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
    /// What the shield hides from the host.
    pub shield: &'a ShieldSpec,
    /// Tunnels copy "don't fragment" to the outer header and complain about what does not fit (`pmtu_disc`).
    pub pmtu_disc: bool,
}

/// What became of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Sent on a port, whole, in segments or in fragments.
    Sent,
    /// Waits for the link-layer address of its next hop.
    Held,
    /// Left to the host, which has its own copy.
    Left,
    /// Given to the host through its TUN device.
    GivenBack,
    /// Answered here: ARP, NDP, echo and resets for addresses that the engine owns.
    Answered,
    /// A fragment that was put aside; its datagram gets a fate of its own.
    Fragment,
    /// Discarded.
    Dropped(FrameDrop),
}

/// What became of all frames. `received + reassembled` equals the sum of all fates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Frames that came in.
    pub received: u64,
    /// Datagrams put together from fragments.
    pub reassembled: u64,
    /// Frames with fate [`Fate::Sent`].
    pub sent: u64,
    /// Frames with fate [`Fate::Held`].
    pub held: u64,
    /// Of these, sent later.
    pub released: u64,
    /// Frames with fate [`Fate::Left`].
    pub left: u64,
    /// Frames with fate [`Fate::GivenBack`].
    pub given_back: u64,
    /// Frames with fate [`Fate::Answered`].
    pub answered: u64,
    /// Frames with fate [`Fate::Fragment`].
    pub fragments: u64,
    /// Frames with fate [`Fate::Dropped`], by [`FrameDrop::index`].
    pub dropped: [u64; FrameDrop::ALL.len()],
    /// ICMP errors made here.
    pub icmp_sent: u64,
    /// Frames that left, segments and fragments counted one by one.
    pub emitted: u64,
}

impl Counters {
    /// Frames dropped, for whatever reason.
    pub fn dropped_total(&self) -> u64 {
        self.dropped.iter().sum()
    }

    /// Frames dropped for `reason`.
    pub const fn dropped_for(&self, reason: FrameDrop) -> u64 {
        self.dropped[reason.index()]
    }

    /// The sum of all fates; equals `received + reassembled`.
    pub fn accounted(&self) -> u64 {
        self.sent
            + self.held
            + self.left
            + self.given_back
            + self.answered
            + self.fragments
            + self.dropped_total()
    }

    const fn count(&mut self, fate: Fate) {
        match fate {
            Fate::Sent => self.sent += 1,
            Fate::Held => self.held += 1,
            Fate::Left => self.left += 1,
            Fate::GivenBack => self.given_back += 1,
            Fate::Answered => self.answered += 1,
            Fate::Fragment => self.fragments += 1,
            Fate::Dropped(reason) => self.dropped[reason.index()] += 1,
        }
    }
}

/// What the caller is to do beside sending, and before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Ask the kernel for a neighbour's link-layer address, and report it by [`Pipeline::neighbour_resolved`].
    Resolve(PortId, IpAddr),
    /// A client on the director itself opens a connection: hide the server's replies from the host.
    ShieldLocalClient(LocalClient),
    /// Another host claims an address of a service.
    AddressConflict {
        /// Where it was heard.
        port: PortId,
        /// The address.
        addr: IpAddr,
        /// Who claims it.
        mac: Mac,
    },
}

/// Frames to send, by port, and requests. Apply the requests first.
#[derive(Debug, Default)]
pub struct Output {
    ports: Vec<Vec<Frame>>,
    /// To be applied before the frames are sent.
    pub requests: Vec<Request>,
    pool: Vec<Frame>,
}

/// Frames kept for reuse at most.
const POOL_MAX: usize = 512;

impl Output {
    /// Nothing to send.
    pub fn new() -> Self {
        Self::default()
    }

    /// Frames for `port`, in order.
    pub fn frames(&mut self, port: PortId) -> &mut [Frame] {
        self.ports
            .get_mut(port.index())
            .map_or(&mut [], Vec::as_mut_slice)
    }

    /// Ports with frames to send, and these.
    pub fn queues(&mut self) -> impl Iterator<Item = (PortId, &mut [Frame])> {
        (0..=u16::MAX)
            .map(PortId)
            .zip(self.ports.iter_mut())
            .filter(|(_, frames)| !frames.is_empty())
            .map(|(port, frames)| (port, frames.as_mut_slice()))
    }

    /// Forgets what was sent and applied; the buffers are used again.
    pub fn recycle(&mut self) {
        self.requests.clear();
        let Self { ports, pool, .. } = self;
        for frame in ports.iter_mut().flat_map(|frames| frames.drain(..)) {
            keep(pool, frame);
        }
    }

    /// An empty frame of full size.
    fn spare(&mut self) -> Frame {
        self.pool.pop().unwrap_or_default()
    }

    fn queue(&mut self, port: PortId) -> &mut Vec<Frame> {
        let index = port.index();
        if self.ports.len() <= index {
            self.ports.resize_with(index + 1, Vec::new);
        }
        &mut self.ports[index]
    }

    /// Takes the frame out of `slot`, which gets an empty one.
    fn push(&mut self, port: PortId, slot: &mut Frame) {
        let spare = self.spare();
        let frame = mem::replace(slot, spare);
        self.queue(port).push(frame);
    }
}

/// Only frames of full size may receive again.
fn keep(pool: &mut Vec<Frame>, mut frame: Frame) {
    frame.clear();
    if pool.len() < POOL_MAX && frame.tailroom() >= MAX_FRAME {
        pool.push(frame);
    }
}

/// Numbers for the packets that the director makes, counted by receiver as a host does.
#[derive(Debug)]
struct Idents {
    by_receiver: [u16; 256],
    /// Of the next IPv6 fragments, before they are scrambled.
    fragments: u32,
}

impl Idents {
    fn new() -> Self {
        let random = RandomState::new().hash_one(0);
        Self {
            by_receiver: [0; 256],
            fragments: u32::try_from(random >> 32).unwrap_or(0),
        }
    }

    /// The first of `count` numbers of IPv4; IPv6 has none.
    fn next(&mut self, src: IpAddr, dst: IpAddr, protocol: u8, count: usize) -> u16 {
        let (IpAddr::V4(src), IpAddr::V4(dst)) = (src, dst) else {
            return 0;
        };
        let mixed = (src.to_bits() ^ dst.to_bits().rotate_left(7) ^ u32::from(protocol))
            .wrapping_mul(0x9e37_79b9);
        let counter = &mut self.by_receiver[(mixed >> 24) as usize];
        let id = counter.wrapping_add(1);
        *counter = counter.wrapping_add(u16::try_from(count).unwrap_or(1));
        id
    }

    /// A number for the fragments of an IPv6 datagram: none comes twice in 2^32, and the next is not the next higher (RFC
    /// 7739).
    fn next_fragments(&mut self) -> u32 {
        self.fragments = self.fragments.wrapping_add(1);
        let mut id = self.fragments;
        for factor in [0x7feb_352d_u32, 0x846c_a68b] {
            id = (id ^ id >> 16).wrapping_mul(factor);
        }
        id ^ id >> 15
    }
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
}

/// In how many pieces a packet leaves.
#[derive(Clone, Copy)]
enum Pieces<'a> {
    /// In one, or cut evenly where it does not fit and says that it may be.
    Whole,
    /// In one, or cut evenly whatever it says: a relayed ICMP error.
    Relayed,
    /// It came in fragments, of which this was the longest: cut evenly, and never longer than that.
    Even(usize),
    /// It came in fragments and passes through, or is IPv6: cut where it had been, if that fits.
    Along(&'a History),
    /// It is a tunnel packet around IPv6 that came in fragments: cut where that had been, behind so many bytes of the tunnel,
    /// if it does not fit.
    Around(&'a History, usize),
}

impl Job<'_> {
    /// How the packet leaves on its way to a server.
    fn pieces(&self) -> Pieces<'_> {
        match self.history {
            Some(history) if self.packet.is_ipv6() => Pieces::Along(history),
            Some(history) => Pieces::Even(history.longest),
            None if self.inner.is_some() => Pieces::Relayed,
            None => Pieces::Whole,
        }
    }
}

/// The packet path of one worker.
#[derive(Debug)]
pub struct Pipeline {
    /// What became of the frames so far.
    pub counters: Counters,
    /// Fragments that wait for the rest.
    pub reassembler: Reassembler,
    /// Packets that wait for their neighbours.
    pub waiting: Waiting,
    /// Limits on ICMP errors.
    pub rate_limit: RateLimit,
    idents: Idents,
    tunnels: TunnelPaths,
}

impl Pipeline {
    /// An idle packet path.
    pub fn new(limits: Limits) -> Self {
        Self {
            counters: Counters::default(),
            reassembler: Reassembler::default(),
            waiting: Waiting::default(),
            rate_limit: RateLimit::new(limits),
            idents: Idents::new(),
            tunnels: TunnelPaths::default(),
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
            self.waiting.fail(port, addr);
            return;
        };
        for mut frame in self.waiting.take(port, addr) {
            if mac::ethernet(&mut frame, mac, info.mac).is_ok() {
                self.counters.released += 1;
                self.counters.emitted += 1;
                out.queue(port).push(frame);
            } else {
                self.waiting.dropped += 1;
            }
        }
    }

    /// Drops what waited for a neighbour that does not answer.
    pub fn neighbour_failed(&mut self, port: PortId, addr: IpAddr) {
        self.waiting.fail(port, addr);
    }

    /// Gives up what has waited for too long. To be called about once a second.
    pub fn expire(&mut self, now: Instant) {
        self.waiting.expire(now);
        self.reassembler.expire(now);
    }

    /// Announces an own address on a port.
    pub fn announce<N: Net>(&mut self, port: PortId, addr: IpAddr, net: &N, out: &mut Output) {
        match addr {
            IpAddr::V4(addr) => self.broadcast(port, net, out, |mac| arp::gratuitous(mac, addr)),
            IpAddr::V6(addr) => self.broadcast(port, net, out, |mac| ndp::unsolicited(mac, addr)),
        }
    }

    /// Asks on a port who has an address. Answers come as [`Request::AddressConflict`].
    pub fn probe<N: Net>(&mut self, port: PortId, addr: IpAddr, net: &N, out: &mut Output) {
        match addr {
            IpAddr::V4(addr) => self.broadcast(port, net, out, |mac| arp::probe(mac, addr)),
            IpAddr::V6(addr) => self.broadcast(port, net, out, |mac| ndp::probe(mac, addr)),
        }
    }

    fn broadcast<N: Net, const LEN: usize>(
        &mut self,
        port: PortId,
        net: &N,
        out: &mut Output,
        message: impl FnOnce(Mac) -> [u8; LEN],
    ) {
        if let Some(info) = net.port(port).filter(|info| info.ethernet) {
            let mut frame = out.spare();
            if frame.extend(&message(info.mac)) {
                self.counters.emitted += 1;
                out.queue(port).push(frame);
            }
        }
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

    fn arp<N: Net>(
        &mut self,
        port: PortId,
        info: &PortInfo,
        frame: &mut Frame,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let Some(message) = arp::parse(frame.bytes()) else {
            return Fate::Left;
        };
        let net = cx.env.net;
        let claimed = IpAddr::V4(message.sender);
        if message.sender_mac != info.mac && (net.is_own_vip(claimed) || net.is_vip(claimed)) {
            cx.out.requests.push(Request::AddressConflict {
                port,
                addr: claimed,
                mac: message.sender_mac,
            });
        }
        if !message.request
            || message.sender == message.target
            || !net.answers_arp(port, IpAddr::V4(message.target))
        {
            return Fate::Left;
        }
        self.answer(port, frame, &arp::reply(&message, info.mac), cx)
    }

    /// Neighbour solicitations for own addresses are answered, claims of others to a service's address are reported. `None`:
    /// it is something else.
    fn neighbour_discovery<N: Net>(
        &mut self,
        port: PortId,
        info: &PortInfo,
        frame: &mut Frame,
        cx: &mut Cx<'_, N>,
    ) -> Option<Fate> {
        let bytes = frame.bytes();
        // Most packets are not ICMPv6.
        if bytes.get(ETHERNET_LEN + 6) != Some(&Protocol::ICMPV6.0) {
            return None;
        }
        let message = ndp::parse(bytes)?;
        let net = cx.env.net;
        let target = IpAddr::V6(message.target);
        if !message.solicitation {
            if message.mac != info.mac && (net.is_own_vip(target) || net.is_vip(target)) {
                cx.out.requests.push(Request::AddressConflict {
                    port,
                    addr: target,
                    mac: message.mac,
                });
            }
            return Some(Fate::Left);
        }
        if message.mac == info.mac || !net.answers_arp(port, target) {
            return Some(Fate::Left);
        }
        let answer = ndp::advertisement(&message, info.mac);
        Some(self.answer(port, frame, &answer, cx))
    }

    /// Sends a whole frame in the place of the one that asked for it.
    fn answer<N: Net>(
        &mut self,
        port: PortId,
        frame: &mut Frame,
        answer: &[u8],
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        frame.clear();
        if !frame.extend(answer) {
            return Fate::Dropped(FrameDrop::NoRoom);
        }
        self.counters.emitted += 1;
        cx.out.push(port, frame);
        Fate::Answered
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
                // The host drops its own copy, unless the shield has hidden it: count it where it concerns the director.
                let dst = ip_dst(frame.bytes());
                let ours = from_host || net.is_vip(dst) || net.is_own_vip(dst);
                return if ours {
                    Fate::Dropped(reason)
                } else {
                    Fate::Left
                };
            }
        };
        // Ethernet pads to 60 bytes.
        frame.truncate(packet.len);
        if let Some(partial) = frame.offload.checksum
            && usize::from(partial.start) + usize::from(partial.offset) + 2 > packet.len
        {
            return Fate::Dropped(FrameDrop::BadOffload);
        }
        if aggregate && !packet.is_ipv6() && be16(frame.bytes(), 2) == 0 {
            ipv4::set_total_len(frame.bytes_mut(), u16::try_from(packet.len).unwrap_or(0));
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
        };
        let Some(part) = packet.fragment else {
            return self.datagram(frame, job, decide, cx);
        };
        // Fragments that concern nobody here stay with the host.
        let ours = from_host || virtual_dst || self.hidden(&job, cx);
        if !ours {
            return Fate::Left;
        }
        // A router looks at each fragment by itself before it puts them together.
        if hook == Hook::Transit
            && let Some(fate) = self.transit_checks(frame, &job, cx)
        {
            return fate;
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
                keep(&mut cx.out.pool, whole.frame);
                Fate::Fragment
            }
            Err(reason) => Fate::Dropped(reason),
        }
    }

    /// Whether the shield has hidden the packet from the host.
    fn hidden<N: Net>(&self, job: &Job<'_>, cx: &Cx<'_, N>) -> bool {
        // What came in fragments was hidden (or not) as fragments.
        let mut packet = job.packet;
        if job.history.is_some() && packet.fragment.is_none() {
            packet.fragment = Some(parse::Fragment {
                id: 0,
                offset: 0,
                more: true,
                named_at: 0,
            });
        }
        job.from_host || cx.env.shield.hides(&packet, job.inner, job.to_host)
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
                self.tunnel_complaint(frame, &job, cx);
            }
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
                return if self.hidden(&job, cx) {
                    Fate::Dropped(FrameDrop::IcmpShort)
                } else {
                    Fate::Left
                };
            }
            Some(Icmp::Host) => return self.accept(frame, &job, cx),
            None => decide.packet(&job.packet.meta(frame.bytes(), job.hook, 0), cx.now),
        };
        let ports = matches!(&icmp, Some(Icmp::Error(error)) if error.inner_ports);
        match verdict {
            Verdict::Forward(forward) => self.forward(frame, &job, &forward, ports, cx),
            Verdict::Reply(reply) => self.reply(frame, &job, &reply, ports, cx),
            Verdict::Accept(_) => self.accept(frame, &job, cx),
            Verdict::Unreachable(_) => {
                // A packet that passes through has lost a hop already where netfilter meets it.
                if job.hook == Hook::Transit {
                    ipv4::decrement_ttl(frame.bytes_mut());
                }
                self.icmp_error(ErrorKind::PortUnreachable, frame, &job, cx);
                Fate::Dropped(FrameDrop::Rejected)
            }
            Verdict::Drop(_) => Fate::Dropped(FrameDrop::Verdict),
        }
    }

    /// Tells a client of an ICMP error about the tunnel packet that carried its request. The host keeps its copy.
    fn tunnel_complaint<N: Net>(&mut self, frame: &Frame, job: &Job<'_>, cx: &mut Cx<'_, N>) {
        let net = cx.env.net;
        let message = frame.bytes().get(job.packet.l4..).unwrap_or_default();
        let route = |server| net.route(server).map(|hop| hop.mtu as usize);
        if job.packet.is_ipv6() {
            return self.tunnels.too_big(message, route, cx.now);
        }
        let Some(complaint) = self.tunnels.complaint(message, route, cx.now) else {
            return;
        };
        let (client, virt) = (ip_src(complaint.original), ip_dst(complaint.original));
        if !net.is_vip(virt) || !self.rate_limit.allow(complaint.kind, client, cx.now) {
            return;
        }
        let id = self.idents.next(virt, client, Protocol::ICMP.0, 1);
        let mut error = cx.out.spare();
        if wire_icmp::error(&mut error, complaint.kind, complaint.original, virt, id) {
            let fate = self.send_own(&mut error, cx);
            self.counters.icmp_sent += u64::from(fate == Fate::Answered);
        }
        keep(&mut cx.out.pool, error);
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
        if !self.hidden(job, cx) {
            return Some(Fate::Left);
        }
        self.icmp_error(ErrorKind::TtlExceeded, frame, job, cx);
        Some(Fate::Dropped(FrameDrop::TtlExceeded))
    }

    /// Not for the director.
    fn accept<N: Net>(&mut self, frame: &mut Frame, job: &Job<'_>, cx: &mut Cx<'_, N>) -> Fate {
        if cx.env.net.is_own_vip(job.packet.dst) && !job.to_host {
            return self.own_host(frame, job, cx);
        }
        if job.from_host {
            return Fate::Dropped(FrameDrop::HostStray);
        }
        if !self.hidden(job, cx) {
            return Fate::Left;
        }
        self.give_back(frame, job, cx)
    }

    /// Gives a packet to the host through its TUN device.
    fn give_back<N: Net>(&mut self, frame: &mut Frame, job: &Job<'_>, cx: &mut Cx<'_, N>) -> Fate {
        let Some((port, info)) = cx
            .env
            .net
            .host_port()
            .and_then(|port| Some((port, cx.env.net.port(port)?)))
        else {
            return Fate::Dropped(FrameDrop::NoHostPort);
        };
        if let Some(history) = job.history {
            // As it came: the host puts it together, or forwards it, as it would have.
            let Cx { out, .. } = cx;
            let mut pieces = Vec::new();
            let cut = if job.packet.is_ipv6() {
                let (headers, _) = ipv6::unfragmentable(frame.bytes());
                let sizes = history.behind(headers, 0);
                let limit = history.longest.max(ipv6::MTU_MIN);
                let id = self.idents.next_fragments();
                fragment::fragment6(frame, limit, Some(&sizes), id, Frame::new, |piece| {
                    pieces.push(piece);
                })
            } else {
                let df = dont_fragment(frame);
                fragment::fragment(
                    frame,
                    history.longest,
                    Some(&history.sizes),
                    df,
                    Frame::new,
                    |piece| pieces.push(piece),
                )
            };
            if let Err(reason) = cut {
                return Fate::Dropped(reason);
            }
            self.counters.emitted += pieces.len() as u64;
            out.queue(port).append(&mut pieces);
            return Fate::GivenBack;
        }
        if !info.offload
            && let Err(reason) = finish_checksum(frame)
        {
            return Fate::Dropped(reason);
        }
        self.counters.emitted += 1;
        cx.out.push(port, frame);
        Fate::GivenBack
    }

    /// What the host's own stack would do, for an address that the engine owns.
    fn own_host<N: Net>(&mut self, frame: &mut Frame, job: &Job<'_>, cx: &mut Cx<'_, N>) -> Fate {
        let packet = job.packet;
        let ip = frame.bytes();
        let l4 = &ip[packet.l4.min(ip.len())..];
        let trusted = frame.offload.checksum.is_some() || frame.offload.verified;
        match packet.protocol {
            _ if packet.is_icmp() => {
                if !wire_icmp::is_echo_request(ip, packet.l4) {
                    return Fate::Dropped(FrameDrop::OwnAddress);
                }
                let id = self
                    .idents
                    .next(packet.dst, packet.src, Protocol::ICMP.0, 1);
                wire_icmp::echo_reply(frame, packet.l4, id);
                self.send_own(frame, cx)
            }
            Protocol::TCP => {
                let right =
                    l4.len() >= 20 && (trusted || tcp::checksum_ok(ip, packet.l4, Protocol::TCP.0));
                if !right || TcpFlags(l4[13]).has(TcpFlags::RST) {
                    return Fate::Dropped(FrameDrop::OwnAddress);
                }
                let mut answer = cx.out.spare();
                if !tcp::reset(&mut answer, ip, packet.l4) {
                    return Fate::Dropped(FrameDrop::OwnAddress);
                }
                let fate = self.send_own(&mut answer, cx);
                keep(&mut cx.out.pool, answer);
                fate
            }
            Protocol::UDP => {
                let right = l4.len() >= 8
                    && (trusted
                        || (be16(l4, 6) == 0 && !packet.is_ipv6())
                        || tcp::checksum_ok(ip, packet.l4, Protocol::UDP.0));
                if right {
                    self.icmp_error(ErrorKind::PortUnreachable, frame, job, cx);
                }
                Fate::Dropped(FrameDrop::OwnAddress)
            }
            _ => {
                self.icmp_error(ErrorKind::ProtocolUnreachable, frame, job, cx);
                Fate::Dropped(FrameDrop::OwnAddress)
            }
        }
    }

    /// Sends an answer made here; it counts as [`Fate::Answered`] unless it cannot leave.
    fn send_own<N: Net>(&mut self, frame: &mut Frame, cx: &mut Cx<'_, N>) -> Fate {
        frame.offload = Offload::default();
        let packet = match parse::ip(frame.bytes(), false) {
            Ok(packet) => packet,
            Err(reason) => return Fate::Dropped(reason),
        };
        let net = cx.env.net;
        let dst = packet.dst;
        if net.is_local(dst) {
            let Some(port) = net.host_port() else {
                return Fate::Dropped(FrameDrop::NoHostPort);
            };
            self.counters.emitted += 1;
            cx.out.push(port, frame);
            return Fate::Answered;
        }
        let Some(hop) = net.route(dst) else {
            return Fate::Dropped(FrameDrop::NoRoute);
        };
        match self.leave(frame, &packet, &hop, Pieces::Relayed, cx) {
            Fate::Dropped(reason) => Fate::Dropped(reason),
            _ => Fate::Answered,
        }
    }

    /// Makes an ICMP error about the packet in `frame` and sends it to its source.
    fn icmp_error<N: Net>(
        &mut self,
        kind: ErrorKind,
        frame: &Frame,
        job: &Job<'_>,
        cx: &mut Cx<'_, N>,
    ) {
        let net = cx.env.net;
        let packet = &job.packet;
        if !may_be_answered(packet, frame.bytes())
            || !self.rate_limit.allow(kind, packet.src, cx.now)
        {
            return;
        }
        let src = if job.to_host || net.is_own_vip(packet.dst) {
            packet.dst
        } else {
            // A router's error comes from its address on the link towards the receiver.
            match net.route(packet.src).and_then(|hop| hop.source) {
                Some(addr) => addr,
                // The host of a VIP that is only routed here: nothing is better than the address that was asked.
                _ if job.hook != Hook::Transit => packet.dst,
                _ => return,
            }
        };
        let id = self.idents.next(src, packet.src, Protocol::ICMP.0, 1);
        let mut error = cx.out.spare();
        if wire_icmp::error(&mut error, kind, frame.bytes(), src, id) {
            let fate = self.send_own(&mut error, cx);
            self.counters.icmp_sent += u64::from(fate == Fate::Answered);
        }
        keep(&mut cx.out.pool, error);
    }

    /// Client to server.
    fn forward<N: Net>(
        &mut self,
        frame: &mut Frame,
        job: &Job<'_>,
        forward: &Forward,
        ports: bool,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let net = cx.env.net;
        let bypass = forward.method == Forwarding::Bypass;
        let target = if bypass {
            job.packet.dst
        } else {
            forward.target.ip()
        };
        if target.is_ipv6() != job.packet.is_ipv6() && forward.method != Forwarding::Tunnel {
            return Fate::Dropped(FrameDrop::Unsupported);
        }
        if bypass && net.is_local(target) {
            return Fate::Dropped(FrameDrop::Loop);
        }
        let local = forward.method == Forwarding::Local || net.is_local(target);
        if local {
            return self.forward_local(frame, job, forward, ports, cx);
        }
        if net.is_own_vip(target) {
            return Fate::Dropped(FrameDrop::Loop);
        }
        let Some(hop) = net.route(target) else {
            self.icmp_error(ErrorKind::HostUnreachable, frame, job, cx);
            return Fate::Dropped(FrameDrop::NoRoute);
        };
        if job.packet.src.is_loopback() {
            return Fate::Dropped(FrameDrop::Martian);
        }
        if job.packet.ttl <= 1 {
            self.icmp_error(ErrorKind::TtlExceeded, frame, job, cx);
            return Fate::Dropped(FrameDrop::TtlExceeded);
        }
        decrement_ttl(frame.bytes_mut());
        match forward.method {
            Forwarding::Nat => {
                if let Some(fate) = self.too_big(frame, job, hop.mtu as usize, cx) {
                    return fate;
                }
                if let Err(reason) = rewrite(frame, job, End::Destination, forward.target, ports) {
                    return Fate::Dropped(reason);
                }
                if job.from_host && job.inner.is_none() {
                    let client = LocalClient {
                        protocol: job.packet.protocol,
                        server: forward.target,
                        local: SocketAddr::new(
                            job.packet.src,
                            job.packet.ports.unwrap_or_default().0,
                        ),
                    };
                    let request = Request::ShieldLocalClient(client);
                    if !cx.env.shield.local_clients.contains(&client)
                        && !cx.out.requests.contains(&request)
                    {
                        cx.out.requests.push(request);
                    }
                }
                self.leave(frame, &job.packet, &hop, job.pieces(), cx)
            }
            Forwarding::Route | Forwarding::Bypass => {
                if let Some(fate) = self.too_big(frame, job, hop.mtu as usize, cx) {
                    return fate;
                }
                self.leave(frame, &job.packet, &hop, job.pieces(), cx)
            }
            Forwarding::Tunnel => self.tunnel(frame, job, forward, &hop, target, cx),
            Forwarding::Local => Fate::Dropped(FrameDrop::Unsupported),
        }
    }

    /// The real server is the director itself: no TTL, no MTU, no encapsulation.
    fn forward_local<N: Net>(
        &mut self,
        frame: &mut Frame,
        job: &Job<'_>,
        forward: &Forward,
        ports: bool,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        if forward.method == Forwarding::Nat {
            if forward.target.ip().is_loopback() && !job.from_host {
                return Fate::Dropped(FrameDrop::Martian);
            }
            if let Err(reason) = rewrite(frame, job, End::Destination, forward.target, ports) {
                return Fate::Dropped(reason);
            }
            return self.give_back(frame, job, cx);
        }
        if cx.env.net.is_own_vip(job.packet.dst) && !job.to_host {
            // The host does not have the address: it would route the packet straight back.
            return Fate::Dropped(FrameDrop::Loop);
        }
        if job.from_host {
            return Fate::Dropped(FrameDrop::Loop);
        }
        if self.hidden(job, cx) {
            self.give_back(frame, job, cx)
        } else {
            Fate::Left
        }
    }

    /// Complains about a packet that does not fit `mtu` and must not be fragmented (`ensure_mtu_is_adequate`).
    fn too_big<N: Net>(
        &mut self,
        frame: &Frame,
        job: &Job<'_>,
        mtu: usize,
        cx: &mut Cx<'_, N>,
    ) -> Option<Fate> {
        let packet = &job.packet;
        // What came in fragments of IPv6 fits as it fitted before.
        let longest = match job.history {
            Some(history) if packet.is_ipv6() => history.longest,
            _ => packet.len,
        };
        // An ICMP error that is being relayed is rather fragmented; one of IPv6 is lost.
        if !packet.df || longest <= mtu || (job.inner.is_some() && !packet.is_ipv6()) {
            return None;
        }
        match Cut::new(frame, packet) {
            Ok(Some(cut)) if cut.longest(packet.len) <= mtu => return None,
            Ok(_) => {}
            Err(reason) => return Some(Fate::Dropped(reason)),
        }
        let reported = u16::try_from(mtu).unwrap_or(u16::MAX);
        self.icmp_error(ErrorKind::FragmentationNeeded(reported), frame, job, cx);
        Some(Fate::Dropped(FrameDrop::TooBig))
    }

    fn tunnel<N: Net>(
        &mut self,
        frame: &mut Frame,
        job: &Job<'_>,
        forward: &Forward,
        hop: &NextHop,
        target: IpAddr,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let Some(src) = hop.source else {
            return Fate::Dropped(FrameDrop::NoSource);
        };
        let path = self
            .tunnels
            .mtu(target, forward.tunnel, hop.mtu as usize, cx.now);
        let mtu = path.saturating_sub(tunnel::overhead(forward.tunnel, target));
        // What the inner packet does not forbid is cut to what was learned.
        let hop = &NextHop {
            mtu: u32::try_from(path).unwrap_or(hop.mtu),
            ..*hop
        };
        // The least that a link of the outer version has to take.
        let least = if target.is_ipv6() { ipv6::MTU_MIN } else { 68 };
        if mtu < least {
            return Fate::Dropped(FrameDrop::MtuTooSmall);
        }
        if (cx.env.pmtu_disc || job.packet.is_ipv6())
            && let Some(fate) = self.too_big(frame, job, mtu, cx)
        {
            return fate;
        }
        let df = cx.env.pmtu_disc && job.packet.df && !job.packet.is_ipv6();
        let cut = match Cut::new(frame, &job.packet) {
            Ok(cut) => cut,
            Err(reason) => return Fate::Dropped(reason),
        };
        // The virtio header cannot express an aggregate inside a tunnel: each segment gets its own outer header.
        let count = cut.map_or(1, |cut| cut.count(job.packet.len));
        let id = if df {
            0
        } else {
            self.idents.next(src, target, tunnel::IPV4, count)
        };
        let mut outer = Outer {
            src,
            dst: target,
            tunnel: forward.tunnel,
            source_port: match forward.tunnel {
                Tunnel::Gue { .. } => tunnel::source_port(&job.packet),
                _ => 0,
            },
            id,
            df,
        };
        let Some(cut) = cut else {
            if let Err(reason) = finish_checksum(frame) {
                return Fate::Dropped(reason);
            }
            frame.offload.segments = None;
            let pieces = match job.history {
                Some(history) if job.packet.is_ipv6() => {
                    Pieces::Around(history, tunnel::header_len(forward.tunnel))
                }
                Some(history) => Pieces::Even(history.longest),
                None => Pieces::Relayed,
            };
            return self.tunnelled(frame, &outer, hop, pieces, cx);
        };
        let mut segments = Vec::with_capacity(count);
        cut.segments(
            frame,
            &job.packet,
            || cx.out.spare(),
            |segment| segments.push(segment),
        );
        let mut fate = Fate::Dropped(FrameDrop::BadAggregate);
        for mut segment in segments {
            fate = self.tunnelled(&mut segment, &outer, hop, Pieces::Relayed, cx);
            outer.id = outer.id.wrapping_add(1);
            keep(&mut cx.out.pool, segment);
        }
        fate
    }

    /// Encapsulates a packet and sends it. Whether it may be fragmented has been decided by the inner packet.
    fn tunnelled<N: Net>(
        &mut self,
        frame: &mut Frame,
        outer: &Outer,
        hop: &NextHop,
        pieces: Pieces<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        if let Err(reason) = tunnel::encapsulate(frame, outer) {
            return Fate::Dropped(reason);
        }
        match parse::ip(frame.bytes(), false) {
            Ok(packet) => self.leave(frame, &packet, hop, pieces, cx),
            Err(reason) => Fate::Dropped(reason),
        }
    }

    /// Server to client.
    fn reply<N: Net>(
        &mut self,
        frame: &mut Frame,
        job: &Job<'_>,
        reply: &Reply,
        ports: bool,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        // Not translated: the host forwards (or takes) its own copy, if it has one.
        if reply.source.is_none() && !self.hidden(job, cx) {
            return Fate::Left;
        }
        let dst = job.packet.dst;
        let hop = if job.to_host {
            None
        } else {
            let Some(hop) = cx.env.net.route(dst) else {
                self.icmp_error(ErrorKind::HostUnreachable, frame, job, cx);
                return Fate::Dropped(FrameDrop::NoRoute);
            };
            if job.packet.ttl <= 1 {
                self.icmp_error(ErrorKind::TtlExceeded, frame, job, cx);
                return Fate::Dropped(FrameDrop::TtlExceeded);
            }
            // The server has to be told in terms of the packet that it sent, so this comes before the translation.
            if (job.history.is_none() || job.packet.is_ipv6())
                && let Some(fate) = self.too_big(frame, job, hop.mtu as usize, cx)
            {
                return fate;
            }
            Some(hop)
        };
        if let Some(source) = reply.source
            && let Err(reason) = rewrite(frame, job, End::Source, source, ports)
        {
            return Fate::Dropped(reason);
        }
        let Some(hop) = hop else {
            // The client is the director itself.
            return self.give_back(frame, job, cx);
        };
        // What the host has made itself starts its way here.
        if !job.from_host {
            decrement_ttl(frame.bytes_mut());
        }
        let pieces = job.history.map_or(Pieces::Whole, Pieces::Along);
        self.leave(frame, &job.packet, &hop, pieces, cx)
    }

    /// Sends a finished packet by `hop`, cut as it has to be.
    #[inline]
    fn leave<N: Net>(
        &mut self,
        frame: &mut Frame,
        packet: &Packet,
        hop: &NextHop,
        pieces: Pieces<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let Some(info) = cx.env.net.port(hop.port) else {
            return Fate::Dropped(FrameDrop::NoPort);
        };
        let offload = &frame.offload;
        let finished = offload.segments.is_none() && offload.checksum.is_none();
        let whole = matches!(pieces, Pieces::Whole | Pieces::Relayed);
        if whole && frame.len() <= hop.mtu as usize && (info.offload || finished) {
            return self.emit(frame, hop, &info, cx);
        }
        self.leave_cut(frame, packet, hop, &info, pieces, cx)
    }

    /// As [`Self::leave`], for what does not leave as it is.
    fn leave_cut<N: Net>(
        &mut self,
        frame: &mut Frame,
        packet: &Packet,
        hop: &NextHop,
        info: &PortInfo,
        pieces: Pieces<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let mtu = hop.mtu as usize;
        let cut = match Cut::new(frame, packet) {
            Ok(cut) => cut,
            Err(reason) => return Fate::Dropped(reason),
        };
        if let Some(cut) = cut {
            let fits = cut.longest(frame.len()) <= mtu;
            if fits && info.offload {
                return self.emit(frame, hop, info, cx);
            }
            let mut segments = Vec::with_capacity(cut.count(frame.len()));
            cut.segments(
                frame,
                packet,
                || cx.out.spare(),
                |segment| segments.push(segment),
            );
            let mut fate = Fate::Dropped(FrameDrop::BadAggregate);
            for mut segment in segments {
                fate = if fits {
                    self.emit(&mut segment, hop, info, cx)
                } else {
                    self.fragments(&segment, mtu, None, false, hop, info, cx)
                };
                keep(&mut cx.out.pool, segment);
            }
            return fate;
        }
        if let Err(reason) = finish_checksum(frame) {
            return Fate::Dropped(reason);
        }
        frame.offload.segments = None;
        let fits = frame.len() <= mtu;
        if packet.is_ipv6() {
            return self.leave_cut6(frame, hop, info, pieces, cx);
        }
        let df = dont_fragment(frame);
        match pieces {
            Pieces::Around(..) if fits => self.emit(frame, hop, info, cx),
            Pieces::Around(history, added) => {
                let sizes = history.behind(0, added);
                self.fragments(frame, mtu, Some(&sizes), false, hop, info, cx)
            }
            Pieces::Whole | Pieces::Relayed if fits => self.emit(frame, hop, info, cx),
            Pieces::Whole if df => Fate::Dropped(FrameDrop::TooBig),
            Pieces::Whole | Pieces::Relayed => {
                self.fragments(frame, mtu, None, false, hop, info, cx)
            }
            Pieces::Even(longest) => {
                self.fragments(frame, mtu.min(longest), None, df, hop, info, cx)
            }
            Pieces::Along(history) => {
                let kept = history.sizes.iter().all(|size| size + packet.l4 <= mtu);
                let sizes = kept.then_some(history.sizes.as_slice());
                let limit = if kept { mtu } else { mtu.min(history.longest) };
                self.fragments(frame, limit, sizes, df, hop, info, cx)
            }
        }
    }

    /// As [`Self::leave_cut`], for IPv6 that is no aggregate (`ip6_fragment`).
    fn leave_cut6<N: Net>(
        &mut self,
        frame: &mut Frame,
        hop: &NextHop,
        info: &PortInfo,
        pieces: Pieces<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let mtu = hop.mtu as usize;
        let (headers, _) = ipv6::unfragmentable(frame.bytes());
        let whole = match pieces {
            Pieces::Along(history) => mtu.min(history.longest),
            _ => mtu,
        };
        if frame.len() <= whole {
            return self.emit(frame, hop, info, cx);
        }
        let sizes = match pieces {
            Pieces::Along(history) => history.behind(headers, 0),
            // The headers of the outer packet are all that there is in front.
            Pieces::Around(history, added) => history.behind(0, added),
            // Only its sender fragments it.
            Pieces::Whole => return Fate::Dropped(FrameDrop::TooBig),
            Pieces::Relayed | Pieces::Even(_) => Vec::new(),
        };
        let limit = match pieces {
            Pieces::Along(_) => whole.max(ipv6::MTU_MIN),
            _ => mtu,
        };
        self.fragments(frame, limit, Some(&sizes), false, hop, info, cx)
    }

    #[expect(clippy::too_many_arguments, reason = "an inner step")]
    fn fragments<N: Net>(
        &mut self,
        frame: &Frame,
        limit: usize,
        sizes: Option<&[usize]>,
        df: bool,
        hop: &NextHop,
        info: &PortInfo,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let mut pieces = Vec::new();
        let cut = if is_ipv6(frame.bytes()) {
            let id = self.idents.next_fragments();
            fragment::fragment6(
                frame,
                limit,
                sizes,
                id,
                || cx.out.spare(),
                |piece| pieces.push(piece),
            )
        } else {
            fragment::fragment(
                frame,
                limit,
                sizes,
                df,
                || cx.out.spare(),
                |piece| pieces.push(piece),
            )
        };
        if let Err(reason) = cut {
            return Fate::Dropped(reason);
        }
        let mut fate = Fate::Dropped(FrameDrop::MtuTooSmall);
        for mut piece in pieces {
            fate = self.emit(&mut piece, hop, info, cx);
            keep(&mut cx.out.pool, piece);
        }
        fate
    }

    /// Puts the link header on and queues the frame, or lets it wait for its neighbour.
    #[inline]
    fn emit<N: Net>(
        &mut self,
        frame: &mut Frame,
        hop: &NextHop,
        info: &PortInfo,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        if info.ethernet {
            let Some(mac) = cx.env.net.neighbour(hop.port, hop.addr) else {
                // A copy of its own size waits; the buffer of full size goes on receiving.
                if self.waiting.hold(hop.port, hop.addr, frame.clone(), cx.now) {
                    cx.out.requests.push(Request::Resolve(hop.port, hop.addr));
                }
                return Fate::Held;
            };
            if let Err(reason) = mac::ethernet(frame, mac, info.mac) {
                return Fate::Dropped(reason);
            }
        }
        self.counters.emitted += 1;
        cx.out.push(hop.port, frame);
        Fate::Sent
    }
}

fn dont_fragment(frame: &Frame) -> bool {
    be16(frame.bytes(), 6) & ipv4::DF != 0
}

/// Translates one end of a packet, or of an ICMP error and the packet inside it.
#[inline]
fn rewrite(
    frame: &mut Frame,
    job: &Job<'_>,
    end: End,
    to: SocketAddr,
    ports: bool,
) -> Result<(), FrameDrop> {
    if job.inner.is_some() {
        nat::translate_icmp(frame.bytes_mut(), job.packet.l4, end, to, ports)
    } else {
        nat::translate(frame, &job.packet, end, to)
    }
}
