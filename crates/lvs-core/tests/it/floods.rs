//! The effect of floods on a full table, and on other clients.

use std::net::SocketAddr;
use std::time::Duration;

use lvs_core::full_nat::LocalAddress;
use lvs_core::settings::{Extras, Limits, WhenFull};
use lvs_core::sync::{Backup, wire::Entry};
use lvs_core::{
    Director, DropReason, Family, Forwarding, Instant, Options, Protocol, ServerConfig,
    ServiceConfig, ServiceFlags, ServiceKey, TcpFlags, Transport, Verdict,
};

use crate::common::{VIP, addr, packet, server};

const SYN: u8 = TcpFlags::SYN;
const ACK: u8 = TcpFlags::ACK;

/// The address and port of source number `n`.
fn source(n: u32) -> SocketAddr {
    let [_, a, b, c] = n.to_be_bytes();
    SocketAddr::from(([10 + (n >> 24) as u8, a, b, c], 1024 + (n % 60_000) as u16))
}

struct Bed {
    director: Director,
    now: Instant,
}

impl Bed {
    fn new(
        slots: usize,
        when_full: WhenFull,
        key: ServiceKey,
        config: ServiceConfig,
        method: Forwarding,
    ) -> Self {
        let mut director = Director::new(Options {
            max_connections: slots,
            when_full,
            ..Options::default()
        });
        let now = Instant::from_secs(1);
        director.advance(now);
        let control = &mut director.control;
        if method == Forwarding::FullNat {
            let pool = LocalAddress {
                addr: "10.0.0.100".parse().unwrap(),
                first: 1024,
                last: 1033,
            };
            control.set_local_pool(vec![pool], false).unwrap();
        }
        control.add_service(key, config, None).unwrap();
        for n in 1..=2 {
            let config = ServerConfig::new(1, method);
            control.add_server(&key, server(n), &config, now).unwrap();
        }
        Self { director, now }
    }

    fn tcp(slots: usize, when_full: WhenFull, method: Forwarding, extras: Extras) -> Self {
        let config = ServiceConfig {
            extras,
            ..ServiceConfig::new(Family::V4, "rr")
        };
        Self::new(slots, when_full, ServiceKey::tcp(addr(VIP)), config, method)
    }

    fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
        self.director.advance(self.now);
    }

    fn send(&mut self, src: SocketAddr, flags: u8) -> Verdict {
        let meta = packet(src, addr(VIP), Transport::Tcp(TcpFlags(flags)));
        self.director.handle_packet(&meta, self.now)
    }

    /// Passes a packet to the director, and returns the server to which it is forwarded; `None` if
    /// it is not forwarded.
    fn opens(&mut self, src: SocketAddr, flags: u8) -> Option<SocketAddr> {
        match self.send(src, flags) {
            Verdict::Forward(forward) => Some(forward.target),
            _ => None,
        }
    }

    fn reply(&mut self, from: SocketAddr, to: SocketAddr, flags: u8) {
        let meta = packet(from, to, Transport::Tcp(TcpFlags(flags)));
        let _ = self.director.handle_packet(&meta, self.now);
    }

    /// Sends the SYN, SYN+ACK and ACK of a handshake and then a request; `false` if one of the
    /// client's packets is not forwarded to the server.
    fn connect(&mut self, src: SocketAddr) -> bool {
        let Some(server) = self.opens(src, SYN) else {
            return false;
        };
        self.reply(server, src, SYN | ACK);
        self.opens(src, ACK) == Some(server) && self.opens(src, ACK) == Some(server)
    }
}

#[test]
fn syn_flood_of_full_table_evicts_only_flood_connections() {
    const SLOTS: u32 = 4096;
    for method in [Forwarding::Nat, Forwarding::Route] {
        let mut bed = Bed::tcp(SLOTS as usize, WhenFull::Evict, method, Extras::default());
        let old: Vec<SocketAddr> = (0..500).map(|n| source(0x0100_0000 + n)).collect();
        for &client in &old {
            assert!(bed.connect(client));
        }
        // For each hundred SYNs with forged sources, there is one honest client, whose handshake
        // takes as long as 500 such SYNs. The SYNs would fill the table ten times.
        let (mut served, mut honest, mut waiting) = (0, 0, Vec::new());
        for n in 0..10 * SLOTS {
            assert!(bed.opens(source(0x0200_0000 + n), SYN).is_some());
            if n % 100 == 0 {
                let client = source(0x0300_0000 + n);
                let server = bed.opens(client, SYN).expect("a full table makes room");
                waiting.push((n, client, server));
                honest += 1;
            }
            while let Some(&(since, client, server)) = waiting.first().filter(|of| of.0 + 500 < n) {
                waiting.remove(0);
                bed.reply(server, client, SYN | ACK);
                served += u32::from(bed.opens(client, ACK) == Some(server));
                served += u32::from(bed.opens(client, ACK) == Some(server));
                assert!(since < n);
            }
            if n % 100 == 0 {
                bed.pass(Duration::from_millis(1));
            }
        }
        assert_eq!(served as usize, 2 * (honest - waiting.len()), "{method:?}");
        for &client in &old {
            assert!(
                bed.opens(client, ACK).is_some(),
                "the established connection of {client} was evicted"
            );
        }
        let evicted = bed.director.shard.evictions();
        assert!(evicted.half_open > 0 && evicted.idle == 0, "{evicted:?}");
        assert_eq!(bed.director.shard.len(), SLOTS as usize);
    }
}

