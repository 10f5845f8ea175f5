//! The thread of a sync master: sends the messages of the packet workers and of the control half.

use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use lvs_core::sync::{Message, SyncRole};
use tracing::{info, warn};

use super::counts::{Counts, count};
use super::outbox::Outbox;
use super::sockets::Sockets;
use super::{Director, Stop, add_stop, has_waited};
use lvs_sys::{Poller, wait_writable};

/// Interval at which the interface is checked, and at which the messages of the control half are
/// sent.
const PERIOD: Duration = Duration::from_secs(1);
/// Longest wait for room in the socket before the stop flag is checked again.
const PATIENCE: Duration = Duration::from_millis(100);
/// Time limit for a stopping master to send its remaining messages.
const LAST_PATIENCE: Duration = Duration::from_secs(1);

/// Sends messages until `stop` is set, and then the remaining ones, within [`LAST_PATIENCE`].
pub(super) fn run(
    mut sockets: Sockets,
    director: &dyn Director,
    outbox: &Outbox,
    counts: &Counts,
    stop: &Stop,
) {
    let mut poller = Poller::new();
    let mut failed = false;
    let mut next = Instant::now() + PERIOD;
    let mut manner = Manner {
        stop,
        well: true,
        last: None,
    };
    while !stop.is_asked() {
        poller.clear();
        add_stop(&mut poller, stop);
        poller.add(outbox.wake().as_fd());
        let until = next.saturating_duration_since(Instant::now());
        has_waited(poller.wait(Some(until)), &mut failed, SyncRole::Master);
        send(outbox.take(), &sockets, counts, &mut manner);
        if Instant::now() >= next {
            next = Instant::now() + PERIOD;
            sockets.keep(counts);
            send(director.messages(), &sockets, counts, &mut manner);
        }
    }
    loop {
        let last = outbox.take();
        if last.is_empty() {
            break;
        }
        send(last, &sockets, counts, &mut manner);
    }
    send(director.messages(), &sockets, counts, &mut manner);
}

/// The state of a master between two messages.
struct Manner<'a> {
    stop: &'a Stop,
    /// Whether the last message was sent.
    well: bool,
    /// Time at which a stopping master discards its unsent messages.
    last: Option<Instant>,
}

impl Manner<'_> {
    /// Longest wait for room in the socket; zero once a stopping master must discard its messages.
    fn patience(&mut self) -> Duration {
        if !self.stop.is_asked() {
            return PATIENCE;
        }
        let now = Instant::now();
        let last = *self.last.get_or_insert(now + LAST_PATIENCE);
        last.saturating_duration_since(now).min(PATIENCE)
    }
}

fn send(
    messages: impl IntoIterator<Item = Message>,
    sockets: &Sockets,
    counts: &Counts,
    manner: &mut Manner<'_>,
) {
    for message in messages {
        let sent = loop {
            match sockets.send(&message) {
                // The other messages stay queued, up to the maximum of the queue.
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let patience = manner.patience();
                    match sockets.of(&message) {
                        Some((_, socket)) if !patience.is_zero() => {
                            wait_writable(socket.as_fd(), patience);
                        }
                        _ => break Err(error),
                    }
                }
                sent => break sent,
            }
        };
        match sent {
            Ok(()) => {
                count(&counts.sent, 1);
                count(&counts.sent_bytes, message.bytes.len() as u64);
                if !manner.well {
                    info!(
                        "synchronisation messages are sent on {} again",
                        sockets.daemon.interface
                    );
                }
                manner.well = true;
            }
            Err(error) => {
                count(&counts.not_sent, 1);
                if manner.well {
                    let interface = &sockets.daemon.interface;
                    warn!("synchronisation messages cannot be sent on {interface}: {error}");
                }
                manner.well = false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use lvs_sys::EventFd;

    #[test]
    fn stopping_sync_master_has_fixed_deadline_and_running_master_has_none() {
        let stop = Stop {
            asked: AtomicBool::new(false),
            wake: EventFd::new().expect("a descriptor is available"),
        };
        let mut manner = Manner {
            stop: &stop,
            well: true,
            last: None,
        };
        assert_eq!(manner.patience(), PATIENCE);
        assert_eq!(manner.last, None, "a running master has a deadline");
        stop.ask();
        assert!(manner.patience() <= PATIENCE);
        let last = manner.last.expect("the stop sets a deadline");
        manner.patience();
        assert_eq!(
            manner.last,
            Some(last),
            "the deadline of a stopping master has moved"
        );
        manner.last = Some(Instant::now());
        assert_eq!(manner.patience(), Duration::ZERO);
    }
}
