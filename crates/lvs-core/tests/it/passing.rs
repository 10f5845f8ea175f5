//! Compares the userspace fast path with the slow path: two directors receive the same packets, and
//! only one of them uses the fast path. After each packet, both must have the same verdict, and
//! after every 16 steps and at the end the same states, deadlines and counters.

use crate::common::forwarded;
use std::net::{SocketAddr, SocketAddrV4};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lvs_core::fast_path::Plain;
use lvs_core::full_nat::LocalAddress;
use lvs_core::settings::{Extras, OnServerDown};
use lvs_core::{
    Control, Director, Family, Forwarding, Hook, Instant, Options, PacketMeta, Protocol,
    ServerConfig, ServiceConfig, ServiceFlags, ServiceKey, TcpFlags, Transport, Tuple, Verdict,
    sync,
};
use proptest::prelude::*;

/// Properties of a service: protocol, port, forwarding method, scheduler, flags, and whether the
/// connections of its removed servers are reset.
type Kind = (Protocol, u16, Forwarding, &'static str, u32, bool);

const KINDS: [Kind; 11] = {
    use Forwarding::{FullNat, Nat, Route};
    const PERSISTENT: u32 = ServiceFlags::PERSISTENT;
    let (tcp, udp) = (Protocol::TCP, Protocol::UDP);
    [
        (tcp, 80, Nat, "rr", 0, false),
        (tcp, 81, Route, "wlc", 0, false),
        (tcp, 82, Forwarding::Tunnel, "rr", 0, false),
        (tcp, 83, FullNat, "rr", 0, false),
        (tcp, 84, Nat, "ewma", 0, false),
        (tcp, 85, Nat, "rr", 0, true),
        (tcp, 21, Nat, "rr", 0, false),
        (tcp, 443, Nat, "rr", PERSISTENT, false),
        (udp, 53, Nat, "rr", 0, false),
        (udp, 54, Nat, "rr", ServiceFlags::ONE_PACKET, false),
        (udp, 55, Nat, "rr", PERSISTENT, false),
    ]
};

const SERVERS: u8 = 3;

/// One step of a generated case.
#[derive(Clone, Debug)]
enum Act {
    /// A packet from a client to a service, or the server's answer to it.
    Packet {
        kind: usize,
        client: u8,
        reply: bool,
        flags: u8,
        hook: u8,
        len: u32,
    },
    Wait(u32),
    Weight(usize, u8, i32),
    /// A server is removed, or added again.
    Toggle(usize, u8),
    Sysctl(usize),
    Master(bool),
    Backup(bool),
    /// Closes connections of removed servers, as their services require.
    EndDown,
}

const SYSCTLS: [(&str, &str); 12] = [
    ("expire_nodest_conn", "1"),
    ("expire_nodest_conn", "0"),
    ("nat_icmp_send", "1"),
    ("nat_icmp_send", "0"),
    ("conn_reuse_mode", "0"),
    ("conn_reuse_mode", "3"),
    ("backup_only", "1"),
    ("backup_only", "0"),
    ("secure_tcp", "3"),
    ("secure_tcp", "0"),
    ("sync_persist_mode", "1"),
    ("expire_quiescent_template", "1"),
];

fn flags() -> impl Strategy<Value = u8> {
    const ACK: u8 = TcpFlags::ACK;
    const PUSH: u8 = 8;
    prop_oneof![
        12 => Just(ACK),
        4 => Just(ACK | PUSH),
        4 => Just(TcpFlags::SYN),
        3 => Just(TcpFlags::SYN | ACK),
        1 => Just(TcpFlags::FIN | ACK),
        1 => Just(TcpFlags::RST),
        1 => any::<u8>(),
    ]
}

fn act() -> impl Strategy<Value = Act> {
    let packet = (
        0..KINDS.len(),
        0..6_u8,
        any::<bool>(),
        flags(),
        0..12_u8,
        28..1500_u32,
    );
    let packet = packet.prop_map(|(kind, client, reply, flags, hook, len)| Act::Packet {
        kind,
        client,
        reply,
        flags,
        hook,
        len,
    });
    prop_oneof![
        200 => packet,
        10 => (0..100_000_u32).prop_map(Act::Wait),
        2 => (0..KINDS.len(), 0..SERVERS, 0..3).prop_map(|(kind, server, weight)| Act::Weight(kind, server, weight)),
        2 => (0..KINDS.len(), 0..SERVERS).prop_map(|(kind, server)| Act::Toggle(kind, server)),
        1 => (0..SYSCTLS.len()).prop_map(Act::Sysctl),
        1 => any::<bool>().prop_map(Act::Master),
        1 => any::<bool>().prop_map(Act::Backup),
        2 => Just(Act::EndDown),
    ]
}

fn virt(kind: usize) -> SocketAddr {
    SocketAddr::from(([198, 51, 100, 1], KINDS[kind].1))
}

fn client(number: u8) -> SocketAddr {
    // Each address has two ports. The first client's port is 0, which no real client uses.
    SocketAddr::from(([192, 0, 2, number / 2], u16::from(number) * 1000))
}

fn server(kind: usize, number: u8) -> SocketAddr {
    let (_, port, method, ..) = KINDS[kind];
    let shift = if method == Forwarding::Nat { 8000 } else { 0 };
    SocketAddr::from(([10, 0, 0, number + 1], port + shift))
}

fn service(kind: usize) -> ServiceKey {
    match KINDS[kind].0 {
        Protocol::TCP => ServiceKey::tcp(virt(kind)),
        _ => ServiceKey::udp(virt(kind)),
    }
}

fn config(kind: usize, weight: i32) -> ServerConfig {
    ServerConfig::new(weight, KINDS[kind].2)
}

fn fill(control: &mut Control) {
    let local = LocalAddress {
        addr: [10, 0, 0, 254].into(),
        first: 1024,
        last: 1100,
    };
    control.set_ftp_ports(vec![21]).expect("the port is valid");
    control
        .set_local_pool(vec![local], false)
        .expect("the pool is valid");
    for (kind, &(_, _, _, scheduler, flags, missed)) in KINDS.iter().enumerate() {
        let mut config = ServiceConfig::new(Family::V4, scheduler);
        config.flags = ServiceFlags(flags);
        if flags & ServiceFlags::PERSISTENT != 0 {
            config.timeout = 60;
        }
        if missed {
            config.extras = Extras {
                on_server_down: OnServerDown::Reset,
                ..Extras::default()
            };
        }
        control
            .add_service(service(kind), config, None)
            .expect("the service is new");
        for number in 0..SERVERS {
            control
                .add_server(
                    &service(kind),
                    server(kind, number),
                    &self::config(kind, 1),
                    Instant::ZERO,
                )
                .expect("the server is new");
        }
    }
}

struct Twin {
    director: Director,
    short: bool,
    now: Instant,
    present: [[bool; SERVERS as usize]; KINDS.len()],
}

static PASSED: AtomicU64 = AtomicU64::new(0);

impl Twin {
    fn new(short: bool, max_connections: usize) -> Self {
        let mut director = Director::new(Options {
            max_connections,
            ..Options::default()
        });
        fill(&mut director.control);
        Self {
            director,
            short,
            now: Instant::ZERO,
            present: [[true; SERVERS as usize]; KINDS.len()],
        }
    }

    fn decide(&mut self, meta: &PacketMeta<'_>) -> Verdict {
        let Tuple { protocol, src, dst } = meta.tuple;
        if self.short
            && let (SocketAddr::V4(from), SocketAddr::V4(to)) = (src, dst)
            && let Some(packet) = Plain::of(meta)
        {
            let mut ahead = self.director.shard.ahead_v4(protocol, from, to, |_| {});
            self.director.shard.aim(&mut ahead, |_| {});
            if let Some(passed) = self.director.pass(&packet, &ahead, self.now) {
                PASSED.fetch_add(1, Ordering::Relaxed);
                return passed.verdict();
            }
            return self.director.handle_packet_ahead(meta, &ahead, self.now);
        }
        self.director.handle_packet(meta, self.now)
    }

    /// Performs an action, and returns its result and the state after it.
    fn act(&mut self, act: &Act) -> String {
        let control = &mut self.director.control;
        let done = match *act {
            Act::Packet {
                kind,
                client: number,
                reply,
                flags,
                hook,
                len,
            } => {
                let from_server = reply.then(|| self.answers(kind, number)).flatten();
                let protocol = KINDS[kind].0;
                let (src, dst) = from_server.unwrap_or_else(|| (client(number), virt(kind)));
                let hook = match (hook, reply) {
                    (0, _) => Hook::Output,
                    (1, false) | (2.., true) => Hook::Transit,
                    _ => Hook::Local,
                };
                let payload = [7; 8];
                let meta = PacketMeta::new(
                    hook,
                    Tuple::new(protocol, src, dst),
                    match protocol {
                        Protocol::TCP => Transport::Tcp(TcpFlags(flags)),
                        _ => Transport::Udp(&payload),
                    },
                    len,
                );
                format!("{:?}", self.decide(&meta))
            }
            Act::Wait(ms) => {
                self.now = self.now + Duration::from_millis(ms.into());
                self.director.advance(self.now);
                String::new()
            }
            Act::Weight(kind, number, weight) => {
                let config = config(kind, weight);
                let done = control.edit_server(&service(kind), server(kind, number), &config);
                format!("{:?}", done.is_ok())
            }
            Act::Toggle(kind, number) => {
                let present = &mut self.present[kind][usize::from(number)];
                let (key, addr) = (service(kind), server(kind, number));
                if *present {
                    control
                        .delete_server(&key, addr, self.now)
                        .expect("the server exists");
                } else {
                    let config = config(kind, 1);
                    control
                        .add_server(&key, addr, &config, self.now)
                        .expect("the server is new");
                }
                *present = !*present;
                String::new()
            }
            Act::Sysctl(number) => {
                let (name, value) = SYSCTLS[number];
                format!("{:?}", control.set_sysctl(name, value))
            }
            Act::Master(true) => format!(
                "{:?}",
                control.start_master(sync::Master::new(7, None, false))
            ),
            Act::Master(false) => format!("{:?}", control.stop_master()),
            Act::Backup(true) => format!(
                "{:?}",
                control.start_backup(sync::Backup::new(7, None, 1500, false))
            ),
            Act::Backup(false) => format!("{:?}", control.stop_backup()),
            Act::EndDown => format!("{:?}", self.director.end_down(self.now, 1000)),
        };
        let messages: Vec<_> =
            std::iter::from_fn(|| self.director.take_sync_message(self.now)).collect();
        format!("{done} {messages:?}")
    }

    /// Source and destination of a server's answer to a client, according to the connection in the
    /// table; `None` if there is no connection.
    fn answers(&self, kind: usize, number: u8) -> Option<(SocketAddr, SocketAddr)> {
        let (client, virt) = (client(number), virt(kind));
        let mut all = self.director.shard.connections_from(0, self.now);
        let known =
            all.find(|known| !known.template && known.client == client && known.virt == virt)?;
        match known.method {
            Forwarding::Nat => Some((known.server, client)),
            _ => Some((virt, client)),
        }
    }

    fn state(&self) -> String {
        let control = &self.director.control;
        let mut text = format!(
            "{:?}\n{:?}\n",
            self.director.shard,
            control.total_stats().live
        );
        for service in control.services() {
            text.push_str(&format!("{} {:?}\n", service.key(), service.stats().live));
            for server in service.servers() {
                let stats = control.server_stats(server.id()).unwrap_or_default();
                let counts = (server.total(), server.active(), server.templates());
                text.push_str(&format!("{} {counts:?} {:?}\n", server.addr(), stats.live));
            }
        }
        text
    }
}

proptest! {
    #[test]
    fn userspace_fast_path_equals_slow_path(acts in proptest::collection::vec(act(), 1..400), few: bool) {
        let room = if few { 8 } else { 1000 };
        let (mut long, mut short) = (Twin::new(false, room), Twin::new(true, room));
        for (number, act) in acts.iter().enumerate() {
            let (expected, found) = (long.act(act), short.act(act));
            prop_assert_eq!(expected, found, "act {}: {:?}", number, act);
            if number % 16 == 0 {
                prop_assert_eq!(long.state(), short.state(), "after act {}: {:?}", number, act);
            }
        }
        prop_assert_eq!(long.state(), short.state());
    }
}

/// The comparison is meaningful only if packets take the fast path.
#[test]
fn established_connection_uses_fast_path() {
    let client: SocketAddrV4 = "192.0.2.1:1000".parse().expect("the address is valid");
    for kind in [0, 1, 2, 8] {
        let mut twin = Twin::new(true, 1000);
        let (protocol, ..) = KINDS[kind];
        let meta = |src, dst, flags, hook| {
            PacketMeta::new(
                hook,
                Tuple::new(protocol, src, dst),
                match protocol {
                    Protocol::TCP => Transport::Tcp(TcpFlags(flags)),
                    _ => Transport::Udp(&[]),
                },
                100,
            )
        };
        let request = |flags| meta(client.into(), virt(kind), flags, Hook::Local);
        let forward = forwarded(twin.decide(&request(TcpFlags::SYN)));
        let answer = |flags| meta(forward.target, client.into(), flags, Hook::Transit);
        let answered = forward.method == Forwarding::Nat;
        if answered {
            let first = twin.decide(&answer(TcpFlags::SYN | TcpFlags::ACK));
            assert!(matches!(first, Verdict::Reply(_)), "{kind}: {first:?}");
        }
        let _ = twin.decide(&request(TcpFlags::ACK));
        let _ = twin.decide(&answer(TcpFlags::ACK));
        let before = PASSED.load(Ordering::Relaxed);
        let _ = twin.decide(&request(TcpFlags::ACK));
        if answered {
            let _ = twin.decide(&answer(TcpFlags::ACK));
        }
        let passed = PASSED.load(Ordering::Relaxed) - before;
        assert!(
            passed > u64::from(answered),
            "{kind}: only {passed} packets used the userspace fast path"
        );
    }
}
