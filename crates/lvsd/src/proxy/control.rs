//! The proxy as something that the daemon configures as it configures an engine.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lvs_core::api::{
    Call, Done, Failure, FailureCode, Info, LocalPool, Permissive, ServerInfo, ServiceId,
    ServiceInfo, SyncDaemon, Sysctl,
};
use lvs_core::{FilterLists, OnServerDown};
use rustix::process::{Resource, getrlimit};

use super::Options;
use super::desk::{Counts, Desk, Gate};
use super::pipe::PIPES_MAX;
use super::workers::{Listeners, Workers};
use crate::config::Dataplane;
use crate::engine::control::{ControlError, EngineControl};
use crate::engine::{ConnectError, Given, Host};
use crate::host_addresses::Addresses;

/// Connections at a time, if there are descriptors for them.
const CONNECTIONS_MAX: usize = 100_000;
/// Connections for which there is room in any case.
const CONNECTIONS_MIN: usize = 16;
/// Descriptors that others than listeners and checks need: the API's 128, the sockets' 64, files,
/// threads' event loops.
const RESERVE: usize = 384;
/// Descriptors of pipes, if there are many.
const PIPE_DESCRIPTORS: usize = 2 * PIPES_MAX;

/// The proxy of this process. Copies are the same one.
#[derive(Clone)]
pub struct Proxy(Arc<Whole>);

struct Whole {
    desk: Arc<Desk>,
    workers: Workers,
    /// What ends the listeners of a service.
    listening: Mutex<HashMap<ServiceId, Arc<Gate>>>,
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Proxy").finish_non_exhaustive()
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        for gate in self.listening().values() {
            gate.close();
        }
        self.desk.lock().end_connections(|_, _| true);
    }
}

impl Whole {
    fn listening(&self) -> MutexGuard<'_, HashMap<ServiceId, Arc<Gate>>> {
        self.listening
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Proxy {
    /// Starts its threads, which have nothing to do yet.
    ///
    /// # Errors
    /// The system has no threads, descriptors or random numbers left.
    pub fn start() -> io::Result<Self> {
        let mut seed = [0; 8];
        rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty())?;
        let most = most(files(), RESERVE);
        let desk = Arc::new(Desk::new(most, u64::from_ne_bytes(seed)));
        Ok(Self(Arc::new(Whole {
            workers: Workers::start(&desk)?,
            desk,
            listening: Mutex::default(),
        })))
    }

    /// Leaves descriptors for the listeners of so many services, and for `checks`.
    pub fn leave_room(&self, services: usize, checks: usize) {
        let others = RESERVE + checks + services * self.0.workers.len();
        self.0.desk.set_most(most(files(), others));
    }

    /// Serves so many at a time.
    #[cfg(test)]
    pub(super) fn serve_at_most(&self, most: usize) {
        self.0.desk.set_most(most);
    }

    /// What it has taken and refused.
    pub fn counts(&self) -> Counts {
        self.0.desk.counts()
    }

    /// How services are proxied from now on.
    pub fn set_options(&self, options: HashMap<ServiceId, Options>) {
        self.0.desk.set_options(options);
    }

    /// Connections, and clients that send datagrams.
    pub fn connections(&self) -> usize {
        self.0.desk.used()
    }

    /// Binds the addresses of services that come, before anything is changed.
    fn bind(&self, changes: &[Call]) -> Result<Vec<Listeners>, ControlError> {
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
                    return Err(ControlError::Refused(Failure {
                        change: (changes.len() > 1).then_some(number),
                        ..Failure::new(FailureCode::Permission, refusal(address, &error))
                    }));
                }
            }
        }
        Ok(all)
    }

    fn apply(&self, changes: &[Call]) -> Result<(), ControlError> {
        let listeners = self.bind(changes)?;
        let desk = &self.0.desk;
        let now = desk.now();
        let mut inner = desk.lock();
        let ends = |inner: &super::desk::Inner, service: &ServiceId| {
            let service = inner.director.control.service(&(*service).into());
            // A datagram's server that has gone would be a black hole.
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
                ControlError::Refused(failure)
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
                && let Some(gate) = listening.remove(service)
            {
                gate.close();
            }
        }
        for listeners in listeners {
            let gate = Arc::default();
            listening.insert(listeners.service(), Arc::clone(&gate));
            self.0.workers.serve(listeners, &gate);
        }
        Ok(())
    }
}

/// Descriptors that this process may have.
fn files() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX))
}

