//! Maglev hashing (`ip_vs_mh`).

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::net::SocketAddr;

use super::sh::{client_key, probe};
use super::wrr::gcd;
use super::{About, AtZero, HashSlot};
use crate::hash::{KEY1, KEY2, fold, hsiphash};
use crate::{Request, Scheduler, Server, ServiceFlags};

/// The default of `CONFIG_IP_VS_MH_TAB_INDEX` in the kernel.
const INDEX: u8 = 12;
/// Numbers of slots for the table indices from 8 on: each the largest prime below two to the power
/// of the index.
const SLOTS: [u32; 10] = [
    251, 509, 1021, 2039, 4093, 8191, 16_381, 32_749, 65_521, 131_071,
];
const EMPTY: u32 = u32::MAX;

pub(super) const ABOUT: About = About {
    name: "mh",
    summary: "Maglev hash of the source address",
    at_zero: AtZero::RefusesWithoutFallback,
    flags: &[
        ("mh-fallback", ServiceFlags::SCHED1),
        ("mh-port", ServiceFlags::SCHED2),
    ],
    goes_by_order: true,
    make: || Box::<MaglevHashing>::default(),
    ..About::USUAL
};

/// Consistent hashing of the client's address (with `mh-port`, address and port): only a few
/// clients get another server when servers are added or removed.
///
/// The table uses each server's *last* weight that was not 0, so that weight 0 does not affect
/// clients of other servers. A server added at weight 0 gets no slots.
///
/// The table has 4,093 slots, as in most kernels. With fewer than a hundred slots for each server,
/// the servers' shares of the clients are unequal: [`with_table_index`](Self::with_table_index)
/// makes a larger table.
#[derive(Clone, Debug)]
pub struct MaglevHashing {
    slots: u32,
    /// Maximum number of bits of a weight in the table; if a weight has more bits, all weights are
    /// shifted right.
    weight_bits: u32,
    /// The server of each slot, as an index into the list of servers.
    table: Vec<u32>,
    /// The servers and weights from which the table was built. If a change leaves them unchanged,
    /// the table is not rebuilt.
    built: Vec<(SocketAddr, i32)>,
    /// Whether a server was added, removed or edited since the table was built.
    stale: bool,
}

impl Default for MaglevHashing {
    fn default() -> Self {
        Self::sized(INDEX)
    }
}

impl MaglevHashing {
    /// A scheduler with the table of a kernel with this `CONFIG_IP_VS_MH_TAB_INDEX`: from 8 (251
    /// slots) to 17 (131,071 slots). `None` for other values. All directors of a service must use
    /// the same table.
    pub fn with_table_index(index: u8) -> Option<Self> {
        (8..=17).contains(&index).then(|| Self::sized(index))
    }

    fn sized(index: u8) -> Self {
        Self {
            slots: SLOTS[usize::from(index - 8)],
            weight_bits: u32::from(index / 2),
            table: Vec::new(),
            built: Vec::new(),
            stale: false,
        }
    }

    /// Builds the table if it is out of date. This is called at each choice, so that the table is
    /// built only once after servers were added one by one.
    fn refresh(&mut self, servers: &[Arc<Server>]) {
        let list = || {
            servers
                .iter()
                .map(|server| (server.addr(), server.last_weight()))
        };
        if !core::mem::take(&mut self.stale) || self.built.iter().copied().eq(list()) {
            return;
        }
        self.built.clear();
        self.built.extend(list());
        self.populate();
    }

