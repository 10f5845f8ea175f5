//! The services and servers that DNS, etcd and Kubernetes add to a file.

use super::*;
use crate::cases::cases;
use crate::sources::kubernetes::Kubernetes;

const FILE: &str = "[[service]]\nname = \"web\"\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\n\
     discover = { dns = \"_http._TCP.example.org.\" }\n\
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

fn read(text: &str) -> Config {
    let (config, _) = Config::from_toml("test.toml", text).unwrap_or_else(|e| panic!("{e}"));
    config
}

/// Expands `text` with the DNS records of `name`.
fn with(text: &str, name: &str, records: &[Record]) -> Expanded {
    let gathered = Gathered {
        dns: [(name.to_owned(), records.to_vec())].into(),
        ..Gathered::default()
    };
    expand(&read(text), &gathered)
}

fn servers(expanded: &Expanded) -> Vec<(String, i32)> {
    let servers = expanded.services[0].servers.iter();
    servers
        .map(|server| (server.address.to_string(), server.config.weight))
        .collect()
}

#[test]
fn dns_servers_follow_servers_of_the_file_without_duplicates_or_other_family() {
    let expanded = with(
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
        servers(&expanded),
        wanted.map(|(address, weight)| (address.to_owned(), weight))
    );
    assert!(!expanded.services[0].incomplete);
    assert_eq!(expanded.left_out, Vec::<String>::new());
}

