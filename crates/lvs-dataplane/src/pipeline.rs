//! The packet path: frames in, frames out. No I/O, no clock; tests, fuzzing and benches call what the engine calls.
//!
//! ```text
//!  frame ── link intake ── IPv4 header ── (fragments) ── decide ─┬─ Forward ── rewrite ── route ── neighbour ── out
//!              │                                                 ├─ Reply ──── rewrite ── route ── neighbour ── out
//!              └─ ARP, not for us                                └─ Accept ─── host has it │ give it back │ answer
//! ```
//!
//! Each frame has exactly one [`Fate`], and [`Counters`] account for all of them.

use std::mem;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};

use lvs_core::{
    Forward, Forwarding, Hook, IcmpError, Instant, PacketMeta, Protocol, Reply, TcpFlags, Verdict,
};

use crate::arp;
use crate::drop::FrameDrop;
use crate::fragment::{self, History, Reassembler};
use crate::frame::{Frame, MAX_FRAME, Offload};
use crate::icmp::{Limits, RateLimit, may_be_answered};
use crate::neighbour::Waiting;
use crate::net::{Net, NextHop, PortId, PortInfo};
use crate::parse::{self, Icmp, Packet};
use crate::rewrite::mac;
use crate::rewrite::nat::{self, End};
use crate::rewrite::tunnel::{self, GRE, IPIP, Outer};
use crate::segment::{Cut, finish_checksum};
use crate::shield_spec::{LocalClient, ShieldSpec};
use crate::tunnel_path::TunnelPaths;
use crate::wire::icmp::{self as wire_icmp, ErrorKind};
use crate::wire::{ETHERNET_LEN, ETHERTYPE_ARP, ETHERTYPE_IPV4, Mac, be16, ipv4, tcp};

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
    /// Answered here: ARP, echo and resets for addresses that the engine owns.
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
        addr: Ipv4Addr,
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
struct Idents([u16; 256]);

