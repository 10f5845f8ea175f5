//! Prints listings exactly as ipvsadm does, byte for byte.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::cmp::Ordering;
use core::fmt::{self, Write};
use core::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::command::{Format, ListOptions};
use super::resolve::Resolve;
use crate::api::{ConnInfo, ServerInfo, ServiceId, ServiceInfo, Timeouts};
use crate::sched::{self, About};
use crate::stats::Counts;
use crate::sync::{SyncDaemon, SyncRole};
use crate::tunnel::Tunnel;
use crate::{Family, Forwarding, Protocol, ServiceConfig, ServiceFlags};

const IPVS_VERSION: &str = "1.2.1";
/// Width, in characters, of the column with the protocol, address and port of an IPv4 service.
const SERVICE_WIDTH: usize = 33;
/// Width, in characters, of the column with the address and port of an IPv4 server.
const SERVER_WIDTH: usize = 28;
/// Maximum number of characters that ipvsadm reserves for an address with its port.
const ENDPOINT_MAX: usize = 59;

#[derive(Clone, Copy)]
struct Style<'a> {
    /// Source of names for addresses and ports; `None` to print numbers.
    names: Option<&'a dyn Resolve>,
    exact: bool,
}

impl fmt::Debug for Style<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Style")
            .field("numeric", &self.names.is_none())
            .field("exact", &self.exact)
            .finish()
    }
}

impl<'a> Style<'a> {
    fn new(options: &ListOptions, names: &'a dyn Resolve) -> Self {
        Self {
            names: (!options.numeric).then_some(names),
            exact: options.exact,
        }
    }
}

/// Appends the first line of a listing of all services.
pub fn banner(out: &mut String, table_size: u32) {
    put(
        out,
        format_args!("IP Virtual Server version {IPVS_VERSION} (size={table_size})\n"),
    );
}

/// Appends the two lines above a listing of services.
pub fn titles(out: &mut String, format: Format) {
    const LOCAL: &str = "Prot LocalAddress:Port";
    const REMOTE: &str = "  -> RemoteAddress:Port";
    match format {
        Format::Stats | Format::Rate => {
            let columns = if format == Format::Stats {
                ["Conns", "InPkts", "OutPkts", "InBytes", "OutBytes"]
            } else {
                ["CPS", "InPPS", "OutPPS", "InBPS", "OutBPS"]
            };
            put(out, format_args!("{LOCAL:<33}"));
            for column in columns {
                put(out, format_args!(" {column:>8}"));
            }
            put(out, format_args!("\n{REMOTE}\n"));
        }
        Format::Thresholds => put(
            out,
            format_args!(
                "{LOCAL:<33} {:<10} {:<10} {:<10} {:<10}\n{REMOTE}\n",
                "Uthreshold", "Lthreshold", "ActiveConn", "InActConn"
            ),
        ),
        Format::PersistentConn => put(
            out,
            format_args!(
                "{LOCAL:<33} {:<9} {:<11} {:<10} {:<10}\n{REMOTE}\n",
                "Weight", "PersistConn", "ActiveConn", "InActConn"
            ),
        ),
        Format::Plain => put(
            out,
            format_args!(
                "{LOCAL} Scheduler Flags\n{REMOTE}           Forward Weight ActiveConn InActConn\n"
            ),
        ),
        Format::TunInfo => put(
            out,
            format_args!(
                "{LOCAL} Scheduler Flags\n\
                 {REMOTE}           Forward TunnelInfo    Weight ActiveConn InActConn\n"
            ),
        ),
    }
}

/// Appends services and their servers, without title lines; sorted unless `options.nosort` is set.
pub fn services(
    out: &mut String,
    mut services: Vec<ServiceInfo>,
    options: &ListOptions,
    names: &dyn Resolve,
) {
    if !options.nosort {
        sort(&mut services);
    }
    let style = Style::new(options, names);
    for service in &services {
        service_line(out, service, options.format, style);
        for server in &service.servers {
            server_line(out, service, server, options.format, style);
        }
    }
}

