//! Examples, unknown keys and the format of errors, and common functions of the tests of the
//! configuration.

use super::*;
use crate::cases::cases;
use crate::expand::{Expanded, expand};
use crate::health::Probe;
use crate::sources::Gathered;

mod dataplane;
mod forwarding;
mod refused;
mod reports;
mod services;
mod sources;

const EXAMPLES: [(&str, &str); 9] = [
    ("nat.toml", include_str!("../../../../../examples/nat.toml")),
    ("dr.toml", include_str!("../../../../../examples/dr.toml")),
    ("tun.toml", include_str!("../../../../../examples/tun.toml")),
    ("gue.toml", include_str!("../../../../../examples/gue.toml")),
    (
        "two-directors.toml",
        include_str!("../../../../../examples/two-directors.toml"),
    ),
    (
        "web-modern.toml",
        include_str!("../../../../../examples/web-modern.toml"),
    ),
    (
        "many-directors/lvsd.toml",
        include_str!("../../../../../examples/many-directors/lvsd.toml"),
    ),
    ("full.toml", FULL),
    (
        "checks.toml",
        include_str!("../../../../../examples/checks.toml"),
    ),
];

/// A configuration with most tables and keys.
const FULL: &str = r#"
[lvsd]
manage_all_services = true
log = "debug"
max_removed_percent = 20
manual_changes = "report"

[dataplane]
interface = ["eth0", "eth1"]
backend = "af_packet"
workers = 1
socket = "/run/lvs/dataplane.sock"
group = "adm"
readers = "4"
hang_limit = "5s"
profile = "kernel"
own_vips = false
helper = "ftp"
echo = "drop"
reverse_path = "strict"
fast_path = "auto"
warm_restart = "auto"
xdp = "eth1"
confine = "off"
clamp_mss = "auto"
icmp_limit = 0
max_connections = 1000000
max_ipv6 = 1000
when_full = "drop"
program = "/usr/sbin/lvs-dataplane"

[vrrp]
interface = "eth0"
router_id = 51
priority = 160
advert = "1s"
peers = ["192.0.2.2"]
host_addresses = ["10.0.0.254/24 dev eth1"]
track_file = "/run/lvs/vrrp.track"
fifo = "/run/lvs/vrrp.fifo"

[announce]
withdraw_delay = "10s"
hold_without_lvsd = "5m"

[sync.ipvs]
role = "both"
interface = "eth2"
syncid = 5
group = "224.0.0.81"
port = 8848
ttl = 1
maxlen = 1400

[sync.peers]
addresses = ["192.0.2.2", "[2001:db8::3]:8849"]
key_file = "/etc/lvsd/sync.key"
listen = "192.0.2.1"
connect_timeout = "30s"
mismatch_alarm_after = "1m"

[sysctl]
conn_reuse_mode = 1
sync_threshold = "3 50"

[[service]]
name = "one"
address = "[2001:db8::1]:443"
protocol = "tcp"
scheduler = "sh"
scheduler_flags = ["sh-port", "sh-fallback"]
forward = "tun"
tunnel = { type = "gue", port = 6080, checksum = "remote" }
vip = "own"
on_check_failure = "quiesce"
check = "none"

[service.persistence]
timeout = "10m"
netmask = 64

[[service.server]]
address = "[2001:db8::11]:443"
weight = 2
forward = "tun"
tunnel = { type = "gre", checksum = "full" }
max_connections = 10
resume_below = 5

[service.server.check]
type = "tcp"
interval = "500ms"
timeout = "500ms"
rise = 1
fall = 1
port = 8443

[[mark]]
interface = "eth0"
source = "2001:db8:1::/64"
destination = "2001:db8::7"
protocol = "udp"
ports = "53,5000-5010"
mark = 7

[[service]]
fwmark = 7
family = "ipv6"
one_packet = true
forward = "nat"
on_check_failure = "remove"
on_server_down = "drop"
slow_start = "1m"
drain = "5m"
check = "none"

[[service.server]]
address = "2001:db8::2"

[[service]]
address = "192.0.2.1:5060"
protocol = "udp"
one_packet = true
forward = "nat"
vip = "host"
persistence = { timeout = "1h", engine = "sip" }
check = "none"

[[service.server]]
address = "10.0.0.1:5060"

[[service]]
address = "192.0.2.3:80"
forward = "tun"
vip = "announce"
check = "none"

[[service.server]]
address = "10.0.0.3:80"
"#;

fn load(text: &str) -> Config {
    Config::from_toml("test.toml", text)
        .unwrap_or_else(|report| panic!("{report}"))
        .0
}

/// Expands a file without answers of DNS, etcd and Kubernetes.
fn alone(config: &Config) -> Expanded {
    expand(config, &Gathered::default())
}

fn errors(text: &str) -> String {
    Config::from_toml("test.toml", text)
        .expect_err("the invalid text is accepted")
        .to_string()
}

fn report(text: &str) -> Report {
    match Config::from_toml("test.toml", text) {
        Ok((_, warnings)) => warnings,
        Err(report) => report,
    }
}

/// Position and title of each finding in `text`.
fn reported(text: &str) -> Vec<String> {
    let report = report(text);
    let place = |finding: &Diagnostic| {
        let before = &text[..finding.primary.0.start];
        let line = 1 + before.matches('\n').count();
        let column = 1 + before
            .rsplit('\n')
            .next()
            .map_or(0, |line| line.chars().count());
        format!("{line}:{column} {}", finding.title)
    };
    report.findings.iter().map(place).collect()
}

