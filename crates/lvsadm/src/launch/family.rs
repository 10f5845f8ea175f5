//! The generic netlink family `IPVS`: a dataplane answers the requests of programs.
//!
//! Numbers are those of `linux/ip_vs.h`; the tests compare the answers with recordings of a kernel.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use lvs_core::api::{Call, ServerInfo, ServerSpec, ServiceId, ServiceInfo, ServiceSpec, Timeouts};
use lvs_core::stats::Stats;
use lvs_core::sync::{SyncDaemon, SyncRole};
use lvs_core::tunnel::{Tunnel, TunnelChecksum};
use lvs_core::{Family, Forwarding, ServerConfig, ServiceConfig, ServiceFlags};
use nix::errno::Errno;
use nix::libc;

use super::wire::{self, Attributes, Message, Writer};

/// The message type of generic netlink's controller (`GENL_ID_CTRL`).
const CONTROLLER: u16 = 0x10;
const GET_FAMILY: u8 = 3;
const NEW_FAMILY: u8 = 1;

/// The number of the netlink family. The kernel numbers its own families from 0x13 up.
pub(super) const FAMILY: u16 = 1000;
const NAME: &str = "IPVS";
/// The version that the family reports: IPVS 1.2.1.
pub(super) const VERSION: u32 = 0x0001_0201;
/// The highest attribute number that the family reports.
const ATTRIBUTES: u32 = 6;

/// Maximum number of bytes in a datagram of a dump: old libraries have a buffer of one page.
const DATAGRAM: usize = 3584;

const NEW_SERVICE: u8 = 1;
const SET_SERVICE: u8 = 2;
const DEL_SERVICE: u8 = 3;
const GET_SERVICE: u8 = 4;
const NEW_DEST: u8 = 5;
const SET_DEST: u8 = 6;
const DEL_DEST: u8 = 7;
const GET_DEST: u8 = 8;
const NEW_DAEMON: u8 = 9;
const DEL_DAEMON: u8 = 10;
const GET_DAEMON: u8 = 11;
const SET_CONFIG: u8 = 12;
const GET_CONFIG: u8 = 13;
const SET_INFO: u8 = 14;
const GET_INFO: u8 = 15;
const ZERO: u8 = 16;
const FLUSH: u8 = 17;

const SERVICE: u16 = 1;
const DEST: u16 = 2;
const DAEMON: u16 = 3;
const TIMEOUT_TCP: u16 = 4;
const TIMEOUT_TCP_FIN: u16 = 5;
const TIMEOUT_UDP: u16 = 6;

/// The flag of a service that is in the table (`IP_VS_SVC_F_HASHED`).
pub(super) const HASHED: u32 = 2;

/// The calls to a dataplane that the interfaces of IPVS need.
pub(super) trait Dataplane {
    fn change(&mut self, call: Call) -> Result<(), Errno>;
    /// All services, or one service; [`Errno::ESRCH`] if it does not exist.
    fn services(&mut self, one: Option<ServiceId>) -> Result<Vec<ServiceInfo>, Errno>;
    fn daemons(&mut self) -> Result<Vec<SyncDaemon>, Errno>;
    fn timeouts(&mut self) -> Result<Timeouts, Errno>;
    fn table_size(&mut self) -> Result<u32, Errno>;
}

/// Whether `message` is for this family, or asks the controller about this family.
pub(super) fn is_ours(message: &Message<'_>) -> bool {
    if message.kind != CONTROLLER {
        return message.kind == FAMILY;
    }
    match message.command() {
        Some((GET_FAMILY, attributes)) if !message.is_dump() => {
            attributes.get(2).map(wire::text).as_deref() == Some(NAME)
                || attributes.u16(1) == Some(FAMILY)
        }
        _ => false,
    }
}

