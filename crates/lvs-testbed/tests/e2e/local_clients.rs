//! Clients on the director itself, and services at an address of the host: the kernel sends the
//! clients' packets over `lo`.

use crate::common;

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, ensure};
use lvs_testbed::servers::nginx;
use lvs_testbed::{Forward, Host, LoadOptions, Proc, Site, SiteOptions, Vip, content, soon};
use nix::sys::signal::Signal;

/// The port of the UDP servers.
const ECHO: u16 = 5000;

/// Creates a NAT director whose host owns the VIP. Ends the test as not run if the kernel does not
/// permit BPF.
fn new_site(label: &str) -> Result<Site> {
    super::fast_path::require_permission()?;
    Site::new(SiteOptions::with_servers(label, Forward::Nat, 2))
}

fn vips(site: &Site) -> [IpAddr; 2] {
    [site.vip.into(), site.vip6.into()]
}

fn add_services(site: &Site, protocol: &str, port: u16) -> Result<()> {
    for vip in vips(site) {
        let service = SocketAddr::new(vip, port);
        site.lvsadm(&format!("-A {protocol} {service} -s rr"))?;
        for index in 0..site.servers.len() {
            let server: IpAddr = match vip {
                IpAddr::V4(_) => site.real_address(index).into(),
                IpAddr::V6(_) => site.real_address6(index).into(),
            };
            let server = SocketAddr::new(server, port);
            site.lvsadm(&format!("-a {protocol} {service} -r {server} -m"))?;
        }
    }
    Ok(())
}

fn get(site: &Site, at: SocketAddr, path: &str) -> Result<String> {
    let answer = site
        .director
        .sh(&format!("curl -g -sS -f -m 60 http://{at}/{path}"))?;
    Ok(answer.trim().to_owned())
}

/// Whether the kernel refuses a connection from the director to this address at once.
fn is_refused(site: &Site, at: SocketAddr) -> Result<bool> {
    let script = format!("curl -g -s -m 60 http://{at}/ > /dev/null || echo $?");
    let status = site.director.sh(&script)?;
    Ok(status.trim() == "7")
}

/// Waits until the server with this name answers a request of the director to port 80 of the VIP.
fn is_answered_by(site: &Site, name: &str) -> Result<()> {
    let mut answer = String::new();
    soon(&format!("{name} to answer"), || {
        answer = get(site, site.service(80), "id").unwrap_or_else(|error| format!("{error:#}"));
        answer == name
    })
    .with_context(|| answer.clone())
}

/// A UDP server that answers each datagram with the address of its sender and the datagram.
fn echo(host: &Host) -> Result<Proc> {
    let script = format!(
        r#"use Socket qw(:DEFAULT inet_pton inet_ntop unpack_sockaddr_in6 pack_sockaddr_in6);
        socket(S, PF_INET6, SOCK_DGRAM, 0) or die $!;
        bind(S, pack_sockaddr_in6({ECHO}, inet_pton(AF_INET6, "::"))) or die $!;
        while (my $from = recv(S, my $data, 65536, 0)) {{
            my ($port, $addr) = unpack_sockaddr_in6($from);
            send(S, inet_ntop(AF_INET6, $addr) . " $data", 0, $from) or die $!;
        }}"#
    );
    let server = host.spawn("perl", &["-e", &script])?;
    host.wait_for_port("udp", ECHO)?;
    Ok(server)
}