/// Appends the lines of `-S`: the commands that create the services and servers again. As in
/// ipvsadm, they do not contain the thresholds of servers.
pub fn save(out: &mut String, mut services: Vec<ServiceInfo>, numeric: bool, names: &dyn Resolve) {
    sort(&mut services);
    let style = Style {
        names: (!numeric).then_some(names),
        exact: false,
    };
    for service in &services {
        save_service(out, service, style);
    }
}

/// Appends the two lines above a listing of connections.
pub fn conn_titles(out: &mut String, persistent_conn: bool) {
    out.push_str("IPVS connection entries\n");
    put(
        out,
        format_args!(
            "pro expire {:<11} {:<18} {:<18} ",
            "state", "source", "virtual"
        ),
    );
    if persistent_conn {
        put(
            out,
            format_args!("{:<18} {:<16} {}\n", "destination", "pe name", "pe_data"),
        );
    } else {
        out.push_str("destination\n");
    }
}

/// Appends a line of a listing of connections.
pub fn conn(out: &mut String, conn: &ConnInfo, options: &ListOptions, names: &dyn Resolve) {
    let style = Style::new(options, names);
    let protocol = Protocol(conn.protocol);
    let seconds = conn.expires_ms / 1000;
    let label = if conn.protocol == 0 {
        "IP".to_string()
    } else {
        protocol.to_string()
    };
    // The listing does not look up names of SCTP ports.
    let named = matches!(protocol, Protocol::TCP | Protocol::UDP).then_some(protocol);
    put(
        out,
        format_args!(
            "{label:<3} {:<6} {:<11} {:<18} {:<18} ",
            format_args_string(format_args!("{:02}:{:02}", seconds / 60, seconds % 60)),
            conn.state,
            endpoint(conn.client, named, style),
            endpoint(conn.virt, named, style),
        ),
    );
    let server = endpoint(conn.server, named, style);
    match &conn.engine {
        Some((engine, data)) if options.persistent_conn => put(
            out,
            format_args!(
                "{server:<16} {engine:<18} {}\n",
                String::from_utf8_lossy(data)
            ),
        ),
        _ => put(out, format_args!("{server}\n")),
    }
}

/// Appends the line of `-L --timeout`.
pub fn timeouts(out: &mut String, timeouts: &Timeouts) {
    put(
        out,
        format_args!(
            "Timeout (tcp tcpfin udp): {} {} {}\n",
            timeouts.tcp, timeouts.tcp_fin, timeouts.udp
        ),
    );
}

/// Appends the lines of `-L --daemon`, the master first.
pub fn daemons(out: &mut String, daemons: &[SyncDaemon]) {
    for (role, name) in [(SyncRole::Master, "master"), (SyncRole::Backup, "backup")] {
        for daemon in daemons.iter().filter(|daemon| daemon.role == role) {
            put(
                out,
                format_args!(
                    "{name} sync daemon (mcast={}, syncid={}, maxlen={}, group={}, port={}, ttl={})\n",
                    daemon.interface,
                    daemon.syncid,
                    daemon.maxlen.unwrap_or(1472),
                    daemon.group.map_or_else(|| "224.0.0.81".into(), address),
                    daemon.port.unwrap_or(8848),
                    daemon.ttl.unwrap_or(1),
                ),
            );
        }
    }
}

fn service_line(out: &mut String, service: &ServiceInfo, format: Format, style: Style<'_>) {
    let name = service_name(&service.service, style);
    match format {
        Format::Stats => {
            put(out, format_args!("{name:<33}"));
            counts(out, &service.stats.shown, style.exact);
        }
        Format::Rate => {
            put(out, format_args!("{name:<33}"));
            counts(out, &service.stats.rates, style.exact);
        }
        _ => {
            put(out, format_args!("{name} {}", service.config.scheduler));
            let flags = sched_flags(&service.config);
            if let Some(flags) = flags {
                put(out, format_args!(" ({flags})"));
            }
            if service.config.flags.has(ServiceFlags::PERSISTENT) {
                put(out, format_args!(" persistent {}", service.config.timeout));
                if let Some(mask) = mask(service) {
                    put(out, format_args!(" mask {mask}"));
                }
                if let Some(engine) = &service.config.engine {
                    put(out, format_args!(" pe {engine}"));
                }
            }
            if service.config.flags.has(ServiceFlags::ONE_PACKET) {
                out.push_str(" ops");
            }
        }
    }
    out.push('\n');
}

