//! Super-packets with segments that no TCP implementation sends.

use lvs_packet::frame::{Frame, SegmentKind};

use super::frames::{ACK, Kind, SYN, aggregate, ethernet, packet};
use super::{Target, Volley};

/// Super-packets with 64,000 bytes of data, in turn with segments of one byte and of the smallest
/// size that the dataplane accepts. Each 64th frame is a SYN.
pub(super) struct TinyAggregates {
    target: Target,
    n: u64,
}

impl TinyAggregates {
    pub(super) fn volley(target: &Target) -> Box<dyn Volley> {
        Box::new(Self {
            target: *target,
            n: 0,
        })
    }
}

impl Volley for TinyAggregates {
    fn next(&mut self) -> Frame {
        let (src, dst) = (self.target.source4(4000), self.target.service4(80));
        self.n += 1;
        if self.n % 64 == 1 {
            return ethernet(&self.target, &packet(src, dst, Kind::Tcp(SYN), &[]));
        }
        let size = if self.n.is_multiple_of(2) { 1 } else { 48 };
        let ip = packet(src, dst, Kind::Tcp(ACK), &[0x5a; 64_000]);
        aggregate(ethernet(&self.target, &ip), SegmentKind::Tcp4, size)
    }
}
