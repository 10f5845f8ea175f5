use lvs_core::api::ServiceId;
use proptest::prelude::*;

use super::*;
use crate::cases::cases;

const OPTIONS: Options<'static> = Options {
    include: &|_, _| Err("no such file".to_owned()),
    config_id: None,
};

fn converted(kind: SourceFormat, text: &str) -> (Converted, Config) {
    let converted =
        convert(kind, "some.conf", text, &OPTIONS).unwrap_or_else(|why| panic!("{why}"));
    let config = Config::from_toml("converted.toml", &converted.toml);
    let (config, _) = config.unwrap_or_else(|report| panic!("{}\n{report}", converted.toml));
    (converted, config)
}

const KEEPALIVED: &str = r#"
! Configuration File
global_defs { router_id LVS_DEVEL }
vrrp_instance VI_1 {
    interface eth0
    virtual_ipaddress {
        192.0.2.10/24
    }
}
virtual_server_group web {
    192.0.2.10 80
    192.0.2.20-22 443
}
virtual_server group web {
    delay_loop 6
    lvs_sched rr
    lvs_method NAT
    persistence_timeout 50
    protocol TCP
    sorry_server 10.0.0.200 80
    quorum 2
    real_server 10.0.0.11 80 {
        weight 3
        inhibit_on_failure
        HTTP_GET {
            url { path / 
                  digest 640205b7b0fc66c1ea91c463fac6334d }
            connect_timeout 3
            retry 2
        }
    }
    real_server 10.0.0.12 80 { TCP_CHECK { connect_port 8080 connect_timeout 2 } }
}
virtual_server fwmark 7
{
    lb_algo wlc
    lb_kind DR
    real_server 10.0.0.11 0 { weight 1 }
}
"#;

/// With direct routing, ldirectord checks the real server's port, to which no packets are
/// forwarded.
#[test]
fn ldirectord_port_ignored_by_direct_routing_is_kept_for_check() {
    let text = "virtual=192.0.2.1:80\n\treal=10.0.0.2:8080 gate\n\treal=10.0.0.3:80 gate\n\tservice=http\n";
    let done = convert(SourceFormat::Ldirectord, "x", text, &OPTIONS).unwrap();
    let (config, _) = Config::from_toml("x", &done.toml).unwrap();
    let servers = &config.services[0].servers;
    assert_eq!(servers[0].address.to_string(), "10.0.0.2:80");
    let (first, second) = done.toml.split_once("10.0.0.3").unwrap();
    assert!(first.contains("port = 8080") && !second.contains("port"));
    assert_eq!(done.toml.matches("port = 8080").count(), 1);
}

#[test]
fn keepalived_macros_with_common_prefix_or_nested_macros_are_expanded() {
    // Repetitions detect a dependence on the random order of a map.
    for _ in 0..32 {
        let (_, config) = converted(
            SourceFormat::Keepalived,
            "$VIP=192.0.2.1\n$VIP2=10.9.9.9\n$VIP22=$VIP2\n$NET=10.0.0.\n$LATE=${NET}1\n\
                 virtual_server $VIP2 80 {\n real_server ${NET}1 80 {\n }\n}\n\
                 virtual_server $VIP 80 {\n real_server $LATE 80 {\n }\n}\n\
                 virtual_server $VIP22 81 {\n real_server $LATE 80 {\n }\n}\n",
        );
        let all: Vec<String> = config
            .services
            .iter()
            .map(|service| service.address().unwrap().to_string())
            .collect();
        assert_eq!(all, ["10.9.9.9:80", "192.0.2.1:80", "10.9.9.9:81"]);
        for service in &config.services {
            assert_eq!(service.servers[0].address.to_string(), "10.0.0.1:80");
        }
    }
}

#[test]
fn keepalived_macros_with_several_words_and_blocks_are_expanded() {
    let (done, config) = converted(
        SourceFormat::Keepalived,
        "$VS=192.0.2.1 80\n$CHECK=TCP_CHECK { connect_timeout 3 }\n$SERVER=10.0.0.1 8080\n\
             virtual_server $VS {\n delay_loop 5\n real_server $SERVER { weight 2 $CHECK }\n protocol TCP\n}\n",
    );
    assert_eq!(done.lost, [""; 0]);
    let service = &config.services[0];
    assert_eq!(service.address().unwrap().to_string(), "192.0.2.1:80");
    let server = &service.servers[0];
    assert_eq!(server.address.to_string(), "10.0.0.1:8080");
    assert_eq!(server.config.weight, 2);
    let check = server.check.as_ref().expect("the check is converted");
    assert_eq!(check.timeout, std::time::Duration::from_secs(3));
}

/// In keepalived 2.2.7, a comma or parenthesis ends a macro name, as in `$FIRST,$LAST`.
#[test]
fn keepalived_macros_in_sequences_and_lists_are_expanded() {
    let (done, config) = converted(
        SourceFormat::Keepalived,
        "$RS= \\\n real_server 10.0.0.$HOST 80 { \\\n }\n$FIRST=3\n$LAST=5\n\
             virtual_server 192.0.2.1 80 {\n protocol TCP\n ~SEQ(HOST,$FIRST,$LAST) $RS\n ~LST(HOST,$FIRST,9) real_server 10.0.1.${HOST} 80 { }\n}\n",
    );
    assert_eq!(done.lost, [""; 0]);
    let servers = config.services[0].servers.iter();
    let servers: Vec<String> = servers
        .map(|server| server.address.ip().to_string())
        .collect();
    let expected = ["10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.1.3", "10.0.1.9"];
    assert_eq!(servers, expected);
}

#[test]
#[ignore = "long"]
fn keepalived_groups_of_a_file_share_one_limit_of_addresses_and_servers() {
    let group = "virtual_server_group g {\n 2001:db8::1-ffff 80\n fwmark 7\n}\n";
    let server = "virtual_server group g {\n protocol TCP\n real_server 2001:db8:1::1 80 {\n }\n}\n\
                      virtual_server group g {\n protocol UDP\n real_server 2001:db8:1::1 80 {\n }\n}\n";
    let text = format!("{group}{server}");
    let converted = convert(SourceFormat::Keepalived, "x", &text, &OPTIONS).unwrap();
    let bound = |lost: &&String| lost.contains("at most 65536 addresses");
    assert_eq!(converted.lost.iter().filter(bound).count(), 2);
    // Many marks multiply the number of servers.
    let marks: String = (1..=1000).map(|n| format!(" fwmark {n}\n")).collect();
    let servers: String = (1..=200)
        .map(|n| format!(" real_server 10.0.0.{n} 80 {{\n }}\n"))
        .collect();
    let text =
        format!("virtual_server_group g {{\n{marks}}}\nvirtual_server group g {{\n{servers}}}\n");
    let converted = convert(SourceFormat::Keepalived, "x", &text, &OPTIONS).unwrap();
    assert_eq!(converted.toml.matches("[[service]]").count(), 65_536 / 201);
}

