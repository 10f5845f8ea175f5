//! The inputs of the daemon's decisions: configuration, discovered servers, health, overrides of
//! operators, and the state of the dataplane.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use lvs_api::daemon::AdminState;
use lvs_api::guidance;
use lvs_api::words::counted;
use lvs_core::Forwarding;
use lvs_core::api::{Info, ServiceId, Waiting};
use lvs_core::attempts::Attempts;
use lvs_proxy as proxy;
use tokio::time::Instant;

use crate::admin::Admin;
use crate::cluster::Cluster;
use crate::config::{Config, Server, Service};
use crate::dataplane::Found;
use crate::dataplane::control::LastAnswer;
use crate::desired::ServerView;
use crate::expand::Expanded;
use crate::health::{Check, Checks, Code, Key, Prober, Reason, Serving};
use crate::reconcile::Health;
use crate::sources::Sources;

/// The inputs of the daemon's decisions.
pub(super) struct Inputs<P> {
    /// The configuration in use.
    pub(super) config: Arc<Config>,
    /// The services of the configuration, with the services and servers of DNS, etcd and
    /// Kubernetes.
    pub(super) expanded: Expanded,
    /// The VIPs that the dataplane should own, determined when the configuration was loaded.
    pub(super) vips: BTreeSet<IpAddr>,
    /// The number of configurations loaded so far, including those with new answers of sources.
    pub(super) generation: u64,
    /// The time at which this configuration was loaded.
    pub(super) loaded: Instant,
    /// The health checks and their results.
    pub(super) checks: Checks<P>,
    /// The administrative states of servers.
    pub(super) admin: Admin,
    /// Servers that an operator has set ready: a manual drain in the dataplane does not apply to
    /// them.
    pub(super) readied: HashSet<Key>,
    /// The VRRP state, the maintenance and the announcements of this director.
    pub(super) cluster: Cluster,
    /// The answers of DNS, etcd and Kubernetes.
    pub(super) sources: Sources,
    /// The last observed state of the dataplane.
    pub(super) dataplane: Observed,
    /// Suspicious servers: they are up, and clients cannot use them.
    pub(super) suspects: HashMap<Key, Suspicion>,
}

/// The suspicion that clients cannot use a server, although it is up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Suspicion {
    /// Time of the first observation.
    pub(super) since: Instant,
    pub(super) observed: Observation,
}

/// The observation that makes a server suspicious.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Observation {
    /// Clients got too few answers: the numbers of their connections in the last minute, and the
    /// forwarding method.
    Clients(Attempts, Forwarding),
    /// The checks on the path of clients fail, for this reason.
    Checks(Reason),
}

impl Suspicion {
    /// The reason why the server is suspicious, with its fix.
    pub(super) fn reason(&self, (service, server): &Key) -> Reason {
        let (attempts, forwarding) = match &self.observed {
            Observation::Clients(attempts, forwarding) => (*attempts, *forwarding),
            Observation::Checks(reason) => return reason.clone(),
        };
        let Attempts { opened, unanswered } = attempts;
        let opened = opened.max(unanswered);
        let vip = service.address().map(|virt| virt.ip());
        Reason {
            code: Code::ClientsUnanswered,
            text: format!(
                "{unanswered} of {opened} connections of clients got no answer in the last minute"
            ),
            fix: guidance::for_unanswered(*server, forwarding, vip),
        }
    }
}

/// The last observed state of the dataplane.
#[derive(Debug, Default)]
pub(super) struct Observed {
    /// The result of the last comparison of the dataplane with the desired state.
    pub(super) found: Arc<Found>,
    /// Whether the dataplane has been compared with the desired state yet.
    pub(super) compared: bool,
    /// The time of the dataplane's last answer.
    pub(super) last_answer: LastAnswer,
    /// The process id of the dataplane and whether it answers.
    pub(super) contact: (Option<u32>, bool),
    /// The counters of the proxy in this process; `None` before the first proxied service.
    pub(super) proxy: Option<proxy::Counts>,
}