/// Answers `request` with datagrams for the socket with the netlink port `port`.
pub(super) fn answer(
    request: &Message<'_>,
    port: u32,
    dataplane: &mut dyn Dataplane,
) -> Vec<Vec<u8>> {
    let asks = Ask { request, port };
    let result = match request.command() {
        _ if !request.is_request() => Ok(Vec::new()),
        _ if request.kind == CONTROLLER => Ok(vec![asks.family()]),
        None => Err(Errno::EINVAL),
        Some((command, attributes)) if request.is_dump() => {
            // A dump ends with its own message, and has no acknowledgement.
            match asks.dump(command, attributes, dataplane) {
                Ok(datagrams) => return datagrams,
                Err(errno) => Err(errno),
            }
        }
        Some((command, attributes)) => asks.one(command, attributes, dataplane),
    };
    match result {
        Ok(mut datagrams) => {
            if request.flags & wire::ACK != 0 {
                datagrams.push(wire::error(request, port, 0));
            }
            datagrams
        }
        Err(errno) => vec![wire::error(request, port, errno as i32)],
    }
}

/// A request, and the socket for its answers.
struct Ask<'a> {
    request: &'a Message<'a>,
    port: u32,
}

impl Ask<'_> {
    fn message(&self, flags: u16, command: u8) -> Writer {
        Writer::generic(FAMILY, flags, self.request, self.port, (command, 1))
    }

    fn family(&self) -> Vec<u8> {
        let head = (NEW_FAMILY, 2);
        let mut message = Writer::generic(CONTROLLER, 0, self.request, self.port, head);
        message.text(2, NAME);
        message.u16(1, FAMILY);
        message.u32(3, 1);
        message.u32(4, 0);
        message.u32(5, ATTRIBUTES);
        message.nest(6, |message| {
            let commands = (NEW_SERVICE..=FLUSH).filter(|command| *command != SET_INFO);
            for (index, command) in (1..).zip(commands) {
                message.nest(index, |message| {
                    message.u32(1, command.into());
                    // The flags: needs CAP_NET_ADMIN (1), answers requests (2), dumps (4), has a
                    // policy (8).
                    let flags = match command {
                        GET_DEST | GET_DAEMON => 5,
                        GET_SERVICE => 15,
                        _ => 11,
                    };
                    message.u32(2, flags);
                });
            }
        });
        message.finish()
    }

    fn dump(
        &self,
        command: u8,
        attributes: Attributes<'_>,
        dataplane: &mut dyn Dataplane,
    ) -> Result<Vec<Vec<u8>>, Errno> {
        let mut dump = Dump::default();
        let mut item = |command, write: &dyn Fn(&mut Writer)| {
            let mut message = self.message(wire::MULTI, command);
            write(&mut message);
            dump.push(message.finish());
        };
        match command {
            GET_SERVICE => {
                for service in dataplane.services(None)? {
                    item(NEW_SERVICE, &|message| put_service(message, &service));
                }
            }
            GET_DEST => {
                // A service that does not exist has no servers.
                let id = attributes.nested(SERVICE).ok_or(Errno::EINVAL);
                let found = match id.and_then(service_id) {
                    Ok((id, _)) => match dataplane.services(Some(id)) {
                        Err(Errno::ESRCH) => Vec::new(),
                        other => other?,
                    },
                    Err(_) => Vec::new(),
                };
                for server in found.iter().flat_map(|service| &service.servers) {
                    item(NEW_DEST, &|message| put_server(message, server));
                }
            }
            GET_DAEMON => {
                // The kernel lists the master first.
                let mut daemons = dataplane.daemons()?;
                daemons.sort_by_key(|daemon| daemon.role != SyncRole::Master);
                for daemon in daemons {
                    item(NEW_DAEMON, &|message| put_daemon(message, &daemon));
                }
            }
            _ => return Err(Errno::EOPNOTSUPP),
        }
        dump.push(wire::done(self.request, self.port));
        Ok(dump.finish())
    }

    fn one(
        &self,
        command: u8,
        attributes: Attributes<'_>,
        dataplane: &mut dyn Dataplane,
    ) -> Result<Vec<Vec<u8>>, Errno> {
        match command {
            GET_SERVICE => {
                let service = attributes.nested(SERVICE).ok_or(Errno::EINVAL)?;
                let (id, _) = service_id(service)?;
                let found = dataplane.services(Some(id))?;
                let mut message = self.message(0, NEW_SERVICE);
                put_service(&mut message, found.first().ok_or(Errno::ESRCH)?);
                Ok(vec![message.finish()])
            }
            GET_CONFIG => {
                let timeouts = dataplane.timeouts()?;
                let mut message = self.message(0, SET_CONFIG);
                message.u32(TIMEOUT_TCP, timeouts.tcp);
                message.u32(TIMEOUT_TCP_FIN, timeouts.tcp_fin);
                message.u32(TIMEOUT_UDP, timeouts.udp);
                Ok(vec![message.finish()])
            }
            GET_INFO => {
                let size = dataplane.table_size()?;
                let mut message = self.message(0, SET_INFO);
                message.u32(1, VERSION);
                message.u32(2, size);
                Ok(vec![message.finish()])
            }
            _ => {
                let call = change(command, attributes, dataplane)?;
                dataplane.change(call)?;
                Ok(Vec::new())
            }
        }
    }
}

