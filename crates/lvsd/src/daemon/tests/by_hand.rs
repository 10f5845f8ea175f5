//! Changes outside of the file: drains, maintenance, and manual changes of the dataplane.

use super::*;

#[tokio::test(start_paused = true)]
async fn manually_deleted_service_is_added_again() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon.both(1, 3).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let mut control = daemon.world.control();
    let delete = Call::ServiceDelete { service: web() };
    control.apply(&[delete]).unwrap();
    daemon.both(1, 3).await;
    daemon.stop().await;
}

/// The next comparison, a reload and a restart do not revert `lvsadm drain`.
#[tokio::test(start_paused = true)]
async fn manually_drained_server_stays_drained_until_its_weight_is_set_manually() {
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
    // The health of the server changes.
    daemon.dead.set("10.0.0.2:80", true);
    tokio::time::sleep(Duration::from_secs(10)).await;
    daemon.dead.set("10.0.0.2:80", false);
    tokio::time::sleep(Duration::from_secs(10)).await;
    daemon.weights(&weights(0)).await;
    let world = daemon.end(Signal::Stop).await;
    let daemon = Running::start(world, Dead::default(), FILE);
    tokio::time::sleep(Duration::from_secs(10)).await;
    daemon.weights(&weights(0)).await;
    // Another dataplane starts with the override.
    daemon.world.crash();
    tokio::time::sleep(Duration::from_secs(20)).await;
    daemon.weights(&weights(0)).await;
    assert_eq!(daemon.world.starts(), 2);
    // A manual weight ends the drain; lvsd then sets the weight of the file.
    by_hand(&daemon.world, 1);
    daemon.weights(&weights(3)).await;
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn override_survives_reload_restart_and_new_dataplane() {
    let mut daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon.both(1, 3).await;
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
    // A requested reload returns its result.
    let path = daemon.file.path().to_owned();
    std::fs::write(&path, "[[service]]\nnane = 1\n").unwrap();
    let refused = daemon
        .ask::<Reloaded>(ChangeRequest::Reload { force: false })
        .await
        .unwrap_err();
    assert!(
        refused.contains("unknown key `nane`"),
        "no \"unknown key `nane`\" in {refused}"
    );
    std::fs::write(&path, FILE).unwrap();
    let done: Reloaded = daemon
        .ask(ChangeRequest::Reload { force: false })
        .await
        .unwrap();
    assert!(done.warnings.is_empty(), "{done:?}");
    assert_eq!(
        daemon.world.weights(web())[1].1,
        3,
        "the reload was answered before the dataplane had its weights"
    );
    let events = daemon.events();
    for event in [
        "server_up",
        "admin",
        "dataplane_lost",
        "dataplane_found",
        "reload_refused",
        "reloaded",
    ] {
        assert!(
            events.iter().any(|reported| reported == event),
            "{event}: {events:?}"
        );
    }

    let world = daemon.end(Signal::Stop).await;
    // The next daemon reads the same stored overrides.
    let again = Running::start(world, Dead::default(), FILE);
    tokio::time::sleep(Duration::from_secs(5)).await;
    again.both(0, 3).await;
    again.admin(AdminState::Ready).await;
    again.both(1, 3).await;

    again.admin(AdminState::Maintenance).await;
    again.weights(&[("10.0.0.2:80", 3)]).await;
    again.admin(AdminState::Ready).await;
    again.both(1, 3).await;
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
        force: false,
    };
    let why = again
        .ask::<AdminDone>(ChangeRequest::Admin(unknown))
        .await
        .unwrap_err();
    assert!(
        why.contains("has no server 10.9.9.9"),
        "no `has no server 10.9.9.9` in {why}"
    );
    again.stop().await;
}

#[tokio::test(start_paused = true)]
async fn override_request_is_answered_when_applied_or_with_warning_if_dataplane_hangs() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon.both(1, 3).await;
    let server: SocketAddr = "10.0.0.1:80".parse().unwrap();
    let weight = || {
        let all = daemon.world.weights(web());
        all.iter()
            .find(|(one, _)| *one == server)
            .map(|(_, weight)| *weight)
    };
    for _ in 0..5 {
        for (state, applied) in [
            (AdminState::Drain, Some(0)),
            (AdminState::Ready, Some(1)),
            (AdminState::Maintenance, None),
            (AdminState::Ready, Some(1)),
        ] {
            let done = daemon.admin(state).await;
            assert_eq!(weight(), applied, "{state:?}");
            assert_eq!(done.warnings, [""; 0]);
        }
    }
    daemon.world.hang(true);
    // Virtual time stands still while a thread waits for the dataplane.
    let passing = async {
        loop {
            tokio::time::advance(Duration::from_secs(1)).await;
        }
    };
    let done = tokio::select! {
        done = daemon.admin(AdminState::Drain) => done,
        () = passing => unreachable!("the endless loop has ended"),
    };
    assert!(
        matches!(&done.warnings[..], [one] if one.contains("has not applied")),
        "{done:?}"
    );
    daemon.world.hang(false);
    daemon.both(0, 3).await;
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn manual_drain_is_shown_as_override_and_ends_with_ready_request() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon.both(1, 3).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    by_hand(&daemon.world, 0);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let drained = [("10.0.0.1:80", 0), ("10.0.0.2:80", 3)];
    daemon.weights(&drained).await;
    assert_eq!(daemon.first_server().await.admin, AdminState::Drain);
    daemon.admin(AdminState::Ready).await;
    daemon.both(1, 3).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    daemon.both(1, 3).await;
    daemon.stop().await;
}

