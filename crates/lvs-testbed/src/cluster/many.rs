//! Three active directors behind a router with BIRD, under load, during failures and maintenance.
//!
//! The directors use the files of `examples/many-directors`.

use std::fmt::Write as _;
use std::fs;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use serde_json::Value;

use super::{ClusterOptions, Counters, LIMIT, Outcome, RATE, put};
use crate::netns::{Host, Proc, wait_until};
use crate::{Forward, LoadReport, Site, SiteOptions, Vip, programs};

const LVSD: &str = include_str!("../../../../examples/many-directors/lvsd.toml");
const BIRD: &str = include_str!("../../../../examples/many-directors/bird.conf");
const FRR: &str = include_str!("../../../../examples/many-directors/frr.conf");
const EXABGP: &str = include_str!("../../../../examples/many-directors/exabgp.conf");
const ANNOUNCE: &str = include_str!("../../../../examples/many-directors/announce-lvs");
const ROUTER: &str = include_str!("../../../../examples/many-directors/router.conf");

const DIRECTORS: usize = 3;

scenarios! {
    Calm "calm" "no event, for comparison",
    Members "members" "a server is drained; one director enters maintenance and leaves it",
    Alone "members-alone" "as members, without [sync.peers]: only the scheduler keeps clients at their servers",
    Dataplane "dataplane" "kill -9 of the dataplane of one director; lvsd starts it again",
    Partition "partition" "the synchronisation network fails until lvsadm sync reports this; then maintenance of one director",
    Stopped "stopped" "SIGSTOP of the dataplane of one director for three seconds",
    Loss "loss" "as members, while 5 of 100 packets of the synchronisation network are lost",
    Etcd "etcd" "etcd, which names a server, is lost to one director, then to all; then maintenance of one director",
    Daemons "daemons" "one director has BIRD, one FRR and one ExaBGP: maintenance of the latter two, kill -9 of their dataplanes",
    Routed "routed" "one director has BIRD, one FRR and one ExaBGP, all have backend = \"tun\": maintenance of the latter two (tun)",
    Bird "bird" "kill -9 of BIRD on one director, then a new start of BIRD",
    Power "power" "kill -9 of everything on one director, whose links go down",
}

/// Routing daemon of a director.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Routing {
    Bird,
    Frr,
    ExaBgp,
}

impl Scenario {
    const fn routing(self, number: usize) -> Routing {
        match (self, number) {
            (Self::Daemons | Self::Routed, 2) => Routing::Frr,
            (Self::Daemons | Self::Routed, 3) => Routing::ExaBgp,
            _ => Routing::Bird,
        }
    }

    /// Whether the forwarding method supports the scenario: the TUN backend does not support direct
    /// routing.
    pub(super) fn suits(self, forward: Forward) -> bool {
        self != Self::Routed || forward == Forward::Tun
    }
}

#[derive(Debug)]
struct Director {
    host: Host,
    /// The last byte of the director's address `192.0.2.N`.
    number: usize,
    routing: Routing,
    programs: Vec<Proc>,
}

/// Three directors, each with a routing daemon, behind a router with BIRD.
#[derive(Debug)]
pub struct Lab {
    site: Site,
    directors: Vec<Director>,
    bird: Option<Proc>,
    etcd: Option<Proc>,
    monitor: Option<Proc>,
    options: ClusterOptions,
    reported: Vec<String>,
    /// Number of downloads so far. Each used one local port.
    ports: u16,
}

/// Runs a scenario.
///
/// # Errors
/// If the laboratory cannot be set up, or a director does not behave as required.
pub fn play(scenario: Scenario, options: &ClusterOptions) -> Result<Outcome> {
    Lab::new(scenario, options, RATE)?.play(scenario)
}

