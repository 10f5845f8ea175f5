//! FTP control connections with a real director: the text that the helper writes, and then correct
//! sequence numbers and checksums.

use std::net::{IpAddr, SocketAddr};

use crate::lab::director::{DirectorLab, addr, only};
use crate::lab::{CLIENTS, SERVERS};
use etherparse::{PacketBuilder, TcpHeader, TcpOptionElement};
use lvs_core::{Family, Forwarding, ServerConfig, ServiceConfig, ServiceKey};
use lvs_packet::frame::{Frame, Offload, PartialChecksum, SegmentKind, Segments};
use lvs_packet::segment::finish_checksum;
use lvs_packet::wire::checksum::Sum;
use lvs_packet::wire::tcp::checksum_ok;
use lvs_packet::wire::{be16, be32, ip_dst, ip_src, is_ipv6, put16};
use proptest::prelude::*;

const CLIENT: &str = "192.0.2.7:40000";
const VIP: &str = "10.0.0.80:21";
const SERVER: &str = "10.1.0.11:21";
const CLIENT6: &str = "[2001:db8::7]:40000";
const VIP6: &str = "[fd00::80]:21";
const SERVER6: &str = "[fd00:1::11]:21";

const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const PSH: u8 = 0x08;
const ACK: u8 = 0x10;

/// Work that the sender's network device leaves to the receiver: a partial checksum, or a
/// super-packet.
#[derive(Clone, Copy, Debug)]
enum Card {
    Finished,
    Unfinished,
    Aggregate,
}

/// A TCP segment in flight.
#[derive(Clone, Debug)]
struct Segment {
    src: SocketAddr,
    dst: SocketAddr,
    sequence: u32,
    acknowledgement: u32,
    flags: u8,
    options: Vec<TcpOptionElement>,
    payload: Vec<u8>,
}

impl Segment {
    fn emit(&self, card: Card) -> (Vec<u8>, Offload) {
        let mut header = TcpHeader::new(self.src.port(), self.dst.port(), self.sequence, 1000);
        header.acknowledgment_number = self.acknowledgement;
        header.ack = self.flags & ACK != 0;
        header.syn = self.flags & SYN != 0;
        header.rst = self.flags & RST != 0;
        header.psh = self.flags & PSH != 0;
        header.fin = self.flags & 1 != 0;
        header.set_options(&self.options).expect("the options fit");
        let builder = match (self.src.ip(), self.dst.ip()) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                PacketBuilder::ipv4(src.octets(), dst.octets(), 64)
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                PacketBuilder::ipv6(src.octets(), dst.octets(), 64)
            }
            _ => panic!("the addresses have different IP versions"),
        };
        let mut ip = Vec::new();
        builder
            .tcp_header(header)
            .write(&mut ip, &self.payload)
            .expect("writing to a vector succeeds");
        let l4 = if is_ipv6(&ip) { 40 } else { 20 };
        let mut offload = Offload::default();
        if !matches!(card, Card::Finished) {
            let (src, dst) = (ip_src(&ip), ip_dst(&ip));
            let sum = Sum::ZERO.pseudo(src, dst, 6, ip.len() - l4).fold();
            put16(&mut ip, l4 + 16, sum);
            offload.checksum = Some(PartialChecksum {
                start: u16::try_from(l4).expect("the number is small"),
                offset: 16,
            });
        }
        if matches!(card, Card::Aggregate) {
            offload.segments = Some(Segments {
                kind: if l4 == 40 {
                    SegmentKind::Tcp6
                } else {
                    SegmentKind::Tcp4
                },
                size: 20,
                header_len: 0,
                ecn: false,
            });
        }
        (ip, offload)
    }

    /// Parses a sent packet, and checks its checksums.
    fn read(mut frame: Frame) -> Self {
        finish_checksum(&mut frame).expect("the checksum field is inside the packet");
        let ip = frame.bytes();
        let l4 = if is_ipv6(ip) { 40 } else { 20 };
        let len = if l4 == 40 {
            40 + be16(ip, 4)
        } else {
            assert_eq!(
                Sum::ZERO.bytes(&ip[..20]).finish(),
                0,
                "the checksum of the IP header is wrong"
            );
            be16(ip, 2)
        };
        assert_eq!(usize::from(len), ip.len());
        assert!(checksum_ok(ip, l4, 6), "{ip:02x?}");
        let (header, payload) =
            TcpHeader::from_slice(&ip[l4..]).expect("the bytes are a TCP header");
        Self {
            src: SocketAddr::new(ip_src(ip), be16(ip, l4)),
            dst: SocketAddr::new(ip_dst(ip), be16(ip, l4 + 2)),
            sequence: be32(ip, l4 + 4),
            acknowledgement: be32(ip, l4 + 8),
            flags: ip[l4 + 13],
            options: header.options_iterator().flatten().collect(),
            payload: payload.to_vec(),
        }
    }
}

