//! Looks up names of hosts and ports in `/etc/hosts`, `/etc/services` and DNS, within a time limit.

mod ptr;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use lvs_core::Protocol;
use lvs_core::ipvsadm::Resolve;

/// Time limit of all reverse look-ups of a listing together. Addresses that are not resolved by
/// then are printed as numbers.
const REVERSE_BUDGET: Duration = Duration::from_secs(2);
/// Time limit for the look-up of one name.
const FORWARD_BUDGET: Duration = Duration::from_secs(10);

/// A resolver of names of hosts and ports. It stores the results of reverse look-ups in DNS.
#[derive(Debug)]
pub struct Names {
    hosts: Hosts,
    services: Services,
    /// Name servers; empty if names are read only from files.
    servers: Vec<SocketAddr>,
    dns: bool,
    known: RefCell<HashMap<IpAddr, Option<String>>>,
    left: Cell<Duration>,
}

impl Names {
    /// A resolver with the files and the name servers of this system. A file that cannot be read
    /// counts as empty.
    pub fn system() -> Self {
        let read = |path| {
            fs::read(path)
                .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
                .unwrap_or_default()
        };
        let dns = uses_dns(&read("/etc/nsswitch.conf"));
        Self {
            dns,
            servers: if dns {
                ptr::servers(&read("/etc/resolv.conf"))
            } else {
                Vec::new()
            },
            ..Self::from_texts(&read("/etc/hosts"), &read("/etc/services"))
        }
    }

    /// Reads names only from these texts, in the formats of `/etc/hosts` and `/etc/services`.
    pub fn from_texts(hosts: &str, services: &str) -> Self {
        Self {
            hosts: Hosts::parse(hosts),
            services: Services::parse(services),
            servers: Vec::new(),
            dns: false,
            known: RefCell::default(),
            left: Cell::new(REVERSE_BUDGET),
        }
    }

    fn ask_reverse(&self, address: IpAddr) -> Option<String> {
        let mut servers = self.servers.iter();
        loop {
            let left = self.left.get();
            if left.is_zero() {
                return None;
            }
            let server = servers.next()?;
            let start = Instant::now();
            let answer = ptr::ask(*server, address, left.min(Duration::from_secs(1)));
            self.left.set(left.saturating_sub(start.elapsed()));
            if let Ok(name) = answer {
                return name;
            }
        }
    }
}

impl Resolve for Names {
    fn host(&self, name: &str) -> Option<Ipv4Addr> {
        if looks_like_ipv6(name) {
            return None;
        }
        if let Some(address) = self.hosts.address(name) {
            return Some(address);
        }
        if !self.dns {
            return None;
        }
        let name = name.to_owned();
        let (tx, rx) = mpsc::channel();
        // The thread may outlive the time limit: a look-up in the C library cannot be interrupted.
        thread::Builder::new()
            .name("resolve".into())
            .spawn(move || {
                let address = (name.as_str(), 0)
                    .to_socket_addrs()
                    .ok()
                    .into_iter()
                    .flatten()
                    .find_map(|addr| match addr.ip() {
                        IpAddr::V4(v4) => Some(v4),
                        IpAddr::V6(_) => None,
                    });
                let _ = tx.send(address);
            })
            .ok()?;
        rx.recv_timeout(FORWARD_BUDGET).ok().flatten()
    }

    fn port(&self, name: &str, protocol: Protocol) -> Option<u16> {
        self.services.port(name, protocol)
    }

    fn host_name(&self, address: IpAddr) -> Option<String> {
        if let Some(name) = self.hosts.name(address) {
            return Some(name.to_owned());
        }
        if self.servers.is_empty() {
            return None;
        }
        if let Some(known) = self.known.borrow().get(&address) {
            return known.clone();
        }
        let name = self.ask_reverse(address);
        self.known.borrow_mut().insert(address, name.clone());
        name
    }

    fn port_name(&self, port: u16, protocol: Protocol) -> Option<String> {
        self.services.name(port, protocol).map(str::to_owned)
    }
}

/// Whether the sources of host names in `/etc/nsswitch.conf` include DNS; true if it does not list
/// sources.
fn uses_dns(nsswitch: &str) -> bool {
    nsswitch
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("hosts:"))
        .next()
        .is_none_or(|sources| {
            content(sources)
                .split_whitespace()
                .any(|source| matches!(source, "dns" | "resolve"))
        })
}

/// Returns a line without its comment.
fn content(line: &str) -> &str {
    line.split_once('#').map_or(line, |(before, _)| before)
}

/// Converts an address of `/etc/hosts` to IPv4 as the C library does: `::1` becomes 127.0.0.1.
/// `None` for other IPv6 addresses, unless they contain an IPv4 address.
fn as_v4(address: IpAddr) -> Option<Ipv4Addr> {
    match address {
        IpAddr::V4(v4) => Some(v4),
        IpAddr::V6(v6) if v6.is_loopback() => Some(Ipv4Addr::LOCALHOST),
        IpAddr::V6(v6) => v6.to_ipv4_mapped(),
    }
}

/// Whether the C library treats `name` as an IPv6 address, valid or not, and therefore does not
/// resolve it.
fn looks_like_ipv6(name: &str) -> bool {
    name.contains(':')
        && name
            .bytes()
            .all(|b| b.is_ascii_hexdigit() || b":.".contains(&b))
}

#[derive(Debug, Default)]
struct Hosts {
    addresses: HashMap<String, Ipv4Addr>,
    names: HashMap<IpAddr, String>,
}

