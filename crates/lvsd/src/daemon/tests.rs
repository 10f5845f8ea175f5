//! The daemon with a fake engine and fake servers, in virtual time.

use std::collections::HashSet;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use lvs_core::api::{Call, ServiceId};

use super::*;
use crate::config::Check;
use crate::engine::fake::World;
use crate::health::{Advice, ProbeError};
use lvs_dataplane::control::daemon::{
    AdminDone, AdminSpec, Ask, Event, Reloaded, ServerStatus, ServiceKey, Status, Target,
};
use tokio::sync::broadcast;

/// Servers that are dead.
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
                Err(ProbeError::Server("connection refused".into()))
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
    asks: mpsc::Sender<Asked>,
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
        let (asks, asked) = mpsc::channel(4);
        let events = Events::default();
        let listener = events.listen();
        let options = Options {
            admin: Some(world.admin()),
            asks: Some(asked),
            events,
            ..Options::new(file.path().to_owned())
        };
        let task = tokio::spawn(run(options, config, world.host(), prober, receiver));
        Self {
            world,
            dead,
            file,
            signals,
            asks,
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
            "wanted {wanted:?}, have {now:?}; done: {:#?}",
            self.world.changes()
        );
    }

    /// Asks as `lvsadm` does.
    async fn ask<R: serde::de::DeserializeOwned>(&self, ask: Ask) -> Result<R, String> {
        let (reply, result) = oneshot::channel();
        let asked = Asked::Ask {
            ask,
            who: "uid 0".to_owned(),
            reply,
        };
        self.asks.send(asked).await.unwrap();
        let raw = result.await.unwrap()?;
        Ok(serde_json::from_str(raw.get()).unwrap())
    }

    /// Puts 10.0.0.1 into a state.
    async fn admin(&self, state: AdminState) -> AdminDone {
        self.ask(Ask::Admin(AdminSpec {
            target: Target {
                service: Some(ServiceKey(web())),
                host: [10, 0, 0, 1].into(),
                port: Some(80),
            },
            state,
            who: Some("ann".to_owned()),
            why: Some("disk".to_owned()),
            until: None,
        }))
        .await
        .unwrap()
    }

    async fn first_server(&self) -> ServerStatus {
        let status: Status = self.ask(Ask::Status {}).await.unwrap();
        status.services[0].servers[0].clone()
    }

    /// The names of the events so far.
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

#[tokio::test(start_paused = true)]
async fn starts_an_engine_fills_it_and_stops_it() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
        .await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let engine = daemon.world.engine();
    assert_eq!(engine.sysctl("conn_reuse_mode"), Some("0"));
    assert!(engine.vips().contains(&"192.0.2.10".parse().unwrap()));
    let ops = daemon.world.changes();
    assert!(
        matches!(ops.last(), Some(Call::VipsOwn { .. })),
        "the VIP comes last: {ops:#?}"
    );
    let world = daemon.stop().await;
    assert!(!world.running());
    assert_eq!(world.starts(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_dead_server_gets_nothing_from_the_start() {
    let dead = Dead::default();
    dead.set("10.0.0.2:80", true);
    let daemon = Running::start(World::default(), dead, FILE);
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 0)])
        .await;
    let bad = daemon.world.changes().iter().any(|op| {
        matches!(op, Call::ServerAdd(s) if s.server == "10.0.0.2:80".parse().unwrap() && s.config.weight != 0)
    });
    assert!(!bad);
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn health_quiesces_and_brings_back() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
        .await;
    daemon.dead.set("10.0.0.1:80", true);
    daemon
        .weights(&[("10.0.0.1:80", 0), ("10.0.0.2:80", 3)])
        .await;
    daemon.dead.set("10.0.0.1:80", false);
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
        .await;
    let deleted = daemon
        .world
        .changes()
        .iter()
        .any(|op| matches!(op, Call::ServerDelete { .. }));
    assert!(!deleted);
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn on_check_failure_remove_takes_the_server_out() {
    let text = FILE.replace(
        "forward = \"nat\"",
        "forward = \"nat\"\non_down = \"remove\"",
    );
    let daemon = Running::start(World::default(), Dead::default(), &text);
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
        .await;
    daemon.dead.set("10.0.0.1:80", true);
    daemon.weights(&[("10.0.0.2:80", 3)]).await;
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn reload_changes_only_what_changed() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
        .await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let before = daemon.world.changes().len();
    let requests = daemon.world.requests();
    daemon
        .reload(&FILE.replace("weight = 3", "weight = 7"))
        .await;
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 7)])
        .await;
    let ops = daemon.world.changes();
    assert!(
        matches!(&ops[before..], [Call::ServerEdit(_)]),
        "{:#?}",
        &ops[before..]
    );

    assert_eq!(daemon.world.requests(), requests + 1);

    // A file that is not valid changes nothing.
    daemon.reload("[[service]]\nadress = 1\n").await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(daemon.world.changes().len(), before + 1);

    // Nor does one without a service, such as one that is just being written.
    for text in ["", "[sysctl]\nconn_reuse_mode = 1\n"] {
        daemon.reload(text).await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(daemon.world.changes().len(), before + 1);
    }

    // Nor does one that cannot be read.
    std::fs::remove_file(daemon.file.path()).unwrap();
    daemon.signals.send(Signal::Reload).await.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(daemon.world.changes().len(), before + 1);
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_start_without_services_takes_them_later() {
    let daemon = Running::start(World::default(), Dead::default(), "");
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(daemon.world.running());
    daemon.reload("[sysctl]\nconn_reuse_mode = 0\n").await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let sysctls = daemon.world.engine();
    assert_eq!(sysctls.sysctl("conn_reuse_mode"), Some("0"));
    daemon.reload(FILE).await;
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
        .await;
    daemon.stop().await;
}

