//! Errors and warnings.

use super::*;

#[test]
fn invalid_or_inconsistent_settings_are_refused_with_their_position() {
    let cases = cases(
        r#"
             | address = "192.0.2.10:80" | would loop
            forward = "dr" | address = "10.0.0.1:8080" | direct routing cannot change the port
            forward = "tun" | address = "10.0.0.1:8080" | tunnelling cannot change the port
            forward = "dr" | address = "192.0.2.10" | would loop
             | address = "10.0.0.1:80" ; weight = 2147483648 | weight 2147483648 is out of range
             | address = "10.0.0.1:80" ; weight = -1 | weight -1 is out of range
             | address = "10.0.0.1:80" ; max_connections = 5 ; resume_below = 6 | `resume_below` (6) is above `max_connections` (5)
             | address = "10.0.0.1:80" ; resume_below = 6 | `resume_below` (6) is above `max_connections` (0)
             | address = "[2001:db8::1]:80" | different address families
             | address = "224.0.0.1:80" | cannot be the address of a server
             | address = "web1:80" | not an address and a port
             | weight = 1 | `address` of the server is missing
             | address = "10.0.0.1:80" ; [[service.server]] ; address = "10.0.0.1" | exists twice
            one_packet = true | address = "10.0.0.1:80" | one-packet scheduling is for UDP
            scheduler_flags = ["sh-port"] | address = "10.0.0.1:80" | has no such flag
            check = { type = "tcp", timeout = "0s" } | address = "10.0.0.1:80" | `timeout` of a check cannot be 0
            check = { type = "tcp", fall = 0 } | address = "10.0.0.1:80" | `fall` is out of range
            check = { type = "icmp" } | address = "10.0.0.1:80" | unknown type of check `icmp`
            check = { } | address = "10.0.0.1:80" | `type` of the check is missing
            check = 5 | address = "10.0.0.1:80" | the value has a wrong type
            check = "tcp" | address = "10.0.0.1:80" | unknown check `tcp`
            persistence = { timeout = "0s" } | address = "10.0.0.1:80" | `timeout` of the persistence is not a valid time
            persistence = { netmask = 33 } | address = "10.0.0.1:80" | `netmask` is not valid
            fwmark = 3 | address = "10.0.0.1:80" | an address or a mark, not both
            protocol = "TCP" | address = "10.0.0.1:80" | unknown word `TCP`
            [mark] |  | the value has a wrong type
            [[mark]] ; mark = 3 ; [[service]] ; address = "192.0.2.9:80" ; forward = "nat" | address = "10.0.0.1:80" | destination is missing
            [dataplane] ; backend = "xdp" ; [[service]] ; address = "192.0.2.9:80" ; forward = "nat" | address = "10.0.0.1:80" | unknown word `xdp`
            [dataplane] ; backend = "tun" ; [[service]] ; address = "192.0.2.9:80" ; forward = "dr" | address = "10.0.0.1:80" | direct routing needs frames
            vip = "host" ; [dataplane] ; backend = "tun" ; [[service]] ; address = "192.0.2.9:80" ; forward = "nat" | address = "10.0.0.1:80" | not routed to a dataplane with the backend `tun`
            [sysctl] ; conn_reuse = 1 ; [[service]] ; address = "192.0.2.9:80" ; forward = "nat" | address = "10.0.0.1:80" | unknown sysctl `conn_reuse`
            [dataplane] ; wrokers = 1 ; [[service]] ; address = "192.0.2.9:80" ; forward = "nat" | address = "10.0.0.1:80" | unknown key `wrokers`
            x =  | address = "10.0.0.1:80" | not valid TOML
        "#,
    );
    for [service, server, wanted] in cases {
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
        assert!(
            found.contains("test.toml:"),
            "{wanted}: no position in:\n{found}"
        );
    }
}

