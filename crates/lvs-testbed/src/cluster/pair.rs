//! Two directors with keepalived, under load, during failures and maintenance.
//!
//! With NAT, they use `examples/two-directors.toml`. For comparison, HAProxy can replace the
//! directors.

mod files;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::{Balancer, ClusterOptions, Counters, LIMIT, Outcome, RATE};
use crate::netns::{Host, Proc, wait_until};
use crate::{Forward, LoadReport, Site, SiteOptions, Vip, programs};

const LVSD: &str = include_str!("../../../../examples/two-directors.toml");
const KEEPALIVED: &str = "/etc/keepalived/keepalived.conf";

scenarios! {
    Calm "calm" "no event, for comparison",
    Kill "kill" "kill -9 of everything on the active director, and its links go down",
    Returns "returns" "as kill; then the director returns with an empty table, and takes over again",
    Planned "planned" "lvsd maintenance on the active director, and then on the other one",
    Quorum "quorum" "the active director's checks find all servers down, the other one's do not",
    Partition "partition" "synchronisation fails until lvsadm sync reports this; then as planned",
    Stopped "stopped" "SIGSTOP of the active director's dataplane for three seconds",
    Loss "loss" "as planned, while 5 of 100 packets of the synchronisation are lost",
    Files "files" "the files between lvsd and keepalived are removed; then as planned",
    Etcd "etcd" "etcd, which names a server, is lost to the active director, then to both; then as planned",
}

impl Scenario {
    /// Whether the scenario can run with this balancer.
    pub(super) fn suits(self, director: Balancer) -> bool {
        let any = matches!(
            self,
            Self::Calm | Self::Kill | Self::Returns | Self::Planned
        );
        any || director == Balancer::Lvs
    }
}

#[derive(Debug)]
struct Director {
    host: Host,
    files: PathBuf,
    balancer: Option<Proc>,
    keepalived: Option<Proc>,
}

/// The hosts and the two directors of a scenario.
#[derive(Debug)]
struct Lab {
    site: Site,
    directors: [Director; 2],
    kind: Balancer,
    live: bool,
    ipv6: bool,
    etcd: Option<(Proc, String)>,
    reported: Vec<String>,
}

/// Runs a scenario.
///
/// # Errors
/// The scenario or an option is not possible with HAProxy, the laboratory cannot be set up, or a
/// director does not behave as required.
pub fn play(scenario: Scenario, options: &ClusterOptions) -> Result<Outcome> {
    let forward = options.method()?;
    ensure!(
        options.director == Balancer::Lvs || (forward == Forward::Nat && !options.ipv6),
        "HAProxy has no forwarding methods, and is tested with IPv4 only: omit --forward and --ipv6"
    );
    ensure!(
        scenario.suits(options.director),
        "the scenario {} requires lvsd: omit --director",
        scenario.name()
    );
    let mut lab = Lab::new(scenario, forward, options)?;
    lab.start(0)?;
    lab.wait_active(0)?;
    lab.start(1)?;
    lab.wait_track(1, 0)?;
    let mut load = options.load(&lab.site, 20_000);
    if options.director == Balancer::HaProxy {
        // When a proxy exits, bytes in its buffers are lost, and the client waits until this time
        // limit.
        load.timeout_ms = 15_000;
    }
    let client = lab.site.client.clone();
    let before = Counters::read(&lab.site)?;
    // No server is faulty in a failover. Only in `quorum`, the checks of one director fail.
    let watched = (scenario != Scenario::Quorum && options.director == Balancer::Lvs)
        .then(|| lab.hosts().map(Host::clone));
    let ended = AtomicBool::new(false);
    let (report, outages, blamed): (Result<LoadReport>, _, _) = std::thread::scope(|scope| {
        let running = scope.spawn(|| match options.live {
            true => super::shown(&client, &load),
            false => client.load(&load),
        });
        let watch = scope.spawn(|| {
            let mut blamed = BTreeSet::new();
            while !ended.load(Relaxed) {
                // A director that is dead, or starts, blames no server.
                let hosts = watched.iter().flatten();
                blamed.extend(hosts.flat_map(|host| super::blamed(host).unwrap_or_default()));
                std::thread::sleep(Duration::from_millis(300));
            }
            blamed
        });
        let changes = lab.change(scenario, options.downloads);
        let report = running
            .join()
            .unwrap_or_else(|_| bail!("the thread of the load client panicked"));
        ended.store(true, Relaxed);
        let blamed = watch.join().unwrap_or_default();
        (report, changes, blamed)
    });
    let reported = lab.logs();
    let outages_ms = outages.with_context(|| format!("{report:?}\n{reported}"))?;
    let outcome = before.outcome(&lab.site, report.with_context(|| reported)?)?;
    let proxy = options.director == Balancer::HaProxy;
    Ok(Outcome {
        scenario: scenario.name().to_owned(),
        directors: 2,
        director: options.director.word().to_owned(),
        forward: if proxy {
            "proxy".to_owned()
        } else {
            outcome.forward.clone()
        },
        family: options.family().to_owned(),
        downloads: options.downloads,
        lost: match options.director {
            Balancer::Lvs => super::dropped(&lab.site, lab.hosts().into_iter()),
            Balancer::HaProxy => Default::default(),
        },
        outages_ms,
        blamed,
        reported: std::mem::take(&mut lab.reported),
        ..outcome
    })
}

