//! Finds the least loaded of many servers without comparing all of them.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed};

use crate::{Request, Scheduler, Server};

/// With this number of servers or more, the scheduler uses a tree instead of comparing all servers.
const MANY: usize = 64;
/// An unused position of the tree.
const NONE: u32 = u32::MAX;

/// A scheduler that chooses the server with the smallest [`Quotient`] of load and weight; of equal
/// ones, the first in the list.
pub(super) trait ByQuotient: Scheduler + Copy + 'static {
    fn quotient(server: &Server) -> Quotient;
}

/// Load divided by weight. Two quotients are compared by multiplication, so that nothing is
/// rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Quotient {
    pub(super) load: i64,
    /// 0 if the scheduler must not choose the server.
    pub(super) weight: i64,
}

impl Quotient {
    /// Quotient of a server that the scheduler must not choose.
    pub(super) const NEVER: Self = Self { load: 0, weight: 0 };

    const fn is_less(self, other: Self) -> bool {
        if self.weight == 0 {
            return false;
        }
        other.weight == 0 || other.load * self.weight > self.load * other.weight
    }
}

/// The scheduler `S` for a list of many servers, which report their changes.
///
/// The servers are the leaves of a tree in which each node contains the lesser of the two nodes
/// below it. A server [marks](Server::watch) itself when its counts, weight or thresholds change,
/// and the next choice first examines only the marked servers. The choice equals the choice of `S`,
/// which examines all servers.
#[derive(Debug)]
pub(super) struct Following<S> {
    scheduler: S,
    follows: bool,
    tree: Option<Tree>,
}

impl<S> Following<S> {
    pub(super) const fn new(scheduler: S) -> Self {
        Self {
            scheduler,
            follows: false,
            tree: None,
        }
    }
}

impl<S: ByQuotient> Scheduler for Following<S> {
    fn preview(&self) -> Option<Box<dyn Scheduler>> {
        // The preview does not use this tree: if it read a changed server, it would clear the
        // server's mark, and the scheduler would not find the change.
        Some(Box::new(self.scheduler))
    }

    fn pick(&mut self, servers: &[Arc<Server>], request: &Request) -> Option<usize> {
        if !self.follows || servers.len() < MANY {
            return self.scheduler.pick(servers, request);
        }
        let tree = match &mut self.tree {
            Some(tree) => {
                tree.follow(servers, S::quotient);
                tree
            }
            tree => tree.insert(Tree::new(servers, S::quotient)),
        };
        if tree.below_zero > 0 {
            return self.scheduler.pick(servers, request);
        }
        tree.least()
    }

    fn follow(&mut self) {
        self.follows = true;
    }

    fn start(&mut self, _: &[Arc<Server>]) {
        self.tree = None;
    }

    fn server_added(&mut self, _: &[Arc<Server>]) {
        self.tree = None;
    }

    fn server_removed(&mut self, _: &[Arc<Server>], _: usize) {
        self.tree = None;
    }
}

struct Tree {
    /// Quotients of the servers, in the order of the list of servers.
    quotients: Vec<Quotient>,
    /// The position of the least loaded server below each node: the root is node 1, the nodes below
    /// `n` are `2 n` and `2 n + 1`, and the leaves come last.
    nodes: Vec<u32>,
    marks: Vec<Marks>,
    /// Number of negative loads, which occur from 2^23 active connections on, as in the kernel. If
    /// it is not 0, the scheduler compares all servers, including those with weight 0.
    below_zero: usize,
}

/// A word in which up to 64 servers set their bits.
struct Marks {
    word: Arc<AtomicU64>,
    /// The bits of servers that are in this list.
    mask: u64,
    /// The position of each bit's server in the list.
    places: Box<[u32; 64]>,
}

impl fmt::Debug for Tree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tree")
            .field("servers", &self.quotients.len())
            .finish_non_exhaustive()
    }
}

