//! The client of a connection, and the time that the connection may last.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// The refusal for a client beyond the limit of connections.
pub(crate) const FULL: &str =
    "lvsd already serves its maximum number of connections: close some of them, or try again later";
/// Time limit of a request over TCP, until the client has read the last byte of the answer. Also
/// the time after which the client of an event stream is disconnected if it reads nothing.
const LIMIT: Duration = Duration::from_secs(30);
/// Time limit of a request over the Unix socket. Clients such as `lvsadm` stop waiting earlier, and
/// report the reason.
const LOCAL_LIMIT: Duration = Duration::from_secs(60);

/// The client of a connection.
#[derive(Clone, Debug)]
pub(crate) enum Peer {
    /// A client over TCP.
    Tcp(SocketAddr),
    /// A client of the daemon's own socket.
    Local {
        /// The user of the client, as text.
        who: String,
        /// The reason why the client has no write access; `None` if it has write access.
        denied: Option<String>,
    },
}

/// The time until which a connection may last.
#[derive(Clone, Debug)]
pub(super) struct Deadline(watch::Sender<Instant>);

impl Deadline {
    pub(super) fn new(peer: &Peer) -> Self {
        let limit = match peer {
            Peer::Tcp(_) => LIMIT,
            Peer::Local { .. } => LOCAL_LIMIT,
        };
        Self(watch::Sender::new(Instant::now() + limit))
    }

    pub(super) fn get(&self) -> Instant {
        *self.0.borrow()
    }

    /// Extends the deadline, because the client has read part of a stream.
    pub(super) fn prolong(&self) {
        self.0.send_replace(Instant::now() + LIMIT);
    }
}
