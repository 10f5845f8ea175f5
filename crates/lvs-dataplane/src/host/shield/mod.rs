//! The shield: what the host's own stack must not see, because the director handles it.
//!
//! A packet socket receives a *copy* of each frame; the host would answer the original with a RST,
//! or forward it a second time. The shield is an nf_tables table of the family `netdev`, whose
//! chains drop such frames at the ingress of the interfaces, behind the packet sockets and before
//! everything else. The table is *owned* by our netlink socket: the kernel removes it with the
//! process, however that ends, and nobody else can change it (`nft flush ruleset` leaves
//! it in place).
//!
//! ```text
//! table netdev lvs-1234 { flags owner;
//!   chain in-eth0 { type filter hook ingress device "eth0" priority -300;      one for each interface
//!     mark GIVEN_BACK mark set 0 accept what the host should have seen, and sees now as it came
//!     pkttype != host accept            other stations' frames: a macvlan child's, and what IPVS does not take
//!     vlan id 0 vlan type vlan vlan id 0 drop   the host would look behind both, and the chains below cannot
//!     ether type ip  jump hide4         a frame with a VLAN tag has another type: it belongs to a VLAN device,
//!     ether type ip6 jump hide6         unless the tag says nothing but a priority
//!     vlan id 0 vlan type ip  jump hide4
//!     vlan id 0 vlan type ip6 jump hide6 }
//!   chain hide4 {
//!     daddr @own_vips drop              its route leads into the engine: it would come in a second time
//!     daddr . protocol . dport @services drop,   daddr . protocol @service_hosts drop       (all ports)
//!     fragment daddr @vips drop,        icmp error daddr @vips drop
//!     ah daddr @vips drop                                                       IPv6: what is behind AH is not looked at
//!     daddr @vips jump short4                                                   whose transport header is not whole
//!     saddr . protocol . sport @servers fib daddr type != local drop,   ... @server_hosts   (all ports)
//!     fragment saddr @server_addresses fib daddr type != local drop,   IPv6: ah likewise
//!     the same three for answers of servers that are not translated: @services, @service_hosts, @vips
//!     the first three and the next one for daddr @local_addresses, in place of `fib`: full NAT
//!     icmp error about a packet to @server_addresses or @vips fib daddr type != local drop
//!     fragment of icmp @icmp_fragments fib daddr type != local drop,   icmp @icmp_in_transit fib daddr type != local drop
//!     saddr . protocol . sport . daddr . dport @local_clients drop }
//!   chain hide6 { the same } }
//! ```
//!
//! What a director then leaves alone it has to give back to the host
//! ([`HostDevice`](crate::io::tun::HostDevice)).

mod nft;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use lvs_core::Protocol;
use netlink_sys::{Socket, SocketAddr as NetlinkAddr, protocols::NETLINK_NETFILTER};

use self::nft::{
    Base, Batch, REG, RuleBody, SetSpec, TYPE_ICMP, TYPE_IP4, TYPE_IP6, TYPE_PORT, TYPE_PROTOCOL,
};
use crate::netlink::message::messages;
use crate::packet::intercept::{Intercept, LocalClient};
use crate::packet::parse::HEADERS;
use crate::packet::wire::{ipv6, vlan};
use crate::sys;

/// Before connection tracking, NAT and everything else that the host may have at its ingress.
const PRIORITY: i32 = -300;

/// Connections of the director's own that can be hidden at a time.
const LOCAL_CLIENTS_MAX: u32 = 65_536;

/// What went wrong with the shield.
#[derive(Debug, thiserror::Error)]
pub enum ShieldError {
    /// The process may not change nf_tables.
    #[error(
        "no permission to keep the host's own stack from handled packets: run as root, or give the program CAP_NET_ADMIN"
    )]
    Permission,
    /// The kernel lacks what is needed.
    #[error(
        "the kernel cannot keep its own stack from handled packets ({source}): it needs nf_tables with the family netdev, \
         owned tables (Linux 5.12) and the fib expression (CONFIG_NF_TABLES, CONFIG_NF_TABLES_NETDEV, \
         CONFIG_NFT_FIB_NETDEV; modules nf_tables and nft_fib_netdev)"
    )]
    Unsupported {
        /// What the kernel said.
        source: io::Error,
    },
    /// There is no such interface.
    #[error("there is no interface {interface} to be shielded: `ip link` lists them")]
    NoInterface {
        /// The interface.
        interface: String,
    },
    /// Anything else.
    #[error("cannot {what} in the table {table}: {source}{words}")]
    Os {
        /// What was wanted.
        what: String,
        /// The table.
        table: String,
        /// What the kernel said.
        source: io::Error,
        /// The kernel's own words, in brackets, if it gave any.
        words: String,
    },
}

