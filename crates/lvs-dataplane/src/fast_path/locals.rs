//! The local addresses and ports of full NAT connections, for the BPF programs.
//!
//! A slot of the connection table has no room for a local address and port, and no field of a reply
//! identifies the slot. A separate map leads from the slot to the local address and port, and from
//! the addresses and ports of a reply to the slot. The map needs much memory, and is created when
//! the first connection of full NAT opens. From then on, all connections of full NAT are added to
//! it while it has room. The programs find the map in an array with one entry, and a successor
//! finds it by its pin.
//!
//! An entry of a closed connection is harmless: its slot is not offloaded, and the entry is removed
//! before another connection uses the slot.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use lvs_core::Protocol;
use lvs_core::memory::Layout;
use lvs_core::offload::{LocalChange, LocalEnd};
use tracing::{debug, warn};

use super::FastPath;
use super::layout::{LOCAL_KEY_WORDS, LOCAL_WORDS, local};
use super::pins::{Maps, Pins};
use super::services::halves;
use lvs_sys::{ReferenceMap, Referents, SharedMap};

/// Name of the array in which the programs find the map of local addresses and ports.
const PLACE: &str = "lvs_locals";
/// Name of the map of local addresses and ports.
const ENDS: &str = "lvs_local_ends";

/// Number of slots in one bucket of the connection table ([`Layout::WAYS`]).
const WAYS: u32 = 8;
const _: () = assert!(WAYS as usize == Layout::WAYS);

type Ends = SharedMap<LOCAL_KEY_WORDS, LOCAL_WORDS>;
type Key = [u64; LOCAL_KEY_WORDS];

/// Whether the map of local addresses and ports exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LocalsAre {
    Ready,
    /// The caller that gets this value must [create](FastPath::make_locals) the map. Only one
    /// caller gets it.
    Wanted,
    Coming,
    Impossible,
}

/// The map of local addresses and ports, and the array in which the programs find it.
#[derive(Debug)]
pub(super) struct Locals {
    place: ReferenceMap,
    ends: OnceLock<Ends>,
    /// Whether a thread is creating the map, or has tried to.
    asked: AtomicBool,
    /// Whether creating the map has failed.
    failed: AtomicBool,
    /// Maximum number of entries, of which each connection uses two.
    entries: u32,
    slots: Slots,
}

/// Numbers of slots in each worker's region: the narrow slots precede the wide ones, and the
/// overflow follows.
#[derive(Clone, Copy, Debug)]
struct Slots {
    workers: u32,
    narrow: u32,
    wide: u32,
    overflow: u32,
}

impl Slots {
    fn new(layout: &Layout, workers: NonZeroUsize) -> Self {
        Self {
            workers: u32::try_from(workers.get()).unwrap_or(u32::MAX),
            narrow: layout.narrow_buckets.saturating_mul(WAYS),
            wide: layout.wide_buckets.saturating_mul(WAYS),
            overflow: layout.overflow_slots,
        }
    }

    /// Number of slots of all workers, without the overflow.
    const fn in_place(self) -> u32 {
        let one = self.narrow.saturating_add(self.wide);
        one.saturating_mul(self.workers)
    }

    /// Returns the number by which the programs address a worker's slot, and 1 for a wide slot or 0
    /// for a narrow one. Overflow slots count as wide, with numbers after the wide slots; the
    /// programs never use them.
    fn number(self, worker: usize, slot: u32) -> (u64, u64) {
        let worker = worker as u64;
        let of_region = |slot: u32, slots: u32| u64::from(slot) + worker * u64::from(slots);
        let Some(slot) = slot.checked_sub(self.narrow) else {
            return (of_region(slot, self.narrow), 0);
        };
        let Some(slot) = slot.checked_sub(self.wide) else {
            return (of_region(slot, self.wide), 1);
        };
        let wide = u64::from(self.wide) * u64::from(self.workers);
        (wide + of_region(slot, self.overflow), 1)
    }
}

impl Locals {
    /// Creates the array, or opens that of a killed dataplane. The map is created or opened later.
    pub(super) fn new(layout: &Layout, workers: NonZeroUsize, maps: Maps<'_>) -> io::Result<Self> {
        let slots = Slots::new(layout, workers);
        let place = match maps {
            Maps::Found(pins) => ReferenceMap::pinned(&pins.path(PLACE), Referents::Maps)?,
            Maps::New | Maps::Pinned(_) => {
                let inner = Ends::new(ENDS, 1)?;
                ReferenceMap::of_maps(PLACE, &inner)?
            }
        };
        Ok(Self {
            place,
            ends: OnceLock::new(),
            asked: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            // The kernel rounds the number of buckets up to a power of two and allocates memory for
            // them: round down.
            entries: 1 << slots.in_place().saturating_mul(2).max(2).ilog2(),
            slots,
        })
    }

