//! Packets for the host: left to it, reinjected, or answered in its place.

use lvs_core::{Protocol, TcpFlags};

use super::datagram::{Arrival, Job};
use super::leave::{Pieces, dont_fragment};
use super::{Cx, Fate, Output, Pipeline};
use crate::drop::FrameDrop;
use crate::fragment::{Cutter, History};
use crate::frame::Frame;
use crate::net::{Net, PortId};
use crate::parse::Packet;
use crate::rewrite::mac;
use crate::segment::{Cut, finish_checksum};
use crate::settings::Echo;
use crate::wire::icmp::{self as wire_icmp, ErrorKind};
use crate::wire::{Mac, ip_src, ipv6, tcp, udp};

/// The way by which a packet is reinjected into the host.
#[derive(Clone, Copy)]
enum Back {
    /// Through this TUN device.
    Device(PortId),
    /// On the interface on which it arrived, whose link-layer address is the second value.
    Interface(Arrival, Mac),
}

impl Back {
    fn push(self, mut frame: Frame, out: &mut Output) -> Result<(), FrameDrop> {
        match self {
            Self::Device(port) => out.push(port, frame),
            Self::Interface(Arrival { port, sender }, receiver) => {
                mac::ethernet(&mut frame, receiver, sender)?;
                out.push_back(port, frame);
            }
        }
        Ok(())
    }
}

/// The device through which a packet is reinjected into the host. `is_own` means that this host has
/// sent the packet, or that the dataplane has written its source address. Only such a packet may
/// have an address of this host as its source.
pub(super) fn device_to_host<N: Net>(frame: &Frame, is_own: bool, net: &N) -> Option<PortId> {
    let local = net.local_port().filter(|_| is_own);
    local
        .filter(|_| net.is_local(ip_src(frame.bytes())))
        .or_else(|| net.host_port())
}

impl Pipeline {
    /// Handles a packet that belongs to no connection: it is left to the host, reinjected, sent for
    /// a real server on the host, answered, or dropped.
    pub(super) fn accept<N: Net>(
        &mut self,
        frame: &mut Frame,
        job: &Job<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        if cx.env.net.is_own_vip(job.packet.dst) && !job.to_host {
            return self.own_host(frame, job, cx);
        }
        if job.from_host && job.to_host {
            return self.give_back(frame, job, cx);
        }
        if job.from_host {
            return self.host_sends(frame, job, cx);
        }
        if !self.intercepted(job, cx) {
            return Fate::Left;
        }
        self.give_back_as_it_came(frame, job, cx)
    }

    /// Sends a packet that the host routed into the dataplane and that belongs to no connection.
    /// Only packets of real servers on this host are permitted.
    fn host_sends<N: Net>(&mut self, frame: &mut Frame, job: &Job<'_>, cx: &mut Cx<'_, N>) -> Fate {
        if !cx.env.intercept.is_of_local_node(&job.packet) {
            return Fate::Dropped(FrameDrop::HostStray);
        }
        let Some(hop) = cx.env.net.route(job.packet.dst) else {
            self.icmp_error(ErrorKind::HostUnreachable, frame, job, cx);
            return Fate::Dropped(cx.env.net.why_no_route(job.packet.dst));
        };
        if let Some(fate) = self.too_big(frame, job, hop.mtu as usize, None, cx) {
            return fate;
        }
        let pieces = job.history.map_or(Pieces::Whole, Pieces::Along);
        self.leave(frame, &job.packet, &hop, pieces, cx)
    }

    /// Reinjects an intercepted packet into the host. If possible, it is reinjected on the
    /// interface on which it arrived, so that it passes the host's filters; otherwise through the
    /// TUN device.
    pub(super) fn give_back_as_it_came<N: Net>(
        &mut self,
        frame: &mut Frame,
        job: &Job<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        // On the way back, the original sender becomes the receiver, which must not be a multicast
        // address.
        let arrival = job.arrival.filter(|arrival| !arrival.sender.is_multicast());
        let back = arrival.and_then(|arrival| {
            let info = cx.env.net.port(arrival.port)?;
            info.gives_back
                .then_some(Back::Interface(arrival, info.mac))
        });
        let Some(back) = back else {
            return self.give_back(frame, job, cx);
        };
        if let Some(history) = job.history {
            return self.give_back_fragments(back, frame, history, job.packet.is_ipv6(), cx);
        }
        match back.push(frame.take(), cx.out) {
            Ok(()) => {
                self.counters.emitted += 1;
                Fate::GivenBack
            }
            Err(reason) => Fate::Dropped(reason),
        }
    }

    /// Reinjects a packet into the host through a TUN device.
    pub(super) fn give_back<N: Net>(
        &mut self,
        frame: &mut Frame,
        job: &Job<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let device = device_to_host(frame, job.from_host, cx.env.net);
        self.give_back_through(device, frame, job, cx)
    }