/// The shield. It ends with this value, or with the process.
#[derive(Debug)]
pub struct Shield {
    socket: Socket,
    seq: u32,
    table: String,
    chains: BTreeSet<String>,
    applied: BTreeMap<String, BTreeSet<Vec<u8>>>,
    given_back: Option<u32>,
    buf: Vec<u8>,
}

impl Shield {
    /// Creates the table. It hides nothing yet, on no interface, and never a frame with the mark
    /// `given_back`, which it takes off.
    ///
    /// # Errors
    /// Without the privilege, or if the kernel lacks something.
    pub fn open(given_back: Option<u32>) -> Result<Self, ShieldError> {
        let unsupported = |source| ShieldError::Unsupported { source };
        let mut socket = Socket::new(NETLINK_NETFILTER).map_err(unsupported)?;
        let address = socket.bind_auto().map_err(unsupported)?;
        socket
            .connect(&NetlinkAddr::new(0, 0))
            .and_then(|()| socket.set_ext_ack(true))
            .and_then(|()| socket.set_cap_ack(true))
            .map_err(unsupported)?;
        let mut this = Self {
            socket,
            seq: 1,
            // The port is this process's number, as a rule, and unique in the network namespace in
            // any case.
            table: format!("lvs-{}", address.port_number()),
            chains: BTreeSet::new(),
            applied: BTreeMap::new(),
            given_back,
            buf: Vec::with_capacity(32 << 10),
        };
        let table = this.table.clone();
        let mut batch = Batch::new(&table, this.seq);
        batch.add_table();
        let mut id = 0;
        for family in [V4, V6] {
            for set in family.sets() {
                id += 1;
                batch.add_set(&SetSpec {
                    name: &family.name(set.name),
                    id,
                    key_types: &set.key_types,
                    key_len: set.key_len,
                    limit: (set.name == LOCAL_CLIENTS).then_some(LOCAL_CLIENTS_MAX),
                });
            }
        }
        batch.add_set(&SetSpec {
            name: ICMP_ERRORS,
            id: id + 1,
            key_types: &[TYPE_ICMP],
            key_len: 1,
            limit: None,
        });
        batch.add_elements(ICMP_ERRORS, &[vec![3], vec![4], vec![11]]);
        for family in [V4, V6] {
            family.add_rules(&mut batch);
        }
        this.commit(batch)
            .map_err(|failure| match failure.source.raw_os_error() {
                Some(libc::EPERM | libc::EACCES) => ShieldError::Permission,
                Some(libc::EOPNOTSUPP | libc::EAFNOSUPPORT | libc::ENOENT | libc::EINVAL) => {
                    ShieldError::Unsupported {
                        source: failure.source,
                    }
                }
                _ => this.os("create sets and chains", failure),
            })?;
        Ok(this)
    }

    /// The table's name.
    pub fn table(&self) -> &str {
        &self.table
    }

