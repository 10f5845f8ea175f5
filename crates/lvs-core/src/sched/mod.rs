//! Schedulers: the choice of a real server for a new connection.
//!
//! All lists of servers are in the kernel's order: the most recently added server is first. Among
//! equal servers, the first in that order is chosen.

mod cache;
mod dh;
mod ewma;
mod fo;
mod lblc;
mod lblcr;
mod lc;
mod least;
mod mh;
mod nq;
mod ovf;
mod rr;
mod sed;
mod sh;
mod twos;
mod wlc;
mod wrr;

use alloc::boxed::Box;
use alloc::sync::Arc;

pub use self::dh::DestinationHashing;
pub use self::ewma::PeakEwma;
pub use self::fo::Failover;
pub use self::lblc::LocalityLeastConnections;
pub use self::lblcr::LocalityLeastConnectionsReplicated;
pub use self::lc::LeastConnections;
pub use self::mh::MaglevHashing;
pub use self::nq::NeverQueue;
pub use self::ovf::Overflow;
pub use self::rr::RoundRobin;
pub use self::sed::ShortestExpectedDelay;
pub use self::sh::SourceHashing;
pub use self::twos::RandomTwos;
pub use self::wlc::WeightedLeastConnections;
pub use self::wrr::WeightedRoundRobin;
pub use crate::scheduler::HashSlot;
use crate::{Request, Scheduler, Server, ServiceFlags};

/// Meaning of weights for a scheduler. No scheduler chooses a server with a weight of 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// The weight is a share of the connections.
    Share,
    /// The scheduler ignores the weight and treats all servers alike.
    Ignored,
    /// The weight is the order of preference.
    Priority,
    /// The weight is a maximum number of connections.
    Capacity,
    /// The weight is a share of the connections, and a limit above which other servers are
    /// preferred.
    Both,
}

/// Description of a built-in scheduler.
#[derive(Clone, Copy, Debug)]
pub struct About {
    /// The name of the scheduler in ipvsadm.
    pub name: &'static str,
    /// A summary of the rule by which the scheduler chooses.
    pub summary: &'static str,
    /// The effect of servers' weights on the choice.
    pub weights: Weights,
    /// The scheduler's behaviour for a client whose server has a weight of 0.
    pub at_zero: AtZero,
    /// Whether the scheduler uses the response time of servers, so that it accepts only servers
    /// with NAT or full NAT.
    pub needs_replies: bool,
    /// Whether IPVS in the kernel has this scheduler.
    pub in_ipvs: bool,
    /// The names of the flags of services with this scheduler, in the order of their bits;
    /// [`ANY_FLAGS`] for flags without a name.
    pub flags: &'static [(&'static str, u32)],
    /// Whether the scheduler chooses at random, so that a preview is only one of several possible
    /// results.
    pub draws_lots: bool,
    /// Whether the scheduler's choice depends on the order of the servers, even if the servers
    /// stay the same: directors that must choose the same servers then need the same order.
    pub goes_by_order: bool,
    /// Makes a scheduler for a service.
    pub make: fn() -> Box<dyn Scheduler>,
}

impl About {
    /// The properties that most schedulers have, for use in struct updates.
    const USUAL: Self = Self {
        name: "",
        summary: "",
        weights: Weights::Share,
        at_zero: AtZero::Avoids,
        needs_replies: false,
        in_ipvs: true,
        flags: &[],
        draws_lots: false,
        goes_by_order: false,
        make: || Box::new(NoScheduler),
    };

    /// The built-in scheduler of this name.
    pub fn of(name: &str) -> Option<&'static Self> {
        BUILT_IN.iter().find(|about| about.name == name)
    }

    /// Whether a service with these flags refuses some clients while a server has a weight of 0,
    /// although other servers could accept them.
    pub const fn refuses_at_zero(&self, flags: ServiceFlags) -> bool {
        match self.at_zero {
            AtZero::Avoids => false,
            AtZero::Refuses => true,
            AtZero::RefusesWithoutFallback => !flags.has(ServiceFlags::SCHED1),
        }
    }
}

/// The scheduler of a service for which none is specified, as with ipvsadm.
pub const DEFAULT: &str = "wlc";

/// Scheduler flags by number, which every scheduler accepts.
pub const ANY_FLAGS: &[(&str, u32)] = &[
    ("flag-1", ServiceFlags::SCHED1),
    ("flag-2", ServiceFlags::SCHED2),
    ("flag-3", ServiceFlags::SCHED3),
];