    /// As [`give_back`](Self::give_back), through this device.
    pub(super) fn give_back_through<N: Net>(
        &mut self,
        device: Option<PortId>,
        frame: &mut Frame,
        job: &Job<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let Some((port, info)) = device.and_then(|port| Some((port, cx.env.net.port(port)?)))
        else {
            return Fate::Dropped(FrameDrop::NoHostPort);
        };
        if let Some(history) = job.history {
            let back = Back::Device(port);
            return self.give_back_fragments(back, frame, history, job.packet.is_ipv6(), cx);
        }
        if Cut::is_for_software(frame, &job.packet) {
            return self.give_back_segments(port, frame, &job.packet, cx);
        }
        if !info.offload
            && let Err(reason) = finish_checksum(frame)
        {
            return Fate::Dropped(reason);
        }
        self.counters.emitted += 1;
        cx.out.push(port, frame.take());
        Fate::GivenBack
    }

    /// As [`give_back`](Self::give_back), for a super-packet inside a tunnel: it is cut into
    /// segments first.
    fn give_back_segments<N: Net>(
        &mut self,
        port: PortId,
        frame: &Frame,
        packet: &Packet,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let segments = match Cut::new(frame, packet) {
            Ok(Some(cut)) => cut.segments(frame, packet),
            Ok(None) => Err(FrameDrop::BadAggregate),
            Err(reason) => Err(reason),
        };
        let segments = match segments {
            Ok(segments) => segments,
            Err(reason) => return Fate::Dropped(reason),
        };
        for segment in segments {
            let mut out = cx.out.spare(segment.len());
            if segment.write(&mut out) {
                self.counters.emitted += 1;
                cx.out.push(port, out);
            }
        }
        Fate::GivenBack
    }

    /// Reinjects a datagram in the fragments in which it arrived, so that the host can reassemble
    /// or forward them.
    fn give_back_fragments<N: Net>(
        &mut self,
        back: Back,
        frame: &Frame,
        history: &History,
        six: bool,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        let ip = frame.bytes();
        let behind;
        let cutter = if six {
            let (headers, _) = ipv6::unfragmentable(ip);
            behind = history.behind(headers, 0);
            let limit = history.longest.max(ipv6::MTU_MIN);
            Cutter::v6(
                ip,
                limit,
                Some(&behind),
                self.common.ip_ids.next_fragments(),
            )
        } else {
            Cutter::v4(
                ip,
                history.longest,
                Some(&history.sizes),
                dont_fragment(frame),
            )
        };
        let cutter = match cutter {
            Ok(cutter) => cutter,
            Err(reason) => return Fate::Dropped(reason),
        };
        for piece in cutter {
            let mut out = cx.out.spare(piece.len());
            if piece.write(&mut out) && back.push(out, cx.out).is_ok() {
                self.counters.emitted += 1;
            }
        }
        Fate::GivenBack
    }

    /// Handles a packet to an address that the dataplane owns, as the host's network stack would.
    fn own_host<N: Net>(&mut self, frame: &mut Frame, job: &Job<'_>, cx: &mut Cx<'_, N>) -> Fate {
        let packet = &job.packet;
        match packet.protocol {
            _ if packet.is_icmp() => self.echo(frame, job, cx),
            Protocol::TCP => {
                let flags = frame.bytes().get(packet.l4 + tcp::field::FLAGS);
                let long = frame.len() >= packet.l4 + tcp::HEADER_LEN;
                if !long || flags.is_none_or(|&flags| TcpFlags(flags).has(TcpFlags::RST)) {
                    return Fate::Dropped(FrameDrop::OwnAddress);
                }
                self.answer_with_reset(frame, packet, cx)
                    .unwrap_or(Fate::Dropped(FrameDrop::OwnAddress))
            }
            Protocol::UDP => {
                if let Some(end) = udp::end(frame.bytes(), packet.l4) {
                    frame.truncate(end);
                    if !frame.offload.is_checked() && !udp::is_intact(frame.bytes(), packet.l4) {
                        return Fate::Dropped(FrameDrop::OwnAddress);
                    }
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

    /// Answers an echo request to an address that the dataplane owns, within the limit of answers.
    /// Drops other ICMP messages.
    fn echo<N: Net>(&mut self, frame: &mut Frame, job: &Job<'_>, cx: &mut Cx<'_, N>) -> Fate {
        let packet = &job.packet;
        if !wire_icmp::is_echo_request(frame.bytes(), packet.l4) {
            return Fate::Dropped(FrameDrop::OwnAddress);
        }
        if self.common.settings.echo == Echo::Drop {
            return Fate::Dropped(FrameDrop::EchoOff);
        }
        if !self.common.echo.take(cx.now) {
            return Fate::Dropped(FrameDrop::EchoLimit);
        }
        let ids = &self.common.ip_ids;
        let id = ids.next(packet.dst, packet.src, Protocol::ICMP.0, 1);
        wire_icmp::echo_reply(frame, packet.l4, id);
        self.send_own(frame, cx)
    }
}
