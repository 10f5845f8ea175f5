//! Processing of a complete datagram: the director decides, and the pipeline executes the decision.

use std::net::SocketAddr;

use lvs_core::{Hook, PacketMeta, Protocol, ServerId, TcpFlags, Transport, Verdict};

use super::{Cx, Decide, Fate, Pipeline};
use crate::drop::FrameDrop;
use crate::fragment::History;
use crate::frame::Frame;
use crate::net::{Net, NextHop, PortId};
use crate::parse::{self, Icmp, Packet};
use crate::rewrite::tunnel;
use crate::syn_limiter::KNOWN_AFTER;
use crate::wire::icmp::ErrorKind;
use crate::wire::ip_options::WantedOptions;
use crate::wire::{Mac, decrement_ttl, ipv4, tcp};

/// The interface on which a frame arrived, and its sender.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    pub(super) port: PortId,
    pub(super) sender: Mac,
}

/// The packet that the pipeline is processing.
#[derive(Clone, Copy)]
pub(super) struct Job<'a> {
    pub(super) packet: Packet,
    pub(super) hook: Hook,
    pub(super) from_host: bool,
    /// Whether the datagram is addressed to the host.
    pub(super) to_host: bool,
    /// If the packet is an ICMP error that may belong to a connection: the destination of the
    /// packet that it quotes.
    pub(super) inner: Option<(Protocol, SocketAddr)>,
    /// The interface on which the datagram arrived, and the frame's sender; `None` if the host sent
    /// the datagram.
    pub(super) arrival: Option<Arrival>,
    /// The fragments in which the datagram arrived; `None` if it arrived whole.
    pub(super) history: Option<&'a History>,
    /// Fields of the datagram's IPv4 options that a router must fill in.
    pub(super) options: WantedOptions,
    /// The next hop for the packet if it is forwarded unchanged; `None` before the look-up.
    pub(super) hop: Option<NextHop>,
}

impl Job<'_> {
    /// A packet that did not arrive in fragments.
    pub(super) fn new(packet: Packet, hook: Hook, from_host: bool, to_host: bool) -> Self {
        Self {
            packet,
            hook,
            from_host,
            to_host,
            inner: None,
            arrival: None,
            history: None,
            options: WantedOptions::default(),
            hop: None,
        }
    }
}

/// The sequence number of a TCP segment that may open a connection, as in the kernel: with SYN and
/// without RST. `None` for other packets. A SYN+ACK of an existing connection answers a SYN, and
/// opens no connection.
fn number_of_syn(meta: &PacketMeta<'_>, decide: &impl Decide) -> Option<u32> {
    let Transport::Tcp(flags) = meta.transport else {
        return None;
    };
    let begins = flags.has(TcpFlags::SYN)
        && !flags.has(TcpFlags::RST)
        && !(flags.has(TcpFlags::ACK) && decide.knows(&meta.tuple));
    begins.then(|| {
        let number = meta.segment.bytes.get(tcp::field::SEQUENCE);
        number
            .and_then(|bytes| bytes.try_into().ok())
            .map_or(0, u32::from_be_bytes)
    })
}

impl Pipeline {
    /// Whether the packet was intercepted, so that the host has no copy of it.
    pub(super) fn intercepted<N: Net>(&self, job: &Job<'_>, cx: &Cx<'_, N>) -> bool {
        // The shield has decided on each fragment alone. A fragment does not show which packet an
        // ICMP error quotes.
        let (mut packet, mut inner) = (job.packet, job.inner);
        if let Some(history) = job.history {
            inner = None;
            packet.protocol = history.protocol;
            packet.fragment = Some(parse::Fragment {
                id: 0,
                offset: 0,
                more: true,
                named_at: 0,
            });
        }
        job.from_host || cx.env.intercept.covers(&packet, inner, job.to_host)
    }

