//! The kinds of health checks. Each is one file, with its configuration, its parser and its
//! implementation.
//!
//! To add a kind, write its file with a type that implements `ProbeKind`, name it in `kinds!`
//! below, and document it in `docs/configuration.md` (a test compares that page with the registry).

mod agent;
#[cfg(test)]
mod banner;
mod dns;
mod eager;
mod exec;
mod file;
#[doc(hidden)]
pub mod fuzz;
#[cfg(test)]
pub(crate) mod hostile;
mod http;
mod https;
mod icmp;
mod line;
mod ping;
mod smtp;
mod tcp;
mod tls;
mod udp;
mod words;

use std::fmt;
use std::fs;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use icmp::IcmpError;
use lvs_core::api::ServiceId;
use lvs_core::{Forwarding, Prefix, Protocol};
use lvs_sys::{icmp_errors, lock};
use rustix::io::Errno;
use socket2::{Domain, SockRef, Socket, Type};
use tokio::net::{TcpStream, UdpSocket};

pub(crate) use tls::Tls;

use super::pins::Pin;
use super::{Advice, Code, Pins, Reason};
use crate::text::Keys;

/// The reason why a probe failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeError {
    /// The check failed at the server, for this reason.
    Server(Reason),
    /// This host could not make the check, which says nothing about the server; the text is the
    /// reason.
    Local(String),
}

impl ProbeError {
    /// An error of the server, with this reason.
    pub fn server(reason: impl Into<Reason>) -> Self {
        Self::Server(reason.into())
    }

    /// Converts an error of a socket that was connected, or was being connected, to `target`.
    fn of_socket(error: &io::Error, target: impl fmt::Display) -> Self {
        // Operators do not need the number of an error.
        let words = error.to_string();
        let words = words.split(" (os error").next().unwrap_or_default();
        let (first, rest) = words.split_at(words.chars().next().map_or(0, char::len_utf8));
        let reason = format!("{target}: {}{rest}", first.to_lowercase());
        if let Some(fix) = fix_of_shortage(error) {
            return Self::Local(format!("{reason}; {fix}"));
        }
        let code = match Errno::from_io_error(error) {
            Some(Errno::CONNREFUSED) => Code::Refused,
            Some(Errno::TIMEDOUT) => Code::Silent,
            // The kernel also reports these errors for routes of the types `prohibit` and
            // `blackhole`, and for several ICMP errors.
            Some(
                Errno::NETUNREACH
                | Errno::HOSTUNREACH
                | Errno::HOSTDOWN
                | Errno::NETDOWN
                | Errno::NONET
                | Errno::ACCESS
                | Errno::INVAL
                | Errno::NOPROTOOPT
                | Errno::PROTO,
            ) => Code::Unreachable,
            _ => Code::CheckFailed,
        };
        Self::Server(Reason::from(reason).of(code))
    }
}

/// The fix if this host lacks something that a check needs (descriptors, memory, ports), or its own
/// output filter has dropped the packet. `None` for every other error of a socket, which is
/// attributed to the server or the path to it: a refusal, a missing route, one of the many ICMP
/// errors of the server's firewall.
///
/// The number of the error decides, not its [`io::ErrorKind`]: EPERM comes from this host's filter,
/// EACCES from a route that prohibits or from ICMPv6 "administratively prohibited", and both have
/// the same kind.
fn fix_of_shortage(error: &io::Error) -> Option<&'static str> {
    Some(match Errno::from_io_error(error)? {
        Errno::MFILE => "raise LimitNOFILE in the unit of lvsd (ulimit -n in a shell)",
        Errno::NFILE => "raise fs.file-max of this host (sysctl)",
        Errno::NOMEM | Errno::NOBUFS | Errno::NOSPC => "this host lacks memory (free -m)",
        Errno::ADDRNOTAVAIL | Errno::ADDRINUSE => {
            "this host has no free local port (ss -s; sysctl net.ipv4.ip_local_port_range)"
        }
        Errno::PERM => "a filter of this host drops the packets (nft list ruleset)",
        _ => return None,
    })
}

/// The path of a client: to a service, and through the dataplane to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Via {
    /// The service through which the check goes.
    pub service: ServiceId,
    /// The virtual address and port of the service.
    pub virt: SocketAddr,
    /// The method by which the dataplane forwards to the server.
    pub method: Forwarding,
    /// Whether lvsd has chosen the path, and not the file: lvsd checks the server's own address
    /// while the dataplane does not forward the check.
    pub by_default: bool,
}

