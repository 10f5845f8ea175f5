//! The counters of packet workers.

use std::sync::Arc;

use lvs_core::api::{ReasonCount, SyncCounts, WorkerInfo};
use lvs_core::recent::RecentCount;
use lvs_core::stats::Evictions;
use lvs_core::{AcceptReason, DropReason};

use super::decider::Decider;
use super::fixes;
use crate::fast_path::Shares;
use lvs_packet::common::Common;
use lvs_packet::drop::FrameDrop;
use lvs_packet::net::PortId;
use lvs_packet::pipeline::{Counters, Pipeline};

/// Counters of one worker, or sums over several workers.
pub(super) struct Report {
    pub(super) connections: u64,
    pub(super) capacity: u64,
    /// Number of packets that each mark rule has matched.
    pub(super) marked: Vec<u64>,
    frames: Counters,
    drops: [u64; DropReason::ALL.len()],
    accepts: [u64; AcceptReason::ALL.len()],
    evicted: Evictions,
    /// Number of packets dropped because a neighbour did not answer, or too many packets waited for
    /// it.
    unresolved: u64,
    /// Number of frames that could not be sent.
    pub(super) unsent: u64,
    /// Number of requests to the keeper that were dropped because the queue, or the list of local
    /// clients, was full.
    pub(super) unasked: u64,
    /// Number of synchronisation messages dropped because their queue was full.
    pub(super) unsynced: u64,
    /// For each port: the name of its backend, and the number of received frames that were lost,
    /// usually because the worker was too slow.
    pub(super) ports: Vec<(PortId, &'static str, u64)>,
    pub(super) workers: Vec<WorkerInfo>,
    pub(super) common: Arc<Common>,
}

impl Report {
    pub(super) fn of(decider: &Decider, pipeline: &Pipeline) -> Self {
        let counters = &pipeline.counters;
        let worker = WorkerInfo {
            number: u32::try_from(decider.shard.number()).unwrap_or(u32::MAX),
            cpu: None,
            connections: decider.shard.len() as u64,
            capacity: decider.shard.capacity() as u64,
            packets: counters.received,
            lost: 0,
            handed_over: counters.handed_over,
            taken: counters.taken,
            busy: counters.dropped_for(FrameDrop::WorkerBusy),
            demoted: 0,
            // `Handle::info` sets these counts.
            counts: lvs_core::stats::Counts::default(),
        };
        Self {
            workers: vec![worker],
            connections: decider.shard.len() as u64,
            capacity: decider.shard.capacity() as u64,
            marked: decider.marked.clone(),
            frames: pipeline.counters.clone(),
            drops: decider.drops,
            accepts: decider.accepts,
            evicted: decider.shard.evictions(),
            unresolved: pipeline.held.dropped,
            unsent: 0,
            unasked: 0,
            unsynced: 0,
            ports: Vec::new(),
            common: pipeline.common().clone(),
        }
    }

    /// Adds the counters of another worker of the director.
    pub(super) fn add(mut self, other: Self) -> Self {
        let add = |ours: &mut [u64], theirs: &[u64]| {
            ours.iter_mut().zip(theirs).for_each(|(a, b)| *a += b);
        };
        self.connections += other.connections;
        self.capacity += other.capacity;
        self.frames += &other.frames;
        add(&mut self.marked, &other.marked);
        add(&mut self.drops, &other.drops);
        add(&mut self.accepts, &other.accepts);
        self.evicted += other.evicted;
        self.unresolved += other.unresolved;
        self.unsent += other.unsent;
        self.unasked += other.unasked;
        self.unsynced += other.unsynced;
        self.workers.extend(other.workers);
        self.workers.sort_unstable_by_key(|worker| worker.number);
        for (port, backend, lost) in other.ports {
            match self.ports.iter_mut().find(|(known, ..)| *known == port) {
                Some((_, _, all)) => *all += lost,
                None => self.ports.push((port, backend, lost)),
            }
        }
        self
    }

