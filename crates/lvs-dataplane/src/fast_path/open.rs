//! Opens the kernel fast path: creates the maps or takes them over from a predecessor, and loads
//! the programs.

use std::fs;
use std::io;
use std::num::NonZeroUsize;
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};

use lvs_core::Instant;
use lvs_core::api::WORKERS_MAX;
use lvs_core::memory::Layout;
use tracing::{info, warn};

use super::arrays::Arrays;
use super::epochs::Epochs;
use super::error::{FastPathError, step};
use super::layout::{
    ABOUT_WORDS, COUNT_WORDS, HOST_WORDS, SERVERS, SERVICE_WORDS, TOLD_BYTES, conf, next,
};
use super::locals::Locals;
use super::pins::{self, Maps, Pins};
use super::room::Room;
use super::xdp::{Xdp, XdpMemory};
use super::{FastPath, attach, object};
use crate::warm_restart::{INCOMPLETE, WITHOUT_DATAPLANE};
use lvs_packet::steer::{Keys, Steering};
use lvs_sys::lock;
use lvs_sys::{
    self, Instruction, Jump, PerCpuArray, Program, ProgramKind, ReferenceMap, Referents, SharedMap,
};

/// The compiled programs.
pub(super) const OBJECT: &[u8] = include_bytes!("../../bpf/fast.bpf.o");
/// Maximum number of services in the map that the programs use while no dataplane is running.
const SERVICES: u32 = 1 << 17;
/// Maximum number of consecutive successors that exit early. Their crashes may be due to the
/// inherited state, so the next dataplane does not use it.
const TRIES_MOST: u64 = 5;

impl FastPath {
    /// Creates the maps and loads the programs for a connection table of this layout. `now` is the
    /// present time of the dataplane's clock.
    ///
    /// # Errors
    /// [`FastPathError`]; then no new maps or programs are left in the kernel.
    pub fn open(layout: Layout, now: Instant) -> Result<Self, FastPathError> {
        let one = Steering::default();
        let this = Self::open_with(layout, &one, Maps::New, false, |code| code)?;
        this.set_clock(now);
        Ok(this)
    }

