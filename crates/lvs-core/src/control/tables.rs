//! Digests of the services' tables, and the tables, for other directors to compare.

use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};

use super::{Control, Service};
use crate::sched::About;
use crate::sync::tables::{SERVERS_TOLD_MAX, Table, TableDigest, TableKey, TableServer};
use crate::{Family, Forwarding, Instant, Protocol, Request, Server, ServiceKey};

/// How often a service that changes amid its digest is begun anew.
const TRIES: u8 = 8;

/// Where a walk over the tables goes on.
#[derive(Clone, Debug, Default)]
pub struct TablesWalk {
    /// The number of the service.
    service: u32,
    part: Option<Part>,
    tries: u8,
}

/// A service of which not all servers were looked at.
#[derive(Clone, Debug)]
struct Part {
    generation: u32,
    /// The server that is next.
    next: usize,
    choice: u64,
    ways: Option<u64>,
}

impl Service {
    /// A server as other directors have it.
    fn told(&self, server: &Server) -> TableServer {
        let config = server.config();
        // What a slow start multiplies is no difference: it ends by itself.
        let last_weight = match config.weight {
            0 if self.pool.goes_by_last_weight() => server.last_weight() / self.slow.factor(),
            _ => 0,
        };
        TableServer {
            address: server.addr(),
            weight: config.weight,
            last_weight,
            upper: config.upper,
            lower: config.lower,
            method: config.forwarding,
            tunnel: match config.forwarding {
                Forwarding::Tunnel => config.tunnel.pack(),
                _ => 0,
            },
        }
    }

    /// Its table, without servers.
    fn table(&self) -> Table {
        let unspecified = match self.key.family() {
            Family::V4 => IpAddr::from([0; 4]),
            Family::V6 => IpAddr::from([0_u16; 8]),
        };
        let nobody = SocketAddr::new(unspecified, 0);
        let slot = self.pool.slot(&Request {
            client: nobody,
            virt: nobody,
            protocol: self.key.protocol().unwrap_or(Protocol::TCP),
            flags: self.config.flags,
            now: Instant::ZERO,
        });
        let slots = slot.map_or(0, |slot| slot.of);
        Table::new(&self.key, &self.config, slots, self.pool.servers().len())
    }

    /// Whether its scheduler chooses by the order of its servers.
    fn is_ordered(&self) -> bool {
        About::of(&self.config.scheduler).is_some_and(|about| about.goes_by_order)
    }
}

impl Control {
    /// Digests of the next services' tables, of `budget` servers and services, and from where to go
    /// on. Of a service that changes all the time, [`TableDigest::GONE`]: what it was before still
    /// holds.
    pub fn tables_piece(
        &self,
        walk: TablesWalk,
        mut budget: usize,
        out: &mut Vec<(TableKey, TableDigest)>,
    ) -> Option<TablesWalk> {
        let mut walk = walk;
        while budget > 0 {
            let (&number, service) = self.services.range(walk.service..).next()?;
            let generation = self.generation();
            let mut part = match walk.part.take() {
                Some(part) if walk.service == number && part.generation == generation => part,
                torn => {
                    walk.tries = match torn {
                        Some(_) if walk.service == number => walk.tries + 1,
                        _ => 0,
                    };
                    budget -= 1;
                    Part {
                        generation,
                        next: 0,
                        choice: service.table().choice(),
                        ways: Some(0),
                    }
                }
            };
            walk.service = number;
            let ordered = service.is_ordered();
            let servers = service.servers();
            let end = servers.len().min(part.next + budget);
            for (at, server) in servers.iter().enumerate().take(end).skip(part.next) {
                let told = service.told(server);
                let at = if ordered { at as u64 + 1 } else { 0 };
                part.choice = part.choice.wrapping_add(told.choice(at));
                part.ways = part.ways.zip(told.way()).map(|(a, b)| a.wrapping_add(b));
            }
            budget -= end - part.next;
            part.next = end;
            let done = end == servers.len();
            if !done && walk.tries < TRIES {
                walk.part = Some(part);
                continue;
            }
            let digest = match done {
                true => TableDigest {
                    choice: part.choice.max(1),
                    ways: part.ways.map_or(0, |ways| ways.max(1)),
                },
                false => TableDigest::GONE,
            };
            out.push((TableKey::from(&service.key), digest));
            walk = TablesWalk {
                service: number.checked_add(1)?,
                ..TablesWalk::default()
            };
        }
        Some(walk)
    }

