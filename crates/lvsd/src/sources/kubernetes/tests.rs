//! Objects for all tests of this module, and sessions with a fake API server.

use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;

use super::*;
use crate::health::probe::hostile::{request_of, serving};

/// Settings with one pool.
pub(super) fn settings(range: &str) -> Settings {
    Settings {
        server: Endpoint::parse("http://127.0.0.1:1", 443).unwrap(),
        tls: None,
        token: None,
        namespace: None,
        class: Settings::CLASS.to_owned(),
        default_class: false,
        lease: ("lvsd".to_owned(), "lvsd".to_owned()),
        director: "d1".to_owned(),
        timeout: Duration::from_secs(20),
        pools: vec![Pool {
            name: "public".to_owned(),
            ranges: vec![range.parse().unwrap()],
            auto_assign: true,
        }],
    }
}

pub(super) fn model(services: &[String], slices: &[String], nodes: &[String]) -> Model {
    let mut model = Model::default();
    for (kind, objects) in Kind::ALL.into_iter().zip([services, slices, nodes]) {
        for object in objects {
            model.put(kind, object).unwrap();
        }
    }
    assert!(model.refused.is_empty(), "{:?}", model.refused);
    model
}

/// A Node; `state` is `cordoned`, `not ready`, `deleted`, `excluded`, or empty for a ready Node.
pub(super) fn node(name: &str, address: &str, state: &str) -> String {
    let mut node = json!({
        "metadata": { "name": name, "labels": {} }, "spec": {},
        "status": {
            "addresses": [
                { "type": "Hostname", "address": name }, { "type": "InternalIP", "address": address },
            ],
            "conditions": [{ "type": "Ready", "status": "True" }],
        },
    });
    match state {
        "cordoned" => node["spec"]["unschedulable"] = true.into(),
        "not ready" => node["status"]["conditions"][0]["status"] = "Unknown".into(),
        "deleted" => node["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into(),
        "excluded" => node["metadata"]["labels"][model::EXCLUDED] = "".into(),
        _ => {}
    }
    node.to_string()
}

/// An EndpointSlice of the Service `shop/web`; endpoints are given by address, node and state.
pub(super) fn slice(name: &str, endpoints: &[(&str, &str, &str)]) -> String {
    let endpoint = |(address, node, state): &(&str, &str, &str)| {
        let conditions = match *state {
            "ready" => json!({ "ready": true, "serving": true, "terminating": false }),
            "not ready" => json!({ "ready": false, "serving": false, "terminating": false }),
            "draining" => json!({ "ready": false, "serving": true, "terminating": true }),
            "gone" => json!({ "ready": false, "serving": false, "terminating": true }),
            _ => Value::Null,
        };
        json!({ "addresses": [address], "nodeName": node, "conditions": conditions })
    };
    json!({
        "metadata": {
            "namespace": "shop", "name": name, "labels": { "kubernetes.io/service-name": "web" },
        },
        "addressType": "IPv4",
        "endpoints": endpoints.iter().map(endpoint).collect::<Vec<_>>(),
        "ports": [{ "name": "http", "protocol": "TCP", "port": 8080 }],
    })
    .to_string()
}

/// Line after which the fake API server ends a watch.
const END: &str = "END";

/// Time limit for an expected event.
const PATIENCE: Duration = Duration::from_secs(60);

/// A fake API server, which answers the kinds of requests that lvsd sends.
#[derive(Default)]
struct Fake {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    /// Objects by kind and name.
    objects: BTreeMap<&'static str, BTreeMap<String, Value>>,
    /// Lines that watches of each kind have yet to send.
    lines: BTreeMap<&'static str, Vec<String>>,
    lease: Option<Value>,
    events: Vec<Value>,
    version: u64,
    lists: usize,
    /// First lines and headers of watch requests.
    watched: Vec<String>,
    /// The accepted token.
    token: Option<String>,
    /// Number of requests with another token.
    unauthorized: usize,
    /// Number of status writes that will fail.
    busy: usize,
}

impl State {
    fn accepts(&self, head: &str) -> bool {
        self.token
            .as_ref()
            .is_none_or(|token| head.contains(&format!("authorization: Bearer {token}\r\n")))
    }
}

impl Fake {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Stores an object, and sends it to the watches.
    fn put(&self, kind: &'static str, object: &str) {
        let mut object: Value = serde_json::from_str(object).unwrap();
        let mut state = self.lock();
        state.version += 1;
        object["metadata"]["resourceVersion"] = state.version.to_string().into();
        let line = json!({ "type": "MODIFIED", "object": object }).to_string();
        state.lines.entry(kind).or_default().push(line);
        let key = object["metadata"]["name"].as_str().unwrap().to_owned();
        state.objects.entry(kind).or_default().insert(key, object);
        drop(state);
        self.changed.notify_waiters();
    }

    fn delete(&self, kind: &'static str, name: &str) {
        let mut state = self.lock();
        let object = state
            .objects
            .get_mut(kind)
            .and_then(|all| all.remove(name))
            .unwrap();
        let line = json!({ "type": "DELETED", "object": object }).to_string();
        state.lines.entry(kind).or_default().push(line);
        drop(state);
        self.changed.notify_waiters();
    }

    /// Answers a request with status and body.
    fn answer(&self, head: &str, body: &str) -> (u16, Value) {
        let mut state = self.lock();
        let mut words = head.split(' ');
        let (method, path) = (words.next().unwrap(), words.next().unwrap());
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        if !state.accepts(head) {
            state.unauthorized += 1;
            let message = json!({ "message": "Unauthorized", "code": 401 });
            return (401, message);
        }
        state.version += 1;
        let version = state.version.to_string();
        let body = || serde_json::from_str::<Value>(body).unwrap();
        if path.ends_with("/leases") || path.ends_with("/leases/lvsd") {
            let known = state.lease.clone();
            let held = known
                .as_ref()
                .map(|lease| lease["metadata"]["resourceVersion"].clone());
            return match (method, known) {
                ("GET", Some(lease)) => (200, lease),
                ("GET", None) => (
                    404,
                    json!({ "message": "leases.coordination.k8s.io not found" }),
                ),
                _ if held.is_some()
                    && held != Some(body()["metadata"]["resourceVersion"].clone()) =>
                {
                    (409, json!({ "message": "the object has been modified" }))
                }
                _ => {
                    let mut lease = body();
                    lease["metadata"]["resourceVersion"] = version.into();
                    state.lease = Some(lease.clone());
                    (200, lease)
                }
            };
        }
        if path.ends_with("/events") {
            state.events.push(body());
            return (201, body());
        }
        if method == "PATCH" && state.busy > 0 {
            state.busy -= 1;
            let message = json!({ "message": "etcdserver: request timed out", "code": 500 });
            return (500, message);
        }
        if method == "PATCH" {
            let name = path.split('/').nth(6).unwrap();
            let service = state
                .objects
                .get_mut("services")
                .and_then(|all| all.get_mut(name));
            let service = service.unwrap();
            if service["metadata"]["resourceVersion"] != body()["metadata"]["resourceVersion"] {
                return (409, json!({ "message": "the object has been modified" }));
            }
            service["status"] = body()["status"].clone();
            service["metadata"]["resourceVersion"] = version.into();
            return (200, service.clone());
        }
        assert!(query.starts_with("limit="), "{head}");
        state.lists += 1;
        state.lines.remove(path.rsplit('/').next().unwrap());
        let kind = path.rsplit('/').next().unwrap();
        let items = state
            .objects
            .get(kind)
            .map(|all| all.values().cloned().collect::<Vec<_>>());
        (
            200,
            json!({ "metadata": { "resourceVersion": version }, "items": items }),
        )
    }

    async fn serve(&self, mut stream: TcpStream) {
        while let Some((head, body)) = request_of(&mut stream).await {
            let watched = ["services", "endpointslices", "nodes"];
            let watched = watched
                .into_iter()
                .find(|kind| head.contains(&format!("/{kind}?watch=1")));
            let accepted = self.lock().accepts(&head);
            if let Some(kind) = watched.filter(|_| accepted) {
                self.lock().watched.push(head);
                return self.watch(&mut stream, kind).await;
            }
            let (status, body) = self.answer(&head, &body);
            let body = body.to_string();
            let text = format!(
                "HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            );
            if stream.write_all(text.as_bytes()).await.is_err() {
                return;
            }
        }
    }

    /// Sends lines of a watch until an error line, or until [`END`].
    async fn watch(&self, stream: &mut TcpStream, kind: &str) {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await;
        loop {
            let changed = self.changed.notified();
            let lines = self.lock().lines.get_mut(kind).map(std::mem::take);
            for line in lines.unwrap_or_default() {
                if line == END {
                    return;
                }
                if stream
                    .write_all(format!("{line}\n").as_bytes())
                    .await
                    .is_err()
                {
                    return;
                }
                if line.contains("ERROR") {
                    return;
                }
            }
            let mut ignored = [0; 16];
            tokio::select! {
                () = changed => {}
                _ = stream.read(&mut ignored) => return,
            }
        }
    }
}

/// A director that follows the fake API server.
struct Followed {
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Followed {
    fn start(server: SocketAddr, change: impl FnOnce(&mut Settings)) -> Self {
        let mut settings = settings("192.0.2.10-192.0.2.11");
        settings.server = Endpoint::parse(&format!("http://{server}"), 443).unwrap();
        change(&mut settings);
        let shared = Arc::new(Shared::default());
        let task = follow(settings, Arc::clone(&shared));
        Self { shared, task }
    }

    /// Waits until `right` is true for the state.
    async fn wait(&self, what: &str, right: impl Fn(&super::super::State) -> bool) {
        let waited = timeout(PATIENCE, async {
            while !right(&self.shared.lock()) {
                // Views can change without a notification.
                let _ = timeout(Duration::from_millis(20), self.shared.news.notified()).await;
            }
        });
        let state = || format!("{:#?}", self.shared.lock());
        assert!(
            waited.await.is_ok(),
            "the wait for {what} has timed out: {}",
            state()
        );
    }

    async fn wait_services(&self, keys: &[&str]) {
        self.wait(&format!("{keys:?}"), |state| {
            let known = state.gathered.kubernetes.as_ref();
            known.is_some_and(|known| known.services.keys().eq(keys))
        })
        .await;
    }
}

async fn fake() -> (Arc<Fake>, SocketAddr) {
    let fake = Arc::new(Fake::default());
    let serves = Arc::clone(&fake);
    let address = serving(move |stream| {
        let serves = Arc::clone(&serves);
        async move { serves.serve(stream).await }
    });
    let address = address.await;
    (fake, address)
}

fn service(name: &str, annotations: &Value) -> String {
    json!({
        "metadata": { "namespace": "shop", "name": name, "uid": name, "annotations": annotations },
        "spec": {
            "type": "LoadBalancer", "loadBalancerClass": "lvsd",
            "ports": [{ "port": 80, "nodePort": 30080 }],
        },
    })
    .to_string()
}

#[tokio::test]
async fn new_kubernetes_service_gets_an_address_and_changes_are_followed() {
    let (fake, address) = fake().await;
    fake.put("services", &service("web", &Value::Null));
    fake.put("nodes", &node("n1", "10.0.0.1", ""));
    let director = Followed::start(address, |_| {});
    director.wait_services(&["shop/web/tcp/80"]).await;
    {
        let state = fake.lock();
        assert_eq!(
            state.objects["services"]["web"]["status"]["loadBalancer"]["ingress"][0]["ip"],
            "192.0.2.10"
        );
        assert_eq!(
            state.lease.as_ref().unwrap()["spec"]["holderIdentity"],
            "d1"
        );
    }
    let text = |state: &super::super::State| {
        let known = state.gathered.kubernetes.as_ref().unwrap();
        known.services["shop/web/tcp/80"].text.clone()
    };
    fake.put("nodes", &node("n1", "10.0.0.1", "cordoned"));
    director
        .wait("the cordon", |state| text(state).contains("weight = 0"))
        .await;
    fake.put("nodes", &node("n2", "10.0.0.2", ""));
    director
        .wait("another node", |state| {
            text(state).contains("10.0.0.2:30080")
        })
        .await;
    fake.delete("services", "web");
    director.wait_services(&[]).await;
}

#[tokio::test]
async fn many_kubernetes_services_get_addresses_and_one_event_each() {
    const COUNT: usize = 50;
    let (fake, address) = fake().await;
    for n in 0..COUNT {
        fake.put("services", &service(&format!("s{n:02}"), &Value::Null));
    }
    let director = Followed::start(address, |settings| {
        settings.pools[0].ranges = vec!["192.0.2.0/24".parse().unwrap()];
    });
    director
        .wait("all services", |state| {
            let known = state.gathered.kubernetes.as_ref();
            known.is_some_and(|known| known.services.len() == COUNT)
        })
        .await;
    director
        .wait("all events", |_| fake.lock().events.len() == COUNT)
        .await;
    let state = fake.lock();
    let ingress = |service: &Value| service["status"]["loadBalancer"]["ingress"][0].clone();
    let all: Vec<Value> = state.objects["services"].values().map(ingress).collect();
    let reported = state.events.iter();
    let reported = reported.filter(|event| event["reason"] == "AddressAssigned");
    let mut reported: Vec<String> = reported.map(|event| event["message"].to_string()).collect();
    reported.sort_unstable();
    let mut wanted: Vec<String> = all
        .iter()
        .map(|one| format!("\"assigned {}\"", one["ip"].as_str().unwrap()))
        .collect();
    wanted.sort_unstable();
    wanted.dedup();
    assert_eq!(reported, wanted);
    assert_eq!(reported.len(), COUNT);
    let ports = json!([{ "port": 80, "protocol": "TCP" }]);
    assert!(
        all.iter()
            .all(|one| one["ports"] == ports && one["ipMode"] == "VIP")
    );
}

#[tokio::test]
async fn failed_kubernetes_status_write_is_repeated_without_another_change() {
    let (fake, address) = fake().await;
    fake.put("services", &service("web", &Value::Null));
    fake.lock().busy = 1;
    let director = Followed::start(address, |_| {});
    director.wait_services(&["shop/web/tcp/80"]).await;
    assert_eq!(fake.lock().busy, 0);
    assert_eq!(director.shared.lock().kubernetes.failures, 0);
}

#[tokio::test]
async fn refused_kubernetes_service_causes_one_event_for_each_reason() {
    let (fake, address) = fake().await;
    fake.put("services", &service("web", &json!({ "lvsd/chek": "none" })));
    let director = Followed::start(address, |_| {});
    director
        .wait("the refusal", |state| {
            let mut lines = state.kubernetes_view.left_out.iter();
            lines.any(|line| line.contains("Service shop/web: annotation lvsd/chek is unknown"))
        })
        .await;
    let reported = || {
        let state = fake.lock();
        let events = state
            .events
            .iter()
            .filter(|event| event["type"] == "Warning");
        events
            .map(|event| event["message"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    director.wait("the event", |_| !reported().is_empty()).await;
    // Now the daemon refuses the Service.
    let refused = [("shop/web".to_owned(), "its text is wrong".to_owned())];
    fake.put("services", &service("web", &Value::Null));
    director
        .wait("no refusal", |state| {
            state.kubernetes_view.left_out.is_empty()
        })
        .await;
    director.shared.lock().refused_by_daemon = refused.into();
    director
        .wait("the second event", |_| reported().len() == 2)
        .await;
    assert!(reported()[0].contains("lvsd/chek") && reported()[1] == "its text is wrong");
}

#[tokio::test]
async fn kubernetes_objects_are_listed_again_after_compaction() {
    let (fake, address) = fake().await;
    fake.put("services", &service("web", &Value::Null));
    let director = Followed::start(address, |_| {});
    director.wait_services(&["shop/web/tcp/80"]).await;
    let lists = fake.lock().lists;
    // A change that no watch reports, because the requested version has expired.
    fake.put("services", &service("mail", &Value::Null));
    let expired = json!({
        "type": "ERROR",
        "object": { "kind": "Status", "code": 410, "message": "too old resource version: 5 (9)" },
    });
    fake.lock()
        .lines
        .insert("services", vec![expired.to_string()]);
    fake.changed.notify_waiters();
    director
        .wait_services(&["shop/mail/tcp/80", "shop/web/tcp/80"])
        .await;
    assert!(fake.lock().lists >= lists + 3);
    assert_eq!(director.shared.lock().kubernetes.failures, 0);
}

#[tokio::test]
async fn unanswered_kubernetes_request_is_repeated_only_if_it_is_a_read() {
    // Each connection ends at its second request.
    let address = serving(|mut stream| async move {
        if request_of(&mut stream).await.is_some() {
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}";
            let _ = stream.write_all(answer).await;
            request_of(&mut stream).await;
        }
    });
    let mut settings = settings("192.0.2.0/24");
    settings.server = Endpoint::parse(&format!("http://{}", address.await), 443).unwrap();
    let mut client = Client::new(Arc::new(settings));
    for _ in 0..3 {
        client.get::<Value>("/x").await.unwrap();
    }
    // The server may have executed the write, so it is not repeated.
    let written = client.post("/x", &json!({})).await;
    assert!(
        matches!(written, Err(Error::Http(http::Error::Failed(_)))),
        "{written:?}"
    );
    client.get::<Value>("/x").await.unwrap();
}

#[tokio::test]
async fn kubernetes_write_after_closed_connection_is_sent_over_new_connection() {
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (closed, is_closed) = std::sync::mpsc::channel();
    // Each connection ends after its first answer.
    let server = std::thread::spawn(move || {
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            let mut byte = [0];
            while !request.ends_with(b"\r\n\r\n{}") {
                stream.read_exact(&mut byte).unwrap();
                request.extend(byte);
            }
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}";
            stream.write_all(answer).unwrap();
            drop(stream);
            closed.send(()).unwrap();
        }
    });
    let mut settings = settings("192.0.2.0/24");
    settings.server = Endpoint::parse(&format!("http://{address}"), 443).unwrap();
    let mut client = Client::new(Arc::new(settings));
    for _ in 0..2 {
        client.post("/x", &json!({})).await.unwrap();
        // This blocks the runtime, so that the client notices the closed connection only at the
        // next request.
        is_closed.recv().unwrap();
        tokio::task::yield_now().await;
    }
    server.join().unwrap();
}

#[tokio::test]
async fn replaced_service_account_token_is_read_again() {
    let (fake, address) = fake().await;
    fake.put("services", &service("web", &Value::Null));
    fake.lock().token = Some("second".to_owned());
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "first\n").unwrap();
    let path = file.path().to_owned();
    let director = Followed::start(address, |settings| settings.token = Some(Token::File(path)));
    director
        .wait("the refusal", |state| {
            let trouble = state.kubernetes.trouble.as_deref();
            trouble.is_some_and(|why| {
                why.contains("does not accept the credentials (401 Unauthorized)")
            })
        })
        .await;
    std::fs::write(file.path(), "second\n").unwrap();
    director
        .wait("a list", |state| state.gathered.kubernetes.is_some())
        .await;
    assert!(fake.lock().unauthorized > 0);
}

#[tokio::test]
async fn kubernetes_services_are_kept_after_watch_error() {
    let (fake, address) = fake().await;
    let mut web: Value = serde_json::from_str(&service("web", &Value::Null)).unwrap();
    web["status"] = json!({ "loadBalancer": { "ingress": [{ "ip": "192.0.2.11" }] } });
    fake.put("services", &web.to_string());
    let director = Followed::start(address, |_| {});
    director.wait_services(&["shop/web/tcp/80"]).await;
    let error = json!({ "type": "ERROR", "object": { "code": 500, "message": "etcdserver: leader changed" } });
    fake.lock().lines.insert("nodes", vec![error.to_string()]);
    fake.changed.notify_waiters();
    director
        .wait("the trouble", |state| state.kubernetes.failures > 0)
        .await;
    director.wait_services(&["shop/web/tcp/80"]).await;
}

#[tokio::test]
async fn second_director_acquires_kubernetes_lease_only_after_lease_has_ended() {
    let (fake, address) = fake().await;
    let first = Followed::start(address, |_| {});
    first
        .wait("the lease", |state| {
            state.kubernetes_view.leader.as_deref() == Some("d1")
        })
        .await;
    let second = Followed::start(address, |settings| settings.director = "d2".to_owned());
    second
        .wait("the lease of the other director", |state| {
            state.kubernetes_view.leader.as_deref() == Some("d1")
        })
        .await;
    fake.lock().lease.as_mut().unwrap()["spec"]["leaseDurationSeconds"] = 0.into();
    drop(first);
    second
        .wait("the lease", |state| {
            state.kubernetes_view.leader.as_deref() == Some("d2")
        })
        .await;
}

#[tokio::test]
async fn invalid_answer_of_kubernetes_api_server_is_an_error() {
    for (body, words) in [
        ("{}", "answers without a resourceVersion"),
        ("[", "an invalid"),
        (
            "{\"metadata\":{\"resourceVersion\":\"1\"},\"items\":3}",
            "an invalid",
        ),
        ("\u{0}\u{1b}[2J", "an invalid"),
    ] {
        let text = format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let server = crate::health::probe::hostile::replying(text.leak().as_bytes()).await;
        let director = Followed::start(server, |_| {});
        director
            .wait(words, |state| {
                let trouble = state.kubernetes.trouble.as_deref();
                trouble.is_some_and(|why| why.contains(words))
            })
            .await;
        assert_eq!(director.shared.lock().gathered.kubernetes, None);
    }
}

#[tokio::test]
async fn endless_kubernetes_list_is_an_error() {
    // A list without an end.
    let address = serving(|mut stream| async move {
        let body = "{\"metadata\":{\"resourceVersion\":\"1\",\"continue\":\"more\"},\"items\":[]}";
        let length = body.len();
        let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{body}");
        while request_of(&mut stream).await.is_some() {
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    let director = Followed::start(address.await, |_| {});
    director
        .wait("the fault", |state| {
            let trouble = state.kubernetes.trouble.as_deref();
            trouble.is_some_and(|why| why.contains("more than 2000 parts of a list"))
        })
        .await;
    assert_eq!(director.shared.lock().gathered.kubernetes, None);
}

#[tokio::test]
async fn kubernetes_source_omits_only_hostile_objects() {
    let (fake, address) = fake().await;
    fake.put("services", &service("web", &Value::Null));
    let mut many: Value = serde_json::from_str(&service("many", &Value::Null)).unwrap();
    many["spec"]["ports"] = (1..=20_000).map(|port| json!({ "port": port })).collect();
    fake.put("services", &many.to_string());
    let long = json!({ "lvsd/x": "x".repeat(256 << 10) });
    fake.put("services", &service("long", &long));
    fake.put("services", &service("a\u{1b}[2J\nb", &Value::Null));
    fake.put(
        "services",
        &service("ports", &Value::Null).replace("30080", "\"x\""),
    );
    fake.lock().lease = Some(json!({
        "metadata": { "resourceVersion": "1" },
        "spec": { "holderIdentity": "\u{1b}[2J".repeat(1000), "leaseDurationSeconds": 0 },
    }));
    let director = Followed::start(address, |_| {});
    director.wait_services(&["shop/web/tcp/80"]).await;
    director
        .wait("the refusals", |state| {
            let output = state.kubernetes_view.left_out.join("\n");
            let output = |words: &str| output.contains(words);
            state.kubernetes_view.refused == 4
                && output("Service shop/many: the Service has more than 256 ports")
                && output("Service shop/long: the annotations lvsd/... have 262150 bytes")
                && output("Service shop/a[2Jb: its name or namespace is not valid in Kubernetes")
                && output("Service shop/ports: invalid type: string")
        })
        .await;
    let state = director.shared.lock();
    let mut shown = state.kubernetes_view.left_out.iter();
    assert!(shown.all(|line| !line.contains(char::is_control)));
    let leader = state.kubernetes_view.leader.clone().unwrap_or_default();
    assert!(!leader.contains(char::is_control) && leader.len() <= 300);
}

#[test]
fn refused_ports_of_one_kubernetes_service_have_one_reason() {
    let refused = [
        ("shop/web/tcp/80", "x"),
        ("shop/web/udp/53", "y"),
        ("a/b/tcp/1", "z"),
    ];
    let refused = refused.map(|(key, why)| (key.to_owned(), why.to_owned()));
    let all = by_service(&refused.into());
    let wanted = [("a/b", "z"), ("shop/web", "x")];
    assert_eq!(
        all,
        wanted
            .map(|(key, why)| (key.to_owned(), why.to_owned()))
            .into()
    );
}

/// Answers of Kubernetes 1.34.4, recorded with curl.
const RECORDED: [(Kind, &str); 3] = [
    (Kind::Service, include_str!("recorded/services.json")),
    (
        Kind::EndpointSlice,
        include_str!("recorded/endpointslices.json"),
    ),
    (Kind::Node, include_str!("recorded/nodes.json")),
];

#[test]
fn recorded_kubernetes_lists_become_services() {
    let mut model = Model::default();
    for (kind, text) in RECORDED {
        let list: List = serde_json::from_str(text).unwrap();
        assert!(!list.metadata.resource_version.is_empty());
        for object in &list.items {
            model.put(kind, object.get()).unwrap();
        }
    }
    assert!(model.refused.is_empty(), "{:?}", model.refused);
    let settings = settings("192.0.2.0/24");
    let assigned = assign(&model, &settings);
    assert!(
        assigned.wanted.is_empty() && assigned.refused.is_empty(),
        "{assigned:?}"
    );
    let desired = desired(&model, &assigned, &settings).unwrap();
    let keys: Vec<&String> = desired.texts.keys().collect();
    assert_eq!(keys, ["default/web/tcp/80", "default/web/udp/53"]);
    assert_eq!(
        desired.texts["default/web/udp/53"],
        "[[service]]\nname = \"default/web/udp/53\"\naddress = \"192.0.2.10:53\"\nprotocol = \"udp\"\nscheduler = \"mh\"\n\
         check = { type = \"http\", port = 31000, path = \"/healthz\" }\npersistence = { timeout = \"10800s\" }\n\
         filter = { allow = [\"203.0.113.0/24\"] }\nservers = [\n  { address = \"10.0.0.1:30053\", weight = 2 },\n  \
         { address = \"10.0.0.2:30053\", weight = 0 },\n]\n"
    );
}

#[tokio::test]
async fn recorded_watch_with_change_deletion_and_expiry_is_applied() {
    let (fake, address) = fake().await;
    let director = Followed::start(address, |_| {});
    director.wait_services(&[]).await;
    let (change, deletion) = {
        let lines = include_str!("recorded/watch.jsonl").lines();
        let reported = |kind: &str| {
            let kind = format!("{{\"type\":\"{kind}\"");
            let line = lines.clone().find(|line| line.starts_with(&kind));
            vec![line.unwrap().to_owned()]
        };
        (reported("MODIFIED"), reported("DELETED"))
    };
    fake.lock().lines.insert("services", change);
    fake.changed.notify_waiters();
    director
        .wait("the wrong annotation", |state| {
            let mut lines = state.kubernetes_view.left_out.iter();
            lines.any(|line| line.contains("default/web: annotation lvsd/chek is unknown"))
        })
        .await;
    fake.lock().lines.insert("services", deletion);
    fake.changed.notify_waiters();
    director
        .wait("the deletion", |state| {
            state.kubernetes_view.left_out.is_empty()
        })
        .await;
    let lists = fake.lock().lists;
    let expired = include_str!("recorded/expired.jsonl").trim().to_owned();
    fake.lock().lines.insert("services", vec![expired]);
    fake.changed.notify_waiters();
    director
        .wait("another list", |_| fake.lock().lists >= lists + 3)
        .await;
    assert_eq!(director.shared.lock().kubernetes.failures, 0);
}

#[tokio::test]
async fn next_kubernetes_watch_begins_at_recorded_bookmark() {
    let (fake, address) = fake().await;
    let director = Followed::start(address, |_| {});
    director.wait_services(&[]).await;
    let watches = |version: &str| {
        let asked = format!(
            "/services?watch=1&allowWatchBookmarks=true&timeoutSeconds=300&resourceVersion={version} "
        );
        let state = fake.lock();
        state.watched.iter().any(|head| head.contains(&asked))
    };
    director
        .wait("the first watches", |_| fake.lock().watched.len() == 3)
        .await;
    let lists = fake.lock().lists;
    let bookmark = include_str!("recorded/bookmark.jsonl").trim().to_owned();
    let lines = vec![bookmark, END.to_owned()];
    fake.lock().lines.insert("services", lines);
    fake.changed.notify_waiters();
    director
        .wait("a watch from the bookmark on", |_| watches("4221"))
        .await;
    assert_eq!(fake.lock().lists, lists);
    assert_eq!(director.shared.lock().kubernetes.failures, 0);
}
