//! One connection of a client: the length of a request is limited before it is read, and the access
//! right is checked before the request is parsed.

use std::borrow::Cow;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use lvs_core::api::{Access, Call, Failure, FailureCode, Hello, VERSION};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use super::admission::Place;
use super::handler::{Handler, Sink, write_error, write_line};
use crate::deadline;
use lvs_api::peer::Refusal;

/// Maximum length of a client's first request in bytes.
const HELLO_MAX: u64 = 4 << 10;
/// Maximum length in bytes of a request of a client with read access.
const REQUEST_MAX: u64 = 16 << 10;
/// Maximum length in bytes of a request of a client with write access: a list of
/// [`CHANGES_MAX`](lvs_core::api::CHANGES_MAX) changes.
const LIST_MAX: u64 = 32 << 20;
/// A client must read [`BUFFER`] bytes of an answer within this time.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for a client's first request.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for the next request of a client with read access.
const READER_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for the next request of a client with write access.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);
/// Size of the buffer for answers in bytes.
const BUFFER: usize = 64 << 10;
/// Nice value of threads for read-only clients (setpriority(2)).
const READER_NICE: i32 = 10;

/// A request whose parameters are not parsed yet.
#[derive(Deserialize)]
struct RawRequest<'a> {
    #[serde(default)]
    id: u64,
    #[serde(borrow)]
    method: Cow<'a, str>,
    #[serde(borrow, default)]
    params: Option<&'a RawValue>,
}

/// A stream with a deadline for reads, and a time limit for each write.
struct Within<'a> {
    stream: &'a UnixStream,
    until: Instant,
    patience: Duration,
}

impl<'a> Within<'a> {
    fn new(stream: &'a UnixStream, time: Duration) -> Self {
        Self {
            stream,
            until: Instant::now() + time,
            patience: WRITE_TIMEOUT,
        }
    }
}

impl Read for Within<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        deadline::read_until(self.stream, buf, self.until)
    }
}

impl Write for Within<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        deadline::write_within(self.stream, buf, self.patience)?;
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Answers a client until it disconnects, exceeds a time limit, or sends a request that is too long
/// or incomplete. `denied` is the reason why the client may not make changes; `None` if it may.
pub(super) fn serve_connection(
    stream: &UnixStream,
    place: &Place,
    denied: Option<Refusal>,
    dataplane: &dyn Handler,
) -> io::Result<()> {
    if place.is_reader() {
        // Sets the priority of this thread only; an error is ignored.
        let _ = rustix::process::setpriority_process(None, READER_NICE);
    }
    // If the client disconnects or the time is over, the read ends, so that the slot is released.
    let mut reader = BufReader::new(Within::new(stream, HELLO_TIMEOUT));
    let mut writer = BufWriter::with_capacity(BUFFER, Within::new(stream, WRITE_TIMEOUT));
    let mut session = Session {
        dataplane,
        place,
        denied,
        greeted: false,
    };
    let mut line = Vec::new();
    loop {
        line.clear();
        // Free the memory of a long list.
        line.shrink_to(BUFFER);
        let max = session.longest();
        let len = reader.by_ref().take(max).read_until(b'\n', &mut line)?;
        if len == 0 {
            return Ok(());
        }
        if line.last() != Some(&b'\n') {
            let failure = malformed(if len as u64 == max {
                format!("the request is longer than {max} bytes")
            } else {
                "the request lacks its final line feed".into()
            });
            write_error(&mut writer, 0, &failure)?;
            return writer.flush();
        }
        // The answer counts as pending until it is written, also the answer to the call that stops
        // the dataplane.
        let _answer = place.answer();
        let (id, answer) = match serde_json::from_slice::<RawRequest<'_>>(&line) {
            Err(error) => (
                0,
                Err(malformed(format!("the line is not a request: {error}"))),
            ),
            Ok(request) => {
                let mut out = Sink::new(request.id, &mut writer);
                (request.id, session.answer(&request, &mut out))
            }
        };
        match answer {
            Ok(result) => {
                #[derive(Serialize)]
                struct Line {
                    id: u64,
                    result: Value,
                }
                write_line(&mut writer, &Line { id, result })?;
            }
            Err(failure) => write_error(&mut writer, id, &failure)?,
        }
        writer.flush()?;
        if let Some(idle) = session.idle() {
            reader.get_mut().until = Instant::now() + idle;
        }
    }
}

struct Session<'a> {
    dataplane: &'a dyn Handler,
    place: &'a Place,
    denied: Option<Refusal>,
    greeted: bool,
}

