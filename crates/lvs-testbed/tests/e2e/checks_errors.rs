//! Health checks whose connections fail: which errors set a server down, and how status and log
//! show them.

use std::fmt::Write as _;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, Host, Proc, Site, SiteOptions, Vip, programs, soon, wait_until};
use nix::sys::signal::Signal;

/// A program that serves HTTP, SMTP, the agent check and DNS (or UDP), for IPv4 and IPv6.
const SERVERS: &str = r#"
use IO::Socket::IP; use IO::Select; $SIG{PIPE} = 'IGNORE';
my $all = IO::Select->new; my (%greeting, %port);
for (['8080', ''], ['2525', "220 mx\r\n"], ['9707', "up\n"]) {
    my $s = IO::Socket::IP->new(LocalHost => '::', LocalPort => $_->[0], Listen => 64, ReuseAddr => 1) or die "$_->[0]: $@";
    $greeting{$s} = $_->[1]; $port{$s} = $_->[0]; $all->add($s);
}
my $udp = IO::Socket::IP->new(LocalHost => '::', LocalPort => 5300, Proto => 'udp') or die "udp: $@"; $all->add($udp);
while (1) { for my $s ($all->can_read) {
    if ($s == $udp) {
        my $from = $udp->recv(my $b, 1500); next unless defined $from && length $b > 2;
        substr($b, 2, 1) |= "\x80"; $udp->send($b, 0, $from);
    } elsif (exists $greeting{$s}) {
        my $c = $s->accept or next; $c->autoflush(1); print $c $greeting{$s}; $port{$c} = $port{$s}; $all->add($c);
    } elsif (!sysread $s, my $b, 4096) { $all->remove($s); close $s }
    elsif ($port{$s} == 8080) { print $s "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" }
    else { print $s "250 ok\r\n" }
} }
"#;

/// The kinds of checks that connect to a port, and their settings.
const KINDS: [(&str, &str); 7] = [
    ("tcp", "port = 8080"),
    ("http", "port = 8080, body = \"ok\""),
    ("https", "port = 8443"),
    ("smtp", "port = 2525"),
    ("agent", "port = 9707"),
    ("dns", "port = 5300"),
    ("udp", "port = 5300, payload = \"hello\", silence = \"up\""),
];

struct Checked {
    site: Site,
    lvsd: Proc,
    _servers: Vec<Proc>,
}

fn serve(host: &Host, dir: &str) -> Result<Vec<Proc>> {
    host.sh(&format!(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout {dir}/key -out {dir}/pem -days 2 -subj /CN=x 2>/dev/null"
    ))?;
    let conf = format!("{dir}/https.conf");
    fs::write(
        &conf,
        format!(
            "daemon off; pid {dir}/https.pid; error_log {dir}/https.err; events {{}} user root;\n\
             http {{ access_log off; client_body_temp_path {dir}/t1; proxy_temp_path {dir}/t2; fastcgi_temp_path {dir}/t3; uwsgi_temp_path {dir}/t4; scgi_temp_path {dir}/t5;\n\
             server {{ listen 8443 ssl; listen [::]:8443 ssl; ssl_certificate {dir}/pem; ssl_certificate_key {dir}/key; return 200; }} }}\n"
        ),
    )?;
    let servers = vec![
        host.spawn("perl", &["-e", SERVERS])?,
        host.spawn("nginx", &["-c", &conf, "-p", dir])?,
    ];
    for port in [8080, 2525, 9707, 8443] {
        host.wait_for_port("tcp", port)?;
    }
    host.wait_for_port("udp", 5300)?;
    // The host sends every ICMP error, without a rate limit.
    host.sysctl("ipv4/icmp_ratelimit", "0")?;
    host.sysctl("ipv6/icmp/ratelimit", "0")?;
    Ok(servers)
}

impl Checked {
    /// Starts an lvsd that checks one server by ping and with each of [`KINDS`], over IPv4 and IPv6.
    /// Waits until all checks succeed.
    fn start(label: &str) -> Result<Self> {
        let mut options = SiteOptions::with_servers(label, Forward::Nat, 1);
        options.vip = Vip::Dataplane;
        let site = Site::new(options)?;
        let dir = site.testbed.dir().display().to_string();
        let servers = serve(&site.servers[0], &dir)?;
        let mut text = String::from(
            "[dataplane]\ninterface = [\"eth0\", \"eth1\"]\n[api]\nlisten = \"127.0.0.1:9560\"\n",
        );
        for (n, (kind, more)) in KINDS.iter().chain(&[("ping", "")]).enumerate() {
            let separator = if more.is_empty() { "" } else { ", " };
            for (family, vip, server) in [
                ("4", site.vip.to_string(), site.real_address(0).to_string()),
                (
                    "6",
                    format!("[{}]", site.vip6),
                    format!("[{}]", site.real_address6(0)),
                ),
            ] {
                write!(
                    text,
                    "[[service]]\nname = \"{kind}{family}\"\naddress = \"{vip}:{}\"\nforward = \"nat\"\n\
                     check = {{ type = \"{kind}\"{separator}{more}, interval = \"200ms\", fast_interval = \"100ms\", timeout = \"5s\", fall = 2, rise = 1 }}\n\
                     [[service.server]]\naddress = \"{server}:80\"\n",
                    7000 + n
                )?;
            }
        }
        let path = site.testbed.dir().join("lvsd.toml");
        fs::write(&path, text)?;
        let path = path.display().to_string();
        let lvsd = site
            .director
            .spawn(programs::find("lvsd")?, &["--config", &path])?;
        let checked = Self {
            site,
            lvsd,
            _servers: servers,
        };
        checked.wait("up", |_, _| true)?;
        Ok(checked)
    }

