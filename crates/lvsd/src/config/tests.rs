//! Every example loads; a key that does not belong is refused in every table; errors look as they
//! should.

use super::*;

const EXAMPLES: [(&str, &str); 7] = [
    ("nat.toml", include_str!("../../../../examples/nat.toml")),
    ("dr.toml", include_str!("../../../../examples/dr.toml")),
    ("tun.toml", include_str!("../../../../examples/tun.toml")),
    ("gue.toml", include_str!("../../../../examples/gue.toml")),
    (
        "web-modern.toml",
        include_str!("../../../../examples/web-modern.toml"),
    ),
    ("full.toml", FULL),
    (
        "checks.toml",
        include_str!("../../../../examples/checks.toml"),
    ),
];

/// Every table and every key.
const FULL: &str = r#"
[lvsd]
adopt = true
log = "debug"
max_remove = 20

[dataplane]
interface = ["eth0", "eth1"]
backend = "af_packet"
workers = 1
socket = "/run/lvs/engine.sock"
group = "adm"
readers = "4"
hang_limit = "5s"
profile = "kernel"
own_vips = false
helper = "ftp"
echo = "drop"
reverse_path = "strict"
in_kernel = "auto"
real_time = "off"
echo_limit = 10
clamp_mss = "auto"
icmp_ratelimit = "500ms"
icmp_msgs_per_sec = 0
icmp_msgs_burst = 1
max_connections = 1000000
when_full = "drop"
program = "/usr/sbin/lvs-dataplane"

[sync]
role = "both"
interface = "eth2"
syncid = 5
group = "224.0.0.81"
port = 8848
ttl = 1
maxlen = 1400

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
address = "10.0.0.1:443"
weight = 2
forward = "tun"
tunnel = { type = "gre", checksum = "full" }
upper = 10
lower = 5

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

[[service.server]]
address = "2001:db8::2"

[[service]]
address = "192.0.2.1:5060"
protocol = "udp"
one_packet = true
forward = "nat"
vip = "host"
persistence = { timeout = "1h", engine = "sip" }

[[service.server]]
address = "10.0.0.1:5060"
"#;

#[test]
fn what_the_engine_is_told_about_icmp_and_vlans() {
    let text = "[dataplane]\ninterface = [\"eth0.100=10.0.100.1/24,fd00::1/64\", \"eth1\"]\necho = \"drop\"\necho_limit = 10\n\
                clamp_mss = 1360\nicmp_ratelimit = \"500ms\"\nicmp_msgs_per_sec = 0\nicmp_msgs_burst = 1\n";
    assert_eq!(
        load(text).dataplane.arguments().join(" "),
        "--interface eth0.100=10.0.100.1/24,fd00::1/64 --interface eth1 --echo drop --echo-limit 10 --clamp-mss 1360 \
         --icmp-ratelimit 500 --icmp-msgs-per-sec 0 --icmp-msgs-burst 1"
    );
    for (line, wanted) in [
        ("echo = \"host\"", "unknown word `host`"),
        (
            "hang_limit = \"1s\"",
            "no engine can be told to hang by that",
        ),
        ("clamp_mss = 535", "`535` is not a segment size"),
        ("clamp_mss = \"Auto\"", "`Auto` is not a segment size"),
        ("icmp_msgs_burst = 0", "is out of range"),
        ("echo_limit = -1", "is out of range"),
        (
            "interface = \"eth0=10.0.0.1/24\"",
            "is not a VLAN with addresses",
        ),
        (
            "interface = \"eth0.100=10.0.0.1\"",
            "is not a VLAN with addresses",
        ),
        (
            "interface = \"eth0.4095=10.0.0.1/24\"",
            "is not a VLAN with addresses",
        ),
    ] {
        let found = errors(&format!("[dataplane]\n{line}\n"));
        assert!(found.contains(wanted), "{line}: {found}");
    }
}

#[test]
fn helpers_and_their_ports() {
    for (line, arguments) in [
        ("helper = \"ftp\"", "--helper ftp"),
        ("helpers = [\"ftp=21,2121\"]", "--helper ftp=21,2121"),
    ] {
        let text = format!("[dataplane]\n{line}\n");
        assert_eq!(load(&text).dataplane.arguments().join(" "), arguments);
    }
    for (helper, wanted) in [
        ("tftp", "no helper of this name; there is one: ftp"),
        ("ftp=", "up to 8 different ports from 1 to 65535"),
        ("ftp=0", "up to 8 different ports"),
        ("ftp=21,21", "up to 8 different ports"),
        ("ftp=65536", "up to 8 different ports"),
        ("ftp=1,2,3,4,5,6,7,8,9", "up to 8 different ports"),
    ] {
        let found = errors(&format!("[dataplane]\nhelper = \"{helper}\"\n"));
        assert!(found.contains(wanted), "{helper}: {found}");
    }
}

fn load(text: &str) -> Config {
    Config::from_toml("test.toml", text)
        .unwrap_or_else(|report| panic!("{report}"))
        .0
}

fn errors(text: &str) -> String {
    Config::from_toml("test.toml", text)
        .expect_err("the text is wrong")
        .to_string()
}

/// There is an example of each type of check.
#[test]
fn every_type_of_check_has_an_example() {
    let text = include_str!("../../../../examples/checks.toml");
    for kind in Probe::KINDS {
        let word = format!("type = \"{}\"", kind.name);
        assert!(text.contains(&word) || kind.name == "banner", "{word}");
    }
}

#[test]
fn every_example_loads_without_a_warning() {
    for (name, text) in EXAMPLES {
        let (config, warnings) =
            Config::from_toml(name, text).unwrap_or_else(|report| panic!("{report}"));
        assert!(!config.services.is_empty(), "{name}");
        assert!(warnings.findings.is_empty(), "{warnings}");
    }
}

/// Puts a line after the header of every table and a key into every inline table of every example.
#[test]
fn an_unknown_key_is_refused_everywhere() {
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
    assert!(tried > 25, "only {tried} places found");
}

#[test]
fn defaults_and_the_full_file() {
    let config = load(EXAMPLES[0].1);
    let web = &config.services[0];
    assert_eq!(web.config.scheduler, "wlc");
    assert_eq!(web.vip, VipMode::Auto);
    assert_eq!(web.on_check_failure, OnCheckFailure::Quiesce);
    assert_eq!(web.servers[0].config.weight, 1);
    let check = web.servers[2].check.as_ref();
    let check = check.expect("the service's check");
    assert_eq!(check.server, "10.0.0.13:8080".parse().unwrap());
    assert_eq!(check.probe.target(check.server), "10.0.0.13:8080");
    assert_eq!((check.rise, check.fall), (2, 3));

    let dr = load(EXAMPLES[1].1);
    assert_eq!(
        dr.services[0].servers[0].address,
        "192.0.2.11:80".parse().unwrap()
    );
    // A template would keep leading clients to a server of weight 0.
    assert_eq!(dr.services[1].on_check_failure, OnCheckFailure::Remove);
    assert_eq!(dr.services[1].config.netmask, 0xffff_ff00);
    assert_eq!(dr.services[1].config.timeout, 600);

    let full = load(FULL);
    assert_eq!(
        full.dataplane.arguments().join(" "),
        "--interface eth0 --interface eth1 --backend af_packet --workers 1 --profile kernel --helper ftp --group adm --readers 4 --echo drop \
         --reverse-path strict --in-kernel auto --real-time off --echo-limit 10 --clamp-mss auto --icmp-ratelimit 500 --icmp-msgs-per-sec 0 --icmp-msgs-burst 1 --max-connections 1000000 --when-full drop"
    );
    assert_eq!(full.services[0].config.flags.0, 0x1 | 0x8 | 0x10);
    assert_eq!(full.services[1].name, "mark 7 ipv6");
    assert_eq!(full.services[1].servers[0].address.port(), 0);
    assert_eq!(
        full.own_vips(|_| false),
        ["2001:db8::1".parse::<IpAddr>().unwrap()]
    );
}

