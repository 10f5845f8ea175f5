//! `lvs-testbed cluster`: directors under load during failures and maintenance. [`pair`] has two
//! directors with keepalived, [`many`] three behind a router with BIRD.
//!
//! The directors use the files of `examples`. Clients download at a [constant rate](crate::paced),
//! compare each byte, and measure the longest pause.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{IsTerminal, Write as _};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::unistd::Pid;
use serde::Serialize;
use serde_json::Value;

use crate::netns::{Host, Proc, wait_until};
use crate::{Forward, LoadOptions, LoadReport, Site, programs};

/// Defines an enum of scenarios with their names and descriptions.
macro_rules! scenarios {
    ($($scenario:ident $name:literal $about:literal,)+) => {
        /// A scenario; [`Scenario::ALL`] describes it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Scenario {
            $(#[doc = concat!("`", $name, "`")] $scenario,)+
        }

        impl Scenario {
            /// Names, scenarios and descriptions.
            pub const ALL: &[(&str, Self, &str)] = &[$(($name, Self::$scenario, $about),)+];

            fn name(self) -> &'static str {
                match self {
                    $(Self::$scenario => $name,)+
                }
            }
        }
    };
}

pub mod many;
pub mod pair;

const LIMIT: Duration = Duration::from_secs(20);
const KEY: &str = "0123456789abcdef0123456789abcdef";
/// The size of a download, in bytes.
const DOWNLOAD: u64 = 1_000_000;
/// Rate of each download in bytes a second; a download takes 17 seconds.
const RATE: u64 = 60_000;

/// Options of the cluster scenarios.
#[derive(Clone, Debug, clap::Args)]
pub struct ClusterOptions {
    /// List the scenarios
    #[arg(long)]
    pub list: bool,
    /// Forwarding method: nat, dr or tun
    #[arg(long, default_value = "nat")]
    pub forward: String,
    /// Number of simultaneous downloads
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=20_000))]
    pub downloads: u64,
    /// Download over IPv6 (only with --forward nat or dr)
    #[arg(long)]
    pub ipv6: bool,
    /// Balancer between clients and servers: lvs, or haproxy for comparison (calm, kill, returns
    /// and planned only; HAProxy is a TCP proxy)
    #[arg(long, default_value = "lvs")]
    pub director: Balancer,
    /// Show the numbers of running, complete and failed downloads during the run
    #[arg(long)]
    pub live: bool,
    /// The scenario to run; all scenarios if none is named
    pub scenario: Option<String>,
}

impl Default for ClusterOptions {
    fn default() -> Self {
        Self {
            list: false,
            forward: "nat".to_owned(),
            downloads: 500,
            ipv6: false,
            director: Balancer::Lvs,
            live: false,
            scenario: None,
        }
    }
}

impl ClusterOptions {
    fn method(&self) -> Result<Forward> {
        Ok(match self.forward.as_str() {
            "nat" => Forward::Nat,
            "dr" => Forward::Dr,
            "tun" if self.ipv6 => {
                bail!("the servers of this laboratory accept no tunnels over IPv6: omit --ipv6")
            }
            "tun" => Forward::Tun,
            other => bail!("unknown forwarding method {other:?}: use nat, dr or tun"),
        })
    }

    fn family(&self) -> &'static str {
        if self.ipv6 { "ipv6" } else { "ipv4" }
    }

    /// Options of the downloads; their local ports begin at `first_port`.
    fn load(&self, site: &Site, first_port: u16) -> LoadOptions {
        let mut load = site.load();
        if self.ipv6 {
            load.target.set_ip(site.vip6.into());
        }
        load.requests = self.downloads;
        load.concurrency = self.downloads;
        load.sizes = vec![DOWNLOAD];
        load.timeout_ms = 60_000;
        load.first_port = first_port;
        load
    }
}

/// The balancer between clients and servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Balancer {
    /// `lvsd` and its dataplane.
    Lvs,
    /// HAProxy, as a proxy of TCP.
    #[value(name = "haproxy")]
    HaProxy,
}