    fn ask(&self, words: &str) -> Result<String> {
        let path = self.site.testbed.dir().join("lvsd.toml");
        let program = programs::find("lvsd")?;
        let (program, path) = (program.display(), path.display());
        self.site
            .director
            .sh(&format!("{program} --config {path} {words}"))
    }

    /// For each service: its name, and the health and the reason of its first server.
    fn states(&self) -> Vec<(String, String, String)> {
        let answer = self.ask("status --json").unwrap_or_default();
        let status: serde_json::Value = serde_json::from_str(&answer).unwrap_or_default();
        let services = status["services"].as_array().cloned().unwrap_or_default();
        let state = |service: serde_json::Value| {
            let server = &service["servers"][0];
            let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
            (
                text(&service["name"]),
                text(&server["health"]),
                text(&server["reason"]),
            )
        };
        services.into_iter().map(state).collect()
    }

    /// Waits until the servers that `are` selects by kind of check and IP version (`4` or `6`) are in
    /// `state`, and all others are up.
    fn wait(&self, state: &str, are: impl Fn(&str, &str) -> bool) -> Result<()> {
        let wanted = |name: &str| {
            let (kind, family) = name.split_at(name.len() - 1);
            if are(kind, family) { state } else { "up" }
        };
        let what = format!("the selected servers to be {state}, and all others to be up");
        wait_until(&what, Duration::from_secs(40), || {
            let now = self.states();
            !now.is_empty() && now.iter().all(|(name, is, _)| is == wanted(name))
        })
        .with_context(|| format!("{:#?}\nlvsd printed:\n{}", self.states(), self.lvsd.log()))
    }
}

/// The server is down until the rule of its firewall, or the route of the director, is removed.
#[test]
#[ignore = "long"]
fn check_refused_by_icmp_or_route_sets_server_down() -> Result<()> {
    let mut checked = Checked::start("checkicmp")?;
    let server = &checked.site.servers[0];
    for (family, table, reject) in [
        ("4", "ip", "icmp type prot-unreachable"),
        ("4", "ip", "icmp type admin-prohibited"),
        ("4", "ip", "icmp type host-unreachable"),
        ("6", "ip6", "icmpv6 type addr-unreachable"),
        ("6", "ip6", "icmpv6 type admin-prohibited"),
        ("6", "ip6", "icmpv6 type policy-fail"),
        ("6", "ip6", "icmpv6 type reject-route"),
    ] {
        server.sh(&format!(
            "nft 'table {table} f {{ chain i {{ type filter hook input priority 0; meta l4proto {{ tcp, udp }} reject with {reject}; }}; }}'"
        ))?;
        checked
            .wait("down", |kind, of| of == family && kind != "ping")
            .with_context(|| format!("the servers reject packets with {reject}"))?;
        server.sh(&format!("nft delete table {table} f"))?;
        checked.wait("up", |_, _| true)?;
    }
    let addresses = [
        format!("{}/32", checked.site.real_address(0)),
        format!("{}/128", checked.site.real_address6(0)),
    ];
    for route in ["prohibit", "blackhole", "unreachable"] {
        let change = |what: &str| {
            let [v4, v6] = &addresses;
            checked.site.director.sh(&format!(
                "ip route {what} {route} {v4} && ip -6 route {what} {route} {v6}"
            ))
        };
        change("add")?;
        checked
            .wait("down", |_, _| true)
            .with_context(|| format!("a {route} route"))?;
        change("del")?;
        checked.wait("up", |_, _| true)?;
    }
    checked.lvsd.stop_ok(Signal::SIGINT)?;
    Ok(())
}

