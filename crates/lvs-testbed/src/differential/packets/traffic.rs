//! Generates random frames.

use std::net::{IpAddr, SocketAddr};

use lvs_core::Protocol;
use lvs_packet::wire::ipv6;
use serde_json::{Value, json};

use super::{GUE, Scene};
use crate::conformance::case::hex;
use crate::hostile::Entropy;
use crate::packet;

/// The director's link-layer addresses on the two links.
const DIRECTOR: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 0xc1], [2, 0, 0, 0, 0, 0x51]];
/// The link-layer address of the gateway to the clients.
const GATEWAY: [u8; 6] = [2, 0, 0, 0, 0, 0xc2];

const SYN: u8 = 2;
const ACK: u8 = 0x10;

/// The link on which a frame arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Clients,
    Servers,
}

/// A step in which a frame arrives at `side`.
pub(super) fn step(note: &str, side: Side, ip: &[u8]) -> Value {
    let (dev, dst, src) = match side {
        Side::Clients => ("cl", DIRECTOR[0], GATEWAY),
        Side::Servers => {
            let mut mac = [2, 0x52, 0, 0, 0, 0];
            let at = if ip.first().is_some_and(|b| b >> 4 == 6) {
                20
            } else {
                12
            };
            mac[2..].copy_from_slice(&ip[at..at + 4]);
            ("sv", DIRECTOR[1], mac)
        }
    };
    let frame = packet::ethernet_ip(dst, src, ip);
    json!({"note": note, "dev": dev, "frame": hex(&frame), "out": []})
}

pub(super) struct Traffic {
    scene: Scene,
    entropy: Entropy<'static>,
    /// Identification of the next packet.
    id: u16,
    removed: Vec<SocketAddr>,
}

impl Traffic {
    pub(super) const fn new(scene: Scene, entropy: Entropy<'static>) -> Self {
        Self {
            scene,
            entropy,
            id: 0x65,
            removed: Vec::new(),
        }
    }

    /// Generates the next steps: a packet, possibly in fragments, a change of the configuration, or
    /// an ICMP error about a tunnel packet between two requests. May return no step.
    pub(super) fn next_steps(&mut self) -> Vec<Value> {
        let tunnels = self.scene.method.forward == "tunnel";
        let (note, side, ip) = match self.entropy.below(64) {
            0..=23 => ("request", Side::Clients, self.request()),
            24..=33 => {
                let (note, ip) = self.answer();
                (note, Side::Servers, ip)
            }
            34..=40 => ("error of a server", Side::Servers, self.error_of_server()),
            41..=45 => ("error of a client", Side::Clients, self.error_of_client()),
            46..=51 if tunnels => return self.complaint(),
            46..=49 => ("request", Side::Clients, self.request()),
            50..=52 => ("echo", Side::Clients, self.echo()),
            53 | 54 => ("another protocol", Side::Clients, self.other_protocol()),
            55..=57 => ("in transit", Side::Servers, self.transit()),
            58 => ("error in transit", Side::Servers, self.error_in_transit()),
            59 => ("error in transit", Side::Clients, self.stray_error()),
            _ => return self.change(),
        };
        self.send(note, side, ip)
    }

    /// Sends a packet, which is sometimes changed, truncated or split into fragments.
    fn send(&mut self, note: &str, side: Side, mut ip: Vec<u8>) -> Vec<Value> {
        // Answers of the host itself are not compared, so these packets are unchanged.
        let plain = note == "echo" || note == "answer of direct routing";
        if self.entropy.one_in(6) && !plain {
            self.embellish(&mut ip, note);
        }
        self.number(&mut ip);
        if self.entropy.one_in(6) && !self.is_uncounted(note) {
            let note = format!("{note}, in fragments");
            return self
                .fragments(&ip, note.starts_with("request"))
                .iter()
                .map(|piece| step(&note, side, piece))
                .collect();
        }
        if self.entropy.one_in(14) {
            self.cut(&mut ip, note);
        }
        vec![step(note, side, &ip)]
    }

    /// Whether the packet is an ICMP error of a server that the director does not translate. It is
    /// sent unfragmented, because the counters of its fragments are not compared.
    fn is_uncounted(&self, note: &str) -> bool {
        note.starts_with("error of a server") && !self.scene.is_nat()
    }

