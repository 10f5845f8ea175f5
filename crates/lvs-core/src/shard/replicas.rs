//! Replication of connections: a shard sends its own connections to peers, and stores connections
//! of peers (borrowed connections).

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;

use super::Shard;
use crate::conn::{self, NO_SLOT, State, Template, flag};
use crate::sync::bulk::{Digest, Identity, Item, Kind, Pass, Ranges, Replicas, has_place};
use crate::sync::wire::Entry;
use crate::{Forwarding, Instant, Protocol};

/// A packet counts as just received if it is not older than this.
pub(crate) const RECENT: Duration = Duration::from_secs(2);

impl Shard {
    /// Enables replication. `keys` are the hash keys of this director's digests; peers compare
    /// their replicas with the same keys. If replication is already enabled, the previous keys
    /// stay.
    pub fn keep_replicas(&mut self, keys: [u64; 2]) {
        if self.replicas.is_none() {
            self.replicas = Some(Box::new(Replicas::new(keys)));
        }
    }

    /// Sets whether any peer is subscribed to updates. If none is, discards the outgoing updates.
    pub fn set_has_receiver(&mut self, has_receiver: bool) {
        if let Some(replicas) = &mut self.replicas {
            replicas.has_receiver = has_receiver;
            if !has_receiver {
                replicas.take();
            }
        }
    }

    /// Sets the hash keys of a peer from which the shard receives updates. The number of the peer
    /// is below [`PEERS_MAX`](crate::sync::bulk::PEERS_MAX), and
    /// [`keep_replicas`](Self::keep_replicas) must have been called. The shard must not contain
    /// borrowed connections of an earlier peer with this number
    /// ([`adopt_borrowed`](Self::adopt_borrowed)).
    pub fn listen_to(&mut self, peer: usize, keys: [u64; 2]) {
        if let Some(replicas) = &mut self.replicas {
            replicas.listen_to(peer, keys);
        }
    }

    /// Whether [`take_changes`](Self::take_changes) would return changes.
    pub fn has_changes(&self) -> bool {
        self.replicas
            .as_ref()
            .is_some_and(|replicas| replicas.has_queued())
    }

    /// Number of bytes of the updates that [`take_changes`](Self::take_changes) would return.
    pub fn changes_len(&self) -> usize {
        self.replicas
            .as_ref()
            .map_or(0, |replicas| replicas.queued_len())
    }

    /// Returns the outgoing updates, and whether some of them were lost.
    pub fn take_changes(&mut self) -> (Vec<u8>, bool) {
        self.replicas
            .as_mut()
            .map_or_else(Default::default, |replicas| replicas.take())
    }

    /// Digest of the connections that this director owns.
    pub fn replicated(&self) -> Digest {
        let replicas = self.replicas.as_ref();
        replicas.map_or_else(Digest::default, |replicas| replicas.replicated().clone())
    }

    /// Digest of the connections borrowed from a peer, for a comparison with the digest that the
    /// peer sends.
    pub fn borrowed(&self, peer: usize) -> Digest {
        let replicas = self.replicas.as_ref();
        let borrowed = replicas.and_then(|replicas| replicas.borrowed(peer));
        borrowed.cloned().unwrap_or_default()
    }

    /// Returns the items of this director's connections that `pass` selects, from slot `from` on,
    /// and the slot at which the next call continues, as
    /// [`connections_piece`](Self::connections_piece). Connections without an owner that are worth
    /// replicating become owned by this director, and are returned with any `pass`.
    pub fn replicated_piece(
        &mut self,
        from: usize,
        budget: usize,
        pass: &Pass,
        now: Instant,
    ) -> (Vec<u8>, Option<usize>) {
        let (indices, next) = self.table.piece(from, budget);
        let mut out = Vec::new();
        for index in indices {
            let slot = self.table.get(index);
            if slot.has(flag::BORROWED | flag::DYING) {
                continue;
            }
            // A peer that has just subscribed has not received the report that the connection's
            // packets arrive here.
            let kind = if slot.idle(now) < RECENT {
                Kind::Comes
            } else {
                Kind::Lives
            };
            if !slot.has(flag::REPLICATED) {
                if self.is_worth(slot) {
                    self.tell(index, kind, now);
                    self.write(index, kind, now, &mut out);
                }
                continue;
            }
            let is = match pass {
                Pass::All => true,
                Pass::Since(then) => slot.last_restart() >= *then,
                Pass::Ranges(ranges) => {
                    let identity = identity(slot);
                    let replicas = self.replicas.as_ref();
                    replicas.is_some_and(|replicas| replicas.is_replicated_in(ranges, &identity))
                }
            };
            if is {
                self.write(index, kind, now, &mut out);
            }
        }
        (out, next)
    }

