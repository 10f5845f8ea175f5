//! Tests of the binary, with real sockets and pipes.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use lvs_api::Address;
use lvs_core::api::{Call, ConnInfo, Failure, FailureCode, ListEnd, ServerInfo, ServiceInfo};
use lvs_core::{Family, Forwarding, ServerConfig, ServiceConfig};
use lvs_process::server::{Handle, Handler, Permissions, Server, Sink};
use serde_json::Value;

const CONNECTIONS: u64 = 100_000;

/// A dataplane that lists very many connections, and refuses all other requests.
struct Busy;

impl Handler for Busy {
    fn name(&self) -> String {
        "busy".into()
    }

    fn table_size(&self) -> u32 {
        4096
    }

    fn call(&self, call: Call, out: &mut Sink<'_>) -> Result<Value, Failure> {
        let Call::ConnList {} = call else {
            return Err(Failure::new(
                FailureCode::Unsupported,
                "this dataplane only lists connections",
            ));
        };
        let mut conn = ConnInfo {
            protocol: 6,
            client: ([203, 0, 113, 1], 1024).into(),
            virt: ([192, 0, 2, 1], 80).into(),
            server: ([10, 0, 0, 1], 80).into(),
            state: "ESTABLISHED".into(),
            expires_ms: 899_999,
            forwarding: Forwarding::Nat,
            template: false,
            synced: false,
            engine: None,
        };
        for i in 0..CONNECTIONS {
            conn.client
                .set_port(u16::try_from(i % 60_000).unwrap_or(0) + 1024);
            out.item(&conn)?;
        }
        serde_json::to_value(ListEnd { count: out.count() })
            .map_err(|error| Failure::new(FailureCode::Internal, error.to_string()))
    }
}

fn address(what: &str) -> Address {
    Address::new(format!("@lvs-test-{what}-{}", std::process::id()))
}

/// Lists a server with weight 1 three times and then with weight 0, as if `lvsd` needed some time
/// to apply a change. All other calls succeed without an effect.
#[derive(Default)]
struct Late {
    listings: AtomicU32,
}

impl Handler for Late {
    fn name(&self) -> String {
        "late".into()
    }

    fn table_size(&self) -> u32 {
        4096
    }

    fn call(&self, call: Call, out: &mut Sink<'_>) -> Result<Value, Failure> {
        let Call::ServiceList { service } = call else {
            return Ok(serde_json::json!({}));
        };
        let weight = i32::from(self.listings.fetch_add(1, Ordering::SeqCst) < 3);
        out.item(&ServiceInfo {
            service: service.expect("the client reads the service"),
            config: ServiceConfig::new(Family::V4, "rr"),
            owner: None,
            stats: Default::default(),
            refused: 0,
            refusals: Vec::new(),
            drops: Vec::new(),
            servers: vec![ServerInfo::new(
                ([10, 0, 0, 1], 80).into(),
                ServerConfig::new(weight, Forwarding::Nat),
            )],
        })?;
        serde_json::to_value(ListEnd { count: 1 })
            .map_err(|error| Failure::new(FailureCode::Internal, error.to_string()))
    }
}

fn start(address: &Address) -> Handle {
    serve(address, Arc::new(Busy))
}

fn serve(address: &Address, handler: Arc<dyn Handler>) -> Handle {
    Server::bind(address, Permissions::default())
        .expect("the socket is not in use")
        .serve(handler)
        .expect("the thread can be started")
}

fn program(name: &str, address: &Address) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lvsadm"));
    command
        .arg0(name)
        .env("LVS_SOCKET", address.to_string())
        .env_remove("LVS_AUTOSTART")
        .stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn run(command: &mut Command) -> (String, String, Option<i32>) {
    let Output {
        stdout,
        stderr,
        status,
    } = command.output().expect("the program starts");
    (text(&stdout), text(&stderr), status.code())
}

