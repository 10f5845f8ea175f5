//! The decision about packets of no known connection: which service, which real server, which
//! template.

mod outbound;
mod persistent;

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

pub(super) use self::persistent::template_key;
use crate::conn::{Ahead, Draft, Key, Template, flag};
use crate::control::regular::is_found_again;
use crate::control::{Control, FTP, FTP_DATA, Service};
use crate::packet::{SCTP_ABORT, SCTP_INIT};
use crate::sched::Request;
use crate::shard::{NeedsControl, Shard};
use crate::stats::Counters;
use crate::{
    AcceptReason, DropReason, Forwarding, Hook, IcmpError, Instant, PacketMeta, Protocol, Server,
    ServiceFlags, ServiceKey, TcpFlags, Transport, Tuple, Verdict,
};

/// A packet that may open a connection, seen from the client's side even if it is embedded in an
/// ICMP error.
struct Ask<'a> {
    protocol: Protocol,
    client: SocketAddr,
    virt: SocketAddr,
    /// The destination in the packet's header: what schedulers by destination go by.
    destination: SocketAddr,
    mark: u32,
    hook: Hook,
    /// What follows the UDP header.
    payload: Option<&'a [u8]>,
    embedded: bool,
    /// It opens nothing: another director may have had its connection.
    elsewhere: bool,
}

/// Servers that are tried for a connection where full NAT has no local port left towards the one
/// that was chosen.
const OTHERS: usize = 8;

/// What came of it.
enum Opened {
    /// A connection in the shard's table.
    Entry(u32),
    /// A connection of one packet, with the template that it was made from.
    Once(Draft, Option<(u32, Arc<Template>)>),
    /// None.
    Refused(Verdict),
}

impl Control {
    /// Decides on a packet that `shard` could not decide on alone. A shard of another director
    /// stays as it is: [`DropReason::ForeignShard`].
    pub fn admit(
        &mut self,
        shard: &mut Shard,
        meta: &PacketMeta<'_>,
        pending: NeedsControl,
        now: Instant,
    ) -> Verdict {
        if !self.owns(shard) {
            return Verdict::Drop(DropReason::ForeignShard);
        }
        let mut pending = pending;
        if pending.stale {
            self.sweep(shard);
            match shard.decide(meta, &Ahead::NONE, now) {
                Ok(verdict) => return verdict,
                Err(again) => pending = again,
            }
        }
        if pending.outbound {
            if let Some(verdict) = self.open_outbound(shard, meta, now) {
                return verdict;
            }
            match shard.decide_in(meta, &Ahead::NONE, now) {
                Ok(verdict) => return verdict,
                Err(again) => pending = again,
            }
        }
        self.note_occupancy(shard);
        shard.forget_room();
        let verdict = self.schedule(shard, meta, now);
        // The table may have changed since, if the caller has taken its time; or the connection has
        // given way already, and what is in its slot is the new one.
        let made_room = shard.made_room();
        let replaced = pending.replaced.filter(|&index| made_room != Some(index));
        if let Some(replaced) = replaced.filter(|&index| shard.has(index)) {
            shard.end(replaced);
            // Only what is left to the host is answered by it.
            if !matches!(verdict, Verdict::Accept(_)) {
                shard.reap();
            }
        }
        verdict
    }

    /// Decides on an ICMP error that `shard` could not decide on alone. A shard of another director
    /// as in [`admit`](Self::admit).
    pub fn admit_icmp_error(
        &mut self,
        shard: &mut Shard,
        error: &IcmpError,
        pending: NeedsControl,
        now: Instant,
    ) -> Verdict {
        if !self.owns(shard) {
            return Verdict::Drop(DropReason::ForeignShard);
        }
        if pending.stale {
            self.sweep(shard);
            if let Ok(verdict) = shard.decide_icmp_error(error, now) {
                return verdict;
            }
        }
        self.schedule_icmp_error(shard, error, now)
    }