    /// Fills the table of slots (`ip_vs_mh_populate`).
    fn populate(&mut self) {
        let slots = self.slots;
        self.table.clear();
        self.table.resize(slots as usize, EMPTY);
        let weights = || {
            self.built
                .iter()
                .map(|&(_, weight)| weight)
                .filter(|&w| w > 0)
        };
        let (Some(divisor), Some(heaviest)) = (weights().reduce(gcd), weights().max()) else {
            return;
        };
        let shift =
            (i32::BITS - (heaviest / divisor).leading_zeros()).saturating_sub(self.weight_bits);
        let mut walks: Vec<Walk> = (0..)
            .zip(&self.built)
            .filter(|(_, (_, weight))| *weight > 0)
            .map(|(index, (addr, weight))| {
                let key = fold(addr.ip()).wrapping_add(u32::from(addr.port()));
                Walk {
                    index,
                    at: hsiphash(key, KEY1) % slots,
                    skip: hsiphash(key, KEY2) % (slots - 1) + 1,
                    turns: ((weight / divisor) >> shift).max(1),
                }
            })
            .collect();
        let mut taken = Taken::none_of(slots);
        let mut free = slots;
        loop {
            for walk in &mut walks {
                for _ in 0..walk.turns {
                    // The slot that the server got in its last turn counts as taken, so that the
                    // walk advances.
                    while taken.has(walk.at) {
                        walk.at += walk.skip;
                        if walk.at >= slots {
                            walk.at -= slots;
                        }
                    }
                    taken.take(walk.at);
                    self.table[walk.at as usize] = walk.index;
                    free -= 1;
                    if free == 0 {
                        return;
                    }
                }
            }
        }
    }
}

/// A bit for each slot of the table: set if a server has the slot. When the table is filled, most
/// probed slots are occupied, and these bits fit into the CPU's first cache.
struct Taken(Vec<u64>);

impl Taken {
    fn none_of(slots: u32) -> Self {
        Self(vec![0; slots.div_ceil(64) as usize])
    }

    fn has(&self, slot: u32) -> bool {
        self.0[(slot / 64) as usize] >> (slot % 64) & 1 != 0
    }

    fn take(&mut self, slot: u32) {
        self.0[(slot / 64) as usize] |= 1 << (slot % 64);
    }
}

/// The order in which a server takes slots: a permutation of all slots.
struct Walk {
    index: u32,
    at: u32,
    skip: u32,
    turns: i32,
}

impl Scheduler for MaglevHashing {
    fn preview(&self) -> Option<Box<dyn Scheduler>> {
        Some(Box::new(self.clone()))
    }

    fn pick(&mut self, servers: &[Arc<Server>], request: &Request) -> Option<usize> {
        if servers.len() <= self.slots as usize {
            self.refresh(servers);
        }
        let key = client_key(request);
        let slots = self.slots;
        let slot = |offset: u32| {
            let slot = hsiphash(key.wrapping_add(offset), KEY1) % slots;
            let index = *self.table.get(slot as usize)?;
            (index != EMPTY).then_some(index as usize)
        };
        probe(servers, request, slots, hsiphash(key, KEY1) % slots, slot)
    }

    fn slot(&self, request: &Request) -> Option<HashSlot> {
        Some(HashSlot {
            number: hsiphash(client_key(request), KEY1) % self.slots,
            of: self.slots,
        })
    }

    fn goes_by_last_weight(&self) -> bool {
        true
    }

    fn start(&mut self, servers: &[Arc<Server>]) {
        self.table.clear();
        self.built.clear();
        self.stale = !servers.is_empty();
    }

    fn server_added(&mut self, servers: &[Arc<Server>]) {
        // With more servers than slots, the kernel refuses to build a table and keeps the present
        // one.
        if servers.len() > self.slots as usize {
            if servers.len() == self.slots as usize + 1 {
                self.refresh(&servers[1..]);
            }
            for index in self.table.iter_mut().filter(|index| **index != EMPTY) {
                *index += 1;
            }
            self.built.clear();
        }
        self.stale = true;
    }

    fn server_removed(&mut self, servers: &[Arc<Server>], index: usize) {
        if servers.len() > self.slots as usize {
            let removed = u32::try_from(index).unwrap_or(EMPTY);
            for index in self.table.iter_mut().filter(|index| **index != EMPTY) {
                match (*index).cmp(&removed) {
                    core::cmp::Ordering::Less => {}
                    core::cmp::Ordering::Equal => *index = EMPTY,
                    core::cmp::Ordering::Greater => *index -= 1,
                }
            }
        }
        self.stale = true;
    }

