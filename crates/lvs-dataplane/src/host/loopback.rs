//! Redirects packets of this host to services on its own addresses into the dataplane.
//!
//! The kernel looks up the host's addresses before all routes, and sends packets to them over `lo`.
//! There, a BPF program at the egress redirects packets to services into the device `lvs-local0`,
//! from which the dataplane reads them. The answers reach the host through the same device. Only
//! this device accepts packets from the host's own addresses, and no packet of another host passes
//! it unless the dataplane has replaced the source.
//!
//! ```text
//!  client on this host ─▶ lo ─ lvs_local ─▶ lvs-local0 ─▶ dataplane ─▶ eth1 ─▶ server
//!  client on this host ◀─────────────────── lvs-local0 ◀─ dataplane ◀─ eth1 ◀─ server
//! ```
//!
//! A server on this host also answers a client on this host over `lo`, so the program redirects
//! these answers as well.
//!
//! The program is attached while such a service or server exists. When the process ends, the kernel
//! removes the device, and the program too, unless the kernel fast path stays for a successor. The
//! program then drops packets of known clients, and passes all others to the host.

use std::collections::HashMap;
use std::fmt::Display;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use lvs_core::api::Waiting;
use lvs_core::{Instant, Protocol};
use tracing::{info, warn};

use crate::fast_path::object::code;
use crate::fast_path::{Attached, FastPath, SERVICE_WORDS, conf, own, service_key};
use crate::io::port::Port;
use crate::io::tun::HostDevice;
use crate::netlink::NetState;
use lvs_packet::intercept::{Endpoint, Intercept, LocalClient};
use lvs_sys::{Program, ProgramKind, ProgramLink, ReferenceMap, Referents, SharedArray, SharedMap};

/// The compiled program.
const OBJECT: &[u8] = include_bytes!("../../bpf/local.bpf.o");
/// Index of `lo` in every network namespace.
const LOOPBACK: u32 = 1;
/// Maximum number of entries of the map `lvs_local`: addresses, services, servers and clients of
/// this host.
const ENTRIES: u32 = 1 << 18;
/// Protocol in the key of an entry that describes an address, not a service or server.
const ADDRESS: Protocol = Protocol(0);

type Key = [u64; SERVICE_WORDS];
type Entries = HashMap<Key, u64>;

/// The redirection of this host's own packets.
#[derive(Debug)]
pub(super) struct Loopback {
    fast_path: Option<Arc<FastPath>>,
    kernel: Option<Kernel>,
    /// The entries of the map, except those for clients.
    entries: Entries,
    room: u32,
    /// Whether any packets have to be redirected.
    needed: bool,
    trouble: Option<Trouble>,
}

/// Why some or all packets are not redirected.
#[derive(Debug)]
struct Trouble {
    since: Instant,
    error: String,
    /// `true`: the redirection failed as a whole, and no packet is redirected until the
    /// dataplane is restarted. `false`: only some entries are missing in the map.
    refused: bool,
}

#[derive(Debug)]
struct Kernel {
    map: SharedMap<SERVICE_WORDS, 1>,
    program: Program,
    /// `None` while no packets have to be redirected.
    link: Option<Link>,
}

/// The attached program: `_own` is detached with this process, `_kept` stays for a successor.
#[derive(Debug)]
struct Link {
    _own: Option<ProgramLink>,
    _kept: Option<Attached>,
}

impl Loopback {
    pub(super) fn new(fast_path: Option<Arc<FastPath>>) -> Self {
        Self {
            fast_path,
            kernel: None,
            entries: Entries::new(),
            room: ENTRIES,
            needed: false,
            trouble: None,
        }
    }

    /// Why some or all packets of this host to services are not redirected; `None` if all are, or
    /// if none have to be.
    pub(super) fn trouble(&self, now: Instant) -> Option<Waiting> {
        let trouble = self.trouble.as_ref().filter(|_| self.needed)?;
        Some(Waiting {
            code: Waiting::LOCAL_CLIENTS_OFF.to_owned(),
            what: trouble.what(),
            fix: trouble.fix(self.room),
            since: Some(now.saturating_since(trouble.since).as_secs()),
        })
    }

    /// Records clients on this host, so that the host does not reset their connections if the
    /// dataplane is killed.
    pub(super) fn add_clients(&self, clients: &[LocalClient]) {
        if let Some(kernel) = &self.kernel {
            for client in clients {
                // Without room in the map, the host resets the client's connections if the
                // dataplane is killed.
                let _ = kernel.map.insert(&client_key(client), &[0]);
            }
        }
    }

