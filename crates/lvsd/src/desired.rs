//! Pure functions that determine the servers of each service: [`decide`] decides about services
//! with missing servers (quorum, panic mode, sorry server), and [`desired`] computes the desired
//! state of the dataplane:
//! `Config + Discovered + Health + Overrides -> Desired`.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;

use lvs_api::daemon::AdminState;
use lvs_core::api::ServiceId;

use crate::admin::Admin;
use crate::config::{BelowQuorum, Config, Server, Service};
use crate::expand::Expanded;
use crate::health::{Advice, Check, Key};
use crate::reconcile::{Desired, DesiredServer, DesiredService, Health, Unnamed};

/// A server, for decisions about its service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerView {
    /// The server's health according to its checks.
    pub health: Health,
    /// Whether the configuration, the operators and the server's own advice allow new connections
    /// to the server.
    pub wanted: bool,
}

/// A decision about a service, which depends on the previous one (hysteresis).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Whether the service has its quorum.
    pub quorum: bool,
    /// Whether the service is in panic mode: too few servers are up, so that all are used.
    pub panic: bool,
    /// Whether the sorry server replaces the other servers.
    pub sorry: bool,
    /// Whether the dataplane releases the service's VIP, so that another director can take it over.
    pub withdrawn: bool,
}

impl Default for Decision {
    /// The initial decision: the quorum is reached.
    fn default() -> Self {
        Self {
            quorum: true,
            panic: false,
            sorry: false,
            withdrawn: false,
        }
    }
}

impl ServerView {
    /// Whether the server should receive new connections.
    pub fn is_usable(&self) -> bool {
        self.wanted && self.health == Health::Up
    }
}

/// Number of servers that should receive new connections.
pub fn usable(servers: &[ServerView]) -> usize {
    servers.iter().filter(|server| server.is_usable()).count()
}

/// Decides about a service; `before` is the previous decision, if any. Until all servers have been
/// checked (`settled`), a service can reach its quorum, but not lose it, because an unchecked
/// server may complete it. A service that is not settled and below its quorum keeps the decision
/// `before`.
pub fn decide(
    service: &Service,
    servers: &[ServerView],
    settled: bool,
    before: Option<Decision>,
) -> Option<Decision> {
    let decided = before;
    let before = before.unwrap_or_default();
    let usable = usable(servers);
    let needed = match before.quorum {
        true => service.quorum.down,
        false => service.quorum.up,
    };
    let quorum = usable >= usize::try_from(needed).unwrap_or(usize::MAX);
    if !settled {
        return match quorum {
            true => Some(Decision {
                panic: before.panic,
                ..Decision::default()
            }),
            false => decided,
        };
    }
    let sorry = service.sorry.is_some() && !quorum;
    let wanted = servers.iter().filter(|server| server.wanted).count();
    // A sorry server replaces the other servers instead of panic mode.
    let few = usable * 100 < wanted * usize::from(service.min_share);
    let panic = few && wanted > 0 && !sorry;
    Some(Decision {
        quorum,
        panic,
        sorry,
        withdrawn: !quorum && !panic && service.below_quorum == BelowQuorum::GiveUp,
    })
}

/// Decisions of operators and of the daemon, which take precedence over file and health.
#[derive(Clone, Copy, Debug)]
pub struct Overrides<'a> {
    /// The administrative states of servers.
    pub admin: &'a Admin,
    /// Decision about each service; a service without a decision so far is missing.
    pub decisions: &'a HashMap<ServiceId, Decision>,
    /// VIPs that the dataplane should own, unless a decision withdraws them. `None` if this
    /// director may own no VIPs.
    pub vips: Option<&'a BTreeSet<IpAddr>>,
    /// Number of configurations that the daemon has loaded so far.
    pub generation: u64,
}

