//! An HTTP client of an etcd member. Requests share a persistent connection, one after the other; a
//! watch has its own connection.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes as Body, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, USER_AGENT};
use hyper::{Request, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::message::{
    self, Bytes, Create, Done, Grant, Granted, Lease, Login, Number, Put, Range, Ranged, Streamed,
    Token, Watch, Watched, Wrong,
};
use crate::health::probe::Tls;
use crate::sources::http::{self, Endpoint, Lines, Reopened, collect, failed, plain};

/// gRPC code for a missing object, such as a lease.
const NOT_FOUND: u32 = 5;
/// gRPC code for a missing permission.
const PERMISSION_DENIED: u32 = 7;
/// gRPC code for an invalid token.
const UNAUTHENTICATED: u32 = 16;

/// A password, which is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Password(pub(crate) String);

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a password")
    }
}

/// Members of etcd, and credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// Addresses of the members.
    pub endpoints: Vec<Endpoint>,
    /// CA of the members, and lvsd's own certificate; `None` without TLS.
    pub(crate) tls: Option<Tls>,
    /// User name and password; `None` without authentication.
    pub login: Option<(String, Password)>,
    /// Time limit of a request.
    pub timeout: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    /// No answer, or an invalid one.
    #[error(transparent)]
    Http(#[from] http::Error),
    /// etcd refused the request: gRPC code and reason.
    #[error("etcd refuses the request: {1}")]
    Refused(u32, String),
}

impl Error {
    /// Returns an error for a request with no answer or an invalid one; `why` is the reason.
    pub(super) const fn failed(why: String) -> Self {
        Self::Http(http::Error::Failed(why))
    }

    fn refused(wrong: Wrong) -> Self {
        let why = match wrong.message.is_empty() {
            true => format!("code {} without a reason", wrong.code),
            false => plain(&wrong.message),
        };
        Self::Refused(wrong.code, why)
    }

    /// Whether the user lacks the permission, so that a repetition is useless.
    pub(super) const fn is_forbidden(&self) -> bool {
        matches!(self, Self::Refused(PERMISSION_DENIED, _))
    }

    /// Whether the lease of the request no longer exists.
    pub(super) const fn is_gone(&self) -> bool {
        matches!(self, Self::Refused(NOT_FOUND, _))
    }

    /// Whether the member no longer accepts the client's token.
    fn is_unknown(&self) -> bool {
        match self {
            Self::Refused(code, why) => {
                *code == UNAUTHENTICATED || why.contains("invalid auth token")
            }
            _ => false,
        }
    }
}

/// A client of one etcd member.
pub(crate) struct Client {
    access: Arc<Access>,
    endpoint: Endpoint,
    connection: Reopened,
    token: Option<String>,
}

impl Client {
    pub(crate) fn new(access: Arc<Access>, endpoint: Endpoint) -> Self {
        Self {
            access,
            endpoint,
            connection: Reopened::default(),
            token: None,
        }
    }

    /// Sends a request, and parses its answer. If the member no longer accepts the token, requests
    /// another one and sends the request again.
    async fn call<T: DeserializeOwned>(
        &mut self,
        path: &str,
        request: &impl Serialize,
    ) -> Result<T, Error> {
        let first = self.attempt(path, request).await;
        match first {
            // The token has expired, or the member was restarted.
            Err(error) if error.is_unknown() && self.access.login.is_some() => {
                self.token = None;
                self.attempt(path, request).await
            }
            other => other,
        }
    }

    async fn attempt<T: DeserializeOwned>(
        &mut self,
        path: &str,
        request: &impl Serialize,
    ) -> Result<T, Error> {
        let limit = self.access.timeout;
        let answer = timeout(limit, async {
            self.log_in().await?;
            let body = self.post(path, request).await?;
            collect(body).await.map_err(Error::from)
        });
        let answer = answer.await.unwrap_or_else(|_| {
            let why = format!("etcd does not answer within {limit:?}");
            Err(Error::failed(why))
        });
        if answer.is_err() {
            // Data of this answer must not be mistaken for the next one.
            self.connection.close();
        }
        message::read(&answer?).map_err(Error::failed)
    }

    /// Requests a token from the member, if a user name is configured and the client has no token.
    async fn log_in(&mut self) -> Result<(), Error> {
        let Some((name, password)) = self.access.login.clone() else {
            return Ok(());
        };
        if self.token.is_some() {
            return Ok(());
        }
        let login = Login {
            name: &name,
            password: &password.0,
        };
        let body = self.post("/v3/auth/authenticate", &login).await?;
        let token: Token = message::read(&collect(body).await?).map_err(Error::failed)?;
        self.token = Some(token.token);
        Ok(())
    }

