//! Servers that sources name.

use super::*;
use crate::sources::Record;

const FILE: &str = "[[service]]\nname = \"web\"\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\n\
     servers = { dns = \"_http._TCP.example.org.\" }\n\
     [[service.server]]\naddress = \"10.0.0.1:80\"\nweight = 7\n\
     [[service]]\nname = \"other\"\naddress = \"192.0.2.2:80\"\nforward = \"nat\"\n\
     [[service.server]]\naddress = \"10.0.0.9:80\"\n";

fn record(ip: &str, port: Option<u16>, weight: Option<u16>) -> Record {
    Record {
        ip: ip.parse().unwrap(),
        port,
        weight,
    }
}

fn with(text: &str, name: &str, records: &[Record]) -> Config {
    let (config, _) = Config::from_toml("test.toml", text).unwrap_or_else(|e| panic!("{e}"));
    let gathered = Gathered {
        dns: [(name.to_owned(), records.to_vec())].into(),
    };
    config.with(&gathered).unwrap_or_else(|e| panic!("{e}")).0
}

fn servers(config: &Config) -> Vec<(String, i32)> {
    let servers = config.services[0].servers.iter();
    servers
        .map(|server| (server.address.to_string(), server.config.weight))
        .collect()
}

#[test]
fn servers_of_dns_come_behind_those_of_the_file_which_win() {
    let config = with(
        FILE,
        "_http._tcp.example.org",
        &[
            record("10.0.0.1", Some(80), Some(3)),
            record("10.0.0.1", Some(81), Some(3)),
            record("10.0.0.2", Some(80), None),
            record("2001:db8::2", Some(80), None),
        ],
    );
    let wanted = [("10.0.0.1:80", 7), ("10.0.0.1:81", 3), ("10.0.0.2:80", 1)];
    assert_eq!(
        servers(&config),
        wanted.map(|(address, weight)| (address.to_owned(), weight))
    );
    assert!(!config.services[0].from.incomplete);
    assert_eq!(config.left_out, Vec::<String>::new());
}

#[test]
fn what_a_zone_says_does_not_make_a_file_wrong() {
    let config = with(
        FILE,
        "_http._tcp.example.org",
        &[
            record("192.0.2.1", Some(80), None),
            record("192.0.2.2", Some(80), None),
            record("0.0.0.0", Some(80), None),
            record("224.0.0.1", Some(80), None),
            record("10.0.0.3", Some(80), Some(0)),
        ],
    );
    assert_eq!(servers(&config).len(), 2, "{:?}", servers(&config));
    let left_out = config.left_out.join("\n");
    assert_eq!(config.left_out.len(), 4, "{left_out}");
    for words in [
        "server 192.0.2.1:80 of tcp 192.0.2.1:80: ",
        "it is the service tcp 192.0.2.2:80",
    ] {
        assert!(left_out.contains(words), "{left_out}");
    }
}

#[test]
fn hosts_have_the_port_and_the_weight_of_the_file() {
    let text = FILE.replace(
        "dns = \"_http._TCP.example.org.\"",
        "dns = \"pool.example.org\", port = 8080, weight = 5",
    );
    let config = with(&text, "pool.example.org", &[record("10.0.0.2", None, None)]);
    assert_eq!(servers(&config)[1], ("10.0.0.2:8080".to_owned(), 5));
    let nothing = with(&text, "another.example.org", &[]);
    assert!(
        nothing.services[0].from.incomplete,
        "nobody has answered yet"
    );
}

#[test]
fn what_is_wrong_with_a_source() {
    for (servers, words) in [
        ("{}", "does not say where they come from"),
        ("{ dns = \"a b\" }", "is not a name"),
        (
            "{ dns = \"_a._tcp.b\", port = 80 }",
            "SRV records name the port themselves",
        ),
        ("{ dns = \"a.b\", port = 0 }", "port 0 is out of range"),
        ("{ dsn = \"a.b\" }", "did you mean `dns`?"),
        ("\"a.b\"", "expected a table"),
    ] {
        let text = FILE.replace("{ dns = \"_http._TCP.example.org.\" }", servers);
        let report = Config::from_toml("test.toml", &text).expect_err(servers);
        assert!(report.to_string().contains(words), "{servers}: {report}");
    }
    for (dns, words) in [
        ("name_servers = \"ns.example.org\"", "is not an address"),
        ("name_servers = []", "there are 0 name servers"),
        ("min_ttl = \"0s\"", "`min_ttl` is out of range"),
        (
            "min_ttl = \"1h\"\nmax_ttl = \"1m\"",
            "`max_ttl` is below `min_ttl`",
        ),
        ("timeout = \"1ms\"", "`timeout` is out of range"),
    ] {
        let report =
            Config::from_toml("test.toml", &format!("{FILE}[dns]\n{dns}\n")).expect_err(dns);
        assert!(report.to_string().contains(words), "{dns}: {report}");
    }
    let text = format!(
        "{FILE}[dns]\nname_servers = [\"192.0.2.53\", \"[2001:db8::1]:5353\"]\nmin_ttl = \"1s\"\n"
    );
    let (config, _) = Config::from_toml("test.toml", &text).unwrap_or_else(|e| panic!("{e}"));
    let all: Vec<String> = config
        .lookups
        .name_servers
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(all, ["192.0.2.53:53", "[2001:db8::1]:5353"]);
}

#[test]
fn the_example_is_right_and_is_what_the_page_prints() {
    let example = include_str!("../../../../../examples/dns.toml");
    let page = include_str!("../../../../../docs/discovery.md");
    let (config, report) = Config::from_toml("dns.toml", example).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(config.services.len(), 2);
    assert_eq!(report.findings.len(), 0, "{report}");
    let (_, text) = example.split_once('\n').expect("a comment first");
    assert!(page.contains(text), "docs/discovery.md prints another file");
}

#[test]
fn no_more_names_than_are_looked_up() {
    let service = |n: usize| {
        format!(
            "[[service]]\naddress = \"192.0.2.1:{}\"\nforward = \"nat\"\nservers = {{ dns = \"n{n}.example.org\" }}\n",
            n + 1
        )
    };
    let text = |names: usize| (0..names).map(service).collect::<String>();
    assert!(Config::from_toml("test.toml", &text(1024)).is_ok());
    let report = Config::from_toml("test.toml", &text(1025)).expect_err("too many");
    assert!(report.to_string().contains("1025 names"), "{report}");
}
