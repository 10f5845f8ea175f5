//! [`EngineControl`] over the engine's control socket.

use lvs_core::api::{Call, Done, Info, LocalInfo, LocalPool, MarkText, ServiceInfo, Sysctl};
use lvs_dataplane::control::{Address, Client, Error};
use serde::de::IgnoredAny;

use crate::engine::ConnectError;
use crate::engine::control::{ControlError, EngineControl};

/// Connects to the engine at `socket`: `@name` or a path.
///
/// # Errors
/// See [`ConnectError`].
pub fn connect(socket: &str) -> Result<Box<dyn EngineControl>, ConnectError> {
    let client = Client::connect(&Address::new(socket)).map_err(|error| match error {
        Error::Absent { .. } | Error::Stale { .. } | Error::Gone { .. } => {
            ConnectError::Absent(error.to_string())
        }
        _ => ConnectError::Refused(error.to_string()),
    })?;
    if !client.hello().writable {
        return Err(ConnectError::Refused(format!(
            "the engine at {socket} lets this user read only; run lvsd as root or as the engine's user"
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

impl EngineControl for Connection {
    fn info(&mut self) -> Result<Info, ControlError> {
        self.0.call(&Call::Info {}).map_err(translate)
    }

    fn services(&mut self) -> Result<Vec<ServiceInfo>, ControlError> {
        self.0
            .collect(&Call::ServiceList { service: None })
            .map_err(translate)
    }

    fn sysctls(&mut self) -> Result<Vec<Sysctl>, ControlError> {
        self.0
            .collect(&Call::SysctlGet { name: None })
            .map_err(translate)
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

    fn apply(&mut self, changes: &[Call]) -> Result<Done, ControlError> {
        let done = match changes {
            [one] => self.0.call(one),
            changes => self.0.call(&Call::Apply {
                changes: changes.to_vec(),
            }),
        };
        done.map_err(translate)
    }

    fn stop(&mut self) -> Result<(), ControlError> {
        self.0
            .call::<IgnoredAny>(&Call::Stop {})
            .map(|_| ())
            .map_err(translate)
    }
}
