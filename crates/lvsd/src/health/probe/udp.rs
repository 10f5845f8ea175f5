//! `type = "udp"`: a datagram is answered, or at least not refused.

use std::net::SocketAddr;

use lvs_core::Protocol;

use super::{Advice, Asked, Port, ProbeError, ProbeKind, quoted};
use crate::text::{Diagnostic, Keys};

/// Maximum length of the payload, and of the answer that is examined, in bytes.
const PAYLOAD_MAX: usize = 1400;

/// A check that sends a datagram, and compares the answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Udp {
    port: Port,
    payload: Vec<u8>,
    /// The first bytes of an answer; `None` for any byte.
    reply: Vec<Option<u8>>,
    /// Whether a missing answer counts as success, unless an ICMP error refuses the datagram.
    silence_ok: bool,
}

impl ProbeKind for Udp {
    const NAME: &'static str = "udp";
    const KEYS: &'static [&'static str] = &[
        "port",
        "payload",
        "payload_hex",
        "reply",
        "reply_hex",
        "silence",
    ];
    const VIA: Option<Protocol> = Some(Protocol::UDP);

    fn parse(keys: &mut Keys<'_>) -> Option<Self> {
        let port = Port::parse(keys)?;
        let payload = bytes(keys, "payload", "payload_hex", false)?.unwrap_or_default();
        let payload = payload.into_iter().map(Option::unwrap_or_default).collect();
        let reply = bytes(keys, "reply", "reply_hex", true)?;
        let silence = keys.word("silence", &[("down", false), ("up", true)])?;
        let silence_ok = silence.unwrap_or(false);
        if silence_ok && reply.is_some() {
            let at = keys.place("silence");
            keys.report(
                Diagnostic::warning(
                    at,
                    "`silence` accepts a server that does not reply, and `reply` requires a reply",
                )
                .help("remove `silence`, or `reply`"),
            );
        }
        Some(Self {
            port,
            payload,
            reply: reply.unwrap_or_default(),
            silence_ok,
        })
    }

    fn port(&mut self) -> Option<&mut Port> {
        Some(&mut self.port)
    }

    fn target(&self, server: SocketAddr) -> String {
        format!("udp {}", self.port.address(server))
    }

    async fn run(&self, asked: &Asked<'_>) -> Result<Advice, ProbeError> {
        let target = self.port.address(asked.server);
        let failed = asked.failing(target);
        let socket = asked.datagrams(target).await?;
        socket.send(&self.payload).await.map_err(failed)?;
        let mut answer = [0; PAYLOAD_MAX];
        let received = if self.silence_ok {
            // Well before the time limit of the check.
            let limit = asked.timeout.mul_f32(0.9);
            match tokio::time::timeout(limit, socket.recv(&mut answer)).await {
                Ok(received) => received,
                Err(_) => return Ok(Advice::NONE),
            }
        } else {
            socket.recv(&mut answer).await
        };
        let answer = &answer[..received.map_err(failed)?];
        if fits(answer, &self.reply) {
            return Ok(Advice::NONE);
        }
        Err(ProbeError::server(format!(
            "{} answers {}",
            self.target(asked.server),
            quoted(answer)
        )))
    }
}

/// Whether an answer begins with the expected bytes; `None` matches any byte.
fn fits(answer: &[u8], wanted: &[Option<u8>]) -> bool {
    answer.len() >= wanted.len()
        && answer
            .iter()
            .zip(wanted)
            .all(|(byte, wanted)| wanted.is_none_or(|wanted| wanted == *byte))
}