/// Computes the desired state from the settings in `config` and the services in `discovered`.
/// `health` returns the health and the advice of a server.
pub fn desired(
    config: &Config,
    discovered: &Expanded,
    health: impl Fn(&Key) -> (Health, Advice),
    overrides: &Overrides<'_>,
) -> Desired {
    let services = discovered.services.iter();
    let withdrawn = services.clone().filter(|service| {
        let decision = overrides.decisions.get(&service.id);
        decision.is_some_and(|decision| decision.withdrawn)
    });
    let withdrawn: BTreeSet<IpAddr> = withdrawn.filter_map(Service::virtual_ip).collect();
    let vips = overrides.vips.map(|vips| vips - &withdrawn);
    Desired {
        file: discovered.files.clone(),
        services: services
            .map(|service| desired_service(service, &health, overrides))
            .collect(),
        vips: vips.unwrap_or_default(),
        sysctls: config.sysctls.clone(),
        sync: config.sync.clone(),
        // Without mark rules in the file, rules of other programs stay.
        marks: (!config.marks.is_empty()).then(|| config.marks.clone()),
        port_marks: discovered.port_marks.clone(),
        filter: config.filter.clone(),
        local: config.dataplane.local.clone(),
        unnamed: discovered.awaits_services.then(|| Unnamed {
            beside: overrides.vips.map(|_| {
                let named = discovered.services.iter();
                named.filter_map(Service::virtual_ip).collect()
            }),
        }),
        adopt: config.daemon.adopt,
        on_drift: config.daemon.on_drift,
        generation: overrides.generation,
    }
}

fn desired_service(
    service: &Service,
    health: &impl Fn(&Key) -> (Health, Advice),
    overrides: &Overrides<'_>,
) -> DesiredService {
    let decided = overrides.decisions.get(&service.id).copied();
    let decision = decided.unwrap_or_default();
    let servers = service.servers.iter();
    let servers = servers.map(|server| {
        let (health, advice) = health(&(service.id, server.address));
        desired_server((service, server), health, advice, decision, overrides)
    });
    let sorry = service.sorry.as_ref();
    let serving = sorry.filter(|_| decision.sorry);
    let serving = serving.map(|sorry| DesiredServer {
        address: sorry.address,
        line: sorry.line,
        config: sorry.config,
        stays: false,
        health: Health::Up,
        leaves: false,
    });
    let sorry = sorry.map(|sorry| sorry.address);
    DesiredService {
        id: service.id,
        name: service.name.clone(),
        line: service.line,
        filter: service.filter.clone(),
        config: service.config.clone(),
        on_check_failure: service.on_check_failure,
        drain: service.drain,
        servers: servers.chain(serving).collect(),
        incomplete: service.incomplete,
        undecided: sorry.filter(|_| decided.is_none()),
        removed_at_once: sorry
            .filter(|_| decided.is_some() && !decision.sorry && !service.quiesces_at_zero),
    }
}