fn server_line(
    out: &mut String,
    service: &ServiceInfo,
    server: &ServerInfo,
    format: Format,
    style: Style<'_>,
) {
    let mut name = endpoint(server.server, protocol(&service.service), style);
    if server.server.is_ipv4() {
        cut(&mut name, SERVER_WIDTH);
    }
    put(out, format_args!("  -> {name:<28}"));
    let config = &server.config;
    match format {
        Format::Plain => put(
            out,
            format_args!(
                " {:<7} {:<6} {:<10} {:<10}",
                method(config.forwarding),
                config.weight,
                server.active,
                server.inactive
            ),
        ),
        Format::TunInfo => put(
            out,
            format_args!(
                " {:<7} {:<13} {:<6} {:<10} {:<10}",
                method(config.forwarding),
                tunnel_info(server),
                config.weight,
                server.active,
                server.inactive
            ),
        ),
        Format::Thresholds => put(
            out,
            format_args!(
                " {:<10} {:<10} {:<10} {:<10}",
                config.upper, config.lower, server.active, server.inactive
            ),
        ),
        Format::PersistentConn => put(
            out,
            format_args!(
                " {:<9} {:<11} {:<10} {:<10}",
                config.weight, server.persistent, server.active, server.inactive
            ),
        ),
        Format::Stats => {
            let mut shown = server.stats.shown;
            for count in [
                &mut shown.conns,
                &mut shown.in_packets,
                &mut shown.out_packets,
            ] {
                *count = low_word(*count);
            }
            counts(out, &shown, style.exact);
        }
        Format::Rate => {
            let rates = &server.stats.rates;
            for count in [rates.conns, rates.in_packets, rates.out_packets] {
                put(out, format_args!(" {:>8}", low_word(count)));
            }
            large(out, low_word(rates.in_bytes), style.exact);
            large(out, low_word(rates.out_bytes), style.exact);
        }
    }
    out.push('\n');
}

/// The lower 32 bits of a number: ipvsadm reads the 64-bit counters and rates of a server as 32-bit
/// numbers.
const fn low_word(value: u64) -> u64 {
    value & 0xffff_ffff
}

fn save_service(out: &mut String, service: &ServiceInfo, style: Style<'_>) {
    let config = &service.config;
    let name = match service.service {
        ServiceId::Fwmark { mark, family } => {
            let mark = mark.cast_signed();
            match family {
                Family::V4 => format_args_string(format_args!("-f {mark}")),
                Family::V6 => format_args_string(format_args!("-f {mark} -6")),
            }
        }
        ServiceId::Tcp { address } => rule_name("-t", address, Protocol::TCP, style),
        ServiceId::Udp { address } => rule_name("-u", address, Protocol::UDP, style),
        ServiceId::Sctp { address } => rule_name("--sctp-service", address, Protocol::SCTP, style),
    };
    put(out, format_args!("-A {name} -s {}", config.scheduler));
    if config.flags.has(ServiceFlags::PERSISTENT) {
        put(out, format_args!(" -p {}", config.timeout));
        if let Some(mask) = mask(service) {
            put(out, format_args!(" -M {mask}"));
        }
    }
    if let Some(engine) = &config.engine {
        put(out, format_args!(" --pe {engine}"));
    }
    if config.flags.has(ServiceFlags::ONE_PACKET) {
        out.push_str(" -o");
    }
    if let Some(flags) = sched_flags(config) {
        put(out, format_args!(" -b {flags}"));
    }
    out.push('\n');
    for server in &service.servers {
        let config = &server.config;
        put(
            out,
            format_args!(
                "-a {name} -r {} {} -w {}",
                endpoint(server.server, protocol(&service.service), style),
                match config.forwarding {
                    Forwarding::Nat => "-m",
                    Forwarding::FullNat => "--fullnat",
                    Forwarding::Tunnel => "-i",
                    Forwarding::Local | Forwarding::Route | Forwarding::Bypass => "-g",
                },
                config.weight
            ),
        );
        if config.forwarding == Forwarding::Tunnel {
            tunnel_options(out, config.tunnel);
        }
        out.push('\n');
    }
}