#[test]
#[ignore = "long"]
fn keepalived_line_with_endless_macro_is_omitted_and_expansion_above_16_mib_is_refused() {
    let server = "virtual_server 192.0.2.1 80 {\n real_server 10.0.0.1 80 {\n }\n}\n";
    let lost = |macros: &str| {
        let text = format!("{macros}\n{server}");
        convert(SourceFormat::Keepalived, "x", &text, &OPTIONS)
            .unwrap()
            .lost
    };
    // The length limit within a character, endless macros, and macros that expand to nothing.
    let umlauts = "ä".repeat(40_000);
    for text in [
        format!("$A=x\nnotify ${{A}}{umlauts}"),
        format!("$A={umlauts}\nnotify x${{A}}$A"),
        "$A=$A\nnotify $A".to_owned(),
        "$A= \\\n $A \\\n $A\n$A".to_owned(),
        "$A=$B $B\n$B=$A $A\nnotify $A".to_owned(),
        format!(
            "$A=\n$B={}\nnotify {}",
            "$A ".repeat(900),
            "$B ".repeat(900)
        ),
    ] {
        let lost = lost(&text);
        assert!(lost[0].contains("the line is left out"), "{lost:?}");
        assert!(lost[0].len() < 400, "{}", lost[0].len());
    }
    for many in [
        format!("$A={}\n{}", "x".repeat(4000), "notify $A\n".repeat(5000)),
        "~SEQ(A,1,9000000000000000000) x".to_owned(),
        "~SEQ(A,1,9000) ~SEQ(B,1,9000) ~SEQ(C,1,9000) x".to_owned(),
    ] {
        let text = format!("{many}\n{server}");
        let refused = convert(SourceFormat::Keepalived, "x", &text, &OPTIONS).unwrap_err();
        assert!(refused.contains("16 MiB"), "no `16 MiB` in {refused}");
    }
}

#[test]
fn ldirectord_ranges_of_a_file_share_one_limit_of_65536_addresses() {
    let service = |n: u32| {
        format!(
            "virtual=192.0.2.{n}:80\n real=10.{n}.0.0->10.{n}.127.255:80 gate\n real=10.{n}.200.1:80 gate\n"
        )
    };
    let text: String = (1..=4).map(service).collect();
    let converted = convert(SourceFormat::Ldirectord, "x", &text, &OPTIONS).unwrap();
    assert_eq!(
        converted.toml.matches("[[service.server]]").count(),
        65_536 + 4
    );
    let bound = |lost: &&String| lost.contains("at most 65536 addresses");
    assert_eq!(converted.lost.iter().filter(bound).count(), 2);
}

#[test]
fn keepalived_file_is_converted_losses_are_reported_and_vrrp_is_kept_in_rest() {
    let (done, config) = converted(SourceFormat::Keepalived, KEEPALIVED);
    assert_eq!(config.services.len(), 4 + 1);
    let web = &config.services[0];
    assert_eq!(web.servers.len(), 2);
    // The server with weight 3 alone reaches the quorum of 2.
    assert_eq!((web.quorum.up, web.config.timeout), (1, 50));
    assert!(
        done.lost
            .iter()
            .any(|lost| lost.contains("lvsd counts servers")),
        "{:?}",
        done.lost
    );
    assert!(web.sorry.is_some());
    assert_eq!(
        web.vip,
        crate::config::VipMode::Host,
        "`vip` is not \"host\", although VRRP owns the address"
    );
    assert!(
        done.lost.iter().any(|lost| lost.contains("HTTP_GET")),
        "{:?}",
        done.lost
    );
    assert!(
        done.rest.contains("vrrp_instance VI_1") && !done.rest.contains("real_server"),
        "no `vrrp_instance VI_1` or unexpected `real_server` in {}",
        done.rest
    );
}

/// Kind and target of each check.
fn checks(config: &Config) -> Vec<String> {
    let servers = config.services.iter().flat_map(|one| &one.servers);
    let reported = |server: &crate::config::Server| match &server.check {
        Some(check) => {
            let target = check.probe.target(server.address);
            format!("{} {target}", check.probe.name())
        }
        None => "none".to_owned(),
    };
    servers.map(reported).collect()
}

#[test]
fn each_check_of_keepalived_is_converted_or_reported() {
    let server = |n: u8, check: &str| format!("real_server 10.0.0.{n} 80 {{ {check} }}\n");
    let all: Vec<[&str; 3]> = cases(
        r#"
            TCP_CHECK { connect_port 81 } | tcp 10.0.0.1:81 |
            HTTP_GET { url { path /a ; status_code 200 301-302 } ; url { path /b ; virtualhost x.example } ; } | http http://10.0.0.2:80 |
            SSL_GET { enable_sni ; virtualhost x.example ; url { path /a ; regex "o+k" } } | https https://10.0.0.3:80 |
            SMTP_CHECK { helo_name me.example ; host { connect_port 25 } } | smtp smtp at 10.0.0.4:25 |
            DNS_CHECK { type soa ; name example.org ; } | dns dns at 10.0.0.5:80 |
            UDP_CHECK { payload "00 ff" ; require_reply ; } | udp udp 10.0.0.6:80 |
            PING_CHECK { retry 2 } | ping ping 10.0.0.7 |
            MISC_CHECK { misc_path "/bin/check 'a b' c" ; misc_dynamic ; misc_timeout 3 } | exec /bin/check for 10.0.0.8:80 |
            MISC_CHECK { misc_path check ; } | none | MISC_CHECK: `check` is not a complete path: the server is not checked
            BFD_CHECK { name x } | none | BFD_CHECK: the server is not checked
            HTTP_GET { url { path no-slash ; } } | http http://10.0.0.11:80 | path no-slash: lvsd requests /no-slash
            HTTP_GET { url { path / ; digest 00 } ; bindto 10.9.9.9 ; } | http http://10.0.0.12:80 | pages are not compared by their digest
        "#,
    );
    let servers: String = (1..)
        .zip(&all)
        .map(|(n, [check, ..])| server(n, check))
        .collect();
    let text = format!(
        "virtual_server 192.0.2.1 80 {{\n delay_loop 10\n lb_kind NAT\n protocol TCP\n{servers}}}\n"
    );
    let (done, config) = converted(SourceFormat::Keepalived, &text);
    let expected: Vec<&str> = all.iter().map(|[_, reported, _]| *reported).collect();
    assert_eq!(checks(&config), expected, "{}", done.toml);
    for [_, _, words] in all.iter().filter(|[_, _, words]| !words.is_empty()) {
        assert!(done.toml.contains(words), "{words}: {}", done.toml);
    }
    assert_eq!(done.lost.len(), 7, "{:?}", done.lost);
    for words in [
        "urls = [{ path = \"/a\", status = \"200,301-302\" }, { path = \"/b\" }]",
        "command = [\"/bin/check\", \"a b\", \"c\"]",
        "dynamic = true",
        "record = \"SOA\"",
        "payload_hex = \"00 ff\"",
    ] {
        assert!(done.toml.contains(words), "{words}: {}", done.toml);
    }
}

