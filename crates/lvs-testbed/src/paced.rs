//! A web server with an even rate (`lvs-testbed paced`), for tests that measure the pauses that
//! directors cause.
//!
//! nginx's `limit_rate` sends bursts with pauses of up to a second. This server sends the due bytes
//! every [`SLICE`], at a different moment for each download. Like [`crate::servers::nginx`], it
//! serves `/s/SIZE` and `/id`, and sets `X-Server`.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use socket2::{Domain, Protocol, Socket, Type};

use crate::content;

/// Interval at which the next bytes of a download are sent.
pub const SLICE: Duration = Duration::from_millis(20);
/// Number of moments in a slice. Each download sends at one of them.
const MOMENTS: usize = 10;
/// Maximum size of a download in bytes.
const LARGEST: usize = 10 << 20;
/// Time limit for a request to arrive, and for a download without progress.
const PATIENCE: Duration = Duration::from_secs(60);

/// Settings of the paced server.
#[derive(Clone, Debug, clap::Args)]
pub struct PacedOptions {
    /// Name of the server, for X-Server and /id
    pub name: String,
    /// Bytes a second for each download
    #[arg(long, default_value_t = 60_000)]
    pub rate: u64,
    /// The port, on every address of the host
    #[arg(long, default_value_t = 80)]
    pub port: u16,
}

impl PacedOptions {
    pub(crate) fn arguments(&self) -> Vec<String> {
        vec![
            "paced".to_owned(),
            self.name.clone(),
            format!("--rate={}", self.rate),
            format!("--port={}", self.port),
        ]
    }
}

/// Serves requests until the process is killed.
///
/// # Errors
/// A socket cannot be opened, for example because the port is in use.
pub fn main(options: &PacedOptions) -> Result<()> {
    let (sender, receiver) = channel();
    let listeners = [
        listen((Ipv4Addr::UNSPECIFIED, options.port).into())?,
        listen((Ipv6Addr::UNSPECIFIED, options.port).into())?,
    ];
    for listener in listeners {
        let (sender, name) = (sender.clone(), options.name.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (sender, name) = (sender.clone(), name.clone());
                // Clients without a request, or with a request for an unknown file, are ignored.
                std::thread::spawn(move || asked(stream, &name, &sender));
            }
        });
    }
    send(options.rate, &receiver);
    Ok(())
}

fn listen(address: SocketAddr) -> Result<TcpListener> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_reuse_address(true)?;
    socket
        .bind(&address.into())
        .with_context(|| format!("cannot listen on {address}"))?;
    socket.listen(4096)?;
    Ok(socket.into())
}

struct Download {
    stream: TcpStream,
    size: usize,
    sent: usize,
    begun: Instant,
    /// Time at which the socket last accepted bytes.
    took: Instant,
}

/// Reads a request. Answers it, or passes a download to the sending thread.
fn asked(stream: TcpStream, name: &str, downloads: &Sender<Download>) -> Option<()> {
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    stream.set_nodelay(true).ok()?;
    let mut lines = BufReader::new(&stream).lines();
    let request = lines.next()?.ok()?;
    while !lines.next()?.ok()?.is_empty() {}
    drop(lines);
    let path = request.strip_prefix("GET ")?.split(' ').next()?;
    let size = path.strip_prefix("/s/").map(str::parse::<usize>);
    let (status, length, body) = match size {
        Some(Ok(size)) if size <= LARGEST => ("200 OK", size, String::new()),
        None if path == "/id" => ("200 OK", name.len() + 1, format!("{name}\n")),
        _ => ("404 Not Found", 0, String::new()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nX-Server: {name}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
    (&stream).write_all(head.as_bytes()).ok()?;
    if body.is_empty() && length > 0 {
        stream.set_nonblocking(true).ok()?;
        let now = Instant::now();
        let download = Download {
            stream,
            size: length,
            sent: 0,
            begun: now,
            took: now,
        };
        downloads.send(download).ok()?;
    }
    Some(())
}

/// Sends the due bytes to all downloads in an endless loop.
fn send(rate: u64, downloads: &Receiver<Download>) {
    let mut bytes = vec![0; LARGEST];
    content::fill(0, &mut bytes);
    let mut moments: Vec<Vec<Download>> = (0..MOMENTS).map(|_| Vec::new()).collect();
    let step = SLICE / u32::try_from(MOMENTS).unwrap_or(1);
    let mut next = Instant::now();
    let mut turn = 0;
    loop {
        for (place, download) in downloads.try_iter().enumerate() {
            moments[(turn + place) % MOMENTS].push(download);
        }
        turn = (turn + 1) % MOMENTS;
        moments[turn].retain_mut(|download| goes_on(download, rate, &bytes));
        next += step;
        // A delayed download catches up: the clock determines the number of due bytes.
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}

/// Sends the due bytes of a download. Returns false if the download is complete or has failed.
fn goes_on(download: &mut Download, rate: u64, bytes: &[u8]) -> bool {
    let due = due(download.begun.elapsed(), rate, download.size);
    while download.sent < due {
        match download.stream.write(&bytes[download.sent..due]) {
            Ok(0) => return false,
            Ok(sent) => {
                download.sent += sent;
                download.took = Instant::now();
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // The send buffer of the socket is full.
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(_) => return false,
        }
    }
    download.sent < download.size && download.took.elapsed() < PATIENCE
}

/// Number of bytes of a download that are due `elapsed` after its start, including those of the
/// next [`SLICE`]; `rate` is in bytes a second.
fn due(elapsed: Duration, rate: u64, size: usize) -> usize {
    let due = (elapsed + SLICE).as_micros() * u128::from(rate) / 1_000_000;
    usize::try_from(due).unwrap_or(usize::MAX).min(size)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn due_bytes_of_paced_download_grow_at_its_rate_up_to_its_size() {
        let slice = due(Duration::ZERO, 100_000, 20_000);
        assert!(slice > 0);
        for tenths in 0..=2 {
            let elapsed = Duration::from_millis(100 * tenths)
                - SLICE.min(Duration::from_millis(100 * tenths));
            let expected = usize::try_from(tenths).unwrap() * 10_000;
            assert_eq!(due(elapsed, 100_000, 20_000), expected.max(slice));
        }
        assert_eq!(due(Duration::MAX / 2, 100_000, 20_000), 20_000);
    }

    #[test]
    fn paced_download_contains_all_bytes_and_names_server() {
        let (sender, receiver) = channel();
        let listener = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            asked(stream, "rs1", &sender).unwrap();
            std::thread::park();
        });
        std::thread::spawn(move || send(100_000, &receiver));
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(b"GET /s/20000 HTTP/1.1\r\n\r\n").unwrap();
        let (mut all, mut part) = (Vec::new(), [0; 65536]);
        loop {
            let read = stream.read(&mut part).unwrap();
            if read == 0 {
                break;
            }
            all.extend_from_slice(&part[..read]);
        }
        let body = all.split_off(all.len() - 20_000);
        let mut expected = vec![0; 20_000];
        content::fill(0, &mut expected);
        assert_eq!(body, expected);
        let head = String::from_utf8(all).unwrap();
        assert!(head.contains("X-Server: rs1\r\n") && head.ends_with("\r\n\r\n"));
    }
}
