//! Properties of the changes for random dataplanes and configurations; then single cases.

use lvs_core::Forwarding;
use lvs_core::api::{ServerSpec, ServiceSpec};
use proptest::prelude::*;

use super::*;
use crate::dataplane::fake::FakeDataplane;

fn id(n: u8) -> ServiceId {
    ServiceId::Tcp {
        address: SocketAddr::from(([192, 0, 2, n], 80)),
    }
}

fn address(n: u8) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, n], 80))
}

/// A service with `scheduler` and no servers.
fn service(scheduler: &str) -> DesiredService {
    let config = ServiceConfig::new(lvs_core::Family::V4, scheduler);
    DesiredService {
        on_check_failure: OnCheckFailure::Remove,
        ..DesiredService::of(id(1), config, vec![])
    }
}

prop_compose! {
    fn server_config()(weight in 0..4, upper in 0..3u32, dr in any::<bool>()) -> ServerConfig {
        let mut config = ServerConfig::new(weight, if dr { Forwarding::Route } else { Forwarding::Nat });
        config.upper = upper;
        config
    }
}

prop_compose! {
    fn service_config()(scheduler in 0..3usize, timeout in 0..2u32, slow_start in 0..2u32) -> ServiceConfig {
        let mut config = ServiceConfig::new(lvs_core::Family::V4, ["rr", "wlc", "mh"][scheduler]);
        config.timeout = timeout;
        config.extras.slow_start = slow_start;
        config
    }
}

fn health() -> impl Strategy<Value = Health> {
    prop_oneof![Just(Health::Up), Just(Health::Down), Just(Health::Unknown)]
}

prop_compose! {
    fn desired()(
        services in proptest::collection::btree_map(
            0..5u8,
            (service_config(), any::<bool>(), proptest::collection::btree_map(0..5u8, (server_config(), health()), 0..5)),
            0..5,
        ),
        vips in proptest::collection::btree_set(0..4u8, 0..4),
        adopt in any::<bool>(),
    ) -> Desired {
        Desired {
            sync: None,
            unnamed: None,
            filter: None,
            file: Files::default(),
            services: services.into_iter().map(|(n, (config, remove, servers))| DesiredService {
                on_check_failure: if remove { OnCheckFailure::Remove } else { OnCheckFailure::Quiesce },
                ..DesiredService::of(id(n), config, servers.into_iter().map(|(n, (config, health))| DesiredServer::of(address(n), config, health)).collect())
            }).collect(),
            vips: vips.into_iter().map(|n| IpAddr::from([192, 0, 2, n])).collect(),
            sysctls: vec![("conn_reuse_mode".into(), "0".into())],
            marks: Some(vec!["--destination 192.0.2.1 --mark 1".into()]),
            port_marks: vec!["--destination 192.0.2.1 --mark 1275068417".into()],
            local: Some(LocalPool { addresses: vec![[10, 0, 0, 2].into()], hairpin: adopt }),
            adopt,
            on_drift: OnDrift::Repair,
            generation: 0,
        }
    }
}

prop_compose! {
    /// Changes by other programs and by an earlier daemon.
    fn history()(
        services in proptest::collection::btree_map(
            0..5u8,
            (service_config(), 0..3u8, proptest::collection::btree_map(0..5u8, server_config(), 0..5)),
            0..5,
        ),
        vips in proptest::collection::btree_set(0..4u8, 0..4),
    ) -> Vec<Call> {
        let vips: BTreeSet<IpAddr> = vips.into_iter().map(|n| IpAddr::from([192, 0, 2, n])).collect();
        let mut changes = vec![own(&vips)];
        for (n, (config, owner, servers)) in services {
            let owner = [None, Some(OWNER.to_owned()), Some("other".to_owned())][usize::from(owner)].clone();
            changes.push(Call::ServiceAdd(ServiceSpec { service: id(n), config, owner }));
            for (s, config) in servers {
                changes.push(Call::ServerAdd(ServerSpec { service: id(n), server: address(s), config }));
            }
        }
        changes
    }
}

fn dataplane(history: &[Call]) -> FakeDataplane {
    let mut dataplane = FakeDataplane::default();
    dataplane.apply(history).expect("the history is valid");
    dataplane
}

