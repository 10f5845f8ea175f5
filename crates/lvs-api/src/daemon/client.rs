//! The client of `lvsd`'s control socket: HTTP, with a separate connection for each request.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};

use super::{
    AdminDone, AdminSpec, DirectorStatus, Event, MaintenanceSpec, Reloaded, Status, socket,
};
use crate::Address;
use crate::address::impostor;

/// Maximum length in bytes of the body of an answer, and of an event: a status contains all servers
/// of the configuration, which may be very many.
const BODY_MAX: u64 = 256 << 20;
/// Maximum length of the head of an answer in bytes.
const HEAD_MAX: u64 = 64 << 10;
/// Time without data from the daemon after which a request fails. The daemon itself waits at most
/// 20 seconds until the dataplane has applied a change.
const SILENCE: Duration = Duration::from_secs(30);
/// Time without data from the daemon after which a reload fails. On a busy host, a configuration
/// with tens of thousands of servers takes most of a minute; `contrib/lvsd.service` permits more
/// time.
const SILENCE_OF_RELOAD: Duration = Duration::from_secs(300);

/// A client of the control socket of `lvsd`.
#[derive(Debug)]
pub struct Client {
    address: Address,
    /// The connection for the next request; `None` if it must be opened first.
    stream: Option<UnixStream>,
    /// Longest wait for the next part of an answer.
    silence: Duration,
}

#[derive(Deserialize)]
struct Refusal {
    error: Failure,
}

/// The events that the daemon has stored.
#[derive(Deserialize)]
struct Past {
    events: Vec<Event>,
}

#[derive(Deserialize)]
struct Failure {
    message: String,
}

struct Head {
    code: u16,
    /// Length of the body in bytes; `None` if the body ends with the connection.
    length: Option<u64>,
}

impl Client {
    /// Connects to the daemon of the dataplane at `dataplane`; `None` if no process listens on the
    /// daemon's control socket.
    ///
    /// # Errors
    ///
    /// A message: the connection fails for another reason, or the socket has an abstract name and
    /// the process that listens there is not trusted.
    pub fn connect(dataplane: &Address) -> Result<Option<Self>, String> {
        let address = socket(dataplane);
        let stream = open(&address)?;
        Ok(stream.map(|stream| Self {
            address,
            stream: Some(stream),
            silence: SILENCE,
        }))
    }

    /// The state of the daemon and its services.
    ///
    /// # Errors
    ///
    /// A message: the daemon refuses the request, or sends no complete and valid answer.
    pub fn status(&mut self) -> Result<Status, String> {
        self.ask("GET /v1/status HTTP/1.0\r\n\r\n")
    }

    /// Sets the administrative state of servers.
    ///
    /// # Errors
    /// As [`status`](Self::status).
    pub fn admin(&mut self, spec: &AdminSpec) -> Result<AdminDone, String> {
        self.post("admin", spec)
    }

    /// Starts or ends maintenance of the director.
    ///
    /// # Errors
    /// As [`status`](Self::status).
    pub fn maintenance(&mut self, spec: &MaintenanceSpec) -> Result<DirectorStatus, String> {
        self.post("maintenance", spec)
    }

    /// Makes lvsd read its configuration file again. With `force`, the new file may remove any
    /// number of servers.
    ///
    /// # Errors
    ///
    /// As [`status`](Self::status).
    pub fn reload(&mut self, force: bool) -> Result<Reloaded, String> {
        self.silence = SILENCE_OF_RELOAD;
        let reloaded = self.post("reload", &serde_json::json!({ "force": force }));
        self.silence = SILENCE;
        reloaded
    }

    /// Passes new events to `each`, until it returns false.
    ///
    /// # Errors
    ///
    /// As [`status`](Self::status); also if the daemon has ended.
    pub fn events(&mut self, mut each: impl FnMut(Event) -> bool) -> Result<(), String> {
        let (head, mut stream) =
            self.send("GET /v1/events HTTP/1.0\r\naccept: text/event-stream\r\n\r\n")?;
        if head.code != 200 {
            return Err(self.refusal(&head, stream));
        }
        // No event may arrive for a long time.
        let _ = stream.get_ref().set_read_timeout(None);
        loop {
            let line = self.line(&mut stream, BODY_MAX)?;
            // An empty line ends an event; comments show that the daemon is running.
            if let Some(event) = line.strip_prefix(b"data:")
                && !each(self.json(event)?)
            {
                return Ok(());
            }
        }
    }

