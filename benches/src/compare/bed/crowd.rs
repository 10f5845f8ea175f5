//! Replaces the single client and the single server of a bed by many.
//!
//! ```text
//! client-1 ─┐                                                ┌─ server-1
//! client-2 ─┼─ bridge c… ──── d… director e… ──── s… bridge ─┼─ server-2
//!    …      │       x…                                y…     │     …
//!           └────────└──── direct routing and tunnels: ┘─────┘
//!                          the servers' answers
//! ```
//!
//! The bridges are the hosts that were client and server. All neighbour entries are static, so that
//! no host sends ARP requests.

use std::fmt::Write as _;
use std::process::Command;

use anyhow::{Context, Result};
use lvs_testbed::decap;
use lvs_testbed::netns::run_with_input;

use super::{BACK_MAC, Bed, Contender, FRONT_MAC, Method, VIP, receiver};

/// The address of a server, by its number from 0.
pub(crate) fn server_address(server: usize) -> String {
    format!("10.72.0.{}", 11 + server)
}

fn client_mac(client: usize) -> String {
    format!("02:00:00:00:0c:{:02x}", 16 + client)
}

fn server_mac(server: usize) -> String {
    format!("02:00:00:00:05:{:02x}", 16 + server)
}

/// MAC address of a server's second interface, from which it sends replies.
fn answer_mac(server: usize) -> String {
    format!("02:00:00:00:06:{:02x}", 16 + server)
}

impl Bed {
    /// Replaces the single client and the single server by several, in `clients` and `servers`.
    /// With direct routing and tunnels, each server sends replies over a separate link. With
    /// tunnels, each server also unpacks tunnel packets.
    pub(crate) fn spread(&mut self, clients: usize, servers: usize) -> Result<()> {
        let names = |what: &str, count: usize| -> Vec<String> {
            (1..=count)
                .map(|number| format!("{what}-{number}"))
                .collect()
        };
        self.clients = self.testbed.hosts_named(&names("client", clients))?;
        self.servers = self.testbed.hosts_named(&names("server", servers))?;
        let (direct, answers) = (self.who == Contender::Direct, self.answers_directly());
        self.lay_crowds_cables(answers)?;
        let mut scripts = vec![
            (&self.client, self.front_script(answers)?),
            (&self.server, self.back_script(answers)?),
        ];
        for (client, host) in self.clients.iter().enumerate() {
            scripts.push((host, self.client_script(client)?));
        }
        for (server, host) in self.servers.iter().enumerate() {
            scripts.push((host, self.server_script(server, answers)?));
        }
        if !direct {
            let mut script = String::new();
            let [_, d, e, _] = &self.devices;
            for client in 0..clients {
                let (address, mac) = (client_address(client), client_mac(client));
                writeln!(
                    script,
                    "ip neigh replace {address} lladdr {mac} dev {d} nud permanent"
                )?;
            }
            for server in 0..servers {
                let (address, mac) = (server_address(server), server_mac(server));
                writeln!(
                    script,
                    "ip neigh replace {address} lladdr {mac} dev {e} nud permanent"
                )?;
            }
            scripts.push((&self.director, script));
        }
        self.testbed.configure(&scripts)?;
        self.receive_by_threads()?;
        if self.is_tunnel() {
            for host in &self.servers {
                for process in unpack(host, "eth0")? {
                    // In the kernel, this work would be a part of receiving.
                    first("-ap", process.pid())?;
                    let words = ["-apc", "0", &process.pid().to_string()];
                    run_with_input(Command::new("taskset").args(words), "")?;
                    self.endpoints.push(process);
                }
            }
        }
        Ok(())
    }