impl Via {
    /// Whether rp_filter of this host may drop the replies: they come from the VIP, and do not pass
    /// the dataplane.
    pub(super) fn is_filtered(&self) -> bool {
        !self.method.translates() && self.virt.is_ipv4()
    }
}

/// The server that is probed, and the path to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked<'a> {
    pub(crate) server: SocketAddr,
    /// The path through a service; `None` for the host's own routes.
    pub(super) via: Option<Via>,
    /// The connection to the dataplane, for a path through a service.
    pub(super) pins: Option<&'a Pins>,
    /// Time limit of the probe.
    pub(crate) timeout: Duration,
    /// The state of the present connection of the probe.
    pub(super) progress: Option<&'a Progress>,
}

/// The state of a probe's connection.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// Whether the server has accepted the connection.
    pub(super) accepted: AtomicBool,
    /// The pin by which the dataplane sends the connection to the server.
    pub(super) pin: Mutex<Option<Pin>>,
}

impl Asked<'_> {
    /// A probe of `server` over this host's own routes, for tests.
    #[cfg(test)]
    pub(crate) const fn at(server: SocketAddr) -> Self {
        Self {
            server,
            via: None,
            pins: None,
            timeout: Duration::from_secs(10),
            progress: None,
        }
    }

    /// Formats `target` for messages; for a check through a service, formats the server and the VIP
    /// instead.
    pub(super) fn describe(&self, target: &str) -> String {
        match self.via {
            Some(via) => format!("{} through {}", self.server, via.virt),
            None => target.to_owned(),
        }
    }

    /// Connects to `target` or, for a check through a service, to its virtual address. The
    /// connection is closed with a reset, so that neither host keeps state of a probe.
    pub(crate) async fn connect(&self, target: SocketAddr) -> Result<TcpStream, ProbeError> {
        let to = self.via.map_or(target, |via| via.virt);
        self.set_accepted(false);
        // If no socket can be created, nothing has left this host.
        let here = |error: io::Error| ProbeError::Local(format!("{to}: {error}"));
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None).map_err(here)?;
        socket.set_nonblocking(true).map_err(here)?;
        if let Some(via) = self.via {
            let source = own_address(via.virt).await?;
            let here = |error: io::Error| ProbeError::Local(format!("{source}: {error}"));
            let any_port = SocketAddr::new(source.ip(), 0);
            let bound = socket.bind(&source.into());
            let bound = bound.or_else(|_| socket.bind(&any_port.into()));
            bound.map_err(here)?;
            let local = socket.local_addr().map_err(here)?;
            let local = local.as_socket().unwrap_or(source);
            self.pin(via, local).await?;
        }
        IcmpError::keep(&socket, to.ip(), true);
        match socket.connect(&to.into()) {
            Err(error) if Errno::from_io_error(&error) != Some(Errno::INPROGRESS) => {
                return Err(self.unconnected(&error, &socket, target));
            }
            Ok(()) | Err(_) => {}
        }
        let stream = TcpStream::from_std(socket.into()).map_err(here)?;
        let connected = stream.writable().await.and_then(|()| connection(&stream));
        if let Err(error) = connected {
            return Err(self.unconnected(&error, &stream, target));
        }
        self.set_accepted(true);
        IcmpError::keep(&stream, to.ip(), false);
        let _ = stream.set_zero_linger();
        let _ = stream.set_nodelay(true);
        Ok(stream)
    }

    /// Converts the error of `socket`, which could not be connected to `target`. Adds the ICMP
    /// error that caused it, and a fix, if they are known.
    fn unconnected(&self, error: &io::Error, socket: &impl AsFd, target: SocketAddr) -> ProbeError {
        let failed = self.failed(error, target);
        let ProbeError::Server(mut reason) = failed else {
            return failed;
        };
        let ip = self.server.ip();
        if let Some(icmp) = IcmpError::of(socket) {
            let local = SockRef::from(socket).local_addr().ok();
            let local = local.and_then(|local| local.as_socket());
            let from_here = local.is_some_and(|local| icmp.sender == Some(local.ip()));
            // Through a service, the next hop is that of the VIP, not of the server.
            if from_here && icmp.is_host_unreachable() && self.via.is_none() {
                // This host reports a next hop without a link-layer address.
                reason
                    .text
                    .push_str(" (its next hop does not answer ARP or neighbour discovery)");
                let fix = format!(
                    "check that {ip} is up and connected (ip neigh), and that the route to it is right (ip route get {ip})"
                );
                return ProbeError::Server(reason.of(Code::NextHop).with_fix(fix));
            }
            let own = [Some(ip), self.via.map(|via| via.virt.ip())];
            let sender = icmp.sender.filter(|_| !own.contains(&icmp.sender));
            let of = sender.map_or_else(String::new, |sender| format!(" from {sender}"));
            reason.text.push_str(&format!(" ({}{of})", icmp.name()));
            if icmp.is_of_filter() {
                let on = sender.unwrap_or(ip);
                let fix = format!("a filter rejects the packets; on {on}: nft list ruleset");
                return ProbeError::Server(reason.of(Code::Filtered).with_fix(fix));
            }
        } else if Errno::from_io_error(error) == Some(Errno::CONNREFUSED) {
            let listener = self.via.filter(|via| !via.method.translates());
            let listener = listener.map_or(target, |via| via.virt);
            let fix = format!(
                "on {ip}: is a program listening on {listener} (ss -ltn), or does a filter reject connections with a reset (nft list ruleset)?"
            );
            return ProbeError::Server(reason.with_fix(fix));
        }
        ProbeError::Server(reason)
    }

    /// Opens a socket for datagrams to and from `target` or, for a check through a service, the
    /// virtual address of the service.
    pub(crate) async fn datagrams(&self, target: SocketAddr) -> Result<UdpSocket, ProbeError> {
        let (source, target) = match self.via {
            None => (any(target), target),
            Some(via) => (own_address(via.virt).await?, via.virt),
        };
        let here = |error: io::Error| ProbeError::Local(format!("{source}: {error}"));
        let any_port = SocketAddr::new(source.ip(), 0);
        let socket = match UdpSocket::bind(source).await {
            Ok(socket) => socket,
            Err(_) => UdpSocket::bind(any_port).await.map_err(here)?,
        };
        icmp_errors::receive(&socket, target.ip()).map_err(here)?;
        if let Some(via) = self.via {
            self.pin(via, socket.local_addr().map_err(here)?).await?;
        }
        let connected = socket.connect(target).await;
        connected.map_err(|error| self.failed(&error, target))?;
        Ok(socket)
    }

    /// Returns a function that converts errors of sockets to `target`, for callers with several
    /// calls that may fail.
    fn failing(&self, target: SocketAddr) -> impl Fn(io::Error) -> ProbeError + Copy {
        move |error| self.failed(&error, target)
    }

    /// Converts an error of a connection to `target`.
    pub(crate) fn failed(&self, error: &io::Error, target: SocketAddr) -> ProbeError {
        ProbeError::of_socket(error, self.describe(&target.to_string()))
    }

    /// Pins the next connection from `client` to the server.
    async fn pin(&self, via: Via, client: SocketAddr) -> Result<(), ProbeError> {
        let Some(pins) = self.pins else {
            return Err(ProbeError::Local("the dataplane cannot be reached".into()));
        };
        let pinned = pins.pin(via.service, self.server, client).await;
        let pin = pinned.map_err(ProbeError::Local)?;
        if let Some(progress) = self.progress {
            *lock(&progress.pin) = Some(pin);
        }
        Ok(())
    }

    fn set_accepted(&self, accepted: bool) {
        if let Some(progress) = self.progress {
            progress.accepted.store(accepted, Relaxed);
        }
    }
}

