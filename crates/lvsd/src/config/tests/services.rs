//! Services, and the resulting servers and VIPs.

use super::*;

/// The text of a file with a service that has one server. Its check is a TCP check, unless `keys`
/// contains a check.
fn checked(keys: &str, top: &str) -> String {
    let check = match keys.contains("check = ") {
        true => "",
        false => "check = { type = \"tcp\" }",
    };
    format!(
        "{top}\n[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\n{check}\n{keys}\n[[service.server]]\naddress = \"10.0.0.1:80\"\n"
    )
}

#[test]
fn failure_settings_have_defaults_and_harmful_combinations_cause_warnings() {
    let persistence = "persistence = { timeout = \"6m\" }";
    let expires = "[sysctl]\nexpire_quiescent_template = 1";
    let stay = "clients stay on a server whose check fails";
    let refused = "clients of a server whose check fails are refused";
    let drained = "clients of a server that drains are refused";
    let moot = "`on_server_down` then has no effect";
    for (keys, top, warnings) in [
        ("", "", &[][..]),
        (persistence, "", &[stay]),
        (persistence, expires, &[]),
        ("scheduler = \"dh\"", "", &[drained, refused]),
        ("scheduler = \"sh\"", "", &[drained, refused]),
        ("scheduler = \"mh\"\ncheck = \"none\"", "", &[drained]),
        (
            "scheduler = \"mh\"\nscheduler_flags = [\"mh-fallback\"]",
            "",
            &[],
        ),
        ("on_server_down = \"reset\"", "", &[moot]),
        ("on_server_down = \"reset\"\ncheck = \"none\"", "", &[]),
    ] {
        let text = checked(keys, top);
        let (config, report) =
            Config::from_toml("test.toml", &text).expect("the file has only warnings");
        let service = &config.services[0];
        assert_eq!(service.on_check_failure, OnCheckFailure::Quiesce, "{keys}");
        assert_eq!(service.drain.as_secs(), 30, "{keys}");
        assert_eq!(report.findings.len(), warnings.len(), "{keys}: {report}");
        let message = report.to_string();
        for words in warnings {
            assert!(message.contains(words), "{keys}: no {words:?} in {message}");
        }
    }
    for keys in [
        "scheduler = \"sh\"\non_check_failure = \"remove\"\ndrain = \"0s\"",
        "scheduler = \"sh\"\non_check_failure = \"quiesce\"\ndrain = \"30s\"",
        "persistence = { timeout = \"6m\" }\non_check_failure = \"remove\"",
        "on_server_down = \"reset\"\non_check_failure = \"remove\"",
    ] {
        assert_eq!(report(&checked(keys, "")).to_string(), "", "{keys}");
    }
    let message = errors(&checked("drain = \"2d\"", ""));
    assert!(
        message.contains("`drain` is out of range"),
        "no \"`drain` is out of range\" in {message}"
    );
}

#[test]
fn service_without_check_causes_warning_unless_check_is_none() {
    let words = "servers have no health check";
    let text = checked("check = \"none\"", "");
    assert_eq!(report(&text).to_string(), "");
    let none = text.replace("check = \"none\"", "");
    assert_eq!(report(&none).to_string().matches(words).count(), 1);
    let several = none.replace("\"192.0.2.1:80\"", "[\"192.0.2.1:80\", \"192.0.2.2:80\"]");
    assert_eq!(report(&several).to_string().matches(words).count(), 1);
    let by_default = none.replace("[[service]]", "[defaults]\ncheck = \"none\"\n[[service]]");
    assert_eq!(report(&by_default).to_string(), "");
    let discovered = "[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\ndiscover = { dns = \"a.b\" }\n";
    assert!(report(discovered).to_string().contains(words));
}

#[test]
fn duplicate_service_is_reported_with_both_positions() {
    let found = errors(
        r#"[[service]]
address = "192.0.2.10:80"
forward = "nat"
check = "none"
[[service.server]]
address = "10.0.0.11:80"
[[service]]
address = "192.0.2.10:80"
forward = "nat"
check = "none"
[[service.server]]
address = "10.0.0.12:80"
"#,
    );
    assert_eq!(
        found,
        r#"error: service tcp 192.0.2.10:80 exists twice
 --> test.toml:8:11
  |
2 | address = "192.0.2.10:80"
  |           --------------- the first one
...
8 | address = "192.0.2.10:80"
  |           ^^^^^^^^^^^^^^^
  |
  = help: put all servers into one [[service]], or change address, port or protocol"#
    );
}

