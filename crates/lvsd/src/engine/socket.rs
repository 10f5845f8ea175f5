//! [`Control`] over the engine's control socket.

use std::net::IpAddr;

use lvs_core::api::{Call, Info, LocalInfo, LocalPool, MarkText, ServiceInfo, Sysctl};
use lvs_dataplane::control::{Address, Client, Error};
use serde::de::IgnoredAny;

use crate::engine::ConnectError;
use crate::engine::control::{Control, ControlError, Op};

/// Connects to the engine at `socket`: `@name` or a path.
///
/// # Errors
/// See [`ConnectError`].
pub fn connect(socket: &str) -> Result<Box<dyn Control>, ConnectError> {
    let client = Client::connect(&Address::new(socket)).map_err(|error| match error {
        Error::Absent { .. } | Error::Stale { .. } | Error::Gone { .. } => {
            ConnectError::Absent(error.to_string())
        }
        _ => ConnectError::Refused(error.to_string()),
    })?;
    if !client.hello().writable {
        return Err(ConnectError::Refused(format!(
            "the engine at {socket} lets this user look only; run lvsd as root or as the engine's user"
        )));
    }
    Ok(Box::new(Connection(client)))
}

struct Connection(Client);

fn translate(error: Error) -> ControlError {
    match error {
        Error::Refused(failure) => ControlError::Refused(failure),
        other => ControlError::Lost(other.to_string()),
    }
}

impl Connection {
    fn done(&mut self, call: &Call) -> Result<(), ControlError> {
        self.0
            .call::<IgnoredAny>(call)
            .map(|_| ())
            .map_err(translate)
    }
}

impl Control for Connection {
    fn info(&mut self) -> Result<Info, ControlError> {
        self.0.call(&Call::Info {}).map_err(translate)
    }

    fn services(&mut self) -> Result<Vec<ServiceInfo>, ControlError> {
        self.0
            .collect(&Call::ServiceList { service: None })
            .map_err(translate)
    }

    fn sysctl(&mut self, name: &str) -> Result<String, ControlError> {
        let call = Call::SysctlGet {
            name: Some(name.to_owned()),
        };
        let all: Vec<Sysctl> = self.0.collect(&call).map_err(translate)?;
        Ok(all.into_iter().next().map(|s| s.value).unwrap_or_default())
    }

    fn marks(&mut self) -> Result<Vec<String>, ControlError> {
        let all: Vec<MarkText> = self.0.collect(&Call::MarkList {}).map_err(translate)?;
        Ok(all.into_iter().map(|rule| rule.rule).collect())
    }

    fn local(&mut self) -> Result<LocalPool, ControlError> {
        let info: LocalInfo = self.0.call(&Call::LocalGet {}).map_err(translate)?;
        Ok(LocalPool {
            addresses: info.addresses.iter().map(|local| local.address).collect(),
            hairpin: info.hairpin,
        })
    }

    fn apply(&mut self, op: &Op) -> Result<(), ControlError> {
        let call = match op {
            Op::SetSysctl(sysctl) => Call::SysctlSet(sysctl.clone()),
            Op::SetMarks(rules) => Call::MarkSet {
                rules: rules.clone(),
            },
            Op::SetLocal(pool) => Call::LocalSet(pool.clone()),
            Op::OwnVips(vips) => Call::VipsOwn {
                addresses: vips.iter().copied().collect::<Vec<IpAddr>>(),
            },
            Op::AddService(spec) => Call::ServiceAdd(spec.clone()),
            Op::EditService(spec) => Call::ServiceEdit(spec.clone()),
            Op::DeleteService(service) => Call::ServiceDelete { service: *service },
            Op::AddServer(spec) => Call::ServerAdd(spec.clone()),
            Op::EditServer(spec) => Call::ServerEdit(spec.clone()),
            Op::DeleteServer(service, server) => Call::ServerDelete {
                service: *service,
                server: *server,
            },
        };
        self.done(&call)
    }

    fn stop(&mut self) -> Result<(), ControlError> {
        self.done(&Call::Stop {})
    }
}