    /// Opens the maps of a killed predecessor in this network namespace, if this dataplane can
    /// continue with them; otherwise creates maps, with a table of this layout for each worker of
    /// `steering`. The maps stay for a successor if they can be pinned. `xdp`: interfaces can have
    /// the XDP program. `room` limits the memory of new maps.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(crate) fn open_or_find(
        layout: Layout,
        steering: &Steering,
        xdp: bool,
        room: Room,
    ) -> Result<Self, FastPathError> {
        try_atomics()?;
        let filters = attach::filters().map_err(step("attach a filter (clsact)"))?;
        let by_filters = filters.is_some();
        let bytes = layout.bytes().saturating_mul(steering.workers().get());
        let alone = |why| {
            // Filters stay when the dataplane is killed, and no successor would find them.
            if by_filters {
                return Err(FastPathError::NoPins(why));
            }
            room.takes(bytes)?;
            let this = Self::open_with(layout, steering, Maps::New, xdp, |code| code)?;
            this.set_clock(Instant::ZERO);
            Ok(this)
        };
        let pins = match Pins::here() {
            Ok(pins) => pins,
            Err(error) => {
                info!(
                    "a warm restart is not possible (no BPF file system: {error}): if this dataplane is killed, its connections end"
                );
                return alone(error);
            }
        };
        let claim = match pins.claim() {
            Ok(claim) => claim,
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                return Err(FastPathError::Setting {
                    why: pins::ANOTHER,
                    fix: "stop one of them",
                });
            }
            Err(error) => {
                warn!(
                    "a warm restart is not possible ({error}): if this dataplane is killed, its connections end"
                );
                return alone(error);
            }
        };
        pins.sweep();
        if pins.are_there() {
            let opened = found(&pins, &layout, steering).and_then(|(left, divided)| {
                Self::open_with(left, &divided, Maps::Found(&pins), xdp, |code| code)
                    .map_err(|error| error.to_string())
            });
            match opened {
                Ok(mut this) => {
                    this.claim = Some(claim);
                    this.filters = filters;
                    return Ok(this);
                }
                Err(why) => {
                    warn!("connections of the previous dataplane have ended: {why}");
                    pins.empty();
                }
            }
        }
        if let Err(error) = attach::sweep_all() {
            warn!("cannot remove the tc filters that other dataplanes have left: {error}");
        }
        room.takes(bytes)?;
        let opened = Self::open_with(layout, steering, Maps::Pinned(&pins), xdp, |code| code);
        let mut this = opened.inspect_err(|_| {
            pins.remove();
        })?;
        this.claim = Some(claim);
        this.filters = filters;
        this.set_clock(Instant::ZERO);
        Ok(this)
    }

    /// Removes the filters and pins of a killed dataplane in this network namespace. Returns the
    /// number of removed filters and pins.
    ///
    /// # Errors
    /// A running dataplane uses the pins, another user owns their directory or may write to it, the
    /// network namespace cannot be determined, or the filters cannot be listed or removed.
    pub fn clean_up() -> io::Result<usize> {
        let pins = Pins::if_mounted()?;
        if !pins.are_there() {
            return attach::sweep_all();
        }
        let _claim = pins.claim()?;
        Ok(attach::sweep_all()? + pins.remove())
    }

    /// As [`open`](Self::open), for tests: [`set_virtual_time`](Self::set_virtual_time) sets the
    /// clock of the programs.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    #[cfg(any(test, feature = "testing"))]
    pub fn open_in_virtual_time(layout: Layout) -> Result<Self, FastPathError> {
        Self::open_with_regions(layout, &Steering::default())
    }

    /// As [`open_in_virtual_time`](Self::open_in_virtual_time), for the workers of `steering`.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    #[cfg(any(test, feature = "testing"))]
    pub fn open_with_regions(layout: Layout, steering: &Steering) -> Result<Self, FastPathError> {
        Self::open_with(layout, steering, Maps::New, true, |mut code| {
            for instruction in &mut code {
                // Replace calls of bpf_ktime_get_coarse_ns by `r0 = 0`.
                if (instruction.code, instruction.immediate) == (0x85, 160) {
                    (instruction.code, instruction.immediate) = (0xb7, 0);
                }
            }
            code
        })
    }

    /// Resets the fast path for another director, which is faster than opening it again.
    ///
    /// # Panics
    /// If a table still uses its memory.
    #[cfg(any(test, feature = "testing"))]
    pub fn forget(&mut self) {
        let done = self.arrays.zero();
        done.expect("the previous director was dropped");
        self.hops = Mutex::default();
        self.locals.forget();
        lock(&self.taken).fill([0; COUNT_WORDS]);
        self.records = AtomicU32::new(0);
        self.epochs = Mutex::new(Epochs::new(self.steering.workers()));
        self.write_conf(processors());
    }

    /// Sets the clock of the programs to `now`.
    #[cfg(any(test, feature = "testing"))]
    pub fn set_virtual_time(&self, now: Instant) {
        self.set(conf::BASE, now.as_nanos().wrapping_neg());
        self.set(conf::ALIVE, u64::MAX);
    }

    fn open_with(
        layout: Layout,
        steering: &Steering,
        maps: Maps<'_>,
        xdp: bool,
        change: impl Fn(Vec<Instruction>) -> Vec<Instruction>,
    ) -> Result<Self, FastPathError> {
        let processors = processors();
        let all = AllMaps::open(&layout, steering.workers(), processors, maps, xdp)?;
        let programs = Programs::load(&all, change)?;
        if let Maps::Pinned(pins) = maps {
            all.pin(pins)?;
        }
        let this = Self::of(layout, steering, maps, all, programs)?;
        this.write_conf(processors);
        Ok(this)
    }

    fn of(
        layout: Layout,
        steering: &Steering,
        maps: Maps<'_>,
        all: AllMaps,
        programs: Programs,
    ) -> Result<Self, FastPathError> {
        let Programs {
            filter,
            ingress,
            #[cfg(test)]
            held,
            early,
        } = programs;
        let jump = Jump::to(&filter).map_err(step("load a program"))?;
        let ingress_id = ingress
            .id()
            .map_err(step("query the number of a program"))?;
        let (pins, found) = match maps {
            Maps::New => (None, false),
            Maps::Pinned(pins) => (Some(pins), false),
            Maps::Found(pins) => (Some(pins), true),
        };
        Ok(Self {
            filter,
            jump,
            ingress,
            ingress_id,
            #[cfg(test)]
            held,
            _next: all.next,
            layout,
            steering: steering.clone(),
            epochs: Mutex::new(Epochs::new(steering.workers())),
            hops: Mutex::default(),
            ways: Mutex::default(),
            taken: Mutex::new(vec![[0; COUNT_WORDS]; SERVERS as usize]),
            records: AtomicU32::new(0),
            locals: all.locals,
            services: all.services,
            known_services: Mutex::default(),
            known_rules: Mutex::default(),
            pins: pins.cloned(),
            claim: None,
            found,
            opened: lvs_sys::monotonic(),
            taking_over: AtomicBool::new(found),
            attached: Mutex::default(),
            filters: None,
            aside: Mutex::default(),
            xdp: early
                .zip(all.scratch)
                .map(|(program, memory)| Xdp::new(program, memory)),
            arrays: all.arrays,
        })
    }

    /// Writes the settings for the programs. A successor keeps the settings of its predecessor, and
    /// counts itself.
    fn write_conf(&self, processors: u32) {
        self.set(conf::MISSED, 0);
        if self.found {
            // The host must not receive packets that this dataplane has received already.
            self.set(conf::TAKING_OVER, 1);
            let conf = self.arrays.conf.words();
            conf[conf::TRIES].fetch_add(1, Relaxed);
            let number = conf[conf::NUMBER].load(Relaxed);
            lock(&self.epochs).number = u16::try_from(number).unwrap_or(u16::MAX).max(1);
            return;
        }
        let layout = &self.layout;
        let division = division_to_words(&self.steering);
        let about = self.arrays.about.words();
        let words = pins::about(processors).into_iter();
        let words = words.chain(layout.to_words()).chain(division);
        for (word, value) in about.iter().zip(words) {
            word.store(value, Relaxed);
        }
        let [k0, k1] = layout.keys;
        self.set(conf::KEYS, k0);
        self.set(conf::KEYS + 1, k1);
        self.set(conf::NARROW_BUCKETS, layout.narrow_buckets.into());
        self.set(conf::WIDE_BUCKETS, layout.wide_buckets.into());
        self.set(conf::SERVERS, SERVERS.into());
        self.set(conf::NUMBER, 1);
        self.set(conf::EPOCH, 1);
        for (n, word) in division.into_iter().enumerate() {
            self.set(conf::WORKERS + n, word);
        }
        self.try_homes([true; 2]);
    }
}

