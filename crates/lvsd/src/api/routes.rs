//! The routes: the answer to each request.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Either, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response, StatusCode};
use lvs_api::daemon::{AdminSpec, Event, MaintenanceSpec};
use serde::{Deserialize, Serialize};

use super::peer::{Deadline, FULL, Peer};
use super::stream::{self, Stream};
use super::{Api, Holder, host, metrics, overview};
use crate::channels::{ChangeRequest, Snapshot};
use crate::clock::Now;
use crate::token::{self, Named, Role};

/// Maximum length of the body of a request in bytes.
const BODY_MAX: usize = 16 << 10;
/// Delay before a wrong token is refused.
const WRONG_TOKEN: Duration = Duration::from_millis(500);

/// The content security policy: a page may load scripts, styles and images only from lvsd (images
/// also from `data:` URLs), and may connect only to lvsd.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN_METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The OpenAPI description of all paths below `/v1`.
pub(super) const OPENAPI: &str = include_str!("openapi.json");

/// The files of the dashboard: path, media type and content of each.
const ASSETS: [(&str, &str, &[u8]); 6] = [
    (
        "/",
        "text/html; charset=utf-8",
        include_bytes!("dashboard/index.html"),
    ),
    (
        "/dashboard.js",
        "text/javascript; charset=utf-8",
        include_bytes!("dashboard/dashboard.js"),
    ),
    (
        "/dashboard.css",
        "text/css; charset=utf-8",
        include_bytes!("dashboard/dashboard.css"),
    ),
    (
        "/uPlot.js",
        "text/javascript; charset=utf-8",
        include_bytes!("dashboard/uPlot.iife.min.js"),
    ),
    (
        "/uPlot.css",
        "text/css; charset=utf-8",
        include_bytes!("dashboard/uPlot.min.css"),
    ),
    (
        "/uPlot-LICENSE.txt",
        "text/plain; charset=utf-8",
        include_bytes!("dashboard/uPlot-LICENSE.txt"),
    ),
];

type Reply = Response<Either<Full<Bytes>, Stream>>;

/// The HTTP status of a refusal, and its reason with a fix.
#[derive(Debug)]
struct Refusal(StatusCode, String);

impl Refusal {
    fn new(code: StatusCode, why: impl Into<String>) -> Self {
        Self(code, why.into())
    }

    fn unavailable(why: String) -> Self {
        Self(StatusCode::SERVICE_UNAVAILABLE, why)
    }
}

#[derive(Serialize)]
#[cfg_attr(test, derive(Deserialize))]
struct Error {
    error: Message,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(Deserialize))]
struct Message {
    message: String,
}

/// The name of a client for events and the log, and its rights.
struct Actor {
    who: String,
    role: Role,
}

/// The rights of a client, as the path `/v1/whoami` returns them.
#[derive(Serialize)]
#[cfg_attr(test, derive(Deserialize))]
pub(super) struct Whoami {
    /// The name that is recorded for a change by this client. If the change contains the name of an
    /// operator, the record has that name, too.
    who: String,
    /// The role of the client.
    role: Role,
    /// Whether the client may change servers.
    may_change: bool,
    /// Whether the client needs a token, or another token, for changes.
    needs_token: bool,
    /// The reason why the client may not make changes, and the fix; empty if it may.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    why: String,
}

