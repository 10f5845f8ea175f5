//! What IPVS in the kernel does not do, or only with help: servers as clients of their own service, answers of direct
//! routing that come by, addresses in no network.

mod common;

use anyhow::{Result, ensure};
use lvs_testbed::{Forward, Host, Site, SiteOptions, Topology, Vip};

fn ids(site: &Site, from: &Host, times: usize) -> Result<Vec<String>> {
    let printed = from.sh(&format!(
        "for i in $(seq {times}); do curl -sS -f -m 5 http://{}/id || echo lost; done",
        site.vip
    ))?;
    let mut names: Vec<String> = printed.lines().map(str::to_owned).collect();
    names.sort();
    Ok(names)
}

/// Every server asks its own service, and gets answers of each of them, itself included. The servers are on one network
/// with each other, and with the director or not.
#[test]
fn servers_are_clients_of_their_own_service() -> Result<()> {
    for (forward, topology, arguments) in [
        (
            Forward::Nat,
            Topology::OneArm,
            &["--local-address", "192.0.2.50", "--hairpin"][..],
        ),
        (
            Forward::Nat,
            Topology::TwoArm,
            &["--local-address", "10.0.0.1", "--hairpin"],
        ),
        (Forward::FullNat, Topology::OneArm, &[]),
        (Forward::FullNat, Topology::Routed, &[]),
    ] {
        let mut options = SiteOptions::new("hairpin", forward);
        options.topology = topology;
        options.servers = 2;
        let mut site = Site::new(options)?;
        site.start_engine(arguments)?;
        site.add_service(80, "rr")?;
        for server in &site.servers {
            let names = ids(&site, server, 10)?;
            let expected = [["rs1"; 5], ["rs2"; 5]].concat();
            ensure!(
                names == expected,
                "{forward:?} {topology:?}, {}: {names:?}",
                server.name()
            );
        }
        // Clients from elsewhere come with their own addresses where the method is NAT.
        let mut load = site.load();
        load.requests = 40;
        common::spread(&common::ok(site.client.load(&load)?, 40)?, &[20, 20])?;
        let seen = site
            .client
            .sh(&format!("curl -sS -f -m 5 http://{}/addr", site.vip))?;
        if forward == Forward::Nat {
            ensure!(seen.trim() == common::client_address(&site)?, "{seen}");
        } else {
            ensure!(seen == "192.0.2.50\n", "{seen}");
        }
    }
    Ok(())
}

/// Without being asked to, the director translates as the kernel does, and such a client's answer takes the short way.
#[test]
fn hairpin_is_off_at_first() -> Result<()> {
    let mut options = SiteOptions::new("no-hairpin", Forward::Nat);
    options.topology = Topology::OneArm;
    options.servers = 2;
    let site = common::site(options)?;
    site.add_service(80, "rr")?;
    let printed = site.servers[0].sh(&format!(
        "for i in 1 2; do curl -s -m 1 http://{}/id || echo lost; done | sort",
        site.vip
    ))?;
    ensure!(printed.contains("lost"), "{printed}");
    Ok(())
}

/// Direct routing where the director is the servers' gateway: their answers pass it with the VIP as source, which a host
/// that has the VIP takes for forged.
#[test]
fn answers_of_direct_routing_pass_the_director() -> Result<()> {
    for vip in [Vip::Host, Vip::Engine, Vip::Routed] {
        for ip_forward in [true, false] {
            let mut options = SiteOptions::new("martian", Forward::Dr);
            options.topology = Topology::TwoArm;
            options.servers = 2;
            options.vip = vip;
            options.ip_forward = ip_forward;
            let site = common::site(options)?;
            site.add_service(80, "rr")?;
            let mut load = site.load();
            load.requests = 40;
            common::spread(&common::ok(site.client.load(&load)?, 40)?, &[20, 20])?;
            let upload = site.serve("upload", 5_000_000)?;
            site.client.sh(&format!(
                "curl --fail --silent --show-error --max-time 20 -T {} http://{}/up/x",
                upload.display(),
                site.vip
            ))?;
            // They are counted, as what passes the kernel's FORWARD hook is.
            common::wait_for_snapshot();
            let listing = site.lvsadm("-L -n --stats --exact")?;
            let rows = lvs_testbed::listing::rows(&listing);
            ensure!(rows[0].number(2)? > 100, "{listing}");
        }
    }
    Ok(())
}

/// The transparent reception of the LVS papers: the VIP is in no network, packets for it are merely routed here.
#[test]
fn a_vip_that_is_routed_to_the_director() -> Result<()> {
    for forward in [Forward::Nat, Forward::Dr, Forward::Tun, Forward::FullNat] {
        let mut options = SiteOptions::new("routed-vip", forward);
        options.servers = 2;
        options.vip = Vip::Routed;
        let site = common::site(options)?;
        site.add_service(80, "rr")?;
        let mut load = site.load();
        load.requests = 40;
        common::spread(&common::ok(site.client.load(&load)?, 40)?, &[20, 20])?;
        let addresses = site.director.sh("ip -o addr")?;
        ensure!(!addresses.contains(&site.vip.to_string()), "{addresses}");
    }
    Ok(())
}
