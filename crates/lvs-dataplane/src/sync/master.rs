//! The master's thread: sends what the packet workers have to say.

use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use lvs_core::sync::Message;
use tracing::{info, warn};

use super::counts::{Counts, count};
use super::outbox::Outbox;
use super::sockets::Sockets;
use super::{Director, Stop, add_stop};
use crate::sys::{Poller, wait_writable};

/// Between two looks at the interface, and at messages of no packet worker's.
const PERIOD: Duration = Duration::from_secs(1);
/// How long one message may wait for room in the socket before it is looked whether the master is
/// to stop.
const PATIENCE: Duration = Duration::from_millis(100);

/// Sends until it is told to stop, and then what there is left.
pub(super) fn run(
    mut sockets: Sockets,
    director: &dyn Director,
    outbox: &Outbox,
    counts: &Counts,
    stop: &Stop,
) {
    let mut poller = Poller::new();
    let mut next = Instant::now() + PERIOD;
    let mut well = true;
    while !stop.is_asked() {
        poller.clear();
        add_stop(&mut poller, stop);
        poller.add(outbox.wake().as_fd());
        let until = next.saturating_duration_since(Instant::now());
        if let Err(error) = poller.wait(Some(until)) {
            tracing::error!("the synchronisation master cannot wait: {error}");
            return;
        }
        send(outbox.take(), &sockets, counts, stop, &mut well);
        if Instant::now() >= next {
            next = Instant::now() + PERIOD;
            sockets.keep(counts);
            send(director.messages(), &sockets, counts, stop, &mut well);
        }
    }
    send(outbox.take(), &sockets, counts, stop, &mut well);
    send(director.messages(), &sockets, counts, stop, &mut well);
}

fn send(
    messages: impl IntoIterator<Item = Message>,
    sockets: &Sockets,
    counts: &Counts,
    stop: &Stop,
    well: &mut bool,
) {
    for message in messages {
        let sent = loop {
            match sockets.send(&message) {
                // The others wait behind it, as many as may.
                Err(error) if error.kind() == ErrorKind::WouldBlock && !stop.is_asked() => {
                    if let Some((_, socket)) = sockets.of(&message) {
                        wait_writable(socket.as_fd(), PATIENCE);
                    }
                }
                sent => break sent,
            }
        };
        match sent {
            Ok(()) => {
                count(&counts.sent, 1);
                count(&counts.sent_bytes, message.bytes.len() as u64);
                if !*well {
                    info!("synchronisation messages are sent again");
                }
                *well = true;
            }
            Err(error) => {
                count(&counts.not_sent, 1);
                if *well {
                    let interface = &sockets.daemon.interface;
                    warn!("synchronisation messages cannot be sent on {interface}: {error}");
                }
                *well = false;
            }
        }
    }
}
