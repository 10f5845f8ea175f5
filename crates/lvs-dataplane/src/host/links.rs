//! Handles the kernel's events, such as changes of interfaces, addresses, routes and neighbours.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use lvs_core::api::Call;
use tracing::{debug, info, warn};

use super::HostError;
use super::keeper::Keeper;
use super::shield::ShieldError;
use super::view::KnownPort;
use crate::io::af_packet::{AfPacket, Group, OpenError};
use crate::io::port::Port;
use crate::io::tun::HostDevice;
use crate::netlink::{Changes, Link};
use lvs_packet::net::{PortId, PortInfo};
use lvs_packet::wire::Mac;

/// Whether a device of this kind decapsulates Ethernet frames from GRE. Other tunnels of Ethernet
/// use UDP, which IPVS schedules, so `ignore_tunneled` does not apply to them.
fn decapsulates(kind: Option<&str>) -> bool {
    matches!(kind, Some("gretap" | "ip6gretap" | "erspan" | "ip6erspan"))
}

/// Whether the dataplane uses this interface by default: Ethernet, up, and not a port of a bridge
/// or bond.
fn is_usable(link: &Link) -> bool {
    link.is_arp_capable() && link.up && link.master.is_none()
}

/// Number of times that frames may bypass the programs before the kernel fast path is suspended
/// until the dataplane is restarted.
const MISSED_MAX: u32 = 8;

impl Keeper {
    pub(super) fn follow_kernel(&mut self) {
        let changes = match self.netlink.poll_events(&mut self.tables.state) {
            Ok(changes) => changes,
            Err(error) => return warn!("{error}"),
        };
        let ways = changes.links || changes.addresses || changes.routes || changes.moved;
        self.next.tables_differ |= ways || changes.resynchronised;
        // This is also set if only the state of a neighbour has changed, not its MAC address.
        self.next.neighbours_differ |= !changes.neighbours.is_empty();
        if changes.links || changes.addresses || changes.routes || changes.resynchronised {
            self.tables.follow_routes();
        }
        if changes.links
            && let Err(error) = self.attach_links(false)
        {
            warn!("{error}");
        }
        if changes.steering && self.interception.is_routed() {
            self.interception.distrust();
            self.changed.get_or_insert(self.dataplane.now());
        }
        if changes.links || changes.addresses {
            self.tables.follow_addresses();
            self.report_addresses();
            self.follow_local_pool();
            self.update_or_warn();
        } else if changes.routes {
            // Workers use the new routes at once; the next hops of servers are updated after a
            // burst of changes.
            self.changed.get_or_insert(self.dataplane.now());
        }
        self.announce_behind(&changes.appeared);
        self.follow_neighbours(&changes);
    }

    /// Announces own addresses again on these interfaces, and on the bridges and bonds that they
    /// are ports of: neighbours there may have lost their entries for these addresses.
    fn announce_behind(&mut self, appeared: &[u32]) {
        // Bridges over bonds are the deepest combination; a longer chain would be a loop.
        const DEPTH: usize = 4;
        let mut ports = BTreeSet::new();
        let state = &self.tables.state;
        for &ifindex in appeared {
            let masters =
                std::iter::successors(state.link(ifindex), |link| state.link(link.master?));
            for link in masters.take(DEPTH) {
                ports.extend(self.tables.port_of(link.index));
            }
        }
        for port in ports {
            self.vips.announce_again(port);
        }
    }

    /// Tries again to use the configured interfaces that are missing or could not be opened.
    pub(super) fn follow_missing(&mut self) {
        if let Err(error) = self.attach_links(false) {
            warn!("{error}");
        }
        if !self.next.attach.is_empty() {
            self.next.tables_differ = true;
            self.update_or_warn();
        }
    }

    /// Updates the port ranges of full NAT's local addresses, because an address was added to the
    /// host or removed.
    fn follow_local_pool(&self) {
        if self.pool.addresses.is_empty() {
            return;
        }
        let call = Call::LocalSet(self.pool.clone());
        let now = self.dataplane.now();
        let host = self.view_of_tables();
        let applied = self.dataplane.control().apply(&[call], &host, now);
        if let Err(refused) = applied {
            warn!("{}", refused.failure.message);
        }
    }