struct AllMaps {
    arrays: Arrays,
    told: PerCpuArray,
    services: SharedMap<SERVICE_WORDS, 1>,
    next: ReferenceMap,
    locals: Locals,
    scratch: Option<XdpMemory>,
}

impl AllMaps {
    /// Creates the maps, or opens the maps of a predecessor.
    fn open(
        layout: &Layout,
        workers: NonZeroUsize,
        processors: u32,
        maps: Maps<'_>,
        xdp: bool,
    ) -> Result<Self, FastPathError> {
        let arrays = Arrays::new(layout, workers, processors, maps)?;
        let (told, services, next) = match maps {
            // The predecessor's programs use these maps until this dataplane replaces the programs.
            Maps::Found(pins) => (
                PerCpuArray::pinned(&pins.path("lvs_told")),
                SharedMap::pinned(&pins.path("lvs_services")),
                ReferenceMap::pinned(&pins.path("lvs_next"), Referents::Programs),
            ),
            Maps::New | Maps::Pinned(_) => (
                PerCpuArray::new("lvs_told", TOLD_BYTES),
                SharedMap::new("lvs_services", SERVICES),
                ReferenceMap::new("lvs_next", Referents::Programs, next::PROGRAMS),
            ),
        };
        let locals = Locals::new(layout, workers, maps).map_err(step("allocate memory"))?;
        let scratch = xdp.then(Xdp::memory);
        Ok(Self {
            arrays,
            locals,
            told: told.map_err(step("allocate memory"))?,
            services: services.map_err(step("allocate memory"))?,
            next: next.map_err(step("allocate memory"))?,
            scratch: scratch.transpose().map_err(step("allocate memory"))?,
        })
    }

