//! `lvs-run`: runs a program that uses the interfaces of IPVS, and lets a dataplane answer it.
//!
//! The program gets real generic netlink sockets, at high descriptor numbers. A seccomp filter
//! reports the requests that the program sends to these sockets. The supervisor, a second process,
//! answers requests of the family `IPVS` from its own socket. It also answers the socket options of
//! the old interface, and serves IPVS's files in `/proc`. The kernel handles all other calls.

mod caller;
mod family;
mod files;
mod fuse;
mod kept;
mod mounts;
mod options;
mod space;
mod supervisor;
#[cfg(test)]
mod tests;
mod wire;

use std::ffi::{OsStr, OsString};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use lvs_api::{Address, starting};
use lvs_sys::notify::{self, Listener, Places, Side};
use nix::errno::Errno;
use nix::sys::socket::{SockFlag, SockType};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use rustix::process::{
    Pid, PidfdFlags, Resource, Signal, getrlimit, pidfd_open, pidfd_send_signal,
};

use self::caller::{Memory, Source as _};
use self::space::generic_socket;
use self::supervisor::{Supervisor, is_placed};

pub(crate) const NAME: &str = "lvs-run";

const HELP: &str = "\
Usage: lvs-run [--socket ADDRESS] [--fullnat] [--] COMMAND [ARGUMENT]...

Runs COMMAND, an unmodified program that administers IPVS: ipvsadm, keepalived, or a program that uses netlink. The
dataplane answers it, and everything that it starts, in the place of the kernel. The kernel needs no IPVS.

Options:
  --socket ADDRESS  control socket of the dataplane: a path, or @NAME (abstract)
                    (default: that of the network namespace from which COMMAND makes a request)
  --fullnat         add NAT servers with full NAT, so that their replies return through the director; the dataplane
                    needs --local-address, and the servers do not see the addresses of clients
  --help            show this text
  --version         show the version

Environment:
  LVS_SOCKET        the same as --socket

Exit status: that of COMMAND; 125 if lvs-run itself fails, 126 if COMMAND cannot be executed, 127 if it is not found.
The supervisor writes errors to the system log.

  lvs-run -- ipvsadm -Ln
  lvs-run -- keepalived --dont-fork
";

const VERSION: &str = concat!("lvs-run ", env!("CARGO_PKG_VERSION"), "\n");

/// Exit status if `lvs-run` itself has failed.
const FAILED: u8 = 125;
/// Exit status if the command exists, but cannot be executed.
const NOT_EXECUTABLE: u8 = 126;
/// Exit status if the command does not exist.
const NOT_FOUND: u8 = 127;

#[derive(Debug, PartialEq, Eq)]
enum Invocation {
    Help,
    Version,
    Run {
        socket: Option<OsString>,
        full_nat: bool,
        command: Vec<OsString>,
    },
}

impl Invocation {
    fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Self, String> {
        let mut words = words.into_iter();
        let (mut socket, mut full_nat) = (None, false);
        let missing = || "--socket: missing argument: a path, or @NAME for an abstract socket";
        let first = loop {
            let Some(word) = words.next() else {
                return Err(
                    "no command: name the program to run, as in: lvs-run -- ipvsadm -Ln".into(),
                );
            };
            match word.to_str() {
                Some("--help" | "-h") => return Ok(Self::Help),
                Some("--version" | "-V") => return Ok(Self::Version),
                Some("--socket") => socket = Some(words.next().ok_or_else(missing)?),
                Some("--fullnat") => full_nat = true,
                Some("--") => match words.next() {
                    Some(word) => break word,
                    None => continue,
                },
                Some(text) => match text.strip_prefix("--socket=") {
                    Some(address) => socket = Some(address.into()),
                    None if text.starts_with('-') => {
                        return Err(format!("unknown option {text:?}: see lvs-run --help"));
                    }
                    None => break word,
                },
                None => break word,
            }
        };
        let command = std::iter::once(first).chain(words).collect();
        Ok(Self::Run {
            socket,
            full_nat,
            command,
        })
    }
}

/// Runs `lvs-run` with these arguments. Does not return if the command is executed; otherwise
/// returns the exit status.
pub fn main(words: impl IntoIterator<Item = OsString>) -> u8 {
    let invocation = match Invocation::parse(words) {
        Ok(invocation) => invocation,
        Err(error) => return failed(&error),
    };
    let (socket, full_nat, command) = match invocation {
        Invocation::Help => return print(HELP),
        Invocation::Version => return print(VERSION),
        Invocation::Run {
            socket,
            full_nat,
            command,
        } => (socket, full_nat, command),
    };
    let socket = socket.or_else(|| {
        std::env::var_os(lvs_api::SOCKET_VARIABLE).filter(|address| !address.is_empty())
    });
    match launch(socket.as_deref(), full_nat) {
        Ok(()) => execute(&command),
        Err(error) => failed(&error),
    }
}

fn print(text: &str) -> u8 {
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) => 0,
        Err(_) => FAILED,
    }
}

/// Writes a line to standard error.
fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "{NAME}: {text}");
}