    fn follow_neighbours(&mut self, changes: &Changes) {
        for &(ifindex, addr) in &changes.neighbours {
            let Some(port) = self.tables.port_of(ifindex) else {
                continue;
            };
            let Some(neighbour) = self.tables.state.neighbour(ifindex, addr) else {
                continue;
            };
            if neighbour.usable().is_some() {
                self.neighbours.is_known((ifindex, addr));
            } else if neighbour.is_failed() {
                let (tables, netlink) = (&self.tables, &mut self.netlink);
                let now = self.dataplane.now();
                let hop = (ifindex, addr);
                self.neighbours.has_failed(hop, tables, netlink, now);
                self.next.silent.push((port, addr));
            }
        }
    }

    /// Opens interfaces that are new or up again, closes removed ones, and applies changes of MTU
    /// and MAC address. `starting`: an interface that cannot be opened is an error; later, the
    /// keeper tries again each second. With the TUN backend, only calls
    /// [`answer_on_links`](Self::answer_on_links).
    pub(super) fn attach_links(&mut self, starting: bool) -> Result<(), HostError> {
        if self.interception.is_routed() {
            return self.answer_on_links();
        }
        self.let_go_of_links();
        self.follow_takers();
        let automatic = self.setup.interfaces.is_empty();
        let links: Vec<Link> = self
            .tables
            .state
            .links()
            .filter(|link| {
                if self.tables.port_of(link.index).is_some() {
                    link.is_arp_capable()
                } else if automatic {
                    is_usable(link)
                } else {
                    link.is_arp_capable() && self.setup.names(&link.name)
                }
            })
            .cloned()
            .collect();
        for link in links {
            let Some(mac) = link.mac else { continue };
            let mut known = KnownPort {
                ifindex: link.index,
                name: Arc::from(link.name.as_str()),
                info: PortInfo {
                    mac: Mac(mac),
                    mtu: link.mtu,
                    ethernet: true,
                    offload: true,
                    gives_back: self.interception.gives_back(link.index),
                },
                down: (!link.running).then(|| self.dataplane.now()),
                decapsulates: decapsulates(link.kind.as_deref()),
            };
            if let Some(port) = self.tables.port_of(link.index) {
                match self.tables.port(port).map(|before| before.down) {
                    Some(None) if !link.running => info!("{} is down", link.name),
                    Some(Some(_)) if link.running => info!("{} is up", link.name),
                    Some(since) => known.down = since,
                    None => {}
                }
                self.tables.set_port(port, known);
                self.write_address(link.index, Mac(mac));
                continue;
            }
            match self.open_link(&link) {
                Ok((ports, group)) => {
                    self.waits.was_opened(&link.name);
                    known.info.gives_back = self.interception.gives_back(link.index);
                    info!(
                        "the dataplane uses {} (af_packet, MTU {})",
                        link.name, link.mtu
                    );
                    self.vips.interface_added(&known);
                    self.write_address(link.index, Mac(mac));
                    let port = self.tables.free_port();
                    self.tables.set_port(port, known);
                    self.vips.announce_again(port);
                    self.groups.extend(group.map(|group| (port, group)));
                    let ports = ports.into_iter().map(|io| Port::AfPacket(Box::new(io)));
                    self.next.attach.push((port, ports.collect()));
                }
                // The interface was removed in the meantime.
                Err(
                    HostError::Open(OpenError::NoInterface { .. })
                    | HostError::Shield(ShieldError::NoInterface { .. }),
                ) => {}
                Err(error) if starting => return Err(error),
                Err(error) => self.waits.has_failed(&link.name, error.to_string()),
            }
        }
        let (routed, now) = (self.interception.is_routed(), self.dataplane.now());
        self.waits.follow(&self.setup, &self.tables, routed, now);
        if automatic && starting && self.tables.interfaces().next().is_none() {
            warn!("no Ethernet interface is up: waiting for one (`ip link set NAME up`)");
        }
        Ok(())
    }