/// What is logged on this thread.
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
        // With one subscriber in the whole process, `tracing` asks the thread that first comes by a
        // line whether anybody wants it, and goes by that for ever: a test that listens to nothing
        // would answer for those that do.
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

    /// Waits until it says `words`, in real time.
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

#[tokio::test(start_paused = true)]
async fn an_engine_that_has_just_died_had_ended_already() {
    let log = Log::default();
    let _listening = log.listen();
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
        .await;
    daemon.world.crash();
    daemon.stop().await;
    log.says("the engine had ended already: it ended with exit status: 1")
        .await;
}

#[tokio::test]
async fn what_a_stop_waits_for_is_said_at_once() {
    for at_a_request in [false, true] {
        let log = Log::default();
        let _listening = log.listen();
        let daemon = Running::start(World::default(), Dead::default(), FILE);
        log.says("ready: 1 service, 2 of 2 servers up").await;
        daemon.world.hang(true);
        if at_a_request {
            daemon
                .reload(&FILE.replace("weight = 3", "weight = 7"))
                .await;
            log.says("reloaded").await;
            while !daemon.world.hung() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        daemon.signals.send(Signal::StopAll).await.unwrap();
        log.says(if at_a_request {
            "waiting up to 10s for the engine (pid 1), which is at a request"
        } else {
            "waiting up to 10s for the engine (pid 1)"
        })
        .await;
        daemon.world.hang(false);
        daemon.task.await.unwrap().unwrap();
        assert!(!daemon.world.running());
    }
}

#[tokio::test(start_paused = true)]
async fn killed_and_restarted_it_disturbs_nothing() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon.dead.set("10.0.0.1:80", true);
    daemon
        .weights(&[("10.0.0.1:80", 0), ("10.0.0.2:80", 3)])
        .await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    daemon.task.abort();
    let before = daemon.world.changes().len();
    let again = Running::start(daemon.world.clone(), daemon.dead.clone(), FILE);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(again.world.changes().len(), before, "nothing to change");
    assert_eq!(again.world.starts(), 1);
    let world = again.end(Signal::Stop).await;
    assert!(world.running(), "the engine is left alone");
    assert_eq!(world.changes().len(), before);
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_dies_is_replaced() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
        .await;
    daemon.world.crash();
    tokio::time::sleep(Duration::from_secs(10)).await;
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
        .await;
    assert_eq!(daemon.world.starts(), 2);
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_of_ours_that_hangs_is_ended_and_replaced() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    let both = [("10.0.0.1:80", 1), ("10.0.0.2:80", 3)];
    daemon.weights(&both).await;
    daemon.world.fall_silent();
    tokio::time::sleep(Duration::from_secs(5)).await;
    daemon.weights(&both).await;
    assert_eq!(daemon.world.ended(), [1]);
    assert_eq!(daemon.world.starts(), 2);

    // The daemon that started it has crashed; the next one meets an engine that never greets.
    daemon.task.abort();
    daemon.world.fall_silent();
    let again = Running::start(daemon.world.clone(), daemon.dead.clone(), FILE);
    tokio::time::sleep(Duration::from_secs(5)).await;
    again.weights(&both).await;
    assert_eq!(again.world.ended(), [1, 2]);

    // Nor does a hang keep the daemon from ending.
    again.world.fall_silent();
    let world = again.stop().await;
    assert!(!world.running());
    assert_eq!(world.ended(), [1, 2, 3]);
}

#[tokio::test(start_paused = true)]
async fn somebody_elses_engine_that_hangs_is_left_to_him() {
    let world = World::default();
    world.start_foreign();
    let daemon = Running::start(world, Dead::default(), FILE);
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
        .await;
    daemon.world.fall_silent();
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(daemon.world.running());
    assert_eq!(daemon.world.ended(), [0_u32; 0]);
    daemon.task.abort();
}

#[tokio::test(start_paused = true)]
async fn somebody_elses_engine_stays_without_our_services() {
    let world = World::default();
    world.start_foreign();
    let spec = lvs_core::api::ServiceSpec {
        service: ServiceId::Udp {
            address: "192.0.2.11:53".parse().unwrap(),
        },
        config: lvs_core::ServiceConfig::new(lvs_core::Family::V4, "rr"),
        owner: None,
    };
    world
        .control()
        .apply(&[Call::ServiceAdd(spec.clone())])
        .unwrap();
    let daemon = Running::start(world, Dead::default(), FILE);
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
        .await;
    let world = daemon.stop().await;
    assert!(world.running());
    assert_eq!(world.starts(), 0);
    let left: Vec<ServiceId> = world
        .engine()
        .0
        .services
        .iter()
        .map(|s| s.service)
        .collect();
    assert_eq!(left, [spec.service]);
    assert!(world.engine().vips().is_empty());
}