/// An FTP client and a server with a control connection through the director, and their sequence
/// numbers.
struct Talk {
    lab: DirectorLab,
    card: Card,
    client: SocketAddr,
    virt: SocketAddr,
    server: SocketAddr,
    /// Sequence number of the client's next segment.
    client_next: u32,
    /// Sequence number of the server's next segment, as the client receives it.
    client_expects: u32,
    /// Sequence number of the server's next segment, as the server sends it.
    server_next: u32,
    server_expects: u32,
}

impl Talk {
    fn new(addrs: [&str; 3], first: [u32; 2], card: Card) -> Self {
        let [client, virt, server]: [SocketAddr; 3] =
            addrs.map(|addr| addr.parse().expect("the address is valid"));
        let lab = DirectorLab::new(|control| {
            control.set_ftp_ports(vec![21]).expect("the port is valid");
            let config = ServiceConfig::new(Family::of(&virt.ip()), "rr");
            let key = ServiceKey::tcp(virt);
            control
                .add_service(key, config, None)
                .expect("the service is new");
            let config = ServerConfig::new(1, Forwarding::Nat);
            let now = lvs_core::Instant::from_secs(10);
            control
                .add_server(&key, server, &config, now)
                .expect("the server is new");
        });
        let mut talk = Self {
            lab,
            card,
            client,
            virt,
            server,
            client_next: first[0],
            client_expects: first[1],
            server_next: first[1],
            server_expects: first[0],
        };
        talk.client_says(SYN, b"");
        talk.server_says(SYN | ACK, b"");
        talk.client_says(ACK, b"");
        talk
    }

    fn four(card: Card) -> Self {
        Self::new([CLIENT, VIP, SERVER], [1000, u32::MAX - 60], card)
    }

    fn request(&self, flags: u8, payload: &[u8]) -> Segment {
        Segment {
            src: self.client,
            dst: self.virt,
            sequence: self.client_next,
            acknowledgement: if flags & ACK == 0 {
                0
            } else {
                self.client_expects
            },
            flags,
            options: Vec::new(),
            payload: payload.to_vec(),
        }
    }

    fn answer(&self, flags: u8, payload: &[u8]) -> Segment {
        Segment {
            src: self.server,
            dst: self.client,
            sequence: self.server_next,
            acknowledgement: self.server_expects,
            flags,
            options: Vec::new(),
            payload: payload.to_vec(),
        }
    }

    fn send_request(&mut self, segment: &Segment) -> Option<Segment> {
        let (ip, offload) = segment.emit(self.card);
        let sent = self.lab.request(&ip, offload);
        (!sent.is_empty()).then(|| Segment::read(only(sent, SERVERS)))
    }

    fn send_answer(&mut self, segment: &Segment) -> Option<Segment> {
        let (ip, offload) = segment.emit(self.card);
        let sent = self.lab.answer(&ip, offload);
        (!sent.is_empty()).then(|| Segment::read(only(sent, CLIENTS)))
    }

    /// Sends a segment of the client, and checks that the server gets the same bytes with valid
    /// sequence numbers.
    fn client_says(&mut self, flags: u8, payload: &[u8]) {
        let segment = self.request(flags, payload);
        let got = self
            .send_request(&segment)
            .expect("the request is forwarded");
        assert_eq!((got.src, got.dst), (self.client, self.server));
        assert_eq!(got.payload, payload);
        assert_eq!(got.sequence, self.server_expects);
        if flags & ACK != 0 {
            assert_eq!(got.acknowledgement, self.server_next);
        }
        let len = payload.len() + usize::from(flags & SYN != 0);
        self.client_next = self
            .client_next
            .wrapping_add(u32::try_from(len).expect("the number is small"));
        self.server_expects = self.client_next;
    }