/// Checks that a writable socket is connected; otherwise returns its error. A queued ICMP error
/// makes the socket writable before the error becomes the error of the socket.
fn connection(stream: &TcpStream) -> io::Result<()> {
    match stream.take_error()? {
        Some(error) => Err(error),
        None => stream.peer_addr().map(drop),
    }
}

/// Returns the local address and port for a check through the VIP `target`. The address is the one
/// that this host has in the network of the VIP. Without one, it is the address that the kernel
/// chooses, to which the servers may have another path.
///
/// # Errors
/// The VIP cannot be reached, or is an address of this host.
async fn own_address(target: SocketAddr) -> Result<SocketAddr, ProbeError> {
    let found = async {
        let socket = UdpSocket::bind(any(target)).await?;
        socket.connect(target).await?;
        socket.local_addr()
    };
    let found = found
        .await
        .map_err(|error| ProbeError::Local(format!("{target} cannot be reached: {error}")))?;
    if found.ip() == target.ip() {
        return Err(ProbeError::Local(format!(
            "{} is an address of this host, which connects to it without the dataplane: remove it from the host, so that the dataplane owns it, or check without via = \"service\"",
            target.ip()
        )));
    }
    let ip = address_beside(target.ip()).unwrap_or(found.ip());
    Ok(SocketAddr::new(ip, next_port()))
}