#[test]
fn on_check_failure_by_default() {
    let with = |keys: &str, top: &str| {
        let text = format!(
            "{top}\n[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\n{keys}\n[[service.server]]\naddress = \"10.0.0.1:80\"\n"
        );
        load(&text).services[0].on_check_failure
    };
    let persistence = "persistence = { timeout = \"6m\" }";
    assert_eq!(with("", ""), OnCheckFailure::Quiesce);
    assert_eq!(with("scheduler = \"dh\"", ""), OnCheckFailure::Remove);
    assert_eq!(with("scheduler = \"mh\"", ""), OnCheckFailure::Remove);
    assert_eq!(
        with(
            "scheduler = \"mh\"\nscheduler_flags = [\"mh-fallback\"]",
            ""
        ),
        OnCheckFailure::Quiesce
    );
    assert_eq!(with(persistence, ""), OnCheckFailure::Remove);
    assert_eq!(
        with(persistence, "[sysctl]\nexpire_quiescent_template = 1"),
        OnCheckFailure::Quiesce
    );
}

#[test]
fn drain_by_default() {
    let with = |keys: &str| {
        let text = format!(
            "[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\n{keys}\n[[service.server]]\naddress = \"10.0.0.1:80\"\n"
        );
        load(&text).services[0].drain.as_secs()
    };
    assert_eq!(with(""), 30);
    assert_eq!(with("drain = \"0s\""), 0);
    assert_eq!(with("scheduler = \"sh\""), 0);
    assert_eq!(
        with("scheduler = \"sh\"\nscheduler_flags = [\"sh-fallback\"]"),
        30
    );
    assert_eq!(with("on_server_down = \"reset\""), 0);
    assert_eq!(with("on_server_down = \"reset\"\ndrain = \"10s\""), 10);
    let said =
        errors("[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\ndrain = \"2d\"\n");
    assert!(said.contains("`drain` is out of range"), "{said}");
}

#[test]
fn several_errors_at_once() {
    let found = errors(
        r#"[[service]]
name = "web"
adress = "192.0.2.10:80"
scheduler = "wcl"
forward = "masq"
check = { type = "tcp", intervall = "5s", timeout = 2 }
[[service.server]]
address = "10.0.0.11:80"
weight = "5"
"#,
    );
    assert_eq!(
        found,
        r#"error: unknown key `adress`
 --> test.toml:3:1
  |
3 | adress = "192.0.2.10:80"
  | ^^^^^^ not a key of this table
  |
  = help: did you mean `address`?

error: unknown scheduler `wcl`
 --> test.toml:4:13
  |
4 | scheduler = "wcl"
  |             ^^^^^
  |
  = help: did you mean "wlc"? the schedulers are: dh, ewma, fo, lblc, lblcr, lc, mh, none, nq, ovf, rr, sed, sh, twos, wlc, wrr

error: unknown forwarding method `masq`
 --> test.toml:5:11
  |
5 | forward = "masq"
  |           ^^^^^^
  |
  = help: here it is called "nat"

error: unknown key `intervall`
 --> test.toml:6:25
  |
6 | check = { type = "tcp", intervall = "5s", timeout = 2 }
  |                         ^^^^^^^^^ not a key of this table
  |
  = help: did you mean `interval`?

error: a duration needs its unit; write "2s" for 2 seconds or "2ms" for milliseconds
 --> test.toml:6:53
  |
6 | check = { type = "tcp", intervall = "5s", timeout = 2 }
  |                                                     ^

error: value of a wrong type
 --> test.toml:9:10
  |
9 | weight = "5"
  |          ^^^ expected a whole number, found the string "5"
  |
  = help: write it without quotes: 5"#
    );
}

#[test]
fn a_vip_that_exists_twice_shows_both_places() {
    let found = errors(
        r#"[[service]]
address = "192.0.2.10:80"
forward = "nat"
[[service.server]]
address = "10.0.0.11:80"
[[service]]
address = "192.0.2.10:80"
forward = "nat"
[[service.server]]
address = "10.0.0.12:80"
"#,
    );
    assert_eq!(
        found,
        r#"error: service tcp 192.0.2.10:80 exists twice
 --> test.toml:7:11
  |
2 | address = "192.0.2.10:80"
  |           --------------- the first one
...
7 | address = "192.0.2.10:80"
  |           ^^^^^^^^^^^^^^^
  |
  = help: put all its servers into one [[service]], or change address, port or protocol"#
    );
}

/// What is wrong with a service or a server, and the title of the finding.
#[test]
fn what_does_not_fit_is_refused() {
    let cases = [
        ("", "address = \"192.0.2.10:80\"", "a loop"),
        (
            "forward = \"dr\"",
            "address = \"10.0.0.1:8080\"",
            "direct routing cannot change the port",
        ),
        (
            "forward = \"tun\"",
            "address = \"10.0.0.1:8080\"",
            "tunnelling cannot change the port",
        ),
        ("forward = \"dr\"", "address = \"192.0.2.10\"", "a loop"),
        (
            "",
            "address = \"10.0.0.1:80\"\nweight = 2147483648",
            "weight 2147483648 is out of range",
        ),
        (
            "",
            "address = \"10.0.0.1:80\"\nweight = -1",
            "weight -1 is out of range",
        ),
        (
            "",
            "address = \"10.0.0.1:80\"\nupper = 5\nlower = 6",
            "`lower` (6) is above `upper` (5)",
        ),
        (
            "",
            "address = \"10.0.0.1:80\"\nlower = 6",
            "`lower` (6) is above `upper` (0)",
        ),
        ("", "address = \"[2001:db8::1]:80\"", "different families"),
        (
            "",
            "address = \"224.0.0.1:80\"",
            "cannot be the address of a server",
        ),
        ("", "address = \"web1:80\"", "not an address and a port"),
        ("", "weight = 1", "`address` of the server is missing"),
        (
            "",
            "address = \"10.0.0.1:80\"\n[[service.server]]\naddress = \"10.0.0.1\"",
            "exists twice",
        ),
        (
            "one_packet = true",
            "address = \"10.0.0.1:80\"",
            "one-packet scheduling is for UDP",
        ),
        (
            "scheduler_flags = [\"sh-port\"]",
            "address = \"10.0.0.1:80\"",
            "does not know this flag",
        ),
        (
            "check = { type = \"tcp\", timeout = \"0s\" }",
            "address = \"10.0.0.1:80\"",
            "`timeout` of a check cannot be 0",
        ),
        (
            "check = { type = \"tcp\", fall = 0 }",
            "address = \"10.0.0.1:80\"",
            "`fall` is out of range",
        ),
        (
            "check = { type = \"icmp\" }",
            "address = \"10.0.0.1:80\"",
            "unknown type of check `icmp`",
        ),
        (
            "check = { }",
            "address = \"10.0.0.1:80\"",
            "`type` of the check is missing",
        ),
        (
            "check = 5",
            "address = \"10.0.0.1:80\"",
            "value of a wrong type",
        ),
        (
            "check = \"tcp\"",
            "address = \"10.0.0.1:80\"",
            "unknown check `tcp`",
        ),
        (
            "persistence = { timeout = \"0s\" }",
            "address = \"10.0.0.1:80\"",
            "not a timeout for persistence",
        ),
        (
            "persistence = { netmask = 33 }",
            "address = \"10.0.0.1:80\"",
            "not a mask",
        ),
        (
            "fwmark = 3",
            "address = \"10.0.0.1:80\"",
            "an address or a mark, not both",
        ),
        (
            "protocol = \"TCP\"",
            "address = \"10.0.0.1:80\"",
            "unknown word `TCP`",
        ),
        ("[mark]", "", "value of a wrong type"),
        (
            "[[mark]]\nmark = 3\n[[service]]\naddress = \"192.0.2.9:80\"\nforward = \"nat\"",
            "address = \"10.0.0.1:80\"",
            "destination is missing",
        ),
        (
            "[dataplane]\nbackend = \"xdp\"\n[[service]]\naddress = \"192.0.2.9:80\"\nforward = \"nat\"",
            "address = \"10.0.0.1:80\"",
            "unknown word `xdp`",
        ),
        (
            "[dataplane]\nbackend = \"tun\"\n[[service]]\naddress = \"192.0.2.9:80\"\nforward = \"dr\"",
            "address = \"10.0.0.1:80\"",
            "direct routing needs frames",
        ),
        (
            "vip = \"host\"\n[dataplane]\nbackend = \"tun\"\n[[service]]\naddress = \"192.0.2.9:80\"\nforward = \"nat\"",
            "address = \"10.0.0.1:80\"",
            "not routed to an engine with the backend `tun`",
        ),
        (
            "[sysctl]\nconn_reuse = 1\n[[service]]\naddress = \"192.0.2.9:80\"\nforward = \"nat\"",
            "address = \"10.0.0.1:80\"",
            "unknown sysctl `conn_reuse`",
        ),
        (
            "[dataplane]\nwrokers = 1\n[[service]]\naddress = \"192.0.2.9:80\"\nforward = \"nat\"",
            "address = \"10.0.0.1:80\"",
            "unknown key `wrokers`",
        ),
        ("x = ", "address = \"10.0.0.1:80\"", "not valid TOML"),
    ];
    for (service, server, wanted) in cases {
        let forward = if service.contains("forward") {
            ""
        } else {
            "forward = \"nat\"\n"
        };
        let text = format!(
            "[[service]]\naddress = \"192.0.2.10:80\"\n{forward}{service}\n[[service.server]]\n{server}\n"
        );
        let found = errors(&text);
        assert!(found.contains(wanted), "wanted `{wanted}` in:\n{found}");
        assert!(found.contains("test.toml:"), "no place in:\n{found}");
    }
}

