//! `lvs-testbed cluster`: two directors with keepalived, under load, while one of them dies, comes
//! back or is taken out of service. Scenarios with many directors are in [`ecmp`].
//!
//! With NAT, their file is `examples/two-directors.toml`, at the place that it is for. For
//! comparison, HAProxy may stand in the place of the director.

use std::fmt::Write as _;
use std::fs;
use std::io::{IsTerminal, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Serialize;
use serde_json::Value;

use crate::netns::{Host, Proc, wait_until};
use crate::servers::NginxOptions;
use crate::{Forward, LoadOptions, LoadReport, Site, SiteOptions, Vip, ecmp, programs};

const LVSD: &str = include_str!("../../../examples/two-directors.toml");

/// What is done.
#[derive(Clone, Debug, clap::Args)]
pub struct ClusterOptions {
    /// List the scenarios
    #[arg(long)]
    pub list: bool,
    /// Forwarding method: nat, dr or tun
    #[arg(long, default_value = "nat")]
    pub forward: String,
    /// Downloads under way
    #[arg(long, default_value_t = 500)]
    pub downloads: u64,
    /// What stands between clients and servers: lvs, or haproxy for comparison (kill, returns and
    /// planned, as a proxy of TCP)
    #[arg(long, default_value = "lvs")]
    pub director: Balancer,
    /// Show downloads that are under way, done and broken meanwhile
    #[arg(long)]
    pub live: bool,
    /// The scenario; all of them if none is named
    pub scenario: Option<String>,
}

/// What stands between clients and servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Balancer {
    /// `lvsd` and its engine.
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

/// A scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// The active director is gone at once.
    Kill,
    /// The same; it comes back with an empty table, and takes over again.
    Returns,
    /// Maintenance of one director, then of the other.
    Planned,
    /// The active director finds its servers down, and nobody else does.
    Quorum,
}

impl Scenario {
    /// All of them, with what they are.
    pub const ALL: [(&'static str, Self, &'static str); 4] = [
        (
            "kill",
            Self::Kill,
            "kill -9 of everything on the active director, and its links go down",
        ),
        (
            "returns",
            Self::Returns,
            "as kill; then it comes back with an empty table, and takes over again",
        ),
        (
            "planned",
            Self::Planned,
            "lvsd maintenance on the active director, and then on the other one",
        ),
        (
            "quorum",
            Self::Quorum,
            "the active director's checks find all servers down, the other one's do not",
        ),
    ];

    /// By name.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn named(name: &str) -> Result<Self> {
        let found = Self::ALL.iter().find(|(own, ..)| *own == name);
        found
            .map(|(_, scenario, _)| *scenario)
            .with_context(|| format!("no scenario is called {name}; --list shows them"))
    }

    fn name(self) -> &'static str {
        let found = Self::ALL.iter().find(|(_, scenario, _)| *scenario == self);
        found.map_or("?", |(name, ..)| name)
    }
}

/// What came of a scenario: one line of JSON.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Outcome {
    /// Its name.
    pub scenario: String,
    /// What stood between clients and servers: `lvs` or `haproxy`.
    pub director: String,
    /// The forwarding method: `proxy` with HAProxy.
    pub forward: String,
    /// Downloads, byte for byte.
    pub downloads: u64,
    /// Those that failed.
    pub broken: u64,
    /// Segments that servers had to send again.
    pub retransmissions: u64,
    /// The longest time in which a download that came to its end got nothing, in milliseconds.
    pub stall_ms: u64,
    /// For how long the virtual address answered nothing at each change, in milliseconds: from the
    /// last echo reply to the next one, of a hundred a second.
    pub outages_ms: Vec<u64>,
    /// The first things that went wrong.
    pub errors: Vec<String>,
}

/// One of the directors, with its programs.
#[derive(Debug)]
struct Director {
    host: Host,
    files: PathBuf,
    balancer: Option<Proc>,
    keepalived: Option<Proc>,
}

/// Two directors with keepalived.
#[derive(Debug)]
pub struct Lab {
    site: Site,
    directors: [Director; 2],
    kind: Balancer,
    live: bool,
}

const LIMIT: Duration = Duration::from_secs(20);
const KEEPALIVED: &str = "/etc/keepalived/keepalived.conf";

