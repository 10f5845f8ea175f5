//! `type = "http"`: the server returns pages with the expected status and text.

use std::collections::HashSet;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;

use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONNECTION, HOST, LOCATION, USER_AGENT};
use hyper::{Method, Request, Response, Uri};
use hyper_util::rt::TokioIo;
use lvs_core::Protocol;
use tokio::io::{AsyncRead, AsyncWrite};

use super::eager::Eager;
use super::{Advice, Asked, Port, ProbeError, ProbeKind, quoted};
use crate::text::{Diagnostic, Keys};

/// Maximum number of bytes of a page that are examined.
pub(super) const BODY_MAX: usize = 256 * 1024;
/// Maximum length of a response header in bytes.
const HEAD_MAX: usize = 16 * 1024;
/// Maximum number of header lines in a response.
const HEADERS_MAX: usize = 128;
/// Maximum number of pages that one check requests, each with redirects.
const URLS_MAX: usize = 16;
const REDIRECTS_MAX: i64 = 10;

/// Keys of a page, which may be set for all pages or for one.
const PAGE: &[&str] = &["path", "method", "status", "body", "regex", "redirects"];

/// A check that requests pages of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Http {
    port: Port,
    host: Option<String>,
    pages: Vec<Page>,
}

/// A page that the check requests.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Page {
    /// The path of the page, from `/` on.
    path: String,
    method: Method,
    /// Accepted status codes: the first and the last code of each range.
    status: Vec<(u16, u16)>,
    body: Option<String>,
    regex: Option<Pattern>,
    redirects: u8,
}

#[derive(Clone)]
struct Pattern(regex::bytes::Regex);

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/{}/", self.0.as_str())
    }
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

impl Eq for Pattern {}

impl Hash for Pattern {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.as_str().hash(state);
    }
}

impl Default for Page {
    fn default() -> Self {
        Self {
            path: "/".to_owned(),
            method: Method::GET,
            status: vec![(200, 299)],
            body: None,
            regex: None,
            redirects: 0,
        }
    }
}

impl Page {
    /// Reads the keys of a page; `default` has the values of missing keys. `None` after an error,
    /// which is reported.
    fn parse(keys: &mut Keys<'_>, default: Self) -> Option<Self> {
        let mut page = default;
        if let Some(path) = keys.string("path").flatten() {
            if !is_path(&path) {
                let at = keys.place("path");
                let finding = Diagnostic::error(at, format!("{path:?} is not a path"));
                keys.report(finding.help(
                    "write the path from its first slash on: path = \"/health?full=1\"; write the host as `host`",
                ));
            }
            page.path = path;
        }
        let methods = [
            ("GET", Method::GET),
            ("HEAD", Method::HEAD),
            ("OPTIONS", Method::OPTIONS),
        ];
        let method = keys.word("method", &methods).flatten();
        page.method = method.unwrap_or(page.method);
        if let Some(text) = keys.scalar("status").flatten() {
            page.status = status(&text).unwrap_or_else(|| {
                let at = keys.place("status");
                let finding = Diagnostic::error(at, format!("{text:?} is not a status"));
                keys.report(finding.help(
                    "write one, or ranges: status = 200, or status = \"200-299,301\"; from 100 to 599",
                ));
                Vec::new()
            });
        }
        page.body = keys.string("body").flatten().or(page.body);
        if let Some(text) = keys.string("regex").flatten() {
            match regex::bytes::Regex::new(&text) {
                Ok(regex) => page.regex = Some(Pattern(regex)),
                Err(error) => {
                    let why = error.to_string();
                    let why = why.lines().last().unwrap_or_default().to_owned();
                    let at = keys.place("regex");
                    let fault = Diagnostic::error(at, "`regex` is not a regular expression");
                    keys.report(fault.label(why).help(
                        "its syntax is that of docs.rs/regex; write it in single quotes, as in regex = 'ok \\d+'",
                    ));
                }
            }
        }
        let redirects = keys.number("redirects", 0..=REDIRECTS_MAX).flatten();
        let redirects = redirects.and_then(|number| u8::try_from(number).ok());
        page.redirects = redirects.unwrap_or(page.redirects);
        let right = keys.findings.reported() == 0;
        let asks = page.body.is_some() || page.regex.is_some();
        if right && asks && page.method == Method::HEAD {
            let at = keys.table();
            keys.report(
                Diagnostic::error(at, "an answer to HEAD has no body")
                    .help("remove `method`, or `body` and `regex`"),
            );
            return None;
        }
        right.then_some(page)
    }