fn failed(text: &str) -> u8 {
    complain(text);
    FAILED
}

/// Replaces this process by the command. Returns the exit status only if this fails.
fn execute(command: &[OsString]) -> u8 {
    let Some((program, arguments)) = command.split_first() else {
        return FAILED;
    };
    let error = Command::new(program).args(arguments).exec();
    complain(&format!(
        "cannot run {}: {error}",
        Path::new(program).display()
    ));
    match error.kind() {
        io::ErrorKind::NotFound => NOT_FOUND,
        _ => NOT_EXECUTABLE,
    }
}

/// Starts the supervisor, installs the seccomp filter for this process, and mounts IPVS's files in
/// `/proc`. A process that already runs in an `lvs-run` keeps the supervisor of that one.
fn launch(socket: Option<&OsStr>, full_nat: bool) -> Result<(), String> {
    // The supervisor changes its working directory.
    let address = socket.map(|text| match Address::new(text) {
        Address::Path(path) => Address::Path(std::path::absolute(&path).unwrap_or(path)),
        other => other,
    });
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let places = Places::below(limit).ok_or_else(|| {
        format!("the limit of {limit} descriptors is too low: set it to 256 or more (ulimit -n)")
    })?;
    let (own, other) =
        UnixStream::pair().map_err(|error| format!("cannot create a socket pair: {error}"))?;
    let side =
        notify::detach(&other).map_err(|error| format!("cannot start the supervisor: {error}"))?;
    if side == Side::Detached {
        // The descriptor is closed already.
        std::mem::forget(own);
        supervise(other, places, address, full_nat);
        std::process::exit(0);
    }
    drop(other);
    let listener = match notify::install(&places) {
        Ok(listener) => listener,
        Err(error) if error.raw_os_error() == Some(Errno::EBUSY as i32) => {
            // The supervisor exits when the launcher closes its end of the pair.
            let probe = generic_socket(SockType::Raw, SockFlag::SOCK_CLOEXEC);
            if !probe.is_ok_and(|socket| is_placed(&socket)) {
                return Err(
                    "another program, such as a container manager, has installed a seccomp filter with a listener, and a process can have only one: run lvs-run outside of that program"
                        .into(),
                );
            }
            if socket.is_some() || full_nat {
                complain(
                    "this lvs-run runs in another lvs-run, whose dataplane and options are used: --socket, LVS_SOCKET and --fullnat are ignored",
                );
            }
            return Ok(());
        }
        Err(error) => return Err(refusal(&error)),
    };
    let why_no_files = |error: io::Error| {
        complain(&format!(
            "/proc has no files of IPVS ({error}), so that ipvsadm -Lc fails: provide FUSE (modprobe fuse), and run lvs-run as root (CAP_SYS_ADMIN)"
        ));
    };
    match mounts::prepare() {
        Ok((mounts, device)) => {
            hand_over(own, &listener, Some(device))?;
            if let Err(error) = mounts.mount() {
                why_no_files(error);
            }
        }
        Err(error) => {
            why_no_files(error);
            hand_over(own, &listener, None)?;
        }
    }
    // Only a warning: the program may use another network namespace.
    if let Err(error) = starting::connect(&address.unwrap_or_default()) {
        complain(&error.to_string());
    }
    Ok(())
}

/// Returns why the seccomp filter could not be installed, and the fix.
fn refusal(error: &io::Error) -> String {
    let fix = match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EACCES) => "run lvs-run as root (CAP_SYS_ADMIN)",
        Some(Errno::EINVAL | Errno::ENOSYS) => "Linux 5.19 or newer with seccomp is needed",
        _ if error.kind() == io::ErrorKind::Unsupported => "only x86-64 and aarch64 are supported",
        _ => "check whether another sandbox prevents this",
    };
    format!("cannot install the seccomp filter: {error}: {fix}")
}

/// Sends the seccomp listener and the descriptor of the FUSE file system to the supervisor, and
/// waits until it is ready.
fn hand_over(
    mut supervisor: UnixStream,
    listener: &Listener,
    files: Option<OwnedFd>,
) -> Result<(), String> {
    // The supervisor is not a child of this process, which therefore cannot read its exit status.
    let lost = |why: &dyn std::fmt::Display| {
        format!(
            "the supervisor has exited before it was ready ({why}): `journalctl -t lvs-run` shows its error, `dmesg` whether the memory was exhausted; correct the cause and start the command again"
        )
    };
    let mut fds = vec![listener.as_fd()];
    fds.extend(files.as_ref().map(OwnedFd::as_fd));
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let probe = PROBE.as_ptr().addr().to_ne_bytes();
    let bytes = [IoSlice::new(&probe)];
    sendmsg(&supervisor, &bytes, &mut control, SendFlags::empty()).map_err(|error| lost(&error))?;
    let mut answer = String::new();
    supervisor
        .read_to_string(&mut answer)
        .map_err(|error| lost(&error))?;
    match answer.strip_prefix(READY) {
        Some(_) => Ok(()),
        None if answer.is_empty() => Err(lost(&"it sent no answer")),
        None => Err(answer),
    }
}

