//! Services that are hard to balance, behind one virtual address with two servers: which of them
//! work, and at which rates.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use lvs_testbed::netns::run_with_input;
use lvs_testbed::{Host, programs, servers};

use super::super::data::{Document, Value};
use super::super::peers::Peer;
use super::super::thesis::number;
use super::super::{Experiment, Measured, Plot, Turn, axis, log_axis, peers, plot, usual_bed};
use super::wiring::{self, SECOND, SECOND_VIP};
use crate::classic::{Fared, LPD, RSH, SESSIONS, TELNET, UDP};
use crate::compare::bed::{self, Bed, SERVER, VIP};
use crate::compare::contender::{Contender, Method};
use crate::compare::programs::load_stream;
use crate::machine::Snapshot;
use crate::yardsticks::Yardsticks;

/// The experiment with services that need persistence, several ports, connections from the server,
/// or UDP.
#[derive(Debug)]
pub(in super::super) struct Services;

const RATES: &str = "rates";
const BARS: [&str; 10] = [
    "telnet",
    "rsh",
    "lpd",
    "session",
    "session, mark",
    "session, port 0",
    "UDP file",
    "TFTP",
    "FTP, passive",
    "FTP, active",
];
const PEERS: [Peer; 7] = peers::named([
    "routing",
    "lvs-nat",
    "lvs-dr",
    "lvs-tunnel",
    "nftables",
    "haproxy",
    "nginx",
]);
/// Ports of the servers for passive FTP.
const PASSIVE: &str = "30000-30099";
const FILE: u64 = 16_384;
/// curl's message about a server that does not answer.
const TIMED_OUT: &str = "curl: (28) ";

impl Experiment for Services {
    fn name(&self) -> &'static str {
        "mack-services"
    }

    fn title(&self) -> &'static str {
        "Services with more than one port, behind one address (Mack, 2000)"
    }

    fn what(&self) -> &'static str {
        "Two servers have one virtual address; one client makes one transaction after another. \
         telnet: a key is echoed over a persistent connection. rsh: the client uses a reserved \
         port, and the server opens a second connection to the client. lpd: a file of 1,024 bytes \
         is printed, from a port of 721 to 731, as the server requires. session: the client logs \
         in at one port, and continues four times at another port, which only the same server \
         accepts: with round robin, with both ports under one firewall mark with persistence, and \
         with port 0 and persistence (other peers: by a hash of the client's address). UDP file: \
         the client requests each block of 1,024 bytes. TFTP and FTP: files of 16 KiB by dnsmasq, \
         vsftpd and curl, which is slow. FTP uses the dataplane's helper with lvs-nat, and \
         persistence with direct routing and tunnels; nftables, HAProxy and nginx forward the \
         servers' passive ports, by a hash of the client's address (curl uses EPSV, whose answer \
         has no address). A cross: the service does not work, and the notes give the reason. The \
         director forwards connections that servers open, and translates them to its own address. \
         routing is one server without a director, for comparison."
    }

    fn plots(&self) -> &'static [Plot] {
        const {
            &[plot(
                RATES,
                "Transactions a second, one after the other (a cross: does not work)",
                axis("service", "name"),
                log_axis("transactions", "1/s"),
            )]
        }
    }

    fn bars(&self, _: &Plot) -> &'static [&'static str] {
        &BARS
    }

    fn peers(&self) -> &'static [Peer] {
        &PEERS
    }

    fn is_quick(&self, peer: &Peer) -> bool {
        !["routing", "lvs-tunnel", "nginx"].contains(&peer.name)
    }

    fn seconds(&self, quick: bool) -> f64 {
        if quick { 1.3 } else { 4.0 }
    }

    fn programs(&self) -> &'static [&'static str] {
        &["vsftpd", "dnsmasq", "curl"]
    }

    fn bed(&self, peer: &Peer, yardsticks: &Yardsticks) -> Result<Bed> {
        let mut bed = usual_bed(peer, yardsticks)?;
        let second = wiring::second_server(&mut bed)?;
        balance(&mut bed, yardsticks.dir())?;
        let first = bed.server.clone();
        let www = first.dir().join("www");
        fs::create_dir_all(&www)?;
        fs::File::create(www.join("file"))?.set_len(FILE)?;
        for (host, name, address) in [(first, "one", SERVER), (second, "two", SECOND)] {
            let own = std::env::current_exe()?.display().to_string();
            let words = ["-c", "0", &own, "endpoint", "classic", name, address, VIP];
            bed.keep(bed::ready(host.spawn("taskset", &words)?)?);
            bed.keep(servers::vsftpd(&host, None)?);
            bed.keep(servers::tftp(&host, true)?);
        }
        Ok(bed)
    }

    fn measure(&self, turn: &Turn<'_>, bed: &mut Bed) -> Result<Measured> {
        let first = Snapshot::take();
        let own = std::env::current_exe()?.display().to_string();
        let (target, second) = match bed.target(false) {
            VIP => (VIP, SECOND_VIP),
            other => (other, other),
        };
        let time = if turn.quick { "--for=80" } else { "--for=300" };
        let words = [
            "60", "taskset", "-c", "0", &own, "endpoint", "use", target, second, time,
        ];
        let printed = bed.client.run("timeout", &words)?;
        let mut all: Vec<Fared> =
            serde_json::from_str(&printed).context("cannot parse the output of the client")?;
        let files = if turn.quick { 5 } else { 40 };
        let ftp = format!("ftp://{target}/www/file");
        all.push(fetch(
            &bed.client,
            "TFTP",
            &[],
            &format!("tftp://{target}/file"),
            files,
        )?);
        // By EPSV, whose answer has no address.
        all.push(fetch(&bed.client, "FTP, passive", &[], &ftp, files)?);
        let active = ["--disable-eprt", "--ftp-port", "-"];
        all.push(fetch(&bed.client, "FTP, active", &active, &ftp, files)?);
        let (cpu, disturbed) = peers::used_since(bed, &first)?;
        let mut values = Vec::new();
        for fared in all {
            let bar = (0_u8..).zip(BARS).find(|(_, name)| *name == fared.name);
            let (bar, name) =
                bar.with_context(|| format!("the plot has no bar for {}", fared.name))?;
            if let Some(error) = fared.error {
                turn.note(format!("{name} does not work: {error}"));
            }
            values.push(Value::new(RATES, bar.into(), fared.rate));
        }
        Ok((values, cpu, disturbed))
    }

    fn conclusions(&self, document: &Document) -> Vec<String> {
        let all = document.series(self.name(), RATES, &peers::of(self));
        let mut sentences = Vec::new();
        for (bar, name) in (0_u8..).zip(BARS) {
            let mut works = Vec::new();
            let mut fails = Vec::new();
            for series in &all {
                let mut points = series.points.iter();
                let Some((_, rate)) = points.find(|(x, _)| x.total_cmp(&bar.into()).is_eq()) else {
                    continue;
                };
                if rate.min > 0.0 {
                    works.push(format!(
                        "{} {:.0}/s ({:.0}-{:.0}, {})",
                        series.peer, rate.median, rate.min, rate.max, rate.rounds
                    ));
                } else if rate.max > 0.0 {
                    fails.push(format!("{} in some rounds", series.peer));
                } else {
                    fails.push(series.peer.clone());
                }
            }
            let fails = match fails.is_empty() {
                true => String::new(),
                false => format!("; it does not work through {}", fails.join(", ")),
            };
            if !works.is_empty() {
                sentences.push(format!("{name} works: {}{fails}.", works.join(", ")));
            }
        }
        sentences
    }
}