/// Converts a command that changes the configuration to the call for the dataplane.
fn change(
    command: u8,
    attributes: Attributes<'_>,
    dataplane: &mut dyn Dataplane,
) -> Result<Call, Errno> {
    match command {
        FLUSH => return Ok(Call::ServiceFlush {}),
        SET_CONFIG => {
            let timeout = |number| attributes.u32(number).unwrap_or(0);
            return Ok(Call::TimeoutsSet(Timeouts {
                tcp: timeout(TIMEOUT_TCP),
                tcp_fin: timeout(TIMEOUT_TCP_FIN),
                udp: timeout(TIMEOUT_UDP),
            }));
        }
        NEW_DAEMON | DEL_DAEMON => {
            let daemon = attributes.nested(DAEMON).ok_or(Errno::EINVAL)?;
            return daemon_change(command, daemon);
        }
        ZERO if attributes.get(SERVICE).is_none() => {
            return Ok(Call::ServiceZero { service: None });
        }
        NEW_SERVICE..=DEL_SERVICE | NEW_DEST | SET_DEST | DEL_DEST | ZERO => {}
        _ => return Err(Errno::EOPNOTSUPP),
    }
    let of_service = attributes.nested(SERVICE).ok_or(Errno::EINVAL)?;
    let (service, family) = service_id(of_service)?;
    Ok(match command {
        NEW_SERVICE => Call::ServiceAdd(ServiceSpec {
            service,
            config: service_config(of_service, family, None)?,
            owner: None,
        }),
        SET_SERVICE => {
            // Missing attributes are an error, whether or not the service exists.
            service_config(of_service, family, None)?;
            let found = dataplane.services(Some(service))?;
            let now = found.first().ok_or(Errno::ESRCH)?;
            Call::ServiceEdit(ServiceSpec {
                service,
                config: service_config(of_service, family, Some(&now.config))?,
                owner: now.owner.clone(),
            })
        }
        DEL_SERVICE => Call::ServiceDelete { service },
        ZERO => Call::ServiceZero {
            service: Some(service),
        },
        _ => {
            let of_server = attributes.nested(DEST).ok_or(Errno::EINVAL);
            let read = of_server.and_then(|of| server_config(of, family, command != DEL_DEST));
            let (server, config) = match read {
                Ok(read) => read,
                Err(errno) => {
                    // The kernel looks for the service before it reads the server.
                    dataplane.services(Some(service))?;
                    return Err(errno);
                }
            };
            match command {
                DEL_DEST => Call::ServerDelete { service, server },
                _ => {
                    let spec = ServerSpec {
                        service,
                        server,
                        config,
                    };
                    match command {
                        NEW_DEST => Call::ServerAdd(spec),
                        _ => Call::ServerEdit(spec),
                    }
                }
            }
        }
    })
}

