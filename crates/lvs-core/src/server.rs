//! The record of one real server in one service: its settings, and the counts of its connections.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::SocketAddr;
use core::sync::atomic::Ordering::{Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64};

use crate::attempts::AttemptCounters;
use crate::conn::flag;
use crate::settings::{Extras, OnServerDown};
use crate::stats::Latency;
use crate::tunnel::Tunnel;
use crate::{Error, Forwarding, Protocol, ServerConfig, ServerId};

/// The server is in a service, and not removed (`IP_VS_DEST_CF_AVAILABLE`).
const AVAILABLE: u8 = 0x1;
/// The server has reached its upper threshold, and has not fallen below the lower threshold since
/// (`IP_VS_DEST_F_OVERLOAD`).
const OVERLOADED: u8 = 0x2;

/// One real server in one service (the kernel's `ip_vs_dest`).
///
/// Settings and counts are atomics: [`Control`](crate::Control) writes settings, and every shard
/// updates counts when its connections open, change state and end. Counts are exact while no shard
/// processes a packet.
#[derive(Debug)]
pub struct Server {
    id: ServerId,
    addr: SocketAddr,
    /// The weight that schedulers use: the configured weight, or another value during a slow start.
    weight: AtomicI32,
    last_weight: AtomicI32,
    configured_weight: AtomicI32,
    /// The tenths of the configured weight that apply during a slow start; 10 without a slow start.
    tenths: AtomicU8,
    forwarding: AtomicU8,
    tunnel: AtomicU64,
    upper: AtomicU32,
    lower: AtomicU32,
    flags: AtomicU8,
    active: AtomicI32,
    total: AtomicI32,
    templates: AtomicI32,
    /// Number of entries of schedulers' caches, and of connections of health checks, that refer to
    /// the server.
    held: AtomicI32,
    /// Action on the server's connections when the server is removed.
    on_down: AtomicU8,
    /// Flags of new connections to the server, apart from the kernel's.
    watches: AtomicU32,
    latency: Latency,
    /// Number of failures since the server last answered a new connection.
    unanswered: AtomicU32,
    attempts: AttemptCounters,
    watched: AtomicBool,
    /// The number of the server's bit in the word `marks`.
    mark: u8,
    marks: Arc<AtomicU64>,
}

/// Words in which servers set the bit of their number when they change; 64 servers share one word.
#[derive(Debug, Default)]
pub(crate) struct Marks(Vec<Arc<AtomicU64>>);

