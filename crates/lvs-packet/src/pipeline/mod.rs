//! The packet path: processes received frames, and returns the frames to send. It does no I/O and
//! reads no clock. Tests, fuzzing and benches call the same functions as the dataplane.
//!
//! ```text
//!  passing ── a plain packet of an established connection ─────────────────────────────────────────────────────── out
//!  intake ─── link layer, IP header ──── (fragments) ──▶ datagram ── decide ─┬─ forward ─┬─ (tunnel) ─┬─ leave ── out
//!    │                                                                       ├─ reply ───┘            │
//!    └─ link: ARP, NDP                                                       └─ host: left, given back, answered
//! ```
//!
//! Each frame has exactly one [`Fate`], and [`Counters`] account for all of them.

mod checks;
mod counters;
mod datagram;
mod failure;
mod forward;
mod host;
mod intake;
mod leave;
mod link;
mod output;
mod own;
mod passing;
mod reply;
mod reset;
mod share;
mod tunnel;
mod warm;

use std::net::SocketAddrV4;
use std::sync::Arc;

use lvs_core::fast_path::{Ahead, Passed, Plain};
use lvs_core::stats::ServerDrops;
use lvs_core::{
    ConnId, Director, IcmpError, Instant, PacketMeta, Protocol, ServerId, Tuple, Verdict,
};

use crate::common::Common;
use crate::drop::FrameDrop;
use crate::frame::{Frame, MAX_FRAME};
use crate::held::{Held, Waiting};
use crate::intercept::Intercept;
use crate::net::{Net, PortId};
use crate::parse;
use crate::rewrite::mac;
use crate::settings::Settings;
use crate::syn_limiter::SynLimiter;
use crate::tunnel_path::KnownPaths;
use lvs_sys::prefetch;

pub use self::counters::{Counters, Fate};
use self::leave::Pieces;
pub use self::output::{Output, Request, Whole};
use self::own::OwnError;
pub use self::share::Share;
use self::warm::{AHEAD, Known};

/// The director, which decides on packets.
pub trait Decide {
    /// Decides on a datagram other than an ICMP error.
    fn packet(&mut self, meta: &PacketMeta<'_>, now: Instant) -> Verdict;

    /// Decides on an ICMP error about a packet.
    fn icmp_error(&mut self, error: &IcmpError, now: Instant) -> Verdict;

    /// Whether a datagram with these addresses belongs to a connection.
    fn knows(&self, _tuple: &Tuple) -> bool {
        false
    }

    /// Number of the client's packets in a connection.
    fn packets_of(&self, _conn: ConnId) -> u32 {
        0
    }

    /// A hint for the look-up of a packet between these addresses. The first words that the look-up
    /// reads are being prefetched. `None` if there is no hint, or if prefetching has no benefit.
    fn ahead(&self, _protocol: Protocol, _src: SocketAddrV4, _dst: SocketAddrV4) -> Option<Ahead> {
        None
    }

    /// The second step of the prefetch, after [`ahead`](Self::ahead): reads the prefetched words,
    /// and prefetches the slot to which they refer.
    fn aim(&self, _ahead: &mut Ahead) {}

    /// As [`packet`](Self::packet), and faster if `ahead` and `aim` were called for the packet.
    fn packet_ahead(&mut self, meta: &PacketMeta<'_>, _ahead: &Ahead, now: Instant) -> Verdict {
        self.packet(meta, now)
    }

    /// As [`packet_ahead`](Self::packet_ahead), by the userspace fast path. If it returns `None`,
    /// nothing has changed: call `packet_ahead`.
    fn pass(&mut self, _packet: &Plain, _ahead: &Ahead, _now: Instant) -> Option<Passed> {
        None
    }
}

impl Decide for Director {
    fn packet(&mut self, meta: &PacketMeta<'_>, now: Instant) -> Verdict {
        self.handle_packet(meta, now)
    }

    fn icmp_error(&mut self, error: &IcmpError, now: Instant) -> Verdict {
        self.handle_icmp_error(error, now)
    }

    fn knows(&self, tuple: &Tuple) -> bool {
        self.shard.knows(tuple)
    }

    fn packets_of(&self, conn: ConnId) -> u32 {
        self.shard.packets_of(conn)
    }

    fn ahead(&self, protocol: Protocol, src: SocketAddrV4, dst: SocketAddrV4) -> Option<Ahead> {
        Some(self.shard.ahead_v4(protocol, src, dst, prefetch))
    }

