//! Traffic that every forwarding method must forward, and functions that several tests use.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use lvs_testbed::cluster::Outcome;
use lvs_testbed::listing::{Row, connections, rows};
use lvs_testbed::servers::NginxOptions;
use lvs_testbed::{
    Forward, Host, LoadOptions, LoadReport, Proc, Site, SiteOptions, content, servers, suite,
};
use serde_json::Value;

/// Creates a site whose dataplane runs.
pub(crate) fn site(options: SiteOptions) -> Result<Site> {
    let mut site = Site::new(options)?;
    site.start_dataplane(&[])?;
    Ok(site)
}

/// Text in the last log message of a dataplane's start.
pub(crate) const READY: &str = "ready at";

/// Waits until the dataplane's log contains `what`, and returns the log. A separate thread of the
/// dataplane writes the log, so the answer to a request may arrive before its log line.
pub(crate) fn says(site: &Site, what: &str) -> Result<String> {
    let dataplane = site
        .dataplane
        .as_ref()
        .context("no dataplane was started")?;
    lvs_testbed::soon(&format!("the dataplane to log {what:?}"), || {
        dataplane.log().contains(what)
    })
    .with_context(|| dataplane.log())?;
    Ok(dataplane.log())
}

/// Time limit for most events. For a busy machine, [`wait_until`](lvs_testbed::wait_until) waits up
/// to four times as long.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// Time limit for the effect of one packet. [`send_until`] waits up to four times as long, and then
/// sends the packet again. The kernel drops packets while a processor's queue of received packets is
/// full, and all network namespaces share this queue.
pub(crate) const IN_TIME: Duration = Duration::from_millis(500);

/// Calls `send` until it succeeds and `has_effect` is true within [`IN_TIME`]; returns the number of
/// calls. Fails if there is no effect after four times `limit`.
pub(crate) fn send_until(
    what: &str,
    limit: Duration,
    mut send: impl FnMut() -> Result<()>,
    has_effect: impl Fn() -> bool,
) -> Result<u64> {
    let mut sent = 0;
    lvs_testbed::wait_until(what, limit, || {
        sent += 1;
        send().is_ok() && lvs_testbed::wait_until(what, IN_TIME, &has_effect).is_ok()
    })?;
    Ok(sent)
}

/// Waits until the host has its state from before the dataplane. The kernel removes some objects
/// only after the process has exited.
pub(crate) fn wait_for_host_state(site: &Site, before: &str) -> Result<()> {
    let now = || host_state(site).unwrap_or_default();
    lvs_testbed::soon("the host to be as before", || now() == before)
        .with_context(|| format!("before:\n{before}\nnow:\n{}", now()))
}

/// Waits until `is_right` accepts the director's listing with counters. The listing shows a snapshot
/// that is up to two seconds old.
pub(crate) fn wait_for_counters(
    site: &Site,
    what: &str,
    is_right: impl Fn(&[Row]) -> Result<bool>,
) -> Result<()> {
    let mut listing = String::new();
    lvs_testbed::soon(what, || {
        listing = site
            .lvsadm("-L -n --stats --exact")
            .unwrap_or_else(|error| format!("{error:#}"));
        let rows = rows(&listing);
        !rows.is_empty() && is_right(&rows).unwrap_or(false)
    })
    .with_context(|| listing.clone())
}

/// Sends six requests, each over its own connection. Returns the names of the servers that answered,
/// sorted and each once.
pub(crate) fn answering(site: &Site) -> Result<Vec<String>> {
    let text = site.client.sh(&format!(
        "for i in 1 2 3 4 5 6; do curl -sS --max-time 60 http://{}/id; done",
        site.vip
    ))?;
    let mut names: Vec<String> = text.lines().map(str::to_owned).collect();
    names.sort();
    names.dedup();
    Ok(names)
}

