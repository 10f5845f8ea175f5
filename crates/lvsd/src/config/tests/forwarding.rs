//! Forwarding of packets to servers: ranges of ports, full NAT, tunnels, the proxy.

use super::*;

#[test]
fn mark_rules_of_services_with_many_ports_exclude_other_services_and_vips_are_owned() {
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
        alone(&config).port_marks,
        [
            format!(
                "--destination 192.0.2.10 --protocol tcp --ports 8000-8442,8444-8999 --mark {mark}"
            ),
            format!("--destination 2001:db8::1 --protocol udp --mark {of_all}"),
        ]
    );
    let owned: [IpAddr; 2] = ["192.0.2.10", "2001:db8::1"].map(|ip| ip.parse().unwrap());
    assert_eq!(alone(&config).own_vips(|_| false), owned);
}

#[test]
fn invalid_port_range_reserved_mark_or_local_address_setting_is_refused() {
    let server = "\n[[service.server]]\naddress = \"10.0.0.11:80\"\n";
    let service =
        |text: &str| format!("[[service]]\naddress = \"192.0.2.10:80-90\"\n{text}{server}");
    for [text, complaint] in cases(
        r#"
            SERVICE ; forward = "dr" ; SERVER | only NAT can translate several ports to one port
            SERVICE ; forward = "nat" ; SERVER ; OVERLAP ; forward = "nat" ; SERVER | two services match the same ports
            [[service]] ; address = "192.0.2.10:90-80" ; forward = "nat" ; SERVER | the end of the range is lower than its beginning
            [[service]] ; fwmark = 1275068417 ; forward = "nat" ; SERVER | this mark is reserved for services of several ports
            [[mark]] ; destination = "192.0.2.10" ; mark = 1275068417 | this mark is reserved for services of several ports
            SERVICE ; forward = "fullnat" ; SERVER | full NAT needs an IPv4 local address
            [dataplane] ; local_addresses = ["fd00::2"] ; SERVICE ; forward = "fullnat" ; SERVER | full NAT needs an IPv4 local address
            [dataplane] ; local_addresses = "10.0.0.2" ; SERVICE ; protocol = "udp" ; one_packet = true ; forward = "fullnat" ; SERVER | full NAT tracks connections
            [dataplane] ; hairpin = true | `hairpin` needs a local address
            [dataplane] ; local_addresses = ["x"] | `x` is not an address
            [dataplane] ; local_addresses = ["10.0.0.2", "10.0.0.2"] | named twice
        "#,
    ) {
        let text = text
            .replace("SERVICE", "[[service]]\naddress = \"192.0.2.10:80-90\"")
            .replace(
                "OVERLAP",
                "[[service]]\nname = \"b\"\naddress = \"192.0.2.10:85-95\"",
            )
            .replace("SERVER", server);
        let found = errors(&text);
        assert!(
            found.contains(complaint),
            "{text}: no {complaint:?} in:\n{found}"
        );
    }
    let good = load(
        &("[dataplane]\nlocal_addresses = [\"10.0.0.2\"]\nhairpin = true\n".to_owned()
            + &service("forward = \"fullnat\"")),
    );
    let arguments: Vec<&str> = good.dataplane.arguments().collect();
    assert_eq!(arguments, ["--hairpin", "--local-address", "10.0.0.2"]);
}

#[test]
fn tunnels_of_every_type_are_parsed_and_inherited_by_servers_with_method_tun() {
    use lvs_core::Forwarding;
    use lvs_core::tunnel::{Tunnel, TunnelChecksum as Sum};
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
    // Only servers with the method tun inherit the tunnel of the service.
    let nat = tunnelled(
        "forward = \"tun\"\ntunnel = \"gre\"",
        "forward = \"nat\"\n[[service.server]]\naddress = \"10.0.0.12\"",
    );
    let servers = &load(&nat).services[0].servers;
    assert_eq!(servers[0].config.tunnel, Tunnel::Ipip);
    assert_eq!(servers[1].config.tunnel, gre(Sum::None));
    // `tunnel` of the service is accepted if at least one server uses it.
    load(&tunnelled(
        "forward = \"nat\"\ntunnel = \"gre\"",
        "forward = \"tun\"",
    ));
}

