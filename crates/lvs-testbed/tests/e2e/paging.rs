//! Faults that page an operator. Until a fault is repaired, `lvsd status` names the faulty host or
//! service with a code, and no other. During load and reloads, it names no host; during a restart,
//! at most the restarted server or the dataplane.
//!
//! Other files also test such faults: `checks.rs` (a server with another gateway, or without the
//! VIP), `unanswered.rs` (the same faults, which no check detects), `checks_errors.rs` (the
//! director's own filter), `doctor.rs` (the MTU of tunnels, filters of the host), `failure.rs` (a
//! VIP of another host), `discovery.rs` (a dead name server), `lvsd.rs` (a typo in the file),
//! `cluster.rs` (failovers, which blame no server).

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, Host, Proc, Site, SiteOptions, Topology, Vip, programs, wait_until};
use nix::sys::signal::Signal;
use serde_json::Value;

/// A web server with a short accept queue. Its argument is a file whose first line sets the
/// server's behaviour: `hang`, `slow`, or an HTTP status.
const APP: &str = r#"
use IO::Socket::INET; $SIG{CHLD} = 'IGNORE';
my $s = IO::Socket::INET->new(LocalPort => 8081, Listen => 2, ReuseAddr => 1) or die;
while (1) {
    my $c = $s->accept or next;
    next if fork;
    open my $f, '<', $ARGV[0]; my $does = <$f>; sysread $c, my $b, 4096;
    if ($does =~ /hang/) { sysread $c, $b, 1; exit }
    select undef, undef, undef, 0.7 if $does =~ /slow/;
    print $c 'HTTP/1.1 ', $does =~ /(\d+)/ ? $1 : 200, " x\r\nContent-Length: 0\r\n\r\n"; exit;
}
"#;
/// Default settings of the checks in this file: intervals, timeout and thresholds.
const TIMES: &str =
    "interval = \"300ms\", fast_interval = \"100ms\", timeout = \"1s\", fall = 2, rise = 1";

struct Director {
    site: Site,
    lvsd: Proc,
}

/// A service in lvsd's configuration file: name, port, check, and numbers of its servers.
type Service<'a> = (&'a str, u16, &'a str, &'a [usize]);

