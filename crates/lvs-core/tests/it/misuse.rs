//! Each operation refuses wrong arguments with an error, and then changes nothing. No order of
//! calls, no value, and no shard of another director makes a director panic.

use std::net::SocketAddr;
use std::time::Duration;

use lvs_core::tunnel::{Tunnel, TunnelChecksum};
use lvs_core::{
    Control, Director, DropReason, Error, Family, Forwarding, Hook, IcmpError, Instant, Options,
    PacketMeta, Pool, Protocol, Registry, SctpChunk, Server, ServerConfig, ServiceConfig,
    ServiceFlags, ServiceKey, TcpFlags, Transport, Tuple, Verdict, mark, sync,
};
use proptest::prelude::*;

use crate::common::{CLIENT, VIP, addr};

const SERVER: &str = "10.0.0.1:80";

fn web() -> ServiceKey {
    ServiceKey::tcp(addr(VIP))
}

fn rr() -> ServiceConfig {
    ServiceConfig::new(Family::V4, "rr")
}

fn nat(weight: i32) -> ServerConfig {
    ServerConfig::new(weight, Forwarding::Nat)
}

fn small(max_connections: usize) -> Director {
    let mut director = Director::new(Options {
        max_connections,
        ..Options::default()
    });
    let control = &mut director.control;
    control.add_service(web(), rr(), None).unwrap();
    control
        .add_server(&web(), addr(SERVER), &nat(1), Instant::ZERO)
        .unwrap();
    director
}

fn syn(client: &str) -> PacketMeta<'static> {
    PacketMeta::tcp(Hook::Local, addr(client), addr(VIP), TcpFlags::SYN)
}

/// The services, servers, daemons, timeouts and sysctls of a director as text; a refused operation
/// must not change them.
fn seen(control: &Control) -> String {
    let services: Vec<_> = control
        .services()
        .map(|service| {
            let servers = service.servers().iter();
            let servers: Vec<_> = servers
                .map(|server| {
                    let conns = (server.active(), server.total());
                    (server.addr(), server.config(), conns)
                })
                .collect();
            let owner = service.owner().map(str::to_owned);
            (service.key(), service.config().clone(), owner, servers)
        })
        .collect();
    let daemons = (control.master(), control.backup());
    format!(
        "{services:?}{:?}{:?}{daemons:?}",
        control.timeouts(),
        control.sysctls()
    )
}

/// Checks that each of `refusals` fails with its error and changes nothing.
fn refused(control: &mut Control, refusals: Vec<(Error, Call<'_>)>) {
    for (number, (error, call)) in refusals.into_iter().enumerate() {
        let before = seen(control);
        assert_eq!(call(control), Err(error), "call number {number}");
        assert_eq!(
            seen(control),
            before,
            "call number {number} was refused, but changed the configuration: {error}"
        );
    }
}

type Call<'a> = Box<dyn FnOnce(&mut Control) -> Result<(), Error> + 'a>;

fn adds(key: ServiceKey, config: ServiceConfig) -> Call<'static> {
    Box::new(move |control| control.add_service(key, config, None))
}

fn edits(key: ServiceKey, config: ServiceConfig) -> Call<'static> {
    Box::new(move |control| control.edit_service(&key, config, Some("me".into())))
}

