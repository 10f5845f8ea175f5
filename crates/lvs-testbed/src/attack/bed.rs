//! The site of an attack, with an attacker next to the client, and measurements of the dataplane.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::honest::{Honest, HonestOptions, LARGE, SMALL};
use super::probe::{Delays, REAL_TIME};
use super::{Attack, Compared, Means, Outcome, users};
use crate::netns::Host;
use crate::programs;
use crate::site::{Forward, Site, SiteOptions, Topology};

/// A VIP with a service for all ports.
const OTHER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 20);
const ECHO: u16 = 7;

struct Bed {
    site: Site,
    attacker: Host,
}

pub(super) fn run(
    attack: &'static Attack,
    time: Duration,
    alone: Duration,
    rate: u64,
) -> Result<Outcome> {
    let mut bed = Bed::new(attack)?;
    let idle_kb = bed.memory("VmRSS")?;
    bed.forget_peak()?;
    let before = Honest::run_on(&bed.site.client, &bed.honest(alone))?;
    let drops_before = bed.drops()?;
    let echoed_before = bed.echoed()?;
    let users = matches!(attack.means, Means::Users(_));
    let without = users.then(|| bed.probe_beside(alone, None)).transpose()?;
    let busy = users.then(|| bed.probe_beside(alone, Some(users::compute)));
    let busy = busy.transpose()?;
    let (sent, beside, delays) = bed.attack(attack, time, rate)?;
    let delays = match (without, busy, delays) {
        (Some(before), Some(busy_users), Some(beside)) => Some(Compared {
            before,
            busy_users,
            beside,
        }),
        _ => None,
    };
    let peak_kb = bed.memory("VmHWM")?;
    let mut drops = bed.drops()?;
    drops.retain(|reason, count| {
        *count -= drops_before.get(reason).copied().unwrap_or(0);
        *count > 0
    });
    let echoed = bed.echoed()? - echoed_before;
    if bed
        .site
        .dataplane
        .as_mut()
        .is_none_or(|dataplane| !dataplane.is_running())
    {
        let log = bed.site.dataplane.map(|dataplane| dataplane.log());
        bail!(
            "{}: the dataplane has exited; it printed: {log:?}",
            attack.name
        );
    }
    Ok(Outcome {
        name: attack.name,
        bound: attack.bound,
        before,
        beside,
        sent,
        idle_kb,
        peak_kb,
        drops,
        echoed,
        delays,
    })
}

impl Bed {
    fn new(attack: &Attack) -> Result<Self> {
        let (forward, vip) = attack.site;
        let mut options = SiteOptions::new("attack", forward);
        options.vip = vip;
        options.servers = 2;
        let lan = if forward == Forward::Nat {
            options.topology = Topology::TwoArm;
            "front"
        } else {
            options.topology = Topology::OneArm;
            "lan"
        };
        let mut site = Site::new(options)?;
        let [attacker] = site.testbed.hosts(["attacker"])?;
        site.testbed.plug(lan, &attacker, "eth0")?;
        // The director routes replies to spoofed sources to the attacker, which drops them.
        attacker.sh(
            "ip link set eth0 up\nip addr add 192.0.2.200/24 dev eth0\nip addr add fd00:192::200/64 dev eth0 nodad",
        )?;
        site.director.sh(&format!(
            "ip addr add {OTHER}/32 dev eth0\nip route add 198.18.0.0/15 via 192.0.2.200\n\
             ip route add 2001:db8::/32 via fd00:192::200"
        ))?;
        let users = matches!(attack.means, Means::Users(_));
        for server in site.servers.clone() {
            let (own, port) = (programs::own()?.display().to_string(), ECHO.to_string());
            let mut words = if users {
                REAL_TIME.to_vec()
            } else {
                Vec::new()
            };
            words.extend([&*own, "echo", &port]);
            let program = server.spawn(words[0], &words[1..])?;
            server.wait_for_port("udp", ECHO)?;
            site.programs.push(program);
        }
        for size in [SMALL, LARGE] {
            site.serve(&format!("s/{size}"), size as u64)?;
        }
        if matches!(attack.means, Means::Log) {
            let fifo = site.testbed.dir().join("log").display().to_string();
            // A process keeps the pipe open, but reads nothing.
            let script = format!(
                "mkfifo {fifo}; exec 3<>{fifo}; dd if=/dev/zero of={fifo} bs=4096 count=64 oflag=nonblock 2>&-; exec \"$@\" 2>{fifo}"
            );
            let launcher = ["env", "LVS_LOG=trace", "sh", "-c", &*script, "sh"];
            site.start_dataplane_by(&launcher, attack.dataplane)?;
        } else {
            site.start_dataplane(attack.dataplane)?;
        }
        let bed = Self { site, attacker };
        bed.services()?;
        if users {
            bed.many_servers()?;
        }
        Ok(bed)
    }

