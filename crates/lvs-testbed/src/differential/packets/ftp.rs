//! FTP control connections: correct dialogues, and segments that do not belong to them.

use std::net::{IpAddr, SocketAddr};

use serde_json::{Value, json};

use super::traffic::{Side, step};
use crate::conformance::case::Json;
use crate::hostile::Entropy;
use crate::packet;

/// Number of steps of a case.
const STEPS: usize = 28;

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const PSH: u8 = 8;
const ACK: u8 = 0x10;
const URG: u8 = 0x20;

/// Differences between a segment's sequence number and the correct one.
const DISTANCES: [u32; 16] = [
    1,
    2,
    10,
    100,
    1000,
    8192,
    65_534,
    65_535,
    65_536,
    66_000,
    70_000,
    1 << 20,
    1 << 25,
    (1 << 31) - 1,
    1 << 31,
    3 << 30,
];

const WINDOWS: [u16; 8] = [0, 1, 20, 512, 8192, 8192, 29_200, 65_535];

/// A TCP segment of the control connection.
#[derive(Clone, Debug)]
struct Segment {
    from: Side,
    flags: u8,
    sequence: u32,
    acknowledgement: u32,
    window: u16,
    options: Vec<u8>,
    payload: Vec<u8>,
}

/// An FTP control connection, with both ends' TCP state.
struct Dialogue {
    entropy: Entropy<'static>,
    client: SocketAddr,
    vip: SocketAddr,
    server: SocketAddr,
    /// Next sequence numbers of the client, and of the server before translation.
    next: [u32; 2],
    /// Number of bytes that the director has added to the server's stream.
    growth: u32,
    sack: bool,
    /// Sequence numbers of replies with an address. Retransmissions of these replies are not
    /// compared.
    announced: Vec<u32>,
    past: Vec<Segment>,
    id: u16,
    port: u16,
    steps: Vec<Value>,
}

impl Dialogue {
    fn is_six(&self) -> bool {
        self.vip.is_ipv6()
    }

    fn send(&mut self, segment: &Segment) {
        let (src, dst) = match segment.from {
            Side::Clients => (self.client, self.vip),
            Side::Servers => (self.server, self.client),
        };
        let damaged = self.entropy.one_in(60);
        self.emit("control", src, dst, segment, damaged);
    }

    fn emit(
        &mut self,
        what: &str,
        src: SocketAddr,
        dst: SocketAddr,
        segment: &Segment,
        damaged: bool,
    ) {
        let mut ip = packet::segment(
            src,
            dst,
            &packet::TcpHeader {
                flags: segment.flags,
                sequence: segment.sequence,
                acknowledgement: segment.acknowledgement,
                window: segment.window,
                options: &segment.options,
            },
            &segment.payload,
        );
        self.id = self.id.wrapping_add(1);
        if !self.is_six() {
            ip[4..6].copy_from_slice(&self.id.to_be_bytes());
            ip[6] |= 0x40;
            packet::repair(&mut ip);
        }
        if damaged {
            let at = if self.is_six() { 56 } else { 36 };
            ip[at] ^= 0x10;
        }
        let letters: String = [
            (SYN, 'S'),
            (FIN, 'F'),
            (RST, 'R'),
            (ACK, 'A'),
            (PSH, 'P'),
            (URG, 'U'),
        ]
        .iter()
        .filter(|(bit, _)| segment.flags & bit != 0)
        .map(|&(_, letter)| letter)
        .collect();
        let note = format!(
            "{what}, {} {letters} {} {} {} {:?}{}",
            if segment.from == Side::Clients {
                "client"
            } else {
                "server"
            },
            segment.sequence,
            segment.acknowledgement,
            segment.window,
            String::from_utf8_lossy(&segment.payload),
            if damaged { " damaged" } else { "" },
        );
        self.steps.push(step(&note, segment.from, &ip));
    }

    /// The next segment of the side `from` in order, with these flags and this payload.
    fn right(&mut self, from: Side, flags: u8, payload: &[u8]) -> Segment {
        let [client, server] = self.next;
        let seen = server.wrapping_add(self.growth);
        let (sequence, acknowledgement) = match from {
            Side::Clients => (client, seen),
            Side::Servers => (server, client),
        };
        let window = self.entropy.pick(&WINDOWS);
        let options = self.options(flags, acknowledgement);
        Segment {
            from,
            flags,
            sequence,
            acknowledgement: if flags & ACK == 0 { 0 } else { acknowledgement },
            window,
            options,
            payload: payload.to_vec(),
        }
    }