fn actual(dataplane: &FakeDataplane) -> Actual {
    dataplane.held().0
}

#[test]
fn foreign_mark_rules_stay_and_port_rules_change_with_services() {
    let (theirs, ours) = (
        "--destination 192.0.2.1 --mark 1",
        "--destination 192.0.2.1 --mark 1275068417",
    );
    let marks = |set: &[&str], port_marks: &[&str], there: &[&str]| {
        let owned =
            |rules: &[&str]| -> Vec<String> { rules.iter().map(ToString::to_string).collect() };
        let desired = Desired {
            marks: (!set.is_empty()).then(|| owned(set)),
            port_marks: owned(port_marks),
            ..Desired::default()
        };
        let actual = Actual {
            marks: owned(there),
            ..Actual::default()
        };
        match diff(&desired, &actual).changes.pop() {
            Some(Call::MarkSet { rules }) => Some(rules.join("; ")),
            None => None,
            other => panic!("{other:?}"),
        }
    };
    let both = format!("{theirs}; {ours}");
    assert_eq!(marks(&[], &[ours], &[theirs]), Some(both.clone()));
    assert_eq!(marks(&[], &[ours], &[theirs, ours]), None);
    assert_eq!(marks(&[], &[], &[theirs, ours]), Some(theirs.to_owned()));
    assert_eq!(marks(&[theirs], &[ours], &[]), Some(both));
    assert_eq!(marks(&[], &[], &[theirs]), None);
}

#[test]
fn service_in_no_source_keeps_vip_and_marks_until_all_sources_answered() {
    let (named, vip) = ([192, 0, 2, 1].into(), IpAddr::from([192, 0, 2, 2]));
    let rule = "--destination 192.0.2.2 --mark 1275068417".to_owned();
    let many = ServiceId::Fwmark {
        mark: 0x4c00_0001,
        family: lvs_core::Family::V4,
    };
    let mut history = vec![Call::VipsOwn {
        addresses: vec![named, vip],
    }];
    for service in [id(0), many] {
        history.push(Call::ServiceAdd(ServiceSpec {
            service,
            config: ServiceConfig::new(lvs_core::Family::V4, "rr"),
            owner: Some(OWNER.to_owned()),
        }));
    }
    history.push(Call::MarkSet {
        rules: vec![rule.clone()],
    });
    let before = actual(&dataplane(&history));
    let desired = |beside: Option<IpAddr>| Desired {
        vips: [named].into(),
        unnamed: Some(Unnamed {
            beside: beside.map(|ip| [ip].into()),
        }),
        ..Desired::default()
    };
    let plan = diff(&desired(Some(named)), &before);
    assert_eq!(plan.changes, []);
    let unnamed: HashSet<ServiceId> = plan.unnamed.into_iter().collect();
    assert_eq!(unnamed, [id(0), many].into());
    // Only the desired VIPs count for a VIP of a service in the file or the sources, and for all
    // VIPs if this director may own none.
    let given_up = [own(&[named].into())];
    assert_eq!(diff(&desired(Some(vip)), &before).changes, given_up);
    assert_eq!(diff(&desired(None), &before).changes, given_up);
    let known = Desired {
        unnamed: None,
        ..desired(None)
    };
    let plan = diff(&known, &before);
    assert_eq!((plan.changes.len(), plan.unnamed.len()), (4, 0), "{plan:?}");
}

#[test]
fn local_addresses_are_added_before_servers_and_removed_after_them() {
    let pool = |hosts: &[u8], hairpin| LocalPool {
        addresses: hosts.iter().map(|&n| IpAddr::from([10, 0, 0, n])).collect(),
        hairpin,
    };
    let desired = Desired {
        local: Some(pool(&[2, 3], false)),
        services: vec![service("rr")],
        ..Desired::default()
    };
    let actual = Actual {
        local: pool(&[1, 2], true),
        ..Actual::default()
    };
    let changes = diff(&desired, &actual).changes;
    assert_eq!(
        changes.first(),
        Some(&Call::LocalSet(pool(&[1, 2, 3], true)))
    );
    assert_eq!(changes.last(), Some(&Call::LocalSet(pool(&[2, 3], false))));
}