/// The stored events, as the path `/v1/events` returns them.
#[derive(Serialize)]
#[cfg_attr(test, derive(Deserialize))]
pub(super) struct Past {
    /// Start of the daemon that has numbered the events, in milliseconds since 1970.
    started_ms: u64,
    /// The events in their order.
    events: Vec<Event>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Reload {
    #[serde(default)]
    force: bool,
}

/// Answers one request. Adds headers for the security of browsers, and a header that prevents
/// caching, to each answer.
pub(super) async fn answer(api: &Arc<Api>, request: Request<Incoming>, peer: &Peer) -> Reply {
    let (head, body) = request.into_parts();
    let mut reply = match route(api, &head, body, peer).await {
        Ok(reply) => reply,
        Err(Refusal(code, message)) => {
            let error = Error {
                error: Message { message },
            };
            let mut reply = bytes(JSON, json_bytes(&error));
            *reply.status_mut() = code;
            if code == StatusCode::UNAUTHORIZED {
                set(&mut reply, header::WWW_AUTHENTICATE, "Bearer");
            }
            if code == StatusCode::METHOD_NOT_ALLOWED {
                let allow = if is_change(head.uri.path()) {
                    "POST"
                } else {
                    "GET, HEAD"
                };
                set(&mut reply, header::ALLOW, allow);
            }
            reply
        }
    };
    set(&mut reply, header::CONTENT_SECURITY_POLICY, POLICY);
    set(&mut reply, header::X_CONTENT_TYPE_OPTIONS, "nosniff");
    set(&mut reply, header::REFERRER_POLICY, "no-referrer");
    set(&mut reply, header::CACHE_CONTROL, "no-store");
    reply
}

fn set(reply: &mut Reply, name: HeaderName, value: &'static str) {
    reply
        .headers_mut()
        .insert(name, HeaderValue::from_static(value));
}

fn bytes(kind: &'static str, content: impl Into<Bytes>) -> Reply {
    let mut reply = Response::new(Either::Left(Full::new(content.into())));
    set(&mut reply, header::CONTENT_TYPE, kind);
    reply
}

fn json_bytes(value: &impl Serialize) -> Vec<u8> {
    let mut bytes = serde_json::to_vec(value).unwrap_or_default();
    bytes.push(b'\n');
    bytes
}

fn json(value: &impl Serialize) -> Reply {
    bytes(JSON, json_bytes(value))
}

/// Makes an answer for a single client, which counts towards the memory limit of these answers.
fn own(api: &Api, content: Vec<u8>) -> Result<Reply, Refusal> {
    let content = api.own.hold(content).ok_or_else(|| {
        Refusal::unavailable(
            "the answers that wait for slow clients have reached their maximum size: close connections of slow clients, or try again later"
                .to_owned(),
        )
    })?;
    Ok(bytes(JSON, content))
}

fn is_change(path: &str) -> bool {
    matches!(path, "/v1/admin" | "/v1/maintenance" | "/v1/reload")
}

async fn route(
    api: &Arc<Api>,
    head: &Parts,
    body: Incoming,
    peer: &Peer,
) -> Result<Reply, Refusal> {
    if let Peer::Tcp(_) = peer {
        answers_to(api, head)?;
    }
    let path = head.uri.path();
    let changes = is_change(path);
    let fits = match head.method {
        Method::GET | Method::HEAD => !changes,
        Method::POST => changes,
        _ => false,
    };
    if !fits && (changes || is_known(path)) {
        let method = if changes { "POST" } else { "GET" };
        return Err(Refusal::new(
            StatusCode::METHOD_NOT_ALLOWED,
            format!("{path} accepts only {method}; /v1/openapi.json describes this path"),
        ));
    }
    if changes {
        let actor = identify(api, head, peer).await?;
        actor.permits(match path {
            "/v1/admin" => Role::Drain,
            _ => Role::Admin,
        })?;
        let body = read(body).await?;
        return change(api, path, &body, actor).await;
    }
    if api.config().dashboard
        && let Some((_, kind, content)) = ASSETS.iter().find(|(known, ..)| *known == path)
    {
        return Ok(bytes(kind, *content));
    }
    show(api, head, peer).await
}

/// Refuses a request whose host name is not this director's.
fn answers_to(api: &Api, head: &Parts) -> Result<(), Refusal> {
    host::check(head, &api.config().allowed_hosts).map_err(|name| {
        let name: String = name.chars().take(100).collect();
        Refusal::new(
            StatusCode::MISDIRECTED_REQUEST,
            format!(
                "this lvsd does not answer to the name `{name}`: use an IP address, or add the name to allowed_hosts in [api]"
            ),
        )
    })
}

fn is_known(path: &str) -> bool {
    path == "/metrics"
        || path.starts_with("/v1/")
        || ASSETS.iter().any(|(known, ..)| *known == path)
}

/// Answers a read-only request.
async fn show(api: &Arc<Api>, head: &Parts, peer: &Peer) -> Result<Reply, Refusal> {
    let path = head.uri.path();
    let snapshot = || async { api.snapshot().await.map_err(Refusal::unavailable) };
    Ok(match path {
        "/metrics" => {
            let snapshot = snapshot().await?;
            let counts = api.counters.get();
            if accepts(head, "application/openmetrics-text") {
                let write = |snapshot| metrics::open_metrics(snapshot, counts).into_bytes();
                bytes(OPEN_METRICS, api.pages.metrics.of(&snapshot, write).await)
            } else {
                let write = |snapshot| {
                    metrics::plain(&metrics::open_metrics(snapshot, counts)).into_bytes()
                };
                bytes(
                    PLAIN_METRICS,
                    api.pages.plain_metrics.of(&snapshot, write).await,
                )
            }
        }
        "/v1/status" => bytes(JSON, api.status().await.map_err(Refusal::unavailable)?),
        "/v1/overview" => {
            let write = |snapshot: Arc<Snapshot>| json_bytes(&overview::overview(&snapshot));
            bytes(JSON, api.pages.overview.of(&snapshot().await?, write).await)
        }
        "/v1/drops" => json(&snapshot().await?.found.seen.reasons),
        "/v1/health" => {
            let snapshot = snapshot().await?;
            if !snapshot.status.dataplane.connected && !snapshot.status.dataplane.idle {
                return Err(Refusal::unavailable(
                    "no dataplane answers; see the log of lvsd for the reason".to_owned(),
                ));
            }
            json(&serde_json::json!({ "dataplane": snapshot.status.dataplane.connected }))
        }
        "/v1/events" if accepts(head, EVENTS) => events(api, head, peer)?,
        "/v1/events" => {
            let after = number(head, "after")?;
            let past = api.past();
            let events = past.iter().filter(|event| event.seq > after);
            let body = json_bytes(&Past {
                started_ms: api.started_ms,
                events: events.map(|event| (**event).clone()).collect(),
            });
            drop(past);
            own(api, body)?
        }
        "/v1/history" => {
            let service = parameter(head, "service")?;
            let curves = api.history().curves(service.as_deref(), Now::read());
            let curves = curves.ok_or_else(|| match service {
                Some(name) => no_service(&name),
                None => Refusal::unavailable(
                    "lvsd has recorded no history yet; repeat the request later".to_owned(),
                ),
            })?;
            own(api, json_bytes(&curves))?
        }
        "/v1/whoami" => json(&whoami(api, head, peer).await?),
        "/v1/openapi.json" => bytes(JSON, OPENAPI),
        _ => {
            let name = path.strip_prefix("/v1/services/");
            let name = name.filter(|name| !name.is_empty() && !name.contains('/'));
            let name = name.ok_or_else(|| {
                Refusal::new(
                    StatusCode::NOT_FOUND,
                    "this path does not exist; see /metrics, /v1/overview, and /v1/openapi.json for the rest",
                )
            })?;
            let name = decode(name)?;
            let snapshot = snapshot().await?;
            let details = overview::details(&snapshot, &name);
            if details.is_empty() {
                return Err(no_service(&name));
            }
            own(api, json_bytes(&details))?
        }
    })
}

/// Whether the client accepts an answer of the media type `kind`.
fn accepts(head: &Parts, kind: &str) -> bool {
    let accept = head.headers.get(header::ACCEPT);
    let accept = accept.and_then(|value| value.to_str().ok());
    accept.is_some_and(|kinds| kinds.contains(kind))
}

/// Streams events from now on, without an end.
fn events(api: &Api, head: &Parts, peer: &Peer) -> Result<Reply, Refusal> {
    if parameter(head, "after")?.is_some() {
        return Err(Refusal::new(
            StatusCode::BAD_REQUEST,
            "a stream contains only events from now on: leave `after` out, or request JSON",
        ));
    }
    let place = match peer {
        Peer::Tcp(address) => Some(
            api.place(Holder::Stream(address.ip()))
                .ok_or_else(|| Refusal::unavailable(FULL.to_owned()))?,
        ),
        Peer::Local { .. } => None,
    };
    let deadline = head.extensions.get::<Deadline>();
    let deadline = deadline.ok_or_else(|| Refusal::unavailable("lvsd is stopping".to_owned()))?;
    let stream = stream::stream_events(api.events.subscribe(), deadline.clone(), place);
    let mut reply = Response::new(Either::Right(stream));
    set(&mut reply, header::CONTENT_TYPE, EVENTS);
    Ok(reply)
}

fn no_service(name: &str) -> Refusal {
    let name: String = name.chars().take(100).collect();
    Refusal::new(
        StatusCode::NOT_FOUND,
        format!("there is no service named `{name}`; /v1/overview lists the services"),
    )
}

impl Actor {
    /// Checks that the client has at least the role `needed`.
    fn permits(&self, needed: Role) -> Result<(), Refusal> {
        if self.role >= needed {
            return Ok(());
        }
        Err(Refusal::new(
            StatusCode::FORBIDDEN,
            format!(
                "{} has the role {}, this change needs the role {}: use another token, or change the role in [[api.token]]",
                self.who,
                self.role.word(),
                needed.word()
            ),
        ))
    }

