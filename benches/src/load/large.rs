//! Opens very many connections through a director, and measures the round trips of clients. This
//! program is also the real server and the clients.

use std::env;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use clap::Subcommand;
use lvs_testbed::{Proc, Site, wait_until};

/// Port of the services, TCP and UDP.
const PORT: u16 = 7;
/// The first client address. Each address has [`PORTS`] connections.
const CLIENTS: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const PORTS: u32 = 60_000;
/// Duration of a measurement without other load.
const QUIET: Duration = Duration::from_secs(3);

/// A task of a process on one of the hosts.
#[derive(Debug, Subcommand)]
pub enum End {
    /// The real server: echo TCP, and read datagrams
    Serve,
    /// Client: send one datagram from each of many addresses and ports
    Fill {
        /// Address of the service
        target: SocketAddr,
        /// Number of datagrams
        count: u32,
    },
    /// Client: make round trips until standard input is closed
    Trips {
        /// Address of the service
        target: SocketAddr,
    },
}

impl End {
    /// Runs the task.
    ///
    /// # Errors
    ///
    /// A socket cannot be opened, or the other end cannot be reached.
    pub fn run(&self) -> Result<()> {
        match *self {
            Self::Serve => serve(),
            Self::Fill { target, count } => fill(target, count),
            Self::Trips { target } => trips(target),
        }
    }
}

/// Returns the words of the command line for a task.
fn end<const WORDS: usize>(words: [&str; WORDS]) -> Vec<&str> {
    [&["endpoint", "large"], &words[..]].concat()
}

/// Starts the real server, and adds the required addresses to the client.
pub(super) fn prepare(site: &Site) -> Result<Proc> {
    let server = site.servers[0].spawn(env::current_exe()?, &end(["serve"]))?;
    wait_until("the server to listen", Duration::from_secs(5), || {
        site.servers[0].listens("tcp", PORT)
    })?;
    site.client.sh("ip route add local 198.18.0.0/15 dev lo")?;
    Ok(server)
}

/// Adds the services, opens `count` connections through the director, and prints their number.
pub(super) fn open(site: &Site, count: u32) -> Result<()> {
    site.add_service(PORT, "rr")?;
    site.add_service_weighted("-u", PORT, "rr", &[1])?;
    let target = site.service(PORT).to_string();
    let count = count.to_string();
    site.client
        .run(env::current_exe()?, &end(["fill", &target, &count]))?;
    println!("{count} datagrams, each from another client address or port");
    Ok(())
}

/// The real server: returns TCP bytes, and discards datagrams.
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

/// The client: sends one datagram from each of `count` addresses and ports.
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

/// The client: makes round trips until standard input ends. Prints their number, and their p50, p99
/// and maximum in microseconds.
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
    ensure!(!times.is_empty(), "no round trip was completed");
    println!(
        "{} {} {} {}",
        times.len(),
        times[times.len() / 2],
        times[times.len() * 99 / 100],
        times[times.len() - 1]
    );
    Ok(())
}

/// Measures clients while `during` runs: round trips of one byte in each direction over TCP.
/// Returns the result of `during`, and a text with the round-trip times.
pub(super) fn notice<T>(site: &Site, during: impl FnOnce() -> Result<T>) -> Result<(T, String)> {
    let mut child = site
        .client
        .command(env::current_exe()?)
        .args(end(["trips", &site.service(PORT).to_string()]))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let done = during();
    drop(child.stdin.take());
    let output = child.wait_with_output()?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let words: Vec<&str> = printed.split_ascii_whitespace().collect();
    let [count, p50, p99, longest] = words[..] else {
        bail!("the client printed no round-trip times: {printed:?}")
    };
    Ok((
        done?,
        format!("{count} round trips, p50 {p50} us, p99 {p99} us, longest {longest} us"),
    ))
}

/// Prints the round-trip times of clients without other load.
pub(super) fn quiet(site: &Site) -> Result<()> {
    let ((), quiet) = notice(site, || {
        thread::sleep(QUIET);
        Ok(())
    })?;
    println!("  quiet:       {quiet}");
    Ok(())
}
