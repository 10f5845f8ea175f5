//! The old interface of IPVS: options of a raw socket (`IP_VS_SO_*` of `linux/ip_vs.h`), for IPv4
//! only. ipvsadm and keepalived use it if they find no netlink family.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};

use lvs_core::api::{Call, ServerInfo, ServerSpec, ServiceId, ServiceInfo, ServiceSpec, Timeouts};
use lvs_core::stats::Stats;
use lvs_core::sync::{SyncDaemon, SyncRole};
use lvs_core::{Family, ServerConfig, ServiceConfig, ServiceFlags};
use nix::errno::Errno;

use super::family::{self, Dataplane, HASHED};
use super::wire::{text, u16_at, u32_at};

/// Number of the first option.
const BASE: u32 = 1152;

const SET_ADD: u32 = BASE + 2;
const SET_EDIT: u32 = BASE + 3;
const SET_DELETE: u32 = BASE + 4;
const SET_FLUSH: u32 = BASE + 5;
const SET_ADD_SERVER: u32 = BASE + 7;
const SET_DELETE_SERVER: u32 = BASE + 8;
const SET_EDIT_SERVER: u32 = BASE + 9;
const SET_TIMEOUT: u32 = BASE + 10;
const SET_START_DAEMON: u32 = BASE + 11;
const SET_STOP_DAEMON: u32 = BASE + 12;
const SET_ZERO: u32 = BASE + 15;

const GET_VERSION: u32 = BASE;
const GET_INFO: u32 = BASE + 1;
const GET_SERVICES: u32 = BASE + 2;
const GET_SERVICE: u32 = BASE + 3;
const GET_SERVERS: u32 = BASE + 4;
const GET_TIMEOUT: u32 = BASE + 6;
const GET_DAEMON: u32 = BASE + 7;

/// Length in bytes of `struct ip_vs_service_user`.
const SERVICE: usize = 44;
/// Minimum size of the buffer for the text of [`GET_VERSION`].
const VERSION_ROOM: usize = 64;
/// Length in bytes of `struct ip_vs_dest_user`.
const SERVER: usize = 24;
/// Length in bytes of `struct ip_vs_daemon_user`.
const DAEMON: usize = 24;
/// Length in bytes of `struct ip_vs_timeout_user`.
const TIMEOUT: usize = 12;
/// Length in bytes of `struct ip_vs_service_entry`, which begins with a service.
const SERVICE_ENTRY: usize = 104;
/// Length in bytes of `struct ip_vs_dest_entry`.
const SERVER_ENTRY: usize = 96;
/// Length in bytes of `struct ip_vs_get_services` before its entries.
const SERVICES_HEAD: usize = 8;
/// Length in bytes of `struct ip_vs_get_dests` before its entries.
const SERVERS_HEAD: usize = 24;
/// Length in bytes of the names of schedulers and of interfaces.
const NAME: usize = 16;

/// Number of bytes that the caller passes with an option: the value of a `setsockopt`, or the
/// request of a `getsockopt`. 0 for an unknown option.
pub(super) const fn request_length(sets: bool, option: u32) -> usize {
    match (sets, option) {
        (true, SET_ADD | SET_EDIT | SET_DELETE | SET_ZERO) => SERVICE,
        (true, SET_ADD_SERVER | SET_DELETE_SERVER | SET_EDIT_SERVER) => SERVICE + SERVER,
        (true, SET_TIMEOUT) => TIMEOUT,
        (true, SET_START_DAEMON | SET_STOP_DAEMON) => DAEMON,
        (false, GET_SERVICES) => SERVICES_HEAD,
        (false, GET_SERVICE) => SERVICE_ENTRY,
        (false, GET_SERVERS) => SERVERS_HEAD,
        _ => 0,
    }
}