/// Waits until `listing` returns exactly the servers in `expected`: the number of each server,
/// counted from 0, and its weight.
pub(crate) fn wait_listed(
    site: &Site,
    listing: impl Fn() -> Result<String>,
    expected: &[(usize, u64)],
) -> Result<()> {
    let address = |server| format!("{}:80", site.real_address(server));
    let wanted = expected
        .iter()
        .map(|&(server, weight)| (address(server), weight));
    let mut wanted: Vec<(String, u64)> = wanted.collect();
    wanted.sort();
    let listed = || -> Vec<(String, u64)> {
        let mut servers: Vec<_> = rows(&listing().unwrap_or_default())
            .iter()
            .filter(|row| row.is_server())
            .filter_map(|row| Some((row.address.clone(), row.number(1).ok()?)))
            .collect();
        servers.sort();
        servers
    };
    let what = format!("the listing to contain {wanted:?}");
    lvs_testbed::wait_until(&what, Duration::from_secs(30), || listed() == wanted)
        .with_context(|| format!("listed: {:?}", listed()))
}

/// Maximum number of measurements until one is good. A dataplane that waits for a processor on a
/// busy machine loses packets in some measurements, a faulty dataplane in all.
const MEASUREMENTS: usize = 8;

/// Repeats a measurement until its result is good. `once` measures once, and returns the fault of a
/// bad result. Fails with all faults after [`MEASUREMENTS`] bad results, or at the first error of
/// `once`.
pub(crate) fn measured(mut once: impl FnMut() -> Result<Option<String>>) -> Result<()> {
    let mut all = Vec::new();
    for _ in 0..MEASUREMENTS {
        let Some(wrong) = once()? else {
            return Ok(());
        };
        println!("the measurement is repeated: {wrong}");
        all.push(wrong);
    }
    bail!("{all:#?}")
}

/// A download of 400 MiB: at 6 MB/s until [`Download::finish`], then at full speed.
pub(crate) struct Download {
    client: Proc,
    /// If this file exists, the client reads the remaining bytes at full speed.
    hurry: PathBuf,
}

impl Download {
    pub(crate) fn start(site: &Site) -> Result<Self> {
        site.serve("long", 400 << 20)?;
        let hurry = site.testbed.dir().join("hurry");
        if hurry.exists() {
            std::fs::remove_file(&hurry)?;
        }
        // The slow reader fills the pipe, which slows curl down.
        let script = format!(
            "set -o pipefail; curl -sS -f -m 800 http://{}/long | \
             perl -e 'while (sysread STDIN, $_, 65536) {{ -e $ARGV[0] or select undef, undef, undef, 0.01 }}' {}",
            site.vip,
            hurry.display()
        );
        let client = site.client.spawn("bash", &["-c", &script])?;
        Ok(Self { client, hurry })
    }

    /// Checks that the download still runs.
    pub(crate) fn goes_on(&mut self) -> Result<()> {
        ensure!(
            self.client.is_running(),
            "the client has exited: {}",
            self.client.log()
        );
        Ok(())
    }

    /// Downloads the remaining bytes at full speed, and checks that the download succeeds.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.goes_on()?;
        std::fs::write(&self.hurry, "")?;
        let status = self.client.wait(Duration::from_secs(60))?;
        ensure!(
            status.success(),
            "the download failed: {status}: {}",
            self.client.log()
        );
        Ok(())
    }
}

/// Returns the numbers, counted from 0, of the servers that have a weight above 0.
pub(crate) fn usable(site: &Site) -> Vec<usize> {
    let listing = site.lvsadm("-L -n").unwrap_or_default();
    let rows = rows(&listing);
    let weighted = rows
        .iter()
        .filter(|row| row.is_server() && row.number(1).is_ok_and(|w| w > 0));
    let has = |n: &usize| {
        let address = format!("{}:80", site.real_address(*n));
        weighted.clone().any(|row| row.address == address)
    };
    (0..4).filter(has).collect()
}

/// Waits until the counters, which change every two seconds, contain the packets so far.
fn wait_for_snapshot() {
    std::thread::sleep(Duration::from_millis(2500));
}

