//! `lvsd keepalived-config`: generates keepalived's configuration from that of lvsd.

use std::fmt::Write as _;
use std::net::IpAddr;

use super::{INSTANCE, track};
use crate::config::{Config, HostAddress, Service, VipMode};

/// A placeholder address, because keepalived requires at least one.
const PLACEHOLDER: &str = "169.254.0.51/32 dev lo scope host";

/// Returns the configuration for keepalived.
///
/// # Errors
/// The file has no `[vrrp]`.
pub fn text(config: &Config, services: &[Service]) -> Result<String, String> {
    let Some(vrrp) = &config.vrrp else {
        return Err(format!(
            "{} has no [vrrp]: add it with interface and router_id",
            config.path
        ));
    };
    let mut addresses = vrrp.addresses.clone();
    let host = services
        .iter()
        .filter(|service| service.vip == VipMode::Host);
    for ip in host.filter_map(Service::virtual_ip) {
        if addresses.iter().all(|address| address.ip != ip) {
            let len = if ip.is_ipv4() { 32 } else { 128 };
            addresses.push(HostAddress {
                ip,
                len,
                device: None,
            });
        }
    }
    let mut text = format!(
        "# Made by `lvsd keepalived-config` from {}: VRRP only. lvsd manages services, servers and checks.\n\
         # Identical on all directors, except for values that differ in their [vrrp].\n\
         global_defs {{\n    vrrp_version 3\n    vrrp_notify_fifo {}\n}}\n\n\
         # Written by lvsd: 0, or a negative number if keepalived should prefer another director. With\n\
         # {unfit}, the initial value, this director is never active.\n\
         track_file {INSTANCE} {{\n    file {}\n    weight 1\n    init_file {unfit}\n}}\n\n\
         vrrp_instance {INSTANCE} {{\n    state BACKUP\n    interface {}\n    virtual_router_id {}\n    priority {}\n    advert_int {}\n",
        config.path.replace(char::is_control, " "),
        vrrp.fifo.display(),
        vrrp.track_file.display(),
        vrrp.interface,
        vrrp.router_id,
        vrrp.priority,
        seconds(vrrp.advert),
        unfit = track::UNFIT,
    );
    let mut block = |name: &str, lines: &[String]| {
        if !lines.is_empty() {
            let _ = writeln!(text, "    {name} {{");
            for line in lines {
                let _ = writeln!(text, "        {line}");
            }
            text.push_str("    }\n");
        }
    };
    block("track_file", &[INSTANCE.to_owned()]);
    let peers: Vec<String> = vrrp.peers.iter().map(IpAddr::to_string).collect();
    block("unicast_peer", &peers);
    // A VRRP instance advertises addresses of one family only.
    let v6 = match (vrrp.peers.first(), addresses.first()) {
        (Some(peer), _) => peer.is_ipv6(),
        (None, Some(first)) => first.ip.is_ipv6(),
        (None, None) => false,
    };
    let (advertised, others): (Vec<_>, Vec<_>) =
        addresses.iter().partition(|one| one.ip.is_ipv6() == v6);
    let mut advertised: Vec<String> = advertised.into_iter().map(written).collect();
    if advertised.is_empty() {
        advertised.push(match v6 {
            true => "fe80::51:51/128 dev lo".to_owned(),
            false => PLACEHOLDER.to_owned(),
        });
    }
    block("virtual_ipaddress", &advertised);
    let others: Vec<String> = others.into_iter().map(written).collect();
    block("virtual_ipaddress_excluded", &others);
    text.push_str("}\n");
    Ok(text)
}

fn written(address: &HostAddress) -> String {
    let mut text = format!("{}/{}", address.ip, address.len);
    if let Some(device) = &address.device {
        let _ = write!(text, " dev {device}");
    }
    text
}

/// Formats seconds with two decimals, the precision of VRRP.
fn seconds(time: std::time::Duration) -> String {
    format!("{}.{:02}", time.as_secs(), time.subsec_millis() / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(vrrp: &str, vip: &str) -> String {
        let text = format!(
            "[vrrp]\ninterface = \"eth0\"\nrouter_id = 51\n{vrrp}\n[[service]]\naddress = \"192.0.2.10:80\"\nvip = \"{vip}\"\n\
             forward = \"nat\"\n[[service.server]]\naddress = \"10.0.0.11:80\"\n"
        );
        let (config, _) = Config::from_toml("x.toml", &text).expect("the file is valid");
        super::text(&config, &config.services).expect("the file has [vrrp]")
    }

    #[test]
    fn keepalived_config_contains_addresses_of_host_and_peers_but_no_vip_of_dataplane() {
        let text = made(
            "host_addresses = [\"10.0.0.254/24 dev eth1\", \"fd00::fe/64 dev eth1\"]",
            "host",
        );
        for words in [
            "    advert_int 0.30\n",
            "    virtual_ipaddress {\n        10.0.0.254/24 dev eth1\n        192.0.2.10/32\n    }\n",
            "    virtual_ipaddress_excluded {\n        fd00::fe/64 dev eth1\n    }\n",
            "    init_file -254\n",
            "vrrp_notify_fifo /run/lvs/vrrp.fifo\n",
        ] {
            assert!(text.contains(words), "no {words:?} in:\n{text}");
        }
        let own = made("peers = \"192.0.2.2\"", "own");
        assert!(
            own.contains(PLACEHOLDER) && !own.contains("192.0.2.10"),
            "no {PLACEHOLDER:?} or unexpected `192.0.2.10` in {own}"
        );
        assert!(
            own.contains("unicast_peer {\n        192.0.2.2\n"),
            "no `unicast_peer {{ 192.0.2.2` in {own}"
        );
    }

    #[test]
    fn keepalived_config_without_vrrp_table_is_an_error() {
        let why = text(&Config::default(), &[]).unwrap_err();
        assert!(why.contains("no [vrrp]"), "no `no [vrrp]` in {why}");
    }
}