    /// The name under which a change is recorded: the client's token or user id, and the
    /// operator's name from the request. `None` without an operator's name.
    fn sign(&self, operator: Option<String>) -> Option<String> {
        operator.map(|operator| format!("{} ({operator})", self.who))
    }
}

/// Returns the name and the role of a client. Over TCP, the token of the client decides; over the
/// Unix socket, a client with write access has the role `admin`. All other clients are refused.
async fn identify(api: &Api, head: &Parts, peer: &Peer) -> Result<Actor, Refusal> {
    let address = match peer {
        Peer::Local { denied: None, who } => {
            return Ok(Actor {
                who: who.clone(),
                role: Role::Admin,
            });
        }
        Peer::Local {
            denied: Some(why), ..
        } => return Err(Refusal::new(StatusCode::FORBIDDEN, why.clone())),
        Peer::Tcp(address) => address.ip().to_canonical(),
    };
    let given = head.headers.get(header::AUTHORIZATION);
    let given = given.and_then(|value| {
        let (scheme, token) = value.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(token)
    });
    let found = {
        let tokens = api.tokens();
        match given {
            _ if tokens.is_empty() => Err(Refusal::new(
                StatusCode::FORBIDDEN,
                match api.config().tokens.is_empty() {
                    true => {
                        "this lvsd accepts no changes over TCP: use its Unix socket (lvsadm, lvsd reload, curl --unix-socket), or add [[api.token]] to its file"
                    }
                    false => "no token of lvsd can be used; see its log for the reason and the fix",
                },
            )),
            None => Err(Refusal::new(
                StatusCode::UNAUTHORIZED,
                "changes over TCP need a token of [[api.token]]: send the header `Authorization: Bearer TOKEN`",
            )),
            Some(given) => Ok(token::owner(&tokens, given).cloned()),
        }
    };
    if let Some(Named { name, role, .. }) = found? {
        return Ok(Actor {
            who: format!("token {name}"),
            role,
        });
    }
    api.log_wrong_token(address);
    // A client that guesses tokens is delayed, and occupies one of few slots in the meantime.
    tokio::time::sleep(WRONG_TOKEN).await;
    Err(Refusal::new(
        StatusCode::UNAUTHORIZED,
        "the token differs from all tokens of [[api.token]]; lvsd reads their files at its start and with `lvsd reload`",
    ))
}

/// Returns the rights of the client. A refused token is an error; a missing token is not.
async fn whoami(api: &Api, head: &Parts, peer: &Peer) -> Result<Whoami, Refusal> {
    let wrong = head.headers.contains_key(header::AUTHORIZATION);
    match identify(api, head, peer).await {
        Ok(actor) => {
            let refused = actor.permits(Role::Drain).err();
            Ok(Whoami {
                role: actor.role,
                may_change: refused.is_none(),
                needs_token: refused.is_some(),
                why: refused.map(|refusal| refusal.1).unwrap_or_default(),
                who: actor.who,
            })
        }
        Err(refusal) if wrong => Err(refusal),
        Err(Refusal(status, why)) => Ok(Whoami {
            who: match peer {
                Peer::Local { who, .. } => who.clone(),
                Peer::Tcp(address) => format!("API {}", address.ip().to_canonical()),
            },
            role: Role::Read,
            may_change: false,
            needs_token: status == StatusCode::UNAUTHORIZED,
            why,
        }),
    }
}

async fn read(body: Incoming) -> Result<Bytes, Refusal> {
    let body = Limited::new(body, BODY_MAX).collect().await;
    let body = body.map_err(|_| {
        Refusal::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("the body is incomplete, or longer than {BODY_MAX} bytes"),
        )
    })?;
    Ok(body.to_bytes())
}

