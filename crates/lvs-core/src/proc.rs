//! The text of `/proc/net/ip_vs` and of related files, for programs that read those files.
//!
//! The format is the kernel's. The order differs: the kernel lists services and connections in the
//! order of its hash tables; here services are listed by age, the oldest first, and connections by
//! slot.

use core::fmt::{self, Write};
use core::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::stats::{Counts, Stats};
use crate::{
    Connection, Control, Forwarding, Instant, Protocol, Service, ServiceConfig, ServiceFlags,
    ServiceKey, Shard,
};

/// The kernel's timer ticks in a second (`HZ`), the unit in which it lists persistence timeouts.
const HZ: u64 = 250;

/// `/proc/net/ip_vs`: services and their servers. `size` is the size of the hash table that is
/// shown (4096 in most kernels).
///
/// # Errors
/// Errors of `out`.
pub fn services(out: &mut impl Write, control: &Control, size: u32) -> fmt::Result {
    header(out, size)?;
    let is_mark = |service: &&Service| matches!(service.key(), ServiceKey::Mark { .. });
    let addresses = control.services().filter(|service| !is_mark(service));
    let marks = control.services().filter(is_mark);
    for entry in addresses.chain(marks) {
        service(out, entry.key(), entry.config())?;
        for entry in entry.servers() {
            let row = Row {
                addr: entry.addr(),
                forwarding: entry.forwarding(),
                weight: entry.config().weight,
                active: entry.active(),
                inactive: entry.inactive(),
            };
            server(out, &row)?;
        }
    }
    Ok(())
}

/// Writes the same text as [`services`], from the answers of a dataplane over its control socket.
///
/// # Errors
/// Errors of `out`.
#[cfg(feature = "api")]
pub fn listed(
    out: &mut impl Write,
    services: &[crate::api::ServiceInfo],
    size: u32,
) -> fmt::Result {
    use crate::api::{ServiceId, ServiceInfo};
    header(out, size)?;
    let is_mark = |info: &&ServiceInfo| matches!(info.service, ServiceId::Fwmark { .. });
    let addresses = services.iter().filter(|info| !is_mark(info));
    for info in addresses.chain(services.iter().filter(is_mark)) {
        service(out, info.service.into(), &info.config)?;
        for entry in &info.servers {
            let row = Row {
                addr: entry.server,
                forwarding: entry.config.forwarding,
                weight: entry.config.weight,
                active: entry.active,
                inactive: entry.inactive,
            };
            server(out, &row)?;
        }
    }
    Ok(())
}

fn header(out: &mut impl Write, size: u32) -> fmt::Result {
    writeln!(out, "IP Virtual Server version 1.2.1 (size={size})")?;
    out.write_str("Prot LocalAddress:Port Scheduler Flags\n")?;
    out.write_str("  -> RemoteAddress:Port Forward Weight ActiveConn InActConn\n")
}

fn service(out: &mut impl Write, key: ServiceKey, config: &ServiceConfig) -> fmt::Result {
    let scheduler = &config.scheduler;
    let ops = if config.flags.has(ServiceFlags::ONE_PACKET) {
        "ops "
    } else {
        ""
    };
    match key {
        ServiceKey::Address { protocol, addr } => {
            let v4 = addr.is_ipv4();
            write!(out, "{}  {}", Name(protocol), Addr(addr.ip(), true))?;
            write!(out, ":{:04X} {scheduler} ", addr.port())?;
            // The kernel does not show this flag for IPv6 services.
            if v4 {
                write!(out, "{ops} ")?;
            }
        }
        ServiceKey::Mark { mark, .. } => write!(out, "FWM  {mark:08X} {scheduler} {ops}")?,
    }
    if !config.flags.has(ServiceFlags::PERSISTENT) {
        return out.write_char('\n');
    }
    let ticks = u64::from(config.timeout) * HZ;
    // A prefix length is written as if it were a mask in network byte order.
    let netmask = match key.family() {
        crate::Family::V4 => config.netmask,
        crate::Family::V6 => config.netmask.swap_bytes(),
    };
    writeln!(out, "persistent {ticks} {netmask:08X}")
}

/// A line about a server.
struct Row {
    addr: SocketAddr,
    forwarding: Forwarding,
    weight: i32,
    active: u32,
    inactive: u32,
}