impl Balancer {
    fn word(self) -> &'static str {
        match self {
            Self::Lvs => "lvs",
            Self::HaProxy => "haproxy",
        }
    }
}

/// Result of a scenario: one line of JSON.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Outcome {
    /// Name of the scenario.
    pub scenario: String,
    /// Number of directors.
    pub directors: usize,
    /// The balancer: `lvs` or `haproxy`.
    pub director: String,
    /// The forwarding method, or `proxy` with HAProxy.
    pub forward: String,
    /// Family of the downloads: `ipv4` or `ipv6`.
    pub family: String,
    /// Number of downloads, whose content is compared byte by byte.
    pub downloads: u64,
    /// Number of downloads that failed.
    pub broken: u64,
    /// Number of segments that servers retransmitted.
    pub retransmissions: u64,
    /// The longest pause of all completed downloads in milliseconds.
    pub stall_ms: u64,
    /// The 99th percentile of the longest pauses of each download in milliseconds.
    pub stall_p99_ms: u64,
    /// Number of packets that the directors dropped, by reason. Directors that do not run at the
    /// end are omitted.
    pub lost: BTreeMap<String, u64>,
    /// Number of TCP resets that servers sent, for example for packets of unknown connections.
    pub misdirected: u64,
    /// With two directors: for each change, the longest time in milliseconds without an echo reply
    /// from the VIP (100 requests a second).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub outages_ms: Vec<u64>,
    /// With three directors: milliseconds until the router stopped using the director that was in
    /// maintenance or had failed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub withdrawn_ms: Vec<u64>,
    /// With two directors: servers that a director reported as faulty, although no server was.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub blamed: BTreeSet<String>,
    /// Faults that `lvsadm` or `lvsd` reported during the scenario.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reported: Vec<String>,
    /// The first errors of the downloads.
    pub errors: Vec<String>,
}

/// Runs `lvs-testbed cluster`.
///
/// # Errors
/// No scenario has the name, or a scenario cannot be run.
pub fn main(options: &ClusterOptions) -> Result<()> {
    if options.list {
        println!("two directors with keepalived, one active and one standby (nat, dr, tun):");
        for (name, _, about) in pair::Scenario::ALL {
            println!("  {name:<14} {about}");
        }
        println!(
            "\nthree directors behind a router that distributes packets among them (ECMP), with BIRD (dr, tun); a name in both\n\
             lists means this scenario with --forward dr and tun:"
        );
        for (name, _, about) in many::Scenario::ALL {
            println!("  {name:<14} {about}");
        }
        return Ok(());
    }
    let forward = options.method()?;
    let all_active = forward != Forward::Nat && options.director == Balancer::Lvs;
    let wanted = |name: &str| {
        options
            .scenario
            .as_ref()
            .is_none_or(|wanted| wanted == name)
    };
    let many = many::Scenario::ALL.iter();
    let many: Vec<_> = many
        .filter(|(name, scenario, _)| all_active && wanted(name) && scenario.suits(forward))
        .collect();
    let pair = pair::Scenario::ALL.iter().filter(|(name, scenario, _)| {
        wanted(name)
            && many.iter().all(|(other, ..)| other != name)
            && (options.scenario.is_some() || scenario.suits(options.director))
    });
    let pair: Vec<_> = pair.collect();
    ensure!(
        !many.is_empty() || !pair.is_empty(),
        "no scenario is called {} with --forward {}; --list shows them",
        options.scenario.as_deref().unwrap_or_default(),
        options.forward
    );
    for (_, scenario, _) in pair {
        let outcome = pair::play(*scenario, options)?;
        println!("{}", serde_json::to_string(&outcome)?);
    }
    for (_, scenario, _) in many {
        let outcome = many::play(*scenario, options)?;
        println!("{}", serde_json::to_string(&outcome)?);
    }
    Ok(())
}

