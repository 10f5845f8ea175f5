//! The TUN backend, for a dataplane with no privilege but CAP_NET_ADMIN: the host routes packets to
//! the TUN device, and from it to their destinations.

use crate::common;

use std::net::SocketAddr;

use anyhow::{Context, Result, bail, ensure};
use lvs_testbed::servers::{iperf3, nginx};
use lvs_testbed::{Forward, LoadOptions, Site, SiteOptions, Vip, programs, soon};
use nix::sys::signal::Signal;

/// Command that runs a program with CAP_NET_ADMIN as its only privilege, so that it cannot open
/// packet sockets.
const NET_ADMIN_ONLY: [&str; 3] = [
    "setpriv",
    "--bounding-set=-all,+net_admin",
    "--inh-caps=-all,+net_admin",
];

fn start(site: &mut Site) -> Result<()> {
    site.start_dataplane_by(&NET_ADMIN_ONLY, &["--backend", "tun"])
}

/// Creates a site with IP forwarding on the director, without a dataplane.
fn prepared(label: &str, forward: Forward, servers: usize, vip: Vip) -> Result<Site> {
    let mut options = SiteOptions::with_servers(label, forward, servers);
    options.vip = vip;
    options.ip_forward = true;
    let site = Site::new(options)?;
    site.director.sysctl("ipv6/conf/all/forwarding", "1")?;
    Ok(site)
}

fn site(label: &str, forward: Forward, servers: usize) -> Result<Site> {
    let mut site = prepared(label, forward, servers, Vip::Dataplane)?;
    start(&mut site)?;
    Ok(site)
}

/// Lists the policy rules, routes and proxy neighbours of the dataplane.
fn steered(site: &Site) -> Result<String> {
    site.director.sh(
        "for f in -4 -6; do ip $f rule; ip $f route show table 7676; ip $f route show table 7677; ip $f neigh show proxy; \
         done | grep -e 'proto 76' -e proxy -e lvs-tun0 || true",
    )
}

#[test]
fn tun_backend_forwards_every_byte_through_nat() -> Result<()> {
    let site = site("hop-nat", Forward::Nat, 4)?;
    common::requests_and_listings(&site)
}

#[test]
fn tun_backend_nat_forwards_bulk_and_datagrams() -> Result<()> {
    let site = site("hop-bulk", Forward::Nat, 2)?;
    site.add_service(80, "rr")?;
    common::bulk(&site)?;
    common::iperf_and_dns(&site)
}

#[test]
#[ignore = "long"]
fn tun_backend_forwards_every_byte_through_tunnels() -> Result<()> {
    let site = site("hop-tun", Forward::Tun, 4)?;
    common::requests_and_listings(&site)
}

#[test]
#[ignore = "long"]
fn tun_backend_tunnels_forward_bulk_and_datagrams() -> Result<()> {
    let site = site("hop-tun-bulk", Forward::Tun, 2)?;
    site.add_service(80, "rr")?;
    common::bulk(&site)?;
    common::iperf_and_dns(&site)
}

#[test]
fn tun_backend_uses_added_servers_and_avoids_removed_servers() -> Result<()> {
    common::administration(&site("hop-admin", Forward::Nat, 3)?)
}

/// The host routes the servers' replies, which are sent to local addresses, to the dataplane.
/// Clients on the director are served, too.
#[test]
#[ignore = "long"]
fn tun_backend_forwards_every_byte_through_full_nat() -> Result<()> {
    let site = site("hop-fullnat", Forward::FullNat, 2)?;
    site.add_service(80, "rr")?;
    let load = site.load_of(94);
    common::spread(&common::ok(site.client.load(&load)?, 94)?, &[47, 47])?;
    common::spread(&common::ok(site.director.load(&load)?, 94)?, &[47, 47])?;
    common::bulk(&site)?;
    site.lvsadm("-C")?;
    traffic6(&site, &["--fullnat"], true)?;
    let refusal = site.lvsadm("local add 192.0.2.1");
    let text = format!(
        "{:#}",
        refusal
            .err()
            .context("the dataplane accepted a local address of the host")?
    );
    ensure!(text.contains("TUN"), "no `TUN` in {text}");
    Ok(())
}