/// The address of this host in the network of `vip`; `None` if it has no such address.
fn address_beside(vip: IpAddr) -> Option<IpAddr> {
    let interfaces = nix::ifaddrs::getifaddrs().ok()?;
    interfaces
        .filter_map(|interface| {
            let (address, mask) = (ip_of(&interface.address?)?, ip_of(&interface.netmask?)?);
            let length = match mask {
                IpAddr::V4(mask) => mask.to_bits().count_ones(),
                IpAddr::V6(mask) => mask.to_bits().count_ones(),
            };
            let network = Prefix::new(address, u8::try_from(length).ok()?)?;
            (network.contains(vip) && length > 0).then_some((length, address))
        })
        .max()
        .map(|(_, address)| address)
}

fn ip_of(address: &nix::sys::socket::SockaddrStorage) -> Option<IpAddr> {
    match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
        (Some(v4), _) => Some(v4.ip().into()),
        (None, Some(v6)) => Some(v6.ip().into()),
        (None, None) => None,
    }
}

/// The next source port of a check through a VIP. A port is used again as late as possible: the
/// dataplane keeps the connection of an earlier check for up to a minute, and would send the next
/// connection from the same port to the same server.
fn next_port() -> u16 {
    static PORTS: OnceLock<(u32, u32)> = OnceLock::new();
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let (first, count) = *PORTS.get_or_init(|| {
        NEXT.store(std::process::id().wrapping_mul(0x9e37_79b1), Relaxed);
        let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range");
        let range = range.unwrap_or_default();
        let mut ports = range
            .split_whitespace()
            .filter_map(|port| port.parse().ok());
        match (ports.next(), ports.next()) {
            (Some(first), Some(last)) if first < last => (first, last - first + 1),
            _ => (32_768, 28_232),
        }
    });
    let port = first + NEXT.fetch_add(1, Relaxed) % count;
    u16::try_from(port).unwrap_or(0)
}

/// The unspecified address of the family of `like`.
fn any(like: SocketAddr) -> SocketAddr {
    match like {
        SocketAddr::V4(_) => (std::net::Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (std::net::Ipv6Addr::UNSPECIFIED, 0).into(),
    }
}

/// The reason why a check cannot be used for a server, and the fix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Misfit {
    pub(crate) title: &'static str,
    pub(crate) help: &'static str,
}

/// The port to which a check connects: the check's own port, or the server's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Port(Option<u16>);

impl Port {
    /// Reads the key `port` of a check; `None` if it is invalid, which is reported.
    pub(crate) fn parse(keys: &mut Keys<'_>) -> Option<Self> {
        keys.port("port").map(Self)
    }

    /// Returns the port for a check of `server`.
    pub(crate) fn bind(self, server: SocketAddr) -> Result<Self, Misfit> {
        match self.address(server).port() {
            0 => Err(Misfit {
                title: "the check has no port to connect to",
                help: "the server has no port of its own; add `port` to the check",
            }),
            port => Ok(Self(Some(port))),
        }
    }

    /// Returns the server's address with this port or, without one, with the server's own port.
    pub(crate) fn address(self, server: SocketAddr) -> SocketAddr {
        SocketAddr::new(server.ip(), self.0.unwrap_or(server.port()))
    }
}

/// The answer of a server for messages: short, and without control characters.
pub(crate) fn quoted(bytes: &[u8]) -> String {
    const MOST: usize = 80;
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(4 * MOST)]);
    let text = text.trim();
    let short: String = text.chars().take(MOST).collect();
    let more = if short.len() < text.len() || bytes.len() > 4 * MOST {
        "..."
    } else {
        ""
    };
    format!("{short:?}{more}")
}

