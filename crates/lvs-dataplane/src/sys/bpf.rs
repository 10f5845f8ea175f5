//! BPF by its system call: maps that this process maps as well, programs, and where they are
//! attached and pinned.
//!
//! A loader crate would do the same calls; what it brings beside them (relocation against the
//! kernel's types, maps described in BTF) is of no use here, because the programs read packets and
//! our own maps only.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::iter;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use lvs_core::memory::{Layout, Memory, Region};

use crate::attached::{self, Place, call, descriptor};

/// `bpf_insn` of `linux/bpf.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Instruction {
    /// What is done.
    pub code: u8,
    /// Destination in the lower half, source in the upper one.
    pub registers: u8,
    /// Of a jump or of memory.
    pub offset: i16,
    /// A number.
    pub immediate: i32,
}

/// What `BPF_MAP_CREATE` reads, as far as it is used (the first fields of `bpf_attr`).
#[repr(C)]
struct CreateMap {
    kind: u32,
    key: u32,
    value: u32,
    entries: u32,
    flags: u32,
    inner: u32,
    node: u32,
    name: [u8; 16],
    ifindex: u32,
    types: u32,
    key_type: u32,
    value_type: u32,
}

/// What `BPF_PROG_LOAD` reads, as far as it is used.
#[derive(Clone, Copy)]
#[repr(C)]
struct LoadProgram {
    kind: u32,
    length: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    ifindex: u32,
    attach_type: u32,
    types: u32,
    function_size: u32,
    functions: u64,
    function_count: u32,
    rest: [u32; 5],
}

/// What `BPF_LINK_CREATE` reads, as far as it is used; behind it are zeros, as many as tcx wants to
/// see.
#[repr(C)]
struct CreateLink {
    program: u32,
    ifindex: u32,
    attach_type: u32,
    flags: u32,
    rest: [u64; 6],
}

/// What `BPF_OBJ_PIN` and `BPF_OBJ_GET` read.
#[repr(C)]
struct Object {
    path: u64,
    fd: u32,
    flags: u32,
}

/// What `BPF_PROG_TEST_RUN` reads and writes.
#[repr(C)]
struct TestRun {
    program: u32,
    result: u32,
    size_in: u32,
    size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    context_size_in: u32,
    context_size_out: u32,
    context_in: u64,
    context_out: u64,
    flags: u32,
    cpu: u32,
    batch: u32,
    unused: u32,
}

/// What `BPF_MAP_UPDATE_ELEM` and `BPF_MAP_DELETE_ELEM` read.
#[repr(C)]
struct Element {
    map: u32,
    unused: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// What `BPF_BTF_LOAD` reads.
#[repr(C)]
struct LoadTypes {
    description: u64,
    log: u64,
    length: u32,
    log_size: u32,
    log_level: u32,
    unused: u32,
}

/// What `BPF_LINK_UPDATE` reads.
#[repr(C)]
struct UpdateLink {
    link: u32,
    program: u32,
    flags: u32,
    before: u32,
}

const BPF_MAP_CREATE: libc::c_long = 0;
const BPF_MAP_LOOKUP_ELEM: libc::c_long = 1;
const BPF_MAP_UPDATE_ELEM: libc::c_long = 2;
const BPF_MAP_DELETE_ELEM: libc::c_long = 3;
const BPF_MAP_GET_NEXT_KEY: libc::c_long = 4;
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_OBJ_PIN: libc::c_long = 6;
const BPF_OBJ_GET: libc::c_long = 7;
const BPF_PROG_TEST_RUN: libc::c_long = 10;
const BPF_BTF_LOAD: libc::c_long = 18;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_LINK_UPDATE: libc::c_long = 29;
const BPF_MAP_TYPE_HASH: u32 = 1;
const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_MAP_TYPE_PROG_ARRAY: u32 = 3;
const BPF_MAP_TYPE_PERCPU_ARRAY: u32 = 6;
const BPF_MAP_TYPE_ARRAY_OF_MAPS: u32 = 12;
/// Memory as it is needed.
const BPF_F_NO_PREALLOC: u32 = 1;
const BPF_F_MMAPABLE: u32 = 1 << 10;
const BPF_PROG_TYPE_SOCKET_FILTER: u32 = 1;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
const BPF_PROG_TYPE_XDP: u32 = 6;
/// `BPF_XDP` of `enum bpf_attach_type`.
const BPF_XDP: u32 = 37;
/// By the driver itself, not behind it.
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;
const BPF_F_BEFORE: u32 = 1 << 3;
/// In the flags of a trial: the frame comes with a sum over all of it, as some cards make it, and
/// the kernel looks whether that still holds afterwards (Linux 6.16).
const BPF_F_TEST_SKB_CHECKSUM_COMPLETE: u32 = 1 << 2;
/// Bytes of what the verifier may say.
const LOG: usize = 1 << 20;
/// How often a program is loaded that signals interrupt.
const ATTEMPTS: usize = 5;

/// Where a program goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramKind {
    /// Before a socket.
    SocketFilter,
    /// At the ingress of an interface (tcx, or a filter of `tc`).
    Ingress,
    /// At its egress.
    Egress,
    /// In its driver, before there is a socket buffer.
    Xdp,
}

