//! Publishes events to subscribers, and stores none.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;

use lvs_api::daemon::Event;
use lvs_core::api::ServiceId;
use tokio::sync::broadcast;

/// Maximum number of events that may wait for one subscriber.
const BEHIND_MAX: usize = 4096;

/// A stream of events for any number of subscribers.
#[derive(Clone, Debug)]
pub struct Events {
    sender: broadcast::Sender<Arc<Event>>,
    seq: u64,
}

/// The subject of an event.
#[derive(Clone, Copy, Debug, Default)]
pub struct About<'a> {
    /// The name and the address of a service.
    pub service: Option<(&'a str, ServiceId)>,
    /// A server of the service.
    pub server: Option<SocketAddr>,
    /// Code of the fault; empty without a fault, or if the event's name is the code.
    pub code: &'a str,
}

/// Milliseconds since 1970.
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
    /// Subscribes to events.
    pub fn listen(&self) -> broadcast::Receiver<Arc<Event>> {
        self.sender.subscribe()
    }

    /// The channel that receivers subscribe to.
    pub fn source(&self) -> broadcast::Sender<Arc<Event>> {
        self.sender.clone()
    }

    /// Sends an event to all receivers, if there are any.
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