    fn client(&mut self) -> SocketAddr {
        let clients = &self.scene.clients;
        clients[self.entropy.below(clients.len())]
    }

    fn server(&mut self) -> SocketAddr {
        let servers = &self.scene.servers;
        servers[self.entropy.below(servers.len())]
    }

    fn payload(&mut self) -> Vec<u8> {
        let len = match self.entropy.below(16) {
            0 => 0,
            1 => 1,
            2..=6 => self.entropy.below(40),
            7..=10 => self.entropy.below(600),
            12 => 1352 + self.entropy.below(60),
            13 => 1180 + self.entropy.below(80),
            _ => 1200 + self.entropy.below(260),
        };
        // This length fits into a link with the usual MTU.
        let headers = if self.scene.is_six() { 40 } else { 20 } + 20;
        let len = len.min(1500 - headers);
        self.entropy.payload(len)
    }

    /// A packet of the case's protocol from `src` to `dst` with a random payload. If `opening` is
    /// true, it is a TCP SYN or an SCTP INIT; otherwise, its flags or its chunk type are chosen at
    /// random.
    fn segment(&mut self, src: SocketAddr, dst: SocketAddr, opening: bool) -> Vec<u8> {
        let payload = self.payload();
        self.packet(src, dst, opening, &payload)
    }

    fn packet(
        &mut self,
        src: SocketAddr,
        dst: SocketAddr,
        opening: bool,
        payload: &[u8],
    ) -> Vec<u8> {
        match self.scene.protocol {
            Protocol::TCP => {
                let flags = if opening {
                    SYN
                } else {
                    self.entropy.pick(&[
                        ACK,
                        ACK,
                        ACK,
                        ACK | 8,
                        SYN,
                        SYN | ACK,
                        ACK | 1,
                        4,
                        ACK | 4,
                        0,
                    ])
                };
                let sequence = self.entropy.u32();
                packet::tcp(src, dst, flags, sequence, payload)
            }
            Protocol::UDP => {
                let mut ip = packet::udp(src, dst, payload);
                if self.entropy.one_in(16) {
                    // The packet has no checksum.
                    let at = if src.is_ipv4() { 26 } else { 46 };
                    ip[at..at + 2].fill(0);
                }
                ip
            }
            _ => {
                let kind = if opening {
                    1
                } else {
                    self.entropy.pick(&[0, 1, 2, 3, 6, 7, 10, 11, 14])
                };
                let mut chunk = vec![kind, 0];
                let len = u16::try_from(4 + payload.len()).unwrap_or(4);
                chunk.extend(len.to_be_bytes());
                chunk.extend(payload);
                packet::sctp(src, dst, &chunk)
            }
        }
    }

    fn request(&mut self) -> Vec<u8> {
        let client = self.client();
        let mut vip = self.scene.vip;
        if self.entropy.one_in(20) {
            vip.set_port(self.entropy.pick(&[9, 20, 8080]));
        }
        let opening = self.entropy.one_in(2);
        self.segment(client, vip, opening)
    }

    fn answer(&mut self) -> (&'static str, Vec<u8>) {
        let client = self.client();
        let mut source = self.server();
        let by_vip = source.is_ipv6() != client.is_ipv6()
            || (!self.scene.is_nat() && self.entropy.one_in(2));
        if by_vip {
            source = self.scene.vip;
        }
        if self.entropy.one_in(12) {
            source.set_port(self.entropy.pick(&[9, 20, 53]));
        }
        let mut dst = client;
        if self.entropy.one_in(8) {
            dst.set_port(self.entropy.u16() | 1);
        }
        if by_vip {
            // A source on the host would receive the ICMP error itself.
            let payload = self.entropy.payload(100);
            let ip = self.packet(source, dst, false, &payload);
            return ("answer of direct routing", ip);
        }
        ("answer", self.segment(source, dst, false))
    }

    // --- packets that errors quote -------------------------------------------------------------