    /// Reverts [`add_clients`](Self::add_clients). Returns true if other entries are missing for
    /// which the map may have room now.
    pub(super) fn remove_clients(&self, clients: &[LocalClient]) -> bool {
        if let Some(kernel) = &self.kernel {
            for client in clients {
                let _ = kernel.map.remove(&client_key(client));
            }
        }
        !clients.is_empty() && self.trouble.is_some() && !self.is_refused()
    }

    fn is_refused(&self) -> bool {
        self.trouble.as_ref().is_some_and(|trouble| trouble.refused)
    }

    /// Redirects exactly the packets that `spec` requires: to services on this host's addresses,
    /// and from servers on this host. Returns the device of these packets, if it is new.
    pub(super) fn follow(
        &mut self,
        spec: &Intercept,
        state: &NetState,
        now: Instant,
    ) -> Option<Port> {
        self.replace(&entries(spec, state), now)
    }

    fn replace(&mut self, wanted: &Entries, now: Instant) -> Option<Port> {
        self.needed = !wanted.is_empty();
        // Remove entries first: a full map has no room for new ones.
        let kernel = &self.kernel;
        self.entries.retain(|key, _| {
            let stays = wanted.contains_key(key);
            if !stays && let Some(kernel) = kernel {
                let _ = kernel.map.remove(key);
            }
            stays
        });
        let device = self.set(wanted, true, now);
        if self.entries.is_empty()
            && let Some(kernel) = &mut self.kernel
        {
            kernel.link = None;
        }
        device
    }

    /// Also redirects the packets that `more` requires.
    pub(super) fn extend(
        &mut self,
        more: &Intercept,
        state: &NetState,
        now: Instant,
    ) -> Option<Port> {
        let mut wanted = entries(more, state);
        self.needed |= !wanted.is_empty();
        for (key, value) in &mut wanted {
            *value |= self.entries.get(key).copied().unwrap_or_default();
        }
        self.set(&wanted, false, now)
    }

    /// Adds `wanted` to the map of the BPF program, and attaches the program. `all`: `wanted`
    /// contains every entry that the services need, so success resets `trouble`. Returns the device
    /// `lvs-local0` if this call has created it.
    fn set(&mut self, wanted: &Entries, all: bool, now: Instant) -> Option<Port> {
        if wanted.is_empty() || self.is_refused() {
            return None;
        }
        let mut made = None;
        let fast_path = self.fast_path.as_ref();
        let set = match &mut self.kernel {
            Some(kernel) => kernel.set(wanted, &mut self.entries, fast_path),
            None => Kernel::open(fast_path, self.room).and_then(|(kernel, device)| {
                made = Some(device);
                let kernel = self.kernel.insert(kernel);
                kernel.set(wanted, &mut self.entries, fast_path)
            }),
        };
        match set {
            Ok(()) if all => {
                if self.trouble.take().is_some() {
                    info!("connections from this host to all services pass the dataplane again");
                }
            }
            Ok(()) => {}
            Err(error)
                if error.kind() != io::ErrorKind::StorageFull
                    && (made.is_some() || self.kernel.is_none()) =>
            {
                self.refuse(&error, now);
                return None;
            }
            // The missing entries are added at the next change of services, or when clients have
            // left.
            Err(error) if self.trouble.is_none() => self.has_trouble(&error, false, now),
            Err(_) => {}
        }
        if made.is_some() {
            info!(
                "connections from this host to services on its own addresses pass the dataplane ({})",
                HostDevice::LOCAL
            );
        }
        made
    }

    /// Stops redirecting packets until the dataplane is restarted.
    pub(super) fn refuse(&mut self, error: &dyn Display, now: Instant) {
        self.kernel = None;
        self.entries.clear();
        self.has_trouble(error, true, now);
    }

    fn has_trouble(&mut self, error: &dyn Display, refused: bool, now: Instant) {
        let trouble = Trouble {
            since: now,
            error: error.to_string(),
            refused,
        };
        let (what, fix) = (trouble.what(), trouble.fix(self.room));
        warn!(code = Waiting::LOCAL_CLIENTS_OFF, "{what}. To do: {fix}");
        self.trouble = Some(trouble);
    }
}

impl Trouble {
    fn what(&self) -> String {
        let services = if self.refused {
            "services"
        } else {
            "some services"
        };
        format!(
            "connections from this host to {services} on its own addresses reach the host's own ports: {}",
            self.error
        )
    }

