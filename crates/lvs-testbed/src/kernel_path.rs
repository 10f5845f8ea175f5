//! The BPF programs of the kernel fast path, which process frames in memory before the userspace
//! packet path does, to compare the result with that of a packet path without the programs.

use std::fmt;
use std::ops::AddAssign;

use lvs_core::memory::{Layout, Memory};
use lvs_core::{ConnId, Control, Director, IcmpError, Instant, PacketMeta, Verdict};
use lvs_dataplane::fast_path::{FastPath, FastPathError, WayOut};
use lvs_packet::frame::{Frame, Offload};
use lvs_packet::net::{PortId, Way};
use lvs_packet::pipeline::Decide;
use lvs_packet::testing::Table;
use lvs_packet::tunnel_path::TunnelPaths;
use lvs_packet::ways::Ways;
use lvs_packet::wire::Mac;

use crate::packet;

/// Maximum length of a frame for `BPF_PROG_TEST_RUN`, which must fit into a page.
const LONGEST: usize = 3000;
/// Interface index of the loopback interface, whose link-layer address is all zeros.
const LOOPBACK: u32 = 1;
const EINVAL: i32 = 22;
/// `TC_ACT_REDIRECT`.
const REDIRECTED: i32 = 7;
/// `XDP_REDIRECT`.
const XDP_REDIRECTED: i32 = 4;

/// Counts of packets that the BPF programs have forwarded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forwarded {
    /// Number of all forwarded packets.
    pub all: u64,
    /// Packets that XDP forwarded, before the kernel allocated a socket buffer.
    pub early: u64,
}

impl AddAssign for Forwarded {
    fn add_assign(&mut self, other: Self) {
        self.all += other.all;
        self.early += other.early;
    }
}

/// Whether the length of a frame differs from the length in its IP header.
fn is_padded(frame: &[u8]) -> bool {
    let word = |at: usize| match frame.get(at..at + 2) {
        Some(&[high, low]) => usize::from(high) << 8 | usize::from(low),
        _ => 0,
    };
    let len = match word(12) {
        0x0800 => word(16),
        _ => 40 + word(18),
    };
    frame.len() != 14 + len
}

/// The BPF programs of the kernel fast path, and their maps.
pub(crate) struct Programs {
    kernel: FastPath,
    /// MAC addresses of the two ports.
    macs: [Mac; 2],
    /// The director's generation number, and the version of its learned tunnel path MTUs, at the
    /// last frame. If one changes, all offloads become invalid.
    known: (u32, u64),
    turns: u64,
    pub(crate) forwarded: Forwarded,
}

impl fmt::Debug for Programs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kernel.fmt(f)
    }
}

impl Programs {
    /// Loads the programs for two ports with these MAC addresses.
    ///
    /// # Errors
    /// The kernel refuses the programs.
    pub(crate) fn new(layout: Layout, macs: [Mac; 2]) -> Result<Self, FastPathError> {
        let kernel = FastPath::open_in_virtual_time(layout)?;
        let tried = kernel.try_interface(LOOPBACK, Mac([0; 6]));
        tried.expect("no other interface uses the entry");
        Ok(Self {
            kernel,
            macs,
            known: (0, 0),
            turns: 0,
            forwarded: Forwarded::default(),
        })
    }

    /// Resets the programs for use with another director.
    pub(crate) fn again(mut self) -> Self {
        self.kernel.forget();
        self.known = (0, 0);
        self.turns = 0;
        self.forwarded = Forwarded::default();
        self
    }

    /// Memory of the director's connection table, which the BPF programs share. Free slots are
    /// reused at once, as in a table without the programs.
    pub(crate) fn memory(&self) -> Memory {
        let memory = self
            .kernel
            .memory(0)
            .expect("the memory has the length of the layout");
        memory.quarantined(std::time::Duration::ZERO)
    }

    /// Invalidates all offloads after a change of services, servers or routes.
    pub(crate) fn changed(&self) {
        self.kernel.changed();
    }

