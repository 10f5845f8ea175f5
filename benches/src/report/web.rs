//! What experiments with web pages share: the server, and who is measured.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use lvs_testbed::Proc;

use super::Peer;
use super::data::CpuSeconds;
use crate::compare::bed::Bed;
use crate::compare::contender::{Contender, Method};
use crate::machine::{Snapshot, Used};

/// Bytes of the page, as O'Rourke and Keefe's had.
const PAGE: usize = 628;

pub(super) const PEERS: [Peer; 9] = [
    Peer {
        name: "direct",
        who: Contender::Direct,
    },
    Peer {
        name: "routing",
        who: Contender::Route,
    },
    Peer {
        name: "lvs-nat",
        who: Contender::AfPacket(Method::Nat),
    },
    Peer {
        name: "lvs-dr",
        who: Contender::AfPacket(Method::Dr),
    },
    Peer {
        name: "lvs-tunnel",
        who: Contender::AfPacket(Method::Tunnel),
    },
    Peer {
        name: "lvs-nat-in-kernel",
        who: Contender::InKernel(Method::Nat),
    },
    Peer {
        name: "nftables",
        who: Contender::Nftables,
    },
    Peer {
        name: "haproxy",
        who: Contender::Haproxy,
    },
    Peer {
        name: "nginx",
        who: Contender::Nginx,
    },
];

/// Starts the web server at all four addresses. With `capacity`, each of them answers so many
/// requests a second and holds back some that are too early; all others it refuses (503).
pub(super) fn serve(bed: &Bed, directory: &Path, capacity: Option<u32>) -> Result<Proc> {
    fs::write(directory.join("page"), "x".repeat(PAGE))?;
    let root = directory.display();
    let (zone, limit) = match capacity {
        Some(rate) => (
            format!("limit_req_zone $server_addr zone=cap:1m rate={rate}r/s;"),
            format!(
                "limit_req zone=cap burst={}; limit_req_status 503;",
                rate / 10
            ),
        ),
        None => Default::default(),
    };
    let text = format!(
        "user root;\nworker_processes 1;\nworker_cpu_affinity 01;\ndaemon off;\npid {root}/nginx.pid;\n\
         error_log stderr crit;\nworker_rlimit_nofile 19000;\nevents {{ worker_connections 9000; }}\n\
         http {{\n  access_log off;\n  keepalive_requests 10000000;\n  {zone}\n  \
         server {{ listen 80 backlog=8192; root {root}; location / {{ default_type text/plain; {limit} }} }}\n}}\n"
    );
    let file = directory.join("nginx.conf");
    fs::write(&file, text)?;
    let file = file.to_str().context("a path that is no UTF-8")?;
    let server = bed.server.spawn("nginx", &["-c", file])?;
    bed.server
        .wait_for_port("tcp", 80)
        .with_context(|| server.log())?;
    Ok(server)
}

/// What the nodes used since `first`, and why it should not be believed.
pub(super) fn used_since(bed: &mut Bed, first: &Snapshot) -> Result<(CpuSeconds, Option<String>)> {
    let devices = [bed.devices[1].as_str(), &bed.devices[2]];
    let used: Used = Snapshot::take().since(first, bed.pid(), &devices);
    bed.check_alive()?;
    let cpu = CpuSeconds {
        elapsed: used.seconds,
        process: used.process,
        softirq: used.softirq,
        other_softirq: used.other_softirq,
        endpoints: used.endpoints,
    };
    Ok((cpu, used.disturbed()))
}