#[test]
fn too_large_or_too_small_number_is_refused_with_position_and_range() {
    for number in [
        "3000000000",
        "9999999999999999999",
        "99999999999999999999999",
        "-99999999999999999999999",
    ] {
        let message = errors(&format!(
            "[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\n[[service.server]]\naddress = \"10.0.0.1\"\nweight = {number}\n"
        ));
        for part in [
            format!("weight {number} is out of range"),
            "test.toml:6:10".to_owned(),
            "write a number from 0 to 2147483647".to_owned(),
        ] {
            assert!(
                message.contains(&part),
                "{number}: no {part:?} in {message}"
            );
        }
    }
    for [text, place, help] in cases(
        r#"
            [sysctl] ; conn_reuse_mode = 99999999999999999999999 | test.toml:2:19 | whole number
            [dataplane] ; icmp_limit = 99999999999999999999999 | test.toml:2:14 | from 0 to 4294967295
            [[mark]] ; mark = 0x1_0000_0000 | test.toml:2:8 | from 1 to 4294967295
            [dataplane] ; max_connections = 268435457 | test.toml:2:19 | from 1 to 268435456
            [dataplane] ; max_ipv6 = 268435457 | test.toml:2:12 | from 1 to 268435456
            [dataplane] ; workers = -99999999999999999999999 | test.toml:2:11 | write workers = 1
            // 2^130 and more: the TOML reader has no type for such numbers.
            [dataplane] ; icmp_limit = 9999999999999999999999999999999999999999 | test.toml:2:14 | cannot exceed 4294967295
        "#,
    ) {
        let message = errors(text);
        assert!(
            message.contains(place) && message.contains(help),
            "{text}: {message}"
        );
        assert!(
            !message.contains("i128"),
            "{text}: unexpected `i128` in {message}"
        );
    }
}

#[test]
fn invalid_value_or_looping_server_is_refused_with_its_line_and_column() {
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
    let refused = |text: &str, wanted: &str| {
        let reported = reported(text);
        assert!(
            reported.iter().any(|t| t == wanted),
            "{text}: {reported:#?}"
        );
        errors(text);
    };
    for [text, wanted] in cases(
        r#"
            [lvsd] ; log = "inof" | 2:7 `inof` is not a log level
            [lvsd] ; log = "lvsd=deb" | 2:7 `deb` is not a log level
            [lvsd] ; log = "" | 2:7 `` is not a log level
            [lvsd] ; log = "l[d=debug" | 2:7 `l[d` is not the name of a module
            [dataplane] ; max_connections = 268435457 | 2:19 number of connections 268435457 is out of range
            [dataplane] ; group = "a\nb" | 2:9 the value contains the character U+000A
            [sysctl] ; sync_version = 2 | 2:16 `2` is not a value of sync_version
        "#,
    ) {
        refused(&format!("{text}\n"), wanted);
    }
    for [keys, wanted] in cases(
        r#"
            name = "" | 4:8 the name is empty
            name = "a\nb" | 4:8 the name contains the character U+000A
            name = "a\u001b[1m" | 4:8 the name contains the character U+001B
            check = { type = "tcp", interval = "1ms" } | 4:36 `interval` of a check is out of range
            check = { type = "tcp", interval = "2h", timeout = "1h" } | 4:52 `timeout` of a check is out of range
            persistence = { netmask = "255.0.255.0" } | 4:27 `netmask` is not valid for this address family
        "#,
    ) {
        refused(&service(keys), wanted);
    }
    for [address, vip, wanted] in cases(
        r#"
            192.0.2.9:80 | | 6:11 the address of the server 192.0.2.9:80 belongs to the service tcp 192.0.2.9:80
            192.0.2.9:8080 | own | 6:11 the address of the server 192.0.2.9:8080 belongs to the service tcp 192.0.2.9:80
            0.0.0.7:80 | | 6:11 0.0.0.7 cannot be the address of a server
            240.0.0.1:80 | | 6:11 240.0.0.1 cannot be the address of a server
        "#,
    ) {
        let vip = if vip.is_empty() {
            ""
        } else {
            "vip = \"own\"\n"
        };
        refused(&server(address, vip), wanted);
    }
    let sorry = server("10.0.0.1:80", "");
    refused(
        &sorry.replacen("nat\"\n", "nat\"\nsorry = \"192.0.2.9:80\"\n", 1),
        "4:9 the address of the server 192.0.2.9:80 belongs to the service tcp 192.0.2.9:80",
    );
    refused(
        &service("").replace("192.0.2.1", "127.0.0.1"),
        "2:11 no client can reach the VIP 127.0.0.1",
    );
    load("[dataplane]\nmax_connections = 268435456\nmax_ipv6 = 268435456\n");
    // A server on the director itself may listen on other ports of the VIP.
    load(&server("192.0.2.9:8080", "vip = \"host\"\n"));
    load("[lvsd]\nlog = \"INFO,lvsd::health=debug, lvs_dataplane=off\"\n");
}

