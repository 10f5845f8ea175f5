//! Reports to systemd (`sd_notify(3)`): a datagram to the socket that `NOTIFY_SOCKET` names.

use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::time::Duration;

/// The socket of the service manager; without one, all calls do nothing.
#[derive(Clone, Debug, Default)]
pub struct Notify(Option<Arc<(UnixDatagram, SocketAddr)>>);

impl Notify {
    /// Creates a sender to the socket that the environment names.
    pub fn from_env() -> Self {
        match std::env::var_os("NOTIFY_SOCKET") {
            Some(name) => Self::to(&name),
            None => Self::default(),
        }
    }

    /// Creates a sender to the socket `name`: `@name` or a path. If the name is not a usable
    /// address, logs this, and the sender does nothing.
    pub fn to(name: &OsStr) -> Self {
        let address = match name.as_bytes() {
            [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest),
            _ => SocketAddr::from_pathname(name),
        };
        match (UnixDatagram::unbound(), address) {
            (Ok(socket), Ok(address)) => Self(Some(Arc::new((socket, address)))),
            _ => {
                tracing::warn!(
                    "the service manager receives no notifications: {} in NOTIFY_SOCKET is not a usable socket address",
                    name.display()
                );
                Self::default()
            }
        }
    }

    /// Sends assignments, one on each line, such as `READY=1`.
    pub fn send(&self, state: &str) {
        if let Some((socket, address)) = self.0.as_deref() {
            // If the service manager does not listen, the message is lost.
            let _ = socket.send_to_addr(state.as_bytes(), address);
        }
    }
}

/// Time within which the service manager expects a watchdog message before it kills this process;
/// `None` if its watchdog is off, or is for another process.
pub fn watchdog_interval() -> Option<Duration> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let for_us = match std::env::var_os("WATCHDOG_PID") {
        Some(_) => number("WATCHDOG_PID") == Some(std::process::id().into()),
        None => true,
    };
    let interval = number("WATCHDOG_USEC").map(Duration::from_micros);
    interval.filter(|interval| for_us && !interval.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn systemd_notification_arrives_at_path_and_abstract_name() {
        let path = std::env::temp_dir().join(format!("lvs-notify-{}", std::process::id()));
        let by_path = UnixDatagram::bind(&path).unwrap();
        let name = format!("lvsd-notify-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name.as_bytes()).unwrap();
        let by_name = UnixDatagram::bind_addr(&address).unwrap();
        Notify::to(path.as_os_str()).send("READY=1");
        Notify::to(format!("@{name}").as_ref()).send("STOPPING=1");
        let mut buffer = [0; 64];
        let length = by_path.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"READY=1");
        std::fs::remove_file(&path).unwrap();
        let length = by_name.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"STOPPING=1");
    }
}