    fn options(&mut self, flags: u8, acknowledged: u32) -> Vec<u8> {
        let mut options = Vec::new();
        if flags & SYN != 0 {
            options.extend([2, 4, 5, 180]);
            if self.entropy.one_in(2) {
                options.extend([1, 3, 3, self.entropy.pick(&[0, 2, 7, 14, 15])]);
            }
            if self.sack && !self.entropy.one_in(4) {
                options.extend([1, 1, 4, 2]);
            }
        } else if self.sack && flags & ACK != 0 && self.entropy.one_in(6) {
            let far = self.entropy.pick(&[1, 10, 100, 70_000]);
            let left = acknowledged.wrapping_add(far);
            options.extend([1, 1, 5, 10]);
            options.extend(left.to_be_bytes());
            options.extend(left.wrapping_add(10).to_be_bytes());
        } else if self.entropy.one_in(12) {
            options.extend([1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2]);
        }
        options
    }

    /// Sends a segment, mostly with correct fields. Advances the sequence number of `from`, except
    /// after most wrong segments.
    fn say(&mut self, from: Side, flags: u8, payload: &[u8]) {
        let mut segment = self.right(from, flags, payload);
        let wrong = self.entropy.one_in(9);
        if wrong {
            self.distort(&mut segment);
        }
        self.send(&segment);
        self.past.push(segment.clone());
        if !wrong || self.entropy.one_in(3) {
            let len = payload.len() + usize::from(flags & SYN != 0) + usize::from(flags & FIN != 0);
            let len = u32::try_from(len).unwrap_or(0);
            let at = usize::from(from == Side::Servers);
            self.next[at] = self.next[at].wrapping_add(len);
        }
    }

    fn distort(&mut self, segment: &mut Segment) {
        let far = self.entropy.pick(&DISTANCES);
        let far = if self.entropy.one_in(2) {
            far
        } else {
            far.wrapping_neg()
        };
        match self.entropy.below(8) {
            0..=2 => segment.sequence = segment.sequence.wrapping_add(far),
            3..=5 => segment.acknowledgement = segment.acknowledgement.wrapping_add(far),
            6 => {
                segment.flags = self.entropy.pick(&[
                    SYN,
                    SYN | ACK,
                    SYN | ACK,
                    FIN | ACK,
                    RST,
                    RST | ACK,
                    ACK,
                    0,
                    FIN,
                    SYN | FIN,
                    ACK | URG,
                    SYN | RST,
                    PSH,
                    SYN | URG,
                ]);
            }
            _ => {
                segment.acknowledgement = 0;
                segment.sequence = 0;
            }
        }
    }

    /// Opens the control connection, possibly again, and possibly without some of the segments.
    fn open(&mut self) {
        let random = self.entropy.u32();
        match self.entropy.below(5) {
            0 => {}
            1 => self.next[0] = self.next[0].wrapping_add(100_000),
            _ => self.next[0] = random,
        }
        self.say(Side::Clients, SYN, b"");
        if self.entropy.one_in(8) {
            self.say(Side::Servers, ACK, b"");
        }
        if !self.entropy.one_in(6) {
            self.next[1] = self.entropy.u32();
            self.growth = 0;
            self.announced.clear();
        }
        if !self.entropy.one_in(10) {
            self.say(Side::Servers, SYN | ACK, b"");
        }
        if !self.entropy.one_in(10) {
            self.say(Side::Clients, ACK, b"");
        }
        if !self.entropy.one_in(3) {
            self.say(Side::Servers, PSH | ACK, b"220 ready\r\n");
            self.say(Side::Clients, ACK, b"");
        }
    }