#[test]
fn ineffective_weights_or_unset_mark_cause_warning() {
    let service = |keys: &str, weights: [&str; 2]| {
        format!(
            "[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\ncheck = \"none\"\n{keys}\n[[service.server]]\naddress = \"10.0.0.1:80\"\n{}\n[[service.server]]\naddress = \"10.0.0.2:80\"\n{}\n",
            weights[0], weights[1]
        )
    };
    for (text, wanted) in [
        (
            service("scheduler = \"rr\"", ["", "weight = 2"]),
            "11:10 the scheduler rr does not use weights",
        ),
        (
            service("", ["weight = 0", "weight = 0"]),
            "8:10 all servers of the service have the weight 0",
        ),
        (
            service("", ["", ""]).replace("address = \"192.0.2.1:80\"", "fwmark = 7"),
            "2:10 no [[mark]] sets the mark 7",
        ),
    ] {
        assert_eq!(reported(&text), [wanted]);
        load(&text);
    }
    for (keys, weights) in [
        ("scheduler = \"rr\"", ["weight = 0", "weight = 1"]),
        ("scheduler = \"wrr\"", ["weight = 2", "weight = 0"]),
    ] {
        assert!(reported(&service(keys, weights)).is_empty());
    }
}

#[test]
fn settings_that_depend_on_the_host_are_checked_on_that_host_only() {
    let facts = Facts::with("root:x:0:\nlvs:x:999:\n", &["eth0", "eth0.100"]);
    let read = |text: &str| Config::read("test.toml", text, Files::from("test.toml"), Some(&facts));
    for good in [
        "[dataplane]\ninterface = [\"eth0\", \"eth0.100\"]\ngroup = \"lvs\"\n",
        "[dataplane]\nreaders = \"12345\"\n",
    ] {
        read(good).unwrap_or_else(|report| panic!("{good}: {report}"));
    }
    // The dataplane waits for an interface that does not exist yet.
    for (waits, words) in [
        ("interface = \"eth1\"", "this host has no interface `eth1`"),
        (
            "interface = \"eth0.7\"",
            "this host has no interface `eth0.7`",
        ),
    ] {
        let text = format!("[dataplane]\n{waits}\n");
        let (_, report) = read(&text).unwrap_or_else(|report| panic!("{waits}: {report}"));
        let report = report.to_string();
        assert!(report.contains(words), "{waits}: no {words:?} in {report}");
    }
    for (bad, words) in [
        ("group = \"lvz\"", "did you mean \"lvs\"?"),
        ("readers = \"operators\"", "`groupadd --system operators`"),
    ] {
        let text = format!("[dataplane]\n{bad}\n");
        let report = read(&text).expect_err(bad).to_string();
        assert!(report.contains(words), "{bad}: no {words:?} in {report}");
        // Without facts about the host, the file is valid, because it may be for another host.
        Config::from_toml("test.toml", &text).unwrap_or_else(|report| panic!("{report}"));
    }
}

