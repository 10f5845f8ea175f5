//! Telling systemd how we are (`sd_notify(3)`): a datagram to the socket that `NOTIFY_SOCKET` names.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The way to the service manager; does nothing without one.
#[derive(Debug, Default)]
pub struct Notify(Option<(UnixDatagram, SocketAddr)>);

impl Notify {
    /// To the socket that the environment names.
    pub fn from_env() -> Self {
        let Some(name) = std::env::var_os("NOTIFY_SOCKET") else {
            return Self::default();
        };
        let address = match name.as_bytes() {
            [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest),
            _ => SocketAddr::from_pathname(&name),
        };
        match (UnixDatagram::unbound(), address) {
            (Ok(socket), Ok(address)) => Self(Some((socket, address))),
            _ => {
                tracing::warn!(
                    "NOTIFY_SOCKET is set, but {} cannot be used",
                    name.display()
                );
                Self::default()
            }
        }
    }

    /// Sends assignments, one a line: `READY=1`.
    pub fn send(&self, state: &str) {
        if let Some((socket, address)) = &self.0 {
            // A manager that does not listen is its own trouble.
            let _ = socket.send_to_addr(state.as_bytes(), address);
        }
    }
}
