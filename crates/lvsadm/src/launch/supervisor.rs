//! The supervisor: answers the reported system calls of a program and of all processes that it
//! starts.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lvs_api::Address;
use lvs_sys::lock;
use lvs_sys::notify::{self, Answer, Call, Kind, Listener, NamespaceId, Places};
use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{SockFlag, SockType, getsockopt, setsockopt, sockopt};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::net::sockopt::{socket_domain, socket_protocol};
use rustix::net::{AddressFamily, netlink};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::caller::{self, Buffers, Caller, Source as _};
use super::space::{Rest, Space, generic_socket, port_of};
use super::{family, log, options, wire};

/// Maximum number of threads; each answers a call or sends the rest of a dump.
const THREADS_MAX: usize = 64;
/// Maximum number of network namespaces in use at the same time.
const SPACES_MAX: usize = 256;
/// Time after which an unused namespace is released, so that the kernel can remove it.
const IDLE: Duration = Duration::from_secs(60);
/// Interval in milliseconds of [`sweep`](Supervisor::sweep).
const SWEEP: u16 = 1_000;
/// Milliseconds after which another thread receives calls, because a call takes long: its thread
/// waits for the caller's memory, or for the dataplane.
const LONG: u16 = 10;
/// Mark (`SO_MARK`) of the sockets that the supervisor creates for programs that may administer
/// IPVS. Only such programs may set a mark, so no other socket has it. An unprivileged program
/// therefore gains nothing by making a privileged one write a request to its socket.
const MARK: u32 = 0x6c76_7372;
/// Maximum number of programs of which the supervisor stores whether they use libnl.
const PROGRAMS_MAX: usize = 256;

/// The bits of a socket type that are not flags.
const SOCKET_TYPE: i32 = 0xf;

#[derive(Debug)]
pub(super) struct Supervisor {
    listener: Listener,
    places: Places,
    /// The network namespace of the launcher, whose dataplane is at `address`.
    start: NamespaceId,
    address: Option<Address>,
    /// Whether servers with NAT get full NAT.
    full_nat: bool,
    spaces: Mutex<HashMap<NamespaceId, Arc<Space>>>,
    /// Locked while a free descriptor number is chosen and used.
    placing: Mutex<()>,
    /// For each program, by device and inode: whether it uses libnl.
    programs: Mutex<HashMap<(u64, u64), bool>>,
    threads: AtomicUsize,
    /// Whether the supervisor has logged that it reached a limit (namespaces or descriptors). It
    /// logs only the first such event.
    has_complained: AtomicBool,
    /// The number of the only thread that receives calls: the kernel would wake all threads that
    /// wait for a call.
    turn: AtomicU64,
    /// Number of calls that were received.
    received: AtomicU64,
    /// Whether the receiving thread is answering a call.
    is_answering: AtomicBool,
    /// Whether the main thread checks every [`LONG`] whether a call takes long.
    is_watching: AtomicBool,
    wake: EventFd,
    /// Whether a thread is connecting to a dataplane again.
    is_reconnecting: AtomicBool,
}

#[derive(Debug, Default)]
pub(super) struct Worker {
    /// The network namespace of this thread; `None` if the thread has not entered one.
    here: Option<NamespaceId>,
    /// The caller of the last call.
    last: Option<Caller>,
}

impl Worker {
    /// Moves this thread to a network namespace; `None` if that fails.
    fn enter(&mut self, id: NamespaceId, namespace: &File) -> Option<()> {
        if self.here != Some(id) {
            self.here = None;
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(namespace.as_fd(), kind).ok()?;
            self.here = Some(id);
        }
        Some(())
    }

    /// Moves this thread to the network namespace of a caller; `None` if that fails.
    pub(super) fn follow(&mut self, caller: &Caller) -> Option<()> {
        let namespace = caller.open_network()?;
        self.enter(NamespaceId::of(&namespace).ok()?, &namespace)
    }
}

/// The answer to a call, and the rest of a dump to send after it.
type Answered = (Answer, Option<Rest>);

impl Supervisor {
    /// Creates the supervisor for the system calls that the seccomp listener `listener` reports.
    ///
    /// # Errors
    ///
    /// `/proc` is not mounted, or no descriptor is available.
    pub(super) fn new(
        listener: Listener,
        places: Places,
        address: Option<Address>,
        full_nat: bool,
    ) -> io::Result<Self> {
        Ok(Self {
            listener,
            places,
            start: own_network()?,
            address,
            full_nat,
            spaces: Mutex::default(),
            placing: Mutex::default(),
            programs: Mutex::default(),
            threads: AtomicUsize::new(0),
            has_complained: AtomicBool::new(false),
            turn: AtomicU64::new(0),
            received: AtomicU64::new(0),
            is_answering: AtomicBool::new(false),
            is_watching: AtomicBool::new(false),
            is_reconnecting: AtomicBool::new(false),
            wake: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
        })
    }