/// Waits until a snapshot of the counters contains the packets so far. No counter may be zeroed
/// meanwhile.
fn wait_for_whole_snapshot(site: &Site) -> Result<()> {
    // Packets may be in transit, and the dataplane updates the counters periodically.
    wait_for_snapshot();
    let is_whole = |one: &Value| one["stats"]["shown"] == one["stats"]["live"];
    lvs_testbed::soon("the snapshot to count all packets", || {
        let listing = site.lvsadm("--json -L -n").unwrap_or_default();
        let services: Vec<Value> = serde_json::from_str(&listing).unwrap_or_default();
        let servers = |one: &Value| one["servers"].as_array().cloned().unwrap_or_default();
        !services.is_empty()
            && services
                .iter()
                .all(|one| is_whole(one) && servers(one).iter().all(is_whole))
    })
}

/// Returns the counts of `reasons`, from `lvsadm drops --all`.
pub(crate) fn drops<const N: usize>(site: &Site, reasons: [&str; N]) -> Result<[u64; N]> {
    let all: Value = serde_json::from_str(&site.lvsadm("drops --json --all")?)?;
    let items = all.as_array().context("the JSON value is not a list")?;
    let mut counts = [0; N];
    for (count, reason) in counts.iter_mut().zip(reasons) {
        let item = items.iter().find(|item| item["reason"] == reason);
        *count = item
            .and_then(|item| item["count"].as_u64())
            .with_context(|| format!("no count of {reason} in {all}"))?;
    }
    Ok(counts)
}

/// Checks that the first servers answered the numbers of requests in `expected`, and that no other
/// server answered.
pub(crate) fn spread(report: &LoadReport, expected: &[u64]) -> Result<()> {
    let names: Vec<String> = (1..=expected.len())
        .map(|number| format!("rs{number}"))
        .collect();
    let counts: Vec<u64> = names
        .iter()
        .map(|name| report.servers.get(name).copied().unwrap_or(0))
        .collect();
    ensure!(
        counts == expected && report.servers.keys().all(|name| names.contains(name)),
        "the servers did not answer {expected:?} requests: {:?}",
        report.servers
    );
    Ok(())
}

/// Number of resets that the client and the servers have sent. On a busy machine a host repeats its
/// FIN, and the other host, which has closed already, sends a reset. The connection is in state
/// CLOSE then, and is removed after 10 s, as in the kernel.
pub(crate) fn resets(site: &Site) -> Result<u64> {
    let hosts = site.servers.iter().chain([&site.client]);
    hosts.map(|host| host.counter("Tcp", "OutRsts")).sum()
}

/// Returns the listing when no server has an active connection any more. The load program ends
/// before the dataplane has handled its last FIN.
fn listing_of_ended_connections(site: &Site) -> Result<String> {
    let mut listing = String::new();
    lvs_testbed::wait_until(
        "the dataplane to have no connections",
        Duration::from_secs(30),
        || {
            listing = site.lvsadm("-L -n").unwrap_or_default();
            let rows = rows(&listing);
            let mut servers = rows.iter().filter(|row| row.is_server()).peekable();
            servers.peek().is_some()
                && servers.all(|row| row.number(2).is_ok_and(|active| active == 0))
        },
    )
    .with_context(|| listing.clone())?;
    Ok(listing)
}

/// Number of requests of [`requests_and_listings`].
pub(crate) fn requests_of_listings() -> u64 {
    suite::size(400, 2000)
}