impl Lab {
    fn new(scenario: Scenario, forward: Forward, cluster: &ClusterOptions) -> Result<Self> {
        let mut options = SiteOptions::new(&format!("cluster-{}", scenario.name()), forward);
        options.standby = true;
        if forward == Forward::Nat {
            // The example has two servers.
            options.servers = 2;
        }
        options.vip = Vip::Dataplane;
        options.paced = Some(RATE);
        let site = Site::new(options)?;
        let hosts = [site.director.clone(), site.standby()?.clone()];
        for host in &hosts {
            super::own_files(host)?;
            super::put_key(host)?;
        }
        if forward == Forward::Nat && cluster.director == Balancer::Lvs {
            // Servers send replies to the gateway address, which keepalived moves.
            for server in &site.servers {
                server.sh(
                    "ip route replace default via 10.0.0.254; ip route replace default via fd00:10::254",
                )?;
            }
        }
        let mut made = Vec::new();
        for (index, host) in hosts.into_iter().enumerate() {
            let files = site.testbed.dir().join(format!("director{index}"));
            fs::create_dir_all(files.join("state"))?;
            made.push(Director {
                host,
                files,
                balancer: None,
                keepalived: None,
            });
        }
        let directors = made.try_into();
        let directors =
            directors.map_err(|_| anyhow::anyhow!("the number of directors is not two"))?;
        let etcd = match scenario {
            Scenario::Etcd => Some(super::start_etcd(&site)?),
            _ => None,
        };
        let lab = Self {
            site,
            directors,
            kind: cluster.director,
            live: cluster.live,
            ipv6: cluster.ipv6,
            etcd,
            reported: Vec::new(),
        };
        for index in 0..2 {
            lab.configure(index)?;
        }
        Ok(lab)
    }

    fn configure(&self, index: usize) -> Result<()> {
        if self.kind == Balancer::HaProxy {
            return self.configure_haproxy(index);
        }
        let director = &self.directors[index];
        let forward = self.site.options.forward;
        let peer = ["192.0.2.2", "192.0.2.1"][index];
        let mut text = match forward {
            Forward::Nat => self.two_arms(peer),
            _ => self.one_arm(peer)?,
        };
        if self.has_ipv6() {
            text.push_str(&self.by_ipv6()?);
        }
        if let Some((_, url)) = &self.etcd {
            // etcd contains the last server of the first service.
            let address = self.site.real_address(self.site.servers.len() - 1);
            let last = format!("\n[[service.server]]\naddress = \"{address}:80\"\n");
            let begin = text
                .find(&last)
                .context("the configuration does not contain the last server")?;
            text.replace_range(begin..begin + last.len(), "");
            text = text
                .replacen(
                    "\n[vrrp]",
                    &format!(
                        "\n[cluster]\netcd = \"{url}\"\ndirector = \"director-{}\"\nlease = \"3s\"\ntimeout = \"1s\"\n\n[vrrp]",
                        index + 1
                    ),
                    1,
                )
                .replacen("\nforward ", "\ndiscover = { etcd = \"web\" }\nforward ", 1);
        }
        super::put(&director.host, "/etc/lvsd/lvsd.toml", &text)?;
        self.lvsd(index, &["check"])?;
        let made = self.lvsd(index, &["keepalived-config"])?;
        super::put(&director.host, KEEPALIVED, &made)
    }

