//! Requests of clients over connections in memory, and the OpenAPI description.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use lvs_api::daemon::{AdminDone, AdminSpec, DirectorStatus, MaintenanceSpec, Reloaded, Status};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::http::serve;
use super::overview::tests::snapshot;
use super::overview::{Detail, Overview};
use super::peer::Peer;
use super::*;
use crate::channels::{answer, channel};
use crate::token::Role;

/// An API for a fake daemon with one service; the receiver gets each requested change with its
/// actor.
fn api(name: &str) -> (Arc<Api>, mpsc::UnboundedReceiver<(ChangeRequest, String)>) {
    let (sender, mut requests) = channel();
    let (done, received) = mpsc::unbounded_channel();
    let api = Arc::new(Api::new(sender, &Events::default(), Arc::default()));
    api.settings.send_replace(config::Api {
        dashboard: true,
        allowed_hosts: vec!["x".to_owned()],
        ..config::Api::default()
    });
    let name = name.to_owned();
    tokio::spawn(async move {
        while let Some(request) = requests.recv().await {
            match request {
                Request::Snapshot(reply) => drop(reply.send(snapshot(&name))),
                Request::Change { change, who, reply } => {
                    let result = match change {
                        ChangeRequest::Admin(_) => answer(&AdminDone::default()),
                        _ => Err("the file is not valid".to_owned()),
                    };
                    let _ = done.send((change, who));
                    let _ = reply.send(result);
                }
            }
        }
    });
    (api, received)
}

/// Tokens with their names and roles.
fn tokens(all: &[(&str, &str, Role)]) -> Vec<(Named, Token)> {
    let named = |name: &str, role| Named {
        name: name.to_owned(),
        file: "/nowhere".into(),
        role,
    };
    let all = all.iter();
    all.map(|(name, secret, role)| (named(name, *role), Token::for_tests(secret)))
        .collect()
}

fn stranger() -> Peer {
    Peer::Tcp(SocketAddr::from(([198, 51, 100, 7], 40000)))
}

/// A connection of `peer`, in memory.
fn connect(api: &Arc<Api>, peer: Peer) -> (DuplexStream, tokio::task::JoinHandle<()>) {
    let (client, server) = tokio::io::duplex(4096);
    let api = Arc::clone(api);
    let task = tokio::spawn(async move {
        let _ = serve(server, api, peer).await;
    });
    (client, task)
}

/// Opens a connection of `peer` that has requested the events.
async fn stream(api: &Arc<Api>, peer: Peer) -> (DuplexStream, tokio::task::JoinHandle<()>) {
    let (mut client, task) = connect(api, peer);
    let written = client.write_all(STREAM.as_bytes()).await;
    written.expect("the request is written");
    (client, task)
}

/// Sends a request unchanged; returns the code, the header and the body of the answer.
async fn send(api: &Arc<Api>, peer: Peer, request: &str) -> (u16, String, String) {
    let (client, _task) = connect(api, peer);
    let (mut read, mut write) = tokio::io::split(client);
    // The request of a refused client may remain unread.
    let writing = async {
        let _ = write.write_all(request.as_bytes()).await;
    };
    let mut bytes = Vec::new();
    let reading = async {
        let _ = read.read_to_end(&mut bytes).await;
    };
    tokio::join!(writing, reading);
    let text = String::from_utf8(bytes).expect("the text is UTF-8");
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let code = head.get(9..12).and_then(|code| code.parse().ok());
    (code.unwrap_or(0), head.to_owned(), body.to_owned())
}

async fn get(api: &Arc<Api>, path: &str) -> (u16, String) {
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n");
    let (code, _, body) = send(api, stranger(), &request).await;
    (code, body)
}

async fn post(api: &Arc<Api>, path: &str, token: Option<&str>, body: &str) -> (u16, String) {
    let token = token.map(|token| format!("authorization: Bearer {token}\r\n"));
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\n{}content-length: {}\r\n\r\n{body}",
        token.unwrap_or_default(),
        body.len()
    );
    let (code, _, body) = send(api, stranger(), &request).await;
    (code, body)
}

