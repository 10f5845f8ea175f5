//! The client of the control protocol.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use lvs_core::api::{Call, Failure, Hello, ListEnd, NumberedCall, VERSION};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};

use super::Address;
use super::address::impostor;

/// Maximum length of a line of an answer in bytes: a service with all its servers is one line.
const LINE_MAX: u64 = 256 << 20;

/// Time without an answer after which a dataplane counts as stopped. The dataplane itself needs
/// less time to declare a packet worker stopped, or to start on a busy host.
const SILENCE: Duration = Duration::from_secs(15);

/// The error of a connection or a request to a dataplane.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No process listens on the address.
    #[error(
        "no dataplane answers at {address}: start lvs-dataplane, or name its socket with --socket or {variable}",
        variable = super::SOCKET_VARIABLE
    )]
    Absent {
        /// The address of the dataplane.
        address: Address,
    },
    /// A socket file without a listener.
    #[error(
        "{address} is a stale socket of a dataplane that has exited: start lvs-dataplane, which replaces it"
    )]
    Stale {
        /// The address of the dataplane.
        address: Address,
    },
    /// The permissions of the socket or its directory do not allow the connection.
    #[error("permission denied on {address}: run as root or as the dataplane's user")]
    Denied {
        /// The address of the dataplane.
        address: Address,
    },
    /// The process that listens at the address is not trusted: its user is neither this user nor
    /// root with `CAP_NET_ADMIN`. A process at a path that the user has set is not checked.
    #[error(
        "{address} is served by a process of user {uid}, which is neither this user nor root with \
         CAP_NET_ADMIN: it is possibly not a dataplane. If it is your dataplane, start it with --socket /run/... and use that path here"
    )]
    Impostor {
        /// The address of the dataplane.
        address: Address,
        /// The user of the process that listens.
        uid: u32,
    },
    /// The path is not a socket.
    #[error("{address} is not a socket: name the dataplane's socket with --socket or {variable}", variable = super::SOCKET_VARIABLE)]
    NotASocket {
        /// The address of the dataplane.
        address: Address,
    },
    /// The connection failed for another reason.
    #[error("cannot connect to {address}: {source}")]
    Connect {
        /// The address of the dataplane.
        address: Address,
        /// The error of the connection attempt.
        source: io::Error,
    },
    /// The dataplane speaks another version of the protocol.
    #[error(
        "the dataplane at {address} speaks another version of the control protocol than this program ({VERSION}): {message}; install both from the same release, then restart the dataplane"
    )]
    Version {
        /// The address of the dataplane.
        address: Address,
        /// Message of the dataplane.
        message: String,
    },
    /// The dataplane does not answer in time, for example because it is stopped (SIGSTOP, a
    /// debugger), or because the host is overloaded.
    #[error(
        "the dataplane at {address} does not answer{}: if its state in `ps` is T, continue it with `kill -CONT`; if this host is overloaded, wait; otherwise kill it and start lvs-dataplane again",
        of_pid(*.pid)
    )]
    Silent {
        /// The address of the dataplane.
        address: Address,
        /// The process id of the dataplane, if it is known.
        pid: Option<u32>,
    },
    /// The connection was closed, or failed, before the answer was complete.
    #[error(
        "the dataplane at {address} closed the connection before the end of its answer, probably because it has exited: read its log, and start it again"
    )]
    Gone {
        /// The address of the dataplane.
        address: Address,
    },
    /// The received bytes are not a valid answer.
    #[error("the process that answers at {address} is not a dataplane: {message}")]
    Garbled {
        /// The address of the dataplane.
        address: Address,
        /// The first error in the answer.
        message: String,
    },
    /// The caller has stopped the list before its end.
    #[error("the caller stopped reading the list before its end")]
    Stopped,
    /// The dataplane has refused the call.
    #[error("{}", .0.message)]
    Refused(Failure),
}

/// A connection to a dataplane.
#[derive(Debug)]
pub struct Client {
    address: Address,
    stream: BufReader<UnixStream>,
    line: Vec<u8>,
    next_id: u64,
    hello: Hello,
}

fn of_pid(pid: Option<u32>) -> String {
    pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default()
}