/// Sends datagrams of many sizes from one socket of the director. Each must be answered before the
/// next is sent, with the same bytes and `seen` as the address of its sender. A datagram without an
/// answer is sent again, at most five times in all; none may have more answers.
fn exchange_datagrams(site: &Site, vip: IpAddr, seen: &str) -> Result<()> {
    let script = format!(
        r#"use Socket qw(:DEFAULT inet_pton pack_sockaddr_in6);
        my $six = "{vip}" =~ /:/;
        my $addr = inet_pton($six ? AF_INET6 : AF_INET, "{vip}");
        socket(S, $six ? PF_INET6 : PF_INET, SOCK_DGRAM, 0) or die $!;
        connect(S, $six ? pack_sockaddr_in6({ECHO}, $addr) : pack_sockaddr_in({ECHO}, $addr)) or die $!;
        $SIG{{ALRM}} = sub {{ die "no answer" }}; alarm 60;
        vec(my $ready = "", fileno(S), 1) = 1;
        my ($again, %sent, %answers) = 0;
        for my $n (1 .. 100) {{
            my $data = "$n " . chr(32 + $n % 64) x ($n * 13);
            my $wanted = "{seen} $data";
            while (!$answers{{$wanted}}) {{
                if (!select(my $is_ready = $ready, undef, undef, 0)) {{
                    $sent{{$wanted}}++ and ++$again > 5 and die "$n: too many datagrams without an answer";
                    send(S, $data, 0) or die $!;
                }}
                select($is_ready = $ready, undef, undef, 1) or next;
                recv(S, my $answer, 65536, 0);
                ++$answers{{$answer}} <= ($sent{{$answer}} || 0) or die "$n: " . substr($answer, 0, 60);
            }}
        }}"#
    );
    site.director.run("perl", &["-e", &script]).map(drop)
}

#[test]
fn local_client_reaches_tcp_service_on_host_address() -> Result<()> {
    let mut site = new_site("lc-tcp")?;
    let before = common::host_state(&site)?;
    site.start_dataplane(&[])?;
    add_services(&site, "-t", 80)?;
    for (number, vip) in (0..).zip(vips(&site)) {
        let service = SocketAddr::new(vip, 80);
        let mut load = LoadOptions::new(service);
        load.sizes = vec![1, 1448, 20_011, 300_007];
        load.requests = 40;
        let report = common::ok(site.director.load(&load)?, 40)?;
        common::spread(&report, &[20, 20])?;
        // As with the kernel's IPVS, the source is the VIP, which the route selects.
        ensure!(get(&site, service, "addr")? == vip.to_string());
        let file = site.serve(&format!("upload{number}"), content::BULK)?;
        let path = file.display();
        site.director.sh(&format!(
            "curl -g -sS -f -m 120 -T {path} http://{service}/up/{number}"
        ))?;
        let stored = ["rs1", "rs2"].map(|name| format!("{name}-up/up/{number}"));
        let stored = stored.map(|path| std::fs::read(site.testbed.dir().join(path)));
        let sent = std::fs::read(&file)?;
        ensure!(
            stored.iter().flatten().eq([&sent]),
            "the upload was changed, or was not stored exactly once: {vip}"
        );
        common::wait_for_counters(&site, "42 connections to be counted", |rows| {
            let row = rows.iter().find(|row| row.address == service.to_string());
            let row = row.context("the service is not listed")?;
            Ok(row.number(0)? == 42 && row.number(1)? > 200 && row.number(2)? > 200)
        })?;
    }
    // Clients on other hosts are served as before.
    let report = common::ok(site.client.load(&common::mixed_load(&site))?, 40)?;
    common::spread(&report, &[20, 20])?;
    site.dataplane = None;
    common::wait_for_host_state(&site, &before)
}

#[test]
#[ignore = "long"]
fn local_client_exchanges_datagrams_with_service_on_host_address() -> Result<()> {
    for words in [&[][..], &["--fast-path", "off"], &["--workers", "2"]] {
        let mut site = new_site("lc-udp")?;
        let _servers = [echo(&site.servers[0])?, echo(&site.servers[1])?];
        site.start_dataplane(words)?;
        add_services(&site, "-u", ECHO)?;
        for (vip, seen) in [
            (IpAddr::from(site.vip), format!("::ffff:{}", site.vip)),
            (IpAddr::from(site.vip6), site.vip6.to_string()),
        ] {
            for _ in 0..4 {
                exchange_datagrams(&site, vip, &seen).with_context(|| format!("{words:?}"))?;
            }
        }
    }
    Ok(())
}