fn rule_name(option: &str, address: SocketAddr, protocol: Protocol, style: Style<'_>) -> String {
    format_args_string(format_args!(
        "{option} {}",
        endpoint(address, Some(protocol), style)
    ))
}

fn tunnel_options(out: &mut String, tunnel: Tunnel) {
    let about = tunnel.about();
    put(out, format_args!(" --tun-type {}", about.name));
    if about.has_port {
        put(out, format_args!(" --tun-port {}", tunnel.port()));
    }
    if !about.checksums.is_empty() {
        put(out, format_args!(" --tun-{}", tunnel.checksum().option()));
    }
}

fn tunnel_info(server: &ServerInfo) -> String {
    if server.config.forwarding != Forwarding::Tunnel {
        return "n/a".into();
    }
    let tunnel = server.config.tunnel;
    let about = tunnel.about();
    let mut text = String::from(about.name);
    if about.has_port {
        put(&mut text, format_args!(":{}", tunnel.port()));
    }
    if !about.checksums.is_empty() {
        put(&mut text, format_args!(":{}", tunnel.checksum().sign()));
    }
    text
}

const fn method(forwarding: Forwarding) -> &'static str {
    match forwarding {
        Forwarding::Nat => "Masq",
        Forwarding::FullNat => "FullNat",
        Forwarding::Local => "Local",
        Forwarding::Tunnel => "Tunnel",
        Forwarding::Route => "Route",
        Forwarding::Bypass => "Bypass",
    }
}

/// The protocol for the names of the servers' ports; `None` for a mark.
fn protocol(service: &ServiceId) -> Option<Protocol> {
    service.endpoint().map(|(protocol, _)| protocol)
}

fn service_name(service: &ServiceId, style: Style<'_>) -> String {
    let (label, address) = match *service {
        ServiceId::Fwmark { mark, family } => {
            let mark = mark.cast_signed();
            return match family {
                Family::V4 => format_args_string(format_args!("FWM  {mark}")),
                Family::V6 => format_args_string(format_args!("FWM  {mark} IPv6")),
            };
        }
        ServiceId::Tcp { address } => ("TCP", address),
        ServiceId::Udp { address } => ("UDP", address),
        ServiceId::Sctp { address } => ("SCTP", address),
    };
    let mut name = format_args_string(format_args!(
        "{label:<4} {}",
        endpoint(address, protocol(service), style)
    ));
    if address.is_ipv4() {
        cut(&mut name, SERVICE_WIDTH);
    }
    name
}

/// The names of the flags of a scheduler; `None` if no flag is set. The third flag of `sh` and `mh`
/// has no name.
fn sched_flags(config: &ServiceConfig) -> Option<String> {
    if !sched::ANY_FLAGS
        .iter()
        .any(|&(_, bit)| config.flags.has(bit))
    {
        return None;
    }
    let own = About::of(&config.scheduler).map_or(&[][..], |about| about.flags);
    let names = if own.is_empty() {
        sched::ANY_FLAGS
    } else {
        own
    };
    let set = names.iter().filter(|&&(_, bit)| config.flags.has(bit));
    let list: Vec<&str> = set.map(|&(name, _)| name).collect();
    Some(list.join(","))
}

/// The persistence mask as text; `None` if it covers the whole address.
fn mask(service: &ServiceInfo) -> Option<String> {
    let mask = service.config.netmask;
    match crate::ServiceKey::from(service.service).family() {
        Family::V4 => (mask != u32::MAX).then(|| core::net::Ipv4Addr::from(mask).to_string()),
        Family::V6 => (mask != 128).then(|| mask.to_string()),
    }
}

fn endpoint(addr: SocketAddr, protocol: Option<Protocol>, style: Style<'_>) -> String {
    let mut text = String::new();
    let host = style
        .names
        .and_then(|names| names.host_name(addr.ip()))
        .unwrap_or_else(|| address(addr.ip()));
    if addr.is_ipv4() {
        text.push_str(&host);
    } else {
        put(&mut text, format_args!("[{host}]"));
    }
    let port = style
        .names
        .zip(protocol)
        .and_then(|(names, protocol)| names.port_name(addr.port(), protocol));
    match port {
        Some(port) => put(&mut text, format_args!(":{port}")),
        None => put(&mut text, format_args!(":{}", addr.port())),
    }
    cut(&mut text, ENDPOINT_MAX);
    text
}

