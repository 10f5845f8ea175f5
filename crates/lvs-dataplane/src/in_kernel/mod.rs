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
mod pins;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::ops::DerefMut;
use std::path::PathBuf;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lvs_core::api::InKernelInfo;
use lvs_core::memory::{Layout, Memory};
use lvs_core::{Control, Counts, Instant, ServiceKey};
use tracing::{debug, info, warn};

use self::layout::{
    ABOUT_WORDS, COUNT_WORDS, HOP_WORDS, KEPT_WORDS, SERVICE_WORDS, SHARE_WORDS, TOLD_BYTES, conf,
    count, hop, share,
};
use self::pins::Pins;
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
/// How long a program may still work on a frame after what it went by is not in force any more.
const SETTLED: Duration = Duration::from_millis(2);
/// 64-bit words for services and settings: twice 4 MiB.
const SAVED_WORDS: u32 = 1 + (1 << 20);
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

/// Where a server's counters are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub(crate) service: ServiceKey,
    pub(crate) server: SocketAddr,
    pub(crate) record: u32,
}

/// Where maps come from.
#[derive(Clone, Copy, Debug)]
enum Maps<'a> {
    /// They are made, and go with the engine.
    New,
    /// They are made, and stay for a successor if it is killed.
    Pinned(&'a Pins),
    /// Another engine has left them.
    Found(&'a Pins),
}

/// A program at an interface; it goes with this value, not with the process.
#[derive(Debug)]
pub struct Attached {
    kernel: Arc<InKernel>,
    ifindex: u32,
    _link: TcLink,
}

impl Drop for Attached {
    fn drop(&mut self) {
        lock(&self.kernel.attached).remove(&self.ifindex);
        if let Some(pins) = &self.kernel.pins {
            let _ = fs::remove_file(pins.link(self.ifindex));
        }
    }
}

#[derive(Debug)]
struct Arrays {
    about: Arc<SharedArray>,
    kept: Arc<SharedArray>,
    saved: Arc<SharedArray>,
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
    fn new(layout: &Layout, processors: u32, maps: Maps<'_>) -> Result<Self, InKernelError> {
        let array = |name: &'static str, words: usize, entries: u32| {
            let array = match maps {
                Maps::New | Maps::Pinned(_) => SharedArray::new(name, words, entries),
                Maps::Found(pins) => {
                    SharedArray::pinned(&pins.path(name), words * entries.max(1) as usize)
                }
            };
            array.map(Arc::new).map_err(step("make memory"))
        };
        let narrow = Layout::WAYS * Layout::NARROW_WORDS;
        let wide = Layout::WAYS * Layout::WIDE_WORDS;
        Ok(Self {
            about: array("lvs_about", ABOUT_WORDS + Layout::HEADER_WORDS, 1)?,
            kept: array("lvs_kept", KEPT_WORDS, SERVERS)?,
            saved: array("lvs_saved", 1, SAVED_WORDS)?,
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
    fn all(&self) -> [(&'static str, &SharedArray); 13] {
        [
            ("lvs_about", &self.about),
            ("lvs_kept", &self.kept),
            ("lvs_saved", &self.saved),
            ("lvs_overflow", &self.overflow),
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
    services: SharedSet<SERVICE_WORDS>,
    known_services: Mutex<HashSet<[u64; SERVICE_WORDS]>>,
    /// Where the maps are kept for a successor.
    pins: Option<Pins>,
    /// Keeps other engines from them.
    claim: Option<File>,
    /// Another engine has left them.
    found: bool,
    /// What it has published is still in force, whatever this one finds out meanwhile.
    taking_over: AtomicBool,
    /// Interfaces whose ingress has the program.
    attached: Mutex<HashSet<u32>>,
    /// Why nothing is forwarded, and what to do about it.
    aside: Mutex<Option<(String, String)>>,
}

impl Drop for InKernel {
    /// An orderly end. What was found and not taken over is another one's to find.
    fn drop(&mut self) {
        if !self.taking_over.load(Relaxed) {
            self.leave_nothing();
        }
    }
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

/// A service, as programs look for it.
fn service_key(protocol: u8, at: SocketAddr) -> [u64; SERVICE_WORDS] {
    let mut bytes = [0; 16];
    let six = match at.ip() {
        IpAddr::V4(addr) => {
            bytes[..4].copy_from_slice(&addr.octets());
            0
        }
        IpAddr::V6(addr) => {
            bytes = addr.octets();
            1
        }
    };
    let half = |at: usize| {
        let mut half = [0; 8];
        half.copy_from_slice(&bytes[at..at + 8]);
        u64::from_ne_bytes(half)
    };
    let port = u64::from(at.port().to_be());
    [
        half(0),
        half(8),
        port | u64::from(protocol) << 16 | six << 24,
    ]
}

/// What another engine has left, if this one can go on with it: the layout of its connection table. Else why not.
fn found(pins: &Pins, layout: &Layout) -> Result<Layout, String> {
    let words = |name: &str, words: usize| {
        let array = SharedArray::pinned(&pins.path(name), words);
        let array = array.map_err(|error| format!("{name}: {error}"))?;
        let words = array.words().iter().map(|word| word.load(Relaxed));
        Ok::<Vec<u64>, String>(words.collect())
    };
    let about = words("lvs_about", ABOUT_WORDS + Layout::HEADER_WORDS)?;
    let (about, description) = about.split_at(ABOUT_WORDS);
    if about != pins::about(processors()) {
        return Err("it was another version, or the machine has other processors".to_owned());
    }
    let description = description.try_into().map_err(|_| "a map is too short")?;
    let left = Layout::from_words(&description).map_err(|error| error.to_string())?;
    let keys = left.keys;
    if left != (Layout { keys, ..*layout }) {
        return Err("it had another --max-connections".to_owned());
    }
    let conf = words("lvs_conf", conf::WORDS)?;
    if sys::monotonic().wrapping_sub(conf[conf::BASE]) > conf[conf::ALIVE] {
        let seconds = WITHOUT_ENGINE.as_secs();
        return Err(format!("it was killed more than {seconds} s ago"));
    }
    Ok(left)
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
        let this = Self::open_with(layout, Maps::New, |code| code)?;
        this.set_clock(now);
        Ok(this)
    }

    /// As [`open`](Self::open), with what another engine has left in this network namespace, if one was killed and this one
    /// can go on with it; and leaves as much itself, should it be killed.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(crate) fn open_or_find(layout: Layout) -> Result<Self, InKernelError> {
        let pins = match Pins::here() {
            Ok(pins) => pins,
            Err(error) => {
                info!("connections do not outlive this engine: no BPF file system: {error}");
                return Self::open(layout, Instant::ZERO);
            }
        };
        let claim = match pins.claim() {
            Ok(claim) => claim,
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                return Err(InKernelError::Setting(
                    "another engine of this network namespace forwards in the kernel",
                ));
            }
            Err(error) => {
                warn!("connections do not outlive this engine: {error}");
                return Self::open(layout, Instant::ZERO);
            }
        };
        if pins.are_there() {
            let found = found(&pins, &layout).and_then(|layout| {
                let opened = Self::open_with(layout, Maps::Found(&pins), |code| code);
                opened.map_err(|error| error.to_string())
            });
            match found {
                Ok(mut this) => {
                    this.claim = Some(claim);
                    return Ok(this);
                }
                Err(why) => {
                    warn!("connections of the engine before this one have ended: {why}");
                    pins.empty();
                }
            }
        }
        let opened = Self::open_with(layout, Maps::Pinned(&pins), |code| code);
        let mut this = opened.inspect_err(|_| {
            pins.remove();
        })?;
        this.claim = Some(claim);
        this.set_clock(Instant::ZERO);
        Ok(this)
    }

    /// Takes away what an engine that was killed has left in this network namespace; gives how much there was.
    ///
    /// # Errors
    /// If there is no BPF file system.
    pub fn clean_up() -> io::Result<usize> {
        let pins = Pins::here()?;
        if !pins.are_there() {
            return Ok(0);
        }
        let _claim = pins.claim()?;
        Ok(pins.remove())
    }

    /// As [`open`](Self::open), for whoever tries the programs out: what time it is they are told by
    /// [`set_virtual_time`](Self::set_virtual_time).
    ///
    /// # Errors
    /// As [`open`](Self::open).
    #[cfg(any(test, feature = "testing"))]
    pub fn open_in_virtual_time(layout: Layout) -> Result<Self, InKernelError> {
        Self::open_with(layout, Maps::New, |mut code| {
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
        maps: Maps<'_>,
        change: impl Fn(Vec<Instruction>) -> Vec<Instruction>,
    ) -> Result<Self, InKernelError> {
        let processors = processors();
        let arrays = Arrays::new(&layout, processors, maps)?;
        let (told, services) = match maps {
            // What is left of the other one's programs goes on with its own, until they are replaced.
            Maps::Found(pins) => (
                PerCpuArray::pinned(&pins.path("lvs_told")),
                SharedSet::pinned(&pins.path("lvs_services")),
            ),
            Maps::New | Maps::Pinned(_) => (
                PerCpuArray::new("lvs_told", TOLD_BYTES, 1),
                SharedSet::new("lvs_services", SERVICES),
            ),
        };
        let told = told.map_err(step("make memory"))?;
        let services = services.map_err(step("make memory"))?;
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
        let pins = match maps {
            Maps::New => None,
            Maps::Pinned(pins) | Maps::Found(pins) => Some(pins),
        };
        if let Maps::Pinned(pins) = maps {
            let pin = |name: &str, done: io::Result<()>| {
                done.map_err(|error| InKernelError::Kernel {
                    step: "pin a map",
                    source: io::Error::other(format!("{name}: {error}")),
                })
            };
            for (name, array) in arrays.all() {
                pin(name, array.pin(&pins.path(name)))?;
            }
            pin("lvs_told", told.pin(&pins.path("lvs_told")))?;
            pin("lvs_services", services.pin(&pins.path("lvs_services")))?;
        }
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
            known_services: Mutex::default(),
            pins: pins.cloned(),
            claim: None,
            found: matches!(maps, Maps::Found(_)),
            taking_over: AtomicBool::new(matches!(maps, Maps::Found(_))),
            attached: Mutex::default(),
            aside: Mutex::default(),
            arrays,
        };
        this.set(conf::MISSED, 0);
        if this.found {
            // The host is not to see what this engine has taken already.
            this.set(conf::TAKING_OVER, 1);
            let conf = this.arrays.conf.words();
            let number = conf[conf::NUMBER].load(Relaxed);
            lock(&this.epochs).number = u16::try_from(number).unwrap_or(u16::MAX).max(1);
            return Ok(this);
        }
        let about = this.arrays.about.words();
        let words = pins::about(processors).into_iter().chain(layout.to_words());
        for (word, value) in about.iter().zip(words) {
            word.store(value, Relaxed);
        }
        let [k0, k1] = layout.keys;
        this.set(conf::KEYS, k0);
        this.set(conf::KEYS + 1, k1);
        this.set(conf::NARROW_BUCKETS, layout.narrow_buckets.into());
        this.set(conf::WIDE_BUCKETS, layout.wide_buckets.into());
        this.set(conf::SERVERS, SERVERS.into());
        this.set(conf::NUMBER, 1);
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
    pub(crate) fn attach(self: &Arc<Self>, ifindex: u32) -> io::Result<Attached> {
        let link = match &self.pins {
            Some(pins) => self.attach_pinned(ifindex, pins)?,
            None => self.ingress.attach(ifindex)?,
        };
        lock(&self.attached).insert(ifindex);
        Ok(Attached {
            kernel: self.clone(),
            ifindex,
            _link: link,
        })
    }

    /// In the place of the program of an engine that was killed, or anew.
    fn attach_pinned(&self, ifindex: u32, pins: &Pins) -> io::Result<TcLink> {
        let path: PathBuf = pins.link(ifindex);
        if let Ok(link) = TcLink::pinned(&path) {
            match link.update(&self.ingress) {
                Ok(()) => return Ok(link),
                // Of an interface that is gone; another one has its number now.
                Err(_) => fs::remove_file(&path)?,
            }
        }
        let link = self.ingress.attach(ifindex)?;
        if let Err(error) = link.pin(&path) {
            warn!(
                "connections do not outlive this engine: {}: {error}",
                path.display()
            );
        }
        Ok(link)
    }

    // --- another engine before this one, and after it ---------------------------------------------------------------------

    /// Another engine has left its connections.
    pub(crate) const fn is_successor(&self) -> bool {
        self.found
    }

    /// How far the clock by which deadlines are is ahead of one that says `now`.
    pub(crate) fn clock_ahead(&self, now: Instant) -> Duration {
        let base = self.arrays.conf.words()[conf::BASE].load(Relaxed);
        let then = sys::monotonic().wrapping_sub(base);
        Duration::from_nanos(then.saturating_sub(now.as_nanos()))
    }

    /// What programs still do for frames that came before nothing was in force any more.
    pub(crate) fn settle(&self) {
        std::thread::sleep(SETTLED);
    }

    /// Everything is taken over, and the host kept from it: takes programs away from interfaces that are not used any more.
    pub(crate) fn has_taken_over(&self) {
        self.set(conf::TAKING_OVER, 0);
        self.taking_over.store(false, Relaxed);
        let attached = lock(&self.attached);
        if let Some(pins) = &self.pins {
            for ifindex in pins.links() {
                if !attached.contains(&ifindex) {
                    let _ = fs::remove_file(pins.link(ifindex));
                }
            }
        }
    }

    /// Counts for the servers of this engine what was counted for those of the one before it.
    pub(crate) fn take_counts(&self, control: &mut Control, records: &[Record]) {
        let mut taken = lock(&self.taken);
        let mut sums = vec![[0_u64; COUNT_WORDS]; SERVERS as usize];
        self.sum(&mut sums);
        for Record {
            service,
            server,
            record,
        } in records
        {
            let (Some(sums), Some(kept)) = (sums.get(*record as usize), self.kept(*record)) else {
                continue;
            };
            let servers = control
                .service(service)
                .map_or(&[][..], |service| service.servers());
            let found = servers.iter().find(|known| known.addr() == *server);
            let Some(found) = found.and_then(|server| u32::try_from(server.id().index()).ok())
            else {
                continue;
            };
            let all = |n: usize| {
                let since = sums[n].wrapping_sub(kept[5 + n].load(Relaxed));
                kept[1 + n].load(Relaxed).wrapping_add(since)
            };
            let counts = Counts {
                conns: kept[0].load(Relaxed),
                in_packets: all(count::IN_PACKETS),
                in_bytes: all(count::IN_BYTES),
                out_packets: all(count::OUT_PACKETS),
                out_bytes: all(count::OUT_BYTES),
            };
            control.count_forwarded(found, &counts);
        }
        *taken = sums;
    }

    fn kept(&self, record: u32) -> Option<&[AtomicU64]> {
        let at = record as usize * KEPT_WORDS;
        self.arrays.kept.words().get(at..at + KEPT_WORDS)
    }

    /// Keeps counters for a successor.
    pub(crate) fn keep_counts<C: DerefMut<Target = Control>>(&self, control: impl FnOnce() -> C) {
        let taken = lock(&self.taken);
        let control = control();
        for (_, server) in control.endpoints() {
            let record = u32::try_from(server.id().index()).unwrap_or(u32::MAX);
            let (Some(words), Some(taken)) = (self.kept(record), taken.get(record as usize)) else {
                continue;
            };
            let live = control.server_stats(server.id()).unwrap_or_default().live;
            let mut all = [0; KEPT_WORDS];
            all[0] = live.conns;
            all[1 + count::IN_PACKETS] = live.in_packets;
            all[1 + count::IN_BYTES] = live.in_bytes;
            all[1 + count::OUT_PACKETS] = live.out_packets;
            all[1 + count::OUT_BYTES] = live.out_bytes;
            all[5..].copy_from_slice(taken);
            for (word, value) in words.iter().zip(all) {
                word.store(value, Relaxed);
            }
        }
    }

    /// Keeps a text for a successor; `false` if it is too long.
    pub(crate) fn save(&self, text: &[u8]) -> bool {
        let words = self.arrays.saved.words();
        let (first, halves) = (words[0].load(Relaxed), &words[1..]);
        let half = halves.len() / 2;
        // Whoever is killed meanwhile leaves the other half.
        let place = 1 - (first >> 63 & 1) as usize;
        if text.len() > half * 8 {
            words[0].store(0, Release);
            return false;
        }
        for (word, bytes) in halves[place * half..].iter().zip(text.chunks(8)) {
            let mut value = [0; 8];
            value[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(value), Relaxed);
        }
        words[0].store(text.len() as u64 | (place as u64) << 63, Release);
        true
    }

    /// The text that was kept.
    pub(crate) fn saved(&self) -> Option<Vec<u8>> {
        let words = self.arrays.saved.words();
        let (first, halves) = (words[0].load(Acquire), &words[1..]);
        let half = halves.len() / 2;
        let len = usize::try_from(first & !(1 << 63)).ok()?;
        if len == 0 || len > half * 8 {
            return None;
        }
        let from = (first >> 63) as usize * half;
        let words = halves[from..from + len.div_ceil(8)].iter();
        let mut text: Vec<u8> = words
            .flat_map(|word| word.load(Relaxed).to_le_bytes())
            .collect();
        text.truncate(len);
        Some(text)
    }

    /// Tells the programs which services there are: protocol, address and port (0 for all).
    pub(crate) fn set_services(&self, services: impl Iterator<Item = (u8, SocketAddr)>) {
        let services: HashSet<_> = services
            .map(|(protocol, at)| service_key(protocol, at))
            .collect();
        let mut known = lock(&self.known_services);
        for gone in known.difference(&services) {
            let _ = self.services.remove(gone);
        }
        for new in services.difference(&known) {
            if let Err(error) = self.services.insert(new) {
                debug!("lvs_services: {error}");
            }
        }
        *known = services;
    }

    /// The engine ends in an orderly way, and leaves nothing.
    pub(crate) fn leave_nothing(&self) {
        if let Some(pins) = &self.pins {
            pins.remove();
        }
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
        if epochs.held == 0 && self.taking_over.load(Relaxed) {
            return;
        }
        let none = epochs.held > 0 || epochs.used_up;
        let number = if none { 0 } else { epochs.number };
        self.set(conf::NUMBER, epochs.number.into());
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

    /// Adds up what each processor has counted for the first records.
    fn sum(&self, sums: &mut [[u64; COUNT_WORDS]]) {
        let processors = self.arrays.counts.words();
        for words in processors.chunks_exact(SERVERS as usize * COUNT_WORDS) {
            for (sums, words) in sums.iter_mut().zip(words.chunks_exact(COUNT_WORDS)) {
                add(sums, words);
            }
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