    /// Whether the configuration has IPv6 addresses: with HAProxy never, with direct routing
    /// always, with other methods if the downloads use IPv6.
    fn has_ipv6(&self) -> bool {
        let forward = self.site.options.forward;
        self.kind == Balancer::Lvs && (forward == Forward::Dr || self.ipv6)
    }

    /// The example's configuration file for two networks, with the address of `peer`. If the
    /// configuration has IPv6 addresses, also with the servers' IPv6 gateway.
    fn two_arms(&self, peer: &str) -> String {
        let text = LVSD.replace("\"192.0.2.2\"", &format!("\"{peer}\""));
        if !self.has_ipv6() {
            return text;
        }
        text.replace(
            "\"10.0.0.254/24 dev eth1\"",
            "[\"10.0.0.254/24 dev eth1\", \"fd00:10::254/64 dev eth1\"]",
        )
    }

    /// The configuration file for one network of clients, directors and servers, without an IPv6
    /// service.
    fn one_arm(&self, peer: &str) -> Result<String> {
        let forward = self.site.options.forward;
        let mut text = format!(
            "[dataplane]\ninterface = \"eth0\"\n\n[sync.peers]\naddresses = [\"{peer}\"]\nkey_file = \"/etc/lvs/sync.key\"\n\n\
             [vrrp]\ninterface = \"eth0\"\nrouter_id = 51\npeers = [\"{peer}\"]\n\n\
             [[service]]\nname = \"web\"\naddress = \"{}\"\nscheduler = \"rr\"\nforward = \"{}\"\n\
             check = {{ type = \"tcp\", interval = \"1s\", timeout = \"500ms\" }}\n",
            self.site.service(80),
            forward.word(),
        );
        if forward == Forward::Tun {
            // keepalived adds the VIP to the host.
            text.push_str("vip = \"host\"\n");
        }
        for server in 0..self.site.servers.len() {
            let address = self.site.real_address(server);
            write!(text, "\n[[service.server]]\naddress = \"{address}:80\"\n")?;
        }
        Ok(text)
    }

    /// The part of the configuration file for IPv6: the service and its servers with their IPv6
    /// addresses.
    fn by_ipv6(&self) -> Result<String> {
        let mut text = format!(
            "\n[[service]]\nname = \"web6\"\naddress = \"[{}]:80\"\nscheduler = \"rr\"\nforward = \"{}\"\n",
            self.site.vip6,
            self.site.options.forward.word(),
        );
        for server in 0..self.site.servers.len() {
            let address = self.site.real_address6(server);
            write!(text, "\n[[service.server]]\naddress = \"[{address}]:80\"\n")?;
        }
        Ok(text)
    }

    /// If the configuration has IPv6 addresses, checks that the service answers at its virtual IPv6
    /// address, which moves to the active director together with the IPv4 address.
    fn ask_by_ipv6(&self) -> Result<()> {
        if !self.has_ipv6() {
            return Ok(());
        }
        let url = format!("http://[{}]/id", self.site.vip6);
        let words = ["-sS", "-g", "-f", "-m", "10", &url];
        let reported = self.site.client.run("curl", &words);
        reported.map(drop).with_context(|| self.logs())
    }

