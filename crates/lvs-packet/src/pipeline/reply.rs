//! Sends packets of servers to clients: translated back, or unchanged.

use std::net::SocketAddr;

use lvs_core::Reply;
use lvs_core::edit::Edit;

use super::datagram::Job;
use super::leave::Pieces;
use super::{Cx, Fate, Pipeline, host};
use crate::drop::FrameDrop;
use crate::frame::Frame;
use crate::net::Net;
use crate::rewrite::nat::{self, End};
use crate::rewrite::payload;
use crate::segment::finish_checksum;
use crate::wire::icmp::ErrorKind;
use crate::wire::{ETHERNET_LEN, decrement_ttl, ipv4, ipv6, is_ipv6};

impl Pipeline {
    pub(super) fn reply<N: Net>(
        &mut self,
        frame: &mut Frame,
        job: &Job<'_>,
        reply: &Reply,
        ports: bool,
        cx: &mut Cx<'_, N>,
    ) -> Fate {
        // The reply needs no translation: the host forwards (or receives) its own copy, unless the
        // packet was intercepted.
        if reply.source.is_none() && !self.intercepted(job, cx) {
            return Fate::Left;
        }
        if reply.probe && self.is_forwarded_by_another(job, reply, cx) {
            return Fate::Dropped(FrameDrop::CheckPath);
        }
        // Replies with full NAT are addressed to the director, whichever client receives them.
        let (dst, to_host) = match reply.destination {
            Some(client) => (client.ip(), cx.env.net.is_local(client.ip())),
            None => (job.packet.dst, job.to_host),
        };
        let hop = if to_host {
            None
        } else {
            let known = job.hop.filter(|_| reply.destination.is_none());
            let Some(hop) = known.or_else(|| cx.env.net.route(dst)) else {
                self.icmp_error(ErrorKind::NetUnreachable, frame, job, cx);
                return Fate::Dropped(cx.env.net.why_no_route(dst));
            };
            if job.packet.ttl <= 1 {
                self.icmp_error(ErrorKind::TtlExceeded, frame, job, cx);
                return Fate::Dropped(FrameDrop::TtlExceeded);
            }
            // The error must quote the packet as the server sent it, so this check precedes the
            // translation.
            if (job.history.is_none() || job.packet.is_ipv6())
                && let Some(fate) = self.too_big(frame, job, hop.mtu as usize, None, cx)
            {
                return fate;
            }
            Some(hop)
        };
        if let Err(reason) = rewrite_reply(frame, job, reply, ports) {
            return Fate::Dropped(reason);
        }
        let edited;
        let job = match &reply.edit {
            None => job,
            Some(edit) => {
                let text = edit.replacement.as_ref().map_or(0, |new| new.text().len());
                self.make_room(frame, text + ETHERNET_LEN, cx.out);
                if let Err(reason) = payload::edit(frame, &job.packet, edit) {
                    return Fate::Dropped(reason);
                }
                edited = job.edited(frame, edit);
                &edited
            }
        };
        let Some(hop) = hop else {
            let is_own = job.from_host || reply.source.is_some();
            let device = host::device_to_host(frame, is_own, cx.env.net);
            return self.give_back_through(device, frame, job, cx);
        };
        // The TTL of a packet that the host itself sends is not decremented.
        if !job.from_host {
            decrement_ttl(frame.bytes_mut());
        }
        self.fill_options_of_reply(frame, job, reply, &hop, cx);
        self.clamp_mss(frame, job, hop.mtu as usize, cx);
        let written = job
            .history
            .filter(|_| reply.source.is_some())
            .map(|history| history.with_first(written_by_nat(frame.bytes(), job, ports)));
        let pieces = written
            .as_ref()
            .or(job.history)
            .map_or(Pieces::Whole, Pieces::Along);
        self.leave(frame, &job.packet, &hop, pieces, cx)
    }

    /// Whether the server sent this reply, with NAT, to another router, which forwarded it to this
    /// host. This is so if the server is in a network of this host, another host sent the frame,
    /// and the TTL is not one with which hosts send. The sender's MAC address alone proves nothing,
    /// because a bond uses several. If another router forwarded the reply, stores this router.
    fn is_forwarded_by_another<N: Net>(
        &self,
        job: &Job<'_>,
        reply: &Reply,
        cx: &Cx<'_, N>,
    ) -> bool {
        let server = job.packet.src;
        let Some(arrival) = job.arrival else {
            return false;
        };
        if reply.source.is_none()
            || reply.destination.is_some()
            || job.inner.is_some()
            || FIRST_TTLS.contains(&job.packet.ttl)
        {
            return false;
        }
        let net = cx.env.net;
        let direct = net.route(server).filter(|hop| hop.addr == server);
        let mac = direct.and_then(|hop| net.neighbour(hop.port, server));
        let forwarded = mac.is_some_and(|mac| mac != arrival.sender);
        if forwarded {
            let paths = &self.common.return_paths;
            paths.learn(server, arrival.port, arrival.sender, cx.now);
        }
        forwarded
    }
}

/// TTLs and hop limits with which operating systems send.
const FIRST_TTLS: [u8; 4] = [32, 64, 128, 255];

/// Number of bytes, from the start of the packet, that must be in the first fragment for
/// translation: up to the end of the transport header or, in an ICMP error, up to the end of
/// the quoted packet's IP header, or of its ports (`ports`).
pub(super) fn written_by_nat(ip: &[u8], job: &Job<'_>, ports: bool) -> usize {
    const PORTS: usize = 4;
    let l4 = job.packet.l4;
    if job.inner.is_none() {
        return l4 + nat::header(job.packet.protocol).map_or(0, |(len, _)| len);
    }
    let inner = ip.get(l4 + 8..).unwrap_or_default();
    let header = if is_ipv6(inner) {
        ipv6::walk(inner).map_or(ipv6::HEADER_LEN, |chain| chain.l4)
    } else {
        ipv4::header_len(inner)
    };
    l4 + 8 + header + if ports { PORTS } else { 0 }
}

#[inline]
fn rewrite_reply(
    frame: &mut Frame,
    job: &Job<'_>,
    reply: &Reply,
    ports: bool,
) -> Result<(), FrameDrop> {
    if let Some(source) = reply.source {
        rewrite(frame, job, End::Source, source, ports)?;
    }
    if let Some(client) = reply.destination {
        rewrite(frame, job, End::Destination, client, ports)?;
    }
    Ok(())
}

impl Job<'_> {
    /// The description of the packet after `edit` has changed its length.
    fn edited(&self, frame: &Frame, edit: &Edit) -> Self {
        let mut job = *self;
        if edit.replacement.is_some() {
            job.packet.len = frame.len();
            // The sizes of the arrived fragments do not apply to the changed packet.
            job.history = None;
        }
        job
    }
}

/// Translates the source or the destination of a packet. For an ICMP error, also translates the
/// opposite side of the packet that the error quotes.
#[inline]
pub(super) fn rewrite(
    frame: &mut Frame,
    job: &Job<'_>,
    end: End,
    to: SocketAddr,
    ports: bool,
) -> Result<(), FrameDrop> {
    if job.inner.is_some() {
        // The checksum of the ICMP message must cover the final inner checksum.
        finish_checksum(frame)?;
        nat::translate_icmp(frame.bytes_mut(), job.packet.l4, end, to, ports)
    } else {
        nat::translate(frame, &job.packet, end, to)
    }
}