/// Returns the error for `address`, at which no process listens.
fn refused(address: Address) -> Error {
    match address.path().map(std::fs::symlink_metadata) {
        None => Error::Absent { address },
        Some(Ok(meta)) if !meta.file_type().is_socket() => Error::NotASocket { address },
        Some(_) => Error::Stale { address },
    }
}

/// Connects to exactly this address. Unless it is a path that the user has set, a process that is
/// not trusted is refused.
fn open(address: &Address) -> Result<UnixStream, Error> {
    let stream = address.connect().map_err(|source| {
        let address = address.clone();
        match source.kind() {
            io::ErrorKind::NotFound => Error::Absent { address },
            io::ErrorKind::ConnectionRefused => refused(address),
            io::ErrorKind::PermissionDenied => Error::Denied { address },
            io::ErrorKind::WouldBlock => Error::Silent { address, pid: None },
            _ => Error::Connect { address, source },
        }
    })?;
    // A path from the user is trusted: only users with write access to its directory can listen
    // there.
    if !matches!(address, Address::Path(_))
        && let Some((uid, _)) = impostor(&stream)
    {
        let address = address.clone();
        return Err(Error::Impostor { address, uid });
    }
    Ok(stream)
}

/// Connects to the default path, or else to a dataplane that listens only at the abstract name. An
/// untrusted process that listens at that name is ignored, so that no local user can prevent the
/// start of a dataplane.
fn open_usual(address: &Address) -> Result<UnixStream, Error> {
    match open(address) {
        Err(absent @ (Error::Absent { .. } | Error::Stale { .. })) => {
            open(&Address::by_name()).map_err(|_| absent)
        }
        other => other,
    }
}

#[derive(Deserialize)]
struct Line<I, R> {
    id: u64,
    item: Option<I>,
    result: Option<R>,
    error: Option<Failure>,
}

