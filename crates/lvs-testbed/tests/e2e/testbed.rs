//! The testbed itself, without a dataplane: hosts, links, servers, decapsulator, removal.

use std::fs;
use std::net::SocketAddr;
use std::thread::sleep;
use std::time::Duration;

use crate::common;

use anyhow::{Result, ensure};
use lvs_testbed::site::Vip;
use lvs_testbed::{Forward, Host, LoadOptions, Site, SiteOptions, Testbed, Topology, servers};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

#[test]
fn kernel_forwarding_reaches_every_server() -> Result<()> {
    let mut options = SiteOptions::new("plain", Forward::Nat);
    options.ip_forward = true;
    options.servers = 2;
    let site = Site::new(options)?;
    for index in 0..2 {
        let target = SocketAddr::from((site.real_address(index), 80));
        let mut load = LoadOptions::new(target);
        load.requests = 94;
        load.keepalive = index == 1;
        let report = site.client.load(&load)?;
        report.all_ok(94)?;
        ensure!(
            report.servers.get(&format!("rs{}", index + 1)) == Some(&94),
            "the server did not answer 94 requests: {report:?}"
        );
    }
    let upload = site.serve("bulk", 3_000_000)?;
    let url = format!("http://{}/up/x", site.real_address(0));
    site.client.sh(&format!(
        "curl --fail --silent --show-error -T {} {url}",
        upload.display()
    ))?;
    ensure!(
        fs::read(upload)? == fs::read(site.testbed.dir().join("rs1-up/up/x"))?,
        "the uploaded file differs from the original"
    );

    let _iperf = servers::iperf3(&site.servers[0], site.real_address(0))?;
    let _dns = servers::dnsmasq(&site.servers[1])?;
    let answer = site
        .client
        .sh(&format!("dig +short @{} id.test txt", site.real_address(1)))?;
    ensure!(
        answer.trim() == "\"rs2\"",
        "the DNS server did not answer with `\"rs2\"`: {answer:?}"
    );
    site.client
        .sh(&format!("iperf3 -c {} -n 1M", site.real_address(0)))?;
    Ok(())
}

#[test]
fn load_reports_wrong_byte_and_dead_server() -> Result<()> {
    let mut options = SiteOptions::new("wrong", Forward::Nat);
    options.ip_forward = true;
    options.servers = 1;
    let mut site = Site::new(options)?;
    let mut load = LoadOptions::new(SocketAddr::from((site.real_address(0), 80)));
    load.sizes = vec![1000, 1];
    load.requests = 10;

    let file = site.testbed.dir().join("www/s/1000");
    let mut bytes = fs::read(&file)?;
    bytes[777] ^= 1;
    fs::write(&file, bytes)?;
    let report = site.client.load(&load)?;
    ensure!(
        (report.ok, report.failed) == (5, 5),
        "the numbers of successful and failed requests are not 5 and 5: {report:?}"
    );
    ensure!(
        report.errors[0].contains("byte 777 is wrong"),
        "the wrong byte is not reported: {report:?}"
    );

    let steady = site.client.steady_load(&LoadOptions {
        sizes: vec![1],
        pause_ms: 5,
        progress_ms: 20,
        ..load
    })?;
    let patience = Duration::from_secs(20);
    lvs_testbed::wait_until("a request to be answered", patience, || {
        steady.so_far().0 > 0
    })?;
    site.programs.clear();
    lvs_testbed::wait_until("nginx to have exited", patience, || {
        !site.servers[0].listens("tcp", 80)
    })?;
    lvs_testbed::wait_until("a request to fail", patience, || steady.so_far().1 > 0)?;
    let report = steady.finish()?;
    ensure!(
        report.ok > 0 && report.failed > 0,
        "no request succeeded or none failed: {report:?}"
    );
    Ok(())
}

/// The director sends IPIP packets with an echo request from the client to the VIP.
#[test]
fn tunnelled_packets_reach_the_vip_on_a_real_server() -> Result<()> {
    let mut options = SiteOptions::with_servers("ipip", Forward::Tun, 1);
    options.vip = Vip::Routed;
    let site = Site::new(options)?;
    let before = site.client.counter("Icmp", "InEchoReps")?;
    let script = format!(
        r#"perl -MSocket -e '
        sub sum {{ my $s = 0; $s += $_ for unpack("n*", $_[0]); $s = ($s & 0xffff) + ($s >> 16) while $s >> 16; ~$s & 0xffff }}
        my $icmp = pack("CCnnna*", 8, 0, 0, 7, 1, "abcdefgh"); substr($icmp, 2, 2) = pack("n", sum($icmp));
        my $ip = pack("CCnnnCCna4a4", 0x45, 0, 20 + length $icmp, 1, 0, 64, 1, 0, inet_aton("198.51.100.100"), inet_aton("{vip}"));
        substr($ip, 10, 2) = pack("n", sum($ip));
        socket(S, PF_INET, SOCK_RAW, 4) or die $!;
        send(S, $ip . $icmp, 0, sockaddr_in(0, inet_aton("{server}"))) or die $!;'"#,
        vip = site.vip,
        server = site.real_address(0)
    );
    let arrived = || {
        let now = site.client.counter("Icmp", "InEchoReps");
        now.is_ok_and(|now| now > before)
    };
    let send = || site.director.sh(&script).map(drop);
    let sent = common::send_until("the echo reply to arrive", common::SOON, send, arrived)?;
    let replies = site.client.counter("Icmp", "InEchoReps")? - before;
    ensure!(
        replies <= sent,
        "{replies} replies arrived, more than the {sent} requests"
    );
    Ok(())
}

