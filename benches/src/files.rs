//! Files of any size, over HTTP: servers of a set capacity, and clients that request them in a
//! loop.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// Number of files in a set. Each is larger than the previous one by the same factor.
const FILES: u32 = 16;
/// First source address of clients that use several addresses.
const SOURCES: Ipv4Addr = Ipv4Addr::new(10, 128, 0, 0);
/// Bytes that a server sends at a time.
const CHUNK: u64 = 16 << 10;
/// A server that has sent less than its maximum rate can catch up on at most this time.
const LATE: Duration = Duration::from_millis(20);
/// Minimum pause of a client after a failed request, and pause of a server after a failed accept.
const PAUSE: Duration = Duration::from_millis(50);
/// Width in seconds of the bins in which results are counted.
pub(crate) const BIN: f64 = 0.25;

/// Serves `GET /SIZE` with a file of SIZE bytes.
#[derive(Clone, Debug, Args)]
pub struct Serve {
    /// Addresses to listen on, with the maximum of bytes a second that each server's connections
    /// share
    #[arg(value_name = "ADDRESS:PORT=BYTES", value_parser = listener, required = true)]
    listeners: Vec<(SocketAddr, u64)>,
}

fn listener(text: &str) -> Result<(SocketAddr, u64), String> {
    let parts = text.split_once('=').and_then(|(address, bytes)| {
        let bytes = bytes.parse().ok().filter(|bytes| *bytes > 0)?;
        Some((address.parse().ok()?, bytes))
    });
    parts.ok_or_else(|| format!("{text} is not ADDRESS:PORT=BYTES"))
}

/// Requests files in a loop.
#[derive(Clone, Debug, Args)]
pub struct Ask {
    /// Services from which the same files are requested at the same time
    #[arg(required = true)]
    targets: Vec<SocketAddr>,
    /// Number of clients of each service
    #[arg(long, default_value_t = 4)]
    clients: u64,
    /// Size of the smallest file in bytes
    #[arg(long)]
    least: u64,
    /// Size of the largest file in bytes
    #[arg(long)]
    most: u64,
    /// Seed of the choice and order of files
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Duration in milliseconds
    #[arg(long = "for", value_name = "MS")]
    for_ms: u64,
    /// Milliseconds after which a request counts as failed
    #[arg(long, value_name = "MS", default_value_t = 60_000)]
    timeout: u64,
    /// Pause of a client after each request, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pause: u64,
    /// Number of source addresses, of which each request uses a random one; 0: the address of the
    /// host
    #[arg(long, default_value_t = 0)]
    sources: u8,
}

/// Results of one service's clients.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Asked {
    /// Received bytes in each quarter of a second.
    pub(crate) bytes: Vec<u64>,
    /// Number of completely answered requests in each quarter of a second.
    pub(crate) served: Vec<u64>,
    /// Number of requests that were not completely answered, in each quarter of a second.
    pub(crate) failed: Vec<u64>,
    /// Duration of each answered request in milliseconds.
    pub(crate) took: Vec<f64>,
    /// The first failure; `None` if no request failed.
    pub(crate) error: Option<String>,
}

impl Asked {
    fn new(bins: usize) -> Self {
        Self {
            bytes: vec![0; bins],
            served: vec![0; bins],
            failed: vec![0; bins],
            ..Self::default()
        }
    }
}

/// A pseudo-random number generator: splitmix64 (Steele, Lea, Flood, 2014).
#[derive(Debug)]
struct Lots(u64);

impl Lots {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }
}

/// The sizes of the files in a set, in bytes.
fn sizes(least: u64, most: u64) -> Vec<u64> {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let (low, high) = (least as f64, most as f64);
    let size = |number: u32| {
        let share = f64::from(number) / f64::from(FILES - 1);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between two sizes"
        )]
        let size = (low * (high / low).powf(share)).round() as u64;
        size
    };
    (0..FILES).map(size).collect()
}

impl Serve {
    /// Serves until the process is killed.
    ///
    /// # Errors
    ///
    /// If an address cannot be used.
    pub fn run(&self) -> Result<()> {
        runtime()?.block_on(async {
            let mut tasks = JoinSet::new();
            for (address, bytes) in &self.listeners {
                let listener = TcpListener::bind(address).await;
                let listener = listener.with_context(|| format!("cannot listen at {address}"))?;
                tasks.spawn(accept(listener, *bytes));
            }
            println!("ready");
            match tasks.join_next().await {
                Some(Ok(Err(error))) => Err(error.into()),
                _ => bail!("a listener has exited"),
            }
        })
    }
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    Ok(builder.enable_all().build()?)
}

