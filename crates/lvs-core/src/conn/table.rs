//! The connection table: plain slots of fixed size, addressed by index, found by the tuples of their packets.

use alloc::vec::Vec;
use core::hash::Hasher;
use core::net::SocketAddr;
use core::ops::Range;
use core::time::Duration;

use siphasher::sip::SipHasher13;

use super::flag;
use super::index::Index;
use super::slot::{FREE, Key, NO_SLOT, Side, Slot, TEMPLATE_BIT, pack};
use super::wheel::{Wheel, tick_of};
use crate::{Forwarding, Instant, Protocol};

/// An entry's place among those that the same packets would find: the index refers to the newest alone, so that equal
/// ones, which a client can make by the thousand (one port of his to the same server by way of many virtual
/// addresses), cost no lookup a step.
#[derive(Clone, Copy, Debug)]
struct Tie {
    older: u32,
    newer: u32,
}

impl Tie {
    const NONE: Self = Self {
        older: NO_SLOT,
        newer: NO_SLOT,
    };
}

/// Slots, what they are found by, and their timers. Holds at most `capacity` entries; memory is taken as it fills.
#[derive(Debug)]
pub(crate) struct ConnTable {
    slots: Vec<Slot>,
    /// By slot, for each [`Side`].
    ties: Vec<[Tie; 2]>,
    capacity: usize,
    free: u32,
    len: usize,
    index: Index,
    hash_keys: (u64, u64),
    wheel: Wheel,
    due: Vec<u32>,
    /// Entries whose client's port is not known.
    portless: usize,
}

