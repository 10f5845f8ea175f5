//! Links, addresses, routes and neighbours: read once, then followed by the kernel's events.
//!
//! ```text
//! Netlink ── dump, then events ──▶ NetState ◀── lookup(), neighbour(), ... without system calls
//!    └────── resolve(), manage(), add_route(): requests to the kernel
//! ```
//!
//! The kernel's own tables decide; nothing is resolved or routed here. Policy rules (`ip rule`) are not followed beyond
//! the three that every host has, which is logged where others exist.

pub(crate) mod message;
mod state;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

use self::message::{Builder, Message, messages, u32_at};
pub use self::state::{Address, Changes, Link, Mac, Neighbour, NetState, RouteHit, RouteKind};
use crate::shield_spec::Endpoint;
use crate::sys;

/// What went wrong between this process and the kernel's routing tables.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// The kernel refused a request, or does not answer.
    #[error("cannot {what}: {source}{}", hint(source))]
    Os {
        /// What was wanted.
        what: String,
        /// What the kernel said.
        source: io::Error,
    },
}

fn hint(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::EPERM) => " (run as root, or give the program CAP_NET_ADMIN)",
        Some(libc::EEXIST) => " (the host has one already)",
        _ => "",
    }
}

/// Groups of events: `RTNLGRP_LINK`, `NEIGH`, `IPV4_IFADDR`, `IPV4_ROUTE`, `IPV4_RULE`, `IPV6_IFADDR`, `IPV6_ROUTE`,
/// `IPV6_RULE`.
const GROUPS: [u32; 8] = [1, 3, 5, 7, 8, 9, 11, 19];

/// Receive buffer for events: a full table of a few ten thousand routes that comes at once.
const EVENT_BUFFER: i32 = 8 << 20;

/// The routing table that answers of servers on this host are led to: "LVS" in ASCII.
pub const LEAD_TABLE: u32 = 0x4c_56_53;
/// Place of the rules that do it: before the table `main`, behind what an administrator is likely to put in front of it.
const LEAD_PRIORITY: u32 = 30_000;

// linux/fib_rules.h.
const FRA_SRC: u16 = 2;
const FRA_PRIORITY: u16 = 6;
const FRA_TABLE: u16 = 15;
const FRA_IP_PROTO: u16 = 22;
const FRA_SPORT_RANGE: u16 = 23;
const FR_ACT_TO_TBL: u8 = 1;

/// Messages that are read in one call of [`Netlink::poll_events`] at most, so that a storm of events does not keep a
/// worker from its packets.
const EVENTS_MAX: usize = 256;

/// The two sockets: one for requests, one for events.
#[derive(Debug)]
pub struct Netlink {
    requests: Socket,
    events: Socket,
    seq: u32,
    buf: Vec<u8>,
    rules_seen: bool,
    /// A reading failed; the next round repeats it.
    stale: bool,
}

impl Netlink {
    /// Joins the kernel's events and reads everything once.
    ///
    /// # Errors
    /// If the kernel does not let this process read its tables.
    pub fn open() -> Result<(Self, NetState), NetlinkError> {
        let open = || -> io::Result<(Socket, Socket)> {
            let mut requests = Socket::new(NETLINK_ROUTE)?;
            requests.bind_auto()?;
            requests.connect(&SocketAddr::new(0, 0))?;
            requests.set_ext_ack(true)?;
            requests.set_cap_ack(true)?;
            sys::set_receive_buffer(&requests, 1 << 20)?;
            let mut events = Socket::new(NETLINK_ROUTE)?;
            events.bind_auto()?;
            sys::set_receive_buffer(&events, EVENT_BUFFER)?;
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
            seq: 1,
            buf: Vec::with_capacity(64 << 10),
            rules_seen: false,
            stale: false,
        };
        // Events are joined first: what happens during the reading is applied after it.
        let state = this.read_all().map_err(|source| NetlinkError::Os {
            what: "read the kernel's links and routes".to_owned(),
            source,
        })?;
        Ok((this, state))
    }