/// Sends requests for 1 byte to 10 MiB; checks the listings at once, and the counters at the next
/// snapshot.
pub(crate) fn requests_and_listings(site: &Site) -> Result<()> {
    site.add_service(80, "rr")?;
    let total = requests_of_listings();
    let share = total / 4;
    let load = site.load_of(total);
    let before = resets(site)?;
    let report = site.client.load(&load)?;
    report.all_ok(total)?;
    spread(&report, &[share; 4])?;

    let listing = listing_of_ended_connections(site)?;
    let servers: Vec<_> = rows(&listing).into_iter().filter(Row::is_server).collect();
    ensure!(
        servers.len() == 4,
        "the number of listed servers is not 4: {listing}"
    );
    let listed = connections(&site.lvsadm("-L -n -c")?)?;
    let resets = resets(site)? - before;
    for server in &servers {
        let inactive = server.number(3)?;
        ensure!(
            server.number(2)? == 0 && inactive <= share && inactive + resets >= share,
            "ActiveConn or InActConn is wrong; {resets} connections were reset: {listing}"
        );
    }
    let count = listed.len() as u64;
    ensure!(
        count <= total && count + resets >= total,
        "the number of listed connections is wrong: {count}; {resets} were reset"
    );
    let client = client_address(site)?;
    for connection in &listed {
        ensure!(
            connection.source.starts_with(&client),
            "the connection has another client: {connection:?}"
        );
        ensure!(
            connection.virtual_address == site.service(80).to_string(),
            "the connection has another virtual address: {connection:?}"
        );
        ensure!(
            connection.state != "ESTABLISHED" && connection.expires <= 120,
            "the ended connection is still established, or expires after more than 120 s: {connection:?}"
        );
    }

    wait_for_whole_snapshot(site)?;
    let listing = site.lvsadm("-L -n --stats --exact")?;
    let rows = rows(&listing);
    ensure!(
        rows.len() == 5,
        "the listing does not contain exactly 1 service and 4 servers: {listing}"
    );
    for row in &rows {
        let share = if row.is_server() { share } else { total };
        ensure!(
            row.number(0)? == share,
            "the number of connections is wrong: {listing}"
        );
        // At least a SYN, an ACK, a request and a FIN were counted.
        ensure!(
            row.number(1)? >= 4 * share && row.number(3)? >= 160 * share,
            "fewer incoming packets or bytes were counted than sent: {listing}"
        );
        match site.options.forward {
            Forward::Nat | Forward::FullNat => {
                ensure!(
                    row.number(2)? >= 3 * share,
                    "fewer outgoing packets were counted than sent: {listing}"
                );
            }
            // The director does not count packets that do not pass it.
            Forward::Dr | Forward::Tun => ensure!(
                (row.number(2)?, row.number(4)?) == (0, 0),
                "outgoing packets were counted that did not pass the director: {listing}"
            ),
        }
    }
    for column in 0..5 {
        let sum: u64 = rows[1..]
            .iter()
            .map(|row| row.number(column))
            .sum::<Result<u64>>()?;
        ensure!(
            rows[0].number(column)? == sum,
            "a counter of the service is not the sum of its servers': {listing}"
        );
    }
    if matches!(site.options.forward, Forward::Nat | Forward::FullNat) {
        ensure!(
            rows[0].number(4)? > report.bytes,
            "fewer outgoing bytes were counted than the bodies of the answers have: {listing}"
        );
    }
    Ok(())
}

/// Downloads and uploads a large file, compares each copy byte by byte, and accepts at most 2 % of
/// retransmitted segments.
pub(crate) fn bulk(site: &Site) -> Result<()> {
    bulk_with(site, 2)
}

/// Like [`bulk`], with at most `percent` of the segments retransmitted.
pub(crate) fn bulk_with(site: &Site, percent: u64) -> Result<()> {
    measured(|| bulk_once(site, percent))
}

