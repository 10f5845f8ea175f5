//! Passes answers of servers to the parsers of probes, for fuzzers.

use std::net::{IpAddr, SocketAddr};

use super::line::Lines;
use super::{dns, http, ping, smtp, tls, words};

/// Sends `bytes` as a server's answer to the parser that the first byte chooses. The parser must
/// neither panic nor loop.
pub fn reply(bytes: &[u8]) {
    let Some((which, bytes)) = bytes.split_first() else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let Ok(runtime) = runtime else {
        return;
    };
    // Data written to the stream is discarded.
    let stream = || tokio::io::join(bytes, tokio::io::sink());
    let server: SocketAddr = ([192, 0, 2, 1], 443).into();
    match which % 8 {
        0 => {
            let asked = runtime.block_on(http::exchange_page(stream(), "a.example", "/x"));
            drop(asked);
        }
        1 => {
            let location = String::from_utf8_lossy(bytes);
            if let Ok((_, path)) = http::follow(&location, "http", "a.example", "/x/y?z") {
                assert!(path.starts_with('/'), "{path:?}");
            }
        }
        2 => drop(runtime.block_on(smtp::talk(stream(), "a.example"))),
        3 => {
            let read = words::parse(bytes);
            if let Ok(parsed) = read {
                assert!(parsed.advice.apply(i32::MAX) >= 0);
            }
        }
        4 => {
            let (asked, record) = if which & 8 == 0 {
                ("a.example", 1)
            } else {
                (".", 6)
            };
            let question = dns::question(0x4142, asked, record).unwrap_or_default();
            drop(dns::read(bytes, &question));
            // An answer that repeats the question, so that the parser reaches the records.
            let mut answer = question.clone();
            answer[2] |= 0x80;
            if let Some((count, rest)) = bytes.split_first() {
                answer[7] = *count;
                answer.extend(rest);
            }
            drop(dns::read(&answer, &question));
        }
        5 => {
            let server: IpAddr = server.ip();
            let request = ping::request(server, 0x4142);
            let taken = ping::answers(bytes, &request, which & 8 == 0, true);
            assert!(!taken || bytes.len() >= request.len());
        }
        6 => {
            if let Some(tls) = tls::Tls::plain() {
                drop(runtime.block_on(tls.meet(stream(), server)));
            }
        }
        _ => {
            let mut lines = Lines::new(bytes, 100);
            runtime.block_on(async {
                while let Ok(super::line::Line::Whole(_)) = lines.next().await {}
            });
        }
    }
}
