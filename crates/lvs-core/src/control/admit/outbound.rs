//! Connections that a datagram from a server opens.

use core::net::SocketAddr;

use super::persistent::{may_lead_to, network};
use super::{Ask, Opened, Packets};
use crate::conn::{Key, Template, flag};
use crate::control::Control;
use crate::persistence_sip;
use crate::shard::Shard;
use crate::{Forwarding, Instant, PacketMeta, ServiceFlags, ServiceKey, Transport, Tuple, Verdict};

impl Control {
    /// Decides about a datagram from a server behind NAT that belongs to no connection: a service
    /// with a persistence engine opens a connection for it (`__ip_vs_rs_conn_out`,
    /// `ip_vs_new_conn_out`). `None` if no connection is opened.
    pub(super) fn open_outbound(
        &mut self,
        shard: &mut Shard,
        meta: &PacketMeta<'_>,
        now: Instant,
    ) -> Option<Verdict> {
        let Tuple { protocol, src, dst } = meta.tuple;
        let Transport::Udp(message) = meta.transport else {
            return None;
        };
        // The newest record comes first, as in the kernel's hash chains.
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
        let packets = if config.flags.has(ServiceFlags::ONE_PACKET) {
            Packets::One
        } else {
            Packets::Any
        };
        let mut template = None;
        if config.flags.has(ServiceFlags::PERSISTENT) {
            let data = persistence_sip::call_id(message)?;
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
                    let bits = server.connection_flags(self.settings.sysctls.conntrack);
                    let mut made = Template::new(key, server.addr(), bits, config.timeout, now);
                    made.server = server.id().0.into();
                    made.mark = meta.mark;
                    made.engine = Some((persistence_sip::SIP, data.into()));
                    let made = self.insert_template(made, now)?;
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
        let mut slot = self.draft(&server, port, &ask, packets);
        // The server opens the connection, not a client.
        slot.flags &= !flag::AWAITED;
        match self.bind(shard, &server, slot, template, now) {
            Ok(Opened::Entry(index)) => Some(shard.reply(index, meta, now)),
            Ok(Opened::Once(slot, template)) => {
                let index = self.enter_once(shard, slot, template, now)?;
                let verdict = shard.reply(index, meta, now);
                shard.end(index);
                shard.reap();
                Some(verdict)
            }
            Err(_) => None,
        }
    }
}
