//! `lvsadm realserver-setup`: the commands that make a host a real server.

use std::fmt::Write as _;
use std::net::IpAddr;

use super::{Outcome, Trouble, Words};
use crate::program::Invocation;

pub(super) fn run(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    let mut vips: Vec<IpAddr> = Vec::new();
    for word in &words.free {
        let vip = word.parse().map_err(|_| {
            Trouble::Usage(format!("{word}: expected a virtual address without a port"))
        })?;
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

/// The VIPs on `device`, or off it.
fn addresses(text: &mut String, vips: &[IpAddr], device: &str, undo: bool) {
    for vip in vips {
        let (family, bits) = match vip {
            IpAddr::V4(_) => ("", 32),
            // Nobody asks whether somebody else has it: the director does.
            IpAddr::V6(_) => ("-6 ", 128),
        };
        let _ = match (undo, vip) {
            (true, _) => writeln!(text, "ip {family}address del {vip}/{bits} dev {device}"),
            (false, IpAddr::V4(_)) => writeln!(
                text,
                "ip {family}address add {vip}/{bits} dev {device} scope host"
            ),
            (false, IpAddr::V6(_)) => {
                writeln!(
                    text,
                    "ip {family}address add {vip}/{bits} dev {device} nodad preferred_lft 0"
                )
            }
        };
    }
}

/// Nobody but the director may answer ARP for the VIPs.
fn arp(text: &mut String, undo: bool) {
    let (ignore, announce) = if undo { (0, 0) } else { (1, 2) };
    let _ = writeln!(
        text,
        "sysctl -w net.ipv4.conf.all.arp_ignore={ignore} net.ipv4.conf.all.arp_announce={announce}"
    );
}

fn dr(vips: &[IpAddr], undo: bool) -> String {
    let mut text =
        String::from("# Direct routing: the server has the VIPs, and does not tell anybody.\n");
    if !undo {
        arp(&mut text, undo);
    }
    addresses(&mut text, vips, "lo", undo);
    if undo {
        arp(&mut text, undo);
    }
    text
}

fn tun(vips: &[IpAddr], tunnel: &str, port: u16, undo: bool) -> Result<String, Trouble> {
    let v4 = vips.iter().any(IpAddr::is_ipv4);
    let v6 = vips.iter().any(IpAddr::is_ipv6);
    let mut text = String::from(
        "# Tunnelling: the server unpacks what the director sends, and has the VIPs.\n",
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
            let listen = format!("modprobe fou\nip fou add port {port} gue\n");
            let end = format!("ip fou del port {port}\n");
            add(
                "tunl0",
                format!("{listen}modprobe ipip\nip link set tunl0 up\n"),
                format!("ip link set tunl0 down\n{end}"),
            );
        }
        other => {
            return Err(Trouble::Usage(format!(
                "--tunnel {other}: expected ipip, gre or gue"
            )));
        }
    }
    let first = devices.first().map_or("lo", |(device, ..)| *device);
    if undo {
        addresses(&mut text, vips, "lo", true);
        for (_, _, unmake) in devices.iter().rev() {
            text.push_str(unmake);
        }
        arp(&mut text, true);
        return Ok(text);
    }
    for (_, make, _) in &devices {
        text.push_str(make);
    }
    arp(&mut text, false);
    for (device, ..) in &devices {
        // What comes out of the tunnel comes from clients, which are elsewhere.
        let _ = writeln!(
            text,
            "sysctl -w net.ipv4.conf.{}.rp_filter=0",
            device.replace('.', "/")
        );
    }
    if !devices.is_empty() {
        let _ = writeln!(
            text,
            "sysctl -w net.ipv4.conf.all.rp_filter=0   # the larger of both counts for {first}"
        );
    }
    addresses(&mut text, vips, "lo", false);
    text.push_str("# The path to the server must carry packets that are larger by the tunnel's header, or its MTU be lower.\n");
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
            "ip {family}route del default via {gateway}   # and add the route that was there before"
        ),
    };
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vips(all: &[&str]) -> Vec<IpAddr> {
        all.iter()
            .map(|vip| vip.parse().expect("an address"))
            .collect()
    }

    #[test]
    fn arp_is_silenced_before_the_address_is_there_and_after_it_has_gone() {
        let text = dr(&vips(&["192.0.2.10", "2001:db8::10"]), false);
        let (arp, address) = (text.find("arp_ignore=1"), text.find("192.0.2.10/32 dev lo"));
        assert!(arp.is_some() && arp < address, "{text}");
        assert!(
            text.contains("-6 address add 2001:db8::10/128 dev lo nodad"),
            "{text}"
        );
        let text = dr(&vips(&["192.0.2.10"]), true);
        let (arp, address) = (
            text.find("arp_ignore=0"),
            text.find("address del 192.0.2.10/32"),
        );
        assert!(address.is_some() && address < arp, "{text}");
    }

    #[test]
    fn each_tunnel_has_its_device() {
        for (tunnel, words) in [
            ("ipip", "ip link set tunl0 up"),
            ("gre", "type gre external"),
            ("gue", "ip fou add port 6080 gue"),
        ] {
            let text = tun(&vips(&["192.0.2.10"]), tunnel, 6080, false).expect("a tunnel");
            assert!(text.contains(words), "{text}");
        }
        assert!(tun(&vips(&["192.0.2.10"]), "vxlan", 1, false).is_err());
        assert!(nat(None, false).is_err() && nat(Some("x"), false).is_err());
        assert!(
            nat(Some("10.0.0.1"), false)
                .expect("a gateway")
                .contains("default via 10.0.0.1")
        );
    }
}
