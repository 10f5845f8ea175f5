//! The kernel fast path: BPF programs at the interfaces forward packets of offloaded connections.
//! They use the memory of the connection table.
//!
//! ```text
//!           packet socket's filter ── offloaded connection ──▶ refused: tc ingress rewrites and redirects it
//!  frame ──▶ looks it up             └─ anything else ───────▶ accepted: the dataplane receives it
//! ```
//!
//! The dataplane offloads a connection after some packets (16 from the client), if the next packet
//! cannot change its state. An offload is valid in one *epoch*. Any change of the director, the
//! host's tables or the settings begins another epoch: the next packet of each connection reaches
//! the dataplane, which offloads the connection again. While a change is in progress, there is no
//! epoch.
//!
//! Each packet worker has a region of the table, and offloads and evicts its own connections. The
//! programs determine the worker from the client, as the workers do ([`Steering::of_client`]), and
//! search only its region.
//!
//! On the interfaces of `--xdp`, a third program forwards frames before the kernel allocates a
//! socket buffer. The programs above handle the frames that it cannot forward.
//!
//! The programs and their layout are in `bpf/`. `make bpf` compiles them into an object, which is
//! built into the dataplane.

mod arrays;
mod attach;
mod epochs;
mod error;
mod growing;
mod layout;
mod locals;
pub(crate) mod object;
mod open;
mod pins;
mod room;
mod services;
mod warm_restart;
mod xdp;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::fs::File;
use std::io;
use std::num::NonZeroU32;
use std::ops::DerefMut;
use std::sync::Mutex;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};
use std::time::Duration;

use lvs_core::api::FastPathInfo;
use lvs_core::memory::{Layout, Memory};
use lvs_core::stats::Counts;
use lvs_core::tunnel::Tunnel;
use lvs_core::{Control, Instant};

use self::arrays::Arrays;
pub use self::attach::Attached;
use self::epochs::Epochs;
pub use self::epochs::Held;
pub use self::error::FastPathError;
use self::error::step;
use self::layout::{
    COUNT_WORDS, HOP_WORDS, HOPS, RULE_WORDS, SERVERS, SHARE_WORDS, TUNNEL_WORDS, count, hop,
    share, tunnel,
};
pub(crate) use self::layout::{SERVICE_WORDS, conf, own};
use self::locals::Locals;
pub(crate) use self::locals::{LocalsAre, LocalsLeft};
use self::pins::Pins;
pub(crate) use self::room::Room;
pub(crate) use self::services::{HeldServices, service_key};
pub(crate) use self::xdp::AttachedXdp;
use self::xdp::Xdp;
use crate::netlink::Filters;
use crate::warm_restart::WITHOUT_DATAPLANE;
use lvs_packet::rewrite::tunnel::Template;
use lvs_packet::steer::Steering;
use lvs_packet::wire::Mac;
use lvs_sys::lock;
use lvs_sys::{Jump, PacketSocket, Program, ReferenceMap, SharedMap};

/// Default number of packets from the client after which a connection is offloaded. The dataplane
/// forwards shorter connections, so a flood of new connections offloads nothing.
pub const OFFLOAD_AFTER: NonZeroU32 = NonZeroU32::new(16).unwrap();
/// A dataplane that runs for this time has proved that the inherited state does not crash it.
const LONG_ENOUGH: Duration = Duration::from_secs(30);
/// Time before the slot of an offloaded connection is used again, because a BPF program may still
/// read it.
const QUARANTINE: Duration = Duration::from_millis(200);
/// Time during which no next hop is added after all numbers of next hops were used.
const HOPS_REST: Duration = Duration::from_millis(200);

/// A next hop: the interface, the MTU of the route, and the source and destination MAC addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WayOut {
    /// Index of the interface on which packets are sent.
    pub ifindex: u32,
    /// MTU of the route in bytes.
    pub mtu: u32,
    /// MAC address of the neighbour.
    pub to: Mac,
    /// MAC address of the interface.
    pub from: Mac,
}

