//! Health checks of each kind against real servers, and through-VIP checks.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, Host, Proc, Site, SiteOptions, Vip, programs, wait_until};
use nix::sys::signal::Signal;

fn start(site: &Site, text: &str) -> Result<Proc> {
    let path = site.testbed.dir().join("lvsd.toml");
    let head = "[dataplane]\ninterface = [\"eth0\", \"eth1\"]\n";
    let head = if site.options.topology == lvs_testbed::Topology::TwoArm {
        head
    } else {
        "[dataplane]\ninterface = \"eth0\"\n"
    };
    fs::write(&path, format!("{head}{text}"))?;
    let path = path.display().to_string();
    site.director
        .spawn(programs::find("lvsd")?, &["--config", &path])
}

/// Health and reason of each server of the service, from `lvsd status --json`.
fn health(site: &Site, service: &str) -> Vec<(String, String)> {
    let servers = servers(site, service);
    let text =
        |server: &serde_json::Value, key: &str| server[key].as_str().unwrap_or_default().to_owned();
    let servers = servers.iter();
    servers
        .map(|server| (text(server, "health"), text(server, "reason")))
        .collect()
}

/// The servers of a service, from `lvsd status --json`.
fn servers(site: &Site, service: &str) -> Vec<serde_json::Value> {
    let path = site.testbed.dir().join("lvsd.toml").display().to_string();
    let Ok(program) = programs::find("lvsd") else {
        return Vec::new();
    };
    let output = site.director.sh(&format!(
        "{} --config {path} status --json",
        program.display()
    ));
    let Ok(output) = output else {
        return Vec::new();
    };
    let status: serde_json::Value = serde_json::from_str(&output).unwrap_or_default();
    let services = status["services"].as_array().cloned().unwrap_or_default();
    services
        .iter()
        .filter(|s| s["name"] == service)
        .flat_map(|s| s["servers"].as_array().cloned().unwrap_or_default())
        .collect()
}

fn wait_health(site: &Site, service: &str, wanted: &[&str], lvsd: &Proc) -> Result<()> {
    let now = || health(site, service);
    wait_until(
        &format!("{service} to be {wanted:?}"),
        Duration::from_secs(30),
        || {
            now()
                .iter()
                .map(|(health, _)| health.as_str())
                .eq(wanted.iter().copied())
        },
    )
    .with_context(|| format!("{:?}\nlvsd printed:\n{}", now(), lvsd.log()))
}

/// Real servers for every kind of check, on one host.
struct Servers {
    _running: Vec<Proc>,
}

fn openssl(host: &Host, dir: &Path, name: &str, subject: &str, more: &str) -> Result<()> {
    let dir = dir.display();
    host.sh(&format!(
        "cd {dir} && openssl req -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.csr -subj /CN={subject} 2>/dev/null && \
         printf 'subjectAltName=DNS:{subject}\\n' > {name}.ext && \
         openssl x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile {name}.ext -out {name}.pem 2>/dev/null {more}"
    ))?;
    Ok(())
}