    pub(super) fn number(&self) -> i32 {
        self.place.number()
    }

    pub(super) fn pin(&self, pins: &Pins) -> io::Result<()> {
        self.place.pin(&pins.path(PLACE))
    }

    /// Removes the map of local addresses and ports, as if no connection of full NAT had been
    /// opened.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn forget(&mut self) {
        self.place.clear();
        self.ends.take();
        self.asked = AtomicBool::new(false);
        self.failed = AtomicBool::new(false);
    }

    /// Makes the map available to the programs, and to a successor.
    fn put(&self, ends: Ends, pins: Option<&Pins>) -> io::Result<()> {
        if let Some(pins) = pins {
            let path = pins.path(ENDS);
            let _ = fs::remove_file(&path);
            ends.pin(&path)?;
        }
        self.place.put_map(&ends)?;
        let _ = self.ends.set(ends);
        Ok(())
    }

    fn make(&self) -> io::Result<Ends> {
        Ends::new(ENDS, self.entries)
    }

    /// Returns the key by which the programs look up a request in this slot of a worker's region.
    fn request(&self, worker: usize, slot: u32) -> Key {
        let (slot, is_wide) = self.slots.number(worker, slot);
        [slot & 0xffff_ffff | is_wide << 32, 0, 0, 0, 0, 0]
    }

    fn insert(&self, ends: &Ends, worker: usize, end: &LocalEnd) -> io::Result<()> {
        let (request, reply) = (self.request(worker, end.slot), reply(end));
        let [v4, v6, more] = words(end.protocol, end.local);
        let addr = if end.local.is_ipv4() {
            v4 & 0xffff_ffff
        } else {
            v6
        };
        let mut value = [0; LOCAL_WORDS];
        value[local::ADDR] = addr;
        value[local::ADDR + 1] = more;
        let slot = request[0] & 0xffff_ffff;
        value[local::PORT] = u64::from(end.local.port().to_be()) | slot << 32;
        ends.insert(&request, &value)?;
        ends.insert(&reply, &value).inspect_err(|_| {
            let _ = ends.remove(&request);
        })
    }
}

/// Returns the key by which the programs look up a reply.
fn reply(end: &LocalEnd) -> Key {
    let [a, b, c] = words(end.protocol, end.server);
    let [d, e, f] = words(end.protocol, end.local);
    [a, b, c, d, e, f]
}

/// An address and port, as the programs read them from a packet.
fn words(protocol: Protocol, end: SocketAddr) -> [u64; 3] {
    let rest = u64::from(end.port().to_be()) << 32 | u64::from(protocol.0) << 48;
    match end.ip() {
        IpAddr::V4(addr) => [u64::from(u32::from_ne_bytes(addr.octets())) | rest, 0, 0],
        IpAddr::V6(addr) => {
            let halves = halves(addr.octets());
            let fold = halves[0] ^ halves[1];
            [
                (fold ^ fold >> 32) & 0xffff_ffff | rest,
                halves[0],
                halves[1],
            ]
        }
    }
}

/// The local address and port of an entry, in the address family of `like`.
fn end_of(value: &[u64; LOCAL_WORDS], like: SocketAddr) -> SocketAddr {
    let [port, rest @ ..] = [
        value[local::PORT],
        value[local::ADDR],
        value[local::ADDR + 1],
    ];
    let bytes = rest.map(u64::to_ne_bytes);
    let [a, b, ..] = port.to_ne_bytes();
    let port = u16::from_be_bytes([a, b]);
    let addr: IpAddr = match like {
        SocketAddr::V4(_) => {
            let [a, b, c, d, ..] = bytes[0];
            [a, b, c, d].into()
        }
        SocketAddr::V6(_) => {
            let mut octets = [0; 16];
            octets[..8].copy_from_slice(&bytes[0]);
            octets[8..].copy_from_slice(&bytes[1]);
            octets.into()
        }
    };
    SocketAddr::new(addr, port)
}

impl FastPath {
    /// Returns whether local addresses and ports can be written now.
    #[inline]
    pub(crate) fn locals(&self) -> LocalsAre {
        let locals = &self.locals;
        if self.has_locals() {
            LocalsAre::Ready
        } else if locals.failed.load(Relaxed) {
            LocalsAre::Impossible
        } else if locals.asked.swap(true, Relaxed) {
            LocalsAre::Coming
        } else {
            LocalsAre::Wanted
        }
    }