/// Runs the downloads, and shows their progress.
fn shown(client: &Host, load: &LoadOptions) -> Result<LoadReport> {
    let load = LoadOptions {
        progress_ms: 100,
        ..load.clone()
    };
    let mut running = client.spawn(programs::own()?, &load.arguments())?;
    let (begun, terminal) = (Instant::now(), std::io::stderr().is_terminal());
    let mut seen = (begun, 0_u64);
    while running.is_running() {
        std::thread::sleep(Duration::from_millis(if terminal { 100 } else { 1000 }));
        let log = running.log();
        let last = log.lines().rev().find_map(|line| {
            let reported: Value = serde_json::from_str(line).ok()?;
            reported["under_way"].is_u64().then_some(reported)
        });
        let Some(reported) = last else { continue };
        let bytes = reported["bytes"].as_u64().unwrap_or(0);
        let took = seen.0.elapsed().as_millis().max(1);
        let rate = u128::from(bytes.saturating_sub(seen.1)) / took / 1000;
        if seen.0.elapsed() >= Duration::from_secs(1) || !terminal {
            seen = (Instant::now(), bytes);
        }
        let count = |name: &str| reported[name].as_u64().unwrap_or(0);
        let mut errors = std::io::stderr().lock();
        let _ = write!(
            errors,
            "{}{:6.1} s  under way {:>5}   done {:>5}   BROKEN {:>5}   {rate:>4} MB/s{}",
            if terminal { "\r" } else { "" },
            begun.elapsed().as_secs_f64(),
            count("under_way"),
            count("ok"),
            count("failed"),
            if terminal { "  " } else { "\n" },
        );
        let _ = errors.flush();
    }
    let _ = writeln!(std::io::stderr());
    let status = running.wait(LIMIT)?;
    let log = running.log();
    ensure!(status.success(), "the load client failed: {status}: {log}");
    serde_json::from_str(log.lines().last().unwrap_or_default())
        .with_context(|| format!("the load client printed no valid report: {log}"))
}

/// Creates separate `/etc` and `/run` directories for a host, which shares all other files with the
/// machine.
fn own_files(host: &Host) -> Result<()> {
    let files = host.dir().join(format!("{}-etc", host.name()));
    fs::create_dir_all(&files)?;
    let files = files.display();
    host.sh(&format!(
        "mount --bind /etc {files}\nmount -t tmpfs tmpfs /etc\nmount -t tmpfs tmpfs /run\nln -s {files}/* /etc/\n\
         rm -f /etc/bird /etc/frr /etc/exabgp /etc/keepalived /etc/lvs /etc/lvsd\nmkdir -p /etc/bird /etc/frr /etc/exabgp /etc/keepalived /etc/lvs /etc/lvsd /run/bird"
    ))
    .map(drop)
}

/// Writes a file on a host.
fn put(host: &Host, path: &str, text: &str) -> Result<()> {
    let mut words = host.command("tee");
    words.arg(path);
    crate::netns::run_with_input(&mut words, text).map(drop)
}

/// Writes the key of `[sync]` that all directors share.
fn put_key(host: &Host) -> Result<()> {
    put(host, "/etc/lvs/sync.key", KEY)?;
    host.sh("chmod 600 /etc/lvs/sync.key").map(drop)
}

#[derive(Debug)]
struct Counters {
    sent_again: u64,
    resets: u64,
}

impl Counters {
    fn read(site: &Site) -> Result<Self> {
        let sum = |name: &str| -> Result<u64> {
            let servers = site.servers.iter();
            servers.map(|host| host.counter("Tcp", name)).sum()
        };
        Ok(Self {
            sent_again: sum("RetransSegs")?,
            resets: sum("OutRsts")?,
        })
    }