    /// The first bytes of a packet from `src` to `dst`, as quoted by a router.
    fn quoted(&mut self, src: SocketAddr, dst: SocketAddr) -> Vec<u8> {
        let opening = self.entropy.one_in(3);
        let mut ip = self.segment(src, dst, opening);
        let six = src.is_ipv6();
        ip[if six { 7 } else { 8 }] = 1 + self.entropy.u8() % 63;
        self.number(&mut ip);
        if self.entropy.one_in(8) {
            self.embellish(&mut ip, "quoted");
        }
        if self.entropy.one_in(16) {
            // A later fragment, or a first one.
            let word = self.entropy.pick(&[0x2000_u16, 0x0010, 0x2010]);
            if six {
                let word = (word & 0x1fff) << 3 | u16::from(word & 0x2000 != 0);
                packet::with_extension(&mut ip, 44, &[&word.to_be_bytes()[..], &[0; 4]].concat());
            } else {
                ip[6..8].copy_from_slice(&word.to_be_bytes());
                packet::repair(&mut ip);
            }
        }
        let header = if six { 40 } else { 20 };
        let keep = match self.entropy.below(10) {
            0 => header + self.entropy.below(10),
            1 => self.entropy.below(header),
            2..=4 => header + 8,
            5 => header + 20,
            6 => 200,
            _ => 548,
        };
        ip.truncate(keep);
        ip
    }

    /// An ICMP error from `src` to `dst` about `quoted`, with a random type and code. Some have a
    /// wrong checksum.
    fn error(&mut self, src: IpAddr, dst: IpAddr, quoted: &[u8]) -> Vec<u8> {
        let kinds: &[(u8, u8)] = if src.is_ipv4() {
            &[
                (3, 0),
                (3, 1),
                (3, 3),
                (3, 3),
                (3, 4),
                (3, 4),
                (3, 13),
                (4, 0),
                (11, 0),
                (11, 1),
                (12, 0),
                (5, 1),
            ]
        } else {
            &[
                (1, 0),
                (1, 3),
                (1, 4),
                (1, 4),
                (2, 0),
                (2, 0),
                (3, 0),
                (3, 1),
                (4, 0),
                (4, 1),
                (100, 0),
                (1, 9),
            ]
        };
        let (kind, code) = self.entropy.pick(kinds);
        let mtu = self.entropy.pick(&[1400_u16, 1280, 576, 1500, 0]);
        let second = match (src.is_ipv4(), kind) {
            (true, 3) | (false, 2) => [[0; 2], mtu.to_be_bytes()].concat(),
            _ => vec![0; 4],
        };
        let second = [second[0], second[1], second[2], second[3]];
        let mut ip = packet::icmp(src, dst, kind, code, second, quoted);
        if self.entropy.one_in(16) {
            let at = if src.is_ipv4() { 22 } else { 42 };
            ip[at] ^= 0x55;
        }
        ip
    }

    /// Creates an ICMP error about a request, from a server or another host on the servers' link.
    fn error_of_server(&mut self) -> Vec<u8> {
        let (client, server) = (self.client(), self.server());
        let vip = self.scene.vip;
        let mut about = if self.scene.is_nat() { server } else { vip };
        if about.is_ipv6() != client.is_ipv6() {
            about = vip;
        }
        if self.entropy.one_in(10) {
            about = SocketAddr::new(self.scene.bystander, about.port());
        }
        if self.entropy.one_in(12) {
            about.set_port(9);
        }
        let mut source = if self.entropy.one_in(3) {
            self.scene.router
        } else {
            server.ip()
        };
        if source.is_ipv6() != client.is_ipv6() {
            source = self.scene.bystander;
        }
        let quoted = self.quoted(client, about);
        self.error(source, client.ip(), &quoted)
    }

    /// Creates an ICMP error about an answer, from a client or a router near it.
    fn error_of_client(&mut self) -> Vec<u8> {
        let client = self.client();
        let mut vip = self.scene.vip;
        let source = if self.entropy.one_in(3) {
            self.client().ip()
        } else {
            client.ip()
        };
        if self.entropy.one_in(12) {
            vip.set_port(9);
        }
        let quoted = self.quoted(vip, client);
        let to = self.scene.vip.ip();
        let mut error = self.error(source, to, &quoted);
        // Errors that report a path MTU are omitted, because the host would use this MTU.
        while matches!((to.is_ipv4(), error.get(20..22)), (true, Some([3, 4])))
            || matches!((to.is_ipv6(), error.get(40)), (true, Some(2)))
        {
            error = self.error(source, to, &quoted);
        }
        error
    }

