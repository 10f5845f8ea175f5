//! Longest prefix match: finds the most specific of many networks that contain an address.
//!
//! It is a tree. Each node evaluates six bits of the address, and skips bits that are equal in all
//! networks below it. A lookup reads at most one node for each six bits (six for IPv4, 22 for IPv6)
//! and, with few networks or many, usually two or three. The tree is built from a list and does not
//! change.
//!
//! ```text
//!  node: first `skip` bits of all below it ── the next six bits: 64 places
//!          values: the longest network of `skip` to `skip + 6` bits that covers the place, if any
//!          children: nodes for places with longer networks
//! ```

use alloc::vec::Vec;
use core::net::IpAddr;

use crate::Prefix;

/// Number of bits of the address that select a place in one node.
const STRIDE: u8 = 6;
const PLACES: u8 = 1 << STRIDE;

/// Networks, each with a value. If two networks are equal, the later one applies.
#[derive(Clone, Debug)]
pub(crate) struct PrefixMap<T> {
    v4: Tree<T>,
    v6: Tree<T>,
}

impl<T> Default for PrefixMap<T> {
    fn default() -> Self {
        Self {
            v4: Tree::default(),
            v6: Tree::default(),
        }
    }
}

impl<T: Copy> PrefixMap<T> {
    pub(crate) fn new(all: impl IntoIterator<Item = (Prefix, T)>) -> Self {
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for (prefix, value) in all {
            let entry = Entry {
                bits: bits(prefix.addr()),
                len: prefix.bits(),
                value,
            };
            match prefix.addr() {
                IpAddr::V4(_) => v4.push(entry),
                IpAddr::V6(_) => v6.push(entry),
            }
        }
        let (v4, v6) = (distinct(v4), distinct(v6));
        Self {
            v4: Tree::new(&v4),
            v6: Tree::new(&v6),
        }
    }

    /// The longest network that contains `addr`: its length in bits, and its value.
    pub(crate) fn find(&self, addr: IpAddr) -> Option<(u8, T)> {
        let tree = match addr {
            IpAddr::V4(_) => &self.v4,
            IpAddr::V6(_) => &self.v6,
        };
        tree.find(bits(addr))
    }
}

/// The bits of an address; the first bit of the address is the most significant one.
fn bits(addr: IpAddr) -> u128 {
    match addr {
        IpAddr::V4(addr) => u128::from(addr.to_bits()) << 96,
        IpAddr::V6(addr) => addr.to_bits(),
    }
}

/// Sorts networks; of two networks with the same first bits, the shorter one comes first. Removes
/// duplicates.
fn distinct<T: Copy>(mut entries: Vec<Entry<T>>) -> Vec<Entry<T>> {
    // The sort is stable: of equal prefixes, the one that was given last remains the last.
    entries.sort_by_key(|entry| (entry.bits, entry.len));
    entries.dedup_by(|later, kept| {
        let same = (later.bits, later.len) == (kept.bits, kept.len);
        if same {
            kept.value = later.value;
        }
        same
    });
    entries
}

#[derive(Clone, Copy, Debug)]
struct Entry<T> {
    bits: u128,
    len: u8,
    value: T,
}

#[derive(Clone, Debug)]
struct Node {
    /// The bits that all networks below this node have in common.
    prefix: u128,
    /// Number of the leading bits of `prefix` that are valid.
    skip: u8,
    /// One bit for each place with a child node; the child nodes are contiguous.
    children: u64,
    first_child: u32,
    /// One bit for each place whose value differs from the value of the previous place; the bit of
    /// the first place is always set.
    changes: u64,
    first_value: u32,
}

#[derive(Clone, Debug)]
struct Tree<T> {
    nodes: Vec<Node>,
    values: Vec<Option<(u8, T)>>,
}

impl<T> Default for Tree<T> {
    fn default() -> Self {
        Self {
            nodes: Vec::new(),
            values: Vec::new(),
        }
    }
}

impl<T: Copy> Tree<T> {
    fn new(entries: &[Entry<T>]) -> Self {
        let mut tree = Self::default();
        if !entries.is_empty() {
            tree.nodes.push(Node::vacant());
            tree.fill(0, entries);
        }
        tree
    }

    /// Builds the node at `at` and all nodes below it from `entries`, which must not be empty. The
    /// recursion is bounded: each level is at least six bits deeper.
    fn fill(&mut self, at: usize, entries: &[Entry<T>]) {
        let (first, last) = (entries[0], entries[entries.len() - 1]);
        let alike = (first.bits ^ last.bits).leading_zeros();
        let shortest = entries.iter().map(|entry| entry.len).min().unwrap_or(0);
        let skip = shortest.min(u8::try_from(alike).unwrap_or(u8::MAX));
        let node = Node {
            prefix: first.bits,
            skip,
            first_value: index(self.values.len()),
            ..Node::vacant()
        };
        self.nodes[at] = node;
        self.fill_values(at, entries);
        // Longer prefixes are grouped by place. Those of one place are adjacent, because the
        // entries are sorted by their bits.
        let deeper = |entry: &Entry<T>| entry.len > skip + STRIDE;
        let mut groups: Vec<(u8, Vec<Entry<T>>)> = Vec::new();
        for &entry in entries.iter().filter(|entry| deeper(entry)) {
            let place = place(entry.bits, skip);
            match groups.last_mut() {
                Some((last, group)) if *last == place => group.push(entry),
                _ => groups.push((place, [entry].into())),
            }
        }
        let first_child = self.nodes.len();
        self.nodes[at].first_child = index(first_child);
        self.nodes
            .resize_with(first_child + groups.len(), Node::vacant);
        for (number, (place, group)) in groups.iter().enumerate() {
            self.nodes[at].children |= 1 << place;
            self.fill(first_child + number, group);
        }
    }