    fn fix(&self, room: u32) -> String {
        if self.refused {
            "use Linux 6.6 or newer with CONFIG_NET_XGRESS, give the dataplane CAP_BPF in the initial user namespace, and restart it"
                .to_owned()
        } else {
            format!(
                "use at most {room} services, servers and clients on addresses of this host; the dataplane adds the missing services when there is room"
            )
        }
    }
}

impl Kernel {
    /// Loads the program, and creates the device.
    fn open(fast_path: Option<&Arc<FastPath>>, room: u32) -> io::Result<(Self, Port)> {
        let map = SharedMap::new("lvs_local", room)?;
        let slot = ReferenceMap::new("lvs_device", Referents::Devices, 1)?;
        // Without the fast path, no program outlives this process and reads the settings.
        let unused = SharedArray::new("lvs_conf", conf::WORDS, 1)?;
        let settings = fast_path.map_or_else(|| unused.number(), |path| path.settings());
        let code = code(OBJECT, "local").and_then(|code| {
            code.linked(|name| match name {
                "lvs_local" => Some(map.number()),
                "lvs_device" => Some(slot.number()),
                "lvs_conf" => Some(settings),
                _ => None,
            })
        });
        let code = code.ok_or_else(|| io::Error::other("the BPF object is damaged"))?;
        let program = Program::load(ProgramKind::Egress, "lvs_local", &code)?;
        let device = HostDevice::create_local().map_err(io::Error::other)?;
        slot.put_device(device.ifindex())?;
        let kernel = Self {
            map,
            program,
            link: None,
        };
        Ok((kernel, Port::Tun(device)))
    }

    /// Writes entries of `wanted` that differ from `known` to the map and to `known`, and attaches
    /// the program. Fails with `StorageFull` if the map has no room for some of them; the others
    /// are in effect.
    fn set(
        &mut self,
        wanted: &Entries,
        known: &mut Entries,
        fast_path: Option<&Arc<FastPath>>,
    ) -> io::Result<()> {
        let mut is_full = false;
        for (key, value) in wanted {
            if known.get(key) != Some(value) {
                match self.map.insert(key, &[*value]) {
                    Ok(()) => drop(known.insert(*key, *value)),
                    Err(error) if error.raw_os_error() == Some(libc::E2BIG) => is_full = true,
                    Err(error) => return Err(error),
                }
            }
        }
        if self.link.is_none() {
            let (mut own, mut kept) = (None, None);
            match fast_path {
                Some(path) => kept = Some(path.attach_other(&self.program, LOOPBACK)?),
                None => own = Some(self.program.attach(LOOPBACK)?),
            }
            self.link = Some(Link {
                _own: own,
                _kept: kept,
            });
        }
        match is_full {
            true => Err(io::Error::new(
                io::ErrorKind::StorageFull,
                "the map of the BPF program is full",
            )),
            false => Ok(()),
        }
    }
}

/// The entries for services on addresses of this host, and for servers on this host.
fn entries(spec: &Intercept, state: &NetState) -> Entries {
    let mut all = Entries::new();
    let services = spec.services.iter().filter(|service| {
        let addr = service.address;
        !addr.is_loopback() && state.is_local(addr)
    });
    for service in services {
        let Some(any) = any_port(service.protocol) else {
            continue;
        };
        let about = all.entry(address(service.address)).or_default();
        if service.port == 0 {
            *about |= any;
        } else {
            all.insert(key_of(service), 0);
        }
    }
    if spec.local_nodes.is_empty() {
        return all;
    }
    for node in spec.local_nodes.iter() {
        let [first, second, rest] = key_of(node);
        all.insert([first, second, rest | own::NODE], 0);
    }
    let links = state.links();
    let addresses = links.flat_map(|link| state.addresses(link.index));
    for addr in addresses.map(|known| known.ip) {
        if !addr.is_loopback() {
            *all.entry(address(addr)).or_default() |= own::NODES;
        }
    }
    all
}

/// The flag of an address that has a service for all ports of a protocol; `None` if services of the
/// protocol have no ports.
const fn any_port(protocol: Protocol) -> Option<u64> {
    match protocol {
        Protocol::TCP => Some(own::ANY_TCP),
        Protocol::UDP => Some(own::ANY_UDP),
        Protocol::SCTP => Some(own::ANY_SCTP),
        _ => None,
    }
}

fn address(addr: IpAddr) -> Key {
    service_key(ADDRESS, SocketAddr::new(addr, 0))
}

fn key_of(endpoint: &Endpoint) -> Key {
    let at = SocketAddr::new(endpoint.address, endpoint.port);
    service_key(endpoint.protocol, at)
}

