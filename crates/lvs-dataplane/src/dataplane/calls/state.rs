//! Calls about the dataplane's state, such as its threads, interfaces and counters.

use std::net::IpAddr;

use lvs_core::Instant;
use lvs_core::api::{
    ANNOUNCED_MAX, AnnounceSpec, Announcements, Failure, FailureCode, FilterItem, Info,
    InterfaceInfo, LocalAddressInfo, LocalInfo, MarkText, ReasonCount, ReturnPath, ServiceId,
    SyncCounts, SyncState,
};
use lvs_core::filter::FilterLists;
use serde_json::Value;

use super::end;
use crate::dataplane::fixes;
use crate::dataplane::handle::Handle;
use crate::dataplane::report::{Report, shares, sync};
use crate::dataplane::worker::Worker;
use crate::fast_path::FastPath;
use crate::host::view::View;
use lvs_packet::net::PortId;
use lvs_process::server::Sink;
use lvs_sys::lock;

impl Handle {
    /// The sum of the counters of all packet workers.
    fn report(&self) -> Result<Report, Failure> {
        let all = self.threads.ask(Worker::report)?;
        let all = all.into_iter().reduce(Report::add);
        Ok(all.expect("at least one packet worker exists"))
    }

    /// The state of the dataplane.
    ///
    /// # Errors
    /// A packet worker or the keeper does not answer.
    pub fn info(&self) -> Result<Info, Failure> {
        let report = self.report()?;
        self.context.fold();
        let mut workers = report.workers.clone();
        let (ftp_ports, total) = {
            let control = self.context.control();
            for (number, counts) in control.shard_counts().enumerate() {
                if let Some(worker) = workers.iter_mut().find(|w| w.number as usize == number) {
                    worker.counts = counts;
                }
            }
            (control.ftp_ports().to_vec(), control.total_stats())
        };
        let mut info = Info {
            pid: std::process::id(),
            uptime: self.context.uptime().as_secs(),
            ftp_ports,
            connections: report.connections,
            capacity: report.capacity,
            too_big: report.common.oversize.all(),
            total,
            workers,
            fast_path: self.context.fast_path_info(),
            sync: self.sync_counts(&report),
            confinement: self.confinement(),
            peers: self
                .peers()
                .map_or_else(Vec::new, |peers| peers.standings()),
            tables: self
                .peers()
                .map_or_else(Vec::new, |peers| peers.tables_info()),
            ..Info::default()
        };
        let fast_path = self.context.fast_path();
        info.interfaces = interfaces(
            &self.context.view(),
            &report,
            fast_path.map(|fast_path| &**fast_path),
            self.context.now(),
        );
        (
            info.own_vips,
            info.conflicts,
            info.silent_hops,
            (info.waiting, info.local_clients),
            (info.announced, info.announced_ago),
        ) = self.threads.ask_keeper(|keeper, reply| {
            let _ = reply.send((
                keeper.answered_vips(),
                keeper.conflicts(),
                keeper.silent_hops(),
                (keeper.waiting(), keeper.local_clients()),
                keeper.announcements(),
            ));
        })?;
        info.waiting
            .extend(self.peers().and_then(|peers| peers.waiting()));
        Ok(info)
    }

    fn sync_counts(&self, report: &Report) -> SyncCounts {
        let mut counts = self.threads.daemons.counts.read();
        counts.queue_full += report.unsynced;
        counts
    }

    /// The state of replication with peers.
    pub(super) fn sync_state(&self) -> SyncState {
        let alone = || SyncState {
            ready: true,
            ..SyncState::default()
        };
        self.peers().map_or_else(alone, |peers| peers.report())
    }

    /// Sets the addresses that are announced by routes, [`ANNOUNCED_MAX`] at most.
    pub(super) fn announce(&self, spec: AnnounceSpec) -> Result<Announcements, Failure> {
        let count = spec.addresses.len();
        if count > ANNOUNCED_MAX {
            return Err(Failure::new(
                FailureCode::Invalid,
                format!(
                    "the list has {count} addresses to announce: the maximum is {ANNOUNCED_MAX}"
                ),
            ));
        }
        let announced = self.threads.ask_keeper(move |keeper, reply| {
            keeper.announce(&spec);
            let _ = reply.send(keeper.announcements().0);
        })?;
        Ok(Announcements { announced })
    }

    /// The counters of packets by reason, with the counts of the last five minutes.
    pub(super) fn reasons(&self) -> Result<Vec<ReasonCount>, Failure> {
        let mut reasons = self.counted_reasons()?;
        lock(&self.recent).apply(&mut reasons, self.context.now());
        Ok(reasons)
    }

    /// Samples the counters of packets by reason, unless a worker does not answer.
    pub(in crate::dataplane) fn sample_reasons(&self) {
        if let Ok(reasons) = self.counted_reasons() {
            lock(&self.recent).sample(&reasons, self.context.now());
        }
    }