#[test]
fn missing_dataplane_is_reported_with_fix_except_for_help_and_usage_errors() {
    let nobody = address("nobody");
    let (out, err, code) = run(program("/sbin/ipvsadm", &nobody).arg("-Ln"));
    assert_eq!((out.as_str(), code), ("", Some(2)));
    let mut lines = err.lines();
    assert!(
        lines
            .next()
            .is_some_and(|line| line.starts_with("Can't initialize ipvs: ")
                && line.contains("start lvs-dataplane")),
        "{err}"
    );
    assert!(
        lines
            .next()
            .is_some_and(|line| line.starts_with("Are you sure")),
        "{err}"
    );

    let (_, err, code) = run(program("lvsadm", &nobody).arg("-Ln"));
    assert_eq!((err.lines().count(), code), (1, Some(2)), "{err}");
    // An error of the command line is reported first, and help needs no dataplane.
    let (_, err, code) = run(program("lvsadm", &nobody).arg("-A"));
    assert_eq!(code, Some(2));
    assert!(
        err.contains("service-address"),
        "no `service-address` in {err}"
    );
    let (out, _, code) = run(program("lvsadm", &nobody).arg("-h"));
    assert_eq!(code, Some(0));
    assert!(out.contains("--socket"), "no `--socket` in {out}");
}

#[test]
fn unusable_socket_is_reported_with_path_and_fix() {
    let dir = std::env::temp_dir().join(format!("lvs-test-sockets-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("the directory can be created");
    let at = |name: &str| dir.join(name);
    drop(UnixListener::bind(at("stale")).expect("the socket can be opened"));
    std::fs::write(at("file"), "").expect("the file can be written");
    let answering = |name: &str, answer: &'static str| {
        let listener = UnixListener::bind(at(name)).expect("the socket can be opened");
        std::thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                let mut line = String::new();
                let _ = BufReader::new(&stream).read_line(&mut line);
                let _ = stream.write_all(answer.as_bytes());
            }
        });
    };
    answering(
        "other-version",
        "{\"id\":1,\"error\":{\"code\":\"version\",\"message\":\"the dataplane uses version 9 of the control protocol\"}}\n",
    );
    answering("no-dataplane", "HTTP/1.1 400 Bad Request\r\n\r\n");
    answering("ends", "");
    for (name, part) in [
        (
            "absent",
            "start lvs-dataplane, or name its socket with --socket",
        ),
        ("stale", "start lvs-dataplane, which replaces it"),
        ("file", "is not a socket: name the dataplane's"),
        ("other-version", "install both from the same release"),
        ("no-dataplane", "is not a dataplane"),
        ("ends", "read its log, and start it again"),
    ] {
        let socket = Address::Path(at(name));
        let path = at(name).display().to_string();
        for (argv0, lines) in [("lvsadm", 1), ("ipvsadm", 2)] {
            let (out, err, code) = run(program(argv0, &socket).arg("-Ln"));
            let case = format!("{argv0}, socket {name}");
            assert_eq!((out.as_str(), code), ("", Some(2)), "{case}: {err}");
            assert_eq!(err.lines().count(), lines, "{case}: {err}");
            assert!(err.contains(part) && err.contains(&path), "{case}: {err}");
        }
    }
    // The user may not enter the directory of the socket. Only root can become another user.
    if nix::unistd::geteuid().is_root() {
        let copy = std::env::temp_dir().join(format!("lvs-test-copy-{}", std::process::id()));
        std::fs::copy(env!("CARGO_BIN_EXE_lvsadm"), &copy).expect("the copy can be made");
        std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o700))
            .expect("the permissions can be set");
        let (_, err, code) = run(Command::new(&copy)
            .arg("-Ln")
            .env("LVS_SOCKET", at("stale"))
            .current_dir("/")
            .uid(65_534)
            .gid(65_534));
        assert_eq!((err.lines().count(), code), (1, Some(2)), "{err}");
        assert!(err.contains("run as root"), "no `run as root` in {err}");
        std::fs::remove_file(copy).expect("the file can be removed");
    }
    std::fs::remove_dir_all(&dir).expect("the directory can be removed");
}

