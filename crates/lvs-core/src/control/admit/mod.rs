//! The decision about packets without a known connection: service, real server and template.

mod classify;
mod outbound;
mod persistent;

use alloc::sync::Arc;
use core::convert::Infallible;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::sync::atomic::Ordering::Relaxed;

pub(super) use self::classify::{By, Packets, Refused, State, classify};
pub(super) use self::persistent::may_lead_to;
use crate::conn::{Ahead, Draft, Key, Template, flag};
use crate::control::Control;
use crate::packet::{SCTP_ABORT, SCTP_INIT};
use crate::persistence_sip;
use crate::shard::{Age, NeedsControl, Shard};
use crate::stats::Counters;
use crate::{
    AcceptReason, DropReason, Forwarding, Hook, IcmpError, Instant, PacketMeta, Protocol, Request,
    Server, ServiceFlags, TcpFlags, Transport, Tuple, Verdict,
};

/// A packet that may open a connection, seen from the client's side even if it is embedded in an
/// ICMP error.
pub(super) struct Ask<'a> {
    pub(super) protocol: Protocol,
    pub(super) client: SocketAddr,
    pub(super) virt: SocketAddr,
    /// The destination in the packet's header, for schedulers by destination.
    destination: SocketAddr,
    mark: u32,
    hook: Hook,
    /// The payload after the UDP header.
    payload: Option<&'a [u8]>,
    embedded: bool,
}

/// A connection that was opened.
enum Opened {
    /// A connection in the shard's table.
    Entry(u32),
    /// A one-packet connection, with its template, if any.
    Once(Draft, Option<(u32, Arc<Template>)>),
}