    /// Opens a connection, if the packet may and a server is there (`*_conn_schedule`).
    fn schedule(&mut self, shard: &mut Shard, meta: &PacketMeta<'_>, now: Instant) -> Verdict {
        let Tuple { protocol, src, dst } = meta.tuple;
        let sysctls = &self.settings.sysctls;
        let mut payload = None;
        let (mut elsewhere, mut ends) = (false, false);
        match meta.transport {
            Transport::Tcp(flags) => {
                ends = flags.has(TcpFlags::RST);
                elsewhere = ends || !(flags.has(TcpFlags::SYN) || sysctls.sloppy_tcp);
            }
            Transport::Sctp(chunk) => {
                ends = chunk.first == SCTP_ABORT;
                elsewhere = ends || !(chunk.first == SCTP_INIT || sysctls.sloppy_sctp);
            }
            Transport::Udp(data) => payload = Some(data),
            Transport::Short { .. } | Transport::Other => {
                return Verdict::Drop(DropReason::ShortHeader);
            }
        }
        if elsewhere && !self.settings.decides {
            return Verdict::Accept(AcceptReason::NotNew);
        }
        let ask = Ask {
            protocol,
            client: src,
            virt: dst,
            destination: dst,
            mark: meta.mark,
            hook: meta.hook,
            payload,
            embedded: false,
            elsewhere,
        };
        if ends {
            return self.pass_on(shard, &ask, meta, now);
        }
        match self.open(shard, &ask, now) {
            Opened::Entry(index) => shard.forward(index, meta, now, true),
            Opened::Once(slot, template) => {
                let verdict = shard.forward_once(&slot, meta);
                self.close_once(shard, &slot, template, now);
                verdict
            }
            Opened::Refused(Verdict::Accept(_)) if elsewhere => {
                Verdict::Accept(AcceptReason::NotNew)
            }
            Opened::Refused(verdict) => verdict,
        }
    }

    /// Passes the end of a connection that another director may have had on to its server.
    fn pass_on(
        &mut self,
        shard: &mut Shard,
        ask: &Ask<'_>,
        meta: &PacketMeta<'_>,
        now: Instant,
    ) -> Verdict {
        const NOT_NEW: Verdict = Verdict::Accept(AcceptReason::NotNew);
        let Some(number) = self.find_service(ask.mark, ask.protocol, ask.virt) else {
            return NOT_NEW;
        };
        self.refresh(shard);
        let taken = self.filters.decide(number, ask.client.ip());
        let service = self.services.get_mut(&number);
        let service = service.filter(|service| {
            taken.is_none_or(crate::filter::Decided::taken)
                && service.is_function()
                && ask.virt.port() == service.key.port()
        });
        let server = service.and_then(|service| {
            let flags = service.config.flags;
            service.pool.pick(&ask.request(flags, now)).cloned()
        });
        let Some(server) = server.filter(|server| is_found_again(server.forwarding())) else {
            return NOT_NEW;
        };
        let port = match server.addr().port() {
            0 => ask.virt.port(),
            port => port,
        };
        let addr = SocketAddr::new(server.addr().ip(), port);
        let flags = server.connection_flags(self.settings.sysctls.conntrack);
        let mut slot = Draft::new(&ask.key(), addr, flags);
        slot.server = server.id().0;
        self.decided += 1;
        shard.forward_ended(&slot, meta)
    }

