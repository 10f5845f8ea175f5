//! Tests with a client and a server that are connected to each other.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex};
use std::thread;

use lvs_core::api::{Call, Failure, FailureCode, ListEnd, ReasonCount, Timeouts};
use lvs_core::recent::RecentCount;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::admission::Places;
use super::connection::{malformed, serve_connection};
use super::server::{BindError, Handle, Handler, Permissions, Server, Sink};
use lvs_api::peer::Refusal;
use lvs_api::{Address, Client, Error};

struct Fake {
    timeouts: Mutex<Timeouts>,
}

impl Handler for Fake {
    fn name(&self) -> String {
        "fake 1".into()
    }

    fn table_size(&self) -> u32 {
        4096
    }

    fn call(&self, call: Call, out: &mut Sink<'_>) -> Result<Value, Failure> {
        let value = match call {
            Call::TimeoutsGet {} => serde_json::to_value(
                *self
                    .timeouts
                    .lock()
                    .expect("no thread panicked with the lock"),
            ),
            Call::TimeoutsSet(timeouts) => {
                *self
                    .timeouts
                    .lock()
                    .expect("no thread panicked with the lock") = timeouts;
                Ok(json!({}))
            }
            Call::Drops {} => {
                for count in 0..100_000 {
                    out.item(&ReasonCount {
                        action: "drop".into(),
                        reason: "test".into(),
                        packets: RecentCount {
                            count,
                            ..RecentCount::default()
                        },
                        help: String::new(),
                        fix: String::new(),
                    })?;
                }
                serde_json::to_value(ListEnd { count: out.count() })
            }
            other => {
                return Err(Failure::new(
                    FailureCode::Unsupported,
                    format!("not here: {other:?}"),
                ));
            }
        };
        value.map_err(|error| malformed(error.to_string()))
    }
}

impl Fake {
    fn new() -> Self {
        let (tcp, tcp_fin, udp) = (900, 120, 300);
        Self {
            timeouts: Mutex::new(Timeouts { tcp, tcp_fin, udp }),
        }
    }
}

fn start(address: &Address) -> Handle {
    let dataplane = Arc::new(Fake::new());
    Server::bind(address, Permissions::default())
        .and_then(|server| {
            server.serve(dataplane).map_err(|source| BindError::Io {
                address: address.clone(),
                source,
            })
        })
        .expect("the socket is not in use")
}

fn unique(what: &str) -> Address {
    Address::new(format!("@lvs-test-{what}-{}", std::process::id()))
}

#[test]
fn control_socket_sends_results_lists_and_refusals() {
    let address = unique("calls");
    let _handle = start(&address);
    let mut client = Client::connect(&address).expect("the server accepts the connection");
    assert_eq!(client.hello().dataplane, "fake 1");
    assert!(client.hello().writable);
    let set = Timeouts {
        tcp: 1,
        tcp_fin: 2,
        udp: 3,
    };
    client
        .call::<IgnoredAny>(&Call::TimeoutsSet(set))
        .expect("the timeouts can be set");
    assert_eq!(
        client
            .call::<Timeouts>(&Call::TimeoutsGet {})
            .expect("the call is answered"),
        set
    );
    let mut sum = 0;
    let end = client
        .list(&Call::Drops {}, |item: ReasonCount| {
            sum += item.packets.count;
        })
        .expect("the list arrives");
    assert_eq!((end.count, sum), (100_000, 4_999_950_000));
    let refused = client
        .call::<IgnoredAny>(&Call::Stop {})
        .expect_err("the unsupported call is accepted");
    assert!(
        matches!(&refused, Error::Refused(f) if f.code == FailureCode::Unsupported),
        "{refused}"
    );
}

fn raw(address: &Address, bytes: &[u8]) -> String {
    let mut stream = address.connect().expect("the connection is accepted");
    // The server may close the connection before it has read everything; its answer still arrives.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    answer
}