    pub(super) fn datagram<N: Net, D: Decide>(
        &mut self,
        frame: &mut Frame,
        mut job: Job<'_>,
        decide: &mut D,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let packet = &job.packet;
        let icmp = packet
            .is_icmp()
            .then(|| packet.icmp(frame.bytes(), job.hook));
        if let Some(Icmp::Error(error)) = icmp {
            job.inner = Some((error.inner.protocol, error.inner.dst));
            if job.to_host && error.checksum_ok && tunnel::is_outer(error.inner.protocol) {
                // The host keeps its copy of the packet.
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
        // The kernel checks forwarding before netfilter's hook: IPVS never receives a packet that
        // cannot be forwarded (`ip_forward`).
        if job.hook == Hook::Transit
            && let Some(fate) = self.transit_checks(frame, &mut job, cx)
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
                if job.hook == Hook::Local
                    && let Some(number) = number_of_syn(&meta, decide)
                    && !self
                        .syn_limiter
                        .passes(meta.tuple.src, meta.tuple.dst, number, cx.now)
                {
                    // The host keeps a packet that was not intercepted.
                    return self.drop_or_leave(FrameDrop::SynFlood, &job, cx);
                }
                match &cx.ahead {
                    Some(ahead) => decide.packet_ahead(&meta, ahead, cx.now),
                    None => decide.packet(&meta, cx.now),
                }
            }
        };
        let ports = matches!(&icmp, Some(Icmp::Error(error)) if error.inner_ports);
        match verdict {
            Verdict::Forward(forward) => {
                if let Some(conn) = forward.conn
                    && job.packet.protocol == Protocol::TCP
                    && decide.packets_of(conn) == KNOWN_AFTER
                {
                    self.syn_limiter.meets(job.packet.src, cx.now);
                }
                self.send_of(forward.server, cx, |pipeline, cx| {
                    pipeline.forward(frame, &job, &forward, ports, cx)
                })
            }
            Verdict::Reply(reply) => self.send_of(reply.server, cx, |pipeline, cx| {
                pipeline.reply(frame, &job, &reply, ports, cx)
            }),
            Verdict::Accept(_) => self.accept(frame, &job, cx),
            Verdict::Unreachable(_) => {
                // In the kernel, the TTL of a packet in transit is already decremented at
                // netfilter's hook.
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

    /// Sends a packet of a connection to or from `server`. If it is dropped, counts the drop for
    /// this server.
    #[inline]
    pub(super) fn send_of<'a, N: Net>(
        &mut self,
        server: Option<ServerId>,
        cx: &mut Cx<'a, N>,
        send: impl FnOnce(&mut Self, &mut Cx<'a, N>) -> Fate,
    ) -> Fate {
        cx.server = server;
        let fate = send(self, cx);
        cx.server = None;
        if let Fate::Dropped(reason) = fate {
            self.drops.count(server, reason.name());
        }
        fate
    }

    /// Makes the checks that a router makes before netfilter's FORWARD hook, unless the host makes
    /// them. Returns the fate of a packet that fails a check.
    pub(super) fn transit_checks<N: Net>(
        &mut self,
        frame: &Frame,
        job: &mut Job<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Option<Fate> {
        if job.packet.ttl <= 1 {
            if !self.intercepted(job, cx) {
                return Some(Fate::Left);
            }
            self.icmp_error(ErrorKind::TtlExceeded, frame, job, cx);
            return Some(Fate::Dropped(FrameDrop::TtlExceeded));
        }
        // The length of IPv4 fragments was checked for each fragment before reassembly.
        if !job.packet.df || (job.history.is_some() && !job.packet.is_ipv6()) {
            return None;
        }
        let hop = cx.env.net.route(job.packet.dst)?;
        job.hop = Some(hop);
        // A router handles an ICMP error like any other packet.
        let plain = Job {
            inner: None,
            ..*job
        };
        if job.packet.len <= hop.mtu as usize || Self::fits(frame, &plain, hop.mtu as usize) {
            return None;
        }
        if !self.intercepted(job, cx) {
            return Some(Fate::Left);
        }
        self.too_big(frame, &plain, hop.mtu as usize, None, cx)
    }
}