impl ConnTable {
    /// An empty table for at most `capacity` entries. `seed` keys the hash function, so that a client cannot choose
    /// addresses that fall into one chain.
    pub(crate) fn new(capacity: usize, seed: u64) -> Self {
        let capacity = capacity.clamp(1, TEMPLATE_BIT as usize - 1);
        Self {
            slots: Vec::with_capacity(capacity),
            ties: Vec::with_capacity(capacity),
            capacity,
            free: NO_SLOT,
            len: 0,
            index: Index::new(2 * capacity),
            hash_keys: (seed, seed.rotate_left(32) ^ 0x9e37_79b9_7f4a_7c15),
            wheel: Wheel::new(),
            due: Vec::new(),
            portless: 0,
        }
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Entry `index`, which is in use.
    #[inline]
    pub(crate) fn get(&self, index: u32) -> &Slot {
        &self.slots[index as usize]
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, index: u32) -> &mut Slot {
        &mut self.slots[index as usize]
    }

    /// The connection of a packet from a client (`ip_vs_conn_in_get`); the newest one of equals.
    #[inline]
    pub(crate) fn find_in(&self, key: &Key) -> Option<u32> {
        let port = key.client.port();
        // Entries of port 0 (templates, unknown ports) are not for packets from port 0.
        let exact = if port == 0 {
            None
        } else {
            self.find_client(key, port, 0)
        };
        if exact.is_some() || self.portless == 0 {
            return exact;
        }
        self.find_client(key, 0, flag::NO_CPORT)
    }

    /// The template with this key (`ip_vs_ct_in_get`).
    pub(crate) fn find_template(&self, key: &Key) -> Option<u32> {
        self.find_client(key, 0, flag::TEMPLATE)
    }

    /// The newest entry of a client's address and `port` with just `flags` of those that tell kinds of entries apart.
    #[inline]
    fn find_client(&self, key: &Key, port: u16, flags: u32) -> Option<u32> {
        let (client_addr, family) = pack(key.client.ip());
        let (virt_addr, _) = pack(key.virt.ip());
        let mask = Slot::kinds(flags);
        let hash = self.hash(
            key.protocol,
            (client_addr, port),
            (virt_addr, key.virt.port()),
        );
        let found = self.index.find(hash, |reference| {
            let (index, side) = Side::of(reference);
            let slot = &self.slots[index as usize];
            side == Side::In
                && slot.client_addr == client_addr
                && slot.client_port == port
                && slot.virt_addr == virt_addr
                && slot.virt_port == key.virt.port()
                && slot.protocol == key.protocol
                && slot.family == family
                && slot.flags & mask == flags
        });
        found.map(|reference| Side::of(reference).0)
    }

    /// Gives an entry of unknown client port the port of its first packet (`ip_vs_conn_fill_cport`).
    pub(crate) fn set_client_port(&mut self, index: u32, port: u16) {
        self.change(index, |slot| {
            slot.client_port = port;
            slot.flags &= !flag::NO_CPORT;
        });
        self.portless -= 1;
    }

    /// Gives a template ports that no lookup asks for (`ip_vs_check_template`).
    pub(crate) fn hide_template(&mut self, index: u32) {
        self.change(index, |slot| {
            slot.virt_port = u16::MAX;
            slot.server_port = u16::MAX;
            slot.flags |= flag::DYING;
        });
    }

    /// Changes what an entry is found by. Among equals, it is the newest from now on.
    pub(crate) fn change(&mut self, index: u32, change: impl FnOnce(&mut Slot)) {
        self.leave_index(index);
        change(&mut self.slots[index as usize]);
        self.enter_index(index);
    }

    /// The connection of a packet from `source` to `client` (`ip_vs_conn_out_get`): `source` is the real server where
    /// the connection is translated, the virtual address elsewhere.
    #[inline]
    pub(crate) fn find_out(
        &self,
        protocol: Protocol,
        source: SocketAddr,
        client: SocketAddr,
    ) -> Option<u32> {
        let (client_addr, family) = pack(client.ip());
        let (source_addr, _) = pack(source.ip());
        let hash = self.hash(
            protocol,
            (client_addr, client.port()),
            (source_addr, source.port()),
        );
        let found = self.index.find(hash, |reference| {
            let (index, side) = Side::of(reference);
            let slot = &self.slots[index as usize];
            let (addr, port) = match side {
                Side::Out => (slot.server_addr, slot.server_port),
                Side::In => (slot.virt_addr, slot.virt_port),
            };
            slot.client_addr == client_addr
                && slot.client_port == client.port()
                && addr == source_addr
                && port == source.port()
                && slot.protocol == protocol
                && slot.family == family
                && !slot.has(flag::TEMPLATE)
                && (side == Side::Out || !slot.method().translates())
        });
        found.map(|reference| Side::of(reference).0)
    }

    /// Takes an entry in, as the newest of its equals, and starts its timer; `None`, and nothing changed, if the table
    /// is full.
    pub(crate) fn insert(&mut self, slot: Slot, now: Instant) -> Option<u32> {
        let next_free = self.slots.get(self.free as usize).map(|slot| slot.next);
        let index = if next_free.is_some() {
            self.slots[self.free as usize] = slot;
            self.free
        } else if self.slots.len() < self.capacity {
            self.slots.push(slot);
            self.ties.push([Tie::NONE; 2]);
            u32::try_from(self.slots.len() - 1).ok()?
        } else {
            return None;
        };
        self.free = next_free.unwrap_or(self.free);
        if !self.enter_index(index) {
            self.leave_index(index);
            self.release(index);
            return None;
        }
        self.len += 1;
        self.portless += usize::from(self.slots[index as usize].has(flag::NO_CPORT));
        self.restart(index, now);
        Some(index)
    }

    /// Takes an entry out and frees its slot.
    pub(crate) fn remove(&mut self, index: u32) {
        self.wheel.disarm(&mut self.slots, index);
        self.leave_index(index);
        self.portless -= usize::from(self.slots[index as usize].has(flag::NO_CPORT));
        self.release(index);
        self.len -= 1;
    }

    /// Puts a slot in front of the free ones.
    fn release(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.next = self.free;
        // A free slot answers no lookup and no listing.
        slot.protocol = Protocol(0);
        slot.flags = FREE;
        self.free = index;
    }

    /// Makes an entry the one that its packets find; `false` if the index has no room where it belongs.
    fn enter_index(&mut self, index: u32) -> bool {
        let sides = self.hashes(index);
        sides.into_iter().all(|(side, hash)| {
            let Some(hash) = hash else { return true };
            let new = &self.slots[index as usize];
            let equal = self.index.find(hash, |reference| {
                let (known, of) = Side::of(reference);
                of == side && new.is_found_like(&self.slots[known as usize], side)
            });
            let Some(equal) = equal else {
                return self.index.insert(hash, side.reference(index));
            };
            self.index.replace(hash, equal, side.reference(index));
            let (older, _) = Side::of(equal);
            self.ties[older as usize][side as usize].newer = index;
            self.ties[index as usize][side as usize].older = older;
            true
        })
    }

    /// Lets an entry be found no more, and in its place the one that it stood before.
    fn leave_index(&mut self, index: u32) {
        for (side, hash) in self.hashes(index) {
            let Some(hash) = hash else { continue };
            let place = &mut self.ties[index as usize][side as usize];
            let Tie { older, newer } = core::mem::replace(place, Tie::NONE);
            if let Some(tie) = self.ties.get_mut(older as usize) {
                tie[side as usize].newer = newer;
            }
            if let Some(tie) = self.ties.get_mut(newer as usize) {
                tie[side as usize].older = older;
            } else if older == NO_SLOT {
                self.index.remove(hash, side.reference(index));
            } else {
                let (old, new) = (side.reference(index), side.reference(older));
                self.index.replace(hash, old, new);
            }
        }
    }

    /// The hashes that an entry is found by, for each side that it has.
    fn hashes(&self, index: u32) -> [(Side, Option<u64>); 2] {
        let slot = &self.slots[index as usize];
        let client = (slot.client_addr, slot.client_port);
        let virt = (slot.virt_addr, slot.virt_port);
        let replies = slot.method() == Forwarding::Nat && !slot.has(flag::TEMPLATE);
        let out = replies.then(|| {
            let server = (slot.server_addr, slot.server_port);
            self.hash(slot.protocol, client, server)
        });
        let into = self.hash(slot.protocol, client, virt);
        [(Side::In, Some(into)), (Side::Out, out)]
    }

    /// Lets the entry's timer run for its timeout from `now` (`ip_vs_conn_put`).
    #[inline]
    pub(crate) fn restart(&mut self, index: u32, now: Instant) {
        let slot = &mut self.slots[index as usize];
        slot.expires = now + Duration::from_secs(u64::from(slot.timeout));
        self.wheel.arm(&mut self.slots, index);
    }

    /// Entries due at `now`, out of the wheel: those of the earliest tick that has any. Empty if there are none, or if
    /// the budget ran out on the way. Give the vector back with [`recycle`](Self::recycle).
    pub(crate) fn take_due_by(&mut self, now: Instant, budget: &mut usize) -> Vec<u32> {
        loop {
            let Some(tick) = self.due_tick(now, budget) else {
                let mut due = core::mem::take(&mut self.due);
                due.clear();
                return due;
            };
            let due = self.take_due(now, budget);
            // In the present tick, what is left is due within milliseconds.
            if !due.is_empty() || tick == tick_of(now) || *budget == 0 {
                return due;
            }
            self.recycle(due);
        }
    }

    /// The next tick up to `now` in which entries may be due.
    pub(crate) fn due_tick(&mut self, now: Instant, budget: &mut usize) -> Option<u64> {
        self.wheel.next_tick(&mut self.slots, tick_of(now), budget)
    }

    /// Entries of the tick that [`due_tick`](Self::due_tick) has found, out of the wheel, as far as they are due.
    pub(crate) fn take_due(&mut self, now: Instant, budget: &mut usize) -> Vec<u32> {
        let mut due = core::mem::take(&mut self.due);
        due.clear();
        self.wheel.take_due(&mut self.slots, now, budget, &mut due);
        // A controlled entry ends before the one that controls it.
        due.sort_by_key(|&index| self.slots[index as usize].controlled > 0);
        due
    }

    /// Takes back the vector of [`take_due_by`](Self::take_due_by), for its memory.
    pub(crate) fn recycle(&mut self, due: Vec<u32>) {
        self.due = due;
    }

    /// When to look for due entries again.
    pub(crate) fn next_wakeup(&self) -> Option<Instant> {
        self.wheel.next_wakeup()
    }

    /// Slots that are or were in use.
    pub(crate) const fn slots_len(&self) -> usize {
        self.slots.len()
    }

    /// Whether a slot is in use.
    pub(crate) fn is_used(&self, index: u32) -> bool {
        self.slots
            .get(index as usize)
            .is_some_and(|slot| slot.flags != FREE)
    }

    /// Indices of entries in use among `slots`.
    pub(crate) fn indices(&self, slots: Range<usize>) -> impl Iterator<Item = u32> + '_ {
        let end = slots.end.min(self.slots.len());
        (u32::try_from(slots.start).unwrap_or(NO_SLOT)..u32::try_from(end).unwrap_or(NO_SLOT))
            .filter(|&index| self.slots[index as usize].flags != FREE)
    }

