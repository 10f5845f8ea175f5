//! The sockets of a synchronisation daemon, one for each port.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV6, UdpSocket};

use lvs_core::api::{Failure, FailureCode};
use lvs_core::sync::{SyncDaemon, SyncRole};
use lvs_core::{Error, sync};
use tracing::{info, warn};

use super::counts::{Counts, count};
use super::{group, role};

/// The sockets of a daemon on its interface, which may be removed and added again.
#[derive(Debug)]
pub(super) struct Sockets {
    pub(super) daemon: SyncDaemon,
    ports: u16,
    sock_size: i32,
    /// Index of the interface to which the sockets are bound.
    index: u32,
    /// The source address of a master whose group is IPv4.
    source: Option<Ipv4Addr>,
    open: Vec<UdpSocket>,
    /// Number of lost datagrams of each socket at the last check.
    lost: Vec<u32>,
    /// Whether the sockets were closed at the last check: the interface was missing, or they could
    /// not be opened on it.
    away: bool,
}

impl Sockets {
    /// Opens the sockets.
    ///
    /// # Errors
    /// The kernel would refuse to start the daemon.
    pub(super) fn open(daemon: &SyncDaemon, ports: u16, sock_size: i32) -> Result<Self, Failure> {
        let last = port(daemon).checked_add(ports - 1);
        if last.is_none() {
            return Err(Failure::new(
                FailureCode::Invalid,
                format!(
                    "from port {} on, fewer than {} ports exist (sync_ports): choose a lower port",
                    port(daemon),
                    ports
                ),
            ));
        }
        let mut this = Self {
            daemon: daemon.clone(),
            ports,
            sock_size,
            index: 0,
            source: None,
            open: Vec::new(),
            lost: Vec::new(),
            away: false,
        };
        let refused = |error: io::Error| refusal(daemon, &error);
        this.index = lvs_sys::if_index(&daemon.interface).map_err(refused)?;
        this.source = this.primary();
        this.open = this.all(this.index).map_err(refused)?;
        this.lost = vec![0; this.open.len()];
        if daemon.role == SyncRole::Master {
            // As in the kernel, a master cannot be started on an interface that is down.
            let probe = this.one(this.index, 0).map_err(refused)?;
            probe.connect(this.target(0)).map_err(refused)?;
        }
        Ok(this)
    }

    fn all(&self, index: u32) -> io::Result<Vec<UdpSocket>> {
        (0..self.ports)
            .map(|number| self.one(index, number))
            .collect()
    }

    fn one(&self, index: u32, number: u16) -> io::Result<UdpSocket> {
        let (name, target) = (&self.daemon.interface, self.target(number));
        let socket = match self.daemon.role {
            SyncRole::Master => {
                let ttl = self.daemon.ttl.unwrap_or(1);
                lvs_sys::multicast_sender(name, index, target.ip(), ttl, self.source)?
            }
            SyncRole::Backup => lvs_sys::multicast_receiver(name, index, target)?,
        };
        if self.sock_size > 0 {
            match self.daemon.role {
                SyncRole::Master => lvs_sys::set_send_buffer(&socket, self.sock_size)?,
                SyncRole::Backup => lvs_sys::set_receive_buffer(&socket, self.sock_size)?,
            };
        }
        Ok(socket)
    }

    /// The source address of a master whose group is IPv4: the first address of the interface.
    /// `None` for other daemons, and without such an address.
    fn primary(&self) -> Option<Ipv4Addr> {
        let sends = self.daemon.role == SyncRole::Master && group(&self.daemon).is_ipv4();
        sends.then(|| lvs_sys::primary_address(&self.daemon.interface).ok()?)?
    }

    /// The destination of messages with this offset from the daemon's port
    /// ([`Message::port`](sync::Message::port)).
    fn target(&self, number: u16) -> SocketAddr {
        let port = port(&self.daemon).saturating_add(number);
        match group(&self.daemon) {
            std::net::IpAddr::V4(group) => (group, port).into(),
            std::net::IpAddr::V6(group) => SocketAddrV6::new(group, port, 0, self.index).into(),
        }
    }

