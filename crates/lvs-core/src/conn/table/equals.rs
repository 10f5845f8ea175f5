//! Equal entries (they match the same packets): their order by age, and the slots in which they are
//! stored.

use alloc::vec::Vec;

use super::buckets::{Buckets, Tags, lanes};
use super::memory::Layout;
use super::overflow::Side;
use super::slot::{Entry, kind};
use super::{ConnTable, is_same};
use crate::conn::{Draft, flag};

impl ConnTable {
    /// Whether an existing entry matches the same packets as an entry made from `draft` would.
    pub(super) fn has_equals(&self, draft: &Draft) -> bool {
        let mut found = false;
        self.each_equal(draft, None, |_, _| found = true);
        if found {
            return true;
        }
        let narrow = draft.key.client.is_ipv4();
        let buckets = self.buckets_if_used(draft, narrow);
        let overflowed = buckets
            .is_none_or(|buckets| Tags::is_overflowed(self.slots.tags(narrow).word(buckets.first)));
        overflowed
            && Side::BOTH
                .into_iter()
                .any(|side| self.newest_like(draft, side).is_some())
    }

    /// The two buckets of the client of `draft`, in the region of narrow or of wide slots; `None`
    /// if this region cannot contain an entry of the client.
    fn buckets_if_used(&self, draft: &Draft, narrow: bool) -> Option<Buckets> {
        let client = draft.key.client;
        let usable = if narrow {
            client.is_ipv4()
        } else {
            !client.is_ipv4() || self.mixed > 0 || !draft.is_narrow()
        };
        if !usable {
            return None;
        }
        self.slots.buckets_of(narrow, client, draft.key.protocol)
    }

    /// Calls `each` for the entries outside of the overflow that match the same packets as `draft`,
    /// except `other_than`. The second argument of `each` is the direction in which the entry
    /// matches.
    fn each_equal(&self, draft: &Draft, other_than: Option<u32>, mut each: impl FnMut(u32, Side)) {
        for narrow in [true, false] {
            let Some(buckets) = self.buckets_if_used(draft, narrow) else {
                continue;
            };
            let tags = self.slots.tags(narrow);
            let base = if narrow { 0 } else { self.slots.wide as usize };
            for (n, bucket) in [buckets.first, buckets.second].into_iter().enumerate() {
                if n == 1 && bucket == buckets.first {
                    break;
                }
                for lane in lanes(tags.word(bucket), buckets.tag) {
                    let Ok(handle) = u32::try_from(base + bucket * Layout::WAYS + lane) else {
                        continue;
                    };
                    if Some(handle) == other_than {
                        continue;
                    }
                    let entry = self.slots.entry(handle);
                    for side in Side::BOTH {
                        if is_like(entry, draft, side) {
                            each(handle, side);
                        }
                    }
                }
            }
        }
    }

    /// The newest entry in the index of the overflow that matches the same packets as `draft` in
    /// the direction `side`.
    fn newest_like(&self, draft: &Draft, side: Side) -> Option<u32> {
        if side == Side::Out && !draft.has_out_side() {
            return None;
        }
        let peer = match side {
            Side::In => draft.key.virt,
            Side::Out => draft.server_addr,
        };
        let hash = self
            .overflow
            .hash(draft.key.protocol, draft.key.client, peer);
        self.overflow.find(hash, |handle, of| {
            of == side && is_like(self.slots.entry(handle), draft, side)
        })
    }

    /// Makes an entry the newest of the entries that match the same packets, in the directions
    /// `sides`. From then on, look-ups find it through the index of the overflow. Returns `false`
    /// if the index is full: the order of the entries is then unchanged, but equal entries may have
    /// been evicted from the kernel fast path.
    pub(super) fn enter(&mut self, handle: u32, sides: impl IntoIterator<Item = Side>) -> bool {
        let draft = self.slots.entry(handle).draft();
        let mut equals = Vec::new();
        self.each_equal(&draft, Some(handle), |equal, side| {
            equals.push((equal, side));
        });
        for &(equal, side) in &equals {
            let entry = self.slots.entry(equal);
            if entry.word0() & shadow(side) != 0 {
                continue;
            }
            let known = self.newest_like(&draft, side);
            if !self.overflow.enter(equal, side, entry, known) {
                equals
                    .iter()
                    .for_each(|&(equal, side)| self.settle(equal, side));
                return false;
            }
            entry.withdraw();
            entry.set_kind(shadow(side), true);
        }
        let mut entered = Vec::new();
        for side in sides {
            if side == Side::Out && !draft.has_out_side() {
                continue;
            }
            let known = self.newest_like(&draft, side);
            let entry = self.slots.entry(handle);
            if !self.overflow.enter(handle, side, entry, known) {
                for side in entered {
                    self.leave_side(handle, side);
                }
                equals
                    .iter()
                    .for_each(|&(equal, side)| self.settle(equal, side));
                return false;
            }
            entered.push(side);
        }
        true
    }

