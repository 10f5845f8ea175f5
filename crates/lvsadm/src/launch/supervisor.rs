//! The process that answers the noticed calls of a program and of all that it starts.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lvs_api::Address;
use lvs_sys::notify::{self, Answer, Call, Kind, Listener, Memory, NamespaceId, Places};
use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{SockFlag, SockType};
use rustix::net::sockopt::{socket_domain, socket_protocol};
use rustix::net::{AddressFamily, netlink};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::caller::{self, Buffers, Caller};
use super::space::{Rest, Space, generic_socket, lock, port_of};
use super::{family, log, options, wire};

/// Threads at most. Each one answers a call or sends the end of a dump.
const THREADS_MAX: usize = 64;
/// Network namespaces at most that are in use at the same time.
const SPACES_MAX: usize = 256;
/// A namespace that is not used for this long is left, so that it can end.
const IDLE: Duration = Duration::from_secs(60);
/// Programs whose library is remembered.
const PROGRAMS_MAX: usize = 256;

/// Length of the type of a socket, without its flags.
const SOCKET_TYPE: i32 = 0xf;

#[derive(Debug)]
pub(super) struct Supervisor {
    listener: Listener,
    places: Places,
    /// The network namespace of the launcher, whose dataplane `address` is.
    start: NamespaceId,
    address: Option<Address>,
    spaces: Mutex<HashMap<NamespaceId, Arc<Space>>>,
    /// Held while a place for a descriptor is found and filled.
    placing: Mutex<()>,
    /// By device and inode of a program: whether it uses libnl.
    programs: Mutex<HashMap<(u64, u64), bool>>,
    threads: AtomicUsize,
    /// Threads that wait for a call.
    waiting: AtomicUsize,
}

/// Answer to a call, and a dump that is sent after it.
type Answered = (Answer, Option<Rest>);

impl Supervisor {
    /// # Errors
    /// `/proc` is not mounted.
    pub(super) fn new(
        listener: Listener,
        places: Places,
        address: Option<Address>,
    ) -> io::Result<Self> {
        Ok(Self {
            listener,
            places,
            start: own_network()?,
            address,
            spaces: Mutex::default(),
            placing: Mutex::default(),
            programs: Mutex::default(),
            threads: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
        })
    }

    /// Answers calls until the last process under the filter has ended.
    pub(super) fn run(self) {
        self.listener.wake_on_this_processor();
        let own = Arc::new(self);
        own.start_thread();
        let period = PollTimeout::try_from(IDLE).unwrap_or(PollTimeout::MAX);
        loop {
            // A hang-up is always reported.
            let mut ends = [PollFd::new(own.listener.as_fd(), PollFlags::empty())];
            match poll(&mut ends, period) {
                Ok(0) => own.sweep(),
                Ok(_) => return,
                Err(Errno::EINTR) => {}
                Err(error) => {
                    log(&format!("cannot wait for the end of the program: {error}"));
                    return;
                }
            }
        }
    }

    /// Leaves namespaces that are not used. In that of the launcher, services stay managed by the
    /// program, and no lvsd may start.
    fn sweep(&self) {
        lock(&self.spaces).retain(|id, space| {
            space.forget_listing();
            *id == self.start || lock(&space.used).elapsed() < IDLE
        });
    }

    fn start_thread(self: &Arc<Self>) {
        self.threads.fetch_add(1, Ordering::Relaxed);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let own = self.clone();
        let name = "lvs-run-calls".to_owned();
        let started = std::thread::Builder::new()
            .name(name)
            .spawn(move || own.serve());
        if let Err(error) = started {
            self.threads.fetch_sub(1, Ordering::Relaxed);
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            log(&format!("cannot start a thread: {error}"));
        }
    }