#[test]
fn every_type_of_check_except_banner_has_an_example() {
    let text = include_str!("../../../../../examples/checks.toml");
    for kind in Probe::KINDS {
        let word = format!("type = \"{}\"", kind.name);
        assert!(text.contains(&word) || kind.name == "banner", "{word}");
    }
}

#[test]
fn examples_and_full_file_load_without_a_warning() {
    for (name, text) in EXAMPLES {
        let (config, warnings) =
            Config::from_toml(name, text).unwrap_or_else(|report| panic!("{report}"));
        assert!(!config.services.is_empty(), "{name}");
        assert!(warnings.findings.is_empty(), "{name}: {warnings}");
    }
}

/// Adds a key after every table header and to every inline table of the examples.
#[test]
fn unknown_key_is_refused_in_each_table() {
    let mut tried = 0;
    for (name, text) in EXAMPLES {
        let lines: Vec<&str> = text.lines().collect();
        for (n, line) in lines.iter().enumerate() {
            let mut mutated: Vec<String> = lines.iter().map(|l| (*l).to_owned()).collect();
            if line.starts_with('[') {
                mutated.insert(n + 1, "zzz_unknown = 1".to_owned());
            } else if !line.starts_with('#')
                && let Some(at) = line.find("= { ")
            {
                mutated[n].insert_str(at + 4, "zzz_unknown = 1, ");
            } else {
                continue;
            }
            tried += 1;
            let found = errors(&mutated.join("\n"));
            let sysctl = *line == "[sysctl]";
            let wanted = if sysctl {
                "unknown sysctl `zzz_unknown`"
            } else {
                "unknown key `zzz_unknown`"
            };
            assert!(found.contains(wanted), "{name}, line {}: {found}", n + 1);
        }
        let top = format!("zzz_unknown = 1\n{text}");
        assert!(errors(&top).contains("unknown key `zzz_unknown`"));
    }
    assert!(tried > 25, "only {tried} tables were found");
}

#[test]
fn examples_and_full_file_are_parsed_with_defaults() {
    let config = load(EXAMPLES[0].1);
    let web = &config.services[0];
    assert_eq!(web.config.scheduler, "wlc");
    assert_eq!(web.vip, VipMode::Auto);
    assert_eq!(web.on_check_failure, OnCheckFailure::Quiesce);
    assert_eq!(web.servers[0].config.weight, 1);
    let check = web.servers[2].check.as_ref();
    let check = check.expect("the server has a check");
    assert_eq!(check.server, "10.0.0.13:8080".parse().unwrap());
    assert_eq!(check.probe.target(check.server), "10.0.0.13:8080");
    assert_eq!((check.rise, check.fall), (2, 3));

    let dr = load(EXAMPLES[1].1);
    assert_eq!(
        dr.services[0].servers[0].address,
        "192.0.2.11:80".parse().unwrap()
    );
    assert_eq!(dr.services[1].on_check_failure, OnCheckFailure::Remove);
    assert_eq!(dr.services[1].config.netmask, 0xffff_ff00);
    assert_eq!(dr.services[1].config.timeout, 600);

    let full = load(FULL);
    assert_eq!(
        full.dataplane.arguments().collect::<Vec<_>>().join(" "),
        "--backend af_packet --clamp-mss auto --confine off --echo drop --fast-path auto --group adm --helper ftp --icmp-limit 0 --interface eth0 --interface eth1 \
         --max-connections 1000000 --max-ipv6 1000 --profile kernel --readers 4 --reverse-path strict --warm-restart auto --when-full drop --workers 1 --xdp eth1 \
         --sync-peer 192.0.2.2 --sync-peer [2001:db8::3]:8849 --sync-key /etc/lvsd/sync.key --sync-listen 192.0.2.1 --sync-wait 30 --sync-alarm 60"
    );
    assert_eq!(full.services[0].config.flags.0, 0x1 | 0x8 | 0x10);
    assert_eq!(full.services[1].name, "mark 7 ipv6");
    assert_eq!(full.services[1].servers[0].address.port(), 0);
    assert_eq!(
        alone(&full).own_vips(|_| false),
        ["2001:db8::1".parse::<IpAddr>().unwrap()]
    );
}

/// A service with one server, and these additional lines for both.
fn tunnelled(service: &str, server: &str) -> String {
    format!(
        "[[service]]\naddress = \"192.0.2.10:80\"\n{service}\n[[service.server]]\naddress = \"10.0.0.11\"\n{server}\n"
    )
}

/// If the result is false, a client does not have to parse a long file to find the socket.
#[test]
fn configuration_may_name_socket_unless_its_files_are_readable_without_socket_key() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("lvsd.toml");
    let named = "[dataplane]\nsocket = \"@other\"\n";
    for (text, may) in [
        (tunnelled("", ""), false),
        (tunnelled("", named), true),
        (
            tunnelled("", "[dataplane]\n\"sock\\u0065t\" = \"@other\"\n"),
            true,
        ),
    ] {
        std::fs::write(&path, &text).unwrap();
        assert_eq!(Config::may_name_socket(&path), may, "{text}");
    }
    std::fs::write(&path, tunnelled("", "")).unwrap();
    std::fs::create_dir(directory.path().join("conf.d")).unwrap();
    std::fs::write(directory.path().join("conf.d/dataplane.toml"), named).unwrap();
    assert!(Config::may_name_socket(&path));
    assert!(Config::may_name_socket(&directory.path().join("gone")));
}
