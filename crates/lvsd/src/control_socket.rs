//! The daemon's control socket: HTTP as over TCP, with the rights of the connected user.
//!
//! A task serves each connection, so that a client that does not read delays neither the daemon's
//! loop nor other clients.

use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use lvs_api::Address;
use lvs_api::daemon;
use lvs_process::admission::Place;
use tokio::net::UnixStream;

use crate::api::http;
use crate::api::{Api, FULL, Peer};
use crate::config::Dataplane;
use crate::facts::Facts;

/// The groups with access to the control socket.
#[derive(Clone, Debug, Default)]
struct Rights {
    /// The id of the group whose members have write access; `None` for no group.
    group: Option<u32>,
    /// The id of the group whose members have read access; `None` if every user has it.
    readers: Option<u32>,
}

/// Listens on the socket next to that of `dataplane`; `api` answers the requests, as over TCP.
///
/// # Errors
/// The socket cannot be created, for example because another file has its path.
pub fn open(dataplane: &Address, settings: &Dataplane, api: Arc<Api>) -> io::Result<()> {
    let listener = bind(&daemon::socket(dataplane))?;
    let facts = Facts::read();
    let gid = |name: &Option<String>| {
        // A group that does not exist has no members.
        name.as_ref()
            .map(|name| facts.gid(name).unwrap_or(u32::MAX))
    };
    let rights = Rights {
        group: gid(&settings.group),
        readers: gid(&settings.readers),
    };
    tokio::spawn(serve(listener, rights, api));
    Ok(())
}

fn bind(address: &Address) -> io::Result<tokio::net::UnixListener> {
    let listener = match address {
        Address::Abstract(name) => {
            use std::os::linux::net::SocketAddrExt;
            let name = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
            std::os::unix::net::UnixListener::bind_addr(&name)?
        }
        Address::Usual(path) | Address::Path(path) => {
            remove_stale(path)?;
            let listener = std::os::unix::net::UnixListener::bind(path)?;
            // Every user may connect; the rights depend on the client's credentials.
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
            listener
        }
    };
    listener.set_nonblocking(true)?;
    tokio::net::UnixListener::from_std(listener)
}

/// Removes the socket file of an exited daemon. The caller holds the daemon's lock, so no other
/// daemon uses the file. A file that is not a socket is an error.
fn remove_stale(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => std::fs::remove_file(path),
        Ok(_) => {
            let why = format!(
                "{} is not a socket: name another path, or remove the file",
                path.display()
            );
            Err(io::Error::other(why))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

async fn serve(listener: tokio::net::UnixListener, rights: Rights, api: Arc<Api>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // For example, no file descriptor is free until another connection is closed.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        match admit(&stream, &rights, &api) {
            Ok((peer, place)) => {
                let api = Arc::clone(&api);
                tokio::spawn(async move {
                    // An error only means that the client has closed its connection.
                    let _ = http::serve(stream, api, peer).await;
                    drop(place);
                });
            }
            Err((code, why)) => {
                let _ = stream.try_write(http::refusal(code, why).as_bytes());
            }
        }
    }
}