proptest! {
    /// The dataplane accepts the plan from any state, and then has the desired state. Settings of
    /// other owners are unchanged, and a second plan is empty.
    #[test]
    fn changes_from_any_state_reach_the_desired_state(desired in desired(), history in history()) {
        let mut dataplane = dataplane(&history);
        let before = actual(&dataplane);
        let plan = diff(&desired, &before);
        let applied = dataplane.apply(&plan.changes);
        prop_assert!(applied.is_ok(), "{:?}: {:?}", applied, plan.changes);
        let after = actual(&dataplane);
        let again = diff(&desired, &after);
        prop_assert_eq!(again.changes, vec![]);
        prop_assert_eq!(&again.conflicts, &plan.conflicts);
        prop_assert_eq!(&after.vips, &desired.vips);
        for service in &before.services {
            if !ours(&desired, service) {
                prop_assert!(after.services.contains(service), "the foreign service {:?} was changed", service.service);
            }
        }
        for service in &desired.services {
            if plan.conflicts.contains(&service.id) {
                continue;
            }
            let there = after.services.iter().find(|s| s.service == service.id).unwrap();
            prop_assert_eq!(&there.config, &service.config);
            prop_assert_eq!(there.owner.as_deref(), Some(OWNER));
            for server in &service.servers {
                let now = there.servers.iter().find(|s| s.server == server.address).map(|s| s.config);
                match (server.health, service.on_check_failure) {
                    (Health::Up, _) => prop_assert_eq!(now, Some(server.config)),
                    (Health::Down, OnCheckFailure::Remove) => prop_assert_eq!(now, None),
                    (Health::Down, OnCheckFailure::Quiesce) => prop_assert_eq!(now.map(|c| c.weight), Some(0)),
                    (Health::Unknown, _) => {
                        let was = before.services.iter().find(|s| s.service == service.id)
                            .and_then(|s| s.servers.iter().find(|s| s.server == server.address));
                        prop_assert_eq!(now.is_some(), was.is_some());
                    }
                }
            }
            // Servers of the file are listed in its order, the last one first; other servers
            // follow.
            if service.config.scheduler == "mh" {
                let place = |at: &ServerInfo| {
                    let found = service.servers.iter().rev().position(|s| s.address == at.server);
                    found.unwrap_or(usize::MAX)
                };
                prop_assert!(there.servers.is_sorted_by_key(place), "{:?}", there.servers);
            }
            for there in &there.servers {
                let held = plan.held.contains(&(service.id, there.server));
                prop_assert!(held || service.servers.iter().any(|s| s.address == there.server));
            }
        }
    }

    /// Between the changes of a plan, each service has at least as many usable servers as before
    /// the plan or after it, whichever is less.
    #[test]
    fn usable_servers_between_changes_are_never_fewer_than_minimum_of_before_and_after(desired in desired(), history in history()) {
        let mut dataplane = dataplane(&history);
        let before = actual(&dataplane);
        let plan = diff(&desired, &before);
        let good = |actual: &Actual, service: &DesiredService| {
            let down: HashSet<SocketAddr> = service.servers.iter()
                .filter(|s| s.health == Health::Down).map(|s| s.address).collect();
            let there = actual.services.iter().find(|s| s.service == service.id);
            there.map_or(0, |there| there.servers.iter()
                .filter(|s| s.config.weight > 0 && !down.contains(&s.server)).count())
        };
        let count = |actual: &Actual| -> Vec<usize> {
            desired.services.iter().map(|service| good(actual, service)).collect()
        };
        let first = count(&before);
        let mut on_the_way = Vec::new();
        for change in &plan.changes {
            dataplane.apply(std::slice::from_ref(change)).expect("the list is valid");
            on_the_way.push(count(&actual(&dataplane)));
        }
        let last = count(&actual(&dataplane));
        for (n, counts) in on_the_way.iter().enumerate() {
            for (service, now) in counts.iter().enumerate() {
                if plan.conflicts.contains(&desired.services[service].id) {
                    continue;
                }
                let least = first[service].min(last[service]);
                prop_assert!(*now >= least, "{now} usable servers, expected {least}, after {:?} in {:#?}", plan.changes[n], plan.changes);
            }
        }
    }

    /// No desired service is deleted. No desired server is deleted, unless it is down and
    /// `on_check_failure` removes it.
    #[test]
    fn reconciliation_deletes_no_desired_service_and_only_failed_desired_servers(desired in desired(), history in history()) {
        let plan = diff(&desired, &actual(&dataplane(&history)));
        for change in &plan.changes {
            match change {
                Call::ServiceDelete { service } => prop_assert!(!desired.services.iter().any(|s| s.id == *service)),
                Call::ServerDelete { service, server } => {
                    let service = desired.services.iter().find(|s| s.id == *service).unwrap();
                    let stays = service.servers.iter().any(|s| s.address == *server
                        && !(s.health == Health::Down && service.on_check_failure == OnCheckFailure::Remove));
                    prop_assert!(!stays);
                }
                _ => {}
            }
        }
    }
}

