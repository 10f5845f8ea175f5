//! Which connection a packet belongs to, and whether the shard alone can decide on it.

use core::net::SocketAddr;

use super::{NeedsControl, Shard};
use crate::conn::{Key, NO_SLOT, State, flag};
use crate::packet::{SCTP_ABORT, is_ipsec, opens};
use crate::{
    AcceptReason, DropReason, Hook, Instant, PacketMeta, Protocol, TcpFlags, Transport, Tuple,
    Verdict,
};

impl Shard {
    /// The packet's way through the hooks (`ip_vs_out_hook`, `ip_vs_in_hook`).
    pub(crate) fn decide(
        &mut self,
        meta: &PacketMeta<'_>,
        now: Instant,
    ) -> Result<Verdict, NeedsControl> {
        if !self.dying.is_empty() && meta.hook != Hook::Output {
            self.reap();
        }
        let Tuple { protocol, src, dst } = meta.tuple;
        if !self.settings.serves(dst.ip()) {
            return Ok(Verdict::Accept(AcceptReason::NoService));
        }
        if !is_balanced(protocol) {
            return Ok(Verdict::Accept(AcceptReason::Protocol));
        }
        if matches!(
            meta.transport,
            Transport::Short { ports: false, .. } | Transport::Other
        ) && !is_ipsec(protocol)
        {
            return Ok(if meta.hook == Hook::Transit {
                Verdict::Accept(AcceptReason::NoConnection)
            } else {
                Verdict::Drop(DropReason::ShortHeader)
            });
        }
        let Tuple { protocol, src, dst } = connection_tuple(Tuple { protocol, src, dst });
        if let Some(index) = self.find_reply(protocol, src, dst) {
            return Ok(self.reply(index, meta, now));
        }
        if self.settings.heeds_servers() && self.links.is_masqueraded(protocol, src) {
            if self.settings.outbound && protocol == Protocol::UDP && meta.hook != Hook::Local {
                return Err(NeedsControl {
                    outbound: true,
                    ..NeedsControl::NEW
                });
            }
            if self.tells_server(meta) {
                return Ok(Verdict::Unreachable(DropReason::StrayReply));
            }
        }
        self.decide_in(meta, now)
    }

    /// What is left when the packet is no reply (`ip_vs_in_hook`).
    pub(crate) fn decide_in(
        &mut self,
        meta: &PacketMeta<'_>,
        now: Instant,
    ) -> Result<Verdict, NeedsControl> {
        if meta.hook == Hook::Transit {
            return Ok(Verdict::Accept(AcceptReason::NoConnection));
        }
        if self.settings.backup_only {
            return Ok(Verdict::Accept(AcceptReason::BackupOnly));
        }
        let Tuple { protocol, src, dst } = connection_tuple(meta.tuple);
        let Some(index) = self.table.find_in(&Key {
            protocol,
            client: src,
            virt: dst,
        }) else {
            if is_ipsec(meta.tuple.protocol) {
                return Ok(Verdict::Accept(AcceptReason::NoConnection));
            }
            return Err(NeedsControl::NEW);
        };
        if self.table.get(index).has(flag::GONE) {
            return self.decide_gone(index, meta, now);
        }
        let replaced = NeedsControl::replacing(index);
        if self.is_replaced_by(index, meta) {
            return Err(replaced);
        }
        match self.link(index) {
            Some(link) if !link.server.is_available() => {
                if link.server.has_gone() {
                    self.end_orphan(index, now);
                    if !self.table.is_used(index) {
                        return Err(NeedsControl::NEW);
                    }
                    return self.decide_gone(index, meta, now);
                }
                if !self.settings.sysctls.expire_nodest_conn {
                    return Ok(Verdict::Drop(DropReason::ServerRemoved));
                }
                if is_ipsec(meta.tuple.protocol) {
                    self.end(index);
                    return Ok(Verdict::Accept(AcceptReason::NoConnection));
                }
                Err(replaced)
            }
            _ => Ok(self.forward(index, meta, now, false)),
        }
    }

    /// Whether a server that speaks without a connection is told so.
    fn tells_server(&self, meta: &PacketMeta<'_>) -> bool {
        self.settings.sysctls.nat_icmp_send
            && match meta.transport {
                Transport::Tcp(flags) => !flags.has(TcpFlags::RST),
                Transport::Sctp(chunk) => chunk.first != SCTP_ABORT,
                Transport::Udp(_) | Transport::Short { .. } => true,
                Transport::Other => false,
            }
    }

    /// Whether a packet that opens a connection takes the place of the one that has its addresses and ports
    /// (`is_new_conn`, `is_new_conn_expected`).
    fn is_replaced_by(&self, index: u32, meta: &PacketMeta<'_>) -> bool {
        if !opens(meta) {
            return false;
        }
        let sysctls = &self.settings.sysctls;
        let slot = self.table.get(index);
        if sysctls.expire_nodest_conn
            && self
                .link(index)
                .is_some_and(|link| link.server.weight() == 0)
        {
            return true;
        }
        if sysctls.conn_reuse_mode == 0 || slot.control != NO_SLOT {
            return false;
        }
        if slot.protocol() == Protocol::SCTP {
            return slot.state == State::SCTP_CLOSED;
        }
        matches!(slot.state, State::TCP_TIME_WAIT | State::TCP_CLOSE)
            || (sysctls.conn_reuse_mode & 2 != 0
                && slot.state == State::TCP_FIN_WAIT
                && slot.has(flag::NO_OUTPUT))
    }

    /// The connection of a packet from a server, or from a virtual address, to `dst`.
    #[inline]
    pub(super) fn find_reply(
        &self,
        protocol: Protocol,
        src: SocketAddr,
        dst: SocketAddr,
    ) -> Option<u32> {
        if self.local_ports.is_used(dst.ip()) {
            let found = self.local_ports.find(protocol, src, dst, &self.table);
            if found.is_some() {
                return found;
            }
        }
        self.table.find_out(protocol, src, dst)
    }
}

/// ISAKMP, which IPsec packets follow (RFC 2408).
const ISAKMP: u16 = 500;

/// Protocols that connections are kept of.
pub(crate) fn is_balanced(protocol: Protocol) -> bool {
    matches!(
        protocol,
        Protocol::TCP | Protocol::UDP | Protocol::SCTP | Protocol::AH | Protocol::ESP
    )
}

/// What a packet's connection is looked up by: IPsec follows the ISAKMP connection of the same two hosts.
#[inline]
pub(super) fn connection_tuple(tuple: Tuple) -> Tuple {
    if is_ipsec(tuple.protocol) {
        return Tuple {
            protocol: Protocol::UDP,
            src: SocketAddr::new(tuple.src.ip(), ISAKMP),
            dst: SocketAddr::new(tuple.dst.ip(), ISAKMP),
        };
    }
    tuple
}
