//! Starts the compared third-party programs, each on its core.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use lvs_testbed::{Host, Proc, wait_until};
use std::time::Duration;

/// Port of iperf3.
pub(crate) const BULK_PORT: u16 = 5201;
/// Port of this program's own server for round trips.
pub(crate) const PING_PORT: u16 = 7;

const NFTABLES: &str = "
table ip lb {
    chain pre {
        type nat hook prerouting priority -100
        ip daddr 10.73.0.1 udp dport 80 dnat to 10.72.0.11
        ip daddr 10.73.0.1 tcp dport { 7, 80, 5201 } dnat to numgen inc mod 4 map \\
            { 0 : 10.72.0.11, 1 : 10.72.0.12, 2 : 10.72.0.13, 3 : 10.72.0.14 }
    }
}
";

const HAPROXY: &str = "
global
  nbthread 1
  cpu-map 1 1
  maxconn 3000
defaults
  mode tcp
  timeout connect 5s
  timeout client 60s
  timeout server 60s
  option splice-auto
frontend f
  bind 10.73.0.1:80
  bind 10.73.0.1:5201
  bind 10.73.0.1:7
  use_backend bulk if { dst_port 5201 }
  use_backend ping if { dst_port 7 }
  default_backend web
backend web
  balance roundrobin
  server a 10.72.0.11:80
  server b 10.72.0.12:80
  server c 10.72.0.13:80
  server d 10.72.0.14:80
backend bulk
  server a 10.72.0.11:5201
backend ping
  server a 10.72.0.11:7
";

const PROXY: &str = "
[defaults]
forward = 'proxy'
scheduler = 'rr'
[[service]]
address = '10.73.0.1:80'
[[service.server]]
address = '10.72.0.11'
[[service.server]]
address = '10.72.0.12'
[[service.server]]
address = '10.72.0.13'
[[service.server]]
address = '10.72.0.14'
[[service]]
address = '10.73.0.1:5201'
[[service.server]]
address = '10.72.0.11'
[[service]]
address = '10.73.0.1:7'
[[service.server]]
address = '10.72.0.11'
";

const NGINX_STREAM: &str = "
worker_processes 1;
worker_cpu_affinity 10;
daemon off;
pid /run/lvs-bench-stream.pid;
error_log stderr crit;
worker_rlimit_nofile 19000;
events { worker_connections 9000; }
stream {
    upstream web { server 10.72.0.11:80; server 10.72.0.12:80; server 10.72.0.13:80; server 10.72.0.14:80; }
    server { listen 10.73.0.1:80 backlog=8192; proxy_pass web; }
    server { listen 10.73.0.1:5201; proxy_pass 10.72.0.11:5201; }
    server { listen 10.73.0.1:7; proxy_pass 10.72.0.11:7; }
}
";

const WEB: &str = "
worker_processes 1;
worker_cpu_affinity 01;
daemon off;
pid /run/lvs-bench-web.pid;
error_log stderr crit;
worker_rlimit_nofile 19000;
events { worker_connections 9000; }
http {
    access_log off;
    keepalive_requests 10000000;
    server { listen 80 backlog=8192; location / { default_type text/plain; return 200 'hello\\n'; } }
}
";

pub(super) fn nftables(director: &Host) -> Result<()> {
    director.sh(&format!("nft -f - <<'EOF'{NFTABLES}EOF\n"))?;
    // Each network namespace has these settings, from the first rule that needs them.
    for (name, value) in [
        ("nf_conntrack_udp_timeout", 7200),
        ("nf_conntrack_udp_timeout_stream", 7200),
    ] {
        director.sysctl(&format!("netfilter/{name}"), &value.to_string())?;
    }
    Ok(())
}

pub(super) fn proxy(director: &Host, dir: &Path) -> Result<Proc> {
    let file = dir.join("lvsd.toml");
    fs::write(&file, PROXY)?;
    let state = dir.join("lvsd-state");
    let lvsd = lvs_testbed::programs::find("lvsd")?.display().to_string();
    let words = [
        "-c",
        "1",
        &lvsd,
        "--config",
        path(&file)?,
        "--state",
        path(&state)?,
        "--socket",
        "@lvs-bench-proxy",
    ];
    director.spawn("taskset", &words)
}

pub(super) fn haproxy(director: &Host, dir: &Path) -> Result<Proc> {
    let file = dir.join("haproxy.cfg");
    fs::write(&file, HAPROXY)?;
    director.spawn(
        "taskset",
        &["-c", "1", "haproxy", "-db", "-f", path(&file)?],
    )
}

/// Returns the directive that loads nginx's stream module; empty if nginx contains it.
pub(crate) fn load_stream() -> String {
    let module = "/usr/lib/nginx/modules/ngx_stream_module.so";
    if Path::new(module).exists() {
        format!("load_module {module};")
    } else {
        String::new()
    }
}

pub(super) fn nginx_stream(director: &Host, dir: &Path) -> Result<Proc> {
    let file = dir.join("nginx-stream.conf");
    fs::write(&file, load_stream() + NGINX_STREAM)?;
    director.spawn("taskset", &["-c", "1", "nginx", "-c", path(&file)?])
}

pub(super) fn web_server(server: &Host, dir: &Path) -> Result<Proc> {
    let file = dir.join("nginx-web.conf");
    fs::write(&file, WEB)?;
    server.spawn("taskset", &["-c", "0", "nginx", "-c", path(&file)?])
}

/// Starts `testpmd`, which forwards between two interfaces, to the MAC addresses of the client and
/// the server.
pub(super) fn testpmd(
    director: &Host,
    [front, back]: [&str; 2],
    [client, server]: [&str; 2],
) -> Result<Proc> {
    let device = |number: u8, interface: &str| {
        format!(
            "--vdev=net_af_packet{number},iface={interface},qdisc_bypass=1,framecnt=4096,framesz=2048,blocksz=65536"
        )
    };
    let (a, b) = (device(0, front), device(1, back));
    let (to_client, to_server) = (
        format!("--eth-peer=0,{client}"),
        format!("--eth-peer=1,{server}"),
    );
    let process = director.spawn(
        "dpdk-testpmd",
        &[
            "--no-huge",
            "-m",
            "512",
            "--no-pci",
            "--no-telemetry",
            "--file-prefix",
            front,
            "-l",
            "0,1",
            "--main-lcore",
            "0",
            &a,
            &b,
            "--",
            "--total-num-mbufs=32768",
            "--nb-cores=1",
            "--forward-mode=mac",
            "--portmask=3",
            "--burst=64",
            &to_server,
            &to_client,
            "--stats-period",
            "3600",
        ],
    )?;
    wait_until("testpmd to be ready", Duration::from_secs(15), || {
        process.log().contains("Port statistics")
    })
    .with_context(|| process.log())?;
    Ok(process)
}

fn path(file: &Path) -> Result<&str> {
    file.to_str().context("the path is not UTF-8")
}