fn adds_server(key: ServiceKey, server: &'static str, config: ServerConfig) -> Call<'static> {
    Box::new(move |control| control.add_server(&key, addr(server), &config, Instant::ZERO))
}

fn edits_server(key: ServiceKey, server: &'static str, config: ServerConfig) -> Call<'static> {
    Box::new(move |control| control.edit_server(&key, addr(server), &config))
}

#[test]
fn service_change_with_invalid_setting_unknown_target_or_existing_service_is_refused() {
    let mut director = small(16);
    let other = ServiceKey::tcp(addr("198.51.100.2:80"));
    let six = ServiceKey::tcp(addr("[2001:db8::1]:80"));
    let mark = |mark| ServiceKey::Mark {
        family: Family::V4,
        mark,
    };
    let of = |protocol| ServiceKey::Address {
        protocol,
        addr: addr(VIP),
    };
    let unknown = ServiceConfig::new(Family::V4, "fastest");
    let mut engine = rr();
    engine.engine = Some("http".into());
    let prefix = |netmask| ServiceConfig {
        netmask,
        ..ServiceConfig::new(Family::V6, "rr")
    };
    let six_rr = ServiceConfig::new(Family::V6, "rr");
    director.control.add_service(six, six_rr, None).unwrap();
    refused(
        &mut director.control,
        vec![
            (Error::ServiceExists, adds(web(), rr())),
            (Error::ServiceExists, adds(six, prefix(64))),
            (Error::UnknownScheduler, adds(other, unknown.clone())),
            (
                Error::UnknownScheduler,
                adds(other, ServiceConfig::new(Family::V4, "")),
            ),
            (Error::UnknownEngine, adds(other, engine.clone())),
            (Error::Protocol, adds(of(Protocol::ICMP), rr())),
            (Error::Protocol, adds(of(Protocol(0)), rr())),
            (Error::Protocol, adds(of(Protocol::ESP), rr())),
            (Error::ZeroMark, adds(mark(0), rr())),
            (
                Error::PrefixLength,
                adds(ServiceKey::tcp(addr("[::1]:1")), prefix(0)),
            ),
            (
                Error::PrefixLength,
                adds(ServiceKey::tcp(addr("[::1]:1")), prefix(129)),
            ),
            (
                Error::PrefixLength,
                adds(ServiceKey::tcp(addr("[::1]:1")), prefix(u32::MAX)),
            ),
            (Error::NoService, edits(other, rr())),
            (Error::NoService, edits(mark(7), rr())),
            (Error::UnknownScheduler, edits(web(), unknown)),
            (Error::UnknownEngine, edits(web(), engine)),
            (Error::PrefixLength, edits(six, prefix(0))),
            (
                Error::NoService,
                Box::new(|control| control.delete_service(&other, Instant::ZERO)),
            ),
            (
                Error::NoService,
                Box::new(|control| control.zero(Some(&other))),
            ),
        ],
    );
    // A second deletion is an error. A second flush has no effect.
    director
        .control
        .delete_service(&web(), Instant::ZERO)
        .unwrap();
    let again = director.control.delete_service(&web(), Instant::ZERO);
    assert_eq!(again, Err(Error::NoService));
    director.control.flush(Instant::ZERO);
    director.control.flush(Instant::ZERO);
    assert_eq!(director.control.services().count(), 0);
}

#[test]
fn server_change_with_invalid_setting_unknown_target_or_existing_server_is_refused() {
    let mut director = small(16);
    let none = ServiceKey::tcp(addr("198.51.100.2:80"));
    let other = "10.0.0.2:80";
    let thresholds = |upper, lower| ServerConfig {
        upper,
        lower,
        ..nat(1)
    };
    let gue = ServerConfig {
        tunnel: Tunnel::Gue {
            port: 0,
            checksum: TunnelChecksum::None,
        },
        ..ServerConfig::new(1, Forwarding::Tunnel)
    };
    let mut refusals = vec![
        (Error::NoService, adds_server(none, other, nat(1))),
        (Error::ServerExists, adds_server(web(), SERVER, nat(9))),
        (Error::WeightRange, adds_server(web(), other, nat(-1))),
        (Error::WeightRange, adds_server(web(), other, nat(i32::MIN))),
        (
            Error::ThresholdRange,
            adds_server(web(), other, thresholds(1, 2)),
        ),
        (Error::TunnelPort, adds_server(web(), other, gue)),
        (
            Error::FamilyMismatch,
            adds_server(web(), "[2001:db8::2]:80", nat(1)),
        ),
        (Error::NoService, edits_server(none, SERVER, nat(1))),
        (Error::NoServer, edits_server(web(), other, nat(1))),
        (Error::WeightRange, edits_server(web(), SERVER, nat(-7))),
        (
            Error::ThresholdRange,
            edits_server(web(), SERVER, thresholds(5, 6)),
        ),
        (Error::TunnelPort, edits_server(web(), SERVER, gue)),
        (
            Error::NoService,
            Box::new(|control| control.delete_server(&none, addr(SERVER), Instant::ZERO)),
        ),
        (
            Error::NoServer,
            Box::new(|control| control.delete_server(&web(), addr(other), Instant::ZERO)),
        ),
    ];
    for nobody in ["0.0.0.0:80", "224.0.0.1:80", "255.255.255.255:80"] {
        refusals.push((Error::NotUnicast, adds_server(web(), nobody, nat(1))));
    }
    for upper in [1 << 31, u32::MAX] {
        let error = Error::ThresholdTooLarge;
        refusals.push((error, adds_server(web(), other, thresholds(upper, 0))));
    }
    refused(&mut director.control, refusals);
    let six = ServiceKey::tcp(addr("[2001:db8::1]:80"));
    let config = ServiceConfig::new(Family::V6, "rr");
    director.control.add_service(six, config, None).unwrap();
    let refusals = [
        "[::]:80",
        "[ff02::1]:80",
        "[fe80::1]:80",
        "[::ffff:10.0.0.1]:80",
    ]
    .map(|nobody| (Error::NotUnicast, adds_server(six, nobody, nat(1))));
    refused(&mut director.control, refusals.into());
}

#[test]
fn setting_with_unknown_name_or_invalid_value_is_refused() {
    let mut director = small(16);
    let timeouts = |tcp, fin, udp| -> Call<'static> {
        Box::new(move |control| control.set_timeouts(tcp, fin, udp))
    };
    let sysctl = |name: &'static str, value: &'static str| -> Call<'static> {
        Box::new(move |control| control.set_sysctl(name, value))
    };
    let mut refusals = vec![
        (Error::TimeoutRange, timeouts(8_589_935, 0, 0)),
        (Error::TimeoutRange, timeouts(1, 1, u32::MAX)),
        (Error::UnknownSysctl, sysctl("no_such", "1")),
        (Error::UnknownSysctl, sysctl("", "1")),
        (Error::SysctlValue, sysctl("drop_entry", "4")),
        (Error::SysctlValue, sysctl("drop_packet", "-1")),
        (Error::SysctlValue, sysctl("sync_ports", "0")),
        (Error::SysctlValue, sysctl("sync_ports", "3")),
        (Error::SysctlValue, sysctl("sync_threshold", "3")),
        (Error::SysctlValue, sysctl("sync_threshold", "3 3")),
        (Error::SysctlValue, sysctl("sync_version", "2")),
        (Error::SysctlValue, sysctl("est_nice", "20")),
    ];
    for value in ["", " ", "x", "1 1", "99999999999", "0x1", "-", "\0"] {
        refusals.push((Error::SysctlValue, sysctl("expire_nodest_conn", value)));
    }
    refused(&mut director.control, refusals);
    assert_eq!(
        director.control.sysctls().get("no_such"),
        Err(Error::UnknownSysctl)
    );
}