#[test]
fn renamed_or_removed_key_is_refused_with_its_replacement() {
    for [table, old, new] in cases(
        r#"
            [lvsd] | adopt = true | `manage_all_services`
            [lvsd] | drift = "report" | `manual_changes`
            [lvsd] | max_remove = 20 | `max_removed_percent`
            [[service]] | alpha = true | `start_down`
            [defaults] | omega = true | `remove_on_exit`
            [[service]] | min_share = 30 | `panic_below`
            [[service]] ; [[service.server]] | upper = 9 | `max_connections`
            [[service]] ; [[service.server]] | lower = 9 | `resume_below`
            [[service]] | servers = [{ upper = 9 }] | `max_connections`
            [[service]] | servers = { dns = "a.b" } | discover = {
            [announce] | drain = "5s" | `withdraw_delay`
            [announce] | hold = "10m" | `hold_without_lvsd`
            [vrrp] | address = "10.0.0.254" | `host_addresses`
            [api] | token_file = "/token" | [[api.token]]
            [api] | procfs = "/run/lvs/proc" | `lvs-run -- COMMAND`
            [api] | procfs_connections = 10 | `lvs-run -- COMMAND`
            [sync] | interface = "eth0" | below [sync.ipvs]
            [sync] | peers = ["192.0.2.2"] | `addresses` below [sync.peers]
            [sync] | key_file = "/key" | below [sync.peers]
            [sync] | wait = "10s" | `connect_timeout` below [sync.peers]
            [sync.peers] | wait = "10s" | `connect_timeout`
            [sync.peers] | alarm = "10s" | `mismatch_alarm_after`
            [sync.peers] | peers = "192.0.2.2" | `addresses`
        "#,
    ) {
        let found = errors(&format!("{table}\n{old}\n"));
        let help = found.lines().find(|line| line.contains("help: write"));
        assert!(
            help.is_some_and(|help| help.contains(new)),
            "{old}: {found}"
        );
    }
}

#[test]
fn invalid_api_token_or_more_than_16_tokens_are_refused() {
    let token = "[[api.token]]\nfile = \"/t\"\nrole = \"read\"\n";
    for [keys, words] in cases(
        r#"
            TOKEN | `name` is missing
            [[api.token]] ; name = "a" ; role = "read" | `file` is missing
            [[api.token]] ; name = "a" ; file = "/t" | `role` is missing
            TOKEN ; name = "" | "" is not a name of a token
            TOKEN ; name = "on call" | is not a name of a token
            TOKEN ; name = "a23456789012345678901234567890123" | 1 to 32 letters
            TOKEN ; name = "a" ; TOKEN ; name = "a" | two tokens have the name `a`
            [[api.token]] ; name = "a" ; file = "t" ; role = "read" | `file` is not an absolute path
            [[api.token]] ; name = "a" ; file = "/t" ; role = "root" | one of: read, drain, admin
            [[api.token]] ; nmae = "a" | did you mean `name`?
            [api.token] | token
        "#,
    ) {
        let found = errors(&keys.replace("TOKEN", token));
        assert!(found.contains(words), "{keys}: no {words:?} in {found}");
        assert!(
            found.contains("test.toml:"),
            "{keys}: no position in:\n{found}"
        );
    }
    let many = |number: usize| -> String {
        let one = |n| format!("{token}name = \"oncall-{n}_.\"\n");
        let all: String = (0..number).map(one).collect();
        format!("[api]\nlisten = \"127.0.0.1:9560\"\n{all}")
    };
    assert_eq!(load(&many(16)).api.tokens.len(), 16);
    assert!(errors(&many(17)).contains("more than 16 tokens"));
    assert!(
        report(&format!("{token}name = \"a\"\n"))
            .to_string()
            .contains("no effect without `listen`")
    );
}

#[test]
fn missing_or_shared_token_file_of_api_is_refused_on_this_host() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("token");
    let facts = Facts::with("", &[]);
    let token = |name: &str| {
        let file = path.display();
        format!("[[api.token]]\nname = \"{name}\"\nfile = \"{file}\"\nrole = \"drain\"\n")
    };
    let check = |text: &str| {
        let text = format!("[api]\nlisten = \"127.0.0.1:9560\"\n{text}");
        Config::read("test.toml", &text, Files::from("test.toml"), Some(&facts))
            .map_err(|report| report.to_string())
    };
    let missing = check(&token("a")).expect_err("a missing file is accepted");
    assert!(missing.contains("umask 077"), "no `umask 077` in {missing}");
    std::fs::write(&path, "0123456789abcdef\n").unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    assert_eq!(check(&token("a")).unwrap().0.api.tokens[0].name, "a");
    let shared = check(&(token("a") + &token("b"))).expect_err("a shared token is accepted");
    assert!(
        shared.contains("another name has the same token"),
        "no `another name has the same token` in {shared}"
    );
}
