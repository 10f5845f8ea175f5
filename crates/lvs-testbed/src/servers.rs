//! The programs on the real servers, such as nginx, iperf3 and dnsmasq.

use std::fmt::Write as _;
use std::fs;
use std::net::Ipv4Addr;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::netns::{Host, Proc, wait_until};
use crate::paced::PacedOptions;

/// Settings of an nginx.
#[derive(Clone, Debug)]
pub struct NginxOptions {
    /// Ports to listen on, at every address of the host.
    pub ports: Vec<u16>,
    /// Whether connections stay open after a response.
    pub keepalive: bool,
    /// Maximum number of bytes a second for a response; 0 means no limit. A request can set another
    /// limit: `/file?rate=100k`.
    pub rate: u64,
}

impl Default for NginxOptions {
    fn default() -> Self {
        Self {
            ports: vec![80],
            keepalive: true,
            rate: 0,
        }
    }
}

/// Starts an nginx that serves the testbed's directory `www`. The name of the host is in the header
/// `X-Server` and under `/id`, the client's address under `/addr`. PUT under `/up/` writes to the
/// directory `NAME-up/up` of the testbed.
///
/// nginx runs as one process (`master_process off`), so that `kill -9` ends the server.
///
/// # Errors
///
/// nginx is missing, or does not listen in time; the error contains its log.
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
    keepalive_requests 100000000;
    map $arg_rate $rate {{ default $arg_rate; \"\" {rate}; }}
    limit_rate $rate;
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
        rate = options.rate,
        home = home.display(),
        www = www.display(),
    );
    let file = dir.join(format!("{name}-nginx.conf"));
    fs::write(&file, configuration)?;
    let path = |path: &std::path::Path| path.display().to_string();
    let words = ["-e", "stderr", "-p", &path(&home), "-c", &path(&file)];
    let server = host.spawn("nginx", &words)?;
    let mut ports = options.ports.iter();
    ports.try_fold(server, |server, &port| listening(host, server, "tcp", port))
}

/// Starts a [web server with an even rate](crate::paced) on port 80, with `rate` bytes a second for
/// each download. With `real_time`, it has a real-time priority.
///
/// # Errors
///
/// The program is not built, or does not listen.
pub fn paced(host: &Host, rate: u64, real_time: bool) -> Result<Proc> {
    let options = PacedOptions {
        name: host.name().to_owned(),
        rate,
        port: 80,
    };
    let (program, arguments) = crate::programs::own_with(options.arguments(), real_time)?;
    let server = host.spawn(program, &arguments)?;
    listening(host, server, "tcp", options.port)
}

/// Starts an iperf3 server on port 5201 of one address. With direct routing or a tunnel, this must
/// be the VIP: an iperf3 on all addresses would answer UDP from the address that the route selects.
///
/// # Errors
///
/// iperf3 is missing, or does not listen.
pub fn iperf3(host: &Host, address: Ipv4Addr) -> Result<Proc> {
    let address = address.to_string();
    let server = host.spawn(
        "iperf3",
        &["--server", "--port", "5201", "--bind", &address],
    )?;
    listening(host, server, "tcp", 5201)
}