/// Runs scenarios one after the other in one laboratory, which is set up for the first of them.
/// Each download takes ten seconds.
///
/// # Errors
/// `scenarios` is empty, the laboratory cannot be set up, or a director does not behave as
/// required.
pub fn play_in_turn(scenarios: &[Scenario], options: &ClusterOptions) -> Result<Vec<Outcome>> {
    let first = scenarios
        .first()
        .context("the list of scenarios is empty")?;
    let mut lab = Lab::new(*first, options, 100_000)?;
    let all = scenarios.iter();
    all.map(|scenario| lab.play(*scenario)).collect()
}

impl Lab {
    fn play(&mut self, scenario: Scenario) -> Result<Outcome> {
        let downloads = self.options.downloads;
        let load = self.options.load(&self.site, 20_000 + self.ports);
        self.ports += u16::try_from(downloads)
            .context("too many downloads: each needs its own local port")?;
        let client = self.site.client.clone();
        let before = Counters::read(&self.site)?;
        let live = self.options.live;
        let (report, withdrawn): (Result<LoadReport>, _) = std::thread::scope(|scope| {
            let running = scope.spawn(|| match live {
                true => super::shown(&client, &load),
                false => client.load(&load),
            });
            let changes = self.change(scenario, downloads);
            let report = running
                .join()
                .unwrap_or_else(|_| bail!("the thread of the load client panicked"));
            (report, changes)
        });
        let reported = self.logs();
        let withdrawn_ms = withdrawn.with_context(|| format!("{report:?}\n{reported}"))?;
        Ok(Outcome {
            scenario: scenario.name().to_owned(),
            directors: DIRECTORS,
            family: self.options.family().to_owned(),
            downloads,
            lost: super::dropped(&self.site, self.hosts().into_iter()),
            withdrawn_ms,
            reported: std::mem::take(&mut self.reported),
            ..before.outcome(&self.site, report.with_context(|| reported)?)?
        })
    }

    fn hosts(&self) -> Vec<&Host> {
        self.directors
            .iter()
            .map(|director| &director.host)
            .collect()
    }

    fn show_progress(&self, words: &str) {
        if self.options.live {
            eprintln!("\n--- {words}");
        }
    }

    /// Starts all programs, and waits until the router uses all directors. Servers send `rate`
    /// bytes a second for each download.
    fn new(scenario: Scenario, cluster: &ClusterOptions, rate: u64) -> Result<Self> {
        let forward = cluster.method()?;
        ensure!(
            matches!(forward, Forward::Dr | Forward::Tun),
            "use --forward dr or tun: with {}, the servers' answers would have to return through the director that has \
             the connection, but all directors are active",
            forward.word()
        );
        let mut options = SiteOptions::new(&format!("ecmp-{}", scenario.name()), forward);
        options.others = DIRECTORS - 1;
        options.servers = 3;
        options.vip = Vip::Announced;
        options.paced = Some(rate);
        let site = Site::new(options)?;
        let hosts = [site.director.clone()].into_iter();
        let hosts = hosts.chain(site.others.iter().cloned());
        let directors = (1..).zip(hosts).map(|(number, host)| Director {
            host,
            number,
            routing: scenario.routing(number),
            programs: Vec::new(),
        });
        let mut lab = Self {
            directors: directors.collect(),
            site,
            bird: None,
            etcd: None,
            monitor: None,
            options: cluster.clone(),
            reported: Vec::new(),
            ports: 0,
        };
        let router = lab.router()?.clone();
        super::own_files(&router)?;
        for family in ["ipv4", "ipv6"] {
            router.sysctl(&format!("{family}/fib_multipath_hash_policy"), "1")?;
        }
        put(&router, "/etc/bird/bird.conf", ROUTER)?;
        lab.bird = Some(router.spawn("bird", &["-f"])?);
        let mut etcd = None;
        if scenario == Scenario::Etcd {
            let (member, url) = super::start_etcd(&lab.site)?;
            lab.etcd = Some(member);
            etcd = Some(url);
        }
        for director in &mut lab.directors {
            director.configure(forward, scenario, etcd.as_deref())?;
            director.start()?;
        }
        lab.wait_used(&[1, 2, 3])?;
        let words = ["TZ=UTC", "ip", "-o", "-ts", "monitor", "route"];
        lab.monitor = Some(router.spawn("env", &words)?);
        Ok(lab)
    }

