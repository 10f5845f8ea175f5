//! Resets the service manager's watchdog (sd_watchdog_enabled(3)), only while all parts of the
//! dataplane work.
//!
//! A single thread does not know whether the others work. Therefore the thread of the watchdog
//! makes a request over the dataplane's own control socket that needs all parts: the socket's
//! threads answer it with the state of the packet workers and of the keeper. Only an answer resets
//! the watchdog. While the whole process is stopped, for instance because the machine is suspended,
//! no request fails; the service manager decides whether this time counts.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use lvs_core::api::{Call, FailureCode, Info};

use crate::notify::Notify;
pub use crate::notify::watchdog_interval as interval;
use lvs_api::{Address, Client, Error};

/// A thread that resets the watchdog until this value is dropped.
#[derive(Debug)]
pub struct Feeder {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Feeder {
    /// Starts a thread that queries the dataplane at `address` three times in each `interval`. If
    /// an answer is missing and `is_stopping` returns true, the thread ends.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(
        address: Address,
        notify: Notify,
        interval: Duration,
        is_stopping: impl Fn() -> bool + Send + 'static,
    ) -> std::io::Result<Self> {
        let (stop, stopped) = channel();
        let thread = thread::Builder::new()
            .name("lvs-watchdog".into())
            .spawn(move || feed(&address, &notify, interval / 3, &stopped, is_stopping))?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Feeder {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn feed(
    address: &Address,
    notify: &Notify,
    pause: Duration,
    stopped: &Receiver<()>,
    is_stopping: impl Fn() -> bool,
) {
    // Only the first of consecutive failures is logged.
    let mut well = true;
    loop {
        match answers(address, pause) {
            Ok(()) => {
                notify.send("WATCHDOG=1");
                if !well {
                    tracing::info!("the dataplane answers requests on its control socket again");
                }
                well = true;
            }
            Err(_) if is_stopping() => return,
            Err(error) => {
                if well {
                    tracing::error!(
                        "the dataplane does not answer a request on its control socket: {error}; systemd restarts it if this continues"
                    );
                }
                well = false;
            }
        }
        match stopped.recv_timeout(pause) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Requests the state of the dataplane, which the control socket, the packet workers and the keeper
/// must answer within `patience`. If all control connections are in use, the dataplane counts as
/// working.
fn answers(address: &Address, patience: Duration) -> Result<(), Error> {
    let mut client = match Client::connect_patiently(address, patience) {
        // If all slots are in use, the dataplane is busy, but works.
        Err(Error::Refused(failure)) if failure.code == FailureCode::Full => return Ok(()),
        other => other?,
    };
    match client.call::<Info>(&Call::Info {}) {
        Ok(_) => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    #[test]
    fn watchdog_of_stopping_dataplane_ends_at_first_unanswered_request() {
        let directory = tempfile::tempdir().expect("the temporary directory can be created");
        let address = Address::new(directory.path().join("absent"));
        let notify = Notify::to(OsStr::new("/absent"));
        let (_stop, stopped) = channel();
        feed(&address, &notify, Duration::ZERO, &stopped, || true);
    }
}