impl Tree {
    fn new(servers: &[Arc<Server>], quotient: fn(&Server) -> Quotient) -> Self {
        let mut marks = BTreeMap::new();
        for (place, server) in (0..).zip(servers) {
            let (word, bit) = server.watch();
            let marks = marks.entry(Arc::as_ptr(word)).or_insert_with(|| Marks {
                word: word.clone(),
                mask: 0,
                places: Box::new([NONE; 64]),
            });
            marks.mask |= 1 << bit;
            marks.places[usize::from(bit)] = place;
        }
        let marks: Vec<Marks> = marks.into_values().collect();
        for marks in &marks {
            marks.word.fetch_and(!marks.mask, Acquire);
        }
        let leaves = servers.len().next_power_of_two();
        let mut tree = Self {
            quotients: servers.iter().map(|server| quotient(server)).collect(),
            nodes: vec![NONE; 2 * leaves],
            marks,
            below_zero: 0,
        };
        let below_zero = tree.quotients.iter().filter(|quotient| quotient.load < 0);
        tree.below_zero = below_zero.count();
        for (leaf, place) in tree.nodes[leaves..].iter_mut().zip(0..) {
            *leaf = if (place as usize) < servers.len() {
                place
            } else {
                NONE
            };
        }
        for node in (1..leaves).rev() {
            tree.nodes[node] = tree.less_below(node);
        }
        tree
    }

    /// Updates the tree for the servers that have set their bits.
    fn follow(&mut self, servers: &[Arc<Server>], quotient: fn(&Server) -> Quotient) {
        for at in 0..self.marks.len() {
            let marks = &self.marks[at];
            let mask = marks.mask;
            if marks.word.load(Relaxed) & mask == 0 {
                continue;
            }
            // Clear the marks before the servers are read, so that a later change sets its mark
            // again.
            let mut changed = marks.word.fetch_and(!mask, Acquire) & mask;
            while changed != 0 {
                let place = self.marks[at].places[changed.trailing_zeros() as usize];
                changed &= changed - 1;
                self.set(place, quotient(&servers[place as usize]));
            }
        }
    }

    fn set(&mut self, place: u32, quotient: Quotient) {
        let old = &mut self.quotients[place as usize];
        if *old == quotient {
            return;
        }
        self.below_zero -= usize::from(old.load < 0);
        self.below_zero += usize::from(quotient.load < 0);
        *old = quotient;
        let mut node = (self.nodes.len() / 2 + place as usize) / 2;
        while node > 0 {
            let less = self.less_below(node);
            // If the winner of a node does not change, the nodes above it do not change.
            if self.nodes[node] == less && less != place {
                return;
            }
            self.nodes[node] = less;
            node /= 2;
        }
    }

    /// The smaller of the two nodes below a node; of equal nodes the left one, which is earlier in
    /// the list.
    fn less_below(&self, node: usize) -> u32 {
        let (left, right) = (self.nodes[2 * node], self.nodes[2 * node + 1]);
        let of = |place: u32| {
            let quotient = self.quotients.get(place as usize);
            quotient.copied().unwrap_or(Quotient::NEVER)
        };
        if of(right).is_less(of(left)) {
            right
        } else {
            left
        }
    }

    fn least(&self) -> Option<usize> {
        let place = self.nodes[1] as usize;
        let chosen = self.quotients.get(place)?;
        (chosen.weight != 0).then_some(place)
    }
}

#[cfg(test)]
mod tests {
    use core::net::{Ipv4Addr, SocketAddr};

    use super::*;
    use crate::random::SplitMix64;
    use crate::sched::{
        LeastConnections, NeverQueue, ShortestExpectedDelay, WeightedLeastConnections,
    };
    use crate::server::OpenConnection;
    use crate::{
        Forwarding, Instant, Pool, Preview, Protocol, Registry, ServerConfig, ServiceFlags,
    };

    fn addr(n: u32) -> SocketAddr {
        (Ipv4Addr::from_bits(0x0a00_0000 + n), 80).into()
    }

    fn request() -> Request {
        Request {
            client: addr(0),
            virt: addr(0),
            protocol: Protocol::TCP,
            flags: ServiceFlags::default(),
            now: Instant::ZERO,
        }
    }