#[tokio::test]
async fn api_request_with_foreign_host_header_is_refused_over_tcp_only() {
    let (api, mut received) = api("web");
    api.settings.send_modify(|settings| {
        settings.tokens = Vec::new();
    });
    let request = |method: &str, path: &str, host: &str| {
        format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: 0\r\n\r\n")
    };
    for path in [
        "/",
        "/metrics",
        "/v1/status",
        "/v1/openapi.json",
        "/nothing",
    ] {
        let (code, head, body) =
            send(&api, stranger(), &request("GET", path, "evil.example:9560")).await;
        assert_eq!(code, 421, "{path}: {head}");
        assert!(
            body.contains("`evil.example:9560`") && body.contains("allowed_hosts"),
            "{path}: {body}"
        );
    }
    let (code, ..) = send(
        &api,
        stranger(),
        &request("POST", "/v1/reload", "evil.example"),
    )
    .await;
    assert_eq!(code, 421);
    assert!(
        received.try_recv().is_err(),
        "the daemon received a request"
    );
    for host in ["198.51.100.1:9560", "[2001:db8::1]", "localhost", "x"] {
        let (code, ..) = send(&api, stranger(), &request("GET", "/v1/status", host)).await;
        assert_eq!(code, 200, "{host}");
    }
    let local = Peer::Local {
        who: "uid 0".to_owned(),
        denied: None,
    };
    let (code, ..) = send(&api, local, &request("GET", "/v1/status", "any.name")).await;
    assert_eq!(code, 200);
}

fn description() -> Value {
    serde_json::from_str(routes::OPENAPI).expect("the JSON is valid")
}

/// The differences of a value from a schema. Supports only the features of schemas that the
/// description uses.
fn differs(root: &Value, schema: &Value, value: &Value, at: &str) -> Vec<String> {
    if let Some(reference) = schema["$ref"].as_str() {
        let target = reference
            .strip_prefix('#')
            .and_then(|path| root.pointer(path));
        return differs(root, target.expect("a reference to a schema"), value, at);
    }
    if let Some(all) = schema["allOf"].as_array() {
        return all
            .iter()
            .flat_map(|one| differs(root, one, value, at))
            .collect();
    }
    if let Some(any) = schema["oneOf"].as_array() {
        let fits = any
            .iter()
            .filter(|one| differs(root, one, value, at).is_empty());
        return match fits.count() {
            1 => Vec::new(),
            n => vec![format!(
                "{at}: fits {n} of {} alternatives: {value}",
                any.len()
            )],
        };
    }
    if let Some(words) = schema["enum"].as_array() {
        return match words.contains(value) {
            true => Vec::new(),
            false => vec![format!("{at}: {value} is none of {words:?}")],
        };
    }
    let kind = schema["type"].as_str().expect("every schema has a type");
    let fits = match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "null" => value.is_null(),
        other => panic!("{at}: the schema has the unknown type {other}"),
    };
    if !fits {
        return vec![format!("{at}: {value} is not of type {kind}")];
    }
    let mut wrong = Vec::new();
    if let (Some(items), Some(values)) = (schema["prefixItems"].as_array(), value.as_array()) {
        for (n, (item, value)) in items.iter().zip(values).enumerate() {
            wrong.extend(differs(root, item, value, &format!("{at}[{n}]")));
        }
    } else if let Some(values) = value.as_array() {
        for (n, value) in values.iter().enumerate() {
            wrong.extend(differs(
                root,
                &schema["items"],
                value,
                &format!("{at}[{n}]"),
            ));
        }
    }
    if let Some(values) = value.as_object() {
        let known = schema["properties"].as_object();
        for required in schema["required"].as_array().into_iter().flatten() {
            if !values.contains_key(required.as_str().expect("a required field is a text")) {
                wrong.push(format!("{at}: {required} is missing"));
            }
        }
        for (name, value) in values {
            match known.and_then(|known| known.get(name)) {
                Some(schema) => {
                    wrong.extend(differs(root, schema, value, &format!("{at}.{name}")));
                }
                None if schema["additionalProperties"] == false => {
                    wrong.push(format!("{at}: {name} is not described"));
                }
                None => {}
            }
        }
    }
    wrong
}

/// Parses an example as its type, and serialises it again.
fn again<T: serde::Serialize + serde::de::DeserializeOwned>(value: &Value) -> Value {
    let read: T = serde_json::from_value(value.clone()).unwrap_or_else(|e| panic!("{e}: {value}"));
    serde_json::to_value(read).expect("the value can be written as JSON")
}

