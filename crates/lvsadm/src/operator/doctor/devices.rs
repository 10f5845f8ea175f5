//! The devices that packets of services pass between the network and the dataplane's packet
//! sockets: the interfaces that the dataplane uses, and the devices below these.
//!
//! ```text
//!  network ─▶ XDP ─▶ eth0 ─▶ packet socket ─▶ tc, netdev chains ─▶ the host
//!  network ─▶ XDP ─▶ eth0 ─────────────────▶ tc, netdev chains ─▶ eth0.100 ─▶ packet socket     (VLAN)
//! ```

use serde_json::Value;

/// A device whose filters may hide packets from the dataplane, or drop packets that the dataplane
/// sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Device {
    pub(super) name: String,
    /// The device with the packet socket, if its incoming packets pass this device first.
    pub(super) above: Option<String>,
    /// Names of XDP programs, as far as the kernel reports them.
    pub(super) xdp: Vec<String>,
}

/// Returns the devices of a dataplane with these ports, each port before the devices below it.
/// `links` is the output of `ip -j -d link show`.
pub(super) fn all(ports: &[&str], links: &str) -> Vec<Device> {
    let links: Value = serde_json::from_str(links).unwrap_or_default();
    let links = links.as_array().map_or(&[][..], Vec::as_slice);
    let mut devices: Vec<Device> = Vec::new();
    for port in ports {
        let mut next = vec![((*port).to_owned(), None)];
        while let Some((name, above)) = next.pop() {
            let known = |device: &Device| device.name == name && device.above == above;
            if devices.iter().any(known) {
                continue;
            }
            let link = links.iter().find(|link| link["ifname"] == *name);
            let below = link.map(|link| below(link, links)).unwrap_or_default();
            next.extend(
                below
                    .into_iter()
                    .map(|lower| (lower, Some((*port).to_owned()))),
            );
            devices.push(Device {
                xdp: link.map(programs).unwrap_or_default(),
                name,
                above,
            });
        }
    }
    devices
}

/// The devices from which the kernel passes incoming frames to this device.
fn below(link: &Value, links: &[Value]) -> Vec<String> {
    match link["linkinfo"]["info_kind"].as_str().unwrap_or_default() {
        "vlan" | "macvlan" | "ipvlan" => {
            let lower = link["link"].as_str().map(str::to_owned);
            lower.into_iter().collect()
        }
        "bond" | "team" => {
            let ports = links.iter().filter(|port| port["master"] == link["ifname"]);
            let names = ports.map(|port| port["ifname"].as_str().unwrap_or_default().to_owned());
            names.collect()
        }
        _ => Vec::new(),
    }
}

/// The XDP programs of a device.
fn programs(link: &Value) -> Vec<String> {
    // A driver program, a generic program and a program in the network card can be attached at the
    // same time.
    let attached = link["xdp"]["attached"].as_array();
    let attached = attached.map_or(&[][..], Vec::as_slice);
    let one = std::slice::from_ref(&link["xdp"]);
    let all = if attached.is_empty() { one } else { attached };
    let programs = all.iter().map(|place| &place["prog"]);
    let names = programs
        .filter(|program| !program.is_null())
        .map(|program| {
            let name = program["name"].as_str().unwrap_or_default();
            match program["id"].as_u64() {
                Some(id) if name.is_empty() => format!("number {id}"),
                _ => name.to_owned(),
            }
        });
    names.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINKS: &str = r#"[{},
        {"ifname": "eth0", "link": "peer", "linkinfo": {"info_kind": "veth"},
         "xdp": {"mode": 1, "prog": {"id": 7, "name": "filter"}, "attached": [{"mode": 1, "prog": {"id": 7, "name": "filter"}}]}},
        {"ifname": "peer", "link": "eth0", "linkinfo": {"info_kind": "veth"}},
        {"ifname": "eth0.200", "link": "eth0", "linkinfo": {"info_kind": "vlan"}},
        {"ifname": "bond0", "linkinfo": {"info_kind": "bond"}},
        {"ifname": "bond0.3", "link": "bond0", "linkinfo": {"info_kind": "vlan"}},
        {"ifname": "eth1", "master": "bond0", "xdp": {"mode": 2, "prog": {"id": 8}}},
        {"ifname": "eth2", "master": "bond0",
         "xdp": {"mode": 4, "attached": [{"mode": 1, "prog": {"id": 3, "name": "a"}}, {"mode": 2, "prog": {"id": 4, "name": "b"}}]}},
        {"ifname": "vnet.7", "linkinfo": {"info_kind": "tun"}}]"#;

    fn answer(ports: &[&str]) -> Vec<String> {
        let all = all(ports, LINKS).into_iter();
        all.map(|Device { name, above, xdp }| {
            let above = above.unwrap_or_else(|| "-".to_owned());
            format!("{name} {above} {}", xdp.join("+"))
        })
        .collect()
    }

    #[test]
    fn doctor_examines_devices_below_interfaces() {
        // The other end of a veth pair is not below the interface.
        assert_eq!(answer(&["eth0"]), ["eth0 - filter"]);
        assert_eq!(
            answer(&["eth0.200"]),
            ["eth0.200 - ", "eth0 eth0.200 filter"]
        );
        assert_eq!(
            answer(&["bond0.3"]),
            [
                "bond0.3 - ",
                "bond0 bond0.3 ",
                "eth2 bond0.3 a+b",
                "eth1 bond0.3 number 8"
            ]
        );
        assert_eq!(answer(&["vnet.7"]), ["vnet.7 - "]);
        assert_eq!(answer(&["gone"]), ["gone - "]);
        assert_eq!(all(&["eth0"], "").len(), 1);
    }
}