/// The bytes of a setting: the text of one key, or the hexadecimal digits of another key, in which
/// a pair `XX` matches any byte if `wild` is true. `None` after an error, which is reported;
/// `Some(None)` without both keys.
fn bytes(
    keys: &mut Keys<'_>,
    text: &str,
    hex: &str,
    wild: bool,
) -> Option<Option<Vec<Option<u8>>>> {
    let plain = keys.string(text)?;
    let digits = keys.string(hex)?;
    let (read, at) = match (plain, digits) {
        (None, None) => return Some(None),
        (Some(plain), None) => {
            let bytes = plain.bytes().map(Some).collect();
            (Ok(bytes), keys.place(text))
        }
        (None, Some(digits)) => (from_hex(&digits, wild), keys.place(hex)),
        (Some(_), Some(_)) => {
            let error = format!("`{text}` and `{hex}` are the same setting");
            (Err(error), keys.place(hex))
        }
    };
    let read: Result<Vec<Option<u8>>, String> =
        read.and_then(|bytes: Vec<_>| match bytes.len() <= PAYLOAD_MAX {
            true => Ok(bytes),
            false => Err(format!("the value has more than {PAYLOAD_MAX} bytes")),
        });
    match read {
        Ok(bytes) => Some(Some(bytes)),
        Err(why) => {
            keys.report(
                Diagnostic::error(at, why)
                    .help(format!("write {text} = \"text\", or {hex} = \"01 02 ff\"")),
            );
            None
        }
    }
}

fn from_hex(text: &str, wild: bool) -> Result<Vec<Option<u8>>, String> {
    let digits: Vec<u8> = text.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    let pair = |pair: &[u8]| match pair {
        [b'x' | b'X', b'x' | b'X'] if wild => Some(None),
        _ => {
            let text = std::str::from_utf8(pair).ok().filter(|_| pair.len() == 2)?;
            let digits = text.bytes().all(|b| b.is_ascii_hexdigit());
            digits.then(|| u8::from_str_radix(text, 16).ok())
        }
    };
    let bytes: Option<Vec<Option<u8>>> = digits.chunks(2).map(pair).collect();
    bytes.ok_or_else(|| format!("{text:?} does not consist of pairs of hexadecimal digits"))
}

#[cfg(test)]
mod tests {
    use tokio::net::UdpSocket;

    use super::*;
    use crate::health::probe::hostile::{answered, probe};

    #[test]
    fn udp_hexadecimal_bytes_are_parsed_or_refused_and_wildcard_matches_any_byte() {
        assert_eq!(from_hex("01 fF", false), Ok(vec![Some(1), Some(255)]));
        assert_eq!(from_hex("0aXX", true), Ok(vec![Some(10), None]));
        for wrong in ["0", "xx", "+1", "1g", "é"] {
            assert!(from_hex(wrong, false).is_err(), "{wrong}");
        }
        assert!(fits(b"abc", &[Some(b'a'), None]));
        assert!(!fits(b"a", &[Some(b'a'), None]));
    }

    #[tokio::test]
    async fn udp_probe_distinguishes_answer_refusal_and_silence() {
        let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = server.local_addr().unwrap();
        let answer = tokio::spawn(async move {
            let mut bytes = [0; 100];
            while let Ok((n, from)) = server.recv_from(&mut bytes).await {
                match &bytes[..n] {
                    b"hush" => {}
                    b"end" => return,
                    other => {
                        let _ = server.send_to(other, from).await;
                    }
                }
            }
        });
        let check = |limit: &str, more: &str| {
            format!("{{ type = \"udp\", timeout = \"{limit}\", interval = \"1s\", {more} }}")
        };
        let ask = async |more: &str| answered(&check("10s", more), address).await;
        // The probe waits for all of its time.
        let silent = async |more: &str| probe(&check("300ms", more), address).await;
        assert!(ask("payload = \"hello\"").await.is_ok());
        assert!(ask("payload = \"hello\", reply = \"hel\"").await.is_ok());
        assert!(
            ask("payload_hex = \"0102\", reply_hex = \"XX 02\"")
                .await
                .is_ok()
        );
        assert!(ask("payload = \"hello\", reply = \"bye\"").await.is_err());
        assert!(silent("payload = \"hush\"").await.is_err());
        assert!(silent("payload = \"hush\", silence = \"up\"").await.is_ok());
        while !answer.is_finished() {
            let _ = silent("payload = \"end\", silence = \"up\"").await;
        }
        answer.await.unwrap();
        let mut refused = Ok(Advice::NONE);
        for _ in 0..6 {
            // A lost datagram counts as silence.
            refused = ask("payload = \"hello\", silence = \"up\"").await;
            if refused.is_err() {
                break;
            }
        }
        assert!(
            matches!(&refused, Err(ProbeError::Server(why)) if why.text.contains("refused")),
            "{refused:?}"
        );
    }
}
