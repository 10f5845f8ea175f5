//! Connections whose packets a program in the kernel may forward, out of the same memory.

use core::net::SocketAddr;

use super::Shard;
use crate::conn::{Entry, NO_SLOT, State, flag};
use crate::{ConnId, Forwarding, Protocol, Tunnel};

/// With these, a packet may change more of its connection than counters and the deadline, or be
/// changed itself.
pub(crate) const INVOLVED: u32 = flag::OUT_SEQ
    | flag::IN_SEQ
    | flag::NO_CPORT
    | flag::TEMPLATE
    | flag::ONE_PACKET
    | flag::CONTROLS
    | flag::WATCHED
    | flag::HELPED
    | flag::DYING;

/// Whether a connection's next packets change no state.
#[inline]
pub(super) fn is_still(entry: Entry<'_>) -> bool {
    match entry.protocol() {
        Protocol::TCP => entry.state() == State::TCP_ESTABLISHED,
        // An answer to a persistent client assures its template.
        Protocol::UDP => entry.state() == State::NONE && entry.control() == NO_SLOT,
        _ => false,
    }
}

/// Whether a program in the kernel knows how to forward a connection's packets, and is to.
#[inline]
fn is_plain(entry: Entry<'_>) -> bool {
    entry.flags() & INVOLVED == 0
        && match entry.method() {
            Forwarding::Nat | Forwarding::FullNat => !entry.has(flag::NO_OUTPUT),
            Forwarding::Route | Forwarding::Tunnel => true,
            _ => false,
        }
}

/// A connection that could be published: what somebody else has to find ways out for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Client.
    pub client: SocketAddr,
    /// Virtual address and port.
    pub virt: SocketAddr,
    /// Real server.
    pub server: SocketAddr,
    /// Forwarding method.
    pub method: Forwarding,
    /// The encapsulation, if that is a tunnel.
    pub tunnel: Tunnel,
    /// The number of the server's record.
    pub record: u32,
    /// What stands for the client, where both ends are translated. It is here once, for whoever has
    /// not learned it by [`Shard::local_changes`]: not of a connection that was published before, in
    /// whichever epoch.
    pub local: Option<LocalEnd>,
}

/// What stands for the client of a connection by full NAT towards its server. Whoever forwards its
/// packets finds both by it: requests by the slot, replies by the ends that they are between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalEnd {
    /// The number of the connection's slot, of all in the table.
    pub slot: u32,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Real server.
    pub server: SocketAddr,
    /// Local address and port.
    pub local: SocketAddr,
}

/// What happens to a local end ([`Shard::local_changes`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalChange {
    /// A connection has it.
    Bound(LocalEnd),
    /// The connection has ended: another one may have the port, or the slot.
    Released(LocalEnd),
}

impl Shard {
    /// Whether look-ups should try the slot that an entry's hash names before the tags: in the IPv4
    /// slots, and in the others. It changes as the table fills, and whoever follows later is
    /// only slower.
    pub const fn tries_homes(&self) -> [bool; 2] {
        self.table.at_home()
    }

    /// Whether it is worth to ask for an [`offer`](Self::offer): a connection has had so many
    /// packets from its client, or a multiple of that, or was published in another epoch; it is
    /// not published in this one, and nothing about itself speaks against it. 0 is no epoch.
    ///
    /// Thus one that cannot be published for another reason is looked at now and then, not with
    /// every packet.
    #[inline]
    pub fn is_ripe(&self, conn: ConnId, packets: u32, epoch: u16) -> bool {
        let entry = self.table.get(conn.0);
        if epoch == 0 {
            return false;
        }
        let worth = match entry.is_live() {
            true => entry.epoch() != epoch,
            false => entry.in_packets() >= packets && entry.in_packets().is_multiple_of(packets),
        };
        worth && is_still(entry) && is_plain(entry)
    }

