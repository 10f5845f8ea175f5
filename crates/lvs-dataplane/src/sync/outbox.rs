//! The queue of messages from the packet workers to the master.

use std::collections::VecDeque;
use std::io;
use std::sync::{Mutex, MutexGuard};

use lvs_core::sync::Message;

use lvs_sys::EventFd;
use lvs_sys::lock;

/// Maximum number of queued bytes, even if `sync_qlen_max` permits more messages.
const BYTES_MAX: usize = 64 << 20;
/// Number of bytes of messages that the master takes from the queue at a time. The last message may
/// exceed it.
const PORTION: usize = 256 << 10;

/// The queue of messages to send. A full queue drops messages, so that a packet worker never waits.
#[derive(Debug)]
pub(crate) struct Outbox {
    queued: Mutex<Queued>,
    wake: EventFd,
}

#[derive(Debug, Default)]
struct Queued {
    messages: VecDeque<Message>,
    bytes: usize,
}

impl Outbox {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            queued: Mutex::default(),
            wake: EventFd::new()?,
        })
    }

    fn queued(&self) -> MutexGuard<'_, Queued> {
        lock(&self.queued)
    }

    /// Adds a message. Returns `false`, and drops the message, if `max` messages are queued
    /// already, or more than [`BYTES_MAX`] bytes would be queued.
    pub(crate) fn push(&self, message: Message, max: usize) -> bool {
        let first = {
            let mut queued = self.queued();
            let bytes = queued.bytes + message.bytes.len();
            if queued.messages.len() >= max || bytes > BYTES_MAX {
                return false;
            }
            queued.bytes = bytes;
            queued.messages.push_back(message);
            queued.messages.len() == 1
        };
        if first {
            self.wake.notify();
        }
        true
    }

    /// Removes and returns a portion of the messages, in order. The portion is empty only if the
    /// queue is empty.
    pub(super) fn take(&self) -> Vec<Message> {
        self.wake.take();
        let (mut portion, mut bytes) = (Vec::new(), 0);
        let more = {
            let mut queued = self.queued();
            while bytes < PORTION
                && let Some(message) = queued.messages.pop_front()
            {
                bytes += message.bytes.len();
                portion.push(message);
            }
            queued.bytes -= bytes;
            !queued.messages.is_empty()
        };
        if more {
            self.wake.notify();
        }
        portion
    }

    pub(super) const fn wake(&self) -> &EventFd {
        &self.wake
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sync_outbox_is_bounded_by_messages_and_bytes() {
        let outbox = Outbox::new().expect("a descriptor is available");
        let message = |len| Message {
            port: 0,
            bytes: vec![0; len],
        };
        let pushed = (0..10).filter(|_| outbox.push(message(8), 4)).count();
        assert_eq!((pushed, outbox.take().len()), (4, 4));
        let push = || (0..2000).filter(|_| outbox.push(message(64 << 10), 5000));
        assert_eq!(push().count(), 1024);
        // The master may keep the taken portion while the interface accepts no more.
        let taken = outbox.take().len();
        assert_eq!(taken, PORTION / (64 << 10));
        assert_eq!(push().count(), taken);
        assert!(
            outbox.wake().take(),
            "the master was not woken, although messages are queued"
        );
        let portions = std::iter::from_fn(|| Some(outbox.take().len()).filter(|&count| count > 0));
        assert_eq!(portions.sum::<usize>(), 1024);
        assert!(
            !outbox.wake().take(),
            "the master was woken, although no message is queued"
        );
        assert!(
            outbox.push(message(1), 1),
            "the empty queue refused a message"
        );
        assert!(outbox.wake().take());
    }
}
