//! The state keeper: a process that keeps file descriptors for the next dataplane, in case the
//! present one is killed.
//!
//! It listens on an abstract Unix socket. The kernel frees the name when the process exits, and
//! each network namespace has its own names, so there is one state keeper for each dataplane. It
//! accepts only processes of its own user.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use rustix::cmsg_space;
use rustix::fs::{FlockOperation, MemfdFlags, flock, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::{head, is_worth_waiting};
use lvs_api::Address;
use lvs_sys::Poller;
use lvs_sys::lock;
use lvs_sys::peercred::{own_uid, peer_cred};

/// The argument that makes the dataplane's program a state keeper.
const ARGUMENT: &str = "--hold";
/// Time limit for a new state keeper to listen on its socket.
const START: Duration = Duration::from_secs(2);
/// Longest time that a dataplane waits for an answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time limit for the state keeper to read one client's request or write its answer, while other
/// clients wait; and for a dataplane to wait for the exit of its state keeper.
const HASTE: Duration = Duration::from_millis(200);
/// Interval at which a state keeper checks whether a dataplane can still use its descriptors.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// A state keeper without usable memory runs at least this long, so that a starting dataplane can
/// pass its memory.
const EMPTY: Duration = Duration::from_secs(60);
/// Maximum number of kept shields: of a killed dataplane, and of its successors.
const SHIELDS: usize = 4;

/// Requests to a state keeper, one byte each.
mod ask {
    /// Requests the memory; the answer contains the descriptor, if one is stored.
    pub(super) const GIVE: u8 = b'?';
    /// Passes the memory, which replaces the stored one.
    pub(super) const MEMORY: u8 = b'm';
    /// Passes a shield, which is kept in addition to the earlier ones.
    pub(super) const SHIELD: u8 = b's';
    /// Closes the device, and all shields except the last one.
    pub(super) const LAST: u8 = b'l';
    /// Passes the device into which the host routes packets, and closes all shields.
    pub(super) const DEVICE: u8 = b'd';
    /// Requests the device; the answer contains the descriptor, if one is stored.
    pub(super) const GIVE_DEVICE: u8 = b'D';
    /// Stops the state keeper: no dataplane will request its descriptors.
    pub(super) const END: u8 = b'e';
}

/// The answer to a request that has succeeded; any other byte means a failure.
const DONE: u8 = b'+';

/// The dataplane's connection to its state keeper.
#[derive(Debug)]
pub struct StateKeeper {
    name: Vec<u8>,
    /// The shared memory. A lock of this file excludes other dataplanes.
    memory: File,
    /// The state keeper's process, if this process has started it.
    child: Mutex<Option<Child>>,
}

fn refused(what: impl Into<String>) -> io::Error {
    io::Error::other(what.into())
}

impl StateKeeper {
    /// Connects to the state keeper of the dataplane of this name, or starts one. Call it while the
    /// process may still start programs.
    ///
    /// # Errors
    /// No state keeper can be started, or the running one does not answer, belongs to another user
    /// or is used by another dataplane.
    pub fn of(name: &str) -> io::Result<Self> {
        let name = format!("lvs-state:{name}").into_bytes();
        let mut child = None;
        let shared = match call(&name, ask::GIVE, None) {
            Ok(Some(memory)) => memory,
            Ok(None) => new_memory(&name)?,
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                child = Some(start(&name)?);
                new_memory(&name)?
            }
            Err(error) => return Err(error),
        };
        let memory = locked(shared.as_fd())?;
        let child = Mutex::new(child);
        Ok(Self {
            name,
            memory,
            child,
        })
    }

    /// Replaces the memory by new memory, which the state keeper does not have yet. Returns the old
    /// memory.
    pub(super) fn take_other_memory(&mut self) -> io::Result<File> {
        let own = memory_file()?;
        Ok(mem::replace(&mut self.memory, locked(own.as_fd())?))
    }

    /// Passes the dataplane's memory to the state keeper.
    pub(super) fn hold_memory(&self) -> io::Result<()> {
        let shared = opened(self.memory.as_fd())?;
        call(&self.name, ask::MEMORY, Some(shared.as_fd())).map(drop)
    }

    pub(super) const fn memory(&self) -> &File {
        &self.memory
    }

    /// The length of the memory in bytes; `None` if the kernel does not report it.
    pub(super) fn len(&self) -> Option<u64> {
        self.memory.metadata().ok().map(|meta| meta.len())
    }

    /// Whether an earlier dataplane has used the memory.
    pub(crate) fn is_used(&self) -> bool {
        self.len().is_some_and(|len| len > 0)
    }

    /// Sets the length of empty memory, and seals it: if the memory became shorter, the kernel
    /// would kill processes that have mapped it.
    pub(super) fn resize(&self, len: u64) -> io::Result<()> {
        self.memory.set_len(len)?;
        lvs_sys::seal(&self.memory)
    }

    /// Passes the socket of the shield to the state keeper, so that the shield stays in force if
    /// this dataplane is killed.
    ///
    /// # Errors
    /// The state keeper does not accept the socket, for example because it has exited.
    pub(crate) fn hold_shield(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        call(&self.name, ask::SHIELD, Some(socket)).map(drop)
    }

    /// Makes the state keeper close the shields and the TUN device of earlier dataplanes. Call it
    /// when this dataplane's shield is in force.
    pub(crate) fn keep_last_shield(&self) -> io::Result<()> {
        call(&self.name, ask::LAST, None).map(drop)
    }

    /// Passes the TUN device to the state keeper, so that the device stays if this dataplane is
    /// killed. The state keeper closes all shields.
    pub(crate) fn hold_device(&self, device: BorrowedFd<'_>) -> io::Result<()> {
        call(&self.name, ask::DEVICE, Some(device)).map(drop)
    }

    /// The TUN device of a predecessor; `None` if there is none or the request fails, for example
    /// because the state keeper's version does not support TUN devices.
    pub(crate) fn device(&self) -> Option<OwnedFd> {
        call(&self.name, ask::GIVE_DEVICE, None).ok().flatten()
    }

    /// Stops the state keeper at an orderly exit, so that the next dataplane starts without state.
    pub(crate) fn end(&self) {
        // The memory keeps its length: the kernel would kill a process that uses a removed page.
        let _ = call(&self.name, ask::END, None);
        let child = lock(&self.child).take();
        if let Some(mut child) = child {
            let ended = Instant::now();
            while matches!(child.try_wait(), Ok(None)) && ended.elapsed() < HASTE {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Removes the state that a dataplane of this name has left. Returns false if there is none.
    ///
    /// # Errors
    /// The state belongs to another user, a dataplane uses it, or the state keeper does not answer.
    pub fn clean_up(name: &str) -> io::Result<bool> {
        let abstract_name = format!("lvs-state:{name}").into_bytes();
        match connect(&abstract_name).map(drop) {
            Ok(()) => {
                Self::of(name)?.end();
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Opens the memory file again: the new open file description has a separate lock.
fn opened(memory: BorrowedFd<'_>) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    File::options().read(true).write(true).open(path)
}

/// As [`opened`], with a lock that the dataplane owns, not the state keeper.
fn locked(shared: BorrowedFd<'_>) -> io::Result<File> {
    let memory = opened(shared)?;
    flock(&memory, FlockOperation::NonBlockingLockExclusive)
        .map_err(|_| refused("another dataplane uses the state keeper of this name"))?;
    Ok(memory)
}

/// Creates an empty memory file, whose length can still change.
fn memory_file() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    Ok(memfd_create("lvs-table", flags)?)
}

fn new_memory(name: &[u8]) -> io::Result<OwnedFd> {
    let memory = memory_file()?;
    call(name, ask::MEMORY, Some(memory.as_fd()))?;
    Ok(memory)
}

/// Starts a state keeper, and waits until it listens.
fn start(name: &[u8]) -> io::Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("lvs-dataplane")
        .arg(ARGUMENT)
        .arg(String::from_utf8_lossy(name).into_owned())
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // Signals from the terminal to the dataplane must not reach the state keeper.
        .process_group(0);
    let mut child = command.spawn()?;
    let started = Instant::now();
    while connect(name).is_err() {
        if let Some(status) = child.try_wait()? {
            return Err(refused(format!("the state keeper has exited: {status}")));
        }
        if started.elapsed() > START {
            let _ = child.kill();
            let _ = child.wait();
            return Err(refused("the state keeper does not answer"));
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(child)
}

fn connect(name: &[u8]) -> io::Result<UnixStream> {
    let stream = Address::Abstract(name.to_vec()).connect()?;
    if peer_cred(&stream)?.uid != own_uid() {
        return Err(refused(
            "the state keeper of this name belongs to another user",
        ));
    }
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Sends one request, and repeats it for up to [`PATIENCE`] if a state keeper closes the connection
/// without an answer. Returns the descriptor in the answer.
fn call(name: &[u8], what: u8, with: Option<BorrowedFd<'_>>) -> io::Result<Option<OwnedFd>> {
    let started = Instant::now();
    loop {
        match call_once(name, what, with) {
            Err(error) if is_hung_up(&error) && started.elapsed() < PATIENCE => {
                thread::sleep(Duration::from_millis(5));
            }
            result => return result,
        }
    }
}

/// Whether the error means that a state keeper has closed the connection without an answer. Either
/// it is exiting and its name will be free soon, or it did not receive the request in time on a
/// busy machine.
fn is_hung_up(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

fn call_once(name: &[u8], what: u8, with: Option<BorrowedFd<'_>>) -> io::Result<Option<OwnedFd>> {
    let stream = connect(name)?;
    send(&stream, what, with)?;
    let (answer, descriptor) = receive(&stream)?;
    if answer != DONE {
        return Err(refused("the state keeper cannot handle the request"));
    }
    Ok(descriptor)
}

fn send(stream: &UnixStream, byte: u8, with: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = with.as_slice();
    if !descriptors.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let bytes = [byte];
    let bytes = [IoSlice::new(&bytes)];
    sendmsg(stream, &bytes, &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn receive(stream: &UnixStream) -> io::Result<(u8, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0];
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let got = recvmsg(stream, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    if got.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let descriptors = ancillary.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect(),
        _ => Vec::new(),
    });
    let descriptor = descriptors.last();
    Ok((bytes[0], descriptor))
}

// --- the state keeper itself ---------------------------------------------------------------

#[derive(Debug, Default)]
struct Held {
    memory: Option<File>,
    shields: Vec<OwnedFd>,
    device: Option<OwnedFd>,
}

impl Held {
    /// Handles a request. Returns the first byte of the answer, and the descriptor that the answer
    /// contains, if any; `None` if the state keeper must stop.
    fn answer(&mut self, what: u8, with: Option<OwnedFd>) -> Option<(u8, Option<BorrowedFd<'_>>)> {
        const REFUSED: u8 = b'-';
        match (what, with) {
            (ask::GIVE, None) => {
                return Some((DONE, self.memory.as_ref().map(AsFd::as_fd)));
            }
            (ask::MEMORY, Some(memory)) => self.memory = Some(memory.into()),
            (ask::SHIELD, Some(shield)) => {
                if self.shields.len() == SHIELDS {
                    self.shields.remove(0);
                }
                self.shields.push(shield);
            }
            (ask::LAST, None) => {
                let before = self.shields.len().saturating_sub(1);
                self.shields.drain(..before);
                self.device = None;
            }
            (ask::DEVICE, Some(device)) => {
                self.shields.clear();
                self.device = Some(device);
            }
            (ask::GIVE_DEVICE, None) => {
                return Some((DONE, self.device.as_ref().map(AsFd::as_fd)));
            }
            (ask::END, None) => return None,
            _ => return Some((REFUSED, None)),
        }
        Some((DONE, None))
    }

    /// Whether a dataplane can still use the descriptors. Reads the memory without mapping it,
    /// because the memory of a starting dataplane is empty.
    fn is_worth_waiting(&self) -> bool {
        let word = |number: usize| {
            let mut bytes = [0; 8];
            let memory = self.memory.as_ref()?;
            memory.read_exact_at(&mut bytes, number as u64 * 8).ok()?;
            Some(u64::from_ne_bytes(bytes))
        };
        let words = word(head::BASE).zip(word(head::ALIVE));
        words.is_some_and(|(base, alive)| is_worth_waiting(base, alive))
    }
}

/// Runs a state keeper until a dataplane stops it or no dataplane can use its descriptors any more.
///
/// # Errors
/// The name is in use, or the socket cannot be created or polled.
pub fn hold(name: &str) -> io::Result<()> {
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name.as_bytes())?)?;
    listener.set_nonblocking(true)?;
    let mut held = Held::default();
    let mut poller = Poller::new();
    let (mut looked, started) = (Instant::now(), Instant::now());
    loop {
        match listener.accept() {
            Ok((stream, _)) => match serve(&stream, &mut held) {
                Ok(true) => {}
                Ok(false) => {
                    // Free the name before the answer, so that the client does not connect to an
                    // exiting state keeper.
                    drop(listener);
                    let _ = send(&stream, DONE, None);
                    return Ok(());
                }
                // The client has closed its connection.
                Err(_) => {}
            },
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                poller.clear();
                poller.add(listener.as_fd());
                poller.wait(Some(CHECK_INTERVAL))?;
            }
            Err(_) => thread::sleep(CHECK_INTERVAL),
        }
        if looked.elapsed() > CHECK_INTERVAL {
            looked = Instant::now();
            if !held.is_worth_waiting() && started.elapsed() > EMPTY {
                return Ok(());
            }
        }
    }
}

/// Answers one request; ignores a request of another user. Returns false if the state keeper must
/// stop; the caller answers that request.
fn serve(stream: &UnixStream, held: &mut Held) -> io::Result<bool> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(HASTE))?;
    stream.set_write_timeout(Some(HASTE))?;
    if peer_cred(stream)?.uid != own_uid() {
        return Ok(true);
    }
    // The client may only have checked whether a state keeper exists.
    let Ok((what, with)) = receive(stream) else {
        return Ok(true);
    };
    match held.answer(what, with) {
        Some((answer, with)) => send(stream, answer, with).map(|()| true),
        None => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use lvs_core::memory::Layout;

    use super::super::WarmRestart;
    use super::*;

    /// A state keeper on a thread of this process.
    fn state_keeper(of: &str) -> (String, thread::JoinHandle<io::Result<()>>) {
        let name = format!("test-{of}-{}", std::process::id());
        let full = format!("lvs-state:{name}");
        let abstract_name = full.clone().into_bytes();
        let running = thread::spawn(move || hold(&full));
        while connect(&abstract_name).is_err() {
            thread::sleep(Duration::from_millis(1));
        }
        (name, running)
    }

    #[test]
    fn state_of_killed_dataplane_is_available_to_one_successor_with_any_tables() -> io::Result<()> {
        let (name, running) = state_keeper("found");
        let layout = Layout::new(1000, 7);
        let first = WarmRestart::open(layout, 1, StateKeeper::of(&name)?)?;
        assert!(!first.is_successor());
        assert!(first.area().save(b"services"));
        let refused = StateKeeper::of(&name)
            .map(drop)
            .expect_err("two dataplanes use one state keeper");
        assert!(
            refused.to_string().contains("another dataplane"),
            "{refused}"
        );
        drop(first);
        // The layout is equal; the seed in the memory is used.
        let second = WarmRestart::open(Layout::new(1000, 8), 1, StateKeeper::of(&name)?)?;
        assert!(second.is_successor() && second.memories_left()?.is_none());
        assert_eq!(second.area().saved().as_deref(), Some(&b"services"[..]));
        drop(second);
        // If the tables differ, connections are read from the old memory until all are copied.
        for (size, tables, were) in [(2000, 1, 1), (1000, 3, 1), (1000, 3, 3), (1000, 1, 3)] {
            let layout = Layout::new(size, 7);
            for done in [false, true] {
                let next = WarmRestart::open(layout, tables, StateKeeper::of(&name)?)?;
                assert!(next.is_successor());
                assert_eq!(next.memories()?.len(), tables);
                let left = next.memories_left()?.map(|left| left.len());
                assert_eq!(left, Some(were), "{size} {tables}");
                assert_eq!(next.area().saved().as_deref(), Some(&b"services"[..]));
                StateKeeper::of(&name)
                    .map(drop)
                    .expect_err("two dataplanes use one state keeper");
                if done {
                    next.has_taken_over()?;
                    assert!(next.memories_left()?.is_none());
                    StateKeeper::of(&name)
                        .map(drop)
                        .expect_err("two dataplanes use one state keeper");
                }
            }
        }
        let last = WarmRestart::open(Layout::new(1000, 7), 1, StateKeeper::of(&name)?)?;
        assert!(last.is_successor() && last.memories_left()?.is_none());
        last.end();
        running.join().expect("the keeper ends without a panic")?;
        assert!(!StateKeeper::clean_up(&name)?);
        Ok(())
    }

    /// A dataplane does not use memory with invalid content.
    #[test]
    fn successor_with_invalid_memory_header_starts_without_state() -> io::Result<()> {
        let (name, running) = state_keeper("else");
        let layout = Layout::new(1000, 7);
        for (word, value) in [
            (head::VERSION, 99),
            (head::TABLE + 1, 99),
            (head::TABLES, 2),
            (head::TABLES, u64::MAX),
        ] {
            let before = WarmRestart::open(layout, 1, StateKeeper::of(&name)?)?;
            before.set(word, value);
            drop(before);
            let after = WarmRestart::open(layout, 1, StateKeeper::of(&name)?)?;
            assert!(!after.is_successor(), "{word} {value}");
        }
        assert!(StateKeeper::clean_up(&name)?);
        running.join().expect("the keeper ends without a panic")
    }

    #[test]
    fn successor_after_deadline_starts_without_state() -> io::Result<()> {
        let (name, running) = state_keeper("late");
        let layout = Layout::new(1000, 7);
        let first = WarmRestart::open(layout, 1, StateKeeper::of(&name)?)?;
        first.set(head::ALIVE, 0);
        drop(first);
        let second = WarmRestart::open(layout, 1, StateKeeper::of(&name)?)?;
        assert!(!second.is_successor());
        drop(second);
        assert!(StateKeeper::clean_up(&name)?);
        running.join().expect("the keeper ends without a panic")
    }

    /// A dataplane may start while the state keeper of its predecessor is exiting.
    #[test]
    fn request_is_repeated_after_exiting_state_keeper_closes_connection() -> io::Result<()> {
        let name = format!("lvs-state:test-hangs-up-{}", std::process::id());
        let ending = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name.as_bytes())?)?;
        let holding = name.clone();
        let running = thread::spawn(move || {
            // One connection is accepted and closed without an answer. Later ones are closed before
            // they are accepted.
            drop(ending.accept()?);
            thread::sleep(Duration::from_millis(50));
            drop(ending);
            hold(&holding)
        });
        let name = name.into_bytes();
        while connect(&name).is_err() {
            thread::sleep(Duration::from_millis(1));
        }
        let asked = call(&name, ask::GIVE, None);
        if let Err(error) = &asked {
            assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{error}");
        }
        while call(&name, ask::END, None).is_err() {
            thread::sleep(Duration::from_millis(1));
        }
        let after = connect(&name).expect_err("the state keeper still listens");
        assert_eq!(after.kind(), io::ErrorKind::ConnectionRefused, "{after}");
        running.join().expect("the keeper ends without a panic")
    }

    /// Any local process can listen on a free name and let clients wait.
    #[test]
    fn unresponsive_process_with_name_of_state_keeper_causes_timeout_error() -> io::Result<()> {
        let name = format!("test-deaf-{}", std::process::id());
        let full = format!("lvs-state:{name}");
        let address = SocketAddr::from_abstract_name(full.as_bytes())?;
        let deaf = UnixListener::bind_addr(&address)?;
        rustix::net::listen(&deaf, 0)?;
        let _waits = UnixStream::connect_addr(&address)?;
        let refused = StateKeeper::of(&name)
            .map(drop)
            .expect_err("a process that does not answer was accepted as state keeper");
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock, "{refused}");
        assert!(StateKeeper::clean_up(&name).is_err());
        Ok(())
    }

    #[test]
    fn state_keeper_stores_bounded_number_of_shields_or_one_device() -> io::Result<()> {
        let mut held = Held::default();
        let mut shields = Vec::new();
        for _ in 0..SHIELDS + 3 {
            let (ours, theirs) = UnixStream::pair()?;
            ours.set_nonblocking(true)?;
            shields.push(ours);
            let answer = held.answer(ask::SHIELD, Some(theirs.into()));
            assert!(matches!(answer, Some((DONE, None))));
        }
        // The other end of a closed shield reads the end of the stream.
        let open = |shields: &[UnixStream]| {
            let waits = |mut shield: &UnixStream| {
                let read = io::Read::read(&mut shield, &mut [0]);
                read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
            };
            shields.iter().filter(|shield| waits(shield)).count()
        };
        assert_eq!(open(&shields), SHIELDS);
        assert!(held.answer(ask::LAST, None).is_some());
        assert_eq!(open(&shields), 1);
        assert!(matches!(held.answer(b'x', None), Some((answer, None)) if answer != DONE));
        // A dataplane has either a shield or a device.
        let (_ours, device) = UnixStream::pair()?;
        assert!(held.answer(ask::DEVICE, Some(device.into())).is_some());
        assert_eq!(open(&shields), 0);
        let given = held.answer(ask::GIVE_DEVICE, None);
        assert!(matches!(given, Some((DONE, Some(_)))));
        assert!(held.answer(ask::LAST, None).is_some());
        let given = held.answer(ask::GIVE_DEVICE, None);
        assert!(matches!(given, Some((DONE, None))));
        assert!(held.answer(ask::END, None).is_none());
        Ok(())
    }
}
