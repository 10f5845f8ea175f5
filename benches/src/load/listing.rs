//! Measures `ipvsadm -Lnc` with very many connections: time to the first line, duration, memory,
//! and the effect on clients.
//!
//! One datagram opens each connection, through a running director. Round trips are of one byte in
//! each direction over TCP, through the same director.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, Site, SiteOptions, programs};

use super::large::{self, notice};

/// Number of listings of each table.
const ROUNDS: usize = 3;

/// Returns the present and the peak memory of a process in KiB.
fn memory(pid: u32) -> Result<(u64, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kib = |name: &str| -> Result<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|line| line.split_ascii_whitespace().next());
        Ok(number
            .context("/proc/PID/status contains no memory size")?
            .parse()?)
    };
    Ok((kib("VmRSS:")?, kib("VmHWM:")?))
}

/// Lists all connections. Returns the seconds until the first connection and until the end, the
/// number of connections, and the peak memory of `lvsadm` in KiB, read after each 5,000
/// connections.
fn list(site: &Site) -> Result<(f64, f64, u64, u64)> {
    let start = Instant::now();
    let mut child = site
        .director
        .command(programs::find("lvsadm")?)
        .arg("-Lnc")
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()?;
    let mut lines = BufReader::with_capacity(
        1 << 16,
        child
            .stdout
            .take()
            .context("the output of the listing is not piped")?,
    );
    let mut line = String::new();
    for _ in 0..3 {
        line.clear();
        lines.read_line(&mut line)?;
    }
    let first = start.elapsed().as_secs_f64();
    let (mut count, mut most) = (1, 0);
    while lines.read_line(&mut line)? > 0 {
        line.clear();
        count += 1;
        if count % 5000 == 0 {
            most = memory(child.id())?.1;
        }
    }
    let whole = start.elapsed().as_secs_f64();
    ensure!(child.wait()?.success(), "lvsadm -Lnc failed");
    Ok((first, whole, count, most))
}

/// Measures tables with these numbers of connections.
pub(super) fn run(counts: &[u32]) -> Result<()> {
    for &count in counts {
        let mut options = SiteOptions::new("listing", Forward::Nat);
        options.servers = 1;
        let mut site = Site::new(options)?;
        let _server = large::prepare(&site)?;
        site.start_dataplane(&["--max-connections", &(count + 1000).to_string()])?;
        let dataplane = site
            .dataplane
            .as_ref()
            .context("no dataplane was started")?
            .pid();
        large::open(&site, count)?;
        large::quiet(&site)?;
        let before = memory(dataplane)?.0;
        for _ in 0..ROUNDS {
            let ((first, whole, listed, most), noticed) = notice(&site, || list(&site))?;
            println!(
                "  {listed} listed: first after {:.1} ms, all after {whole:.2} s ({:.2} us each); lvsadm {most} KiB at most; \
                 dataplane {before} KiB before, {} KiB after, {} KiB at most",
                first * 1e3,
                whole * 1e6 / f64::from(u32::try_from(listed)?),
                memory(dataplane)?.0,
                memory(dataplane)?.1,
            );
            println!("  meanwhile:   {noticed}");
        }
    }
    Ok(())
}