impl ProgramKind {
    /// `enum bpf_attach_type`.
    const fn place(self) -> u32 {
        match self {
            Self::SocketFilter => 0,
            Self::Ingress => Place::Ingress.number(),
            Self::Egress => Place::Egress.number(),
            Self::Xdp => BPF_XDP,
        }
    }
}

/// A program in the kernel. It lives as long as this value and what it is attached to.
#[derive(Debug)]
pub struct Program {
    fd: OwnedFd,
    kind: ProgramKind,
}

/// A program at an interface. Unless it is pinned, it goes with this value, with the interface, or
/// with the process.
#[derive(Debug)]
pub struct ProgramLink {
    fd: OwnedFd,
}

impl Program {
    /// Has the kernel check and take a program. `name`: what tools show, at most 15 letters, digits
    /// and `_`.
    ///
    /// # Errors
    /// `PermissionDenied` without `CAP_BPF` and `CAP_NET_ADMIN` in the first user namespace; what
    /// the verifier has against it, with the end of its log; `Unsupported` or `InvalidInput`
    /// from kernels that lack something.
    pub fn load(kind: ProgramKind, name: &str, instructions: &[Instruction]) -> io::Result<Self> {
        Self::load_typed(kind, name, instructions, None)
    }

    /// As [`load`](Self::load), with what its types are called, if the kernel takes that.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_typed(
        kind: ProgramKind,
        name: &str,
        instructions: &[Instruction],
        types: Option<&Types>,
    ) -> io::Result<Self> {
        // From the first instruction on, it is this function.
        let function = types.and_then(|types| Some((number(&types.fd), types.program(name)?)));
        let functions = [0, function.map_or(0, |(_, id)| id)];
        let license = c"Dual MIT/GPL";
        let mut request = LoadProgram {
            kind: match kind {
                ProgramKind::SocketFilter => BPF_PROG_TYPE_SOCKET_FILTER,
                ProgramKind::Ingress | ProgramKind::Egress => BPF_PROG_TYPE_SCHED_CLS,
                ProgramKind::Xdp => BPF_PROG_TYPE_XDP,
            },
            length: u32::try_from(instructions.len()).unwrap_or(u32::MAX),
            instructions: instructions.as_ptr().expose_provenance() as u64,
            license: license.as_ptr().expose_provenance() as u64,
            log_level: 0,
            log_size: 0,
            log: 0,
            kernel_version: 0,
            flags: 0,
            name: short_name(name),
            ifindex: 0,
            attach_type: kind.place(),
            types: function.map_or(0, |(types, _)| types),
            function_size: function.map_or(0, |_| 8),
            functions: function.map_or(0, |_| functions.as_ptr().expose_provenance() as u64),
            function_count: function.map_or(0, |_| 1),
            rest: [0; 5],
        };
        // SAFETY: the instructions, the function and the license live here.
        let error = match unsafe { load_in_peace(&mut request) } {
            Ok(fd) => return Ok(Self { fd, kind }),
            Err(error) => error,
        };
        if function.is_some() {
            return Self::load_typed(kind, name, instructions, None);
        }
        let mut log = vec![0_u8; LOG];
        request.log_level = 1;
        request.log_size = u32::try_from(log.len()).unwrap_or(0);
        request.log = log.as_mut_ptr().expose_provenance() as u64;
        // For what the verifier says. SAFETY: as before; the log is as long as `log_size`, and this
        // function's.
        let again = unsafe { load_in_peace(&mut request) };
        again
            .map(|fd| Self { fd, kind })
            .map_err(|_| with_log(error, &log))
    }

    /// Puts the program at the ingress or egress of an interface, before all that is there: BPF
    /// programs, and `tc` filters; or in its driver.
    ///
    /// # Errors
    /// If there is no such interface, or the kernel has no tcx (Linux 6.6); `EOPNOTSUPP` from a
    /// driver without XDP, `EBUSY` where there is another such program, what else the driver has
    /// against it.
    pub fn attach(&self, ifindex: u32) -> io::Result<ProgramLink> {
        let mut request = CreateLink {
            program: number(&self.fd),
            ifindex,
            attach_type: self.kind.place(),
            flags: match self.kind {
                ProgramKind::Xdp => XDP_FLAGS_DRV_MODE,
                _ => BPF_F_BEFORE,
            },
            rest: [0; 6],
        };
        // SAFETY: there are no addresses in it.
        let fd = unsafe { descriptor(BPF_LINK_CREATE, &mut request) }?;
        Ok(ProgramLink { fd })
    }

    /// The kernel's number of the program.
    ///
    /// # Errors
    /// None that is known.
    pub fn id(&self) -> io::Result<u32> {
        attached::id(&self.fd)
    }

    /// Whether the program of number `id` is the first one at that place of an interface: others
    /// may keep frames from it.
    ///
    /// # Errors
    /// If there is no such interface, or the kernel does not say.
    pub fn is_first_at(&self, id: u32, ifindex: u32) -> io::Result<bool> {
        let place = match self.kind {
            ProgramKind::Egress => Place::Egress,
            _ => Place::Ingress,
        };
        Ok(attached::ids(ifindex, place)?.first() == Some(&id))
    }

    /// What the program says to a frame that comes in on `ifindex`, and what it has made of it. An
    /// aggregate has segments of `segment` bytes; else that is 0. With `summed`, the card has
    /// made a sum of the whole packet, and the program has to keep it right: else the error is
    /// `EBADMSG`. Kernels before 6.16 do not know that, and say `EINVAL`. To one of
    /// [`ProgramKind::Xdp`] the frame comes in by the loopback, as it is.
    ///
    /// # Errors
    /// What the kernel has against it.
    pub fn test_run(
        &self,
        ifindex: u32,
        frame: &[u8],
        segment: u32,
        summed: bool,
    ) -> io::Result<(i32, Vec<u8>)> {
        // `__sk_buff`: 48 words, of which the kernel wants most to be 0.
        const IFINDEX: usize = 10;
        const GSO_SEGMENTS: usize = 41;
        const GSO_SIZE: usize = 44;
        let mut context = [0_u32; 48];
        context[IFINDEX] = ifindex;
        context[GSO_SIZE] = segment;
        let length = u32::try_from(frame.len()).unwrap_or(0);
        context[GSO_SEGMENTS] = length.checked_div(segment).map_or(0, |whole| whole + 1);
        let context = match self.kind {
            ProgramKind::Xdp => &context[..0],
            _ => &context[..],
        };
        let mut out = vec![0_u8; frame.len() + 256];
        let mut request = TestRun {
            program: number(&self.fd),
            result: 0,
            size_in: u32::try_from(frame.len()).unwrap_or(u32::MAX),
            size_out: u32::try_from(out.len()).unwrap_or(0),
            data_in: frame.as_ptr().expose_provenance() as u64,
            data_out: out.as_mut_ptr().expose_provenance() as u64,
            repeat: 1,
            duration: 0,
            context_size_in: u32::try_from(size_of_val(context)).unwrap_or(0),
            context_size_out: 0,
            context_in: match context {
                [] => 0,
                _ => context.as_ptr().expose_provenance() as u64,
            },
            context_out: 0,
            flags: if summed {
                BPF_F_TEST_SKB_CHECKSUM_COMPLETE
            } else {
                0
            },
            cpu: 0,
            batch: 0,
            unused: 0,
        };
        // SAFETY: frame, `out` and context live here, and are as long as the request says.
        unsafe { call(BPF_PROG_TEST_RUN, &mut request) }?;
        out.truncate(request.size_out as usize);
        Ok((request.result.cast_signed(), out))
    }

    /// Whether tools are told what its types are called.
    #[cfg(test)]
    pub(crate) fn has_types(&self) -> bool {
        // `btf_id` of `bpf_prog_info`.
        attached::told(&self.fd).expect("it is open")[32] != 0
    }

    /// The descriptor, for a socket that the program is to filter, or a filter of `tc`.
    pub(crate) fn fd(&self) -> libc::c_int {
        self.fd.as_raw_fd()
    }
}

