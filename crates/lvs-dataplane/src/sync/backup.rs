//! The thread of a sync backup: receives datagrams, and passes their connections to the packet
//! workers in portions.

use std::io::ErrorKind;
use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lvs_core::replication::TakenOver;
use lvs_core::sync::SyncRole;
use lvs_core::sync::wire::{self, Entry, Unread};

use super::counts::{Counts, count};
use super::sockets::Sockets;
use super::{Director, Stop, add_stop, has_waited};
use lvs_sys::Poller;
use lvs_sys::lock;

const PERIOD: Duration = Duration::from_secs(1);
/// Number of datagrams that are read from one socket before the next socket is read.
const DATAGRAMS_PER_TURN: usize = 32;
/// Maximum number of connections in a portion: a packet worker takes them over in some ten
/// microseconds.
const PORTION: usize = 32;
/// Maximum number of portions that the packet workers have at the same time.
const PORTIONS_MAX: usize = 2;
/// Longest wait for packet workers before the stop flag is checked again.
const PATIENCE: Duration = Duration::from_millis(100);

/// Receives datagrams until `stop` is set.
pub(super) fn run(
    mut sockets: Sockets,
    director: &dyn Director,
    counts: &Arc<Counts>,
    stop: &Stop,
) {
    let mut reader = Reader::new(&sockets, counts.clone());
    let mut poller = Poller::new();
    let mut failed = false;
    let mut next = Instant::now() + PERIOD;
    while !stop.is_asked() {
        poller.clear();
        add_stop(&mut poller, stop);
        let places: Vec<usize> = sockets.iter().map(|fd| poller.add(fd.as_fd())).collect();
        let until = next.saturating_duration_since(Instant::now());
        let waited = has_waited(poller.wait(Some(until)), &mut failed, SyncRole::Backup);
        for (place, socket) in places.into_iter().zip(sockets.iter()) {
            if !waited || poller.is_ready(place) {
                reader.receive(socket, director, stop);
            }
        }
        if Instant::now() >= next {
            next = Instant::now() + PERIOD;
            sockets.keep(counts);
        }
    }
}

/// Reads connections from datagrams, and passes them to the packet workers.
#[derive(Debug)]
struct Reader {
    syncid: u8,
    /// The receive buffer: one byte longer than a message may be, so that longer datagrams are
    /// noticed.
    buffer: Vec<u8>,
    counts: Arc<Counts>,
    limiter: Arc<Limiter>,
}

impl Reader {
    fn new(sockets: &Sockets, counts: Arc<Counts>) -> Self {
        let maxlen = usize::from(sockets.daemon.maxlen.unwrap_or(1472));
        Self {
            syncid: sockets.daemon.syncid,
            buffer: vec![0; maxlen + 1],
            counts,
            limiter: Arc::default(),
        }
    }

