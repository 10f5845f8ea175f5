//! Compares two packet paths, of which one uses a fast path (in userspace or in the kernel): sent
//! frames and listings must be the same.

use std::net::SocketAddr;

use lvs_core::{Forwarding, Protocol, TcpFlags};
use lvs_dataplane::fast_path::FastPathError;
use lvs_packet::frame::Frame;
use lvs_packet::net::PortId;

use super::generator::{MACS, PEER};
use super::{Act, Bed, Entropy, Generator, Method, Scene, Shot, Side, WATCH};
use crate::kernel_path::{Forwarded, without_id};
use crate::{oracle, packet};

/// Number of acts between two listings.
const ROUND: u64 = 250;
/// Number of simultaneous connections.
const TALKS: usize = 12;

/// Passes at least `frames` frames through two packet paths, one of which has the kernel fast path.
/// Returns the number of packets that the BPF programs forwarded.
///
/// # Errors
/// The kernel refuses the BPF programs.
///
/// # Panics
/// The results differ, or as [`storm`](super::storm).
pub fn twins(method: &Method, seed: u64, frames: u64) -> Result<Forwarded, FastPathError> {
    let mut forwarded = Forwarded::default();
    let pair = |scene: &Scene, settings| {
        Ok(Pair::new(
            method,
            Bed::new(scene, &mut Entropy::seeded(settings)),
            Bed::fast_path(scene, &mut Entropy::seeded(settings))?,
        ))
    };
    both(method, seed, frames, pair, |other| {
        forwarded += other.forwarded();
    })?;
    Ok(forwarded)
}

/// Passes at least `frames` frames through two packet paths, one of which has the userspace fast
/// path. Returns the number of packets on the fast path.
///
/// # Panics
/// The results differ, or as [`storm`](super::storm).
pub fn two_ways(method: &Method, seed: u64, frames: u64) -> u64 {
    let mut passed = 0;
    let pair = |scene: &Scene, settings| {
        Ok::<_, std::convert::Infallible>(Pair::new(
            method,
            Bed::long(scene, &mut Entropy::seeded(settings)),
            Bed::new(scene, &mut Entropy::seeded(settings)),
        ))
    };
    let Ok(()) = both(method, seed, frames, pair, |other| passed += other.passed());
    passed
}

/// Sends the same frames through both packet paths, valid packets of connections and hostile
/// frames, and compares the sent frames.
fn both<'a, E>(
    method: &'a Method,
    seed: u64,
    frames: u64,
    pair: impl Fn(&Scene, u64) -> Result<Pair<'a>, E>,
    mut look: impl FnMut(&Bed),
) -> Result<(), E> {
    let mut settings = seed.wrapping_mul(1000);
    let scene = Scene::new(method);
    let mut generator = Generator::new(scene.clone(), Entropy::seeded(seed));
    let mut talks = Talks {
        scene: scene.clone(),
        entropy: Entropy::seeded(!seed),
        talks: Vec::new(),
        turns: 0,
    };
    let mut done = 0;
    while done < frames {
        settings += 1;
        let mut pair = pair(&scene, settings)?;
        talks.talks.clear();
        while pair.plain.received() < WATCH {
            // Changes between the frames are rare, so that there are connections to forward.
            let act = generator.next_act();
            let change = !matches!(act, Act::Send(_) | Act::Train { .. } | Act::Loop);
            if !change || talks.entropy.one_in(4) {
                pair.act(act);
            }
            talks.turns += 1;
            if talks.turns.is_multiple_of(16) {
                pair.act(Act::Neighbours(true));
            }
            for _ in 0..9 {
                talks.go_on(&mut pair);
            }
        }
        pair.compare();
        done += pair.plain.received();
        look(&pair.other);
        pair.plain.finish();
        pair.other.finish();
    }
    Ok(())
}

struct Pair<'a> {
    method: &'a Method,
    plain: Bed,
    other: Bed,
    acts: u64,
}

impl<'a> Pair<'a> {
    const fn new(method: &'a Method, plain: Bed, other: Bed) -> Self {
        Self {
            method,
            plain,
            other,
            acts: 0,
        }
    }