fn serve(host: &Host, dir: &Path) -> Result<Servers> {
    host.sh(&format!(
        "cd {} && openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=authority 2>/dev/null && \
         openssl ecparam -name prime256v1 -genkey -noout -out other.key && \
         openssl req -x509 -new -key other.key -out other.pem -days 2 -subj /CN=stranger 2>/dev/null",
        dir.display()
    ))?;
    openssl(host, dir, "server", "www.example.org", "")?;
    openssl(host, dir, "client", "director.example.org", "")?;
    let d = dir.display();
    fs::write(dir.join("index.html"), "all is well\n")?;
    fs::write(
        dir.join("nginx.conf"),
        format!(
            "daemon off; pid {d}/nginx.pid; error_log {d}/nginx.err; events {{}} user root;\n\
             http {{ access_log off; client_body_temp_path {d}/t1; proxy_temp_path {d}/t2; fastcgi_temp_path {d}/t3; uwsgi_temp_path {d}/t4; scgi_temp_path {d}/t5;\n\
             server {{ listen 8080; root {d}; location /old {{ return 301 /index.html; }} location /gone {{ return 503; }} }}\n\
             server {{ listen 8443 ssl; server_name www.example.org; root {d};\n\
             ssl_certificate {d}/server.pem; ssl_certificate_key {d}/server.key; }}\n\
             server {{ listen 8444 ssl; root {d}; ssl_certificate {d}/server.pem; ssl_certificate_key {d}/server.key;\n\
             ssl_client_certificate {d}/ca.pem; ssl_verify_client on; }} }}\n"
        ),
    )?;
    fs::write(
        dir.join("unbound.conf"),
        format!(
            "server:\n interface: 0.0.0.0@5300\n access-control: 0.0.0.0/0 allow\n do-daemonize: no\n use-syslog: no\n chroot: \"\"\n \
             username: \"\"\n directory: \"{d}\"\n pidfile: \"\"\n module-config: \"iterator\"\n \
             local-zone: \"example.org.\" static\n local-data: \"www.example.org. IN A 192.0.2.77\"\nremote-control:\n control-enable: no\n"
        ),
    )?;
    fs::write(
        dir.join("exim.conf"),
        format!(
            "spool_directory = {d}/spool\nlog_file_path = syslog\npid_file_path = {d}/exim.pid\n\
             primary_hostname = mx.example.org\nlocal_interfaces = 0.0.0.0\ndaemon_smtp_ports = 2525\n\
             host_lookup =\nrfc1413_query_timeout = 0s\ntls_advertise_hosts =\nkeep_environment =\nacl_smtp_connect = accept\n"
        ),
    )?;
    let path = |name: &str| dir.join(name).display().to_string();
    let running = vec![
        host.spawn("nginx", &["-c", &path("nginx.conf"), "-p", &d.to_string()])?,
        host.spawn("unbound", &["-d", "-c", &path("unbound.conf")])?,
        host.spawn("exim4", &["-bdf", "-C", &path("exim.conf")])?,
        host.spawn(
            "perl",
            &[
                "-MIO::Socket::INET",
                "-e",
                "$s = IO::Socket::INET->new(LocalPort => 9707, Listen => 9, ReuseAddr => 1) or die; \
                 while ($c = $s->accept) { open F, '<', $ARGV[0]; print $c <F>; close $c }",
                &path("agent"),
            ],
        )?,
    ];
    for port in [8080, 8443, 8444, 2525, 9707] {
        host.wait_for_port("tcp", port)?;
    }
    host.wait_for_port("udp", 5300)?;
    Ok(Servers { _running: running })
}

