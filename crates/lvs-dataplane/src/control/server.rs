//! The answering side: one thread accepts, one thread serves each connection.
//!
//! An engine implements [`Handler`]; the server reads requests, checks who may make them, and writes the answers. No
//! reader, however slow, holds up anything but the thread that answers it.

use std::fs;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use lvs_core::api::{Access, Call, Failure, FailureCode, Hello, VERSION};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Address;
use crate::sys::peercred;

/// The longest request.
const REQUEST_MAX: u64 = 1 << 20;
/// The longest of a client that may change things: a list of [`CHANGES_MAX`](lvs_core::api::CHANGES_MAX) changes.
const LIST_MAX: u64 = 32 << 20;
/// Connections at a time.
const CONNECTIONS_MAX: usize = 64;
/// Connections at a time of those who may only look, so that they cannot lock out those who may act.
const READERS_MAX: usize = 32;
/// How long a client may take to make room for more of an answer.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a client may say nothing.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);
/// Bytes of an answer that are gathered before they are written.
const BUFFER: usize = 64 << 10;

/// What answers the requests.
pub trait Handler: Send + Sync + 'static {
    /// Name and version: `lvs-dataplane 0.1.0`.
    fn name(&self) -> String;

    /// Size of the connection table as listings print it.
    fn table_size(&self) -> u32;

    /// Does what `call` asks for and gives the final result; the items of a list go to `out` before. `hello` never
    /// comes here, and calls that change something come only from those who may.
    ///
    /// It is called from many threads at once. [`Sink::item`] may block for as long as the client takes to read, so
    /// no lock that packets need may be held across it: a long list is copied out in pieces.
    ///
    /// # Errors
    /// A refusal; then nothing has changed.
    fn call(&self, call: Call, out: &mut Sink<'_>) -> Result<Value, Failure>;

    /// Answers a method `test.*`, which only a test engine has.
    ///
    /// # Errors
    /// A refusal.
    fn test(&self, method: &str, params: Value, out: &mut Sink<'_>) -> Result<Value, Failure> {
        let _ = (params, out);
        Err(malformed(format!(
            "{method}: this engine has no methods for tests"
        )))
    }
}

/// Where the items of a list go.
pub struct Sink<'a> {
    id: u64,
    out: &'a mut dyn Write,
    count: u64,
}

impl std::fmt::Debug for Sink<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sink")
            .field("id", &self.id)
            .field("count", &self.count)
            .finish_non_exhaustive()
    }
}

impl<'a> Sink<'a> {
    /// Items of the answer to request `id`, as lines.
    pub fn new(id: u64, out: &'a mut dyn Write) -> Self {
        Self { id, out, count: 0 }
    }

    /// Sends one item.
    ///
    /// # Errors
    /// The client is gone: the caller should stop.
    pub fn item(&mut self, item: &impl Serialize) -> Result<(), Failure> {
        #[derive(Serialize)]
        struct Line<'a, T> {
            id: u64,
            item: &'a T,
        }
        write_line(&mut self.out, &Line { id: self.id, item }).map_err(|error| {
            Failure::new(
                FailureCode::Internal,
                format!("the client does not read any more: {error}"),
            )
        })?;
        self.count += 1;
        Ok(())
    }

    /// Sends what was gathered, for a list whose items come slowly.
    ///
    /// # Errors
    /// The client is gone: the caller should stop.
    pub fn flush(&mut self) -> Result<(), Failure> {
        self.out.flush().map_err(|error| {
            Failure::new(
                FailureCode::Internal,
                format!("the client does not read any more: {error}"),
            )
        })
    }

    /// How many items went out.
    pub const fn count(&self) -> u64 {
        self.count
    }
}

/// Who else may change things than root and the engine's own user.
#[derive(Clone, Copy, Debug, Default)]
pub struct Permissions {
    /// Members of this group.
    pub group: Option<u32>,
}

