//! `ipvsadm -Lnc` with very many connections: how soon, how long, how much memory, and what clients
//! notice of it.
//!
//! ```text
//! cargo run --release -p lvs-bench --bin listing [-- CONNECTIONS...]
//! ```
//!
//! Needs root, or user namespaces, and the release build of `lvs-dataplane` and `lvsadm`. 100,000
//! and 1,000,000 connections if nothing is said, made by as many datagrams through a running
//! director. Round trips are of one byte each way over TCP, through the same director.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use lvs_testbed::{Forward, Site, SiteOptions, programs, wait_until};

/// Port of the services, TCP and UDP.
const PORT: u16 = 7;
/// The first client address; each has [`PORTS`] connections.
const CLIENTS: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const PORTS: u32 = 60_000;
/// Listings of each table.
const ROUNDS: usize = 3;
/// Time of a measurement without listings.
const QUIET: Duration = Duration::from_secs(3);

fn main() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        ["serve"] => serve(),
        ["fill", target, count] => fill(target.parse()?, count.parse()?),
        ["trips", target] => trips(target.parse()?),
        [] => measure(&[100_000, 1_000_000]),
        counts => {
            let counts: Result<Vec<u32>, _> = counts.iter().map(|count| count.parse()).collect();
            measure(&counts.context("usage: listing [CONNECTIONS...]")?)
        }
    }
}

/// The real server: TCP bytes go back, datagrams are swallowed.
fn serve() -> Result<()> {
    let socket = UdpSocket::bind(("0.0.0.0", PORT))?;
    thread::spawn(move || while socket.recv(&mut [0; 64]).is_ok() {});
    for stream in TcpListener::bind(("0.0.0.0", PORT))?.incoming() {
        let mut stream = stream?;
        stream.set_nodelay(true)?;
        let mut byte = [0];
        while stream.read_exact(&mut byte).is_ok() && stream.write_all(&byte).is_ok() {}
    }
    Ok(())
}

/// The client: one datagram from each of `count` addresses and ports.
fn fill(target: SocketAddr, count: u32) -> Result<()> {
    for number in 0..count {
        let addr = Ipv4Addr::from_bits(CLIENTS.to_bits() + number / PORTS);
        let port = u16::try_from(1024 + number % PORTS)?;
        UdpSocket::bind((addr, port))?.send_to(b"x", target)?;
        // No faster than the director opens connections.
        if number % 64 == 63 {
            thread::sleep(Duration::from_micros(200));
        }
    }
    Ok(())
}

/// The client: round trips until standard input ends; prints how many, and p50, p99 and the longest
/// in microseconds.
fn trips(target: SocketAddr) -> Result<()> {
    let mut stream = TcpStream::connect_timeout(&target, Duration::from_secs(5))?;
    stream.set_nodelay(true)?;
    let ended = thread::spawn(|| std::io::stdin().read_to_end(&mut Vec::new()));
    let mut times = Vec::new();
    let mut byte = [0];
    while !ended.is_finished() {
        let start = Instant::now();
        stream.write_all(&byte)?;
        stream.read_exact(&mut byte)?;
        times.push(start.elapsed().as_micros());
    }
    times.sort_unstable();
    ensure!(!times.is_empty(), "no round trip");
    println!(
        "{} {} {} {}",
        times.len(),
        times[times.len() / 2],
        times[times.len() * 99 / 100],
        times[times.len() - 1]
    );
    Ok(())
}

/// KiB of a process, and at most so far.
fn memory(pid: u32) -> Result<(u64, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kib = |name: &str| -> Result<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|line| line.split_ascii_whitespace().next());
        Ok(number.context("no memory in status")?.parse()?)
    };
    Ok((kib("VmRSS:")?, kib("VmHWM:")?))
}

/// What clients notice while `during` runs.
fn notice<T>(site: &Site, during: impl FnOnce() -> Result<T>) -> Result<(T, String)> {
    let mut child = site
        .client
        .command(env::current_exe()?)
        .args(["trips", &site.service(PORT).to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let done = during();
    drop(child.stdin.take());
    let output = child.wait_with_output()?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let words: Vec<&str> = printed.split_ascii_whitespace().collect();
    let [count, p50, p99, longest] = words[..] else {
        bail!("unexpected: {printed}")
    };
    Ok((
        done?,
        format!("{count} round trips, p50 {p50} us, p99 {p99} us, longest {longest} us"),
    ))
}

/// A listing: seconds to its first connection and to its end, connections, and the most memory it
/// took, in KiB.
fn list(site: &Site) -> Result<(f64, f64, u64, u64)> {
    let start = Instant::now();
    let mut child = site
        .director
        .command(programs::find("lvsadm")?)
        .arg("-Lnc")
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()?;
    let mut lines = BufReader::with_capacity(1 << 16, child.stdout.take().context("no output")?);
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
    ensure!(child.wait()?.success(), "the listing failed");
    Ok((first, whole, count, most))
}

fn measure(counts: &[u32]) -> Result<()> {
    for &count in counts {
        let mut options = SiteOptions::new("listing", Forward::Nat);
        options.servers = 1;
        let mut site = Site::new(options)?;
        let program = env::current_exe()?;
        let _server = site.servers[0].spawn(&program, &["serve"])?;
        wait_until("the server", Duration::from_secs(5), || {
            site.servers[0].listens("tcp", PORT)
        })?;
        site.client.sh("ip route add local 198.18.0.0/15 dev lo")?;
        site.start_engine(&["--max-connections", &(count + 1000).to_string()])?;
        site.add_service(PORT, "rr")?;
        site.add_service_weighted("-u", PORT, "rr", &[1])?;
        let engine = site.engine.as_ref().context("no engine")?.pid();
        let target = site.service(PORT).to_string();
        site.client
            .run(&program, &["fill", &target, &count.to_string()])?;
        println!("{count} datagrams of as many clients");
        let ((), quiet) = notice(&site, || {
            thread::sleep(QUIET);
            Ok(())
        })?;
        println!("  quiet:       {quiet}");
        let before = memory(engine)?.0;
        for _ in 0..ROUNDS {
            let ((first, whole, listed, most), noticed) = notice(&site, || list(&site))?;
            println!(
                "  {listed} listed: first after {:.1} ms, all after {whole:.2} s ({:.2} us each); lvsadm {most} KiB at most; \
                 engine {before} KiB before, {} KiB after, {} KiB at most",
                first * 1e3,
                whole * 1e6 / f64::from(u32::try_from(listed)?),
                memory(engine)?.0,
                memory(engine)?.1,
            );
            println!("  meanwhile:   {noticed}");
        }
    }
    Ok(())
}
