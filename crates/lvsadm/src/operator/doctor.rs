//! `lvsadm doctor`: what is wrong with this host and the real servers, and the cure.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};

use lvs_core::Forwarding;
use lvs_core::api::{Call, ConnInfo, Info, ReasonCount, ServiceId, ServiceInfo};
use serde::Serialize;

use super::simple::wrap;
use super::{Outcome, Trouble, Words, connect, host, service_text};
use crate::program::Invocation;
use crate::session::json_list;

/// Half-open connections of a server without any other before it is suspected.
const SUSPICIOUS: u32 = 3;

/// Something that is wrong.
#[derive(Debug, Serialize)]
pub(super) struct Finding {
    pub(super) what: String,
    cure: String,
}

#[derive(Debug, Default)]
pub(super) struct Findings(pub(super) Vec<Finding>);

impl Findings {
    pub(super) fn add(&mut self, what: impl Into<String>, cure: impl Into<String>) {
        self.0.push(Finding {
            what: what.into(),
            cure: cure.into(),
        });
    }
}

pub(super) fn run(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    if let Some(word) = words.free.first() {
        return Err(Trouble::Usage(format!("unexpected argument {word}")));
    }
    let mut client = connect(run)?;
    let info: Info = client.call(&Call::Info {})?;
    let services: Vec<ServiceInfo> = client.collect(&Call::ServiceList { service: None })?;
    let reasons: Vec<ReasonCount> = client.collect(&Call::Drops {})?;
    let mut seen = Seen::default();
    client.list(&Call::ConnList {}, |conn: ConnInfo| seen.add(&conn))?;
    let mut findings = Findings::default();
    engine(&info, &mut findings);
    addresses(&services, &info, &is_local, &mut findings);
    servers(&services, &seen, &mut findings);
    ftp(&services, &info, &mut findings);
    counters(&reasons, &mut findings);
    mtu(&services, &info, &mut findings);
    host::kernel(&mut findings);
    host::cards(&info, &mut findings);
    if is_routed(&info) {
        let chains = host::output("nft", &["list", "chains"]);
        forwarding(&services, &host::read, &chains, &mut findings);
    } else {
        host::rules(&services, &host::ruleset(), &mut findings);
    }
    let Findings(findings) = findings;
    let status = u8::from(!findings.is_empty());
    if run.json {
        json_list(run, &findings)?;
        return Ok(status);
    }
    for finding in &findings {
        for (n, line) in wrap(&finding.what, 90).iter().enumerate() {
            writeln!(run.output, "{} {line}", if n == 0 { "*" } else { " " })?;
        }
        for (n, line) in wrap(&finding.cure, 84).iter().enumerate() {
            writeln!(
                run.output,
                "    {} {line}",
                if n == 0 { "->" } else { "  " }
            )?;
        }
    }
    match findings.len() {
        0 => writeln!(run.output, "nothing found")?,
        1 => writeln!(run.output, "1 finding")?,
        n => writeln!(run.output, "{n} findings")?,
    }
    Ok(status)
}

fn engine(info: &Info, findings: &mut Findings) {
    if info.interfaces.is_empty() {
        findings.add(
            "the engine uses no interface: no packet reaches it",
            "bring an Ethernet interface up, or name one with lvs-dataplane --interface",
        );
    }
    for interface in info.interfaces.iter().filter(|interface| !interface.up) {
        findings.add(
            format!("{} is down", interface.name),
            format!(
                "ip link set {} up; look at cable and switch port",
                interface.name
            ),
        );
    }
    if info.capacity > 0 && info.connections * 10 > info.capacity * 9 {
        findings.add(
            format!("{} of at most {} connections are in use", info.connections, info.capacity),
            "start lvs-dataplane with a larger --max-connections; beyond it new connections are dropped",
        );
    }
    for conflict in &info.conflicts {
        findings.add(
            format!("{} answers ARP for {}, a virtual address", conflict.mac, conflict.address),
            "take the address from that host; if it is a real server that needs it (direct routing, tunnels), put it on lo there and set net.ipv4.conf.all.arp_ignore=1 and arp_announce=2",
        );
    }
}

/// Whether the host routes packets to the engine. Then its filters see them like all others.
fn is_routed(info: &Info) -> bool {
    info.interfaces.iter().any(|port| port.backend == "tun")
}

