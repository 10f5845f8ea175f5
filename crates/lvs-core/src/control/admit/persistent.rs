//! Persistent services: a template decides (`ip_vs_sched_persist`).

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::sync::atomic::Ordering::Relaxed;

use super::{Ask, Opened};
use crate::conn::{Key, Template};
use crate::control::{Control, FTP};
use crate::persistence_sip;
use crate::shard::Shard;
use crate::{DropReason, Instant, Protocol, Server, ServiceKey, Verdict};

impl Control {
    /// `ip_vs_sched_persist`.
    pub(super) fn open_persistent(
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
            data = message.and_then(persistence_sip::call_id);
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
                let bits = server.connection_flags(self.settings.sysctls.conntrack);
                let addr = SocketAddr::new(server.addr().ip(), port);
                let mut template = Template::new(key, addr, bits, service.config.timeout, now);
                template.server = server.id().0.into();
                template.mark = ask.mark;
                template.engine = data.map(|data| (persistence_sip::SIP, data.into()));
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
}

/// Whether a template may lead to a server (`ip_vs_check_template`).
pub(super) fn may_lead_to(server: &Server, quiescent: bool) -> bool {
    server.is_available() && !(quiescent && server.weight() == 0)
}

/// The identity of the template for a packet, and whether the template keeps the server's port.
///
/// A service of many ports has one template for all: an FTP service for control and data, one of
/// port 0 for every port, one of a mark for every protocol and address, too.
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

/// A mark instead of a virtual address: in an IPv6 address, its first word.
fn mark_addr(mark: u32, v4: bool) -> SocketAddr {
    let addr = if v4 {
        IpAddr::V4(Ipv4Addr::from_bits(mark))
    } else {
        IpAddr::V6(Ipv6Addr::from_bits(u128::from(mark) << 96))
    };
    SocketAddr::new(addr, 0)
}

/// The network of a client: by a mask of IPv4, by the length of a prefix of IPv6.
pub(super) fn network(addr: IpAddr, netmask: u32) -> IpAddr {
    match addr {
        IpAddr::V4(addr) => Ipv4Addr::from_bits(addr.to_bits() & netmask).into(),
        IpAddr::V6(addr) => {
            let host = 128u32.saturating_sub(netmask);
            let mask = u128::MAX.checked_shl(host).unwrap_or(0);
            Ipv6Addr::from_bits(addr.to_bits() & mask).into()
        }
    }
}
