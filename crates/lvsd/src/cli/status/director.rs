//! The lines of `lvsd status` about the director: its file, cluster, sources, peers and dataplane.

use std::fmt::Write as _;

use lvs_api::daemon::{AdminEntry, DirectorSeen, DirectorStatus, SourceStatus, Status};
use lvs_api::words::{counted, lasted};
use lvs_core::api::{PeerStanding, ReasonCount, TablesInfo, TablesState};

use super::services::packets_text;
use crate::verdict;

/// Maximum number of reasons in the line about dropped packets.
const DROPS_MAX: usize = 3;

/// Lines about maintenance, VRRP, announcements and warnings.
pub(super) fn director(status: &DirectorStatus, now: u64) -> String {
    let mut text = String::new();
    match &status.maintenance {
        Some(wish) => {
            let ago = lasted(now.saturating_sub(wish.since));
            let who = wish.who.as_deref().unwrap_or("?");
            let _ = write!(text, "this director is IN MAINTENANCE for {ago} by {who}");
            let _ = match &wish.why {
                Some(why) => writeln!(text, ": {why}"),
                None => writeln!(text),
            };
        }
        None => text.push_str("this director is not in maintenance\n"),
    }
    if let Some(vrrp) = &status.vrrp {
        let _ = write!(
            text,
            "keepalived: {}, {}; track file: {}",
            vrrp.state,
            match vrrp.active {
                true => "active",
                false => "not active",
            },
            vrrp.track
        );
        if !vrrp.ready {
            let _ = write!(text, "; NOT READY, waits for {}", vrrp.waits_for);
        }
        if vrrp.ignored > 0 {
            let _ = write!(text, "; {} lines in the FIFO were invalid", vrrp.ignored);
        }
        text.push('\n');
        for trouble in &vrrp.trouble {
            let _ = writeln!(text, "keepalived: {trouble}");
        }
    }
    if let Some(announce) = &status.announce {
        if !announce.ready {
            let effect = match status.missing_peers.is_empty() {
                true => "this director announces no addresses",
                false => "routers prefer other directors",
            };
            let _ = writeln!(
                text,
                "{effect}: NOT READY, waits for {}",
                announce.waits_for
            );
        }
        if !announce.trouble.is_empty() {
            let _ = writeln!(
                text,
                "the state of the announcements is unknown: {}",
                announce.trouble
            );
        }
        for vip in &announce.addresses {
            let _ = write!(text, "{}: {}", vip.address, vip.standing.name());
            let _ = match vip.trouble.as_str() {
                "" => writeln!(text),
                trouble => writeln!(text, "; {trouble}"),
            };
        }
    }
    for warning in &status.warnings {
        let _ = writeln!(text, "warning: {warning}");
    }
    text
}

