//! After an event at one of its interfaces, the dataplane announces the link-layer address of its
//! own addresses again. The neighbours send no packets during the test, so that only an
//! announcement corrects their tables.

use crate::common;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, Host, Proc, Site, SiteOptions, Topology, Vip, wait_until};

const PATIENCE: Duration = Duration::from_secs(30);
const WRONG: &str = "02:00:00:00:66:66";

/// A neighbour whose table contains an address that the dataplane owns.
struct Place<'a> {
    neighbour: &'a Host,
    address: &'static str,
    /// The director's interface on the neighbour's link.
    device: &'static str,
}

impl Place<'_> {
    /// Sets a wrong link-layer address for the dataplane's address in the neighbour's table.
    fn mislead(&self) -> Result<()> {
        let address = self.address;
        self.neighbour
            .sh(&format!(
                "ip neigh replace {address} lladdr {WRONG} dev eth0 nud stale"
            ))
            .map(drop)
    }

    fn known(&self) -> Result<String> {
        self.neighbour
            .run("ip", &["neigh", "show", self.address, "dev", "eth0"])
    }
}

fn site(label: &str) -> Result<Site> {
    let mut options = SiteOptions::new(label, Forward::FullNat);
    options.topology = Topology::TwoArm;
    options.servers = 1;
    options.vip = Vip::Dataplane;
    let site = common::site(options)?;
    site.add_service(80, "rr")?;
    let (virt, server) = (site.vip6, site.real_address6(0));
    site.lvsadm(&format!("-A -t [{virt}]:80"))?;
    site.lvsadm(&format!("-a -t [{virt}]:80 -r [{server}]:80 --fullnat"))?;
    Ok(site)
}

fn places(site: &Site) -> [Place<'_>; 4] {
    let place = |neighbour, address, device| Place {
        neighbour,
        address,
        device,
    };
    [
        place(&site.client, "192.0.2.10", "eth0"),
        place(&site.client, "fd00:192::10", "eth0"),
        place(&site.servers[0], "10.0.0.50", "eth1"),
        place(&site.servers[0], "fd00:10::50", "eth1"),
    ]
}

/// Waits until the dataplane has sent all announcements of earlier events.
fn settle(places: &[Place<'_>]) -> Result<()> {
    wait_until(
        "the dataplane to send no more announcements",
        PATIENCE,
        || {
            let misled = places.iter().try_for_each(Place::mislead);
            // The longest pause between two announcements is one second.
            std::thread::sleep(Duration::from_millis(1300));
            let wrong = |place: &Place<'_>| place.known().is_ok_and(|known| known.contains(WRONG));
            misled.is_ok() && places.iter().all(wrong)
        },
    )
}

/// Runs `script`, and checks that all neighbours then have the address of the director's interface.
fn event(site: &Site, places: &[Place<'_>], what: &str, script: &str) -> Result<()> {
    settle(places)?;
    site.director.sh(script)?;
    learnt(site, places, what)
}

fn learnt(site: &Site, places: &[Place<'_>], what: &str) -> Result<()> {
    for place in places {
        let Place {
            address, device, ..
        } = place;
        let mac = site
            .director
            .sh(&format!("cat /sys/class/net/{device}/address"))?;
        wait_until(
            &format!("the dataplane to announce {address} after {what}"),
            PATIENCE,
            || place.known().is_ok_and(|known| known.contains(mac.trim())),
        )
        .with_context(|| {
            format!(
                "the neighbour entry is {:?} instead of {mac}",
                place.known()
            )
        })?;
    }
    Ok(())
}

#[test]
fn own_addresses_are_announced_after_mac_change() -> Result<()> {
    let site = site("annmac")?;
    let places = places(&site);
    let script =
        "ip link set eth0 address 02:00:00:00:aa:01; ip link set eth1 address 02:00:00:00:aa:02";
    event(&site, &places, "the link-layer address has changed", script)
}

#[test]
fn own_addresses_are_announced_after_link_is_up() -> Result<()> {
    let site = site("annup")?;
    let places = places(&site);
    let script =
        "ip link set eth0 down; ip link set eth1 down; ip link set eth0 up; ip link set eth1 up";
    event(&site, &places, "the link was set up", script)?;
    // Only the carrier is lost, as if the cable were pulled.
    settle(&places)?;
    let mac = site.director.sh("cat /sys/class/net/eth0/address")?;
    site.testbed
        .pull_cable(&site.director, "eth0", mac.trim())?;
    learnt(&site, &places[..2], "the carrier has appeared")
}

#[test]
fn own_addresses_are_announced_after_interface_is_replaced() -> Result<()> {
    let site = site("annnew")?;
    let places = places(&site);
    settle(&places)?;
    for (lan, device) in [("front", "eth0"), ("back", "eth1")] {
        site.director.sh(&format!("ip link delete {device}"))?;
        site.testbed.plug(lan, &site.director, device)?;
    }
    site.director.sh(
        "ip addr add 192.0.2.1/24 dev eth0; ip addr add 10.0.0.1/24 dev eth1; ip link set eth0 up; ip link set eth1 up; \
         ip addr add fd00:192::1/64 dev eth0 nodad; ip addr add fd00:10::1/64 dev eth1 nodad",
    )?;
    learnt(&site, &places, "the interface was replaced")
}

/// If the director's interface is a bridge, added ports can change its link-layer address.
#[test]
fn own_addresses_are_announced_after_bridge_change() -> Result<()> {
    let mut options = SiteOptions::with_servers("annbridge", Forward::Nat, 1);
    options.vip = Vip::Dataplane;
    let mut site = Site::new(options)?;
    site.director.sh(
        "ip link set eth0 address 0a:00:00:00:00:99; ip addr flush dev eth0; ip link add br0 type bridge; \
         ip link set eth0 master br0; ip link set br0 up; ip addr add 192.0.2.1/24 dev br0; \
         ip addr add fd00:192::1/64 dev br0 nodad",
    )?;
    let program = lvs_testbed::programs::find("lvs-dataplane")?;
    let words = ["--own-vips", "--interface", "br0", "--interface", "eth1"];
    let dataplane: Proc = site.director.spawn(program, &words)?;
    wait_until(
        "the dataplane to answer on its control socket",
        PATIENCE,
        || site.lvsadm("-L -n").is_ok(),
    )
    .with_context(|| dataplane.log())?;
    site.dataplane = Some(dataplane);
    site.add_service(80, "rr")?;
    site.lvsadm(&format!("-A -t [{}]:80", site.vip6))?;
    let places = ["192.0.2.10", "fd00:192::10"].map(|address| Place {
        neighbour: &site.client,
        address,
        device: "br0",
    });
    let before = site.director.sh("cat /sys/class/net/br0/address")?;
    let script = "ip link add c0 type veth peer name c1; ip link set c0 address 02:00:00:00:00:01; ip link set c1 up; \
                  ip link set c0 master br0 up";
    event(&site, &places, "a port has joined the bridge", script)?;
    let after = site.director.sh("cat /sys/class/net/br0/address")?;
    ensure!(before != after, "the bridge still has the address {after}");
    let script = "ip link set eth0 down; ip link set eth0 up";
    event(&site, &places, "a port of the bridge was set up", script)
}
