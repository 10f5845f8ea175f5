//! Stores the connections of received synchronisation messages (`ip_vs_proc_conn`), and of updates
//! from peers.

use alloc::sync::Arc;
use core::net::{Ipv6Addr, SocketAddr};
use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;

use super::Control;
use crate::conn::{Draft, Key, NO_SLOT, State, Template, flag};
use crate::persistence_sip;
use crate::shard::{RECENT, Shard};
use crate::sync::bulk::{Item, Kind};
use crate::sync::wire::{self, Entry};
use crate::{Forwarding, Instant, Protocol, Server, Tuple};

/// Flags that a message may set on a new entry (`IP_VS_CONN_F_BACKUP_MASK`).
const TAKEN: u32 = flag::METHOD
    | flag::NO_OUTPUT
    | flag::INACTIVE
    | flag::OUT_SEQ
    | flag::IN_SEQ
    | flag::NO_CPORT
    | flag::TEMPLATE;
/// Flags that a message may change in an existing entry (`IP_VS_CONN_F_BACKUP_UPD_MASK`).
const UPDATED: u32 = flag::INACTIVE | flag::OUT_SEQ | flag::IN_SEQ;

/// Timeout in seconds of a received template, or of a received entry of AH or ESP, if the message
/// contains none.
const TIMEOUT: u32 = 180;

/// If a packet reached each of two directors within this time, the order of the packets counts as
/// unknown.
const TIE: Duration = RECENT;

/// Numbers of received connections and templates, by result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TakenOver {
    /// Connections and templates that were added to their table or updated in it. With
    /// [`Control::take_over`], also inactive connections that were ignored because another
    /// connection has replaced them.
    pub taken: u64,
    /// Connections and templates that were ignored, because their content is invalid.
    pub nonsense: u64,
    /// Connections and templates that could not be stored, because their table was full.
    pub no_room: u64,
}

/// Results for items received from a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ItemResults {
    /// Numbers of items that were stored, that were invalid, and that did not fit into a table.
    pub taken: TakenOver,
    /// Number of connections that were removed because they ended at the peer.
    pub ended: u64,
    /// Number of items that were ignored because this director owns the connection, or has another
    /// connection of this client in its place.
    pub kept: u64,
}

enum Refused {
    Nonsense,
    Full,
}

impl Control {
    /// Stores the entries of a message: connections in `shard`, templates in this `Control`. Does
    /// nothing if no backup is running, if the message is too long or [`wire::parse`] refuses it,
    /// or if `shard` belongs to another director.
    pub fn handle_sync(&mut self, shard: &mut Shard, message: &[u8], now: Instant) {
        let Some(backup) = self.backup else { return };
        if message.len() > backup.maxlen.into() || !self.owns(shard) {
            return;
        }
        if let Ok(read) = wire::parse(message, backup.syncid) {
            self.take_over(shard, read.entries, now);
        }
    }

    /// Stores entries that [`wire::parse`] has read for the running backup: connections in `shard`,
    /// templates in this `Control`. Invalid entries are ignored. Returns the numbers of entries by
    /// result. All are 0 if no backup is running, or if `shard` belongs to another director.
    pub fn take_over(
        &mut self,
        shard: &mut Shard,
        entries: impl IntoIterator<Item = Entry>,
        now: Instant,
    ) -> TakenOver {
        let mut taken = TakenOver::default();
        if self.backup.is_none() || !self.owns(shard) {
            return taken;
        }
        self.sweep(shard);
        for entry in entries {
            match self.take_over_entry(shard, entry, now) {
                Ok(()) => taken.taken += 1,
                Err(Refused::Nonsense) => taken.nonsense += 1,
                Err(Refused::Full) => taken.no_room += 1,
            }
        }
        taken
    }

