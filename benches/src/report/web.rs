//! The web server of the experiments that request pages.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use lvs_testbed::{Host, Proc};

/// Length of the page in bytes, as in O'Rourke and Keefe's measurements.
const PAGE: usize = 628;

/// Starts the web server of a host. With `capacity`, each of its addresses answers that many
/// requests per second for `/page`, delays some that arrive too early, and refuses all others
/// (503). `/free/page` has no limit.
pub(super) fn serve(host: &Host, directory: &Path, capacity: Option<u32>) -> Result<Proc> {
    let page = "x".repeat(PAGE);
    fs::create_dir_all(directory.join("free"))?;
    fs::write(directory.join("page"), &page)?;
    fs::write(directory.join("free/page"), page)?;
    let (root, name) = (directory.display(), host.name());
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
        "user root;\nworker_processes 1;\nworker_cpu_affinity 01;\ndaemon off;\npid {root}/{name}.pid;\n\
         error_log stderr crit;\nworker_rlimit_nofile 19000;\nevents {{ worker_connections 9000; }}\n\
         http {{\n  access_log off;\n  keepalive_requests 10000000;\n  {zone}\n  \
         server {{ listen 80 backlog=8192; root {root}; default_type text/plain; \
         location / {{ {limit} }} location /free {{ }} }}\n}}\n"
    );
    let file = directory.join(format!("{name}.conf"));
    fs::write(&file, text)?;
    let file = file
        .to_str()
        .with_context(|| format!("the path {} is not UTF-8", file.display()))?;
    let server = host.spawn("nginx", &["-c", file])?;
    host.wait_for_port("tcp", 80)
        .with_context(|| server.log())?;
    Ok(server)
}