    /// How many packets of a client's a connection has had.
    #[inline]
    pub fn packets_of(&self, conn: ConnId) -> u32 {
        self.table.get(conn.0).in_packets()
    }

    /// What there is to know of a connection that could be published; `None` if its next packets
    /// may be more than counted: it is not established, has no server, others have the same
    /// addresses and ports, a helper or a master's backup wants to see it, or the settings make
    /// it something else. Of a shard that is swept.
    pub fn offer(&self, conn: ConnId) -> Option<Offer> {
        if !self.table.is_used(conn.0) {
            return None;
        }
        let entry = self.table.get(conn.0);
        let (protocol, method) = (entry.protocol(), entry.method());
        let (client, virt) = (entry.client(), entry.virt());
        let ours = [client, virt]
            .iter()
            .any(|end| self.local_ports.is_used(end.ip()));
        let settings = &self.settings;
        let elsewhere = settings.master.is_some()
            || settings.backup_only
            || settings.heeds_servers() && self.links.is_masqueraded(protocol, client);
        let link = self.link(conn.0)?;
        let served = settings.serves(client.ip()) && link.server.is_available();
        let local = self.local_end(conn.0);
        if local.is_none() && method == Forwarding::FullNat {
            return None;
        }
        let offered = is_still(entry)
            && is_plain(entry)
            && self.table.is_in_place(conn.0)
            && served
            && !ours
            && !elsewhere
            && client.port() != 0;
        offered.then(|| Offer {
            protocol,
            client,
            virt,
            server: entry.server_addr(),
            method,
            tunnel: link.server.tunnel(),
            record: entry.server(),
            local: local.filter(|_| entry.epoch() == 0),
        })
    }

    /// What stands for the client of connection `index` towards its server, where both ends are
    /// translated.
    pub(super) fn local_end(&self, index: u32) -> Option<LocalEnd> {
        let entry = self.table.get(index);
        Some(LocalEnd {
            slot: index,
            protocol: entry.protocol(),
            server: entry.server_addr(),
            local: self.local_of(index)?,
        })
    }

    /// Lets a program that reads the table's memory forward the packets of a connection, as long as
    /// `epoch` is in force. `client_hop` is the program's index of the way to the client;
    /// without one it asks for each reply. `false` if the connection is not one for it: it has
    /// ended, or others have the same addresses and ports.
    ///
    /// Whatever changes the connection's state is decided here all the same: the program hands such
    /// packets up.
    pub fn publish(&mut self, conn: ConnId, epoch: u16, client_hop: Option<u16>) -> bool {
        if !self.table.is_used(conn.0) {
            return false;
        }
        let entry = self.table.get(conn.0);
        entry.set_next_hop(client_hop);
        entry.publish(epoch);
        entry.is_live()
    }

    /// From now on the packets of a connection come to userspace.
    pub fn withdraw(&mut self, conn: ConnId) {
        if self.table.is_used(conn.0) {
            self.table.get(conn.0).withdraw();
        }
    }

    /// Withdraws all connections from slot `from` on, looking at no more than `budget` slots; gives
    /// the slot from which to go on.
    pub fn withdraw_piece(&mut self, from: usize, budget: usize) -> Option<usize> {
        let (handles, next) = self.table.piece(from, budget);
        for handle in handles {
            let entry = self.table.get(handle);
            if entry.is_live() {
                entry.withdraw();
            }
        }
        next
    }

    /// Whether a program in the kernel may forward the packets of a connection.
    pub fn is_published(&self, conn: ConnId) -> bool {
        self.table.is_used(conn.0) && self.table.get(conn.0).is_live()
    }

    /// Whether the shard's copies are out of date, and a sweep is due.
    pub fn is_behind(&self) -> bool {
        self.is_stale()
    }
}

#[cfg(test)]
mod tests {
    use core::net::SocketAddr;

    use crate::*;

