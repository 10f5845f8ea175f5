//! The shield with a real kernel. Needs root.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::{Host, sh, try_sh};
use lvs_core::Protocol;
use lvs_dataplane::host::shield::{Shield, ShieldError};
use lvs_dataplane::io::{BATCH, PacketIo, af_packet::AfPacket, tun::HostDevice};
use lvs_dataplane::netlink::Netlink;
use lvs_packet::frame::Frame;
use lvs_packet::intercept::{Endpoint, Intercept, LocalClient};

const TCP: Protocol = Protocol::TCP;
const UDP: Protocol = Protocol::UDP;

fn endpoint(address: &str, protocol: Protocol, port: u16) -> Endpoint {
    Endpoint {
        address: address.parse().unwrap(),
        protocol,
        port,
    }
}

/// A client `c` (10.1.0.2), a director (10.1.0.1, 10.2.0.1, forwarding) and a server `s`
/// (10.2.0.2), each also with IPv6.
struct Net {
    client: Host,
    director: Host,
    server: Host,
}

fn net() -> Net {
    let net = Net {
        client: Host::new(),
        director: Host::new(),
        server: Host::new(),
    };
    net.director.veth("dc", &net.client, "c0");
    net.director.veth("ds", &net.server, "s0");
    net.director.sh(
        "ip addr add 10.1.0.1/24 dev dc; ip addr add 10.2.0.1/24 dev ds
         ip addr add fd01::1/64 dev dc nodad; ip addr add fd02::1/64 dev ds nodad
         sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1",
    );
    net.client.sh(
        "ip addr add 10.1.0.2/24 dev c0; ip route add default via 10.1.0.1
         ip addr add fd01::2/64 dev c0 nodad; ip -6 route add default via fd01::1",
    );
    net.server.sh(
        "ip addr add 10.2.0.2/24 dev s0; ip route add default via 10.2.0.1
         ip addr add fd02::2/64 dev s0 nodad; ip -6 route add default via fd02::1",
    );
    net
}

/// Time limit for a packet that must arrive, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// Time to wait for a packet that must not arrive.
const SILENCE: Duration = Duration::from_millis(500);

/// [`PATIENCE`] for a packet that must arrive, otherwise [`SILENCE`].
const fn limit(wanted: bool) -> Duration {
    if wanted { PATIENCE } else { SILENCE }
}

/// Time to wait for the effect of one packet. The kernel drops packets while its queue of received
/// packets, which all network namespaces share, is full.
const fn again(wanted: bool) -> Duration {
    if wanted {
        Duration::from_secs(10)
    } else {
        SILENCE
    }
}

/// Whether a packet has an effect. If it must have one, repeats `send` until it returns true.
fn answered(wanted: bool, mut send: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit(wanted);
    loop {
        if send() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
    }
}

/// Checks the result of connection attempts from a host: `CONNECTED`, `REFUSED` by a RST, or
/// `UNANSWERED`.
fn assert_connect(host: &Host, to: &str, wanted: io::ErrorKind) {
    let address: SocketAddr = to.parse().unwrap();
    let limit = limit(wanted != UNANSWERED);
    let ended = host.run(move || match TcpStream::connect_timeout(&address, limit) {
        Ok(_) => CONNECTED,
        Err(err) => err.kind(),
    });
    assert_eq!(ended, wanted, "{to}");
}
const CONNECTED: io::ErrorKind = io::ErrorKind::Other;
const REFUSED: io::ErrorKind = io::ErrorKind::ConnectionRefused;
const UNANSWERED: io::ErrorKind = io::ErrorKind::TimedOut;

/// Answers UDP datagrams in a host while the test runs.
fn echo(host: &Host, at: &str) {
    let at = at.to_owned();
    let socket = host.run(move || UdpSocket::bind(&at).unwrap());
    std::thread::spawn(move || {
        let mut buf = [0; 65536];
        while let Ok((len, from)) = socket.recv_from(&mut buf) {
            let _ = socket.send_to(&buf[..len], from);
        }
    });
}

/// Fails unless an echo request of this size is answered if `wanted` is true, and not answered
/// otherwise.
fn assert_echo(host: &Host, to: &str, size: usize, wanted: bool) {
    let address: SocketAddr = to.parse().unwrap();
    let echoed = host.run(move || {
        let to = address;
        let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = UdpSocket::bind(any).unwrap();
        // This call may return an earlier ICMP error, or cause one.
        let _ = socket.connect(to);
        answered(wanted, || {
            let _ = socket.send(&vec![1; size]);
            let _ = socket.set_read_timeout(Some(again(wanted)));
            matches!(socket.recv(&mut [0; 65536]), Ok(n) if n == size)
        })
    });
    assert_eq!(echoed, wanted, "{size} bytes to {to}");
}