#[test]
fn a_vip_has_one_owner() {
    let service = |port: u16, vip: &str| {
        format!(
            "[[service]]\naddress = \"192.0.2.10:{port}\"\nforward = \"nat\"\nvip = \"{vip}\"\n[[service.server]]\naddress = \"10.0.0.1\"\n"
        )
    };
    let both = service(80, "own") + &service(443, "host");
    assert!(errors(&both).contains("the engine's own for one service"));
    load(&(service(80, "own") + &service(443, "auto")));
}

#[test]
fn port_zero_needs_persistence() {
    let text = "[[service]]\naddress = \"192.0.2.10:0\"\nforward = \"nat\"\n[[service.server]]\naddress = \"10.0.0.1\"\n";
    assert!(errors(text).contains("needs persistence"));
    load(&text.replace("forward", "persistence = { timeout = \"6m\" }\nforward"));
}

#[test]
fn warnings_do_not_refuse() {
    let text = "[[service]]\naddress = \"192.0.2.10:80\"\nforward = \"nat\"\ncheck = { type = \"tcp\", interval = \"1s\", timeout = \"3s\" }\n[[service.server]]\naddress = \"10.0.0.1\"\n";
    let (_, warnings) = Config::from_toml("test.toml", text).unwrap();
    assert!(
        warnings.to_string().contains("longer than the interval"),
        "{warnings}"
    );
}

#[test]
fn a_missing_file_is_an_error() {
    let error = Config::load(Path::new("/nonexistent/lvsd.toml")).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("cannot read /nonexistent/lvsd.toml"),
        "{error}"
    );
}

proptest::proptest! {
    /// Whatever the text is, the answer is a configuration or a report that can be shown.
    #[test]
    fn never_panics(at in 0..FULL.len(), length in 0usize..20, new in "[\\[\\]{}=\"\\n a-z0-9é.]{0,8}") {
        let mut text = FULL.to_owned();
        let end = (at + length).min(text.len());
        text.replace_range(at..end, &new);
        if let Err(report) = Config::from_toml("test.toml", &text) {
            proptest::prop_assert!(!report.to_string().is_empty());
        }
    }
}

#[test]
fn services_of_many_ports() {
    let config = load(
        r#"[[service]]
address = "192.0.2.10:8000-8999"
vip = "own"
forward = "nat"
[[service.server]]
address = "10.0.0.11"
[[service]]
address = "192.0.2.10:8443"
forward = "nat"
[[service.server]]
address = "10.0.0.12:443"
[[service]]
name = "all"
address = "[2001:db8::1]:*"
protocol = "udp"
forward = "dr"
[[service.server]]
address = "2001:db8::11"
"#,
    );
    let many = &config.services[0];
    assert_eq!(many.name, "tcp 192.0.2.10:8000-8999");
    assert_eq!(many.servers[0].address, "10.0.0.11:0".parse().unwrap());
    let ServiceId::Fwmark { mark, .. } = many.id else {
        panic!("{:?}", many.id)
    };
    let all = &config.services[2];
    let ServiceId::Fwmark { mark: of_all, .. } = all.id else {
        panic!("{:?}", all.id)
    };
    assert_eq!(
        config.port_marks,
        [
            format!(
                "--destination 192.0.2.10 --protocol tcp --ports 8000-8442,8444-8999 --mark {mark}"
            ),
            format!("--destination 2001:db8::1 --protocol udp --mark {of_all}"),
        ]
    );
    let owned: [IpAddr; 2] = ["192.0.2.10", "2001:db8::1"].map(|ip| ip.parse().unwrap());
    assert_eq!(config.own_vips(|_| false), owned);
}

#[test]
fn what_many_ports_and_full_nat_cannot_have() {
    let server = "\n[[service.server]]\naddress = \"10.0.0.11:80\"\n";
    let service =
        |text: &str| format!("[[service]]\naddress = \"192.0.2.10:80-90\"\n{text}{server}");
    for (text, complaint) in [
        (
            service("forward = \"dr\""),
            "only NAT can send the packets of many ports to one port",
        ),
        (
            format!(
                "{}{}",
                service("forward = \"nat\""),
                service("name = \"b\"\nforward = \"nat\"").replace("80-90", "85-95")
            ),
            "two services take the same ports",
        ),
        (
            service("forward = \"nat\"").replace("80-90", "90-80"),
            "the range ends before it begins",
        ),
        (
            "[[service]]\nfwmark = 1275068417\nforward = \"nat\"\n".to_owned() + server,
            "this mark is reserved for services of many ports",
        ),
        (
            "[[mark]]\ndestination = \"192.0.2.10\"\nmark = 1275068417\n".to_owned(),
            "this mark is reserved for services of many ports",
        ),
        (
            service("forward = \"fullnat\""),
            "full NAT needs an IPv4 local address",
        ),
        (
            "[dataplane]\nlocal_addresses = [\"fd00::2\"]\n".to_owned()
                + &service("forward = \"fullnat\""),
            "full NAT needs an IPv4 local address",
        ),
        (
            "[dataplane]\nlocal_addresses = \"10.0.0.2\"\n".to_owned()
                + &service("protocol = \"udp\"\none_packet = true\nforward = \"fullnat\""),
            "full NAT keeps connections",
        ),
        (
            "[dataplane]\nhairpin = true\n".to_owned(),
            "`hairpin` needs a local address",
        ),
        (
            "[dataplane]\nlocal_addresses = [\"x\"]\n".to_owned(),
            "`x` is not an address",
        ),
        (
            "[dataplane]\nlocal_addresses = [\"10.0.0.2\", \"10.0.0.2\"]\n".to_owned(),
            "named twice",
        ),
    ] {
        let found = errors(&text);
        assert!(found.contains(complaint), "{text}\n{found}");
    }
    let good = load(
        &("[dataplane]\nlocal_addresses = [\"10.0.0.2\"]\nhairpin = true\n".to_owned()
            + &service("forward = \"fullnat\"")),
    );
    assert_eq!(
        good.dataplane.arguments(),
        ["--local-address", "10.0.0.2", "--hairpin"]
    );
}

