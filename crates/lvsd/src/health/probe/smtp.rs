//! `type = "smtp"`: a mail server sends a greeting, and answers the check's greeting.

use std::net::SocketAddr;

use lvs_core::Protocol;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

use super::line::{Line, Lines};
use super::{Advice, Asked, Port, ProbeError, ProbeKind, quoted};
use crate::text::{Diagnostic, Keys};

/// Maximum length of a line in bytes. RFC 5321 permits 512 bytes, but some servers send longer
/// greetings.
const LINE_MAX: usize = 2048;
/// Maximum number of lines in one answer.
const LINES_MAX: usize = 100;

/// A check that opens a session with a mail server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Smtp {
    port: Port,
    /// The name that the check sends in its greeting.
    helo: String,
}

impl ProbeKind for Smtp {
    const NAME: &'static str = "smtp";
    const KEYS: &'static [&'static str] = &["port", "helo"];
    const VIA: Option<Protocol> = Some(Protocol::TCP);

    fn parse(keys: &mut Keys<'_>) -> Option<Self> {
        let port = Port::parse(keys)?;
        let helo = keys
            .string("helo")?
            .unwrap_or_else(|| "lvsd.invalid".to_owned());
        let plain = |c: char| c.is_ascii_alphanumeric() || ".-_[]:".contains(c);
        if helo.is_empty() || helo.len() > 255 || !helo.chars().all(plain) {
            let at = keys.place("helo");
            keys.report(
                Diagnostic::error(at, "`helo` is not the name of a host").help(
                    "write a name, or an address in brackets: helo = \"director.example.org\"",
                ),
            );
            return None;
        }
        Some(Self { port, helo })
    }

    fn port(&mut self) -> Option<&mut Port> {
        Some(&mut self.port)
    }

    fn target(&self, server: SocketAddr) -> String {
        format!("smtp at {}", self.port.address(server))
    }

    async fn run(&self, asked: &Asked<'_>) -> Result<Advice, ProbeError> {
        let stream = asked.connect(self.port.address(asked.server)).await?;
        let talked = talk(stream, &self.helo).await;
        talked
            .map_err(|why| ProbeError::server(format!("{}: {why}", self.target(asked.server))))?;
        Ok(Advice::NONE)
    }
}

/// Reads the greeting, sends `EHLO`, reads its answer, and sends `QUIT`.
pub(super) async fn talk<S>(stream: S, helo: &str) -> Result<(), String>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut lines = Lines::new(stream, LINE_MAX);
    answer(&mut lines, b"220", "greets with").await?;
    let hello = format!("EHLO {helo}\r\n");
    let sent = lines.stream().write_all(hello.as_bytes()).await;
    sent.map_err(|error| error.to_string())?;
    answer(&mut lines, b"250", "answers EHLO with").await?;
    // QUIT prevents a log entry of the server about a lost connection; errors are ignored.
    let _ = lines.stream().write_all(b"QUIT\r\n").await;
    let _ = lines.next().await;
    Ok(())
}

/// Reads an answer of one or several lines, which must have this code.
async fn answer<S>(lines: &mut Lines<S>, code: &[u8], what: &str) -> Result<(), String>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    for _ in 0..LINES_MAX {
        let line = match lines.next().await.map_err(|error| error.to_string())? {
            Line::Whole(line) => line,
            Line::End(line) if line.is_empty() => return Err("it closes the connection".to_owned()),
            Line::End(line) => {
                return Err(format!(
                    "it {what} {} and closes the connection",
                    quoted(&line)
                ));
            }
            Line::TooLong => return Err(format!("it {what} more than {LINE_MAX} bytes on a line")),
        };
        let Some(rest) = line.strip_prefix(code) else {
            return Err(format!("it {what} {}", quoted(&line)));
        };
        match rest.first() {
            None | Some(b' ') => return Ok(()),
            Some(b'-') => {}
            Some(_) => return Err(format!("it {what} {}", quoted(&line))),
        }
    }
    Err(format!("it {what} more than {LINES_MAX} lines"))
}

#[cfg(test)]
mod tests {
    use crate::health::probe::hostile::{answering, probe, survives};

    const GOOD: &[u8] =
        b"220-mx one\r\n220 mx two\r\n250-mx\r\n250-SIZE 1\r\n250 HELP\r\n221 bye\r\n";

    #[tokio::test]
    async fn smtp_probe_succeeds_with_greeting_and_ehlo_reply_and_fails_on_refusal_or_close() {
        let check = "{ type = \"smtp\" }";
        assert!(probe(check, answering(GOOD).await).await.is_ok());
        for (words, why) in [
            (&b"554 go away\r\n"[..], "greets with \\\"554 go away\\\""),
            (b"220 mx\r\n502 what?\r\n", "answers EHLO with"),
            (b"220", "closes the connection"),
            (b"2200 mx\r\n", "greets with"),
            (b"", "closes the connection"),
        ] {
            let output = format!("{:?}", probe(check, answering(words).await).await);
            let words = String::from_utf8_lossy(words);
            assert!(output.contains(why), "{words:?}: no {why:?} in {output}");
        }
    }

    #[tokio::test]
    async fn smtp_probe_ends_in_time_for_hostile_or_endless_answer() {
        survives("{ type = \"smtp\" }", GOOD).await;
        let server = crate::health::probe::hostile::endless(b"", b"220-mx\r\n").await;
        let output = format!("{:?}", probe("{ type = \"smtp\" }", server).await);
        assert!(
            output.contains("more than 100 lines"),
            "no `more than 100 lines` in {output}"
        );
    }
}
