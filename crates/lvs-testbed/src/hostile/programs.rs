//! The programs of the path in the kernel in front of a packet path in memory.

use std::fmt;
use std::ops::AddAssign;

use lvs_core::memory::{Layout, Memory};
use lvs_core::{ConnId, Control, Director, IcmpError, Instant, PacketMeta, Verdict};
use lvs_dataplane::in_kernel::{InKernel, InKernelError, WayOut};
use lvs_dataplane::packet::frame::{Frame, Offload};
use lvs_dataplane::packet::net::PortId;
use lvs_dataplane::packet::pipeline::Decide;
use lvs_dataplane::packet::testing::Table;
use lvs_dataplane::packet::tunnel_path::TunnelPaths;
use lvs_dataplane::packet::ways::{Way, Ways};
use lvs_dataplane::packet::wire::Mac;

use super::generator::MACS;

/// The kernel tries programs out on frames of up to a page.
const LONGEST: usize = 3000;
/// The loopback interface, whose link-layer address is all zeros.
const LOOPBACK: u32 = 1;
const EINVAL: i32 = 22;
/// `TC_ACT_REDIRECT`, and `XDP_REDIRECT`.
const REDIRECTED: i32 = 7;
const XDP_REDIRECTED: i32 = 4;

/// Packets that the programs have forwarded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forwarded {
    /// All of them.
    pub all: u64,
    /// Those that were forwarded before there was a socket buffer.
    pub early: u64,
}

impl AddAssign for Forwarded {
    fn add_assign(&mut self, other: Self) {
        self.all += other.all;
        self.early += other.early;
    }
}

/// Whether there is more in a frame than its IP header says.
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

/// The programs, and what they need.
pub(super) struct Programs {
    kernel: InKernel,
    /// The director's generation, and what was learned of tunnels, when that was last seen.
    known: (u32, u64),
    turns: u64,
    pub(super) forwarded: Forwarded,
}

impl fmt::Debug for Programs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kernel.fmt(f)
    }
}

impl Programs {
    pub(super) fn new(layout: Layout) -> Result<Self, InKernelError> {
        let kernel = InKernel::open_in_virtual_time(layout)?;
        let tried = kernel.try_interface(LOOPBACK, Mac([0; 6]));
        tried.expect("there is no other one");
        Ok(Self {
            kernel,
            known: (0, 0),
            turns: 0,
            forwarded: Forwarded::default(),
        })
    }

    /// For the director's table. Slots are used again at once, so that it is as full as another
    /// one's.
    pub(super) fn memory(&self) -> Memory {
        let memory = self.kernel.memory().expect("as long as the layout");
        memory.quarantined(std::time::Duration::ZERO)
    }

    /// Something has changed.
    pub(super) fn changed(&self) {
        self.kernel.changed();
    }

    pub(super) fn fold(&self, control: &mut Control) {
        self.kernel.fold(|| control);
    }

    /// What becomes of a frame; `None` if it is not for the programs.
    pub(super) fn pass(
        &mut self,
        port: PortId,
        frame: &Frame,
        control: &Control,
        tunnels: &TunnelPaths,
        now: Instant,
    ) -> Option<(PortId, Frame)> {
        // What is unfinished cannot be said here.
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
        if bytes[..6] == MACS[port.index()] {
            bytes[..6].fill(0);
        }
        self.kernel.set_virtual_time(now);
        // Now and then the card has summed the packet up, where the kernel can say so. With
        // padding, the kernel cuts off the sum as well, and would then say that it is
        // wrong.
        self.turns += 1;
        // Where they look first is all the same.
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
            // It wants to see a whole IP header where the EtherType announces one.
            Err(_) if bytes.len() < 14 + 40 => return None,
            Err(error) => panic!("the kernel tries programs out: {error}"),
        };
        if verdict != REDIRECTED {
            assert_eq!(out, bytes, "what is not forwarded is not changed");
            return None;
        }
        Some(self.sent(&out))
    }

    /// What the program before there is a socket buffer says.
    fn pass_early(&mut self, bytes: &[u8]) -> Option<(PortId, Frame)> {
        let program = self.kernel.xdp().expect("it is opened with it");
        let run = program.test_run(LOOPBACK, bytes, 0, false);
        let (verdict, out) = run.expect("the kernel tries programs out");
        if verdict != XDP_REDIRECTED {
            assert_eq!(out, bytes, "what is not forwarded is not changed");
            return None;
        }
        self.forwarded.early += 1;
        Some(self.sent(&out))
    }

    fn sent(&mut self, out: &[u8]) -> (PortId, Frame) {
        self.forwarded.all += 1;
        let from = MACS.iter().position(|mac| out[6..12] == mac[..]);
        let port = from.expect("it leaves by one of the ports");
        (
            PortId(u16::try_from(port).unwrap_or(0)),
            Frame::from_bytes(out),
        )
    }

    /// Publishes a connection, if that is possible.
    pub(super) fn publish(
        &mut self,
        conn: ConnId,
        director: &mut Director,
        net: &Table,
        tunnels: &TunnelPaths,
        now: Instant,
    ) -> Option<()> {
        let epoch = self.kernel.epoch();
        if director.shard.is_behind() || !director.shard.is_ripe(conn, 1, epoch) {
            return None;
        }
        let offer = director.shard.offer(conn)?;
        let ways = Ways::of(
            &offer,
            net,
            tunnels,
            director.control.sysctls().pmtu_disc,
            now,
        )?;
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
        if is_set {
            director.shard.publish(conn, epoch, client);
        }
        Some(())
    }
}

/// A director, and the connection that it has forwarded a packet of.
pub(super) struct Noting<'a> {
    director: &'a mut Director,
    pub(super) forwarded: Option<ConnId>,
}

impl<'a> Noting<'a> {
    pub(super) const fn new(director: &'a mut Director) -> Self {
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