    /// Adds 16 services with 1,000 servers each, for long listings.
    fn many_servers(&self) -> Result<()> {
        let mut rules = String::new();
        for service in 0..16 {
            writeln!(rules, "-A -t 198.51.100.{service}:80 -s rr")?;
            for server in 0..1000 {
                let (a, b) = (100 + server / 200, 1 + server % 200);
                writeln!(rules, "-a -t 198.51.100.{service}:80 -r 10.0.{a}.{b}:80 -m")?;
            }
        }
        self.site.lvsadm_restore(&rules).map(drop)
    }

    /// Measures the round-trip times of single packets while `users` runs. If `users` is `None`,
    /// the measurement adds no other load.
    fn probe_beside(
        &self,
        time: Duration,
        users: Option<fn(&Site, Duration) -> Result<u64>>,
    ) -> Result<Delays> {
        std::thread::scope(|scope| {
            let users = users.map(|users| scope.spawn(move || users(&self.site, time)));
            let delays = Delays::run_on(&self.site.client, self.site.service(ECHO), time);
            if let Some(users) = users {
                let ended = users.join();
                ended.unwrap_or_else(|_| bail!("the thread of the local users panicked"))?;
            }
            delays
        })
    }

    fn services(&self) -> Result<()> {
        let site = &self.site;
        let flag = site.options.forward.flag();
        site.add_service(80, "rr")?;
        site.add_service_weighted("-u", ECHO, "rr", &[1, 1])?;
        let (vip6, servers) = (site.vip6, site.servers.len());
        for (protocol, port) in [("-t", 80), ("-u", ECHO)] {
            site.lvsadm(&format!("-A {protocol} [{vip6}]:{port} -s rr"))?;
            for index in 0..servers {
                let server = site.real_address6(index);
                site.lvsadm(&format!(
                    "-a {protocol} [{vip6}]:{port} -r [{server}]:{port} {flag}"
                ))?;
            }
        }
        site.lvsadm(&format!(
            "mark add --destination {OTHER} --protocol tcp --mark 1"
        ))?;
        site.lvsadm("-A -f 1 -s rr")?;
        for index in 0..servers {
            let server = site.real_address(index);
            site.lvsadm(&format!("-a -f 1 -r {server}:0 {flag}"))?;
        }
        Ok(())
    }

    fn honest(&self, time: Duration) -> HonestOptions {
        HonestOptions {
            target: self.site.service(80),
            rate: 200,
            pause_ms: 100,
            for_ms: u64::try_from(time.as_millis()).unwrap_or(u64::MAX),
        }
    }

    /// Runs the attack and the honest clients at the same time. Returns the number of sent frames,
    /// requests or rounds, the report of the honest clients, and for an attack by local users the
    /// round-trip times.
    fn attack(
        &self,
        attack: &Attack,
        time: Duration,
        rate: u64,
    ) -> Result<(u64, Honest, Option<Delays>)> {
        let honest = self.honest(time);
        std::thread::scope(|scope| {
            let client = scope.spawn(|| Honest::run_on(&self.site.client, &honest));
            let (sent, delays) = match attack.means {
                Means::Frames(_) => (self.strike_until_counted(attack, time, rate), None),
                Means::Log => (self.fill_the_log(time), None),
                Means::Users(hostile) => {
                    let users = scope.spawn(move || hostile(&self.site, time));
                    let delays = self.probe_beside(time, None);
                    let sent = users.join();
                    let sent =
                        sent.unwrap_or_else(|_| bail!("the thread of the local users panicked"));
                    (sent, Some(delays?))
                }
            };
            let beside = client.join();
            let beside =
                beside.unwrap_or_else(|_| bail!("the thread of the honest clients panicked"));
            Ok((sent?, beside?, delays))
        })
    }