/// The status and the metrics report the check until it can run again.
#[test]
fn check_blocked_by_filter_of_director_is_reported_and_keeps_server_up() -> Result<()> {
    let mut checked = Checked::start("checkown")?;
    let metric = |name: &str| {
        let answer = checked
            .site
            .director
            .sh("curl -s -m 60 http://127.0.0.1:9560/metrics")
            .unwrap_or_default();
        let line = format!("lvs_service_checks_not_made{{service=\"{name}\"");
        let line = answer.lines().find(|text| text.starts_with(&line));
        line.and_then(|line| line.rsplit(' ').next().map(str::to_owned))
    };
    let shown = |name: &str| {
        let answer = checked.ask("status").unwrap_or_default();
        let mut lines = answer.lines().skip_while(|line| !line.starts_with(name));
        lines
            .nth(1)
            .is_some_and(|line| line.contains("NOT CHECKED"))
    };
    let kinds = ["dns4", "udp4", "ping4", "dns6", "udp6", "ping6"];
    ensure!(!kinds.iter().any(|name| shown(name)));
    checked.site.director.sh(
        "nft 'table inet f { chain o { type filter hook output priority 0; udp dport 5300 drop; \
         icmp type echo-request drop; icmpv6 type echo-request drop; }; }'",
    )?;
    for name in kinds {
        let what = format!("lvsd to report that {name} is not checked");
        wait_until(&what, Duration::from_secs(40), || {
            shown(name) && metric(name).as_deref() == Some("1")
        })
        .with_context(|| format!("{:?}", checked.ask("status")))?;
    }
    let answer = || checked.ask("status --json").unwrap_or_default();
    wait_until(
        "the status to contain check_not_made and the metric to be 0",
        Duration::from_secs(40),
        || answer().contains("check_not_made") && metric("tcp4").as_deref() == Some("0"),
    )
    .with_context(answer)?;
    checked.wait("up", |_, _| true)?;
    checked.site.director.sh("nft delete table inet f")?;
    for name in kinds {
        let what = format!("lvsd to report that {name} is checked again");
        wait_until(&what, Duration::from_secs(40), || {
            !shown(name) && metric(name).as_deref() == Some("0")
        })
        .with_context(|| format!("{:?}", checked.ask("status")))?;
    }
    checked.lvsd.stop_ok(Signal::SIGINT)?;
    Ok(())
}

/// If a server stays down, the status and the log show the reason why its latest check failed.
#[test]
fn reason_of_a_down_server_follows_its_last_check() -> Result<()> {
    let mut options = SiteOptions::with_servers("reason", Forward::Nat, 1);
    options.vip = Vip::Dataplane;
    let site = Site::new(options)?;
    let text = format!(
        "[dataplane]\ninterface = [\"eth0\", \"eth1\"]\n[[service]]\nname = \"http4\"\naddress = \"{}\"\nforward = \"nat\"\n\
         check = {{ type = \"http\", port = 9027, interval = \"300ms\", timeout = \"5s\" }}\n[[service.server]]\naddress = \"{}:80\"\n",
        site.service(80),
        site.real_address(0)
    );
    let path = site.testbed.dir().join("lvsd.toml");
    fs::write(&path, text)?;
    let path = path.display().to_string();
    let lvsd = site
        .director
        .spawn(programs::find("lvsd")?, &["--config", &path])?;
    let mut checked = Checked {
        site,
        lvsd,
        _servers: Vec::new(),
    };
    let wait = |checked: &Checked, word: &str| {
        let what = format!("the server to be down because of {word:?}");
        wait_until(&what, Duration::from_secs(40), || {
            let states = checked.states();
            states
                .first()
                .is_some_and(|(_, health, reason)| health == "down" && reason.contains(word))
        })
        .with_context(|| format!("{:?}", checked.states()))
    };
    wait(&checked, "refused")?;
    let serve = |status: &str| {
        let program = format!(
            "use IO::Socket::INET; $s = IO::Socket::INET->new(LocalPort => 9027, Listen => 9, ReuseAddr => 1) or die; \
             while ($c = $s->accept) {{ sysread $c, $b, 4096; print $c \"HTTP/1.1 {status}\\r\\nContent-Length: 0\\r\\n\\r\\n\"; close $c }}"
        );
        checked.site.servers[0].spawn("perl", &["-e", &program])
    };
    for status in ["503 Busy", "500 Broken"] {
        let _server = serve(status)?;
        wait(&checked, &status[..3])?;
        soon("lvsd to log the failed check", || {
            let log = checked.lvsd.log();
            log.lines().any(|line| {
                line.contains("WARN")
                    && line.contains("service=http4")
                    && line.contains(&status[..3])
            })
        })
        .with_context(|| checked.lvsd.log())?;
    }
    wait(&checked, "refused")?;
    let down = checked.lvsd.log().matches("server is down, ").count();
    ensure!(
        down == 1,
        "the log does not report exactly once that the server is down: {}",
        checked.lvsd.log()
    );
    checked.lvsd.stop_ok(Signal::SIGINT)?;
    Ok(())
}