/// One kind of health check.
pub(crate) trait ProbeKind: Clone + Sized {
    /// The value of `type` in the file.
    const NAME: &'static str;
    /// The keys of this kind, besides those of every check.
    const KEYS: &'static [&'static str];
    /// Default number of consecutive successes after which a server is up again.
    const RISE: u32 = 2;
    /// Default number of consecutive failed checks after which a server is down.
    const FALL: u32 = 3;
    /// The protocol of the services that a through-VIP check can use; `None`: no through-VIP check.
    const VIA: Option<Protocol> = None;
    /// Number of descriptors that a probe has open at the same time.
    const DESCRIPTORS: u32 = 1;

    /// Reads the keys of this kind. `None` if some are invalid; `keys` then has the errors.
    fn parse(keys: &mut Keys<'_>) -> Option<Self>;

    /// The port of the check; `None` if this kind has no port.
    fn port(&mut self) -> Option<&mut Port> {
        None
    }

    /// A copy for one server, in which the values that depend on its address are set.
    fn bind(&self, server: SocketAddr) -> Result<Self, Misfit> {
        let mut bound = self.clone();
        if let Some(port) = bound.port() {
            *port = port.bind(server)?;
        }
        Ok(bound)
    }

    /// The target of the probe for messages, such as a URL, a file, or a program and the server's
    /// address.
    fn target(&self, server: SocketAddr) -> String;

    /// Runs one probe. The future is dropped at the check's timeout.
    fn run(&self, asked: &Asked<'_>) -> impl Future<Output = Result<Advice, ProbeError>> + Send;
}

/// A kind of health check, as the configuration uses it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KindInfo {
    pub(crate) name: &'static str,
    pub(crate) keys: &'static [&'static str],
    pub(crate) rise: u32,
    pub(crate) fall: u32,
    pub(crate) parse: fn(&mut Keys<'_>) -> Option<Probe>,
}

