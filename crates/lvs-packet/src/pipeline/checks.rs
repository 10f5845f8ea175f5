//! Checks that the host's network stack makes in addition to IPVS: IPv4 options, the MTU, and the
//! segment size of TCP.

use std::net::{IpAddr, Ipv4Addr};

use lvs_core::{Hook, Instant, Reply};

use super::datagram::Job;
use super::{Cx, Fate, Pipeline};
use crate::drop::FrameDrop;
use crate::frame::Frame;
use crate::net::{Net, NextHop};
use crate::rewrite::mss;
use crate::segment::Cut;
use crate::settings::ClampMss;
use crate::wire::icmp::ErrorKind;
use crate::wire::ip_options::{self, Refused};
use crate::wire::{ipv4, ipv6};

/// The length of the packet, or of its longest segment or fragment, if it is longer than `mtu` and
/// must not be fragmented. `None` if the packet can be sent.
fn longest(frame: &Frame, job: &Job<'_>, mtu: usize) -> Result<Option<usize>, FrameDrop> {
    let packet = &job.packet;
    // A reassembled IPv6 packet is sent in fragments that are not longer than those that arrived.
    let longest = match job.history {
        Some(history) if packet.is_ipv6() => history.longest,
        _ => packet.len,
    };
    // A relayed ICMP error is fragmented instead; a relayed ICMPv6 error is lost.
    if !packet.df || longest <= mtu || (job.inner.is_some() && !packet.is_ipv6()) {
        return Ok(None);
    }
    let longest = match Cut::new(frame, packet)? {
        Some(cut) => cut.longest(packet.len),
        None => longest,
    };
    Ok((longest > mtu).then_some(longest))
}

impl Pipeline {
    /// Sends an ICMP error about a packet that does not fit into `mtu` and must not be fragmented
    /// (`ensure_mtu_is_adequate`). Returns the fate of this packet; `None` if the packet can be
    /// sent. `way` is the server of the packet, and whether a tunnel leads to it; with `way`, the
    /// packet is recorded as too long for this server.
    pub(super) fn too_big<N: Net>(
        &mut self,
        frame: &Frame,
        job: &Job<'_>,
        mtu: usize,
        way: Option<(IpAddr, bool)>,
        cx: &mut Cx<'_, N>,
    ) -> Option<Fate> {
        let longest = match longest(frame, job, mtu) {
            Ok(Some(longest)) => longest,
            Ok(None) => return None,
            Err(reason) => return Some(Fate::Dropped(reason)),
        };
        if let Some((server, tunnel)) = way {
            self.common.oversize.note(server, tunnel, mtu, longest);
        }
        let reported = u16::try_from(mtu).unwrap_or(u16::MAX);
        self.icmp_error(ErrorKind::FragmentationNeeded(reported), frame, job, cx);
        Some(Fate::Dropped(FrameDrop::TooBig))
    }

    /// Whether a packet is not longer than `mtu`, or may be fragmented.
    pub(super) fn fits(frame: &Frame, job: &Job<'_>, mtu: usize) -> bool {
        matches!(longest(frame, job, mtu), Ok(None))
    }

    /// Checks the IPv4 options of a packet, unless the host has done so, and stores in `job` the
    /// options that the director must fill in. If the options are invalid or refused, returns the
    /// fate of the packet.
    pub(super) fn read_options<N: Net>(
        &mut self,
        frame: &Frame,
        job: &mut Job<'_>,
        cx: &mut Cx<'_, N>,
    ) -> Option<Fate> {
        // If the host routes the packets, it has already processed the options, and fills them in
        // for requests and replies.
        if job.from_host || cx.env.intercept.everything {
            return None;
        }
        let net = cx.env.net;
        let own = |addr: Ipv4Addr| net.is_local(addr.into()) || net.is_own_vip(addr.into());
        match ip_options::read(frame.bytes(), own) {
            Ok(wanted) => {
                job.options = wanted;
                None
            }
            Err(_) if !self.intercepted(job, cx) => Some(Fate::Left),
            Err(Refused::Malformed(at)) => {
                self.icmp_error(ErrorKind::ParameterProblem(at), frame, job, cx);
                Some(Fate::Dropped(FrameDrop::IpOptions))
            }
            Err(Refused::SourceRoute) => Some(Fate::Dropped(FrameDrop::SourceRoute)),
        }
    }