#[test]
fn each_check_of_ldirectord_is_converted_or_reported() {
    let service = |n: usize, lines: &str| {
        format!("virtual=192.0.2.{n}:80\n\treal=10.0.0.{n}:80 masq\n\t{lines}\n")
    };
    let all: Vec<[&str; 2]> = cases(
        r#"
            checktype=connect | tcp 10.0.0.1:80
            checktype=ping | ping ping 10.0.0.2
            request="a?b" ; receive="ok$" ; virtualhost=x.example | http http://10.0.0.3:80
            service=https ; checkport=443 | https https://10.0.0.4:443
            service=smtp ; checkport=25 | smtp smtp at 10.0.0.5:25
            protocol=udp ; service=dns ; request="x.example" ; receive="10.1.1.1" | dns dns at 10.0.0.6:80
            checktype=external ; checkcommand="/bin/check" | exec /bin/check for 10.0.0.7:80
            checktype=3 ; service=http | http http://10.0.0.8:80
            service=mysql ; login="x" | tcp 10.0.0.9:80
            checktype=external-perl ; checkcommand="/bin/check" | none
            checktype=off | none
        "#,
    );
    let text: String = (1..)
        .zip(&all)
        .map(|(n, [lines, _])| service(n, &lines.replace('\n', "\n\t")))
        .collect();
    let (done, config) = converted(SourceFormat::Ldirectord, &text);
    let expected: Vec<&str> = all.iter().map(|[_, reported]| *reported).collect();
    assert_eq!(checks(&config), expected, "{}", done.toml);
    // The user of the program, the third attempt, mysql and its login, perl, and servers that
    // ldirectord never uses.
    assert_eq!(done.lost.len(), 6, "{:?}", done.lost);
    for words in [
        "command = [\"/bin/check\", \"192.0.2.7\", \"80\", \"{address}\", \"{port}\"]",
        "path = \"/a?b\", redirects = 7, regex = \"ok(?:\\\\n?\\\\z)\"",
        "answer = \"10.1.1.1\"",
    ] {
        assert!(done.toml.contains(words), "{words}: {}", done.toml);
    }
}

#[test]
fn ldirectord_file_is_converted() {
    let text = "checktimeout=3\ncheckinterval=1\nquiescent=yes\nlogfile=\"local0\"\n\
             virtual=192.0.2.10:http\n\
             \treal=10.0.0.11:80 gate 5\n\treal=10.0.0.12->10.0.0.14:80 gate\n\
             \tfallback=127.0.0.1:80 gate\n\tservice=http\n\tscheduler=wrr\n\tprotocol=tcp\n\tchecktype=negotiate\n\
             \trequest=\"index.html\"\n\tpersistent=600\n\
             virtual=3\n\treal=10.0.0.11 masq\n\tprotocol=fwm\n\tchecktype=off\n";
    let (done, config) = converted(SourceFormat::Ldirectord, text);
    assert_eq!(config.services.len(), 2);
    assert_eq!(config.services[0].servers.len(), 4);
    assert_eq!(config.services[0].servers[0].config.weight, 5);
    assert!(
        !done.lost.iter().any(|lost| lost.contains("negotiate")),
        "{:?}",
        done.lost
    );
    assert_eq!(checks(&config)[0], "http http://10.0.0.11:80");
    assert!(
        done.toml.contains("path = \"/index.html\""),
        "no `path = \"/index.html\"` in {}",
        done.toml
    );
    assert!(config.services[1].servers[0].check.is_none());
}

#[test]
fn lvs_conf_file_is_converted_and_dip_is_reported() {
    let text = "#lvs_nat.conf\nLVS_TYPE=VS_NAT\nINITIAL_STATE=on\nVIP=eth0:110 192.168.1.110 255.255.255.255 192.168.1.110\n\
             DIP=eth0 192.168.1.9 192.168.1.0 255.255.255.0 192.168.1.255\n\
             SERVICE=t telnet rr 10.1.1.2:telnet 10.1.1.3\nSERVICE=u 53 wlc 10.1.1.2:53,3\n";
    let (done, config) = converted(SourceFormat::LvsConf, text);
    assert_eq!(config.services.len(), 2);
    assert_eq!(config.services[1].servers[0].config.weight, 3);
    assert!(
        done.lost.iter().any(|lost| lost.contains("DIP")),
        "{:?}",
        done.lost
    );
}

#[test]
fn services_of_same_address_are_joined_for_keepalived_only_and_loops_are_omitted() {
    let text = "virtual_server 192.0.2.1 80 { protocol TCP\n real_server 192.0.2.1 80 { weight 1 }\nreal_server 10.0.0.1 80 { weight 1 }\n}\n";
    let (done, config) = converted(SourceFormat::Keepalived, &text.repeat(2));
    assert_eq!(
        (config.services.len(), config.services[0].servers.len()),
        (1, 1)
    );
    let has = |what: &str| done.lost.iter().filter(|lost| lost.contains(what)).count();
    assert_eq!(has("the servers are added to it"), 1);
    assert_eq!(has("it already exists"), 2);
    assert_eq!(has("it is a virtual server"), 1);
    // ldirectord refuses such a file.
    let text = "virtual=192.0.2.1:80\n\treal=10.0.0.1:80 masq\n\tchecktype=on\n";
    let (done, config) = converted(
        SourceFormat::Ldirectord,
        &(text.to_owned() + &text.replace("0.1:80 m", "0.2:80 m")),
    );
    assert_eq!(config.services[0].servers.len(), 1);
    assert_eq!(
        done.lost,
        [
            "line 4: 192.0.2.1:80: it belongs to the virtual server at line 1 already; these servers are not added to it: 10.0.0.2:80"
        ]
    );
}

