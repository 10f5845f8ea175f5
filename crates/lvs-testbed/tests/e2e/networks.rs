//! Network changes during traffic: VLANs, interfaces that are added, removed, changed and renamed,
//! servers with new link-layer addresses, multicast snooping, missing neighbours.

use crate::common;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_sys::is_root_of_all;
use lvs_sys::testing::not_run;
use lvs_testbed::{
    Forward, Host, Link, LoadOptions, Mode, Proc, Site, SiteOptions, Testbed, Topology, Vip,
    content, programs, servers, wait_until,
};

/// Time limit from a change until traffic flows again.
const PATIENCE: Duration = Duration::from_secs(30);

fn site(label: &str, forward: Forward, change: impl FnOnce(&mut SiteOptions)) -> Result<Site> {
    let mut options = SiteOptions::with_servers(label, forward, 1);
    change(&mut options);
    common::site(options)
}

/// Waits until the dataplane has logged `what`, and checks that it has logged it only once.
fn is_logged_once(site: &Site, what: &str) -> Result<()> {
    common::says(site, what)?;
    ensure!(
        logged(site, what) == 1,
        "the number of log lines with the message is not 1: {what}: {}",
        logged(site, what)
    );
    Ok(())
}

fn logged(site: &Site, what: &str) -> usize {
    let log = site.dataplane.as_ref().map(Proc::log).unwrap_or_default();
    log.lines().filter(|line| line.contains(what)).count()
}

fn counted(site: &Site, reason: &str) -> Result<u64> {
    count_of(&site.lvsadm("--json drops")?, reason)
}

/// Returns the count of a reason from the output of `lvsadm drops --json`.
fn count_of(listing: &str, reason: &str) -> Result<u64> {
    let all: serde_json::Value = serde_json::from_str(listing)?;
    let reasons = all.as_array().context("the JSON value is not a list")?;
    let found = reasons
        .iter()
        .filter(|row| row["reason"] == reason)
        .filter_map(|row| row["count"].as_u64());
    Ok(found.sum())
}

/// A slow download that is in progress during network changes.
struct Download<'a> {
    site: &'a Site,
    program: Proc,
    size: u64,
}

impl<'a> Download<'a> {
    fn start(site: &'a Site) -> Result<Self> {
        const SIZE: u64 = 8 << 20;
        site.serve("long", SIZE)?;
        let file = site.testbed.dir().join("downloaded").display().to_string();
        let url = format!("http://{}/long?rate=2m", site.vip);
        let arguments = ["-sS", "-f", "-m", "240", "-o", &file, &url];
        let program = site.client.spawn("curl", &arguments)?;
        let download = Self {
            site,
            program,
            size: SIZE,
        };
        wait_until("a download to have started", PATIENCE, || {
            std::fs::metadata(&file).is_ok_and(|file| file.len() > 0)
        })?;
        Ok(download)
    }

    /// Checks that the download succeeds with the right content, and removes the downloaded file.
    fn finish(mut self) -> Result<()> {
        let status = self.program.wait(Duration::from_secs(70))?;
        ensure!(
            status.success(),
            "the download failed: {status}: {}",
            self.program.log()
        );
        let file = self.site.testbed.dir().join("downloaded");
        let mut expected = vec![0; usize::try_from(self.size)?];
        content::fill(0, &mut expected);
        ensure!(
            std::fs::read(&file)? == expected,
            "the downloaded file differs from the served one"
        );
        std::fs::remove_file(file)?;
        Ok(())
    }
}

fn new_connections(site: &Site, what: &str) -> Result<()> {
    let mut load = site.load_of(20);
    load.timeout_ms = 4000;
    wait_until(&format!("traffic to flow after {what}"), PATIENCE, || {
        site.client
            .load(&load)
            .is_ok_and(|report| report.failed == 0)
    })
}

