//! `lvs-testbed load`: an HTTP client that compares every byte. [`Host::load`] runs it on a host.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

use crate::content;
use crate::netns::{Host, Proc, wait_until};

/// Options of the HTTP client.
#[derive(Clone, Debug, clap::Args)]
pub struct LoadOptions {
    /// The server's address and port
    pub target: SocketAddr,
    /// Number of requests; 0 for no end (until --for, or the end of the input)
    #[arg(long, default_value_t = 1000)]
    pub requests: u64,
    /// Number of simultaneous requests
    #[arg(long, default_value_t = 8)]
    pub concurrency: u64,
    /// Body sizes that are requested in turn, each as the file /s/SIZE; default: 1 byte to 10 MiB
    #[arg(long, value_delimiter = ',')]
    pub sizes: Vec<u64>,
    /// Send many requests over one connection
    #[arg(long)]
    pub keepalive: bool,
    /// Stop after this many milliseconds
    #[arg(long = "for", value_name = "MS")]
    pub for_ms: Option<u64>,
    /// Pause of each client between two requests, in milliseconds
    #[arg(long, default_value_t = 0)]
    pub pause_ms: u64,
    /// Milliseconds after which an unanswered request counts as failed
    #[arg(long, default_value_t = 60_000)]
    pub timeout_ms: u64,
    /// Local port of the first connection; each further connection uses the next port. 0: the
    /// kernel chooses the ports
    #[arg(long, default_value_t = 0)]
    pub first_port: u16,
    /// Interval of the progress reports (a line of JSON), in milliseconds; 0: no reports
    #[arg(long, default_value_t = 0)]
    pub progress_ms: u64,
    /// Stop when standard input ends
    #[arg(long)]
    pub until_eof: bool,
    /// Use real-time scheduling, so that a pause is a delay of the network and not a wait for a
    /// processor.
    #[arg(skip)]
    pub real_time: bool,
}

impl LoadOptions {
    /// Options of a thousand requests of all sizes, eight at a time, each over a new connection.
    #[must_use]
    pub fn new(target: SocketAddr) -> Self {
        Self {
            target,
            requests: 1000,
            concurrency: 8,
            sizes: Vec::new(),
            keepalive: false,
            for_ms: None,
            pause_ms: 0,
            timeout_ms: 60_000,
            first_port: 0,
            progress_ms: 0,
            until_eof: false,
            real_time: false,
        }
    }

    pub(crate) fn arguments(&self) -> Vec<String> {
        let mut arguments = vec!["load".to_owned(), self.target.to_string()];
        let mut option = |name: &str, value: u64| arguments.push(format!("--{name}={value}"));
        option("requests", self.requests);
        option("concurrency", self.concurrency);
        option("pause-ms", self.pause_ms);
        option("timeout-ms", self.timeout_ms);
        option("first-port", self.first_port.into());
        option("progress-ms", self.progress_ms);
        if let Some(limit) = self.for_ms {
            option("for", limit);
        }
        if !self.sizes.is_empty() {
            let sizes: Vec<String> = self.sizes.iter().map(u64::to_string).collect();
            arguments.push(format!("--sizes={}", sizes.join(",")));
        }
        if self.keepalive {
            arguments.push("--keepalive".to_owned());
        }
        if self.until_eof {
            arguments.push("--until-eof".to_owned());
        }
        arguments
    }
}

/// Results of a run of the HTTP client.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// Number of complete answers with correct bytes.
    pub ok: u64,
    /// Number of requests without a complete or correct answer.
    pub failed: u64,
    /// Bytes in the bodies of successful answers.
    pub bytes: u64,
    /// Duration of the load in seconds.
    pub seconds: f64,
    /// Longest pause within the body of a successful answer in milliseconds.
    #[serde(default)]
    pub stall_ms: u64,
    /// 99th percentile of the longest pauses of each successful answer in milliseconds.
    #[serde(default)]
    pub stall_p99_ms: u64,
    /// For each second since the start, the longest pause that ended in it, in milliseconds.
    #[serde(default)]
    pub stalls_by_second: Vec<u64>,
    /// Number of successful requests by server.
    pub servers: BTreeMap<String, u64>,
    /// Up to twenty errors, each with its time in seconds.
    pub errors: Vec<String>,
    /// Number of successful answers by their longest pause in milliseconds.
    #[serde(skip)]
    stalls: BTreeMap<u64, u64>,
}

