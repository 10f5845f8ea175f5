//! Features that the kernel's IPVS does not have, such as `on_server_down`, slow starts, the
//! scheduler `ewma`, response times, unanswered connection attempts and suspicious servers, and the
//! modern profile.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use lvs_core::attempts::Attempts;
use lvs_core::settings::{Extras, Limits, OnServerDown, Profile};
use lvs_core::{
    Connection, Director, DropReason, Error, Family, Forwarding, Hook, Instant, Options,
    PacketMeta, Registry, Request, Reset, Scheduler, Segment, Server, ServerConfig, ServiceConfig,
    ServiceFlags, ServiceKey, TcpFlags, Transport, Verdict,
};

use crate::common::{CLIENT, VIP, addr, director, forwarded, packet, server, tcp};

const SYN: u8 = TcpFlags::SYN;
const ACK: u8 = TcpFlags::ACK;
const RST: u8 = TcpFlags::RST;

fn service(scheduler: &str, extras: Extras) -> ServiceConfig {
    ServiceConfig {
        extras,
        ..ServiceConfig::new(Family::V4, scheduler)
    }
}

const fn down(on_server_down: OnServerDown) -> Extras {
    Extras {
        on_server_down,
        slow_start: 0,
        count_unanswered: false,
        limits: Limits {
            connections: 0,
            rate: 0,
            source_rate: 0,
            source_bits_v4: 0,
            source_bits_v6: 0,
        },
    }
}

/// A director with `on_server_down = Reset`, and the time one second after its start.
fn resetting(method: Forwarding, servers: u8) -> (Director, Instant) {
    let config = service("rr", down(OnServerDown::Reset));
    let director = director(ServiceKey::tcp(addr(VIP)), config, method, servers);
    (director, Instant::from_secs(1))
}

fn add(
    director: &mut Director,
    key: ServiceKey,
    n: u8,
    weight: i32,
    method: Forwarding,
    now: Instant,
) -> Result<(), Error> {
    let config = ServerConfig::new(weight, method);
    director.control.add_server(&key, server(n), &config, now)
}

fn remove(director: &mut Director, n: u8, now: Instant) {
    let key = director.control.services().next().unwrap().key();
    director
        .control
        .delete_server(&key, server(n), now)
        .unwrap();
    director.advance(now);
}

fn only(director: &Director, now: Instant) -> Connection {
    let mut all = director.shard.connections_from(0, now);
    let only = all.next().expect("a connection exists");
    assert!(all.next().is_none(), "several connections exist");
    only
}

/// Passes a segment with a sequence number, an acknowledgement number and `len` bytes of payload to
/// the director, and returns the verdict.
fn send(
    director: &mut Director,
    meta: &PacketMeta<'_>,
    (seq, ack, len): (u32, u32, usize),
    now: Instant,
) -> Verdict {
    let Transport::Tcp(flags) = meta.transport else {
        panic!("the packet is not TCP");
    };
    let mut bytes = vec![0; 20 + len];
    bytes[4..8].copy_from_slice(&seq.to_be_bytes());
    bytes[8..12].copy_from_slice(&ack.to_be_bytes());
    bytes[12] = 5 << 4;
    bytes[13] = flags.0;
    let segment = Segment {
        bytes: &bytes,
        trusted: true,
    };
    director.handle_packet(&PacketMeta { segment, ..*meta }, now)
}

/// Opens a connection on which the client has sent a request of 100 bytes. With NAT, the server has
/// also sent an answer of 1000 bytes.
fn establish(director: &mut Director, client: SocketAddr, nat: bool, now: Instant) {
    let vip = addr(VIP);
    let (cs, ss) = (1000, 0xffff_ff00);
    let forward = forwarded(send(director, &tcp(client, vip, SYN), (cs, 0, 0), now));
    let from = forward.target;
    if nat {
        let _ = send(
            director,
            &tcp(from, client, SYN | ACK),
            (ss, cs + 1, 0),
            now,
        );
    }
    let ack = u32::wrapping_add(ss, 1);
    let _ = send(director, &tcp(client, vip, ACK), (cs + 1, ack, 0), now);
    let _ = send(director, &tcp(client, vip, ACK), (cs + 1, ack, 100), now);
    if nat {
        let _ = send(
            director,
            &tcp(from, client, ACK),
            (ack, cs + 101, 1000),
            now,
        );
    }
    let ack = ack.wrapping_add(1000);
    let _ = send(director, &tcp(client, vip, ACK), (cs + 101, ack, 0), now);
}

fn drain(director: &mut Director, now: Instant) -> Vec<Reset> {
    let mut all = Vec::new();
    while director.shard.has_down() {
        all.extend(director.end_down(now, 64));
    }
    all
}

#[test]
fn connection_of_removed_server_is_reset_at_both_ends_with_expected_sequence_numbers() {
    for method in [Forwarding::Nat, Forwarding::Route, Forwarding::Tunnel] {
        let (mut director, now) = resetting(method, 1);
        establish(&mut director, addr(CLIENT), method == Forwarding::Nat, now);
        assert_eq!(only(&director, now).state, "ESTABLISHED");
        remove(&mut director, 1, now);
        let resets = drain(&mut director, now);
        let [client, server] = resets[..] else {
            panic!("{method:?}: not exactly two resets were sent: {resets:?}");
        };
        // The server's numbers have wrapped around: 0xffffff00 + 1 + 1000.
        assert_eq!(client.tuple.src, addr(VIP));
        assert_eq!(client.tuple.dst, addr(CLIENT));
        assert_eq!((client.seq, client.ack), (745, Some(1101)), "{method:?}");
        assert_eq!(client.forward, None);
        assert_eq!(server.tuple.src, addr(CLIENT));
        assert_eq!(server.tuple.dst, addr(VIP));
        assert_eq!((server.seq, server.ack), (1101, Some(745)), "{method:?}");
        let forward = server.forward.unwrap();
        assert_eq!((forward.method, forward.target), (method, self::server(1)));
        let ended = only(&director, now);
        assert_eq!((ended.state, ended.expires.as_secs()), ("CLOSE", 10));
        director.advance(Instant::from_secs(11));
        assert!(director.shard.is_empty());
    }
}

