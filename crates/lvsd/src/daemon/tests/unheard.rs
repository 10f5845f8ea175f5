//! Sources that have not answered yet: the state of the dataplane is unchanged.

use super::*;

/// The configuration of an etcd that does not answer.
const CLUSTER: &str = "[cluster]\netcd = \"http://127.0.0.1:1\"\ndirector = \"d1\"\n";

fn second() -> ServiceId {
    ServiceId::Tcp {
        address: "192.0.2.11:80".parse().unwrap(),
    }
}

/// Returns a dataplane with both services of [`TWO`], whose lvsd has exited.
async fn left_behind() -> World {
    let daemon = Running::start(World::default(), Dead::default(), TWO);
    daemon.weights(&[("10.0.0.1:80", 1)]).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(daemon.world.weights(second()).len(), 1);
    assert_eq!(daemon.world.dataplane().vips().len(), 2);
    daemon.end(Signal::Stop).await
}

async fn status(daemon: &Running) -> Status {
    tokio::time::sleep(Duration::from_secs(10)).await;
    daemon.status().await
}

#[tokio::test(start_paused = true)]
async fn services_and_servers_of_the_dataplane_stay_while_etcd_has_not_answered() {
    let log = Log::default();
    let _listening = log.listen();
    let world = left_behind().await;
    let (before, dataplane) = (world.changes().len(), world.dataplane());
    let file = format!(
        "{CLUSTER}[[service]]\nname = \"web\"\naddress = \"192.0.2.10:80\"\nforward = \"nat\"\n\
         below_quorum = \"give-up\"\ndiscover = {{ etcd = \"web\" }}\n"
    );
    let mut daemon = Running::start(world, Dead::default(), &file);
    let reported = status(&daemon).await;
    let made = daemon.world.changes();
    assert!(made[before..].is_empty(), "{:#?}", &made[before..]);
    assert_eq!(daemon.world.dataplane().vips(), dataplane.vips());
    let etcd = &reported.sources[0];
    assert_eq!((etcd.known, etcd.held), (false, 1), "{etcd:?}");
    let web = &reported.services[0];
    assert!(web.unheard && web.quorum && !web.withdrawn, "{web:?}");
    assert!(reported.drift.is_empty(), "{:?}", reported.drift);
    let events = daemon.events();
    for event in ["quorum_lost", "vip_withdrawn", "drift"] {
        assert!(
            !events.iter().any(|one| one == event),
            "unexpected event {event}: {events:?}"
        );
    }
    let text = log.text();
    assert!(
        text.contains("event=\"unnamed\""),
        "no event `unnamed` in {text}"
    );
    assert!(
        !text.contains("its last answer is still used"),
        "unexpected `its last answer is still used` in {text}"
    );

    // Manual changes of unmanaged services are allowed, and are neither reverted nor reported.
    let by_hand = Call::ServiceDelete { service: second() };
    daemon.world.control().apply(&[by_hand]).unwrap();
    let reported = status(&daemon).await;
    assert_eq!(reported.sources[0].held, 0);
    assert!(reported.drift.is_empty() && !daemon.events().contains(&"drift".to_owned()));
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn reload_removes_services_missing_in_file_only_if_no_etcd_answer_is_awaited() {
    let daemon = Running::start(left_behind().await, Dead::default(), TWO);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let before = daemon.world.changes().len();
    daemon.reload(CLUSTER).await;
    let reported = status(&daemon).await;
    assert!(reported.loaded.ok, "{:?}", reported.loaded);
    assert_eq!(reported.sources[0].held, 2);
    assert_eq!(daemon.world.changes().len(), before);
    // Without `[cluster]`, lvsd waits for no answer, and removes services that the file lacks.
    let one = TWO.split("    [[service]]\n    name = \"slow\"").next();
    daemon.reload(one.unwrap()).await;
    let reported = status(&daemon).await;
    assert!(
        reported.loaded.ok && reported.sources.is_empty(),
        "{reported:?}"
    );
    assert!(daemon.world.dataplane().service(second()).is_none());
    daemon.weights(&[("10.0.0.1:80", 1)]).await;
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn max_removed_percent_counts_servers_kept_while_etcd_has_not_answered() {
    let mut text = String::new();
    for n in 1..=30 {
        text.push_str(&format!(
            "[[service.server]]\naddress = \"10.0.0.{n}:80\"\n"
        ));
    }
    let service = |address: &str| {
        format!("[[service]]\naddress = \"{address}\"\nforward = \"nat\"\ndrain = \"0s\"\n")
    };
    let all = format!("{}{text}", service("192.0.2.10:80"));
    let daemon = Running::start(World::default(), Dead::default(), &all);
    tokio::time::sleep(Duration::from_secs(3)).await;
    daemon.reload(CLUSTER).await;
    let reported = status(&daemon).await;
    assert!(reported.loaded.ok, "{:?}", reported.loaded);
    let few = format!(
        "{}[[service.server]]\naddress = \"10.0.0.1:80\"\n",
        service("192.0.2.10:80")
    );
    daemon.reload(&few).await;
    let reported = status(&daemon).await;
    let message = reported.loaded.message;
    assert!(
        message.contains("1 of 30 servers left"),
        "no `1 of 30 servers left` in {message}"
    );
    assert_eq!(daemon.world.weights(web()).len(), 30);
    daemon.signals.send(Signal::ForcedReload).await.unwrap();
    daemon.weights(&[("10.0.0.1:80", 1)]).await;
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn service_whose_source_has_not_answered_has_quorum_only_with_servers() {
    for from in ["etcd = \"web\"", "dns = \"web.invalid\""] {
        let file = format!(
            "{CLUSTER}[dns]\nname_servers = [\"127.0.0.1:1\"]\n\
             [[service]]\nname = \"web\"\naddress = \"192.0.2.10:80\"\nforward = \"nat\"\n\
             discover = {{ {from} }}\n"
        );
        let daemon = Running::start(World::default(), Dead::default(), &file);
        let reported = status(&daemon).await;
        let web = &reported.services[0];
        assert!(web.unheard && !web.quorum, "{from}: {web:?}");
        let world = daemon.end(Signal::Stop).await;
        // After an operator has added a server, the service has its quorum.
        let spec = lvs_core::api::ServerSpec {
            service: self::web(),
            server: ([10, 0, 0, 1], 80).into(),
            config: lvs_core::ServerConfig::new(1, lvs_core::Forwarding::Nat),
        };
        world.control().apply(&[Call::ServerAdd(spec)]).unwrap();
        let daemon = Running::start(world, Dead::default(), &file);
        let reported = status(&daemon).await;
        let web = &reported.services[0];
        assert!(web.unheard && web.quorum, "{from}: {web:?}");
        assert_eq!(daemon.world.weights(self::web()).len(), 1);
        daemon.stop().await;
    }
}