/// The reason why the dataplane may be unable to forward checks, such as a configured interface
/// that is down; `None` without such a reason.
fn obstacle(info: &Info) -> Option<String> {
    let mut interfaces = info.interfaces.iter();
    let waits = |waiting: &&Waiting| waiting.code.starts_with("interface_");
    if interfaces.any(|interface| interface.backend == "tun") {
        Some("packets of this host do not reach a dataplane with a TUN device".to_owned())
    } else if let Some(waiting) = info.waiting.iter().find(waits) {
        Some(format!(
            "the dataplane may be unable to forward checks: {}",
            waiting.what
        ))
    } else if info.interfaces.is_empty() {
        Some("the dataplane uses no interface".to_owned())
    } else {
        None
    }
}

impl<P: Prober> Inputs<P> {
    /// Stores the result of a comparison with the dataplane. Returns whether the result may change
    /// the desired state.
    pub(super) fn observe(&mut self, found: &Arc<Found>) -> bool {
        if !Arc::ptr_eq(&self.dataplane.found, found) || !self.dataplane.compared {
            self.inform_checks(found);
        }
        if found.unnamed != self.dataplane.found.unnamed && found.unnamed > 0 {
            tracing::warn!(
                event = "unnamed",
                "lvsd leaves {} of the dataplane unchanged that may come from etcd or Kubernetes, until all configured sources have answered",
                counted(found.unnamed, "service")
            );
        }
        let before = self.unheard();
        let drained = found.drained != self.dataplane.found.drained;
        self.dataplane.found = Arc::clone(found);
        self.dataplane.compared = true;
        // A server that was drained by hand does not count towards the quorum.
        drained || self.unheard() != before
    }

    /// Reports the state of the dataplane to the checks, with its counts of unanswered connection
    /// attempts.
    fn inform_checks(&mut self, found: &Found) {
        let serving = found.servers.iter().filter(|(_, seen)| seen.weight > 0);
        let serving = serving.map(|((_, server), _)| *server).collect();
        self.checks.take_serving(Serving {
            obstacle: obstacle(&found.seen.info),
            servers: serving,
            vips: (!self.config.dataplane.own_vips).then(|| found.vips.clone()),
        });
        let unanswered = found.servers.iter();
        let unanswered = unanswered.filter_map(|(key, seen)| Some((*key, seen.unanswered?)));
        self.checks.take_unanswered(unanswered);
    }

    /// The health of a server according to its checks.
    pub(super) fn health(&self, key: &Key) -> Health {
        self.checks.health(key)
    }

    /// Whether a server is up according to its check, or has no check.
    pub(super) fn is_up(&self, service: &Service, server: &Server) -> bool {
        self.health(&(service.id, server.address)) == Health::Up
    }

    pub(super) fn service(&self, id: &ServiceId) -> Option<&Service> {
        let mut services = self.expanded.services.iter();
        services.find(|service| service.id == *id)
    }

    /// Whether the state of a service is sufficiently known to announce its address: a server is
    /// up, or all servers have been checked, or their first checks have timed out. False if
    /// [`serves_unheard`](Self::serves_unheard) is true.
    pub(super) fn is_settled(&self, service: &Service) -> bool {
        !self.serves_unheard(service)
            && (service.servers.iter().any(|one| self.is_up(service, one))
                || self.is_known(service))
    }

    /// Whether the first checks of all servers of a service have ended or timed out. False if
    /// [`serves_unheard`](Self::serves_unheard) is true.
    pub(super) fn is_known(&self, service: &Service) -> bool {
        if self.serves_unheard(service) {
            return false;
        }
        let mut unknown = false;
        let mut longest = Duration::ZERO;
        for server in &service.servers {
            unknown |= self.health(&(service.id, server.address)) == Health::Unknown;
            let timeout = server.check.as_ref().map(|check| check.timeout);
            longest = longest.max(timeout.unwrap_or_default());
        }
        !unknown || self.loaded.elapsed() >= longest + Duration::from_secs(1)
    }