#[test]
fn sync_daemon_refuses_second_start_stop_if_not_running_and_mixed_families() {
    let mut director = small(16);
    let master = sync::Master::new(1, Some(0), false);
    let backup = sync::Backup::new(1, Some(u16::MAX), u32::MAX, true);
    let starts_master: fn() -> Call<'static> =
        || Box::new(|control| control.start_master(sync::Master::new(1, None, true)));
    let starts_backup: fn() -> Call<'static> =
        || Box::new(|control| control.start_backup(sync::Backup::new(1, None, 0, false)));
    refused(
        &mut director.control,
        vec![
            (Error::DaemonNotRunning, Box::new(Control::stop_master)),
            (Error::DaemonNotRunning, Box::new(Control::stop_backup)),
        ],
    );
    // Without a backup daemon, the message has no effect.
    director.handle_sync(b"\0\0\0\x08\0\x01\0\0", Instant::ZERO);
    director.control.start_master(master).unwrap();
    director.control.start_backup(backup).unwrap();
    let mixed = ServerConfig::new(1, Forwarding::Tunnel);
    refused(
        &mut director.control,
        vec![
            (Error::DaemonRunning, starts_master()),
            (Error::DaemonRunning, starts_backup()),
            (
                Error::FamilyMismatch,
                adds_server(web(), "[2001:db8::2]:80", mixed),
            ),
        ],
    );
    for message in [&b""[..], b"\0", b"\0\x01\0\x04", &[0xff; 65_535]] {
        director.handle_sync(message, Instant::ZERO);
    }
    director.control.stop_master().unwrap();
    director.control.stop_backup().unwrap();
    let control = &mut director.control;
    control
        .add_server(&web(), addr("[2001:db8::2]:80"), &mixed, Instant::ZERO)
        .unwrap();
    refused(
        control,
        vec![
            (Error::FamilyMismatch, starts_master()),
            (Error::FamilyMismatch, starts_backup()),
        ],
    );
}