    /// Sends a passive command of the client and the reply of the server, which mostly announces a
    /// data connection. Sometimes also sends the beginning of this data connection.
    fn passive(&mut self) {
        let extended = self.is_six() || self.entropy.one_in(2);
        let command: &[u8] = if extended { b"EPSV\r\n" } else { b"PASV\r\n" };
        self.say(Side::Clients, PSH | ACK, command);
        if self.entropy.one_in(5) {
            self.say(Side::Servers, ACK, b"");
        }
        if self.announced.contains(&self.next[1]) || self.entropy.one_in(10) {
            self.say(Side::Servers, PSH | ACK, b"500 no\r\n");
            return;
        }
        self.port = self.port.wrapping_add(2);
        let [high, low] = self.port.to_be_bytes();
        let (text, growth) = match self.server.ip() {
            IpAddr::V4(addr) if !extended => {
                let numbers = |addr: std::net::Ipv4Addr| addr.to_string().replace('.', ",");
                let IpAddr::V4(vip) = self.vip.ip() else {
                    return;
                };
                let (old, new) = (numbers(addr), numbers(vip));
                let text = format!("227 Entering Passive Mode ({old},{high},{low}).\r\n");
                let growth = u32::try_from(new.len())
                    .unwrap_or(0)
                    .wrapping_sub(u32::try_from(old.len()).unwrap_or(0));
                (text, growth)
            }
            addr if self.entropy.one_in(2) => {
                let family = if addr.is_ipv4() { 1 } else { 2 };
                let gone = u32::try_from(addr.to_string().len() + 1).unwrap_or(0);
                (
                    format!("229 ok (|{family}|{addr}|{}|)\r\n", self.port),
                    gone.wrapping_neg(),
                )
            }
            _ => (format!("229 ok (|||{}|)\r\n", self.port), 0),
        };
        self.announced.push(self.next[1]);
        self.say(Side::Servers, PSH | ACK, text.as_bytes());
        self.growth = self.growth.wrapping_add(growth);
        if !self.entropy.one_in(3) {
            self.say(Side::Clients, ACK, b"");
        }
        if self.entropy.one_in(2) {
            let client = SocketAddr::new(self.client.ip(), self.client.port() ^ 0x100);
            let vip = SocketAddr::new(self.vip.ip(), self.port);
            let server = SocketAddr::new(self.server.ip(), self.port);
            self.data(Side::Clients, client, vip, server);
        }
    }

    /// Sends a command of the client for active FTP (`PORT` or `EPRT`), which contains an address,
    /// the reply of the server, and sometimes the beginning of the data connection.
    fn active(&mut self) {
        let listens = SocketAddr::new(self.client.ip(), self.client.port() ^ 0x200);
        let [high, low] = listens.port().to_be_bytes();
        let command = match listens.ip() {
            IpAddr::V4(addr) if self.entropy.one_in(2) => {
                let numbers = addr.to_string().replace('.', ",");
                format!("PORT {numbers},{high},{low}\r\n")
            }
            addr => {
                let family = if addr.is_ipv4() { 1 } else { 2 };
                format!("EPRT |{family}|{addr}|{}|\r\n", listens.port())
            }
        };
        self.say(Side::Clients, PSH | ACK, command.as_bytes());
        self.say(Side::Servers, PSH | ACK, b"200 ok\r\n");
        if self.entropy.one_in(2) {
            let vip = SocketAddr::new(self.vip.ip(), self.vip.port() - 1);
            let server = SocketAddr::new(self.server.ip(), self.server.port() - 1);
            self.data(Side::Servers, listens, vip, server);
        }
    }

    /// Sends the first one to three segments of a valid data connection, which the side `opens`
    /// opens.
    fn data(&mut self, opens: Side, client: SocketAddr, vip: SocketAddr, server: SocketAddr) {
        let other = if opens == Side::Clients {
            Side::Servers
        } else {
            Side::Clients
        };
        let segments = [
            (opens, SYN, 1000, 0),
            (other, SYN | ACK, 5000, 1001),
            (opens, ACK, 1001, 5001),
        ];
        let count = 1 + self.entropy.below(3);
        for (from, flags, sequence, acknowledgement) in segments.into_iter().take(count) {
            let segment = Segment {
                from,
                flags,
                sequence,
                acknowledgement,
                window: 8192,
                options: Vec::new(),
                payload: Vec::new(),
            };
            let (src, dst) = match from {
                Side::Clients => (client, vip),
                Side::Servers => (server, client),
            };
            self.emit("data", src, dst, &segment, false);
        }
    }