#[test]
fn servers_from_dns_that_cannot_serve_are_omitted_and_reported() {
    let expanded = with(
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
    assert_eq!(servers(&expanded).len(), 2, "{:?}", servers(&expanded));
    let left_out = expanded.left_out.join("\n");
    assert_eq!(expanded.left_out.len(), 4, "{left_out}");
    for words in [
        "server 192.0.2.1:80 of tcp 192.0.2.1:80: ",
        "its address and port belong to the service tcp 192.0.2.2:80",
    ] {
        assert!(left_out.contains(words), "no {words:?} in {left_out}");
    }
}

#[test]
fn dns_servers_without_port_and_weight_use_values_of_the_file() {
    let text = FILE.replace(
        "dns = \"_http._TCP.example.org.\"",
        "dns = \"pool.example.org\", port = 8080, weight = 5",
    );
    let expanded = with(&text, "pool.example.org", &[record("10.0.0.2", None, None)]);
    assert_eq!(servers(&expanded)[1], ("10.0.0.2:8080".to_owned(), 5));
    let nothing = with(&text, "another.example.org", &[]);
    assert!(
        nothing.services[0].incomplete,
        "the list of servers counts as complete before any answer"
    );
}

const MAIN: &str = "[cluster]\netcd = \"http://192.0.2.5:2379\"\ndirector = \"d1\"\n\
     [defaults]\nforward = \"nat\"\n\
     [[service]]\nname = \"web\"\naddress = \"192.0.2.1:80\"\ndiscover = { etcd = \"web\", weight = 4 }\n\
     [[service.server]]\naddress = \"10.0.0.1:80\"\n";

/// TOML of a service in etcd with one server.
fn remote(address: &str, server: &str) -> String {
    format!("[[service]]\naddress = \"{address}\"\n[[service.server]]\naddress = \"{server}\"\n")
}

/// Answers of etcd: services with their present and last valid texts, and servers.
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

/// Expands [`MAIN`] with `gathered`.
fn merged(gathered: &Gathered) -> Expanded {
    expand(&read(MAIN), gathered)
}

/// The virtual addresses of the expanded services.
fn vips(expanded: &Expanded) -> Vec<String> {
    let services = expanded.services.iter();
    services
        .filter_map(|service| Some(service.address()?.to_string()))
        .collect()
}

#[test]
fn etcd_services_follow_services_of_the_file_and_conflicting_services_are_omitted() {
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
    let expanded = merged(&gathered);
    assert_eq!(vips(&expanded), ["192.0.2.1:80", "192.0.2.2:80"]);
    // `[defaults]` applies to services from etcd. Servers of a pool follow those of the file.
    let wanted = [("10.0.0.1:80", 1), ("10.0.0.9:80", 4)];
    assert_eq!(
        servers(&expanded),
        wanted.map(|(address, weight)| (address.to_owned(), weight))
    );
    let left_out = expanded.left_out.join("\n");
    assert_eq!(expanded.left_out.len(), 2, "{left_out}");
    for words in [
        "etcd key /lvs/services/b: service tcp 192.0.2.1:80 exists twice",
        "etcd key /lvs/services/c: two services are called `web`",
    ] {
        assert!(left_out.contains(words), "no {words:?} in {left_out}");
    }
    assert_eq!(expanded.in_force.len(), 1);
    assert_eq!(expanded.revision.number, 7);
    let place = expanded.files.place(expanded.services[1].line);
    assert_eq!(place, "etcd:/lvs/services/a:1");
    assert!(!expanded.awaits_services && !expanded.services[0].incomplete);
    // Keys with another prefix are not used.
    let other = Gathered {
        etcd: gathered.etcd.map(|etcd| Etcd {
            prefix: "/other/".to_owned(),
            ..etcd
        }),
        ..Gathered::default()
    };
    let other = merged(&other);
    assert_eq!((vips(&other).len(), servers(&other).len()), (1, 1));
    assert!(other.awaits_services && other.services[0].unheard);
    // The pool does not exist in etcd, so that its servers in the dataplane stay.
    let expanded = merged(&Gathered {
        etcd: Some(Etcd {
            prefix: "/lvs/".to_owned(),
            ..Etcd::default()
        }),
        ..Gathered::default()
    });
    let web = &expanded.services[0];
    assert!(!expanded.awaits_services && !web.unheard && web.incomplete);
}

#[test]
fn invalid_etcd_service_is_ignored_or_replaced_by_its_last_valid_text() {
    let good = remote("192.0.2.2:80", "10.0.0.2:80");
    let other = remote("192.0.2.3:80", "10.0.0.3:80");
    let exec = good.replace(
        "[[service.server]]",
        "check = { type = \"exec\", command = \"/bin/true\" }\n[[service.server]]",
    );
    for (wrong, words) in [
        ("", "exactly one [[service]]"),
        ("\u{0}\u{1}", "line 1"),
        ("[[service]", "line 1"),
        ("[lvsd]\nlog = \"off\"\n", "belongs in the main file"),
        (&format!("{good}{other}"), "exactly one [[service]]"),
        (
            &format!("{good}[[mark]]\nset = 1\n"),
            "exactly one [[service]]",
        ),
        (&exec, "run programs on this host"),
        (
            "[[service]]\nadress = \"x\"\n",
            "line 2: unknown key `adress`",
        ),
        (&remote("192.0.2.2:80", "nonsense"), "line 4"),
        // Another service of the file has the address of this server.
        (
            &remote("10.0.0.1:80", "10.0.0.7:80"),
            "belongs to the service",
        ),
    ] {
        let services =
            |good: Option<&str>| merged(&etcd(&[("a", wrong, good), ("b", &other, None)], &[]));
        let expanded = services(None);
        assert_eq!(vips(&expanded), ["192.0.2.1:80", "192.0.2.3:80"], "{wrong}");
        assert!(
            expanded.left_out[0].contains(words),
            "no {words:?} in {:?}",
            expanded.left_out
        );
        let expanded = services(Some(&good));
        let all = ["192.0.2.1:80", "192.0.2.2:80", "192.0.2.3:80"];
        assert_eq!(vips(&expanded), all, "{wrong}");
        let left_out = &expanded.left_out[0];
        assert!(
            left_out.ends_with("its previous state stays"),
            "{wrong}: does not end with `its previous state stays`: {left_out}"
        );
        assert_eq!(expanded.in_force[0].1, good);
        assert_eq!(vips(&services(Some(wrong))).len(), 2, "{wrong}");
    }
}

#[test]
fn etcd_service_that_conflicts_with_earlier_key_is_refused() {
    let first = remote("192.0.2.2:80,8000-8999", "10.0.0.2");
    let elsewhere = remote("192.0.2.4:80", "10.0.0.4:80");
    let of =
        |text: &str, more: &str| text.replace("[[service]]\n", &format!("[[service]]\n{more}"));
    for (a, b, words) in [
        (
            first.clone(),
            remote("192.0.2.2:8500,9000", "10.0.0.3"),
            "two services match the same ports",
        ),
        (first.clone(), first.clone(), "exists twice"),
        (
            of(&elsewhere, "name = \"x\"\n"),
            of(&first, "name = \"x\"\n"),
            "two services are called `x`",
        ),
        (
            of(&remote("192.0.2.4:81", "10.0.0.4:80"), "vip = \"own\"\n"),
            of(&elsewhere, "vip = \"host\"\n"),
            "belongs to the dataplane for one service and to the host for another",
        ),
        (
            elsewhere.clone(),
            remote("192.0.2.5:80", "192.0.2.4:80"),
            "the server 192.0.2.4:80 belongs to the service tcp 192.0.2.4:80",
        ),
        (
            remote("192.0.2.5:80", "192.0.2.4:80"),
            elsewhere.clone(),
            "the server 192.0.2.4:80 belongs to the service tcp 192.0.2.4:80",
        ),
        (
            remote("192.0.2.5:80", "127.0.0.1:8080"),
            of(
                &remote("0.0.0.0:8080", "10.0.0.4:80"),
                "forward = \"proxy\"\n",
            ),
            "the server 127.0.0.1:8080 belongs to the service tcp 0.0.0.0:8080",
        ),
        (
            of(
                &remote("0.0.0.0:8080", "10.0.0.4:80"),
                "forward = \"proxy\"\n",
            ),
            remote("192.0.2.5:80", "127.0.0.1:8080"),
            "the server 127.0.0.1:8080 belongs to the service tcp 0.0.0.0:8080",
        ),
    ] {
        let expanded = merged(&etcd(&[("a", &a, None), ("b", &b, None)], &[]));
        assert_eq!(expanded.services.len(), 2, "{a}{b}");
        assert_eq!(expanded.in_force[0].0, "a");
        let reported = expanded.left_out.concat();
        assert!(
            reported.starts_with("etcd key /lvs/services/b: "),
            "{words}: does not begin with `etcd key /lvs/services/b: `: {reported}"
        );
        assert!(reported.contains(words), "no {words:?} in {reported}");
    }
}

#[test]
fn etcd_services_are_checked_with_settings_of_the_file() {
    let good = remote("192.0.2.2:80", "10.0.0.2:80");
    let tunnel = "[[service]]\naddress = \"192.0.2.2:80\"\nforward = \"tun\"\n\
         [[service.server]]\naddress = \"[2001:db8::1]:80\"\n";
    let cluster = "[cluster]\netcd = \"http://192.0.2.5:2379\"\ndirector = \"d1\"\n";
    for [file, key, words] in cases(
        r#"
             | good | line 3: `forward` of the server
            [defaults] ; forward = "nat" | good |
            [defaults] ; forward = "nat" ; panic_below = 101 | good | the [defaults] of the file cause an error: `panic_below` 101 is out of range
            [dataplane] ; backend = "tun" ; [defaults] ; forward = "dr" | good | the [defaults] of the file cause an error: direct routing needs frames
            [defaults] ; forward = "fullnat" | good | line 4: full NAT needs an IPv4 local address
            [dataplane] ; local_addresses = ["192.0.2.77"] ; [defaults] ; forward = "fullnat" | good |
             | tunnel |
            [sync.ipvs] ; interface = "eth0" | tunnel | which synchronisation does not support
        "#,
    ) {
        let key = if key == "good" { &good } else { tunnel };
        let config = read(&format!("{cluster}{file}"));
        let expanded = expand(&config, &etcd(&[("a", key, None)], &[]));
        let reported = expanded.left_out.concat();
        assert_eq!(
            expanded.services.len(),
            usize::from(words.is_empty()),
            "{file}{reported}"
        );
        assert!(reported.contains(words), "{file}{reported}");
    }
}

#[test]
fn etcd_service_with_several_addresses_is_accepted_or_omitted_as_a_whole() {
    let several = |last: &str| {
        let addresses = format!("[\"192.0.2.2:80\", \"192.0.2.3:80\", \"{last}\"]");
        let text = remote("ADDRESSES", "10.0.0.2:80");
        text.replace("\"ADDRESSES\"", &addresses)
    };
    let count = |last: &str| {
        let text = several(last);
        let expanded = merged(&etcd(&[("a", &text, None)], &[]));
        (expanded.services.len(), expanded.left_out.len())
    };
    assert_eq!(
        count("[2001:db8::1]:80"),
        (1, 1),
        "the servers are not divided by family"
    );
    assert_eq!(count("192.0.2.4:80"), (4, 0));
    assert_eq!(
        count("192.0.2.1:80"),
        (1, 1),
        "a service with an address of the file is accepted"
    );
}

#[test]
fn etcd_service_with_pool_gets_usable_servers_of_the_pool() {
    let key = "\n[[service]]\naddress = \"192.0.2.2:80\"\ndiscover = { etcd = \"web\", port = 8080 }\n\
         check = { type = \"tcp\" }\nsorry = \"10.0.0.8:8080\"\n";
    let gathered = etcd(
        &[("a", key, None)],
        &[
            record("10.0.0.8", None, None),
            record("10.0.0.9", None, Some(3)),
            record("192.0.2.1", Some(80), None),
        ],
    );
    let expanded = merged(&gathered);
    let [server] = expanded.services[1].servers.as_slice() else {
        panic!("{:?}", expanded.services[1].servers);
    };
    assert_eq!(server.address, "10.0.0.9:8080".parse().unwrap());
    assert_eq!(server.config.weight, 3);
    let check = server.check.as_ref().expect("the server has a check");
    assert_eq!(check.server, server.address);
    let place = expanded.files.place(server.line);
    assert_eq!(place, "etcd:/lvs/services/a:4");
    let left_out = expanded.left_out.join("\n");
    for words in [
        "server 10.0.0.8:8080 of tcp 192.0.2.2:80: it is the sorry server",
        "server 192.0.2.1:80 of tcp 192.0.2.2:80: its address and port belong to the service tcp 192.0.2.1:80",
    ] {
        assert!(left_out.contains(words), "no {words:?} in {left_out}");
    }
    assert!(expanded.is_same(&expand(&read(MAIN), &gathered)));
}

#[test]
fn etcd_services_above_the_limit_of_dns_names_are_ignored() {
    let service = |n: usize| {
        format!(
            "[[service]]\naddress = \"192.0.2.2:{}\"\ndiscover = {{ dns = \"n{n}.example.org\" }}\n",
            n + 1
        )
    };
    let names: Vec<(String, String)> = (0..=NAMES_MAX)
        .map(|n| (format!("{n:04}"), service(n)))
        .collect();
    let services: Vec<_> = names
        .iter()
        .map(|(name, text)| (&**name, &**text, None))
        .collect();
    let expanded = merged(&etcd(&services, &[]));
    assert_eq!(expanded.services.len(), 1 + NAMES_MAX);
    let reported = expanded.left_out.concat();
    assert!(
        reported.contains("/1024: the services have 1025 names in DNS"),
        "no `/1024: the services have 1025 names in DNS` in {reported}"
    );
}

const KUBERNETES: &str = "[kubernetes]\nserver = \"http://192.0.2.5:6443\"\ndirector = \"d1\"\n\
     [[kubernetes.pool]]\nname = \"public\"\naddresses = \"192.0.2.0/24\"\n\
     [defaults]\nforward = \"nat\"\n\
     [[service]]\nname = \"web\"\naddress = \"192.0.2.1:80\"\n\
     [[service.server]]\naddress = \"10.0.0.1:80\"\n";

/// Answers of Kubernetes with the services' present and last valid texts.
fn kubernetes(name: &str, services: &[(&str, &str, Option<&str>)]) -> Gathered {
    let services = services.iter().map(|(key, text, good)| {
        let text = Text {
            text: (*text).to_owned(),
            good: good.map(ToOwned::to_owned),
        };
        ((*key).to_owned(), text)
    });
    Gathered {
        kubernetes: Some(Kubernetes {
            name: name.to_owned(),
            services: services.collect(),
        }),
        ..Gathered::default()
    }
}

#[test]
fn kubernetes_services_follow_services_of_the_file_and_invalid_services_are_omitted() {
    let own = remote("192.0.2.2:80", "10.0.0.2:30080");
    let same = remote("192.0.2.1:80", "10.0.0.3:30080");
    let wrong = own.replace("address = \"192", "protocol = \"x\"\naddress = \"192");
    let name = "http://192.0.2.5:6443";
    let config = read(KUBERNETES);
    let all = [
        ("shop/a/tcp/80", own.as_str(), None),
        ("shop/b/tcp/80", same.as_str(), None),
        ("shop/c/tcp/80", wrong.as_str(), None),
    ];
    let expanded = expand(&config, &kubernetes(name, &all));
    assert_eq!(vips(&expanded), ["192.0.2.1:80", "192.0.2.2:80"]);
    assert!(!expanded.awaits_services && expanded.in_force.is_empty());
    assert_eq!(expanded.kubernetes.in_force.len(), 1);
    let refused: Vec<&String> = expanded.kubernetes.refused.keys().collect();
    assert_eq!(refused, ["shop/b/tcp/80", "shop/c/tcp/80"]);
    assert!(expanded.left_out[0].starts_with("Kubernetes Service shop/b/tcp/80: "));
    let place = expanded.files.place(expanded.services[1].line);
    assert_eq!(place, "kubernetes:shop/a/tcp/80:1");
    // The last valid text stays.
    let expanded = expand(
        &config,
        &kubernetes(name, &[("shop/c/tcp/80", &wrong, Some(&own))]),
    );
    assert_eq!(vips(&expanded), ["192.0.2.1:80", "192.0.2.2:80"]);
    assert!(expanded.left_out[0].ends_with("its previous state stays"));
    // Services in the dataplane stay if the answer is of another cluster, or missing.
    for gathered in [kubernetes("other", &all), Gathered::default()] {
        let expanded = expand(&config, &gathered);
        assert_eq!(vips(&expanded), ["192.0.2.1:80"]);
        assert!(expanded.awaits_services);
    }
    // Without `[kubernetes]` in the file, its services are not used.
    let plain = expand(&read(MAIN), &kubernetes(name, &all));
    assert_eq!(vips(&plain), ["192.0.2.1:80"]);
}