/// The expected defaults are those of `keepalived -t` 2.2.7.
#[test]
fn keepalived_defaults_are_converted() {
    let servers = |config: &Config| -> Vec<String> {
        let all = config.services.iter().flat_map(|one| &one.servers);
        all.map(|server| server.address.to_string()).collect()
    };
    // Without a protocol it is UDP, but for marks.
    let (done, config) = converted(
        SourceFormat::Keepalived,
        "virtual_server 192.0.2.1 53 {\n lb_kind DR\n real_server 10.0.0.1 53 {\n DNS_CHECK {\n}\n }\n}\n",
    );
    assert!(matches!(config.services[0].id, ServiceId::Udp { .. }));
    assert!(done.lost[0].contains("no `protocol`"), "{:?}", done.lost);
    let check = config.services[0].servers[0].check.as_ref().unwrap();
    assert_eq!(
        check.fall, 4,
        "the DNS check does not fail after four attempts"
    );
    // Only NAT changes ports; the check keeps the port of the file.
    let (_, config) = converted(
        SourceFormat::Keepalived,
        "virtual_server 192.0.2.1 21 {\n lb_kind DR\n protocol TCP\n sorry_server 10.0.0.9 8080\n \
             real_server 10.0.0.1 80 {\n TCP_CHECK {\n }\n }\n \
             real_server 10.0.0.2 80 {\n lvs_method NAT\n TCP_CHECK {\n }\n }\n}\n",
    );
    assert_eq!(servers(&config), ["10.0.0.1:21", "10.0.0.2:80"]);
    assert_eq!(checks(&config), ["tcp 10.0.0.1:80", "tcp 10.0.0.2:80"]);
    // With a mark, NAT does not translate the port either.
    let (_, config) = converted(
        SourceFormat::Keepalived,
        "virtual_server fwmark 3 {\n lb_kind NAT\n real_server 10.0.0.1 80 {\n TCP_CHECK {\n }\n }\n}\n",
    );
    assert_eq!(servers(&config), ["10.0.0.1:0"]);
    assert_eq!(checks(&config), ["tcp 10.0.0.1:80"]);
    // A service for all ports is persistent.
    let (done, config) = converted(
        SourceFormat::Keepalived,
        "virtual_server 192.0.2.1 {\n lb_kind DR\n protocol TCP\n real_server 10.0.0.1 {\n }\n}\n",
    );
    assert_eq!(config.services[0].config.timeout, 360, "{}", done.toml);
    // keepalived lists these servers twice.
    let (done, config) = converted(
        SourceFormat::Keepalived,
        "virtual_server 192.0.2.1 80 {\n lb_kind DR\n protocol TCP\n real_server 10.0.0.1 80 {\n weight 5\n }\n \
             real_server 10.0.0.1 {\n weight 2\n }\n}\n",
    );
    assert_eq!(config.services[0].servers.len(), 1);
    assert_eq!(config.services[0].servers[0].config.weight, 5);
    assert_eq!(
        done.lost,
        ["192.0.2.1:80: line 7: server 10.0.0.1: it already exists"]
    );
}

#[test]
fn keepalived_misc_path_with_nested_quotes_is_split_into_command_words() {
    let (done, _) = converted(
        SourceFormat::Keepalived,
        "virtual_server 192.0.2.1 80 {\n protocol TCP\n real_server 10.0.0.1 80 {\n MISC_CHECK {\n \
             misc_path \"/bin/x \\\"a b\\\" c\\d\"\n }\n }\n}\n",
    );
    let command = "command = [\"/bin/x\", \"a b\", ";
    assert!(
        done.toml.contains(command),
        "no {command:?} in {}",
        done.toml
    );
}

#[test]
fn keepalived_settings_of_outer_blocks_are_defaults_of_checks() {
    let (done, config) = converted(
        SourceFormat::Keepalived,
        "virtual_server 192.0.2.1 80 {\n delay_loop 20\n protocol TCP\n retry 3\n connect_timeout 9\n \
             delay_before_retry 2\n virtualhost outer.example\n \
             real_server 10.0.0.1 80 {\n HTTP_GET {\n url {\n path /\n }\n }\n }\n \
             real_server 10.0.0.2 80 {\n connect_timeout 4\n delay_loop 10\n virtualhost inner.example\n \
             HTTP_GET {\n url {\n path /\n }\n nb_get_retry 0\n }\n }\n}\n",
    );
    assert_eq!(done.lost, [""; 0]);
    let rhythm = |n: usize| {
        let check = config.services[0].servers[n].check.as_ref().unwrap();
        (
            check.interval.as_secs(),
            check.timeout.as_secs(),
            check.fall,
            check.fast_interval.as_secs(),
        )
    };
    assert_eq!(rhythm(0), (20, 9, 4, 2));
    assert_eq!(rhythm(1), (10, 4, 1, 2));
    for host in ["outer.example", "inner.example"] {
        assert_eq!(done.toml.matches(host).count(), 1, "{}", done.toml);
    }
}

#[test]
fn most_specific_of_several_keepalived_checks_is_kept_and_other_checks_are_reported() {
    let (done, config) = converted(
        SourceFormat::Keepalived,
        "virtual_server 192.0.2.1 80 {\n protocol TCP\n real_server 10.0.0.1 80 {\n PING_CHECK {\n }\n \
             HTTP_GET {\n url {\n path /\n }\n }\n TCP_CHECK {\n }\n BFD_CHECK {\n }\n }\n}\n",
    );
    assert_eq!(checks(&config), ["http http://10.0.0.1:80"]);
    let expected = [
        "line 6: a second check, ping: lvsd has one check for each server",
        "line 11: a second check, tcp: lvsd has one check for each server",
        "line 13: BFD_CHECK: the server is checked without it",
    ];
    let expected = expected.map(|what| format!("192.0.2.1:80, 10.0.0.1:80: {what}"));
    assert_eq!(done.lost, expected);
}

#[test]
fn check_timeout_above_interval_is_converted_unchanged() {
    for (kind, text) in [
        (
            SourceFormat::Ldirectord,
            "checktimeout=3\ncheckinterval=1\nvirtual=192.0.2.1:80\n real=10.0.0.1:80 gate\n",
        ),
        (
            SourceFormat::Keepalived,
            "virtual_server 192.0.2.1 80 {\n protocol TCP\n delay_loop 2\n real_server 10.0.0.1 80 {\n \
                 TCP_CHECK {\n connect_timeout 3\n }\n }\n}\n",
        ),
    ] {
        let (done, config) = converted(kind, text);
        assert_eq!(done.lost, [""; 0]);
        let check = config.services[0].servers[0].check.as_ref().unwrap();
        assert_eq!(check.timeout.as_secs(), 3);
    }
}

