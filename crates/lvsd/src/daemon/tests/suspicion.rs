//! Servers that do not answer connections of clients.

use super::*;

impl Running {
    /// Waits until the health of the first server is `wanted`.
    async fn health(&self, wanted: &str) -> ServerStatus {
        for _ in 0..2000 {
            let server = self.first_server().await;
            if server.health == wanted {
                return server;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!(
            "the health of the first server is not {wanted}: {:?}",
            self.first_server().await
        );
    }
}

#[tokio::test(start_paused = true)]
async fn server_with_mostly_unanswered_clients_is_suspicious_until_clients_are_answered() {
    let mut daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon.both(1, 3).await;
    daemon.health("up").await;
    daemon.world.set_attempts("10.0.0.2:80", 60, 0);
    daemon.world.set_attempts("10.0.0.1:80", 20, 15);
    let server = daemon.health("suspicious").await;
    assert!(
        server.reason.starts_with("15 of 20 connections"),
        "{server:?}"
    );
    assert!(server.fix.contains("default gateway"), "{server:?}");
    // Without `passive`, it keeps its connections.
    daemon.both(1, 3).await;
    daemon.world.set_attempts("10.0.0.1:80", 20, 0);
    let healed = daemon.health("up").await;
    assert_eq!((healed.reason.as_str(), healed.fix.as_str()), ("", ""));
    let events = std::iter::from_fn(|| daemon.events.try_recv().ok());
    let events: Vec<_> = events
        .filter(|event| event.server.is_some() && event.event != "server_up")
        .map(|event| (event.event.clone(), event.code.clone()))
        .collect();
    let wanted = [
        ("server_suspicious", server.code.as_str()),
        ("server_answers", ""),
    ];
    assert_eq!(
        events,
        wanted.map(|(event, code)| (event.to_owned(), code.to_owned()))
    );
    assert_eq!(server.code, "clients_unanswered");
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn unanswered_flood_to_all_servers_makes_no_server_suspicious() {
    let daemon = Running::start(World::default(), Dead::default(), FILE);
    daemon.health("up").await;
    for server in ["10.0.0.1:80", "10.0.0.2:80"] {
        daemon.world.set_attempts(server, 1000, 300);
    }
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(daemon.first_server().await.health, "up");
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn passive_check_marks_suspicious_server_as_down_for_50_to_90_seconds() {
    let file = FILE.replace("fall = 2", "fall = 2, passive = true");
    let daemon = Running::start(World::default(), Dead::default(), &file);
    daemon.both(1, 3).await;
    daemon.world.set_attempts("10.0.0.1:80", 20, 15);
    let server = daemon.health("down").await;
    assert!(server.reason.ends_with("(passive)"), "{server:?}");
    daemon.both(0, 3).await;
    daemon.world.set_attempts("10.0.0.1:80", 0, 0);
    let begun = Instant::now();
    tokio::time::sleep(Duration::from_secs(50)).await;
    assert_eq!(daemon.first_server().await.health, "down");
    daemon.both(1, 3).await;
    assert!(begun.elapsed() < Duration::from_secs(90));
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn passive_check_marks_no_server_as_down_if_more_than_half_become_suspicious_at_once() {
    let file = FILE.replace("fall = 2", "fall = 2, passive = true");
    let daemon = Running::start(World::default(), Dead::default(), &file);
    daemon.both(1, 3).await;
    daemon.world.set_attempts("10.0.0.1:80", 20, 15);
    daemon.world.set_attempts("10.0.0.2:80", 20, 15);
    daemon.health("suspicious").await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    daemon.both(1, 3).await;
    daemon.stop().await;
}

/// A fault of the director makes its servers suspicious one after another.
#[tokio::test(start_paused = true)]
async fn passive_check_takes_out_at_most_half_of_servers_that_fail_one_after_another() {
    let file = FILE.replace("fall = 2", "fall = 2, passive = true")
        + "[[service.server]]\naddress = \"10.0.0.3:80\"\n[[service.server]]\naddress = \"10.0.0.4:80\"\n";
    let daemon = Running::start(World::default(), Dead::default(), &file);
    let weights = |one, two| {
        [
            ("10.0.0.1:80", one),
            ("10.0.0.2:80", two),
            ("10.0.0.3:80", 1),
            ("10.0.0.4:80", 1),
        ]
    };
    daemon.weights(&weights(1, 3)).await;
    daemon.world.set_attempts("10.0.0.1:80", 20, 15);
    daemon.weights(&weights(0, 3)).await;
    daemon.world.set_attempts("10.0.0.2:80", 20, 15);
    daemon.weights(&weights(0, 0)).await;
    daemon.world.set_attempts("10.0.0.3:80", 20, 15);
    tokio::time::sleep(Duration::from_secs(10)).await;
    daemon.weights(&weights(0, 0)).await;
    daemon.stop().await;
}