#[test]
#[ignore = "needs Unbound and Exim"]
fn each_check_kind_follows_state_of_a_real_server() -> Result<()> {
    let mut options = SiteOptions::with_servers("kinds", Forward::Nat, 1);
    options.vip = Vip::Dataplane;
    let site = Site::new(options)?;
    let dir = site.testbed.dir().join("real");
    fs::create_dir_all(&dir)?;
    fs::write(dir.join("agent"), "up 50%\n")?;
    fs::write(dir.join("state"), "up\n")?;
    let host = &site.servers[0];
    let _servers = serve(host, &dir)?;
    let d = dir.display();
    let www = "host = \"www.example.org\"";
    let own = format!("cert = \"{d}/client.pem\", key = \"{d}/client.key\"");
    let kinds = [
        ("tcp", "type = \"tcp\", port = 8080".to_owned(), "up"),
        ("tcp-closed", "type = \"tcp\", port = 1".to_owned(), "down"),
        ("http", "type = \"http\", port = 8080, body = \"well\"".to_owned(), "up"),
        ("http-urls", "type = \"http\", port = 8080, redirects = 1, urls = [{ path = \"/\" }, { path = \"/old\", regex = '^all' }]".to_owned(), "up"),
        ("http-gone", "type = \"http\", port = 8080, path = \"/gone\"".to_owned(), "down"),
        ("http-503", "type = \"http\", port = 8080, path = \"/gone\", status = 503".to_owned(), "up"),
        ("http-tls", "type = \"http\", port = 8443".to_owned(), "down"),
        ("https", "type = \"https\", port = 8443".to_owned(), "up"),
        ("https-ca", format!("type = \"https\", port = 8443, {www}, ca = \"{d}/ca.pem\""), "up"),
        ("https-sni", format!("type = \"https\", port = 8443, sni = \"ftp.example.org\", ca = \"{d}/ca.pem\""), "down"),
        ("https-stranger", format!("type = \"https\", port = 8443, {www}, ca = \"{d}/other.pem\""), "down"),
        ("https-client", format!("type = \"https\", port = 8444, {own}, ca = \"{d}/ca.pem\", {www}"), "up"),
        ("https-nobody", "type = \"https\", port = 8444".to_owned(), "down"),
        ("dns", "type = \"dns\", port = 5300, name = \"www.example.org\", answer = \"192.0.2.77\"".to_owned(), "up"),
        ("dns-none", "type = \"dns\", port = 5300, name = \"no.example.org\", record = \"A\"".to_owned(), "down"),
        ("dns-nx", "type = \"dns\", port = 5300, name = \"no.example.org\", record = \"A\", rcode = \"NXDOMAIN\"".to_owned(), "up"),
        ("udp", "type = \"udp\", port = 5300, payload_hex = \"414201000001000000000000 03777777 076578616d706c65 036f7267 00 0001 0001\", reply_hex = \"4142 8X XX\"".replace("8X XX", "XX XX"), "up"),
        ("udp-closed", "type = \"udp\", port = 5301, silence = \"up\"".to_owned(), "down"),
        ("smtp", "type = \"smtp\", port = 2525".to_owned(), "up"),
        ("smtp-http", "type = \"smtp\", port = 8080".to_owned(), "down"),
        ("ping", "type = \"ping\"".to_owned(), "up"),
        ("exec", "type = \"exec\", command = [\"/usr/bin/perl\", \"-e\", \"exit 3\"], dynamic = true".to_owned(), "up"),
        ("exec-fails", "type = \"exec\", command = [\"/bin/sh\", \"-c\", \"echo disk full; exit 1\"]".to_owned(), "down"),
        ("file", format!("type = \"file\", path = \"{d}/state\""), "up"),
        ("file-none", format!("type = \"file\", path = \"{d}/{{address}}\""), "down"),
        ("agent", "type = \"agent\", port = 9707".to_owned(), "up"),
    ];
    let mut text = String::new();
    for (n, (name, check, _)) in kinds.iter().enumerate() {
        write!(
            text,
            "[[service]]\nname = \"{name}\"\naddress = \"{}:{}\"\nforward = \"nat\"\n\
             check = {{ interval = \"500ms\", timeout = \"2s\", {check} }}\n\
             [[service.server]]\naddress = \"{}:80\"\nweight = 10\n",
            site.service(80).ip(),
            7000 + n,
            site.real_address(0)
        )?;
    }
    let mut lvsd = start(&site, &text)?;
    for (name, _, wanted) in &kinds {
        wait_health(&site, name, &[wanted], &lvsd)?;
    }
    let why = |name: &str| {
        health(&site, name)
            .first()
            .map(|(_, why)| why.clone())
            .unwrap_or_default()
    };
    for (name, wanted) in [
        ("http-gone", "503"),
        ("https-stranger", "certificate"),
        ("https-nobody", "400"),
        ("exec-fails", "disk full"),
        ("udp-closed", "refused"),
        ("dns-none", "NXDOMAIN"),
    ] {
        let is_reported = || why(name).contains(wanted);
        wait_until(
            &format!("the reason of {name} to contain {wanted:?}"),
            Duration::from_secs(30),
            is_reported,
        )
        .with_context(|| why(name))?;
    }
    // The agent of one server requests half of its weight 10; the program of the other server
    // requests weight 1.
    let weights = || {
        let listing = site.lvsadm("-L -n").unwrap_or_default();
        (
            listing.contains("Masq    5 "),
            listing.contains("Masq    1 "),
        )
    };
    wait_until(
        "the servers to have the weights that their agents request",
        Duration::from_secs(30),
        || weights() == (true, true),
    )?;
    fs::write(dir.join("agent"), "drain\n")?;
    fs::write(dir.join("state"), "down # by hand\n")?;
    wait_until(
        "the agent's server to drain",
        Duration::from_secs(30),
        || {
            let listing = site.lvsadm("-L -n").unwrap_or_default();
            !listing.contains("Masq    5 ")
        },
    )?;
    wait_health(&site, "file", &["down"], &lvsd)?;
    let is_reported = || why("file").contains("by hand");
    wait_until(
        "the status to contain the reason in the file",
        Duration::from_secs(30),
        is_reported,
    )
    .with_context(|| why("file"))?;
    wait_health(&site, "agent", &["up"], &lvsd)?;
    lvsd.stop_ok(Signal::SIGINT)?;
    Ok(())
}

