//! Metrics about the cooperation with other directors, and about the sources of servers and
//! services.

use std::fmt;
use std::net::SocketAddr;

use lvs_api::daemon::{DirectorSeen, DirectorStatus, SourceStatus, Status, VrrpStatus};
use lvs_core::api::{Info, PeerStanding, SyncCounts, TablesInfo, TablesState};

use super::Out;
use crate::clock::unix_time;
use crate::cluster::vrrp_states;

/// Writes whether the director is in maintenance, and its VRRP state.
pub(super) fn alone_or_not(out: &mut Out<'_>, director: &DirectorStatus) -> fmt::Result {
    metrics! { out;
        gauge "lvs_maintenance" u32::from(director.maintenance.is_some()),
            "Whether the director is in maintenance by `lvsd maintenance`";
    }
    match &director.vrrp {
        Some(vrrp) => self::vrrp(out, vrrp),
        None => Ok(()),
    }
}

fn vrrp(out: &mut Out<'_>, vrrp: &VrrpStatus) -> fmt::Result {
    let states = vrrp_states().map(|state| ([("state", state)], u32::from(state == vrrp.state)));
    metrics! { out;
        gauges "lvs_vrrp_state" states,
            "1 for the last state of the director that keepalived has reported";
        gauge "lvs_vrrp_active" u32::from(vrrp.active),
            "Whether this director may own the virtual addresses: keepalived has reported MASTER, and the dataplane is ready or has not answered yet";
        gauge "lvs_vrrp_ready" u32::from(vrrp.ready),
            "Whether the dataplane has received the connections of its peers";
        gauge "lvs_vrrp_track" i64::from(vrrp.track),
            "The number that keepalived adds to the priority because of the track file";
        counter "lvs_vrrp_transitions" vrrp.changes,
            "Number of changes of state that keepalived has reported";
        counter "lvs_vrrp_ignored_lines" vrrp.ignored,
            "Lines in keepalived's FIFO that were invalid or too long";
        gauge "lvs_vrrp_troubles" vrrp.trouble.len(),
            "Number of reasons why the track file cannot be written, or keepalived's FIFO cannot be read";
    }
    Ok(())
}

/// Writes the dataplane's announcements to routers, the state of its peers, and whether their
/// services and servers differ from this director's.
pub(super) fn dataplane(out: &mut Out<'_>, info: &Info) -> fmt::Result {
    if !info.announced.is_empty() {
        let announced = info.announced.iter();
        metrics! { out;
            gauges "lvs_announced"
                announced.map(|vip| ([("address", vip.address.to_string())], vip.standing as u32)),
                "Announcement of a virtual address to routers: 2 announced, 1 announced so that routers prefer other directors, 0 not announced";
        }
    }
    if !info.peers.is_empty() {
        peers(out, &info.peers)?;
    }
    if !info.tables.is_empty() {
        tables(out, &info.tables)?;
    }
    Ok(())
}

/// Writes the counters of synchronisation daemons.
pub(super) fn synchronisation(out: &mut Out<'_>, counts: &SyncCounts) -> fmt::Result {
    let directions = |counts: [u64; 2]| {
        let directions = [[("direction", "sent")], [("direction", "received")]];
        directions.into_iter().zip(counts)
    };
    let losses = counts.losses().into_iter();
    metrics! { out;
        counters "lvs_sync_messages" directions([counts.sent, counts.received]),
            "Synchronisation messages that were sent and received";
        counters "lvs_sync_bytes" directions([counts.sent_bytes, counts.received_bytes]),
            "Bytes of synchronisation messages";
        counter "lvs_sync_taken" counts.taken,
            "Connections of peers that were taken over or updated";
        counters "lvs_sync_lost" losses.map(|(reason, count)| ([("reason", reason)], count)),
            "Synchronisation messages and connections that were lost or refused, by reason";
    }
    Ok(())
}

