//! Starts services on each compared program, with real servers of limited capacity, and clients
//! that request files in a loop.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use lvs_testbed::netns::run_with_input;
use lvs_testbed::{Host, Proc, programs};
use nix::sys::signal::Signal;

use super::peers::{self, Peer};
use super::usual_bed;
use crate::compare::bed::{self, Bed, SERVER_MAC, VIP};
use crate::compare::contender::Contender;
use crate::files::Asked;
use crate::yardsticks::Yardsticks;

/// Number of real servers in a bed, at 10.72.0.11 and the following addresses.
pub(super) const SERVERS: usize = 8;

#[derive(Debug)]
pub(super) struct Service {
    pub(super) port: u16,
    /// The scheduler's name in `lvsadm`.
    pub(super) scheduler: &'static str,
    /// For each server, its weight and its maximum rate in bytes per second.
    pub(super) servers: Vec<(u32, u64)>,
}

/// The running servers, and lvsd if it configures the dataplane.
#[derive(Debug)]
pub(super) struct Farm {
    servers: Proc,
    directory: tempfile::TempDir,
    daemon: Option<Proc>,
}

/// The address of a server, by its number from 0.
pub(super) fn address(server: usize) -> String {
    format!("10.72.0.{}", 11 + server)
}

/// Sizes in bytes of the smallest and of the largest file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Set {
    pub(super) name: &'static str,
    pub(super) least: u64,
    pub(super) most: u64,
}

/// The small files of the experiment in [`thesis`](super::thesis), a master's thesis on scheduling.
pub(super) const SMALL: Set = Set {
    name: "small",
    least: 76_000,
    most: 1_800_000,
};
/// The mixed files of the master's thesis.
pub(super) const MIXED: Set = Set {
    name: "mixed",
    least: 100_000,
    most: 10_000_000,
};
/// The large files of the master's thesis.
pub(super) const LARGE: Set = Set {
    name: "large",
    least: 41_000,
    most: 50_000_000,
};

/// The requests of clients.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clients {
    pub(super) set: Set,
    /// Number of clients of each service.
    pub(super) count: u32,
    pub(super) seed: usize,
    pub(super) seconds: f64,
    /// Milliseconds after which a request has failed.
    pub(super) timeout: u32,
    /// Number of source addresses of requests; 0: the address of the host.
    pub(super) sources: u8,
}

/// Peers that can balance services on any port.
pub(super) const PEERS: [Peer; 5] =
    peers::named(["lvs-nat", "nftables", "haproxy", "nginx", "ip_vs nat"]);

/// Makes a test bed with eight servers, and a client with several source addresses.
pub(super) fn bed(peer: &Peer, yardsticks: &Yardsticks) -> Result<Bed> {
    let bed = usual_bed(peer, yardsticks)?;

    let mut servers = String::new();
    let mut director = String::new();
    for server in 4..SERVERS {
        let address = address(server);
        writeln!(servers, "ip addr add {address}/24 dev {}", bed.devices[3])?;
        writeln!(
            director,
            "ip neigh replace {address} lladdr {SERVER_MAC} dev {} nud permanent",
            bed.devices[2]
        )?;
    }
    bed.server.sh(&servers)?;
    bed.client.sh("ip route add local 10.128.0.0/24 dev lo")?;
    bed.director.sh(&director)?;
    Ok(bed)
}

impl Farm {
    /// Starts servers, and configures the peer to use them. `checked`: whether the peer makes
    /// health checks of the servers, if it can.
    pub(super) fn start(bed: &mut Bed, services: &[Service], checked: bool) -> Result<Self> {
        let own = std::env::current_exe()?.display().to_string();
        let mut words = vec!["-c".to_owned(), "0".to_owned(), own, "endpoint".to_owned()];
        words.push("files".to_owned());
        for service in services {
            for (server, (_, bytes)) in service.servers.iter().enumerate() {
                words.push(format!("{}:{}={bytes}", address(server), service.port));
            }
        }
        let servers = bed::ready(bed.server.spawn("taskset", &words)?)?;
        let directory = tempfile::tempdir()?;
        let mut farm = Self {
            servers,
            directory,
            daemon: None,
        };
        farm.send(bed, services, checked)?;
        Ok(farm)
    }

