//! Offload: marks connections in the table, so that the kernel fast path, which reads the same
//! memory, forwards their packets.

use core::fmt;
use core::net::SocketAddr;
use core::sync::atomic::Ordering;

use super::Shard;
use crate::conn::{Entry, NO_SLOT, State, flag};
use crate::tunnel::Tunnel;
use crate::{ConnId, Forwarding, Protocol};

/// Flags of connections that cannot be offloaded, and the reasons; if several flags are set, the
/// first one is reported.
const REASONS: [(u32, Unpublished); 10] = [
    (flag::HELPED, Unpublished::Helped),
    (flag::ONE_PACKET, Unpublished::OnePacket),
    (flag::GONE, Unpublished::ServerDown),
    (flag::TIMED, Unpublished::Timed),
    (flag::OUT_SEQ | flag::IN_SEQ, Unpublished::Adjusted),
    (flag::NO_CPORT, Unpublished::NoClientPort),
    (flag::CONTROLS, Unpublished::Controls),
    (flag::TEMPLATE, Unpublished::Template),
    (flag::PROBE, Unpublished::HealthCheck),
    (flag::DYING, Unpublished::Ended),
];

/// Each flag that prevents the offload is in `REASONS`, and no other flag is.
const _: () = {
    let (mut all, mut number) = (0, 0);
    while number < REASONS.len() {
        all |= REASONS[number].0;
        number += 1;
    }
    assert!(all == flag::USERSPACE);
};

/// The reason why the kernel fast path must not forward the packets of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unpublished {
    /// The connection has ended.
    Ended,
    /// The next packet may change the connection's state.
    NotEstablished,
    /// The protocol is neither TCP nor UDP.
    Protocol,
    /// The service is persistent and uses UDP, and no server has answered its client yet. The
    /// answer protects the client's template.
    PersistentUdp,
    /// A through-VIP health check opened the connection. The dataplane must check which host
    /// forwarded each reply.
    HealthCheck,
    /// A helper (FTP) inspects the connection's payload.
    Helped,
    /// The connection ends with its first packet.
    OnePacket,
    /// The server was removed, and the connection does not continue if the server is added again.
    ServerDown,
    /// The time until the server's first answer is being measured.
    Timed,
    /// A synchronisation message contained an adjustment of the connection's sequence numbers.
    Adjusted,
    /// The client's port is unknown or 0.
    NoClientPort,
    /// The connection controls other entries.
    Controls,
    /// The entry is a persistence template.
    Template,
    /// The server has not answered yet.
    Unanswered,
    /// The kernel fast path does not support the server's forwarding method.
    Method,
    /// The connection has no server, or its server was removed.
    NoServer,
    /// Full NAT has no local port for the connection.
    NoLocalPort,
    /// The connection is in the table's overflow.
    Exception,
    /// No service of the connection's address family exists.
    Family,
    /// The client's address or the virtual address is also a local address of full NAT.
    LocalAddress,
    /// The director is only a backup, and forwards no packets.
    BackupOnly,
    /// The connection's client is itself a server with NAT.
    ClientIsServer,
}

impl fmt::Display for Unpublished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ended => "the connection has ended",
            Self::NotEstablished => "the connection is not established",
            Self::Protocol => "the protocol is neither TCP nor UDP",
            Self::PersistentUdp => "the service is persistent and uses UDP, and no server has answered the client yet",
            Self::HealthCheck => "a health check through the virtual address opened the connection",
            Self::Helped => "a helper inspects the packets of the connection",
            Self::OnePacket => "the service uses one-packet scheduling",
            Self::ServerDown => "the server was removed, and the connection does not continue if the server is added again",
            Self::Timed => "the server has not answered yet, and its response time is measured",
            Self::Adjusted => "the sequence numbers of the connection are adjusted",
            Self::NoClientPort => "the client's port is unknown or 0",
            Self::Controls => "the connection controls other connections",
            Self::Template => "the entry is a persistence template",
            Self::Unanswered => "the server has not answered yet",
            Self::Method => "the forwarding method is not NAT, full NAT, direct routing or a tunnel",
            Self::NoServer => "the connection has no server, or its server was removed",
            Self::NoLocalPort => "full NAT has no local port for the connection",
            Self::Exception => {
                "the table stores the connection in the overflow: other connections have the same addresses and ports, or its part of the table is full"
            }
            Self::Family => "no service has the address family of the connection",
            Self::LocalAddress => "a local address of full NAT is also the client's address or the virtual address",
            Self::BackupOnly => "a backup forwards no packets (backup_only)",
            Self::ClientIsServer => "the client is a server behind NAT",
        })
    }
}