#[test]
fn tun_backend_forwards_to_server_on_director() -> Result<()> {
    let site = site("hop-local", Forward::Nat, 1)?;
    let _own = nginx(&site.director, &common::on_port(8080))?;
    site.add_service(80, "rr")?;
    site.lvsadm(&format!("-a -t {} -r 10.0.0.1:8080 -m", site.service(80)))?;
    let load = site.load_of(94);
    let report = common::ok(site.client.load(&load)?, 94)?;
    let expected = [("director", 47), ("rs1", 47)].map(|(name, n)| (name.to_owned(), n));
    ensure!(
        report.servers == expected.into(),
        "the servers did not answer 47 requests each: {:?}",
        report.servers
    );
    // The web server on the director also answers clients that connect to it directly, although its
    // replies pass the dataplane.
    let direct = LoadOptions {
        target: ([192, 0, 2, 1], 8080).into(),
        requests: 20,
        ..site.load()
    };
    common::ok(site.client.load(&direct)?, 20)?;
    Ok(())
}

/// The VIP is in no network, but a route leads to it, so no host answers ARP for the VIP.
#[test]
fn tun_backend_serves_routed_vip_without_proxy_neighbour() -> Result<()> {
    let mut site = prepared("hop-routed", Forward::Tun, 2, Vip::Routed)?;
    start(&mut site)?;
    site.add_service(80, "rr")?;
    let load = site.load_of(94);
    common::spread(&common::ok(site.client.load(&load)?, 94)?, &[47, 47])?;
    ensure!(
        !steered(&site)?.contains("proxy"),
        "the host has a proxy neighbour, although the VIP is in no network"
    );
    Ok(())
}