#[test]
fn offloaded_connection_of_removed_server_is_reset_with_numbers_of_probed_client() {
    for method in [Forwarding::Nat, Forwarding::Route, Forwarding::Tunnel] {
        let (mut director, now) = resetting(method, 1);
        let (client, vip) = (addr(CLIENT), addr(VIP));
        establish(&mut director, client, method == Forwarding::Nat, now);
        let forward = forwarded(send(
            &mut director,
            &tcp(client, vip, ACK),
            (1101, 745, 0),
            now,
        ));
        let conn = forward.conn.expect("the packet has a connection");
        director
            .shard
            .offer(conn)
            .expect("the connection can be offloaded");
        assert!(director.shard.publish(conn, 1, None));
        remove(&mut director, 1, now);
        let asked = drain(&mut director, now);
        let of = |reset: &Reset| (reset.asks, reset.tuple.dst, reset.seq, reset.ack);
        // The server may or may not have received the client's last bytes.
        let expected = [
            (true, client, 745, Some(1101)),
            (false, vip, 1101, Some(745)),
        ];
        assert_eq!(asked.iter().map(of).collect::<Vec<_>>(), expected);
        // The number is later by more than half of all sequence numbers.
        let numbers = (0xf000_0000, 0x9000_0000, 0);
        let ends = Verdict::Reset(DropReason::ServerDown);
        let ack = tcp(client, vip, ACK);
        assert_eq!(send(&mut director, &ack, numbers, now), ends);
        let resets = director.shard.take_late_resets();
        let expected = [(false, vip, 0xf000_0000, Some(0x9000_0000))];
        assert_eq!(resets.iter().map(of).collect::<Vec<_>>(), expected);
        assert!(resets[0].forward.is_some());
        // The reset is sent only once.
        assert_eq!(send(&mut director, &ack, numbers, now), ends);
        assert_eq!(director.shard.take_late_resets(), []);
    }
}

#[test]
fn evicted_connection_of_removed_server_is_reset_with_sequence_numbers_of_its_packets() {
    let (mut director, now) = resetting(Forwarding::Route, 1);
    let (client, vip) = (addr(CLIENT), addr(VIP));
    establish(&mut director, client, false, now);
    let ack = tcp(client, vip, ACK);
    let forward = forwarded(send(&mut director, &ack, (1101, 745, 0), now));
    let conn = forward.conn.expect("the packet has a connection");
    assert!(director.shard.publish(conn, 1, None));
    director.shard.withdraw(conn);
    let _ = send(&mut director, &ack, (0xf000_0000, 0x9000_0000, 5), now);
    remove(&mut director, 1, now);
    let resets = drain(&mut director, now);
    let of = |reset: &Reset| (reset.asks, reset.seq);
    let expected = [(false, 0x9000_0000), (false, 0xf000_0005)];
    assert_eq!(resets.iter().map(of).collect::<Vec<_>>(), expected);
}

#[test]
fn retransmission_does_not_move_tracked_sequence_numbers_back() {
    let (mut director, now) = resetting(Forwarding::Nat, 1);
    let (client, vip) = (addr(CLIENT), addr(VIP));
    establish(&mut director, client, true, now);
    let _ = send(&mut director, &tcp(client, vip, ACK), (1001, 1, 100), now);
    remove(&mut director, 1, now);
    let resets = drain(&mut director, now);
    assert_eq!((resets[0].seq, resets[1].seq), (745, 1101));
}

#[test]
fn client_that_waits_for_syn_ack_is_reset_when_its_server_is_removed() {
    let (mut director, now) = resetting(Forwarding::Nat, 1);
    let _ = send(
        &mut director,
        &tcp(addr(CLIENT), addr(VIP), SYN),
        (77, 0, 0),
        now,
    );
    remove(&mut director, 1, now);
    let resets = drain(&mut director, now);
    // RFC 9293 section 3.10.7.3: in SYN-SENT, only the acknowledgement of the SYN is compared.
    assert_eq!((resets[0].seq, resets[0].ack), (0, Some(78)));
    assert_eq!((resets[1].seq, resets[1].ack), (78, None));
}

#[test]
fn late_packet_of_reset_connection_is_answered_with_reset() {
    let (mut director, now) = resetting(Forwarding::Nat, 2);
    let (client, vip) = (addr(CLIENT), addr(VIP));
    establish(&mut director, client, true, now);
    let before = only(&director, now).server;
    let n = before.ip().to_string().pop().unwrap() as u8 - b'0';
    remove(&mut director, n, now);
    let _ = drain(&mut director, now);
    let reset = Verdict::Reset(DropReason::ServerDown);
    assert_eq!(director.handle_packet(&tcp(client, vip, ACK), now), reset);
    assert_eq!(
        director.handle_packet(&tcp(before, client, ACK), now),
        reset
    );
    let forward = forwarded(director.handle_packet(&tcp(client, vip, RST), now));
    assert_eq!(forward.target, before);
    let decision = director.handle_packet(&tcp(before, client, RST), now);
    assert!(
        matches!(decision, Verdict::Reply(_)),
        "the server's reset was not forwarded: {decision:?}"
    );
    let again = forwarded(director.handle_packet(&tcp(client, vip, SYN), now));
    assert!(again.new && again.target != before);
}

#[test]
fn connection_of_removed_server_is_reset_at_next_packet_if_sequence_numbers_are_unknown() {
    let key = ServiceKey::tcp(addr(VIP));
    let kernel = service("rr", Extras::default());
    let mut director = director(key, kernel, Forwarding::Route, 1);
    let now = Instant::from_secs(1);
    let (client, vip) = (addr(CLIENT), addr(VIP));
    establish(&mut director, client, false, now);
    let config = service("rr", down(OnServerDown::Reset));
    director.control.edit_service(&key, config, None).unwrap();
    remove(&mut director, 1, now);
    assert_eq!(drain(&mut director, now), []);
    assert_eq!(only(&director, now).expires.as_secs(), 900);
    let decision = director.handle_packet(&tcp(client, vip, ACK), now);
    assert_eq!(decision, Verdict::Reset(DropReason::ServerDown));
    assert_eq!(only(&director, now).expires.as_secs(), 10);
}

#[test]
fn packet_between_server_removal_and_resets_is_answered_with_reset_and_resets_are_sent_once() {
    let (mut director, now) = resetting(Forwarding::Nat, 1);
    establish(&mut director, addr(CLIENT), true, now);
    remove(&mut director, 1, now);
    let decision = director.handle_packet(&tcp(addr(CLIENT), addr(VIP), ACK), now);
    assert_eq!(decision, Verdict::Reset(DropReason::ServerDown));
    assert_eq!(
        drain(&mut director, now).len(),
        2,
        "the two resets were not sent exactly once"
    );
}

