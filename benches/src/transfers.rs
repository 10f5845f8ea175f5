//! Measures the time of transfers by the size of the file: downloads by HTTP over a new or a
//! persistent connection, and uploads.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};

/// First byte of a connection for uploads.
pub(super) const UPLOAD: u8 = b'u';

/// Servers and sizes of the transfers.
#[derive(Clone, Debug, Args)]
pub struct Transfers {
    /// A web server that has files named by their size
    web: SocketAddr,
    /// Address of a server for uploads (`endpoint serve`)
    uploads: SocketAddr,
    /// Sizes in bytes
    #[arg(long, value_delimiter = ',', required = true)]
    sizes: Vec<u64>,
    /// Duration of each measurement in milliseconds; at least one file is transferred
    #[arg(long = "for", value_name = "MS")]
    for_ms: u64,
}

/// Mean number of microseconds for a file of one size.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Took {
    pub(crate) bytes: u64,
    /// Downloads, each over a new connection.
    pub(crate) new: f64,
    /// Downloads over a persistent connection.
    pub(crate) keep: f64,
    /// Uploads over a persistent connection.
    pub(crate) up: f64,
}

impl Transfers {
    /// Transfers the files, and prints the durations.
    ///
    /// # Errors
    ///
    /// If a transfer fails.
    pub fn run(&self) -> Result<()> {
        let mut all = Vec::new();
        for bytes in &self.sizes {
            let bytes = *bytes;
            let new = self.mean(|| download(&mut connect(self.web)?, bytes, true))?;
            let mut stays = connect(self.web)?;
            let keep = self.mean(|| download(&mut stays, bytes, false))?;
            drop(stays);
            let mut uploads = connect(self.uploads)?;
            uploads.write_all(&[UPLOAD])?;
            let up = self.mean(|| upload(&mut uploads, bytes))?;
            all.push(Took {
                bytes,
                new,
                keep,
                up,
            });
        }
        println!("{}", serde_json::to_string(&all)?);
        Ok(())
    }

    /// Returns the mean duration of a transfer in microseconds. The first transfer does not count.
    fn mean(&self, mut one: impl FnMut() -> Result<()>) -> Result<f64> {
        let limit = Duration::from_millis(self.for_ms);
        one()?;
        let (start, mut count) = (Instant::now(), 0_u32);
        while count == 0 || start.elapsed() < limit {
            one()?;
            count += 1;
        }
        Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(count))
    }
}

/// Connects to `target`, with a time limit of five seconds for each read and write.
pub(super) fn connect(target: SocketAddr) -> Result<TcpStream> {
    let limit = Duration::from_secs(5);
    let stream = TcpStream::connect_timeout(&target, limit)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    Ok(stream)
}

fn download(stream: &mut TcpStream, bytes: u64, close: bool) -> Result<()> {
    let connection = if close { "close" } else { "keep-alive" };
    let request =
        format!("GET /{bytes} HTTP/1.1\r\nHost: bench\r\nConnection: {connection}\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut buffer = vec![0; 256 << 10];
    let (head, came) = answer(stream, &mut buffer)?;
    let text = String::from_utf8_lossy(&buffer[..head]);
    ensure!(
        text.starts_with("HTTP/1.1 200"),
        "the server answered: {text}"
    );
    let mut got = (came - head) as u64;
    while got < bytes {
        let count = stream.read(&mut buffer)?;
        ensure!(count > 0, "the answer ended after {got} of {bytes} bytes");
        got += count as u64;
    }
    ensure!(got == bytes, "{got} bytes arrived instead of {bytes}");
    Ok(())
}

/// Returns the position of the end of an answer's header, and the number of bytes received so far.
fn answer(stream: &mut TcpStream, buffer: &mut [u8]) -> Result<(usize, usize)> {
    let mut filled = 0;
    loop {
        let count = stream.read(&mut buffer[filled..])?;
        if count == 0 {
            bail!("the server has closed the connection before it answered");
        }
        filled += count;
        let end = buffer[..filled]
            .windows(4)
            .position(|end| end == b"\r\n\r\n");
        if let Some(end) = end {
            return Ok((end + 4, filled));
        }
    }
}

fn upload(stream: &mut TcpStream, bytes: u64) -> Result<()> {
    stream.write_all(&bytes.to_be_bytes())?;
    let block = vec![b'x'; 256 << 10];
    let mut left = bytes;
    while left > 0 {
        let count = left.min(block.len() as u64);
        stream.write_all(&block[..usize::try_from(count)?])?;
        left -= count;
    }
    let mut done = [0];
    stream
        .read_exact(&mut done)
        .context("the server did not acknowledge the upload")
}
