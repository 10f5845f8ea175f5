//! The kernel fast path, end to end: the traffic and the listings are the same as with the
//! dataplane alone.
//!
//! Requires BPF in the initial user namespace; otherwise the tests are not run.

use crate::common;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_sys::testing::not_run;
use lvs_sys::{Instruction, Program, ProgramKind, ProgramLink};
use lvs_testbed::listing::{Row, connections, rows};
use lvs_testbed::{
    Forward, Host, LoadOptions, Mode, Site, SiteOptions, programs, soon, wait_until,
};
use nix::sched::{CloneFlags, setns};
use nix::sys::signal::Signal;

const ON: [&str; 2] = ["--fast-path", "on"];
const TWO: [&str; 4] = ["--fast-path", "on", "--workers", "2"];

/// Whether the kernel permits the fast path here. Returns an error if it refuses although the test
/// runs as root of the initial user namespace.
pub(super) fn is_permitted() -> Result<bool> {
    let permitted = Mode::detect()? != Mode::Rootless;
    ensure!(
        permitted || !lvs_sys::is_root_of_all(),
        "BPF programs cannot be loaded, although the test runs as root"
    );
    Ok(permitted)
}

/// Ends the calling test as not run if the kernel fast path is not permitted.
pub(super) fn require_permission() -> Result<()> {
    if !is_permitted()? {
        not_run("the kernel fast path needs root, outside of containers");
    }
    Ok(())
}

fn site(label: &str, forward: Forward, servers: usize) -> Result<Site> {
    site_by(&ON, label, forward, servers)
}

fn site_by(words: &[&str], label: &str, forward: Forward, servers: usize) -> Result<Site> {
    require_permission()?;
    let mut site = Site::new(SiteOptions::with_servers(label, forward, servers))?;
    site.start_dataplane(words)?;
    Ok(site)
}

/// Number of packets that the kernel fast path has forwarded, from `lvsadm drops`: requests and
/// replies.
pub(super) fn shares(site: &Site) -> Result<(u64, u64)> {
    common::drops(site, ["kernel_requests", "kernel_replies"]).map(Into::into)
}

