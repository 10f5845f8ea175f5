//! Builds the listing entries of services, servers and connections.

use alloc::borrow::ToOwned;
use alloc::vec::Vec;

use super::types::{ConnInfo, Refusals, ServerInfo, ServiceId, ServiceInfo};
use crate::attempts::Attempts;
use crate::recent::ReasonCounters;
use crate::{Connection, Control, Instant, Server, Service};

impl ServiceInfo {
    /// Returns the listing entry of a service at `now`, without its servers.
    pub fn of(service: &Service, now: Instant) -> Self {
        Self {
            service: service.key().into(),
            config: service.config().clone(),
            owner: service.owner().map(ToOwned::to_owned),
            stats: service.stats(),
            refused: service.refusals().count(),
            refusals: by_reason(service.refusals(), now),
            drops: by_reason(service.drops(), now),
            servers: Vec::with_capacity(service.servers().len()),
        }
    }
}

fn by_reason(counters: &ReasonCounters, now: Instant) -> Vec<Refusals> {
    let counts = counters.at(now).map(|(reason, packets)| Refusals {
        reason: reason.to_owned(),
        packets,
    });
    counts.collect()
}

impl ServiceInfo {
    /// Whether too many client connections to `server`, one of this service's servers, were
    /// unanswered in the last minute
    /// ([`is_suspicious`](crate::attempts::RecentAttempts::is_suspicious)).
    pub fn is_suspicious(&self, server: &ServerInfo) -> bool {
        let own = server.attempts.last_minute;
        // Most servers return here, so that a long listing does not compute the sum for each
        // server.
        if own.unanswered == 0 {
            return false;
        }
        let attempts = self.servers.iter().map(|one| one.attempts.last_minute);
        let all = attempts.fold(Attempts::default(), |all, one| all + one);
        let one_way = matches!(self.service, ServiceId::Udp { .. });
        server.attempts.is_suspicious(all - own, one_way)
    }
}

impl ServerInfo {
    /// Returns the listing entry of a server of a service at `now`.
    pub fn of(control: &Control, service: &Service, server: &Server, now: Instant) -> Self {
        let latency = server.latency().average(now);
        let counted = service.config().extras.count_unanswered;
        Self {
            server: server.addr(),
            config: server.config(),
            active: server.active(),
            inactive: server.inactive(),
            persistent: server.templates(),
            overloaded: server.is_overloaded(),
            last_weight: service.last_weight(server),
            slow_start: server.slow_start(),
            latency_us: latency
                .map(|average| u64::try_from(average.as_micros()).unwrap_or(u64::MAX)),
            unanswered: counted.then(|| server.unanswered()),
            attempts: control.server_attempts(server.id()).unwrap_or_default(),
            stats: control.server_stats(server.id()).unwrap_or_default(),
        }
    }
}

impl ConnInfo {
    /// Returns the listing entry of a connection of a shard.
    pub fn of(connection: &Connection) -> Self {
        Self {
            protocol: connection.protocol.0,
            client: connection.client,
            virt: connection.virt,
            server: connection.server,
            state: connection.state.to_owned(),
            expires_ms: u64::try_from(connection.expires.as_millis()).unwrap_or(u64::MAX),
            forwarding: connection.method,
            template: connection.template,
            synced: connection.synced,
            engine: None,
        }
    }

    /// Returns the listing entry of a persistence template.
    pub fn of_template(control: &Control, template: &Connection) -> Self {
        let engine = control.template_engine(template.id);
        Self {
            engine: engine.map(|(name, data)| (name.to_owned(), data.to_vec())),
            ..Self::of(template)
        }
    }
}