#[test]
fn changed_or_replaced_interface_is_used_again() -> Result<()> {
    let site = site("flaps", Forward::Nat, |_| {})?;
    site.add_service(80, "rr")?;
    let director = &site.director;

    let download = Download::start(&site)?;
    director.sh("ip link set eth1 down")?;
    common::says(&site, "eth1 is down")?;
    director.sh("ip link set eth1 up")?;
    download
        .finish()
        .context("the download failed after eth1 was set down and up")?;
    is_logged_once(&site, "eth1 is down")?;
    is_logged_once(&site, "eth1 is up")?;

    let download = Download::start(&site)?;
    director.sh("ip link set eth1 name lan1 || { ip link set eth1 down; ip link set eth1 name lan1; ip link set lan1 up; }")?;
    download
        .finish()
        .context("the download failed after eth1 was renamed")?;
    new_connections(&site, "eth1 was renamed")?;
    is_logged_once(&site, "the interface eth1 was renamed to lan1")?;
    let rules = || director.sh("nft list ruleset").unwrap_or_default();
    wait_until(
        "the host to have the rules for the interface name",
        PATIENCE,
        || rules().contains("in-lan1") && !rules().contains("in-eth1"),
    )
    .with_context(rules)?;

    // The servers' MTU is now smaller: clients must receive ICMP errors.
    let download = Download::start(&site)?;
    site.servers[0].sh("ip link set eth0 mtu 1300")?;
    director.sh("ip link set lan1 mtu 1300")?;
    download
        .finish()
        .context("the download failed after the MTU was lowered")?;
    let file = site.serve("up", 2_000_000)?;
    site.client.sh(&format!(
        "curl -sS -f -m 120 -T {} http://{}/up/smaller",
        file.display(),
        site.vip
    ))?;
    director.sh("ip link set lan1 mtu 1500; ip link set lan1 name eth1 || { ip link set lan1 down; ip link set lan1 name eth1; ip link set eth1 up; }")?;

    // The device is replaced by one with the same name. Connections survive because addresses and
    // routes are restored in time.
    let download = Download::start(&site)?;
    director.sh("ip link delete eth1")?;
    site.testbed.plug("back", director, "eth1")?;
    director.sh("ip addr add 10.0.0.1/24 dev eth1; ip link set eth1 up")?;
    download
        .finish()
        .context("the download failed after eth1 was replaced")?;
    new_connections(&site, "eth1 was replaced")?;
    is_logged_once(&site, "eth1 is no longer in use")
}

#[test]
fn changed_route_to_clients_is_used() -> Result<()> {
    let site = site("routes", Forward::Nat, |options| {
        options.topology = Topology::OneArm;
    })?;
    site.add_service(80, "rr")?;
    let router = site
        .router
        .as_ref()
        .context("the one-arm site has a router")?;
    router.sh("ip addr add 192.0.2.253/24 dev eth1")?;

    let download = Download::start(&site)?;
    site.director
        .sh("ip route replace default via 192.0.2.253")?;
    download
        .finish()
        .context("the download failed after the gateway was changed")?;

    let download = Download::start(&site)?;
    site.director.sh("ip route delete default")?;
    // If the download is complete, the packets belong to a new connection.
    let url = format!("http://{}/id", site.vip);
    let _new = site.client.spawn("curl", &["-sS", "-m", "240", &url])?;
    wait_until(
        "the dataplane to drop packets without a route",
        PATIENCE,
        || counted(&site, "no_route").is_ok_and(|count| count > 0),
    )?;
    site.director.sh("ip route add default via 192.0.2.254")?;
    download
        .finish()
        .context("the download failed after the route was missing for a while")
}

