//! Generates random frames: valid, damaged and malicious ones.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use lvs_core::{Family, Protocol, TcpFlags};
use lvs_packet::frame::{Frame, Offload, PartialChecksum, SegmentKind, Segments};

use super::entropy::Entropy;
use super::scene::{self, Offer, Scene};
use crate::{oracle, packet};

/// The source of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The clients' link.
    Clients,
    /// The servers' link.
    Servers,
    /// The host itself, which sends a packet without an Ethernet header.
    Host,
}

/// A step of a test.
#[derive(Clone, Debug)]
pub enum Act {
    /// These frames arrive, one after the other.
    Send(Vec<Shot>),
    /// The fragments of one valid datagram arrive in random order.
    Train {
        /// The fragments, in random order.
        shots: Vec<Shot>,
        /// The datagram before fragmentation.
        whole: Vec<u8>,
    },
    /// The most recent frame that the director sent returns to it, as in a switching loop.
    Loop,
    /// Advances the clock by this duration.
    Wait(Duration),
    /// Ends all pending address resolutions: with an answer, or with a failure and the loss of all
    /// known neighbours.
    Neighbours(bool),
    /// Sets the weight of a server.
    Weight(usize, i32),
    /// Adds a removed server again. If none is removed, removes the server with this number.
    Toggle(usize),
    /// Sets a sysctl of the director.
    Sysctl(&'static str, &'static str),
}

/// A frame, and the side from which it arrives.
#[derive(Clone, Debug)]
pub struct Shot {
    /// The side that sends the frame.
    pub from: Side,
    /// An Ethernet frame; if the host sends it, an IP packet without an Ethernet header.
    pub frame: Frame,
}

/// The Ethernet address of the director on the clients' and on the servers' link.
pub(super) const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 0xc1], [2, 0, 0, 0, 0, 0x51]];
/// The MAC address of another host on a link.
pub(super) const PEER: [u8; 6] = [2, 0, 0, 0, 0, 0xee];

const SYSCTLS: [(&str, &[&str]); 16] = [
    ("expire_nodest_conn", &["0", "1"]),
    ("expire_quiescent_template", &["0", "1"]),
    ("schedule_icmp", &["0", "1"]),
    ("nat_icmp_send", &["0", "1"]),
    ("conn_reuse_mode", &["0", "1", "2", "3"]),
    ("sloppy_tcp", &["0", "1"]),
    ("sloppy_sctp", &["0", "1"]),
    ("drop_packet", &["0", "3"]),
    ("drop_entry", &["0", "3"]),
    ("secure_tcp", &["0", "3"]),
    ("cache_bypass", &["0", "1"]),
    ("ignore_tunneled", &["0", "1"]),
    ("pmtu_disc", &["0", "1"]),
    ("snat_reroute", &["0", "1"]),
    ("run_estimation", &["0", "1"]),
    ("conntrack", &["0", "1"]),
];

/// Generates random acts.
#[derive(Debug)]
pub struct Generator<'a> {
    scene: Scene,
    entropy: Entropy<'a>,
    /// IP identification of the next valid fragments.
    train: u16,
}

impl<'a> Generator<'a> {
    /// A generator for `scene`.
    pub const fn new(scene: Scene, entropy: Entropy<'a>) -> Self {
        Self {
            scene,
            entropy,
            train: 0x1000,
        }
    }

    /// Whether the random choices are used up.
    pub fn is_done(&self) -> bool {
        self.entropy.is_empty()
    }

    /// Chooses the next step.
    pub fn next_act(&mut self) -> Act {
        match self.entropy.below(256) {
            0..=222 => Act::Send(vec![self.frame()]),
            223..=230 => self.train(),
            231..=236 => Act::Send(self.hostile_fragments()),
            237..=246 => Act::Loop,
            247..=251 => Act::Wait(self.pause()),
            252 => Act::Neighbours(!self.entropy.one_in(4)),
            253 => Act::Weight(
                self.entropy.below(4),
                self.entropy.pick(&[0, 1, 7, i32::MAX]),
            ),
            254 => Act::Toggle(self.entropy.below(4)),
            _ => {
                let (name, values) = self.entropy.pick(&SYSCTLS);
                Act::Sysctl(name, self.entropy.pick(values))
            }
        }
    }

    /// Returns a pause: mostly milliseconds, rarely minutes.
    fn pause(&mut self) -> Duration {
        let factor = self.entropy.pick(&[1, 1, 1, 1, 1, 10, 10, 2000]);
        Duration::from_millis(u64::from(self.entropy.u8()) * factor)
    }