/// An address as `inet_ntop` formats it: like Rust, except for IPv4-compatible addresses
/// (`::192.0.2.1`).
fn address(address: IpAddr) -> String {
    match address {
        IpAddr::V6(v6) if is_compatible(v6) => {
            let [.., high, low] = v6.segments();
            let v4 = core::net::Ipv4Addr::from((u32::from(high) << 16) | u32::from(low));
            format_args_string(format_args!("::{v4}"))
        }
        other => other.to_string(),
    }
}

fn is_compatible(address: Ipv6Addr) -> bool {
    let groups = address.segments();
    groups[..6] == [0; 6] && groups[6] != 0
}

fn cut(text: &mut String, width: usize) {
    if let Some((at, _)) = text.char_indices().nth(width) {
        text.truncate(at);
    }
}

fn counts(out: &mut String, counts: &Counts, exact: bool) {
    for value in [
        counts.conns,
        counts.in_packets,
        counts.out_packets,
        counts.in_bytes,
        counts.out_bytes,
    ] {
        large(out, value, exact);
    }
}

/// Appends a number, right-aligned in nine characters. A number of more than eight digits is
/// abbreviated, or with `exact` written in full after a space.
fn large(out: &mut String, value: u64, exact: bool) {
    const UNITS: [(u64, u64, char); 3] = [
        (1_000_000_000, 1_000, 'K'),
        (100_000_000_000, 1_000_000, 'M'),
        (100_000_000_000_000, 1_000_000_000, 'G'),
    ];
    if value < 100_000_000 {
        put(out, format_args!("{value:>9}"));
    } else if exact {
        put(out, format_args!(" {value}"));
    } else {
        let (unit, letter) = UNITS
            .into_iter()
            .find(|&(below, _, _)| value < below)
            .map_or((1_000_000_000_000, 'T'), |(_, unit, letter)| (unit, letter));
        put(out, format_args!("{:>8}{letter}", value / unit));
    }
}

fn sort(services: &mut Vec<ServiceInfo>) {
    let list = core::mem::take(services);
    *services = merge_sort(list, &compare_services);
    for service in services.iter_mut() {
        let servers = core::mem::take(&mut service.servers);
        service.servers = merge_sort(servers, &|a: &ServerInfo, b: &ServerInfo| {
            compare_endpoints(a.server, b.server)
        });
    }
}

/// The merge sort of the C library. `compare` may be inconsistent; the order then depends on where
/// this algorithm divides the list, and on its choice among equal elements.
fn merge_sort<T>(mut list: Vec<T>, compare: &dyn Fn(&T, &T) -> Ordering) -> Vec<T> {
    if list.len() < 2 {
        return list;
    }
    let len = list.len();
    let right = list.split_off(len / 2);
    let mut left = merge_sort(list, compare).into_iter().peekable();
    let mut right = merge_sort(right, compare).into_iter().peekable();
    let mut sorted = Vec::with_capacity(len);
    while let (Some(a), Some(b)) = (left.peek(), right.peek()) {
        if compare(a, b) == Ordering::Greater {
            sorted.extend(right.next());
        } else {
            sorted.extend(left.next());
        }
    }
    sorted.extend(left);
    sorted.extend(right);
    sorted
}

/// The sign of the difference of two numbers as a 32-bit integer: wrong if the numbers differ by
/// 2^31 or more, as in ipvsadm.
fn difference(a: u32, b: u32) -> Ordering {
    a.wrapping_sub(b).cast_signed().cmp(&0)
}

fn compare_services(a: &ServiceInfo, b: &ServiceInfo) -> Ordering {
    // Mark, family (with the numbers of Linux), protocol, address and port.
    let key = |id: &ServiceId| {
        let nowhere = |family| match family {
            Family::V4 => SocketAddr::from(([0; 4], 0)),
            Family::V6 => SocketAddr::from(([0; 16], 0)),
        };
        let (mark, protocol, address) = match *id {
            ServiceId::Fwmark { mark, family } => (mark, Protocol(0), nowhere(family)),
            ServiceId::Tcp { address } => (0, Protocol::TCP, address),
            ServiceId::Udp { address } => (0, Protocol::UDP, address),
            ServiceId::Sctp { address } => (0, Protocol::SCTP, address),
        };
        let family = if address.is_ipv4() { 2 } else { 10 };
        (mark, family, u32::from(protocol.0), address)
    };
    let (a, b) = (key(&a.service), key(&b.service));
    difference(a.0, b.0)
        .then_with(|| difference(a.1, b.1))
        .then_with(|| difference(a.2, b.2))
        .then_with(|| compare_endpoints(a.3, b.3))
}