/// kube-proxy masquerades clients on its node, because other nodes also own the service's address.
#[test]
fn local_client_that_the_host_masquerades_is_answered() -> Result<()> {
    let mut site = new_site("lc-masq")?;
    site.start_dataplane(&[])?;
    // The address is on a device that is down.
    const ADDRESS: &str = "198.18.0.80";
    site.director.sh(&format!(
        "ip link add services type bridge\n\
         ip addr add {ADDRESS}/32 dev services\n\
         iptables -t nat -A POSTROUTING -s {ADDRESS} -d {ADDRESS} -j MASQUERADE"
    ))?;
    let service: SocketAddr = format!("{ADDRESS}:80").parse()?;
    site.lvsadm(&format!("-A -t {service} -s rr"))?;
    for index in 0..site.servers.len() {
        let server = site.real_address(index);
        site.lvsadm(&format!("-a -t {service} -r {server}:80 -m"))?;
    }
    let mut load = LoadOptions::new(service);
    load.sizes = vec![1, 1448, 300_007];
    load.requests = 40;
    let report = common::ok(site.director.load(&load)?, 40)?;
    common::spread(&report, &[20, 20])?;
    ensure!(get(&site, service, "addr")? == "192.0.2.1");
    Ok(())
}

/// Without a service or a dataplane, packets reach the host's own ports.
#[test]
fn local_client_reaches_own_port_without_service_or_dataplane() -> Result<()> {
    let mut site = new_site("lc-ports")?;
    let _own = nginx(&site.director, &common::on_port(80))?;
    is_answered_by(&site, "director")?;
    let before = common::host_state(&site)?;
    for ends_with in [Signal::SIGTERM, Signal::SIGKILL] {
        site.start_dataplane(&["--fast-path", "off"])?;
        ensure!(get(&site, site.service(80), "id")? == "director");
        site.add_service_weighted("-t", 80, "rr", &[1])?;
        ensure!(get(&site, site.service(80), "id")? == "rs1");
        // Ports without a service: at the VIP, at another address of the host, and at the loopback
        // address.
        let others = ["192.0.2.1:80", "127.0.0.1:80"];
        for other in others {
            ensure!(
                get(&site, other.parse()?, "id")? == "director",
                "the host did not answer at {other}"
            );
        }
        ensure!(
            is_refused(&site, site.service(81))?,
            "the connection to port 81 was not refused before {ends_with}"
        );
        // After a service is removed, the host receives the packets for its port.
        site.lvsadm(&format!("-D -t {}", site.service(80)))?;
        is_answered_by(&site, "director")?;
        site.add_service_weighted("-t", 80, "rr", &[1])?;
        is_answered_by(&site, "rs1")?;
        // The service still receives its packets after the VIP moves to another interface and back.
        let device = site.director.sh("ip -o link show lvs-local0")?;
        ensure!(device.contains("UP"), "no `UP` in {device}");
        site.director
            .sh(&format!("ip addr del {}/32 dev eth0", site.vip))?;
        site.director
            .sh(&format!("ip addr add {}/32 dev lo", site.vip))?;
        is_answered_by(&site, "rs1")?;
        site.director.sh(&format!(
            "ip addr del {vip}/32 dev lo; ip addr add {vip}/32 dev eth0",
            vip = site.vip
        ))?;
        is_answered_by(&site, "rs1")?;
        let mut dataplane = site.dataplane.take().context("no dataplane was started")?;
        dataplane.stop(ends_with)?;
        is_answered_by(&site, "director")?;
        let links = site.director.sh("ip -o link")?;
        ensure!(
            !links.contains("lvs-"),
            "devices are left: {ends_with}: {links}"
        );
        if ends_with == Signal::SIGTERM {
            common::wait_for_host_state(&site, &before)?;
        }
    }
    Ok(())
}