/// Returns a message if too many segments were retransmitted. All other faults are errors.
fn bulk_once(site: &Site, percent: u64) -> Result<Option<String>> {
    let file = site.serve("bulk", suite::size(content::BULK, content::FULL_BULK))?;
    let path = file.display();
    let vip = site.vip;

    let senders = || -> Result<(u64, u64)> {
        let mut total = (0, 0);
        for host in site.servers.iter().chain([&site.client]) {
            total.0 += host.counter("Tcp", "OutSegs")?;
            total.1 += host.counter("Tcp", "RetransSegs")?;
        }
        Ok(total)
    };
    let before = senders()?;
    site.client
        .sh(&format!(
            "curl --fail --silent --show-error --max-time 400 http://{vip}/bulk | cmp - {path}"
        ))
        .context("the download failed, or differs from the file")?;
    let between = senders()?;
    site.client.sh(&format!(
        "curl --fail --silent --show-error --max-time 400 -T {path} http://{vip}/up/bulk"
    ))?;
    let after = senders()?;
    let uploaded: Vec<_> = (1..=site.servers.len())
        .map(|number| site.testbed.dir().join(format!("rs{number}-up/up/bulk")))
        .filter(|path| path.exists())
        .collect();
    ensure!(
        uploaded.len() == 1,
        "the upload did not reach exactly one server: {uploaded:?}"
    );
    site.client
        .sh(&format!("cmp {} {path}", uploaded[0].display()))
        .context("the uploaded file differs from the original")?;
    std::fs::remove_file(&uploaded[0])?;
    for (what, from, to) in [("download", before, between), ("upload", between, after)] {
        let (sent, again) = (to.0 - from.0, to.1 - from.1);
        println!("{what}: {sent} segments, {again} sent again");
        if again * 100 > sent * percent {
            return Ok(Some(format!(
                "{what}: {again} of {sent} segments were sent again"
            )));
        }
    }
    Ok(None)
}

/// Runs iperf3 for one second, or for the amount of data in `options`, and returns its report. It
/// retries while the iperf3 server is still busy with the previous test, and if the first datagram
/// of a test over UDP is lost.
pub(crate) fn iperf(site: &Site, options: &str) -> Result<Value> {
    let command = format!(
        "timeout {} iperf3 -c {} {} -J {options} || true",
        if options.contains("-u") { 30 } else { 60 },
        site.vip,
        if options.contains("-n ") { "" } else { "-t 1" },
    );
    let mut report = Value::Null;
    lvs_testbed::soon("iperf3's server to be idle", || {
        let printed = site.client.sh(&command).unwrap_or_default();
        report = serde_json::from_str(&printed).unwrap_or_default();
        let busy = report["error"]
            .as_str()
            .is_some_and(|error| error.contains("busy"));
        let lost = options.contains("-u") && !report["end"]["sum"].is_object();
        !busy && !lost
    })
    .with_context(|| format!("iperf3 {options}: {report}"))?;
    ensure!(
        report["error"].is_null() && report["end"].is_object(),
        "iperf3 {options} failed: {report}"
    );
    Ok(report)
}

/// Runs iperf3 in both directions over TCP and UDP, and DNS requests.
pub(crate) fn iperf_and_dns(site: &Site) -> Result<()> {
    let address = match site.options.forward {
        Forward::Nat | Forward::FullNat => site.real_address(0),
        Forward::Dr | Forward::Tun => site.vip,
    };
    let _iperf = servers::iperf3(&site.servers[0], address)?;
    site.add_service_weighted("-t", 5201, "rr", &[1])?;
    site.add_service_weighted("-u", 5201, "rr", &[1])?;
    // `make test` sends amounts that need less than a second.
    let (stream, datagrams) = if suite::is_full() {
        ("", "-u -b 100M -l 1200")
    } else {
        ("-n 32M", "-u -b 100M -l 1200 -n 3M")
    };
    let options = [stream, datagrams].map(|words| [words.to_owned(), format!("{words} -R")]);
    // Packets that the receiver dropped because its buffer was full were not lost in transit.
    let no_room = || -> Result<u64> {
        let counter = |host: &Host| host.counter("Udp", "RcvbufErrors");
        Ok(counter(&site.client)? + counter(&site.servers[0])?)
    };
    let measure = |option: &str| -> Result<Option<String>> {
        let before = no_room()?;
        let report = iperf(site, option)?;
        let end = &report["end"];
        if option.contains("-u") {
            let number = |name: &str| -> Result<u64> {
                let number = end["sum"][name].as_u64();
                number.with_context(|| format!("iperf3 {option}: no {name} in {report}"))
            };
            let (packets, lost) = (number("packets")?, number("lost_packets")?);
            let lost = lost.saturating_sub(no_room()? - before);
            println!("iperf3 {option}: {lost} of {packets} lost");
            let good = packets > 1000 && lost * 20 < packets;
            Ok((!good).then(|| {
                format!(
                    "iperf3 {option}: too many datagrams were lost ({lost}), or too few sent: {}",
                    end["sum"]
                )
            }))
        } else {
            let received = end["sum_received"]["bits_per_second"]
                .as_f64()
                .context("iperf3 reports no bits_per_second")?;
            println!("iperf3 {option}: {:.0} Mbit/s", received / 1e6);
            Ok((received <= 1e6).then(|| format!("iperf3 {option}: at most 1 Mbit/s: {end}")))
        }
    };
    for option in options.as_flattened() {
        measured(|| measure(option))?;
    }

    let _dns = [
        servers::dnsmasq(&site.servers[0])?,
        servers::dnsmasq(&site.servers[1])?,
    ];
    site.add_service_weighted("-u", 53, "rr", &[1, 1])?;
    answers_alternate(site, 8)
}

