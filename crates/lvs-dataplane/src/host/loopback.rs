//! This host's own packets to services whose address it has.
//!
//! The kernel looks up the host's addresses before all routes, and sends packets to them over `lo`.
//! There, a BPF program at the egress redirects packets to services into the device `lvs-local0`,
//! from which the dataplane reads them. Their answers reach the host through the same device. Only
//! this device accepts packets from the host's own addresses, and no packet of another host passes
//! it unless the dataplane has replaced the source.
//!
//! ```text
//!  client on this host ─▶ lo ─ lvs_local ─▶ lvs-local0 ─▶ dataplane ─▶ eth1 ─▶ server
//!  client on this host ◀─────────────────── lvs-local0 ◀─ dataplane ◀─ eth1 ◀─ server
//! ```
//!
//! A server on this host answers a client on this host over `lo` too, so that the program redirects
//! these answers as well.
//!
//! The program is attached while there is such a service or server. The kernel removes the device
//! together with the process, and the program too, unless the kernel fast path stays for a
//! successor. In that case the program drops packets of known clients, and leaves all others to the
//! host.

use std::collections::HashMap;
use std::fmt::Display;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use lvs_core::Protocol;
use tracing::{info, warn};

use crate::fast_path::object::code;
use crate::fast_path::{Attached, FastPath, SERVICE_WORDS, conf, own, service_key};
use crate::io::port::Port;
use crate::io::tun::HostDevice;
use crate::netlink::NetState;
use lvs_packet::intercept::{Endpoint, Intercept, LocalClient};
use lvs_sys::{DeviceSlot, Program, ProgramKind, ProgramLink, SharedArray, SharedMap};

/// The compiled program.
const OBJECT: &[u8] = include_bytes!("../../bpf/local.bpf.o");
/// Interface index of the loopback, which every network namespace has.
const LOOPBACK: u32 = 1;
/// Maximum number of addresses, services, servers and clients of this host.
const ENTRIES: u32 = 1 << 18;
/// The protocol of an entry that is an address.
const ADDRESS: Protocol = Protocol(0);

type Key = [u64; SERVICE_WORDS];
type Entries = HashMap<Key, u64>;

/// The redirection of this host's own packets.
#[derive(Debug)]
pub(super) struct Loopback {
    fast_path: Option<Arc<FastPath>>,
    kernel: Option<Kernel>,
    /// The entries of the map, without the clients.
    entries: Entries,
    /// Whether the redirection is impossible until the dataplane is restarted, which is logged once.
    refused: bool,
    /// Whether some entries are missing in the map.
    incomplete: bool,
}

/// The parts of the redirection in the kernel: the map, the program and its attachment.
#[derive(Debug)]
struct Kernel {
    map: SharedMap<SERVICE_WORDS, 1>,
    program: Program,
    /// The attachment of the program; `None` while there is nothing to redirect.
    link: Option<Link>,
}

/// The attached program. It stays for a successor if the kernel fast path does.
#[derive(Debug)]
struct Link {
    _own: Option<ProgramLink>,
    _kept: Option<Attached>,
}

impl Loopback {
    /// Creates the redirection without any entry.
    pub(super) fn new(fast_path: Option<Arc<FastPath>>) -> Self {
        Self {
            fast_path,
            kernel: None,
            entries: Entries::new(),
            refused: false,
            incomplete: false,
        }
    }

    /// Records clients on this host. If the dataplane is killed, the host does not reset their
    /// connections.
    pub(super) fn add_clients(&self, clients: &[LocalClient]) {
        if let Some(kernel) = &self.kernel {
            for client in clients {
                // Beyond the limit, they are reset.
                let _ = kernel.map.insert(&client_key(client), &[0]);
            }
        }
    }

    /// Reverts [`add_clients`](Self::add_clients).
    pub(super) fn remove_clients(&self, clients: &[LocalClient]) {
        if let Some(kernel) = &self.kernel {
            for client in clients {
                let _ = kernel.map.remove(&client_key(client));
            }
        }
    }

