//! An interface of a VLAN on hosts whose kernel has no 802.1Q: tags made and read by a packet
//! socket on the trunk.

use std::time::Duration;

use anyhow::{Context, Result};
use lvs_dataplane::io::BATCH;
use lvs_dataplane::io::vlan::{Trunk, VlanDevice, WantedInterface};
use lvs_dataplane::netlink::Netlink;
use lvs_dataplane::packet::frame::Frame;
use lvs_dataplane::sys::Poller;

use crate::netns::{Host, Proc, wait_until};

/// Makes the interface `name` (`eth0.100`) on a host, up and without an address. It goes with the
/// program.
///
/// # Errors
///
/// When it does not come up.
pub fn start(host: &Host, name: &str) -> Result<Proc> {
    let relay = host.spawn(crate::programs::own()?, &["vlan", name])?;
    wait_until(
        &format!("{name} on {}", host.name()),
        Duration::from_secs(5),
        || relay.log().contains("ready"),
    )
    .with_context(|| relay.log())?;
    Ok(relay)
}

/// Relays until killed; the subcommand `vlan`.
///
/// # Errors
///
/// Without the right to make devices, or without the trunk.
pub fn run(name: &str) -> Result<()> {
    let wanted: WantedInterface = name.parse().map_err(anyhow::Error::msg)?;
    let (trunk, vlan) = wanted.vlan.context("a name like eth0.100")?;
    let (_, state) = Netlink::open()?;
    let link = state.link_by_name(&trunk).context("there is no trunk")?;
    let mut relay = Trunk::open(link)?;
    relay.add(VlanDevice::create(name, vlan, link)?);
    eprintln!("ready");
    let mut frames: Vec<Frame> = (0..BATCH).map(|_| Frame::new()).collect();
    let mut poller = Poller::new();
    loop {
        poller.clear();
        for fd in relay.fds() {
            poller.add(fd);
        }
        poller.wait(None)?;
        relay.relay(&mut frames);
    }
}
