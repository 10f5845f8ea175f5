//! The device of the TUN backend, and the rules and routes into it, with a real kernel. Needs root.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use crate::common::Host;
use lvs_core::Protocol;
use lvs_dataplane::host::steering::{Steering, SteeringError};
use lvs_dataplane::io::tun::HostDevice;
use lvs_dataplane::io::{BATCH, PacketIo};
use lvs_packet::frame::Frame;
use lvs_packet::intercept::{Endpoint, Intercept};
use lvs_sys::Poller;

const DEVICE: &str = HostDevice::HOP;

fn addr(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// The TTLs of the waiting IPv4 packets. (The host also sends router solicitations and listener
/// reports by IPv6.)
fn received(io: &mut impl PacketIo) -> Vec<u8> {
    let mut batch: Vec<Frame> = (0..BATCH).map(|_| Frame::new()).collect();
    let mut poller = Poller::new();
    poller.add(io.fd().unwrap());
    poller.wait(Some(Duration::from_millis(200))).unwrap();
    let mut all = Vec::new();
    loop {
        let count = io.recv(&mut batch).unwrap();
        if count == 0 {
            return all;
        }
        let packets = batch[..count].iter().map(Frame::bytes);
        all.extend(packets.filter(|ip| ip[0] >> 4 == 4).map(|ip| ip[8]));
    }
}

#[test]
fn tun_device_increments_ttl_and_is_deleted_with_its_descriptor() {
    let host = Host::new();
    host.ip("link add name br0 type bridge");
    host.sh("ip addr add 10.0.0.1/24 dev br0; ip link set br0 up");
    let mut device = host.run(|| HostDevice::create_hop(None).unwrap());
    let about = host.sh(&format!("ip link show {DEVICE}"));
    assert!(
        about.contains("qlen 8192") && about.contains("mtu 65535"),
        "{about}"
    );
    host.ip(&format!("route add 192.0.2.1/32 dev {DEVICE}"));
    let mut sender = device.sender().unwrap();
    host.run(|| {
        for _ in 0..64 {
            let socket = UdpSocket::bind("10.0.0.1:0").unwrap();
            socket.set_ttl(40).unwrap();
            for _ in 0..3 {
                socket.send_to(b"?", "192.0.2.1:53").unwrap();
            }
        }
    });
    assert_eq!(sender.recv(&mut [Frame::new()]).unwrap(), 0);
    let ttls = received(&mut device);
    assert_eq!(ttls, [41; 3 * 64]);
    assert_eq!(device.drops(), 0);
    drop((device, sender));
    assert!(!host.sh("ip -br link").contains(DEVICE));
}

/// The intercepted packets of a NAT service with one server.
fn spec(vip: &str, server: &str, port: u16) -> Intercept {
    let endpoint =
        |address: &str, port| Endpoint::new(Protocol::UDP, SocketAddr::new(addr(address), port));
    Intercept {
        services: [endpoint(vip, 53)].into(),
        own_vips: [addr(vip)].into(),
        nat_servers: [endpoint(server, port)].into(),
        ..Intercept::default()
    }
}

/// A host between two links, with a device into which packets are steered.
struct Router {
    host: Host,
    /// Keeps the hosts' links up.
    _others: [Host; 2],
    device: HostDevice,
    links: BTreeMap<u32, String>,
}

impl Router {
    fn new() -> Self {
        let (host, others) = (Host::new(), [Host::new(), Host::new()]);
        host.veth("e0", &others[0], "o0");
        host.veth("e1", &others[1], "o1");
        host.sh("ip addr add 192.0.2.1/24 dev e0; ip addr add 10.0.0.1/24 dev e1; ip addr add fd00:10::1/64 dev e1");
        host.sh("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1");
        let (device, links) = host.run(|| {
            let links = ["e0"].map(|name| (lvs_sys::if_index(name).unwrap(), name.to_owned()));
            (HostDevice::create_hop(None).unwrap(), BTreeMap::from(links))
        });
        Self {
            host,
            _others: others,
            device,
            links,
        }
    }

    /// Calls `act` in the host's namespace with `steering`, or with a new steering if that is
    /// `None`. Returns the steering.
    fn with(
        &self,
        steering: Option<Steering>,
        act: impl FnOnce(&mut Steering) + Send + 'static,
    ) -> Steering {
        let (ifindex, links) = (self.device.ifindex(), self.links.clone());
        self.host.run(move || {
            let mut steering = steering.unwrap_or_else(|| {
                let mut steering = Steering::open(DEVICE, ifindex, false).unwrap();
                steering.set_interfaces(links).unwrap();
                steering
            });
            act(&mut steering);
            steering
        })
    }

    fn steered(&self) -> BTreeSet<String> {
        let text = self.host.sh(
            "for f in -4 -6; do ip $f rule | grep 'proto 76' || true; ip $f neigh show proxy; \
             ip $f route show table 7676 2> /dev/null || true; ip $f route show table 7677 2> /dev/null || true; done",
        );
        text.lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect()
    }

    /// The kernel's route for a packet, which the arguments of `ip route get` describe.
    fn way(&self, packet: &str) -> String {
        self.host.sh(&format!("ip route get {packet}"))
    }
}

#[test]
fn only_requests_and_replies_of_services_are_routed_into_tun_device() {
    let router = Router::new();
    let steering = router.with(None, |steering| {
        steering.check_forwarding().unwrap();
        steering
            .update(&spec("192.0.2.10", "10.0.0.11", 53))
            .unwrap();
    });
    let client = "10.0.0.77 from 10.0.0.11 iif e1 ipproto udp";
    for (packet, device) in [
        ("192.0.2.10 from 192.0.2.77 iif e0".to_owned(), true),
        ("192.0.2.10".to_owned(), true),
        // Packets from the device are not routed back to it.
        (format!("10.0.0.11 from 192.0.2.77 iif {DEVICE}"), false),
        (
            format!("192.0.2.77 from 10.0.0.11 iif {DEVICE} ipproto udp sport 53 dport 99"),
            false,
        ),
        (format!("{client} sport 53 dport 99"), true),
        (format!("{client} sport 54 dport 99"), false),
        // A fragment.
        (client.to_owned(), true),
        (
            "10.0.0.77 from 10.0.0.11 iif e1 ipproto tcp sport 53 dport 99".to_owned(),
            false,
        ),
    ] {
        let way = router.way(&packet);
        assert_eq!(
            way.contains(&format!("dev {DEVICE}")),
            device,
            "{packet}: {way}"
        );
    }
    // Add another service, then remove both.
    let steering = router.with(Some(steering), |steering| {
        steering
            .extend(&spec("192.0.2.20", "10.0.0.12", 65_535))
            .unwrap();
    });
    assert!(router.way("192.0.2.20").contains(DEVICE));
    let edge = "10.0.0.77 from 10.0.0.12 iif e1 ipproto udp dport 9 sport";
    assert!(router.way(&format!("{edge} 65535")).contains(DEVICE));
    assert!(!router.way(&format!("{edge} 65534")).contains(DEVICE));
    let steering = router.with(Some(steering), |steering| {
        steering
            .update(&spec("192.0.2.20", "10.0.0.12", 0))
            .unwrap();
    });
    assert!(!router.way("192.0.2.10").contains(DEVICE));
    assert!(router.way(&format!("{edge} 65534")).contains(DEVICE));
    router.host.run(move || drop(steering));
    assert_eq!(router.steered(), BTreeSet::new());
}

#[test]
fn steering_keeps_entries_of_other_programs_and_restores_its_removed_entries() {
    let router = Router::new();
    router
        .host
        .sh("ip neigh add proxy 192.0.2.10 dev e0; ip rule add pref 62 from 10.9.9.9 lookup 99");
    let before = router.host.sh("ip rule; ip neigh show proxy");
    let six = spec("fd00:192::10", "fd00:10::11", 53);
    let both = {
        let mut both = spec("192.0.2.10", "10.0.0.11", 53);
        both.services.extend(six.services);
        both.own_vips.extend(six.own_vips);
        both.nat_servers.extend(six.nat_servers);
        both
    };
    let wanted = both.clone();
    let steering = router.with(None, move |steering| steering.update(&wanted).unwrap());
    let all = router.steered();
    assert!(
        all.iter()
            .any(|line| line.starts_with("fd00:192::10 dev e0")),
        "{all:?}"
    );
    let proxy_ndp = || router.host.sh("cat /proc/sys/net/ipv6/conf/e0/proxy_ndp");
    assert_eq!(proxy_ndp(), "1\n");

    // An operator deletes rules, and proxy neighbours disappear with an interface that is set down.
    router.host.sh(
        "ip rule del pref 61; ip -6 rule del pref 60; ip link set e0 down; ip link set e0 up; ip route flush table 7676",
    );
    assert_ne!(router.steered(), all);
    router.host.sh("ip neigh add proxy 192.0.2.10 dev e0");
    let wanted = both.clone();
    let steering = router.with(Some(steering), move |steering| {
        steering.distrust();
        steering.update(&wanted).unwrap();
    });
    assert_eq!(router.steered(), all);

    // As after a `kill -9`: the next dataplane removes the entries.
    std::mem::forget(steering);
    let steering = router.with(None, |_| {});
    assert_eq!(router.host.sh("ip rule; ip neigh show proxy"), before);
    assert_eq!(
        proxy_ndp(),
        "1\n",
        "proxy_ndp was changed, although its previous value is unknown"
    );
    let steering = router.with(Some(steering), move |steering| {
        steering.update(&both).unwrap();
    });
    assert_eq!(router.steered(), all);
    router.host.run(move || drop(steering));
    assert_eq!(router.host.sh("ip rule; ip neigh show proxy"), before);

    router
        .host
        .sh("sysctl -qw net.ipv4.ip_forward=0 net.ipv6.conf.all.forwarding=0");
    router.with(None, |steering| {
        let refusal = steering.check_forwarding();
        assert!(
            matches!(refusal, Err(SteeringError::NotForwarding)),
            "{refusal:?}"
        );
    });
}