/// Applies a `setsockopt`; `value` has [`request_length`] bytes.
pub(super) fn set(option: u32, value: &[u8], dataplane: &mut dyn Dataplane) -> Result<(), Errno> {
    if value.len() != request_length(true, option) {
        return Err(Errno::EINVAL);
    }
    let call = match option {
        SET_FLUSH => Call::ServiceFlush {},
        SET_TIMEOUT => Call::TimeoutsSet(Timeouts {
            tcp: number(value, 0)?,
            tcp_fin: number(value, 4)?,
            udp: number(value, 8)?,
        }),
        SET_START_DAEMON | SET_STOP_DAEMON => daemon_change(option, value)?,
        SET_ZERO if names_no_service(value)? => Call::ServiceZero { service: None },
        SET_ADD..=SET_DELETE | SET_ADD_SERVER..=SET_EDIT_SERVER | SET_ZERO => {
            change(option, value, dataplane)?
        }
        _ => return Err(Errno::EINVAL),
    };
    dataplane.change(call)
}

fn change(option: u32, value: &[u8], dataplane: &mut dyn Dataplane) -> Result<Call, Errno> {
    let service = service_id(value)?;
    Ok(match option {
        SET_ADD => Call::ServiceAdd(ServiceSpec {
            service,
            config: service_config(value, ServiceConfig::new(Family::V4, ""))?,
            owner: None,
        }),
        SET_EDIT => {
            let found = dataplane.services(Some(service))?;
            let now = found.into_iter().next().ok_or(Errno::ESRCH)?;
            Call::ServiceEdit(ServiceSpec {
                service,
                config: service_config(value, now.config)?,
                owner: now.owner,
            })
        }
        SET_DELETE => Call::ServiceDelete { service },
        SET_ZERO => Call::ServiceZero {
            service: Some(service),
        },
        _ => {
            let of_server = value.get(SERVICE..).unwrap_or_default();
            let server = address(of_server, 0, 4)?.into();
            let forwarding = family::forwarding(number(of_server, 8)?).ok_or(Errno::EINVAL)?;
            let mut config = ServerConfig::new(number(of_server, 12)?.cast_signed(), forwarding);
            config.upper = number(of_server, 16)?;
            config.lower = number(of_server, 20)?;
            let spec = ServerSpec {
                service,
                server,
                config,
            };
            match option {
                SET_ADD_SERVER => Call::ServerAdd(spec),
                SET_EDIT_SERVER => Call::ServerEdit(spec),
                _ => Call::ServerDelete { service, server },
            }
        }
    })
}

/// Whether the kernel does not update the length in the program's memory, even if it writes fewer
/// bytes.
pub(super) const fn keeps_length(option: u32) -> bool {
    matches!(option, GET_SERVICES | GET_SERVERS)
}

/// Answers a `getsockopt`. `request` has [`request_length`] bytes, and the program's buffer has
/// `room` bytes.
pub(super) fn get(
    option: u32,
    request: &[u8],
    room: usize,
    dataplane: &mut dyn Dataplane,
) -> Result<Vec<u8>, Errno> {
    let answer = match option {
        GET_VERSION if room < VERSION_ROOM => return Err(Errno::EINVAL),
        GET_VERSION => {
            let size = dataplane.table_size()?;
            format!("IP Virtual Server version 1.2.1 (size={size})\0").into_bytes()
        }
        GET_INFO => {
            let size = dataplane.table_size()?;
            let services = dataplane.services(None)?;
            let count = services.iter().filter(|info| is_v4(info)).count();
            let count = u32::try_from(count).unwrap_or(u32::MAX);
            [family::VERSION, size, count]
                .map(u32::to_ne_bytes)
                .concat()
        }
        GET_SERVICES => {
            let wanted = count(request, 0)?;
            exactly(room, SERVICES_HEAD, SERVICE_ENTRY, wanted)?;
            let services = dataplane.services(None)?;
            let services = services.iter().filter(|info| is_v4(info)).take(wanted);
            let mut answer = request.to_vec();
            for info in services {
                answer.extend(service_entry(info));
            }
            answer
        }
        GET_SERVICE => {
            let found = dataplane.services(Some(service_id(request)?))?;
            service_entry(found.first().ok_or(Errno::ESRCH)?)
        }
        GET_SERVERS => {
            let wanted = count(request, 16)?;
            exactly(room, SERVERS_HEAD, SERVER_ENTRY, wanted)?;
            let found = dataplane.services(Some(service_id(request)?))?;
            let mut answer = request.to_vec();
            let servers = found.iter().flat_map(|info| &info.servers);
            for server in servers.filter(|info| info.server.is_ipv4()).take(wanted) {
                answer.extend(server_entry(server));
            }
            answer
        }
        GET_TIMEOUT => {
            let timeouts = dataplane.timeouts()?;
            [timeouts.tcp, timeouts.tcp_fin, timeouts.udp]
                .map(u32::to_ne_bytes)
                .concat()
        }
        GET_DAEMON => {
            let daemons = dataplane.daemons()?;
            [SyncRole::Master, SyncRole::Backup]
                .map(|role| {
                    let daemon = daemons.iter().find(|daemon| daemon.role == role);
                    daemon.map_or_else(|| vec![0; DAEMON], daemon_entry)
                })
                .concat()
        }
        _ => return Err(Errno::EINVAL),
    };
    match answer.len() <= room {
        true => Ok(answer),
        false => Err(Errno::EINVAL),
    }
}

