//! Tests of the link to the dataplane. After any sequence of events, for example, the dataplane has
//! the same state as after a cold start of lvsd with the same file and the same observations.

use std::collections::BTreeMap;

use lvs_core::api::{Call, ServerSpec, ServiceInfo};
use lvs_core::{Family, Forwarding, ServerConfig, ServiceConfig};
use proptest::prelude::*;

use super::fake::{Fault, World};
use super::*;
use crate::config::{Files, OnCheckFailure, OnDrift};
use crate::reconcile::{DesiredServer, DesiredService, Health};

#[derive(Clone, Debug)]
enum Event {
    /// The file or the health of servers changes.
    Goal(Box<Desired>),
    /// A new daemon replaces the present one.
    Restart,
    /// The dataplane crashes.
    Crash,
    /// The next requests fail.
    Wrong(Vec<Fault>),
    /// Another program sets a server's weight, but not to 0, which would be a drain.
    Weight(u8, u8, i32),
    /// Another program deletes a server.
    Delete(u8, u8),
    /// Another program deletes a service.
    DeleteService(u8),
    /// The daemon makes one step.
    Step,
}

fn id(n: u8) -> ServiceId {
    ServiceId::Tcp {
        address: ([192, 0, 2, n], 80).into(),
    }
}

fn address(n: u8) -> SocketAddr {
    ([10, 0, 0, n], 80).into()
}

prop_compose! {
    fn goal()(
        services in proptest::collection::btree_map(
            0..3u8,
            (any::<bool>(), any::<bool>(), proptest::collection::btree_map(0..4u8, (0..4i32, any::<bool>(), 0..4u8), 0..4)),
            0..3,
        ),
        vips in proptest::collection::btree_set(0..3u8, 0..3),
    ) -> Desired {
        Desired {
            file: Files::default(),
            services: services.into_iter().map(|(n, (rr, remove, servers))| DesiredService {
                name: format!("s{n}"),
                on_check_failure: if remove { OnCheckFailure::Remove } else { OnCheckFailure::Quiesce },
                ..DesiredService::of(id(n), ServiceConfig::new(Family::V4, if rr { "rr" } else { "wlc" }), servers.into_iter().map(|(n, (weight, up, admin))| DesiredServer {
                    // Maintenance removes the server; a drain sets weight 0.
                    leaves: admin == 0,
                    ..DesiredServer::of(address(n), ServerConfig::new(weight, Forwarding::Nat), if up { Health::Up } else { Health::Down })
                }).collect())
            }).collect(),
            vips: vips.into_iter().map(|n| IpAddr::from([192, 0, 2, n])).collect(),
            on_drift: OnDrift::Repair,
            ..Desired::default()
        }
    }
}

fn event() -> impl Strategy<Value = Event> {
    let fault = prop_oneof![
        (0..9usize).prop_map(Fault::Refuses),
        Just(Fault::RefusesAll),
        Just(Fault::Made),
        Just(Fault::Lost),
    ];
    prop_oneof![
        4 => goal().prop_map(|goal| Event::Goal(Box::new(goal))),
        1 => Just(Event::Restart),
        1 => Just(Event::Crash),
        3 => proptest::collection::vec(fault, 1..6).prop_map(Event::Wrong),
        2 => (0..3u8, 0..4u8, 1..4i32).prop_map(|(s, a, w)| Event::Weight(s, a, w)),
        1 => (0..3u8, 0..4u8).prop_map(|(s, a)| Event::Delete(s, a)),
        1 => (0..3u8).prop_map(Event::DeleteService),
        4 => Just(Event::Step),
    ]
}

/// A service's scheduler and servers.
type Shown = (String, Vec<(SocketAddr, ServerConfig)>);

/// A daemon's link and its clock.
struct Daemon {
    world: World,
    link: Link,
    now: Instant,
    goal: Goal,
}

impl Daemon {
    fn new(world: World) -> Self {
        let now = Instant::now();
        Self {
            link: Link::new(Box::new(world.host()), false, now),
            world,
            now,
            goal: Goal::default(),
        }
    }

    fn step(&mut self, changed: bool) -> Step {
        self.now += Duration::from_secs(40);
        self.link.step(&self.goal, changed, self.now)
    }

    fn set(&mut self, desired: Desired) {
        self.goal = Goal {
            announced: desired.vips.clone(),
            desired,
            ..Goal::default()
        };
    }

    /// Runs until the dataplane has the desired state, and makes one more step.
    fn settle(&mut self) {
        self.world.go_wrong(&[]);
        let mut good = 0;
        for _ in 0..50 {
            if let Step::InStep { found, .. } = self.step(true)
                && found.refused.is_empty()
            {
                good += 1;
                if good == 2 {
                    return;
                }
            }
        }
        panic!("the state does not settle: {:?}", self.step(true));
    }