    /// Hash of a client's address and port and those that he speaks to, or hears from.
    #[inline]
    fn hash(&self, protocol: Protocol, client: (u128, u16), peer: (u128, u16)) -> u64 {
        let (k0, k1) = self.hash_keys;
        let mut hasher = SipHasher13::new_with_keys(k0, k1);
        let tail = u64::from(client.1) << 8 | u64::from(protocol.0);
        if let (Ok(from), Ok(to)) = (u32::try_from(client.0), u32::try_from(peer.0)) {
            hasher.write_u64(u64::from(from) << 24 | tail);
            hasher.write_u64(u64::from(to) << 16 | u64::from(peer.1));
        } else {
            hasher.write_u128(client.0);
            hasher.write_u128(peer.0);
            hasher.write_u64(u64::from(peer.1) << 32 | tail);
        }
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u16) -> Key {
        Key {
            protocol: Protocol::TCP,
            client: SocketAddr::from(([192, 0, 2, 1], n)),
            virt: "10.0.0.1:80".parse().unwrap(),
        }
    }

    fn slot(n: u16, timeout: u32) -> Slot {
        let mut slot = Slot::new(&key(n), "10.1.0.1:80".parse().unwrap(), 0);
        slot.timeout = timeout;
        slot
    }

    /// Everything that is due up to `now`, in order.
    fn due(table: &mut ConnTable, now: Instant) -> Vec<u16> {
        let mut ports = Vec::new();
        loop {
            let due = table.take_due_by(now, &mut usize::MAX.clone());
            if due.is_empty() {
                break;
            }
            for &index in &due {
                ports.push(table.get(index).client().port());
                table.remove(index);
            }
            table.recycle(due);
        }
        ports
    }