#[test]
fn vips_are_released_before_other_changes_and_taken_over_after_them() {
    let config = ServiceConfig::new(lvs_core::Family::V4, "rr");
    let old = ServerConfig::new(1, Forwarding::Nat);
    let service = |n| {
        Call::ServiceAdd(ServiceSpec {
            service: id(n),
            config: config.clone(),
            owner: Some(OWNER.into()),
        })
    };
    let server = |n| {
        Call::ServerAdd(ServerSpec {
            service: id(1),
            server: address(n),
            config: old,
        })
    };
    let vips = |n: u8| own(&BTreeSet::from([IpAddr::from([192, 0, 2, n])]));
    let dataplane = dataplane(&[vips(9), service(1), service(9), server(1)]);
    let desired = Desired {
        services: vec![DesiredService::of(
            id(1),
            config,
            vec![DesiredServer::of(address(2), old, Health::Up)],
        )],
        vips: BTreeSet::from([IpAddr::from([192, 0, 2, 1])]),
        ..Desired::default()
    };
    assert_eq!(
        diff(&desired, &actual(&dataplane)).changes,
        vec![
            own(&BTreeSet::new()),
            server(2),
            Call::ServerDelete {
                service: id(1),
                server: address(1)
            },
            Call::ServiceDelete { service: id(9) },
            vips(1),
        ]
    );
}

/// The checks of two directors fail and succeed in different orders.
#[test]
fn directors_with_different_check_histories_choose_the_same_servers() {
    let wish = |states: [Health; 4], scheduler: &str, order: [u8; 4]| {
        let servers = order.into_iter().map(|n| {
            let config = ServerConfig::new(i32::from(n), Forwarding::Nat);
            DesiredServer::of(address(n), config, states[usize::from(n) - 1])
        });
        Desired {
            services: vec![DesiredService {
                servers: servers.collect(),
                ..service(scheduler)
            }],
            ..Desired::default()
        }
    };
    let follow = |dataplane: &mut FakeDataplane, desired: &Desired| {
        let plan = diff(desired, &actual(dataplane));
        dataplane
            .apply(&plan.changes)
            .expect("the list can be applied");
        assert_eq!(diff(desired, &actual(dataplane)).changes, vec![]);
    };
    const ALL: [u8; 4] = [1, 2, 3, 4];
    for about in lvs_core::sched::BUILT_IN.iter().filter(|a| a.goes_by_order) {
        let choices = |turns: &[usize], orders: &[[u8; 4]]| {
            let mut dataplane = FakeDataplane::default();
            let mut states = [Health::Unknown; 4];
            for &turn in turns {
                states[turn] = match states[turn] {
                    Health::Up => Health::Down,
                    Health::Down | Health::Unknown => Health::Up,
                };
                follow(&mut dataplane, &wish(states, about.name, ALL));
            }
            assert_eq!(states, [Health::Up; 4]);
            for order in orders {
                follow(&mut dataplane, &wish(states, about.name, *order));
            }
            dataplane.choices(id(1), 1000)
        };
        let first = choices(&[0, 1, 2, 3], &[]);
        let second = choices(&[3, 0, 2, 1, 0, 2, 2, 0], &[]);
        assert_eq!(first, second, "{}", about.name);
        let moved = choices(&[0, 1, 2, 3], &[[4, 1, 3, 2], ALL]);
        assert_eq!(first, moved, "{}", about.name);
    }
}