/// The label `peer` of another director, with its address.
fn label(peer: SocketAddr) -> [(&'static str, String); 1] {
    [("peer", peer.ip().to_string())]
}

/// Writes for each peer whether this director has received its connections, for how long it has
/// not, and how many are missing.
fn peers(out: &mut Out<'_>, all: &[PeerStanding]) -> fmt::Result {
    let each =
        |value: fn(&PeerStanding) -> u64| all.iter().map(move |one| (label(one.peer), value(one)));
    metrics! { out;
        gauges "lvs_peer_in_step" each(|one| u64::from(one.is_in_step())),
            "Whether all replicated connections of a peer have arrived";
        gauges "lvs_peer_out_of_step_seconds" each(|one| one.seconds),
            "Seconds since a peer was last in step; 0 while the peer is in step";
        gauges "lvs_peer_missing" each(|one| one.missing),
            "Lower bound of replicated connections of a peer that are missing on this director";
    }
    Ok(())
}

/// Writes whether peers have the same services and servers as this director, so that all of them
/// choose the same servers.
fn tables(out: &mut Out<'_>, all: &[TablesInfo]) -> fmt::Result {
    let each =
        |value: fn(&TablesInfo) -> u64| all.iter().map(move |one| (label(one.peer), value(one)));
    metrics! { out;
        gauges "lvs_peer_tables_compared" each(|one| {
                u64::from(!matches!(one.state, TablesState::Unknown | TablesState::Older))
            }),
            "Whether a peer sends digests of its services and servers, so that they are compared with this director's";
        gauges "lvs_peer_tables_differ" each(|one| one.differ),
            "Services that differ between a peer and this director, or that only one of them has";
        gauges "lvs_peer_tables_alarm" each(|one| u64::from(one.state == TablesState::Alarm)),
            "Whether services of a peer and this director have differed for too long: the directors choose different servers for a client";
    }
    Ok(())
}

/// Writes the metrics of DNS, etcd and Kubernetes as sources of servers and services, and of the
/// directors that load their services from the same etcd.
pub(super) fn sources(out: &mut Out<'_>, status: &Status) -> fmt::Result {
    if status.sources.is_empty() {
        return Ok(());
    }
    let each = |value: fn(&SourceStatus) -> Option<u64>| {
        let sources = status.sources.iter();
        sources.filter_map(move |one| {
            let labels = [("kind", one.kind.as_str()), ("name", &one.name)];
            Some((labels, value(one)?))
        })
    };
    let now = unix_time();
    let ages = each(|source| source.answered).map(|(labels, at)| (labels, now.saturating_sub(at)));
    metrics! { out;
        gauges "lvs_source_up"
            each(|source| Some((source.trouble.is_none() && source.answered.is_some()).into())),
            "Whether a source (a name in DNS, etcd or Kubernetes) answered the last query";
        gauges "lvs_source_age_seconds" ages,
            "Age of the last answer of a source, in seconds; absent if no answer has arrived since lvsd started";
        gauges "lvs_source_items" each(|source| Some(source.items as u64)),
            "Servers of a name in DNS, keys of services and servers in etcd, or services of Kubernetes";
        counters "lvs_source_answers" each(|source| Some(source.answers)),
            "Number of times that a source answered, or reported a change";
        counters "lvs_source_failures" each(|source| Some(source.failures)),
            "Number of times that a source did not answer, or sent an unusable answer";
    }
    let refused =
        |source: &SourceStatus| (source.kind == "kubernetes").then_some(source.refused as u64);
    if each(refused).next().is_some() {
        metrics! { out;
            gauges "lvs_source_refused" each(refused),
                "Objects of Kubernetes that lvsd refuses";
        }
    }
    metrics! { out;
        gauge "lvs_left_out" status.left_out.len(),
            "Parts of source answers that lvsd does not use, as listed by `lvsd status`";
    }
    if status.directors.is_empty() {
        return Ok(());
    }
    let all = || {
        let all = status.directors.iter();
        all.map(|director| ([("director", director.name.as_str())], director))
    };
    let own = status.directors.iter().find(|director| director.own);
    let differs = |director: &DirectorSeen| own.is_some_and(|own| own.digest != director.digest);
    metrics! { out;
        gauges "lvs_director_revision" all().map(|(label, director)| (label, director.revision)),
            "The etcd revision of the last change that a director has loaded";
        gauges "lvs_director_differs"
            all().map(|(label, director)| (label, u32::from(differs(director)))),
            "Whether a director has loaded other services from etcd than this one";
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use lvs_api::daemon::Maintenance;

    use super::super::*;
    use super::*;
    use crate::api::overview::tests::snapshot;

    #[test]
    fn vrrp_metrics_exist_only_with_vrrp_status_and_maintenance_metric_always() {
        let text = |snapshot| open_metrics(Arc::new(snapshot), counters::Counts::default());
        let mut snapshot = snapshot("web");
        let alone = text(snapshot.clone());
        assert!(alone.contains("lvs_maintenance 0\n") && !alone.contains("lvs_vrrp"));
        snapshot.status.director.maintenance = Some(Maintenance::default());
        snapshot.status.director.vrrp = Some(VrrpStatus {
            state: "backup".to_owned(),
            ready: true,
            track: -20,
            changes: 3,
            ignored: 2,
            trouble: vec!["cannot write it".to_owned()],
            ..VrrpStatus::default()
        });
        let text = text(snapshot);
        for line in [
            "lvs_maintenance 1\n",
            "lvs_vrrp_state{state=\"backup\"} 1\n",
            "lvs_vrrp_state{state=\"master\"} 0\n",
            "lvs_vrrp_active 0\n",
            "lvs_vrrp_ready 1\n",
            "lvs_vrrp_track -20\n",
            "lvs_vrrp_transitions_total 3\n",
            "lvs_vrrp_ignored_lines_total 2\n",
            "lvs_vrrp_troubles 1\n",
        ] {
            assert!(text.contains(line), "no {line:?} in {text}");
        }
    }

    #[test]
    fn metrics_report_state_of_each_source_and_difference_of_each_director() {
        let mut snapshot = snapshot("web");
        let source = |kind: &str, answered| SourceStatus {
            kind: kind.to_owned(),
            name: "x".to_owned(),
            answered,
            failures: 7,
            ..SourceStatus::default()
        };
        let director = |name: &str, own| DirectorSeen {
            name: name.to_owned(),
            own,
            revision: 12,
            digest: name.to_owned(),
            ..DirectorSeen::default()
        };
        snapshot.status.sources = vec![
            source("dns", None),
            source("etcd", Some(unix_time())),
            SourceStatus {
                refused: 3,
                ..source("kubernetes", Some(unix_time()))
            },
        ];
        snapshot.status.directors = vec![director("d1", true), director("d2", false)];
        let text = open_metrics(Arc::new(snapshot), counters::Counts::default());
        for line in [
            "lvs_source_up{kind=\"dns\",name=\"x\"} 0\n",
            "lvs_source_up{kind=\"etcd\",name=\"x\"} 1\n",
            "lvs_source_age_seconds{kind=\"etcd\",name=\"x\"} ",
            "lvs_source_failures_total{kind=\"dns\",name=\"x\"} 7\n",
            "lvs_source_refused{kind=\"kubernetes\",name=\"x\"} 3\n",
            "lvs_left_out 0\n",
            "lvs_director_revision{director=\"d2\"} 12\n",
            "lvs_director_differs{director=\"d1\"} 0\n",
            "lvs_director_differs{director=\"d2\"} 1\n",
        ] {
            assert!(text.contains(line), "no {line:?} in {text}");
        }
        assert!(
            !text.contains("lvs_source_age_seconds{kind=\"dns\""),
            "{text}"
        );
    }
}
