//! Requests to the dataplane for checks through a service. `server.pin` makes the dataplane send a
//! connection to one server, `server.unpin` returns whether it did so, and `server.return_path`
//! returns the host that forwarded a reply.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use lvs_api::{Address, Client, Error};
use lvs_core::api::{Call, Forwarder, ReturnPath, ServiceId, Unpinned};
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

/// Longest time to wait for an answer of the dataplane.
const PATIENCE: Duration = Duration::from_secs(2);
/// Maximum number of queued requests; further checks wait until the queue has room.
const WAITING: usize = 1024;

/// The reason why the result of a check does not concern its server.
const NOT_FORWARDED: &str = "the dataplane received no packet of the check, or dropped all of them (see `lvsadm drops`), or an earlier check had the same source port";

/// Sends requests of checks to the dataplane.
#[derive(Clone, Debug)]
pub struct Pins(mpsc::Sender<Request>);

/// The next connection from a client to a service, which the dataplane sends to one server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pin {
    service: ServiceId,
    client: SocketAddr,
    /// Number of the connection to the dataplane over which the request was sent.
    connection: u64,
}

#[derive(Debug)]
struct Request {
    call: Call,
    reply: oneshot::Sender<Result<Answer, String>>,
}

/// An answer of the dataplane, and the number of the connection over which it came.
type Answer = (Value, u64);

impl Pins {
    /// Starts a thread that sends requests to the dataplane at `address`, until the returned value
    /// and its clones are dropped.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(address: Address) -> io::Result<Self> {
        let (sender, receiver) = mpsc::channel(WAITING);
        thread::Builder::new()
            .name("lvsd-pins".to_owned())
            .spawn(move || serve(&address, receiver))?;
        Ok(Self(sender))
    }

    /// Makes the dataplane send the next connection from `client` to `service` to `server`.
    ///
    /// # Errors
    /// The dataplane cannot be reached, or refuses the request; the text is the reason.
    pub(super) async fn pin(
        &self,
        service: ServiceId,
        server: SocketAddr,
        client: SocketAddr,
    ) -> Result<Pin, String> {
        let call = Call::ServerPin {
            service,
            server,
            client,
        };
        let (_, connection) = self.ask(call).await?;
        Ok(Pin {
            service,
            client,
            connection,
        })
    }

    /// Checks that the dataplane has sent the connection of `pin` to the server.
    ///
    /// # Errors
    /// The dataplane has not, or it has restarted in the meantime, or it gives no valid answer; the
    /// text is the reason.
    pub(super) async fn check_opened(&self, pin: Pin) -> Result<(), String> {
        let call = Call::ServerUnpin {
            service: pin.service,
            client: pin.client,
        };
        let (answer, connection) = self.ask(call).await?;
        if connection != pin.connection {
            return Err("the dataplane has restarted during the check".to_owned());
        }
        let unpinned = serde_json::from_value(answer).map_err(|error| error.to_string());
        match unpinned? {
            Unpinned { unopened: false } => Ok(()),
            Unpinned { unopened: true } => Err(NOT_FORWARDED.to_owned()),
        }
    }

    /// Queries the host that forwarded the latest indirect reply of `server` to a check; `None` if
    /// no such reply arrived after `began`, or the dataplane does not answer.
    pub(super) async fn forwarder(&self, server: IpAddr, began: Instant) -> Option<Forwarder> {
        let (answer, _) = self.ask(Call::ServerReturnPath { server }).await.ok()?;
        let path: ReturnPath = serde_json::from_value(answer).ok()?;
        path.forwarder
            .filter(|last| Duration::from_millis(last.age_ms) <= began.elapsed())
    }

    async fn ask(&self, call: Call) -> Result<Answer, String> {
        let (reply, answer) = oneshot::channel();
        let gone = || "lvsd is exiting".to_owned();
        let request = Request { call, reply };
        self.0.send(request).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

fn serve(address: &Address, mut requests: mpsc::Receiver<Request>) {
    let mut client = None;
    let mut connections = 0;
    while let Some(Request { call, reply }) = requests.blocking_recv() {
        if reply.is_closed() {
            // The time of the check has expired.
            continue;
        }
        let mut answer = ask(address, &mut client, &call);
        if matches!(&answer, Err(error) if !matches!(error, Error::Refused(_))) {
            // Another dataplane may have started in the meantime.
            connections += 1;
            answer = ask(address, &mut client, &call);
        }
        let answer = answer.map(|answer| (answer, connections));
        let answer = answer.map_err(|error| match error {
            Error::Refused(why) => format!("the dataplane refuses the check: {}", why.message),
            error => error.to_string(),
        });
        let _ = reply.send(answer);
    }
}

/// Sends a call to the dataplane, and returns its answer. The next call after an error that is not
/// a refusal opens a new connection.
fn ask(address: &Address, client: &mut Option<Client>, call: &Call) -> Result<Value, Error> {
    let connection = match client {
        Some(connection) => connection,
        None => client.insert(Client::connect_patiently(address, PATIENCE)?),
    };
    let answer = connection.call::<Value>(call);
    if matches!(&answer, Err(error) if !matches!(error, Error::Refused(_))) {
        *client = None;
    }
    answer
}