fn server(out: &mut impl Write, row: &Row) -> fmt::Result {
    let addr = row.addr;
    let method = match row.forwarding {
        Forwarding::Local => "Local",
        Forwarding::Tunnel => "Tunnel",
        Forwarding::Route => "Route",
        Forwarding::Nat | Forwarding::Bypass => "Masq",
        Forwarding::FullNat => "FullNat",
    };
    writeln!(
        out,
        "  -> {}:{:04X}      {method:<7} {:<6} {:<10} {:<10}",
        Addr(addr.ip(), true),
        addr.port(),
        row.weight,
        row.active,
        row.inactive
    )
}

/// First line of `/proc/net/ip_vs_conn`.
pub const CONN_HEADER: &str =
    "Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData\n";
/// First line of `/proc/net/ip_vs_conn_sync`.
pub const CONN_SYNC_HEADER: &str =
    "Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Origin Expires\n";

/// `/proc/net/ip_vs_conn`: connections of one shard, then all templates.
///
/// # Errors
/// Errors of `out`.
pub fn connections(
    out: &mut impl Write,
    control: &Control,
    shard: &Shard,
    now: Instant,
) -> fmt::Result {
    out.write_str(CONN_HEADER)?;
    for entry in shard.connections_from(0, now) {
        connection(out, &entry, None)?;
    }
    for entry in control.templates_from(0, now) {
        connection(out, &entry, control.template_engine(entry.id))?;
    }
    Ok(())
}

/// A line of `/proc/net/ip_vs_conn`; `engine` are the name and the data of a template's persistence
/// engine.
///
/// # Errors
/// Errors of `out`.
pub fn connection(
    out: &mut impl Write,
    entry: &Connection,
    engine: Option<(&str, &[u8])>,
) -> fmt::Result {
    plain(out, &entry.into(), engine)
}

fn plain(out: &mut impl Write, entry: &Entry<'_>, engine: Option<(&str, &[u8])>) -> fmt::Result {
    tuple(out, entry)?;
    write!(out, " {:<11} {:>7}", entry.state, expires(entry))?;
    if let Some((name, data)) = engine {
        write!(out, " {name} ")?;
        for &byte in data {
            // Call-IDs are of Latin-1.
            out.write_char(byte.into())?;
        }
    }
    out.write_char('\n')
}

/// `/proc/net/ip_vs_conn_sync`: connections of one shard, then all templates, with their origin.
///
/// # Errors
/// Errors of `out`.
pub fn connections_sync(
    out: &mut impl Write,
    control: &Control,
    shard: &Shard,
    now: Instant,
) -> fmt::Result {
    out.write_str(CONN_SYNC_HEADER)?;
    let connections = shard.connections_from(0, now);
    for entry in connections.chain(control.templates_from(0, now)) {
        connection_sync(out, &entry)?;
    }
    Ok(())
}

/// A line of `/proc/net/ip_vs_conn_sync`.
///
/// # Errors
/// Errors of `out`.
pub fn connection_sync(out: &mut impl Write, entry: &Connection) -> fmt::Result {
    with_origin(out, &entry.into())
}

/// The lines of `/proc/net/ip_vs_conn` and `/proc/net/ip_vs_conn_sync` for the answer of a
/// dataplane over its control socket.
///
/// # Errors
/// Errors of `conn` and `conn_sync`.
#[cfg(feature = "api")]
pub fn listed_connection(
    conn: &mut impl Write,
    conn_sync: &mut impl Write,
    info: &crate::api::ConnInfo,
) -> fmt::Result {
    let entry = Entry {
        protocol: Protocol(info.protocol),
        addrs: [info.client, info.virt, info.server],
        state: &info.state,
        expires_ms: info.expires_ms.into(),
        synced: info.synced,
    };
    let engine = info.engine.as_ref();
    plain(conn, &entry, engine.map(|(name, data)| (&**name, &**data)))?;
    with_origin(conn_sync, &entry)
}

/// A line about a connection.
struct Entry<'a> {
    protocol: Protocol,
    /// Client, virtual address, server.
    addrs: [SocketAddr; 3],
    state: &'a str,
    expires_ms: u128,
    synced: bool,
}

impl From<&Connection> for Entry<'static> {
    fn from(entry: &Connection) -> Self {
        Self {
            protocol: entry.protocol,
            addrs: [entry.client, entry.virt, entry.server],
            state: entry.state,
            expires_ms: entry.expires.as_millis(),
            synced: entry.synced,
        }
    }
}

