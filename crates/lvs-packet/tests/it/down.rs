//! Packets of both ends of a connection after its server was removed, and the resets that both ends
//! receive if the service requires this. The tests pass frames to a real director, and check the
//! sent frames.

use std::net::SocketAddr;

use crate::lab::{CL_MAC, CLIENTS, GW_MAC, SERVERS, SV_MAC, Table, bytes, ethernet, sent, table};
use etherparse::{PacketBuilder, SlicedPacket, TransportSlice};
use lvs_core::settings::{Extras, OnServerDown};
use lvs_core::{
    Director, Family, Forwarding, Hook, Instant, Options, PacketMeta, Protocol, ServerConfig,
    ServiceConfig, ServiceKey, TcpFlags, Transport, Tuple, Verdict,
};
use lvs_packet::frame::Frame;
use lvs_packet::intercept::Intercept;
use lvs_packet::net::PortId;
use lvs_packet::parse;
use lvs_packet::pipeline::{Env, Output, Pipeline};
use lvs_packet::settings::Settings;
use lvs_packet::wire::{Mac, tcp};

/// A service with one server, and a client that has a connection to it.
struct Bench {
    decide: Director,
    pipeline: Pipeline,
    net: Table,
    intercept: Intercept,
    client: SocketAddr,
    virt: SocketAddr,
    server: SocketAddr,
    method: Forwarding,
}

/// A TCP segment on the wire.
#[derive(Clone, Copy)]
struct Tcp<'a> {
    from: SocketAddr,
    to: SocketAddr,
    flags: &'a str,
    seq: u32,
    ack: u32,
    payload: &'a [u8],
}

impl Tcp<'_> {
    fn write(&self) -> Vec<u8> {
        let builder = match (self.from, self.to) {
            (SocketAddr::V4(from), SocketAddr::V4(to)) => {
                PacketBuilder::ipv4(from.ip().octets(), to.ip().octets(), 64)
            }
            (SocketAddr::V6(from), SocketAddr::V6(to)) => {
                PacketBuilder::ipv6(from.ip().octets(), to.ip().octets(), 64)
            }
            _ => panic!("the addresses have different IP versions"),
        };
        let mut builder = builder.tcp(self.from.port(), self.to.port(), self.seq, 500);
        for flag in self.flags.chars() {
            builder = match flag {
                'S' => builder.syn(),
                'A' => builder.ack(self.ack),
                'F' => builder.fin(),
                'R' => builder.rst(),
                _ => panic!("unknown flag"),
            };
        }
        let mut ip = Vec::new();
        builder
            .write(&mut ip, self.payload)
            .expect("writing to a vector succeeds");
        ip
    }
}

/// A sent reset, or a probe for sequence numbers (`asks`): its port, source, destination and
/// numbers.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    asks: bool,
    port: PortId,
    from: SocketAddr,
    to: SocketAddr,
    seq: u32,
    ack: Option<u32>,
}

impl Bench {
    fn new(method: Forwarding, six: bool, on_server_down: OnServerDown) -> Self {
        let addr = |v4: &str, v6: &str| -> SocketAddr {
            if six { v6 } else { v4 }
                .parse()
                .expect("the address is valid")
        };
        let virt = addr("198.51.100.1:80", "[2001:db8:1::1]:80");
        let port = if method == Forwarding::Nat { 8080 } else { 80 };
        let mut server = addr("10.1.0.11:0", "[fd00:1::11]:0");
        server.set_port(port);
        let key = ServiceKey::tcp(virt);
        let mut director = Director::new(Options::default());
        let config = ServiceConfig {
            extras: Extras {
                on_server_down,
                ..Extras::default()
            },
            ..ServiceConfig::new(Family::of(&virt.ip()), "rr")
        };
        director.control.add_service(key, config, None).unwrap();
        director
            .control
            .add_server(&key, server, &ServerConfig::new(1, method), Instant::ZERO)
            .unwrap();
        let mut net = table();
        net.vips.insert(virt.ip());
        net.local.insert(virt.ip());
        let intercept = Intercept::of(&director.control, &Intercept::default());
        Self {
            decide: director,
            pipeline: Pipeline::alone(Settings::UNLIMITED),
            net,
            intercept,
            client: addr("203.0.113.9:40000", "[2001:db8:2::9]:40000"),
            virt,
            server,
            method,
        }
    }

    fn now() -> Instant {
        Instant::from_secs(1)
    }

    fn receive(&mut self, port: PortId, frame: &[u8]) -> Vec<(PortId, Vec<u8>)> {
        let env = Env::new(&self.net, &self.intercept);
        let mut frames = [Frame::from_bytes(frame)];
        bytes(sent(
            &mut self.pipeline,
            &mut Output::new(),
            |pipeline, out| {
                let now = Self::now();
                pipeline.process(port, &mut frames, &env, &mut self.decide, now, out);
            },
        ))
    }

