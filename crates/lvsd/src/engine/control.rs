//! What the daemon asks of an engine, as a trait, and the real thing: a connection to its control socket.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use lvs_core::api::{
    Failure, Info, LocalPool, ServerSpec, ServiceId, ServiceInfo, ServiceSpec, Sysctl,
};

/// Owner that the daemon writes into its services.
pub const OWNER: &str = "lvsd";

/// One change of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Write a sysctl.
    SetSysctl(Sysctl),
    /// Replace the rules for marks.
    SetMarks(Vec<String>),
    /// Replace the addresses that stand for clients with full NAT.
    SetLocal(LocalPool),
    /// Replace the set of VIPs that the engine owns for the daemon.
    OwnVips(BTreeSet<IpAddr>),
    /// Add a service, without servers.
    AddService(ServiceSpec),
    /// Change a service's settings.
    EditService(ServiceSpec),
    /// Delete a service and its servers.
    DeleteService(ServiceId),
    /// Add a server.
    AddServer(ServerSpec),
    /// Change a server's settings; its connections go on.
    EditServer(ServerSpec),
    /// Delete a server.
    DeleteServer(ServiceId, SocketAddr),
}

/// Why an engine did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// It answered that it will not; nothing has changed.
    #[error("{}", .0.message)]
    Refused(Failure),
    /// It did not answer.
    #[error("the engine does not answer: {0}")]
    Lost(String),
}

/// A connection to an engine. Calls block; the daemon makes them away from its event loop.
pub trait Control: Send {
    /// State of the engine.
    ///
    /// # Errors
    /// See [`ControlError`]; so for all of these.
    fn info(&mut self) -> Result<Info, ControlError>;

    /// All services with their servers, whoever owns them.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn services(&mut self) -> Result<Vec<ServiceInfo>, ControlError>;

    /// The value of a sysctl.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn sysctl(&mut self, name: &str) -> Result<String, ControlError>;

    /// The rules for marks.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn marks(&mut self) -> Result<Vec<String>, ControlError>;

    /// The addresses that stand for clients with full NAT.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn local(&mut self) -> Result<LocalPool, ControlError>;

    /// Make one change.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn apply(&mut self, op: &Op) -> Result<(), ControlError>;

    /// Stop the engine.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn stop(&mut self) -> Result<(), ControlError>;
}