#[test]
fn what_goes_beyond_the_kernel() {
    let file = |service: &str| {
        format!(
            "[[service]]\naddress = \"192.0.2.10:80\"\n{service}\n[[service.server]]\naddress = \"10.0.0.11:80\"\n"
        )
    };
    let config = load(&file(
        "forward = \"nat\"\nscheduler = \"ewma\"\non_server_down = \"reset\"\nslow_start = \"1m30s\"",
    ));
    let service = &config.services[0];
    assert_eq!(service.config.extras.slow_start, 90);
    assert_eq!(
        service.config.extras.on_server_down,
        lvs_core::OnServerDown::Reset
    );
    assert_eq!(
        service.on_check_failure,
        OnCheckFailure::Remove,
        "a failed check means down"
    );
    let limits = "limits = { connections = 1000, source_rate = 20, source_bits_v6 = 56 }";
    let limited = load(&file(&format!("forward = \"nat\"\n{limits}")));
    assert_eq!(
        limited.services[0].config.extras.limits,
        lvs_core::Limits {
            connections: 1000,
            source_rate: 20,
            source_bits_v6: 56,
            ..lvs_core::Limits::default()
        }
    );
    let plain = load(&file("forward = \"nat\""));
    assert!(plain.services[0].config.extras.is_off());

    let text = file("forward = \"nat\"\non_down = \"quiesce\"\non_server_down = \"reschedule\"");
    let (_, warnings) = Config::from_toml("test.toml", &text).expect("only a warning");
    let said = warnings.to_string();
    assert!(
        said.contains("`on_server_down` does nothing then"),
        "{said}"
    );

    for (service, expected) in [
        (
            "forward = \"nat\"\non_server_down = \"rset\"",
            "error: unknown word `rset`\n --> test.toml:4:18\n",
        ),
        (
            "forward = \"nat\"\nslow_start = \"500ms\"",
            "error: not a time for a slow start\n --> test.toml:4:14\n",
        ),
        (
            "forward = \"nat\"\nlimits = { source_bits_v4 = 33 }",
            "error: source_bits_v4 33 is out of range\n --> test.toml:4:29\n",
        ),
        (
            "forward = \"nat\"\nslow_start = \"2d\"",
            "give whole seconds, up to \"1d\"",
        ),
        (
            "forward = \"dr\"\nscheduler = \"ewma\"",
            "error: the scheduler ewma needs servers that are reached by NAT\n --> test.toml:3:11\n",
        ),
    ] {
        let said = errors(&file(service));
        assert!(said.contains(expected), "{said}");
    }
    let said = errors(&file("forward = \"nat\"\non_server_down = \"rset\""));
    assert!(said.contains("did you mean \"reset\"?"), "{said}");
}

#[test]
fn a_file_without_a_service_is_warned_about() {
    for text in ["", "[sysctl]\nconn_reuse_mode = 1\n"] {
        let (config, warnings) = Config::from_toml("test.toml", text).expect("it is allowed");
        assert!(config.services.is_empty());
        let said = warnings.to_string();
        assert!(said.contains("warning: there is no [[service]]"), "{said}");
        assert!(said.contains("test.toml:1:1"), "{said}");
    }
}

#[test]
fn what_the_engine_does_not_have_is_refused_with_its_place() {
    for (line, place, title, help) in [
        (
            "backend = \"af_xdp\"",
            "test.toml:2:11",
            "unknown word `af_xdp`",
            "one of: auto, af_packet, tun",
        ),
        (
            "workers = 2",
            "test.toml:2:11",
            "number of workers 2 is out of range",
            "write workers = 1",
        ),
        (
            "when_full = \"grow\"",
            "test.toml:2:13",
            "unknown word `grow`",
            "one of: drop, evict",
        ),
    ] {
        let said = errors(&format!("[dataplane]\n{line}\n"));
        for part in [place, title, help] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }
}

#[test]
fn numbers_that_are_too_large_are_out_of_the_range_of_their_key() {
    for number in [
        "3000000000",
        "9999999999999999999",
        "99999999999999999999999",
        "-99999999999999999999999",
    ] {
        let said = errors(&format!(
            "[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\n[[service.server]]\naddress = \"10.0.0.1\"\nweight = {number}\n"
        ));
        for part in [
            format!("weight {number} is out of range"),
            "test.toml:6:10".to_owned(),
            "give a number from 0 to 2147483647".to_owned(),
        ] {
            assert!(said.contains(&part), "{part}: {said}");
        }
    }
    for (text, place, help) in [
        (
            "[sysctl]\nconn_reuse_mode = 99999999999999999999999",
            "test.toml:2:19",
            "whole number",
        ),
        (
            "[dataplane]\necho_limit = 99999999999999999999999",
            "test.toml:2:14",
            "from 0 to 4294967295",
        ),
        (
            "[[mark]]\nmark = 0x1_0000_0000",
            "test.toml:2:8",
            "from 1 to 4294967295",
        ),
        (
            "[dataplane]\nworkers = -99999999999999999999999",
            "test.toml:2:11",
            "write workers = 1",
        ),
        // 2^130 and more: not even the TOML reader has a type for it.
        (
            "[dataplane]\necho_limit = 9999999999999999999999999999999999999999",
            "test.toml:2:14",
            "above 4294967295",
        ),
    ] {
        let said = errors(text);
        assert!(
            said.contains(place) && said.contains(help),
            "{text}: {said}"
        );
        assert!(!said.contains("i128"), "{said}");
    }
}

#[test]
fn a_file_that_cannot_be_read_says_why_and_what_to_do() {
    let said = |path: &Path| Config::load(path).expect_err("no file").to_string();
    let directory = tempfile::tempdir().unwrap();
    let here = said(directory.path());
    assert!(here.contains("name a file in this directory"), "{here}");
    let file = directory.path().join("lvsd.toml");
    assert!(said(&file).contains("put the configuration there"));
    std::fs::write(&file, b"[lvsd]\nlog = \"\xe4\"\n").unwrap();
    let latin = said(&file);
    assert!(
        latin.contains("lvsd.toml, line 2: byte 14 of the file (0xe4) is not UTF-8"),
        "{latin}"
    );

    // Root may read everything, so this one is made up.
    let denied = LoadError::Read {
        path: "lvsd.toml".to_owned(),
        source: ErrorKind::PermissionDenied.into(),
    };
    assert!(
        denied
            .to_string()
            .contains("let the user that lvsd runs as read it"),
        "{denied}"
    );
}

/// A service with one server, each with lines of its own.
fn tunnelled(service: &str, server: &str) -> String {
    format!(
        "[[service]]\naddress = \"192.0.2.10:80\"\n{service}\n[[service.server]]\naddress = \"10.0.0.11\"\n{server}\n"
    )
}