#[test]
fn openapi_examples_match_their_schemas_and_rust_types() {
    let root = description();
    let json = "/content/application~1json";
    for (path, operations) in root["paths"].as_object().expect("`paths` is an object") {
        for (method, operation) in operations
            .as_object()
            .expect("the operations of a path are an object")
        {
            for (part, place) in [("answer", "/responses/200"), ("request", "/requestBody")] {
                let Some(content) = operation.pointer(&format!("{place}{json}")) else {
                    assert_eq!((part, method.as_str()), ("request", "get"), "{path}");
                    continue;
                };
                let example = &content["example"];
                let wrong = differs(&root, &content["schema"], example, path);
                assert!(wrong.is_empty(), "{method} {path}: {wrong:#?}");
                let same = match (path.as_str(), part) {
                    ("/v1/status", _) => again::<Status>(example),
                    ("/v1/overview", _) => again::<Overview>(example),
                    ("/v1/services/{name}", _) => again::<Vec<Detail>>(example),
                    ("/v1/drops", _) => again::<Vec<lvs_core::api::ReasonCount>>(example),
                    ("/v1/events", _) => again::<routes::Past>(example),
                    ("/v1/history", _) => again::<history::Curves>(example),
                    ("/v1/whoami", _) => again::<routes::Whoami>(example),
                    ("/v1/admin", "request") => again::<AdminSpec>(example),
                    ("/v1/admin", _) => again::<AdminDone>(example),
                    ("/v1/maintenance", "request") => again::<MaintenanceSpec>(example),
                    ("/v1/maintenance", _) => again::<DirectorStatus>(example),
                    ("/v1/reload", "answer") => again::<Reloaded>(example),
                    ("/v1/reload" | "/v1/health", _) => example.clone(),
                    _ => panic!("the test has no type for {method} {path}"),
                };
                assert_eq!(&same, example, "{method} {path}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn answer_of_each_api_path_matches_openapi() {
    let (api, mut received) = api("web");
    *api.tokens() = tokens(&[("oncall", "0123456789abcdef", Role::Admin)]);
    api.past().push_back(Arc::new(Event {
        seq: 3,
        time_ms: 5,
        event: "server_down".to_owned(),
        code: "refused".to_owned(),
        service: Some("web".to_owned()),
        id: None,
        server: None,
        message: "refused".to_owned(),
    }));
    assert!(api.history().take(&snapshot("web"), 1000));
    let root = description();
    for (path, operations) in root["paths"].as_object().expect("`paths` is an object") {
        let path = path.replace("{name}", "web");
        for (method, operation) in operations
            .as_object()
            .expect("the operations of a path are an object")
        {
            let content = |place: &str| {
                let place = format!("{place}/content/application~1json");
                operation.pointer(&place).cloned().unwrap_or_default()
            };
            let (code, body) = match method.as_str() {
                "get" => get(&api, &path).await,
                _ => {
                    let example = content("/requestBody")["example"].to_string();
                    post(&api, &path, Some("0123456789abcdef"), &example).await
                }
            };
            let value: Value = serde_json::from_str(&body).expect("the JSON is valid");
            let schema = match code {
                200 => content("/responses/200")["schema"].clone(),
                409 => serde_json::json!({ "$ref": "#/components/schemas/Error" }),
                code => panic!("{method} {path}: {code} {body}"),
            };
            let wrong = differs(&root, &schema, &value, &path);
            assert!(wrong.is_empty(), "{method} {path}: {wrong:#?}");
        }
    }
    let (ask, who) = received.recv().await.expect("the request arrives");
    assert!(matches!(ask, ChangeRequest::Admin(_)) && who == "token oncall");
    // The API returns the same status as `lvsd status`.
    let (_, body) = get(&api, "/v1/status").await;
    let status: Status = serde_json::from_str(&body).expect("the JSON is valid");
    assert_eq!(status, snapshot("web").status);
}

#[tokio::test(start_paused = true)]
async fn change_over_api_requires_token_or_privileged_user_and_valid_body() {
    let (api, mut received) = api("web");
    let drain = r#"{"target":{"host":"10.0.0.1"},"state":"drain"}"#;
    let none = post(&api, "/v1/admin", Some("0123456789abcdef"), drain).await;
    assert!(
        none.0 == 403 && none.1.contains("[[api.token]]"),
        "{none:?}"
    );
    *api.tokens() = tokens(&[("oncall", "0123456789abcdef", Role::Admin)]);
    for (token, words) in [
        (None, "Authorization: Bearer"),
        (Some("0123456789abcdeF"), "the token differs"),
        (Some(""), "Authorization: Bearer"),
    ] {
        let (code, body) = post(&api, "/v1/admin", token, drain).await;
        assert!(
            code == 401 && body.contains(words),
            "{token:?}: no {words:?} in {code} {body}"
        );
    }
    let (_, body) = get(&api, "/v1/whoami").await;
    assert!(
        body.contains("\"may_change\":false,\"needs_token\":true"),
        "{body}"
    );
    assert!(received.try_recv().is_err());

    for wrong in [
        r#"{"target":{"host":"10.0.0.1"},"state":"drain","why":"a\u001bb"}"#,
        r#"[{"host":"10.0.0.1"},"drain"]"#,
        "[]",
        "",
    ] {
        let (code, body) = post(&api, "/v1/admin", Some("0123456789abcdef"), wrong).await;
        assert_eq!(code, 400, "{wrong}: {body}");
    }
    let (code, body) = post(&api, "/v1/reload", Some("0123456789abcdef"), "[true]").await;
    assert_eq!(code, 400, "{body}");

    // Over the Unix socket, the rights depend on the user.
    let local = |denied: Option<&str>| Peer::Local {
        who: "uid 0".to_owned(),
        denied: denied.map(str::to_owned),
    };
    let drain = r#"{"target":{"host":"10.0.0.1"},"state":"drain","who":"ann"}"#;
    let request = format!(
        "POST /v1/admin HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{drain}",
        drain.len()
    );
    let (code, _, body) = send(&api, local(Some("only root may")), &request).await;
    assert!(code == 403 && body.contains("only root may"), "{body}");
    let (code, ..) = send(&api, local(None), &request).await;
    assert_eq!(code, 200);
    let (change, actor) = received.recv().await.expect("the request arrives");
    assert_eq!(actor, "uid 0");
    let ChangeRequest::Admin(spec) = change else {
        panic!("the request is not about a server");
    };
    assert_eq!(spec.who.as_deref(), Some("uid 0 (ann)"));
}

#[tokio::test(start_paused = true)]
async fn api_accepts_only_changes_that_role_of_token_permits() {
    let (api, mut received) = api("web");
    *api.tokens() = tokens(&[
        ("wall", "wall-0123456789a", Role::Read),
        ("oncall", "oncall-0123456789", Role::Drain),
        ("root", "root-0123456789a", Role::Admin),
    ]);
    let drain = r#"{"target":{"host":"10.0.0.1"},"state":"drain","who":"ann"}"#;
    let maintenance = r#"{"on":true,"who":"ann"}"#;
    for [secret, path, code, words] in crate::cases::cases(
        r"
            wall-0123456789a | /v1/admin | 403 | token wall has the role read, this change needs the role drain
            wall-0123456789a | /v1/maintenance | 403 | token wall has the role read, this change needs the role admin
            wall-0123456789a | /v1/reload | 403 | token wall has the role read, this change needs the role admin
            oncall-0123456789 | /v1/admin | 200 | token oncall (ann)
            oncall-0123456789 | /v1/maintenance | 403 | token oncall has the role drain, this change needs the role admin
            oncall-0123456789 | /v1/reload | 403 | token oncall has the role drain, this change needs the role admin
            root-0123456789a | /v1/admin | 200 | token root (ann)
            root-0123456789a | /v1/maintenance | 409 | token root (ann)
            root-0123456789a | /v1/reload | 409 |
            root-0123456789b | /v1/admin | 401 | differs from all tokens
        ",
    ) {
        let body = match path {
            "/v1/admin" => drain,
            "/v1/maintenance" => maintenance,
            _ => "",
        };
        let (got, answer) = post(&api, path, Some(secret), body).await;
        assert_eq!(got.to_string(), code, "{secret} {path}: {answer}");
        let request = received.try_recv();
        if code == "403" || code == "401" {
            assert!(
                answer.contains(words) && request.is_err(),
                "{secret} {path}: {answer}"
            );
            continue;
        }
        let (change, actor) = request.expect("the daemon received the request");
        let signed = match change {
            ChangeRequest::Admin(spec) => spec.who,
            ChangeRequest::Maintenance(spec) => spec.who,
            ChangeRequest::Reload { .. } => None,
        };
        assert_eq!(signed.unwrap_or_default(), words, "{secret} {path}");
        assert!(
            secret.starts_with(actor.trim_start_matches("token ")),
            "{secret} {path}: {actor}"
        );
    }
    for (secret, rest) in [
        (
            "wall-0123456789a",
            r#""role":"read","may_change":false,"needs_token":true,"#,
        ),
        (
            "oncall-0123456789",
            r#""role":"drain","may_change":true,"needs_token":false}"#,
        ),
        (
            "root-0123456789a",
            r#""role":"admin","may_change":true,"needs_token":false}"#,
        ),
    ] {
        let request =
            format!("GET /v1/whoami HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {secret}\r\n\r\n");
        let (_, _, body) = send(&api, stranger(), &request).await;
        let name = secret.split_once('-').expect("the token has a name").0;
        let words = format!("{{\"who\":\"token {name}\",{rest}");
        assert!(
            body.starts_with(&words),
            "does not begin with {words:?}: {body}"
        );
    }
}

/// A reload replaces all tokens. A token whose file became unreadable stays valid with its new
/// role.
#[tokio::test(start_paused = true)]
async fn reload_replaces_tokens_and_keeps_token_whose_file_is_unreadable() {
    use std::os::unix::fs::PermissionsExt;
    let log = crate::daemon::tests::Log::default();
    let _listening = log.listen();
    let directory = tempfile::tempdir().expect("the temporary directory can be created");
    let (api, _deeds) = api("web");
    let named = |name: &str, role| Named {
        name: name.to_owned(),
        file: directory.path().join(name),
        role,
    };
    let write = |name: &str, secret: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, secret).expect("the file can be written");
        let owner = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(path, owner).expect("the permissions can be set");
    };
    let load = |tokens: Vec<Named>| {
        api.settings
            .send_modify(|settings| settings.tokens = tokens);
        api.read_tokens();
    };
    write("a", "first-0123456789");
    write("b", "second-0123456789");
    load(vec![named("a", Role::Admin), named("b", Role::Admin)]);
    let reload = async |secret| post(&api, "/v1/reload", Some(secret), "").await;
    assert_eq!(reload("first-0123456789").await.0, 409);
    assert_eq!(reload("second-0123456789").await.0, 409);

    write("a", "third-0123456789");
    std::fs::remove_file(directory.path().join("b")).expect("the file can be removed");
    write("d", "third-0123456789");
    load(vec![
        named("a", Role::Admin),
        named("b", Role::Drain),
        named("c", Role::Admin),
        named("d", Role::Read),
    ]);
    assert_eq!(reload("first-0123456789").await.0, 401);
    assert_eq!(reload("third-0123456789").await.0, 409);
    let (code, body) = reload("second-0123456789").await;
    assert!(
        code == 403 && body.contains("token b has the role drain"),
        "{body}"
    );
    let text = log.text();
    for words in [
        "token `b`: cannot read",
        "stays valid",
        "token `c`: cannot read",
        "token `d`: it is also the token of `a`",
        "no client can use it",
    ] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    load(vec![named("c", Role::Admin)]);
    let (code, body) = reload("third-0123456789").await;
    assert!(
        code == 403 && body.contains("no token of lvsd can be used"),
        "{body}"
    );
}

#[tokio::test(start_paused = true)]
async fn invalid_or_oversized_api_request_is_refused_and_counted() {
    let (api, _deeds) = api("web");
    *api.tokens() = tokens(&[("oncall", "0123456789abcdef", Role::Admin)]);
    let token = Some("0123456789abcdef");
    for (path, code, words) in [
        ("/v1/services/wbe", 404, "/v1/overview lists the services"),
        ("/v1/services/%ff", 400, "encodeURIComponent"),
        ("/v1/services/%4", 400, "encodeURIComponent"),
        ("/v1/services/", 404, "openapi"),
        ("/v1/history?service=wbe", 404, "/v1/overview"),
        ("/v1/events?after=x", 400, "after=0"),
        ("/../etc/passwd", 404, "openapi"),
        ("/v1/admin", 405, "only POST"),
        ("/nothing", 404, "openapi"),
    ] {
        let (got, body) = get(&api, path).await;
        assert!(got == code && body.contains(words), "{path}: {got} {body}");
    }
    for (path, body, code, words) in [
        ("/v1/admin", "{}", 400, "missing field"),
        ("/v1/admin", "not JSON", 400, "openapi"),
        ("/v1/reload", "{\"froce\":true}", 400, "froce"),
        ("/v1/overview", "", 405, "only GET"),
    ] {
        let (got, body) = post(&api, path, token, body).await;
        assert!(got == code && body.contains(words), "{path}: {got} {body}");
    }
    let long = "x".repeat(17 << 10);
    let (code, body) = post(&api, "/v1/admin", token, &long).await;
    assert!(
        code == 413 && body.contains("is incomplete, or longer than"),
        "{code} {body}"
    );
    let request = format!("GET /metrics HTTP/1.1\r\nhost: x\r\na: {long}\r\n\r\n");
    assert_eq!(send(&api, stranger(), &request).await.0, 431);
    let many = "a: b\r\n".repeat(100);
    let request = format!("GET /metrics HTTP/1.1\r\nhost: x\r\n{many}\r\n");
    assert_eq!(send(&api, stranger(), &request).await.0, 431);
    let counts = api.counters.get();
    assert!(
        counts.http[&404] >= 4 && counts.http[&405] == 2,
        "{counts:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn silent_or_unreading_api_client_is_disconnected_within_31_seconds() {
    let (api, _deeds) = api(&"long name ".repeat(2000));
    for request_text in [
        "",
        "GET /metrics HTTP/1.1\r\nhost:",
        "GET /v1/status HTTP/1.1\r\nhost: x\r\n\r\n",
    ] {
        let (mut client, task) = connect(&api, stranger());
        client
            .write_all(request_text.as_bytes())
            .await
            .expect("the request is written");
        let over = tokio::time::timeout(Duration::from_secs(31), task).await;
        assert!(over.is_ok(), "{request_text:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn dashboard_has_security_headers_loads_only_own_files_and_can_be_disabled() {
    let (api, _deeds) = api("web");
    let request = "GET / HTTP/1.1\r\nhost: x\r\n\r\n";
    let (code, head, body) = send(&api, stranger(), request).await;
    assert_eq!(code, 200);
    assert!(
        head.contains("content-security-policy: default-src 'none'; script-src 'self'; "),
        "no `content-security-policy: default-src 'none'; script-src 'self'; ` in {head}"
    );
    assert!(head.contains("x-content-type-options: nosniff"));
    // The page contains nothing that this policy refuses, and loads nothing from other servers.
    let lower = body.to_lowercase();
    for bad in [
        "<script>", " style=", " onclick", "<style", "http://", "https://",
    ] {
        assert!(!lower.contains(bad), "{bad}");
    }
    let names: BTreeSet<&str> = body
        .split('"')
        .filter(|word| word.ends_with(".js") || word.ends_with(".css"))
        .collect();
    for name in names {
        assert_eq!(get(&api, &format!("/{name}")).await.0, 200, "{name}");
    }
    api.settings
        .send_modify(|settings| settings.dashboard = false);
    assert_eq!(get(&api, "/").await.0, 404);
    assert_eq!(get(&api, "/metrics").await.0, 200);
}

/// Clients cannot keep the main loop busy over TCP or over the local socket.
#[tokio::test(start_paused = true)]
async fn status_queries_reach_the_main_loop_at_most_twice_a_second() {
    let (sender, mut requests) = channel();
    let api = Arc::new(Api::new(sender, &Events::default(), Arc::default()));
    let asked = tokio::spawn(async move {
        let mut looks = 0;
        while let Some(request) = requests.recv().await {
            match request {
                Request::Snapshot(reply) => {
                    looks += 1;
                    drop(reply.send(snapshot("web")));
                }
                Request::Change { .. } => panic!("a change was requested"),
            }
        }
        looks
    });
    let first = api.status().await.expect("lvsd returns its status");
    for _ in 0..1000 {
        assert_eq!(api.status().await.expect("lvsd returns its status"), first);
    }
    tokio::time::sleep(FRESH).await;
    assert_eq!(api.status().await.expect("lvsd returns its status"), first);
    drop(api);
    assert_eq!(asked.await.expect("the task ends without a panic"), 2);
}

/// Clients with wrong tokens cannot fill the log.
#[tokio::test(start_paused = true)]
async fn requests_with_wrong_tokens_are_logged_once_a_minute_with_their_number() {
    let log = crate::daemon::tests::Log::default();
    let _listening = log.listen();
    let (api, _) = api("web");
    *api.tokens() = tokens(&[("oncall", "0123456789abcdef", Role::Admin)]);
    for _ in 0..100 {
        let (code, _) = post(&api, "/v1/reload", Some("wrong"), "").await;
        assert_eq!(code, 401);
    }
    assert_eq!(log.text().matches("wrong token").count(), 1);
    tokio::time::sleep(WRONG_TOKENS).await;
    post(&api, "/v1/reload", Some("wrong"), "").await;
    let text = log.text();
    assert!(
        text.contains("99 other requests since the last such message"),
        "no `99 other requests since the last such message` in {text}"
    );
    assert_eq!(text.matches("wrong token").count(), 2);
}

/// Requests the metrics in the text format of Prometheus.
async fn metrics(api: &Arc<Api>) -> String {
    let (code, text) = get(api, "/metrics").await;
    assert_eq!(code, 200);
    text
}

#[tokio::test(start_paused = true)]
async fn answers_for_single_clients_are_refused_and_counted_when_slow_readers_use_all_memory() {
    let (api, _deeds) = api("web");
    let held = api
        .own
        .hold(vec![0; pages::OWN_MAX])
        .expect("no other answer is stored");
    for path in ["/v1/events", "/v1/services/web"] {
        let (code, body) = get(&api, path).await;
        assert!(
            code == 503 && body.contains("slow clients"),
            "{path}: {code} {body}"
        );
    }
    // A page that clients share is not limited.
    assert_eq!(get(&api, "/v1/overview").await.0, 200);
    let text = metrics(&api).await;
    assert!(
        text.contains("lvs_http_requests_total{code=\"503\"} 2\n"),
        "{text}"
    );
    drop(held);
    assert_eq!(get(&api, "/v1/events").await.0, 200);
}

fn event(message: &str) -> Arc<Event> {
    Arc::new(Event {
        seq: 1,
        time_ms: 5,
        event: "drift".to_owned(),
        code: String::new(),
        service: None,
        id: None,
        server: None,
        message: message.to_owned(),
    })
}

const STREAM: &str = "GET /v1/events HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\n\r\n";

/// Reads until `wanted` has been received.
async fn read_to(client: &mut DuplexStream, wanted: &str) -> String {
    let mut text = String::new();
    while !text.contains(wanted) {
        let mut bytes = [0; 1024];
        let len = client
            .read(&mut bytes)
            .await
            .expect("the stream is readable");
        assert!(len > 0, "the stream has ended: {text}");
        text.push_str(std::str::from_utf8(&bytes[..len]).expect("the text is UTF-8"));
    }
    text
}

#[tokio::test(start_paused = true)]
async fn event_stream_sends_new_events_and_heartbeats_until_client_disconnects() {
    let (api, _deeds) = api("web");
    let (mut client, task) = stream(&api, stranger()).await;
    let head = read_to(&mut client, "\r\n\r\n").await;
    assert!(
        head.contains("content-type: text/event-stream"),
        "no `content-type: text/event-stream` in {head}"
    );
    let reported =
        serde_json::to_string(&*event("two\nlines")).expect("the value can be written as JSON");
    api.events
        .send(event("two\nlines"))
        .expect("the event has a receiver");
    read_to(&mut client, &format!("data: {reported}\n\n")).await;
    // Longer than any other answer is permitted to take.
    for _ in 0..100 {
        read_to(&mut client, ":\n\n").await;
    }
    api.events
        .send(event("late"))
        .expect("the event has a receiver");
    read_to(&mut client, "\"late\"").await;
    drop(client);
    task.await.expect("the connection closes with the client");
    while api.events.receiver_count() > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn event_stream_to_client_that_does_not_read_is_closed_within_90_seconds() {
    let (api, _deeds) = api("web");
    for peer in [
        stranger(),
        Peer::Local {
            who: "uid 0".to_owned(),
            denied: None,
        },
    ] {
        let (mut client, mut task) = stream(&api, peer).await;
        read_to(&mut client, "\r\n\r\n").await;
        let long = "x".repeat(4096);
        let sending = async {
            loop {
                let _ = api.events.send(event(&long));
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        tokio::select! {
            ended = &mut task => ended.expect("the thread ends without a panic"),
            () = sending => unreachable!("the endless loop has ended"),
            () = tokio::time::sleep(Duration::from_secs(90)) => panic!("the stream was not closed"),
        }
        drop(client);
    }
}

#[tokio::test(start_paused = true)]
async fn event_stream_above_limit_of_source_is_refused_until_a_stream_closes() {
    let (api, _deeds) = api("web");
    let mut held = Vec::new();
    for _ in 0..places::STREAMS_MAX {
        let (mut client, task) = stream(&api, stranger()).await;
        let head = read_to(&mut client, "\r\n\r\n").await;
        assert!(
            head.starts_with("HTTP/1.1 200 "),
            "does not begin with `HTTP/1.1 200 `: {head}"
        );
        held.push((client, task));
    }
    let (code, _, body) = send(&api, stranger(), STREAM).await;
    assert!(code == 503 && body.contains("close some"), "{code} {body}");
    let after = STREAM.replace("/events", "/events?after=3");
    let (code, _, body) = send(&api, stranger(), &after).await;
    assert!(code == 400 && body.contains("`after`"), "{code} {body}");
    assert_eq!(get(&api, "/v1/events").await.0, 200);
    for (client, task) in held {
        drop(client);
        task.await.expect("the task ends without a panic");
    }
    while api.events.receiver_count() > 0 {
        tokio::task::yield_now().await;
    }
    let (mut client, _task) = stream(&api, stranger()).await;
    let head = read_to(&mut client, "\r\n\r\n").await;
    assert!(
        head.starts_with("HTTP/1.1 200 "),
        "does not begin with `HTTP/1.1 200 `: {head}"
    );
}

#[tokio::test]
async fn api_connection_above_limit_of_source_is_refused_and_counted() {
    let (api, _deeds) = api("web");
    let listener =
        http::bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("the socket can be opened");
    let address = listener.local_addr().expect("the listener has an address");
    let accepting = {
        let api = Arc::clone(&api);
        tokio::spawn(async move { http::accept(listener, &api).await })
    };
    // The connections are accepted in this order, one after the other.
    let mut held = Vec::new();
    for _ in 0..places::SOURCE_MAX {
        let stream = tokio::net::TcpStream::connect(address).await;
        held.push(stream.expect("the connection is accepted"));
    }
    let mut refused = String::new();
    let mut last = tokio::net::TcpStream::connect(address)
        .await
        .expect("the connection is accepted");
    last.read_to_string(&mut refused)
        .await
        .expect("the text can be read");
    assert!(
        refused.starts_with("HTTP/1.1 503 ") && refused.contains("close some"),
        "{refused}"
    );
    assert_eq!(api.counters.get().http_no_place, 1);
    let text = metrics(&api).await;
    assert!(
        text.contains("lvs_http_refused_connections_total 1\n"),
        "{text}"
    );
    accepting.abort();
}

/// lvsd stores the last 1,000 events of all kinds. A reader that is more than 4,096 events late
/// misses events.
#[tokio::test]
async fn event_log_keeps_the_last_1000_events_and_slow_reader_loses_events() {
    let (api, _deeds) = api("web");
    let mut events = Events::default();
    let mut slow = events.listen();
    let keeps = tokio::spawn(remember(Arc::clone(&api), events.listen()));
    for n in 0..EVENTS_MAX + 500 {
        events.send("drift", Default::default(), n.to_string());
        if n % 100 == 0 {
            tokio::task::yield_now().await;
        }
    }
    while api.past().back().map(|event| event.seq) != Some(1500) {
        tokio::task::yield_now().await;
    }
    let kept: Vec<u64> = api.past().iter().map(|event| event.seq).collect();
    assert_eq!(kept, (501..=1500).collect::<Vec<u64>>());
    for n in 0..5000 {
        events.send("drift", Default::default(), n.to_string());
    }
    let missed = slow.recv().await;
    assert!(
        matches!(missed, Err(broadcast::error::RecvError::Lagged(2404))),
        "{missed:?}"
    );
    drop(events);
    keeps.await.expect("the stream closes with the connections");
    assert_eq!(api.past().len(), EVENTS_MAX);
}