/// Numbers of frames that the programs received, by fate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    /// Number of frames that were forwarded to servers, except by XDP.
    pub requests: u64,
    /// Number of frames that were forwarded to clients, except by XDP.
    pub replies: u64,
    /// Number of frames that were passed to userspace, because the programs found no connection.
    pub unknown: u64,
    /// Number of frames that were passed to userspace, because the connection is not offloaded, or
    /// was offloaded before the last change.
    pub unpublished: u64,
    /// Number of frames that were passed to userspace, because only the dataplane can forward the
    /// packet: it may change the connection or exceeds the MTU of its path, for example.
    pub unfit: u64,
    /// Number of frames that were passed to userspace, because they are neither TCP nor UDP, are
    /// fragments, are damaged or for other hosts, or have IP options, a VLAN tag or a TTL that
    /// expires.
    pub other: u64,
    /// Number of frames that were dropped while no dataplane ran; their senders repeat them.
    pub waiting: u64,
    /// Number of frames that were dropped for lack of memory, or because the ingress program did
    /// not run.
    pub lost: u64,
    /// Number of frames that XDP forwarded, in either direction, before the kernel allocated a
    /// socket buffer.
    pub xdp: u64,
}

#[derive(Debug, Default)]
struct Hops {
    known: HashMap<WayOut, u16>,
    /// Time until which no next hop is added, after all numbers were used.
    rests_until: Instant,
}

/// The BPF programs, and the maps that they share with the dataplane.
pub struct FastPath {
    arrays: Arrays,
    filter: Program,
    /// A short program that calls the filter, for kernels without tcx, and for sockets whose memory
    /// limit is too low for the filter.
    jump: Jump,
    ingress: Program,
    /// The kernel's number of the ingress program.
    ingress_id: u32,
    /// The program that decides about frames without a connection while no dataplane is running.
    #[cfg(test)]
    held: Program,
    /// The programs that the ingress program continues with by tail calls.
    _next: ReferenceMap,
    layout: Layout,
    /// Assigns connections to workers, each of which has a region of the table.
    steering: Steering,
    epochs: Mutex<Epochs>,
    hops: Mutex<Hops>,
    /// Locked while the next hop or tunnel path of a server is written.
    ways: Mutex<()>,
    /// The counters of each server record at the last [`fold`](Self::fold).
    taken: Mutex<Vec<[u64; COUNT_WORDS]>>,
    /// Counters exist only for server records below this number.
    records: AtomicU32,
    locals: Locals,
    /// The services for the programs while no dataplane is running.
    services: SharedMap<SERVICE_WORDS, 1>,
    known_services: Mutex<HashSet<[u64; SERVICE_WORDS]>>,
    known_rules: Mutex<Vec<[u64; RULE_WORDS]>>,
    /// The pins that keep the maps for a successor; `None` if the maps are not kept.
    pins: Option<Pins>,
    claim: Option<File>,
    /// Whether another dataplane created the maps.
    found: bool,
    /// When the fast path was opened, in nanoseconds of the machine's monotonic clock.
    opened: u64,
    /// During a take-over: connections that the predecessor has offloaded stay offloaded.
    taking_over: AtomicBool,
    /// Interfaces to which this dataplane has attached a program, except XDP programs.
    attached: Mutex<HashSet<u32>>,
    /// The filters that attach the program, if the kernel has no tcx.
    filters: Option<Mutex<Filters>>,
    /// The XDP program; `None` if it is not configured.
    xdp: Option<Xdp>,
    /// Why the kernel fast path is suspended, and the fix.
    aside: Mutex<Option<(String, String)>>,
}

impl Drop for FastPath {
    /// Removes the state at an orderly exit. State of a predecessor that was not taken over stays
    /// for another successor.
    fn drop(&mut self) {
        if self.taking_over.load(Relaxed) {
            self.arrays.conf.words()[conf::TRIES].fetch_sub(1, Relaxed);
        } else {
            self.leave_nothing();
        }
    }
}

impl fmt::Debug for FastPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FastPath")
            .field("epoch", &self.epoch())
            .field("shares", &self.shares())
            .finish_non_exhaustive()
    }
}

/// Adds each of `words` to the sum at the same index.
fn add(sums: &mut [u64], words: &[AtomicU64]) {
    for (sum, word) in sums.iter_mut().zip(words) {
        *sum = sum.wrapping_add(word.load(Relaxed));
    }
}

impl FastPath {
    fn set(&self, word: usize, value: u64) {
        self.arrays.conf.words()[word].store(value, Release);
    }

    /// Whether connections continue after the dataplane is killed.
    pub(crate) const fn outlives(&self) -> bool {
        self.pins.is_some()
    }

    /// The rule that assigns connections to workers. A successor uses its predecessor's, because
    /// the connections are in the regions of the predecessor's workers.
    pub(crate) const fn steering(&self) -> &Steering {
        &self.steering
    }