/// A host that spoofs the director's addresses reaches no listener on the director.
#[test]
fn spoofed_packets_with_host_address_reach_no_listener() -> Result<()> {
    let mut site = new_site("lc-forged")?;
    let _servers = [echo(&site.servers[0])?, echo(&site.servers[1])?];
    site.start_dataplane(&[])?;
    add_services(&site, "-u", ECHO)?;
    exchange_datagrams(&site, site.vip.into(), &format!("::ffff:{}", site.vip))?;
    let listen = r#"use Socket;
        socket(S, PF_INET, SOCK_DGRAM, 0) or die $!;
        bind(S, pack_sockaddr_in(7000, INADDR_ANY)) or die $!;
        $| = 1; print "ready\n";
        while (my $from = recv(S, my $data, 2000, 0)) {
            my ($port, $addr) = unpack_sockaddr_in($from);
            print inet_ntoa($addr), " $port $data\n";
        }"#;
    let listener = site.director.spawn("perl", &["-e", listen])?;
    soon("the director to listen", || {
        listener.log().contains("ready")
    })?;
    let forge = |host: &Host, from: &str, port: u16, to: &str, at: u16| {
        let script = format!(
            r#"use Socket; socket(S, PF_INET, SOCK_RAW, 255) or die $!;
            my ($from, $to) = map {{ inet_aton($_) }} "{from}", "{to}";
            my $data = "forged";
            my $udp = pack("nnnn", {port}, {at}, 8 + length $data, 0) . $data;
            my $ip = pack("CCnnnCCna4a4", 0x45, 0, 20 + length $udp, 7, 0, 64, 17, 0, $from, $to);
            send(S, $ip . $udp, 0, pack_sockaddr_in(0, $to)) or die $!"#
        );
        host.run("perl", &["-e", &script]).map(drop)
    };
    let (vip, client) = (site.vip.to_string(), common::client_address(&site)?);
    for host in [&site.client, &site.servers[0]] {
        for from in [&*vip, "192.0.2.1", "10.0.0.1"] {
            for to in [&*vip, "192.0.2.1"] {
                // First packets from the service's port, like replies, then from another port.
                for port in [ECHO, 4000] {
                    forge(host, from, port, to, 7000)?;
                    forge(host, from, port, to, ECHO)?;
                }
            }
        }
    }
    let honest = [4000, ECHO].map(|port| (port, format!("{client} {port} forged\n")));
    for (port, line) in &honest {
        let send = || forge(&site.client, &client, *port, &vip, 7000);
        let arrived = || listener.log().contains(line);
        common::send_until(
            "a datagram of the client to arrive",
            common::SOON,
            send,
            arrived,
        )?;
    }
    let log = honest
        .iter()
        .fold(listener.log(), |log, (_, line)| log.replace(line, ""));
    ensure!(
        log == "ready\n",
        "the server received forged datagrams: {log}"
    );
    Ok(())
}

/// A connection of a client on the director. The client sends a request for each line that it
/// reads.
struct Client(Proc);

impl Client {
    fn open(site: &Site) -> Result<Self> {
        let script = format!(
            r#"use Socket; $| = 1;
            socket(S, PF_INET, SOCK_STREAM, 0) or die $!;
            connect(S, pack_sockaddr_in(80, inet_aton("{}"))) or die $!;
            $SIG{{ALRM}} = sub {{ print "no answer\n"; exit }};
            while (<STDIN>) {{
                alarm 60;
                syswrite(S, "GET /id HTTP/1.1\r\nHost: x\r\n\r\n") or die "closed: $!";
                my $text = "";
                while ($text !~ /\r\n\r\nrs\d\n/) {{ sysread(S, $text, 4096, length $text) or die "closed: $!" }}
                print "answered\n";
                alarm 0;
            }}"#,
            site.vip
        );
        Ok(Self(site.director.spawn("perl", &["-e", &script])?))
    }

