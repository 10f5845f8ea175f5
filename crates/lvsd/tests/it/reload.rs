//! `lvsd reload` during the start of the daemon, and with an invalid or missing file.

use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn reload_during_start_does_not_end_lvsd() {
    let directory = tempfile::tempdir().expect("a temporary directory can be created");
    let path = directory.path().join("lvsd.toml");
    let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let port = port.expect("a port is free").port();
    // A proxied service needs no dataplane.
    let text = format!(
        "[[service]]\naddress = '127.0.0.1:{port}'\nforward = 'proxy'\n\
         [[service.server]]\naddress = '127.0.0.2:9'\n"
    );
    std::fs::write(&path, text).expect("the file can be written");
    let socket = directory.path().join("dataplane");
    let lvsd = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lvsd"));
        command.arg("--config").arg(&path);
        command.arg("--socket").arg(&socket);
        command.arg("--state").arg(directory.path());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    for _ in 0..5 {
        let mut daemon = lvsd().spawn().expect("lvsd can be started");
        let end = Instant::now() + Duration::from_secs(120);
        while !lvsd()
            .arg("reload")
            .status()
            .expect("lvsd can be started")
            .success()
        {
            assert!(Instant::now() < end, "no reload succeeded in time");
            let ended = daemon.try_wait().expect("lvsd is a child");
            assert_eq!(ended, None, "lvsd exited before a reload succeeded");
        }
        std::thread::sleep(Duration::from_millis(200));
        let ended = daemon.try_wait().expect("lvsd is a child");
        daemon.kill().expect("lvsd can be killed");
        daemon.wait().expect("lvsd is a child");
        assert_eq!(ended, None);
    }
}

/// The running daemon uses another file than the default, with a relative path.
#[test]
fn reload_plan_and_keepalived_config_report_errors_in_file_of_running_daemon() {
    let directory = tempfile::tempdir().expect("a temporary directory can be created");
    let path = directory.path().join("own.toml");
    let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let port = port.expect("a port is free").port();
    let text = format!(
        "[[service]]\naddress = '127.0.0.1:{port}'\nforward = 'proxy'\n\
         [[service.server]]\naddress = '127.0.0.2:9'\n"
    );
    std::fs::write(&path, &text).expect("the file can be written");
    let lvsd = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lvsd"));
        command
            .arg("--socket")
            .arg(directory.path().join("dataplane"))
            .arg("--state")
            .arg(directory.path())
            .args(words);
        command
    };
    let run = |words: &[&str]| {
        let output = lvsd(words)
            .current_dir("/")
            .output()
            .expect("lvsd can be started");
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8(text).expect("the output is UTF-8");
        (output.status.code(), text)
    };
    let (code, reported) = run(&["reload"]);
    assert_eq!(code, Some(1), "{reported}");
    assert!(
        reported.contains("no lvsd is running"),
        "no `no lvsd is running` in {reported}"
    );

    let mut daemon = lvsd(&["--config", "own.toml"])
        .current_dir(directory.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("lvsd can be started");
    // `lvsd status` waits for a starting daemon.
    let (code, status) = run(&["status", "--json"]);
    assert_eq!(code, Some(0), "{status}");
    let status: serde_json::Value = serde_json::from_str(&status).expect("the status is JSON");
    assert_eq!(status["loaded"]["ok"], true, "{status}");
    assert_ne!(status["loaded"]["time"], 0, "{status}");

    std::fs::write(&path, format!("{text}[[[\n")).expect("the file can be written");
    for command in ["reload", "plan", "keepalived-config"] {
        let (code, reported) = run(&[command]);
        assert_eq!(code, Some(3), "{command}: {reported}");
        assert!(
            reported.contains("own.toml:6:"),
            "{command}: no `own.toml:6:` in {reported}"
        );
        assert!(
            !reported.contains("/etc/lvsd"),
            "{command}: unexpected `/etc/lvsd` in {reported}"
        );
    }
    std::fs::remove_file(&path).expect("the file can be removed");
    let (code, reported) = run(&["reload"]);
    assert_eq!(code, Some(3), "{reported}");
    assert!(
        reported.contains("cannot read own.toml"),
        "no `cannot read own.toml` in {reported}"
    );
    std::fs::write(&path, &text).expect("the file can be written");
    let (code, reported) = run(&["reload"]);
    daemon.kill().expect("lvsd can be killed");
    daemon.wait().expect("lvsd is a child");
    assert_eq!(code, Some(0), "{reported}");
}