    /// Makes this director the owner of connections borrowed from a peer: of all of them, or with
    /// `ranges` of the connections in these ranges of the digest. Visits at most `budget` slots,
    /// from slot `from` on. Returns the slot at which the next call continues; `None` at the end.
    /// To be called when the peer has stopped, or no longer sends these connections.
    pub fn adopt_borrowed(
        &mut self,
        peer: usize,
        ranges: Option<&Ranges>,
        from: usize,
        budget: usize,
        now: Instant,
    ) -> Option<usize> {
        let (indices, next) = self.table.piece(from, budget);
        for index in indices {
            let slot = self.table.get(index);
            if slot.has(flag::BORROWED) && peer_of(slot) == peer {
                let identity = identity(slot);
                let replicas = self.replicas.as_ref();
                let is = ranges.is_none_or(|ranges| {
                    replicas
                        .is_some_and(|replicas| replicas.is_borrowed_in(peer, ranges, &identity))
                });
                if is {
                    self.strike(index);
                    self.tell(index, Kind::Lives, now);
                }
            }
        }
        next
    }

    /// Updates ownership and replication after a packet of connection `index`, which was in state
    /// `before`.
    pub(super) fn enter(&mut self, index: u32, before: State, now: Instant) {
        let slot = self.table.get(index);
        if slot.has(flag::REPLICATED) {
            if slot.state() != before {
                self.say(index, Kind::Comes, now);
            }
        } else if slot.has(flag::BORROWED) {
            // The packets of the connection arrive at this director now.
            self.strike(index);
            self.tell(index, Kind::Comes, now);
        } else if self.is_worth(slot) {
            self.tell(index, Kind::Comes, now);
        }
    }

    /// Whether a connection is worth replicating: a TCP or SCTP connection after its handshake and
    /// before its end, or another one whose client has sent as many packets as `sync_threshold`
    /// requires. Connections that a peer cannot continue are excluded, for example with full NAT,
    /// and so are the connections of this director's health checks.
    pub(super) fn is_worth(&self, slot: conn::Entry<'_>) -> bool {
        let settled = match slot.protocol() {
            // ESTABLISHED, FIN_WAIT and CLOSE_WAIT.
            Protocol::TCP => matches!(slot.state().0, 1 | 4 | 7),
            // ESTABLISHED, and the three states of the shutdown.
            Protocol::SCTP => (8..=11).contains(&slot.state().0),
            _ => slot.in_packets() >= self.settings.sysctls.sync_threshold.0,
        };
        let unfit = flag::NO_CPORT
            | flag::ONE_PACKET
            | flag::TEMPLATE
            | flag::DYING
            | flag::GONE
            | flag::PROBE;
        // The local port of full NAT belongs to this director.
        settled
            && !slot.has(unfit)
            && slot.method() != Forwarding::FullNat
            && has_place(slot.client(), slot.virt(), slot.server_addr())
    }

    /// Makes this director the owner of a connection that has no owner, and queues an update for
    /// peers.
    pub(super) fn tell(&mut self, index: u32, kind: Kind, now: Instant) {
        let slot = self.table.get(index);
        slot.set(flag::REPLICATED);
        let identity = identity(slot);
        if let Some(replicas) = &mut self.replicas {
            replicas.tell(&identity, true);
        }
        self.say(index, kind, now);
    }

