//! `lvs-testbed cluster`: two directors with keepalived, under load, while one of them dies, comes
//! back or is taken out of service. Scenarios with many directors are in [`ecmp`].

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Serialize;
use serde_json::Value;

use crate::netns::{Host, Proc, wait_until};
use crate::servers::NginxOptions;
use crate::{Forward, LoadReport, Site, SiteOptions, Vip, ecmp, programs};

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
    /// The scenario; all of them if none is named
    pub scenario: Option<String>,
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
}

impl Scenario {
    /// All of them, with what they are.
    pub const ALL: [(&'static str, Self, &'static str); 3] = [
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
    /// The forwarding method.
    pub forward: String,
    /// Downloads, byte for byte.
    pub downloads: u64,
    /// Those that failed.
    pub broken: u64,
    /// Segments that servers had to send again.
    pub retransmissions: u64,
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
    lvsd: Option<Proc>,
    keepalived: Option<Proc>,
}

/// Two directors with keepalived.
#[derive(Debug)]
pub struct Lab {
    site: Site,
    directors: [Director; 2],
}

const LIMIT: Duration = Duration::from_secs(20);

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
    let many: Vec<ecmp::Scenario> = many.map(|(_, scenario, _)| *scenario).collect();
    let all: Vec<Scenario> = match &options.scenario {
        Some(_) if !many.is_empty() => Vec::new(),
        Some(name) => vec![Scenario::named(name)?],
        None => Scenario::ALL
            .iter()
            .map(|(_, scenario, _)| *scenario)
            .collect(),
    };
    for scenario in all {
        let outcome = play(scenario, forward, options.downloads)?;
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
    let mut lab = Lab::new(scenario.name(), forward)?;
    lab.start(0)?;
    lab.wait_active(0)?;
    lab.start(1)?;
    lab.wait_track(1, 0)?;
    let mut load = lab.site.load();
    load.requests = downloads;
    load.concurrency = downloads;
    load.sizes = vec![1_000_000];
    load.timeout_ms = 60_000;
    load.first_port = 20_000;
    let client = lab.site.client.clone();
    let sent_again = |lab: &Lab| -> Result<u64> {
        let servers = lab.site.servers.iter();
        servers.map(|host| host.counter("Tcp", "RetransSegs")).sum()
    };
    let before = sent_again(&lab)?;
    let (report, outages): (Result<LoadReport>, _) = std::thread::scope(|scope| {
        let running = scope.spawn(|| client.load(&load));
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
        forward: forward.word().to_owned(),
        downloads,
        broken: report.failed,
        retransmissions: sent_again(&lab)?.saturating_sub(before),
        outages_ms,
        errors: report.errors,
    })
}

impl Lab {
    fn new(label: &str, forward: Forward) -> Result<Self> {
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
        if forward == Forward::Nat {
            // What the servers send to is keepalived's to move.
            let script = "ip addr del 10.0.0.1/24 dev eth1; ip addr add 10.0.0.3/24 dev eth1";
            hosts[0].sh(script)?;
        }
        let mut made = Vec::new();
        for (index, host) in hosts.into_iter().enumerate() {
            let files = site.testbed.dir().join(format!("director{index}"));
            fs::create_dir_all(files.join("state"))?;
            made.push(Director {
                host,
                files,
                lvsd: None,
                keepalived: None,
            });
        }
        let directors = made.try_into();
        let directors = directors.map_err(|_| anyhow::anyhow!("there are two"))?;
        let lab = Self { site, directors };
        for index in 0..2 {
            lab.configure(index)?;
        }
        Ok(lab)
    }

    fn configure(&self, index: usize) -> Result<()> {
        let director = &self.directors[index];
        let (forward, two_arms) = (
            self.site.options.forward,
            self.site.options.forward == Forward::Nat,
        );
        let peer = ["192.0.2.2", "192.0.2.1"][index];
        let files = director.files.display();
        let mut text = format!(
            "[dataplane]\ninterface = {}\n\n[sync]\npeers = [\"{peer}\"]\nkey_file = \"{}\"\n\n\
             [vrrp]\ninterface = \"eth0\"\nrouter_id = 51\n{}track_file = \"{files}/track\"\nfifo = \"{files}/fifo\"\n\n\
             [[service]]\nname = \"web\"\naddress = \"{}\"\nscheduler = \"rr\"\nforward = \"{}\"\n",
            if two_arms {
                "[\"eth0\", \"eth1\"]"
            } else {
                "\"eth0\""
            },
            self.site.testbed.dir().join("sync.key").display(),
            if two_arms {
                "address = \"10.0.0.1/24 dev eth1\"\n"
            } else {
                ""
            },
            self.site.service(80),
            forward.word(),
        );
        for server in 0..self.site.servers.len() {
            let address = self.site.real_address(server);
            write!(text, "\n[[service.server]]\naddress = \"{address}:80\"\n")?;
        }
        fs::write(director.files.join("lvsd.toml"), text)?;
        let made = self.lvsd(index, &["keepalived-config"])?;
        fs::write(director.files.join("keepalived.conf"), made)?;
        Ok(())
    }

