//! The dataplane inside your own program, with a hook that receives each packet before the
//! director.
//!
//! ```text
//! embed-dataplane 192.0.2.10:80 --block 203.0.113.9 10.0.0.11:80 10.0.0.12:80
//! ```
//!
//! This command balances TCP connections to the first address over the servers by NAT, and drops
//! the packets of the blocked client. `lvsadm -Ln` shows its services. The program needs the
//! privileges of `lvs-dataplane`, and ends at the end of its standard input.

use std::env;
use std::io::Read;
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, bail};
use lvs_core::api::{Call, ServerSpec, ServiceId, ServiceSpec};
use lvs_core::{Family, Forwarding, PacketMeta, ServerConfig, ServiceConfig};
use lvs_dataplane::dataplane::{Config, Dataplane, HookAction, PacketHook};

/// Drops the packets of some clients.
struct Blocklist(Vec<IpAddr>);

impl PacketHook for Blocklist {
    fn packet(&mut self, meta: &PacketMeta<'_>) -> HookAction {
        if self.0.contains(&meta.tuple.src.ip()) {
            HookAction::Drop
        } else {
            HookAction::Continue
        }
    }
}

fn main() -> anyhow::Result<()> {
    let mut args = env::args().skip(1);
    let address = |text: &str| -> anyhow::Result<SocketAddr> {
        text.parse()
            .with_context(|| format!("{text} is not an address with a port"))
    };
    let Some(vip) = args.next() else {
        bail!("usage: embed-dataplane VIP:PORT [--block ADDRESS]... SERVER:PORT...");
    };
    let vip = address(&vip)?;
    let (mut servers, mut blocked) = (Vec::new(), Vec::new());
    while let Some(arg) = args.next() {
        if arg == "--block" {
            let client = args.next().context("--block needs an address")?;
            blocked.push(
                client
                    .parse()
                    .with_context(|| format!("{client} is not an address"))?,
            );
        } else {
            servers.push(address(&arg)?);
        }
    }

    let dataplane = Dataplane::start(Config {
        own_vips: true,
        hook: Some(Box::new(Blocklist(blocked))),
        ..Config::default()
    })?;
    let service = ServiceId::Tcp { address: vip };
    let config = ServiceConfig::new(Family::of(&vip.ip()), "wlc");
    let mut changes = vec![Call::ServiceAdd(ServiceSpec {
        service,
        config,
        owner: None,
    })];
    changes.extend(servers.into_iter().map(|server| {
        Call::ServerAdd(ServerSpec {
            service,
            server,
            config: ServerConfig::new(1, Forwarding::Nat),
        })
    }));
    dataplane
        .apply(changes)
        .map_err(|failure| anyhow::anyhow!(failure.message))?;
    println!("balancing {vip}");
    // Run until the parent process closes the standard input.
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    Ok(())
}