impl Hosts {
    fn parse(text: &str) -> Self {
        let mut hosts = Self::default();
        for line in text.lines() {
            let mut words = content(line).split_whitespace();
            let Some(address) = words.next().and_then(|word| word.parse::<IpAddr>().ok()) else {
                continue;
            };
            let v4 = as_v4(address);
            let names: Vec<&str> = words.collect();
            // For each address and for each name, the first line counts. An address without a name
            // gets the empty name.
            let first = names.first().copied().unwrap_or_default();
            for address in [Some(address), v4.map(IpAddr::V4)].into_iter().flatten() {
                let entry = hosts.names.entry(address);
                entry.or_insert_with(|| first.to_owned());
            }
            for name in names {
                if let Some(v4) = v4 {
                    let entry = hosts.addresses.entry(name.to_ascii_lowercase());
                    entry.or_insert(v4);
                }
            }
        }
        hosts
    }

    fn address(&self, name: &str) -> Option<Ipv4Addr> {
        self.addresses.get(&name.to_ascii_lowercase()).copied()
    }

    fn name(&self, address: IpAddr) -> Option<&str> {
        self.names.get(&address).map(String::as_str)
    }
}

#[derive(Debug, Default)]
struct Services {
    ports: HashMap<(String, u8), u16>,
    names: HashMap<(u16, u8), String>,
}

impl Services {
    fn parse(text: &str) -> Self {
        let mut services = Self::default();
        for line in text.lines() {
            let mut words = content(line).split_whitespace();
            let (Some(name), Some(port)) = (words.next(), words.next()) else {
                continue;
            };
            let Some((port, protocol)) = port.split_once('/') else {
                continue;
            };
            let Ok(port) = port.parse::<u16>() else {
                continue;
            };
            let protocol = match protocol {
                "tcp" => Protocol::TCP.0,
                "udp" => Protocol::UDP.0,
                "sctp" => Protocol::SCTP.0,
                _ => continue,
            };
            services
                .names
                .entry((port, protocol))
                .or_insert_with(|| name.to_owned());
            for name in std::iter::once(name).chain(words) {
                services
                    .ports
                    .entry((name.to_owned(), protocol))
                    .or_insert(port);
            }
        }
        services
    }

    fn port(&self, name: &str, protocol: Protocol) -> Option<u16> {
        self.ports.get(&(name.to_owned(), protocol.0)).copied()
    }

    fn name(&self, port: u16, protocol: Protocol) -> Option<&str> {
        self.names.get(&(port, protocol.0)).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_services_files_are_parsed() {
        let names = Names::from_texts(
            "127.0.0.1 localhost\n192.0.2.1\tweb.example www # the site\n2001:db8::1 web6\n192.0.2.1 other\n",
            "http 80/tcp www\ndomain 53/udp\n",
        );
        assert_eq!(names.host("WWW"), Some(Ipv4Addr::new(192, 0, 2, 1)));
        assert_eq!(names.host("web6"), None);
        assert_eq!(
            names.host_name(IpAddr::from([192, 0, 2, 1])).as_deref(),
            Some("web.example")
        );
        assert_eq!(names.port("www", Protocol::TCP), Some(80));
        assert_eq!(names.port("www", Protocol::UDP), None);
        assert_eq!(
            names.port_name(53, Protocol::UDP).as_deref(),
            Some("domain")
        );
    }

    #[test]
    fn hosts_file_with_unusual_lines_is_parsed_as_by_c_library() {
        let names = Names::from_texts(
            "::1 loop6\n192.0.2.5\n192.0.2.6 # nobody\n::ffff:192.0.2.21 mapped\n192.0.2.7 ab:80\n192.0.2.8 ab:xy\n",
            "",
        );
        assert_eq!(names.host("loop6"), Some(Ipv4Addr::LOCALHOST));
        assert_eq!(names.host("mapped"), Some(Ipv4Addr::new(192, 0, 2, 21)));
        assert_eq!(names.host("ab:80"), None);
        assert_eq!(names.host("ab:xy"), Some(Ipv4Addr::new(192, 0, 2, 8)));
        for (address, name) in [
            ("192.0.2.5", ""),
            ("192.0.2.6", ""),
            ("192.0.2.7", "ab:80"),
            ("192.0.2.21", "mapped"),
            ("::ffff:192.0.2.21", "mapped"),
            ("127.0.0.1", "loop6"),
        ] {
            let address = address.parse().expect("the address is valid");
            assert_eq!(names.host_name(address).as_deref(), Some(name), "{address}");
        }
    }

    #[test]
    fn dns_is_used_unless_hosts_line_of_nsswitch_omits_dns() {
        assert!(!uses_dns("passwd: files\nhosts: files # dns\n"));
        assert!(uses_dns("hosts:\tfiles dns\n"));
        assert!(uses_dns(""));
    }

    #[test]
    fn total_wait_for_dead_name_servers_is_limited() {
        // A name server that never answers.
        let silent = std::net::UdpSocket::bind("127.0.0.1:0").expect("the socket can be opened");
        let names = Names {
            servers: vec![silent.local_addr().expect("the socket has an address")],
            left: Cell::new(Duration::from_millis(50)),
            ..Names::from_texts("", "")
        };
        for last in 1..=9 {
            assert_eq!(names.host_name(IpAddr::from([192, 0, 2, last])), None);
        }
        assert!(names.left.get().is_zero());
    }
}