/// The routes to the servers lead through a device without link-layer addresses, through an interface
/// that the dataplane does not use, and to a blackhole.
#[test]
fn unusable_routes_to_servers_are_counted_and_reported_with_fix() -> Result<()> {
    let mut site = site("nolink", Forward::Nat, |_| {})?;
    site.director.sh(
        "ip tuntap add dev tun9 mode tun; ip link set tun9 up; ip route add 10.9.8.0/24 dev tun9; \
         ip link add dum0 type veth peer name dum1; ip link set dum0 up; ip link set dum1 up; \
         ip route add 10.9.9.0/24 dev dum0; ip route add blackhole 10.9.10.0/24",
    )?;
    site.lvsadm(&format!("-A -t {}:80 -s rr", site.vip))?;
    for (server, reason, names, fix) in [
        ("10.9.8.2:80", "no_link_layer", "tun9", "--backend tun"),
        ("10.9.9.2:80", "unused_interface", "dum0", "--interface"),
        ("10.9.10.2:80", "route_refuses", "ip route get", "delete it"),
    ] {
        site.lvsadm(&format!("-a -t {}:80 -r {server} -m", site.vip))?;
        // The kernel reports a new route to the dataplane later.
        let question = format!("explain tcp 192.0.2.100:5000 {}:80", site.vip);
        let explained = || site.lvsadm(&question).unwrap_or_default();
        wait_until("the dataplane to use the route", PATIENCE, || {
            explained().contains(reason)
        })
        .with_context(explained)?;
        let url = format!("http://{}/id", site.vip);
        let what = format!("the counter {reason} to increase");
        wait_until(&what, PATIENCE, || {
            let _ = site.client.run("curl", &["-sS", "-m", "1", &url]);
            counted(&site, reason).is_ok_and(|count| count > 0)
        })?;
        ensure!(
            counted(&site, "no_route")? == 0,
            "packets were counted as no_route instead of {reason}"
        );
        let program = programs::find("lvsadm")?.display().to_string();
        let found = || {
            let found = site
                .director
                .sh(&format!("{program} --json doctor || true"));
            found.unwrap_or_default()
        };
        let of = |found: &str| {
            let all: serde_json::Value = serde_json::from_str(found).unwrap_or_default();
            let findings = all.as_array().cloned().unwrap_or_default();
            findings
                .iter()
                .filter(|finding| {
                    finding["what"]
                        .as_str()
                        .is_some_and(|what| what.contains(reason))
                })
                .filter_map(|finding| finding["fix"].as_str().map(str::to_owned))
                .collect::<String>()
        };
        wait_until(&format!("doctor to report {reason}"), PATIENCE, || {
            let reported = of(&found());
            reported.contains(names) && reported.contains(fix)
        })
        .with_context(found)?;
        site.lvsadm(&format!("-d -t {}:80 -r {server}", site.vip))?;
    }
    site.dataplane = None;
    Ok(())
}

#[test]
fn changed_link_layer_address_of_server_is_used() -> Result<()> {
    let site = site("mac", Forward::Nat, |_| {})?;
    site.add_service(80, "rr")?;
    let server = &site.servers[0];
    // First the server announces its new address; then it does not, and the director must query it.
    for (notify, mac) in [(1, "02:00:00:00:77:01"), (0, "02:00:00:00:77:02")] {
        server.sysctl("ipv4/conf/eth0/arp_notify", &notify.to_string())?;
        let download = Download::start(&site)?;
        server.sh(&format!("ip link set eth0 address {mac}"))?;
        download
            .finish()
            .with_context(|| format!("the server has arp_notify = {notify}"))?;
    }
    new_connections(&site, "the server's link-layer address has changed twice")?;
    // A third change: with a static entry for its gateway, the server sends no ARP packets.
    let gateway = site.director.sh("cat /sys/class/net/eth1/address")?;
    server.sh(&format!(
        "ip link set eth0 address 02:00:00:00:77:03\nip neigh replace 10.0.0.1 lladdr {} dev eth0 nud permanent",
        gateway.trim()
    ))?;
    let known = site.director.sh("ip neigh show 10.0.0.11")?;
    ensure!(
        known.contains("77:02"),
        "the director has a wrong neighbour entry: {known}"
    );
    // The server sends nothing: only the client's repeated SYNs reveal the change.
    let url = format!("http://{}/id", site.vip);
    let printed = site.client.run("curl", &["-sS", "-f", "-m", "120", &url])?;
    ensure!(
        printed == "rs1\n",
        "another server than rs1 answered the client: {printed}"
    );
    Ok(())
}

/// The clients receive an ICMP error, as from a router, and need not wait for a timeout.
#[test]
fn clients_of_unreachable_server_receive_icmp_error() -> Result<()> {
    for forward in [Forward::Nat, Forward::Dr, Forward::Tun] {
        let site = site("gone", forward, |options| {
            // The server must be a neighbour of the director itself.
            options.topology = if forward == Forward::Nat {
                Topology::TwoArm
            } else {
                Topology::OneArm
            };
        })?;
        site.servers[0].sh("ip link set eth0 down")?;
        site.add_service(80, "rr")?;
        let url = format!("http://{}/id", site.vip);
        let refused = site.client.run("curl", &["-sSv", "-m", "120", &url]);
        let output = format!(
            "{:#}",
            refused
                .err()
                .context("the connection succeeded although no neighbour answers")?
        );
        ensure!(
            output.contains("No route to host"),
            "the client received no ICMP error: {forward:?}: {output}"
        );
        wait_until("the counter no_neighbour to increase", PATIENCE, || {
            counted(&site, "no_neighbour").is_ok_and(|count| count > 0)
        })
        .with_context(|| format!("{forward:?}"))?;
    }
    Ok(())
}