impl Control {
    /// Decides on a packet that `shard` could not decide on alone. If `shard` belongs to another
    /// director, it is unchanged, and the packet is dropped ([`DropReason::ForeignShard`]).
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
        // The connection to be replaced may not exist any more: the table may have changed while
        // the caller waited, or the connection was evicted, and its slot contains the new
        // connection.
        let made_room = shard.made_room();
        let replaced = pending.replaced.filter(|&index| made_room != Some(index));
        if let Some(replaced) = replaced.filter(|&index| shard.has(index)) {
            shard.end(replaced);
            // Remove the replaced connection now, unless the host receives the packet.
            if !matches!(verdict, Verdict::Accept(_)) {
                shard.reap();
            }
        }
        verdict
    }

    /// Decides on an ICMP error that `shard` could not decide on alone. For a shard of another
    /// director, see [`admit`](Self::admit).
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

    /// Decides on a packet that belongs to no connection: opens a connection, if the packet may
    /// open one and a server is available (`*_conn_schedule`).
    fn schedule(&mut self, shard: &mut Shard, meta: &PacketMeta<'_>, now: Instant) -> Verdict {
        let Tuple { protocol, src, dst } = meta.tuple;
        let sysctls = &self.settings.sysctls;
        let mut payload = None;
        let mut opens = true;
        match meta.transport {
            Transport::Tcp(flags) => {
                opens =
                    !flags.has(TcpFlags::RST) && (flags.has(TcpFlags::SYN) || sysctls.sloppy_tcp);
            }
            Transport::Sctp(chunk) => {
                opens =
                    chunk.first != SCTP_ABORT && (chunk.first == SCTP_INIT || sysctls.sloppy_sctp);
            }
            Transport::Udp(data) => payload = Some(data),
            Transport::Short { .. } | Transport::Other => {
                return Verdict::Drop(DropReason::ShortHeader);
            }
        }
        if !opens {
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
        };
        match self.open(shard, &ask, now) {
            Ok(Opened::Entry(index)) => shard.forward(index, meta, now, Age::New),
            Ok(Opened::Once(slot, template)) => {
                let verdict = shard.forward_once(&slot, meta);
                self.close_once(shard, &slot, template, now);
                verdict
            }
            Err(refused) => {
                if let Refused::Drop(reason) | Refused::Unreachable(reason) = refused
                    && let Some(number) = self.find_service(ask.mark, protocol, dst)
                    && let Some(service) = self.services.get_mut(&number)
                {
                    service.refusals.add(reason.name(), 1, now);
                }
                refused.into()
            }
        }
    }

    /// Opens a connection for an ICMP error, as for a packet of the client
    /// (`ip_vs_try_to_schedule`). Without further packets it ends after three seconds; a one-packet
    /// connection ends at once. An error in transit that opens none may be about a packet of an
    /// existing connection.
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
        };
        match self.open(shard, &ask, now) {
            Ok(Opened::Entry(index)) => shard.forward_icmp_error(index, error, Age::New),
            Ok(Opened::Once(slot, template)) => {
                // An error about a datagram: the connection is removed before its next packet.
                let Some(index) = self.enter_once(shard, slot, template, now) else {
                    return Verdict::Drop(DropReason::TableFull);
                };
                let verdict = shard.forward_icmp_error(index, error, Age::New);
                shard.end(index);
                shard.reap();
                verdict
            }
            // The error of a packet in transit may still be about a packet from a client.
            Err(Refused::Accept(reason)) if error.hook == Hook::Transit => {
                match shard.find_from_server(protocol, dst, src) {
                    Some(index) => shard.reply_icmp_error(index, error),
                    None => Verdict::Accept(reason),
                }
            }
            Err(refused) => refused.into(),
        }
    }

    /// Opens a connection for a packet, if the settings allow it and a server is available.
    fn open(
        &mut self,
        shard: &mut Shard,
        ask: &Ask<'_>,
        now: Instant,
    ) -> Result<Opened, Refused<Infallible>> {
        let control = self;
        classify(&mut Admission { control, shard }, ask, now)
    }

    /// The initial state of a connection to `server`.
    pub(super) fn draft(
        &self,
        server: &Server,
        port: u16,
        ask: &Ask<'_>,
        packets: Packets,
    ) -> Draft {
        let mut flags = server.connection_flags(self.settings.sysctls.conntrack);
        flags = self.translated_flags(server, ask.client.ip(), packets, flags);
        flags |= self.settings.helper_flags(ask.protocol, ask.virt, flags);
        flags |= if packets == Packets::One {
            flag::ONE_PACKET
        } else {
            server.watches(ask.protocol)
        };
        let addr = SocketAddr::new(server.addr().ip(), port);
        let mut slot = Draft::new(&ask.key(), addr, flags);
        slot.server = server.id().0;
        slot.mark = ask.mark;
        slot
    }

    /// Opens the connection that `slot` describes, and binds it to `server` (`ip_vs_conn_new`,
    /// `ip_vs_bind_dest`). A one-packet connection is not added to the table. Neither the server
    /// nor the statistics count connections of health checks.
    fn bind(
        &mut self,
        shard: &mut Shard,
        server: &Arc<Server>,
        slot: Draft,
        template: Option<(u32, Arc<Template>)>,
        now: Instant,
    ) -> Result<Opened, DropReason> {
        let flags = slot.flags;
        if flags & flag::ONE_PACKET != 0 {
            server.bind(flags);
            return Ok(Opened::Once(slot, template));
        }
        let opened = if slot.method() == Forwarding::FullNat {
            shard.open_full_nat(slot, template, &self.full_nat.pool, now)
        } else {
            let opened = shard.open(slot, template, now);
            opened.ok_or(DropReason::TableFull)
        };
        let index = opened?;
        server.bind(flags);
        if flags & flag::PROBE == 0 {
            shard.count(server.id().0, Counters::count_connection);
        }
        Ok(Opened::Entry(index))
    }

    /// Adds a one-packet connection to the table, because the decision about an ICMP error, or
    /// about a packet from the server, needs an entry. If the table is full, the server no longer
    /// counts the connection, and the result is `None`.
    fn enter_once(
        &self,
        shard: &mut Shard,
        slot: Draft,
        template: Option<(u32, Arc<Template>)>,
        now: Instant,
    ) -> Option<u32> {
        let number = slot.server;
        let server = self.records.get(number as usize);
        let flags = slot.flags;
        let index = shard.open(slot, template, now);
        match (index, server) {
            (Some(_), _) => shard.count(number, Counters::count_connection),
            // The connection was already counted for the server.
            (None, Some(entry)) => entry.server.unbind(flags),
            (None, None) => {}
        }
        index
    }

    /// Subtracts a one-packet connection, which was never in the table, from the counts of its
    /// server, and synchronises its template.
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
            entry.server.unbind(slot.flags);
        }
    }
}

impl<'a> Ask<'a> {
    /// A packet from a client, without its payload, that may open a connection.
    pub(super) const fn new(tuple: Tuple, mark: u32, hook: Hook) -> Self {
        let Tuple { protocol, src, dst } = tuple;
        Self {
            protocol,
            client: src,
            virt: dst,
            destination: dst,
            mark,
            hook,
            payload: None,
            embedded: false,
        }
    }

    /// The part of the datagram that the persistence engine uses; `None` if the datagram has no
    /// such part, for embedded packets, and for protocols other than UDP.
    fn engine_data(&self) -> Option<&'a [u8]> {
        let message = self.payload.filter(|_| self.protocol == Protocol::UDP);
        message.and_then(persistence_sip::call_id)
    }

    /// The destination port at the server.
    fn port_at(&self, server: &Server) -> u16 {
        match server.addr().port() {
            0 => self.virt.port(),
            port => port,
        }
    }

    fn key(&self) -> Key {
        Key {
            protocol: self.protocol,
            client: self.client,
            virt: self.virt,
        }
    }

    pub(super) fn request(&self, flags: ServiceFlags, now: Instant) -> Request {
        Request {
            client: self.client,
            virt: self.destination,
            protocol: self.protocol,
            flags,
            now,
        }
    }
}

