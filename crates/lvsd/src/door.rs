//! The daemon's own control socket ([`lvs_dataplane::control::daemon`]).
//!
//! A task a connection; what is asked goes to the daemon's loop, which answers when it has the
//! time. Whoever does not read holds up nobody.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lvs_core::Stats;
use lvs_core::api::{Info, ServiceInfo};
use lvs_dataplane::control::Address;
use lvs_dataplane::control::daemon::{self, Ask, Event, Request, Status};
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::{broadcast, mpsc, oneshot};

use crate::api::Api;
use crate::api::http::{self, Peer};
use crate::config::{Dataplane, Facts};
use crate::engine::Found;

/// Connections at a time.
const CONNECTIONS_MAX: usize = 64;
/// Connections at a time of one user who may only look.
const USER_MAX: usize = 8;
/// Connections at a time of all users who may only look.
const READERS_MAX: usize = 32;
/// The longest request.
const REQUEST_MAX: u64 = 16 << 10;
/// How long a client may say nothing.
const IDLE: Duration = Duration::from_secs(60);
/// How long it may take to make room for more of an answer.
const WRITE_LIMIT: Duration = Duration::from_secs(30);
/// Requests that wait for the loop.
const ASKS_MAX: usize = 16;

/// What somebody asks of the daemon's loop.
#[derive(Debug)]
pub enum Asked {
    /// What people can ask.
    Ask {
        /// What.
        ask: Ask,
        /// Who asks, in a word.
        who: String,
        /// Where the answer goes: a result in JSON, or why not.
        reply: oneshot::Sender<Answer>,
    },
    /// How everything is.
    Look(oneshot::Sender<Look>),
}

/// How everything is.
#[derive(Clone, Debug, Default)]
pub struct Look {
    /// As people are told.
    pub status: Status,
    /// What was last found in the engine.
    pub found: Arc<Found>,
}

impl Look {
    /// All services, as those who forward tell of them.
    pub fn services(&self) -> impl Iterator<Item = &ServiceInfo> {
        let found = &self.found;
        found.seen.services.iter().chain(&found.proxied.services)
    }

    /// The state of the engine, if it has told it.
    pub fn engine(&self) -> Option<&Info> {
        Some(&self.found.seen.info).filter(|info| info.pid != 0)
    }