    /// Configures HAProxy for the same servers, and keepalived with the same VRRP settings.
    fn configure_haproxy(&self, index: usize) -> Result<()> {
        let director = &self.directors[index];
        let (files, vip) = (director.files.display(), self.site.vip);
        let mut text = format!(
            "global\n    maxconn 4000\ndefaults\n    mode tcp\n    timeout connect 5s\n    timeout client 60s\n    \
             timeout server 60s\nfrontend web\n    bind {vip}:80 transparent\n    default_backend servers\n\
             backend servers\n    balance roundrobin\n"
        );
        for server in 0..self.site.servers.len() {
            let address = self.site.real_address(server);
            writeln!(text, "    server rs{server} {address}:80 check inter 5s")?;
        }
        fs::write(director.files.join("haproxy.cfg"), text)?;
        fs::write(director.files.join("track"), "0\n")?;
        let text = format!(
            "global_defs {{\n    vrrp_version 3\n}}\ntrack_file lvs {{\n    file {files}/track\n    weight 1\n}}\n\
             vrrp_instance lvs {{\n    state BACKUP\n    interface eth0\n    virtual_router_id 51\n    priority 200\n    \
             advert_int 0.30\n    track_file {{\n        lvs\n    }}\n    virtual_ipaddress {{\n        {vip}/32\n    }}\n}}\n"
        );
        super::put(&director.host, KEEPALIVED, &text)
    }

    fn lvsd(&self, index: usize, words: &[&str]) -> Result<String> {
        self.directors[index]
            .host
            .run(programs::find("lvsd")?, words)
    }

    fn start(&mut self, index: usize) -> Result<()> {
        let director = &mut self.directors[index];
        let file = |name: &str| director.files.join(name).display().to_string();
        director.balancer = Some(match self.kind {
            Balancer::Lvs => {
                let lvsd = programs::find("lvsd")?;
                let lvsd = director.host.spawn(lvsd, &["--state", &file("state")])?;
                // keepalived does not use a track file and a FIFO whose directory does not exist.
                let made = "test -p /run/lvs/vrrp.fifo && test -e /run/lvs/vrrp.track";
                let waited = wait_until("lvsd to make the files for keepalived", LIMIT, || {
                    director.host.sh(made).is_ok()
                });
                waited.with_context(|| lvsd.log())?;
                lvsd
            }
            Balancer::HaProxy => {
                let config = file("haproxy.cfg");
                let proxy = director.host.spawn("haproxy", &["-db", "-f", &config])?;
                let listens = director.host.wait_for_port("tcp", 80);
                listens.with_context(|| proxy.log())?;
                proxy
            }
        });
        self.start_keepalived(index)
    }

    fn start_keepalived(&mut self, index: usize) -> Result<()> {
        let director = &mut self.directors[index];
        let file = |name: &str| director.files.join(name).display().to_string();
        let (pid, vrrp) = (file("pid"), file("vrrp.pid"));
        let words = ["-n", "-l", "-D", "-P", "-p", &pid, "-r", &vrrp];
        director.keepalived = Some(director.host.spawn("keepalived", &words)?);
        Ok(())
    }

    fn is_active(&self, index: usize) -> bool {
        match self.kind {
            Balancer::Lvs => self
                .status(index)
                .is_some_and(|status| status["vrrp"]["active"] == true),
            Balancer::HaProxy => {
                let words = ["-o", "addr", "show", "dev", "eth0"];
                let reported = self.directors[index].host.run("ip", &words);
                reported.is_ok_and(|reported| reported.contains(&format!(" {}/", self.site.vip)))
            }
        }
    }

    fn show_progress(&self, words: &str) {
        if self.live {
            eprintln!("\n--- {words}");
        }
    }

    fn status(&self, index: usize) -> Option<Value> {
        let text = self
            .lvsd(index, &["maintenance", "status", "--json"])
            .ok()?;
        serde_json::from_str(&text).ok()
    }

    fn wait_active(&self, index: usize) -> Result<()> {
        wait_until("a director to be active", LIMIT, || self.is_active(index))
            .with_context(|| self.logs())?;
        self.show_progress(&format!("director {} is active", index + 1));
        Ok(())
    }

    fn wait_track(&self, index: usize, value: i64) -> Result<()> {
        if self.kind == Balancer::HaProxy {
            // Advertisements of the other director arrive within this time.
            std::thread::sleep(Duration::from_secs(2));
            return Ok(());
        }
        let done = |status: Value| status["vrrp"]["track"] == value;
        wait_until("the track file to change", LIMIT, || {
            self.status(index).is_some_and(done)
        })
        .with_context(|| self.logs())
    }

    /// Number of connections in a director's table that the director received from its peer.
    fn borrowed(&self, index: usize) -> Option<u64> {
        let reported = self
            .site
            .lvsadm_on(&self.directors[index].host, "--json sync");
        let reported: Value = serde_json::from_str(&reported.ok()?).ok()?;
        reported["peers"][0]["borrowed"].as_u64()
    }