/// Why there is no control socket.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// Another engine listens there.
    #[error("another engine is running at {address}{}: stop it first, or give this one another --socket", of_pid(.pid))]
    Running {
        /// Where.
        address: Address,
        /// Its process, if it is in this PID namespace.
        pid: Option<u32>,
    },
    /// There is a file at the path that is not a socket.
    #[error("{path} is not a socket: remove it, or give another --socket", path = .0.display())]
    NotASocket(PathBuf),
    /// The system refused.
    #[error("cannot listen at {address}: {source}")]
    Io {
        /// Where.
        address: Address,
        /// Why.
        source: io::Error,
    },
}

fn of_pid(pid: &Option<u32>) -> String {
    pid.map(|pid| format!(", pid {pid}")).unwrap_or_default()
}

/// A bound control socket.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    address: Address,
    permissions: Permissions,
    /// The file to remove at the end, by device and inode.
    file: Option<(PathBuf, (u64, u64))>,
}

impl Server {
    /// Listens at `address`. A socket file that nobody listens on any more is replaced.
    ///
    /// # Errors
    /// A [`BindError`].
    pub fn bind(address: &Address, permissions: Permissions) -> Result<Self, BindError> {
        let failed = |source| BindError::Io {
            address: address.clone(),
            source,
        };
        if let Some(path) = address.path() {
            remove_stale(address, path)?;
        }
        let listener = address
            .socket_addr()
            .and_then(|addr| UnixListener::bind_addr(&addr))
            .map_err(|error| match error.kind() {
                io::ErrorKind::AddrInUse => running(address),
                _ => failed(error),
            })?;
        let file = match address.path() {
            Some(path) => {
                // Everybody may connect: the peer's credentials decide what it may do.
                fs::set_permissions(path, fs::Permissions::from_mode(0o666)).map_err(failed)?;
                let meta = fs::symlink_metadata(path).map_err(failed)?;
                Some((path.to_path_buf(), (meta.dev(), meta.ino())))
            }
            None => None,
        };
        Ok(Self {
            listener,
            address: address.clone(),
            permissions,
            file,
        })
    }

    /// Answers requests from threads of its own until the handle is dropped.
    ///
    /// # Errors
    /// There can be no thread.
    pub fn serve(self, engine: Arc<dyn Handler>) -> io::Result<Handle> {
        let stopping = Arc::new(AtomicBool::new(false));
        let address = self.address.clone();
        let thread = {
            let stopping = Arc::clone(&stopping);
            thread::Builder::new()
                .name("control".into())
                .spawn(move || self.accept(&engine, &stopping))?
        };
        Ok(Handle {
            stopping,
            address,
            thread: Some(thread),
        })
    }

    fn accept(self, engine: &Arc<dyn Handler>, stopping: &AtomicBool) {
        let all = Arc::new(AtomicUsize::new(0));
        let readers = Arc::new(AtomicUsize::new(0));
        loop {
            let accepted = self.listener.accept();
            if stopping.load(Ordering::Acquire) {
                return;
            }
            let Ok((stream, _)) = accepted else {
                // Out of descriptors or memory: others may give some back.
                thread::sleep(Duration::from_millis(20));
                continue;
            };
            let writable = self.may_write(&stream);
            let mut places = vec![Place::take(&all, CONNECTIONS_MAX)];
            if !writable {
                places.push(Place::take(&readers, READERS_MAX));
            }
            let Some(places) = places.into_iter().collect::<Option<Vec<_>>>() else {
                turn_away(stream);
                continue;
            };
            let engine = Arc::clone(engine);
            // Without a thread for it, the connection is closed.
            let _ = thread::Builder::new()
                .name("control-conn".into())
                .spawn(move || {
                    let _places = places;
                    // An error here is that the client went away.
                    let _ = serve_connection(&stream, writable, &*engine);
                });
        }
    }