    /// Applies a step to both packet paths, and checks that they send the same frames. The bytes
    /// are compared only if the step used a fast path. Returns the frames of the path without a
    /// fast path.
    fn act(&mut self, act: Act) -> Vec<(PortId, Frame)> {
        let before = (self.other.forwarded(), self.other.passed());
        let expected = self.plain.act_and_record(act.clone());
        let found = self.other.act_and_record(act.clone());
        // If the dataplane builds a packet itself, its IP identification differs.
        let exact = self.other.forwarded() != before.0 || self.other.passed() != before.1;
        let bytes = |frame: &Frame| match self.method.forwarding {
            Forwarding::Tunnel => without_id(frame.bytes()),
            _ => frame.bytes().to_vec(),
        };
        let same = expected.len() == found.len()
            && expected
                .iter()
                .zip(&found)
                .all(|((port, one), (out, two))| {
                    port == out
                        && one.len() == two.len()
                        && one.offload == two.offload
                        && (!exact || bytes(one) == bytes(two))
                });
        let hex = |frames: &[(PortId, Frame)]| {
            let frames = frames.iter().map(|(port, frame)| {
                let bytes: String = frame.bytes().iter().map(|b| format!("{b:02x}")).collect();
                format!("{port:?} {bytes}")
            });
            frames.collect::<Vec<_>>().join("; ")
        };
        assert!(
            same,
            "{}: {act:02x?}\nis sent as {}\nby the other path as {}",
            self.method.name,
            hex(&expected),
            hex(&found)
        );
        let counters = [&self.plain, &self.other].map(|bed| format!("{:?}", bed.counters()));
        if self.other.forwarded() == Forwarded::default() {
            assert_eq!(
                counters[0], counters[1],
                "{}: the counters of the two packet paths differ after {act:02x?}",
                self.method.name
            );
        }
        self.acts += 1;
        if self.acts.is_multiple_of(ROUND) {
            self.compare();
        }
        expected
    }

    fn compare(&mut self) {
        let (expected, found) = (self.plain.listing(), self.other.listing());
        for (expected, found) in expected.iter().zip(&found) {
            assert_eq!(
                expected, found,
                "{}: the listings of the two packet paths differ",
                self.method.name
            );
        }
        assert_eq!(expected.len(), found.len());
    }
}

/// A connection of a client, with the addresses of the forwarded packets.
#[derive(Clone, Copy)]
struct Talk {
    protocol: Protocol,
    client: SocketAddr,
    virt: SocketAddr,
    /// The real server, with NAT.
    server: Option<SocketAddr>,
    /// Source address of forwarded packets, to which the server replies.
    peer: SocketAddr,
}

struct Talks {
    scene: Scene,
    entropy: Entropy<'static>,
    talks: Vec<Talk>,
    turns: u64,
}

impl Talks {
    /// Sends the next segment, or opens a new connection.
    fn go_on(&mut self, pair: &mut Pair<'_>) {
        if self.talks.len() < TALKS || self.entropy.one_in(100) {
            return self.begin(pair);
        }
        let at = self.entropy.below(self.talks.len());
        let talk = self.talks[at];
        let reply = talk.server.filter(|_| self.entropy.one_in(2));
        let mut flags = TcpFlags::ACK | if self.entropy.one_in(2) { 8 } else { 0 };
        if self.entropy.one_in(40) {
            flags = self.entropy.u8();
        }
        let shot = match reply {
            Some(server) => self.say(Side::Servers, talk.protocol, server, talk.peer, flags),
            None => self.say(Side::Clients, talk.protocol, talk.client, talk.virt, flags),
        };
        pair.act(Act::Send(vec![shot]));
        if self.entropy.one_in(300) {
            self.talks.swap_remove(at);
        }
    }

    fn begin(&mut self, pair: &mut Pair<'_>) {
        let offer = self.entropy.pick(&self.scene.offers);
        if !matches!(offer.protocol, Protocol::TCP | Protocol::UDP) {
            return;
        }
        let at = self.entropy.below(self.scene.clients.len());
        let client = SocketAddr::new(self.scene.clients[at], 50_000 + self.entropy.u16() % 64);
        let virt = SocketAddr::new(self.entropy.pick(&self.scene.vips), offer.port);
        let syn = self.plain(Side::Clients, offer.protocol, client, virt, TcpFlags::SYN);
        let sent = pair.act(Act::Send(vec![syn]));
        let Some((_, frame)) = sent.first() else {
            return;
        };
        let Some(parts) = frame.bytes().get(14..).and_then(oracle::parts) else {
            return;
        };
        let port = frame
            .bytes()
            .get(14 + parts.l4..)
            .and_then(<[u8]>::first_chunk);
        let Some(&port) = port else {
            return;
        };
        let peer = SocketAddr::new(parts.src, u16::from_be_bytes(port));
        let server = (self.scene.method.forwarding.translates())
            .then(|| SocketAddr::new(parts.dst, self.scene.server_port(&offer)));
        if let Some(server) = server {
            let flags = TcpFlags::SYN | TcpFlags::ACK;
            let answer = self.plain(Side::Servers, offer.protocol, server, peer, flags);
            pair.act(Act::Send(vec![answer]));
        }
        let ack = self.plain(Side::Clients, offer.protocol, client, virt, TcpFlags::ACK);
        pair.act(Act::Send(vec![ack]));
        self.talks.push(Talk {
            protocol: offer.protocol,
            client,
            virt,
            server,
            peer,
        });
        if self.talks.len() > TALKS {
            self.talks.swap_remove(0);
        }
    }