    fn send(&mut self, bed: &mut Bed, services: &[Service], checked: bool) -> Result<()> {
        let directory = self.directory.path();
        match bed.who {
            who if who.takes_rules() => {
                bed.director.run(bed.ipvsadm()?, &["-C"])?;
                if checked && who.is_ours() {
                    self.daemon = Some(lvsd(&bed.director, services, directory)?);
                } else {
                    bed.restore(&ipvsadm(services)?)?;
                }
            }
            Contender::Nftables => {
                let rules = nftables(services)?;
                run_with_input(bed.director.command("nft").args(["-f", "-"]), &rules)?;
            }
            Contender::Haproxy => {
                let file = directory.join("haproxy.cfg");
                fs::write(&file, haproxy(services, checked)?)?;
                bed.run_instead(|host, cpu| {
                    let file = file.display().to_string();
                    host.spawn("taskset", &["-c", cpu, "haproxy", "-db", "-f", &file])
                })?;
            }
            Contender::Nginx => {
                let file = directory.join("nginx.conf");
                fs::write(&file, nginx(services, directory, checked)?)?;
                bed.run_instead(|host, cpu| {
                    let file = file.display().to_string();
                    host.spawn("taskset", &["-c", cpu, "nginx", "-c", &file])
                })?;
            }
            who => bail!("{} cannot balance services", who.name()),
        }
        if matches!(bed.who, Contender::Haproxy | Contender::Nginx) {
            for service in services {
                bed.director.wait_for_port("tcp", service.port)?;
            }
        }
        Ok(())
    }

    /// Starts the clients, which exit after the planned time.
    pub(super) fn ask(&self, bed: &Bed, services: &[Service], clients: &Clients) -> Result<Proc> {
        let own = std::env::current_exe()?.display().to_string();
        let mut words: Vec<String> = ["-c", "0", &own, "endpoint", "ask"]
            .map(Into::into)
            .to_vec();
        words.extend(services.iter().map(|one| format!("{VIP}:{}", one.port)));
        words.push(format!("--clients={}", clients.count));
        words.push(format!("--least={}", clients.set.least));
        words.push(format!("--most={}", clients.set.most));
        words.push(format!("--seed={}", clients.seed));
        words.push(format!("--for={:.0}", clients.seconds * 1e3));
        words.push(format!("--timeout={}", clients.timeout));
        words.push(format!("--sources={}", clients.sources));
        bed.client.spawn("taskset", &words)
    }

    pub(super) fn end(self, bed: &Bed) -> Result<()> {
        let Self {
            mut servers,
            daemon,
            directory,
        } = self;
        if let Some(mut daemon) = daemon {
            daemon.stop(Signal::SIGTERM)?;
        }
        if bed.who == Contender::Nftables {
            bed.director.sh("nft delete table ip farm")?;
        }
        servers.kill();
        drop(directory);
        Ok(())
    }
}

/// Returns the clients' reports after they have exited.
pub(super) fn asked(mut clients: Proc, seconds: f64) -> Result<Vec<Asked>> {
    let status = clients.wait(Duration::from_secs_f64(seconds + 10.0))?;
    let log = clients.log();
    let line = log.lines().last().unwrap_or_default();
    serde_json::from_str(line)
        .with_context(|| format!("the clients ({status}) printed no valid report:\n{log}"))
}

/// Parses a number at the end of a line of `ipvsadm`'s listing, with the suffix of a shortened
/// number.
pub(super) fn printed_number(word: &str) -> Option<f64> {
    let (digits, factor) = match word.char_indices().last()? {
        (at, 'K') => (&word[..at], 1e3),
        (at, 'M') => (&word[..at], 1e6),
        (at, 'G') => (&word[..at], 1e9),
        (at, 'T') => (&word[..at], 1e12),
        _ => (word, 1.0),
    };
    digits.parse::<f64>().ok().map(|number| number * factor)
}