    /// Opens a connection for an ICMP error, as if the packet that it is about had come from the
    /// client (`ip_vs_try_to_schedule`). It lives three seconds unless it is used.
    fn schedule_icmp_error(
        &mut self,
        shard: &mut Shard,
        error: &IcmpError,
        now: Instant,
    ) -> Verdict {
        if !error.inner_ports {
            return Verdict::Drop(DropReason::ShortHeader);
        }
        let Tuple { protocol, src, dst } = error.inner;
        let ask = Ask {
            protocol,
            client: dst,
            virt: src,
            destination: dst,
            mark: error.mark,
            hook: error.hook,
            payload: None,
            embedded: true,
            elsewhere: !self.settings.sysctls.schedule_icmp,
        };
        match self.open(shard, &ask, now) {
            Opened::Entry(index) => shard.forward_icmp_error(index, error, true),
            Opened::Once(slot, template) => {
                // A datagram's error: the connection is gone before anything can follow.
                let Some(index) = self.enter_once(shard, slot, template, now) else {
                    return Verdict::Drop(DropReason::TableFull);
                };
                let verdict = shard.forward_icmp_error(index, error, true);
                shard.end(index);
                shard.reap();
                verdict
            }
            // In transit, the error may still be about a packet from a client.
            Opened::Refused(Verdict::Accept(reason)) if error.hook == Hook::Transit => {
                match shard.find_from_server(protocol, dst, src) {
                    Some(index) => shard.reply_icmp_error(index, error),
                    None if ask.elsewhere => Verdict::Accept(AcceptReason::UnrelatedIcmp),
                    None => Verdict::Accept(reason),
                }
            }
            Opened::Refused(Verdict::Accept(_)) if ask.elsewhere => {
                Verdict::Accept(AcceptReason::UnrelatedIcmp)
            }
            Opened::Refused(verdict) => verdict,
        }
    }

    /// `ip_vs_schedule`.
    fn open(&mut self, shard: &mut Shard, ask: &Ask<'_>, now: Instant) -> Opened {
        let Some(number) = self.find_service(ask.mark, ask.protocol, ask.virt) else {
            return Opened::Refused(Verdict::Accept(AcceptReason::NoService));
        };
        let decides =
            |service: &Service| service.is_function() && ask.virt.port() == service.key.port();
        if ask.elsewhere && !self.services.get(&number).is_some_and(|it| decides(it)) {
            return Opened::Refused(Verdict::Accept(AcceptReason::NotNew));
        }
        if self.defense.drops_packet() {
            return Opened::Refused(Verdict::Drop(DropReason::DropPacket));
        }
        if ask.client.port() == FTP_DATA {
            return Opened::Refused(Verdict::Accept(AcceptReason::SourcePort20));
        }
        if ask.hook == Hook::Output {
            let reversed = Key {
                protocol: ask.protocol,
                client: ask.virt,
                virt: ask.client,
            };
            if shard.find_from_client(&reversed).is_some() {
                return Opened::Refused(Verdict::Accept(AcceptReason::LocalReply));
            }
        }
        let pinned = self
            .pins
            .take(ask.protocol, ask.client, number, now)
            .and_then(|server| {
                let servers = self.services.get(&number)?.servers();
                servers.iter().find(|s| s.addr() == server).cloned()
            });
        if let Some(server) = pinned {
            self.refresh(shard);
            let port = match server.addr().port() {
                0 => ask.virt.port(),
                port => port,
            };
            return self.bind(shard, &server, port, ask, false, None, now);
        }
        let decided = self.filters.decide(number, ask.client.ip());
        if decided.is_some_and(|decided| !decided.taken()) {
            return Opened::Refused(Verdict::Drop(DropReason::Filtered));
        }
        self.refresh(shard);
        let service = self
            .services
            .get_mut(&number)
            .expect("the index leads to services only");
        let limits = service.config.extras.limits;
        if !limits.is_off() {
            let servers = service.pool.servers().iter().map(|server| &**server);
            let client = ask.client.ip();
            let limiter = &mut service.limiter;
            if let Err(reason) = limiter.check(&limits, client, servers, self.options.seed, now) {
                return Opened::Refused(Verdict::Drop(reason));
            }
        }
        let by_mark = matches!(service.key, ServiceKey::Mark { .. });
        let flags = service.config.flags;
        let once = flags.has(ServiceFlags::ONE_PACKET) && ask.protocol == Protocol::UDP;
        if flags.has(ServiceFlags::PERSISTENT) {
            return self.open_persistent(shard, number, ask, once, now);
        }
        // Only a persistent service takes other ports than its own: an FTP service, or one of port
        // 0.
        let picked = (by_mark || ask.virt.port() == service.key.port())
            .then(|| service.pool.pick(&ask.request(flags, now)).cloned())
            .flatten();
        let Some(server) = picked else {
            if ask.elsewhere {
                // Silence: who had it may be about to tell.
                return Opened::Refused(Verdict::Drop(DropReason::NoServer));
            }
            return self.leave(shard, number, ask, once, now);
        };
        if ask.elsewhere && !is_found_again(server.forwarding()) {
            return Opened::Refused(Verdict::Accept(AcceptReason::NotNew));
        }
        let regular =
            self.settings.decides && is_found_again(server.forwarding()) && service.is_function();
        let port = match server.addr().port() {
            0 => ask.virt.port(),
            port => port,
        };
        let opened = self.bind(shard, &server, port, ask, once, None, now);
        match opened {
            Opened::Refused(Verdict::Drop(DropReason::NoLocalPort)) => {
                self.open_elsewhere(shard, number, &server, ask, now)
            }
            Opened::Entry(index) if regular => {
                self.decided += u64::from(ask.elsewhere);
                shard.set_regular(index);
                Opened::Entry(index)
            }
            opened => opened,
        }
    }