    fn takes(&self, status: u16) -> bool {
        let mut ranges = self.status.iter();
        ranges.any(|(first, last)| (*first..=*last).contains(&status))
    }

    /// Compares the received part of the body with the expectation; `None` while more is needed.
    fn judge(&self, body: &[u8], seen: usize, whole: bool) -> Option<Result<(), String>> {
        if let Some(text) = &self.body {
            let text = text.as_bytes();
            let from = seen.saturating_sub(text.len());
            let found = text.is_empty() || find(&body[from..], text);
            match (found, self.regex.is_some()) {
                // If there is also a pattern, both are compared at the end.
                (true, false) => return Some(Ok(())),
                _ if !whole => return None,
                _ if !find(body, text) && !text.is_empty() => {
                    return Some(Err(format!("without {}", quoted(text))));
                }
                _ => {}
            }
        }
        match &self.regex {
            None => Some(Ok(())),
            Some(_) if !whole => None,
            Some(regex) if regex.0.is_match(body) => Some(Ok(())),
            Some(regex) => Some(Err(format!("that does not match {regex:?}"))),
        }
    }
}

/// Whether `text`, which is not empty, is in `all`.
fn find(all: &[u8], text: &[u8]) -> bool {
    all.windows(text.len()).any(|window| window == text)
}

fn is_path(path: &str) -> bool {
    path.starts_with('/')
        && path
            .parse::<Uri>()
            .is_ok_and(|uri| uri.authority().is_none())
}

/// Parses ranges of statuses, such as `200-299,301`; `None` if the text is invalid.
fn status(text: &str) -> Option<Vec<(u16, u16)>> {
    let number = |text: &str| {
        let number = text.trim().parse::<u16>().ok()?;
        (100..=599).contains(&number).then_some(number)
    };
    let range = |text: &str| match text.split_once('-') {
        Some((first, last)) => Some((number(first)?, number(last)?)).filter(|(a, b)| a <= b),
        None => number(text).map(|one| (one, one)),
    };
    text.split(',').map(range).collect()
}

impl Http {
    /// The keys of an `http` check that an `https` check has, too.
    pub(super) const OWN: [&'static str; 9] = [
        "port",
        "host",
        "path",
        "method",
        "status",
        "body",
        "regex",
        "redirects",
        "urls",
    ];

    pub(super) fn read(keys: &mut Keys<'_>) -> Option<Self> {
        let port = Port::parse(keys)?;
        let host = keys.string("host")?;
        if let Some(host) = &host
            && (host.is_empty() || host.parse::<hyper::http::uri::Authority>().is_err())
        {
            let at = keys.place("host");
            keys.report(
                Diagnostic::error(at, format!("{host:?} is not a host"))
                    .help("write its name, and its port if that is not the default: host = \"www.example.org\""),
            );
            return None;
        }
        let all = Page::parse(keys, Page::default())?;
        let pages = keys.tables("urls", PAGE, |keys| Page::parse(keys, all.clone()))?;
        let pages = pages.unwrap_or_else(|| vec![all.clone()]);
        if !(1..=URLS_MAX).contains(&pages.len()) {
            let at = keys.place("urls");
            keys.report(
                Diagnostic::error(at, format!("the check has {} URLs", pages.len())).help(format!(
                    "write 1 to {URLS_MAX} URLs: urls = [{{ path = \"/a\" }}, {{ path = \"/b\" }}]"
                )),
            );
            return None;
        }
        Some(Self { port, host, pages })
    }

    /// The address and port to which the check of `server` connects.
    pub(super) fn address(&self, server: SocketAddr) -> SocketAddr {
        self.port.address(server)
    }

    /// The server's host name, if it is configured.
    pub(super) fn host(&self) -> Option<&str> {
        self.host.as_deref()
    }