#[test]
fn changed_tunnel_edits_the_existing_server() {
    let config = ServiceConfig::new(lvs_core::Family::V4, "rr");
    let tunnelled = |tunnel| ServerConfig {
        tunnel,
        ..ServerConfig::new(1, Forwarding::Tunnel)
    };
    let gue = |port, checksum| lvs_core::tunnel::Tunnel::Gue { port, checksum };
    let tunnels = [
        lvs_core::tunnel::Tunnel::Ipip,
        lvs_core::tunnel::Tunnel::Gre {
            checksum: lvs_core::tunnel::TunnelChecksum::None,
        },
        gue(6080, lvs_core::tunnel::TunnelChecksum::None),
        gue(6080, lvs_core::tunnel::TunnelChecksum::Full),
        gue(6081, lvs_core::tunnel::TunnelChecksum::Full),
    ];
    for now in tunnels {
        let dataplane = dataplane(&[
            Call::ServiceAdd(ServiceSpec {
                service: id(1),
                config: config.clone(),
                owner: Some(OWNER.into()),
            }),
            Call::ServerAdd(ServerSpec {
                service: id(1),
                server: address(1),
                config: tunnelled(now),
            }),
        ]);
        for wanted in tunnels {
            let desired = Desired {
                services: vec![DesiredService::of(
                    id(1),
                    config.clone(),
                    vec![DesiredServer::of(address(1), tunnelled(wanted), Health::Up)],
                )],
                ..Desired::default()
            };
            let edit = Call::ServerEdit(ServerSpec {
                service: id(1),
                server: address(1),
                config: tunnelled(wanted),
            });
            let expected = if now == wanted { vec![] } else { vec![edit] };
            assert_eq!(diff(&desired, &actual(&dataplane)).changes, expected);
        }
    }
}

/// The plan for a service whose servers `there` (number, weight, active connections) are replaced
/// by the servers `wanted`.
fn replaced(
    there: &[(u8, i32, u32)],
    wanted: &[(u8, Health)],
    drain: Duration,
    overdue: &[u8],
) -> Plan {
    let config = ServiceConfig::new(lvs_core::Family::V4, "rr");
    let servers = wanted.iter().map(|&(n, health)| {
        DesiredServer::of(address(n), ServerConfig::new(1, Forwarding::Nat), health)
    });
    let desired = Desired {
        services: vec![DesiredService {
            drain,
            ..DesiredService::of(id(1), config.clone(), servers.collect())
        }],
        ..Desired::default()
    };
    let mut history = vec![Call::ServiceAdd(ServiceSpec {
        service: id(1),
        config,
        owner: Some(OWNER.into()),
    })];
    for &(n, weight, _) in there {
        history.push(Call::ServerAdd(ServerSpec {
            service: id(1),
            server: address(n),
            config: ServerConfig::new(weight, Forwarding::Nat),
        }));
    }
    let mut actual = actual(&dataplane(&history));
    for server in &mut actual.services[0].servers {
        let (_, _, active) = there
            .iter()
            .find(|(n, ..)| address(*n) == server.server)
            .expect("the server was added");
        server.active = *active;
    }
    actual.overdue = overdue.iter().map(|&n| (id(1), address(n))).collect();
    diff(&desired, &actual)
}

/// Abbreviates changes: `+2`, `02`, `e2` and `-2` mean that server 2 is added, gets weight 0, is
/// edited in another way, or is deleted.
fn reported(plan: &Plan) -> String {
    let mut reported = String::new();
    for change in &plan.changes {
        let (verb, server) = match change {
            Call::ServerAdd(spec) => ('+', spec.server),
            Call::ServerEdit(spec) if spec.config.weight == 0 => ('0', spec.server),
            Call::ServerEdit(spec) => ('e', spec.server),
            Call::ServerDelete { server, .. } => ('-', *server),
            other => panic!("{other:?}"),
        };
        let host = (1..9)
            .find(|&n| address(n) == server)
            .expect("the server has a number of the test");
        reported.push_str(&format!("{verb}{host} "));
    }
    reported.trim_end().to_owned()
}

