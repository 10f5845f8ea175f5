//! Digests of services and of their servers: peers compare them, to find differences of
//! configuration.

use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};

use super::{Control, Service};
use crate::sched::About;
use crate::sync::services::{self, ServiceDigest};
use crate::{Family, Instant, Protocol, Request, Server, ServiceKey};

/// Position in a walk over all services: the service and the server at which the walk continues.
#[derive(Clone, Copy, Debug, Default)]
pub struct DigestWalk {
    service: u32,
    server: usize,
    choice: u64,
    ways: Option<u64>,
}

impl Service {
    /// The weight of a server before it became 0; `None` if the weight is not 0, or if the
    /// scheduler does not use this value.
    pub fn last_weight(&self, server: &Server) -> Option<i32> {
        let counts = server.config().weight == 0 && self.pool.goes_by_last_weight();
        // A slow start multiplies the weight temporarily; compare the weight without it.
        counts.then(|| server.last_weight() / self.slow.factor())
    }

    /// Hash of the service's settings, as a part of its digest.
    fn settings_digest(&self) -> u64 {
        let unspecified = match self.key.family() {
            Family::V4 => IpAddr::from([0; 4]),
            Family::V6 => IpAddr::from([0_u16; 8]),
        };
        let unspecified = SocketAddr::new(unspecified, 0);
        let slot = self.pool.slot(&Request {
            client: unspecified,
            virt: unspecified,
            protocol: self.key.protocol().unwrap_or(Protocol::TCP),
            flags: self.config.flags,
            now: Instant::ZERO,
        });
        let slots = slot.map_or(0, |slot| slot.of);
        let servers = u32::try_from(self.servers().len()).unwrap_or(u32::MAX);
        services::settings(&self.key, &self.config, slots, servers)
    }

    /// Whether the scheduler's choice depends on the order of the servers.
    fn is_ordered(&self) -> bool {
        About::of(&self.config.scheduler).is_some_and(|about| about.goes_by_order)
    }
}

impl DigestWalk {
    fn begin(number: u32, service: &Service) -> Self {
        Self {
            service: number,
            server: 0,
            choice: service.settings_digest(),
            ways: Some(0),
        }
    }

    /// Adds at most `budget` servers of a service to its digest; returns their number.
    fn add(&mut self, service: &Service, budget: usize) -> usize {
        let servers = service.servers();
        let end = servers.len().min(self.server + budget);
        let piece = servers.get(self.server..end).unwrap_or_default();
        let ordered = service.is_ordered();
        for (place, server) in (self.server as u64 + 1..).zip(piece) {
            let (addr, config) = (server.addr(), server.config());
            let last_weight = service.last_weight(server).unwrap_or(0);
            let place = if ordered { place } else { 0 };
            let choice = services::server(addr, &config, last_weight, place);
            self.choice = self.choice.wrapping_add(choice);
            let way = services::way(addr, &config);
            self.ways = self.ways.zip(way).map(|(a, b)| a.wrapping_add(b));
        }
        self.server += piece.len();
        piece.len()
    }

    fn digest(&self) -> ServiceDigest {
        ServiceDigest {
            choice: self.choice,
            ways: self.ways.map_or(0, |ways| ways.max(1)),
        }
    }
}

impl Control {
    /// Appends the digests of the next services to `out`, together about `budget` servers and
    /// services. Returns the position at which the next call continues; `None` after the last
    /// service. If a service changes between two calls, its digest is wrong and
    /// [`generation`](Self::generation) changes: the caller then has to start again.
    pub fn digests_piece(
        &self,
        walk: DigestWalk,
        budget: usize,
        out: &mut Vec<(ServiceKey, ServiceDigest)>,
    ) -> Option<DigestWalk> {
        let (mut walk, mut budget) = (walk, budget);
        while budget > 0 {
            let (&number, service) = self.services.range(walk.service..).next()?;
            if walk.service != number || walk.server == 0 {
                walk = DigestWalk::begin(number, service);
            }
            let added = walk.add(service, budget);
            budget = budget.saturating_sub(added + 1);
            if walk.server < service.servers().len() {
                return Some(walk);
            }
            out.push((service.key, walk.digest()));
            walk = DigestWalk {
                service: number.checked_add(1)?,
                ..DigestWalk::default()
            };
        }
        Some(walk)
    }
}

#[cfg(test)]
mod tests {
    use core::time::Duration;

    use super::*;
    use crate::sync::services::ServiceDigests;
    use crate::{Forwarding, Options, ServerConfig, ServiceConfig, ServiceFlags};

    fn key(n: u16) -> ServiceKey {
        ServiceKey::tcp(SocketAddr::from(([198, 51, 100, 1], n)))
    }

