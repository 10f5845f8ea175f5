//! The service manager's watchdog (sd_watchdog_enabled(3)), fed while the dataplane works as a
//! whole.
//!
//! One live thread is no evidence for the others. So the dataplane makes a request over its own
//! control socket that needs all of its parts: the socket's threads accept it, the packet path and
//! the keeper of the host add their state. Only an answer feeds the watchdog. Time in which the
//! whole process does not run, as on a suspended machine, counts only as far as the manager counts
//! it.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use lvs_core::api::{Call, FailureCode, Info};

use crate::notify::Notify;
pub use crate::notify::watchdog_interval as interval;
use lvs_api::{Address, Client, Error};

/// Resets the watchdog until it is dropped.
#[derive(Debug)]
pub struct Feeder {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Feeder {
    /// Has the dataplane at `address` asked three times in an `interval`.
    ///
    /// # Errors
    /// There can be no thread.
    pub fn start(address: Address, notify: Notify, interval: Duration) -> std::io::Result<Self> {
        let (stop, stopped) = channel();
        let thread = thread::Builder::new()
            .name("lvs-watchdog".into())
            .spawn(move || feed(&address, &notify, interval / 3, &stopped))?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Feeder {
    /// Stops sending watchdog messages, without waiting for the thread: a dataplane that stops no
    /// longer answers, and this is not a failure.
    pub fn stop(&mut self) {
        self.stop = None;
    }
}

impl Drop for Feeder {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn feed(address: &Address, notify: &Notify, pause: Duration, stopped: &Receiver<()>) {
    // Of two failures in a row the first is worth a line.
    let mut well = true;
    loop {
        match answers(address, pause) {
            Ok(()) => {
                notify.send("WATCHDOG=1");
                if !well {
                    tracing::info!("the dataplane answers its own requests again");
                }
                well = true;
            }
            Err(_) if stopped.try_recv() == Err(TryRecvError::Disconnected) => return,
            Err(error) => {
                if well {
                    tracing::error!("the dataplane does not answer its own request: {error}");
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

/// Whether the control socket, the packet path and the keeper answer within `patience`.
fn answers(address: &Address, patience: Duration) -> Result<(), Error> {
    let mut client = match Client::connect_patiently(address, patience) {
        // With all places in use it is busy, and alive.
        Err(Error::Refused(failure)) if failure.code == FailureCode::Full => return Ok(()),
        other => other?,
    };
    match client.call::<Info>(&Call::Info {}) {
        Ok(_) => Ok(()),
        Err(error) => Err(error),
    }
}
