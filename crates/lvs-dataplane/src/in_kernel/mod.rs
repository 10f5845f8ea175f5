//! The path in the kernel: connections that the engine has published are forwarded by programs at the interfaces, out of the
//! connection table's own memory.
//!
//! ```text
//!           packet socket's filter ── known, published, fits ──▶ refused: tc ingress rewrites and redirects it
//!  frame ──▶ looks it up             └─ anything else ─────────▶ the engine, as without all this
//! ```
//!
//! The engine publishes what has lived for some packets (16 from the client) and cannot be changed by the next one. What is published
//! is in force in one *epoch*: any change (of the director, the host's tables, the settings) begins another one, so that the
//! next packet of each connection comes up, is decided on anew, and publishes it again. While a change is being made, there
//! is no epoch.
//!
//! Programs and layout are in `bpf/`; `make bpf` compiles them, and what it makes is built into the engine.

mod layout;
mod object;

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::io;
use std::num::NonZeroU32;
use std::ops::DerefMut;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lvs_core::api::InKernelInfo;
use lvs_core::memory::{Layout, Memory};
use lvs_core::{Control, Counts, Instant};

use self::layout::{
    COUNT_WORDS, HOP_WORDS, SERVICE_WORDS, SHARE_WORDS, TOLD_BYTES, conf, count, hop, share,
};
use crate::packet::wire::Mac;
use crate::sys::{
    self, Instruction, PerCpuArray, Program, ProgramKind, SharedArray, SharedSet, TcLink,
};

/// The programs, compiled.
const OBJECT: &[u8] = include_bytes!("../../bpf/fast.bpf.o");

/// Packets from the client after which a connection is published: shorter ones stay with the engine, and a flood publishes
/// nothing.
pub const RIPE: NonZeroU32 = NonZeroU32::new(16).unwrap();
/// How long a connection goes on without an engine.
const WITHOUT_ENGINE: Duration = Duration::from_secs(300);
/// How long a slot that was published is not used again: a program may be looking at it.
const QUARANTINE: Duration = Duration::from_millis(200);
/// Ways out at most.
const HOPS: u16 = 16_384;
/// Records of servers whose connections are published.
const SERVERS: u32 = 4_096;
/// Virtual services that programs know of, for when there is no engine.
const SERVICES: u32 = 1 << 16;
/// How long no way out is given another meaning after they have run out.
const HOPS_REST: Duration = Duration::from_millis(200);

/// Why there is no path in the kernel.
#[derive(Debug, thiserror::Error)]
pub enum InKernelError {
    /// The kernel does not permit it.
    #[error(
        "the path in the kernel is not permitted: it needs CAP_BPF and CAP_NET_ADMIN in the first user namespace, that is, \
         root outside of containers: {0}"
    )]
    Permission(#[source] io::Error),
    /// The kernel has not got what it needs.
    #[error(
        "cannot {step} for the path in the kernel (Linux 6.6 or newer has what it needs): {source}"
    )]
    Kernel {
        /// What was being done.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// Something else speaks against it.
    #[error("{0}")]
    Setting(&'static str),
    /// The programs that are built in cannot be read.
    #[error("the programs that are built in are damaged: `make bpf` makes them")]
    Object,
}

impl From<InKernelError> for InKernelInfo {
    fn from(error: InKernelError) -> Self {
        let remedy = match &error {
            InKernelError::Permission(_) => {
                "run the engine as root, or with CAP_BPF and CAP_NET_ADMIN (systemd: AmbientCapabilities=), outside of containers"
            }
            InKernelError::Kernel { .. } => {
                "Linux 6.6 or newer with CONFIG_BPF_SYSCALL and CONFIG_NET_XGRESS has what it needs"
            }
            InKernelError::Setting(_) => "leave that setting out, or --in-kernel auto",
            InKernelError::Object => "make bpf, and build the engine again",
        };
        Self {
            wanted: true,
            active: false,
            reason: error.to_string(),
            remedy: remedy.to_owned(),
        }
    }
}

fn step(step: &'static str) -> impl FnOnce(io::Error) -> InKernelError {
    move |source| match source.kind() {
        io::ErrorKind::PermissionDenied => InKernelError::Permission(source),
        _ => InKernelError::Kernel { step, source },
    }
}

/// A way out: the interface, its MTU towards there, and who sends to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WayOut {
    /// The interface.
    pub ifindex: u32,
    /// The longest packet.
    pub mtu: u32,
    /// The neighbour.
    pub to: Mac,
    /// The interface's own address.
    pub from: Mac,
}