    #[test]
    fn finds_both_directions_and_the_newest_of_equals() {
        let mut table = ConnTable::new(8, 1);
        let old = table.insert(slot(1, 1), Instant::ZERO).unwrap();
        let new = table.insert(slot(1, 1), Instant::ZERO).unwrap();
        assert_eq!(table.find_in(&key(1)), Some(new));
        let server = "10.1.0.1:80".parse().unwrap();
        assert_eq!(
            table.find_out(Protocol::TCP, server, key(1).client),
            Some(new)
        );
        assert_eq!(table.find_out(Protocol::UDP, server, key(1).client), None);
        table.remove(new);
        assert_eq!(table.find_in(&key(1)), Some(old));
        table.remove(old);
        assert_eq!((table.find_in(&key(1)), table.len()), (None, 0));
    }

    fn nat(client: u16, virt: SocketAddr, server: SocketAddr) -> Slot {
        let key = Key {
            virt,
            ..key(client)
        };
        let mut slot = Slot::new(&key, server, Forwarding::Nat as u32);
        slot.timeout = 100;
        slot
    }

    /// One client's port to every port of an address, and to one port of as many addresses with one server: chains
    /// keyed by the client alone would have all of them.
    #[test]
    fn one_clients_port_to_all_ports_or_addresses_makes_no_chain() {
        let mut table = ConnTable::new(1 << 17, 1);
        let server: SocketAddr = "10.1.0.1:80".parse().unwrap();
        let virt = |n: u16| {
            let [high, low] = n.to_be_bytes();
            SocketAddr::from(([10, 2, high, low], 80))
        };
        let port = |n: u16| SocketAddr::from(([10, 0, 0, 1], n));
        let behind = |n: u16| SocketAddr::from(([10, 1, 0, 2], n));
        for n in 1..=u16::MAX {
            table
                .insert(nat(7, virt(n), server), Instant::ZERO)
                .unwrap();
            table
                .insert(nat(7, port(n), behind(n)), Instant::ZERO)
                .unwrap();
        }
        for n in 1..=u16::MAX {
            for virt in [virt(n), port(n)] {
                let found = table.find_in(&Key { virt, ..key(7) }).unwrap();
                assert_eq!(table.get(found).virt(), virt);
            }
            let found = table.find_out(Protocol::TCP, behind(n), key(7).client);
            assert_eq!(table.get(found.unwrap()).virt(), port(n));
        }
        // Of equals, the newest that is left; removed from the middle, from the end and from the front.
        let newest = |table: &ConnTable| {
            let found = table.find_out(Protocol::TCP, server, key(7).client);
            found.map(|index| table.get(index).virt())
        };
        assert_eq!(newest(&table), Some(virt(u16::MAX)));
        for n in (2..u16::MAX).chain([1]) {
            let index = table
                .find_in(&Key {
                    virt: virt(n),
                    ..key(7)
                })
                .unwrap();
            table.remove(index);
            assert_eq!(newest(&table), Some(virt(u16::MAX)));
        }
        let index = table.find_in(&Key {
            virt: virt(u16::MAX),
            ..key(7)
        });
        table.remove(index.unwrap());
        assert_eq!(newest(&table), None);
    }

