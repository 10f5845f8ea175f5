//! The parsed command lines of ipvsadm.

use core::net::SocketAddr;

use crate::api::{Call, ServerSpec, ServiceId, ServiceSpec, Timeouts};
use crate::sync::{SyncDaemon, SyncRole};

/// A valid command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// `-A`: add a service.
    AddService(ServiceSpec),
    /// `-E`: replace the settings of a service.
    EditService(ServiceSpec),
    /// `-D`: delete a service.
    DeleteService(ServiceId),
    /// `-C`: delete all services.
    Clear,
    /// `-a`: add a server to a service.
    AddServer(ServerSpec),
    /// `-e`: replace the settings of a server.
    EditServer(ServerSpec),
    /// `-d`: delete a server from a service.
    DeleteServer {
        /// The service to which the server belongs.
        service: ServiceId,
        /// Address and port of the server.
        server: SocketAddr,
    },
    /// `-L`: list services, connections, timeouts or daemons.
    List(ListOptions),
    /// `-Z`: zero the counters of this service and its servers, or with `None` of all services.
    Zero(Option<ServiceId>),
    /// `--set`: set the timeouts.
    Set(Timeouts),
    /// `--start-daemon`: start a synchronisation daemon.
    StartDaemon(SyncDaemon),
    /// `--stop-daemon`: stop a synchronisation daemon.
    StopDaemon {
        /// The role of the daemon: master or backup.
        role: SyncRole,
        /// `--syncid`: the daemon's sync ID.
        syncid: u8,
    },
    /// `-S`: print the commands that create the present services again.
    Save {
        /// `-n`: print addresses and ports as numbers, instead of names.
        numeric: bool,
    },
    /// `-R`: execute the commands from standard input.
    Restore,
    /// `-h`: print the help text.
    Help,
    /// `-v`: print the version.
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
    /// Whether `--persistent-conn` was given. A listing with `-c` then shows the persistence engine
    /// and its data for each entry that has one; other listings use only `format`.
    pub persistent_conn: bool,
    /// `-n`: print addresses and ports as numbers, instead of names.
    pub numeric: bool,
    /// `--exact`: do not abbreviate large numbers.
    pub exact: bool,
    /// `--nosort`: do not sort the services and servers.
    pub nosort: bool,
}

/// Objects that `-L` can list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum What {
    /// Every service and its servers.
    #[default]
    Services,
    /// This service and its servers.
    Service(ServiceId),
    /// `-c`: connections.
    Connections,
    /// `--timeout`: the timeouts.
    Timeouts,
    /// `--daemon`: the synchronisation daemons.
    Daemons,
}

/// The columns of a listing of services.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// The columns if none of the options below is given: among others, the weight of each server,
    /// and its numbers of connections.
    #[default]
    Plain,
    /// `--stats`: connections, packets and bytes so far.
    Stats,
    /// `--rate`: connections, packets and bytes per second.
    Rate,
    /// `--thresholds`: the upper and the lower threshold, and the numbers of active and inactive
    /// connections.
    Thresholds,
    /// `--persistent-conn`: weight, and the numbers of persistent, active and inactive connections.
    PersistentConn,
    /// `--tun-info`: the columns of [`Plain`](Self::Plain), and the encapsulation of tunnels.
    TunInfo,
}
