//! A complete director in one value, for single-threaded programs, tests and simulations.

use alloc::vec::Vec;

use crate::fast_path::{Ahead, Passed, Plain};
use crate::memory::{Layout, Memory};
use crate::sync::Message;
use crate::{Control, IcmpError, Instant, Options, PacketMeta, Reset, Shard, Tuple, Verdict};

/// A [`Control`] and its only [`Shard`].
///
/// Pass packets to [`handle_packet`](Self::handle_packet) and
/// [`handle_icmp_error`](Self::handle_icmp_error), in the order in which they arrive. Each call
/// first runs the timers that are due. Without packets, call [`advance`](Self::advance) at
/// [`next_wakeup`](Self::next_wakeup), then [`end_down`](Self::end_down) while
/// [`Shard::has_down`] is true, and [`take_sync_message`](Self::take_sync_message) until it returns
/// `None`. Between any two of these calls, change or query the configuration through
/// [`control`](Self::control); the next call applies the changes.
///
/// ```
/// use core::net::SocketAddr;
/// use lvs_core::*;
///
/// let vip: SocketAddr = "198.51.100.1:80".parse().unwrap();
/// let service = ServiceKey::tcp(vip);
/// let mut director = Director::new(Options::default());
/// let now = Instant::ZERO;
/// director.control.add_service(service, ServiceConfig::new(Family::V4, "wlc"), None)?;
/// for server in ["10.0.0.11:80", "10.0.0.12:80"] {
///     let config = ServerConfig::new(1, Forwarding::Nat);
///     director.control.add_server(&service, server.parse().unwrap(), &config, now)?;
/// }
/// let client = "192.0.2.7:40000".parse().unwrap();
/// let syn = PacketMeta::tcp(Hook::Local, client, vip, TcpFlags::SYN);
/// let Verdict::Forward(forward) = director.handle_packet(&syn, now) else { panic!() };
/// assert_eq!(forward.target, "10.0.0.12:80".parse().unwrap());
/// # Ok::<(), lvs_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Director {
    /// The control half: services, servers and settings.
    pub control: Control,
    /// The only shard, with all connections.
    pub shard: Shard,
    now: Instant,
}

impl Director {
    /// A director without services. `options.shards` is ignored; there is one shard.
    pub fn new(options: Options) -> Self {
        Self::new_in(options, Memory::heap)
    }

    /// As [`new`](Self::new), with its connections in memory that the caller supplies; all words of
    /// the memory must be 0.
    pub fn new_in(options: Options, memory: impl FnOnce(Layout) -> Memory) -> Self {
        let control = Control::new(Options {
            shards: 1,
            ..options
        });
        let memory = memory(control.layout());
        let shard = control.shard_in(0, memory).expect("shard 0 exists");
        Self {
            control,
            shard,
            now: Instant::ZERO,
        }
    }

    /// Runs all timers that are due, and then decides on a packet. If `now` is before the time of
    /// the previous call, that time applies.
    pub fn handle_packet(&mut self, meta: &PacketMeta<'_>, now: Instant) -> Verdict {
        self.handle_packet_ahead(meta, &Ahead::NONE, now)
    }

    /// As [`handle_packet`](Self::handle_packet), and faster if `ahead` was prepared for the packet
    /// by [`Shard::ahead`] and [`Shard::aim`].
    pub fn handle_packet_ahead(
        &mut self,
        meta: &PacketMeta<'_>,
        ahead: &Ahead,
        now: Instant,
    ) -> Verdict {
        let now = self.follow(now);
        match self.shard.handle_packet_ahead(meta, ahead, now) {
            Ok(verdict) => verdict,
            Err(pending) => self.control.admit(&mut self.shard, meta, pending, now),
        }
    }

    /// Decides on a packet in the userspace fast path, like [`Shard::pass`]. If it returns `None`,
    /// it has only run due timers: call [`handle_packet_ahead`](Self::handle_packet_ahead).
    pub fn pass(&mut self, packet: &Plain, ahead: &Ahead, now: Instant) -> Option<Passed> {
        let now = self.follow(now);
        self.shard.pass(packet, ahead, now)
    }

