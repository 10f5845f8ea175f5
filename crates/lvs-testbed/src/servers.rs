//! What runs on the real servers: nginx, iperf3, dnsmasq, each a real one.

use std::fmt::Write as _;
use std::fs;
use std::net::Ipv4Addr;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::netns::{Host, Proc, wait_until};

/// How an nginx is to be set up.
#[derive(Clone, Debug)]
pub struct NginxOptions {
    /// The ports to listen on, on every address of the host.
    pub ports: Vec<u16>,
    /// Whether connections stay open for further requests.
    pub keepalive: bool,
}

impl Default for NginxOptions {
    fn default() -> Self {
        Self {
            ports: vec![80],
            keepalive: true,
        }
    }
}

/// Starts an nginx that serves the directory `www` of the testbed, names itself in the header `X-Server` and under
/// `/id`, tells clients their address under `/addr`, and takes uploads with PUT under `/up/`, into the directory `NAME-up/up`.
///
/// It runs as one process (`master_process off`): a `kill -9` then ends the server, and nothing needs to change user.
///
/// # Errors
///
/// When nginx is missing or does not listen within ten seconds; the error holds its log.
pub fn nginx(host: &Host, options: &NginxOptions) -> Result<Proc> {
    let name = host.name();
    let dir = host.dir();
    let home = dir.join(format!("{name}-up"));
    let www = dir.join("www");
    for path in [&home.join("up"), &www] {
        fs::create_dir_all(path)?;
    }
    let built = Command::new("nginx")
        .arg("-V")
        .output()
        .context("cannot start nginx (package nginx-light)")?;
    let built = String::from_utf8_lossy(&built.stderr).into_owned();
    let mut temporary = format!("client_body_temp_path {}/body;\n", home.display());
    for module in ["proxy", "fastcgi", "uwsgi", "scgi"] {
        if !built.contains(&format!("--without-http_{module}_module")) {
            writeln!(
                temporary,
                "    {module}_temp_path {}/{module};",
                home.display()
            )?;
        }
    }
    let listen: String = options
        .ports
        .iter()
        .map(|port| {
            format!(
                "listen {port} reuseport backlog=4096; \
                 listen [::]:{port} ipv6only=on reuseport backlog=4096; "
            )
        })
        .collect();
    let keepalive = if options.keepalive { "65" } else { "0" };
    let configuration = format!(
        "daemon off;
master_process off;
user root root;
pid {home}/pid;
error_log stderr warn;
worker_rlimit_nofile 8192;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    keepalive_timeout {keepalive};
    keepalive_requests 100000;
    default_type application/octet-stream;
    client_max_body_size 0;
    {temporary}
    server {{
        {listen}
        root {www};
        add_header X-Server {name} always;
        location = /id {{ default_type text/plain; return 200 \"{name}\\n\"; }}
        location = /addr {{ default_type text/plain; return 200 \"$remote_addr\n\"; }}
        location = /status {{ stub_status; }}
        location /up/ {{ root {home}; dav_methods PUT DELETE; create_full_put_path on; }}
    }}
}}
",
        home = home.display(),
        www = www.display(),
    );
    let file = dir.join(format!("{name}-nginx.conf"));
    fs::write(&file, configuration)?;
    let path = |path: &std::path::Path| path.display().to_string();
    let mut server = host.spawn(
        "nginx",
        &["-e", "stderr", "-p", &path(&home), "-c", &path(&file)],
    )?;
    for port in &options.ports {
        listening(host, &mut server, "tcp", *port)?;
    }
    Ok(server)
}

/// Starts an iperf3 server on port 5201 of one address. Behind direct routing or a tunnel that has to be the VIP: iperf3
/// answers UDP from whatever address the route suggests if it listens on all.
///
/// # Errors
///
/// When it is missing or does not listen.
pub fn iperf3(host: &Host, address: Ipv4Addr) -> Result<Proc> {
    let address = address.to_string();
    let mut server = host.spawn(
        "iperf3",
        &["--server", "--port", "5201", "--bind", &address],
    )?;
    listening(host, &mut server, "tcp", 5201)?;
    Ok(server)
}

/// Starts a dnsmasq on port 53 that says `id.test` is a text record with the host's name and `www.test` is 192.0.2.80.
///
/// # Errors
///
/// When it is missing or does not listen.
pub fn dnsmasq(host: &Host) -> Result<Proc> {
    let mut server = host.spawn(
        "dnsmasq",
        &[
            // Stays in the foreground as well, and keeps its user: a user namespace has no other.
            "--no-daemon",
            "--conf-file=/dev/null",
            "--no-resolv",
            "--no-hosts",
            "--pid-file=",
            "--port=53",
            &format!("--txt-record=id.test,{}", host.name()),
            "--address=/www.test/192.0.2.80",
        ],
    )?;
    listening(host, &mut server, "udp", 53)?;
    Ok(server)
}

/// Waits for a server to listen, or to end, whichever comes first.
fn listening(host: &Host, server: &mut Proc, protocol: &str, port: u16) -> Result<()> {
    let mut ended = false;
    let what = format!("{protocol} port {port} on host {}", host.name());
    wait_until(&what, Duration::from_secs(10), || {
        ended = !server.is_running();
        ended || host.listens(protocol, port)
    })
    .with_context(|| server.log())?;
    ensure!(
        !ended,
        "on host {} a server ended at once; it printed:\n{}",
        host.name(),
        server.log()
    );
    Ok(())
}