/// Checks that the DNS servers `rs1` and `rs2` each answer half of the `requests`. If a datagram was
/// lost, the requests are made again.
pub(crate) fn answers_alternate(site: &Site, requests: usize) -> Result<()> {
    let script = format!(
        "for i in $(seq {requests}); do dig +short +tries=1 +time=10 @{} id.test txt || true; done",
        site.vip
    );
    measured(|| {
        let answers = site.client.sh(&script)?;
        let is_half = |name: &&str| {
            let of_server = answers.lines().filter(|line| line == name);
            of_server.count() == requests / 2
        };
        if answers.lines().filter(|line| line.starts_with('"')).count() < requests {
            return Ok(Some(format!("a datagram was lost: {answers}")));
        }
        ensure!(
            ["\"rs1\"", "\"rs2\""].iter().all(is_half),
            "the servers did not answer equally often: {answers}"
        );
        Ok(None)
    })
}

/// Adds a server, sets a weight to 0, and deletes a server and adds it again. Checks after each
/// change which servers receive the new connections.
pub(crate) fn administration(site: &Site) -> Result<()> {
    let service = site.service(80);
    let server = |index: usize| SocketAddr::from((site.real_address(index), 80));
    let flag = site.options.forward.flag();
    site.add_service_weighted("-t", 80, "rr", &[1, 1])?;
    let mut load = site.load();
    load.sizes = vec![1000];
    load.requests = 40;
    spread(&ok(site.client.load(&load)?, 40)?, &[20, 20])?;

    // A new server immediately gets its share of new connections.
    site.lvsadm(&format!("-a -t {service} -r {} {flag}", server(2)))?;
    load.requests = 60;
    spread(&ok(site.client.load(&load)?, 60)?, &[20, 20, 20])?;

    // Weight 0: the open connection continues, and new connections use other servers.
    let mut open = site.load();
    open.sizes = vec![1000];
    open.keepalive = true;
    open.concurrency = 3;
    open.pause_ms = 5;
    let under_way = site.client.steady_load(&open)?;
    lvs_testbed::soon("the director to list three open connections", || {
        site.lvsadm("-L -n").is_ok_and(|text| {
            rows(&text)
                .iter()
                .filter(|row| row.is_server())
                .all(|row| row.number(2).is_ok_and(|n| n == 1))
        })
    })?;
    site.lvsadm(&format!("-e -t {service} -r {} {flag} -w 0", server(0)))?;
    load.requests = 40;
    spread(&ok(site.client.load(&load)?, 40)?, &[0, 20, 20])?;
    let listing = site.lvsadm("-L -n")?;
    ensure!(
        rows(&listing)[1..]
            .iter()
            .any(|row| row.words[1..3] == ["0", "1"]),
        "no server has weight 0 and 1 active connection: {listing}"
    );
    under_way.wait_for_more(4)?;
    let report = under_way.finish_ok()?;
    ensure!(
        report.servers.len() == 3 && report.ok > 3,
        "not all 3 servers answered, or at most 3 requests: {report:?}"
    );

    // A deleted server receives no new connections. After it is added again, it receives its share.
    site.lvsadm(&format!("-d -t {service} -r {}", server(1)))?;
    load.requests = 10;
    spread(&ok(site.client.load(&load)?, 10)?, &[0, 0, 10])?;
    site.lvsadm(&format!("-a -t {service} -r {} {flag}", server(1)))?;
    site.lvsadm(&format!("-e -t {service} -r {} {flag} -w 1", server(0)))?;
    load.requests = 30;
    spread(&ok(site.client.load(&load)?, 30)?, &[10, 10, 10])?;
    site.lvsadm("-C")?;
    ensure!(rows(&site.lvsadm("-L -n")?).is_empty());
    Ok(())
}

