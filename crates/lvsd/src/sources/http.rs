//! HTTP clients for etcd and for the API server of Kubernetes, with and without TLS.

use std::fmt;
use std::pin::pin;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::health::probe::Tls;

/// Maximum size of an answer, and of a line of a watch, in bytes. By default, an object in etcd has
/// at most 1.5 MiB, or 2 MiB in base64.
pub(super) const ANSWER_MAX: usize = 8 << 20;
/// Maximum size of an answer's headers in bytes.
const HEAD_MAX: usize = 16 << 10;
/// Maximum length of a text of a server in messages, in characters.
const REFUSAL_MAX: usize = 300;

/// The address of an HTTP server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Whether the connection uses TLS.
    pub secure: bool,
    /// The server's address or name.
    pub host: String,
    /// Port of the server.
    pub port: u16,
}

impl Endpoint {
    /// Parses a URL that has no user name and no path except `/`, such as `https://10.0.0.5:2379`;
    /// `usual` is the default port. Returns `None` for other texts.
    pub(crate) fn parse(text: &str, usual: u16) -> Option<Self> {
        let uri: hyper::Uri = text.parse().ok()?;
        let secure = match uri.scheme_str()? {
            "https" => true,
            "http" => false,
            _ => return None,
        };
        let authority = uri.authority()?;
        let bare = !authority.as_str().contains('@')
            && uri.path_and_query().is_none_or(|rest| rest == "/");
        let host = authority.host().trim_matches(['[', ']']).to_owned();
        let port = authority.port_u16();
        let named = authority.as_str().len() > authority.host().len();
        (bare && !host.is_empty() && port != Some(0) && (port.is_some() || !named)).then(|| Self {
            secure,
            host,
            port: port.unwrap_or(usual),
        })
    }

    /// Formats address and port for a URL: `10.0.0.5:2379`, `[2001:db8::5]:2379`.
    pub(super) fn authority(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.secure { "https" } else { "http" };
        write!(f, "{scheme}://{}", self.authority())
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    /// No answer, or an invalid one; the text is the reason.
    #[error("{0}")]
    Failed(String),
    /// The answer, or a line of a watch, exceeds the maximum size.
    #[error("the answer has more than {} MiB", ANSWER_MAX >> 20)]
    TooLong,
}

/// Removes control characters from a text of an untrusted server, and shortens it to
/// [`REFUSAL_MAX`] characters.
pub(super) fn plain(words: &str) -> String {
    let plain = words.chars().filter(|c| !c.is_control());
    plain.take(REFUSAL_MAX).collect()
}

/// An open connection, which is closed when dropped.
struct Connection {
    sender: http1::SendRequest<Full<Bytes>>,
    driver: JoinHandle<()>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Connection {
    /// Connects to `endpoint`. `tls` contains the CA and the client certificate.
    async fn open(endpoint: &Endpoint, tls: Option<&Tls>) -> Result<Self, Error> {
        let Endpoint { host, port, secure } = endpoint;
        let stream = TcpStream::connect((host.as_str(), *port)).await;
        let stream = stream.map_err(|error| {
            let words = error.to_string();
            let words = words.split(" (os error").next().unwrap_or_default();
            Error::Failed(words.to_lowercase())
        })?;
        // Requests are small, and the client waits for each answer.
        let _ = stream.set_nodelay(true);
        match (tls, secure) {
            (Some(tls), true) => {
                let met = tls.meet_as(stream, host).await;
                shake(met.map_err(|why| Error::Failed(format!("TLS: {why}")))?).await
            }
            (None, true) => Err(Error::Failed(
                "internal error of lvsd: https without a certificate authority".to_owned(),
            )),
            (_, false) => shake(stream).await,
        }
    }
}

/// A connection that is opened by the first request, and again after the server has closed it.
#[derive(Default)]
pub(super) struct Reopened(Option<Connection>);

impl Reopened {
    /// Sends a request, and reads the headers of its answer.
    ///
    /// If the server had closed the connection, the request is sent over a new one. If `reads` is
    /// true, the request changes nothing on the server, and is also repeated if it was sent and the
    /// server did not answer.
    pub(super) async fn send(
        &mut self,
        endpoint: &Endpoint,
        tls: Option<&Tls>,
        mut request: Request<Full<Bytes>>,
        reads: bool,
    ) -> Result<Response<Incoming>, Error> {
        if let Some(open) = &mut self.0
            && open.sender.ready().await.is_ok()
        {
            let again = reads.then(|| request.clone());
            match open.sender.try_send_request(request).await {
                Ok(answer) => return Ok(answer),
                Err(mut failed) => match failed.take_message().or(again) {
                    Some(unsent) => request = unsent,
                    None => return Err(in_words(failed.error())),
                },
            }
        }
        let open = self.0.insert(Connection::open(endpoint, tls).await?);
        let answer = open.sender.send_request(request).await;
        answer.map_err(|error| in_words(&error))
    }

    pub(super) fn close(&mut self) {
        self.0 = None;
    }
}

/// Lines of an endless body.
pub(super) struct Lines {
    body: Incoming,
    text: Vec<u8>,
    /// Number of bytes at the start that were searched for a line end.
    seen: usize,
    _connection: Reopened,
}

impl Lines {
    /// Reads lines of `body`, which arrives over `connection`.
    pub(super) fn new(body: Incoming, connection: Reopened) -> Self {
        Self {
            body,
            text: Vec::new(),
            seen: 0,
            _connection: connection,
        }
    }

    /// Waits for the next line, and returns it with its line end; `None` at the end of the body. An
    /// incomplete last line is dropped. Dropping the future loses no data.
    pub(super) async fn next(&mut self) -> Result<Option<Vec<u8>>, Error> {
        loop {
            let end = self.text[self.seen..].iter().position(|b| *b == b'\n');
            if let Some(end) = end {
                let rest = self.text.split_off(self.seen + end + 1);
                let line = std::mem::replace(&mut self.text, rest);
                self.seen = 0;
                return Ok(Some(line));
            }
            self.seen = self.text.len();
            let Some(frame) = self.body.frame().await else {
                return Ok(None);
            };
            let frame = frame.map_err(|error| in_words(&error))?;
            if let Some(data) = frame.data_ref() {
                if self.text.len() + data.len() > ANSWER_MAX {
                    return Err(Error::TooLong);
                }
                self.text.extend_from_slice(data);
            }
        }
    }
}

async fn shake<S>(stream: S) -> Result<Connection, Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = http1::Builder::new()
        .max_buf_size(HEAD_MAX)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|error| in_words(&error))?;
    let driver = tokio::spawn(async move {
        // The error also reaches the sender of the request.
        let _ = connection.await;
    });
    Ok(Connection { sender, driver })
}

/// Reads a complete body, up to [`ANSWER_MAX`] bytes.
pub(super) async fn collect(body: Incoming) -> Result<Vec<u8>, Error> {
    let mut body = pin!(body);
    let mut all = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| in_words(&error))?;
        if let Some(data) = frame.data_ref() {
            if all.len() + data.len() > ANSWER_MAX {
                return Err(Error::TooLong);
            }
            all.extend_from_slice(data);
        }
    }
    Ok(all)
}

/// Converts an error to [`Error::Failed`].
pub(super) fn failed(error: &impl fmt::Display) -> Error {
    Error::Failed(error.to_string())
}

/// Converts an HTTP error with its cause to [`Error::Failed`].
fn in_words(error: &hyper::Error) -> Error {
    let cause = std::error::Error::source(error);
    let cause = cause.map(|cause| format!(": {cause}")).unwrap_or_default();
    Error::Failed(format!("{error}{cause}"))
}