    pub(crate) fn fold(&self, control: &mut Control) {
        self.kernel.fold(|| control);
    }

    /// Runs the programs on a frame. Returns the forwarded frame and its port; `None` if they do
    /// not forward it, or if a test run does not support the frame.
    pub(crate) fn pass(
        &mut self,
        port: PortId,
        frame: &Frame,
        control: &Control,
        tunnels: &TunnelPaths,
        now: Instant,
    ) -> Option<(PortId, Frame)> {
        // Frames with partial checksums or segments cannot be described to a test run.
        let bytes = frame.bytes();
        if frame.offload != Offload::default() || !(14..LONGEST).contains(&bytes.len()) {
            return None;
        }
        let known = (control.generation(), tunnels.lessons());
        if known != self.known {
            self.known = known;
            self.kernel.changed();
        }
        let mut bytes = bytes.to_vec();
        if bytes[..6] == self.macs[port.index()].0 {
            bytes[..6].fill(0);
        }
        self.kernel.set_virtual_time(now);
        // Every fourth frame has a checksum from the network card (`CHECKSUM_COMPLETE`), if the
        // kernel supports that in test runs, and if the frame has no padding: with padding, the
        // kernel would report a wrong checksum.
        self.turns += 1;
        // The starting point of look-ups does not affect the result.
        self.kernel
            .try_homes([self.turns.is_multiple_of(2), self.turns.is_multiple_of(3)]);
        if self.turns.is_multiple_of(2) {
            let forwarded = self.pass_early(&bytes);
            if forwarded.is_some() {
                return forwarded;
            }
        }
        let kernel = self.kernel.ingress();
        let summed = self.turns.is_multiple_of(4) && !is_padded(&bytes);
        let mut run = kernel.test_run(LOOPBACK, &bytes, 0, summed);
        if matches!(&run, Err(error) if error.raw_os_error() == Some(EINVAL)) {
            run = kernel.test_run(LOOPBACK, &bytes, 0, false);
        }
        let (verdict, out) = match run {
            Ok(run) => run,
            // The kernel requires a complete IP header if the EtherType is IP.
            Err(_) if bytes.len() < 14 + 40 => return None,
            Err(error) => panic!("the test run of the program failed: {error}"),
        };
        if verdict != REDIRECTED {
            assert_eq!(
                out, bytes,
                "the program changed a frame that it did not forward"
            );
            return None;
        }
        Some(self.sent(&out))
    }

    /// Runs the XDP program on a frame. Returns the forwarded frame and its port.
    fn pass_early(&mut self, bytes: &[u8]) -> Option<(PortId, Frame)> {
        let program = self
            .kernel
            .xdp()
            .expect("the programs were opened with the fast path");
        let run = program.test_run(LOOPBACK, bytes, 0, false);
        let (verdict, out) = run.expect("the kernel executes the test run");
        if verdict != XDP_REDIRECTED {
            assert_eq!(
                out, bytes,
                "the program changed a frame that it did not forward"
            );
            return None;
        }
        self.forwarded.early += 1;
        Some(self.sent(&out))
    }

    fn sent(&mut self, out: &[u8]) -> (PortId, Frame) {
        self.forwarded.all += 1;
        let from = self.macs.iter().position(|mac| out[6..12] == mac.0);
        let port = from.expect("the frame is sent on one of the ports");
        (
            PortId(u16::try_from(port).unwrap_or(0)),
            Frame::from_bytes(out),
        )
    }

