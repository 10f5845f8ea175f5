//! Packets that wait until the link-layer address of their next hop is known, or until the
//! dataplane intercepts the replies to them.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::time::Duration;

use lvs_core::stats::ServerDrops;
use lvs_core::{Instant, ServerId};

use crate::frame::Frame;
use crate::intercept::LocalClient;
use crate::net::PortId;

/// Maximum number of packets of a director that wait for one neighbour's link-layer address, or for
/// the interception of one connection. A further packet replaces the oldest (the kernel's
/// `unres_qlen` default).
pub const PER_NEIGHBOUR: usize = 101;
/// Maximum number of waiting packets of a director.
pub const TOTAL: usize = 4096;
/// Maximum number of bytes of waiting packets of a director.
pub const BYTES: usize = 16 << 20;
/// Longest time that a packet waits. The kernel sends three requests to a neighbour, one second
/// apart, and then reports that it does not answer. This limit applies if the kernel reports
/// nothing.
pub const TIMEOUT: Duration = Duration::from_millis(3500);
/// Pause between two requests for the same neighbour or interception.
const ASK_AGAIN: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Cause {
    Neighbour(PortId, IpAddr),
    /// The packet is from a client on this host, and the dataplane does not intercept the replies
    /// to it yet.
    LocalClient(LocalClient),
}

/// A packet that waits for a link-layer address or for an interception.
#[derive(Debug)]
pub struct Waiting {
    since: Instant,
    /// The packet without its link header.
    pub frame: Frame,
    /// The server of the packet's connection; `None` if the packet belongs to no connection.
    pub server: Option<ServerId>,
}

#[derive(Debug)]
struct Queue {
    frames: VecDeque<Waiting>,
    asked: Instant,
}

/// The waiting packets of one worker. Each is a copy in a buffer of the packet's size.
#[derive(Debug)]
pub struct Held {
    queues: HashMap<Cause, Queue>,
    frames: usize,
    bytes: usize,
    limits: Limits,
    /// Number of dropped packets, for example because they had waited for too long, a limit was
    /// reached, or the neighbour did not answer.
    pub dropped: u64,
    /// Dropped packets of connections, by server.
    pub drops: ServerDrops,
}

/// Name of the drop reason under which dropped waiting packets are counted.
pub const NO_NEIGHBOUR: &str = "no_neighbour";

/// Limits of the waiting packets.
#[derive(Clone, Copy, Debug)]
struct Limits {
    per_neighbour: usize,
    total: usize,
    bytes: usize,
}

impl Default for Held {
    fn default() -> Self {
        Self::of_workers(NonZeroUsize::MIN)
    }
}

impl Held {
    /// An empty queue for one of `workers` workers, among which the director's limits are divided.
    pub fn of_workers(workers: NonZeroUsize) -> Self {
        let share = |all: usize| all.div_ceil(workers.get());
        Self {
            queues: HashMap::new(),
            frames: 0,
            bytes: 0,
            limits: Limits {
                per_neighbour: share(PER_NEIGHBOUR),
                total: share(TOTAL),
                bytes: share(BYTES),
            },
            dropped: 0,
            drops: ServerDrops::default(),
        }
    }

    /// Stores `frame` until the link-layer address of `addr` is known. If the maximum number of
    /// packets waits for `addr`, the oldest of them is dropped; if this worker's total limits are
    /// reached, `frame` is dropped. Returns whether the caller must request the address from the
    /// kernel now. `server` is the server of the packet's connection, if it belongs to one.
    pub fn hold(
        &mut self,
        port: PortId,
        addr: IpAddr,
        server: Option<ServerId>,
        frame: Frame,
        now: Instant,
    ) -> bool {
        self.hold_for(Cause::Neighbour(port, addr), server, frame, now)
    }

    /// Stores a packet of a client on this host, translated and without link header, until the
    /// replies to it are intercepted. At the limits, packets are dropped as by
    /// [`hold`](Self::hold). Returns whether the caller must request the interception now.
    pub fn hold_local_client(
        &mut self,
        client: LocalClient,
        server: Option<ServerId>,
        frame: Frame,
        now: Instant,
    ) -> bool {
        self.hold_for(Cause::LocalClient(client), server, frame, now)
    }