    /// The open sockets; none while the interface does not exist or cannot be used.
    pub(super) fn iter(&self) -> impl Iterator<Item = &UdpSocket> {
        self.open.iter()
    }

    /// Returns the socket for a message, and the socket's number; `None` while no socket is open.
    pub(super) fn of(&self, message: &sync::Message) -> Option<(u16, &UdpSocket)> {
        let number = message
            .port
            .checked_rem(u16::try_from(self.open.len()).ok()?)?;
        Some((number, self.open.get(usize::from(number))?))
    }

    /// Sends a message to the port of its synchronisation thread. Fails with `NotConnected` while
    /// no socket is open.
    pub(super) fn send(&self, message: &sync::Message) -> io::Result<()> {
        let away = || io::Error::from(io::ErrorKind::NotConnected);
        let (number, socket) = self.of(message).ok_or_else(away)?;
        socket.send_to(&message.bytes, self.target(number))?;
        Ok(())
    }

    /// Counts lost datagrams, and opens the sockets again if the interface was removed and added
    /// again, or if the master's source address has changed. A socket that is bound to a removed
    /// interface receives nothing. Closes the sockets while the interface is missing or cannot be
    /// used. Call it periodically.
    pub(super) fn keep(&mut self, counts: &Counts) {
        for (socket, before) in self.open.iter().zip(&mut self.lost) {
            if self.daemon.role == SyncRole::Backup
                && let Ok(lost) = lvs_sys::datagrams_lost(socket)
            {
                let more = lost.wrapping_sub(std::mem::replace(before, lost));
                count(&counts.lost, more.into());
            }
        }
        let name = &self.daemon.interface;
        let index = lvs_sys::if_index(name).unwrap_or(0);
        let source = self.primary();
        if index == self.index && source == self.source && !self.away {
            return;
        }
        self.source = source;
        let role = role(self.daemon.role);
        if index == 0 {
            if !self.away {
                warn!("the synchronisation {role} waits for {name}, which was removed");
            }
            self.away = true;
            self.open.clear();
            return;
        }
        let gone = self.away || index != self.index;
        match self.all(index) {
            Ok(open) => {
                if gone {
                    info!(
                        "the synchronisation {role} continues: its sockets on {name} are open again"
                    );
                }
                self.lost = vec![0; open.len()];
                (self.open, self.index, self.away) = (open, index, false);
            }
            Err(error) => {
                if !self.away {
                    warn!(
                        "the synchronisation {role} cannot open its sockets on {name}, and tries again: {error}"
                    );
                }
                self.away = true;
                self.open.clear();
            }
        }
    }
}

fn port(daemon: &SyncDaemon) -> u16 {
    daemon.port.unwrap_or(sync::PORT)
}

fn refusal(daemon: &SyncDaemon, error: &io::Error) -> Failure {
    let (role, interface) = (role(daemon.role), &daemon.interface);
    let code = match error.raw_os_error() {
        Some(libc::ENODEV | libc::ENXIO) => return Error::NoDevice.into(),
        _ if error.kind() == io::ErrorKind::NotFound => return Error::NoDevice.into(),
        Some(libc::ENETUNREACH | libc::ENETDOWN | libc::EADDRNOTAVAIL) => FailureCode::Unreachable,
        Some(libc::EPERM | libc::EACCES) => {
            let text = format!(
                "the dataplane may not bind a socket to {interface} for the synchronisation {role}: it needs CAP_NET_RAW"
            );
            return Failure::new(FailureCode::Unsupported, text);
        }
        _ => FailureCode::Internal,
    };
    let fix = match code {
        FailureCode::Unreachable => format!(": is it up? ip link set {interface} up"),
        _ => String::new(),
    };
    let text = format!(
        "the synchronisation {role} cannot use {} port {} on {interface}: {error}{fix}",
        group(daemon),
        port(daemon)
    );
    Failure::new(code, text)
}