    /// Hides handled frames at the ingress of an interface from now on. To do it again for an
    /// interface that was removed and has come back under the same name is right.
    ///
    /// # Errors
    /// If there is no such interface. (Since Linux 6.16 that is no error: the kernel waits for one
    /// of this name.)
    pub fn add_interface(&mut self, interface: &str) -> Result<(), ShieldError> {
        let chain = chain_name(interface);
        if self.chains.remove(&chain) {
            // With the interface, the kernel has removed the chain (until Linux 6.15) or kept it
            // (since).
            self.delete_chain(&chain)?;
        }
        let table = self.table.clone();
        let mut batch = Batch::new(&table, self.seq);
        batch.add_ingress_chain(&chain, interface, PRIORITY);
        if let Some(mark) = self.given_back {
            batch.add_rule(&chain, |rule| {
                rule.load_mark(REG)
                    .equal(REG, &mark.to_ne_bytes())
                    .clear_mark(REG)
                    .accept();
            });
        }
        batch.add_rule(&chain, |rule| {
            rule.load_packet_type(REG)
                .not_equal(REG, &[libc::PACKET_HOST])
                .accept();
        });
        for outer in [vlan::TAG, vlan::SERVICE_TAG] {
            for inner in [vlan::TAG, vlan::SERVICE_TAG] {
                batch.add_rule(&chain, |rule| {
                    rule.load(Base::Link, 12, 2, REG)
                        .equal(REG, &outer.to_be_bytes())
                        .load(Base::Link, 14, 2, REG)
                        .mask(REG, &[0x0f, 0xff])
                        .equal(REG, &[0, 0])
                        .load(Base::Link, 16, 2, REG)
                        .equal(REG, &inner.to_be_bytes())
                        .load(Base::Link, 18, 2, REG)
                        .mask(REG, &[0x0f, 0xff])
                        .equal(REG, &[0, 0])
                        .drop();
                });
            }
        }
        for family in [V4, V6] {
            batch.add_rule(&chain, |rule| {
                rule.load(Base::Link, 12, 2, REG)
                    .equal(REG, &family.ether_type)
                    .jump(&family.name(HIDE));
            });
            for tag in [vlan::TAG, vlan::SERVICE_TAG] {
                batch.add_rule(&chain, |rule| {
                    rule.load(Base::Link, 12, 2, REG)
                        .equal(REG, &tag.to_be_bytes())
                        .load(Base::Link, 14, 2, REG)
                        .mask(REG, &[0x0f, 0xff])
                        .equal(REG, &[0, 0])
                        .load(Base::Link, 16, 2, REG)
                        .equal(REG, &family.ether_type)
                        .jump(&family.name(HIDE));
                });
            }
        }
        self.commit(batch)
            .map_err(|failure| match failure.source.raw_os_error() {
                Some(libc::ENOENT | libc::ENODEV) => ShieldError::NoInterface {
                    interface: interface.to_owned(),
                },
                _ => self.os(&format!("shield the interface {interface}"), failure),
            })?;
        self.chains.insert(chain);
        Ok(())
    }