    /// Stores, for each place of the node, the longest of the node's own prefixes that contain the
    /// place, with its value.
    fn fill_values(&mut self, at: usize, entries: &[Entry<T>]) {
        let skip = self.nodes[at].skip;
        let mut places = [None; PLACES as usize];
        // In sorted order, a longer prefix follows all prefixes that contain it.
        for (number, entry) in entries.iter().enumerate() {
            let Some(free) = (skip + STRIDE).checked_sub(entry.len) else {
                continue;
            };
            let from = usize::from(place(entry.bits, skip));
            places[from..from + (1 << free)].fill(Some(number));
        }
        let mut before = None;
        for (place, &value) in places.iter().enumerate() {
            if place == 0 || value != before {
                self.nodes[at].changes |= 1 << place;
                let value = value.map(|number| (entries[number].len, entries[number].value));
                self.values.push(value);
            }
            before = value;
        }
    }

    fn find(&self, bits: u128) -> Option<(u8, T)> {
        let mut found = None;
        let mut node = self.nodes.first()?;
        loop {
            let differs = (bits ^ node.prefix).leading_zeros();
            if differs < u32::from(node.skip) {
                return found;
            }
            let place = place(bits, node.skip);
            let up_to = u64::MAX >> (PLACES - 1 - place);
            let value = node.first_value + (node.changes & up_to).count_ones() - 1;
            found = self.values[value as usize].or(found);
            if node.children >> place & 1 == 0 {
                return found;
            }
            let child = node.first_child + (node.children & up_to).count_ones() - 1;
            node = &self.nodes[child as usize];
        }
    }
}

impl Node {
    const fn vacant() -> Self {
        Self {
            prefix: 0,
            skip: 0,
            children: 0,
            first_child: 0,
            changes: 0,
            first_value: 0,
        }
    }
}

/// The six bits after the first `skip` bits, padded with zeros.
fn place(bits: u128, skip: u8) -> u8 {
    let rest = bits.checked_shl(skip.into()).unwrap_or(0);
    (rest >> (128 - STRIDE)) as u8
}

fn index(len: usize) -> u32 {
    u32::try_from(len).expect("lists of networks are bounded")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Networks with few different bits, so that some contain others.
    fn prefixes() -> impl Strategy<Value = Vec<Prefix>> {
        let v4 = (any::<u32>(), 0..=32_u8, 0..=32_u32).prop_map(|(bits, len, shift)| {
            let bits = bits.checked_shl(shift).unwrap_or(0);
            Prefix::new(IpAddr::V4(bits.into()), len).unwrap()
        });
        let v6 = (any::<u128>(), 0..=128_u8, 0..=128_u32).prop_map(|(bits, len, shift)| {
            let bits = bits.checked_shl(shift).unwrap_or(0);
            Prefix::new(IpAddr::V6(bits.into()), len).unwrap()
        });
        prop::collection::vec(prop_oneof![v4, v6], 0..60)
    }

    fn naive(all: &[Prefix], addr: IpAddr) -> Option<(u8, usize)> {
        let holding = all.iter().enumerate().filter(|(_, p)| p.contains(addr));
        holding.map(|(n, p)| (p.bits(), n)).max()
    }

    proptest! {
        #[test]
        fn lpm_agrees_with_linear_search(
            all in prefixes(),
            others in prop::collection::vec(any::<u128>(), 20),
            flip in 0..128_u32,
        ) {
            let map = PrefixMap::new(all.iter().copied().zip(0..));
            // Random addresses are almost never in a network: test the first and last addresses of
            // each, and addresses that differ in one bit.
            let near = all.iter().flat_map(|prefix| {
                let own = bits(prefix.addr());
                let last = own | u128::MAX.checked_shr(prefix.bits().into()).unwrap_or(0);
                [own, last, own ^ (1 << flip), own.wrapping_sub(1), last.wrapping_add(1)]
            });
            for bits in near.chain(others) {
                let v4 = IpAddr::V4(((bits >> 96) as u32).into());
                for addr in [v4, IpAddr::V6(bits.into())] {
                    prop_assert_eq!(map.find(addr), naive(&all, addr), "{}", addr);
                }
            }
        }
    }

    #[test]
    fn lpm_matches_nothing_without_prefixes_and_own_family_with_zero_length_prefix() {
        let map = PrefixMap::<()>::default();
        assert_eq!(map.find([192, 0, 2, 1].into()), None);
        let all = PrefixMap::new([(Prefix::new([0, 0, 0, 0].into(), 0).unwrap(), 'x')]);
        assert_eq!(all.find([192, 0, 2, 1].into()), Some((0, 'x')));
        assert_eq!(all.find(IpAddr::V6(1.into())), None);
    }

    #[test]
    fn lpm_has_at_most_two_nodes_and_eight_values_per_prefix() {
        // Pairs of addresses that differ only in the last bit, with large gaps between pairs: the
        // worst case.
        let all = (0..10_000_u128).flat_map(|n| {
            let bits = n.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835) & !1;
            [bits, bits | 1].map(|bits| (Prefix::new(IpAddr::V6(bits.into()), 128).unwrap(), ()))
        });
        let map = PrefixMap::new(all);
        assert!(map.v6.nodes.len() <= 40_000, "{}", map.v6.nodes.len());
        assert!(map.v6.values.len() <= 160_000, "{}", map.v6.values.len());
    }
}