    fn number(&self, name: &str) -> Option<i32> {
        if let Some((_, array)) = self.arrays.all().find(|(known, _)| *known == name) {
            return Some(array.number());
        }
        match name {
            "lvs_told" => Some(self.told.number()),
            "lvs_services" => Some(self.services.number()),
            "lvs_locals" => Some(self.locals.number()),
            "lvs_next" => Some(self.next.number()),
            name => self.scratch.as_ref()?.number(name),
        }
    }

    fn pin(&self, pins: &Pins) -> Result<(), FastPathError> {
        let pin = |name: &str, done: io::Result<()>| {
            done.map_err(|error| FastPathError::Kernel {
                step: "pin a map",
                source: io::Error::other(format!("{name}: {error}")),
            })
        };
        for (name, array) in self.arrays.all() {
            pin(name, array.pin(&pins.path(name)))?;
        }
        pin("lvs_told", self.told.pin(&pins.path("lvs_told")))?;
        pin(
            "lvs_services",
            self.services.pin(&pins.path("lvs_services")),
        )?;
        pin("lvs_locals", self.locals.pin(pins))?;
        pin("lvs_next", self.next.pin(&pins.path("lvs_next")))
    }
}

struct Programs {
    filter: Program,
    ingress: Program,
    #[cfg(test)]
    held: Program,
    early: Option<Program>,
}

impl Programs {
    /// Loads the programs, with references to `maps` and to each other.
    fn load(
        maps: &AllMaps,
        change: impl Fn(Vec<Instruction>) -> Vec<Instruction>,
    ) -> Result<Self, FastPathError> {
        let load = |section, kind, name| {
            let code = object::code(OBJECT, section)
                .and_then(|code| code.linked(|name: &str| maps.number(name)));
            let code = in_order(code.ok_or(FastPathError::Object)?);
            Program::load(kind, name, &change(code)).map_err(step("load a program"))
        };
        let filter = load("socket", ProgramKind::SocketFilter, "lvs_filter")?;
        let ingress = load("tc", ProgramKind::Ingress, "lvs_ingress")?;
        let alone = load("alone", ProgramKind::Ingress, "lvs_alone")?;
        let held = load("held", ProgramKind::Ingress, "lvs_held")?;
        for (number, program) in [
            (next::ALONE, &alone),
            (next::INGRESS, &ingress),
            (next::HELD, &held),
        ] {
            let put = maps.next.put_program(number, program);
            put.map_err(step("set the programs for tail calls"))?;
        }
        let early = maps.scratch.is_some();
        let early = early.then(|| load("xdp", ProgramKind::Xdp, "lvs_xdp"));
        Ok(Self {
            filter,
            ingress,
            #[cfg(test)]
            held,
            early: early.transpose()?,
        })
    }
}

/// Checks that the kernel's BPF has atomic operations that return a result (Linux 5.12).
fn try_atomics() -> Result<(), FastPathError> {
    let op = |code, registers, offset, immediate| Instruction {
        code,
        registers,
        offset,
        immediate,
    };
    let code = [
        op(0x7a, 0x0a, -8, 0),    // stack = 0
        op(0xb7, 0x00, 0, 0),     // r0 = 0
        op(0xdb, 0x0a, -8, 0x01), // stack += r0, and r0 = what was there
        op(0x95, 0x00, 0, 0),     // return r0
    ];
    match Program::load(ProgramKind::SocketFilter, "lvs_atomics", &code) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Err(FastPathError::Permission(error))
        }
        Err(error) => Err(FastPathError::Old(error)),
    }
}