/// Limits the rate of a server.
#[derive(Debug)]
struct Capacity {
    bytes_a_second: u64,
    /// The time at which all promised bytes will have been sent.
    free: Mutex<Instant>,
}

impl Capacity {
    /// Waits until `bytes` may be sent.
    async fn take(&self, bytes: u64) {
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
        let time = Duration::from_secs_f64(bytes as f64 / self.bytes_a_second as f64);
        let until = {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            *free = (*free).max(now.checked_sub(LATE).unwrap_or(now)) + time;
            *free
        };
        sleep_until(until).await;
    }
}

async fn accept(listener: TcpListener, bytes_a_second: u64) -> io::Result<Infallible> {
    let capacity = Arc::new(Capacity {
        bytes_a_second,
        free: Mutex::new(Instant::now()),
    });
    loop {
        // A client that closes its connection is not an error.
        let Ok((stream, _)) = listener.accept().await else {
            sleep(PAUSE).await;
            continue;
        };
        let capacity = capacity.clone();
        tokio::spawn(async move { serve(stream, &capacity).await });
    }
}

async fn serve(mut stream: TcpStream, capacity: &Capacity) -> Result<()> {
    let mut head = Vec::new();
    let mut part = [0; 1024];
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        let count = stream.read(&mut part).await?;
        ensure!(
            count > 0 && head.len() < 8192,
            "the client has sent no complete request"
        );
        head.extend_from_slice(&part[..count]);
    }
    let head = String::from_utf8_lossy(&head);
    let size = head
        .strip_prefix("GET /")
        .and_then(|rest| rest.split(' ').next());
    let size: u64 = size.and_then(|size| size.parse().ok()).unwrap_or(1);
    let answer = format!("HTTP/1.0 200 OK\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n");
    stream.write_all(answer.as_bytes()).await?;
    let block = vec![b'x'; usize::try_from(CHUNK)?];
    let mut left = size;
    while left > 0 {
        let count = left.min(CHUNK);
        capacity.take(count).await;
        stream.write_all(&block[..usize::try_from(count)?]).await?;
        left -= count;
    }
    stream.shutdown().await?;
    Ok(())
}

impl Ask {
    /// Requests files, and prints the results.
    ///
    /// # Errors
    ///
    /// If the sizes or the duration are invalid. Failed requests are counted.
    pub fn run(&self) -> Result<()> {
        ensure!(
            0 < self.least && self.least <= self.most && self.for_ms > 0,
            "invalid sizes or duration: use 0 < --least <= --most, and --for above 0"
        );
        let results = runtime()?.block_on(self.ask())?;
        println!("{}", serde_json::to_string(&results)?);
        Ok(())
    }

    async fn ask(&self) -> Result<Vec<Asked>> {
        let time = Duration::from_millis(self.for_ms);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a few hundred"
        )]
        let bins = (time.as_secs_f64() / BIN).ceil() as usize;
        let empty = || Arc::new(Mutex::new(Asked::new(bins)));
        let all: Vec<_> = self.targets.iter().map(|_| empty()).collect();
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for (target, asked) in self.targets.iter().zip(&all) {
            for client in 0..self.clients {
                // Each target has the same number of clients.
                let client = Client {
                    target: *target,
                    start,
                    limit: Duration::from_millis(self.timeout),
                    sizes: sizes(self.least, self.most),
                    sources: self.sources,
                    pause: Duration::from_millis(self.pause),
                    lots: Lots(self.seed.wrapping_mul(1_000_003).wrapping_add(client)),
                    asked: asked.clone(),
                };
                tasks.spawn(client.run());
            }
        }
        sleep_until(start + time).await;
        tasks.shutdown().await;
        let take = |asked: Arc<Mutex<Asked>>| {
            let mut asked = asked.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *asked)
        };
        Ok(all.into_iter().map(take).collect())
    }
}

struct Client {
    target: SocketAddr,
    start: Instant,
    limit: Duration,
    sizes: Vec<u64>,
    sources: u8,
    pause: Duration,
    lots: Lots,
    asked: Arc<Mutex<Asked>>,
}