    fn server(n: u16) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, 1], n))
    }

    fn nat(weight: i32) -> ServerConfig {
        ServerConfig::new(weight, Forwarding::Nat)
    }

    fn director(scheduler: &str, servers: &[u16]) -> Control {
        let mut control = Control::new(Options::default());
        let config = ServiceConfig::new(Family::V4, scheduler);
        control.add_service(key(80), config, None).unwrap();
        for n in servers {
            add(&mut control, *n, 2);
        }
        control
    }

    fn add(control: &mut Control, n: u16, weight: i32) {
        let now = Instant::ZERO;
        control
            .add_server(&key(80), server(n), &nat(weight), now)
            .unwrap();
    }

    fn weigh(control: &mut Control, n: u16, weight: i32) {
        control
            .edit_server(&key(80), server(n), &nat(weight))
            .unwrap();
    }

    /// All digests, computed in pieces of `budget`.
    fn digests(control: &Control, budget: usize) -> ServiceDigests {
        let (mut all, mut next) = (Vec::new(), Some(DigestWalk::default()));
        while let Some(walk) = next {
            next = control.digests_piece(walk, budget, &mut all);
        }
        ServiceDigests::new(all).0
    }

    fn alike(a: &Control, b: &Control) -> bool {
        digests(a, 256).compare(&digests(b, 256)).next().is_none()
    }

    #[test]
    fn service_digest_covers_server_order_for_ordered_schedulers_only() {
        for about in crate::sched::BUILT_IN {
            let (a, b) = (
                director(about.name, &[1, 2, 3]),
                director(about.name, &[3, 1, 2]),
            );
            assert_eq!(alike(&a, &b), !about.goes_by_order, "{}", about.name);
        }
    }

    #[test]
    fn service_digest_covers_last_weight_for_mh_only() {
        for (scheduler, counts) in [("mh", true), ("wrr", false), ("sh", false)] {
            let (mut a, mut b) = (director(scheduler, &[1]), director(scheduler, &[1]));
            // Director A drains the server, and director B adds it with weight 0.
            add(&mut a, 2, 5);
            weigh(&mut a, 2, 0);
            add(&mut b, 2, 0);
            assert_eq!(alike(&a, &b), !counts, "{scheduler}");
            weigh(&mut b, 2, 5);
            assert!(!alike(&a, &b));
            weigh(&mut b, 2, 0);
            assert!(alike(&a, &b), "{scheduler}");
        }
    }

    #[test]
    fn service_digest_differs_if_setting_of_service_or_server_differs() {
        let base = director("wlc", &[1, 2]);
        let changes: [fn(&mut ServerConfig); 4] = [
            |server| server.weight = 3,
            |server| server.upper = 9,
            |server| (server.upper, server.lower) = (9, 3),
            |server| server.forwarding = Forwarding::Route,
        ];
        for change in changes {
            let mut other = director("wlc", &[1, 2]);
            let mut config = nat(2);
            change(&mut config);
            other.edit_server(&key(80), server(2), &config).unwrap();
            assert!(!alike(&base, &other), "{config:?}");
            other.edit_server(&key(80), server(2), &nat(2)).unwrap();
            assert!(alike(&base, &other));
        }
        let changes: [fn(&mut ServiceConfig); 4] = [
            |service| service.scheduler = "lc".into(),
            |service| service.flags.0 = ServiceFlags::PERSISTENT,
            |service| service.timeout = 60,
            |service| service.netmask = 0xffff_ff00,
        ];
        for change in changes {
            let mut other = director("wlc", &[1, 2]);
            let mut config = ServiceConfig::new(Family::V4, "wlc");
            change(&mut config);
            other.edit_service(&key(80), config, None).unwrap();
            assert!(!alike(&base, &other));
        }
    }

    #[test]
    fn service_digest_is_equal_during_and_after_slow_start() {
        for scheduler in ["mh", "wlc"] {
            let slow = |when: u64| {
                let mut control = director(scheduler, &[1, 2]);
                control.advance(Instant::from_secs(1));
                let mut config = ServiceConfig::new(Family::V4, scheduler);
                config.extras.slow_start = 60;
                control.edit_service(&key(80), config, None).unwrap();
                weigh(&mut control, 2, 0);
                let now = Instant::from_secs(200);
                control.advance(now);
                control
                    .add_server(&key(80), server(3), &nat(2), now)
                    .unwrap();
                control.advance(now + Duration::from_secs(when));
                control
            };
            assert!(alike(&slow(5), &slow(300)), "{scheduler}");
        }
    }

    #[test]
    fn service_digests_are_independent_of_piece_size() {
        let mut control = director("mh", &[]);
        for n in 1..=20 {
            add(&mut control, n, i32::from(n));
        }
        for port in 81..90 {
            let config = ServiceConfig::new(Family::V4, "wlc");
            control.add_service(key(port), config, None).unwrap();
        }
        let whole = digests(&control, 1000);
        assert_eq!(whole.len(), 10);
        for budget in 1..40 {
            assert_eq!(digests(&control, budget), whole, "budget {budget}");
        }
    }

    #[test]
    fn control_generation_changes_if_service_changes_during_digest_walk() {
        let mut control = director("wlc", &(1..=20).collect::<Vec<_>>());
        let (before, mut all) = (control.generation(), Vec::new());
        let walk = control.digests_piece(DigestWalk::default(), 10, &mut all);
        for n in 1..=15 {
            control
                .delete_server(&key(80), server(n), Instant::ZERO)
                .unwrap();
        }
        // The service now has fewer servers than the walk has visited, so the walk ends.
        assert!(control.digests_piece(walk.unwrap(), 10, &mut all).is_none());
        assert_ne!(control.generation(), before);
        let walk = control.digests_piece(DigestWalk::default(), 3, &mut all);
        control.delete_service(&key(80), Instant::ZERO).unwrap();
        assert!(control.digests_piece(walk.unwrap(), 10, &mut all).is_none());
    }
}