/// The program of the subcommand.
///
/// # Errors
/// A scenario cannot be played.
pub fn main(options: &ClusterOptions) -> Result<()> {
    if options.list {
        for (name, _, about) in Scenario::ALL {
            println!("{name:<14} {about}");
        }
        for (name, _, about) in ecmp::Scenario::ALL {
            println!("{name:<14} {about}");
        }
        return Ok(());
    }
    let forward = match options.forward.as_str() {
        "nat" => Forward::Nat,
        "dr" => Forward::Dr,
        "tun" => Forward::Tun,
        other => bail!("{other:?} is none of nat, dr, tun"),
    };
    let many = ecmp::Scenario::ALL.iter();
    let many = many.filter(|(name, ..)| match &options.scenario {
        Some(wanted) => wanted == name,
        None => forward != Forward::Nat,
    });
    let lvs = options.director == Balancer::Lvs;
    let many = many.filter(|_| lvs);
    let many: Vec<ecmp::Scenario> = many.map(|(_, scenario, _)| *scenario).collect();
    let all: Vec<Scenario> = match &options.scenario {
        Some(_) if !many.is_empty() => Vec::new(),
        Some(name) => vec![Scenario::named(name)?],
        None => Scenario::ALL
            .iter()
            .map(|(_, scenario, _)| *scenario)
            .filter(|scenario| lvs || *scenario != Scenario::Quorum)
            .collect(),
    };
    for scenario in all {
        let outcome = play_with(scenario, forward, options)?;
        println!("{}", serde_json::to_string(&outcome)?);
    }
    for scenario in many {
        let outcome = ecmp::play(scenario, forward, options.downloads)?;
        println!("{}", serde_json::to_string(&outcome)?);
    }
    Ok(())
}

/// Plays a scenario with so many downloads, of at least ten seconds each.
///
/// # Errors
/// The laboratory cannot be set up, or a director does not do what it should.
pub fn play(scenario: Scenario, forward: Forward, downloads: u64) -> Result<Outcome> {
    let options = ClusterOptions {
        list: false,
        forward: forward.word().to_owned(),
        downloads,
        director: Balancer::Lvs,
        live: false,
        scenario: None,
    };
    play_with(scenario, forward, &options)
}

/// The same, with whatever stands between clients and servers.
///
/// # Errors
/// The laboratory cannot be set up, or a director does not do what it should.
pub fn play_with(
    scenario: Scenario,
    forward: Forward,
    options: &ClusterOptions,
) -> Result<Outcome> {
    ensure!(
        options.director == Balancer::Lvs || forward == Forward::Nat,
        "HAProxy knows no forwarding methods: leave --forward out"
    );
    let downloads = options.downloads;
    let mut lab = Lab::new(scenario.name(), forward, options)?;
    lab.start(0)?;
    lab.wait_active(0)?;
    lab.start(1)?;
    lab.wait_track(1, 0)?;
    let mut load = lab.site.load();
    load.requests = downloads;
    load.concurrency = downloads;
    load.sizes = vec![1_000_000];
    load.timeout_ms = 15_000;
    load.first_port = 20_000;
    let client = lab.site.client.clone();
    let sent_again = |lab: &Lab| -> Result<u64> {
        let servers = lab.site.servers.iter();
        servers.map(|host| host.counter("Tcp", "RetransSegs")).sum()
    };
    let before = sent_again(&lab)?;
    let (report, outages): (Result<LoadReport>, _) = std::thread::scope(|scope| {
        let running = scope.spawn(|| match options.live {
            true => shown(&client, &load),
            false => client.load(&load),
        });
        let changes = lab.change(scenario, downloads);
        let report = running
            .join()
            .unwrap_or_else(|_| bail!("a thread panicked"));
        (report, changes)
    });
    let said = lab.logs();
    let outages_ms = outages.with_context(|| format!("{report:?}\n{said}"))?;
    let report = report.with_context(|| said)?;
    Ok(Outcome {
        scenario: scenario.name().to_owned(),
        director: options.director.word().to_owned(),
        forward: match options.director {
            Balancer::Lvs => forward.word().to_owned(),
            Balancer::HaProxy => "proxy".to_owned(),
        },
        downloads,
        broken: report.failed,
        retransmissions: sent_again(&lab)?.saturating_sub(before),
        stall_ms: report.stall_ms,
        outages_ms,
        errors: report.errors,
    })
}

/// Downloads, while people look on.
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
            let said: Value = serde_json::from_str(line).ok()?;
            said["under_way"].is_u64().then_some(said)
        });
        let Some(said) = last else { continue };
        let bytes = said["bytes"].as_u64().unwrap_or(0);
        let took = seen.0.elapsed().as_millis().max(1);
        let rate = u128::from(bytes.saturating_sub(seen.1)) / took / 1000;
        if seen.0.elapsed() >= Duration::from_secs(1) || !terminal {
            seen = (Instant::now(), bytes);
        }
        let count = |name: &str| said[name].as_u64().unwrap_or(0);
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
    ensure!(status.success(), "the load client: {status}: {log}");
    serde_json::from_str(log.lines().last().unwrap_or_default())
        .with_context(|| format!("not a report: {log}"))
}