fn desired_server(
    (service, server): (&Service, &Server),
    health: Health,
    advice: Advice,
    decision: Decision,
    overrides: &Overrides<'_>,
) -> DesiredServer {
    let state = overrides.admin.state(service.id, server.address);
    let mut config = server.config;
    config.weight = match state {
        AdminState::Drain => 0,
        _ => advice.apply(config.weight),
    };
    let check = server.check.as_ref();
    let stays = check.is_some_and(Check::needs_vip);
    // With the sorry server, the others get no new connections. If weight 0 does not achieve that,
    // they are removed.
    let replaced = decision.sorry && config.weight != 0;
    if replaced {
        config.weight = 0;
    }
    DesiredServer {
        address: server.address,
        line: server.line,
        config,
        stays,
        health: match health {
            Health::Down if decision.panic => Health::Up,
            // With `start_down`, unchecked servers of the first configuration are down.
            Health::Unknown if service.alpha && overrides.generation == 1 => Health::Down,
            health => health,
        },
        leaves: state == AdminState::Maintenance
            || (replaced && !service.quiesces_at_zero && !stays),
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use lvs_api::daemon::{AdminSpec, Target};
    use proptest::prelude::*;

    use super::*;
    use crate::clock::Now;
    use crate::expand::expand;
    use crate::health::Weight;
    use crate::sources::Gathered;

    /// Inputs of [`desired`], with two servers that are up.
    struct Case {
        config: Config,
        discovered: Expanded,
        health: HashMap<SocketAddr, (Health, Advice)>,
        admin: Admin,
        decisions: HashMap<ServiceId, Decision>,
        may_own: bool,
        generation: u64,
    }

    impl Case {
        fn new(more: &str) -> Self {
            let text = format!(
                "[[service]]\naddress = \"192.0.2.1:80\"\nvip = \"own\"\nforward = \"nat\"\n{more}\n\
                 [[service.server]]\naddress = \"10.0.0.1\"\nweight = 5\n\
                 [[service.server]]\naddress = \"10.0.0.2\"\nweight = 10\n"
            );
            let (config, _) = Config::from_toml("t.toml", &text).unwrap_or_else(|e| panic!("{e}"));
            Self {
                discovered: expand(&config, &Gathered::default()),
                config,
                health: HashMap::new(),
                admin: Admin::default(),
                decisions: HashMap::new(),
                may_own: true,
                generation: 1,
            }
        }

        fn health(mut self, server: u8, health: Health, advice: Advice) -> Self {
            let server = ([10, 0, 0, server], 80).into();
            self.health.insert(server, (health, advice));
            self
        }

        fn admin(mut self, server: u8, state: AdminState) -> Self {
            let spec = AdminSpec {
                target: Target {
                    service: None,
                    host: [10, 0, 0, server].into(),
                    port: None,
                },
                state,
                who: None,
                why: None,
                until: None,
                force: false,
            };
            self.admin
                .set(spec, Now::read())
                .expect("the override applies");
            self
        }

        fn decided(mut self, decision: Decision) -> Self {
            let id = self.discovered.services[0].id;
            self.decisions.insert(id, decision);
            self
        }

        fn desired(&self) -> Desired {
            let vips = ["192.0.2.1".parse().expect("the address is valid")].into();
            let health = |key: &Key| {
                let known = self.health.get(&key.1).copied();
                known.unwrap_or((Health::Up, Advice::NONE))
            };
            let overrides = Overrides {
                admin: &self.admin,
                decisions: &self.decisions,
                vips: self.may_own.then_some(&vips),
                generation: self.generation,
            };
            desired(&self.config, &self.discovered, health, &overrides)
        }

        /// Weight and health of each server, and whether it is removed (`leaves`).
        fn servers(&self) -> Vec<(i32, Health, bool)> {
            let servers = &self.desired().services[0].servers;
            let servers = servers.iter();
            servers
                .map(|server| (server.config.weight, server.health, server.leaves))
                .collect()
        }
    }

    const SORRY: &str = "quorum = 2\nsorry = \"10.0.0.9\"";
    const BELOW: Decision = Decision {
        quorum: false,
        panic: false,
        sorry: true,
        withdrawn: false,
    };

    #[test]
    fn desired_state_without_overrides_equals_the_file() {
        let case = Case::new("");
        assert_eq!(
            case.servers(),
            [(5, Health::Up, false), (10, Health::Up, false)]
        );
        assert_eq!(case.desired().vips.len(), 1);
        assert_eq!(case.desired().unnamed, None);
    }

    #[test]
    fn check_advice_scales_weight_and_operator_drains_or_removes_server() {
        let half = Advice {
            weight: Some(Weight::Percent(50)),
            drains: None,
        };
        let case = Case::new("").health(2, Health::Up, half);
        assert_eq!(case.servers()[1], (5, Health::Up, false));
        let case = case.admin(2, AdminState::Drain);
        assert_eq!(case.servers()[1], (0, Health::Up, false));
        let case = case.admin(2, AdminState::Maintenance);
        assert_eq!(case.servers()[1], (5, Health::Up, true));
    }

    #[test]
    fn sorry_server_replaces_other_servers_below_quorum() {
        let zero = (0, Health::Up, false);
        let case = Case::new(SORRY).decided(BELOW);
        assert_eq!(case.servers(), [zero, zero, (1, Health::Up, false)]);
        // With a hash scheduler, weight 0 does not keep clients away.
        let hashed = Case::new(&format!("{SORRY}\nscheduler = \"sh\"")).decided(BELOW);
        let leaves = (0, Health::Up, true);
        assert_eq!(hashed.servers(), [leaves, leaves, (1, Health::Up, false)]);
    }

    #[test]
    fn sorry_server_stays_until_first_decision() {
        let case = Case::new(SORRY);
        let sorry = Some(([10, 0, 0, 9], 80).into());
        assert_eq!(case.desired().services[0].undecided, sorry);
        let case = case.decided(Decision::default());
        assert_eq!(case.desired().services[0].undecided, None);
        assert_eq!(case.servers().len(), 2);
    }

    #[test]
    fn panic_mode_treats_down_servers_as_up() {
        let panic = Decision {
            panic: true,
            ..Decision::default()
        };
        let case = Case::new("panic_below = 60").health(1, Health::Down, Advice::NONE);
        assert_eq!(case.servers()[0], (5, Health::Down, false));
        assert_eq!(case.decided(panic).servers()[0], (5, Health::Up, false));
    }

    #[test]
    fn start_down_marks_unchecked_server_down_only_in_first_configuration() {
        let mut case = Case::new("start_down = true\ncheck = { type = \"tcp\" }").health(
            1,
            Health::Unknown,
            Advice::NONE,
        );
        assert_eq!(case.servers()[0].1, Health::Down);
        case.generation = 2;
        assert_eq!(case.servers()[0].1, Health::Unknown);
    }

    #[test]
    fn withdrawn_vip_is_not_owned() {
        let withdrawn = Decision {
            withdrawn: true,
            ..Decision::default()
        };
        let case = Case::new("below_quorum = \"give-up\"").decided(withdrawn);
        assert!(case.desired().vips.is_empty());
    }

    #[test]
    fn desired_state_has_no_vips_if_director_may_not_own_vips() {
        let mut case = Case::new("");
        case.discovered.awaits_services = true;
        let beside = |case: &Case| {
            case.desired()
                .unnamed
                .expect("services of etcd are awaited")
                .beside
        };
        assert_eq!(beside(&case).map(|vips| vips.len()), Some(1));
        case.may_own = false;
        assert!(case.desired().vips.is_empty());
        assert_eq!(beside(&case), None);
    }

    fn service(more: &str) -> Service {
        let text = format!(
            "[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\n{more}\n\
             [[service.server]]\naddress = \"10.0.0.1\"\n[[service.server]]\naddress = \"10.0.0.2\"\n\
             [[service.server]]\naddress = \"10.0.0.3\"\n[[service.server]]\naddress = \"10.0.0.4\"\n"
        );
        let (config, _) = Config::from_toml("test.toml", &text).unwrap_or_else(|e| panic!("{e}"));
        config.services[0].clone()
    }

    fn up(number: usize) -> Vec<ServerView> {
        let view = |n| ServerView {
            health: if n < number { Health::Up } else { Health::Down },
            wanted: true,
        };
        (0..4).map(view).collect()
    }

    /// Decisions about a service, one for each step; a step is the number of servers that are up.
    fn walk(service: &Service, steps: &[usize]) -> Vec<Decision> {
        let mut now = Decision::default();
        steps
            .iter()
            .map(|&number| {
                now =
                    decide(service, &up(number), true, Some(now)).expect("the service is decided");
                now
            })
            .collect()
    }

    #[test]
    fn quorum_is_gained_at_up_and_lost_below_down_number_of_servers() {
        let service = service("quorum = { up = 3, down = 2 }\nsorry = \"10.0.0.99\"");
        let quorum = |steps: &[usize]| -> Vec<bool> {
            walk(&service, steps).iter().map(|d| d.quorum).collect()
        };
        assert_eq!(
            quorum(&[4, 2, 1, 2, 3, 2]),
            [true, true, false, false, true, true]
        );
        let sorry: Vec<bool> = walk(&service, &[4, 1, 2, 3])
            .iter()
            .map(|d| d.sorry)
            .collect();
        assert_eq!(sorry, [false, true, true, false]);
    }

    #[test]
    fn service_below_quorum_with_unchecked_servers_keeps_its_decision() {
        let service = service("sorry = \"10.0.0.99\"");
        for before in [None, Some(Decision::default())] {
            assert_eq!(decide(&service, &up(0), false, before), before);
        }
    }

    #[test]
    fn quorum_can_be_reached_but_not_lost_while_servers_are_unchecked() {
        let service = service("quorum = 2\nsorry = \"10.0.0.99\"\npanic_below = 50");
        let has = Some(Decision::default());
        assert_eq!(decide(&service, &up(1), false, None), None);
        assert_eq!(decide(&service, &up(2), false, None), has);
        assert_eq!(decide(&service, &up(1), false, has), has);
        let lost = decide(&service, &up(1), true, has);
        assert!(lost.is_some_and(|lost| lost.sorry && !lost.quorum));
        assert_eq!(decide(&service, &up(1), false, lost), lost);
        assert_eq!(decide(&service, &up(2), false, lost), has);
    }

    #[test]
    fn sorry_server_replaces_panic_mode_below_quorum() {
        let service =
            service("quorum = { up = 3, down = 2 }\npanic_below = 60\nsorry = \"10.0.0.99\"");
        let both: Vec<(bool, bool)> = walk(&service, &[4, 2, 1, 2, 3])
            .iter()
            .map(|d| (d.panic, d.sorry))
            .collect();
        let wanted = [
            (false, false),
            (true, false),
            (false, true),
            (false, true),
            (false, false),
        ];
        assert_eq!(both, wanted);
    }

    #[test]
    fn panic_mode_starts_below_threshold_unless_sorry_server_serves() {
        let lone = service("panic_below = 50");
        let panic: Vec<bool> = walk(&lone, &[4, 2, 1, 0, 2])
            .iter()
            .map(|d| d.panic)
            .collect();
        assert_eq!(panic, [false, false, true, true, false]);
        // A sorry server serves instead of panic mode if no server is up.
        let with = service("panic_below = 50\nsorry = \"10.0.0.99\"");
        let both: Vec<(bool, bool)> = walk(&with, &[1, 0])
            .iter()
            .map(|d| (d.panic, d.sorry))
            .collect();
        assert_eq!(both, [(true, false), (false, true)]);
    }

    #[test]
    fn vip_is_released_only_below_quorum() {
        let service = service("below_quorum = \"give-up\"\nquorum = 2");
        let gone: Vec<bool> = walk(&service, &[4, 1, 2])
            .iter()
            .map(|d| d.withdrawn)
            .collect();
        assert_eq!(gone, [false, true, false]);
    }

    proptest! {
        /// Below the quorum, a sorry server serves instead of panic mode. A VIP is withdrawn only
        /// below the quorum. A number of servers between `down` and `up` does not change the
        /// quorum.
        #[test]
        fn quorum_for_any_health_is_decided_by_up_and_down_numbers(
            up_at in 1u32..4,
            less in 0u32..4,
            share in 0u8..=100,
            sorry in any::<bool>(),
            steps in proptest::collection::vec(0usize..=4, 1..40),
        ) {
            let down = up_at.saturating_sub(less).max(1);
            let sorry_line = if sorry { "sorry = \"10.0.0.99\"\n" } else { "" };
            let service = service(&format!(
                "quorum = {{ up = {up_at}, down = {down} }}\npanic_below = {share}\nbelow_quorum = \"give-up\"\n{sorry_line}"
            ));
            let mut before = Decision::default();
            for number in steps {
                let now = decide(&service, &up(number), true, Some(before)).expect("the service is decided");
                prop_assert_eq!(now.sorry, sorry && !now.quorum);
                prop_assert!(!(now.sorry && now.panic));
                prop_assert!(!now.withdrawn || !now.quorum);
                let n = u32::try_from(number).expect("the number of servers fits into 32 bits");
                if n >= up_at { prop_assert!(now.quorum); }
                if n < down { prop_assert!(!now.quorum); }
                if (down..up_at).contains(&n) { prop_assert_eq!(now.quorum, before.quorum); }
                before = now;
            }
        }
    }
}