#[test]
fn unused_connections_are_evicted_from_full_table() {
    let mut bed = Bed::tcp(1024, WhenFull::Evict, Forwarding::Route, Extras::default());
    let mut refused = 0;
    for n in 0..10_000 {
        let client = source(n);
        refused += u32::from(bed.opens(client, SYN).is_none());
        let _ = bed.send(client, ACK);
        bed.pass(Duration::from_millis(10));
    }
    assert_eq!(refused, 0);
    assert!(bed.director.shard.evictions().unused > 0);
}

#[test]
fn full_table_evicts_connection_idle_for_60_seconds_and_none_with_recent_data() {
    let mut bed = Bed::tcp(256, WhenFull::Evict, Forwarding::Nat, Extras::default());
    for n in 0..256 {
        assert!(bed.connect(source(n)));
    }
    let full = Verdict::Drop(DropReason::TableFull);
    assert_eq!(bed.send(addr("192.0.2.1:1"), SYN), full);
    bed.pass(Duration::from_secs(59));
    assert_eq!(bed.send(addr("192.0.2.1:1"), SYN), full);
    // A minute later the connections are idle, except those that have transferred data since.
    for n in 0..200 {
        assert!(bed.opens(source(n), ACK).is_some());
    }
    bed.pass(Duration::from_secs(2));
    let opened = (0..256).filter(|&n| bed.connect(source(0x0100_0000 + n)));
    assert_eq!(opened.count(), 56);
    let evicted = bed.director.shard.evictions();
    assert_eq!((evicted.idle, evicted.half_open), (56, 0), "{evicted:?}");
    for n in 0..200 {
        assert!(bed.opens(source(n), ACK).is_some());
    }
}

#[test]
fn full_table_refuses_new_connections_if_eviction_is_off() {
    let mut bed = Bed::tcp(16, WhenFull::Drop, Forwarding::Nat, Extras::default());
    for n in 0..16 {
        assert!(bed.opens(source(n), SYN).is_some());
    }
    for n in 16..100 {
        let full = Verdict::Drop(DropReason::TableFull);
        assert_eq!(bed.send(source(n), SYN), full);
    }
    assert_eq!(
        bed.director.shard.evictions(),
        lvs_core::stats::Evictions::default()
    );
}

#[test]
fn syn_replaces_closed_connection_of_full_table() {
    let mut bed = Bed::tcp(1, WhenFull::Evict, Forwarding::Nat, Extras::default());
    let client = source(1);
    let server = bed.opens(client, SYN).unwrap();
    bed.reply(server, client, TcpFlags::RST);
    // The connection is in state CLOSE: the next SYN replaces it, and uses its slot.
    assert!(bed.opens(client, SYN).is_some());
    assert_eq!(bed.director.shard.evictions().ended, 1);
    assert_eq!(bed.director.shard.len(), 1);
    assert!(bed.opens(client, ACK).is_some());
}

#[test]
fn service_limits_refuse_excess_connections() {
    let limits = Limits {
        connections: 50,
        source_rate: 5,
        ..Limits::default()
    };
    let extras = Extras {
        limits,
        ..Extras::default()
    };
    let mut bed = Bed::tcp(1 << 12, WhenFull::Drop, Forwarding::Nat, extras);
    let one = |n: u16| SocketAddr::from(([192, 0, 2, 1], n));
    let opened = (1..100).filter(|&n| bed.opens(one(n), SYN).is_some());
    assert_eq!(opened.count(), 5);
    let source_rate = Verdict::Drop(DropReason::SourceRate);
    assert_eq!(bed.send(one(1000), SYN), source_rate);
    let opened = (1..100).filter(|&n| bed.opens(source(n), SYN).is_some());
    assert_eq!(opened.count(), 45);
    let full = Verdict::Drop(DropReason::ServiceFull);
    assert_eq!(bed.send(source(1000), SYN), full);
    // The half-open connections expire, so that slots are free again.
    bed.pass(Duration::from_secs(61));
    assert!(bed.opens(source(1000), SYN).is_some());
}

