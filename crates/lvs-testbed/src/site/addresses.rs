//! Links, addresses and routes of a site.

use std::fmt::Write as _;

use anyhow::Result;

use super::{Forward, Site, SiteOptions, Topology, Vip};
use crate::netns::{Host, Link};

/// The scripts that set up the hosts.
impl Site {
    pub(super) fn client_script(&self) -> Result<String> {
        let options = &self.options;
        let (client, gateway) = match options.topology {
            Topology::TwoArm => ("192.0.2.100", "192.0.2.1"),
            Topology::OneArm | Topology::Routed => ("198.51.100.100", "198.51.100.1"),
        };
        let mut script = interfaces(&["eth0"], options);
        write!(
            script,
            "{}",
            batch(&[
                format!("addr add {client}/24 dev eth0"),
                format!("route add default via {gateway}"),
                format!("addr add {}/64 dev eth0 nodad", six(client)),
                format!("route add default via {}", six(gateway))
            ])
        )?;
        Ok(script)
    }

    pub(super) fn director_script(&self) -> Result<String> {
        let options = &self.options;
        let (vip, vip6) = (self.vip, self.vip6);
        let arms: &[&str] = if options.topology == Topology::TwoArm {
            &["eth0", "eth1"]
        } else {
            &["eth0"]
        };
        let mut script = interfaces(arms, options);
        let mut commands = vec![
            "addr add 192.0.2.1/24 dev eth0".to_owned(),
            "addr add fd00:192::1/64 dev eth0 nodad".to_owned(),
        ];
        match options.topology {
            Topology::TwoArm => {
                commands.push("addr add 10.0.0.1/24 dev eth1".to_owned());
                commands.push("addr add fd00:10::1/64 dev eth1 nodad".to_owned());
            }
            Topology::OneArm | Topology::Routed => {
                commands.push("route add default via 192.0.2.254".to_owned());
                commands.push("route add default via fd00:192::254".to_owned());
            }
        }
        if options.vip == Vip::Host {
            commands.push(format!("addr add {vip6}/128 dev eth0 nodad"));
            commands.push(format!("addr add {vip}/32 dev eth0"));
        }
        if options.others > 0 {
            script.push_str("ip link set eth1 up\n");
            commands.push("addr add 10.9.0.1/24 dev eth1".to_owned());
        }
        write!(script, "{}", batch(&commands))?;
        script.push_str("echo 0 > /proc/sys/net/ipv4/conf/all/send_redirects\n");
        script
            .push_str("for i in /proc/sys/net/ipv4/conf/*/send_redirects; do echo 0 > $i; done\n");
        writeln!(
            script,
            "echo {} > /proc/sys/net/ipv4/ip_forward",
            u8::from(options.ip_forward)
        )?;
        Ok(script)
    }

    /// Returns the director's script with the standby director's own addresses, and without the
    /// VIPs, which move between directors.
    pub(super) fn standby_script(&self) -> Result<String> {
        let script = self.director_script()?;
        let moves = |line: &&str| {
            let vips = [format!("{}/32", self.vip), format!("{}/128", self.vip6)];
            !vips.iter().any(|vip| line.contains(vip))
        };
        let kept: Vec<&str> = script.lines().filter(moves).collect();
        let script = kept.join("\n") + "\n";
        Ok(script
            .replace("192.0.2.1/", "192.0.2.2/")
            .replace("10.0.0.1/", "10.0.0.2/")
            .replace("::1/64", "::2/64"))
    }

    /// Returns the script that configures director `number` with its own addresses.
    pub(super) fn other_script(&self, number: usize) -> Result<String> {
        let script = self.director_script()?;
        Ok(script
            .replace("192.0.2.1/", &format!("192.0.2.{number}/"))
            .replace("10.9.0.1/", &format!("10.9.0.{number}/"))
            .replace("::1/64", &format!("::{number}/64")))
    }

    pub(super) fn router_script(&self) -> Result<String> {
        let options = &self.options;
        let (vip, vip6) = (self.vip, self.vip6);
        let arms: &[&str] = if options.topology == Topology::Routed {
            &["eth0", "eth1", "eth2"]
        } else {
            &["eth0", "eth1"]
        };
        let mut script = interfaces(arms, options);
        let mut commands = vec![
            "addr add 198.51.100.1/24 dev eth0".to_owned(),
            "addr add 192.0.2.254/24 dev eth1".to_owned(),
            "addr add fd00:198::1/64 dev eth0 nodad".to_owned(),
            "addr add fd00:192::254/64 dev eth1 nodad".to_owned(),
        ];
        if options.topology == Topology::Routed {
            commands.push("addr add 10.0.0.254/24 dev eth2".to_owned());
            commands.push("addr add fd00:10::254/64 dev eth2 nodad".to_owned());
        }
        if options.vip == Vip::Routed {
            commands.push(format!("route add {vip}/32 via 192.0.2.1"));
            commands.push(format!("route add {vip6}/128 via fd00:192::1"));
        }
        write!(script, "{}", batch(&commands))?;
        script
            .push_str("for i in /proc/sys/net/ipv4/conf/*/send_redirects; do echo 0 > $i; done\n");
        script.push_str("echo 1 > /proc/sys/net/ipv4/ip_forward\n");
        script.push_str("echo 1 > /proc/sys/net/ipv6/conf/all/forwarding\n");
        Ok(script)
    }

