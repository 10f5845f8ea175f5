//! Path MTU discovery with large downloads and uploads: a hop with an MTU of 1,400 bytes before or
//! behind the director, for NAT, direct routing and tunnels, and for both IP versions.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, Host, Link, Site, SiteOptions, Topology, content};

/// Size of the file in bytes, about a thousand segments.
const SIZE: u64 = 1_500_001;

/// Creates a site with a router between the client, the director and the servers, so that each of
/// the three links can have a small MTU.
fn site(label: &str, forward: Forward) -> Result<Site> {
    let mut options = SiteOptions::new(label, forward);
    options.topology = Topology::Routed;
    options.servers = 1;
    let site = Site::new(options)?;
    if forward == Forward::Nat {
        // Servers send packets to the director, not directly to the client. The router's own ICMP
        // errors also pass the director on their way to the servers.
        router(&site)?.sh(
            "echo 1 > /proc/sys/net/ipv4/conf/all/accept_local
             ip rule add iif eth2 lookup 100; ip route add default via 192.0.2.1 table 100
             ip -6 rule add iif eth2 lookup 100; ip -6 route add default via fd00:192::1 table 100",
        )?;
    }
    site.serve("big", SIZE)?;
    Ok(site)
}

fn router(site: &Site) -> Result<&Host> {
    site.router.as_ref().context("the routed site has a router")
}

/// The part of the path that has a small MTU.
#[derive(Clone, Copy, Debug)]
enum Narrow {
    /// The hop towards the client: replies are too long.
    Client,
    /// The path to the director: requests are too long before they reach the director.
    Director,
    /// The hop between director and servers: requests are too long after the director.
    Servers,
}

const HOPS: [Narrow; 3] = [Narrow::Client, Narrow::Director, Narrow::Servers];

/// Sets an MTU of 1,400 bytes on one link of the router and of 1,500 bytes on the others. Flushes the
/// path MTUs that hosts have learned, and starts a new dataplane.
fn narrow(site: &mut Site, which: Narrow) -> Result<()> {
    let mut script = String::new();
    for (way, four, six, device) in [
        (Narrow::Client, "198.51.100.0/24", "fd00:198::/64", "eth0"),
        (Narrow::Director, "192.0.2.0/24", "fd00:192::/64", "eth1"),
        (Narrow::Servers, "10.0.0.0/24", "fd00:10::/64", "eth2"),
    ] {
        let same = std::mem::discriminant(&way) == std::mem::discriminant(&which);
        let mtu = if same { 1400 } else { 1500 };
        script.push_str(&format!(
            "ip route replace {four} dev {device} mtu lock {mtu}
             ip -6 route replace {six} dev {device} proto kernel metric 256 mtu lock {mtu}\n"
        ));
    }
    router(site)?.sh(&script)?;
    for host in [&site.client, &site.servers[0], &site.director] {
        host.sh("ip route flush cache; ip -6 route flush cache")?;
    }
    // The dataplane stores path MTUs of tunnels for ten minutes; a new dataplane has none.
    site.start_dataplane(&[])
}

/// Checks every byte of a download and of an upload.
fn both_ways(site: &Site, virt: SocketAddr) -> Result<()> {
    let base = format!("http://{virt}");
    let got = site.testbed.dir().join("got");
    let path = got.display().to_string();
    let from = format!("{base}/big");
    let options = ["-sS", "-g", "-f", "-m", "120"];
    let run = |rest: [&str; 3]| {
        let arguments: Vec<&str> = options.iter().chain(&rest).copied().collect();
        site.client.run("curl", &arguments)
    };
    run(["-o", &path, &from]).context("the download failed")?;
    let mut expected = vec![0; usize::try_from(SIZE)?];
    content::fill(0, &mut expected);
    ensure!(
        std::fs::read(&got)? == expected,
        "the downloaded file differs from the served one"
    );
    run(["-T", &path, &format!("{base}/up/big")]).context("the upload failed")?;
    let there = site.testbed.dir().join("rs1-up/up/big");
    ensure!(
        std::fs::read(&there)? == expected,
        "the uploaded file differs from the original"
    );
    std::fs::remove_file(there)?;
    Ok(())
}