    /// Memory for the connection table of a worker.
    ///
    /// # Errors
    /// If no worker has this number, or a predecessor's array is too short.
    pub fn memory(&self, worker: usize) -> Result<Memory, FastPathError> {
        let arrays = [
            self.arrays.narrow.clone(),
            self.arrays.narrow_tags.clone(),
            self.arrays.wide.clone(),
            self.arrays.wide_tags.clone(),
            self.arrays.overflow.clone(),
        ];
        let workers = self.steering.workers();
        let memory = lvs_sys::shared_table(self.layout, arrays, worker, workers);
        let memory = memory.map_err(step("map the connection table"))?;
        Ok(memory.quarantined(QUARANTINE))
    }

    /// Attaches the filter to a packet socket, which then receives only the frames that the kernel
    /// fast path does not handle.
    ///
    /// # Errors
    /// The kernel refuses the filter (`SO_ATTACH_BPF`).
    pub(crate) fn filter(&self, socket: &PacketSocket) -> io::Result<()> {
        let filtered = match self.filters {
            // As the kernel would return if the filter is too large.
            Some(_) => Err(io::Error::from_raw_os_error(libc::ENOMEM)),
            None => socket.only_passed_by(&self.filter),
        };
        match filtered {
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => {
                socket.only_passed_by(self.jump.program())
            }
            filtered => filtered,
        }
    }

    /// The ingress program, which forwards frames that have a socket buffer.
    pub const fn ingress(&self) -> &Program {
        &self.ingress
    }

    /// Runs the program that decides about frames while no dataplane is running. Returns its
    /// decision and the frame.
    #[cfg(test)]
    fn held_alone(&self, frame: &[u8]) -> io::Result<(i32, Vec<u8>)> {
        // Through the loopback interface.
        self.held.test_run(1, frame, 0, false)
    }

    /// Sets the mark of frames that are reinjected into the host.
    pub(crate) fn set_mark(&self, mark: u32) {
        self.set(conf::MARK, mark.into());
    }

    /// Sets whether the programs examine the preferred slot of a connection first, for narrow and
    /// for wide slots ([`lvs_core::Shard::tries_homes`]).
    pub fn try_homes(&self, [narrow, wide]: [bool; 2]) {
        self.set(conf::HOMES, u64::from(narrow) | u64::from(wide) << 1);
    }

    /// Sets the clock of the connections' deadlines to `now`, and records that this dataplane is
    /// alive, so that a successor may take over if it is killed.
    pub fn set_clock(&self, now: Instant) {
        self.set(
            conf::BASE,
            lvs_sys::monotonic().wrapping_sub(now.as_nanos()),
        );
        self.is_alive(now);
    }

    /// Permits a successor to take over until [`WITHOUT_DATAPLANE`] after `now`. After
    /// [`LONG_ENOUGH`], also resets the number of successors that exited early.
    pub(crate) fn is_alive(&self, now: Instant) {
        let until = now + WITHOUT_DATAPLANE;
        self.set(conf::ALIVE, until.as_nanos());
        let lived = lvs_sys::monotonic().saturating_sub(self.opened);
        if Duration::from_nanos(lived) > LONG_ENOUGH {
            self.set(conf::TRIES, 0);
        }
    }

    // --- next hops and services of connections ---------------------------------------------------

    /// Returns the number of a next hop. Returns `None` if all numbers are used, and begins a new
    /// epoch, which frees them; new next hops get numbers 200 ms later.
    pub fn hop(&self, way: WayOut, now: Instant) -> Option<u16> {
        let mut hops = lock(&self.hops);
        if let Some(&hop) = hops.known.get(&way) {
            return Some(hop);
        }
        if now < hops.rests_until {
            return None;
        }
        let hop = u16::try_from(hops.known.len() + 1).ok();
        let Some(number) = hop.filter(|&hop| hop < HOPS) else {
            // It is unknown which numbers are unused: a new epoch frees all of them.
            self.changed();
            hops.known.clear();
            hops.rests_until = now + HOPS_REST;
            return None;
        };
        let word = |bytes: [u8; 8]| u64::from_ne_bytes(bytes);
        let (Mac([a, b, c, d, e, f]), Mac([g, h, i, j, k, l])) = (way.to, way.from);
        let at = usize::from(number) * HOP_WORDS;
        let words = &self.arrays.hops.words()[at..at + HOP_WORDS];
        words[hop::MACS].store(word([a, b, c, d, e, f, g, h]), Relaxed);
        words[hop::MACS + 1].store(word([i, j, k, l, 0, 0, 0, 0]), Relaxed);
        words[hop::XDP].store(u64::from(self.takes_frames(way.ifindex)), Relaxed);
        let link = u64::from(way.ifindex) | u64::from(way.mtu) << 32;
        words[hop::LINK].store(link, Release);
        hops.known.insert(way, number);
        Some(number)
    }