#[test]
fn full_table_refuses_further_connections() {
    for capacity in [0, 1, 2] {
        let mut director = small(capacity);
        let mut taken = 0;
        for port in 1..=9 {
            let client = format!("192.0.2.7:{port}");
            match director.handle_packet(&syn(&client), Instant::ZERO) {
                Verdict::Forward(_) => taken += 1,
                verdict => assert_eq!(verdict, Verdict::Drop(DropReason::TableFull)),
            }
        }
        assert_eq!(
            (taken, director.shard.len()),
            (capacity.max(1), capacity.max(1))
        );
        director.advance(Instant::from_secs(100));
        assert!(director.shard.is_empty());
        let service = director.control.service(&web()).unwrap();
        assert_eq!(service.servers()[0].total(), 0);
    }
    // The table of templates has room, and the table of connections refuses persistent connections.
    let mut director = Director::new(Options {
        max_connections: 1,
        ..Options::default()
    });
    let config = ServiceConfig {
        flags: ServiceFlags(ServiceFlags::PERSISTENT),
        timeout: u32::MAX,
        ..rr()
    };
    let control = &mut director.control;
    control.add_service(web(), config, None).unwrap();
    control
        .add_server(&web(), addr(SERVER), &nat(1), Instant::ZERO)
        .unwrap();
    let first = director.handle_packet(&syn(CLIENT), Instant::ZERO);
    assert!(matches!(first, Verdict::Forward(_)));
    let second = director.handle_packet(&syn("192.0.2.8:1"), Instant::ZERO);
    assert_eq!(second, Verdict::Drop(DropReason::TableFull));
}

#[test]
fn clock_jump_in_either_direction_does_not_panic() {
    let mut director = small(16);
    let late = Instant::from_secs(1_000_000);
    let _ = director.handle_packet(&syn(CLIENT), late);
    // The time goes backwards, and the director's clock does not follow.
    let again = director.handle_packet(&syn(CLIENT), Instant::ZERO);
    assert!(matches!(again, Verdict::Forward(_)));
    assert_eq!(director.advance(Instant::ZERO), late);
    assert_eq!(director.shard.len(), 1);
    let control = &mut director.control;
    control
        .delete_server(&web(), addr(SERVER), Instant::ZERO)
        .unwrap();
    control.advance(Instant::ZERO);
    director.shard.advance(Instant::ZERO, usize::MAX);
    director.shard.advance(late, 0);
    director.advance(late + Duration::from_secs(3600));
    assert!(director.shard.is_empty());
    let _ = director.next_wakeup();
    // A `Control` is used without its shard, and a shard without its `Control`, in any order.
    let mut control = Control::new(Options::default());
    let mut shard = control.shard(0).unwrap();
    control.advance_with(&mut shard, late);
    control.advance_with(&mut shard, Instant::ZERO);
    control.sweep(&mut shard);
    assert!(shard.is_empty() && shard.capacity() > 0);
    // The latest possible time.
    let end = Instant::from_nanos(u64::MAX);
    assert_eq!(end + Duration::MAX, end);
    assert_eq!(Instant::ZERO - end, Duration::ZERO);
}

#[test]
fn missing_or_foreign_shard_is_refused() {
    for shards in [0, 1, 3] {
        let control = Control::new(Options {
            shards,
            max_connections: 8,
            ..Options::default()
        });
        let there = (0..5).filter(|&number| control.shard(number).is_some());
        assert_eq!(there.count(), shards.max(1));
        assert!(control.shard(usize::MAX).is_none());
    }
    // The shard of another director is neither read nor changed.
    let (mut ours, mut theirs) = (small(16), small(16));
    for director in [&mut ours, &mut theirs] {
        let opened = director.handle_packet(&syn(CLIENT), Instant::ZERO);
        assert!(matches!(opened, Verdict::Forward(_)));
    }
    let control = &mut ours.control;
    control
        .add_server(&web(), addr("10.0.0.9:80"), &nat(1), Instant::ZERO)
        .unwrap();
    control.set_sysctl("expire_nodest_conn", "1").unwrap();
    control
        .delete_server(&web(), addr(SERVER), Instant::ZERO)
        .unwrap();
    let new = syn("192.0.2.9:1");
    let Err(pending) = theirs.shard.handle_packet(&new, Instant::ZERO) else {
        panic!("the shard has opened a connection alone");
    };
    let foreign = Verdict::Drop(DropReason::ForeignShard);
    let verdict = control.admit(&mut theirs.shard, &new, pending, Instant::ZERO);
    assert_eq!(verdict, foreign);
    let error = IcmpError {
        hook: Hook::Local,
        src: addr(CLIENT).ip(),
        dst: addr(VIP).ip(),
        inner: Tuple::tcp(addr(VIP), addr("192.0.2.9:1")),
        inner_ports: true,
        checksum_ok: true,
        mark: 0,
        len: 56,
    };
    let verdict = control.admit_icmp_error(&mut theirs.shard, &error, pending, Instant::ZERO);
    assert_eq!(verdict, foreign);
    control.sweep(&mut theirs.shard);
    control.advance_with(&mut theirs.shard, Instant::from_secs(10_000));
    control
        .start_backup(sync::Backup::new(0, None, 1500, false))
        .unwrap();
    control.handle_sync(&mut theirs.shard, &[0; 44], Instant::ZERO);
    let _ = control.explain(&theirs.shard, new.tuple, 0, Instant::ZERO);
    assert_eq!(theirs.shard.len(), 1);
    theirs.advance(Instant::from_secs(1000));
    assert!(theirs.shard.is_empty());
    ours.advance(Instant::from_secs(20_000));
    assert!(ours.shard.is_empty());
}