impl core::error::Error for Unpublished {}

/// The reason why the next packet may change the state of a connection, as far as its slot shows.
#[inline]
fn what_changes(entry: Entry<'_>) -> Option<Unpublished> {
    match entry.protocol() {
        Protocol::TCP if entry.state() == State::TCP_ESTABLISHED => None,
        Protocol::UDP if entry.state() == State::NONE => {
            // A server's answer to a persistent client marks the client's template as assured.
            (entry.control() != NO_SLOT).then_some(Unpublished::PersistentUdp)
        }
        Protocol::TCP | Protocol::UDP => Some(Unpublished::NotEstablished),
        _ => Some(Unpublished::Protocol),
    }
}

/// Whether the next packet cannot change the state of a connection.
#[inline]
pub(super) fn is_still(entry: Entry<'_>) -> bool {
    what_changes(entry).is_none()
}

/// The reason why the kernel fast path cannot process the packets of a connection, as far as its
/// slot shows.
#[inline]
fn what_else(entry: Entry<'_>) -> Option<Unpublished> {
    let flags = entry.flags();
    if flags & flag::USERSPACE != 0 {
        let mut reasons = REASONS.iter();
        return reasons
            .find(|(flag, _)| flags & flag != 0)
            .map(|&(_, reason)| reason);
    }
    match entry.method() {
        Forwarding::Nat | Forwarding::FullNat => {
            (flags & flag::NO_OUTPUT != 0).then_some(Unpublished::Unanswered)
        }
        Forwarding::Route | Forwarding::Tunnel => None,
        _ => Some(Unpublished::Method),
    }
}

/// State of a connection before and during its offload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadState {
    /// The epoch is 0: no connection can be offloaded now.
    NoEpoch,
    /// The connection is offloaded in this epoch.
    Published,
    /// The connection was offloaded in another epoch.
    Stale,
    /// The client has sent too few packets.
    Early,
    /// The client has sent enough packets; the connection is checked again when the number of
    /// packets is a multiple of the required number.
    Between,
    /// The connection must be offloaded now.
    Due,
}

#[inline]
fn offload_state(entry: Entry<'_>, packets: u32, epoch: u16) -> OffloadState {
    if epoch == 0 {
        return OffloadState::NoEpoch;
    }
    if entry.is_live() {
        return match entry.epoch() == epoch {
            true => OffloadState::Published,
            false => OffloadState::Stale,
        };
    }
    let sent = entry.in_packets();
    if sent < packets {
        OffloadState::Early
    } else if sent.is_multiple_of(packets) {
        OffloadState::Due
    } else {
        OffloadState::Between
    }
}

/// An offload plan: the data of a connection, for which the caller finds the next hops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The protocol of the connection: TCP or UDP.
    pub protocol: Protocol,
    /// Address and port of the client.
    pub client: SocketAddr,
    /// Virtual address and port of the connection.
    pub virt: SocketAddr,
    /// Address and port of the real server.
    pub server: SocketAddr,
    /// Forwarding method of the connection.
    pub method: Forwarding,
    /// Encapsulation, if `method` is [`Forwarding::Tunnel`].
    pub tunnel: Tunnel,
    /// The number of the server's record.
    pub record: u32,
    /// Local address and port with full NAT; `None` with other methods, or if the connection was
    /// offloaded before.
    pub local: Option<LocalEnd>,
}