fn with_origin(out: &mut impl Write, entry: &Entry<'_>) -> fmt::Result {
    tuple(out, entry)?;
    let origin = if entry.synced { "SYNC" } else { "LOCAL" };
    let expires = expires(entry);
    writeln!(out, " {:<11} {origin:<6} {expires:>7}", entry.state)
}

fn tuple(out: &mut impl Write, entry: &Entry<'_>) -> fmt::Result {
    write!(out, "{:<3}", Name(entry.protocol))?;
    for addr in entry.addrs {
        write!(out, " {} {:04X}", Addr(addr.ip(), false), addr.port())?;
    }
    Ok(())
}

/// Remaining whole seconds; the kernel counts milliseconds in 32 bits.
const fn expires(entry: &Entry<'_>) -> u128 {
    entry.expires_ms % (1 << 32) / 1000
}

/// `/proc/net/ip_vs_stats`: counters and rates of everything, as of the last two-second tick.
///
/// # Errors
/// Errors of `out`.
pub fn stats(out: &mut impl Write, control: &Control) -> fmt::Result {
    totals(out, &control.total_stats())
}

/// Writes the same text as [`stats`], from given counters.
///
/// # Errors
/// Errors of `out`.
pub fn totals(out: &mut impl Write, stats: &Stats) -> fmt::Result {
    out.write_str("   Total Incoming Outgoing         Incoming         Outgoing\n")?;
    out.write_str("   Conns  Packets  Packets            Bytes            Bytes\n")?;
    counts(out, "", &stats.shown)?;
    out.write_str("\n Conns/s   Pkts/s   Pkts/s          Bytes/s          Bytes/s\n")?;
    counts(out, "", &stats.rates)
}

/// `/proc/net/ip_vs_stats_percpu`: as [`stats`], with the present counters of each shard instead of
/// a CPU.
///
/// # Errors
/// Errors of `out`.
pub fn stats_percpu(out: &mut impl Write, control: &Control) -> fmt::Result {
    parts(out, control.shard_counts(), &control.total_stats())
}

/// Writes the same text as [`stats_percpu`], from given counters: those of each shard, and their
/// sum.
///
/// # Errors
/// Errors of `out`.
pub fn parts(
    out: &mut impl Write,
    shards: impl IntoIterator<Item = Counts>,
    stats: &Stats,
) -> fmt::Result {
    out.write_str("       Total Incoming Outgoing         Incoming         Outgoing\n")?;
    out.write_str("CPU    Conns  Packets  Packets            Bytes            Bytes\n")?;
    for (number, live) in shards.into_iter().enumerate() {
        write!(out, "{number:>3X} ")?;
        counts(out, "", &live)?;
    }
    counts(out, "  ~ ", &stats.shown)?;
    out.write_str("\n     Conns/s   Pkts/s   Pkts/s          Bytes/s          Bytes/s\n")?;
    counts(out, "    ", &stats.rates)
}

fn counts(out: &mut impl Write, before: &str, counts: &Counts) -> fmt::Result {
    let Counts {
        conns,
        in_packets,
        out_packets,
        in_bytes,
        out_bytes,
    } = counts;
    writeln!(
        out,
        "{before}{conns:>8X} {in_packets:>8X} {out_packets:>8X} {in_bytes:>16X} {out_bytes:>16X}"
    )
}

/// `/proc/net/ip_vs_app`: the FTP helper at these ports. The number of its connections is not
/// counted, and listed as 0.
pub fn helpers(out: &mut impl Write, ftp_ports: &[u16]) -> fmt::Result {
    out.write_str("prot port    usecnt name\n")?;
    ftp_ports.iter().try_for_each(|port| {
        let (protocol, uses, name) = (Name(Protocol::TCP), 0, "ftp");
        writeln!(out, "{protocol:<3}  {port:<7} {uses:<6} {name:<17}")
    })
}

/// A protocol as the kernel names it (`ip_vs_proto_name`).
struct Name(Protocol);

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Protocol(0) => f.pad("IP"),
            Protocol::TCP => f.pad("TCP"),
            Protocol::UDP => f.pad("UDP"),
            Protocol::SCTP => f.pad("SCTP"),
            Protocol::ICMP => f.pad("ICMP"),
            Protocol::ICMPV6 => f.pad("ICMPv6"),
            Protocol(number) => write!(f, "IP_{number}"),
        }
    }
}

/// An address: IPv4 as eight digits, IPv6 as eight groups, in brackets if the flag is set.
struct Addr(IpAddr, bool);

