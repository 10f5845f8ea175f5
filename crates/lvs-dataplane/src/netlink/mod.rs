//! Links, addresses, routes and neighbours: they are read once, and then updated by the kernel's
//! events.
//!
//! ```text
//! Netlink ── dump, then events ──▶ NetState ◀── lookup(), neighbour(), ... without system calls
//!    └────── resolve(), confirm(), add_host_route(), ...: requests to the kernel
//! ```
//!
//! This module only imitates look-ups in the kernel's tables; the kernel resolves neighbours. It
//! supports only the three policy rules (`ip rule`) that every host has; if others exist, it logs a
//! warning.

mod filter;
pub(crate) mod message;
pub(crate) mod policy;
mod requests;
mod state;
mod xdp;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_sys::{Socket, protocols::NETLINK_ROUTE};

pub(crate) use self::filter::Filters;
use self::message::{Message, messages, u32_at};
pub(crate) use self::requests::Requests;
pub use self::state::{
    Address, Changes, Link, LinkAddress, Neighbour, NetState, RouteHit, RouteKind,
};
pub(crate) use self::xdp::{Driver, Offloads, XdpFeatures};

/// The error if the kernel's tables cannot be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// The kernel refused a request, or does not answer.
    #[error("cannot {what}: {source}{}", hint(source))]
    Os {
        /// The action that failed, as a verb with its object.
        what: String,
        /// The error of the kernel.
        source: io::Error,
    },
}

fn hint(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::EPERM) => " (run as root, or give the program CAP_NET_ADMIN)",
        Some(libc::EEXIST) => " (the host already has one)",
        _ => "",
    }
}

/// Multicast groups for events: `RTNLGRP_LINK`, `NEIGH`, `IPV4_IFADDR`, `IPV4_ROUTE`, `IPV4_RULE`,
/// `IPV6_IFADDR`, `IPV6_ROUTE`, `IPV6_RULE`.
const GROUPS: [u32; 8] = [1, 3, 5, 7, 8, 9, 11, 19];

/// Size in bytes of the receive buffer for events: enough for tens of thousands of routes at once.
const EVENT_BUFFER: i32 = 8 << 20;

/// Maximum number of messages that one call of [`Netlink::poll_events`] reads, so that a flood of
/// events does not delay packets.
const EVENTS_MAX: usize = 256;

/// Two netlink sockets: one for requests, one for events.
#[derive(Debug)]
pub struct Netlink {
    requests: Requests,
    events: Socket,
    buf: Vec<u8>,
    rules_seen: bool,
    /// Whether the tables could not be read; the next [`Netlink::poll_events`] reads them again.
    stale: bool,
}

impl Netlink {
    /// Subscribes to the kernel's events, and reads all tables once.
    ///
    /// # Errors
    /// If a socket cannot be opened, or the kernel does not let this process read its tables.
    pub fn open() -> Result<(Self, NetState), NetlinkError> {
        let open = || -> io::Result<(Requests, Socket)> {
            let requests = Requests::open()?;
            let mut events = Socket::new(NETLINK_ROUTE)?;
            events.bind_auto()?;
            lvs_sys::set_receive_buffer(&events, EVENT_BUFFER)?;
            events.set_non_blocking(true)?;
            for group in GROUPS {
                events.add_membership(group)?;
            }
            Ok((requests, events))
        };
        let (requests, events) = open().map_err(|source| NetlinkError::Os {
            what: "follow the kernel's links and routes".to_owned(),
            source,
        })?;
        let mut this = Self {
            requests,
            events,
            buf: Vec::with_capacity(64 << 10),
            rules_seen: false,
            stale: false,
        };
        // Subscribe to events first: changes during the reading are applied after it.
        let state = this.read_all().map_err(|source| NetlinkError::Os {
            what: "read the kernel's links and routes".to_owned(),
            source,
        })?;
        Ok((this, state))
    }