impl LoadReport {
    /// Rate of body bytes in Mbit/s.
    #[must_use]
    pub fn mbits(&self) -> f64 {
        #[expect(
            clippy::cast_precision_loss,
            reason = "a rate for display needs no exact value"
        )]
        let bits = self.bytes as f64 * 8.0;
        bits / self.seconds.max(1e-9) / 1e6
    }

    /// Checks that all requests were answered correctly.
    ///
    /// # Errors
    /// If a request failed; the error describes it.
    pub fn all_ok(&self, requests: u64) -> Result<()> {
        ensure!(
            self.failed == 0 && self.ok == requests,
            "of {requests} requests {} succeeded and {} failed: {:#?}",
            self.ok,
            self.failed,
            self.errors
        );
        Ok(())
    }
}

impl Host {
    /// Runs the requests from this host. If the number of requests is limited, each request uses
    /// another local port: the kernel would soon reuse a port for which the director still has a
    /// connection.
    ///
    /// # Errors
    ///
    /// The client program cannot run, or prints no valid report. Failed requests are in the report.
    pub fn load(&self, options: &LoadOptions) -> Result<LoadReport> {
        let mut options = options.clone();
        if options.first_port == 0 && options.requests != 0 {
            options.first_port = self.take_ports(options.requests);
        }
        let (program, arguments) =
            crate::programs::own_with(options.arguments(), options.real_time)?;
        let printed = self.run(program, &arguments)?;
        serde_json::from_str(&printed)
            .with_context(|| format!("the load client printed no valid report: {printed}"))
    }

    /// Starts requests that continue until [`SteadyLoad::finish`].
    ///
    /// # Errors
    ///
    /// The client program cannot be started.
    pub fn steady_load(&self, options: &LoadOptions) -> Result<SteadyLoad> {
        let options = LoadOptions {
            until_eof: true,
            requests: 0,
            progress_ms: match options.progress_ms {
                0 => PROGRESS_MS,
                asked => asked,
            },
            ..options.clone()
        };
        let (program, arguments) =
            crate::programs::own_with(options.arguments(), options.real_time)?;
        Ok(SteadyLoad(self.spawn(program, &arguments)?))
    }
}

/// Default interval of progress reports of steady requests in milliseconds.
const PROGRESS_MS: u64 = 100;

/// Time limit for further answers, and for the exit of the client program.
const PATIENCE: Duration = Duration::from_secs(60);

/// Requests that continue until [`finish`](Self::finish).
#[derive(Debug)]
pub struct SteadyLoad(Proc);

impl SteadyLoad {
    /// Numbers of correct and of failed requests so far.
    #[must_use]
    pub fn so_far(&self) -> (u64, u64) {
        let log = self.0.log();
        let last = log.lines().rev().find_map(|line| {
            let counts: serde_json::Value = serde_json::from_str(line).ok()?;
            Some((counts["ok"].as_u64()?, counts["failed"].as_u64()?))
        });
        last.unwrap_or_default()
    }

    /// Waits until `answers` more requests are answered correctly.
    ///
    /// # Errors
    ///
    /// The time limit has passed.
    pub fn wait_for_more(&self, answers: u64) -> Result<()> {
        let wanted = self.so_far().0 + answers;
        wait_until(
            &format!("{wanted} requests to be answered correctly"),
            PATIENCE,
            || self.so_far().0 >= wanted,
        )
        .with_context(|| format!("(answered correctly, failed): {:?}", self.so_far()))
    }