#[test]
fn resets_of_removed_servers_are_sent_in_bounded_portions() {
    let (mut director, now) = resetting(Forwarding::Route, 2);
    for port in 1..=20_000 {
        let client = SocketAddr::from(([192, 0, 2, 1], port));
        if port != 20 {
            establish(&mut director, client, false, now);
        }
    }
    let (mut calls, mut sent) = (0, 0);
    remove(&mut director, 1, now);
    // Another server is removed while connections of the first one are still being reset.
    for _ in 0..5 {
        let resets = director.end_down(now, 1600);
        assert!(resets.len() <= 200, "one call: {} resets", resets.len());
        sent += resets.len();
    }
    remove(&mut director, 2, now);
    while director.shard.has_down() {
        let resets = director.end_down(now, 1600);
        assert!(resets.len() <= 200, "one call: {} resets", resets.len());
        sent += resets.len();
        calls += 1;
        assert!(calls < 1000, "`end_down` does not finish");
    }
    assert_eq!(sent, 2 * 19_999);
    director.advance(Instant::from_secs(12));
    assert!(director.shard.is_empty());
    let control = &director.control;
    assert!(
        control
            .endpoints()
            .all(|(_, s)| (s.active(), s.inactive()) == (0, 0))
    );
}

#[test]
fn reset_connection_of_removed_server_stays_reset_after_server_is_added_again() {
    let key = ServiceKey::tcp(addr(VIP));
    let (mut director, now) = resetting(Forwarding::Nat, 1);
    establish(&mut director, addr(CLIENT), true, now);
    remove(&mut director, 1, now);
    let _ = drain(&mut director, now);
    add(&mut director, key, 1, 1, Forwarding::Nat, now).unwrap();
    let decision = director.handle_packet(&tcp(addr(CLIENT), addr(VIP), ACK), now);
    assert_eq!(decision, Verdict::Reset(DropReason::ServerDown));
}

#[test]
fn server_with_weight_0_keeps_connections_without_resets() {
    let key = ServiceKey::tcp(addr(VIP));
    let (mut director, now) = resetting(Forwarding::Nat, 1);
    establish(&mut director, addr(CLIENT), true, now);
    let quiesced = ServerConfig::new(0, Forwarding::Nat);
    director
        .control
        .edit_server(&key, server(1), &quiesced)
        .unwrap();
    director.advance(now);
    assert!(!director.shard.has_down());
    let decision = director.handle_packet(&tcp(addr(CLIENT), addr(VIP), ACK), now);
    assert!(matches!(decision, Verdict::Forward(_)), "{decision:?}");
}

#[test]
fn udp_packets_to_removed_server_follow_each_server_down_policy() {
    let vip = addr(VIP);
    let datagram = packet(addr(CLIENT), vip, Transport::Udp(b""));
    let refused = Verdict::Unreachable(DropReason::ServerDown);
    for policy in [
        OnServerDown::Kernel,
        OnServerDown::Reset,
        OnServerDown::Reschedule,
        OnServerDown::Drop,
    ] {
        let key = ServiceKey::udp(vip);
        let mut director = director(key, service("rr", down(policy)), Forwarding::Nat, 2);
        let now = Instant::from_secs(1);
        let first = forwarded(director.handle_packet(&datagram, now));
        assert_eq!(first.target, server(2));
        remove(&mut director, 2, now);
        assert_eq!(
            drain(&mut director, now),
            [],
            "a reset was sent for a datagram"
        );
        let decision = director.handle_packet(&datagram, now);
        let next = director.handle_packet(&datagram, now);
        let moved = |verdict| matches!(verdict, Verdict::Forward(f) if f.target == server(1));
        match policy {
            OnServerDown::Kernel => {
                let dropped = Verdict::Drop(DropReason::ServerRemoved);
                assert_eq!((decision, next), (dropped, dropped));
                assert_eq!(only(&director, now).expires.as_secs(), 300);
            }
            OnServerDown::Reset => {
                assert!(
                    decision == refused && moved(next),
                    "the first datagram was not refused, or the next one not scheduled again: {decision:?} {next:?}"
                );
            }
            OnServerDown::Reschedule => {
                assert!(
                    moved(decision) && moved(next),
                    "a datagram was not scheduled again: {decision:?} {next:?}"
                );
            }
            OnServerDown::Drop => {
                let dropped = Verdict::Drop(DropReason::ServerDown);
                assert_eq!((decision, next), (dropped, dropped));
                assert_eq!(only(&director, now).expires.as_secs(), 120);
                let later = Instant::from_secs(122);
                assert!(moved(director.handle_packet(&datagram, later)));
            }
        }
    }
}

#[test]
fn reschedule_policy_resets_and_drop_policy_drops_tcp_connection_of_removed_server() {
    let key = ServiceKey::tcp(addr(VIP));
    let now = Instant::from_secs(1);
    let ack = tcp(addr(CLIENT), addr(VIP), ACK);
    for (policy, resets) in [(OnServerDown::Reschedule, 2), (OnServerDown::Drop, 0)] {
        let mut director = director(key, service("rr", down(policy)), Forwarding::Nat, 1);
        establish(&mut director, addr(CLIENT), true, now);
        remove(&mut director, 1, now);
        assert_eq!(drain(&mut director, now).len(), resets);
        assert_eq!(only(&director, now).state, "CLOSE");
        let decision = director.handle_packet(&ack, now);
        let reply = director.handle_packet(&tcp(server(1), addr(CLIENT), ACK), now);
        let expected = match policy {
            OnServerDown::Drop => Verdict::Drop(DropReason::ServerDown),
            _ => Verdict::Reset(DropReason::ServerDown),
        };
        assert_eq!((decision, reply), (expected, expected));
    }
}

#[test]
fn server_down_setting_precedes_expire_nodest_conn() {
    let (mut director, now) = resetting(Forwarding::Nat, 1);
    director
        .control
        .set_sysctl("expire_nodest_conn", "1")
        .unwrap();
    establish(&mut director, addr(CLIENT), true, now);
    remove(&mut director, 1, now);
    assert_eq!(drain(&mut director, now).len(), 2);
}

#[test]
fn deleted_service_with_reset_policy_resets_its_connections() {
    let key = ServiceKey::tcp(addr(VIP));
    let (mut director, now) = resetting(Forwarding::Nat, 1);
    establish(&mut director, addr(CLIENT), true, now);
    director.control.delete_service(&key, now).unwrap();
    director.advance(now);
    assert_eq!(drain(&mut director, now).len(), 2);
}

