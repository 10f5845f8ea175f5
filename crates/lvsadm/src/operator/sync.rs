//! `lvsadm sync`: the replication with peers.

use std::time::{Duration, Instant};

use lvs_core::ServiceKey;
use lvs_core::api::{Call, Info, PeerInfo, Standing, SyncState, TablesInfo, TablesState};

use super::{Outcome, Trouble, Words, connect, duration};
use crate::invocation::Invocation;
use crate::session::json;

/// Interval between two readings of the state.
const PERIOD: Duration = Duration::from_millis(100);
/// A peer is silent if it has sent nothing for this many milliseconds. Peers compare their
/// connections every two seconds.
const UNHEARD: u64 = 4_000;

pub(super) fn run(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    if let Some(word) = words.free.first() {
        return Err(Trouble::Usage(format!("{word}: unexpected argument")));
    }
    let wait = duration(words, "--wait")?.unwrap_or_default();
    let waits = words.value("--wait").is_some();
    let until = Instant::now() + wait;
    let mut client = connect(run)?;
    let state = loop {
        let state: SyncState = client.call(&Call::SyncGet {})?;
        if state.ready || Instant::now() >= until {
            break state;
        }
        std::thread::sleep(PERIOD);
    };
    if run.json {
        json(run, &state)?;
        writeln!(run.output)?;
    } else {
        let info: Info = client.call(&Call::Info {})?;
        let message = text(&state) + &announced(&info);
        run.output.write_all(message.as_bytes())?;
    }
    Ok(u8::from(waits && !state.ready))
}

fn text(state: &SyncState) -> String {
    if state.peers.is_empty() {
        return "no peers: configure them with [sync.peers] in lvsd.toml, or with lvs-dataplane --sync-peer; a dataplane reads them at its start\n".to_owned();
    }
    let mut text = match state.ready {
        true => "ready".to_owned(),
        false => format!("not ready: {}", state.waits_for),
    };
    text.push_str(&format!(
        "\n{} connections are replicated to peers\n\n{:<28}{:<9}{:>10}{:>10}{:>10}  {:<30}{}\n",
        state.replicated,
        "peer",
        "state",
        "owns",
        "borrowed",
        "missing",
        "last full sync",
        "receives"
    ));
    for peer in &state.peers {
        text.push_str(&line(peer));
    }
    text.push_str(&tables(state));
    let counts = [
        (
            "connections refused: sender is no configured peer",
            state.refused_address,
        ),
        (
            "connections refused: too many at the same time",
            state.refused_places,
        ),
        ("connections refused: wrong key", state.refused_key),
        ("forged or changed frames", state.forged),
        ("frames of an unknown format", state.malformed),
        ("invalid replicated connections", state.nonsense),
        ("replicated connections dropped: table full", state.no_room),
        ("missing connections replicated again", state.repairs),
        ("repeated full syncs", state.full_syncs),
        (
            "services not compared because of the limit",
            state.tables_beyond,
        ),
    ];
    let counts = counts.into_iter().filter(|(_, count)| *count > 0);
    for (n, (name, count)) in counts.enumerate() {
        let first = if n == 0 { "\n" } else { "" };
        text.push_str(&format!("{first}{name}: {count}\n"));
    }
    text
}

/// Formats the result of the comparison of services and servers with each peer, and the services
/// that differ.
fn tables(state: &SyncState) -> String {
    let mut text = String::new();
    for (n, info) in state.tables.iter().enumerate() {
        if n == 0 {
            text.push_str(&format!(
                "\n{:<28}services and servers of the peer\n",
                "peer"
            ));
        }
        text.push_str(&format!("{:<28}{}\n", info.peer, comparison(info)));
        let peer = state.peers.iter().find(|peer| peer.address == info.peer);
        let shown = peer.map_or(&[][..], |peer| &peer.tables);
        for one in shown {
            let (service, seconds) = (ServiceKey::from(one.service), one.seconds);
            let how = match (one.here, one.there) {
                (_, false) => "only on this director",
                (false, true) => "only on the peer",
                (true, true) => "differs",
            };
            text.push_str(&format!("    {service} {how}, for {seconds} s\n"));
        }
        let more = info.differ.saturating_sub(shown.len() as u64);
        if more > 0 {
            text.push_str(&format!("    and {more} more\n"));
        }
    }
    text
}

fn comparison(info: &TablesInfo) -> String {
    let services = match info.differ {
        1 => "1 service differs".to_owned(),
        n => format!("{n} services differ"),
    };
    match info.state {
        TablesState::Unknown => "not known".to_owned(),
        TablesState::Older => "not compared: the peer runs an older version".to_owned(),
        TablesState::Alike => "alike".to_owned(),
        TablesState::Differ => format!("{services}, for {} s", info.seconds),
        TablesState::Alarm => format!("ALARM: {services}, for {} s", info.seconds),
    }
}

/// Formats the virtual addresses that are announced by routes.
fn announced(info: &Info) -> String {
    if info.announced.is_empty() {
        return String::new();
    }
    let mut text = format!("\n{:<40}{}\n", "virtual address", "announced routes");
    for vip in &info.announced {
        let standing = match vip.standing {
            Standing::Announced => "announced",
            Standing::Leaving => "leaving: routers prefer other directors",
            Standing::Withdrawn => "withdrawn",
        };
        text.push_str(&format!("{:<40}{standing}\n", vip.address));
        if !vip.trouble.is_empty() {
            text.push_str(&format!("    {}\n", vip.trouble));
        }
    }
    if let Some(ago) = info.announced_ago.filter(|ago| *ago > 3) {
        text.push_str(&format!(
            "the list of addresses to announce was not renewed for {ago} s: check whether lvsd runs\n"
        ));
    }
    text
}