impl Lab {
    fn new(label: &str, forward: Forward, cluster: &ClusterOptions) -> Result<Self> {
        let mut options = SiteOptions::new(&format!("cluster-{label}"), forward);
        options.standby = true;
        options.vip = Vip::Engine;
        options.nginx = NginxOptions {
            rate: 60_000,
            ..NginxOptions::default()
        };
        let site = Site::new(options)?;
        let key = site.testbed.dir().join("sync.key");
        fs::write(&key, "0123456789abcdef0123456789abcdef")?;
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600))?;
        let hosts = [site.director.clone(), site.standby()?.clone()];
        for host in &hosts {
            ecmp::own_files(host)?;
        }
        if forward == Forward::Nat && cluster.director == Balancer::Lvs {
            // What the servers send to is keepalived's to move.
            for server in &site.servers {
                server.sh("ip route replace default via 10.0.0.254")?;
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
        let directors = directors.map_err(|_| anyhow::anyhow!("there are two"))?;
        let lab = Self {
            site,
            directors,
            kind: cluster.director,
            live: cluster.live,
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
        if forward == Forward::Nat {
            let key = "0123456789abcdef0123456789abcdef";
            ecmp::put(&director.host, "/etc/lvs/sync.key", key)?;
            director.host.sh("chmod 600 /etc/lvs/sync.key")?;
            let text = LVSD.replace("\"192.0.2.2\"", &format!("\"{peer}\""));
            ecmp::put(&director.host, "/etc/lvsd/lvsd.toml", &text)?;
            self.lvsd(index, &["--check-config"])?;
            let made = self.lvsd(index, &["keepalived-config"])?;
            return ecmp::put(&director.host, KEEPALIVED, &made);
        }
        let files = director.files.display();
        let mut text = format!(
            "[dataplane]\ninterface = \"eth0\"\n\n[sync]\npeers = [\"{peer}\"]\nkey_file = \"{}\"\n\n\
             [vrrp]\ninterface = \"eth0\"\nrouter_id = 51\npeers = [\"{peer}\"]\ntrack_file = \"{files}/track\"\nfifo = \"{files}/fifo\"\n\n\
             [[service]]\nname = \"web\"\naddress = \"{}\"\nscheduler = \"rr\"\nforward = \"{}\"\n\
             check = {{ type = \"tcp\", interval = \"1s\", timeout = \"500ms\" }}\n",
            self.site.testbed.dir().join("sync.key").display(),
            self.site.service(80),
            forward.word(),
        );
        if forward == Forward::Tun {
            // keepalived gives it to the host.
            text.push_str("vip = \"host\"\n");
        }
        for server in 0..self.site.servers.len() {
            let address = self.site.real_address(server);
            write!(text, "\n[[service.server]]\naddress = \"{address}:80\"\n")?;
        }
        if forward == Forward::Dr {
            let vip = self.site.vip6;
            write!(
                text,
                "\n[[service]]\nname = \"web6\"\naddress = \"[{vip}]:80\"\nscheduler = \"rr\"\nforward = \"dr\"\n"
            )?;
            for server in 0..self.site.servers.len() {
                let address = self.site.real_address6(server);
                write!(text, "\n[[service.server]]\naddress = \"[{address}]:80\"\n")?;
            }
        }
        ecmp::put(&director.host, "/etc/lvsd/lvsd.toml", &text)?;
        let made = self.lvsd(index, &["keepalived-config"])?;
        ecmp::put(&director.host, KEEPALIVED, &made)
    }

    /// The IPv6 address moves with the other one.
    fn ask_by_ipv6(&self) -> Result<()> {
        if self.kind != Balancer::Lvs || self.site.options.forward != Forward::Dr {
            return Ok(());
        }
        let url = format!("http://[{}]/id", self.site.vip6);
        let words = ["-sS", "-g", "-f", "-m", "10", &url];
        let said = self.site.client.run("curl", &words);
        said.map(drop).with_context(|| self.logs())
    }

    /// A proxy for the same servers, and VRRP with the same numbers.
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
        ecmp::put(&director.host, KEEPALIVED, &text)
    }

    /// Runs `lvsd` with a command on a director.
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
                director.host.spawn(lvsd, &["--state", &file("state")])?
            }
            Balancer::HaProxy => {
                let config = file("haproxy.cfg");
                let proxy = director.host.spawn("haproxy", &["-db", "-f", &config])?;
                let listens = director.host.wait_for_port("tcp", 80);
                listens.with_context(|| proxy.log())?;
                proxy
            }
        });
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
                let said = self.directors[index].host.run("ip", &words);
                said.is_ok_and(|said| said.contains(&format!(" {}/", self.site.vip)))
            }
        }
    }

    /// For who looks on.
    fn tell(&self, words: &str) {
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
        self.tell(&format!("director {} is active", index + 1));
        Ok(())
    }

    fn wait_track(&self, index: usize, value: i64) -> Result<()> {
        if self.kind == Balancer::HaProxy {
            // Long enough to have heard the other one.
            std::thread::sleep(Duration::from_secs(2));
            return Ok(());
        }
        let done = |status: Value| status["vrrp"]["track"] == value;
        wait_until("the track file to follow", LIMIT, || {
            self.status(index).is_some_and(done)
        })
        .with_context(|| self.logs())
    }

    /// The connections that a director knows from the other one.
    fn lent(&self, index: usize) -> Option<u64> {
        let said = self
            .site
            .lvsadm_on(&self.directors[index].host, "--json sync");
        let said: Value = serde_json::from_str(&said.ok()?).ok()?;
        said["peers"][0]["lent"].as_u64()
    }

    /// What happens, and for how long the virtual address was gone at each change.
    fn change(&mut self, scenario: Scenario, downloads: u64) -> Result<Vec<u64>> {
        match self.kind {
            Balancer::Lvs => wait_until("the other to know all connections", LIMIT, || {
                self.lent(1) == Some(downloads)
            })
            .with_context(|| format!("it knows {:?}", self.lent(1)))?,
            Balancer::HaProxy => wait_until("all connections", LIMIT, || {
                let open = self.site.client.counter("Tcp", "CurrEstab");
                open.is_ok_and(|open| open == downloads)
            })?,
        }
        let mut outages = Vec::new();
        match scenario {
            Scenario::Kill => outages.push(self.outage(|lab| lab.kill(0), 1)?),
            Scenario::Returns => {
                outages.push(self.outage(|lab| lab.kill(0), 1)?);
                self.come_back(0)?;
                self.wait_track(0, 0)?;
                ensure!(
                    self.is_active(1),
                    "who comes back takes nothing over without need"
                );
                outages.push(self.outage(|lab| lab.maintenance(1, "on"), 0)?);
            }
            Scenario::Planned => {
                outages.push(self.outage(|lab| lab.maintenance(0, "on"), 1)?);
                self.maintenance(0, "off")?;
                self.wait_track(0, 0)?;
                outages.push(self.outage(|lab| lab.maintenance(1, "on"), 0)?);
            }
            Scenario::Quorum => {
                outages.push(self.outage(|lab| lab.blind(0), 1)?);
                self.directors[0].host.sh("nft delete table inet blind")?;
                self.wait_track(0, 0)?;
                ensure!(
                    self.is_active(1),
                    "who sees servers again takes nothing over without need"
                );
            }
        }
        Ok(outages)
    }

    /// What a director sends to servers itself is lost; what it forwards is not.
    fn blind(&mut self, index: usize) -> Result<()> {
        self.tell(&format!("director {}: finds its servers down", index + 1));
        ensure!(
            self.kind == Balancer::Lvs,
            "quorum is a scenario of lvsd alone: leave --director out"
        );
        let servers = 0..self.site.servers.len();
        let servers: Vec<String> = servers
            .map(|server| self.site.real_address(server).to_string())
            .collect();
        self.directors[index].host.sh(&format!(
            "nft -f - <<'END'\ntable inet blind {{\n chain output {{\n  type filter hook output priority 0\n  \
             ip daddr {{ {} }} drop\n }}\n}}\nEND",
            servers.join(", ")
        ))?;
        Ok(())
    }

    fn maintenance(&mut self, index: usize, what: &str) -> Result<()> {
        self.tell(&format!("director {}: maintenance {what}", index + 1));
        if self.kind == Balancer::HaProxy {
            let value = if what == "on" { "-100\n" } else { "0\n" };
            return Ok(fs::write(self.directors[index].files.join("track"), value)?);
        }
        self.lvsd(index, &["maintenance", what, "--why", "a test"])
            .map(drop)
    }

    /// Does something, waits until a director is active, and says for how long nobody was.
    fn outage(
        &mut self,
        deed: impl FnOnce(&mut Self) -> Result<()>,
        then_active: usize,
    ) -> Result<u64> {
        let vip = self.site.vip.to_string();
        let words = ["-D", "-n", "-i", "0.01", "-w", "6", &vip];
        let mut ping = self.site.client.spawn("ping", &words)?;
        std::thread::sleep(Duration::from_millis(300));
        deed(self)?;
        self.wait_active(then_active)?;
        self.ask_by_ipv6()?;
        // Longer than the neighbours' announcements take, and whoever takes it back.
        std::thread::sleep(Duration::from_millis(1500));
        let _ = ping.stop(Signal::SIGINT);
        longest_gap(&ping.log())
    }

    /// As when its power goes.
    fn kill(&mut self, index: usize) -> Result<()> {
        self.tell(&format!(
            "director {}: kill -9 of everything, links down",
            index + 1
        ));
        let engine = match self.kind {
            Balancer::Lvs => {
                let said: Value = serde_json::from_str(&self.lvsd(index, &["status", "--json"])?)?;
                Some(said["engine"]["pid"].as_i64().context("its engine")?)
            }
            Balancer::HaProxy => None,
        };
        let director = &mut self.directors[index];
        director
            .host
            .sh("for i in eth0 eth1; do [ ! -e /sys/class/net/$i ] || ip link set $i down; done")?;
        // The parent's end would have the child leave in an orderly way.
        let child = fs::read_to_string(director.files.join("vrrp.pid"))?;
        kill(Pid::from_raw(child.trim().parse()?), Signal::SIGKILL).context("kill keepalived")?;
        for program in [&mut director.keepalived, &mut director.balancer] {
            if let Some(mut program) = program.take() {
                program.kill();
            }
        }
        match engine {
            Some(engine) => kill(Pid::from_raw(i32::try_from(engine)?), Signal::SIGKILL)
                .context("kill the engine"),
            None => Ok(()),
        }
    }

    /// The host is there again, with what it has when it has just started.
    fn come_back(&mut self, index: usize) -> Result<()> {
        self.tell(&format!(
            "director {}: comes back with an empty table",
            index + 1
        ));
        let two_arms = self.site.options.forward == Forward::Nat;
        let (director, vip) = (&self.directors[index], self.site.vip);
        for name in ["track", "fifo", "fifo.state", "pid", "vrrp.pid"] {
            let _ = fs::remove_file(director.files.join(name));
        }
        director.host.sh("rm -rf /run/lvs")?;
        director.host.sh(&match two_arms {
            // What keepalived gave the host does not outlive a host either.
            true => format!(
                "ip addr del 10.0.0.254/24 dev eth1 || true; ip addr del {vip}/32 dev eth0 || true\n\
                 ip link set eth0 up; ip link set eth1 up"
            ),
            // With the link, IPv6 addresses go.
            false => format!(
                "ip link set eth0 up; ip route add default via 192.0.2.254\n\
                 ip addr add fd00:192::{}/64 dev eth0 nodad; ip -6 route add default via fd00:192::254",
                index + 1
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
                let _ = writeln!(text, "--- director {index}:\n{}", program.log());
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

/// The longest time between two echo replies in milliseconds, of ping's lines with their time.
fn longest_gap(log: &str) -> Result<u64> {
    let times: Vec<f64> = log
        .lines()
        .filter(|line| line.contains("bytes from"))
        .filter_map(|line| line.strip_prefix('[')?.split_once(']')?.0.parse().ok())
        .collect();
    ensure!(times.len() > 10, "there were hardly any replies:\n{log}");
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
    fn the_longest_gap_is_found() {
        let mut log = String::from("PING 192.0.2.10\n");
        for n in 0..20 {
            let at = 100.0 + f64::from(n) * 0.01 + if n > 9 { 0.5 } else { 0.0 };
            let _ = writeln!(log, "[{at:.6}] 64 bytes from 192.0.2.10: icmp_seq={n}");
        }
        let gap = longest_gap(&log).unwrap();
        assert!((505..=515).contains(&gap), "{gap}");
        assert!(longest_gap("nothing").is_err());
    }

    #[test]
    fn scenarios_have_names() {
        for (name, scenario, _) in Scenario::ALL {
            assert_eq!(Scenario::named(name).unwrap(), scenario);
            assert_eq!(scenario.name(), name);
        }
        assert!(Scenario::named("x").is_err());
    }
}