/// What became of the frames that the programs have seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    /// Forwarded to servers.
    pub requests: u64,
    /// Forwarded to clients.
    pub replies: u64,
    /// Handed up: of no connection that the programs find.
    pub unknown: u64,
    /// Handed up: the connection is not published, or not since the last change.
    pub unpublished: u64,
    /// Handed up: it may change the connection, or does not fit its way.
    pub unfit: u64,
    /// Handed up: neither TCP nor UDP, or with options, fragments, tags.
    pub other: u64,
    /// Dropped while there was no engine: their senders repeat them.
    pub waiting: u64,
    /// Dropped for want of memory, or left to a program that was not run.
    pub lost: u64,
}

#[derive(Debug)]
struct Arrays {
    conf: Arc<SharedArray>,
    narrow: Arc<SharedArray>,
    narrow_tags: Arc<SharedArray>,
    wide: Arc<SharedArray>,
    wide_tags: Arc<SharedArray>,
    overflow: Arc<SharedArray>,
    hops: Arc<SharedArray>,
    servers: Arc<SharedArray>,
    counts: Arc<SharedArray>,
    shares: Arc<SharedArray>,
}

impl Arrays {
    fn new(layout: &Layout, processors: u32) -> Result<Self, InKernelError> {
        let array = |name, words, entries| {
            let array = SharedArray::new(name, words, entries);
            array.map(Arc::new).map_err(step("make memory"))
        };
        let narrow = Layout::WAYS * Layout::NARROW_WORDS;
        let wide = Layout::WAYS * Layout::WIDE_WORDS;
        Ok(Self {
            conf: array("lvs_conf", conf::WORDS, 1)?,
            narrow: array("lvs_narrow", narrow, layout.narrow_buckets)?,
            narrow_tags: array("lvs_narrow_tags", 1, layout.narrow_buckets)?,
            wide: array("lvs_wide", wide, layout.wide_buckets)?,
            wide_tags: array("lvs_wide_tags", 1, layout.wide_buckets)?,
            overflow: array("lvs_overflow", Layout::WIDE_WORDS, layout.overflow_slots)?,
            hops: array("lvs_hops", HOP_WORDS, HOPS.into())?,
            servers: array("lvs_servers", 1, SERVERS)?,
            counts: array("lvs_counts", COUNT_WORDS, SERVERS * processors)?,
            shares: array("lvs_shares", SHARE_WORDS, processors)?,
        })
    }