/// Local address and port of a full-NAT connection towards its server. They are not in the
/// connection's slot: the kernel fast path stores them by slot, for requests, and by addresses and
/// ports, for replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalEnd {
    /// The number of the connection's slot in the table.
    pub slot: u32,
    /// The protocol of the connection: TCP or UDP.
    pub protocol: Protocol,
    /// Address and port of the real server.
    pub server: SocketAddr,
    /// The local address and port from which the server receives the client's packets.
    pub local: SocketAddr,
}

/// Change of a local address and port ([`Shard::local_changes`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalChange {
    /// A connection uses the local address and port.
    Bound(LocalEnd),
    /// The connection has ended: another connection may use the port, or the slot.
    Released(LocalEnd),
}

impl Shard {
    /// Whether look-ups should read an entry's home slot before the tags. The first value is for
    /// narrow (IPv4) slots, the second for wide slots. This changes as the table fills. A program
    /// that uses an old value is slower, and finds the same entries.
    pub const fn tries_homes(&self) -> [bool; 2] {
        self.table.at_home()
    }

    /// Whether the caller should call [`offer`](Self::offer). This is the case if nothing in the
    /// connection prevents the offload, and either the connection is not offloaded and its client
    /// has sent `packets` packets or a multiple of this number, or the connection was offloaded in
    /// another epoch. In epoch 0, no connection is offloaded.
    ///
    /// [`offer`](Self::offer) can still refuse the connection for another reason. Such a connection
    /// is thus examined only periodically.
    #[inline]
    pub fn is_offload_due(&self, conn: ConnId, packets: u32, epoch: u16) -> bool {
        let entry = self.table.get(conn.0);
        let offload_state = offload_state(entry, packets, epoch);
        matches!(offload_state, OffloadState::Stale | OffloadState::Due)
            && self.what_changes(conn.0, entry).is_none()
            && what_else(entry).is_none()
    }

    /// Returns the state of a connection before and during offload; it does not include the reasons
    /// against offload.
    pub fn offload_state(&self, conn: ConnId, packets: u32, epoch: u16) -> OffloadState {
        offload_state(self.table.get(conn.0), packets, epoch)
    }

    /// Number of the client's packets in a connection.
    #[inline]
    pub fn packets_of(&self, conn: ConnId) -> u32 {
        self.table.get(conn.0).in_packets()
    }

    /// Local address and port of a full-NAT connection towards its server; `None` with other
    /// forwarding methods.
    pub fn local_address_of(&self, conn: ConnId) -> Option<SocketAddr> {
        self.local_of(conn.0)
    }