#[test]
fn tunnels_of_every_type() {
    use lvs_core::{Forwarding, Tunnel, TunnelChecksum as Sum};
    let gre = |checksum| Tunnel::Gre { checksum };
    let gue = |checksum| Tunnel::Gue {
        port: 6080,
        checksum,
    };
    for (words, tunnel) in [
        ("\"ipip\"", Tunnel::Ipip),
        ("{ type = \"ipip\" }", Tunnel::Ipip),
        ("\"gre\"", gre(Sum::None)),
        ("{ type = \"gre\", checksum = \"none\" }", gre(Sum::None)),
        ("{ type = \"gre\", checksum = \"full\" }", gre(Sum::Full)),
        ("{ type = \"gue\", port = 6080 }", gue(Sum::None)),
        (
            "{ type = \"gue\", port = 6080, checksum = \"full\" }",
            gue(Sum::Full),
        ),
        (
            "{ type = \"gue\", port = 6080, checksum = \"remote\" }",
            gue(Sum::Remote),
        ),
    ] {
        let line = format!("tunnel = {words}");
        for (service, server) in [(line.as_str(), ""), ("tunnel = \"gre\"", line.as_str())] {
            let text = tunnelled(&format!("forward = \"tun\"\n{service}"), server);
            let config = load(&text).services[0].servers[0].config;
            assert_eq!(
                (config.forwarding, config.tunnel),
                (Forwarding::Tunnel, tunnel),
                "{text}"
            );
        }
    }
    // A server that is reached in another way does not have the service's.
    let nat = tunnelled(
        "forward = \"tun\"\ntunnel = \"gre\"",
        "forward = \"nat\"\n[[service.server]]\naddress = \"10.0.0.12\"",
    );
    let servers = &load(&nat).services[0].servers;
    assert_eq!(servers[0].config.tunnel, Tunnel::Ipip);
    assert_eq!(servers[1].config.tunnel, gre(Sum::None));
    // One tunnelled server is reason enough to say it for all.
    load(&tunnelled(
        "forward = \"nat\"\ntunnel = \"gre\"",
        "forward = \"tun\"",
    ));
}

#[test]
fn a_tunnel_that_does_not_fit_is_refused_with_its_place() {
    for (words, place, title, help) in [
        (
            "\"vxlan\"",
            "4:10",
            "unknown word `vxlan`",
            "one of: ipip, gre, gue",
        ),
        (
            "\"GUE\"",
            "4:10",
            "unknown word `GUE`",
            "did you mean \"gue\"?",
        ),
        (
            "\"gue\"",
            "4:10",
            "`port` of the GUE tunnel is missing",
            "{ type = \"gue\", port = 6080 }",
        ),
        (
            "{ type = \"gue\" }",
            "4:10",
            "`port` of the GUE tunnel is missing",
            "ip fou add port 6080 gue",
        ),
        (
            "{ port = 6080 }",
            "4:10",
            "`type` of the tunnel is missing",
            "add type =",
        ),
        (
            "{ type = \"gue\", port = 0 }",
            "4:33",
            "port 0 is out of range",
            "from 1 to 65535",
        ),
        (
            "{ type = \"gre\", port = 6080 }",
            "4:33",
            "only a GUE tunnel has a port",
            "set type = \"gue\"",
        ),
        (
            "{ type = \"ipip\", checksum = \"full\" }",
            "4:38",
            "an IPIP tunnel has no checksum of its own",
            "remove `checksum`",
        ),
        (
            "{ type = \"gre\", checksum = \"remote\" }",
            "4:37",
            "only a GUE tunnel has remote checksum offload",
            "write checksum = \"full\"",
        ),
        (
            "{ type = \"gre\", checksum = \"csum\" }",
            "4:37",
            "unknown checksum of a tunnel `csum`",
            "here it is called \"full\"",
        ),
        (
            "{ type = \"gre\", checksum = \"ful\" }",
            "4:37",
            "unknown word `ful`",
            "did you mean \"full\"?",
        ),
        (
            "{ type = \"gre\", key = 5 }",
            "4:26",
            "unknown key `key`",
            "type, port, checksum",
        ),
        ("5", "4:10", "value of a wrong type", ""),
    ] {
        let said = errors(&tunnelled(
            &format!("forward = \"tun\"\ntunnel = {words}"),
            "",
        ));
        for part in [title, help, &format!("test.toml:{place}\n")] {
            assert!(said.contains(part), "{words}: no {part:?} in\n{said}");
        }
        assert_eq!(said.matches("error: ").count(), 1, "{words}: {said}");
    }
    for (service, server, place) in [
        ("forward = \"nat\"\ntunnel = \"gre\"", "", "4:10"),
        ("forward = \"dr\"", "tunnel = \"gre\"", "6:10"),
        (
            "forward = \"tun\"",
            "forward = \"nat\"\ntunnel = \"gre\"",
            "7:10",
        ),
    ] {
        let said = errors(&tunnelled(service, server));
        for part in [
            "error: `tunnel` is for servers with forward = \"tun\"",
            "the forwarding method",
            "help: set forward = \"tun\", or remove `tunnel`",
            &format!("test.toml:{place}\n"),
        ] {
            assert!(said.contains(part), "{service}: no {part:?} in\n{said}");
        }
    }
}

#[test]
fn the_old_name_of_on_check_failure_is_reported() {
    let file = |keys: &str| tunnelled(&format!("forward = \"nat\"\n{keys}"), "");
    let (config, warnings) =
        Config::from_toml("test.toml", &file("on_down = \"remove\"")).expect("it still works");
    assert_eq!(config.services[0].on_check_failure, OnCheckFailure::Remove);
    let said = warnings.to_string();
    assert!(
        said.contains("warning: `on_down` is now called `on_check_failure`\n --> test.toml:4:11"),
        "{said}"
    );
    let said = errors(&file("on_down = \"remove\"\non_check_failure = \"remove\""));
    assert!(said.contains("and both are given"), "{said}");
    assert!(said.contains("help: remove `on_down`"), "{said}");
}

#[test]
fn synchronisation_is_asked_for_with_an_interface() {
    use lvs_core::api::SyncRole;
    assert_eq!(load("").sync, None, "it stays as it is");
    let daemons = load("[sync]\ninterface = \"eth2\"\nsyncid = 5\n").sync;
    let daemons = daemons.expect("they are wanted");
    let roles: Vec<SyncRole> = daemons.iter().map(|daemon| daemon.role).collect();
    assert_eq!(roles, [SyncRole::Master, SyncRole::Backup]);
    assert!(daemons.iter().all(|daemon| daemon.syncid == 5));
    let one = load("[sync]\ninterface = \"eth2\"\nrole = \"backup\"\n").sync;
    assert_eq!(one.map(|daemons| daemons.len()), Some(1));
    for (text, title) in [
        ("role = \"both\"", "[sync] has no interface"),
        (
            "interface = \"10.0.0.1/24\"",
            "is not the name of an interface",
        ),
        (
            "interface = \"eth2\"\ngroup = \"10.0.0.1\"",
            "is not a multicast group",
        ),
        (
            "interface = \"eth2\"\nsyncid = 256",
            "syncid 256 is out of range",
        ),
        ("interface = \"eth2\"\nport = 0", "port 0 is out of range"),
        ("interface = \"eth2\"\nrole = \"boss\"", "boss"),
    ] {
        let said = errors(&format!("[sync]\n{text}\n"));
        assert!(said.contains(title), "{said}");
    }
}