    /// Sends a segment of the server, and returns the bytes that the client gets; their sequence
    /// numbers must be valid.
    fn server_says(&mut self, flags: u8, payload: &[u8]) -> String {
        let segment = self.answer(flags, payload);
        let got = self.send_answer(&segment).expect("the answer is forwarded");
        assert_eq!((got.src, got.dst), (self.virt, self.client));
        assert_eq!(got.sequence, self.client_expects);
        assert_eq!(got.acknowledgement, self.client_next);
        let syn = usize::from(flags & SYN != 0);
        let advance = |number: &mut u32, len: usize| {
            *number = number.wrapping_add(u32::try_from(len + syn).expect("the number is small"));
        };
        advance(&mut self.server_next, payload.len());
        advance(&mut self.client_expects, got.payload.len());
        String::from_utf8_lossy(&got.payload).into_owned()
    }

    /// All data connections, expected or open: client, virtual address, server and state of each,
    /// as text.
    fn data(&self) -> Vec<String> {
        let all = self.lab.connections();
        let data = all.iter().filter(|c| c.virt != self.virt);
        data.map(|c| format!("{} {} {} {}", c.client, c.virt, c.server, c.state))
            .collect()
    }
}

const CARDS: [Card; 3] = [Card::Finished, Card::Unfinished, Card::Aggregate];

#[test]
fn ftp_passive_replies_are_rewritten_only_after_passive_command() {
    for card in CARDS {
        let mut talk = Talk::four(card);
        talk.client_says(PSH | ACK, b"PASV\r\n");
        let reported = talk.server_says(
            PSH | ACK,
            b"227 Entering Passive Mode (10,1,0,11,156,65).\r\n",
        );
        assert_eq!(
            reported,
            "227 Entering Passive Mode (10,0,0,80,156,65).\r\n"
        );
        assert_eq!(
            talk.data(),
            ["192.0.2.7:0 10.0.0.80:40001 10.1.0.11:40001 LISTEN"]
        );
        // The rewritten reply is longer than the server's in one case, and shorter in the other.
        for (server_reply, client_reply) in [
            ("(1,1,1,1,1,1)", "(10,0,0,80,1,1)"),
            ("(010,001,000,011,007,208)", "(10,0,0,80,7,208)"),
            ("=9,9,9,9,0,9\n", "=10,0,0,80,0,9\n"),
        ] {
            talk.client_says(PSH | ACK, b"NOOP\r\npasv\r\n");
            let reported =
                talk.server_says(PSH | ACK, format!("227 {server_reply}\r\n").as_bytes());
            assert_eq!(reported, format!("227 {client_reply}\r\n"));
            talk.client_says(ACK, b"");
            talk.server_says(PSH | ACK, b"150 Here it comes.\r\n");
            talk.server_says(PSH | ACK, b"226 Done.\r\n");
            talk.client_says(ACK, b"");
        }
        talk.client_says(PSH | ACK, b"EPSV\r\n");
        let reported =
            talk.server_says(PSH | ACK, b"229 Extended Passive (!1!10.1.0.12!40002!)\r\n");
        assert_eq!(reported, "229 Extended Passive (|||40002|)\r\n");
        assert_eq!(talk.data().len(), 5);
        assert!(
            talk.data()
                .contains(&"192.0.2.7:0 10.0.0.80:40002 10.1.0.12:40002 LISTEN".into())
        );
        // A reply without a preceding command is not rewritten.
        let stray = talk.server_says(PSH | ACK, b"227 (10,1,0,11,156,65)\r\n");
        assert_eq!(stray, "227 (10,1,0,11,156,65)\r\n");

        let mut talk = Talk::new([CLIENT6, VIP6, SERVER6], [7, 7], card);
        talk.client_says(PSH | ACK, b"EPSV 2\r\n");
        let reported = talk.server_says(
            PSH | ACK,
            b"229 Extended Passive (|2|fd00:1::11|40001|)\r\n",
        );
        assert_eq!(reported, "229 Extended Passive (|||40001|)\r\n");
        assert_eq!(
            talk.data(),
            ["[2001:db8::7]:0 [fd00::80]:40001 [fd00:1::11]:40001 LISTEN"]
        );
        talk.client_says(ACK, b"");
        talk.server_says(PSH | ACK, b"150 Here it comes.\r\n");
    }
}

