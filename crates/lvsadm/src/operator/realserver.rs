//! `lvsadm realserver-setup`: prints the commands that make a host a real server.

use std::fmt::Write as _;
use std::net::IpAddr;

use super::{Outcome, Trouble, Words};
use crate::invocation::Invocation;

pub(super) fn run(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    let mut vips: Vec<IpAddr> = Vec::new();
    for word in &words.free {
        let vip: IpAddr = word.parse().map_err(|_| {
            Trouble::Usage(format!("{word}: expected a virtual address without a port"))
        })?;
        if !may_be_virtual(vip) {
            return Err(Trouble::Usage(format!(
                "{vip}: expected a unicast address that is neither loopback nor link-local"
            )));
        }
        if !vips.contains(&vip) {
            vips.push(vip);
        }
    }
    if vips.is_empty() {
        return Err(Trouble::Usage("expected the virtual addresses".into()));
    }
    let undo = words.has("--undo");
    let text = match words.value("--method") {
        Some("dr") => dr(&vips, undo),
        Some("tun") => tun(
            &vips,
            words.value("--tunnel").unwrap_or("ipip"),
            words.number("--port")?.unwrap_or(6080),
            undo,
        )?,
        Some("nat") => nat(words.value("--gateway"), undo)?,
        Some(other) => {
            return Err(Trouble::Usage(format!(
                "--method {other}: expected dr, tun or nat"
            )));
        }
        None => {
            return Err(Trouble::Usage(
                "--method is required: dr, tun or nat".into(),
            ));
        }
    };
    run.output.write_all(text.as_bytes())?;
    Ok(0)
}

/// Whether clients on a network can send packets to the address.
fn may_be_virtual(ip: IpAddr) -> bool {
    let link_local = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    let broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
    !(ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || broadcast || link_local)
}

/// Appends the commands that add the VIPs to `lo`, or with `undo` those that remove them.
fn addresses(text: &mut String, vips: &[IpAddr], undo: bool) {
    for vip in vips {
        let (family, bits) = match vip {
            IpAddr::V4(_) => ("", 32),
            // Without duplicate address detection, because the director has the address, too.
            IpAddr::V6(_) => ("-6 ", 128),
        };
        let _ = match (undo, vip) {
            (true, _) => writeln!(text, "ip {family}address del {vip}/{bits} dev lo"),
            (false, IpAddr::V4(_)) => writeln!(
                text,
                "ip {family}address add {vip}/{bits} dev lo scope host"
            ),
            (false, IpAddr::V6(_)) => {
                writeln!(
                    text,
                    "ip {family}address add {vip}/{bits} dev lo nodad preferred_lft 0"
                )
            }
        };
    }
}

/// Appends the settings with which only the director answers ARP for the VIPs, or with `undo` the
/// kernel's defaults. IPv6 needs no settings: an address on `lo` is not announced to neighbours.
fn arp(text: &mut String, vips: &[IpAddr], undo: bool) {
    if !vips.iter().any(IpAddr::is_ipv4) {
        return;
    }
    let (ignore, announce) = if undo { (0, 0) } else { (1, 2) };
    let _ = writeln!(
        text,
        "sysctl -w net.ipv4.conf.all.arp_ignore={ignore} net.ipv4.conf.all.arp_announce={announce}"
    );
}

fn dr(vips: &[IpAddr], undo: bool) -> String {
    let mut text = String::from(
        "# Direct routing: the server has the VIPs, and does not answer ARP for them.\n",
    );
    if !undo {
        arp(&mut text, vips, undo);
    }
    addresses(&mut text, vips, undo);
    if undo {
        arp(&mut text, vips, undo);
    }
    text
}

fn tun(vips: &[IpAddr], tunnel: &str, port: u16, undo: bool) -> Result<String, Trouble> {
    let v4 = vips.iter().any(IpAddr::is_ipv4);
    let v6 = vips.iter().any(IpAddr::is_ipv6);
    let mut text = String::from(
        "# Tunnelling: the server unpacks the tunnel packets of the director, and has the VIPs.\n",
    );
    let mut devices = Vec::new();
    let mut add =
        |device: &'static str, make: String, unmake: String| devices.push((device, make, unmake));
    match tunnel {
        "ipip" => {
            if v4 {
                add(
                    "tunl0",
                    "modprobe ipip\nip link set tunl0 up\n".into(),
                    "ip link set tunl0 down\n".into(),
                );
            }
            if v6 {
                add(
                    "ip6tnl0",
                    "modprobe ip6_tunnel\nip link set ip6tnl0 up\n".into(),
                    "ip link set ip6tnl0 down\n".into(),
                );
            }
        }
        "gre" => add(
            "lvs-gre",
            "ip link add lvs-gre type gre external\nip link set lvs-gre up\n".into(),
            "ip link del lvs-gre\n".into(),
        ),
        "gue" => {
            for (family, module, device, tunnel) in [
                ("", "fou", "tunl0", "ipip"),
                ("-6 ", "fou6", "ip6tnl0", "ip6_tunnel"),
            ] {
                if if family.is_empty() { v4 } else { v6 } {
                    add(
                        device,
                        format!(
                            "modprobe {module}\nip {family}fou add port {port} gue\nmodprobe {tunnel}\nip link set {device} up\n"
                        ),
                        format!("ip link set {device} down\nip {family}fou del port {port}\n"),
                    );
                }
            }
        }
        other => {
            return Err(Trouble::Usage(format!(
                "--tunnel {other}: expected ipip, gre or gue"
            )));
        }
    }
    let first = devices.first().map_or("lo", |(device, ..)| *device);
    if undo {
        addresses(&mut text, vips, true);
        for (_, _, unmake) in devices.iter().rev() {
            text.push_str(unmake);
        }
        arp(&mut text, vips, true);
        return Ok(text);
    }
    for (_, make, _) in &devices {
        text.push_str(make);
    }
    arp(&mut text, vips, false);
    if v4 {
        for (device, ..) in &devices {
            // Packets from the tunnel have the sources of clients, which are not reached through
            // the tunnel.
            let _ = writeln!(text, "sysctl -w net.ipv4.conf.{device}.rp_filter=0");
        }
        let _ = writeln!(
            text,
            "sysctl -w net.ipv4.conf.all.rp_filter=0   # the larger value of all and {first} applies"
        );
    }
    addresses(&mut text, vips, false);
    text.push_str("# The path to the server must have an MTU that is larger by the tunnel's header; otherwise lower the clients' MTU.\n");
    if tunnel != "gre" {
        text.push_str("# If the server is reached at an address of the other family: sit0 receives IPv6 in IPv4 (modprobe sit), ip6tnl0 IPv4 in IPv6 (modprobe ip6_tunnel).\n");
    }
    Ok(text)
}