    /// Stops the requests, and returns the report.
    ///
    /// # Errors
    ///
    /// The client program failed, did not exit in time, or printed no valid report.
    pub fn finish(mut self) -> Result<LoadReport> {
        let status = self.0.wait(PATIENCE)?;
        let printed = self.0.log();
        ensure!(
            status.success(),
            "the load client failed: {status}: {printed}"
        );
        serde_json::from_str(printed.lines().last().unwrap_or_default())
            .with_context(|| format!("the load client printed no valid report: {printed}"))
    }

    /// As [`finish`](Self::finish); all requests must have been answered correctly.
    ///
    /// # Errors
    ///
    /// As [`finish`](Self::finish), or if a request failed.
    pub fn finish_ok(self) -> Result<LoadReport> {
        let report = self.finish()?;
        report.all_ok(report.ok)?;
        Ok(report)
    }
}

/// Runs `lvs-testbed load`, and prints the report as one line of JSON.
///
/// # Errors
///
/// The report cannot be printed.
pub fn main(options: LoadOptions) -> Result<()> {
    let report = run(options);
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

/// Runs the requests in this network namespace.
#[must_use]
pub fn run(mut options: LoadOptions) -> LoadReport {
    if options.sizes.is_empty() {
        options.sizes = content::SIZES.to_vec();
    }
    let largest = options.sizes.iter().copied().max().unwrap_or(0);
    let mut expected = vec![0; usize::try_from(largest).unwrap_or(usize::MAX)];
    content::fill(0, &mut expected);

    let stop = Arc::new(AtomicBool::new(false));
    if options.until_eof {
        let stop = Arc::clone(&stop);
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            stop.store(true, Ordering::Relaxed);
        });
    }
    let start = Instant::now();
    let next = AtomicU64::new(0);
    let report = Mutex::new(LoadReport::default());
    let progress = Progress::default();
    let clients = AtomicU64::new(options.concurrency.max(1));
    std::thread::scope(|scope| {
        if options.progress_ms > 0 {
            scope.spawn(|| {
                while clients.load(Ordering::Relaxed) > 0 {
                    progress.print();
                    std::thread::sleep(Duration::from_millis(options.progress_ms));
                }
            });
        }
        for _ in 0..options.concurrency.max(1) {
            scope.spawn(|| {
                let own = client(&options, &expected, (&next, &progress), &stop, start);
                clients.fetch_sub(1, Ordering::Relaxed);
                if let Ok(mut report) = report.lock() {
                    report.add(own);
                }
            });
        }
    });
    let mut report = report.into_inner().unwrap_or_default();
    report.count_stalls();
    report.seconds = start.elapsed().as_secs_f64();
    report
}

impl LoadReport {
    fn add(&mut self, other: Self) {
        self.ok += other.ok;
        self.failed += other.failed;
        self.bytes += other.bytes;
        for (stall, count) in other.stalls {
            *self.stalls.entry(stall).or_default() += count;
        }
        for (second, stall) in other.stalls_by_second.into_iter().enumerate() {
            self.stalled(second, stall);
        }
        for (server, count) in other.servers {
            *self.servers.entry(server).or_default() += count;
        }
        self.errors.extend(other.errors);
        self.errors.truncate(20);
    }

    fn stalled(&mut self, second: usize, stall: u64) {
        if self.stalls_by_second.len() <= second {
            self.stalls_by_second.resize(second + 1, 0);
        }
        let longest = &mut self.stalls_by_second[second];
        *longest = stall.max(*longest);
    }

    fn count_stalls(&mut self) {
        self.stall_ms = self.stalls.keys().last().copied().unwrap_or(0);
        // The 99th percentile: of 100 pauses, the second longest.
        let mut above = self.ok / 100;
        for (stall, count) in self.stalls.iter().rev() {
            if *count > above {
                self.stall_p99_ms = *stall;
                break;
            }
            above -= count;
        }
    }
}