/// Returns the user of the connected process and a slot for the connection, or the reason for a
/// refusal.
fn admit(
    stream: &UnixStream,
    rights: &Rights,
    api: &Api,
) -> Result<(Peer, Place), (StatusCode, &'static str)> {
    let user = stream.peer_cred().map_err(|_| {
        let why = "the kernel does not report the user of the connection: connect again";
        (StatusCode::FORBIDDEN, why)
    })?;
    let pid = user.pid().and_then(|pid| u32::try_from(pid).ok());
    let own = (user.uid(), user.gid());
    let trusted = daemon::may_change(stream, own, pid.unwrap_or(0), rights.group);
    let readers = rights.readers;
    let reader = readers.is_none_or(|gid| daemon::is_member(stream, user.gid(), gid));
    let reader = match &trusted {
        Ok(()) => None,
        Err(_) if reader => Some(user.uid()),
        Err(_) => {
            let why = "only root, the user of lvsd and the groups of `group` and `readers` may read the state of this lvsd";
            return Err((StatusCode::FORBIDDEN, why));
        }
    };
    let place = api.local_place(reader);
    let place = place.ok_or((StatusCode::SERVICE_UNAVAILABLE, FULL))?;
    let peer = Peer::Local {
        who: format!("uid {}", user.uid()),
        denied: trusted
            .err()
            .map(|why| why.replace("the dataplane", "lvsd")),
    };
    Ok((peer, place))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use lvs_api::daemon::{
        AdminDone, AdminSpec, AdminState, Client, Event, Reloaded, Status, Target,
    };
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::channels::{About, ChangeRequest, Events, Request, Snapshot, answer, channel};

    /// Opens a control socket. A task replaces the daemon: it accepts every change, but refuses a
    /// reload without `force`.
    fn opened(dataplane: &Address, settings: &Dataplane, events: &Events) {
        let (sender, mut requests) = channel();
        let api = Arc::new(Api::new(sender, events, Arc::default()));
        open(dataplane, settings, api).expect("the socket can be bound");
        tokio::spawn(async move {
            while let Some(request) = requests.recv().await {
                match request {
                    Request::Change { change, reply, .. } => drop(reply.send(match change {
                        ChangeRequest::Admin(_) => answer(&AdminDone::default()),
                        ChangeRequest::Reload { force: true } => answer(&Reloaded::default()),
                        ChangeRequest::Reload { force: false } => {
                            Err("the file is wrong".to_owned())
                        }
                        ChangeRequest::Maintenance(_) => answer(&daemon::DirectorStatus::default()),
                    })),
                    Request::Snapshot(reply) => drop(reply.send(Snapshot {
                        status: Status {
                            pid: 7,
                            ..Status::default()
                        },
                        ..Snapshot::default()
                    })),
                }
            }
        });
    }

    #[tokio::test]
    async fn control_socket_answers_status_requests_and_refuses_invalid_requests() {
        let directory = tempfile::tempdir().expect("a temporary directory can be created");
        let dataplane = Address::new(directory.path().join("e.sock"));
        opened(&dataplane, &Dataplane::default(), &Events::default());
        let path = directory.path().join("e.sock.lvsd");
        let long = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(1 << 20));
        let status = "GET /v1/status HTTP/1.1\r\nhost: any\r\n\r\n";
        for (text, words) in [
            ("{\"id\":3,\"method\":\"status\"}\n\n", " 400 Bad Request"),
            ("[[[[\r\n\r\n", " 400 Bad Request"),
            (status, "{\"pid\":7,"),
            ("POST /v1/reload HTTP/1.0\r\n\r\n", "the file is wrong"),
            ("GET /v1/reload HTTP/1.0\r\n\r\n", "accepts only POST"),
            ("POST /v1/stop HTTP/1.0\r\n\r\n", "accepts only GET"),
            (long.as_str(), " 431 "),
        ] {
            let mut stream = UnixStream::connect(&path)
                .await
                .expect("the control socket accepts the connection");
            // lvsd does not read the rest of a long request, so that the write may fail.
            let _ = stream.write_all(text.as_bytes()).await;
            let mut printed = Vec::new();
            let _ = stream.read_to_end(&mut printed).await;
            let printed = String::from_utf8_lossy(&printed);
            assert!(printed.contains(words), "no {words:?} in {printed}");
        }
        // The socket can be bound again although its file exists.
        opened(&dataplane, &Dataplane::default(), &Events::default());
    }

    #[tokio::test]
    async fn control_socket_client_gets_answers_and_events() {
        let directory = tempfile::tempdir().expect("a temporary directory can be created");
        let dataplane = Address::new(directory.path().join("e.sock"));
        let mut events = Events::default();
        opened(&dataplane, &Dataplane::default(), &events);
        let asking = tokio::task::spawn_blocking(move || {
            let client = || {
                let client =
                    Client::connect(&dataplane).expect("the dataplane accepts the connection");
                client.expect("the control socket accepts the connection")
            };
            let mut one = client();
            assert_eq!(one.status().expect("the status is returned").pid, 7);
            let refused = one
                .reload(false)
                .expect_err("a reload without force is accepted");
            assert_eq!(refused, "the file is wrong");
            one.reload(true).expect("the reload succeeds");
            let spec = |host: [u8; 4], why: &str| AdminSpec {
                target: Target {
                    service: None,
                    host: host.into(),
                    port: None,
                },
                state: AdminState::Drain,
                who: None,
                why: Some(why.to_owned()),
                until: None,
                force: false,
            };
            let done = one.admin(&spec([10, 0, 0, 1], "disk"));
            assert_eq!(done, Ok(AdminDone::default()));
            let refused = one.admin(&spec([10, 0, 0, 1], "a\u{1b}b"));
            let refused = refused.expect_err("a control character is accepted");
            assert!(
                refused.contains("control characters"),
                "no `control characters` in {refused}"
            );
            let mut reported = Vec::new();
            let each = |event: Event| {
                reported.push(event.message);
                reported.len() < 2
            };
            client()
                .events(each)
                .expect("the stream continues until the client has two events");
            reported
        });
        while !asking.is_finished() {
            let lines = format!("first\n{}", "x".repeat(1 << 17));
            events.send("drift", About::default(), lines);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let reported = asking.await.expect("the thread does not panic");
        assert!(reported.iter().all(|text| text.starts_with("first\nx")));
    }

    #[tokio::test]
    async fn event_streams_of_control_socket_are_bounded_and_closed_streams_free_their_slots() {
        let directory = tempfile::tempdir().expect("a temporary directory can be created");
        let dataplane = Address::new(directory.path().join("e.sock"));
        let (sender, _requests) = channel();
        let api = Arc::new(Api::new(sender, &Events::default(), Arc::default()));
        open(&dataplane, &Dataplane::default(), Arc::clone(&api)).expect("the socket can be bound");
        let path = directory.path().join("e.sock.lvsd");
        let request = "GET /v1/events HTTP/1.1\r\naccept: text/event-stream\r\n\r\n";
        let mut held = Vec::new();
        loop {
            let mut stream = UnixStream::connect(&path)
                .await
                .expect("the control socket accepts the connection");
            let _ = stream.write_all(request.as_bytes()).await;
            let mut code = [0; 12];
            stream
                .read_exact(&mut code)
                .await
                .expect("the answer arrives");
            if &code != b"HTTP/1.1 200" {
                assert_eq!(&code, b"HTTP/1.1 503");
                break;
            }
            held.push(stream);
        }
        drop(held);
        while api.local_place(None).is_none() {
            tokio::task::yield_now().await;
        }
    }

    /// Run as another user by the test below: requests a reload, and prints the answer.
    #[test]
    #[ignore = "by hand: another test starts it"]
    fn helper_process_sends_reload_request() {
        use std::os::linux::net::SocketAddrExt;
        let name = std::env::var("DOOR").expect("the variable DOOR is set");
        let name = std::os::unix::net::SocketAddr::from_abstract_name(name)
            .expect("the socket name is valid");
        let mut stream = std::os::unix::net::UnixStream::connect_addr(&name)
            .expect("the control socket accepts the connection");
        let request = b"POST /v1/reload HTTP/1.0\r\ncontent-length: 14\r\n\r\n{\"force\":true}";
        stream.write_all(request).expect("the request is written");
        let mut printed = String::new();
        stream
            .read_to_string(&mut printed)
            .expect("the answer arrives");
        println!("{printed}");
    }

    #[tokio::test]
    async fn control_socket_accepts_change_of_unprivileged_user_only_if_in_configured_group() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let name = format!("lvsd-control-{}", std::process::id());
        let dataplane = Address::new(format!("@{name}"));
        let settings = Dataplane {
            group: Some("4242".to_owned()),
            ..Dataplane::default()
        };
        opened(&dataplane, &settings, &Events::default());
        for (groups, expected) in [("4242", " 200 OK"), ("4243", "only root")] {
            let output = tokio::process::Command::new("setpriv")
                .args(["--reuid=65534", "--regid=65534", "--groups", groups])
                .arg(std::env::current_exe().expect("the path of this program is known"))
                .args([
                    "--exact",
                    "control_socket::tests::helper_process_sends_reload_request",
                    "--ignored",
                    "--nocapture",
                ])
                .env("DOOR", format!("{name}.lvsd"))
                .output();
            let output = output
                .await
                .expect("setpriv of util-linux is installed")
                .stdout;
            let output = String::from_utf8_lossy(&output);
            assert!(
                output.contains(expected),
                "{groups}: no {expected:?} in {output}"
            );
        }
    }
}
