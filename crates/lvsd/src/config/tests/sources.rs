//! Servers that sources name.

use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::sources::Record;
use crate::sources::etcd::{Etcd, Text};

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
        etcd: None,
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
fn the_examples_are_right_and_are_what_the_pages_print() {
    for (example, page, services) in [
        (
            include_str!("../../../../../examples/dns.toml"),
            include_str!("../../../../../docs/discovery.md"),
            2,
        ),
        (
            include_str!("../../../../../examples/etcd.toml"),
            include_str!("../../../../../docs/etcd.md"),
            1,
        ),
    ] {
        let (config, report) =
            Config::from_toml("example.toml", example).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(config.services.len(), services);
        assert_eq!(report.findings.len(), 0, "{report}");
        let (_, text) = example.split_once('\n').expect("a comment first");
        assert!(
            page.contains(text),
            "the page prints another file: {example}"
        );
    }
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

const MAIN: &str = "[cluster]\netcd = \"http://192.0.2.5:2379\"\ndirector = \"d1\"\n\
     [defaults]\nforward = \"nat\"\n\
     [[service]]\nname = \"web\"\naddress = \"192.0.2.1:80\"\nservers = { etcd = \"web\", weight = 4 }\n\
     [[service.server]]\naddress = \"10.0.0.1:80\"\n";

/// A service of etcd with one server.
fn remote(address: &str, server: &str) -> String {
    format!("[[service]]\naddress = \"{address}\"\n[[service.server]]\naddress = \"{server}\"\n")
}

/// What etcd has, with what was right before.
fn etcd(services: &[(&str, &str, Option<&str>)], servers: &[Record]) -> Gathered {
    let mut etcd = Etcd {
        prefix: "/lvs/".to_owned(),
        revision: 7,
        ..Etcd::default()
    };
    for (name, text, good) in services {
        let text = Text {
            text: (*text).to_owned(),
            good: good.map(ToOwned::to_owned),
        };
        etcd.services.insert((*name).to_owned(), text);
    }
    let servers = servers.iter().enumerate();
    let pool = servers
        .map(|(n, record)| (n.to_string(), *record))
        .collect();
    etcd.pools.insert("web".to_owned(), pool);
    Gathered {
        etcd: Some(etcd),
        ..Gathered::default()
    }
}

fn merged(gathered: &Gathered) -> Config {
    let (config, _) = Config::from_toml("test.toml", MAIN).unwrap_or_else(|e| panic!("{e}"));
    config.with(gathered).unwrap_or_else(|e| panic!("{e}")).0
}

/// The virtual addresses that there are.
fn vips(config: &Config) -> Vec<String> {
    let services = config.services.iter();
    services
        .filter_map(|service| Some(service.address()?.to_string()))
        .collect()
}

#[test]
fn services_of_etcd_come_behind_those_of_the_file_which_win() {
    let (own, same, name) = (
        remote("192.0.2.2:80", "10.0.0.2:80"),
        remote("192.0.2.1:80", "10.0.0.3:80"),
        remote("192.0.2.3:80", "10.0.0.3:80")
            .replace("[[service]]\n", "[[service]]\nname = \"web\"\n"),
    );
    let gathered = etcd(
        &[("a", &own, None), ("b", &same, None), ("c", &name, None)],
        &[
            record("10.0.0.9", None, None),
            record("10.0.0.1", Some(80), Some(9)),
        ],
    );
    let config = merged(&gathered);
    assert_eq!(vips(&config), ["192.0.2.1:80", "192.0.2.2:80"]);
    // `[defaults]` holds for them, and servers of a pool are behind the file's as well.
    let wanted = [("10.0.0.1:80", 1), ("10.0.0.9:80", 4)];
    assert_eq!(
        servers(&config),
        wanted.map(|(address, weight)| (address.to_owned(), weight))
    );
    let left_out = config.left_out.join("\n");
    assert_eq!(config.left_out.len(), 2, "{left_out}");
    for words in [
        "etcd key /lvs/services/b: line 2: service tcp 192.0.2.1:80 exists twice",
        "etcd key /lvs/services/c: line 2: two services are called `web`",
    ] {
        assert!(left_out.contains(words), "{left_out}");
    }
    assert_eq!(config.in_force.len(), 1);
    assert_eq!(config.revision.number, 7);
    assert_eq!(config.text(), MAIN, "what is kept is the file's own");
    let place = config.files.place(config.services[1].line.0);
    assert_eq!(place, "etcd:/lvs/services/a:1");
    assert!(!config.awaits_etcd && !config.services[0].from.incomplete);
    // Of another prefix it is nobody's.
    let other = Gathered {
        etcd: gathered.etcd.map(|etcd| Etcd {
            prefix: "/other/".to_owned(),
            ..etcd
        }),
        ..Gathered::default()
    };
    let other = merged(&other);
    assert_eq!((vips(&other).len(), servers(&other).len()), (1, 1));
    assert!(other.awaits_etcd && other.services[0].from.unheard);
    // A pool that nobody has ever been in is known, and may have had servers.
    let config = merged(&Gathered {
        etcd: Some(Etcd {
            prefix: "/lvs/".to_owned(),
            ..Etcd::default()
        }),
        ..Gathered::default()
    });
    let from = &config.services[0].from;
    assert!(!config.awaits_etcd && !from.unheard && from.incomplete);
}

#[test]
fn a_wrong_service_is_left_out_alone_and_what_it_was_stays() {
    let good = remote("192.0.2.2:80", "10.0.0.2:80");
    let other = remote("192.0.2.3:80", "10.0.0.3:80");
    let exec = good.replace(
        "[[service.server]]",
        "check = { type = \"exec\", command = \"/bin/true\" }\n[[service.server]]",
    );
    for (wrong, words) in [
        ("", "not one [[service]]"),
        ("\u{0}\u{1}", "line 1"),
        ("[[service]", "line 1"),
        ("[lvsd]\nlog = \"off\"\n", "belongs into the main file"),
        (&format!("{good}{other}"), "not one [[service]]"),
        (&format!("{good}[[mark]]\nset = 1\n"), "not one [[service]]"),
        (&exec, "run programs here"),
        (
            "[[service]]\nadress = \"x\"\n",
            "line 2: unknown key `adress`",
        ),
        (&remote("192.0.2.2:80", "nonsense"), "line 4"),
        // It makes the file wrong, whose server it is.
        (&remote("10.0.0.1:80", "10.0.0.7:80"), "is the service"),
    ] {
        let services =
            |good: Option<&str>| merged(&etcd(&[("a", wrong, good), ("b", &other, None)], &[]));
        let config = services(None);
        assert_eq!(vips(&config), ["192.0.2.1:80", "192.0.2.3:80"], "{wrong}");
        assert!(config.left_out[0].contains(words), "{:?}", config.left_out);
        let config = services(Some(&good));
        let all = ["192.0.2.1:80", "192.0.2.2:80", "192.0.2.3:80"];
        assert_eq!(vips(&config), all, "{wrong}");
        let left_out = &config.left_out[0];
        assert!(left_out.ends_with("what it was before stays"), "{left_out}");
        assert_eq!(&*config.in_force[0].1, good);
        assert_eq!(vips(&services(Some(wrong))).len(), 2, "{wrong}");
    }
}

#[test]
fn what_is_wrong_with_a_cluster() {
    let directory = tempfile::tempdir().unwrap();
    let empty = directory.path().join("empty");
    std::fs::write(&empty, "\n").unwrap();
    let empty = empty.display();
    let with = |keys: &str| format!("[cluster]\n{keys}\n{FILE}");
    for (keys, words) in [
        ("", "`etcd` is missing"),
        ("etcd = \"10.0.0.5:2379\"", "is not a member of etcd"),
        (
            "etcd = \"https://10.0.0.5:2379/x\"",
            "is not a member of etcd",
        ),
        ("etcd = \"https://a@10.0.0.5\"", "is not a member of etcd"),
        ("etcd = []", "there are 0 members"),
        (
            "etcd = [\"http://10.0.0.5\", \"http://10.0.0.5:2379\"]",
            "is named twice",
        ),
        (
            &format!("etcd = \"http://e\"\ncert = \"{empty}\""),
            "`key` is missing",
        ),
        (
            &format!("etcd = \"http://e\"\nkey = \"{empty}\""),
            "`cert` is missing",
        ),
        ("etcd = \"https://10.0.0.5:2379\"", "`ca` is missing"),
        ("etcd = \"https://e\"\nca = \"/nowhere\"", "cannot read"),
        (
            &format!("etcd = \"https://e\"\nca = \"{empty}\""),
            "no certificate",
        ),
        ("etcd = \"http://e\"\nprefix = \"lvs\"", "is not a prefix"),
        (
            "etcd = \"http://e\"\ndirector = \"a/b\"",
            "is not the name of a director",
        ),
        (
            "etcd = \"http://e\"\nlease = \"1s\"",
            "`lease` is out of range",
        ),
        ("etcd = \"http://e\"\nlease = \"2s500ms\"", "whole seconds"),
        (
            "etcd = \"http://e\"\ntimeout = \"1ms\"",
            "`timeout` is out of range",
        ),
        (
            "etcd = \"http://e\"\nagree = 65",
            "`agree` 65 is out of range",
        ),
        (
            "etcd = \"http://e\"\nuser = \"u\"",
            "a user without a password",
        ),
        (
            "etcd = \"http://e\"\npassword_file = \"/x\"",
            "a password without a user",
        ),
        (
            &format!("etcd = \"http://e\"\nuser = \"u\"\npassword_file = \"{empty}\""),
            "no password in this file",
        ),
    ] {
        let report = Config::from_toml("test.toml", &with(keys)).expect_err(keys);
        assert!(report.to_string().contains(words), "{keys}: {report}");
    }
    for (servers, words) in [
        ("{ etcd = \"web\" }", "no etcd is named"),
        ("{ etcd = \"a b\" }", "is not the name of a pool"),
        ("{ etcd = \"a\", dns = \"b\" }", "from DNS and from etcd"),
    ] {
        let text = FILE.replace("{ dns = \"_http._TCP.example.org.\" }", servers);
        let report = Config::from_toml("test.toml", &text).expect_err(servers);
        assert!(report.to_string().contains(words), "{servers}: {report}");
    }
    for (keys, words) in [
        ("ca = \"/etc/ssl/ca.pem\"", "this file is not used"),
        ("lease = \"2s\"", "before an answer is given up"),
    ] {
        let keys = format!("etcd = \"http://e\"\n{keys}");
        let (_, report) = Config::from_toml("test.toml", &with(&keys)).expect(words);
        assert!(report.to_string().contains(words), "{keys}: {report}");
    }
    let file = directory.path().join("password");
    std::fs::write(&file, "s3cret\n").unwrap();
    let keys = format!(
        "etcd = [\"http://10.0.0.5:2379\", \"http://[2001:db8::5]\"]\nuser = \"lvs\"\npassword_file = \"{}\"",
        file.display()
    );
    let (config, report) =
        Config::from_toml("test.toml", &with(&keys)).unwrap_or_else(|e| panic!("{e}"));
    assert!(report.to_string().contains("in the clear"), "{report}");
    for (mode, warned) in [(0o644, true), (0o601, true), (0o640, false), (0o400, false)] {
        let mode = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(&file, mode.clone()).unwrap();
        let (_, report) = Config::from_toml("test.toml", &with(&keys)).expect("valid");
        let words = "everybody on this host may read the password";
        let said = report.to_string();
        assert_eq!(said.contains(words), warned, "{mode:?}: {said}");
    }
    let cluster = config.cluster.expect("there");
    let members: Vec<String> = cluster
        .access
        .endpoints
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        members,
        ["http://10.0.0.5:2379", "http://[2001:db8::5]:2379"]
    );
    assert!(!format!("{cluster:?}").contains("s3cret"), "{cluster:?}");
}
