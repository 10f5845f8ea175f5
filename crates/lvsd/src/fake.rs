//! An engine in memory, for tests: it refuses what the kernel's IPVS would refuse and forwards nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use lvs_core::api::{Failure, FailureCode, ServerInfo, ServiceId, ServiceInfo, Stats};

use crate::control::{ControlError, Op};

/// The state of the engine.
#[derive(Clone, Debug, Default)]
pub(crate) struct Engine {
    pub(crate) services: Vec<ServiceInfo>,
    pub(crate) vips: BTreeSet<IpAddr>,
    pub(crate) sysctls: BTreeMap<String, String>,
}

fn refuse<T>(code: FailureCode, message: &str) -> Result<T, ControlError> {
    Err(ControlError::Refused(Failure {
        code,
        message: message.to_owned(),
    }))
}

impl Engine {
    pub(crate) fn service(&mut self, id: ServiceId) -> Result<&mut ServiceInfo, ControlError> {
        match self.services.iter_mut().find(|s| s.service == id) {
            Some(service) => Ok(service),
            None => refuse(FailureCode::NoService, "no such service"),
        }
    }

    pub(crate) fn server(
        &mut self,
        id: ServiceId,
        server: SocketAddr,
    ) -> Result<&mut ServerInfo, ControlError> {
        match self.service(id)?.servers.iter_mut().find(|s| s.server == server) {
            Some(server) => Ok(server),
            None => refuse(FailureCode::NoServer, "no such server"),
        }
    }

    pub(crate) fn apply(&mut self, op: &Op) -> Result<(), ControlError> {
        match op {
            Op::SetSysctl(sysctl) => {
                self.sysctls
                    .insert(sysctl.name.clone(), sysctl.value.clone());
            }
            Op::OwnVips(vips) => self.vips.clone_from(vips),
            Op::AddService(spec) => {
                if self.service(spec.service).is_ok() {
                    return refuse(FailureCode::Exists, "the service exists");
                }
                self.services.push(ServiceInfo {
                    service: spec.service,
                    config: spec.config.clone(),
                    owner: spec.owner.clone(),
                    stats: Stats::default(),
                    servers: Vec::new(),
                });
            }
            Op::EditService(spec) => {
                let service = self.service(spec.service)?;
                service.config = spec.config.clone();
                service.owner.clone_from(&spec.owner);
            }
            Op::DeleteService(id) => {
                self.service(*id)?;
                self.services.retain(|s| s.service != *id);
            }
            Op::AddServer(spec) => {
                if self.server(spec.service, spec.server).is_ok() {
                    return refuse(FailureCode::Exists, "the server exists");
                }
                let server = ServerInfo {
                    server: spec.server,
                    config: spec.config,
                    active: 0,
                    inactive: 0,
                    persistent: 0,
                    overloaded: false,
                    stats: Stats::default(),
                };
                self.service(spec.service)?.servers.insert(0, server);
            }
            Op::EditServer(spec) => self.server(spec.service, spec.server)?.config = spec.config,
            Op::DeleteServer(id, address) => {
                self.server(*id, *address)?;
                self.service(*id)?.servers.retain(|s| s.server != *address);
            }
        }
        Ok(())
    }
}