#[tokio::test(start_paused = true)]
async fn somebody_elses_engine_may_come_back() {
    let world = World::default();
    world.start_foreign();
    let daemon = Running::start(world, Dead::default(), FILE);
    let both = [("10.0.0.1:80", 1), ("10.0.0.2:80", 3)];
    daemon.weights(&both).await;
    daemon.world.crash();
    tokio::time::sleep(Duration::from_secs(1)).await;
    daemon.world.start_foreign();
    daemon.weights(&both).await;
    assert_eq!(daemon.world.starts(), 0);

    daemon.world.crash();
    tokio::time::sleep(Duration::from_secs(10)).await;
    daemon.weights(&both).await;
    assert_eq!(daemon.world.starts(), 1, "it did not come back");
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn what_somebody_changes_is_set_right() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    let both = [("10.0.0.1:80", 1), ("10.0.0.2:80", 3)];
    daemon.weights(&both).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let mut control = daemon.world.control();
    let delete = Call::ServiceDelete { service: web() };
    control.apply(&[delete]).unwrap();
    daemon.weights(&both).await;
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_never_starts_is_fatal() {
    let world = World::default();
    world.refuse_to_start();
    let daemon = Running::start(world, Dead::default(), FILE);
    let error = daemon.task.await.unwrap().unwrap_err();
    assert!(error.contains("did not start"), "{error}");
}

/// All that a reload changes goes to the engine in one request.
#[tokio::test]
async fn a_reload_is_one_request() {
    let log = Log::default();
    let _listening = log.listen();
    let file = || {
        let mut text = "[sysctl]\nconn_reuse_mode = 1\n".to_owned();
        for n in 1..50 {
            text.push_str(&format!(
                "[[service]]\nname = \"s{n}\"\naddress = \"192.0.2.{n}:80\"\nforward = \"nat\"\nscheduler = \"rr\"\n"
            ));
            for server in 1..4 {
                text.push_str(&format!(
                    "[[service.server]]\naddress = \"10.0.{n}.{server}\"\n"
                ));
            }
        }
        text
    };
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    log.says("ready: 1 service, 2 of 2 servers up").await;
    let before = daemon.world.requests();
    daemon.reload(&file()).await;
    let all = |daemon: &Running| daemon.world.engine().0.services.len();
    for _ in 0..10_000 {
        if all(&daemon) == 49 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(all(&daemon), 49);
    assert_eq!(daemon.world.requests(), before + 1);
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_reload_that_replaces_servers_waits_for_the_new_ones() {
    let slow = Slow::default();
    let daemon = slow.start(FILE);
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
        .await;
    let others = FILE
        .replace("10.0.0.1", "10.0.0.3")
        .replace("10.0.0.2", "10.0.0.4");
    slow.hold("10.0.0.3:80");
    slow.hold("10.0.0.4:80");
    daemon.reload(&others).await;
    tokio::time::sleep(Duration::from_millis(900)).await;
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
        .await;
    slow.release("10.0.0.4:80");
    daemon.weights(&[("10.0.0.4:80", 3)]).await;
    slow.release("10.0.0.3:80");
    daemon
        .weights(&[("10.0.0.3:80", 1), ("10.0.0.4:80", 3)])
        .await;
    daemon.stop().await;
}

/// Servers whose answer can be held up, for ever.
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

/// One check without an answer holds back its own service, and nothing else.
#[tokio::test(start_paused = true)]
async fn a_slow_first_check_holds_back_its_own_address_only() {
    let log = Log::default();
    let _listening = log.listen();
    let slow = Slow::default();
    slow.hold("10.0.0.2:80");
    let daemon = slow.start(TWO);
    daemon.weights(&[("10.0.0.1:80", 1)]).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let vips = |daemon: &Running| -> Vec<String> {
        let engine = daemon.world.engine();
        engine.vips().iter().map(ToString::to_string).collect()
    };
    assert_eq!(vips(&daemon), ["192.0.2.10"]);
    tokio::time::sleep(Duration::from_secs(4)).await;
    log.says("ready: 2 services, 1 of 2 servers up").await;
    assert_eq!(vips(&daemon), ["192.0.2.10"]);
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(vips(&daemon), ["192.0.2.10", "192.0.2.11"]);
    daemon.stop().await;
}

/// Rules and sysctls that have left the file go, whether lvsd was told by a reload or finds it at
/// its start.
#[tokio::test(start_paused = true)]
async fn what_has_left_the_file_is_withdrawn_by_a_reload_and_a_restart() {
    let more = format!(
        "{}\n[[mark]]\ndestination = \"192.0.2.99\"\nmark = 7\n[filter]\ndeny = \"198.51.100.0/24\"\n",
        FILE.replace(
            "conn_reuse_mode = 0",
            "conn_reuse_mode = 0\nsync_version = 0"
        )
    );
    let set = |world: &World| {
        let engine = world.engine();
        let sysctl = engine.sysctl("sync_version").map(ToOwned::to_owned);
        let rules = engine.0.marks.len() + engine.0.filters.len();
        (sysctl.unwrap(), rules)
    };
    for restart in [false, true] {
        let daemon = Running::start(World::default(), Dead::default(), &more);
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(set(&daemon.world), ("0".into(), 2));
        let daemon = if restart {
            let world = daemon.end(Signal::Stop).await;
            Running::start(world, Dead::default(), FILE)
        } else {
            daemon.reload(FILE).await;
            daemon
        };
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(set(&daemon.world), ("1".into(), 0), "restart: {restart}");
        assert_eq!(daemon.world.engine().sysctl("conn_reuse_mode"), Some("0"));
        // What others set afterwards is theirs.
        let mut control = daemon.world.control();
        let theirs = Call::SysctlSet(lvs_core::api::Sysctl {
            name: "sync_version".into(),
            value: "0".into(),
        });
        control.apply(&[theirs]).unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(set(&daemon.world), ("0".into(), 0));
        daemon.stop().await;
    }
}

/// The engine has dropped the connection, and is there: it is asked.
#[tokio::test(start_paused = true)]
async fn an_engine_without_contact_is_asked_to_stop() {
    let world = World::default();
    let daemon = Running::start(world, Dead::default(), FILE);
    let both = [("10.0.0.1:80", 1), ("10.0.0.2:80", 3)];
    daemon.weights(&both).await;
    let world = daemon.end(Signal::Stop).await;
    assert!(world.running());
    stop_engine(world.host()).await.unwrap();
    assert!(!world.running());
}

#[tokio::test(start_paused = true)]
async fn an_engine_is_waited_for_and_not_started() {
    let world = World::default();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), FILE).unwrap();
    let (config, _) = Config::load(file.path()).unwrap();
    let (signals, receiver) = mpsc::channel(4);
    let options = Options {
        attach: true,
        ..Options::new(file.path().to_owned())
    };
    let task = tokio::spawn(run(
        options,
        config,
        world.host(),
        Dead::default(),
        receiver,
    ));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(world.starts(), 0);
    assert!(!task.is_finished());
    world.start_foreign();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(world.weights(web()).len(), 2);
    signals.send(Signal::Stop).await.unwrap();
    task.await.unwrap().unwrap();
    assert_eq!(world.weights(web()).len(), 2, "it is left as it is");
}

/// What `lvsadm drain` does is not undone: not by the next look, a reload, or a restart.
#[tokio::test(start_paused = true)]
async fn a_server_that_is_drained_by_hand_stays_so() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    let weights = |weight| [("10.0.0.1:80", 1), ("10.0.0.2:80", weight)];
    daemon.weights(&weights(3)).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let by_hand = |world: &World, weight| {
        let config = lvs_core::ServerConfig::new(weight, lvs_core::Forwarding::Nat);
        let server = lvs_core::api::ServerSpec {
            service: web(),
            server: "10.0.0.2:80".parse().unwrap(),
            config,
        };
        world.control().apply(&[Call::ServerEdit(server)]).unwrap();
    };
    by_hand(&daemon.world, 0);
    tokio::time::sleep(Duration::from_secs(10)).await;
    daemon.weights(&weights(0)).await;
    daemon
        .reload(&FILE.replace("weight = 3", "weight = 7"))
        .await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    daemon.weights(&weights(0)).await;
    // Its health comes and goes.
    daemon.dead.set("10.0.0.2:80", true);
    tokio::time::sleep(Duration::from_secs(10)).await;
    daemon.dead.set("10.0.0.2:80", false);
    tokio::time::sleep(Duration::from_secs(10)).await;
    daemon.weights(&weights(0)).await;
    let world = daemon.end(Signal::Stop).await;
    let daemon = Running::start(world, Dead::default(), FILE);
    tokio::time::sleep(Duration::from_secs(10)).await;
    daemon.weights(&weights(0)).await;
    // Another engine starts with it.
    daemon.world.crash();
    tokio::time::sleep(Duration::from_secs(20)).await;
    daemon.weights(&weights(0)).await;
    assert_eq!(daemon.world.starts(), 2);
    // Whoever gives it a weight has ended the drain; which weight is the file's business.
    by_hand(&daemon.world, 1);
    daemon.weights(&weights(3)).await;
    daemon.stop().await;
}