#[test]
fn packets_to_removed_server_are_dropped_silently_by_default() {
    let key = ServiceKey::tcp(addr(VIP));
    let mut director = director(key, service("rr", Extras::default()), Forwarding::Nat, 1);
    let now = Instant::from_secs(1);
    establish(&mut director, addr(CLIENT), true, now);
    remove(&mut director, 1, now);
    assert!(!director.shard.has_down());
    let decision = director.handle_packet(&tcp(addr(CLIENT), addr(VIP), ACK), now);
    assert_eq!(decision, Verdict::Drop(DropReason::ServerRemoved));
    let reply = tcp(server(1), addr(CLIENT), ACK);
    assert!(matches!(
        director.handle_packet(&reply, now),
        Verdict::Reply(_)
    ));
    assert_eq!(only(&director, now).state, "ESTABLISHED");
}

#[test]
fn dropped_packet_of_connection_counts_for_its_service() {
    let key = ServiceKey::tcp(addr(VIP));
    let mut director = director(key, service("rr", Extras::default()), Forwarding::Nat, 1);
    let now = Instant::from_secs(1);
    let drops = |director: &mut Director| {
        director.advance(now);
        let service = director.control.service(&key).expect("the service exists");
        assert_eq!(service.refusals().count(), 0);
        let drops = service.drops().at(now);
        drops
            .map(|(reason, packets)| (reason, packets.recent))
            .collect::<Vec<_>>()
    };
    establish(&mut director, addr(CLIENT), true, now);
    assert_eq!(drops(&mut director), []);
    remove(&mut director, 1, now);
    for _ in 0..2 {
        let decision = director.handle_packet(&tcp(addr(CLIENT), addr(VIP), ACK), now);
        assert_eq!(decision, Verdict::Drop(DropReason::ServerRemoved));
    }
    assert_eq!(drops(&mut director), [("server_removed", 2)]);
    // A packet that belongs to no connection is not counted for a service.
    director.shard.drops.count(None, "no_route");
    assert!(director.shard.drops.is_empty());
}

#[test]
fn explain_reports_reset_for_connection_of_removed_server() {
    let (mut director, now) = resetting(Forwarding::Nat, 1);
    establish(&mut director, addr(CLIENT), true, now);
    remove(&mut director, 1, now);
    let tuple = tcp(addr(CLIENT), addr(VIP), ACK).tuple;
    let explanation = director.control.explain(&director.shard, tuple, 0, now);
    assert!(
        explanation.verdict.contains("reset"),
        "{}",
        explanation.verdict
    );
    assert_eq!(explanation.server, None);
}

/// The numbers of connections that servers 1 to 3 get, of `count` new ones.
fn shares(director: &mut Director, count: u16, now: Instant) -> [u32; 3] {
    let mut shares = [0; 3];
    for n in 0..count {
        let client = SocketAddr::from(([192, 0, 2, 1], 1000 + n));
        let forward =
            forwarded(director.handle_packet(&packet(client, addr(VIP), Transport::Udp(b"")), now));
        let std::net::IpAddr::V4(ip) = forward.target.ip() else {
            panic!("the server's address is not IPv4");
        };
        shares[usize::from(ip.octets()[3]) - 1] += 1;
    }
    shares
}

fn slow(scheduler: &str, seconds: u32) -> ServiceConfig {
    ServiceConfig {
        flags: ServiceFlags(ServiceFlags::ONE_PACKET),
        ..service(
            scheduler,
            Extras {
                slow_start: seconds,
                ..Extras::default()
            },
        )
    }
}

#[test]
fn slow_start_raises_share_of_new_server_gradually() {
    let key = ServiceKey::udp(addr(VIP));
    let mut director = director(key, slow("wrr", 90), Forwarding::Nat, 2);
    let at = |seconds| Instant::from_secs(seconds);
    assert_eq!(
        shares(&mut director, 200, at(1)),
        [100, 100, 0],
        "the first servers were in a slow start"
    );
    director.advance(at(100));
    add(&mut director, key, 3, 1, Forwarding::Nat, at(100)).unwrap();
    let listed = |director: &Director| {
        let service = director.control.services().next().unwrap();
        let mut servers = service.servers().iter();
        let third = servers.find(|s| s.addr() == server(3)).unwrap();
        (third.config().weight, third.slow_start())
    };
    for (seconds, share, percent) in [
        (100, 10, Some(10)),
        (115, 20, Some(20)),
        (145, 50, Some(50)),
        (189, 90, Some(90)),
    ] {
        director.advance(at(seconds));
        let got = shares(&mut director, 1000, at(seconds));
        // Two other servers have a share of 100 each, and this one has `share`.
        let expected = 1000 * share / (200 + share);
        assert!(
            got[2].abs_diff(expected) <= 10,
            "the third server has another share than {expected} of 1000 after {seconds} s: {got:?}"
        );
        assert_eq!(listed(&director), (1, percent), "{seconds} s");
    }
    director.advance(at(190));
    assert_eq!(listed(&director), (1, None));
    assert_eq!(shares(&mut director, 300, at(190)), [100, 100, 100]);
    let service = director.control.services().next().unwrap();
    assert!(
        service.servers().iter().all(|server| server.weight() == 1),
        "a server's weight is not the configured one"
    );
}

#[test]
fn slow_start_applies_to_undrained_server_and_survives_edit() {
    let key = ServiceKey::udp(addr(VIP));
    let mut director = director(key, slow("wrr", 9), Forwarding::Nat, 2);
    let edit = |director: &mut Director, weight, at: u64| {
        director.advance(Instant::from_secs(at));
        let config = ServerConfig::new(weight, Forwarding::Nat);
        director
            .control
            .edit_server(&key, server(1), &config)
            .unwrap();
        director.control.services().next().unwrap().servers()[1].slow_start()
    };
    assert_eq!(
        edit(&mut director, 3, 20),
        None,
        "a changed weight has started the slow start again"
    );
    assert_eq!(edit(&mut director, 0, 30), None);
    assert_eq!(edit(&mut director, 3, 40), Some(10));
    assert_eq!(
        edit(&mut director, 4, 44),
        Some(50),
        "the slow start did not continue from its present weight"
    );
    assert_eq!(
        shares(&mut director, 300, Instant::from_secs(44)),
        [200, 100, 0]
    );
    assert_eq!(edit(&mut director, 4, 49), None);
    assert_eq!(
        shares(&mut director, 500, Instant::from_secs(49)),
        [400, 100, 0]
    );
}