    /// Full NAT has no local port left towards the server that was chosen: the next ones in the
    /// list are tried.
    fn open_elsewhere(
        &mut self,
        shard: &mut Shard,
        number: u32,
        but: &Arc<Server>,
        ask: &Ask<'_>,
        now: Instant,
    ) -> Opened {
        let servers = self
            .services
            .get(&number)
            .map_or(&[][..], |service| service.servers());
        let after = servers.iter().position(|server| Arc::ptr_eq(server, but));
        let (before, after) = servers.split_at(after.map_or(0, |after| after + 1));
        let others = after.iter().chain(before);
        let others = others.filter(|server| server.is_usable() && !Arc::ptr_eq(server, but));
        let others: Vec<Arc<Server>> = others.take(OTHERS).cloned().collect();
        for server in others {
            let port = match server.addr().port() {
                0 => ask.virt.port(),
                port => port,
            };
            match self.bind(shard, &server, port, ask, false, None, now) {
                Opened::Refused(Verdict::Drop(DropReason::NoLocalPort)) => {}
                opened => return opened,
            }
        }
        Opened::Refused(Verdict::Drop(DropReason::NoLocalPort))
    }

    /// Makes the connection (`ip_vs_conn_new`, `ip_vs_bind_dest`).
    #[expect(clippy::too_many_arguments, reason = "one call of three places")]
    fn bind(
        &mut self,
        shard: &mut Shard,
        server: &Arc<Server>,
        port: u16,
        ask: &Ask<'_>,
        once: bool,
        template: Option<(u32, Arc<Template>)>,
        now: Instant,
    ) -> Opened {
        let mut flags = server.connection_flags(self.settings.sysctls.conntrack);
        flags = self.translated_flags(server, ask.client.ip(), once, flags);
        flags |= self.settings.helper_flags(ask.protocol, ask.virt, flags);
        flags |= if once {
            flag::ONE_PACKET
        } else {
            server.watches(ask.protocol)
        };
        let addr = SocketAddr::new(server.addr().ip(), port);
        let mut slot = Draft::new(&ask.key(), addr, flags);
        slot.server = server.id().0;
        slot.mark = ask.mark;
        if once {
            server.bind(false);
            return Opened::Once(slot, template);
        }
        let opened = if slot.method() == Forwarding::FullNat {
            shard.open_full_nat(slot, template, &self.full_nat.pool, now)
        } else {
            let opened = shard.open(slot, template, now);
            opened.ok_or(DropReason::TableFull)
        };
        let index = match opened {
            Ok(index) => index,
            Err(reason) => return Opened::Refused(Verdict::Drop(reason)),
        };
        server.bind(false);
        shard.count(index, Counters::count_connection);
        Opened::Entry(index)
    }

