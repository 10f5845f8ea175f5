//! Locality-based least connections (`ip_vs_lblc`).

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::time::Duration;

use super::cache::{self, CHECK_PERIOD, Cache};
use super::wlc::least_by;
use super::{About, HashSlot, Weights};
use crate::server::HeldServer;
use crate::settings::Sysctls;
use crate::{Instant, Request, Scheduler, Server};

pub(super) const ABOUT: About = About {
    name: "lblc",
    summary: "a server for each destination, by fewest connections",
    weights: Weights::Both,
    make: || Box::<LocalityLeastConnections>::default(),
    ..About::USUAL
};

/// Assigns each destination address to one server, for services with many destination addresses
/// (such as a firewall-mark service in front of web caches). The address is assigned to the least
/// loaded server instead if its server was removed or has weight 0, or if its server has more
/// active connections than its weight while another server has fewer than half of its own weight.
#[derive(Clone, Debug)]
pub struct LocalityLeastConnections {
    cache: Cache<HeldServer>,
    expiration: Duration,
}

impl Default for LocalityLeastConnections {
    fn default() -> Self {
        Self {
            cache: Cache::default(),
            expiration: Duration::from_secs(Sysctls::default().lblc_expiration.into()),
        }
    }
}

impl Scheduler for LocalityLeastConnections {
    fn weight_is_capacity(&self) -> bool {
        true
    }

    fn preview(&self) -> Option<Box<dyn Scheduler>> {
        Some(Box::new(self.clone()))
    }

    fn pick(&mut self, servers: &[Arc<Server>], request: &Request) -> Option<usize> {
        let addr = request.virt.ip();
        let mut cached = None;
        if let Some(entry) = self.cache.get_mut(addr) {
            entry.last_use = request.now;
            let server = &*entry.value;
            cached = Some(server.id());
            // As in the kernel, the overload flag of the cached server is ignored.
            if server.is_available() && server.weight() > 0 && !is_overloaded(server, servers) {
                let place = servers.iter().position(|other| other.id() == server.id());
                if place.is_some() {
                    return place;
                }
            }
        }
        let index = least_by(servers, |server| i64::from(server.overhead()))?;
        if cached != Some(servers[index].id()) {
            if cached.is_some() {
                self.cache.remove(addr);
            }
            let held = HeldServer::new(&servers[index]);
            self.cache.insert(addr, held, request.now);
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
        self.expiration = Duration::from_secs(sysctls.lblc_expiration.into());
    }

    fn period(&self) -> Option<Duration> {
        Some(CHECK_PERIOD)
    }

    fn tick(&mut self, now: Instant) {
        self.cache.check(now, self.expiration);
    }
}

/// Whether `server` has more active connections than its weight while another server has fewer than
/// half of its own weight (`is_overloaded`).
pub(super) fn is_overloaded(server: &Server, servers: &[Arc<Server>]) -> bool {
    let active = |server: &Server| i64::from(server.active());
    active(server) > i64::from(server.weight())
        && servers
            .iter()
            .any(|other| active(other) * 2 < i64::from(other.weight()))
}