/// What keeps a host from routing packets to the engine.
fn forwarding(
    services: &[ServiceInfo],
    read: &dyn Fn(&str) -> String,
    chains: &str,
    findings: &mut Findings,
) {
    let vips = || services.iter().filter_map(virt);
    for (ipv6, file, sysctl) in [
        (
            false,
            "/proc/sys/net/ipv4/ip_forward",
            "net.ipv4.ip_forward",
        ),
        (
            true,
            "/proc/sys/net/ipv6/conf/all/forwarding",
            "net.ipv6.conf.all.forwarding",
        ),
    ] {
        if vips().any(|vip| vip.is_ipv6() == ipv6) && read(file).trim() == "0" {
            let family = if ipv6 { "IPv6" } else { "IPv4" };
            findings.add(
                format!("this host forwards no {family} packets, and the engine (--backend tun) gets only what is forwarded to its device"),
                format!("sysctl -w {sysctl}=1"),
            );
        }
    }
    let dropping = |policy: &str| policy.contains("hook forward") && policy.contains("policy drop");
    if chains.lines().any(dropping) {
        findings.add(
            "a chain of this host's filter drops what no rule accepts of forwarded packets, and those of services are forwarded",
            "accept what goes to and comes from the engine's device there: iifname lvs-tun0 accept, oifname lvs-tun0 accept",
        );
    }
}

fn is_local(addr: IpAddr) -> bool {
    UdpSocket::bind(SocketAddr::new(addr, 0)).is_ok()
}

pub(super) fn virt(service: &ServiceInfo) -> Option<SocketAddr> {
    match service.service {
        ServiceId::Tcp { address } | ServiceId::Udp { address } | ServiceId::Sctp { address } => {
            Some(address)
        }
        ServiceId::Fwmark { .. } => None,
    }
}

fn addresses(
    services: &[ServiceInfo],
    info: &Info,
    is_local: &dyn Fn(IpAddr) -> bool,
    findings: &mut Findings,
) {
    let mut vips: Vec<IpAddr> = services
        .iter()
        .filter_map(virt)
        .map(|addr| addr.ip())
        .collect();
    vips.sort_unstable();
    vips.dedup();
    for vip in vips {
        if !info.own_vips.contains(&vip) && !is_local(vip) {
            findings.add(
                format!("nobody here answers ARP for {vip}: it is on no interface, and the engine does not own it"),
                if is_routed(info) {
                    "start the engine with --own-vips (lvsd does that by itself), unless a router sends here what is for it".to_owned()
                } else {
                    format!("ip addr add {vip}/{} dev lo, or start the engine with --own-vips (lvsd does that by itself)", if vip.is_ipv4() { 32 } else { 128 })
                },
            );
        }
    }
}

/// What the connections tell of servers: half-open ones, established ones, and others, which may have ended long ago.
#[derive(Debug, Default)]
struct Seen(BTreeMap<SocketAddr, [u32; 3]>);

impl Seen {
    fn add(&mut self, conn: &ConnInfo) {
        if conn.template || conn.protocol != 6 {
            return;
        }
        let kind = match conn.state.as_str() {
            "SYN_RECV" | "SYNACK" => 0,
            "ESTABLISHED" => 1,
            _ => 2,
        };
        self.0.entry(conn.server).or_default()[kind] += 1;
    }
}

fn servers(services: &[ServiceInfo], seen: &Seen, findings: &mut Findings) {
    for service in services {
        let name = service_text(service.service);
        if service
            .servers
            .iter()
            .all(|server| server.config.weight == 0)
        {
            findings.add(
                if service.servers.is_empty() {
                    format!("{name} has no server: its clients are refused")
                } else {
                    format!("all servers of {name} have weight 0: new clients are refused")
                },
                "add a server (lvsadm -a), or give one a weight (lvsadm -e ... -w 1)",
            );
        }
        for server in &service.servers {
            let address = server.server;
            if server.overloaded {
                findings.add(
                    format!(
                        "{address} of {name} has reached its upper threshold of {}",
                        server.config.upper
                    ),
                    "raise it (lvsadm -e ... -x), or add servers",
                );
            }
            let Some(&[half, 0, ended]) = seen.0.get(&address) else {
                continue;
            };
            if half < SUSPICIOUS
                || half <= ended
                || !matches!(service.service, ServiceId::Tcp { .. })
            {
                continue;
            }
            let cure = match server.config.forwarding {
                Forwarding::Nat => format!(
                    "on {0}: is something listening on port {1}, and is this director its default gateway (ip route)? Answers that take another way reach the client from the wrong address",
                    address.ip(),
                    address.port()
                ),
                Forwarding::FullNat => format!(
                    "on {0}: is something listening on port {1}, and has it a route to the local addresses (lvsadm local)?",
                    address.ip(),
                    address.port()
                ),
                Forwarding::Tunnel => format!(
                    "on {}: is the tunnel up (modprobe ipip; ip link set tunl0 up), is the virtual address on it, and is net.ipv4.conf.tunl0.rp_filter 0?",
                    address.ip()
                ),
                _ => format!(
                    "on {}: is the virtual address on lo, is something listening on it, and does its answer find the client?",
                    address.ip()
                ),
            };
            findings.add(
                format!("{half} connections to {address} of {name} got no further than the first packet (no SYN-ACK was seen), and none is established"),
                cure,
            );
        }
    }
}