/// The kernel forwards a repeated reply unchanged: it contains the server's address, and its length
/// does not match the shifted sequence numbers.
#[test]
fn repeated_ftp_reply_is_rewritten_again() {
    for card in CARDS {
        let mut talk = Talk::four(card);
        talk.client_says(PSH | ACK, b"PASV\r\n");
        let reply = b"227 Entering Passive Mode (10,1,0,11,156,65).\r\n";
        let before = talk.answer(PSH | ACK, b"");
        let mut lost = talk.answer(PSH | ACK, reply);
        talk.server_says(PSH | ACK, reply);
        // The server repeats the reply: alone, then together with the next line, and then together
        // with the previous line.
        let later = b"226 Later.\r\n";
        lost.payload = reply.to_vec();
        let reported = b"227 Entering Passive Mode (10,0,0,80,156,65).\r\n";
        let got = talk.send_answer(&lost).expect("the answer is forwarded");
        assert_eq!(
            (got.sequence, got.payload),
            (lost.sequence, reported.to_vec())
        );
        lost.payload = [&reply[..], later].concat();
        let got = talk.send_answer(&lost).expect("the answer is forwarded");
        assert_eq!(got.payload, [&reported[..], later].concat());
        let earlier = b"200 Earlier.\r\n";
        lost.payload = [&earlier[..], reply].concat();
        lost.sequence = before.sequence.wrapping_sub(14);
        let got = talk.send_answer(&lost).expect("the answer is forwarded");
        assert_eq!(got.payload, [&earlier[..], reported].concat());
        assert_eq!(got.sequence, lost.sequence);
        // Only one data connection is expected, and the sequence numbers of the stream continue.
        assert_eq!(talk.data().len(), 1);
        talk.client_says(ACK, b"");
        talk.server_says(PSH | ACK, b"150 Here it comes.\r\n");
    }
}

/// The kernel sends a neighbour request for a foreign address on the real server's link, although
/// no host there uses it.
#[test]
fn ftp_data_connection_to_foreign_address_uses_route_to_this_address() {
    let mut talk = Talk::four(Card::Finished);
    talk.client_says(PSH | ACK, b"PASV\r\n");
    talk.server_says(PSH | ACK, b"227 (203,0,113,5,156,65)\r\n");
    let mut syn = Vec::new();
    let IpAddr::V4(client) = talk.client.ip() else {
        panic!("{}", talk.client)
    };
    let (SocketAddr::V4(virt), elsewhere) = (talk.virt, addr("203.0.113.5")) else {
        panic!("{}", talk.virt)
    };
    PacketBuilder::ipv4(client.octets(), virt.ip().octets(), 64)
        .tcp(5000, 40_001, 1, 500)
        .syn()
        .write(&mut syn, b"")
        .expect("writing to a vector succeeds");
    // The route to this address leads through the clients' gateway.
    let sent = only(talk.lab.request(&syn, Offload::default()), CLIENTS);
    assert_eq!(ip_dst(sent.bytes()), elsewhere);
}

