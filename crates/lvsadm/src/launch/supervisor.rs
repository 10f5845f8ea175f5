//! The process that answers the noticed calls of a program and of all that it starts.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use lvs_api::Address;
use lvs_sys::notify::{self, Answer, Call, Kind, Listener, NamespaceId, Places};
use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{SockFlag, SockType, getsockopt, setsockopt, sockopt};
use rustix::net::sockopt::{socket_domain, socket_protocol};
use rustix::net::{AddressFamily, netlink};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::caller::{self, Buffers, Caller, Memory};
use super::space::{Rest, Space, generic_socket, lock, port_of};
use super::{family, log, options, wire};

/// Threads at most. Each one answers a call or sends the end of a dump.
const THREADS_MAX: usize = 64;
/// Network namespaces at most that are in use at the same time.
const SPACES_MAX: usize = 256;
/// A namespace that is not used for this long is left, so that it can end.
const IDLE: Duration = Duration::from_secs(60);
/// Between two looks for namespaces that are not used, and for a lock that has become free.
const SWEEP: u16 = 1_000;
/// Mark (`SO_MARK`) of the sockets that the supervisor gives to programs that may administer IPVS. To set a mark takes
/// the same capability, so no other socket has it: a privileged program that is led to write to a socket of an
/// unprivileged one changes nothing.
const MARK: u32 = 0x6c76_7372;
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
    /// A limit of the supervisor was logged.
    has_complained: AtomicBool,
    /// Held by the thread that receives calls: the kernel would wake all that wait for one.
    lead: Mutex<()>,
    /// Threads that wait for the lead.
    waiting: AtomicUsize,
}