fn client_key(client: &LocalClient) -> Key {
    let [first, second, rest] = service_key(client.protocol, client.local);
    [first, second, rest | own::CLIENT]
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: u16 = 4;

    fn service(port: u16) -> (Key, u64) {
        let at = SocketAddr::from(([192, 0, 2, 10], port));
        (service_key(Protocol::TCP, at), 0)
    }

    fn client(port: u16) -> LocalClient {
        LocalClient {
            protocol: Protocol::TCP,
            server: SocketAddr::from(([10, 0, 0, 1], 80)),
            local: SocketAddr::from(([192, 0, 2, 10], port)),
        }
    }

    /// Runs `test` with a small map, in its own network namespace.
    fn with_small_map(test: impl FnOnce(Loopback) + Send + 'static) {
        with_small_map_of(1, test);
    }

    /// As [`with_small_map`], after the map was filled for this number of services.
    fn with_small_map_of(services: u16, test: impl FnOnce(Loopback) + Send + 'static) {
        let thread = std::thread::spawn(move || {
            lvs_sys::unshare_network()
                .expect("this test makes a network namespace: run it as root");
            let mut loopback = Loopback {
                room: ROOM.into(),
                ..Loopback::new(None)
            };
            let wanted = (1..=services).map(service).collect();
            let device = loopback.replace(&wanted, Instant::from_secs(1));
            let trouble = loopback.trouble(Instant::from_secs(1));
            if let Some(trouble) = trouble.filter(|_| loopback.is_refused()) {
                assert!(!lvs_sys::is_root_of_all(), "{trouble:?}");
                return Some(trouble.what);
            }
            assert!(device.is_some());
            test(loopback);
            None
        });
        if let Some(why) = thread
            .join()
            .expect("the thread in the namespace does not panic")
        {
            lvs_sys::testing::not_run(&format!("needs BPF: {why}"));
        }
    }

    #[test]
    fn full_loopback_map_reports_fault_until_services_are_removed() {
        with_small_map(|mut loopback| {
            let now = Instant::from_secs(5);
            let all: Entries = (1..=ROOM + 1).map(service).collect();
            loopback.replace(&all, now);
            let trouble = loopback.trouble(now + std::time::Duration::from_secs(7));
            let trouble = trouble.expect("one entry is missing");
            assert_eq!(
                (&*trouble.code, trouble.since),
                ("local_clients_off", Some(7))
            );
            assert!(trouble.what.contains("is full"), "{trouble:?}");
            assert!(trouble.fix.contains("at most 4 services"), "{trouble:?}");
            // There is room for each change, because entries are removed first.
            for first in [2, 6, 1] {
                let wanted: Entries = (first..first + ROOM).map(service).collect();
                loopback.replace(&wanted, now);
                assert!(loopback.trouble(now).is_none());
                assert_eq!(loopback.entries, wanted);
            }
            loopback.replace(&all, now);
            assert!(loopback.trouble(now).is_some());
            loopback.replace(&Entries::new(), now);
            assert!(
                loopback.trouble(now).is_none(),
                "a fault is reported, although no packets have to be redirected"
            );
        });
    }

    #[test]
    fn loopback_program_is_attached_although_one_service_does_not_fit_into_its_map() {
        with_small_map_of(ROOM + 1, |mut loopback| {
            let now = Instant::from_secs(5);
            let trouble = loopback.trouble(now).expect("one entry is missing");
            assert!(trouble.fix.contains("at most 4 services"), "{trouble:?}");
            assert_eq!(loopback.entries.len(), usize::from(ROOM));
            let kernel = loopback.kernel.as_ref().expect("the program is loaded");
            assert!(kernel.link.is_some(), "the program is not attached");
            loopback.replace(&[service(1)].into(), now);
            assert!(loopback.trouble(now).is_none());
        });
    }

    #[test]
    fn full_loopback_map_of_clients_has_room_again_after_clients_leave() {
        with_small_map(|mut loopback| {
            let now = Instant::from_secs(5);
            let clients: Vec<LocalClient> = (1000..1010).map(client).collect();
            for _ in 0..3 {
                loopback.add_clients(&clients);
                let both: Entries = [service(1), service(2)].into();
                loopback.replace(&both, now);
                assert!(
                    loopback.trouble(now).is_some(),
                    "no fault is reported, although clients use the whole map"
                );
                // Clients that were refused leave, too.
                assert!(loopback.remove_clients(&clients));
                loopback.replace(&both, now);
                assert!(loopback.trouble(now).is_none());
                assert!(
                    !loopback.remove_clients(&clients),
                    "entries are reported as missing"
                );
                loopback.replace(&[service(1)].into(), now);
            }
        });
    }
}
