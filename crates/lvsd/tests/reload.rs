//! The program is asked to reload as soon as it can be found.

use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn a_reload_at_the_first_moment_does_not_end_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("lvsd.toml");
    let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let port = port.expect("a port").port();
    // It relays itself and needs no engine.
    let text = format!(
        "[[service]]\naddress = '127.0.0.1:{port}'\nforward = 'proxy'\n\
         [[service.server]]\naddress = '127.0.0.2:9'\n"
    );
    std::fs::write(&path, text).expect("a file");
    let socket = directory.path().join("engine");
    let lvsd = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lvsd"));
        command.arg("--config").arg(&path);
        command.arg("--socket").arg(&socket);
        command.arg("--state").arg(directory.path());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    for _ in 0..5 {
        let mut daemon = lvsd().spawn().expect("lvsd");
        let end = Instant::now() + Duration::from_secs(20);
        while !lvsd().arg("reload").status().expect("lvsd").success() {
            assert!(Instant::now() < end, "nobody is found");
            let ended = daemon.try_wait().expect("a child");
            assert_eq!(ended, None, "before anybody was found");
        }
        std::thread::sleep(Duration::from_millis(200));
        let ended = daemon.try_wait().expect("a child");
        daemon.kill().expect("a child");
        daemon.wait().expect("a child");
        assert_eq!(ended, None);
    }
}