    /// Runs all timers that are due, and then decides on an ICMP error.
    pub fn handle_icmp_error(&mut self, error: &IcmpError, now: Instant) -> Verdict {
        let now = self.follow(now);
        match self.shard.handle_icmp_error(error, now) {
            Ok(verdict) => verdict,
            Err(pending) => self
                .control
                .admit_icmp_error(&mut self.shard, error, pending, now),
        }
    }

    /// The time at which [`advance`](Self::advance) must be called next; `None` until the caller
    /// has set the clock.
    pub fn next_wakeup(&self) -> Option<Instant> {
        let (control, shard) = (self.control.next_wakeup(), self.shard.next_wakeup());
        let sync = self.shard.next_sync_message();
        let down = self.shard.has_down().then_some(self.now);
        [control, shard, sync, down].into_iter().flatten().min()
    }

    /// Closes more connections of removed servers, as their services require ([`Shard::end_down`]),
    /// and returns the resets to send. Visits at most `budget` slots of the table, and may return
    /// nothing although connections remain to be closed: then, [`Shard::has_down`] is true.
    pub fn end_down(&mut self, now: Instant, budget: usize) -> Vec<Reset> {
        let now = self.follow(now);
        self.shard.end_down(now, budget)
    }

    /// Removes at once the connection of the client's packets with this tuple. An embedding program
    /// that has both sockets of the connection, such as a proxy, calls this when it closes them.
    /// Returns `false` if there is no such connection, or if the connection controls other
    /// connections.
    ///
    /// ```
    /// use lvs_core::*;
    ///
    /// let vip = "198.51.100.1:80".parse().unwrap();
    /// let service = ServiceKey::tcp(vip);
    /// let mut director = Director::new(Options::default());
    /// let now = Instant::ZERO;
    /// director.control.add_service(service, ServiceConfig::new(Family::V4, "wlc"), None)?;
    /// let server = ServerConfig::new(1, Forwarding::Nat);
    /// director.control.add_server(&service, "10.0.0.11:80".parse().unwrap(), &server, now)?;
    /// let client = "192.0.2.7:40000".parse().unwrap();
    /// let syn = PacketMeta::tcp(Hook::Local, client, vip, TcpFlags::SYN);
    /// assert!(matches!(director.handle_packet(&syn, now), Verdict::Forward(_)));
    /// assert!(director.end(&syn.tuple, now));
    /// assert!(director.shard.is_empty() && !director.end(&syn.tuple, now));
    /// # Ok::<(), lvs_core::Error>(())
    /// ```
    pub fn end(&mut self, tuple: &Tuple, now: Instant) -> bool {
        self.follow(now);
        self.shard.end_at_once(tuple)
    }

    /// Stores the connections and templates of a synchronisation message, if a backup is running.
    pub fn handle_sync(&mut self, message: &[u8], now: Instant) {
        let now = self.follow(now);
        self.control.handle_sync(&mut self.shard, message, now);
    }

    /// The next synchronisation message to send: one that is full or two seconds old, or that was
    /// still being filled when the master was stopped.
    pub fn take_sync_message(&mut self, now: Instant) -> Option<Message> {
        let now = self.follow(now);
        self.shard.take_sync_message(now)
    }

    /// Removes the connections that have ended, and runs all timers that are due at `now`. Returns
    /// `now`, or the previous time if that is later.
    pub fn advance(&mut self, now: Instant) -> Instant {
        self.shard.reap();
        self.follow(now)
    }

    /// As [`advance`](Self::advance), but keeps connections that have ended at the time `now`: the
    /// next packet may be the host's reply to the packet that ended one of them.
    fn follow(&mut self, now: Instant) -> Instant {
        self.now = self.now.max(now);
        self.control.advance_with(&mut self.shard, self.now);
        self.now
    }
}