#[test]
fn admit_with_outdated_result_of_shard_forwards_packet() {
    // When `Control` gets the shard's result, it is out of date.
    let mut director = small(16);
    director.control.set_sysctl("conn_reuse_mode", "1").unwrap();
    for flags in [TcpFlags::SYN, TcpFlags::ACK, TcpFlags::RST] {
        let mut packet = syn(CLIENT);
        packet.transport = Transport::Tcp(TcpFlags(flags));
        let _ = director.handle_packet(&packet, Instant::ZERO);
    }
    let Director { control, shard, .. } = &mut director;
    let Err(pending) = shard.handle_packet(&syn(CLIENT), Instant::ZERO) else {
        panic!("the shard has not requested to replace the closed connection");
    };
    control.advance_with(shard, Instant::from_secs(1000));
    assert!(shard.is_empty());
    let verdict = control.admit(shard, &syn(CLIENT), pending, Instant::from_secs(1000));
    assert!(matches!(verdict, Verdict::Forward(_)));
    // The packet is decided again with a result that is long out of date.
    let verdict = control.admit(shard, &syn(CLIENT), pending, Instant::from_secs(1000));
    assert!(matches!(verdict, Verdict::Forward(_)), "{verdict:?}");
    control.advance_with(shard, Instant::from_secs(5000));
    let servers = control.service(&web()).unwrap().servers();
    assert_eq!((shard.len(), servers[0].total()), (0, 0));
}

#[test]
fn pool_and_registry_refuse_invalid_calls() {
    assert!(Registry::new().create("fastest").is_none());
    let mut registry = Registry::new();
    registry.remove("fastest");
    registry.remove("rr");
    assert!(registry.create("rr").is_none());
    let mut control = Control::new(Options {
        schedulers: registry,
        ..Options::default()
    });
    assert_eq!(
        control.add_service(web(), rr(), None),
        Err(Error::UnknownScheduler)
    );

    for name in Registry::new().names() {
        let mut pool = Pool::new(Registry::new().create(name).unwrap());
        let request = lvs_core::Request {
            client: addr(CLIENT),
            virt: addr(VIP),
            protocol: Protocol::TCP,
            flags: ServiceFlags(u32::MAX),
            now: Instant::ZERO,
        };
        assert!(pool.pick(&request).is_none(), "{name}");
        assert_eq!(pool.edit(addr(SERVER), &nat(1)), Err(Error::NoServer));
        assert_eq!(pool.remove(addr(SERVER)).err(), Some(Error::NoServer));
        assert_eq!(pool.insert(addr(SERVER), &nat(-1)), Err(Error::WeightRange));
        assert!(pool.servers().is_empty());
        // Every server has the greatest possible weight.
        for last in 1..=20 {
            let server = SocketAddr::from(([10, 0, 0, last], 80));
            pool.insert(server, &nat(i32::MAX)).unwrap();
        }
        assert_eq!(pool.insert(addr(SERVER), &nat(1)), Err(Error::ServerExists));
        let opened: Vec<_> = (0..50)
            .filter_map(|_| Some(pool.pick(&request)?.open()))
            .collect();
        assert_eq!(opened.is_empty(), name == "none", "{name}");
        pool.tick(Instant::from_nanos(u64::MAX));
        let taken = pool.remove(addr(SERVER)).unwrap();
        drop(opened);
        assert_eq!(taken.total(), 0);
        for last in 2..=20 {
            pool.remove(SocketAddr::from(([10, 0, 0, last], 80)))
                .unwrap();
        }
        assert!(pool.pick(&request).is_none(), "{name}");
    }
    assert_eq!(Server::check(&nat(-1)), Err(Error::WeightRange));
}