    /// The virtual address of the downloads.
    fn vip(&self) -> String {
        match self.options.ipv6 {
            true => self.site.vip6.to_string(),
            false => self.site.vip.to_string(),
        }
    }

    fn router(&self) -> Result<&Host> {
        self.site.router.as_ref().context("the site has no router")
    }

    /// Waits until the router uses exactly these directors.
    fn wait_used(&self, numbers: &[usize]) -> Result<()> {
        let (vip, router) = (self.vip(), self.router()?);
        let family = if self.options.ipv6 { "-6" } else { "-4" };
        let used = || {
            let routes = router.run("ip", &[family, "route", "show", &vip]);
            routes.is_ok_and(|routes| {
                (1..=DIRECTORS).all(|n| uses(&routes, n) == numbers.contains(&n))
            })
        };
        wait_until("the router to use the active directors", LIMIT, used).with_context(|| {
            let routes = router.run("ip", &[family, "route"]);
            format!(
                "the router does not use exactly the directors {numbers:?}: {routes:?}\n{}",
                self.logs()
            )
        })
    }

    /// Executes the scenario. Returns the times in milliseconds until the router stopped using a
    /// director.
    fn change(&mut self, scenario: Scenario, downloads: u64) -> Result<Vec<u64>> {
        match scenario {
            Scenario::Alone => std::thread::sleep(Duration::from_secs(2)),
            _ => self.wait_replicated(downloads)?,
        }
        Ok(match scenario {
            Scenario::Calm => Vec::new(),
            Scenario::Members | Scenario::Alone => {
                self.drain()?;
                vec![self.there_and_back(3)?]
            }
            Scenario::Routed => vec![self.there_and_back(2)?, self.there_and_back(3)?],
            Scenario::Daemons => {
                let mut taken = Vec::new();
                for number in [2, 3] {
                    taken.push(self.there_and_back(number)?);
                    taken.push(self.kill_dataplane(number)?);
                    self.wait_used(&[1, 2, 3])?;
                    self.wait_in_step()?;
                }
                taken
            }
            Scenario::Bird => {
                let taken = self.timed(3, |director| {
                    director
                        .programs
                        .pop()
                        .context("BIRD was not started")?
                        .kill();
                    Ok(())
                })?;
                self.directors[2].start_routing()?;
                self.wait_used(&[1, 2, 3])?;
                vec![taken]
            }
            Scenario::Power => {
                let dataplane = super::dataplane_of(&self.directors[2].host)?;
                let taken = self.timed(3, |director| {
                    director
                        .host
                        .sh("ip link set eth0 down; ip link set eth1 down")?;
                    for mut program in director.programs.drain(..) {
                        program.kill();
                    }
                    kill(dataplane, Signal::SIGKILL).context("cannot kill the dataplane")
                })?;
                vec![taken]
            }
            Scenario::Dataplane => {
                let taken = self.kill_dataplane(3)?;
                self.wait_used(&[1, 2, 3])?;
                vec![taken]
            }
            Scenario::Partition => {
                self.show_progress("the synchronisation network fails at director 3");
                self.directors[2].host.sh("ip link set eth1 down")?;
                self.wait_reported(1, "10.9.0.3:8848", "silent for")?;
                self.wait_reported(3, "10.9.0.1:8848", "silent")?;
                self.directors[2].host.sh("ip link set eth1 up")?;
                self.wait_in_step()?;
                vec![self.there_and_back(3)?]
            }
            Scenario::Stopped => {
                self.show_progress("director 3: SIGSTOP of the dataplane");
                let dataplane = super::dataplane_of(&self.directors[2].host)?;
                let begun = Instant::now();
                kill(dataplane, Signal::SIGSTOP)?;
                let reported = self.wait_stopped_reported();
                std::thread::sleep(Duration::from_secs(3).saturating_sub(begun.elapsed()));
                kill(dataplane, Signal::SIGCONT)?;
                self.reported.push(reported?);
                self.wait_in_step()?;
                Vec::new()
            }
            Scenario::Etcd => {
                let servers = self.site.servers.len();
                super::wait_etcd(&self.hosts(), true, servers)?;
                super::lose_etcd(&self.directors[2].host)?;
                super::wait_etcd(&self.hosts()[2..], false, servers)?;
                super::wait_etcd(&self.hosts()[..2], true, servers)?;
                for host in &self.hosts()[..2] {
                    super::lose_etcd(host)?;
                }
                super::wait_etcd(&self.hosts(), false, servers)?;
                let taken = self.there_and_back(3)?;
                for host in self.hosts() {
                    super::end_etcd_loss(host)?;
                }
                vec![taken]
            }
            Scenario::Loss => {
                for host in self.hosts() {
                    super::lose_sync(host, Some(5))?;
                }
                self.drain()?;
                let taken = self.there_and_back(3)?;
                let lost = || {
                    self.hosts()
                        .into_iter()
                        .map(super::lost_of_sync)
                        .sum::<u64>()
                };
                wait_until("packets to be lost", LIMIT, || lost() > 0)?;
                for host in self.hosts() {
                    super::end_loss(host)?;
                }
                // TCP retransmits lost updates.
                self.wait_in_step()?;
                for director in &self.directors {
                    let reported = self.site.lvsadm_on(&director.host, "sync")?;
                    self.reported.push(super::peer_lines(&reported, "in step"));
                }
                vec![taken]
            }
        })
    }

