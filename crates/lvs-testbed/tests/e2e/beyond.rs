//! Cases that IPVS in the kernel does not handle, for example servers as clients of their own
//! service, replies of direct routing through the director, and VIPs outside of all networks.

use crate::common;

use anyhow::{Context, Result, ensure};
use lvs_testbed::{
    Forward, Host, LoadOptions, Site, SiteOptions, Topology, Vip, programs, servers, soon,
};
use nix::sys::signal::Signal;

fn ids(site: &Site, from: &Host, times: usize) -> Result<Vec<String>> {
    let printed = from.sh(&format!(
        "for i in $(seq {times}); do curl -sS -f -m 60 http://{}/id || echo lost; done",
        site.vip
    ))?;
    let mut names: Vec<String> = printed.lines().map(str::to_owned).collect();
    names.sort();
    Ok(names)
}

/// Every server connects to its own service and reaches each server, including itself. The director
/// is or is not in the servers' network.
#[test]
fn hairpin_servers_reach_their_own_service() -> Result<()> {
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
        site.start_dataplane(arguments)?;
        site.add_service(80, "rr")?;
        for server in &site.servers {
            let names = ids(&site, server, 10)?;
            let expected = [["rs1"; 5], ["rs2"; 5]].concat();
            ensure!(
                names == expected,
                "not both servers answered 5 requests each: {forward:?} {topology:?}, from {}: {names:?}",
                server.name()
            );
        }
        // With NAT, clients from other networks keep their own addresses.
        let load = site.load_of(40);
        common::spread(&common::ok(site.client.load(&load)?, 40)?, &[20, 20])?;
        let seen = site
            .client
            .sh(&format!("curl -sS -f -m 60 http://{}/addr", site.vip))?;
        if forward == Forward::Nat {
            ensure!(
                seen.trim() == common::client_address(&site)?,
                "{topology:?}: the server sees another address than the client's: {seen}"
            );
        } else {
            ensure!(
                seen == "192.0.2.50\n",
                "the server sees another client address than 192.0.2.50: {seen}"
            );
        }
    }
    Ok(())
}

/// Without hairpin NAT, the replies to a client that is a server of the service bypass the
/// director, as with the kernel.
#[test]
fn request_of_server_to_own_service_without_hairpin_option_is_lost() -> Result<()> {
    let mut options = SiteOptions::new("no-hairpin", Forward::Nat);
    options.topology = Topology::OneArm;
    options.servers = 2;
    let site = common::site(options)?;
    site.add_service(80, "rr")?;
    let printed = site.servers[0].sh(&format!(
        "for i in 1 2; do curl -s -m 1 http://{}/id || echo lost; done | sort",
        site.vip
    ))?;
    ensure!(printed.contains("lost"), "no `lost` in {printed}");
    Ok(())
}

/// The director is the servers' gateway and receives their replies, whose source is the VIP. A host
/// that owns the VIP would drop them as forged.
#[test]
#[ignore = "long"]
fn direct_routing_replies_through_director_are_forwarded() -> Result<()> {
    for vip in [Vip::Host, Vip::Dataplane, Vip::Routed] {
        for ip_forward in [true, false] {
            let mut options = SiteOptions::new("martian", Forward::Dr);
            options.topology = Topology::TwoArm;
            options.servers = 2;
            options.vip = vip;
            options.ip_forward = ip_forward;
            let site = common::site(options)?;
            site.add_service(80, "rr")?;
            let load = site.load_of(40);
            common::spread(&common::ok(site.client.load(&load)?, 40)?, &[20, 20])?;
            common::upload(&site)?;
            // The kernel counts packets that pass its FORWARD hook as replies. The dataplane must
            // count these packets as replies, too.
            common::wait_for_counters(&site, "answers to be counted", |rows| {
                Ok(rows[0].number(2)? > 100)
            })?;
        }
    }
    Ok(())
}

/// The VIP is in no network; a route sends its packets to the director.
#[test]
fn vip_in_no_network_is_routed_to_director() -> Result<()> {
    for forward in [Forward::Nat, Forward::Dr, Forward::Tun, Forward::FullNat] {
        let mut options = SiteOptions::with_servers("routed-vip", forward, 2);
        options.vip = Vip::Routed;
        let site = common::site(options)?;
        site.add_service(80, "rr")?;
        let load = site.load_of(40);
        common::spread(&common::ok(site.client.load(&load)?, 40)?, &[20, 20])?;
        let addresses = site.director.sh("ip -o addr")?;
        ensure!(
            !addresses.contains(&site.vip.to_string()),
            "the director has the VIP: {addresses}"
        );
    }
    Ok(())
}