    /// Counters of the director's decisions by reason; `templates` is the number of evicted
    /// persistence templates.
    pub(super) fn decisions(&self, templates: u64) -> impl Iterator<Item = ReasonCount> + '_ {
        let drops = DropReason::ALL.iter().zip(self.drops).map(|(drop, count)| {
            let texts = [drop.name(), drop.describe(), fixes::of_drop(*drop)];
            reason("drop", count, texts)
        });
        let accepts = AcceptReason::ALL.iter().zip(self.accepts);
        let accepts = accepts.map(|(accept, count)| {
            let fix = fixes::of_accept(*accept);
            reason("host", count, [accept.name(), accept.describe(), fix])
        });
        let evicted = [
            (self.evicted.half_open, fixes::EVICTED_HALF_OPEN),
            (self.evicted.ended, fixes::EVICTED_ENDED),
            (self.evicted.unused, fixes::EVICTED_UNUSED),
            (self.evicted.idle, fixes::EVICTED_IDLE),
            (templates, fixes::EVICTED_TEMPLATE),
        ];
        let evicted = evicted.map(|(count, texts)| reason("drop", count, texts));
        drops.chain(evicted).chain(accepts)
    }

    /// The counters of packet workers by reason; those of synchronisation and of the kernel fast
    /// path are separate. `templates`: as for [`decisions`](Self::decisions).
    pub(super) fn reasons(&self, templates: u64) -> Vec<ReasonCount> {
        let frames = FrameDrop::ALL
            .iter()
            // The director's decisions already include these two reasons.
            .filter(|drop| !matches!(drop, FrameDrop::Verdict | FrameDrop::Rejected))
            .map(|&drop| {
                let texts = [drop.name(), drop.describe(), fixes::of_frame(drop)];
                reason("drop", self.frames.dropped_for(drop), texts)
            });
        let mut all: Vec<ReasonCount> = frames.chain(self.decisions(templates)).collect();
        let missed = self.ports.iter().map(|(.., lost)| lost).sum();
        all.extend([
            reason("drop", self.unsent, fixes::NOT_SENT),
            reason("drop", missed, fixes::NOT_RECEIVED),
            reason(
                "drop",
                self.common.rate_limit.suppressed(),
                fixes::ICMP_LIMITED,
            ),
            reason("drop", self.common.reassembler.expired(), fixes::INCOMPLETE),
            reason("host", self.frames.tagged, fixes::VLAN),
            reason("drop", self.unresolved, fixes::NO_NEIGHBOUR),
            reason("drop", self.unasked, fixes::KEEPER_BUSY),
        ]);
        all
    }
}

/// Counters of the fates of frames in the kernel fast path.
pub(super) fn shares(shares: &Shares) -> impl Iterator<Item = ReasonCount> + use<> {
    let counts = [
        shares.requests,
        shares.replies,
        shares.xdp,
        shares.unknown,
        shares.unpublished,
        shares.unfit,
        shares.other,
        shares.waiting,
        shares.lost,
    ];
    let texts = fixes::KERNEL.into_iter().zip(counts);
    texts.map(|((action, texts), count)| reason(action, count, texts))
}

/// Counters of losses and refusals of synchronisation.
pub(super) fn sync(counts: &SyncCounts) -> impl Iterator<Item = ReasonCount> + use<> {
    let texts = counts.losses().into_iter().zip(fixes::SYNC);
    texts.map(|((name, count), [help, fix])| reason("sync", count, [name, help, fix]))
}

fn reason(action: &str, count: u64, texts: [&str; 3]) -> ReasonCount {
    let [reason, help, fix] = texts.map(ToOwned::to_owned);
    ReasonCount {
        action: action.to_owned(),
        reason,
        packets: RecentCount {
            count,
            ..RecentCount::default()
        },
        help,
        fix,
    }
}
