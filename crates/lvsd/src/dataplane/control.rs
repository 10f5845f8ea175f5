//! Control of a dataplane: a trait, and its implementation over the control socket.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lvs_api::{Address, Client, Error};
use lvs_core::api::{
    Call, Done, Failure, FailureCode, FilterItem, Info, LocalInfo, LocalPool, MarkText,
    ReasonCount, ServiceId, ServiceInfo, Sysctl,
};
use lvs_core::filter::FilterLists;
use lvs_core::sync::SyncDaemon;
use lvs_sys::lock;
use serde::de::IgnoredAny;
use tokio::time::Instant;

use super::ConnectError;

/// The reason why a request to the dataplane failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The dataplane refused the request; nothing has changed.
    #[error("{}", .0.message)]
    Refused(Failure),
    /// The dataplane closed the connection.
    #[error("the dataplane does not answer: {0}")]
    Lost(String),
    /// The dataplane does not answer, although it is connected.
    #[error("the dataplane hangs: {0}")]
    Silent(String),
}

/// Time of the dataplane's last answer, shared with the thread that reports it.
#[derive(Clone, Debug, Default)]
pub struct LastAnswer(Arc<Mutex<Option<Instant>>>);

impl LastAnswer {
    /// The time; `None` before the first answer.
    pub fn get(&self) -> Option<Instant> {
        *lock(&self.0)
    }

    /// Records the time of a result that is an answer. A refusal is an answer.
    pub(super) fn note<T>(&self, result: &Result<T, ControlError>) {
        if let Ok(_) | Err(ControlError::Refused(_)) = result {
            *lock(&self.0) = Some(Instant::now());
        }
    }
}

/// A connection to a dataplane. Its calls block, so that the daemon makes them outside of its event
/// loop. The default implementations suit the proxy, which lacks these settings.
pub trait DataplaneControl: Send {
    /// Reads the state of the dataplane.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn info(&mut self) -> Result<Info, ControlError> {
        Ok(Info::default())
    }

    /// Lists all services of all owners, with their servers.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn services(&mut self) -> Result<Vec<ServiceInfo>, ControlError>;

    /// Lists all sysctls.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn sysctls(&mut self) -> Result<Vec<Sysctl>, ControlError> {
        Ok(Vec::new())
    }

    /// Lists the synchronisation daemons.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn daemons(&mut self) -> Result<Vec<SyncDaemon>, ControlError> {
        Ok(Vec::new())
    }

    /// Lists the mark rules.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn marks(&mut self) -> Result<Vec<String>, ControlError> {
        Ok(Vec::new())
    }

    /// Lists the source filters that are not empty, by service; `None` is the filter of all
    /// services.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn filters(&mut self) -> Result<HashMap<Option<ServiceId>, FilterLists>, ControlError>;

    /// Reads the local addresses of full NAT.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn local(&mut self) -> Result<LocalPool, ControlError> {
        Ok(LocalPool::default())
    }

    /// Reads the numbers of packets that were dropped or passed to the host, by reason.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn drops(&mut self) -> Result<Vec<ReasonCount>, ControlError> {
        Ok(Vec::new())
    }

    /// The version of the dataplane; empty if unknown.
    fn version(&self) -> String {
        String::new()
    }

    /// Makes all of these changes in order, or none.
    ///
    /// # Errors
    /// See [`ControlError`]; a refusal names the first change that cannot be made.
    fn apply(&mut self, changes: &[Call]) -> Result<Done, ControlError>;

    /// Sets the time without an answer after which the dataplane counts as hung.
    fn set_patience(&mut self, _patience: Duration) {}

    /// Stops the dataplane.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn stop(&mut self) -> Result<(), ControlError> {
        Ok(())
    }
}