#[test]
fn control_socket_answers_malformed_early_and_too_long_requests_with_errors() {
    let address = unique("bad");
    let _handle = start(&address);
    for (request, part) in [
        ("nonsense\n", "not a request"),
        ("{\"id\":7,\"method\":\"nothing\"}\n", "\"id\":7"),
        (
            "{\"id\":7,\"method\":\"info\"}\n",
            "first request must be hello",
        ),
        (
            "{\"id\":1,\"method\":\"hello\",\"params\":{\"version\":99}}\n",
            "\"code\":\"version\"",
        ),
        // The lines are refused before they are parsed.
        (
            "{\"id\":7,\"method\":\"service.add\",\"params\":[[[1]]]}\n",
            "first request must be hello",
        ),
        (
            "{\"id\":1,\"method\":\"hello\",\"params\":[]}\n",
            "\"code\":\"malformed\"",
        ),
        (
            "{\"id\":1,\"method\":\"hello\",\"params\":{\"version\":1}}\n{\"id\":2,\"method\":\"nothing\"}\n",
            "\"id\":2,\"error\":{\"code\":\"malformed\"",
        ),
        ("{\"id\":1", "lacks its final"),
    ] {
        let answer = raw(&address, request.as_bytes());
        assert!(answer.contains(part), "{request:?} got {answer:?}");
    }
    assert!(raw(&address, &vec![b' '; 33 << 20]).contains("longer than"));
}

#[test]
fn control_socket_bind_replaces_only_stale_socket_and_reports_cause_otherwise() {
    let dir = std::env::temp_dir().join(format!("lvs-test-stale-{}", std::process::id()));
    fs::create_dir_all(&dir).expect("the directory can be created");
    let path = dir.join("socket");
    let address = Address::Path(path.clone());
    let missing = Client::connect(&address).expect_err("a process listens at the address");
    assert!(matches!(missing, Error::Absent { .. }), "{missing}");

    let first = start(&address);
    let second = Server::bind(&address, Permissions::default())
        .expect_err("a second server can listen at the address");
    assert!(
        second
            .to_string()
            .contains(&format!("pid {}", std::process::id())),
        "{second}"
    );
    drop(first);
    assert!(!path.exists(), "the socket file is still there");

    drop(UnixListener::bind(&path).expect("the socket can be opened"));
    let stale = Client::connect(&address).expect_err("a process listens at the address");
    assert!(matches!(stale, Error::Stale { .. }), "{stale}");
    drop(start(&address));

    fs::write(&path, b"x").expect("the file can be written");
    let file = Server::bind(&address, Permissions::default())
        .expect_err("a file that is not a socket is accepted");
    assert!(matches!(file, BindError::NotASocket(_)), "{file}");
    let file = Client::connect(&address).expect_err("a file that is not a socket is accepted");
    assert!(matches!(file, Error::NotASocket { .. }), "{file}");
    fs::remove_dir_all(&dir).expect("the directory can be removed");
    let lost = Server::bind(&address, Permissions::default())
        .expect_err("the server listens in a missing directory");
    assert!(
        lost.to_string().contains("create the directory"),
        "no `create the directory` in {lost}"
    );

    let name = unique("second");
    let _first = start(&name);
    let second = Server::bind(&name, Permissions::default())
        .expect_err("a second server can listen at the address");
    assert!(matches!(second, BindError::Running { pid: Some(_), .. }));
}

#[test]
fn connection_closed_during_answer_is_reported_to_client() {
    let address = unique("dies");
    let listener =
        UnixListener::bind_addr(&address.socket_addr().expect("the socket has an address"))
            .expect("the socket is not in use");
    let thread = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client connects");
        let mut line = String::new();
        BufReader::new(&stream)
            .read_line(&mut line)
            .expect("the request can be read");
        stream
            .write_all(b"{\"id\":1,\"resu")
            .expect("the start of the answer is written");
    });
    let gone = Client::connect(&address).expect_err("the ended dataplane accepts the connection");
    assert!(matches!(gone, Error::Gone { .. }), "{gone}");
    thread.join().expect("the thread ends without a panic");
}