    /// Counters and rates of everything.
    pub fn total(&self) -> Stats {
        let mut total = self.engine().map(|info| info.total).unwrap_or_default();
        // The engine's own are in that already.
        let proxied = match self.engine() {
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

/// The way to the daemon's loop, and what it answers.
pub fn channel() -> (mpsc::Sender<Asked>, mpsc::Receiver<Asked>) {
    mpsc::channel(ASKS_MAX)
}

/// Has the daemon's loop answer.
pub(crate) async fn ask_loop(asks: &mpsc::Sender<Asked>, ask: Ask, who: String) -> Answer {
    let (reply, result) = oneshot::channel();
    let gone = || "lvsd is about to end".to_owned();
    let asked = Asked::Ask { ask, who, reply };
    asks.send(asked).await.map_err(|_| gone())?;
    result.await.unwrap_or_else(|_| Err(gone()))
}

/// A result in JSON, or why there is none.
pub type Answer = Result<Box<RawValue>, String>;

/// A result as an answer.
pub fn answer(result: &impl Serialize) -> Answer {
    serde_json::value::to_raw_value(result)
        .map_err(|error| format!("internal error of lvsd: {error}"))
}

/// Who may do what.
#[derive(Clone, Debug, Default)]
struct Rights {
    /// Whose members may change things.
    group: Option<u32>,
    /// Whose members may look; everybody if there is none.
    readers: Option<u32>,
}

/// Connections that there are.
#[derive(Debug, Default)]
struct Places {
    all: usize,
    readers: usize,
    by_user: HashMap<u32, usize>,
}

/// One of them, given back when it is dropped.
struct Place {
    places: Arc<Mutex<Places>>,
    reader: Option<u32>,
}

impl Place {
    fn take(places: &Arc<Mutex<Places>>, reader: Option<u32>) -> Option<Self> {
        let mut all = places.lock().unwrap_or_else(PoisonError::into_inner);
        if all.all >= CONNECTIONS_MAX {
            return None;
        }
        if let Some(uid) = reader {
            let own = all.by_user.get(&uid).copied().unwrap_or(0);
            if own >= USER_MAX || all.readers >= READERS_MAX {
                return None;
            }
            all.by_user.insert(uid, own + 1);
            all.readers += 1;
        }
        all.all += 1;
        Some(Self {
            places: Arc::clone(places),
            reader,
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut all = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        all.all -= 1;
        if let Some(uid) = self.reader {
            all.readers -= 1;
            if let Some(own) = all.by_user.get_mut(&uid) {
                *own -= 1;
                if *own == 0 {
                    all.by_user.remove(&uid);
                }
            }
        }
    }
}

/// Listens beside the engine at `engine`; what is asked goes to `api`'s daemon. Who speaks HTTP is
/// answered as over TCP.
///
/// # Errors
/// The system refuses.
pub fn open(
    engine: &Address,
    dataplane: &Dataplane,
    events: broadcast::Sender<Arc<Event>>,
    api: Arc<Api>,
) -> io::Result<()> {
    let listener = bind(&daemon::socket(engine))?;
    let facts = Facts::read();
    let gid = |name: &Option<String>| {
        // A group that there is not has no members.
        name.as_ref()
            .map(|name| facts.gid(name).unwrap_or(u32::MAX))
    };
    let rights = Rights {
        group: gid(&dataplane.group),
        readers: gid(&dataplane.readers),
    };
    tokio::spawn(serve(listener, rights, api, events));
    Ok(())
}

fn bind(address: &Address) -> io::Result<tokio::net::UnixListener> {
    let listener = match address {
        Address::Abstract(name) => {
            use std::os::linux::net::SocketAddrExt;
            let name = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
            std::os::unix::net::UnixListener::bind_addr(&name)?
        }
        Address::Usual(path) | Address::Path(path) => {
            remove_stale(path)?;
            let listener = std::os::unix::net::UnixListener::bind(path)?;
            // Who may do what is decided by who it is.
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
            listener
        }
    };
    listener.set_nonblocking(true)?;
    tokio::net::UnixListener::from_std(listener)
}

/// Removes the socket of a daemon that has ended: this one has the lock.
fn remove_stale(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => std::fs::remove_file(path),
        Ok(_) => Err(io::Error::other("there is something else than a socket")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

async fn serve(
    listener: tokio::net::UnixListener,
    rights: Rights,
    api: Arc<Api>,
    events: broadcast::Sender<Arc<Event>>,
) {
    let places = Arc::new(Mutex::new(Places::default()));
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // No descriptors; some will be given back.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let client = Client {
            stream: BufReader::new(stream),
            denied: None,
            uid: u32::MAX,
            api: Arc::clone(&api),
            events: events.clone(),
        };
        if let Some((client, place)) = client.admit(&rights, &places) {
            tokio::spawn(async move {
                // An error here is that the client went away.
                let _ = client.serve().await;
                drop(place);
            });
        }
    }
}

struct Client {
    stream: BufReader<UnixStream>,
    /// Why it may not change things.
    denied: Option<String>,
    uid: u32,
    api: Arc<Api>,
    events: broadcast::Sender<Arc<Event>>,
}

#[derive(Serialize)]
struct Reply<'a, R> {
    id: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    item: Option<&'a Event>,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<R>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<Refusal<'a>>,
}

#[derive(Serialize)]
struct Refusal<'a> {
    message: &'a str,
}

impl Client {
    /// With a place, if it may look and there is one.
    fn admit(mut self, rights: &Rights, places: &Arc<Mutex<Places>>) -> Option<(Self, Place)> {
        let peer = self.stream.get_ref().peer_cred().ok()?;
        let pid = peer.pid().and_then(|pid| u32::try_from(pid).ok());
        self.uid = peer.uid();
        let socket = self.stream.get_ref();
        let own = (peer.uid(), peer.gid());
        let trusted = daemon::may_change(socket, own, pid.unwrap_or(0), rights.group);
        let readers = rights.readers;
        let reader = readers.is_none_or(|gid| daemon::is_member(socket, peer.gid(), gid));
        self.denied = trusted.err();
        let mut why = None;
        if self.denied.is_some() && !reader {
            why = Some(
                "this lvsd lets only root, its own user and the groups of `group` and `readers` look",
            );
        }
        let place = match why {
            None => Place::take(places, self.denied.as_ref().map(|_| peer.uid())),
            Some(_) => None,
        };
        if let Some(place) = place {
            return Some((self, place));
        }
        let why = why.unwrap_or("lvsd serves as many connections as it may already: close some");
        let line = line(&Reply::<()> {
            id: 0,
            item: None,
            result: None,
            error: Some(Refusal { message: why }),
        });
        let _ = self.stream.get_ref().try_write(&line);
        None
    }

    async fn serve(mut self) -> io::Result<()> {
        let first = tokio::time::timeout(IDLE, self.stream.fill_buf()).await;
        let first = first.map_err(io::Error::other)??;
        if first.first().is_some_and(u8::is_ascii_uppercase) {
            let peer = Peer::Local {
                who: format!("uid {}", self.uid),
                denied: self.denied.map(|why| why.replace("the engine", "lvsd")),
            };
            return http::serve(self.stream, self.api, peer).await;
        }
        let mut bytes = Vec::new();
        loop {
            bytes.clear();
            let mut limited = (&mut self.stream).take(REQUEST_MAX);
            let read = tokio::time::timeout(IDLE, limited.read_until(b'\n', &mut bytes));
            let len = read.await.map_err(io::Error::other)??;
            if len == 0 {
                return Ok(());
            }
            let request = serde_json::from_slice::<Request>(&bytes);
            let (id, result) = match request {
                Err(error) => {
                    let why = format!("this is not a request to lvsd: {error}");
                    (0, Some(Err(why)))
                }
                Ok(Request {
                    id,
                    ask: Ask::Events {},
                }) => return self.tell_events(id).await,
                // However many ask, the loop is asked twice a second.
                Ok(Request {
                    id,
                    ask: Ask::Status {},
                }) => match self.api.status().await {
                    Ok(status) => {
                        self.write(format!("{{\"id\":{id},\"result\":").as_bytes())
                            .await?;
                        self.write(status.trim_ascii_end()).await?;
                        self.write(b"}\n").await?;
                        (id, None)
                    }
                    Err(why) => (id, Some(Err(why))),
                },
                Ok(request) => (request.id, Some(self.ask(request.ask).await)),
            };
            let line = result.map(|result| match &result {
                Ok(result) => line(&Reply {
                    id,
                    item: None,
                    result: Some(result),
                    error: None,
                }),
                Err(message) => line(&Reply::<()> {
                    id,
                    item: None,
                    result: None,
                    error: Some(Refusal { message }),
                }),
            });
            if let Some(line) = line {
                self.write(&line).await?;
            }
            // What does not end where it should is not followed any further.
            if bytes.last() != Some(&b'\n') {
                return Ok(());
            }
        }
    }

    async fn ask(&self, ask: Ask) -> Answer {
        if let (true, Some(denied)) = (ask.changes(), &self.denied) {
            return Err(denied.replace("the engine", "lvsd"));
        }
        self.api.change(ask, format!("uid {}", self.uid)).await
    }

    async fn tell_events(&mut self, id: u64) -> io::Result<()> {
        let mut events = self.events.subscribe();
        let mut nothing = [0];
        loop {
            tokio::select! {
                event = events.recv() => match event {
                    Ok(event) => {
                        let line = line(&Reply::<()> { id, item: Some(&event), result: None, error: None });
                        self.write(&line).await?;
                    }
                    // The numbers of the events show the gap.
                    Err(broadcast::error::RecvError::Lagged(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => return Ok(()),
                },
                // Whoever listens says nothing more; or it has gone.
                read = self.stream.read(&mut nothing) => {
                    if read? == 0 {
                        return Ok(());
                    }
                }
            }
        }
    }

    async fn write(&mut self, line: &[u8]) -> io::Result<()> {
        tokio::time::timeout(WRITE_LIMIT, self.stream.write_all(line))
            .await
            .map_err(io::Error::other)?
    }
}

fn line(reply: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(reply).unwrap_or_default();
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_who_may_only_look_do_not_take_all_places() {
        let places = Arc::default();
        let one: Vec<Place> = (0..USER_MAX)
            .map(|_| Place::take(&places, Some(1)).expect("a place"))
            .collect();
        assert!(Place::take(&places, Some(1)).is_none());
        let others: Vec<Place> = (0..READERS_MAX - USER_MAX)
            .map(|n| {
                let uid = u32::try_from(2 + n / USER_MAX).expect("a few");
                Place::take(&places, Some(uid)).expect("a place")
            })
            .collect();
        assert!(Place::take(&places, Some(99)).is_none());
        let root: Vec<Place> = std::iter::from_fn(|| Place::take(&places, None)).collect();
        assert_eq!(root.len(), CONNECTIONS_MAX - READERS_MAX);
        drop((one, others, root));
        assert!(places.lock().expect("not poisoned").by_user.is_empty());
    }

    /// A client that sends nonsense is told so, one that reads nothing is given up.
    #[tokio::test]
    async fn nonsense_is_answered() {
        let directory = tempfile::tempdir().expect("a directory");
        let engine = Address::new(directory.path().join("e.sock"));
        let events = crate::events::Events::default();
        let (sender, mut asks) = channel();
        let api = Arc::new(Api::new(sender));
        let source = || (events.source(), Arc::clone(&api));
        let (told, asked) = source();
        open(&engine, &Dataplane::default(), told, asked).expect("it can be bound");
        tokio::spawn(async move {
            while let Some(asked) = asks.recv().await {
                match asked {
                    Asked::Ask { reply, .. } => drop(reply.send(answer(&"yes"))),
                    Asked::Look(reply) => drop(reply.send(Look::default())),
                }
            }
        });
        let path = directory.path().join("e.sock.lvsd");
        let mut stream = BufReader::new(UnixStream::connect(&path).await.expect("it listens"));
        let long = format!("{{\"id\":1,\"x\":\"{}\"}}\n", "x".repeat(1 << 20));
        for (text, words) in [
            ("{}\n", "not a request"),
            ("[[[[\n", "not a request"),
            (
                "{\"id\":3,\"method\":\"status\",\"params\":{}}\n",
                "{\"id\":3,\"result\":{\"pid\":0,",
            ),
            (
                "{\"id\":4,\"method\":\"reload\",\"params\":{}}\n",
                "{\"id\":4,\"result\":\"yes\"}",
            ),
            (long.as_str(), "not a request"),
        ] {
            let _ = stream.write_all(text.as_bytes()).await;
            let mut line = String::new();
            let _ = stream.read_line(&mut line).await;
            assert!(line.contains(words), "{line}");
        }
        // Bound again while the file is there.
        drop(stream);
        let (told, asked) = source();
        open(&engine, &Dataplane::default(), told, asked).expect("a stale one is replaced");
    }

    /// Somebody else's process, for the test below: asks for a reload, and prints the answer.
    #[test]
    #[ignore = "a part of another test"]
    fn somebody() {
        use std::io::{BufRead, Write};
        use std::os::linux::net::SocketAddrExt;
        let name = std::env::var("DOOR").expect("where to");
        let name = std::os::unix::net::SocketAddr::from_abstract_name(name).expect("a name");
        let mut stream = std::os::unix::net::UnixStream::connect_addr(&name).expect("it listens");
        let request = b"{\"id\":3,\"method\":\"reload\",\"params\":{}}\n";
        stream.write_all(request).expect("it reads");
        let mut line = String::new();
        let read = io::BufReader::new(stream).read_line(&mut line);
        read.expect("it answers");
        println!("{line}");
    }

    #[tokio::test]
    async fn supplementary_groups_count() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let name = format!("lvsd-door-{}", std::process::id());
        let engine = Address::new(format!("@{name}"));
        let dataplane = Dataplane {
            group: Some("4242".to_owned()),
            ..Dataplane::default()
        };
        let events = crate::events::Events::default();
        let (sender, mut asks) = channel();
        let api = Arc::new(Api::new(sender));
        open(&engine, &dataplane, events.source(), api).expect("it can be bound");
        tokio::spawn(async move {
            while let Some(asked) = asks.recv().await {
                if let Asked::Ask { reply, .. } = asked {
                    let _ = reply.send(answer(&"yes"));
                }
            }
        });
        for (groups, expected) in [("4242", "\"yes\""), ("4243", "only root")] {
            let output = tokio::process::Command::new("setpriv")
                .args(["--reuid=65534", "--regid=65534", "--groups", groups])
                .arg(std::env::current_exe().expect("this program"))
                .args([
                    "--exact",
                    "door::tests::somebody",
                    "--ignored",
                    "--nocapture",
                ])
                .env("DOOR", format!("{name}.lvsd"))
                .output();
            let output = output.await.expect("util-linux has setpriv").stdout;
            let output = String::from_utf8_lossy(&output);
            assert!(output.contains(expected), "{groups}: {output}");
        }
    }
}
