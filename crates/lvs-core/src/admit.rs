//! The decision about packets of no known connection: which service, which real server, which template.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::sync::atomic::Ordering::Relaxed;

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::conn::table::flag;
use crate::conn::{Key, Slot, Template, server_flags};
use crate::control::{Control, FTP, FTP_DATA, ServiceKeyOrd};
use crate::packet::{SCTP_ABORT, SCTP_INIT};
use crate::sched::Request;
use crate::shard::{Pending, Shard};
use crate::stats::Counters;
use crate::{
    AcceptReason, DropReason, Family, Forwarding, Hook, IcmpError, Instant, PacketMeta, Protocol,
    Server, ServiceFlags, ServiceKey, TcpFlags, Transport, Tuple, Verdict, engine,
};

/// A packet that may open a connection, seen from the client's side even if it is embedded in an ICMP error.
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
}

/// Servers that are tried for a connection where full NAT has no local port left towards the one that was chosen.
const OTHERS: usize = 8;

/// What came of it.
enum Opened {
    /// A connection in the shard's table.
    Entry(u32),
    /// A connection of one packet, with the template that it was made from.
    Once(Slot, Option<(u32, Arc<Template>)>),
    /// None.
    Refused(Verdict),
}

impl Control {
    /// Decides on a packet that `shard` could not decide on alone. A shard of another director stays as it is:
    /// [`DropReason::ForeignShard`].
    pub fn admit(
        &mut self,
        shard: &mut Shard,
        meta: &PacketMeta<'_>,
        pending: Pending,
        now: Instant,
    ) -> Verdict {
        if !self.owns(shard) {
            return Verdict::Drop(DropReason::ForeignShard);
        }
        let mut pending = pending;
        if pending.stale {
            self.sweep(shard);
            match shard.decide(meta, now) {
                Ok(verdict) => return verdict,
                Err(again) => pending = again,
            }
        }
        if pending.outbound {
            if let Some(verdict) = self.open_outbound(shard, meta, now) {
                return verdict;
            }
            match shard.decide_in(meta, now) {
                Ok(verdict) => return verdict,
                Err(again) => pending = again,
            }
        }
        self.note_occupancy(shard);
        shard.hand.last = None;
        let verdict = self.schedule(shard, meta, now);
        // The table may have changed since, if the caller has taken its time; or the connection has given way already,
        // and what is in its slot is the new one.
        let made_room = shard.hand.last;
        let replaced = pending.replaced.filter(|&index| made_room != Some(index));
        if let Some(replaced) = replaced.filter(|&index| shard.table.is_used(index)) {
            shard.end(replaced);
            // Only what is left to the host is answered by it.
            if !matches!(verdict, Verdict::Accept(_)) {
                shard.bury();
            }
        }
        verdict
    }

    /// Decides on an ICMP error that `shard` could not decide on alone. A shard of another director as in
    /// [`admit`](Self::admit).
    pub fn admit_icmp_error(
        &mut self,
        shard: &mut Shard,
        error: &IcmpError,
        pending: Pending,
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
        match meta.transport {
            Transport::Tcp(flags) => {
                let opens = flags.has(TcpFlags::SYN) || sysctls.sloppy_tcp;
                if flags.has(TcpFlags::RST) || !opens {
                    return Verdict::Accept(AcceptReason::NotNew);
                }
            }
            Transport::Sctp(chunk) => {
                let opens = chunk.first == SCTP_INIT || sysctls.sloppy_sctp;
                if chunk.first == SCTP_ABORT || !opens {
                    return Verdict::Accept(AcceptReason::NotNew);
                }
            }
            Transport::Udp(data) => payload = Some(data),
            Transport::Short { .. } | Transport::Other => {
                return Verdict::Drop(DropReason::ShortHeader);
            }
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
            Opened::Entry(index) => shard.forward(index, meta, now, true),
            Opened::Once(slot, template) => {
                let verdict = shard.forward_once(&slot, meta);
                self.close_once(shard, &slot, template, now);
                verdict
            }
            Opened::Refused(verdict) => verdict,
        }
    }

