//! Effects of checks on servers, services and VIPs.

use super::*;

#[tokio::test(start_paused = true)]
async fn server_down_at_start_gets_no_connections() {
    let dead = Dead::default();
    dead.set("10.0.0.2:80", true);
    let daemon = Running::start(World::default(), dead, FILE);
    daemon.both(1, 0).await;
    let bad = daemon.world.changes().iter().any(|op| {
        matches!(op, Call::ServerAdd(s) if s.server == "10.0.0.2:80".parse().unwrap() && s.config.weight != 0)
    });
    assert!(!bad);
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn failed_server_is_quiesced_and_returns_when_healthy() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon.both(1, 3).await;
    daemon.dead.set("10.0.0.1:80", true);
    daemon.both(0, 3).await;
    daemon.dead.set("10.0.0.1:80", false);
    daemon.both(1, 3).await;
    let deleted = daemon
        .world
        .changes()
        .iter()
        .any(|op| matches!(op, Call::ServerDelete { .. }));
    assert!(!deleted);
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn server_with_failed_check_is_removed_if_on_check_failure_is_remove() {
    let text = FILE.replace(
        "forward = \"nat\"",
        "forward = \"nat\"\non_check_failure = \"remove\"",
    );
    let daemon = Running::start(World::default(), Dead::default(), &text);
    daemon.both(1, 3).await;
    daemon.dead.set("10.0.0.1:80", true);
    daemon.weights(&[("10.0.0.2:80", 3)]).await;
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn slow_first_check_delays_only_the_vip_of_its_service() {
    let log = Log::default();
    let _listening = log.listen();
    let slow = Slow::default();
    slow.hold("10.0.0.2:80");
    let daemon = slow.start(TWO);
    daemon.weights(&[("10.0.0.1:80", 1)]).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let vips = |daemon: &Running| -> Vec<String> {
        let dataplane = daemon.world.dataplane();
        dataplane.vips().iter().map(ToString::to_string).collect()
    };
    assert_eq!(vips(&daemon), ["192.0.2.10"]);
    tokio::time::sleep(Duration::from_secs(4)).await;
    log.says("ready: 2 services, 1 of 2 servers up").await;
    assert_eq!(vips(&daemon), ["192.0.2.10"]);
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(vips(&daemon), ["192.0.2.10", "192.0.2.11"]);
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn sorry_server_serves_and_vip_is_withdrawn_from_quorum_loss_until_quorum_is_reached() {
    let text = FILE.replace(
        "forward = \"nat\"",
        "forward = \"nat\"\nquorum = { up = 2, down = 1 }\nsorry = \"10.0.0.99:80\"\nbelow_quorum = \"give-up\"\ndrain = \"0s\"",
    );
    let mut daemon = Running::start(World::default(), Dead::default(), &text);
    daemon.both(1, 3).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let vip = "192.0.2.10".parse().unwrap();
    assert!(daemon.world.dataplane().vips().contains(&vip));
    daemon.dead.set("10.0.0.1:80", true);
    daemon.both(0, 3).await;
    daemon.dead.set("10.0.0.2:80", true);
    daemon
        .weights(&[("10.0.0.1:80", 0), ("10.0.0.2:80", 0), ("10.0.0.99:80", 1)])
        .await;
    assert!(!daemon.world.dataplane().vips().contains(&vip));
    let status = daemon.status().await;
    assert!(!status.services[0].quorum && status.services[0].withdrawn);
    assert_eq!(
        status.services[0].sorry,
        Some("10.0.0.99:80".parse().unwrap())
    );
    // One server is enough to keep the quorum, but not to reach it: the sorry server serves alone.
    daemon.dead.set("10.0.0.1:80", false);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(daemon.first_server().await.health, "up");
    daemon
        .weights(&[("10.0.0.1:80", 0), ("10.0.0.2:80", 0), ("10.0.0.99:80", 1)])
        .await;
    daemon.dead.set("10.0.0.2:80", false);
    daemon.both(1, 3).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(daemon.world.dataplane().vips().contains(&vip));
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
            events.iter().filter(|reported| *reported == event).count(),
            1,
            "{event}: {events:?}"
        );
    }
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn only_start_down_withholds_connections_from_server_in_use_at_restart_until_checked() {
    for alpha in [false, true] {
        let line = if alpha { "start_down = true\n" } else { "" };
        let text = FILE.replace(
            "forward = \"nat\"",
            &format!(
                "forward = \"nat\"\n{line}below_quorum = \"give-up\"\nsorry = \"10.0.0.99:80\"\ndrain = \"0s\""
            ),
        );
        let first = Running::start(World::default(), Dead::default(), &text);
        first.both(1, 3).await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        let world = first.end(Signal::Stop).await;
        let slow = Slow::default();
        slow.hold("10.0.0.1:80");
        slow.hold("10.0.0.2:80");
        let again = Running::start_with(world, Dead::default(), slow.clone(), &text);
        tokio::time::sleep(Duration::from_millis(500)).await;
        let vip = "192.0.2.10".parse().unwrap();
        let owned = again.world.dataplane().vips().contains(&vip);
        assert_eq!(owned, !alpha);
        if alpha {
            let sorry = [("10.0.0.1:80", 0), ("10.0.0.2:80", 0), ("10.0.0.99:80", 1)];
            again.weights(&sorry).await;
        } else {
            again.both(1, 3).await;
        }
        slow.release("10.0.0.1:80");
        slow.release("10.0.0.2:80");
        again.both(1, 3).await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert!(again.world.dataplane().vips().contains(&vip));
        // A reload with new servers waits for their first checks, as a start does.
        slow.hold("10.0.0.3:80");
        again.reload(&text.replace("10.0.0.1", "10.0.0.3")).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
        again.both(1, 3).await;
        slow.release("10.0.0.3:80");
        again
            .weights(&[("10.0.0.2:80", 3), ("10.0.0.3:80", 1)])
            .await;
        again.stop().await;
    }
}

/// At exit lvsd removes a service with `remove_on_exit`, and no other service.
#[tokio::test]
async fn remove_on_exit_removes_only_its_service_at_exit_and_reports_the_removal() {
    let directory = tempfile::tempdir().unwrap();
    let reported = directory.path().join("reported");
    for signal in [Signal::Stop, Signal::StopAll] {
        let _ = std::fs::remove_file(&reported);
        let log = Log::default();
        let _listening = log.listen();
        let user = rustix::process::getuid().as_raw();
        let text = format!(
            "[lvsd]\nnotify = [\"/bin/sh\", \"-c\", \"cat >> {}\"]\nnotify_user = \"{user}\"\n{}",
            reported.display(),
            TWO.replace(
                "name = \"slow\"",
                "name = \"slow\"\nremove_on_exit = true\nbelow_quorum = \"give-up\""
            )
        );
        let mut daemon = Running::start(World::default(), Dead::default(), &text);
        log.says("ready: 2 services, 2 of 2 servers up").await;
        let vips = |world: &World| -> Vec<String> {
            let dataplane = world.dataplane();
            dataplane.vips().iter().map(ToString::to_string).collect()
        };
        assert_eq!(vips(&daemon.world), ["192.0.2.10", "192.0.2.11"]);
        daemon.events();
        // Also if the signal arrives during a request.
        daemon.world.hang(true);
        while !daemon.world.hung() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        daemon.signals.send(signal).await.unwrap();
        log.says("waiting up to 10s for the dataplane (pid 1), which handles a request")
            .await;
        daemon.world.hang(false);
        daemon.task.await.unwrap().unwrap();
        let world = daemon.world;
        let events = std::fs::read_to_string(&reported).unwrap();
        for event in ["quorum_lost", "vip_withdrawn"] {
            let line = events.lines().find(|line| line.contains(event));
            let line = line.unwrap_or_else(|| panic!("{event}: {events}"));
            assert!(
                line.contains("\"slow\"") && line.contains("remove_on_exit"),
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
            assert_eq!(world.dataplane().0.services.len(), 1);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn panic_below_keeps_all_servers_in_use_if_too_few_are_up() {
    let text = FILE.replace("forward = \"nat\"", "forward = \"nat\"\npanic_below = 60");
    let daemon = Running::start(World::default(), Dead::default(), &text);
    daemon.both(1, 3).await;
    daemon.dead.set("10.0.0.1:80", true);
    tokio::time::sleep(Duration::from_secs(10)).await;
    daemon.both(1, 3).await;
    let status = daemon.status().await;
    assert!(status.services[0].panic);
    assert_eq!(status.services[0].servers[0].health, "down");
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn status_counts_usable_servers_of_the_dataplane_only() {
    let file = format!("[lvsd]\nmanual_changes = \"report\"\n{FILE}");
    let world = World::default();
    world.start_foreign();
    let daemon = Running::start(world, Dead::default(), &file);
    daemon.usable(2).await;
    let delete = Call::ServerDelete {
        service: web(),
        server: "10.0.0.1:80".parse().unwrap(),
    };
    daemon.world.control().apply(&[delete]).unwrap();
    daemon.usable(1).await;
    let status = daemon.status().await;
    let mut servers = status.services[0].servers.iter();
    assert!(servers.all(|server| server.health == "up"), "{status:?}");
    daemon.world.fall_silent();
    daemon.usable(0).await;
    daemon.task.abort();
}