    /// Runs `lvsd` with a command on a director.
    fn lvsd(&self, index: usize, words: &[&str]) -> Result<String> {
        let director = &self.directors[index];
        let config = director.files.join("lvsd.toml").display().to_string();
        let mut all = vec!["--config", &config];
        all.extend_from_slice(words);
        director.host.run(programs::find("lvsd")?, &all)
    }

    fn start(&mut self, index: usize) -> Result<()> {
        let director = &mut self.directors[index];
        let file = |name: &str| director.files.join(name).display().to_string();
        let (config, state) = (file("lvsd.toml"), file("state"));
        let words = ["--config", &config, "--state", &state];
        director.lvsd = Some(director.host.spawn(programs::find("lvsd")?, &words)?);
        let (conf, pid, vrrp) = (file("keepalived.conf"), file("pid"), file("vrrp.pid"));
        let words = ["-n", "-l", "-D", "-P", "-f", &conf, "-p", &pid, "-r", &vrrp];
        director.keepalived = Some(director.host.spawn("keepalived", &words)?);
        Ok(())
    }

    fn status(&self, index: usize) -> Option<Value> {
        let text = self
            .lvsd(index, &["maintenance", "status", "--json"])
            .ok()?;
        serde_json::from_str(&text).ok()
    }

    fn wait_active(&self, index: usize) -> Result<()> {
        let active = |status: Value| status["vrrp"]["active"] == true;
        wait_until("a director to be active", LIMIT, || {
            self.status(index).is_some_and(active)
        })
        .with_context(|| self.logs())
    }

    fn wait_track(&self, index: usize, value: i64) -> Result<()> {
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
        wait_until("the other to know all connections", LIMIT, || {
            self.lent(1) == Some(downloads)
        })
        .with_context(|| format!("it knows {:?}", self.lent(1)))?;
        let mut outages = Vec::new();
        match scenario {
            Scenario::Kill => outages.push(self.outage(|lab| lab.kill(0), 1)?),
            Scenario::Returns => {
                outages.push(self.outage(|lab| lab.kill(0), 1)?);
                self.come_back(0)?;
                self.wait_track(0, 0)?;
                ensure!(
                    self.status(1)
                        .is_some_and(|status| status["vrrp"]["active"] == true),
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
        }
        Ok(outages)
    }

    fn maintenance(&mut self, index: usize, what: &str) -> Result<()> {
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
        // Longer than the neighbours' announcements take, and whoever takes it back.
        std::thread::sleep(Duration::from_millis(1500));
        let _ = ping.stop(Signal::SIGINT);
        longest_gap(&ping.log())
    }

    /// As when its power goes.
    fn kill(&mut self, index: usize) -> Result<()> {
        let engine = self.lvsd(index, &["status", "--json"])?;
        let engine: Value = serde_json::from_str(&engine)?;
        let engine = engine["engine"]["pid"].as_i64().context("its engine")?;
        let director = &mut self.directors[index];
        director
            .host
            .sh("for i in eth0 eth1; do [ ! -e /sys/class/net/$i ] || ip link set $i down; done")?;
        // The parent's end would have the child leave in an orderly way.
        let child = fs::read_to_string(director.files.join("vrrp.pid"))?;
        kill(Pid::from_raw(child.trim().parse()?), Signal::SIGKILL).context("kill keepalived")?;
        for program in [&mut director.keepalived, &mut director.lvsd] {
            if let Some(mut program) = program.take() {
                program.kill();
            }
        }
        kill(Pid::from_raw(i32::try_from(engine)?), Signal::SIGKILL).context("kill the engine")
    }

    /// The host is there again, with what it has when it has just started.
    fn come_back(&mut self, index: usize) -> Result<()> {
        let two_arms = self.site.options.forward == Forward::Nat;
        let director = &self.directors[index];
        for name in ["track", "fifo", "fifo.state", "pid", "vrrp.pid"] {
            let _ = fs::remove_file(director.files.join(name));
        }
        director.host.sh(match two_arms {
            true => {
                "ip addr del 10.0.0.1/24 dev eth1 || true; ip link set eth0 up; ip link set eth1 up"
            }
            false => "ip link set eth0 up; ip route add default via 192.0.2.254",
        })?;
        self.start(index)
    }

    fn logs(&self) -> String {
        let mut text = String::new();
        for (index, director) in self.directors.iter().enumerate() {
            for program in [&director.lvsd, &director.keepalived].into_iter().flatten() {
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
            if let Some(mut lvsd) = director.lvsd.take() {
                let _ = lvsd.stop(Signal::SIGINT);
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