#[test]
fn full_nat_without_free_port_tries_up_to_eight_other_servers_and_then_drops() {
    let extras = Extras::default();
    let config = ServiceConfig {
        extras,
        ..ServiceConfig::new(Family::V4, "sh")
    };
    let key = ServiceKey::tcp(addr(VIP));
    let mut bed = Bed::new(1 << 12, WhenFull::Drop, key, config, Forwarding::FullNat);
    // The source determines the server of the client; there are ten ports towards each server.
    let one = |n: u16| SocketAddr::from(([192, 0, 2, 1], n));
    let mut targets: Vec<_> = (1001..=1020)
        .filter_map(|n| bed.opens(one(n), SYN))
        .collect();
    assert_eq!(targets.len(), 20);
    targets.sort();
    assert_eq!(
        targets
            .iter()
            .filter(|&&target| target == server(1))
            .count(),
        10
    );
    let none = Verdict::Drop(DropReason::NoLocalPort);
    assert_eq!(bed.send(one(1021), SYN), none);
    // If there are many servers, up to eight more are tried.
    for n in 3..=20 {
        let config = ServerConfig::new(1, Forwarding::FullNat);
        let added = bed
            .director
            .control
            .add_server(&key, server(n), &config, bed.now);
        added.unwrap();
    }
    let opened = (2001..2301).filter(|&n| bed.opens(one(n), SYN).is_some());
    let opened = opened.count();
    assert!((70..=90).contains(&opened), "{opened}");
    assert_eq!(bed.send(one(3000), SYN), none);
}

#[test]
fn templates_of_flooded_persistent_service_are_bounded() {
    let mut bed = persistent(512, WhenFull::Evict);
    let client = source(0x0100_0000);
    assert!(bed.connect(client));
    for n in 0..5000 {
        assert!(bed.opens(source(n), SYN).is_some(), "{n}");
        bed.pass(Duration::from_millis(1));
    }
    let templates = bed.director.control.templates_from(0, Instant::ZERO);
    assert!(templates.count() <= 512 + 64 + 128);
    assert!(bed.director.control.evicted_templates() > 4000);
    assert!(bed.opens(client, ACK).is_some());
}

fn persistent(slots: usize, when_full: WhenFull) -> Bed {
    let mut config = ServiceConfig::new(Family::V4, "rr");
    config.flags = ServiceFlags(ServiceFlags::PERSISTENT);
    config.timeout = 300;
    let key = ServiceKey::tcp(addr(VIP));
    Bed::new(slots, when_full, key, config, Forwarding::Nat)
}

/// A table of templates has slots for the connections of all shards, an eighth more, and another
/// 128.
#[test]
fn full_template_table_refuses_next_template() {
    let mut bed = persistent(512, WhenFull::Drop);
    for n in 0..512 {
        assert!(bed.opens(source(n), SYN).is_some(), "{n}");
    }
    // A connection with an unanswered SYN expires after one minute, and its template after five.
    bed.pass(Duration::from_secs(61));
    assert_eq!(bed.director.shard.len(), 0);
    for n in 512..704 {
        assert!(bed.opens(source(n), SYN).is_some(), "{n}");
    }
    let full = Verdict::Drop(DropReason::TableFull);
    assert_eq!(bed.send(source(704), SYN), full);
    assert!(
        bed.opens(source(1), SYN).is_some(),
        "a client with a template was refused"
    );
    assert_eq!(bed.director.control.evicted_templates(), 0);
}

#[test]
fn template_of_synchronisation_message_evicts_another_from_full_table() {
    let mut bed = persistent(512, WhenFull::Evict);
    for n in 0..2000 {
        assert!(bed.opens(source(n), SYN).is_some(), "{n}");
        bed.pass(Duration::from_millis(1));
    }
    let Director { control, shard, .. } = &mut bed.director;
    let evicted = control.evicted_templates();
    assert!(evicted > 0);
    control
        .start_backup(Backup::new(0, None, 1500, false))
        .unwrap();
    let template = |n: u8| Entry {
        protocol: Protocol::TCP,
        client: SocketAddr::from(([203, 0, 113, n], 0)),
        virt: addr(VIP),
        server: server(1),
        // IP_VS_CONN_F_TEMPLATE; the method is NAT.
        flags: 0x1000,
        state: 0,
        mark: 0,
        timeout: 300,
        sequences: None,
        engine: None,
        data: None,
    };
    let results = control.take_over(shard, (0..10).map(template), bed.now);
    assert_eq!((results.taken, results.no_room), (10, 0));
    assert_eq!(control.evicted_templates(), evicted + 10);
}

/// If more templates expire at once than one call removes (4,096), the next call is due at once.
#[test]
fn expired_templates_are_removed_in_portions() {
    const ALL: usize = 10_000;
    let mut bed = persistent(1 << 14, WhenFull::Drop);
    for n in 0..ALL {
        let source = source(u32::try_from(n).unwrap());
        assert!(bed.opens(source, SYN).is_some());
    }
    bed.pass(Duration::from_secs(61));
    // Only `Control` advances here, as if the shard had its own thread.
    let at = bed.now + Duration::from_secs(600);
    let left = |bed: &Bed| bed.director.control.templates_from(0, at).count();
    assert_eq!(left(&bed), ALL);
    let mut lefts = vec![ALL];
    while *lefts.last().unwrap() > 0 {
        bed.director.control.advance(at);
        lefts.push(left(&bed));
        assert!(lefts.len() < 10, "{lefts:?}");
    }
    let ended = lefts.windows(2).map(|of| of[0] - of[1]);
    assert!(ended.clone().all(|ended| ended <= 4096), "{lefts:?}");
    assert!(lefts.len() > 3, "{lefts:?}");
}