    fn packet(protocol: Protocol, flags: u8) -> PacketMeta<'static> {
        PacketMeta {
            hook: Hook::Local,
            tuple: Tuple {
                protocol,
                src: SocketAddr::from(([192, 0, 2, 1], 1000)),
                dst: SocketAddr::from(([198, 51, 100, 1], 80)),
            },
            transport: match protocol {
                Protocol::TCP => Transport::Tcp(TcpFlags(flags)),
                _ => Transport::Udp(&[]),
            },
            segment: Segment::NONE,
            mark: 0,
            len: 40,
        }
    }

    fn director(protocol: Protocol, forwarding: Forwarding) -> Director {
        let mut director = Director::new(Options {
            max_connections: 100,
            ..Options::default()
        });
        let virt = "198.51.100.1:80".parse().unwrap();
        let service = match protocol {
            Protocol::TCP => ServiceKey::tcp(virt),
            _ => ServiceKey::udp(virt),
        };
        let config = ServiceConfig::new(Family::V4, "rr");
        let control = &mut director.control;
        control.add_service(service, config, None).unwrap();
        let config = ServerConfig::new(1, forwarding);
        let addr = "10.0.0.1:80".parse().unwrap();
        control
            .add_server(&service, addr, &config, Instant::ZERO)
            .unwrap();
        director
    }

    fn send(director: &mut Director, meta: &PacketMeta<'_>) -> ConnId {
        match director.handle_packet(meta, Instant::ZERO) {
            Verdict::Forward(forward) => forward.conn.unwrap(),
            other => panic!("{other:?}"),
        }
    }

    /// After which of the first 64 packets a connection is offered.
    fn ripe(protocol: Protocol, forwarding: Forwarding, first: u8) -> alloc::vec::Vec<u32> {
        let mut director = director(protocol, forwarding);
        (1..=64)
            .filter(|&n| {
                let flags = if n == 1 { first } else { TcpFlags::ACK };
                let conn = send(&mut director, &packet(protocol, flags));
                director.shard.is_ripe(conn, 16, 1)
            })
            .collect()
    }

    #[test]
    fn what_cannot_be_published_is_not_offered_with_every_packet() {
        let often = [16, 32, 48, 64];
        let (nat, route) = (Forwarding::Nat, Forwarding::Route);
        assert_eq!(ripe(Protocol::UDP, nat, 0), often);
        assert_eq!(ripe(Protocol::UDP, route, 0), often);
        assert_eq!(ripe(Protocol::TCP, route, TcpFlags::SYN), often);
        assert_eq!(
            ripe(Protocol::TCP, Forwarding::Tunnel, TcpFlags::SYN),
            often
        );
        let local = ripe(Protocol::TCP, Forwarding::Local, TcpFlags::SYN);
        assert!(local.is_empty(), "{local:?}");
        // Of a connection that is being closed.
        let mut director = director(Protocol::TCP, route);
        for n in 1..=16 {
            let flags = match n {
                1 => TcpFlags::SYN,
                15 => TcpFlags::ACK | TcpFlags::FIN,
                _ => TcpFlags::ACK,
            };
            let conn = send(&mut director, &packet(Protocol::TCP, flags));
            assert!(!director.shard.is_ripe(conn, 16, 1), "{n}");
        }
    }

    #[test]
    fn what_was_published_before_a_change_is_offered_at_once() {
        let mut director = director(Protocol::UDP, Forwarding::Route);
        let meta = packet(Protocol::UDP, 0);
        let mut conn = send(&mut director, &meta);
        for _ in 0..16 {
            conn = send(&mut director, &meta);
        }
        assert!(director.shard.publish(conn, 1, None));
        assert!(!director.shard.is_ripe(conn, 16, 1) && director.shard.is_ripe(conn, 16, 2));
        assert!(!director.shard.is_ripe(conn, 16, 0), "there is no epoch");
        director.shard.withdraw(conn);
        assert!(
            !director.shard.is_ripe(conn, 16, 2),
            "not before 32 packets"
        );
    }
}