fn nat(gateway: Option<&str>, undo: bool) -> Result<String, Trouble> {
    let mut text = String::from(
        "# NAT: the server answers through the director; it does not have the VIPs.\n",
    );
    let Some(gateway) = gateway else {
        return Err(Trouble::Usage(
            "nat needs --gateway: the director's address on the servers' network".into(),
        ));
    };
    let gateway: IpAddr = gateway
        .parse()
        .map_err(|_| Trouble::Usage(format!("--gateway {gateway}: expected an address")))?;
    let family = if gateway.is_ipv6() { "-6 " } else { "" };
    let _ = match undo {
        false => writeln!(text, "ip {family}route replace default via {gateway}"),
        true => writeln!(
            text,
            "ip {family}route del default via {gateway}   # and add the previous route again"
        ),
    };
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vips(all: &[&str]) -> Vec<IpAddr> {
        all.iter()
            .map(|vip| vip.parse().expect("the address is valid"))
            .collect()
    }

    #[test]
    fn realserver_accepts_unicast_vips_and_refuses_unusable_addresses() {
        for bad in [
            "0.0.0.0",
            "127.0.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "ff02::1",
            "fe80::1",
        ] {
            assert!(
                !may_be_virtual(bad.parse().expect("the address is valid")),
                "{bad}"
            );
        }
        for good in ["192.0.2.10", "10.0.0.1", "2001:db8::1", "fd00::1"] {
            assert!(
                may_be_virtual(good.parse().expect("the address is valid")),
                "{good}"
            );
        }
    }

    #[test]
    fn realserver_arp_settings_precede_added_address_and_follow_deleted_address() {
        let text = dr(&vips(&["192.0.2.10", "2001:db8::10"]), false);
        let (arp, address) = (text.find("arp_ignore=1"), text.find("192.0.2.10/32 dev lo"));
        assert!(arp.is_some() && arp < address, "{text}");
        assert!(
            text.contains("-6 address add 2001:db8::10/128 dev lo nodad"),
            "no `-6 address add 2001:db8::10/128 dev lo nodad` in {text}"
        );
        // ARP exists only for IPv4.
        for undo in [false, true] {
            let text = dr(&vips(&["2001:db8::10"]), undo);
            assert!(
                text.contains("/128 dev lo") && !text.contains("sysctl"),
                "undo {undo}: no `/128 dev lo`, or a `sysctl`, in {text}"
            );
        }
        let text = dr(&vips(&["192.0.2.10"]), true);
        let (arp, address) = (
            text.find("arp_ignore=0"),
            text.find("address del 192.0.2.10/32"),
        );
        assert!(address.is_some() && address < arp, "{text}");
    }

    #[test]
    fn realserver_setup_supports_known_tunnel_types_and_refuses_invalid_arguments() {
        for (tunnel, words) in [
            ("ipip", "ip link set tunl0 up"),
            ("gre", "type gre external"),
            ("gue", "ip fou add port 6080 gue"),
        ] {
            let text =
                tun(&vips(&["192.0.2.10"]), tunnel, 6080, false).expect("the tunnel type is known");
            assert!(text.contains(words), "no {words:?} in {text}");
        }
        for (tunnel, words) in [
            ("ipip", "ip link set ip6tnl0 up"),
            ("gue", "ip -6 fou add port 6080 gue"),
        ] {
            let text = tun(&vips(&["2001:db8::10"]), tunnel, 6080, false)
                .expect("the tunnel type is known");
            assert!(
                text.contains(words) && !text.contains("net.ipv4"),
                "no {words:?}, or a `net.ipv4`, in {text}"
            );
        }
        assert!(tun(&vips(&["192.0.2.10"]), "vxlan", 1, false).is_err());
        assert!(nat(None, false).is_err() && nat(Some("x"), false).is_err());
        assert!(
            nat(Some("10.0.0.1"), false)
                .expect("the gateway is valid")
                .contains("default via 10.0.0.1")
        );
    }
}