    /// What to poll for events.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    /// Applies the events that are waiting to `state`, a bounded number at a time, and tells what they changed. If
    /// events were lost, everything is read anew.
    ///
    /// # Errors
    /// If the kernel's tables cannot be read; `state` is then as it was, and the next call tries again.
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
                        routes_stale |= state.apply(&message, &mut changes);
                    }
                }
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => break,
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                // ENOBUFS: the socket's buffer was full. Empty it, then read everything.
                Err(err) if err.raw_os_error() == Some(libc::ENOBUFS) => lost = true,
                Err(source) => {
                    return Err(NetlinkError::Os {
                        what: "receive the kernel's events".to_owned(),
                        source,
                    });
                }
            }
        }
        let again = if lost {
            tracing::info!("events of the kernel's tables were lost; reading everything anew");
            self.read_all().map(|fresh| {
                let known = changes.neighbours.clone();
                changes = Changes {
                    links: true,
                    addresses: true,
                    routes: true,
                    neighbours: fresh.differing_neighbours(state),
                    resynchronised: true,
                };
                changes.neighbours.extend(known);
                *state = fresh;
            })
        } else if routes_stale {
            let mut fresh = state.clone();
            fresh.clear_routes();
            self.dump(libc::RTM_GETROUTE, &[0; 12], |message| {
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
                what: "read the kernel's links and routes anew".to_owned(),
                source,
            }
        })?;
        Ok(changes)
    }

    /// Has the kernel resolve a neighbour, or confirm what it knows; the answer comes as an event. Our own frames do not
    /// pass the kernel's neighbour code, so what is to stay fresh has to be asked for again. (Entries that the kernel
    /// manages by itself, `NTF_EXT_MANAGED`, would outlive this process.) What somebody has set by hand stays as it is.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn resolve(
        &mut self,
        state: &NetState,
        ifindex: u32,
        ip: IpAddr,
    ) -> Result<(), NetlinkError> {
        // The kernel would take the permanence from such an entry (__neigh_update()).
        if state.neighbour(ifindex, ip).is_some_and(|n| n.is_static()) {
            return Ok(());
        }
        let mut header = [0; 12];
        header[0] = family_of(ip);
        header[4..8].copy_from_slice(&ifindex.to_ne_bytes());
        header[8..10].copy_from_slice(&libc::NUD_INCOMPLETE.to_ne_bytes());
        header[10] = libc::NTF_USE;
        let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
        self.request(libc::RTM_NEWNEIGH, flags, &header, |b| {
            b.attr(libc::NDA_DST, &octets(ip));
        })
        .map_err(|source| NetlinkError::Os {
            what: format!("resolve the neighbour {ip} on interface {ifindex}"),
            source,
        })
    }

    /// Routes `ip` alone to an interface, in the table `main`. The route goes when the interface goes.
    ///
    /// # Errors
    /// If the kernel refuses; it does when there is such a route already.
    pub fn add_host_route(&mut self, ip: IpAddr, ifindex: u32) -> Result<(), NetlinkError> {
        let flags = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
        self.host_route(libc::RTM_NEWROUTE, flags, ip, ifindex)
            .map_err(|source| NetlinkError::Os {
                what: format!("add a route to {ip} over interface {ifindex}"),
                source,
            })
    }

    /// Ends [`Self::add_host_route`]. A route that is gone already is no error.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn delete_host_route(&mut self, ip: IpAddr, ifindex: u32) -> Result<(), NetlinkError> {
        match self.host_route(libc::RTM_DELROUTE, 0, ip, ifindex) {
            Err(err) if err.raw_os_error() == Some(libc::ESRCH) => Ok(()),
            result => result.map_err(|source| NetlinkError::Os {
                what: format!("delete the route to {ip} over interface {ifindex}"),
                source,
            }),
        }
    }

    fn host_route(&mut self, kind: u16, flags: i32, ip: IpAddr, ifindex: u32) -> io::Result<()> {
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
            libc::RTPROT_STATIC,
            scope,
            libc::RTN_UNICAST,
            0,
            0,
            0,
            0,
        ];
        self.request(kind, flags, &header, |b| {
            b.attr(libc::RTA_DST, &octets(ip));
            b.attr(libc::RTA_OIF, &ifindex.to_ne_bytes());
        })
    }

    /// Leads what comes from `endpoint` on this host to the routes of [`LEAD_TABLE`]; port 0 is every port.
    ///
    /// # Errors
    /// If the kernel refuses, as one without policy routing does.
    pub fn add_lead_rule(&mut self, endpoint: &Endpoint) -> Result<(), NetlinkError> {
        let flags = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
        match self.lead_rule(libc::RTM_NEWRULE, flags, endpoint) {
            Err(err) if err.raw_os_error() == Some(libc::EEXIST) => Ok(()),
            result => result.map_err(|source| NetlinkError::Os {
                what: format!("add a policy rule for what {} sends", endpoint.address),
                source,
            }),
        }
    }

    /// Ends [`Self::add_lead_rule`]. A rule that is gone already is no error.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn delete_lead_rule(&mut self, endpoint: &Endpoint) -> Result<(), NetlinkError> {
        match self.lead_rule(libc::RTM_DELRULE, 0, endpoint) {
            Err(err) if err.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            result => result.map_err(|source| NetlinkError::Os {
                what: format!("delete the policy rule for what {} sends", endpoint.address),
                source,
            }),
        }
    }

    fn lead_rule(&mut self, kind: u16, flags: i32, endpoint: &Endpoint) -> io::Result<()> {
        let bits = if endpoint.address.is_ipv4() { 32 } else { 128 };
        // struct fib_rule_hdr: family, lengths of destination and source, TOS, table, two reserved, action, flags.
        let header = [
            family_of(endpoint.address),
            0,
            bits,
            0,
            0,
            0,
            0,
            FR_ACT_TO_TBL,
            0,
            0,
            0,
            0,
        ];
        self.request(kind, flags, &header, |b| {
            b.attr(FRA_SRC, &octets(endpoint.address));
            b.attr(FRA_PRIORITY, &LEAD_PRIORITY.to_ne_bytes());
            b.attr(FRA_TABLE, &LEAD_TABLE.to_ne_bytes());
            b.attr(FRA_IP_PROTO, &[endpoint.protocol.0]);
            if endpoint.port != 0 {
                let [low, high] = endpoint.port.to_ne_bytes();
                b.attr(FRA_SPORT_RANGE, &[low, high, low, high]);
            }
        })
    }

    /// Deletes every rule that leads to [`LEAD_TABLE`], and tells how many there were.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn delete_lead_rules(&mut self) -> Result<usize, NetlinkError> {
        let mut ours: Vec<Vec<u8>> = Vec::new();
        // A kernel without policy routing refuses this, and has no rules.
        let _ = self.dump(libc::RTM_GETRULE, &[0; 12], |message| {
            if message.kind == libc::RTM_NEWRULE && rule_table(message) == Some(LEAD_TABLE) {
                ours.push(message.payload.to_vec());
            }
        });
        for rule in &ours {
            self.request(libc::RTM_DELRULE, 0, rule, |_| {})
                .map_err(|source| NetlinkError::Os {
                    what: format!("delete a policy rule to table {LEAD_TABLE}"),
                    source,
                })?;
        }
        Ok(ours.len())
    }

    /// Gives [`LEAD_TABLE`] its only route, for the family of `like`: everything to an interface.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn add_lead_route(&mut self, like: IpAddr, ifindex: u32) -> Result<(), NetlinkError> {
        let scope = match like {
            IpAddr::V4(_) => libc::RT_SCOPE_LINK,
            IpAddr::V6(_) => libc::RT_SCOPE_UNIVERSE,
        };
        let header = [
            family_of(like),
            0,
            0,
            0,
            libc::RT_TABLE_UNSPEC,
            libc::RTPROT_STATIC,
            scope,
            libc::RTN_UNICAST,
            0,
            0,
            0,
            0,
        ];
        let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
        self.request(libc::RTM_NEWROUTE, flags, &header, |b| {
            b.attr(libc::RTA_TABLE, &LEAD_TABLE.to_ne_bytes());
            b.attr(libc::RTA_OIF, &ifindex.to_ne_bytes());
        })
        .map_err(|source| NetlinkError::Os {
            what: format!("add a route to table {LEAD_TABLE} over interface {ifindex}"),
            source,
        })
    }

    /// Sends a request and waits for its acknowledgement.
    fn request(
        &mut self,
        kind: u16,
        flags: i32,
        header: &[u8],
        fill: impl FnOnce(&mut Builder),
    ) -> io::Result<()> {
        let mut builder = Builder::new(self.next_seq());
        let flags = flags | libc::NLM_F_REQUEST | libc::NLM_F_ACK;
        builder.begin(kind, u16::try_from(flags).unwrap_or(0), header);
        fill(&mut builder);
        builder.end();
        self.requests.send(builder.bytes(), 0)?;
        loop {
            self.buf.clear();
            receive(&self.requests, &mut self.buf)?;
            for message in messages(&self.buf) {
                if message.seq != self.seq {
                    continue;
                }
                match message.error() {
                    Some((0, _)) => return Ok(()),
                    Some(error) => return Err(refusal(error)),
                    None => {}
                }
            }
        }
    }

    fn next_seq(&mut self) -> u32 {
        self.seq = self.seq.wrapping_add(1).max(1);
        self.seq
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
            self.dump(kind, &[0; 16][..header_len], |message| {
                state.apply(message, &mut changes);
            })?;
        }
        if !self.rules_seen {
            let mut seen = false;
            // A kernel without policy routing refuses this, and has no rules.
            let _ = self.dump(libc::RTM_GETRULE, &[0; 12], |message| {
                if message.kind == libc::RTM_NEWRULE && !seen {
                    seen = warn_of_rule(message);
                }
            });
            self.rules_seen = seen;
        }
        Ok(state)
    }

    /// Asks for a whole table. One that changes while it is read is still consistent with the events that follow.
    fn dump(
        &mut self,
        kind: u16,
        header: &[u8],
        mut each: impl FnMut(&Message<'_>),
    ) -> io::Result<()> {
        const NLMSG_DONE: u16 = 3;
        let mut builder = Builder::new(self.next_seq());
        let flags = libc::NLM_F_REQUEST | libc::NLM_F_DUMP;
        builder.begin(kind, u16::try_from(flags).unwrap_or(0), header);
        builder.end();
        self.requests.send(builder.bytes(), 0)?;
        loop {
            self.buf.clear();
            receive(&self.requests, &mut self.buf)?;
            for message in messages(&self.buf) {
                if message.seq != self.seq {
                    continue;
                }
                if let Some(error) = message.error() {
                    return Err(refusal(error));
                }
                if message.kind == NLMSG_DONE {
                    return Ok(());
                }
                each(&message);
            }
        }
    }
}