impl Director {
    fn start(site: Site, services: &[Service<'_>]) -> Result<Self> {
        Self::start_with(site, services, TIMES)
    }

    fn start_with(site: Site, services: &[Service<'_>], times: &str) -> Result<Self> {
        let interfaces = match site.options.topology {
            Topology::TwoArm => "[\"eth0\", \"eth1\"]",
            Topology::OneArm | Topology::Routed => "\"eth0\"",
        };
        // With this `hang_limit`, the status shows a hung dataplane for 15 s before lvsd replaces
        // it.
        let mut text = format!(
            "[dataplane]\ninterface = {interfaces}\nwhen_full = \"evict\"\nhang_limit = \"20s\"\n"
        );
        for (name, port, check, servers) in services {
            let servers = servers.iter();
            let servers = servers.map(|&index| format!("\"{}:{port}\"", site.real_address(index)));
            text.push_str(&format!(
                "[[service]]\nname = \"{name}\"\naddress = \"{}\"\nscheduler = \"rr\"\nforward = \"{}\"\n\
                 check = {{ {check}, {times} }}\nservers = [{}]\n",
                site.service(*port),
                site.options.forward.word(),
                servers.collect::<Vec<_>>().join(", ")
            ));
        }
        let path = site.testbed.dir().join("lvsd.toml");
        fs::write(&path, text)?;
        let path = path.display().to_string();
        let lvsd = site
            .director
            .spawn(programs::find("lvsd")?, &["--config", &path])?;
        let director = Self { site, lvsd };
        let all_up = || {
            let status = director.status();
            let mut servers = servers(&status).into_iter();
            status["dataplane"]["connected"] == true
                && servers.all(|(_, server)| server["health"] == "up")
        };
        wait_until("all servers to be up", Duration::from_secs(30), all_up)
            .with_context(|| format!("{:#}\n{}", director.status(), director.lvsd.log()))?;
        Ok(director)
    }

    fn status(&self) -> Value {
        let path = self.site.testbed.dir().join("lvsd.toml");
        let program = programs::find("lvsd").unwrap_or_default();
        let (program, path) = (program.display(), path.display());
        let text = self
            .site
            .director
            .sh(&format!("{program} --config {path} status --json"));
        serde_json::from_str(&text.unwrap_or_default()).unwrap_or_default()
    }

    /// Waits until the status names exactly these faults, and prints how long it took.
    fn names(&self, what: &str, faults: &[String]) -> Result<()> {
        let began = Instant::now();
        let named = || named(&self.status());
        // The status shows a suspicion for a minute after its cause ends.
        let wanted = format!("lvsd status to name exactly the faults of: {what}");
        wait_until(&wanted, Duration::from_secs(90), || named() == faults).with_context(|| {
            let status = self.status();
            format!("{faults:?}\n{:?}\n{status:#}", named())
        })?;
        println!("{what}: {faults:?} after {:.1?}", began.elapsed());
        Ok(())
    }

    /// Causes a fault, checks that it is reported, and repairs it.
    fn scenario(
        &self,
        what: &str,
        host: &Host,
        [fault, repair]: [&str; 2],
        faults: &[String],
    ) -> Result<()> {
        host.sh(fault)?;
        self.names(what, faults)?;
        host.sh(repair)?;
        self.names("healed", &[]).context(what.to_owned())
    }

    /// The expected fault of a server, as [`named`] returns it.
    fn fault(&self, code: &str, service: &str, server: usize) -> String {
        format!("{code} {service} {}", self.site.real_address(server))
    }

    fn end(mut self) -> Result<()> {
        let status = self.lvsd.stop(Signal::SIGINT)?;
        ensure!(
            status.success(),
            "lvsd failed at its exit: {}",
            self.lvsd.log()
        );
        Ok(())
    }
}

/// All servers of a status, each with the name of its service.
fn servers(status: &Value) -> Vec<(&str, &Value)> {
    let mut all = Vec::new();
    for service in list(&status["services"]) {
        let name = service["name"].as_str().unwrap_or_default();
        all.extend(
            list(&service["servers"])
                .iter()
                .map(|server| (name, server)),
        );
    }
    all
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Returns the sorted faults of a status: a code, and the faulty object, such as a server or an
/// interface. `flapping` is omitted, because a server may fail three times in one test.
fn named(status: &Value) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut all = Vec::new();
    for (service, server) in servers(status) {
        let code = text(&server["code"]);
        let address = text(&server["server"]);
        let ip = address.split(':').next().unwrap_or_default();
        if !["", "flapping"].contains(&code.as_str()) {
            all.push(format!("{code} {service} {ip}"));
        }
    }
    let dataplane = &status["dataplane"];
    for interface in list(&dataplane["down"]) {
        all.push(format!("down {}", text(&interface["interface"])));
    }
    for hop in list(&dataplane["silent_hops"]) {
        all.push(format!("silent_hop {}", text(&hop["address"])));
    }
    for conflict in list(&dataplane["conflicts"]) {
        let (address, host) = (text(&conflict["address"]), text(&conflict["host"]));
        all.push(format!("conflict {address} {host}"));
    }
    let is_late = dataplane["seen_ms"].as_u64().is_none_or(|age| age >= 5_000);
    if dataplane["connected"] != true || is_late {
        all.push("dataplane".to_owned());
    }
    all.sort_unstable();
    all
}

fn site(label: &str, forward: Forward, topology: Topology, servers: usize) -> Result<Site> {
    let mut options = SiteOptions::new(label, forward);
    options.topology = topology;
    options.servers = servers;
    options.vip = Vip::Dataplane;
    options.ip_forward = true;
    let site = Site::new(options)?;
    for interface in ["all", "eth0", "eth1"] {
        let file = format!("/proc/sys/net/ipv4/conf/{interface}/rp_filter");
        site.director
            .sh(&format!("[ ! -e {file} ] || echo 0 > {file}"))?;
    }
    Ok(site)
}

/// Creates a CA, a valid certificate and an expired certificate. Returns their directory.
fn certificates(site: &Site) -> Result<String> {
    let dir = site.testbed.dir().display().to_string();
    site.director.sh(&format!(
        "cd {dir} && openssl ecparam -name prime256v1 -genkey -noout -out key && printf 'subjectAltName=DNS:x\\n' > ext && \
         openssl req -x509 -key key -days 2 -subj /CN=ca -out ca && openssl req -new -key key -subj /CN=x -out csr && \
         for days in 2 -1; do openssl x509 -req -in csr -CA ca -CAkey key -CAcreateserial -days $days -extfile ext \
         -out days$days 2>/dev/null; done"
    ))?;
    Ok(dir)
}

fn tls(host: &Host, dir: &str, certificate: &str) -> Result<Proc> {
    let (certificate, key) = (format!("{dir}/{certificate}"), format!("{dir}/key"));
    let server = host.spawn(
        "openssl",
        &[
            "s_server",
            "-accept",
            "8443",
            "-www",
            "-quiet",
            "-cert",
            &certificate,
            "-key",
            &key,
        ],
    )?;
    host.wait_for_port("tcp", 8443)?;
    Ok(server)
}

/// Script that adds a filter rule to a host; the rule drops or rejects packets.
fn filter(hook: &str, rule: &str) -> String {
    format!("nft 'table inet f {{ chain c {{ type filter hook {hook} priority 0; {rule}; }}; }}'")
}

const NO_FILTER: &str = "nft delete table inet f";

#[test]
#[ignore = "long"]
fn faults_of_nat_services_are_reported_until_repaired() -> Result<()> {
    let site = site("pagenat", Forward::Nat, Topology::OneArm, 2)?;
    let dir = certificates(&site)?;
    let mode = format!("{dir}/mode");
    fs::write(&mode, "200\n")?;
    let app = site.servers[0].spawn("perl", &["-e", APP, &mode])?;
    let mut secure = tls(&site.servers[0], &dir, "days2")?;
    site.servers[0].wait_for_port("tcp", 8081)?;
    let ca = format!("type = \"https\", host = \"x\", ca = \"{dir}/ca\"");
    let services: &[Service<'_>] = &[
        ("web", 80, "type = \"http\", path = \"/s/20011\"", &[0, 1]),
        ("app", 8081, "type = \"http\"", &[0]),
        ("tls", 8443, &ca, &[0]),
    ];
    let director = Director::start(site, services)?;
    let site = &director.site;
    let of = |code: &str, service: &str, server| vec![director.fault(code, service, server)];

    // The server is slow, overloaded, or no longer accepts connections.
    let behaves = |mode_now: &str, what: &str, code: &str| {
        fs::write(&mode, mode_now)?;
        director.names(what, &of(code, "app", 0))?;
        fs::write(&mode, "200\n")?;
        director.names("healed", &[])
    };
    behaves("slow\n", "a slow server", "slow")?;
    behaves("hang\n", "a server without replies", "stalled")?;
    behaves("500\n", "a server with errors", "check_failed")?;
    app.signal(Signal::SIGSTOP)?;
    director.names("a full backlog", &of("silent", "app", 0))?;
    app.signal(Signal::SIGCONT)?;
    director.names("healed", &[])?;
    let status = director.status();
    let all = servers(&status);
    let app_now = all.iter().find(|(name, _)| *name == "app");
    let (_, app_now) = app_now.context("the status does not list app")?;
    ensure!(
        app_now["code"] == "flapping",
        "app is not reported as flapping after it went down three times: {app_now}"
    );

    secure.kill();
    let mut secure = tls(&site.servers[0], &dir, "days-1")?;
    director.names("an expired certificate", &of("certificate", "tls", 0))?;
    secure.kill();
    let _secure = tls(&site.servers[0], &dir, "days2")?;
    director.names("healed", &[])?;

    // These commands set filters and links of a server.
    let server = &site.servers[1];
    for (what, hook, rule, code) in [
        (
            "long packets are lost",
            "output",
            "tcp sport 80 meta length > 1400 drop",
            "stalled",
        ),
        (
            "a filter of a server",
            "input",
            "tcp dport 80 reject with icmp type admin-prohibited",
            "filtered",
        ),
        (
            "no listener",
            "input",
            "tcp dport 80 reject with tcp reset",
            "refused",
        ),
        (
            "a link that drops one direction",
            "output",
            "drop",
            "silent",
        ),
    ] {
        let fault = filter(hook, rule);
        director.scenario(what, server, [&fault, NO_FILTER], &of(code, "web", 1))?;
    }

    // The router between the director and the clients.
    let router = site
        .router
        .as_ref()
        .context("the one-arm site has a router")?;
    let client = format!(
        "while :; do curl -s -m 1 -o /dev/null http://{}/id; sleep 0.3; done",
        site.vip
    );
    let load = site.client.spawn("sh", &["-c", &client])?;
    let ignore = |value| format!("echo {value} > /proc/sys/net/ipv4/conf/eth1/arp_ignore");
    director.scenario(
        "a router that does not answer ARP",
        router,
        [&ignore(8), &ignore(0)],
        &["silent_hop 192.0.2.254".to_owned()],
    )?;
    drop(load);

    let all: Vec<String> = [("app", 0), ("tls", 0), ("web", 0), ("web", 1)]
        .iter()
        .map(|(service, server)| director.fault("unreachable", service, *server))
        .collect();
    director.scenario(
        "an interface that is down",
        &site.director,
        [
            "ip link set eth0 down",
            "ip link set eth0 up; ip route add default via 192.0.2.254",
        ],
        &[vec!["down eth0".to_owned()], all].concat(),
    )?;

    let hung = director.status()["dataplane"]["pid"].clone();
    director.scenario(
        "a dataplane that hangs",
        &site.director,
        [&format!("kill -STOP {hung}"), "true"],
        &["dataplane".to_owned()],
    )?;
    let pid = director.status()["dataplane"]["pid"].clone();
    ensure!(pid != hung, "the hanging dataplane was not replaced: {pid}");
    director.end()
}

/// The kernel reports a silent neighbour only to some of the checks; the others get no answer.
#[test]
fn dead_server_has_one_code_until_it_answers() -> Result<()> {
    let site = site("pagedead", Forward::Nat, Topology::TwoArm, 2)?;
    let services: &[Service<'_>] = &[
        ("web", 80, "type = \"http\", path = \"/s/1\"", &[0, 1]),
        ("echo", 81, "type = \"ping\"", &[0, 1]),
    ];
    let director = Director::start(site, services)?;
    let server = &director.site.servers[1];
    let faults = |code| ["echo", "web"].map(|service| director.fault(code, service, 1));
    server.sh("ip link set eth0 down")?;
    director.names("a dead server", &faults("next_hop"))?;
    let mut several_checks = director.site.client.spawn("sleep", &["8"])?;
    while several_checks.is_running() {
        let now = named(&director.status());
        ensure!(
            now == faults("next_hop"),
            "the code of a dead server has changed: {now:?}"
        );
    }
    // The server answers ARP, and nothing else.
    server.sh(&filter("input", "drop"))?;
    server.sh("ip link set eth0 up; ip route replace default via 10.0.0.1")?;
    director.names("a server that drops all packets", &faults("silent"))?;
    server.sh(NO_FILTER)?;
    director.names("healed", &[])?;
    director.end()
}

/// Direct routing with two arms: the interface on which the director receives replies to its own
/// packets is not the interface towards the VIP.
#[test]
fn faults_of_direct_routing_services_are_reported_until_repaired() -> Result<()> {
    let site = site("pagedr", Forward::Dr, Topology::TwoArm, 2)?;
    let check = "type = \"http\", path = \"/s/1\", via = \"service\"";
    let director = Director::start(site, &[("web", 80, check, &[0, 1])])?;
    let of = |code: &str, servers: &[usize]| -> Vec<String> {
        let servers = servers.iter();
        servers
            .map(|&server| director.fault(code, "web", server))
            .collect()
    };
    let host = &director.site.director;
    let filter_of_host = |value| format!("echo {value} > /proc/sys/net/ipv4/conf/eth1/rp_filter");
    director.scenario(
        "a strict rp_filter of the director",
        host,
        [&filter_of_host(1), &filter_of_host(0)],
        &of("reverse_path", &[0, 1]),
    )?;
    let vip = director.site.vip;
    let address = |change: &str| format!("ip addr {change} {vip}/32 dev lo");
    director.scenario(
        "a server without the VIP",
        &director.site.servers[1],
        [&address("del"), &address("add")],
        &of("client_path", &[1]),
    )?;
    let refuses = filter(
        "input",
        &format!(
            "ip daddr {} tcp dport 80 reject with tcp reset",
            director.site.vip
        ),
    );
    director.scenario(
        "a server that listens on its own address only",
        &director.site.servers[1],
        [&refuses, NO_FILTER],
        &of("refused", &[1]),
    )?;
    director.end()
}

#[test]
fn strict_rp_filter_of_tunnel_server_is_reported_until_repaired() -> Result<()> {
    let site = site("pagetun", Forward::Tun, Topology::Routed, 2)?;
    let check = "type = \"http\", path = \"/s/1\", via = \"service\"";
    let director = Director::start(site, &[("web", 80, check, &[0, 1])])?;
    let set = |value| {
        let device = lvs_testbed::decap::RECEIVER;
        format!("echo {value} > /proc/sys/net/ipv4/conf/{device}/rp_filter")
    };
    director.scenario(
        "a strict rp_filter of a server",
        &director.site.servers[1],
        [&set(1), &set(0)],
        &[director.fault("client_path", "web", 1)],
    )?;
    director.end()
}

/// The faults affect only clients; all checks succeed.
#[test]
#[ignore = "long"]
fn servers_unreachable_only_for_clients_are_reported_until_repaired() -> Result<()> {
    let site = site("pagecli", Forward::Nat, Topology::OneArm, 3)?;
    let director = Director::start(site, &[("web", 80, "type = \"tcp\"", &[0, 1, 2])])?;
    let site = &director.site;
    let client = format!(
        "while :; do curl -s -m 5 -o /dev/null http://{}/id & sleep 0.2; done",
        site.vip
    );
    let _load = site.client.spawn("sh", &["-c", &client])?;
    let blamed = [1, 2].map(|server| director.fault("clients_unanswered", "web", server));
    site.servers[1].sh(&filter("input", "ip saddr 198.51.100.0/24 drop"))?;
    site.servers[2].sh("ip route add 198.51.100.0/24 via 192.0.2.99")?;
    director.names("a filter against clients, a wrong route to them", &blamed)?;
    site.servers[1].sh(NO_FILTER)?;
    site.servers[2].sh("ip route del 198.51.100.0/24")?;
    director.names("healed", &[])?;
    director.end()
}

#[test]
#[ignore = "long"]
fn server_that_answers_arp_for_vip_is_reported_until_repaired() -> Result<()> {
    let site = site("pagevip", Forward::Dr, Topology::OneArm, 2)?;
    let check = "type = \"http\", path = \"/s/1\", via = \"service\"";
    let director = Director::start(site, &[("web", 80, check, &[0, 1])])?;
    let set = |value| {
        format!(
            "for i in all eth0 lo; do echo {value} > /proc/sys/net/ipv4/conf/$i/arp_ignore; done"
        )
    };
    let (vip, server) = (director.site.vip, director.site.real_address(1));
    director.scenario(
        "a server that answers ARP for the VIP",
        &director.site.servers[1],
        [&set(0), &set(1)],
        &[format!("conflict {vip} {server}")],
    )?;
    director.end()
}

/// Checks that the status names no fault until `process` exits, except faults that contain
/// `blamed` if it is not empty. The process must exit with status 0.
fn is_quiet(director: &Director, what: &str, mut process: Proc, blamed: &str) -> Result<()> {
    loop {
        let last = !process.is_running();
        let named = named(&director.status());
        let false_blame = named
            .iter()
            .any(|fault| blamed.is_empty() || !fault.contains(blamed));
        ensure!(!false_blame, "a fault is reported: {what}: {named:?}");
        if last {
            break;
        }
    }
    let status = process.wait(Duration::from_secs(1))?;
    ensure!(
        status.success(),
        "the program failed: {what}: {status}: {}",
        process.log()
    );
    Ok(())
}

/// A flood, a port scan, clients that vanish, and reloads are no faults. While a server restarts,
/// only it may be named, and while a killed dataplane is replaced, only the dataplane.
#[test]
#[ignore = "long"]
fn no_healthy_host_is_blamed_during_floods_scans_restarts_and_reloads() -> Result<()> {
    let site = site("pagenone", Forward::Nat, Topology::TwoArm, 3)?;
    // The flood uses the processors of the checks, too.
    let times =
        "interval = \"500ms\", fast_interval = \"500ms\", timeout = \"10s\", fall = 2, rise = 1";
    let services: &[Service<'_>] = &[("web", 80, "type = \"http\", path = \"/s/1\"", &[0, 1, 2])];
    let director = Director::start_with(site, services, times)?;
    let site = &director.site;
    let mut load = site.load();
    load.concurrency = 4;
    load.pause_ms = 20;
    let steady = site.client.steady_load(&load)?;

    let mac = site.director.sh("cat /sys/class/net/eth0/address")?;
    let flood = [
        "strike".to_owned(),
        "syn".to_owned(),
        format!("--mac={}", mac.trim()),
        format!("--vip4={}", site.vip),
        format!("--vip6={}", site.vip6),
        format!("--other4={}", site.vip),
        "--director4=192.0.2.1".to_owned(),
        "--director6=fd00:192::1".to_owned(),
        "--rate=200000".to_owned(),
        format!("--for={}", lvs_testbed::suite::size(5_000, 30_000)),
    ];
    let flood = site.client.spawn(programs::own()?, &flood)?;
    is_quiet(&director, "200,000 SYNs a second", flood, "")?;

    let scan = format!(
        r#"use Socket; use Fcntl;
        for my $port (1 .. 4000) {{
            socket(my $s, PF_INET, SOCK_STREAM, 0) or die $!;
            fcntl($s, F_SETFL, O_NONBLOCK);
            connect($s, pack_sockaddr_in($port, inet_aton("{}")));
            push @all, $s; splice @all, 0, 100 if @all > 200;
            select undef, undef, undef, 0.001;
        }}"#,
        site.vip
    );
    let scan = site.client.spawn("perl", &["-e", &scan])?;
    is_quiet(&director, "a port scan", scan, "")?;

    // Some clients vanish before the SYN-ACK arrives, others after it.
    let vanish = format!(
        "for i in $(seq 100); do curl -s -m 5 -o /dev/null --limit-rate 20k http://{}/s/300007 & done; sleep 1; {}; \
         for i in $(seq 100); do curl -s -m 5 -o /dev/null http://{}/id & done; sleep 3; {NO_FILTER}; wait; true",
        site.vip,
        filter("input", "tcp sport 80 tcp dport 33000-40000 drop"),
        site.vip
    );
    site.client
        .sh("echo 33000 40000 > /proc/sys/net/ipv4/ip_local_port_range")?;
    let vanish = site.client.spawn("sh", &["-c", &vanish])?;
    is_quiet(&director, "clients that vanish", vanish, "")?;
    site.client
        .sh("echo 20000 32000 > /proc/sys/net/ipv4/ip_local_port_range")?;

    // A restarting server refuses connections; the status names only this server.
    for (index, server) in site.servers.iter().enumerate() {
        let address = site.real_address(index).to_string();
        let restart = format!(
            "{}; sleep 3; {NO_FILTER}; sleep 2",
            filter("input", "tcp dport 80 reject with tcp reset")
        );
        let restart = server.spawn("sh", &["-c", &restart])?;
        is_quiet(&director, "a restarting server", restart, &address)?;
        director.names("restarted", &[])?;
    }

    let lvsd = programs::find("lvsd")?.display().to_string();
    let path = site.testbed.dir().join("lvsd.toml").display().to_string();
    let reloads = format!(
        "for i in $(seq {}); do {lvsd} --config {path} reload > /dev/null || exit 1; done",
        lvs_testbed::suite::size(100, 1000)
    );
    let reloads = site.director.spawn("sh", &["-c", &reloads])?;
    is_quiet(&director, "reloads", reloads, "")?;

    // The status names only the dataplane while it is replaced.
    let pid = director.status()["dataplane"]["pid"].clone();
    let kill = format!("kill -KILL {pid}; sleep 5");
    let kill = site.director.spawn("sh", &["-c", &kill])?;
    is_quiet(&director, "a killed dataplane", kill, "dataplane")?;
    director.names("healed", &[])?;
    // Restarts have broken connections, so that failed requests are accepted.
    drop(steady);
    director.end()
}