    /// Generates a frame of any kind.
    fn frame(&mut self) -> Shot {
        let (from, mut ip) = match self.entropy.below(64) {
            0..=26 => (Side::Clients, self.request()),
            27..=35 => (Side::Servers, self.answer()),
            36..=43 => self.error(),
            44 | 45 => self.land(),
            46 | 47 => self.nested(),
            48 | 49 => self.complaint(),
            50..=52 => return self.aggregate(),
            53 | 54 => (Side::Clients, self.echo()),
            55 => (self.side(), self.other_protocol()),
            56 => (Side::Host, self.request()),
            57 | 58 => return self.arp(),
            59 | 60 => return self.neighbour_discovery(),
            61 => return self.tagged(),
            62 => (self.side(), self.own_answer()),
            _ => return self.noise(),
        };
        if self.entropy.one_in(8) {
            self.embellish(&mut ip);
        }
        let mut offload = Offload::default();
        if self.entropy.one_in(8) {
            self.unfinish(&mut ip, &mut offload);
        }
        self.damage(&mut ip);
        if self.entropy.one_in(16) {
            offload = self.lie();
        }
        self.shot(from, &ip, offload)
    }

    fn side(&mut self) -> Side {
        self.entropy
            .pick(&[Side::Clients, Side::Servers, Side::Host])
    }

    /// Adds an Ethernet header, unless the host sends the packet. Offsets in `offload` count from
    /// the IP header.
    fn shot(&mut self, from: Side, ip: &[u8], mut offload: Offload) -> Shot {
        let bytes = match from {
            Side::Host => ip.to_vec(),
            Side::Clients | Side::Servers => {
                let mac = match self.entropy.below(64) {
                    0 => [0xff; 6],
                    1 => PEER,
                    2 => [0x33, 0x33, 0, 0, 0, 1],
                    _ => MACS[usize::from(from == Side::Servers)],
                };
                if let Some(partial) = &mut offload.checksum {
                    partial.start = partial.start.saturating_add(14);
                }
                let mut frame = packet::ethernet_ip(mac, PEER, ip);
                if frame.len() < 60 && self.entropy.one_in(2) {
                    // Padding, as on a real link, with bytes other than zero.
                    frame.resize(60, 0xa5);
                }
                frame
            }
        };
        let mut frame = Frame::from_bytes(&bytes);
        frame.offload = offload;
        Shot { from, frame }
    }

    // --- honest packets --------------------------------------------------------------------------

    fn client(&mut self) -> SocketAddr {
        let addr = self.scene.clients[self.entropy.below(self.scene.clients.len())];
        let port = 40_000 + u16::from(self.entropy.u8() & 15);
        SocketAddr::new(addr, port)
    }

    fn offer(&mut self) -> Offer {
        self.entropy.pick(&self.scene.offers)
    }

    fn vip(&mut self) -> IpAddr {
        self.entropy.pick(&self.scene.vips)
    }

    fn flags(&mut self) -> u8 {
        const ACK: u8 = TcpFlags::ACK;
        let usual = [
            TcpFlags::SYN,
            TcpFlags::SYN,
            TcpFlags::SYN,
            ACK,
            ACK | 8,
            TcpFlags::FIN | ACK,
            TcpFlags::RST,
            TcpFlags::SYN | ACK,
        ];
        if self.entropy.one_in(16) {
            self.entropy.u8()
        } else {
            self.entropy.pick(&usual)
        }
    }

    fn len(&mut self) -> usize {
        match self.entropy.below(16) {
            0..=8 => self.entropy.below(64),
            9..=12 => self.entropy.below(600),
            13 => 1400 + self.entropy.below(120),
            14 => self.entropy.below(9000),
            _ => 0,
        }
    }

    fn datagram(&mut self, protocol: Protocol, src: SocketAddr, dst: SocketAddr) -> Vec<u8> {
        let len = self.len();
        let mut ip = match protocol {
            Protocol::UDP if src.port() == 5060 || dst.port() == 5060 => {
                let message = self.sip();
                packet::udp(src, dst, &message)
            }
            Protocol::UDP => {
                let mut ip = packet::udp(src, dst, &self.entropy.payload(len));
                // Over IPv4 the checksum may be absent.
                if src.is_ipv4() && len.is_multiple_of(5) {
                    ip[26..28].fill(0);
                }
                ip
            }
            Protocol::SCTP => {
                let chunks = self.chunks();
                packet::sctp(src, dst, &chunks)
            }
            _ => {
                let (flags, sequence) = (self.flags(), u32::from(self.entropy.u16()));
                packet::tcp(src, dst, flags, sequence, &self.entropy.payload(len))
            }
        };
        // Changes the type of service, "don't fragment", or the number of hops.
        match self.entropy.below(8) {
            0 if ip[0] >> 4 == 4 => ip[6] = 0x40,
            1 if ip[0] >> 4 == 4 => ip[1] = self.entropy.u8(),
            2 => {
                let at = if ip[0] >> 4 == 4 { 8 } else { 7 };
                ip[at] = self.entropy.pick(&[0, 1, 2, 255]);
            }
            _ => {}
        }
        packet::repair(&mut ip);
        ip
    }