/// Returns the code for this machine: without memory barriers if the processor keeps loads and
/// stores in order.
fn in_order(mut code: Vec<Instruction>) -> Vec<Instruction> {
    // A barrier is an atomic operation on the 64 bits of the stack below register 10. A jump to the
    // next instruction replaces it.
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

/// Converts the division of connections among workers to words of `lvs_conf` and `lvs_about`.
fn division_to_words(steering: &Steering) -> [u64; conf::DIVISION_WORDS] {
    let keys = steering.keys();
    let ([a, b, c, d], [e, f, g]) = (keys.words, keys.factors);
    let both = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    [
        steering.workers().get() as u64,
        steering.by_address().into(),
        both(a, b),
        both(c, d),
        both(keys.seed, e),
        both(f, g),
    ]
}

/// Reverts [`division_to_words`]; `None` if the number of workers is invalid.
fn division_of_words(words: [u64; conf::DIVISION_WORDS]) -> Option<Steering> {
    let [workers, by_address, steer @ ..] = words;
    let workers = usize::try_from(workers).ok().and_then(NonZeroUsize::new)?;
    let half = |word: u64| u32::try_from(word & 0xffff_ffff).unwrap_or(0);
    let [[a, b], [c, d], [seed, e], [f, g]] = steer.map(|word| [half(word), half(word >> 32)]);
    let keys = Keys {
        words: [a, b, c, d],
        seed,
        factors: [e, f, g],
    };
    let fits = workers.get() <= WORKERS_MAX;
    fits.then(|| Steering::with_keys(workers, keys, by_address != 0))
}

/// Checks that a dataplane with this layout and division can use the tables of a predecessor
/// (`left`, `divided`). Otherwise returns the reason.
fn fits(
    (layout, steering): (&Layout, &Steering),
    (left, divided): (&Layout, &Steering),
) -> Result<(), &'static str> {
    let alone = steering.workers() == NonZeroUsize::MIN;
    if divided.workers() != steering.workers()
        || !(alone || divided.by_address() == steering.by_address())
    {
        return Err(
            "the previous dataplane had another number of workers (--workers), or differed in the use of the FTP helper (--helper ftp)",
        );
    }
    let like = Layout {
        keys: left.keys,
        wide_buckets: left.wide_buckets,
        ..*layout
    };
    if *left != like {
        return Err("the previous dataplane had another --max-connections");
    }
    if left.wide_buckets != layout.wide_buckets {
        info!(
            "the new value of --max-ipv6 takes effect when this dataplane is stopped and started again"
        );
    }
    Ok(())
}

/// Returns the layout and division of a predecessor's connection tables, or the reason why this
/// dataplane cannot use them.
fn found(pins: &Pins, layout: &Layout, steering: &Steering) -> Result<(Layout, Steering), String> {
    let words = |name: &str, words: usize| {
        let words = pins.words(name, words);
        words.map_err(|error| format!("{name}: {error}"))
    };
    let about = words("lvs_about", ABOUT_WORDS)?;
    let (about, description) = about.split_at(HOST_WORDS);
    let own = pins::about(processors());
    if about[..pins::COOKIE] == own[..pins::COOKIE] && about[pins::COOKIE] != own[pins::COOKIE] {
        return Err(
            "the previous dataplane belonged to a removed network namespace with the same number as this one"
                .to_owned(),
        );
    }
    if about != own {
        return Err(
            "the version of the previous dataplane stored its state in another format, or the number of processors has changed"
                .to_owned(),
        );
    }
    let (description, division) = description.split_at(Layout::HEADER_WORDS);
    let description = description
        .try_into()
        .map_err(|_| "a BPF map is too short")?;
    let left = Layout::from_words(&description).map_err(|error| error.to_string())?;
    let division = division.try_into().map_err(|_| "a BPF map is too short")?;
    let divided = division_of_words(division).ok_or("the description of the maps is damaged")?;
    fits((layout, steering), (&left, &divided))?;
    // Without the services, the dataplane would reset all connections one by one.
    if pins
        .saved()
        .map_err(|error| format!("lvs_saved: {error}"))?
        .is_none()
    {
        return Err(INCOMPLETE.to_owned());
    }
    let conf = words("lvs_conf", conf::WORDS)?;
    if conf[conf::TRIES] >= TRIES_MOST {
        return Err(format!(
            "{TRIES_MOST} dataplanes exited soon after they had taken over the state"
        ));
    }
    if pins::is_over(&conf) {
        let seconds = WITHOUT_DATAPLANE.as_secs();
        return Err(format!(
            "the previous dataplane was killed more than {seconds} s ago"
        ));
    }
    Ok((left, divided))
}