/// Starts a dnsmasq on port 53, with the host's name in the TXT record of `id.test`, and the
/// address 192.0.2.80 for `www.test`.
///
/// # Errors
///
/// dnsmasq is missing, or does not listen.
pub fn dnsmasq(host: &Host) -> Result<Proc> {
    let server = host.spawn(
        "dnsmasq",
        &[
            // The server stays in the foreground, and keeps its user: a user namespace has no other
            // one.
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
    listening(host, server, "udp", 53)
}

/// Starts a vsftpd on port 21 of every IPv4 and IPv6 address, for anonymous users. They download
/// from `www` of the testbed, and upload to `up` (`NAME-ftp/up` of the testbed). Passive data
/// connections use the ports 30000 to 30099 of `passive_address`, or else of the address that the
/// client has connected to. Active ones come from port 20.
///
/// # Errors
///
/// vsftpd is missing, or does not listen.
pub fn vsftpd(host: &Host, passive_address: Option<Ipv4Addr>) -> Result<Proc> {
    let home = host.dir().join(format!("{}-ftp", host.name()));
    let empty = home.join("empty");
    for path in [&home.join("up"), &empty, &host.dir().join("www")] {
        fs::create_dir_all(path)?;
    }
    let www = home.join("www");
    if !www.exists() {
        std::os::unix::fs::symlink(host.dir().join("www"), &www)?;
    }
    let options = [
        ("background", "NO".to_owned()),
        ("listen", "NO".to_owned()),
        // The socket also accepts IPv4 connections, as mapped addresses.
        ("listen_ipv6", "YES".to_owned()),
        // A user namespace has no other user, and no file here is secret.
        ("run_as_launching_user", "YES".to_owned()),
        ("seccomp_sandbox", "NO".to_owned()),
        ("secure_chroot_dir", empty.display().to_string()),
        ("anonymous_enable", "YES".to_owned()),
        ("local_enable", "NO".to_owned()),
        ("ftp_username", "root".to_owned()),
        ("anon_root", home.display().to_string()),
        ("write_enable", "YES".to_owned()),
        ("anon_upload_enable", "YES".to_owned()),
        ("anon_other_write_enable", "YES".to_owned()),
        ("anon_world_readable_only", "NO".to_owned()),
        ("connect_from_port_20", "YES".to_owned()),
        ("pasv_min_port", "30000".to_owned()),
        ("pasv_max_port", "30099".to_owned()),
        // The server logs every command, so that a test can check the ports that clients have
        // announced.
        ("xferlog_enable", "YES".to_owned()),
        ("dual_log_enable", "NO".to_owned()),
        ("log_ftp_protocol", "YES".to_owned()),
        ("vsftpd_log_file", home.join("log").display().to_string()),
        ("ftpd_banner", host.name().to_owned()),
    ];
    let mut text: String = options
        .iter()
        .map(|(key, value)| format!("{key}={value}\n"))
        .collect();
    if let Some(address) = passive_address {
        writeln!(text, "pasv_address={address}")?;
    }
    let file = host.dir().join(format!("{}-vsftpd.conf", host.name()));
    fs::write(&file, text)?;
    let server = host.spawn("vsftpd", &[&file])?;
    listening(host, server, "tcp", 21)
}

/// Starts a dnsmasq that serves the testbed's directory `www` by TFTP. With `single_port`, all
/// transfers use port 69.
///
/// # Errors
///
/// dnsmasq is missing, or does not listen.
pub fn tftp(host: &Host, single_port: bool) -> Result<Proc> {
    let root = format!("--tftp-root={}", host.dir().join("www").display());
    let mut arguments = vec![
        "--no-daemon",
        "--conf-file=/dev/null",
        "--no-resolv",
        "--no-hosts",
        "--pid-file=",
        "--port=0",
        "--enable-tftp",
        &root,
    ];
    if single_port {
        arguments.push("--tftp-single-port");
    }
    let server = host.spawn("dnsmasq", &arguments)?;
    listening(host, server, "udp", 69)
}

/// Starts a sipp on UDP port 5060 of an address. It answers calls, and records every message in
/// `NAME-sip` of the testbed.
///
/// # Errors
///
/// sipp is missing, or does not listen.
pub fn sipp(host: &Host, address: Ipv4Addr) -> Result<Proc> {
    let messages = host.dir().join(format!("{}-sip", host.name()));
    let mut command = host.command("sipp");
    command
        .args(["-sn", "uas", "-i", &address.to_string(), "-p", "5060"])
        // A call with the same identifier may be repeated after it has ended.
        .args(["-nostdin", "-deadcall_wait", "0"])
        .args(["-trace_msg", "-message_overwrite", "true"])
        .arg("-message_file")
        .arg(messages);
    let server = host.spawn_command("sipp", command)?;
    listening(host, server, "udp", 5060)
}

/// Waits until a server listens on its port, or exits.
fn listening(host: &Host, mut server: Proc, protocol: &str, port: u16) -> Result<Proc> {
    let mut ended = false;
    let what = format!("{protocol} port {port} on host {} to be open", host.name());
    wait_until(&what, Duration::from_secs(10), || {
        ended = !server.is_running();
        ended || host.listens(protocol, port)
    })
    .with_context(|| server.log())?;
    ensure!(
        !ended,
        "host {}: a server exited at once; it printed:\n{}",
        host.name(),
        server.log()
    );
    Ok(server)
}