    /// lvsd's services with their servers, and lvsd's VIPs.
    fn held(&self) -> (BTreeMap<String, Shown>, BTreeSet<IpAddr>) {
        let held = self.world.dataplane().0;
        let reported = |service: &ServiceInfo| {
            let mut servers: Vec<_> = service
                .servers
                .iter()
                .map(|s| (s.server, s.config))
                .collect();
            servers.sort_by_key(|(address, _)| *address);
            (
                format!("{:?}", service.service),
                (service.config.scheduler.clone(), servers),
            )
        };
        (held.services.iter().map(reported).collect(), held.vips)
    }

    fn by_hand(&self, change: Call) {
        // The server may not exist.
        let _ = self.world.control().apply(&[change]);
    }
}

#[test]
fn control_step_without_request_does_not_count_as_answer_of_dataplane() {
    let mut daemon = Daemon::new(World::default());
    daemon.settle();
    let answered = daemon.link.last_answer();
    let last = answered.get();
    assert!(last.is_some());
    daemon.link.step(&daemon.goal, false, daemon.now);
    assert_eq!(answered.get(), last);
    daemon.step(false);
    assert!(answered.get() > last);
}

/// The log line about the reload already contains the numbers of these changes.
#[test]
fn changes_of_reload_are_not_logged_at_info_until_first_checks_are_done() {
    let log = crate::daemon::tests::Log::default();
    let _listening = log.listen();
    let mut daemon = Daemon::new(World::default());
    let mut step = |health| {
        let server = DesiredServer::of(address(1), ServerConfig::new(1, Forwarding::Nat), health);
        let config = ServiceConfig::new(Family::V4, "rr");
        daemon.set(Desired {
            services: vec![DesiredService::of(id(1), config, vec![server])],
            generation: 2,
            ..Desired::default()
        });
        daemon.step(true);
        let number = |words| log.text().matches(words).count();
        let held = daemon.held().0;
        let servers = held.values().map(|(_, servers)| servers.len());
        (servers.sum::<usize>(), number("service"), number("server"))
    };
    assert_eq!(step(Health::Unknown), (0, 0, 0));
    assert_eq!(step(Health::Unknown), (0, 0, 0));
    assert_eq!(step(Health::Up), (1, 0, 0));
    assert_eq!(step(Health::Up), (1, 0, 0));
    let (_, _, lines) = step(Health::Down);
    assert!(lines > 0, "{}", log.text());
}

#[test]
fn refused_server_is_not_observed_until_it_is_added() {
    let desired = |servers| Desired {
        services: vec![DesiredService::of(
            id(1),
            ServiceConfig::new(Family::V4, "rr"),
            servers,
        )],
        ..Desired::default()
    };
    let mut daemon = Daemon::new(World::default());
    daemon.set(desired(Vec::new()));
    daemon.settle();
    let config = ServerConfig::new(3, Forwarding::Nat);
    daemon.set(desired(vec![DesiredServer::of(
        address(1),
        config,
        Health::Up,
    )]));
    daemon.world.go_wrong(&[Fault::RefusesAll; 2]);
    let mut observed = || match daemon.step(true) {
        Step::InStep { found, .. } => {
            let server = found.servers.get(&(id(1), address(1)));
            (found.refused.len(), server.map(|server| server.weight))
        }
        step => panic!("the dataplane is not in sync: {step:?}"),
    };
    assert_eq!(observed(), (1, None));
    assert_eq!(observed(), (0, Some(3)));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn dataplane_after_any_history_equals_cold_start(first in goal(), events in proptest::collection::vec(event(), 0..25)) {
        let mut daemon = Daemon::new(World::default());
        daemon.set(first.clone());
        // A new daemon has to attach to the dataplane.
        daemon.settle();
        let mut last = first;
        for event in events {
            match event {
                Event::Goal(desired) => {
                    last = (*desired).clone();
                    daemon.set(*desired);
                    daemon.step(true);
                }
                Event::Restart => {
                    let world = daemon.world.clone();
                    let goal = daemon.goal.clone();
                    daemon = Daemon::new(world);
                    daemon.goal = goal;
                }
                Event::Crash => daemon.world.crash(),
                Event::Wrong(faults) => daemon.world.go_wrong(&faults),
                Event::Weight(service, server, weight) => daemon.by_hand(Call::ServerEdit(ServerSpec {
                    service: id(service),
                    server: address(server),
                    config: ServerConfig::new(weight, Forwarding::Nat),
                })),
                Event::Delete(service, server) => daemon.by_hand(Call::ServerDelete {
                    service: id(service),
                    server: address(server),
                }),
                Event::DeleteService(service) => daemon.by_hand(Call::ServiceDelete { service: id(service) }),
                Event::Step => {
                    daemon.step(false);
                }
            }
        }
        daemon.settle();
        let mut cold = Daemon::new(World::default());
        cold.set(last);
        cold.settle();
        prop_assert_eq!(daemon.held(), cold.held());
    }
}
