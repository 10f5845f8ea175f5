//! Generates packet cases: one service, and packets of all kinds to its director.

pub(super) mod ftp;
mod traffic;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use lvs_core::Protocol;
use serde_json::{Value, json};

use self::traffic::Traffic;
use crate::hostile::Entropy;

/// Number of steps of a case.
const STEPS: usize = 24;

/// The forwarding method of a case's servers.
#[derive(Clone, Copy, Debug)]
struct Method {
    forward: &'static str,
    tunnel: Option<&'static str>,
    checksum: Option<&'static str>,
    /// Whether servers and clients use different IP versions.
    mixed: bool,
}

const fn method(
    forward: &'static str,
    tunnel: Option<&'static str>,
    checksum: Option<&'static str>,
    mixed: bool,
) -> Method {
    Method {
        forward,
        tunnel,
        checksum,
        mixed,
    }
}

const METHODS: [Method; 18] = [
    method("masq", None, None, false),
    method("masq", None, None, false),
    method("masq", None, None, false),
    method("masq", None, None, false),
    method("masq", None, None, false),
    method("masq", None, None, false),
    method("direct", None, None, false),
    method("direct", None, None, false),
    method("tunnel", None, None, false),
    method("tunnel", Some("ipip"), None, false),
    method("tunnel", Some("ipip"), None, true),
    method("tunnel", Some("gre"), None, false),
    method("tunnel", Some("gre"), Some("csum"), false),
    method("tunnel", Some("gue"), None, false),
    method("tunnel", Some("gue"), Some("csum"), false),
    method("tunnel", Some("gue"), Some("remcsum"), false),
    method("tunnel", Some("gue"), Some("csum"), true),
    method("tunnel", Some("gre"), None, true),
];

/// Sysctls with their possible values. `expire_nodest_conn` is omitted: how long a connection then
/// remains depends on the kernel's ticks.
const SYSCTLS: [(&str, &[i64]); 8] = [
    ("pmtu_disc", &[0, 1]),
    ("nat_icmp_send", &[0, 1]),
    ("schedule_icmp", &[0, 1]),
    ("sloppy_tcp", &[0, 1]),
    ("sloppy_sctp", &[0, 1]),
    ("conn_reuse_mode", &[0, 1]),
    ("expire_quiescent_template", &[0, 1]),
    ("ignore_tunneled", &[0, 1]),
];

/// UDP port of GUE tunnels.
const GUE: u16 = 6080;

/// The hosts of a case.
#[derive(Clone, Debug)]
struct Scene {
    protocol: Protocol,
    vip: SocketAddr,
    servers: Vec<SocketAddr>,
    clients: Vec<SocketAddr>,
    /// A router on the servers' link.
    router: IpAddr,
    /// A host on the servers' link that is not a server, with the clients' IP version.
    bystander: IpAddr,
    method: Method,
    mtu: [i64; 2],
}

impl Scene {
    fn is_six(&self) -> bool {
        self.vip.is_ipv6()
    }

    fn is_nat(&self) -> bool {
        self.method.forward == "masq"
    }
}

fn server(six: bool, entropy: &mut Entropy<'_>) -> IpAddr {
    let last = entropy.u16();
    let [high, low] = last.to_be_bytes();
    if six {
        Ipv6Addr::new(0xfd00, 1, 0, 0, 0, 0, 9, last.max(1)).into()
    } else {
        Ipv4Addr::new(10, 1, high % 250, low % 250 + 1).into()
    }
}

fn client(six: bool, entropy: &mut Entropy<'_>) -> IpAddr {
    if six {
        let [a, b] = [entropy.u16(), entropy.u16()];
        Ipv6Addr::new(0x2001, 0xdb8, a, 0, 0, 0, 0, b).into()
    } else {
        let [a, b, c] = [entropy.u8(), entropy.u8(), entropy.u8()];
        // Not an address with a special meaning.
        Ipv4Addr::new(20 + a % 80, b, c, 1 + entropy.u8() % 250).into()
    }
}