#[test]
fn keepalived_group_ranges_are_expanded_and_invalid_or_too_large_ranges_reported() {
    let (done, config) = converted(
        SourceFormat::Keepalived,
        "virtual_server_group g {\n 192.0.2.8/30 80\n 192.0.3.254-192.0.4.1 80\n 192.0.5.1-2 80\n \
             192.0.6.1/32 80\n 192.0.7.1/24 80\n 192.0.8.2-192.0.8.1 80\n}\n\
             virtual_server group g {\n protocol TCP\n real_server 10.0.0.1 80 {\n }\n}\n",
    );
    let all: Vec<String> = config
        .services
        .iter()
        .map(|service| service.address().unwrap().ip().to_string())
        .collect();
    assert_eq!(
        all,
        [
            "192.0.2.8",
            "192.0.2.9",
            "192.0.2.10",
            "192.0.2.11",
            "192.0.3.254",
            "192.0.3.255",
            "192.0.4.0",
            "192.0.4.1",
            "192.0.5.1",
            "192.0.5.2",
            "192.0.6.1"
        ]
    );
    assert_eq!(done.lost.len(), 2, "{:?}", done.lost);
    // No more addresses than the limit allows.
    let wide = "virtual_server_group g {\n ::/1 80\n 10.0.0.0/8 80\n 2001:db8::-2001:db8:ffff:: 80\n 192.0.2.1 80\n}\n\
                    virtual_server group g {\n protocol TCP\n real_server 10.0.0.1 80 {\n }\n}\n";
    let (done, config) = converted(SourceFormat::Keepalived, wide);
    assert_eq!(config.services.len(), 1);
    assert_eq!(done.lost.len(), 3, "{:?}", done.lost);
}

#[test]
fn ldirectord_defaults_are_converted() {
    let (done, config) = converted(
        SourceFormat::Ldirectord,
        "virtual=192.0.2.1:53\n real=10.0.0.1:5353 gate\n real=10.0.0.1:53 gate\n real=10.0.0.2:5353 masq\n \
             request=\"www.example.org\"\nvirtual=192.0.2.1:80\n real=10.0.0.1:80 gate\n checktype=off\n",
    );
    let service = &config.services[0];
    assert!(matches!(service.id, ServiceId::Udp { .. }));
    assert_eq!(service.config.scheduler, "wrr");
    let all: Vec<String> = service
        .servers
        .iter()
        .map(|server| server.address.to_string())
        .collect();
    assert_eq!(all, ["10.0.0.1:53", "10.0.0.2:5353"]);
    assert_eq!(
        service.servers[0].check.as_ref().unwrap().timeout.as_secs(),
        30
    );
    assert_eq!(done.lost.len(), 3, "{:?}", done.lost);
    assert!(
        done.lost[2].contains("ldirectord uses none"),
        "{:?}",
        done.lost
    );
}

/// A server of a mark service has no port, and receives packets of any port at its address.
#[test]
fn server_of_mark_service_that_would_loop_is_omitted_and_reported() {
    let (done, config) = converted(
        SourceFormat::Keepalived,
        "virtual_server 192.0.2.1 80 {\n protocol TCP\n real_server 10.0.0.1 80 {\n }\n}\n\
             virtual_server fwmark 1 {\n real_server 192.0.2.1 8080 {\n }\n real_server 10.0.0.1 8080 {\n }\n}\n",
    );
    assert_eq!(config.services[1].servers.len(), 1);
    assert_eq!(
        done.lost,
        ["mark 1: line 7: server 192.0.2.1: it is a virtual server"]
    );
}

#[test]
fn conversion_without_any_service_is_refused_with_the_reasons() {
    let refused = |text: &str| convert(SourceFormat::Keepalived, "x", text, &OPTIONS).unwrap_err();
    assert_eq!(
        refused("vrrp_instance a {\n}\n"),
        "there is no virtual server in x"
    );
    assert_eq!(
        refused("virtual_server x.x.x.44 443 {\n}\n"),
        "there is no virtual server in x that can be converted: \
             line 1: virtual_server x.x.x.44 443: x.x.x.44 is not an address"
    );
    let many = refused(&"virtual_server www.example.org 443 {\n}\n".repeat(5));
    assert!(
        many.ends_with("; and 2 more"),
        "does not end with `; and 2 more`: {many}"
    );
}

#[test]
fn service_that_lvsd_refuses_is_omitted_and_reported() {
    let service = |n: u8, more: &str| {
        format!(
            "virtual=192.0.2.{n}:80\n\tservicename=\"web\"\n\treal=10.0.0.1:80 gate{more}\n\tchecktype=on\n"
        )
    };
    let text = service(1, "") + &service(2, " 3000000000") + &service(3, "");
    let (done, config) = converted(SourceFormat::Ldirectord, &text);
    let names: Vec<&str> = config
        .services
        .iter()
        .map(|one| one.name.as_str())
        .collect();
    assert_eq!(names.len(), 2);
    assert_eq!(names[0], "web");
    assert!(
        done.lost[0].starts_with("line 5: 192.0.2.2:80: lvsd refuses it: "),
        "{:?}",
        done.lost
    );
    assert!(
        done.toml
            .contains("# NOT CONVERTED: line 5: 192.0.2.2:80: lvsd")
    );
    assert!(
        done.lost
            .iter()
            .any(|lost| lost.contains("another service has this name")),
        "{:?}",
        done.lost
    );
}

#[test]
fn long_word_is_truncated_in_messages_of_conversion() {
    let word = "x".repeat(1 << 20);
    let text = format!(
        "{word} {word}\nvirtual_server 192.0.2.1 80 {{\n protocol TCP\n lb_algo {word}\n {word}\n \
             real_server 10.0.0.1 80 {{\n weight 1 {word}\n HTTP_GET {{\n url {{\n path /\n status_code {word}\n }}\n }}\n }}\n}}\n"
    );
    let done = convert(SourceFormat::Keepalived, "x", &text, &OPTIONS).unwrap();
    assert_eq!(done.lost.len(), 5, "{:?}", done.lost);
    assert!(done.lost.iter().all(|lost| lost.len() < 700));
}

#[test]
fn quorum_of_weights_is_converted_to_number_of_servers_and_marked_if_inexact() {
    use super::service::servers_of_quorum;
    let needed = |weights: &[u64], quorum, hysteresis| {
        let needed = servers_of_quorum(weights, quorum, hysteresis);
        (needed.up, needed.down, needed.exact, needed.within)
    };
    assert_eq!(needed(&[100, 100], 200, 0), (2, 2, true, true));
    assert_eq!(needed(&[100, 100], 101, 0), (2, 2, true, true));
    assert_eq!(needed(&[100, 100], 150, 50), (2, 1, true, true));
    assert_eq!(needed(&[1], 2, 0), (1, 1, true, true));
    assert_eq!(needed(&[1, 1, 1], 2, 5), (3, 1, true, true));
    assert_eq!(needed(&[100, 100], 150, 80), (2, 1, true, false));
    assert_eq!(needed(&[200, 1], 100, 0), (1, 1, false, true));
    assert_eq!(needed(&[5, 3], 1, 0), (1, 1, true, true));
    assert_eq!(needed(&[], 3, 1), (1, 1, true, true));
    assert_eq!(needed(&[0, 7], 9, 0), (1, 1, true, true));
}