    /// Hides nothing on an interface any more. One that is gone, or was never added, is no error.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn remove_interface(&mut self, interface: &str) -> Result<(), ShieldError> {
        let chain = chain_name(interface);
        if self.chains.remove(&chain) {
            self.delete_chain(&chain)?;
        }
        Ok(())
    }

    fn delete_chain(&mut self, chain: &str) -> Result<(), ShieldError> {
        let table = self.table.clone();
        let mut batch = Batch::new(&table, self.seq);
        batch.delete_chain(chain);
        match self.commit(batch) {
            Err(failure) if failure.source.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            result => {
                result.map_err(|failure| self.os(&format!("delete the chain {chain}"), failure))
            }
        }
    }

    /// Hides exactly what `spec` says: sends the difference to what is hidden now, all of it or
    /// nothing, and returns how many elements were added or deleted. Packets see the old state
    /// or the new one.
    ///
    /// # Errors
    /// If the kernel refuses; what was hidden before is hidden still.
    pub fn update(&mut self, spec: &Intercept) -> Result<usize, ShieldError> {
        let wanted = elements(spec);
        let table = self.table.clone();
        let mut batch = Batch::new(&table, self.seq);
        let mut changed = 0;
        let none = BTreeSet::new();
        for set in wanted
            .keys()
            .chain(self.applied.keys().filter(|set| !wanted.contains_key(*set)))
        {
            let old = self.applied.get(set).unwrap_or(&none);
            let new = wanted.get(set).unwrap_or(&none);
            let gone: Vec<_> = old.difference(new).cloned().collect();
            let added: Vec<_> = new.difference(old).cloned().collect();
            changed += gone.len() + added.len();
            batch.delete_elements(set, &gone);
            batch.add_elements(set, &added);
        }
        if batch.is_empty() {
            return Ok(0);
        }
        self.commit(batch)
            .map_err(|failure| self.os("change what is hidden from the host", failure))?;
        self.applied = wanted;
        Ok(changed)
    }

    /// Hides more, without looking at the rest: for a director with thousands of services, one of
    /// which has changed. Returns how many elements were added.
    ///
    /// # Errors
    /// If the kernel refuses; what was hidden before is hidden still.
    pub fn extend(&mut self, spec: &Intercept) -> Result<usize, ShieldError> {
        let mut added = elements(spec);
        for (set, keys) in &mut added {
            if let Some(there) = self.applied.get(set) {
                keys.retain(|key| !there.contains(key));
            }
        }
        let table = self.table.clone();
        let mut batch = Batch::new(&table, self.seq);
        for (set, keys) in &added {
            batch.add_elements(set, &keys.iter().cloned().collect::<Vec<_>>());
        }
        if batch.is_empty() {
            return Ok(0);
        }
        self.commit(batch)
            .map_err(|failure| self.os("change what is hidden from the host", failure))?;
        let mut count = 0;
        for (set, keys) in added {
            count += keys.len();
            self.applied.entry(set).or_default().extend(keys);
        }
        Ok(count)
    }

    /// Hides the answers of connections that the host itself has made, until
    /// [`remove_local_clients`](Self::remove_local_clients). It has to be done before their first
    /// packets are forwarded.
    ///
    /// # Errors
    /// If the kernel refuses, or if there are too many.
    pub fn add_local_clients(&mut self, clients: &[LocalClient]) -> Result<(), ShieldError> {
        let table = self.table.clone();
        let mut batch = Batch::new(&table, self.seq);
        for client in clients {
            let (set, key) = client.element();
            batch.add_elements(&set, &[key]);
        }
        if batch.is_empty() {
            return Ok(());
        }
        self.commit(batch)
            .map_err(|failure| self.os("hide connections of the host's own", failure))
    }

    /// Ends [`add_local_clients`](Self::add_local_clients), for all of them at once: a change costs
    /// the kernel a grace period, whatever its size.
    ///
    /// # Errors
    /// If the kernel refuses, as it does if one of them is not hidden.
    pub fn remove_local_clients(&mut self, clients: &[LocalClient]) -> Result<(), ShieldError> {
        let table = self.table.clone();
        let mut batch = Batch::new(&table, self.seq);
        for client in clients {
            let (set, key) = client.element();
            batch.delete_elements(&set, &[key]);
        }
        if batch.is_empty() {
            return Ok(());
        }
        self.commit(batch)
            .map_err(|failure| self.os("show connections of the host's own", failure))
    }

    fn os(&self, what: &str, failure: Failure) -> ShieldError {
        ShieldError::Os {
            what: what.to_owned(),
            table: self.table.clone(),
            words: failure
                .words
                .map_or_else(String::new, |w| format!(" ({w})")),
            source: failure.source,
        }
    }

    /// Sends a batch and reads the kernel's answers, all of which are there when sending returns.
    fn commit(&mut self, batch: Batch<'_>) -> Result<(), Failure> {
        let (bytes, last, next_seq) = batch.finish();
        let first = self.seq;
        self.seq = next_seq;
        // A datagram must fit the send buffer; the kernel counts about as much again for itself.
        if bytes.len() > 64 << 10 {
            let room = i32::try_from(bytes.len().saturating_mul(2)).unwrap_or(i32::MAX);
            sys::set_send_buffer(&self.socket, room)?;
        }
        self.socket.send(&bytes, 0)?;
        let mut acknowledged = false;
        let mut failure = None;
        loop {
            self.buf.clear();
            match self.socket.recv(&mut self.buf, libc::MSG_DONTWAIT) {
                Ok(_) => {}
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => break,
                Err(err) if err.kind() == io::ErrorKind::Interrupted => continue,
                Err(err) => return Err(err.into()),
            }
            for message in messages(&self.buf) {
                if message.seq < first || message.seq >= next_seq {
                    continue;
                }
                match message.error() {
                    Some((0, _)) => acknowledged |= message.seq == last,
                    Some((errno, words)) if failure.is_none() => {
                        failure = Some(Failure {
                            source: io::Error::from_raw_os_error(errno),
                            words,
                        });
                    }
                    _ => {}
                }
            }
        }
        match failure {
            Some(failure) => Err(failure),
            None if acknowledged => Ok(()),
            None => Err(io::Error::other("the kernel did not answer").into()),
        }
    }
}