#[test]
fn sysctls_have_the_ranges_of_the_engine() {
    let said = errors("[sysctl]\nest_nice = 20\n");
    assert!(
        said.contains("help: give a whole number from -20 to 19"),
        "{said}"
    );
    for (line, place, title) in [
        ("drop_entry = 4", "2:14", "`4` is not a value of drop_entry"),
        (
            "drop_entry = -1",
            "2:14",
            "`-1` is not a value of drop_entry",
        ),
        (
            "sync_version = 2",
            "2:16",
            "`2` is not a value of sync_version",
        ),
        ("sync_ports = 3", "2:14", "`3` is not a value of sync_ports"),
        ("est_nice = 20", "2:12", "`20` is not a value of est_nice"),
        (
            "lblc_expiration = -1",
            "2:19",
            "`-1` is not a value of lblc_expiration",
        ),
        (
            "sync_threshold = \"50 3\"",
            "2:18",
            "`50 3` is not a value of sync_threshold",
        ),
        (
            "sync_threshold = 3",
            "2:18",
            "`3` is not a value of sync_threshold",
        ),
        (
            "conn_reuse_mode = \"on\"",
            "2:19",
            "`on` is not a value of conn_reuse_mode",
        ),
        (
            "conn_reuse_mode = \"\"",
            "2:19",
            "`` is not a value of conn_reuse_mode",
        ),
        (
            "est_cpulist = \"3-1\"",
            "2:15",
            "`3-1` is not a value of est_cpulist",
        ),
    ] {
        let said = errors(&format!("[sysctl]\n{line}\n"));
        for part in [title, &format!("test.toml:{place}\n"), "help: "] {
            assert!(said.contains(part), "{line}: no {part:?} in\n{said}");
        }
    }
    let text =
        "[sysctl]\nest_cpulist = \"\"\nsync_threshold = \"3 50\"\nsync_ports = 4\nest_nice = -20\n";
    assert_eq!(load(text).sysctls.len(), 4);
}

#[test]
fn every_scheduler_and_sysctl_of_the_engine_can_be_asked_for() {
    const DOCUMENTATION: &str = include_str!("../../../../docs/configuration.md");
    for name in lvs_core::Registry::new().names() {
        let text = tunnelled(&format!("forward = \"nat\"\nscheduler = \"{name}\""), "");
        assert_eq!(load(&text).services[0].config.scheduler, name);
        assert!(
            DOCUMENTATION.contains(&format!("`\"{name}\"`")),
            "{name} is not documented"
        );
    }
    let defaults = lvs_core::Sysctls::default();
    for name in lvs_core::Sysctls::NAMES {
        let value = defaults
            .get(name)
            .expect("it has a value")
            .replace('\t', " ");
        load(&format!("[sysctl]\n{name} = \"{value}\"\n"));
    }
}

fn report(text: &str) -> Report {
    match Config::from_toml("test.toml", text) {
        Ok((_, warnings)) => warnings,
        Err(report) => report,
    }
}

