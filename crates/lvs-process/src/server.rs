//! The server of a control socket: one thread accepts connections, and one thread serves each
//! connection.
//!
//! A dataplane implements [`Handler`]; the server reads requests, checks the access rights, and
//! writes the answers. A slow reader delays only the thread that answers it.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use lvs_core::api::{Failure, FailureCode};

use super::admission::{CONNECTIONS_MAX, Place, Places, READERS_MAX, USER_MAX};
use super::connection::serve_connection;
use super::handler::write_error;
pub use super::handler::{Handler, Sink};
pub use super::listen::BindError;
use super::listen::Listener;
use lvs_api::Address;
use lvs_api::peer::{self, Own, Refusal};
use lvs_api::place::Lock;
use lvs_sys::peer_groups::peer_in_group;
use lvs_sys::peercred;

/// Maximum time for which a server that stops waits until answers are written.
const ANSWERS_PATIENCE: Duration = Duration::from_secs(1);

/// The groups whose members have access to the control socket.
#[derive(Clone, Copy, Debug, Default)]
pub struct Permissions {
    /// The group whose members have write access, in addition to root and the dataplane's own user;
    /// `None` for no group.
    pub writers: Option<u32>,
    /// The group whose members have read access, in addition to clients with write access. If
    /// absent, every user has read access.
    pub readers: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rights {
    /// The client may make all calls.
    Write,
    /// Read access, and the reason why changes are refused.
    Read(Refusal),
    /// The client may make no call.
    None,
}

/// A bound control socket.
#[derive(Debug)]
pub struct Server {
    listener: Listener,
    permissions: Permissions,
    own: Own,
}

impl Server {
    /// Listens at `address`. A socket file at which no process listens is replaced.
    ///
    /// # Errors
    /// A [`BindError`].
    pub fn bind(address: &Address, permissions: Permissions) -> Result<Self, BindError> {
        Ok(Self {
            listener: Listener::bind(address)?,
            permissions,
            own: Own::look(),
        })
    }

    /// The address on which the server listens: the abstract name if it cannot listen at the
    /// default path.
    pub const fn address(&self) -> &Address {
        &self.listener.address
    }

    /// Answers requests on separate threads until the handle is dropped.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn serve(self, dataplane: Arc<dyn Handler>) -> io::Result<Handle> {
        let stopping = Arc::new(AtomicBool::new(false));
        let places = Arc::<Places>::default();
        let address = self.address().clone();
        let lock = self.listener.lock.clone();
        let thread = {
            let (stopping, places) = (Arc::clone(&stopping), Arc::clone(&places));
            thread::Builder::new()
                .name("control".into())
                .spawn(move || self.accept(&dataplane, &places, &stopping))?
        };
        Ok(Handle {
            stopping,
            places,
            address,
            lock,
            thread: Some(thread),
        })
    }

    fn accept(self, dataplane: &Arc<dyn Handler>, places: &Arc<Places>, stopping: &AtomicBool) {
        loop {
            let accepted = self.listener.socket.accept();
            if stopping.load(Ordering::Acquire) {
                return;
            }
            let Ok((stream, _)) = accepted else {
                // Out of descriptors or memory: other threads may release some.
                thread::sleep(Duration::from_millis(20));
                continue;
            };
            match self.admit(&stream, places) {
                Ok((place, denied)) => {
                    let dataplane = Arc::clone(dataplane);
                    // Without a thread for it, the connection is closed.
                    let _ = thread::Builder::new()
                        .name("control-conn".into())
                        .spawn(move || {
                            // The only error is that the client has closed its connection.
                            let _ = serve_connection(&stream, &place, denied, &*dataplane);
                        });
                }
                Err(failure) => turn_away(stream, &failure),
            }
        }
    }

    /// Reserves a slot for a connection. Returns the slot, and for a client without write access
    /// the reason. The client is refused if it has no access, or no slot is free.
    fn admit(
        &self,
        stream: &UnixStream,
        places: &Arc<Places>,
    ) -> Result<(Place, Option<Refusal>), Failure> {
        let (uid, rights) = self.rights(stream);
        let (reader, denied) = match rights {
            Rights::Write => (None, None),
            Rights::Read(refusal) => (Some(uid), Some(refusal)),
            Rights::None => {
                return Err(Failure::new(
                    FailureCode::Permission,
                    "only root, the dataplane's own user and the groups of --group and --readers may read the state of the dataplane",
                ));
            }
        };
        let place = places.take(reader).ok_or_else(|| {
            Failure::new(
                FailureCode::Full,
                format!(
                    "too many control connections are open: the dataplane permits {CONNECTIONS_MAX}, {READERS_MAX} of them to read-only users and {USER_MAX} to one read-only user: close some"
                ),
            )
        })?;
        Ok((place, denied))
    }

    /// Returns the user and the rights of the client. The capabilities are checked only when the
    /// client connects, as the kernel checks them only when a process opens a file.
    fn rights(&self, stream: &UnixStream) -> (u32, Rights) {
        let Ok(peer) = peercred::peer_cred(stream) else {
            return (u32::MAX, Rights::None);
        };
        let member = |group: Option<u32>| {
            group.is_some_and(|gid| peer.gid == gid || peer_in_group(stream, gid).unwrap_or(false))
        };
        let process = peercred::Process::of_peer(stream, peer.pid);
        let root = || peer::root(peer.pid, || process.is_there());
        let rights = match self.own.trusts(peer.uid, root) {
            Ok(()) => Rights::Write,
            Err(_) if member(self.permissions.writers) => Rights::Write,
            Err(refusal) if self.permissions.readers.is_none() => Rights::Read(refusal),
            Err(refusal) if member(self.permissions.readers) => Rights::Read(refusal),
            Err(_) => Rights::None,
        };
        (peer.uid, rights)
    }
}

/// A control socket that serves clients until this value is dropped. The drop waits at most a
/// second until answers are written, so that the client that stops the dataplane receives its
/// answer.
#[derive(Debug)]
pub struct Handle {
    stopping: Arc<AtomicBool>,
    places: Arc<Places>,
    address: Address,
    lock: Option<Arc<Lock>>,
    thread: Option<JoinHandle<()>>,
}

impl Handle {
    /// The address on which the server listens.
    pub const fn address(&self) -> &Address {
        &self.address
    }

    /// Returns a [`Leaving`], with which this process can report to a starting dataplane that it is
    /// stopping.
    pub fn leaving(&self) -> Leaving {
        Leaving(self.lock.as_ref().map_or_else(Weak::new, Arc::downgrade))
    }
}

/// The lock of a control socket, in which a dataplane can mark that it is stopping.
#[derive(Debug)]
pub struct Leaving(Weak<Lock>);

impl Leaving {
    /// Marks in the lock that this process is stopping, so that a starting dataplane waits for its
    /// end.
    pub fn mark(&self) {
        if let Some(lock) = self.0.upgrade() {
            lock.leave();
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        // Wakes the thread. If this is not possible, the thread remains, and is harmless.
        if self.address.connect().is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
        self.places.wait_for_answers(ANSWERS_PATIENCE);
    }
}

fn turn_away(mut stream: UnixStream, failure: &Failure) {
    let _ = stream.set_write_timeout(Some(Duration::from_millis(100)));
    let _ = write_error(&mut stream, 0, failure);
}
