//! The proxy of `lvsd`, which configures it with the same calls as a dataplane.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lvs_core::api::{Call, Failure, FailureCode, Permissive, ServerInfo, ServiceId, ServiceInfo};
use lvs_core::filter::FilterLists;
use lvs_core::settings::OnServerDown;
use rustix::process::{Resource, getrlimit};

use super::Options;
use super::balancer::{Balancer, Counts};
use super::close_signal::CloseSignal;
use super::pipe::PIPES_MAX;
use super::workers::{Listeners, Workers};

/// Maximum number of connections, if enough descriptors are available.
const CONNECTIONS_MAX: usize = 100_000;
/// The maximum number of connections is never lower than this, even if there are too few
/// descriptors.
const CONNECTIONS_MIN: usize = 16;
/// Number of descriptors for other purposes than proxied connections, pipes, listeners and checks:
/// 128 connections of the API, 64 of the control socket, files, and the event loops of threads.
const RESERVE: usize = 384;
/// Maximum number of descriptors for pipes.
const PIPE_DESCRIPTORS: usize = 2 * PIPES_MAX;

/// The proxy of this process. Clones refer to the same proxy.
#[derive(Clone)]
pub struct Proxy(Arc<Whole>);

struct Whole {
    balancer: Arc<Balancer>,
    workers: Workers,
    /// The signals by which the listeners of each service are closed.
    listening: Mutex<HashMap<ServiceId, Arc<CloseSignal>>>,
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Proxy").finish_non_exhaustive()
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        for close_signal in self.listening().values() {
            close_signal.close();
        }
        self.balancer.lock().end_connections(|_, _| true);
    }
}

impl Whole {
    fn listening(&self) -> MutexGuard<'_, HashMap<ServiceId, Arc<CloseSignal>>> {
        self.listening
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Proxy {
    /// Starts the proxy's threads, without services.
    ///
    /// # Errors
    /// The system has no threads, descriptors or random numbers available.
    pub fn start() -> io::Result<Self> {
        let mut seed = [0; 8];
        rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty())?;
        let most = most(files(), RESERVE);
        let balancer = Arc::new(Balancer::new(most, u64::from_ne_bytes(seed)));
        Ok(Self(Arc::new(Whole {
            workers: Workers::start(&balancer)?,
            balancer,
            listening: Mutex::default(),
        })))
    }

    /// Reserves descriptors for the listeners of this number of services, and for this number of
    /// simultaneous checks.
    pub fn leave_room(&self, services: usize, checks: usize) {
        let others = RESERVE + checks + services * self.0.workers.len();
        self.0.balancer.set_most(most(files(), others));
    }

    #[cfg(test)]
    pub(super) fn serve_at_most(&self, most: usize) {
        self.0.balancer.set_most(most);
    }

    /// Returns the counters of the proxy.
    pub fn counts(&self) -> Counts {
        self.0.balancer.counts()
    }

    /// Sets the proxy settings of all services. Services that are not in `options` get the
    /// defaults.
    pub fn set_options(&self, options: HashMap<ServiceId, Options>) {
        self.0.balancer.set_options(options);
    }

    /// Returns the number of connections, and of clients that send datagrams.
    pub fn connections(&self) -> usize {
        self.0.balancer.used()
    }

    /// Binds the addresses of new services, before any change is made.
    fn bind(&self, changes: &[Call]) -> Result<Vec<Listeners>, Failure> {
        let mut all = Vec::new();
        let mut gone = HashSet::new();
        let there: HashSet<ServiceId> = self.0.listening().keys().copied().collect();
        for (number, change) in changes.iter().enumerate() {
            if let Call::ServiceDelete { service } = change {
                gone.insert(*service);
            }
            let Call::ServiceAdd(spec) = change else {
                continue;
            };
            if there.contains(&spec.service) && !gone.contains(&spec.service) {
                continue;
            }
            let (ServiceId::Tcp { address } | ServiceId::Udp { address }) = spec.service else {
                continue;
            };
            match self.0.workers.bind(spec.service, address) {
                Ok(listeners) => all.push(listeners),
                Err(error) => {
                    return Err(Failure {
                        change: (changes.len() > 1).then_some(number),
                        ..Failure::new(FailureCode::Permission, refusal(address, &error))
                    });
                }
            }
        }
        Ok(all)
    }