#[test]
fn slow_start_is_skipped_while_all_servers_are_newer_than_its_duration() {
    let key = ServiceKey::udp(addr(VIP));
    let mut director = director(key, slow("wlc", 30), Forwarding::Nat, 1);
    for n in [2, 3] {
        let now = Instant::from_secs(u64::from(n - 1) * 10);
        director.advance(now);
        add(&mut director, key, n, 1, Forwarding::Nat, now).unwrap();
        let service = director.control.services().next().unwrap();
        assert!(
            service.servers().iter().all(|s| s.slow_start().is_none()),
            "{n}"
        );
    }
}

#[test]
fn slow_start_applies_to_servers_added_after_its_setting_and_ends_when_disabled() {
    let key = ServiceKey::udp(addr(VIP));
    let mut director = director(key, slow("wrr", 0), Forwarding::Nat, 2);
    director.advance(Instant::from_secs(1));
    director
        .control
        .edit_service(&key, slow("wrr", 60), None)
        .unwrap();
    // Servers that were added before the slow start was configured are not in a slow start.
    add(
        &mut director,
        key,
        3,
        1,
        Forwarding::Nat,
        Instant::from_secs(1),
    )
    .unwrap();
    let weights = |director: &Director| {
        let service = director.control.services().next().unwrap();
        service
            .servers()
            .iter()
            .map(|s| s.weight())
            .collect::<Vec<_>>()
    };
    assert_eq!(weights(&director), [1, 10, 10]);
    director
        .control
        .edit_service(&key, slow("wrr", 0), None)
        .unwrap();
    assert_eq!(weights(&director), [1, 1, 1]);
}

#[test]
fn slow_start_refuses_no_connection_with_any_scheduler() {
    for name in Registry::new().names().filter(|name| *name != "none") {
        let key = ServiceKey::udp(addr(VIP));
        let mut director = director(key, slow(name, 9), Forwarding::Nat, 2);
        let start = Instant::from_secs(20);
        director.advance(start);
        add(&mut director, key, 3, 1, Forwarding::Nat, start).unwrap();
        let scaled = !matches!(name, "ovf" | "lblc" | "lblcr");
        let service = director.control.services().next().unwrap();
        let weights: Vec<i32> = service.servers().iter().map(|s| s.weight()).collect();
        assert_eq!(
            weights,
            if scaled { [1, 10, 10] } else { [1, 1, 1] },
            "{name}"
        );
        for second in 20..30 {
            let all = shares(&mut director, 50, Instant::from_secs(second));
            assert_eq!(all.iter().sum::<u32>(), 50, "{name}");
        }
        let service = director.control.services().next().unwrap();
        assert!(service.servers().iter().all(|s| s.weight() == 1), "{name}");
    }
}

#[test]
fn ewma_measures_syn_to_syn_ack_and_avoids_slow_or_silent_server() {
    let key = ServiceKey::tcp(addr(VIP));
    let mut director = director(key, service("ewma", Extras::default()), Forwarding::Nat, 2);
    let vip = addr(VIP);
    let open = |director: &mut Director, port: u16, at: Instant, answer: Option<Duration>| {
        let client = SocketAddr::from(([192, 0, 2, 1], port));
        let forward = forwarded(director.handle_packet(&tcp(client, vip, SYN), at));
        if let Some(answer) = answer {
            let _ = director.handle_packet(&tcp(forward.target, client, SYN | ACK), at + answer);
            let _ = director.handle_packet(&tcp(client, vip, RST), at + answer);
        }
        forward.target
    };
    let now = Instant::from_secs(1);
    let slow = open(&mut director, 2000, now, Some(Duration::from_millis(30)));
    let now = Instant::from_secs(2);
    let quick = open(&mut director, 2001, now, Some(Duration::from_millis(1)));
    assert_ne!(slow, quick, "only one server was tried");
    let latency = |director: &Director, addr, at| {
        let service = director.control.services().next().unwrap();
        let server = service.servers().iter().find(|s| s.addr() == addr).unwrap();
        server.latency().average(at).unwrap()
    };
    let measured = latency(&director, quick, now + Duration::from_millis(1));
    assert_eq!(measured, Duration::from_millis(1));
    for n in 0..20 {
        let at = Instant::from_secs(3) + Duration::from_millis(n * 10);
        let port = 3000 + u16::try_from(n).unwrap();
        let chosen = open(&mut director, port, at, Some(Duration::from_millis(1)));
        assert_eq!(chosen, quick);
    }
    // The fast server stops answering; the clients' repeated SYNs show this before any timeout.
    let at = Instant::from_secs(4);
    assert_eq!(open(&mut director, 4000, at, None), quick);
    let _ = open(&mut director, 4000, Instant::from_secs(5), None);
    let peak = latency(&director, quick, Instant::from_secs(5));
    assert_eq!(peak, Duration::from_secs(1));
    let chosen = open(&mut director, 4001, Instant::from_secs(5), None);
    assert_eq!(chosen, slow);
}

#[test]
fn consecutive_failed_connection_attempts_to_nat_server_are_counted() {
    let key = ServiceKey::tcp(addr(VIP));
    let extras = Extras {
        count_unanswered: true,
        ..Extras::default()
    };
    let vip = addr(VIP);
    let client = |port: u16| SocketAddr::from(([192, 0, 2, 1], port));
    let count = |director: &Director| {
        let service = director.control.services().next().unwrap();
        service.servers()[0].unanswered()
    };
    let mut behind_nat = director(key, service("rr", extras), Forwarding::Nat, 1);
    let mut steps = Vec::new();
    // The first attempts are opened, repeated twice, refused, and answered; the last one is only
    // opened.
    for (second, port, answer) in [
        (1, 2000, None),
        (2, 2000, None),
        (4, 2000, None),
        (5, 2001, Some(RST)),
        (6, 2002, Some(SYN | ACK)),
        (7, 2003, None),
    ] {
        let at = Instant::from_secs(second);
        let forward = forwarded(behind_nat.handle_packet(&tcp(client(port), vip, SYN), at));
        if let Some(flags) = answer {
            let _ = behind_nat.handle_packet(&tcp(forward.target, client(port), flags), at);
        }
        steps.push(count(&behind_nat));
    }
    assert_eq!(steps, [0, 1, 2, 3, 0, 0]);

    // A server whose answers bypass the director is not reported as unanswering.
    let mut direct = director(key, service("rr", extras), Forwarding::Route, 1);
    for second in 1..5 {
        let at = Instant::from_secs(second);
        let _ = direct.handle_packet(&tcp(client(2000), vip, SYN), at);
    }
    assert_eq!(count(&direct), 0);
}

