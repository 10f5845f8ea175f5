//! Chooses the server for a connection by a director of `lvs-core`, to which the proxy reports
//! events of connections in place of packets.
//!
//! The proxy reports a new connection as its SYN, the server's answer and the client's, so that the
//! connection counts as active. From time to time, it reports the forwarded bytes of each direction
//! as one packet of this length. When a connection ends, the proxy removes it from the director.
//! Connections in the director never expire, because each relay has its own timer.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use lvs_core::api::ServiceId;
use lvs_core::{
    Director, Hook, Instant, PacketMeta, Protocol, TcpFlags, Transport, Tuple, Verdict,
};

use super::Options;
use super::clients::{Admission, Clients, Slot};
use super::close_signal::CloseSignal;

/// Timeout in seconds of connections in the director: the longest that ipvsadm permits, because
/// these connections must not expire.
const NEVER: u32 = 31 * 86_400;
/// Number of forwarded bytes after which the proxy reports them, unless `COUNT_AFTER` passes
/// earlier.
const COUNT_BYTES: u64 = 1 << 20;
/// Time in milliseconds after which the proxy reports forwarded bytes.
const COUNT_AFTER: u64 = 1_000;

pub(super) struct Inner {
    pub(super) director: Director,
    /// For each server that has had a connection, the signal that closes its connections.
    close_signals: HashMap<(ServiceId, SocketAddr), Arc<CloseSignal>>,
}

impl Inner {
    /// Closes the connections of the servers for which `of` returns true.
    pub(super) fn end_connections(&mut self, of: impl Fn(&ServiceId, &SocketAddr) -> bool) {
        self.close_signals
            .retain(|(service, server), close_signal| {
                let ends = of(service, server);
                if ends {
                    close_signal.close();
                }
                !ends
            });
    }

    /// Removes the close signals of servers without a connection.
    pub(super) fn sweep(&mut self) {
        self.close_signals
            .retain(|_, close_signal| Arc::strong_count(close_signal) > 1);
    }
}

/// The director, and counters that all connections share.
pub(super) struct Balancer {
    inner: Mutex<Inner>,
    zero: std::time::Instant,
    options: RwLock<HashMap<ServiceId, Options>>,
    streams: AtomicUsize,
    clients: Arc<Clients>,
    most: AtomicUsize,
    /// Number of connections, and of datagrams of new clients, that were refused because no slot
    /// was free.
    full: AtomicU64,
    evicted: AtomicU64,
    /// Number of connections, and of datagrams of new clients, that the director refused: no server
    /// was available, or a limit or a filter refused them.
    refused: AtomicU64,
}

/// Counters of a proxy: present connections and clients, their maximum, and evicted and refused
/// ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of present TCP connections, and of clients that send datagrams.
    pub connections: usize,
    /// Maximum number of connections and clients at a time.
    pub most: usize,
    /// Number of connections, and of datagrams of new clients, that were refused because no slot
    /// was free.
    pub full: u64,
    /// Number of evicted clients.
    pub evicted: u64,
    /// Number of connections, and of datagrams of new clients, that the director refused: no server
    /// was available, or a limit or a filter refused them.
    pub refused: u64,
}

/// 1/`KEPT_PART` of the slots is reserved for clients that send datagrams.
const KEPT_PART: usize = 16;
/// At most 1/`DATAGRAM_PART` of the slots is used for clients that send datagrams, because their
/// addresses can be forged.
const DATAGRAM_PART: usize = 2;