fn client(
    options: &LoadOptions,
    expected: &[u8],
    (next, progress): (&AtomicU64, &Progress),
    stop: &AtomicBool,
    start: Instant,
) -> LoadReport {
    let mut report = LoadReport::default();
    let mut connection = None;
    let mut buffer = vec![0; 256 << 10];
    loop {
        let late = options
            .for_ms
            .is_some_and(|limit| start.elapsed() >= Duration::from_millis(limit));
        if late || stop.load(Ordering::Relaxed) {
            return report;
        }
        let index = next.fetch_add(1, Ordering::Relaxed);
        if options.requests != 0 && index >= options.requests {
            return report;
        }
        let which = usize::try_from(index % options.sizes.len() as u64).unwrap_or(0);
        let size = usize::try_from(options.sizes[which]).unwrap_or(usize::MAX);
        let port = match options.first_port {
            0 => 0,
            first => first.wrapping_add(u16::try_from(index % 0x1_0000).unwrap_or(0)),
        };
        Progress::count(&progress.begun, 1);
        let answer = request(
            options,
            port,
            &mut connection,
            &expected[..size],
            (&mut buffer, progress),
            start,
        );
        match &answer {
            Ok(_) => Progress::count(&progress.ok, 1),
            Err(_) => Progress::count(&progress.failed, 1),
        }
        match answer {
            Ok((server, pauses)) => {
                let mut stall = 0;
                for (since, ended) in pauses {
                    let pause = u64::try_from((ended - since).as_millis()).unwrap_or(u64::MAX);
                    let second = (ended - start).as_secs();
                    report.stalled(usize::try_from(second).unwrap_or(usize::MAX), pause);
                    stall = stall.max(pause);
                }
                *report.stalls.entry(stall).or_default() += 1;
                report.ok += 1;
                report.bytes += size as u64;
                *report.servers.entry(server).or_default() += 1;
            }
            Err(error) => {
                connection = None;
                report.failed += 1;
                if report.errors.len() < 20 {
                    let at = start.elapsed().as_secs_f64();
                    report.errors.push(format!(
                        "{at:.3} s: request {index} of {size} bytes: {error:#}"
                    ));
                }
            }
        }
        if options.pause_ms > 0 {
            std::thread::sleep(Duration::from_millis(options.pause_ms));
        }
    }
}

#[derive(Debug, Default)]
struct Progress {
    begun: AtomicU64,
    ok: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
}

impl Progress {
    fn count(counter: &AtomicU64, more: u64) {
        counter.fetch_add(more, Ordering::Relaxed);
    }

    fn print(&self) {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (ok, failed) = (read(&self.ok), read(&self.failed));
        let under_way = read(&self.begun).saturating_sub(ok + failed);
        let bytes = read(&self.bytes);
        println!(r#"{{"under_way":{under_way},"ok":{ok},"failed":{failed},"bytes":{bytes}}}"#);
    }
}

/// Offset of the first wrong byte of an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WrongByte(usize);

impl fmt::Display for WrongByte {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {} is wrong", self.0)
    }
}

impl std::error::Error for WrongByte {}

/// Requests one file over a new connection, and compares every byte. Returns the name of the
/// server.
pub(crate) fn fetch(options: &LoadOptions, expected: &[u8]) -> Result<String> {
    let mut buffer = vec![0; 64 << 10];
    let buffer = (&mut buffer[..], &Progress::default());
    request(options, 0, &mut None, expected, buffer, Instant::now()).map(|(server, _)| server)
}

fn connect(options: &LoadOptions, port: u16, timeout: Duration) -> Result<TcpStream> {
    let stream = if port == 0 {
        TcpStream::connect_timeout(&options.target, timeout)?
    } else {
        let any: SocketAddr = match options.target {
            SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, port).into(),
            SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, port).into(),
        };
        let socket = Socket::new(Domain::for_address(any), Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket
            .bind(&any.into())
            .with_context(|| format!("cannot bind local port {port}"))?;
        socket.connect_timeout(&options.target.into(), timeout)?;
        socket.into()
    };
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Start and end of the longest pauses between two reads of an answer: one for each second of the
/// run in which a pause ended.
type Pauses = Vec<(Instant, Instant)>;

