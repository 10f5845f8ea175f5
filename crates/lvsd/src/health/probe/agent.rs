//! `type = "agent"`: a program on the server reports its state, in the words of HAProxy's agents.

use std::net::SocketAddr;

use tokio::io::AsyncWriteExt;

use super::line::{Line, Lines};
use super::words::{self, LINE_MAX};
use super::{Advice, Asked, Port, ProbeError, ProbeKind};
use crate::text::{Diagnostic, Keys};

/// A check that reads a line from an agent, a program on the server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Agent {
    port: Port,
    /// The text that is sent to the agent.
    send: String,
}

impl ProbeKind for Agent {
    const NAME: &'static str = "agent";
    const KEYS: &'static [&'static str] = &["port", "send"];
    // One answer is sufficient: the agent reports the state of its server.
    const RISE: u32 = 1;
    const FALL: u32 = 1;

    fn parse(keys: &mut Keys<'_>) -> Option<Self> {
        let port = Port::parse(keys)?;
        if port == Port::default() {
            keys.report(
                Diagnostic::error(keys.table(), "`port` of the agent is missing")
                    .help("add the port of the agent: port = 9707"),
            );
            return None;
        }
        let send = keys.string("send")?.unwrap_or_default();
        Some(Self { port, send })
    }

    fn port(&mut self) -> Option<&mut Port> {
        Some(&mut self.port)
    }

    fn target(&self, server: SocketAddr) -> String {
        format!("the agent at {}", self.port.address(server))
    }

    async fn run(&self, asked: &Asked<'_>) -> Result<Advice, ProbeError> {
        let target = self.port.address(asked.server);
        let failed = asked.failing(target);
        let mut stream = asked.connect(target).await?;
        // An agent may have answered before this, and closed the connection.
        let _ = stream.write_all(self.send.as_bytes()).await;
        let answer = Lines::new(stream, LINE_MAX).next().await.map_err(failed)?;
        let wrong =
            |why: String| ProbeError::server(format!("{}: {why}", self.target(asked.server)));
        let line = match answer {
            Line::Whole(line) | Line::End(line) => line,
            Line::TooLong => {
                return Err(wrong(
                    "its answer has more than 1 KiB on one line".to_owned(),
                ));
            }
        };
        let parsed = words::parse(&line).map_err(wrong)?;
        match parsed.down {
            None => Ok(parsed.advice),
            Some(why) => Err(wrong(why)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::health::Weight;
    use crate::health::probe::hostile::{answering, probe, serving};

    #[tokio::test]
    async fn agent_answer_determines_advice_or_failure() {
        let check = "{ type = \"agent\", port = 1, send = \"how?\\n\" }";
        let server = answering(b"up 50%\n").await;
        let half = Advice::weight(Weight::Percent(50));
        assert_eq!(probe(check, server).await, Ok(half));
        let server = answering(b"drain").await;
        assert_eq!(probe(check, server).await.unwrap().drains, Some(true));
        for (words, wanted) in [
            (&b"down # no disk\n"[..], "no disk"),
            (b"", "its answer is empty"),
            (b"\xff\xfe\n", "it sent the unknown word"),
            (&[b'a'; 4000], "more than 1 KiB"),
        ] {
            let server = answering(words).await;
            let parsed = probe(check, server).await.expect_err("the check succeeded");
            assert!(
                format!("{parsed:?}").contains(wanted),
                "no {wanted:?} in {parsed:?}"
            );
        }
    }

    #[tokio::test]
    async fn agent_answer_sent_before_the_request_is_accepted() {
        let server = serving(|mut stream| async move {
            let _ = stream.write_all(b"up 50%").await;
            // The client has sent data; unread data would turn the close into a reset.
            let _ = stream.readable().await;
        })
        .await;
        let half = Advice::weight(Weight::Percent(50));
        for _ in 0..40 {
            let check = "{ type = \"agent\", port = 1, send = \"how?\\n\" }";
            assert_eq!(probe(check, server).await, Ok(half));
        }
    }
}