    /// Applies the updates of a peer ([`bulk::parse`](crate::sync::bulk::parse)): connections are
    /// stored in `shard`, which must receive from this peer ([`Shard::listen_to`]), and templates
    /// in this `Control`. If a packet of a connection has just arrived at the peer, the peer owns
    /// the connection. Otherwise this director stays the owner of a connection whose last packet
    /// arrived here later than at the peer. If the order is not known, `keeps_ties` decides whether
    /// it stays the owner; `keeps_ties` must be true at exactly one of the two directors. Nothing
    /// changes if `shard` has no replication ([`Shard::keep_replicas`]) or belongs to another
    /// director.
    pub fn apply_items(
        &mut self,
        shard: &mut Shard,
        peer: usize,
        keeps_ties: bool,
        items: impl IntoIterator<Item = Item>,
        now: Instant,
    ) -> ItemResults {
        let mut results = ItemResults::default();
        if shard.replicas.is_none() || !self.owns(shard) {
            return results;
        }
        self.sweep(shard);
        for item in items {
            let done = match item.kind {
                Kind::Ended => {
                    results.ended += u64::from(apply_end(shard, peer, &item.entry));
                    continue;
                }
                Kind::Lives | Kind::Comes => self.hear_of(shard, peer, keeps_ties, item, now),
            };
            match done {
                Ok(true) => results.taken.taken += 1,
                Ok(false) => results.kept += 1,
                Err(Refused::Nonsense) => results.taken.nonsense += 1,
                Err(Refused::Full) => results.taken.no_room += 1,
            }
        }
        results
    }

    /// Stores a peer's connection or template; `false` if this director stays the owner of the
    /// connection, or has another connection of this client in its place.
    ///
    /// # Errors
    /// The content is invalid, or the table is full.
    fn hear_of(
        &mut self,
        shard: &mut Shard,
        peer: usize,
        keeps_ties: bool,
        item: Item,
        now: Instant,
    ) -> Result<bool, Refused> {
        let Item {
            kind,
            left,
            mut entry,
        } = item;
        let (template, flags) = self.check_entry(&mut entry)?;
        if template {
            self.take_over_template(&entry, flags, Some(left), now)?;
            return Ok(true);
        }
        if flags & flag::NO_CPORT != 0 {
            return Err(Refused::Nonsense);
        }
        let found = shard.find_from_client(&entry.key());
        if let Some(index) = found {
            let slot = shard.conn(index);
            if slot.has(flag::REPLICATED) && kind != Kind::Comes {
                let theirs = Duration::from_secs(entry.timeout.into()).saturating_sub(left);
                let ours = slot.idle(now);
                let keeps = match theirs.abs_diff(ours) <= TIE {
                    true => keeps_ties,
                    false => ours < theirs,
                };
                if keeps {
                    return Ok(false);
                }
            }
            if slot.server_addr() == entry.server {
                // The peer owns the connection now, so this director does not report its removal.
                shard.strike_quietly(index);
            }
        }
        let Some(index) = self.take_over_connection(shard, &entry, flags, Some(left), now)? else {
            return Ok(false);
        };
        shard.lend(index, peer);
        Ok(true)
    }

    fn take_over_entry(
        &mut self,
        shard: &mut Shard,
        mut entry: Entry,
        now: Instant,
    ) -> Result<(), Refused> {
        let (template, flags) = self.check_entry(&mut entry)?;
        if template {
            self.take_over_template(&entry, flags, None, now)
        } else {
            self.take_over_connection(shard, &entry, flags, None, now)
                .map(drop)
        }
    }

    /// Checks that this director supports the fields of an entry, and that they do not contradict
    /// each other. Returns whether the entry is a template, and its flags at this director. In the
    /// virtual address of an IPv6 template of a firewall mark, clears everything except the mark.
    fn check_entry(&self, entry: &mut Entry) -> Result<(bool, u32), Refused> {
        let template = entry.flags & flag::TEMPLATE != 0;
        if entry.flags & flag::ONE_PACKET != 0 || (template && entry.flags & flag::NO_CPORT != 0) {
            return Err(Refused::Nonsense);
        }
        let states = if template {
            Some(2)
        } else {
            State::count(entry.protocol)
        };
        if states.is_none_or(|states| entry.state >= states) {
            return Err(Refused::Nonsense);
        }
        if entry.data.is_some() {
            let name = entry.engine.as_deref().unwrap_or_default();
            let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
            if name != persistence_sip::SIP.as_bytes() {
                return Err(Refused::Nonsense);
            }
        }
        if entry.protocol == Protocol(0)
            && let SocketAddr::V6(virt) = &mut entry.virt
        {
            // Only the firewall mark is kept: the first 32 bits.
            virt.set_ip(Ipv6Addr::from_bits(virt.ip().to_bits() >> 96 << 96));
        }
        Ok((template, entry.flags & TAKEN | flag::SYNC))
    }