/// Message from the supervisor when it is ready; any other message is an error.
const READY: &str = "ready";

/// The supervisor reads these bytes from the program's memory, to check whether it may read that
/// memory.
static PROBE: [u8; 8] = *b"lvs-run\0";

/// The supervisor: receives the seccomp listener, and answers the reported system calls until the
/// last process has exited.
fn supervise(mut program: UnixStream, places: Places, address: Option<Address>, full_nat: bool) {
    // A thread that panics would leave its caller waiting. Without a supervisor, calls fail.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        hook(panic);
        log(&format!("{panic}"));
        std::process::abort();
    }));
    let (listener, files, pid) = match take_over(&program) {
        Ok(Some(found)) => found,
        // Another launcher supervises the program.
        Ok(None) => return,
        Err(error) => {
            let _ = write!(program, "{error}");
            return;
        }
    };
    let supervisor = match Supervisor::new(listener, places, address, full_nat) {
        Ok(supervisor) => Arc::new(supervisor),
        Err(error) => {
            let _ = write!(
                program,
                "the supervisor cannot start, because /proc is not mounted, or no descriptor is available: {error}"
            );
            return;
        }
    };
    // Release the program's directory and pipes.
    let _ = std::env::set_current_dir("/");
    if let Ok(null) = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/null")
    {
        let _ = nix::unistd::dup2_stdin(&null);
        let _ = nix::unistd::dup2_stdout(&null);
        let _ = nix::unistd::dup2_stderr(&null);
    }
    let watcher = watched(pid);
    let _ = program.write_all(READY.as_bytes());
    drop(program);
    if let Some(device) = files {
        files::start(Arc::clone(&supervisor), device);
    }
    supervisor.run();
    if let Ok(mut watcher) = watcher {
        let _ = watcher.write_all(ENDED);
    }
}

const ENDED: &[u8] = b"ended";

/// Starts the watcher, a process that sends SIGTERM to the program if the supervisor is killed:
/// without a supervisor, the program's changes would fail. The watcher notices that the socket is
/// closed.
fn watched(program: Pid) -> io::Result<UnixStream> {
    let (own, mut supervisor) = UnixStream::pair()?;
    if notify::detach(&supervisor)? == Side::Caller {
        return Ok(own);
    }
    // Only the supervisor has the process name `lvs-run`.
    let _ = rustix::thread::set_name(c"lvs-run-watch");
    // All other descriptors are closed here: no object that owns one of them is used.
    let program = pidfd_open(program, PidfdFlags::empty());
    let mut text = Vec::new();
    let _ = supervisor.read_to_end(&mut text);
    if text != ENDED
        && let Ok(program) = program
        && pidfd_send_signal(&program, Signal::TERM).is_ok()
    {
        log(
            "the supervisor of the program has ended unexpectedly, and lvs-run has sent SIGTERM to the program: start the program again",
        );
    }
    std::process::exit(0)
}

/// The seccomp listener, the supervisor's descriptor of the FUSE file system, and the process id of
/// the program.
type TakenOver = (Listener, Option<OwnedFd>, Pid);

/// Receives the seccomp listener of a program, and finds the program's process id. `None` if the
/// program ends or needs no supervisor.
fn take_over(program: &UnixStream) -> Result<Option<TakenOver>, String> {
    let mut probe = [0; size_of::<usize>()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [IoSliceMut::new(&mut probe)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(program, &mut bytes, &mut control, flags);
    let received = received
        .map_err(|error| format!("cannot receive the descriptor of the seccomp filter: {error}"))?;
    if received.bytes == 0 {
        return Ok(None);
    }
    let mut fds = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let mut next = || fds.as_mut().and_then(Iterator::next);
    let (fd, files) = (
        next().ok_or("the supervisor received no descriptor of the seccomp filter")?,
        next(),
    );
    let peer = rustix::net::sockopt::socket_peercred(program)
        .map_err(|error| format!("cannot read the process id of the program: {error}"))?;
    let mut copy = PROBE;
    copy.fill(0);
    Memory::open(peer.pid.as_raw_pid().cast_unsigned())
        .and_then(|memory| memory.read(usize::from_ne_bytes(probe) as u64, &mut copy))
        .map_err(|error| {
            format!("cannot read the memory of the program: {error}: run lvs-run as root (CAP_SYS_PTRACE)")
        })?;
    Ok(Some((Listener::from(fd), files, peer.pid)))
}

/// Writes an error to the system log. Without a system log, the error is lost, because standard
/// error belongs to the program.
fn log(text: &str) {
    /// Priority of the lines: facility `daemon`, severity `err`.
    const PRIORITY: u8 = 3 << 3 | 3;
    let line = format!("<{PRIORITY}>{NAME}[{}]: {text}", std::process::id());
    if let Ok(socket) = UnixDatagram::unbound() {
        let _ = socket.set_nonblocking(true);
        let _ = socket.send_to(line.as_bytes(), "/dev/log");
    }
}