#[test]
fn https_without_ca_accepts_every_certificate() -> Result<()> {
    let mut options = SiteOptions::with_servers("certs", Forward::Nat, 1);
    options.vip = Vip::Dataplane;
    let site = Site::new(options)?;
    let dir = site.testbed.dir().display().to_string();
    let host = &site.servers[0];
    let own = |name: &str, more: &str| {
        format!(
            "openssl req -x509 -nodes -keyout {name}.key -out {name}.pem -days 2 -subj /CN=x {more} 2>/dev/null"
        )
    };
    let kinds = [
        ("rsa2048", own("rsa2048", "-newkey rsa:2048")),
        ("rsa1024", own("rsa1024", "-newkey rsa:1024")),
        ("sha1", own("sha1", "-newkey rsa:2048 -sha1")),
        ("p521", own("p521", "-newkey ec -pkeyopt ec_paramgen_curve:P-521")),
        ("ed25519", own("ed25519", "-newkey ed25519")),
        ("rsapss", own("rsapss", "-newkey rsa-pss -pkeyopt rsa_keygen_bits:2048")),
        (
            "critical",
            own("critical", "-newkey rsa:2048 -addext 1.2.3.4.5=critical,DER:0500"),
        ),
        (
            "v1",
            "openssl genrsa -out v1.key 2048 2>/dev/null; openssl req -new -key v1.key -subj /CN=x -out v1.csr 2>/dev/null; \
             openssl x509 -req -in v1.csr -signkey v1.key -days 2 -out v1.pem 2>/dev/null"
                .to_owned(),
        ),
    ];
    let mut running = Vec::new();
    let mut text = String::new();
    let mut names = Vec::new();
    for (name, command) in &kinds {
        host.sh(&format!("cd {dir} && {{ {command}; }}"))?;
        for version in ["-tls1_2", "-tls1_3"] {
            // The TLS library does not support such a key with TLS 1.2.
            if (*name, version) == ("rsapss", "-tls1_2") {
                continue;
            }
            let port = 9100 + names.len();
            let (file, key) = (format!("{dir}/{name}.pem"), format!("{dir}/{name}.key"));
            running.push(host.spawn(
                "openssl",
                &[
                    "s_server",
                    "-accept",
                    &port.to_string(),
                    "-cert",
                    &file,
                    "-key",
                    &key,
                    "-www",
                    "-quiet",
                    "-cipher",
                    "ALL:@SECLEVEL=0",
                    version,
                ],
            )?);
            write!(
                text,
                "[[service]]\nname = \"{name}{version}\"\naddress = \"{}:{port}\"\nforward = \"nat\"\n\
                 check = {{ type = \"https\", interval = \"500ms\", timeout = \"3s\" }}\n\
                 [[service.server]]\naddress = \"{}:{port}\"\n",
                site.service(80).ip(),
                site.real_address(0)
            )?;
            names.push((format!("{name}{version}"), u16::try_from(port)?));
        }
    }
    for (_, port) in &names {
        host.wait_for_port("tcp", *port)?;
    }
    let mut lvsd = start(&site, &text)?;
    for (name, _) in &names {
        wait_health(&site, name, &["up"], &lvsd)?;
    }
    lvsd.stop_ok(Signal::SIGINT)?;
    Ok(())
}

