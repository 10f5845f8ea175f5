//! The host's network stack on the director: packets that it must ignore, and packets that it must
//! still handle.

use crate::common;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use lvs_testbed::servers::nginx;
use lvs_testbed::{Forward, LoadOptions, Site, SiteOptions, Vip, wait_until};

/// A NAT director that also routes and masquerades, as a router in front of private real servers
/// does.
fn site(label: &str, vip: Vip) -> Result<Site> {
    let mut options = SiteOptions::with_servers(label, Forward::Nat, 2);
    options.vip = vip;
    options.ip_forward = true;
    let site = Site::new(options)?;
    site.director
        .sh("iptables -t nat -A POSTROUTING -o eth0 -j MASQUERADE")?;
    Ok(site)
}

/// Tests the host's own traffic in five situations during steady traffic through the service.
fn five_situations(vip: Vip, label: &str) -> Result<()> {
    let mut site = site(label, vip)?;
    site.start_dataplane(&[])?;
    site.add_service(80, "rr")?;
    let mut load = common::mixed_load(&site);
    load.pause_ms = 2;
    let steady = site.client.steady_load(&load)?;

    // A client connects to a real server directly, through the director.
    let direct = common::direct(&site, &load);
    let report = common::ok(site.client.load(&direct)?, 40)?;
    common::spread(&report, &[40, 0])?;

    // The director itself connects to a real server.
    let report = common::ok(site.director.load(&direct)?, 40)?;
    common::spread(&report, &[40, 0])?;

    // The VIP's other ports belong to the host if it owns the VIP; otherwise the dataplane refuses
    // connections to them.
    let _ssh = nginx(&site.director, &common::on_port(22))?;
    match vip {
        Vip::Host | Vip::Routed | Vip::Announced => {
            let printed = site.client.sh(&format!(
                "curl --fail --silent --max-time 60 http://{}:22/id",
                site.vip
            ))?;
            ensure!(
                printed == "director\n",
                "port 22 of the VIP was answered by another host than the director: {printed}"
            );
        }
        Vip::Dataplane => {
            common::refused(&site, &load, 22)?;
        }
    }

    // A segment that belongs to no connection is answered with a RST.
    ensure!(
        common::stray_ack_is_reset(&site, 80)?,
        "the client received no RST for a stray ACK"
    );

    // A real server's own download leaves with the director's address as its source.
    let _outside = nginx(&site.client, &common::on_port(8080))?;
    let outside = common::client_address(&site)?;
    let printed = site.servers[0].sh(&format!(
        "curl --fail --silent --max-time 60 http://{outside}:8080/addr"
    ))?;
    ensure!(
        printed == "192.0.2.1\n",
        "the connection of the server has the source address {printed} instead of 192.0.2.1"
    );
    let download = LoadOptions {
        target: SocketAddr::new(outside.parse()?, 8080),
        ..load.clone()
    };
    site.servers[0].load(&download)?.all_ok(40)?;

    steady.wait_for_more(100)?;
    let report = steady.finish_ok()?;
    ensure!(
        report.ok > 100 && report.servers.len() == 2,
        "not both servers answered more than 100 requests: {report:?}"
    );
    Ok(())
}

#[test]
fn host_vip_leaves_own_traffic_of_host_unchanged() -> Result<()> {
    five_situations(Vip::Host, "host-vip")
}

#[test]
#[ignore = "long"]
fn dataplane_vip_leaves_own_traffic_of_host_unchanged() -> Result<()> {
    five_situations(Vip::Dataplane, "own-vip")
}

/// The dataplane, not the host, must own the VIP: otherwise the kernel routes the client's packets
/// through `lo`.
#[test]
fn client_on_director_reaches_service() -> Result<()> {
    let mut site = site("local", Vip::Dataplane)?;
    site.start_dataplane(&[])?;
    site.add_service(80, "rr")?;
    let mut load = site.load();
    load.sizes = vec![1, 20_011, 300_007];
    load.requests = 20;
    let report = common::ok(site.director.load(&load)?, 20)?;
    common::spread(&report, &[10, 10])
}

