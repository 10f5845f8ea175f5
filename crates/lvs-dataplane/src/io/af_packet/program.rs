//! Builds the classic BPF program that divides the frames of an interface among packet workers. The
//! program computes [`Steering::home`](lvs_packet::steer::Steering::home) as far as the first
//! headers of a frame permit.
//!
//! ```text
//!  EtherType ─▶ ports, SYN? ─▶ destination: among the ranges? ─┬─ virtual: hash of the source ──────┐
//!                                                              ├─ other:   hash of the destination ─┼─▶ worker (+ workers, if it
//!                                                              └─ local:   destination port ────────┘   begins a TCP connection)
//! ```
//!
//! Addresses alone select the worker of fragments, ICMP, packets with IPv6 extension headers and
//! other packets without ports. The first worker receives frames with nested VLAN tags and frames
//! that are not IP. The kernel has removed a single VLAN tag before the program runs.

use lvs_packet::steer::{Kind, Plan, Range};
use lvs_sys::classic::{
    ADD, ADD_X, AND, IF_ANY_BIT, IF_EQUAL, IF_GREATER, IF_NOT_LESS, JUMP, LOAD, LOAD_8,
    LOAD_8_AT_X, LOAD_16, LOAD_16_AT_X, LOAD_K, LOAD_MEMORY, LOAD_X_K, LOAD_X_MEMORY, MODULO,
    MULTIPLY, Op, PROTOCOL, RETURN, RETURN_A, SHIFT_LEFT, SHIFT_RIGHT, STORE, STORE_X, TO_X, XOR_X,
    ancillary, network, op,
};

/// Addresses in the program's scratch memory.
const FROM: u32 = 0;
const TO: u32 = 1;
const QUEUE: u32 = 2;
const SUM: u32 = 3;
const PORT: u32 = 4;

/// Maximum number of instructions of a program (`BPF_MAXINSNS`).
#[cfg(test)]
const MAX: usize = 4096;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Label {
    Four,
    Six,
    /// The search for the destination among the ranges; `true` for IPv6.
    Look(bool),
    Virtual(bool),
    Other(bool),
    Local,
    Hash,
}

#[derive(Default)]
struct Assembler {
    ops: Vec<Op>,
    /// Jumps to labels, whose distances `finish` computes.
    jumps: Vec<(usize, Label)>,
    places: Vec<(Label, usize)>,
}

impl Assembler {
    fn add(&mut self, code: u16, k: u32) {
        self.ops.push(op(code, 0, 0, k));
    }

    fn test(&mut self, code: u16, k: u32, jt: u8, jf: u8) {
        self.ops.push(op(code, jt, jf, k));
    }

    fn jump(&mut self, to: Label) {
        self.jumps.push((self.ops.len(), to));
        self.add(JUMP, 0);
    }

    fn here(&mut self, label: Label) {
        self.places.push((label, self.ops.len()));
    }

    fn finish(mut self) -> Vec<Op> {
        for (at, label) in self.jumps {
            let place = self.places.iter().find(|(known, _)| *known == label);
            let (_, place) = place.expect("each label has a position");
            self.ops[at].k = u32::try_from(place - at - 1).expect("a program is short");
        }
        self.ops
    }

    /// Stores the ports, which are at the offset `at` of the packet, and with `firsts`, whether the
    /// packet is a SYN.
    fn ports(&mut self, protocol_at: u32, load: (u16, u16), at: u32, plan: &Plan, firsts: bool) {
        self.add(load.0, at);
        self.add(STORE, FROM);
        self.add(load.0, at.wrapping_add(2));
        self.add(STORE, TO);
        if firsts {
            self.add(LOAD_8, network(protocol_at));
            self.test(IF_EQUAL, 6, 0, 5);
            self.add(load.1, at.wrapping_add(13));
            // SYN is set, RST and ACK are not.
            self.add(AND, 0x16);
            self.test(IF_EQUAL, 2, 0, 2);
            self.add(LOAD_K, plan.workers);
            self.add(STORE, QUEUE);
        }
    }

    /// Jumps to `look` if the loaded protocol has no ports.
    fn with_ports(&mut self, look: Label) {
        self.test(IF_EQUAL, 6, 3, 0);
        self.test(IF_EQUAL, 17, 2, 0);
        self.test(IF_EQUAL, 132, 1, 0);
        self.jump(look);
    }

    /// Loads a folded IPv6 address.
    fn fold(&mut self, at: u32, words: usize, plan: &Plan) {
        for (i, &factor) in (0..).zip(&plan.keys.words[..words]) {
            self.add(LOAD, network(at + 4 * i));
            self.add(MULTIPLY, factor);
            if i > 0 {
                self.add(LOAD_X_MEMORY, SUM);
                self.add(ADD_X, 0);
            }
            self.add(STORE, SUM);
        }
    }