    pub(super) fn server_script(&self, index: usize) -> Result<String> {
        let options = &self.options;
        let (vip, vip6) = (self.vip, self.vip6);
        let mut script = interfaces(&["eth0"], options);
        let gateway = match (options.topology, options.forward) {
            (Topology::TwoArm, _) => "10.0.0.1",
            (Topology::OneArm, Forward::Nat) => "192.0.2.1",
            (Topology::OneArm, _) => "192.0.2.254",
            (Topology::Routed, _) => "10.0.0.254",
        };
        let mut commands = vec![
            format!("addr add {}/24 dev eth0", self.real_address(index)),
            format!("route add default via {gateway}"),
            format!("addr add {}/64 dev eth0 nodad", self.real_address6(index)),
            format!("route add default via {}", six(gateway)),
        ];
        if options.forward.shares_vip() {
            // The setting must exist before the address appears and the host announces it.
            for path in ["all", "default", "eth0", "lo"] {
                writeln!(script, "echo 1 > /proc/sys/net/ipv4/conf/{path}/arp_ignore")?;
                writeln!(
                    script,
                    "echo 2 > /proc/sys/net/ipv4/conf/{path}/arp_announce"
                )?;
            }
            commands.push(format!("addr add {vip}/32 dev lo"));
            commands.push(format!("addr add {vip6}/128 dev lo nodad"));
        }
        write!(script, "{}", batch(&commands))?;
        Ok(script)
    }
}

/// Returns the site's IPv6 address for an IPv4 address.
pub(super) fn six(addr: &str) -> String {
    let (net, host) = addr.rsplit_once('.').unwrap_or(("", addr));
    let net = net.split('.').next().unwrap_or_default();
    format!("fd00:{net}::{host}")
}

pub(super) fn links<'a>(
    options: &SiteOptions,
    client: &'a Host,
    directors: &[&'a Host],
    router: Option<&'a Host>,
    servers: &'a [Host],
) -> Vec<Link<'a>> {
    let mtu = options.mtu;
    let with = |mut ports: Vec<(&'a Host, &'a str)>| {
        ports.extend(servers.iter().map(|server| (server, "eth0")));
        ports
    };
    let and_all = |mut ports: Vec<(&'a Host, &'static str)>, device: &'static str| {
        ports.extend(directors.iter().map(|&director| (director, device)));
        ports
    };
    let mut links = match (options.topology, router) {
        (Topology::TwoArm, _) | (_, None) => vec![
            Link::Lan {
                name: "front",
                ports: and_all(vec![(client, "eth0")], "eth0"),
                mtu,
            },
            Link::Lan {
                name: "back",
                ports: with(and_all(vec![], "eth1")),
                mtu,
            },
        ],
        (Topology::OneArm, Some(router)) => vec![
            Link::Cable {
                a: (client, "eth0"),
                b: (router, "eth0"),
                mtu,
            },
            Link::Lan {
                name: "lan",
                ports: with(and_all(vec![(router, "eth1")], "eth0")),
                mtu,
            },
        ],
        (Topology::Routed, Some(router)) => vec![
            Link::Cable {
                a: (client, "eth0"),
                b: (router, "eth0"),
                mtu,
            },
            if directors.len() > 1 {
                Link::Lan {
                    name: "front",
                    ports: and_all(vec![(router, "eth1")], "eth0"),
                    mtu,
                }
            } else {
                Link::Cable {
                    a: (router, "eth1"),
                    b: (directors[0], "eth0"),
                    mtu,
                }
            },
            Link::Lan {
                name: "back",
                ports: with(vec![(router, "eth2")]),
                mtu,
            },
        ],
    };
    if options.others > 0 {
        links.push(Link::Lan {
            name: "sync",
            ports: and_all(vec![], "eth1"),
            mtu,
        });
    }
    links
}

fn interfaces(names: &[&str], options: &SiteOptions) -> String {
    let mut script = String::new();
    for name in names {
        let _ = writeln!(script, "ip link set {name} up");
        if !options.offloads {
            let _ = writeln!(
                script,
                "ethtool -K {name} tx off sg off tso off gso off gro off > /dev/null"
            );
        }
    }
    script
}

fn batch(commands: &[String]) -> String {
    format!("ip -batch - <<END\n{}\nEND\n", commands.join("\n"))
}