    /// The last events of the daemon, at most 1,000, in order.
    ///
    /// # Errors
    ///
    /// As [`status`](Self::status).
    pub fn past_events(&mut self) -> Result<Vec<Event>, String> {
        let past: Past = self.ask("GET /v1/events HTTP/1.0\r\n\r\n")?;
        Ok(past.events)
    }

    fn post<R: DeserializeOwned>(
        &mut self,
        what: &str,
        body: &impl Serialize,
    ) -> Result<R, String> {
        let body = serde_json::to_string(body).map_err(|error| error.to_string())?;
        let length = body.len();
        let request = format!("POST /v1/{what} HTTP/1.0\r\ncontent-length: {length}\r\n\r\n{body}");
        self.ask(&request)
    }

    fn ask<R: DeserializeOwned>(&mut self, request: &str) -> Result<R, String> {
        let (head, stream) = self.send(request)?;
        match head.code {
            200 => self.json(&self.body(&head, stream)?),
            _ => Err(self.refusal(&head, stream)),
        }
    }

    /// Sends a request on a separate connection. Returns the head of the answer, and the
    /// connection, from which the body can be read.
    fn send(&mut self, request: &str) -> Result<(Head, BufReader<UnixStream>), String> {
        let stream = match self.stream.take() {
            Some(stream) => stream,
            None => open(&self.address)?.ok_or_else(|| self.ended())?,
        };
        let _ = stream.set_read_timeout(Some(self.silence));
        match (&stream).write_all(request.as_bytes()) {
            // The daemon may have sent a reason before it closed the connection.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                return Err(self.silent(&error));
            }
            _ => {}
        }
        let mut stream = BufReader::new(stream);
        let head = self.head(&mut stream)?;
        Ok((head, stream))
    }

    fn head(&self, stream: &mut impl BufRead) -> Result<Head, String> {
        let mut stream = stream.take(HEAD_MAX);
        let first = self.line(&mut stream, HEAD_MAX)?;
        let words = String::from_utf8_lossy(&first).into_owned();
        let code = words.strip_prefix("HTTP/1.").and_then(|rest| {
            let code = rest.split(' ').nth(1)?;
            code.trim_end().parse().ok()
        });
        let code =
            code.ok_or_else(|| self.garbled(&format!("it answered `{}`", words.trim_end())))?;
        let mut length = None;
        loop {
            let line = self.line(&mut stream, HEAD_MAX)?;
            let line = String::from_utf8_lossy(line.trim_ascii_end()).into_owned();
            match line.split_once(':') {
                _ if line.is_empty() => return Ok(Head { code, length }),
                Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                    let value = value.trim().parse();
                    length =
                        Some(value.map_err(|_| self.garbled(&format!("it answered `{line}`")))?);
                }
                _ => {}
            }
        }
    }

    /// Reads a complete line, and returns it without its line break.
    fn line(&self, stream: &mut impl BufRead, most: u64) -> Result<Vec<u8>, String> {
        let mut line = Vec::new();
        match stream.take(most).read_until(b'\n', &mut line) {
            Err(error) => Err(self.silent(&error)),
            Ok(_) if line.ends_with(b"\n") => {
                line.pop();
                Ok(line)
            }
            Ok(_) if line.len() as u64 == most => {
                Err(self.garbled(&format!("a line of its answer is longer than {most} bytes")))
            }
            Ok(_) => Err(self.ended()),
        }
    }

    fn body(&self, head: &Head, stream: impl Read) -> Result<Vec<u8>, String> {
        let mut body = Vec::new();
        let most = head.length.unwrap_or(BODY_MAX).min(BODY_MAX);
        let read = stream.take(most).read_to_end(&mut body);
        read.map_err(|error| self.silent(&error))?;
        match head.length {
            Some(length) if length > BODY_MAX => {
                Err(self.garbled(&format!("its answer is longer than {BODY_MAX} bytes")))
            }
            Some(length) if (body.len() as u64) < length => Err(self.ended()),
            _ => Ok(body),
        }
    }

    fn json<R: DeserializeOwned>(&self, bytes: &[u8]) -> Result<R, String> {
        serde_json::from_slice(bytes).map_err(|error| {
            let strange = serde_json::from_slice::<IgnoredAny>(bytes).is_ok();
            let hint = if strange {
                "; it may be an lvsd of another version"
            } else {
                ""
            };
            self.garbled(&format!("{error}{hint}"))
        })
    }

    fn refusal(&self, head: &Head, stream: impl Read) -> String {
        let refusal = self.body(head, stream).and_then(|body| self.json(&body));
        match refusal {
            Ok(Refusal { error }) => error.message,
            Err(why) => why,
        }
    }

    fn ended(&self) -> String {
        format!(
            "lvsd at {} closed the connection before the end of its answer: it has probably exited",
            self.address
        )
    }

    fn silent(&self, error: &io::Error) -> String {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                format!(
                    "lvsd at {} does not answer; its log names the cause",
                    self.address
                )
            }
            _ => format!("{}: {error}", self.ended()),
        }
    }

    fn garbled(&self, what: &str) -> String {
        format!(
            "the process that answers at {} is not this lvsd: {what}",
            self.address
        )
    }
}