/// Checks the shares of the servers with the schedulers wrr, lc and wlc. lc and wlc are tested with
/// one connection at a time, because the balance of parallel connections depends on the speed of the
/// servers.
pub(crate) fn schedulers(site: &Site) -> Result<()> {
    let mut load = site.load();
    load.sizes = vec![1000];
    load.requests = 100;
    let before = resets(site)?;
    site.add_service_weighted("-t", 80, "wrr", &[4, 3, 2, 1])?;
    spread(&ok(site.client.load(&load)?, 100)?, &[40, 30, 20, 10])?;
    site.lvsadm("-C")?;

    load.concurrency = 1;
    // A server that is added again soon still has its earlier connections: lc compensates for the
    // different shares of wrr.
    for (scheduler, shares) in [("lc", [10, 20, 30, 40]), ("wlc", [25; 4])] {
        site.add_service(80, scheduler)?;
        let report = ok(site.client.load(&load)?, 100)?;
        let resets = resets(site)? - before;
        for ((server, count), share) in report.servers.iter().zip(shares) {
            // The end of one connection and the start of the next may be processed in either order,
            // and a reset connection is removed early.
            ensure!(
                count.abs_diff(share) <= 3 + resets,
                "{scheduler}: the share of {server} is wrong ({resets} resets): {:?}",
                report.servers
            );
        }
        ensure!(
            report.servers.len() == 4,
            "{scheduler}: not all 4 servers answered: {:?}",
            report.servers
        );
        site.lvsadm("-C")?;
    }
    Ok(())
}

/// Returns the options of 40 requests to port 80 of the VIP, for answers of 1 to 300,007 bytes.
pub(crate) fn mixed_load(site: &Site) -> LoadOptions {
    let mut load = site.load();
    load.sizes = vec![1, 1448, 20_011, 300_007];
    load.requests = 40;
    load
}

/// The requests of [`mixed_load`], sent to the first real server directly.
pub(crate) fn direct(site: &Site, load: &LoadOptions) -> LoadOptions {
    LoadOptions {
        target: (site.real_address(0), 80).into(),
        ..load.clone()
    }
}

/// Checks that connections to this port of the virtual address are refused.
pub(crate) fn refused(site: &Site, load: &LoadOptions, port: u16) -> Result<()> {
    let nobody = LoadOptions {
        target: site.service(port),
        requests: 1,
        ..load.clone()
    };
    let report = site.client.load(&nobody)?;
    ensure!(
        report.errors.len() == 1 && report.errors[0].contains("refused"),
        "the connection was not refused: {report:?}"
    );
    Ok(())
}

/// Uploads 5 MB from the client to the service.
pub(crate) fn upload(site: &Site) -> Result<()> {
    let upload = site.serve("upload", 5_000_000)?;
    site.client
        .sh(&format!(
            "curl --fail --silent --show-error --max-time 120 -T {} http://{}/up/x",
            upload.display(),
            site.vip
        ))
        .map(drop)
}

/// Options of a web server on this port only.
pub(crate) fn on_port(port: u16) -> NginxOptions {
    NginxOptions {
        ports: vec![port],
        ..NginxOptions::default()
    }
}