/// Returns the number of processors that this machine can have, including processors that are
/// offline; 1,024 if the kernel does not report it.
fn processors() -> u32 {
    let text = fs::read_to_string("/sys/devices/system/cpu/possible").unwrap_or_default();
    let last = text.trim().rsplit([',', '-']).next();
    last.and_then(|last| last.parse::<u32>().ok())
        .map_or(1024, |last| last + 1)
}

#[cfg(test)]
mod tests {
    use super::super::tests::open;
    use super::*;

    #[test]
    fn pinned_maps_are_found_only_if_complete_and_of_equal_settings_and_namespace() {
        // Without permission for BPF, the test ends.
        // Ends the test as not run without BPF.
        let _ = open();
        let directory = format!("/sys/fs/bpf/lvs-test-{}", std::process::id());
        let pins = Pins::at(directory.into()).expect("the directory can be created");
        let layout = Layout::new(1000, 7);
        let workers = NonZeroUsize::MIN.saturating_add(1);
        let steering = Steering::new(workers, 7, false);
        let first = FastPath::open_with(layout, &steering, Maps::Pinned(&pins), false, |code| code);
        let first = first.expect("the kernel permits the first fast path");
        first.set_clock(Instant::ZERO);
        // A successor has different secret keys.
        let other = Steering::new(workers, 8, false);
        let found_by = |layout: Layout, steering: &Steering| found(&pins, &layout, steering);
        assert_eq!(found_by(layout, &other), Err(INCOMPLETE.to_owned()));
        // The second text does not fit into the first map.
        for len in [100, 20 << 20, 7] {
            let text = vec![b'x'; len];
            first.save(&text).expect("memory is available");
            let left = (layout, steering.clone());
            assert_eq!(found_by(layout, &other), Ok(left), "{len}");
            assert_eq!(pins.saved().expect("the state was saved"), Some(text));
            assert_eq!(first.saved().map(|text| text.len()), Some(len));
        }
        for other in [
            Steering::new(NonZeroUsize::MIN, 7, false),
            Steering::new(workers, 7, true),
        ] {
            let why = found_by(layout, &other)
                .expect_err("a state with another division among workers was accepted");
            assert!(why.contains("number of workers"), "{other:?}: {why}");
        }
        let why = found_by(Layout::new(2000, 7), &steering)
            .expect_err("a state with another size of the table was accepted");
        assert!(why.contains("--max-connections"), "{why}");
        let names = fs::read_dir(pins.path(""))
            .expect("the directory of pins is readable")
            .count();
        let cookie = &first.arrays.about.words()[pins::COOKIE];
        cookie.fetch_add(1, Relaxed);
        let gone =
            found_by(layout, &steering).expect_err("the state of another namespace was accepted");
        assert!(gone.contains("removed network namespace"), "{gone}");
        cookie.fetch_sub(1, Relaxed);
        let second = FastPath::open_with(layout, &steering, Maps::Found(&pins), false, |code| code);
        let second = second.expect("the kernel permits the second fast path");
        assert_eq!(second.saved().map(|text| text.len()), Some(7));
        // The next successor finds an array that a successor has enlarged.
        second
            .save(&vec![b'y'; 50 << 20])
            .expect("memory is available");
        assert_eq!(
            pins.saved()
                .expect("the state was saved")
                .map(|text| text.len()),
            Some(50 << 20)
        );
        assert_eq!(
            fs::read_dir(pins.path(""))
                .expect("the directory of pins is readable")
                .count(),
            names
        );
        drop(second);
        drop(first);
        assert!(!pins.are_there());
    }
}