    /// Puts a connection of one packet into the table, where what follows looks for it; `None` if
    /// that is full.
    fn enter_once(
        &self,
        shard: &mut Shard,
        slot: Draft,
        template: Option<(u32, Arc<Template>)>,
        now: Instant,
    ) -> Option<u32> {
        let server = self.records.get(slot.server as usize);
        let index = shard.open(slot, template, now);
        match (index, server) {
            (Some(index), _) => shard.count(index, Counters::count_connection),
            // It was counted for the server already.
            (None, Some(entry)) => entry.server.unbind(false),
            (None, None) => {}
        }
        index
    }

    /// Forgets a connection of one packet.
    fn close_once(
        &mut self,
        shard: &mut Shard,
        slot: &Draft,
        template: Option<(u32, Arc<Template>)>,
        now: Instant,
    ) {
        shard.sync_once(template.as_ref().map(|(_, template)| &**template), now);
        let server = self.records.get(slot.server as usize);
        if let Some(entry) = server {
            entry.server.unbind(false);
        }
    }

    /// Whether a packet to `addr` may go there itself when no server can take it
    /// (`ip_vs_addr_is_unicast`): of IPv4 not to an address of the host. With IPv6 the kernel
    /// does not ask, opens the connection, and loses its packets.
    fn may_bypass(&self, addr: IpAddr) -> bool {
        is_unicast(addr) && (addr.is_ipv6() || !self.is_local(addr))
    }

    /// No server can take the connection (`ip_vs_leave`).
    fn leave(
        &mut self,
        shard: &mut Shard,
        number: u32,
        ask: &Ask<'_>,
        once: bool,
        now: Instant,
    ) -> Opened {
        let service = &self.services[&number];
        let by_mark = matches!(service.key, ServiceKey::Mark { .. });
        if self.settings.sysctls.cache_bypass
            && by_mark
            && !ask.embedded
            && self.may_bypass(ask.virt.ip())
        {
            let nowhere = match ask.virt {
                SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
                SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            };
            let mut flags = Forwarding::Bypass as u32;
            if self.settings.sysctls.conntrack {
                flags |= flag::NFCT;
            }
            if once {
                flags |= flag::ONE_PACKET;
            }
            let mut slot = Draft::new(&ask.key(), SocketAddr::new(nowhere, 0), flags);
            slot.mark = ask.mark;
            if once {
                return Opened::Once(slot, None);
            }
            return match shard.open(slot, None, now) {
                Some(index) => Opened::Entry(index),
                None => Opened::Refused(Verdict::Drop(DropReason::TableFull)),
            };
        }
        Opened::Refused(if service.key.port() == FTP && ask.virt.port() != FTP {
            Verdict::Accept(AcceptReason::FtpData)
        } else if ask.embedded {
            Verdict::Drop(DropReason::NoServer)
        } else {
            Verdict::Unreachable(DropReason::NoServer)
        })
    }
}

impl Ask<'_> {
    fn key(&self) -> Key {
        Key {
            protocol: self.protocol,
            client: self.client,
            virt: self.virt,
        }
    }

    fn request(&self, flags: ServiceFlags, now: Instant) -> Request {
        Request {
            client: self.client,
            virt: self.destination,
            protocol: self.protocol,
            flags,
            now,
        }
    }
}

fn is_unicast(addr: IpAddr) -> bool {
    match addr {
        IpAddr::V4(addr) => !addr.is_unspecified() && !addr.is_multicast() && !addr.is_broadcast(),
        IpAddr::V6(addr) => !addr.is_unspecified() && !addr.is_multicast(),
    }
}
