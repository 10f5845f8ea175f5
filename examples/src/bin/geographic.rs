//! A custom scheduler: clients are sent to the servers of their region, if one of these is
//! available.
//!
//! ```text
//! cargo run -p lvs-examples --bin geographic
//! ```
//!
//! `Geographic` implements the public trait [`Scheduler`] and is registered under the name `geo`.
//! Services then use it like any other scheduler, with weights, quiescing, thresholds, slow starts,
//! persistence, listings and `explain`. This example shows it with a director that receives no
//! packets. A program that embeds the dataplane passes the same [`Registry`] to
//! `lvs_dataplane::dataplane::Config::schedulers`; `lvsadm -A ... -s geo` then works.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use lvs_core::sched::WeightedLeastConnections;
use lvs_core::{
    Director, Family, Forwarding, Hook, Instant, Options, PacketMeta, Registry, Request, Scheduler,
    Server, ServerConfig, ServiceConfig, ServiceKey, TcpFlags, Verdict,
};

/// A prefix: an address, and the number of its leading bits that are compared.
#[derive(Clone, Copy, Debug)]
struct Prefix {
    addr: IpAddr,
    len: u32,
}

impl Prefix {
    /// Parses a prefix such as `192.0.2.0/24`.
    fn parse(text: &str) -> Result<Self> {
        let (addr, len) = text
            .split_once('/')
            .with_context(|| format!("{text}: expected a network, such as 192.0.2.0/24"))?;
        let prefix = Self {
            addr: addr
                .parse()
                .with_context(|| format!("{addr} is not an address"))?,
            len: len
                .parse()
                .with_context(|| format!("{len} is not a prefix length"))?,
        };
        if prefix.len > u32::from(Family::of(&prefix.addr).bits()) {
            bail!("{text}: the prefix is longer than the address");
        }
        Ok(prefix)
    }