    fn counted_reasons(&self) -> Result<Vec<ReasonCount>, Failure> {
        let report = self.report()?;
        let templates = self.context.control().evicted_templates();
        let mut reasons = report.reasons(templates);
        reasons.extend(sync(&self.sync_counts(&report)));
        if let Some(fast_path) = self.context.fast_path() {
            reasons.extend(shares(&fast_path.shares()));
        }
        let view = self.context.view();
        for reason in reasons.iter_mut().filter(|reason| reason.packets.count > 0) {
            let fix = fixes::of_route(&reason.reason, &view.tables);
            reason.fix = fix.unwrap_or(std::mem::take(&mut reason.fix));
        }
        Ok(reasons)
    }

    pub(super) fn list_marks(&self, out: &mut Sink<'_>) -> Result<Value, Failure> {
        let rules = self.context.control().marks().clone();
        let taken = self.report()?.marked;
        for (number, rule) in rules.iter().enumerate() {
            out.item(&MarkText {
                position: number + 1,
                rule: rule.to_string(),
                packets: taken.get(number).copied().unwrap_or(0),
            })?;
        }
        end(out)
    }

    /// Sends the allow and deny lists of the director and of all services, each in pieces of up to
    /// 1,000 networks.
    pub(super) fn list_filters(&self, out: &mut Sink<'_>) -> Result<Value, Failure> {
        const PIECE: usize = 1000;
        let filters: Vec<_> = self.context.control().filters().collect();
        for (key, filter) in filters {
            let service = key.map(ServiceId::from);
            let FilterLists { allow, deny } = filter.lists();
            let allow = allow.chunks(PIECE).map(|piece| (piece, &[][..]));
            let deny = deny.chunks(PIECE).map(|piece| (&[][..], piece));
            for (allow, deny) in allow.chain(deny) {
                let (allow, deny) = (allow.to_vec(), deny.to_vec());
                out.item(&FilterItem {
                    service,
                    lists: FilterLists { allow, deny },
                })?;
            }
        }
        end(out)
    }

    /// The host that forwarded the latest indirect reply of a server to a through-VIP health check,
    /// even if later replies arrived directly.
    pub(super) fn return_path(&self, server: IpAddr) -> Result<ReturnPath, Failure> {
        let all = self
            .threads
            .ask(move |worker| worker.forwarder_of(server))?;
        let forwarder = all.into_iter().flatten().next();
        Ok(ReturnPath { forwarder })
    }

    /// The local addresses of full NAT with their numbers of connections, and whether hairpin is
    /// set.
    pub(super) fn local_info(&self) -> Result<LocalInfo, Failure> {
        let (pool, hairpin) = {
            let control = self.context.control();
            let (pool, hairpin) = control.local_pool();
            (pool.to_vec(), hairpin)
        };
        let addresses: Vec<_> = pool.iter().map(|local| local.addr).collect();
        let counts = self.threads.ask(move |worker| {
            let shard = &worker.decider().shard;
            let count = |&addr| shard.local_connections(addr);
            addresses.iter().map(count).collect::<Vec<u64>>()
        })?;
        let addresses = pool.iter().enumerate().map(|(place, local)| {
            let counts = counts.iter().filter_map(|counts| counts.get(place));
            LocalAddressInfo {
                address: local.addr,
                first: local.first,
                last: local.last,
                connections: counts.sum(),
            }
        });
        Ok(LocalInfo {
            addresses: addresses.collect(),
            hairpin,
        })
    }
}

/// Returns the interfaces in use. With the TUN backend, that is the TUN device.
fn interfaces(
    view: &View,
    report: &Report,
    fast_path: Option<&FastPath>,
    now: Instant,
) -> Vec<InterfaceInfo> {
    let tables = &view.tables;
    let served = |port: PortId| report.ports.iter().find(|(known, ..)| *known == port);
    if tables.is_routed() {
        let device = tables.port(PortId::HOP);
        let device = device.map(|device| InterfaceInfo {
            name: device.name.to_string(),
            backend: "tun".to_owned(),
            mtu: u16::MAX.into(),
            up: tables
                .state
                .link(device.ifindex)
                .is_some_and(|link| link.up),
            down_since: None,
            lost: served(PortId::HOP).map_or(0, |(_, _, lost)| *lost),
            fast_path: None,
            no_xdp: None,
        });
        return device.into_iter().collect();
    }
    let interfaces = tables.interfaces().filter_map(|(port, known)| {
        let (_, backend, lost) = served(port)?;
        Some(InterfaceInfo {
            name: known.name.to_string(),
            backend: (*backend).to_owned(),
            mtu: known.info.mtu,
            up: known.down.is_none(),
            down_since: known.down.map(|down| now.saturating_since(down).as_secs()),
            lost: *lost,
            fast_path: fast_path.map(|fast_path| {
                let place = match fast_path.has_xdp(known.ifindex) {
                    true => "xdp",
                    false => "tc",
                };
                place.to_owned()
            }),
            no_xdp: fast_path.and_then(|fast_path| fast_path.no_xdp(known.ifindex)),
        })
    });
    interfaces.collect()
}
