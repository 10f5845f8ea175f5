//! One BPF program: frames that leave an interface with a certain mark come in on it instead.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// `bpf_insn` of `linux/bpf.h`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

/// What `BPF_PROG_LOAD` reads, as far as it is used (the first fields of `bpf_attr`).
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

/// What `BPF_LINK_CREATE` reads, as far as it is used; behind it are zeros, as many as tcx wants to see.
#[repr(C)]
struct CreateLink {
    program: u32,
    ifindex: u32,
    attach_type: u32,
    flags: u32,
    rest: [u64; 6],
}

const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
/// `BPF_TCX_EGRESS` (Linux 6.6).
const BPF_TCX_EGRESS: u32 = 47;

/// The loaded program. It lives as long as this value and its [`TurnedBack`]s.
#[derive(Debug)]
pub struct TurnBack {
    program: OwnedFd,
    mark: u32,
}

/// The program at the egress of one interface. It goes with this value, with the interface, or with the process.
#[derive(Debug)]
pub struct TurnedBack {
    _link: OwnedFd,
}

impl TurnBack {
    /// Loads the program for this mark, which is not 0.
    ///
    /// # Errors
    /// `PermissionDenied` without `CAP_BPF` and `CAP_NET_ADMIN` in the first user namespace; `Unsupported` or
    /// `InvalidInput` from kernels that lack something.
    pub fn load(mark: u32) -> io::Result<Self> {
        let op = |code, registers, offset, immediate| Instruction {
            code,
            registers,
            offset,
            immediate,
        };
        // Offsets in `__sk_buff`.
        const MARK: i16 = 8;
        const IFINDEX: i16 = 40;
        const TCX_NEXT: i32 = -1;
        const BPF_F_INGRESS: i32 = 1;
        const BPF_FUNC_REDIRECT: i32 = 23;
        let program = [
            op(0x61, 0x12, MARK, 0),               // w2 = skb->mark
            op(0xb4, 0x00, 0, TCX_NEXT),           // w0 = what others say
            op(0x56, 0x02, 3, mark.cast_signed()), // if w2 != mark goto end
            op(0x61, 0x11, IFINDEX, 0),            // w1 = skb->ifindex
            op(0xb7, 0x02, 0, BPF_F_INGRESS),      // r2 = in, not out
            op(0x85, 0x00, 0, BPF_FUNC_REDIRECT),  // r0 = bpf_redirect(r1, r2)
            op(0x95, 0x00, 0, 0),                  // end: return r0
        ];
        let license = c"Dual MIT/GPL";
        let mut name = [0; 16];
        name[..8].copy_from_slice(b"lvs_back");
        let request = LoadProgram {
            kind: BPF_PROG_TYPE_SCHED_CLS,
            length: u32::try_from(program.len()).expect("seven"),
            instructions: program.as_ptr().expose_provenance() as u64,
            license: license.as_ptr().expose_provenance() as u64,
            log_level: 0,
            log_size: 0,
            log: 0,
            kernel_version: 0,
            flags: 0,
            name,
            ifindex: 0,
            attach_type: BPF_TCX_EGRESS,
        };
        let program = bpf(BPF_PROG_LOAD, &request)?;
        Ok(Self { program, mark })
    }

    /// The mark.
    pub const fn mark(&self) -> u32 {
        self.mark
    }

    /// Puts the program at the egress of an interface, before `tc` filters that are there.
    ///
    /// # Errors
    /// If there is no such interface, or the kernel has no tcx (Linux 6.6).
    pub fn attach(&self, ifindex: u32) -> io::Result<TurnedBack> {
        let program = self.program.as_raw_fd();
        let request = CreateLink {
            program: u32::try_from(program).expect("descriptors are not negative"),
            ifindex,
            attach_type: BPF_TCX_EGRESS,
            flags: 0,
            rest: [0; 6],
        };
        let link = bpf(BPF_LINK_CREATE, &request)?;
        Ok(TurnedBack { _link: link })
    }
}

/// `bpf(2)` for commands that make a descriptor. The kernel sets close-on-exec.
fn bpf<T>(command: libc::c_long, request: &T) -> io::Result<OwnedFd> {
    // SAFETY: pointer and length describe `request`, a `repr(C)` struct without padding that the kernel only reads; what it
    // points to lives in the caller until after the call.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_ref(request),
            size_of::<T>(),
        )
    };
    let fd = super::check(libc::c_int::try_from(fd).unwrap_or(-1))?;
    // SAFETY: the descriptor is new, open and owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