#[test]
fn vip_with_two_owners_is_refused() {
    let service = |port: u16, vip: &str| {
        format!(
            "[[service]]\naddress = \"192.0.2.10:{port}\"\nforward = \"nat\"\nvip = \"{vip}\"\n[[service.server]]\naddress = \"10.0.0.1\"\n"
        )
    };
    let both = service(80, "own") + &service(443, "host");
    assert!(errors(&both).contains("belongs to the dataplane for one service"));
    load(&(service(80, "own") + &service(443, "auto")));
}

#[test]
fn port_zero_without_persistence_is_refused() {
    let text = "[[service]]\naddress = \"192.0.2.10:0\"\nforward = \"nat\"\n[[service.server]]\naddress = \"10.0.0.1\"\n";
    assert!(errors(text).contains("needs persistence"));
    load(&text.replace("forward", "persistence = { timeout = \"6m\" }\nforward"));
}

#[test]
fn settings_that_kernel_ipvs_lacks_are_parsed_and_their_invalid_values_refused() {
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
        lvs_core::settings::OnServerDown::Reset
    );
    assert_eq!(service.on_check_failure, OnCheckFailure::Quiesce);
    let limits = "limits = { connections = 1000, source_rate = 20, source_bits_v6 = 56 }";
    let limited = load(&file(&format!("forward = \"nat\"\n{limits}")));
    assert_eq!(
        limited.services[0].config.extras.limits,
        lvs_core::settings::Limits {
            connections: 1000,
            source_rate: 20,
            source_bits_v6: 56,
            ..lvs_core::settings::Limits::default()
        }
    );
    let plain = load(&file("forward = \"nat\""));
    assert!(plain.services[0].config.extras.is_off());

    let text =
        file("forward = \"nat\"\non_check_failure = \"quiesce\"\non_server_down = \"reschedule\"");
    let (_, warnings) = Config::from_toml("test.toml", &text).expect("the file has only a warning");
    let message = warnings.to_string();
    assert!(
        message.contains("`on_server_down` then has no effect"),
        "no \"`on_server_down` then has no effect\" in {message}"
    );

    for (service, expected) in [
        (
            "forward = \"nat\"\non_server_down = \"rset\"",
            "error: unknown word `rset`\n --> test.toml:4:18\n",
        ),
        (
            "forward = \"nat\"\nslow_start = \"500ms\"",
            "error: `slow_start` is not a valid time\n --> test.toml:4:14\n",
        ),
        (
            "forward = \"nat\"\nlimits = { source_bits_v4 = 33 }",
            "error: source_bits_v4 33 is out of range\n --> test.toml:4:29\n",
        ),
        (
            "forward = \"nat\"\nslow_start = \"2d\"",
            "write whole seconds, up to \"1d\"",
        ),
        (
            "forward = \"dr\"\nscheduler = \"ewma\"",
            "error: the scheduler ewma needs servers that are reached by NAT\n --> test.toml:3:11\n",
        ),
    ] {
        let message = errors(&file(service));
        assert!(message.contains(expected), "no {expected:?} in {message}");
    }
    let message = errors(&file("forward = \"nat\"\non_server_down = \"rset\""));
    assert!(
        message.contains("did you mean \"reset\"?"),
        "no `did you mean \"reset\"?` in {message}"
    );
}

#[test]
fn file_without_service_causes_warning_unless_etcd_is_configured() {
    for text in ["", "[sysctl]\nconn_reuse_mode = 1\n"] {
        let (config, warnings) =
            Config::from_toml("test.toml", text).expect("a file without services is valid");
        assert!(config.services.is_empty());
        let message = warnings.to_string();
        assert!(
            message.contains("warning: there is no [[service]]"),
            "{text:?}: no `warning: there is no [[service]]` in {message}"
        );
        assert!(
            message.contains("test.toml:1:1"),
            "{text:?}: no `test.toml:1:1` in {message}"
        );
    }
    // A file without services is valid if etcd contains them.
    let text = "[cluster]\netcd = \"http://10.0.0.5:2379\"\n";
    let (_, warnings) = Config::from_toml("test.toml", text).expect("the file is valid");
    assert_eq!(warnings.to_string(), "");
}