/// The director's state: decisions change it.
struct Admission<'a> {
    control: &'a mut Control,
    shard: &'a mut Shard,
}

impl State for Admission<'_> {
    type Opened = Opened;
    type Template = u32;
    type Unknown = Infallible;

    fn control(&self) -> &Control {
        self.control
    }

    fn shard(&self) -> &Shard {
        self.shard
    }

    fn drops_packet(&mut self) -> bool {
        self.control.defense.drops_packet()
    }

    fn remove_pin(&mut self, ask: &Ask<'_>, service: u32) {
        self.control.pins.remove(ask.protocol, ask.client, service);
    }

    fn refresh(&mut self) {
        self.control.refresh(self.shard);
    }

    fn check_limits(
        &mut self,
        service: u32,
        client: IpAddr,
        now: Instant,
    ) -> Result<(), DropReason> {
        let seed = self.control.options.seed;
        let Some(service) = self.control.services.get_mut(&service) else {
            return Ok(());
        };
        let limits = service.config.extras.limits;
        let servers = service.pool.servers().iter().map(|server| &**server);
        let limiter = &mut service.limiter;
        limiter.check(&limits, client, servers, seed, now)
    }

    fn engine_data<'a>(&mut self, ask: &Ask<'a>) -> Result<Option<&'a [u8]>, Infallible> {
        Ok(ask.engine_data())
    }

    fn find_template(
        &mut self,
        key: &Key,
        data: Option<&[u8]>,
        _now: Instant,
    ) -> Option<(u32, Arc<Server>)> {
        let Control {
            templates,
            records,
            settings,
            ..
        } = &mut *self.control;
        let quiescent = settings.sysctls.expire_quiescent_template;
        let index = templates.find_valid(key, data, |place| {
            let entry = records.get(place);
            entry.is_some_and(|entry| may_lead_to(&entry.server, quiescent))
        })?;
        let place = templates.get(index).server.load(Relaxed) as usize;
        Some((index, records.get(place)?.server.clone()))
    }

    fn make_template(&mut self, template: Template, server: &Server, now: Instant) -> Option<u32> {
        let (index, _) = self.control.insert_template(template, now)?;
        server.bind_template();
        Some(index)
    }

    fn restart_template(&mut self, template: u32, now: Instant) {
        self.control.templates.restart(template, now);
    }

    fn pick(&mut self, service: u32, request: &Request) -> Result<Option<Arc<Server>>, Infallible> {
        let service = self.control.services.get_mut(&service);
        Ok(service.and_then(|service| service.pool.pick(request).cloned()))
    }

    fn bind(
        &mut self,
        server: &Arc<Server>,
        port: u16,
        ask: &Ask<'_>,
        packets: Packets,
        by: By<u32>,
        now: Instant,
    ) -> Result<Opened, DropReason> {
        let template = match by {
            By::Template(index) => Some((index, self.control.templates.get(index).clone())),
            By::Pin | By::Scheduler | By::NextServer => None,
        };
        let mut slot = self.control.draft(server, port, ask, packets);
        if let By::Pin = by {
            // A health check is no attempt of a client.
            slot.flags = (slot.flags | flag::PROBE) & !(flag::TIMED | flag::AWAITED);
        }
        self.control.bind(self.shard, server, slot, template, now)
    }

    fn bypass(
        &mut self,
        ask: &Ask<'_>,
        packets: Packets,
        now: Instant,
    ) -> Result<Opened, DropReason> {
        let nowhere = match ask.virt {
            SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        };
        let mut flags = Forwarding::Bypass as u32;
        if self.control.settings.sysctls.conntrack {
            flags |= flag::NFCT;
        }
        if packets == Packets::One {
            flags |= flag::ONE_PACKET;
        }
        let mut slot = Draft::new(&ask.key(), SocketAddr::new(nowhere, 0), flags);
        slot.mark = ask.mark;
        if packets == Packets::One {
            return Ok(Opened::Once(slot, None));
        }
        let index = self.shard.open(slot, None, now);
        index.map(Opened::Entry).ok_or(DropReason::TableFull)
    }
}

fn is_unicast(addr: IpAddr) -> bool {
    match addr {
        IpAddr::V4(addr) => !addr.is_unspecified() && !addr.is_multicast() && !addr.is_broadcast(),
        IpAddr::V6(addr) => !addr.is_unspecified() && !addr.is_multicast(),
    }
}