/// A short program that goes on with a long one, for a socket that has no room for that
/// (`net.core.optmem_max`, 20 KiB in older kernels).
#[derive(Debug)]
pub struct Jump {
    program: Program,
    _to: ProgramArray,
}

impl Jump {
    /// Loads one that goes on with `target`.
    ///
    /// # Errors
    /// As [`Program::load`].
    pub fn to(target: &Program) -> io::Result<Self> {
        const ALL: i32 = i32::MAX;
        const BPF_FUNC_TAIL_CALL: i32 = 12;
        let map = ProgramArray::new("lvs_jump", 1)?;
        map.put(0, target)?;
        let op = |code, registers, immediate| Instruction {
            code,
            registers,
            offset: 0,
            immediate,
        };
        let code = [
            op(0x18, 0x12, map.number()), // r2 = the map
            op(0x00, 0x00, 0),
            op(0xb7, 0x03, 0), // r3 = the first entry
            op(0x85, 0x00, BPF_FUNC_TAIL_CALL),
            op(0xb4, 0x00, ALL), // it cannot: w0 = the whole packet
            op(0x95, 0x00, 0),   // return r0
        ];
        let program = Program::load(target.kind, "lvs_jump", &code)?;
        Ok(Self { program, _to: map })
    }

    /// The short one.
    pub const fn program(&self) -> &Program {
        &self.program
    }
}