    /// Ends the replication of a connection. If this director owned it, peers receive its removal.
    pub(crate) fn strike(&mut self, index: u32) {
        if self.table.get(index).has(flag::REPLICATED) {
            self.say(index, Kind::Ended, Instant::ZERO);
        }
        self.strike_quietly(index);
    }

    /// As [`strike`](Self::strike), but peers receive no removal, because the connection continues
    /// at another director.
    pub(crate) fn strike_quietly(&mut self, index: u32) {
        let slot = self.table.get(index);
        let (identity, peer) = (identity(slot), peer_of(slot));
        let (replicated, borrowed) = (slot.has(flag::REPLICATED), slot.has(flag::BORROWED));
        slot.clear(flag::REPLICATED | flag::BORROWED | flag::PEER);
        if let Some(replicas) = &mut self.replicas {
            if replicated {
                replicas.tell(&identity, false);
            }
            if borrowed {
                replicas.lend(peer, &identity, false);
            }
        }
    }

    /// Marks connection `index` as borrowed from a peer; this director must not own it.
    pub(crate) fn lend(&mut self, index: u32, peer: usize) {
        let slot = self.table.get(index);
        let number = u32::try_from(peer).unwrap_or(0);
        slot.clear(flag::PEER);
        slot.set(flag::BORROWED | number << flag::PEER_SHIFT & flag::PEER);
        let identity = identity(slot);
        if let Some(replicas) = &mut self.replicas {
            replicas.lend(peer, &identity, true);
        }
    }

    pub(crate) fn is_borrowed_by(&self, index: u32, peer: usize) -> bool {
        let slot = self.table.get(index);
        slot.has(flag::BORROWED) && peer_of(slot) == peer
    }

    fn say(&mut self, index: u32, kind: Kind, now: Instant) {
        let Some(mut out) = self
            .replicas
            .as_mut()
            .and_then(|replicas| replicas.take_buffer())
        else {
            return;
        };
        self.write(index, kind, now, &mut out);
        if kind != Kind::Ended
            && let Some(Some(template)) = self.templates.get(index)
        {
            let left = Duration::from_secs(template.timeout.load(Relaxed).into());
            write_template(template, left, &mut out);
        }
        if let Some(replicas) = &mut self.replicas {
            replicas.put_back(out);
        }
    }

    fn write(&self, index: u32, kind: Kind, now: Instant, out: &mut Vec<u8>) {
        let slot = self.table.get(index);
        let item = Item {
            kind,
            left: slot.expires().saturating_since(now),
            entry: self.entry(slot, self.sequences.get(&index).copied()),
        };
        item.write(out);
    }
}

/// Appends an item about a template, if the template is valid and has a server.
pub(crate) fn write_template(template: &Template, left: Duration, out: &mut Vec<u8>) {
    if template.invalid.load(Relaxed) || template.server.load(Relaxed) == NO_SLOT {
        return;
    }
    let engine = template.engine.as_ref();
    let entry = Entry {
        protocol: template.key.protocol,
        client: template.key.client,
        virt: template.key.virt,
        server: template.server_addr,
        flags: template.flags.load(Relaxed) & !flag::OWN,
        state: template.assured.load(Relaxed).into(),
        mark: template.mark,
        timeout: template.timeout.load(Relaxed),
        sequences: Some(template.sequences()),
        engine: engine.map(|(name, _)| name.as_bytes().into()),
        data: engine.map(|(_, data)| data.to_vec()),
    };
    let kind = Kind::Lives;
    Item { kind, left, entry }.write(out);
}

fn identity(slot: conn::Entry<'_>) -> Identity {
    Identity {
        protocol: slot.protocol(),
        client: slot.client(),
        virt: slot.virt(),
        server: slot.server_addr(),
    }
}

fn peer_of(slot: conn::Entry<'_>) -> usize {
    ((slot.flags() & flag::PEER) >> flag::PEER_SHIFT) as usize
}

#[cfg(test)]
pub(super) mod tests {
    use alloc::vec::Vec;
    use core::net::SocketAddr;
    use core::time::Duration;

    use crate::replication::{ItemResults, TakenOver};
    use crate::sync::bulk::{self, Differences, Pass, Ranges};
    use crate::*;