    /// Counts a dropped packet. `server` is the server of the packet's connection, if there is one.
    pub fn lose(&mut self, server: Option<ServerId>) {
        self.dropped += 1;
        self.drops.count(server, NO_NEIGHBOUR);
    }

    fn hold_for(
        &mut self,
        cause: Cause,
        server: Option<ServerId>,
        frame: Frame,
        now: Instant,
    ) -> bool {
        if self.frames >= self.limits.total || self.bytes + frame.len() > self.limits.bytes {
            // All queues share one limit, and it is reached: the new packet is dropped. The
            // neighbour's address is requested nevertheless; otherwise no packet could reach this
            // neighbour while packets for others fill the queues.
            self.lose(server);
            return self.asks(cause, now);
        }
        let mut ask = false;
        let queue = self.queues.entry(cause).or_insert_with(|| {
            ask = true;
            Queue {
                frames: VecDeque::new(),
                asked: now,
            }
        });
        if now.saturating_since(queue.asked) >= ASK_AGAIN {
            queue.asked = now;
            ask = true;
        }
        if queue.frames.len() >= self.limits.per_neighbour
            && let Some(old) = queue.frames.pop_front()
        {
            self.frames -= 1;
            self.bytes -= old.frame.len();
            self.dropped += 1;
            self.drops.count(old.server, NO_NEIGHBOUR);
        }
        self.frames += 1;
        self.bytes += frame.len();
        queue.frames.push_back(Waiting {
            since: now,
            frame,
            server,
        });
        ask
    }

    /// Returns whether the caller must request the address or the interception now, although the
    /// packet is not stored.
    fn asks(&mut self, cause: Cause, now: Instant) -> bool {
        let room = self.queues.len() < 2 * self.limits.total;
        match self.queues.entry(cause) {
            Entry::Occupied(queue) if now.saturating_since(queue.get().asked) < ASK_AGAIN => false,
            Entry::Occupied(mut queue) => {
                queue.get_mut().asked = now;
                true
            }
            Entry::Vacant(place) if room => {
                place.insert(Queue {
                    frames: VecDeque::new(),
                    asked: now,
                });
                true
            }
            Entry::Vacant(_) => false,
        }
    }

    /// The neighbours for which packets wait.
    pub fn neighbours(&self) -> Vec<(PortId, IpAddr)> {
        let waiting = self
            .queues
            .iter()
            .filter(|(_, queue)| !queue.frames.is_empty());
        waiting
            .filter_map(|(cause, _)| match *cause {
                Cause::Neighbour(port, addr) => Some((port, addr)),
                Cause::LocalClient(_) => None,
            })
            .collect()
    }

    /// Removes and returns the packets that wait for a neighbour, in order.
    pub fn take(&mut self, port: PortId, addr: IpAddr) -> impl Iterator<Item = Waiting> + use<> {
        self.take_for(Cause::Neighbour(port, addr))
    }

    /// Removes and returns the packets of clients on this host for which `is_intercepted` is true.
    pub fn take_local_clients(
        &mut self,
        is_intercepted: impl Fn(&LocalClient) -> bool,
    ) -> Vec<Waiting> {
        let ready: Vec<Cause> = self
            .queues
            .keys()
            .filter(|cause| matches!(cause, Cause::LocalClient(client) if is_intercepted(client)))
            .copied()
            .collect();
        let mut frames = Vec::new();
        for cause in ready {
            frames.extend(self.take_for(cause));
        }
        frames
    }

    fn take_for(&mut self, cause: Cause) -> impl Iterator<Item = Waiting> + use<> {
        let queue = self.queues.remove(&cause);
        let frames = queue.map(|queue| queue.frames).unwrap_or_default();
        self.frames -= frames.len();
        let bytes = frames.iter().map(|waiting| waiting.frame.len());
        self.bytes -= bytes.sum::<usize>();
        frames.into_iter()
    }