impl Session<'_> {
    const fn longest(&self) -> u64 {
        match (self.greeted, self.denied) {
            (false, _) => HELLO_MAX,
            (true, Some(_)) => REQUEST_MAX,
            (true, None) => LIST_MAX,
        }
    }

    /// Time limit for the client's next request; `None` for the first request, which has another
    /// limit.
    const fn idle(&self) -> Option<Duration> {
        match (self.greeted, self.denied) {
            (false, _) => None,
            (true, Some(_)) => Some(READER_TIMEOUT),
            (true, None) => Some(IDLE_TIMEOUT),
        }
    }

    fn answer(&mut self, request: &RawRequest<'_>, out: &mut Sink<'_>) -> Result<Value, Failure> {
        let method = &*request.method;
        let params = request.params.map_or("{}", RawValue::get);
        if method == "hello" {
            return self.greet(params);
        }
        if !self.greeted {
            return Err(malformed("the first request must be hello".into()));
        }
        if let Some(refusal) = self.denied
            && Access::of_method(method) == Access::Write
        {
            return Err(Failure::new(
                FailureCode::Permission,
                format!("{method}: {refusal}"),
            ));
        }
        let call = parse(method, params)?;
        let _turn = match call {
            Call::ServiceList { .. } | Call::ConnList {} | Call::SysctlGet { .. } => {
                Some(self.place.list().ok_or_else(|| {
                    Failure::new(
                        FailureCode::Full,
                        format!("{method}: a read-only user receives at most one list at a time, and all read-only users together at most four: wait until another list is complete"),
                    )
                })?)
            }
            _ => None,
        };
        self.dataplane.call(call, out)
    }

    fn greet(&mut self, params: &str) -> Result<Value, Failure> {
        #[derive(Deserialize)]
        struct Params {
            version: u32,
        }
        let Params { version } =
            serde_json::from_str(params).map_err(|error| malformed(format!("hello: {error}")))?;
        if version != VERSION {
            return Err(Failure::new(
                FailureCode::Version,
                format!("the dataplane uses version {VERSION} of the control protocol"),
            ));
        }
        self.greeted = true;
        let hello = Hello {
            version: VERSION,
            dataplane: self.dataplane.name(),
            table_size: self.dataplane.table_size(),
            writable: self.denied.is_none(),
        };
        serde_json::to_value(hello)
            .map_err(|error| Failure::new(FailureCode::Internal, error.to_string()))
    }
}

/// Parses a call of this method with these parameters. The method is already parsed, so the
/// parameters are parsed directly into their types, without an intermediate form.
fn parse(method: &str, params: &str) -> Result<Call, Failure> {
    let failed = |error: serde_json::Error| malformed(format!("{method}: {error}"));
    let name = serde_json::to_string(method).map_err(failed)?;
    serde_json::from_str(&format!("{{\"method\":{name},\"params\":{params}}}")).map_err(failed)
}

pub(super) fn malformed(message: String) -> Failure {
    Failure::new(FailureCode::Malformed, message)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const SHORT: Duration = Duration::from_millis(200);

    #[test]
    fn read_from_slowloris_client_times_out() {
        let (client, server) = UnixStream::pair().expect("the sockets can be opened");
        let dripping = thread::spawn(move || {
            while (&client).write_all(b" ").is_ok() {
                thread::sleep(SHORT / 20);
            }
        });
        let mut reader = BufReader::new(Within::new(&server, SHORT));
        let error = reader.read_until(b'\n', &mut Vec::new()).unwrap_err();
        assert!(
            matches!(
                error.kind(),
                io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock
            ),
            "{error}"
        );
        drop(server);
        dripping.join().expect("the thread ends without a panic");
    }

    #[test]
    fn write_to_slow_reader_times_out() {
        let (client, server) = UnixStream::pair().expect("the sockets can be opened");
        let taking = thread::spawn(move || {
            while (&client).read(&mut [0]).is_ok_and(|count| count > 0) {
                thread::sleep(SHORT / 20);
            }
        });
        let mut writer = Within::new(&server, SHORT);
        writer.patience = SHORT;
        let error = writer.write_all(&[0; 4 << 20]).unwrap_err();
        assert!(
            matches!(
                error.kind(),
                io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock
            ),
            "{error}"
        );
        server
            .shutdown(std::net::Shutdown::Both)
            .expect("the socket can be shut down");
        drop(server);
        // Do not join: the server thread reads the remaining bytes one by one.
        drop(taking);
    }
}