    /// A director with one shard, which receives the connections of another director. The other
    /// director is its peer [`PEER`].
    pub(in crate::shard) struct Side {
        pub(in crate::shard) control: Control,
        pub(in crate::shard) shard: Shard,
        keeps_ties: bool,
    }

    pub(in crate::shard) const PEER: usize = 3;

    impl Side {
        fn new(keys: [u64; 2], keeps_ties: bool) -> Self {
            let mut side = Self::without_servers(keys, keeps_ties);
            side.add_servers(Forwarding::Route);
            side
        }

        fn add_servers(&mut self, method: Forwarding) {
            let service = ServiceKey::tcp("198.51.100.1:80".parse().unwrap());
            let config = ServerConfig::new(1, method);
            for addr in ["10.0.0.1:80", "10.0.0.2:80"] {
                let addr = addr.parse().unwrap();
                self.control
                    .add_server(&service, addr, &config, Instant::ZERO)
                    .unwrap();
            }
        }

        fn without_servers(keys: [u64; 2], keeps_ties: bool) -> Self {
            Self::of(ServiceConfig::new(Family::V4, "rr"), keys, keeps_ties)
        }

        /// Creates a director with this service and no server.
        pub(in crate::shard) fn of(
            config: ServiceConfig,
            keys: [u64; 2],
            keeps_ties: bool,
        ) -> Self {
            let mut control = Control::new(Options::default());
            let service = ServiceKey::tcp("198.51.100.1:80".parse().unwrap());
            control.add_service(service, config, None).unwrap();
            let mut shard = control.shard(0).unwrap();
            shard.keep_replicas(keys);
            shard.set_has_receiver(true);
            Self {
                control,
                shard,
                keeps_ties,
            }
        }

        fn tuple(port: u16) -> Tuple {
            Self::tuple_of(SocketAddr::from(([192, 0, 2, 1], 1000 + port)))
        }

        pub(in crate::shard) fn tuple_of(client: SocketAddr) -> Tuple {
            Tuple::tcp(client, "198.51.100.1:80".parse().unwrap())
        }

        fn packet(&mut self, port: u16, flags: u8, now: Instant) -> Verdict {
            self.packet_of(Self::tuple(port).src, flags, now)
        }

        pub(in crate::shard) fn packet_of(
            &mut self,
            client: SocketAddr,
            flags: u8,
            now: Instant,
        ) -> Verdict {
            let Tuple { src, dst, .. } = Self::tuple_of(client);
            let meta = PacketMeta::tcp(Hook::Local, src, dst, flags);
            match self.shard.handle_packet(&meta, now) {
                Ok(verdict) => verdict,
                Err(pending) => self.control.admit(&mut self.shard, &meta, pending, now),
            }
        }

        fn open(&mut self, port: u16, now: Instant) {
            let _ = self.packet(port, 0x02, now);
            let _ = self.packet(port, 0x10, now);
        }

        pub(in crate::shard) fn apply_items(&mut self, bytes: &[u8], now: Instant) -> ItemResults {
            let items = bulk::parse(bytes).expect("the items are valid");
            let ties = self.keeps_ties;
            self.control
                .apply_items(&mut self.shard, PEER, ties, items, now)
        }

        /// Sends the changes of this director to the other director.
        pub(in crate::shard) fn tell(&mut self, other: &mut Self, now: Instant) -> ItemResults {
            let (bytes, lost) = self.shard.take_changes();
            assert!(!lost);
            other.apply_items(&bytes, now)
        }

        pub(in crate::shard) fn pass(&mut self, pass: &Pass, now: Instant) -> Vec<u8> {
            let (mut all, mut next) = (Vec::new(), Some(0));
            while let Some(from) = next {
                let (bytes, then) = self.shard.replicated_piece(from, 1000, pass, now);
                all.extend(bytes);
                next = then;
            }
            all
        }

        pub(in crate::shard) fn adopt(&mut self, ranges: Option<&Ranges>, now: Instant) {
            let mut next = Some(0);
            while let Some(from) = next {
                next = self.shard.adopt_borrowed(PEER, ranges, from, 1000, now);
            }
        }