/// A standby director resolves its gateway in advance, because it may have to take over at any
/// time.
#[test]
fn gateway_address_is_resolved_before_the_first_packet() -> Result<()> {
    let site = site("gateway", Forward::Dr, |options| {
        options.topology = Topology::OneArm;
    })?;
    site.add_service(80, "rr")?;
    for gateway in ["192.0.2.254", "fd00:192::254"] {
        let known = || {
            let output = site.director.run("ip", &["neigh", "show", gateway]);
            output.is_ok_and(|output| output.contains("lladdr"))
        };
        let what = format!("the link-layer address of {gateway} to be known");
        wait_until(&what, PATIENCE, known)?;
    }
    Ok(())
}

/// The switch sends multicast frames only to hosts that have reported the group.
#[test]
fn snooping_switch_forwards_ipv6_multicast_to_dataplane_until_service_is_removed() -> Result<()> {
    let mut options = SiteOptions::with_servers("mld", Forward::Nat, 1);
    options.vip = Vip::Dataplane;
    let mut site = Site::new(options)?;
    site.testbed.snoop("front")?;
    site.start_dataplane(&[])?;
    let virt = SocketAddr::from((site.vip6, 80));
    let server = SocketAddr::from((site.real_address6(0), 80));
    site.lvsadm(&format!("-A -t {virt}"))?;
    site.lvsadm(&format!("-a -t {virt} -r {server} -m"))?;
    // The space at the end excludes ff02::1:ff00:100, the group of the client's address.
    let group = "ff02::1:ff00:10 ";
    wait_until("the switch to have learned the group", PATIENCE, || {
        site.testbed
            .groups()
            .is_ok_and(|groups| groups.contains(group))
    })?;
    // The switch sends neighbour solicitations, also those of the client, only to listeners of the
    // group.
    let mut load = LoadOptions::new(virt);
    load.requests = 20;
    site.client.load(&load)?.all_ok(20)?;
    // The client's neighbour entry is flushed; an answer to its query restores it.
    site.client.sh("ip -6 neigh flush dev eth0")?;
    site.testbed.snoop("front")?;
    site.client.load(&load)?.all_ok(20)?;
    // The dataplane leaves the groups.
    site.lvsadm("-C")?;
    wait_until("the switch to forget the group", PATIENCE, || {
        site.testbed
            .groups()
            .is_ok_and(|groups| !groups.contains(group))
    })
    .with_context(|| site.testbed.groups().unwrap_or_default())
    .with_context(|| site.dataplane.as_ref().map(Proc::log).unwrap_or_default())
}

/// A site with one trunk: a client in VLAN 100, servers in VLAN 200, and a director in both.
struct TrunkSite {
    processes: Vec<Proc>,
    director: Host,
    client: Host,
    testbed: Testbed,
}

/// Adds a VLAN interface on `eth0`.
fn add_vlan(host: &Host, vlan: u16, addresses: &[&str]) -> Result<()> {
    host.sh(&format!(
        "ip link add link eth0 name eth0.{vlan} type vlan id {vlan}; ip link set eth0.{vlan} up"
    ))?;
    for address in addresses {
        let nodad = if address.contains(':') { "nodad" } else { "" };
        host.sh(&format!("ip addr add {address} dev eth0.{vlan} {nodad}"))?;
    }
    Ok(())
}