impl ProgramLink {
    /// Lets the program stay when this process ends, under a name in a BPF file system.
    ///
    /// # Errors
    /// If there is no such directory, or the name is taken.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        pin(&self.fd, path)
    }

    /// The one that was pinned under this name.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn pinned(path: &Path) -> io::Result<Self> {
        let fd = pinned(path)?;
        Ok(Self { fd })
    }

    /// Runs this program from now on, at the same place; no frame is missed.
    ///
    /// # Errors
    /// If its interface is gone (`ENOLINK`), or it is another kind of link.
    pub fn update(&self, program: &Program) -> io::Result<()> {
        let mut request = UpdateLink {
            link: number(&self.fd),
            program: number(&program.fd),
            flags: 0,
            before: 0,
        };
        // SAFETY: there are no addresses in it.
        unsafe { call(BPF_LINK_UPDATE, &mut request) }.map(drop)
    }
}

/// Which types (BTF) are whose.
#[derive(Debug, Default)]
pub struct Typed {
    /// Maps, and the numbers of the types of their keys and values.
    pub maps: Vec<(&'static str, [u32; 2])>,
    /// Programs, and the numbers of their functions.
    pub programs: Vec<(&'static str, u32)>,
}

/// Types of maps and programs, for tools that show them.
#[derive(Debug)]
pub struct Types {
    fd: OwnedFd,
    typed: Typed,
}

impl Types {
    /// Has the kernel take a description of types, as `Documentation/bpf/btf.rst` of its sources
    /// describes it.
    ///
    /// # Errors
    /// `InvalidInput` if it is damaged, or the kernel has none; as [`Program::load`].
    pub fn load(description: &[u8], typed: Typed) -> io::Result<Self> {
        let mut request = LoadTypes {
            description: description.as_ptr().expose_provenance() as u64,
            log: 0,
            length: u32::try_from(description.len()).unwrap_or(u32::MAX),
            log_size: 0,
            log_level: 0,
            unused: 0,
        };
        // SAFETY: the description lives until after the call and is as long as the request says.
        let fd = unsafe { descriptor(BPF_BTF_LOAD, &mut request) }?;
        Ok(Self { fd, typed })
    }

    fn map(&self, name: &str) -> Option<[u32; 2]> {
        let mut maps = self.typed.maps.iter();
        maps.find(|(known, _)| *known == name).map(|&(_, ids)| ids)
    }

    fn program(&self, name: &str) -> Option<u32> {
        let mut programs = self.typed.programs.iter();
        programs
            .find(|(known, _)| *known == name)
            .map(|&(_, id)| id)
    }
}

/// An array in the kernel that programs read and write, and that this process maps as 64-bit words;
/// or memory that other processes hold as well, mapped so.
#[derive(Debug)]
pub struct SharedArray {
    fd: OwnedFd,
    memory: NonNull<u8>,
    words: usize,
}

// SAFETY: the mapping belongs to this value until it is dropped, and nothing in it to a thread.
unsafe impl Send for SharedArray {}
// SAFETY: a shared reference gives access to atomics only.
unsafe impl Sync for SharedArray {}

impl SharedArray {
    /// A new array of `entries` times so many words, all zeros.
    ///
    /// # Errors
    /// As [`Program::load`]; `OutOfMemory`.
    pub fn new(name: &str, words: usize, entries: u32, types: Option<&Types>) -> io::Result<Self> {
        let value = u32::try_from(words * 8).map_err(|_| io::ErrorKind::InvalidInput)?;
        let fd = create_map(
            name,
            BPF_MAP_TYPE_ARRAY,
            [4, value],
            entries.max(1),
            BPF_F_MMAPABLE,
            types,
        )?;
        Self::map(fd, 0, words * entries.max(1) as usize)
    }

    /// A part of a file that begins at a page: memory that others hold as well.
    ///
    /// # Errors
    /// If it cannot be mapped, or the file is too short.
    pub fn of_file(file: &File, offset: u64, words: usize) -> io::Result<Self> {
        // Whoever touches what is not there is killed.
        if file.metadata()?.len() < offset + words as u64 * 8 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Self::map(file.try_clone()?.into(), offset, words)
    }

    /// The array that was pinned under this name, which has at least so many words.
    ///
    /// # Errors
    /// `NotFound`; `InvalidInput` if it is another one.
    pub fn pinned(path: &Path, words: usize) -> io::Result<Self> {
        Self::map(pinned(path)?, 0, words)
    }

    fn map(fd: OwnedFd, offset: u64, words: usize) -> io::Result<Self> {
        let offset = offset.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: a new mapping of a descriptor that is open touches no memory that exists; the
        // kernel refuses one that is longer than the array.
        let memory = unsafe {
            libc::mmap(
                ptr::null_mut(),
                words * 8,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                offset,
            )
        };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let memory = NonNull::new(memory.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { fd, memory, words })
    }

    /// Whether tools are told what its types are called.
    #[cfg(test)]
    pub(crate) fn has_types(&self) -> bool {
        // `btf_id` of `bpf_map_info`.
        attached::told(&self.fd).expect("it is open")[16] != 0
    }

    /// Its words.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is so long, begins at a page, and is used as atomics only, here and
        // in the kernel.
        unsafe { slice::from_raw_parts(self.memory.as_ptr().cast::<AtomicU64>(), self.words) }
    }

    /// Makes all words zeros again.
    #[cfg(any(test, feature = "testing"))]
    pub fn zero(&mut self) {
        // SAFETY: the mapping is so long, and this process has no other reference to it.
        unsafe { ptr::write_bytes(self.memory.as_ptr(), 0, self.words * 8) };
    }

    /// Lets it stay when this process ends, under a name in a BPF file system.
    ///
    /// # Errors
    /// If there is no such directory, or the name is taken.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        pin(&self.fd, path)
    }

