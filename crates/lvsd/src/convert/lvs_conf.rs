//! Converts the file of the LVS HOWTO's configure script: lines of `NAME=words`.

use std::net::IpAddr;

use super::Read;
use super::service::{Server, Service, endpoint, port, quote, scheduler};

pub(super) fn read(text: &str) -> Read {
    let mut lost = Vec::new();
    let mut vips: Vec<IpAddr> = Vec::new();
    let mut forward = "dr";
    let mut services = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or_default().trim();
        let shown: String = line.chars().take(160).collect();
        let mut lose = |why: &str| lost.push(format!("line {number}: {shown}: {why}"));
        let Some((name, value)) = line.split_once('=') else {
            if !line.is_empty() {
                lose("the line is not NAME=VALUE");
            }
            continue;
        };
        let words: Vec<&str> = value.split_whitespace().collect();
        match name.trim() {
            "LVS_TYPE" => match value.trim() {
                "VS_NAT" => forward = "nat",
                "VS_DR" => forward = "dr",
                "VS_TUN" => forward = "tun",
                _ => lose("the value is not VS_NAT, VS_DR or VS_TUN"),
            },
            // VIP=eth0:110 192.168.1.110 255.255.255.255 192.168.1.110
            "VIP" => match words.iter().find_map(|word| word.parse().ok()) {
                Some(vip) => vips.push(vip),
                None => lose("the value contains no address (names are not resolved)"),
            },
            "SERVICE" => match service(&words, &vips) {
                Ok(mut service) => {
                    service.at = format!("line {number}");
                    for server in &mut service.servers {
                        server.at.clone_from(&service.at);
                        for lost in &mut server.lost {
                            *lost = format!("line {number}: {lost}");
                        }
                    }
                    for lost in &mut service.lost {
                        *lost = format!("line {number}: {lost}");
                    }
                    services.push(service);
                }
                Err(why) => lose(&why),
            },
            "INITIAL_STATE" if value.trim() == "on" => {}
            "INITIAL_STATE" => lose("lvsd always creates the services when it starts"),
            "CLEAR_IPVS_TABLES" => lose("lvsd removes only its own services"),
            "DIP"
            | "DIRECTOR_INSIDEIP"
            | "DIRECTOR_GW"
            | "DIRECTOR_DEFAULT_GW"
            | "SERVER_VIP_DEVICE"
            | "SERVER_NET_DEVICE"
            | "SERVER_DEFAULT_GW"
            | "SERVER_GW"
            | "RUN_REALSERVERS_CONF" => {
                lose(
                    "lvsd does not configure addresses and routes of hosts; see `lvsadm realserver-setup`",
                );
            }
            _ => lose("lvsd has no equivalent"),
        }
    }
    for service in &mut services {
        service.string("forward", forward);
    }
    Read {
        services,
        lost,
        ..Read::default()
    }
}

/// Converts the words of a service, such as `t telnet rr 192.168.1.11 192.168.1.12:telnet,3`.
fn service(words: &[&str], vips: &[IpAddr]) -> Result<Service, String> {
    let [protocol, service_port, algorithm, servers @ ..] = words else {
        return Err(
            "the value does not contain a protocol, a port, a scheduler and servers".to_owned(),
        );
    };
    let port_number = port(service_port).ok_or_else(|| format!("{service_port} is not a port"))?;
    if vips.is_empty() {
        return Err("no line with VIP precedes this line".to_owned());
    }
    let mut service = Service {
        addresses: vips.iter().map(|vip| endpoint(*vip, port_number)).collect(),
        ..Service::default()
    };
    match *protocol {
        "t" => {}
        "u" => service.string("protocol", "udp"),
        other => return Err(format!("{other} is not a protocol")),
    }
    match scheduler(algorithm) {
        Ok(name) => service.string("scheduler", name),
        Err(why) => service.lose(why),
    }
    for word in servers {
        let (target, weight) = match word.split_once(',') {
            Some((target, weight)) => (target, Some(weight)),
            None => (*word, None),
        };
        let (host, own) = match target.rsplit_once(':') {
            Some((host, word)) if target.parse::<IpAddr>().is_err() => (host, Some(word)),
            _ => (target, None),
        };
        let ip: Result<IpAddr, _> = host.trim_matches(['[', ']']).parse();
        let own_port = own.map_or(Some(port_number), port);
        let (Ok(ip), Some(number)) = (ip, own_port) else {
            service.lose(format!(
                "server {word}: the address or its port is not valid (names are not resolved)"
            ));
            continue;
        };
        let mut server = Server {
            address: endpoint(ip, number),
            ..Server::default()
        };
        match weight.map(str::parse::<u32>) {
            None => {}
            Some(Ok(weight)) => {
                server.keys.insert("weight", weight.to_string());
            }
            Some(Err(_)) => server.lose(format!(
                "weight {}: the value is not a number",
                quote(weight.unwrap_or_default())
            )),
        }
        service.servers.push(server);
    }
    Ok(service)
}