/// What the kernel has against a batch.
#[derive(Debug)]
struct Failure {
    source: io::Error,
    words: Option<String>,
}

impl From<io::Error> for Failure {
    fn from(source: io::Error) -> Self {
        Self {
            source,
            words: None,
        }
    }
}

/// Names of sets and chains; `4` or `6` follows.
const OWN_VIPS: &str = "own_vips";
const SERVICES: &str = "services";
const SERVICE_HOSTS: &str = "service_hosts";
const VIPS: &str = "vips";
const SERVERS: &str = "servers";
const SERVER_HOSTS: &str = "server_hosts";
const SERVER_ADDRESSES: &str = "server_addresses";
const LOCAL_ADDRESSES: &str = "local_addresses";
const LOCAL_CLIENTS: &str = "local_clients";
/// What fragments say that may be ICMP, if its fragments that pass through are hidden; and its
/// number, if all of it is.
const ICMP_FRAGMENTS: &str = "icmp_fragments";
const ICMP_IN_TRANSIT: &str = "icmp_in_transit";
const HIDE: &str = "hide";
const SHORT: &str = "short";
/// ICMP's destination unreachable, source quench and time exceeded: the errors that IPVS relates to
/// connections.
const ICMP_ERRORS: &str = "icmp_errors4";

fn chain_name(interface: &str) -> String {
    format!("in-{interface}")
}

/// What differs between the two versions of IP.
#[derive(Clone, Copy)]
struct Family {
    suffix: char,
    ether_type: [u8; 2],
    address_type: u32,
    address_len: u32,
    source: u32,
    destination: u32,
    icmp: u8,
}

const V4: Family = Family {
    suffix: '4',
    ether_type: [0x08, 0x00],
    address_type: TYPE_IP4,
    address_len: 4,
    source: 12,
    destination: 16,
    icmp: 1,
};

const V6: Family = Family {
    suffix: '6',
    ether_type: [0x86, 0xdd],
    address_type: TYPE_IP6,
    address_len: 16,
    source: 8,
    destination: 24,
    icmp: 58,
};

struct FamilySet {
    name: &'static str,
    key_types: Vec<u32>,
    key_len: u32,
}