    /// The services with their servers, in the form in which a dataplane lists them.
    pub fn services(&self) -> Vec<ServiceInfo> {
        let balancer = &self.0.balancer;
        let now = balancer.now();
        let mut inner = balancer.lock();
        inner.director.advance(now);
        let control = &inner.director.control;
        // The proxy does not measure latency, does not count unanswered connections, and has no
        // peers.
        let server = |service, server: &Arc<lvs_core::Server>| ServerInfo {
            last_weight: None,
            latency_us: None,
            unanswered: None,
            attempts: Default::default(),
            ..ServerInfo::of(control, service, server, now)
        };
        let services = control.services().map(|service| {
            let servers = service.servers().iter();
            ServiceInfo {
                servers: servers.map(|one| server(service, one)).collect(),
                ..ServiceInfo::of(service, now)
            }
        });
        services.collect()
    }

    /// The filters by service; the key `None` is the filter of all services.
    pub fn filters(&self) -> HashMap<Option<ServiceId>, FilterLists> {
        let inner = self.0.balancer.lock();
        let filters = inner.director.control.filters();
        filters
            .map(|(key, filter)| (key.map(ServiceId::from), filter.lists()))
            .collect()
    }

    /// Applies a list of changes completely or not at all, as a dataplane does, after binding the
    /// addresses of new services. Closes the UDP sessions of removed servers and services, and
    /// their TCP connections unless the service has [`OnServerDown::Kernel`].
    ///
    /// # Errors
    /// The change that is refused, and the reason.
    pub fn apply(&self, changes: &[Call]) -> Result<(), Failure> {
        let listeners = self.bind(changes)?;
        let balancer = &self.0.balancer;
        let now = balancer.now();
        let mut inner = balancer.lock();
        let ends = |inner: &crate::balancer::Inner, service: &ServiceId| {
            let service = inner.director.control.service(&(*service).into());
            // A client's session would otherwise continue to send datagrams to the removed server.
            service.is_some_and(|service| {
                service.config().extras.on_server_down != OnServerDown::Kernel
                    || matches!(ServiceId::from(service.key()), ServiceId::Udp { .. })
            })
        };
        let mut over = Vec::new();
        for change in changes {
            match change {
                Call::ServerDelete { service, server } if ends(&inner, service) => {
                    over.push((*service, Some(*server)));
                }
                Call::ServiceDelete { service } if ends(&inner, service) => {
                    over.push((*service, None));
                }
                _ => {}
            }
        }
        inner
            .director
            .control
            .apply(changes, &Permissive, now)
            .map_err(|refused| {
                let mut failure = refused.failure;
                failure.change = (changes.len() > 1).then_some(refused.change);
                failure
            })?;
        inner.end_connections(|service, server| {
            over.iter()
                .any(|(of, one)| of == service && one.is_none_or(|one| one == *server))
        });
        inner.sweep();
        drop(inner);
        let mut listening = self.0.listening();
        for change in changes {
            if let Call::ServiceDelete { service } = change
                && let Some(close_signal) = listening.remove(service)
            {
                close_signal.close();
            }
        }
        for listeners in listeners {
            let close_signal = Arc::default();
            listening.insert(listeners.service(), Arc::clone(&close_signal));
            self.0.workers.serve(listeners, &close_signal);
        }
        Ok(())
    }
}

fn files() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX))
}

/// Returns the maximum number of connections for `files` descriptors, of which `others` are needed
/// for other purposes.
fn most(files: usize, others: usize) -> usize {
    // Two descriptors for each connection, in addition to those of pipes.
    let pipes = PIPE_DESCRIPTORS.min(files / 4);
    let most = files.saturating_sub(others + pipes) / 2;
    most.clamp(CONNECTIONS_MIN, CONNECTIONS_MAX)
}

/// The reason why the address cannot be used, and the fix.
fn refusal(address: SocketAddr, error: &io::Error) -> String {
    let help = match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "ports below 1024 need CAP_NET_BIND_SERVICE: give it to lvsd, or use a port from 1024 on"
        }
        io::ErrorKind::AddrInUse => {
            "another program listens there (`ss -lntup`): stop it, or use another port"
        }
        io::ErrorKind::AddrNotAvailable => {
            "this host does not have the address: add it with `ip address add`, or listen at 0.0.0.0 or [::]"
        }
        _ => {
            "check the address and the port of the service, and the limits of this host (`ulimit -n`)"
        }
    };
    format!("cannot listen at {address}: {error}; {help}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxy_connection_limit_is_bounded_and_leaves_reserved_descriptors() {
        assert_eq!(most(1 << 20, RESERVE), CONNECTIONS_MAX);
        let alone = most(8192, RESERVE);
        assert_eq!(alone, (8192 - RESERVE - PIPE_DESCRIPTORS) / 2);
        assert_eq!(most(8192, RESERVE + 2000), alone - 1000);
        assert_eq!(most(1024, RESERVE + 2000), CONNECTIONS_MIN);
    }
}