    fn may_write(&self, stream: &UnixStream) -> bool {
        let Ok(peer) = peercred::peer_cred(stream) else {
            return false;
        };
        peer.uid == 0
            || peer.uid == peercred::own_uid()
            || self.permissions.group.is_some_and(|gid| {
                peer.gid == gid || peercred::peer_in_group(stream, gid).unwrap_or(false)
            })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some((path, identity)) = &self.file {
            // Another engine may have put its own in place since.
            let same =
                fs::symlink_metadata(path).is_ok_and(|meta| (meta.dev(), meta.ino()) == *identity);
            if same {
                let _ = fs::remove_file(path);
            }
        }
    }
}

/// A serving control socket; dropping it stops it. Answers under way are finished by their own threads.
#[derive(Debug)]
pub struct Handle {
    stopping: Arc<AtomicBool>,
    address: Address,
    thread: Option<JoinHandle<()>>,
}

impl Handle {
    /// Where it listens.
    pub const fn address(&self) -> &Address {
        &self.address
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        // Wakes the thread. If that is not possible the thread stays behind, and harms nobody.
        if self.address.connect().is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

/// One of a bounded number of connections.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(count: &Arc<AtomicUsize>, max: usize) -> Option<Self> {
        count
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| {
                (n < max).then_some(n + 1)
            })
            .is_ok()
            .then(|| Self(Arc::clone(count)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn running(address: &Address) -> BindError {
    let pid = address
        .connect()
        .and_then(|stream| peercred::peer_cred(&stream))
        .ok()
        .map(|peer| peer.pid)
        .filter(|&pid| pid != 0);
    BindError::Running {
        address: address.clone(),
        pid,
    }
}

fn remove_stale(address: &Address, path: &Path) -> Result<(), BindError> {
    let failed = |source| BindError::Io {
        address: address.clone(),
        source,
    };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
        Ok(meta) if !meta.file_type().is_socket() => {
            return Err(BindError::NotASocket(path.to_path_buf()));
        }
        Ok(_) => {}
    }
    match address.connect() {
        Ok(_) => Err(running(address)),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(failed)
        }
        Err(error) => Err(failed(error)),
    }
}

fn turn_away(mut stream: UnixStream) {
    let failure = Failure::new(
        FailureCode::Full,
        format!(
            "the engine serves {CONNECTIONS_MAX} control connections already ({READERS_MAX} of users without rights): close some"
        ),
    );
    let _ = stream.set_write_timeout(Some(Duration::from_millis(100)));
    let _ = write_error(&mut stream, 0, &failure);
}

/// A request before its method is known.
#[derive(Deserialize)]
struct RawRequest {
    #[serde(default)]
    id: u64,
    method: String,
    #[serde(default)]
    params: Option<Value>,
}

fn serve_connection(stream: &UnixStream, writable: bool, engine: &dyn Handler) -> io::Result<()> {
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    // A client that has been forgotten gives its place back: the read ends with an error.
    stream.set_read_timeout(Some(IDLE_TIMEOUT))?;
    let mut reader = BufReader::new(stream);
    let mut writer = BufWriter::with_capacity(BUFFER, stream);
    let mut greeted = false;
    let mut line = Vec::new();
    let max = if writable { LIST_MAX } else { REQUEST_MAX };
    loop {
        line.clear();
        // A long list leaves no memory behind.
        line.shrink_to(BUFFER);
        let len = reader.by_ref().take(max).read_until(b'\n', &mut line)?;
        if len == 0 {
            return Ok(());
        }
        if line.last() != Some(&b'\n') {
            let failure = malformed(if len as u64 == max {
                format!("the request is longer than {max} bytes")
            } else {
                "the request does not end with a line feed".into()
            });
            write_error(&mut writer, 0, &failure)?;
            return writer.flush();
        }
        let (id, answer) = match serde_json::from_slice::<RawRequest>(&line) {
            Err(error) => (0, Err(malformed(format!("this is not a request: {error}")))),
            Ok(request) => {
                let id = request.id;
                let mut out = Sink::new(id, &mut writer);
                let answer = answer(request, &mut greeted, writable, engine, &mut out);
                (id, answer)
            }
        };
        match answer {
            Ok(result) => {
                #[derive(Serialize)]
                struct Line {
                    id: u64,
                    result: Value,
                }
                write_line(&mut writer, &Line { id, result })?;
            }
            Err(failure) => write_error(&mut writer, id, &failure)?,
        }
        writer.flush()?;
    }
}

fn answer(
    request: RawRequest,
    greeted: &mut bool,
    writable: bool,
    engine: &dyn Handler,
    out: &mut Sink<'_>,
) -> Result<Value, Failure> {
    let method = request.method;
    let params = request.params.unwrap_or_else(|| json!({}));
    let denied = || {
        Failure::new(
            FailureCode::Permission,
            format!(
                "{method}: only root, the engine's own user and the group it was given may do this"
            ),
        )
    };
    if method.starts_with("test.") && *greeted {
        if !writable {
            return Err(denied());
        }
        return engine.test(&method, params, out);
    }
    let call: Call = serde_json::from_value(json!({ "method": &method, "params": params }))
        .map_err(|error| malformed(format!("{method}: {error}")))?;
    if let Call::Hello { version } = call {
        if version != VERSION {
            return Err(Failure::new(
                FailureCode::Version,
                format!("the engine speaks version {VERSION}"),
            ));
        }
        *greeted = true;
        let hello = Hello {
            version: VERSION,
            engine: engine.name(),
            table_size: engine.table_size(),
            writable,
        };
        return serde_json::to_value(hello)
            .map_err(|error| Failure::new(FailureCode::Internal, error.to_string()));
    }
    if !*greeted {
        return Err(malformed("the first request must be hello".into()));
    }
    if call.access() == Access::Write && !writable {
        return Err(denied());
    }
    engine.call(call, out)
}

fn malformed(message: String) -> Failure {
    Failure::new(FailureCode::Malformed, message)
}

fn write_error(out: &mut impl Write, id: u64, error: &Failure) -> io::Result<()> {
    #[derive(Serialize)]
    struct Line<'a> {
        id: u64,
        error: &'a Failure,
    }
    write_line(out, &Line { id, error })
}