fn request(
    options: &LoadOptions,
    port: u16,
    connection: &mut Option<BufReader<TcpStream>>,
    expected: &[u8],
    (buffer, progress): (&mut [u8], &Progress),
    start: Instant,
) -> Result<(String, Pauses)> {
    let timeout = Duration::from_millis(options.timeout_ms.max(1));
    let mut stream = match connection.take() {
        Some(stream) => stream,
        None => {
            let stream = connect(options, port, timeout).context("cannot connect to the server")?;
            BufReader::with_capacity(64 << 10, stream)
        }
    };
    let keep = if options.keepalive {
        "keep-alive"
    } else {
        "close"
    };
    let head = format!(
        "GET /s/{} HTTP/1.1\r\nHost: {}\r\nConnection: {keep}\r\n\r\n",
        expected.len(),
        options.target
    );
    stream
        .get_mut()
        .write_all(head.as_bytes())
        .context("cannot send the request")?;

    let mut server = String::from("?");
    let mut length = None;
    let mut line = String::new();
    let mut first = true;
    loop {
        line.clear();
        ensure!(
            stream
                .read_line(&mut line)
                .context("cannot read the head of the answer")?
                > 0,
            "the connection was closed before the answer"
        );
        let text = line.trim_end();
        if first {
            ensure!(
                text.starts_with("HTTP/1.1 200"),
                "the server answered {text:?}"
            );
            first = false;
        } else if text.is_empty() {
            break;
        } else if let Some((name, value)) = text.split_once(':') {
            match name.to_ascii_lowercase().as_str() {
                "x-server" => value.trim().clone_into(&mut server),
                "content-length" => length = value.trim().parse::<usize>().ok(),
                _ => {}
            }
        }
    }
    ensure!(
        length == Some(expected.len()),
        "the answer has the content length {length:?}"
    );
    let mut done = 0;
    let mut since = Instant::now();
    let mut pauses = Pauses::new();
    while done < expected.len() {
        let want = buffer.len().min(expected.len() - done);
        let read = stream
            .read(&mut buffer[..want])
            .with_context(|| format!("cannot read after {done} bytes"))?;
        ensure!(read > 0, "the connection was closed after {done} bytes");
        if buffer[..read] != expected[done..done + read] {
            let at = buffer
                .iter()
                .zip(&expected[done..])
                .take_while(|(a, b)| a == b)
                .count();
            bail!(WrongByte(done + at));
        }
        done += read;
        Progress::count(&progress.bytes, read as u64);
        let now = Instant::now();
        match pauses.last_mut() {
            // The report has one pause for each second, so that pauses that end in different
            // seconds are stored separately.
            Some((from, to)) if (*to - start).as_secs() == (now - start).as_secs() => {
                if now - since > *to - *from {
                    (*from, *to) = (since, now);
                }
            }
            _ => pauses.push((since, now)),
        }
        since = now;
    }
    if options.keepalive {
        *connection = Some(stream);
    } else {
        // The server closes the connection first. The client reads its FIN, so that the connection
        // ends without a reset.
        let extra = stream
            .read(buffer)
            .context("cannot read the end of the connection")?;
        ensure!(
            extra == 0,
            "the server sent {extra} bytes after the end of the answer"
        );
    }
    Ok((server, pauses))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stall_p99_ignores_the_longest_hundredth_of_stalls() {
        let one = |stall: u64, count: u64| LoadReport {
            ok: count,
            stalls: [(stall, count)].into(),
            ..LoadReport::default()
        };
        let mut report = LoadReport::default();
        for (stall, count) in [(20, 150), (900, 2), (40, 46), (500, 2)] {
            report.add(one(stall, count));
        }
        report.count_stalls();
        assert_eq!((report.stall_ms, report.stall_p99_ms), (900, 500));
        let mut few = one(7, 3);
        few.count_stalls();
        assert_eq!((few.stall_ms, few.stall_p99_ms), (7, 7));
        let mut none = LoadReport::default();
        none.count_stalls();
        assert_eq!(none.stall_p99_ms, 0);
    }
}