    /// Checks whether frames can still be reinjected on the interface of their arrival, and updates
    /// the ports for which this has changed.
    pub(super) fn check_way_back(&mut self) {
        let changed = |(port, known): (PortId, &KnownPort)| {
            let there = self.interception.gives_back(known.ifindex);
            (there != known.info.gives_back).then(|| (port, known.clone(), there))
        };
        let changed: Vec<_> = self.tables.interfaces().filter_map(changed).collect();
        for (port, mut known, there) in changed {
            known.info.gives_back = there;
            let name = &known.name;
            if there {
                info!("packets are reinjected into the host on {name} again");
            } else {
                warn!(
                    "the BPF program lvs_back is not attached to the egress of {name} any more, or another one is before it (`bpftool net show dev {name}`): packets are reinjected into the host on the device {} instead; add this device to the host's rules that match an interface. Restart the dataplane to attach the program again",
                    HostDevice::NAME
                );
            }
            self.tables.set_port(port, known);
            self.next.tables_differ = true;
        }
    }

    /// Suspends the kernel fast path while its programs are not the first ones of their interfaces:
    /// frames that the packet sockets refuse would be lost. (The programs notice this too, but only
    /// when they lose a frame. After [`MISSED_MAX`] such frames, the fast path is suspended until
    /// the dataplane is restarted.)
    pub(super) fn check_programs(&mut self) {
        let Some(fast_path) = self.setup.fast_path.clone() else {
            return;
        };
        self.follow_takers();
        let behind: Vec<&str> = self
            .tables
            .interfaces()
            .filter(|(_, known)| !fast_path.is_first_at(known.ifindex))
            .map(|(_, known)| &*known.name)
            .collect();
        let missed = fast_path.has_missed();
        if !behind.is_empty() {
            if self.aside.is_none() {
                let names = behind.join(", ");
                let show = match fast_path.attached_by() {
                    "clsact" => format!("tc filter show dev {} ingress", behind[0]),
                    _ => format!("bpftool net show dev {}", behind[0]),
                };
                let reason = format!(
                    "lvs_ingress is not the first BPF program at the ingress of {names} any more"
                );
                let fix = format!(
                    "`{show}` shows whether another program is before lvs_ingress, or lvs_ingress is detached. Attach the other program after lvs_ingress, and the dataplane continues automatically; if lvs_ingress is detached, restart the dataplane. --fast-path off avoids the conflict"
                );
                warn!(
                    code = "fast_path_off",
                    "the dataplane itself forwards all packets: {reason}. To do: {fix}"
                );
                fast_path.stands_aside(Some((reason, fix)));
                self.aside = Some(fast_path.hold());
            }
        } else if missed && self.missed < MISSED_MAX {
            self.missed += 1;
            warn!(
                "a frame was lost before lvs_ingress: a BPF program was attached or detached there"
            );
            fast_path.forgive();
        } else if missed {
            if self.aside.is_none() {
                let reason =
                    "frames get lost before they reach lvs_ingress, the BPF program at the ingress";
                let fix = "`bpftool net` lists the other programs; start the dataplane with --fast-path off";
                warn!(
                    code = "fast_path_off",
                    "the dataplane itself forwards all packets: {reason}. To do: {fix}"
                );
                fast_path.stands_aside(Some((reason.to_owned(), fix.to_owned())));
                self.aside = Some(fast_path.hold());
            }
        } else if self.aside.take().is_some() {
            info!("established connections are forwarded by the kernel fast path again");
            fast_path.stands_aside(None);
        }
    }

    /// Opens one packet socket for each packet worker on the interface `link`, attaches the XDP
    /// program if the interface uses XDP, and hides the interface's service traffic from the host.
    fn open_link(&mut self, link: &Link) -> Result<(Vec<AfPacket>, Option<Group>), HostError> {
        let turn = self.interception.turn_back();
        let fast_path = self.setup.fast_path.as_ref();
        let opened = match self.plan() {
            Some(plan) => AfPacket::open_group(link.index, &link.name, turn, fast_path, &plan)?,
            None => {
                let io = AfPacket::open_with(link.index, &link.name, turn, fast_path)?;
                (vec![io], None)
            }
        };
        // This function runs again each second if it fails. If XDP is refused, no rule of nf_tables
        // was added. If the rules are refused, XDP stays attached: some drivers reset the link when
        // a program is attached.
        self.attach_xdp(link)?;
        self.interception.add_interface(&link.name)?;
        Ok(opened)
    }