impl Balancer {
    pub(super) fn new(most: usize, seed: u64) -> Self {
        let mut director = Director::new(lvs_core::Options {
            // A new connection may already be in the table while one that has ended is still in it.
            max_connections: most + most / 8 + 64,
            seed,
            ..lvs_core::Options::default()
        });
        director
            .control
            .set_timeouts(NEVER, NEVER, NEVER)
            .unwrap_or_default();
        Self {
            inner: Mutex::new(Inner {
                director,
                close_signals: HashMap::new(),
            }),
            zero: std::time::Instant::now(),
            options: RwLock::default(),
            streams: AtomicUsize::new(0),
            clients: Arc::default(),
            most: AtomicUsize::new(most),
            full: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn now(&self) -> Instant {
        let nanos = self.zero.elapsed().as_nanos();
        Instant::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// The balancer's clock: milliseconds since the start of the proxy.
    pub(super) fn clock(&self) -> u64 {
        u64::try_from(self.zero.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    pub(super) fn used(&self) -> usize {
        self.streams.load(Ordering::Relaxed) + self.clients.held()
    }

    /// Sets the maximum number of connections and clients. A lower maximum closes none of them.
    pub(super) fn set_most(&self, most: usize) {
        self.most.store(most, Ordering::Relaxed);
    }

    pub(super) fn counts(&self) -> Counts {
        let number = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            connections: self.used(),
            most: self.most.load(Ordering::Relaxed),
            full: number(&self.full),
            evicted: number(&self.evicted),
            refused: number(&self.refused),
        }
    }

    pub(super) fn set_options(&self, options: HashMap<ServiceId, Options>) {
        *self.options.write().unwrap_or_else(PoisonError::into_inner) = options;
    }

    pub(super) fn options(&self, service: &ServiceId) -> Options {
        let options = self.options.read().unwrap_or_else(PoisonError::into_inner);
        options.get(service).copied().unwrap_or_default()
    }

    /// Reserves a slot for a TCP connection; `None` if no slot is free for TCP connections.
    pub(super) fn place(self: &Arc<Self>) -> Option<Place> {
        let most = self.most.load(Ordering::Relaxed);
        let streams = self.streams.fetch_add(1, Ordering::Relaxed);
        let place = Place(Arc::clone(self));
        if streams >= most - most / KEPT_PART || streams + self.clients.held() >= most {
            self.full.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(place)
    }

    /// Reserves a slot for a client that sends datagrams to `service`; `None` if no slot is free
    /// and no client can be evicted.
    pub(super) fn slot(&self, service: ServiceId, client: SocketAddr) -> Option<Slot> {
        let most = self.most.load(Ordering::Relaxed);
        let crowded = self.used() >= most;
        let room = (most / DATAGRAM_PART, crowded);
        match self.clients.slot(service, client, room, self.clock()) {
            Admission::Free(slot) => Some(slot),
            Admission::Instead(slot) => {
                self.evicted.fetch_add(1, Ordering::Relaxed);
                Some(slot)
            }
            Admission::Full => {
                self.full.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    }

    /// Chooses the server of a new connection; `None` if the director refuses the connection for
    /// any reason.
    pub(super) fn open(
        self: &Arc<Self>,
        service: ServiceId,
        protocol: Protocol,
        client: SocketAddr,
        virt: SocketAddr,
        length: usize,
    ) -> Option<Entry> {
        let tuple = Tuple::new(protocol, client, virt);
        let now = self.now();
        let mut inner = self.lock();
        let (transport, len) = match protocol {
            Protocol::UDP => (Transport::Udp(&[]), u32::try_from(length).unwrap_or(0) + 28),
            _ => (Transport::Tcp(TcpFlags(TcpFlags::SYN)), 60),
        };
        let verdict = inner
            .director
            .handle_packet(&PacketMeta::new(Hook::Local, tuple, transport, len), now);
        let Verdict::Forward(forward) = verdict else {
            self.refused.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(%client, %virt, ?verdict, "the director refused the connection");
            return None;
        };
        let key = (service, forward.target);
        let close_signal = Arc::clone(inner.close_signals.entry(key).or_default());
        drop(inner);
        Some(Entry {
            balancer: Arc::clone(self),
            tuple,
            server: forward.target,
            close_signal,
            pending: [AtomicU64::new(0), AtomicU64::new(0)],
            moved: AtomicU64::new(self.clock()),
            reported: AtomicU64::new(self.clock()),
        })
    }
}

/// A slot of a TCP connection; dropping it frees the slot.
pub(super) struct Place(Arc<Balancer>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    In = 0,
    Out = 1,
}

/// A connection as the director counts it; dropping it removes the connection.
pub(super) struct Entry {
    balancer: Arc<Balancer>,
    tuple: Tuple,
    pub(super) server: SocketAddr,
    pub(super) close_signal: Arc<CloseSignal>,
    /// Number of forwarded bytes in each direction that are still to be reported to the director.
    pending: [AtomicU64; 2],
    /// Times in milliseconds on the balancer's clock: when bytes were last forwarded, and when
    /// bytes were last reported to the director.
    moved: AtomicU64,
    reported: AtomicU64,
}

impl Entry {
    /// Reports that the server has answered, so that the connection counts as active.
    pub(super) fn established(&self) {
        let now = self.balancer.now();
        let mut inner = self.balancer.lock();
        let tcp = |flags| Transport::Tcp(TcpFlags(flags));
        self.count(
            &mut inner,
            Way::Out,
            tcp(TcpFlags::SYN | TcpFlags::ACK),
            60,
            now,
        );
        self.count(&mut inner, Way::In, tcp(TcpFlags::ACK), 52, now);
    }

    /// Counts forwarded bytes, and reports them to the director from time to time.
    pub(super) fn moved(&self, way: Way, bytes: usize) {
        let clock = self.balancer.clock();
        self.moved.store(clock, Ordering::Relaxed);
        let bytes = bytes as u64;
        let pending = self.pending[way as usize].fetch_add(bytes, Ordering::Relaxed) + bytes;
        let reported = self.reported.load(Ordering::Relaxed);
        if pending >= COUNT_BYTES || clock.saturating_sub(reported) >= COUNT_AFTER {
            self.reported.store(clock, Ordering::Relaxed);
            self.count_pending(&mut self.balancer.lock());
        }
    }

    fn count_pending(&self, inner: &mut Inner) {
        let now = self.balancer.now();
        let transport = match self.tuple.protocol {
            Protocol::UDP => Transport::Udp(&[]),
            _ => Transport::Tcp(TcpFlags(TcpFlags::ACK)),
        };
        for way in [Way::In, Way::Out] {
            let mut bytes = self.pending[way as usize].swap(0, Ordering::Relaxed);
            while bytes > 0 {
                let len = u32::try_from(bytes).unwrap_or(u32::MAX);
                self.count(inner, way, transport, len, now);
                bytes -= u64::from(len);
            }
        }
    }

    fn count(&self, inner: &mut Inner, way: Way, transport: Transport<'_>, len: u32, now: Instant) {
        let (hook, tuple) = match way {
            Way::In => (Hook::Local, self.tuple),
            Way::Out => {
                let answer = Tuple {
                    src: self.server,
                    dst: self.tuple.src,
                    ..self.tuple
                };
                (Hook::Transit, answer)
            }
        };
        // The verdict is not needed: the bytes were already forwarded.
        let _ = inner
            .director
            .handle_packet(&PacketMeta::new(hook, tuple, transport, len), now);
    }

    /// Waits until no bytes have been forwarded for the time that `limit` returns, which may change
    /// during the wait.
    pub(super) async fn idle(&self, limit: impl Fn() -> Duration) {
        loop {
            let limit = u64::try_from(limit().as_millis()).unwrap_or(u64::MAX);
            let still = self.balancer.clock() - self.moved.load(Ordering::Relaxed);
            if still >= limit {
                return;
            }
            tokio::time::sleep(Duration::from_millis(limit - still)).await;
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut inner = self.balancer.lock();
        self.count_pending(&mut inner);
        let now = self.balancer.now();
        inner.director.end(&self.tuple, now);
    }
}