    /// Requests the pages one after another, and follows their redirects, until one fails. Each
    /// request has a separate connection, which `open` makes.
    pub(super) async fn ask<S, F>(
        &self,
        scheme: &str,
        asked: &Asked<'_>,
        open: impl Fn() -> F,
    ) -> Result<Advice, ProbeError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
        F: Future<Output = Result<S, ProbeError>>,
    {
        let server = self.address(asked.server);
        for page in &self.pages {
            let mut host = self
                .host
                .clone()
                .unwrap_or_else(|| authority(server, scheme));
            let mut path = page.path.clone();
            let mut been = HashSet::new();
            loop {
                let stated = |why: String| {
                    let page = format!("{scheme}://{host}{path}");
                    ProbeError::server(format!("{}: {page} {why}", asked.server))
                };
                let stream = open().await?;
                let came = exchange(stream, page, &host, &path).await.map_err(stated)?;
                let Came::Redirect(location) = came else {
                    break;
                };
                been.insert((host.clone(), path.clone()));
                if been.len() > usize::from(page.redirects) {
                    return Err(stated(format!(
                        "redirects more than {} times",
                        page.redirects
                    )));
                }
                let next = follow(&location, scheme, &host, &path).map_err(stated)?;
                if been.contains(&next) {
                    return Err(stated("redirects in a circle".to_owned()));
                }
                (host, path) = next;
            }
        }
        Ok(Advice::NONE)
    }
}

/// The result of one request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Came {
    /// The page has the expected status and content.
    Good,
    /// The server redirects to this location, the value of its `Location` header.
    Redirect(String),
}

/// A server's address in the form of the `Host` header.
fn authority(server: SocketAddr, scheme: &str) -> String {
    let usual = if scheme == "https" { 443 } else { 80 };
    match (server.port() == usual, server.ip()) {
        (false, _) => server.to_string(),
        (true, IpAddr::V4(ip)) => ip.to_string(),
        (true, IpAddr::V6(ip)) => format!("[{ip}]"),
    }
}

/// The host and the path of a redirect. The next request goes to the same server, even if the
/// redirect contains another host.
pub(super) fn follow(
    location: &str,
    scheme: &str,
    host: &str,
    path: &str,
) -> Result<(String, String), String> {
    let wrong = || format!("redirects to {}", quoted(location.as_bytes()));
    let location = location.split('#').next().unwrap_or_default();
    if location.starts_with('/') && !location.starts_with("//") {
        return match is_path(location) {
            true => Ok((host.to_owned(), location.to_owned())),
            false => Err(wrong()),
        };
    }
    if let Some(rest) = location.strip_prefix("//") {
        return follow(&format!("{scheme}://{rest}"), scheme, host, path);
    }
    if !location.contains("://") {
        let first = location.split(['/', '?', '#']).next().unwrap_or_default();
        if first.contains(':') {
            return Err(wrong());
        }
        // Relative to the page with the redirect.
        let at = path.split('?').next().unwrap_or_default();
        let base = at.rfind('/').map_or("/", |end| &at[..=end]);
        let beside = format!("{base}{location}");
        return match is_path(&beside) && !location.is_empty() {
            true => Ok((host.to_owned(), beside)),
            false => Err(wrong()),
        };
    }
    let uri: Uri = location.parse().map_err(|_| wrong())?;
    if uri.scheme_str() != Some(scheme) {
        return Err(format!("{}, which is not {scheme}", wrong()));
    }
    let host = uri.authority().ok_or_else(wrong)?.to_string();
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    // A query may follow the host directly.
    let slash = if path.starts_with('/') { "" } else { "/" };
    Ok((host, format!("{slash}{path}")))
}

/// Requests a page that must match a pattern and may redirect once, for the fuzzer.
pub(super) async fn exchange_page<S>(stream: S, host: &str, path: &str) -> Result<Came, String>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let page = Page {
        regex: regex::bytes::Regex::new("ok$").ok().map(Pattern),
        redirects: 1,
        ..Page::default()
    };
    exchange(stream, &page, host, path).await
}

