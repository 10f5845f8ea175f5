//! Fuzzes the parsers of operators' text and of control socket messages.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use lvs_api::Address;
use lvs_core::api::Call;
use lvs_core::ipvsadm::{self, Numeric};
use lvs_core::mark;
use lvs_process::server::Handle;
use lvsd::convert::{Options, SourceFormat, convert};

use crate::conformance::MemoryDataplane;

/// A dataplane in memory that answers calls; it needs no privileges.
static DATAPLANE: LazyLock<(Arc<MemoryDataplane>, Handle, SocketAddr)> = LazyLock::new(|| {
    // A panic in a thread of the control socket must end the fuzzer.
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        usual(info);
        let thread = std::thread::current().name().map(str::to_owned);
        if thread.is_some_and(|name| name.starts_with("control-")) {
            std::process::abort();
        }
    }));
    let name = format!("lvs-fuzz-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).expect("the name is short enough");
    let dataplane = MemoryDataplane::new(lvs_core::Options {
        max_connections: 64,
        ..lvs_core::Options::default()
    });
    let dataplane = dataplane.expect("a dataplane without a network starts");
    let serving = dataplane.serve(&Address::Abstract(name.into()));
    (dataplane, serving.expect("the name is not in use"), address)
});

/// If the first byte of the input is this or above, the rest is a file to convert.
const CONVERSION: u8 = 250;

/// Passes the bytes to the parser that the first byte selects: `ipvsadm-save` rules, mark rules, a
/// configuration of `lvsd`, lines on the control socket, or another program's file to convert. No
/// parser may panic, and the dataplane must answer afterwards.
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
    let dataplane = &DATAPLANE.0;
    for (_, words) in ipvsadm::rules(text) {
        // Each refusal has a text.
        match ipvsadm::parse("ipvsadm", &words, &Numeric) {
            Ok(command) => {
                if let Some(call) = command.call() {
                    let json =
                        serde_json::to_string(&call).expect("the call can be written as JSON");
                    let read: Call =
                        serde_json::from_str(&json).expect("the written call cannot be read");
                    assert_eq!(read, call);
                    if let Err(failure) = dataplane.ask(call) {
                        assert!(!ipvsadm::failure_text(&command, &failure).is_empty());
                    }
                }
            }
            Err(refusal) => {
                assert!(
                    refusal.status() != 0,
                    "the exit status of a refusal is 0: {refusal:?}"
                );
                let _ = refusal.text();
            }
        }
    }
    clean();
}

fn clean() {
    for call in [
        Call::ServiceFlush {},
        Call::MarkSet { rules: Vec::new() },
        Call::Info {},
    ] {
        DATAPLANE
            .0
            .ask(call)
            .expect("the dataplane no longer answers");
    }
}

fn marks(text: &str) {
    match mark::parse_rules(text) {
        Ok(rules) => {
            for rule in &rules {
                // The shown rule parses to the same rule.
                let shown = rule.to_string();
                let words: Vec<&str> = shown.split_ascii_whitespace().collect();
                let again = mark::MarkRule::parse(&words);
                assert_eq!(
                    again.as_ref(),
                    Ok(rule),
                    "the shown rule `{shown}` does not parse to the same rule"
                );
            }
            let rules = rules.iter().map(ToString::to_string).collect();
            let _ = DATAPLANE.0.ask(Call::MarkSet { rules });
            clean();
        }
        Err((line, error)) => {
            assert!(
                line >= 1 && line <= text.lines().count().max(1),
                "the file has no line {line}, which the error names: {error}"
            );
            assert!(!error.is_empty());
        }
    }
}

fn configuration(text: &str) {
    match lvsd::config::Config::from_toml("fuzz.toml", text) {
        Ok((config, _)) => {
            let _ = config.dataplane.arguments();
            let expanded = lvsd::expand::expand(&config, &lvsd::sources::Gathered::default());
            let _ = expanded.own_vips(|_| false);
        }
        Err(report) => assert!(!report.to_string().is_empty()),
    }
}

/// Checks that the converted file is TOML, and that `lvsd` reads it without a panic.
fn conversion(kind: u8, text: &str) {
    let kind = match kind % 3 {
        0 => SourceFormat::Keepalived,
        1 => SourceFormat::Ldirectord,
        _ => SourceFormat::LvsConf,
    };
    let options = Options {
        include: &|_, _| Err("no such file".to_owned()),
        config_id: None,
    };
    match convert(kind, "some.conf", text, &options) {
        Ok(done) => {
            let parsed: Result<toml::Table, _> = toml::from_str(&done.toml);
            assert!(
                parsed.is_ok(),
                "the converted file is not TOML: {}",
                done.toml
            );
            configuration(&done.toml);
        }
        Err(why) => assert!(!why.is_empty()),
    }
}

fn control(bytes: &[u8]) {
    let mut stream = UnixStream::connect_addr(&DATAPLANE.2).expect("the dataplane listens");
    for timeout in [
        stream.set_read_timeout(Some(Duration::from_secs(20))),
        stream.set_write_timeout(Some(Duration::from_secs(20))),
    ] {
        timeout.expect("a timeout can be set");
    }
    // Without the greeting, the dataplane would refuse the first line, and not parse the rest.
    let greeting = b"{\"id\":1,\"method\":\"hello\",\"params\":{\"version\":1}}\n";
    // The dataplane may close the connection before an invalid request is written completely.
    let _ = stream.write_all(greeting);
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let mut answers = Vec::new();
    match stream.read_to_end(&mut answers) {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(error) => panic!("the last answer is missing: {error}"),
    }
    for line in answers.split_inclusive(|byte| *byte == b'\n') {
        let answer: serde_json::Value = serde_json::from_slice(line).expect("the answer is JSON");
        let answered = ["result", "error", "item"]
            .iter()
            .any(|key| answer.get(key).is_some());
        assert!(answered, "the line is not an answer: {answer}");
    }
    clean();
}