fn trunk(label: &str, mtu: u32) -> Result<TrunkSite> {
    let mut testbed = Testbed::new(label)?;
    let [client, director, rs1, rs2] = testbed.hosts(["client", "director", "rs1", "rs2"])?;
    let ports = [&client, &director, &rs1, &rs2];
    testbed.connect(&[Link::Lan {
        name: "trunk",
        ports: ports.iter().map(|&host| (host, "eth0")).collect(),
        mtu,
    }])?;
    let mut processes = Vec::new();
    for host in ports {
        host.sh("ip link set eth0 up")?;
    }
    for (host, vlan, addresses) in [
        (&client, 100, ["192.0.2.100/24", "fd00:192::100/64"]),
        (&rs1, 200, ["10.0.0.11/24", "fd00:10::11/64"]),
        (&rs2, 200, ["10.0.0.12/24", "fd00:10::12/64"]),
    ] {
        add_vlan(host, vlan, &addresses)?;
        if vlan == 200 {
            host.sh("ip route add default via 10.0.0.1; ip route add default via fd00:10::1")?;
        }
    }
    let www = testbed.dir().join("www/s");
    std::fs::create_dir_all(&www)?;
    for size in content::SIZES {
        content::write_file(&www.join(size.to_string()), *size)?;
    }
    for server in [&rs1, &rs2] {
        processes.push(servers::nginx(server, &servers::NginxOptions::default())?);
    }
    Ok(TrunkSite {
        processes,
        director,
        client,
        testbed,
    })
}

impl TrunkSite {
    fn start_dataplane(&mut self, more: &[&str]) -> Result<()> {
        add_vlan(&self.director, 100, &["192.0.2.1/24", "fd00:192::1/64"])?;
        add_vlan(&self.director, 200, &["10.0.0.1/24", "fd00:10::1/64"])?;
        let mut arguments = vec![
            "--interface",
            "eth0.100",
            "--interface",
            "eth0.200",
            "--own-vips",
        ];
        arguments.extend(more);
        let program = programs::find("lvs-dataplane")?;
        let dataplane = self.director.spawn(program, &arguments)?;
        wait_until(
            "the dataplane to answer on its control socket",
            PATIENCE,
            || self.director.has_dataplane(),
        )
        .with_context(|| dataplane.log())?;
        self.processes.push(dataplane);
        Ok(())
    }

    fn lvsadm(&self, arguments: &str) -> Result<String> {
        let words: Vec<&str> = arguments.split_ascii_whitespace().collect();
        self.director.run(programs::find("lvsadm")?, &words)
    }

    fn counted(&self, reason: &str) -> Result<u64> {
        count_of(&self.lvsadm("--json drops --all")?, reason)
    }

    /// Downloads from and uploads to services in VLAN 100 with servers in VLAN 200.
    fn downloads_and_uploads(&self) -> Result<()> {
        for (virt, servers) in [
            ("192.0.2.10:80", ["10.0.0.11:80", "10.0.0.12:80"]),
            (
                "[fd00:192::10]:80",
                ["[fd00:10::11]:80", "[fd00:10::12]:80"],
            ),
        ] {
            self.lvsadm(&format!("-A -t {virt} -s rr"))?;
            for server in servers {
                self.lvsadm(&format!("-a -t {virt} -r {server} -m"))?;
            }
            let mut load = LoadOptions::new(virt.parse()?);
            load.requests = 94;
            let report = self.client.load(&load)?;
            report.all_ok(94)?;
            common::spread(&report, &[47, 47])?;
            let upload = self.testbed.dir().join("www/s/10485760");
            let url = format!("http://{virt}/up/x");
            let path = upload.display().to_string();
            let arguments = ["-sS", "-g", "-f", "-m", "30", "-T", &path, &url];
            self.client.run("curl", &arguments)?;
        }
        Ok(())
    }
}

#[test]
#[ignore = "by hand: needs a kernel with 802.1Q"]
fn packets_between_vlans_of_a_trunk_are_forwarded() -> Result<()> {
    for mtu in [1500, 9000] {
        let mut site = trunk("vlan", mtu)?;
        site.start_dataplane(&[])?;
        site.downloads_and_uploads()?;
        // The host is in both VLANs: health checks and ssh need no special setup.
        let printed = site
            .director
            .run("curl", &["-sS", "-f", "-m", "5", "http://10.0.0.11/id"])?;
        ensure!(
            printed == "rs1\n",
            "MTU {mtu}: another server than rs1 answered the director: {printed}"
        );

        // The client moves to the untagged network, and then to VLAN 300. The dataplane does not
        // answer there.
        site.client
            .sh("ip addr flush dev eth0.100; ip addr add 192.0.2.100/24 dev eth0")?;
        let own = programs::own()?;
        ensure!(site.client.run(&own, &["ping", "192.0.2.10"]).is_err());
        site.client.sh("ip addr flush dev eth0")?;
        add_vlan(&site.client, 300, &["192.0.2.100/24"])?;
        ensure!(site.client.run(&own, &["ping", "192.0.2.10"]).is_err());
        ensure!(site.counted("vlan")? > 0);
    }
    Ok(())
}

