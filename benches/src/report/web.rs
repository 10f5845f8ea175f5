//! The web server of experiments with pages.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use lvs_testbed::Proc;

use crate::compare::bed::Bed;

/// Bytes of the page, as O'Rourke and Keefe's had.
const PAGE: usize = 628;

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