    /// Whether the dataplane has, or may have, servers of a service whose source has not answered
    /// yet.
    pub(super) fn serves_unheard(&self, service: &Service) -> bool {
        service.unheard
            && (!self.dataplane.compared || {
                let mut servers = self.dataplane.found.servers.iter();
                servers.any(|((id, _), seen)| *id == service.id && seen.weight > 0)
            })
    }

    /// Whether the VIP of a service that is not settled must not be announced yet. It may be
    /// announced if the file demands through-VIP checks, which need the VIP, for all unchecked
    /// servers. It waits for the state of the dataplane while a source has not answered.
    pub(super) fn is_veiled(&self, service: &Service) -> bool {
        let unseen = service.unheard && !self.dataplane.compared;
        unseen || !self.waits_for_its_vip(service)
    }

    /// Whether every server of unknown health is checked through the VIP of the service.
    fn waits_for_its_vip(&self, service: &Service) -> bool {
        service.servers.iter().all(|server| {
            let by_vip = server.check.as_ref().is_some_and(Check::needs_vip);
            by_vip || self.health(&(service.id, server.address)) != Health::Unknown
        })
    }

    /// The services whose source has not answered yet. For each: whether the dataplane may have
    /// servers of the service, and whether the announcement of its VIP must wait.
    fn unheard(&self) -> Vec<(ServiceId, bool, bool)> {
        let services = self.expanded.services.iter();
        let unheard = services.filter(|service| service.unheard);
        unheard
            .map(|one| (one.id, self.serves_unheard(one), self.is_veiled(one)))
            .collect()
    }

    /// Whether servers of unknown health count as down: the service has `start_down`, and the
    /// configuration is the first one since lvsd was started.
    pub(super) fn begins_down(&self, service: &Service) -> bool {
        service.alpha && self.generation == 1
    }

    /// The servers of a service as quorum and panic mode count them.
    pub(super) fn views(&self, service: &Service) -> Vec<ServerView> {
        let by_hand = &self.dataplane.found.drained;
        let view = |server: &Server| {
            let key = (service.id, server.address);
            ServerView {
                health: self.health(&key),
                wanted: self.checks.advice(&key).apply(server.config.weight) != 0
                    && self.admin.state(key.0, key.1) == AdminState::Ready
                    && (!by_hand.contains(&key) || self.readied.contains(&key)),
            }
        };
        service.servers.iter().map(view).collect()
    }

    /// The number of servers that operators have taken out of service.
    pub(super) fn out_of_service(&self) -> usize {
        let mut out = self.dataplane.found.drained.len();
        if self.admin.entries().next().is_some() {
            for service in &self.expanded.services {
                let state = |server: &Server| self.admin.state(service.id, server.address);
                let servers = service.servers.iter();
                out += servers.filter(|s| state(s) != AdminState::Ready).count();
            }
        }
        out
    }
    /// The state of services and servers in one line, for the service manager and the log.
    pub(super) fn summary(&self) -> String {
        let found = &self.dataplane.found;
        let refused = found.refused.len();
        let drained = self.out_of_service();
        let mut up = 0;
        let mut all = 0;
        for service in &self.expanded.services {
            for server in &service.servers {
                all += 1;
                up += usize::from(self.is_up(service, server));
            }
        }
        let services = counted(self.expanded.services.len(), "service");
        let mut line = format!("{services}, {up} of {} up", counted(all, "server"));
        if drained > 0 {
            line.push_str(&format!(", {drained} out of service by hand"));
        }
        let lag = self.checks.lag();
        if lag >= Duration::from_secs(1) {
            line.push_str(&format!(", checks start up to {lag:.1?} late"));
        }
        let not_made = self.checks.not_made();
        if not_made > 0 {
            line.push_str(&format!(
                ", {} that lvsd cannot run",
                counted(not_made, "check")
            ));
        }
        if found.unnamed > 0 {
            let left = counted(found.unnamed, "service");
            line.push_str(&format!(
                ", {left} left unchanged in the dataplane until all configured sources have answered"
            ));
        }
        if refused > 0 {
            let changes = counted(refused, "change");
            line.push_str(&format!(", {changes} refused by the dataplane"));
        }
        line
    }
}
