//! Findings about virtual addresses, real servers and paths, from the table of services.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, UdpSocket};

use lvs_core::Forwarding;
use lvs_core::api::{Info, ReasonCount, ServerInfo, ServiceId, ServiceInfo, TooBig};
use lvs_core::attempts::Attempts;

use lvs_api::guidance::{self, is_managed};

use super::code::Code;
use super::director::Director;
use super::{Findings, Scope, When, is_routed};
use crate::operator::service_text;

pub(super) fn look(
    services: &[ServiceInfo],
    info: &Info,
    reasons: &[ReasonCount],
    director: &Director,
    findings: &mut Findings,
) {
    let is_wanted = |vip| !director.has_given_up(vip);
    addresses(services, info, director, &is_wanted, &is_local, findings);
    for service in services {
        usable(service, director, findings);
        for server in &service.servers {
            threshold(service, server, director, findings);
            unanswered(service, server, director, findings);
        }
        ftp(service, info, findings);
    }
    for report in &info.too_big {
        too_big(report, When::of_name(reasons, "too_big"), findings);
    }
    narrow_tunnels(services, info, findings);
}

/// The address and port of a service; `None` for a firewall mark.
pub(super) fn virt(service: &ServiceInfo) -> Option<SocketAddr> {
    service.service.address()
}

fn is_local(addr: IpAddr) -> bool {
    UdpSocket::bind(SocketAddr::new(addr, 0)).is_ok()
}

fn addresses(
    services: &[ServiceInfo],
    info: &Info,
    director: &Director,
    is_wanted: &dyn Fn(IpAddr) -> bool,
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
        let announced = || info.announced.iter().any(|one| one.address == vip);
        if info.own_vips.contains(&vip) || announced() || !is_wanted(vip) || is_local(vip) {
            continue;
        }
        let managed = services.iter().any(|service| {
            is_managed(service) && virt(service).is_some_and(|addr| addr.ip() == vip)
        });
        let own = match managed {
            true => format!(
                "set vip = \"own\" for its services in {} and run lvsd reload",
                director.file()
            ),
            false => {
                "start the dataplane with --own-vips (lvsd owns its VIPs by default)".to_owned()
            }
        };
        let fix = if is_routed(info) {
            format!("{own}, unless a router routes this address here")
        } else {
            let length = if vip.is_ipv4() { 32 } else { 128 };
            format!("ip addr add {vip}/{length} dev lo, or {own}")
        };
        findings.add(
            Code::VipUnowned,
            format!("this host does not answer ARP or neighbour discovery for {vip}: no interface has the address, and the dataplane does not own it"),
            format!("{fix}; no action is required if another director answers for it"),
        );
    }
}

fn usable(service: &ServiceInfo, director: &Director, findings: &mut Findings) {
    let mut servers = service.servers.iter();
    if servers.any(|server| server.config.weight != 0) {
        return;
    }
    let name = service_text(service.service);
    findings.add(
        (Code::ServiceUnusable, Scope::service(service)),
        if service.servers.is_empty() {
            format!("{name} has no server: its clients are refused")
        } else {
            format!("all servers of {name} have weight 0: new clients are refused")
        },
        match is_managed(service) {
            true => director.why_unusable(&service.service),
            false => {
                "add a server (lvsadm -a), or set the weight of one (lvsadm -e ... -w 1)".to_owned()
            }
        },
    );
}

fn threshold(
    service: &ServiceInfo,
    server: &ServerInfo,
    director: &Director,
    findings: &mut Findings,
) {
    if server.overloaded {
        findings.add(
            (Code::Threshold, Scope::server(service, server.server)),
            format!(
                "{} of {} has reached its upper threshold of {}",
                server.server,
                service_text(service.service),
                server.config.upper
            ),
            match is_managed(service) {
                true => format!(
                    "raise `max_connections` of the server, or add servers, in {} and run lvsd reload",
                    director.file()
                ),
                false => "raise the threshold (lvsadm -e ... -x), or add servers".to_owned(),
            },
        );
    }
}

/// Reports a server that has left too many connections of clients unanswered in the last minute, or
/// that lvsd finds suspicious.
fn unanswered(
    service: &ServiceInfo,
    server: &ServerInfo,
    director: &Director,
    findings: &mut Findings,
) {
    let address = server.server;
    if !service.is_suspicious(server) {
        if let Some(status) = director.suspicious(&service.service, address) {
            findings.add(
                (Code::ClientsUnanswered, Scope::server(service, address)),
                format!(
                    "clients cannot use {address} of {}: {}",
                    service_text(service.service),
                    status.reason
                ),
                status.fix.clone(),
            );
        }
        return;
    }
    let fix = guidance::for_unanswered(
        address,
        server.config.forwarding,
        virt(service).map(|virt| virt.ip()),
    );
    let Attempts { opened, unanswered } = server.attempts.last_minute;
    let opened = opened.max(unanswered);
    findings.add(
        (Code::ClientsUnanswered, Scope::server(service, address)),
        format!(
            "{unanswered} of {opened} connections to {address} of {} got no answer in the last minute",
            service_text(service.service)
        ),
        fix,
    );
}