    /// A packet from a client to a service; some have a random port.
    fn request(&mut self) -> Vec<u8> {
        let (client, offer, vip) = (self.client(), self.offer(), self.vip());
        let port = if self.entropy.one_in(16) {
            self.entropy.u16()
        } else {
            offer.port
        };
        let src = if offer.port == 500 {
            SocketAddr::new(client.ip(), 500)
        } else {
            client
        };
        self.datagram(offer.protocol, src, SocketAddr::new(vip, port))
    }

    /// Creates a packet from a server to a client.
    fn answer(&mut self) -> Vec<u8> {
        let (client, offer) = (self.client(), self.offer());
        let server = self.entropy.below(self.scene.servers.len());
        let (server, _) = self.scene.server(server, &offer);
        self.datagram(offer.protocol, server, client)
    }

    /// A packet with a service as its source and a client as its destination, which only the
    /// director sends.
    fn own_answer(&mut self) -> Vec<u8> {
        let (client, offer, vip) = (self.client(), self.offer(), self.vip());
        self.datagram(offer.protocol, SocketAddr::new(vip, offer.port), client)
    }

    fn echo(&mut self) -> Vec<u8> {
        let (client, vip, len) = (self.client().ip(), self.vip(), self.len());
        let kind = if client.is_ipv4() { 8 } else { 128 };
        let payload = self.entropy.payload(len);
        packet::icmp(client, vip, kind, 0, [0, 7, 0, 1], &payload)
    }

    fn other_protocol(&mut self) -> Vec<u8> {
        let (client, vip) = (self.client().ip(), self.vip());
        let any = self.entropy.u8();
        let protocol = self.entropy.pick(&[50, 51, 2, 47, 4, 41, 89, 136, 59, any]);
        let len = self.entropy.below(100);
        packet::ip(client, vip, protocol, packet::TTL, &self.entropy.bytes(len))
    }

    /// Creates a SIP request; one in four consists of random parts.
    fn sip(&mut self) -> Vec<u8> {
        const PARTS: [&[u8]; 14] = [
            b"INVITE sip:x SIP/2.0",
            b"\r\n",
            b"\r\n",
            b"\n",
            b"\r",
            b"Call-ID: a@b",
            b"Call-ID:",
            b"i: c",
            b"call-id :\r\n ",
            b" ",
            b"@",
            b":",
            b"To: \xff\x00",
            b"abcdefghijklmnopqrstuvwxyz0123456789",
        ];
        if !self.entropy.one_in(4) {
            let number = self.entropy.u8();
            return format!("INVITE x\r\nCall-ID: {number}@x\r\n\r\n").into_bytes();
        }
        let count = self.entropy.below(24);
        (0..count)
            .flat_map(|_| self.entropy.pick(&PARTS))
            .copied()
            .collect()
    }

    /// Creates SCTP chunks, some with a wrong length.
    fn chunks(&mut self) -> Vec<u8> {
        let mut chunks = Vec::new();
        for _ in 0..=self.entropy.below(3) {
            let len = self.entropy.below(20);
            let any = self.entropy.u8();
            let kind = self.entropy.pick(&[1, 2, 10, 11, 0, 3, 7, 8, 14, 6, any]);
            let length_field = if self.entropy.one_in(8) {
                self.entropy.u16()
            } else {
                u16::try_from(4 + len).unwrap_or(4)
            };
            chunks.extend([kind, 0]);
            chunks.extend(length_field.to_be_bytes());
            chunks.extend(self.entropy.payload(len.next_multiple_of(4)));
        }
        chunks
    }

    // --- errors ----------------------------------------------------------------------------------