    /// Creates an ICMP error about a packet from a client to a host that is not a server.
    fn error_in_transit(&mut self) -> Vec<u8> {
        let client = self.client();
        let other = SocketAddr::new(self.scene.bystander, 53);
        let quoted = self.quoted(client, other);
        self.error(self.scene.bystander, client.ip(), &quoted)
    }

    /// Creates an ICMP error from a client to a server, about a packet from the server to the client.
    fn stray_error(&mut self) -> Vec<u8> {
        let client = self.client();
        let mut server = self.server();
        if server.is_ipv6() != client.is_ipv6() {
            server.set_ip(self.scene.bystander);
        }
        let quoted = self.quoted(server, client);
        self.error(client.ip(), server.ip(), &quoted)
    }

    // --- other packets ---------------------------------------------------------------------------

    fn echo(&mut self) -> Vec<u8> {
        let client = self.client().ip();
        let mut payload = self.payload();
        // The simulated host does not fragment its answers.
        payload.truncate(500);
        let kind = match (client.is_ipv4(), self.entropy.one_in(4)) {
            (true, false) => 8,
            (true, true) => 0,
            (false, false) => 128,
            (false, true) => 129,
        };
        packet::icmp(client, self.scene.vip.ip(), kind, 0, [0, 7, 0, 1], &payload)
    }

    fn other_protocol(&mut self) -> Vec<u8> {
        let client = self.client();
        let payload = self.payload();
        match self.entropy.below(3) {
            0 => {
                let protocol = self.entropy.pick(&[50, 46, 89, 253]);
                packet::ip(client.ip(), self.scene.vip.ip(), protocol, 64, &payload)
            }
            1 => packet::udp(client, self.scene.vip, &payload),
            _ => packet::tcp(client, self.scene.vip, SYN, 1, &payload),
        }
    }

    /// A packet to a client from a host on the servers' link that is not a server.
    fn transit(&mut self) -> Vec<u8> {
        let client = self.client();
        let source = SocketAddr::new(self.scene.bystander, self.scene.vip.port());
        self.segment(source, client, false)
    }

    // --- errors about tunnel packets -----------------------------------------------------------

    /// A request, an ICMP error of a router about its tunnel packet, and another request.
    fn complaint(&mut self) -> Vec<Value> {
        let (client, server) = (self.client(), self.server());
        let vip = self.scene.vip;
        let mut inner = self.segment(client, vip, true);
        inner[if vip.is_ipv4() { 8 } else { 7 }] = 63;
        if vip.is_ipv4() {
            inner[6] = if self.entropy.one_in(3) { 0 } else { 0x40 };
            packet::repair(&mut inner);
        }
        let mut steps = vec![step("request", Side::Clients, &inner)];
        let protocol = if vip.is_ipv4() { 4 } else { 41 };
        let (between, outer) = self.tunnel_header(protocol, inner.len());
        let director: IpAddr = if server.is_ipv4() {
            IpAddr::from([10, 1, 255, 254])
        } else {
            IpAddr::from([0xfd00, 1, 0, 0, 0, 0, 0, 0xffff])
        };
        let mut tunnelled =
            packet::ip(director, server.ip(), outer, 63, &[between, inner].concat());
        if server.is_ipv4() {
            tunnelled[6] = 0x40;
            packet::repair(&mut tunnelled);
        }
        let keep = self.entropy.pick(&[28, 28, 48, 56, 60, 76, 100, 548]);
        tunnelled.truncate(if server.is_ipv4() { keep } else { keep + 40 });
        let mut error = self.error(self.scene.router, director, &tunnelled);
        // The dataplane learns the path MTU of a tunnel over IPv6, and the kernel does not.
        while server.is_ipv6() && error[40] == 2 {
            error = self.error(self.scene.router, director, &tunnelled);
        }
        steps.push(step("a complaint", Side::Servers, &error));
        let request = self.request();
        steps.extend(self.send("request", Side::Clients, request));
        steps
    }

