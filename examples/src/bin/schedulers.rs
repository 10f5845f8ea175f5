//! Prints the server that each scheduler chooses for each of twelve connections from twelve
//! clients, without packets.
//!
//! ```text
//! cargo run -p lvs-examples --bin schedulers
//! ```

use lvs_core::{
    Forwarding, Instant, OpenConnection, Pool, Protocol, Registry, Request, ServerConfig,
    ServiceFlags,
};

fn main() -> Result<(), lvs_core::Error> {
    // The weights are 3, 2 and 1. As in the kernel, the last added server is the first in the list.
    let servers = [
        ("a", "10.0.0.1:80", 3),
        ("b", "10.0.0.2:80", 2),
        ("c", "10.0.0.3:80", 1),
    ];
    let registry = Registry::new();
    for name in registry.names() {
        let Some(scheduler) = registry.create(name) else {
            continue;
        };
        let mut pool = Pool::new(scheduler);
        for (_, addr, weight) in servers {
            let addr = addr.parse().expect("the address is valid");
            pool.insert(addr, &ServerConfig::new(weight, Forwarding::Nat))?;
        }
        // The scheduler counts a connection for its server while this list contains it.
        let mut open: Vec<OpenConnection> = Vec::new();
        let mut picks = String::new();
        for client in 1..=12 {
            let request = Request {
                client: ([192, 0, 2, client], 40_000).into(),
                virt: ([198, 51, 100, 1], 80).into(),
                protocol: Protocol::TCP,
                flags: ServiceFlags::default(),
                now: Instant::ZERO,
            };
            picks.push_str(match pool.pick(&request) {
                None => "-",
                Some(server) => {
                    open.push(server.open());
                    let addr = server.addr().to_string();
                    servers
                        .iter()
                        .find(|(_, a, _)| *a == addr)
                        .map_or("?", |(name, ..)| name)
                }
            });
        }
        println!("{name:<6} {picks}");
    }
    Ok(())
}
