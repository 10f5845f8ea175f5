//! A list of changes is applied completely or not at all.
#![cfg(feature = "api")]

use std::net::{IpAddr, SocketAddr};

use lvs_core::api::{
    Access, CHANGES_MAX, Call, Changes, Done, Failure, FailureCode, Host, LocalPool, Need,
    Permissive, ServerSpec, ServiceId, ServiceSpec, Sysctl, Timeouts,
};
use lvs_core::sync::{SyncDaemon, SyncRole};
use lvs_core::tunnel::Tunnel;
use lvs_core::{
    Control, Error, Family, Forwarding, Instant, Options, ServerConfig, ServiceConfig, ServiceFlags,
};
use proptest::prelude::*;

/// A host with one interface and one broadcast address. It refuses servers with the forwarding
/// method `Local`.
struct SmallHost;

impl Host for SmallHost {
    fn permits(&self, need: &Need<'_>) -> Result<(), Failure> {
        match need {
            Need::Server(Forwarding::Local) => {
                Err(Failure::new(FailureCode::Unsupported, "not here"))
            }
            _ => Ok(()),
        }
    }

    fn is_broadcast(&self, addr: IpAddr) -> bool {
        addr == IpAddr::from([10, 0, 0, 3])
    }

    fn mtu(&self, interface: &str) -> Option<u32> {
        (interface == "eth0").then_some(9000)
    }
}

fn control() -> Control {
    Control::new(Options {
        max_connections: 16,
        ..Options::default()
    })
}

/// The complete state of a director, including its schedulers, as text.
fn picture(control: &Control) -> String {
    format!("{control:?}")
}

fn service(n: u8) -> ServiceId {
    let address = |port| SocketAddr::from(([198, 51, 100, 1], port));
    match n % 5 {
        0 => ServiceId::Tcp {
            address: address(80),
        },
        1 => ServiceId::Udp {
            address: address(53),
        },
        2 => ServiceId::Tcp {
            address: "[2001:db8::1]:80".parse().unwrap(),
        },
        3 => ServiceId::Fwmark {
            mark: 7,
            family: Family::V4,
        },
        _ => ServiceId::Fwmark {
            mark: 0,
            family: Family::V6,
        },
    }
}

fn server(n: u8) -> SocketAddr {
    match n % 6 {
        5 => "[2001:db8:1::1]:80".parse().unwrap(),
        4 => SocketAddr::from(([224, 0, 0, 1], 80)),
        n => SocketAddr::from(([10, 0, 0, n], 80)),
    }
}

fn service_spec() -> impl Strategy<Value = ServiceSpec> {
    (0u8..5, 0usize..7, any::<bool>(), 0u8..8).prop_map(|(id, scheduler, one_packet, odd)| {
        let id = service(id);
        let family = lvs_core::ServiceKey::from(id).family();
        let names = ["rr", "wlc", "mh", "lblc", "ewma", "wrr", "nonsense"];
        let mut config = ServiceConfig::new(family, names[scheduler]);
        if one_packet {
            config.flags = ServiceFlags(ServiceFlags::ONE_PACKET);
        }
        match odd {
            0 => config.netmask = 0,
            1 => config.engine = Some("sip".into()),
            2 => config.engine = Some("nonsense".into()),
            3 => config.extras.slow_start = 30,
            _ => {}
        }
        ServiceSpec {
            service: id,
            config,
            owner: None,
        }
    })
}

fn server_spec() -> impl Strategy<Value = ServerSpec> {
    (0u8..5, 0u8..6, 0usize..6, -1i32..4, 0u32..3, any::<bool>()).prop_map(
        |(id, addr, method, weight, upper, gue)| {
            let methods = [
                Forwarding::Nat,
                Forwarding::Nat,
                Forwarding::Route,
                Forwarding::Tunnel,
                Forwarding::FullNat,
                Forwarding::Local,
            ];
            let mut config = ServerConfig::new(weight, methods[method]);
            config.upper = upper;
            config.lower = upper / 2;
            if gue {
                config.tunnel = Tunnel::Gue {
                    port: u16::try_from(upper).unwrap() * 6080,
                    checksum: lvs_core::tunnel::TunnelChecksum::None,
                };
            }
            ServerSpec {
                service: service(id),
                server: server(addr),
                config,
            }
        },
    )
}

fn daemon(role: SyncRole, interface: &str) -> SyncDaemon {
    SyncDaemon {
        role,
        interface: interface.into(),
        syncid: 1,
        maxlen: None,
        group: None,
        port: None,
        ttl: None,
    }
}