/// A through-VIP check finds faults on the path of clients' packets that a check of the server's
/// own address does not find.
fn on_a_clients_way(forward: Forward) -> Result<()> {
    let mut options = SiteOptions::with_servers("via", forward, 2);
    options.vip = Vip::Dataplane;
    let site = Site::new(options)?;
    for path in ["ipv4/conf/all/rp_filter", "ipv4/conf/eth0/rp_filter"] {
        site.director.sysctl(path, "0")?;
    }
    let mut text = String::new();
    for (name, port, more) in [
        ("own", 80, ", via = \"server\""),
        ("clients", 8080, ", via = \"service\""),
    ] {
        let port_of_server = if forward == Forward::Nat { 80 } else { port };
        write!(
            text,
            "[[service]]\nname = \"{name}\"\naddress = \"{}:{port}\"\nscheduler = \"rr\"\nforward = \"{}\"\n\
             check = {{ type = \"http\", path = \"/s/1\", interval = \"300ms\", timeout = \"2s\", fast_interval = \"100ms\"{more} }}\n",
            site.service(80).ip(),
            forward.word()
        )?;
        for index in 0..2 {
            write!(
                text,
                "[[service.server]]\naddress = \"{}:{port_of_server}\"\n",
                site.real_address(index)
            )?;
        }
    }
    let text = match forward {
        Forward::Nat => text,
        // Direct routing and tunnels cannot translate ports: only one service, at port 80, is
        // checked.
        _ => {
            let (_, clients) = text
                .split_once("[[service]]\nname = \"clients\"")
                .context("the file has no service clients")?;
            format!("[[service]]\nname = \"clients\"{clients}").replace(":8080", ":80")
        }
    };
    let mut lvsd = start(&site, &text)?;
    wait_health(&site, "clients", &["up", "up"], &lvsd)?;
    // The second server no longer accepts packets of clients; a check of its own address still
    // succeeds.
    let broken = match forward {
        Forward::Nat => "ip route replace default via 10.0.0.250",
        _ => {
            "iptables -I INPUT -d 203.0.113.10 -j DROP 2>/dev/null; ip addr show dev lo | sed -n 's/.*inet \\([0-9.]*\\/32\\).*/\\1/p' | \
              while read vip; do ip addr del $vip dev lo; done"
        }
    };
    site.servers[1].sh(broken)?;
    wait_health(&site, "clients", &["up", "down"], &lvsd)?;
    let blamed = servers(&site, "clients");
    ensure!(
        blamed[1]["code"] == "client_path",
        "the code of the second server is not client_path: {blamed:?}"
    );
    if forward == Forward::Nat {
        wait_health(&site, "own", &["up", "up"], &lvsd)?;
        through_another_router(&site, &lvsd)?;
    } else {
        let own = format!(
            "curl -s -o /dev/null -m 60 http://{}/",
            site.real_address(1)
        );
        site.director
            .sh(&own)
            .context("the server's own address does not answer")?;
    }
    lvsd.stop_ok(Signal::SIGINT)?;
    Ok(())
}