impl fmt::Display for Addr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            IpAddr::V4(addr) => write!(f, "{:08X}", addr.to_bits()),
            IpAddr::V6(addr) if self.1 => write!(f, "[{}]", Groups(addr)),
            IpAddr::V6(addr) => Groups(addr).fmt(f),
        }
    }
}

struct Groups(Ipv6Addr);

impl fmt::Display for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, rest @ ..] = self.0.segments();
        write!(f, "{first:04x}")?;
        rest.iter().try_for_each(|group| write!(f, ":{group:04x}"))
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::String;
    use core::time::Duration;

    use super::*;
    use crate::{ConnId, Director, Options, ServerConfig, ServiceConfig};

    #[test]
    fn ipv6_services_are_listed_as_in_the_kernel() {
        let mut director = Director::new(Options::default());
        let key = ServiceKey::tcp("[2001:db8::80]:443".parse().unwrap());
        let config = ServiceConfig {
            flags: ServiceFlags(ServiceFlags::PERSISTENT | ServiceFlags::ONE_PACKET),
            timeout: 360,
            ..ServiceConfig::new(crate::Family::V6, "mh")
        };
        director.control.add_service(key, config, None).unwrap();
        director
            .control
            .add_server(
                &key,
                "[fd00::1]:443".parse().unwrap(),
                &ServerConfig::new(1, Forwarding::Tunnel),
                Instant::ZERO,
            )
            .unwrap();
        let mut text = String::new();
        services(&mut text, &director.control, 4096).unwrap();
        let expected = "\
TCP  [2001:0db8:0000:0000:0000:0000:0000:0080]:01BB mh persistent 90000 80000000
  -> [fd00:0000:0000:0000:0000:0000:0000:0001]:01BB      Tunnel  1      0          0         
";
        assert!(text.ends_with(expected), "{text}");
    }

    #[test]
    fn connections_are_listed_as_in_the_kernel() {
        let entry = Connection {
            id: ConnId(0),
            protocol: Protocol::TCP,
            client: "192.168.1.5:49153".parse().unwrap(),
            virt: "10.0.0.1:80".parse().unwrap(),
            server: "192.168.1.10:8080".parse().unwrap(),
            state: "ESTABLISHED",
            expires: Duration::from_millis(899_999),
            method: Forwarding::Nat,
            template: false,
            synced: true,
        };
        let mut text = String::new();
        connection(&mut text, &entry, None).unwrap();
        connection_sync(&mut text, &entry).unwrap();
        let template = Connection {
            protocol: Protocol::AH,
            state: "NONE",
            expires: Duration::from_secs(4_294_968),
            ..entry
        };
        connection(&mut text, &template, Some(("sip", b"a@b"))).unwrap();
        let expected = "\
TCP C0A80105 C001 0A000001 0050 C0A8010A 1F90 ESTABLISHED     899
TCP C0A80105 C001 0A000001 0050 C0A8010A 1F90 ESTABLISHED SYNC       899
IP_51 C0A80105 C001 0A000001 0050 C0A8010A 1F90 NONE              0 sip a@b
";
        assert_eq!(text, expected);
    }

    #[test]
    #[cfg(feature = "api")]
    fn dataplane_listing_is_rendered_as_the_kernel_does() {
        let info = crate::api::ConnInfo {
            protocol: 6,
            client: "192.168.1.5:49153".parse().unwrap(),
            virt: "10.0.0.1:80".parse().unwrap(),
            server: "192.168.1.10:8080".parse().unwrap(),
            state: "ESTABLISHED".into(),
            expires_ms: 899_999,
            forwarding: Forwarding::Nat,
            template: false,
            synced: false,
            engine: Some(("sip".into(), b"a@b".to_vec())),
        };
        let (mut conn, mut sync) = (String::new(), String::new());
        listed_connection(&mut conn, &mut sync, &info).unwrap();
        let tuple = "TCP C0A80105 C001 0A000001 0050 C0A8010A 1F90 ESTABLISHED";
        assert_eq!(conn, alloc::format!("{tuple}     899 sip a@b\n"));
        assert_eq!(sync, alloc::format!("{tuple} LOCAL      899\n"));
    }

    #[test]
    fn helpers_are_listed_as_in_the_kernel() {
        let mut text = String::new();
        helpers(&mut text, &[21]).unwrap();
        let expected = "prot port    usecnt name\nTCP  21      0      ftp              \n";
        assert_eq!(text, expected);
    }
}