#[test]
fn invalid_tunnel_or_tunnel_for_other_method_is_refused_with_its_position() {
    for [words, place, title, help] in cases(
        r#"
            "vxlan" | 4:10 | unknown word `vxlan` | one of: ipip, gre, gue
            "GUE" | 4:10 | unknown word `GUE` | did you mean "gue"?
            "gue" | 4:10 | `port` of the GUE tunnel is missing | { type = "gue", port = 6080 }
            { type = "gue" } | 4:10 | `port` of the GUE tunnel is missing | ip fou add port 6080 gue
            { port = 6080 } | 4:10 | `type` of the tunnel is missing | add type =
            { type = "gue", port = 0 } | 4:33 | port 0 is out of range | from 1 to 65535
            { type = "gre", port = 6080 } | 4:33 | only a GUE tunnel has a port | set type = "gue"
            { type = "ipip", checksum = "full" } | 4:38 | an IPIP tunnel has no checksum | remove `checksum`
            { type = "gre", checksum = "remote" } | 4:37 | only a GUE tunnel has remote checksum offload | write checksum = "full"
            { type = "gre", checksum = "csum" } | 4:37 | unknown tunnel checksum `csum` | write "full"
            { type = "gre", checksum = "ful" } | 4:37 | unknown word `ful` | did you mean "full"?
            { type = "gre", key = 5 } | 4:26 | unknown key `key` | type, port, checksum
            5 | 4:10 | the value has a wrong type |
        "#,
    ) {
        let message = errors(&tunnelled(
            &format!("forward = \"tun\"\ntunnel = {words}"),
            "",
        ));
        for part in [title, help, &format!("test.toml:{place}\n")] {
            assert!(message.contains(part), "{words}: no {part:?} in\n{message}");
        }
        assert_eq!(message.matches("error: ").count(), 1, "{words}: {message}");
    }
    for [service, server, place] in cases(
        r#"
            forward = "nat" ; tunnel = "gre" |  | 4:10
            forward = "dr" | tunnel = "gre" | 6:10
            forward = "tun" | forward = "nat" ; tunnel = "gre" | 7:10
        "#,
    ) {
        let message = errors(&tunnelled(service, server));
        for part in [
            "error: `tunnel` is for servers with forward = \"tun\"",
            "the forwarding method",
            "help: set forward = \"tun\", or remove `tunnel`",
            &format!("test.toml:{place}\n"),
        ] {
            assert!(
                message.contains(part),
                "{service}: no {part:?} in\n{message}"
            );
        }
    }
}

#[test]
fn proxied_service_needs_no_dataplane_and_its_unsuitable_settings_are_refused() {
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
        let alone = alone(&config);
        assert!(alone.own_vips(|_| false).is_empty() && !alone.needs_dataplane());
    }
    let tcp = "address = \"127.0.0.1:8080\"";
    let udp = "address = \"127.0.0.1:53\"\nprotocol = \"udp\"";
    let refused = |text: &str, words: &str| {
        let Err(report) = Config::from_toml("x", text) else {
            panic!("the file is accepted: {text}");
        };
        assert!(
            report.to_string().contains(words),
            "no {words:?} in:\n{report}"
        );
    };
    for [keys, words] in cases(
        r#"
            TCP ; vip = "own" | must be an address of this host
            fwmark = 7 | has no marks
            TCP ; protocol = "sctp" | not SCTP
            address = "224.0.0.1:80" | no program can listen
            UDP ; one_packet = true | one-packet
            address = "0.0.0.0:53" ; protocol = "udp" | to which the request was sent
            UDP ; proxy = { send = "v1" } | for TCP only
            TCP ; proxy = { send = "v3" } | unknown word
            TCP ; proxy = { idle_timeout = "1ms" } | out of range
        "#,
    ) {
        refused(
            &proxied(&keys.replace("TCP", tcp).replace("UDP", udp), ""),
            words,
        );
    }
    refused(
        &proxied(tcp, "forward = \"nat\""),
        "for all of its servers or for none",
    );
    refused(
        "[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\nproxy = {}\n",
        "is for services with forward",
    );
}

/// Such a proxy would connect to itself until it has no free file descriptors.
#[test]
fn proxied_service_that_would_connect_to_itself_is_refused() {
    let text = |listen: &str, server: &str, more: &str| {
        format!(
            "[[service]]\naddress = \"{listen}\"\nforward = \"proxy\"\n{more}\
             [[service.server]]\naddress = \"{server}\"\n"
        )
    };
    for [listen, server, words] in cases(
        r#"
            0.0.0.0:8080 | 127.0.0.1:8080 | which listens on it
            0.0.0.0:8080 | 127.9.9.9:8080 | which listens on it
            [::]:8080 | [::1]:8080 | which listens on it
            127.0.0.1:8080 | 127.0.0.1:8080 | would loop
            0.0.0.0:8080 | 0.0.0.0:8080 | cannot be the address
            [::]:8080 | [::ffff:127.0.0.1]:8080 | cannot be the address
            0.0.0.0:8080 | localhost:8080 | names are not resolved
        "#,
    ) {
        let message = errors(&text(listen, server, ""));
        assert!(
            message.contains(words),
            "{listen} {server}: no {words:?} in {message}"
        );
    }
    for (listen, server) in [
        ("0.0.0.0:8080", "127.0.0.1:8081"),
        ("127.0.0.1:8080", "127.0.0.1:8081"),
        ("0.0.0.0:8080", "10.0.0.1:8080"),
    ] {
        let read = Config::from_toml("test.toml", &text(listen, server, ""));
        assert!(read.is_ok(), "{listen} {server}");
    }
    // A loop through a second service is also found.
    let two = format!(
        "{}{}",
        text("127.0.0.1:8080", "127.0.0.1:8081", "name = \"a\"\n"),
        text("0.0.0.0:8081", "127.0.0.1:8080", "name = \"b\"\n")
    );
    let message = errors(&two);
    assert!(
        message.contains("127.0.0.1:8081 belongs to the service"),
        "no `127.0.0.1:8081 belongs to the service` in {message}"
    );
    // Other addresses of the host are known only if the host is examined.
    let own = "192.0.2.77".parse().unwrap();
    let facts = Facts::with_address(own);
    let files = Files::from("test.toml");
    let text = text("0.0.0.0:8080", "192.0.2.77:8080", "");
    let read = Config::read("test.toml", &text, files, Some(&facts));
    assert!(read.is_err_and(|report| report.to_string().contains("which listens on it")));
}