#[test]
fn defaults_apply_to_omitted_keys_of_services_and_error_in_defaults_is_reported_once() {
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

    // An error in `[defaults]` is reported once for all services.
    let wrong = text
        .replace("\"tcp\"", "\"tpc\"")
        .replace("10.0.0.12", "10.0.0.912");
    let report = Config::from_toml("test.toml", &wrong).expect_err("the invalid file is accepted");
    assert_eq!(report.errors(), 2, "{report}");
}

#[test]
fn invalid_quorum_sorry_or_panic_keys_are_reported() {
    for [line, words] in cases(
        r#"
            quorum = 0 | quorum 0 is out of range
            quorum = { up = 1, down = 2 } | `down` (2) is above `up` (1)
            quorum = { down = 2 } | `up` of the quorum is missing
            quorum = 5 | the quorum is 5, and the service has 1 server
            sorry = "10.0.0.1" | the sorry server is a server of the service
            sorry = "x" | is not an address and a port
            panic_below = 101 | `panic_below` 101 is out of range
            below_quorum = "giveup" | did you mean "give-up"?
            vip = "host" ; below_quorum = "give-up" | cannot release an address
        "#,
    ) {
        let text = format!(
            "[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\n{line}\n[[service.server]]\naddress = \"10.0.0.1\"\n"
        );
        let report = match Config::from_toml("test.toml", &text) {
            Ok((_, report)) | Err(report) => report.to_string(),
        };
        assert!(report.contains(words), "{line}: no {words:?} in {report}");
    }
}

#[test]
fn quorum_above_listed_servers_is_accepted_with_discovery() {
    let text = "[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\nquorum = 5\n\
                check = { type = \"tcp\" }\nservers = [\"10.0.0.1\"]\n\
                discover = { dns = \"www.example.org\" }\n";
    let (_, report) = Config::from_toml("test.toml", text).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(report.findings.len(), 0, "{report}");
}

/// A check would need a port; lvsd does not check a sorry server.
#[test]
fn sorry_server_without_port_is_accepted_and_not_checked() {
    let config = load(
        "[[service]]\nfwmark = 9\nforward = \"nat\"\nsorry = \"10.0.0.8\"\ncheck = { type = \"tcp\" }\n\
         servers = [\"10.0.0.2:81\"]\n",
    );
    let sorry = config.services[0].sorry.as_ref().unwrap();
    assert!(sorry.check.is_none());
    assert!(config.services[0].servers[0].check.is_some());
}

#[test]
fn inline_servers_equal_server_tables_and_invalid_inline_servers_are_refused() {
    let service = "[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\n";
    let inline = format!(
        "{service}servers = [\"10.0.0.1\", {{ address = \"10.0.0.2:8080\", weight = 2 }}]\n"
    );
    let tables = format!(
        "{service}[[service.server]]\naddress = \"10.0.0.1\"\n\
         [[service.server]]\naddress = \"10.0.0.2:8080\"\nweight = 2\n"
    );
    let servers = |text: &str| {
        let mut servers = load(text).services[0].servers.clone();
        servers.iter_mut().for_each(|server| server.line = 0);
        servers
    };
    assert_eq!(servers(&inline), servers(&tables));
    let both = format!("{inline}[[service.server]]\naddress = \"10.0.0.3\"\n");
    assert_eq!(servers(&both).len(), 3);
    for [line, reported] in cases(
        r#"
            servers = ["10.0.0.1", "10.0.0.1:80"] | server 10.0.0.1:80 exists twice
            servers = ["10.0.0.1", "10.0.0.300"] | 300 in `10.0.0.300`
            servers = ["10.0.0.1", 7] | expected an address as a string, or a table
            servers = [{ adress = "10.0.0.1" }] | did you mean `address`?
            servers = [{ weight = 1 }] | `address` of the server is missing
            servers = "10.0.0.1" | write it in brackets: ["10.0.0.1"]
        "#,
    ) {
        let message = errors(&format!("{service}{line}\n"));
        assert_eq!(message.matches("error: ").count(), 1, "{line}: {message}");
        assert!(
            message.contains(reported),
            "{line}: no {reported:?} in {message}"
        );
    }
}

