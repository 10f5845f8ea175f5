//! The shield: nf_tables rules that hide the frames of services from the host's own stack, because
//! the dataplane handles them.
//!
//! A packet socket receives a *copy* of each frame; the host would answer the original with a RST,
//! or forward it a second time. The shield is an nf_tables table of the family `netdev`, whose
//! chains drop such frames at the ingress of the interfaces, after the packet sockets and before
//! all other hooks. The table is *owned* by the dataplane's netlink socket: the kernel removes it
//! with the last process that has this socket, even after a kill, and no other process can change
//! it (`nft flush ruleset` leaves it in place).
//!
//! ```text
//! table netdev lvs-1234 { flags owner;
//!   chain in-eth0 { type filter hook ingress device "eth0" priority -300;      one for each interface
//!     mark GIVEN_BACK mark set 0 accept          reinjected frames: the host receives them without the mark
//!     pkttype != host accept                     frames for other stations, such as a macvlan child
//!     vlan id 0 vlan type vlan vlan id 0 drop    two priority tags: the rules below cannot read past both
//!     ether type ip  jump hide4                  frames without a VLAN tag
//!     ether type ip6 jump hide6
//!     vlan id 0 vlan type ip  jump hide4         frames with a priority tag; other VLANs have their own device
//!     vlan id 0 vlan type ip6 jump hide6 }
//!   chain hide4 {
//!     daddr @own_vips drop                       the host would route it back into the dataplane
//!     daddr . protocol . dport @services drop
//!     daddr . protocol @service_hosts drop       services with all ports
//!     fragment daddr @vips drop
//!     ah daddr @vips drop                        IPv6 only: nf_tables does not read past AH
//!     daddr @vips jump short4                    drops packets with an incomplete transport header
//!     icmp error daddr @vips drop
//!     for answers of servers to other hosts (fib daddr type != local):
//!       saddr . protocol . sport @servers drop
//!       saddr . protocol @server_hosts drop      servers with all ports
//!       fragment saddr @server_addresses drop    IPv6: also AH
//!       icmp error about a packet to @server_addresses drop
//!     the same for answers that NAT does not translate: @services, @service_hosts, @vips
//!     the same for answers to local addresses of full NAT: daddr @local_addresses instead of fib
//!     fragment of icmp @icmp_fragments fib daddr type != local drop
//!     icmp @icmp_in_transit fib daddr type != local drop
//!     saddr . protocol . sport . daddr . dport @local_clients drop }
//!   chain hide6 { the same } }
//! ```
//!
//! If the dataplane does not handle a hidden frame, it has to reinject it into the host
//! ([`HostDevice`](crate::io::tun::HostDevice)).

mod nft;
mod rules;
mod sets;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_sys::{Socket, SocketAddr as NetlinkAddr, protocols::NETLINK_NETFILTER};

use self::nft::{Base, Batch, REG, SetSpec, TYPE_ICMP};
use self::sets::{HIDE, ICMP_ERRORS, LOCAL_CLIENTS, V4, V6, elements};
use crate::netlink::message::messages;
use lvs_packet::intercept::{Intercept, LocalClient};
use lvs_packet::wire::vlan;

/// Priority of the hook: before connection tracking, NAT and all other hooks at the ingress.
const PRIORITY: i32 = -300;

/// Maximum number of simultaneous connections of the director's own host whose answers are hidden,
/// for each IP version.
const LOCAL_CLIENTS_MAX: u32 = 65_536;

/// An error of the shield.
#[derive(Debug, thiserror::Error)]
pub enum ShieldError {
    /// The process has no permission to change nf_tables.
    #[error(
        "no permission to hide handled packets from the host's network stack: run as root, or give the program CAP_NET_ADMIN"
    )]
    Permission,
    /// The kernel lacks a feature.
    #[error(
        "the kernel cannot hide handled packets from its own network stack ({source}): it needs nf_tables with the family netdev, owned tables (Linux 5.12) and the fib expression (CONFIG_NF_TABLES, CONFIG_NF_TABLES_NETDEV, CONFIG_NFT_FIB_NETDEV; modules nf_tables and nft_fib_netdev)"
    )]
    Unsupported {
        /// The error of the kernel.
        source: io::Error,
    },
    /// The interface does not exist.
    #[error("the interface {interface} to shield does not exist: `ip link` lists the interfaces")]
    NoInterface {
        /// Name of the missing interface.
        interface: String,
    },
    /// Another error of a system call.
    #[error("cannot {what} in the table {table}: {source}{words}")]
    Os {
        /// The action that failed, as a verb with its object.
        what: String,
        /// Name of the shield's table.
        table: String,
        /// The error of the kernel.
        source: io::Error,
        /// The message of the kernel, in brackets, if it sent one.
        words: String,
    },
}