    fn ask(&mut self) -> Result<()> {
        self.0.send("\n")
    }

    fn has_answers(&self, count: usize) -> Result<()> {
        soon("the client to receive an answer", || {
            self.0.log().matches("answered").count() == count
        })
        .with_context(|| self.0.log())
    }
}

#[test]
#[ignore = "long"]
fn connection_of_local_client_survives_warm_restart() -> Result<()> {
    // With the kernel fast path, a request of the client while no dataplane runs does not break the
    // connection.
    for (words, sends) in [
        (&["--fast-path", "on"][..], true),
        (&["--fast-path", "off", "--warm-restart", "on"][..], false),
    ] {
        let mut site = new_site("lc-warm")?;
        let _own = nginx(&site.director, &common::on_port(80))?;
        site.start_dataplane(words)?;
        site.add_service(80, "rr")?;
        let mut client = Client::open(&site)?;
        client.ask()?;
        client.has_answers(1)?;
        for count in 2..4 {
            site.end_dataplane(Signal::SIGKILL)?;
            // The host itself answers a new connection.
            is_answered_by(&site, "director")?;
            if sends {
                client.ask()?;
            }
            site.start_dataplane(words)?;
            common::says(&site, "took over")?;
            if !sends {
                client.ask()?;
            }
            client
                .has_answers(count)
                .with_context(|| format!("{words:?}"))?;
        }
        ensure!(get(&site, site.service(80), "id")?.starts_with("rs"));
        site.dataplane = None;
        is_answered_by(&site, "director")?;
    }
    Ok(())
}

/// The packets between the host and a server on it all pass `lo`.
#[test]
fn local_client_reaches_local_server() -> Result<()> {
    for (vip, server, flag) in [
        (Vip::Host, "10.0.0.1:8080", "-m"),
        (Vip::Host, "192.0.2.10:8080", "-m"),
        (Vip::Host, "127.0.0.1:8080", "-m"),
        (Vip::Host, "10.0.0.1:80", "-g"),
        (Vip::Dataplane, "10.0.0.1:8080", "-m"),
    ] {
        super::fast_path::require_permission()?;
        let mut options = SiteOptions::with_servers("lc-node", Forward::Nat, 1);
        options.vip = vip;
        let site = common::site(options)?;
        let port = server
            .rsplit(':')
            .next()
            .context("the address has no port")?
            .parse()?;
        let _own = nginx(&site.director, &common::on_port(port))?;
        let service = site.service(80);
        site.lvsadm(&format!("-A -t {service} -s rr"))?;
        site.lvsadm(&format!("-a -t {service} -r {server} {flag}"))?;
        let mut load = site.load();
        load.sizes = vec![1, 300_007];
        load.requests = 20;
        let report = common::ok(site.director.load(&load)?, 20)
            .with_context(|| format!("{vip:?} {server} {flag}"))?;
        ensure!(
            report.servers.get("director") == Some(&20),
            "the server on the director did not answer exactly 20 requests: {server} {flag}: {:?}",
            report.servers
        );
        // Without the service, the client reaches the server as before.
        if !server.starts_with("127") {
            ensure!(get(&site, server.parse()?, "id")? == "director");
        }
    }
    Ok(())
}

/// A service without servers refuses a client on the director at once, like any other client.
#[test]
fn local_client_of_service_without_servers_is_refused() -> Result<()> {
    let mut site = new_site("lc-none")?;
    let _own = nginx(&site.director, &common::on_port(80))?;
    site.start_dataplane(&[])?;
    for vip in vips(&site) {
        let service = SocketAddr::new(vip, 80);
        site.lvsadm(&format!("-A -t {service} -s rr"))?;
        ensure!(
            is_refused(&site, service)?,
            "the connection was not refused: {vip}"
        );
    }
    Ok(())
}