fn call() -> impl Strategy<Value = Call> {
    let role = prop_oneof![Just(SyncRole::Master), Just(SyncRole::Backup)];
    let addresses = prop::sample::subsequence(vec!["192.0.2.1", "2001:db8::2", "127.0.0.1"], 0..3);
    prop_oneof![
        6 => service_spec().prop_map(Call::ServiceAdd),
        3 => service_spec().prop_map(Call::ServiceEdit),
        2 => (0u8..5).prop_map(|id| Call::ServiceDelete { service: service(id) }),
        1 => Just(Call::ServiceFlush {}),
        1 => prop::option::of(0u8..5)
            .prop_map(|id| Call::ServiceZero { service: id.map(service) }),
        12 => server_spec().prop_map(Call::ServerAdd),
        6 => server_spec().prop_map(Call::ServerEdit),
        4 => (0u8..5, 0u8..6).prop_map(|(id, addr)| Call::ServerDelete {
            service: service(id),
            server: server(addr),
        }),
        1 => prop_oneof![Just(30), Just(u32::MAX)].prop_map(|tcp| Call::TimeoutsSet(Timeouts {
            tcp,
            tcp_fin: 0,
            udp: 0,
        })),
        2 => (0usize..3, 0u8..3).prop_map(|(name, value)| Call::SysctlSet(Sysctl {
            name: ["drop_entry", "sync_version", "nonsense"][name].into(),
            value: value.to_string(),
        })),
        2 => (role.clone(), any::<bool>()).prop_map(|(role, known)| {
            Call::DaemonStart(daemon(role, if known { "eth0" } else { "eth9" }))
        }),
        1 => role.prop_map(|role| Call::DaemonStop { role, syncid: 0 }),
        2 => (0usize..2, prop::option::of(0usize..3)).prop_map(|(rule, position)| Call::MarkAdd {
            rule: ["--destination 192.0.2.1 --mark 7", "nonsense"][rule].into(),
            position,
        }),
        1 => (0usize..3).prop_map(|position| Call::MarkDelete { position }),
        1 => Just(Call::MarkSet { rules: vec!["--destination 192.0.2.2 --drop".into()] }),
        1 => Just(Call::VipsOwn { addresses: vec![IpAddr::from([192, 0, 2, 9])] }),
        3 => (addresses, any::<bool>()).prop_map(|(addresses, hairpin)| {
            Call::LocalSet(LocalPool {
                addresses: addresses.iter().map(|addr| addr.parse().unwrap()).collect(),
                hairpin,
            })
        }),
        1 => prop_oneof![
            Just(Call::Apply { changes: vec![] }),
            Just(Call::Stop {}),
            Just(Call::LocalGet {}),
        ],
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// A list either has the same result as its changes one by one, or changes nothing and is
    /// refused for its first invalid change.
    #[test]
    fn change_list_is_applied_completely_or_refused(lists in prop::collection::vec(prop::collection::vec(call(), 0..12), 1..12)) {
        let (mut whole, mut single) = (control(), control());
        let mut made: Vec<Call> = Vec::new();
        for (second, list) in (0..).zip(&lists) {
            let now = Instant::ZERO + std::time::Duration::from_secs(second);
            let before = picture(&whole);
            match whole.apply(list, &SmallHost, now) {
                Ok(_) => {
                    for call in list {
                        let one = single.apply(std::slice::from_ref(call), &SmallHost, now);
                        prop_assert!(one.is_ok(), "{call:?}: {one:?}");
                    }
                    made.extend_from_slice(list);
                }
                Err(refused) => {
                    prop_assert_eq!(&before, &picture(&whole), "a refused list has changed the configuration");
                    // The changes before the refused one are possible, and then the refused one
                    // alone fails for the same reason.
                    let mut other = control();
                    for call in made.iter().chain(&list[..refused.change]) {
                        other.apply(std::slice::from_ref(call), &SmallHost, now).unwrap();
                    }
                    let last = &list[refused.change..=refused.change];
                    let one = other.apply(last, &SmallHost, now).unwrap_err();
                    prop_assert_eq!(one.failure, refused.failure);
                }
            }
            prop_assert_eq!(picture(&whole), picture(&single));
        }
    }
}

proptest! {
    #[test]
    fn change_list_applied_in_pieces_has_result_of_whole_list(
        before in prop::collection::vec(call(), 0..12),
        list in prop::collection::vec(call(), 2..12),
        piece in 1_usize..4,
    ) {
        let (mut whole, mut pieces) = (control(), control());
        let now = Instant::ZERO;
        for call in &before {
            let call = std::slice::from_ref(call);
            prop_assert_eq!(
                whole.apply(call, &SmallHost, now),
                pieces.apply(call, &SmallHost, now)
            );
        }
        let made = (|| {
            let mut changes = Changes::new(&list)?;
            while changes.check(&pieces, &SmallHost, piece)? {}
            loop {
                if let Some(applied) = changes.make(&mut pieces, now, piece) {
                    return Ok(applied);
                }
            }
        })();
        prop_assert_eq!(whole.apply(&list, &SmallHost, now), made);
        prop_assert_eq!(picture(&whole), picture(&pieces));
    }
}

#[test]
fn flush_in_pieces_of_one_change_removes_one_service_per_call() {
    let mut control = control();
    let now = Instant::ZERO;
    let add = |n| {
        Call::ServiceAdd(ServiceSpec {
            service: service(n),
            config: ServiceConfig::new(Family::V4, "rr"),
            owner: None,
        })
    };
    control
        .apply(&[add(0), add(1), add(3)], &Permissive, now)
        .unwrap();
    let calls = [Call::ServiceFlush {}, add(1)];
    let mut changes = Changes::new(&calls).unwrap();
    while changes.check(&control, &Permissive, 1).unwrap() {}
    for left in [2, 1, 0] {
        assert!(changes.make(&mut control, now, 1).is_none());
        assert_eq!(control.services().count(), left);
    }
    assert!(changes.make(&mut control, now, 1).is_none());
    let applied = changes.make(&mut control, now, 1).unwrap();
    assert!(applied.flushed);
    assert_eq!(control.services().count(), 1);
}

/// A call of [`Changes::make`] for 16 changes removes at most 16 servers of a deleted service, so
/// that it does not need the lock of the `Control` for longer.
#[test]
fn servers_of_deleted_service_are_removed_in_portions() {
    let mut control = control();
    let mut calls = vec![web()];
    calls.extend((1..=100).map(|n| add(([10, 0, 1, n], 80).into(), Forwarding::Nat)));
    control.apply(&calls, &Permissive, Instant::ZERO).unwrap();
    let servers = control.endpoints().map(|(_, server)| server.clone());
    let servers: Vec<_> = servers.collect();
    let there = || {
        servers
            .iter()
            .filter(|server| server.is_available())
            .count()
    };
    for delete in [
        Call::ServiceFlush {},
        Call::ServiceDelete {
            service: service(0),
        },
    ] {
        assert_eq!(there(), 100);
        let list = [delete];
        let mut changes = Changes::new(&list).unwrap();
        changes.check(&control, &Permissive, 1).unwrap();
        let (mut before, mut pieces) = (100, 0);
        while changes.make(&mut control, Instant::ZERO, 16).is_none() {
            assert_eq!(
                control.services().count(),
                0,
                "packets still match a deleted service"
            );
            assert!(before - there() <= 16);
            (before, pieces) = (there(), pieces + 1);
        }
        assert!(there() == 0 && pieces >= 6);
        // The same servers, restored from the trash.
        control.apply(&calls, &Permissive, Instant::ZERO).unwrap();
    }
}

/// A short list is applied between two packets, completely or not at all; it can delete a service
/// and add it again.
#[test]
fn short_change_list_is_applied_at_once() {
    let mut control = control();
    let mut calls = vec![web()];
    calls.extend((1..=40).map(|n| add(([10, 0, 1, n], 80).into(), Forwarding::Nat)));
    control.apply(&calls, &Permissive, Instant::ZERO).unwrap();
    let id = |control: &Control| {
        let service = control.services().next().unwrap();
        service.servers().first().unwrap().id()
    };
    let last = id(&control);
    let list = [
        Call::ServiceDelete {
            service: service(0),
        },
        web(),
        add(([10, 0, 1, 40], 80).into(), Forwarding::Nat),
    ];
    let mut changes = Changes::new(&list).unwrap();
    changes.check(&control, &Permissive, 16).unwrap();
    assert!(changes.make(&mut control, Instant::ZERO, 16).is_some());
    assert_eq!(
        id(&control),
        last,
        "the server did not get its record back from the trash"
    );
    assert_eq!(control.endpoints().count(), 1);
}

fn web() -> Call {
    Call::ServiceAdd(ServiceSpec {
        service: service(0),
        config: ServiceConfig::new(Family::V4, "wlc"),
        owner: None,
    })
}

fn add(addr: SocketAddr, forwarding: Forwarding) -> Call {
    Call::ServerAdd(ServerSpec {
        service: service(0),
        server: addr,
        config: ServerConfig::new(1, forwarding),
    })
}

#[test]
fn change_list_whose_changes_need_earlier_ones_is_applied() {
    let mut control = control();
    let list = [
        web(),
        Call::LocalSet(LocalPool {
            addresses: vec![IpAddr::from([192, 0, 2, 1])],
            hairpin: false,
        }),
        add(server(1), Forwarding::FullNat),
        add(server(2), Forwarding::Nat),
        Call::ServerDelete {
            service: service(0),
            server: server(2),
        },
        add(server(2), Forwarding::Nat),
    ];
    let applied = control.apply(&list, &Permissive, Instant::ZERO).unwrap();
    assert_eq!(applied.services().collect::<Vec<_>>(), [service(0).into()]);
    assert!(applied.local && !applied.settings);
    let key = service(0).into();
    assert_eq!(control.service(&key).unwrap().servers().len(), 2);
}

#[test]
fn change_checks_run_in_the_order_of_the_kernel() {
    let mut control = control();
    control.apply(&[web()], &SmallHost, Instant::ZERO).unwrap();
    let refusal = |control: &mut Control, call: Call| {
        control
            .apply(&[call], &SmallHost, Instant::ZERO)
            .unwrap_err()
            .failure
    };
    let mut broadcast = ServerSpec {
        service: service(1),
        server: server(3),
        config: ServerConfig::new(-1, Forwarding::Nat),
    };
    for (error, mend) in [
        (Error::NoService, 0),
        (Error::WeightRange, 1),
        (Error::NotUnicast, 2),
    ] {
        match mend {
            1 => broadcast.service = service(0),
            2 => broadcast.config.weight = 1,
            _ => {}
        }
        assert_eq!(
            refusal(&mut control, Call::ServerAdd(broadcast.clone())),
            error.into()
        );
    }
    // For a daemon, the kernel checks mixed families, then the interface, then whether a daemon is
    // running.
    let start = |interface| Call::DaemonStart(daemon(SyncRole::Master, interface));
    let tunnel = add(server(5), Forwarding::Tunnel);
    let no_device = Failure::from(Error::NoDevice);
    assert_eq!(refusal(&mut control, start("eth9")), no_device);
    let list = [start("eth0")];
    control.apply(&list, &SmallHost, Instant::ZERO).unwrap();
    assert_eq!(control.daemons()[0].maxlen, Some(1472));
    assert_eq!(refusal(&mut control, start("eth9")), no_device);
    assert_eq!(
        refusal(&mut control, start("eth0")),
        Error::DaemonRunning.into()
    );
    assert_eq!(refusal(&mut control, tunnel), Error::FamilyMismatch.into());
}

#[test]
fn change_list_above_maximum_length_or_with_other_call_is_refused() {
    let mut control = control();
    let many = vec![Call::ServiceFlush {}; CHANGES_MAX + 1];
    let refused = control.apply(&many, &Permissive, Instant::ZERO);
    assert_eq!(refused.unwrap_err().failure.code, FailureCode::Full);
    for call in [
        Call::Apply { changes: vec![] },
        Call::Stop {},
        Call::Info {},
        Call::Capture(Default::default()),
    ] {
        let list = [web(), call];
        let refused = control
            .apply(&list, &Permissive, Instant::ZERO)
            .unwrap_err();
        assert_eq!(
            (refused.change, refused.failure.code),
            (1, FailureCode::Invalid)
        );
        assert_eq!(control.services().count(), 0);
    }
}

#[test]
fn local_get_needs_read_access_and_capture_and_apply_need_write_access() {
    assert_eq!(Call::LocalGet {}.access(), Access::Read);
    assert_eq!(Call::Capture(Default::default()).access(), Access::Write);
    assert_eq!(Call::Apply { changes: vec![] }.access(), Access::Write);
}

#[test]
fn change_list_and_answer_round_trip_as_json() {
    let text =
        r#"{"method":"apply","params":{"changes":[{"method":"service.flush","params":{}}]}}"#;
    let call: Call = serde_json::from_str(text).unwrap();
    assert_eq!(
        call,
        Call::Apply {
            changes: vec![Call::ServiceFlush {}]
        }
    );
    assert_eq!(serde_json::to_string(&call).unwrap(), text);
    assert_eq!(serde_json::to_string(&Done::default()).unwrap(), "{}");
    assert_eq!(serde_json::from_str::<Done>("{}").unwrap(), Done::default());
    let failure = Failure {
        change: Some(3),
        ..Failure::from(Error::ServerExists)
    };
    let line = serde_json::to_string(&failure).unwrap();
    assert!(line.ends_with(r#""change":3}"#), "{line}");
}