fn write_line(mut out: &mut (impl Write + ?Sized), line: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut out, line)?;
    out.write_all(b"\n")
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use lvs_core::api::{ListEnd, ReasonCount, Timeouts};
    use serde::de::IgnoredAny;

    use super::*;
    use crate::control::{Client, Error};

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
                Call::TimeoutsGet {} => {
                    serde_json::to_value(*self.timeouts.lock().expect("not poisoned"))
                }
                Call::TimeoutsSet(timeouts) => {
                    *self.timeouts.lock().expect("not poisoned") = timeouts;
                    Ok(json!({}))
                }
                Call::Drops {} => {
                    for count in 0..100_000 {
                        out.item(&ReasonCount {
                            action: "drop".into(),
                            reason: "test".into(),
                            count,
                            help: String::new(),
                            remedy: String::new(),
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

    fn start(address: &Address) -> Handle {
        let engine = Arc::new(Fake {
            timeouts: Mutex::new(Timeouts {
                tcp: 900,
                tcp_fin: 120,
                udp: 300,
            }),
        });
        Server::bind(address, Permissions::default())
            .and_then(|server| {
                server.serve(engine).map_err(|source| BindError::Io {
                    address: address.clone(),
                    source,
                })
            })
            .expect("the socket is free")
    }

    fn unique(what: &str) -> Address {
        Address::new(format!("@lvs-test-{what}-{}", std::process::id()))
    }

    #[test]
    fn calls_lists_and_refusals() {
        let address = unique("calls");
        let _handle = start(&address);
        let mut client = Client::connect(&address).expect("it answers");
        assert_eq!(client.hello().engine, "fake 1");
        assert!(client.hello().writable);
        let set = Timeouts {
            tcp: 1,
            tcp_fin: 2,
            udp: 3,
        };
        client
            .call::<IgnoredAny>(&Call::TimeoutsSet(set))
            .expect("it is set");
        assert_eq!(
            client
                .call::<Timeouts>(&Call::TimeoutsGet {})
                .expect("it is there"),
            set
        );
        let mut sum = 0;
        let end = client
            .list(&Call::Drops {}, |item: ReasonCount| sum += item.count)
            .expect("a list");
        assert_eq!((end.count, sum), (100_000, 4_999_950_000));
        let refused = client
            .call::<IgnoredAny>(&Call::Stop {})
            .expect_err("refused");
        assert!(
            matches!(&refused, Error::Refused(f) if f.code == FailureCode::Unsupported),
            "{refused}"
        );
    }

    fn raw(address: &Address, bytes: &[u8]) -> String {
        let mut stream = address.connect().expect("it listens");
        // It may close before it has read everything; what it answered is there all the same.
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    }

    #[test]
    fn bad_requests_get_an_answer() {
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
            ("{\"id\":1", "does not end"),
            (
                "{\"id\":1,\"method\":\"hello\",\"params\":{\"version\":1}}\n{\"id\":2,\"method\":\"test.advance\"}\n",
                "no methods for tests",
            ),
        ] {
            let answer = raw(&address, request.as_bytes());
            assert!(answer.contains(part), "{request:?} got {answer:?}");
        }
        assert!(raw(&address, &vec![b' '; 33 << 20]).contains("longer than"));
    }

    #[test]
    fn a_second_engine_is_refused_and_a_stale_socket_replaced() {
        let dir = std::env::temp_dir().join(format!("lvs-test-stale-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("a directory");
        let path = dir.join("socket");
        let address = Address::Path(path.clone());
        let missing = Client::connect(&address).expect_err("nobody is there");
        assert!(matches!(missing, Error::Absent { .. }), "{missing}");

        let first = start(&address);
        let second = Server::bind(&address, Permissions::default()).expect_err("one is running");
        assert!(
            second
                .to_string()
                .contains(&format!("pid {}", std::process::id())),
            "{second}"
        );
        drop(first);
        assert!(!path.exists(), "it removes its socket");

        drop(UnixListener::bind(&path).expect("a socket"));
        let stale = Client::connect(&address).expect_err("nobody listens");
        assert!(matches!(stale, Error::Stale { .. }), "{stale}");
        drop(start(&address));

        fs::write(&path, b"x").expect("a file");
        let file = Server::bind(&address, Permissions::default()).expect_err("not a socket");
        assert!(matches!(file, BindError::NotASocket(_)), "{file}");
        let file = Client::connect(&address).expect_err("not a socket");
        assert!(matches!(file, Error::NotASocket { .. }), "{file}");
        fs::remove_dir_all(&dir).expect("it is ours");

        let name = unique("second");
        let _first = start(&name);
        let second = Server::bind(&name, Permissions::default()).expect_err("one is running");
        assert!(matches!(second, BindError::Running { pid: Some(_), .. }));
    }

    #[test]
    fn readers_cannot_take_every_place() {
        let count = Arc::new(AtomicUsize::new(0));
        let places: Vec<_> = (0..READERS_MAX)
            .map(|_| Place::take(&count, READERS_MAX))
            .collect();
        assert!(places.iter().all(Option::is_some));
        assert!(Place::take(&count, READERS_MAX).is_none());
        drop(places);
        assert!(Place::take(&count, READERS_MAX).is_some());
    }

    #[test]
    fn an_engine_that_dies_is_told() {
        let address = unique("dies");
        let listener = UnixListener::bind_addr(&address.socket_addr().expect("an address"))
            .expect("the socket is free");
        let thread = thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let mut line = String::new();
            BufReader::new(&stream)
                .read_line(&mut line)
                .expect("a request");
            stream.write_all(b"{\"id\":1,\"resu").expect("it reads");
        });
        let gone = Client::connect(&address).expect_err("it ended");
        assert!(matches!(gone, Error::Gone { .. }), "{gone}");
        thread.join().expect("no panic");
    }
}