    /// Redirects exactly the packets to services of `spec` on this host's addresses. Returns the
    /// device of these packets, if it is new.
    pub(super) fn follow(&mut self, spec: &Intercept, state: &NetState) -> Option<Port> {
        let wanted = entries(spec, state);
        let known = self.entries.keys().copied();
        let surplus: Vec<Key> = known.filter(|key| !wanted.contains_key(key)).collect();
        let device = self.set(&wanted);
        for key in surplus {
            self.entries.remove(&key);
            if let Some(kernel) = &self.kernel {
                let _ = kernel.map.remove(&key);
            }
        }
        if self.entries.is_empty()
            && let Some(kernel) = &mut self.kernel
        {
            kernel.link = None;
        }
        device
    }

    /// Redirects packets to the services of `more` as well.
    pub(super) fn extend(&mut self, more: &Intercept, state: &NetState) -> Option<Port> {
        let mut wanted = entries(more, state);
        for (key, value) in &mut wanted {
            *value |= self.entries.get(key).copied().unwrap_or_default();
        }
        self.set(&wanted)
    }

    /// Sets entries of the map, and attaches the program. Returns the device, if it is new.
    fn set(&mut self, wanted: &Entries) -> Option<Port> {
        if wanted.is_empty() || self.refused {
            return None;
        }
        let mut made = None;
        let fast_path = self.fast_path.as_ref();
        let set = match &mut self.kernel {
            Some(kernel) => kernel.set(wanted, &mut self.entries, fast_path),
            None => Kernel::open(fast_path).and_then(|(kernel, device)| {
                made = Some(device);
                let kernel = self.kernel.insert(kernel);
                kernel.set(wanted, &mut self.entries, fast_path)
            }),
        };
        match set {
            Ok(()) => self.incomplete = false,
            Err(error) if made.is_some() || self.kernel.is_none() => {
                self.refuse(&error);
                return None;
            }
            // The entries that were set stay; the next change of services sets the missing ones.
            Err(error) if !self.incomplete => {
                self.incomplete = true;
                warn!(
                    code = "local_clients_off",
                    "connections from this host to some services on its own addresses reach the host's own ports: {error}"
                );
            }
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

    /// Ends the redirection until the dataplane is restarted.
    pub(super) fn refuse(&mut self, error: &dyn Display) {
        self.refused = true;
        self.kernel = None;
        self.entries.clear();
        warn!(
            code = "local_clients_off",
            "connections from this host to services on its own addresses reach the host's own ports: {error}. The dataplane receives them only with Linux 6.6 or newer with CONFIG_NET_XGRESS, and with CAP_BPF in the initial user namespace. After the fix, restart the dataplane"
        );
    }
}

impl Kernel {
    /// Loads the program, and creates the device.
    fn open(fast_path: Option<&Arc<FastPath>>) -> io::Result<(Self, Port)> {
        let map = SharedMap::new("lvs_local", ENTRIES)?;
        let slot = DeviceSlot::new("lvs_device")?;
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
        slot.set(device.ifindex())?;
        let kernel = Self {
            map,
            program,
            link: None,
        };
        Ok((kernel, Port::Host(device)))
    }

    /// Writes the entries of `wanted` that differ from `known` to the map, records them in `known`,
    /// and attaches the program.
    fn set(
        &mut self,
        wanted: &Entries,
        known: &mut Entries,
        fast_path: Option<&Arc<FastPath>>,
    ) -> io::Result<()> {
        for (key, value) in wanted {
            if known.get(key) != Some(value) {
                self.map.insert(key, &[*value])?;
                known.insert(*key, *value);
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
        Ok(())
    }
}

/// The entries for services of `spec` on addresses of this host, and for its servers on this host.
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

/// The flag of an address with services of all ports; `None` if services of the protocol have no
/// ports.
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