fn is_v4(info: &ServiceInfo) -> bool {
    match info.service {
        ServiceId::Fwmark { family, .. } => family == Family::V4,
        _ => info
            .service
            .address()
            .is_some_and(|address| address.is_ipv4()),
    }
}

/// Checks that the buffer has exactly the size of the head and of `wanted` entries.
fn exactly(room: usize, head: usize, entry: usize, wanted: usize) -> Result<(), Errno> {
    let length = wanted
        .checked_mul(entry)
        .and_then(|all| all.checked_add(head));
    match length == Some(room) {
        true => Ok(()),
        false => Err(Errno::EINVAL),
    }
}

fn number(from: &[u8], at: usize) -> Result<u32, Errno> {
    u32_at(from, at).ok_or(Errno::EINVAL)
}

fn count(from: &[u8], at: usize) -> Result<usize, Errno> {
    usize::try_from(number(from, at)?).map_err(|_| Errno::EINVAL)
}

/// Reads an IPv4 address and a port, both in network byte order, at these offsets.
fn address(from: &[u8], ip: usize, port: usize) -> Result<SocketAddrV4, Errno> {
    let ip = u32::from_be(number(from, ip)?);
    let port = u16::from_be(u16_at(from, port).ok_or(Errno::EINVAL)?);
    Ok(SocketAddrV4::new(Ipv4Addr::from(ip), port))
}

/// Whether protocol, address, port and mark are all 0.
fn names_no_service(from: &[u8]) -> Result<bool, Errno> {
    let protocol = u16_at(from, 0).ok_or(Errno::EINVAL)?;
    let address = address(from, 4, 8)?;
    let none = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0);
    Ok(protocol == 0 && address == none && number(from, 12)? == 0)
}

/// Reads the service from the first 16 bytes of a structure.
fn service_id(from: &[u8]) -> Result<ServiceId, Errno> {
    match number(from, 12)? {
        0 => {
            let protocol = u16_at(from, 0).ok_or(Errno::EINVAL)?;
            let address = address(from, 4, 8)?.into();
            // The kernel's error for a protocol that no service has.
            family::service_of(protocol, address).ok_or(Errno::EFAULT)
        }
        mark => Ok(ServiceId::Fwmark {
            mark,
            family: Family::V4,
        }),
    }
}

fn service_config(from: &[u8], mut config: ServiceConfig) -> Result<ServiceConfig, Errno> {
    config.scheduler = text(from.get(16..16 + NAME).ok_or(Errno::EINVAL)?);
    config.flags = ServiceFlags(number(from, 32)? & ServiceFlags::ALL);
    config.timeout = number(from, 36)?;
    config.netmask = u32::from_be(number(from, 40)?);
    Ok(config)
}