    /// Sends a request, and returns the body of a successful answer.
    async fn post(&mut self, path: &str, request: &impl Serialize) -> Result<Incoming, Error> {
        let body = serde_json::to_vec(request).map_err(|error| failed(&error))?;
        let mut head = Request::post(path)
            .header(HOST, self.endpoint.authority())
            .header(USER_AGENT, concat!("lvsd/", env!("CARGO_PKG_VERSION")))
            .header(CONTENT_TYPE, "application/json");
        if let Some(token) = &self.token {
            head = head.header(AUTHORIZATION, token);
        }
        let request = head
            .body(Full::new(Body::from(body)))
            .map_err(|error| failed(&error))?;
        let tls = self.access.tls.as_ref();
        let sent = self.connection.send(&self.endpoint, tls, request, false);
        let answer = sent.await?;
        let status = answer.status();
        if status == StatusCode::OK {
            return Ok(answer.into_body());
        }
        let text = collect(answer.into_body()).await?;
        Err(match message::wrong(&text) {
            Some(wrong) if !wrong.message.is_empty() => Error::refused(wrong),
            // An error message of the gateway.
            _ => {
                let words = plain(String::from_utf8_lossy(&text).trim());
                Error::failed(match words.is_empty() {
                    true => format!("etcd answers {status} without a reason"),
                    false => format!("etcd answers {status}: {words}"),
                })
            }
        })
    }

    /// Lists keys from `range.key` on, as many as fit into an answer: if values are long, requests
    /// fewer keys.
    pub(super) async fn range(&mut self, mut range: Range) -> Result<Ranged, Error> {
        loop {
            match self.call::<Ranged>("/v3/kv/range", &range).await {
                Err(Error::Http(http::Error::TooLong)) if range.limit.0 > 1 => range.limit.0 /= 2,
                // Without a revision, an empty answer does not mean that there are no keys.
                Ok(ranged) if ranged.header.revision.0 < 1 => {
                    let why = "etcd answers without a revision".to_owned();
                    return Err(Error::failed(why));
                }
                other => return other,
            }
        }
    }

    /// Writes a key that etcd deletes when the lease ends.
    pub(crate) async fn put(&mut self, key: &str, value: &str, lease: i64) -> Result<(), Error> {
        let put = Put {
            key: Bytes(key.into()),
            value: Bytes(value.into()),
            lease: Number(lease),
        };
        self.call("/v3/kv/put", &put).await.map(|Done {}| ())
    }

    /// Requests a lease of `ttl`, rounded down to seconds, and of at least 1 s. Returns its id.
    pub(crate) async fn grant(&mut self, ttl: Duration) -> Result<i64, Error> {
        let seconds = i64::try_from(ttl.as_secs().max(1)).unwrap_or(i64::MAX);
        let ttl = Number(seconds);
        let granted: Granted = self.call("/v3/lease/grant", &Grant { ttl }).await?;
        match (granted.error.as_str(), granted.id.0) {
            ("", id @ 1..) => Ok(id),
            ("", id) => Err(Error::failed(format!(
                "etcd grants no lease: its answer has the lease id {id}, and no error"
            ))),
            (why, _) => Err(Error::failed(format!("etcd grants no lease: {why}"))),
        }
    }

    /// Renews a lease; returns false if it no longer exists.
    pub(crate) async fn keep(&mut self, id: i64) -> Result<bool, Error> {
        let id = Number(id);
        let kept: Streamed<Granted> = self.call("/v3/lease/keepalive", &Lease { id }).await?;
        match (kept.result, kept.error) {
            (_, Some(wrong)) => Err(Error::refused(wrong)),
            (Some(kept), None) => Ok(kept.ttl.0 > 0),
            (None, None) => Err(Error::failed(
                "the answer of etcd contains no lease".to_owned(),
            )),
        }
    }

    /// Revokes a lease, so that etcd deletes its keys.
    pub(crate) async fn revoke(&mut self, id: i64) -> Result<(), Error> {
        let id = Number(id);
        let revoked = self.call("/v3/lease/revoke", &Lease { id }).await;
        revoked.map(|Done {}| ())
    }