/// Sets the weight of 10.0.0.1, as ipvsadm does.
fn by_hand(world: &World, weight: i32) {
    let held = world.dataplane();
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
async fn manual_changes_of_vips_marks_and_sysctls_are_reported_and_reverted_or_kept() {
    for report in [false, true] {
        let line = if report {
            "[lvsd]\nmanual_changes = \"report\"\n"
        } else {
            ""
        };
        let rule = "[[mark]]\ndestination = \"192.0.2.99\"\nmark = 7\n";
        let text = format!("{line}{FILE}{rule}");
        let mut daemon = Running::start(World::default(), Dead::default(), &text);
        tokio::time::sleep(Duration::from_secs(5)).await;
        let vip: IpAddr = "192.0.2.10".parse().unwrap();
        assert!(daemon.world.dataplane().vips().contains(&vip));
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
        let reported = events.iter().filter(|event| *event == "drift").count();
        assert_eq!(
            reported, 3,
            "a manual change was not reported exactly once: {events:?}"
        );
        let status = daemon.status().await;
        let dataplane = daemon.world.dataplane();
        let left = (
            dataplane.vips().is_empty(),
            dataplane.0.marks.is_empty(),
            dataplane.sysctl("conn_reuse_mode"),
            status.drift.len(),
        );
        if report {
            assert_eq!(left, (true, true, Some("1"), 3), "{:?}", status.drift);
            daemon.reload(&text).await;
            tokio::time::sleep(Duration::from_secs(5)).await;
        } else {
            assert_eq!(left, (false, false, Some("0"), 0), "{:?}", status.drift);
        }
        let dataplane = daemon.world.dataplane();
        assert!(dataplane.vips().contains(&vip) && dataplane.0.marks.len() == 1);
        assert_eq!(dataplane.sysctl("conn_reuse_mode"), Some("0"));
        daemon.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn manual_changes_of_servers_are_reported_and_reverted_or_kept_as_configured() {
    for report in [false, true] {
        let line = if report {
            "[lvsd]\nmanual_changes = \"report\"\n"
        } else {
            ""
        };
        let text = format!("{line}{FILE}");
        let mut daemon = Running::start(World::default(), Dead::default(), &text);
        daemon.both(1, 3).await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        by_hand(&daemon.world, 9);
        let delete = Call::ServerDelete {
            service: web(),
            server: "10.0.0.2:80".parse().unwrap(),
        };
        daemon.world.control().apply(&[delete]).unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
        let status = daemon.status().await;
        let reported = daemon
            .events()
            .iter()
            .filter(|event| *event == "drift")
            .count();
        assert_eq!(
            reported, 2,
            "a manual change was not reported exactly once (report: {report})"
        );
        if report {
            daemon.weights(&[("10.0.0.1:80", 9)]).await;
            assert_eq!(status.drift.len(), 2, "{:?}", status.drift);
            // The health of the server still counts.
            daemon.dead.set("10.0.0.1:80", true);
            daemon.weights(&[("10.0.0.1:80", 0)]).await;
            daemon.dead.set("10.0.0.1:80", false);
            daemon.weights(&[("10.0.0.1:80", 9)]).await;
            daemon.reload(&text).await;
        } else {
            assert_eq!(status.drift, [""; 0]);
        }
        daemon.both(1, 3).await;
        let status = daemon.status().await;
        assert_eq!(status.drift, [""; 0]);
        daemon.stop().await;
    }
}

/// The connections of a server in maintenance continue for the time of `drain`, and not longer.
#[tokio::test(start_paused = true)]
async fn server_in_maintenance_with_connections_is_removed_after_drain_time() {
    let text = FILE.replace("forward = \"nat\"", "forward = \"nat\"\ndrain = \"60s\"");
    let daemon = Running::start(World::default(), Dead::default(), &text);
    daemon.both(1, 3).await;
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

#[tokio::test(start_paused = true)]
async fn drain_or_maintenance_of_last_usable_server_without_force_is_refused() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon.both(1, 3).await;
    daemon.dead.set("10.0.0.2:80", true);
    daemon.both(1, 0).await;
    let ask = |state, force| {
        let spec = AdminSpec {
            target: Target {
                service: None,
                host: [10, 0, 0, 1].into(),
                port: None,
            },
            state,
            who: None,
            why: None,
            until: None,
            force,
        };
        daemon.ask::<AdminDone>(ChangeRequest::Admin(spec))
    };
    for state in [AdminState::Drain, AdminState::Maintenance] {
        let why = ask(state, false).await.unwrap_err();
        assert!(
            why.starts_with("web would have no usable server left") && why.contains("--force"),
            "{state:?}: {why}"
        );
    }
    assert_eq!(daemon.first_server().await.admin, AdminState::Ready);
    ask(AdminState::Drain, true).await.unwrap();
    let none = [("10.0.0.1:80", 0), ("10.0.0.2:80", 0)];
    daemon.weights(&none).await;
    ask(AdminState::Maintenance, false)
        .await
        .expect("maintenance of an unusable server is accepted");
    assert!(!daemon.status().await.admin[0].spec.force);
    daemon.stop().await;
}