fn daemon_change(command: u8, daemon: Attributes<'_>) -> Result<Call, Errno> {
    let role = match daemon.u32(1) {
        Some(1) => SyncRole::Master,
        Some(2) => SyncRole::Backup,
        _ => return Err(Errno::EINVAL),
    };
    let syncid = daemon.u32(3).map(u8::try_from).transpose();
    let syncid = syncid.map_err(|_| Errno::EINVAL)?;
    if command == DEL_DAEMON {
        let syncid = syncid.unwrap_or(0);
        return Ok(Call::DaemonStop { role, syncid });
    }
    let (Some(interface), Some(syncid)) = (daemon.text(2), syncid) else {
        return Err(Errno::EINVAL);
    };
    let group = match (daemon.get(5), daemon.get(6)) {
        (Some(group), _) => Some(address(group, Family::V4)?),
        (None, Some(group)) => Some(address(group, Family::V6)?),
        (None, None) => None,
    };
    Ok(Call::DaemonStart(SyncDaemon {
        role,
        interface,
        syncid,
        maxlen: daemon.u16(4).filter(|length| *length != 0),
        group,
        port: daemon.u16(7).filter(|port| *port != 0),
        ttl: daemon.u8(8).filter(|ttl| *ttl != 0),
    }))
}

fn address(bytes: &[u8], family: Family) -> Result<IpAddr, Errno> {
    let address = match family {
        Family::V4 => bytes
            .first_chunk::<4>()
            .map(|bytes| Ipv4Addr::from(*bytes).into()),
        Family::V6 => bytes
            .first_chunk::<16>()
            .map(|bytes| Ipv6Addr::from(*bytes).into()),
    };
    address.ok_or(Errno::EINVAL)
}

fn family(number: u16) -> Result<Family, Errno> {
    match i32::from(number) {
        libc::AF_INET => Ok(Family::V4),
        libc::AF_INET6 => Ok(Family::V6),
        _ => Err(Errno::EAFNOSUPPORT),
    }
}

fn family_number(family: Family) -> u16 {
    let number = match family {
        Family::V4 => libc::AF_INET,
        Family::V6 => libc::AF_INET6,
    };
    u16::try_from(number).unwrap_or(0)
}

/// Reads the service from attributes. A missing attribute is reported before an invalid one.
fn service_id(of: Attributes<'_>) -> Result<(ServiceId, Family), Errno> {
    let number = of.u16(1).ok_or(Errno::EINVAL)?;
    if let Some(mark) = of.u32(5) {
        let family = family(number)?;
        return Ok((ServiceId::Fwmark { mark, family }, family));
    }
    let (Some(protocol), Some(bytes), Some(port)) = (of.u16(2), of.get(3), of.be16(4)) else {
        return Err(Errno::EINVAL);
    };
    let family = family(number)?;
    let address = SocketAddr::new(address(bytes, family)?, port);
    let id = service_of(protocol, address).ok_or(Errno::ESRCH)?;
    Ok((id, family))
}

/// The service of a protocol and an address; `None` for a protocol that no service has.
pub(super) fn service_of(protocol: u16, address: SocketAddr) -> Option<ServiceId> {
    match i32::from(protocol) {
        libc::IPPROTO_TCP => Some(ServiceId::Tcp { address }),
        libc::IPPROTO_UDP => Some(ServiceId::Udp { address }),
        libc::IPPROTO_SCTP => Some(ServiceId::Sctp { address }),
        _ => None,
    }
}

/// Reads the settings of a service. `now` contains its present settings: the flags outside of the
/// program's mask, and the settings that the kernel's IPVS does not have, are kept.
fn service_config(
    of: Attributes<'_>,
    family: Family,
    now: Option<&ServiceConfig>,
) -> Result<ServiceConfig, Errno> {
    let (Some(scheduler), Some(flags), Some(timeout), Some(netmask)) =
        (of.text(6), of.get(7), of.u32(8), of.u32(9))
    else {
        return Err(Errno::EINVAL);
    };
    let (Some(flags), Some(mask)) = (wire::u32_at(flags, 0), wire::u32_at(flags, 4)) else {
        return Err(Errno::EINVAL);
    };
    let mut config = now.map_or_else(|| ServiceConfig::new(family, ""), Clone::clone);
    config.scheduler = scheduler;
    let flags = config.flags.0 & !mask | flags & mask;
    config.flags = ServiceFlags(flags & ServiceFlags::ALL);
    config.timeout = timeout;
    config.netmask = match family {
        Family::V4 => u32::from_be(netmask),
        Family::V6 => netmask,
    };
    config.engine = of.text(11).filter(|name| !name.is_empty());
    Ok(config)
}

