//! The daemon with a fake dataplane and fake servers, in virtual time.

use std::collections::HashSet;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use lvs_core::api::{Call, ServiceId};

use super::*;
use crate::channels::ChangeRequest;
use crate::dataplane::fake::World;
use crate::health::Check;
use crate::health::{Advice, ProbeError};
use crate::sources::Gathered;
use lvs_api::daemon::{
    AdminDone, AdminSpec, AdminState, Event, Reloaded, ServerStatus, ServiceKey, Status, Target,
};
use tokio::sync::{broadcast, oneshot};

mod by_hand;
mod decisions;
mod health;
mod life;
mod reload;
mod sorry;
mod suspicion;
mod unheard;

/// A prober for which these servers are down, and all others up.
#[derive(Clone, Default)]
struct Dead(Arc<Mutex<HashSet<SocketAddr>>>);

impl Dead {
    fn set(&self, server: &str, dead: bool) {
        let server = server.parse().unwrap();
        let mut all = self.0.lock().unwrap();
        if dead {
            all.insert(server);
        } else {
            all.remove(&server);
        }
    }
}

impl Prober for Dead {
    fn probe(&self, check: &Check) -> impl Future<Output = Result<Advice, ProbeError>> + Send {
        let dead = self.0.lock().unwrap().contains(&check.server);
        async move {
            if dead {
                Err(ProbeError::server("connection refused"))
            } else {
                Ok(Advice::NONE)
            }
        }
    }
}

const FILE: &str = r#"
    [sysctl]
    conn_reuse_mode = 0
    [[service]]
    name = "web"
    address = "192.0.2.10:80"
    forward = "nat"
    check = { type = "tcp", interval = "1s", timeout = "1s", rise = 2, fall = 2 }
    [[service.server]]
    address = "10.0.0.1:80"
    [[service.server]]
    address = "10.0.0.2:80"
    weight = 3
"#;

struct Running {
    world: World,
    dead: Dead,
    file: tempfile::NamedTempFile,
    signals: mpsc::Sender<Signal>,
    requests: mpsc::Sender<Request>,
    events: broadcast::Receiver<Arc<Event>>,
    task: tokio::task::JoinHandle<Result<(), String>>,
}

fn web() -> ServiceId {
    ServiceId::Tcp {
        address: "192.0.2.10:80".parse().unwrap(),
    }
}

impl Running {
    fn start(world: World, dead: Dead, text: &str) -> Self {
        Self::start_with(world, dead.clone(), dead, text)
    }