    /// Offload plan of a connection. The shard's copies of settings must be up to date
    /// ([`is_behind`](Self::is_behind)).
    ///
    /// # Errors
    /// The reason why the connection cannot be offloaded.
    pub fn offer(&self, conn: ConnId) -> Result<Offer, Unpublished> {
        if !self.table.is_used(conn.0) {
            return Err(Unpublished::Ended);
        }
        let entry = self.table.get(conn.0);
        let (protocol, method) = (entry.protocol(), entry.method());
        let (client, virt) = (entry.client(), entry.virt());
        let link = self.link(conn.0);
        let link = link.filter(|link| link.server.is_available());
        let link = link.ok_or(Unpublished::NoServer)?;
        if let Some(reason) = self
            .what_changes(conn.0, entry)
            .or_else(|| what_else(entry))
            .or_else(|| self.what_speaks_against(conn, entry))
        {
            return Err(reason);
        }
        let local = self.local_end(conn.0);
        if local.is_none() && method == Forwarding::FullNat {
            return Err(Unpublished::NoLocalPort);
        }
        Ok(Offer {
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

    /// The reason why the next packet may change the state of a connection or of its template. The
    /// first reply marks a template as assured; with direct routing and tunnels, replies do not
    /// pass through this host.
    fn what_changes(&self, index: u32, entry: Entry<'_>) -> Option<Unpublished> {
        let reason = what_changes(entry)?;
        let template = self.templates.get(index).and_then(Option::as_ref);
        let stays = reason == Unpublished::PersistentUdp
            && template.is_some_and(|template| {
                !entry.method().translates() || template.assured.load(Ordering::Relaxed)
            });
        (!stays).then_some(reason)
    }

    /// A reason against the offload that is in the settings, or in state outside of the slot.
    fn what_speaks_against(&self, conn: ConnId, entry: Entry<'_>) -> Option<Unpublished> {
        let (client, virt) = (entry.client(), entry.virt());
        let settings = &self.settings;
        let ours = |end: SocketAddr| self.local_ports.is_used(end.ip());
        let behind_nat = || self.links.is_masqueraded(entry.protocol(), client);
        let reason = if settings.backup_only {
            Unpublished::BackupOnly
        } else if settings.heeds_servers() && behind_nat() {
            Unpublished::ClientIsServer
        } else if ours(client) || ours(virt) {
            Unpublished::LocalAddress
        } else if !settings.serves(client.ip()) {
            Unpublished::Family
        } else if client.port() == 0 {
            Unpublished::NoClientPort
        } else if !self.table.is_in_place(conn.0) {
            Unpublished::Exception
        } else {
            return None;
        };
        Some(reason)
    }

    /// Local address and port of connection `index` towards its server, if it uses full NAT.
    pub(super) fn local_end(&self, index: u32) -> Option<LocalEnd> {
        let entry = self.table.get(index);
        Some(LocalEnd {
            slot: index,
            protocol: entry.protocol(),
            server: entry.server_addr(),
            local: self.local_of(index)?,
        })
    }

    /// Offloads a connection: a BPF program that reads the table's memory forwards its packets, as
    /// long as `epoch` is the current one. `client_hop` is the program's index of the next hop to
    /// the client; without it, the program looks up the next hop of each reply. Returns `false` if
    /// the connection is not offloaded, for example because it has ended, or because another
    /// connection has the same addresses and ports.
    ///
    /// The program passes packets that change the state of the connection to the dataplane, so that
    /// the shard decides about them.
    pub fn publish(&mut self, conn: ConnId, epoch: u16, client_hop: Option<u16>) -> bool {
        if !self.table.is_used(conn.0) {
            return false;
        }
        let entry = self.table.get(conn.0);
        entry.set_next_hop(client_hop);
        // The shard would not see the server's first answer.
        entry.clear(flag::AWAITED);
        entry.publish(epoch);
        let (live, packets) = (entry.is_live(), entry.in_packets());
        if live && self.has_master() && self.table.sync_packets(conn.0).is_none() {
            self.table.set_sync_packets(conn.0, Some(packets));
        }
        if live {
            self.down.miss(conn.0);
        }
        live
    }

    /// Evicts a connection from the kernel fast path: its next packets are handled in userspace.
    pub fn withdraw(&mut self, conn: ConnId) {
        if self.table.is_used(conn.0) {
            self.table.get(conn.0).withdraw();
        }
    }

    /// Evicts the connections in at most `budget` slots, from slot `from` on, from the kernel fast
    /// path. Returns the slot at which the next call continues; `None` at the end.
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

    /// Whether the shard's copies of the configuration are out of date, so that
    /// [`Control::sweep`](crate::Control::sweep) must be called.
    pub fn is_behind(&self) -> bool {
        self.is_stale()
    }
}

#[cfg(test)]
mod tests {
    use core::net::SocketAddr;

    use crate::offload::{OffloadState, Unpublished};
    use crate::*;

    fn packet(protocol: Protocol, flags: u8) -> PacketMeta<'static> {
        PacketMeta::new(
            Hook::Local,
            Tuple::new(
                protocol,
                SocketAddr::from(([192, 0, 2, 1], 1000)),
                SocketAddr::from(([198, 51, 100, 1], 80)),
            ),
            match protocol {
                Protocol::TCP => Transport::Tcp(TcpFlags(flags)),
                _ => Transport::Udp(&[]),
            },
            40,
        )
    }

    fn director(protocol: Protocol, forwarding: Forwarding) -> Director {
        director_with(protocol, forwarding, 0)
    }

    fn director_with(protocol: Protocol, forwarding: Forwarding, flags: u32) -> Director {
        let mut director = Director::new(Options {
            max_connections: 100,
            ..Options::default()
        });
        let virt = "198.51.100.1:80".parse().unwrap();
        let service = match protocol {
            Protocol::TCP => ServiceKey::tcp(virt),
            _ => ServiceKey::udp(virt),
        };
        let mut config = ServiceConfig::new(Family::V4, "rr");
        config.flags = ServiceFlags(flags);
        config.timeout = 300;
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

    /// Opens a connection with 64 packets, and returns the numbers (from 1) of the packets after
    /// which its offload is due.
    fn due(protocol: Protocol, forwarding: Forwarding, first: u8) -> alloc::vec::Vec<u32> {
        let mut director = director(protocol, forwarding);
        (1..=64)
            .filter(|&n| {
                let flags = if n == 1 { first } else { TcpFlags::ACK };
                let conn = send(&mut director, &packet(protocol, flags));
                director.shard.is_offload_due(conn, 16, 1)
            })
            .collect()
    }

    #[test]
    fn offload_is_due_every_16_packets_and_never_for_local_or_closing_connection() {
        let often = [16, 32, 48, 64];
        let (nat, route) = (Forwarding::Nat, Forwarding::Route);
        assert_eq!(due(Protocol::UDP, nat, 0), often);
        assert_eq!(due(Protocol::UDP, route, 0), often);
        assert_eq!(due(Protocol::TCP, route, TcpFlags::SYN), often);
        assert_eq!(due(Protocol::TCP, Forwarding::Tunnel, TcpFlags::SYN), often);
        let local = due(Protocol::TCP, Forwarding::Local, TcpFlags::SYN);
        assert!(local.is_empty(), "{local:?}");
        // A connection that is being closed.
        let mut director = director(Protocol::TCP, route);
        for n in 1..=16 {
            let flags = match n {
                1 => TcpFlags::SYN,
                15 => TcpFlags::ACK | TcpFlags::FIN,
                _ => TcpFlags::ACK,
            };
            let conn = send(&mut director, &packet(Protocol::TCP, flags));
            assert!(
                !director.shard.is_offload_due(conn, 16, 1),
                "offload is due after packet {n} of a connection that is closed by packet 15"
            );
        }
    }

    #[test]
    fn offload_is_due_at_once_in_new_epoch_but_not_at_once_after_eviction() {
        let mut director = director(Protocol::UDP, Forwarding::Route);
        let meta = packet(Protocol::UDP, 0);
        let mut conn = send(&mut director, &meta);
        for _ in 0..16 {
            conn = send(&mut director, &meta);
        }
        assert!(director.shard.publish(conn, 1, None));
        assert!(
            !director.shard.is_offload_due(conn, 16, 1)
                && director.shard.is_offload_due(conn, 16, 2)
        );
        assert!(
            !director.shard.is_offload_due(conn, 16, 0),
            "offload is due in epoch 0"
        );
        director.shard.withdraw(conn);
        assert!(
            !director.shard.is_offload_due(conn, 16, 2),
            "offload is due before the next multiple of 16 packets"
        );
    }

    #[test]
    fn backup_only_is_reported_as_reason_against_offload() {
        let meta = packet(Protocol::UDP, 0);
        let route = Forwarding::Route;
        let mut backup = director(Protocol::UDP, route);
        let conn = send(&mut backup, &meta);
        assert!(backup.shard.offer(conn).is_ok());
        let heard = sync::Backup::new(1, None, 1500, false);
        backup.control.start_backup(heard).unwrap();
        backup.control.set_sysctl("backup_only", "1").unwrap();
        backup.control.sweep(&mut backup.shard);
        let why = backup.shard.offer(conn).err();
        assert_eq!(why, Some(Unpublished::BackupOnly));
    }

    #[test]
    fn persistent_udp_connection_is_offloadable_after_reply_or_if_replies_bypass_director() {
        let persistent = |method| director_with(Protocol::UDP, method, ServiceFlags::PERSISTENT);
        let meta = packet(Protocol::UDP, 0);
        let mut nat = persistent(Forwarding::Nat);
        let conn = send(&mut nat, &meta);
        let why = nat.shard.offer(conn).err();
        assert_eq!(why, Some(Unpublished::PersistentUdp));
        let answer = PacketMeta {
            tuple: Tuple::udp("10.0.0.1:80".parse().unwrap(), meta.tuple.src),
            ..meta
        };
        let verdict = nat.handle_packet(&answer, Instant::ZERO);
        assert!(matches!(verdict, Verdict::Reply(_)), "{verdict:?}");
        assert!(nat.shard.offer(conn).is_ok());
        // No reply passes through the director, so no reply can change the template.
        for method in [Forwarding::Route, Forwarding::Tunnel] {
            let mut director = persistent(method);
            let conn = send(&mut director, &meta);
            assert!(director.shard.offer(conn).is_ok(), "{method:?}");
        }
    }

    #[test]
    fn connection_of_ewma_service_is_offloadable_after_measured_handshake() {
        let mut director = director(Protocol::TCP, Forwarding::Nat);
        let service = ServiceKey::tcp("198.51.100.1:80".parse().unwrap());
        let config = ServiceConfig::new(Family::V4, "ewma");
        director
            .control
            .edit_service(&service, config, None)
            .unwrap();
        let request = |flags| packet(Protocol::TCP, flags);
        let conn = send(&mut director, &request(TcpFlags::SYN));
        let to_client = Tuple::tcp("10.0.0.1:80".parse().unwrap(), request(0).tuple.src);
        let answer = PacketMeta {
            tuple: to_client,
            ..request(TcpFlags::SYN | TcpFlags::ACK)
        };
        let millisecond = Instant::from_nanos(1_000_000);
        let _ = director.handle_packet(&answer, millisecond);
        let server = director.control.service(&service).unwrap().servers()[0].clone();
        assert!(
            server.latency().average(millisecond).is_some(),
            "the latency was not measured at the handshake"
        );
        send(&mut director, &request(TcpFlags::ACK));
        assert!(director.shard.offer(conn).is_ok());
    }

    #[test]
    fn offload_refusal_names_state_or_method_and_offload_state_follows_packets_and_epoch() {
        let why = |director: &Director, conn| director.shard.offer(conn).err();
        let mut nat = director(Protocol::TCP, Forwarding::Nat);
        let conn = send(&mut nat, &packet(Protocol::TCP, TcpFlags::SYN));
        assert_eq!(why(&nat, conn), Some(Unpublished::NotEstablished));
        let mut nat = director(Protocol::UDP, Forwarding::Nat);
        let conn = send(&mut nat, &packet(Protocol::UDP, 0));
        assert_eq!(nat.shard.offload_state(conn, 16, 1), OffloadState::Early);
        assert_eq!(why(&nat, conn), None);
        let mut local = director(Protocol::UDP, Forwarding::Local);
        let conn = send(&mut local, &packet(Protocol::UDP, 0));
        assert_eq!(why(&local, conn), Some(Unpublished::Method));

        let mut route = director(Protocol::UDP, Forwarding::Route);
        let meta = packet(Protocol::UDP, 0);
        let conn = send(&mut route, &meta);
        assert_eq!(why(&route, conn), None);
        for n in 2..=17 {
            send(&mut route, &meta);
            let expected = match n {
                16 => OffloadState::Due,
                17 => OffloadState::Between,
                _ => OffloadState::Early,
            };
            assert_eq!(
                route.shard.offload_state(conn, 16, 1),
                expected,
                "after packet {n}"
            );
        }
        assert!(route.shard.publish(conn, 1, None));
        let offload_state = [0, 1, 2].map(|epoch| route.shard.offload_state(conn, 16, epoch));
        let expected = [
            OffloadState::NoEpoch,
            OffloadState::Published,
            OffloadState::Stale,
        ];
        assert_eq!(offload_state, expected);
    }
}
