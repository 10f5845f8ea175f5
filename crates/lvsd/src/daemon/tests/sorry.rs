//! The sorry server, which replaces the other servers below the quorum.

use std::collections::HashMap;

use super::*;
use crate::health::Weight;

const ONE: &str = "10.0.0.1:80";
const OTHER: &str = "10.0.0.2:80";
const SORRY: &str = "10.0.0.99:80";

fn file(more: &str) -> String {
    let more =
        format!("forward = \"nat\"\nquorum = 2\nsorry = \"{SORRY}\"\ndrain = \"0s\"\n{more}");
    FILE.replace("forward = \"nat\"", &more)
}

#[tokio::test(start_paused = true)]
async fn sorry_server_replaces_servers_below_quorum_and_is_added_before_their_weight_is_0() {
    let daemon = Running::start(World::default(), Dead::default(), &file(""));
    let both = [(ONE, 1), (OTHER, 3)];
    daemon.weights(&both).await;
    daemon.dead.set(ONE, true);
    let replaced = [(ONE, 0), (OTHER, 0), (SORRY, 1)];
    daemon.weights(&replaced).await;
    // The service is never without a server: the sorry server is added before the others are
    // removed.
    let changes = daemon.world.changes();
    let place = |is: &dyn Fn(&Call) -> bool| changes.iter().position(is);
    let comes = place(
        &|call| matches!(call, Call::ServerAdd(spec) if spec.server == SORRY.parse().unwrap()),
    );
    let goes = place(
        &|call| matches!(call, Call::ServerEdit(spec) if spec.server == OTHER.parse().unwrap() && spec.config.weight == 0),
    );
    assert!(comes.is_some() && comes < goes, "{changes:#?}");
    let deleted = |changes: &[Call]| {
        let deletes = |call: &&Call| matches!(call, Call::ServerDelete { server, .. } if *server != SORRY.parse().unwrap());
        changes.iter().filter(deletes).count()
    };
    let status = daemon.status().await;
    assert_eq!(status.services[0].servers[1].health, "up");
    daemon.dead.set(ONE, false);
    daemon.weights(&both).await;
    assert_eq!(
        deleted(&daemon.world.changes()),
        0,
        "a server with connections was deleted"
    );
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn sorry_server_serves_while_drain_by_operator_leaves_service_below_quorum() {
    let daemon = Running::start(World::default(), Dead::default(), &file(""));
    daemon.weights(&[(ONE, 1), (OTHER, 3)]).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    // After the drain over the API, the only remaining server is below the quorum.
    daemon.admin(AdminState::Drain).await;
    let replaced = [(ONE, 0), (OTHER, 0), (SORRY, 1)];
    daemon.weights(&replaced).await;
    daemon.dead.set(OTHER, true);
    tokio::time::sleep(Duration::from_secs(10)).await;
    daemon.dead.set(OTHER, false);
    tokio::time::sleep(Duration::from_secs(10)).await;
    daemon.weights(&replaced).await;
    assert_eq!(daemon.first_server().await.admin, AdminState::Drain);
    daemon.admin(AdminState::Ready).await;
    daemon.weights(&[(ONE, 1), (OTHER, 3)]).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    // Manual weights: a server that was drained before stays drained, and the weight 0 below the
    // quorum is not a drain.
    let by_hand = |weight| {
        let config = lvs_core::ServerConfig::new(weight, lvs_core::Forwarding::Nat);
        let server = lvs_core::api::ServerSpec {
            service: web(),
            server: OTHER.parse().unwrap(),
            config,
        };
        let mut control = daemon.world.control();
        control.apply(&[Call::ServerEdit(server)]).unwrap();
    };
    by_hand(0);
    daemon.weights(&replaced).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    let status = daemon.status().await;
    let states: Vec<AdminState> = status.services[0].servers[..2]
        .iter()
        .map(|server| server.admin)
        .collect();
    assert_eq!(states, [AdminState::Ready, AdminState::Drain]);
    by_hand(3);
    daemon.weights(&[(ONE, 1), (OTHER, 3)]).await;
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn sorry_server_stays_after_restart_until_quorum_is_reached() {
    let first = Running::start(World::default(), Dead::default(), &file(""));
    first.weights(&[(ONE, 1), (OTHER, 3)]).await;
    first.dead.set(ONE, true);
    let replaced = [(ONE, 0), (OTHER, 0), (SORRY, 1)];
    first.weights(&replaced).await;
    let world = first.end(Signal::Stop).await;
    let slow = Slow::default();
    slow.hold(ONE);
    slow.hold(OTHER);
    let before = world.changes().len();
    let again = Running::start_with(world, Dead::default(), slow.clone(), &file(""));
    tokio::time::sleep(Duration::from_millis(500)).await;
    again.weights(&replaced).await;
    // One of the servers is up, which is below the quorum: nothing changes.
    slow.release(OTHER);
    tokio::time::sleep(Duration::from_secs(10)).await;
    again.weights(&replaced).await;
    let since = again.world.changes().split_off(before);
    let servers = since.iter().filter(|call| {
        matches!(
            call,
            Call::ServerAdd(_) | Call::ServerEdit(_) | Call::ServerDelete { .. }
        )
    });
    assert_eq!(servers.count(), 0, "{since:#?}");
    slow.release(ONE);
    again.weights(&[(ONE, 1), (OTHER, 3)]).await;
    again.stop().await;
}

/// After a restart, the result of the first check does not make the unchecked servers count as
/// failed.
#[tokio::test(start_paused = true)]
async fn sorry_server_is_not_used_after_restart_before_all_servers_are_checked() {
    let first = Running::start(World::default(), Dead::default(), &file(""));
    let both = [(ONE, 1), (OTHER, 3)];
    first.weights(&both).await;
    let world = first.end(Signal::Stop).await;
    let slow = Slow::default();
    slow.hold(OTHER);
    let mut again = Running::start_with(world, Dead::default(), slow.clone(), &file(""));
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    again.weights(&both).await;
    slow.release(OTHER);
    tokio::time::sleep(Duration::from_secs(5)).await;
    again.weights(&both).await;
    let events = again.events();
    assert!(
        !events
            .iter()
            .any(|event| event == "quorum_lost" || event == "sorry_on"),
        "{events:?}"
    );
    let added = |call: &Call| matches!(call, Call::ServerAdd(spec) if spec.server == SORRY.parse().unwrap());
    assert!(!again.world.changes().iter().any(added));
    again.stop().await;
}

/// A server whose first check exceeds its time limit counts as failed.
#[tokio::test(start_paused = true)]
async fn server_whose_first_check_times_out_does_not_delay_sorry_server() {
    let slow = Slow::default();
    slow.hold(OTHER);
    let daemon = slow.start(&file(""));
    daemon.weights(&[(ONE, 1)]).await;
    daemon.weights(&[(ONE, 0), (SORRY, 1)]).await;
    slow.release(OTHER);
    daemon.weights(&[(ONE, 1), (OTHER, 3)]).await;
    daemon.stop().await;
}

/// Below the quorum, a server is removed instead of quiesced if weight 0 would refuse its clients,
/// or if returning clients would still be sent to it.
#[tokio::test(start_paused = true)]
async fn servers_with_sorry_server_are_removed_below_quorum_if_hashed_or_persistent() {
    for more in ["scheduler = \"sh\"", "persistence = { timeout = \"5m\" }"] {
        let daemon = Running::start(World::default(), Dead::default(), &file(more));
        let both = [(ONE, 1), (OTHER, 3)];
        daemon.weights(&both).await;
        daemon.dead.set(ONE, true);
        daemon.weights(&[(SORRY, 1)]).await;
        daemon.dead.set(ONE, false);
        daemon.weights(&both).await;
        daemon.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn draining_sorry_server_is_reported_as_sorry_server_that_does_not_serve() {
    let text = file("").replace("drain = \"0s\"", "drain = \"1h\"");
    let daemon = Running::start(World::default(), Dead::default(), &text);
    let both = [(ONE, 1), (OTHER, 3)];
    daemon.weights(&both).await;
    daemon.dead.set(ONE, true);
    daemon.weights(&[(ONE, 0), (OTHER, 0), (SORRY, 1)]).await;
    daemon.world.connect(web(), SORRY.parse().unwrap());
    daemon.dead.set(ONE, false);
    daemon.weights(&[(ONE, 1), (OTHER, 3), (SORRY, 0)]).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let service = daemon.status().await.services.remove(0);
    let last = service
        .servers
        .last()
        .expect("the service has a sorry server");
    assert_eq!((last.configured, last.weight), (None, Some(0)));
    assert_eq!(service.sorry, None, "the sorry server serves");
    assert_eq!(service.sorry_server, Some(last.server));
    daemon.stop().await;
}

/// If the sorry server were only drained, its persistent clients would stay there although the
/// other servers are usable again.
#[tokio::test(start_paused = true)]
async fn sorry_server_with_persistent_clients_is_removed_when_the_quorum_returns() {
    let more = "persistence = { timeout = \"5m\" }";
    let text = file(more).replace("drain = \"0s\"", "drain = \"1h\"");
    let daemon = Running::start(World::default(), Dead::default(), &text);
    let both = [(ONE, 1), (OTHER, 3)];
    daemon.weights(&both).await;
    daemon.dead.set(ONE, true);
    daemon.weights(&[(SORRY, 1)]).await;
    daemon.world.connect(web(), SORRY.parse().unwrap());
    daemon.dead.set(ONE, false);
    daemon.weights(&both).await;
    daemon.stop().await;
}

/// Servers that report their own weight.
#[derive(Clone, Default)]
struct Agents(Dead, Arc<Mutex<HashMap<SocketAddr, u16>>>);

impl Prober for Agents {
    fn probe(&self, check: &Check) -> impl Future<Output = Result<Advice, ProbeError>> + Send {
        let percent = self.1.lock().unwrap().get(&check.server).copied();
        let probed = self.0.probe(check);
        async move {
            probed.await?;
            Ok(percent.map_or(Advice::NONE, |percent| Advice {
                weight: Some(Weight::Percent(percent)),
                drains: None,
            }))
        }
    }
}

#[tokio::test(start_paused = true)]
async fn weight_of_agent_does_not_apply_while_sorry_server_serves() {
    let agents = Agents::default();
    let says = |percent| {
        let mut all = agents.1.lock().unwrap();
        all.insert(OTHER.parse().unwrap(), percent);
    };
    let text = file("").replace("weight = 3", "weight = 10");
    says(50);
    let daemon = Running::start_with(World::default(), agents.0.clone(), agents.clone(), &text);
    daemon.weights(&[(ONE, 1), (OTHER, 5)]).await;
    daemon.dead.set(ONE, true);
    let replaced = [(ONE, 0), (OTHER, 0), (SORRY, 1)];
    daemon.weights(&replaced).await;
    says(80);
    tokio::time::sleep(Duration::from_secs(10)).await;
    daemon.weights(&replaced).await;
    daemon.dead.set(ONE, false);
    daemon.weights(&[(ONE, 1), (OTHER, 8)]).await;
    daemon.stop().await;
}