    /// Stores a received connection, and returns its index. The connection's timer fires after its
    /// timeout, or earlier after `left`.
    ///
    /// If the table has a connection with the same addresses and ports to another server, the
    /// received connection replaces it. A received connection with the flag `INACTIVE` does not: it
    /// is ignored, and the result is `None`.
    ///
    /// # Errors
    /// [`Refused::Full`] if the table is full.
    fn take_over_connection(
        &mut self,
        shard: &mut Shard,
        entry: &Entry,
        flags: u32,
        left: Option<Duration>,
        now: Instant,
    ) -> Result<Option<u32>, Refused> {
        let key = entry.key();
        let mut replaced = None;
        let mut found = shard.find_from_client(&key);
        if let Some(index) = found
            && shard.conn(index).server_addr() != entry.server
        {
            if flags & flag::INACTIVE != 0 {
                // The peer reports the end of a connection that is no longer in this table, because
                // another one replaced it.
                return Ok(None);
            }
            replaced = found.take();
        }
        let index = match found {
            Some(index) => {
                let slot = shard.conn(index);
                // The kernel fast path does not have the new state.
                slot.withdraw();
                let toggled = (slot.flags() ^ flags) & flag::INACTIVE != 0;
                slot.clear(UPDATED);
                slot.set(flags & UPDATED);
                let unbound = slot.server() == NO_SLOT;
                if let Some(link) = shard.link(index)
                    && toggled
                {
                    link.server
                        .set_active(flags & flag::INACTIVE == 0, slot.flags());
                }
                if unbound {
                    self.bind_late(shard, index);
                }
                index
            }
            None => {
                let mut slot = Draft::new(&key, entry.server, self.conntrack_flag() | flags);
                slot.mark = entry.mark;
                let server = self.find_server(&key, entry.server, entry.mark, flags);
                if let Some(server) = &server {
                    slot.server = server.id().0;
                    slot.flags = inherit(slot.flags, server);
                }
                slot.flags |= self
                    .settings
                    .helper_flags(key.protocol, key.virt, slot.flags);
                let flags = slot.flags;
                let index = shard.open(slot, None, now).ok_or(Refused::Full)?;
                if let Some(server) = server {
                    server.bind(flags);
                }
                index
            }
        };
        if let Some(sequences) = entry.sequences {
            shard.set_sequences(index, sequences);
        }
        let state = State(u8::try_from(entry.state).unwrap_or(0));
        let timeout = match (entry.timeout, entry.protocol) {
            (0, Protocol::AH | Protocol::ESP) => TIMEOUT,
            (0, protocol) => self.settings.timeouts.of(protocol, state),
            (timeout, _) => timeout,
        };
        let slot = shard.conn(index);
        slot.set_in_packets(self.settings.sysctls.sync_threshold.0);
        slot.set_state(state);
        slot.set_old_state(state);
        slot.set_timeout(timeout);
        match left {
            Some(left) => {
                let most = Duration::from_secs(timeout.into());
                shard.restart_until(index, now + left.min(most));
            }
            None => shard.restart(index, now),
        }
        if let Some(replaced) = replaced {
            shard.end(replaced);
            shard.reap();
        }
        Ok(Some(index))
    }

    /// Looks up the received connection of a client's packet with this tuple, and binds it to its
    /// server if the server was added only after the connection was received. The next packet of
    /// the connection is then forwarded.
    pub fn bind_unbound(&mut self, shard: &mut Shard, tuple: &Tuple) {
        if !self.owns(shard) {
            return;
        }
        self.sweep(shard);
        let found = shard.find_from_client(&Key {
            protocol: tuple.protocol,
            client: tuple.src,
            virt: tuple.dst,
        });
        if let Some(index) = found
            && shard.conn(index).server() == NO_SLOT
        {
            self.bind_late(shard, index);
        }
    }

    /// Binds a connection that was received before its server was added, if the server exists now
    /// (`ip_vs_try_bind_dest`).
    fn bind_late(&mut self, shard: &mut Shard, index: u32) {
        let slot = shard.conn(index);
        let Draft {
            key,
            server_addr,
            flags,
            mark,
            ..
        } = slot.draft();
        if let Some(server) = self.find_server(&key, server_addr, mark, flags) {
            shard.bind(index, server.id().0, |flags| inherit(flags, &server));
            server.bind(shard.conn(index).flags());
        }
    }

