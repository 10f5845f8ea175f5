//! Text from operators and bytes from clients of the control socket.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::LazyLock;
use std::time::Duration;

use lvs_core::api::Call;
use lvs_core::ipvsadm::{self, Numeric};
use lvs_core::mark;
use lvs_dataplane::control::Address;
use lvs_dataplane::engine::{Config, Engine};
use lvsd::convert::{Kind, convert};

/// The engine that takes the calls: without interfaces, so that it needs no privileges.
static ENGINE: LazyLock<(Engine, SocketAddr)> = LazyLock::new(|| {
    // A thread of the engine that panics must not go unnoticed.
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        usual(info);
        let worker = std::thread::current().name().map(str::to_owned);
        if worker.is_some_and(|name| name.starts_with("lvs-") || name.starts_with("control-")) {
            std::process::abort();
        }
    }));
    let name = format!("lvs-fuzz-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).expect("a short name");
    let engine = Engine::start(Config {
        address: Some(Address::Abstract(name.into())),
        no_interfaces: true,
        max_connections: Some(64),
        ..Config::default()
    });
    (engine.expect("an engine without interfaces"), address)
});

/// From this first byte on, other programs' files are converted.
const CONVERSION: u8 = 250;

/// The first byte says what the rest is: rules in the form of `ipvsadm-save`, rules for marks, a
/// configuration of `lvsd`, lines on the control socket, or a file of another program's that is
/// converted. None of it may panic, and the engine must answer afterwards.
pub fn rules(bytes: &[u8]) {
    let (&kind, text) = bytes.split_first().unwrap_or((&0, &[]));
    if kind >= CONVERSION {
        return conversion(kind, &String::from_utf8_lossy(text));
    }
    match kind % 4 {
        0 => commands(text),
        1 => marks(&String::from_utf8_lossy(text)),
        2 => configuration(&String::from_utf8_lossy(text)),
        _ => control(text),
    }
}

fn commands(text: &[u8]) {
    let engine = &ENGINE.0;
    for (_, words) in ipvsadm::rules(text) {
        // What is refused is refused with a text.
        match ipvsadm::parse("ipvsadm", &words, &Numeric) {
            Ok(command) => {
                if let Some(call) = command.call() {
                    let json = serde_json::to_string(&call).expect("calls can be written");
                    let read: Call = serde_json::from_str(&json).expect("and read again");
                    assert_eq!(read, call);
                    if let Err(failure) = engine.call(call) {
                        assert!(!ipvsadm::failure_text(&command, &failure).is_empty());
                    }
                }
            }
            Err(refusal) => {
                assert!(refusal.status() != 0, "{refusal:?}");
                let _ = refusal.text();
            }
        }
    }
    clean();
}

fn clean() {
    let engine = &ENGINE.0;
    for call in [
        Call::ServiceFlush {},
        Call::MarkSet { rules: Vec::new() },
        Call::Info {},
    ] {
        engine.call(call).expect("the engine is well");
    }
}

fn marks(text: &str) {
    match mark::parse_rules(text) {
        Ok(rules) => {
            for rule in &rules {
                // What is shown is what was meant.
                let shown = rule.to_string();
                let words: Vec<&str> = shown.split_ascii_whitespace().collect();
                let again = mark::MarkRule::parse(&words);
                assert_eq!(again.as_ref(), Ok(rule), "{shown}");
            }
            let rules = rules.iter().map(ToString::to_string).collect();
            let _ = ENGINE.0.call(Call::MarkSet { rules });
            clean();
        }
        Err((line, error)) => {
            assert!(
                line >= 1 && line <= text.lines().count().max(1),
                "{line}: {error}"
            );
            assert!(!error.is_empty());
        }
    }
}

fn configuration(text: &str) {
    match lvsd::config::Config::from_toml("fuzz.toml", text) {
        Ok((config, _)) => {
            let _ = config.dataplane.arguments();
            let _ = config.own_vips(|_| false);
        }
        Err(report) => assert!(!report.to_string().is_empty()),
    }
}

/// What comes of another program's file is TOML, with as many services as `lvsd` can read.
fn conversion(kind: u8, text: &str) {
    let kind = match kind % 3 {
        0 => Kind::Keepalived,
        1 => Kind::Ldirectord,
        _ => Kind::LvsConf,
    };
    match convert(kind, "some.conf", text, &|_| Vec::new()) {
        Ok(done) => {
            let parsed: Result<toml::Table, _> = toml::from_str(&done.toml);
            assert!(parsed.is_ok(), "{}", done.toml);
            configuration(&done.toml);
        }
        Err(why) => assert!(!why.is_empty()),
    }
}

fn control(bytes: &[u8]) {
    let mut stream = UnixStream::connect_addr(&ENGINE.1).expect("the engine listens");
    for timeout in [
        stream.set_read_timeout(Some(Duration::from_secs(20))),
        stream.set_write_timeout(Some(Duration::from_secs(20))),
    ] {
        timeout.expect("a timeout can be set");
    }
    // The greeting, so that more than the first line is reached.
    let greeting = b"{\"id\":1,\"method\":\"hello\",\"params\":{\"version\":1}}\n";
    // The engine may hang up on nonsense before it is all written.
    let _ = stream.write_all(greeting);
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let mut answers = Vec::new();
    match stream.read_to_end(&mut answers) {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(error) => panic!("no end of the answers: {error}"),
    }
    for line in answers.split_inclusive(|byte| *byte == b'\n') {
        let answer: serde_json::Value = serde_json::from_slice(line).expect("answers are JSON");
        let told = ["result", "error", "item"]
            .iter()
            .any(|key| answer.get(key).is_some());
        assert!(told, "{answer}");
    }
    clean();
}