    fn start_with(world: World, dead: Dead, prober: impl Prober, text: &str) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let (config, _) = Config::load(file.path()).unwrap();
        let (signals, receiver) = mpsc::channel(4);
        let (requests, request) = mpsc::channel(4);
        let events = Events::default();
        let listener = events.listen();
        let options = Options {
            admin: Some(world.admin()),
            requests: Some(request),
            events,
            ..Options::new(file.path().to_owned())
        };
        let task = tokio::spawn(run(options, config, world.host(), prober, receiver));
        Self {
            world,
            dead,
            file,
            signals,
            requests,
            events: listener,
            task,
        }
    }

    /// Waits until the service's servers have these weights, in the order of addresses.
    async fn weights(&self, wanted: &[(&str, i32)]) {
        let wanted: Vec<(SocketAddr, i32)> = wanted
            .iter()
            .map(|(a, w)| (a.parse().unwrap(), *w))
            .collect();
        let mut now = Vec::new();
        for _ in 0..2000 {
            now = self.world.weights(web());
            if now == wanted {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!(
            "the weights are {now:?} instead of {wanted:?}; changes: {:#?}",
            self.world.changes()
        );
    }

    /// Waits until the servers of [`FILE`] have these weights.
    async fn both(&self, one: i32, other: i32) {
        let wanted = [("10.0.0.1:80", one), ("10.0.0.2:80", other)];
        self.weights(&wanted).await;
    }

    /// Sends a request to the daemon, as the control socket does for a client.
    async fn ask<R: serde::de::DeserializeOwned>(
        &self,
        change: ChangeRequest,
    ) -> Result<R, String> {
        let (reply, result) = oneshot::channel();
        let request = Request::Change {
            change,
            who: "uid 0".to_owned(),
            reply,
        };
        self.requests.send(request).await.unwrap();
        let raw = result.await.unwrap()?;
        Ok(serde_json::from_str(raw.get()).unwrap())
    }

    async fn status(&self) -> Status {
        let (reply, snapshot) = oneshot::channel();
        self.requests.send(Request::Snapshot(reply)).await.unwrap();
        snapshot.await.unwrap().status
    }

    /// Sets the state of 10.0.0.1.
    async fn admin(&self, state: AdminState) -> AdminDone {
        self.ask(ChangeRequest::Admin(AdminSpec {
            target: Target {
                service: Some(ServiceKey(web())),
                host: [10, 0, 0, 1].into(),
                port: Some(80),
            },
            state,
            who: Some("ann".to_owned()),
            why: Some("disk".to_owned()),
            until: None,
            force: false,
        }))
        .await
        .unwrap()
    }

    /// Waits until the status counts `wanted` usable servers of the service.
    async fn usable(&self, wanted: usize) {
        for _ in 0..2000 {
            if self.status().await.services[0].usable == wanted {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!(
            "the number of usable servers is not {wanted}: {:?}",
            self.status().await
        );
    }

    async fn first_server(&self) -> ServerStatus {
        let status = self.status().await;
        status.services[0].servers[0].clone()
    }

    /// The names of the events since the last call.
    fn events(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.events.try_recv().ok())
            .map(|event| event.event.clone())
            .collect()
    }

    async fn reload(&self, text: &str) {
        std::fs::write(self.file.path(), text).unwrap();
        self.signals.send(Signal::Reload).await.unwrap();
    }

    async fn stop(self) -> World {
        self.end(Signal::StopAll).await
    }

    async fn end(self, signal: Signal) -> World {
        self.signals.send(signal).await.unwrap();
        self.task.await.unwrap().unwrap();
        self.world
    }
}

/// The log of this thread.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    pub(crate) fn listen(&self) -> tracing::subscriber::DefaultGuard {
        // With one subscriber in the process, `tracing` caches whether a line is enabled according
        // to the first thread that reaches it. A test without a subscriber would then disable the
        // line for tests that read the log.
        static SECOND: std::sync::OnceLock<tracing::Dispatch> = std::sync::OnceLock::new();
        SECOND.get_or_init(|| {
            let nobody = tracing_subscriber::fmt().with_writer(std::io::sink);
            tracing::Dispatch::new(nobody.finish())
        });
        let log = self.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false);
        tracing::subscriber::set_default(subscriber.with_writer(move || log.clone()).finish())
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }

    /// Waits until the log contains `words`, in real time.
    async fn says(&self, words: &str) {
        for _ in 0..10_000 {
            if self.text().contains(words) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        panic!("no {words:?} in: {}", self.text());
    }
}

/// A prober whose checks of these servers do not complete.
#[derive(Clone, Default)]
struct Slow(Arc<Mutex<HashSet<SocketAddr>>>);

impl Slow {
    fn start(&self, text: &str) -> Running {
        Running::start_with(World::default(), Dead::default(), self.clone(), text)
    }

    fn hold(&self, server: &str) {
        self.0.lock().unwrap().insert(server.parse().unwrap());
    }

    fn release(&self, server: &str) {
        self.0.lock().unwrap().remove(&server.parse().unwrap());
    }
}

impl Prober for Slow {
    fn probe(&self, check: &Check) -> impl Future<Output = Result<Advice, ProbeError>> + Send {
        let (held, server) = (self.clone(), check.server);
        async move {
            while held.0.lock().unwrap().contains(&server) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            Ok(Advice::NONE)
        }
    }
}

const TWO: &str = r#"
    [[service]]
    name = "web"
    address = "192.0.2.10:80"
    forward = "nat"
    check = { type = "tcp", interval = "20s", timeout = "20s" }
    [[service.server]]
    address = "10.0.0.1:80"
    [[service]]
    name = "slow"
    address = "192.0.2.11:80"
    forward = "nat"
    check = { type = "tcp", interval = "20s", timeout = "20s" }
    [[service.server]]
    address = "10.0.0.2:80"
"#;
