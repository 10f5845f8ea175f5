//! Watches whether the dataplane has received the connections of its peers. Ten queries a second
//! allow lvsd to inform keepalived at once when the dataplane exits.

use std::time::Duration;

use lvs_api::{Address, Client};
use lvs_core::api::{Call, SyncState};
use tokio::sync::watch;

/// Interval between two queries.
const PERIOD: Duration = Duration::from_millis(100);
/// Time without an answer after which the dataplane is assumed not to forward packets.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Readiness {
    pub(super) ready: bool,
    pub(super) waits_for: String,
}

impl Readiness {
    /// The readiness until the first query has ended.
    pub(super) fn unknown() -> Self {
        Self {
            ready: false,
            waits_for: "the first answer of the dataplane".to_owned(),
        }
    }
}

/// Queries the readiness of the dataplane until all receivers are dropped. The value is `None`
/// until the first query has ended.
pub(super) fn watch(address: Address) -> watch::Receiver<Option<Readiness>> {
    let (sender, receiver) = watch::channel(None);
    let thread = std::thread::Builder::new().name("lvsd-ready".to_owned());
    let failed = sender.clone();
    let started = thread.spawn(move || {
        let mut client = None;
        while !sender.is_closed() {
            let found = Some(ask(&address, &mut client));
            sender.send_if_modified(|known| {
                let new = *known != found;
                known.clone_from(&found);
                new
            });
            std::thread::sleep(PERIOD);
        }
    });
    if let Err(error) = started {
        tracing::error!(
            "cannot start the thread lvsd-ready: {error}; this director will not be active until lvsd is restarted"
        );
        let waits_for = format!("a thread of lvsd ({error})");
        failed.send_replace(Some(Readiness {
            ready: false,
            waits_for,
        }));
    }
    receiver
}

/// Queries the readiness of the dataplane once. A dataplane that does not answer is not ready.
pub(super) fn ask(address: &Address, client: &mut Option<Client>) -> Readiness {
    let unready = |why: String| Readiness {
        ready: false,
        waits_for: why,
    };
    if client.is_none() {
        match Client::connect_patiently(address, PATIENCE) {
            Ok(new) => *client = Some(new),
            Err(_) => return unready("the dataplane".to_owned()),
        }
    }
    let answer = client
        .as_mut()
        .map(|client| client.call::<SyncState>(&Call::SyncGet {}));
    match answer {
        Some(Ok(state)) => Readiness {
            ready: state.ready,
            waits_for: state.waits_for,
        },
        _ => {
            *client = None;
            unready("the dataplane".to_owned())
        }
    }
}