/// What is said about `text`: place and title of each finding.
fn told(text: &str) -> Vec<String> {
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

/// A typo in each of 37,205 servers, and one in each of as many keys of one table: time and words
/// stay in proportion.
#[test]
fn any_number_of_typos_is_told_at_once() {
    const N: usize = 37_205;
    let mut servers = String::from("[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\n");
    let mut keys = String::from("[lvsd]\n");
    let mut sysctls = String::from("[sysctl]\n");
    let mut values = String::from("[dataplane]\ninterface = [");
    let mut methods = String::from(
        "[[service]]\naddress = \"192.0.2.1:80\"\nscheduler = \"ewma\"\nforward = \"dr\"\n",
    );
    for n in 0..N {
        let host = format!("10.{}.{}.{}", n >> 16, n >> 8 & 255, n & 255);
        servers.push_str(&format!("[[service.server]]\nadress = \"{host}:80\"\n"));
        methods.push_str(&format!("[[service.server]]\naddress = \"{host}:80\"\n"));
        keys.push_str(&format!("key{n} = 1\n"));
        sysctls.push_str(&format!("key{n} = []\n"));
        values.push_str("1, true, ");
    }
    values.push_str("]\n");
    for (text, findings) in [
        (&servers, N),
        (&keys, N),
        (&sysctls, N),
        (&values, 2 * N),
        (&methods, 1),
    ] {
        let report = report(text);
        let errors = report.errors();
        assert_eq!(errors, findings, "{report}");
        let said = report.to_string();
        assert_eq!(said.matches("error: ").count(), findings.min(20));
        if findings > 20 {
            let rest = format!("and {} more: {findings} errors", findings - 20);
            assert!(said.contains(&rest), "{said}");
        }
    }
}

#[test]
fn errors_are_shown_before_warnings() {
    let mut text = String::new();
    for n in 1..30 {
        text.push_str(&format!(
            "[[service]]\naddress = \"192.0.2.{n}:80\"\nforward = \"nat\"\n"
        ));
    }
    text.push_str("check = { type = \"tcp\", rise = 0 }\n");
    let said = errors(&text);
    assert!(said.contains("`rise` is out of range"), "{said}");
    assert_eq!(said.matches("warning: ").count(), 19);
    assert!(
        said.contains("and 10 more: 1 error, 29 warnings in all"),
        "{said}"
    );
}

#[test]
fn messages_lead_to_the_cause() {
    let service = |address: &str| {
        format!(
            "[[service]]\naddress = \"{address}\"\nforward = \"nat\"\n[[service.server]]\naddress = \"10.0.0.1:80\"\n"
        )
    };
    for (text, place, help) in [
        ("[[services]]\naddress = \"192.0.2.1:80\"\n".to_owned(), "1:3 unknown key `services`", "write [[service]]"),
        ("[[service.server]]\naddress = \"10.0.0.1:80\"\n".into(), "1:3 `[[service.server]]` without a service above it", "write [[service]] and its address first"),
        ("[[service.server]]\naddress = \"10.0.0.1:80\"\n[[service]]\naddress = \"192.0.2.1:80\"\n".into(), "1:1 `[[service.server]]` without a service above it", "put it behind the [[service]]"),
        ("[service]\naddress = \"192.0.2.1:80\"\n[[service.server]]\naddress = \"10.0.0.1:80\"\n".into(), "1:1 value of a wrong type", "double brackets"),
        (service("2001:db8::1:443"), "2:11 `2001:db8::1:443` may mean two things", "\"[2001:db8::1]:443\" for the port 443"),
        (service("192.0.2.1:99999"), "2:11 99999 in `192.0.2.1:99999` is not a port", "between 1 and 65535"),
        (service("192.0.2.256:80"), "2:11 256 in `192.0.2.256:80` is not a part of an IPv4 address", "between 0 and 255"),
        (service("192.0.02.1:80"), "2:11 `192.0.02.1:80` has a number with a zero in front", "octal"),
        (service("web.example.org:80"), "2:11 `web.example.org:80` is not an address and a port", "names are not resolved"),
        ("[[service]]\nname = \u{201c}web\u{201d}\n".into(), "2:8 a typographic quotation mark (U+201C) is not TOML", "an ASCII one"),
        ("[[service]]\nname\u{a0}= \"web\"\n".into(), "2:5 a non-breaking space (U+00A0) is not TOML", "an ordinary space"),
        ("[[service]]\nname = \"web\n".into(), "2:12 not valid TOML: invalid basic string, expected `\"`", "half written"),
        ("[[service]]\nchecks = [{ a = 1 }, { b = [".into(), "2:29 not valid TOML: unclosed array, expected `]`", "half written"),
        ("[[mark]]\ndestination = \"192.0.2.1/33\"\nmark = 1\n".into(), "2:15 `destination` of a rule for marks: 192.0.2.1/33: expected an address, or a network such as 192.0.2.0/24", ""),
        ("[[mark]]\nmark = 1\nports = \"80-70\"\ndestination = \"192.0.2.1\"\n".into(), "3:9 `ports` of a rule for marks: 80-70: the range ends before it begins", ""),
        ("[[mark]]\nmark = 1\ninterface = \"a b\"\ndestination = \"192.0.2.1\"\n".into(), "3:13 this cannot be an interface", ""),
    ] {
        let told = told(&text);
        let errors: Vec<_> = told.iter().filter(|t| !t.contains("there is no [[service]]")).collect();
        assert_eq!(errors, [place], "{text}");
        let said = self::errors(&text);
        assert!(said.contains(help), "{text}: {said}");
    }
}

#[test]
fn what_the_start_or_the_engine_would_refuse_is_refused() {
    let service = |keys: &str| {
        format!(
            "[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\n{keys}\n[[service.server]]\naddress = \"10.0.0.1:80\"\n"
        )
    };
    let server = |address: &str, more: &str| {
        service("").replace("10.0.0.1:80", address)
            + &format!(
                "[[service]]\naddress = \"192.0.2.9:80\"\nforward = \"nat\"\n{more}[[service.server]]\naddress = \"10.0.0.2\"\n"
            )
    };
    for (text, wanted) in [
        (
            "[lvsd]\nlog = \"inof\"\n".to_owned(),
            "2:7 `inof` is not a level of the log",
        ),
        (
            "[lvsd]\nlog = \"lvsd=deb\"\n".into(),
            "2:7 `deb` is not a level of the log",
        ),
        (
            "[lvsd]\nlog = \"\"\n".into(),
            "2:7 `` is not a level of the log",
        ),
        (
            "[lvsd]\nlog = \"l[d=debug\"\n".into(),
            "2:7 `l[d` is not a part of the program",
        ),
        (
            "[dataplane]\nmax_connections = 268435457\n".into(),
            "2:19 number of connections 268435457 is out of range",
        ),
        (
            "[dataplane]\nicmp_ratelimit = \"2d\"\n".into(),
            "2:18 `icmp_ratelimit` is out of range",
        ),
        (
            "[dataplane]\ngroup = \"a\\nb\"\n".into(),
            "2:9 the value contains the character U+000A",
        ),
        (
            "[sysctl]\nsync_version = 2\n".into(),
            "2:16 `2` is not a value of sync_version",
        ),
        (service("name = \"\""), "4:8 the name is empty"),
        (
            service("name = \"a\\nb\""),
            "4:8 the name contains the character U+000A",
        ),
        (
            service("name = \"a\\u001b[1m\""),
            "4:8 the name contains the character U+001B",
        ),
        (
            service("check = { type = \"tcp\", interval = \"1ms\" }"),
            "4:36 `interval` of a check is out of range",
        ),
        (
            service("check = { type = \"tcp\", interval = \"2h\", timeout = \"1h\" }"),
            "4:52 `timeout` of a check is out of range",
        ),
        (
            service("persistence = { netmask = \"255.0.255.0\" }"),
            "4:27 not a mask for this family of addresses",
        ),
        (
            server("192.0.2.9:80", ""),
            "6:11 the server 192.0.2.9:80 is the service tcp 192.0.2.9:80",
        ),
        (
            server("192.0.2.9:8080", "vip = \"own\"\n"),
            "6:11 the server 192.0.2.9:8080 is the service tcp 192.0.2.9:80",
        ),
        (
            server("0.0.0.7:80", ""),
            "6:11 0.0.0.7 cannot be the address of a server",
        ),
        (
            server("240.0.0.1:80", ""),
            "6:11 240.0.0.1 cannot be the address of a server",
        ),
        (
            service("").replace("192.0.2.1", "127.0.0.1"),
            "2:11 no client can reach the VIP 127.0.0.1",
        ),
    ] {
        let told = told(&text);
        assert!(told.iter().any(|t| t == wanted), "{text}: {told:#?}");
        errors(&text);
    }
    // A server on the director itself may listen on the VIP's other ports.
    load(&server("192.0.2.9:8080", "vip = \"host\"\n"));
    load("[lvsd]\nlog = \"INFO,lvsd::health=debug, lvs_dataplane=off\"\n");
}

#[test]
fn what_cannot_be_meant_is_warned_about() {
    let service = |keys: &str, weights: [&str; 2]| {
        format!(
            "[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\n{keys}\n[[service.server]]\naddress = \"10.0.0.1:80\"\n{}\n[[service.server]]\naddress = \"10.0.0.2:80\"\n{}\n",
            weights[0], weights[1]
        )
    };
    for (text, wanted) in [
        (
            service("scheduler = \"rr\"", ["", "weight = 2"]),
            "10:10 the scheduler rr does not go by weights",
        ),
        (
            service("", ["weight = 0", "weight = 0"]),
            "7:10 all servers of the service have the weight 0",
        ),
        (
            service("", ["", ""]).replace("address = \"192.0.2.1:80\"", "fwmark = 7"),
            "2:10 no [[mark]] sets the mark 7",
        ),
    ] {
        assert_eq!(told(&text), [wanted]);
        load(&text);
    }
    for (keys, weights) in [
        ("scheduler = \"rr\"", ["weight = 0", "weight = 1"]),
        ("scheduler = \"wrr\"", ["weight = 2", "weight = 0"]),
    ] {
        assert!(told(&service(keys, weights)).is_empty());
    }
}

#[test]
fn filters_are_networks_and_files_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("blocked");
    std::fs::write(&path, "203.0.113.0/24 # bad\n2001:db8:bad::/48\n").unwrap();
    let path = path.display();
    let text = |filter: &str| {
        format!(
            "[[service]]\naddress = \"192.0.2.10:80\"\nforward = \"nat\"\nfilter = {filter}\n[[service.server]]\naddress = \"10.0.0.1\"\n"
        )
    };
    let config = load(&text(&format!(
        "{{ allow = \"10.0.0.0/8\", deny = [\"10.1.0.0/16\"], deny_file = \"{path}\" }}"
    )));
    let lists = config.services[0].filter.lists();
    assert_eq!(lists.allow, ["10.0.0.0/8".parse().unwrap()]);
    assert_eq!(lists.deny.len(), 3);
    assert_eq!(config.filter, None);
    for (filter, reason) in [
        ("{ deny = \"10.0.0.0/33\" }", "expected an address"),
        (
            "{ deny = \"::1\", allow = \"::1\" }",
            "both allowed and denied",
        ),
        (
            "{ deny_file = \"/nonexistent\" }",
            "cannot read /nonexistent",
        ),
    ] {
        let error = errors(&text(filter));
        assert!(error.contains(reason), "{filter}: {error}");
    }
}

#[test]
fn what_only_the_host_can_have_is_looked_for() {
    let facts = Facts::with("root:x:0:\nlvs:x:999:\n", &["eth0"]);
    let read = |text: &str| Config::read("test.toml", text, Files::from("test.toml"), Some(&facts));
    for good in [
        "[dataplane]\ninterface = [\"eth0\", \"eth0.100\"]\ngroup = \"lvs\"\n",
        "[dataplane]\nreaders = \"12345\"\n",
    ] {
        read(good).unwrap_or_else(|report| panic!("{good}: {report}"));
    }
    for (bad, words) in [
        ("interface = \"eth1\"", "there is no interface `eth1` here"),
        (
            "interface = \"eth1.7\"",
            "there is no interface `eth1.7` here",
        ),
        ("group = \"lvz\"", "did you mean \"lvs\"?"),
        ("readers = \"operators\"", "`groupadd --system operators`"),
    ] {
        let text = format!("[dataplane]\n{bad}\n");
        let report = read(&text).expect_err(bad).to_string();
        assert!(report.contains(words), "{bad}: {report}");
        // Another host may have it.
        Config::from_toml("test.toml", &text).unwrap_or_else(|report| panic!("{report}"));
    }
}