/// The through-VIP check fails if the first server forwards the replies of the second one.
fn through_another_router(site: &Site, lvsd: &Proc) -> Result<()> {
    site.servers[0].sh(
        "echo 1 > /proc/sys/net/ipv4/ip_forward; for file in /proc/sys/net/ipv4/conf/*/send_redirects; do echo 0 > $file; done",
    )?;
    let (router, director) = (site.real_address(0), "10.0.0.1");
    site.servers[1].sh(&format!("ip route replace default via {router}"))?;
    let reason = format!("the reply arrived through {router} (");
    let blamed = |code: &str| servers(site, "clients")[1]["code"] == code;
    let shown = || {
        let servers = health(site, "clients");
        servers
            .iter()
            .any(|(health, why)| health == "down" && why.contains(&reason))
            && blamed("other_gateway")
    };
    wait_until(
        "the reason to name the router",
        Duration::from_secs(30),
        shown,
    )
    .with_context(|| format!("{:?}\n{}", health(site, "clients"), lvsd.log()))?;
    wait_health(site, "clients", &["up", "down"], lvsd)?;
    wait_health(site, "own", &["up", "up"], lvsd)?;
    site.servers[1].sh(&format!("ip route replace default via {director}"))?;
    wait_health(site, "clients", &["up", "up"], lvsd)
}

#[test]
fn through_vip_check_detects_nat_server_that_clients_cannot_use() -> Result<()> {
    on_a_clients_way(Forward::Nat)
}

#[test]
#[ignore = "long"]
fn through_vip_check_detects_direct_routing_server_that_clients_cannot_use() -> Result<()> {
    on_a_clients_way(Forward::Dr)
}

#[test]
#[ignore = "long"]
fn through_vip_check_detects_tunnel_server_that_clients_cannot_use() -> Result<()> {
    on_a_clients_way(Forward::Tun)
}

/// Connections of clients fill the table, and the dataplane drops the checks: no server is at fault.
#[test]
fn servers_stay_up_while_dataplane_drops_checks() -> Result<()> {
    let mut options = SiteOptions::with_servers("full", Forward::Nat, 2);
    options.vip = Vip::Dataplane;
    let site = Site::new(options)?;
    let vip = site.service(80);
    let servers_of_file = [0, 1].map(|index| format!("\"{}:80\"", site.real_address(index)));
    let text = format!(
        "max_connections = 64\nwhen_full = \"drop\"\n[[service]]\nname = \"web\"\naddress = \"{vip}\"\n\
         forward = \"nat\"\nservers = [{}]\n\
         check = {{ type = \"tcp\", interval = \"300ms\", timeout = \"5s\", fall = 1 }}\n",
        servers_of_file.join(", ")
    );
    let mut lvsd = start(&site, &text)?;
    wait_health(&site, "web", &["up", "up"], &lvsd)?;
    let own_address = || -> Vec<String> {
        let servers = servers(&site, "web").into_iter();
        let reason = |server: serde_json::Value| server["checks"]["own_address"].clone();
        let reasons = servers.map(reason);
        reasons
            .map(|reason| reason.as_str().unwrap_or_default().to_owned())
            .collect()
    };
    wait_until(
        "the checks to go through the VIP",
        Duration::from_secs(30),
        || own_address() == ["", ""],
    )?;
    // Clients try again at once, so that a check rarely gets the place of an ended connection.
    let connect = format!(
        "sysctl -q -w net.ipv4.tcp_syn_retries=1\n\
         one() {{ while :; do bash -c 'exec 3<>/dev/tcp/{}/80 && sleep 50'; done 2>/dev/null; }}\n\
         export -f one\n\
         for i in $(seq 200); do timeout 170 bash -c one & done; wait",
        vip.ip()
    );
    let mut clients = site.client.spawn("bash", &["-c", &connect])?;
    let mut others = Vec::new();
    wait_until(
        "the dataplane to drop the checks",
        Duration::from_secs(40),
        || {
            let now = health(&site, "web").into_iter();
            others.extend(now.filter(|(health, _)| health != "up"));
            let reasons = own_address();
            reasons.len() == 2
                && reasons
                    .iter()
                    .all(|why| why.contains("dropped all of them"))
        },
    )
    .with_context(|| format!("{:?}\n{}", own_address(), lvsd.log()))?;
    ensure!(
        others.is_empty(),
        "servers were not up while the dataplane dropped the checks: {others:?}"
    );
    clients.stop(Signal::SIGKILL)?;
    lvsd.stop_ok(Signal::SIGINT)?;
    Ok(())
}

