//! Tests of the program under a service manager with a watchdog: it sends keep-alive messages
//! (`WATCHDOG=1`) while its threads answer, also after the process was stopped and continued.

use std::os::unix::net::UnixDatagram;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// Longest wait for a message on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

fn next(manager: &UnixDatagram) -> Option<String> {
    let mut buffer = [0; 256];
    let length = manager.recv(&mut buffer).ok()?;
    Some(String::from_utf8_lossy(&buffer[..length]).into_owned())
}

#[test]
fn watchdog_is_fed_while_dataplane_answers() {
    let dir = std::env::temp_dir().join(format!("lvs-watchdog-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("the directory can be created");
    let manager = UnixDatagram::bind(dir.join("notify")).expect("the socket can be opened");
    manager
        .set_read_timeout(Some(PATIENCE))
        .expect("the timeout can be set");
    let mut dataplane = crate::dataplane()
        .arg("--socket")
        .arg(dir.join("socket"))
        .env("NOTIFY_SOCKET", dir.join("notify"))
        .env("WATCHDOG_USEC", "300000")
        .env_remove("WATCHDOG_PID")
        .stderr(Stdio::null())
        .spawn()
        .expect("the dataplane can be started");
    assert_eq!(next(&manager).as_deref(), Some("READY=1"));
    for _ in 0..3 {
        assert_eq!(next(&manager).as_deref(), Some("WATCHDOG=1"));
    }
    let pid = Pid::from_child(&dataplane);
    kill_process(pid, Signal::STOP).expect("the process is a child of this test");
    // All messages that the process sent before it was stopped are in the socket.
    let status = format!("/proc/{}/status", dataplane.id());
    while !std::fs::read_to_string(&status).is_ok_and(|status| status.contains("State:\tT")) {
        std::thread::yield_now();
    }
    manager
        .set_nonblocking(true)
        .expect("the socket can be non-blocking");
    while next(&manager).is_some() {}
    manager
        .set_nonblocking(false)
        .expect("the socket can be blocking");
    kill_process(pid, Signal::CONT).expect("the process is a child of this test");
    manager
        .set_read_timeout(Some(PATIENCE))
        .expect("the timeout can be set");
    assert_eq!(next(&manager).as_deref(), Some("WATCHDOG=1"));
    kill_process(pid, Signal::TERM).expect("the process is a child of this test");
    assert!(
        dataplane
            .wait()
            .expect("the process is a child of this test")
            .success()
    );
    std::fs::remove_dir_all(&dir).expect("the directory can be removed");
}