fn line(peer: &PeerInfo) -> String {
    let bulk = match (peer.bulk_connections, peer.bulk_ms, peer.bulk_ago) {
        (Some(count), Some(took), Some(ago)) => format!("{count} in {took} ms, {ago} s ago"),
        _ => "-".to_owned(),
    };
    let listens = match (peer.listens, peer.lag_ms) {
        (true, Some(lag)) => format!("{lag} ms behind"),
        (true, None) => "yes".to_owned(),
        (false, _) => "no".to_owned(),
    };
    let mut line = format!(
        "{:<28}{:<9}{:>10}{:>10}{:>10}  {bulk:<30}{listens}\n",
        peer.address, peer.state, peer.replicated, peer.borrowed, peer.missing
    );
    if !peer.trouble.is_empty() {
        line.push_str(&format!("    {}\n", peer.trouble));
    } else if let Some(ago) = peer.heard_ms.filter(|ago| *ago >= UNHEARD) {
        line.push_str(&format!("    silent for {} s\n", ago / 1000));
    }
    line
}

#[cfg(test)]
mod tests {
    use lvs_core::api::AnnouncedVip;

    use super::*;

    #[test]
    fn lvsadm_sync_shows_standing_and_faults_of_announced_addresses() {
        assert!(announced(&Info::default()).is_empty());
        let vip = |address: &str, standing, trouble: &str| AnnouncedVip {
            address: address.parse().expect("the address is valid"),
            standing,
            trouble: trouble.to_owned(),
        };
        let info = Info {
            announced: vec![
                vip("192.0.2.10", Standing::Announced, ""),
                vip("2001:db8::10", Standing::Leaving, ""),
                vip(
                    "192.0.2.11",
                    Standing::Withdrawn,
                    "the host already has one",
                ),
            ],
            announced_ago: Some(12),
            ..Info::default()
        };
        let message = announced(&info);
        for part in [
            "192.0.2.10                              announced\n",
            "2001:db8::10                            leaving: routers prefer other directors",
            "192.0.2.11                              withdrawn\n    the host already has one\n",
            "was not renewed for 12 s",
        ] {
            assert!(message.contains(part), "no {part:?} in {message}");
        }
    }

    #[test]
    fn lvsadm_sync_shows_state_lag_and_faults_of_peers() {
        assert!(text(&SyncState::default()).contains("--sync-peer"));
        let peer = PeerInfo {
            address: "192.0.2.2:8848".parse().expect("the address is valid"),
            state: "refused".to_owned(),
            trouble: "the peer has another key".to_owned(),
            replicated: 0,
            borrowed: 0,
            missing: 0,
            heard_ms: Some(5_100),
            bulk_connections: Some(7),
            bulk_ms: Some(12),
            bulk_ago: Some(3),
            listens: true,
            lag_ms: Some(4),
            tables: Vec::new(),
        };
        let silent = PeerInfo {
            state: "silent".to_owned(),
            trouble: String::new(),
            ..peer.clone()
        };
        assert!(line(&silent).ends_with("\n    silent for 5 s\n"));
        assert!(
            !line(&peer).contains("silent for"),
            "the silence is reported in addition to a reason"
        );
        let compared = PeerInfo {
            heard_ms: Some(3_999),
            ..silent
        };
        assert_eq!(line(&compared).lines().count(), 1);
        let state = SyncState {
            waits_for: "192.0.2.2:8848: the peer has another key".to_owned(),
            peers: vec![peer],
            replicated: 5,
            forged: 2,
            ..SyncState::default()
        };
        let message = text(&state);
        for part in [
            "not ready: 192.0.2.2:8848: the peer has another key\n",
            "5 connections are replicated",
            "7 in 12 ms, 3 s ago",
            "4 ms behind",
            "    the peer has another key\n",
            "\nforged or changed frames: 2\n",
        ] {
            assert!(message.contains(part), "no {part:?} in {message}");
        }
        assert!(!message.contains("table full"));
    }

    #[test]
    fn lvsadm_sync_shows_comparison_of_services_with_each_peer() {
        let peer = |last: u8| format!("192.0.2.{last}:8848");
        let text = format!(
            r#"{{"tables": [
                {{"peer": "{}", "state": "alarm", "differ": 3, "seconds": 45}},
                {{"peer": "{}", "state": "alike"}},
                {{"peer": "{}", "state": "older"}},
                {{"peer": "{}", "state": "unknown"}},
                {{"peer": "{}", "state": "differ", "differ": 1, "seconds": 2}}],
              "peers": [{{"address": "{}", "state": "in step", "tables": [
                {{"service": {{"protocol": "tcp", "address": "203.0.113.10:80"}}, "seconds": 45, "here": true, "there": true}},
                {{"service": {{"protocol": "tcp", "address": "203.0.113.10:81"}}, "seconds": 9, "here": false, "there": true}}]}}],
              "tables_beyond": 7}}"#,
            peer(2),
            peer(3),
            peer(4),
            peer(5),
            peer(6),
            peer(2)
        );
        let state: SyncState = serde_json::from_str(&text).expect("the JSON is valid");
        let message = super::text(&state);
        for part in [
            "192.0.2.2:8848              ALARM: 3 services differ, for 45 s\n    TCP 203.0.113.10:80 differs, for 45 s\n    TCP 203.0.113.10:81 only on the peer, for 9 s\n    and 1 more\n",
            "192.0.2.3:8848              alike\n",
            "192.0.2.4:8848              not compared: the peer runs an older version\n",
            "192.0.2.5:8848              not known\n",
            "192.0.2.6:8848              1 service differs, for 2 s\n",
            "services not compared because of the limit: 7\n",
        ] {
            assert!(message.contains(part), "no {part:?} in {message}");
        }
    }
}
