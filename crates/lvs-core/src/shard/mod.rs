//! The half of a director that belongs to one worker: its connections, their timers, and its
//! counters.

mod decide;
mod down;
mod expiry;
mod ftp;
mod full_nat;
mod icmp;
mod links;
mod listing;
mod local_ports;
mod pass;
mod publish;
mod replicas;
mod room;
mod settings;
mod sync;
mod tcp;

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::{SocketAddr, SocketAddrV4};
use core::sync::atomic::{AtomicU64, Ordering};

use self::down::Down;
pub(crate) use self::local_ports::LocalPorts;
use self::room::Hand;
pub use crate::conn::Ahead;
use crate::conn::adopt::Adoption;
use crate::conn::{ConnTable, Draft, Entry, Key, Sparse, Template};
use crate::stats::{Counters, ServerDrops};
use crate::sync::Queue;
use crate::sync::bulk::Replicas;
use crate::sync::wire::Sequences;
use crate::{Forwarding, IcmpError, Instant, PacketMeta, Protocol, Tuple, Verdict};

pub(crate) use self::decide::Age;
pub use self::down::Reset;
pub(crate) use self::ftp::check_ports;
pub use self::ftp::{FTP_PORTS_MAX, helper_ports};
pub(crate) use self::links::{Links, ServerLink};
pub use self::listing::Connection;
pub use self::local_ports::{LocalAddress, worker_of};
pub use self::pass::Passed;
pub use self::publish::{LocalChange, LocalEnd, Offer, OffloadState, Unpublished};
pub(crate) use self::replicas::{RECENT, write_template};
pub(crate) use self::settings::{Settings, Shared};

/// The connections of one worker.
///
/// Most packets of existing connections need only their shard: no lock and no allocation. A packet
/// about which the shard cannot decide is returned as [`NeedsControl`], and must be passed to
/// [`Control::admit`](crate::Control::admit). A shard belongs to one thread at a time, and the
/// caller must pass all packets of a connection, in both directions, to the same shard.
///
/// | | methods | called |
/// |---|---|---|
/// | packets | [`handle_packet`](Self::handle_packet), [`handle_icmp_error`](Self::handle_icmp_error) | for each; then, on [`NeedsControl`], [`Control`](crate::Control)'s method, with the same time |
/// | time | [`advance`](Self::advance) until it returns false, with packets in between | at [`next_wakeup`](Self::next_wakeup), before [`Control::advance`](crate::Control::advance) |
/// | changes | [`Control::sweep`](crate::Control::sweep) | after each; otherwise the next packet returns [`NeedsControl`] |
/// | connections of removed servers | [`end_down`](Self::end_down), whose resets the caller sends | while [`has_down`](Self::has_down) is true; a sweep may make it true |
/// | answers to the probes of `end_down` | [`take_late_resets`](Self::take_late_resets), which the caller sends | after packets |
/// | dropped packets | [`Control::count_drops`](crate::Control::count_drops) with [`drops`](Self::drops) | about once a second |
/// | synchronisation | [`take_sync_message`](Self::take_sync_message) until there is none | at [`next_sync_message`](Self::next_sync_message) |
/// | questions | [`connections_from`](Self::connections_from), [`len`](Self::len) and others | at any time |
///
/// [`Control`](crate::Control) has an example with two shards.
#[derive(Debug)]
pub struct Shard {
    number: usize,
    table: ConnTable,
    links: Links,
    total: Arc<Counters>,
    settings: Settings,
    shared: Arc<Shared>,
    generation: u32,
    /// The persistence templates that control connections, by connection index.
    templates: Sparse<Option<Arc<Template>>>,
    local_ports: LocalPorts,
    /// Changes of local addresses and ports that the caller has not read yet; `None` if the caller
    /// does not read them.
    local_changes: Option<VecDeque<LocalChange>>,
    /// Connections that have ended, but stay until the next packet, because the host's own answer
    /// to their last packet may belong to them.
    dying: Vec<u32>,
    sync: Queue,
    /// Adjustments of sequence numbers that were received by synchronisation, by connection index.
    sequences: BTreeMap<u32, Sequences>,
    /// Sequence numbers for resets, and the walk that closes the connections of removed servers.
    down: Down,
    /// State of FTP control connections, by connection index.
    sessions: BTreeMap<u32, ftp::Session>,
    hand: Hand,
    /// Dropped and refused packets of connections, for
    /// [`Control::count_drops`](crate::Control::count_drops).
    pub drops: ServerDrops,
    /// Digests of the owned and of the borrowed connections, and the outgoing updates; `None`
    /// without replication.
    pub(crate) replicas: Option<Box<Replicas>>,
}