    /// A service's table with `count` of the servers that are told of it, from `from` on; whether
    /// their order matters, and whether there are more.
    pub fn table_piece(
        &self,
        key: &ServiceKey,
        from: usize,
        count: usize,
    ) -> Option<(Table, bool, bool)> {
        let service = self.service(key)?;
        let mut table = service.table();
        let all = service.servers();
        let told = all.iter().take(SERVERS_TOLD_MAX).skip(from).take(count);
        table.servers = told.map(|server| service.told(server)).collect();
        let more = from + count < all.len().min(SERVERS_TOLD_MAX);
        Some((table, service.is_ordered(), more))
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use core::time::Duration;

    use super::*;
    use crate::sync::tables::Tables;
    use crate::{Options, ServerConfig, ServiceConfig, ServiceFlags};

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

    /// All digests, made in pieces.
    fn tables(control: &Control, budget: usize) -> Tables {
        let (mut all, mut next) = (Vec::new(), Some(TablesWalk::default()));
        while let Some(walk) = next {
            next = control.tables_piece(walk, budget, &mut all);
        }
        Tables::new(all).0
    }

    fn alike(a: &Control, b: &Control) -> bool {
        tables(a, 256).compare(&tables(b, 256)).next().is_none()
    }

    #[test]
    fn the_order_of_servers_counts_where_schedulers_go_by_it() {
        for about in crate::sched::BUILT_IN {
            let (a, b) = (
                director(about.name, &[1, 2, 3]),
                director(about.name, &[3, 1, 2]),
            );
            assert_eq!(alike(&a, &b), !about.goes_by_order, "{}", about.name);
        }
    }

    #[test]
    fn the_weight_that_a_server_had_counts_for_mh() {
        for (scheduler, counts) in [("mh", true), ("wrr", false), ("sh", false)] {
            let (mut a, mut b) = (director(scheduler, &[1]), director(scheduler, &[1]));
            // Drained here, added without a weight there.
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
    fn every_setting_of_a_server_and_of_its_service_counts() {
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
    fn a_slow_start_is_no_difference() {
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
    fn pieces_of_any_size_give_the_same() {
        let mut control = director("mh", &[]);
        for n in 1..=20 {
            add(&mut control, n, i32::from(n));
        }
        for port in 81..90 {
            let config = ServiceConfig::new(Family::V4, "wlc");
            control.add_service(key(port), config, None).unwrap();
        }
        let whole = tables(&control, 1000);
        assert_eq!(whole.len(), 10);
        for budget in 1..40 {
            assert_eq!(tables(&control, budget), whole, "{budget}");
        }
    }

    #[test]
    fn a_service_that_changes_amid_its_digest_is_begun_anew() {
        let mut control = director("wlc", &(1..=20).collect::<Vec<_>>());
        let mut all = Vec::new();
        let walk = control.tables_piece(TablesWalk::default(), 10, &mut all);
        weigh(&mut control, 1, 9);
        let mut next = walk;
        while let Some(walk) = next {
            next = control.tables_piece(walk, 10, &mut all);
        }
        assert_eq!(Tables::new(all).0, tables(&control, 1000));
        // One that changes all the time has none, and does not hold the others up.
        let (mut all, mut next) = (vec![], Some(TablesWalk::default()));
        let mut pieces = 0;
        while let Some(walk) = next {
            weigh(&mut control, 1, 1 + pieces % 2);
            next = control.tables_piece(walk, 10, &mut all);
            pieces += 1;
        }
        assert_eq!(all.len(), 1);
        assert_eq!(all[0].1, TableDigest::GONE);
        assert!(pieces < 20, "{pieces}");
    }

    #[test]
    fn a_table_is_read_in_pieces() {
        let control = director("mh", &(1..=20).collect::<Vec<_>>());
        let (first, ordered, more) = control.table_piece(&key(80), 0, 15).unwrap();
        assert!(ordered && more);
        assert_eq!(
            (first.count, first.slots, first.servers.len()),
            (20, 4093, 15)
        );
        let (rest, _, more) = control.table_piece(&key(80), 15, 15).unwrap();
        assert_eq!((rest.servers.len(), more), (5, false));
        assert_eq!(rest.servers[4].address, server(1), "added first");
        assert!(control.table_piece(&key(81), 0, 15).is_none());
    }
}