    /// Number of established connections to `server` in a director's table; to all servers if
    /// `server` is empty. `None` if `lvsadm` fails.
    fn known(&self, director: &Director, server: &str) -> Option<u64> {
        let reported = self.site.lvsadm_on(&director.host, "-L -c -n").ok()?;
        // The table still contains closed connections of the previous scenario.
        let open = reported
            .lines()
            .filter(|line| line.contains("ESTABLISHED") && line.contains(server));
        u64::try_from(open.count()).ok()
    }

    /// Waits until `right` accepts the numbers of connections to `server` in the tables of all
    /// directors, and returns these numbers.
    fn wait_known(
        &self,
        what: &str,
        server: &str,
        right: impl Fn(&[Option<u64>]) -> bool,
    ) -> Result<Vec<Option<u64>>> {
        let mut known = Vec::new();
        wait_until(what, LIMIT, || {
            let all = self.directors.iter();
            known = all.map(|director| self.known(director, server)).collect();
            right(&known)
        })
        .with_context(|| format!("the directors have {known:?} connections\n{}", self.logs()))?;
        Ok(known)
    }

    /// Waits until every director has all connections.
    fn wait_replicated(&self, downloads: u64) -> Result<()> {
        let all = |known: &[Option<u64>]| known.iter().all(|known| *known == Some(downloads));
        self.wait_known("all directors to have all connections", "", all)
            .map(drop)
    }

    fn wait_in_step(&self) -> Result<()> {
        super::wait_in_step(&self.site, &self.hosts()).with_context(|| self.logs())
    }

    /// Waits until `lvsadm sync` on a director prints `words` about a peer, and records the output.
    fn wait_reported(&mut self, number: usize, peer: &str, words: &str) -> Result<()> {
        let host = &self.directors[number - 1].host;
        self.reported
            .push(super::wait_reported(&self.site, host, peer, words)?);
        Ok(())
    }

    /// Waits until `lvsd` reports that the third director's dataplane does not answer. Returns the
    /// report.
    fn wait_stopped_reported(&self) -> Result<String> {
        let mut reported = String::new();
        wait_until(
            "lvsd to report that the dataplane does not answer",
            LIMIT,
            || {
                reported = self.directors[2]
                    .lvsd(&["maintenance", "status"])
                    .unwrap_or_else(|error| format!("{error:#}"));
                reported.contains("NOT READY")
            },
        )
        .with_context(|| reported.clone())?;
        Ok(reported)
    }