/// A packet about which the shard alone cannot decide.
#[derive(Clone, Copy, Debug)]
#[must_use = "the packet is lost if `Control::admit` does not decide on it"]
pub struct NeedsControl {
    /// The connection that the packet replaces. It is removed only after the decision, so that the
    /// scheduler still counts it.
    pub(crate) replaced: Option<u32>,
    /// Whether the shard must first update its copies of the configuration.
    pub(crate) stale: bool,
    /// Whether a server sent the packet, and it belongs to no connection, so that a persistence
    /// engine may open one.
    pub(crate) outbound: bool,
}

impl NeedsControl {
    const NEW: Self = Self {
        replaced: None,
        stale: false,
        outbound: false,
    };

    const STALE: Self = Self {
        stale: true,
        ..Self::NEW
    };

    pub(crate) const fn replacing(index: u32) -> Self {
        Self {
            replaced: Some(index),
            ..Self::NEW
        }
    }
}

impl Shard {
    /// An empty shard with this number, of the director to which `shared` belongs.
    pub(crate) fn new(
        number: usize,
        table: ConnTable,
        local_ports: LocalPorts,
        total: Arc<Counters>,
        shared: Arc<Shared>,
    ) -> Self {
        Self {
            number,
            table,
            links: Links::default(),
            total,
            settings: Settings::default(),
            shared,
            generation: 0,
            templates: Sparse::default(),
            local_ports,
            local_changes: None,
            dying: Vec::new(),
            sync: Queue::default(),
            sequences: BTreeMap::new(),
            down: Down::default(),
            sessions: BTreeMap::new(),
            hand: Hand::default(),
            drops: ServerDrops::default(),
            replicas: None,
        }
    }

