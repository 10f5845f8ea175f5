//! Listing of services and their servers.

use lvs_core::api::{Failure, ServerInfo, ServiceId, ServiceInfo};
use lvs_core::{Error, Instant, Service, ServiceKey};
use serde_json::Value;

use super::end;
use crate::dataplane::handle::Handle;
use lvs_process::server::Sink;

/// Number of servers that are copied while the control half is locked once. Between two such
/// pieces, packet workers can lock it.
const PIECE: usize = 256;

impl Handle {
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

    /// Returns the state of one service, or of all services. While this function runs, no service
    /// is added or removed.
    fn services(&self, only: Option<ServiceId>) -> Result<Vec<ServiceInfo>, Failure> {
        let now = self.context.now();
        let _changing = self.context.changing();
        self.context.fold();
        let keys: Vec<ServiceKey> = match only {
            Some(id) => vec![id.into()],
            None => self
                .context
                .control()
                .services()
                .map(Service::key)
                .collect(),
        };
        keys.iter().map(|key| self.service_info(key, now)).collect()
    }

    /// Describes one service, and copies its servers in pieces.
    fn service_info(&self, key: &ServiceKey, now: Instant) -> Result<ServiceInfo, Failure> {
        let mut reported: Option<ServiceInfo> = None;
        loop {
            let control = self.context.control();
            let service = control.service(key).ok_or(Error::NoService)?;
            let reported = reported.get_or_insert_with(|| ServiceInfo::of(service, now));
            let rest = service.servers().iter().skip(reported.servers.len());
            let piece = rest.take(PIECE);
            let piece = piece.map(|server| ServerInfo::of(&control, service, server, now));
            reported.servers.extend(piece);
            if reported.servers.len() >= service.servers().len() {
                break;
            }
        }
        Ok(reported.expect("the service was just described"))
    }
}