#[test]
fn defaults_are_for_services_that_do_not_say_otherwise() {
    let text = r#"
        [defaults]
        forward = "nat"
        scheduler = "rr"
        check = { type = "tcp", interval = "1s", timeout = "1s" }
        quorum = 2
        [[service]]
        name = "web"
        address = ["192.0.2.10:80", "192.0.2.10:443"]
        [[service.server]]
        address = "10.0.0.11"
        [[service.server]]
        address = "10.0.0.12"
        [[service]]
        address = "192.0.2.20:25"
        scheduler = "wlc"
        check = "none"
        quorum = { up = 1 }
        [[service.server]]
        address = "10.0.0.13"
    "#;
    let (config, report) = Config::from_toml("test.toml", text).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(report.findings.len(), 0, "{report}");
    let [http, https, mail] = config.services.as_slice() else {
        panic!("{:?}", config.services);
    };
    assert_eq!((http.name.as_str(), https.name.as_str()), ("web", "web"));
    assert_eq!(https.servers[0].address.port(), 443);
    assert_eq!(http.config.scheduler, "rr");
    assert!(http.servers[0].check.is_some() && mail.servers[0].check.is_none());
    assert_eq!((http.quorum.up, mail.quorum.up), (2, 1));
    assert_eq!(mail.config.scheduler, "wlc");

    // A mistake is told once, however many services have it.
    let wrong = text
        .replace("\"tcp\"", "\"tpc\"")
        .replace("10.0.0.12", "10.0.0.912");
    let report = Config::from_toml("test.toml", &wrong).expect_err("wrong");
    assert_eq!(report.errors(), 2, "{report}");
}

#[test]
fn decisions_are_checked() {
    for (line, words) in [
        ("quorum = 0", "quorum 0 is out of range"),
        (
            "quorum = { up = 1, down = 2 }",
            "`down` (2) is above `up` (1)",
        ),
        ("quorum = { down = 2 }", "`up` of the quorum is missing"),
        (
            "quorum = 5",
            "the quorum is 5, and the service has 1 servers",
        ),
        (
            "sorry = \"10.0.0.1\"",
            "the sorry server is a server of the service",
        ),
        ("sorry = \"x\"", "is not an address and a port"),
        ("min_share = 101", "`min_share` 101 is out of range"),
        ("below_quorum = \"giveup\"", "did you mean \"give-up\"?"),
        (
            "vip = \"host\"\nbelow_quorum = \"give-up\"",
            "cannot give up an address",
        ),
    ] {
        let text = format!(
            "[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\n{line}\n[[service.server]]\naddress = \"10.0.0.1\"\n"
        );
        let report = match Config::from_toml("test.toml", &text) {
            Ok((_, report)) | Err(report) => report.to_string(),
        };
        assert!(report.contains(words), "{line}: {report}");
    }
}

#[test]
fn a_proxied_service_is_of_this_host() {
    let proxied = |keys: &str, server: &str| {
        format!(
            "[[service]]\n{keys}\nforward = \"proxy\"\n[[service.server]]\naddress = \"127.0.0.1:8081\"\n{server}\n"
        )
    };
    for address in [
        "127.0.0.1:8080",
        "0.0.0.0:8080",
        "[::]:8080",
        "192.0.2.1:80",
    ] {
        let server = match address.starts_with('[') {
            true => "[::1]:8081",
            false => "127.0.0.1:8081",
        };
        let text =
            proxied(&format!("address = \"{address}\""), "").replace("127.0.0.1:8081", server);
        let (config, _) = Config::from_toml("x", &text).unwrap_or_else(|report| panic!("{report}"));
        let service = &config.services[0];
        assert_eq!(service.proxy, Some(proxy::Options::default()));
        assert!(config.own_vips(|_| false).is_empty() && !config.needs_engine());
    }
    let tcp = "address = \"127.0.0.1:8080\"";
    let udp = |rest: &str| format!("address = \"127.0.0.1:53\"\nprotocol = \"udp\"\n{rest}");
    for (text, words) in [
        (
            proxied(&format!("{tcp}\nvip = \"own\""), ""),
            "this host's own",
        ),
        (proxied("fwmark = 7", ""), "knows nothing of marks"),
        (
            proxied(&format!("{tcp}\nprotocol = \"sctp\""), ""),
            "not SCTP",
        ),
        (
            proxied("address = \"224.0.0.1:80\"", ""),
            "nobody can listen",
        ),
        (proxied(&udp("one_packet = true"), ""), "one-packet"),
        (
            proxied("address = \"0.0.0.0:53\"\nprotocol = \"udp\"", ""),
            "address that was asked",
        ),
        (
            proxied(&udp("proxy = { send = \"v1\" }"), ""),
            "for TCP only",
        ),
        (
            proxied(&format!("{tcp}\nproxy = {{ send = \"v3\" }}"), ""),
            "unknown word",
        ),
        (
            proxied(&format!("{tcp}\nproxy = {{ idle_timeout = \"1ms\" }}"), ""),
            "out of range",
        ),
        (
            proxied(tcp, "forward = \"nat\""),
            "as a whole or not at all",
        ),
        (
            "[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\nproxy = {}\n".to_owned(),
            "is for services with forward",
        ),
    ] {
        let Err(report) = Config::from_toml("x", &text) else {
            panic!("taken: {text}");
        };
        assert!(report.to_string().contains(words), "{words}:\n{report}");
    }
}

/// A proxy that listens everywhere and connects to itself would do so until it has no descriptor
/// left.
#[test]
fn a_proxied_service_is_not_its_own_server() {
    let text = |listen: &str, server: &str, more: &str| {
        format!(
            "[[service]]\naddress = \"{listen}\"\nforward = \"proxy\"\n{more}\
             [[service.server]]\naddress = \"{server}\"\n"
        )
    };
    for (listen, server, words) in [
        ("0.0.0.0:8080", "127.0.0.1:8080", "which listens there"),
        ("0.0.0.0:8080", "127.9.9.9:8080", "which listens there"),
        ("[::]:8080", "[::1]:8080", "which listens there"),
        ("127.0.0.1:8080", "127.0.0.1:8080", "a loop"),
        ("0.0.0.0:8080", "0.0.0.0:8080", "cannot be the address"),
        (
            "[::]:8080",
            "[::ffff:127.0.0.1]:8080",
            "cannot be the address",
        ),
        ("0.0.0.0:8080", "localhost:8080", "names are not resolved"),
    ] {
        let said = errors(&text(listen, server, ""));
        assert!(said.contains(words), "{listen} {server}: {said}");
    }
    for (listen, server) in [
        ("0.0.0.0:8080", "127.0.0.1:8081"),
        ("127.0.0.1:8080", "127.0.0.1:8081"),
        ("0.0.0.0:8080", "10.0.0.1:8080"),
    ] {
        let read = Config::from_toml("test.toml", &text(listen, server, ""));
        assert!(read.is_ok(), "{listen} {server}");
    }
    // By way of another service, too.
    let two = format!(
        "{}{}",
        text("127.0.0.1:8080", "127.0.0.1:8081", "name = \"a\"\n"),
        text("0.0.0.0:8081", "127.0.0.1:8080", "name = \"b\"\n")
    );
    let said = errors(&two);
    assert!(said.contains("127.0.0.1:8081 is the service"), "{said}");
    // The host's other addresses are known where it is asked.
    let own = "192.0.2.77".parse().unwrap();
    let facts = Facts::with_address(own);
    let files = Files::from("test.toml");
    let text = text("0.0.0.0:8080", "192.0.2.77:8080", "");
    let read = Config::read("test.toml", &text, files, Some(&facts));
    assert!(read.is_err_and(|report| report.to_string().contains("which listens there")));
}