impl Family {
    fn of(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(_) => V4,
            IpAddr::V6(_) => V6,
        }
    }

    fn name(self, base: &str) -> String {
        format!("{base}{}", self.suffix)
    }

    fn sets(self) -> Vec<FamilySet> {
        let ip = self.address_type;
        let len = self.address_len;
        let set = |name, key_types: &[u32], key_len| FamilySet {
            name,
            key_types: key_types.to_vec(),
            key_len,
        };
        vec![
            set(OWN_VIPS, &[ip], len),
            set(SERVICES, &[ip, TYPE_PROTOCOL, TYPE_PORT], len + 8),
            set(SERVICE_HOSTS, &[ip, TYPE_PROTOCOL], len + 4),
            set(VIPS, &[ip], len),
            set(SERVERS, &[ip, TYPE_PROTOCOL, TYPE_PORT], len + 8),
            set(SERVER_HOSTS, &[ip, TYPE_PROTOCOL], len + 4),
            set(SERVER_ADDRESSES, &[ip], len),
            set(LOCAL_ADDRESSES, &[ip], len),
            set(ICMP_FRAGMENTS, &[TYPE_PROTOCOL], 1),
            set(ICMP_IN_TRANSIT, &[TYPE_PROTOCOL], 1),
            set(
                LOCAL_CLIENTS,
                &[ip, TYPE_PROTOCOL, TYPE_PORT, ip, TYPE_PORT],
                2 * len + 12,
            ),
        ]
    }

    /// The chain that decides what is hidden.
    fn add_rules(self, batch: &mut Batch<'_>) {
        let hide = self.name(HIDE);
        let len = self.address_len;
        // Registers behind an address.
        let second = REG + len / 4;
        let third = second + 1;
        let fourth = third + 1;
        let address = |rule: &mut RuleBody<'_>, offset| {
            rule.load(Base::Network, offset, len, REG);
        };
        let short = self.name(SHORT);
        batch.add_chain(&hide);
        self.add_short_rules(&short, batch);
        batch.add_rule(&hide, |rule| {
            address(rule, self.destination);
            rule.in_set(&self.name(OWN_VIPS)).drop();
        });
        batch.add_rule(&hide, |rule| {
            address(rule, self.destination);
            rule.load_protocol(second)
                .load(Base::Transport, 2, 2, third)
                .in_set(&self.name(SERVICES))
                .drop();
        });
        batch.add_rule(&hide, |rule| {
            address(rule, self.destination);
            rule.load_protocol(second)
                .in_set(&self.name(SERVICE_HOSTS))
                .drop();
        });
        batch.add_rule(&hide, |rule| {
            self.fragment(rule);
            address(rule, self.destination);
            rule.in_set(&self.name(VIPS)).drop();
        });
        if self.walks_to_ah() {
            batch.add_rule(&hide, |rule| {
                rule.load_protocol(REG).equal(REG, &[Protocol::AH.0]);
                address(rule, self.destination);
                rule.in_set(&self.name(VIPS)).drop();
            });
        }
        batch.add_rule(&hide, |rule| {
            address(rule, self.destination);
            rule.in_set(&self.name(VIPS)).jump(&short);
        });
        batch.add_rule(&hide, |rule| {
            self.icmp_error(rule);
            address(rule, self.destination);
            rule.in_set(&self.name(VIPS)).drop();
        });
        // Translated answers and others to whom they concern, and translated ones to what stands
        // for a client.
        let to_others = |rule: &mut RuleBody<'_>| {
            rule.not_for_host();
        };
        let to_local = |rule: &mut RuleBody<'_>| {
            address(rule, self.destination);
            rule.in_set(&self.name(LOCAL_ADDRESSES));
        };
        self.add_answers(batch, [SERVERS, SERVER_HOSTS, SERVER_ADDRESSES], to_others);
        self.add_answers(batch, [SERVICES, SERVICE_HOSTS, VIPS], to_others);
        self.add_answers(batch, [SERVERS, SERVER_HOSTS, SERVER_ADDRESSES], to_local);
        batch.add_rule(&hide, |rule| {
            self.fragment(rule);
            self.load_fragmented_protocol(rule);
            rule.in_set(&self.name(ICMP_FRAGMENTS))
                .not_for_host()
                .drop();
        });
        batch.add_rule(&hide, |rule| {
            rule.load_protocol(REG)
                .in_set(&self.name(ICMP_IN_TRANSIT))
                .not_for_host()
                .drop();
        });
        batch.add_rule(&hide, |rule| {
            address(rule, self.source);
            rule.load_protocol(second)
                .load(Base::Transport, 0, 2, third)
                .load(Base::Network, self.destination, len, fourth)
                .load(Base::Transport, 2, 2, fourth + len / 4)
                .in_set(&self.name(LOCAL_CLIENTS))
                .drop();
        });
    }

    /// Hides what comes from one port or from all ports of servers, fragments of theirs, and ICMP
    /// errors about packets to them, as far as `concerns` says.
    fn add_answers(
        self,
        batch: &mut Batch<'_>,
        [one_port, all_ports, addresses]: [&str; 3],
        concerns: impl Fn(&mut RuleBody<'_>),
    ) {
        let hide = self.name(HIDE);
        let len = self.address_len;
        let second = REG + len / 4;
        batch.add_rule(&hide, |rule| {
            rule.load(Base::Network, self.source, len, REG)
                .load_protocol(second)
                .load(Base::Transport, 0, 2, second + 1)
                .in_set(&self.name(one_port));
            concerns(rule);
            rule.drop();
        });
        batch.add_rule(&hide, |rule| {
            rule.load(Base::Network, self.source, len, REG)
                .load_protocol(second)
                .in_set(&self.name(all_ports));
            concerns(rule);
            rule.drop();
        });
        batch.add_rule(&hide, |rule| {
            self.fragment(rule);
            rule.load(Base::Network, self.source, len, REG)
                .in_set(&self.name(addresses));
            concerns(rule);
            rule.drop();
        });
        if self.walks_to_ah() {
            batch.add_rule(&hide, |rule| {
                rule.load_protocol(REG)
                    .equal(REG, &[Protocol::AH.0])
                    .load(Base::Network, self.source, len, REG)
                    .in_set(&self.name(addresses));
                concerns(rule);
                rule.drop();
            });
        }
        batch.add_rule(&hide, |rule| {
            self.icmp_error(rule);
            // Where the packet inside was going, behind the 8 bytes of the message: whoever
            // complains about it.
            rule.load(Base::Transport, 8 + self.destination, len, REG)
                .in_set(&self.name(addresses));
            concerns(rule);
            rule.drop();
        });
    }

    /// The chain that drops what ends before its transport header does: an expression that cannot
    /// load the last bytes of it ends its rule. Padding of Ethernet can be loaded, so the
    /// length that the IP header tells is looked at first; the kernel's longest aggregates tell
    /// none.
    fn add_short_rules(self, short: &str, batch: &mut Batch<'_>) {
        const LAST: u16 = 4;
        // Of IPv4 the length counts the header, here one without options.
        let (length_at, ip_header) = match self.suffix {
            '4' => (2, 20),
            _ => (4, 0),
        };
        batch.add_chain(short);
        for (protocol, header) in HEADERS {
            let protocol = [protocol.0];
            let header = u16::try_from(header).unwrap_or(u16::MAX);
            let least = header.saturating_add(ip_header);
            batch.add_rule(short, |rule| {
                rule.load_protocol(REG)
                    .equal(REG, &protocol)
                    .load(Base::Network, length_at, 2, REG)
                    .not_equal(REG, &[0, 0])
                    .less(REG, &least.to_be_bytes())
                    .drop();
            });
            batch.add_rule(short, |rule| {
                rule.load_protocol(REG)
                    .equal(REG, &protocol)
                    .load(Base::Transport, (header - LAST).into(), LAST.into(), REG)
                    .go_back();
            });
            batch.add_rule(short, |rule| {
                rule.load_protocol(REG).equal(REG, &protocol).drop();
            });
        }
    }

    /// Whether AH is a header on the way to the protocol that IPVS looks at, where nf_tables takes
    /// it for the protocol.
    fn walks_to_ah(self) -> bool {
        self.suffix == '6'
    }

    fn fragment(self, rule: &mut RuleBody<'_>) {
        match self.suffix {
            // More fragments, or an offset.
            '4' => rule
                .load(Base::Network, 6, 2, REG)
                .mask(REG, &[0x3f, 0xff])
                .not_equal(REG, &[0, 0]),
            _ => rule.has_fragment_header(),
        };
    }

    /// Loads what a fragment says that it is a part of.
    fn load_fragmented_protocol(self, rule: &mut RuleBody<'_>) {
        match self.suffix {
            '4' => rule.load_protocol(REG),
            _ => rule.load_next_header_of_fragment(REG),
        };
    }

    fn icmp_error(self, rule: &mut RuleBody<'_>) {
        rule.load_protocol(REG)
            .equal(REG, &[self.icmp])
            .load(Base::Transport, 0, 1, REG);
        match self.suffix {
            '4' => rule.in_set(ICMP_ERRORS),
            // The high bit tells informational messages from errors (RFC 4443, 2.1).
            _ => rule.mask(REG, &[0x80]).equal(REG, &[0]),
        };
    }
}

