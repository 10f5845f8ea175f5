//! Changes by a reload.

use super::*;

#[tokio::test(start_paused = true)]
async fn reload_changes_only_changed_entries_and_nothing_if_file_is_invalid_or_empty() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon.both(1, 3).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let before = daemon.world.changes().len();
    let requests = daemon.world.requests();
    daemon
        .reload(&FILE.replace("weight = 3", "weight = 7"))
        .await;
    daemon.both(1, 7).await;
    let ops = daemon.world.changes();
    assert!(
        matches!(&ops[before..], [Call::ServerEdit(_)]),
        "{:#?}",
        &ops[before..]
    );

    assert_eq!(daemon.world.requests(), requests + 1);

    // An invalid file changes nothing.
    daemon.reload("[[service]]\nadress = 1\n").await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(daemon.world.changes().len(), before + 1);

    // A file without services changes nothing, for example while it is being written.
    for text in ["", "[sysctl]\nconn_reuse_mode = 1\n"] {
        daemon.reload(text).await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(daemon.world.changes().len(), before + 1, "{text:?}");
    }

    // An unreadable file changes nothing.
    std::fs::remove_file(daemon.file.path()).unwrap();
    daemon.signals.send(Signal::Reload).await.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(daemon.world.changes().len(), before + 1);
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn daemon_started_without_services_adds_services_at_reload() {
    let daemon = Running::start(World::default(), Dead::default(), "");
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(daemon.world.running());
    daemon.reload("[sysctl]\nconn_reuse_mode = 0\n").await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let sysctls = daemon.world.dataplane();
    assert_eq!(sysctls.sysctl("conn_reuse_mode"), Some("0"));
    daemon.reload(FILE).await;
    daemon.both(1, 3).await;
    daemon.stop().await;
}

#[tokio::test]
async fn reload_sends_all_changes_in_one_request() {
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
    let all = |daemon: &Running| daemon.world.dataplane().0.services.len();
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

#[tokio::test]
async fn reload_has_one_line_with_numbers_in_log() {
    let log = Log::default();
    let _listening = log.listen();
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    log.says("ready: 1 service, 2 of 2 servers up").await;
    daemon.both(1, 3).await;
    let start = log.text().len();
    let mut text = FILE
        .replace("10.0.0.2", "10.0.0.7")
        .replace("weight = 3", "weight = 4");
    for n in 30..60 {
        text.push_str(&format!(
            "[[service]]\nname = \"s{n}\"\naddress = \"192.0.2.{n}:80\"\nforward = \"nat\"\nscheduler = \"rr\"\n\
             [[service.server]]\naddress = \"10.0.1.{n}\"\n"
        ));
    }
    daemon.reload(&text).await;
    daemon
        .weights(&[("10.0.0.1:80", 1), ("10.0.0.7:80", 4)])
        .await;
    let lines = log.text()[start..].to_owned();
    let lines: Vec<_> = lines.lines().filter(|line| line.contains("INFO")).collect();
    assert_eq!(lines.len(), 1, "{lines:#?}");
    let numbers = ": 30 new services, 31 new servers, 1 removed server";
    assert!(lines[0].contains(numbers), "{lines:#?}");
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn reload_that_replaces_all_servers_keeps_old_servers_until_a_new_server_is_up() {
    let slow = Slow::default();
    let daemon = slow.start(FILE);
    daemon.both(1, 3).await;
    let others = FILE
        .replace("10.0.0.1", "10.0.0.3")
        .replace("10.0.0.2", "10.0.0.4");
    slow.hold("10.0.0.3:80");
    slow.hold("10.0.0.4:80");
    daemon.reload(&others).await;
    tokio::time::sleep(Duration::from_millis(900)).await;
    daemon.both(1, 3).await;
    slow.release("10.0.0.4:80");
    daemon.weights(&[("10.0.0.4:80", 3)]).await;
    slow.release("10.0.0.3:80");
    daemon
        .weights(&[("10.0.0.3:80", 1), ("10.0.0.4:80", 3)])
        .await;
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn rules_and_sysctl_removed_from_file_are_reset_by_reload_and_restart() {
    let more = format!(
        "{}\n[[mark]]\ndestination = \"192.0.2.99\"\nmark = 7\n[filter]\ndeny = \"198.51.100.0/24\"\n",
        FILE.replace(
            "conn_reuse_mode = 0",
            "conn_reuse_mode = 0\nsync_version = 0"
        )
    );
    let set = |world: &World| {
        let dataplane = world.dataplane();
        let sysctl = dataplane.sysctl("sync_version").map(ToOwned::to_owned);
        let rules = dataplane.0.marks.len() + dataplane.0.filters.len();
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
        assert_eq!(
            daemon.world.dataplane().sysctl("conn_reuse_mode"),
            Some("0")
        );
        // lvsd does not revert a sysctl that an operator sets afterwards.
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

#[tokio::test(start_paused = true)]
async fn plan_lists_changes_of_a_reload_and_applies_nothing() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon.both(1, 3).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let before = daemon.world.changes().len();
    let planned = |text: &str| {
        let (config, _) = Config::from_toml("lvsd.toml", text).unwrap();
        let expanded = expand(&config, &Gathered::default());
        let names = [(web(), "web".to_owned())].into();
        let admin = Admin::default();
        let planned = plan(daemon.world.host(), (&config, &expanded), &admin, &names).unwrap();
        planned.to_string()
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
    // A service that is no longer in the file keeps the name under which the daemon has it.
    let moved = FILE
        .replace("192.0.2.10", "192.0.2.11")
        .replace("web", "new");
    let reported = planned(&moved);
    assert!(
        reported.contains("delete service web (tcp 192.0.2.10:80)\n"),
        "{reported}"
    );
    assert_eq!(daemon.world.changes().len(), before);
    daemon.stop().await;
}

/// A reload of a file with fewer than half of the servers is refused, unless it is forced.
#[tokio::test(start_paused = true)]
async fn reload_that_removes_too_large_share_of_many_servers_is_refused_without_force() {
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
    let away = |text: &str, forced| {
        let (config, _) = Config::from_toml("f", text).unwrap();
        let expanded = expand(&config, &Gathered::default());
        too_much_away([(web(), 30)].into_iter(), (&config, &expanded), forced)
    };
    let refused = |n, options| away(&file(n, options), false).map_or(String::new(), |(why, _)| why);
    assert!(refused(14, "").starts_with("14 of 30 servers left"));
    assert_eq!(refused(15, ""), "");
    let nothing = away("", true).unwrap();
    assert_eq!(nothing.0, "no [[service]]");
    let daemon = Running::start(World::default(), Dead::default(), &file(30, ""));
    let count = |daemon: &Running| daemon.world.weights(web()).len();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(count(&daemon), 30);
    for (text, left) in [
        (file(14, ""), 30),
        (file(15, ""), 15),
        // If there are few servers, all of them may be removed.
        (file(5, ""), 5),
        (file(30, ""), 30),
        (file(14, "[lvsd]\nmax_removed_percent = 60\n"), 14),
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