impl Client {
    async fn run(mut self) {
        loop {
            let size = self.lots.below(self.sizes.len() as u64);
            let size = usize::try_from(size)
                .ok()
                .and_then(|n| self.sizes.get(n).copied());
            let source = self.lots.below(u64::from(self.sources));
            let (Some(size), Ok(source)) = (size, u8::try_from(source)) else {
                return;
            };
            let begin = Instant::now();
            let result = match timeout(self.limit, self.fetch(size, source)).await {
                Ok(result) => result.map_err(|error| format!("{error:#}")),
                Err(_) => Err("no complete answer within the time limit".to_owned()),
            };
            let is_bad = result.is_err();
            self.count(|asked, bin| match result {
                Ok(()) => {
                    asked.served[bin] += 1;
                    asked.took.push(begin.elapsed().as_secs_f64() * 1e3);
                }
                Err(error) => {
                    asked.failed[bin] += 1;
                    asked.error.get_or_insert(error);
                }
            });
            let pause = self.pause.max(if is_bad { PAUSE } else { Duration::ZERO });
            if !pause.is_zero() {
                sleep(pause).await;
            }
        }
    }

    /// Changes the results by `add`, which receives the number of the present bin. Has no effect
    /// after the end of the measurement.
    fn count(&self, add: impl FnOnce(&mut Asked, usize)) {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a few hundred"
        )]
        let bin = (self.start.elapsed().as_secs_f64() / BIN) as usize;
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if bin < asked.bytes.len() {
            add(&mut asked, bin);
        }
    }

    async fn fetch(&self, size: u64, source: u8) -> Result<()> {
        let socket = TcpSocket::new_v4()?;
        if self.sources > 0 {
            let [a, b, c, _] = SOURCES.octets();
            let from = Ipv4Addr::new(a, b, c, source.wrapping_add(1));
            socket.bind((IpAddr::from(from), 0).into())?;
        }
        let mut stream = socket
            .connect(self.target)
            .await
            .context("cannot connect to the server")?;
        let request = format!("GET /{size} HTTP/1.0\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut buffer = vec![0; 64 << 10];
        let (mut got, mut head) = (0_u64, Some(Vec::new()));
        loop {
            let count = stream.read(&mut buffer).await?;
            if count == 0 {
                break;
            }
            self.count(|asked, bin| asked.bytes[bin] += count as u64);
            got += count as u64;
            if let Some(seen) = &mut head {
                seen.extend_from_slice(&buffer[..count]);
                if let Some(end) = seen.windows(4).position(|end| end == b"\r\n\r\n") {
                    got = (seen.len() - end - 4) as u64;
                    head = None;
                }
                ensure!(seen_is_short(head.as_ref()), "the answer is not valid HTTP");
            }
        }
        ensure!(
            head.is_none() && got == size,
            "the answer is incomplete or too long: {got} bytes instead of {size}"
        );
        Ok(())
    }
}

fn seen_is_short(head: Option<&Vec<u8>>) -> bool {
    head.is_none_or(|head| head.len() < 8192)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_set_has_16_sizes_from_smallest_to_largest() {
        let sizes = sizes(76_000, 1_800_000);
        assert_eq!(sizes.len(), 16);
        assert_eq!((sizes[0], sizes[15]), (76_000, 1_800_000));
        assert!(sizes.is_sorted());
    }

    #[test]
    fn file_client_seed_reproduces_requests() {
        let draw = |seed| {
            let mut lots = Lots(seed);
            (0..32).map(|_| lots.below(16)).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        assert!(draw(7).iter().all(|lot| *lot < 16));
    }

    #[test]
    fn file_server_exceeds_its_capacity_by_less_than_an_eighth() {
        let asked = runtime()
            .expect("the runtime can be started")
            .block_on(async {
                let listener = TcpListener::bind("127.0.0.1:0")
                    .await
                    .expect("the socket can be opened");
                let target = listener.local_addr().expect("the socket has an address");
                tokio::spawn(accept(listener, 400_000));
                let ask = Ask {
                    targets: vec![target],
                    clients: 2,
                    least: 10_000,
                    most: 20_000,
                    seed: 1,
                    for_ms: 1000,
                    timeout: 60_000,
                    pause: 0,
                    sources: 0,
                };
                ask.ask().await.expect("the clients can be started")
            });
        let bytes: u64 = asked[0].bytes.iter().sum();
        assert!(0 < bytes && bytes < 450_000, "{bytes}");
        assert_eq!(
            asked[0].failed.iter().sum::<u64>(),
            0,
            "{:?}",
            asked[0].error
        );
        assert_eq!(
            asked[0].served.iter().sum::<u64>(),
            asked[0].took.len() as u64
        );
    }
}