    fn go_on(&mut self) {
        let side = if self.entropy.one_in(2) {
            Side::Clients
        } else {
            Side::Servers
        };
        match self.entropy.below(40) {
            0..=9 => self.passive(),
            10..=13 => self.active(),
            14..=17 => {
                self.say(Side::Clients, PSH | ACK, b"NOOP\r\n");
                self.say(Side::Servers, PSH | ACK, b"200 ok\r\n");
            }
            18..=21 => self.say(side, ACK, b""),
            22 | 23 => {
                // Part of a long text.
                let len = self.entropy.pick(&[1, 100, 1000, 1300]);
                self.say(side, PSH | ACK, &vec![b'x'; len]);
            }
            24 | 25 => self.say(side, FIN | ACK, b""),
            26 | 27 => {
                let flags = self.entropy.pick(&[RST, RST | ACK]);
                let mut segment = self.right(side, flags, b"");
                match self.entropy.below(4) {
                    0 => self.distort(&mut segment),
                    1 => segment.sequence = 0,
                    2 if flags == RST => {
                        segment.sequence = segment.sequence.wrapping_add(segment.acknowledgement);
                    }
                    _ => {}
                }
                self.send(&segment);
            }
            28..=31 => self.open(),
            32 => {
                let mut segment = self.right(side, SYN, b"");
                segment.sequence = self.entropy.u32();
                self.send(&segment);
                if self.entropy.one_in(2) {
                    let other = if side == Side::Clients {
                        Side::Servers
                    } else {
                        Side::Clients
                    };
                    let mut answer = self.right(other, SYN | ACK, b"");
                    answer.acknowledgement = segment.sequence.wrapping_add(1);
                    self.send(&answer);
                }
            }
            33 => {
                // A challenge ACK (RFC 5961), or an old duplicate.
                let mut segment = self.right(Side::Clients, SYN, b"");
                segment.sequence = segment.sequence.wrapping_sub(self.entropy.pick(&DISTANCES));
                self.send(&segment);
                self.say(Side::Servers, ACK, b"");
            }
            34..=36 if !self.past.is_empty() => {
                let again = self.past[self.entropy.below(self.past.len())].clone();
                let names = again.payload.starts_with(b"22") && again.payload.len() > 12;
                if !names {
                    self.send(&again);
                }
            }
            _ => {
                let mut segment = self.right(side, ACK, b"");
                self.distort(&mut segment);
                self.send(&segment);
            }
        }
    }
}

/// Whether a step is a client's SYN for a control connection. If the SYN would replace a tracked
/// connection, the kernel drops it, but the dataplane opens the new connection at once.
pub(in super::super) fn opens_control(step: &Value) -> bool {
    step.maybe_text("note").is_some_and(|note| {
        let mut words = note.split(' ');
        words.next() == Some("control,")
            && words.next() == Some("client")
            && words.next().is_some_and(|letters| letters.contains('S'))
            && !note.ends_with(" damaged")
    })
}

/// Generates the case `number` of `seed` for the FTP helper.
pub(in super::super) fn case(seed: u64, number: u64) -> Value {
    let mut entropy = Entropy::seeded(seed.wrapping_mul(0x1_0000_0003).wrapping_add(number) ^ 0xf7);
    let six = entropy.one_in(3);
    let vip: IpAddr = if six {
        [0xfd00, 0, 9, 0, 0, 0, 0, 0x109].into()
    } else {
        [10, 0, 9, 9].into()
    };
    let server = SocketAddr::new(super::server(six, &mut entropy), entropy.pick(&[21, 2121]));
    let client = SocketAddr::new(
        super::client(six, &mut entropy),
        1024 + entropy.u16() % 60_000,
    );
    let mut sysctl = serde_json::Map::new();
    sysctl.insert(
        "conn_reuse_mode".to_owned(),
        entropy.pick(&[0, 0, 1]).into(),
    );
    if entropy.one_in(4) {
        sysctl.insert("sloppy_tcp".to_owned(), 1.into());
    }
    let config = json!({
        "services": [{
            "proto": "tcp", "addr": vip, "port": 21, "scheduler": "rr", "flags": [],
            "destinations": [{
                "addr": server.ip(), "port": server.port(), "forward": "masq", "weight": 1,
                "upper": 0, "lower": 0,
            }],
        }],
        "mtu": {"cl": 1500, "sv": 1500},
        "sysctl": sysctl,
    });
    let mut dialogue = Dialogue {
        client,
        vip: SocketAddr::new(vip, 21),
        server,
        next: [entropy.u32(), entropy.u32()],
        growth: 0,
        sack: entropy.one_in(2),
        announced: Vec::new(),
        past: Vec::new(),
        id: 0x65,
        port: 40_000,
        steps: Vec::new(),
        entropy,
    };
    dialogue.open();
    while dialogue.steps.len() < STEPS {
        dialogue.go_on();
    }
    json!({
        "name": format!("ftp-{seed}-{number}"), "seed": seed, "config": config,
        "steps": dialogue.steps,
    })
}