    /// Whether the shard belongs to the same director as `shared`.
    pub(crate) fn is_of(&self, shared: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.shared, shared)
    }

    /// Decides on a packet, if it belongs to an existing connection or cannot open one.
    ///
    /// # Errors
    /// [`NeedsControl`] if the shard cannot decide: call
    /// [`Control::admit`](crate::Control::admit) for the verdict.
    #[inline]
    pub fn handle_packet(
        &mut self,
        meta: &PacketMeta<'_>,
        now: Instant,
    ) -> Result<Verdict, NeedsControl> {
        self.handle_packet_ahead(meta, &Ahead::NONE, now)
    }

    /// As [`handle_packet`](Self::handle_packet), and faster if [`ahead`](Self::ahead) and
    /// [`aim`](Self::aim) were called for the packet.
    ///
    /// # Errors
    /// As [`handle_packet`](Self::handle_packet).
    #[inline]
    pub fn handle_packet_ahead(
        &mut self,
        meta: &PacketMeta<'_>,
        ahead: &Ahead,
        now: Instant,
    ) -> Result<Verdict, NeedsControl> {
        if self.is_stale() {
            return Err(NeedsControl::STALE);
        }
        self.decide(meta, ahead, now)
    }

    /// Decides on an ICMP error.
    ///
    /// # Errors
    /// [`NeedsControl`] if the shard's copies are out of date, or if the error may open a
    /// connection (`schedule_icmp`); then
    /// [`Control::admit_icmp_error`](crate::Control::admit_icmp_error) decides.
    pub fn handle_icmp_error(
        &mut self,
        error: &IcmpError,
        now: Instant,
    ) -> Result<Verdict, NeedsControl> {
        if self.is_stale() {
            return Err(NeedsControl::STALE);
        }
        self.decide_icmp_error(error, now)
    }

    /// Prefetches the first words that the look-up of a packet with this tuple will read, and
    /// returns a hint for [`handle_packet_ahead`](Self::handle_packet_ahead). A caller with a batch
    /// of packets calls this for all of them, then [`aim`](Self::aim) for all, and then
    /// [`handle_packet_ahead`](Self::handle_packet_ahead): it then waits for memory once, not once
    /// for each packet.
    ///
    /// `load` is called with words that will be read soon. It should prefetch their cache lines,
    /// which causes no wait; it may also read them.
    #[inline]
    pub fn ahead(&self, tuple: &Tuple, load: impl Fn(&AtomicU64)) -> Ahead {
        self.table.ahead(tuple.protocol, tuple.src, tuple.dst, load)
    }

    /// As [`ahead`](Self::ahead), over IPv4.
    #[inline]
    pub fn ahead_v4(
        &self,
        protocol: Protocol,
        src: SocketAddrV4,
        dst: SocketAddrV4,
        load: impl Fn(&AtomicU64),
    ) -> Ahead {
        self.table.ahead_narrow(protocol, src, dst, load)
    }

    /// The second step after [`ahead`](Self::ahead): reads the words that were prefetched, and
    /// prefetches the slots to which they refer.
    #[inline]
    pub fn aim(&self, ahead: &mut Ahead, load: impl Fn(&AtomicU64)) {
        self.table.aim(ahead, load);
    }

    /// Whether a connection has this tuple, in either direction.
    pub fn knows(&self, tuple: &Tuple) -> bool {
        let Tuple { protocol, src, dst } = *tuple;
        let request = Key {
            protocol,
            client: src,
            virt: dst,
        };
        self.find_reply(protocol, src, dst).is_some() || self.table.find_in(&request).is_some()
    }

    /// Runs the timers of due connections, and removes ended connections. `budget` bounds the
    /// number of connections whose timers one call visits. Returns `true` if more may be due.
    pub fn advance(&mut self, now: Instant, budget: usize) -> bool {
        self.reap();
        let mut left = budget;
        while left > 0 {
            let due = self.table.take_due_by(now, &mut left);
            let done = due.is_empty();
            for &index in &due {
                self.expire(index);
            }
            self.table.recycle(due);
            if done {
                return left == 0;
            }
        }
        true
    }

    /// The time at which [`advance`](Self::advance) must be called next; `None` if the shard has no
    /// connections.
    pub fn next_wakeup(&self) -> Option<Instant> {
        self.table.next_wakeup()
    }

    /// Returns the number of open connections.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether the shard has no connections.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Maximum number of connections in the shard.
    pub fn capacity(&self) -> usize {
        self.table.capacity()
    }

    #[inline]
    pub(crate) fn conn(&self, index: u32) -> Entry<'_> {
        self.table.get(index)
    }

    pub(crate) fn has(&self, index: u32) -> bool {
        self.table.is_used(index)
    }

    pub(crate) fn has_controlled(&self, index: u32) -> bool {
        self.table.controlled(index) > 0
    }

    /// The connection to which the packets of a client belong.
    pub(crate) fn find_from_client(&self, key: &Key) -> Option<u32> {
        self.table.find_in(key)
    }

    /// The connection to which the packets of a server belong.
    pub(crate) fn find_from_server(
        &self,
        protocol: Protocol,
        server: SocketAddr,
        client: SocketAddr,
    ) -> Option<u32> {
        self.table.find_out(protocol, server, client)
    }

    /// Number of slots that [`drawn`](Self::drawn) accepts; they contain all connections.
    pub(crate) fn places(&self) -> usize {
        self.table.populated_len()
    }

    /// The connection in slot number `place`, below [`places`](Self::places).
    pub(crate) fn drawn(&self, place: usize) -> Option<u32> {
        let index = self.table.populated_slot(place)?;
        self.table.is_used(index).then_some(index)
    }

    /// Restarts the timer of connection `index` with its timeout.
    pub(crate) fn restart(&mut self, index: u32, now: Instant) {
        self.table.restart(index, now);
    }

    /// Sets the deadline of connection `index`; the next packet sets it again.
    pub(crate) fn restart_until(&mut self, index: u32, at: Instant) {
        self.table.restart_until(index, at);
    }

    /// Binds a connection to a server that was unknown when the connection was received. `flags`
    /// changes the flags of the connection.
    pub(crate) fn bind(&mut self, index: u32, server: u32, flags: impl FnOnce(u32) -> u32) {
        self.table.change(index, |slot| {
            slot.server = server;
            slot.flags = flags(slot.flags);
        });
    }

    /// Adopts connections in memory, as [`ConnTable::adopt`]. A connection with full NAT is kept
    /// only if `local` returns its local address and port, and if this port can be reserved.
    pub(crate) fn adopt(
        &mut self,
        adoption: &mut Adoption,
        now: Instant,
        budget: usize,
        pool: &[LocalAddress],
        mut local: impl FnMut(u32, Protocol, SocketAddr) -> Option<SocketAddr>,
        mut keep: impl FnMut(Entry<'_>) -> bool,
    ) -> bool {
        let mut found = Vec::new();
        let in_place = self.table.places_len();
        let more = self.table.adopt(adoption, now, budget, |handle, entry| {
            if entry.method() != Forwarding::FullNat {
                return keep(entry);
            }
            // The caller has no local address and port of connections in the overflow.
            let server = entry.server_addr();
            let known = (handle < in_place).then(|| local(handle, entry.protocol(), server));
            known.flatten().is_some_and(|local| {
                let kept = keep(entry);
                if kept {
                    found.push((handle, local));
                }
                kept
            })
        });
        for (handle, local) in found {
            if !self
                .local_ports
                .adopt(handle, local, pool, &self.table, now)
            {
                self.destroy(handle);
            }
        }
        more
    }

    /// Inserts a connection of another table, as [`ConnTable::move_in`].
    pub(crate) fn move_in(&mut self, draft: &Draft, expires: Instant, now: Instant) -> Option<u32> {
        self.table.move_in(draft, expires, now)
    }

    /// The first tick up to `limit` in which connections may be due; `None` if there is none, or
    /// `budget` is used up.
    pub(crate) fn due_tick(&mut self, limit: Instant, budget: &mut usize) -> Option<u64> {
        self.table.due_tick(limit, budget)
    }

    /// Runs the timers of the connections that are due in the tick that
    /// [`due_tick`](Self::due_tick) has found; returns whether there were any.
    pub(crate) fn expire_due(&mut self, limit: Instant, budget: &mut usize) -> bool {
        let due = self.table.take_due(limit, budget);
        let any = !due.is_empty();
        for &index in &due {
            self.expire(index);
        }
        self.table.recycle(due);
        any
    }

    pub(crate) const fn links(&mut self) -> &mut Links {
        &mut self.links
    }

    /// The shard's copies of the configuration as text, for comparisons.
    #[cfg(test)]
    pub(crate) fn copies(&self) -> alloc::string::String {
        alloc::format!("{:?} {:?}", self.links, self.settings)
    }

    /// Starts a walk over the table, because a server was removed.
    pub(crate) fn begin_down(&mut self) {
        self.down.begin();
    }

    pub(crate) const fn sync_queue(&mut self) -> &mut Queue {
        &mut self.sync
    }

    /// Sets the adjustments of sequence numbers that were received for connection `index`.
    pub(crate) fn set_sequences(&mut self, index: u32, sequences: Sequences) {
        self.sequences.insert(index, sequences);
    }

    /// The slot from which a connection was evicted last, since the last
    /// [`forget_room`](Self::forget_room); `None` if none was evicted.
    pub(crate) const fn made_room(&self) -> Option<u32> {
        self.hand.last
    }

    /// Clears [`made_room`](Self::made_room).
    pub(crate) const fn forget_room(&mut self) {
        self.hand.last = None;
    }

    /// The number of this shard among the director's shards.
    pub const fn number(&self) -> usize {
        self.number
    }

    pub(crate) fn is_at(&self, generation: u32) -> bool {
        self.generation == generation && self.links.seen().is_some()
    }

    /// Copies the settings, and stores their generation. If the synchronisation master has changed,
    /// also completes the present synchronisation message.
    pub(crate) fn take_settings(&mut self, settings: &Settings, generation: u32) {
        if settings.master != self.settings.master {
            // The new master's messages may have another format, so the present message is
            // completed.
            self.sync.finish(&self.settings.sysctls);
        }
        self.settings.clone_from(settings);
        self.generation = generation;
    }

    #[inline]
    fn is_stale(&self) -> bool {
        // Pairs with the release in `Control::changed`: a thread that reads the number also reads
        // the change.
        self.generation != self.shared.generation.load(Ordering::Acquire)
    }

    #[inline]
    pub(crate) fn link(&self, index: u32) -> Option<&ServerLink> {
        self.link_of(self.table.get(index).server())
    }

    #[inline]
    fn link_of(&self, server: u32) -> Option<&ServerLink> {
        self.links.get(server)
    }
}