    /// Opens a connection for an ICMP error, as if the packet that it is about had come from the client
    /// (`ip_vs_try_to_schedule`). It lives three seconds unless it is used.
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
            Opened::Entry(index) => shard.forward_icmp_error(index, error, true),
            Opened::Once(slot, template) => {
                // A datagram's error: the connection is gone before anything can follow.
                let Some(index) = self.enter_once(shard, slot, template, now) else {
                    return Verdict::Drop(DropReason::TableFull);
                };
                let verdict = shard.forward_icmp_error(index, error, true);
                shard.end(index);
                shard.bury();
                verdict
            }
            // In transit, the error may still be about a packet from a client.
            Opened::Refused(Verdict::Accept(reason)) if error.hook == Hook::Transit => {
                match shard.table.find_out(protocol, dst, src) {
                    Some(index) => shard.reply_icmp_error(index, error),
                    None => Verdict::Accept(reason),
                }
            }
            Opened::Refused(verdict) => verdict,
        }
    }

    /// `ip_vs_schedule`.
    fn open(&mut self, shard: &mut Shard, ask: &Ask<'_>, now: Instant) -> Opened {
        let Some(number) = self.find_service(ask.mark, ask.protocol, ask.virt) else {
            return Opened::Refused(Verdict::Accept(AcceptReason::NoService));
        };
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
            if shard.table.find_in(&reversed).is_some() {
                return Opened::Refused(Verdict::Accept(AcceptReason::LocalReply));
            }
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
        // Only a persistent service takes other ports than its own: an FTP service, or one of port 0.
        let picked = (by_mark || ask.virt.port() == service.key.port())
            .then(|| service.pool.pick(&ask.request(flags, now)).cloned())
            .flatten();
        let Some(server) = picked else {
            return self.leave(shard, number, ask, once, now);
        };
        let port = match server.addr().port() {
            0 => ask.virt.port(),
            port => port,
        };
        let opened = self.bind(shard, &server, port, ask, once, None, now);
        match opened {
            Opened::Refused(Verdict::Drop(DropReason::NoLocalPort)) => {
                self.open_elsewhere(shard, number, &server, ask, now)
            }
            opened => opened,
        }
    }

    /// Full NAT has no local port left towards the server that was chosen: the next ones in the list are tried.
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

    /// `ip_vs_sched_persist`.
    fn open_persistent(
        &mut self,
        shard: &mut Shard,
        number: u32,
        ask: &Ask<'_>,
        once: bool,
        now: Instant,
    ) -> Opened {
        const FULL: Opened = Opened::Refused(Verdict::Drop(DropReason::TableFull));
        let service = self
            .services
            .get_mut(&number)
            .expect("the caller has found it");
        let mut data = None;
        if service.config.engine.is_some() {
            // Embedded or not UDP, there is no message to look at.
            let message = ask.payload.filter(|_| ask.protocol == Protocol::UDP);
            data = message.and_then(engine::call_id);
            if data.is_none() {
                return Opened::Refused(Verdict::Drop(DropReason::PersistenceEngine));
            }
        }
        let (key, keeps_port) = template_key(
            service.key,
            service.config.netmask,
            ask.protocol,
            ask.client,
            ask.virt,
        );
        let quiescent = self.settings.sysctls.expire_quiescent_template;
        let found = self.templates.find_valid(&key, data, |place| {
            let entry = self.records.get(place);
            entry.is_some_and(|entry| may_lead_to(&entry.server, quiescent))
        });
        let (index, template) = match found {
            Some(index) => (index, self.templates.get(index).clone()),
            None => {
                let flags = service.config.flags;
                let Some(server) = service.pool.pick(&ask.request(flags, now)).cloned() else {
                    return self.leave(shard, number, ask, once, now);
                };
                let port = if keeps_port { server.addr().port() } else { 0 };
                let bits = server_flags(&server, self.settings.sysctls.conntrack);
                let addr = SocketAddr::new(server.addr().ip(), port);
                let mut template = Template::new(key, addr, bits, service.config.timeout, now);
                template.server = server.id().0.into();
                template.mark = ask.mark;
                template.engine = data.map(|data| (engine::SIP, data.into()));
                self.make_template_room();
                let Some(made) = self.templates.insert(template, now) else {
                    return FULL;
                };
                server.bind_template();
                made
            }
        };
        let number_of_server = template.server.load(Relaxed) as usize;
        let Some(entry) = self.records.get(number_of_server) else {
            return FULL;
        };
        let server = entry.server.clone();
        let service = &self.services[&number];
        let port = match server.addr().port() {
            port if port != 0 && ask.virt.port() == service.key.port() => port,
            _ => ask.virt.port(),
        };
        let opened = self.bind(
            shard,
            &server,
            port,
            ask,
            once,
            Some((index, template)),
            now,
        );
        self.templates.restart(index, now);
        opened
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
        let mut flags = server_flags(server, self.settings.sysctls.conntrack);
        flags = self.translated_flags(server, ask.client.ip(), once, flags);
        flags |= self.settings.helper_flags(ask.protocol, ask.virt, flags);
        flags |= if once {
            flag::ONE_PACKET
        } else {
            server.watches(ask.protocol)
        };
        let addr = SocketAddr::new(server.addr().ip(), port);
        let mut slot = Slot::new(&ask.key(), addr, flags);
        slot.server = server.id().0;
        slot.mark = ask.mark;
        slot.sync_end = crate::sync::ticks(now) & !3;
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

    /// Puts a connection of one packet into the table, where what follows looks for it; `None` if that is full.
    fn enter_once(
        &self,
        shard: &mut Shard,
        slot: Slot,
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
        slot: &Slot,
        template: Option<(u32, Arc<Template>)>,
        now: Instant,
    ) {
        shard.sync_once(template.as_ref().map(|(_, template)| &**template), now);
        let server = self.records.get(slot.server as usize);
        if let Some(entry) = server {
            entry.server.unbind(false);
        }
    }

    /// Whether a packet to `addr` may go there itself when no server can take it (`ip_vs_addr_is_unicast`): of IPv4 not
    /// to an address of the host. With IPv6 the kernel does not ask, opens the connection, and loses its packets.
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
            let mut slot = Slot::new(&ask.key(), SocketAddr::new(nowhere, 0), flags);
            slot.mark = ask.mark;
            slot.sync_end = crate::sync::ticks(now) & !3;
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

    /// A datagram from a server behind NAT, of no connection: a service with an engine opens one for it
    /// (`__ip_vs_rs_conn_out`, `ip_vs_new_conn_out`).
    fn open_outbound(
        &mut self,
        shard: &mut Shard,
        meta: &PacketMeta<'_>,
        now: Instant,
    ) -> Option<Verdict> {
        let Tuple { protocol, src, dst } = meta.tuple;
        let Transport::Udp(message) = meta.transport else {
            return None;
        };
        // The record made last comes first, as in the kernel's hash chains.
        let entry = self.records.at(src).find(|entry| {
            !entry.is_trashed()
                && entry.server.forwarding() == Forwarding::Nat
                && entry.key.protocol().is_none_or(|of| of == protocol)
        })?;
        let server = entry.server.clone();
        let service = self.services.get(&entry.service)?;
        service.config.engine.as_ref()?;
        let ServiceKey::Address { addr: virt, .. } = service.key else {
            return None;
        };
        if virt.port() == 0 || server.addr().port() == 0 {
            return None;
        }
        let config = &service.config;
        let once = config.flags.has(ServiceFlags::ONE_PACKET);
        let mut template = None;
        if config.flags.has(ServiceFlags::PERSISTENT) {
            let data = engine::call_id(message)?;
            let key = Key {
                protocol,
                client: SocketAddr::new(network(dst.ip(), config.netmask), 0),
                virt,
            };
            let quiescent = self.settings.sysctls.expire_quiescent_template;
            let found = self.templates.find_valid(&key, Some(data), |place| {
                place == server.id().0 as usize && may_lead_to(&server, quiescent)
            });
            let made = match found {
                Some(index) => (index, self.templates.get(index).clone()),
                None => {
                    let bits = server_flags(&server, self.settings.sysctls.conntrack);
                    let mut made = Template::new(key, server.addr(), bits, config.timeout, now);
                    made.server = server.id().0.into();
                    made.mark = meta.mark;
                    made.engine = Some((engine::SIP, data.into()));
                    let made = self.templates.insert(made, now)?;
                    server.bind_template();
                    made
                }
            };
            self.templates.restart(made.0, now);
            template = Some(made);
        }
        self.refresh(shard);
        let ask = Ask {
            protocol,
            client: dst,
            virt,
            destination: virt,
            mark: meta.mark,
            hook: meta.hook,
            payload: None,
            embedded: false,
        };
        let port = server.addr().port();
        match self.bind(shard, &server, port, &ask, once, template, now) {
            Opened::Entry(index) => Some(shard.reply(index, meta, now)),
            Opened::Once(slot, template) => {
                let index = self.enter_once(shard, slot, template, now)?;
                let verdict = shard.reply(index, meta, now);
                shard.end(index);
                shard.bury();
                Some(verdict)
            }
            Opened::Refused(_) => None,
        }
    }

    /// The service that takes a packet (`ip_vs_service_find`).
    pub(crate) fn find_service(
        &self,
        mark: u32,
        protocol: Protocol,
        virt: SocketAddr,
    ) -> Option<u32> {
        let exact = |port| {
            let addr = SocketAddr::new(virt.ip(), port);
            self.index
                .get(&ServiceKeyOrd::Address(protocol, addr))
                .copied()
        };
        if mark != 0 {
            let family = Family::of(&virt.ip());
            if let Some(&number) = self.index.get(&ServiceKeyOrd::Mark(family, mark)) {
                return Some(number);
            }
        }
        exact(virt.port())
            .or_else(|| {
                // Active FTP's data port, or the passive range (`net.ipv4.ip_unprivileged_port_start`).
                let data = virt.port() == FTP_DATA || virt.port() >= 1024;
                (protocol == Protocol::TCP && self.ftp_services > 0 && data).then(|| exact(FTP))?
            })
            .or_else(|| (self.any_port_services > 0).then(|| exact(0))?)
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

/// Whether a template may lead to a server (`ip_vs_check_template`).
fn may_lead_to(server: &Server, quiescent: bool) -> bool {
    server.is_available() && !(quiescent && server.weight() == 0)
}

/// The identity of the template for a packet, and whether the template keeps the server's port.
///
/// A service of many ports has one template for all: an FTP service for control and data, one of port 0 for every port,
/// one of a mark for every protocol and address, too.
pub(crate) fn template_key(
    service: ServiceKey,
    netmask: u32,
    protocol: Protocol,
    client: SocketAddr,
    virt: SocketAddr,
) -> (Key, bool) {
    let client = SocketAddr::new(network(client.ip(), netmask), 0);
    if virt.port() == service.port() {
        let ftp = virt.port() == FTP;
        let port = if ftp { 0 } else { virt.port() };
        let virt = SocketAddr::new(virt.ip(), port);
        let key = Key {
            protocol,
            client,
            virt,
        };
        return (key, !ftp);
    }
    let key = match service {
        ServiceKey::Mark { mark, .. } => Key {
            protocol: Protocol(0),
            client,
            virt: mark_addr(mark, virt.is_ipv4()),
        },
        ServiceKey::Address { .. } => Key {
            protocol,
            client,
            virt: SocketAddr::new(virt.ip(), 0),
        },
    };
    (key, false)
}

/// A mark in the place of a virtual address: in an IPv6 address, its first word.
fn mark_addr(mark: u32, v4: bool) -> SocketAddr {
    let addr = if v4 {
        IpAddr::V4(Ipv4Addr::from_bits(mark))
    } else {
        IpAddr::V6(Ipv6Addr::from_bits(u128::from(mark) << 96))
    };
    SocketAddr::new(addr, 0)
}

/// The network of a client: by a mask of IPv4, by the length of a prefix of IPv6.
fn network(addr: IpAddr, netmask: u32) -> IpAddr {
    match addr {
        IpAddr::V4(addr) => Ipv4Addr::from_bits(addr.to_bits() & netmask).into(),
        IpAddr::V6(addr) => {
            let host = 128u32.saturating_sub(netmask);
            let mask = u128::MAX.checked_shl(host).unwrap_or(0);
            Ipv6Addr::from_bits(addr.to_bits() & mask).into()
        }
    }
}

fn is_unicast(addr: IpAddr) -> bool {
    match addr {
        IpAddr::V4(addr) => !addr.is_unspecified() && !addr.is_multicast() && !addr.is_broadcast(),
        IpAddr::V6(addr) => !addr.is_unspecified() && !addr.is_multicast(),
    }
}
