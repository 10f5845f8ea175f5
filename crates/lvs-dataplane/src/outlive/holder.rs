//! The process that holds what outlives an engine: descriptors and nothing else.
//!
//! It listens at an abstract name, which the kernel frees with it and which every network namespace
//! has its own of, so that there is one for each engine. Whoever asks has to be of its user.

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
use crate::lock::lock;
use lvs_api::Address;
use lvs_sys::Poller;
use lvs_sys::peercred::{own_uid, peer_cred};

/// The argument with which an engine's program becomes a holder.
const ARGUMENT: &str = "--hold";
/// How long a new holder may take to listen.
const START: Duration = Duration::from_secs(2);
/// How long an engine waits for an answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long the holder waits for a question, while others wait.
const HASTE: Duration = Duration::from_millis(200);
/// How often a holder looks whether anybody will come.
const LOOK: Duration = Duration::from_secs(1);
/// For an engine to say what is to be held.
const EMPTY: Duration = Duration::from_secs(60);
/// Shields at a time: that of an engine that was killed, and its successors'.
const SHIELDS: usize = 4;

/// What is asked of a holder, a byte each; all but the first with an answer of one byte.
mod ask {
    /// The memory, with the answer's descriptor if there is one.
    pub(super) const GIVE: u8 = b'?';
    /// This is the memory.
    pub(super) const MEMORY: u8 = b'm';
    /// This is a shield, to be held beside those before it.
    pub(super) const SHIELD: u8 = b's';
    /// Shields but the last one can go, and the device.
    pub(super) const LAST: u8 = b'l';
    /// This is the device that packets are routed through; all shields can go.
    pub(super) const DEVICE: u8 = b'd';
    /// The device, with the answer's descriptor if there is one.
    pub(super) const GIVE_DEVICE: u8 = b'D';
    /// Nobody will come.
    pub(super) const END: u8 = b'e';
}

/// The answer when it is done; anything else says that it is not.
const DONE: u8 = b'+';

/// An engine's holder, as the engine sees it.
#[derive(Debug)]
pub struct Holder {
    name: Vec<u8>,
    /// With a lock that other engines see.
    memory: File,
    /// If this process has started it.
    child: Mutex<Option<Child>>,
}

fn refused(what: impl Into<String>) -> io::Error {
    io::Error::other(what.into())
}