macro_rules! method {
    ($(#[$tier:meta])? $name:ident, $forward:ident) => {
        mod $name {
            use super::*;

            #[test]
            $(#[$tier])?
            fn fast_path_transfers_all_bytes_and_lists_connections() -> Result<()> {
                let label = format!("ink-{}-http", stringify!($name));
                let site = site(&label, Forward::$forward, 4)?;
                common::requests_and_listings(&site)?;
                let (requests, _) = shares(&site)?;
                ensure!(requests > 0, "no downloads of 10 MiB were offloaded");
                site.lvsadm("-C")?;
                common::schedulers(&site)
            }

            #[test]
            #[ignore = "long"]
            fn fast_path_forwards_bulk_iperf_and_dns() -> Result<()> {
                let label = format!("ink-{}-bulk", stringify!($name));
                let site = site(&label, Forward::$forward, 2)?;
                site.add_service(80, "rr")?;
                common::bulk(&site)?;
                let (requests, replies) = shares(&site)?;
                ensure!(requests > 1000, "the kernel fast path forwarded only {requests} requests");
                let translated = matches!(Forward::$forward, Forward::Nat | Forward::FullNat);
                ensure!((replies > 1000) == translated, "the kernel fast path forwarded {replies} replies; more than 1000 only if they are translated");
                common::iperf_and_dns(&site)
            }

            #[test]
            $(#[$tier])?
            fn fast_path_uses_added_servers_and_avoids_removed_servers() -> Result<()> {
                let label = format!("ink-{}-admin", stringify!($name));
                common::administration(&site(&label, Forward::$forward, 3)?)
            }
        }
    };
}

method!(nat, Nat);
method!(
    #[ignore = "long"]
    fullnat,
    FullNat
);
method!(
    #[ignore = "long"]
    dr,
    Dr
);
method!(
    #[ignore = "long"]
    tun,
    Tun
);

/// Counts at a server's host: packets to its port 80, packets from that port, bytes to that port, and
/// bytes from it.
fn counted(server: &Host) -> Result<[u64; 4]> {
    let listing = server.sh("nft -j list table inet seen")?;
    let listing: serde_json::Value = serde_json::from_str(&listing)?;
    let items = listing["nftables"]
        .as_array()
        .context("the JSON value is not a list")?;
    let counter = |name: &str| {
        let found = items.iter().find(|item| item["counter"]["name"] == name);
        let counter = found.map(|item| &item["counter"]);
        let number = |field: &str| counter.and_then(|counter| counter[field].as_u64());
        number("packets")
            .zip(number("bytes"))
            .context("the rule has no counter")
    };
    let (requests, replies) = (counter("requests")?, counter("replies")?);
    Ok([requests.0, replies.0, requests.1, replies.1])
}

/// The listed counters equal those of the servers, whichever path forwards the packets.
#[test]
fn listed_counters_equal_server_counters() -> Result<()> {
    counters("ink-counters", &ON)
}

#[test]
#[ignore = "long"]
fn listed_counters_of_two_workers_equal_server_counters() -> Result<()> {
    counters("ink-counters2", &TWO)
}

fn counters(label: &str, words: &[&str]) -> Result<()> {
    let site = site_by(words, label, Forward::Nat, 2)?;
    for server in &site.servers {
        server.sh("nft -f - <<'END'\n\
                   table inet seen {\n\
                   counter requests { }\n\
                   counter replies { }\n\
                   chain in { type filter hook prerouting priority -400; tcp dport 80 counter name requests; }\n\
                   chain out { type filter hook postrouting priority 400; tcp sport 80 counter name replies; }\n\
                   }\nEND")?;
    }
    site.add_service(80, "rr")?;
    site.serve("some", 40 << 20)?;
    for _ in 0..4 {
        let url = format!("http://{}/some", site.vip);
        site.client
            .run("curl", &["-sS", "-f", "-m", "240", "-o", "/dev/null", &url])?;
    }
    let (requests, replies) = shares(&site)?;
    ensure!(
        requests > 100 && replies > 100,
        "the kernel forwarded at most 100 requests or replies: {requests}, {replies}"
    );
    // Counters may change until the last acknowledgements have arrived.
    let counters_are_equal = |rows: &[Row]| -> Result<bool> {
        let rows = rows.iter().filter(|row| row.is_server());
        let mut sum = [0; 4];
        for (server, row) in site.servers.iter().zip(rows) {
            let seen = counted(server)?;
            for (column, seen) in seen.into_iter().enumerate() {
                if row.number(column + 1)? != seen {
                    return Ok(false);
                }
                sum[column] += seen;
            }
        }
        Ok(sum[0] >= requests && sum[1] >= replies)
    };
    let what = "the listing to have the servers' counters";
    common::wait_for_counters(&site, what, counters_are_equal).with_context(|| {
        let servers = site.servers.iter().map(|server| counted(server).ok());
        format!("the servers counted {:?}", servers.collect::<Vec<_>>())
    })
}

/// Waits until the number that `count` selects from [`shares`] stops growing, and returns the
/// shares. A packet may be in flight when the kernel fast path stops forwarding.
fn wait_for_none(site: &Site, count: impl Fn((u64, u64)) -> u64) -> Result<(u64, u64)> {
    let mut before = (0, 0);
    soon("the kernel fast path to forward no packets", || {
        before = shares(site).unwrap_or_default();
        std::thread::sleep(Duration::from_millis(700));
        shares(site).is_ok_and(|after| count(after) == count(before))
    })?;
    Ok(before)
}

/// Starts a download, and waits until the kernel fast path forwards its packets.
fn download_in_the_kernel(site: &Site) -> Result<common::Download> {
    site.add_service(80, "rr")?;
    let download = common::Download::start(site)?;
    let flows = || shares(site).is_ok_and(|(requests, _)| requests > 50);
    soon("the kernel fast path to forward packets", flows)?;
    Ok(download)
}

#[test]
fn removed_server_receives_no_offloaded_packets_until_added_again() -> Result<()> {
    for (label, forward) in [("ink-rem", Forward::Nat), ("ink-remf", Forward::FullNat)] {
        removed(label, forward)?;
    }
    Ok(())
}

fn removed(label: &str, forward: Forward) -> Result<()> {
    let site = site(label, forward, 1)?;
    let _download = download_in_the_kernel(&site)?;
    let server = format!("{}:80", site.real_address(0));
    site.lvsadm(&format!("-d -t {} -r {server}", site.service(80)))?;
    let after = wait_for_none(&site, |(requests, _)| requests)?;
    // The server returns, and its connection continues, also in the kernel fast path.
    let flag = forward.flag();
    site.lvsadm(&format!("-a -t {} -r {server} {flag}", site.service(80)))?;
    let flows = || shares(&site).is_ok_and(|(requests, _)| requests > after.0 + 50);
    wait_until(
        "the kernel fast path to forward packets again",
        Duration::from_secs(30),
        flows,
    )
}

/// Attaches a BPF program to an interface of a host, in front of all others.
fn put_in_front(
    host: &Host,
    interface: &str,
    kind: ProgramKind,
    code: &[Instruction],
) -> Result<ProgramLink> {
    let path = format!("/sys/class/net/{interface}/ifindex");
    let ifindex = host.sh(&format!("cat {path}"))?.trim().parse()?;
    let namespace = std::fs::File::open(format!("/proc/{}/ns/net", host.pid()))?;
    let code = code.to_vec();
    let attach = move || -> Result<ProgramLink> {
        setns(namespace, CloneFlags::CLONE_NEWNET)?;
        let program = Program::load(kind, "another", &code)?;
        Ok(program.attach(ifindex)?)
    };
    let thread = std::thread::spawn(attach);
    thread.join().expect("the thread panicked")
}

const fn instruction(code: u8, registers: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction {
        code,
        registers,
        offset,
        immediate,
    }
}

const fn set(register: u8, number: i32) -> Instruction {
    instruction(0xb7, register, 0, number)
}

const EXIT: Instruction = instruction(0x95, 0, 0, 0);

/// The kernel fast path removes a VLAN tag with the ID 0 (priority only).
#[test]
#[ignore = "long"]
fn fast_path_removes_priority_tags() -> Result<()> {
    let site = site("ink-priority", Forward::Nat, 1)?;
    site.add_service(80, "rr")?;
    // bpf_skb_vlan_push(skb, 802.1Q, priority 5); TCX_PASS.
    let push = [
        set(2, i32::from(0x8100_u16.to_be())),
        set(3, 5 << 13),
        instruction(0x85, 0, 0, 18),
        set(0, 0),
        EXIT,
    ];
    // Load skb->vlan_present twice; return TCX_PASS without a tag, and TCX_DROP with one.
    let refuse = [
        instruction(0x61, 0x10, 20, 0),
        instruction(0x67, 0, 0, 1),
        EXIT,
    ];
    let mut links = Vec::new();
    for host in [&site.client, &site.servers[0]] {
        links.push(put_in_front(host, "eth0", ProgramKind::Egress, &push)?);
        links.push(put_in_front(host, "eth0", ProgramKind::Ingress, &refuse)?);
    }
    common::bulk(&site)?;
    let (requests, replies) = shares(&site)?;
    ensure!(
        requests > 1000 && replies > 1000,
        "the kernel forwarded at most 1000 requests or replies: {requests}, {replies}"
    );
    Ok(())
}

/// VXLAN between hosts on one machine leaves the checksum of the inner packet unfinished, for the
/// device to complete. The outer datagram has no checksum, or one that becomes right when the inner
/// checksum is completed.
#[test]
#[ignore = "long"]
fn vxlan_datagrams_with_partial_inner_checksums_arrive_through_nat() -> Result<()> {
    let site = site("ink-inside", Forward::Nat, 1)?;
    site.add_service_weighted("-u", 4789, "rr", &[1])?;
    // The director's interface computes the checksum of the inner packet.
    site.director.sh("ethtool -K eth1 tx off > /dev/null")?;
    let tunnel = |host: &Host, inner: &str, outer: &str, checksum: &str| {
        host.sh(&format!(
            "ip link add vx type vxlan id 5 remote {outer} dstport 4789 {checksum} dev eth0\n\
             ip link set vx address 02:00:00:00:05:0{inner} up\n\
             ip addr add 198.18.5.{inner}/24 dev vx"
        ))
    };
    let (client, server) = (&site.client, &site.servers[0]);
    tunnel(server, "2", "10.0.0.250", "udpcsum")?;
    for checksum in ["udpcsum", "noudpcsum"] {
        tunnel(client, "1", &site.vip.to_string(), checksum)?;
        client.sh("ip neigh add 198.18.5.2 lladdr 02:00:00:00:05:02 dev vx")?;
        // No program listens: the server's kernel counts a datagram here only if its checksum is
        // right.
        let arrived = || server.counter("Udp", "NoPorts");
        let (before, (start, _)) = (arrived()?, shares(&site)?);
        let script = "exec 3> /dev/udp/198.18.5.2/9; while sleep 0.01; do echo x >&3; done";
        let mut sender = client.spawn("bash", &["-c", script])?;
        let mut forwarded = 0;
        soon("the kernel fast path to forward packets", || {
            forwarded = shares(&site).map_or(0, |now| now.0 - start);
            forwarded > 100
        })?;
        soon("the forwarded datagrams to arrive", || {
            arrived().is_ok_and(|now| now >= before + forwarded)
        })
        .with_context(|| checksum)?;
        sender.kill();
        let wrong = server.counter("Udp", "InCsumErrors")?;
        ensure!(
            wrong == 0,
            "{checksum}: {wrong} packets have a wrong checksum"
        );
        client.sh("ip link del vx")?;
    }
    Ok(())
}

/// If a TC program in front of the dataplane's program ends the chain, the dataplane continues
/// without its program, and no connection breaks.
#[test]
#[ignore = "long"]
fn bpf_program_before_fast_path_is_reported_and_breaks_no_connection() -> Result<()> {
    let site = site("ink-front", Forward::Nat, 1)?;
    let mut download = download_in_the_kernel(&site)?;
    let doctor = || {
        site.director.sh(&format!(
            "{} doctor || [ $? = 1 ]",
            programs::find("lvsadm")?.display()
        ))
    };
    const FINDING: &str = "not forwarded by the kernel fast path: lvs_ingress is not the first";
    ensure!(!doctor()?.contains(FINDING));
    // TCX_PASS ends the chain before lvs_ingress.
    let pass = [set(0, 0), EXIT];
    let other = put_in_front(&site.director, "eth0", ProgramKind::Ingress, &pass)?;
    let output =
        || doctor().is_ok_and(|text| text.replace("\n  ", " ").contains("is not the first"));
    soon("doctor to report that the program is not the first", output)?;
    let before = wait_for_none(&site, |(requests, replies)| requests + replies)?;
    download.goes_on()?;
    drop(other);
    let flows = || shares(&site).is_ok_and(|(requests, _)| requests > before.0 + 50);
    soon("the kernel to forward packets again", flows)?;
    let gone =
        || doctor().is_ok_and(|text| !text.replace("\n  ", " ").contains("is not the first"));
    soon("doctor to report no earlier program", gone)?;
    download.finish()
}

#[test]
fn capture_contains_offloaded_packets() -> Result<()> {
    let site = site("ink-capture", Forward::Nat, 1)?;
    let _download = download_in_the_kernel(&site)?;
    let file = site.testbed.dir().join("capture.pcapng");
    site.lvsadm(&format!("capture tcp port 80 -c 300 -w {}", file.display()))?;
    // The download needs only a moment for 100,000 bytes. If the kernel fast path forwarded the
    // connection, the dataplane would capture almost none of them.
    ensure!(
        std::fs::metadata(&file)?.len() > 100_000,
        "the capture has at most 100,000 bytes"
    );
    wait_for_offload(&site)
}

/// Waits until the kernel fast path forwards more requests.
fn wait_for_offload(site: &Site) -> Result<()> {
    let before = shares(site)?;
    soon("the kernel fast path to forward more requests", || {
        shares(site).is_ok_and(|(requests, _)| requests > before.0 + 50)
    })
}

#[test]
#[ignore = "long"]
fn connections_that_capture_filter_excludes_stay_offloaded() -> Result<()> {
    let site = site("ink-captures", Forward::Nat, 1)?;
    let _download = download_in_the_kernel(&site)?;
    let first = connections(&site.lvsadm("-L -n -c")?)?.remove(0).source;
    let url = format!("http://{}/long?rate=1m", site.vip);
    let other = ["-sS", "-f", "-m", "300", "-o", "/dev/null", &url];
    let _other = site.client.spawn("curl", &other)?;
    let mut second = None;
    soon("a second connection to be listed", || {
        let listed = site.lvsadm("-L -n -c").and_then(|text| connections(&text));
        let sources = listed.unwrap_or_default().into_iter().map(|row| row.source);
        second = sources.into_iter().find(|source| *source != first);
        second.is_some()
    })?;
    let second = second.context("the second connection is not listed")?;
    let explained = |source: &str, text: &str| {
        let question = format!("explain tcp {source} {}", site.service(80));
        let what = format!("explain of {source} to print: fast path: {text}");
        soon(&what, || {
            let output = site.lvsadm(&question);
            output.is_ok_and(|output| output.contains(&format!("fast path   {text}\n")))
        })
    };
    explained(&second, "yes")?;
    let capture = |name: &str, filter: &[&str]| {
        let file = site.testbed.dir().join(name).display().to_string();
        let words = [&["capture", "-w", &file], filter].concat();
        site.director.spawn(programs::find("lvsadm")?, &words)
    };
    let _dropped = capture("dropped.pcapng", &["dropped"])?;
    let (_, port) = second
        .rsplit_once(':')
        .context("the text has no address and port")?;
    let mut shown = capture("port.pcapng", &["tcp", "port", port])?;
    explained(&second, "no: a capture shows the packets of the connection")?;
    explained(&first, "yes")?;
    wait_for_offload(&site)?;
    shown.signal(Signal::SIGTERM)?;
    shown.wait(Duration::from_secs(10))?;
    explained(&second, "yes")
}

#[test]
fn explain_shows_whether_connection_is_offloaded_and_why_not() -> Result<()> {
    let site = site("ink-explain", Forward::Nat, 1)?;
    let _download = download_in_the_kernel(&site)?;
    let listed = site.lvsadm("-L -n -c")?;
    let known = connections(&listed)?;
    let question = format!("explain tcp {} {}", known[0].source, site.service(80));
    // The output shows a change after the connection's next packet.
    let output = |text: &str| {
        soon(&format!("explain to print: fast path: {text}"), || {
            let output = site.lvsadm(&question);
            output.is_ok_and(|output| output.contains(&format!("fast path   {text}\n")))
        })
    };
    output("yes")?;
    // Packets may arrive between the two outputs.
    soon("the JSON output to have the same values", || {
        let output = site.lvsadm(&format!("{question} --json"));
        let output = output.ok().and_then(|output| output.parse().ok());
        output.is_some_and(|output: serde_json::Value| {
            output["fast_path"] == true && output["fast_path_why"] == ""
        })
    })?;
    let new = format!("explain tcp 192.0.2.77:1000 {}", site.service(80));
    let new = site.lvsadm(&new)?;
    let before = "no: connections are offloaded after 16 packets from the client";
    ensure!(
        new.contains(&format!("fast path   {before}\n")),
        "explain does not say when the connection is offloaded: {new}"
    );
    let nobody = site.lvsadm(&format!("explain tcp 192.0.2.77:1000 {}:9", site.vip))?;
    ensure!(
        !nobody.contains("fast path"),
        "unexpected `fast path` in {nobody}"
    );

    let rule = format!("--destination {}", site.vip);
    site.lvsadm(&format!("mark add {rule} --mark 7"))?;
    soon("the rule to count a packet", || {
        let rules = site.lvsadm("mark list");
        rules.is_ok_and(|rules| rules.contains("--mark 7") && !rules.contains(" 0 packets"))
    })?;
    output("yes")?;
    site.lvsadm("mark del 1")?;
    site.lvsadm(&format!("mark add {rule} --interface elsewhere --drop"))?;
    output("no: a rule for marks could drop packets of the connection or pass them to this host")?;
    site.lvsadm("mark del 1")?;
    output("yes")?;

    let file = site.testbed.dir().join("capture.pcapng");
    let path = file.display().to_string();
    let arguments = ["capture", "tcp", "port", "80", "-w", path.as_str()];
    let mut capture = site.director.spawn(programs::find("lvsadm")?, &arguments)?;
    output("no: a capture shows the packets of the connection")?;
    capture.signal(Signal::SIGTERM)?;
    capture.wait(Duration::from_secs(10))?;
    output("yes")
}

/// An orderly stop ends forwarding by the BPF programs; the counters of the successor start at 0.
#[test]
fn stopped_dataplane_no_longer_forwards_in_kernel_fast_path() -> Result<()> {
    let mut site = site("ink-kill", Forward::Nat, 1)?;
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        site.add_service(80, "rr")?;
        common::bulk(&site)?;
        ensure!(
            shares(&site)?.0 > 100,
            "the kernel fast path forwarded at most 100 requests before {signal}"
        );
        site.end_dataplane(signal)?;
        let url = format!("http://{}/s/1", site.vip);
        let answer = site.client.run("curl", &["-sS", "-m", "1", &url]);
        ensure!(
            answer.is_err(),
            "an answer arrived although no dataplane is running: {answer:?}"
        );
        site.start_dataplane(&ON)?;
        ensure!(
            shares(&site)? == (0, 0),
            "the kernel fast path of the successor has already forwarded packets"
        );
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn fast_path_forwards_every_byte_over_ipv6() -> Result<()> {
    for (forward, flag) in [
        (Forward::Nat, "-m"),
        (Forward::FullNat, "--fullnat"),
        (Forward::Dr, "-g"),
    ] {
        let site = site("ink-v6", forward, 2)?;
        let virt = SocketAddr::from((site.vip6, 80));
        site.lvsadm(&format!("-A -t {virt} -s rr"))?;
        for index in 0..site.servers.len() {
            let server = SocketAddr::from((site.real_address6(index), 80));
            site.lvsadm(&format!("-a -t {virt} -r {server} {flag}"))?;
        }
        let mut load = LoadOptions::new(virt);
        load.requests = 300;
        site.client.load(&load)?.all_ok(300)?;
        // Short connections may end before they are offloaded, so this one is long.
        site.serve("much", 64 << 20)?;
        let url = format!("http://{virt}/much");
        let arguments = ["-sS", "-f", "-g", "-m", "240", "-o", "/dev/null", &url];
        site.client.run("curl", &arguments)?;
        let (requests, replies) = shares(&site)?;
        ensure!(
            requests > 100,
            "{forward:?}: the kernel fast path forwarded only {requests} packets of clients"
        );
        ensure!(
            (replies > 100) == (forward != Forward::Dr),
            "{forward:?}: the kernel fast path forwarded {replies} replies; more than 100 except with direct routing"
        );
    }
    Ok(())
}

/// Number of parallel downloads that a killed dataplane must not break, each at 60 kB/s.
const DOWNLOADS: usize = 200;

fn killed(label: &str, words: &[&str], forward: Forward) -> Result<()> {
    let mut site = site_by(words, label, forward, 2)?;
    site.add_service(80, "rr")?;
    // The server limits the rate, because curl's limit would first read everything in its buffers.
    site.serve("much", 3 << 20)?;
    let dir = site.testbed.dir().join("downloads");
    std::fs::create_dir_all(&dir)?;
    let url = format!("http://{}/much?rate=60k&[1-{DOWNLOADS}]", site.vip);
    let (many, to) = (DOWNLOADS.to_string(), dir.join("#1").display().to_string());
    let arguments = [
        "-sS",
        "-f",
        "-Z",
        "--parallel-immediate",
        "--parallel-max",
        &many,
        "-m",
        "300",
        "-o",
        &to,
        &url,
    ];
    let mut downloads = site.client.spawn("curl", &arguments)?;
    let all = || std::fs::read_dir(&dir).is_ok_and(|files| files.count() == DOWNLOADS);
    soon("all downloads to run", all)?;
    if forward == Forward::FullNat {
        // Connections are offloaded when they open only after the map of local ports exists. The
        // first offloaded replies show that it exists.
        let output = || shares(&site).is_ok_and(|(_, replies)| replies > 0);
        soon("the kernel fast path to have the local ports", output)?;
    } else {
        let flows = || shares(&site).is_ok_and(|(requests, _)| requests > 200);
        soon("the kernel to forward packets", flows)?;
    }
    let stats = |site: &Site| -> Result<f64> {
        let listing = site.lvsadm("-L -n --stats --exact")?;
        let servers = rows(&listing).into_iter().filter(Row::is_server);
        servers.map(|row| Ok(row.number(1)? as f64)).sum()
    };
    let before = stats(&site)?;
    site.end_dataplane(Signal::SIGKILL)?;
    std::thread::sleep(Duration::from_secs(5));
    ensure!(
        downloads.is_running(),
        "the downloads ended early: {}",
        downloads.log()
    );
    site.start_dataplane(words)?;
    let status = downloads.wait(Duration::from_secs(80))?;
    let log = common::says(&site, "took over")?;
    ensure!(
        status.success(),
        "a download failed: {status}: {}{log}",
        downloads.log()
    );
    let sums = site.client.sh(&format!(
        "cd {} && sha256sum * | cut -c 1-64 | sort | uniq -c",
        dir.display()
    ))?;
    ensure!(
        sums.trim().lines().count() == 1 && sums.trim().starts_with(&many),
        "a download is missing, or differs from the others: {sums}"
    );
    let output = log.lines().find(|line| line.contains("took over"));
    println!("{}", output.context("the log does not report a takeover")?);
    // The services exist, the counters continue, and new connections are opened.
    let counts = || stats(&site).is_ok_and(|after| after > before);
    soon("the counters to continue", counts)?;
    let url = format!("http://{}/much", site.vip);
    site.client
        .run("curl", &["-sS", "-f", "-m", "120", "-o", "/dev/null", &url])?;
    site.end_dataplane(Signal::SIGTERM)?;
    let left = site
        .director
        .sh("ls /sys/fs/bpf/lvs/* 2>/dev/null || true")?;
    ensure!(
        left.trim().is_empty(),
        "files are left in /sys/fs/bpf/lvs: {left}"
    );
    Ok(())
}

#[test]
#[ignore = "long"]
fn offloaded_nat_connections_survive_killed_dataplane() -> Result<()> {
    killed("ink-killn", &ON, Forward::Nat)
}

#[test]
#[ignore = "long"]
fn offloaded_full_nat_connections_survive_killed_dataplane() -> Result<()> {
    killed("ink-killf", &ON, Forward::FullNat)
}

#[test]
#[ignore = "long"]
fn offloaded_direct_routing_connections_survive_killed_dataplane() -> Result<()> {
    killed("ink-killd", &ON, Forward::Dr)
}

#[test]
#[ignore = "long"]
fn offloaded_tunnel_connections_survive_killed_dataplane() -> Result<()> {
    killed("ink-killt", &ON, Forward::Tun)
}

#[test]
#[ignore = "long"]
fn offloaded_connections_of_two_workers_survive_killed_dataplane() -> Result<()> {
    killed("ink-kill2n", &TWO, Forward::Nat)?;
    killed("ink-kill2f", &TWO, Forward::FullNat)
}

#[test]
fn cleanup_or_successor_with_other_table_size_discards_state_of_killed_dataplane() -> Result<()> {
    let mut site = site("ink-clean", Forward::Nat, 1)?;
    let program = programs::find("lvs-dataplane")?.display().to_string();
    site.add_service(80, "rr")?;
    let refused = site
        .director
        .sh(&format!("{program} --cleanup 2>&1 || true"))?;
    ensure!(refused.contains("stop it"), "no `stop it` in {refused}");
    // A second dataplane does not take over the state of a running one.
    let second = format!("{program} --fast-path on --socket @second 2>&1 || true");
    let refused = site.director.sh(&second)?;
    ensure!(
        refused.contains("another dataplane"),
        "no `another dataplane` in {refused}"
    );
    for cleanup in [true, false] {
        site.end_dataplane(Signal::SIGKILL)?;
        let links = site.director.sh("ls /sys/fs/bpf/lvs/*")?;
        ensure!(links.contains("link-"), "no `link-` in {links}");
        if cleanup {
            let output = site.director.sh(&format!("{program} --cleanup"))?;
            ensure!(
                output.starts_with("removed "),
                "the output of --cleanup does not begin with `removed `: {output}"
            );
            let output = site.director.sh(&format!("{program} --cleanup"))?;
            ensure!(
                output.starts_with("found no state"),
                "the output of --cleanup does not begin with `found no state`: {output}"
            );
            site.start_dataplane(&ON)?;
            ensure!(
                !site.lvsadm("-L -n")?.contains(":80"),
                "the successor lists services of the killed dataplane"
            );
            site.add_service(80, "rr")?;
            continue;
        }
        site.start_dataplane(&["--fast-path", "on", "--max-connections", "5000"])?;
        common::says(
            &site,
            "the previous dataplane had another --max-connections",
        )?;
        ensure!(
            !site.lvsadm("-L -n")?.contains(":80"),
            "the successor with another --max-connections lists services of the killed dataplane"
        );
    }
    Ok(())
}

#[test]
fn successor_starts_sync_daemon_when_interface_is_created() -> Result<()> {
    let mut site = site("ink-daemon", Forward::Nat, 1)?;
    let director = site.director.clone();
    let make = "ip link add d1 type veth peer name d2; ip link set d1 up; ip link set d2 up";
    director.sh(make)?;
    soon("the dataplane to use the new interface", || {
        site.lvsadm("--start-daemon backup --mcast-interface d1")
            .is_ok()
    })?;
    site.end_dataplane(Signal::SIGKILL)?;
    director.sh("ip link del d1")?;
    site.start_dataplane(&ON)?;
    let daemons = site.lvsadm("-L --daemon")?;
    ensure!(
        daemons.is_empty(),
        "the daemon of the removed interface still exists: {daemons}"
    );
    director.sh(make)?;
    soon("the daemon to run", || {
        site.lvsadm("-L --daemon")
            .is_ok_and(|daemons| daemons.contains("mcast=d1"))
    })?;
    Ok(())
}