/// Numbers of all attempts to open a connection to the only server, and of the unanswered ones.
fn attempts(director: &Director) -> (u64, u64) {
    let service = director.control.services().next().unwrap();
    let id = service.servers()[0].id();
    let total = director.control.server_attempts(id).unwrap().total;
    (total.opened, total.unanswered)
}

/// Sends SYNs of one client at these seconds, and waits until the connection expires. Returns the
/// numbers of all attempts and of the unanswered ones.
fn syns_alone(method: Forwarding, seconds: &[u64]) -> (u64, u64) {
    let key = ServiceKey::tcp(addr(VIP));
    let mut director = director(key, service("rr", Extras::default()), method, 1);
    for &second in seconds {
        let syn = tcp(addr(CLIENT), addr(VIP), SYN);
        let _ = director.handle_packet(&syn, Instant::from_secs(second));
    }
    director.advance(Instant::from_secs(600));
    assert_eq!(
        director
            .shard
            .connections_from(0, Instant::from_secs(600))
            .count(),
        0
    );
    attempts(&director)
}

#[test]
fn attempt_behind_nat_without_reply_is_counted_as_unanswered_once() {
    for seconds in [&[1][..], &[1, 2], &[1, 2, 4], &[1, 2, 4, 8]] {
        assert_eq!(syns_alone(Forwarding::Nat, seconds), (1, 1), "{seconds:?}");
    }
}

#[test]
fn attempt_without_nat_is_unanswered_only_if_syn_is_repeated() {
    // A single SYN may belong to a flood, or to a client that sent nothing after an answer which
    // the director does not see.
    assert_eq!(syns_alone(Forwarding::Route, &[1]), (1, 0));
    for seconds in [&[1, 2][..], &[1, 2, 4], &[1, 2, 4, 8]] {
        assert_eq!(
            syns_alone(Forwarding::Route, seconds),
            (1, 1),
            "{seconds:?}"
        );
        assert_eq!(
            syns_alone(Forwarding::Tunnel, seconds),
            (1, 1),
            "{seconds:?}"
        );
    }
}

#[test]
fn attempt_is_answered_by_the_servers_reply_or_the_clients_next_packet() {
    let key = ServiceKey::tcp(addr(VIP));
    for (method, answer) in [
        (Forwarding::Nat, SYN | ACK),
        (Forwarding::Nat, RST),
        (Forwarding::Route, ACK),
    ] {
        let mut director = director(key, service("rr", Extras::default()), method, 1);
        for second in [1, 2] {
            let syn = tcp(addr(CLIENT), addr(VIP), SYN);
            let _ = director.handle_packet(&syn, Instant::from_secs(second));
        }
        let packet = match method {
            Forwarding::Nat => tcp(server(1), addr(CLIENT), answer),
            _ => tcp(addr(CLIENT), addr(VIP), answer),
        };
        let _ = director.handle_packet(&packet, Instant::from_secs(2));
        director.advance(Instant::from_secs(2_000));
        assert_eq!(
            attempts(&director),
            (1, 0),
            "{method:?}, answer with flags {answer:#x}"
        );
    }
}

/// A client sends UDP packets at these times, and the connection expires later. The server answers
/// the packet with number `answered`. Returns the numbers of all attempts and of the unanswered
/// ones.
fn datagrams(
    config: ServiceConfig,
    method: Forwarding,
    times: &[u64],
    answered: usize,
) -> (u64, u64) {
    let mut director = director(ServiceKey::udp(addr(VIP)), config, method, 1);
    for (number, &millis) in times.iter().enumerate() {
        let now = Instant::from_secs(1) + Duration::from_millis(millis);
        let request = packet(addr(CLIENT), addr(VIP), Transport::Udp(b""));
        let _ = director.handle_packet(&request, now);
        if number == answered {
            let reply = packet(server(1), addr(CLIENT), Transport::Udp(b""));
            let _ = director.handle_packet(&reply, now);
        }
    }
    director.advance(Instant::from_secs(2_000));
    attempts(&director)
}

#[test]
fn udp_attempt_behind_nat_is_unanswered_if_client_repeats_packet_after_pause() {
    let config = || service("rr", Extras::default());
    let count = |times: &[u64], answered| datagrams(config(), Forwarding::Nat, times, answered);
    for times in [&[0, 2000][..], &[0, 0, 5000, 10_000]] {
        assert_eq!(count(times, times.len()), (1, 1), "{times:?}");
        assert_eq!(count(times, 0), (1, 0), "{times:?}");
    }
    assert_eq!(count(&[0, 1999, 3998], 2), (1, 0));
    // A single datagram may belong to a flood.
    assert_eq!(count(&[0], 1), (0, 0));
    assert_eq!(count(&[0, 1999], 2), (0, 0));
    // The client does not wait for answers.
    assert_eq!(count(&[0; 16], 16), (0, 0));
}

#[test]
fn udp_attempt_whose_answer_the_director_cannot_see_is_not_counted() {
    let key = ServiceKey::udp(addr(VIP));
    let mut offloaded = director(key, service("rr", Extras::default()), Forwarding::Nat, 1);
    let request = packet(addr(CLIENT), addr(VIP), Transport::Udp(b""));
    let forward = forwarded(offloaded.handle_packet(&request, Instant::from_secs(1)));
    assert!(offloaded.shard.publish(forward.conn.unwrap(), 1, None));
    offloaded.advance(Instant::from_secs(2_000));
    assert_eq!(attempts(&offloaded), (0, 0));
    let once = ServiceConfig {
        flags: ServiceFlags(ServiceFlags::ONE_PACKET),
        ..service("rr", Extras::default())
    };
    assert_eq!(datagrams(once, Forwarding::Nat, &[0, 5000], 2), (0, 0));
    for method in [Forwarding::Route, Forwarding::Tunnel] {
        let config = service("rr", Extras::default());
        assert_eq!(datagrams(config, method, &[0, 5000], 2), (0, 0));
    }
}

/// Whether the attempts of the last minute make a server suspicious.
fn has_suspect(director: &Director) -> bool {
    let service = director.control.services().next().unwrap();
    let of = |server: &Arc<Server>| director.control.server_attempts(server.id()).unwrap();
    let servers: Vec<_> = service.servers().iter().map(of).collect();
    let minutes = servers.iter().map(|server| server.last_minute);
    let all = minutes.fold(Attempts::default(), |all, one| all + one);
    servers
        .iter()
        .any(|server| server.is_suspicious(all - server.last_minute, false))
}