#[test]
fn real_server_does_not_answer_arp_for_vip() -> Result<()> {
    for (forward, vip) in [(Forward::Dr, Vip::Dataplane), (Forward::Dr, Vip::Host)] {
        let mut options = SiteOptions::with_servers("arp", forward, 2);
        options.vip = vip;
        options.offloads = false;
        ensure!(options.topology == Topology::OneArm);
        let site = Site::new(options)?;
        let router = site.router.as_ref().expect("the one-arm site has a router");
        // The host that owns the address refuses the connection; without an owner, there is no
        // answer.
        let limit = if vip == Vip::Host { 60 } else { 1 };
        let _ = router.sh(&format!(
            "curl --silent --max-time {limit} http://{}:9/ || true",
            site.vip
        ))?;
        let neighbour = router.sh(&format!("ip neigh show {}", site.vip))?;
        ensure!(
            neighbour.contains("lladdr") == (vip == Vip::Host),
            "the answer to ARP does not match the owner of the VIP, {vip:?}: {neighbour}"
        );
    }
    Ok(())
}

#[test]
fn testbed_end_removes_processes_and_namespaces() -> Result<()> {
    let mut testbed = Testbed::new("gone")?;
    let [one, two] = testbed.hosts(["one", "two"])?;
    testbed.expose(&[&one])?;
    one.etc_hosts(&[("192.0.2.1".parse()?, "director.test")])?;
    ensure!(one.sh("getent hosts director.test")?.contains("192.0.2.1"));
    one.install("/bin/true".as_ref(), &["ipvsadm"])?;
    ensure!(
        one.sh("readlink -f /sbin/ipvsadm")?
            .trim()
            .ends_with("bin/true"),
        "the host does not have the installed program as /sbin/ipvsadm"
    );
    // This process leaves its process group and its parent.
    two.sh("setsid -f sleep 1000 </dev/null >/dev/null 2>&1")?;
    let namespaces = [&one, &two].map(|host| {
        fs::read_link(format!("/proc/{}/ns/net", host.pid()))
            .expect("the host's process has exited")
    });
    // The kernel may reuse the inode number of a removed namespace: the open files keep these
    // namespaces until the comparison.
    let _open = [&one, &two].map(|host| {
        fs::File::open(format!("/proc/{}/ns/net", host.pid()))
            .expect("the host's process has exited")
    });
    let dir = testbed.dir().to_owned();
    ensure!(dir.is_dir());
    drop(testbed);
    ensure!(!dir.exists(), "{} still exists", dir.display());
    for entry in fs::read_dir("/proc")?.flatten() {
        if let Ok(namespace) = fs::read_link(entry.path().join("ns/net")) {
            ensure!(
                !namespaces.contains(&namespace),
                "process {:?} still runs",
                entry.file_name()
            );
        }
    }
    ensure!(
        !fs::exists("/run/netns/lvs-gone-one")?,
        "/run/netns/lvs-gone-one still exists"
    );
    Ok(())
}

/// The kernel may reuse the inode number of a removed namespace. A cleanup by number alone would
/// then kill the processes of another test.
#[test]
fn namespace_inode_is_not_reused_before_testbed_end() -> Result<()> {
    let mut testbed = Testbed::new("inode")?;
    let [ends] = testbed.hosts(["ends"])?;
    let inode = |host: &Host| fs::read_link(format!("/proc/{}/ns/net", host.pid()));
    let ended = inode(&ends)?;
    kill(Pid::from_raw(ends.pid().cast_signed()), Signal::SIGKILL)?;
    for _ in 0..20 {
        let next = testbed.hosts(["next", "second", "third"])?;
        for host in &next {
            ensure!(
                inode(host)? != ended,
                "a namespace reused the inode {}",
                ended.display()
            );
        }
        sleep(Duration::from_millis(10));
    }
    Ok(())
}