    fn aim(&self, ahead: &mut Ahead) {
        self.shard.aim(ahead, prefetch);
    }

    fn packet_ahead(&mut self, meta: &PacketMeta<'_>, ahead: &Ahead, now: Instant) -> Verdict {
        self.handle_packet_ahead(meta, ahead, now)
    }

    fn pass(&mut self, packet: &Plain, ahead: &Ahead, now: Instant) -> Option<Passed> {
        Self::pass(self, packet, ahead, now)
    }
}

/// The environment of the pipeline, which can differ between two calls.
#[derive(Debug)]
pub struct Env<'a, N> {
    /// Ports, routes and neighbours.
    pub net: &'a N,
    /// The traffic that is hidden from the host's network stack.
    pub intercept: &'a Intercept,
    /// Whether tunnels copy "don't fragment" to the outer IPv4 header, and report IPv4 packets that
    /// do not fit by ICMP (`pmtu_disc`).
    pub pmtu_disc: bool,
}

impl<'a, N> Env<'a, N> {
    /// An environment with path MTU discovery in tunnels, the default of `pmtu_disc`.
    pub const fn new(net: &'a N, intercept: &'a Intercept) -> Self {
        Self {
            net,
            intercept,
            pmtu_disc: true,
        }
    }
}

/// Number of frames to send after which a call of [`Pipeline::process_some`] stops; the fragments
/// and segments of the last received frame may exceed it.
const PORTION: usize = 1024;

/// Values that all steps for one batch of frames share.
struct Cx<'a, N> {
    env: &'a Env<'a, N>,
    now: Instant,
    out: &'a mut Output,
    /// The look-up hint for the present frame.
    ahead: Option<Ahead>,
    /// The server of the connection to which the packet that is being sent belongs.
    server: Option<ServerId>,
}

impl<'a, N> Cx<'a, N> {
    const fn new(env: &'a Env<'a, N>, now: Instant, out: &'a mut Output) -> Self {
        Self {
            env,
            now,
            out,
            ahead: None,
            server: None,
        }
    }
}

/// The packet path of one worker. [`Common`] is the state that all workers of a director share.
#[derive(Debug)]
pub struct Pipeline {
    /// Counters of the fates of frames so far.
    pub counters: Counters,
    /// Dropped packets of connections, for [`Control::count_drops`](lvs_core::Control::count_drops).
    pub drops: ServerDrops,
    /// Packets that wait until a neighbour is resolved, or until the replies to them are
    /// intercepted.
    pub held: Held,
    /// Limits the share of SYNs in the worker's time during a flood.
    pub syn_limiter: SynLimiter,
    /// The worker's number, and the rule that divides packets among the workers; `None` for one
    /// worker.
    pub share: Option<Share>,
    common: Arc<Common>,
    tunnels: KnownPaths,
    /// The pipeline's ICMP error about the current packet, if the director must still decide on it.
    own_error: Option<OwnError>,
}

impl Pipeline {
    /// The packet path of a worker of the director to which `common` belongs.
    pub fn new(common: Arc<Common>) -> Self {
        Self {
            counters: Counters::default(),
            drops: ServerDrops::default(),
            held: Held::of_workers(common.workers),
            syn_limiter: SynLimiter::default(),
            share: None,
            tunnels: KnownPaths::default(),
            own_error: None,
            common,
        }
    }

    /// The packet path of a director with one worker.
    pub fn alone(settings: Settings) -> Self {
        Self::new(Arc::new(Common::new(settings)))
    }

    /// The state that the pipelines of all workers share.
    pub const fn common(&self) -> &Arc<Common> {
        &self.common
    }

    /// Processes a batch of frames that arrived on `port`. The caller then executes the requests in
    /// `out`, sends its frames, and recycles `out`. The frames in `frames` have undefined content
    /// after the call, and can be reused for received packets. Frames in a backend's buffers are
    /// [vacant](Frame::vacant) after the call.
    pub fn process<N: Net, D: Decide>(
        &mut self,
        port: PortId,
        frames: &mut [Frame],
        env: &Env<'_, N>,
        decide: &mut D,
        now: Instant,
        out: &mut Output,
    ) {
        let mut rest = frames;
        while !rest.is_empty() {
            let done = self.process_some(port, rest, env, decide, now, out);
            rest = &mut rest[done..];
        }
    }