#[test]
fn dataplane_that_cannot_start_is_reported() {
    let dir = std::env::temp_dir().join(format!("lvs-test-start-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("the directory can be created");
    let own = dir.join("lvsadm");
    std::fs::copy(env!("CARGO_BIN_EXE_lvsadm"), &own).expect("the copy can be made");
    let run_it = || {
        run(Command::new(&own)
            .arg("-Ln")
            .env("LVS_SOCKET", address("start").to_string())
            .env("LVS_AUTOSTART", "1")
            .env("PATH", "/usr/bin:/bin"))
    };
    let (_, err, code) = run_it();
    assert!(
        err.contains("cannot start lvs-dataplane"),
        "no `cannot start lvs-dataplane` in {err}"
    );
    assert_eq!((err.lines().count(), code), (1, Some(2)));

    let dataplane = dir.join("lvs-dataplane");
    std::fs::write(&dataplane, "#!/bin/sh\nexit 3\n").expect("the file can be written");
    std::fs::set_permissions(&dataplane, PermissionsExt::from_mode(0o755))
        .expect("the permissions can be set");
    let (_, err, code) = run_it();
    assert!(
        err.contains("has exited (exit status: 3)"),
        "no `has exited (exit status: 3)` in {err}"
    );
    assert_eq!((err.lines().count(), code), (1, Some(2)));
    std::fs::remove_dir_all(&dir).expect("the directory can be removed");
}

#[test]
fn refusal_of_dataplane_is_printed_unchanged_by_lvsadm_but_ipvsadm_prints_none_for_timeouts() {
    let at = address("words");
    let _dataplane = start(&at);
    let (out, err, code) = run(program("lvsadm", &at).args(["-A", "-t", "192.0.2.1:80"]));
    assert_eq!(
        (out.as_str(), err.as_str(), code),
        ("", "this dataplane only lists connections\n", Some(255))
    );
    // Under the name ipvsadm, lvsadm prints nothing about timeouts.
    let (_, err, code) = run(program("ipvsadm", &at).args(["-L", "--timeout"]));
    assert_eq!((err.as_str(), code), ("", Some(1)));
}

#[test]
fn drain_without_waiting_returns_after_the_weight_is_0() {
    let at = address("drain");
    let dataplane = Arc::new(Late::default());
    let _server = serve(&at, dataplane.clone());
    let (out, err, code) =
        run(program("lvsadm", &at).args(["drain", "192.0.2.1:80", "10.0.0.1:80", "--no-wait"]));
    assert_eq!((err.as_str(), code), ("", Some(0)));
    assert!(out.ends_with("gets no new connections\n"), "{out}");
    assert_eq!(dataplane.listings.load(Ordering::SeqCst), 4, "{out}");
}

#[test]
fn listing_of_100_000_connections_is_complete() {
    let at = address("streams");
    let _dataplane = start(&at);
    let (out, err, code) = run(program("ipvsadm", &at).arg("-Lnc"));
    assert_eq!((err.as_str(), code), ("", Some(0)));
    assert_eq!(out.lines().count() as u64, CONNECTIONS + 2);
    assert_eq!(
        out.lines().nth(2),
        Some("TCP 14:59  ESTABLISHED 203.0.113.1:1024   192.0.2.1:80       10.0.0.1:80")
    );
    let (out, _, code) = run(program("lvsadm", &at).args(["--json", "-Lc"]));
    assert_eq!(code, Some(0));
    let all: Vec<ConnInfo> = serde_json::from_str(&out).expect("the JSON is valid");
    assert_eq!(all.len() as u64, CONNECTIONS);
}

#[test]
fn closed_output_pipe_ends_listing_with_status_141() {
    let at = address("pipe");
    let _dataplane = start(&at);
    let mut child = program("ipvsadm", &at)
        .arg("-Lnc")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("ipvsadm starts");
    let mut first = [0; 24];
    child
        .stdout
        .take()
        .expect("the standard output is a pipe")
        .read_exact(&mut first)
        .expect("the first line can be read");
    assert_eq!(&first, b"IPVS connection entries\n");
    let output = child.wait_with_output().expect("ipvsadm ends");
    assert_eq!(text(&output.stderr), "");
    assert_eq!(output.status.code(), Some(141));
}

#[test]
fn restore_continues_after_refused_lines() {
    let at = address("restore");
    let _dataplane = start(&at);
    let mut child = program("ipvsadm", &at)
        .arg("-R")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("ipvsadm starts");
    child
        .stdin
        .take()
        .expect("the standard input is a pipe")
        .write_all(b"-A -t 192.0.2.1:80\n-A -q\n-C\n")
        .expect("ipvsadm reads the rules");
    let output = child.wait_with_output().expect("ipvsadm ends");
    assert_eq!(
        text(&output.stderr),
        "this dataplane only lists connections\n-q: unknown option\nthis dataplane only lists connections\n"
    );
    assert_eq!(output.status.code(), Some(255));
}

#[test]
fn filter_restore_of_empty_input_is_refused() {
    // As in `ssh other lvsadm filter save | lvsadm filter restore`, when ssh fails. The error is
    // reported before the program connects to a dataplane.
    let nobody = address("no-filters");
    let (_, err, code) = run(program("lvsadm", &nobody)
        .args(["filter", "restore"])
        .stdin(Stdio::null()));
    assert_ne!(code, Some(0));
    assert!(
        err.contains("the input is empty; nothing was changed"),
        "no `the input is empty; nothing was changed` in {err}"
    );
}