/// The answers to these lines; `denied` makes the client read-only.
fn answers_to(denied: Option<Refusal>, lines: &[&[u8]]) -> String {
    let (mut client, server) = UnixStream::pair().expect("the sockets can be opened");
    let thread = thread::spawn(move || {
        let places = Arc::<Places>::default();
        let reader = denied.map(|_| 1000);
        let place = places.take(reader).expect("the reader gets the first slot");
        // The only error is that the client has closed its connection.
        let _ = serve_connection(&server, &place, denied, &Fake::new());
    });
    for line in lines {
        // The server may close the connection before it has read everything.
        let _ = client.write_all(line);
    }
    let _ = client.shutdown(Shutdown::Write);
    let mut answers = String::new();
    let _ = client.read_to_string(&mut answers);
    thread.join().expect("the thread ends without a panic");
    answers
}

fn padded(request: &str, len: usize) -> Vec<u8> {
    let mut line = request.as_bytes().to_vec();
    line.resize(len - 1, b' ');
    line.push(b'\n');
    line
}

#[test]
fn request_longer_than_limit_for_hello_reader_or_writer_is_refused() {
    let hello = "{\"id\":1,\"method\":\"hello\",\"params\":{\"version\":1}}";
    let get = "{\"id\":2,\"method\":\"timeouts.get\"}";
    let reader = Some(Refusal::User);
    let greeted = padded(hello, 100);
    for (denied, before, request, max) in [
        (None, None, hello, 4 << 10),
        (reader, None, hello, 4 << 10),
        (reader, Some(&greeted), get, 16 << 10),
        (None, Some(&greeted), get, 32 << 20),
    ] {
        let answer_of = |len| {
            let line = padded(request, len);
            let lines: Vec<&[u8]> = before
                .map(Vec::as_slice)
                .into_iter()
                .chain([line.as_slice(), get.as_bytes(), b"\n"])
                .collect();
            answers_to(denied, &lines)
        };
        let fits = answer_of(max);
        assert!(
            !fits.contains("error"),
            "{max}: unexpected `error` in {fits}"
        );
        let refused = answer_of(max + 1);
        let reason = format!("the request is longer than {max} bytes");
        assert!(
            refused.contains(&reason),
            "{max}: no {reason:?} in {refused}"
        );
        let last = refused.lines().last().unwrap_or_default();
        assert!(
            last.contains(&reason),
            "the connection did not end with the refusal: {refused}"
        );
    }
}

/// Runs `body` in a new network namespace, in which no abstract socket names are in use.
fn in_own_network(body: impl FnOnce() + Send + 'static) {
    let thread = thread::spawn(|| {
        lvs_sys::unshare_network().expect("this test makes network namespaces: run it as root");
        body();
    });
    thread.join().expect("the thread ends without a panic");
}

#[test]
fn default_socket_is_found_by_path_or_abstract_name_and_has_one_server() {
    in_own_network(|| {
        let top = std::env::temp_dir().join(format!("lvs-test-usual-{}", std::process::id()));
        fs::create_dir_all(&top).expect("the directory can be created");
        let directory = top.join("lvs");
        let usual = Address::Usual(directory.join("netns-1.sock"));
        let missing = Client::connect(&usual).expect_err("a process listens at the address");
        assert!(matches!(missing, Error::Absent { .. }), "{missing}");

        let first = start(&usual);
        assert_eq!(first.address(), &usual);
        let client = Client::connect(&usual).expect("the server accepts the connection");
        assert!(client.hello().writable);
        let second = Server::bind(&usual, Permissions::default())
            .expect_err("a second server can listen at the address");
        assert!(
            matches!(second, BindError::Running { pid: Some(pid), .. } if pid == std::process::id())
        );
        drop(first);

        // A dataplane that has only the abstract name is found, and prevents the start of another
        // one.
        let old = start(&Address::by_name());
        Client::connect(&usual).expect("the client finds the socket");
        let second = Server::bind(&usual, Permissions::default())
            .expect_err("a second server can listen at the address");
        assert!(
            second.to_string().contains("@lvs-dataplane"),
            "no `@lvs-dataplane` in {second}"
        );
        drop(old);

        // If the directory could belong to another user, only the abstract name is used.
        fs::set_permissions(
            &directory,
            std::os::unix::fs::PermissionsExt::from_mode(0o777),
        )
        .expect("the permissions can be set");
        let named = start(&usual);
        assert_eq!(named.address(), &Address::by_name());
        Client::connect(&usual).expect("the client finds the socket");
        drop(named);
        fs::remove_dir_all(&top).expect("the directory can be removed");
    });
}