#[test]
fn mark_rule_or_prefix_with_invalid_value_is_refused() {
    assert!(lvs_core::Prefix::new(addr(VIP).ip(), 33).is_none());
    assert!(lvs_core::Prefix::new(addr("[::1]:1").ip(), 129).is_none());
    for rule in [
        "",
        "--mark",
        "--mark 0",
        "--mark 4294967296",
        "--mark x --destination 192.0.2.1",
        "--destination 192.0.2.1",
        "--destination 192.0.2.1/33 --mark 1",
        "--destination 192.0.2.1 --source 2001:db8::1 --mark 1",
        "--destination 192.0.2.1 --protocol tcp --ports 90-80 --mark 1",
        "--destination 192.0.2.1 --protocol tcp --ports 65536 --mark 1",
        "--destination 192.0.2.1 --protocol tcp --ports --mark 1",
        "--destination 192.0.2.1 --mark 1 --drop",
        "--no-such 1",
    ] {
        let words: Vec<&str> = rule.split_ascii_whitespace().collect();
        let error = mark::MarkRule::parse(&words).expect_err(rule);
        assert!(!error.is_empty(), "{rule}");
    }
}

fn socket() -> impl Strategy<Value = SocketAddr> {
    prop_oneof![
        Just(addr(VIP)),
        Just(addr(CLIENT)),
        Just(addr(SERVER)),
        Just(addr("[2001:db8::1]:80")),
        Just(addr("0.0.0.0:0")),
        any::<([u8; 4], u16)>().prop_map(SocketAddr::from),
        any::<([u8; 16], u16)>().prop_map(SocketAddr::from),
    ]
}

fn transport() -> impl Strategy<Value = Transport<'static>> {
    prop_oneof![
        any::<u8>().prop_map(|flags| Transport::Tcp(TcpFlags(flags))),
        Just(Transport::Udp(b"x\r\nCall-ID: a\r\n\r\n")),
        any::<(u8, bool)>().prop_map(|(first, abort_follows)| Transport::Sctp(SctpChunk {
            first,
            abort_follows
        })),
        any::<(bool, bool)>().prop_map(|(ports, header)| Transport::Short { ports, header }),
        Just(Transport::Other),
    ]
}

proptest! {
    /// Packets that contradict themselves: two families, a protocol without its header, no address,
    /// any mark and hook.
    #[test]
    fn damaged_packets_do_not_panic_and_table_stays_bounded(
        packets in prop::collection::vec(
            (socket(), socket(), transport(), prop::sample::select(vec![1u8, 6, 17, 50, 51, 58, 132, 255]), 0u8..3, 0u32..2, any::<u64>()),
            1..30,
        ),
    ) {
        let mut director = small(8);
        for name in ["schedule_icmp", "nat_icmp_send", "sloppy_tcp", "sloppy_sctp", "cache_bypass"] {
            director.control.set_sysctl(name, "1").unwrap();
        }
        let mark = ServiceKey::Mark { family: Family::V4, mark: 1 };
        director.control.add_service(mark, rr(), None).unwrap();
        for (src, dst, transport, protocol, hook, mark, now) in packets {
            let hook = [Hook::Local, Hook::Transit, Hook::Output][usize::from(hook)];
            let tuple = Tuple::new(Protocol(protocol), src, dst);
            // Times are less than one hour apart, and may go backwards.
            let now = Instant::from_nanos(now % 3_600_000_000_000);
            let _ = director.handle_packet(&PacketMeta { mark, ..PacketMeta::new(hook, tuple, transport, u32::MAX) }, now);
            let error = IcmpError {
                hook,
                src: dst.ip(),
                dst: src.ip(),
                inner: tuple,
                inner_ports: mark == 1,
                checksum_ok: mark == 0,
                mark,
                len: 0,
            };
            let _ = director.handle_icmp_error(&error, now);
            let _ = director.control.explain(&director.shard, tuple, mark, now);
            prop_assert!(director.shard.len() <= 8);
        }
    }
}