/// Ten clients connect to three servers every two seconds: each client sends a SYN, the server
/// sends `answer` to it if there is one, and then the client sends its next packet. Returns whether
/// a server became suspicious.
fn blames(
    method: Forwarding,
    answer: impl Fn(u16, SocketAddr) -> Option<u8>,
    then: Option<u8>,
) -> bool {
    let key = ServiceKey::tcp(addr(VIP));
    let mut director = director(key, service("rr", Extras::default()), method, 3);
    let mut blamed = false;
    for tick in 1..400 {
        let now = Instant::from_secs(2 * tick);
        director.advance(now);
        blamed |= has_suspect(&director);
        if tick > 60 {
            continue;
        }
        for n in 0..10 {
            let n = u16::try_from(tick).unwrap() * 10 + n;
            let [high, low] = n.to_be_bytes();
            let client = SocketAddr::from(([198, 18, high, low], 2000));
            let forward = forwarded(director.handle_packet(&tcp(client, addr(VIP), SYN), now));
            if let Some(flags) = answer(n, forward.target) {
                let _ = director.handle_packet(&tcp(forward.target, client, flags), now);
            }
            if let Some(flags) = then {
                let _ = director.handle_packet(&tcp(client, addr(VIP), flags), now);
            }
        }
    }
    blamed
}

#[test]
fn flood_of_syns_makes_no_server_suspicious() {
    assert!(!blames(Forwarding::Nat, |_, _| Some(SYN | ACK), None));
    for method in [Forwarding::Route, Forwarding::Tunnel] {
        assert!(!blames(method, |_, _| None, None), "{method:?}");
    }
}

#[test]
fn port_scan_makes_no_server_suspicious() {
    // First the ports are closed, then open.
    assert!(!blames(Forwarding::Nat, |_, _| Some(RST), None));
    assert!(!blames(Forwarding::Nat, |_, _| Some(SYN | ACK), Some(RST)));
    assert!(!blames(Forwarding::Route, |_, _| None, Some(RST)));
}

#[test]
fn clients_that_vanish_make_no_server_suspicious() {
    assert!(!blames(Forwarding::Nat, |_, _| Some(SYN | ACK), Some(ACK)));
    assert!(!blames(Forwarding::Route, |_, _| None, Some(ACK)));
}

#[test]
fn rolling_restart_makes_no_server_suspicious() {
    // The hosts answer with resets while their programs restart, one after the other.
    let restarts = |n: u16, at: SocketAddr| at == server(u8::try_from(n / 200 % 3).unwrap() + 1);
    let answer = |n: u16, at: SocketAddr| Some(if restarts(n, at) { RST } else { SYN | ACK });
    assert!(!blames(Forwarding::Nat, answer, None));
}

#[test]
fn silent_server_is_suspicious() {
    let answer = |_: u16, at: SocketAddr| (at != server(2)).then_some(SYN | ACK);
    assert!(blames(Forwarding::Nat, answer, None));
}

#[test]
fn attempts_of_server_that_is_added_again_keep_their_times() {
    let key = ServiceKey::tcp(addr(VIP));
    let mut director = director(key, service("rr", Extras::default()), Forwarding::Nat, 1);
    for port in 2000..2003 {
        let client = SocketAddr::from(([192, 0, 2, 1], port));
        let _ = director.handle_packet(&tcp(client, addr(VIP), SYN), Instant::from_secs(1));
    }
    remove(&mut director, 1, Instant::from_secs(2));
    // The three connections expire while the server is removed.
    let mut now = 2;
    while now < 100 {
        now += 2;
        director.advance(Instant::from_secs(now));
    }
    add(
        &mut director,
        key,
        1,
        1,
        Forwarding::Nat,
        Instant::from_secs(now),
    )
    .unwrap();
    for _ in 0..30 {
        now += 2;
        director.advance(Instant::from_secs(now));
    }
    let service = director.control.services().next().unwrap();
    let id = service.servers()[0].id();
    let attempts = director.control.server_attempts(id).unwrap();
    assert_eq!((attempts.total.opened, attempts.total.unanswered), (3, 3));
    assert_eq!(attempts.last_minute.unanswered, 0);
    assert_eq!(attempts.last_5_minutes.unanswered, 3);
}

#[test]
fn connections_that_began_without_a_syn_are_not_counted_as_attempts() {
    let key = ServiceKey::tcp(addr(VIP));
    let mut director = director(key, service("rr", Extras::default()), Forwarding::Nat, 1);
    director.control.set_sysctl("sloppy_tcp", "1").unwrap();
    director.advance(Instant::from_secs(1));
    let ack = tcp(addr(CLIENT), addr(VIP), ACK);
    let verdict = director.handle_packet(&ack, Instant::from_secs(1));
    assert!(matches!(verdict, Verdict::Forward(_)), "{verdict:?}");
    director.advance(Instant::from_secs(2_000));
    assert_eq!(attempts(&director), (0, 0));
}

#[test]
fn ewma_accepts_servers_behind_nat_only() {
    let key = ServiceKey::tcp(addr(VIP));
    let ewma = || service("ewma", Extras::default());
    let mut measured = director(key, ewma(), Forwarding::Nat, 1);
    let refused = Err(Error::NeedsReplies);
    let now = Instant::ZERO;
    for method in [Forwarding::Route, Forwarding::Tunnel] {
        assert_eq!(add(&mut measured, key, 2, 1, method, now), refused);
        let config = ServerConfig::new(1, method);
        assert_eq!(
            measured.control.edit_server(&key, server(1), &config),
            refused
        );
        let mut other = director(key, service("rr", Extras::default()), method, 1);
        assert_eq!(other.control.edit_service(&key, ewma(), None), refused);
        let scheduler = &other.control.services().next().unwrap().config().scheduler;
        assert_eq!(
            scheduler, "rr",
            "a refused operation has changed the scheduler"
        );
    }
}

#[test]
fn latency_of_servers_behind_nat_is_measured_with_wlc() {
    let key = ServiceKey::tcp(addr(VIP));
    let mut director = director(key, service("wlc", Extras::default()), Forwarding::Nat, 1);
    let now = Instant::from_secs(1);
    establish(&mut director, addr(CLIENT), true, now);
    let service = director.control.services().next().unwrap();
    assert!(service.servers()[0].latency().average(now).is_some());
}