/// The shield. The kernel removes it when this value is dropped or the process ends, unless another
/// process has a copy of the netlink socket that made the table.
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
    /// The socket that owns the table. The table exists until all processes have closed the socket.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Creates the table. It hides no frames until an interface is added. Frames with the mark
    /// `given_back` are never hidden; the table clears this mark.
    ///
    /// # Errors
    /// The process has no permission, the kernel lacks a feature, or it refuses the table.
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
            // The port number is usually the process id, and always unique in the network
            // namespace.
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

    /// Name of the shield's table in nftables.
    pub fn table(&self) -> &str {
        &self.table
    }

    /// Hides frames of services at the ingress of an interface from now on. Call it again after an
    /// interface was removed and created with the same name.
    ///
    /// # Errors
    /// The interface does not exist, or the kernel refuses the rules. (Since Linux 6.16, a missing
    /// interface is not an error: the kernel waits for it.)
    pub fn add_interface(&mut self, interface: &str) -> Result<(), ShieldError> {
        let chain = chain_name(interface);
        if self.chains.remove(&chain) {
            // With the interface, the kernel has removed the chain (until Linux 6.15) or kept it
            // (from 6.16 on).
            self.delete_chain(&chain)?;
        }
        let table = self.table.clone();
        let mut batch = Batch::new(&table, self.seq);
        batch.add_ingress_chain(&chain, interface, PRIORITY);
        if let Some(mark) = self.given_back {
            batch.add_rule(&chain, |rule| {
                rule.load_mark()
                    .equal(&mark.to_ne_bytes())
                    .clear_mark()
                    .accept();
            });
        }
        batch.add_rule(&chain, |rule| {
            rule.load_packet_type()
                .not_equal(&[libc::PACKET_HOST])
                .accept();
        });
        for outer in [vlan::TAG, vlan::SERVICE_TAG] {
            for inner in [vlan::TAG, vlan::SERVICE_TAG] {
                batch.add_rule(&chain, |rule| {
                    rule.load(Base::Link, 12, 2, REG)
                        .equal(&outer.to_be_bytes())
                        .load(Base::Link, 14, 2, REG)
                        .mask(&[0x0f, 0xff])
                        .equal(&[0, 0])
                        .load(Base::Link, 16, 2, REG)
                        .equal(&inner.to_be_bytes())
                        .load(Base::Link, 18, 2, REG)
                        .mask(&[0x0f, 0xff])
                        .equal(&[0, 0])
                        .drop();
                });
            }
        }
        for family in [V4, V6] {
            batch.add_rule(&chain, |rule| {
                rule.load(Base::Link, 12, 2, REG)
                    .equal(&family.ether_type)
                    .jump(&family.name(HIDE));
            });
            for tag in [vlan::TAG, vlan::SERVICE_TAG] {
                batch.add_rule(&chain, |rule| {
                    rule.load(Base::Link, 12, 2, REG)
                        .equal(&tag.to_be_bytes())
                        .load(Base::Link, 14, 2, REG)
                        .mask(&[0x0f, 0xff])
                        .equal(&[0, 0])
                        .load(Base::Link, 16, 2, REG)
                        .equal(&family.ether_type)
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

    /// Stops hiding frames on an interface. An interface that is missing or was never added is not
    /// an error.
    ///
    /// # Errors
    /// The kernel refuses.
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

    /// Hides the packets that `spec` describes. Apart from answers to [local
    /// clients](Self::add_local_clients), no others are hidden. Sends the difference to the present
    /// state in one transaction, so that each packet is matched against either the old or the new
    /// state. Returns the number of added and deleted elements.
    ///
    /// # Errors
    /// The kernel refuses; the shield is then unchanged.
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
        self.commit(batch).map_err(|failure| {
            self.os("change the packets that are hidden from the host", failure)
        })?;
        self.applied = wanted;
        Ok(changed)
    }

    /// Also hides the packets that `spec` describes. Returns the number of added elements. Unlike
    /// [`update`](Self::update), it does not compare the whole state, which saves time if one of
    /// thousands of services changes.
    ///
    /// # Errors
    /// The kernel refuses; the shield is then unchanged.
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
        self.commit(batch).map_err(|failure| {
            self.os("change the packets that are hidden from the host", failure)
        })?;
        let mut count = 0;
        for (set, keys) in added {
            count += keys.len();
            self.applied.entry(set).or_default().extend(keys);
        }
        Ok(count)
    }

    /// Hides the answers to connections that the host itself has opened, until
    /// [`remove_local_clients`](Self::remove_local_clients). Call it before the first packets of
    /// these connections are forwarded.
    ///
    /// # Errors
    /// The kernel refuses, or there are too many connections.
    pub fn add_local_clients(&mut self, clients: &[LocalClient]) -> Result<(), ShieldError> {
        let table = self.table.clone();
        let mut batch = Batch::new(&table, self.seq);
        for client in clients {
            let (set, key) = sets::local_client(client);
            batch.add_elements(&set, &[key]);
        }
        if batch.is_empty() {
            return Ok(());
        }
        self.commit(batch)
            .map_err(|failure| self.os("hide the replies of the host's own connections", failure))
    }

    /// Reverts [`add_local_clients`](Self::add_local_clients). Call it for many connections at
    /// once: each call costs the kernel a grace period, regardless of the number of connections.
    ///
    /// # Errors
    /// The kernel refuses, for instance because one of the connections is not hidden.
    pub fn remove_local_clients(&mut self, clients: &[LocalClient]) -> Result<(), ShieldError> {
        let table = self.table.clone();
        let mut batch = Batch::new(&table, self.seq);
        for client in clients {
            let (set, key) = sets::local_client(client);
            batch.delete_elements(&set, &[key]);
        }
        if batch.is_empty() {
            return Ok(());
        }
        self.commit(batch).map_err(|failure| {
            self.os(
                "stop hiding the replies of the host's own connections",
                failure,
            )
        })
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

    /// Sends a batch and reads the kernel's answers, which have arrived when sending returns.
    fn commit(&mut self, batch: Batch<'_>) -> Result<(), Failure> {
        let (bytes, last, next_seq) = batch.finish();
        let first = self.seq;
        self.seq = next_seq;
        // A datagram must fit into the send buffer; the kernel adds about the same amount for its
        // own data.
        if bytes.len() > 64 << 10 {
            let room = i32::try_from(bytes.len().saturating_mul(2)).unwrap_or(i32::MAX);
            lvs_sys::set_send_buffer(&self.socket, room)?;
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

/// The kernel's refusal of a batch.
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

fn chain_name(interface: &str) -> String {
    format!("in-{interface}")
}