    fn packet(
        &mut self,
        protocol: Protocol,
        src: SocketAddr,
        dst: SocketAddr,
        flags: u8,
        len: usize,
    ) -> Vec<u8> {
        let payload = self.entropy.payload(len);
        if protocol == Protocol::UDP {
            return packet::udp(src, dst, &payload);
        }
        let sequence = self.entropy.u32();
        packet::tcp(src, dst, flags, sequence, &payload)
    }

    fn plain(
        &mut self,
        from: Side,
        protocol: Protocol,
        src: SocketAddr,
        dst: SocketAddr,
        flags: u8,
    ) -> Shot {
        let ip = self.packet(protocol, src, dst, flags, 4);
        shot(from, &ip)
    }

    /// A packet of a known connection, valid or nearly valid.
    fn say(
        &mut self,
        from: Side,
        protocol: Protocol,
        src: SocketAddr,
        dst: SocketAddr,
        flags: u8,
    ) -> Shot {
        let len = match self.entropy.below(8) {
            0..=2 => 0,
            3..=5 => self.entropy.below(200),
            6 => self.entropy.below(1500),
            _ => 1200 + self.entropy.below(400),
        };
        let mut ip = self.packet(protocol, src, dst, flags, len);
        let six = src.is_ipv6();
        if self.entropy.one_in(4) {
            // Changes the type of service, the identification, "don't fragment", or the number of
            // hops.
            ip[1] = if six { ip[1] } else { self.entropy.u8() };
            let hops = self.entropy.pick(&[0, 1, 2, 3, 64, 255]);
            if six {
                ip[7] = hops;
                ip[2] = self.entropy.u8();
            } else {
                ip[4..6].copy_from_slice(&self.entropy.u16().to_be_bytes());
                ip[6] ^= self.entropy.pick(&[0, 0, 0x40, 0x40, 0x20, 0x80]);
                ip[8] = hops;
                packet::repair(&mut ip);
            }
        }
        let l4 = if six { 40 } else { 20 };
        if protocol == Protocol::UDP && self.entropy.one_in(16) {
            // The packet has no checksum.
            ip[l4 + 6..l4 + 8].fill(0);
        }
        if self.entropy.one_in(16) {
            // The packet has a wrong checksum, or one of the two zeros.
            let field = l4 + if protocol == Protocol::UDP { 6 } else { 16 };
            let sum = self.entropy.pick(&[0, 0xffff, 0x1234]);
            ip[field..field + 2].copy_from_slice(&u16::to_be_bytes(sum));
        }
        if self.entropy.one_in(20) {
            let at = self.entropy.below(ip.len());
            ip[at] ^= 1 << self.entropy.below(8);
        }
        let mut shot = shot(from, &ip);
        if self.entropy.one_in(4) {
            // The frame has padding, or ends too early.
            let bytes = shot.frame.bytes().to_vec();
            let len = match self.entropy.below(3) {
                0 => bytes.len().max(60),
                1 => bytes.len() + self.entropy.below(32),
                _ => bytes.len() - self.entropy.below(8),
            };
            let mut bytes = bytes;
            bytes.resize(len, 0xa5);
            shot.frame = Frame::from_bytes(&bytes);
        }
        shot
    }
}

fn shot(from: Side, ip: &[u8]) -> Shot {
    let mac = MACS[usize::from(from == Side::Servers)];
    Shot {
        from,
        frame: Frame::from_bytes(&packet::ethernet_ip(mac, PEER, ip)),
    }
}