    /// The server to drain, and its service.
    fn drained(&self) -> (String, String) {
        match self.options.ipv6 {
            true => (
                format!("[{}]:80", self.site.real_address6(2)),
                format!("[{}]:80", self.vip()),
            ),
            false => (
                format!("{}:80", self.site.real_address(2)),
                format!("{}:80", self.vip()),
            ),
        }
    }

    /// Sets the weight of a server to 0 on every director. For its downloads, the schedulers would
    /// now choose another server, so that only replicated connections continue.
    fn drain(&self) -> Result<()> {
        let (server, service) = self.drained();
        for director in &self.directors {
            // lvsd treats the manual weight change as a drain.
            let words = format!(
                "-e -t {service} -r {server} {} -w 0",
                self.site.options.forward.flag()
            );
            self.site.lvsadm_on(&director.host, &words)?;
        }
        Ok(())
    }

    /// Puts a director into maintenance, and ends the maintenance. Returns the milliseconds until
    /// the router stopped using the director.
    fn there_and_back(&mut self, number: usize) -> Result<u64> {
        self.show_progress(&format!("director {number}: maintenance on"));
        let taken = self.timed(number, |director| {
            director.lvsd(&["maintenance", "on"]).map(drop)
        })?;
        let director = &self.directors[number - 1];
        director.wait_standing("withdrawn")?;
        std::thread::sleep(Duration::from_secs(1));
        director.lvsd(&["maintenance", "off"])?;
        self.show_progress(&format!("director {number}: maintenance off"));
        self.wait_used(&[1, 2, 3])?;
        Ok(taken)
    }

    fn kill_dataplane(&mut self, number: usize) -> Result<u64> {
        let dataplane = super::dataplane_of(&self.directors[number - 1].host)?;
        self.show_progress(&format!("director {number}: kill -9 of the dataplane"));
        self.timed(number, |_| {
            kill(dataplane, Signal::SIGKILL).context("cannot kill the dataplane")
        })
    }

    /// Runs an action. Returns the milliseconds until the router no longer uses the director.
    fn timed(
        &mut self,
        number: usize,
        deed: impl FnOnce(&mut Director) -> Result<()>,
    ) -> Result<u64> {
        let begun = time_of_day()?;
        deed(&mut self.directors[number - 1])?;
        let vip = self.vip();
        let mut found = None;
        let monitor = self
            .monitor
            .as_ref()
            .context("no route monitor was started")?;
        wait_until("the router to use no route to the director", LIMIT, || {
            let log = monitor.log();
            let lines = log.lines().filter(|line| line.contains(&vip));
            let mut later = lines.filter_map(|line| Some((stamp(line)?, line)));
            found = later
                .find(|(at, line)| *at >= begun && !uses(line, number))
                .map(|(at, _)| at);
            found.is_some()
        })
        .with_context(|| format!("{}\n{}", monitor.log(), self.logs()))?;
        Ok(found.unwrap_or(begun).saturating_sub(begun).div_ceil(1000))
    }

    fn logs(&self) -> String {
        self.directors.iter().map(Director::logs).collect()
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for director in &mut self.directors {
            for program in &mut director.programs {
                let _ = program.stop(Signal::SIGINT);
            }
        }
    }
}