/// A plan says what a reload then does, and does nothing.
#[tokio::test(start_paused = true)]
async fn a_plan_says_what_a_reload_would_do() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
        .await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let before = daemon.world.changes().len();
    let planned = |text: &str| {
        let (config, _) = Config::from_toml("lvsd.toml", text).unwrap();
        plan(daemon.world.host(), &config, &Admin::default()).unwrap()
    };
    assert_eq!(planned(FILE), "nothing to change\n");
    let other = FILE
        .replace("10.0.0.1", "10.0.0.3")
        .replace("weight = 3", "weight = 7");
    assert_eq!(
        planned(&other),
        "change server 10.0.0.2:80 (weight 7) of service web (tcp 192.0.2.10:80) at lvsd.toml:11\n\
         add server 10.0.0.3:80 (weight 1) to service web (tcp 192.0.2.10:80) at lvsd.toml:9\n\
         delete server 10.0.0.1:80 from service web (tcp 192.0.2.10:80)\n\
         1 server added, 1 changed, 0 drained (0 connections), 1 deleted (0 connections)\n"
    );
    assert_eq!(daemon.world.changes().len(), before);
    daemon.stop().await;
}

/// Half a file is not taken for a wish, and a wish can be told from it.
#[tokio::test(start_paused = true)]
async fn a_reload_that_takes_most_servers_away_needs_force() {
    let file = |servers: u8, more: &str| {
        let mut text = format!(
            "{more}[[service]]\naddress = \"192.0.2.10:80\"\nforward = \"nat\"\ndrain = \"0s\"\n"
        );
        for n in 1..=servers {
            text.push_str(&format!(
                "[[service.server]]\naddress = \"10.0.0.{n}:80\"\n"
            ));
        }
        text
    };
    let daemon = Running::start(World::default(), Dead::default(), &file(30, ""));
    let count = |daemon: &Running| daemon.world.weights(web()).len();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(count(&daemon), 30);
    for (text, left) in [
        (file(14, ""), 30),
        (file(15, ""), 15),
        // Of few servers all may go.
        (file(5, ""), 5),
        (file(30, ""), 30),
        (file(14, "[lvsd]\nmax_remove = 60\n"), 14),
        (file(30, ""), 30),
    ] {
        daemon.reload(&text).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(count(&daemon), left, "{text}");
    }
    daemon.reload(&file(1, "")).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(count(&daemon), 30);
    daemon.signals.send(Signal::ForcedReload).await.unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(count(&daemon), 1);
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn what_people_want_outlives_reload_restart_and_engine() {
    let mut daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
        .await;
    let done = daemon.admin(AdminState::Drain).await;
    assert_eq!(done.servers.len(), 1);
    assert_eq!(done.warnings, [""; 0]);
    let drained = [("10.0.0.1:80", 0), ("10.0.0.2:80", 3)];
    daemon.weights(&drained).await;
    let server = daemon.first_server().await;
    assert_eq!(
        (server.admin, server.configured, server.weight),
        (AdminState::Drain, Some(1), Some(0))
    );
    assert_eq!(server.health, "up");

    daemon
        .reload(&FILE.replace("weight = 3", "weight = 4"))
        .await;
    let drained = [("10.0.0.1:80", 0), ("10.0.0.2:80", 4)];
    daemon.weights(&drained).await;
    daemon.world.crash();
    tokio::time::sleep(Duration::from_secs(10)).await;
    daemon.weights(&drained).await;
    // A reload that is asked for says what came of it.
    let path = daemon.file.path().to_owned();
    std::fs::write(&path, "[[service]]\nnane = 1\n").unwrap();
    let refused = daemon
        .ask::<Reloaded>(Ask::Reload { force: false })
        .await
        .unwrap_err();
    assert!(refused.contains("unknown key `nane`"), "{refused}");
    std::fs::write(&path, FILE).unwrap();
    let done: Reloaded = daemon.ask(Ask::Reload { force: false }).await.unwrap();
    assert!(done.message.contains("reloaded"), "{}", done.message);
    assert_eq!(daemon.world.weights(web())[1].1, 3, "it is done by then");
    let events = daemon.events();
    for event in [
        "server_up",
        "admin",
        "engine_lost",
        "engine_found",
        "reload_refused",
        "reloaded",
    ] {
        assert!(
            events.iter().any(|told| told == event),
            "{event}: {events:?}"
        );
    }

    let world = daemon.end(Signal::Stop).await;
    // Of a file, by its place: the next daemon has the same one here.
    let again = Running::start(world, Dead::default(), FILE);
    tokio::time::sleep(Duration::from_secs(5)).await;
    again
        .weights(&[("10.0.0.1:80", 0), ("10.0.0.2:80", 3)])
        .await;
    again.admin(AdminState::Ready).await;
    again
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
        .await;

    again.admin(AdminState::Maintenance).await;
    again.weights(&[("10.0.0.2:80", 3)]).await;
    again.admin(AdminState::Ready).await;
    again
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
        .await;
    let unknown = AdminSpec {
        target: Target {
            service: None,
            host: [10, 9, 9, 9].into(),
            port: None,
        },
        state: AdminState::Drain,
        who: None,
        why: None,
        until: None,
    };
    let why = again
        .ask::<AdminDone>(Ask::Admin(unknown))
        .await
        .unwrap_err();
    assert!(why.contains("has no server 10.9.9.9"), "{why}");
    again.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_drain_by_hand_is_shown_and_ended() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
        .await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    by_hand(&daemon.world, 0);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let drained = [("10.0.0.1:80", 0), ("10.0.0.2:80", 3)];
    daemon.weights(&drained).await;
    assert_eq!(daemon.first_server().await.admin, AdminState::Drain);
    daemon.admin(AdminState::Ready).await;
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
        .await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
        .await;
    daemon.stop().await;
}

/// Gives 10.0.0.1 a weight as ipvsadm does.
fn by_hand(world: &World, weight: i32) {
    let held = world.engine();
    let servers = &held.service(web()).unwrap().servers;
    let server: SocketAddr = "10.0.0.1:80".parse().unwrap();
    let now = servers.iter().find(|s| s.server == server).unwrap().config;
    let spec = lvs_core::api::ServerSpec {
        service: web(),
        server,
        config: lvs_core::ServerConfig { weight, ..now },
    };
    world.control().apply(&[Call::ServerEdit(spec)]).unwrap();
}

#[tokio::test(start_paused = true)]
async fn changes_by_hand_beside_services_are_told_too() {
    for report in [false, true] {
        let line = if report {
            "[lvsd]\ndrift = \"report\"\n"
        } else {
            ""
        };
        let rule = "[[mark]]\ndestination = \"192.0.2.99\"\nmark = 7\n";
        let text = format!("{line}{FILE}{rule}");
        let mut daemon = Running::start(World::default(), Dead::default(), &text);
        tokio::time::sleep(Duration::from_secs(5)).await;
        let vip: IpAddr = "192.0.2.10".parse().unwrap();
        assert!(daemon.world.engine().vips().contains(&vip));
        let by_hand = [
            Call::VipsOwn { addresses: vec![] },
            Call::MarkSet { rules: vec![] },
            Call::SysctlSet(lvs_core::api::Sysctl {
                name: "conn_reuse_mode".to_owned(),
                value: "1".to_owned(),
            }),
        ];
        daemon.world.control().apply(&by_hand).unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
        let events = daemon.events();
        let told = events.iter().filter(|event| *event == "drift").count();
        assert_eq!(told, 3, "each once: {events:?}");
        let status: Status = daemon.ask(Ask::Status {}).await.unwrap();
        let engine = daemon.world.engine();
        let left = (
            engine.vips().is_empty(),
            engine.0.marks.is_empty(),
            engine.sysctl("conn_reuse_mode"),
            status.drift.len(),
        );
        if report {
            assert_eq!(left, (true, true, Some("1"), 3), "{:?}", status.drift);
            daemon.reload(&text).await;
            tokio::time::sleep(Duration::from_secs(5)).await;
        } else {
            assert_eq!(left, (false, false, Some("0"), 0), "{:?}", status.drift);
        }
        let engine = daemon.world.engine();
        assert!(engine.vips().contains(&vip) && engine.0.marks.len() == 1);
        assert_eq!(engine.sysctl("conn_reuse_mode"), Some("0"));
        daemon.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn changes_by_hand_are_put_right_or_left() {
    for report in [false, true] {
        let line = if report {
            "[lvsd]\ndrift = \"report\"\n"
        } else {
            ""
        };
        let text = format!("{line}{FILE}");
        let mut daemon = Running::start(World::default(), Dead::default(), &text);
        daemon
            .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
            .await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        by_hand(&daemon.world, 9);
        let delete = Call::ServerDelete {
            service: web(),
            server: "10.0.0.2:80".parse().unwrap(),
        };
        daemon.world.control().apply(&[delete]).unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
        let status: Status = daemon.ask(Ask::Status {}).await.unwrap();
        let told = daemon
            .events()
            .iter()
            .filter(|event| *event == "drift")
            .count();
        assert_eq!(told, 2, "each once");
        if report {
            daemon.weights(&[("10.0.0.1:80", 9)]).await;
            assert_eq!(status.drift.len(), 2, "{:?}", status.drift);
            // Health counts all the same.
            daemon.dead.set("10.0.0.1:80", true);
            daemon.weights(&[("10.0.0.1:80", 0)]).await;
            daemon.dead.set("10.0.0.1:80", false);
            daemon.weights(&[("10.0.0.1:80", 9)]).await;
            daemon.reload(&text).await;
        } else {
            assert_eq!(status.drift, [""; 0]);
        }
        daemon
            .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 3)])
            .await;
        let status: Status = daemon.ask(Ask::Status {}).await.unwrap();
        assert_eq!(status.drift, [""; 0]);
        daemon.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_sorry_server_serves_below_the_quorum_and_the_vip_goes() {
    let text = FILE.replace(
        "forward = \"nat\"",
        "forward = \"nat\"\nquorum = { up = 2, down = 1 }\nsorry = \"10.0.0.99:80\"\nbelow_quorum = \"give-up\"\ndrain = \"0s\"",
    );
    let mut daemon = Running::start(World::default(), Dead::default(), &text);
    let both = [("10.0.0.1:80", 1), ("10.0.0.2:80", 3)];
    daemon.weights(&both).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let vip = "192.0.2.10".parse().unwrap();
    assert!(daemon.world.engine().vips().contains(&vip));
    daemon.dead.set("10.0.0.1:80", true);
    daemon
        .weights(&[("10.0.0.1:80", 0), ("10.0.0.2:80", 3)])
        .await;
    daemon.dead.set("10.0.0.2:80", true);
    daemon
        .weights(&[("10.0.0.1:80", 0), ("10.0.0.2:80", 0), ("10.0.0.99:80", 1)])
        .await;
    assert!(!daemon.world.engine().vips().contains(&vip));
    let status: Status = daemon.ask(Ask::Status {}).await.unwrap();
    assert!(!status.services[0].quorum && status.services[0].withdrawn);
    assert_eq!(
        status.services[0].sorry,
        Some("10.0.0.99:80".parse().unwrap())
    );
    // One is enough to keep the quorum, and not to gain it.
    daemon.dead.set("10.0.0.1:80", false);
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.2:80", 0), ("10.0.0.99:80", 1)])
        .await;
    daemon.dead.set("10.0.0.2:80", false);
    daemon.weights(&both).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(daemon.world.engine().vips().contains(&vip));
    let events = daemon.events();
    for event in [
        "quorum_lost",
        "sorry_on",
        "vip_withdrawn",
        "quorum_gained",
        "sorry_off",
        "vip_owned",
    ] {
        assert_eq!(
            events.iter().filter(|told| *told == event).count(),
            1,
            "{event}: {events:?}"
        );
    }
    daemon.stop().await;
}

/// What happens to one of four servers.
#[derive(Clone, Copy, Debug)]
enum Turn {
    Dies(u8),
    Lives(u8),
    Drained(u8),
    Ready(u8),
}

/// What should be, by the documentation.
#[derive(Clone, Debug)]
struct Model {
    quorum: (usize, usize),
    share: usize,
    sorry: bool,
    up: [bool; 4],
    drained: [bool; 4],
    has_quorum: bool,
}

impl Model {
    /// Weights of the servers and of the sorry server, and whether the VIP is owned.
    fn turn(&mut self, turn: Turn) -> (Vec<i32>, Option<i32>, bool) {
        match turn {
            Turn::Dies(n) => self.up[usize::from(n)] = false,
            Turn::Lives(n) => self.up[usize::from(n)] = true,
            Turn::Drained(n) => self.drained[usize::from(n)] = true,
            Turn::Ready(n) => self.drained[usize::from(n)] = false,
        }
        let count = |is: &dyn Fn(usize) -> bool| (0..4).filter(|n| is(*n)).count();
        let usable = count(&|n| self.up[n] && !self.drained[n]);
        let wanted = count(&|n| !self.drained[n]);
        if usable < self.quorum.1 {
            self.has_quorum = false;
        } else if usable >= self.quorum.0 {
            self.has_quorum = true;
        }
        let sorry = self.sorry && !self.has_quorum;
        let too_few = usable * 100 < wanted * self.share;
        let all = too_few && !(sorry && usable == 0);
        let weight = |n: usize| i32::from(!self.drained[n] && (self.up[n] || all));
        let owned = self.has_quorum || all;
        ((0..4).map(weight).collect(), sorry.then_some(1), owned)
    }
}

fn turns() -> impl proptest::strategy::Strategy<Value = Vec<Turn>> {
    use proptest::prelude::*;
    let turn = (0..4u8, 0..6u8).prop_map(|(n, what)| match what {
        0 | 1 => Turn::Dies(n),
        2 | 3 => Turn::Lives(n),
        4 => Turn::Drained(n),
        _ => Turn::Ready(n),
    });
    proptest::collection::vec(turn, 1..12)
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig { cases: 32, ..Default::default() })]

    /// Quorum with hysteresis, minimum share, sorry server and VIP, by whatever turns of fate and
    /// of people.
    #[test]
    fn decisions_follow_the_model(
        up in 1..=4usize,
        less in 0..3usize,
        share in proptest::sample::select(vec![0usize, 30, 60, 100]),
        sorry in proptest::bool::ANY,
        turns in turns(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        let mut model = Model {
            quorum: (up, up.saturating_sub(less).max(1)),
            share,
            sorry,
            up: [true; 4],
            drained: [false; 4],
            has_quorum: true,
        };
        let mut text = format!(
            "[[service]]\naddress = \"192.0.2.10:80\"\nforward = \"nat\"\ndrain = \"0s\"\n\
             quorum = {{ up = {}, down = {} }}\nmin_share = {share}\nbelow_quorum = \"give-up\"\n\
             check = {{ type = \"tcp\", interval = \"1s\", timeout = \"1s\", rise = 1, fall = 1 }}\n",
            model.quorum.0, model.quorum.1
        );
        if sorry {
            text.push_str("sorry = \"10.0.0.99:80\"\n");
        }
        for n in 0..4 {
            text.push_str(&format!("[[service.server]]\naddress = \"10.0.0.{n}:80\"\n"));
        }
        runtime.block_on(async {
            let daemon = Running::start(World::default(), Dead::default(), &text);
            tokio::time::sleep(Duration::from_secs(5)).await;
            for (number, turn) in turns.iter().enumerate() {
                let (weights, sorry, owned) = model.turn(*turn);
                let admin = |n: u8, state| {
                    daemon.ask::<AdminDone>(Ask::Admin(AdminSpec {
                        target: Target {
                            service: None,
                            host: [10, 0, 0, n].into(),
                            port: None,
                        },
                        state,
                        who: None,
                        why: None,
                        until: None,
                    }))
                };
                match *turn {
                    Turn::Dies(n) => daemon.dead.set(&format!("10.0.0.{n}:80"), true),
                    Turn::Lives(n) => daemon.dead.set(&format!("10.0.0.{n}:80"), false),
                    Turn::Drained(n) => drop(admin(n, AdminState::Drain).await.unwrap()),
                    Turn::Ready(n) => drop(admin(n, AdminState::Ready).await.unwrap()),
                }
                tokio::time::sleep(Duration::from_secs(4)).await;
                let now: Vec<i32> = daemon.world.weights(web()).iter().map(|(_, w)| *w).collect();
                let wanted: Vec<i32> = weights.into_iter().chain(sorry).collect();
                assert_eq!(now, wanted, "after {:?} of {turns:?}", number + 1);
                let vip = "192.0.2.10".parse().unwrap();
                let owns = daemon.world.engine().vips().contains(&vip);
                assert_eq!(owns, owned, "after {:?} of {turns:?}", number + 1);
            }
            daemon.stop().await;
        });
    }
}

/// A server in maintenance keeps its connections for as long as `drain` says, and no longer.
#[tokio::test(start_paused = true)]
async fn a_drain_has_a_deadline() {
    let text = FILE.replace("forward = \"nat\"", "forward = \"nat\"\ndrain = \"60s\"");
    let daemon = Running::start(World::default(), Dead::default(), &text);
    let both = [("10.0.0.1:80", 1), ("10.0.0.2:80", 3)];
    daemon.weights(&both).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    daemon.world.connect(web(), "10.0.0.1:80".parse().unwrap());
    daemon.admin(AdminState::Maintenance).await;
    let since = Instant::now();
    let drained = [("10.0.0.1:80", 0), ("10.0.0.2:80", 3)];
    daemon.weights(&drained).await;
    tokio::time::sleep(Duration::from_secs(50)).await;
    daemon.weights(&drained).await;
    daemon.weights(&[("10.0.0.2:80", 3)]).await;
    let took = since.elapsed().as_secs();
    assert!((60..65).contains(&took), "{took}");
    daemon.stop().await;
}

/// With `alpha` nobody is trusted who was there before: what serves has to pass a check first.
#[tokio::test(start_paused = true)]
async fn alpha_takes_over_nothing_that_was_not_checked() {
    for alpha in [false, true] {
        let line = if alpha { "alpha = true\n" } else { "" };
        let text = FILE.replace(
            "forward = \"nat\"",
            &format!(
                "forward = \"nat\"\n{line}below_quorum = \"give-up\"\nsorry = \"10.0.0.99:80\"\ndrain = \"0s\""
            ),
        );
        let first = Running::start(World::default(), Dead::default(), &text);
        let both = [("10.0.0.1:80", 1), ("10.0.0.2:80", 3)];
        first.weights(&both).await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        let world = first.end(Signal::Stop).await;
        let slow = Slow::default();
        slow.hold("10.0.0.1:80");
        slow.hold("10.0.0.2:80");
        let again = Running::start_with(world, Dead::default(), slow.clone(), &text);
        tokio::time::sleep(Duration::from_millis(500)).await;
        let vip = "192.0.2.10".parse().unwrap();
        let owned = again.world.engine().vips().contains(&vip);
        assert_eq!(owned, !alpha);
        if alpha {
            let sorry = [("10.0.0.1:80", 0), ("10.0.0.2:80", 0), ("10.0.0.99:80", 1)];
            again.weights(&sorry).await;
        } else {
            again.weights(&both).await;
        }
        slow.release("10.0.0.1:80");
        slow.release("10.0.0.2:80");
        again.weights(&both).await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert!(again.world.engine().vips().contains(&vip));
        // A reload with new servers waits for them as without it.
        slow.hold("10.0.0.3:80");
        again.reload(&text.replace("10.0.0.1", "10.0.0.3")).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
        again.weights(&both).await;
        slow.release("10.0.0.3:80");
        again
            .weights(&[("10.0.0.2:80", 3), ("10.0.0.3:80", 1)])
            .await;
        again.stop().await;
    }
}

/// With `omega` a service goes with the daemon, and others stay.
#[tokio::test]
async fn omega_ends_a_service_and_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let told = directory.path().join("told");
    for signal in [Signal::Stop, Signal::StopAll] {
        let _ = std::fs::remove_file(&told);
        let log = Log::default();
        let _listening = log.listen();
        let user = rustix::process::getuid().as_raw();
        let text = format!(
            "[lvsd]\nnotify = [\"/bin/sh\", \"-c\", \"cat >> {}\"]\nnotify_user = \"{user}\"\n{}",
            told.display(),
            TWO.replace(
                "name = \"slow\"",
                "name = \"slow\"\nomega = true\nbelow_quorum = \"give-up\""
            )
        );
        let mut daemon = Running::start(World::default(), Dead::default(), &text);
        log.says("ready: 2 services, 2 of 2 servers up").await;
        let vips = |world: &World| -> Vec<String> {
            let engine = world.engine();
            engine.vips().iter().map(ToString::to_string).collect()
        };
        assert_eq!(vips(&daemon.world), ["192.0.2.10", "192.0.2.11"]);
        daemon.events();
        // Also where the signal comes in the middle of a request.
        daemon.world.hang(true);
        while !daemon.world.hung() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        daemon.signals.send(signal).await.unwrap();
        log.says("waiting up to 10s for the engine (pid 1), which is at a request")
            .await;
        daemon.world.hang(false);
        daemon.task.await.unwrap().unwrap();
        let world = daemon.world;
        let events = std::fs::read_to_string(&told).unwrap();
        for event in ["quorum_lost", "vip_withdrawn"] {
            let line = events.lines().find(|line| line.contains(event));
            let line = line.unwrap_or_else(|| panic!("{event}: {events}"));
            assert!(
                line.contains("\"slow\"") && line.contains("omega"),
                "{line}"
            );
        }
        assert!(
            !events.contains("quorum_lost\",\"service\":\"web"),
            "{events}"
        );
        if signal == Signal::Stop {
            assert!(world.running());
            assert_eq!(vips(&world), ["192.0.2.10"]);
            assert_eq!(world.weights(web()).len(), 1);
            assert_eq!(world.engine().0.services.len(), 1);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn too_few_servers_are_all_used() {
    let text = FILE.replace("forward = \"nat\"", "forward = \"nat\"\nmin_share = 60");
    let daemon = Running::start(World::default(), Dead::default(), &text);
    let both = [("10.0.0.1:80", 1), ("10.0.0.2:80", 3)];
    daemon.weights(&both).await;
    daemon.dead.set("10.0.0.1:80", true);
    tokio::time::sleep(Duration::from_secs(10)).await;
    daemon.weights(&both).await;
    let status: Status = daemon.ask(Ask::Status {}).await.unwrap();
    assert!(status.services[0].panic);
    assert_eq!(status.services[0].servers[0].health, "down");
    daemon.stop().await;
}
