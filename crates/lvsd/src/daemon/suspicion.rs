//! Servers that are up, and that clients cannot use: the dataplane counts too many unanswered
//! connections of clients, or the checks on the path of clients fail.

use lvs_core::api::ServiceInfo;
use tokio::time::Instant;

use super::Daemon;
use super::inputs::{Inputs, Observation, Suspicion};
use crate::health::{Key, Prober};
use crate::reconcile::Health;

/// A server that has become suspicious, or that is no longer suspicious.
#[derive(Debug, PartialEq, Eq)]
struct Change {
    key: Key,
    /// The new suspicion; `None` if clients can use the server again.
    suspicion: Option<Suspicion>,
}

impl<P: Prober> Inputs<P> {
    /// Determines the suspicious servers from the counters of the dataplane and from the checks on
    /// the path of clients, and returns the changes. A server that is down is not suspicious.
    fn judge(&mut self, services: &[ServiceInfo], now: Instant) -> Vec<Change> {
        let mut before = std::mem::take(&mut self.suspects);
        let mut changes = Vec::new();
        for info in services {
            for server in &info.servers {
                let key = (info.service, server.server);
                // The checks name the cause, the counters only the effect.
                let observed = match self.checks.client_path(&key) {
                    Some(reason) => Some(Observation::Checks(reason)),
                    None => info.is_suspicious(server).then(|| {
                        let attempts = server.attempts.last_minute;
                        Observation::Clients(attempts, server.config.forwarding)
                    }),
                };
                let Some(observed) = observed.filter(|_| self.may_be_suspicious(&key)) else {
                    continue;
                };
                let known = before.remove(&key);
                let suspicion = Suspicion {
                    since: known.as_ref().map_or(now, |known| known.since),
                    observed,
                };
                if known.is_none() {
                    let suspicion = Some(suspicion.clone());
                    changes.push(Change { key, suspicion });
                }
                self.suspects.insert(key, suspicion);
            }
        }
        for (key, _) in before {
            if self.may_be_suspicious(&key) {
                let suspicion = None;
                changes.push(Change { key, suspicion });
            }
        }
        changes
    }

    /// Whether a server is in the file, and not down.
    fn may_be_suspicious(&self, (id, server): &Key) -> bool {
        let named = self.service(id).is_some_and(|service| {
            let mut servers = service.servers.iter();
            servers.any(|one| one.address == *server)
        });
        named && self.health(&(*id, *server)) != Health::Down
    }

    /// Treats suspicious servers as down if their checks have `passive = true`. Any sender of
    /// packets can make servers suspicious, so at least half of a service's servers that are up, or
    /// that are down for this reason, remain in use.
    fn take_out_suspects(&mut self) {
        let mut out = Vec::new();
        for (key, suspicion) in &self.suspects {
            if !self.checks.goes_by_clients(key) {
                continue;
            }
            let Some(service) = self.service(&key.0) else {
                continue;
            };
            let (mut all, mut suspects) = (0, 0);
            for server in &service.servers {
                let one = (key.0, server.address);
                let is_out = self.checks.is_out(&one);
                all += usize::from(is_out || self.is_up(service, server));
                suspects += usize::from(is_out || self.suspects.contains_key(&one));
            }
            if 2 * suspects <= all {
                out.push((*key, suspicion.reason(key)));
            }
        }
        for (key, cause) in out {
            self.checks.take_out(&key, cause);
        }
    }
}

impl<P: Prober> Daemon<P> {
    /// Determines the suspicious servers from a new state of the dataplane, and reports the
    /// changes. Then treats those with `passive = true` as down, unless fewer than half of a
    /// service's servers would remain in use.
    pub(super) fn judge(&mut self, now: Instant) {
        let found = std::sync::Arc::clone(&self.inputs.dataplane.found);
        for Change { key, suspicion } in self.inputs.judge(&found.seen.services, now) {
            let reason = suspicion.map(|one| one.reason(&key));
            self.reporter.suspicion(&self.inputs, &key, reason.as_ref());
        }
        self.inputs.take_out_suspects();
    }
}