    /// Fills in the IP options of a request: a recorded route and a time stamp get the address of
    /// this host, which is the destination of the request unless the packet is in transit.
    pub(super) fn fill_options_of_request<N: Net>(
        &self,
        frame: &mut Frame,
        job: &Job<'_>,
        cx: &Cx<'_, N>,
    ) {
        if job.options.is_nothing() {
            return;
        }
        let addr = match job.hook {
            Hook::Local => Some(job.packet.dst),
            _ => near(job.packet.src, cx.env.net),
        };
        if let Some(IpAddr::V4(addr)) = addr {
            job.options
                .fill(frame.bytes_mut(), addr, addr, self.time_of_day(cx.now));
        }
    }

    /// Fills in the IP options of a reply: a recorded route gets the address that replaces the
    /// server's, or without translation that of the outgoing interface; a time stamp gets the
    /// address of the incoming interface.
    pub(super) fn fill_options_of_reply<N: Net>(
        &self,
        frame: &mut Frame,
        job: &Job<'_>,
        reply: &Reply,
        hop: &NextHop,
        cx: &Cx<'_, N>,
    ) {
        if job.options.is_nothing() {
            return;
        }
        let route = reply.source.map(|source| source.ip()).or(hop.source);
        let stamp = near(job.packet.src, cx.env.net);
        if let (Some(IpAddr::V4(route)), Some(IpAddr::V4(stamp))) = (route, stamp.or(route)) {
            job.options
                .fill(frame.bytes_mut(), route, stamp, self.time_of_day(cx.now));
        }
    }

    /// The time `now` in milliseconds since midnight (UTC).
    fn time_of_day(&self, now: Instant) -> u32 {
        const DAY_MS: u128 = 86_400_000;
        let since = self.common.midnight + now.saturating_since(Instant::ZERO);
        u32::try_from(since.as_millis() % DAY_MS).unwrap_or(0)
    }

    /// Lowers the maximum segment size in a SYN, if configured: to a fixed limit, or to a size that
    /// fits into `mtu` and into the route back to the sender, but not below [`ClampMss::LEAST`].
    #[inline]
    pub(super) fn clamp_mss<N: Net>(
        &self,
        frame: &mut Frame,
        job: &Job<'_>,
        mtu: usize,
        cx: &Cx<'_, N>,
    ) {
        let Some(clamp) = self.common.settings.clamp_mss else {
            return;
        };
        if !mss::opens(frame.bytes(), &job.packet) {
            return;
        }
        let limit = match clamp {
            ClampMss::To(size) => size,
            ClampMss::Auto => {
                const TCP_LEN: usize = 20;
                let headers = if job.packet.is_ipv6() {
                    ipv6::HEADER_LEN
                } else {
                    ipv4::HEADER_LEN
                };
                // The server's segments to the client must also fit into the route to the client.
                let back = cx.env.net.route(job.packet.src);
                let mtu = back.map_or(mtu, |hop| mtu.min(hop.mtu as usize));
                let size = mtu.saturating_sub(headers + TCP_LEN);
                u16::try_from(size).unwrap_or(u16::MAX).max(ClampMss::LEAST)
            }
        };
        mss::clamp(frame, &job.packet, limit);
    }
}

/// The address that this host would use as source for packets to `addr`.
fn near<N: Net>(addr: IpAddr, net: &N) -> Option<IpAddr> {
    net.route(addr)?.source
}