/// The director is the servers' gateway, and the dataplane owns the VIP.
#[test]
fn one_armed_nat_with_dataplane_vip_serves_clients() -> Result<()> {
    let mut options = SiteOptions::new("one-arm-nat", Forward::Nat);
    options.topology = lvs_testbed::Topology::OneArm;
    options.servers = 2;
    options.vip = Vip::Dataplane;
    let site = common::site(options)?;
    site.add_service(80, "rr")?;
    let load = site.load_of(94);
    common::spread(&common::ok(site.client.load(&load)?, 94)?, &[47, 47])
}

/// Without offloads, every segment is small and has a complete checksum. With offloads, there are
/// super-packets with partial checksums.
#[test]
#[ignore = "long"]
fn transfers_over_links_without_offloads_or_with_another_mtu_are_complete() -> Result<()> {
    for forward in [Forward::Nat, Forward::Dr, Forward::Tun] {
        for (offloads, mtu) in [(false, 1500), (true, 1280), (true, 9000)] {
            let mut options = SiteOptions::with_servers("links", forward, 2);
            options.offloads = offloads;
            options.mtu = mtu;
            let site = common::site(options)?;
            site.add_service(80, "rr")?;
            let load = site.load_of(94);
            common::spread(&common::ok(site.client.load(&load)?, 94)?, &[47, 47])?;
            common::upload(&site)?;
        }
    }
    Ok(())
}

/// Sends two ICMP errors about packets of no service from a server to the client, the first without
/// ports, until the client has received the errors with these numbers. Returns whether it has
/// received the first.
fn errors_in_transit(site: &Site, expected: &[u8]) -> Result<bool> {
    let listen = r#"
        use Socket;
        socket(S, PF_INET, SOCK_RAW, 1) or die $!;
        $| = 1; print "ready\n";
        while (recv(S, my $packet, 2000, 0)) {
            my ($type, $code, $sum, $word) = unpack("CCnN", substr($packet, (ord($packet) & 15) * 4));
            print "got $word\n" if $type == 3 && $code == 13;
        }"#;
    let listener = site.client.spawn("perl", &["-e", listen])?;
    let limit = Duration::from_secs(30);
    wait_until("the client to listen", limit, || {
        listener.log().contains("ready")
    })?;
    let client = common::client_address(site)?;
    let send = format!(
        r#"perl -MSocket -e '
        sub sum {{ my $s = 0; $s += $_ for unpack("n*", $_[0]); $s = ($s & 0xffff) + ($s >> 16) while $s >> 16; ~$s & 0xffff }}
        my $client = inet_aton("{client}");
        socket(S, PF_INET, SOCK_RAW, 1) or die $!;
        my $about = pack("CCnnnCCna4a4", 0x45, 0, 36, 7, 0, 60, 17, 0, $client, inet_aton("203.0.113.200"));
        substr($about, 10, 2) = pack("n", sum($about));
        my @quoted = ($about, $about . pack("nnnn", 4000, 53, 16, 0));
        for my $word (1, 2) {{
            my $error = pack("CCnN", 3, 13, 0, $word) . $quoted[$word - 1];
            substr($error, 2, 2) = pack("n", sum($error));
            send(S, $error, 0, sockaddr_in(0, $client)) or die $!;
        }}'"#
    );
    let has = |number: &u8| listener.log().contains(&format!("got {number}\n"));
    let all = || expected.iter().all(has);
    let send = || site.servers[0].sh(&send).map(drop);
    common::send_until("the client to receive the ICMP errors", limit, send, all)?;
    Ok(has(&1))
}

/// With `schedule_icmp`, the dataplane intercepts and drops ICMP errors without ports. A change of
/// the sysctl takes effect while the dataplane runs.
#[test]
fn schedule_icmp_intercepts_icmp_errors_without_ports() -> Result<()> {
    let mut site = site("transit-errors", Vip::Host)?;
    site.start_dataplane(&[])?;
    site.add_service(80, "rr")?;
    for (value, expected) in [("0", &[1, 2][..]), ("1", &[2]), ("0", &[1, 2]), ("1", &[2])] {
        site.lvsadm(&format!("sysctl schedule_icmp={value}"))?;
        let first = errors_in_transit(&site, expected)?;
        ensure!(
            first == expected.contains(&1),
            "with schedule_icmp={value}, the client received the ICMP error without ports, or did not receive it, against the setting"
        );
    }
    Ok(())
}