    /// Names and arrays.
    fn all(&self) -> [(&'static str, &SharedArray); 9] {
        [
            ("lvs_conf", &self.conf),
            ("lvs_narrow", &self.narrow),
            ("lvs_narrow_tags", &self.narrow_tags),
            ("lvs_wide", &self.wide),
            ("lvs_wide_tags", &self.wide_tags),
            ("lvs_hops", &self.hops),
            ("lvs_servers", &self.servers),
            ("lvs_counts", &self.counts),
            ("lvs_shares", &self.shares),
        ]
    }
}

/// Which connections are in force.
#[derive(Debug)]
struct Epochs {
    number: u16,
    /// Those who make changes.
    held: u32,
    /// All numbers are used up: whatever was published in one of them is to be withdrawn first.
    used_up: bool,
}

#[derive(Debug, Default)]
struct Hops {
    known: HashMap<WayOut, u16>,
    /// They have run out, and rest until then.
    rests_until: Instant,
}

/// The programs, and what they share with the engine.
pub struct InKernel {
    arrays: Arrays,
    filter: Program,
    ingress: Program,
    /// The kernel's number of it.
    ingress_id: u32,
    layout: Layout,
    epochs: Mutex<Epochs>,
    hops: Mutex<Hops>,
    /// What was counted for each record when that was last taken over.
    taken: Mutex<Vec<[u64; COUNT_WORDS]>>,
    /// Records beyond this have nothing counted.
    records: AtomicU32,
    /// Services that the programs know of.
    #[expect(dead_code, reason = "there as long as the programs are")]
    services: SharedSet<SERVICE_WORDS>,
    /// Why nothing is forwarded, and what to do about it.
    aside: Mutex<Option<(String, String)>>,
}

impl fmt::Debug for InKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InKernel")
            .field("epoch", &self.epoch())
            .field("shares", &self.shares())
            .finish_non_exhaustive()
    }
}

/// Adds each word to its sum.
fn add(sums: &mut [u64], words: &[AtomicU64]) {
    for (sum, word) in sums.iter_mut().zip(words) {
        *sum = sum.wrapping_add(word.load(Relaxed));
    }
}

