//! Services and their servers, listed.

use lvs_core::api::{Failure, ServerInfo, ServiceId, ServiceInfo};
use lvs_core::{Control, Error, Instant, Service, ServiceKey};
use serde_json::Value;

use super::end;
use crate::control::server::Sink;
use crate::engine::shared::Shared;

/// Servers that are copied with the control half locked: packets that open connections have their turn in between.
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
        if let Some(id) = only {
            let control = self.control();
            let service = control.service(&id.into()).ok_or(Error::NoService)?;
            return Ok(vec![info(&control, service, now)]);
        }
        let _changing = self.changing();
        let control = self.control();
        let keys: Vec<ServiceKey> = control.services().map(Service::key).collect();
        drop(control);
        let mut all = Vec::with_capacity(keys.len());
        let mut keys = keys.into_iter().peekable();
        while keys.peek().is_some() {
            let control = self.control();
            let mut seen = 0;
            while seen < PIECE
                && let Some(key) = keys.next()
            {
                let Some(service) = control.service(&key) else {
                    continue;
                };
                seen += 1 + service.servers().len();
                all.push(info(&control, service, now));
            }
        }
        Ok(all)
    }
}

fn info(control: &Control, service: &Service, now: Instant) -> ServiceInfo {
    let servers = service.servers().iter().map(|server| {
        let latency = server.latency().average(now);
        ServerInfo {
            server: server.addr(),
            config: server.config(),
            active: server.active(),
            inactive: server.inactive(),
            persistent: server.templates(),
            overloaded: server.is_overloaded(),
            slow_start: server.slow_start(),
            latency_us: latency
                .map(|average| u64::try_from(average.as_micros()).unwrap_or(u64::MAX)),
            stats: control.server_stats(server.id()).unwrap_or_default(),
        }
    });
    ServiceInfo {
        service: service.key().into(),
        config: service.config().clone(),
        owner: service.owner().map(ToOwned::to_owned),
        stats: service.stats(),
        servers: servers.collect(),
    }
}
