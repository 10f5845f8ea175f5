//! The endpoints of measurements, as commands of this program. Implements both endpoints of TCP
//! round trips of one byte, and of downloads of which every byte is compared.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use clap::Subcommand;

use crate::load::large;
use crate::transfers::{UPLOAD, connect};
use crate::{classic, files, transfers, unpack};

/// Task of an endpoint.
#[derive(Debug, Subcommand)]
pub enum Endpoint {
    /// Echo bytes, send downloads, and receive uploads
    Serve {
        /// Port to listen on
        port: u16,
    },
    /// Measure round trips of one byte over one connection; print each in microseconds
    Ping {
        /// Address of the server
        target: SocketAddr,
        /// Number of round trips, after a hundred that do not count
        times: usize,
    },
    /// Download, and compare each byte
    Fetch {
        /// Address of the server
        target: SocketAddr,
        /// Number of bytes
        bytes: u64,
    },
    /// Unpack packets from IPIP tunnels
    Unpack {
        /// Interface on which the packets arrive
        device: String,
    },
    /// Serve files, with a maximum rate for each server
    Files(files::Serve),
    /// Run clients that request files in a loop; print the results
    Ask(files::Ask),
    /// Download and upload by size; print the durations
    Transfers(transfers::Transfers),
    /// Serve old Unix services behind one address
    Classic(classic::Serve),
    /// Use the old Unix services as a client; print which of them work, and their rates
    Use(classic::Use),
    /// Run one endpoint of `load bulk` and `load listing`
    Large {
        /// The task of this endpoint
        #[command(subcommand)]
        end: large::End,
    },
}

impl Endpoint {
    /// Runs the endpoint.
    ///
    /// # Errors
    ///
    /// A socket cannot be opened, the other endpoint cannot be reached, or it violates the
    /// protocol.
    pub fn run(&self) -> Result<()> {
        match self {
            Self::Serve { port } => serve(*port),
            Self::Ping { target, times } => ping(*target, *times),
            Self::Fetch { target, bytes } => fetch(*target, *bytes),
            Self::Unpack { device } => unpack::run(device),
            Self::Files(serve) => serve.run(),
            Self::Ask(ask) => ask.run(),
            Self::Transfers(transfers) => transfers.run(),
            Self::Classic(serve) => serve.run(),
            Self::Use(client) => client.run(),
            Self::Large { end } => end.run(),
        }
    }
}

/// The byte at this place of a download. Its periods (251 bytes, and 241 blocks of 64 KiB) are
/// primes, so that swapped segments are noticed.
fn byte_at(place: u64) -> u8 {
    u8::try_from(place % 251).unwrap_or(0) ^ u8::try_from((place >> 16) % 241).unwrap_or(0)
}

/// Serves connections. The first byte selects the service. After `f`, eight bytes with the length
/// request a download. After `u`, each upload consists of eight bytes with the length and of the
/// data, and is answered by one byte. After any other byte, every byte is returned.
fn serve(port: u16) -> Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", port))?;
    for stream in listener.incoming() {
        let stream = stream?;
        thread::spawn(move || {
            // A client that closes its connection is not an error.
            let _ = serve_one(stream);
        });
    }
    Ok(())
}

fn serve_one(mut stream: TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut byte = [0];
    stream.read_exact(&mut byte)?;
    if byte[0] == UPLOAD {
        return take_uploads(stream);
    }
    if byte[0] != b'f' {
        loop {
            stream.write_all(&byte)?;
            stream.read_exact(&mut byte)?;
        }
    }
    let mut length = [0; 8];
    stream.read_exact(&mut length)?;
    let length = u64::from_be_bytes(length);
    let mut place = 0;
    while place < length {
        let end = length.min(place + 65_536);
        let block: Vec<u8> = (place..end).map(byte_at).collect();
        stream.write_all(&block)?;
        place = end;
    }
    Ok(())
}

fn take_uploads(mut stream: TcpStream) -> Result<()> {
    let mut buffer = vec![0; 256 << 10];
    let mut length = [0; 8];
    loop {
        stream.read_exact(&mut length)?;
        let mut left = u64::from_be_bytes(length);
        while left > 0 {
            let most = usize::try_from(left)
                .unwrap_or(usize::MAX)
                .min(buffer.len());
            let count = stream.read(&mut buffer[..most])?;
            ensure!(count > 0, "the upload ended early");
            left -= count as u64;
        }
        stream.write_all(b".")?;
    }
}

fn ping(target: SocketAddr, times: usize) -> Result<()> {
    const WARM_UP: usize = 100;
    ensure!(times > 0, "the number of round trips must be above 0");
    let mut stream = connect(target)?;
    let mut trips = Vec::with_capacity(times);
    let mut byte = [b'p'];
    for number in 0..WARM_UP + times {
        let start = Instant::now();
        stream.write_all(&byte)?;
        stream.read_exact(&mut byte)?;
        if number >= WARM_UP {
            trips.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    println!("{}", serde_json::json!(trips));
    Ok(())
}

fn fetch(target: SocketAddr, bytes: u64) -> Result<()> {
    let mut stream = connect(target)?;
    stream.write_all(b"f")?;
    stream.write_all(&bytes.to_be_bytes())?;
    let mut buffer = vec![0; 1 << 16];
    let mut place = 0;
    while place < bytes {
        let count = stream.read(&mut buffer)?;
        if count == 0 {
            bail!("the download ended after {place} of {bytes} bytes");
        }
        for (at, byte) in (place..).zip(&buffer[..count]) {
            ensure!(*byte == byte_at(at), "byte {at} is wrong");
        }
        place += count as u64;
    }
    Ok(())
}