/// Defines the registry: an enum over the kinds, and the methods that are forwarded to them.
macro_rules! kinds {
    ($($(#[$attribute:meta])* $kind:ident => $module:ident,)+) => {
        /// The probe of a check, of any kind.
        #[derive(Clone, Debug, PartialEq, Eq, Hash)]
        pub enum Probe {
            $($(#[$attribute])* #[doc = concat!("`type = \"", stringify!($module), "\"`.")]
            $kind($module::$kind),)+
        }

        impl Probe {
            /// All kinds of health checks.
            pub(crate) const KINDS: &[KindInfo] = &[
                $($(#[$attribute])* KindInfo {
                    name: <$module::$kind as ProbeKind>::NAME,
                    keys: <$module::$kind as ProbeKind>::KEYS,
                    rise: <$module::$kind as ProbeKind>::RISE,
                    fall: <$module::$kind as ProbeKind>::FALL,
                    parse: |keys| <$module::$kind as ProbeKind>::parse(keys).map(Self::$kind),
                },)+
            ];

            /// Returns the probe for a check of `server`.
            pub(crate) fn bind(&self, server: SocketAddr) -> Result<Self, Misfit> {
                match self {
                    $($(#[$attribute])* Self::$kind(probe) => probe.bind(server).map(Self::$kind),)+
                }
            }

            /// The name of the probe's kind.
            pub const fn name(&self) -> &'static str {
                match self {
                    $($(#[$attribute])* Self::$kind(_) => <$module::$kind as ProbeKind>::NAME,)+
                }
            }

            /// The protocol of the services that a through-VIP check can use; `None` if the kind
            /// has no through-VIP check.
            pub(crate) fn via(&self) -> Option<Protocol> {
                match self {
                    $($(#[$attribute])* Self::$kind(_) => <$module::$kind as ProbeKind>::VIA,)+
                }
            }

            /// Maximum number of descriptors that a probe has open at the same time.
            pub(crate) const fn descriptors(&self) -> u32 {
                match self {
                    $($(#[$attribute])* Self::$kind(_) => <$module::$kind as ProbeKind>::DESCRIPTORS,)+
                }
            }

            /// The target of the probe for messages, such as a URL, a file, or a program and the
            /// server's address.
            pub fn target(&self, server: SocketAddr) -> String {
                match self {
                    $($(#[$attribute])* Self::$kind(probe) => probe.target(server),)+
                }
            }

            pub(super) async fn run(&self, asked: &Asked<'_>) -> Result<Advice, ProbeError> {
                match self {
                    $($(#[$attribute])* Self::$kind(probe) => probe.run(asked).await,)+
                }
            }
        }
    };
}

kinds! {
    Agent => agent,
    Dns => dns,
    Exec => exec,
    File => file,
    Http => http,
    Https => https,
    Ping => ping,
    Smtp => smtp,
    Tcp => tcp,
    Udp => udp,
    #[cfg(test)]
    Banner => banner,
}

impl Probe {
    /// The kind of health check called `name`, if there is one.
    pub(crate) fn kind(name: &str) -> Option<&'static KindInfo> {
        Self::KINDS.iter().find(|kind| kind.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENTATION: &str = include_str!("../../../../../docs/configuration.md");

    /// The kinds and keys that `text` lacks: each kind needs a heading, and each key must be under
    /// it.
    fn undocumented(text: &str) -> Vec<String> {
        let mut missing = Vec::new();
        for kind in Probe::KINDS {
            let heading = format!("\n#### type = \"{}\"\n", kind.name);
            let Some((_, rest)) = text.split_once(&heading) else {
                missing.push(kind.name.to_owned());
                continue;
            };
            let section = rest.split("\n#").next().unwrap_or_default();
            for key in kind.keys {
                if !section.contains(&format!("| `{key}` |")) {
                    missing.push(format!("{}.{key}", kind.name));
                }
            }
        }
        missing
    }

    #[test]
    fn every_check_kind_except_banner_is_documented_with_its_keys() {
        assert_eq!(
            undocumented(DOCUMENTATION),
            [banner::Banner::NAME],
            "docs/configuration.md does not describe exactly the kinds of checks other than that of tests"
        );
        let without = DOCUMENTATION.replace("| `helo` |", "| helo |");
        assert_eq!(undocumented(&without), ["smtp.helo", "banner"]);
    }

    /// An error with this number, as the kernel reports it on a socket.
    fn of_number(errno: Errno) -> ProbeError {
        ProbeError::of_socket(&errno.into(), "10.0.0.1:80")
    }

    #[test]
    fn socket_error_of_server_or_path_is_attributed_to_server() {
        for errno in [
            Errno::CONNREFUSED,
            Errno::CONNRESET,
            Errno::CONNABORTED,
            Errno::PIPE,
            Errno::HOSTUNREACH,
            Errno::NETUNREACH,
            Errno::TIMEDOUT,
            // ICMPv6 "administratively prohibited", a route of the type `prohibit`.
            Errno::ACCESS,
            // A route of the type `blackhole`.
            Errno::INVAL,
            // ICMP "protocol unreachable", "host unknown", "host isolated", "source route failed",
            // "fragmentation needed", "parameter problem".
            Errno::NOPROTOOPT,
            Errno::HOSTDOWN,
            Errno::NONET,
            Errno::OPNOTSUPP,
            Errno::MSGSIZE,
            Errno::PROTO,
            Errno::NETDOWN,
            Errno::NETRESET,
            Errno::NODEV,
        ] {
            let error = of_number(errno);
            assert!(matches!(error, ProbeError::Server(_)), "{error:?}");
        }
        let ended = io::Error::from(io::ErrorKind::UnexpectedEof);
        let error = ProbeError::of_socket(&ended, "10.0.0.1:80");
        assert!(matches!(error, ProbeError::Server(_)), "{error:?}");
    }

    #[test]
    fn shortage_of_own_resources_is_not_attributed_to_server() {
        for errno in [
            Errno::MFILE,
            Errno::NFILE,
            Errno::NOMEM,
            Errno::NOBUFS,
            Errno::NOSPC,
            Errno::ADDRNOTAVAIL,
            Errno::ADDRINUSE,
            Errno::PERM,
        ] {
            let error = of_number(errno);
            assert!(matches!(error, ProbeError::Local(_)), "{error:?}");
        }
    }

    #[test]
    fn probe_type_names_are_unique() {
        for (n, kind) in Probe::KINDS.iter().enumerate() {
            let again = Probe::KINDS[n + 1..].iter().any(|k| k.name == kind.name);
            assert!(!again, "{}", kind.name);
        }
    }

    #[tokio::test]
    async fn writable_socket_without_connection_is_an_error() {
        let socket =
            Socket::new(Domain::IPV4, Type::STREAM, None).expect("the socket can be opened");
        socket
            .set_nonblocking(true)
            .expect("the socket option can be set");
        let stream = TcpStream::from_std(socket.into()).expect("the connection is established");
        // The socket has no pending error.
        assert!(
            stream
                .take_error()
                .expect("the socket option can be read")
                .is_none()
        );
        connection(&stream).expect_err("the unconnected socket counts as connected");
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await;
        connection(&stream.expect("the connection is established"))
            .expect("the socket is connected");
    }
}