    /// Executes the scenario. For each change, returns the result of [`outage`](Self::outage).
    fn change(&mut self, scenario: Scenario, downloads: u64) -> Result<Vec<u64>> {
        match self.kind {
            Balancer::Lvs => {
                wait_until("the other director to have all connections", LIMIT, || {
                    self.borrowed(1) == Some(downloads)
                })
                .with_context(|| {
                    format!(
                        "the second director has {:?} connections of its peer",
                        self.borrowed(1)
                    )
                })?;
                // A director that has just started connects to its peer a little later.
                super::wait_in_step(&self.site, &self.hosts())?;
            }
            Balancer::HaProxy => {
                wait_until("the client to have all connections open", LIMIT, || {
                    let open = self.site.client.counter("Tcp", "CurrEstab");
                    open.is_ok_and(|open| open == downloads)
                })?;
            }
        }
        Ok(match scenario {
            Scenario::Calm => Vec::new(),
            Scenario::Kill => vec![self.outage(|lab| lab.kill(0), 1)?],
            Scenario::Returns => {
                let first = self.outage(|lab| lab.kill(0), 1)?;
                self.come_back(0)?;
                self.wait_track(0, 0)?;
                ensure!(
                    self.is_active(1),
                    "the restarted director took over from an active one"
                );
                vec![first, self.outage(|lab| lab.maintenance(1, "on"), 0)?]
            }
            Scenario::Planned => self.there_and_back()?,
            Scenario::Quorum => {
                let outage = self.outage(|lab| lab.blind(0), 1)?;
                self.directors[0].host.sh("nft delete table inet blind")?;
                self.wait_track(0, 0)?;
                ensure!(
                    self.is_active(1),
                    "the director whose servers are up again took over from an active one"
                );
                vec![outage]
            }
            Scenario::Partition => {
                self.show_progress("the directors do not receive each other's synchronisation");
                super::lose_sync(&self.directors[1].host, None)?;
                for (index, words) in [(0, "silent for"), (1, "silent")] {
                    let peer = format!("{}:8848", ["192.0.2.2", "192.0.2.1"][index]);
                    let host = &self.directors[index].host;
                    self.reported
                        .push(super::wait_reported(&self.site, host, &peer, words)?);
                }
                super::end_loss(&self.directors[1].host)?;
                super::wait_in_step(&self.site, &self.hosts())?;
                self.there_and_back()?
            }
            Scenario::Stopped => vec![self.outage(|lab| lab.stop_for_3_s(0), 1)?],
            Scenario::Loss => {
                self.show_progress("5 of 100 packets of the synchronisation are lost");
                for host in self.hosts() {
                    super::lose_sync(host, Some(5))?;
                }
                let outages = self.there_and_back()?;
                let lost = || {
                    self.hosts()
                        .into_iter()
                        .map(super::lost_of_sync)
                        .sum::<u64>()
                };
                wait_until("packets to be lost", LIMIT, || lost() > 0)?;
                self.reported.push(format!("{} packets lost", lost()));
                for host in self.hosts() {
                    super::end_loss(host)?;
                }
                super::wait_in_step(&self.site, &self.hosts())?;
                outages
            }
            Scenario::Files => {
                self.lose_files()?;
                let outages = self.there_and_back()?;
                self.restart_keepalived(0)?;
                outages
            }
            Scenario::Etcd => {
                let servers = self.site.servers.len();
                super::wait_etcd(&self.hosts(), true, servers)?;
                for index in 0..2 {
                    self.show_progress(&format!("director {}: etcd is lost", index + 1));
                    super::lose_etcd(&self.directors[index].host)?;
                    super::wait_etcd(&[&self.directors[index].host], false, servers)?;
                    let other = &self.directors[1].host;
                    super::wait_etcd(&[other], index == 0, servers)?;
                }
                let reported = self.lvsd(0, &["status"])?;
                let reported = reported.lines().find(|line| line.starts_with("etcd "));
                self.reported.push(
                    reported
                        .context("lvsd status has no line about etcd")?
                        .to_owned(),
                );
                let outages = self.there_and_back()?;
                for host in self.hosts() {
                    super::end_etcd_loss(host)?;
                }
                outages
            }
        })
    }