#[test]
fn replaced_servers_stay_until_a_new_server_serves_or_all_new_servers_have_failed() {
    use Health::{Down, Unknown, Up};
    let both = [(1, 1, 0), (2, 1, 0)];
    let plan = |wanted: &[(u8, Health)]| replaced(&both, wanted, Duration::ZERO, &[]);
    let waiting = plan(&[(3, Unknown), (4, Unknown)]);
    assert_eq!(reported(&waiting), "");
    assert_eq!(waiting.held.len(), 2);
    assert_eq!(reported(&plan(&[(3, Unknown), (4, Down)])), "+4");
    assert_eq!(reported(&plan(&[(3, Up), (4, Unknown)])), "+3 -2 -1");
    assert_eq!(reported(&plan(&[(3, Down), (4, Down)])), "+3 +4 -2 -1");
    // One server stays; the other one waits for its replacement.
    assert_eq!(reported(&plan(&[(1, Up), (3, Unknown)])), "");
    assert_eq!(reported(&plan(&[(1, Up)])), "-2");
    assert_eq!(reported(&plan(&[])), "-2 -1");
}

#[test]
fn removed_server_with_connections_is_drained_for_at_most_the_drain_time() {
    let minute = Duration::from_secs(60);
    let plan = |weight, active, drain, overdue: &[u8]| {
        replaced(
            &[(1, 1, 0), (2, weight, active)],
            &[(1, Health::Up)],
            drain,
            overdue,
        )
    };
    let first = plan(1, 7, minute, &[]);
    assert_eq!((reported(&first), first.draining.len()), ("02".into(), 1));
    let second = plan(0, 7, minute, &[]);
    assert_eq!(
        (reported(&second), second.draining.len()),
        (String::new(), 1)
    );
    assert_eq!(reported(&plan(0, 0, minute, &[])), "-2");
    assert_eq!(reported(&plan(1, 0, minute, &[])), "-2");
    assert_eq!(reported(&plan(0, 7, minute, &[2])), "-2");
    assert_eq!(reported(&plan(1, 7, Duration::ZERO, &[])), "-2");
}

#[test]
fn sync_daemons_are_stopped_and_started_to_match_the_file() {
    let daemon = |role, syncid| SyncDaemon {
        role,
        interface: "eth0".to_owned(),
        syncid,
        maxlen: None,
        group: None,
        port: None,
        ttl: None,
    };
    let (master, backup) = (daemon(SyncRole::Master, 5), daemon(SyncRole::Backup, 5));
    let changes = |sync: Option<Vec<SyncDaemon>>, daemons: &[SyncDaemon]| {
        let desired = Desired {
            sync,
            ..Desired::default()
        };
        let actual = Actual {
            daemons: daemons.iter().map(|there| there.completed(9000)).collect(),
            ..Actual::default()
        };
        diff(&desired, &actual).changes
    };
    let both = [master.clone(), backup.clone()];
    let stop = |role, syncid| Call::DaemonStop { role, syncid };
    let start = Call::DaemonStart(master.clone());
    assert_eq!(changes(None, &both), []);
    assert_eq!(changes(Some(both.to_vec()), &both), []);
    let other = daemon(SyncRole::Master, 6);
    assert_eq!(
        changes(Some(both.to_vec()), &[other, backup.clone()]),
        [stop(SyncRole::Master, 6), start.clone()]
    );
    assert_eq!(
        changes(Some(vec![master]), &[backup]),
        [stop(SyncRole::Backup, 5), start]
    );
    // The length was removed from the file.
    for role in [SyncRole::Master, SyncRole::Backup] {
        let mut short = daemon(role, 5);
        short.maxlen = Some(1400);
        let wanted = daemon(role, 5);
        assert_eq!(
            changes(Some(vec![wanted.clone()]), &[short]),
            [stop(role, 5), Call::DaemonStart(wanted)]
        );
    }
    let none = [stop(SyncRole::Master, 5), stop(SyncRole::Backup, 5)];
    assert_eq!(changes(Some(Vec::new()), &both), none);
}

#[test]
fn health_changes_precede_all_other_changes() {
    let plan = replaced(
        &[(1, 1, 0), (2, 1, 0), (3, 0, 0)],
        &[(4, Health::Up), (2, Health::Down), (3, Health::Up)],
        Duration::ZERO,
        &[],
    );
    assert_eq!(reported(&plan), "e3 02 +4 -1");
}