/// Fetches a file `files` times with curl. Only the time of each transfer counts, without curl's
/// start.
fn fetch(client: &Host, name: &str, words: &[&str], url: &str, files: usize) -> Result<Fared> {
    let begin = [
        "20",
        "taskset",
        "-c",
        "0",
        "curl",
        "-sS",
        "--fail-early",
        "--connect-timeout",
        "2",
        "-m",
        "3",
    ];
    let begin = [&begin, words].concat();
    let one = ["-o", "/dev/null", url];
    let format = ["-w", "%{time_total} %{size_download}\n"];
    let all = [begin.clone(), format.into(), one.repeat(files)].concat();
    let (mut rate, mut error) = (0.0, None);
    match client.run("timeout", &all) {
        Ok(printed) => {
            let times = timed(&printed)?;
            let sum: f64 = times.iter().sum();
            rate = number(times.len()) / sum.max(1e-6);
        }
        Err(failed) => {
            let failed = format!("{failed:#}");
            let reported = if failed.contains(TIMED_OUT) {
                failed.clone()
            } else {
                // Repeat the request, for the server's own message.
                let reported = client.run("timeout", &[&begin[..], &["-v"], &one].concat());
                reported.map_or_else(|error| format!("{error:#}"), |_| String::new())
            };
            error = Some(reason(&reported).unwrap_or(failed));
        }
    }
    Ok(Fared {
        name: name.to_owned(),
        rate,
        error,
    })
}

/// Why curl has failed, from its output with `-v`: the server's refusal, or else curl's own
/// message; `None` if the output has neither.
fn reason(reported: &str) -> Option<String> {
    let refused = |line: &&str| line.starts_with("< 4") || line.starts_with("< 5");
    let own = |line: &&str| line.starts_with("curl: (");
    let mut lines = reported.lines();
    let line = lines.clone().rfind(refused).or_else(|| lines.rfind(own))?;
    Some(line.trim_start_matches("< ").trim().to_owned())
}