    /// As [`process`](Self::process), but stops when enough frames wait to be sent, so that the
    /// fragments or segments of a whole batch do not use memory at the same time. Returns the
    /// number of processed frames: at least one, unless `frames` is empty.
    pub fn process_some<N: Net, D: Decide>(
        &mut self,
        port: PortId,
        frames: &mut [Frame],
        env: &Env<'_, N>,
        decide: &mut D,
        now: Instant,
        out: &mut Output,
    ) -> usize {
        let info = env.net.port(port);
        let ethernet = info.is_some_and(|info| info.ethernet);
        let mut known: Known = [None; AHEAD];
        let mut cx = Cx::new(env, now, out);
        for done in 0..frames.len() {
            if done > 0 && cx.out.queued() >= PORTION {
                return done;
            }
            if done % AHEAD == 0 {
                let end = frames.len().min(done + AHEAD);
                warm::look_ahead(&frames[done..end], ethernet, decide, &mut known);
            }
            let frame = &mut frames[done];
            let ahead = known[done % AHEAD].as_ref();
            self.counters.received += 1;
            let lent = frame.slot().is_some();
            let receives = frame.capacity() >= MAX_FRAME;
            let fate = match info {
                Some(info) => {
                    let passed = ahead.and_then(|ahead| {
                        self.in_passing(port, &info, frame, ahead, decide, &mut cx)
                    });
                    passed.unwrap_or_else(|| {
                        cx.ahead = ahead.copied();
                        self.intake(port, &info, frame, decide, &mut cx)
                    })
                }
                None => Fate::Dropped(FrameDrop::NoPort),
            };
            self.counters.count(fate);
            if lent {
                // Whatever the fate of the frame, its backend gets the slot back when the output
                // was sent.
                drop(frame.take());
            } else if receives && frame.capacity() == 0 {
                *frame = cx.out.receiver();
            }
            self.finish_own_error(decide, &mut cx);
        }
        frames.len()
    }

    /// Sends the packets that waited for a link-layer address that is known now. Call it whenever
    /// `env` has new neighbours, before [`process`](Self::process): a later packet must not
    /// overtake a waiting one.
    pub fn neighbours_resolved<N: Net>(&mut self, env: &Env<'_, N>, out: &mut Output) {
        for (port, addr) in self.held.neighbours() {
            let known = env.net.neighbour(port, addr);
            let Some((mac, info)) = known.zip(env.net.port(port)) else {
                continue;
            };
            for Waiting {
                mut frame, server, ..
            } in self.held.take(port, addr)
            {
                if mac::ethernet(&mut frame, mac, info.mac).is_ok() {
                    self.counters.released += 1;
                    self.counters.emitted += 1;
                    out.push(port, frame);
                } else {
                    self.held.lose(server);
                }
            }
        }
    }

    /// Sends the waiting packets of clients on this host, if the replies to them are intercepted
    /// now.
    pub fn local_clients_intercepted<N: Net>(
        &mut self,
        env: &Env<'_, N>,
        now: Instant,
        out: &mut Output,
    ) {
        let is_intercepted = |client: &_| env.intercept.local_clients.contains(client);
        let mut cx = Cx::new(env, now, out);
        for Waiting {
            mut frame, server, ..
        } in self.held.take_local_clients(is_intercepted)
        {
            cx.server = server;
            let aggregate = frame.offload.segments.is_some();
            let fate = match parse::ip(frame.bytes(), aggregate) {
                Ok(packet) => match env.net.route(packet.dst) {
                    Some(hop) => self.leave(&mut frame, &packet, &hop, Pieces::Whole, &mut cx),
                    None => Fate::Dropped(env.net.why_no_route(packet.dst)),
                },
                Err(reason) => Fate::Dropped(reason),
            };
            match fate {
                Fate::Sent => self.counters.released += 1,
                // The frame waits for its neighbour.
                Fate::Held => {}
                Fate::Dropped(reason) => {
                    // The frame still counts as waiting.
                    self.counters.held -= 1;
                    self.counters.count(fate);
                    self.drops.count(server, reason.name());
                }
                _ => self.held.lose(server),
            }
        }
    }

    /// Drops packets and fragments that have waited for too long. Call it about once a second.
    pub fn expire(&mut self, now: Instant) {
        self.held.expire(now);
        self.common.reassembler.expire(now);
    }
}
