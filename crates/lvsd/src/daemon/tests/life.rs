//! Dataplanes that are started, found, lost, hung, or not started by lvsd.

use super::*;

#[tokio::test(start_paused = true)]
async fn daemon_starts_configures_and_stops_dataplane() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon.both(1, 3).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let dataplane = daemon.world.dataplane();
    assert_eq!(dataplane.sysctl("conn_reuse_mode"), Some("0"));
    assert!(dataplane.vips().contains(&"192.0.2.10".parse().unwrap()));
    let ops = daemon.world.changes();
    assert!(
        matches!(ops.last(), Some(Call::VipsOwn { .. })),
        "the last change was not the VIP: {ops:#?}"
    );
    let world = daemon.stop().await;
    assert!(!world.running());
    assert_eq!(world.starts(), 1);
}

#[tokio::test(start_paused = true)]
async fn stop_logs_exit_status_of_dataplane_that_exited_before() {
    let log = Log::default();
    let _listening = log.listen();
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon.both(1, 3).await;
    daemon.world.crash();
    daemon.stop().await;
    log.says("the dataplane had already exited: it ended with exit status: 1")
        .await;
}

#[tokio::test]
async fn stop_logs_the_wait_for_a_hanging_dataplane_before_the_wait_ends() {
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
            "waiting up to 10s for the dataplane (pid 1), which handles a request"
        } else {
            "waiting up to 10s for the dataplane (pid 1)"
        })
        .await;
        daemon.world.hang(false);
        daemon.task.await.unwrap().unwrap();
        assert!(!daemon.world.running());
    }
}

#[tokio::test]
async fn dataplane_that_ignores_stop_is_killed_after_10_seconds() {
    let log = Log::default();
    let _listening = log.listen();
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    log.says("ready: 1 service, 2 of 2 servers up").await;
    daemon.world.stay();
    tokio::time::pause();
    let world = daemon.end(Signal::StopAll).await;
    assert!(!world.running());
    assert_eq!(world.ended(), [1]);
    log.says("was still running 10s after the signal to stop; it was killed")
        .await;
}

#[tokio::test(start_paused = true)]
async fn daemon_restarted_after_kill_makes_no_changes_in_dataplane() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon.dead.set("10.0.0.1:80", true);
    daemon.both(0, 3).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    daemon.task.abort();
    let before = daemon.world.changes().len();
    let again = Running::start(daemon.world.clone(), daemon.dead.clone(), FILE);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(
        again.world.changes().len(),
        before,
        "the restarted daemon made changes"
    );
    assert_eq!(again.world.starts(), 1);
    let world = again.end(Signal::Stop).await;
    assert!(world.running(), "the dataplane was stopped");
    assert_eq!(world.changes().len(), before);
}

#[tokio::test(start_paused = true)]
async fn dead_dataplane_is_replaced_and_configured_again() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon.both(1, 3).await;
    daemon.world.crash();
    tokio::time::sleep(Duration::from_secs(10)).await;
    daemon.both(1, 3).await;
    assert_eq!(daemon.world.starts(), 2);
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn hung_dataplane_of_lvsd_is_killed_and_replaced() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon.both(1, 3).await;
    daemon.world.fall_silent();
    tokio::time::sleep(Duration::from_secs(5)).await;
    daemon.both(1, 3).await;
    assert_eq!(daemon.world.ended(), [1]);
    assert_eq!(daemon.world.starts(), 2);

    // The daemon that started the dataplane has crashed; the next daemon finds a dataplane that
    // never answers.
    daemon.task.abort();
    daemon.world.fall_silent();
    let again = Running::start(daemon.world.clone(), daemon.dead.clone(), FILE);
    tokio::time::sleep(Duration::from_secs(5)).await;
    again.both(1, 3).await;
    assert_eq!(again.world.ended(), [1, 2]);

    // A dataplane that hangs does not prevent the exit of the daemon.
    again.world.fall_silent();
    let world = again.stop().await;
    assert!(!world.running());
    assert_eq!(world.ended(), [1, 2, 3]);
}

#[tokio::test(start_paused = true)]
async fn lvsd_waits_a_bounded_time_for_starting_dataplane_without_answer() {
    let world = World::default();
    world.start_slowly(100);
    let daemon = Running::start(world, Dead::default(), FILE);
    daemon.both(1, 3).await;
    assert_eq!(daemon.world.ended(), [0_u32; 0]);
    assert_eq!(daemon.world.starts(), 1);
    daemon.stop().await;

    // The wait is bounded: a dataplane that never answers is killed.
    let world = World::default();
    world.start_slowly(u32::MAX);
    let daemon = Running::start(world, Dead::default(), FILE);
    tokio::time::sleep(Duration::from_secs(14)).await;
    assert!(daemon.world.running());
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(!daemon.world.running());
    assert_eq!(daemon.world.ended(), [0_u32; 0]);
    daemon.task.abort();
}

#[tokio::test(start_paused = true)]
async fn hung_dataplane_of_another_program_keeps_running() {
    let world = World::default();
    world.start_foreign();
    let daemon = Running::start(world, Dead::default(), FILE);
    daemon.both(1, 3).await;
    daemon.world.fall_silent();
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(daemon.world.running());
    assert_eq!(daemon.world.ended(), [0_u32; 0]);
    daemon.task.abort();
}

#[tokio::test(start_paused = true)]
async fn stop_leaves_foreign_dataplane_running_without_services_of_lvsd() {
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
    daemon.both(1, 3).await;
    let world = daemon.stop().await;
    assert!(world.running());
    assert_eq!(world.starts(), 0);
    let left: Vec<ServiceId> = world
        .dataplane()
        .0
        .services
        .iter()
        .map(|s| s.service)
        .collect();
    assert_eq!(left, [spec.service]);
    assert!(world.dataplane().vips().is_empty());
}

#[tokio::test(start_paused = true)]
async fn lvsd_waits_for_return_of_foreign_dataplane_and_then_starts_a_dataplane() {
    let world = World::default();
    world.start_foreign();
    let daemon = Running::start(world, Dead::default(), FILE);
    daemon.both(1, 3).await;
    daemon.world.crash();
    tokio::time::sleep(Duration::from_secs(1)).await;
    daemon.world.start_foreign();
    daemon.both(1, 3).await;
    assert_eq!(daemon.world.starts(), 0);

    daemon.world.crash();
    tokio::time::sleep(Duration::from_secs(10)).await;
    daemon.both(1, 3).await;
    assert_eq!(daemon.world.starts(), 1, "the dataplane did not return");
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn lvsd_exits_if_dataplane_never_starts() {
    let world = World::default();
    world.refuse_to_start();
    let daemon = Running::start(world, Dead::default(), FILE);
    let error = daemon.task.await.unwrap().unwrap_err();
    assert!(
        error.contains("did not start"),
        "no `did not start` in {error}"
    );
}

#[tokio::test(start_paused = true)]
async fn dataplane_without_daemon_is_stopped_on_request() {
    let world = World::default();
    let daemon = Running::start(world, Dead::default(), FILE);
    daemon.both(1, 3).await;
    let world = daemon.end(Signal::Stop).await;
    assert!(world.running());
    stop_dataplane(world.host()).await.unwrap();
    assert!(!world.running());
}

#[tokio::test(start_paused = true)]
async fn lvsd_with_attach_never_starts_a_dataplane_and_leaves_servers_at_stop() {
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
    assert_eq!(
        world.weights(web()).len(),
        2,
        "the servers of the dataplane were changed"
    );
}