    /// Answers calls until the last process under the filter has ended.
    pub(super) fn run(self: &Arc<Self>) {
        self.listener.wake_on_this_processor();
        self.start_thread(0);
        let mut swept = Instant::now();
        let mut seen = 0;
        loop {
            let is_watching = self.is_watching.load(Ordering::SeqCst);
            let period = if is_watching { LONG } else { SWEEP };
            // The kernel always reports a hang-up.
            let mut ends = [
                PollFd::new(self.listener.as_fd(), PollFlags::empty()),
                PollFd::new(self.wake.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut ends, period) {
                Ok(_) if ends[0].any() == Some(true) => return,
                Ok(_) => {}
                Err(Errno::EINTR) => {}
                Err(error) => {
                    log(&format!(
                        "the supervisor stops: cannot wait until the program exits: {error}"
                    ));
                    return;
                }
            }
            let _ = self.wake.read();
            if is_watching {
                self.watch(&mut seen);
            }
            if swept.elapsed() >= Duration::from_millis(SWEEP.into()) {
                self.sweep();
                swept = Instant::now();
            }
        }
    }

    /// Makes another thread receive calls if the receiving thread has been answering the same call
    /// since the last check; `seen` is the number of calls at that check. If no call is being
    /// answered, ends these checks until the next call.
    fn watch(self: &Arc<Self>, seen: &mut u64) {
        let turn = self.turn.load(Ordering::SeqCst);
        let received = self.received.load(Ordering::SeqCst);
        if received != *seen {
            *seen = received;
            return;
        }
        if self.is_answering.load(Ordering::SeqCst) {
            self.start_thread(turn);
        } else {
            // The next call wakes this thread. A call that arrived in between has seen that this
            // thread is watching.
            self.is_watching.store(false, Ordering::SeqCst);
            if self.received.load(Ordering::SeqCst) != received {
                self.is_watching.store(true, Ordering::SeqCst);
            }
        }
    }

    /// Logs that the supervisor has reached a limit, unless it has logged such an event before.
    fn complain(&self, text: &str) {
        if !self.has_complained.swap(true, Ordering::Relaxed) {
            log(text);
        }
    }

    /// Releases unused namespaces, except the launcher's: while the program manages services there,
    /// lvsd cannot start. Also frees old listings, tries to acquire locks again, and reconnects to
    /// dataplanes that have restarted.
    fn sweep(self: &Arc<Self>) {
        let mut spaces = lock(&self.spaces);
        spaces.retain(|id, space| {
            space.forget_listing();
            space.retry_lock();
            *id == self.start || lock(&space.used).elapsed() < IDLE
        });
        let lost = spaces.values().filter(|space| space.has_lost());
        let lost: Vec<_> = lost.cloned().collect();
        drop(spaces);
        if lost.is_empty() || self.is_reconnecting.swap(true, Ordering::SeqCst) {
            return;
        }
        let own = self.clone();
        let name = "lvs-run-again".to_owned();
        let started = std::thread::Builder::new().name(name).spawn(move || {
            let mut worker = Worker::default();
            for space in lost {
                if worker.enter(space.id, &space.namespace).is_some() {
                    space.reconnect();
                }
            }
            own.is_reconnecting.store(false, Ordering::SeqCst);
        });
        if started.is_err() {
            self.is_reconnecting.store(false, Ordering::SeqCst);
        }
    }

    /// Starts a thread that receives calls in place of the thread with the number `turn`, which may
    /// have to wait. Does nothing if there are too many threads.
    fn start_thread(self: &Arc<Self>, turn: u64) {
        if self.threads.fetch_add(1, Ordering::SeqCst) >= THREADS_MAX {
            self.threads.fetch_sub(1, Ordering::SeqCst);
            return;
        }
        let own = self.clone();
        let name = "lvs-run-calls".to_owned();
        let started = std::thread::Builder::new()
            .name(name)
            .spawn(move || own.serve(turn));
        if let Err(error) = started {
            self.threads.fetch_sub(1, Ordering::SeqCst);
            log(&format!(
                "cannot start another thread that answers system calls: {error}"
            ));
        }
    }

    /// Receives calls in place of the thread `before`, and answers them until another thread takes
    /// over.
    fn serve(self: Arc<Self>, before: u64) {
        let order = Ordering::SeqCst;
        let turn = before + 1;
        let taken = self.turn.compare_exchange(before, turn, order, order);
        if taken.is_ok() {
            self.is_answering.store(false, order);
            self.serve_turn(turn);
        }
        self.threads.fetch_sub(1, order);
    }

    fn serve_turn(self: &Arc<Self>, turn: u64) {
        // Each worker starts in the namespace of the creating thread.
        let mut worker = Worker::default();
        while self.turn.load(Ordering::SeqCst) == turn {
            let call = match self.listener.receive() {
                Ok(Some(call)) => call,
                Ok(None) => continue,
                // A caller has exited, or a signal has arrived. If all callers have exited, the
                // main thread ends this process.
                Err(_) => {
                    std::thread::yield_now();
                    continue;
                }
            };
            self.is_answering.store(true, Ordering::SeqCst);
            self.received.fetch_add(1, Ordering::SeqCst);
            if !self.is_watching.swap(true, Ordering::SeqCst) {
                let _ = self.wake.write(1);
            }
            let (answer, rest) = self
                .answer(&call, &mut worker)
                .unwrap_or((Answer::Continue, None));
            self.listener.respond(call.id, answer);
            if let Some(rest) = rest {
                self.start_thread(turn);
                rest.send();
            }
            if self.turn.load(Ordering::SeqCst) == turn {
                self.is_answering.store(false, Ordering::SeqCst);
            }
        }
    }

    /// Returns the answer to a call; `None` if the kernel handles it.
    fn answer(&self, call: &Call, worker: &mut Worker) -> Option<Answered> {
        let caller = Caller::of(call.thread, worker.last.take())?;
        let answered = match call.kind {
            Kind::Socket => self.socket(call, &caller, worker),
            Kind::Sendto | Kind::Sendmsg | Kind::Write | Kind::Writev => {
                self.send(call, &caller, worker)
            }
            Kind::Recvfrom | Kind::Recvmsg => self.receive(call, &caller),
            Kind::Getsockopt | Kind::Setsockopt => self.option(call, &caller, worker),
        };
        worker.last = Some(caller);
        answered
    }

    /// Enters the network namespace of a socket, if the caller may administer the namespace.
    fn of_socket(
        &self,
        caller: &Caller,
        socket: &OwnedFd,
        worker: &mut Worker,
    ) -> Option<Arc<Space>> {
        match self.known(notify::cookie_of_socket(socket).ok()?) {
            Some(space) => self.administered(caller, space, worker),
            None => {
                let namespace = notify::of_socket(socket).ok()?;
                self.opened(caller, namespace, worker)
            }
        }
    }

    /// Returns the namespace with this cookie, if it is in use.
    fn known(&self, cookie: u64) -> Option<Arc<Space>> {
        let spaces = lock(&self.spaces);
        let found = spaces.values().find(|space| space.cookie == cookie);
        found.cloned()
    }

    /// Enters a network namespace that is in use, if the caller may administer it.
    fn administered(
        &self,
        caller: &Caller,
        space: Arc<Space>,
        worker: &mut Worker,
    ) -> Option<Arc<Space>> {
        if !caller.may_administer(&space.owners) {
            return None;
        }
        worker.enter(space.id, &space.namespace)?;
        *lock(&space.used) = Instant::now();
        Some(space)
    }

    /// Enters a network namespace, if the caller may administer it.
    fn opened(&self, caller: &Caller, namespace: File, worker: &mut Worker) -> Option<Arc<Space>> {
        let id = NamespaceId::of(&namespace).ok()?;
        let known = lock(&self.spaces).get(&id).cloned();
        if let Some(space) = known {
            return self.administered(caller, space, worker);
        }
        let owners = notify::owners(&namespace).ok()?;
        if !caller.may_administer(&owners) {
            return None;
        }
        self.open_space(id, namespace, owners, worker)
    }

    /// Enters a network namespace that was not in use. `None` if that fails, or if too many
    /// namespaces are in use.
    fn open_space(
        &self,
        id: NamespaceId,
        namespace: File,
        owners: Vec<NamespaceId>,
        worker: &mut Worker,
    ) -> Option<Arc<Space>> {
        worker.enter(id, &namespace)?;
        let mut spaces = lock(&self.spaces);
        if spaces.len() >= SPACES_MAX && id != self.start {
            self.complain(&format!(
                "the program uses more than {SPACES_MAX} network namespaces: lvs-run provides no IPVS in the others"
            ));
            return None;
        }
        let address = self.address.clone().filter(|_| id == self.start);
        let space = Arc::new(Space::here(id, namespace, owners, address, self.full_nat).ok()?);
        // Another thread may have created it first.
        let space = spaces.entry(id).or_insert(space);
        Some(space.clone())
    }

    /// Enters the network namespace of a caller that reads or changes a file; `None` if the caller
    /// may not do this, or the namespace cannot be entered. Any caller may read the files of
    /// namespaces in use, and of the launcher's namespace.
    pub(super) fn of_file(
        &self,
        caller: &Caller,
        changes: bool,
        worker: &mut Worker,
    ) -> Option<Arc<Space>> {
        let id = caller.network()?;
        let known = lock(&self.spaces).get(&id).cloned();
        match known {
            Some(space) if changes => self.administered(caller, space, worker),
            Some(space) => {
                worker.enter(space.id, &space.namespace)?;
                Some(space)
            }
            None if id == self.start && !changes => {
                let namespace = caller.open_network()?;
                let owners = notify::owners(&namespace).ok()?;
                self.open_space(NamespaceId::of(&namespace).ok()?, namespace, owners, worker)
            }
            None => self.opened(caller, caller.open_network()?, worker),
        }
    }

    /// Creates a generic netlink socket for the caller, at a descriptor number at which the filter
    /// reports calls. `None` lets the kernel create the socket.
    fn socket(&self, call: &Call, caller: &Caller, worker: &mut Worker) -> Option<Answered> {
        // A program that may not administer IPVS gets the kernel's own socket.
        let known = lock(&self.spaces).get(&caller.network()?).cloned();
        match known {
            Some(space) => self.administered(caller, space, worker)?,
            None => self.opened(caller, caller.open_network()?, worker)?,
        };
        let argument = int(call.arguments[1]);
        let kind = match argument & SOCKET_TYPE {
            libc::SOCK_RAW => SockType::Raw,
            libc::SOCK_DGRAM => SockType::Datagram,
            _ => return None,
        };
        let flags = SockFlag::from_bits(argument & !SOCKET_TYPE)?;
        let socket = generic_socket(kind, flags | SockFlag::SOCK_CLOEXEC).ok()?;
        setsockopt(&socket, sockopt::Mark, &MARK).ok()?;
        let places = match self.uses_libnl(caller) {
            true => self.places.plain.clone(),
            false => self.places.strict.clone(),
        };
        let _placing = lock(&self.placing);
        // The highest free number: the program's own descriptors get the lowest free ones at any
        // time.
        let is_free = |place: &u32| caller.descriptor((*place).into()).is_none();
        let free = places.clone().rev().find(is_free);
        let Some(place) = free else {
            log(&format!(
                "thread {} has {} generic netlink sockets: lvs-run has refused another one",
                caller.thread,
                places.len()
            ));
            return Some((Answer::Errno(Errno::EMFILE as i32), None));
        };
        let close_on_exec = flags.contains(SockFlag::SOCK_CLOEXEC);
        let answer = match self.listener.add(call.id, &socket, place, close_on_exec) {
            Ok(()) => Answer::Sent,
            Err(error) if error.raw_os_error() == Some(libc::EBADF) => {
                self.complain(&format!(
                    "thread {} cannot use IPVS over netlink: its limit of descriptors is {place} or lower; raise it above {place} (ulimit -n)",
                    caller.thread
                ));
                return None;
            }
            Err(error) => Answer::Errno(error.raw_os_error().unwrap_or(libc::EMFILE)),
        };
        Some((answer, None))
    }

    /// Whether a process uses libnl, which accepts answers from any port. Other programs receive
    /// answers from port 0, the kernel's.
    fn uses_libnl(&self, caller: &Caller) -> bool {
        let Some(program) = caller.program() else {
            return false;
        };
        if let Some(known) = lock(&self.programs).get(&program) {
            return *known;
        }
        let maps = caller.maps();
        let library = b"/libnl-genl-3.so";
        let uses = maps.windows(library.len()).any(|bytes| bytes == library);
        let mut programs = lock(&self.programs);
        if programs.len() >= PROGRAMS_MAX {
            programs.clear();
        }
        programs.insert(program, uses);
        uses
    }

    /// Copies the caller's descriptor `number`, if it is a generic netlink socket that the
    /// supervisor has created.
    fn generic(caller: &Caller, number: u64) -> Option<OwnedFd> {
        let socket = caller.descriptor(number)?;
        let is_netlink = socket_domain(&socket).is_ok_and(|it| it == AddressFamily::NETLINK);
        let is_generic = socket_protocol(&socket).is_ok_and(|it| it == Some(netlink::GENERIC));
        (is_netlink && is_generic && is_placed(&socket)).then_some(socket)
    }

    fn send(&self, call: &Call, caller: &Caller, worker: &mut Worker) -> Option<Answered> {
        let socket = Self::generic(caller, call.arguments[0])?;
        let space = self.of_socket(caller, &socket, worker)?;
        let bytes = caller::sent(call, &caller.look())?;
        if !wire::messages(&bytes).any(|message| family::is_ours(&message)) {
            return None;
        }
        // From here on, the copy is used only if the caller still waits.
        if !self.listener.is_valid(call.id) {
            return Some((Answer::Sent, None));
        }
        let refused = |errno: Errno| Some((Answer::Errno(errno as i32), None));
        let Some(port) = port_of(&socket, || caller.process()) else {
            return refused(Errno::EADDRINUSE);
        };
        let mut datagrams = Vec::new();
        {
            let mut dataplane = space.dataplane(caller.thread);
            let mut dumps = 0;
            for message in wire::messages(&bytes) {
                dumps += usize::from(message.is_dump());
                if message.is_dump() && dumps > 1 {
                    // The kernel, too, refuses a dump while another one is in progress.
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

    /// Receives answers for a program whose library accepts only answers from the kernel. `None`
    /// lets the kernel handle the call.
    fn receive(&self, call: &Call, caller: &Caller) -> Option<Answered> {
        let socket = Self::generic(caller, call.arguments[0])?;
        // Before the first request in this namespace, there are no answers: the kernel handles the
        // call.
        let space = self.known(notify::cookie_of_socket(&socket).ok()?)?;
        let buffers = Buffers::of(call, caller.memory(call, &self.listener)?)?;
        let port = port_of(&socket, || caller.process())?;
        if !self.listener.is_valid(call.id) {
            return Some((Answer::Sent, None));
        }
        let mut bytes = vec![0; buffers.room()];
        let mut control = vec![0; buffers.control];
        let received = loop {
            match notify::receive(&socket, &mut bytes, &mut control, buffers.flags) {
                Ok(received) => break received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if buffers.flags & libc::MSG_DONTWAIT != 0 || is_non_blocking(&socket) {
                        return Some((Answer::Errno(libc::EAGAIN), None));
                    }
                    // If no dump is being sent, the kernel waits for the datagram.
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

    /// Answers `getsockopt` and `setsockopt` of the old interface; `None` lets the kernel handle
    /// the call.
    fn option(&self, call: &Call, caller: &Caller, worker: &mut Worker) -> Option<Answered> {
        let socket = caller.descriptor(call.arguments[0])?;
        if socket_domain(&socket).ok()? != AddressFamily::INET {
            return None;
        }
        let answer = match self.of_socket(caller, &socket, worker) {
            Some(space) => self.option_of(call, caller, &space),
            None => Err(Errno::EPERM),
        };
        let answer = match answer {
            Ok(answer) => answer,
            Err(errno) => Answer::Errno(errno as i32),
        };
        Some((answer, None))
    }

    fn option_of(&self, call: &Call, caller: &Caller, space: &Space) -> Result<Answer, Errno> {
        let Some(memory) = caller.memory(call, &self.listener) else {
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
        let mut dataplane = space.dataplane(caller.thread);
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

/// Whether the supervisor has created this socket for a program.
pub(super) fn is_placed(socket: &OwnedFd) -> bool {
    getsockopt(socket, sockopt::Mark).is_ok_and(|mark| mark == MARK)
}

/// Whether a program has set `O_NONBLOCK`.
fn is_non_blocking(socket: &OwnedFd) -> bool {
    fcntl_getfl(socket).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK))
}

/// Maximum length in bytes of an option's buffer: the kernel reads the length as `int`.
const LENGTH_MAX: usize = i32::MAX as usize;

/// The lower 32 bits of an argument, which the kernel reads as `int`.
fn int(argument: u64) -> i32 {
    ((argument & 0xffff_ffff) as u32).cast_signed()
}

/// Returns the network namespace of this thread.
fn own_network() -> io::Result<NamespaceId> {
    NamespaceId::of(&File::open("/proc/thread-self/ns/net")?)
}