/// Whether a packet socket receives a frame that `wanted` accepts within `limit`.
fn saw(packets: &mut AfPacket, limit: Duration, wanted: impl Fn(&[u8]) -> bool) -> bool {
    let mut frames: Vec<_> = (0..BATCH).map(|_| Frame::new()).collect();
    let mut poller = lvs_sys::Poller::new();
    let end = Instant::now() + limit;
    while Instant::now() < end {
        let count = packets.recv(&mut frames).unwrap();
        if frames[..count].iter().any(|f| wanted(f.bytes())) {
            return true;
        }
        poller.clear();
        poller.add(packets.fd().unwrap());
        poller.wait(Some(Duration::from_millis(50))).unwrap();
    }
    false
}

#[test]
fn services_are_hidden_from_host_and_received_by_packet_socket() {
    let net = net();
    let (mut shield, mut packets) = net.director.run(|| {
        let shield = Shield::open(None).unwrap();
        let packets = AfPacket::open(lvs_sys::if_index("dc").unwrap(), "dc").unwrap();
        (shield, packets)
    });
    // Nothing is hidden yet: the host answers with a RST.
    assert_connect(&net.client, "10.1.0.1:80", REFUSED);
    let spec = Intercept {
        services: [
            endpoint("10.1.0.1", TCP, 80),
            endpoint("fd01::1", TCP, 80),
            endpoint("10.9.9.9", TCP, 0),
        ]
        .into(),
        ..Intercept::default()
    };
    shield.add_interface("dc").unwrap();
    shield.update(&spec).unwrap();
    assert_connect(&net.client, "10.1.0.1:80", UNANSWERED);
    assert_connect(&net.client, "[fd01::1]:80", UNANSWERED);
    assert_connect(&net.client, "10.1.0.1:81", REFUSED);
    assert_connect(&net.client, "[fd01::1]:81", REFUSED);
    assert!(saw(&mut packets, PATIENCE, |f| {
        f.get(30..34) == Some(&[10, 1, 0, 1]) && f.get(36..38) == Some(&[0, 80])
    }));
    // A VIP that is only routed to this host, with all ports: the host would report that there is
    // no route.
    assert_connect(&net.client, "10.9.9.9:1234", UNANSWERED);

    // Fragments to a VIP are hidden; whole datagrams for other ports are not.
    for at in ["10.1.0.1:7", "10.2.0.1:7", "[fd01::1]:7"] {
        echo(&net.director, at);
    }
    for vip in ["10.1.0.1:7", "[fd01::1]:7"] {
        assert_echo(&net.client, vip, 100, true);
        assert_echo(&net.client, vip, 4000, false);
    }
    assert_echo(&net.client, "10.2.0.1:7", 4000, true);

    // ICMP errors to a VIP are hidden from the host: only the packet socket receives the error
    // about an unexpected answer.
    let errors = || {
        let text = net
            .director
            .sh("cat /proc/net/snmp | grep ^Icmp: | tail -1");
        text.split_whitespace()
            .nth(1)
            .unwrap()
            .parse::<u64>()
            .unwrap()
    };
    let before = errors();
    let send = |to: &'static str| {
        net.director.run(move || {
            let socket = UdpSocket::bind("10.1.0.1:0").unwrap();
            socket.send_to(b"nobody listens", to).unwrap();
        });
    };
    assert!(answered(true, || {
        send("10.1.0.2:9");
        saw(&mut packets, again(true), |f| {
            f.get(23) == Some(&1) && f.get(34) == Some(&3)
        })
    }));
    assert_eq!(errors(), before);

    // Without services, nothing is hidden any more.
    assert!(shield.update(&Intercept::default()).unwrap() > 0);
    assert_connect(&net.client, "10.1.0.1:80", REFUSED);
    assert_echo(&net.client, "10.1.0.1:7", 4000, true);
    let reported = answered(true, || {
        send("10.1.0.2:9");
        let end = Instant::now() + again(true);
        while errors() == before && Instant::now() < end {}
        errors() > before
    });
    assert!(reported, "the host still receives no ICMP errors");
}