    /// Whether the map of local addresses and ports exists. Does not request it.
    pub(crate) fn has_locals(&self) -> bool {
        self.locals.ends.get().is_some()
    }

    /// Creates the map of local addresses and ports, which takes some time in the kernel. Logs a
    /// failure; connections of full NAT are then not offloaded.
    pub fn make_locals(&self) {
        let locals = &self.locals;
        locals.asked.store(true, Relaxed);
        if locals.ends.get().is_some() {
            return;
        }
        let made = locals.make();
        let put = made.and_then(|ends| locals.put(ends, self.pins.as_ref()));
        if let Err(error) = put {
            locals.failed.store(true, Relaxed);
            warn!(
                "connections of full NAT are not forwarded by the kernel fast path: cannot create the map of their local ports: {error}"
            );
        }
    }

    /// Writes the local address and port of a full NAT connection. Returns `false` if the map does
    /// not exist, is full, or the kernel has no memory.
    pub fn set_local(&self, worker: usize, end: &LocalEnd) -> bool {
        let Some(ends) = self.locals.ends.get() else {
            return false;
        };
        let done = self.locals.insert(ends, worker, end);
        done.inspect_err(|error| debug!("{ENDS}: {error}")).is_ok()
    }

    /// Applies changes of a worker's local addresses and ports, in order. An entry that cannot be
    /// written, for example because the map is full, is omitted: the kernel fast path does not
    /// forward the connection, and a successor does not take it over.
    pub fn follow_locals(&self, worker: usize, changes: impl IntoIterator<Item = LocalChange>) {
        for change in changes {
            match change {
                LocalChange::Bound(end) => _ = self.set_local(worker, &end),
                LocalChange::Released(end) => self.forget_local(worker, &end),
            }
        }
    }

    /// Removes the entry of a closed connection.
    fn forget_local(&self, worker: usize, end: &LocalEnd) {
        if let Some(ends) = self.locals.ends.get() {
            let _ = ends.remove(&reply(end));
            let _ = ends.remove(&self.locals.request(worker, end.slot));
        }
    }

    /// Returns the local addresses and ports of a predecessor; `None` if there are none or they
    /// cannot be read. Must be called before any change. This dataplane owns the map after
    /// [`LocalsLeft::end`].
    pub(crate) fn locals_left(&self) -> Option<LocalsLeft<'_>> {
        let path = self.pins.as_ref()?.path(ENDS);
        let found = Ends::pinned(&path).and_then(|ends| {
            // The predecessor may have been killed before it made the map available to the
            // programs.
            self.locals.place.put_map(&ends)?;
            let left = ends.entries()?.into_iter().collect();
            Ok(LocalsLeft {
                kernel: self,
                ends,
                left: RefCell::new(left),
            })
        });
        let found = found.inspect_err(|error| {
            // No local addresses and ports were stored.
            if error.kind() != io::ErrorKind::NotFound {
                warn!(
                    "connections of full NAT of the previous dataplane have ended: the BPF map {ENDS} cannot be read: {error}"
                );
            }
        });
        found.ok()
    }
}

/// The local addresses and ports of the full NAT connections of a predecessor, as its map contains
/// them.
#[derive(Debug)]
pub(crate) struct LocalsLeft<'a> {
    kernel: &'a FastPath,
    ends: Ends,
    /// Entries for which no connection has been found yet.
    left: RefCell<HashMap<Key, [u64; LOCAL_WORDS]>>,
}