    /// Answers one call after another. There is always a thread that waits for the next one, so that
    /// a call that takes long stops no other.
    fn serve(self: Arc<Self>) {
        let mut here = Some(self.start);
        loop {
            let call = match self.listener.receive() {
                Ok(Some(call)) => call,
                Ok(None) => continue,
                // A caller has ended, or the process has received a signal. If all have ended, the
                // main thread ends this process.
                Err(_) => {
                    std::thread::yield_now();
                    continue;
                }
            };
            let was_last = self.waiting.fetch_sub(1, Ordering::Relaxed) == 1;
            if was_last && self.threads.load(Ordering::Relaxed) < THREADS_MAX {
                self.start_thread();
            }
            let (answer, rest) = self
                .answer(&call, &mut here)
                .unwrap_or((Answer::Continue, None));
            self.listener.respond(call.id, answer);
            if let Some(rest) = rest {
                rest.send();
            }
            self.waiting.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The answer to a call; `None` if the kernel handles it. `here` is the network namespace of this
    /// thread.
    fn answer(&self, call: &Call, here: &mut Option<NamespaceId>) -> Option<Answered> {
        match call.kind {
            Kind::Socket => self.socket(call, here),
            Kind::Sendto | Kind::Sendmsg | Kind::Write | Kind::Writev => self.send(call, here),
            Kind::Recvfrom | Kind::Recvmsg => self.receive(call, here),
            Kind::Getsockopt | Kind::Setsockopt => self.option(call, here),
        }
    }

    /// Enters a network namespace.
    fn space(&self, namespace: &File, here: &mut Option<NamespaceId>) -> Option<Arc<Space>> {
        let id = NamespaceId::of(namespace).ok()?;
        if *here != Some(id) {
            *here = None;
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(namespace.as_fd(), kind).ok()?;
            *here = Some(id);
        }
        let mut spaces = lock(&self.spaces);
        if let Some(space) = spaces.get(&id) {
            *lock(&space.used) = Instant::now();
            return Some(space.clone());
        }
        if spaces.len() >= SPACES_MAX {
            log(&format!(
                "the program uses more than {SPACES_MAX} network namespaces: IPVS is missing in one of them"
            ));
            return None;
        }
        let address = self.address.clone().filter(|_| id == self.start);
        let space = Arc::new(Space::here(namespace, address).ok()?);
        spaces.insert(id, space.clone());
        Some(space)
    }

    /// Gives the caller a socket of generic netlink at a place where its calls are noticed.
    fn socket(&self, call: &Call, here: &mut Option<NamespaceId>) -> Option<Answered> {
        let caller = Caller::of(call.thread)?;
        let space = self.space(&caller.network()?, here)?;
        // A program that may not use IPVS gets the kernel's own socket.
        if !caller.may_administer(&space.owners) {
            return None;
        }
        let argument = int(call.arguments[1]);
        let kind = match argument & SOCKET_TYPE {
            libc::SOCK_RAW => SockType::Raw,
            libc::SOCK_DGRAM => SockType::Datagram,
            _ => return None,
        };
        let flags = SockFlag::from_bits(argument & !SOCKET_TYPE)?;
        let socket = generic_socket(kind, flags | SockFlag::SOCK_CLOEXEC).ok()?;
        let places = match self.uses_libnl(caller.process) {
            true => self.places.plain.clone(),
            false => self.places.strict.clone(),
        };
        let _placing = lock(&self.placing);
        let free = places.clone().find(|place| !caller.has_descriptor(*place));
        let Some(place) = free else {
            log(&format!(
                "process {} has {} sockets of generic netlink: refused another one",
                caller.process,
                places.len()
            ));
            return Some((Answer::Errno(Errno::EMFILE as i32), None));
        };
        let close_on_exec = flags.contains(SockFlag::SOCK_CLOEXEC);
        let answer = match self.listener.add(call.id, &socket, place, close_on_exec) {
            Ok(()) => Answer::Sent,
            Err(error) => Answer::Errno(error.raw_os_error().unwrap_or(libc::EMFILE)),
        };
        Some((answer, None))
    }

    /// Whether a process uses libnl. That library accepts answers from any port; others are given
    /// answers that come from port 0, the kernel's.
    fn uses_libnl(&self, process: u32) -> bool {
        let Ok(program) = fs::metadata(format!("/proc/{process}/exe")) else {
            return false;
        };
        let program = (program.dev(), program.ino());
        if let Some(known) = lock(&self.programs).get(&program) {
            return *known;
        }
        let maps = fs::read(format!("/proc/{process}/maps")).unwrap_or_default();
        let library = b"/libnl-genl-3.so";
        let uses = maps.windows(library.len()).any(|bytes| bytes == library);
        let mut programs = lock(&self.programs);
        if programs.len() >= PROGRAMS_MAX {
            programs.clear();
        }
        programs.insert(program, uses);
        uses
    }

    /// The caller's descriptor, if that is a socket of generic netlink.
    fn generic(caller: &Caller, number: u64) -> Option<OwnedFd> {
        let socket = caller.descriptor(number)?;
        let is_netlink = socket_domain(&socket).is_ok_and(|it| it == AddressFamily::NETLINK);
        let is_generic = socket_protocol(&socket).is_ok_and(|it| it == Some(netlink::GENERIC));
        (is_netlink && is_generic).then_some(socket)
    }

    fn send(&self, call: &Call, here: &mut Option<NamespaceId>) -> Option<Answered> {
        let caller = Caller::of(call.thread)?;
        let socket = Self::generic(&caller, call.arguments[0])?;
        let space = self.space(&notify::of_socket(&socket).ok()?, here)?;
        if !caller.may_administer(&space.owners) {
            return None;
        }
        let bytes = caller::sent(call)?;
        if !wire::messages(&bytes).any(|message| family::is_ours(&message)) {
            return None;
        }
        // From here on the copy counts, and only for a caller that still waits.
        if !self.listener.is_valid(call.id) {
            return Some((Answer::Sent, None));
        }
        let refused = |errno: Errno| Some((Answer::Errno(errno as i32), None));
        let Some(port) = port_of(&socket, caller.process) else {
            return refused(Errno::EADDRINUSE);
        };
        let mut datagrams = Vec::new();
        {
            let mut dataplane = space.dataplane(caller.process);
            for message in wire::messages(&bytes) {
                if family::is_ours(&message) {
                    datagrams.extend(family::answer(&message, port, &mut dataplane));
                } else {
                    let errno = Errno::EOPNOTSUPP as i32;
                    datagrams.push(wire::error(&message, port, errno));
                }
            }
        }
        match space.send(port, datagrams) {
            Ok(rest) => Some((Answer::Value(i64::try_from(bytes.len()).ok()?), rest)),
            Err(errno) => refused(errno),
        }
    }

    /// Receives for a program whose library accepts answers from the kernel only.
    fn receive(&self, call: &Call, here: &mut Option<NamespaceId>) -> Option<Answered> {
        let caller = Caller::of(call.thread)?;
        let socket = Self::generic(&caller, call.arguments[0])?;
        let space = self.space(&notify::of_socket(&socket).ok()?, here)?;
        let buffers = Buffers::of(call)?;
        let port = port_of(&socket, caller.process)?;
        if !self.listener.is_valid(call.id) {
            return Some((Answer::Sent, None));
        }
        let mut bytes = vec![0; buffers.room()];
        let mut control = vec![0; buffers.control];
        let received = loop {
            match notify::receive(&socket, &mut bytes, &mut control, buffers.flags) {
                Ok(received) => break received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    // The kernel waits for datagrams, unless they are on their way.
                    if !space.is_dumping(port) {
                        return None;
                    }
                    let mut ready = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
                    let _ = poll(&mut ready, 100_u8);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    let errno = error.raw_os_error().unwrap_or(libc::EIO);
                    return Some((Answer::Errno(errno), None));
                }
            }
        };
        let mut sender = received.sender;
        if wire::u32_at(&sender, 4) == space.port()
            && let Some(port) = sender.get_mut(4..8)
        {
            port.fill(0);
        }
        let filled = buffers.fill(
            &bytes[..received.length.min(bytes.len())],
            &sender,
            &control[..received.control],
            received.flags,
        );
        let answer = match filled {
            Some(()) => Answer::Value(i64::try_from(received.length).ok()?),
            None => Answer::Errno(libc::EFAULT),
        };
        Some((answer, None))
    }

    /// Answers `getsockopt` and `setsockopt` of the old interface.
    fn option(&self, call: &Call, here: &mut Option<NamespaceId>) -> Option<Answered> {
        let caller = Caller::of(call.thread)?;
        let socket = caller.descriptor(call.arguments[0])?;
        if socket_domain(&socket).ok()? != AddressFamily::INET {
            return None;
        }
        let space = self.space(&notify::of_socket(&socket).ok()?, here)?;
        let answer = if caller.may_administer(&space.owners) {
            self.option_of(call, &space, caller.process)
        } else {
            Err(Errno::EPERM)
        };
        let answer = match answer {
            Ok(answer) => answer,
            Err(errno) => Answer::Errno(errno as i32),
        };
        Some((answer, None))
    }

    fn option_of(&self, call: &Call, space: &Space, process: u32) -> Result<Answer, Errno> {
        let memory = Memory(call.thread);
        let [_, _, option, at, length, _] = call.arguments;
        let option = int(option).cast_unsigned();
        let sets = call.kind == Kind::Setsockopt;
        let mut request = vec![0; options::request_length(sets, option)];
        let fault = |_| Errno::EFAULT;
        let mut room = [0; 4];
        if !sets {
            memory.read(length, &mut room).map_err(fault)?;
        }
        let room = match sets {
            true => int(length).cast_unsigned(),
            false => u32::from_ne_bytes(room),
        };
        let room = usize::try_from(room).map_err(|_| Errno::EINVAL)?;
        if room < request.len() {
            return Err(Errno::EINVAL);
        }
        memory.read(at, &mut request).map_err(fault)?;
        if !self.listener.is_valid(call.id) {
            return Ok(Answer::Sent);
        }
        let mut dataplane = space.dataplane(process);
        if sets {
            options::set(option, &request, &mut dataplane)?;
            return Ok(Answer::Value(0));
        }
        let answer = options::get(option, &request, room, &mut dataplane)?;
        drop(dataplane);
        if !self.listener.is_valid(call.id) {
            return Ok(Answer::Sent);
        }
        memory.write(at, &answer).map_err(fault)?;
        let written = u32::try_from(answer.len()).map_err(|_| Errno::EINVAL)?;
        memory
            .write(length, &written.to_ne_bytes())
            .map_err(fault)?;
        Ok(Answer::Value(0))
    }
}

/// The low half of an argument, which the kernel reads as `int`.
fn int(argument: u64) -> i32 {
    ((argument & 0xffff_ffff) as u32).cast_signed()
}

/// The network namespace of this thread.
fn own_network() -> io::Result<NamespaceId> {
    NamespaceId::of(&File::open("/proc/thread-self/ns/net")?)
}