    /// Receives waiting datagrams, at most [`DATAGRAMS_PER_TURN`].
    fn receive(&mut self, socket: &UdpSocket, director: &dyn Director, stop: &Stop) {
        for _ in 0..DATAGRAMS_PER_TURN {
            match socket.recv(&mut self.buffer) {
                Ok(len) => {
                    let entries = self.read(len);
                    self.deliver(entries, director, stop);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return,
            }
            if stop.is_asked() {
                return;
            }
        }
    }

    /// Returns the connections in the datagram of `len` bytes in the buffer, and counts the
    /// datagram. Returns none for a datagram that is too long, invalid or of another sync ID.
    fn read(&self, len: usize) -> Vec<Entry> {
        let counts = &*self.counts;
        count(&counts.received, 1);
        count(&counts.received_bytes, len as u64);
        if len == self.buffer.len() {
            count(&counts.too_long, 1);
            return Vec::new();
        }
        match wire::parse(&self.buffer[..len], self.syncid) {
            Ok(read) => {
                count(&counts.malformed, read.damaged.into());
                read.entries
            }
            Err(Unread::Malformed) => {
                count(&counts.malformed, 1);
                Vec::new()
            }
            Err(Unread::OtherId) => {
                count(&counts.other_id, 1);
                Vec::new()
            }
        }
    }

    /// Passes connections to the packet workers in portions, each as soon as the limiter has a free
    /// slot. Drops the remaining connections if `stop` is set during the wait.
    fn deliver(&self, entries: Vec<Entry>, director: &dyn Director, stop: &Stop) {
        let mut entries = entries.into_iter();
        loop {
            let portion: Vec<Entry> = entries.by_ref().take(PORTION).collect();
            if portion.is_empty() || !self.limiter.enter(stop) {
                return;
            }
            let ticket = Ticket {
                _place: Arc::new(Place(self.limiter.clone())),
                counts: self.counts.clone(),
            };
            director.take_over(portion, ticket);
        }
    }
}

/// Limits the number of portions that the packet workers have at the same time.
#[derive(Debug, Default)]
struct Limiter {
    inside: Mutex<usize>,
    left: Condvar,
}

impl Limiter {
    /// Waits for a free slot. Returns false if `stop` is set.
    fn enter(&self, stop: &Stop) -> bool {
        let mut inside = lock(&self.inside);
        while *inside >= PORTIONS_MAX {
            if stop.is_asked() {
                return false;
            }
            let waited = self.left.wait_timeout(inside, PATIENCE);
            inside = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *inside += 1;
        true
    }
}

/// A portion's slot in the limiter. Each worker with a part of the portion has a copy; the slot
/// becomes free when all copies are dropped.
#[derive(Clone, Debug)]
pub(crate) struct Ticket {
    _place: Arc<Place>,
    counts: Arc<Counts>,
}

impl Ticket {
    /// Counts the result of the portion, or of a part of it.
    pub(crate) fn done(self, done: TakenOver) {
        self.counts.took_over(done);
    }
}

#[derive(Debug)]
struct Place(Arc<Limiter>);

impl Drop for Place {
    fn drop(&mut self) {
        let Limiter { inside, left } = &*self.0;
        let mut inside = lock(inside);
        *inside = inside.saturating_sub(1);
        left.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicBool;

    use lvs_core::sync::Message;

    use super::super::entry;
    use super::*;
    use lvs_sys::EventFd;

    /// A director that stores portions until the test releases them.
    #[derive(Default)]
    struct Slow {
        portions: Mutex<Vec<(usize, Ticket)>>,
    }

    impl Director for Slow {
        fn messages(&self) -> Vec<Message> {
            Vec::new()
        }

        fn take_over(&self, entries: Vec<Entry>, ticket: Ticket) {
            let mut portions = self.portions.lock().expect("no thread has panicked");
            portions.push((entries.len(), ticket));
        }
    }

    #[test]
    fn sync_backup_passes_on_at_most_two_portions_at_once() {
        let reader = Reader {
            syncid: 0,
            buffer: vec![0; 1473],
            counts: Arc::default(),
            limiter: Arc::default(),
        };
        let stop = Stop {
            asked: AtomicBool::new(false),
            wake: EventFd::new().expect("a descriptor is available"),
        };
        let slow = Slow::default();
        let take = || slow.portions.lock().expect("no thread has panicked").pop();
        let waiting = || slow.portions.lock().expect("no thread has panicked").len();
        std::thread::scope(|scope| {
            let entries = (0..200).map(entry).collect();
            let sender = scope.spawn(|| reader.deliver(entries, &slow, &stop));
            let mut taken = 0;
            while taken < 200 {
                let most = waiting();
                assert!(most <= PORTIONS_MAX, "too many portions wait: {most}");
                if let Some((count, ticket)) = take() {
                    assert!(count <= PORTION);
                    taken += count;
                    ticket.done(TakenOver {
                        taken: count as u64,
                        ..TakenOver::default()
                    });
                }
                std::thread::yield_now();
            }
            sender.join().expect("the sender ends without a panic");
        });
        assert_eq!(reader.counts.read().taken, 200);

        // A stopped backup does not wait for the packet workers.
        stop.ask();
        reader.deliver((0..200).map(entry).collect(), &slow, &stop);
        assert_eq!(waiting(), PORTIONS_MAX);
    }

    proptest::proptest! {
        /// Datagrams of any bytes are parsed and divided into portions.
        #[test]
        fn sync_datagram_of_any_bytes_does_not_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..1473), fix: bool, syncid: u8) {
            let mut reader = Reader {
                syncid,
                buffer: vec![0; 1473],
                counts: Arc::default(),
                limiter: Arc::default(),
            };
            reader.buffer[..bytes.len()].copy_from_slice(&bytes);
            if fix && bytes.len() >= 8 {
                let size = u16::try_from(bytes.len()).expect("the length fits in 16 bits").to_be_bytes();
                reader.buffer[2..4].copy_from_slice(&size);
                reader.buffer[0] = 0;
                reader.buffer[5..8].copy_from_slice(&[1, 0, 0]);
            }
            let entries = reader.read(bytes.len());
            proptest::prop_assert!(entries.len() <= 255);
            proptest::prop_assert_eq!(reader.counts.read().received, 1);
        }
    }
}