#[test]
fn format_of_file_is_detected_by_name_or_text() {
    assert_eq!(
        kind("/etc/keepalived/keepalived.conf", ""),
        Some(SourceFormat::Keepalived)
    );
    assert_eq!(kind("x", "LVS_TYPE=VS_DR\n"), Some(SourceFormat::LvsConf));
    assert_eq!(
        kind("x", "virtual = 1.2.3.4:80\n"),
        Some(SourceFormat::Ldirectord)
    );
    assert_eq!(kind("x", "hello"), None);
}

proptest! {
    /// If the converter returns TOML, lvsd parses it.
    #[test]
    fn converter_yields_valid_configuration_or_refusal_for_any_text(
        words in proptest::collection::vec(
            prop_oneof![
                "[a-z0-9.:{}=,!#\"\n\\-> \t]{0,12}",
                Just("virtual_server 192.0.2.1 80 {\n".to_owned()),
                Just("real_server 10.0.0.1 80 {\n".to_owned()),
                Just("TCP_CHECK {\n".to_owned()),
                Just("HTTP_GET {\nurl {\npath /\n".to_owned()),
                Just("MISC_CHECK {\nmisc_path \"".to_owned()),
                Just("UDP_CHECK {\npayload ".to_owned()),
                Just("\n\tservice=http\n\trequest=".to_owned()),
                Just("}\n".to_owned()),
                Just("\nvirtual=192.0.2.1:80\n".to_owned()),
                Just("\n\treal=10.0.0.1:80 masq\n".to_owned()),
                Just("\nSERVICE=t 80 rr 10.0.0.1\n".to_owned()),
                Just("\nVIP=eth0:1 192.0.2.1\n".to_owned()),
                Just("quorum 5\n".to_owned()),
                Just("lb_kind DR\nreal_server 10.0.0.1 81 {\n}\n".to_owned()),
                Just("persistence_timeout 5\npersistence_granularity 24\n".to_owned()),
                Just("sorry_server 10.0.0.1 80\n".to_owned()),
                Just("virtual_server fwmark 1 {\n".to_owned()),
                Just("real_server 2001:db8::1 80 {\n".to_owned()),
                Just("\n\treal=10.0.0.1:81 gate 70000\n\treal=10.0.0.1 ipip\n".to_owned()),
                Just("\n\tfallback=192.0.2.1:80 gate\n\tpersistent=1\n\tnetmask=24\n".to_owned()),
                Just("\nvirtual=1\n".to_owned()),
            ],
            0..40,
        ),
    ) {
        let text = words.concat();
        for kind in [SourceFormat::Keepalived, SourceFormat::Ldirectord, SourceFormat::LvsConf] {
            if let Ok(done) = convert(kind, "x", &text, &OPTIONS) {
                let parsed: Result<toml::Table, _> = toml::from_str(&done.toml);
                prop_assert!(parsed.is_ok(), "{}", done.toml);
                let read = Config::from_toml("x", &done.toml);
                prop_assert!(read.is_ok(), "{}\n{}", done.toml, read.unwrap_err());
            }
        }
    }
}

/// Without the modifier, the check would have another result.
#[test]
fn keepalived_regex_with_a_modifier_is_omitted_and_reported() {
    for modifier in [
        "regex_no_match",
        "regex_min_offset 5",
        "regex_options multiline",
    ] {
        let text = service_of_keepalived(&format!(
            "HTTP_GET {{ url {{ path /\n regex error\n {modifier}\n }} }}"
        ));
        let (done, _) = converted(SourceFormat::Keepalived, &text);
        assert!(
            !done.toml.contains("regex ="),
            "{modifier}: unexpected `regex =` in {}",
            done.toml
        );
        let named = |line: &&String| {
            let word = modifier.split(' ').next().unwrap_or_default();
            line.contains("regex error") && line.contains(word)
        };
        assert!(
            done.lost.iter().any(|line| named(&line)),
            "{modifier}: {:?}",
            done.lost
        );
    }
}

fn service_of_keepalived(check: &str) -> String {
    format!(
        "virtual_server 192.0.2.10 80 {{ protocol TCP\n lvs_method NAT\n real_server 10.0.0.1 80 {{ {check} }}\n }}\n"
    )
}

#[test]
fn ldirectord_check_with_two_invalid_values_keeps_the_valid_values() {
    let text = "virtual = 192.0.2.10:80\n real = 10.0.0.1:80 masq\n service = http\n request = \"/a b\"\n receive = \"(\"\n virtualhost = \"no host\"\n";
    let (done, config) = converted(SourceFormat::Ldirectord, text);
    assert_eq!(
        checks(&config),
        ["http http://10.0.0.1:80"],
        "{}",
        done.toml
    );
    assert!(
        done.toml.contains("path = \"/a%20b\""),
        "no `path = \"/a%20b\"` in {}",
        done.toml
    );
    assert_eq!(done.lost.len(), 2, "{:?}", done.lost);
}

#[test]
fn ldirectord_invalid_netmask_is_reported_and_the_service_is_converted() {
    let text = "virtual = 192.0.2.10:80\n real = 10.0.0.1:80 masq\n persistent = 60\n netmask = 255.0.255.0\n checktype = off\n";
    let (done, config) = converted(SourceFormat::Ldirectord, text);
    assert_eq!(config.services.len(), 1, "{}", done.toml);
    assert!(
        done.toml.contains("persistence = { timeout = \"60s\" }"),
        "no `persistence = {{ timeout = \"60s\" }}` in {}",
        done.toml
    );
    let named = done.lost.iter().any(|line| line.contains("255.0.255.0"));
    assert!(named, "{:?}", done.lost);
}

#[test]
fn loopback_servers_are_reported_and_loopback_sorry_server_is_omitted() {
    let keepalived = "virtual_server 192.0.2.10 80 { protocol TCP\n lvs_method NAT\n sorry_server 127.0.0.1 8080\n real_server 127.0.0.1 80 { }\n }\n";
    let ldirectord = "virtual = 192.0.2.10:80\n real = 127.0.0.1:80 masq\n fallback = 127.0.0.1:8080 masq\n checktype = off\n";
    for (kind, text) in [
        (SourceFormat::Keepalived, keepalived),
        (SourceFormat::Ldirectord, ldirectord),
    ] {
        let (done, _) = converted(kind, text);
        let named = done.lost.iter().filter(|line| line.contains("loopback"));
        assert_eq!(named.count(), 2, "{kind:?}: {:?}", done.lost);
        assert!(
            !done.toml.contains("\nsorry ="),
            "{kind:?}: unexpected `sorry =` in {}",
            done.toml
        );
    }
}