    pub(super) fn leave(&mut self, handle: u32) {
        let entry = self.slots.entry(handle);
        let (word, has_out_side) = (entry.word0(), entry.has_out_side());
        for side in Side::BOTH {
            let is_in = if self.slots.in_place(handle) {
                word & shadow(side) != 0
            } else {
                side == Side::In || has_out_side
            };
            if is_in {
                self.leave_side(handle, side);
            }
        }
    }

    fn leave_side(&mut self, handle: u32, side: Side) {
        let entry = self.slots.entry(handle);
        let alone = self.overflow.leave(handle, side, entry);
        if let Some(alone) = alone {
            self.settle(alone, side);
        }
    }

    /// If an entry is in its bucket, and no other entry matches the same packets in the direction
    /// `side` any more, removes the entry from the index of the overflow.
    fn settle(&mut self, handle: u32, side: Side) {
        let entry = self.slots.entry(handle);
        if self.slots.in_place(handle)
            && entry.word0() & shadow(side) != 0
            && self.overflow.is_alone(handle, side)
        {
            self.overflow.leave(handle, side, entry);
            entry.set_kind(shadow(side), false);
        }
    }

    /// Counts an entry that moves into the overflow (`comes`) or out of it, and updates the
    /// overflow bit in the tag word of its first bucket.
    pub(super) fn move_home(&mut self, handle: u32, comes: bool) {
        let entry = self.slots.entry(handle);
        let narrow = entry.is_of_v4_client();
        // Look-ups of IPv4 clients compare the tags of the narrow slots.
        let Some(buckets) = self
            .slots
            .buckets_of(narrow, entry.client(), entry.protocol())
        else {
            return;
        };
        let home = (narrow, buckets.first);
        let tags = self.slots.tags(narrow);
        let count = self.overflow.homes.entry(home).or_insert(0);
        if comes {
            *count += 1;
            tags.set_overflowed(buckets.first, true);
            return;
        }
        *count -= 1;
        if *count == 0 {
            self.overflow.homes.remove(&home);
            tags.set_overflowed(buckets.first, false);
        }
    }

    /// Sets the unknown client port of an entry to the port of its first packet
    /// (`ip_vs_conn_fill_cport`).
    pub(crate) fn set_client_port(&mut self, handle: u32, port: u16) {
        self.change(handle, |draft| {
            draft.key.client.set_port(port);
            draft.flags &= !flag::NO_CPORT;
        });
    }

    /// Gives a template ports that no look-up uses, and marks it as ended, so that no look-up finds
    /// it any more (`ip_vs_check_template`).
    pub(crate) fn hide_template(&mut self, handle: u32) {
        self.change(handle, |draft| {
            draft.key.virt.set_port(u16::MAX);
            draft.server_addr.set_port(u16::MAX);
            draft.flags |= flag::DYING;
        });
    }

    /// Changes the fields by which look-ups find an entry, except addresses and a known client
    /// port. The entry becomes the newest of its equal entries.
    pub(crate) fn change(&mut self, handle: u32, change: impl FnOnce(&mut Draft)) {
        let mut draft = self.slots.entry(handle).draft();
        let in_place = self.slots.in_place(handle);
        self.leave(handle);
        if !in_place {
            self.move_home(handle, false);
        }
        self.count(handle, usize::MAX);
        change(&mut draft);
        self.strangers.forget(draft.key.client, draft.key.protocol);
        self.slots.entry(handle).write(&draft);
        self.count(handle, 1);
        if !in_place {
            // A process that takes over the table finds the newest entry by this number.
            self.overflow.sequence += 1;
            self.slots
                .entry(handle)
                .set_sequence(self.overflow.sequence);
            self.move_home(handle, true);
            self.enter(handle, Side::BOTH);
            return;
        }
        // An entry in its bucket is also in the index of the overflow, for each side on which
        // another entry is equal to it.
        let mut sides = Vec::new();
        self.each_equal(&draft, Some(handle), |_, side| sides.push(side));
        sides.extend(
            Side::BOTH
                .into_iter()
                .filter(|&side| self.newest_like(&draft, side).is_some()),
        );
        let sides = Side::BOTH.into_iter().filter(|side| sides.contains(side));
        let sides: Vec<Side> = sides.collect();
        if !sides.is_empty() && self.enter(handle, sides.iter().copied()) {
            for side in sides {
                self.slots.entry(handle).set_kind(shadow(side), true);
            }
        }
    }
}

const fn shadow(side: Side) -> u64 {
    match side {
        Side::In => kind::SHADOWED_IN,
        Side::Out => kind::SHADOWED_OUT,
    }
}

/// Whether `entry` and `draft` match the same packets in the direction `side`.
fn is_like(entry: Entry<'_>, draft: &Draft, side: Side) -> bool {
    let same_peer = match side {
        Side::In => {
            entry.word0() & kind::DISTINCT == draft.kinds() && is_same(entry.virt(), draft.key.virt)
        }
        Side::Out => {
            entry.has_out_side()
                && draft.has_out_side()
                && is_same(entry.server_addr(), draft.server_addr)
        }
    };
    same_peer && entry.protocol() == draft.key.protocol && is_same(entry.client(), draft.key.client)
}