    fn take_over_template(
        &mut self,
        entry: &Entry,
        flags: u32,
        left: Option<Duration>,
        now: Instant,
    ) -> Result<(), Refused> {
        let key = entry.key();
        let data = entry.data.as_deref();
        let timeout = match entry.timeout {
            0 => TIMEOUT,
            timeout => timeout,
        };
        let (index, template) = match self.templates.find(&key, data) {
            Some(index) => {
                let template = self.templates.get(index).clone();
                let old = template.flags.load(Relaxed);
                template
                    .flags
                    .store(old & !UPDATED | flags & UPDATED, Relaxed);
                if template.server.load(Relaxed) == NO_SLOT
                    && let Some(server) = self.find_server(
                        &key,
                        template.server_addr,
                        template.mark,
                        template.flags.load(Relaxed),
                    )
                {
                    template.server.store(server.id().0, Relaxed);
                    let flags = template.flags.load(Relaxed);
                    template.flags.store(inherit(flags, &server), Relaxed);
                    server.bind_template();
                }
                (index, template)
            }
            None => {
                let mut flags = flags | self.conntrack_flag();
                let server = self.find_server(&key, entry.server, entry.mark, flags);
                if let Some(server) = &server {
                    flags = inherit(flags, server);
                }
                let mut template = Template::new(key, entry.server, flags, timeout, now);
                template.mark = entry.mark;
                template.engine = data.map(|data| (persistence_sip::SIP, data.into()));
                if let Some(server) = &server {
                    template.server = server.id().0.into();
                }
                let made = self.insert_template(template, now).ok_or(Refused::Full)?;
                if let Some(server) = server {
                    server.bind_template();
                }
                made
            }
        };
        if let Some(sequences) = entry.sequences {
            template.set_sequences(sequences);
        }
        let threshold = self.settings.sysctls.sync_threshold.0;
        template.in_packets.store(threshold, Relaxed);
        template.assured.store(entry.state & 1 != 0, Relaxed);
        template.timeout.store(timeout, Relaxed);
        match left {
            Some(left) => {
                let most = Duration::from_secs(timeout.into());
                self.templates.restart_until(index, now + left.min(most));
            }
            None => self.templates.restart(index, now),
        }
        Ok(())
    }

    /// The configured server of a received entry (`ip_vs_find_dest`).
    pub(super) fn find_server(
        &self,
        key: &Key,
        server: SocketAddr,
        mark: u32,
        flags: u32,
    ) -> Option<Arc<Server>> {
        let number = self.find_service(mark, key.protocol, key.virt)?;
        let service = self.services.get(&number)?;
        let nat = flags & flag::METHOD == Forwarding::Nat as u32;
        let (ip, port) = (server.ip(), server.port());
        let first = if mark != 0 && !nat { 0 } else { port };
        let find = |port| service.pool.find(SocketAddr::new(ip, port));
        find(first).or_else(|| find(first ^ port)).cloned()
    }

    fn conntrack_flag(&self) -> u32 {
        if self.settings.sysctls.conntrack {
            flag::NFCT
        } else {
            0
        }
    }
}

/// Removes a connection because the peer from which it is borrowed has removed it. Returns `false`,
/// without a change, if no connection of this client to this server is borrowed from this peer, or
/// if the connection controls other connections.
fn apply_end(shard: &mut Shard, peer: usize, entry: &Entry) -> bool {
    let found = shard.find_from_client(&entry.key());
    let ends = |&index: &u32| {
        shard.is_borrowed_by(index, peer)
            && shard.conn(index).server_addr() == entry.server
            && !shard.has_controlled(index)
    };
    let Some(index) = found.filter(ends) else {
        return false;
    };
    // The template of the connection expires as usual.
    let _ = shard.destroy(index);
    true
}

/// The flags of a received entry, with the forwarding method of its server at this director. A
/// template becomes inactive (`ip_vs_bind_dest`).
fn inherit(flags: u32, server: &Server) -> u32 {
    let method = server.forwarding();
    let mut flags = flags & !(flag::METHOD | flag::NO_OUTPUT) | method as u32;
    if !method.translates() {
        flags |= flag::NO_OUTPUT;
    }
    if flags & flag::TEMPLATE != 0 {
        flags |= flag::INACTIVE;
    }
    flags
}
