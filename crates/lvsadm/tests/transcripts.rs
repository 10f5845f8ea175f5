//! Sessions of the real ipvsadm with the real kernel, replayed to the byte: the whole program, the control socket and a
//! model of the kernel's rules. Sessions that send packets are followed until the first one.

mod model;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::Arc;
use std::thread;

use flate2::read::GzDecoder;
use lvs_dataplane::control::server::{Access, Handle, Server};
use lvs_dataplane::control::{Address, Client};
use lvs_dataplane::names::Names;
use lvsadm::{Streams, run};
use serde::Deserialize;

/// Gzipped, one session a line: designed ones, and one of random command lines.
const SESSIONS: [&[u8]; 2] = [
    include_bytes!("../../lvs-core/tests/golden/ipvsadm/sessions.jsonl.gz"),
    include_bytes!("../../lvs-core/tests/golden/ipvsadm/random.jsonl.gz"),
];

/// What of /etc/services the sessions use (netbase 6.4).
const SERVICES: &str = "\
ftp 21/tcp
fsp 21/udp fspd
ssh 22/tcp
smtp 25/tcp mail
domain 53/tcp
domain 53/udp
http 80/tcp www
tftp 69/udp
snmp 161/tcp
snmp 161/udp
https 443/tcp
https 443/udp
mysql 3306/tcp
sip 5060/tcp
sip 5060/udp
http-alt 8080/tcp webcache
";

#[derive(Deserialize)]
struct Session {
    name: String,
    kernel: String,
    hosts: String,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    argv: Option<Vec<String>>,
    #[serde(default)]
    stdin: String,
    uid: Option<u32>,
    #[serde(default)]
    stdout: String,
    #[serde(default)]
    stderr: String,
    #[serde(default)]
    exit: i32,
    unordered: Option<serde_json::Value>,
    packets: Option<serde_json::Value>,
    #[serde(default)]
    reset: Vec<String>,
}

struct Ran {
    stdout: String,
    stderr: String,
    exit: i32,
}

fn invoke(argv: &[String], stdin: &str, hosts: &str, address: &Address) -> Ran {
    let argv: Vec<Vec<u8>> = argv.iter().map(|word| word.clone().into_bytes()).collect();
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let status = run(
        &argv,
        address.clone(),
        &mut |address| Client::connect(address).map_err(|error| error.to_string()),
        &|| Names::from_texts(hosts, SERVICES),
        &mut Streams {
            input: &mut stdin.as_bytes(),
            output: &mut stdout,
            errors: &mut stderr,
        },
    );
    Ran {
        stdout: String::from_utf8_lossy(&stdout).into_owned(),
        stderr: String::from_utf8_lossy(&stderr).into_owned(),
        exit: i32::from(status),
    }
}

fn start(address: &Address, kernel: &str) -> Handle {
    Server::bind(address, Access::default())
        .expect("the socket is free")
        .serve(Arc::new(model::Model::new(kernel)))
        .expect("a thread")
}

/// A listing as an unordered collection of services, each with its servers in order.
fn blocks(text: &str) -> Vec<String> {
    let mut blocks: Vec<String> = Vec::new();
    for line in text.lines() {
        match blocks.last_mut() {
            Some(block) if line.starts_with("  ->") || line.starts_with("-a ") => {
                block.push('\n');
                block.push_str(line);
            }
            _ => blocks.push(line.to_owned()),
        }
    }
    blocks.sort();
    blocks
}

/// Listens and lets nobody change anything.
fn readers_only(address: &str) -> Address {
    let name = SocketAddr::from_abstract_name(address).expect("a name");
    let listener = UnixListener::bind_addr(&name).expect("the socket is free");
    thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let mut line = String::new();
            let _ = BufReader::new(&stream).read_line(&mut line);
            let _ = stream.write_all(
                b"{\"id\":1,\"result\":{\"version\":1,\"engine\":\"x\",\"table_size\":1,\"writable\":false}}\n",
            );
        }
    });
    Address::Abstract(address.into())
}

#[test]
fn recorded_sessions() {
    let mut text = String::new();
    for recording in SESSIONS {
        GzDecoder::new(recording)
            .read_to_string(&mut text)
            .expect("the recordings are whole");
    }
    let pid = std::process::id();
    let others = readers_only(&format!("lvs-test-readers-{pid}"));
    let (mut passed, mut after_packets) = (0, 0);
    let mut failures = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let session: Session = serde_json::from_str(line).expect("a recorded session");
        let address = Address::new(format!("@lvs-test-transcripts-{pid}-{number}"));
        let _engine = start(&address, &session.kernel);
        let mut packets = false;
        for (i, step) in session.steps.iter().enumerate() {
            packets |= step.packets.is_some();
            for line in &step.reset {
                let argv: Vec<String> = ["ipvsadm"]
                    .into_iter()
                    .chain(line.split_whitespace())
                    .map(str::to_owned)
                    .collect();
                invoke(&argv, "", &session.hosts, &address);
            }
            let Some(argv) = &step.argv else {
                continue;
            };
            if packets {
                after_packets += 1;
                continue;
            }
            let address = if step.uid.is_some() {
                &others
            } else {
                &address
            };
            let ran = invoke(argv, &step.stdin, &session.hosts, address);
            let good = if step.exit < 0 {
                // ipvsadm crashed; refusing the line is right.
                ran.exit == 2 && ran.stdout == step.stdout
            } else {
                let same = if step.unordered.is_some() {
                    blocks(&ran.stdout) == blocks(&step.stdout)
                } else {
                    ran.stdout == step.stdout
                };
                same && ran.stderr == step.stderr && ran.exit == step.exit
            };
            if good {
                passed += 1;
            } else {
                failures.push(format!(
                    "{} step {i}: {argv:?} stdin {:?}\n  expected {} {:?} {:?}\n  got      {} {:?} {:?}",
                    session.name,
                    step.stdin,
                    step.exit,
                    step.stdout,
                    step.stderr,
                    ran.exit,
                    ran.stdout,
                    ran.stderr
                ));
            }
        }
    }
    println!(
        "{passed} passed, {} failed, {after_packets} after packets",
        failures.len()
    );
    assert!(
        failures.is_empty(),
        "{} of {} steps differ:\n{}",
        failures.len(),
        failures.len() + passed,
        failures
            .iter()
            .take(10)
            .cloned()
            .collect::<Vec<_>>()
            .join("\n")
    );
    assert!(
        passed > 9000,
        "the recordings hold more than {passed} steps"
    );
}