fn daemon_change(option: u32, value: &[u8]) -> Result<Call, Errno> {
    let role = match number(value, 0)? {
        1 => SyncRole::Master,
        2 => SyncRole::Backup,
        _ => return Err(Errno::EINVAL),
    };
    let syncid = u8::try_from(number(value, 20)?).map_err(|_| Errno::EINVAL)?;
    if option == SET_STOP_DAEMON {
        return Ok(Call::DaemonStop { role, syncid });
    }
    Ok(Call::DaemonStart(SyncDaemon {
        role,
        interface: text(value.get(4..4 + NAME).ok_or(Errno::EINVAL)?),
        syncid,
        maxlen: None,
        group: None,
        port: None,
        ttl: None,
    }))
}

/// A structure whose fields are written at their offsets.
struct Entry(Vec<u8>);

impl Entry {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        if let Some(place) = self.0.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }

    fn number(&mut self, at: usize, value: u32) {
        self.put(at, &value.to_ne_bytes());
    }

    fn address(&mut self, at: SocketAddr, ip: usize, port: usize) {
        if let IpAddr::V4(address) = at.ip() {
            self.put(ip, &address.octets());
        }
        self.put(port, &at.port().to_be_bytes());
    }

    /// Writes a text at `at`, truncated if necessary so that a NUL follows it.
    fn text(&mut self, at: usize, text: &str) {
        self.put(at, &text.as_bytes()[..text.len().min(NAME - 1)]);
    }

    /// Writes `stats` as a `struct ip_vs_stats_user` at `at`.
    fn stats(&mut self, at: usize, stats: &Stats) {
        let rows = family::rows(stats);
        for (index, offset) in [(0, 0), (1, 4), (2, 8)] {
            self.number(at + offset, family::low(rows[index]));
        }
        self.put(at + 16, &rows[3].to_ne_bytes());
        self.put(at + 24, &rows[4].to_ne_bytes());
        for (index, value) in rows[5..].iter().enumerate() {
            self.number(at + 32 + 4 * index, family::low(*value));
        }
    }
}

fn service_entry(info: &ServiceInfo) -> Vec<u8> {
    let mut entry = Entry(vec![0; SERVICE_ENTRY]);
    match info.service {
        ServiceId::Fwmark { mark, .. } => entry.number(12, mark),
        _ => {
            if let Some((protocol, address)) = info.service.endpoint() {
                entry.put(0, &u16::from(protocol.0).to_ne_bytes());
                entry.address(address, 4, 8);
            }
        }
    }
    entry.text(16, &info.config.scheduler);
    entry.number(32, info.config.flags.0 | HASHED);
    entry.number(36, info.config.timeout);
    entry.number(40, info.config.netmask.to_be());
    let servers = u32::try_from(info.servers.len()).unwrap_or(u32::MAX);
    entry.number(44, servers);
    entry.stats(48, &info.stats);
    entry.0
}

fn server_entry(info: &ServerInfo) -> Vec<u8> {
    let mut entry = Entry(vec![0; SERVER_ENTRY]);
    entry.address(info.server, 0, 4);
    let config = &info.config;
    let numbers = [
        family::forwarding_number(config.forwarding),
        config.weight.cast_unsigned(),
        config.upper,
        config.lower,
        info.active,
        info.inactive,
        info.persistent,
    ];
    for (index, value) in numbers.into_iter().enumerate() {
        entry.number(8 + 4 * index, value);
    }
    entry.stats(40, &info.stats);
    entry.0
}

fn daemon_entry(daemon: &SyncDaemon) -> Vec<u8> {
    let mut entry = Entry(vec![0; DAEMON]);
    entry.number(
        0,
        match daemon.role {
            SyncRole::Master => 1,
            SyncRole::Backup => 2,
        },
    );
    entry.text(4, &daemon.interface);
    entry.number(20, daemon.syncid.into());
    entry.0
}