/// The forwarding method in a server's flags; `None` for a number without a method.
pub(super) const fn forwarding(flags: u32) -> Option<Forwarding> {
    Some(match flags & 7 {
        0 => Forwarding::Nat,
        1 => Forwarding::Local,
        2 => Forwarding::Tunnel,
        3 => Forwarding::Route,
        4 => Forwarding::Bypass,
        _ => return None,
    })
}

/// The number of a forwarding method. Full NAT, which the kernel does not have, is reported as NAT.
pub(super) const fn forwarding_number(forwarding: Forwarding) -> u32 {
    match forwarding {
        Forwarding::Nat | Forwarding::FullNat => 0,
        Forwarding::Local => 1,
        Forwarding::Tunnel => 2,
        Forwarding::Route => 3,
        Forwarding::Bypass => 4,
    }
}

/// Reads a server and, with `full`, its settings.
fn server_config(
    of: Attributes<'_>,
    of_service: Family,
    full: bool,
) -> Result<(SocketAddr, ServerConfig), Errno> {
    let (Some(bytes), Some(port)) = (of.get(1), of.be16(2)) else {
        return Err(Errno::EINVAL);
    };
    let mut config = ServerConfig::new(1, Forwarding::Nat);
    if full {
        let (Some(flags), Some(weight), Some(upper), Some(lower)) =
            (of.u32(3), of.u32(4), of.u32(5), of.u32(6))
        else {
            return Err(Errno::EINVAL);
        };
        config.forwarding = forwarding(flags).ok_or(Errno::EINVAL)?;
        config.weight = weight.cast_signed();
        config.upper = upper;
        config.lower = lower;
        config.tunnel = tunnel(of)?;
    }
    let family = match of.u16(11) {
        None | Some(0) => of_service,
        Some(number) => family(number)?,
    };
    Ok((SocketAddr::new(address(bytes, family)?, port), config))
}

fn tunnel(of: Attributes<'_>) -> Result<Tunnel, Errno> {
    let checksum = match of.u16(15).unwrap_or(0) {
        0 => TunnelChecksum::None,
        1 => TunnelChecksum::Full,
        2 => TunnelChecksum::Remote,
        _ => return Err(Errno::EINVAL),
    };
    match of.u8(13).unwrap_or(0) {
        0 => Ok(Tunnel::Ipip),
        1 => Ok(Tunnel::Gue {
            port: of.be16(14).unwrap_or(0),
            checksum,
        }),
        2 => Ok(Tunnel::Gre { checksum }),
        _ => Err(Errno::EINVAL),
    }
}

fn address_bytes(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&address.octets());
            bytes
        }
        IpAddr::V6(address) => address.octets(),
    }
}

fn put_service(message: &mut Writer, info: &ServiceInfo) {
    message.nest(SERVICE, |message| {
        let family = match info.service {
            ServiceId::Fwmark { family, .. } => family,
            ServiceId::Tcp { address }
            | ServiceId::Udp { address }
            | ServiceId::Sctp { address } => Family::of(&address.ip()),
        };
        message.u16(1, family_number(family));
        match info.service {
            ServiceId::Fwmark { mark, .. } => message.u32(5, mark),
            _ => {
                if let Some((protocol, address)) = info.service.endpoint() {
                    message.u16(2, protocol.0.into());
                    message.put(3, &address_bytes(address.ip()));
                    message.be16(4, address.port());
                }
            }
        }
        let config = &info.config;
        message.text(6, &config.scheduler);
        if let Some(engine) = &config.engine {
            message.text(11, engine);
        }
        let flags = (config.flags.0 | HASHED).to_ne_bytes();
        message.put(7, &[flags, [0xff; 4]].concat());
        message.u32(8, config.timeout);
        message.u32(
            9,
            match family {
                Family::V4 => config.netmask.to_be(),
                Family::V6 => config.netmask,
            },
        );
        put_stats(message, &info.stats);
    });
}

