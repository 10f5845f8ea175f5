//! Locality-based least connections with replication (`ip_vs_lblcr`).

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;

use super::cache::{self, CHECK_PERIOD, Cache};
use super::lblc::is_overloaded;
use super::wlc::least_by;
use super::{About, HashSlot, Weights};
use crate::server::HeldServer;
use crate::settings::Sysctls;
use crate::{Instant, Request, Scheduler, Server};

pub(super) const ABOUT: About = About {
    name: "lblcr",
    summary: "a set of servers for each destination, by fewest connections",
    weights: Weights::Both,
    make: || Box::<LocalityLeastConnectionsReplicated>::default(),
    ..About::USUAL
};

/// Assigns each destination address to a set of servers, and chooses the least loaded server of the
/// set. If this server has more active connections than its weight while another server has fewer
/// than half of its own weight, or if no server of the set is available, the least loaded server of
/// the service is chosen and added to the set. The set loses its most loaded server if it has not
/// changed for the time of the sysctl `lblcr_expiration`; one server always stays.
#[derive(Clone, Debug)]
pub struct LocalityLeastConnectionsReplicated {
    cache: Cache<Set>,
    expiration: Duration,
}

/// The servers of one destination address, the most recently added one last. The kernel visits them
/// from the last to the first.
#[derive(Clone, Debug)]
struct Set {
    servers: Vec<HeldServer>,
    last_change: Instant,
}

impl Set {
    /// Returns the server with the least load in relation to its weight among the servers that are
    /// available and not overloaded (`ip_vs_dest_set_min`); `None` if all of these have weight 0.
    fn least(&self) -> Option<&Arc<Server>> {
        let fits = |server: &&HeldServer| !server.is_overloaded() && server.is_available();
        let mut members = self.servers.iter().rev().filter(fits);
        // A server with weight 0 cannot be the first candidate; a later one loses every comparison.
        let first = members.find(|server| server.weight() > 0)?;
        let least = members.fold(first, |least, other| {
            if load(least) * weight(other) > load(other) * weight(least) {
                other
            } else {
                least
            }
        });
        Some(least)
    }

    /// Returns the index of the server with the most load in relation to its weight
    /// (`ip_vs_dest_set_max`), among the servers with a weight above 0.
    fn most(&self) -> Option<usize> {
        (0..self.servers.len())
            .rev()
            .filter(|&index| self.servers[index].weight() > 0)
            .reduce(|most, index| {
                let (a, b) = (&self.servers[most], &self.servers[index]);
                if load(a) * weight(b) < load(b) * weight(a) {
                    index
                } else {
                    most
                }
            })
    }
}

fn load(server: &Server) -> i64 {
    i64::from(server.overhead())
}

fn weight(server: &Server) -> i64 {
    i64::from(server.weight())
}

impl Default for LocalityLeastConnectionsReplicated {
    fn default() -> Self {
        Self {
            cache: Cache::default(),
            expiration: Duration::from_secs(Sysctls::default().lblcr_expiration.into()),
        }
    }
}

impl Scheduler for LocalityLeastConnectionsReplicated {
    fn weight_is_capacity(&self) -> bool {
        true
    }

    fn preview(&self) -> Option<Box<dyn Scheduler>> {
        Some(Box::new(self.clone()))
    }

    fn pick(&mut self, servers: &[Arc<Server>], request: &Request) -> Option<usize> {
        let (addr, now) = (request.virt.ip(), request.now);
        let least = || least_by(servers, |server| i64::from(server.overhead()));
        let Some(entry) = self.cache.get_mut(addr) else {
            let index = least()?;
            let set = Set {
                servers: vec![HeldServer::new(&servers[index])],
                last_change: now,
            };
            self.cache.insert(addr, set, now);
            return Some(index);
        };
        entry.last_use = now;
        let set = &mut entry.value;
        let member = set.least().cloned();
        if set.servers.len() > 1 && now > set.last_change + self.expiration {
            // The server chosen above may be the one that is removed; it still gets this
            // connection.
            if let Some(most) = set.most() {
                set.servers.remove(most);
                set.last_change = now;
            }
        }
        if let Some(member) = member
            && !is_overloaded(&member, servers)
        {
            let place = servers.iter().position(|server| server.id() == member.id());
            if place.is_some() {
                return place;
            }
        }
        let index = least()?;
        let chosen = &servers[index];
        if set.servers.iter().all(|server| server.id() != chosen.id()) {
            set.servers.push(HeldServer::new(chosen));
            set.last_change = now;
        }
        Some(index)
    }

    fn slot(&self, request: &Request) -> Option<HashSlot> {
        Some(cache::slot(request.virt.ip()))
    }

    fn start(&mut self, _: &[Arc<Server>]) {
        self.cache = Cache::default();
    }

    fn sysctls_changed(&mut self, sysctls: &Sysctls) {
        self.expiration = Duration::from_secs(sysctls.lblcr_expiration.into());
    }

    fn period(&self) -> Option<Duration> {
        Some(CHECK_PERIOD)
    }

    fn tick(&mut self, now: Instant) {
        self.cache.check(now, self.expiration);
    }
}