/// The code for this machine: where the processor reads in order, nobody need tell it to.
fn in_order(mut code: Vec<Instruction>) -> Vec<Instruction> {
    // An atomic operation on 64 bits of the stack, whose frame is register 10; instead, a jump to what follows.
    const ATOMIC: u8 = 0xdb;
    const STACK: u8 = 10;
    const JUMP: u8 = 0x05;
    if cfg!(target_arch = "x86_64") {
        for instruction in &mut code {
            if instruction.code == ATOMIC && instruction.registers & 0xf == STACK {
                *instruction = Instruction {
                    code: JUMP,
                    registers: 0,
                    offset: 0,
                    immediate: 0,
                };
            }
        }
    }
    code
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl InKernel {
    /// Makes the maps and loads the programs for a connection table of this layout, of an engine whose clock says `now`.
    ///
    /// # Errors
    /// [`InKernelError`]; then nothing is left in the kernel.
    pub fn open(layout: Layout, now: Instant) -> Result<Self, InKernelError> {
        let this = Self::open_with(layout, |code| code)?;
        this.set_clock(now);
        Ok(this)
    }

    /// As [`open`](Self::open), for whoever tries the programs out: what time it is they are told by
    /// [`set_virtual_time`](Self::set_virtual_time).
    ///
    /// # Errors
    /// As [`open`](Self::open).
    #[cfg(any(test, feature = "testing"))]
    pub fn open_in_virtual_time(layout: Layout) -> Result<Self, InKernelError> {
        Self::open_with(layout, |mut code| {
            for instruction in &mut code {
                // call bpf_ktime_get_ns: r0 = 0 instead.
                if (instruction.code, instruction.immediate) == (0x85, 5) {
                    (instruction.code, instruction.immediate) = (0xb7, 0);
                }
            }
            code
        })
    }

    /// It is `now`.
    #[cfg(any(test, feature = "testing"))]
    pub fn set_virtual_time(&self, now: Instant) {
        self.set(conf::BASE, now.as_nanos().wrapping_neg());
        self.set(conf::ALIVE, u64::MAX);
    }

    fn open_with(
        layout: Layout,
        change: impl Fn(Vec<Instruction>) -> Vec<Instruction>,
    ) -> Result<Self, InKernelError> {
        let processors = processors();
        let arrays = Arrays::new(&layout, processors)?;
        let told = PerCpuArray::new("lvs_told", TOLD_BYTES, 1).map_err(step("make memory"))?;
        let services = SharedSet::new("lvs_services", SERVICES).map_err(step("make memory"))?;
        let number = |name: &str| {
            let all = arrays.all();
            let array = all.iter().find(|(known, _)| *known == name);
            match (array, name) {
                (Some((_, array)), _) => Some(array.number()),
                (None, "lvs_told") => Some(told.number()),
                (None, "lvs_services") => Some(services.number()),
                (None, _) => None,
            }
        };
        let load = |section, kind, name| {
            let code = object::code(OBJECT, section).and_then(|code| code.linked(number));
            let code = in_order(code.ok_or(InKernelError::Object)?);
            Program::load(kind, name, &change(code)).map_err(step("load a program"))
        };
        let filter = load("socket", ProgramKind::SocketFilter, "lvs_filter")?;
        let ingress = load("tc", ProgramKind::Ingress, "lvs_ingress")?;
        let ingress_id = ingress.id().map_err(step("ask for a program's number"))?;
        let this = Self {
            filter,
            ingress,
            ingress_id,
            layout,
            epochs: Mutex::new(Epochs {
                number: 1,
                held: 0,
                used_up: false,
            }),
            hops: Mutex::default(),
            taken: Mutex::new(vec![[0; COUNT_WORDS]; SERVERS as usize]),
            records: AtomicU32::new(0),
            services,
            aside: Mutex::default(),
            arrays,
        };
        let [k0, k1] = layout.keys;
        this.set(conf::KEYS, k0);
        this.set(conf::KEYS + 1, k1);
        this.set(conf::NARROW_BUCKETS, layout.narrow_buckets.into());
        this.set(conf::WIDE_BUCKETS, layout.wide_buckets.into());
        this.set(conf::SERVERS, SERVERS.into());
        this.set(conf::EPOCH, 1);
        Ok(this)
    }

    fn set(&self, word: usize, value: u64) {
        self.arrays.conf.words()[word].store(value, Release);
    }

    /// Memory for the connection table.
    ///
    /// # Errors
    /// None that is known.
    pub fn memory(&self) -> Result<Memory, InKernelError> {
        let arrays = [
            self.arrays.narrow.clone(),
            self.arrays.narrow_tags.clone(),
            self.arrays.wide.clone(),
            self.arrays.wide_tags.clone(),
            self.arrays.overflow.clone(),
        ];
        let memory = sys::shared_table(self.layout, arrays);
        let memory = memory.map_err(step("use the memory"))?;
        Ok(memory.quarantined(QUARANTINE))
    }

    /// The filter for the engine's packet sockets.
    pub(crate) const fn filter(&self) -> &Program {
        &self.filter
    }

    /// What forwards frames.
    pub const fn ingress(&self) -> &Program {
        &self.ingress
    }

    /// Puts the program at the ingress of an interface, whose packet socket has the filter.
    ///
    /// # Errors
    /// As [`Program::attach`].
    pub(crate) fn attach(&self, ifindex: u32) -> io::Result<TcLink> {
        self.ingress.attach(ifindex)
    }

    /// Frames with this mark are on their way back to the host.
    pub(crate) fn set_mark(&self, mark: u32) {
        self.set(conf::MARK, mark.into());
    }

    /// Deadlines are by a clock that says `now`.
    pub fn set_clock(&self, now: Instant) {
        self.set(conf::BASE, sys::monotonic().wrapping_sub(now.as_nanos()));
        self.is_alive(now);
    }

    /// Says that there is an engine.
    pub(crate) fn is_alive(&self, now: Instant) {
        let until = now + WITHOUT_ENGINE;
        self.set(conf::ALIVE, until.as_nanos());
    }

    // --- epochs -----------------------------------------------------------------------------------------------------

    /// The epoch that is in force; 0 for none. Whoever publishes asks before he looks at what he publishes by.
    #[inline]
    pub fn epoch(&self) -> u16 {
        u16::try_from(self.arrays.conf.words()[conf::EPOCH].load(Acquire)).unwrap_or(0)
    }

    fn begin(&self, epochs: &mut Epochs) {
        match epochs.number.checked_add(1) {
            Some(next) => epochs.number = next,
            None => epochs.used_up = true,
        }
        self.enforce(epochs);
    }

    fn enforce(&self, epochs: &Epochs) {
        let none = epochs.held > 0 || epochs.used_up;
        let number = if none { 0 } else { epochs.number };
        self.set(conf::EPOCH, number.into());
    }

    /// Something has changed: what was published before is not in force any more.
    pub fn changed(&self) {
        self.begin(&mut lock(&self.epochs));
    }

    /// Nothing is in force until what this gives is dropped.
    #[must_use]
    pub fn hold(self: &Arc<Self>) -> Held {
        let mut epochs = lock(&self.epochs);
        epochs.held += 1;
        self.enforce(&epochs);
        Held(self.clone())
    }

    /// Whether everything has to be withdrawn before another epoch can begin ([`renew`](Self::renew)).
    pub(crate) fn is_used_up(&self) -> bool {
        lock(&self.epochs).used_up
    }

    /// Everything is withdrawn: begins with the first epoch again.
    pub(crate) fn renew(&self) {
        let mut epochs = lock(&self.epochs);
        epochs.used_up = false;
        epochs.number = 1;
        self.enforce(&epochs);
    }

    // --- what connections need --------------------------------------------------------------------------------------

    /// The number of a way out; `None` if they have run out for now.
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
            // Those that nobody uses any more are among them; which ones is not known.
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
        let link = u64::from(way.ifindex) | u64::from(way.mtu) << 32;
        words[hop::LINK].store(link, Release);
        hops.known.insert(way, number);
        Some(number)
    }

    /// The way to a server, in this epoch; `false` if its number is too large.
    pub fn set_server(&self, record: u32, hop: u16, epoch: u16) -> bool {
        let Some(word) = self.arrays.servers.words().get(record as usize) else {
            return false;
        };
        self.records.fetch_max(record + 1, Relaxed);
        word.store(u64::from(hop) | u64::from(epoch) << 16, Release);
        true
    }

    // --- what was counted -------------------------------------------------------------------------------------------

    /// Counts what was forwarded since this was last asked, for the servers, their services and everything. The control half
    /// is asked for only when it is known what is to be counted: every processor of the machine has counters of its own.
    pub fn fold<C: DerefMut<Target = Control>>(&self, control: impl FnOnce() -> C) {
        let mut taken = lock(&self.taken);
        let records = self.records.load(Relaxed).min(SERVERS) as usize;
        let mut sums = vec![[0_u64; COUNT_WORDS]; records];
        let processors = self.arrays.counts.words();
        for words in processors.chunks_exact(SERVERS as usize * COUNT_WORDS) {
            for (sums, words) in sums.iter_mut().zip(words.chunks_exact(COUNT_WORDS)) {
                add(sums, words);
            }
        }
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

    /// What became of frames so far.
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
        }
    }

    // --- whether the programs are run -------------------------------------------------------------------------------------

    /// Whether a frame that was left to the program at an interface was not taken by it. Nothing is left to it any more.
    pub(crate) fn has_missed(&self) -> bool {
        self.arrays.conf.words()[conf::MISSED].load(Relaxed) != 0
    }

    /// Frames are left to the programs at the interfaces again.
    pub(crate) fn forgive(&self) {
        self.set(conf::MISSED, 0);
    }

    /// Nothing is forwarded for this reason, about which that can be done; or it is again.
    pub(crate) fn stands_aside(&self, why: Option<(String, String)>) {
        *lock(&self.aside) = why;
    }

    /// What is to be said of it.
    pub(crate) fn info(&self) -> InKernelInfo {
        let (reason, remedy) = lock(&self.aside).clone().unwrap_or_default();
        InKernelInfo {
            wanted: true,
            active: reason.is_empty(),
            reason,
            remedy,
        }
    }

    /// Whether the program is the first one at the ingress of an interface: others could keep frames from it.
    pub(crate) fn is_first_at(&self, ifindex: u32) -> bool {
        let first = self.ingress.is_first_at(self.ingress_id, ifindex);
        first.unwrap_or(false)
    }
}