/// Connects to the dataplane at `address`. The dataplane counts as hung if it does not answer
/// within `patience`.
///
/// # Errors
/// See [`ConnectError`].
pub fn connect(
    address: &Address,
    patience: Duration,
) -> Result<Box<dyn DataplaneControl>, ConnectError> {
    let client = Client::connect_patiently(address, patience).map_err(|error| match error {
        Error::Absent { .. } | Error::Stale { .. } | Error::Gone { .. } => {
            ConnectError::Absent(error.to_string())
        }
        Error::Silent { pid, .. } => ConnectError::Silent {
            why: error.to_string(),
            pid,
        },
        _ => ConnectError::Refused(error.to_string()),
    })?;
    if !client.hello().writable {
        return Err(ConnectError::Refused(format!(
            "the dataplane at {address} allows this process read access only; run lvsd as root with CAP_NET_ADMIN, as the dataplane's user, or in the group of its --group"
        )));
    }
    Ok(Box::new(Connection(client, patience)))
}

/// A client, and the timeout of its requests without changes.
struct Connection(Client, Duration);

/// Minimum timeout of a request with changes, which may contain thousands of servers.
const CHANGES_PATIENCE: Duration = Duration::from_secs(60);

fn translate(error: Error) -> ControlError {
    match error {
        Error::Refused(failure) => ControlError::Refused(failure),
        Error::Silent { .. } => ControlError::Silent(error.to_string()),
        other => ControlError::Lost(other.to_string()),
    }
}

impl DataplaneControl for Connection {
    fn info(&mut self) -> Result<Info, ControlError> {
        self.0.call(&Call::Info {}).map_err(|error| match error {
            // The control socket answers, but the packet path or the keeper hangs.
            Error::Refused(failure) if failure.code == FailureCode::Internal => {
                ControlError::Silent(failure.message)
            }
            other => translate(other),
        })
    }

    fn services(&mut self) -> Result<Vec<ServiceInfo>, ControlError> {
        self.0
            .collect(&Call::ServiceList { service: None })
            .map_err(translate)
    }

    fn daemons(&mut self) -> Result<Vec<SyncDaemon>, ControlError> {
        self.0.collect(&Call::DaemonList {}).map_err(translate)
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

    fn filters(&mut self) -> Result<HashMap<Option<ServiceId>, FilterLists>, ControlError> {
        let items: Vec<FilterItem> = self.0.collect(&Call::FilterList {}).map_err(translate)?;
        let mut all: HashMap<_, FilterLists> = HashMap::new();
        for FilterItem { service, lists } in items {
            let whole = all.entry(service).or_default();
            whole.allow.extend(lists.allow);
            whole.deny.extend(lists.deny);
        }
        Ok(all)
    }

    fn local(&mut self) -> Result<LocalPool, ControlError> {
        let info: LocalInfo = self.0.call(&Call::LocalGet {}).map_err(translate)?;
        Ok(LocalPool {
            addresses: info.addresses.iter().map(|local| local.address).collect(),
            hairpin: info.hairpin,
        })
    }

    fn drops(&mut self) -> Result<Vec<ReasonCount>, ControlError> {
        self.0.collect(&Call::Drops {}).map_err(translate)
    }

    fn version(&self) -> String {
        let name = &self.0.hello().dataplane;
        name.rsplit(' ').next().unwrap_or_default().to_owned()
    }

    fn apply(&mut self, changes: &[Call]) -> Result<Done, ControlError> {
        self.0.set_patience(self.1.max(CHANGES_PATIENCE));
        let done = match changes {
            [one] => self.0.call(one),
            changes => self.0.call(&Call::Apply {
                changes: changes.to_vec(),
            }),
        };
        self.0.set_patience(self.1);
        done.map_err(translate)
    }

    fn set_patience(&mut self, patience: Duration) {
        self.0.set_patience(patience);
    }

    fn stop(&mut self) -> Result<(), ControlError> {
        self.0
            .call::<IgnoredAny>(&Call::Stop {})
            .map(|_| ())
            .map_err(translate)
    }
}