    /// An ICMP error about a request or an answer, possibly truncated or with wrong fields.
    fn error(&mut self) -> (Side, Vec<u8>) {
        let (client, offer, vip) = (self.client(), self.offer(), self.vip());
        let number = self.entropy.below(self.scene.servers.len());
        let (server, _) = self.scene.server(number, &offer);
        let virt = SocketAddr::new(vip, offer.port);
        // The error is about a packet that the director has sent to the server or to the client.
        let (from, src, dst, inner) = match self.entropy.below(4) {
            0 | 1 if server.is_ipv4() == client.is_ipv4() => {
                let inner = self.datagram(offer.protocol, client, server);
                let src = self.entropy.pick(&[server.ip(), self.scene.router]);
                (Side::Servers, src, client.ip(), inner)
            }
            2 => {
                let inner = self.datagram(offer.protocol, client, virt);
                (self.side(), self.scene.router, client.ip(), inner)
            }
            _ => {
                let inner = self.datagram(offer.protocol, virt, client);
                (Side::Clients, client.ip(), vip, inner)
            }
        };
        let src = if src.is_ipv4() == dst.is_ipv4() {
            src
        } else {
            dst
        };
        let message = self.error_about(src, dst, inner);
        (from, message)
    }

    fn error_about(&mut self, src: IpAddr, dst: IpAddr, mut inner: Vec<u8>) -> Vec<u8> {
        match self.entropy.below(8) {
            0 | 1 => inner.truncate(28),
            2 => inner.truncate(self.entropy.below(64)),
            3 => self.damage(&mut inner),
            4 => {
                // The quoted packet is itself such an error, or a fragment.
                if src.is_ipv4() && inner.len() >= 20 {
                    let at = self.entropy.pick(&[6, 7, 9]);
                    inner[at] = self.entropy.u8();
                } else if src.is_ipv6() && self.entropy.one_in(2) {
                    let body = self.entropy.bytes(6);
                    packet::with_extension(&mut inner, 44, &body);
                }
            }
            _ => {}
        }
        inner.truncate(if src.is_ipv4() { 548 } else { 1232 });
        let any = self.entropy.u8();
        let (kind, code) = if src.is_ipv4() {
            self.entropy.pick(&[
                (3, 1),
                (3, 3),
                (3, 4),
                (11, 0),
                (4, 0),
                (5, 1),
                (12, 0),
                (any, 0),
            ])
        } else {
            self.entropy
                .pick(&[(1, 0), (1, 4), (2, 0), (3, 0), (4, 1), (137, 0), (any, 0)])
        };
        let mtu = self
            .entropy
            .pick(&[0, 68, 551, 576, 1280, 1400, 1500, 65_535_u16]);
        let [a, b] = mtu.to_be_bytes();
        packet::icmp(src, dst, kind, code, [0, 0, a, b], &inner)
    }

    /// An ICMP error of a router about a tunnel packet of the director.
    fn complaint(&mut self) -> (Side, Vec<u8>) {
        let mut inner = self.request();
        let number = self.entropy.below(self.scene.servers.len());
        let server = self.scene.servers[number];
        let director = self.scene.director[1];
        let six = inner[0] >> 4 == 6;
        let own = if six { 41 } else { 4 };
        let ethertype: u16 = if six { 0x86dd } else { 0x0800 };
        let flags = self.entropy.pick(&[0_u16, 0x8000, 0x2000]);
        let options = self.entropy.pick(&[0, 0, 1, 31, 0x20]);
        let protocol = match self.entropy.below(4) {
            0 => own,
            1 => {
                let mut gre = [flags.to_be_bytes(), ethertype.to_be_bytes()].concat();
                if flags & 0x8000 != 0 {
                    gre.extend([0; 4]);
                }
                inner.splice(0..0, gre);
                47
            }
            2 => {
                let port = 6080_u16.to_be_bytes();
                let gue = [0x80, 1, port[0], port[1], 0, 60, 0, 0, options, own, 0, 0];
                inner.splice(0..0, gue);
                17
            }
            _ => self.entropy.u8(),
        };
        let mut outer = packet::ip(director, server, protocol, packet::TTL, &inner);
        if self.entropy.one_in(4) {
            outer.truncate(self.entropy.below(80));
        }
        let message = self.error_about(self.scene.router, director, outer);
        (Side::Servers, message)
    }

    // --- malicious frames
    // -------------------------------------------------------------------------