#[test]
fn ftp_selective_acknowledgements_are_translated() {
    let mut talk = Talk::new([CLIENT, "192.0.2.200:21", SERVER], [1, 1], Card::Finished);
    talk.client_says(PSH | ACK, b"PASV\r\n");
    talk.server_says(
        PSH | ACK,
        b"227 Entering Passive Mode (10,1,0,11,156,65).\r\n",
    );
    let grown = talk.client_expects.wrapping_sub(talk.server_next);
    assert_eq!(grown, 2);
    let expects = talk.client_expects;
    let mut request = talk.request(ACK, b"");
    // One case has the selective acknowledgement at an odd offset.
    for options in [
        vec![
            TcpOptionElement::Noop,
            TcpOptionElement::Noop,
            TcpOptionElement::SelectiveAcknowledgement((expects + 10, expects + 20), [None; 3]),
        ],
        vec![
            TcpOptionElement::Noop,
            TcpOptionElement::SelectiveAcknowledgement(
                (expects + 10, expects + 20),
                [Some((expects + 30, expects + 40)), None, None],
            ),
        ],
    ] {
        request.options = options.clone();
        let got = talk
            .send_request(&request)
            .expect("the request is forwarded");
        let shifted = options.into_iter().map(|option| match option {
            TcpOptionElement::SelectiveAcknowledgement((a, b), more) => {
                let more = more.map(|block| block.map(|(a, b)| (a - grown, b - grown)));
                TcpOptionElement::SelectiveAcknowledgement((a - grown, b - grown), more)
            }
            other => other,
        });
        let shifted: Vec<_> = shifted.collect();
        assert_eq!(got.options[..shifted.len()], shifted);
        assert_eq!(got.acknowledgement, talk.server_next);
    }
}

#[test]
fn ftp_active_data_connections_have_virtual_address() {
    for (command, addrs) in [
        (&b"PORT 192,0,2,7,156,66\r\n"[..], [CLIENT, VIP, SERVER]),
        (b"EPRT |1|192.0.2.7|40002|\r\n", [CLIENT, VIP, SERVER]),
        (b"EPRT |2|2001:db8::7|40002|\r\n", [CLIENT6, VIP6, SERVER6]),
    ] {
        let mut talk = Talk::new(addrs, [7, 8], Card::Finished);
        talk.client_says(PSH | ACK, command);
        talk.server_says(PSH | ACK, b"200 Fine.\r\n");
        let at = |addr: SocketAddr, port| SocketAddr::new(addr.ip(), port);
        let (server, client) = (at(talk.server, 20), at(talk.client, 40002));
        let mut opens = talk.answer(SYN, b"");
        (opens.src, opens.dst) = (server, client);
        let got = talk
            .send_answer(&opens)
            .expect("the SYN of the data connection is forwarded");
        assert_eq!((got.src, got.dst), (at(talk.virt, 20), client));
        let mut accepts = talk.request(SYN | ACK, b"");
        (accepts.src, accepts.dst) = (client, at(talk.virt, 20));
        let got = talk
            .send_request(&accepts)
            .expect("the answer to the SYN is forwarded");
        assert_eq!((got.src, got.dst), (client, server));
        assert_eq!(talk.lab.connections().len(), 2);
    }
}

#[test]
fn damaged_and_impossible_ftp_segments_are_dropped() {
    let mut talk = Talk::four(Card::Finished);
    for client in [true, false] {
        let segment = if client {
            talk.request(PSH | ACK, b"PORT 192,0,2,7,156,66\r\n")
        } else {
            talk.answer(PSH | ACK, b"200 Fine.\r\n")
        };
        let (mut ip, _) = segment.emit(Card::Finished);
        ip[41] ^= 1;
        let sent = if client {
            talk.lab.request(&ip, Offload::default())
        } else {
            talk.lab.answer(&ip, Offload::default())
        };
        assert!(sent.is_empty());
        // If a device has verified the checksum, the pipeline does not check it.
        let verified = Offload {
            verified: true,
            ..Offload::default()
        };
        let sent = if client {
            talk.lab.request(&ip, verified)
        } else {
            talk.lab.answer(&ip, verified)
        };
        assert_eq!(sent.len(), 1);
    }
    // The client acknowledges bytes that were not sent.
    let mut request = talk.request(ACK, b"");
    request.acknowledgement = talk.client_expects.wrapping_add(100);
    assert!(talk.send_request(&request).is_none());
    request.flags |= RST;
    assert!(talk.send_request(&request).is_some());
    // A segment of the client is dropped in the same way before the server has answered the SYN.
    let first = Segment {
        src: "192.0.2.7:40009".parse().expect("the address is valid"),
        acknowledgement: 0,
        ..talk.request(SYN, b"")
    };
    assert!(talk.send_request(&first).is_some());
    let early = Segment {
        sequence: first.sequence + 1,
        flags: ACK,
        ..first.clone()
    };
    assert!(talk.send_request(&early).is_none());
    assert!(talk.send_request(&first).is_some());
}