/// Downloads and uploads a file for each narrow hop of `hops` and each kind of service: whether the
/// client uses IPv6, whether the server uses IPv6, and the options of the forwarding method.
fn every_hop(site: &mut Site, hops: &[Narrow], kinds: &[(bool, bool, &str)]) -> Result<()> {
    for &which in hops {
        for &(six, server6, options) in kinds {
            narrow(site, which)?;
            let virt: IpAddr = if six {
                site.vip6.into()
            } else {
                site.vip.into()
            };
            let server: IpAddr = if server6 {
                site.real_address6(0).into()
            } else {
                site.real_address(0).into()
            };
            let (virt, server) = (SocketAddr::new(virt, 80), SocketAddr::new(server, 80));
            site.lvsadm(&format!("-A -t {virt}"))?;
            site.lvsadm(&format!("-a -t {virt} -r {server} {options}"))?;
            both_ways(site, virt)
                .with_context(|| format!("{which:?} narrow, {virt} to {server} {options}"))?;
        }
    }
    Ok(())
}

#[test]
fn pmtu_is_discovered_through_nat() -> Result<()> {
    let mut site = site("pmtu-nat", Forward::Nat)?;
    let hops = [Narrow::Client, Narrow::Director];
    every_hop(
        &mut site,
        &hops,
        &[(false, false, "-m"), (true, true, "-m")],
    )
}