impl Server {
    /// The record of an available server without connections.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn new(id: ServerId, addr: SocketAddr, config: &ServerConfig) -> Result<Self, Error> {
        Self::check(config)?;
        let server = Self {
            id,
            addr,
            weight: AtomicI32::new(0),
            last_weight: AtomicI32::new(config.weight),
            configured_weight: AtomicI32::new(0),
            tenths: AtomicU8::new(10),
            forwarding: AtomicU8::new(0),
            tunnel: AtomicU64::new(0),
            upper: AtomicU32::new(0),
            lower: AtomicU32::new(0),
            flags: AtomicU8::new(0),
            active: AtomicI32::new(0),
            total: AtomicI32::new(0),
            templates: AtomicI32::new(0),
            held: AtomicI32::new(0),
            on_down: AtomicU8::new(0),
            watches: AtomicU32::new(0),
            latency: Latency::default(),
            unanswered: AtomicU32::new(0),
            attempts: AttemptCounters::default(),
            watched: AtomicBool::new(false),
            mark: 0,
            marks: Arc::default(),
        };
        server.configure(config);
        Ok(server)
    }

    pub(crate) fn mark_in(&mut self, marks: &mut Marks) {
        let word = self.id.index() / 64;
        if marks.0.len() <= word {
            marks.0.resize_with(word + 1, Arc::default);
        }
        self.marks = marks.0[word].clone();
        self.mark = (self.id.0 % 64) as u8;
    }

    /// From now on, the server sets its bit at each change of a value that schedulers use. Returns
    /// the word, and the number of the bit in it.
    pub(crate) fn watch(&self) -> (&Arc<AtomicU64>, u8) {
        self.watched.store(true, Relaxed);
        (&self.marks, self.mark)
    }

    pub(crate) fn unwatch(&self) {
        self.watched.store(false, Relaxed);
    }

    /// Sets the server's bit, if a scheduler [watches](Self::watch) the server.
    #[inline]
    fn changed(&self) {
        if self.watched.load(Relaxed) {
            // A reader that sees the bit also sees the change.
            self.marks.fetch_or(1 << self.mark, Release);
        }
    }

    /// Checks whether the kernel would accept these settings, in the kernel's order of checks
    /// (`ip_vs_add_dest`, `ip_vs_edit_dest`).
    ///
    /// # Errors
    /// [`Error::WeightRange`], [`Error::ThresholdRange`], [`Error::ThresholdTooLarge`],
    /// [`Error::TunnelPort`].
    pub fn check(config: &ServerConfig) -> Result<(), Error> {
        if config.weight < 0 {
            return Err(Error::WeightRange);
        }
        if config.lower > config.upper {
            return Err(Error::ThresholdRange);
        }
        if i32::try_from(config.upper).is_err() {
            return Err(Error::ThresholdTooLarge);
        }
        if config.tunnel.about().has_port && config.tunnel.port() == 0 {
            return Err(Error::TunnelPort);
        }
        Ok(())
    }

    /// Replaces the settings and makes the server available (`__ip_vs_update_dest`). The caller
    /// must have checked the settings.
    pub(crate) fn configure(&self, config: &ServerConfig) {
        self.configured_weight.store(config.weight, Relaxed);
        self.set_share(config.weight, 10);
        self.forwarding.store(config.forwarding as u8, Relaxed);
        self.tunnel.store(config.tunnel.pack(), Relaxed);
        let changed =
            self.upper.load(Relaxed) != config.upper || self.lower.load(Relaxed) != config.lower;
        self.upper.store(config.upper, Relaxed);
        self.lower.store(config.lower, Relaxed);
        if changed {
            let total = self.total();
            if config.upper == 0 || total < self.effective_lower() {
                self.clear(OVERLOADED);
            } else if total >= config.upper {
                self.set(OVERLOADED);
            }
        }
        self.set(AVAILABLE);
        self.changed();
    }

    /// Sets the last weight to the present weight, before a server is added, also if the record of
    /// a removed server is used again.
    pub(crate) fn reset_last_weight(&self) {
        self.last_weight.store(self.weight(), Relaxed);
    }

    /// Sets the weight that schedulers use, and the tenths of the configured weight to which it
    /// corresponds. A weight that is not 0 also becomes the last weight.
    pub(crate) fn set_share(&self, weight: i32, tenths: u8) {
        self.weight.store(weight, Relaxed);
        if weight != 0 {
            self.last_weight.store(weight, Relaxed);
        }
        self.tenths.store(tenths, Relaxed);
        self.changed();
    }

    /// Adjusts the stored last weight of a server with weight 0, when the factor of its service's
    /// weights changes from `before` to `after`.
    pub(crate) fn scale_last_weight(&self, before: i32, after: i32) {
        let scaled = self.last_weight() / before * after;
        self.last_weight.store(scaled, Relaxed);
    }

    /// Applies settings of the service that the kernel's IPVS does not have. `timed`: the service's
    /// scheduler uses the latency of the server's answers. `is_udp`: the service is for UDP alone,
    /// so that attempts over UDP are counted.
    pub(crate) fn follow_extras(&self, extras: &Extras, timed: bool, is_udp: bool) {
        self.on_down.store(extras.on_server_down as u8, Relaxed);
        let mut watches = 0;
        if extras.on_server_down.resets() {
            watches |= flag::TRACKED;
        }
        if timed {
            watches |= flag::TIMED;
        }
        if is_udp {
            watches |= flag::AWAITED;
        }
        self.watches.store(watches, Relaxed);
    }

    /// Flags of a new connection to the server, apart from the kernel's. For TCP, and for a UDP
    /// service with NAT, they always include the flag by which attempts are counted.
    #[inline]
    pub(crate) fn watches(&self, protocol: Protocol) -> u32 {
        let watches = self.watches.load(Relaxed);
        match protocol {
            Protocol::TCP => watches | flag::TIMED,
            _ if self.forwarding().translates() => watches & !flag::TRACKED,
            _ => watches & !(flag::TRACKED | flag::AWAITED),
        }
    }

    /// The kernel's flags of a new connection to the server (`ip_vs_bind_dest`).
    pub(crate) fn connection_flags(&self, conntrack: bool) -> u32 {
        let method = self.forwarding();
        let mut flags = method as u32 | flag::INACTIVE;
        if !method.translates() {
            flags |= flag::NO_OUTPUT;
        }
        if conntrack {
            flags |= flag::NFCT;
        }
        flags
    }

    pub(crate) fn on_down(&self) -> OnServerDown {
        OnServerDown::from_bits(self.on_down.load(Relaxed))
    }

    /// Whether the server is removed, and its connections must be closed.
    pub(crate) fn has_gone(&self) -> bool {
        !self.is_available() && self.on_down() != OnServerDown::Kernel
    }

    /// Marks the server as removed from its service; connections may still refer to the record.
    pub(crate) fn retire(&self) {
        self.clear(AVAILABLE);
    }

    /// Number that identifies the server in its director.
    pub const fn id(&self) -> ServerId {
        self.id
    }

    /// Address and port. With port 0, packets keep their destination port.
    pub const fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The present settings of the server.
    pub fn config(&self) -> ServerConfig {
        ServerConfig {
            weight: self.configured_weight.load(Relaxed),
            forwarding: self.forwarding(),
            tunnel: self.tunnel(),
            upper: self.upper.load(Relaxed),
            lower: self.lower.load(Relaxed),
        }
    }

    /// Share of new connections; a server with 0 gets none. During a slow start of a server of the
    /// service, this may differ from the configured weight ([`config`](Self::config)).
    #[inline]
    pub fn weight(&self) -> i32 {
        self.weight.load(Relaxed)
    }

    /// The last weight that was not 0, or the weight with which the server was added. `mh` builds
    /// its table from it.
    #[inline]
    pub fn last_weight(&self) -> i32 {
        self.last_weight.load(Relaxed)
    }

    /// Percentage of the weight that applies during a slow start; `None` otherwise.
    pub fn slow_start(&self) -> Option<u8> {
        let tenths = self.tenths.load(Relaxed);
        (tenths < 10).then_some(tenths * 10)
    }

    /// The server's response time to new connections. It is measured with NAT and full NAT: always
    /// for TCP; for other protocols, only if the service's scheduler uses it.
    pub const fn latency(&self) -> &Latency {
        &self.latency
    }

    /// Number of failures since the server last answered a new connection: connections that it
    /// refused (RST), and repeated SYNs of clients without an answer, each repetition counted.
    /// Counted only with NAT and full NAT.
    pub fn unanswered(&self) -> u32 {
        self.unanswered.load(Relaxed)
    }

    pub(crate) const fn attempts(&self) -> &AttemptCounters {
        &self.attempts
    }

    /// Records whether the server has answered a new connection (`good`).
    pub(crate) fn note_answer(&self, good: bool) {
        if good {
            self.unanswered.store(0, Relaxed);
        } else {
            // Two failures at the same time may be counted as one, like two samples of the response
            // time.
            let more = self.unanswered().saturating_add(1);
            self.unanswered.store(more, Relaxed);
        }
    }

    /// Forwarding method of new connections.
    #[inline]
    pub fn forwarding(&self) -> Forwarding {
        Forwarding::from_bits(self.forwarding.load(Relaxed).into())
    }

    /// Encapsulation of packets, if the method is tunnelling. A change applies to existing
    /// connections, too.
    #[inline]
    pub fn tunnel(&self) -> Tunnel {
        Tunnel::unpack(self.tunnel.load(Relaxed))
    }

    /// Whether the server is configured in a service, and not removed.
    #[inline]
    pub fn is_available(&self) -> bool {
        self.flags.load(Relaxed) & AVAILABLE != 0
    }

    /// Whether the server has reached its upper threshold, and has not fallen below the lower
    /// threshold since.
    #[inline]
    pub fn is_overloaded(&self) -> bool {
        self.flags.load(Relaxed) & OVERLOADED != 0
    }

    /// Whether the server is not overloaded and has a weight above 0, as most schedulers require.
    #[inline]
    pub fn is_usable(&self) -> bool {
        !self.is_overloaded() && self.weight() > 0
    }

    /// Number of connections in active states.
    #[inline]
    pub fn active(&self) -> u32 {
        self.active.load(Relaxed).max(0).unsigned_abs()
    }

    /// Number of connections in inactive states.
    #[inline]
    pub fn inactive(&self) -> u32 {
        (self.total.load(Relaxed) - self.active.load(Relaxed))
            .max(0)
            .unsigned_abs()
    }

    /// Number of connections; persistence templates and connections of health checks do not count.
    #[inline]
    pub fn total(&self) -> u32 {
        self.total.load(Relaxed).max(0).unsigned_abs()
    }

    /// Number of persistence templates that refer to the server.
    #[inline]
    pub fn templates(&self) -> u32 {
        self.templates.load(Relaxed).max(0).unsigned_abs()
    }

    /// The load that `lc` and `wlc` compare: active × 256 + total (`ip_vs_dest_conn_overhead`).
    #[inline]
    pub fn overhead(&self) -> i32 {
        (self.active.load(Relaxed) << 8).wrapping_add(self.total.load(Relaxed))
    }

    /// Counts a connection until the returned guard is dropped, for programs that pick servers
    /// without packets.
    pub fn open(self: &Arc<Self>) -> OpenConnection {
        self.bind(0);
        OpenConnection {
            server: self.clone(),
        }
    }

    /// Counts a connection with these flags (`ip_vs_bind_dest`), and sets the overload flag at the
    /// upper threshold. The connection of a health check only prevents that the record is freed.
    pub(crate) fn bind(&self, flags: u32) {
        if flags & flag::PROBE != 0 {
            self.held.fetch_add(1, Relaxed);
            return;
        }
        if flags & flag::INACTIVE == 0 {
            self.active.fetch_add(1, Relaxed);
        }
        let total = (self.total.fetch_add(1, Relaxed) + 1).max(0).unsigned_abs();
        let upper = self.upper.load(Relaxed);
        if upper != 0 && total == upper {
            self.set(OVERLOADED);
        }
        self.changed();
    }

    /// Subtracts a connection from the counts (`ip_vs_unbind_dest`), and clears the overload flag
    /// below the lower threshold. The connection of a health check is not in the counts: the record
    /// may then be freed.
    pub(crate) fn unbind(&self, flags: u32) {
        if flags & flag::PROBE != 0 {
            self.held.fetch_sub(1, Relaxed);
            return;
        }
        if flags & flag::INACTIVE == 0 {
            self.active.fetch_sub(1, Relaxed);
        }
        let before = self.total.fetch_sub(1, Relaxed).max(0).unsigned_abs();
        if self.upper.load(Relaxed) != 0 && before == self.effective_lower() {
            self.clear(OVERLOADED);
        }
        self.changed();
    }

    /// Counts a connection with these flags that enters or leaves an active state; connections of
    /// health checks are not counted.
    pub(crate) fn set_active(&self, active: bool, flags: u32) {
        if flags & flag::PROBE != 0 {
            return;
        }
        if active {
            self.active.fetch_add(1, Relaxed);
        } else {
            self.active.fetch_sub(1, Relaxed);
        }
        self.changed();
    }

    pub(crate) fn is_referenced(&self) -> bool {
        self.total.load(Relaxed) > 0
            || self.templates.load(Relaxed) > 0
            || self.held.load(Relaxed) > 0
    }

    /// Counts a template that refers to the server (`ip_vs_bind_dest`).
    pub(crate) fn bind_template(&self) {
        self.templates.fetch_add(1, Relaxed);
    }

    /// Counts that a template of this server was removed (`ip_vs_unbind_dest`).
    pub(crate) fn unbind_template(&self) {
        self.templates.fetch_sub(1, Relaxed);
    }

    #[cfg(test)]
    pub(crate) fn overload_for_test(&self) {
        self.set(OVERLOADED);
        self.changed();
    }

    /// The configured lower threshold; if it is 0, three quarters of the upper one, rounded up.
    fn effective_lower(&self) -> u32 {
        match self.lower.load(Relaxed) {
            0 => {
                let upper = self.upper.load(Relaxed);
                upper - (upper >> 2)
            }
            lower => lower,
        }
    }

    fn set(&self, flag: u8) {
        self.flags.fetch_or(flag, Relaxed);
    }

    fn clear(&self, flag: u8) {
        self.flags.fetch_and(!flag, Relaxed);
    }
}

