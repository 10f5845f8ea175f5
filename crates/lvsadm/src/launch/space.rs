//! A network namespace of the program, and the connection to its dataplane.

use std::collections::HashMap;
use std::fs::File;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use lvs_api::{Address, Client, Error, Steering, place, starting, steer};
use lvs_core::Forwarding;
use lvs_core::api::{CHANGES_MAX, Call, Done, FailureCode, Info, ServiceId, ServiceInfo, Timeouts};
use lvs_core::sync::SyncDaemon;
use lvs_sys::lock;
use lvs_sys::notify::{self, NamespaceId};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, getsockname,
    sendto, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};
use serde::de::DeserializeOwned;

use super::family::Dataplane;
use super::kept::Kept;
use super::log;

/// Seconds for which a dump waits for room in the program's socket.
const PATIENCE_SECONDS: i64 = 5;
/// Time for which a thread's listing of services and servers is stored for its next requests.
const LISTING: Duration = Duration::from_secs(1);
/// Maximum number of simultaneous dumps in a namespace.
const DUMPS_MAX: usize = 16;

/// A network namespace of the program, with a netlink socket that sends answers.
#[derive(Debug)]
pub(super) struct Space {
    /// The address of the dataplane: the configured socket if this is the launcher's namespace,
    /// otherwise the default.
    pub(super) address: Address,
    /// Whether servers with NAT get full NAT.
    full_nat: bool,
    pub(super) id: NamespaceId,
    pub(super) namespace: File,
    /// The cookie of the namespace (`SO_NETNS_COOKIE`).
    pub(super) cookie: u64,
    /// The user namespaces whose capabilities apply in this network namespace.
    pub(super) owners: Vec<NamespaceId>,
    sender: OwnedFd,
    link: Mutex<Link>,
    /// Number of dumps that are being sent to each netlink port.
    dumps: Mutex<HashMap<u32, usize>>,
    pub(super) used: Mutex<Instant>,
}

/// The connection to the dataplane, the lock that prevents lvsd from starting, the last listing,
/// and the configuration that the program has made.
#[derive(Debug, Default)]
struct Link {
    client: Option<Client>,
    steering: Option<Steering>,
    /// Whether another `lvs-run` has the lock that prevents lvsd from starting.
    is_shared: bool,
    /// The last logged error, which is not repeated.
    failure: String,
    /// Whether the refusal of full NAT without a local address was logged.
    said_no_local: bool,
    listing: Option<Listing>,
    kept: Kept,
    /// Process id of the dataplane, and the time of the last connection to it; `None` before the
    /// first connection.
    known: Option<(u32, Instant)>,
}

impl Link {
    /// Restores the configuration of the program in a dataplane that has restarted and has no
    /// services; changes nothing in other cases. Returns a message for the log, which is empty if
    /// there was nothing to restore.
    fn restore(&mut self, client: &mut Client) -> Result<String, Error> {
        let info: Info = client.call(&Call::Info {})?;
        let now = Instant::now();
        let has_restarted = self
            .known
            .is_some_and(|(pid, since)| pid != info.pid || info.uptime < (now - since).as_secs());
        let all = Call::ServiceList { service: None };
        if !has_restarted
            || self.kept.is_empty()
            || !client.collect::<ServiceInfo>(&all)?.is_empty()
        {
            self.known = Some((info.pid, now));
            return Ok(String::new());
        }
        let mut report =
            "the dataplane has restarted without services: lvs-run has added the services of the program again"
                .to_owned();
        for request in self.kept.requests() {
            match client.call::<Done>(&request) {
                Ok(_) => {}
                Err(Error::Refused(failure)) => {
                    report = format!(
                        "the dataplane has restarted, and refuses the configuration of the program: {}; restart the program",
                        failure.message
                    );
                }
                Err(error) => return Err(error),
            }
        }
        self.known = Some((info.pid, now));
        Ok(report)
    }
}

/// The services and servers that a thread has listed.
#[derive(Debug)]
struct Listing {
    thread: u32,
    at: Instant,
    services: HashMap<ServiceId, ServiceInfo>,
}

