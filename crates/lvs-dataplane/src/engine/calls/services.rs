//! Services and their servers, listed.

use lvs_core::api::{Failure, ServerInfo, ServiceId, ServiceInfo, Stats};
use lvs_core::{Error, Instant, Server, Service, ServiceKey};
use serde_json::Value;

use super::end;
use crate::control::server::Sink;
use crate::engine::shared::Shared;

/// Servers that are copied with the control half locked: packets that open connections have their
/// turn in between.
const PIECE: usize = 256;

impl Shared {
    pub(super) fn list_services(
        &self,
        only: Option<ServiceId>,
        out: &mut Sink<'_>,
    ) -> Result<Value, Failure> {
        for service in &self.services(only)? {
            out.item(service)?;
        }
        end(out)
    }

    /// What there is to tell of one service, or of all. Nothing is added or removed meanwhile.
    fn services(&self, only: Option<ServiceId>) -> Result<Vec<ServiceInfo>, Failure> {
        let now = self.now();
        let _changing = self.changing();
        self.fold();
        let keys: Vec<ServiceKey> = match only {
            Some(id) => vec![id.into()],
            None => self.control().services().map(Service::key).collect(),
        };
        keys.iter().map(|key| self.service_info(key, now)).collect()
    }

    /// One service, with its servers in pieces.
    fn service_info(&self, key: &ServiceKey, now: Instant) -> Result<ServiceInfo, Failure> {
        let mut told: Option<ServiceInfo> = None;
        loop {
            let control = self.control();
            let service = control.service(key).ok_or(Error::NoService)?;
            let told = told.get_or_insert_with(|| info(service));
            let rest = service.servers().iter().skip(told.servers.len());
            told.servers.extend(rest.take(PIECE).map(|server| {
                let stats = control.server_stats(server.id()).unwrap_or_default();
                let counted = service.config().extras.count_unanswered;
                server_info(server, stats, counted, now)
            }));
            if told.servers.len() >= service.servers().len() {
                break;
            }
        }
        Ok(told.expect("it was just told"))
    }
}

/// A service without its servers.
fn info(service: &Service) -> ServiceInfo {
    ServiceInfo {
        service: service.key().into(),
        config: service.config().clone(),
        owner: service.owner().map(ToOwned::to_owned),
        stats: service.stats(),
        servers: Vec::with_capacity(service.servers().len()),
    }
}

fn server_info(server: &Server, stats: Stats, counted: bool, now: Instant) -> ServerInfo {
    let latency = server.latency().average(now);
    ServerInfo {
        server: server.addr(),
        config: server.config(),
        active: server.active(),
        inactive: server.inactive(),
        persistent: server.templates(),
        overloaded: server.is_overloaded(),
        slow_start: server.slow_start(),
        latency_us: latency.map(|average| u64::try_from(average.as_micros()).unwrap_or(u64::MAX)),
        unanswered: counted.then(|| server.unanswered()),
        stats,
    }
}