/// The elements of each set.
fn elements(spec: &Intercept) -> BTreeMap<String, BTreeSet<Vec<u8>>> {
    let mut sets: BTreeMap<String, BTreeSet<Vec<u8>>> = BTreeMap::new();
    let mut put = |ip: IpAddr, set: &str, key: Vec<u8>| {
        sets.entry(Family::of(ip).name(set))
            .or_default()
            .insert(key);
    };
    for ip in &spec.own_vips {
        put(*ip, OWN_VIPS, address_key(*ip));
    }
    for ip in &spec.local_addresses {
        put(*ip, LOCAL_ADDRESSES, address_key(*ip));
    }
    let any = [
        IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    ];
    for ip in any {
        if spec.takes_icmp_fragments(ip) {
            put(ip, ICMP_FRAGMENTS, vec![Family::of(ip).icmp]);
            // It may stand behind other headers.
            for extension in ipv6::EXTENSIONS.into_iter().filter(|_| ip.is_ipv6()) {
                put(ip, ICMP_FRAGMENTS, vec![extension]);
            }
        }
        if spec.every_icmp {
            put(ip, ICMP_IN_TRANSIT, vec![Family::of(ip).icmp]);
        }
    }
    for (endpoints, one_port, all_ports, addresses) in [
        (&spec.services, SERVICES, SERVICE_HOSTS, VIPS),
        (&spec.nat_servers, SERVERS, SERVER_HOSTS, SERVER_ADDRESSES),
    ] {
        for endpoint in endpoints.iter() {
            let ip = endpoint.address;
            put(ip, addresses, address_key(ip));
            let mut key = address_key(ip);
            key.extend([endpoint.protocol.0, 0, 0, 0]);
            if endpoint.port == 0 {
                put(ip, all_ports, key);
            } else {
                key.extend(port_key(endpoint.port));
                put(ip, one_port, key);
            }
        }
    }
    sets
}