/// Reports FTP through NAT without a helper.
fn ftp(service: &ServiceInfo, info: &Info, findings: &mut Findings) {
    let ServiceId::Tcp { address } = service.service else {
        return;
    };
    let mut servers = service.servers.iter();
    let nat = servers.any(|server| server.config.forwarding == Forwarding::Nat);
    if address.port() == 21 && nat && info.ftp_ports.is_empty() {
        findings.add(
            (Code::FtpWithoutHelper, Scope::service(service)),
            format!(
                "{} seems to be FTP through NAT, and no helper translates the addresses in its commands: logins succeed, transfers fail",
                service_text(service.service)
            ),
            "start lvs-dataplane with --helper ftp, the counterpart of modprobe ip_vs_ftp",
        );
    }
}

/// Reports packets that were too long for the path to their server.
fn too_big(report: &TooBig, when: When, findings: &mut Findings) {
    let (path, headers) = match (report.tunnel, report.server) {
        (true, _) => ("the tunnel to ", report.longest.saturating_sub(report.room)),
        (false, _) => ("the path to ", 0),
    };
    let mss = report
        .room
        .saturating_sub(if report.server.is_ipv4() { 40 } else { 60 });
    let target = if headers > 0 {
        format!("by {headers}")
    } else {
        format!("to {}", report.longest)
    };
    findings.add(
        (Code::TooBig, Scope::host(report.server), when),
        format!(
            "{} packets from clients did not fit {path}{}: they had up to {} bytes, and {} fit. The clients received ICMP errors; if ICMP is filtered, connections hang",
            report.packets, report.server, report.longest, report.room
        ),
        format!(
            "raise the MTU between director and server {target}, or have the server announce a smaller MSS; on the \
             server: ip route change default via GATEWAY advmss {mss}"
        ),
    );
}

/// Reports tunnels over links with an MTU of at most 1,500, which has no room for a full packet and
/// its tunnel header. Omits servers for which packets were too long already: [`too_big`] reports
/// them.
fn narrow_tunnels(services: &[ServiceInfo], info: &Info, findings: &mut Findings) {
    let reported = |server: IpAddr| info.too_big.iter().any(|report| report.server == server);
    let servers = services.iter().flat_map(|service| &service.servers);
    let tunnels = servers.filter(|server| {
        server.config.forwarding == Forwarding::Tunnel && !reported(server.server.ip())
    });
    let hosts: BTreeSet<IpAddr> = tunnels.map(|server| server.server.ip()).collect();
    let smallest = hosts.into_iter().filter_map(|host| mtu_towards(host, info));
    if let Some(mtu) = smallest.min().filter(|&mtu| mtu <= 1500) {
        findings.add(
            Code::TunnelMtu,
            format!(
                "servers are reached through tunnels, and the MTU is {mtu}: full packets of clients do not fit, and \
                 connections hang if ICMP is filtered"
            ),
            format!(
                "raise the MTU between director and servers by at least 20, or have servers announce a smaller MSS: \
                 ip route change default via GATEWAY advmss {}",
                mtu.saturating_sub(60)
            ),
        );
    }
}

/// The MTU of the dataplane's interface on the route to a server. If that interface is unknown, the
/// smallest MTU of all its interfaces; `None` if it has no interface.
fn mtu_towards(server: IpAddr, info: &Info) -> Option<u32> {
    let name = interface_towards(server);
    let interfaces = || info.interfaces.iter();
    let towards = interfaces().find(|one| name.as_ref() == Some(&one.name));
    let smallest = || interfaces().map(|interface| interface.mtu).min();
    towards.map(|interface| interface.mtu).or_else(smallest)
}

/// The name of the interface with the address from which this host connects to `server`.
fn interface_towards(server: IpAddr) -> Option<String> {
    let any = match server {
        IpAddr::V4(_) => IpAddr::from([0; 4]),
        IpAddr::V6(_) => IpAddr::from([0; 16]),
    };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).ok()?;
    socket.connect(SocketAddr::new(server, 9)).ok()?;
    let own = socket.local_addr().ok()?.ip();
    let mut interfaces = nix::ifaddrs::getifaddrs().ok()?;
    let interface = interfaces.find(|interface| {
        let address = interface.address.as_ref();
        address.is_some_and(|address| {
            let v4 = address.as_sockaddr_in().map(|v4| IpAddr::from(v4.ip()));
            let v6 = address.as_sockaddr_in6().map(|v6| IpAddr::from(v6.ip()));
            v4.or(v6) == Some(own)
        })
    })?;
    Some(interface.interface_name)
}

#[cfg(test)]
mod tests {
    use super::super::tests::services;
    use super::*;

    #[test]
    fn doctor_server_without_answers_to_clients_is_a_finding() {
        let mut services = services("nat", 1);
        let findings = |services: &[ServiceInfo]| {
            let mut findings = Findings::default();
            let (service, director) = (&services[0], Director::default());
            unanswered(service, &service.servers[0], &director, &mut findings);
            findings.0
        };
        assert!(findings(&services).is_empty());
        services[0].servers[0].attempts.last_minute = Attempts {
            opened: 9,
            unanswered: 9,
        };
        let found = findings(&services);
        assert!(found[0].what.starts_with("9 of 9 connections to "));
        assert!(found[0].fix.contains("default gateway"));
        services[0].servers[0].attempts.last_minute.unanswered = 0;
        assert!(findings(&services).is_empty());
    }

