//! The parsed command lines of ipvsadm.

use core::net::SocketAddr;

use crate::api::{Call, ServerSpec, ServiceId, ServiceSpec, Timeouts};
use crate::sync::{SyncDaemon, SyncRole};

/// A valid command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// `-A`
    AddService(ServiceSpec),
    /// `-E`
    EditService(ServiceSpec),
    /// `-D`
    DeleteService(ServiceId),
    /// `-C`
    Clear,
    /// `-a`
    AddServer(ServerSpec),
    /// `-e`
    EditServer(ServerSpec),
    /// `-d`
    DeleteServer {
        /// The service.
        service: ServiceId,
        /// Address and port of the server.
        server: SocketAddr,
    },
    /// `-L`
    List(ListOptions),
    /// `-Z`
    Zero(Option<ServiceId>),
    /// `--set`
    Set(Timeouts),
    /// `--start-daemon`
    StartDaemon(SyncDaemon),
    /// `--stop-daemon`
    StopDaemon {
        /// Master or backup.
        role: SyncRole,
        /// `--syncid`
        syncid: u8,
    },
    /// `-S`
    Save {
        /// `-n`
        numeric: bool,
    },
    /// `-R`
    Restore,
    /// `-h`
    Help,
    /// `-v`
    Version,
}

impl Command {
    /// The call that executes the command; `None` if the command does not change the configuration,
    /// or needs several calls.
    pub fn call(&self) -> Option<Call> {
        Some(match self {
            Self::AddService(spec) => Call::ServiceAdd(spec.clone()),
            Self::EditService(spec) => Call::ServiceEdit(spec.clone()),
            Self::DeleteService(service) => Call::ServiceDelete { service: *service },
            Self::Clear => Call::ServiceFlush {},
            Self::AddServer(spec) => Call::ServerAdd(spec.clone()),
            Self::EditServer(spec) => Call::ServerEdit(spec.clone()),
            Self::DeleteServer { service, server } => Call::ServerDelete {
                service: *service,
                server: *server,
            },
            Self::Zero(service) => Call::ServiceZero { service: *service },
            Self::Set(timeouts) => Call::TimeoutsSet(*timeouts),
            Self::StartDaemon(daemon) => Call::DaemonStart(daemon.clone()),
            Self::StopDaemon { role, syncid } => Call::DaemonStop {
                role: *role,
                syncid: *syncid,
            },
            Self::List(_) | Self::Save { .. } | Self::Restore | Self::Help | Self::Version => {
                return None;
            }
        })
    }
}

/// Content and format of `-L`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListOptions {
    /// The kind of the listed objects.
    pub what: What,
    /// The columns of a listing of services.
    pub format: Format,
    /// `--persistent-conn`; a listing with `-c` uses it independently of `format`.
    pub persistent_conn: bool,
    /// `-n`
    pub numeric: bool,
    /// `--exact`
    pub exact: bool,
    /// `--nosort`
    pub nosort: bool,
}

/// Objects that `-L` can list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum What {
    /// Every service.
    #[default]
    Services,
    /// This service.
    Service(ServiceId),
    /// `-c`
    Connections,
    /// `--timeout`
    Timeouts,
    /// `--daemon`
    Daemons,
}

/// The columns of a listing of services.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// Weight and connections.
    #[default]
    Plain,
    /// `--stats`
    Stats,
    /// `--rate`
    Rate,
    /// `--thresholds`
    Thresholds,
    /// `--persistent-conn`
    PersistentConn,
    /// `--tun-info`
    TunInfo,
}