    /// Starts an `lvsadm` listing, and repeatedly adds and removes a routing rule and an address,
    /// which the dataplane logs. No process reads the listing or the log. Returns the number of
    /// rounds.
    fn fill_the_log(&self, time: Duration) -> Result<u64> {
        let lvsadm = programs::find("lvsadm")?.display().to_string();
        let listing = format!("{lvsadm} -L -n | sleep {}", time.as_secs() + 1);
        let mut listing = self.site.director.spawn("sh", &["-c", &listing])?;
        let (start, mut rounds) = (Instant::now(), 0);
        while start.elapsed() < time {
            // Each change causes one log line or more.
            self.site.director.sh(
                "ip rule add to 198.51.100.1 table 77; ip rule del to 198.51.100.1 table 77
                 ip addr add 198.51.100.9/32 dev lo; ip addr del 198.51.100.9/32 dev lo",
            )?;
            rounds += 1;
        }
        listing.kill();
        Ok(rounds)
    }

    /// Runs the attack until one of its drop counters is above 0, at most 30 times. An attack
    /// without drop counters runs once. Returns the number of sent frames. On a busy machine, one
    /// run may send too few frames to reach the director's limit.
    fn strike_until_counted(&self, attack: &Attack, time: Duration, rate: u64) -> Result<u64> {
        const STRIKES: usize = 30;
        let mut sent = 0;
        for _ in 0..STRIKES {
            sent += self.strike(attack.name, time, rate)?;
            if attack.is_counted(&self.drops()?) {
                break;
            }
        }
        Ok(sent)
    }

    fn strike(&self, name: &str, time: Duration, rate: u64) -> Result<u64> {
        let mac = self.site.director.sh("cat /sys/class/net/eth0/address")?;
        let (director4, director6) = (
            Ipv4Addr::new(192, 0, 2, 1),
            Ipv6Addr::new(0xfd00, 0x192, 0, 0, 0, 0, 0, 1),
        );
        let words = [
            "strike".to_owned(),
            name.to_owned(),
            format!("--mac={}", mac.trim()),
            format!("--vip4={}", self.site.vip),
            format!("--vip6={}", self.site.vip6),
            format!("--other4={OTHER}"),
            format!("--director4={director4}"),
            format!("--director6={director6}"),
            format!("--rate={rate}"),
            format!("--for={}", time.as_millis()),
        ];
        let printed = self.attacker.run(programs::own()?, &words)?;
        let sent = printed.split_ascii_whitespace().next();
        let sent = sent.and_then(|sent| sent.parse().ok());
        sent.with_context(|| format!("the attacker printed no number of sent frames: {printed}"))
    }

    /// Returns a field of the dataplane's `/proc/PID/status`, in kilobytes.
    fn memory(&self, field: &str) -> Result<u64> {
        let dataplane = self
            .site
            .dataplane
            .as_ref()
            .context("no dataplane was started")?;
        let status = fs::read_to_string(format!("/proc/{}/status", dataplane.pid()))?;
        let line = status.lines().find_map(|line| line.strip_prefix(field));
        let value = line.and_then(|line| line.split_ascii_whitespace().nth(1));
        let value = value.and_then(|value| value.parse().ok());
        value.with_context(|| format!("the status of the dataplane contains no {field}: {status}"))
    }

    /// Resets the dataplane's peak memory (`VmHWM`).
    fn forget_peak(&self) -> Result<()> {
        let dataplane = self
            .site
            .dataplane
            .as_ref()
            .context("no dataplane was started")?;
        fs::write(format!("/proc/{}/clear_refs", dataplane.pid()), "5")?;
        Ok(())
    }

    /// Number of packets that the dataplane has dropped since its start, by reason.
    fn drops(&self) -> Result<BTreeMap<String, u64>> {
        let mut dropped = false;
        let mut drops = BTreeMap::new();
        for line in self.site.lvsadm("drops")?.lines() {
            if !line.starts_with(' ') {
                dropped = line.starts_with("Dropped");
            } else if let Some((count, reason)) = line.trim().split_once("  ")
                && let (true, Ok(count)) = (dropped, count.parse())
            {
                drops.insert(reason.to_owned(), count);
            }
        }
        Ok(drops)
    }

    /// Number of UDP datagrams that the real servers have received.
    fn echoed(&self) -> Result<u64> {
        let mut all = 0;
        for server in &self.site.servers {
            all += server.counter("Udp", "InDatagrams")?;
        }
        Ok(all)
    }
}

/// Sends every UDP datagram that arrives at `port` back to its source, until the process ends.
///
/// # Errors
/// The socket cannot be bound, for example because the port is in use.
pub fn echo(port: u16) -> Result<()> {
    let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port))?;
    let mut buffer = [0; 65_536];
    loop {
        if let Ok((len, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..len], from);
        }
    }
}