/// A scheduler flag by name: its bit, and, for a name of a single scheduler, that scheduler. `None`
/// if no flag has the name.
pub fn flag(name: &str) -> Option<(u32, Option<&'static About>)> {
    let of = |flags: &[(&str, u32)]| {
        let found = flags.iter().find(|(known, _)| *known == name);
        found.map(|&(_, bit)| bit)
    };
    let own = || {
        BUILT_IN
            .iter()
            .find_map(|about| Some((of(about.flags)?, Some(about))))
    };
    of(ANY_FLAGS).map(|bit| (bit, None)).or_else(own)
}

/// Behaviour of a scheduler for a client whose server has a weight of 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtZero {
    /// The scheduler chooses another server.
    Avoids,
    /// The scheduler refuses the client: the choice depends on addresses, not on weights.
    Refuses,
    /// The scheduler refuses the client, unless the service has the fallback (`sh-fallback`,
    /// `mh-fallback`).
    RefusesWithoutFallback,
}

/// The built-in schedulers, in the order of listings.
pub const BUILT_IN: &[About] = &[
    rr::ABOUT,
    wrr::ABOUT,
    lc::ABOUT,
    wlc::ABOUT,
    lblc::ABOUT,
    lblcr::ABOUT,
    dh::ABOUT,
    sh::ABOUT,
    sed::ABOUT,
    nq::ABOUT,
    fo::ABOUT,
    ovf::ABOUT,
    mh::ABOUT,
    twos::ABOUT,
    ewma::ABOUT,
    NoScheduler::ABOUT,
];

/// `none`: a scheduler that refuses every connection.
#[derive(Clone, Copy, Debug, Default)]
struct NoScheduler;

impl NoScheduler {
    const ABOUT: About = About {
        name: "none",
        summary: "no new connections",
        weights: Weights::Ignored,
        make: || Box::new(Self),
        ..About::USUAL
    };
}

impl Scheduler for NoScheduler {
    fn preview(&self) -> Option<Box<dyn Scheduler>> {
        Some(Box::new(*self))
    }