impl LocalClient {
    /// Its set and its key.
    fn element(&self) -> (String, Vec<u8>) {
        let mut key = address_key(self.server.ip());
        key.extend([self.protocol.0, 0, 0, 0]);
        key.extend(port_key(self.server.port()));
        key.extend(address_key(self.local.ip()));
        key.extend(port_key(self.local.port()));
        (Family::of(self.server.ip()).name(LOCAL_CLIENTS), key)
    }
}

fn address_key(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// Each field of a key fills whole registers of 32 bits.
fn port_key(port: u16) -> [u8; 4] {
    let [high, low] = port.to_be_bytes();
    [high, low, 0, 0]
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::packet::intercept::Endpoint;

    fn endpoint(address: &str, protocol: u8, port: u16) -> Endpoint {
        Endpoint {
            address: address.parse().unwrap(),
            protocol: Protocol(protocol),
            port,
        }
    }

    #[test]
    fn a_service_hides_its_port_and_the_fragments_of_its_address() {
        let spec = Intercept {
            services: [
                endpoint("192.0.2.1", 6, 80),
                endpoint("192.0.2.1", 17, 0),
                endpoint("2001:db8::1", 6, 443),
            ]
            .into(),
            ..Intercept::default()
        };
        let sets = elements(&spec);
        let keys = |set: &str| sets[set].iter().cloned().collect::<Vec<_>>();
        assert_eq!(keys("services4"), [[192, 0, 2, 1, 6, 0, 0, 0, 0, 80, 0, 0]]);
        assert_eq!(keys("service_hosts4"), [[192, 0, 2, 1, 17, 0, 0, 0]]);
        assert_eq!(keys("vips4"), [[192, 0, 2, 1]]);
        assert_eq!(keys("services6")[0].len(), 24);
        assert_eq!(sets.len(), 5);
    }

    #[test]
    fn keys_are_as_long_as_their_sets_say() {
        for (family, ip) in [(V4, "192.0.2.1"), (V6, "2001:db8::1")] {
            let spec = Intercept {
                services: [endpoint(ip, 6, 80), endpoint(ip, 6, 0)].into(),
                nat_servers: [endpoint(ip, 6, 80), endpoint(ip, 6, 0)].into(),
                own_vips: [ip.parse().unwrap()].into(),
                local_addresses: [ip.parse().unwrap()].into(),
                every_icmp: true,
                ..Intercept::default()
            };
            let mut sets = elements(&spec);
            // ICMP of the other version, too, whatever the services are.
            sets.retain(|name, _| name.ends_with(family.suffix));
            let client = LocalClient {
                protocol: Protocol::TCP,
                server: SocketAddr::new(ip.parse().unwrap(), 80),
                local: SocketAddr::new(ip.parse().unwrap(), 40_000),
            };
            let (set, key) = client.element();
            sets.entry(set).or_default().insert(key);
            let declared = family.sets();
            assert_eq!(sets.len(), declared.len());
            for set in declared {
                for key in &sets[&family.name(set.name)] {
                    assert_eq!(
                        key.len(),
                        usize::try_from(set.key_len).unwrap(),
                        "{}",
                        set.name
                    );
                }
            }
        }
    }
}