    /// Makes the receiving threads, not the sending ones, receive the packets of the veth devices;
    /// for this, the sending devices must not send super-packets. The receiving threads have
    /// precedence, as interrupts have, because clients that poll without pause would delay them.
    fn receive_by_threads(&self) -> Result<()> {
        let [c, d, e, s] = &self.devices;
        let mut ends = vec![(&self.client, c), (&self.server, s)];
        if self.who != Contender::Direct {
            ends.extend([(&self.director, d), (&self.director, e)]);
        }
        for (host, device) in ends {
            host.sh(&format!("ethtool -K {device} tso off"))?;
            first("-p", receiver(device)?)?;
        }
        Ok(())
    }

    /// Whether the servers send replies past the director.
    pub(super) fn answers_directly(&self) -> bool {
        self.who
            .method()
            .is_some_and(|method| method != Method::Nat)
    }

    pub(super) fn is_tunnel(&self) -> bool {
        self.who.method() == Some(Method::Tunnel)
    }

    /// The devices at both ends of the link for replies.
    fn answer_line(&self) -> (String, String) {
        let name = &self.devices[0][1..];
        (format!("x{name}"), format!("y{name}"))
    }

    fn lay_crowds_cables(&self, answers: bool) -> Result<()> {
        let mut cables = String::new();
        let (front, back) = (self.client.pid(), self.server.pid());
        for (client, host) in self.clients.iter().enumerate() {
            writeln!(
                cables,
                "link add eth0 address {} netns {} type veth peer name p{client} netns {front}",
                client_mac(client),
                host.pid()
            )?;
        }
        for (server, host) in self.servers.iter().enumerate() {
            writeln!(
                cables,
                "link add eth0 address {} netns {} type veth peer name q{server} netns {back}",
                server_mac(server),
                host.pid()
            )?;
            if answers {
                writeln!(
                    cables,
                    "link add eth1 address {} netns {} type veth peer name r{server} netns {back}",
                    answer_mac(server),
                    host.pid()
                )?;
            }
        }
        run_with_input(Command::new("ip").args(["-batch", "-"]), &cables)
            .context("cannot create the veth pairs")
            .map(drop)
    }

    /// Makes a bridge of the host that was the client. With `answers`, the bridge also has the link
    /// for replies.
    fn front_script(&self, answers: bool) -> Result<String> {
        let c = &self.devices[0];
        let mut script = bridge("br0", c);
        for client in 0..self.clients.len() {
            script += &port("br0", &format!("p{client}"), &client_mac(client));
        }
        if self.who == Contender::Direct {
            for server in 0..self.servers.len() {
                script += &known(c, &server_mac(server));
            }
        } else {
            script += &known(c, FRONT_MAC);
        }
        if answers {
            let (x, _) = self.answer_line();
            writeln!(script, "ip addr flush dev {x}\nip link set {x} master br0")?;
            for server in 0..self.servers.len() {
                script += &known(&x, &answer_mac(server));
            }
        }
        Ok(script)
    }

    /// Makes a bridge of the host that was the server. With `answers`, the host has a second bridge
    /// for replies.
    fn back_script(&self, answers: bool) -> Result<String> {
        let s = &self.devices[3];
        let mut script = bridge("br0", s);
        for server in 0..self.servers.len() {
            script += &port("br0", &format!("q{server}"), &server_mac(server));
        }
        if self.who == Contender::Direct {
            for client in 0..self.clients.len() {
                script += &known(s, &client_mac(client));
            }
        } else {
            script += &known(s, BACK_MAC);
            writeln!(script, "ip addr del {VIP}/32 dev lo")?;
        }
        if answers {
            let (_, y) = self.answer_line();
            script += &bridge("br1", &y);
            for client in 0..self.clients.len() {
                script += &known(&y, &client_mac(client));
            }
            for server in 0..self.servers.len() {
                script += &port("br1", &format!("r{server}"), &answer_mac(server));
            }
        }
        Ok(script)
    }