async fn change(api: &Arc<Api>, path: &str, body: &[u8], actor: Actor) -> Result<Reply, Refusal> {
    let bad = |error: String| {
        Refusal::new(
            StatusCode::BAD_REQUEST,
            format!("the body is not valid for {path}: {error}; /v1/openapi.json has examples"),
        )
    };
    // serde would accept an array as the fields of an object, in their order.
    if body
        .trim_ascii_start()
        .first()
        .is_some_and(|first| *first != b'{')
    {
        return Err(bad("it is not a JSON object".to_owned()));
    }
    let ask = match path {
        "/v1/admin" => {
            let mut spec: AdminSpec =
                serde_json::from_slice(body).map_err(|error| bad(error.to_string()))?;
            spec.who = actor.sign(spec.who);
            crate::admin::check_words(&spec).map_err(bad)?;
            ChangeRequest::Admin(spec)
        }
        "/v1/maintenance" => {
            let mut spec: MaintenanceSpec =
                serde_json::from_slice(body).map_err(|error| bad(error.to_string()))?;
            spec.who = actor.sign(spec.who);
            ChangeRequest::Maintenance(spec)
        }
        _ if body.is_empty() => ChangeRequest::Reload { force: false },
        _ => {
            let Reload { force } =
                serde_json::from_slice(body).map_err(|error| bad(error.to_string()))?;
            ChangeRequest::Reload { force }
        }
    };
    match api.change(ask, actor.who).await {
        Ok(result) => {
            let mut text = result.get().to_owned();
            text.push('\n');
            Ok(bytes(JSON, text))
        }
        Err(why) => Err(Refusal::new(StatusCode::CONFLICT, why)),
    }
}