    fn server_edited(&mut self, _: &[Arc<Server>], _: usize) {
        self.stale = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ServiceFlags;
    use crate::sched::tests::{clients, letters, pool, set_weight};

    fn table(weights: &[i32], names: &str) -> (std::string::String, Vec<usize>) {
        let pool = pool("mh", weights);
        let mut scheduler = MaglevHashing::default();
        scheduler.start(pool.servers());
        scheduler.refresh(pool.servers());
        // Indices count from the newest server.
        let names: Vec<char> = names.chars().rev().collect();
        let start = scheduler.table[..32]
            .iter()
            .map(|&index| names[index as usize])
            .collect();
        let counts = (0..names.len())
            .rev()
            .map(|index| {
                let mine = scheduler
                    .table
                    .iter()
                    .filter(|&&slot| slot as usize == index);
                mine.count()
            })
            .collect();
        (start, counts)
    }

    #[test]
    fn mh_tables_equal_kernel_tables() {
        let (start, counts) = table(&[1, 1, 1], "ABC");
        assert_eq!(start, "ABBCCABCCAABBAACBBAACBCCBABAACCB");
        assert_eq!(counts, [1364, 1364, 1365]);
        let (start, counts) = table(&[1, 1, 1, 3], "ABCD");
        assert_eq!(start, "DDDDDABCCADBDDADBDAACDCCDDDAADDB");
        assert_eq!(counts, [682, 682, 682, 2047]);
        assert_eq!(table(&[1000, 1, 1, 7], "ABCD").1, [3904, 63, 63, 63]);
    }

    #[test]
    fn mh_table_of_each_size_is_divided_by_weight() {
        let pool = pool("mh", &[1, 1, 1, 2]);
        for (index, slots) in (8..).zip(SLOTS) {
            let mut scheduler =
                MaglevHashing::with_table_index(index).expect("the table index is valid");
            scheduler.start(pool.servers());
            scheduler.refresh(pool.servers());
            assert_eq!(scheduler.table.len(), slots as usize);
            assert!(slots < 1 << index && slots > (1 << index) * 15 / 16);
            let heaviest = scheduler.table.iter().filter(|&&slot| slot == 0).count();
            assert!(
                heaviest.abs_diff(slots as usize * 2 / 5) <= 2,
                "the server with weight 2 of 5 has {heaviest} of {slots} slots"
            );
        }
        for index in [0, 7, 18, 255] {
            assert!(
                MaglevHashing::with_table_index(index).is_none(),
                "table index {index} was accepted"
            );
        }
    }

    #[test]
    fn mh_weight_0_refuses_or_moves_only_clients_of_drained_server() {
        let mut pool = pool("mh", &[1, 1, 1]);
        let plain = ServiceFlags::default();
        assert_eq!(
            letters(&mut pool, clients(plain)),
            "CBBCBCBCABCBACBCACAACBCA"
        );
        set_weight(&mut pool, 1, 0);
        assert_eq!(
            letters(&mut pool, clients(plain)),
            "C--C-C-CA-C-AC-CACAAC-CA"
        );
        let fallback = ServiceFlags(ServiceFlags::SCHED1);
        assert_eq!(
            letters(&mut pool, clients(fallback)),
            "CCACACACACCAACCCACAACACA"
        );
    }

    #[test]
    fn mh_with_more_servers_than_slots_keeps_table() {
        let mut pool = crate::Pool::new(Box::<MaglevHashing>::default());
        let config = crate::ServerConfig::new(1, crate::Forwarding::Nat);
        let server = |n: u32| SocketAddr::new(core::net::Ipv4Addr::from_bits(n).into(), 80);
        let request = clients(ServiceFlags::default())[0];
        const SLOTS: u32 = 4093;
        for n in 1..=SLOTS {
            pool.insert(server(n), &config).unwrap();
        }
        let chosen = pool.pick(&request).unwrap().addr();
        for n in SLOTS + 1..SLOTS + 10 {
            pool.insert(server(n), &config).unwrap();
            assert_eq!(pool.pick(&request).unwrap().addr(), chosen, "{n}");
        }
        pool.remove(server(if chosen == server(1) { 2 } else { 1 }))
            .unwrap();
        assert_eq!(pool.pick(&request).unwrap().addr(), chosen);
        pool.remove(chosen).unwrap();
        assert!(pool.pick(&request).is_none());
        for n in SLOTS..SLOTS + 10 {
            let _ = pool.remove(server(n));
        }
        assert!(
            pool.pick(&request).is_some(),
            "no server is chosen, although there are fewer servers than slots again"
        );
    }
}