fn put_server(message: &mut Writer, info: &ServerInfo) {
    message.nest(DEST, |message| {
        let config = &info.config;
        message.put(1, &address_bytes(info.server.ip()));
        message.be16(2, info.server.port());
        message.u32(3, forwarding_number(config.forwarding));
        message.u32(4, config.weight.cast_unsigned());
        let number = |checksum| match checksum {
            TunnelChecksum::None => 0,
            TunnelChecksum::Full => 1,
            TunnelChecksum::Remote => 2,
        };
        let (kind, port, flags) = match config.tunnel {
            Tunnel::Ipip => (0, 0, 0),
            Tunnel::Gue { port, checksum } => (1, port, number(checksum)),
            Tunnel::Gre { checksum } => (2, 0, number(checksum)),
        };
        message.u8(13, kind);
        message.be16(14, port);
        message.u16(15, flags);
        message.u32(5, config.upper);
        message.u32(6, config.lower);
        message.u32(7, info.active);
        message.u32(8, info.inactive);
        message.u32(9, info.persistent);
        message.u16(11, family_number(Family::of(&info.server.ip())));
        put_stats(message, &info.stats);
    });
}

/// Counters and rates, in the order of their attributes.
pub(super) fn rows(stats: &Stats) -> [u64; 10] {
    let (shown, rates) = (&stats.shown, &stats.rates);
    [
        shown.conns,
        shown.in_packets,
        shown.out_packets,
        shown.in_bytes,
        shown.out_bytes,
        rates.conns,
        rates.in_packets,
        rates.out_packets,
        rates.in_bytes,
        rates.out_bytes,
    ]
}

/// The low 32 bits, as the kernel reports counters in old structures.
#[allow(
    clippy::cast_possible_truncation,
    reason = "the fields of the kernel's structure have 32 bits"
)]
pub(super) const fn low(value: u64) -> u32 {
    value as u32
}

fn put_stats(message: &mut Writer, stats: &Stats) {
    let rows = rows(stats);
    message.nest(10, |message| {
        for (number, value) in (1..).zip(rows) {
            match number {
                4 | 5 => message.u64(number, value),
                _ => message.u32(number, low(value)),
            }
        }
    });
    message.nest(12, |message| {
        for (number, value) in (1..).zip(rows) {
            message.u64(number, value);
        }
    });
}

fn put_daemon(message: &mut Writer, daemon: &SyncDaemon) {
    message.nest(DAEMON, |message| {
        message.u32(
            1,
            match daemon.role {
                SyncRole::Master => 1,
                SyncRole::Backup => 2,
            },
        );
        message.text(2, &daemon.interface);
        message.u32(3, daemon.syncid.into());
        message.u16(4, daemon.maxlen.unwrap_or(0));
        message.u16(7, daemon.port.unwrap_or(lvs_core::sync::PORT));
        message.u8(8, daemon.ttl.unwrap_or(1));
        match daemon.group.unwrap_or(lvs_core::sync::GROUP.into()) {
            IpAddr::V4(group) => message.put(5, &group.octets()),
            IpAddr::V6(group) => message.put(6, &group.octets()),
        }
    });
}

/// Messages of a dump, packed into datagrams.
#[derive(Default)]
struct Dump {
    full: Vec<Vec<u8>>,
    current: Vec<u8>,
}

impl Dump {
    fn push(&mut self, message: Vec<u8>) {
        if !self.current.is_empty() && self.current.len() + message.len() > DATAGRAM {
            self.full.push(std::mem::take(&mut self.current));
        }
        self.current.extend(message);
    }

    fn finish(mut self) -> Vec<Vec<u8>> {
        self.full.push(self.current);
        self.full
    }
}
