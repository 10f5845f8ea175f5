//! Combinations of the dataplane's features: `lvsd` replaces a killed dataplane during downloads,
//! except with full NAT in userspace, where connections do not survive. The sixteen rows contain
//! every pair of values of two features.

use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result, ensure};
use lvs_testbed::listing::Row as Line;
use lvs_testbed::{Forward, Host, LoadOptions, Proc, Site, SiteOptions, programs, soon};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::{common, fast_path, killed};

/// Number of simultaneous downloads of a row.
const DOWNLOADS: u64 = 20;
/// Rate of a download in bytes a second.
const RATE: u64 = 60_000;
/// Duration of a download in seconds.
const SECONDS: u64 = 20;

const KEY: &str = "0123456789abcdef0123456789abcdef";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    Off,
    Tcx,
    Clsact,
    Xdp,
    /// XDP on interfaces that support it (`--xdp auto`), tc on others.
    XdpAuto,
}

impl Path {
    const fn has_xdp(self) -> bool {
        matches!(self, Self::Xdp | Self::XdpAuto)
    }
}

const PATHS: [Path; 4] = [Path::Off, Path::Tcx, Path::Clsact, Path::Xdp];

#[derive(Clone, Copy, Debug)]
struct Features {
    path: Path,
    forward: Forward,
    workers: u8,
    peers: bool,
    master: bool,
    resets: bool,
}

impl Features {
    /// Returns the row of a fast path and a forwarding method, numbered 0 to 3. The bits of both
    /// numbers select the other features, so that each pair of values occurs.
    fn row(path: usize, forward: usize) -> Self {
        let differs = |one: usize, other: usize| (one ^ other) & 1 == 1;
        Self {
            path: PATHS[path],
            forward: [Forward::Nat, Forward::Dr, Forward::Tun, Forward::FullNat][forward],
            workers: if differs(path, forward) { 2 } else { 1 },
            peers: differs(path >> 1, forward >> 1),
            master: differs(path, forward >> 1),
            resets: differs(path >> 1, forward),
        }
    }
}

/// A director with `lvsd`, and the dataplane of its peer, if it has one.
struct Director {
    features: Features,
    downloads: u64,
    site: Site,
    lvsd: Proc,
    _second: Option<Proc>,
}

