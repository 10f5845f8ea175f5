//! Metrics for Prometheus, JSON over HTTP, and the dashboard.
//!
//! ```text
//!            TCP ([api] listen)            the daemon's own socket
//!                    │                                │
//!              http: limits, headers ◀────────────────┘
//!                    │
//!                 routes ──▶ metrics, overview, openapi, dashboard
//!                    │
//!               Api::snapshot ── at most twice a second ──▶ the daemon's loop
//! ```
//!
//! The answers show the daemon's own state. The daemon compares the dataplane with this state every
//! two seconds, however many requests arrive. A separate thread serves TCP, so that its clients
//! cannot delay checks or the dataplane.

mod causes;
pub mod history;
mod host;
pub mod http;
pub mod metrics;
pub mod overview;
pub mod pages;
mod peer;
mod places;
mod processes;
mod routes;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use lvs_api::daemon::Event;
use lvs_process::admission::{Place, Places};
use lvs_sys::lock;
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::channels::{Answer, ChangeRequest, Events, Request, Snapshot, request_change, unix_ms};
use crate::config;
use crate::counters::Counters;
use crate::token::{self, Named, Token};
use history::History;
use pages::{Own, Pages};
pub(crate) use peer::{FULL, Peer};
use places::ConnectionLimits;
pub(crate) use places::{ConnectionSlot, Holder};

/// Maximum age of a snapshot that is sent to further clients.
const FRESH: Duration = Duration::from_millis(500);
/// Longest time that the daemon's main loop may take to return its status.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum number of events that are stored for later requests.
const EVENTS_MAX: usize = 1000;
/// Shortest interval between two log lines about wrong tokens.
const WRONG_TOKENS: Duration = Duration::from_secs(60);
/// Pause between two attempts to listen on an address.
const AGAIN: Duration = Duration::from_secs(5);

/// The HTTP API.
#[derive(Debug)]
pub struct Api {
    requests: mpsc::Sender<Request>,
    events: broadcast::Sender<Arc<Event>>,
    settings: watch::Sender<config::Api>,
    places: ConnectionLimits,
    local_places: Arc<Places>,
    seen: tokio::sync::Mutex<Option<(Instant, Arc<Snapshot>)>>,
    pages: Pages,
    own: Own,
    /// Start time of this daemon in milliseconds since 1970; event numbers count from this start.
    started_ms: u64,
    tokens: Mutex<Vec<(Named, Token)>>,
    past: Mutex<VecDeque<Arc<Event>>>,
    history: Mutex<History>,
    counters: Arc<Counters>,
    /// Time of the last log line about wrong tokens, and number of wrong tokens since.
    wrong_tokens: Mutex<(Option<Instant>, u64)>,
}

impl Api {
    /// An API that sends requests to `requests`, streams `events`, and shows the counters of
    /// `counters`.
    pub fn new(requests: mpsc::Sender<Request>, events: &Events, counters: Arc<Counters>) -> Self {
        Self {
            requests,
            events: events.source(),
            settings: watch::Sender::default(),
            places: ConnectionLimits::default(),
            local_places: Arc::default(),
            seen: tokio::sync::Mutex::default(),
            pages: Pages::default(),
            own: Own::default(),
            started_ms: unix_ms(),
            tokens: Mutex::default(),
            past: Mutex::default(),
            history: Mutex::default(),
            counters,
            wrong_tokens: Mutex::default(),
        }
    }

    /// The channel on which the daemon sends `[api]` of its configuration.
    pub fn settings(&self) -> watch::Sender<config::Api> {
        self.settings.clone()
    }

    fn config(&self) -> config::Api {
        self.settings.borrow().clone()
    }

    /// Reserves a slot for a TCP connection or an event stream. If no slot is free, counts this
    /// refusal, and returns `None`.
    pub(crate) fn place(&self, holder: Holder) -> Option<ConnectionSlot> {
        self.count_full(self.places.take(holder))
    }