    /// The descriptor to poll for events.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    /// Applies a bounded number of waiting events to `state`. Returns the changes. If events were
    /// lost, reads all tables again.
    ///
    /// # Errors
    /// Events cannot be received, or the tables cannot be read; the next call then reads them
    /// again. Earlier events stay applied to `state`.
    pub fn poll_events(&mut self, state: &mut NetState) -> Result<Changes, NetlinkError> {
        let mut changes = Changes::default();
        let mut routes_stale = false;
        let mut lost = std::mem::take(&mut self.stale);
        for _ in 0..EVENTS_MAX {
            self.buf.clear();
            match self.events.recv(&mut self.buf, libc::MSG_TRUNC) {
                Ok(len) => {
                    lost |= len > self.buf.len();
                    for message in messages(&self.buf) {
                        if message.kind == libc::RTM_NEWRULE && !self.rules_seen {
                            self.rules_seen |= warn_of_rule(&message);
                        }
                        changes.steering |= policy::is_deletion(&message);
                        routes_stale |= state.apply(&message, &mut changes);
                    }
                }
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => break,
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                // ENOBUFS: events were lost. Empty the buffer, then read all tables.
                Err(err) if err.raw_os_error() == Some(libc::ENOBUFS) => lost = true,
                Err(source) => {
                    // The next call reads all tables.
                    self.stale = true;
                    return Err(NetlinkError::Os {
                        what: "receive the kernel's events".to_owned(),
                        source,
                    });
                }
            }
        }
        let again = if lost {
            tracing::info!(
                "events of the kernel's tables were lost, or the tables could not be read: all tables are read again"
            );
            self.read_all().map(|fresh| {
                let known = changes.neighbours.clone();
                changes = Changes {
                    links: true,
                    // The lost events may have concerned any link.
                    appeared: fresh.running_links().collect(),
                    addresses: true,
                    routes: true,
                    neighbours: fresh.differing_neighbours(state),
                    moved: true,
                    steering: true,
                    resynchronised: true,
                };
                changes.neighbours.extend(known);
                *state = fresh;
            })
        } else if routes_stale {
            let mut fresh = state.clone();
            fresh.clear_routes();
            self.requests
                .dump(libc::RTM_GETROUTE, &[0; 12], |message| {
                    fresh.apply(message, &mut Changes::default());
                })
                .map(|()| {
                    changes.routes = true;
                    *state = fresh;
                })
        } else {
            Ok(())
        };
        again.map_err(|source| {
            self.stale = true;
            NetlinkError::Os {
                what: "read the kernel's links and routes again".to_owned(),
                source,
            }
        })?;
        Ok(changes)
    }