impl Space {
    /// Creates the `Space` of `namespace`, in which the calling thread must be.
    pub(super) fn here(
        id: NamespaceId,
        namespace: File,
        owners: Vec<NamespaceId>,
        address: Option<Address>,
        full_nat: bool,
    ) -> std::io::Result<Self> {
        let sender = generic_socket(SockType::Raw, SockFlag::SOCK_CLOEXEC)?;
        let patience = TimeVal::seconds(PATIENCE_SECONDS);
        setsockopt(&sender, sockopt::SendTimeout, &patience)?;
        Ok(Self {
            address: address.unwrap_or_default(),
            full_nat,
            id,
            namespace,
            cookie: notify::cookie_of_socket(&sender)?,
            owners,
            sender,
            link: Mutex::default(),
            dumps: Mutex::default(),
            used: Mutex::new(Instant::now()),
        })
    }

    /// Returns the connection to the dataplane for a thread. Other threads wait until the
    /// connection is dropped.
    pub(super) fn dataplane(&self, thread: u32) -> Connection<'_> {
        Connection {
            address: &self.address,
            full_nat: self.full_nat,
            link: lock(&self.link),
            thread,
        }
    }

    /// Whether the dataplane that had the program's configuration has exited. False while a request
    /// is being answered.
    pub(super) fn has_lost(&self) -> bool {
        self.link.try_lock().is_ok_and(|link| {
            let is_open = link.client.as_ref().is_some_and(Client::is_open);
            !link.kept.is_empty() && !is_open
        })
    }

    /// Connects to the dataplane again, and restores the configuration if the dataplane has
    /// restarted.
    pub(super) fn reconnect(&self) {
        let mut link = lock(&self.link);
        link.client = None;
        if let Ok(client) = Client::connect(&self.address) {
            let mut connection = Connection {
                address: &self.address,
                full_nat: self.full_nat,
                link,
                thread: 0,
            };
            if let Ok(client) = connection.joined(client) {
                connection.link.client = Some(client);
            }
        }
    }

    /// Tries to take the lock that prevents lvsd from starting, in case another `lvs-run` has
    /// released it.
    pub(super) fn retry_lock(&self) {
        if let Ok(mut link) = self.link.try_lock()
            && link.is_shared
            && let Ok(steering) = steer(&self.address)
        {
            link.steering = Some(steering);
            link.is_shared = false;
        }
    }

    /// Frees the stored listing if it is older than [`LISTING`].
    pub(super) fn forget_listing(&self) {
        if let Ok(mut link) = self.link.try_lock() {
            link.listing
                .take_if(|listing| listing.at.elapsed() > LISTING);
        }
    }

    /// Returns the netlink port of the socket that sends answers; `None` if the socket has none.
    pub(super) fn port(&self) -> Option<u32> {
        port_of(&self.sender, || Some(std::process::id()))
    }

    /// Sends as many of the `datagrams` to the socket with the netlink port `port` as it accepts.
    /// Returns the others; `None` if none is left, or the socket is closed. Fails if datagrams are
    /// left, but [`DUMPS_MAX`] dumps are already being sent.
    pub(super) fn send(
        self: &Arc<Self>,
        port: u32,
        datagrams: Vec<Vec<u8>>,
    ) -> Result<Option<Rest>, Errno> {
        let mut datagrams = datagrams.into_iter();
        let to = NetlinkAddr::new(port, 0);
        while let Some(datagram) = datagrams.as_slice().first() {
            let fd = self.sender.as_raw_fd();
            match sendto(fd, datagram, &to, MsgFlags::MSG_DONTWAIT) {
                Ok(_) => {}
                Err(Errno::EINTR) => continue,
                Err(Errno::EAGAIN) => {
                    let mut dumps = lock(&self.dumps);
                    if dumps.values().sum::<usize>() >= DUMPS_MAX {
                        return Err(Errno::ENOBUFS);
                    }
                    *dumps.entry(port).or_default() += 1;
                    return Ok(Some(Rest {
                        space: self.clone(),
                        port,
                        datagrams: datagrams.collect(),
                    }));
                }
                // The program has closed the socket.
                Err(_) => return Ok(None),
            }
            datagrams.next();
        }
        Ok(None)
    }

    /// Whether a dump is being sent to `port`.
    pub(super) fn is_dumping(&self, port: u32) -> bool {
        lock(&self.dumps).contains_key(&port)
    }
}

/// The rest of a dump, for which the program's socket has no room yet.
#[derive(Debug)]
pub(super) struct Rest {
    space: Arc<Space>,
    port: u32,
    datagrams: Vec<Vec<u8>>,
}