    /// Its descriptor's number, for the instructions of a program.
    pub fn number(&self) -> i32 {
        self.fd.as_raw_fd()
    }
}

impl Drop for SharedArray {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own; whoever had words of it holds this value.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), self.words * 8) };
    }
}

/// An array of which each processor has its own entries.
#[derive(Debug)]
pub struct PerCpuArray {
    fd: OwnedFd,
}

impl PerCpuArray {
    /// A new array, all zeros; `bytes` are those of an entry.
    ///
    /// # Errors
    /// As [`SharedArray::new`].
    pub fn new(name: &str, bytes: u32, entries: u32, types: Option<&Types>) -> io::Result<Self> {
        let kind = BPF_MAP_TYPE_PERCPU_ARRAY;
        let fd = create_map(name, kind, [4, bytes], entries, 0, types)?;
        Ok(Self { fd })
    }

    /// The array that was pinned under this name.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn pinned(path: &Path) -> io::Result<Self> {
        let fd = pinned(path)?;
        Ok(Self { fd })
    }

    /// As [`SharedArray::pin`].
    ///
    /// # Errors
    /// If there is no such directory, or the name is taken.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        pin(&self.fd, path)
    }

    /// Its descriptor's number, for the instructions of a program.
    pub fn number(&self) -> i32 {
        self.fd.as_raw_fd()
    }
}

/// A set of keys of so many words, which programs ask.
#[derive(Debug)]
pub struct SharedSet<const WORDS: usize> {
    fd: OwnedFd,
}

impl<const WORDS: usize> SharedSet<WORDS> {
    /// An empty one for so many keys at most.
    ///
    /// # Errors
    /// As [`SharedArray::new`].
    pub fn new(name: &str, entries: u32, types: Option<&Types>) -> io::Result<Self> {
        let key = u32::try_from(WORDS * 8).map_err(|_| io::ErrorKind::InvalidInput)?;
        let fd = create_map(
            name,
            BPF_MAP_TYPE_HASH,
            [key, 8],
            entries,
            BPF_F_NO_PREALLOC,
            types,
        )?;
        Ok(Self { fd })
    }

    /// The one that was pinned under this name.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn pinned(path: &Path) -> io::Result<Self> {
        let fd = pinned(path)?;
        Ok(Self { fd })
    }

    fn element(&self, command: libc::c_long, key: &[u64; WORDS]) -> io::Result<()> {
        let value = 1_u64;
        let mut request = Element {
            map: number(&self.fd),
            unused: 0,
            key: key.as_ptr().expose_provenance() as u64,
            value: ptr::from_ref(&value).expose_provenance() as u64,
            flags: 0,
        };
        // SAFETY: key and value live until after the call, and are as long as the map was made for.
        unsafe { call(command, &mut request) }.map(drop)
    }

    /// Takes a key in.
    ///
    /// # Errors
    /// If it is full.
    pub fn insert(&self, key: &[u64; WORDS]) -> io::Result<()> {
        self.element(BPF_MAP_UPDATE_ELEM, key)
    }

    /// Takes it out.
    ///
    /// # Errors
    /// If it is not there.
    pub fn remove(&self, key: &[u64; WORDS]) -> io::Result<()> {
        self.element(BPF_MAP_DELETE_ELEM, key)
    }

    /// As [`SharedArray::pin`].
    ///
    /// # Errors
    /// If there is no such directory, or the name is taken.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        pin(&self.fd, path)
    }

    /// Its descriptor's number, for the instructions of a program.
    pub fn number(&self) -> i32 {
        self.fd.as_raw_fd()
    }
}

/// Values of so many words by keys of so many, for programs. Entries take memory as they come.
#[derive(Debug)]
pub struct SharedMap<const KEY: usize, const VALUE: usize> {
    fd: OwnedFd,
}

impl<const KEY: usize, const VALUE: usize> SharedMap<KEY, VALUE> {
    /// An empty one for so many entries at most.
    ///
    /// # Errors
    /// As [`SharedArray::new`].
    pub fn new(name: &str, entries: u32, types: Option<&Types>) -> io::Result<Self> {
        let bytes =
            |words: usize| u32::try_from(words * 8).map_err(|_| io::ErrorKind::InvalidInput);
        let fd = create_map(
            name,
            BPF_MAP_TYPE_HASH,
            [bytes(KEY)?, bytes(VALUE)?],
            entries,
            BPF_F_NO_PREALLOC,
            types,
        )?;
        Ok(Self { fd })
    }

