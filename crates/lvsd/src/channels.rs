//! The channels between the daemon's loop and its clients: requests, with a snapshot or a result as
//! the answer; and events, which are sent to subscribers and not stored.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;

use lvs_api::daemon::{AdminSpec, Event, MaintenanceSpec, Status};
use lvs_core::api::{Info, ServiceId, ServiceInfo};
use lvs_core::stats::Stats;
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::sync::{broadcast, mpsc, oneshot};

use crate::counters::Times;
use crate::dataplane::Found;
use crate::health::Key;

/// Maximum number of requests that wait for the daemon's loop.
const REQUESTS_MAX: usize = 16;
/// Maximum number of events that wait for one subscriber. If there are more, the subscriber loses
/// the oldest ones.
const BEHIND_MAX: usize = 4096;

/// A change that an operator requests.
#[derive(Debug)]
pub enum ChangeRequest {
    /// Sets the administrative state of servers; answered by
    /// [`AdminDone`](lvs_api::daemon::AdminDone).
    Admin(AdminSpec),
    /// Reads the configuration file again; answered by [`Reloaded`](lvs_api::daemon::Reloaded)
    /// afterwards.
    Reload {
        /// Skip the check of `max_removed_percent`.
        force: bool,
    },
    /// Starts or ends maintenance of the director; answered by
    /// [`DirectorStatus`](lvs_api::daemon::DirectorStatus).
    Maintenance(MaintenanceSpec),
}

/// A client's request to the daemon's loop.
#[derive(Debug)]
pub enum Request {
    /// A change, which the daemon makes and answers.
    Change {
        /// The requested change.
        change: ChangeRequest,
        /// The name of the client, for the log.
        who: String,
        /// Receives the daemon's answer.
        reply: oneshot::Sender<Answer>,
    },
    /// A request for the present state, which is sent to this channel.
    Snapshot(oneshot::Sender<Snapshot>),
}

/// A result in JSON, or the reason why the request failed.
pub type Answer = Result<Box<RawValue>, String>;

/// Creates the channel for requests to the daemon's loop.
pub fn channel() -> (mpsc::Sender<Request>, mpsc::Receiver<Request>) {
    mpsc::channel(REQUESTS_MAX)
}

/// Sends a change to the daemon's loop, and waits for its answer. The error is that of the daemon,
/// or that lvsd is stopping.
pub(crate) async fn request_change(
    requests: &mpsc::Sender<Request>,
    change: ChangeRequest,
    who: String,
) -> Answer {
    let (reply, result) = oneshot::channel();
    let gone = || "lvsd is stopping".to_owned();
    let request = Request::Change { change, who, reply };
    requests.send(request).await.map_err(|_| gone())?;
    result.await.unwrap_or_else(|_| Err(gone()))
}

/// Serialises a result as JSON.
pub fn answer(result: &impl Serialize) -> Answer {
    serde_json::value::to_raw_value(result)
        .map_err(|error| format!("internal error of lvsd: {error}"))
}

/// The state of daemon and dataplane at one time.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// The state as `lvsd status` shows it.
    pub status: Status,
    /// The result of the last comparison with the dataplane.
    pub found: Arc<Found>,
    /// The durations of the checks of each server; empty if more than 500 servers are checked.
    pub check_times: HashMap<Key, Times>,
}

impl Snapshot {
    /// All services of the dataplane and of the proxy.
    pub fn services(&self) -> impl Iterator<Item = &ServiceInfo> {
        let found = &self.found;
        found.seen.services.iter().chain(&found.proxied.services)
    }

    /// The state of the dataplane, if the daemon has read it.
    pub fn dataplane(&self) -> Option<&Info> {
        Some(&self.found.seen.info).filter(|info| info.pid != 0)
    }

    /// Counters and rates, summed over all services.
    pub fn total(&self) -> Stats {
        let mut total = self.dataplane().map(|info| info.total).unwrap_or_default();
        // The dataplane's total includes its own services, but not those of the proxy.
        let proxied = match self.dataplane() {
            Some(_) => &self.found.proxied.services,
            None => &self.found.seen.services,
        };
        for service in proxied {
            total = Stats {
                shown: total.shown + service.stats.shown,
                rates: total.rates + service.stats.rates,
                live: total.live + service.stats.live,
            };
        }
        total
    }
}

/// A stream of events for any number of subscribers.
#[derive(Clone, Debug)]
pub struct Events {
    sender: broadcast::Sender<Arc<Event>>,
    seq: u64,
}

/// The service, the server and the fault that an event is about.
#[derive(Clone, Copy, Debug, Default)]
pub struct About<'a> {
    /// The name and the identity of a service, if the event is about one.
    pub service: Option<(&'a str, ServiceId)>,
    /// A server of the service, if the event is about one.
    pub server: Option<SocketAddr>,
    /// Code of the fault; empty without a fault, or if the event's name is the code.
    pub code: &'a str,
}

pub(crate) fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let time = since.map_or(0, |since| since.as_millis());
    u64::try_from(time).unwrap_or(u64::MAX)
}

impl Default for Events {
    fn default() -> Self {
        Self {
            sender: broadcast::Sender::new(BEHIND_MAX),
            seq: 0,
        }
    }
}

impl Events {
    /// Subscribes to the events that are sent from now on.
    pub fn listen(&self) -> broadcast::Receiver<Arc<Event>> {
        self.sender.subscribe()
    }

    /// The channel of events, to which receivers subscribe.
    pub fn source(&self) -> broadcast::Sender<Arc<Event>> {
        self.sender.clone()
    }

    /// Sends an event, with the next number and the present time, to all subscribers. Without a
    /// subscriber, the event is lost.
    pub fn send(&mut self, event: &str, about: About<'_>, message: impl Into<String>) {
        self.seq += 1;
        let _ = self.sender.send(Arc::new(Event {
            seq: self.seq,
            time_ms: unix_ms(),
            event: event.to_owned(),
            code: about.code.to_owned(),
            service: about.service.map(|(name, _)| name.to_owned()),
            id: about.service.map(|(_, id)| id),
            server: about.server,
            message: message.into(),
        }));
    }
}
