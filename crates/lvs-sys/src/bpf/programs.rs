//! BPF programs, and the links that attach them.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use super::maps::{ReferenceMap, Referents};
use super::{Instruction, number, pin, pinned, short_name};
use crate::attached::{self, Place, call, descriptor};

/// Attributes of `BPF_PROG_LOAD` (its first fields).
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
}

/// Attributes of `BPF_LINK_CREATE`, and the zeros behind them that tcx requires.
#[repr(C)]
struct CreateLink {
    program: u32,
    ifindex: u32,
    attach_type: u32,
    flags: u32,
    rest: [u64; 6],
}

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

#[repr(C)]
struct UpdateLink {
    link: u32,
    program: u32,
    flags: u32,
    before: u32,
}

const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_PROG_TEST_RUN: libc::c_long = 10;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_LINK_UPDATE: libc::c_long = 29;
const BPF_PROG_TYPE_SOCKET_FILTER: u32 = 1;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_XDP: u32 = 37;
/// Native XDP only: the kernel refuses the program if the driver cannot run it.
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;
const BPF_F_BEFORE: u32 = 1 << 3;
/// For a test run: the network card has computed a checksum of the whole packet, and the kernel
/// checks afterwards whether it is still correct (Linux 6.16).
const BPF_F_TEST_SKB_CHECKSUM_COMPLETE: u32 = 1 << 2;
/// Size of the buffer for the verifier's log, in bytes.
const LOG: usize = 1 << 20;
/// Maximum number of attempts to load a program, if signals interrupt the call.
const ATTEMPTS: usize = 5;

/// The hook for which a program is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramKind {
    /// A filter for a socket.
    SocketFilter,
    /// A program for the ingress of an interface (tcx, or a filter of `tc`).
    Ingress,
    /// A program for the egress of an interface.
    Egress,
    /// A program in the driver, which runs before the kernel allocates a socket buffer.
    Xdp,
}

impl ProgramKind {
    const fn place(self) -> u32 {
        match self {
            Self::SocketFilter => 0,
            Self::Ingress => Place::Ingress.number(),
            Self::Egress => Place::Egress.number(),
            Self::Xdp => BPF_XDP,
        }
    }
}

/// A loaded BPF program. It exists as long as this value, or a reference to it in the kernel, such
/// as an attachment.
#[derive(Debug)]
pub struct Program {
    fd: OwnedFd,
    kind: ProgramKind,
}

/// A program that is attached to an interface. The program is detached when the interface is
/// removed and, unless the link is pinned, when this value is dropped or the process ends.
#[derive(Debug)]
pub struct ProgramLink {
    fd: OwnedFd,
}

impl Program {
    /// Loads a program into the kernel, which verifies it. `name` is the name in tools, at most 15
    /// letters, digits and `_`.
    ///
    /// # Errors
    /// `PermissionDenied` without `CAP_BPF` and `CAP_NET_ADMIN` in the initial user namespace; the
    /// verifier's error, with the end of its log; `Unsupported` or `InvalidInput` from kernels that
    /// lack a feature.
    pub fn load(kind: ProgramKind, name: &str, instructions: &[Instruction]) -> io::Result<Self> {
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
        };
        // SAFETY: the instructions and the license live until after the call.
        let error = match unsafe { load_in_peace(&mut request) } {
            Ok(fd) => return Ok(Self { fd, kind }),
            Err(error) => error,
        };
        let mut log = vec![0_u8; LOG];
        request.log_level = 1;
        request.log_size = u32::try_from(log.len()).unwrap_or(0);
        request.log = log.as_mut_ptr().expose_provenance() as u64;
        // The second call requests the log of the verifier. SAFETY: as before; the log is a local
        // buffer of `log_size` bytes.
        let again = unsafe { load_in_peace(&mut request) };
        again
            .map(|fd| Self { fd, kind })
            .map_err(|_| with_log(error, &log))
    }

    /// Attaches the program to the ingress or egress of an interface, before all other BPF programs
    /// and `tc` filters; an XDP program to the driver.
    ///
    /// # Errors
    /// If the interface does not exist, or the kernel has no tcx (Linux 6.6); `EOPNOTSUPP` from a
    /// driver without XDP; `EBUSY` if the driver already runs a program; other errors of the
    /// driver.
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
        // SAFETY: the request contains no addresses.
        let fd = unsafe { descriptor(BPF_LINK_CREATE, &mut request) }?;
        Ok(ProgramLink { fd })
    }

    /// Returns the kernel's number of the program.
    ///
    /// # Errors
    /// No error is known.
    pub fn id(&self) -> io::Result<u32> {
        attached::id(&self.fd)
    }

    /// Whether the program with number `id` is the first one of an interface at the hook of this
    /// program; an earlier program could drop frames.
    ///
    /// # Errors
    /// If the interface does not exist, or the kernel does not report its programs.
    pub fn is_first_at(&self, id: u32, ifindex: u32) -> io::Result<bool> {
        let place = match self.kind {
            ProgramKind::Egress => Place::Egress,
            _ => Place::Ingress,
        };
        Ok(attached::ids(ifindex, place)?.first() == Some(&id))
    }

    /// Runs the program on a frame from `ifindex`; returns its verdict and the changed frame.
    /// `segment` is the size in bytes of the segments of a GSO/GRO super-packet, and 0 for other
    /// frames. With `summed`, the network card has computed a checksum of the whole packet, and the
    /// program must keep it correct; otherwise the error is `EBADMSG`. Kernels before 6.16 do not
    /// support this, and return `EINVAL`. For [`ProgramKind::Xdp`], the frame arrives on the
    /// loopback interface; `ifindex` and `segment` have no effect.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn test_run(
        &self,
        ifindex: u32,
        frame: &[u8],
        segment: u32,
        summed: bool,
    ) -> io::Result<(i32, Vec<u8>)> {
        // `__sk_buff`: 48 words, most of which must be 0 for the kernel.
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
        // SAFETY: frame, `out` and context live until after the call, and have the lengths in the
        // request.
        unsafe { call(BPF_PROG_TEST_RUN, &mut request) }?;
        out.truncate(request.size_out as usize);
        Ok((request.result.cast_signed(), out))
    }

    /// The program's descriptor, to attach the program to a socket or as a filter of `tc`.
    pub fn fd(&self) -> libc::c_int {
        self.fd.as_raw_fd()
    }

    pub(super) fn number(&self) -> u32 {
        number(&self.fd)
    }
}