/// Parses the seconds of each transfer. Fails unless each file has arrived completely.
fn timed(printed: &str) -> Result<Vec<f64>> {
    let one = |line: &str| {
        let (time, size) = line.split_once(' ')?;
        (size.parse() == Ok(FILE)).then(|| time.parse().ok())?
    };
    let times = printed.lines().map(|line| {
        one(line).with_context(|| format!("curl printed a line about an incomplete file: {line:?}"))
    });
    times.collect()
}

/// Configures a peer to balance all services, as its operator would.
fn balance(bed: &mut Bed, directory: &Path) -> Result<()> {
    match bed.who {
        Contender::Route => return Ok(()),
        Contender::AfPacket(method) => {
            let devices = bed.devices.clone();
            let helper: &[&str] = match method {
                Method::Nat => &["--helper", "ftp"],
                _ => &[],
            };
            wiring::restart(bed, &[&devices[1], &devices[2]], helper, &rules(method)?)?;
            let lvsadm = programs::find("lvsadm")?;
            let (first, last) = (SESSIONS[1].1, SESSIONS[1].1 + 1);
            let ports = format!("{first},{last}");
            let mark = [
                "mark",
                "add",
                "--destination",
                VIP,
                "--protocol",
                "tcp",
                "--ports",
                &ports,
                "--mark",
                "7",
            ];
            bed.director.run(lvsadm, &mark)?;
        }
        Contender::Nftables => {
            let rules = nftables()?;
            run_with_input(bed.director.command("nft").args(["-f", "-"]), &rules)?;
        }
        Contender::Haproxy => {
            let file = directory.join("services-haproxy.cfg");
            fs::write(&file, haproxy()?)?;
            start(bed, "haproxy", &["-db", "-f"], &file)?;
        }
        Contender::Nginx => {
            let file = directory.join("services-nginx.conf");
            fs::write(&file, nginx(directory)?)?;
            start(bed, "nginx", &["-c"], &file)?;
        }
        who => bail!("{} does not support these services", who.name()),
    }
    // The director routes the connections that servers open: those of active FTP and rsh.
    bed.director.sh("sysctl -qw net.ipv4.ip_forward=1")?;
    if !matches!(bed.who, Contender::AfPacket(Method::Dr | Method::Tunnel)) {
        // The servers' own addresses are not reachable from outside.
        run_with_input(
            bed.director.command("nft").args(["-f", "-"]),
            &format!(
                "table ip own {{\n chain post {{\n  type nat hook postrouting priority 100\n  \
                 ip saddr 10.72.0.0/24 ip daddr 10.71.0.0/24 snat to {VIP}\n }}\n}}\n"
            ),
        )?;
        bed.client.sh("ip route add blackhole 10.72.0.0/24")?;
    }
    Ok(())
}

fn start(bed: &mut Bed, program: &str, words: &[&str], file: &Path) -> Result<()> {
    let file = file.display().to_string();
    bed.run_instead(|host, cpu| {
        let words = [&["-c", cpu, program], words, &[file.as_str()]].concat();
        host.spawn("taskset", &words)
    })?;
    bed.director.wait_for_port("tcp", TELNET)
}

/// Ports whose connections are sent to the servers in turn.
fn in_turn() -> Vec<u16> {
    vec![TELNET, RSH, LPD, SESSIONS[0].1, SESSIONS[0].1 + 1]
}

fn rules(method: Method) -> Result<String> {
    let mut rules = String::new();
    let mut add = |service: String, options: &str, port: u16| -> Result<()> {
        writeln!(rules, "-A {service} -s rr {options}")?;
        for server in [SERVER, SECOND] {
            writeln!(
                rules,
                "-a {service} -r {server}:{port} {} -w 1",
                method.flag()
            )?;
        }
        Ok(())
    };
    for port in in_turn() {
        add(format!("-t {VIP}:{port}"), "", port)?;
    }
    let ftp = if method == Method::Nat { "" } else { "-p 300" };
    add(format!("-t {VIP}:21"), ftp, 21)?;
    for port in [69, UDP] {
        add(format!("-u {VIP}:{port}"), "", port)?;
    }
    add("-f 7".to_owned(), "-p 300", 0)?;
    add(format!("-t {SECOND_VIP}:0"), "-p 300", 0)?;
    Ok(rules)
}