/// The expected includes are those of keepalived 2.2.7: macros in the path, macros for the whole
/// line, and lists.
#[test]
fn keepalived_include_by_macro_or_list_is_read_unless_quoted() {
    let service = |port: u16| {
        format!(
            "virtual_server 192.0.2.10 {port} {{ protocol TCP\n lvs_method NAT\n real_server 10.0.0.1 {port} {{ }}\n }}\n"
        )
    };
    let include = |_: &Path, pattern: &str| {
        let port = pattern
            .strip_prefix("parts/")
            .and_then(|port| port.parse().ok());
        match port {
            Some(port) => Ok(vec![(pattern.to_owned(), service(port))]),
            None => Err(format!("no {pattern}")),
        }
    };
    let options = Options {
        include: &include,
        ..OPTIONS
    };
    let text = "$DIR=parts\n$WHOLE=include parts/82\ninclude ${DIR}/81\n$WHOLE\n~LST(N, 83, 84) include parts/${N}\ninclude \"${DIR}/85\"\n";
    let done = convert(SourceFormat::Keepalived, "some.conf", text, &options)
        .unwrap_or_else(|why| panic!("{why}"));
    for port in 81..=84 {
        assert!(
            done.toml.contains(&format!("192.0.2.10:{port}")),
            "{port}: {}",
            done.toml
        );
    }
    let named = done.lost.iter().any(|line| line.contains("no ${DIR}/85"));
    assert!(named, "{:?}", done.lost);
}

/// The converted TOML of one server.
fn server_of<'a>(toml: &'a str, address: &str) -> &'a str {
    let (_, rest) = toml
        .split_once(&format!("address = \"{address}\"\n"))
        .unwrap();
    rest.split("[[").next().unwrap()
}

/// The expected values are those of keepalived 2.2.7.
#[test]
fn number_invalid_for_keepalived_is_reported_and_converted_to_value_that_keepalived_uses() {
    let text = "virtual_server 192.0.2.1 80 {\nprotocol TCP\ndelay_loop 5\ndelay_loop 0\nretry 3\nretry 0\n\
                connect_timeout abc\npersistence_timeout 30\npersistence_timeout 90000000\n\
                real_server 10.0.0.1 80 {\nweight 3x\ndelay_loop -4\nTCP_CHECK {\nretry -2\n}\n}\n\
                real_server 10.0.0.2 80 {\nweight x\nTCP_CHECK {\nretry 0\ndelay_loop 7\n}\n}\n\
                real_server 10.0.0.3 80 {\nMISC_CHECK {\nmisc_path /bin/true\nuser root\nmisc_timeout 0\nretry 2.5\n}\n}\n\
                real_server 10.0.0.4 80 {\nweight 99999999999\ndelay_loop 100000\n}\n}\n";
    let (done, _) = converted(SourceFormat::Keepalived, text);
    for [server, weight, fall, interval, timeout] in cases(
        r#"
            10.0.0.1:80 | weight = 3 ; | fall = 4, | interval = "5s" | timeout = "5s"
            10.0.0.2:80 | weight = 0 ; | fall = 1, | interval = "7s" | timeout = "5s"
            10.0.0.3:80 | exec | fall = 3, | interval = "5s" | timeout = "5s"
            10.0.0.4:80 | weight = 1 ; | | |
        "#,
    ) {
        let expected = [weight, fall, interval, timeout];
        let server = server_of(&done.toml, server);
        assert!(
            expected.iter().all(|part| server.contains(part)),
            "{expected:?}: {server}"
        );
    }
    assert!(
        done.toml.contains("persistence = { timeout = \"30s\" }"),
        "no `persistence = {{ timeout = \"30s\" }}` in {}",
        done.toml
    );
    for line in [
        "delay_loop 0",
        "retry 0",
        "connect_timeout abc",
        "90000000",
        "weight 3x",
        "delay_loop -4",
        "retry -2",
        "weight x",
        "99999999999",
        "delay_loop 100000",
    ] {
        let reported = done.lost.iter().filter(|lost| lost.contains(line)).count();
        // `retry 0` is reported only once: keepalived accepts it in a check.
        assert_eq!(reported, 1, "{line}: {:#?}", done.lost);
    }
    assert_eq!(done.lost.len(), 10, "{:#?}", done.lost);
}

#[test]
fn flag_of_another_scheduler_is_omitted_and_reported() {
    for [text, flags, named] in cases(
        r#"
            lvs_sched twos ; sh-port ; flag-1 | ["flag-1"] | sh-port
            lvs_sched sh ; mh-port ; sh-fallback | ["sh-fallback"] | mh-port
            // keepalived requires the scheduler before its flags.
            mh-fallback ; lvs_sched mh ; mh-port | ["mh-port"] | mh-fallback
            hashed ; lvs_sched rr ; flag-2 | ["flag-2"] | hashed
        "#,
    ) {
        let text = format!("virtual_server 192.0.2.1 80 {{\nprotocol TCP\n{text}\n}}\n");
        let (done, _) = converted(SourceFormat::Keepalived, &text);
        assert!(
            done.toml.contains(&format!("scheduler_flags = {flags}")),
            "{flags}: {}",
            done.toml
        );
        assert!(
            matches!(done.lost.as_slice(), [one] if one.contains(named)),
            "{named}: {:?}",
            done.lost
        );
    }
    let text = "virtual=192.0.2.1:80\n\treal=10.0.0.1:80 gate\n\tchecktype=on\n\tschedflags=mh-port,sh-port flag-2\n\tscheduler=sh\n";
    let (done, _) = converted(SourceFormat::Ldirectord, text);
    assert!(
        done.toml.contains("scheduler_flags = [\"sh-port\"]"),
        "no `scheduler_flags = [\"sh-port\"]` in {}",
        done.toml
    );
    assert!(
        done.lost.len() == 2 && done.lost.concat().contains("mh-port"),
        "{:?}",
        done.lost
    );
}