    /// Watches the keys with the prefix `prefix`, from revision `from` on, over its own connection.
    pub(super) async fn watch(&self, prefix: &str, from: i64) -> Result<Watching, Error> {
        let mut own = Self::new(Arc::clone(&self.access), self.endpoint.clone());
        own.token.clone_from(&self.token);
        let watch = Watch {
            create_request: Create {
                key: Bytes(prefix.into()),
                range_end: Bytes(message::end_of(prefix.as_bytes())),
                start_revision: Number(from),
                fragment: true,
            },
        };
        let limit = self.access.timeout;
        let body = timeout(limit, own.post("/v3/watch", &watch)).await;
        let late = || {
            Err(Error::failed(format!(
                "etcd does not confirm a watch within {limit:?}"
            )))
        };
        let body = body.unwrap_or_else(|_| late())?;
        Ok(Watching(Lines::new(body, own.connection)))
    }
}

pub(super) struct Watching(Lines);

impl Watching {
    /// Waits for the next message of the watch. Dropping the future loses no message.
    pub(super) async fn next(&mut self) -> Result<Watched, Error> {
        let line = self.0.next().await?;
        let line = line.ok_or_else(|| Error::failed("etcd has ended the watch".to_owned()))?;
        let streamed: Streamed<Watched> = message::read(&line).map_err(Error::failed)?;
        match (streamed.result, streamed.error) {
            (_, Some(wrong)) => Err(Error::refused(wrong)),
            (Some(watched), None) => Ok(watched),
            (None, None) => Err(Error::failed(
                "etcd sent a message of the watch without a result".to_owned(),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use tokio::net::TcpStream;

    use super::*;
    use crate::health::probe::hostile::{endless_reply, replying, request_of, serving};
    use tokio::io::AsyncWriteExt;

    fn client(member: SocketAddr, login: bool) -> Client {
        client_with_limit(member, login, Duration::from_secs(60))
    }

    fn client_with_limit(member: SocketAddr, login: bool, timeout: Duration) -> Client {
        let endpoint =
            Endpoint::parse(&format!("http://{member}"), 2379).expect("the URL is valid");
        let login = login.then(|| ("lvs".to_owned(), Password("s3cret".to_owned())));
        let access = Access {
            endpoints: vec![endpoint.clone()],
            tls: None,
            login,
            timeout,
        };
        Client::new(Arc::new(access), endpoint)
    }

    fn answer(status: &str, body: &str) -> String {
        format!(
            "HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
    }

    /// Reads a request: path, lower-case headers and body.
    async fn request(stream: &mut TcpStream) -> Option<String> {
        let (head, body) = request_of(stream).await?;
        Some(format!("{}\n{body}", head.to_lowercase()))
    }

    #[test]
    fn etcd_member_url_is_parsed_or_refused() {
        for (text, shown) in [
            ("https://10.0.0.5:2379", "https://10.0.0.5:2379"),
            ("http://[2001:db8::5]:1/", "http://[2001:db8::5]:1"),
            ("https://etcd.example.org", "https://etcd.example.org:2379"),
        ] {
            assert_eq!(Endpoint::parse(text, 2379).expect(text).to_string(), shown);
        }
        for wrong in [
            "",
            "e",
            "e:1",
            "ftp://e",
            "http://",
            "http://e:0",
            "http://e:99999",
            "http://e/x",
            "http://a:b@e",
        ] {
            assert_eq!(Endpoint::parse(wrong, 2379), None, "{wrong}");
        }
    }

    #[tokio::test]
    async fn expired_etcd_token_is_replaced() {
        let given = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let member = serving(move |mut stream| {
            let given = Arc::clone(&given);
            async move {
                while let Some(request) = request(&mut stream).await {
                    let reply = if request.contains("/v3/auth/authenticate") {
                        assert!(
                            request.contains("\"password\":\"s3cret\""),
                            "no `\"password\":\"s3cret\"` in {request}"
                        );
                        let n = given.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        answer("200 OK", &format!("{{\"token\":\"t{n}\"}}"))
                    } else if request.contains("authorization: t1") {
                        answer("200 OK", "{\"ID\":\"77\",\"TTL\":\"5\"}")
                    } else {
                        let why = "{\"error\":\"etcdserver: invalid auth token\",\"code\":16}";
                        answer("401 Unauthorized", why)
                    };
                    if stream.write_all(reply.as_bytes()).await.is_err() {
                        return;
                    }
                }
            }
        })
        .await;
        let mut client = client(member, true);
        assert_eq!(client.grant(Duration::from_secs(5)).await, Ok(77));
        assert_eq!(client.token.as_deref(), Some("t1"));
    }

    #[tokio::test]
    async fn expired_etcd_lease_is_distinguished_from_live_lease() {
        for (body, kept) in [
            ("{\"result\":{\"ID\":\"7\",\"TTL\":\"5\"}}", Ok(true)),
            ("{\"result\":{\"ID\":\"7\"}}", Ok(false)),
            (
                "{\"error\":{\"grpc_code\":7,\"message\":\"no\"}}",
                Err(Error::Refused(7, "no".to_owned())),
            ),
        ] {
            let text: &'static str = answer("200 OK", body).leak();
            let member = replying(text.as_bytes()).await;
            assert_eq!(client(member, false).keep(7).await, kept, "{body}");
        }
    }

    #[tokio::test]
    async fn etcd_watch_reads_one_message_per_line_and_refuses_incomplete_line() {
        let body = "{\"result\":{\"created\":true,\"header\":{\"revision\":\"4\"}}}\n\
                    {\"result\":{\"header\":{\"revision\":\"5\"},\"events\":[{\"kv\":{\"key\":\"L2E=\",\"mod_revision\":\"5\"}}]}}\n\
                    {\"result\":{\"canceled\":true,\"compact_revision\":\"9\"}}\nrest";
        let text: &'static str = answer("200 OK", body).leak();
        let member = replying(text.as_bytes()).await;
        let mut watching = client(member, false).watch("/", 4).await.unwrap();
        assert_eq!(watching.next().await.unwrap().events.len(), 0);
        let second = watching.next().await.unwrap();
        assert_eq!(
            (second.events.len(), second.events[0].kv.mod_revision),
            (1, Number(5))
        );
        let third = watching.next().await.unwrap();
        assert!(third.canceled && third.compact_revision == Number(9));
        assert!(
            watching.next().await.is_err(),
            "an incomplete line is accepted"
        );
    }

    #[tokio::test]
    async fn endless_late_and_invalid_etcd_answers_are_errors() {
        let ask = async |member| {
            let range = Range {
                limit: Number(1),
                ..Range::default()
            };
            client(member, false).range(range).await.map(|_| ())
        };
        let endless = endless_reply(b"HTTP/1.1 200 OK\r\n\r\n", &[b'x'; 65536]).await;
        assert_eq!(ask(endless).await, Err(Error::Http(http::Error::TooLong)));
        let head = endless_reply(b"HTTP/1.1 200 OK\r\n", b"X: yyyyyyyyyyyyyyyyyyyyyyyy\r\n").await;
        assert!(matches!(
            ask(head).await,
            Err(Error::Http(http::Error::Failed(_)))
        ));
        let silent = serving(|stream| async move {
            tokio::time::sleep(Duration::from_secs(60)).await;
            drop(stream);
        })
        .await;
        let limit = Duration::from_millis(100);
        let late = client_with_limit(silent, false, limit).keep(7).await;
        assert!(
            matches!(&late, Err(Error::Http(http::Error::Failed(why))) if why.contains("does not answer within")),
            "{late:?}"
        );
        for reply in [
            "",
            "garbage\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
            "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
            "HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone",
            "HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        ] {
            let member = replying(reply.as_bytes()).await;
            let came = ask(member).await;
            assert!(
                matches!(came, Err(Error::Http(http::Error::Failed(_)))),
                "{reply}: {came:?}"
            );
        }
        // An endless line.
        let endless = endless_reply(b"HTTP/1.1 200 OK\r\n\r\n", &[b'x'; 65536]).await;
        let mut watching = client(endless, false).watch("/", 1).await.unwrap();
        assert_eq!(
            watching.next().await.unwrap_err(),
            Error::Http(http::Error::TooLong)
        );
    }

    #[tokio::test]
    async fn etcd_refusal_is_shortened_and_has_no_control_characters() {
        let long = format!(
            "{{\"message\":\"\\u001b[31m{}\",\"code\":3}}",
            "é".repeat(5000)
        );
        let text: &'static str = answer("400 Bad Request", &long).leak();
        let member = replying(text.as_bytes()).await;
        let refused = client(member, false).keep(1).await.unwrap_err().to_string();
        assert!(
            refused.len() < 700 && !refused.contains('\u{1b}'),
            "{refused}"
        );
    }
}