    /// Creates a packet with an impossible source: the destination itself, the VIP, the director, a
    /// server, a multicast group, or an address that no host has.
    fn land(&mut self) -> (Side, Vec<u8>) {
        let (offer, vip, family) = (self.offer(), self.vip(), self.scene.method.family);
        let client = self.client().ip();
        let odd: [IpAddr; 4] = match family {
            Family::V4 => [
                Ipv4Addr::LOCALHOST.into(),
                Ipv4Addr::BROADCAST.into(),
                Ipv4Addr::UNSPECIFIED.into(),
                Ipv4Addr::new(224, 0, 0, 1).into(),
            ],
            Family::V6 => [
                Ipv6Addr::LOCALHOST.into(),
                Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1).into(),
                Ipv6Addr::UNSPECIFIED.into(),
                Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1).into(),
            ],
        };
        let odd = self.entropy.pick(&odd);
        let others = [
            vip,
            self.scene.vips[0],
            self.scene.vips[1],
            self.scene.director[0],
            scene::addr(family, 3, 11),
            scene::addr(family, 3, 254),
            odd,
            odd,
        ];
        let src = self.entropy.pick(&others);
        let dst = if self.entropy.one_in(4) {
            self.entropy.pick(&[odd, client, self.scene.director[0]])
        } else {
            vip
        };
        let port = self.entropy.pick(&[offer.port, 0, 1, u16::MAX]);
        let (src, dst) = (SocketAddr::new(src, port), SocketAddr::new(dst, offer.port));
        let packet = self.datagram(offer.protocol, src, dst);
        (self.side(), packet)
    }

    /// Creates a packet inside several tunnels.
    fn nested(&mut self) -> (Side, Vec<u8>) {
        let mut ip = self.request();
        for _ in 0..=self.entropy.below(5) {
            let six = ip[0] >> 4 == 6;
            let own = if six { 41 } else { 4 };
            let kind = if six { 0x86dd } else { 0x0800_u16 }.to_be_bytes();
            let protocol = match self.entropy.below(4) {
                0 => {
                    ip.splice(0..0, [0, 0, kind[0], kind[1]]);
                    47
                }
                1 => {
                    ip.splice(0..0, [0x80, 0, 0x17, 0xc0, 0, 60, 0, 0, 0, own, 0, 0]);
                    17
                }
                _ => own,
            };
            let (src, dst) = (self.client().ip(), self.vip());
            let dst = self.entropy.pick(&[dst, self.scene.director[0]]);
            ip = packet::ip(src, dst, protocol, packet::TTL, &ip);
        }
        (self.side(), ip)
    }

    /// Adds IPv4 options or IPv6 extension headers, some of them invalid.
    fn embellish(&mut self, ip: &mut Vec<u8>) {
        if ip[0] >> 4 == 4 {
            const OPTIONS: [&[u8]; 6] = [
                &[7, 7, 4, 0, 0, 0, 0, 0],
                &[0x83, 7, 4, 192, 0, 2, 9, 0],
                &[1, 1, 1, 1],
                &[0x94, 4, 0, 0],
                &[68, 12, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0],
                &[7, 0, 0, 0],
            ];
            let own = self.entropy.bytes(40);
            let options = if self.entropy.one_in(2) {
                &own[..self.entropy.below(11) * 4]
            } else {
                self.entropy.pick(&OPTIONS)
            };
            packet::with_options(ip, options);
            return;
        }
        const KINDS: [u8; 8] = [0, 60, 43, 51, 44, 60, 135, 59];
        for _ in 0..=self.entropy.below(4) {
            let kind = self.entropy.pick(&KINDS);
            let len = self.entropy.pick(&[6, 14, 6, 30]);
            let mut body = if self.entropy.one_in(4) {
                self.entropy.bytes(len)
            } else {
                // Padding.
                vec![0; len]
            };
            if kind == 44 && !self.entropy.one_in(8) {
                // An atomic fragment, which contains the whole datagram (RFC 6946).
                body.truncate(6);
                body[0..2].fill(0);
            }
            packet::with_extension(ip, kind, &body);
        }
        if self.entropy.one_in(16) {
            // A chain that is too long.
            for _ in 0..40 {
                packet::with_extension(ip, 60, &[1, 4, 0, 0, 0, 0]);
            }
        }
    }

    /// Damages a packet, or leaves it unchanged.
    fn damage(&mut self, ip: &mut Vec<u8>) {
        match self.entropy.below(24) {
            0 | 1 => self.flip(ip),
            2 => {
                let headers = ip.len().min(120);
                ip.truncate(self.entropy.below(headers));
            }
            3 => {
                ip.truncate(self.entropy.below(ip.len()));
                packet::relength(ip);
            }
            4 => {
                let more = self.entropy.below(40);
                ip.resize(ip.len() + more, 0x5a);
            }
            5 | 6 => self.lie_of_length(ip),
            7 => {
                // Damages the checksum of the IPv4 header, or the same bytes of an IPv6 address.
                if let Some(byte) = ip.get_mut(10 + self.entropy.below(2)) {
                    *byte ^= 1 << self.entropy.below(8);
                }
            }
            8 => {
                // Changes a byte of the payload, so that the transport checksum is wrong.
                let at = 20 + self.entropy.below(60);
                if let Some(byte) = ip.get_mut(at) {
                    *byte ^= 1 << self.entropy.below(8);
                }
            }
            _ => {}
        }
    }

    fn flip(&mut self, ip: &mut [u8]) {
        for _ in 0..=self.entropy.below(4) {
            let at = self.entropy.below(ip.len().min(100));
            let value = self.entropy.u8();
            if let Some(byte) = ip.get_mut(at) {
                *byte = value;
            }
        }
        if !self.entropy.one_in(4) {
            packet::repair(ip);
        }
    }

    /// Sets a wrong length: header length, total length, UDP length or TCP data offset.
    fn lie_of_length(&mut self, ip: &mut [u8]) {
        let six = ip.first().is_some_and(|byte| byte >> 4 == 6);
        let l4 = if six { 40 } else { 20 };
        let near = ip.len() + self.entropy.below(16);
        let near = u16::try_from(near.saturating_sub(8 + if six { 40 } else { 0 })).unwrap_or(0);
        let any = self.entropy.u16();
        let value = self
            .entropy
            .pick(&[near, near, any, 0, 7, 8, 19, 20, u16::MAX]);
        let [a, b] = value.to_be_bytes();
        let mut put = |at: usize, bytes: &[u8]| {
            if let Some(field) = ip.get_mut(at..at + bytes.len()) {
                field.copy_from_slice(bytes);
            }
        };
        match self.entropy.below(4) {
            0 => put(if six { 4 } else { 2 }, &[a, b]),
            1 => put(0, &[if six { 0x60 } else { 0x40 | a & 15 }]),
            2 => put(l4 + 4, &[a, b]),
            _ => put(l4 + 12, &[b]),
        }
        packet::repair(ip);
    }

    /// Leaves the transport checksum of a TCP or UDP packet to the device (partial checksum), like
    /// a sender on a virtual link. Fragments and other packets stay unchanged.
    fn unfinish(&mut self, ip: &mut [u8], offload: &mut Offload) {
        let Some(parts) = oracle::parts(ip) else {
            return;
        };
        let field = match Protocol(parts.protocol) {
            Protocol::TCP => 16,
            Protocol::UDP => 6,
            _ => return,
        };
        let Some(stored) = ip.get_mut(parts.l4 + field..parts.l4 + field + 2) else {
            return;
        };
        if parts.fragment {
            return;
        }
        let len = parts.len - parts.l4;
        let sum = oracle::unfinished(parts.src, parts.dst, parts.protocol, len);
        stored.copy_from_slice(&sum.to_be_bytes());
        offload.checksum = Some(PartialChecksum {
            start: u16::try_from(parts.l4).unwrap_or(0),
            offset: u16::try_from(field).unwrap_or(0),
        });
    }

    /// A TCP or UDP super-packet of up to 64 KiB; some have wrong fields.
    fn aggregate(&mut self) -> Shot {
        let back = self.entropy.one_in(2);
        let client = self.client();
        let udp = self.entropy.one_in(4);
        let wanted = if udp { Protocol::UDP } else { Protocol::TCP };
        let offers = self.scene.offers;
        let offer = offers
            .iter()
            .find(|offer| offer.protocol == wanted)
            .unwrap_or(&offers[0]);
        let (from, src, dst) = if back {
            let (server, _) = self
                .scene
                .server(self.entropy.below(self.scene.servers.len()), offer);
            (Side::Servers, server, client)
        } else {
            let virt = SocketAddr::new(self.vip(), offer.port);
            (Side::Clients, client, virt)
        };
        let (src, dst) = if src.is_ipv4() == dst.is_ipv4() {
            (src, dst)
        } else {
            (client, SocketAddr::new(self.vip(), offer.port))
        };
        let len = match self.entropy.below(16) {
            0 => 60_000 + self.entropy.below(5000),
            1..=4 => self.entropy.below(20_000),
            _ => self.entropy.below(6000),
        };
        let payload = self.entropy.payload(len);
        let mut ip = if udp {
            packet::udp(src, dst, &payload)
        } else {
            let flags = TcpFlags::ACK | self.entropy.u8() & 0xc9;
            packet::tcp(src, dst, flags, u32::MAX - 1000, &payload)
        };
        let mut offload = Offload::default();
        self.unfinish(&mut ip, &mut offload);
        offload.segments = Some(Segments {
            kind: match (udp, src.is_ipv4()) {
                (true, _) => SegmentKind::Udp,
                (false, true) => SegmentKind::Tcp4,
                (false, false) => SegmentKind::Tcp6,
            },
            size: self.entropy.pick(&[1448, 1448, 1200, 536, 9000]),
            header_len: 0,
            ecn: self.entropy.one_in(8),
        });
        if self.entropy.one_in(4) {
            self.damage(&mut ip);
        }
        if self.entropy.one_in(4) {
            offload = self.lie();
        }
        self.shot(from, &ip, offload)
    }

    /// A random offload request, mostly one that no device makes, such as a checksum outside of the
    /// frame.
    fn lie(&mut self) -> Offload {
        const KINDS: [SegmentKind; 4] = [
            SegmentKind::Tcp4,
            SegmentKind::Tcp6,
            SegmentKind::Udp,
            SegmentKind::UdpFragments,
        ];
        let any = [self.entropy.u16(), self.entropy.u16()];
        let start = u16::from(self.entropy.u8() & 63);
        let offset = u16::from(self.entropy.u8() & 31);
        let sizes = [0, 1, 8, 100, 1448, u16::MAX, any[0]];
        Offload {
            checksum: (!self.entropy.one_in(4)).then_some(PartialChecksum {
                start: self.entropy.pick(&[start, start, start, any[0], u16::MAX]),
                offset: self
                    .entropy
                    .pick(&[offset, offset, offset, any[1], u16::MAX]),
            }),
            segments: self.entropy.one_in(2).then_some(Segments {
                kind: self.entropy.pick(&KINDS),
                size: self.entropy.pick(&sizes),
                header_len: self.entropy.pick(&[0, 54, any[0]]),
                ecn: self.entropy.one_in(2),
            }),
            verified: self.entropy.one_in(2),
        }
    }

    // --- fragments -------------------------------------------------------------------------------

    /// A valid datagram in fragments, in random order.
    fn train(&mut self) -> Act {
        let answer = self.scene.method.family == self.scene.method.servers;
        let (from, mut whole) = if answer && self.entropy.one_in(2) {
            (Side::Servers, self.answer())
        } else {
            (Side::Clients, self.request())
        };
        let six = whole[0] >> 4 == 6;
        if !six {
            whole[4..6].copy_from_slice(&self.train.to_be_bytes());
            packet::repair(&mut whole);
        }
        let sizes: Vec<usize> = (0..=self.entropy.below(6))
            .map(|_| (1 + self.entropy.below(180)) * 8)
            .collect();
        let id = self.train;
        self.train = self.train.checked_add(1).unwrap_or(0x1000);
        let mut shots: Vec<Shot> = packet::fragments(&whole, &sizes, id)
            .iter()
            .map(|piece| {
                let bytes =
                    packet::ethernet_ip(MACS[usize::from(from == Side::Servers)], PEER, piece);
                let frame = Frame::from_bytes(&bytes);
                Shot { from, frame }
            })
            .collect();
        // Fisher–Yates shuffle.
        for last in (1..shots.len()).rev() {
            shots.swap(last, self.entropy.below(last + 1));
        }
        Act::Train { shots, whole }
    }

    /// Fragments that overlap, are tiny, reach beyond 64 KiB, contradict each other, or never end.
    fn hostile_fragments(&mut self) -> Vec<Shot> {
        let from = self
            .entropy
            .pick(&[Side::Clients, Side::Clients, Side::Servers]);
        let whole = if from == Side::Servers && self.entropy.one_in(2) {
            self.answer()
        } else {
            self.request()
        };
        let six = whole[0] >> 4 == 6;
        let count = 1 + self.entropy.below(8);
        let id = u16::from(self.entropy.u8());
        let offset_at = if six { 42 } else { 6 };
        (0..count)
            .map(|_| {
                let size = (1 + self.entropy.below(30)) * 8;
                let pieces = packet::fragments(&whole, &[size, 8 + size % 64], id);
                let mut piece = pieces[self.entropy.below(pieces.len())].clone();
                match self.entropy.below(8) {
                    // The fragment has another offset, which makes overlaps and gaps.
                    0..=2 => {
                        let units = u16::try_from(self.entropy.below(40)).unwrap_or(0);
                        self.set_offset(&mut piece, offset_at, units);
                    }
                    // The fragment ends beyond 64 KiB.
                    3 => self.set_offset(&mut piece, offset_at, 0x1fff - (id & 7)),
                    // The fragment has an impossible length.
                    4 => {
                        let len = piece.len() - self.entropy.below(9);
                        piece.truncate(len);
                        packet::relength(&mut piece);
                    }
                    5 => self.flip(&mut piece),
                    6 => {
                        piece.truncate(if six { 48 } else { 20 });
                        packet::relength(&mut piece);
                    }
                    _ => {}
                }
                self.shot(from, &piece, Offload::default())
            })
            .collect()
    }

    fn set_offset(&mut self, piece: &mut [u8], at: usize, units: u16) {
        let more = self.entropy.one_in(2);
        let word = if at == 6 {
            units | if more { 0x2000 } else { 0 }
        } else {
            units << 3 | u16::from(more)
        };
        if let Some(field) = piece.get_mut(at..at + 2) {
            field.copy_from_slice(&word.to_be_bytes());
        }
        packet::repair(piece);
    }

    // --- not IP ----------------------------------------------------------------------------------

    fn arp(&mut self) -> Shot {
        let any = Ipv4Addr::from_bits(self.entropy.u32());
        let v4 = |addr: IpAddr| match addr {
            IpAddr::V4(addr) => addr,
            IpAddr::V6(_) => any,
        };
        let addresses = [
            v4(self.scene.vips[0]),
            v4(self.scene.vips[1]),
            v4(self.scene.clients[0]),
            any,
        ];
        let mut message = vec![0, 1, 8, 0, 6, 4, 0, self.entropy.pick(&[1, 2, 1, 3])];
        message.extend(PEER);
        message.extend(self.entropy.pick(&addresses).octets());
        message.extend([0; 6]);
        message.extend(self.entropy.pick(&addresses).octets());
        self.spoil(&mut message);
        let dst = self.entropy.pick(&[[0xff; 6], MACS[0]]);
        self.raw(&packet::ethernet(dst, PEER, 0x0806, &message))
    }

    fn neighbour_discovery(&mut self) -> Shot {
        let v6 = |addr: IpAddr| match addr {
            IpAddr::V4(addr) => addr.to_ipv6_mapped(),
            IpAddr::V6(addr) => addr,
        };
        let target = v6(self.vip());
        let clients = [v6(self.scene.clients[0]), Ipv6Addr::UNSPECIFIED];
        let src = IpAddr::from(self.entropy.pick(&clients));
        let group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, 1);
        let dst = IpAddr::from(self.entropy.pick(&[group, target]));
        let mut rest = target.octets().to_vec();
        let (option, words) = (
            self.entropy.pick(&[1, 2, 5]),
            self.entropy.pick(&[1, 1, 0, 4]),
        );
        rest.extend([option, words]);
        rest.extend(PEER);
        if self.entropy.one_in(4) {
            rest.truncate(self.entropy.below(24));
        }
        let kind = self.entropy.pick(&[135, 136, 133, 134]);
        let mut ip = packet::icmp(src, dst, kind, 0, [0x20, 0, 0, 0], &rest);
        ip[7] = self.entropy.pick(&[255, 255, 64]);
        self.spoil(&mut ip);
        let mac = self
            .entropy
            .pick(&[[0x33, 0x33, 0xff, 0, 0, 1], MACS[0], [0xff; 6]]);
        self.raw(&packet::ethernet(mac, PEER, 0x86dd, &ip))
    }

    /// Damages or truncates a frame that is not IP, or leaves it unchanged.
    fn spoil(&mut self, bytes: &mut Vec<u8>) {
        match self.entropy.below(4) {
            0 => self.flip(bytes),
            1 => bytes.truncate(self.entropy.below(bytes.len())),
            _ => {}
        }
    }

    /// Frames with VLAN tags, LLC frames, and frames whose protocol contradicts their content.
    fn tagged(&mut self) -> Shot {
        let ip = self.request();
        let kind = self
            .entropy
            .pick(&[0x8100_u16, 0x88a8, 0x0800, 0x86dd, 0x0806, 0x0040, 0x8847]);
        let mut payload = Vec::new();
        if matches!(kind, 0x8100 | 0x88a8) {
            payload.extend([0, self.entropy.u8(), 8, 0]);
        }
        payload.extend(ip);
        self.raw(&packet::ethernet(MACS[0], PEER, kind, &payload))
    }

    /// A frame of random bytes, of which some begin with valid addresses and header fields. Some
    /// have a random offload request, or arrive from the host.
    fn noise(&mut self) -> Shot {
        let len = self.entropy.below(100);
        let mut bytes = self.entropy.bytes(len);
        if self.entropy.one_in(2) && bytes.len() >= 15 {
            bytes[..6].copy_from_slice(&MACS[0]);
            let (kind, first) = self.entropy.pick(&[([8, 0], 0x45), ([0x86, 0xdd], 0x60)]);
            bytes[12..14].copy_from_slice(&kind);
            bytes[14] = first;
            packet::repair(&mut bytes[14..]);
        }
        let mut shot = self.raw(&bytes);
        if self.entropy.one_in(2) {
            shot.frame.offload = self.lie();
        }
        if self.entropy.one_in(4) {
            shot.from = Side::Host;
        }
        shot
    }

    fn raw(&mut self, bytes: &[u8]) -> Shot {
        Shot {
            from: self
                .entropy
                .pick(&[Side::Clients, Side::Clients, Side::Servers]),
            frame: Frame::from_bytes(bytes),
        }
    }
}