    /// Removes the packets that wait for a neighbour that does not answer, counts them as dropped,
    /// and returns them in order.
    pub fn give_up(&mut self, port: PortId, addr: IpAddr) -> Vec<Frame> {
        let lost = self.take(port, addr).map(|waiting| {
            self.lose(waiting.server);
            waiting.frame
        });
        lost.collect()
    }

    /// Drops and counts the packets that have waited for [`TIMEOUT`].
    pub fn expire(&mut self, now: Instant) {
        let Self {
            queues,
            frames,
            bytes,
            dropped,
            drops,
            limits: _,
        } = self;
        queues.retain(|_, queue| {
            while let Some(waiting) = queue.frames.front()
                && now.saturating_since(waiting.since) >= TIMEOUT
                && let Some(old) = queue.frames.pop_front()
            {
                *frames -= 1;
                *bytes -= old.frame.len();
                *dropped += 1;
                drops.count(old.server, NO_NEIGHBOUR);
            }
            let asked = now.saturating_since(queue.asked) < ASK_AGAIN;
            asked || !queue.frames.is_empty()
        });
    }

    /// Number of packets that wait.
    pub const fn len(&self) -> usize {
        self.frames
    }

    /// Whether no packet waits.
    pub const fn is_empty(&self) -> bool {
        self.frames == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbour_address_is_requested_once_a_second_although_queues_are_full() {
        let mut held = Held::default();
        let (port, now) = (PortId(1), Instant::from_secs(1));
        let hop = |n: u32| IpAddr::from((0x0a00_0000 + n).to_be_bytes());
        let frame = || Frame::from_bytes(&[0; 60]);
        for n in 0..4096 {
            assert!(held.hold(port, hop(n), None, frame(), now));
        }
        // The queues are full: the packet is dropped, but the address is requested, at most once a
        // second and only for a limited number of neighbours.
        assert!(held.hold(port, hop(9000), None, frame(), now));
        assert!(!held.hold(port, hop(9000), None, frame(), now));
        assert!(held.hold(port, hop(9000), None, frame(), now + ASK_AGAIN));
        let asked = (10_000..40_000).filter(|&n| held.hold(port, hop(n), None, frame(), now));
        assert_eq!(asked.count(), TOTAL - 1);
        assert_eq!((held.len(), held.take(port, hop(9000)).count()), (TOTAL, 0));
        // The packets that did not fit into the queues are counted; none has timed out yet.
        let lost = held.dropped;
        assert_eq!(lost, 3 + 30_000);
        let later = now + TIMEOUT;
        held.expire(Instant::from_nanos(later.as_nanos() - 1));
        assert_eq!((held.len(), held.dropped), (TOTAL, lost));
        held.expire(later);
        assert!(held.is_empty() && held.queues.is_empty());
        assert_eq!(held.dropped, lost + 4096);
    }

    #[test]
    fn waiting_packets_are_bounded_per_neighbour_and_in_bytes() {
        let (port, now) = (PortId(1), Instant::from_secs(1));
        let hop = |n: u8| IpAddr::from([10, 0, 0, n]);
        let mut held = Held::default();
        for n in 0..150 {
            held.hold(port, hop(1), None, Frame::from_bytes(&[n; 60]), now);
        }
        assert_eq!((held.len(), held.dropped), (PER_NEIGHBOUR, 49));
        let first = held
            .take(port, hop(1))
            .next()
            .expect("packets wait for this neighbour");
        assert_eq!(
            first.frame.bytes()[0],
            49,
            "packets other than the oldest were dropped"
        );

        let mut held = Held::default();
        let long = Frame::from_bytes(&[0; 65_536]);
        for n in 0..4 {
            for _ in 0..64 {
                held.hold(port, hop(n), None, Frame::from_bytes(long.bytes()), now);
            }
        }
        assert_eq!((held.bytes, held.dropped), (BYTES, 0));
        assert!(
            held.hold(port, hop(9), None, Frame::from_bytes(&[0]), now),
            "the address of the neighbour is not requested"
        );
        assert_eq!((held.bytes, held.len(), held.dropped), (BYTES, 256, 1));
        assert_eq!(held.give_up(port, hop(0)).len(), 64);
        assert_eq!(held.dropped, 65);
    }
}