impl Client {
    /// Connects and sends `hello`.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn connect(address: &Address) -> Result<Self, Error> {
        Self::connect_patiently(address, SILENCE)
    }

    /// As [`connect`](Self::connect). A dataplane that does not answer for `patience` counts as
    /// stopped ([`Error::Silent`]).
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn connect_patiently(address: &Address, patience: Duration) -> Result<Self, Error> {
        let stream = match address {
            Address::Usual(_) => open_usual(address)?,
            _ => open(address)?,
        };
        // Every socket of this system supports a timeout.
        let _ = stream.set_read_timeout(Some(patience));
        let _ = stream.set_write_timeout(Some(patience));
        let mut client = Self {
            address: address.clone(),
            stream: BufReader::with_capacity(64 << 10, stream),
            line: Vec::new(),
            next_id: 1,
            hello: Hello {
                version: 0,
                dataplane: String::new(),
                table_size: 0,
                writable: false,
            },
        };
        let hello: Hello = match client.call(&Call::Hello { version: VERSION }) {
            Err(Error::Refused(failure)) if failure.code == lvs_core::api::FailureCode::Version => {
                return Err(Error::Version {
                    address: client.address,
                    message: failure.message,
                });
            }
            other => other?,
        };
        if hello.version != VERSION {
            return Err(Error::Version {
                address: client.address,
                message: format!("it uses version {} of the protocol", hello.version),
            });
        }
        client.hello = hello;
        Ok(client)
    }

    /// Sets the time without an answer after which the dataplane counts as stopped.
    pub fn set_patience(&self, patience: Duration) {
        let stream = self.stream.get_ref();
        let _ = stream.set_read_timeout(Some(patience));
        let _ = stream.set_write_timeout(Some(patience));
    }

    /// The dataplane's answer to the call `hello`.
    pub const fn hello(&self) -> &Hello {
        &self.hello
    }

    /// Whether the dataplane has not closed the connection yet.
    pub fn is_open(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut end = [PollFd::new(self.stream.get_ref(), PollFlags::RDHUP)];
        poll(&mut end, Some(&Timespec::default())).is_ok_and(|ready| ready == 0)
    }

    /// Makes a call whose answer is one value; [`IgnoredAny`] ignores the value.
    ///
    /// # Errors
    /// [`Error::Refused`], or an error after which the connection cannot be used any more.
    pub fn call<R: DeserializeOwned>(&mut self, call: &Call) -> Result<R, Error> {
        self.exchange(call, |_: IgnoredAny| true)
    }

    /// Makes a call whose answer is a list. Passes each item to `each` as it arrives, so that
    /// memory use does not depend on the length.
    ///
    /// # Errors
    /// [`Error::Refused`], or an error after which the connection cannot be used any more.
    pub fn list<I: DeserializeOwned>(
        &mut self,
        call: &Call,
        mut each: impl FnMut(I),
    ) -> Result<ListEnd, Error> {
        self.list_while(call, |item| {
            each(item);
            true
        })
    }

    /// As [`list`](Self::list), until `each` returns `false`. The connection is then unusable, and
    /// every later call fails.
    ///
    /// # Errors
    /// [`Error::Stopped`], and as [`list`](Self::list).
    pub fn list_while<I: DeserializeOwned>(
        &mut self,
        call: &Call,
        each: impl FnMut(I) -> bool,
    ) -> Result<ListEnd, Error> {
        self.exchange(call, each)
    }

    /// Makes a call whose answer is a list, and collects the items.
    ///
    /// # Errors
    /// As [`list`](Self::list).
    pub fn collect<I: DeserializeOwned>(&mut self, call: &Call) -> Result<Vec<I>, Error> {
        let mut items = Vec::new();
        self.list(call, |item| items.push(item))?;
        Ok(items)
    }

    fn exchange<I: DeserializeOwned, R: DeserializeOwned>(
        &mut self,
        call: &Call,
        each: impl FnMut(I) -> bool,
    ) -> Result<R, Error> {
        let id = self.next_id;
        self.send(&NumberedCall {
            id,
            call: call.clone(),
        })?;
        self.answer(each)
    }

    /// Reads the answer to the last request. Passes the items of a list to `each`, until it returns
    /// `false`.
    fn answer<I: DeserializeOwned, R: DeserializeOwned>(
        &mut self,
        mut each: impl FnMut(I) -> bool,
    ) -> Result<R, Error> {
        let id = self.next_id;
        self.next_id += 1;
        loop {
            let line: Line<I, R> = self.receive()?;
            if let Some(failure) = line.error {
                // A dataplane without a free slot for the connection sends this answer before the
                // first request, with the number 0.
                return Err(Error::Refused(failure));
            }
            if line.id != id {
                return Err(self.garbled(format!("it sent answer {} to request {id}", line.id)));
            }
            match (line.item, line.result) {
                (Some(item), None) => {
                    if !each(item) {
                        let _ = self.stream.get_ref().shutdown(Shutdown::Both);
                        return Err(Error::Stopped);
                    }
                }
                (None, Some(result)) => return Ok(result),
                _ => {
                    return Err(self.garbled(
                        "a line of its answer is neither an item, a result nor an error".into(),
                    ));
                }
            }
        }
    }

    fn send(&mut self, request: &impl Serialize) -> Result<(), Error> {
        let mut line = serde_json::to_vec(request).map_err(|e| self.garbled(e.to_string()))?;
        line.push(b'\n');
        match self.stream.get_mut().write_all(&line) {
            Ok(()) => Ok(()),
            // The dataplane may have sent the reason before it closed the connection: read it next.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            Err(error) => Err(self.failed(&error)),
        }
    }

    fn receive<T: DeserializeOwned>(&mut self) -> Result<T, Error> {
        self.line.clear();
        let read = self
            .stream
            .by_ref()
            .take(LINE_MAX)
            .read_until(b'\n', &mut self.line);
        match read {
            Ok(_) if self.line.last() == Some(&b'\n') => {}
            Ok(len) if len as u64 == LINE_MAX => {
                return Err(self.garbled("a line of its answer is too long".into()));
            }
            Ok(_) => return Err(self.gone()),
            Err(error) => return Err(self.failed(&error)),
        }
        serde_json::from_slice(&self.line).map_err(|e| self.garbled(e.to_string()))
    }

    fn failed(&self, error: &io::Error) -> Error {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Error::Silent {
                address: self.address.clone(),
                pid: rustix::net::sockopt::socket_peercred(self.stream.get_ref())
                    .ok()
                    .and_then(|peer| u32::try_from(peer.pid.as_raw_pid()).ok()),
            },
            _ => self.gone(),
        }
    }

    fn gone(&self) -> Error {
        Error::Gone {
            address: self.address.clone(),
        }
    }

    fn garbled(&self, message: String) -> Error {
        Error::Garbled {
            address: self.address.clone(),
            message,
        }
    }
}