    /// Adds, changes and removes connections and servers at random, and checks that each choice
    /// from the tree equals that of `all`, which compares all servers.
    fn chooses_as(name: &str, mut all: impl Scheduler, seed: u64) {
        let mut random = SplitMix64::new(seed);
        let mut below = move |bound: u32| {
            u32::try_from(random.draw_below(bound.into())).expect("the number fits")
        };
        let mut pool = Pool::new(
            Registry::new()
                .create(name)
                .expect("the scheduler is built in"),
        );
        let mut open: Vec<OpenConnection> = Vec::new();
        let mut next = 0;
        for _ in 0..20_000 {
            let servers = u32::try_from(pool.servers().len()).expect("the number fits");
            let any = below(servers.max(1)) as usize;
            match below(100) {
                _ if servers < 60 => {
                    next += 1;
                    let config = ServerConfig::new(
                        i32::try_from(below(4)).expect("the number fits"),
                        Forwarding::Nat,
                    );
                    pool.insert(addr(next), &config).expect("the server is new");
                }
                0 if servers < 300 => {
                    next += 1;
                    let config = ServerConfig::new(1, Forwarding::Nat);
                    pool.insert(addr(next), &config).expect("the server is new");
                }
                1 => {
                    let addr = pool.servers()[any].addr();
                    pool.remove(addr).expect("the server is in the pool");
                }
                2..6 => {
                    let server = &pool.servers()[any];
                    let config = ServerConfig {
                        weight: i32::try_from(below(5)).expect("the number fits") * 100,
                        upper: below(8),
                        ..server.config()
                    };
                    let addr = server.addr();
                    pool.edit(addr, &config).expect("the server is in the pool");
                }
                6..40 if !open.is_empty() => {
                    let at = below(u32::try_from(open.len()).expect("the number fits")) as usize;
                    drop(open.swap_remove(at));
                }
                // With seeds from 3 on, only a third of these changes makes a connection active.
                40..60 => pool.servers()[any].set_active(seed < 3 || below(3) == 0, 0),
                _ => {
                    let expected = all.pick(pool.servers(), &request());
                    let expected = expected.map(|place| pool.servers()[place].addr());
                    let chosen = pool.pick(&request()).cloned();
                    let chosen_addr = chosen.as_ref().map(|server| server.addr());
                    assert_eq!(chosen_addr, expected, "{name}, seed {seed}");
                    open.extend(chosen.map(|server| server.open()));
                }
            }
        }
    }

    #[test]
    fn least_loaded_tree_matches_linear_scan() {
        for seed in 1..4 {
            chooses_as("wlc", WeightedLeastConnections, seed);
            chooses_as("lc", LeastConnections, seed);
            chooses_as("sed", ShortestExpectedDelay, seed);
            chooses_as("nq", NeverQueue, seed);
        }
    }

    #[test]
    fn least_loaded_tree_preview_equals_next_pick() {
        let mut pool = Pool::new(
            Registry::new()
                .create("wlc")
                .expect("the scheduler is built in"),
        );
        for n in 0..100 {
            let config = ServerConfig::new(1, Forwarding::Nat);
            pool.insert(addr(n), &config).expect("the server is new");
        }
        let mut open = Vec::new();
        for _ in 0..250 {
            let Preview::Server(server) = pool.preview(&request()) else {
                panic!("the preview has no server");
            };
            let seen = server.addr();
            let chosen = pool.pick(&request()).expect("a server is usable");
            assert_eq!(chosen.addr(), seen);
            open.push(chosen.clone().open());
        }
    }

    #[test]
    fn wlc_without_fixed_server_list_keeps_no_state_between_picks() {
        let mut scheduler = Registry::new()
            .create("wlc")
            .expect("the scheduler is built in");
        let mut pool = Pool::new(
            Registry::new()
                .create("rr")
                .expect("the scheduler is built in"),
        );
        for n in 0..200 {
            let config = ServerConfig::new(1, Forwarding::Nat);
            pool.insert(addr(n), &config).expect("the server is new");
        }
        let all = pool.servers();
        assert_eq!(scheduler.pick(&all[..100], &request()), Some(0));
        let _one = all[100].open();
        assert_eq!(scheduler.pick(&all[100..], &request()), Some(1));
    }
}