/// Receives one datagram whole; a signal does not end the wait.
fn receive(socket: &Socket, buf: &mut Vec<u8>) -> io::Result<()> {
    loop {
        match socket.recv(buf, libc::MSG_TRUNC) {
            Ok(len) if len > buf.len() => {
                return Err(io::Error::other(
                    "the kernel's answer is longer than any known one",
                ));
            }
            Ok(_) => return Ok(()),
            Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
            Err(err) => return Err(err),
        }
    }
}

/// The kernel's refusal as an error, with its own words if it gave any.
pub(crate) fn refusal((errno, words): (i32, Option<String>)) -> io::Error {
    let err = io::Error::from_raw_os_error(errno);
    if let Some(words) = words {
        tracing::debug!("the kernel says: {words} ({err})");
    }
    err
}

/// An attribute of 32 bits of a policy rule.
fn rule_attribute(message: &Message<'_>, wanted: u16) -> Option<u32> {
    let rest = message.payload.get(12..)?;
    let (_, value) = message::attributes(rest).find(|(kind, _)| *kind == wanted)?;
    u32_at(value, 0)
}

fn rule_table(message: &Message<'_>) -> Option<u32> {
    rule_attribute(message, FRA_TABLE)
}

/// Warns of a policy rule beyond those that every host has and our own; says whether it did.
fn warn_of_rule(message: &Message<'_>) -> bool {
    let priority = rule_attribute(message, FRA_PRIORITY).unwrap_or(0);
    let ordinary = matches!(priority, 0 | 32766 | 32767) || rule_table(message) == Some(LEAD_TABLE);
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