/// The server is behind a separate router, which sends ICMP errors to clients through the director.
#[test]
fn nat_transfers_through_narrow_hop_behind_director_are_complete() -> Result<()> {
    let mut site = Site::new(SiteOptions::with_servers("pmtu-hop", Forward::Nat, 1))?;
    site.serve("big", SIZE)?;
    let server = site.servers[0].clone();
    let [hop] = site.testbed.hosts(["hop"])?;
    site.testbed.connect(&[Link::Cable {
        a: (&hop, "eth1"),
        b: (&server, "eth1"),
        mtu: 1500,
    }])?;
    site.testbed.plug("back", &hop, "eth0")?;
    hop.sh("ip link set eth0 up; ip link set eth1 up
            ip addr add 10.0.0.254/24 dev eth0; ip addr add fd00:10::254/64 dev eth0 nodad
            ip addr add 10.9.0.254/24 dev eth1; ip addr add fd00:9::254/64 dev eth1 nodad
            ip route replace 10.9.0.0/24 dev eth1 mtu lock 1400
            ip -6 route replace fd00:9::/64 dev eth1 proto kernel metric 256 mtu lock 1400
            ip route add default via 10.0.0.1; ip route add default via fd00:10::1
            echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv6/conf/all/forwarding")?;
    server.sh(
        "ip addr flush dev eth0; ip link set eth1 up
               ip addr add 10.9.0.11/24 dev eth1; ip addr add fd00:9::11/64 dev eth1 nodad
               ip route replace default via 10.9.0.254; ip route replace default via fd00:9::254",
    )?;
    site.director
        .sh("ip route add 10.9.0.0/24 via 10.0.0.254; ip route add fd00:9::/64 via fd00:10::254")?;
    site.start_dataplane(&[])?;
    for (virt, server) in [
        (SocketAddr::from((site.vip, 80)), "10.9.0.11:80"),
        ((site.vip6, 80).into(), "[fd00:9::11]:80"),
    ] {
        site.lvsadm(&format!("-A -t {virt}"))?;
        site.lvsadm(&format!("-a -t {virt} -r {server} -m"))?;
        both_ways(&site, virt).with_context(|| virt.to_string())?;
    }
    Ok(())
}

#[test]
fn pmtu_is_discovered_through_ipv4_tunnels() -> Result<()> {
    let mut site = site("pmtu-tun4", Forward::Tun)?;
    every_hop(
        &mut site,
        &HOPS,
        &[
            (false, false, "-i"),
            (false, false, "-i --tun-type gre"),
            (false, false, "-i --tun-type gue --tun-port 6080"),
            (true, false, "-i"),
        ],
    )
}

#[test]
#[ignore = "long"]
fn pmtu_is_discovered_through_ipv6_tunnels() -> Result<()> {
    let mut site = site("pmtu-tun6", Forward::Tun)?;
    every_hop(
        &mut site,
        &HOPS,
        &[
            (true, true, "-i"),
            (true, true, "-i --tun-type gre"),
            (true, true, "-i --tun-type gue --tun-port 6080"),
            (false, true, "-i"),
        ],
    )
}

/// Requests reach a narrow hop before the director. Replies bypass the director, and reach a narrow
/// hop on the path to the client.
#[test]
fn pmtu_is_discovered_by_direct_routing() -> Result<()> {
    let mut site = Site::new(SiteOptions::with_servers("pmtu-dr", Forward::Dr, 1))?;
    site.serve("big", SIZE)?;
    for (four, six, device) in [
        ("198.51.100.0/24", "fd00:198::/64", "eth0"),
        ("192.0.2.0/24", "fd00:192::/64", "eth1"),
    ] {
        router(&site)?.sh(&format!(
            "ip route replace {four} dev {device} mtu lock 1400
             ip -6 route replace {six} dev {device} proto kernel metric 256 mtu lock 1400"
        ))?;
    }
    site.start_dataplane(&[])?;
    for (virt, server) in [
        (IpAddr::from(site.vip), IpAddr::from(site.real_address(0))),
        (site.vip6.into(), site.real_address6(0).into()),
    ] {
        let (virt, server) = (SocketAddr::new(virt, 80), SocketAddr::new(server, 80));
        site.lvsadm(&format!("-A -t {virt}"))?;
        site.lvsadm(&format!("-a -t {virt} -r {server} -g"))?;
        both_ways(&site, virt).with_context(|| virt.to_string())?;
    }
    Ok(())
}

/// Without path MTU discovery, the host before the narrow hop fragments packets that are too long.
#[test]
#[ignore = "long"]
fn tunnel_transfers_without_pmtu_discovery_are_complete() -> Result<()> {
    let mut site = site("pmtu-off", Forward::Tun)?;
    narrow(&mut site, Narrow::Servers)?;
    site.start_dataplane(&["--sysctl", "pmtu_disc=0"])?;
    for options in [
        "-i",
        "-i --tun-type gre",
        "-i --tun-type gue --tun-port 6080",
    ] {
        let virt = site.service(80);
        site.lvsadm(&format!("-A -t {virt}"))?;
        let server = SocketAddr::new(site.real_address(0).into(), 80);
        site.lvsadm(&format!("-a -t {virt} -r {server} {options}"))?;
        both_ways(&site, virt).context(options)?;
        site.lvsadm("-C")?;
    }
    Ok(())
}

/// The MTU is 9,000 bytes between client and director, and 1,500 bytes to the servers.
#[test]
#[ignore = "long"]
fn pmtu_is_discovered_with_jumbo_frames_on_one_side() -> Result<()> {
    for clamp in [&[][..], &["--clamp-mss", "auto"]] {
        let mut options = SiteOptions::with_servers("jumbo", Forward::Nat, 1);
        options.mtu = 9000;
        let mut site = Site::new(options)?;
        site.serve("big", SIZE)?;
        // The link of the server has an MTU of 9,000; a route sets the smaller path MTU.
        site.director.sh("ip link set eth1 mtu 1500")?;
        site.director
            .sh("ip route replace 10.0.0.0/24 dev eth1 mtu lock 1500")?;
        site.servers[0].sh("ip route replace default via 10.0.0.1 mtu lock 1500")?;
        site.start_dataplane(clamp)?;
        site.add_service(80, "rr")?;
        both_ways(&site, site.service(80)).with_context(|| format!("{clamp:?}"))?;
    }
    Ok(())
}