/// As long as this is there, nothing that was published is in force.
#[derive(Debug)]
pub struct Held(Arc<InKernel>);

impl Drop for Held {
    fn drop(&mut self) {
        let mut epochs = lock(&self.0.epochs);
        epochs.held -= 1;
        self.0.begin(&mut epochs);
    }
}

/// Processors that this machine may have.
fn processors() -> u32 {
    let text = fs::read_to_string("/sys/devices/system/cpu/possible").unwrap_or_default();
    let last = text.trim().rsplit([',', '-']).next();
    last.and_then(|last| last.parse::<u32>().ok())
        .map_or(1024, |last| last + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where this is not permitted, there is nothing to see; root of the first user namespace has no excuse.
    fn open() -> Option<Arc<InKernel>> {
        match InKernel::open(Layout::new(1000, 7), Instant::ZERO) {
            Ok(in_kernel) => Some(Arc::new(in_kernel)),
            Err(error @ InKernelError::Permission(_)) => {
                assert!(!sys::is_root_of_all(), "{error}");
                eprintln!("not tested, needs BPF: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn what_was_published_before_a_change_is_not_in_force_after_it() {
        let Some(in_kernel) = open() else { return };
        let first = in_kernel.epoch();
        assert_ne!(first, 0);
        in_kernel.changed();
        let second = in_kernel.epoch();
        assert!(second != 0 && second != first);
        let (one, other) = (in_kernel.hold(), in_kernel.hold());
        assert_eq!(in_kernel.epoch(), 0);
        in_kernel.changed();
        drop(one);
        assert_eq!(in_kernel.epoch(), 0);
        drop(other);
        assert!(![0, first, second].contains(&in_kernel.epoch()));
    }

    #[test]
    fn no_epoch_comes_again_before_everything_is_withdrawn() {
        let Some(in_kernel) = open() else { return };
        for _ in 0..u16::MAX - 1 {
            in_kernel.changed();
        }
        assert!(in_kernel.epoch() == u16::MAX && !in_kernel.is_used_up());
        in_kernel.changed();
        assert!(in_kernel.epoch() == 0 && in_kernel.is_used_up());
        in_kernel.renew();
        assert!(in_kernel.epoch() == 1 && !in_kernel.is_used_up());
    }

    #[test]
    fn ways_out_that_run_out_rest_before_they_mean_something_else() {
        let Some(in_kernel) = open() else { return };
        let way = |n: u32| WayOut {
            ifindex: 1,
            mtu: n,
            to: Mac([2; 6]),
            from: Mac([4; 6]),
        };
        let now = Instant::ZERO;
        for n in 1..u32::from(HOPS) {
            let hop = in_kernel.hop(way(n), now).map(u32::from);
            assert_eq!(hop, Some(n));
        }
        assert_eq!(in_kernel.hop(way(7), now), Some(7));
        let epoch = in_kernel.epoch();
        assert_eq!(in_kernel.hop(way(1 << 20), now), None);
        assert_ne!(in_kernel.epoch(), epoch, "nobody uses them any more");
        assert_eq!(in_kernel.hop(way(7), now), None);
        assert_eq!(in_kernel.hop(way(7), now + HOPS_REST), Some(1));
    }

    #[test]
    fn the_object_has_both_programs_and_nonsense_has_none() {
        for section in ["socket", "tc"] {
            let code = object::code(OBJECT, section).expect("it is there");
            assert!(code.instructions.len() > 100 && !code.maps.is_empty());
        }
        assert!(object::code(OBJECT, "xdp").is_none());
        for cut in 0..OBJECT.len().min(4096) {
            let _ = object::code(&OBJECT[..cut], "tc");
        }
    }
}