    fn send(&mut self, segment: Tcp<'_>) -> Vec<(PortId, Vec<u8>)> {
        let ip = segment.write();
        let (port, to, from) = if segment.from == self.client {
            (CLIENTS, CL_MAC, GW_MAC)
        } else {
            (SERVERS, SV_MAC, Mac([2; 6]))
        };
        self.receive(port, &ethernet(to, from, &ip))
    }

    fn by_client(&self, flags: &'static str, seq: u32, ack: u32) -> Tcp<'static> {
        Tcp {
            from: self.client,
            to: self.virt,
            flags,
            seq,
            ack,
            payload: b"",
        }
    }

    fn by_server(&self, flags: &'static str, seq: u32, ack: u32) -> Tcp<'static> {
        Tcp {
            from: self.server,
            to: self.client,
            flags,
            seq,
            ack,
            payload: b"",
        }
    }

    /// Opens a connection, and transfers 300 bytes in each direction. With NAT, another 50 bytes
    /// are in flight to the client.
    fn establish(&mut self) {
        let nat = self.method == Forwarding::Nat;
        let payload = &[b'x'; 300][..];
        assert_eq!(self.send(self.by_client("S", 1000, 0)).len(), 1);
        if nat {
            assert_eq!(self.send(self.by_server("SA", 5000, 1001)).len(), 1);
        }
        self.send(self.by_client("A", 1001, 5001));
        let request = Tcp {
            payload,
            ..self.by_client("A", 1001, 5001)
        };
        self.send(request);
        if nat {
            let answer = Tcp {
                payload,
                ..self.by_server("A", 5001, 1301)
            };
            self.send(answer);
        }
        self.send(self.by_client("A", 1301, 5301));
        if nat {
            let more = Tcp {
                payload: &payload[..50],
                ..self.by_server("A", 5301, 1301)
            };
            self.send(more);
        }
    }

    /// Removes the server, and returns the packets that the pipeline sends because of this.
    fn take_down(&mut self) -> Vec<(PortId, Vec<u8>)> {
        let director = &mut self.decide;
        let key = ServiceKey::tcp(self.virt);
        director
            .control
            .delete_server(&key, self.server, Self::now())
            .unwrap();
        director.advance(Self::now());
        let mut resets = Vec::new();
        while director.shard.has_down() {
            resets.extend(director.end_down(Self::now(), 100));
        }
        let env = Env::new(&self.net, &self.intercept);
        bytes(sent(
            &mut self.pipeline,
            &mut Output::new(),
            |pipeline, out| {
                for reset in &resets {
                    pipeline.send_reset(reset, &env, Self::now(), out);
                }
            },
        ))
    }

    /// Parses a reset, after removing its tunnel headers.
    fn read(&self, (port, frame): &(PortId, Vec<u8>)) -> Seen {
        let mut ip = &frame[14..];
        let outer = parse::ip(ip, false).expect("the bytes are a valid packet");
        if self.method == Forwarding::Tunnel && *port == SERVERS {
            assert_eq!(outer.dst, self.server.ip());
            ip = &ip[outer.l4..];
        }
        let packet = parse::ip(ip, false).expect("the bytes are a valid packet");
        assert!(
            tcp::checksum_ok(ip, packet.l4, 6),
            "the TCP checksum is wrong"
        );
        let sliced = SlicedPacket::from_ip(ip).expect("the bytes are a valid packet");
        let Some(TransportSlice::Tcp(tcp)) = sliced.transport else {
            panic!("the packet is not TCP");
        };
        assert!(tcp.rst() != tcp.syn() && !tcp.fin() && tcp.payload().is_empty());
        Seen {
            asks: tcp.syn(),
            port: *port,
            from: (packet.src, tcp.source_port()).into(),
            to: (packet.dst, tcp.destination_port()).into(),
            seq: tcp.sequence_number(),
            ack: tcp.ack().then(|| tcp.acknowledgment_number()),
        }
    }
}

const METHODS: [Forwarding; 3] = [Forwarding::Nat, Forwarding::Route, Forwarding::Tunnel];

#[test]
fn resets_of_removed_server_have_numbers_expected_by_client_and_server() {
    for (method, six) in METHODS.iter().flat_map(|&m| [(m, false), (m, true)]) {
        let mut bench = Bench::new(method, six, OnServerDown::Reset);
        bench.establish();
        let frames = bench.take_down();
        let seen: Vec<Seen> = frames.iter().map(|frame| bench.read(frame)).collect();
        let nat = method == Forwarding::Nat;
        // With NAT, the director has forwarded 50 bytes that the client has not acknowledged yet.
        let of_server = if nat { 5351 } else { 5301 };
        let expected = [
            Seen {
                asks: false,
                port: CLIENTS,
                from: bench.virt,
                to: bench.client,
                seq: of_server,
                ack: Some(1301),
            },
            Seen {
                asks: false,
                port: SERVERS,
                from: bench.client,
                to: if nat { bench.server } else { bench.virt },
                seq: 1301,
                ack: Some(of_server),
            },
        ];
        assert_eq!(seen, expected, "{method:?}, IPv6: {six}");
        assert_eq!(bench.pipeline.counters.resets_sent, 2, "{method:?}");
    }
}

#[test]
fn client_of_offloaded_connection_of_removed_server_is_probed_and_then_reset() {
    for (method, six) in METHODS.iter().flat_map(|&m| [(m, false), (m, true)]) {
        let mut bench = Bench::new(method, six, OnServerDown::Reset);
        bench.establish();
        let meta = PacketMeta::new(
            Hook::Local,
            Tuple {
                protocol: Protocol::TCP,
                src: bench.client,
                dst: bench.virt,
            },
            Transport::Tcp(TcpFlags(TcpFlags::ACK)),
            40,
        );
        let verdict = bench.decide.handle_packet(&meta, Bench::now());
        let Verdict::Forward(forward) = verdict else {
            panic!("{verdict:?}");
        };
        let conn = forward.conn.expect("the packet has a connection");
        assert!(bench.decide.shard.publish(conn, 1, None));
        let asked = bench.take_down();
        let seen = bench.read(&asked[0]);
        assert_eq!((seen.asks, seen.to), (true, bench.client), "{method:?}");
        let frames = bench.send(bench.by_client("A", 1301, 5777));
        let [frame] = &frames[..] else {
            panic!("{method:?}: {} frames were sent instead of 1", frames.len());
        };
        let seen = bench.read(frame);
        let reset = (seen.asks, seen.to, seen.seq);
        assert_eq!(reset, (false, bench.client, 5777), "{method:?}");
        assert_eq!(bench.decide.shard.take_late_resets().len(), 1);
    }
}

#[test]
fn challenge_acknowledgement_is_answered_with_correct_reset() {
    for (method, six) in METHODS.iter().flat_map(|&m| [(m, false), (m, true)]) {
        let mut bench = Bench::new(method, six, OnServerDown::Reset);
        bench.establish();
        bench.take_down();
        // RFC 5961 section 3.2: the client answers with the sequence number that it expects.
        let frames = bench.send(bench.by_client("A", 1301, 5777));
        let [frame] = &frames[..] else {
            panic!("{method:?}: {} frames were sent instead of 1", frames.len());
        };
        let seen = bench.read(frame);
        assert_eq!((seen.from, seen.to), (bench.virt, bench.client));
        assert_eq!((seen.port, seen.seq, seen.ack), (CLIENTS, 5777, None));
        if method == Forwarding::Nat {
            let frames = bench.send(bench.by_server("A", 5351, 1300));
            let seen = bench.read(&frames[0]);
            assert_eq!((seen.from, seen.to), (bench.client, bench.server));
            assert_eq!((seen.port, seen.seq), (SERVERS, 1300));
        }
        // The client's answer reaches a server that has not received the reset yet.
        let frames = bench.send(bench.by_client("R", 1302, 0));
        let seen = bench.read(&frames[0]);
        assert_eq!((seen.port, seen.seq), (SERVERS, 1302));
    }
}

#[test]
fn segment_with_wrong_checksum_gets_no_reset() {
    let mut bench = Bench::new(Forwarding::Nat, false, OnServerDown::Reset);
    bench.establish();
    bench.take_down();
    let mut ip = bench.by_client("A", 1301, 5301).write();
    let last = ip.len() - 4;
    ip[last] ^= 1;
    let sent = bench.receive(CLIENTS, &ethernet(CL_MAC, GW_MAC, &ip));
    assert!(sent.is_empty());
}

#[test]
fn removed_server_causes_no_reset_with_policy_kernel_or_drop() {
    for on_server_down in [OnServerDown::Kernel, OnServerDown::Drop] {
        let mut bench = Bench::new(Forwarding::Nat, false, on_server_down);
        bench.establish();
        assert!(bench.take_down().is_empty(), "{on_server_down:?}");
        let sent = bench.send(bench.by_client("A", 1301, 5301));
        assert!(sent.is_empty(), "{on_server_down:?}");
        assert_eq!(bench.pipeline.counters.resets_sent, 0);
    }
}
