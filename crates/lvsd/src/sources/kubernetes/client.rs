//! An HTTP client of an API server. Requests of a client share a persistent connection, one after
//! the other; each watch has its own connection.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue, USER_AGENT};
use hyper::{Method, Request};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::objects::Status;
use super::{Settings, Token};
use crate::sources::http::{self, Lines, Reopened, collect, failed, plain};

/// Maximum number of concurrent changes.
pub(super) const WRITERS: usize = 8;
/// Maximum size of a token in bytes.
const TOKEN_MAX: u64 = 64 << 10;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Error {
    /// No answer, or an invalid one.
    #[error(transparent)]
    Http(#[from] http::Error),
    /// The API server refused the request: HTTP status code and reason.
    #[error("{}", refusal(*.0, .1))]
    Refused(u16, String),
}

impl Error {
    /// Returns an error for a request with no answer or an invalid one; `why` is the reason.
    pub(super) const fn failed(why: String) -> Self {
        Self::Http(http::Error::Failed(why))
    }

    /// Whether the requested version has expired, so that all objects must be listed again.
    pub(super) const fn is_expired(&self) -> bool {
        matches!(self, Self::Refused(410, _))
    }

    /// Whether the object does not exist.
    pub(super) const fn is_missing(&self) -> bool {
        matches!(self, Self::Refused(404, _))
    }

    /// Whether another client has changed or created the object meanwhile.
    pub(super) const fn is_conflict(&self) -> bool {
        matches!(self, Self::Refused(409, _))
    }

    /// Whether the API server or its etcd is overloaded or failed, so that the same request may
    /// succeed later.
    pub(super) const fn is_passing(&self) -> bool {
        matches!(self, Self::Refused(429 | 500..=599, _))
    }

    /// Whether the API server answered with an error status.
    pub(super) const fn is_refused(&self) -> bool {
        matches!(self, Self::Refused(..))
    }
}

/// Text about a refused request, with the reason and, for some status codes, a fix.
fn refusal(code: u16, why: &str) -> String {
    let why = if why.is_empty() {
        "without a reason"
    } else {
        why
    };
    match code {
        401 => format!(
            "the API server does not accept the credentials (401 {why}): write a valid token to `token_file` or the kubeconfig"
        ),
        403 => format!(
            "the API server does not permit the request (403 {why}): apply the rights of contrib/kubernetes/rbac.yaml"
        ),
        _ => format!("the API server refuses the request ({code} {why})"),
    }
}

fn refused(code: u16, body: &[u8]) -> Error {
    let status: Status = serde_json::from_slice(body).unwrap_or_default();
    let why = match status.message.is_empty() {
        true => String::from_utf8_lossy(body).trim().to_owned(),
        false => status.message,
    };
    Error::Refused(code, plain(&why))
}

/// `Authorization` header with the token.
fn bearer(token: &Token) -> Result<HeaderValue, Error> {
    let path = match token {
        Token::File(path) => path,
        Token::Text(text) => {
            return header(text, &|why| {
                Error::failed(format!("cannot use the token of the kubeconfig: {why}"))
            });
        }
    };
    let wrong = |why: &dyn fmt::Display| {
        Error::failed(format!(
            "cannot read the token in {}: {why}",
            path.display()
        ))
    };
    let meta = std::fs::metadata(path).map_err(|error| wrong(&error))?;
    if meta.len() > TOKEN_MAX {
        return Err(wrong(&format!("it has more than {} KiB", TOKEN_MAX >> 10)));
    }
    let text = std::fs::read_to_string(path).map_err(|error| wrong(&error))?;
    header(&text, &wrong)
}

/// `Authorization` header with the token `text`.
fn header(text: &str, wrong: &dyn Fn(&dyn fmt::Display) -> Error) -> Result<HeaderValue, Error> {
    if text.trim().is_empty() {
        return Err(wrong(&"it is empty"));
    }
    let value = HeaderValue::from_str(&format!("Bearer {}", text.trim()));
    let mut value =
        value.map_err(|_| wrong(&"it contains characters that are not permitted in a token"))?;
    value.set_sensitive(true);
    Ok(value)
}

pub(super) struct Change {
    method: Method,
    path: String,
    body: Value,
}

impl Change {
    pub(super) fn post(path: String, body: Value) -> Self {
        let method = Method::POST;
        Self { method, path, body }
    }

    /// A merge patch of an object.
    pub(super) fn patch(path: String, body: Value) -> Self {
        let method = Method::PATCH;
        Self { method, path, body }
    }
}

/// Connections for concurrent changes.
pub(super) struct Writers {
    clients: Vec<Client>,
}

impl Writers {
    pub(super) fn new(settings: &Arc<Settings>) -> Self {
        let client = || Client::new(Arc::clone(settings));
        Self {
            clients: std::iter::repeat_with(client).take(WRITERS).collect(),
        }
    }

    /// Sends up to [`WRITERS`] changes concurrently, and drops further ones. The answers are in the
    /// order of the changes.
    pub(super) async fn send(&mut self, changes: Vec<Change>) -> Vec<Result<Value, Error>> {
        let mut sent = JoinSet::new();
        let count = changes.len().min(self.clients.len());
        let clients = self.clients.drain(..count);
        for (index, (mut client, change)) in clients.zip(changes).enumerate() {
            sent.spawn(async move {
                let answer = client.change(change).await;
                (index, client, answer)
            });
        }
        let mut all: Vec<_> = sent.join_all().await;
        all.sort_unstable_by_key(|(index, ..)| *index);
        let mut answers = Vec::with_capacity(all.len());
        for (_, client, answer) in all {
            self.clients.push(client);
            answers.push(answer);
        }
        answers
    }
}

pub(super) struct Client {
    settings: Arc<Settings>,
    connection: Reopened,
}

impl Client {
    pub(super) fn new(settings: Arc<Settings>) -> Self {
        Self {
            settings,
            connection: Reopened::default(),
        }
    }

    fn limit(&self) -> Duration {
        self.settings.timeout
    }

    fn late(&self) -> Error {
        Error::failed(format!(
            "the API server does not answer within {:?}",
            self.limit()
        ))
    }

    pub(super) async fn get<T: DeserializeOwned>(&mut self, path: &str) -> Result<T, Error> {
        self.call(Method::GET, path, None).await
    }

    pub(super) async fn post(&mut self, path: &str, body: &Value) -> Result<Value, Error> {
        self.call(Method::POST, path, Some(body)).await
    }

    pub(super) async fn put(&mut self, path: &str, body: &Value) -> Result<Value, Error> {
        self.call(Method::PUT, path, Some(body)).await
    }

    /// Sends a request, and parses its answer.
    async fn call<T: DeserializeOwned>(
        &mut self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<T, Error> {
        let answer = timeout(self.limit(), async {
            let body = self.send(method, path, body).await?;
            collect(body).await.map_err(Error::from)
        });
        let answer = answer.await;
        let answer = answer.unwrap_or_else(|_| Err(self.late()));
        if answer.is_err() {
            // Data of this answer must not be mistaken for the next one.
            self.connection.close();
        }
        serde_json::from_slice(&answer?).map_err(|error| {
            Error::failed(format!("the API server sent an invalid answer: {error}"))
        })
    }

    /// Sends a request, and returns the body of a successful answer.
    async fn send(
        &mut self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Incoming, Error> {
        let settings = &self.settings;
        let reads = method == Method::GET;
        let kind = match method {
            Method::PATCH => "application/merge-patch+json",
            _ => "application/json",
        };
        let mut head = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, settings.server.authority())
            .header(USER_AGENT, concat!("lvsd/", env!("CARGO_PKG_VERSION")))
            .header(ACCEPT, "application/json")
            .header(CONTENT_TYPE, kind);
        // The token may be replaced while lvsd runs, so that it is read for each request.
        if let Some(token) = &settings.token {
            head = head.header(AUTHORIZATION, bearer(token)?);
        }
        let body = match body {
            Some(body) => serde_json::to_vec(body).map_err(|error| failed(&error))?,
            None => Vec::new(),
        };
        let request = head
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| failed(&error))?;
        let tls = settings.tls.as_ref();
        let sent = self.connection.send(&settings.server, tls, request, reads);
        let answer = sent.await?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer.into_body());
        }
        let body = collect(answer.into_body()).await?;
        Err(refused(status.as_u16(), &body))
    }

    pub(super) async fn change(&mut self, change: Change) -> Result<Value, Error> {
        self.call(change.method, &change.path, Some(&change.body))
            .await
    }

    /// Starts a watch over its own connection.
    pub(super) async fn watch(&self, path: &str) -> Result<Lines, Error> {
        let mut own = Self::new(Arc::clone(&self.settings));
        let body = timeout(self.limit(), own.send(Method::GET, path, None)).await;
        let body = body.unwrap_or_else(|_| Err(self.late()))?;
        Ok(Lines::new(body, own.connection))
    }
}

/// Percent-encodes a value for the query of a URL.
pub(super) fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                quoted.push(char::from(byte));
            }
            _ => quoted.push_str(&format!("%{byte:02X}")),
        }
    }
    quoted
}