    /// Makes the kernel resolve a neighbour, or confirm its entry; the answer arrives as an event.
    /// The kernel does not see the dataplane's frames, so this must be repeated. (`NTF_EXT_MANAGED`
    /// would make the kernel repeat it even after this process has exited.) Permanent entries of
    /// the operator stay unchanged.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn resolve(
        &mut self,
        state: &NetState,
        ifindex: u32,
        ip: IpAddr,
    ) -> Result<(), NetlinkError> {
        // The kernel would make such an entry temporary (__neigh_update()).
        if state.neighbour(ifindex, ip).is_some_and(|n| n.is_static()) {
            return Ok(());
        }
        let mut header = [0; 12];
        header[0] = family_of(ip);
        header[4..8].copy_from_slice(&ifindex.to_ne_bytes());
        header[8..10].copy_from_slice(&libc::NUD_INCOMPLETE.to_ne_bytes());
        header[10] = libc::NTF_USE;
        let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
        self.requests
            .request(libc::RTM_NEWNEIGH, flags, &header, |b| {
                b.attr(libc::NDA_DST, &octets(ip));
            })
            .map_err(|source| NetlinkError::Os {
                what: format!("resolve the neighbour {ip} on interface {ifindex}"),
                source,
            })
    }

    /// Makes the kernel probe a neighbour at once, even if its entry is fresh. A neighbour that
    /// does not answer within three seconds counts as failed. Unresolved neighbours and permanent
    /// entries of the operator stay unchanged.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn confirm(
        &mut self,
        state: &NetState,
        ifindex: u32,
        ip: IpAddr,
    ) -> Result<(), NetlinkError> {
        let known = state.neighbour(ifindex, ip).filter(|n| !n.is_static());
        let Some(mac) = known.and_then(|neighbour| neighbour.usable()) else {
            return Ok(());
        };
        let mut header = [0; 12];
        header[0] = family_of(ip);
        header[4..8].copy_from_slice(&ifindex.to_ne_bytes());
        header[8..10].copy_from_slice(&libc::NUD_PROBE.to_ne_bytes());
        self.requests
            .request(libc::RTM_NEWNEIGH, libc::NLM_F_REPLACE, &header, |b| {
                b.attr(libc::NDA_DST, &octets(ip));
                b.attr(libc::NDA_LLADDR, &mac);
            })
            .map_err(|source| NetlinkError::Os {
                what: format!("confirm the neighbour {ip} on interface {ifindex}"),
                source,
            })
    }

    /// Adds a host route for `ip` to an interface, in the table `main`. The kernel removes the
    /// route with the interface.
    ///
    /// # Errors
    /// If the kernel refuses, for instance because the route exists.
    pub fn add_host_route(&mut self, ip: IpAddr, ifindex: u32) -> Result<(), NetlinkError> {
        let flags = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
        self.host_route(libc::RTM_NEWROUTE, flags, ip, ifindex, libc::RTPROT_STATIC)
            .map_err(|source| NetlinkError::Os {
                what: format!("add a route to {ip} over interface {ifindex}"),
                source,
            })
    }

    /// Reverts [`Self::add_host_route`]. A missing route is not an error.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn delete_host_route(&mut self, ip: IpAddr, ifindex: u32) -> Result<(), NetlinkError> {
        // Delete the route, whatever its protocol is.
        match self.host_route(libc::RTM_DELROUTE, 0, ip, ifindex, 0) {
            Err(err) if err.raw_os_error() == Some(libc::ESRCH) => Ok(()),
            result => result.map_err(|source| NetlinkError::Os {
                what: format!("delete the route to {ip} over interface {ifindex}"),
                source,
            }),
        }
    }

    /// As [`Self::add_host_route`], with a protocol number by which routing daemons select the
    /// route. `replaces`: replaces an existing route in one step.
    ///
    /// # Errors
    /// The kernel refuses, or the route exists and `replaces` is false.
    pub fn announce_route(
        &mut self,
        ip: IpAddr,
        ifindex: u32,
        protocol: u8,
        replaces: bool,
    ) -> Result<(), NetlinkError> {
        let flags = match replaces {
            true => libc::NLM_F_CREATE | libc::NLM_F_REPLACE,
            false => libc::NLM_F_CREATE | libc::NLM_F_EXCL,
        };
        self.host_route(libc::RTM_NEWROUTE, flags, ip, ifindex, protocol)
            .map_err(|source| NetlinkError::Os {
                what: format!("announce {ip} by a route over interface {ifindex}"),
                source,
            })
    }

    fn host_route(
        &mut self,
        kind: u16,
        flags: i32,
        ip: IpAddr,
        ifindex: u32,
        protocol: u8,
    ) -> io::Result<()> {
        let scope = match ip {
            IpAddr::V4(_) => libc::RT_SCOPE_LINK,
            IpAddr::V6(_) => libc::RT_SCOPE_UNIVERSE,
        };
        let header = [
            family_of(ip),
            if ip.is_ipv4() { 32 } else { 128 },
            0,
            0,
            libc::RT_TABLE_MAIN,
            protocol,
            scope,
            libc::RTN_UNICAST,
            0,
            0,
            0,
            0,
        ];
        self.requests.request(kind, flags, &header, |b| {
            b.attr(libc::RTA_DST, &octets(ip));
            b.attr(libc::RTA_OIF, &ifindex.to_ne_bytes());
        })
    }

    fn read_all(&mut self) -> io::Result<NetState> {
        let mut state = NetState::default();
        let mut changes = Changes::default();
        for (kind, header_len) in [
            (libc::RTM_GETLINK, 16),
            (libc::RTM_GETADDR, 8),
            (libc::RTM_GETROUTE, 12),
            (libc::RTM_GETNEIGH, 12),
        ] {
            self.requests
                .dump(kind, &[0; 16][..header_len], |message| {
                    state.apply(message, &mut changes);
                })?;
        }
        if !self.rules_seen {
            let mut seen = false;
            // A kernel without policy routing refuses this, and has no rules.
            let _ = self.requests.dump(libc::RTM_GETRULE, &[0; 12], |message| {
                if message.kind == libc::RTM_NEWRULE && !seen {
                    seen = warn_of_rule(message);
                }
            });
            self.rules_seen = seen;
        }
        Ok(state)
    }
}

/// Logs a warning about a policy rule that neither the kernel nor the dataplane has made. Returns
/// true if it has logged a warning.
fn warn_of_rule(message: &Message<'_>) -> bool {
    if policy::is_own_rule(message) {
        return false;
    }
    const FRA_PRIORITY: u16 = 6;
    let priority = message
        .payload
        .get(12..)
        .and_then(|rest| message::attributes(rest).find(|(kind, _)| *kind == FRA_PRIORITY))
        .and_then(|(_, value)| u32_at(value, 0))
        .unwrap_or(0);
    let ordinary = matches!(priority, 0 | 32766 | 32767);
    if !ordinary {
        tracing::warn!(
            priority,
            "this host has policy rules (`ip rule`); routes to real servers and clients are looked up in the tables \
             local, main and default only"
        );
    }
    !ordinary
}

fn family_of(ip: IpAddr) -> u8 {
    let family = match ip {
        IpAddr::V4(_) => libc::AF_INET,
        IpAddr::V6(_) => libc::AF_INET6,
    };
    u8::try_from(family).expect("address families are small")
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}