    /// Returns the result of a scenario that began when these counters were read.
    fn outcome(&self, site: &Site, report: LoadReport) -> Result<Outcome> {
        let now = Self::read(site)?;
        Ok(Outcome {
            director: Balancer::Lvs.word().to_owned(),
            forward: site.options.forward.word().to_owned(),
            broken: report.failed,
            retransmissions: now.sent_again.saturating_sub(self.sent_again),
            misdirected: now.resets.saturating_sub(self.resets),
            stall_ms: report.stall_ms,
            stall_p99_ms: report.stall_p99_ms,
            errors: report.errors,
            ..Outcome::default()
        })
    }
}

/// Number of packets that the directors have dropped, by reason.
fn dropped<'a>(site: &Site, directors: impl Iterator<Item = &'a Host>) -> BTreeMap<String, u64> {
    let mut lost = BTreeMap::new();
    for director in directors {
        let reported = site.lvsadm_on(director, "--json drops");
        let reported = reported
            .ok()
            .and_then(|reported| serde_json::from_str(&reported).ok());
        let Some(Value::Array(reasons)) = reported else {
            continue;
        };
        for drop in reasons.iter().filter(|reason| reason["action"] == "drop") {
            let reason = drop["reason"].as_str().unwrap_or("?").to_owned();
            let count = drop["count"].as_u64().unwrap_or(0);
            if count > 0 {
                *lost.entry(reason).or_default() += count;
            }
        }
    }
    lost
}

/// One line for each server with a fault in `lvsd status` of a director, with the code and the
/// reason of the fault.
fn blamed(director: &Host) -> Result<Vec<String>> {
    let reported = director.run(programs::find("lvsd")?, &["status", "--json"])?;
    let reported: Value = serde_json::from_str(&reported)?;
    let services = reported["services"].as_array().into_iter().flatten();
    let servers = services.flat_map(|service| service["servers"].as_array().into_iter().flatten());
    let faults = servers.filter_map(|server| {
        let code = server["code"].as_str().filter(|code| !code.is_empty())?;
        let (address, reason) = (&server["server"], &server["reason"]);
        Some(format!(
            "{}: {code} of {address}: {reason}",
            director.name()
        ))
    });
    Ok(faults.collect())
}

/// Process id of the dataplane of a director's `lvsd`.
fn dataplane_of(director: &Host) -> Result<Pid> {
    let reported = director.run(programs::find("lvsd")?, &["status", "--json"])?;
    let reported: Value = serde_json::from_str(&reported)?;
    let pid = reported["dataplane"]["pid"]
        .as_i64()
        .context("the status of lvsd contains no pid of the dataplane")?;
    Ok(Pid::from_raw(i32::try_from(pid)?))
}

/// Waits until directors are in sync with all of their peers.
fn wait_in_step(site: &Site, directors: &[&Host]) -> Result<()> {
    let in_step = |director: &Host| {
        let reported = site.lvsadm_on(director, "--json sync").ok()?;
        let reported: Value = serde_json::from_str(&reported).ok()?;
        let mut peers = reported["peers"].as_array()?.iter();
        peers.all(|peer| peer["state"] == "in step").then_some(())
    };
    let all = || directors.iter().all(|d| in_step(d).is_some());
    wait_until("all directors to be in sync", LIMIT, all)
}

/// Waits until `lvsadm sync` on a director prints `words` in the lines of `peer`. Returns the
/// director's name and these lines.
fn wait_reported(site: &Site, director: &Host, peer: &str, words: &str) -> Result<String> {
    let mut reported = String::new();
    wait_until("lvsadm sync to report the lost connection", LIMIT, || {
        let sync = site.lvsadm_on(director, "sync");
        reported = sync.map(|sync| peer_lines(&sync, peer)).unwrap_or_default();
        reported.contains(words)
    })
    .with_context(|| format!("{} reports of {peer}: {reported}", director.name()))?;
    Ok(format!("{}: {reported}", director.name()))
}