fn compare_endpoints(a: SocketAddr, b: SocketAddr) -> Ordering {
    words(a.ip())
        .into_iter()
        .zip(words(b.ip()))
        .map(|(a, b)| difference(a, b))
        .find(|order| order.is_ne())
        .unwrap_or_else(|| difference(u32::from(a.port()), u32::from(b.port())))
}

/// An address as four 32-bit words. An IPv4 address is the first word.
fn words(address: IpAddr) -> [u32; 4] {
    match address {
        IpAddr::V4(v4) => [u32::from(v4), 0, 0, 0],
        IpAddr::V6(v6) => {
            let bits = u128::from(v6);
            #[expect(
                clippy::cast_possible_truncation,
                reason = "the cast takes the lowest word"
            )]
            [96, 64, 32, 0].map(|shift| (bits >> shift) as u32)
        }
    }
}

fn put(out: &mut String, args: fmt::Arguments<'_>) {
    out.write_fmt(args)
        .expect("writing to a string does not fail");
}

fn format_args_string(args: fmt::Arguments<'_>) -> String {
    alloc::fmt::format(args)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ServerConfig;
    use crate::ipvsadm::{Numeric, What};
    use crate::stats::Stats;

    fn number(value: u64, exact: bool) -> String {
        let mut out = String::new();
        large(&mut out, value, exact);
        out
    }

    #[test]
    fn listing_shortens_large_numbers_unless_exact() {
        assert_eq!(number(99_999_999, false), " 99999999");
        assert_eq!(number(100_000_000, false), "  100000K");
        assert_eq!(number(999_999_999, false), "  999999K");
        assert_eq!(number(1_000_000_000, false), "    1000M");
        assert_eq!(number(100_000_000_000, false), "     100G");
        assert_eq!(number(100_000_000_000_000, false), "     100T");
        assert_eq!(number(123_456_789_012, true), " 123456789012");
    }

    #[test]
    fn listing_sorts_addresses_like_ipvsadm() {
        let at = |text: &str| text.parse::<SocketAddr>().expect("the address is valid");
        assert_eq!(
            compare_endpoints(at("192.168.0.1:80"), at("10.0.0.1:80")),
            Ordering::Less
        );
        assert_eq!(
            compare_endpoints(at("[fd00::1]:80"), at("10.0.0.1:80")),
            Ordering::Less
        );
    }

    #[test]
    fn listed_server_counters_wrap_like_ipvsadm() {
        let counts = Counts {
            conns: 1 << 32,
            in_packets: (1 << 32) + 7,
            in_bytes: 1 << 40,
            ..Counts::default()
        };
        let service = ServiceInfo {
            service: ServiceId::Tcp {
                address: SocketAddr::from(([192, 0, 2, 1], 80)),
            },
            config: ServiceConfig::new(Family::V4, "rr"),
            owner: None,
            stats: Stats {
                shown: counts,
                ..Stats::default()
            },
            refused: 0,
            refusals: Vec::new(),
            drops: Vec::new(),
            servers: alloc::vec![ServerInfo {
                stats: Stats {
                    shown: counts,
                    ..Stats::default()
                },
                ..ServerInfo::new(
                    SocketAddr::from(([10, 0, 0, 1], 80)),
                    ServerConfig::new(1, Forwarding::Nat)
                )
            }],
        };
        let options = ListOptions {
            what: What::Services,
            format: Format::Stats,
            numeric: true,
            ..ListOptions::default()
        };
        let mut out = String::new();
        services(&mut out, alloc::vec![service], &options, &Numeric);
        assert_eq!(
            out,
            "TCP  192.0.2.1:80                    4294M    4294M        0    1099G        0\n  \
             -> 10.0.0.1:80                         0        7        0    1099G        0\n"
        );
    }
}
