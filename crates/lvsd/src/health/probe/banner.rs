//! `type = "banner"`, in tests only: a kind of check whose configuration is a text.
//!
//! It sends nothing and waits for a first line that begins as expected.

use std::net::SocketAddr;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};

use super::{Advice, Asked, ProbeError, ProbeKind};
use crate::text::{Diagnostic, Keys};

/// Maximum number of bytes that are read.
const LINE_MAX: u64 = 512;

/// A check that compares the greeting of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Banner {
    expect: String,
}

impl ProbeKind for Banner {
    const NAME: &'static str = "banner";
    const KEYS: &'static [&'static str] = &["expect"];

    fn parse(keys: &mut Keys<'_>) -> Option<Self> {
        let Some(expect) = keys.string("expect")? else {
            keys.report(
                Diagnostic::error(keys.table(), "`expect` of the check is missing")
                    .help("add the beginning of the greeting: expect = \"220 \""),
            );
            return None;
        };
        Some(Self { expect })
    }

    fn target(&self, server: SocketAddr) -> String {
        server.to_string()
    }

    async fn run(&self, asked: &Asked<'_>) -> Result<Advice, ProbeError> {
        let server = asked.server;
        let failed = asked.failing(server);
        let stream = asked.connect(server).await?;
        let mut line = String::new();
        let mut reader = BufReader::new(stream.take(LINE_MAX));
        reader.read_line(&mut line).await.map_err(failed)?;
        if line.starts_with(&self.expect) {
            return Ok(Advice::NONE);
        }
        Err(ProbeError::server(format!(
            "{server} greets with {:?}",
            line.trim_end()
        )))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::AsyncWriteExt;

    use super::*;
    use crate::cases::cases;
    use crate::config::Config;
    use crate::health::Check;
    use crate::health::{Network, Prober};

    fn file(check: &str) -> String {
        format!(
            "[[service]]\naddress = \"192.0.2.10:25\"\nforward = \"nat\"\ncheck = {check}\n\
             [[service.server]]\naddress = \"127.0.0.1:25\"\n"
        )
    }

    fn check(text: &str) -> Check {
        let (config, _) =
            Config::from_toml("test.toml", &file(text)).unwrap_or_else(|report| panic!("{report}"));
        let check = config.services[0].servers[0].check.as_ref();
        check.expect("the server has a check").of_own_address()
    }

    async fn greeting(words: &'static [u8]) -> SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(words).await.unwrap();
            // The connection stays open until the peer closes it.
            let _ = stream.read(&mut [0]).await;
        });
        address
    }

    #[tokio::test]
    async fn banner_probe_accepts_only_expected_greeting_within_its_timeout() {
        let mut check = check("{ type = \"banner\", expect = \"220 \", timeout = \"10s\" }");
        for (words, good) in [(&b"220 mx\r\n"[..], true), (b"554 no\r\n", false)] {
            check.server = greeting(words).await;
            let result = Network::default().probe(&check).await;
            let words = String::from_utf8_lossy(words);
            assert_eq!(result.is_ok(), good, "{words:?}: {result:?}");
        }
        // Half a line that never ends is cut off by the check's timeout.
        check.server = greeting(b"220").await;
        check.timeout = Duration::from_millis(50);
        let result = Network::default().probe(&check).await;
        assert!(
            matches!(&result, Err(ProbeError::Server(why)) if why.text.contains("within 50ms")),
            "{result:?}"
        );
    }

    #[test]
    fn check_with_missing_invalid_or_unknown_key_is_refused_with_its_position() {
        for [text, place, wanted] in cases(
            r#"
                { type = "banner" } | 4:9 | `expect` of the check is missing
                { type = "banner", expect = 220 } | 4:37 | expected a string, found the number
                { type = "banner", expect = "a", port = 1 } | 4:42 | unknown key `port`
                { type = "banner", expct = "a" } | 4:28 | did you mean `expect`?
                { type = "baner" } | 4:18 | did you mean "banner"?
                { type = "tcp", expect = "a" } | 4:25 | keys: fall, fast_interval, interval, jitter, passive, port, rise, timeout, type, via
            "#,
        ) {
            let report = Config::from_toml("test.toml", &file(text)).expect_err(text);
            let output = report.to_string();
            assert!(output.contains(wanted), "{text}: no {wanted:?} in {output}");
            assert!(
                output.contains(&format!("test.toml:{place}\n")),
                "{text}: {output}"
            );
        }
    }
}