/// The expected tunnels are those of keepalived 2.2.7.
#[test]
fn tunnel_that_keepalived_refuses_is_reported_and_outer_tunnel_or_ipip_applies() {
    let gue = "TUN type gue port 6080";
    for (outer, own, expected) in [
        ("TUN type gue", "", "tunnel"),
        ("TUN type gre port 5", "", "tunnel"),
        ("TUN type gre remcsum", "", "tunnel"),
        ("TUN type foo", "", "tunnel"),
        ("TUN type gue port 6080 foo", "", "tunnel"),
        (gue, "lvs_method TUN type gue", "gue"),
        (gue, "lvs_method TUN type ipip csum", "gue"),
        ("DR", "lvs_method TUN type gue", "tunnel"),
    ] {
        let text = format!(
            "virtual_server 192.0.2.1 80 {{\nprotocol TCP\nlvs_method {outer}\nreal_server 10.0.0.1 80 {{\n{own}\n}}\n}}\n"
        );
        let (done, _) = converted(SourceFormat::Keepalived, &text);
        let is_ipip = !done.toml.contains("tunnel = ");
        assert_eq!(
            is_ipip,
            expected == "tunnel",
            "{outer} {own}: {}",
            done.toml
        );
        assert!(
            done.toml.contains("forward = \"tun\""),
            "{outer} {own}: no `forward = \"tun\"` in {}",
            done.toml
        );
        assert_eq!(done.lost.len(), 1, "{outer} {own}: {:?}", done.lost);
    }
}

/// The expected address families are those of keepalived 2.2.7.
#[test]
fn keepalived_mark_service_gets_family_of_first_ip_family_or_granularity_setting() {
    for (settings, six) in [
        ("persistence_granularity 64", true),
        ("persistence_granularity 24", true),
        ("persistence_granularity 255.255.255.0", false),
        ("ip_family inet\npersistence_granularity 64", false),
        ("persistence_granularity 64\nip_family inet", true),
    ] {
        let text = format!(
            "virtual_server fwmark 7 {{\nlvs_method TUN\n{settings}\nreal_server 10.0.0.1 {{\n}}\nreal_server 2001:db8::1 {{\n}}\n}}\n"
        );
        let (done, _) = converted(SourceFormat::Keepalived, &text);
        assert_eq!(done.toml.contains("family = \"ipv6\""), six, "{settings}");
    }
}

#[test]
fn second_setting_on_a_keepalived_line_is_reported_and_vrrp_line_is_kept_in_rest() {
    let text = "vrrp_instance A { track_script { chk weight 5\n} } virtual_server 192.0.2.1 80 { protocol TCP\n\
                real_server 10.0.0.1 80 { weight 7 inhibit_on_failure\nTCP_CHECK { connect_port 81 retry 4 } } }\n";
    let (done, _) = converted(SourceFormat::Keepalived, text);
    for named in [
        "inhibit_on_failure: keepalived ignores",
        "retry 4: keepalived ignores",
    ] {
        assert!(
            done.lost.iter().any(|lost| lost.contains(named)),
            "{named}: {:?}",
            done.lost
        );
    }
    assert!(
        done.rest.contains("chk weight 5\n"),
        "no `chk weight 5` in {}",
        done.rest
    );
}

#[test]
fn keepalived_check_without_equivalent_is_reported_if_server_has_another_check() {
    for checks in [
        "BFD_CHECK {\nname b\n}\nPING_CHECK {\n}",
        "PING_CHECK {\n}\nFILE_CHECK {\n}",
    ] {
        let (done, _) = converted(SourceFormat::Keepalived, &service_of_keepalived(checks));
        assert!(
            done.lost
                .concat()
                .contains("the server is checked without it"),
            "{checks}: {:?}",
            done.lost
        );
    }
}

/// The expected ports are those of ldirectord 1.186.
#[test]
fn ldirectord_server_without_port_is_checked_at_default_port_of_service_kind() {
    for [target, lines, expected, named] in cases(
        r#"
            192.0.2.1:8080 | service=http | port = 80 | 0
            192.0.2.1:8443 | service=https ; checktype=connect | port = 443 | 0
            192.0.2.1:5353 | service=dns ; protocol=udp ; receive="192.0.2.7" | port = 53 | 0
            7 | service=http | port = 80 | 0
            7 | service=http ; fallback=10.0.0.9:99 masq | port = 80 | 0
            7 | checktype=connect | check = "none" | 1
            192.0.2.1:9000 | checktype=connect | | 1
            192.0.2.1:80 | checktype=connect | | 0
        "#,
    ) {
        let lines =
            format!("virtual={target}\n{lines}\nreal=10.0.0.1 gate\nreal=10.0.0.2:81 masq\n");
        let text = lines.trim_end().replace('\n', "\n\t");
        let (done, _) = converted(SourceFormat::Ldirectord, &text);
        let own = done.toml.split_once("address = \"10.0.0.1\"\n").unwrap().1;
        let (own, other) = own.split_once("[[").unwrap();
        assert!(own.contains(expected), "{text}: {}", done.toml);
        assert!(!other.contains("port = "), "{text}: {}", done.toml);
        assert_eq!(
            done.lost.len().to_string(),
            named,
            "{text}: {:?}",
            done.lost
        );
    }
}

#[test]
fn check_command_of_ldirectord_gets_the_configured_port_of_server() {
    let text = "virtual=192.0.2.1:80\n\tchecktype=external\n\tcheckcommand=/bin/c\n\
                \treal=10.0.0.1 gate\n\treal=10.0.0.2:81 masq\n\treal=10.0.0.3:82 gate\n";
    let (done, _) = converted(SourceFormat::Ldirectord, text);
    for (server, port) in [("10.0.0.1", "0"), ("10.0.0.3", "82")] {
        let server = server_of(&done.toml, server);
        let command = format!("\"192.0.2.1\", \"80\", \"{{address}}\", \"{port}\"]");
        assert!(server.contains(&command), "{command}: {}", done.toml);
    }
    assert!(
        !server_of(&done.toml, "10.0.0.2:81").contains("check"),
        "{}",
        done.toml
    );
}

/// keepalived 2.2.7 uses only the first group of a name.
#[test]
fn first_keepalived_group_of_a_name_is_used_and_other_groups_are_reported() {
    let text = "virtual_server group D {\nprotocol TCP\nreal_server 10.0.0.1 80 {\n}\n}\n\
                virtual_server_group D {\n192.0.2.1 80\n}\nvirtual_server_group D {\n192.0.2.2 80\n}\n";
    let (done, config) = converted(SourceFormat::Keepalived, text);
    assert!(
        done.toml.contains("address = \"192.0.2.1:80\""),
        "no `address = \"192.0.2.1:80\"` in {}",
        done.toml
    );
    assert_eq!(config.services.len(), 1);
    assert!(
        matches!(done.lost.as_slice(), [one] if one.contains("line 9")),
        "{:?}",
        done.lost
    );
}