    fn pick(&mut self, _: &[Arc<Server>], _: &Request) -> Option<usize> {
        None
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use alloc::string::String;
    use alloc::vec::Vec;
    use core::net::SocketAddr;

    use super::*;
    use crate::{Forwarding, Instant, Pool, Protocol, Registry, ServerConfig};

    /// A pool of servers 10.0.0.1:80, 10.0.0.2:80 and so on with these weights; [`letters`] names
    /// them A, B and so on.
    pub(crate) fn pool(scheduler: &str, weights: &[i32]) -> Pool {
        let mut pool = Pool::new(Registry::new().create(scheduler).unwrap());
        for (n, &weight) in (1..).zip(weights) {
            let config = ServerConfig::new(weight, Forwarding::Nat);
            pool.insert(server(n), &config).unwrap();
        }
        pool
    }

    pub(crate) fn set_weight(pool: &mut Pool, server_number: u8, weight: i32) {
        let config = ServerConfig::new(weight, Forwarding::Nat);
        pool.edit(server(server_number + 1), &config).unwrap();
    }

    pub(crate) fn server(n: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, n], 80))
    }

    /// 24 requests: client k has the address 192.0.2.k and the port 1000 + k.
    pub(crate) fn clients(flags: ServiceFlags) -> Vec<Request> {
        (1..=24)
            .map(|k| Request {
                client: SocketAddr::from(([192, 0, 2, k], 1000 + u16::from(k))),
                virt: "198.51.100.1:80".parse().unwrap(),
                protocol: Protocol::TCP,
                flags,
                now: Instant::ZERO,
            })
            .collect()
    }

    pub(crate) fn letters(pool: &mut Pool, requests: Vec<Request>) -> String {
        requests
            .iter()
            .map(
                |request| match pool.pick(request).map(|server| server.addr().ip()) {
                    Some(core::net::IpAddr::V4(addr)) => char::from(b'A' - 1 + addr.octets()[3]),
                    _ => '-',
                },
            )
            .collect()
    }

    #[test]
    fn scheduler_behaviour_at_weight_0_matches_its_description() {
        for about in BUILT_IN.iter().filter(|about| about.name != "none") {
            for flags in [0, ServiceFlags::SCHED1].map(ServiceFlags) {
                let mut pool = pool(about.name, &[1, 1]);
                assert!(!letters(&mut pool, clients(flags)).contains('-'));
                // All clients request one address, which may belong to either server.
                let refuses = (0..2).any(|server| {
                    set_weight(&mut pool, server, 0);
                    let refuses = letters(&mut pool, clients(flags)).contains('-');
                    set_weight(&mut pool, server, 1);
                    refuses
                });
                let name = about.name;
                assert_eq!(refuses, about.refuses_at_zero(flags), "{name} {flags:?}");
            }
        }
    }

    #[test]
    fn scheduler_flag_is_found_by_name_and_has_one_name_per_scheduler() {
        assert_eq!(
            flag("sh-port").map(|(bit, _)| bit),
            Some(ServiceFlags::SCHED2)
        );
        assert_eq!(flag("mh-port").unwrap().1.unwrap().name, "mh");
        assert!(flag("flag-3").unwrap().1.is_none() && flag("rr-port").is_none());
        for about in BUILT_IN {
            let mut bits: Vec<u32> = about.flags.iter().map(|&(_, bit)| bit).collect();
            bits.dedup();
            assert_eq!(bits.len(), about.flags.len(), "{}", about.name);
            for &(name, bit) in about.flags {
                assert!(ANY_FLAGS.iter().any(|&(_, any)| any == bit), "{name}");
                assert!(
                    name.starts_with(&alloc::format!("{}-", about.name)),
                    "{name}"
                );
            }
        }
    }

    /// A scheduler's choice depends on the seed if, and only if, `draws_lots` is set in its
    /// description.
    #[test]
    fn scheduler_is_described_as_random_if_and_only_if_choice_depends_on_seed() {
        for about in BUILT_IN {
            let choices = |seed: u64| {
                let mut scheduler = (about.make)();
                scheduler.seed(seed);
                let mut pool = Pool::new(scheduler);
                for n in 1..=4 {
                    let config = ServerConfig::new(1, Forwarding::Nat);
                    pool.insert(server(n), &config).unwrap();
                }
                letters(&mut pool, clients(ServiceFlags::default()))
            };
            assert_eq!(choices(1) != choices(2), about.draws_lots, "{}", about.name);
        }
    }

    #[test]
    fn scheduler_properties_match_their_descriptions() {
        for about in BUILT_IN {
            let scheduler = (about.make)();
            let name = about.name;
            let capacity = matches!(about.weights, Weights::Capacity | Weights::Both);
            assert_eq!(scheduler.needs_replies(), about.needs_replies, "{name}");
            assert_eq!(scheduler.weight_is_capacity(), capacity, "{name}");
            assert!(
                about.summary.len() > 10 && !about.summary.ends_with('.'),
                "{name}"
            );
            let mut pool = pool(name, &[3, 1]);
            let mut unequal = [0u32; 2];
            let requests = clients(ServiceFlags::default());
            let mut open = Vec::new();
            for request in requests.iter().cycle().take(240) {
                if let Some(server) = pool.pick(request) {
                    unequal[usize::from(server.weight() == 1)] += 1;
                    open.push(server.open());
                }
            }
            match about.weights {
                Weights::Priority => assert_eq!(unequal[1], 0, "{name}"),
                Weights::Capacity => assert!(open.len() < 10, "{name}"),
                Weights::Ignored => assert!(unequal[0].abs_diff(unequal[1]) <= 240, "{name}"),
                Weights::Share | Weights::Both => {
                    assert!(
                        unequal[0] > unequal[1],
                        "{name} does not choose the server of weight 3 more often: {unequal:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn nq_prefers_idle_server_of_any_weight() {
        let mut pool = pool("nq", &[100, 1]);
        assert_eq!(
            letters(&mut pool, clients(ServiceFlags::default())[..1].to_vec()),
            "B"
        );
    }

    #[test]
    fn dh_assigns_slots_in_turn_and_refuses_clients_of_drained_server() {
        let mut pool = pool("dh", &[1, 1, 1]);
        let virts = [
            "10.0.0.1",
            "10.0.0.2",
            "192.168.1.100",
            "172.16.5.9",
            "203.0.113.7",
            "198.51.100.255",
        ];
        let requests = || {
            virts
                .map(|virt| Request {
                    virt: SocketAddr::new(virt.parse().unwrap(), 80),
                    ..clients(ServiceFlags::default())[0]
                })
                .to_vec()
        };
        assert_eq!(letters(&mut pool, requests()), "CAABBA");
        set_weight(&mut pool, 0, 0);
        assert_eq!(letters(&mut pool, requests()), "C--BB-");
    }

    #[test]
    fn twos_without_load_draws_servers_by_weight_and_none_of_weight_0() {
        let mut pool = pool("twos", &[1, 3, 0]);
        let request = clients(ServiceFlags::default())[0];
        let mut counts = [0u32; 3];
        for _ in 0..4000 {
            let letter = letters(&mut pool, alloc::vec![request]).remove(0);
            counts[usize::from(letter as u8 - b'A')] += 1;
        }
        // Without load, the first choice is kept: the first server of the list, B, has (3 + 1) / (4
        // + 1).
        assert_eq!(counts[2], 0);
        assert!((3100..3300).contains(&counts[1]), "{counts:?}");
    }
}