        fn differ(&self, sender: &Self) -> Differences {
            let borrowed = self.shard.borrowed(PEER);
            borrowed.compare(&sender.shard.replicated())
        }

        pub(in crate::shard) fn missing(&self, sender: &Self) -> u64 {
            self.differ(sender).missing
        }
    }

    fn sides() -> (Side, Side) {
        let (mut one, mut two) = (Side::new([1, 2], true), Side::new([3, 4], false));
        one.shard.listen_to(PEER, [3, 4]);
        two.shard.listen_to(PEER, [1, 2]);
        (one, two)
    }

    pub(in crate::shard) fn at(seconds: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(seconds)
    }

    fn taken(count: u64) -> ItemResults {
        ItemResults {
            taken: TakenOver {
                taken: count,
                ..TakenOver::default()
            },
            ..ItemResults::default()
        }
    }

    #[test]
    fn connection_is_replicated_only_when_established_closed_and_removed() {
        let (mut one, mut two) = sides();
        for port in 1..=100 {
            let _ = one.packet(port, 0x02, at(1));
        }
        assert!(
            !one.shard.has_changes(),
            "half-open connections were replicated"
        );
        for port in 1..=50 {
            let _ = one.packet(port, 0x10, at(2));
        }
        assert_eq!(one.tell(&mut two, at(2)), taken(50));
        assert_eq!((two.shard.len(), two.missing(&one)), (50, 0));
        assert_eq!(
            (
                one.shard.replicated().count(),
                two.shard.borrowed(PEER).count()
            ),
            (50, 50)
        );
        // Further packets cause no update.
        let _ = one.packet(1, 0x10, at(3));
        assert!(!one.shard.has_changes());
        // The end of the connection causes two updates: one for the new state, and later one for
        // the removal.
        let _ = one.packet(1, 0x04, at(3));
        assert_eq!(one.tell(&mut two, at(3)), taken(1));
        assert_eq!(two.shard.len(), 50);
        one.shard.advance(at(30), usize::MAX);
        let results = one.tell(&mut two, at(30));
        assert_eq!((results.ended, two.shard.len()), (1, 49));
        assert_eq!(two.missing(&one), 0);
    }

    #[test]
    fn connection_of_health_check_is_not_replicated() {
        let (mut one, mut two) = sides();
        let service = ServiceKey::tcp("198.51.100.1:80".parse().unwrap());
        let server = "10.0.0.1:80".parse().unwrap();
        let check = Side::tuple(1).src;
        one.control.pin(&service, server, check, at(1)).unwrap();
        one.open(1, at(1));
        assert!(!one.shard.has_changes());
        one.open(2, at(1));
        assert_eq!(one.tell(&mut two, at(1)), taken(1));
        assert_eq!((one.shard.len(), two.shard.len()), (2, 1));
    }

    #[test]
    fn connection_is_owned_by_director_that_received_its_last_packet() {
        let (mut one, mut two) = sides();
        one.open(7, at(1));
        let server = |side: &Side| {
            let all = side.shard.connections_from(0, at(1));
            all.map(|connection| connection.server).collect::<Vec<_>>()
        };
        one.tell(&mut two, at(1));
        assert_eq!(server(&one), server(&two));
        // The connection changes its owner at once, and changes back, whichever director wins ties.
        for second in [1, 1] {
            let _ = two.packet(7, 0x10, at(second));
            assert_eq!(two.tell(&mut one, at(second)), taken(1));
            let _ = one.packet(7, 0x10, at(second));
            assert_eq!(one.tell(&mut two, at(second)), taken(1));
            assert_eq!((one.missing(&two), two.missing(&one)), (0, 0));
        }
        let _ = two.packet(7, 0x10, at(10));
        assert_eq!(
            (
                two.shard.replicated().count(),
                two.shard.borrowed(PEER).count()
            ),
            (1, 0)
        );
        assert_eq!(two.tell(&mut one, at(10)), taken(1));
        assert_eq!(
            (
                one.shard.replicated().count(),
                one.shard.borrowed(PEER).count()
            ),
            (0, 1)
        );
        assert_eq!((one.missing(&two), two.missing(&one)), (0, 0));
        let _ = one.packet(7, 0x10, at(20));
        one.tell(&mut two, at(20));
        assert_eq!(
            (
                two.shard.replicated().count(),
                two.shard.borrowed(PEER).count()
            ),
            (0, 1)
        );
        assert_eq!((one.shard.len(), two.shard.len()), (1, 1));
        assert_eq!((one.missing(&two), two.missing(&one)), (0, 0));
    }