#[test]
fn passive_true_requires_tcp_and_passive_number_requires_tcp_and_nat() {
    let text = |protocol: &str, forward: &str, passive: &str| {
        format!(
            "[[service]]\naddress = \"192.0.2.1:80\"\nprotocol = \"{protocol}\"\nforward = \"{forward}\"\ncheck = {{ type = \"tcp\", passive = {passive} }}\nservers = [\"10.0.0.1\"]\n"
        )
    };
    let (tcp, udp, sctp) = ("tcp", "udp", "sctp");
    for (protocol, forward, passive) in [
        (tcp, "nat", "true"),
        (tcp, "dr", "true"),
        (tcp, "tun", "true"),
        (tcp, "nat", "5"),
        (sctp, "nat", "false"),
    ] {
        let file = text(protocol, forward, passive);
        let loaded = Config::from_toml("test.toml", &file);
        let (config, _) = loaded.unwrap_or_else(|report| panic!("{file}: {report}"));
        let counts = config.services[0].config.extras.count_unanswered;
        assert_eq!(counts, passive == "5", "{file}");
    }
    for (protocol, forward, passive, words) in [
        (
            tcp,
            "dr",
            "5",
            "`passive` with a number needs servers that are reached by NAT",
        ),
        (
            udp,
            "nat",
            "5",
            "`passive` with a number is for TCP services",
        ),
        (udp, "nat", "true", "`passive` is for TCP services"),
        (sctp, "nat", "true", "`passive` is for TCP services"),
        (tcp, "nat", "0", "`passive` 0 is out of range"),
        (tcp, "nat", "\"yes\"", "true, false, or a whole number"),
    ] {
        let message = errors(&text(protocol, forward, passive));
        assert!(
            message.contains(words),
            "{protocol}, {passive}: no {words:?} in {message}"
        );
    }
}

#[test]
fn check_goes_through_service_by_default_unless_impossible_or_excluded_by_other_settings() {
    for (keys, by_default) in [
        ("", Some(true)),
        ("check = { type = \"http\" }", Some(true)),
        ("check = { type = \"tcp\", via = \"server\" }", None),
        ("check = { type = \"tcp\", via = \"service\" }", Some(false)),
        ("check = { type = \"tcp\", port = 81 }", None),
        ("check = { type = \"ping\" }", None),
        ("on_check_failure = \"remove\"", None),
        ("quorum = 1\nbelow_quorum = \"give-up\"", None),
        ("vip = \"host\"", None),
    ] {
        let text = checked(keys, "");
        let loaded = Config::from_toml("test.toml", &text);
        let (config, _) = loaded.unwrap_or_else(|report| panic!("{report}"));
        let check = config.services[0].servers[0].check.as_ref();
        let via = check.expect("the server has a check").via;
        assert_eq!(via.map(|via| via.by_default), by_default, "{keys}");
    }
    let proxied = checked("", "").replace("\"nat\"", "\"proxy\"");
    let (config, _) = Config::from_toml("test.toml", &proxied).expect("the configuration is valid");
    let check = config.services[0].servers[0].check.as_ref();
    assert!(check.expect("the server has a check").via.is_none());
}

#[test]
fn through_vip_check_with_other_port_tun_backend_or_proxied_service_is_refused() {
    let file = |keys: &str, top: &str| {
        let check = format!("check = {{ type = \"tcp\", via = \"service\"{keys} }}");
        checked(&check, top)
    };
    let tun = "[dataplane]\nbackend = \"tun\"\n";
    let proxied = file("", "").replace("\"nat\"", "\"proxy\"");
    for (text, words) in [
        (file(", port = 81", ""), "uses the port of the service"),
        (file("", tun), "do not reach a dataplane with the backend"),
        (proxied, "lvsd forwards the connections"),
    ] {
        let message = errors(&text);
        assert!(message.contains(words), "no {words:?} in {message}");
    }
}