/// A thread that answers calls.
#[derive(Debug)]
struct Worker<'a> {
    /// The network namespace that it is in.
    here: Option<NamespaceId>,
    lead: Option<MutexGuard<'a, ()>>,
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
            has_complained: AtomicBool::new(false),
            lead: Mutex::default(),
            waiting: AtomicUsize::new(0),
        })
    }

    /// Answers calls until the last process under the filter has ended.
    pub(super) fn run(self) {
        self.listener.wake_on_this_processor();
        let own = Arc::new(self);
        own.start_thread();
        let period = PollTimeout::from(SWEEP);
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

    /// Logs a limit of the supervisor, once.
    fn complain(&self, text: &str) {
        if !self.has_complained.swap(true, Ordering::Relaxed) {
            log(text);
        }
    }

    /// Leaves namespaces that are not used. In that of the launcher, services stay managed by the
    /// program, and no lvsd may start.
    fn sweep(&self) {
        lock(&self.spaces).retain(|id, space| {
            space.forget_listing();
            space.retry_lock();
            *id == self.start || lock(&space.used).elapsed() < IDLE
        });
    }

    fn start_thread(self: &Arc<Self>) {
        self.threads.fetch_add(1, Ordering::Relaxed);
        let own = self.clone();
        let name = "lvs-run-calls".to_owned();
        let started = std::thread::Builder::new()
            .name(name)
            .spawn(move || own.serve());
        if let Err(error) = started {
            self.threads.fetch_sub(1, Ordering::Relaxed);
            log(&format!("cannot start a thread: {error}"));
        }
    }

    /// Answers one call after another.
    fn serve(self: Arc<Self>) {
        let mut worker = Worker {
            here: Some(self.start),
            lead: None,
        };
        loop {
            if worker.lead.is_none() {
                self.waiting.fetch_add(1, Ordering::Relaxed);
                worker.lead = Some(lock(&self.lead));
                self.waiting.fetch_sub(1, Ordering::Relaxed);
            }
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
            let (answer, rest) = self
                .answer(&call, &mut worker)
                .unwrap_or((Answer::Continue, None));
            self.listener.respond(call.id, answer);
            if let Some(rest) = rest {
                self.give_lead(&mut worker);
                rest.send();
            }
        }
    }

    /// Has another thread receive calls, because this one may have to wait.
    fn give_lead<'a>(self: &'a Arc<Self>, worker: &mut Worker<'a>) {
        if worker.lead.is_none() {
            return;
        }
        let has_successor = self.waiting.load(Ordering::Relaxed) > 0;
        if !has_successor && self.threads.load(Ordering::Relaxed) < THREADS_MAX {
            self.start_thread();
        }
        worker.lead = None;
    }

    /// The answer to a call; `None` if the kernel handles it.
    fn answer<'a>(self: &'a Arc<Self>, call: &Call, worker: &mut Worker<'a>) -> Option<Answered> {
        match call.kind {
            Kind::Socket => self.socket(call, worker),
            Kind::Sendto | Kind::Sendmsg | Kind::Write | Kind::Writev => self.send(call, worker),
            Kind::Recvfrom | Kind::Recvmsg => self.receive(call, worker),
            Kind::Getsockopt | Kind::Setsockopt => self.option(call, worker),
        }
    }

    /// Enters a network namespace for a caller that may administer it.
    fn administered(
        &self,
        caller: &Caller,
        namespace: &File,
        worker: &mut Worker<'_>,
    ) -> Option<Arc<Space>> {
        let owners = notify::owners(namespace).ok()?;
        if !caller.may_administer(&owners) {
            return None;
        }
        self.space(namespace, worker)
    }

    /// Enters a network namespace.
    fn space(&self, namespace: &File, worker: &mut Worker<'_>) -> Option<Arc<Space>> {
        let id = NamespaceId::of(namespace).ok()?;
        if worker.here != Some(id) {
            worker.here = None;
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(namespace.as_fd(), kind).ok()?;
            worker.here = Some(id);
        }
        let mut spaces = lock(&self.spaces);
        if let Some(space) = spaces.get(&id) {
            *lock(&space.used) = Instant::now();
            return Some(space.clone());
        }
        if spaces.len() >= SPACES_MAX && id != self.start {
            self.complain(&format!(
                "the program uses more than {SPACES_MAX} network namespaces: IPVS is missing in one of them"
            ));
            return None;
        }
        let address = self.address.clone().filter(|_| id == self.start);
        let space = Arc::new(Space::here(address).ok()?);
        spaces.insert(id, space.clone());
        Some(space)
    }

    /// Gives the caller a socket of generic netlink at a place where its calls are noticed.
    fn socket(&self, call: &Call, worker: &mut Worker<'_>) -> Option<Answered> {
        let caller = Caller::of(call.thread)?;
        // A program that may not use IPVS gets the kernel's own socket.
        self.administered(&caller, &caller.network()?, worker)?;
        let argument = int(call.arguments[1]);
        let kind = match argument & SOCKET_TYPE {
            libc::SOCK_RAW => SockType::Raw,
            libc::SOCK_DGRAM => SockType::Datagram,
            _ => return None,
        };
        let flags = SockFlag::from_bits(argument & !SOCKET_TYPE)?;
        let socket = generic_socket(kind, flags | SockFlag::SOCK_CLOEXEC).ok()?;
        setsockopt(&socket, sockopt::Mark, &MARK).ok()?;
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
            Err(error) if error.raw_os_error() == Some(libc::EBADF) => {
                self.complain(&format!(
                    "process {} may not have descriptor {place}: it finds no IPVS by netlink; raise its limit (ulimit -n)",
                    caller.process
                ));
                return None;
            }
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

    /// The caller's descriptor, if that is a socket of generic netlink that the supervisor has placed.
    fn generic(caller: &Caller, number: u64) -> Option<OwnedFd> {
        let socket = caller.descriptor(number)?;
        let is_netlink = socket_domain(&socket).is_ok_and(|it| it == AddressFamily::NETLINK);
        let is_generic = socket_protocol(&socket).is_ok_and(|it| it == Some(netlink::GENERIC));
        (is_netlink && is_generic && is_placed(&socket)).then_some(socket)
    }

    fn send<'a>(self: &'a Arc<Self>, call: &Call, worker: &mut Worker<'a>) -> Option<Answered> {
        let caller = Caller::of(call.thread)?;
        let socket = Self::generic(&caller, call.arguments[0])?;
        let space = self.administered(&caller, &notify::of_socket(&socket).ok()?, worker)?;
        // The memory of a program may be one that makes its reader wait.
        self.give_lead(worker);
        let memory = Memory::of(call, &self.listener)?;
        let bytes = caller::sent(call, &memory)?;
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
            let mut dumps = 0;
            for message in wire::messages(&bytes) {
                dumps += usize::from(message.is_dump());
                if message.is_dump() && dumps > 1 {
                    // As the kernel while a dump is under way.
                    datagrams.push(wire::error(&message, port, Errno::EBUSY as i32));
                } else if family::is_ours(&message) {
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
    fn receive<'a>(self: &'a Arc<Self>, call: &Call, worker: &mut Worker<'a>) -> Option<Answered> {
        let caller = Caller::of(call.thread)?;
        let socket = Self::generic(&caller, call.arguments[0])?;
        let namespace = NamespaceId::of(&notify::of_socket(&socket).ok()?).ok()?;
        // The program has sent something, or the kernel answers.
        let space = lock(&self.spaces).get(&namespace).cloned()?;
        self.give_lead(worker);
        let buffers = Buffers::of(call, Memory::of(call, &self.listener)?)?;
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
    fn option<'a>(self: &'a Arc<Self>, call: &Call, worker: &mut Worker<'a>) -> Option<Answered> {
        let caller = Caller::of(call.thread)?;
        let socket = caller.descriptor(call.arguments[0])?;
        if socket_domain(&socket).ok()? != AddressFamily::INET {
            return None;
        }
        let namespace = notify::of_socket(&socket).ok()?;
        let answer = match self.administered(&caller, &namespace, worker) {
            Some(space) => {
                self.give_lead(worker);
                self.option_of(call, &space, caller.process)
            }
            None => Err(Errno::EPERM),
        };
        let answer = match answer {
            Ok(answer) => answer,
            Err(errno) => Answer::Errno(errno as i32),
        };
        Some((answer, None))
    }

    fn option_of(&self, call: &Call, space: &Space, process: u32) -> Result<Answer, Errno> {
        let Some(memory) = Memory::of(call, &self.listener) else {
            return Ok(Answer::Sent);
        };
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
        if room < request.len() || room > LENGTH_MAX {
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
        let written = match options::keeps_length(option) {
            true => room,
            false => answer.len(),
        };
        let written = u32::try_from(written).map_err(|_| Errno::EINVAL)?;
        memory
            .write(length, &written.to_ne_bytes())
            .map_err(fault)?;
        Ok(Answer::Value(0))
    }
}

/// Whether the supervisor has given this socket to a program.
pub(super) fn is_placed(socket: &OwnedFd) -> bool {
    getsockopt(socket, sockopt::Mark).is_ok_and(|mark| mark == MARK)
}

/// Longest buffer of an option: the kernel reads the length as `int`.
const LENGTH_MAX: usize = i32::MAX as usize;

/// The low half of an argument, which the kernel reads as `int`.
fn int(argument: u64) -> i32 {
    ((argument & 0xffff_ffff) as u32).cast_signed()
}

/// The network namespace of this thread.
fn own_network() -> io::Result<NamespaceId> {
    NamespaceId::of(&File::open("/proc/thread-self/ns/net")?)
}