/// Lines about the director without its services.
pub(super) fn of_director(status: &Status, now: u64) -> String {
    let mut text = format!(
        "lvsd {} (pid {}), up {}; {}\n",
        status.version,
        status.pid,
        lasted(status.uptime),
        dataplane(status)
    );
    let loaded = &status.loaded;
    // The message is empty if the file was loaded at the start.
    if !loaded.message.is_empty() {
        let ago = lasted(now.saturating_sub(loaded.time));
        let _ = writeln!(text, "{} ago: {}", ago, loaded.message);
    } else {
        let _ = writeln!(text, "configuration: {}", status.config);
    }
    let _ = write!(text, "lvsd is {}", status.confinement);
    let _ = match &status.dataplane.confinement {
        Some(confinement) => writeln!(text, "; the dataplane is {confinement}"),
        None => writeln!(text),
    };
    if !status.director.is_alone() {
        text.push_str(&director(&status.director, now));
    }
    for source in &status.sources {
        source_line(&mut text, source, now);
    }
    for director in &status.directors {
        director_line(&mut text, director, &status.directors);
    }
    for (title, lines) in [
        ("left out", &status.left_out),
        ("refused by the dataplane", &status.refused),
        ("changed by hand", &status.drift),
    ] {
        for line in lines {
            let _ = writeln!(text, "{title}: {line}");
        }
    }
    for entry in &status.admin {
        let spec = &entry.spec;
        let (state, target) = (spec.state.name(), spec.target);
        let _ = writeln!(text, "{state}: {target}, {}", times_of(entry, now));
    }
    if let Some(sync) = &status.dataplane.sync {
        let lost = [sync.queue_full, sync.not_sent, sync.lost, sync.too_long]
            .iter()
            .sum::<u64>();
        let refused = sync.malformed + sync.other_id + sync.nonsense + sync.no_room;
        let _ = writeln!(
            text,
            "synchronisation: {} messages sent, {} received; {} connections of other directors stored; messages and connections: {lost} lost, {refused} refused",
            sync.sent, sync.received, sync.taken
        );
    }
    fault_lines(&mut text, status);
    // While the dataplane is disconnected, its last report is out of date.
    if status.dataplane.connected {
        drops_line(&mut text, &status.dataplane.drops);
        for peer in &status.dataplane.peers {
            let mut tables = status.dataplane.tables.iter();
            peer_line(&mut text, peer, tables.find(|one| one.peer == peer.peer));
        }
    }
    if let Some(proxy) = &status.proxy {
        let _ = writeln!(
            text,
            "proxied connections: {} (maximum {}); {} refused at the maximum, {} evicted, {} refused without a usable server, or by a limit or filter",
            proxy.connections, proxy.most, proxy.full, proxy.evicted, proxy.refused
        );
    }
    text
}

/// The duration of an override, the operator who set it, its remaining time, and the operator's
/// reason.
pub(super) fn times_of(entry: &AdminEntry, now: u64) -> String {
    let spec = &entry.spec;
    let who = spec.who.as_deref().unwrap_or("?");
    let mut text = format!("for {} by {who}", lasted(now.saturating_sub(entry.since)));
    if let Some(until) = spec.until {
        let _ = write!(text, ", ends in {}", lasted(until.saturating_sub(now)));
    }
    if let Some(why) = &spec.why {
        let _ = write!(text, ": {why}");
    }
    text
}

pub(super) fn fault_lines(text: &mut String, status: &Status) {
    for fault in verdict::faults(status) {
        let _ = writeln!(text, "{fault}");
    }
}

/// Appends a line about the first [`DROPS_MAX`] reasons of dropped packets, and the number of the
/// other reasons. A reason without packets in the last minute is omitted.
fn drops_line(text: &mut String, drops: &[ReasonCount]) {
    let drops = drops.iter().filter(|drop| drop.packets.last_minute > 0);
    let drops: Vec<_> = drops.collect();
    let mut parts: Vec<String> = drops
        .iter()
        .take(DROPS_MAX)
        .map(|reason| packets_text(&reason.reason, &reason.packets))
        .collect();
    match drops.len().saturating_sub(DROPS_MAX) {
        _ if drops.is_empty() => return,
        0 => {}
        more => parts.push(counted(more, "other reason")),
    }
    let _ = writeln!(
        text,
        "dropped in five minutes: {}. To do: `lvsadm drops` lists the meaning and the fix of each reason",
        parts.join(", ")
    );
}

fn source_line(text: &mut String, source: &SourceStatus, now: u64) {
    let _ = write!(text, "{} {}: ", source.kind, source.name);
    let _ = match (source.known, source.answered) {
        (false, _) => write!(text, "NOT KNOWN YET"),
        (true, at) => {
            let items = match source.revision {
                // Each service and each server is one key in etcd.
                Some(revision) => {
                    format!("{}, revision {revision}", counted(source.items, "key"))
                }
                None if source.kind == "kubernetes" => counted(source.items, "service"),
                None => counted(source.items, "server"),
            };
            match at {
                Some(at) => write!(text, "{items}, {} ago", lasted(now.saturating_sub(at))),
                None => write!(text, "{items}, from before the start of lvsd"),
            }
        }
    };
    if source.refused > 0 {
        let refused = counted(source.refused, "object");
        let _ = write!(text, "; {refused} REFUSED");
    }
    if let Some(leader) = &source.leader {
        let _ = write!(text, "; {leader} writes addresses");
    }
    if source.held > 0 {
        let held = counted(source.held, "service");
        let _ = write!(text, "; lvsd leaves {held} of the dataplane unchanged");
    }
    text.push('\n');
}