/// BPF programs forward packets from one VLAN to another.
#[test]
#[ignore = "by hand: needs a kernel with 802.1Q"]
fn packets_between_vlans_of_a_trunk_are_forwarded_by_kernel_fast_path() -> Result<()> {
    if Mode::detect()? == Mode::Rootless {
        ensure!(
            !is_root_of_all(),
            "BPF programs cannot be loaded, although the test runs as root"
        );
        not_run("the kernel fast path needs root, outside of containers");
    }
    let mut site = trunk("vlan-ink", 1500)?;
    site.start_dataplane(&["--fast-path", "on"])?;
    site.downloads_and_uploads()?;
    for reason in ["kernel_requests", "kernel_replies"] {
        let count = site.counted(reason)?;
        ensure!(
            count > 100,
            "at most 100 packets were counted: {count} {reason}"
        );
    }
    Ok(())
}

/// doctor reports a program at the trunk, although the dataplane uses only the VLAN interfaces.
#[test]
#[ignore = "by hand: needs a kernel with 802.1Q"]
fn foreign_bpf_program_at_trunk_is_reported_by_doctor() -> Result<()> {
    let mut site = trunk("below", 1500)?;
    site.start_dataplane(&[])?;
    let program = programs::find("lvsadm")?.display().to_string();
    site.director.sh(&format!(
        "{program} -A -t 192.0.2.10:80 && {program} -a -t 192.0.2.10:80 -r 10.0.0.11:80 -m"
    ))?;
    let served = || {
        let fetch = "curl -s -m 1 -o /dev/null http://192.0.2.10/s/1 && echo yes || echo no";
        Ok::<_, anyhow::Error>(site.client.sh(fetch)?.trim() == "yes")
    };
    let doctor = || {
        let output = format!("{program} --json doctor || true");
        site.director.sh(&output)
    };
    wait_until("a request to be answered", PATIENCE, || {
        served().unwrap_or(false)
    })?;
    ensure!(
        !doctor()?.contains("BPF program"),
        "doctor reports a BPF program: {}",
        doctor()?
    );
    let drop = super::filters::TCX_DROP;
    let mut tcx = site
        .director
        .spawn("perl", &["-e", drop, "eth0", "egress"])?;
    wait_until("the BPF program to be attached", PATIENCE, || {
        tcx.log().contains("attached")
    })
    .with_context(|| tcx.log())?;
    ensure!(!served()?);
    let output = doctor()?;
    let found =
        "a BPF program at the egress of eth0 (tcx: somebodys) may drop requests and replies";
    ensure!(output.contains(found), "no {found:?} in {output}");
    tcx.kill();
    wait_until(
        "requests to be answered after the program was detached",
        PATIENCE,
        || served().unwrap_or(false),
    )
}

/// A capture on the wire shows the VLAN tags.
#[test]
#[ignore = "by hand: needs a kernel with 802.1Q, and tshark"]
fn frames_of_a_vlan_carry_its_tag() -> Result<()> {
    let site = trunk("tags", 1500)?;
    add_vlan(&site.director, 100, &["192.0.2.1/24"])?;
    let file = site.testbed.dir().join("tags.pcap").display().to_string();
    let mut capture = site.client.spawn(
        "dumpcap",
        &[
            "-q",
            "-i",
            "eth0",
            "-a",
            "duration:20",
            "-c",
            "4",
            "-f",
            "vlan 100 and (arp or icmp)",
            "-w",
            &file,
        ],
    )?;
    wait_until("the capture to start", PATIENCE, || {
        capture.log().contains("File:")
    })
    .with_context(|| capture.log())?;
    let own = programs::own()?;
    site.client.run(&own, &["ping", "192.0.2.1"])?;
    capture.wait(PATIENCE)?;
    let fields = ["-r", &file, "-T", "fields", "-e", "vlan.id"];
    let ids = site.client.run("tshark", &fields)?;
    // ARP and echo packets pass in both directions.
    ensure!(
        ids.lines().count() == 4 && ids.lines().all(|id| id == "100"),
        "the frames do not have VLAN 100: {ids}"
    );
    Ok(())
}
