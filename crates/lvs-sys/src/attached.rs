//! Lists the BPF programs of all processes at an interface (bpf(2)). A separate module,
//! because `lvsadm` uses it without the other modules.
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

#[repr(C)]
struct QueryPrograms {
    ifindex: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    ids: u64,
    count: u32,
    rest: u32,
    program_flags: u64,
    link_ids: u64,
    link_flags: u64,
    revision: u64,
}

#[repr(C)]
struct ById {
    id: u32,
    next: u32,
    flags: u32,
}

#[repr(C)]
struct GetInfo {
    fd: u32,
    length: u32,
    info: u64,
}

/// The first fields of `bpf_prog_info`. The lengths are 0, so that the kernel returns no arrays.
#[derive(Default)]
#[repr(C)]
struct ProgramInfo {
    kind: u32,
    id: u32,
    tag: [u8; 8],
    lengths: [u32; 2],
    addresses: [u64; 2],
    loaded: u64,
    uid: u32,
    maps: u32,
    map_ids: u64,
    name: [u8; 16],
}

const BPF_PROG_GET_FD_BY_ID: libc::c_long = 13;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_long = 15;
const BPF_PROG_QUERY: libc::c_long = 16;

/// The kernel's description of a map or program (`bpf_map_info`, `bpf_prog_info`), as 32-bit words.
pub fn reported(fd: &OwnedFd) -> io::Result<[u32; 64]> {
    let mut words = [0_u32; 64];
    let mut request = GetInfo {
        fd: u32::try_from(fd.as_raw_fd()).expect("descriptors are not negative"),
        length: u32::try_from(size_of_val(&words)).unwrap_or(0),
        info: words.as_mut_ptr().expose_provenance() as u64,
    };
    // SAFETY: the words are a local variable, as long as the length in the request.
    unsafe { call(BPF_OBJ_GET_INFO_BY_FD, &mut request) }?;
    Ok(words)
}

/// A hook of an interface to which programs can be attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Incoming packets, after packet sockets have received their copies (tcx, Linux 6.6).
    Ingress,
    /// Outgoing packets (tcx, Linux 6.6).
    Egress,
    /// Outgoing packets of a netkit device (Linux 6.7).
    NetkitPrimary,
    /// Packets that the peer device sends, before they arrive at this device.
    NetkitPeer,
}

impl Place {
    /// All values of this type.
    pub const ALL: [Self; 4] = [
        Self::Ingress,
        Self::Egress,
        Self::NetkitPrimary,
        Self::NetkitPeer,
    ];

    /// The kernel's number (`enum bpf_attach_type`).
    pub const fn number(self) -> u32 {
        match self {
            Self::Ingress => 46,
            Self::Egress => 47,
            Self::NetkitPrimary => 54,
            Self::NetkitPeer => 55,
        }
    }
}

/// The names of the programs at a hook of an interface, in the order in which they run, at most 64.
/// Some programs have no name.
///
/// # Errors
/// `PermissionDenied` without `CAP_NET_ADMIN` and `CAP_SYS_ADMIN` in the initial user namespace;
/// other errors of the kernel, for instance if the interface has no such hook.
pub fn names(interface: &str, place: Place) -> io::Result<Vec<String>> {
    let ifindex = super::if_index(interface)?;
    let mut names = Vec::new();
    for id in ids(ifindex, place)? {
        match name(id) {
            Ok(name) => names.push(name),
            // The program was removed after the kernel had listed it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(names)
}

/// Returns the kernel's numbers of at most 64 programs at this hook, in the order in which they
/// run.
pub fn ids(ifindex: u32, place: Place) -> io::Result<Vec<u32>> {
    let mut ids = vec![0_u32; 64];
    let mut request = QueryPrograms {
        ifindex,
        attach_type: place.number(),
        query_flags: 0,
        attach_flags: 0,
        ids: ids.as_mut_ptr().expose_provenance() as u64,
        count: u32::try_from(ids.len()).unwrap_or(0),
        rest: 0,
        program_flags: 0,
        link_ids: 0,
        link_flags: 0,
        revision: 0,
    };
    // SAFETY: `ids` is a local variable with room for `count` numbers.
    match unsafe { call(BPF_PROG_QUERY, &mut request) } {
        // More than 64 programs are attached; the kernel has returned the first 64.
        Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {}
        // No program is attached.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(Vec::new()),
        done => {
            done?;
            ids.truncate(request.count as usize);
        }
    }
    ids.retain(|&id| id != 0);
    Ok(ids)
}

fn name(id: u32) -> io::Result<String> {
    let mut request = ById {
        id,
        next: 0,
        flags: 0,
    };
    // SAFETY: the request contains no addresses.
    let program = unsafe { descriptor(BPF_PROG_GET_FD_BY_ID, &mut request) }?;
    let name = info(&program)?.name;
    let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// The kernel's number of a program.
pub fn id(program: &OwnedFd) -> io::Result<u32> {
    Ok(info(program)?.id)
}

fn info(program: &OwnedFd) -> io::Result<ProgramInfo> {
    let mut info = ProgramInfo::default();
    let mut request = GetInfo {
        fd: u32::try_from(program.as_raw_fd()).unwrap_or(u32::MAX),
        length: u32::try_from(size_of::<ProgramInfo>()).unwrap_or(0),
        info: ptr::from_mut(&mut info).expose_provenance() as u64,
    };
    // SAFETY: `info` is a local variable, as long as `length`. The kernel writes to no address in
    // it, because the lengths of the arrays that it could request are 0.
    unsafe { call(BPF_OBJ_GET_INFO_BY_FD, &mut request) }?;
    Ok(info)
}

/// Runs a command of bpf(2) that returns a new descriptor. The kernel sets close-on-exec.
///
/// # Safety
/// As [`call`]; and the command must be one that returns a descriptor.
pub unsafe fn descriptor<T>(command: libc::c_long, request: &mut T) -> io::Result<OwnedFd> {
    // SAFETY: the caller guarantees it (the contract of this function includes that of `call`).
    let fd = unsafe { call(command, request) }?;
    // SAFETY: the descriptor is new, open and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Calls bpf(2).
///
/// # Safety
/// `T` is a `repr(C)` struct without padding that begins as `bpf_attr` does for the command. Every
/// address in it is null, or is the address of memory that exists until after the call and is as
/// long as the request specifies. If the kernel writes to that memory, nothing else accesses it
/// during the call.
pub unsafe fn call<T>(command: libc::c_long, request: &mut T) -> io::Result<libc::c_int> {
    let request = ptr::from_mut(request);
    // SAFETY: pointer and length describe the request; the caller guarantees the memory at the
    // addresses in it.
    let done = unsafe { libc::syscall(libc::SYS_bpf, command, request, size_of::<T>()) };
    match libc::c_int::try_from(done) {
        Ok(done) if done >= 0 => Ok(done),
        _ => Err(io::Error::last_os_error()),
    }
}