/// Client and server of an SCTP association over raw sockets, because the kernel may lack SCTP.
/// `sum` computes the checksum of RFC 9260; `chunks` checks it, and returns the ports and the chunks
/// of a packet.
const SCTP: &str = r#"
use Socket qw(:DEFAULT inet_pton pack_sockaddr_in6); $| = 1;
sub sum {
    my $c = 0xffffffff;
    for (unpack "C*", $_[0]) { $c ^= $_; $c = $c & 1 ? $c >> 1 ^ 0x82f63b78 : $c >> 1 for 1 .. 8 }
    pack "V", $c ^ 0xffffffff;
}
sub packet { my $p = pack("nnNN", @_[0, 1], 7, 0) . $_[2]; substr($p, 8, 4) = sum($p); $p }
sub chunks {
    my ($p, $six) = @_;
    $p = substr $p, 4 * (15 & ord $p) unless $six;
    my $sum = substr $p, 8, 4, "\0\0\0\0";
    $sum eq sum($p) or die "a wrong checksum";
    (unpack("nn", $p), substr $p, 12);
}
my ($role, $six, $vip) = @ARGV;
my $family = $six ? AF_INET6 : AF_INET;
socket(S, $family, SOCK_RAW, 132) or die $!;
if ($role eq "server") {
    print "ready\n";
    while (my $from = recv(S, my $p, 65536, 0)) {
        my ($sport, $dport, $chunk) = chunks($p, $six);
        my $type = ord $chunk;
        substr($chunk, 0, 1) = chr(2) if $type == 1;
        substr($chunk, 0, 1) = chr(11) if $type == 10;
        send(S, packet($dport, $sport, $chunk), 0, $from) or die $!;
    }
}
my $addr = inet_pton($family, $vip);
connect(S, $six ? pack_sockaddr_in6(0, $addr) : pack_sockaddr_in(0, $addr)) or die $!;
$SIG{ALRM} = sub { die "no answer" }; alarm 60;
vec(my $ready = "", fileno(S), 1) = 1;
my $again = 0;
for my $port (40001 .. 40004) {
    my (%sent, %answers);
    for my $n (0 .. 20) {
        my ($type, $reply) = $n == 0 ? (1, 2) : $n == 1 ? (10, 11) : (0, 0);
        my $data = pack("CCn", $type, 3, 24) . pack("NnnNa8", $n, 0, 1, 0, "x" x ($n % 8));
        my $packet = packet($port, 3868, $data);
        substr($data, 0, 1) = chr $reply;
        while (!$answers{$data}) {
            # A packet without an answer is sent again, at most five times in all.
            if (!select(my $is_ready = $ready, undef, undef, 0)) {
                $sent{$data}++ and ++$again > 5 and die "$port $n: too many packets without an answer";
                send(S, $packet, 0) or die $!;
            }
            select($is_ready = $ready, undef, undef, 1) or next;
            recv(S, my $p, 65536, 0);
            my ($sport, $dport, $chunk) = chunks($p, $six);
            next if $dport != $port;
            $sport == 3868 && ++$answers{$chunk} <= ($sent{$chunk} || 0) or die "$port $n: another answer";
        }
    }
}
"#;

#[test]
#[ignore = "long"]
fn local_client_exchanges_sctp_packets_with_service_on_host_address() -> Result<()> {
    let mut site = new_site("lc-sctp")?;
    let mut servers = Vec::new();
    for host in &site.servers {
        for six in ["", "6"] {
            let server = host.spawn("perl", &["-e", SCTP, "server", six])?;
            soon("the server to listen", || server.log().contains("ready"))?;
            servers.push(server);
        }
    }
    site.start_dataplane(&[])?;
    add_services(&site, "--sctp-service", 3868)?;
    for (vip, six) in vips(&site).into_iter().zip(["", "6"]) {
        let vip = vip.to_string();
        let logs = || servers.iter().map(Proc::log).collect::<String>();
        site.director
            .run("perl", &["-e", SCTP, "client", six, &vip])
            .with_context(|| format!("{vip}: {}", logs()))?;
        common::wait_for_counters(&site, "4 associations to be counted", |rows| {
            let service = SocketAddr::new(vip.parse()?, 3868).to_string();
            let row = rows.iter().find(|row| row.address == service);
            Ok(row.context("the service is not listed")?.number(0)? == 4)
        })?;
    }
    Ok(())
}