    /// The one that was pinned under this name.
    ///
    /// # Errors
    /// `NotFound`; `InvalidInput` if it is another one.
    pub fn pinned(path: &Path) -> io::Result<Self> {
        let fd = pinned(path)?;
        // `type`, `key_size` and `value_size` of `bpf_map_info`.
        let told = attached::told(&fd)?;
        let words = |at: usize| told[at] as usize;
        let wanted = [BPF_MAP_TYPE_HASH as usize, KEY * 8, VALUE * 8];
        if [words(0), words(2), words(3)] != wanted {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self { fd })
    }

    /// Sets the value of a key.
    ///
    /// # Errors
    /// If it is full (`E2BIG`), or there is no memory.
    pub fn insert(&self, key: &[u64; KEY], value: &[u64; VALUE]) -> io::Result<()> {
        let value = ptr::from_ref(value).expose_provenance() as u64;
        // SAFETY: the value lives until after the call, and is as long as the map was made for.
        unsafe { self.element(BPF_MAP_UPDATE_ELEM, key, value) }
    }

    /// The value of a key.
    pub fn get(&self, key: &[u64; KEY]) -> Option<[u64; VALUE]> {
        let mut value = [0_u64; VALUE];
        let to = ptr::from_mut(&mut value).expose_provenance() as u64;
        // SAFETY: the kernel writes as many bytes as the map was made for, and nobody else has them.
        let found = unsafe { self.element(BPF_MAP_LOOKUP_ELEM, key, to) };
        found.ok().map(|()| value)
    }

    /// Takes a key out.
    ///
    /// # Errors
    /// If it is not there.
    pub fn remove(&self, key: &[u64; KEY]) -> io::Result<()> {
        // SAFETY: there is no value.
        unsafe { self.element(BPF_MAP_DELETE_ELEM, key, 0) }
    }

    /// Keys and values, as long as nobody takes any out meanwhile.
    pub fn entries(&self) -> impl Iterator<Item = ([u64; KEY], [u64; VALUE])> {
        let mut last = None;
        let keys = iter::from_fn(move || {
            last = self.key_after(last.as_ref());
            last
        });
        keys.filter_map(|key| Some((key, self.get(&key)?)))
    }

    fn key_after(&self, key: Option<&[u64; KEY]>) -> Option<[u64; KEY]> {
        let mut next = [0_u64; KEY];
        let to = ptr::from_mut(&mut next).expose_provenance() as u64;
        // SAFETY: the kernel writes as many bytes as a key has, and nobody else has them.
        let found = unsafe { self.element(BPF_MAP_GET_NEXT_KEY, key, to) };
        found.ok().map(|()| next)
    }

    /// # Safety
    /// `value` is the address of a value of the map's, if the command has one; of a key, if it gives
    /// one.
    unsafe fn element<'a>(
        &self,
        command: libc::c_long,
        key: impl Into<Option<&'a [u64; KEY]>>,
        value: u64,
    ) -> io::Result<()> {
        let key = key.into().map_or(ptr::null(), ptr::from_ref);
        let mut request = Element {
            map: number(&self.fd),
            unused: 0,
            key: key.expose_provenance() as u64,
            value,
            flags: 0,
        };
        // SAFETY: the key, if there is one, lives until after the call, and is as long as the map was
        // made for; the caller says the same of the value.
        unsafe { call(command, &mut request) }.map(drop)
    }

    /// As [`SharedArray::pin`].
    ///
    /// # Errors
    /// If there is no such directory, or the name is taken.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        pin(&self.fd, path)
    }
}

/// Where programs find a map, or none.
#[derive(Debug)]
pub struct MapPlace {
    fd: OwnedFd,
}

impl MapPlace {
    /// An empty one, for maps like this.
    ///
    /// # Errors
    /// As [`SharedArray::new`].
    pub fn new<const KEY: usize, const VALUE: usize>(
        name: &str,
        like: &SharedMap<KEY, VALUE>,
    ) -> io::Result<Self> {
        let mut request = CreateMap {
            kind: BPF_MAP_TYPE_ARRAY_OF_MAPS,
            key: 4,
            value: 4,
            entries: 1,
            flags: 0,
            inner: number(&like.fd),
            node: 0,
            name: short_name(name),
            ifindex: 0,
            types: 0,
            key_type: 0,
            value_type: 0,
        };
        // SAFETY: there are no addresses in it.
        let fd = unsafe { descriptor(BPF_MAP_CREATE, &mut request) }?;
        Ok(Self { fd })
    }