/// Valid and invalid lines that a client or a server sends.
fn text() -> impl Strategy<Value = Vec<u8>> {
    let word = prop_oneof![
        Just("PASV\r\n".to_owned()),
        Just("EPSV\r\n".to_owned()),
        Just("epsv 1\r\n".to_owned()),
        Just("227 Entering Passive Mode (10,1,0,11,156,65).\r\n".to_owned()),
        Just("227 (1,1,1,1,1,1)".to_owned()),
        Just("229 Extended (|||40001|)\r\n".to_owned()),
        Just("PORT 192,0,2,7,156,66\r\n".to_owned()),
        Just("EPRT |1|192.0.2.7|40002|\r\n".to_owned()),
        Just("PORT ".to_owned()),
        "[0-9,()|. ]{0,30}",
        "[A-Z0-9 ]{0,6}",
        "\\PC{0,10}",
    ];
    proptest::collection::vec(word, 0..4).prop_map(|words| words.concat().into_bytes())
}

proptest! {
    /// Arbitrary lines, divided into segments arbitrarily: the dataplane does not panic, and sent
    /// segments have correct checksums. The client's stream arrives unchanged, and the server's
    /// without gaps.
    #[test]
    fn ftp_with_any_sequence_of_segments_stays_consistent(lines in proptest::collection::vec((any::<bool>(), text()), 1..20), first: [u32; 2], card in 0usize..3) {
        let mut talk = Talk::new([CLIENT, "198.51.100.200:21", SERVER], first, CARDS[card]);
        for (client, line) in lines {
            if client {
                talk.client_says(PSH | ACK, &line);
            } else {
                talk.server_says(PSH | ACK, &line);
            }
        }
        talk.client_says(ACK, b"");
    }

    /// Segments with arbitrary numbers and flags, after the helper has shifted the sequence
    /// numbers.
    #[test]
    fn ftp_segment_of_any_content_does_not_panic(segments in proptest::collection::vec((any::<bool>(), any::<u8>(), any::<[u32; 2]>(), text()), 1..20), card in 0usize..3) {
        let mut talk = Talk::four(CARDS[card]);
        talk.client_says(PSH | ACK, b"PASV\r\n");
        talk.server_says(PSH | ACK, b"227 (1,1,1,1,1,1)\r\n");
        for (client, flags, [sequence, acknowledgement], payload) in segments {
            let mut segment = if client { talk.request(flags, &payload) } else { talk.answer(flags, &payload) };
            segment.sequence = segment.sequence.wrapping_add(sequence % 100).wrapping_sub(50);
            segment.acknowledgement = segment.acknowledgement.wrapping_add(acknowledgement % 100).wrapping_sub(50);
            let (ip, offload) = segment.emit(talk.card);
            let sent = if client { talk.lab.request(&ip, offload) } else { talk.lab.answer(&ip, offload) };
            for (port, frame) in sent {
                // A reset may have ended the connection; the following packet is then reinjected
                // into the host.
                if port != crate::lab::HOST {
                    Segment::read(frame);
                }
            }
        }
    }

    /// TCP options that are truncated, unusual, or of a wrong length.
    #[test]
    fn ftp_segment_with_any_options_does_not_panic(options in proptest::collection::vec(prop_oneof![Just(5u8), Just(1), Just(10), Just(0), any::<u8>()], 0..40)) {
        let mut talk = Talk::four(Card::Finished);
        talk.client_says(PSH | ACK, b"PASV\r\n");
        talk.server_says(PSH | ACK, b"227 (1,1,1,1,1,1)\r\n");
        let mut header = TcpHeader::new(talk.client.port(), 21, talk.client_next, 1000);
        header.ack = true;
        header.acknowledgment_number = talk.client_expects;
        header.set_options_raw(&options).expect("the options have at most 40 bytes");
        let mut ip = Vec::new();
        PacketBuilder::ipv4([192, 0, 2, 7], [10, 0, 0, 80], 64).tcp_header(header).write(&mut ip, b"NOOP\r\n").expect("writing to a vector succeeds");
        let sent = talk.lab.request(&ip, Offload::default());
        Segment::read(only(sent, SERVERS));
    }
}