    /// Searches the ranges for the loaded address.
    fn look(&mut self, ranges: &[Range], six: bool) {
        match ranges {
            [] => self.jump(Label::Other(six)),
            [range] => {
                self.test(IF_NOT_LESS, range.first, 0, 2);
                self.test(IF_GREATER, range.last, 1, 0);
                self.jump(match range.kind {
                    Kind::Virtual => Label::Virtual(six),
                    Kind::Local => Label::Local,
                });
                self.jump(Label::Other(six));
            }
            _ => {
                let (low, high) = ranges.split_at(ranges.len() / 2);
                self.test(IF_NOT_LESS, high[0].first, 0, 1);
                let jump = self.ops.len();
                self.add(JUMP, 0);
                self.look(low, six);
                let len = self.ops.len() - jump - 1;
                self.ops[jump].k = u32::try_from(len).expect("a program is short");
                self.look(high, six);
            }
        }
    }

    /// Loads the port of the client's side, or 0 if only addresses count, and jumps to the hash.
    fn port(&mut self, place: u32, plan: &Plan) {
        if plan.by_address {
            self.add(LOAD_X_K, 0);
        } else {
            self.add(LOAD_X_MEMORY, place);
        }
        self.jump(Label::Hash);
    }

    /// Mixes the upper bits of the accumulator into the lower ones.
    fn mix(&mut self, bits: u32) {
        self.add(TO_X, 0);
        self.add(SHIFT_RIGHT, bits);
        self.add(XOR_X, 0);
    }

    /// Adds the instructions that return the number of the worker, or of its socket for SYNs.
    fn give(&mut self, plan: &Plan) {
        self.add(MODULO, plan.workers);
        self.add(LOAD_X_MEMORY, QUEUE);
        self.add(ADD_X, 0);
        self.add(RETURN_A, 0);
    }
}