    #[test]
    fn doctor_service_without_usable_server_is_reported_with_command() {
        let mut findings = Findings::default();
        usable(&services("nat", 0)[0], &Director::default(), &mut findings);
        assert!(findings.0[0].what.contains("weight 0"));
        assert!(findings.0[0].fix.contains("lvsadm -e"));
    }

    #[test]
    fn doctor_findings_of_lvsd_service_have_fixes_for_lvsd() {
        let mut services = services("nat", 0);
        services[0].owner = Some("lvsd".to_owned());
        services[0].servers[0].overloaded = true;
        let mut findings = Findings::default();
        let director = Director::default();
        let (info, nowhere) = (Info::default(), |_| false);
        addresses(
            &services,
            &info,
            &director,
            &|_| true,
            &nowhere,
            &mut findings,
        );
        usable(&services[0], &director, &mut findings);
        threshold(
            &services[0],
            &services[0].servers[0],
            &director,
            &mut findings,
        );
        services[0].servers.clear();
        usable(&services[0], &director, &mut findings);
        assert_eq!(findings.0.len(), 4);
        for finding in &findings.0 {
            let fix = &finding.fix;
            assert!(fix.contains("lvsd"), "no `lvsd` in {fix}");
            assert!(
                !fix.contains("lvsadm -") && !fix.contains("--own-vips"),
                "{fix}"
            );
        }
    }

    #[test]
    fn doctor_unowned_address_is_a_finding() {
        let mut findings = Findings::default();
        let mut look = |info: &Info, wanted: bool, local: bool| {
            let services = services("nat", 1);
            let director = Director::default();
            addresses(
                &services,
                info,
                &director,
                &|_| wanted,
                &|_| local,
                &mut findings,
            );
            std::mem::take(&mut findings.0)
        };
        let info = Info::default();
        assert!(look(&info, true, true).is_empty());
        assert!(
            look(&info, false, false).is_empty(),
            "an address that another host has is reported"
        );
        let text = r#"{"announced": [{"address": "192.0.2.1", "standing": "announced"}]}"#;
        let announced: Info = serde_json::from_str(text).expect("the JSON is valid");
        assert!(look(&announced, true, false).is_empty());
        let found = look(&info, true, false);
        assert!(found[0].what.contains("192.0.2.1"), "{found:?}");
    }

    #[test]
    fn doctor_nat_ftp_service_without_helper_is_a_finding() {
        let mut services = services("nat", 1);
        let output = |services: &[ServiceInfo], info: &Info| {
            let mut findings = Findings::default();
            ftp(&services[0], info, &mut findings);
            findings.0.len()
        };
        let mut info = Info::default();
        assert_eq!(output(&services, &info), 0);
        let ServiceId::Tcp { address } = &mut services[0].service else {
            panic!("the service has no address");
        };
        address.set_port(21);
        assert_eq!(output(&services, &info), 1);
        services[0].servers[0].config.forwarding = Forwarding::Route;
        assert_eq!(output(&services, &info), 0);
        services[0].servers[0].config.forwarding = Forwarding::Nat;
        info.ftp_ports = vec![21];
        assert_eq!(output(&services, &info), 0);
    }

    #[test]
    fn doctor_tunnel_without_mtu_room_is_a_finding() {
        let info: Info = serde_json::from_str(
            r#"{"interfaces": [{"name": "eth0", "backend": "af_packet", "mtu": 1500, "up": true}]}"#,
        )
        .expect("the JSON is valid");
        let mut findings = Findings::default();
        narrow_tunnels(&services("nat", 1), &info, &mut findings);
        assert_eq!(findings.0.len(), 0, "{findings:?}");
        narrow_tunnels(&services("tunnel", 1), &info, &mut findings);
        assert_eq!(findings.0.len(), 1, "{findings:?}");
    }

    #[test]
    fn doctor_too_long_packets_are_reported_by_server() {
        let info: Info = serde_json::from_str(
            r#"{"interfaces": [{"name": "eth0", "backend": "af_packet", "mtu": 1500, "up": true, "lost": 7}],
                "too_big": [{"server": "10.0.0.1", "tunnel": true, "room": 1480, "longest": 1500, "packets": 3}]}"#,
        )
        .expect("the JSON is valid");
        let mut findings = Findings::default();
        look(
            &services("tunnel", 1),
            &info,
            &[],
            &Director::default(),
            &mut findings,
        );
        findings.0.retain(|finding| !finding.what.contains("ARP"));
        assert_eq!(findings.0.len(), 1, "{findings:?}");
        assert!(findings.0[0].what.contains("the tunnel to 10.0.0.1"));
        assert!(findings.0[0].fix.contains("by 20,") && findings.0[0].fix.ends_with("1440"));
    }
}