    /// Reserves a slot for a connection over the Unix socket; `reader` is the user ID of a client
    /// that may only read, and `None` for a client that may make changes. If no slot is free,
    /// counts this refusal, and returns `None`.
    pub(crate) fn local_place(&self, reader: Option<u32>) -> Option<Place> {
        self.count_full(self.local_places.take(reader))
    }

    fn count_full<T>(&self, place: Option<T>) -> Option<T> {
        if place.is_none() {
            self.counters.no_place();
        }
        place
    }

    /// Returns the present status, or a stored one that is younger than [`FRESH`].
    ///
    /// # Errors
    /// The main loop does not return its status; the text is the reason.
    async fn snapshot(&self) -> Result<Arc<Snapshot>, String> {
        let mut seen = self.seen.lock().await;
        if let Some((at, snapshot)) = seen.as_ref()
            && at.elapsed() < FRESH
        {
            return Ok(Arc::clone(snapshot));
        }
        let (reply, snapshot) = oneshot::channel();
        let answered = async {
            self.requests.send(Request::Snapshot(reply)).await.ok()?;
            snapshot.await.ok()
        };
        match tokio::time::timeout(PATIENCE, answered).await {
            Ok(Some(snapshot)) => {
                let snapshot = Arc::new(snapshot);
                *seen = Some((Instant::now(), Arc::clone(&snapshot)));
                Ok(snapshot)
            }
            Ok(None) => {
                Err("lvsd is stopping; repeat the request when it is running again".to_owned())
            }
            Err(_) => Err(format!(
                "lvsd has not answered within {PATIENCE:?}: the log of lvsd names the cause"
            )),
        }
    }

    /// Requests a change from the daemon, and discards older snapshots.
    pub(crate) async fn change(&self, change: ChangeRequest, who: String) -> Answer {
        let answer = request_change(&self.requests, change, who).await;
        *self.seen.lock().await = None;
        answer
    }

    fn tokens(&self) -> MutexGuard<'_, Vec<(Named, Token)>> {
        lock(&self.tokens)
    }

    /// Logs that `source` has sent a wrong token, at most once a minute. The line contains the
    /// number of wrong tokens since the last line.
    fn log_wrong_token(&self, source: IpAddr) {
        let mut reported = lock(&self.wrong_tokens);
        let (last, others) = &mut *reported;
        if last.is_some_and(|last| last.elapsed() < WRONG_TOKENS) {
            *others += 1;
            return;
        }
        match std::mem::take(others) {
            0 => tracing::warn!("{source} has sent a wrong token"),
            n => tracing::warn!(
                "{source} has sent a wrong token; {n} other requests since the last such message have done so, too"
            ),
        }
        *last = Some(Instant::now());
    }

    /// Returns the status in JSON. Clients that request it at the same time share one copy.
    ///
    /// # Errors
    /// As [`snapshot`](Self::snapshot).
    pub(crate) async fn status(&self) -> Result<Bytes, String> {
        let snapshot = self.snapshot().await?;
        Ok(self.pages.status(&snapshot).await)
    }

    fn past(&self) -> MutexGuard<'_, VecDeque<Arc<Event>>> {
        lock(&self.past)
    }

    fn history(&self) -> MutexGuard<'_, History> {
        lock(&self.history)
    }

    /// Reads all tokens from their files again, and logs errors. A token whose file has become
    /// unusable stays valid, unless another token now equals it.
    fn read_tokens(&self) {
        let before = self.tokens().clone();
        let (tokens, errors) = token::read_all(self.config().tokens, &before);
        for why in errors {
            tracing::error!("{why}");
        }
        *self.tokens() = tokens;
    }
}