    /// A tunnel header for the packet, and the protocol number of the outer header.
    fn tunnel_header(&mut self, protocol: u8, len: usize) -> (Vec<u8>, u8) {
        let kind = if protocol == 4 {
            [0x08, 0]
        } else {
            [0x86, 0xdd]
        };
        match (self.scene.method.tunnel, self.scene.method.checksum) {
            (Some("gre"), None) => ([&[0, 0], &kind[..]].concat(), 47),
            (Some("gre"), _) => ([&[0x80, 0], &kind[..], &[0x12, 0x34, 0, 0]].concat(), 47),
            (Some("gue"), checksum) => {
                let options: &[u8] = match checksum {
                    Some("remcsum") => &[1, protocol, 0, 0x10, 0, 0x14, 0, 0x1a],
                    _ => &[0, protocol, 0, 0],
                };
                let port = 40_000 + self.entropy.u16() % 20_000;
                let total = u16::try_from(8 + options.len() + len).unwrap_or(u16::MAX);
                let mut udp = [port.to_be_bytes(), GUE.to_be_bytes(), total.to_be_bytes()].concat();
                udp.extend([0, 0]);
                udp.extend(options);
                (udp, 17)
            }
            _ => (Vec::new(), protocol),
        }
    }

    // --- changes ---------------------------------------------------------------------------------

    fn change(&mut self) -> Vec<Value> {
        match self.entropy.below(5) {
            0 => {
                let server = self.server();
                // Weight 0 is excluded: without another server, the kernel would remove a
                // connection at once, and timing would decide whether a packet still reaches it.
                let weight = self.entropy.pick(&[1, 2, 5]);
                if self.removed.contains(&server) {
                    return Vec::new();
                }
                vec![json!({
                    "op": "edit", "addr": server.ip(), "port": server.port(), "weight": weight
                })]
            }
            1 if self.scene.servers.len() > 1 && self.removed.is_empty() => {
                let server = self.server();
                self.removed.push(server);
                vec![json!({"op": "del", "addr": server.ip(), "port": server.port()})]
            }
            2 => {
                let (name, values) = self.entropy.pick(&super::SYSCTLS);
                let value = self.entropy.pick(values);
                vec![json!({"op": "sysctl", "name": name, "value": value})]
            }
            _ => Vec::new(),
        }
    }

    // --- shapes ----------------------------------------------------------------------------------

    /// Sets the identification of an IPv4 packet, and in half of the calls "don't fragment". An
    /// IPv6 packet stays unchanged.
    fn number(&mut self, ip: &mut [u8]) {
        self.id = self.id.wrapping_add(1);
        if ip[0] >> 4 == 4 {
            ip[4..6].copy_from_slice(&self.id.to_be_bytes());
            if self.entropy.one_in(2) {
                ip[6] |= 0x40;
            }
            packet::repair(ip);
        }
    }

    /// Adds optional fields to a packet (hops, type of service, options, extension headers), or
    /// changes one of its bits.
    fn embellish(&mut self, ip: &mut Vec<u8>, note: &str) {
        let six = ip[0] >> 4 == 6;
        match self.entropy.below(6) {
            0 => ip[if six { 7 } else { 8 }] = self.entropy.pick(&[0, 1, 1, 1, 2, 255]),
            1 if six => {
                let class = self.entropy.u8();
                ip[0] = 0x60 | class >> 4;
                ip[1] = class << 4;
            }
            1 => ip[1] = self.entropy.u8(),
            2..=4 if six => {
                let whole = self.is_uncounted(note);
                self.extension(ip, whole);
            }
            2..=4 => {
                // The kernel drops translated errors with options that it has filled in.
                let filled = !note.starts_with("error");
                self.options(ip, filled);
            }
            _ => {
                let at = if six { 40 } else { 20 };
                let len = ip.len();
                if len > at {
                    ip[at + self.entropy.below((len - at).min(24))] ^= 1 << self.entropy.below(8);
                }
            }
        }
        packet::repair(ip);
    }