/// Returns the first line of `lvsadm sync` that contains `words` and the indented lines below it,
/// joined by `; `.
fn peer_lines(sync: &str, words: &str) -> String {
    let lines = sync.lines().skip_while(|line| !line.contains(words));
    let mut kept: Vec<&str> = Vec::new();
    for line in lines {
        if !kept.is_empty() && !line.starts_with("    ") {
            break;
        }
        kept.push(line.trim());
    }
    kept.join("; ")
}

/// Drops a director's incoming synchronisation packets: a percentage, or all.
fn lose_sync(director: &Host, of_a_hundred: Option<u32>) -> Result<()> {
    let some = of_a_hundred.map(|some| format!("numgen random mod 100 '<' {some}"));
    let some = some.unwrap_or_default();
    director
        .sh(&format!(
            "nft add table inet loss\n\
             nft 'add chain inet loss input {{ type filter hook input priority -10; }}'\n\
             nft add rule inet loss input tcp dport 8848 {some} counter drop\n\
             nft add rule inet loss input tcp sport 8848 {some} counter drop"
        ))
        .map(drop)
}

/// Number of dropped synchronisation packets of a director.
fn lost_of_sync(director: &Host) -> u64 {
    let reported = director.sh("nft list table inet loss").unwrap_or_default();
    let counts = reported.split("counter packets ").skip(1);
    counts
        .filter_map(|count| count.split(' ').next()?.parse::<u64>().ok())
        .sum()
}

/// Removes the rules of [`lose_sync`].
fn end_loss(director: &Host) -> Result<()> {
    director.sh("nft delete table inet loss").map(drop)
}

/// Drops a director's packets to etcd.
fn lose_etcd(director: &Host) -> Result<()> {
    director
        .sh("nft add table inet etcd\n\
             nft 'add chain inet etcd output { type filter hook output priority 0; }'\n\
             nft add rule inet etcd output tcp dport 2379 drop")
        .map(drop)
}

/// Removes the rules of [`lose_etcd`].
fn end_etcd_loss(director: &Host) -> Result<()> {
    director.sh("nft delete table inet etcd").map(drop)
}

/// Starts etcd on the first server's host, and writes the site's last server to etcd, for the
/// service `web`. Returns the process and the URL of etcd.
fn start_etcd(site: &Site) -> Result<(Proc, String)> {
    let host = &site.servers[0];
    let url = format!("http://{}:2379", site.real_address(0));
    let data = host.dir().join("etcd").display().to_string();
    let member = host.spawn(
        "etcd",
        &[
            "--data-dir",
            &data,
            "--listen-client-urls",
            "http://0.0.0.0:2379",
            "--advertise-client-urls",
            &url,
            "--logger",
            "zap",
            "--log-level",
            "error",
        ],
    )?;
    let server = site.real_address(site.servers.len() - 1);
    let write = format!(
        "ETCDCTL_API=3 etcdctl --endpoints={url} put /lvs/servers/web/last '{{\"address\":\"{server}\"}}'"
    );
    wait_until("etcd to answer", LIMIT, || host.sh(&write).is_ok())?;
    Ok((member, url))
}

/// Waits until `lvsd status` of these directors shows etcd as connected or disconnected, and
/// `servers` servers of the service `web`.
fn wait_etcd(directors: &[&Host], connected: bool, servers: usize) -> Result<()> {
    let is_connected = |director: &Host| {
        let reported = director.run(programs::find("lvsd").ok()?, &["status", "--json"]);
        let reported: Value = serde_json::from_str(&reported.ok()?).ok()?;
        let source = reported["sources"].as_array()?.first()?.clone();
        let known = source["answered"].is_u64() && source["trouble"].is_null();
        let mut services = reported["services"].as_array()?.iter();
        let web = services.find(|service| service["name"] == "web")?;
        let has = web["servers"].as_array()?.len();
        (has == servers).then_some(known)
    };
    let all = || directors.iter().all(|d| is_connected(d) == Some(connected));
    let state = if connected { "connected" } else { "lost" };
    let what = format!("the directors to report etcd as {state}, with {servers} servers");
    wait_until(&what, LIMIT, all)
}