impl Rest {
    /// Sends the rest of a dump as fast as the program receives it. Stops if the program closes its
    /// socket, or does not receive for [`PATIENCE_SECONDS`].
    pub(super) fn send(self) {
        let to = NetlinkAddr::new(self.port, 0);
        for datagram in &self.datagrams {
            let fd = self.space.sender.as_raw_fd();
            let sent = loop {
                match sendto(fd, datagram, &to, MsgFlags::empty()) {
                    Err(Errno::EINTR) => {}
                    other => break other,
                }
            };
            if sent.is_err() {
                // The program has closed the socket, or does not receive.
                return;
            }
        }
    }
}

impl Drop for Rest {
    fn drop(&mut self) {
        let mut dumps = lock(&self.space.dumps);
        if let Some(count) = dumps.get_mut(&self.port) {
            *count -= 1;
            if *count == 0 {
                dumps.remove(&self.port);
            }
        }
    }
}

/// Creates a generic netlink socket in the network namespace of the calling thread.
pub(super) fn generic_socket(kind: SockType, flags: SockFlag) -> nix::Result<OwnedFd> {
    socket(
        AddressFamily::Netlink,
        kind,
        flags,
        SockProtocol::NetlinkGeneric,
    )
}

/// Returns the netlink port of a socket. Binds a socket without a port as the kernel does at the
/// first send: to the process id, or to another number if that is in use.
pub(super) fn port_of(socket: &impl AsFd, process: impl Fn() -> Option<u32>) -> Option<u32> {
    let fd = socket.as_fd().as_raw_fd();
    let port = || getsockname::<NetlinkAddr>(fd).map(|address| address.pid());
    match port() {
        Ok(0) => {}
        other => return other.ok(),
    }
    let others = (1..4096).map(|index| u32::MAX - 4096 - index);
    for candidate in process().into_iter().chain(others) {
        match bind(fd, &NetlinkAddr::new(candidate, 0)) {
            Ok(()) => return Some(candidate),
            Err(Errno::EADDRINUSE) => {}
            // Another thread has bound the socket, or it cannot be bound.
            Err(_) => return port().ok().filter(|port| *port != 0),
        }
    }
    None
}

/// The dataplane of a namespace, while a request is answered.
pub(super) struct Connection<'a> {
    address: &'a Address,
    full_nat: bool,
    link: MutexGuard<'a, Link>,
    thread: u32,
}

impl Connection<'_> {
    /// Logs a failure, unless it equals the previous one.
    fn report(&mut self, failure: String) {
        if self.link.failure != failure {
            log(&failure);
            self.link.failure = failure;
        }
    }

    fn ask<R>(&mut self, ask: impl Fn(&mut Client) -> Result<R, Error>) -> Result<R, Errno> {
        // An existing connection may be to a dataplane that has exited.
        let mut reconnect = self.link.client.is_some();
        loop {
            let client = match self.link.client.take() {
                Some(client) => Ok(client),
                None => starting::connect(self.address).and_then(|client| self.joined(client)),
            };
            let failure = match client {
                Ok(mut client) => match ask(&mut client) {
                    Ok(answer) => {
                        self.link.client = Some(client);
                        self.link.failure.clear();
                        return Ok(answer);
                    }
                    Err(Error::Refused(failure)) => {
                        self.link.client = Some(client);
                        // The error number does not show the reason to the program, so log the
                        // reason.
                        if failure.code == FailureCode::NoLocalAddress
                            && !mem::replace(&mut self.link.said_no_local, true)
                        {
                            log(&format!(
                                "{}: start the dataplane with --local-address, or run `lvsadm local add`",
                                failure.message
                            ));
                        }
                        return Err(errno(failure.code));
                    }
                    Err(error) => error,
                },
                Err(error) => error,
            };
            if !reconnect {
                self.report(failure.to_string());
                return Err(Errno::ENODEV);
            }
            reconnect = false;
        }
    }

    /// Prepares a new connection: restores the configuration of the program if the dataplane has
    /// restarted without it, unless lvsd now manages the services.
    fn joined(&mut self, mut client: Client) -> Result<Client, Error> {
        if self.link.known.is_some() && !self.link.kept.is_empty() {
            // The directory with the lock may be a new one, too.
            self.link.steering = None;
            if self.steer().is_err() {
                return Ok(client);
            }
        }
        let report = self.link.restore(&mut client)?;
        if !report.is_empty() {
            log(&report);
        }
        Ok(client)
    }

    fn list<I: DeserializeOwned>(&mut self, call: &Call) -> Result<Vec<I>, Errno> {
        self.ask(|client| client.collect(call))
    }

    /// Acquires the lock that prevents lvsd from managing the same services. Fails if lvsd has the
    /// lock. Another `lvs-run` may have the lock: several programs may manage the same services, as
    /// with the kernel.
    fn steer(&mut self) -> Result<(), Errno> {
        if self.link.steering.is_some() {
            return Ok(());
        }
        match steer(self.address) {
            Ok(steering) => self.link.steering = Some(steering),
            Err(place::LockError::Held(holder)) if !is_launcher(holder) => {
                let address = self.address;
                self.report(format!(
                    "lvsd manages the services of {address}: lvs-run has refused a change of the program; stop lvsd, or use lvsadm"
                ));
                return Err(Errno::EBUSY);
            }
            Err(place::LockError::Held(_)) => self.link.is_shared = true,
            // The lock file cannot be created.
            Err(_) => {}
        }
        Ok(())
    }
}