/// Counts as one connection of a server until it is dropped.
#[derive(Debug)]
#[must_use = "the connection is counted until this value is dropped"]
pub struct OpenConnection {
    server: Arc<Server>,
}

impl OpenConnection {
    /// The server of the connection.
    pub fn server(&self) -> &Server {
        &self.server
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.server.unbind(0);
    }
}

/// A server in a scheduler's cache. While this value exists, the record is not freed.
#[derive(Debug)]
pub(crate) struct HeldServer(Arc<Server>);

impl HeldServer {
    pub(crate) fn new(server: &Arc<Server>) -> Self {
        server.held.fetch_add(1, Relaxed);
        Self(server.clone())
    }
}

impl Clone for HeldServer {
    fn clone(&self) -> Self {
        Self::new(&self.0)
    }
}

impl core::ops::Deref for HeldServer {
    type Target = Arc<Server>;

    fn deref(&self) -> &Arc<Server> {
        &self.0
    }
}

impl Drop for HeldServer {
    fn drop(&mut self) {
        self.0.held.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(upper: u32, lower: u32) -> Server {
        let config = ServerConfig {
            upper,
            lower,
            ..ServerConfig::new(1, Forwarding::Nat)
        };
        Server::new(ServerId(0), "10.0.0.1:80".parse().unwrap(), &config).unwrap()
    }

    #[test]
    fn threshold_hysteresis_equals_kernel_hysteresis() {
        for (upper, lower, on, off) in [
            (100, 0, 100, 74),
            (4, 0, 4, 2),
            (2, 0, 2, 1),
            (1, 0, 1, 0),
            (10, 5, 10, 4),
        ] {
            let server = server(upper, lower);
            for n in 1..=on {
                assert!(
                    !server.is_overloaded(),
                    "the server is overloaded before connection {n}, below its upper threshold {upper}"
                );
                server.bind(flag::INACTIVE);
            }
            assert!(
                server.is_overloaded(),
                "the server is not overloaded at {on} connections, with upper threshold {upper}"
            );
            while server.total() > off + 1 {
                server.unbind(flag::INACTIVE);
                assert!(
                    server.is_overloaded(),
                    "the server is no longer overloaded, with thresholds {upper} and {lower} and {} connections",
                    server.total()
                );
            }
            server.unbind(flag::INACTIVE);
            assert!(
                !server.is_overloaded(),
                "the server is still overloaded at {off} connections, with thresholds {upper} and {lower}"
            );
        }
    }

    #[test]
    fn server_edit_updates_overload_only_if_thresholds_change() {
        let server = server(0, 0);
        for _ in 0..5 {
            server.bind(flag::INACTIVE);
        }
        let config = ServerConfig {
            upper: 5,
            ..server.config()
        };
        server.configure(&config);
        assert!(
            server.is_overloaded(),
            "an upper threshold equal to the present count does not overload the server"
        );
        server.unbind(flag::INACTIVE);
        server.configure(&config);
        assert!(
            server.is_overloaded(),
            "setting the same thresholds again has changed the overload flag"
        );
        server.configure(&ServerConfig {
            upper: 100,
            ..config
        });
        assert!(
            !server.is_overloaded(),
            "a server below its new lower threshold is still overloaded"
        );
    }
}