async fn exchange<S>(stream: S, page: &Page, host: &str, path: &str) -> Result<Came, String>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let request = Request::builder()
        .method(page.method.clone())
        .uri(path)
        .header(HOST, host)
        .header(USER_AGENT, concat!("lvsd/", env!("CARGO_PKG_VERSION")))
        .header(CONNECTION, "close")
        .body(Empty::<Bytes>::new())
        .map_err(|error| format!("cannot be requested: {error}"))?;
    let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
        .max_buf_size(HEAD_MAX)
        .max_headers(HEADERS_MAX)
        // Old servers fold lines and write whitespace before a colon; clients accept both.
        .allow_obsolete_multiline_headers_in_responses(true)
        .allow_spaces_after_header_name_in_responses(true)
        .ignore_invalid_headers_in_responses(true)
        .handshake(TokioIo::new(Eager::new(stream)))
        .await
        .map_err(|error| in_words(&error))?;
    let talk = async {
        let sent = sender.send_request(request).await;
        judge(page, sent.map_err(|error| in_words(&error))?).await
    };
    // The request itself returns the error that ends the connection.
    let driven = pin!(async {
        let _ = connection.await;
        std::future::pending::<()>().await;
    });
    tokio::select! {
        came = talk => came,
        () = driven => Err("is not served: the connection has ended".to_owned()),
    }
}

async fn judge(page: &Page, response: Response<Incoming>) -> Result<Came, String> {
    let status = response.status();
    if !page.takes(status.as_u16()) {
        if page.redirects > 0 && status.is_redirection() {
            let location = response.headers().get(LOCATION);
            let location = location.and_then(|value| value.to_str().ok());
            let location = location.ok_or("redirects without a valid `Location`")?;
            return Ok(Came::Redirect(location.to_owned()));
        }
        return Err(format!("has status {status}"));
    }
    if page.body.is_none() && page.regex.is_none() {
        return Ok(Came::Good);
    }
    let mut stream = response.into_body();
    let mut body = Vec::new();
    loop {
        let seen = body.len();
        let whole = match stream.frame().await {
            Some(Ok(frame)) => {
                let room = BODY_MAX - body.len();
                if let Some(data) = frame.data_ref() {
                    body.extend_from_slice(&data[..data.len().min(room)]);
                }
                body.len() == BODY_MAX
            }
            Some(Err(error)) => return Err(in_words(&error)),
            None => true,
        };
        if let Some(judged) = page.judge(&body, seen, whole) {
            return judged
                .map(|()| Came::Good)
                .map_err(|why| format!("has a body {why}"));
        }
    }
}

/// An HTTP error and its cause, as text.
fn in_words(error: &hyper::Error) -> String {
    if error.is_parse_too_large() {
        return format!(
            "has a header with more than {HEADERS_MAX} fields or {} KiB",
            HEAD_MAX >> 10
        );
    }
    let cause = std::error::Error::source(error);
    let cause = cause.map(|cause| format!(": {cause}")).unwrap_or_default();
    format!("is not served: {error}{cause}")
}