    fn options(&mut self, ip: &mut Vec<u8>, filled: bool) {
        let options: &[u8] = match self.entropy.below(12) {
            1 | 4 if !filled => &[1, 1, 1, 1],
            0 => &[1, 1, 1, 1],
            1 => &[7, 7, 4, 0, 0, 0, 0, 0],
            2 => &[7, 7, 8, 1, 2, 3, 4, 0],
            3 => &[148, 4, 0, 0],
            4 => &[68, 12, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            5 => &[134, 12, 0, 0, 0, 1, 1, 6, 0, 0, 0, 1],
            6 => &[134, 6, 0, 0, 0, 1, 0, 0],
            7 => &[7, 3, 9, 0],
            8 => &[7, 40, 4, 0],
            9 => &[131, 7, 4, 10, 1, 9, 9, 0],
            10 => &[130, 11, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            _ => &[222, 4, 1, 2],
        };
        packet::with_options(ip, options);
    }

    /// Adds a random IPv6 extension header; if `whole`, no fragment header.
    fn extension(&mut self, ip: &mut Vec<u8>, whole: bool) {
        let (kind, body): (u8, &[u8]) = match self.entropy.below(10) {
            0 => (0, &[1, 4, 0, 0, 0, 0]),
            1 | 2 => (0, &[5, 2, 0, 0, 1, 0]),
            3 => (60, &[1, 4, 0, 0, 0, 0]),
            4 => (60, &[1, 0, 1, 0, 0, 0]),
            5 | 6 => (43, &[0, 0, 0, 0, 0, 0]),
            7 => (51, &[0; 22]),
            8 if !whole => (44, &[0, 0, 0, 0, 0, 9]),
            _ => (135, &[0, 0, 0, 0, 0, 0]),
        };
        packet::with_extension(ip, kind, body);
    }

    /// Truncates a packet, with a correct length field.
    fn cut(&mut self, ip: &mut Vec<u8>, note: &str) {
        let header = if ip[0] >> 4 == 6 {
            ipv6::walk(ip).map_or(40, |chain| chain.l4)
        } else {
            usize::from(ip[0] & 15) * 4
        };
        // Keep the ICMP header: without it, the host handles an ICMP message in transit.
        let icmp = matches!(note, "echo") || note.starts_with("error");
        let keep = header + if icmp { 8 } else { 0 } + self.entropy.below(24);
        ip.truncate(keep);
        packet::relength(ip);
    }

    /// Splits a packet into fragments. Some sequences are in another order, or have a duplicate or
    /// missing fragment. With `df`, some fragments of a packet with "don't fragment" also have the
    /// flag; only requests use this. Some packets are returned whole: short packets, and packets
    /// with IPv4 options or some IPv6 extension headers.
    fn fragments(&mut self, ip: &[u8], df: bool) -> Vec<Vec<u8>> {
        let six = ip[0] >> 4 == 6;
        let header = if six { 40 } else { 20 };
        if ip.len() <= header + 8 || !six && ip[0] != 0x45 {
            return vec![ip.to_vec()];
        }
        let count = 1 + self.entropy.below(3);
        let sizes: Vec<usize> = (0..count)
            .map(|_| match self.entropy.below(6) {
                0 => 8,
                1 => 8 * (1 + self.entropy.below(6)),
                2 => 24,
                _ => 8 * (1 + self.entropy.below((ip.len() - header).div_ceil(8))),
            })
            .collect();
        let df = df && ip[6] & 0x40 != 0;
        let mut pieces = packet::fragments(ip, &sizes, self.id);
        if six && (matches!(ip[6], 0 | 43 | 44) || ipv6::walk(&pieces[0]).is_none()) {
            // Every fragment must repeat these headers; a fragment that ends within a header is
            // dropped here.
            return vec![ip.to_vec()];
        }
        if !six {
            for piece in &mut pieces {
                if df && self.entropy.one_in(3) {
                    piece[6] |= 0x40;
                }
                packet::repair(piece);
            }
        }
        match self.entropy.below(8) {
            0 | 1 => pieces.reverse(),
            2 => {
                let again = pieces[self.entropy.below(pieces.len())].clone();
                pieces.insert(self.entropy.below(pieces.len() + 1), again);
            }
            3 => {
                let len = pieces.len();
                pieces.swap(0, self.entropy.below(len));
            }
            4 => {
                pieces.remove(self.entropy.below(pieces.len()));
            }
            _ => {}
        }
        pieces
    }
}