impl Director {
    /// Writes the example configurations of lvsd and of the routing daemon, changed for this
    /// director and for the scenario, and the key of `[sync]`.
    fn configure(&self, forward: Forward, scenario: Scenario, etcd: Option<&str>) -> Result<()> {
        let number = self.number;
        super::own_files(&self.host)?;
        self.configure_routing()?;
        let peers = (1..=DIRECTORS).filter(|peer| *peer != number);
        let peers: Vec<String> = peers.map(|peer| format!("\"10.9.0.{peer}\"")).collect();
        let mut lvsd = LVSD
            .replace(
                "[\"10.9.0.2\", \"10.9.0.3\"]",
                &format!("[{}]", peers.join(", ")),
            )
            .replace("10.9.0.1:", &format!("10.9.0.{number}:"));
        if forward == Forward::Tun {
            // The servers here do not accept IPv6 from a tunnel.
            let begin = lvsd
                .find("[[service]]\nname      = \"web6\"")
                .context("the example configuration has no service web6")?;
            let end = lvsd
                .find("[sysctl]")
                .context("the example configuration has no table [sysctl]")?;
            lvsd.replace_range(begin..end, "");
            lvsd = lvsd.replace("\"dr\"", "\"tun\"");
            for server in 11..=13 {
                lvsd = lvsd.replace(
                    &format!("\"192.0.2.{server}:"),
                    &format!("\"10.0.0.{server}:"),
                );
            }
        }
        if let Some(etcd) = etcd {
            // etcd contains the last server of the first service; the file does not.
            let mut servers = lvsd.match_indices("[[service.server]]\n");
            let (begin, _) = servers
                .nth(2)
                .context("the example configuration has no third server")?;
            let length = lvsd[begin..]
                .find("\n\n")
                .context("the example configuration has no empty line after the third server")?
                + 2;
            lvsd.replace_range(begin..begin + length, "");
            lvsd = lvsd
                .replace("\n[announce]", &format!("\n[cluster]\netcd = \"{etcd}\"\ndirector = \"director-{number}\"\nlease = \"3s\"\ntimeout = \"1s\"\n\n[announce]"))
                .replace("name      = \"web\"\n", "name      = \"web\"\ndiscover   = { etcd = \"web\" }\n");
        }
        if scenario == Scenario::Alone {
            // With `mh-port`, connections of one client use all servers, also the drained one.
            lvsd = lvsd.replace(
                "scheduler = \"mh\"",
                "scheduler_flags = [\"mh-port\"]\nscheduler = \"mh\"",
            );
        }
        if scenario == Scenario::Routed {
            lvsd = lvsd.replace("[dataplane]\n", "[dataplane]\nbackend   = \"tun\"\n");
            self.host.sysctl("ipv4/ip_forward", "1")?;
        }
        if scenario == Scenario::Alone {
            let begin = lvsd
                .find("[sync.peers]")
                .context("the example configuration has no table [sync.peers]")?;
            let end = lvsd
                .find("[announce]")
                .context("the example configuration has no table [announce]")?;
            lvsd.replace_range(begin..end, "");
        }
        put(&self.host, "/etc/lvsd/lvsd.toml", &lvsd)?;
        super::put_key(&self.host)
    }

    /// Writes the example configuration of the routing daemon with this director's address.
    fn configure_routing(&self) -> Result<()> {
        let number = self.number;
        let own = |text: &str| {
            text.replace("192.0.2.1;", &format!("192.0.2.{number};"))
                .replace("192.0.2.1 as", &format!("192.0.2.{number} as"))
                .replace(
                    "router-id 192.0.2.1\n",
                    &format!("router-id 192.0.2.{number}\n"),
                )
        };
        match self.routing {
            Routing::Bird => put(&self.host, "/etc/bird/bird.conf", &own(BIRD)),
            Routing::Frr => {
                put(&self.host, "/etc/frr/frr.conf", &own(FRR))?;
                self.host
                    .sh("chown -R frr:frr /etc/frr; install -d -o frr -g frrvty -m 755 /run/frr")
                    .map(drop)
            }
            Routing::ExaBgp => {
                put(&self.host, "/etc/exabgp/exabgp.conf", &own(EXABGP))?;
                // The example has the script in another directory.
                let script = "/etc/exabgp/announce-lvs";
                put(&self.host, script, ANNOUNCE)?;
                self.host.sh(&format!(
                    "chmod 755 {script}; sed -i s,/usr/local/bin/announce-lvs,{script}, /etc/exabgp/exabgp.conf"
                ))
                .map(drop)
            }
        }
    }