fn nftables() -> Result<String> {
    let ports: Vec<String> = in_turn().iter().map(u16::to_string).collect();
    let (turns, mark) = (ports.join(", "), SESSIONS[1].1);
    let map = format!("map {{ 0 : {SERVER}, 1 : {SECOND} }}");
    Ok(format!(
        "table ip services {{\n chain pre {{\n  type nat hook prerouting priority -101\n\
         \x20 ip daddr {VIP} tcp dport {{ {turns} }} dnat to numgen inc mod 2 {map}\n\
         \x20 ip daddr {VIP} udp dport {{ 69, {UDP} }} dnat to numgen inc mod 2 {map}\n\
         \x20 ip daddr {VIP} tcp dport {{ 21, {mark}, {}, {PASSIVE} }} dnat to jhash ip saddr mod 2 {map}\n\
         \x20 ip daddr {SECOND_VIP} meta l4proto tcp dnat to jhash ip saddr mod 2 {map}\n }}\n}}\n",
        mark + 1
    ))
}

fn haproxy() -> Result<String> {
    let mut text = "global\n  nbthread 1\n  cpu-map 1 1\n  maxconn 3000\ndefaults\n  mode tcp\n  timeout connect 1s\n  \
                    timeout client 60s\n  timeout server 60s\n"
        .to_owned();
    let [_, (_, mark), (_, zero)] = SESSIONS;
    let mut add = |name: &str, binds: &[String], balance: &str| -> Result<()> {
        writeln!(text, "listen {name}\n  balance {balance}")?;
        for bind in binds {
            writeln!(text, "  bind {bind}")?;
        }
        // The server's port is the one to which the client has connected.
        writeln!(text, "  server one {SERVER}\n  server two {SECOND}")?;
        Ok(())
    };
    for port in in_turn() {
        add(
            &format!("port{port}"),
            &[format!("{VIP}:{port}")],
            "roundrobin",
        )?;
    }
    add("marked", &[format!("{VIP}:{mark}-{}", mark + 1)], "source")?;
    add(
        "ftp",
        &[format!("{VIP}:21"), format!("{VIP}:{PASSIVE}")],
        "source",
    )?;
    add(
        "all",
        &[format!("{SECOND_VIP}:{zero}-{}", zero + 1)],
        "source",
    )?;
    Ok(text)
}

fn nginx(directory: &Path) -> Result<String> {
    let [_, (_, mark), (_, zero)] = SESSIONS;
    let mut text = load_stream();
    writeln!(
        text,
        "worker_processes 1;\nworker_cpu_affinity 10;\ndaemon off;\npid {}/services-nginx.pid;\nerror_log stderr crit;\n\
         worker_rlimit_nofile 19000;\nevents {{ worker_connections 9000; }}\nstream {{\n  proxy_connect_timeout 1s;\n  \
         split_clients \"$remote_addr\" $one {{ 50% {SERVER}; * {SECOND}; }}\n  \
         server {{ listen {VIP}:21; listen {VIP}:{PASSIVE}; listen {VIP}:{mark}-{}; listen {SECOND_VIP}:{zero}-{}; \
         proxy_pass $one:$server_port; }}",
        directory.display(),
        mark + 1,
        zero + 1
    )?;
    let mut add = |port: u16, udp: &str| -> Result<()> {
        let name = format!("u{port}");
        writeln!(
            text,
            "  upstream {name} {{ server {SERVER}:{port}; server {SECOND}:{port}; }}\n  \
             server {{ listen {VIP}:{port}{udp}; proxy_pass {name}; }}"
        )?;
        Ok(())
    };
    for port in in_turn() {
        add(port, "")?;
    }
    for port in [69, UDP] {
        add(port, " udp")?;
    }
    text += "}\n";
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incomplete_file_of_curl_is_refused() {
        let times = timed("0.001500 16384\n0.002 16384\n").expect("the output is parsed");
        assert!((times.iter().sum::<f64>() - 0.0035).abs() < 1e-9);
        assert!(timed("0.001500 16383\n").is_err());
        assert!(timed("nonsense\n").is_err());
    }

    #[test]
    fn failed_curl_reports_its_reason() {
        let reported = "> PORT 1,2,3,4,5,6\r\n< 500 Illegal PORT command.\r\ncurl: (30) strange\n";
        assert_eq!(
            reason(reported).as_deref(),
            Some("500 Illegal PORT command.")
        );
        assert_eq!(
            reason("curl: (7) nobody\n").as_deref(),
            Some("curl: (7) nobody")
        );
        assert_eq!(reason(""), None);
        let silent = format!("exit status: 28\n{TIMED_OUT}Operation timed out\n");
        assert_eq!(
            reason(&silent).as_deref(),
            Some("curl: (28) Operation timed out")
        );
    }

    #[test]
    fn every_classic_service_of_mack_has_a_bar() {
        for name in ["telnet", "rsh", "lpd", "UDP file"]
            .into_iter()
            .chain(SESSIONS.map(|one| one.0))
        {
            assert!(BARS.contains(&name), "{name}");
        }
    }
}