/// With full NAT, servers reply to an address of the dataplane, so the dataplane hides no replies
/// from the host.
#[test]
fn local_client_reaches_full_nat_service_on_host_address() -> Result<()> {
    super::fast_path::require_permission()?;
    let mut options = SiteOptions::new("lc-fnat", Forward::FullNat);
    options.servers = 2;
    let site = common::site(options)?;
    for (vip, seen) in vips(&site).into_iter().zip(["192.0.2.50", "fd00:192::50"]) {
        let service = SocketAddr::new(vip, 80);
        site.lvsadm(&format!("-A -t {service} -s rr"))?;
        for index in 0..2 {
            let server: IpAddr = match vip {
                IpAddr::V4(_) => site.real_address(index).into(),
                IpAddr::V6(_) => site.real_address6(index).into(),
            };
            let server = SocketAddr::new(server, 80);
            site.lvsadm(&format!("-a -t {service} -r {server} --fullnat"))?;
        }
        let mut load = LoadOptions::new(service);
        load.sizes = vec![1, 20_011, 300_007];
        load.requests = 40;
        let report = common::ok(site.director.load(&load)?, 40).with_context(|| vip)?;
        common::spread(&report, &[20, 20])?;
        ensure!(get(&site, service, "addr")? == seen);
    }
    ensure!(hidden_clients(&site)? == 0);
    Ok(())
}

/// Number of connections from the director itself whose replies the dataplane hides from the host.
fn hidden_clients(site: &Site) -> Result<usize> {
    let text = site.director.sh("nft list ruleset")?;
    let sets = text.split("set local_clients").skip(1);
    let of_set = |set: &str| {
        let set = set.split("\n\t}").next().unwrap_or_default();
        let elements = set.split_once("elements = {");
        elements.map_or(0, |(_, elements)| elements.split(',').count())
    };
    Ok(sets.map(of_set).sum())
}

/// The server refuses a connection. A later connection uses the same ports.
#[test]
#[ignore = "long"]
fn port_of_refused_local_client_can_be_used_again() -> Result<()> {
    let mut site = new_site("lc-refused")?;
    site.start_dataplane(&[])?;
    add_services(&site, "-t", 81)?;
    let ask = |service: SocketAddr, port: u16| {
        let script = format!(
            "curl -g -s -m 60 --local-port {port} -o /dev/null http://{service}/ || echo $?"
        );
        site.director.sh(&script).map(|text| text.trim().to_owned())
    };
    for vip in vips(&site) {
        let service = SocketAddr::new(vip, 81);
        for port in [40_001, 40_002, 40_001] {
            let refused = ask(service, port)?;
            ensure!(
                refused == "7",
                "the connection to {service} from port {port} was not refused: curl's exit status is {refused}"
            );
        }
    }
    ensure!(hidden_clients(&site)? > 0);
    soon("the dataplane to hide no replies from the host", || {
        hidden_clients(&site).is_ok_and(|count| count == 0)
    })?;
    let _servers = [
        nginx(&site.servers[0], &common::on_port(81))?,
        nginx(&site.servers[1], &common::on_port(81))?,
    ];
    // The requests use different ports, because the port of a served connection is in TIME_WAIT.
    for (vip, port) in vips(&site).into_iter().zip([40_001, 40_002]) {
        let service = SocketAddr::new(vip, 81);
        let served = ask(service, port)?;
        ensure!(
            served.is_empty(),
            "the served connection failed: {service}: {served}"
        );
    }
    Ok(())
}
