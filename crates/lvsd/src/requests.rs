//! Requests of clients to the daemon's loop, and its answers.

use lvs_api::daemon::{AdminSpec, MaintenanceSpec};
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::sync::{mpsc, oneshot};

use crate::snapshot::Snapshot;

/// Maximum number of requests that wait for the daemon's loop.
const REQUESTS_MAX: usize = 16;

/// A change that an operator requests.
#[derive(Debug)]
pub enum ChangeRequest {
    /// Sets the administrative state of servers; answered by
    /// [`AdminDone`](lvs_api::daemon::AdminDone).
    Admin(AdminSpec),
    /// Reads the file again; answered by [`Reloaded`](lvs_api::daemon::Reloaded) afterwards.
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

/// A result in JSON, or the reason for the refusal.
pub type Answer = Result<Box<RawValue>, String>;

/// A channel to the daemon's loop.
pub fn channel() -> (mpsc::Sender<Request>, mpsc::Receiver<Request>) {
    mpsc::channel(REQUESTS_MAX)
}

/// Sends a change to the daemon's loop and waits for its answer.
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