#[test]
fn packets_of_nat_server_reach_the_host_but_are_not_forwarded() {
    let net = net();
    let mut shield = net.director.run(|| Shield::open(None).unwrap());
    shield.add_interface("dc").unwrap();
    shield.add_interface("ds").unwrap();
    let listener = net.server.run(|| TcpListener::bind("[::]:8080").unwrap());
    assert_connect(&net.client, "10.2.0.2:8080", CONNECTED);
    assert_connect(&net.director, "[fd02::2]:8080", CONNECTED);
    assert_connect(&net.client, "[fd02::2]:8080", CONNECTED);
    let spec = Intercept {
        nat_servers: [
            endpoint("10.2.0.2", TCP, 8080),
            endpoint("fd02::2", TCP, 8080),
        ]
        .into(),
        ..Intercept::default()
    };
    shield.update(&spec).unwrap();
    assert_connect(&net.client, "10.2.0.2:8080", UNANSWERED);
    assert_connect(&net.client, "[fd02::2]:8080", UNANSWERED);
    // The director itself connects to its server, and resolves the server's address through the
    // shield.
    net.director.ip("neigh flush dev ds");
    net.server.ip("neigh flush dev s0");
    assert_connect(&net.director, "10.2.0.2:8080", CONNECTED);
    assert_connect(&net.director, "[fd02::2]:8080", CONNECTED);
    // The shield does not concern another port of the server.
    assert_connect(&net.client, "10.2.0.2:8081", REFUSED);
    drop(listener);
}

/// A router behind the director reports an ICMP error about a packet to a real server. The
/// destination of that packet decides whether the error is hidden, not the sender of the error.
#[test]
fn icmp_error_is_hidden_if_it_quotes_nat_server_and_not_if_nat_server_sends_it() {
    let net = net();
    let mut shield = net.director.run(|| Shield::open(None).unwrap());
    shield.add_interface("ds").unwrap();
    net.director.ip("route add 10.2.0.77 via 10.2.0.2");
    net.server
        .run(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap());
    net.server.ip("route add prohibit 10.2.0.77");
    let complaint = |wanted: io::ErrorKind| {
        let reported = net.client.run(move || {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            let reported = wanted != io::ErrorKind::WouldBlock;
            socket.set_read_timeout(Some(again(reported))).unwrap();
            socket.connect("10.2.0.77:53").unwrap();
            let mut kind = io::ErrorKind::WouldBlock;
            answered(reported, || {
                // A late error is the result of the next call.
                let sent = socket.send(b"question").map(drop);
                let received = sent.and_then(|()| socket.recv(&mut [0; 16]).map(drop));
                kind = received.unwrap_err().kind();
                kind != io::ErrorKind::WouldBlock
            });
            kind
        });
        assert_eq!(reported, wanted);
    };
    let hide = |shield: &mut Shield, server| {
        let spec = Intercept {
            nat_servers: [endpoint(server, UDP, 53)].into(),
            ..Intercept::default()
        };
        shield.update(&spec).unwrap();
    };
    complaint(io::ErrorKind::HostUnreachable);
    hide(&mut shield, "10.2.0.2");
    complaint(io::ErrorKind::HostUnreachable);
    hide(&mut shield, "10.2.0.77");
    complaint(io::ErrorKind::WouldBlock);
}

#[test]
fn local_client_connection_is_hidden_from_host_until_removed() {
    let net = net();
    let mut shield = net.director.run(|| Shield::open(None).unwrap());
    shield.add_interface("ds").unwrap();
    let host = net
        .director
        .run(|| UdpSocket::bind("10.2.0.1:5555").unwrap());
    let server = net.server.run(|| UdpSocket::bind("10.2.0.2:53").unwrap());
    let arrives = |wanted: bool| {
        let arrived = answered(wanted, || {
            server.send_to(b"answer", "10.2.0.1:5555").unwrap();
            host.set_read_timeout(Some(again(wanted))).unwrap();
            host.recv(&mut [0; 16]).is_ok()
        });
        assert_eq!(arrived, wanted);
    };
    arrives(true);
    let client = LocalClient {
        protocol: UDP,
        server: "10.2.0.2:53".parse().unwrap(),
        local: "10.2.0.1:5555".parse().unwrap(),
    };
    shield.add_local_clients(&[client]).unwrap();
    arrives(false);
    shield.remove_local_clients(&[client]).unwrap();
    arrives(true);
    // A connection that is not hidden is an error; nothing else has changed.
    shield.add_local_clients(&[client]).unwrap();
    let other = LocalClient {
        local: "10.2.0.1:5556".parse().unwrap(),
        ..client
    };
    assert!(shield.remove_local_clients(&[client, other]).is_err());
    arrives(false);
    let client6 = LocalClient {
        protocol: UDP,
        server: "[fd02::2]:53".parse().unwrap(),
        local: "[fd02::1]:5555".parse().unwrap(),
    };
    shield.add_local_clients(&[client6]).unwrap();
    let listing = net.director.sh("nft list ruleset");
    assert!(
        listing.contains("fd02::2 . udp . 53 . fd02::1 . 5555"),
        "{listing}"
    );
}