/// Parses the output of `ipvsadm -Ln --rate`: for each service's port, connections, packets in and
/// out, and bytes in and out, per second.
pub(super) fn printed_rates(listing: &str) -> Vec<(u16, [f64; 5])> {
    let line = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        if words.next() != Some("TCP") {
            return None;
        }
        let port = words.next()?.rsplit_once(':')?.1.parse().ok()?;
        let numbers: Option<Vec<f64>> = words.map(printed_number).collect();
        Some((port, numbers?.try_into().ok()?))
    };
    listing.lines().filter_map(line).collect()
}

fn ipvsadm(services: &[Service]) -> Result<String> {
    let mut rules = String::new();
    for service in services {
        let (port, scheduler) = (service.port, service.scheduler);
        writeln!(rules, "-A -t {VIP}:{port} -s {scheduler}")?;
        for (server, (weight, _)) in service.servers.iter().enumerate() {
            let server = address(server);
            writeln!(
                rules,
                "-a -t {VIP}:{port} -r {server}:{port} -m -w {weight}"
            )?;
        }
    }
    Ok(rules)
}

/// Starts lvsd, which manages the servers of a running dataplane.
fn lvsd(director: &Host, services: &[Service], directory: &Path) -> Result<Proc> {
    let mut text = String::new();
    for service in services {
        let port = service.port;
        writeln!(
            text,
            "[[service]]\naddress = '{VIP}:{port}'\nscheduler = '{}'\nforward = 'nat'\n\
             check = {{ type = 'http', path = '/1', interval = '250ms', timeout = '250ms', rise = 2, fall = 2 }}",
            service.scheduler
        )?;
        for (server, (weight, _)) in service.servers.iter().enumerate() {
            let server = address(server);
            writeln!(
                text,
                "[[service.server]]\naddress = '{server}:{port}'\nweight = {weight}"
            )?;
        }
    }
    let file = directory.join("lvsd.toml");
    fs::write(&file, text)?;
    let program = programs::find("lvsd")?.display().to_string();
    let (file, state) = (file.display(), directory.join("state"));
    let words = [
        "-c".to_owned(),
        "1".to_owned(),
        program,
        "--attach".to_owned(),
        format!("--config={file}"),
        format!("--state={}", state.display()),
    ];
    let mut daemon = director.spawn("taskset", &words)?;
    let lvsadm = programs::find("lvsadm")?;
    let last = services.last().context("no service is given")?.port;
    let there = lvs_testbed::wait_until(
        "the dataplane to have lvsd's services",
        Duration::from_secs(10),
        || {
            let listing = director.run(&lvsadm, &["-Ln"]).unwrap_or_default();
            let lines = listing.lines().filter(|line| line.contains("Masq    1"));
            listing.contains(&format!("{VIP}:{last}")) && lines.count() > 0 || !daemon.is_running()
        },
    );
    there.with_context(|| daemon.log())?;
    Ok(daemon)
}

fn nftables(services: &[Service]) -> Result<String> {
    let mut text =
        "table ip farm {\n chain pre {\n  type nat hook prerouting priority -101\n".to_owned();
    for service in services {
        let port = service.port;
        let even = service.servers.iter().all(|(weight, _)| *weight == 1);
        let (order, sum): (_, u32) = if even {
            ("inc", u32::try_from(service.servers.len())?)
        } else {
            (
                "random",
                service.servers.iter().map(|(weight, _)| weight).sum(),
            )
        };
        write!(
            text,
            "  ip daddr {VIP} tcp dport {port} dnat to numgen {order} mod {sum} map {{ "
        )?;
        let mut first = 0;
        for (server, (weight, _)) in service.servers.iter().enumerate() {
            let (comma, last) = (if server > 0 { ", " } else { "" }, first + weight - 1);
            let places = if first == last {
                first.to_string()
            } else {
                format!("{first}-{last}")
            };
            write!(text, "{comma}{places} : {}", address(server))?;
            first = last + 1;
        }
        text += " }\n";
    }
    text += " }\n}\n";
    Ok(text)
}