    /// The one that was pinned under this name.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn pinned(path: &Path) -> io::Result<Self> {
        let fd = pinned(path)?;
        Ok(Self { fd })
    }

    /// Lets programs find this map, which must be like the one that the place was made for; waits
    /// until none uses the one before.
    ///
    /// # Errors
    /// If it is not alike.
    pub fn put<const KEY: usize, const VALUE: usize>(
        &self,
        map: &SharedMap<KEY, VALUE>,
    ) -> io::Result<()> {
        self.element(BPF_MAP_UPDATE_ELEM, number(&map.fd))
    }

    /// Lets them find none.
    pub fn clear(&self) {
        // There was none: that is as well.
        let _ = self.element(BPF_MAP_DELETE_ELEM, 0);
    }

    fn element(&self, command: libc::c_long, map: u32) -> io::Result<()> {
        place(&self.fd, command, 0, map)
    }

    /// As [`SharedArray::pin`].
    ///
    /// # Errors
    /// If there is no such directory, or the name is taken.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        pin(&self.fd, path)
    }

    /// Its descriptor's number, for the instructions of a program.
    pub fn number(&self) -> i32 {
        self.fd.as_raw_fd()
    }
}

/// Programs that others go on with, by their numbers.
///
/// The kernel empties it when no descriptor and no name of it is left.
#[derive(Debug)]
pub struct ProgramArray {
    fd: OwnedFd,
}

impl ProgramArray {
    /// An empty one, for so many.
    ///
    /// # Errors
    /// As [`SharedArray::new`].
    pub fn new(name: &str, entries: u32) -> io::Result<Self> {
        let fd = create_map(name, BPF_MAP_TYPE_PROG_ARRAY, [4; 2], entries, 0, None)?;
        Ok(Self { fd })
    }

    /// The one that was pinned under this name.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn pinned(path: &Path) -> io::Result<Self> {
        let fd = pinned(path)?;
        Ok(Self { fd })
    }

    /// Programs that go on with this number find this one from now on.
    ///
    /// # Errors
    /// If there is no such number, or the program is of another kind than others that use it.
    pub fn put(&self, entry: u32, program: &Program) -> io::Result<()> {
        let program = number(&program.fd);
        place(&self.fd, BPF_MAP_UPDATE_ELEM, entry, program)
    }

    /// As [`SharedArray::pin`].
    ///
    /// # Errors
    /// If there is no such directory, or the name is taken.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        pin(&self.fd, path)
    }

    /// Its descriptor's number, for the instructions of a program.
    pub fn number(&self) -> i32 {
        self.fd.as_raw_fd()
    }
}

/// Asks for something about an entry of a map of programs or maps.
fn place(map: &OwnedFd, command: libc::c_long, key: u32, value: u32) -> io::Result<()> {
    let mut request = Element {
        map: number(map),
        unused: 0,
        key: ptr::from_ref(&key).expose_provenance() as u64,
        value: ptr::from_ref(&value).expose_provenance() as u64,
        flags: 0,
    };
    // SAFETY: key and value live until after the call, and are 4 bytes long.
    unsafe { call(command, &mut request) }.map(drop)
}

/// Makes sure that there is a BPF file system at a directory.
///
/// # Errors
/// If there is none, and this process may not mount one (`CAP_SYS_ADMIN`).
pub fn mount_bpf(directory: &Path) -> io::Result<()> {
    const MAGIC: u32 = 0xcafe_4a11;
    let at = rustix::fs::statfs(directory)?;
    if u32::try_from(at.f_type) == Ok(MAGIC) {
        return Ok(());
    }
    let path = c_path(directory)?;
    // SAFETY: the strings end with a zero and live until after the call.
    let done = unsafe {
        libc::mount(
            c"bpf".as_ptr(),
            path.as_ptr(),
            c"bpf".as_ptr(),
            libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC,
            c"mode=0700".as_ptr().cast(),
        )
    };
    super::check(done).map(drop)
}

/// Memory for a connection table in arrays that programs read: narrow slots, their tags, wide
/// slots, their tags, and the overflow, which none reads.
///
/// # Errors
/// If the arrays are shorter than `layout` says.
pub fn shared_table(layout: Layout, arrays: [Arc<SharedArray>; 5]) -> io::Result<Memory> {
    let regions = arrays.each_ref().map(|array| {
        // SAFETY: as in `words`; the memory holds the array for as long as it exists
        // (`Memory::hold`).
        let words = unsafe {
            slice::from_raw_parts(array.memory.as_ptr().cast::<AtomicU64>(), array.words)
        };
        Region::lent(words)
    });
    let memory = Memory::new(layout, regions).map_err(io::Error::other)?;
    Ok(memory.hold(Arc::new(arrays)))
}

/// Whether this process is root outside of containers: if BPF is refused all the same, that is
/// worth a word. Tests ask.
pub fn is_root_of_all() -> bool {
    // bpf(2) is for whoever has capabilities in the first user namespace, whose map of users is
    // this.
    let all = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let fields: Vec<&str> = all.split_ascii_whitespace().collect();
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    // CAP_NET_ADMIN, CAP_PERFMON and CAP_BPF.
    let needed = 1 << 12 | 1 << 38 | 1 << 39;
    fields == ["0", "0", "4294967295"] && effective.is_some_and(|all| all & needed == needed)
}