/// Whether the process that has the lock is a supervisor of `lvs-run`.
fn is_launcher(holder: Option<u32>) -> bool {
    holder.is_some_and(|pid| {
        std::fs::read_to_string(format!("/proc/{pid}/comm"))
            .is_ok_and(|name| name.trim_end() == super::NAME)
    })
}

impl Dataplane for Connection<'_> {
    fn change(&mut self, mut call: Call) -> Result<(), Errno> {
        self.steer()?;
        if self.full_nat
            && let Call::ServerAdd(spec) | Call::ServerEdit(spec) = &mut call
            && spec.config.forwarding == Forwarding::Nat
        {
            spec.config.forwarding = Forwarding::FullNat;
        }
        self.link.listing = None;
        self.ask(|client| client.call::<Done>(&call))?;
        if !self.link.kept.keep(&call) {
            log(&format!(
                "the program has configured more than {CHANGES_MAX} services and servers: if the dataplane restarts, lvs-run does not restore them; use warm restart (lvs-dataplane --warm-restart)"
            ));
        }
        Ok(())
    }

    fn services(&mut self, one: Option<ServiceId>) -> Result<Vec<ServiceInfo>, Errno> {
        if let Some(id) = &one
            && let Some(listing) = &self.link.listing
            && listing.thread == self.thread
            && listing.at.elapsed() < LISTING
            && let Some(info) = listing.services.get(id)
        {
            return Ok(vec![info.clone()]);
        }
        let services: Vec<ServiceInfo> = self.list(&Call::ServiceList { service: one })?;
        if one.is_none() {
            let by_id = services.iter().map(|info| (info.service, info.clone()));
            self.link.listing = Some(Listing {
                thread: self.thread,
                at: Instant::now(),
                services: by_id.collect(),
            });
        }
        Ok(services)
    }

    fn daemons(&mut self) -> Result<Vec<SyncDaemon>, Errno> {
        self.list(&Call::DaemonList {})
    }

    fn timeouts(&mut self) -> Result<Timeouts, Errno> {
        self.ask(|client| client.call(&Call::TimeoutsGet {}))
    }

    fn table_size(&mut self) -> Result<u32, Errno> {
        // Make a call, because the connection may be to a dataplane that has exited.
        self.ask(|client| {
            client.call::<Timeouts>(&Call::TimeoutsGet {})?;
            Ok(client.hello().table_size)
        })
    }
}

/// The error number for a failed call.
pub(super) const fn errno_of(error: &Error) -> Errno {
    match error {
        Error::Refused(failure) => errno(failure.code),
        _ => Errno::ENODEV,
    }
}

/// The kernel's error number for a refusal.
const fn errno(code: FailureCode) -> Errno {
    match code {
        FailureCode::Exists | FailureCode::Running => Errno::EEXIST,
        FailureCode::NoService | FailureCode::NotRunning => Errno::ESRCH,
        FailureCode::NoServer | FailureCode::NoScheduler => Errno::ENOENT,
        FailureCode::Invalid => Errno::EINVAL,
        FailureCode::Range => Errno::ERANGE,
        FailureCode::Full => Errno::ENOMEM,
        FailureCode::Permission => Errno::EPERM,
        FailureCode::NoDevice => Errno::ENODEV,
        FailureCode::Unreachable => Errno::ENETUNREACH,
        FailureCode::Unsupported => Errno::EOPNOTSUPP,
        _ => Errno::EIO,
    }
}