/// Whether a proxy chooses servers by round robin; otherwise by their connections.
fn takes_turns(service: &Service) -> bool {
    matches!(service.scheduler, "rr" | "wrr")
}

fn haproxy(services: &[Service], checked: bool) -> Result<String> {
    let mut text = "global\n  nbthread 1\n  cpu-map 1 1\n  maxconn 3000\ndefaults\n  mode tcp\n  timeout connect 250ms\n  \
                    timeout client 60s\n  timeout server 60s\n  retries 3\n  option redispatch 1\n  option splice-auto\n"
        .to_owned();
    let check = if checked {
        " check inter 250ms fall 2 rise 2"
    } else {
        ""
    };
    for service in services {
        let port = service.port;
        let balance = match takes_turns(service) {
            true => "roundrobin",
            false => "leastconn",
        };
        writeln!(
            text,
            "listen l{port}\n  bind {VIP}:{port}\n  balance {balance}\n  timeout check 250ms"
        )?;
        for (server, (weight, _)) in service.servers.iter().enumerate() {
            let address = address(server);
            writeln!(
                text,
                "  server s{server} {address}:{port} weight {weight}{check}"
            )?;
        }
    }
    Ok(text)
}

fn nginx(services: &[Service], directory: &Path, checked: bool) -> Result<String> {
    let mut text = crate::compare::programs::load_stream();
    writeln!(
        text,
        "worker_processes 1;\nworker_cpu_affinity 10;\ndaemon off;\npid {}/nginx.pid;\nerror_log stderr crit;\n\
         worker_rlimit_nofile 19000;\nevents {{ worker_connections 9000; }}\nstream {{\n  proxy_connect_timeout 250ms;",
        directory.display()
    )?;
    let fails = if checked {
        "max_fails=1 fail_timeout=2s"
    } else {
        "max_fails=0"
    };
    for service in services {
        let port = service.port;
        let least = match takes_turns(service) {
            true => "",
            false => "least_conn; ",
        };
        write!(text, "  upstream u{port} {{ {least}")?;
        for (server, (weight, _)) in service.servers.iter().enumerate() {
            let address = address(server);
            write!(text, "server {address}:{port} weight={weight} {fails}; ")?;
        }
        writeln!(
            text,
            "}}\n  server {{ listen {VIP}:{port} backlog=8192; proxy_pass u{port}; }}"
        )?;
    }
    text += "}\n";
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTING: &str = "IP Virtual Server version 1.2.1 (size=4096)\n\
        Prot LocalAddress:Port                 CPS    InPPS   OutPPS    InBPS   OutBPS\n  \
        -> RemoteAddress:Port\n\
        TCP  10.73.0.1:8001                     12      340      560    14500    1234K\n  \
        -> 10.72.0.11:8001                       6      170      280     7250  617000\n";

    #[test]
    fn service_rates_of_listing_are_parsed() {
        let rates = printed_rates(LISTING);
        assert_eq!(rates, [(8001, [12.0, 340.0, 560.0, 14_500.0, 1_234_000.0])]);
        assert_eq!(printed_number("7M"), Some(7e6));
        assert_eq!(printed_number("x"), None);
        assert_eq!(printed_number(""), None);
    }

    #[test]
    fn weights_become_shares_in_nftables() {
        let service = Service {
            port: 80,
            scheduler: "wrr",
            servers: vec![(1, 1), (3, 1)],
        };
        let text = nftables(&[service]).expect("the rules can be written");
        assert!(
            text.contains("numgen random mod 4 map { 0 : 10.72.0.11, 1-3 : 10.72.0.12 }"),
            "{text}"
        );
    }
}