/// How many connections can be served with so many descriptors, of which others need some.
fn most(files: usize, others: usize) -> usize {
    // Two of a connection, beside those of pipes.
    let pipes = PIPE_DESCRIPTORS.min(files / 4);
    let most = files.saturating_sub(others + pipes) / 2;
    most.clamp(CONNECTIONS_MIN, CONNECTIONS_MAX)
}

/// Why nobody can listen there, and what to do.
fn refusal(address: SocketAddr, error: &io::Error) -> String {
    let help = match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "ports below 1024 need CAP_NET_BIND_SERVICE; give it to lvsd, or take a port from 1024 on"
        }
        io::ErrorKind::AddrInUse => {
            "another program listens there (`ss -lntup`): end it, or take another port"
        }
        io::ErrorKind::AddrNotAvailable => {
            "this host does not have the address: add it with `ip address add`, or listen at 0.0.0.0 or [::]"
        }
        _ => "see the message of the system",
    };
    format!("cannot listen at {address}: {error}; {help}")
}

/// The daemon's way to the proxy.
#[derive(Clone, Debug)]
pub struct ProxyHost(pub Proxy);

impl Host for ProxyHost {
    fn connect(&mut self, _: Duration) -> Result<Box<dyn EngineControl>, ConnectError> {
        Ok(Box::new(self.clone()))
    }

    fn is_proxy(&self) -> bool {
        true
    }

    fn start(&mut self, _: &Dataplane) -> Result<(), String> {
        Ok(())
    }

    fn ended(&mut self) -> Option<String> {
        None
    }

    fn kill(&mut self) {}

    fn end(&mut self, _: u32) -> Result<(), String> {
        Ok(())
    }

    fn alive(&mut self, _: u32) -> bool {
        true
    }

    fn started_by_us(&self, _: u32) -> bool {
        false
    }

    fn identity(&self, _: u32) -> String {
        "proxy".to_owned()
    }

    fn remember(&mut self, _: &Given) {}

    fn recall(&self) -> Given {
        Given::default()
    }

    fn addresses(&self) -> Addresses {
        Addresses::default()
    }
}

impl EngineControl for ProxyHost {
    fn info(&mut self) -> Result<Info, ControlError> {
        Ok(Info::default())
    }

    fn services(&mut self) -> Result<Vec<ServiceInfo>, ControlError> {
        let desk = &self.0.0.desk;
        let now = desk.now();
        let mut inner = desk.lock();
        inner.director.advance(now);
        let control = &inner.director.control;
        let server = |server: &Arc<lvs_core::Server>| ServerInfo {
            server: server.addr(),
            config: server.config(),
            active: server.active(),
            inactive: server.inactive(),
            persistent: server.templates(),
            overloaded: server.is_overloaded(),
            slow_start: server.slow_start(),
            latency_us: None,
            unanswered: None,
            stats: control.server_stats(server.id()).unwrap_or_default(),
        };
        let services = control.services().map(|service| ServiceInfo {
            service: service.key().into(),
            config: service.config().clone(),
            owner: service.owner().map(ToOwned::to_owned),
            stats: service.stats(),
            servers: service.servers().iter().map(server).collect(),
        });
        Ok(services.collect())
    }

    fn sysctls(&mut self) -> Result<Vec<Sysctl>, ControlError> {
        Ok(Vec::new())
    }

    fn marks(&mut self) -> Result<Vec<String>, ControlError> {
        Ok(Vec::new())
    }

    fn filters(&mut self) -> Result<HashMap<Option<ServiceId>, FilterLists>, ControlError> {
        let inner = self.0.0.desk.lock();
        let filters = inner.director.control.filters();
        Ok(filters
            .map(|(key, filter)| (key.map(ServiceId::from), filter.lists()))
            .collect())
    }

    fn daemons(&mut self) -> Result<Vec<SyncDaemon>, ControlError> {
        Ok(Vec::new())
    }

    fn local(&mut self) -> Result<LocalPool, ControlError> {
        Ok(LocalPool::default())
    }

    fn apply(&mut self, changes: &[Call]) -> Result<Done, ControlError> {
        self.0.apply(changes).map(|()| Done::default())
    }

    fn set_patience(&mut self, _: Duration) {}

    fn stop(&mut self) -> Result<(), ControlError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_and_listeners_have_their_descriptors_first() {
        assert_eq!(most(1 << 20, RESERVE), CONNECTIONS_MAX);
        let alone = most(8192, RESERVE);
        assert_eq!(alone, (8192 - RESERVE - PIPE_DESCRIPTORS) / 2);
        assert_eq!(most(8192, RESERVE + 2000), alone - 1000);
        assert_eq!(most(1024, RESERVE + 2000), CONNECTIONS_MIN);
    }
}