    fn client_script(&self, client: usize) -> Result<String> {
        let mut script = end("eth0", &format!("{}/24", client_address(client)));
        if self.who == Contender::Direct {
            script += "ip route add 10.72.0.0/24 dev eth0\n";
            for server in 0..self.servers.len() {
                script += &neighbour("eth0", &server_address(server), &server_mac(server));
            }
        } else {
            script += &neighbour("eth0", "10.71.0.1", FRONT_MAC);
            script += "ip route add default via 10.71.0.1\n";
        }
        Ok(script)
    }

    fn server_script(&self, server: usize, answers: bool) -> Result<String> {
        let mut script = end("eth0", &format!("{}/24", server_address(server)));
        let mut to_clients = "eth0";
        if self.who != Contender::Direct {
            script += &neighbour("eth0", "10.72.0.1", BACK_MAC);
            writeln!(
                script,
                "ip route add default via 10.72.0.1\nip addr add {VIP}/32 dev lo"
            )?;
        } else {
            script += "ip route add 10.71.0.0/24 dev eth0\n";
        }
        if answers {
            to_clients = "eth1";
            script += &end("eth1", &format!("10.71.0.{}/24", 101 + server));
        }
        if answers || self.who == Contender::Direct {
            for client in 0..self.clients.len() {
                script += &neighbour(to_clients, &client_address(client), &client_mac(client));
            }
        }
        Ok(script)
    }
}

fn client_address(client: usize) -> String {
    format!("10.71.0.{}", 2 + client)
}

/// Configures an interface of an endpoint, and the sysctls of an endpoint that opens many
/// connections.
fn end(device: &str, address: &str) -> String {
    format!(
        "sysctl -qw net.ipv4.ip_local_port_range='1024 65535' net.ipv4.tcp_tw_reuse=1 net.core.somaxconn=8192 \
         net.ipv4.tcp_max_syn_backlog=8192 net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0 \
         net.ipv4.conf.{device}.rp_filter=0\n\
         ip link set lo up\nip addr add {address} dev {device}\nip link set {device} up\n"
    )
}

fn neighbour(device: &str, address: &str, mac: &str) -> String {
    format!("ip neigh replace {address} lladdr {mac} dev {device} nud permanent\n")
}

/// Creates a bridge, and adds the device of its outgoing link.
fn bridge(name: &str, device: &str) -> String {
    format!(
        "ip link add {name} type bridge stp_state 0 forward_delay 0 mcast_snooping 0\nip addr flush dev {device}\n\
         ip link set {device} master {name}\nip link set {name} up\n"
    )
}

fn port(bridge: &str, device: &str, mac: &str) -> String {
    format!("ip link set {device} master {bridge}\nip link set {device} up\n") + &known(device, mac)
}

/// Adds a static entry for a MAC address to a bridge, which never learns the address of a host that
/// sends no replies through it.
fn known(device: &str, mac: &str) -> String {
    format!("bridge fdb replace {mac} dev {device} master static\n")
}

/// Gives a thread (`-p`), or all threads of a process (`-ap`), real-time scheduling.
fn first(of: &str, pid: u32) -> Result<()> {
    let words = ["-f", of, "50", &pid.to_string()];
    run_with_input(Command::new("chrt").args(words), "").map(drop)
}

/// Makes a server accept tunnel packets on an interface. Returns the processes that unpack them;
/// none if the kernel does.
pub(super) fn unpack(host: &lvs_testbed::Host, device: &str) -> Result<Vec<lvs_testbed::Proc>> {
    let kernels = "ip link add ipip9 type ipip local any remote any 2>/dev/null\nip link set ipip9 up\n\
                   sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.ipip9.rp_filter=0";
    if host.sh(kernels).is_ok() {
        return Ok(Vec::new());
    }
    // `decap` unpacks fragments, after the kernel has reassembled them; without tcx, all packets.
    let mut unpacks = vec![decap::start(host)?];
    let own = std::env::current_exe()?.display().to_string();
    let whole = host.spawn(&own, &["endpoint", "unpack", device])?;
    unpacks.extend(super::ready(whole));
    Ok(unpacks)
}