#[test]
fn kernel_profile_has_timeouts_of_kernel_and_modern_profile_of_rfcs() {
    let key = ServiceKey::tcp(addr(VIP));
    for (profile, expected) in [
        (Profile::Kernel, ((900, 120, 300), [60, 900, 60])),
        (Profile::Modern, ((7440, 240, 300), [240, 7440, 240])),
    ] {
        let mut director = Director::new(Options {
            profile,
            ..Options::default()
        });
        assert_eq!(director.control.timeouts(), expected.0, "{profile:?}");
        let now = Instant::from_secs(1);
        director.advance(now);
        let config = service("rr", Extras::default());
        director.control.add_service(key, config, None).unwrap();
        add(&mut director, key, 1, 1, Forwarding::Nat, now).unwrap();
        let (client, vip) = (addr(CLIENT), addr(VIP));
        let mut seen = Vec::new();
        for flags in [SYN, ACK, ACK | TcpFlags::FIN] {
            let _ = director.handle_packet(&tcp(client, vip, flags), now);
            seen.push(only(&director, now).expires.as_secs());
        }
        assert_eq!(seen, expected.1, "{profile:?}");
    }
}

/// Sends a TCP segment with the payload `text` from `src` to `dst`.
fn say(
    director: &mut Director,
    (src, dst): (SocketAddr, SocketAddr),
    (seq, ack): (u32, u32),
    text: &[u8],
    now: Instant,
) -> Verdict {
    let mut bytes = vec![0; 20];
    bytes[4..8].copy_from_slice(&seq.to_be_bytes());
    bytes[8..12].copy_from_slice(&ack.to_be_bytes());
    bytes[12] = 5 << 4;
    bytes[13] = ACK;
    bytes.extend_from_slice(text);
    let segment = Segment {
        bytes: &bytes,
        trusted: true,
    };
    let meta = PacketMeta {
        segment,
        ..tcp(src, dst, ACK)
    };
    director.handle_packet(&meta, now)
}

/// An FTP client and server: the helper has rewritten a reply of the server, and expects a data
/// connection. Returns the director, and the virtual address and port of this data connection.
fn ftp(now: Instant) -> (Director, SocketAddr) {
    let extras = down(OnServerDown::Reset);
    let key = ServiceKey::tcp(addr(VIP));
    let mut director = director(key, service("rr", extras), Forwarding::Nat, 1);
    director.control.set_ftp_ports(vec![80]).unwrap();
    let (client, vip, server) = (addr(CLIENT), addr(VIP), server(1));
    let _ = send(&mut director, &tcp(client, vip, SYN), (99, 0, 0), now);
    let answer = tcp(server, client, SYN | ACK);
    let _ = send(&mut director, &answer, (199, 100, 0), now);
    let _ = say(&mut director, (client, vip), (100, 200), b"", now);
    let _ = say(&mut director, (client, vip), (100, 200), b"PASV\r\n", now);
    let reply = b"227 Entering Passive Mode (10,0,0,1,156,65).\r\n";
    let verdict = say(&mut director, (server, client), (200, 106), reply, now);
    let Verdict::Reply(reply) = verdict else {
        panic!("{verdict:?}");
    };
    // "198,51,100,1" replaces "10,0,0,1".
    assert_eq!(reply.edit.unwrap().replacement.unwrap().growth(), 4);
    (director, SocketAddr::new(vip.ip(), 40_001))
}

#[test]
fn reset_after_rewritten_ftp_reply_has_expected_sequence_numbers() {
    const REPLY: u32 = 46;
    let now = Instant::from_secs(1);
    for acknowledged in [false, true] {
        let mut director = ftp(now).0;
        let (client, vip) = (addr(CLIENT), addr(VIP));
        if acknowledged {
            let numbers = (106, 200 + REPLY + 4);
            let _ = say(&mut director, (client, vip), numbers, b"", now);
        }
        remove(&mut director, 1, now);
        let resets = drain(&mut director, now);
        let of = |src| resets.iter().find(|reset| reset.tuple.src == src).unwrap();
        assert_eq!(
            of(vip).seq,
            200 + REPLY + 4,
            "the reset does not have the number that the client expects"
        );
        assert_eq!(of(client).seq, 106);
        assert_eq!(
            of(client).ack,
            Some(200 + REPLY),
            "the reset does not acknowledge the number of the server"
        );
    }
}

#[test]
fn ftp_data_connection_of_removed_server_is_reset() {
    let now = Instant::from_secs(1);
    let (mut director, data) = ftp(now);
    let (client, server) = (
        addr("192.0.2.7:40001"),
        SocketAddr::new(server(1).ip(), 40_001),
    );
    let meta = |src, dst, flags| PacketMeta {
        hook: if dst == data {
            Hook::Local
        } else {
            Hook::Transit
        },
        ..tcp(src, dst, flags)
    };
    let _ = send(&mut director, &meta(client, data, SYN), (9, 0, 0), now);
    let _ = send(
        &mut director,
        &meta(server, client, SYN | ACK),
        (19, 10, 0),
        now,
    );
    let _ = send(&mut director, &meta(client, data, ACK), (10, 20, 0), now);
    let _ = send(
        &mut director,
        &meta(server, client, ACK),
        (20, 10, 500),
        now,
    );
    remove(&mut director, 1, now);
    let resets = drain(&mut director, now);
    let to_client = resets.iter().find(|reset| reset.tuple.src == data);
    assert_eq!(to_client.expect("the client gets a reset").seq, 520);
    assert!(
        resets
            .iter()
            .any(|reset| reset.tuple.src == client && reset.seq == 10)
    );
}

/// A scheduler whose timer runs ten times a second.
#[derive(Debug)]
struct Ticking;

impl Scheduler for Ticking {
    fn pick(&mut self, _: &[Arc<Server>], _: &Request) -> Option<usize> {
        None
    }

    fn period(&self) -> Option<Duration> {
        Some(Duration::from_millis(100))
    }
}

#[test]
fn scheduler_set_by_edit_has_wakeup_after_its_first_period() {
    let mut schedulers = Registry::new();
    schedulers.register("ticking", || Box::new(Ticking));
    let mut director = Director::new(Options {
        schedulers,
        ..Options::default()
    });
    director.advance(Instant::ZERO);
    let key = ServiceKey::tcp(addr(VIP));
    let config = |scheduler| service(scheduler, Extras::default());
    let control = &mut director.control;
    control.add_service(key, config("rr"), None).unwrap();
    control.edit_service(&key, config("ticking"), None).unwrap();
    let first = Instant::ZERO + Duration::from_millis(100);
    assert_eq!(control.next_wakeup(), Some(first));
}