    #[test]
    fn full_sync_assigns_connection_to_director_with_more_recent_packet() {
        let (mut one, mut two) = sides();
        // One director wins ties. The other one becomes the owner of the first one's connections
        // while no peer is subscribed, and the first one receives this with the full sync.
        one.open(7, at(10));
        one.tell(&mut two, at(10));
        let _ = one.packet(7, 0x10, at(19));
        let _ = two.packet(7, 0x10, at(20));
        two.shard.take_changes();
        let all = two.pass(&Pass::All, at(21));
        assert_eq!(one.apply_items(&all, at(21)), taken(1));
        assert_eq!(
            (
                one.shard.replicated().count(),
                two.shard.replicated().count()
            ),
            (0, 1)
        );
        assert_eq!(one.missing(&two), 0);
    }

    #[test]
    fn restarted_peer_receives_all_connections_with_remaining_timeouts() {
        let (mut one, mut two) = sides();
        for port in 1..=200 {
            one.open(port, at(1));
        }
        one.tell(&mut two, at(1));
        // The first director fails; the other one replicates the borrowed connections, with or
        // without packets since.
        for port in 1..=100 {
            let _ = two.packet(port, 0x10, at(5));
        }
        two.adopt(None, at(6));
        assert_eq!(
            (
                two.shard.replicated().count(),
                two.shard.borrowed(PEER).count()
            ),
            (200, 0)
        );
        let mut one = Side::new([5, 6], true);
        one.shard.listen_to(PEER, [3, 4]);
        two.shard.listen_to(PEER, [5, 6]);
        two.shard.take_changes();
        let all = two.pass(&Pass::All, at(7));
        assert_eq!(bulk::count(&all), 200);
        assert_eq!(one.apply_items(&all, at(7)), taken(200));
        assert_eq!(one.missing(&two), 0);
        // Old replicas expire at the same time as the connections would at the sender.
        assert!(one.shard.connections_from(0, at(7)).all(|connection| {
            connection.expires <= Duration::from_secs(900)
                && connection.expires >= Duration::from_secs(893)
        }));
        let _ = one.packet(7, 0x10, at(8));
        one.tell(&mut two, at(8));
        assert_eq!(
            (
                two.shard.replicated().count(),
                two.shard.borrowed(PEER).count()
            ),
            (199, 1)
        );
    }

    #[test]
    fn replicated_tunnel_binds_to_server_added_later() {
        let mut one = Side::without_servers([1, 2], true);
        one.add_servers(Forwarding::Tunnel);
        let mut two = Side::without_servers([3, 4], false);
        two.shard.listen_to(PEER, [1, 2]);
        one.open(7, at(1));
        assert_eq!(one.tell(&mut two, at(1)), taken(1));
        let unbound = Verdict::Drop(DropReason::Unbound);
        assert_eq!(two.packet(7, 0x10, at(2)), unbound);
        two.control.bind_unbound(&mut two.shard, &Side::tuple(7));
        assert_eq!(
            two.packet(7, 0x10, at(2)),
            unbound,
            "the connection was forwarded before its server was added"
        );
        two.add_servers(Forwarding::Tunnel);
        two.control.bind_unbound(&mut two.shard, &Side::tuple(7));
        assert!(matches!(two.packet(7, 0x10, at(3)), Verdict::Forward(_)));
        // A connection that does not exist is ignored.
        two.control.bind_unbound(&mut two.shard, &Side::tuple(8));
    }