    fn hosts(&self) -> [&Host; 2] {
        [&self.directors[0].host, &self.directors[1].host]
    }

    /// Puts the active director into maintenance, ends the maintenance, and puts the other director
    /// into maintenance. For each takeover, returns the result of [`outage`](Self::outage).
    fn there_and_back(&mut self) -> Result<Vec<u64>> {
        let there = self.outage(|lab| lab.maintenance(0, "on"), 1)?;
        self.maintenance(0, "off")?;
        self.wait_track(0, 0)?;
        Ok(vec![there, self.outage(|lab| lab.maintenance(1, "on"), 0)?])
    }

    /// Suspends the dataplane of a director for at least three seconds, and until `lvsd` reports
    /// this.
    fn stop_for_3_s(&mut self, index: usize) -> Result<()> {
        self.show_progress(&format!("director {}: SIGSTOP of the dataplane", index + 1));
        let dataplane = super::dataplane_of(&self.directors[index].host)?;
        let begun = Instant::now();
        kill(dataplane, Signal::SIGSTOP)?;
        let mut reported = String::new();
        let seen = wait_until(
            "lvsd to report that the dataplane does not answer",
            LIMIT,
            || {
                let status = self.lvsd(index, &["maintenance", "status"]);
                reported = status.unwrap_or_else(|error| format!("{error:#}"));
                reported.contains("NOT READY")
            },
        );
        std::thread::sleep(Duration::from_secs(3).saturating_sub(begun.elapsed()));
        kill(dataplane, Signal::SIGCONT)?;
        seen.with_context(|| reported.clone())?;
        self.reported.push(reported);
        Ok(())
    }

    /// Drops IPv4 packets that the director itself sends to servers and to the VIP; forwarded
    /// packets pass.
    fn blind(&mut self, index: usize) -> Result<()> {
        self.show_progress(&format!("director {}: finds its servers down", index + 1));
        let servers = 0..self.site.servers.len();
        let servers = servers.map(|server| self.site.real_address(server).to_string());
        let checked: Vec<String> = servers.chain([self.site.vip.to_string()]).collect();
        self.directors[index].host.sh(&format!(
            "nft -f - <<'END'\ntable inet blind {{\n chain output {{\n  type filter hook output priority 0\n  \
             ip daddr {{ {} }} drop\n }}\n}}\nEND",
            checked.join(", ")
        ))?;
        Ok(())
    }

    fn maintenance(&mut self, index: usize, what: &str) -> Result<()> {
        self.show_progress(&format!("director {}: maintenance {what}", index + 1));
        if self.kind == Balancer::HaProxy {
            let value = if what == "on" { "-100\n" } else { "0\n" };
            return Ok(fs::write(self.directors[index].files.join("track"), value)?);
        }
        self.lvsd(index, &["maintenance", what, "--why", "a test"])
            .map(drop)
    }

    /// Runs an action, and waits until the director `then_active` is active. Returns the longest
    /// time in milliseconds without an echo reply from the VIP.
    fn outage(
        &mut self,
        deed: impl FnOnce(&mut Self) -> Result<()>,
        then_active: usize,
    ) -> Result<u64> {
        let vip = match self.ipv6 {
            true => self.site.vip6.to_string(),
            false => self.site.vip.to_string(),
        };
        let words = ["-D", "-n", "-i", "0.01", "-w", "6", &vip];
        let mut ping = self.site.client.spawn("ping", &words)?;
        std::thread::sleep(Duration::from_millis(300));
        deed(self)?;
        self.wait_active(then_active)?;
        self.ask_by_ipv6()?;
        // The announcements and the takeover take less than this time.
        std::thread::sleep(Duration::from_millis(1500));
        let _ = ping.stop(Signal::SIGINT);
        longest_gap(&ping.log())
    }