    #[test]
    fn a_full_table_refuses_and_recovers() {
        let mut table = ConnTable::new(2, 1);
        let first = table.insert(slot(1, 1), Instant::ZERO).unwrap();
        table.insert(slot(2, 1), Instant::ZERO).unwrap();
        assert_eq!(table.insert(slot(3, 1), Instant::ZERO), None);
        table.remove(first);
        assert!(table.insert(slot(3, 1), Instant::ZERO).is_some());
        assert_eq!(table.find_in(&key(1)), None);
        assert!(table.find_in(&key(2)).is_some());
    }

    #[test]
    fn timers_fire_at_their_deadline_and_not_before() {
        // From milliseconds to beyond the wheel's span of 208 days.
        for timeout in [1, 2, 68, 69, 4_000, 300_000, 20_000_000, 40_000_000] {
            let mut table = ConnTable::new(8, 1);
            table
                .insert(slot(1, timeout), Instant::from_secs(5))
                .unwrap();
            let deadline = Instant::from_secs(5 + u64::from(timeout));
            let before = Instant::from_nanos(deadline.as_nanos() - 1);
            assert_eq!(due(&mut table, before), [0; 0], "{timeout}");
            assert_eq!(due(&mut table, deadline), [1], "{timeout}");
        }
    }

    #[test]
    fn a_timer_moved_earlier_or_later_fires_when_it_should() {
        let mut table = ConnTable::new(8, 1);
        let index = table.insert(slot(1, 900), Instant::ZERO).unwrap();
        table.get_mut(index).timeout = 10;
        table.restart(index, Instant::from_secs(1));
        assert_eq!(due(&mut table, Instant::from_secs(10)), [0; 0]);
        table.get_mut(index).timeout = 900;
        table.restart(index, Instant::from_secs(10));
        assert_eq!(due(&mut table, Instant::from_secs(909)), [0; 0]);
        assert_eq!(due(&mut table, Instant::from_secs(910)), [1]);
    }

    #[test]
    fn a_budget_only_delays() {
        let mut table = ConnTable::new(1000, 1);
        for n in 1..=1000 {
            table.insert(slot(n, 100), Instant::ZERO).unwrap();
        }
        let now = Instant::from_secs(100);
        let (mut calls, mut fired) = (0, 0);
        while fired < 1000 {
            let due = table.take_due_by(now, &mut 7);
            fired += due.len();
            due.iter().for_each(|&index| table.remove(index));
            table.recycle(due);
            calls += 1;
            assert!(calls < 1000, "no progress");
        }
    }

    proptest::proptest! {
        #[test]
        fn timers_agree_with_a_sorted_list(
            steps in proptest::collection::vec((1u16..50, 1u32..5000, 0u64..2000), 1..200)
        ) {
            let mut table = ConnTable::new(64, 7);
            let mut model: std::collections::BTreeMap<u16, (u32, Instant)> = Default::default();
            let mut now = Instant::ZERO;
            for (port, timeout, wait) in steps {
                match table.find_in(&key(port)) {
                    Some(index) => {
                        table.get_mut(index).timeout = timeout;
                        table.restart(index, now);
                    }
                    None => {
                        table.insert(slot(port, timeout), now).unwrap();
                    }
                }
                model.insert(port, (timeout, now + Duration::from_secs(u64::from(timeout))));
                now = now + Duration::from_millis(wait * 1237);
                let mut fired = due(&mut table, now);
                fired.sort_unstable();
                let expected: Vec<u16> =
                    model.iter().filter(|(_, (_, at))| *at <= now).map(|(port, _)| *port).collect();
                proptest::prop_assert_eq!(&fired, &expected);
                model.retain(|_, (_, at)| *at > now);
                proptest::prop_assert_eq!(table.len(), model.len());
            }
        }
    }
}