fn counters(reasons: &[ReasonCount], findings: &mut Findings) {
    for reason in reasons {
        // What was too big is told by server, and what was lost by interface.
        let told = ["too_big", "not_received"].contains(&reason.reason.as_str());
        if reason.action == "drop" && reason.count > 0 && !told {
            findings.add(
                format!(
                    "{} packets were dropped: {}: {}",
                    reason.count, reason.reason, reason.help
                ),
                reason.remedy.clone(),
            );
        }
    }
}

/// FTP through NAT, which needs a helper.
fn ftp(services: &[ServiceInfo], info: &Info, findings: &mut Findings) {
    for service in services {
        let nat = service
            .servers
            .iter()
            .any(|server| server.config.forwarding == Forwarding::Nat);
        if let ServiceId::Tcp { address } = service.service
            && address.port() == 21
            && nat
            && info.ftp_ports.is_empty()
        {
            findings.add(
                format!("{} looks like FTP by NAT, and no helper translates the addresses in its commands: clients log in, and transfers fail", service_text(service.service)),
                "start lvs-dataplane with --helper ftp, as modprobe ip_vs_ftp does for the kernel",
            );
        }
    }
}

/// What was too long for the way to its server; before anything was, what will be.
fn mtu(services: &[ServiceInfo], info: &Info, findings: &mut Findings) {
    for told in &info.too_big {
        let (way, headers) = match (told.tunnel, told.server) {
            (true, _) => ("the tunnel to ", told.longest.saturating_sub(told.room)),
            (false, _) => ("", 0),
        };
        let mss = told
            .room
            .saturating_sub(if told.server.is_ipv4() { 40 } else { 60 });
        findings.add(
            format!(
                "{} packets of clients did not fit {way}{}: up to {} bytes came, and it takes {}. They were told; who gets no \
                 ICMP hangs",
                told.packets, told.server, told.longest, told.room
            ),
            format!(
                "raise the MTU between director and server {}, or have the server announce a smaller MSS, there: \
                 ip route change default via GATEWAY advmss {mss}",
                if headers > 0 {
                    format!("by {headers}")
                } else {
                    format!("to {}", told.longest)
                }
            ),
        );
    }
    let seen = |server: IpAddr| info.too_big.iter().any(|told| told.server == server);
    let tunnels = services
        .iter()
        .flat_map(|service| &service.servers)
        .any(|server| server.config.forwarding == Forwarding::Tunnel && !seen(server.server.ip()));
    let small = info.interfaces.iter().map(|interface| interface.mtu).min();
    if let Some(mtu) = small.filter(|&mtu| tunnels && mtu <= 1500) {
        findings.add(
            format!("servers are reached through tunnels, and the MTU is {mtu}: full packets of clients do not fit, and those who get no ICMP hang"),
            format!("raise the MTU between director and servers by at least 20, or have servers announce a smaller MSS: ip route change default via GATEWAY advmss {}", mtu.saturating_sub(60)),
        );
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::operator) fn services(forwarding: &str, weight: i32) -> Vec<ServiceInfo> {
        let text = format!(
            r#"[{{"service": {{"protocol": "tcp", "address": "192.0.2.1:80"}},
                "config": {{"scheduler": "rr", "flags": 0, "timeout": 0, "netmask": 4294967295}},
                "stats": {{}},
                "servers": [{{"server": "10.0.0.1:80", "config": {{"weight": {weight}, "forwarding": "{forwarding}"}},
                    "active": 3, "inactive": 1, "persistent": 0, "overloaded": false, "stats": {{}}}}]}}]"#
        );
        serde_json::from_str(&text).expect("services")
    }

    fn conn(state: &str) -> ConnInfo {
        ConnInfo {
            protocol: 6,
            client: ([198, 51, 100, 1], 4000).into(),
            virt: ([192, 0, 2, 1], 80).into(),
            server: ([10, 0, 0, 1], 80).into(),
            state: state.into(),
            expires_ms: 1,
            forwarding: Forwarding::Nat,
            template: false,
            synced: false,
            engine: None,
        }
    }

    #[test]
    fn a_server_that_never_answers() {
        let mut seen = Seen::default();
        (0..3).for_each(|_| seen.add(&conn("SYN_RECV")));
        let mut findings = Findings::default();
        servers(&services("nat", 1), &seen, &mut findings);
        assert_eq!(findings.0.len(), 1);
        assert!(findings.0[0].cure.contains("default gateway"));
        // Those that ended before it went wrong do not speak for it.
        seen.add(&conn("TIME_WAIT"));
        let mut findings = Findings::default();
        servers(&services("nat", 1), &seen, &mut findings);
        assert_eq!(findings.0.len(), 1);
        seen.add(&conn("ESTABLISHED"));
        let mut findings = Findings::default();
        servers(&services("nat", 1), &seen, &mut findings);
        assert!(findings.0.is_empty());
        servers(&services("nat", 0), &seen, &mut findings);
        assert!(findings.0[0].what.contains("weight 0"));
    }

    #[test]
    fn an_address_of_nobody() {
        let mut findings = Findings::default();
        addresses(
            &services("nat", 1),
            &Info::default(),
            &|_| true,
            &mut findings,
        );
        assert!(findings.0.is_empty());
        addresses(
            &services("nat", 1),
            &Info::default(),
            &|_| false,
            &mut findings,
        );
        assert!(findings.0[0].what.contains("192.0.2.1"));
    }

    #[test]
    fn ftp_without_a_helper() {
        let mut services = services("nat", 1);
        let told = |services: &[ServiceInfo], info: &Info| {
            let mut findings = Findings::default();
            ftp(services, info, &mut findings);
            findings.0.len()
        };
        let mut info = Info::default();
        assert_eq!(told(&services, &info), 0);
        let ServiceId::Tcp { address } = &mut services[0].service else {
            panic!("an address");
        };
        address.set_port(21);
        assert_eq!(told(&services, &info), 1);
        services[0].servers[0].config.forwarding = Forwarding::Route;
        assert_eq!(told(&services, &info), 0);
        services[0].servers[0].config.forwarding = Forwarding::Nat;
        info.ftp_ports = vec![21];
        assert_eq!(told(&services, &info), 0);
    }

    #[test]
    fn a_host_that_forwards_nothing() {
        let info = |backend: &str| -> Info {
            let text = format!(
                r#"{{"interfaces": [{{"name": "x", "backend": "{backend}", "mtu": 1500, "up": true}}]}}"#
            );
            serde_json::from_str(&text).expect("info")
        };
        assert!(is_routed(&info("tun")) && !is_routed(&info("af_packet")));
        for (setting, found) in [("0\n", true), ("1\n", false), ("", false)] {
            let mut findings = Findings::default();
            let read = |_: &str| setting.to_owned();
            forwarding(&services("nat", 1), &read, "", &mut findings);
            let told = findings.0.iter().any(|f| f.cure.contains("ip_forward=1"));
            assert_eq!(told, found, "{findings:?}");
        }
        let chains = "table ip filter {\n\tchain FORWARD {\n\t\ttype filter hook forward priority filter; policy drop;\n\t}\n}\n";
        let mut findings = Findings::default();
        forwarding(
            &services("nat", 1),
            &|_| String::new(),
            chains,
            &mut findings,
        );
        assert!(findings.0[0].cure.contains("lvs-tun0"), "{findings:?}");
    }

    #[test]
    fn a_tunnel_needs_room() {
        let info: Info = serde_json::from_str(
            r#"{"interfaces": [{"name": "eth0", "backend": "af_packet", "mtu": 1500, "up": false}]}"#,
        )
        .expect("info");
        let mut findings = Findings::default();
        mtu(&services("tunnel", 1), &info, &mut findings);
        mtu(&services("nat", 1), &info, &mut findings);
        engine(&info, &mut findings);
        assert_eq!(findings.0.len(), 2, "{findings:?}");
    }

    #[test]
    fn what_did_not_fit_is_told_by_server() {
        let info: Info = serde_json::from_str(
            r#"{"interfaces": [{"name": "eth0", "backend": "af_packet", "mtu": 1500, "up": true, "lost": 7}],
                "too_big": [{"server": "10.0.0.1", "tunnel": true, "room": 1480, "longest": 1500, "packets": 3}]}"#,
        )
        .expect("info");
        let mut findings = Findings::default();
        mtu(&services("tunnel", 1), &info, &mut findings);
        assert_eq!(findings.0.len(), 1, "{findings:?}");
        assert!(findings.0[0].what.contains("the tunnel to 10.0.0.1"));
        assert!(findings.0[0].cure.contains("by 20,") && findings.0[0].cure.ends_with("1440"));
    }
}