impl ProbeKind for Http {
    const NAME: &'static str = "http";
    const KEYS: &'static [&'static str] = &Self::OWN;
    const VIA: Option<Protocol> = Some(Protocol::TCP);

    fn parse(keys: &mut Keys<'_>) -> Option<Self> {
        Self::read(keys)
    }

    fn port(&mut self) -> Option<&mut Port> {
        Some(&mut self.port)
    }

    fn target(&self, server: SocketAddr) -> String {
        format!("http://{}", self.address(server))
    }

    async fn run(&self, asked: &Asked<'_>) -> Result<Advice, ProbeError> {
        let target = self.address(asked.server);
        self.ask("http", asked, || asked.connect(target)).await
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::health::probe::hostile::{
        answering, endless_reply, probe, replying, serving, survives,
    };

    const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\nall is well";

    #[test]
    fn http_status_ranges_are_parsed_or_refused() {
        assert_eq!(status("200"), Some(vec![(200, 200)]));
        assert_eq!(status("200-299, 301"), Some(vec![(200, 299), (301, 301)]));
        for wrong in ["", "ok", "99", "600", "299-200", "200-", "200,,201"] {
            assert_eq!(status(wrong), None, "{wrong}");
        }
    }

    #[tokio::test]
    async fn http_probe_skips_invalid_header_field_and_refuses_too_many_fields() {
        let server =
            replying(b"HTTP/1.1 200 OK\r\nX Odd Name: 1\r\nContent-Length: 11\r\n\r\nall is well")
                .await;
        let done = probe("{ type = \"http\", body = \"well\" }", server).await;
        assert!(done.is_ok(), "{done:?}");
        let mut many = b"HTTP/1.1 200 OK\r\n".to_vec();
        for _ in 0..=HEADERS_MAX {
            many.extend(b"A: b\r\n");
        }
        many.extend(b"\r\n");
        let server = replying(many.leak()).await;
        let done = probe("{ type = \"http\" }", server).await;
        let reason = format!("{:?}", done.err());
        assert!(
            reason.contains("more than 128 fields"),
            "no `more than 128 fields` in {reason}"
        );
    }

    #[tokio::test]
    async fn http_probe_succeeds_only_if_status_text_and_pattern_match() {
        let server = replying(OK).await;
        for (more, good) in [
            ("", true),
            (", status = 200", true),
            (", status = \"201-299\"", false),
            (", body = \"well\"", true),
            (", body = \"ill\"", false),
            (", regex = '^all \\w+ well$'", true),
            (", regex = '^well'", false),
            (", body = \"all\", regex = 'well'", true),
            (", body = \"ill\", regex = 'well'", false),
            (", method = \"HEAD\"", true),
            (
                ", urls = [{ path = \"/a\" }, { path = \"/b\", body = \"well\" }]",
                true,
            ),
            (
                ", urls = [{ path = \"/a\" }, { path = \"/b\", status = 404 }]",
                false,
            ),
        ] {
            let result = probe(&format!("{{ type = \"http\"{more} }}"), server).await;
            assert_eq!(result.is_ok(), good, "{more}: {result:?}");
        }
    }

    #[tokio::test]
    async fn http_probe_follows_redirects_up_to_limit_at_the_checked_server() {
        let server = serving(|mut stream| async move {
            let mut request = [0; 2048];
            let n = stream.read(&mut request).await.unwrap_or(0);
            let request = String::from_utf8_lossy(&request[..n]).into_owned();
            let path = request.split(' ').nth(1).unwrap_or_default();
            let location = match path {
                "/a" => "/b?x=1",
                "/b?x=1" => "http://other.example/c",
                "/round" => "/round",
                "/long" => "/longer",
                "/away" => "https://other.example/",
                "/worse" => "ftp:",
                _ => "",
            };
            let status = match location {
                "" if request.contains("host: other.example\r\n") => "200 OK",
                "" => "404 Not Found",
                _ => "302 Found",
            };
            let answer =
                format!("HTTP/1.1 {status}\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n");
            let _ = stream.write_all(answer.as_bytes()).await;
        })
        .await;
        let ask = async |path: &str, redirects: u8| {
            let check =
                format!("{{ type = \"http\", path = \"{path}\", redirects = {redirects} }}");
            probe(&check, server).await
        };
        assert!(ask("/a", 2).await.is_ok());
        for (path, redirects, why) in [
            ("/a", 1, "more than 1 times"),
            ("/a", 0, "status 302"),
            ("/round", 5, "circle"),
            ("/long", 1, "404"),
            ("/away", 5, "not http"),
            ("/worse", 5, "redirects to \\\"ftp:\\\""),
        ] {
            let output = format!("{:?}", ask(path, redirects).await);
            assert!(output.contains(why), "{path}: no {why:?} in {output}");
        }
    }

    #[tokio::test]
    async fn http_probe_ends_in_time_for_hostile_or_endless_answer() {
        survives("{ type = \"http\", body = \"well\" }", OK).await;
        survives("{ type = \"http\", regex = 'well$' }", OK).await;
        // A header and a body without an end, and invalid headers.
        let quick = "timeout = \"250ms\", interval = \"1s\" }";
        for (first, then) in [
            (
                &b"HTTP/1.1 200 OK\r\n"[..],
                &b"X-A: aaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n"[..],
            ),
            (b"HTTP/1.1 200 OK\r\nX-A: ", b"aaaaaaaaaaaaaaa"),
            (b"HTTP/1.1 200 OK\r\n\r\n", b"no end of it; "),
            (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
                b"1\r\na\r\n",
            ),
            (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
            (b"HTTP/1.1 999999 OK\r\n", b"\r\n"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", b"a"),
            (
                b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n",
                b"a",
            ),
        ] {
            let server = endless_reply(first, then).await;
            let check = format!("{{ type = \"http\", body = \"well\", {quick}");
            let result = probe(&check, server).await;
            assert!(
                matches!(result, Err(ProbeError::Server(_))),
                "{first:?}, {then:?}: {result:?}"
            );
        }
        // The check reads a limited part of a page, and the page may be endless.
        let server = endless_reply(b"HTTP/1.1 200 OK\r\n\r\nall is well", b"and on").await;
        assert!(
            probe("{ type = \"http\", body = \"well\" }", server)
                .await
                .is_ok()
        );
        assert!(
            probe("{ type = \"http\", regex = 'well' }", server)
                .await
                .is_ok()
        );
        let output = probe("{ type = \"http\", regex = 'ill' }", server).await;
        assert!(
            format!("{output:?}").contains("does not match"),
            "{output:?}"
        );
    }

    #[tokio::test]
    async fn http_probe_accepts_answer_sent_before_request() {
        // Like xinetd, a shell loop around nc, and a program with a fixed answer, the server closes
        // the connection.
        let reset = |stream: tokio::net::TcpStream| {
            let _ = stream.set_zero_linger();
        };
        let at_once = serving(|mut stream| async move {
            let _ = stream.write_all(OK).await;
        })
        .await;
        let then_reads = answering(OK).await;
        let without_length = serving(move |mut stream| async move {
            let _ = stream
                .write_all(b"HTTP/1.0 200 OK\r\n\r\nall is well")
                .await;
            // The unread request turns the close into a reset.
            let _ = stream.readable().await;
            tokio::task::yield_now().await;
            reset(stream);
        })
        .await;
        for (name, server) in [
            ("at once", at_once),
            ("then reads", then_reads),
            ("without a length", without_length),
        ] {
            for _ in 0..40 {
                for more in ["", ", body = \"well\"", ", regex = 'well$'"] {
                    let result = probe(&format!("{{ type = \"http\"{more} }}"), server).await;
                    assert_eq!(result, Ok(Advice::NONE), "{name}{more}");
                }
            }
        }
    }

    #[tokio::test]
    async fn http_probe_fails_if_answer_is_cut_short() {
        let short = answering(b"HTTP/1.1 200 OK\r\nContent-Length: 800\r\n\r\nall is").await;
        let chunk = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\nall is";
        let chunked = answering(chunk).await;
        let head = answering(b"HTTP/1.1 200 OK\r\nContent-").await;
        for (name, server) in [("length", short), ("chunk", chunked), ("head", head)] {
            let result = probe("{ type = \"http\", body = \"well\" }", server).await;
            assert!(
                matches!(result, Err(ProbeError::Server(_))),
                "{name}: {result:?}"
            );
        }
    }

    #[tokio::test]
    async fn http_probe_accepts_folded_header_lines_and_whitespace_before_colon() {
        for lines in [
            "X-A: one\r\n two",
            "X-A: one\r\n\ttwo\r\n  three",
            "X-A:\r\n one",
            "X-A : one",
            "X-A\t: one",
            "X-A : one\r\n two",
        ] {
            for length in [
                "Content-Length: 11",
                "Content-Length : 11",
                "Content-Length:\r\n 11",
            ] {
                let answer = format!("HTTP/1.1 200 OK\r\n{lines}\r\n{length}\r\n\r\nall is well");
                let server = replying(answer.clone().leak().as_bytes()).await;
                let result = probe("{ type = \"http\", body = \"well\" }", server).await;
                assert_eq!(result, Ok(Advice::NONE), "{answer:?}");
            }
        }
    }

    #[test]
    fn http_redirect_target_is_resolved_or_refused() {
        let at = |location| follow(location, "http", "a", "/x/y?z");
        let to = |host: &str, path: &str| Ok((host.to_owned(), path.to_owned()));
        assert_eq!(at("/b"), to("a", "/b"));
        assert_eq!(at("b"), to("a", "/x/b"));
        assert_eq!(at("?b"), to("a", "/x/?b"));
        assert_eq!(at("//b/c"), to("b", "/c"));
        assert_eq!(at("http://b"), to("b", "/"));
        assert_eq!(at("http://b?c=/"), to("b", "/?c=/"));
        for wrong in ["", "https://b/", "http://", "/\u{7f}", "http:// /", "///"] {
            assert!(at(wrong).is_err(), "{wrong}");
        }
    }
}