impl Idents {
    fn next(&mut self, src: Ipv4Addr, dst: Ipv4Addr, protocol: u8, count: usize) -> u16 {
        let mixed = (src.to_bits() ^ dst.to_bits().rotate_left(7) ^ u32::from(protocol))
            .wrapping_mul(0x9e37_79b9);
        let counter = &mut self.0[(mixed >> 24) as usize];
        let id = counter.wrapping_add(1);
        *counter = counter.wrapping_add(u16::try_from(count).unwrap_or(1));
        id
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
    /// It came in fragments and passes through: cut where it had been, if that fits.
    Along(&'a History),
}

impl Job<'_> {
    /// How the packet leaves on its way to a server.
    fn pieces(&self) -> Pieces<'_> {
        match self.history {
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
            idents: Idents([0; 256]),
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
    pub fn announce<N: Net>(&mut self, port: PortId, addr: Ipv4Addr, net: &N, out: &mut Output) {
        self.broadcast(port, net, out, |mac| arp::gratuitous(mac, addr));
    }

    /// Asks on a port who has an address. Answers come as [`Request::AddressConflict`].
    pub fn probe<N: Net>(&mut self, port: PortId, addr: Ipv4Addr, net: &N, out: &mut Output) {
        self.broadcast(port, net, out, |mac| arp::probe(mac, addr));
    }

    fn broadcast<N: Net>(
        &mut self,
        port: PortId,
        net: &N,
        out: &mut Output,
        message: impl FnOnce(Mac) -> [u8; arp::FRAME_LEN],
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
            // The host talks IPv6 (router solicitations, say) to every device.
            if frame.bytes().first().is_none_or(|b| b >> 4 != 4) {
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
            ETHERTYPE_IPV4 if for_us => {
                if !frame.pull_front(ETHERNET_LEN) {
                    return Fate::Dropped(FrameDrop::Truncated);
                }
                self.ip(false, frame, decide, cx)
            }
            ETHERTYPE_ARP if for_us || Mac(dst).is_multicast() => self.arp(port, info, frame, cx),
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
                addr: message.sender,
                mac: message.sender_mac,
            });
        }
        if !message.request
            || message.sender == message.target
            || !net.answers_arp(port, IpAddr::V4(message.target))
        {
            return Fate::Left;
        }
        frame.clear();
        if !frame.extend(&arp::reply(&message, info.mac)) {
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
        let packet = match parse::ipv4(frame.bytes(), aggregate) {
            Ok(packet) => packet,
            Err(reason) => {
                // The host drops its own copy, unless the shield has hidden it: count it where it concerns the director.
                let dst = frame
                    .bytes()
                    .get(16..20)
                    .map(|_| IpAddr::V4(ipv4::dst(frame.bytes())));
                let ours =
                    from_host || dst.is_some_and(|dst| net.is_vip(dst) || net.is_own_vip(dst));
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
        if aggregate && be16(frame.bytes(), 2) == 0 {
            ipv4::set_total_len(frame.bytes_mut(), u16::try_from(packet.len).unwrap_or(0));
        }
        let dst = IpAddr::V4(packet.dst);
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
                let fate = match parse::ipv4(whole.frame.bytes(), false) {
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
        let icmp =
            (packet.protocol == Protocol::ICMP).then(|| packet.icmp(frame.bytes(), job.hook, 0));
        if let Some(Icmp::Error(error)) = icmp {
            job.inner = Some((error.inner.protocol, error.inner.dst));
            let tunnelled = matches!(error.inner.protocol, IPIP | GRE | Protocol::UDP);
            if tunnelled && job.to_host && error.checksum_ok {
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
        let route = |server| net.route(IpAddr::V4(server)).map(|hop| hop.mtu as usize);
        let Some(complaint) = self.tunnels.complaint(message, route, cx.now) else {
            return;
        };
        let (client, virt) = (ipv4::src(complaint.original), ipv4::dst(complaint.original));
        if !net.is_vip(IpAddr::V4(virt)) || !self.rate_limit.allow(complaint.kind, client, cx.now) {
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
        if cx.env.net.is_own_vip(IpAddr::V4(job.packet.dst)) && !job.to_host {
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
            let df = dont_fragment(frame);
            let Cx { out, .. } = cx;
            let mut pieces = Vec::new();
            let cut = fragment::fragment(
                frame,
                history.longest,
                Some(&history.sizes),
                df,
                Frame::new,
                |piece| pieces.push(piece),
            );
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
        const ECHO_REQUEST: u8 = 8;
        let packet = job.packet;
        let ip = frame.bytes();
        let l4 = &ip[packet.l4.min(ip.len())..];
        let trusted = frame.offload.checksum.is_some() || frame.offload.verified;
        match packet.protocol {
            Protocol::ICMP => {
                let request = l4.len() >= 8 && l4[0] == ECHO_REQUEST && l4[1] == 0;
                let right = crate::wire::checksum::Sum::ZERO.bytes(l4).finish() == 0;
                if !request || !right {
                    return Fate::Dropped(FrameDrop::OwnAddress);
                }
                let id = self
                    .idents
                    .next(packet.dst, packet.src, Protocol::ICMP.0, 1);
                wire_icmp::echo_reply(frame, id);
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
                        || be16(l4, 6) == 0
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
        let packet = match parse::ipv4(frame.bytes(), false) {
            Ok(packet) => packet,
            Err(reason) => return Fate::Dropped(reason),
        };
        let net = cx.env.net;
        let dst = IpAddr::V4(packet.dst);
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
        let dst = IpAddr::V4(packet.dst);
        let src = if job.to_host || net.is_own_vip(dst) {
            packet.dst
        } else {
            // A router's error comes from its address on the link towards the receiver.
            match net.route(IpAddr::V4(packet.src)).and_then(|hop| hop.source) {
                Some(IpAddr::V4(addr)) => addr,
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
            IpAddr::V4(job.packet.dst)
        } else {
            forward.target.ip()
        };
        let IpAddr::V4(target4) = target else {
            return Fate::Dropped(FrameDrop::Unsupported);
        };
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
        ipv4::decrement_ttl(frame.bytes_mut());
        match forward.method {
            Forwarding::Nat => {
                if let Some(fate) = self.too_big(frame, job, hop.mtu as usize, cx) {
                    return fate;
                }
                let to = SocketAddrV4::new(target4, forward.target.port());
                if let Err(reason) = rewrite(frame, job, End::Destination, to, ports) {
                    return Fate::Dropped(reason);
                }
                if job.from_host && job.inner.is_none() {
                    let client = LocalClient {
                        protocol: job.packet.protocol,
                        server: forward.target,
                        local: SocketAddr::new(
                            IpAddr::V4(job.packet.src),
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
            Forwarding::Tunnel => self.tunnel(frame, job, forward, &hop, target4, cx),
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
            let SocketAddr::V4(to) = forward.target else {
                return Fate::Dropped(FrameDrop::Unsupported);
            };
            if to.ip().is_loopback() && !job.from_host {
                return Fate::Dropped(FrameDrop::Martian);
            }
            if let Err(reason) = rewrite(frame, job, End::Destination, to, ports) {
                return Fate::Dropped(reason);
            }
            return self.give_back(frame, job, cx);
        }
        if cx.env.net.is_own_vip(IpAddr::V4(job.packet.dst)) && !job.to_host {
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
        // An ICMP error that is being relayed is rather fragmented.
        if !packet.df || packet.len <= mtu || job.inner.is_some() {
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
        target: Ipv4Addr,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        const MTU_MIN: usize = 68;
        let Some(IpAddr::V4(src)) = hop.source else {
            return Fate::Dropped(FrameDrop::NoSource);
        };
        let kind = forward.tunnel;
        let path = self.tunnels.mtu(target, kind, hop.mtu as usize, cx.now);
        // The outer packet, too, is cut for what is known of the way.
        let hop = &NextHop {
            mtu: u32::try_from(path).unwrap_or(hop.mtu),
            ..*hop
        };
        let mtu = path.saturating_sub(tunnel::overhead(kind));
        if mtu < MTU_MIN {
            return Fate::Dropped(FrameDrop::MtuTooSmall);
        }
        if cx.env.pmtu_disc
            && let Some(fate) = self.too_big(frame, job, mtu, cx)
        {
            return fate;
        }
        let df = cx.env.pmtu_disc && job.packet.df;
        let cut = match Cut::new(frame, &job.packet) {
            Ok(cut) => cut,
            Err(reason) => return Fate::Dropped(reason),
        };
        // The virtio header cannot express an aggregate inside a tunnel: each segment gets its own outer header.
        let count = cut.map_or(1, |cut| cut.count(job.packet.len));
        let id = if df {
            0
        } else {
            let protocol = tunnel::protocol(kind).0;
            self.idents.next(src, target, protocol, count)
        };
        let mut outer = Outer {
            tunnel: kind,
            src,
            dst: target,
            id,
            df,
        };
        let Some(cut) = cut else {
            if let Err(reason) = finish_checksum(frame) {
                return Fate::Dropped(reason);
            }
            frame.offload.segments = None;
            return self.tunnelled(
                frame,
                &job.packet,
                &outer,
                hop,
                job.history
                    .map_or(Pieces::Relayed, |history| Pieces::Even(history.longest)),
                cx,
            );
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
            fate = self.tunnelled(&mut segment, &job.packet, &outer, hop, Pieces::Relayed, cx);
            outer.id = outer.id.wrapping_add(1);
            keep(&mut cx.out.pool, segment);
        }
        fate
    }

    /// Encapsulates a packet and sends it. Whether it may be fragmented has been decided by the inner packet.
    fn tunnelled<N: Net>(
        &mut self,
        frame: &mut Frame,
        inner: &Packet,
        outer: &Outer,
        hop: &NextHop,
        pieces: Pieces<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        if let Err(reason) = tunnel::encapsulate(frame, inner, outer) {
            return Fate::Dropped(reason);
        }
        match parse::ipv4(frame.bytes(), false) {
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
        let dst = IpAddr::V4(job.packet.dst);
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
            if job.history.is_none()
                && let Some(fate) = self.too_big(frame, job, hop.mtu as usize, cx)
            {
                return fate;
            }
            Some(hop)
        };
        match reply.source {
            Some(SocketAddr::V4(source)) => {
                if let Err(reason) = rewrite(frame, job, End::Source, source, ports) {
                    return Fate::Dropped(reason);
                }
            }
            Some(SocketAddr::V6(_)) => return Fate::Dropped(FrameDrop::Unsupported),
            None => {}
        }
        let Some(hop) = hop else {
            // The client is the director itself.
            return self.give_back(frame, job, cx);
        };
        // What the host has made itself starts its way here.
        if !job.from_host {
            ipv4::decrement_ttl(frame.bytes_mut());
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
        let df = dont_fragment(frame);
        let fits = frame.len() <= mtu;
        match pieces {
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
        let cut = fragment::fragment(
            frame,
            limit,
            sizes,
            df,
            || cx.out.spare(),
            |piece| pieces.push(piece),
        );
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
    to: SocketAddrV4,
    ports: bool,
) -> Result<(), FrameDrop> {
    if job.inner.is_some() {
        nat::translate_icmp(frame.bytes_mut(), job.packet.l4, end, to, ports)
    } else {
        nat::translate(frame, &job.packet, end, to)
    }
}