/// `CLOCK_MONOTONIC` in nanoseconds, as programs in the kernel read it.
pub fn monotonic() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the pointer is to a `timespec` that the kernel writes.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// A new map of so many entries, with keys and values of so many bytes.
fn create_map(
    name: &str,
    kind: u32,
    [key, value]: [u32; 2],
    entries: u32,
    flags: u32,
    types: Option<&Types>,
) -> io::Result<OwnedFd> {
    let typed = types.and_then(|types| Some((number(&types.fd), types.map(name)?)));
    let (types, [key_type, value_type]) = typed.unwrap_or_default();
    let mut request = CreateMap {
        kind,
        key,
        value,
        entries,
        flags,
        inner: 0,
        node: 0,
        name: short_name(name),
        ifindex: 0,
        types,
        key_type,
        value_type,
    };
    // SAFETY: there are no addresses in it.
    let made = unsafe { descriptor(BPF_MAP_CREATE, &mut request) };
    match made {
        Err(error) if types != 0 && error.raw_os_error() != Some(libc::ENOMEM) => {
            create_map(name, kind, [key, value], entries, flags, None)
        }
        made => made,
    }
}

/// A name as tools show it.
fn short_name(name: &str) -> [u8; 16] {
    let mut short = [0; 16];
    for (to, from) in short.iter_mut().take(15).zip(name.bytes()) {
        *to = from;
    }
    short
}

/// `BPF_PROG_LOAD`. The verifier stops with `EAGAIN` when a signal waits for this thread, and has to
/// be asked again when it has been delivered.
///
/// # Safety
/// As [`call`].
unsafe fn load_in_peace(request: &mut LoadProgram) -> io::Result<OwnedFd> {
    let mut attempt = 1;
    loop {
        // SAFETY: the caller says so.
        match unsafe { descriptor(BPF_PROG_LOAD, request) } {
            Err(error) if interrupted(&error) && attempt < ATTEMPTS => attempt += 1,
            done => return done,
        }
    }
}

fn interrupted(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR))
}

/// An error with what the verifier said last.
fn with_log(error: io::Error, log: &[u8]) -> io::Error {
    const LINES: usize = 12;
    let end = log.iter().position(|&byte| byte == 0).unwrap_or(0);
    let text = String::from_utf8_lossy(&log[..end]);
    // What it lets root alone do needs this, not the right to load programs.
    if text.contains("for !root") {
        let missing = "CAP_PERFMON is missing";
        return io::Error::new(io::ErrorKind::PermissionDenied, missing);
    }
    let mut lines: Vec<&str> = text.lines().rev().take(LINES).collect();
    if lines.is_empty() {
        return error;
    }
    lines.reverse();
    // The verifier says no with a number that stands for permissions elsewhere.
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("{error}: {}", lines.join("; ")),
    )
}

fn number(fd: &OwnedFd) -> u32 {
    u32::try_from(fd.as_raw_fd()).expect("descriptors are not negative")
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

fn pinned(path: &Path) -> io::Result<OwnedFd> {
    let name = c_path(path)?;
    let mut request = Object {
        path: name.as_ptr().expose_provenance() as u64,
        fd: 0,
        flags: 0,
    };
    // SAFETY: the path lives here and ends with a zero.
    unsafe { descriptor(BPF_OBJ_GET, &mut request) }
}

fn pin(fd: &OwnedFd, path: &Path) -> io::Result<()> {
    let name = c_path(path)?;
    let mut request = Object {
        path: name.as_ptr().expose_provenance() as u64,
        fd: number(fd),
        flags: 0,
    };
    // SAFETY: the path lives here and ends with a zero.
    unsafe { call(BPF_OBJ_PIN, &mut request) }.map(drop)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::thread;
    use std::time::Duration;

    use super::*;

    /// As long as the kernel takes them at all, so that checking it takes a while.
    fn long_program() -> Vec<Instruction> {
        let zero = Instruction {
            code: 0xb7,
            registers: 0,
            offset: 0,
            immediate: 0,
        };
        let exit = Instruction { code: 0x95, ..zero };
        let mut code = vec![zero; 900_000];
        code.push(exit);
        code
    }

    #[test]
    fn a_signal_stops_no_program() -> io::Result<()> {
        signal_hook::flag::register(libc::SIGURG, Arc::new(AtomicBool::new(false)))?;
        // SAFETY: it takes nothing and gives a number.
        let thread = unsafe { libc::gettid() };
        let process = std::process::id().cast_signed();
        let pester = thread::spawn(move || {
            for _ in 0..ATTEMPTS - 1 {
                thread::sleep(Duration::from_millis(5));
                // SAFETY: it takes numbers; a thread that has ended is no error worth telling.
                unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGURG) };
            }
        });
        let loaded = Program::load(ProgramKind::SocketFilter, "long", &long_program());
        pester.join().expect("it ends");
        match loaded {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && !is_root_of_all() => {
                eprintln!("not tested: {error}");
            }
            loaded => drop(loaded?),
        }
        Ok(())
    }
}