    /// Reads again which interfaces can send frames without socket buffers, for the XDP program. If
    /// the kernel does not report this, the program sends no frames, and the failure is logged.
    pub(super) fn follow_takers(&mut self) {
        let (Some(fast_path), Ok(xdp)) = (&self.setup.fast_path, &mut self.xdp) else {
            return;
        };
        match xdp.takers() {
            Ok(takers) => {
                if self.unreported.take().is_some() {
                    info!("XDP forwards again: the kernel reports the features of interfaces");
                }
                fast_path.set_takers(takers);
            }
            Err(error) => {
                let error = error.to_string();
                if self.unreported.as_ref() != Some(&error) {
                    warn!(
                        "XDP forwards nothing: the kernel does not report the features of interfaces: {error}"
                    );
                }
                self.unreported = Some(error);
                fast_path.set_takers(HashSet::new());
            }
        }
    }

    /// Sets an interface's MAC address for the kernel fast path.
    fn write_address(&self, ifindex: u32, mac: Mac) {
        if let Some(fast_path) = &self.setup.fast_path {
            fast_path.set_address(ifindex, mac);
        }
    }

    /// Closes interfaces that were removed, or have become ports of a bridge or bond without being
    /// named in the configuration. Applies new names.
    fn let_go_of_links(&mut self) {
        let (attached, state) = (&mut self.attached_xdp, &self.tables.state);
        attached.retain(|ifindex, _| state.link(*ifindex).is_some());
        let mut gone = Vec::new();
        let mut renamed = Vec::new();
        for (port, known) in self.tables.interfaces() {
            // A bridge or bond receives the frames of its ports, unless the configuration names the
            // port.
            let automatic = self.setup.interfaces.is_empty();
            match self.tables.state.link(known.ifindex) {
                None => gone.push(port),
                Some(link) if automatic && link.master.is_some() => gone.push(port),
                Some(link) if *link.name != *known.name => {
                    renamed.push((known.name.clone(), link.name.clone()));
                }
                Some(_) => {}
            }
        }
        for port in gone {
            self.detach(port);
        }
        for (old, new) in renamed {
            self.rename(&old, &new);
        }
    }

    /// With the TUN backend, sets the interfaces on which the host answers ARP and neighbour
    /// discovery for the dataplane's own addresses.
    fn answer_on_links(&mut self) -> Result<(), HostError> {
        let automatic = self.setup.interfaces.is_empty();
        let links = self.tables.state.links().filter(|link| {
            if automatic {
                is_usable(link)
            } else {
                link.up && self.setup.names(&link.name)
            }
        });
        let links: BTreeMap<u32, String> =
            links.map(|link| (link.index, link.name.clone())).collect();
        self.interception.set_interfaces(links)?;
        let (routed, now) = (self.interception.is_routed(), self.dataplane.now());
        self.waits.follow(&self.setup, &self.tables, routed, now);
        Ok(())
    }

    fn detach(&mut self, port: PortId) {
        let Some(gone) = self.tables.remove_port(port) else {
            return;
        };
        self.groups.remove(&port);
        self.detach_xdp(gone.ifindex);
        self.next.detach.push(port);
        if let Err(error) = self.interception.remove_interface(&gone.name) {
            debug!("{error}");
        }
        warn!(
            "the interface {} is no longer in use: it was removed, or became a port of a bridge or bond",
            gone.name
        );
    }

    /// Passes an interface's new name to the shield. The port gets the name later, with the other
    /// properties.
    fn rename(&mut self, old: &str, name: &str) {
        info!("the interface {old} was renamed to {name}");
        // Add the new name first, so that the host never receives a frame of a service.
        let mut shielded = self.interception.add_interface(name);
        let state = &self.tables.state;
        let mut others = self.tables.interfaces();
        let taken = others.any(|(_, known)| {
            state
                .link(known.ifindex)
                .is_some_and(|link| link.name == old)
        });
        if !taken && shielded.is_ok() {
            shielded = self.interception.remove_interface(old);
        }
        if let Err(error) = shielded {
            warn!("{name}: {error}");
        }
    }
}