    /// Whether the table of next hops and tunnel paths has an entry for this server record.
    pub(crate) fn has_room_for(&self, record: u32) -> bool {
        self.arrays.servers.words().len() > record as usize
    }

    /// Sets the next hop of a server record. Returns false if the table has no entry for the
    /// record. A next hop of an earlier `epoch`, which a worker reports late, does not replace a
    /// newer one.
    pub fn set_server(&self, record: u32, hop: u16, epoch: u16) -> bool {
        let Some(word) = self.arrays.servers.words().get(record as usize) else {
            return false;
        };
        self.records.fetch_max(record + 1, Relaxed);
        let _one = lock(&self.ways);
        if epoch == self.epoch() {
            word.store(u64::from(hop) | u64::from(epoch) << 16, Release);
        }
        true
    }

    /// Sets the tunnel path of a server record. Returns false if the table has no entry for the
    /// record. A path of an earlier `epoch`, which a worker reports late, does not replace a newer
    /// one.
    pub fn set_tunnel(&self, record: u32, hop: u16, epoch: u16, outer: &Template) -> bool {
        let at = record as usize * TUNNEL_WORDS;
        let Some(words) = self.arrays.tunnels.words().get(at..at + TUNNEL_WORDS) else {
            return false;
        };
        self.records.fetch_max(record + 1, Relaxed);
        let mut shape = outer.bytes().len() as u64;
        for (bit, set) in [
            (tunnel::V6, outer.is_v6()),
            (tunnel::GRE, matches!(outer.tunnel(), Tunnel::Gre { .. })),
            (tunnel::GUE, matches!(outer.tunnel(), Tunnel::Gue { .. })),
            (tunnel::DF, outer.keeps_df()),
        ] {
            shape |= if set { bit } else { 0 };
        }
        let mut new = [0; 1 + tunnel::OUTER_WORDS];
        new[0] = shape;
        for (word, bytes) in new[1..].iter_mut().zip(outer.bytes().chunks(8)) {
            let mut eight = [0; 8];
            eight[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(eight);
        }
        let _one = lock(&self.ways);
        if epoch != self.epoch() {
            return true;
        }
        let (way, rest) = (&words[tunnel::WAY], &words[tunnel::SHAPE..]);
        let mut version = way.load(Relaxed) >> 32;
        if rest
            .iter()
            .zip(new)
            .any(|(word, new)| word.load(Relaxed) != new)
        {
            // A program that is reading the entry detects the change by the new version, and does
            // not use the entry.
            version = version.wrapping_add(1) & 0xffff_ffff;
            way.store(version << 32, Relaxed);
            fence(Release);
            for (word, new) in rest.iter().zip(new) {
                word.store(new, Relaxed);
            }
        }
        let word = u64::from(hop) | u64::from(epoch) << 16 | version << 32;
        way.store(word, Release);
        true
    }

    // --- counters --------------------------------------------------------------------------------

    /// Adds the packets that the kernel fast path forwarded since the last call to the counters of
    /// servers, services and the director. The control half is locked only after the counters of
    /// all processors are summed.
    pub fn fold<C: DerefMut<Target = Control>>(&self, control: impl FnOnce() -> C) {
        let mut taken = lock(&self.taken);
        let records = self.records.load(Relaxed).min(SERVERS) as usize;
        let mut sums = vec![[0_u64; COUNT_WORDS]; records];
        self.sum(&mut sums);
        let differ = |(_, (sums, taken)): &(u32, (&[u64; 4], &mut [u64; 4]))| sums != taken;
        let mut new = (0..)
            .zip(sums.iter().zip(taken.iter_mut()))
            .filter(differ)
            .peekable();
        if new.peek().is_none() {
            return;
        }
        let mut control = control();
        for (record, (sums, taken)) in new {
            let since = |n: usize| sums[n].wrapping_sub(taken[n]);
            let counts = Counts {
                conns: 0,
                in_packets: since(count::IN_PACKETS),
                in_bytes: since(count::IN_BYTES),
                out_packets: since(count::OUT_PACKETS),
                out_bytes: since(count::OUT_BYTES),
            };
            control.count_forwarded(record, &counts);
            *taken = *sums;
        }
    }

    /// Adds the counters of all processors to `sums`, for as many server records as `sums` has
    /// items.
    fn sum(&self, sums: &mut [[u64; COUNT_WORDS]]) {
        let processors = self.arrays.counts.words();
        for words in processors.chunks_exact(SERVERS as usize * COUNT_WORDS) {
            for (sums, words) in sums.iter_mut().zip(words.chunks_exact(COUNT_WORDS)) {
                add(sums, words);
            }
        }
    }

    /// The numbers of frames by fate since the maps were created, perhaps by a predecessor.
    pub fn shares(&self) -> Shares {
        let mut sums = [0_u64; SHARE_WORDS];
        for words in self.arrays.shares.words().chunks_exact(SHARE_WORDS) {
            add(&mut sums, words);
        }
        Shares {
            requests: sums[share::REQUESTS],
            replies: sums[share::REPLIES],
            unknown: sums[share::UNKNOWN],
            unpublished: sums[share::UNPUBLISHED],
            unfit: sums[share::UNFIT],
            other: sums[share::OTHER],
            waiting: sums[share::WAITING],
            lost: sums[share::LOST],
            xdp: sums[share::XDP],
        }
    }

    // --- whether the programs are run ------------------------------------------------------------

    /// Whether the ingress program did not run for a frame that the filter had refused, or received
    /// it changed. From then on, the filter refuses no frame.
    pub(crate) fn has_missed(&self) -> bool {
        self.arrays.conf.words()[conf::MISSED].load(Relaxed) != 0
    }

    /// Resets [`has_missed`](Self::has_missed).
    pub(crate) fn forgive(&self) {
        self.set(conf::MISSED, 0);
    }

    /// Sets why the kernel fast path is suspended, and the fix; `None` after it was resumed.
    pub(crate) fn stands_aside(&self, why: Option<(String, String)>) {
        *lock(&self.aside) = why;
    }

    /// The state of the kernel fast path, for the control socket.
    pub(crate) fn info(&self) -> FastPathInfo {
        let (reason, fix) = lock(&self.aside).clone().unwrap_or_default();
        FastPathInfo {
            wanted: true,
            active: reason.is_empty(),
            attached_by: self.attached_by().to_owned(),
            reason,
            fix,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::sync::Arc;

    use super::open::OBJECT;
    use super::*;

    /// Opens the fast path for a test. If the kernel does not permit BPF, ends the test as not run.
    /// Root of the initial user namespace has the permission: for root, the test fails instead.
    pub(super) fn open() -> Arc<FastPath> {
        open_for(1)
    }

    /// As [`open`], with a connection table for each of `workers`.
    pub(super) fn open_for(workers: usize) -> Arc<FastPath> {
        let workers = NonZeroUsize::new(workers).expect("at least one worker exists");
        let steering = Steering::new(workers, 7, false);
        match FastPath::open_with_regions(Layout::new(1000, 7), &steering) {
            Ok(fast_path) => Arc::new(fast_path),
            Err(error @ FastPathError::Permission(_)) => {
                assert!(!lvs_sys::is_root_of_all(), "{error}");
                lvs_sys::testing::not_run(&format!("needs BPF: {error}"))
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn fast_path_next_hops_are_reused_after_exhaustion_and_a_pause() {
        let fast_path = open();
        let way = |n: u32| WayOut {
            ifindex: 1,
            mtu: n,
            to: Mac([2; 6]),
            from: Mac([4; 6]),
        };
        let now = Instant::ZERO;
        for n in 1..u32::from(HOPS) {
            let hop = fast_path.hop(way(n), now).map(u32::from);
            assert_eq!(hop, Some(n));
        }
        assert_eq!(fast_path.hop(way(7), now), Some(7));
        let epoch = fast_path.epoch();
        assert_eq!(fast_path.hop(way(1 << 20), now), None);
        assert_ne!(
            fast_path.epoch(),
            epoch,
            "connections still use the removed next hops"
        );
        assert_eq!(fast_path.hop(way(7), now), None);
        assert_eq!(fast_path.hop(way(7), now + HOPS_REST), Some(1));
    }

    #[test]
    fn bpf_object_contains_programs_and_truncated_object_causes_no_panic() {
        for section in ["socket", "tc", "xdp"] {
            let code = object::code(OBJECT, section).expect("the object has this section");
            assert!(code.instructions.len() > 100 && !code.maps.is_empty());
        }
        assert!(object::code(OBJECT, "maps").is_none());
        for cut in 0..OBJECT.len().min(4096) {
            let _ = object::code(&OBJECT[..cut], "tc");
        }
    }
}