    /// Offloads a connection; `None` if it is not due or cannot be offloaded.
    pub(crate) fn publish(
        &mut self,
        conn: ConnId,
        director: &mut Director,
        net: &Table,
        tunnels: &TunnelPaths,
        now: Instant,
    ) -> Option<()> {
        let epoch = self.kernel.epoch();
        if director.shard.is_behind() || !director.shard.is_offload_due(conn, 1, epoch) {
            return None;
        }
        director.shard.follow_local_ends();
        self.kernel.follow_locals(0, director.shard.local_changes());
        let offer = director.shard.offer(conn).ok()?;
        let ways = Ways::of(
            &offer,
            net,
            tunnels,
            director.control.sysctls().pmtu_disc,
            now,
        )
        .ok()?;
        let hop = |way: Way| {
            let out = WayOut {
                ifindex: LOOPBACK,
                mtu: way.mtu,
                to: way.to,
                from: way.from,
            };
            self.kernel.hop(out, now)
        };
        let server = hop(ways.server)?;
        let client = match ways.client {
            Some(way) => Some(hop(way)?),
            None => None,
        };
        let is_set = match &ways.outer {
            Some(outer) => self.kernel.set_tunnel(offer.record, server, epoch, outer),
            None => self.kernel.set_server(offer.record, server, epoch),
        };
        if let Some(local) = &offer.local {
            self.kernel.make_locals();
            if !self.kernel.set_local(0, local) {
                return None;
            }
        }
        if is_set {
            director.shard.publish(conn, epoch, client);
        }
        Some(())
    }
}

/// A director that records the connection of the last forwarded packet.
pub(crate) struct Noting<'a> {
    director: &'a mut Director,
    pub(crate) forwarded: Option<ConnId>,
}

impl<'a> Noting<'a> {
    pub(crate) const fn new(director: &'a mut Director) -> Self {
        Self {
            director,
            forwarded: None,
        }
    }
}

impl Decide for Noting<'_> {
    fn packet(&mut self, meta: &PacketMeta<'_>, now: Instant) -> Verdict {
        let verdict = self.director.handle_packet(meta, now);
        if let Verdict::Forward(forward) = &verdict {
            self.forwarded = forward.conn;
        }
        verdict
    }

    fn icmp_error(&mut self, error: &IcmpError, now: Instant) -> Verdict {
        self.director.handle_icmp_error(error, now)
    }
}

/// Lists the sorted connections, and the counters of director, services and servers.
pub(crate) fn listing(director: &Director, now: Instant) -> Vec<String> {
    let all = director.shard.connections_from(0, now);
    let mut output: Vec<String> = all.map(|connection| format!("{connection:?}")).collect();
    output.sort();
    let control = &director.control;
    output.push(format!("{:?}", control.total_stats().live));
    for service in control.services() {
        output.push(format!("{} {:?}", service.key(), service.stats().live));
        for server in service.servers() {
            let stats = control.server_stats(server.id()).unwrap_or_default();
            output.push(format!("{} {:?}", server.addr(), stats.live));
        }
    }
    output
}

/// Clears the IP identification of fragments, and of IPv4 packets without "don't fragment": each
/// packet path has its own counter for identifications.
pub(crate) fn without_id(frame: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    // A packet without "don't fragment", or a fragment with this flag.
    let counts =
        |ip: &[u8]| ip[0] == 0x45 && (ip[6] & 0x40 == 0 || ip[6] & 0x3f != 0 || ip[7] != 0);
    if frame.get(14..34).is_some_and(counts) {
        frame[18..20].fill(0);
        packet::repair(&mut frame[14..]);
    }
    if let Some(at) = ipv6_id(&frame)
        && let Some(id) = frame.get_mut(at..at + 4)
    {
        id.fill(0);
    }
    frame
}

/// Offset of the identification in an IPv6 fragment header.
fn ipv6_id(frame: &[u8]) -> Option<usize> {
    const FRAGMENT: u8 = 44;
    const OTHERS: [u8; 3] = [0, 43, 60];
    if frame.get(12..14)? != [0x86, 0xdd] {
        return None;
    }
    let (mut kind, mut at) = (*frame.get(14 + 6)?, 14 + 40);
    while OTHERS.contains(&kind) {
        let next = *frame.get(at)?;
        at += 8 + usize::from(*frame.get(at + 1)?) * 8;
        kind = next;
    }
    (kind == FRAGMENT).then_some(at + 4)
}