#[test]
fn full_set_of_local_clients_has_room_again_when_clients_leave() {
    let net = net();
    let mut shield = net.director.run(|| Shield::open(None).unwrap());
    let port = |n: u32| 1000 + u16::from(n.to_be_bytes()[3]);
    let client = |n: u32| LocalClient {
        protocol: UDP,
        server: SocketAddr::from(([10, 2, 0, 2], 53)),
        local: SocketAddr::from((Ipv4Addr::from(0x0a02_0100 + (n >> 8)), port(n))),
    };
    let piece = |n: u32| (n * 1024..(n + 1) * 1024).map(client).collect::<Vec<_>>();
    for n in 0..64 {
        shield.add_local_clients(&piece(n)).unwrap();
    }
    let refused = [client(1 << 16), client((1 << 16) + 1)];
    for _ in 0..2 {
        assert!(shield.add_local_clients(&refused).is_err());
    }
    shield.remove_local_clients(&piece(7)).unwrap();
    shield.add_local_clients(&refused).unwrap();
    shield.remove_local_clients(&refused).unwrap();
    shield.add_local_clients(&piece(7)).unwrap();
    assert!(shield.add_local_clients(&refused).is_err());
}

#[test]
fn frames_to_own_vip_are_hidden_unless_tagged_or_for_another_station() {
    let net = net();
    let mut shield = net.director.run(|| Shield::open(None).unwrap());
    shield.add_interface("dc").unwrap();
    net.director.ip("addr add 10.1.0.9/32 dev lo");
    // Each address has its own socket, so that answers come from the requested address.
    for at in ["10.1.0.1:7", "10.1.0.9:7"] {
        echo(&net.director, at);
    }
    assert_echo(&net.client, "10.1.0.9:7", 100, true);
    let vip: IpAddr = "10.1.0.9".parse().unwrap();
    let spec = Intercept {
        own_vips: [vip].into(),
        ..Intercept::default()
    };
    shield.update(&spec).unwrap();
    assert_echo(&net.client, "10.1.0.9:7", 100, false);
    assert_echo(&net.client, "10.1.0.1:7", 100, true);
    // Neither a tagged frame nor a frame for another station is hidden: it may be for a VLAN device
    // or a macvlan on the shielded interface. (The test counts frames, because this kernel may have
    // neither device.)
    let mac = |host: &Host, name: &'static str| {
        host.run(|| {
            let (_, state) = Netlink::open().unwrap();
            state.link_by_name(name).unwrap().mac.unwrap()
        })
    };
    let hidden = || {
        let text = net
            .director
            .sh("nft list chain netdev $(nft list tables | cut -d' ' -f3) hide4");
        let rule = text
            .lines()
            .find(|l| l.contains("@own_vips4"))
            .unwrap()
            .to_owned();
        let mut words = rule.split_whitespace().skip_while(|w| *w != "packets");
        words.nth(1).unwrap().parse::<u64>().unwrap()
    };
    let to = mac(&net.director, "dc");
    let mut other = to;
    other[5] ^= 1;
    let frame = |to: &[u8], tag: &[u8]| {
        let from = mac(&net.client, "c0");
        let ip = [
            0x45, 0, 0, 20, 0, 0, 0, 0, 64, 253, 0x66, 0xd2, 10, 1, 0, 2, 10, 1, 0, 9,
        ];
        Frame::from_bytes(&[to, &from[..], tag, &[8, 0], &ip[..]].concat())
    };
    let mut frames = [
        frame(&to, &[0x81, 0, 0, 5]),
        frame(&other, &[]),
        frame(&to, &[]),
    ];
    let before = hidden();
    let refused = net.client.run(move || {
        let mut socket = AfPacket::open(lvs_sys::if_index("c0").unwrap(), "c0").unwrap();
        socket.send(&mut frames)
    });
    assert_eq!(refused, 0);
    let end = Instant::now() + PATIENCE;
    while hidden() == before {
        assert!(
            Instant::now() < end,
            "the frame to this host was not hidden in time"
        );
    }
    assert_eq!(hidden(), before + 1);
}