    fn start_routing(&mut self) -> Result<()> {
        match self.routing {
            Routing::Bird => self.programs.push(self.host.spawn("bird", &["-f"])?),
            Routing::Frr => {
                for daemon in ["zebra", "bgpd"] {
                    let program = format!("/usr/lib/frr/{daemon}");
                    self.programs.push(
                        self.host
                            .spawn(&program, &["-A", "127.0.0.1", "--log", "stdout"])?,
                    );
                    let socket = format!("[ -S /run/frr/{daemon}.vty ]");
                    let what = format!("{daemon} to open its control socket");
                    wait_until(&what, LIMIT, || self.host.sh(&socket).is_ok())
                        .with_context(|| self.logs())?;
                }
                self.host.sh("vtysh -b")?;
            }
            Routing::ExaBgp => self.programs.push(self.host.spawn(
                "env",
                &[
                    "exabgp.api.cli=false",
                    "exabgp.daemon.drop=false",
                    "exabgp.log.all=true",
                    "exabgp",
                    "/etc/exabgp/exabgp.conf",
                ],
            )?),
        }
        Ok(())
    }

    fn logs(&self) -> String {
        let mut text = String::new();
        for program in &self.programs {
            let _ = writeln!(text, "--- director {}:\n{}", self.number, program.log());
        }
        text
    }

    fn start(&mut self) -> Result<()> {
        let state = self.host.dir().join(format!("state{}", self.number));
        fs::create_dir_all(&state)?;
        let state = state.display().to_string();
        let lvsd = programs::find("lvsd")?;
        self.programs = vec![self.host.spawn(lvsd, &["--state", &state])?];
        self.start_routing()
    }

    fn lvsd(&self, words: &[&str]) -> Result<String> {
        self.host.run(programs::find("lvsd")?, words)
    }

    fn wait_standing(&self, standing: &str) -> Result<()> {
        let stands = || {
            let reported = self.lvsd(&["maintenance", "status", "--json"]).ok()?;
            let reported: Value = serde_json::from_str(&reported).ok()?;
            let mut all = reported["announce"]["addresses"].as_array()?.iter();
            all.all(|vip| vip["standing"] == standing).then_some(())
        };
        let what = format!("all virtual addresses to be {standing}");
        wait_until(&what, LIMIT, || stands().is_some())
    }
}

/// Whether the director of this number is a next hop in `route`, a line of `ip route` or of `ip
/// monitor`. False for a deleted route.
fn uses(route: &str, number: usize) -> bool {
    let via = [
        format!("via 192.0.2.{number} "),
        format!("via fd00:192::{number} "),
    ];
    !route.contains("Deleted") && via.iter().any(|via| route.contains(via))
}

/// Microseconds since midnight (UTC).
fn time_of_day() -> Result<u64> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    Ok(u64::try_from(now.as_micros())? % 86_400_000_000)
}

/// Parses the time of a line of `ip -ts` such as `[2026-01-02T03:04:05.678901] ...`. Returns the
/// microseconds since midnight; `None` for other lines.
fn stamp(line: &str) -> Option<u64> {
    let time = line.strip_prefix('[')?.split_once('T')?.1;
    let time = time.split_once(']')?.0;
    let (time, micros) = time.split_once('.')?;
    let mut parts = time.split(':').map(str::parse::<u64>);
    let mut next = || parts.next()?.ok();
    let (hours, minutes, seconds) = (next()?, next()?, next()?);
    Some((hours * 3600 + minutes * 60 + seconds) * 1_000_000 + micros.parse::<u64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn route_change_times_and_next_hops_are_parsed() {
        let line = "[2026-11-23T01:02:03.000004] 203.0.113.10 proto bird metric 32 \\\tnexthop via 192.0.2.1 dev eth1 weight 1";
        assert_eq!(stamp(line), Some(3_723_000_004));
        assert!(uses(line, 1) && !uses(line, 2));
        assert!(!uses("[x] Deleted 203.0.113.10 via 192.0.2.1 dev eth1", 1));
        assert!(uses(
            "fd00:203::10 proto bird \\ nexthop via fd00:192::2 dev eth1 weight 1",
            2
        ));
        assert_eq!(stamp("203.0.113.10"), None);
    }
}