impl Director {
    fn start(label: &str, features: Features, downloads: u64) -> Result<Self> {
        if features.path != Path::Off {
            fast_path::require_permission()?;
        }
        let mut options = SiteOptions::with_servers(label, features.forward, 2);
        options.paced = Some(RATE);
        options.standby = features.peers;
        options.offloads = !features.path.has_xdp();
        let site = Site::new(options)?;
        if features.path.has_xdp() {
            site.testbed.take_frames()?;
            site.testbed.finish_checksums()?;
        } else if features.forward == Forward::Tun && features.path != Path::Off {
            site.director.sh(
                "for i in eth0 eth1; do [ ! -e /sys/class/net/$i ] || ethtool -K $i tx off; done",
            )?;
        }
        let key = site.testbed.dir().join("key");
        std::fs::write(&key, KEY)?;
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600))?;
        let second = if features.peers {
            let key = key.display().to_string();
            let own = match site.options.forward {
                Forward::Nat => &["--interface", "eth0", "--interface", "eth1"][..],
                // Each director has local addresses of its own.
                Forward::FullNat => &["--interface", "eth0", "--local-address", "192.0.2.51"],
                Forward::Dr | Forward::Tun => &["--interface", "eth0"],
            };
            let peer = ["--sync-peer", "192.0.2.1", "--sync-key", &key];
            let words = [own, &peer, &["--fast-path", "off"]].concat();
            let host = site.standby()?;
            let dataplane = host.spawn(programs::find("lvs-dataplane")?, &words)?;
            soon("the second dataplane to answer", || host.has_dataplane())
                .with_context(|| dataplane.log())?;
            Some(dataplane)
        } else {
            None
        };
        let file = site.testbed.dir().join("lvsd.toml");
        std::fs::write(&file, configuration(&site, features)?)?;
        let file = file.display().to_string();
        let (lvsd, testbed) = (programs::find("lvsd")?, programs::own()?);
        let [lvsd, testbed] = [lvsd, testbed].map(|path| path.display().to_string());
        let words = [testbed.as_str(), "without-tcx", &lvsd, "--config", &file];
        let words = match features.path {
            Path::Clsact => &words[..],
            _ => &words[2..],
        };
        let lvsd = site.director.spawn(words[0], &words[1..])?;
        let director = Self {
            features,
            downloads,
            site,
            lvsd,
            _second: second,
        };
        soon("both servers to be in use", || {
            common::usable(&director.site).len() == 2
        })
        .with_context(|| director.lvsd.log())?;
        if features.peers {
            let rules = director.site.lvsadm("-S -n")?;
            let program = programs::find("lvsadm")?;
            let mut restore = director.site.standby()?.command(program);
            lvs_testbed::netns::run_with_input(restore.arg("-R"), &rules)?;
        }
        Ok(director)
    }

    /// The number of packets that the kernel fast path has forwarded: all packets in XDP, and with
    /// a socket buffer only packets from clients.
    fn offloaded(&self) -> Result<u64> {
        let reasons = ["kernel_requests", "kernel_xdp"];
        Ok(common::drops(&self.site, reasons)?.iter().sum())
    }

    /// Waits until the downloads are offloaded and replicated to the peer, and checks that the
    /// master daemon runs, each if the features contain it. Connections of full NAT are not
    /// replicated.
    fn wait_for_features(&self) -> Result<()> {
        let Features {
            path,
            peers,
            master,
            ..
        } = self.features;
        if path != Path::Off {
            let before = self.offloaded()?;
            soon("the kernel to forward packets of all downloads", || {
                self.offloaded()
                    .is_ok_and(|count| count > before + 10 * self.downloads)
            })
            .with_context(|| self.lvsd.log())?;
            let [by_xdp] = common::drops(&self.site, ["kernel_xdp"])?;
            ensure!(
                path != Path::XdpAuto || by_xdp > 0,
                "XDP forwarded no packets"
            );
            let listed = self.site.lvsadm("-L -n -c")?;
            let source = lvs_testbed::listing::connections(&listed)?.remove(0).source;
            let question = format!("explain tcp {source} {}", self.site.service(80));
            let mut explained = String::new();
            soon("explain to show an offloaded connection", || {
                explained = self.site.lvsadm(&question).unwrap_or_default();
                explained.contains("fast path   yes\n")
            })
            .with_context(|| explained.clone())?;
        }
        // Connections of full NAT are not replicated: their local ports belong to one director.
        if peers && self.features.forward != Forward::FullNat {
            soon("the peer to have all connections", || {
                let text = self
                    .site
                    .standby()
                    .and_then(|second| self.site.lvsadm_on(second, "--json sync"));
                let state: Value = text
                    .ok()
                    .and_then(|text| serde_json::from_str(&text).ok())
                    .unwrap_or_default();
                state["peers"][0]["borrowed"].as_u64() == Some(self.downloads)
            })
            .with_context(|| self.lvsd.log())?;
        }
        if master {
            let daemons = self.site.lvsadm("-L --daemon")?;
            ensure!(
                daemons.contains("master sync daemon"),
                "no `master sync daemon` in {daemons}"
            );
        }
        Ok(())
    }

    /// Kills the dataplane and waits until `lvsd` has started another one.
    fn kill_dataplane(&self) -> Result<()> {
        let pid = || -> Result<i32> {
            let text = self.site.director.sh(
                "ss -Hlxp | sed -n 's/.*netns-[0-9]*.sock .*pid=\\([0-9]*\\).*/\\1/p' | head -n 1",
            )?;
            Ok(text.trim().parse()?)
        };
        let before = pid()?;
        kill(Pid::from_raw(before), Signal::SIGKILL)?;
        soon("another dataplane to have both servers", || {
            pid().is_ok_and(|now| now != before) && common::usable(&self.site).len() == 2
        })
        .with_context(|| self.lvsd.log())
    }

    /// Waits until the dataplane's packet counter of each server equals the count of the server's
    /// host, or lacks at most the packets of two seconds.
    fn compare_counters(&self) -> Result<()> {
        let servers = &self.site.servers;
        let counters_are_equal = |lines: &[Line]| -> Result<bool> {
            let lines = lines.iter().filter(|line| line.is_server());
            for (server, line) in servers.iter().zip(lines) {
                // The counters of a new dataplane may lack the packets of the last second before
                // the kill.
                let second = received(server)? / SECONDS;
                let (listed, received) = (line.number(1)?, received(server)?);
                if !(received - 2 * second..=received).contains(&listed) {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        common::wait_for_counters(
            &self.site,
            "the counters to equal those of the servers' hosts",
            counters_are_equal,
        )
        .with_context(|| {
            let received = servers.iter().map(|server| received(server).ok());
            let listed = self
                .site
                .lvsadm("-L -n --stats --exact")
                .unwrap_or_default();
            format!(
                "{:?} packets received\n{listed}",
                received.collect::<Vec<_>>()
            )
        })
    }
}

fn configuration(site: &Site, features: Features) -> Result<String> {
    let arguments = site.dataplane_arguments();
    let values = |option: &str| {
        let pairs = arguments.windows(2).filter(|pair| pair[0] == option);
        let values: Vec<String> = pairs.map(|pair| format!("\"{}\"", pair[1])).collect();
        format!("[{}]", values.join(", "))
    };
    let interfaces = values("--interface");
    let (path, survives) = match features.path {
        Path::Off => ("off", "on"),
        _ => ("on", "off"),
    };
    let mut text = format!(
        "[dataplane]\ninterface = {interfaces}\nworkers = {}\nfast_path = \"{path}\"\nwarm_restart = \"{survives}\"\n",
        features.workers
    );
    match features.path {
        Path::Xdp => writeln!(text, "xdp = {interfaces}")?,
        Path::XdpAuto => writeln!(text, "xdp = \"auto\"")?,
        Path::Off | Path::Tcx | Path::Clsact => {}
    }
    if features.forward == Forward::FullNat {
        writeln!(text, "local_addresses = {}", values("--local-address"))?;
    }
    if features.peers {
        let key = site.testbed.dir().join("key");
        write!(
            text,
            "\n[sync.peers]\naddresses = [\"192.0.2.2\"]\nkey_file = \"{}\"\n",
            key.display()
        )?;
    }
    if features.master {
        text.push_str("\n[sync.ipvs]\nrole = \"master\"\ninterface = \"eth0\"\n");
    }
    write!(
        text,
        "\n[[service]]\naddress = \"{}\"\nscheduler = \"rr\"\nforward = \"{}\"\n",
        site.service(80),
        features.forward.word()
    )?;
    if features.resets {
        text.push_str("on_server_down = \"reset\"\n");
    }
    for index in 0..site.servers.len() {
        let address = site.real_address(index);
        write!(text, "\n[[service.server]]\naddress = \"{address}:80\"\n")?;
    }
    Ok(text)
}

/// Counts packets from clients at a server's host.
fn count_requests(server: &Host) -> Result<()> {
    server
        .sh("nft -f - <<'END'\n\
             table inet seen {\n\
             counter requests { }\n\
             chain in { type filter hook input priority 400; tcp dport 80 counter name requests; }\n\
             }\nEND")
        .map(drop)
}

/// Number of packets from clients that a server's host has received.
fn received(server: &Host) -> Result<u64> {
    let listing: Value = serde_json::from_str(&server.sh("nft -j list table inet seen")?)?;
    let items = listing["nftables"]
        .as_array()
        .context("the JSON value is not a list")?;
    let packets = items
        .iter()
        .find_map(|item| item["counter"]["packets"].as_u64());
    packets.context("the rule has no counter")
}

fn combined(label: &str, features: Features, downloads: u64) -> Result<()> {
    let director = Director::start(label, features, downloads);
    let director = director.with_context(|| format!("{features:?}"))?;
    let play = || -> Result<()> {
        for server in &director.site.servers {
            count_requests(server)?;
        }
        let mut load = LoadOptions::new(director.site.service(80));
        load.requests = downloads;
        load.concurrency = downloads;
        load.sizes = vec![SECONDS * RATE];
        load.timeout_ms = 90_000;
        let client = director.site.client.clone();
        let running = std::thread::spawn(move || client.load(&load));
        soon("all downloads to be established", || {
            killed::established(&director.site).is_ok_and(|number| number == downloads)
        })?;
        director.wait_for_features()?;
        // Full NAT connections survive only with the kernel fast path, which keeps the local ports
        // for the successor.
        if features.path != Path::Off || features.forward != Forward::FullNat {
            director.kill_dataplane()?;
        }
        let report = running
            .join()
            .map_err(|_| anyhow::anyhow!("the thread panicked"))??;
        report.all_ok(downloads)?;
        director.compare_counters()
    };
    play().with_context(|| format!("{features:?}\n{}", director.lvsd.log()))
}

macro_rules! rows {
    ($($name:ident: $path:literal $forward:literal,)*) => {$(
        #[test]
        #[ignore = "long"]
        fn $name() -> Result<()> {
            combined(concat!("tog", $path, $forward), Features::row($path, $forward), DOWNLOADS)
        }
    )*};
}

rows! {
    userspace_features_combined_with_nat_break_no_download: 0 0,
    userspace_features_combined_with_direct_routing_break_no_download: 0 1,
    userspace_features_combined_with_tunnels_break_no_download: 0 2,
    userspace_features_combined_with_full_nat_break_no_download: 0 3,
    tcx_features_combined_with_nat_break_no_download: 1 0,
    tcx_features_combined_with_direct_routing_break_no_download: 1 1,
    tcx_features_combined_with_tunnels_break_no_download: 1 2,
    tcx_features_combined_with_full_nat_break_no_download: 1 3,
    clsact_features_combined_with_nat_break_no_download: 2 0,
    clsact_features_combined_with_direct_routing_break_no_download: 2 1,
    clsact_features_combined_with_tunnels_break_no_download: 2 2,
    clsact_features_combined_with_full_nat_break_no_download: 2 3,
    xdp_features_combined_with_nat_break_no_download: 3 0,
    xdp_features_combined_with_direct_routing_break_no_download: 3 1,
    xdp_features_combined_with_tunnels_break_no_download: 3 2,
    xdp_features_combined_with_full_nat_break_no_download: 3 3,
}

#[test]
#[ignore = "long"]
fn combined_features_break_none_of_500_downloads() -> Result<()> {
    let features = Features {
        path: Path::Tcx,
        forward: Forward::Nat,
        workers: 2,
        peers: true,
        master: true,
        resets: true,
    };
    combined("tog-all", features, 500)
}

#[test]
#[ignore = "long"]
fn combined_features_with_xdp_auto_break_no_download() -> Result<()> {
    let features = Features {
        path: Path::XdpAuto,
        forward: Forward::Nat,
        workers: 2,
        peers: true,
        master: true,
        resets: true,
    };
    combined("tog-auto", features, DOWNLOADS)
}

#[test]
fn rows_of_features_contain_every_pair_of_values() {
    use std::collections::BTreeSet;
    let rows = (0..4).flat_map(|path| (0..4).map(move |forward| (path, forward)));
    let mut pairs = BTreeSet::new();
    for (path, forward) in rows {
        let row = Features::row(path, forward);
        let values = [
            path,
            forward,
            usize::from(row.workers),
            usize::from(row.peers),
            usize::from(row.master),
            usize::from(row.resets),
        ];
        for first in 0..values.len() {
            for second in first + 1..values.len() {
                pairs.insert((first, values[first], second, values[second]));
            }
        }
    }
    // Pairs of values: two features have four values, and four have two.
    assert_eq!(pairs.len(), 4 * 4 + 2 * 4 * 4 * 2 + 6 * 2 * 2);
}
