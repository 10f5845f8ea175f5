//! The connection to a dataplane as a trait; [`socket`](super::socket) implements it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lvs_core::api::{
    Call, Done, Failure, Info, LocalPool, ReasonCount, ServiceId, ServiceInfo, Sysctl,
};
use lvs_core::filter::FilterLists;
use lvs_core::sync::SyncDaemon;
use lvs_sys::lock;
use tokio::time::Instant;

/// The reason why a request to the dataplane failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The dataplane refused the request; nothing has changed.
    #[error("{}", .0.message)]
    Refused(Failure),
    /// The connection to the dataplane was closed.
    #[error("the dataplane does not answer: {0}")]
    Lost(String),
    /// The dataplane is connected and does not answer.
    #[error("the dataplane hangs: {0}")]
    Silent(String),
}

/// The time of the last answer of a dataplane, for the thread that reports it.
#[derive(Clone, Debug, Default)]
pub struct LastAnswer(Arc<Mutex<Option<Instant>>>);

impl LastAnswer {
    /// The time; `None` before the first answer.
    pub fn get(&self) -> Option<Instant> {
        *lock(&self.0)
    }

    /// Records the time if the result is an answer; a refusal is an answer, too.
    pub(super) fn note<T>(&self, result: &Result<T, ControlError>) {
        if let Ok(_) | Err(ControlError::Refused(_)) = result {
            *lock(&self.0) = Some(Instant::now());
        }
    }
}

/// A connection to a dataplane. Calls block, so the daemon makes them outside of its event loop.
pub trait DataplaneControl: Send {
    /// Reads the state of the dataplane.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn info(&mut self) -> Result<Info, ControlError>;

    /// Lists all services of all owners, with their servers.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn services(&mut self) -> Result<Vec<ServiceInfo>, ControlError>;

    /// Lists all sysctls.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn sysctls(&mut self) -> Result<Vec<Sysctl>, ControlError>;

    /// Lists the synchronisation daemons.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn daemons(&mut self) -> Result<Vec<SyncDaemon>, ControlError>;

    /// Lists the rules for marks.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn marks(&mut self) -> Result<Vec<String>, ControlError>;

    /// Lists the filters by source that are not off.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn filters(&mut self) -> Result<HashMap<Option<ServiceId>, FilterLists>, ControlError>;

    /// Reads the addresses that replace clients' addresses in connections with full NAT.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn local(&mut self) -> Result<LocalPool, ControlError>;

    /// Reads the numbers of dropped packets and of packets passed to the host, by reason.
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

    /// The size of the connection table, as the kernel would print it.
    fn table_size(&self) -> u32 {
        4096
    }

    /// Makes all of these changes in their order, or none.
    ///
    /// # Errors
    /// See [`ControlError`]; a refusal names the first change that cannot be made.
    fn apply(&mut self, changes: &[Call]) -> Result<Done, ControlError>;

    /// Sets the time without an answer after which the dataplane counts as hung.
    fn set_patience(&mut self, patience: Duration);

    /// Stops the dataplane.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn stop(&mut self) -> Result<(), ControlError>;
}
