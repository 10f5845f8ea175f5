//! Listings that ipvsadm printed while connections existed: each line is parsed and formatted
//! again.

use std::io::Read;
use std::net::SocketAddr;

use flate2::read::GzDecoder;
use lvs_api::names::Names;
use lvs_core::api::{ConnInfo, ServerInfo, ServiceId, ServiceInfo};
use lvs_core::ipvsadm::{Format, ListOptions, Resolve, render};
use lvs_core::stats::{Counts, Stats};
use lvs_core::{Family, Forwarding, Protocol, ServerConfig, ServiceConfig};
use serde_json::Value;

const SESSIONS: &[u8] = include_bytes!("../../../lvs-testbed/golden/ipvsadm/sessions.jsonl.gz");
const SERVICES: &str = "\
ftp 21/tcp\nsmtp 25/tcp\ndomain 53/tcp\ndomain 53/udp\nhttp 80/tcp\nhttps 443/tcp\nhttps 443/udp
mysql 3306/tcp\nsip 5060/tcp\nsip 5060/udp\nhttp-alt 8080/tcp\n";

/// Passes each recorded listing whose title contains `word` to `each`.
fn listings(word: &str, mut each: impl FnMut(&str)) {
    let mut text = String::new();
    GzDecoder::new(SESSIONS)
        .read_to_string(&mut text)
        .expect("the recordings are whole");
    for line in text.lines() {
        let session: Value = serde_json::from_str(line).expect("the JSON is valid");
        for step in session["steps"].as_array().expect("`steps` is a list") {
            let Some(stdout) = step["stdout"].as_str() else {
                continue;
            };
            if stdout.lines().take(2).any(|title| title.contains(word)) {
                each(stdout);
            }
        }
    }
}

fn endpoint(text: &str, protocol: Protocol, names: &Names) -> Option<SocketAddr> {
    let (host, port) = text.rsplit_once(':')?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let port = port.parse().ok().or_else(|| names.port(port, protocol))?;
    Some(SocketAddr::new(host.parse().ok()?, port))
}

#[test]
fn connections_are_listed_as_by_ipvsadm() {
    let names = Names::from_texts("", SERVICES);
    let (mut lines, mut with_data) = (0, 0);
    listings("pro expire", |text| {
        let persistent_conn = text.contains("pe_data");
        let mut titles = String::new();
        render::conn_titles(&mut titles, persistent_conn);
        assert!(
            text.starts_with(&titles),
            "does not begin with {titles:?}: {text}"
        );
        for line in text.lines().skip(2) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let protocol = match words[0] {
                "TCP" => Protocol::TCP,
                "UDP" => Protocol::UDP,
                "SCTP" => Protocol::SCTP,
                _ => Protocol(0),
            };
            let (minutes, seconds) = words[1]
                .split_once(':')
                .expect("the time has minutes and seconds");
            let number = |text: &str| text.parse::<u64>().expect("the text is a number");
            let [client, virt, server] = [3, 4, 5]
                .map(|i| endpoint(words[i], protocol, &names).expect("the address is valid"));
            let conn = ConnInfo {
                protocol: protocol.0,
                client,
                virt,
                server,
                state: words[2].into(),
                expires_ms: (number(minutes) * 60 + number(seconds)) * 1000 + 999,
                forwarding: Forwarding::Nat,
                template: false,
                synced: false,
                engine: words
                    .get(6)
                    .map(|name| ((*name).into(), words[7].as_bytes().to_vec())),
            };
            let options = ListOptions {
                persistent_conn,
                numeric: words[3..6].iter().all(|word| {
                    word.rsplit_once(':')
                        .is_some_and(|(_, port)| port.parse::<u16>().is_ok())
                }),
                ..ListOptions::default()
            };
            let mut out = String::new();
            render::conn(&mut out, &conn, &options, &names);
            assert_eq!(out, format!("{line}\n"));
            lines += 1;
            with_data += usize::from(conn.engine.is_some());
        }
    });
    assert!(
        lines > 400 && with_data > 0,
        "only {lines} lines, {with_data} of them with data, were compared"
    );
}

/// Parses the counters of a line; `None` if one is abbreviated or missing.
fn counts(words: &[&str]) -> Option<Counts> {
    let number = |i: usize| words.get(i)?.parse().ok();
    Some(Counts {
        conns: number(0)?,
        in_packets: number(1)?,
        out_packets: number(2)?,
        in_bytes: number(3)?,
        out_bytes: number(4)?,
    })
}

#[test]
fn counters_are_listed_as_by_ipvsadm() {
    let names = Names::from_texts("", SERVICES);
    let mut compared = 0;
    for (title, format) in [("InBytes", Format::Stats), ("InBPS", Format::Rate)] {
        listings(title, |text| {
            let mut service = None;
            for line in text.lines() {
                let words: Vec<&str> = line.split_whitespace().collect();
                let stats = |counts: Option<Counts>| {
                    counts.map(|counts| Stats {
                        shown: counts,
                        rates: counts,
                        live: Counts::default(),
                    })
                };
                let mut one = match words[..] {
                    ["TCP" | "UDP" | "SCTP", at, ..] => {
                        let protocol = match words[0] {
                            "TCP" => Protocol::TCP,
                            "UDP" => Protocol::UDP,
                            _ => Protocol::SCTP,
                        };
                        let Some(address) = endpoint(at, protocol, &names) else {
                            service = None;
                            continue;
                        };
                        let id = match protocol {
                            Protocol::TCP => ServiceId::Tcp { address },
                            Protocol::UDP => ServiceId::Udp { address },
                            _ => ServiceId::Sctp { address },
                        };
                        service = Some((id, protocol));
                        let Some(stats) = stats(counts(&words[2..])) else {
                            continue;
                        };
                        (id, stats, None)
                    }
                    ["->", at, ..] => {
                        let Some(((id, protocol), stats)) = service.zip(stats(counts(&words[2..])))
                        else {
                            continue;
                        };
                        let Some(server) = endpoint(at, protocol, &names) else {
                            continue;
                        };
                        (id, stats, Some(server))
                    }
                    _ => {
                        service = None;
                        continue;
                    }
                };
                let info = ServiceInfo {
                    service: one.0,
                    config: ServiceConfig::new(Family::V4, "rr"),
                    owner: None,
                    stats: one.1,
                    refused: 0,
                    refusals: Vec::new(),
                    drops: Vec::new(),
                    servers: one
                        .2
                        .take()
                        .map(|server| ServerInfo {
                            stats: one.1,
                            ..ServerInfo::new(server, ServerConfig::new(1, Forwarding::Nat))
                        })
                        .into_iter()
                        .collect(),
                };
                let options = ListOptions {
                    format,
                    numeric: line
                        .split_whitespace()
                        .nth(1)
                        .and_then(|at| at.rsplit_once(':'))
                        .is_some_and(|(_, port)| port.parse::<u16>().is_ok()),
                    exact: true,
                    ..ListOptions::default()
                };
                let mut out = String::new();
                render::services(&mut out, vec![info], &options, &names);
                assert_eq!(out.lines().last(), Some(line));
                compared += 1;
            }
        });
    }
    assert!(compared > 500, "only {compared} lines were compared");
}