#[test]
fn shield_update_sends_only_difference_and_other_processes_cannot_change_table() {
    let host = Host::new();
    let mut shield = host.run(|| Shield::open(None).unwrap());
    let mut spec = Intercept::default();
    for port in 1..=3000 {
        spec.services.insert(endpoint("192.0.2.1", TCP, port));
        spec.services.insert(endpoint("2001:db8::1", UDP, port));
    }
    // The services and their two addresses are set.
    assert_eq!(shield.update(&spec).unwrap(), 6002);
    assert_eq!(shield.update(&spec).unwrap(), 0);
    let monitor = host.run(|| {
        let mut child = Command::new("nft")
            .args(["monitor", "elements"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // `nft monitor` has joined when it reports a change; until then, change another table.
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        sh("nft 'add table ip x; add set ip x y { type inet_service; }'");
        let mut line = String::new();
        let ready = std::thread::spawn(move || {
            lines.read_line(&mut line).unwrap();
            (lines, line)
        });
        // `nft monitor` first reads all tables, and begins again if one has changed in the
        // meantime.
        let mut pause = Duration::from_millis(10);
        while !ready.is_finished() {
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_secs(2));
            sh("nft 'add element ip x y { 1 }; delete element ip x y { 1 }'");
        }
        let (lines, _) = ready.join().unwrap();
        (child, lines)
    });
    let (mut child, mut lines) = monitor;
    let removed = endpoint("192.0.2.1", TCP, 2999);
    let others = spec.services.iter().filter(|&service| *service != removed);
    spec.services = others.cloned().collect();
    spec.services.insert(endpoint("192.0.2.1", TCP, 61_001));
    assert_eq!(shield.update(&spec).unwrap(), 2);
    host.sh("nft 'add element ip x y { 2 }'");
    let mut ours = Vec::new();
    loop {
        let mut line = String::new();
        assert!(
            lines.read_line(&mut line).unwrap() > 0,
            "nft monitor has exited"
        );
        if line.contains("y { 2 }") {
            break;
        }
        if line.contains("netdev") {
            ours.push(line);
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(ours.len(), 2, "{ours:?}");
    assert!(
        ours.iter()
            .any(|l| l.starts_with("delete") && l.contains(". 2999 }"))
    );
    assert!(
        ours.iter()
            .any(|l| l.starts_with("create") && l.contains(". 61001 }")),
        "{ours:?}"
    );
    // No other process can change the table.
    let table = shield.table().to_owned();
    host.sh("nft flush ruleset");
    assert!(host.sh("nft list tables").contains(&table));
    assert!(!host.run(move || try_sh(&format!("nft delete table netdev {table}"))));
    drop(shield);
    assert_eq!(host.sh("nft list tables"), "");
}

#[test]
fn shield_follows_added_and_removed_interfaces() {
    let net = net();
    let mut shield = net.director.run(|| Shield::open(None).unwrap());
    let spec = Intercept {
        services: [endpoint("10.1.0.1", TCP, 80)].into(),
        ..Intercept::default()
    };
    shield.update(&spec).unwrap();
    // Since Linux 6.16 a chain waits for its device to appear; before, the device must exist.
    let err = shield.add_interface("nowhere");
    assert!(
        matches!(err, Ok(()) | Err(ShieldError::NoInterface { .. })),
        "{err:?}"
    );
    shield.add_interface("dc").unwrap();
    shield.add_interface("dc").unwrap();
    assert_connect(&net.client, "10.1.0.1:80", UNANSWERED);
    net.director.ip("link delete dc");
    net.director.veth("dc", &net.client, "c0");
    net.director.ip("addr add 10.1.0.1/24 dev dc");
    net.client.ip("addr add 10.1.0.2/24 dev c0");
    shield.add_interface("dc").unwrap();
    assert_connect(&net.client, "10.1.0.1:80", UNANSWERED);
    shield.remove_interface("dc").unwrap();
    shield.remove_interface("dc").unwrap();
    assert_connect(&net.client, "10.1.0.1:80", REFUSED);
    shield.add_interface("dc").unwrap();
    net.director.ip("link delete dc");
    shield.remove_interface("dc").unwrap();
}

#[test]
fn reinjected_frame_of_hidden_service_is_received_by_host() {
    let net = net();
    let listener = net
        .director
        .run(|| TcpListener::bind("10.1.0.1:80").unwrap());
    let mut shield = net.director.run(|| Shield::open(None).unwrap());
    shield.add_interface("dc").unwrap();
    let spec = Intercept {
        services: [endpoint("10.1.0.1", TCP, 80), endpoint("10.1.0.1", TCP, 81)].into(),
        nat_servers: [endpoint("10.2.0.2", TCP, 80)].into(),
        ..Intercept::default()
    };
    shield.update(&spec).unwrap();
    assert_connect(&net.client, "10.1.0.1:80", UNANSWERED);
    // Reinjects all frames for ports 80 and 81 of the address, as the dataplane does with packets
    // that belong to no connection.
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let dataplane = net.director.spawn(move || {
        let mut device = HostDevice::create().unwrap();
        let mut packets = AfPacket::open(lvs_sys::if_index("dc").unwrap(), "dc").unwrap();
        let mut frames: Vec<_> = (0..BATCH).map(|_| Frame::new()).collect();
        let mut poller = lvs_sys::Poller::new();
        while !stopped.load(Ordering::Relaxed) {
            poller.clear();
            poller.add(packets.fd().unwrap());
            poller.wait(Some(Duration::from_millis(20))).unwrap();
            let count = packets.recv(&mut frames).unwrap();
            for frame in &mut frames[..count] {
                let bytes = frame.bytes();
                let ours = bytes.get(12..14) == Some(&[8, 0])
                    && bytes.get(30..34) == Some(&[10, 1, 0, 1])
                    && matches!(bytes.get(36..38), Some(&[0, 80 | 81]));
                if ours && frame.pull_front(14) {
                    assert_eq!(device.send(std::slice::from_mut(frame)), 0);
                }
            }
        }
    });
    // The first packets may be hidden; the client sends them again.
    assert_connect(&net.client, "10.1.0.1:80", CONNECTED);
    assert_connect(&net.client, "10.1.0.1:81", REFUSED);
    // A transfer with super-packets and partial checksums arrives completely.
    const LEN: usize = 8 << 20;
    let sender = net.client.spawn(|| {
        let mut stream = TcpStream::connect("10.1.0.1:80").unwrap();
        stream.write_all(&vec![7; LEN]).unwrap();
    });
    loop {
        let mut received = Vec::new();
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_to_end(&mut received).unwrap();
        // The first frames belong to the connection attempts above.
        if !received.is_empty() {
            assert_eq!(received.len(), LEN);
            assert!(received.iter().all(|b| *b == 7));
            break;
        }
    }
    sender.join().unwrap();
    stop.store(true, Ordering::Relaxed);
    dataplane.join().unwrap();
}

/// The process that the next test kills. Not a test by itself.
#[test]
#[ignore = "by hand: another test starts it"]
fn shield_owner_waits_until_it_is_killed() {
    let mut shield = Shield::open(None).unwrap();
    shield.add_interface("lo").unwrap();
    println!("ready");
    io::stdout().flush().unwrap();
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn killed_shield_owner_leaves_no_nftables_table() {
    let host = Host::new();
    host.run(|| {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--ignored",
                "--exact",
                "--nocapture",
                "shield::shield_owner_waits_until_it_is_killed",
            ])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let ready = BufReader::new(child.stdout.take().unwrap())
            .lines()
            .any(|line| line.unwrap().contains("ready"));
        assert!(ready);
        let listing = sh("nft list ruleset");
        assert!(listing.contains("hook ingress device \"lo\""), "{listing}");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(sh("nft list ruleset"), "");
    });
}

/// Returns a frame from the client to the director with this IPv4 packet; `tag` follows the
/// Ethernet addresses.
fn frame_to_director(net: &Net, tag: &[u8], ip: &[u8]) -> Frame {
    let mac = |host: &Host, device: &str| -> Vec<u8> {
        let text = host.sh(&format!("ip -o link show {device}"));
        let words = text.split_ascii_whitespace();
        let bytes = words.skip_while(|word| *word != "link/ether").nth(1);
        let bytes = bytes.unwrap().split(':');
        bytes.map(|b| u8::from_str_radix(b, 16).unwrap()).collect()
    };
    let (to, from) = (mac(&net.director, "dc"), mac(&net.client, "c0"));
    Frame::from_bytes(&[&to[..], &from, tag, &[8, 0], ip].concat())
}

/// A host without VLANs accepts frames with a priority tag, so the shield must hide those of
/// services.
#[test]
fn frame_to_service_with_priority_tag_is_hidden() {
    let net = net();
    let socket = net.director.run(|| UdpSocket::bind("10.1.0.1:53").unwrap());
    let mut ip = Vec::new();
    etherparse::PacketBuilder::ipv4([10, 1, 0, 2], [10, 1, 0, 1], 64)
        .udp(4000, 53)
        .write(&mut ip, b"tagged")
        .unwrap();
    let mut wire = net
        .client
        .run(|| AfPacket::open(lvs_sys::if_index("c0").unwrap(), "c0").unwrap());
    let mut send = |tag: &[u8]| assert_eq!(wire.send(&mut [frame_to_director(&net, tag, &ip)]), 0);
    let arrives = |wanted: bool| {
        socket.set_read_timeout(Some(again(wanted))).unwrap();
        socket.recv(&mut [0; 64]).is_ok()
    };
    for tag in [&[][..], &[0x81, 0, 0xe0, 0]] {
        let arrived = answered(true, || {
            send(tag);
            arrives(true)
        });
        assert!(
            arrived,
            "{tag:?}: the frame did not arrive, although nothing is hidden"
        );
    }
    let shield = net.director.run(|| {
        let mut shield = Shield::open(None).unwrap();
        shield.add_interface("dc").unwrap();
        let spec = Intercept {
            services: [endpoint("10.1.0.1", UDP, 53)].into(),
            ..Intercept::default()
        };
        shield.update(&spec).unwrap();
        shield
    });
    for tag in [&[][..], &[0x81, 0, 0xe0, 0]] {
        send(tag);
        assert!(!arrives(false), "{tag:?}");
    }
    drop(shield);
}

/// IPVS drops packets to a service's address that end within their transport header, whatever
/// protocols the services have. The host would answer with an ICMP error about the protocol.
#[test]
fn packets_to_service_address_with_incomplete_transport_header_are_hidden() {
    const SCTP: u8 = Protocol::SCTP.0;
    const AH: u8 = 51;
    let net = net();
    // Both hosts resolve each other first, so that only the packet and the answer are on the wire.
    net.director.sh("ping -c1 -W60 fd01::2 >/dev/null");
    let mut wire = net
        .client
        .run(|| AfPacket::open(lvs_sys::if_index("c0").unwrap(), "c0").unwrap());
    let mut is_answered = |ether_type: [u8; 2], ip: &[u8], wanted: bool| {
        let mut frame = frame_to_director(&net, &[], ip);
        frame.bytes_mut()[12..14].copy_from_slice(&ether_type);
        let is_error = |frame: &[u8]| match frame.get(12..14) {
            Some([0x08, 0x00]) => frame.len() > 24 && frame[23] == 1,
            Some([0x86, 0xdd]) => frame.len() > 54 && frame[20] == 58 && frame[54] < 128,
            _ => false,
        };
        answered(wanted, || {
            let _ = wire.send(std::slice::from_mut(&mut frame));
            // The host sends an ICMP error.
            saw(&mut wire, again(wanted), is_error)
        })
    };
    let mut sctp = |len: u8, wanted: bool| {
        let mut ip = vec![0x45, 0, 0, 20 + len, 0, 7, 0, 0, 64, SCTP, 0, 0];
        ip.extend([10, 1, 0, 2, 10, 1, 0, 1]);
        ip.resize(20 + usize::from(len), 0);
        lvs_packet::wire::ipv4::finish_header(&mut ip);
        assert_eq!(
            is_answered([0x08, 0x00], &ip, wanted),
            wanted,
            "{len} bytes"
        );
    };
    // The kernel of the test has no SCTP, and answers with an ICMP error.
    sctp(0, true);
    let shield = net.director.run(|| {
        let mut shield = Shield::open(None).unwrap();
        shield.add_interface("dc").unwrap();
        let spec = Intercept {
            services: [
                endpoint("10.1.0.1", Protocol::SCTP, 9),
                endpoint("fd01::1", UDP, 9),
            ]
            .into(),
            ..Intercept::default()
        };
        shield.update(&spec).unwrap();
        shield
    });
    for len in [0, 3, 4, 15] {
        sctp(len, false);
    }
    // A complete datagram to another port belongs to the host.
    sctp(16, true);
    let mut six = |to: &str, protocol: u8, ah: bool, len: u8, wanted: bool| {
        let mut ip = vec![0x60, 0, 0, 0, 0, len, protocol, 64];
        for addr in ["fd01::2", to] {
            ip.extend(addr.parse::<Ipv6Addr>().unwrap().octets());
        }
        if ah {
            (ip[5], ip[6]) = (24 + len, AH);
            ip.extend([protocol, 4]);
            ip.resize(64, 0);
        }
        ip.resize(ip.len() + usize::from(len), 0);
        assert_eq!(
            is_answered([0x86, 0xdd], &ip, wanted),
            wanted,
            "{len} bytes of protocol {protocol} to {to}, after an AH: {ah}"
        );
    };
    six("fd01::1", SCTP, false, 15, false);
    six("fd01::1", SCTP, false, 16, true);
    // Only the dataplane reads past AH: the shield hides all AH packets, and the dataplane
    // reinjects those that are not for services.
    for (protocol, header) in [(6, 20), (17, 8), (SCTP, 16)] {
        for len in [0, header - 1, header] {
            six("fd01::1", protocol, true, len, false);
        }
    }
    // No service is there.
    six("fd02::1", 6, true, 20, true);
    drop(shield);
}

/// A UDP datagram from the client to port 7 of the director, as a frame with these VLAN tags.
fn tagged(to: [u8; 6], tags: &[u8]) -> Frame {
    let mut ip = [
        0x45, 0, 0, 29, 0, 1, 0, 0, 64, 17, 0, 0, 10, 1, 0, 2, 10, 1, 0, 1, 0x30, 0x39, 0, 7, 0, 9,
        0, 0, b'x',
    ];
    let header = ip[..20].chunks_exact(2);
    let sum: u32 = header.map(|w| u32::from(w[0]) << 8 | u32::from(w[1])).sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    ip[10..12].copy_from_slice(&(!u16::try_from(sum).unwrap()).to_be_bytes());
    Frame::from_bytes(&[&to[..], &[2, 0, 0, 0, 0, 9], tags, &[8, 0], &ip].concat())
}

/// The host removes any number of tags of VLAN 0.
#[test]
fn packets_to_service_with_several_priority_tags_are_hidden() {
    let net = net();
    let host = net.director.run(|| UdpSocket::bind("10.1.0.1:7").unwrap());
    let to = net.director.run(|| {
        let (_, state) = Netlink::open().unwrap();
        state.link_by_name("dc").unwrap().mac.unwrap()
    });
    let arrives = |tags: &[u8], limit: Duration| {
        let mut frames = [tagged(to, tags)];
        let refused = net.client.run(move || {
            let mut socket = AfPacket::open(lvs_sys::if_index("c0").unwrap(), "c0").unwrap();
            socket.send(&mut frames)
        });
        assert_eq!(refused, 0);
        host.set_read_timeout(Some(limit)).unwrap();
        host.recv(&mut [0; 16]).is_ok()
    };
    const CUSTOMER: [u8; 4] = [0x81, 0, 0xe0, 0];
    const SERVICE: [u8; 4] = [0x88, 0xa8, 0, 0];
    let single: [&[u8]; 3] = [&[], &CUSTOMER, &SERVICE];
    let nested: Vec<Vec<u8>> = [
        &[CUSTOMER, CUSTOMER][..],
        &[CUSTOMER, SERVICE],
        &[SERVICE, CUSTOMER],
        &[SERVICE, SERVICE],
        &[CUSTOMER, CUSTOMER, CUSTOMER],
    ]
    .map(<[_]>::concat)
    .into();
    // Without a shield, the host accepts packets with these tags.
    let accepts = |tags: &&[u8]| answered(true, || arrives(tags, again(true)));
    assert!(single.iter().all(accepts));
    // Without a shield, the host accepts at least some of the packets with nested tags.
    let often = (0..20).flat_map(|_| &nested);
    assert!(often.into_iter().any(|tags| arrives(tags, SILENCE)));
    let mut shield = net.director.run(|| Shield::open(None).unwrap());
    shield.add_interface("dc").unwrap();
    assert!(single.iter().all(accepts));
    let spec = Intercept {
        services: [endpoint("10.1.0.1", UDP, 7)].into(),
        ..Intercept::default()
    };
    shield.update(&spec).unwrap();
    // Discards late packets, so that the next step counts only its own.
    host.set_read_timeout(Some(SILENCE)).unwrap();
    while host.recv(&mut [0; 16]).is_ok() {}
    for tags in single {
        assert!(!arrives(tags, SILENCE), "{tags:02x?}");
    }
    for tags in &nested {
        assert!(!arrives(tags, SILENCE), "{tags:02x?}");
    }
}