/// One service for the TCP ports 80 and 8000 to 8099, one for TCP port 8042, and one for all UDP
/// ports.
#[test]
fn services_with_many_ports_forward_each_port_and_reload_removes_their_mark_rules() -> Result<()> {
    for forward in [Forward::Nat, Forward::Dr] {
        let mut options = SiteOptions::with_servers("ports", forward, 2);
        options.nginx.ports = vec![80, 8000, 8042, 8099];
        let mut site = Site::new(options)?;
        site.start_dataplane(&[])?;
        let file = site.director.dir().join("ports.toml");
        let real = |indices: &[usize]| -> String {
            let server = |&index: &usize| {
                format!(
                    "[[service.server]]\naddress = \"{}\"\n",
                    site.real_address(index)
                )
            };
            indices.iter().map(server).collect()
        };
        let (vip, word) = (site.vip, forward.word());
        let service = |address: &str| {
            format!(
                "[[service]]\naddress = \"{vip}:{address}\"\nscheduler = \"rr\"\nforward = \"{word}\"\n"
            )
        };
        let text = [
            service("80,8000-8099"),
            real(&[0, 1]),
            service("8042"),
            real(&[1]),
            service("*").replace("scheduler", "protocol = \"udp\"\nscheduler"),
            real(&[0, 1]),
        ]
        .concat();
        std::fs::write(&file, &text)?;
        let mut daemon = site.director.spawn(
            programs::find("lvsd")?,
            &["--config", &file.display().to_string()],
        )?;
        let listed =
            |site: &Site, text: &str| site.lvsadm("-S -n").is_ok_and(|rules| rules.contains(text));
        soon("the dataplane to have lvsd's services", || {
            site.lvsadm("-S -n")
                .is_ok_and(|rules| rules.matches("-a ").count() == 5)
        })
        .with_context(|| daemon.log())?;

        for (port, expected) in [
            (80, [20, 20]),
            (8000, [20, 20]),
            (8099, [20, 20]),
            (8042, [0, 40]),
        ] {
            let mut load = LoadOptions::new(site.service(port));
            load.requests = 40;
            common::spread(&common::ok(site.client.load(&load)?, 40)?, &expected)
                .with_context(|| format!("port {port}"))?;
        }
        // DNS requests belong to the service for all UDP ports.
        if forward == Forward::Nat {
            let _dns = [
                servers::dnsmasq(&site.servers[0])?,
                servers::dnsmasq(&site.servers[1])?,
            ];
            common::answers_alternate(&site, 4)?;
        }
        // A port outside all ranges belongs to the host.
        let refused = site
            .client
            .sh(&format!("curl -s -m 60 http://{vip}:8100/ || echo $?"))?;
        ensure!(
            refused == "7\n",
            "{forward:?}: curl did not exit with status 7 (connection refused): {refused}"
        );

        // After a reload of a file without mark rules, lvsd removes its own mark rules, and keeps
        // those of the operator.
        site.lvsadm("mark add --destination 192.0.2.77 --mark 7")?;
        std::fs::write(&file, [service("80"), real(&[0])].concat())?;
        daemon.signal(Signal::SIGHUP)?;
        soon("lvsd to apply the changed file", || !listed(&site, "-f "))
            .with_context(|| daemon.log())?;
        let marks = site.lvsadm("mark list")?;
        ensure!(
            marks.lines().count() == 1 && marks.contains("--mark 7"),
            "{forward:?}: other mark rules than the manual one are left: {marks}"
        );
        daemon.stop(Signal::SIGTERM)?;
    }
    Ok(())
}

/// lvsd sets the local addresses from its file when it starts the dataplane, and others after a
/// reload.
#[test]
fn full_nat_local_addresses_follow_configuration_file() -> Result<()> {
    let site = Site::new(SiteOptions::with_servers(
        "fullnat-file",
        Forward::FullNat,
        2,
    ))?;
    let file = site.director.dir().join("fullnat.toml");
    let text = |local: &str| {
        format!(
            "[dataplane]\ninterface = \"eth0\"\nprogram = \"{}\"\nlocal_addresses = [\"{local}\"]\n\
             [[service]]\naddress = \"{}\"\nscheduler = \"rr\"\nforward = \"fullnat\"\n\
             [[service.server]]\naddress = \"{}\"\n[[service.server]]\naddress = \"{}\"\n",
            programs::find("lvs-dataplane")
                .map_or_else(|_| String::new(), |path| path.display().to_string()),
            site.service(80),
            site.real_address(0),
            site.real_address(1),
        )
    };
    std::fs::write(&file, text("192.0.2.60"))?;
    let mut daemon = site.director.spawn(
        programs::find("lvsd")?,
        &["--config", &file.display().to_string()],
    )?;
    for local in ["192.0.2.60", "192.0.2.61"] {
        if local != "192.0.2.60" {
            std::fs::write(&file, text(local))?;
            daemon.signal(Signal::SIGHUP)?;
        }
        let seen = || {
            site.client
                .sh(&format!("curl -sS -f -m 5 http://{}/addr", site.vip))
        };
        soon(&format!("the servers to see {local} as the client"), || {
            seen().is_ok_and(|seen| seen.trim() == local)
        })
        .with_context(|| daemon.log())?;
        let load = site.load_of(40);
        common::spread(&common::ok(site.client.load(&load)?, 40)?, &[20, 20])?;
    }
    // lvsd removes the old address last.
    let listing = || site.lvsadm("local").unwrap_or_default();
    soon("the old local address to be removed", || {
        let listing = listing();
        listing.starts_with("192.0.2.61 ") && !listing.contains("192.0.2.60 ")
    })
    .with_context(listing)?;
    daemon.stop(Signal::SIGTERM)?;
    Ok(())
}