pub(crate) fn ok(report: LoadReport, requests: u64) -> Result<LoadReport> {
    report.all_ok(requests)?;
    Ok(report)
}

/// Sends a TCP segment with ACK from port 999 of the client to `port` of the VIP, up to 30 times,
/// until a RST for it arrives. Returns whether the RST has the right flags and sequence number.
pub(crate) fn stray_ack_is_reset(site: &Site, port: u16) -> Result<bool> {
    let script = format!(
        r#"perl -MSocket -e '
        sub sum {{ my $s = 0; $s += $_ for unpack("n*", $_[0]); $s = ($s & 0xffff) + ($s >> 16) while $s >> 16; ~$s & 0xffff }}
        my ($from, $to) = map {{ inet_aton($_) }} "{client}", "{vip}";
        socket(S, PF_INET, SOCK_RAW, 6) or die $!;
        # All TCP of this host comes here (SO_RCVBUFFORCE).
        setsockopt(S, SOL_SOCKET, 33, pack("i", 256 << 20)) or die $!;
        my $tcp = pack("nnNNCCnnn", 999, {port}, 1111, 2222, 0x50, 0x10, 1000, 0, 0);
        substr($tcp, 16, 2) = pack("n", sum($from . $to . pack("nn", 6, length $tcp) . $tcp));
        vec(my $ready = "", fileno(S), 1) = 1;
        for (1 .. 30) {{
            send(S, $tcp, 0, sockaddr_in(0, $to)) or die $!;
            my $again = time + 2;
            while (time < $again && select(my $is_ready = $ready, undef, undef, 1)) {{
                recv(S, my $packet, 2000, 0);
                my ($sport, $dport, $seq, $ack, $off, $flags) = unpack("nnNNCC", substr($packet, (ord($packet) & 15) * 4));
                next unless substr($packet, 12, 4) eq $to && $sport == {port} && $dport == 999;
                printf "flags %x seq %d", $flags, $seq;
                exit;
            }}
        }}
        print "silence"'"#,
        client = client_address(site)?,
        vip = site.vip,
    );
    let printed = site.client.sh(&script)?;
    // RFC 9293, 3.5.2: the sequence number of the RST is the acknowledgement number that it
    // answers.
    let reset = printed == "flags 4 seq 2222";
    if !reset {
        eprintln!("{printed:?}; {}", site.lvsadm("drops --all")?);
    }
    Ok(reset)
}

pub(crate) fn client_address(site: &Site) -> Result<String> {
    let printed = site
        .client
        .sh("ip -4 -o addr show dev eth0 | sed 's/.*inet \\([0-9.]*\\).*/\\1/'")?;
    Ok(printed.trim().to_owned())
}

/// Returns the state of the host that the dataplane may have changed: nftables rules, interfaces,
/// IPv4 routes and policy rules, proxy and permanent neighbours, open ports, `ip_forward` and
/// `rp_filter`.
pub(crate) fn host_state(site: &Site) -> Result<String> {
    site.director.sh(
        "nft list ruleset; ip -o link | sed 's/^[0-9]*: //; s/ mtu.*//'; ip route; ip rule; ip neigh show proxy; ip neigh show nud permanent; ss -Hltunx | awk '{print $1,$5}' | sort; cat /proc/sys/net/ipv4/ip_forward /proc/sys/net/ipv4/conf/*/rp_filter",
    )
}

/// Prints the outcomes of cluster scenarios, and checks that no download broke, and that no
/// director reported a faulty server.
pub(crate) fn nothing_breaks(outcomes: &[Outcome]) -> Result<()> {
    println!("{}", serde_json::to_string(outcomes)?);
    let mut outcomes = outcomes.iter();
    let broken = outcomes.find(|outcome| outcome.broken > 0 || !outcome.blamed.is_empty());
    ensure!(
        broken.is_none(),
        "a download broke, or a director reported a faulty server: {broken:?}"
    );
    Ok(())
}