/// Appends the replication state of a peer, and whether its service tables equal those of this
/// director.
fn peer_line(text: &mut String, peer: &PeerStanding, tables: Option<&TablesInfo>) {
    let _ = write!(text, "peer {}: ", peer.peer.ip());
    let _ = match peer.state.as_str() {
        "in step" => write!(text, "in step"),
        state => {
            let missing = match peer.missing {
                0 => String::new(),
                count => format!(", {count} connections missing"),
            };
            let state = match state {
                "bulk" => "IN A FULL SYNC".to_owned(),
                state => state.to_uppercase(),
            };
            write!(text, "{state} for {}{missing}", lasted(peer.seconds))
        }
    };
    match tables {
        Some(tables) => tables_part(text, tables),
        None => text.push('\n'),
    }
}

fn tables_part(text: &mut String, tables: &TablesInfo) {
    let services = || {
        let services = counted(
            usize::try_from(tables.differ).unwrap_or(usize::MAX),
            "service",
        );
        format!(
            "differs from this director in {services}, for {}",
            lasted(tables.seconds)
        )
    };
    let printed = match tables.state {
        TablesState::Unknown => "services and servers not compared".to_owned(),
        TablesState::Older => {
            "the peer runs an older version, services and servers not compared".to_owned()
        }
        TablesState::Alike => "the same services and servers as this director".to_owned(),
        TablesState::Differ => services(),
        TablesState::Alarm => format!("ALARM: {}; `lvsadm sync` lists the differences", services()),
    };
    let _ = writeln!(text, "; {printed}");
}

/// Appends a line about a director, and whether it has other services than this one.
fn director_line(text: &mut String, director: &DirectorSeen, all: &[DirectorSeen]) {
    let _ = write!(
        text,
        "director {}: revision {}, {} with {}",
        director.name,
        director.revision,
        counted(director.services, "service"),
        counted(director.servers, "server")
    );
    let own = all.iter().find(|one| one.own);
    for (is, words) in [
        (director.own, "this one"),
        (!director.ready, "NOT READY"),
        (director.maintenance, "in maintenance"),
        (director.left_out, "ignores some invalid services"),
        (
            own.is_some_and(|own| own.digest != director.digest),
            "HAS OTHER SERVICES",
        ),
    ] {
        if is {
            let _ = write!(text, "; {words}");
        }
    }
    text.push('\n');
}

fn dataplane(status: &Status) -> String {
    let dataplane = &status.dataplane;
    match (dataplane.connected, dataplane.pid) {
        (true, Some(pid)) => {
            let version = dataplane.version.as_deref();
            let version = version.map(|version| format!(" {version}"));
            let mut text = format!("dataplane{} (pid {pid})", version.unwrap_or_default());
            if dataplane.is_other_version(&status.version) {
                let _ = write!(
                    text,
                    ", NOT the version of lvsd; restart the dataplane to use the installed version"
                );
            }
            if let Some(seconds) = verdict::late_seconds(dataplane) {
                let _ = write!(text, ", NO ANSWER for {}", lasted(seconds));
            }
            text
        }
        (true, None) => "the dataplane answers".to_owned(),
        (false, _) if dataplane.idle => "no dataplane is needed".to_owned(),
        (false, _) => "NO DATAPLANE answers; see the log of lvsd for the reason".to_owned(),
    }
}
