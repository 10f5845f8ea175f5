//! `lvs-testbed wait`: clients that wait for an answer that does not arrive.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Barrier};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};

/// Options of the waiting clients.
#[derive(Clone, Debug, clap::Args)]
pub struct WaitOptions {
    /// The server's address and port
    pub target: SocketAddr,
    /// Number of connections
    #[arg(long, default_value_t = 100)]
    pub connections: usize,
    /// Stop after this many milliseconds
    #[arg(long = "for", value_name = "MS", default_value_t = 60_000)]
    pub for_ms: u64,
}

/// Opens connections, sends half a request over each, and prints `waiting`. For each connection,
/// prints the time (microseconds since 1970) at which the server resets or closes it, and `reset`
/// or `closed`; after the time limit, `late`.
///
/// # Errors
///
/// A connection cannot be opened.
pub fn main(options: &WaitOptions) -> Result<()> {
    let all = Arc::new(Barrier::new(options.connections + 1));
    let limit = Duration::from_millis(options.for_ms);
    let mut threads = Vec::new();
    for _ in 0..options.connections {
        let mut stream = TcpStream::connect(options.target)
            .with_context(|| format!("cannot connect to {}", options.target))?;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n")?;
        stream.set_read_timeout(Some(limit))?;
        let all = Arc::clone(&all);
        threads.push(std::thread::spawn(move || {
            all.wait();
            let how = match stream.read(&mut [0; 1024]) {
                Ok(_) => "closed",
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => "reset",
                Err(_) => "late",
            };
            println!("{} {how}", now_us());
        }));
    }
    println!("waiting");
    all.wait();
    for thread in threads {
        // If a thread panicked, it has printed the reason.
        let _ = thread.join();
    }
    Ok(())
}

/// Microseconds since 1970.
#[must_use]
pub fn now_us() -> u128 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_micros())
}