/// The decoded value of a parameter in the query of the URL; `None` if the parameter is missing. An
/// invalid %-escape is an error.
fn parameter(head: &Parts, name: &str) -> Result<Option<String>, Refusal> {
    let query = head.uri.query().unwrap_or_default();
    let mut all = query.split('&').filter_map(|pair| pair.split_once('='));
    let value = all.find(|(key, _)| *key == name);
    value.map(|(_, value)| decode(value)).transpose()
}

fn number(head: &Parts, name: &str) -> Result<u64, Refusal> {
    let Some(text) = parameter(head, name)? else {
        return Ok(0);
    };
    text.parse().map_err(|_| {
        Refusal::new(
            StatusCode::BAD_REQUEST,
            format!("`{name}` is not a number; write {name}=0, or leave it out"),
        )
    })
}

/// Decodes the %-escapes of a text. An invalid escape, and a result that is not UTF-8, are errors.
fn decode(text: &str) -> Result<String, Refusal> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || char::from(rest.next()?).to_digit(16);
        let value = digit()
            .zip(digit())
            .and_then(|(high, low)| u8::try_from(high * 16 + low).ok());
        bytes.push(value.ok_or_else(|| bad_escape(text))?);
    }
    String::from_utf8(bytes).map_err(|_| bad_escape(text))
}

fn bad_escape(text: &str) -> Refusal {
    let text: String = text.chars().take(100).collect();
    Refusal::new(
        StatusCode::BAD_REQUEST,
        format!("`{text}` is not UTF-8 in %-escapes; escape the name as encodeURIComponent does"),
    )
}
