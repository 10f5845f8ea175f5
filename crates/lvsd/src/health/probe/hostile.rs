//! Servers for tests, whose answers are correct, wrong, endless, late, or truncated.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::ProbeError;
use crate::config::Config;
use crate::health::Check;
use crate::health::{Advice, Network, Prober, Reason};

/// A check of a server's own address, parsed from text.
pub(crate) fn check(text: &str, server: SocketAddr) -> Check {
    let udp = text.contains("\"udp\"") || text.contains("\"dns\"");
    let protocol = if udp { "udp" } else { "tcp" };
    let text = text.replace("port = 1,", &format!("port = {},", server.port()));
    let text = format!(
        "[[service]]\naddress = \"192.0.2.10:80\"\nprotocol = \"{protocol}\"\nforward = \"nat\"\ncheck = {text}\n\
         [[service.server]]\naddress = \"{server}\"\n"
    );
    let (config, _) =
        Config::from_toml("test.toml", &text).unwrap_or_else(|report| panic!("{report}"));
    let server = config.services[0]
        .servers
        .first()
        .expect("the service has a server");
    server
        .check
        .as_ref()
        .expect("the server has a check")
        .of_own_address()
}

/// Time limit for an answer on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Runs one probe. The time limit is long, unless the check sets another one.
pub(crate) async fn probe(text: &str, server: SocketAddr) -> Result<Advice, ProbeError> {
    let mut check = check(text, server);
    if !text.contains("timeout = ") {
        check.timeout = PATIENCE;
    }
    Network::default().probe(&check).await
}

/// Runs a probe that sends one datagram up to six times, until it is answered. The kernel drops
/// datagrams while its queue of received packets, which all network namespaces share, is full.
pub(crate) async fn answered(text: &str, server: SocketAddr) -> Result<Advice, ProbeError> {
    for _ in 0..5 {
        let result = probe(text, server).await;
        let is_silent = |why: &Reason| why.text.contains("did not answer");
        if !matches!(&result, Err(ProbeError::Server(why)) if is_silent(why)) {
            return result;
        }
    }
    probe(text, server).await
}

/// A server that calls `work` with each connection.
pub(crate) async fn serving<F, W>(work: F) -> SocketAddr
where
    F: Fn(TcpStream) -> W + Send + 'static,
    W: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(work(stream));
        }
    });
    address
}

/// A server that sends `words` at once, and closes its half of the connection.
pub(crate) async fn answering(words: &'static [u8]) -> SocketAddr {
    serving(move |mut stream| async move {
        let _ = stream.write_all(words).await;
        let _ = stream.shutdown().await;
        let mut ignored = [0; 1024];
        while matches!(stream.read(&mut ignored).await, Ok(1..)) {}
    })
    .await
}

/// A server that sends `words` after a request, and closes its half of the connection.
pub(crate) async fn replying(words: &'static [u8]) -> SocketAddr {
    serving(move |mut stream| async move {
        let mut request = [0; 4096];
        let _ = stream.read(&mut request).await;
        let _ = stream.write_all(words).await;
        let _ = stream.shutdown().await;
        while matches!(stream.read(&mut request).await, Ok(1..)) {}
    })
    .await
}

/// A server that waits for a request, sends the first text once, and then the second text without
/// end.
pub(crate) async fn endless_reply(first: &'static [u8], then: &'static [u8]) -> SocketAddr {
    serving(move |mut stream| async move {
        let _ = stream.read(&mut [0; 4096]).await;
        let _ = stream.write_all(first).await;
        while stream.write_all(then).await.is_ok() {}
    })
    .await
}

/// A server that sends `words` again and again, one byte every 20 milliseconds.
pub(crate) async fn dripping(words: &'static [u8]) -> SocketAddr {
    serving(move |mut stream| async move {
        for byte in words.iter().cycle() {
            if stream.write_all(&[*byte]).await.is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
}

/// A server that sends the first text, and then the second without end, as fast as the client
/// reads.
pub(crate) async fn endless(first: &'static [u8], then: &'static [u8]) -> SocketAddr {
    serving(move |mut stream| async move {
        let _ = stream.write_all(first).await;
        while stream.write_all(then).await.is_ok() {}
    })
    .await
}

/// A server that sends `words`, and then nothing, with the connection open.
pub(crate) async fn stalling(words: &'static [u8]) -> SocketAddr {
    serving(move |mut stream| async move {
        let _ = stream.write_all(words).await;
        let mut ignored = [0; 1024];
        while matches!(stream.read(&mut ignored).await, Ok(1..)) {}
        std::future::pending::<()>().await;
    })
    .await
}

/// Checks that probes of misbehaving servers end, at the latest at their timeout, and report that
/// the server is down. A probe may succeed if a complete answer is followed by random bytes.
pub(crate) async fn survives(check: &str, words: &'static [u8]) {
    let quick = check.replace(" }", ", timeout = \"250ms\", interval = \"1s\" }");
    let random: &'static [u8] = &[
        0x16, 0x03, 0x01, 0x02, 0x00, 0xff, 0x00, b'\n', b'\r', 0xc0, 0x80,
    ];
    for (what, server) in [
        ("closes", answering(b"").await),
        ("half", answering(&words[..words.len() / 2]).await),
        ("random", answering(random).await),
        ("drips", dripping(words).await),
        ("drips nothing", dripping(b"\r\n").await),
        ("endless line", endless(b"", b"aaaaaaaaaaaaaaaa").await),
        ("endless lines", endless(b"", b"aaaaaaaaaaa\r\n").await),
        ("endless random", endless(words, random).await),
        ("silent", stalling(b"").await),
        ("stalls", stalling(&words[..words.len() / 2]).await),
    ] {
        let result = probe(&quick, server).await;
        let endless_end = what == "endless random" && result.is_ok();
        assert!(
            endless_end || matches!(result, Err(ProbeError::Server(_))),
            "{check}, {what}: {result:?}"
        );
    }
}

/// Reads the head and the body of a request; `None` if the connection ends before.
pub(crate) async fn request_of(stream: &mut TcpStream) -> Option<(String, String)> {
    let mut text = Vec::new();
    loop {
        let mut more = [0; 4096];
        match stream.read(&mut more).await {
            Ok(n @ 1..) => text.extend_from_slice(&more[..n]),
            _ => return None,
        }
        let all = String::from_utf8_lossy(&text).into_owned();
        let Some((head, body)) = all.split_once("\r\n\r\n") else {
            continue;
        };
        let head = format!("{head}\r\n");
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        let length = length.map_or(0, |length| length.parse::<usize>().unwrap());
        if body.len() >= length {
            return Some((head, body.to_owned()));
        }
    }
}