impl LocalsLeft<'_> {
    /// Removes and returns the local address and port of the connection in a slot of a worker's
    /// region; `None` if the map has none, or has different ones for requests and replies.
    pub(crate) fn take(
        &self,
        worker: usize,
        slot: u32,
        protocol: Protocol,
        server: SocketAddr,
    ) -> Option<SocketAddr> {
        let mut left = self.left.borrow_mut();
        let request = self.kernel.locals.request(worker, slot);
        let &value = left.get(&request)?;
        let local = end_of(&value, server);
        let reply = reply(&LocalEnd {
            slot,
            protocol,
            server,
            local,
        });
        // The entries of the request and of the reply must be equal.
        if left.get(&reply) != Some(&value) {
            return None;
        }
        left.remove(&request);
        left.remove(&reply);
        Some(local)
    }

    /// Ends the take-over: discards entries without a connection.
    pub(crate) fn end(self) {
        for key in self.left.into_inner().into_keys() {
            let _ = self.ends.remove(&key);
        }
        let locals = &self.kernel.locals;
        locals.asked.store(true, Relaxed);
        let _ = locals.ends.set(self.ends);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::open;
    use super::*;

    fn end(slot: u32, server: &str, local: &str) -> LocalEnd {
        LocalEnd {
            slot,
            protocol: Protocol::TCP,
            server: server.parse().expect("the address is valid"),
            local: local.parse().expect("the address is valid"),
        }
    }

    #[test]
    fn local_address_entries_of_both_directions_are_stored_and_removed_together() {
        let fast_path = open();
        let wide = fast_path.locals.slots.narrow;
        let ends = [
            end(7, "10.0.0.1:80", "10.0.0.2:31007"),
            end(wide + 7, "[fd00::1]:80", "[fd00::2]:31007"),
        ];
        assert!(!fast_path.set_local(0, &ends[0]));
        assert_eq!(fast_path.locals(), LocalsAre::Wanted);
        assert_eq!(fast_path.locals(), LocalsAre::Coming);
        fast_path.make_locals();
        assert_eq!(fast_path.locals(), LocalsAre::Ready);
        for end in &ends {
            assert!(fast_path.set_local(0, end));
        }
        let map = fast_path
            .locals
            .ends
            .get()
            .expect("the map of local ends was created");
        for end in &ends {
            let value = map.get(&fast_path.locals.request(0, end.slot));
            assert_eq!(map.get(&reply(end)), value);
            let value = value.expect("the map has an entry of this end");
            assert_eq!(value[local::PORT] >> 32, 7);
            assert_eq!(end_of(&value, end.server), end.local);
            fast_path.forget_local(0, end);
            assert_eq!(map.get(&reply(end)), None);
            assert_eq!(map.get(&fast_path.locals.request(0, end.slot)), None);
        }
    }

    #[test]
    fn local_address_of_killed_dataplane_is_taken_once_and_unused_entries_are_removed() {
        let fast_path = open();
        let locals = &fast_path.locals;
        let ends = locals.make().expect("memory is available");
        let kept = end(7, "10.0.0.1:80", "10.0.0.2:31007");
        let gone = end(8, "10.0.0.1:80", "10.0.0.2:31008");
        for end in [&kept, &gone] {
            locals.insert(&ends, 0, end).expect("the space suffices");
        }
        let left = ends.entries().expect("the entries can be read");
        assert_eq!(left.len(), 4);
        let left = LocalsLeft {
            kernel: &fast_path,
            ends,
            left: RefCell::new(left.into_iter().collect()),
        };
        let take = |end: &LocalEnd| left.take(0, end.slot, end.protocol, end.server);
        let elsewhere = end(7, "10.0.0.3:80", "10.0.0.2:31007");
        assert_eq!(take(&elsewhere), None);
        assert_eq!(take(&kept), Some(kept.local));
        assert_eq!(take(&kept), None);
        left.end();
        assert_eq!(fast_path.locals(), LocalsAre::Ready);
        let map = locals
            .ends
            .get()
            .expect("the entries belong to this dataplane");
        assert!(map.get(&locals.request(0, 7)).is_some() && map.get(&reply(&kept)).is_some());
        assert_eq!(map.entries().map_or(0, |all| all.len()), 2);
    }

    #[test]
    fn local_addresses_are_bounded_by_map_entries_and_removal_makes_room() {
        let fast_path = open();
        fast_path.make_locals();
        let (entries, slots) = (fast_path.locals.entries, fast_path.locals.slots.in_place());
        assert!(entries >= slots && entries <= 2 * slots);
        let of_slot = |slot: u32| {
            let port = 1024 + u16::try_from(slot).expect("the number of entries is small");
            end(slot, "10.0.0.1:80", &format!("10.0.0.2:{port}"))
        };
        let all = (0..slots).take_while(|&slot| fast_path.set_local(0, &of_slot(slot)));
        let count = u32::try_from(all.count()).expect("the number of entries is small");
        assert!(
            count <= entries / 2 && count >= entries / 2 - 1,
            "{count} local addresses and ports were stored, not half of {entries} entries"
        );
        // If there is no room for both entries, neither is written.
        let map = fast_path
            .locals
            .ends
            .get()
            .expect("the map of local ends was created");
        assert_eq!(map.get(&fast_path.locals.request(0, count)), None);
        fast_path.forget_local(0, &of_slot(0));
        assert!(fast_path.set_local(0, &of_slot(count)));
    }
}
