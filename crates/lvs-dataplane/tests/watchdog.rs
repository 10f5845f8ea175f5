//! The program under a service manager that watches it: fed while it answers, and not when it
//! hangs.
#![cfg(feature = "engine")]

use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// What comes within this time has come at once, on a machine that does much else.
const PATIENCE: Duration = Duration::from_secs(30);

fn next(manager: &UnixDatagram) -> Option<String> {
    let mut buffer = [0; 256];
    let length = manager.recv(&mut buffer).ok()?;
    Some(String::from_utf8_lossy(&buffer[..length]).into_owned())
}

#[test]
fn fed_while_it_answers() {
    let dir = std::env::temp_dir().join(format!("lvs-watchdog-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a directory");
    let manager = UnixDatagram::bind(dir.join("notify")).expect("a socket");
    manager.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let mut engine = Command::new(env!("CARGO_BIN_EXE_lvs-dataplane"))
        .args(["--no-interfaces", "--socket"])
        .arg(dir.join("socket"))
        .env("NOTIFY_SOCKET", dir.join("notify"))
        .env("WATCHDOG_USEC", "300000")
        .env_remove("WATCHDOG_PID")
        .stderr(Stdio::null())
        .spawn()
        .expect("the engine");
    assert_eq!(next(&manager).as_deref(), Some("READY=1"));
    for _ in 0..3 {
        assert_eq!(next(&manager).as_deref(), Some("WATCHDOG=1"));
    }
    let pid = Pid::from_child(&engine);
    kill_process(pid, Signal::STOP).expect("it is ours");
    // What it had sent before.
    manager
        .set_read_timeout(Some(Duration::from_secs(1)))
        .expect("a timeout");
    let start = Instant::now();
    while next(&manager).is_some() {
        assert!(start.elapsed() < PATIENCE, "it feeds though it is stopped");
    }
    kill_process(pid, Signal::CONT).expect("it is ours");
    manager.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    assert_eq!(next(&manager).as_deref(), Some("WATCHDOG=1"));
    kill_process(pid, Signal::TERM).expect("it is ours");
    assert!(engine.wait().expect("a child").success());
    std::fs::remove_dir_all(&dir).expect("it is ours");
}