fn traffic6(site: &Site, options: &[&str], servers6: bool) -> Result<()> {
    let virt = SocketAddr::from((site.vip6, 80));
    for option in options {
        site.lvsadm(&format!("-A -t {virt} -s rr"))?;
        for index in 0..site.servers.len() {
            let server: SocketAddr = if servers6 {
                (site.real_address6(index), 80).into()
            } else {
                (site.real_address(index), 80).into()
            };
            site.lvsadm(&format!("-a -t {virt} -r {server} {option}"))?;
        }
        let mut load = LoadOptions::new(virt);
        load.requests = 94;
        let report = site
            .client
            .load(&load)
            .with_context(|| (*option).to_owned())?;
        common::spread(&common::ok(report, 94)?, &[47, 47])?;
        let upload = site.serve("upload", 5_000_000)?;
        site.client
            .sh(&format!(
                "curl -g --fail --silent --show-error --max-time 120 -T {} http://{virt}/up/x",
                upload.display()
            ))
            .with_context(|| (*option).to_owned())?;
        site.lvsadm("-C")?;
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn tun_backend_forwards_every_byte_over_ipv6() -> Result<()> {
    let nat = site("hop-nat6", Forward::Nat, 2)?;
    traffic6(&nat, &["-m"], true)?;
    let tunnels = site("hop-tun6", Forward::Tun, 2)?;
    let kinds = [
        "-i",
        "-i --tun-type gre",
        "-i --tun-type gue --tun-port 6080",
    ];
    traffic6(&tunnels, &kinds, true)?;
    traffic6(&tunnels, &kinds[..1], false)
}

/// The host or the receiver divides super-packets into segments, and completes checksums.
#[test]
#[ignore = "long"]
fn tun_backend_without_offloads_or_with_small_mtu_transfers_files() -> Result<()> {
    for forward in [Forward::Nat, Forward::Tun] {
        for (offloads, mtu) in [(false, 1500), (true, 1280)] {
            let mut options = SiteOptions::with_servers("hop-links", forward, 2);
            options.vip = Vip::Dataplane;
            options.ip_forward = true;
            options.offloads = offloads;
            options.mtu = mtu;
            let mut site = Site::new(options)?;
            start(&mut site)?;
            site.add_service(80, "rr")?;
            let load = site.load_of(94);
            common::spread(&common::ok(site.client.load(&load)?, 94)?, &[47, 47])?;
            common::upload(&site)?;
        }
    }
    Ok(())
}

/// Policy rules cannot match the ports of fragments. The director sends ICMP errors for a narrow
/// link behind it.
#[test]
#[ignore = "long"]
fn tun_backend_forwards_fragments_over_narrow_link() -> Result<()> {
    let site = site("hop-fragments", Forward::Nat, 1)?;
    let _iperf = iperf3(&site.servers[0], site.real_address(0))?;
    site.add_service_weighted("-t", 5201, "rr", &[1])?;
    site.add_service_weighted("-u", 5201, "rr", &[1])?;
    for reverse in ["", "-R"] {
        // A receiver with few buffers may lose some datagrams itself; without the rules for
        // fragments, none would arrive.
        common::measured(|| {
            let report = common::iperf(&site, &format!("-u -b 20M -l 4000 {reverse}"))?;
            let sum = &report["end"]["sum"];
            let number = |name: &str| sum[name].as_u64().context(sum.to_string());
            let (packets, lost) = (number("packets")?, number("lost_packets")?);
            let good = packets > 100 && lost * 2 < packets;
            Ok((!good).then(|| format!("too many datagrams were lost {reverse}: {sum}")))
        })?;
    }
    site.director.sh("ip link set eth1 mtu 1400")?;
    site.add_service(80, "rr")?;
    common::upload(&site)?;
    Ok(())
}

#[test]
fn tun_backend_refuses_unsupported_settings_without_change() -> Result<()> {
    let site = site("hop-refused", Forward::Nat, 1)?;
    site.add_service(80, "rr")?;
    let service = site.service(80);
    let server = SocketAddr::from((site.real_address(0), 80));
    let other = SocketAddr::from(([10, 0, 0, 77], 80));
    let (before, rules) = (site.lvsadm("-S -n")?, steered(&site)?);
    for (arguments, reason) in [
        (format!("-a -t {service} -r {other} -g"), "direct routing"),
        (format!("-e -t {service} -r {server} -g"), "direct routing"),
        ("-A -t 192.0.2.1:80 -s rr".to_owned(), "address of eth0"),
        (
            "mark add --destination 192.0.2.77 --interface eth0 --mark 1".to_owned(),
            "remove --interface",
        ),
    ] {
        let Err(refusal) = site.lvsadm(&arguments) else {
            bail!("lvsadm {arguments} was not refused");
        };
        let text = format!("{refusal:#}");
        ensure!(
            text.contains(reason) && text.contains("TUN"),
            "{arguments}: no {reason:?} or no `TUN` in {text}"
        );
    }
    ensure!(site.lvsadm("-S -n")? == before && steered(&site)? == rules);
    ensure!(!site.lvsadm("mark")?.contains("192.0.2.77"));
    Ok(())
}

#[test]
fn tun_backend_removes_rules_and_routes_with_services_and_at_exit() -> Result<()> {
    let mut site = prepared("hop-ends", Forward::Nat, 2, Vip::Dataplane)?;
    let before = common::host_state(&site)?;
    let load = |site: &Site| {
        let load = site.load_of(20);
        common::ok(site.client.load(&load)?, 20)
    };
    start(&mut site)?;
    let is_steered = |site: &Site, how: &str, right: &dyn Fn(&str) -> bool| {
        let what = format!("the rules, routes and proxy neighbours to contain {how}");
        soon(&what, || steered(site).is_ok_and(|now| right(&now)))
            .with_context(|| format!("{:?}", steered(site)))
    };
    let is_not = |site: &Site| is_steered(site, "nothing of the dataplane", &str::is_empty);
    is_not(&site)?;
    site.add_service(80, "rr")?;
    site.lvsadm(&format!("-A -t [{}]:80 -s rr", site.vip6))?;
    load(&site)?;
    for part in [
        "192.0.2.10 dev eth0",
        "fd00:192::10 dev eth0",
        "from 10.0.0.11 ipproto tcp sport 80 lookup 7677",
        "iif lvs-tun0 goto",
    ] {
        is_steered(&site, part, &|running| running.contains(part))?;
    }
    let server = SocketAddr::from((site.real_address(0), 80));
    site.lvsadm(&format!("-d -t {} -r {server}", site.service(80)))?;
    site.lvsadm(&format!("-D -t [{}]:80", site.vip6))?;
    is_steered(&site, "no removed VIP", &|fewer| {
        !fewer.contains("fd00:192::10")
    })?;
    site.lvsadm("-C")?;
    // The replies of removed servers are translated until their connections end.
    is_steered(&site, "no proxy neighbour", &|none| !none.contains("proxy"))?;

    // A killed dataplane leaves rules without routes; the next dataplane removes them, and works.
    site.add_service(80, "rr")?;
    load(&site)?;
    site.dataplane
        .as_mut()
        .context("no dataplane was started")?
        .kill();
    is_steered(&site, "rules without routes", &|left| {
        left.contains("proxy") && left.contains("sport 80") && !left.contains("dev lvs-tun0")
    })?;
    start(&mut site)?;
    is_not(&site)?;
    common::says(&site, "of a killed dataplane")?;
    site.add_service(80, "rr")?;
    load(&site)?;

    site.dataplane
        .as_mut()
        .context("no dataplane was started")?
        .kill();
    ensure!(!steered(&site)?.is_empty());
    site.start_dataplane(&["--backend", "af_packet"])?;
    is_not(&site)?;
    site.add_service(80, "rr")?;
    load(&site)?;

    // An orderly stop leaves nothing behind.
    start(&mut site)?;
    site.add_service(80, "rr")?;
    load(&site)?;
    let mut dataplane = site.dataplane.take().context("no dataplane was started")?;
    dataplane.stop_ok(Signal::SIGTERM)?;
    common::wait_for_host_state(&site, &before)?;
    is_not(&site)
}

/// The kernel removes the proxy neighbours of an interface that goes down, and some programs delete
/// unknown rules.
#[test]
fn tun_backend_restores_removed_rules_and_routes() -> Result<()> {
    let site = site("hop-flap", Forward::Nat, 1)?;
    site.add_service(80, "rr")?;
    let mut load = site.load_of(10);
    common::ok(site.client.load(&load)?, 10)?;
    load.timeout_ms = 5000;
    // The order of the kernel's list of proxied neighbours changes after an entry has been removed
    // and added.
    let sorted = || -> Result<Vec<String>> {
        let mut lines: Vec<String> = steered(&site)?.lines().map(str::to_owned).collect();
        lines.sort();
        Ok(lines)
    };
    let all = sorted()?;
    let everything = || {
        soon("the host to have the same rules and routes again", || {
            sorted().is_ok_and(|now| now == all)
        })
        .with_context(|| format!("{all:#?}\n{:#?}", sorted()))
    };
    site.director
        .sh("ip link set eth0 down; sleep 0.3; ip link set eth0 up")?;
    site.client.sh("ip neigh flush dev eth0")?;
    let traffic = || {
        soon("traffic to flow again", || {
            site.client
                .load(&load)
                .is_ok_and(|report| report.failed == 0)
        })
    };
    traffic()?;
    everything()?;
    site.director.sh(
        "for p in 60 61 62 63 64 65; do ip rule del pref $p; done; ip route flush table 7676",
    )?;
    traffic()?;
    everything()
}

/// The host remains an ordinary host and router.
#[test]
fn tun_backend_keeps_traffic_of_host() -> Result<()> {
    let mut site = prepared("hop-host", Forward::Nat, 2, Vip::Dataplane)?;
    site.director
        .sh("iptables -t nat -A POSTROUTING -o eth0 -j MASQUERADE")?;
    start(&mut site)?;
    site.add_service(80, "rr")?;
    let mut load = common::mixed_load(&site);
    load.pause_ms = 2;
    let steady = site.client.steady_load(&load)?;
    // The director's own addresses belong to the host.
    let _ssh = nginx(&site.director, &common::on_port(22))?;
    let printed = site
        .client
        .sh("curl --fail --silent --max-time 60 http://192.0.2.1:22/id")?;
    ensure!(
        printed == "director\n",
        "port 22 of the director was answered by another host: {printed}"
    );

    // The virtual address answers like a host without other services: echo replies and RST.
    let vip = site.vip.to_string();
    site.client.run(programs::own()?, &["ping", &vip])?;
    site.client
        .run(programs::own()?, &["ping", "--size", "5000", &vip])?;
    common::refused(&site, &load, 22)?;
    ensure!(
        common::stray_ack_is_reset(&site, 80)?,
        "the client received no RST for a stray ACK"
    );

    // A client, and the director itself, connect to a real server directly.
    let direct = common::direct(&site, &load);
    common::ok(site.client.load(&direct)?, 40)?;
    common::ok(site.director.load(&direct)?, 40)?;

    // A real server's own traffic, including pings, leaves with the director's address as its
    // source.
    let _outside = nginx(&site.client, &common::on_port(8080))?;
    let outside = common::client_address(&site)?;
    let printed = site.servers[0].sh(&format!(
        "curl --fail --silent --max-time 60 http://{outside}:8080/addr"
    ))?;
    ensure!(
        printed == "192.0.2.1\n",
        "the connection of the server has the source address {printed} instead of 192.0.2.1"
    );
    site.servers[0].run(programs::own()?, &["ping", &outside])?;

    // A request of the director itself to the VIP fails at once, because the host would receive the
    // reply to its own connection.
    let own = LoadOptions {
        requests: 1,
        ..site.load()
    };
    // If the host refuses the connection before the client waits for the result, the client cannot
    // read the error.
    soon("a request to fail with the reason", || {
        let report = site.director.load(&own);
        report.is_ok_and(|report| {
            let mut errors = report.errors.iter();
            report.ok == 0 && errors.any(|error| error.contains("No route to host"))
        })
    })?;

    steady.wait_for_more(100)?;
    let report = steady.finish_ok()?;
    ensure!(
        report.ok > 100 && report.servers.len() == 2,
        "not both servers answered more than 100 requests: {report:?}"
    );
    Ok(())
}

/// The director decrements the TTL only once, although the host routes each packet to the TUN
/// device and from it.
#[test]
fn tun_backend_lowers_ttl_by_one() -> Result<()> {
    let site = site("hop-ttl", Forward::Nat, 1)?;
    site.add_service(80, "rr")?;
    let listen = |port: &str| {
        format!(
            r#"perl -MSocket -e '
            socket(S, PF_INET, SOCK_RAW, 6) or die $!;
            $| = 1;
            print "ready\n";
            $SIG{{ALRM}} = sub {{ print "silence\n"; exit }};
            alarm 240;
            while (recv(S, my $packet, 100, 0)) {{
                my ($sport, $dport) = unpack("nn", substr($packet, (ord($packet) & 15) * 4));
                next unless ${port} == 80;
                printf "ttl %d\n", ord(substr($packet, 8, 1));
                exit;
            }}'"#
        )
    };
    let (at_server, at_client) = (listen("dport"), listen("sport"));
    let mut listeners = vec![
        site.servers[0].spawn("sh", &["-c", &at_server])?,
        site.client.spawn("sh", &["-c", &at_client])?,
    ];
    soon("all listeners to be ready", || {
        listeners
            .iter()
            .all(|listener| listener.log().contains("ready"))
    })?;
    let load = site.load_of(1);
    common::ok(site.client.load(&load)?, 1)?;
    for listener in &mut listeners {
        listener.wait(common::SOON)?;
        ensure!(
            listener.log().contains("ttl 63"),
            "no `ttl 63` in {}",
            listener.log()
        );
    }
    Ok(())
}

#[test]
fn tun_backend_is_chosen_if_packet_sockets_are_not_permitted() -> Result<()> {
    let mut site = prepared("hop-auto", Forward::Nat, 1, Vip::Dataplane)?;
    site.start_dataplane_by(&NET_ADMIN_ONLY, &[])?;
    let dataplane = site
        .dataplane
        .as_ref()
        .context("no dataplane was started")?;
    soon(
        "the log to report that packet sockets are not permitted",
        || {
            let log = dataplane.log();
            log.contains("packet sockets are not permitted") && log.contains("lvs-tun0")
        },
    )?;
    site.add_service(80, "rr")?;
    let load = site.load_of(10);
    common::ok(site.client.load(&load)?, 10)?;
    Ok(())
}

#[test]
fn tun_backend_reports_disabled_ip_forwarding() -> Result<()> {
    let mut options = SiteOptions::with_servers("hop-deaf", Forward::Nat, 1);
    options.vip = Vip::Dataplane;
    let mut site = Site::new(options)?;
    let before = common::host_state(&site)?;
    let program = programs::find("lvs-dataplane")?;
    let mut dataplane = site.director.spawn(&program, &["--backend", "tun"])?;
    let status = dataplane.wait(common::SOON)?;
    let fix = "sysctl -w net.ipv4.ip_forward=1";
    ensure!(
        !status.success() && dataplane.log().contains(fix),
        "the dataplane started, or did not log the fix: {status}: {}",
        dataplane.log()
    );
    common::wait_for_host_state(&site, &before)?;
    // Forwarding in one IP family is enough to start. If the other is missing, the dataplane logs
    // it when it is needed, and doctor reports it.
    site.director.sysctl("ipv6/conf/all/forwarding", "1")?;
    start(&mut site)?;
    site.add_service(80, "rr")?;
    common::says(&site, fix)?;
    Ok(())
}

#[test]
fn tun_backend_reports_since_when_an_interface_is_down() -> Result<()> {
    let mut site = prepared("hop-down", Forward::Nat, 1, Vip::Dataplane)?;
    let words = ["--backend", "tun", "--interface", "eth1"];
    site.start_dataplane_by(&NET_ADMIN_ONLY, &words)?;
    let found = || super::doctor::findings_with_code(&site, "interface_down");
    ensure!(found()?.is_empty());
    for state in ["down", "up"] {
        site.director.sh(&format!("ip link set eth1 {state}"))?;
        soon("doctor to report the interface", || {
            found().is_ok_and(|found| found.is_empty() == (state == "up"))
        })?;
        if state == "down" {
            let found = found()?;
            ensure!(
                found[0]["since"].is_u64(),
                "the finding has no start time: {found:?}"
            );
        }
    }
    Ok(())
}

/// `lvsd` refuses a configuration file with a method that the backend does not support. With a valid
/// file, it starts the dataplane, which owns the VIP, and checks the servers directly.
#[test]
fn tun_backend_under_lvsd_serves_clients_and_refuses_direct_routing() -> Result<()> {
    let site = prepared("hop-lvsd", Forward::Nat, 2, Vip::Dataplane)?;
    let before = common::host_state(&site)?;
    let file = site.testbed.dir().join("lvsd.toml");
    let path = file.display().to_string();
    let write = |forward: &str| {
        let text = format!(
            "[dataplane]\nbackend = \"tun\"\n[[service]]\naddress = \"{}\"\nscheduler = \"rr\"\nforward = \"{forward}\"\n\
             check = {{ type = \"tcp\", interval = \"200ms\", timeout = \"2s\" }}\n\
             [[service.server]]\naddress = \"{}:80\"\n[[service.server]]\naddress = \"{}:80\"\n",
            site.service(80),
            site.real_address(0),
            site.real_address(1)
        );
        std::fs::write(&file, text)
    };
    let lvsd = programs::find("lvsd")?;
    write("dr")?;
    let refusal = site.director.run(&lvsd, &["check", &path]);
    let text = format!(
        "{:#}",
        refusal
            .err()
            .context("lvsd check accepted direct routing")?
    );
    ensure!(
        text.contains("direct routing needs frames") && text.contains("lvsd.toml:"),
        "no `direct routing needs frames` or no `lvsd.toml:` in {text}"
    );
    write("nat")?;
    let mut daemon = site.director.spawn(&lvsd, &["--config", &path])?;
    let load = LoadOptions {
        requests: 20,
        ..site.load()
    };
    soon("requests to succeed", || {
        site.client
            .load(&load)
            .is_ok_and(|report| report.failed == 0 && report.servers.len() == 2)
    })
    .with_context(|| daemon.log())?;
    daemon.stop_ok(Signal::SIGINT)?;
    common::wait_for_host_state(&site, &before)
}