    fn contains(&self, addr: IpAddr) -> bool {
        match (self.addr, addr) {
            (IpAddr::V4(net), IpAddr::V4(addr)) => {
                let differ = net.to_bits() ^ addr.to_bits();
                differ.checked_shr(32 - self.len).unwrap_or(0) == 0
            }
            (IpAddr::V6(net), IpAddr::V6(addr)) => {
                let differ = net.to_bits() ^ addr.to_bits();
                differ.checked_shr(128 - self.len).unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

/// A region: the prefixes of its clients, and those of its servers.
#[derive(Clone, Debug)]
struct Region {
    clients: Vec<Prefix>,
    servers: Vec<Prefix>,
}

/// Chooses the least loaded available server of the client's region; without such a server or
/// region, the least loaded of all servers.
#[derive(Clone, Debug)]
struct Geographic {
    regions: Arc<[Region]>,
    /// Chooses among the servers of the region, or among all servers.
    least: WeightedLeastConnections,
}

impl Geographic {
    const fn new(regions: Arc<[Region]>) -> Self {
        Self {
            regions,
            least: WeightedLeastConnections,
        }
    }

    /// Returns the region with the longest prefix that contains `client`.
    fn region(&self, client: IpAddr) -> Option<&Region> {
        let longest = |region: &&Region| {
            let having = region.clients.iter().filter(|net| net.contains(client));
            having.map(|net| net.len).max()
        };
        let regions = self
            .regions
            .iter()
            .filter(|region| longest(region).is_some());
        regions.max_by_key(longest)
    }
}

impl Scheduler for Geographic {
    fn pick(&mut self, servers: &[Arc<Server>], request: &Request) -> Option<usize> {
        let near: Vec<usize> = match self.region(request.client.ip()) {
            None => Vec::new(),
            Some(region) => {
                let is_near = |server: &Server| {
                    let ip = server.addr().ip();
                    region.servers.iter().any(|net| net.contains(ip))
                };
                (0..servers.len())
                    .filter(|&index| is_near(&servers[index]))
                    .collect()
            }
        };
        let those: Vec<Arc<Server>> = near.iter().map(|&index| servers[index].clone()).collect();
        match self.least.pick(&those, request) {
            Some(chosen) => near.get(chosen).copied(),
            None => self.least.pick(servers, request),
        }
    }

    fn preview(&self) -> Option<Box<dyn Scheduler>> {
        Some(Box::new(self.clone()))
    }
}

fn regions() -> Result<Arc<[Region]>> {
    let region = |clients: &[&str], servers: &[&str]| -> Result<Region> {
        let all = |texts: &[&str]| -> Result<Vec<Prefix>> {
            texts.iter().map(|text| Prefix::parse(text)).collect()
        };
        Ok(Region {
            clients: all(clients)?,
            servers: all(servers)?,
        })
    };
    Ok(Arc::from([
        region(&["203.0.113.0/24"], &["10.1.0.0/16"])?,
        region(&["198.51.100.0/24"], &["10.2.0.0/16"])?,
        // A part of the first region's network that is nearer to the second region's servers.
        region(&["203.0.113.128/25"], &["10.2.0.0/16"])?,
    ]))
}

fn main() -> Result<()> {
    let regions = regions()?;
    let mut schedulers = Registry::new();
    schedulers.register("geo", move || Box::new(Geographic::new(regions.clone())));
    let mut director = Director::new(Options {
        schedulers,
        ..Options::default()
    });
    let service = ServiceKey::tcp("192.0.2.10:80".parse()?);
    let config = ServiceConfig::new(Family::V4, "geo");
    director.control.add_service(service, config, None)?;
    for server in ["10.1.0.1:80", "10.1.0.2:80", "10.2.0.1:80"] {
        let config = ServerConfig::new(1, Forwarding::Nat);
        let server = server.parse()?;
        director
            .control
            .add_server(&service, server, &config, Instant::ZERO)?;
    }
    let clients = [
        "203.0.113.7",
        "203.0.113.8",
        "203.0.113.200",
        "198.51.100.7",
        "192.0.2.77",
    ];
    show(&mut director, "as configured", &clients, 40_000)?;
    for server in ["10.1.0.1:80", "10.1.0.2:80"] {
        let drained = ServerConfig::new(0, Forwarding::Nat);
        director
            .control
            .edit_server(&service, server.parse()?, &drained)?;
    }
    show(
        &mut director,
        "with the servers of 10.1.0.0/16 drained",
        &clients,
        50_000,
    )
}

/// Opens a connection for each client, and prints the chosen server.
fn show(director: &mut Director, when: &str, clients: &[&str], port: u16) -> Result<()> {
    println!("{when}:");
    for client in clients {
        let from = SocketAddr::new(client.parse()?, port);
        let syn = PacketMeta::tcp(Hook::Local, from, "192.0.2.10:80".parse()?, TcpFlags::SYN);
        match director.handle_packet(&syn, Instant::ZERO) {
            Verdict::Forward(forward) => println!("  {client:<14} -> {}", forward.target),
            other => println!("  {client:<14} -> {other:?}"),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn geographic_prefix_contains_only_its_addresses_and_invalid_prefix_is_refused() -> Result<()> {
        for (net, addr, expected) in [
            ("10.0.0.0/8", "10.255.1.2", true),
            ("10.0.0.0/8", "11.0.0.0", false),
            ("0.0.0.0/0", "192.0.2.1", true),
            ("0.0.0.0/0", "2001:db8::1", false),
            ("192.0.2.1/32", "192.0.2.1", true),
            ("2001:db8::/32", "2001:db8:1::1", true),
            ("2001:db8::/32", "2001:db9::1", false),
        ] {
            let contains = Prefix::parse(net)?.contains(addr.parse()?);
            assert_eq!(contains, expected, "{net} {addr}");
        }
        for bad in ["10.0.0.0", "10.0.0.0/33", "x/8", "10.0.0.0/x"] {
            assert!(Prefix::parse(bad).is_err(), "{bad}");
        }
        Ok(())
    }
}