impl Holder {
    /// The holder for the engine of this name, which is started if there is none. For a process
    /// that may still start programs.
    ///
    /// # Errors
    /// If none can be started, it belongs to somebody else, or another engine uses it.
    pub fn of(name: &str) -> io::Result<Self> {
        let name = format!("lvs-outlive:{name}").into_bytes();
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

    /// Goes on with memory of its own, which the holder does not have yet, and gives the other.
    pub(super) fn take_other_memory(&mut self) -> io::Result<File> {
        let own = memory_file()?;
        Ok(mem::replace(&mut self.memory, locked(own.as_fd())?))
    }

    /// The holder is to have the memory that the engine has.
    pub(super) fn hold_memory(&self) -> io::Result<()> {
        let shared = opened(self.memory.as_fd())?;
        call(&self.name, ask::MEMORY, Some(shared.as_fd())).map(drop)
    }

    pub(super) const fn memory(&self) -> &File {
        &self.memory
    }

    /// How long the memory is.
    pub(super) fn len(&self) -> Option<u64> {
        self.memory.metadata().ok().map(|meta| meta.len())
    }

    /// Whether an engine has left something.
    pub(crate) fn is_used(&self) -> bool {
        self.len().is_some_and(|len| len > 0)
    }

    /// Gives empty memory its length, for good: whoever maps it is killed where it has become
    /// shorter.
    pub(super) fn resize(&self, len: u64) -> io::Result<()> {
        self.memory.set_len(len)?;
        lvs_sys::seal(&self.memory)
    }

    /// Lets what hides packets from the host outlive this engine, too.
    ///
    /// # Errors
    /// If the holder is gone.
    pub(crate) fn hold_shield(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        call(&self.name, ask::SHIELD, Some(socket)).map(drop)
    }

    /// The engine's own shield is in place: those of engines before it can go.
    pub(crate) fn keep_last_shield(&self) -> io::Result<()> {
        call(&self.name, ask::LAST, None).map(drop)
    }

    /// Lets the device that the host routes packets through outlive this engine.
    pub(crate) fn hold_device(&self, device: BorrowedFd<'_>) -> io::Result<()> {
        call(&self.name, ask::DEVICE, Some(device)).map(drop)
    }

    /// The device that an engine has left; a holder of an earlier version knows of none.
    pub(crate) fn device(&self) -> Option<OwnedFd> {
        call(&self.name, ask::GIVE_DEVICE, None).ok().flatten()
    }

    /// An orderly end: nobody is to find anything.
    pub(crate) fn end(&self) {
        // The memory itself stays as long as it is: whoever touched it would be killed.
        let _ = call(&self.name, ask::END, None);
        let child = lock(&self.child).take();
        if let Some(mut child) = child {
            // It has nothing more to do.
            let ended = Instant::now();
            while matches!(child.try_wait(), Ok(None)) && ended.elapsed() < HASTE {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Takes away what an engine of this name has left; `false` if there is nothing.
    ///
    /// # Errors
    /// If it belongs to somebody else, or an engine uses it.
    pub fn clean_up(name: &str) -> io::Result<bool> {
        let abstract_name = format!("lvs-outlive:{name}").into_bytes();
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

/// Another description of a file of memory.
fn opened(memory: BorrowedFd<'_>) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    File::options().read(true).write(true).open(path)
}

/// The same, with a lock that is the engine's then, and not the holder's.
fn locked(shared: BorrowedFd<'_>) -> io::Result<File> {
    let memory = opened(shared)?;
    flock(&memory, FlockOperation::NonBlockingLockExclusive)
        .map_err(|_| refused("another engine has the holder of this name"))?;
    Ok(memory)
}

/// An empty file of memory, whose length is not fixed yet.
fn memory_file() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    Ok(memfd_create("lvs-table", flags)?)
}

fn new_memory(name: &[u8]) -> io::Result<OwnedFd> {
    let memory = memory_file()?;
    call(name, ask::MEMORY, Some(memory.as_fd()))?;
    Ok(memory)
}

/// Starts a holder, and waits until it listens.
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
        // What a terminal sends to the engine is not for it.
        .process_group(0);
    let mut child = command.spawn()?;
    let started = Instant::now();
    while connect(name).is_err() {
        if let Some(status) = child.try_wait()? {
            return Err(refused(format!("the holder has ended: {status}")));
        }
        if started.elapsed() > START {
            let _ = child.kill();
            let _ = child.wait();
            return Err(refused("the holder does not answer"));
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(child)
}

fn connect(name: &[u8]) -> io::Result<UnixStream> {
    let stream = Address::Abstract(name.to_vec()).connect()?;
    if peer_cred(&stream)?.uid != own_uid() {
        return Err(refused("the holder of this name belongs to another user"));
    }
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Asks for one thing; gives the descriptor that comes with the answer. To ask twice does no harm.
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

/// Whether a holder was there that did not hear: it is about to end, and its name to be free, or it
/// has waited long enough for a question on a busy machine.
fn is_hung_up(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

fn call_once(name: &[u8], what: u8, with: Option<BorrowedFd<'_>>) -> io::Result<Option<OwnedFd>> {
    let stream = connect(name)?;
    send(&stream, what, with)?;
    let (answer, descriptor) = receive(&stream)?;
    if answer != DONE {
        return Err(refused("the holder refuses"));
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

// --- the holder itself -------------------------------------------------------------------------

/// What is held.
#[derive(Debug, Default)]
struct Held {
    memory: Option<File>,
    shields: Vec<OwnedFd>,
    device: Option<OwnedFd>,
}

impl Held {
    /// Does what is asked; `None` if nobody will come any more.
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

    /// Whether a dataplane may come for what is held. It is read, not mapped: memory of a dataplane
    /// that is starting is empty.
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

/// Holds what the engine of this name gives, until nobody will come for it: the whole program of a
/// holder.
///
/// # Errors
/// If the name is taken, or what everybody needs is refused.
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
                    // The name is free when this is heard: nobody comes for a holder that ends.
                    drop(listener);
                    let _ = send(&stream, DONE, None);
                    return Ok(());
                }
                // Whoever that was is gone.
                Err(_) => {}
            },
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                poller.clear();
                poller.add(listener.as_fd());
                poller.wait(Some(LOOK))?;
            }
            Err(_) => thread::sleep(LOOK),
        }
        if looked.elapsed() > LOOK {
            looked = Instant::now();
            if !held.is_worth_waiting() && started.elapsed() > EMPTY {
                return Ok(());
            }
        }
    }
}

/// Answers one question; `false` if there will be no others: that one is to be answered at the end.
fn serve(stream: &UnixStream, held: &mut Held) -> io::Result<bool> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(HASTE))?;
    stream.set_write_timeout(Some(HASTE))?;
    if peer_cred(stream)?.uid != own_uid() {
        return Ok(true);
    }
    // Somebody may just have looked whether there is a holder.
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

    use super::super::Outlive;
    use super::*;

    /// A holder on a thread of this process.
    fn holder(of: &str) -> (String, thread::JoinHandle<io::Result<()>>) {
        let name = format!("test-{of}-{}", std::process::id());
        let full = format!("lvs-outlive:{name}");
        let abstract_name = full.clone().into_bytes();
        let running = thread::spawn(move || hold(&full));
        while connect(&abstract_name).is_err() {
            thread::sleep(Duration::from_millis(1));
        }
        (name, running)
    }

    #[test]
    fn what_an_engine_has_left_is_found_once_and_read_by_others() -> io::Result<()> {
        let (name, running) = holder("found");
        let layout = Layout::new(1000, 7);
        let first = Outlive::open(layout, 1, Holder::of(&name)?)?;
        assert!(!first.is_successor());
        assert!(first.area().save(b"services"));
        let refused = Holder::of(&name).map(drop).expect_err("it is in use");
        assert!(refused.to_string().contains("another engine"), "{refused}");
        drop(first);
        // Another seed is no other layout: the one that was left counts.
        let second = Outlive::open(Layout::new(1000, 8), 1, Holder::of(&name)?)?;
        assert!(second.is_successor() && second.memories_left()?.is_none());
        assert_eq!(second.area().saved().as_deref(), Some(&b"services"[..]));
        drop(second);
        // With other tables, connections are read where they lie, until that is done.
        for (size, tables, were) in [(2000, 1, 1), (1000, 3, 1), (1000, 3, 3), (1000, 1, 3)] {
            let layout = Layout::new(size, 7);
            for done in [false, true] {
                let next = Outlive::open(layout, tables, Holder::of(&name)?)?;
                assert!(next.is_successor());
                assert_eq!(next.memories()?.len(), tables);
                let left = next.memories_left()?.map(|left| left.len());
                assert_eq!(left, Some(were), "{size} {tables}");
                assert_eq!(next.area().saved().as_deref(), Some(&b"services"[..]));
                Holder::of(&name).map(drop).expect_err("it is in use");
                if done {
                    next.has_taken_over()?;
                    assert!(next.memories_left()?.is_none());
                    Holder::of(&name).map(drop).expect_err("it is in use");
                }
            }
        }
        let last = Outlive::open(Layout::new(1000, 7), 1, Holder::of(&name)?)?;
        assert!(last.is_successor() && last.memories_left()?.is_none());
        last.end();
        running.join().expect("it ends")?;
        assert!(!Holder::clean_up(&name)?);
        Ok(())
    }

    /// What is not understood is not touched.
    #[test]
    fn one_that_finds_something_else_begins_anew() -> io::Result<()> {
        let (name, running) = holder("else");
        let layout = Layout::new(1000, 7);
        for (word, value) in [
            (head::VERSION, 99),
            (head::TABLE + 1, 99),
            (head::TABLES, 2),
            (head::TABLES, u64::MAX),
        ] {
            let before = Outlive::open(layout, 1, Holder::of(&name)?)?;
            before.set(word, value);
            drop(before);
            let after = Outlive::open(layout, 1, Holder::of(&name)?)?;
            assert!(!after.is_successor(), "{word}");
        }
        assert!(Holder::clean_up(&name)?);
        running.join().expect("it ends")
    }

    #[test]
    fn one_that_comes_too_late_begins_anew() -> io::Result<()> {
        let (name, running) = holder("late");
        let layout = Layout::new(1000, 7);
        let first = Outlive::open(layout, 1, Holder::of(&name)?)?;
        first.set(head::ALIVE, 0);
        drop(first);
        let second = Outlive::open(layout, 1, Holder::of(&name)?)?;
        assert!(!second.is_successor());
        drop(second);
        assert!(Holder::clean_up(&name)?);
        running.join().expect("it ends")
    }

    /// An engine that starts while the holder of the one before it ends gets one of its own.
    #[test]
    fn a_holder_that_hangs_up_is_asked_again() -> io::Result<()> {
        let name = format!("lvs-outlive:test-hangs-up-{}", std::process::id());
        let ending = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name.as_bytes())?)?;
        let holding = name.clone();
        let running = thread::spawn(move || {
            // One that is heard and gets no answer, one that waits in vain.
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
        let after = connect(&name).expect_err("its name is free");
        assert_eq!(after.kind(), io::ErrorKind::ConnectionRefused, "{after}");
        running.join().expect("it ends")
    }

    /// Anybody can take a name that is free, and leave those who come for it waiting.
    #[test]
    fn somebody_else_at_the_name_holds_nobody_up_for_long() -> io::Result<()> {
        let name = format!("test-deaf-{}", std::process::id());
        let full = format!("lvs-outlive:{name}");
        let address = SocketAddr::from_abstract_name(full.as_bytes())?;
        let deaf = UnixListener::bind_addr(&address)?;
        rustix::net::listen(&deaf, 0)?;
        let _waits = UnixStream::connect_addr(&address)?;
        let refused = Holder::of(&name).map(drop).expect_err("nobody answers");
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock, "{refused}");
        assert!(Holder::clean_up(&name).is_err());
        Ok(())
    }

    #[test]
    fn so_many_shields_are_held_and_no_more() -> io::Result<()> {
        let mut held = Held::default();
        let mut shields = Vec::new();
        for _ in 0..SHIELDS + 3 {
            let (ours, theirs) = UnixStream::pair()?;
            ours.set_nonblocking(true)?;
            shields.push(ours);
            let answer = held.answer(ask::SHIELD, Some(theirs.into()));
            assert!(matches!(answer, Some((DONE, None))));
        }
        // The other end of one that is let go says so.
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
        // An engine is behind a shield or a device.
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