/// Without `via`, a server that only clients cannot use becomes suspicious, and its fault is named.
#[test]
fn server_that_clients_cannot_use_is_suspicious_until_repaired() -> Result<()> {
    let mut options = SiteOptions::with_servers("suspect", Forward::Nat, 2);
    options.vip = Vip::Dataplane;
    let site = Site::new(options)?;
    // A scheduler that prefers servers with few connections would avoid the broken one.
    let servers_of_file = [0, 1].map(|index| format!("\"{}:80\"", site.real_address(index)));
    let text = format!(
        "[[service]]\nname = \"web\"\naddress = \"{}\"\nforward = \"nat\"\nscheduler = \"rr\"\nservers = [{}]\n\
         check = {{ type = \"http\", path = \"/s/1\", interval = \"500ms\", timeout = \"1s\" }}\n",
        site.service(80),
        servers_of_file.join(", ")
    );
    let mut lvsd = start(&site, &text)?;
    wait_health(&site, "web", &["up", "up"], &lvsd)?;
    site.servers[1].sh("ip route replace default via 10.0.0.250")?;
    wait_health(&site, "web", &["up", "suspicious"], &lvsd)?;
    let blamed = servers(&site, "web");
    ensure!(
        blamed[1]["code"] == "client_path" && blamed[1]["weight"] == 1,
        "the second server does not have the code client_path and weight 1: {blamed:?}"
    );
    let lvsadm = programs::find("lvsadm")?;
    let doctor = format!("{} doctor 2>&1 || true", lvsadm.display());
    let doctor = site.director.sh(&doctor)?;
    let words = format!("clients cannot use {}:80", site.real_address(1));
    ensure!(
        doctor.contains(&words),
        "doctor does not name the server: {doctor}"
    );
    site.servers[1].sh("ip route replace default via 10.0.0.1")?;
    wait_health(&site, "web", &["up", "up"], &lvsd)?;
    // The dataplane counts unanswered clients, too; the status names the cause that the checks find.
    let client = format!(
        "while :; do curl -s -m 5 -o /dev/null http://{}/id & sleep 0.2; done",
        site.vip
    );
    let _load = site.client.spawn("sh", &["-c", &client])?;
    site.servers[1].sh("ip route replace default via 10.0.0.250")?;
    let second = || servers(&site, "web").get(1).cloned().unwrap_or_default();
    let counted = || {
        let attempts = &second()["attempts"]["last_minute"];
        let number = |key: &str| attempts[key].as_u64().unwrap_or_default();
        number("unanswered") >= 3 && 10 * number("unanswered") >= number("opened")
    };
    wait_until(
        "the dataplane to count unanswered clients",
        Duration::from_secs(60),
        counted,
    )
    .with_context(second)?;
    // Before two checks have failed, the count is the only reason.
    wait_until(
        "the status to name the cause",
        Duration::from_secs(30),
        || {
            let blamed = second();
            blamed["health"] == "suspicious" && blamed["code"] == "client_path"
        },
    )
    .with_context(second)?;
    // Both paths fail.
    site.servers[1].sh("ip link set eth0 down")?;
    wait_health(&site, "web", &["up", "down"], &lvsd)?;
    lvsd.stop_ok(Signal::SIGINT)?;
    Ok(())
}
