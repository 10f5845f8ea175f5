//! Floods: many connections, or many errors.

use lvs_packet::frame::Frame;

use super::frames::{ACK, Kind, SYN, ethernet, packet};
use super::{Target, Volley};

#[derive(Clone, Copy, Debug)]
pub(super) enum Flood {
    /// SYNs from one source port to every port from 1024 of a VIP.
    AllPorts,
    /// SYNs from sources that do not exist.
    Syn,
    /// SYN and ACK of complete handshakes, from sources that do not exist.
    Pairs,
    /// Datagrams from sources that do not exist.
    Udp,
    /// Datagrams from one address to a port without a service. The director answers with ICMP
    /// errors, up to its limit.
    Errors,
}

pub(super) struct Packets {
    flood: Flood,
    target: Target,
    n: u32,
}

impl Packets {
    pub(super) fn all_ports(target: &Target) -> Box<dyn Volley> {
        Self::boxed(target, Flood::AllPorts)
    }

    pub(super) fn syn(target: &Target) -> Box<dyn Volley> {
        Self::boxed(target, Flood::Syn)
    }

    pub(super) fn pairs(target: &Target) -> Box<dyn Volley> {
        Self::boxed(target, Flood::Pairs)
    }

    pub(super) fn udp(target: &Target) -> Box<dyn Volley> {
        Self::boxed(target, Flood::Udp)
    }

    pub(super) fn errors(target: &Target) -> Box<dyn Volley> {
        Self::boxed(target, Flood::Errors)
    }

    fn boxed(target: &Target, flood: Flood) -> Box<dyn Volley> {
        Box::new(Self {
            flood,
            target: *target,
            n: 0,
        })
    }
}

impl Volley for Packets {
    fn next(&mut self) -> Frame {
        let (n, target) = (self.n, &self.target);
        self.n = n.wrapping_add(1);
        let low = |n: u32| u16::try_from(n & 0xffff).unwrap_or(0);
        let ip = match self.flood {
            Flood::AllPorts => {
                // The attack does not use the services of honest clients.
                let port = low(n).max(1024);
                packet(
                    target.source4(40_000),
                    target.other4(port),
                    Kind::Tcp(SYN),
                    &[],
                )
            }
            Flood::Syn => packet(target.spoofed(n), target.service4(80), Kind::Tcp(SYN), &[]),
            Flood::Pairs => {
                let flags = if n % 2 == 0 { SYN } else { ACK };
                packet(
                    target.spoofed(n / 2),
                    target.service4(80),
                    Kind::Tcp(flags),
                    &[],
                )
            }
            Flood::Udp => packet(target.spoofed(n), target.service4(7), Kind::Udp, b"flood"),
            Flood::Errors => packet(
                target.source4(low(n).max(1024)),
                target.service4(9),
                Kind::Udp,
                b"no service has this port",
            ),
        };
        ethernet(target, &ip)
    }
}