    /// Stops a director and all its traffic at once, as a power failure does.
    fn kill(&mut self, index: usize) -> Result<()> {
        self.show_progress(&format!(
            "director {}: kill -9 of everything, links down",
            index + 1
        ));
        let dataplane = match self.kind {
            Balancer::Lvs => Some(super::dataplane_of(&self.directors[index].host)?),
            Balancer::HaProxy => None,
        };
        let director = &mut self.directors[index];
        director
            .host
            .sh("for i in eth0 eth1; do [ ! -e /sys/class/net/$i ] || ip link set $i down; done")?;
        // The VRRP process, a child of keepalived, must be killed first: it would release the
        // addresses and exit when its parent dies.
        let child = fs::read_to_string(director.files.join("vrrp.pid"))?;
        kill(Pid::from_raw(child.trim().parse()?), Signal::SIGKILL)
            .context("cannot kill keepalived")?;
        for program in [&mut director.keepalived, &mut director.balancer] {
            if let Some(mut program) = program.take() {
                program.kill();
            }
        }
        match dataplane {
            Some(dataplane) => {
                kill(dataplane, Signal::SIGKILL).context("cannot kill the dataplane")
            }
            None => Ok(()),
        }
    }

    /// Restores the links and addresses of a killed director, and starts its programs.
    fn come_back(&mut self, index: usize) -> Result<()> {
        self.show_progress(&format!(
            "director {} returns with an empty table",
            index + 1
        ));
        let two_arms = self.site.options.forward == Forward::Nat;
        let (director, vip) = (&self.directors[index], self.site.vip);
        let number = index + 1;
        for name in ["track", "pid", "vrrp.pid"] {
            let _ = fs::remove_file(director.files.join(name));
        }
        director.host.sh("rm -rf /run/lvs")?;
        director.host.sh(&match two_arms {
            // A stopped host does not keep the addresses that keepalived added.
            true => format!(
                "ip addr del 10.0.0.254/24 dev eth1 || true; ip addr del {vip}/32 dev eth0 || true\n\
                 ip link set eth0 up; ip link set eth1 up\n\
                 ip addr add fd00:192::{number}/64 dev eth0 nodad; ip addr add fd00:10::{number}/64 dev eth1 nodad"
            ),
            // The kernel removes IPv6 addresses when a link goes down.
            false => format!(
                "ip link set eth0 up; ip route add default via 192.0.2.254\n\
                 ip addr add fd00:192::{number}/64 dev eth0 nodad; ip -6 route add default via fd00:192::254"
            ),
        })?;
        if self.kind == Balancer::HaProxy {
            fs::write(director.files.join("track"), "0\n")?;
        }
        self.start(index)
    }

    fn logs(&self) -> String {
        let mut text = String::new();
        for (index, director) in self.directors.iter().enumerate() {
            for program in [&director.balancer, &director.keepalived]
                .into_iter()
                .flatten()
            {
                let _ = writeln!(text, "--- director {}:\n{}", index + 1, program.log());
            }
        }
        text
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for director in &mut self.directors {
            if let Some(mut keepalived) = director.keepalived.take() {
                keepalived.kill();
            }
            if let Some(mut balancer) = director.balancer.take() {
                let _ = balancer.stop(Signal::SIGINT);
            }
        }
    }
}

/// Returns the longest time between two echo replies in milliseconds, from the output of `ping -D`.
fn longest_gap(log: &str) -> Result<u64> {
    let times: Vec<f64> = log
        .lines()
        .filter(|line| line.contains("bytes from"))
        .filter_map(|line| line.strip_prefix('[')?.split_once(']')?.0.parse().ok())
        .collect();
    ensure!(times.len() > 10, "ping received too few replies:\n{log}");
    let gaps = times.windows(2).map(|pair| pair[1] - pair[0]);
    let longest = gaps.fold(0.0, f64::max) * 1000.0;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a few seconds"
    )]
    Ok(longest as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_gap_between_ping_replies_is_returned_in_milliseconds() {
        let mut log = String::from("PING 192.0.2.10\n");
        for n in 0..20 {
            let at = 100.0 + f64::from(n) * 0.01 + if n > 9 { 0.5 } else { 0.0 };
            let _ = writeln!(log, "[{at:.6}] 64 bytes from 192.0.2.10: icmp_seq={n}");
        }
        let gap = longest_gap(&log).unwrap();
        assert!((505..=515).contains(&gap), "{gap}");
        assert!(longest_gap("nothing").is_err());
    }
}
