//! The text of `/proc/net/ip_vs` and of related files, for programs that read those files.
//!
//! The format is the kernel's. The order differs: the kernel lists services and connections in the
//! order of its hash tables. Here services are listed by age, the oldest first, and the services of
//! firewall marks last; connections are listed by slot.

use core::fmt::{self, Write};
use core::net::{IpAddr, Ipv6Addr};

use crate::api::{ConnInfo, Info, ServerInfo, ServiceId, ServiceInfo};
use crate::stats::Counts;
use crate::{Forwarding, Protocol, ServiceConfig, ServiceFlags, ServiceKey};

/// The kernel's timer ticks in a second (`HZ`), the unit in which it lists persistence timeouts.
const HZ: u64 = 250;

/// Writes `/proc/net/ip_vs`: services and their servers. `size` is the size of the hash table that
/// is shown (4096 in most kernels).
///
/// # Errors
/// Errors of `out`.
pub fn services(out: &mut impl Write, services: &[ServiceInfo], size: u32) -> fmt::Result {
    header(out, size)?;
    let is_mark = |info: &&ServiceInfo| matches!(info.service, ServiceId::Fwmark { .. });
    let addresses = services.iter().filter(|info| !is_mark(info));
    for info in addresses.chain(services.iter().filter(is_mark)) {
        service(out, info.service.into(), &info.config)?;
        for entry in &info.servers {
            server(out, entry)?;
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

fn server(out: &mut impl Write, entry: &ServerInfo) -> fmt::Result {
    let addr = entry.server;
    let method = match entry.config.forwarding {
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
        entry.config.weight,
        entry.active,
        entry.inactive
    )
}

/// First line of `/proc/net/ip_vs_conn`.
pub const CONN_HEADER: &str =
    "Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData\n";
/// First line of `/proc/net/ip_vs_conn_sync`.
pub const CONN_SYNC_HEADER: &str =
    "Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Origin Expires\n";

/// Writes the lines of `/proc/net/ip_vs_conn` and `/proc/net/ip_vs_conn_sync` about a connection.
///
/// # Errors
/// Errors of `conn` and `conn_sync`.
pub fn connection(
    conn: &mut impl Write,
    conn_sync: &mut impl Write,
    info: &ConnInfo,
) -> fmt::Result {
    plain(conn, info)?;
    with_origin(conn_sync, info)
}

fn plain(out: &mut impl Write, info: &ConnInfo) -> fmt::Result {
    tuple(out, info)?;
    write!(out, " {:<11} {:>7}", info.state, expires(info))?;
    if let Some((name, data)) = &info.engine {
        write!(out, " {name} ")?;
        for &byte in data {
            // The bytes of a Call-ID are read as Latin-1.
            out.write_char(byte.into())?;
        }
    }
    out.write_char('\n')
}

fn with_origin(out: &mut impl Write, info: &ConnInfo) -> fmt::Result {
    tuple(out, info)?;
    let origin = if info.synced { "SYNC" } else { "LOCAL" };
    let expires = expires(info);
    writeln!(out, " {:<11} {origin:<6} {expires:>7}", info.state)
}

fn tuple(out: &mut impl Write, info: &ConnInfo) -> fmt::Result {
    write!(out, "{:<3}", Name(Protocol(info.protocol)))?;
    for addr in [info.client, info.virt, info.server] {
        write!(out, " {} {:04X}", Addr(addr.ip(), false), addr.port())?;
    }
    Ok(())
}

/// Remaining whole seconds. As in the kernel, only the lower 32 bits of the milliseconds are used.
const fn expires(info: &ConnInfo) -> u64 {
    info.expires_ms % (1 << 32) / 1000
}

/// Writes the file named `file` of `/proc/net` from `info`: `ip_vs_app`, `ip_vs_stats` or
/// `ip_vs_stats_percpu`.
///
/// # Errors
/// Errors of `out`, and an error for any other `file`.
pub fn of_info(out: &mut impl Write, file: &str, info: &Info) -> fmt::Result {
    match file {
        "ip_vs_app" => helpers(out, &info.ftp_ports),
        "ip_vs_stats" => totals(out, info),
        "ip_vs_stats_percpu" => parts(out, info),
        _ => Err(fmt::Error),
    }
}

/// Writes `ip_vs_stats`: counters and rates of the whole director, as of the last two-second tick.
fn totals(out: &mut impl Write, info: &Info) -> fmt::Result {
    out.write_str("   Total Incoming Outgoing         Incoming         Outgoing\n")?;
    out.write_str("   Conns  Packets  Packets            Bytes            Bytes\n")?;
    counts(out, "", &info.total.shown)?;
    out.write_str("\n Conns/s   Pkts/s   Pkts/s          Bytes/s          Bytes/s\n")?;
    counts(out, "", &info.total.rates)
}

/// Writes `ip_vs_stats_percpu`: as [`totals`], with the present counters of each worker instead of
/// each CPU.
fn parts(out: &mut impl Write, info: &Info) -> fmt::Result {
    out.write_str("       Total Incoming Outgoing         Incoming         Outgoing\n")?;
    out.write_str("CPU    Conns  Packets  Packets            Bytes            Bytes\n")?;
    for (number, worker) in info.workers.iter().enumerate() {
        write!(out, "{number:>3X} ")?;
        counts(out, "", &worker.counts)?;
    }
    counts(out, "  ~ ", &info.total.shown)?;
    out.write_str("\n     Conns/s   Pkts/s   Pkts/s          Bytes/s          Bytes/s\n")?;
    counts(out, "    ", &info.total.rates)
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

/// Writes `ip_vs_app`: the FTP helper at these ports. Its connections are not counted: their number
/// is listed as 0.
fn helpers(out: &mut impl Write, ftp_ports: &[u16]) -> fmt::Result {
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

/// An address: IPv4 as eight hexadecimal digits, IPv6 as eight groups, in brackets if the flag is
/// set.
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
    use alloc::vec;

    use super::*;
    use crate::ServerConfig;
    use crate::stats::Stats;

    #[test]
    fn proc_file_lists_ipv6_services_as_the_kernel_does() {
        let key = ServiceKey::tcp("[2001:db8::80]:443".parse().unwrap());
        let info = ServiceInfo {
            service: key.into(),
            config: ServiceConfig {
                flags: ServiceFlags(ServiceFlags::PERSISTENT | ServiceFlags::ONE_PACKET),
                timeout: 360,
                ..ServiceConfig::new(crate::Family::V6, "mh")
            },
            owner: None,
            stats: Stats::default(),
            refused: 0,
            refusals: vec![],
            drops: vec![],
            servers: vec![ServerInfo::new(
                "[fd00::1]:443".parse().unwrap(),
                ServerConfig::new(1, Forwarding::Tunnel),
            )],
        };
        let mut text = String::new();
        services(&mut text, &[info], 4096).unwrap();
        let expected = "\
TCP  [2001:0db8:0000:0000:0000:0000:0000:0080]:01BB mh persistent 90000 80000000
  -> [fd00:0000:0000:0000:0000:0000:0000:0001]:01BB      Tunnel  1      0          0         
";
        assert!(text.ends_with(expected), "{text}");
    }

    #[test]
    fn proc_file_lists_connections_as_the_kernel_does() {
        let info = ConnInfo {
            protocol: 6,
            client: "192.168.1.5:49153".parse().unwrap(),
            virt: "10.0.0.1:80".parse().unwrap(),
            server: "192.168.1.10:8080".parse().unwrap(),
            state: "ESTABLISHED".into(),
            expires_ms: 899_999,
            forwarding: Forwarding::Nat,
            template: false,
            synced: true,
            engine: None,
        };
        let template = ConnInfo {
            protocol: Protocol::AH.0,
            state: "NONE".into(),
            expires_ms: 4_294_968_000,
            synced: false,
            engine: Some(("sip".into(), b"a@b".to_vec())),
            ..info.clone()
        };
        let (mut conn, mut conn_sync) = (String::new(), String::new());
        for info in [info, template] {
            connection(&mut conn, &mut conn_sync, &info).unwrap();
        }
        let expected = "\
TCP C0A80105 C001 0A000001 0050 C0A8010A 1F90 ESTABLISHED     899
IP_51 C0A80105 C001 0A000001 0050 C0A8010A 1F90 NONE              0 sip a@b
";
        assert_eq!(conn, expected);
        let expected = "\
TCP C0A80105 C001 0A000001 0050 C0A8010A 1F90 ESTABLISHED SYNC       899
IP_51 C0A80105 C001 0A000001 0050 C0A8010A 1F90 NONE        LOCAL        0
";
        assert_eq!(conn_sync, expected);
    }

    #[test]
    fn proc_file_lists_helpers_as_the_kernel_does() {
        let mut text = String::new();
        helpers(&mut text, &[21]).unwrap();
        let expected = "prot port    usecnt name\nTCP  21      0      ftp              \n";
        assert_eq!(text, expected);
    }
}