/// Starts a thread that serves HTTP over TCP, and that records events and the history, until lvsd
/// exits.
pub fn start(api: &Arc<Api>, events: &Events) {
    let events = events.listen();
    let work = {
        let api = Arc::clone(api);
        move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .max_blocking_threads(3)
                .build();
            match runtime {
                Ok(runtime) => runtime.block_on(run(api, events)),
                Err(error) => {
                    tracing::error!(
                        "metrics and API disabled: cannot start the runtime of the thread lvsd-api: {error}; restart lvsd"
                    );
                }
            }
        }
    };
    let thread = std::thread::Builder::new()
        .name("lvsd-api".to_owned())
        .spawn(work);
    if let Err(error) = &thread {
        tracing::error!(
            "metrics and API disabled: cannot start the thread lvsd-api: {error}; restart lvsd"
        );
    }
}

async fn run(api: Arc<Api>, events: broadcast::Receiver<Arc<Event>>) {
    let mut settings = api.settings.subscribe();
    // The daemon may have sent the settings before this thread ran.
    settings.mark_changed();
    let mut listening: Vec<(SocketAddr, tokio::task::AbortHandle)> = Vec::new();
    tokio::spawn(remember(Arc::clone(&api), events));
    tokio::spawn(sample(Arc::clone(&api)));
    while settings.changed().await.is_ok() {
        let config = settings.borrow_and_update().clone();
        api.read_tokens();
        listening.retain(|(address, task)| {
            let stays = config.listen.contains(address);
            if !stays {
                task.abort();
            }
            stays
        });
        for address in config.listen {
            if listening.iter().all(|(known, _)| *known != address) {
                let task = listen(address, Arc::clone(&api));
                listening.push((address, tokio::spawn(task).abort_handle()));
            }
        }
    }
}

/// Listens on an address, and serves the clients that connect. If the address cannot be used, logs
/// the error once, and tries again until it can.
async fn listen(address: SocketAddr, api: Arc<Api>) {
    let mut logged = false;
    loop {
        match http::bind(address) {
            Ok(listener) => {
                tracing::info!("lvsd serves metrics and API at http://{address}/");
                http::accept(listener, &api).await;
            }
            Err(error) if !logged => {
                logged = true;
                let fix = match error.kind() {
                    std::io::ErrorKind::AddrInUse => {
                        "another process listens there: `ss -Hltnp` shows it; set another address in [api]"
                    }
                    std::io::ErrorKind::AddrNotAvailable => {
                        "this host does not have the address (a VIP that the dataplane owns is not an address of the host); use another address in [api]"
                    }
                    std::io::ErrorKind::PermissionDenied => {
                        "ports below 1024 need CAP_NET_BIND_SERVICE; use a higher one in [api]"
                    }
                    _ => "use another address or port in [api]",
                };
                tracing::error!("cannot serve metrics and API at {address}: {error}; {fix}");
            }
            Err(_) => {}
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// Stores the last [`EVENTS_MAX`] events until lvsd exits. Events that arrive faster than this task
/// runs are lost.
async fn remember(api: Arc<Api>, mut events: broadcast::Receiver<Arc<Event>>) {
    loop {
        match events.recv().await {
            Ok(event) => {
                let mut past = api.past();
                if past.len() >= EVENTS_MAX {
                    past.pop_front();
                }
                past.push_back(event);
            }
            Err(broadcast::error::RecvError::Lagged(_)) => {}
            Err(broadcast::error::RecvError::Closed) => return,
        }
    }
}

/// Records a point of the history every 15 seconds while lvsd listens on TCP.
async fn sample(api: Arc<Api>) {
    let mut next = Instant::now();
    loop {
        tokio::time::sleep_until(next).await;
        next = Instant::now() + Duration::from_secs(1);
        if api.config().listen.is_empty() {
            continue;
        }
        let taken = match api.snapshot().await {
            Ok(snapshot) => api
                .history()
                .take(&snapshot, crate::clock::Now::read().boot),
            Err(_) => false,
        };
        if taken {
            next = next - Duration::from_secs(1) + history::STEP;
        }
    }
}