/// Builds the program. With `firsts`, each worker also has a socket for SYNs; the numbers of these
/// sockets follow those of the main sockets.
pub(super) fn program(plan: &Plan, firsts: bool) -> Vec<Op> {
    let mut asm = Assembler::default();
    asm.add(LOAD_K, 0);
    for place in [FROM, TO, QUEUE] {
        asm.add(STORE, place);
    }
    asm.add(LOAD_16, ancillary(PROTOCOL));
    asm.test(IF_EQUAL, 0x0800, 0, 1);
    asm.jump(Label::Four);
    asm.test(IF_EQUAL, 0x86dd, 0, 1);
    asm.jump(Label::Six);
    asm.add(RETURN, 0);

    asm.here(Label::Four);
    asm.add(LOAD_8, network(9));
    asm.with_ports(Label::Look(false));
    asm.add(LOAD_16, network(6));
    asm.test(IF_ANY_BIT, 0x3fff, 0, 1);
    asm.jump(Label::Look(false));
    asm.add(LOAD_8, network(0));
    asm.add(AND, 0x0f);
    asm.add(SHIFT_LEFT, 2);
    asm.add(TO_X, 0);
    asm.ports(9, (LOAD_16_AT_X, LOAD_8_AT_X), network(0), plan, firsts);
    asm.here(Label::Look(false));
    asm.add(LOAD, network(16));
    asm.look(&plan.four, false);
    asm.here(Label::Virtual(false));
    asm.add(LOAD, network(12));
    asm.port(FROM, plan);
    asm.here(Label::Other(false));
    asm.add(LOAD, network(16));
    asm.port(TO, plan);

    asm.here(Label::Six);
    asm.add(LOAD_8, network(6));
    asm.with_ports(Label::Look(true));
    asm.ports(6, (LOAD_16, LOAD_8), network(40), plan, firsts);
    asm.here(Label::Look(true));
    if !plan.six.is_empty() {
        asm.fold(24, plan.words, plan);
    }
    asm.look(&plan.six, true);
    asm.here(Label::Virtual(true));
    asm.fold(8, 4, plan);
    asm.port(FROM, plan);
    asm.here(Label::Other(true));
    asm.fold(24, 4, plan);
    asm.port(TO, plan);

    asm.here(Label::Local);
    asm.add(LOAD_MEMORY, TO);
    asm.give(plan);

    asm.here(Label::Hash);
    let [first, second, third] = plan.keys.factors;
    asm.add(STORE_X, PORT);
    asm.add(ADD, plan.keys.seed);
    asm.add(MULTIPLY, first);
    asm.mix(16);
    asm.add(LOAD_X_MEMORY, PORT);
    asm.add(ADD_X, 0);
    asm.add(MULTIPLY, second);
    asm.mix(15);
    asm.add(MULTIPLY, third);
    asm.mix(16);
    asm.give(plan);
    asm.finish()
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
    use std::num::NonZeroUsize;

    use lvs_core::Protocol;
    use lvs_core::full_nat::worker_of;
    use proptest::prelude::*;

    use super::*;
    use lvs_packet::intercept::Intercept;
    use lvs_packet::parse;
    use lvs_packet::steer::{RANGES_MAX, Steering};
    use lvs_packet::testing::Table;

    const WORKERS: usize = 3;

    /// Runs the program as the kernel does, on the packet after a frame's Ethernet header.
    fn run(program: &[Op], ethertype: u16, ip: &[u8]) -> u32 {
        let (mut a, mut x, mut memory) = (0_u32, 0_u32, [0_u32; 16]);
        let load = |at: u32, len: usize| -> Option<u32> {
            let at = usize::try_from(at.wrapping_sub(network(0))).ok()?;
            let bytes = ip.get(at..at + len)?;
            Some(
                bytes
                    .iter()
                    .fold(0, |all, &byte| all << 8 | u32::from(byte)),
            )
        };
        let mut at = 0;
        loop {
            let Op { code, jt, jf, k } = program[at];
            at += 1;
            let mut branch = |is: bool| at += usize::from(if is { jt } else { jf });
            let loaded = match code {
                LOAD_16 if k == ancillary(PROTOCOL) => Some(u32::from(ethertype)),
                LOAD => load(k, 4),
                LOAD_16 => load(k, 2),
                LOAD_8 => load(k, 1),
                LOAD_16_AT_X => load(k.wrapping_add(x), 2),
                LOAD_8_AT_X => load(k.wrapping_add(x), 1),
                _ => {
                    match code {
                        LOAD_K => a = k,
                        LOAD_MEMORY => a = memory[k as usize],
                        LOAD_X_K => x = k,
                        LOAD_X_MEMORY => x = memory[k as usize],
                        STORE => memory[k as usize] = a,
                        STORE_X => memory[k as usize] = x,
                        ADD => a = a.wrapping_add(k),
                        ADD_X => a = a.wrapping_add(x),
                        MULTIPLY => a = a.wrapping_mul(k),
                        MODULO => a %= k,
                        AND => a &= k,
                        SHIFT_LEFT => a <<= k,
                        SHIFT_RIGHT => a >>= k,
                        XOR_X => a ^= x,
                        TO_X => x = a,
                        IF_EQUAL => branch(a == k),
                        IF_GREATER => branch(a > k),
                        IF_NOT_LESS => branch(a >= k),
                        IF_ANY_BIT => branch(a & k != 0),
                        JUMP => at += k as usize,
                        RETURN => return k,
                        RETURN_A => return a,
                        _ => panic!("unknown instruction {code:#x}"),
                    }
                    continue;
                }
            };
            // Loading beyond the end of the packet ends the program.
            let Some(loaded) = loaded else { return 0 };
            a = loaded;
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum Shape {
        Tcp { syn: bool },
        Udp,
        Fragment { first: bool },
        Other,
    }

    fn packet(src: (IpAddr, u16), dst: (IpAddr, u16), shape: Shape) -> (u16, Vec<u8>) {
        let (protocol, mut l4) = match shape {
            Shape::Tcp { .. } => (Protocol::TCP, vec![0; 20]),
            Shape::Udp | Shape::Fragment { .. } => (Protocol::UDP, vec![0; 8]),
            Shape::Other => (Protocol(47), vec![0; 8]),
        };
        if !matches!(shape, Shape::Other) {
            l4[..2].copy_from_slice(&src.1.to_be_bytes());
            l4[2..4].copy_from_slice(&dst.1.to_be_bytes());
        }
        if let Shape::Tcp { syn } = shape {
            // SYN and FIN count as a SYN. SYN and ACK are an answer, and a segment with RST is not
            // a SYN.
            let flags = match syn {
                true => [0x02, 0x03, 0xc2, 0x42],
                false => [0x10, 0x12, 0x06, 0x11],
            };
            (l4[12], l4[13]) = (0x50, flags[usize::from(src.1 % 4)]);
        }
        let len = u16::try_from(l4.len()).expect("the packet is short");
        match (src.0, dst.0) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let mut ip = vec![0x46, 0];
                ip.extend((24 + len).to_be_bytes());
                let part = match shape {
                    Shape::Fragment { first: true } => 0x2000_u16,
                    Shape::Fragment { first: false } => 0x0004,
                    _ => 0x4000,
                };
                ip.extend([0, 7]);
                ip.extend(part.to_be_bytes());
                ip.extend([64, protocol.0, 0, 0]);
                ip.extend(src.octets());
                ip.extend(dst.octets());
                // An IP option: no operation.
                ip.extend([1; 4]);
                let sum = lvs_packet::wire::checksum::Sum::ZERO.bytes(&ip).finish();
                ip[10..12].copy_from_slice(&sum.to_be_bytes());
                ip.extend(l4);
                (0x0800, ip)
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                let fragment = match shape {
                    Shape::Fragment { first } => Some(if first { 1_u16 } else { 32 }),
                    _ => None,
                };
                let extra = if fragment.is_some() { 8 } else { 0 };
                let mut ip = vec![0x60, 0, 0, 0];
                ip.extend((len + extra).to_be_bytes());
                ip.extend([fragment.map_or(protocol.0, |_| 44), 64]);
                ip.extend(src.octets());
                ip.extend(dst.octets());
                if let Some(part) = fragment {
                    ip.extend([protocol.0, 0]);
                    ip.extend(part.to_be_bytes());
                    ip.extend([0, 0, 0, 7]);
                }
                ip.extend(l4);
                (0x86dd, ip)
            }
            _ => panic!("the addresses belong to two families"),
        }
    }

    fn steering(by_address: bool) -> Steering {
        let workers = NonZeroUsize::new(WORKERS).expect("the number of workers is not zero");
        let local = [
            IpAddr::from(Ipv4Addr::new(10, 0, 0, 9)),
            IpAddr::from(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 9)),
        ];
        Steering::new(workers, 0x5eed, by_address).with_local(local.into_iter().collect())
    }

    fn addresses() -> (Table, Vec<IpAddr>) {
        let mut vips: Vec<IpAddr> = Vec::new();
        for last in [1, 2, 3, 7, 8, 200] {
            vips.push(Ipv4Addr::new(198, 51, 100, last).into());
            vips.push(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, u16::from(last)).into());
        }
        let mut table = Table::default();
        table.vips.extend(&vips);
        (table, vips)
    }

    fn agrees(
        steering: &Steering,
        (table, vips): &(Table, Vec<IpAddr>),
        (ethertype, ip): &(u16, Vec<u8>),
    ) -> usize {
        let program = program(&steering.plan(vips.iter().copied()), true);
        assert!(program.len() <= MAX);
        let member = run(&program, *ethertype, ip) as usize;
        let packet = parse::ip(ip, false).expect("the bytes are a valid packet");
        let home = steering.home(&packet, ip, table, &Intercept::default());
        assert_eq!(member % WORKERS, home, "{packet:?}");
        member
    }

    fn v4() -> impl Strategy<Value = Ipv4Addr> {
        prop_oneof![
            any::<u32>().prop_map(|bits| Ipv4Addr::from_bits(bits & 0x7fff_ffff | 1 << 24)),
            (0..10_u8).prop_map(|last| Ipv4Addr::new(198, 51, 100, last)),
            Just(Ipv4Addr::new(10, 0, 0, 9)),
        ]
    }

    fn v6() -> impl Strategy<Value = Ipv6Addr> {
        prop_oneof![
            any::<u64>().prop_map(|low| Ipv6Addr::from_bits((0x2a00 << 112) | u128::from(low))),
            (0..10_u16).prop_map(|last| Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last)),
            Just(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 9)),
        ]
    }

    fn ends() -> impl Strategy<Value = (IpAddr, IpAddr)> {
        prop_oneof![
            (v4(), v4()).prop_map(|(a, b)| (a.into(), b.into())),
            (v6(), v6()).prop_map(|(a, b)| (a.into(), b.into())),
        ]
    }

    fn shape() -> impl Strategy<Value = Shape> {
        prop_oneof![
            any::<bool>().prop_map(|syn| Shape::Tcp { syn }),
            Just(Shape::Udp),
            any::<bool>().prop_map(|first| Shape::Fragment { first }),
            Just(Shape::Other),
        ]
    }

    proptest! {
        #[test]
        fn fanout_program_and_steering_choose_the_same_worker(
            (src, dst) in ends(),
            ports: (u16, u16),
            shape in shape(),
            by_address: bool,
        ) {
            let all = addresses();
            let steering = steering(by_address);
            let packet = packet((src, ports.0), (dst, ports.1), shape);
            let member = agrees(&steering, &all, &packet);
            let syn = matches!(shape, Shape::Tcp { syn: true });
            prop_assert_eq!(member >= WORKERS, syn, "the socket for SYNs received another packet, or not this SYN");
        }
    }

    #[test]
    fn fanout_program_selects_one_worker_for_both_directions() {
        let all = addresses();
        let steering = steering(false);
        let pairs: [(IpAddr, IpAddr, IpAddr); 2] = [
            ([192, 0, 2, 7].into(), all.1[0], [10, 0, 0, 2].into()),
            (
                Ipv6Addr::new(0x2a00, 0, 0, 0, 0, 0, 0, 7).into(),
                all.1[1],
                Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2).into(),
            ),
        ];
        let mut seen = [0; WORKERS];
        for (client, virt, server) in pairs {
            for port in 1024..2048 {
                let request = packet((client, port), (virt, 80), Shape::Tcp { syn: true });
                let reply = packet((server, 8080), (client, port), Shape::Tcp { syn: false });
                let direct = packet((virt, 80), (client, port), Shape::Tcp { syn: false });
                let home = agrees(&steering, &all, &request) - WORKERS;
                assert_eq!(agrees(&steering, &all, &reply), home);
                assert_eq!(agrees(&steering, &all, &direct), home);
                seen[home] += 1;
            }
            let local = if client.is_ipv4() {
                IpAddr::from([10, 0, 0, 9])
            } else {
                Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 9).into()
            };
            let reply = packet((server, 8080), (local, 2001), Shape::Tcp { syn: false });
            assert_eq!(agrees(&steering, &all, &reply), worker_of(2001, WORKERS));
        }
        assert!(seen.iter().all(|&count| count > 500), "{seen:?}");
    }

    #[test]
    fn steering_assigns_icmp_error_to_worker_of_its_connection() {
        let (table, _) = addresses();
        let (client, virt) = (
            IpAddr::from([192, 0, 2, 7]),
            IpAddr::from([198, 51, 100, 1]),
        );
        let server = IpAddr::from([10, 0, 0, 2]);
        let steering = steering(false);
        let none = Intercept::default();
        for port in 5000..5050 {
            let home = steering.of_client(client, port);
            // Errors that a router sends to a server about a request, and to the client about a
            // reply.
            let cases = [
                ((client, port), (server, 8080), client),
                ((client, port), (virt, 80), client),
                ((virt, 80), (client, port), virt),
            ];
            for (from, to, reported) in cases {
                let (_, about) = packet(from, to, Shape::Tcp { syn: false });
                let builder = etherparse::PacketBuilder::ipv4([10, 9, 9, 9], v4_of(reported), 64);
                let kind = etherparse::Icmpv4Type::DestinationUnreachable(
                    etherparse::icmpv4::DestUnreachableHeader::Host,
                );
                let mut error = Vec::new();
                builder
                    .icmpv4(kind)
                    .write(&mut error, &about)
                    .expect("writing to a vector succeeds");
                let packet = parse::ip(&error, false).expect("the bytes are a valid packet");
                assert_eq!(
                    steering.home(&packet, &error, &table, &none),
                    home,
                    "{from:?}"
                );
            }
        }
    }

    fn v4_of(addr: IpAddr) -> [u8; 4] {
        match addr {
            IpAddr::V4(addr) => addr.octets(),
            IpAddr::V6(_) => panic!("IPv4"),
        }
    }

    #[test]
    fn fanout_addresses_are_merged_to_bounded_number_of_ranges() {
        let steering = steering(false);
        let scattered = (0..20_000_u32).map(|n| IpAddr::V4(Ipv4Addr::from_bits(n * 40_000 + 7)));
        let six = (0..20_000_u128).map(|n| IpAddr::V6(Ipv6Addr::from_bits(n << 64 | 7)));
        let plan = steering.plan(scattered.clone().chain(six));
        assert!(plan.four.len() <= RANGES_MAX && plan.six.len() <= RANGES_MAX);
        assert!(program(&plan, true).len() <= MAX);
        let block = steering.plan((0..10_000).map(|n| IpAddr::V4(Ipv4Addr::from_bits(n + 77))));
        assert_eq!(
            block.four.len(),
            2,
            "the block and the address for full NAT are not two ranges"
        );
        // Up to the maximum, ranges are not merged.
        let apart: Vec<IpAddr> = scattered.take(RANGES_MAX - 1).collect();
        let full = steering.plan(apart.iter().copied());
        assert_eq!(full.four.len(), RANGES_MAX);
        let mut table = Table::default();
        table.vips.extend(&apart);
        let request = packet(
            ([192, 0, 2, 7].into(), 1234),
            (apart[77], 80),
            Shape::Tcp { syn: true },
        );
        agrees(&steering, &(table, apart), &request);
    }
}