/// A short program that calls a long one. It is attached to sockets, because some kernels permit
/// only short programs there (`net.core.optmem_max`, 20 KiB in older kernels).
#[derive(Debug)]
pub struct Jump {
    program: Program,
    _to: ReferenceMap,
}

impl Jump {
    /// Loads a short program that tail-calls `target`.
    ///
    /// # Errors
    /// As [`Program::load`].
    pub fn to(target: &Program) -> io::Result<Self> {
        const ALL: i32 = i32::MAX;
        const BPF_FUNC_TAIL_CALL: i32 = 12;
        let map = ReferenceMap::new("lvs_jump", Referents::Programs, 1)?;
        map.put_program(0, target)?;
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
            op(0xb4, 0x00, ALL), // if the call fails: w0 = the whole packet
            op(0x95, 0x00, 0),   // return r0
        ];
        let program = Program::load(target.kind, "lvs_jump", &code)?;
        Ok(Self { program, _to: map })
    }

    /// The short program, which is attached instead of the long one.
    pub const fn program(&self) -> &Program {
        &self.program
    }
}

impl ProgramLink {
    /// Pins the link to a path in a BPF file system, so that the program stays attached after this
    /// process exits.
    ///
    /// # Errors
    /// If the directory does not exist, or the name is in use.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        pin(&self.fd, path)
    }

    /// Opens the link that is pinned at this path.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn pinned(path: &Path) -> io::Result<Self> {
        let fd = pinned(path)?;
        Ok(Self { fd })
    }

    /// Replaces the attached program by this one. Each frame is processed by one of the two.
    ///
    /// # Errors
    /// If the interface no longer exists (`ENOLINK`), or the link is of another kind.
    pub fn update(&self, program: &Program) -> io::Result<()> {
        let mut request = UpdateLink {
            link: number(&self.fd),
            program: number(&program.fd),
            flags: 0,
            before: 0,
        };
        // SAFETY: the request contains no addresses.
        unsafe { call(BPF_LINK_UPDATE, &mut request) }.map(drop)
    }
}

/// Loads a program (`BPF_PROG_LOAD`). The verifier stops with `EAGAIN` if a signal for this thread
/// arrives; this function then repeats the system call, up to [`ATTEMPTS`] calls in all.
///
/// # Safety
/// As [`call`].
unsafe fn load_in_peace(request: &mut LoadProgram) -> io::Result<OwnedFd> {
    let mut attempt = 1;
    loop {
        // SAFETY: the caller guarantees it (the contract of this function is that of `call`).
        match unsafe { descriptor(BPF_PROG_LOAD, request) } {
            Err(error) if interrupted(&error) && attempt < ATTEMPTS => attempt += 1,
            done => return done,
        }
    }
}

fn interrupted(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR))
}

/// Adds the last lines of the verifier's log to an error. If the log shows that a capability is
/// missing, returns `PermissionDenied` instead.
fn with_log(error: io::Error, log: &[u8]) -> io::Error {
    const LINES: usize = 12;
    let end = log.iter().position(|&byte| byte == 0).unwrap_or(0);
    let text = String::from_utf8_lossy(&log[..end]);
    // The verifier refuses a program with this text if the process lacks a capability that this
    // program needs. If the process may not load any program, the error has no such text.
    if text.contains("for !root") {
        let missing = "CAP_PERFMON is missing";
        return io::Error::new(io::ErrorKind::PermissionDenied, missing);
    }
    let mut lines: Vec<&str> = text.lines().rev().take(LINES).collect();
    if lines.is_empty() {
        return error;
    }
    lines.reverse();
    // The verifier's error numbers usually mean something else.
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("{error}: {}", lines.join("; ")),
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::is_root_of_all;

    /// A program of almost the maximum length, so that its verification takes some time.
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
    fn bpf_program_load_is_repeated_after_signals() -> io::Result<()> {
        signal_hook::flag::register(libc::SIGURG, Arc::new(AtomicBool::new(false)))?;
        // SAFETY: the call has no arguments and returns a number.
        let thread = unsafe { libc::gettid() };
        let process = std::process::id().cast_signed();
        let pester = thread::spawn(move || {
            for _ in 0..ATTEMPTS - 1 {
                thread::sleep(Duration::from_millis(5));
                // SAFETY: all arguments are numbers; an error (the thread has ended) is ignored.
                unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGURG) };
            }
        });
        let loaded = Program::load(ProgramKind::SocketFilter, "long", &long_program());
        pester
            .join()
            .expect("the other thread ends without a panic");
        match loaded {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && !is_root_of_all() => {
                crate::testing::not_run(&format!("needs BPF: {error}"));
            }
            loaded => drop(loaded?),
        }
        Ok(())
    }
}