fn scene(entropy: &mut Entropy<'_>) -> Scene {
    let six = entropy.one_in(2);
    let method = entropy.pick(&METHODS);
    let protocol = entropy.pick(&[
        Protocol::TCP,
        Protocol::TCP,
        Protocol::UDP,
        Protocol::UDP,
        Protocol::UDP,
        Protocol::SCTP,
    ]);
    let last = entropy.u8();
    let vip: IpAddr = if six {
        Ipv6Addr::new(0xfd00, 0, 9, 0, 0, 0, 0, 0x100 + u16::from(last)).into()
    } else {
        Ipv4Addr::new(10, 0, 9, last).into()
    };
    let vport = entropy.pick(&[80, 53, 443, 3868]);
    let rport = if method.forward == "masq" {
        entropy.pick(&[8080, 5353, vport])
    } else {
        vport
    };
    let real_six = six != method.mixed;
    // A path MTU is learned only after a packet to the server. With a tunnel, there is therefore
    // only one server.
    let count = if entropy.one_in(3) && method.forward != "tunnel" {
        2
    } else {
        1
    };
    let servers = (0..count)
        .map(|_| SocketAddr::new(server(real_six, entropy), rport))
        .collect();
    let clients = (0..3)
        .map(|_| SocketAddr::new(client(six, entropy), 1024 + entropy.u16() % 60_000))
        .collect();
    let least = if six || real_six { 1280 } else { 576 };
    let mtu = |entropy: &mut Entropy<'_>| match entropy.below(8) {
        0 => 1300,
        1 => least,
        2 => 1400,
        _ => 1500,
    };
    Scene {
        protocol,
        vip: SocketAddr::new(vip, vport),
        servers,
        clients,
        router: server(real_six, entropy),
        bystander: server(six, entropy),
        method,
        mtu: [mtu(entropy), mtu(entropy)],
    }
}

fn config(scene: &Scene, entropy: &mut Entropy<'_>) -> Value {
    let method = scene.method;
    let destinations: Vec<Value> = scene
        .servers
        .iter()
        .map(|server| {
            let mut value = json!({
                "addr": server.ip(), "port": server.port(), "forward": method.forward, "weight": 1,
                "upper": 0, "lower": 0,
            });
            if let Some(kind) = method.tunnel {
                value["tun_type"] = kind.into();
            }
            if method.tunnel == Some("gue") {
                value["tun_port"] = GUE.into();
            }
            if let Some(checksum) = method.checksum {
                value["tun_csum"] = checksum.into();
            }
            value
        })
        .collect();
    let mut flags: Vec<&str> = Vec::new();
    if entropy.one_in(10) {
        flags.push("persistent");
    } else if scene.protocol == Protocol::UDP && method.forward != "tunnel" && entropy.one_in(10) {
        flags.push("ops");
    }
    let mut service = json!({
        "proto": scene.protocol.to_string().to_lowercase(), "addr": scene.vip.ip(),
        "port": scene.vip.port(), "scheduler": entropy.pick(&["rr", "rr", "wlc", "sh"]),
        "flags": flags, "destinations": destinations,
    });
    if !flags.is_empty() {
        service["timeout"] = 360.into();
    }
    let mut sysctl = serde_json::Map::new();
    for (name, values) in SYSCTLS {
        if entropy.one_in(5) {
            sysctl.insert(name.to_owned(), entropy.pick(values).into());
        }
    }
    json!({
        "services": [service],
        "mtu": {"cl": scene.mtu[0], "sv": scene.mtu[1]},
        "sysctl": sysctl,
        "neigh": [scene.router, scene.bystander],
    })
}

/// Generates the case `number` of `seed`.
pub(super) fn case(seed: u64, number: u64) -> Value {
    let mut entropy = Entropy::seeded(seed.wrapping_mul(0x1_0000_0001).wrapping_add(number));
    let scene = scene(&mut entropy);
    let config = config(&scene, &mut entropy);
    let method = scene.method;
    let name = format!(
        "packets-{seed}-{number}-{}-{}{}",
        if scene.is_six() { 6 } else { 4 },
        method.tunnel.unwrap_or(method.forward),
        if method.mixed { "-mixed" } else { "" },
    );
    let mut traffic = Traffic::new(scene, entropy);
    let mut steps = Vec::new();
    while steps.len() < STEPS {
        steps.extend(traffic.next_steps());
    }
    json!({"name": name, "seed": seed, "config": config, "steps": steps})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differential_seed_reproduces_packet_cases() {
        for number in 0..50 {
            let case = case(3, number);
            assert_eq!(case, super::case(3, number));
            assert_ne!(case["steps"], super::case(4, number)["steps"]);
        }
    }
}