/// Connects to `address`; `None` if no process listens there.
fn open(address: &Address) -> Result<Option<UnixStream>, String> {
    let stream = match address.connect() {
        Ok(stream) => stream,
        Err(error) => {
            return match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Ok(None),
                io::ErrorKind::WouldBlock => Err(format!(
                    "lvsd at {address} does not answer: if its state in `ps` is T, continue it with `kill -CONT`"
                )),
                _ => Err(format!("cannot connect to lvsd at {address}: {error}")),
            };
        }
    };
    // Any local user can bind an abstract name.
    if matches!(address, Address::Abstract(_))
        && let Some((uid, _)) = impostor(&stream)
    {
        return Err(format!(
            "{address} is served by a process of user {uid}, which is neither this user nor root with CAP_NET_ADMIN"
        ));
    }
    let _ = stream.set_write_timeout(Some(SILENCE));
    Ok(Some(stream))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn systemd_unit_time_limit_is_longer_than_reload_limit_of_client() {
        let unit = include_str!("../../../../contrib/lvsd.service");
        let limit = unit
            .lines()
            .find_map(|line| line.strip_prefix("TimeoutStartSec="));
        let limit: u64 = limit
            .expect("the unit has TimeoutStartSec=")
            .parse()
            .expect("TimeoutStartSec= is a number");
        assert!(limit > SILENCE_OF_RELOAD.as_secs(), "{limit}");
    }

    /// The process id that a client reads from the status answer `text`. The daemon closes the
    /// connection after `text`.
    fn answered(text: &str) -> Result<u32, String> {
        let (own, mut other) = UnixStream::pair().expect("the sockets can be opened");
        other
            .write_all(text.as_bytes())
            .expect("the answer is written");
        drop(other.shutdown(std::net::Shutdown::Write));
        let mut client = Client {
            address: Address::Path("/nowhere".into()),
            stream: Some(own),
            silence: SILENCE,
        };
        client.status().map(|status| status.pid)
    }

    #[test]
    fn status_answer_is_parsed_if_complete_and_refused_if_truncated() {
        let status = serde_json::to_string(&Status {
            pid: 7,
            ..Status::default()
        });
        let status = status.expect("the status can be written as JSON");
        let length = status.len();
        let text = format!("HTTP/1.0 200 OK\r\nA: b\r\nContent-Length: {length}\r\n\r\n{status}");
        assert_eq!(answered(&text), Ok(7));
        assert_eq!(
            answered(&format!("HTTP/1.1 200\nx:\n\n{status}")),
            Ok(7),
            "an answer without a length was not read to the end of the connection"
        );
        let cut = &text[..text.len() - 1];
        assert!(
            answered(cut)
                .expect_err("an incomplete answer was accepted")
                .contains("has probably exited")
        );
    }

    #[test]
    fn unusable_status_answer_returns_error_with_reason() {
        let refused = r#"HTTP/1.0 403 Forbidden

{"error":{"message":"only root may"}}"#;
        for (text, words) in [
            (refused, "only root may"),
            ("", "has probably exited"),
            ("HTTP/1.0 200 OK\r\n", "has probably exited"),
            ("{\"id\":0}\n", "is not this lvsd: it answered `{\"id\":0}`"),
            (
                "HTTP/1.0 200 OK\r\ncontent-length: -1\r\n\r\n",
                "is not this lvsd",
            ),
            (
                "HTTP/1.0 200 OK\r\n\r\n[]",
                "may be an lvsd of another version",
            ),
            ("HTTP/1.0 502 Bad\r\n\r\n<html>", "is not this lvsd"),
        ] {
            let error_text = answered(text).expect_err("an invalid answer was accepted");
            assert!(
                error_text.contains(words),
                "{text}: no {words:?} in {error_text}"
            );
        }
        let long = format!("HTTP/1.0 200 OK\r\n{}", "a: b\r\n".repeat(12_000));
        assert!(answered(&long).is_err());
    }
}