    #[test]
    fn lost_update_is_detected_and_resent() {
        let (mut one, mut two) = sides();
        for port in 1..=300 {
            one.open(port, at(1));
        }
        let (all, _) = one.shard.take_changes();
        let mut items = bulk::parse(&all).unwrap();
        items.remove(17);
        two.control
            .apply_items(&mut two.shard, PEER, false, items, at(1));
        let differ = two.differ(&one);
        assert_eq!(
            (differ.replicated, differ.missing, differ.ranges.len()),
            (300, 1, 1)
        );
        let ranges = Ranges::new(differ.ranges);
        two.adopt(Some(&ranges), at(2));
        let again = one.pass(&Pass::Ranges(ranges), at(2));
        assert!(bulk::count(&again) < 10);
        two.apply_items(&again, at(2));
        // If both directors had the connection, the full syncs determine one owner.
        two.tell(&mut one, at(2));
        one.tell(&mut two, at(2));
        assert_eq!((one.missing(&two), two.missing(&one)), (0, 0));
        assert_eq!((one.shard.len(), two.shard.len()), (300, 300));
    }

    #[test]
    fn connection_owned_by_two_directors_gets_one_owner() {
        let (mut one, mut two) = sides();
        one.open(7, at(1));
        one.tell(&mut two, at(1));
        // The directors were disconnected for some time.
        two.adopt(None, at(2));
        assert_eq!(
            (
                one.shard.replicated().count(),
                two.shard.replicated().count()
            ),
            (1, 1)
        );
        one.shard.take_changes();
        two.shard.take_changes();
        let (first, second) = (one.pass(&Pass::All, at(3)), two.pass(&Pass::All, at(3)));
        assert_eq!(two.apply_items(&first, at(3)), taken(1));
        let kept = one.apply_items(&second, at(3));
        assert_eq!((kept.kept, kept.taken.taken), (1, 0));
        assert_eq!(
            (
                one.shard.replicated().count(),
                two.shard.replicated().count()
            ),
            (1, 0)
        );
        assert_eq!(one.missing(&two), 0);
    }

    #[test]
    fn connections_to_servers_of_other_family_are_not_replicated() {
        let (mut one, mut two) = sides();
        let service = ServiceKey::tcp("198.51.100.1:80".parse().unwrap());
        for addr in ["10.0.0.1:80", "10.0.0.2:80"] {
            let addr = addr.parse().unwrap();
            one.control.delete_server(&service, addr, at(0)).unwrap();
        }
        let config = ServerConfig::new(1, Forwarding::Tunnel);
        let server = "[2001:db8::1]:80".parse().unwrap();
        one.control
            .add_server(&service, server, &config, at(0))
            .unwrap();
        one.open(7, at(1));
        assert_eq!(one.shard.len(), 1);
        assert!(!one.shard.has_changes() && one.pass(&Pass::All, at(2)).is_empty());
        assert_eq!(one.tell(&mut two, at(2)), ItemResults::default());
        assert_eq!(two.missing(&one), 0);
    }

    #[test]
    fn partial_sync_resends_only_connections_with_recent_packets() {
        let (mut one, mut two) = sides();
        for port in 1..=10 {
            one.open(port, at(1));
        }
        one.tell(&mut two, at(1));
        let _ = one.packet(4, 0x10, at(100));
        let again = one.pass(&Pass::Since(at(50)), at(110));
        assert_eq!(bulk::count(&again), 1);
        two.apply_items(&again, at(110));
        two.shard.advance(at(950), usize::MAX);
        assert_eq!(
            two.shard.len(),
            1,
            "the connection has expired, although it was sent again"
        );
        assert_eq!(
            two.missing(&one),
            9,
            "not exactly the nine expired connections are missing"
        );
    }

    #[test]
    fn shard_without_replication_ignores_updates() {
        let (mut one, _) = sides();
        one.open(7, at(1));
        let (all, _) = one.shard.take_changes();
        let mut control = Control::new(Options::default());
        let mut shard = control.shard(0).unwrap();
        let items = bulk::parse(&all).unwrap();
        let results = control.apply_items(&mut shard, PEER, true, items, at(1));
        assert_eq!((results, shard.len()), (ItemResults::default(), 0));
    }
}
